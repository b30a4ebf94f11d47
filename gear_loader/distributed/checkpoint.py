"""Checkpoints of a job's tables, one a rank: saved with so many ranks, loaded with as many or with others.

`gear_loader.checkpoint.sharded` says what lies in the directory, which all ranks have to see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.housekeeping import convert_errors, locked, remove_checkpoint
from gear_loader.checkpoint.identity import identity, set_parent
from gear_loader.checkpoint.loading import fill, retry_if_replaced, was_replaced
from gear_loader.checkpoint.names import SHARDS_NAME
from gear_loader.checkpoint.saving import save_into as save_table
from gear_loader.checkpoint.sharded import (
    Shard,
    ShardsManifest,
    check_shard_links,
    check_shards_directory,
    link_shard,
    next_number,
    open_shards,
    read_shards,
    remove_shard,
    shard_folder,
    shard_of,
    sweep_saves,
    write_shards,
)
from gear_loader.checkpoint.sharded_loading import own_share, resharded_share
from gear_loader.errors import CheckpointError, RankError, SchemaError
from gear_loader.storage.ids import LARGEST_ORIGIN
from gear_loader.storage.rules import OnFull
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table import Table
from gear_loader.utils.notices import notice

__all__ = ["Agree", "load", "save"]

Agree = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Takes what this rank says (JSON) and returns what all said, in the order of the ranks; raises when one is lost."""


# Agreement -------------------------------------------------------------------------------------------


class _Ranks:
    """This rank among the others: what one of them cannot do is an error of all.

    Attributes:
        lost: whether the others do not answer any more, so that nobody knows what they have heard from here.
    """

    def __init__(self, rank: Any, world_size: Any, agree: Agree | None) -> None:
        for name, value in (("rank", rank), ("world_size", world_size)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise SchemaError(f"{name} is {value!r}; expected an integer.")
        if not 1 <= world_size <= LARGEST_ORIGIN + 1 or not 0 <= rank < world_size:
            raise SchemaError(
                f"rank is {rank} and world_size is {world_size}; expected a world_size from 1 to "
                f"{LARGEST_ORIGIN + 1:,}, and a rank from 0 to world_size - 1."
            )
        self.rank, self.size, self._agree = int(rank), int(world_size), agree
        self.lost = False

    def together(self, what: str, act: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Do something at the same time as the others.

        Args:
            what: it is called so in errors.
            act: does it, and returns what the others are to know (JSON).

        Returns:
            What all ranks have said, in their order; of this one alone if there is nobody to ask.

        Raises:
            RankError: another one has failed, or is lost. What `act` raises is raised here as it is.
        """
        failed: Exception | None = None
        said: dict[str, Any] = {}
        try:
            said = act()
        except Exception as error:
            failed = error
        if self._agree is None:
            answers: list[dict[str, Any]] = [{"rank": self.rank, "error": None, "said": said}]
        else:
            answers = self._ask(what, said, failed)
        if failed is not None:
            raise failed
        errors = [f"rank {answer['rank']}: {answer['error']}" for answer in answers if answer["error"]]
        if errors:
            raise RankError(
                f"{len(errors)} of {self.size} ranks could not {what}, so this one (rank {self.rank}) gives up too. "
                f"{' '.join(errors)}"
            )
        return [answer["said"] for answer in answers]

    def _ask(self, what: str, said: dict[str, Any], failed: Exception | None) -> list[dict[str, Any]]:
        assert self._agree is not None
        error = None if failed is None else f"{type(failed).__name__}: {failed}"
        try:
            answers = self._agree({"rank": self.rank, "what": what, "error": error, "said": said})
        except Exception as lost:
            if failed is not None:
                raise failed from lost
            self.lost = True
            if isinstance(lost, RankError):
                raise
            raise RankError(
                f"Rank {self.rank} lost the others when all were to {what}: {lost}. Look for the one that failed first."
            ) from lost
        if failed is None and [(a["rank"], a["what"]) for a in answers] != [
            (r, what) for r in range(self.size)
        ]:
            found = [(a["rank"], a["what"]) for a in answers]
            raise RankError(
                f"Rank {self.rank} was to {what} with ranks 0 to {self.size - 1}, and got the answers {found}. "
                "Call it on all ranks at the same time, each with its own rank and the same world_size."
            )
        return answers


# Saving ----------------------------------------------------------------------------------------------


def save(
    table: Table,
    path: str | os.PathLike[str],
    *,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
    agree: Agree,
    stage: str | None = None,
    progress: bool = False,
) -> None:
    """Save the tables of all ranks into one directory; called by all of them at the same time.

    Each rank writes its own table, as `Table.save` does: what the save before holds of it already is not written again.
    Rank 0 writes the manifest of all when they have finished. Until that moment the previous checkpoint counts,
    whatever happens to whichever rank; the next save removes what is left of one that failed.

    Args:
        table: this rank's. All have the same schema, and different shard numbers (`Table.set_origin`).
        path: a directory that all ranks see: with such a checkpoint, an empty one, or one that is made here.
        rank, world_size: this process's place, and how many there are.
        barrier: waits for the other ranks.
        agree: an all-gather of JSON.
        stage: the directory in `path` that is meant, where each stage of a pipeline has one.
        progress: show a progress bar.

    Raises:
        RankError: another rank has failed, or is lost; the message names it.
        CheckpointError: as `Table.save`, or the tables do not fit together. The previous checkpoint is as it was.
        SchemaError: `rank` or `world_size` is none.
    """
    ranks = _Ranks(rank, world_size, agree)
    where = os.path.abspath(os.fspath(path))
    with contextlib.ExitStack() as stack:
        old: ShardsManifest | None = None
        top: Directory | None = None  # of rank 0

        def begin() -> dict[str, Any]:
            nonlocal old, top
            said: dict[str, Any] = {"origin": table.origin, "schema": table.schema.to_json()}
            if rank == 0:
                with convert_errors(where):
                    top = stack.enter_context(_directory(where, stage, make=True))
                    check_shards_directory(top)
                    stack.enter_context(locked(top))
                    old = _previous(top)
                    sweep_saves(top, old)
                    said.update(number=next_number(top, old), replaces=old.save if old else None)
            return said

        said = ranks.together("begin to save", begin)
        _check_alike(said)
        number = said[0]["number"]

        def write() -> dict[str, Any]:
            with convert_errors(where), _directory(where, stage) as directory:
                previous = _previous(directory) if rank else old
                if (previous.save if previous else None) != said[0]["replaces"]:
                    raise CheckpointError(
                        f"{directory.path} does not show rank {rank} the checkpoint that rank 0 sees there. Save into "
                        "a directory that all ranks share."
                    )
                return dataclasses.asdict(_write_shard(table, directory, previous, number, rank, progress))

        try:
            written = ranks.together("save their tables", write)
        except Exception:
            if not ranks.lost:  # else rank 0 may have heard of all, and name these files
                with contextlib.suppress(OSError), _directory(where, stage) as directory:
                    remove_shard(directory, number, rank)
            raise
        shards = ShardsManifest(
            table.schema,
            f"{1 + secrets.randbelow(2**63 - 1):016x}",
            number,
            tuple(Shard(**shard) for shard in written),
        )

        def commit() -> dict[str, Any]:
            if rank == 0:
                assert top is not None
                with convert_errors(where):
                    write_shards(top, shards)
            return {}

        ranks.together("complete the checkpoint", commit)
        if rank == 0:
            assert top is not None
            sweep_saves(top, shards)
        barrier()


def _directory(path: str, stage: str | None, *, make: bool = False) -> Directory:
    """Open the directory of a checkpoint of several tables, which is `stage` in `path` if that is given."""
    top = Directory.make(path) if make else Directory.open(path)
    if stage is None:
        return top
    with top:
        return top.open_or_make(stage) if make else top.child(stage)


def _previous(directory: Directory) -> ShardsManifest | None:
    return read_shards(directory) if directory.has(SHARDS_NAME) else None


def _write_shard(
    table: Table, directory: Directory, old: ShardsManifest | None, number: int, rank: int, progress: bool
) -> Shard:
    names = identity(table, table._live())
    if old is not None:
        check_shard_links(directory, old, *names)
    save, name = os.path.split(shard_folder(number, rank))
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(directory.open_or_make_all(save))
        parent.mkdir(name)
        folder = stack.enter_context(parent.child(name))
        if old is not None:
            try:
                link_shard(directory, old, *names, folder)
            except CheckpointError as error:
                notice(f"checkpoint {error}", f"{error} This table is saved anew as a whole.")
                remove_checkpoint(parent, name)
                parent.mkdir(name)
                folder = stack.enter_context(parent.child(name))
        save_table(table, folder, progress=progress)
        return shard_of(folder)


def _check_alike(said: list[dict[str, Any]]) -> None:
    """Check that the tables of all ranks can be parts of one checkpoint.

    Raises:
        CheckpointError: they cannot.
    """
    for rank, other in enumerate(said):
        if other["schema"] != said[0]["schema"]:
            raise CheckpointError(
                f"The tables of ranks 0 and {rank} have different schemas: {Schema.from_json(said[0]['schema'])} and "
                f"{Schema.from_json(other['schema'])}. Save others into another directory."
            )
    origins = [other["origin"] or 0 for other in said]
    for rank, origin in enumerate(origins):
        if origins.index(origin) != rank:
            raise CheckpointError(
                f"The tables of ranks {origins.index(origin)} and {rank} both have the shard number {origin}: ids of "
                "different trajectories may be the same. Call table.set_origin(rank) when a table is created."
            )


# Loading ---------------------------------------------------------------------------------------------


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
    """Create this rank's table from what `save` wrote, with as many ranks or with another number.

    With as many, each rank gets its own table back, with indices in the same order. With another number the
    trajectories are dealt so that all ranks get about as many steps, and stand in each table in the order of their ids.
    All keep their ids, priorities, ages and times sampled. The table is the shard `rank`, and its own numbering goes on
    above all ids that could have come from it. Every byte that is used is checked while it is read; a rank reads what
    it needs, in pieces of some MiB.

    The counts of rate limiters are divided: what each table has, and of the rest, and of the rows drawn, as much as of
    the trajectories.

    Args:
        path: the directory that `save` wrote, which all ranks see.
        rank, world_size: this process's place, and how many there are now.
        agree: as for `save`: then all ranks load, and the same checkpoint, or none does. Without it this rank asks
            nobody.
        stage: as for `save`.
        schema, name, on_full, progress: as for `Table.load`.
        max_steps, max_trajectories, block_steps, max_blocks: as for `Table.load`; by default this rank's part of what
            the saved tables had together, or as much as it needs if that is more.

    Raises:
        RankError: another rank has failed, or is lost; the message names it.
        CheckpointError: there is no checkpoint; it is damaged, of another version or schema, or does not fit into the
            given sizes; or the saved tables have different rules. The message names the file. No table is left.
        SchemaError, RegionError: as `Table.create`.
    """
    ranks = _Ranks(rank, world_size, agree)
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
            with _opened(where, stage) as directory:
                seen.append(_expected_shards(directory, expected))
            return {"save": seen[0].save}

        said = ranks.together("find the checkpoint", look)
        if any(other["save"] != said[0]["save"] for other in said):
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
            if all(other["loaded"] for other in ranks.together("load their tables", read)):
                return tables.pop()
        finally:
            for table in tables:
                _discard(table)
        return None

    return retry_if_replaced(attempt, where)


def _discard(table: Table) -> None:
    table.close()
    if table.name is not None:
        table.unlink()


def _opened(path: str, stage: str | None) -> Directory:
    """Open the directory that is loaded; `stage`, the last part of `path`, cannot be a link."""
    if stage is None:
        return open_shards(path)
    with open_shards(os.path.dirname(path)) as top:
        return top.child_to_load(stage)


def _expected_shards(directory: Directory, expected: Schema | None) -> ShardsManifest:
    shards = read_shards(directory)
    if expected is not None and expected.to_json() != shards.schema.to_json():
        raise CheckpointError(
            f"{directory.path} is of tables with the schema {shards.schema}; expected {expected}. Give the schema that "
            "was saved (or none), or load another checkpoint."
        )
    return shards


def _load_share(
    directory: Directory,
    shards: ShardsManifest,
    ranks: _Ranks,
    given: dict[str, int | None],
    name: str | None,
    on_full: OnFull | None,
    progress: bool,
) -> Table:
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
    if given["max_blocks"] is None:
        as_saved = all(size is None for size in given.values())
        sizes["max_blocks"] = share.sizes["max_blocks"] if as_saved else None
    rules = share.rules.rules
    table = Table.create(
        shards.schema,
        **sizes,  # type: ignore[arg-type]
        name=name,
        on_full=rules.on_full if on_full is None else on_full,
        rate_limiter=rules.rate_limiter,
        max_times_sampled=rules.max_times_sampled,
        max_age=rules.max_age,
    )
    try:
        fill(table, directory, share.parts, share.contents, progress=progress)
        set_parent(table, table._live(), share.parent)
    except BaseException:
        _discard(table)
        raise
    return table
