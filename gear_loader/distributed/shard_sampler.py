"""Shard samplers: summarize a shard for the other ranks, and draw its rows of a batch."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import Any

import numpy as np

from gear_loader.distributed.records import SUMMARY, record_dtype
from gear_loader.selection.base import REDRAWN, Selection, SelectionContext
from gear_loader.selection.leaves import HostLeaves
from gear_loader.selection.priorities import ANCHORS, LEAVES, Priorities, draw_key, keyed_anchors
from gear_loader.selection.samplers import Draw, anchors
from gear_loader.selection.snapshot_selection import gone_rows, random_rows, rows_of
from gear_loader.selection.state import PriorityState
from gear_loader.selection.tree import uniforms
from gear_loader.selection.weights import checked_leaves
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.snapshot import Snapshot
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

_TURNS = 8  # attempts to replace rows that are gone
_TIMES = 5  # stream of random numbers, beside those of `gear_loader.selection.prioritized`
_STREAMS = 1024  # streams of one shard


def shard_stream(stream: int, shard: int) -> int:
    """Return a shard's stream of random numbers; shard 0 has the streams of a table without shards."""
    return stream + _STREAMS * shard


class ShardSampler(abc.ABC):
    """Draws rows from one shard for a selection over all shards: by a distribution, of which there are two.

    The shard's items do not change between `summarize` and the draw that follows it. Trajectories that are gone by
    then are replaced by others of the same shard.

    Args:
        context: sampler and options, with the shard's table.

    Attributes:
        context, shard: as given.
        table: the shard's table.
        guard: held by draws and updates.
    """

    guard: Any = contextlib.nullcontext()

    def __init__(self, context: SelectionContext, shard: int) -> None:
        self.context, self.shard = context, shard
        self.table: Table = context.table
        self._selection = Selection(context)

    @abc.abstractmethod
    def summarize(self) -> Array:
        """Take in the table's changes; return the shard's summary, `SUMMARY` [1]."""

    def resolve(self, draw: Draw, rows: Array, items: Array | None, view: Snapshot | None = None) -> Array:
        """Resolve the rows of a batch that are assigned to this shard.

        Args:
            rows: numbers of the rows in the batch, int64 [m], ascending.
            items: items of the shard in the order of `view`, int64 [m]; None: the sampler draws them.
            view: a snapshot of the shard; None for that of the last summary.

        Returns:
            Records [m].

        Raises:
            TableEmptyError, PriorityError: rows are gone, and the shard is empty.
        """
        if len(rows) == 0:
            return np.empty(0, dtype=record_dtype(0))
        with self.guard:
            records = self._first(draw, rows, items, view)
            for turn in range(1, _TURNS):
                gone = self._gone(records)
                if len(gone) == 0:
                    break
                records[gone] = self._again(draw, len(gone), turn)
            return records

    def spare(self, draw: Draw, count: int, turn: int) -> Array:
        """Records [count] of this shard, in place of rows that could not be read; `turn`: number of the attempt.

        Raises:
            TableEmptyError, PriorityError: the shard is empty.
        """
        with self.guard:
            return self._again(draw, count, _TURNS + turn)

    def candidates(self, draw: Draw, count: int) -> Array:
        """Records of the shard's first `count` rows in the sampler's order; fewer if the shard has fewer."""
        with self.guard:
            for _ in range(_TURNS):
                records = self._candidates(draw, count)
                gone = self._gone(records)
                if len(gone) == 0:
                    break
                self._follow()
        present: Array = np.delete(records, gone)
        return present

    @abc.abstractmethod
    def _first(self, draw: Draw, rows: Array, items: Array | None, view: Snapshot | None) -> Array:
        """`resolve`, of which some may be gone."""

    @abc.abstractmethod
    def _again(self, draw: Draw, count: int, turn: int) -> Array:
        """Records [count] of the current items, for attempt number `turn`, from 1."""

    @abc.abstractmethod
    def _candidates(self, draw: Draw, count: int) -> Array:
        """`candidates`, of which some may be gone."""

    @abc.abstractmethod
    def _gone(self, records: Array) -> Array:
        """Positions of records whose trajectories are gone, int64 [m]."""

    @abc.abstractmethod
    def _follow(self) -> None:
        """Take in the table's changes."""

    @abc.abstractmethod
    def known(self) -> Snapshot:
        """The trajectories that can migrate: those that draws know."""

    @abc.abstractmethod
    def leaves_of(self, view: Snapshot) -> tuple[Array, Array]:
        """Leaves of trajectories of `known`, if they have any, float32, and how many each has, int64 [n].

        The caller has a read ticket.
        """

    @abc.abstractmethod
    def masses(self, view: Snapshot, leaves: Array, counts: Array) -> Array:
        """Mass of each trajectory of a view whose leaves `leaves_of` has returned, float64 [n]."""


def summary_of(mass: float, least: float, batch_least: float) -> Array:
    """The summary of one shard, `SUMMARY` [1]."""
    summary: Array = np.zeros(1, dtype=SUMMARY)
    summary["mass"], summary["least"], summary["batch_least"] = mass, least, batch_least
    return summary


def records_of(
    table: Table, slots: Array, steps: Array, leaves: Array | float = 1.0, times: Array | float = 0.0
) -> Array:
    """Make records of steps of trajectories; see `record_dtype`.

    Args:
        slots, steps: int64 [n].
        times: simulated times of the draws; see `PrioritizedShardSampler`.
    """
    records: Array = np.zeros(len(slots), dtype=record_dtype(0))
    _, generation, _ = table._engine.reader().slot_states()
    records["slot"], records["step"], records["generation"] = slots, steps, generation[slots]
    records["id"], records["leaf"], records["time"] = table.ids(slots), leaves, times
    return records


class SnapshotShardSampler(ShardSampler):
    """Shard sampler of `Uniform`, `Fifo` and `Lifo`; for the arguments see `ShardSampler`."""

    def __init__(self, context: SelectionContext, shard: int) -> None:
        super().__init__(context, shard)
        self._view: Snapshot | None = None
        self._aged: tuple[Snapshot, Snapshot] | None = None

    @property
    def view(self) -> Snapshot:
        """Snapshot of the last summary."""
        if self._view is None:
            self._view = self._selection.look()
        return self._view

    def summarize(self) -> Array:
        self._view = self._selection.look()
        return summary_of(self.context.sampler.num_items(self._view), 1.0, 1.0)

    def _first(self, draw: Draw, rows: Array, items: Array | None, view: Snapshot | None) -> Array:
        assert items is not None
        slots, steps, lengths, generations = rows_of(self.context, self.view if view is None else view, items)
        if steps is None:
            highs = np.ones(draw.count, dtype=np.int64)
            highs[rows] = lengths
            steps = anchors(self.context.anchor, highs, draw)[rows]
        return self._records(slots, steps, generations)

    def _again(self, draw: Draw, count: int, turn: int) -> Array:
        # Not `_follow`: items of `view` are numbered by the last summary.
        view = self._selection.look()
        if len(view) == 0:
            raise self.context.empty()
        stream = shard_stream(REDRAWN + 2 * (turn if turn >= _TURNS else turn - 1), self.shard)
        return self._records(*random_rows(self.context, view, dataclasses.replace(draw, count=count), stream))

    def _records(self, slots: Array, anchors: Array, generations: Array) -> Array:
        """Records of rows; `anchors` are numbers of anchors of their trajectories, int64 [n]."""
        records = records_of(self.table, slots, self.context.anchor_steps(anchors))
        records["generation"] = generations
        return records

    def _candidates(self, draw: Draw, count: int) -> Array:
        """The oldest or the newest rows, by id."""
        sampler: Any = self.context.sampler
        view = self._by_age()
        size = sampler.num_items(view)
        first = dataclasses.replace(draw, first=0, count=min(count, size))
        slots, steps, lengths, generations = rows_of(self.context, view, sampler.items(size, first))
        if steps is None:
            # A candidate's row of the batch is not known yet: its anchor depends on its position in the shard.
            steps = keyed_anchors(self.context.anchor, lengths, draw, shard_stream(ANCHORS, self.shard))
        return self._records(slots, steps, generations)

    def _gone(self, records: Array) -> Array:
        return gone_rows(self.table._engine.reader(), records["slot"], records["generation"])

    def _follow(self) -> None:
        self._view = self._selection.look()

    def known(self) -> Snapshot:
        return self.table._engine.reader().snapshot()

    def leaves_of(self, view: Snapshot) -> tuple[Array, Array]:
        return np.empty(0, dtype=np.float32), np.zeros(len(view), dtype=np.int64)

    def masses(self, view: Snapshot, leaves: Array, counts: Array) -> Array:
        steps = self.context.sampler.unit == "step"
        return view.lengths.astype(np.float64) if steps else np.ones(len(view))

    def _by_age(self) -> Snapshot:
        """Return `view` in the order of ids: migrated trajectories are not in this order in the table."""
        view = self.view
        if self._aged is None or self._aged[0] is not view:
            ids = self.table.ids(view.slots)
            ascend = len(ids) < 2 or bool((ids[1:] > ids[:-1]).all())
            self._aged = (view, view if ascend else view.take(np.argsort(ids, kind="stable")))
        return self._aged[1]


class PrioritizedShardSampler(ShardSampler):
    """Shard sampler of `Prioritized` and `TopK`: a priority tree over the shard; arguments as `ShardSampler`.

    Attributes:
        priorities: of the shard's items.
    """

    def __init__(self, context: SelectionContext, shard: int) -> None:
        super().__init__(context, shard)
        sampler: Any = context.sampler
        self.priorities = Priorities(
            context, self._selection.view, lambda items, change: HostLeaves(items, sampler, change)
        )
        self.guard = self.priorities.mutex

    def summarize(self) -> Array:
        with self.priorities.mutex:
            return summary_of(*self.priorities.summary(), np.inf)

    def _first(self, draw: Draw, rows: Array, items: Array | None, view: Snapshot | None) -> Array:
        assert items is None
        return self._resolve(draw, len(rows), 0)

    def _again(self, draw: Draw, count: int, turn: int) -> Array:
        self._follow()
        return self._resolve(draw, count, turn)

    def _resolve(self, draw: Draw, count: int, turn: int) -> Array:
        first, second = (LEAVES, ANCHORS) if turn == 0 else (REDRAWN + 2 * turn, REDRAWN + 2 * turn + 1)
        key = draw_key(draw, shard_stream(first, self.shard))
        items, leaves = self.priorities.leaves.draw(count, key=key, step=draw.step)
        return self._describe(draw, items, leaves, shard_stream(second, self.shard))

    def _describe(self, draw: Draw, items: Array, leaves: Array, stream: int) -> Array:
        return records_of(self.table, *self.priorities.rows(items, draw, stream), leaves)

    def _gone(self, records: Array) -> Array:
        # Those whose trajectories are not the ones that the tree has taken in.
        state, _, sequence = self.table._engine.reader().slot_states()
        slots = records["slot"]
        return np.flatnonzero(
            (state[slots] != READY) | (sequence[slots] != self.priorities.items.sequence_of[slots])
        )

    def _follow(self) -> None:
        self.priorities.keep_up()

    def _candidates(self, draw: Draw, count: int) -> Array:
        """By priority, or by simulated time of the draw."""
        sampler: Any = self.context.sampler
        key = draw_key(draw, shard_stream(LEAVES, self.shard))
        items, leaves = sampler.candidates(self.priorities.leaves.tree, count, key=key, step=draw.step)
        records = self._describe(draw, items, leaves, shard_stream(ANCHORS, self.shard))
        if sampler.weighs:
            records["time"] = self._times(draw, leaves.astype(np.float64))
        return records

    def _times(self, draw: Draw, leaves: Array) -> Array:
        """Return the simulated draw times of items, float64 [n], in the order in which the shard drew them.

        Every item has an exponential arrival time with its leaf as the rate, and items are drawn in the order of
        arrival. Within a shard the time between two draws is exponential with the remaining mass as the rate. Merged
        by time, the items of all shards are in the order of drawing without replacement from all shards (Efraimidis
        and Spirakis, 2006).
        """
        left = self.priorities.leaves.tree.total - np.concatenate(([0.0], np.cumsum(leaves)[:-1]))
        left = np.maximum(left, leaves)  # rounding may have taken the mass of the last items
        numbers = uniforms(len(leaves), key=draw_key(draw, shard_stream(_TIMES, self.shard)), step=draw.step)
        times: Array = np.cumsum(-np.log1p(-numbers) / left)
        return times

    def known(self) -> Snapshot:
        with self.priorities.mutex:
            self._follow()
            return self.priorities.known()

    def leaves_of(self, view: Snapshot) -> tuple[Array, Array]:
        priorities = self.priorities
        with priorities.mutex:
            lengths = self.table._engine.reader().arrays.extent[view.slots, 0]
            leaves: Array = priorities.leaves.read(priorities.all_items(view.slots, lengths))
        steps = self.context.sampler.unit == "step"
        return leaves, view.lengths if steps else np.ones_like(view.lengths)

    def masses(self, view: Snapshot, leaves: Array, counts: Array) -> Array:
        sums, ends = np.concatenate(([0.0], np.cumsum(leaves, dtype=np.float64))), np.cumsum(counts)
        masses: Array = sums[ends] - sums[ends - counts]
        return masses

    def take_leaves(self, slots: Array, generations: Array, leaves: Array, counts: Array) -> None:
        """Set the leaves of migrated trajectories; leave out trajectories that are gone.

        Args:
            slots, generations: int64 [n].
            leaves: float32, concatenated.
            counts: number of leaves of each trajectory, int64 [n].
        """
        priorities = self.priorities

        def take() -> None:
            present = np.ones(len(slots), dtype=bool)
            present[gone_rows(self.table._engine.reader(), slots, generations)] = False
            items, values = (
                priorities.all_items(slots[present], counts[present]),
                leaves[np.repeat(present, counts)],
            )
            priorities.leaves.tree.update(items[items >= 0], np.ascontiguousarray(values[items >= 0]))

        with priorities.mutex:
            priorities.followed(take)

    def state_with_ids(self) -> dict[str, Any]:
        """Return the state by ids instead of sequence numbers, as arrays; without changes since `summarize`."""
        priorities = self.priorities
        with priorities.mutex:
            view = priorities.known()
            return {
                "ids": self.table.ids(view.slots),
                "lengths": view.lengths,
                "leaves": priorities.leaves_of(view),
                "counts": priorities.num_blocks(view.lengths),
                "blocks": priorities.blocks_of(view),
                "maximum": priorities.leaves.maximum,
                "num_stale": priorities.leaves.num_stale,
            }

    def load(self, state: PriorityState) -> None:
        """Load a state by sequence numbers; see `Priorities.load`."""
        with self.priorities.mutex:
            self.priorities.load(state)

    def update(self, updates: PriorityUpdates) -> None:
        """Set priorities; count and leave out rows whose trajectory is gone."""
        self.priorities.update(updates, checked_leaves(self.context.sampler, updates.priorities))
