"""The GPU as benchmarks see it: timing queues of launches by events, and the copy engine as the yardstick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from benchmarks.harness import Incorrect, Variant

__all__ = ["YARDSTICK", "Copies", "CudaEngine", "Engine", "Event", "Launch"]

YARDSTICK = "cudaMemcpyAsync"

Launch = Callable[[], None]


class Event(Protocol):
    """A mark in the device's work."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Engine(Protocol):
    """The device, as the measurements see it; tests rehearse them on one that is none."""

    device: torch.device

    def timed(self, work: Launch) -> float:
        """Seconds on the device from before what `work` queues until after it."""

    def queue(self, launches: Sequence[Launch]) -> Launch:
        """Something that queues all launches on the device at once."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can read."""

    def event(self) -> Event:
        """A new event."""

    def synchronize(self) -> None:
        """Wait for the device."""


class CudaEngine:
    """The current GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._filler = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)

    def timed(self, work: Launch) -> float:
        # Some tenths of a millisecond in which the host queues the rest: the GPU must not wait for it in between.
        self._filler.zero_()
        self._begin.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def queue(self, launches: Sequence[Launch]) -> Launch:
        for launch in launches:  # compiles and loads what they need, which a capture cannot
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for launch in launches:
                launch()
            graph.capture_end()
        return graph.replay

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def event(self) -> Event:
        return torch.cuda.Event()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Copies:
    """Copies of contiguous pinned memory by the copy engine: the yardstick.

    Args:
        engine: the device.
        source: int64 [n] in pinned memory.
        count: bytes of a copy, less than those of the source.
        name: how rows and tables call it.
    """

    def __init__(self, engine: Engine, source: torch.Tensor, count: int, name: str = YARDSTICK) -> None:
        self._engine, self._source, self._name = engine, source, name
        self._words = count // 8
        self._target = torch.empty(self._words, dtype=torch.int64, device=engine.device)
        self._checked = False

    @classmethod
    def fresh(cls, engine: Engine, count: int) -> Copies:
        """From pinned memory of its own, four times as large as a copy."""
        source = engine.pinned((4 * (count // 8),), torch.int64)
        torch.arange(len(source), out=source)
        return cls(engine, source, count)

    def variant(self) -> Variant:
        """Two copies in a row, from random places on multiples of 4 KiB."""
        return Variant(self._name, lambda: self._engine.timed(self._two), self._check, self._words * 8, 2)

    def _copy(self) -> int:
        first = 512 * int(torch.randint((len(self._source) - self._words) // 512 + 1, ()))
        self._target.copy_(self._source[first : first + self._words], non_blocking=True)
        return first

    def _two(self) -> None:
        self._copy()
        self._copy()

    def _check(self) -> None:
        if not self._checked:
            self._target.fill_(-1)
            first = self._copy()
            if not torch.equal(self._target.cpu(), self._source[first : first + self._words]):
                raise Incorrect("the copy differs")
            self._checked = True
