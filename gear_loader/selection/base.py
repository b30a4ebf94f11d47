"""A selector at work on one table: what a batch is made of, from the look at the table to the gathered rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SchemaError, TableEmptyError
from gear_loader.native.random import FIRST, LAST, UNIFORM
from gear_loader.selection.selectors import (
    Draw,
    Selector,
)
from gear_loader.storage.ids import sequences_of
from gear_loader.storage.reader import Snapshot
from gear_loader.storage.readers import Ticket
from gear_loader.storage.rows import SelectedRows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["ANCHOR_KINDS", "REDRAWN", "Anchor", "Selection", "SelectionContext"]

Anchor = Literal["uniform", "first", "last"]
ANCHOR_KINDS = {"uniform": UNIFORM, "first": FIRST, "last": LAST}
"""What compiled loops call the anchors."""
REDRAWN = 16  # streams of random numbers from here on are for rows that have to be drawn once more


@dataclasses.dataclass(frozen=True)
class SelectionContext:
    """What selects from what.

    Attributes:
        table, selector: these.
        anchor: the step of a trajectory that windows are relative to, where the selector chooses trajectories.
        subset: a function of sequence numbers: which trajectories count. None for all.
        limited: whether the table's rate limiter is asked.
        informs: whether batches carry ``sample_info``.
    """

    table: Table
    selector: Selector
    anchor: Anchor
    subset: Callable[[Array], Array] | None
    limited: bool = True
    informs: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is counted how often trajectories are drawn."""
        return self.informs or self.table.rules.max_times_sampled is not None

    def samples(self, count: int) -> int:
        """`count`, if drawing so many rows counts for the rate limiter."""
        return count if self.limited else 0

    def chosen(self, slots: Array) -> Array:
        """Which of the trajectories in these slots count, bool [n].

        It goes by the sequence numbers that they got when they were first stored, which they keep in other tables.

        Raises:
            SchemaError: the user's function returned something else.
        """
        if self.subset is None:
            return np.ones(len(slots), dtype=bool)
        chosen = np.asarray(self.subset(sequences_of(self.table.ids(slots))), dtype=bool)
        if chosen.shape != (len(slots),):
            raise SchemaError(
                f"subset returned shape {list(chosen.shape)} for {len(slots)} sequence numbers; "
                f"expected [{len(slots)}]."
            )
        return chosen

    def empty(self) -> TableEmptyError:
        """The error for a table in which nothing counts."""
        count = len(self.table)
        explain = getattr(self.subset, "explain_empty", None)  # of the part that `ReplayDataModule` makes
        if count and explain is not None:
            return TableEmptyError(explain(count))
        if count:
            return TableEmptyError(
                f"None of the table's {count:,} trajectories belongs to this dataset's subset."
            )
        return TableEmptyError("The table is empty: there is nothing to draw from. Add trajectories first.")


class Selection:
    """Base: what `ReplayDataset` asks of a selector at work."""

    def __init__(self, context: SelectionContext) -> None:
        self.context = context
        self._seen: tuple[Snapshot, Snapshot] | None = None

    def view(self, snapshot: Snapshot | None = None) -> Snapshot:
        """The trajectories that count, now or in `snapshot`."""
        snapshot = self.context.table.reader().snapshot() if snapshot is None else snapshot
        if self.context.subset is None:
            return snapshot
        if self._seen is None or self._seen[0] is not snapshot:
            self._seen = (snapshot, snapshot.take(self.context.chosen(snapshot.slots)))
        return self._seen[1]

    def look(self) -> Any:
        """What there is now, for an epoch to begin with: it has a length, and `num_steps`."""
        return self.view()

    def after_fork(self) -> None:
        """In a forked child, of whose parent's threads none is here: make sure that nothing waits for one."""

    def last_look(self) -> Any:
        """`look`, for whoever only wants to know how much there is."""
        return self.view()

    def new_ticket(self) -> Any:
        """A read ticket for one batch: made before it is taken, so that an interrupted draw can be undone."""
        return Ticket()

    def draw(self, draw: Draw, ticket: Any, frozen: Any = None) -> Any:
        """Draw the rows of a batch.

        Args:
            ticket: from `new_ticket`: taken here, and released by the caller when the rows have been gathered, or
                with `undo` where this raises.
            frozen: what to draw from, if not from what is there: what `look` returned.

        Returns:
            What the collector gathers: `SelectedRows`, `CudaRows`, or what a `ShardCollector` takes.
        """
        raise NotImplementedError

    def undo(self, ticket: Any) -> None:
        """A batch that was drawn under `ticket` has failed: it does not count. Idempotent."""
        ticket.end()
        count, ticket.counted = ticket.counted, 0
        self.context.table.reader().uncount_samples(count)

    def count_samples(
        self, slots: Array, generations: Array, redraw: Callable[[Array, int], bool]
    ) -> Array | None:
        """Count that these rows are drawn; rows whose trajectories have been drawn too often are drawn once more.

        Args:
            slots, generations: int64 [n].
            redraw: draws rows of these numbers anew, into `slots` and `generations` too; it is told how often that has
                been done. False if there is nothing to draw from.

        Returns:
            int64 [n]: how often each has been drawn by now; None if nobody wants to know.

        Raises:
            TableEmptyError: there was nothing left to draw from until the deadline.
        """
        if not self.context.counts:
            return None
        table = self.context.table
        times = table.reader().count_samples(slots, generations)
        if table.rules.max_times_sampled is None:
            return times
        patience, turn = table.reader().backoff(), 0
        while len(refused := np.flatnonzero(times == 0)):
            if redraw(refused, turn):
                times[refused] = table.reader().count_samples(slots[refused], generations[refused])
                turn += 1
            elif not patience.sleep():
                raise TableEmptyError(
                    f"{len(refused)} of {len(slots)} rows were waited for {patience.timeout:g} s: every trajectory has "
                    f"been drawn {table.rules.max_times_sampled} times (max_times_sampled) and is gone. Add "
                    "trajectories, or draw smaller batches."
                )
        return times

    def rows(
        self,
        slots: Array,
        steps: Array,
        generations: Array,
        times: Array | None,
        probabilities: Array | float,
        weights: Array | None = None,
    ) -> SelectedRows:
        """What the collector needs to know of a batch."""
        if not self.context.informs or times is None:
            return SelectedRows(slots, steps, generations, weights)
        ages, nanoseconds = self.context.table.reader().ages(
            slots, self.context.table.reader().slot_states()[2][slots]
        )
        numbers = np.empty((2, len(slots)), dtype=np.float32)
        numbers[0], numbers[1] = probabilities, nanoseconds / 1e9
        return SelectedRows(slots, steps, generations, weights, np.stack((times, ages)), numbers)
