"""Memory of the stand-in: both caching allocators as documented; what is freed is overwritten."""

from __future__ import annotations

import collections
import ctypes
import itertools
import math
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from .machine import Machine, Operation, Stream

ARENA = 1 << 25
ROUND = 512
POISON = 0xA5


class Span(NamedTuple):
    """Bytes from `first` to before `end`.

    Attributes:
        block: which allocation they lie in; None for other memory.
        turn: how often that had been given back; of registered memory the number of its registration.
    """

    first: int
    end: int
    block: int | None
    turn: int = 0


class _Holder(np.ndarray[Any, Any]):
    """The bytes of an allocation, alive as long as a tensor's storage."""


class View(NamedTuple):
    """A tensor by its address: it keeps nothing alive, as a kernel's argument does not."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        count = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return cls(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, count)

    @classmethod
    def at(cls, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> View:
        """A contiguous tensor at an address."""
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return cls(address, shape, stride, dtype, math.prod(shape) * dtype.itemsize)

    def tensor(self) -> torch.Tensor:
        """What lies there now."""
        if not self.bytes:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        memory = np.frombuffer((ctypes.c_uint8 * self.bytes).from_address(self.address), dtype=np.uint8)
        flat = torch.from_numpy(memory).view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class Block:
    """An allocation.

    Attributes:
        stream: whose pool it is in; None for pinned memory.
        used: other streams that were recorded as its users.
        ended: work of its former users that the allocator of pinned memory has seen done.
        turn: how often it has been given back.
    """

    def __init__(self, address: int, size: int, memory: Any) -> None:
        self.address, self.size, self.memory = address, size, memory
        self.stream: Stream | None = None
        self.used: set[int] = set()
        self.ended: list[Operation] = []
        self.turn = 0

    def poison(self) -> None:
        self.memory[:] = POISON


class Memory:
    """Device memory and pinned memory.

    Memory of a device belongs to the stream that was current when it was allocated: once freed, its pool hands it out
    again at once, and what is queued there may overwrite it, unless `record_stream` has named other streams, for whose
    work at the time of freeing it waits. Pinned memory is handed out again when the copies out of it that the
    allocator knows of are done; it knows none of what kernels read.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._arena: Any = np.empty(0, dtype=np.uint8)
        self._free: dict[tuple[int, int], list[Block]] = collections.defaultdict(list)
        self._pending: list[tuple[Block, list[Operation]]] = []
        self._blocks: dict[int, Block] = {}
        self._pages: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.coherent = False  # whether devices read all host memory
        self._counts: collections.Counter[tuple[int, int]] = collections.Counter()  # by thread and device
        self._registrations: dict[int, int] = {}
        self._numbers = itertools.count(1)
        machine.turn_of = lambda span: self._turn(span.first, span.block)

    # ---------------------------------------------------------------- allocating

    def allocate(self, count: int, stream: Stream | None) -> torch.Tensor:
        """Bytes of a stream's pool, or pinned; uint8 [count] as the host sees them. Never runs other threads."""
        self._machine.check_call("allocate")
        if stream is not None:
            self._counts[threading.get_ident(), stream.device] += 1
        self._recycle()
        size = max(-(-count // ROUND) * ROUND, ROUND)
        pool = self._free[-1 if stream is None else stream.cuda_stream, size]
        block = pool.pop() if pool else self._fresh(size)
        block.stream, block.used = stream, set()
        for operation in block.ended:  # whoever gets the memory writes after them
            self._machine.host_knows(operation)
        block.ended = []
        holder = block.memory[:count].view(_Holder)
        final = weakref.finalize(holder, self._freed, block)
        final.atexit = False
        return torch.from_numpy(holder)

    def allocations_of(self, thread: int) -> int:
        """Of memory of devices, by a thread."""
        return sum(count for (which, _), count in self._counts.items() if which == thread)

    def allocations_on(self, device: int) -> int:
        """As PyTorch counts them, of all threads."""
        return sum(count for (_, which), count in self._counts.items() if which == device)

    def _fresh(self, size: int) -> Block:
        if len(self._arena) < size:
            arena = np.empty(max(ARENA, size) + ROUND, dtype=np.uint8)
            self._arena = arena[-arena.ctypes.data % ROUND :]
        part, self._arena = self._arena[:size], self._arena[size:]
        address = part.ctypes.data
        for page in range(address, address + size, ROUND):
            self._pages[page] = address
        self._blocks[address] = block = Block(address, size, part)
        block.poison()
        return block

    def _freed(self, block: Block) -> None:
        block.turn += 1
        users = [stream for stream in self._machine.streams if stream.cuda_stream in block.used]
        for stream in users:
            if stream.capture is not None and not stream.capture.by_torch:
                self._machine.fail(
                    f"{block.address:#x} was given back while stream {stream.cuda_stream}, which uses it, captures: "
                    "the allocator's event enters the graph"
                )
        if users:
            markers = [self._machine.enqueue(stream, "free", None, captured=False) for stream in users]
            self._pending.append((block, markers))
        else:
            self._reusable(block)

    def _recycle(self) -> None:
        """Take back blocks whose other users are done."""
        pending, self._pending = self._pending, []
        for block, markers in pending:
            if all(marker.done for marker in markers):
                self._reusable(block, markers)
            else:
                self._pending.append((block, markers))

    def _reusable(self, block: Block, after: Iterable[Operation] = ()) -> None:
        if block.stream is None:
            block.poison()  # the host may write at once
            block.ended = list(after)
            self._free[-1, block.size].append(block)
            return
        span = Span(block.address, block.address + block.size, block.address)
        self._machine.enqueue(
            block.stream,
            "the next user of freed memory",
            block.poison,
            writes=[span],
            after=after,
            captured=False,
        )
        self._free[block.stream.cuda_stream, block.size].append(block)

    def forget(self) -> None:
        """Let go of all memory at the end of a run; what is still held lives on by itself."""
        self._arena = np.empty(0, dtype=np.uint8)
        for known in (self._free, self._blocks, self._pages, self._pending):
            known.clear()

    # ---------------------------------------------------------------- what lies where

    def block(self, address: int) -> Block | None:
        """The allocation that an address lies in."""
        first = self._pages.get(address - address % ROUND)
        return None if first is None else self._blocks[first]

    def span(self, view: View) -> Span:
        block = self.block(view.address)
        first = None if block is None else block.address
        return Span(view.address, view.address + view.bytes, first, self._turn(view.address, first))

    def _turn(self, address: int, block: int | None) -> int:
        if block is not None:
            return self._blocks[block].turn
        for first, count in self.registered.items():
            if first <= address < first + count:
                return self._registrations[first]
        return 0

    def register(self, address: int, count: int) -> None:
        """Lock pages of host memory, which are a GPU's from now on."""
        self.registered[address] = count
        self._registrations[address] = next(self._numbers)

    def is_pinned(self, view: View) -> bool:
        """Whether the host memory of a tensor is page-locked."""
        block = self.block(view.address)
        return self.is_registered(view) or (block is not None and block.stream is None)

    def is_registered(self, view: View) -> bool:
        ends = sorted((first, first + count) for first, count in self.registered.items())
        position = view.address
        for first, end in ends:
            if first <= position < end:
                position = end
        return position >= view.address + max(view.bytes, 1)

    def check_readable(self, view: View) -> None:
        """Fail unless a GPU can access memory."""
        known = self.coherent or self.block(view.address) is not None
        if view.bytes and not known and not self.is_registered(view):
            raise RuntimeError(f"an illegal access to {view.bytes} bytes at {view.address:#x}")
