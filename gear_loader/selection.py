"""A selector at work on one table: what a batch is made of, from the look at the table to the gathered rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from gear_loader.collector import Buffers, Collector
from gear_loader.errors import SchemaError, TableEmptyError
from gear_loader.index import Snapshot
from gear_loader.selectors import Draw, Fifo, Selector, SnapshotSelector, anchors, replacements
from gear_loader.slots import READY, Array
from gear_loader.table import Table

__all__ = ["Anchor", "Job", "Selection", "SnapshotSelection"]

Anchor = Literal["uniform", "first", "last"]


@dataclasses.dataclass(frozen=True)
class Job:
    """What selects from what.

    Attributes:
        table, selector: these.
        anchor: the step of a trajectory that windows are relative to, where the selector chooses trajectories.
        subset: a function of sequence numbers: which trajectories count. None for all.
    """

    table: Table
    selector: Selector
    anchor: Anchor
    subset: Callable[[Array], Array] | None

    def chosen(self, sequences: Array) -> Array:
        """Which of the trajectories with these sequence numbers count, bool [n].

        Raises:
            SchemaError: the user's function returned something else.
        """
        if self.subset is None:
            return np.ones(len(sequences), dtype=bool)
        chosen = np.asarray(self.subset(sequences), dtype=bool)
        if chosen.shape != (len(sequences),):
            raise SchemaError(
                f"subset returned shape {list(chosen.shape)} for {len(sequences)} sequence numbers; "
                f"expected [{len(sequences)}]."
            )
        return chosen

    def empty(self) -> TableEmptyError:
        """The error for a table in which nothing counts."""
        count = len(self.table)
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
            self._seen = (snapshot, snapshot.take(self.job.chosen(snapshot.sequences)))
        return self._seen[1]

    def fill(
        self, collector: Collector, buffers: Buffers, draw: Draw, frozen: Snapshot | None
    ) -> tuple[int, int]:
        """Draw a batch and gather it.

        Args:
            frozen: what to draw from, if not from what is there.

        Returns:
            The ticket under which the table is read, which the caller gives back when the gather is done; the rows.
        """
        raise NotImplementedError


class SnapshotSelection(Selection):
    """Works from a list of what there is: for uniform selection and for order of age."""

    def fill(
        self, collector: Collector, buffers: Buffers, draw: Draw, frozen: Snapshot | None
    ) -> tuple[int, int]:
        """See `Selection.fill`."""
        selector = self.job.selector
        assert isinstance(selector, SnapshotSelector)
        if isinstance(selector, Fifo) and frozen is None and self.job.subset is None:
            return self._fill_from_end(selector, collector, buffers, draw)
        ticket, snapshot = self.job.table.begin_snapshot()
        try:
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
            collector.collect(buffers, slots, steps, generations)
        except BaseException:
            self.job.table.end_read(ticket)
            raise
        return ticket, len(slots)

    def _fill_from_end(
        self, selector: Fifo, collector: Collector, buffers: Buffers, draw: Draw
    ) -> tuple[int, int]:
        # Nothing is sorted: the oldest and the newest trajectories are linked.
        table = self.job.table
        ticket, slots = table.begin_ends(draw.count, newest=selector.newest)
        try:
            if len(slots) == 0:
                raise self.job.empty()
            lengths = table.index_arrays()[0][slots, 0]
            _, generation, sequence = table.slot_states()
            order = slice(None, None, -1) if selector.newest else slice(None)
            part = Snapshot(-1, *(a[order] for a in (slots, lengths, generation[slots], sequence[slots])))
            positions, steps = selector.select(part, draw)
            if steps is None:
                steps = anchors(self.job.anchor, part.lengths[positions], draw)
            collector.collect(buffers, part.slots[positions], steps, part.generations[positions])
        except BaseException:
            table.end_read(ticket)
            raise
        return ticket, draw.count

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
