"""Plans batches of at most so many steps: trajectories in the order in which they are drawn."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.native.packed import choose, measure
from gear_loader.selection.base import Selection
from gear_loader.selection.selectors import Draw, Prioritized, Selector
from gear_loader.selection.step_budget import BudgetCounts, BudgetState, StepBudget
from gear_loader.storage.operations import READY
from gear_loader.storage.readers import Ticket
from gear_loader.storage.rows import SelectedRows
from gear_loader.utils.arrays import Array

__all__ = ["BudgetPlanner", "PlannedBatch"]

_DRAWN = 64
"""Rows of one draw: a draw takes about as long for 64 rows as for one."""
_DRAWN_BY_PRIORITY = 16
"""Rows of one draw by priority: fewer, so that new priorities count soon."""
_MOST_SKIPPED = 1 << 16
"""Rows skipped one after another before an endless epoch is an error."""


@dataclasses.dataclass
class PlannedBatch:
    """The rows of a batch, readable until `end`.

    Attributes:
        rows: with their spans. state: position after the batch. tickets: read tickets.
        counts: of this batch, and of rows left out since the one before.
    """

    rows: SelectedRows
    state: BudgetState
    tickets: list[Ticket]
    counts: BudgetCounts

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

    Args:
        selection: draws the rows.
        budget: the options.
        seed, epoch: of the draws.
        past: batches of earlier epochs, for schedules.
        endless: whether the stream goes on after as many rows as there are items at its start.
        state: position to go on from; the draws of waiting rows are repeated.
    """

    def __init__(
        self,
        selection: Selection,
        budget: StepBudget,
        *,
        seed: int,
        epoch: int,
        past: int,
        endless: bool,
        state: BudgetState | None = None,
    ) -> None:
        self._selection, self._budget = selection, budget
        self._selector = selection.context.selector
        self._reader = selection.context.table.reader()
        self._seed, self._epoch, self._past, self._endless = seed, epoch, past, endless
        self._size = self.draw_size(self._selector)
        self._view = selection.look()
        self._state = state = state or BudgetState()
        self._queue: SelectedRows | None = None
        self._origins: Array = np.empty(
            (2, 0), dtype=np.int64
        )  # number of the draw and row of each queued row
        self._draws: dict[int, tuple[int, int, int, int]] = {}
        self._counts = BudgetCounts()
        self._skipped_together = 0
        if state.waiting:
            self._repeat(state)

    @staticmethod
    def draw_size(selector: Selector) -> int:
        """Rows of one draw."""
        return _DRAWN_BY_PRIORITY if isinstance(selector, Prioritized) else _DRAWN

    @property
    def number(self) -> int:
        """Number of the next batch."""
        return self._state.number

    def next(self) -> PlannedBatch | None:
        """The next batch, which the caller ends; None at the end of the stream.

        Raises:
            SchemaError: a trajectory is longer than the budget, and `too_long` is ``"error"``.
            TableEmptyError: there is nothing to draw from.
        """
        tickets: list[Ticket] = []
        try:
            taken = self._choose(tickets)
            if taken is None:
                return None
            assert self._queue is not None
            rows = self._queue.take(taken)
            self._keep(~taken)
            self._draws = {number: self._draws[number] for number in np.unique(self._origins[0]).tolist()}
            self._state = dataclasses.replace(
                self._state,
                number=self._state.number + 1,
                draws=tuple(self._draws.values()),
                waiting=tuple((number, row) for number, row in self._origins.T.tolist()),
            )
            assert rows.spans is not None
            counts, self._counts = self._counts, BudgetCounts()
            counts.batches, counts.steps = 1, int(rows.spans[1].sum())
            return PlannedBatch(rows, self._state, tickets, counts)
        except BaseException:
            for ticket in tickets:
                self._selection.undo(ticket)
            raise

    def _choose(self, tickets: list[Ticket]) -> Array | None:
        """Mask of the queued rows of the next batch, bool [n], or None at the end; fills the queue as needed."""
        if self._queue is not None and len(self._queue):
            tickets.append(Ticket())
            self._reader.begin_read(tickets[0])
            self._drop_gone()
            self._measure()
        while True:
            if self._queue is not None and len(self._queue):
                assert self._queue.spans is not None
                taken = np.empty(len(self._queue), dtype=bool)
                budget = self._budget
                if not choose(self._queue.spans[1], budget.max_steps, budget.lookahead, taken):
                    return taken
                if not self._draw(tickets):
                    return taken
            elif not self._draw(tickets):
                return None

    def _draw(self, tickets: list[Ticket]) -> bool:
        """Queue the rows of one more draw under a new ticket; False at the end of the stream."""
        state, selector = self._state, self._selector
        items = selector.num_items(self._view)
        if items == 0:
            raise self._selection.context.empty()
        if state.first >= items:
            if not self._endless:
                return False
            self._view = self._selection.look()
            items = selector.num_items(self._view)
            state = dataclasses.replace(state, turn=state.turn + 1, first=0)
        count = min(self._size, items - state.first)
        drawn = state.draw, state.turn, state.first, count
        tickets.append(Ticket())
        rows = self._rows(drawn, tickets[-1])
        if len(tickets) > 1:
            tickets[-1].end()  # the first one keeps these rows readable too
        self._state = dataclasses.replace(state, draw=state.draw + 1, first=state.first + count)
        self._draws[drawn[0]] = drawn
        origins = np.stack((np.full(len(rows), drawn[0]), np.arange(len(rows))))
        before = 0 if self._queue is None else len(self._queue)
        self._add(rows, origins)
        skipped = self._counts.skipped
        self._measure(before)
        self._check_skipped(self._counts.skipped - skipped, len(rows))
        return True

    def _rows(self, drawn: tuple[int, int, int, int], ticket: Ticket) -> SelectedRows:
        number, turn, first, count = drawn
        past = self._past + self._state.number
        draw = Draw(self._seed, self._epoch, number, first, count, turn, past)
        rows = self._selection.draw(draw, ticket, self._view if self._selector.passes else None)
        assert isinstance(rows, SelectedRows)
        return rows

    def _repeat(self, state: BudgetState) -> None:
        """Queue the waiting rows of a state."""
        parts: dict[int, SelectedRows] = {}
        for drawn in state.draws:
            ticket = Ticket()
            try:
                parts[drawn[0]] = self._rows(drawn, ticket)
                ticket.end()
            finally:
                ticket.end()  # again: an exception may arrive anywhere
            self._draws[drawn[0]] = drawn
        for number, row in state.waiting:
            if row < len(parts[number]):
                self._add(
                    parts[number].take(np.arange(len(parts[number])) == row), np.array([[number], [row]])
                )

    def _add(self, rows: SelectedRows, origins: Array) -> None:
        rows.spans = np.empty((2, len(rows)), dtype=np.int64)
        self._queue = rows if self._queue is None else self._queue.joined(rows)
        self._origins = np.concatenate((self._origins, origins), 1)

    def _keep(self, which: Array) -> None:
        """Keep these rows of the queue, a mask, bool [n]."""
        assert self._queue is not None
        self._queue = self._queue.take(which)
        self._origins = self._origins[:, which]

    def _drop_gone(self) -> None:
        """Drop rows whose trajectories have been removed; those that are left are readable under a begun ticket."""
        assert self._queue is not None
        state, generation, _ = self._reader.slot_states()
        slots = self._queue.slots
        there = (state[slots] == READY) & (generation[slots] == self._queue.generations)
        if not there.all():
            self._counts.gone += int((~there).sum())
            self._keep(there)

    def _measure(self, first: int = 0) -> None:
        """Find the steps of the queued rows from number `first` on, and apply `too_long`."""
        assert self._queue is not None
        queue, budget = self._queue, self._budget
        assert queue.spans is not None
        spans = np.empty((2, len(queue) - first), dtype=np.int64)
        extent = self._reader.index_arrays()[0]
        bad = measure(queue.slots[first:], queue.anchors[first:], extent, budget.offset, budget.length, spans)
        self._reader.check_gathered(bad)
        queue.spans[:, first:] = spans
        long = queue.spans[1] > budget.max_steps
        if not long.any():
            return
        if budget.too_long == "truncate":
            np.minimum(queue.spans[1], budget.max_steps, out=queue.spans[1])
        elif budget.too_long == "skip":
            self._counts.skipped += int(long.sum())
            self._keep(~long)
        else:
            worst = int(np.flatnonzero(long)[0])
            raise SchemaError(
                f"The trajectory of index {queue.slots[worst]} has {queue.spans[1][worst]:,} steps, more than "
                f"max_steps={budget.max_steps:,}. Use a larger max_steps, too_long='truncate' for its first steps, or "
                "too_long='skip' to leave such trajectories out."
            )

    def _check_skipped(self, skipped: int, drawn: int) -> None:
        """Raise SchemaError if an endless stream has had nothing but trajectories to skip for long."""
        self._skipped_together = self._skipped_together + skipped if skipped == drawn else 0
        if self._endless and self._skipped_together >= _MOST_SKIPPED:
            raise SchemaError(
                f"The last {self._skipped_together:,} drawn trajectories have more than max_steps="
                f"{self._budget.max_steps:,} steps each, so too_long='skip' leaves none; use a larger max_steps."
            )
