"""Migration of trajectories: the choice of trajectories that leave a shard, and their copying to another one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.stage_tables import StageTable
from gear_loader.errors import FilledError, StaleIndexError, TableFullError, TransportError
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.engine import Engine
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.readers import Ticket
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

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
        by_mass: whether load is mass; else it is steps.
        excluded: ids of trajectories that have been chosen already, int64 [n].
    """
    ticket = Ticket()
    return ticket.during(lambda: _choose(sampler, budget, by_mass, excluded, ticket))


def _choose(sampler: Any, budget: Budget, by_mass: bool, excluded: Array, ticket: Ticket) -> MigrationSet:
    table = sampler.table
    table._engine.reader().begin_read(ticket)  # slots are not reused meanwhile
    view = sampler.known()
    view = view.take(~_shares_blocks(table, view.slots))
    ids = table.ids(view.slots)
    if len(excluded):
        view, ids = view.take(~np.isin(ids, excluded)), ids[~np.isin(ids, excluded)]
    leaves, counts = sampler.leaves_of(view)
    loads = sampler.masses(view, leaves, counts) if by_mass else view.lengths.astype(np.float64)
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
    index = table._engine.reader().arrays
    extent = index.extent[slots]  # once: the table's owner may move trajectories to disk meanwhile
    inside = extent[:, 1] >= 0
    counts = np.where(inside, index.blocks_of(extent[:, 0] + extent[:, 2]), 0)
    blocks = index.ids_at(ranges(extent[:, 1], counts))
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

    def copy(self, source: Table, ids: Array, shard: int, target: StageTable, most_steps: int) -> None:
        """Copy trajectories; leave out trajectories that are gone, and stop when the target is full.

        The target reports what has arrived. Columns that are filled later follow, see `fill`.

        Args:
            ids: ids of the trajectories, int64 [n].
            shard: number of the source's shard.
            most_steps: that are copied at once.
        """
        slots = self._slots_of(shard, ids)
        ids, slots = ids[slots >= 0], slots[slots >= 0]
        for which in _parts(source, slots, most_steps):
            try:
                self._copy(source, ids[which], slots[which], target)
            except (TableFullError, TransportError) as error:
                _logger.warning("Some trajectories could not be moved: %s: %s", target, error)
                return

    def _copy(self, source: Table, ids: Array, slots: Array, target: StageTable) -> None:
        ticket = Ticket()

        def read() -> tuple[Array, list[Any], Array]:
            source._engine.reader().begin_read(ticket)  # slots are not reused meanwhile
            alive = (source._engine.reader().slot_states()[0][slots] == READY) & (source.ids(slots) == ids)
            found = [_read(source, slot) if there else None for slot, there in zip(slots, alive, strict=True)]
            present = np.array([each is not None for each in found], dtype=bool)
            priorities = source._engine.reader().arrays.priority[slots[present]].copy()
            return ids[present], [each for each in found if each is not None], priorities

        ids, rows, priorities = ticket.during(read)
        trajectories = [{name: row[name] for name in source.schema.added} for row, _ in rows]
        finals = np.array([final for _, final in rows], dtype=np.int64)
        if len(ids) == 0:
            return
        if target.table is not None:
            # A full target raises an error: it evicts no trajectory for one that can stay in the source.
            region = target.table._engine.region
            Engine(region, on_full="error").store(trajectories, priorities, ids, finals)
        else:
            for future in target.send(trajectories, priorities, ids, finals):
                future.result()

    def fill(
        self, source: Table, ids: Array, shard: int, target: StageTable, slots: Array, generations: Array
    ) -> Array:
        """Copy the columns that were filled later to trajectories that have arrived.

        Args:
            source, ids, shard, target: as for `copy`.
            slots, generations: of the trajectories in the target, int64 [n].

        Returns:
            Bits of the columns that each has been given, int64 [n]; -1 if it is gone, or cannot be filled.
        """
        late, bits = source.schema.late, np.full(len(ids), -1, dtype=np.int64)
        own = self._slots_of(shard, ids)
        there = np.flatnonzero(own >= 0)
        for part in _parts(source, own[there], source._engine.region.layout.max_steps):
            rows, groups = {}, dict[tuple[str, ...], list[int]]()
            for i in there[part].tolist():
                found = _read(source, int(own[i]), final=False)
                if found is not None:
                    rows[i] = found[0]
                    groups.setdefault(tuple(name for name in late if name in rows[i]), []).append(i)
            for names, which in groups.items():
                columns: dict[str, Any] = {name: [rows[i][name] for i in which] for name in names}
                for name in names:
                    if source.schema[name].trajectory:
                        columns[name] = torch.stack(columns[name])
                try:
                    if names:
                        target.fill(slots[which], generations[which], columns)
                except (FilledError, TableFullError, TransportError) as error:
                    _logger.warning("Some trajectories could not be moved: %s: %s", target, error)
                else:
                    bits[which] = source.schema.late_bits(names)
        return bits


def _parts(table: Table, slots: Array, most_steps: int) -> list[Array]:
    """Positions of trajectories that are copied at once, int64 [n] each; at most `most_steps` steps and one more."""
    most = max(1, min(most_steps, _PART_BYTES // table.schema.step_bytes))
    parts = np.cumsum(table._engine.reader().arrays.extent[slots, 0]) // most
    return [np.flatnonzero(parts == part) for part in np.unique(parts).tolist()]


def _read(table: Table, slot: int, *, final: bool = True) -> tuple[dict[str, torch.Tensor], int] | None:
    """A copy of a trajectory, and the number of its final steps (0 or 1), which is the last row; None if it is gone.

    Args:
        final: whether to look for a final step.
    """
    try:
        rows = table._engine.rows(slot, final=True) if final else None
        return (table._engine.rows(slot) or {}, 0) if rows is None else (rows, 1)
    except LostRowsError as error:
        table._engine.remove_lost(error)
    except StaleIndexError:
        pass
    return None
