"""Which trajectories leave a shard, and how they are copied to another one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.shard_sampler import PrioritizedShardSampler
from gear_loader.distributed.shards import Shards
from gear_loader.distributed.stage_tables import StageTable
from gear_loader.errors import TableFullError, TransportError
from gear_loader.storage.operations import READY
from gear_loader.storage.recovery import ranges
from gear_loader.storage.table import Table, Ticket
from gear_loader.utils.arrays import Array

__all__ = ["Chosen", "Mover", "choose"]

_PART_BYTES = 1 << 24  # of trajectories that are copied at once
_ROUNDS = 4
_logger = logging.getLogger("gear_loader")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Trajectories that are to move.

    Attributes:
        ids, slots, generations, lengths: int64 [n].
        leaves: float32, of one after another; empty if selection does not go by priorities.
        counts: int64 [n]: how many leaves each has.
    """

    ids: Array
    slots: Array
    generations: Array
    lengths: Array
    leaves: Array
    counts: Array

    @classmethod
    def names(cls) -> list[str]:
        """Of the attributes."""
        return [field.name for field in dataclasses.fields(cls)]

    def to_arrays(self) -> dict[str, Array]:
        """For those who are told of it."""
        return {name: getattr(self, name) for name in self.names()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Chosen:
        """The inverse of `to_arrays`."""
        return cls(**arrays)

    def leaves_of(self, which: Array) -> Array:
        """Leaves of some of them, float32."""
        starts = np.cumsum(self.counts) - self.counts
        leaves: Array = self.leaves[ranges(starts[which], self.counts[which])]
        return leaves


def choose(
    engine: Any,
    *,
    by_mass: bool,
    amount: float,
    steps: int,
    count: int,
    block_steps: int,
    most_steps: int,
    without: Array | None,
) -> Chosen:
    """The newest trajectories of a shard, as many as fit. Those that share blocks with others stay.

    Args:
        amount: most load (steps or mass) of them together.
        steps, count: free steps and slots where they go to, in blocks of `block_steps`.
        most_steps: that may be moved.
        without: ids of those that have been chosen already.
    """
    table = engine.job.table
    ticket = Ticket()  # nothing takes another one's place meanwhile
    try:
        table.begin_read(ticket)
        chosen = _choose(engine, table, by_mass, amount, steps, count, block_steps, most_steps, without)
        ticket.end()
        return chosen
    finally:
        ticket.end()  # again: an exception may arrive anywhere


def _choose(
    engine: Any,
    table: Table,
    by_mass: bool,
    amount: float,
    steps: int,
    count: int,
    block_steps: int,
    most_steps: int,
    without: Array | None,
) -> Chosen:
    by_priority = isinstance(engine, PrioritizedShardSampler)
    view = engine.known() if by_priority else table.snapshot()
    view = view.take(~_sharing(table, view.slots))
    ids = table.ids(view.slots)
    if without is not None and len(without):
        view, ids = view.take(~np.isin(ids, without)), ids[~np.isin(ids, without)]
    leaves, counts = np.empty(0, dtype=np.float32), np.zeros(len(view), dtype=np.int64)
    loads: Array = view.lengths.astype(np.float64)
    if by_priority:
        leaves = engine.leaves_of(view.slots)
        counts = view.lengths if engine.job.selector.unit == "step" else np.ones_like(view.lengths)
    if by_mass:
        if by_priority:
            sums = np.concatenate(([0.0], np.cumsum(leaves, dtype=np.float64)))
            ends = np.cumsum(counts)
            loads = sums[ends] - sums[ends - counts]
        elif engine.job.selector.unit == "trajectory":
            loads = np.ones(len(view))
    taken = _fitting(
        loads, -(-view.lengths // block_steps) * block_steps, view.lengths, amount, steps, count, most_steps
    )
    starts = np.cumsum(counts) - counts
    return Chosen(
        ids[taken],
        view.slots[taken],
        view.generations[taken],
        view.lengths[taken],
        leaves[ranges(starts[taken], counts[taken])],
        counts[taken],
    )


def _fitting(
    loads: Array, padded: Array, lengths: Array, amount: float, steps: int, count: int, most_steps: int
) -> Array:
    """Positions of the newest that fit, int64 [m]: one after another, then smaller ones into what is left."""
    left = np.arange(len(loads))[::-1]
    taken: list[Array] = []
    for _ in range(_ROUNDS):
        fits = (
            (loads[left] > 0)
            & (loads[left] <= amount)
            & (padded[left] <= steps)
            & (lengths[left] <= most_steps)
        )
        left = left[fits]
        if len(left) == 0 or count <= 0:
            break
        inside = np.cumsum(loads[left]) <= amount
        inside &= (np.cumsum(padded[left]) <= steps) & (np.cumsum(lengths[left]) <= most_steps)
        size = min(len(left) if inside.all() else int(inside.argmin()), count)
        part, left = left[:size], left[size:]
        taken.append(part)
        amount -= float(loads[part].sum())
        steps, most_steps = steps - int(padded[part].sum()), most_steps - int(lengths[part].sum())
        count -= size
    return np.concatenate(taken) if taken else left[:0]


def _sharing(table: Table, slots: Array) -> Array:
    """Which trajectories have a block that another one has too, bool [n]."""
    extent, block_ids = table.index_arrays()
    counts = -(-extent[slots, 0] // table.region.layout.block_steps)
    blocks = block_ids[ranges(extent[slots, 1], counts)]
    times = np.bincount(blocks, minlength=1)[blocks] > 1
    shared: Array = (
        np.bincount(np.repeat(np.arange(len(slots)), counts), weights=times, minlength=len(slots)) > 0
    )
    return shared


class Mover:
    """Copies trajectories from this rank's tables to those of other shards.

    Args:
        slots_of: finds ids in a table of this rank.
    """

    def __init__(self, shards: Shards, slots_of: Callable[[int, Array], Array]) -> None:
        self._shards = shards
        self._slots_of = slots_of

    def copy(self, source: Table, ids: Array, shard: int, target: StageTable) -> None:
        """Copy those that are still there. What finds no room stays where it is: the target says what it has."""
        most = max(1, _PART_BYTES // source.schema.step_bytes)
        slots = self._slots_of(shard, ids)
        ids, slots = ids[slots >= 0], slots[slots >= 0]
        lengths = source.index_arrays()[0][slots, 0]
        parts = np.cumsum(lengths) // most
        for part in np.unique(parts).tolist():
            which = parts == part
            try:
                self._copy(source, ids[which], slots[which], target)
            except (TableFullError, TransportError) as error:
                _logger.warning("Some trajectories could not be moved: %s: %s", target, error)
                return

    def _copy(self, source: Table, ids: Array, slots: Array, target: StageTable) -> None:
        ticket = Ticket()
        try:
            source.begin_read(ticket)
            state, _, _ = source.slot_states()
            alive = (state[slots] == READY) & (source.ids(slots) == ids)
            ids, slots = ids[alive], slots[alive]
            trajectories = [_read(source, slot) for slot in slots.tolist()]
            priorities = source.priorities()[slots].copy()
            ticket.end()
        finally:
            ticket.end()  # again: an exception may arrive anywhere
        if len(ids) == 0:
            return
        if target.table is not None:
            # Nothing may be evicted for what could stay where it is.
            patient = Table(target.table.region, on_full="error")
            patient.store(trajectories, priorities, ids)
        else:
            for future in target.send(trajectories, priorities, ids):
                future.result()


def _read(table: Table, slot: int) -> dict[str, torch.Tensor]:
    """A copy of a trajectory that the caller's ticket keeps."""
    index = table._live()
    ids, length = index.row(slot), int(index.extent[slot, 0])
    return {name: table._read_column(name, ids, length) for name in table.schema}
