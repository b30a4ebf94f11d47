"""The leaves of a priority tree in the memory of a GPU, the order of what is queued there, and tensors of updates."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.errors import PriorityError, SchemaError
from gear_loader.kernels.devices import on_device
from gear_loader.kernels.launching import copy
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
from gear_loader.selection.item_map import ItemMap, Leaves
from gear_loader.selection.weights import SHARE, may_leave_range, out_of_range
from gear_loader.storage import queue_loops
from gear_loader.storage.queue_loops import BEHIND, LAST_ON, NOTED, STATE
from gear_loader.storage.queued import QueuedUpdate
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils import driver
from gear_loader.utils.arrays import Array
from gear_loader.utils.launch_graph import RepeatedWork
from gear_loader.utils.packing import upload
from gear_loader.utils.streams import current_stream


class CudaLeaves:
    """`HostLeaves` on a GPU, beside what finds a row's item there.

    Args:
        context: the table and the sampler. items: the items. view: returns the trajectories that can be drawn, now.
        device: the GPU; the CPU for Triton's interpreter, in tests.

    Attributes:
        wide: the tree. index: where items are. cut: whether clipped leaves have too much of the probability.
        cuda: whether the device is a GPU.
        status, out_of_range: copies of the GPU's status and of `cut` on the host.
        update: the last one that was put off until the next draw, if any, to be launched with that, or by
            `launch_update` before whatever else uses the leaves.
    """

    def __init__(
        self, context: SelectionContext, items: ItemMap, view: Callable[[], Snapshot], device: torch.device
    ) -> None:
        from gear_loader.kernels.items import Blocks, IndexAddresses

        self._context, self._items, self._view = context, items, view
        self.device, self.cuda = device, device.type == "cuda"
        self.may_leave_range = may_leave_range(context.sampler)
        self.wide = SumTree(items.capacity, device)
        self.cut = torch.zeros(1, dtype=torch.bool, device=device)
        table, steps, complete = context.table, items.steps, context.complete
        generation = table._engine.reader().slot_states()[1]
        extent, block_ids = table._engine.reader().index_arrays()
        addresses = [array.ctypes.data for array in (generation, extent, block_ids)]
        layout = table._engine.region.layout

        def full(count: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        slots, blocks = layout.max_trajectories, layout.num_blocks
        self.index = IndexAddresses(
            addresses=torch.tensor(addresses, dtype=torch.int64, device="cpu").to(device),
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
            **({} if complete is None else {"anchors": dataclasses.astuple(complete)[:3]}),
        )
        self.status = torch.tensor([NOWHERE, 0, 0, 0], device="cpu", pin_memory=self.cuda)
        self.out_of_range = torch.zeros(1, dtype=torch.bool, device="cpu", pin_memory=self.cuda)
        self._state: Array = np.array([NOWHERE, *[0] * (STATE - 1)], dtype=np.int64)  # see `reports`
        # Recorded after all queued work, for whoever asks; see `_ended`.
        self._last: Any = torch.cuda.Event() if self.cuda else None
        self._streams: set[int] = set()  # streams that have used the tensors
        self.update: QueuedUpdate | None = None
        self.leave()  # other streams wait until the tensors are initialised

    # ---------------------------------------------------------------- order of work

    def enter(self) -> None:
        """Order work queued on the current stream after all earlier work of other streams."""
        if not self.cuda:
            return
        self.launch_update()
        stream = current_stream(self.device)
        stream.wait_event(self._ended())
        if stream.cuda_stream not in self._streams:
            # The allocator must not reuse this memory before the stream's work has finished.
            self._streams.add(stream.cuda_stream)
            blocks = () if self.index.blocks is None else vars(self.index.blocks).values()
            for part in (*vars(self.wide).values(), *vars(self.index).values(), *blocks, self.cut):
                if isinstance(part, torch.Tensor):
                    part.record_stream(stream)

    def leave(self, *, told: bool = False) -> None:
        """Order later work of other streams after all work queued on the current stream.

        Args:
            told: the GPU's status is being copied already.
        """
        if not told:
            self.tell()
        if self.cuda:
            self._state[[LAST_ON, BEHIND]] = 0
            self._last.record(current_stream(self.device))

    def _ended(self) -> Any:
        """The event after all work, recorded now if compiled calls have queued some since it was."""
        if self._state[BEHIND]:
            with on_device(self.device):
                driver.library().cuEventRecord(self._last.cuda_event, int(self._state[LAST_ON]))
            self._state[BEHIND] = 0
        return self._last

    def launch_update(self) -> None:
        """Launch the update that was put off, if it still waits. The caller holds the mutex.

        Raises:
            RuntimeError: the driver refuses.
        """
        update = self.update
        if update is None or not update.waits:
            return
        region = self._context.table._engine.region
        with region.using(), on_device(self.device):
            if queue_loops.launch_update(update.words, self._last.cuda_event, self._state):
                raise RuntimeError(f"CUDA could not queue an update: the driver returned {update.code}.")

    def tell(self) -> None:
        """Queue copies of the GPU's status, which `raise_late` looks at."""
        copy(self.status, self.wide.status)
        if self.may_leave_range:
            copy(self.out_of_range, self.cut)

    @functools.cached_property
    def reports(self) -> tuple[int, int, Array]:
        """What tells compiled loops of the work on the leaves, as `queue_drawn` takes it."""
        return self._last.cuda_event, self.status.data_ptr(), self._state

    def _read_status(self) -> tuple[int, int, int, bool]:
        """What the GPU has reported up to now: the first invalid priority, or `NOWHERE`; draws that found no item, and
        that found too few distinct ones; whether a leaf was out of range."""
        bad, empty, missing, _ = self.status.tolist()
        return bad, empty, missing, bool(self.out_of_range)

    def raise_late(self, *, wait: bool = False) -> None:
        """Raise an error that the GPU has reported. The caller holds the mutex: another thread's draw or update would
        write the same status.

        Args:
            wait: wait for all queued work first.
        """
        if self.cuda and wait:
            self.launch_update()
            self._ended().synchronize()
        bad, empty, missing, cut = self._read_status()
        if bad == NOWHERE and not empty and not missing and not cut:
            return
        if self.cuda and not wait:
            ended = self._last if self._state[NOTED] else self._ended()
            self._state[NOTED] = 1
            if not ended.query():
                return
            bad, empty, missing, cut = self._read_status()
        self._state[NOTED] = 0
        self.enter()
        self.cut.zero_()
        self.wide.status[BAD_POSITION] = NOWHERE
        self.wide.status[EMPTY_DRAWS] = 0
        self.wide.status[DISTINCT_MISSING] = 0
        self.leave()
        if bad != NOWHERE:
            raise PriorityError(
                f"priority[{bad}] of an earlier update_priority was NaN, infinite or negative, or too large for "
                f"{self._context.sampler!r}. Neither it nor the updates since have changed anything. The GPU detected "
                "it, so this error is late."
            )
        if cut:
            raise out_of_range(self._context.sampler)
        if len(self._view()) == 0:
            raise self._context.empty()
        raise PriorityError(
            "An earlier batch found no item left with a positive priority; its rows are padding. Set priorities with "
            "update_priority, use Prioritized(eps=...), which keeps them all positive, or draw fewer."
        )

    def upload(self, *arrays: Array) -> tuple[torch.Tensor, ...]:
        """Arrays as tensors on the device, by one copy. Does not wait for the GPU."""
        return upload(self.device, *arrays)

    def note_range(self) -> None:
        """Queue the check of `HostLeaves.draw`; `raise_late` raises its error."""
        if not self.may_leave_range:
            return
        total, leaves = self.wide.total(), self.wide.leaves
        lowest = (leaves == LOWEST_LEAF).sum() * LOWEST_LEAF
        largest = torch.finfo(torch.float32).max
        faint = (total > LOWEST_LEAF) & (lowest > total * SHARE)
        self.cut |= faint | ((total > largest * (1 + SHARE)) & (leaves == largest).any())

    def top(self, largest: bool, count: int) -> torch.Tensor:
        """The items with the largest (or smallest positive) leaves, int64 [count]; again from the first if too few."""
        items, _ = self.wide.top(min(count, self.wide.capacity), largest=largest)
        found = (items >= 0).sum()
        self.wide.status[EMPTY_DRAWS] += found == 0
        again: torch.Tensor = items[torch.arange(count, device=self.device) % found.clamp(min=1)]
        return again

    # ---------------------------------------------------------------- leaves

    def set(self, leaves: Leaves, freshen: None) -> None:
        """See `HostLeaves.set`; the host draws where leaves depend on freshness."""
        from gear_loader.kernels import priority

        alpha, eps = self._context.sampler.exponent
        generations = self._context.table._engine.reader().slot_states()[1][leaves.slots].astype(np.int32)
        known = np.where(leaves.added, generations, np.int32(0))
        follows, blocks = self._items, self.index.blocks
        arrays = [leaves.slots, known, *leaves.each(follows)]
        if blocks is not None:
            at, slots = leaves.blocks, leaves.slots
            arrays += [at, follows.owner[at], follows.number[at], follows.place[at]]
            arrays += [follows.start[slots], follows.length[slots]]
        self.enter()
        try:
            where, new, items, priorities, *steps = self.upload(*arrays)
            self.index.known[where] = new
            if blocks is not None:
                places, blocks.owner[places], blocks.number[places], blocks.place[places] = steps[:4]
                blocks.first[where], blocks.steps[where] = steps[4:]
            floor = leaves.maximum
            priority.update(self.wide, items, priorities, alpha=alpha, eps=eps, unset=True, floor=floor)
        finally:
            self.leave()

    def read(self, items: Array) -> Array:
        """See `HostLeaves.read`; waits for the GPU."""
        if self.cuda:
            self.raise_late(wait=True)
        leaves: Array = self.wide.leaves[self.upload(items)[0]].cpu().numpy()
        return np.where(items >= 0, leaves, np.float32(0))

    def write(self, items: Array, leaves: Array) -> None:
        from gear_loader.kernels import priority

        self.enter()
        where, new = self.upload(items, leaves)
        self.wide.leaves[where] = new
        priority.build(self.wide)
        self.leave()

    def every(self, step: int) -> Array:
        """See `HostLeaves.every`; waits for the GPU."""
        self.enter()
        leaves: Array = self.wide.leaves[::step].cpu().numpy()
        return leaves

    @property
    def maximum(self) -> float:
        """Largest priority so far; waits for the GPU."""
        self.enter()
        return float(self.wide.maximum)

    @property
    def num_stale(self) -> int:
        """Stale rows that updates have skipped; waits for the GPU."""
        self.enter()
        return int(self.wide.status[STALE])

    def restore(self, maximum: float, num_stale: int) -> None:
        self.enter()
        self.wide.maximum.fill_(maximum)
        self.wide.status[STALE] = num_stale
        self.leave()


# ---------------------------------------------------------------- updates

_SLOTS = 6
"""Updates of a kind whose tensors are kept at a time. The consumer's stream waits for the last but five, unless the
host knows that the GPU is through with it, as it does with up to three batches drawn ahead."""
_KINDS = 8
"""Numbers of rows, the last ones, for which slots are kept."""
_NAMES = ("index", "priority", "generation", "anchor")

Parts = tuple[torch.Tensor | None, ...]
"""index, priority, generation and anchor of an update."""


class UpdateSlot:
    """Memory for the tensors of an update, which is used again.

    Attributes:
        parts: index, priority, generation and anchor: int64 [n], float32 [n] for priority; None for what is not given.
        items: int64 [n], the items that the update finds. work: its launches. On a GPU, given: recorded after the
            copies; done: after the launches.
    """

    def __init__(self, like: Parts) -> None:
        index = like[0]
        assert index is not None
        count, device = index.shape[0], index.device
        names = torch.empty((4, count), dtype=torch.int64, device=device)  # the first 3 as those of a batch
        priority = torch.empty(count, dtype=torch.float32, device=device)
        rows = names[0], priority, names[2], names[1]
        self.parts: Parts = tuple(None if part is None else row for part, row in zip(like, rows, strict=True))
        self.items = names[3]
        self.work = RepeatedWork()
        self.given: Any = torch.cuda.Event() if self.items.is_cuda else None
        self.done: Any = torch.cuda.Event() if self.items.is_cuda else None
        self._streams: set[int] = set()
        self._queued: QueuedUpdate | None = None
        given = [(part.data_ptr(), 0, part.nbytes) for part in self.parts if part is not None]
        joint = [(names.data_ptr(), 0, 3 * index.nbytes), (priority.data_ptr(), 0, priority.nbytes)]
        arrays: list[Any] = [np.array(copies, dtype=np.int64) for copies in (given, joint)]
        # With views, because numpy takes ten times as long to store a number.
        self._copies: list[tuple[Array, Any]] = [(array, memoryview(array.reshape(-1))) for array in arrays]

    def fill(self, parts: Parts, consumer: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """Queue copies of an update's tensors on the consumer's stream, the current one, for an update on `stream`.

        Does not wait for the GPU.
        """
        if self._queued is not None:
            with on_device(self.items.device):
                self._queued.record()
        consumer.wait_event(self.done)
        for user in (consumer, stream):
            if user.cuda_stream not in self._streams:  # else the allocator does not know of it
                self._streams.add(user.cuda_stream)
                for kept in (self.items, *self.parts):
                    if kept is not None:
                        kept.record_stream(user)
        self.copy(parts)
        self.given.record(consumer)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record `done` after the launches on `stream`."""
        self.done.record(stream)
        if self._queued is not None:
            self._queued.was_done()

    def queued(self, consumer: torch.cuda.Stream, stream: torch.cuda.Stream) -> QueuedUpdate | None:
        """What one compiled call queues on `stream`, with tensors of `consumer`; None if it cannot, or not yet."""
        graph, handle = self.work.graph, stream.cuda_stream
        if graph is None or not {consumer.cuda_stream, handle} <= self._streams:
            return None
        if self._queued is None or self._queued.graph is not graph or self._queued.stream != handle:
            events = {"given": self.given.cuda_event, "done": self.done.cuda_event}
            if self._queued is not None:
                self._queued.record()
            self._queued = QueuedUpdate(graph, handle, **events)
        return self._queued

    def copies(self, sources: list[int], joint: bool) -> Array:
        """Addresses of this memory and of an update's tensors, and their bytes, int64 [n, 3]; see `queue_update`.

        Args:
            sources, joint: see `plain_sources`.
        """
        array, words = self._copies[joint]
        words[1], words[4] = sources[0], sources[1]
        if not joint:
            for i, source in enumerate(sources[2:], 2):
                words[3 * i + 1] = source
        return array

    def copy(self, parts: Parts) -> None:
        """Copy an update's tensors on the current stream."""
        for kept, part in zip(self.parts, parts, strict=True):
            if kept is not None and part is not None:
                kept.copy_(_with_sign(part.detach()), non_blocking=True)


class UpdateSlots:
    """The slots of updates, by their number of rows and by which of their tensors are given."""

    def __init__(self) -> None:
        self._slots: collections.OrderedDict[tuple[object, ...], collections.deque[UpdateSlot]]
        self._slots = collections.OrderedDict()

    def of(self, parts: Parts) -> collections.deque[UpdateSlot] | None:
        """The slots of which `take` would return the first, and put it at the end; None if it would make one."""
        index, _, generation, anchor = parts
        assert index is not None
        slots = self._slots.get((index.shape[0], generation is None, anchor is None))
        return slots if slots is not None and len(slots) == _SLOTS else None

    def take(self, parts: Parts) -> UpdateSlot:
        """The slot for an update's tensors, which `check_parts` has checked.

        New slots are allocated on the current stream, that of the consumer, which writes them first.
        """
        index, _, generation, anchor = parts
        assert index is not None
        kind = index.shape[0], generation is None, anchor is None
        slots = self._slots.setdefault(kind, collections.deque())
        self._slots.move_to_end(kind)
        if len(self._slots) > _KINDS:
            self._slots.popitem(last=False)
        slot = UpdateSlot(parts) if len(slots) < _SLOTS else slots.popleft()
        slots.append(slot)
        return slot


def check_parts(parts: Parts) -> None:
    """Raise SchemaError for tensors of an update that have other shapes or dtypes."""
    index = parts[0]
    assert index is not None
    count = index.shape[0] if index.ndim == 1 else -1
    for name, part in zip(_NAMES, parts, strict=True):
        if part is None:
            continue
        number = not part.is_complex() and (
            name == "priority" or not (part.is_floating_point() or part.dtype == torch.bool)
        )
        if part.shape != (count,) or not number:
            kind = "numbers" if name == "priority" else "integers"
            raise SchemaError(
                f"{name} is {part.dtype} {list(part.shape)}; expected {kind} [{'n' if count < 0 else count}], as many "
                "as index has. Nothing was changed."
            )


def plain_sources(parts: Sequence[Any], device: torch.device) -> tuple[list[int], bool] | None:
    """Addresses of the tensors of an update that are given, if a slot's memory can be a copy of theirs.

    Returns:
        The addresses, and whether the names are those of a batch: index, anchor and generation one after another in one
        storage, so that one copy takes them. None if one tensor is not on the device, of another dtype or number than
        index, or not one element after the other.
    """
    index, priority, generation, anchor = parts
    if not isinstance(index, torch.Tensor) or not isinstance(priority, torch.Tensor):
        return None
    shape, plain = index.shape, torch.Tensor.is_contiguous
    if len(shape) != 1 or priority.dtype is not torch.float32 or priority.is_neg():
        return None
    if priority.shape != shape or priority.device != device or not plain(priority):
        return None
    found = [0, priority.data_ptr()]
    for part in index, generation, anchor:
        if part is None:
            continue
        if not isinstance(part, torch.Tensor) or part.dtype is not torch.int64 or part.shape != shape:
            return None
        if part.device != device or not plain(part):
            return None
        found.append(part.data_ptr())
    found[0] = found.pop(2)
    if generation is None:
        return found, False
    first, size = found[0], index.nbytes
    joint = found[2] == first + 2 * size and (anchor is None or found[3] == first + size)
    joint = joint and index.untyped_storage()._cdata == generation.untyped_storage()._cdata
    return found, joint


def _with_sign(part: torch.Tensor) -> torch.Tensor:
    """A tensor whose values keep their sign when they become float32."""
    if part.dtype != torch.float64:
        return part
    narrow, tiny = part.float(), torch.finfo(torch.float32).tiny
    lost = (narrow == 0) & (part != 0)
    return torch.where(lost, torch.copysign(narrow.new_full((), tiny), part), narrow)
