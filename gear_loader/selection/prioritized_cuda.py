"""Selection by priority on a GPU: the tree and the drawn rows stay in GPU memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from gear_loader.kernels.devices import on_device
from gear_loader.selection.base import SelectionContext
from gear_loader.selection.cuda_leaves import (
    CudaLeaves,
    Parts,
    UpdateSlots,
    check_parts,
    plain_sources,
)
from gear_loader.selection.item_map import ItemMap
from gear_loader.selection.leaves import Change
from gear_loader.selection.priorities import ANCHORS, LEAVES, draw_key
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.samplers import SAMPLE_EPOCH, Draw
from gear_loader.selection.state import BatchRows
from gear_loader.selection.updates import request
from gear_loader.selection.weights import checked_leaves
from gear_loader.storage.counters import NUM_TOUCHED
from gear_loader.storage.device_images import follow_writes
from gear_loader.storage.inline import InlineBatch
from gear_loader.storage.priority_updates import check_names
from gear_loader.storage.queue_loops import IN_STEPS, REFUSED, WORDS, copy_update, queue_drawn
from gear_loader.storage.queued import QueuedBatch, QueuedDraw
from gear_loader.storage.readers import Ticket
from gear_loader.storage.selected_rows import CudaRows, DrawPlaces, Reach, SelectedRows
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils.arrays import Array, outside_inference
from gear_loader.utils.captures import beside_captures, refuse_capture
from gear_loader.utils.streams import current_stream, on_stream

_NO_UPDATE: Array = np.zeros(WORDS, dtype=np.int64)
_numbers = itertools.count()  # of selections: the launches of one are not those of another


_Method = TypeVar("_Method", bound=Callable[..., Any])
_Rows = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


class _Drawn(NamedTuple):
    """A batch that was drawn.

    Attributes:
        rows: gives index, anchor and generation, int64 [3, n], and weights, float32 [n] or None.
        memory: in which these lie, to be used again; or None.
    """

    rows: _Rows
    memory: torch.Tensor | None = None


def _parts(
    memory: torch.Tensor, size: int, count: int, begin: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `_Drawn.rows`: of `count` rows of a batch of `size`, whose weights begin at a byte of `memory`."""
    rows = memory[: 3 * 8 * size].view(torch.int64).view(3, size)[:, :count]
    return rows, None if begin is None else memory[begin : begin + 4 * count].view(torch.float32)


def _beside_captures(method: _Method) -> _Method:
    """A method that a user's thread calls, while others may capture CUDA graphs; as part of one it is an error."""

    @functools.wraps(method)
    def call(self: CudaPrioritizedSelection, *args: Any, **options: Any) -> Any:
        refuse_capture(self._device, f"{method.__name__} of a selection by priority")
        with beside_captures(self._device):
            return method(self, *args, **options)

    return call  # type: ignore[return-value]


class CudaPrioritizedSelection(PrioritizedSelection):
    """Draws rows for `Prioritized` or `TopK` on a GPU that can read the region.

    Only `num_stale`, states, quantiles and ``stale="error"`` wait for the GPU. So an error that the GPU detects (an
    invalid priority in a CUDA tensor, a tree without a positive priority) is raised by a later call, as CUDA's own
    errors are.

    Args:
        context, history: as for `PrioritizedSelection`.
    """

    can_share = False  # the host does not know the updates

    def __init__(self, context: SelectionContext, *, history: int, device: torch.device) -> None:
        self._device = device
        self._number = next(_numbers)
        self._updates = UpdateSlots()
        with outside_inference(), beside_captures(device):
            super().__init__(context, history=history)
        self._stream: Any = None  # stream that fills batches and runs updates
        self._at_once = False  # whether one call has queued the last draw
        # Whether a graph is all of a draw: other draws have parts that only torch computes.
        self._draws_by_graph = context.sampler.weighs and not self._leaves.may_leave_range
        self._draws_by_graph &= context.table._engine.reader().queues_inline

    def _make_leaves(self, items: ItemMap, change: Change) -> CudaLeaves:
        self._leaves = CudaLeaves(self.context, items, self.view, self._device)
        return self._leaves

    # ---------------------------------------------------------------- drawing

    def fill(self, draw: Draw, batch: InlineBatch) -> bool:
        """See `Selection.fill`: the host does not draw."""
        return False

    def queue(self, draw: Draw, batch: QueuedBatch, ticket: Ticket) -> bool:
        context, on, priorities = self.context, self._leaves, self.priorities
        reader = context.table._engine.reader()
        sampler: Any = context.sampler
        if not isinstance(batch, QueuedDraw) or batch.key != self._number:
            return False
        if draw.count != batch.count or not self._draws_by_graph:
            return False
        with priorities.mutex:
            stream, position, copy = self._stream, priorities.items.position, 0
            if stream is None or stream.cuda_stream != batch.stream:
                return False
            if priorities.unset is not None or self.history.pending or reader.arrays.num_ready() == 0:
                return False
            if draw.epoch < SAMPLE_EPOCH:
                if position != reader.position:
                    return False
                replaced = (
                    self.history.replaced()
                )  # before its memory is written, as there may be an exception
                if replaced is None or replaced.memory is None or replaced.memory.shape != batch.memory.shape:
                    return False
                copy = replaced.memory.data_ptr()
            keys = draw_key(draw, LEAVES), draw.step, draw_key(draw, ANCHORS)
            update = on.update
            first = _NO_UPDATE, 0
            if update is not None and update.waits:
                if update.stream == batch.stream:
                    first = update.words, batch.joined(update)
                else:
                    on.launch_update()
            given = *on.reports, *keys, sampler.beta_at(draw.number), copy, *first
            samples = context.samples(draw.count)
            if not reader.queue_inline(
                queue_drawn, batch, batch.words, NUM_TOUCHED, position, samples, ticket, *given
            ):
                return False
            if copy:
                rows = functools.partial(_parts, replaced.memory, batch.count, batch.count, batch.begin)
                self.history.remember(draw, _Drawn(rows, replaced.memory))
            self._at_once = True
        return True

    def draw(self, draw: Draw, ticket: Ticket, frozen: Snapshot | None = None) -> SelectedRows | CudaRows:
        """See `Selection.draw`: `SelectedRows` for a repeated batch, else `CudaRows`, which draw on the GPU."""
        if self.context.limited and self.context.table.rules.rate_limiter is not None:
            self.context.table._engine.reader().await_samplable(draw.count)  # outside the mutex
        with self.priorities.mutex:
            self._at_once = False
            self._leaves.raise_late()
            if self._leaves.cuda:
                self._stream = current_stream(self._device)
            self.priorities.follow(ticket, self.context.samples(draw.count))
            if len(self.context.table) == 0:
                raise self.context.empty()
            rows = self._restored(draw)
            if rows is None:
                return CudaRows(draw.count, functools.partial(self._draw_into, draw))
            self._leaves.enter()
            try:
                given = [np.stack((rows.slots, rows.steps, rows.generations)), rows.weights]
                names, *weights = self._leaves.upload(*(part for part in given if part is not None))
                self.history.remember(draw, _Drawn(lambda: (names, weights[0] if weights else None)))
            finally:
                self._leaves.leave()
            return self.rows(rows.slots, rows.steps, rows.generations, None, 1.0, rows.weights)

    def _draw_into(self, draw: Draw, places: DrawPlaces, stream: torch.cuda.Stream) -> None:
        """See `CudaRows.write`."""

        def queue() -> None:
            self._launch_draw(draw, places)
            self._leaves.tell()
            places.gather()

        with self.priorities.mutex:
            on = self._leaves
            on.enter()
            try:
                # Under the mutex: an update may have taken in rows since the batch began to follow.
                follow_writes(self.context.table._engine.region, stream)
                self._prepare_draw(draw, places)
                places.work.run(self._number if places.whole else None, queue, stream)
                self._remember_drawn(draw, places)
            finally:
                self._leaves.leave(told=True)

    def _prepare_draw(self, draw: Draw, places: DrawPlaces) -> None:
        """Write what changes from draw to draw, and queue what only torch computes, which no graph has."""
        sampler: Any = self.context.sampler
        places.random.numpy()[:] = (draw_key(draw, LEAVES), draw.step, draw_key(draw, ANCHORS))
        items = self._scratch(places.work.scratch, draw.count)[0]
        if sampler.weighs:
            places.beta.numpy()[0] = sampler.beta_at(draw.number)
            self._leaves.note_range()
        else:
            items.copy_(self._leaves.top(sampler.largest, draw.count))

    def _launch_draw(self, draw: Draw, places: DrawPlaces) -> None:
        """Queue the launches of a draw, which are the same for each batch of as many rows."""
        from gear_loader.kernels import items as kernels
        from gear_loader.kernels import priority

        wide, count = self._leaves.wide, draw.count
        sampler: Any = self.context.sampler
        rows, ids, *weights = places.out
        items, leaves, *more = self._scratch(places.work.scratch, count)
        if sampler.weighs:
            if sampler.replacement:
                priority.draw(wide, places.random, items, leaves)
            else:
                priority.draw_distinct(wide, places.random, items, leaves, (more[0], more[1]))
            table = sampler.least_of_table
            kernels.weigh(wide, leaves, weights[0][:count], beta=places.beta, table=table)
        anchor = "item" if sampler.unit == "step" else self.context.anchor
        reach = Reach(*places.reach)._asdict()
        kernels.resolve(self._leaves.index, items, places.random, rows, ids, anchor=anchor, **reach)

    def _scratch(self, scratch: dict[Any, Any], count: int) -> tuple[torch.Tensor, ...]:
        """Twice: tensors of the items drawn, int64 [n], and their leaves, float32 [n]; a set of buffers keeps them."""
        if count not in scratch:
            kinds = (torch.int64, torch.float32) * 2
            scratch[count] = tuple(torch.empty(count, dtype=kind, device=self._device) for kind in kinds)
        found: tuple[torch.Tensor, ...] = scratch[count]
        return found

    def _remember_drawn(self, draw: Draw, places: DrawPlaces) -> None:
        """Queue a copy of what was drawn, into the memory of the entry that it replaces if possible."""
        if draw.epoch >= SAMPLE_EPOCH:
            return
        memory, replaced = places.memory, self.history.replaced()
        old = None if replaced is None else replaced.memory
        if old is not None and old.shape == memory.shape:
            old.copy_(memory, non_blocking=True)
        else:
            old = memory.clone()
        rows, _, *weights = places.out
        begin = weights[0].data_ptr() - memory.data_ptr() if weights else None
        parts = functools.partial(_parts, old, rows.shape[1], draw.count, begin)
        self.history.remember(draw, _Drawn(parts, old))

    # ---------------------------------------------------------------- updating

    @_beside_captures
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
        unit = self.context.sampler.unit
        given = [index, priority, generation, anchor]
        with self.priorities.mutex:
            self._leaves.raise_late()
        given_here = all(self._is_here(part) for part in given if part is not None)
        if stale == "error" or index is None or priority is None or not given_here:
            new = request(index, priority, generation=generation, anchor=anchor, unit=unit)
            checked_leaves(self.context.sampler, new.priorities)
            if stale == "error":
                self.priorities.check_live(new)
            steps = new.steps if unit == "step" else None
            given = [new.slots, new.priorities, new.generations, steps]
            here = iter(self._leaves.upload(*(part for part in given if part is not None)))
            parts = [None if part is None else next(here) for part in given]
        else:
            check_names(anchor, unit)
            parts = given
        with self.priorities.mutex, self.context.table._engine.region.using():
            self._queue_update(tuple(parts))

    def _is_here(self, part: Any) -> bool:
        return isinstance(part, torch.Tensor) and part.device == self._device

    def queue_update(self, *parts: Any) -> bool:
        """See `Selection.queue_update`. Where one call has queued the last draw, it is launched with the next one."""
        plain = plain_sources(parts, self._device)
        if plain is None:
            return False
        with self.priorities.mutex, self.context.table._engine.region.using(), on_device(self._device):
            priorities, slots = self.priorities, self._updates.of(parts)
            if slots is None or self._stream is None or priorities.unset is not None:
                return False
            if priorities.items.position != self.context.table._engine.reader().position:
                return False
            consumer, stream, slot = current_stream(self._device), self._stream, slots[0]
            update = slot.queued(consumer, stream)
            if update is None:
                return False
            leaves = self._leaves
            leaves.launch_update()
            leaves.update = update
            result = copy_update(update.words, consumer.cuda_stream, slot.copies(*plain), *leaves.reports)
            if result == IN_STEPS:
                return False
            if result == REFUSED:
                raise RuntimeError(f"CUDA could not queue an update: the driver returned {update.code}.")
            slots.rotate(-1)
            if not self._at_once:
                leaves.launch_update()
        return True

    def _queue_update(self, parts: Parts) -> None:
        """Queue an update, whose tensors are the caller's again when this returns, by a graph.

        It runs on the stream that draws, so that training waits for no earlier gather.
        """
        check_parts(parts)
        if parts[0] is None or len(parts[0]) == 0:
            return
        self._leaves.launch_update()  # first: after an interrupt it may wait in the memory that is taken now
        # The update may run after the caller has overwritten its tensors.
        with outside_inference():
            slot = self._updates.take(parts)
        if not self._leaves.cuda:
            slot.copy(parts)
            self.priorities.keep_up()
            self._launch_update(slot.items, slot.parts)
            self._leaves.leave()
            return
        consumer = current_stream(self._device)
        stream = consumer if self._stream is None else self._stream
        with outside_inference():
            slot.fill(parts, consumer, stream)
        stream.wait_event(slot.given)

        def queue() -> None:
            self._launch_update(slot.items, slot.parts)
            self._leaves.tell()

        with on_stream(self._device, stream):
            self._leaves.enter()
            self.priorities.keep_up()
            slot.work.run("update", queue, stream)
            slot.record(stream)
            self._leaves.leave(told=True)

    def _launch_update(self, items: torch.Tensor, parts: Parts) -> None:
        from gear_loader.kernels import items as kernels
        from gear_loader.kernels import priority as tree_kernels

        index, priority, generation, anchor = parts
        assert index is not None
        assert priority is not None
        alpha, eps = self.context.sampler.exponent
        wide, found = self._leaves.wide, self._leaves.index
        kernels.locate(wide, found, index, items, anchor=anchor, generation=generation)
        tree_kernels.update(wide, items, priority, alpha=alpha, eps=eps)

    @property
    def num_stale(self) -> int:
        """Number of stale rows that updates have skipped. Waits for the GPU."""
        return self._get_num_stale()

    @_beside_captures
    def _get_num_stale(self) -> int:
        with self.priorities.mutex:
            return self._leaves.num_stale

    state_dict = _beside_captures(PrioritizedSelection.state_dict)
    load_state_dict = _beside_captures(PrioritizedSelection.load_state_dict)
    quantiles = _beside_captures(PrioritizedSelection.quantiles)

    def _recent(self) -> list[dict[str, Any]]:
        return self.history.state("sequences", self._rows_of)

    def _rows_of(self, drawn: _Drawn) -> BatchRows | None:
        """The rows of a drawn batch, if no slot has been reused since. Waits for the GPU."""
        _, generation, sequence = self.context.table._engine.reader().slot_states()
        rows, weights = drawn.rows()
        slots, steps, generations = rows.cpu().numpy()
        if not ((slots >= 0).all() and (generation[slots] == generations).all()):
            return None
        return BatchRows(sequence[slots], steps, None if weights is None else weights.cpu().numpy())
