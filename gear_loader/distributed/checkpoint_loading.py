"""Loads a rank's table from a checkpoint of many ranks, with as many ranks or another number."""

from __future__ import annotations

import os
from typing import Any

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.loading import (
    LoadOptions,
    Share,
    discard,
    load_share,
    retry_if_replaced,
    was_replaced,
)
from gear_loader.checkpoint.opening import place_of
from gear_loader.checkpoint.sharded import ShardsManifest, open_shards, read_shards
from gear_loader.checkpoint.sharded_loading import own_share, resharded_share
from gear_loader.distributed.checkpoint_ranks import CheckpointRanks
from gear_loader.errors import CheckpointError
from gear_loader.storage.schema import Schema
from gear_loader.storage.table import Table
from gear_loader.utils.paths import path_or_address


def load(path: str | os.PathLike[str], options: LoadOptions, ranks: CheckpointRanks) -> Table:
    """Create this rank's table from what `save` wrote; see `gear_loader.distributed.load`."""
    stage = ranks.folder
    where = place_of(path)
    where = where if stage is None else os.path.join(where, stage)
    expected = None if options.schema is None else Schema(options.schema)

    def share(directory: Directory, shards: ShardsManifest) -> Share:
        if ranks.size == len(shards.shards):
            return own_share(directory, shards, ranks.rank)
        return resharded_share(directory, shards, ranks.rank, ranks.size)

    def attempt() -> Table | None:
        seen: list[ShardsManifest] = []

        def look() -> dict[str, Any]:
            path_or_address(path)
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
                    tables.append(load_share(Table, directory, share(directory, seen[0]), options))
                except CheckpointError:
                    if not was_replaced(lambda: read_shards(directory).save, seen[0].save):
                        raise
            return {"loaded": bool(tables)}

        try:
            if all(other["loaded"] for other in ranks.run("load its table", read)):
                return tables.pop()
        finally:
            for table in tables:
                discard(table)
        return None

    return retry_if_replaced(attempt, where)


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
