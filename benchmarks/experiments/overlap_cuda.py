"""``python -m benchmarks overlap --device cuda``: what a loader beside the training costs it, and what it gets itself.

Two kinds of training work are queued on one stream: products of two bf16 matrices, and steps (forward, backward,
optimizer) of a small bf16 transformer on batches of W1. Beside each, on another stream and without a pause: nothing
(the yardstick), the gather kernel on batches of W1 with a grid of p programs, or the copy engine on pinned memory.

`extras` of a row: `slowdown`, time of the work over that of the work alone in the same turn; `gb_per_s`, what the
loader moved meanwhile; `gb_per_s_alone`, what it moves by itself. A loader that ends before the work is given more to
do, and the measurement is repeated.

Then the same training steps fed by a loader, each on a batch of its own: `ReplayDataset`, and `index_select` into
pinned memory with a copy to the GPU (`benchmarks.loading.Staged`); `extras` have the host's seconds for a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks import loading
from benchmarks.engine import YARDSTICK, Copies, CudaEngine, Engine, Launch
from benchmarks.gather_rows import WorkloadRows, launch
from benchmarks.harness import Incorrect, Session, Variant
from benchmarks.loading import Staged, check_dataset
from benchmarks.training import ALONE, Clock, Feed, Training, Transformer, fed
from benchmarks.workloads import W1, Data, Workload, poison

BLOCK_STEPS = 100
MOST_LOADS = 4096
"""Loads that are queued beside a piece of work at most."""

TOLERANCE = 1e-2
"""Relative error of a product of bf16 matrices."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What to measure.

    programs: sizes of the gather kernel's grid. load_bytes: of a load: a few batches, or a copy. matrix, products: rows
    and columns of the matrices, and products of a measurement. width, layers, heads: of the transformer. steps: of it.
    """

    programs: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 132)
    batch: int = 256
    load_bytes: int = 32 << 20
    matrix: int = 8192
    products: int = 16
    width: int = 512
    layers: int = 4
    heads: int = 8
    steps: int = 8


QUICK = Sizes(programs=(1, 8, 132), batch=64, load_bytes=8 << 20, matrix=4096, products=8, steps=4)


def measured(
    session: Session,
    *,
    trajectories: int,
    engine: Engine | None = None,
    sizes: Sizes | None = None,
    workload: Workload = W1,
) -> None:
    """Measure both kinds of work beside each load, then training that is fed."""
    engine = CudaEngine() if engine is None else engine
    sizes = (QUICK if session.quick else Sizes()) if sizes is None else sizes
    data = Data(workload.of(trajectories))
    with data.table(BLOCK_STEPS) as table, session.progress("overlap", 3):
        loads = _loads(engine, data, table, sizes)
        works: list[_Work] = [_Products(engine, sizes), _Steps(engine, data, sizes)]
        for work in works:
            if not session.late(work.name):
                _compare(session, work, _beside(engine, work, loads), data, sizes, work.name)
        name = f"fed {works[1].name}"
        if not session.late(name):
            feeds, training = _feeds(engine, data, table, sizes), _training(engine, sizes)
            variants = fed(feeds, training, sizes.batch, 2 * sizes.steps, engine.synchronize)
            _compare(session, works[1], variants, data, sizes, name)


def _compare(
    session: Session, work: _Work, variants: Sequence[Variant], data: Data, sizes: Sizes, name: str
) -> None:
    told = {"work": name, "batch": sizes.batch, "trajectories": data.workload.trajectories}
    label = f"{name}, batch {sizes.batch}"
    session.compare("step", label, variants, ALONE, {**told, **work.parameters}, unit="rows")


class _Products:
    """Products of two random bf16 matrices: `launch` queues `units` of them, of `amount` rows each."""

    name = "bf16 products"

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        self.amount, self.units = sizes.matrix, sizes.products
        self.parameters = {"matrix": sizes.matrix}
        self._engine, shape = engine, (sizes.matrix, sizes.matrix)
        made = (torch.randn(shape, device=engine.device, dtype=torch.bfloat16) for _ in range(3))
        self._left, self._right, self._out = made

    @functools.cached_property
    def launch(self) -> Launch:
        return self._engine.queue([self._multiply] * self.units)

    def check(self) -> None:
        self._engine.synchronize()
        some = slice(0, len(self._out), max(1, len(self._out) // 8))
        expected = self._left[some].double() @ self._right.double()
        error = float((self._out[some].double() - expected).norm() / expected.norm())
        if not error < TOLERANCE:  # NaN is none either
            raise Incorrect(f"a product is off by {error:.2g}")
        self._out.fill_(float("nan"))

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._out)


def _training(engine: Engine, sizes: Sizes) -> Training:
    model = Transformer(sizes.width, sizes.layers, sizes.heads)
    # bf16 products run on the matrix units of a GPU, and nowhere on most CPUs.
    dtype = torch.bfloat16 if engine.device.type == "cuda" else torch.float32
    return Training(model.to(engine.device, dtype))


class _Steps:
    """Training steps of a transformer on a batch that is there."""

    name = "transformer steps"

    def __init__(self, engine: Engine, data: Data, sizes: Sizes) -> None:
        self.parameters = {"width": sizes.width, "layers": sizes.layers}
        self.amount, self.units = sizes.batch, sizes.steps
        self._engine, self._training = engine, _training(engine, sizes)
        self._batch = _there(engine, data, sizes.batch)
        self._loss = torch.tensor(math.nan)

    def launch(self) -> None:
        for _ in range(self.units):
            self._loss = self._training.step(self._batch)

    def check(self) -> None:
        self._engine.synchronize()
        loss = float(self._loss)
        if not math.isfinite(loss):
            raise Incorrect(f"the loss is {loss}")


_Work = _Products | _Steps


def _there(engine: Engine, data: Data, batch: int) -> dict[str, torch.Tensor]:
    return {name: values.to(engine.device) for name, values in data.expected(data.draw(batch)).items()}


class _Kernel:
    """The gather kernel on a few batches: `launch` queues them once, and moves so many `bytes`."""

    def __init__(self, engine: Engine, rows: WorkloadRows, programs: int) -> None:
        self.name = f"ours, kernel, {programs} programs"
        self.parameters = {"programs": programs}
        self._engine, self._rows = engine, rows
        self._launches = [launch(rows, i, programs) for i in range(len(rows.slots))]
        self.bytes, self.refresh = rows.bytes * len(self._launches), rows.refresh

    @functools.cached_property
    def launch(self) -> Launch:
        return self._engine.queue(self._launches)

    def check(self) -> None:
        self._engine.synchronize()
        for i in range(max(0, len(self._launches) - 2), len(self._launches)):  # the others are overwritten
            self._rows.check(i)
            poison(self._rows.buffers[i % 2].batch)


class _Copy:
    """The copy engine, from the table's own memory."""

    def __init__(self, engine: Engine, table: gear.Table, count: int) -> None:
        self._copies = Copies.of_table(engine, table, count)
        self.name, self.bytes = YARDSTICK, self._copies.bytes
        self.parameters: dict[str, Any] = {}
        self.launch, self.check = self._copies.copy, self._copies.compare
        self.refresh = lambda: None


_Load = _Kernel | _Copy


def _loads(engine: Engine, data: Data, table: gear.Table, sizes: Sizes) -> list[_Load]:
    launches = max(2, sizes.load_bytes // (sizes.batch * data.workload.row_bytes))
    rows = WorkloadRows(engine, data, table, sizes.batch, launches)
    kernels = [_Kernel(engine, rows, programs) for programs in sizes.programs]
    return [*kernels, _Copy(engine, table, sizes.load_bytes)]


def moved(ends: Sequence[float], seconds: float) -> float:
    """How many loads, and parts of them, were done from time 0 to `seconds`."""
    done = np.interp((0.0, seconds), ends, np.arange(1, len(ends) + 1))
    return float(done[1] - done[0])


class _Pair:
    """A piece of work and a load beside it. rates: bytes a second that the load moved, of each measurement."""

    def __init__(self, engine: Engine, work: _Work, load: _Load) -> None:
        self._engine, self._work, self._load = engine, work, load
        self._count = 4
        self.rates: list[float] = []
        self.alone = math.nan

    def check(self) -> None:
        """Run both side by side, compare what both should have done, and see how fast the load is by itself."""
        engine, work, load = self._engine, self._work, self._load
        load.refresh()
        engine.synchronize()
        for once in (work.launch, load.launch):  # compiles, allocates and captures what it needs
            once()
            engine.synchronize()
        self._run()
        work.check()
        load.check()

        self.alone = 4 * load.bytes / engine.timed(lambda: [load.launch() for _ in range(4)])

    def measure(self) -> float:
        self._load.refresh()
        self._engine.synchronize()
        seconds, rate = self._run()
        self.rates.append(rate)
        return seconds

    def _run(self) -> tuple[float, float]:
        while True:
            seconds, ends = self._engine.beside(self._work.launch, self._load.launch, self._count)
            if ends[-1] >= seconds:
                return seconds, moved(ends, seconds) * self._load.bytes / seconds
            if self._count >= MOST_LOADS:
                raise Incorrect(f"{self._count} loads end before the work does")
            passed = max(ends[-1], seconds / 8)
            self._count = min(MOST_LOADS, math.ceil(1.25 * self._count * seconds / passed))


def _beside(engine: Engine, work: _Work, loads: Sequence[_Load]) -> list[Variant]:
    clock = Clock()

    def alone() -> float:
        return engine.timed(work.launch)

    def check() -> None:
        work.launch()
        work.check()

    def variant(load: _Load | None) -> Variant:
        pair = None if load is None else _Pair(engine, work, load)
        name = ALONE if load is None else load.name

        def measure() -> float:
            seconds = alone() if pair is None else pair.measure()
            clock.note(name, seconds, 0.0)
            return seconds

        def extras() -> dict[str, float]:
            found = {"slowdown": clock.slowdown(name)}
            if pair is not None:
                found["gb_per_s"] = float(np.median(pair.rates)) / 1e9
                found["gb_per_s_alone"] = pair.alone / 1e9
            return found

        told = {} if load is None else load.parameters
        checked = check if pair is None else pair.check
        return Variant(name, measure, checked, work.amount, work.units, told, extras=extras)

    return [variant(load) for load in (None, *loads)]


def _feeds(engine: Engine, data: Data, table: gear.Table, sizes: Sizes) -> list[Feed]:
    there, staged = _there(engine, data, sizes.batch), Staged(engine, data, sizes.batch)

    def ours(prefetch: int, programs: int | None = None) -> Feed:
        options = {"device": engine.device, "prefetch": prefetch, "programs": programs, "copy": False}
        dataset = loading.dataset(data, table, sizes.batch, **options)
        name = f"ours, prefetch {prefetch}" + ("" if programs is None else f", {programs} programs")
        check = functools.partial(check_dataset, data, dataset, dataset)
        return Feed(name, lambda: iter(dataset), check, {"prefetch": prefetch, "programs": programs})

    def staging() -> Iterator[Any]:
        while True:
            yield staged.batch(data.draw(sizes.batch))

    return [
        Feed(ALONE, lambda: itertools.repeat(there), lambda: None),
        ours(0),
        ours(2),
        *(ours(2, programs) for programs in sizes.programs),
        Feed("staged, index_select", staging, staged.check),
    ]
