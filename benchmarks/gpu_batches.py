"""Batches on a GPU in every way: ours, the kernel alone, copies of the driver, staged, and data that is on the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

import gear_loader as gear
from benchmarks.copies import BATCHED, Driver, Unavailable, copies_of
from benchmarks.engine import YARDSTICK, Copies, Engine, Launch
from benchmarks.gather_rows import WorkloadRows, launch
from benchmarks.harness import Incorrect, Medians, Session, Variant, per_batch
from benchmarks.loading import WARM_UP, Staged, check_dataset, closed, dataset
from benchmarks.workloads import STEPS, W1, W2, Data, Rows, expect, poison

BLOCK_STEPS = 100
RING, HOME = "ring on the device", "dataset, table on the device"
HALF = "dataset, half of the table on the device"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What to measure.

    batches: rows of a batch. programs: of the kernel alone, beside its own choice. queue_bytes, queue_launches: a queue
    is as many launches as make that many bytes, at most so many. copy_bytes: of a yardstick's copy.
    """

    batches: tuple[int, ...] = (32, 256, 1024)
    programs: tuple[int, ...] = (2, 16)
    queue_bytes: int = 64 << 20
    queue_launches: int = 64
    copy_bytes: int = 256 << 20


QUICK = Sizes((32,), (2,), 1 << 20, 4, 8 << 20)


def measured(
    session: Session, engine: Engine, trajectories: int, library: Any = None, sizes: Sizes | None = None
) -> None:
    """W1, W2 and single steps of W2, each in batches of some sizes."""
    sizes = (QUICK if session.quick else Sizes()) if sizes is None else sizes
    driver: Driver | None = None
    try:
        driver = Driver(library)
    except Unavailable as error:
        session.leave("copies of the driver", str(error))
    copies = Copies.fresh(engine, sizes.copy_bytes)
    for workload in (W1, W2, STEPS):
        data = Data(workload.of(trajectories))
        label = f"{workload.name}, batch {{}}".format
        with contextlib.ExitStack() as stack:
            table = stack.enter_context(data.table(BLOCK_STEPS, packed=False))
            homes: dict[str, gear.Table] = {}
            if engine.device.type == "cuda":
                homes[HOME] = stack.enter_context(data.table(BLOCK_STEPS, packed=False, device=engine.device))
            if homes and workload is W1:
                given: dict[str, Any] = {"device": engine.device, "here": 0.5}
                homes[HALF] = stack.enter_context(data.table(BLOCK_STEPS, packed=False, **given))
            for batch in session.each(workload.name, sizes.batches, label):
                variants = [copies.variant(), *_ways(session, engine, data, table, batch, driver, sizes)]
                count = _counts(data, batch, sizes)[1]
                variants += [
                    _dataset(engine, data, home, batch, count, name, prefetch=2)
                    for name, home in homes.items()
                ]
                told = {"batch": batch, "block_steps": BLOCK_STEPS, "trajectories": trajectories}
                references = [each.name for each in variants if each.name in (BATCHED, RING)]
                session.compare(workload.name, label(batch), variants, YARDSTICK, told, references)


def _counts(data: Data, batch: int, sizes: Sizes) -> tuple[int, int]:
    """Launches of a queue, and batches of a measurement."""
    count = batch * data.workload.row_bytes
    launches = max(1, min(sizes.queue_launches, sizes.queue_bytes // count))
    return launches, max(4, min(200, 16 * sizes.queue_bytes // count))


def _ways(
    session: Session,
    engine: Engine,
    data: Data,
    table: gear.Table,
    batch: int,
    driver: Driver | None,
    sizes: Sizes,
) -> list[Variant]:
    """The variants beside the yardstick."""
    workload = data.workload
    count = batch * workload.row_bytes
    launches, batches = _counts(data, batch, sizes)
    rows = WorkloadRows(engine, data, table, batch, launches)
    ours = functools.partial(_dataset, engine, data, table, batch, batches)
    unit: Any = "trajectory" if workload.anchor == "first" else "step"
    found = [
        *(_kernel(engine, rows, programs) for programs in (*sizes.programs, None)),
        ours("dataset, prefetch 2", prefetch=2),
        ours("dataset, prefetch 0", prefetch=0),
        ours("dataset, by priority", prefetch=2, sampler=gear.Prioritized(unit=unit)),
        _ring(engine, data, batch, batches),
    ]
    if workload.anchor == "first":
        found.append(ours("dataset, packed", prefetch=2, layout="packed", check=_check_packed))
    if workload.window.length > 1:
        staged = Staged(engine, data, batch)
        draw = functools.partial(data.draw, batch)
        measure = per_batch(draw, staged.batch, batches, engine.synchronize)
        found.append(Variant("staged, index_select", measure, staged.check, count, batches))
    if workload.window.length in (1, workload.steps):  # a row of its storage
        for priority in (False, True):
            made = functools.partial(_torchrl, engine, data, batch, batches, priority=priority)
            peer = session.attempt(f"TorchRL on the device, {workload.name}, batch {batch}", made)
            found += [] if peer is None else [peer]
    if driver is not None and rows.whole:
        found.append(copies_of(engine, driver, rows))
    return found


def _timed(
    engine: Engine, batches: Callable[[], Any], count: int, host: Medians | None = None
) -> Callable[[], float]:
    """Seconds of so many batches of a new iterator, until the device is through; the host's are noted."""

    def measure() -> float:
        with closed(batches()) as iterator:
            for _ in range(WARM_UP):
                next(iterator)
            engine.synchronize()
            begin = time.perf_counter(), time.thread_time(), time.process_time()
            for _ in range(count):
                next(iterator)
            thread, process = time.thread_time() - begin[1], time.process_time() - begin[2]
            if host is not None:
                host.note(host_seconds=thread / count, process_seconds=process / count)
            engine.synchronize()
            return time.perf_counter() - begin[0]

    return measure


def _dataset(
    engine: Engine,
    data: Data,
    table: gear.Table,
    batch: int,
    batches: int,
    name: str,
    *,
    check: Callable[[Data, Any, Any], None] = check_dataset,
    **options: Any,
) -> Variant:
    found, host = dataset(data, table, batch, device=engine.device, **options), Medians()
    measure = _timed(engine, lambda: found, batches, host)
    told = {"prefetch": options["prefetch"]}
    checked = functools.partial(check, data, found, found)
    return Variant(name, measure, checked, batch * data.workload.row_bytes, batches, told, extras=host)


def _check_packed(data: Data, found: gear.ReplayDataset, batches: Any) -> None:
    """`check_dataset` of rows that lie one after another; all are whole trajectories."""

    def padded() -> Any:
        with closed(batches) as iterator:
            for batch in iterator:
                rows = len(batch["index"])
                shaped = {
                    name: batch[name].view(rows, -1, *values.shape[1:]) for name, values in data.flat.items()
                }
                mask = torch.ones(rows, data.workload.steps, dtype=torch.bool)
                yield {**shaped, "mask": mask, "index": batch["index"], "anchor": batch["anchor"]}

    check_dataset(data, found, padded())


def _ring(engine: Engine, data: Data, batch: int, batches: int) -> Variant:
    """All data on the device, as rings of simulators have it: rows are drawn there, and indexed."""
    workload, device = data.workload, engine.device
    flat = {name: values.to(device) for name, values in data.flat.items()}
    window = torch.arange(
        workload.window.offset, workload.window.offset + workload.window.length, device=device
    )
    last = 1 if workload.anchor == "first" else workload.steps

    def gathered(positions: torch.Tensor, anchors: torch.Tensor) -> dict[str, torch.Tensor]:
        steps = anchors[:, None] + window
        mask = steps >= 0
        index = positions[:, None] * workload.steps + steps.clamp(min=0)
        made = {name: values[index] for name, values in flat.items()}
        if workload.anchor == "uniform" and workload.window.length > 1:
            made = {n: v * mask.view(*mask.shape, *[1] * (v.dim() - 2)) for n, v in made.items()}
        return {**made, "mask": mask}

    def all_batches() -> Any:
        while True:
            positions = torch.randint(workload.trajectories, (batch,), device=device)
            yield gathered(positions, torch.randint(last, (batch,), device=device))

    def check() -> None:
        rows = data.draw(batch)
        expect(gathered(rows.positions.to(device), rows.anchors.to(device)), data.expected(rows))

    return Variant(RING, _timed(engine, all_batches, batches), check, batch * workload.row_bytes, batches)


def _torchrl(engine: Engine, data: Data, batch: int, batches: int, *, priority: bool) -> Variant:
    """TorchRL's buffer with its storage on the device; ImportError without it."""
    from tensordict import TensorDict
    from torchrl.data import (
        LazyTensorStorage,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )

    workload = data.workload
    stacked = data.stacked if workload.anchor == "first" else {n: v[:, None] for n, v in data.flat.items()}
    count = len(next(iter(stacked.values())))
    storage = LazyTensorStorage(count, device=engine.device)
    options: dict[str, Any] = {"storage": storage, "batch_size": batch}
    if priority:
        store = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, **options)
    else:
        store = TensorDictReplayBuffer(**options)
    number = torch.arange(count)
    store.extend(TensorDict({**stacked, "number": number}, batch_size=count))

    def all_batches() -> Any:
        while True:
            yield store.sample()

    def check() -> None:
        found = store.sample()
        number = found["number"].cpu()
        steps = 1 if workload.anchor == "first" else workload.steps
        rows = Rows(number // steps, number % steps)
        expected = data.expected(rows)
        expect(found, {name: expected[name] for name in data.flat})
        if found["number"].device != engine.device:
            raise Incorrect(f"its batches are on {found['number'].device}")

    name = "TorchRL on the device" + ", by priority" * priority
    return Variant(
        name, _timed(engine, all_batches, batches), check, batch * workload.row_bytes, batches, required=False
    )


def _kernel(engine: Engine, rows: WorkloadRows, programs: int | None) -> Variant:
    """A queue of launches, which write to two batches by turns; without `programs` with the launcher's choice."""
    launches = [launch(rows, i, programs) for i in range(len(rows.slots))]
    queue: list[Launch] = []
    host: list[float] = []

    def check() -> None:
        rows.refresh()
        for i in sorted({0, len(launches) - 1}):
            poison(rows.buffers[i % 2].batch)
            launches[i]()
            engine.synchronize()
            rows.check(i)
        begin = time.perf_counter()  # what the host needs for a launch; all of them fit into the GPU's queue
        for each in launches:
            each()
        host.append((time.perf_counter() - begin) / len(launches))
        engine.synchronize()
        queue.append(engine.queue(launches))

    def measure() -> float:
        rows.refresh()
        engine.synchronize()
        return engine.timed(queue[0])

    name = "kernel, default" if programs is None else f"kernel, {programs} programs"
    told, extras = {"programs": programs}, lambda: {"launch_seconds": host[0]}
    return Variant(name, measure, check, rows.bytes, len(launches), told, extras=extras)
