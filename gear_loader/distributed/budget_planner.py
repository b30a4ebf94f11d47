"""Plans batches of at most so many steps over all shards: every rank plans the same, and takes its part."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from gear_loader.distributed.dealing import Balance, costs_of
from gear_loader.distributed.global_selection import GlobalSelection
from gear_loader.distributed.shard_source import ShardRows
from gear_loader.native.packed import (
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
)
from gear_loader.selection.balance import balance
from gear_loader.selection.budget_planner import BudgetPlanner, PlannedBatch
from gear_loader.selection.step_budget import BudgetCounts, BudgetState, DrawnPart, StepBudget
from gear_loader.utils.arrays import Array


class ShardBudgetPlanner(BudgetPlanner):
    """Plans the micro-batches of one training step after another, from a stream of draws over all shards.

    A step has `micro_batches` for each rank, made in the order of the draw as in one process. They are dealt so that
    the work of the ranks is about equal. In the last step of a stream each rank has as many as there are left: some are
    split, so that all ranks have the same number.

    Rows that wait hold no read ticket: a row that is gone when it is read is left out of its batch.

    Args:
        selection: draws the rows; every rank gets the records of all rows.
        budget, seed, epoch, past, endless, state: as for `BudgetPlanner`.
        micro_batches: batches of each rank in a step. kind: of the work that is balanced.
    """

    def __init__(
        self,
        selection: GlobalSelection,
        budget: StepBudget,
        *,
        micro_batches: int,
        kind: Balance,
        **options: Any,
    ) -> None:
        self._kind = kind
        self._ranks, self._rank = selection.shards.num_slices, selection.shards.place.data
        self._num_batches = self._ranks * micro_batches
        self._spare: Any = None
        super().__init__(selection, budget, **options)

    def _look_again(self, tickets: list[Any]) -> None:
        """Rows that wait are looked at when they are read."""

    def _deal(self, parts: list[ShardRows]) -> list[ShardRows]:
        if not parts:
            return parts
        parts = as_many(parts, self._ranks)
        costs = [costs_of(_steps(part), self._kind).sum() for part in parts]
        return [parts[number] for number in balance(costs, self._ranks)[self._rank].tolist()]

    def _planned(
        self, rows: ShardRows, state: BudgetState, tickets: list[Any], counts: BudgetCounts
    ) -> PlannedBatch:
        return PlannedBatch(rows, state, [rows.tickets], counts)

    def _rows_at(self, places: Array) -> ShardRows:
        weights, shards, records = self._more_of(places)
        assert shards is not None
        assert records is not None
        spans, most = np.ascontiguousarray(self._queue[QUEUE_FIRST:, places]), self._budget.max_steps
        return ShardRows(shards, records, None, self._spare, spans=spans, known=weights, max_steps=most)

    def _rows(self, drawn: DrawnPart, ticket: Any) -> ShardRows:
        rows: ShardRows = super()._rows(drawn, ticket)
        self._spare = rows.spare
        rows.known = rows.weights
        rows.measure(self._budget.offset, self._budget.length)
        return rows

    def _add(self, rows: ShardRows, draw: int, numbers: Array) -> None:
        names = np.empty((QUEUE_WIDTH, len(rows)), dtype=np.int64)
        records = rows.records
        names[QUEUE_SLOT], names[QUEUE_ANCHOR] = records["slot"], records["step"]
        names[QUEUE_GENERATION], names[QUEUE_DRAW], names[QUEUE_ROW] = records["generation"], draw, numbers
        assert rows.spans is not None
        names[QUEUE_FIRST:] = rows.spans
        self._enqueue(names, [rows.known, rows.shards, records])

    def _names(self) -> tuple[Array | None, Array | None]:
        return None, None

    def _repeat(self, state: BudgetState) -> None:
        super()._repeat(state)
        self._screen(0)

    def _named(self, row: int) -> str:
        assert self._more is not None
        assert self._more[1] is not None
        return f"{super()._named(row)} in shard {self._more[1][row]}"

    def _measured(self, begin: int) -> Array | None:
        steps = self._queue[QUEUE_STEPS]
        long = np.flatnonzero(steps[begin:] > self._budget.max_steps) + begin
        if not len(long):
            return None
        if self._budget.too_long == "truncate":
            steps[long] = self._budget.max_steps
            return None
        results = np.full(len(steps), KEPT, dtype=np.int8)
        results[long] = LONG
        return results


def _steps(part: ShardRows) -> Array:
    assert part.spans is not None
    steps: Array = part.spans[1]
    return steps


def as_many(parts: list[ShardRows], ranks: int) -> list[ShardRows]:
    """Batches whose number is a multiple of `ranks`: those of most rows are split, about in the middle of their steps.

    Where none can be split, because each has one row, the shortest are repeated: fewer than `ranks`.
    """
    parts = list(parts)
    while len(parts) % ranks:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        whole = parts[largest]
        if len(whole) < 2:
            shortest = sorted(parts, key=lambda part: int(_steps(part).sum()))
            missing = itertools.islice(itertools.cycle(shortest), ranks - len(parts) % ranks)
            return parts + [part.take(np.ones(len(part), dtype=bool)) for part in missing]
        ends = np.cumsum(_steps(whole))
        middle = int(np.clip(np.searchsorted(ends, ends[-1] / 2), 1, len(whole) - 1))
        first = np.arange(len(whole)) < middle
        parts[largest : largest + 1] = [whole.take(first), whole.take(~first)]
    return parts
