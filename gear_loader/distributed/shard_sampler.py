"""Shard samplers: summarize a shard for the other ranks, and draw its rows of a batch."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from gear_loader.distributed.records import SUMMARY, record_dtype
from gear_loader.selection.base import REDRAWN, SelectionContext
from gear_loader.selection.prioritized import ANCHORS, LEAVES, PrioritizedSelection, checked_weights, draw_key
from gear_loader.selection.selectors import Draw, Fifo, Prioritized, TopK, anchors
from gear_loader.selection.snapshot_selection import SnapshotSelection
from gear_loader.selection.tree import uniforms
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.reader import Changes, Snapshot
from gear_loader.storage.readers import Ticket
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["PrioritizedShardSampler", "ShardSampler", "SnapshotShardSampler", "records_of", "shard_stream"]

_TURNS = 8  # attempts to replace rows that are gone
_TIMES = 5  # stream of random numbers, beside those of `gear_loader.selection.prioritized`
_STREAMS = 1024  # streams of one shard


def shard_stream(stream: int, shard: int) -> int:
    """Return a shard's stream of random numbers; shard 0 has the streams of a table without shards."""
    return stream + _STREAMS * shard


class ShardSampler(abc.ABC):
    """Draws rows from one shard for a selection over all shards.

    The shard's items do not change between `summarize` and the draw that follows it. Trajectories that are gone by
    then are replaced by others of the same shard.

    Args:
        context: selector and options, with the shard's table.
        shard: number of the shard.

    Attributes:
        context, shard: as given.
        table: the shard's table.
    """

    context: SelectionContext
    shard: int

    @property
    def table(self) -> Table:
        """The shard's table."""
        return self.context.table

    @abc.abstractmethod
    def summarize(self) -> Array:
        """Take in the table's changes; return the shard's summary, `SUMMARY` [1]."""

    @abc.abstractmethod
    def resolve(self, draw: Draw, rows: Array, items: Array | None) -> Array:
        """Resolve the rows of a batch that are assigned to this shard.

        Args:
            draw: draw of the batch.
            rows: numbers of the rows in the batch, int64 [m], ascending.
            items: items of the shard in the order of its snapshot, int64 [m]; None: the sampler draws them.

        Returns:
            Records [m].

        Raises:
            TableEmptyError, PriorityError: rows are gone, and the shard is empty.
        """

    @abc.abstractmethod
    def spare(self, draw: Draw, count: int, turn: int) -> Array:
        """Draw spare rows of this shard, in place of rows that could not be read.

        Args:
            draw: draw of the batch.
            count: number of rows.
            turn: number of the attempt.

        Returns:
            Records [count].

        Raises:
            TableEmptyError, PriorityError: the shard is empty.
        """

    @abc.abstractmethod
    def candidates(self, draw: Draw, count: int) -> Array:
        """Return records of the shard's first `count` rows in the selector's order; fewer if the shard has fewer."""


def records_of(
    table: Table, slots: Array, steps: Array, leaves: Array | float = 1.0, times: Array | float = 0.0
) -> Array:
    """Make records of steps of trajectories; see `record_dtype`.

    Args:
        table: the table of the trajectories.
        slots, steps: int64 [n].
        leaves: leaves of the items.
        times: simulated times of the draws; see `PrioritizedShardSampler`.
    """
    records: Array = np.zeros(len(slots), dtype=record_dtype(0))
    _, generation, _ = table.reader().slot_states()
    records["slot"], records["step"], records["generation"] = slots, steps, generation[slots]
    records["id"], records["leaf"], records["time"] = table.ids(slots), leaves, times
    return records


class SnapshotShardSampler(ShardSampler):
    """Shard sampler of `Uniform`, `Fifo` and `Lifo`; for the arguments see `ShardSampler`."""

    def __init__(self, context: SelectionContext, shard: int) -> None:
        self.context = context
        self.shard = shard
        self._selection = SnapshotSelection(context)
        self._view: Snapshot | None = None
        self._aged: tuple[Snapshot, Snapshot] | None = None

    @property
    def view(self) -> Snapshot:
        """Snapshot of the last summary."""
        if self._view is None:
            self._view = self._selection.look()
        return self._view

    def summarize(self) -> Array:
        """See `ShardSampler.summarize`."""
        self._view = self._selection.look()
        items = self.context.selector.num_items(self._view)
        summary: Array = np.zeros(1, dtype=SUMMARY)
        summary["mass"], summary["least"], summary["batch_least"] = items, 1.0, 1.0
        return summary

    def resolve(self, draw: Draw, rows: Array, items: Array | None) -> Array:
        """See `ShardSampler.resolve`."""
        assert items is not None
        return self.resolve_in(self.view, draw, rows, items)

    def spare(self, draw: Draw, count: int, turn: int) -> Array:
        """See `ShardSampler.spare`."""
        slots, steps, generations = np.zeros((3, count), dtype=np.int64)
        self._replace(draw, np.arange(count), _TURNS + turn, slots, steps, generations)
        return self._records(slots, steps, generations)

    def resolve_in(self, view: Snapshot, draw: Draw, rows: Array, items: Array) -> Array:
        """Resolve items of another snapshot; see `resolve`."""
        if len(rows) == 0:
            return np.empty(0, dtype=record_dtype(0))
        slots, steps, lengths, generations = self._located(view, items)
        if steps is None:
            highs = np.ones(draw.count, dtype=np.int64)
            highs[rows] = lengths
            steps = anchors(self.context.anchor, highs, draw)[rows]
        state, generation, _ = self.table.reader().slot_states()
        gone = np.flatnonzero((state[slots] != READY) | (generation[slots] != generations))
        for turn in range(_TURNS):
            if len(gone) == 0:
                break
            self._replace(draw, gone, turn, slots, steps, generations)
            gone = gone[(state[slots[gone]] != READY) | (generation[slots[gone]] != generations[gone])]
        return self._records(slots, steps, generations)

    def _located(self, view: Snapshot, items: Array) -> tuple[Array, Array | None, Array, Array]:
        if self.context.selector.unit == "step":
            places, steps = view.locate(items)
        else:
            places, steps = items, None
        return view.slots[places], steps, view.lengths[places], view.generations[places]

    def _replace(
        self, draw: Draw, which: Array, turn: int, slots: Array, steps: Array, generations: Array
    ) -> None:
        """Draw random rows of the current snapshot in place of rows `which`, which are gone."""
        view = self._selection.look()
        if len(view) == 0:
            raise self.context.empty()
        stream = shard_stream(REDRAWN + 2 * turn, self.shard)
        items = draw.integers(stream, self.context.selector.num_items(view))[: len(which)]
        others, at, lengths, fresh = self._located(view, items)
        if at is None:
            highs = np.ones(draw.count, dtype=np.int64)
            highs[: len(which)] = lengths
            at = anchors(self.context.anchor, highs, draw, stream + 1)[: len(which)]
        slots[which], steps[which], generations[which] = others, at, fresh

    def _records(self, slots: Array, anchors: Array, generations: Array) -> Array:
        """Records of rows; `anchors` are numbers of anchors of their trajectories, int64 [n]."""
        records = records_of(self.table, slots, anchors + self.context.first)
        records["generation"] = generations
        return records

    def candidates(self, draw: Draw, count: int) -> Array:
        """See `ShardSampler.candidates`: the oldest or the newest rows, by id."""
        for _ in range(_TURNS):
            records = self._candidates(draw, count)
            gone = self._gone(records)
            if len(gone) == 0:
                break
            self._view = self._selection.look()
        present: Array = np.delete(records, gone)
        return present

    def _candidates(self, draw: Draw, count: int) -> Array:
        selector = self.context.selector
        assert isinstance(selector, Fifo)
        view = self._by_age()
        size = selector.num_items(view)
        items = np.arange(min(count, size))
        items = size - 1 - items if selector.newest else items
        slots, steps, lengths, generations = self._located(view, items)
        if steps is None:
            # A candidate's row of the batch is not known yet: its anchor depends on its position in the shard.
            steps = _anchors(self.context, lengths, draw, self.shard)
        return self._records(slots, steps, generations)

    def _gone(self, records: Array) -> Array:
        """Return the positions of records whose trajectories are gone."""
        state, generation, _ = self.table.reader().slot_states()
        slots = records["slot"]
        return np.flatnonzero((state[slots] != READY) | (generation[slots] != records["generation"]))

    def _by_age(self) -> Snapshot:
        """Return `view` in the order of ids: migrated trajectories are not in this order in the table."""
        view = self.view
        if self._aged is None or self._aged[0] is not view:
            ids = self.table.ids(view.slots)
            ascend = len(ids) < 2 or bool((ids[1:] > ids[:-1]).all())
            self._aged = (view, view if ascend else view.take(np.argsort(ids, kind="stable")))
        return self._aged[1]


def _anchors(context: SelectionContext, lengths: Array, draw: Draw, shard: int) -> Array:
    """Return anchors of trajectories of these lengths, which depend on their positions."""
    if context.anchor == "first":
        return np.zeros(len(lengths), dtype=np.int64)
    if context.anchor == "last":
        return lengths - 1
    numbers = uniforms(len(lengths), key=draw_key(draw, shard_stream(ANCHORS, shard)), step=draw.step)
    steps: Array = np.minimum((numbers * lengths).astype(np.int64), lengths - 1)
    return steps


class PrioritizedShardSampler(PrioritizedSelection, ShardSampler):
    """Shard sampler of `Prioritized` and `TopK`: a sum tree over the shard; for the arguments see `ShardSampler`."""

    def __init__(self, context: SelectionContext, shard: int) -> None:
        size = context.table.region.layout.max_trajectories
        self._sequence_of: Array = np.full(size, -1, dtype=np.int64)
        self.shard = shard
        PrioritizedSelection.__init__(self, context, history=0)

    def _take_in(self, changes: Changes) -> None:
        self._sequence_of[changes.slots] = np.where(changes.ready, changes.sequences, -1)
        super()._take_in(changes)

    def summarize(self) -> Array:
        """See `ShardSampler.summarize`."""
        selector = self.context.selector
        with self._mutex:
            self._keep_up()
            summary: Array = np.zeros(1, dtype=SUMMARY)
            summary["mass"] = self._tree.total
            wanted = isinstance(selector, Prioritized) and selector.normalize == "table"
            summary["least"] = self._tree.minimum if wanted else np.inf
            summary["batch_least"] = np.inf
            return summary

    def resolve(self, draw: Draw, rows: Array, items: Array | None) -> Array:
        """See `ShardSampler.resolve`."""
        assert items is None
        if len(rows) == 0:
            return np.empty(0, dtype=record_dtype(0))
        with self._mutex:
            records = self._resolve(draw, len(rows), 0)
            for turn in range(1, _TURNS):
                gone = self._gone(records)
                if len(gone) == 0:
                    break
                self._keep_up()
                records[gone] = self._resolve(draw, len(gone), turn)
            return records

    def _resolve(self, draw: Draw, count: int, turn: int) -> Array:
        first, second = (LEAVES, ANCHORS) if turn == 0 else (REDRAWN + 2 * turn, REDRAWN + 2 * turn + 1)
        key = draw_key(draw, shard_stream(first, self.shard))
        self._check_range()
        items, leaves = self._tree.draw(count, key=key, step=draw.step)
        return self._describe(draw, items, leaves, shard_stream(second, self.shard))

    def _describe(self, draw: Draw, items: Array, leaves: Array, stream: int) -> Array:
        table = self.table
        slots, steps = self._map.locate(items)
        if self.context.selector.unit == "trajectory":
            steps = self._anchors(slots, draw, stream)
        return records_of(table, slots, steps, leaves)

    def _gone(self, records: Array) -> Array:
        """Return the positions of records whose trajectories are not the ones that the tree has taken in."""
        state, _, sequence = self.table.reader().slot_states()
        slots = records["slot"]
        return np.flatnonzero((state[slots] != READY) | (sequence[slots] != self._sequence_of[slots]))

    def candidates(self, draw: Draw, count: int) -> Array:
        """See `ShardSampler.candidates`: by priority, or by simulated time of the draw."""
        with self._mutex:
            for _ in range(_TURNS):
                records = self._candidates(draw, count)
                gone = self._gone(records)
                if len(gone) == 0:
                    break
                self._keep_up()
            present: Array = np.delete(records, gone)
            return present

    def _candidates(self, draw: Draw, count: int) -> Array:
        selector = self.context.selector
        if isinstance(selector, TopK):
            items, leaves = self._tree.top(min(count, self._tree.capacity), largest=selector.largest)
            items, leaves = items[items >= 0], leaves[items >= 0]
            return self._describe(draw, items, leaves, shard_stream(ANCHORS, self.shard))
        key = draw_key(draw, shard_stream(LEAVES, self.shard))
        items, leaves = self._tree.draw_some(count, key=key, step=draw.step)
        records = self._describe(draw, items, leaves, shard_stream(ANCHORS, self.shard))
        records["time"] = self._times(draw, leaves.astype(np.float64))
        return records

    def _times(self, draw: Draw, leaves: Array) -> Array:
        """Return the simulated draw times of items, float64 [n], in the order in which the shard drew them.

        Every item has an exponential arrival time with its leaf as the rate, and items are drawn in the order of
        arrival. Within a shard the time between two draws is exponential with the remaining mass as the rate. Merged
        by time, the items of all shards are in the order of drawing without replacement from all shards (Efraimidis
        and Spirakis, 2006).
        """
        left = self._tree.total - np.concatenate(([0.0], np.cumsum(leaves)[:-1]))
        left = np.maximum(left, leaves)  # rounding may have taken the mass of the last items
        numbers = uniforms(len(leaves), key=draw_key(draw, shard_stream(_TIMES, self.shard)), step=draw.step)
        times: Array = np.cumsum(-np.log1p(-numbers) / left)
        return times

    def spare(self, draw: Draw, count: int, turn: int) -> Array:
        """See `ShardSampler.spare`."""
        with self._mutex:
            self._keep_up()
            return self._resolve(draw, count, _TURNS + turn)

    def known(self) -> Snapshot:
        """Return a snapshot of the trajectories that the tree has taken in."""
        with self._mutex:
            self._keep_up()
            view = self._known()
            return view.take(self._sequence_of[view.slots] == view.sequences)

    def leaves_of(self, slots: Array) -> Array:
        """Return the leaves of trajectories that `known` returned and a read ticket keeps, concatenated."""
        with self._mutex:
            items = self._all_items(slots, self.table.reader().arrays.extent[slots, 0])
            return np.where(items >= 0, self._read(items), np.float32(0))

    def take_leaves(self, slots: Array, generations: Array, leaves: Array, counts: Array) -> None:
        """Set the leaves of migrated trajectories; leave out trajectories that are gone.

        Args:
            slots, generations: int64 [n].
            leaves: float32, concatenated.
            counts: number of leaves of each trajectory, int64 [n].
        """
        table = self.table
        with self._mutex:
            ticket = Ticket()
            try:
                self._follow(ticket)
                state, generation, _ = table.reader().slot_states()
                present = (state[slots] == READY) & (generation[slots] == generations)
                items = self._all_items(slots[present], counts[present])
                leaves = leaves[np.repeat(present, counts)]
                self._tree.update(items[items >= 0], np.ascontiguousarray(leaves[items >= 0]))
                ticket.end()
            finally:
                ticket.end()  # again: an exception may arrive anywhere

    def state_with_ids(self) -> dict[str, Any]:
        """Return the state by ids instead of sequence numbers, as arrays; without changes since `summarize`."""
        with self._mutex:
            view = self._known()
            view = view.take(self._sequence_of[view.slots] == view.sequences)
            leaves, blocks = self._read(self._all_items(view.slots, view.lengths)), self._blocks(view)
            return {
                "ids": self.table.ids(view.slots),
                "lengths": view.lengths,
                "leaves": leaves,
                "counts": self.num_leaf_blocks(view.lengths),
                "blocks": blocks,
                "maximum": self._maximum,
                "num_stale": self._num_stale,
            }

    def num_leaf_blocks(self, lengths: Array) -> Array | None:
        """Number of blocks of leaves of trajectories of so many steps (int64 [n]); None if they are the table's."""
        return None if self._map.own is None else -(-lengths // self._map.block_steps)

    def update(self, updates: PriorityUpdates) -> None:
        """Set priorities; count and leave out rows whose trajectory is gone."""
        self._update(updates, checked_weights(self.context.selector, updates.priorities))
