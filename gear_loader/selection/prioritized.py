"""Selection by priority on the CPU: draws, updates, and state."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.errors import (
    GearError,
    LockTimeoutError,
    PriorityError,
    SchemaError,
    StaleIndexError,
    TableEmptyError,
)
from gear_loader.kernels.sum_tree import GONE, LOWEST_LEAF, UNSET
from gear_loader.native import priority_updates
from gear_loader.native.priority_updates import known_items, leaves_of, live_items
from gear_loader.selection.base import ANCHOR_KINDS, REDRAWN, Selection, SelectionContext
from gear_loader.selection.item_map import ItemMap, Leaves
from gear_loader.selection.leaf_blocks import LeafBlocks
from gear_loader.selection.random import key
from gear_loader.selection.selectors import SAMPLE_EPOCH, Draw, Prioritized, Selector, TopK, anchors
from gear_loader.selection.tree import PriorityTree, uniforms, weigh
from gear_loader.selection.updates import request
from gear_loader.selection.weights import importance_weights
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.inline import InlineBatch, Places, prioritized_batch
from gear_loader.storage.layout import Layout, most_blocks
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.reader import Changes, Snapshot
from gear_loader.storage.readers import Ticket
from gear_loader.storage.rows import CudaRows, SelectedRows
from gear_loader.storage.states import READY
from gear_loader.storage.tier_counts import pack_heat
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import holds_any, new_mutex, uninterrupted

__all__ = [
    "ANCHORS",
    "LEAVES",
    "SHARE",
    "DrawnItems",
    "PrioritizedSelection",
    "checked_weights",
    "draw_key",
    "exponent",
    "may_leave_range",
    "needs_priorities",
    "out_of_range",
    "scaled",
]

_NO_BLOCKS: Array = np.empty(0, dtype=np.int32)
_ANY: Array = np.empty(0, dtype=np.int64)  # generations of rows that may have any
LEAVES, ANCHORS = 3, 4  # streams of random numbers, after those of `gear_loader.selection.selectors`
assert priority_updates.READY == READY
_LARGEST = float(np.finfo(np.float32).max)
_MAX_SAMPLE = 1 << 18  # most leaves read for statistics
_MEANS_SECONDS = 1.0
_AMID_TIMEOUT = 2.0  # seconds that a signal handler waits for another thread's change of the priorities
SHARE = 2.0**-10
"""Most share of the probability that leaves outside float32's range may have in a draw."""
_DOUBTFUL_EPS = 2.0**100  # with a smaller eps, sums exceed float32's range by rounding only


@dataclasses.dataclass(slots=True)
class DrawnItems:
    """The rows of a drawn batch; all arrays [n].

    Attributes:
        sequences: int64, sequence numbers; empty if the batch is not repeated after a restart.
        slots, steps, generations: int64.
        weights: float32, weights of a repeated batch; None if computed from the leaves or not wanted.
        leaves: float32, leaves of the items; None if unknown.
        likely: float64, probabilities of the items; None if unknown or not wanted.
    """

    sequences: Array
    slots: Array
    steps: Array
    generations: Array
    weights: Array | None
    leaves: Array | None = None
    likely: Array | None = None


class _BrokenMutex:
    """Replaces the mutex of a selection that was forked in the middle of a change; acquiring it raises GearError."""

    def __enter__(self) -> None:
        raise GearError(
            f"This process ({os.getpid()}) was forked while its parent's prefetch thread was drawing: the priorities "
            "here are incomplete. Make a new ReplayDataset in the child, close iterators before the fork, or start "
            "the child with spawn."
        )

    def __exit__(self, *_: object) -> None:
        pass


class PrioritizedSelection(Selection):
    """Draws rows for `Prioritized` or `TopK` on the CPU.

    Args:
        context: context with such a selector.
        history: number of batches whose rows are kept, so that a state can resume before them.

    Attributes:
        shares: whether updates of trajectories go to the table, too, so that its other selections follow them.
        can_share: whether it may be set.
    """

    shares = False
    can_share = True

    def __init__(self, context: SelectionContext, *, history: int) -> None:
        super().__init__(context)
        layout = context.table.region.layout
        steps, blocks = context.selector.unit == "step", _leaf_blocks(layout)
        if steps and blocks * layout.block_steps >= 2**31:
            fewer = "fewer blocks" if layout.tier is None else "a smaller max_steps"
            raise SchemaError(
                f"{context.selector!r} would need {blocks * layout.block_steps:,} priorities, one for each place of a "
                f"step; expected less than 2**31. Use unit='trajectory', or a table with {fewer}."
            )
        self._map = ItemMap(
            steps=steps,
            num_slots=layout.max_trajectories,
            num_blocks=blocks,
            block_steps=layout.block_steps,
            tier=layout.tier is not None,
            complete=context.complete,
        )
        self._next_means = 0.0  # time of the next `_tell_means`
        self._unset: Leaves | None = None  # leaves of changes applied to the map, perhaps not yet to the tree
        self._changes = 0  # of the map or of all leaves, by another thread: odd while one is under way
        self._known_before: int | None = (
            None  # the next sequence number before changes that are being applied
        )
        self._maximum = 1.0
        self._num_stale = 0
        self._freshness = getattr(context.selector, "freshness", 1.0)
        self._policy = context.table.policy_version  # the leaves are as of this version
        self._may_leave_range = may_leave_range(context.selector)
        self._make_tree(self._map.capacity)
        self._draws_compiled = (
            type(context.selector) is Prioritized
            and context.selector.replacement
            and not self._may_leave_range
            and not context.counts
            and (context.complete is None or self._map.steps)
        )
        places = self._map
        # Whether trajectories that the map knows are never drawn: it holds no steps that are no complete anchor.
        self._chooses = context.subset is not None or (context.complete is not None and not steps)
        self._chooses |= context.late != 0
        # For the compiled loops: steps of a block, and where its steps belong; 0 if an item is a trajectory.
        self._places: tuple[int, Array, Array] = (
            (places.block_steps, places.owner, places.number) if steps else (0, _NO_BLOCKS, _NO_BLOCKS)
        )
        self._anchor = ANCHOR_KINDS[context.anchor]
        self._inline: tuple[tuple[Array, ...], Places] | None = None
        # Rows of the last batches; those of `fill` as int64 [5, n], see `prioritized_batch`.
        self._history: collections.deque[tuple[tuple[int, int], DrawnItems | Array]]
        self._history = collections.deque(maxlen=history)
        self._pending: dict[tuple[int, int], DrawnItems] = {}
        self._mutex = new_mutex()

    def after_fork(self) -> None:
        """See `Selection.after_fork`."""
        # A held mutex belongs to a thread of the parent that was in the middle of a draw or an update.
        free = self._mutex.acquire(blocking=False)
        self._mutex = new_mutex() if free else _BrokenMutex()

    def _make_tree(self, capacity: int) -> None:
        selector = self.context.selector
        batch_only = isinstance(selector, Prioritized) and selector.normalize == "batch"
        self._tree = PriorityTree(capacity, extremes=not batch_only)

    @property
    def num_stale(self) -> int:
        """Number of stale rows that updates have skipped. On a GPU this waits for it."""
        return self._num_stale

    # ---------------------------------------------------------------- drawing

    def draw(self, draw: Draw, ticket: Ticket, frozen: Snapshot | None = None) -> SelectedRows | CudaRows:
        """See `Selection.draw`."""
        return self.when_drawable(lambda: self._draw_rows(draw, ticket), ticket)

    def _draw_rows(self, draw: Draw, ticket: Ticket) -> SelectedRows | CudaRows:
        if self.context.limited and self.context.table.rules.rate_limiter is not None:
            self.context.table.reader().await_samplable(self._num_rows(draw))  # outside the mutex
        with self._mutex:
            self._follow(ticket, self.context.samples(self._num_rows(draw)))
            rows = self._restored(draw) or self._draw_compiled(draw) or self._draw_or_wait(draw)
            times = self.count_samples(
                rows.slots, rows.generations, lambda which, turn: self._redraw(draw, rows, which, turn)
            )
            if rows.leaves is not None and self.context.selector.weighs:
                rows.weights = self._importance(draw, rows.leaves)
            likely = self._likely(rows) if self.context.informs else 1.0
            if draw.epoch < SAMPLE_EPOCH:
                self._keep_rows(draw, rows)
        return self.rows(rows.slots, rows.steps, rows.generations, times, likely, rows.weights)

    def fill(self, draw: Draw, batch: InlineBatch) -> bool:
        """See `Selection.fill`."""
        context, count = self.context, draw.count
        reader = context.table.reader()
        if not self._draws_compiled or count != batch.count or not reader.draws_inline:
            return False
        with self._mutex:
            if self._pending or self._unset is not None:
                return False
            drawn = np.empty((5, count), dtype=np.int64)
            if not reader.draw_inline(
                prioritized_batch,
                batch,
                self._tree_places(count),
                self._map.position,
                count if context.limited else 0,
                reader.arrays.block_steps,
                self._tree.depth,
                self._places[0],
                self._anchor,
                key(draw.seed, LEAVES, draw.epoch),
                key(draw.seed, ANCHORS, draw.epoch),
                draw.step,
                *self._weighing(draw),
                drawn,
            ):
                return False
            if draw.epoch < SAMPLE_EPOCH:
                self._history.append(((draw.epoch, draw.step), drawn))
        return True

    def _tree_places(self, count: int) -> Places:
        """Places of the arrays that `prioritized_batch` draws `count` rows from."""
        arrays = self._tree.arrays_for(count)
        if self._inline is None or self._inline[0] is not arrays:
            self._inline = arrays, Places(*arrays, *self._places[1:])
        return self._inline[1]

    def _draw_or_wait(self, draw: Draw) -> DrawnItems:
        """`_draw`; with `max_times_sampled`, wait for items until the deadline."""
        if self.context.table.rules.max_times_sampled is None:
            return self._draw(draw)
        backoff = self.context.table.reader().backoff()
        while True:
            try:
                return self._draw(draw)
            except (PriorityError, TableEmptyError):
                if not backoff.sleep():
                    raise
                self._keep_up()

    def _keep_rows(self, draw: Draw, rows: DrawnItems) -> None:
        """Keep the rows of a batch for states that resume before it."""
        if len(rows.sequences) == 0:
            sequences = self.context.table.reader().slot_states()[2][rows.slots]
            rows = DrawnItems(sequences, rows.slots, rows.steps, rows.generations, rows.weights)
        self._history.append(((draw.epoch, draw.step), rows))

    def _follow(self, ticket: Ticket, samples: int = 0) -> None:
        """Apply the table's changes under a read ticket, which the caller ends, also if this fails.

        Args:
            samples: rows to be drawn, for the rate limiter.
        """
        self._set_unset()
        if self._freshness < 1:
            self._age()
        _, changes = self.context.table.reader().begin_changes(self._map.position, samples, ticket)
        known = self._map.position, self._map.next_sequence
        if len(changes.slots) == 0:
            self._map.position, self._map.next_sequence = changes.position, changes.next_sequence
            return
        try:
            self._known_before = known[1]
            self._take_in(changes)
        except BaseException:
            if self._unset is None:  # else the map is complete and only the tree is behind
                self._map.position, self._map.next_sequence = known  # interrupted: apply the changes again
            raise

    def _keep_up(self) -> None:
        """Apply the table's changes, if any."""
        if self._map.position != self.context.table.reader().position:
            ticket = Ticket()
            try:
                self._follow(ticket)
                ticket.end()
            finally:
                ticket.end()  # again: an exception may arrive anywhere

    def _take_in(self, changes: Changes) -> None:
        chosen = self.context.chosen(changes.slots) if self.context.filters else changes.ready
        arrays = self.context.table.reader().index_arrays()

        def follow() -> None:
            try:
                self._unset = self._map.follow(changes, chosen, *arrays)
            except IndexError as error:
                raise self.context.table.reader().arrays.corrupt(str(error)) from error

        if self._map.steps:
            self._change(follow)  # a map of steps cannot resume from a partial change
        else:
            follow()
        self._set_unset()

    def _set_unset(self) -> None:
        """Set the leaves of changes applied to the map; may be repeated after an interruption."""
        if self._unset is not None:
            self._set(self._unset)
            self._unset = None
        self._known_before = None

    def _set(self, leaves: Leaves) -> None:
        self._maximum = max(self._maximum, leaves.maximum)
        if len(leaves.whole):
            values = self._set_leaves(leaves.whole_priorities)
            self._tree.fill(leaves.whole, self._map.inside, self._map.block_steps, values)
        weighed = self._set_leaves(leaves.priorities)
        if self._freshness < 1:
            kept = leaves.priorities != GONE
            weighed[kept] = self._freshened(leaves.items[kept], weighed[kept])
        self._put(leaves.items, weighed)

    def _set_leaves(self, given: Array) -> Array:
        """Leaves of priorities of `Leaves`, float32 [n]."""
        priorities = np.where(given == UNSET, np.float32(self._maximum), given)
        removed = given == GONE
        priorities[removed] = 0
        leaves = self._first_leaves(priorities)
        leaves[removed] = 0
        return leaves

    def _put(self, items: Array, leaves: Array) -> None:
        """Set leaves (float32 [n]) of items (int64 [n]); of duplicates the last one counts."""
        if len(items) > self._map.capacity // 8:
            self._write(items, leaves)
        else:
            self._tree.update(items, leaves)

    # ---------------------------------------------------------------- freshness

    def _age(self) -> None:
        """Scale all leaves to the current version of the policy."""
        policy = self.context.table.policy_version
        if policy != self._policy:
            factor = self._freshness ** (policy - self._policy)

            def scale() -> None:
                self._scale(factor)
                self._policy = policy

            self._change(scale)

    def _change(self, section: Callable[[], object]) -> None:
        """Call a function that changes the map or all leaves, completely or not at all; see `uninterrupted`."""

        def counted() -> None:
            if self._changes % 2:  # a part of such a function
                section()
                return
            self._changes += 1
            try:
                section()
            finally:
                self._changes += 1

        uninterrupted(counted)

    def _scale(self, factor: float) -> None:
        """Multiply all leaves."""
        self._tree.leaves[:] = scaled(self._tree.leaves, factor)
        self._tree.build()

    def _freshened(self, slots: Array, leaves: Array) -> Array:
        """Leaves (float32 [n]) of trajectories, for the versions that their policies are behind."""
        lags = np.maximum(self._policy - self.context.table.index.arrays.versions(slots), 0)
        return scaled(leaves, self._freshness**lags)

    def _weigh(self, priorities: Array) -> Array:
        """Leaves of priorities (float32 [n]), float64 [n]."""
        return weigh(priorities, *self._exponent())

    def _first_leaves(self, priorities: Array) -> Array:
        """Leaves of new items with these priorities (float32 [n]), float32 [n], clipped to float32's range."""
        leaves: Array = np.minimum(self._weigh(priorities), _LARGEST).astype(np.float32)
        return leaves

    def _exponent(self) -> tuple[float, float]:
        return exponent(self.context.selector)

    def _draw_compiled(self, draw: Draw) -> DrawnItems | None:
        """`_draw` in one compiled call; None if that is not possible, or nothing can be drawn."""
        if not self._draws_compiled:
            return None
        table = self.context.table
        names, leaves = np.empty((4, draw.count), dtype=np.int64), np.empty(draw.count, dtype=np.float32)
        rows = (
            *self._places,
            table.reader().index_arrays()[0],
            *table.reader().slot_states()[1:],
            self._anchor,
            draw_key(draw, ANCHORS),
        )
        if not self._tree.draw_rows(names, leaves, key=draw_key(draw, LEAVES), step=draw.step, rows=rows):
            return None
        return DrawnItems(names[3], names[0], names[1], names[2], None, leaves)

    def _draw(self, draw: Draw, streams: tuple[int, int] = (LEAVES, ANCHORS)) -> DrawnItems:
        selector, table = self.context.selector, self.context.table
        try:
            items, leaves = self._draw_items(draw, streams[0])
        except PriorityError:
            # By the items that were drawn from: a trajectory that can be drawn may have come since.
            if not self._map.has(np.arange(table.reader().arrays.num_slots)).any():
                raise self.context.empty() from None
            raise
        slots, steps = self._map.locate(items)
        if selector.unit == "trajectory":
            steps = self._anchors(slots, draw, streams[1])
        likely = None if leaves is None or not self.context.informs else leaves / self._tree.total
        return DrawnItems(
            slots[:0], slots, steps, table.reader().slot_states()[1][slots], None, leaves, likely
        )

    def _draw_items(self, draw: Draw, stream: int) -> tuple[Array, Array | None]:
        """Items, int64 [n], and their leaves, float32 [n]; no leaves for `TopK`."""
        selector = self.context.selector
        if isinstance(selector, TopK):
            return self._top(selector, draw.count), None
        assert isinstance(selector, Prioritized)
        self._check_range()
        return self._tree.draw(
            draw.count, key=draw_key(draw, stream), step=draw.step, distinct=not selector.replacement
        )

    def _num_rows(self, draw: Draw) -> int:
        """Rows of a draw."""
        return draw.count

    def _check_range(self) -> None:
        """Refuse to draw if leaves clipped to float32's range have too much of the probability.

        Raises:
            PriorityError: clipped leaves have more than `SHARE` of the probability.
        """
        if not self._may_leave_range:
            return
        total, leaves = self._tree.total, self._tree.leaves
        if LOWEST_LEAF < total <= len(leaves) * LOWEST_LEAF / SHARE:
            if np.count_nonzero(leaves == LOWEST_LEAF) * LOWEST_LEAF > total * SHARE:
                raise out_of_range(self.context.selector)
        elif total > _LARGEST * (1 + SHARE) and (leaves == _LARGEST).any():
            raise out_of_range(self.context.selector)

    def _importance(self, draw: Draw, leaves: Array) -> Array:
        """Importance weights of drawn leaves, float32 [n]."""
        least, beta, scale = self._weighing(draw)
        return importance_weights(leaves, None if least < 0 else least, beta, scale=scale)

    def _weighing(self, draw: Draw) -> tuple[float, float, float]:
        """Smallest leaf that weighs 1 (negative: that of the batch), beta, and the factor of the weights."""
        selector = self.context.selector
        assert isinstance(selector, Prioritized)
        least = self._tree.minimum if selector.normalize == "table" else -1.0
        return least, selector.beta_at(draw.number), 1.0

    def _likely(self, rows: DrawnItems) -> Array | float:
        """Probabilities of the drawn rows, float [n] or one number for all."""
        if isinstance(self.context.selector, TopK):
            return 1.0
        if rows.likely is not None:
            return rows.likely
        # Drawn before a restart: the current probability.
        items = self._map.items(rows.slots, rows.steps, *self.context.table.reader().index_arrays())
        likely: Array = np.where(items >= 0, self._tree.leaves[items], 0) / self._tree.total
        return likely

    def _redraw(self, draw: Draw, rows: DrawnItems, which: Array, turn: int) -> bool:
        """Redraw rows `which` (int64 [m]); see `Selection.count_samples`."""
        self._keep_up()
        streams = (REDRAWN + 2 * turn, REDRAWN + 2 * turn + 1)
        try:
            again = self._draw(dataclasses.replace(draw, count=len(which)), streams)
        except (PriorityError, TableEmptyError):
            return False
        rows.slots[which], rows.steps[which] = again.slots, again.steps
        rows.generations[which] = again.generations
        if rows.leaves is not None and again.leaves is not None:
            rows.leaves[which] = again.leaves
        if rows.likely is not None and again.likely is not None:
            rows.likely[which] = again.likely
        return True

    def _anchors(self, slots: Array, draw: Draw, stream: int) -> Array:
        counts, first = self.context.num_anchors(slots), self.context.first
        if self.context.anchor != "uniform":
            return first + anchors(self.context.anchor, counts, draw)
        numbers = uniforms(len(counts), key=draw_key(draw, stream), step=draw.step)
        steps: Array = first + np.minimum((numbers * counts).astype(np.int64), counts - 1)
        return steps

    def _top(self, selector: TopK, count: int) -> Array:
        items, _ = self._tree.top(min(count, self._tree.capacity), largest=selector.largest)
        items = items[items >= 0]
        if len(items) == 0:
            raise PriorityError(
                "Every priority is zero: there is nothing to draw. Set some with update_priority, or add trajectories "
                "with a positive priority."
            )
        return items[np.arange(count) % len(items)]

    # ---------------------------------------------------------------- updating

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        generation: Any,
        anchor: Any,
        stale: Literal["ignore", "error"],
        between: Callable[[Callable[[], object]], None],
    ) -> None:
        """See `ReplayDataset.update_priority`; `between` calls a function between two draws."""
        new = request(index, priority, generation=generation, anchor=anchor, unit=self.context.selector.unit)
        weighed = checked_weights(self.context.selector, new.priorities)
        if stale == "error":
            self._check_live(new)
        between(lambda: self._update(new, weighed))

    def _check_live(self, request: PriorityUpdates) -> None:
        """Raise StaleIndexError if a row names a removed trajectory or a step beyond its end."""
        with self._mutex:
            self._keep_up()
            stale = np.flatnonzero(self._items(request) < 0)
        if len(stale):
            row = int(stale[0])
            raise StaleIndexError(
                f"{len(stale)} of {len(request.slots)} priorities are for removed trajectories; the first is "
                f"row {row}, index {request.slots[row]}. Nothing was changed; stale='ignore' skips them."
            )

    def _update(self, request: PriorityUpdates, weighed: Array) -> None:
        """Set priorities (`weighed`: their leaves, float32 [n], overwritten); skip and count stale rows."""
        with self._mutex:
            self._keep_up()  # so that it can update trajectories added before this call
            items = self._items(request)
            position = self._map.position
            if not self._map.steps:
                position = self._tell_table(request, items >= 0)
            count, largest = known_items(items, request.priorities, weighed)
            self._num_stale += len(items) - count
            self._maximum = max(self._maximum, largest)
            if self._freshness < 1:
                weighed[:count] = self._freshened(items[:count], weighed[:count])
            self._put(items[:count], weighed[:count])
            self._map.position = position
            if self._map.own is not None and time.monotonic() >= self._next_means:
                self._tell_means(self._map.own)

    def _tell_table(self, request: PriorityUpdates, known: Array) -> int:
        """Write the priorities of known trajectories (bool [n]) into the table; return the position to follow it from.

        That is behind these changes, if there were no others before them.
        """
        table, updates = self.context.table, request
        if not known.all():
            generations = None if request.generations is None else request.generations[known]
            updates = PriorityUpdates(
                request.slots[known], request.steps[known], generations, request.priorities[known]
            )
        if table.has_tier:
            self._tell_tier(updates.slots, updates.priorities)
        if self.shares:
            _, (before, after) = table.reader().revise(updates, strict=False, steps=False)
            return after if self._map.position == before else self._map.position
        if table.rules.on_full == "evict_lowest_priority":
            given = updates.generations
            given = np.full(len(updates.slots), -1) if given is None else given
            table.reader().set_priorities(updates.slots, given, updates.priorities)
        return self._map.position

    def _tell_means(self, own: LeafBlocks) -> None:
        """Tell the table's owner the mean priority of each trajectory's steps: how often a step in memory is drawn.

        Called at most once in `_MEANS_SECONDS`, and so seldom that it takes at most a twentieth of the time.
        """
        began, (alpha, eps), slots = time.monotonic(), self._exponent(), own.slots
        if alpha > 0:
            table = self.context.table.index.arrays
            blocks, firsts = np.flatnonzero(self._map.owner >= 0), np.arange(own.num_blocks)
            with np.errstate(over="ignore"):
                masses = np.add.reduceat(
                    self._tree.leaves[: self._map.capacity], firsts * self._map.block_steps
                )
                sums = np.bincount(self._map.owner[blocks], masses[blocks], minlength=len(own.extent))
                means = (sums[slots] / own.extent[slots, 0]) ** (1 / alpha) - eps
            table.heat[slots] = pack_heat(table.generation[slots], np.clip(means, 0, _LARGEST))
        now = time.monotonic()
        self._next_means = now + max(_MEANS_SECONDS, 20 * (now - began))

    def _tell_tier(self, slots: Array, priorities: Array) -> None:
        """Tell the table's owner priorities (float32 [n]) of trajectories."""
        arrays = self.context.table.index.arrays
        arrays.heat[slots] = pack_heat(arrays.generation[slots], priorities)

    def _items(self, request: PriorityUpdates) -> Array:
        """Items of a request, int64 [n]; -1 for a stale row."""
        slots, reader = request.slots, self.context.table.reader()
        items = self._map.items(slots, request.steps, *reader.index_arrays())
        wanted = _ANY if request.generations is None else request.generations
        live: Array = np.empty_like(slots)
        # Drawn trajectories, whose generations are known, are known to the map.
        live_items(items, slots, wanted, *reader.slot_states(), self._map.next_sequence, live)
        if self._chooses and len(known := np.flatnonzero(live >= 0)):
            live[known[~self.context.chosen(slots[known])]] = -1
        return live

    def quantiles(self, shares: Array) -> Array:
        """Quantiles (float64 [n]) of the positive priorities, or of a sample if they are many."""
        with self._mutex:
            self._keep_up()
            leaves = self._some_leaves()
        leaves = leaves[leaves > 0].astype(np.float64)
        if len(leaves) == 0:
            return np.full(len(shares), np.nan)
        alpha, eps = self._exponent()
        found: Array = np.quantile(leaves, shares)
        return found ** (1 / alpha) - eps if alpha else found

    def _some_leaves(self) -> Array:
        leaves: Array = self._tree.leaves[:: self._every()].copy()
        return leaves

    def _every(self) -> int:
        return -(-self._map.capacity // _MAX_SAMPLE)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Leaves of all trajectories with sequence numbers, counters, and the rows of the last batches.

        In a signal handler amid a call of this thread under a lock: the state before that call, perhaps with a part of
        what it sets. Trajectories that it was taking in are left out; a restored selection meets them as new ones.

        Raises:
            LockTimeoutError: another thread was changing the priorities for over `_AMID_TIMEOUT` seconds amid a call.
        """
        if holds_any():
            return self._state_amid()
        with self._mutex:
            ticket = Ticket()
            try:
                self._follow(ticket)
                state = self._state(self._map.next_sequence)
                ticket.end()
            finally:
                ticket.end()  # again: an exception may arrive anywhere
            return state

    def _state_amid(self) -> dict[str, Any]:
        """`state_dict` without waiting for what this thread holds: its paused call goes on when this has returned."""
        # Another thread that holds the mutex may wait for a lock of the paused call; then it changes nothing.
        free = self._mutex.acquire(timeout=_AMID_TIMEOUT / 4)
        try:
            deadline = time.monotonic() + _AMID_TIMEOUT
            while True:
                before = self._changes
                if before % 2 == 0:
                    if free:
                        self._set_unset()
                    # The map may know more than the tree, until `_follow` has ended.
                    known = self._known_before
                    state = self._state(self._map.next_sequence if known is None else known)
                    if self._changes == before and (free or self._unset is None):
                        return state
                if time.monotonic() > deadline:
                    raise LockTimeoutError(
                        "The state was asked for in a signal handler, in the middle of a call, while another thread "
                        f"changes the priorities for over {_AMID_TIMEOUT:g} s. Ask again after the call has returned."
                    )
                time.sleep(1e-3)
        finally:
            if free:
                self._mutex.release()

    def _state(self, following: int) -> dict[str, Any]:
        """`state_dict` of the trajectories with sequence numbers below `following`."""
        view = self.view()
        view = view.take(view.sequences < following)
        leaves, blocks = self._read(self._all_items(view.slots, view.lengths)), self._blocks(view)
        recent = {(part["epoch"], part["step"]): part for part in self._recent()}
        for (epoch, step), rows in list(self._pending.items()):
            recent.setdefault((epoch, step), {"epoch": epoch, "step": step, **_tensors(rows)})
        policy = {} if self._freshness == 1 else {"policy": self._policy}
        return {
            **policy,
            **({} if blocks is None else {"blocks": torch.from_numpy(blocks)}),
            "sequences": torch.from_numpy(view.sequences.copy()),
            "lengths": torch.from_numpy(view.lengths.copy()),
            "leaves": torch.from_numpy(leaves),
            "maximum": self._get_maximum(),
            "num_stale": self.num_stale,
            "recent": list(recent.values()),
        }

    def _all_items(self, slots: Array, lengths: Array) -> Array:
        """`ItemMap.all_items` of the table."""
        return self._map.all_items(slots, lengths, *self.context.table.reader().index_arrays())

    def _blocks(self, view: Snapshot) -> Array | None:
        """Blocks of leaves of all trajectories of a view, int32, -1 for unknown ones; None if they are the table's."""
        own = self._map.own
        return None if own is None else own.blocks_of(view.slots, -(-view.lengths // self._map.block_steps))

    def _read(self, items: Array) -> Array:
        leaves: Array = np.where(items >= 0, self._tree.leaves[items], np.float32(0))
        return leaves

    def _write(self, items: Array, leaves: Array) -> None:
        def write() -> None:
            self._tree.leaves[items] = leaves
            self._tree.build()

        self._change(write)

    def _get_maximum(self) -> float:
        return self._maximum

    def _set_counters(self, maximum: float, num_stale: int) -> None:
        self._maximum, self._num_stale = maximum, num_stale

    def _recent(self) -> list[dict[str, Any]]:
        return [
            {"epoch": epoch, "step": step, **_tensors(_as_items(rows))}
            for (epoch, step), rows in list(self._history)
        ]

    def _known(self) -> Snapshot:
        view = self.view()
        return view.take(view.sequences < self._map.next_sequence)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict` for the trajectories that are still in the table.

        Raises:
            SchemaError: invalid state; nothing was changed.
        """
        sequences, lengths, leaves, recent = _checked(state, self.context.selector)

        def restore() -> None:
            if self._map.own is not None and "blocks" in state:
                self._rearrange(self._map.own, sequences, lengths, np.asarray(state["blocks"]))
            self._restore(sequences, lengths, leaves, float(state["maximum"]), int(state["num_stale"]))

        with self._mutex:
            ticket = Ticket()
            try:
                self._follow(ticket)
                self._policy = int(
                    state.get("policy", self._policy)
                )  # of the leaves; the next draw scales them
                if self._map.own is None:
                    restore()
                else:
                    self._change(restore)  # leaves that were moved have to be set
                ticket.end()
            finally:
                ticket.end()  # again: an exception may arrive anywhere
            self._history.clear()
            self._pending = recent

    def _rearrange(self, own: LeafBlocks, sequences: Array, lengths: Array, blocks: Array) -> None:
        """Give trajectories their blocks of leaves in a state, on which draws depend; the caller sets all leaves.

        Args:
            sequences, lengths: int64 [n], of the trajectories. blocks: int32, their blocks one after another.
        """
        counts = -(-lengths // self._map.block_steps)
        ends = np.cumsum(counts)
        if len(blocks) != counts.sum() or blocks.max(initial=-1) >= own.num_blocks:
            return  # of a table of other sizes
        slots = own.slots
        known = self.context.table.reader().slot_states()[2][slots]
        slots, known = slots[np.argsort(known, kind="stable")], np.sort(known)
        places, both = _find(sequences, known)
        if len(lengths):
            whole = np.minimum.reduceat(blocks, ends - counts) >= 0
            both &= (lengths[places] == own.extent[slots, 0]) & whole[places]
        again = places[both]
        given = blocks[ranges(ends[again] - counts[again], counts[again])]
        self._tree.leaves[:] = 0
        self._map.rearrange(slots[both], given, slots[~both])

    def _restore(
        self, sequences: Array, lengths: Array, leaves: Array, maximum: float, num_stale: int
    ) -> None:
        view = self._known()
        places, both = _find(sequences, view.sequences)
        both &= lengths[places] == view.lengths if len(lengths) else False
        # Trajectories added since get their initial priority.
        new = self.context.table.reader().arrays.priority[view.slots[~both]]
        maximum = max(maximum, float(new.max(initial=0)))
        first = self._first_leaves(np.where(new == UNSET, np.float32(maximum), new))
        steps = self.context.selector.unit == "step"
        if self._freshness < 1:
            first = self._freshened(view.slots[~both], first)
        items = self._all_items(view.slots, view.lengths)
        if both.all() and len(view) == len(lengths):
            values = leaves  # both in the order of sequence numbers
        else:
            old, counts = places[both], lengths if steps else np.ones_like(lengths)
            parts = view.lengths if steps else np.ones_like(view.lengths)
            values = np.empty(len(items), dtype=np.float32)
            known = np.repeat(both, parts)
            values[known] = leaves[ranges((np.cumsum(counts) - counts)[old], counts[old])]
            values[~known] = np.repeat(first, parts[~both])
        there = items >= 0
        self._write(*((items, values) if there.all() else (items[there], values[there])))
        self._set_counters(maximum, num_stale)

    def forget_before(self, epoch: int, step: int) -> None:
        """Forget the rows of batches before this one, which no state resumes before."""
        with self._mutex:
            while self._history and self._history[0][0] < (epoch, step):
                self._history.popleft()

    def forget_pending(self) -> None:
        """Discard the batches that a loaded state would repeat."""
        self._pending.clear()

    def _restored(self, draw: Draw) -> DrawnItems | None:
        """The rows of a batch of the loaded state, if all of them are still in the table."""
        rows = self._pending.pop((draw.epoch, draw.step), None) if self._pending else None
        if rows is None:
            return None
        view = self.view()
        places, found = _find(view.sequences, rows.sequences)
        if (
            not found.all()
            or (rows.steps >= view.lengths[places]).any()
            or len(places) != self._num_rows(draw)
        ):
            return None
        return dataclasses.replace(rows, slots=view.slots[places], generations=view.generations[places])


def _leaf_blocks(layout: Layout) -> int:
    """Blocks of leaves of a priority tree: those of the memory, or room for what lies on disk, too."""
    if layout.tier is None:
        return layout.num_blocks
    return most_blocks(layout.max_steps, layout.max_trajectories, layout.block_steps)


def scaled(leaves: Array, factor: Array | float) -> Array:
    """Leaves times a factor, float32 [n]; positive ones stay so."""
    scaled = (leaves * np.asarray(factor, dtype=np.float64)).astype(np.float32)
    result: Array = np.where(leaves > 0, np.maximum(scaled, np.float32(LOWEST_LEAF)), np.float32(0))
    return result


def exponent(selector: Selector) -> tuple[float, float]:
    """alpha and eps rounded to float32, as kernels receive them."""
    if not isinstance(selector, Prioritized):
        return 1.0, 0.0
    return float(np.float32(selector.alpha)), float(np.float32(selector.eps))


def may_leave_range(selector: Selector) -> bool:
    """Whether leaves of valid priorities may exceed float32's range."""
    alpha, eps = exponent(selector)
    return alpha > 1 or eps > _DOUBTFUL_EPS


def out_of_range(selector: Selector) -> PriorityError:
    """The error of a draw in which leaves clipped to float32's range have too much of the probability."""
    return PriorityError(
        f"{selector!r} raises the priorities out of float32's range (1.2e-38 to 3.4e38), so that very different ones "
        "would be drawn equally often. Use a smaller alpha (with 1 or less every priority fits), scale the priorities "
        "so that they are about 1, or use an eps that keeps small ones from vanishing."
    )


def checked_weights(selector: Selector, priorities: Array) -> Array:
    """Leaves of priorities (float32 [n]), float32 [n].

    Raises:
        PriorityError: a leaf exceeds float32's range.
    """
    leaves: Array = np.empty(len(priorities), dtype=np.float32)
    bad = leaves_of(priorities, *exponent(selector), leaves)
    if bad >= 0:
        raise PriorityError(
            f"priority[{bad}] is {priorities[bad]}, which {selector!r} raises beyond float32's "
            "range; expected a smaller one, or use a smaller alpha. Nothing was changed."
        )
    return leaves


def draw_key(draw: Draw, stream: int) -> int:
    """The key of one stream of a draw's random numbers; its counter is `draw.step`."""
    return key(draw.seed, stream, draw.epoch)


def _find(known: Array, wanted: Array) -> tuple[Array, Array]:
    """Index of each of `wanted` in the sorted `known` (0 if absent), and whether it is present."""
    places = np.searchsorted(known, wanted)
    places[places == len(known)] = 0
    found = known[places] == wanted if len(known) else np.zeros(len(wanted), dtype=bool)
    return np.where(found, places, 0), found


def _as_items(rows: DrawnItems | Array) -> DrawnItems:
    """The rows of an entry of the history."""
    if isinstance(rows, DrawnItems):
        return rows
    weights = rows[4].view(np.float32)[: rows.shape[1]]
    return DrawnItems(rows[3], rows[0], rows[1], rows[2], weights)


def _tensors(rows: DrawnItems) -> dict[str, Any]:
    return {
        "sequences": torch.from_numpy(rows.sequences.copy()),
        "steps": torch.from_numpy(rows.steps.copy()),
        "weights": None if rows.weights is None else torch.from_numpy(rows.weights.copy()),
    }


def _rows(state: Mapping[str, Any], *, weighs: bool) -> DrawnItems:
    sequences, steps = np.asarray(state["sequences"]), np.asarray(state["steps"])
    weights = np.asarray(state["weights"]) if weighs else None
    fits = (
        sequences.dtype == steps.dtype == np.int64 and sequences.ndim == 1 and sequences.shape == steps.shape
    )
    fits &= bool((steps >= 0).all())
    if weights is None:
        fits &= state["weights"] is None
    else:
        fits &= weights.dtype == np.float32 and weights.shape == steps.shape and bool((weights >= 0).all())
    if not fits:
        raise ValueError
    return DrawnItems(sequences, np.empty_like(sequences), steps, np.empty_like(sequences), weights)


def _checked(
    state: Mapping[str, Any], selector: Selector
) -> tuple[Array, Array, Array, dict[tuple[int, int], DrawnItems]]:
    recent: dict[tuple[int, int], DrawnItems] = {}
    try:
        sequences, lengths, leaves = (np.asarray(state[name]) for name in ("sequences", "lengths", "leaves"))
        fits = sequences.dtype == lengths.dtype == np.int64 and leaves.dtype == np.float32
        fits &= sequences.shape == lengths.shape and leaves.ndim == sequences.ndim == 1
        fits &= len(leaves) == (int(lengths.sum()) if selector.unit == "step" else len(sequences))
        fits &= bool((np.diff(sequences) > 0).all() and (lengths > 0).all())
        fits &= bool(np.isfinite(leaves).all() and (leaves >= 0).all())
        fits &= int(state.get("policy", 0)) >= 0
        blocks = np.asarray(state.get("blocks", _NO_BLOCKS))
        fits &= blocks.dtype == np.int32 and blocks.ndim == 1
        taken = blocks[blocks >= 0]
        fits &= bool((blocks >= -1).all()) and len(np.unique(taken)) == len(taken)
        fits &= 0 <= float(state["maximum"]) <= _LARGEST and int(state["num_stale"]) >= 0
        for part in state["recent"]:
            recent[int(part["epoch"]), int(part["step"])] = _rows(part, weighs=selector.weighs)
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise SchemaError(
            "The state's priorities are invalid; expected a state_dict() of a ReplayDataset with the same selector. "
            "Nothing was changed."
        )
    return sequences, lengths, leaves, recent


def needs_priorities(selector: Selector) -> bool:
    """Whether a selector draws by priority."""
    return isinstance(selector, (Prioritized, TopK))
