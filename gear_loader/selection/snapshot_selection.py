"""Selection from a snapshot of the table: uniform, oldest or newest first."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gear_loader.native.random import uniform_rows
from gear_loader.selection.base import ANCHOR_KINDS, REDRAWN, Selection, SelectionContext
from gear_loader.selection.random import signed
from gear_loader.selection.selectors import (
    Draw,
    Fifo,
    SnapshotSelector,
    Uniform,
    anchors,
    replacements,
)
from gear_loader.storage.inline import InlineBatch, Places, uniform_batch
from gear_loader.storage.reader import Snapshot
from gear_loader.storage.readers import Ticket
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

__all__ = ["SnapshotSelection"]


class SnapshotSelection(Selection):
    """Draws rows from a snapshot, or from either end of the insertion order."""

    def __init__(self, context: SelectionContext) -> None:
        super().__init__(context)
        selector = context.selector
        self._by_step, self._anchor = selector.unit == "step", ANCHOR_KINDS[context.anchor]
        self._draws_uniformly = type(selector) is Uniform and selector.replacement and not context.counts
        self._items: tuple[Snapshot, Places] | None = (
            None  # for `fill`: a snapshot, and what is drawn from it
        )

    def fill(self, draw: Draw, batch: InlineBatch) -> bool:
        """See `Selection.fill`."""
        context, count = self.context, draw.count
        reader = context.table.reader()
        if not self._draws_uniformly or count != batch.count or not reader.draws_inline:
            return False
        snapshot = reader.known()
        if snapshot is None:
            return False
        if self._items is None or self._items[0] is not snapshot:
            view = self.anchors_of(self.view(snapshot))
            if len(view) == 0:
                return False
            self._items = snapshot, Places(view.slots, view.lengths, view.generations, view.sums[1])
        return reader.draw_inline(
            uniform_batch,
            batch,
            self._items[1],
            snapshot.version,
            count if context.limited else 0,
            reader.arrays.block_steps,
            self._by_step,
            self._anchor,
            context.first,
            signed(draw.seed),
            draw.step,
            draw.epoch,
        )

    def draw(self, draw: Draw, ticket: Ticket, frozen: Snapshot | None = None) -> SelectedRows:
        """See `Selection.draw`."""
        return self.when_drawable(lambda: self._draw(draw, ticket, frozen), ticket)

    def _draw(self, draw: Draw, ticket: Ticket, frozen: Snapshot | None) -> SelectedRows:
        selector = self.context.selector
        assert isinstance(selector, SnapshotSelector)
        if isinstance(selector, Fifo) and frozen is None and not self.context.filters:
            return self._draw_from_end(selector, draw, ticket)
        _, snapshot = self.context.table.reader().begin_snapshot(self.context.samples(draw.count), ticket)
        view = self.anchors_of(self.view(snapshot))
        if self._draws_uniformly and frozen is None and len(view):
            assert isinstance(selector, Uniform)
            return self._draw_uniform(selector, view, draw)
        items = view if frozen is None else frozen
        if selector.num_items(items) == 0 or len(view) == 0:
            raise self.context.empty()
        positions, steps = selector.select(items, draw)
        slots, lengths, generations = (
            part[positions] for part in (items.slots, items.lengths, items.generations)
        )
        if steps is None:
            steps = anchors(self.context.anchor, lengths, draw)
        if items.version != view.version:
            self._replace_stale(view, draw, slots, steps, generations)
        rows = (slots, steps + self.context.first, generations)
        times = self.count_samples(slots, generations, lambda *which: self._redraw(draw, rows, *which))
        likely = 1 / selector.num_items(items) if isinstance(selector, Uniform) else 1.0
        return self.rows(*rows, times, likely)

    def _draw_uniform(self, selector: Uniform, view: Snapshot, draw: Draw) -> SelectedRows:
        """`Uniform.select` and `anchors` in one compiled call."""
        names = np.empty((3, draw.count), dtype=np.int64)
        uniform_rows(
            view.slots,
            view.lengths,
            view.generations,
            view.sums[1],
            self._by_step,
            self._anchor,
            signed(draw.seed),
            draw.step,
            draw.epoch,
            names,
        )
        names[1] += self.context.first
        return SelectedRows(*names)

    def _draw_from_end(self, selector: Fifo, draw: Draw, ticket: Ticket) -> SelectedRows:
        # Trajectories are linked in insertion order, so nothing is sorted. If this fails, the draws that `take_ends`
        # has counted stay counted.
        table, samples = self.context.table, self.context.samples(draw.count)
        times: Array | None = None
        end: dict[str, Any] = {"newest": selector.newest, "samples": samples, "ticket": ticket}
        if table.rules.max_times_sampled is not None and selector.unit == "trajectory":
            _, slots, times = table.reader().take_ends(draw.count, **end)
        else:
            _, slots = table.reader().begin_ends(draw.count, **end)
        if len(slots) == 0:
            raise self.context.empty()
        lengths = table.reader().index_arrays()[0][slots, 0]
        _, generation, sequence = table.reader().slot_states()
        order = slice(None, None, -1) if selector.newest else slice(None)
        part = Snapshot(-1, *(a[order] for a in (slots, lengths, generation[slots], sequence[slots])))
        positions, steps = selector.select(part, draw)
        if steps is None:
            steps = anchors(self.context.anchor, part.lengths[positions], draw)
        rows = (part.slots[positions], steps, part.generations[positions])
        if times is not None:
            times = times[order][positions]
        else:
            times = self.count_samples(rows[0], rows[2], lambda *which: self._redraw(draw, rows, *which))
        return self.rows(*rows, times, 1.0)

    def _redraw(self, draw: Draw, rows: tuple[Array, Array, Array], which: Array, turn: int) -> bool:
        """Replace rows `which` by random rows of a new snapshot; see `count_samples`."""
        view = self.anchors_of(self.view())
        if len(view) == 0:
            return False
        again, stream = dataclasses.replace(draw, count=len(which)), REDRAWN + 2 * turn
        if self.context.selector.unit == "step":
            others, at = view.locate(again.integers(stream, view.num_steps))
        else:
            others = again.integers(stream, len(view))
            at = anchors(self.context.anchor, view.lengths[others], again, stream + 1)
        for part, values in zip(
            rows, (view.slots[others], at + self.context.first, view.generations[others]), strict=True
        ):
            part[which] = values
        return True

    def _replace_stale(
        self, view: Snapshot, draw: Draw, slots: Array, steps: Array, generations: Array
    ) -> None:
        state, generation, _ = self.context.table.reader().slot_states()
        stale = np.flatnonzero((state[slots] != READY) | (generation[slots] != generations))
        if len(stale):
            others, at = replacements(self.context.selector.unit, view, draw)
            if at is None:
                at = anchors(self.context.anchor, view.lengths[others], draw)
            others, at = others[stale], at[stale]
            slots[stale], steps[stale], generations[stale] = view.slots[others], at, view.generations[others]
