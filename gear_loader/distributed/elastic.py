"""Checkpoints of a job: saved by so many ranks, loaded by as many or by others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from gear_loader.distributed import checkpoint
from gear_loader.distributed.exchange import Exchange, SingleProcess
from gear_loader.distributed.shards import Shards
from gear_loader.distributed.topology import Place, places_of
from gear_loader.errors import SchemaError
from gear_loader.storage.rules import OnFull
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table

__all__ = ["load", "save"]


class _Stage:
    """The ranks of one pipeline stage, among which a checkpoint is agreed on."""

    def __init__(self, exchange: SingleProcess, places: list[Place]) -> None:
        self._exchange = exchange
        self.place = places[exchange.rank]
        members = [rank for rank, place in enumerate(places) if place.stage == self.place.stage]
        self._members = sorted(members, key=lambda rank: places[rank].data)
        self.size = len(self._members)
        self.stages = 1 + max(place.stage for place in places)

    def agree(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """See `checkpoint.Agree`. All stages agree at the same time, each for itself."""
        answers = self._exchange.share(said)
        return [answers[rank] for rank in self._members]

    @property
    def folder(self) -> str | None:
        """The directory where this stage's tables lie in the checkpoint's, where there are several; else None."""
        return None if self.stages == 1 else f"stage-{self.place.stage}"


def save(shards: Shards, path: str | os.PathLike[str], *, progress: bool = False) -> None:
    """Save the tables of all ranks; called by all of them at the same time, between batches.

    Each rank writes its own table, as `Table.save` does, and what the last save holds of it already is not written
    again. Rank 0 writes the manifest of all last: until then the previous checkpoint counts, whatever happens to
    whichever rank. Every stage of a pipeline has a directory of its own in `path`. Priorities that a dataset has learnt
    are in its `state_dict`.

    Args:
        shards: what `Shards` made.
        path: a directory that all ranks see: with such a checkpoint, an empty one, or one that is made here.
        progress: show a progress bar if standard error is a terminal.

    Raises:
        RankError: another rank has failed, or is lost; the message names it.
        CheckpointError: as `Table.save`. The previous checkpoint is as it was.
        SchemaError: the shards are several tables of one process, each of which has a `save` of its own.
    """
    if len(shards.own) > 1:
        raise SchemaError(
            f"The shards are {len(shards.own)} tables of one process; save each of them, or run a rank for each."
        )
    stage = _Stage(shards.exchange, shards.places)
    checkpoint.save(
        shards.table,
        path,
        rank=stage.place.data,
        world_size=stage.size,
        barrier=shards.exchange.barrier,
        agree=stage.agree,
        stage=stage.folder,
        progress=progress,
    )


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
    """This rank's table out of what `save` wrote; called by all ranks at the same time.

    With as many ranks as saved each gets its own table back. With another number trajectories are dealt so that all
    ranks get about as many steps. Nothing is lost; ids, priorities, ages and times sampled stay. Give the table to
    `Shards`.

    Args:
        path: as for `save`.
        mesh: as for `Shards`.
        timeout: seconds that ranks wait for each other, and so for the slowest to read its part.
        name: of this rank's table, another one on each rank.
        schema, max_steps, max_trajectories, block_steps, max_blocks, on_full, progress: as for `Table.load`; by default
            each rank gets its part of what the saved tables had together, or as much as it needs if that is more.

    Raises:
        RankError: another rank has failed, or is lost; the message names it.
        CheckpointError: there is no checkpoint, or it is damaged or does not fit. No table is left, on any rank.
        SchemaError, RegionError: as `Table.create`.
    """
    options: dict[str, Any] = {
        "schema": schema,
        "name": name,
        "max_steps": max_steps,
        "max_trajectories": max_trajectories,
        "block_steps": block_steps,
        "max_blocks": max_blocks,
        "on_full": on_full,
        "progress": progress,
    }
    if not (dist.is_available() and dist.is_initialized()):
        return checkpoint.load(path, rank=0, world_size=1, **options)
    ranks, places = places_of(mesh)
    exchange = Exchange(ranks, timeout=timeout)
    try:
        stage = _Stage(exchange, places)
        return checkpoint.load(
            path,
            rank=stage.place.data,
            world_size=stage.size,
            agree=stage.agree,
            stage=stage.folder,
            **options,
        )
    finally:
        exchange.close()
