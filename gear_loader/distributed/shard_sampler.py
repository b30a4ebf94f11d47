"""One shard's part in a selection over all shards: what it has to offer, and which of its rows are drawn."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from gear_loader.distributed.records import PUBLISHED, record_dtype
from gear_loader.native.sum_tree import READY
from gear_loader.selection.base import REDRAWN, SelectionContext
from gear_loader.selection.prioritized import ANCHORS, LEAVES, PrioritizedSelection, checked_weights, draw_key
from gear_loader.selection.selectors import Draw, Fifo, Prioritized, TopK, anchors
from gear_loader.selection.snapshot_selection import SnapshotSelection
from gear_loader.selection.tree import uniforms
from gear_loader.selection.updates import PriorityUpdates
from gear_loader.storage.index import Changes, Snapshot, Ticket
from gear_loader.utils.arrays import Array

__all__ = ["PrioritizedShardSampler", "ShardSampler", "SnapshotShardSampler", "records_of", "shard_stream"]

_TURNS = 8
_TIMES = 5  # stream of random numbers, beside those of `gear_loader.selection.prioritized`
_STREAMS = 1024  # streams of one shard


def shard_stream(stream: int, shard: int) -> int:
    """A shard's own stream of random numbers; shard 0 draws those of a table that is alone."""
    return stream + _STREAMS * shard


class ShardSampler(abc.ABC):
    """What a rank does for a shard of its own.

    What is drawn from does not change between `publish` and the draw that follows it, but for trajectories that are
    gone by then: others of the same shard take their places.

    Args:
        shard: its number.
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard

    @abc.abstractmethod
    def publish(self) -> Array:
        """Look at the table, and tell what there is now: `PUBLISHED` [1]."""

    @abc.abstractmethod
    def resolve(self, draw: Draw, rows: Array, items: Array | None) -> Array:
        """The rows of a batch that fell to this shard.

        Args:
            rows: int64 [m]: which rows of the batch, ascending.
            items: int64 [m]: which items of this shard, in the order of its snapshot; None: it draws them itself.

        Returns:
            Records [m].

        Raises:
            TableEmptyError, PriorityError: rows are gone, and nothing is left to draw from.
        """

    @abc.abstractmethod
    def spare(self, draw: Draw, count: int, turn: int) -> Array:
        """Records of more rows of this shard, for some that could not be had; `turn` tells how often that was.

        Raises:
            TableEmptyError, PriorityError: there is nothing to draw from.
        """

    @abc.abstractmethod
    def candidates(self, draw: Draw, count: int) -> Array:
        """Records of this shard's first `count` rows in the order of the selector; fewer if it has no more."""


def records_of(
    table: Any, slots: Array, steps: Array, leaves: Array | float = 1.0, times: Array | float = 0.0
) -> Array:
    """Records of steps of trajectories that are there; see `record_dtype`."""
    records: Array = np.zeros(len(slots), dtype=record_dtype(0))
    _, generation, _ = table.slot_states()
    records["slot"], records["step"], records["generation"] = slots, steps, generation[slots]
    records["id"], records["leaf"], records["time"] = table.ids(slots), leaves, times
    return records


class SnapshotShardSampler(ShardSampler):
    """`Uniform`, `Fifo` and `Lifo`.

    Args:
        job: of a `SnapshotSelector`, on the shard's table.
        shard: its number.
    """

    def __init__(self, job: SelectionContext, shard: int) -> None:
        super().__init__(shard)
        self.job = job
        self._selection = SnapshotSelection(job)
        self._view: Snapshot | None = None
        self._aged: tuple[Snapshot, Snapshot] | None = None

    @property
    def view(self) -> Snapshot:
        """What was published last."""
        if self._view is None:
            self._view = self._selection.view()
        return self._view

    def publish(self) -> Array:
        """See `ShardSampler.publish`."""
        self._view = self._selection.view()
        items = self.job.selector.num_items(self._view)
        published: Array = np.zeros(1, dtype=PUBLISHED)
        published["mass"], published["least"], published["batch_least"] = items, 1.0, 1.0
        return published

    def resolve(self, draw: Draw, rows: Array, items: Array | None) -> Array:
        """See `ShardSampler.resolve`."""
        assert items is not None
        return self.resolve_in(self.view, draw, rows, items)

    def spare(self, draw: Draw, count: int, turn: int) -> Array:
        """See `ShardSampler.spare`."""
        slots, steps, generations = np.zeros((3, count), dtype=np.int64)
        self._replace(draw, np.arange(count), _TURNS + turn, slots, steps, generations)
        records = records_of(self.job.table, slots, steps)
        records["generation"] = generations
        return records

    def resolve_in(self, view: Snapshot, draw: Draw, rows: Array, items: Array) -> Array:
        """`resolve` of items of another snapshot."""
        if len(rows) == 0:
            return np.empty(0, dtype=record_dtype(0))
        slots, steps, lengths, generations = self._located(view, items)
        if steps is None:
            highs = np.ones(draw.count, dtype=np.int64)
            highs[rows] = lengths
            steps = anchors(self.job.anchor, highs, draw)[rows]
        state, generation, _ = self.job.table.slot_states()
        gone = np.flatnonzero((state[slots] != READY) | (generation[slots] != generations))
        for turn in range(_TURNS):
            if len(gone) == 0:
                break
            self._replace(draw, gone, turn, slots, steps, generations)
            gone = gone[(state[slots[gone]] != READY) | (generation[slots[gone]] != generations[gone])]
        records = records_of(self.job.table, slots, steps)
        records["generation"] = generations
        return records

    def _located(self, view: Snapshot, items: Array) -> tuple[Array, Array | None, Array, Array]:
        if self.job.selector.unit == "step":
            places, steps = view.locate(items)
        else:
            places, steps = items, None
        return view.slots[places], steps, view.lengths[places], view.generations[places]

    def _replace(
        self, draw: Draw, which: Array, turn: int, slots: Array, steps: Array, generations: Array
    ) -> None:
        """Random rows, out of what is there now, for those that are gone."""
        view = self._selection.view()
        if len(view) == 0:
            raise self.job.empty()
        stream = shard_stream(REDRAWN + 2 * turn, self.shard)
        items = draw.integers(stream, self.job.selector.num_items(view))[: len(which)]
        others, at, lengths, fresh = self._located(view, items)
        if at is None:
            highs = np.ones(draw.count, dtype=np.int64)
            highs[: len(which)] = lengths
            at = anchors(self.job.anchor, highs, draw, stream + 1)[: len(which)]
        slots[which], steps[which], generations[which] = others, at, fresh

    def candidates(self, draw: Draw, count: int) -> Array:
        """See `ShardSampler.candidates`: the oldest or newest, by their ids."""
        for _ in range(_TURNS):
            records = self._candidates(draw, count)
            gone = self._gone(records)
            if len(gone) == 0:
                break
            self._view = self._selection.view()
        there: Array = np.delete(records, gone)
        return there

    def _candidates(self, draw: Draw, count: int) -> Array:
        selector = self.job.selector
        assert isinstance(selector, Fifo)
        view = self._by_age()
        size = selector.num_items(view)
        items = np.arange(min(count, size))
        items = size - 1 - items if selector.newest else items
        slots, steps, lengths, generations = self._located(view, items)
        if steps is None:
            # Which row of the batch a candidate becomes is not known yet: an anchor by its own number.
            steps = _anchors(self.job, lengths, draw, self.shard)
        records = records_of(self.job.table, slots, steps)
        records["generation"] = generations
        return records

    def _gone(self, records: Array) -> Array:
        """Which rows are of trajectories that are not in the table any more."""
        state, generation, _ = self.job.table.slot_states()
        slots = records["slot"]
        return np.flatnonzero((state[slots] != READY) | (generation[slots] != records["generation"]))

    def _by_age(self) -> Snapshot:
        """`view`, in the order of ids: those of trajectories that came from another shard do not ascend."""
        view = self.view
        if self._aged is None or self._aged[0] is not view:
            ids = self.ids(view)
            ascend = len(ids) < 2 or bool((ids[1:] > ids[:-1]).all())
            self._aged = (view, view if ascend else view.take(np.argsort(ids, kind="stable")))
        return self._aged[1]

    def ids(self, view: Snapshot) -> Array:
        """Global ids of a snapshot's trajectories, int64 [n]."""
        return self.job.table.ids(view.slots)


def _anchors(job: SelectionContext, lengths: Array, draw: Draw, shard: int) -> Array:
    """Anchors of trajectories of these lengths, by their places here."""
    if job.anchor == "first":
        return np.zeros(len(lengths), dtype=np.int64)
    if job.anchor == "last":
        return lengths - 1
    numbers = uniforms(len(lengths), key=draw_key(draw, shard_stream(ANCHORS, shard)), step=draw.step)
    steps: Array = np.minimum((numbers * lengths).astype(np.int64), lengths - 1)
    return steps


class PrioritizedShardSampler(PrioritizedSelection, ShardSampler):
    """`Prioritized` and `TopK`: a sum tree over the shard.

    Args:
        job: of such a selector, on the shard's table.
        shard: its number.
    """

    def __init__(self, job: SelectionContext, shard: int) -> None:
        self._sequence_of: Array = np.full(job.table.region.layout.max_trajectories, -1, dtype=np.int64)
        PrioritizedSelection.__init__(self, job, history=0)
        self.shard = shard

    def _take_in(self, changes: Changes) -> None:
        self._sequence_of[changes.slots] = np.where(changes.ready, changes.sequences, -1)
        super()._take_in(changes)

    def publish(self) -> Array:
        """See `ShardSampler.publish`."""
        selector = self.job.selector
        with self._mutex:
            self._keep_up()
            published: Array = np.zeros(1, dtype=PUBLISHED)
            published["mass"] = self._tree.total
            wanted = isinstance(selector, Prioritized) and selector.normalize == "table"
            published["least"] = self._tree.minimum if wanted else np.inf
            published["batch_least"] = np.inf
            return published

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
        table = self.job.table
        slots, steps = self._map.locate(items)
        if self.job.selector.unit == "trajectory":
            steps = self._anchors(table.index_arrays()[0][slots, 0], draw, stream)
        return records_of(table, slots, steps, leaves)

    def _gone(self, records: Array) -> Array:
        """Which rows are of trajectories that are no longer what the tree takes them for."""
        state, _, sequence = self.job.table.slot_states()
        slots = records["slot"]
        return np.flatnonzero((state[slots] != READY) | (sequence[slots] != self._sequence_of[slots]))

    def candidates(self, draw: Draw, count: int) -> Array:
        """See `ShardSampler.candidates`: by priority, or by the time at which each would be drawn."""
        with self._mutex:
            for _ in range(_TURNS):
                records = self._candidates(draw, count)
                gone = self._gone(records)
                if len(gone) == 0:
                    break
                self._keep_up()
            there: Array = np.delete(records, gone)
            return there

    def _candidates(self, draw: Draw, count: int) -> Array:
        selector = self.job.selector
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
        """When each of the items, in the order in which they were drawn, would be drawn if all shards raced.

        An item's clock rings after an exponential time with its leaf as the rate; the first to ring is drawn. In a
        shard the time from one to the next is exponential with what is left of the mass as the rate. Merged by time,
        the shards' items are in the order of drawing without replacement from all of them (Efraimidis and Spirakis,
        2006).
        """
        left = self._tree.total - np.concatenate(([0.0], np.cumsum(leaves)[:-1]))
        left = np.maximum(left, leaves)  # what rounding has taken from the last ones
        numbers = uniforms(len(leaves), key=draw_key(draw, shard_stream(_TIMES, self.shard)), step=draw.step)
        times: Array = np.cumsum(-np.log1p(-numbers) / left)
        return times

    def spare(self, draw: Draw, count: int, turn: int) -> Array:
        """See `ShardSampler.spare`."""
        with self._mutex:
            self._keep_up()
            return self._resolve(draw, count, _TURNS + turn)

    def known(self) -> Snapshot:
        """The trajectories that the tree has taken in."""
        with self._mutex:
            self._keep_up()
            view = self._known()
            return view.take(self._sequence_of[view.slots] == view.sequences)

    def leaves_of(self, slots: Array) -> Array:
        """Leaves of trajectories that `known` has told of and that a ticket keeps, of one after another."""
        with self._mutex:
            items = self._map.all_items(slots, *self.job.table.index_arrays())
            return np.where(items >= 0, self._read(items), np.float32(0))

    def take_leaves(self, slots: Array, generations: Array, leaves: Array, counts: Array) -> None:
        """Set the leaves of trajectories that have come from another shard, if they are still there.

        Args:
            slots, generations: int64 [n]. leaves: float32, of one after another; counts: int64 [n], of each.
        """
        table = self.job.table
        with self._mutex:
            ticket = Ticket()
            try:
                self._follow(ticket)
                state, generation, _ = table.slot_states()
                here = (state[slots] == READY) & (generation[slots] == generations)
                items = self._map.all_items(slots[here], *table.index_arrays())
                self._tree.update(items, np.ascontiguousarray(leaves[np.repeat(here, counts)]))
                ticket.end()
            finally:
                ticket.end()  # again: an exception may arrive anywhere

    def state_with_ids(self) -> dict[str, Any]:
        """As `state_dict`, by ids instead of sequence numbers, in arrays; what changed since `publish` is not in it."""
        with self._mutex:
            view = self._known()
            view = view.take(self._sequence_of[view.slots] == view.sequences)
            leaves = self._read(self._map.all_items(view.slots, *self.job.table.index_arrays()))
            return {
                "ids": self.job.table.ids(view.slots),
                "lengths": view.lengths,
                "leaves": leaves,
                "maximum": self._maximum,
                "num_stale": self._num_stale,
            }

    def update(self, request: PriorityUpdates) -> None:
        """Set priorities; rows whose trajectory is gone are counted and left out."""
        self._update(request, checked_weights(self.job.selector, request.priorities))
