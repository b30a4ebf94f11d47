"""A device and a driver that are none, on which the GPU side of the benchmarks is rehearsed on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

STREAM = 0x5EA
"""The handle of the stream beside the default one."""


class Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Rehearsal:
    """An engine that is no GPU: kernels run on the CPU in Triton's interpreter, one after another.

    Attributes:
        counts: loads that were asked for beside a piece of work, of each time.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.counts: list[int] = []

    def timed(self, work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def queue(self, launches: Sequence[Callable[[], None]]) -> Callable[[], None]:
        def replay() -> None:
            for launch in launches:
                launch()

        return replay

    @contextlib.contextmanager
    def aside(self) -> Iterator[int]:
        yield STREAM

    def beside(
        self, work: Callable[[], None], load: Callable[[], None], count: int
    ) -> tuple[float, list[float]]:
        """Pretends that six loads end while the work goes on."""
        self.counts.append(count)
        seconds = self.timed(work)
        load()
        return seconds, [i * seconds / 6 for i in range(count)]

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class Library:
    """The driver's library, with copies by the CPU; what it is called with goes through C's types.

    Args:
        version: of CUDA: before 12.8 it has no copies in batches, from 13 on those of the newer signature.
        wrong: copy one byte too few.
        code: what the calls return.

    Attributes:
        calls: arguments of each call that matter: name, copies, order of access, flags, hints, stream.
    """

    def __init__(self, version: float = 13.0, *, wrong: bool = False, code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._wrong, self._code = wrong, code
        single = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, _POINTER, _SIZE, _POINTER)
        shared = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)
        self.cuMemcpyHtoDAsync_v2 = single(self._single)
        if version >= 12.8:
            older = ctypes.CFUNCTYPE(ctypes.c_int, *shared, _POINTER, _POINTER)
            self.cuMemcpyBatchAsync = older(self._older)
        if version >= 13:
            newer = ctypes.CFUNCTYPE(ctypes.c_int, *shared, _POINTER)
            self.cuMemcpyBatchAsync_v2 = newer(self._batched)

    def _move(self, target: int, source: int, count: int) -> None:
        ctypes.memmove(target, source, count - self._wrong)

    def _single(self, target: int, source: int, count: int, stream: int) -> int:
        self.calls.append(("single", 1, None, None, None, stream))
        if self._code == 0:
            self._move(target, source, count)
        return self._code

    def _older(self, *arguments: Any) -> int:
        *others, failed, stream = arguments
        ctypes.c_size_t.from_address(failed).value = 7
        return self._batched(*others, stream)

    def _batched(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        firsts: int,
        kinds: int,
        stream: int,
    ) -> int:
        order, *hints, flags = (ctypes.c_uint32 * 6).from_address(attributes)
        assert kinds == 1
        assert ctypes.c_size_t.from_address(firsts).value == 0
        self.calls.append(("batched", count, order, flags, hints, stream))
        if self._code == 0:
            numbers = ctypes.c_uint64 * count
            parts = (numbers.from_address(part) for part in (targets, sources, sizes))
            for target, source, length in zip(*parts, strict=True):
                self._move(target, source, length)
        return self._code
