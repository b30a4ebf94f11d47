"""Selection by priority on the CPU: draws, weights, and the batches of a state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from gear_loader.errors import PriorityError, TableEmptyError
from gear_loader.selection.base import ANCHOR_KINDS, REDRAWN, Selection, SelectionContext
from gear_loader.selection.item_map import ItemMap
from gear_loader.selection.leaves import Change, GroupLeaves, HostLeaves
from gear_loader.selection.priorities import ANCHORS, LEAVES, Priorities, draw_key, find
from gear_loader.selection.random import key
from gear_loader.selection.samplers import SAMPLE_EPOCH, Draw, Prioritized
from gear_loader.selection.state import BatchHistory, BatchRows, parse_state
from gear_loader.selection.updates import request
from gear_loader.selection.weights import checked_leaves, importance_weights
from gear_loader.storage.counters import NUM_TOUCHED
from gear_loader.storage.inline import InlineBatch, Places, prioritized_batch
from gear_loader.storage.queue_loops import queue_prioritized
from gear_loader.storage.queued import QueuedBatch, QueuedDraw
from gear_loader.storage.readers import Ticket
from gear_loader.storage.selected_rows import CudaRows, SelectedRows
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils.arrays import Array

_NO_BLOCKS: Array = np.empty(0, dtype=np.int32)


@dataclasses.dataclass(slots=True)
class DrawnItems:
    """The rows of a drawn batch; all arrays [n].

    Attributes:
        slots, steps, generations: int64.
        leaves: float32, leaves of the items; None if unknown.
        weights: float32, weights of a repeated batch; None if computed from the leaves or not wanted.
        likely: float64, probabilities of the items; None if unknown or not wanted.
        sequences: int64, sequence numbers of the trajectories; None if unknown.
    """

    slots: Array
    steps: Array
    generations: Array
    leaves: Array | None = None
    weights: Array | None = None
    likely: Array | None = None
    sequences: Array | None = None


class PrioritizedSelection(Selection):
    """Draws rows for `Prioritized` or `TopK` on the CPU.

    Args:
        history: number of batches whose rows are kept, so that a state can resume before them.

    Attributes:
        priorities: of the table's items.
        history: the last batches.
        can_share: whether `Priorities.shares` may be set.
    """

    can_share = True

    def __init__(self, context: SelectionContext, *, history: int) -> None:
        super().__init__(context)
        self.history = BatchHistory(history)
        self.priorities = Priorities(context, self.view, self._make_leaves)
        items, steps = self.priorities.items, context.sampler.unit == "step"
        self._draws_compiled = (
            type(context.sampler) is Prioritized
            and context.sampler.replacement
            and not self.priorities.leaves.may_leave_range
            and not context.counts
            and context.grouping is None
            and (context.complete is None or steps)
        )
        # For the compiled loops: steps of a block, and where its steps belong; 0 if an item is a trajectory.
        self._places: tuple[int, Array, Array] = (
            (items.block_steps, items.owner, items.number) if steps else (0, _NO_BLOCKS, _NO_BLOCKS)
        )
        self._anchor = ANCHOR_KINDS[context.anchor]
        # Rows, and what `_inline` draws so many from.
        self._inline_places: tuple[int, Places] | None = None

    def _make_leaves(self, items: ItemMap, change: Change) -> Any:
        sampler: Any = self.context.sampler
        if self.former is None or self.context.grouping is None:
            return HostLeaves(items, sampler, change)
        return GroupLeaves(items, sampler, change, former=self.former, grouping=self.context.grouping)

    def after_fork(self) -> None:
        self.priorities.after_fork()

    @property
    def num_stale(self) -> int:
        """Number of stale rows that updates have skipped. On a GPU this waits for it."""
        stale: int = self.priorities.leaves.num_stale
        return stale

    # ---------------------------------------------------------------- drawing

    def draw(self, draw: Draw, ticket: Ticket, frozen: Any = None) -> SelectedRows | CudaRows:
        """See `Selection.draw`; over groups `draw` counts groups."""
        if self.former is not None:
            self.former.expire()
        return self.when_drawable(lambda: self._draw_rows(draw, ticket), ticket)

    def _draw_rows(self, draw: Draw, ticket: Ticket) -> SelectedRows | CudaRows:
        context, priorities = self.context, self.priorities
        if context.limited and context.table.rules.rate_limiter is not None:
            context.table._engine.reader().await_samplable(self.num_rows(draw))  # outside the mutex
        with priorities.mutex:
            priorities.follow(ticket, context.samples(self.num_rows(draw)))
            rows = self._restored(draw) or self._draw_compiled(draw) or self._draw_or_wait(draw)
            times = self.count_samples(
                rows.slots, rows.generations, lambda which, turn: self._redraw(draw, rows, which, turn)
            )
            if rows.leaves is not None and context.sampler.weighs:
                rows.weights = self._importance(draw, rows.leaves)
            likely = self._likely(rows) if context.informs else 1.0
            if draw.epoch < SAMPLE_EPOCH:
                if rows.sequences is None:
                    rows.sequences = context.table._engine.reader().slot_states()[2][rows.slots]
                self.history.remember(draw, BatchRows(rows.sequences, rows.steps, rows.weights))
        return self.rows(rows.slots, rows.steps, rows.generations, times, likely, rows.weights)

    def fill(self, draw: Draw, batch: InlineBatch) -> bool:
        reader = self.context.table._engine.reader()
        with self.priorities.mutex:
            found = self._inline(draw, batch.count) if reader.draws_inline and not batch.packed else None
            if found is None:
                return False
            places, counter, since, samples, how = found
            given = reader.arrays.block_steps, *how
            if not reader.draw_inline(prioritized_batch, batch, places, counter, since, samples, *given):
                return False
            self.history.remember(draw, how[-1])
        return True

    def queue(self, draw: Draw, batch: QueuedBatch, ticket: Ticket) -> bool:
        reader = self.context.table._engine.reader()
        if not reader.queues_inline or isinstance(batch, QueuedDraw):
            return False
        with self.priorities.mutex:
            found = self._inline(draw, batch.count)
            if found is None:
                return False
            places, counter, since, samples, how = found
            given = places.table, reader.arrays.block_steps, reader.arrays.num_blocks, *how
            if not reader.queue_inline(
                queue_prioritized, batch, batch.words, counter, since, samples, ticket, *given
            ):
                return False
            self.history.remember(draw, how[-1])
        return True

    def _inline(self, draw: Draw, count: int) -> tuple[Places, int, int, int, tuple[Any, ...]] | None:
        """What a compiled call draws from, as `TableReader.draw_inline` takes it, and how, as `prioritized_batch` does;
        None if it cannot. Needs the mutex."""
        priorities = self.priorities
        if not self._draws_compiled or count != draw.count:
            return None
        if self.history.pending or priorities.unset is not None:
            return None
        tree, inline = priorities.leaves.tree, self._inline_places
        if inline is None or inline[0] != count:
            places = Places(*tree.arrays_for(count), *self._places[1:])
            self._inline_places = inline = count, places
        keys = key(draw.seed, LEAVES, draw.epoch), key(draw.seed, ANCHORS, draw.epoch)
        drawn: Array = np.empty((5, count), dtype=np.int64)
        how = tree.depth, self._places[0], self._anchor, *keys, draw.step, *self._weighing(draw), drawn
        return inline[1], NUM_TOUCHED, priorities.items.position, self.context.samples(count), how

    def _draw_or_wait(self, draw: Draw) -> DrawnItems:
        """`_draw`; with `max_times_sampled`, wait for items until the deadline."""
        if self.context.table.rules.max_times_sampled is None:
            return self._draw(draw)
        backoff = self.context.table._engine.reader().backoff()
        while True:
            try:
                return self._draw(draw)
            except (PriorityError, TableEmptyError):
                if not backoff.sleep():
                    raise
                self.priorities.keep_up()

    def _draw_compiled(self, draw: Draw) -> DrawnItems | None:
        """`_draw` in one compiled call; None if that is not possible, or nothing can be drawn."""
        if not self._draws_compiled:
            return None
        reader = self.context.table._engine.reader()
        names, leaves = np.empty((4, draw.count), dtype=np.int64), np.empty(draw.count, dtype=np.float32)
        rows = (
            *self._places,
            reader.index_arrays()[0],
            *reader.slot_states()[1:],
            self._anchor,
            draw_key(draw, ANCHORS),
        )
        tree = self.priorities.leaves.tree
        if not tree.draw_rows(names, leaves, key=draw_key(draw, LEAVES), step=draw.step, rows=rows):
            return None
        return DrawnItems(names[0], names[1], names[2], leaves, sequences=names[3])

    def _draw(self, draw: Draw, streams: tuple[int, int] = (LEAVES, ANCHORS)) -> DrawnItems:
        context, priorities = self.context, self.priorities
        priorities.form()
        try:
            key = draw_key(draw, streams[0])
            items, leaves = priorities.leaves.draw(draw.count, key=key, step=draw.step)
        except PriorityError:
            # By the items that were drawn from: a trajectory that can be drawn may have come since.
            if priorities.leaves.is_empty:
                raise context.empty() from None
            raise
        rows = self.num_rows(draw)
        slots, steps = priorities.rows(items, dataclasses.replace(draw, count=rows), streams[1])
        leaves = np.repeat(leaves, rows // draw.count)
        likely = leaves / priorities.leaves.tree.total if context.informs else None
        generations = context.table._engine.reader().slot_states()[1][slots]
        return DrawnItems(slots, steps, generations, leaves, likely=likely)

    def _redraw(self, draw: Draw, rows: DrawnItems, which: Array, turn: int) -> bool:
        """Redraw rows `which` (int64 [m]); see `Selection.count_samples`."""
        self.priorities.keep_up()
        streams = (REDRAWN + 2 * turn, REDRAWN + 2 * turn + 1)
        try:
            again = self._draw(dataclasses.replace(draw, count=len(which)), streams)
        except (PriorityError, TableEmptyError):
            return False
        rows.sequences = None
        for name in ("slots", "steps", "generations", "leaves", "likely"):
            mine, others = getattr(rows, name), getattr(again, name)
            if mine is not None and others is not None:
                mine[which] = others
        return True

    def mass(self) -> tuple[float, float]:
        with self.priorities.mutex:
            return self.priorities.summary()

    def _importance(self, draw: Draw, leaves: Array) -> Array:
        """Importance weights of drawn leaves, float32 [n]."""
        least, beta, scale = self._weighing(draw)
        return importance_weights(leaves, None if least < 0 else least, beta, scale=scale)

    def _weighing(self, draw: Draw) -> tuple[float, float, float]:
        """Smallest leaf that weighs 1 (negative: that of the batch), beta, and the factor of the weights."""
        sampler: Any = self.context.sampler
        beta, share, of_table = sampler.beta_at(draw.number), self.share, sampler.least_of_table
        if share is None:
            return self.priorities.leaves.tree.minimum if of_table else -1.0, beta, 1.0
        if of_table and share.least > 0:
            return share.least * self.priorities.leaves.tree.total, beta, 1.0
        return -1.0, beta, share.correction

    def _likely(self, rows: DrawnItems) -> Array | float:
        """Probabilities of the drawn rows, float [n] or one number for all."""
        if not self.context.sampler.weighs:
            return 1.0
        if rows.likely is not None:
            return rows.likely
        # Drawn before a restart: the current probability.
        priorities = self.priorities
        priorities.form()
        step = 1 if self.context.grouping is None else self.context.grouping.size  # that of the first member
        reader = self.context.table._engine.reader()
        items = priorities.items.items(rows.slots[::step], rows.steps[::step], *reader.index_arrays())
        tree = priorities.leaves.tree
        return np.repeat(np.where(items >= 0, tree.leaves[items], 0) / tree.total, step)

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
        new = request(index, priority, generation=generation, anchor=anchor, unit=self.context.sampler.unit)
        weighed = checked_leaves(self.context.sampler, new.priorities)
        if stale == "error":
            self.priorities.check_live(new)
        between(functools.partial(self.priorities.update, new, weighed))

    def quantiles(self, shares: Array) -> Array:
        return self.priorities.quantiles(shares)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """See `Priorities.state_dict`; where each rank draws from its own shard, with its share."""
        state = self.priorities.state_dict(self._recent)
        return state if self.share is None else {**state, "shares": dataclasses.astuple(self.share)}

    def _recent(self) -> list[dict[str, Any]]:
        return self.history.state("sequences", _rows_of)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict` for the trajectories that are still in the table.

        Raises:
            SchemaError: invalid state; nothing was changed.
        """
        parsed = parse_state(state, self.context.sampler)
        with self.priorities.mutex:
            self.priorities.load(parsed)
            self.history.restore(parsed.recent)
        if self.share is not None:
            self.share.correction, self.share.least = (float(number) for number in state["shares"])

    def forget_before(self, epoch: int, step: int) -> None:
        with self.priorities.mutex:
            self.history.forget_before(epoch, step)

    def forget_pending(self) -> None:
        self.history.pending.clear()

    def _restored(self, draw: Draw) -> DrawnItems | None:
        """The rows of a batch of the loaded state, if all of them are still in the table."""
        rows = self.history.take_pending(draw)
        if rows is None:
            return None
        view: Snapshot = self.view()
        places, found = find(view.sequences, rows.names)
        if (
            not found.all()
            or (rows.steps >= view.lengths[places]).any()
            or len(places) != self.num_rows(draw)
        ):
            return None
        slots, generations = view.slots[places], view.generations[places]
        return DrawnItems(slots, rows.steps.copy(), generations, weights=rows.weights, sequences=rows.names)


def _rows_of(drawn: BatchRows | Array) -> BatchRows:
    """The rows of a batch, of `fill` as int64 [5, n], see `prioritized_batch`."""
    if isinstance(drawn, BatchRows):
        return drawn
    return BatchRows(drawn[3], drawn[1], drawn[4].view(np.float32)[: drawn.shape[1]])
