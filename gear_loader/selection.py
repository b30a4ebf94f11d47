"""A selector at work on one table: what a batch is made of, from the look at the table to the gathered rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gear_loader.collector import Buffers, Collector, Drawn
from gear_loader.errors import SchemaError, TableEmptyError
from gear_loader.ids import sequences_of
from gear_loader.index import Snapshot
from gear_loader.index_ops import READY, Array
from gear_loader.selectors import Draw, Fifo, Selector, SnapshotSelector, Uniform, anchors, replacements
from gear_loader.table import Table, Ticket

__all__ = ["REDRAWN", "Anchor", "Job", "Selection", "SnapshotSelection"]

Anchor = Literal["uniform", "first", "last"]
REDRAWN = 16  # streams of random numbers from here on are for rows that have to be drawn once more


@dataclasses.dataclass(frozen=True)
class Job:
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

    def __init__(self, job: Job) -> None:
        self.job = job
        self._seen: tuple[Snapshot, Snapshot] | None = None

    def view(self, snapshot: Snapshot | None = None) -> Snapshot:
        """The trajectories that count, now or in `snapshot`."""
        snapshot = self.job.table.snapshot() if snapshot is None else snapshot
        if self.job.subset is None:
            return snapshot
        if self._seen is None or self._seen[0] is not snapshot:
            self._seen = (snapshot, snapshot.take(self.job.chosen(snapshot.slots)))
        return self._seen[1]

    def look(self) -> Any:
        """What there is now, for an epoch to begin with: it has a length, and `num_steps`."""
        return self.view()

    def after_fork(self) -> None:
        """In a forked child, of whose parent's threads none is here: make sure that nothing waits for one."""

    def last_look(self) -> Any:
        """`look`, for whoever only wants to know how much there is."""
        return self.view()

    def fill(
        self, collector: Collector, buffers: Buffers, draw: Draw, frozen: Any, ticket: Any = None
    ) -> tuple[Any, int]:
        """Draw a batch and gather it.

        Args:
            frozen: what to draw from, if not from what is there: what `look` returned.
            ticket: from `Collector.new_ticket`, so that the caller can give it back if this call is interrupted as it
                returns; None makes one.

        Returns:
            The ticket under which is read, for `Collector.end_read` when the gather is done; the rows.
        """
        raise NotImplementedError

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
        if not self.job.counts:
            return None
        table = self.job.table
        times = table.count_samples(slots, generations)
        if table.rules.max_times_sampled is None:
            return times
        patience, turn = table.patience, 0
        while len(refused := np.flatnonzero(times == 0)):
            if redraw(refused, turn):
                times[refused] = table.count_samples(slots[refused], generations[refused])
                turn += 1
            elif not patience.sleep():
                raise TableEmptyError(
                    f"{len(refused)} of {len(slots)} rows were waited for {patience.timeout:g} s: every trajectory has "
                    f"been drawn {table.rules.max_times_sampled} times (max_times_sampled) and is gone. Add "
                    "trajectories, or draw smaller batches."
                )
        return times

    def give_up(self, ticket: Ticket) -> None:
        """A draw has failed: it is not read, and it does not count. Idempotent."""
        ticket.end()
        count, ticket.counted = ticket.counted, 0
        self.job.table.uncount_samples(count)

    def drawn(
        self,
        slots: Array,
        steps: Array,
        generations: Array,
        times: Array | None,
        probabilities: Array | float,
        weights: Array | None = None,
    ) -> Drawn:
        """What the collector needs to know of a batch."""
        if not self.job.informs or times is None:
            return Drawn(slots, steps, generations, weights)
        ages, nanoseconds = self.job.table.ages(slots, self.job.table.slot_states()[2][slots])
        numbers = np.empty((2, len(slots)), dtype=np.float32)
        numbers[0], numbers[1] = probabilities, nanoseconds / 1e9
        return Drawn(slots, steps, generations, weights, np.stack((times, ages)), numbers)


class SnapshotSelection(Selection):
    """Works from a list of what there is: for uniform selection and for order of age."""

    def fill(
        self,
        collector: Collector,
        buffers: Buffers,
        draw: Draw,
        frozen: Snapshot | None,
        ticket: Ticket | None = None,
    ) -> tuple[Ticket, int]:
        """See `Selection.fill`."""
        selector = self.job.selector
        assert isinstance(selector, SnapshotSelector)
        ticket = ticket or Ticket()
        if isinstance(selector, Fifo) and frozen is None and self.job.subset is None:
            return self._fill_from_end(selector, collector, buffers, draw, ticket)
        try:
            _, snapshot = self.job.table.begin_snapshot(self.job.samples(draw.count), ticket)
            view = self.view(snapshot)
            items = view if frozen is None else frozen
            if selector.num_items(items) == 0 or len(view) == 0:
                raise self.job.empty()
            positions, steps = selector.select(items, draw)
            slots, lengths, generations = (
                part[positions] for part in (items.slots, items.lengths, items.generations)
            )
            if steps is None:
                steps = anchors(self.job.anchor, lengths, draw)
            if items.version != view.version:
                self._replace_gone(view, draw, slots, steps, generations)
            rows = (slots, steps, generations)
            times = self.count_samples(slots, generations, lambda *which: self._redraw(draw, rows, *which))
            likely = 1 / selector.num_items(items) if isinstance(selector, Uniform) else 1.0
            collector.collect(buffers, self.drawn(*rows, times, likely))
        except BaseException:
            self.give_up(ticket)
            raise
        return ticket, len(slots)

    def _fill_from_end(
        self, selector: Fifo, collector: Collector, buffers: Buffers, draw: Draw, ticket: Ticket
    ) -> tuple[Ticket, int]:
        # Nothing is sorted: the oldest and the newest trajectories are linked.
        table, samples = self.job.table, self.job.samples(draw.count)
        times: Array | None = None
        end: dict[str, Any] = {"newest": selector.newest, "samples": samples, "ticket": ticket}
        try:
            if table.rules.max_times_sampled is not None and selector.unit == "trajectory":
                _, slots, times = table.take_ends(draw.count, **end)
            else:
                _, slots = table.begin_ends(draw.count, **end)
            if len(slots) == 0:
                raise self.job.empty()
            lengths = table.index_arrays()[0][slots, 0]
            _, generation, sequence = table.slot_states()
            order = slice(None, None, -1) if selector.newest else slice(None)
            part = Snapshot(-1, *(a[order] for a in (slots, lengths, generation[slots], sequence[slots])))
            positions, steps = selector.select(part, draw)
            if steps is None:
                steps = anchors(self.job.anchor, part.lengths[positions], draw)
            rows = (part.slots[positions], steps, part.generations[positions])
            if times is not None:
                times = times[order][positions]
            else:
                times = self.count_samples(rows[0], rows[2], lambda *which: self._redraw(draw, rows, *which))
            collector.collect(buffers, self.drawn(*rows, times, 1.0))
        except BaseException:
            self.give_up(ticket)  # what `take_ends` has taken is gone, and counts
            raise
        return ticket, draw.count

    def _redraw(self, draw: Draw, rows: tuple[Array, Array, Array], which: Array, turn: int) -> bool:
        """Random rows, out of what is there now, instead of the rows of these numbers; see `count_samples`."""
        view = self.view()
        if len(view) == 0:
            return False
        again, stream = dataclasses.replace(draw, count=len(which)), REDRAWN + 2 * turn
        if self.job.selector.unit == "step":
            others, at = view.locate(again.integers(stream, view.num_steps))
        else:
            others = again.integers(stream, len(view))
            at = anchors(self.job.anchor, view.lengths[others], again, stream + 1)
        for part, values in zip(rows, (view.slots[others], at, view.generations[others]), strict=True):
            part[which] = values
        return True

    def _replace_gone(
        self, view: Snapshot, draw: Draw, slots: Array, steps: Array, generations: Array
    ) -> None:
        state, generation, _ = self.job.table.slot_states()
        gone = np.flatnonzero((state[slots] != READY) | (generation[slots] != generations))
        if len(gone):
            others, at = replacements(self.job.selector.unit, view, draw)
            if at is None:
                at = anchors(self.job.anchor, view.lengths[others], draw)
            others, at = others[gone], at[gone]
            slots[gone], steps[gone], generations[gone] = view.slots[others], at, view.generations[others]
