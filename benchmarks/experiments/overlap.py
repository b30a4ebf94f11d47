"""``python -m benchmarks overlap``: how much a training step slows down with the loader beside it.

On the CPU, a small network trains on batches of W1's columns, 20 steps a row; the yardstick is a step with a batch that
is there, the same one each time. All use the same number of threads; what a loader does beside the training takes its
time from the same cores. A step is forward, backward, optimizer, and waiting for the batch.

With ``--device cuda`` two kinds of training work are queued on one stream: products of two bf16 matrices, and steps of
a small bf16 transformer on batches of W1. Beside each, on another stream and without a pause: nothing (the yardstick),
the gather kernel on batches of W1 with a grid of p programs, or the copy engine on pinned memory. `extras` of a row:
`slowdown`, time of the work over that of the work alone in the same turn; `gb_per_s`, what the loader moved meanwhile;
`gb_per_s_alone`, what it moves by itself. A loader that ends before the work is given more to do, and the measurement
is repeated. Then the same training steps fed by a loader, each on a batch of its own: `ReplayDataset`, and
`index_select` into pinned memory with a copy to the GPU (`benchmarks.loading.Staged`); `extras` have the host's seconds
for a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks import loading
from benchmarks.engine import YARDSTICK, Copies, CudaEngine, Engine, Launch
from benchmarks.gather_rows import WorkloadRows, launch
from benchmarks.harness import Incorrect, Session, Unmeasured, Variant
from benchmarks.loading import Feed, Staged, map_styled
from benchmarks.options import described, experiment, numbers
from benchmarks.training import ALONE, MODELS, Clock, Training, Transformer, fed, train
from benchmarks.workloads import W1, Data, Workload, expect, poison

STEPS = 20
SECONDS = 0.2
"""About how long one measurement takes on the CPU."""
BLOCK_STEPS = 100
MOST_LOADS = 4096
"""Loads that are queued beside a piece of work at most."""
TOLERANCE = 1e-2
"""Relative error of a product of bf16 matrices."""


@experiment("overlap", repeats=(3, 9, 7))
def command(
    session: Session,
    batches: Annotated[str | None, described("Batch sizes on the CPU: 32,256,1024 by default.")] = None,
    trajectories: Annotated[int | None, described("20,000 by default.", min=1)] = None,
) -> None:
    """How much a training step slows down with the loader beside it."""
    chosen = numbers(batches, "--batches", 1, 2**20) or ((32,) if session.quick else (32, 256, 1024))
    torch.manual_seed(0)
    count = trajectories or (2000 if session.quick else W1.trajectories)
    if session.cuda:
        measured_on_gpu(session, CudaEngine(), count)
        return
    data, label = Data(workload(count)), "{0[0]}, batch {0[1]}".format
    seconds = 0.03 if session.quick else SECONDS
    with data.table(STEPS) as table:
        for model, batch in session.each("overlap", [*itertools.product(MODELS, chosen)], label):
            feeds, training = _feeds(data, table, batch), Training(MODELS[model]())
            steps = max(4, min(200, round(seconds / _step_seconds(feeds[0], training))))
            variants = fed(feeds, training, batch, steps)
            parameters = {"batch": batch, "model": model, "steps": STEPS}
            session.compare("step", label((model, batch)), variants, ALONE, parameters, unit="rows")


def workload(trajectories: int) -> Workload:
    """Whole trajectories of 20 steps with W1's columns: 8,400 B each."""
    return Workload("W1, 20 steps", W1.columns, trajectories, STEPS, gear.Window(length=STEPS), "first")


def _feeds(data: Data, table: gear.Table, batch: int) -> list[Feed]:
    rows = data.draw(batch)
    there = data.expected(rows)

    own = functools.partial(loading.ours, data=data, table=table, batch=batch, device="cpu", copy=False)
    return [
        Feed(ALONE, lambda: itertools.repeat(there), lambda: expect(there, data.expected(rows))),
        own("ours, prefetch 0", prefetch=0),
        own("ours, prefetch 2", prefetch=2),
        own("ours, prefetch 2, DataLoader", prefetch=2, loader=True),
        map_styled("DataLoader, map-style, 0 workers", data, batch),
        map_styled("DataLoader, map-style, 2 workers", data, batch, workers=2),
        _plain(data, batch),
    ]


def _plain(data: Data, batch: int) -> Feed:
    plain = loading.plain(data, batch)

    def start() -> Iterator[Any]:
        while True:
            plain.gather(data.draw(batch))
            yield plain.batch

    def check() -> None:
        rows = data.draw(batch)
        plain.gather(rows)
        expect(plain.batch, data.expected(rows))

    return Feed("plain torch", start, check)


def _step_seconds(feed: Feed, training: Training) -> float:
    before = [values.clone() for values in training.model.parameters()]
    shortest = min(train(feed, training, 1)[0] for _ in range(3))
    if any(torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True)):
        raise Incorrect("a step leaves parameters as they are")
    return shortest


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What to measure.

    programs: sizes of the gather kernel's grid. load_bytes: of a load: a few batches, or a copy. matrix, products: rows
    and columns of the matrices, and products of a measurement.
    width, layers, heads: of the transformer. steps: of it.
    """

    programs: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch: int = 256
    load_bytes: int = 32 << 20
    matrix: int = 8192
    products: int = 16
    width: int = 512
    layers: int = 4
    heads: int = 8
    steps: int = 8


QUICK = Sizes(
    (1, 8), batch=8, load_bytes=1 << 20, matrix=256, products=4, width=32, layers=1, heads=2, steps=2
)


@dataclasses.dataclass
class Work:
    """Training work that `launch` queues: `units` of it, of `amount` rows each."""

    name: str
    amount: int
    units: int
    parameters: Mapping[str, Any]
    launch: Launch
    check: Callable[[], None]


@dataclasses.dataclass
class Load:
    """What goes on beside the work: `launch` queues it once, and moves so many `bytes`. refresh: gives it new rows."""

    name: str
    bytes: int
    parameters: Mapping[str, Any]
    launch: Launch
    check: Callable[[], None]
    refresh: Callable[[], None] = lambda: None


def measured_on_gpu(
    session: Session,
    engine: Engine,
    trajectories: int,
    sizes: Sizes | None = None,
    workload: Workload = W1,
) -> None:
    """Both kinds of work beside each load, then training that is fed."""
    sizes = (QUICK if session.quick else Sizes()) if sizes is None else sizes
    data = Data(workload.of(trajectories))
    told = {"batch": sizes.batch, "trajectories": trajectories}
    with data.table(BLOCK_STEPS, packed=False) as table:
        loads = _loads(engine, data, table, sizes)
        works = {work.name: work for work in (_products(engine, sizes), _training_steps(engine, data, sizes))}
        fed_steps = "fed transformer steps"
        for name in session.each("overlap", [*works, fed_steps], str):
            work = works.get(name, works["transformer steps"])
            if name == fed_steps:
                feeds, training = _gpu_feeds(engine, data, table, sizes), _training(engine, sizes)
                variants = fed(feeds, training, sizes.batch, 2 * sizes.steps, engine.synchronize)
            else:
                variants = _beside(engine, work, loads)
            parameters, label = {"work": name, **told, **work.parameters}, f"{name}, batch {sizes.batch}"
            session.compare("step", label, variants, ALONE, parameters, unit="rows")


def _queue(engine: Engine, launches: Sequence[Launch]) -> Launch:
    """All of them at once; captured when it is first wanted."""
    made = functools.cache(lambda: engine.queue(launches))
    return lambda: made()()


def _products(engine: Engine, sizes: Sizes) -> Work:
    """Products of two random bf16 matrices."""
    shape = (sizes.matrix, sizes.matrix)
    left, right, out = (torch.randn(shape, device=engine.device, dtype=torch.bfloat16) for _ in range(3))

    def check() -> None:
        engine.synchronize()
        some = slice(0, len(out), max(1, len(out) // 8))
        expected = left[some].double() @ right.double()
        error = float((out[some].double() - expected).norm() / expected.norm())
        if not error < TOLERANCE:  # NaN is none either
            raise Incorrect(f"a product is off by {error:.2g}")
        out.fill_(float("nan"))

    multiply = lambda: torch.mm(left, right, out=out)  # noqa: E731
    launch_all = _queue(engine, [multiply] * sizes.products)
    told = {"matrix": sizes.matrix}
    return Work("bf16 products", sizes.matrix, sizes.products, told, launch_all, check)


def _training(engine: Engine, sizes: Sizes) -> Training:
    model = Transformer(sizes.width, sizes.layers, sizes.heads)
    # bf16 products run on the matrix units of a GPU, and nowhere on most CPUs.
    dtype = torch.bfloat16 if engine.device.type == "cuda" else torch.float32
    return Training(model.to(engine.device, dtype))


def _training_steps(engine: Engine, data: Data, sizes: Sizes) -> Work:
    """Training steps of a transformer on a batch that is there."""
    training, batch = _training(engine, sizes), _there(engine, data, sizes.batch)
    losses: list[torch.Tensor] = []

    def launch_all() -> None:
        losses[:] = [training.step(batch) for _ in range(sizes.steps)][-1:]

    def check() -> None:
        engine.synchronize()
        if not losses or not all(math.isfinite(loss) for loss in losses):
            raise Incorrect(f"the loss is {losses}")

    told = {"width": sizes.width, "layers": sizes.layers}
    return Work("transformer steps", sizes.batch, sizes.steps, told, launch_all, check)


def _there(engine: Engine, data: Data, batch: int) -> dict[str, torch.Tensor]:
    return {name: values.to(engine.device) for name, values in data.expected(data.draw(batch)).items()}


def _loads(engine: Engine, data: Data, table: gear.Table, sizes: Sizes) -> list[Load]:
    """The gather kernel on a few batches with each number of programs; the copy engine, from the table's own memory."""
    count = max(2, sizes.load_bytes // (sizes.batch * data.workload.row_bytes))
    rows = WorkloadRows(engine, data, table, sizes.batch, count)

    def check() -> None:
        engine.synchronize()
        for i in range(count - 2, count):  # the others are overwritten
            rows.check(i)
            poison(rows.buffers[i % 2].batch)

    def kernel(programs: int) -> Load:
        queue = _queue(engine, [launch(rows, i, programs) for i in range(count)])
        told = {"programs": programs}
        return Load(f"kernel, {programs} programs", rows.bytes * count, told, queue, check, rows.refresh)

    copies = Copies.of_table(engine, table, sizes.load_bytes)
    copy = Load(YARDSTICK, copies.bytes, {}, copies.copy, copies.compare)
    return [*map(kernel, sizes.programs), copy]


def moved(ends: Sequence[float], seconds: float) -> float:
    """How many loads, and parts of them, were done from time 0 to `seconds`."""
    done = np.interp((0.0, seconds), ends, np.arange(1, len(ends) + 1))
    return float(done[1] - done[0])


class Pair:
    """A piece of work and a load beside it. rates: bytes a second that the load moved, of each measurement."""

    def __init__(self, engine: Engine, work: Work, load: Load) -> None:
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
                raise Unmeasured(
                    f"{self._count} loads end after {ends[-1]:.2f} s, before the work, which ends after "
                    f"{seconds:.2f} s: its kernels wait for theirs"
                )
            passed = max(ends[-1], seconds / 8)
            self._count = min(MOST_LOADS, math.ceil(1.25 * self._count * seconds / passed))


def _beside(engine: Engine, work: Work, loads: Sequence[Load]) -> list[Variant]:
    clock = Clock()

    def alone() -> float:
        return engine.timed(work.launch)

    def check() -> None:
        work.launch()
        work.check()

    def variant(load: Load | None) -> Variant:
        pair = None if load is None else Pair(engine, work, load)
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


def _gpu_feeds(engine: Engine, data: Data, table: gear.Table, sizes: Sizes) -> list[Feed]:
    there, staged = _there(engine, data, sizes.batch), Staged(engine, data, sizes.batch)

    def ours(prefetch: int, programs: int | None = None) -> Feed:
        name = f"ours, prefetch {prefetch}" + ("" if programs is None else f", {programs} programs")
        told = {"device": engine.device, "prefetch": prefetch, "programs": programs, "copy": False}
        return loading.ours(name, data, table, sizes.batch, **told)

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
