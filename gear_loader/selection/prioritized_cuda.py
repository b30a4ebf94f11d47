"""Selection by priority on a GPU: the tree and the drawn rows stay in GPU memory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from gear_loader.errors import PriorityError
from gear_loader.kernels.sum_tree import (
    BAD_POSITION,
    DISTINCT_MISSING,
    EMPTY_DRAWS,
    LOWEST_LEAF,
    NOWHERE,
    STALE,
    SumTree,
)
from gear_loader.selection.base import SelectionContext
from gear_loader.selection.cuda_updates import Parts, UpdateSlot, UpdateSlots, copied
from gear_loader.selection.item_map import Leaves
from gear_loader.selection.prioritized import (
    ANCHORS,
    LEAVES,
    SHARE,
    PrioritizedSelection,
    checked_weights,
    draw_key,
    out_of_range,
)
from gear_loader.selection.selectors import SAMPLE_EPOCH, Draw, Prioritized, TopK
from gear_loader.selection.updates import request
from gear_loader.storage.inline import InlineBatch
from gear_loader.storage.priority_updates import check_names
from gear_loader.storage.reader import Snapshot
from gear_loader.storage.readers import Ticket
from gear_loader.storage.rows import CudaRows, DrawPlaces, Reach, SelectedRows
from gear_loader.utils.arrays import Array, outside_inference
from gear_loader.utils.captures import beside_captures, refuse_capture
from gear_loader.utils.packing import upload
from gear_loader.utils.streams import current_stream, on_stream

__all__ = ["CudaPrioritizedSelection"]

_numbers = itertools.count()  # of selections: the launches of one are not those of another


_Method = TypeVar("_Method", bound=Callable[..., Any])
_Rows = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


class _Drawn(NamedTuple):
    """A batch that was drawn.

    Attributes:
        batch: epoch and step. rows: gives index, anchor and generation, int64 [3, n], and weights, float32 [n] or None.
        memory: in which these lie, to be used again; or None.
    """

    batch: tuple[int, int]
    rows: _Rows
    memory: torch.Tensor | None


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
        device: the GPU.
    """

    can_share = False  # the host does not know the updates

    def __init__(self, context: SelectionContext, *, history: int, device: torch.device) -> None:
        self._device = device
        self._number = next(_numbers)
        self._updates = UpdateSlots()
        self._cuda = device.type == "cuda"  # else Triton's interpreter, in tests
        with outside_inference(), beside_captures(device):
            super().__init__(context, history=history)
            self._status = torch.tensor([NOWHERE, 0, 0, 0], device="cpu", pin_memory=self._cuda)
            self._out_of_range = torch.zeros(1, dtype=torch.bool, device="cpu", pin_memory=self._cuda)
        self._drawn: collections.deque[_Drawn] = collections.deque(maxlen=history)
        self._stream: Any = None  # stream that fills batches and runs updates
        self._last: Any = torch.cuda.Event() if self._cuda else None  # recorded after all queued work
        self._streams: set[int] = set()  # streams that have used the tensors below
        self._leave()  # other streams wait until the tensors are initialised

    def _make_tree(self, capacity: int) -> None:
        from gear_loader.kernels.items import Blocks, Index

        self._wide = SumTree(capacity, self._device)
        self._cut = torch.zeros(1, dtype=torch.bool, device=self._device)
        table, steps, complete = self.context.table, self._map.steps, self.context.complete
        generation = table.reader().slot_states()[1]
        extent, block_ids = table.reader().index_arrays()
        addresses = [array.ctypes.data for array in (generation, extent, block_ids)]
        layout = table.region.layout

        def full(count: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=self._device)

        slots, blocks = layout.max_trajectories, layout.num_blocks
        self._index = Index(
            addresses=torch.tensor(addresses, dtype=torch.int64, device="cpu").to(self._device),
            num_ids=len(block_ids),
            block_steps=layout.block_steps,
            known=full(slots, 0),
            blocks=Blocks(
                owner=full(blocks, -1),
                number=full(blocks, 0),
                place=full(blocks, -1, torch.int64),
                first=full(slots, 0, torch.int64),
                steps=full(slots, 0),
            )
            if steps
            else None,
            **({} if complete is None else {"anchors": dataclasses.astuple(complete)}),
        )

    # ---------------------------------------------------------------- order of work

    def _enter(self) -> None:
        """Order work queued on the current stream after all earlier work of other streams."""
        if not self._cuda:
            return
        stream = current_stream(self._device)
        stream.wait_event(self._last)
        if stream.cuda_stream not in self._streams:
            # The allocator must not reuse this memory before the stream's work has finished.
            self._streams.add(stream.cuda_stream)
            blocks = () if self._index.blocks is None else vars(self._index.blocks).values()
            for part in (*vars(self._wide).values(), *vars(self._index).values(), *blocks, self._cut):
                if isinstance(part, torch.Tensor):
                    part.record_stream(stream)

    def _leave(self, *, told: bool = False) -> None:
        """Order later work of other streams after all work queued on the current stream.

        Args:
            told: the GPU's status is being copied already.
        """
        if not told:
            self._tell()
        if self._cuda:
            self._last.record(current_stream(self._device))

    def _tell(self) -> None:
        """Queue copies of the GPU's status, which `_raise_late` looks at."""
        self._status.copy_(self._wide.status, non_blocking=True)
        if self._may_leave_range:
            self._out_of_range.copy_(self._cut, non_blocking=True)

    def _raise_late(self, *, wait: bool = False) -> None:
        """Raise an error that the GPU has reported. The caller holds the mutex: another thread's draw or update would
        write the same status.

        Args:
            wait: wait for all queued work first.
        """
        if self._cuda:
            if wait:
                self._last.synchronize()
            elif not self._last.query():
                return
        bad, empty, missing, _ = self._status.tolist()
        cut = bool(self._out_of_range)
        if bad == NOWHERE and not empty and not missing and not cut:
            return
        self._enter()
        self._cut.zero_()
        self._wide.status[BAD_POSITION] = NOWHERE
        self._wide.status[EMPTY_DRAWS] = 0
        self._wide.status[DISTINCT_MISSING] = 0
        self._leave()
        if bad != NOWHERE:
            raise PriorityError(
                f"priority[{bad}] of an earlier update_priority was NaN, infinite or negative, or too large for "
                f"{self.context.selector!r}. Neither it nor the updates since have changed anything. The GPU detected "
                "it, so this error is late."
            )
        if cut:
            raise out_of_range(self.context.selector)
        if len(self.view()) == 0:
            raise self.context.empty()
        raise PriorityError(
            "An earlier batch found no item left with a positive priority; its rows are padding. Set priorities with "
            "update_priority, use Prioritized(eps=...), which keeps them all positive, or draw fewer."
        )

    def _upload(self, *arrays: Array) -> tuple[torch.Tensor, ...]:
        """Arrays as tensors on the device, by one copy. Does not wait for the GPU."""
        return upload(self._device, *arrays)

    # ---------------------------------------------------------------- drawing

    def fill(self, draw: Draw, batch: InlineBatch) -> bool:
        """See `Selection.fill`: the host does not draw."""
        return False

    def draw(self, draw: Draw, ticket: Ticket, frozen: Snapshot | None = None) -> SelectedRows | CudaRows:
        """See `Selection.draw`: `SelectedRows` for a repeated batch, else `CudaRows`, which draw on the GPU."""
        if self.context.limited and self.context.table.rules.rate_limiter is not None:
            self.context.table.reader().await_samplable(draw.count)  # outside the mutex
        with self._mutex:
            self._raise_late()
            if self._cuda:
                self._stream = current_stream(self._device)
            self._follow(ticket, self.context.samples(draw.count))
            if len(self.context.table) == 0:
                raise self.context.empty()
            rows = self._restored(draw)
            if rows is None:
                return CudaRows(draw.count, functools.partial(self._draw_into, draw))
            self._enter()
            try:
                given = [np.stack((rows.slots, rows.steps, rows.generations)), rows.weights]
                names, *weights = self._upload(*(part for part in given if part is not None))
                self._remember(draw, lambda: (names, weights[0] if weights else None))
            finally:
                self._leave()
            return self.rows(rows.slots, rows.steps, rows.generations, None, 1.0, rows.weights)

    def _draw_into(self, draw: Draw, places: DrawPlaces, stream: torch.cuda.Stream) -> None:
        """See `CudaRows.write`."""

        def queue() -> None:
            self._launch_draw(draw, places)
            self._tell()
            places.gather()

        with self._mutex:
            self._enter()
            try:
                self._prepare_draw(draw, places)
                kept = self._wide, self._index, self._status, self._cut, self._out_of_range
                key = self._number if places.whole else None
                places.work.run(key, queue, stream, kept)
                if draw.epoch < SAMPLE_EPOCH:
                    self._remember_drawn(draw, places)
            finally:
                self._leave(told=True)

    def draw_rows(self, draw: Draw, places: DrawPlaces) -> None:
        """Queue the draw of a batch."""
        self._prepare_draw(draw, places)
        self._launch_draw(draw, places)

    def _prepare_draw(self, draw: Draw, places: DrawPlaces) -> None:
        """Write what changes from draw to draw, and queue what only torch computes, which is not recorded."""
        selector = self.context.selector
        places.random.numpy()[:] = (draw_key(draw, LEAVES), draw.step, draw_key(draw, ANCHORS))
        items = self._scratch(places.work.scratch, draw.count)[0]
        if isinstance(selector, TopK):
            items.copy_(self._top_rows(selector, draw.count))
        else:
            assert isinstance(selector, Prioritized)
            places.beta.numpy()[0] = selector.beta_at(draw.number)
            self._note_range()

    def _launch_draw(self, draw: Draw, places: DrawPlaces) -> None:
        """Queue the launches of a draw, which are the same for each batch of as many rows."""
        from gear_loader.kernels import items as kernels
        from gear_loader.kernels import priority

        selector, count = self.context.selector, draw.count
        rows, ids, *weights = places.out
        items, leaves, *more = self._scratch(places.work.scratch, count)
        if isinstance(selector, Prioritized):
            if selector.replacement:
                priority.draw(self._wide, places.random, items, leaves)
            else:
                priority.draw_distinct(self._wide, places.random, items, leaves, (more[0], more[1]))
            table = selector.normalize == "table"
            kernels.weigh(self._wide, leaves, weights[0][:count], beta=places.beta, table=table)
        anchor = "item" if selector.unit == "step" else self.context.anchor
        reach = Reach(*places.reach)._asdict()
        kernels.resolve(self._index, items, places.random, rows, ids, anchor=anchor, **reach)

    def _scratch(self, scratch: dict[Any, Any], count: int) -> tuple[torch.Tensor, ...]:
        """Twice: tensors of the items drawn, int64 [n], and their leaves, float32 [n]; a set of buffers keeps them."""
        if count not in scratch:
            kinds = (torch.int64, torch.float32) * 2
            scratch[count] = tuple(torch.empty(count, dtype=kind, device=self._device) for kind in kinds)
        found: tuple[torch.Tensor, ...] = scratch[count]
        return found

    def _note_range(self) -> None:
        """Queue the check of `_check_range`; `_raise_late` raises its error."""
        if not self._may_leave_range:
            return
        total, leaves = self._wide.total(), self._wide.leaves
        lowest = (leaves == LOWEST_LEAF).sum() * LOWEST_LEAF
        largest = torch.finfo(torch.float32).max
        faint = (total > LOWEST_LEAF) & (lowest > total * SHARE)
        self._cut |= faint | ((total > largest * (1 + SHARE)) & (leaves == largest).any())

    def _top_rows(self, selector: TopK, count: int) -> torch.Tensor:
        items, _ = self._wide.top(min(count, self._wide.capacity), largest=selector.largest)
        found = (items >= 0).sum()
        self._wide.status[EMPTY_DRAWS] += found == 0
        again: torch.Tensor = items[torch.arange(count, device=self._device) % found.clamp(min=1)]
        return again

    def _remember(self, draw: Draw, rows: _Rows, memory: torch.Tensor | None = None) -> None:
        if draw.epoch < SAMPLE_EPOCH:
            self._drawn.append(_Drawn((draw.epoch, draw.step), rows, memory))

    def _remember_drawn(self, draw: Draw, places: DrawPlaces) -> None:
        """Queue a copy of what was drawn, into the memory of the entry that it replaces if possible."""
        rows, _, *weights = places.out
        memory, size, count = places.memory, rows.shape[1], draw.count
        begin = weights[0].data_ptr() - memory.data_ptr() if weights else None
        full = len(self._drawn) == self._drawn.maxlen
        old = self._drawn.popleft().memory if full else None
        if old is not None and old.shape == memory.shape:
            old.copy_(memory, non_blocking=True)
        else:
            old = memory.clone()
        self._remember(draw, functools.partial(_parts, old, size, count, begin), old)

    # ---------------------------------------------------------------- following the table

    def _set(self, leaves: Leaves) -> None:
        from gear_loader.kernels import priority

        alpha, eps = self._exponent()
        generations = self.context.table.reader().slot_states()[1][leaves.slots].astype(np.int32)
        known = np.where(leaves.added, generations, np.int32(0))
        follows, blocks = self._map, self._index.blocks
        arrays = [leaves.slots, known, *leaves.each(follows)]
        if blocks is not None:
            at, slots = leaves.blocks, leaves.slots
            arrays += [at, follows.owner[at], follows.number[at], follows.place[at]]
            arrays += [follows.start[slots], follows.length[slots]]
        self._enter()
        try:
            where, new, items, priorities, *steps = self._upload(*arrays)
            self._index.known[where] = new
            if blocks is not None:
                places, blocks.owner[places], blocks.number[places], blocks.place[places] = steps[:4]
                blocks.first[where], blocks.steps[where] = steps[4:]
            floor = leaves.maximum
            priority.update(self._wide, items, priorities, alpha=alpha, eps=eps, unset=True, floor=floor)
        finally:
            self._leave()

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
        """See `ReplayDataset.update_priority`."""
        with self._mutex:
            self._raise_late()
        unit = self.context.selector.unit
        given = [index, priority, generation, anchor]
        if stale == "error" or not all(part is None or self._is_here(part) for part in given):
            new = request(index, priority, generation=generation, anchor=anchor, unit=unit)
            checked_weights(self.context.selector, new.priorities)
            if stale == "error":
                self._check_live(new)
            steps = new.steps if unit == "step" else None
            given = [new.slots, new.priorities, new.generations, steps]
            here = iter(self._upload(*(part for part in given if part is not None)))
            parts = [None if part is None else next(here) for part in given]
        else:
            check_names(anchor, unit)
            parts = given
        assert parts[0] is not None
        assert parts[1] is not None
        with self._mutex, self.context.table.region.using():
            self._queue_update(parts[0], parts[1], parts[2], parts[3])

    def _is_here(self, part: Any) -> bool:
        return isinstance(part, torch.Tensor) and part.device == self._device

    def _queue_update(
        self,
        index: torch.Tensor,
        priority: torch.Tensor,
        generation: torch.Tensor | None,
        anchor: torch.Tensor | None,
    ) -> None:
        """Queue an update, whose tensors are the caller's again when this returns."""
        # The update may run after the caller has overwritten them.
        parts = index, priority, generation, anchor
        slot = None
        if self._cuda:
            with outside_inference():
                slot = self._updates.take(parts)
        if slot is None:
            self._queue_copied(tuple(copied(*parts)))
        else:
            self._queue_repeated(slot, parts)

    def _update_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The current stream, and the one for updates: that draws, so that training waits for no earlier gather."""
        consumer = current_stream(self._device)
        return consumer, consumer if self._stream is None else self._stream

    def _queue_repeated(self, slot: UpdateSlot, parts: Parts) -> None:
        """Queue an update whose tensors need no conversion, by a recorded graph."""
        consumer, stream = self._update_streams()
        with outside_inference():
            slot.fill(parts, consumer, stream)
        stream.wait_stream(consumer)

        def queue() -> None:
            self._launch_update(slot.items, slot.parts)
            self._tell()

        with on_stream(self._device, stream):
            self._enter()
            self._keep_up()
            kept = self._wide, self._index, self._status
            slot.work.run("update", queue, stream, kept)
            slot.done.record(stream)
            self._leave(told=True)

    def _launch_update(self, items: torch.Tensor, parts: Parts) -> None:
        from gear_loader.kernels import items as kernels
        from gear_loader.kernels import priority as tree_kernels

        index, priority, generation, anchor = parts
        assert index is not None
        assert priority is not None
        alpha, eps = self._exponent()
        kernels.locate(self._wide, self._index, index, items, anchor=anchor, generation=generation)
        tree_kernels.update(self._wide, items, priority, alpha=alpha, eps=eps)

    def _queue_copied(self, parts: Parts) -> None:
        """Queue an update call by call, of tensors that belong to it."""
        index = parts[0]
        assert index is not None
        if not self._cuda:
            context: Any = contextlib.nullcontext()
        else:
            consumer, stream = self._update_streams()
            stream.wait_stream(consumer)
            for part in parts:
                if part is not None:
                    part.record_stream(stream)
            context = on_stream(self._device, stream)
        with context:
            self._enter()
            self._keep_up()
            self._launch_update(torch.empty_like(index), parts)
            self._leave()

    @property
    def num_stale(self) -> int:
        """Number of stale rows that updates have skipped. Waits for the GPU."""
        return self._get_num_stale()

    @_beside_captures
    def _get_num_stale(self) -> int:
        with self._mutex:
            self._enter()
            return int(self._wide.status[STALE])

    state_dict = _beside_captures(PrioritizedSelection.state_dict)
    load_state_dict = _beside_captures(PrioritizedSelection.load_state_dict)
    quantiles = _beside_captures(PrioritizedSelection.quantiles)

    # ---------------------------------------------------------------- state

    def _some_leaves(self) -> Array:
        self._enter()
        leaves: Array = self._wide.leaves[:: self._every()].cpu().numpy()
        return leaves

    def _read(self, items: Array) -> Array:
        if self._cuda:
            self._raise_late(wait=True)
        leaves: Array = self._wide.leaves[self._upload(items)[0]].cpu().numpy()
        return leaves

    def _write(self, items: Array, leaves: Array) -> None:
        from gear_loader.kernels import priority

        self._enter()
        where, new = self._upload(items, leaves)
        self._wide.leaves[where] = new
        priority.build(self._wide)
        self._leave()

    def _get_maximum(self) -> float:
        return float(self._wide.maximum)

    def _set_counters(self, maximum: float, num_stale: int) -> None:
        self._enter()
        self._wide.maximum.fill_(maximum)
        self._wide.status[STALE] = num_stale
        self._drawn.clear()
        self._leave()

    def _recent(self) -> list[dict[str, Any]]:
        # Batches whose slots have not been reused, by sequence number.
        _, generation, sequence = self.context.table.reader().slot_states()
        recent = []
        for entry in self._drawn:
            (epoch, step), (rows, weights) = entry.batch, entry.rows()
            slots, steps, generations = rows.cpu().numpy()
            if (slots >= 0).all() and (generation[slots] == generations).all():
                weight = None if weights is None else weights.cpu()
                part = {"sequences": torch.from_numpy(sequence[slots]), "steps": torch.from_numpy(steps)}
                recent.append({"epoch": epoch, "step": step, **part, "weights": weight})
        return recent
