"""The GPU as benchmarks see it: timing queues of launches by events, and the copy engine as the yardstick."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.harness import Incorrect, Variant
from gear_loader import Table

YARDSTICK = "cudaMemcpyAsync"
PAUSE = 600_000
"""Cycles, a third of a millisecond on a H100, in which the host queues the rest: the GPU must not wait for it."""

Launch = Callable[[], None]


class CudaEngine:
    """The current GPU, as the measurements see it; tests rehearse them on a device that is none."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)
        self._side = torch.cuda.Stream(self.device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(self, work: Launch) -> float:
        """Seconds on the device from before what `work` queues until after it."""
        torch.cuda._sleep(PAUSE)
        self._begin.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def queue(self, launches: Sequence[Launch]) -> Launch:
        """Something that queues all launches on the device at once."""
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

    @contextlib.contextmanager
    def aside(self) -> Iterator[int]:
        """What is queued within goes to another stream than the default one; gives its handle."""
        with torch.cuda.stream(self._side):
            yield self._side.cuda_stream

    def beside(self, work: Launch, load: Launch, count: int) -> tuple[float, list[float]]:
        """Queue `work` and, on another stream, `load` `count` times; `work` starts when the first of these ends."""
        side = self._side
        origin = torch.cuda.Event(enable_timing=True)  # before all others, so that no time is negative
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        main = torch.cuda.current_stream()
        torch.cuda.synchronize()
        origin.record()
        torch.cuda._sleep(4 * PAUSE)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for mark in marks:
                load()
                mark.record()
        main.wait_event(marks[0])
        self._begin.record()
        work()
        self._end.record()
        torch.cuda.synchronize()
        begin = origin.elapsed_time(self._begin)
        ends = [(origin.elapsed_time(mark) - begin) / 1e3 for mark in marks]
        return (origin.elapsed_time(self._end) - begin) / 1e3, ends

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


Engine = CudaEngine


class Copies:
    """Copies of contiguous pinned memory by the copy engine: the yardstick.

    source: int64 [n] in pinned memory. count, bytes: of a copy, less than those of the source. bounds: addresses that
    no copy of the driver's may span: see `Region.pinned_bounds`.
    """

    def __init__(
        self,
        engine: Engine,
        source: torch.Tensor,
        count: int,
        name: str = YARDSTICK,
        *,
        bounds: Sequence[int] = (),
    ) -> None:
        self._engine, self._source, self._name = engine, source, name
        self._words = count // 8
        self._bounds = [(bound - source.data_ptr()) // 8 for bound in bounds]  # in words of the source
        self.bytes = self._words * 8
        self._target = torch.empty(self._words, dtype=torch.int64, device=engine.device)
        self._first = 0
        self._checked = False

    @classmethod
    def fresh(cls, engine: Engine, count: int) -> Copies:
        """From pinned memory of its own, four times as large as a copy."""
        source = engine.pinned((4 * (count // 8),), torch.int64)
        torch.arange(len(source), out=source)
        return cls(engine, source, count)

    @classmethod
    def of_table(cls, engine: Engine, table: Table, count: int) -> Copies:
        """Out of a table's own memory, which is registered with CUDA rather than allocated by it."""
        largest = max(table.schema, key=lambda name: table.schema[name].step_bytes)
        source = table._engine.region.blocks(largest).view(-1).view(torch.int64)
        name, bounds = f"{YARDSTICK}, table", table._engine.region.pinned_bounds
        return cls(engine, source, min(count, len(source) * 4), name, bounds=bounds)

    def variant(self) -> Variant:
        """Two copies in a row, from random places on multiples of 4 KiB."""
        two = lambda: (self.copy(), self.copy())  # noqa: E731
        return Variant(self._name, lambda: self._engine.timed(two), self.check, self.bytes, 2)

    def copy(self) -> None:
        """Queue one copy, from a random place."""
        self._first = 512 * int(torch.randint((len(self._source) - self._words) // 512 + 1, ()))
        last = self._first + self._words
        edges = [self._first, *(bound for bound in self._bounds if self._first < bound < last), last]
        for begin, end in itertools.pairwise(edges):
            target = self._target[begin - self._first : end - self._first]
            target.copy_(self._source[begin:end], non_blocking=True)

    def compare(self) -> None:
        """Raise `Incorrect` unless the last copy is right; waits for it."""
        self._engine.synchronize()
        if not torch.equal(self._target.cpu(), self._source[self._first : self._first + self._words]):
            raise Incorrect("the copy differs")

    def check(self) -> None:
        if not self._checked:
            self._target.fill_(-1)
            self.copy()
            self.compare()
            self._checked = True
