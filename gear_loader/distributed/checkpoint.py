"""Checkpoints of a job: saved by all ranks, loaded by as many ranks or another number."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from gear_loader.checkpoint.loading import LoadOptions
from gear_loader.distributed import checkpoint_loading, checkpoint_saving
from gear_loader.distributed.checkpoint_ranks import CheckpointRanks
from gear_loader.distributed.rank_exchange import Exchange, SingleProcess
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.topology import MeshCoordinates, places_of, this_node
from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table
from gear_loader.storage.table_rules import OnFull


def save(shards: ShardTables, path: str | os.PathLike[str], *, progress: bool = False) -> None:
    """Save the tables of all ranks; all ranks call it at the same time, between batches.

    Each rank writes its own table like `Table.save`, only what is new since the previous save. Rank 0 writes the
    manifest of all tables last: until then the previous checkpoint stays valid, whatever happens to any rank. Each
    stage of a pipeline has its own directory in `path`. The priorities of a dataset are in its `state_dict`.

    Args:
        shards: the sharded table.
        path: directory that all ranks can access: one with such a checkpoint, an empty one, or one to create. Or an
            address, as for `Table.save`; there files of the save before are copied within the store.
        progress: whether to show a progress bar, if standard error is a terminal.

    Raises:
        RankError: another rank has failed, or is lost; the message names it.
        CheckpointError: as `Table.save`. The previous checkpoint is unchanged.
        SchemaError: the shards are several tables of one process, each of which has a `save` of its own.
    """
    if len(shards.own) > 1:
        raise SchemaError(
            f"The shards are {len(shards.own)} tables of one process; save each of them, or run a rank for each."
        )
    ranks = CheckpointRanks(shards.exchange, shards.places)
    checkpoint_saving.save(shards.table, path, ranks, progress=progress)


def load(
    path: str | os.PathLike[str],
    *,
    mesh: Any = None,
    timeout: float = 600.0,
    schema: Mapping[str, Column] | None = None,
    name: str | None = None,
    max_steps: int | None = None,
    max_trajectories: int | None = None,
    block_steps: int | None = None,
    max_blocks: int | None = None,
    on_full: OnFull | None = None,
    progress: bool = False,
) -> Table:
    """Load this rank's table from a checkpoint that `save` wrote; all ranks call it at the same time.

    With the same number of ranks each gets its own table back. With another number, trajectories are distributed anew
    in the order of their ids, so that all ranks get about the same number of steps. No trajectory is lost. Ids,
    priorities, ages and times sampled stay the same; the counts of rate limiters are divided in proportion; later
    trajectories get ids above all earlier ones. Every byte that is used is checked while it is read. Give the table to
    `Shards`.

    Args:
        path: as for `save`.
        mesh: as for `Shards`.
        timeout: seconds that ranks wait for each other, so for the slowest one to read its share.
        name: name of this rank's table; a different one on each rank.
        schema, max_steps, max_trajectories, block_steps, max_blocks, on_full, progress: as for `Table.load`; by default
            each rank gets its share of the sizes of the saved tables, or as much as it needs if that is more.

    Raises:
        RankError: another rank has failed, or is lost; the message names it.
        CheckpointError: the checkpoint is missing or damaged, or does not fit. No table is left, on any rank.
        SchemaError, RegionError: as `Table.create`.
    """
    options = LoadOptions(
        schema=schema,
        name=name,
        max_steps=max_steps,
        max_trajectories=max_trajectories,
        block_steps=block_steps,
        max_blocks=max_blocks,
        on_full=on_full,
        progress=progress,
    )
    if not (dist.is_available() and dist.is_initialized()):
        alone = CheckpointRanks(SingleProcess(), [MeshCoordinates(0, 0)])
        return checkpoint_loading.load(path, options, alone)
    ranks, places = places_of(mesh)
    exchange = Exchange(ranks, timeout=timeout, node=this_node())
    try:
        return checkpoint_loading.load(path, options, CheckpointRanks(exchange, places))
    finally:
        exchange.close()
