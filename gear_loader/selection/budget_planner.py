"""Plans batches of at most so many steps: trajectories in the order in which they are drawn."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.native.packed import (
    GONE,
    KEPT,
    LONG,
    QUEUE_ANCHOR,
    QUEUE_DRAW,
    QUEUE_FIRST,
    QUEUE_GENERATION,
    QUEUE_ROW,
    QUEUE_SLOT,
    QUEUE_STEPS,
    QUEUE_WIDTH,
    choose,
    screen,
)
from gear_loader.selection.base import Selection
from gear_loader.selection.grouping import Groups
from gear_loader.selection.samplers import Draw, Sampler
from gear_loader.selection.step_budget import BudgetCounts, BudgetState, DrawnPart, StepBudget
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.readers import Ticket
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

_DRAWN = 64
"""Rows of one draw: a draw takes about as long for 64 rows as for one."""
_DRAWN_BY_PRIORITY = 16
"""Rows of one draw by priority: fewer, so that new priorities count soon."""
_MOST_SKIPPED = 1 << 14
"""Rows skipped one after another before an endless epoch is an error."""


@dataclasses.dataclass
class PlannedBatch:
    """The rows of a batch, readable until `end`.

    Attributes:
        rows: `SelectedRows` with their spans, or the rows of shards. state: position after the batch.
        again: plans another batch in place of one whose trajectories are all lost; None at the end of the stream.
        tickets: read tickets. counts: of this batch, and of rows left out since the one before.
    """

    rows: Any
    state: BudgetState
    tickets: list[Any]
    counts: BudgetCounts
    again: Callable[[], PlannedBatch | None] = lambda: None

    def leave_out(self, error: LostRowsError) -> None:
        """Leave out the trajectories that cannot be read, and count them; plan another batch if no others are left."""
        lost = (self.rows.slots[:, None] == error.slots) & (
            self.rows.generations[:, None] == error.generations
        )
        kept = ~lost.any(1)
        if kept.all():
            raise error
        spans = self.rows.spans
        assert spans is not None
        self.counts.steps -= int(spans[1, ~kept].sum())
        self.counts.gone += int((~kept).sum())
        self.rows = self.rows.take(kept)
        if kept.any():
            return
        self.end()
        other = self.again()
        if other is None:
            self.counts.batches = 0
            return
        other.counts.gone += self.counts.gone
        other.counts.skipped += self.counts.skipped
        self.rows, self.state, self.tickets, self.counts = (
            other.rows,
            other.state,
            other.tickets,
            other.counts,
        )

    def gathered(self) -> int:
        """Count what was left out when the batch was gathered; return its number of rows."""
        self.counts.gone += getattr(self.rows, "gone", 0)
        self.counts.steps -= getattr(self.rows, "lost_steps", 0)
        return len(self.rows)

    def end(self) -> None:
        """Release the read tickets; idempotent."""
        for ticket in self.tickets:
            ticket.end()


class BudgetPlanner:
    """Plans one batch after another from a stream of draws.

    Drawn rows wait in a queue. A batch takes from it in order: the first row, then each that fits, until more than
    `lookahead` rows did not fit; the next batch begins with the first of those. So every row is in exactly one batch,
    at most ``lookahead + 1`` batches after the first that had no room for it. Only rows whose trajectory is removed
    while they wait are left out.

    A training step is one batch; a subclass plans those of several ranks.

    Args:
        seed, epoch: of the draws.
        past: batches of earlier epochs, for schedules.
        endless: whether the stream goes on after as many rows as there are items at its start.
        view: these items, of `Selection.await_items`.
        state: position to go on from; the draws of waiting rows are repeated.
    """

    _num_batches = 1  # of a training step

    def __init__(
        self,
        selection: Selection,
        budget: StepBudget,
        *,
        seed: int,
        epoch: int,
        past: int,
        endless: bool,
        view: Any,
        state: BudgetState | None = None,
    ) -> None:
        self._selection, self._budget = selection, budget
        self._sampler = selection.context.sampler
        self._reader = selection.context.table._engine.reader()
        self._seed, self._epoch, self._past, self._endless = seed, epoch, past, endless
        self._size = self.draw_size(self._sampler, selection.context.grouping)
        self._view = view
        self._state = state = state or BudgetState()
        self._queue: Array = np.empty((QUEUE_WIDTH, 0), dtype=np.int64)
        self._more: list[Array | None] | None = None  # weights, counts, numbers and ids of the queued rows
        self._draws: dict[int, DrawnPart] = {}
        self._counts = BudgetCounts()
        self._skipped_together = 0
        self._ready: collections.deque[PlannedBatch] = collections.deque()
        if state.waiting.shape[1]:
            self._repeat(state)

    @staticmethod
    def draw_size(sampler: Sampler, grouping: Groups | None = None) -> int:
        """Items of one draw: rows, or groups."""
        rows = _DRAWN_BY_PRIORITY if sampler.by_priority else _DRAWN
        return rows if grouping is None else max(1, rows // grouping.size)

    def plans_for(self, selection: Selection) -> bool:
        """Whether the rows are drawn by this selection."""
        return self._selection is selection

    @property
    def number(self) -> int:
        """Number of this rank's next batch."""
        return self._state.number - len(self._ready)

    def next(self) -> PlannedBatch | None:
        """The next batch, which the caller ends; None at the end of the stream.

        Raises:
            SchemaError: a trajectory is longer than the budget, and `too_long` is ``"error"``.
            TableEmptyError: there is nothing to draw from.
        """
        if self._ready:
            return self._ready.popleft()
        tickets: list[Any] = []
        try:
            self._plan(tickets)
            return self._ready.popleft() if self._ready else None
        except BaseException:
            self._ready.clear()
            for ticket in tickets:
                self._selection.undo(ticket)
            raise

    def _plan(self, tickets: list[Any]) -> None:
        """Plan the batches of one training step, and make those of this rank ready."""
        before = self._state
        self._look_again(tickets)
        parts: list[Any] = []
        while len(parts) < self._num_batches:
            chosen, others = self._choose(tickets)
            if not len(chosen):
                break
            parts.append(self._rows_at(chosen))
            self._keep(others)
        parts = self._deal(parts)
        if not parts:
            for ticket in tickets:
                ticket.end()
            return
        self._state = after = self._waiting(before.number + len(parts))
        for place, rows in enumerate(parts, start=1):
            counts, self._counts = self._counts, BudgetCounts()
            counts.batches, counts.steps = 1, int(rows.spans[1].sum())
            # A position within a step is the one before it: the step is planned again.
            state = after if place == len(parts) else before
            self._ready.append(self._planned(rows, state, tickets, counts))

    def _look_again(self, tickets: list[Any]) -> None:
        """Drop waiting rows that were removed meanwhile, under a new ticket."""
        if self._queue.shape[1]:
            tickets.append(Ticket())
            self._reader.begin_read(tickets[0])
            self._screen(0)

    def _choose(self, tickets: list[Any]) -> tuple[Array, Array]:
        """Draw until a batch is full, or the stream ends; places of its rows in the queue, and of the others."""
        while True:
            places = np.empty(self._queue.shape[1], dtype=np.int64)
            rows, _, more = choose(self._queue, self._budget.max_steps, self._budget.lookahead, places)
            if not more or not self._draw(tickets):
                return places[:rows], places[rows:]

    def _deal(self, parts: list[Any]) -> list[Any]:
        """This rank's batches of a training step."""
        return parts

    def _waiting(self, number: int) -> BudgetState:
        """The position with the rows of the queue, before batch `number`."""
        waiting = self._queue[QUEUE_DRAW : QUEUE_ROW + 1]
        state = self._state
        oldest = int(waiting[0, 0]) if waiting.shape[1] else state.draw
        self._draws = {n: drawn for n, drawn in self._draws.items() if n >= oldest}
        draws = tuple(self._draws.values())
        return BudgetState(number, state.draw, state.turn, state.first, draws, waiting, *self._names())

    def _names(self) -> tuple[Array | None, Array | None]:
        """Ids and anchors of the queued rows, int64 [2, n], and their weights; None where draws are repeated."""
        weights, counted, _, ids = self._more_of(np.arange(self._queue.shape[1]))
        if ids is None or counted is not None:
            return None, None
        return np.stack((ids, self._queue[QUEUE_ANCHOR])), weights

    def _rows_at(self, places: Array) -> Any:
        """The rows at some places of the queue, as those of a batch."""
        names, (weights, counted, numbers, _) = self._queue.take(places, 1), self._more_of(places)
        slots, anchors, generations = names[:QUEUE_DRAW]
        return SelectedRows(slots, anchors, generations, weights, counted, numbers, names[QUEUE_FIRST:])

    def _planned(
        self, rows: Any, state: BudgetState, tickets: list[Any], counts: BudgetCounts
    ) -> PlannedBatch:
        return PlannedBatch(rows, state, tickets, counts, self._again)

    def _again(self) -> PlannedBatch | None:
        """The next batch, with the number of the last one."""
        self._state = dataclasses.replace(self._state, number=self._state.number - 1)
        return self.next()

    def _draw(self, tickets: list[Any]) -> bool:
        """Queue the rows of one more draw under a new ticket; False at the end of the stream."""
        state, sampler = self._state, self._sampler
        count = self._size
        if sampler.passes or not self._endless:
            items = sampler.num_items(self._view)
            if items and state.first >= items:
                if not self._endless:
                    return False
                self._view = self._selection.await_items()
                items = sampler.num_items(self._view)
                state = dataclasses.replace(state, turn=state.turn + 1, first=0)
            if items == 0:
                raise self._selection.context.empty()
            count = min(count, items - state.first)
        drawn = state.draw, state.turn, state.first, count, self._past + state.number
        tickets.append(self._selection.new_ticket())
        rows = self._rows(drawn, tickets[-1])
        if len(tickets) > 1:
            tickets[-1].end()  # the first one keeps these rows readable too
        self._state = dataclasses.replace(state, draw=state.draw + 1, first=state.first + count)
        self._draws[drawn[0]] = drawn
        before = self._queue.shape[1]
        self._add(rows, drawn[0], np.arange(len(rows)))
        skipped = self._counts.skipped
        self._screen(before)
        self._check_skipped(self._counts.skipped - skipped, len(rows))
        return True

    def _rows(self, drawn: DrawnPart, ticket: Any) -> Any:
        """The rows of a draw."""
        number, turn, first, count, past = drawn
        draw = Draw(self._seed, self._epoch, number, first, count, turn, past)
        return self._selection.draw(draw, ticket, self._view if self._sampler.passes else None)

    def _repeat(self, state: BudgetState) -> None:
        """Queue the waiting rows of a state."""
        if state.rows is not None and self._find(state, state.rows):
            return
        parts: dict[int, Any] = {}
        for drawn in state.draws:
            ticket = self._selection.new_ticket()
            parts[drawn[0]] = Ticket.during(ticket, functools.partial(self._rows, drawn, ticket))
            self._draws[drawn[0]] = drawn
        for number, row in state.waiting.T.tolist():
            rows = parts[number]
            if row < len(rows):
                self._add(rows.take(np.arange(len(rows)) == row), number, np.array([row]))

    def _find(self, state: BudgetState, rows: Array) -> bool:
        """Queue the waiting rows of a state by their ids; False if the table has none of them."""
        ids, inverse = np.unique(rows[0], return_inverse=True)
        ticket = Ticket()

        def look() -> tuple[Array, Array]:
            self._reader.begin_read(ticket)
            slots = self._selection.context.table._engine.index.slots_of(ids)[inverse.reshape(-1)]
            return slots, self._reader.slot_states()[1][slots]

        slots, generations = ticket.during(look)
        present = np.flatnonzero(slots >= 0)
        if not len(present):
            return False
        names = np.empty((QUEUE_WIDTH, len(present)), dtype=np.int64)
        names[QUEUE_SLOT], names[QUEUE_ANCHOR] = slots[present], rows[1, present]
        names[QUEUE_GENERATION] = generations[present]
        names[QUEUE_DRAW : QUEUE_ROW + 1] = state.waiting[:, present]
        weights = None if state.weights is None else state.weights[present]
        self._enqueue(names, [weights, None, None, rows[0, present]])
        self._counts.gone += len(slots) - len(present)
        self._draws = {drawn[0]: drawn for drawn in state.draws}
        return True

    def _add(self, rows: Any, draw: int, numbers: Array) -> None:
        """Queue rows of a draw; `numbers`: those of the rows in it."""
        names = np.empty((QUEUE_WIDTH, len(rows)), dtype=np.int64)
        names[QUEUE_SLOT], names[QUEUE_ANCHOR] = rows.slots, rows.anchors
        names[QUEUE_GENERATION], names[QUEUE_DRAW], names[QUEUE_ROW] = rows.generations, draw, numbers
        ids = self._selection.context.table.ids(rows.slots)
        self._enqueue(names, [rows.weights, rows.counts, rows.numbers, ids])

    def _enqueue(self, names: Array, parts: list[Array | None]) -> None:
        """Queue rows: int64 [QUEUE_WIDTH, n], and what else belongs to them."""
        self._queue = np.concatenate((self._queue, names), 1) if self._queue.shape[1] else names
        if all(part is None for part in parts):
            return
        if self._more is None or self._queue.shape[1] == names.shape[1]:
            self._more = parts
            return
        pairs = zip(self._more, parts, strict=True)
        self._more = [
            None if one is None or other is None else np.concatenate((one, other), -1) for one, other in pairs
        ]

    def _more_of(self, places: Array) -> list[Array | None]:
        """Weights, counts, numbers and ids of queued rows, int64 [n]."""
        if self._more is None:
            return [None] * 4
        return [None if part is None else part.take(places, -1) for part in self._more]

    def _keep(self, places: Array) -> None:
        """Keep these rows of the queue, int64 [n]."""
        if self._more is not None:
            self._more = self._more_of(places)
        self._queue = self._queue.take(places, 1)

    def _screen(self, begin: int) -> None:
        """Measure the queued rows from number `begin` on; drop those removed from the table, and apply `too_long`."""
        results = self._measured(begin)
        if results is None:
            return
        gone, long = results == GONE, results == LONG
        if long.any() and self._budget.too_long == "error":
            worst = int(np.flatnonzero(long)[0])
            raise SchemaError(
                f"The trajectory of {self._named(worst)} has {self._queue[QUEUE_STEPS, worst]:,} steps, more "
                f"than max_steps={self._budget.max_steps:,}. Use a larger max_steps, too_long='truncate' for its first "
                "steps, or too_long='skip' to leave such trajectories out."
            )
        self._counts.gone += int(gone.sum())
        self._counts.skipped += int(long.sum())
        self._keep(np.flatnonzero(results == KEPT))

    def _named(self, row: int) -> str:
        """The name of a queued row's trajectory."""
        return f"index {self._queue[QUEUE_SLOT, row]}"

    def _measured(self, begin: int) -> Array | None:
        """Measure, and truncate, the queued rows from number `begin` on.

        Returns:
            `KEPT`, `GONE` or `LONG` for each row of the queue, int8 [n]; None if all are kept.
        """
        budget, queue = self._budget, self._queue
        states, generations, _ = self._reader.slot_states()
        results = np.zeros(queue.shape[1], dtype=np.int8)
        others = screen(
            queue,
            begin,
            states,
            generations,
            READY,
            self._reader.index_arrays()[0],
            budget.offset,
            budget.length,
            budget.final,
            budget.max_steps,
            budget.too_long == "truncate",
            results,
        )
        return results if others else None

    def _check_skipped(self, skipped: int, drawn: int) -> None:
        """Raise SchemaError if an endless stream has had nothing but trajectories to skip for long."""
        self._skipped_together = self._skipped_together + skipped if skipped == drawn else 0
        if self._endless and self._skipped_together >= _MOST_SKIPPED:
            raise SchemaError(
                f"The last {self._skipped_together:,} drawn trajectories have more than max_steps="
                f"{self._budget.max_steps:,} steps each, so too_long='skip' leaves none; use a larger max_steps."
            )
