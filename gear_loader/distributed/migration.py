"""Migration of trajectories: the choice of trajectories that leave a shard, and their copying to another one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.shard_sampler import PrioritizedShardSampler
from gear_loader.distributed.stage_tables import StageTable
from gear_loader.errors import TableFullError, TransportError
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.reader import Snapshot
from gear_loader.storage.readers import Ticket
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["Budget", "MigrationSet", "Mover", "choose_migration"]

_PART_BYTES = 1 << 24  # bytes of trajectories that are copied at once
_ROUNDS = 4  # rounds in which smaller trajectories fill the remaining budget
_logger = logging.getLogger("gear_loader")


@dataclasses.dataclass(frozen=True)
class MigrationSet:
    """Trajectories that are to migrate from one shard to another.

    Attributes:
        ids, slots, generations, lengths: int64 [n].
        leaves: leaves of all trajectories, float32, concatenated; empty if rows are not drawn by priority.
        counts: number of leaves of each trajectory, int64 [n].
    """

    ids: Array
    slots: Array
    generations: Array
    lengths: Array
    leaves: Array
    counts: Array

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the attributes."""
        return [field.name for field in dataclasses.fields(cls)]

    def to_arrays(self) -> dict[str, Array]:
        """Return the attributes by name."""
        return {name: getattr(self, name) for name in self.names()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> MigrationSet:
        """Make a set from its attributes; the inverse of `to_arrays`."""
        return cls(**arrays)

    def leaves_of(self, which: Array) -> Array:
        """Return the leaves of the trajectories in positions `which`, float32."""
        starts = np.cumsum(self.counts) - self.counts
        leaves: Array = self.leaves[ranges(starts[which], self.counts[which])]
        return leaves


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of one migration.

    Attributes:
        load: most load (steps or mass) of the trajectories together.
        free_steps: free steps of the target, in blocks of `block_steps`.
        free_slots: free slots of the target.
        block_steps: steps of a block of the target.
        max_steps: most steps of the trajectories together.
    """

    load: float
    free_steps: int
    free_slots: int
    block_steps: int
    max_steps: int


def choose_migration(sampler: Any, budget: Budget, *, by_mass: bool, excluded: Array) -> MigrationSet:
    """Choose the newest trajectories of a shard, as many as the budget allows.

    Trajectories that share blocks with others stay.

    Args:
        sampler: shard sampler of the shard.
        budget: limits of the migration.
        by_mass: whether load is mass; else it is steps.
        excluded: ids of trajectories that have been chosen already, int64 [n].
    """
    table = sampler.table
    ticket = Ticket()  # slots are not reused meanwhile
    try:
        table.reader().begin_read(ticket)
        chosen = _choose(sampler, table, budget, by_mass, excluded)
        ticket.end()
        return chosen
    finally:
        ticket.end()  # again: an exception may arrive anywhere


def _choose(sampler: Any, table: Table, budget: Budget, by_mass: bool, excluded: Array) -> MigrationSet:
    by_priority = isinstance(sampler, PrioritizedShardSampler)
    view = sampler.known() if by_priority else table.reader().snapshot()
    view = view.take(~_shares_blocks(table, view.slots))
    ids = table.ids(view.slots)
    if len(excluded):
        view, ids = view.take(~np.isin(ids, excluded)), ids[~np.isin(ids, excluded)]
    leaves, counts = np.empty(0, dtype=np.float32), np.zeros(len(view), dtype=np.int64)
    if by_priority:
        leaves = sampler.leaves_of(view.slots)
        counts = view.lengths if sampler.context.selector.unit == "step" else np.ones_like(view.lengths)
    loads: Array = view.lengths.astype(np.float64)
    if by_mass:
        loads = _masses(sampler, view, leaves, counts)
    taken = _fitting(loads, view.lengths, budget)
    starts = np.cumsum(counts) - counts
    return MigrationSet(
        ids[taken],
        view.slots[taken],
        view.generations[taken],
        view.lengths[taken],
        leaves[ranges(starts[taken], counts[taken])],
        counts[taken],
    )


def _masses(sampler: Any, view: Snapshot, leaves: Array, counts: Array) -> Array:
    """Return the mass of each trajectory of a view, float64 [n]."""
    if isinstance(sampler, PrioritizedShardSampler):
        sums = np.concatenate(([0.0], np.cumsum(leaves, dtype=np.float64)))
        ends = np.cumsum(counts)
        masses: Array = sums[ends] - sums[ends - counts]
        return masses
    if sampler.context.selector.unit == "trajectory":
        return np.ones(len(view))
    return view.lengths.astype(np.float64)


def _fitting(loads: Array, lengths: Array, budget: Budget) -> Array:
    """Return the positions of the newest trajectories within a budget, int64 [m]: first the longest run of the newest,
    then smaller trajectories in what remains of the budget."""
    padded = -(-lengths // budget.block_steps) * budget.block_steps
    load, steps, count, max_steps = budget.load, budget.free_steps, budget.free_slots, budget.max_steps
    left = np.arange(len(loads))[::-1]
    taken: list[Array] = []
    for _ in range(_ROUNDS):
        fits = (
            (loads[left] > 0) & (loads[left] <= load) & (padded[left] <= steps) & (lengths[left] <= max_steps)
        )
        left = left[fits]
        if len(left) == 0 or count <= 0:
            break
        inside = np.cumsum(loads[left]) <= load
        inside &= (np.cumsum(padded[left]) <= steps) & (np.cumsum(lengths[left]) <= max_steps)
        size = min(len(left) if inside.all() else int(inside.argmin()), count)
        part, left = left[:size], left[size:]
        taken.append(part)
        load -= float(loads[part].sum())
        steps, max_steps = steps - int(padded[part].sum()), max_steps - int(lengths[part].sum())
        count -= size
    return np.concatenate(taken) if taken else left[:0]


def _shares_blocks(table: Table, slots: Array) -> Array:
    """Return which trajectories share a block with another one, bool [n]."""
    extent, block_ids = table.reader().index_arrays()
    counts = table.reader().arrays.blocks_at(slots)
    blocks = block_ids[ranges(extent[slots, 1], counts)]
    times = np.bincount(blocks, minlength=1)[blocks] > 1
    shared: Array = (
        np.bincount(np.repeat(np.arange(len(slots)), counts), weights=times, minlength=len(slots)) > 0
    )
    return shared


class Mover:
    """Copies trajectories from this rank's tables to the tables of other shards.

    Args:
        slots_of: returns the slots of ids in a shard of this rank; -1 for trajectories that are gone.
    """

    def __init__(self, slots_of: Callable[[int, Array], Array]) -> None:
        self._slots_of = slots_of

    def copy(self, source: Table, ids: Array, shard: int, target: StageTable) -> None:
        """Copy trajectories; leave out trajectories that are gone, and stop when the target is full.

        The target reports what has arrived.

        Args:
            source: table of this rank.
            ids: ids of the trajectories, int64 [n].
            shard: number of the source's shard.
            target: table to copy to.
        """
        most = max(1, _PART_BYTES // source.schema.step_bytes)
        slots = self._slots_of(shard, ids)
        ids, slots = ids[slots >= 0], slots[slots >= 0]
        lengths = source.reader().index_arrays()[0][slots, 0]
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
            source.reader().begin_read(ticket)
            state, _, _ = source.reader().slot_states()
            alive = (state[slots] == READY) & (source.ids(slots) == ids)
            ids, slots = ids[alive], slots[alive]
            trajectories = [_read(source, slot) for slot in slots.tolist()]
            finals = source.reader().arrays.extent[slots, 2].copy()
            priorities = source.reader().arrays.priority[slots].copy()
            ticket.end()
        finally:
            ticket.end()  # again: an exception may arrive anywhere
        if len(ids) == 0:
            return
        if target.table is not None:
            # A full target raises an error: it evicts no trajectory for one that can stay in the source.
            Table(target.table.region, on_full="error").store(trajectories, priorities, ids, finals)
        else:
            for future in target.send(trajectories, priorities, ids, finals):
                future.result()


def _read(table: Table, slot: int) -> dict[str, torch.Tensor]:
    """Return a copy of a trajectory, its final step as the last row; the caller holds a read ticket."""
    index = table.index
    ids, extent = index.arrays.row(slot), index.arrays.extent[slot]
    rows = int(extent[0] + extent[2])
    return {name: table._read_column(name, ids, rows) for name in table.schema}
