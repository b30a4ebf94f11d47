"""Loads a rank's table from a checkpoint of many ranks, with as many ranks or another number."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.identity import set_parent
from gear_loader.checkpoint.loading import fill, retry_if_replaced, was_replaced
from gear_loader.checkpoint.sharded import ShardsManifest, open_shards, read_shards
from gear_loader.checkpoint.sharded_loading import own_share, resharded_share
from gear_loader.distributed.checkpoint_ranks import Agree, CheckpointRanks
from gear_loader.errors import CheckpointError
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.rules import OnFull
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table import Table
from gear_loader.utils.paths import local_path

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    *,
    rank: int,
    world_size: int,
    agree: Agree | None = None,
    stage: str | None = None,
    schema: Mapping[str, Column] | None = None,
    name: str | None = None,
    max_steps: int | None = None,
    max_trajectories: int | None = None,
    block_steps: int | None = None,
    max_blocks: int | None = None,
    on_full: OnFull | None = None,
    progress: bool = False,
) -> Table:
    """Create this rank's table from what `save` wrote, with any number of ranks.

    With as many ranks as saved, each rank gets its own table back, with the same indices. With another number of
    ranks, trajectories are resharded: all ranks get about as many steps, in the order of the trajectories' ids. They
    keep their ids, priorities, ages and times sampled. The table is the shard `rank`, and numbers further trajectories
    above all ids that it may have given before. Every byte that is used is checked while it is read; a rank reads the
    data that it needs, in pieces of some MiB.

    The counts of rate limiters are divided in proportion to the trajectories.

    Args:
        path: directory that `save` wrote, which all ranks see.
        rank: number of this rank.
        world_size: number of ranks now.
        agree: as for `save`: then all ranks load the same checkpoint, or no rank loads. None: this rank loads alone.
        stage: as for `save`.
        schema, name, on_full, progress: as for `Table.load`.
        max_steps, max_trajectories, block_steps, max_blocks: as for `Table.load`; by default this rank's share of the
            sizes of the saved tables, or as much as it needs if that is more.

    Raises:
        RankError: another rank has failed, or is lost; the message names it.
        CheckpointError: there is no checkpoint; it is damaged, of another version or schema, or does not fit into the
            given sizes; or the saved tables have different rules. The message names the file. No table is left.
        SchemaError, RegionError: as `Table.create`.
    """
    ranks = CheckpointRanks(rank, world_size, agree)
    where = os.path.abspath(os.fspath(path))
    where = where if stage is None else os.path.join(where, stage)
    expected = None if schema is None else Schema(schema)
    given = {
        "max_steps": max_steps,
        "max_trajectories": max_trajectories,
        "block_steps": block_steps,
        "max_blocks": max_blocks,
    }

    def attempt() -> Table | None:
        seen: list[ShardsManifest] = []

        def look() -> dict[str, Any]:
            local_path(path)
            with _opened(where, stage) as directory:
                seen.append(_expected_shards(directory, expected))
            return {"save": seen[0].save}

        answers = ranks.run("find the checkpoint", look)
        if any(other["save"] != answers[0]["save"] for other in answers):
            return None
        tables: list[Table] = []

        def read() -> dict[str, Any]:
            with _opened(where, stage) as directory:
                try:
                    tables.append(_load_share(directory, seen[0], ranks, given, name, on_full, progress))
                except CheckpointError:
                    if not was_replaced(lambda: read_shards(directory).save, seen[0].save):
                        raise
            return {"loaded": bool(tables)}

        try:
            if all(other["loaded"] for other in ranks.run("load its table", read)):
                return tables.pop()
        finally:
            for table in tables:
                _discard(table)
        return None

    return retry_if_replaced(attempt, where)


def _discard(table: Table) -> None:
    """Close a table, and remove its shared memory."""
    table.close()
    if table.name is not None:
        table.unlink()


def _opened(path: str, stage: str | None) -> Directory:
    """Open the directory to load; `stage`, the last part of `path`, must not be a link."""
    if stage is None:
        return open_shards(path)
    with open_shards(os.path.dirname(path)) as top:
        return top.child_to_load(stage)


def _expected_shards(directory: Directory, expected: Schema | None) -> ShardsManifest:
    """Read the manifest, and check its schema."""
    shards = read_shards(directory)
    if expected is not None and expected.to_json() != shards.schema.to_json():
        raise CheckpointError(
            f"{directory.path} holds tables with the schema {shards.schema}; expected {expected}. Give the schema that "
            "was saved, leave schema out, or load another checkpoint."
        )
    return shards


def _load_share(
    directory: Directory,
    shards: ShardsManifest,
    ranks: CheckpointRanks,
    given: dict[str, int | None],
    name: str | None,
    on_full: OnFull | None,
    progress: bool,
) -> Table:
    """Create a table from this rank's share of a checkpoint."""
    same = ranks.size == len(shards.shards)
    share = (
        own_share(directory, shards, ranks.rank)
        if same
        else resharded_share(directory, shards, ranks.rank, ranks.size)
    )
    sizes: dict[str, int | None] = {
        **share.sizes,
        **{key: size for key, size in given.items() if size is not None},
    }
    blocks = sizes.pop("max_blocks")
    if given["max_blocks"] is None:
        as_saved = all(size is None for size in given.values())
        blocks = share.sizes["max_blocks"] if as_saved else None
    rules = share.rules.rules
    table = Table.create(
        shards.schema,
        **sizes,  # type: ignore[arg-type]
        memory=Memory(max_blocks=blocks),
        name=name,
        on_full=rules.on_full if on_full is None else on_full,
        rate_limiter=rules.rate_limiter,
        limits=rules.limits,
    )
    try:
        fill(table, directory, share.parts, share.contents, progress=progress)
        set_parent(table, table.index, share.parent)
    except BaseException:
        _discard(table)
        raise
    return table
