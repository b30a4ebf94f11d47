"""Selection from a snapshot of the table: uniform, oldest or newest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gear_loader.native.random import uniform_rows
from gear_loader.selection.base import ANCHOR_KINDS, REDRAWN, Selection, SelectionContext
from gear_loader.selection.random import signed
from gear_loader.selection.samplers import REPLACED, Draw, SnapshotSampler, Uniform, anchors
from gear_loader.selection.uniform_cuda import CudaUniform
from gear_loader.storage.counters import VERSION
from gear_loader.storage.inline import InlineBatch, Places, uniform_batch, uniform_packed
from gear_loader.storage.queue_loops import queue_uniform
from gear_loader.storage.queued import QueuedBatch, QueuedDraw, QueuedSeveral
from gear_loader.storage.reader import TableReader
from gear_loader.storage.readers import Ticket
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.snapshot import Snapshot
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array


def rows_of(context: SelectionContext, view: Any, items: Array) -> tuple[Array, Array | None, Array, Array]:
    """The rows of items of a view: of trajectories, of steps, or of all members of groups.

    Args:
        view: `Snapshot` or `CompleteGroups`. items: int64 [n], their numbers.

    Returns:
        Slots, steps, lengths and generations, int64 [m]; no steps if items are no steps.
    """
    steps: Array | None = None
    if context.sampler.unit == "step":
        items, steps = view.locate(items)
    slots, lengths, generations = (
        part[items].reshape(-1) for part in (view.slots, view.lengths, view.generations)
    )
    return slots, steps, lengths, generations


def gone_rows(reader: TableReader, slots: Array, generations: Array) -> Array:
    """Numbers of the rows whose trajectories are no longer in the table, int64 [k]."""
    state, generation, _ = reader.slot_states()
    return np.flatnonzero((state[slots] != READY) | (generation[slots] != generations))


def random_rows(context: SelectionContext, view: Any, draw: Draw, stream: int) -> tuple[Array, Array, Array]:
    """Rows of `draw.count` random items of a view, in place of rows that are gone.

    Args:
        stream: of the items' random numbers; those of the anchors have the next one.

    Returns:
        Slots, numbers of anchors and generations, int64 [m].
    """
    slots, steps, lengths, generations = rows_of(
        context, view, draw.integers(stream, context.sampler.num_items(view))
    )
    return slots, anchors(context.anchor, lengths, draw, stream + 1) if steps is None else steps, generations


class SnapshotSelection(Selection):
    """Draws trajectories, steps or groups from a snapshot, or from either end of the insertion order."""

    def __init__(self, context: SelectionContext) -> None:
        super().__init__(context)
        sampler: Any = context.sampler
        self._sampler: SnapshotSampler = sampler
        self._by_step, self._anchor = sampler.unit == "step", ANCHOR_KINDS[context.anchor]
        self._first, self._stride = context.first, context.stride
        self._draws_uniformly = (
            type(sampler) is Uniform
            and sampler.replacement
            and not context.counts
            and context.grouping is None
        )
        self._on_gpu = CudaUniform(context, steps=self._by_step)
        # For `fill`: a snapshot, and what is drawn from it.
        self._items: tuple[Snapshot, Places] | None = None

    @property
    def is_quick(self) -> bool:
        context = self.context
        waits = context.waits or not context.table._engine.reader().draws_inline
        return self._draws_uniformly and context.subset is None and not waits

    def fill(self, draw: Draw, batch: InlineBatch) -> bool:
        reader = self.context.table._engine.reader()
        found = self._inline(draw, batch.count) if reader.draws_inline else None
        if found is None:
            return False
        given = reader.arrays.block_steps, *self._drawing(draw)
        loop = uniform_packed if batch.packed else uniform_batch
        return reader.draw_inline(loop, batch, *found, *given)

    def queue(self, draw: Draw, batch: QueuedBatch, ticket: Ticket) -> bool:
        reader = self.context.table._engine.reader()
        if isinstance(batch, QueuedDraw):
            return False
        if self._draws_uniformly and reader.queues_inline and reader.known() is None:
            reader.snapshot()  # the table has changed
        return self._queue([draw], batch, ticket)

    @property
    def standing(self) -> object:
        reader = self.context.table._engine.reader()
        if self._items is None or not reader.queues_inline or self._items[0] is not reader.known():
            return None
        return self._items[1]

    def queue_several(self, draws: Sequence[Draw], batches: QueuedSeveral, ticket: Ticket) -> bool:
        seed, epoch, count = draws[0].seed, draws[0].epoch, draws[0].count
        for each in draws:
            if each.epoch != epoch or each.count != count or each.seed != seed:
                return False
        return self._queue(draws, batches, ticket)

    def _queue(self, draws: Sequence[Draw], batch: QueuedBatch | QueuedSeveral, ticket: Ticket) -> bool:
        """`queue` of one batch, or of several with one seed and epoch, and as many rows each."""
        reader = self.context.table._engine.reader()
        found = self._inline(draws[0], batch.count) if reader.queues_inline else None
        if found is None:
            return False
        places, counter, since, samples = found
        held = self._on_gpu.held(places, batch, len(draws) * batch.count)
        members = batch.drawn if isinstance(batch, QueuedSeveral) and held[0] != 0 else batch.members
        *kinds, seed, _, epoch = self._drawing(draws[0])
        numbers: Array = np.array([each.step for each in draws], dtype=np.int64)
        given = (
            places.table,
            reader.arrays.block_steps,
            reader.arrays.num_blocks,
            *kinds,
            seed,
            numbers,
            epoch,
            held,
        )
        several = len(draws) * samples
        return reader.queue_inline(queue_uniform, batch, members, counter, since, several, ticket, *given)

    def _inline(self, draw: Draw, count: int) -> tuple[Places, int, int, int] | None:
        """What a compiled call draws from, as `TableReader.draw_inline` takes it; None if it cannot."""
        context = self.context
        if not self._draws_uniformly or count != draw.count:
            return None
        snapshot = context.table._engine.reader().known()
        if snapshot is None:
            return None
        if self._items is None or self._items[0] is not snapshot:
            view = self.drawable(snapshot)
            if len(view) == 0:
                return None
            self._items = snapshot, Places(view.slots, view.lengths, view.generations, view.sums[1])
        return self._items[1], VERSION, snapshot.version, context.samples(count)

    def _drawing(self, draw: Draw) -> tuple[Any, ...]:
        """How it draws, as `uniform_batch` takes it."""
        kinds = self._by_step, self._anchor, self._first, self._stride
        return *kinds, signed(draw.seed), draw.step, draw.epoch

    def draw(self, draw: Draw, ticket: Ticket, frozen: Any = None) -> SelectedRows:
        """See `Selection.draw`; over groups `draw` counts groups."""
        return self.when_drawable(lambda: self._draw(draw, ticket, frozen), ticket)

    def _draw(self, draw: Draw, ticket: Ticket, frozen: Any) -> SelectedRows:
        context, sampler, reader = self.context, self._sampler, self.context.table._engine.reader()
        if sampler.ordered and frozen is None and self.former is None and not context.filters:
            return self._draw_from_end(draw, ticket)
        if self.former is not None:
            self.former.expire()
        count = self.num_rows(draw)
        _, snapshot = reader.begin_snapshot(context.samples(count), ticket)
        view = self.drawable(snapshot)
        if self._draws_uniformly and frozen is None and len(view):
            return self._draw_uniform(view, draw)
        items = view if frozen is None else frozen
        size = sampler.num_items(items)
        if size == 0 or len(view) == 0:
            raise context.empty()
        slots, steps, lengths, generations = rows_of(context, items, sampler.items(size, draw))
        if items.version != view.version and len(gone := gone_rows(reader, slots, generations)):
            # Items with a row that is gone are replaced as a whole; all rows keep their random anchors.
            rows = count // draw.count
            gone = np.unique(gone // rows)
            gone = (gone[:, None] * rows + np.arange(rows)).reshape(-1)
            others = rows_of(context, view, draw.integers(REPLACED, sampler.num_items(view)))
            for mine, other in zip((slots, steps, lengths, generations), others, strict=True):
                if mine is not None and other is not None:
                    mine[gone] = other[gone]
        if steps is None:
            steps = anchors(context.anchor, lengths, dataclasses.replace(draw, count=count))
        drawn = slots, context.anchor_steps(steps), generations
        times = self.count_samples(slots, generations, lambda *which: self._redraw(draw, drawn, *which))
        return self.rows(*drawn, times, 1.0 if sampler.ordered else 1 / size)

    def _draw_uniform(self, view: Snapshot, draw: Draw) -> SelectedRows:
        """`Uniform.items` and `anchors` in one compiled call."""
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
        names[1] = self.context.anchor_steps(names[1])
        return SelectedRows(*names)

    def _draw_from_end(self, draw: Draw, ticket: Ticket) -> SelectedRows:
        # Trajectories are linked in insertion order, so nothing is sorted. If this fails, the draws that `take_ends`
        # has counted stay counted.
        context, sampler, reader = self.context, self._sampler, self.context.table._engine.reader()
        times: Array | None = None
        end: dict[str, Any] = {
            "newest": sampler.newest,
            "samples": context.samples(draw.count),
            "ticket": ticket,
        }
        if context.table.rules.max_times_sampled is not None and not self._by_step:
            _, slots, times = reader.take_ends(draw.count, **end)
        else:
            _, slots = reader.begin_ends(draw.count, **end)
        if len(slots) == 0:
            raise context.empty()
        lengths = reader.index_arrays()[0][slots, 0]
        _, generation, sequence = reader.slot_states()
        order = slice(None, None, -1) if sampler.newest else slice(None)
        part = Snapshot(-1, *(a[order] for a in (slots, lengths, generation[slots], sequence[slots])))
        items = sampler.items(sampler.num_items(part), draw)
        slots, steps, lengths, generations = rows_of(context, part, items)
        if steps is None:
            steps = anchors(context.anchor, lengths, draw)
        rows = slots, steps, generations
        if times is not None:
            times = times[order][items]
        else:
            times = self.count_samples(slots, generations, lambda *which: self._redraw(draw, rows, *which))
        return self.rows(*rows, times, 1.0)

    def _redraw(self, draw: Draw, rows: tuple[Array, Array, Array], which: Array, turn: int) -> bool:
        """Replace rows `which` by random rows of a new snapshot; see `count_samples`."""
        view = self.drawable()
        if len(view) == 0:
            return False
        again = dataclasses.replace(draw, count=len(which))
        slots, steps, generations = random_rows(self.context, view, again, REDRAWN + 2 * turn)
        again_rows = slots, self.context.anchor_steps(steps), generations
        for part, values in zip(rows, again_rows, strict=True):
            part[which] = values
        return True
