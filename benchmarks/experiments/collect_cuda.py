"""``python -m benchmarks collect --device cuda``: gathering from pinned host memory, against the copy engine.

The yardstick is ``copy_(non_blocking=True)`` of 256 MiB in one piece from a random place of a pinned tensor of 1 GiB,
timed in turn with everything else; and the same out of the table. A kernel gathers rows that are on the GPU with p
programs; cuMemcpy... is a copy a row instead, of the rows that lie in one piece: see `benchmarks.copies`; staged does
without the kernel: `index_select` into pinned buffers, then a copy to the GPU.

Kernels are timed by CUDA events around a queue of launches that was captured as a CUDA graph, so that the GPU never
waits for the host; before every replay all launches get new random rows.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import gear_loader as gear
from benchmarks.copies import BATCHED, Driver, Unavailable, copy_variants
from benchmarks.engine import YARDSTICK, Copies, CudaEngine, Engine, Launch
from benchmarks.gather_rows import (
    STEP_WORDS,
    QueueRows,
    RowKind,
    SweepRows,
    WorkloadRows,
    launch,
    sweep_table,
)
from benchmarks.harness import Medians, Session, Variant, per_batch
from benchmarks.loading import WARM_UP, Staged, check_dataset, closed, dataset
from benchmarks.workloads import W1, W2, Data, poison

BATCHES = (32, 256, 1024)
BLOCK_STEPS = (100, 64)
PREFETCH = (0, 2)
TARGETS = {4096: 0.95, 512: 0.80}
"""Row bytes from which on the share of the copy engine's rate is aimed for."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What to sweep over.

    rows: bytes of a row of the batch, in steps of 128 B (64 B for the smallest). batches, uneven_batches: rows of a
    batch, with steps of 128 B and of 44 B. steps, trajectories: of the table. queue_bytes, queue_launches: a queue is
    as many launches as make that many bytes, at most so many. copy_bytes: of a yardstick's copy.
    """

    rows: tuple[int, ...] = (64, 256, 512, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
    batches: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    uneven_batches: tuple[int, ...] = (32, 256, 1024)
    programs: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 132)
    steps: int = 8192
    trajectories: int = 2048
    queue_bytes: int = 64 << 20
    queue_launches: int = 64
    copy_bytes: int = 256 << 20


QUICK = Sizes((64, 512, 4096, 65536), (32, 256), (256,), (1, 8, 132), 512, 512, 4 << 20, 8, 32 << 20)


@dataclasses.dataclass(frozen=True)
class _Rig:
    """What all comparisons of a run share."""

    session: Session
    engine: Engine
    copies: Copies
    driver: Driver | None
    sizes: Sizes

    def measure(
        self, workload: str, label: str, variants: list[Variant], rows: QueueRows, **parameters: Any
    ) -> None:
        """The copy engine, these variants, and the driver's copies of the rows."""
        aligned = parameters.get("step_bytes", 128) % 64 == 0
        singly = copy_variants(self.engine, self.driver, rows, self.session) if aligned else []
        references = tuple(variant.name for variant in singly if variant.name == BATCHED)
        found = [self.copies.variant(), *variants, *singly]
        self.session.compare(workload, label, found, YARDSTICK, parameters, references)


def measured(
    session: Session,
    *,
    trajectories: int,
    engine: Engine | None = None,
    library: Any = None,
    sizes: Sizes | None = None,
) -> None:
    """Measure the GPU side: both workloads, then sweeps over rows, batches and programs."""
    engine = CudaEngine() if engine is None else engine
    sizes = (QUICK if session.quick else Sizes()) if sizes is None else sizes
    driver: Driver | None = None
    try:
        driver = Driver(library)
    except Unavailable as error:
        session.leave("copies of the driver, a row each", str(error))
    rig = _Rig(session, engine, Copies.fresh(engine, sizes.copy_bytes), driver, sizes)
    batches = sizes.batches if session.quick else BATCHES
    for workload in (W1.of(trajectories), W2.of(trajectories)):
        data = Data(workload)
        with session.progress(workload.name, len(BLOCK_STEPS) * len(batches)):
            for steps in BLOCK_STEPS:
                with data.table(steps) as table:
                    for batch in batches:
                        _workload(rig, data, table, batch)
    even, uneven = _even_rows(sizes), _uneven_rows(sizes)
    count = len(even) * len(sizes.batches) + len(uneven) * len(sizes.uneven_batches)
    with sweep_table(sizes.steps, sizes.trajectories) as table, session.progress("rows", count):
        _sweep(rig, table, even, sizes.batches)
        _sweep(rig, table, uneven, sizes.uneven_batches)
    session.show_summary("row_bytes", ("step_bytes", "batch"), workload="rows")


def _workload(rig: _Rig, data: Data, table: gear.Table, batch: int) -> None:
    engine, sizes, workload = rig.engine, rig.sizes, data.workload
    steps = table.region.layout.block_steps
    label = f"{workload.name}, batch {batch}, blocks {steps}"
    if rig.session.late(label):
        return
    count = batch * workload.row_bytes
    rows = WorkloadRows(engine, data, table, batch, _launches(count, sizes))
    long = max(8, min(200, 16 * sizes.queue_bytes // count))
    variants = [
        Copies.of_table(engine, table, sizes.copy_bytes).variant(),
        *(_kernel(engine, rows, programs) for programs in (*sizes.programs, None)),
        *(_dataset(engine, data, table, batch, long, prefetch) for prefetch in PREFETCH),
        *([_staged(engine, data, batch, long)] if steps == BLOCK_STEPS[0] else []),
    ]
    parameters = {"batch": batch, "block_steps": steps, "trajectories": workload.trajectories}
    rig.measure(workload.name, label, variants, rows, **parameters)


def _dataset(
    engine: Engine, data: Data, table: gear.Table, batch: int, batches: int, prefetch: int
) -> Variant:
    found = dataset(data, table, batch, device=engine.device, prefetch=prefetch)
    host = Medians()

    def measure() -> float:
        with closed(found) as iterator:
            for _ in range(WARM_UP):
                next(iterator)
            engine.synchronize()
            begin = time.perf_counter(), time.thread_time(), time.process_time()
            for _ in range(batches):
                next(iterator)
            thread, process = time.thread_time() - begin[1], time.process_time() - begin[2]
            host.note(host_seconds=thread / batches, process_seconds=process / batches)
            engine.synchronize()
            return time.perf_counter() - begin[0]

    name, told = f"dataset, prefetch {prefetch}", {"prefetch": prefetch}
    count = batch * data.workload.row_bytes
    check = functools.partial(check_dataset, data, found, found)
    return Variant(name, measure, check, count, batches, told, extras=host)


def _staged(engine: Engine, data: Data, batch: int, batches: int) -> Variant:
    staged = Staged(engine, data, batch)
    measure = per_batch(functools.partial(data.draw, batch), staged.batch, batches, engine.synchronize)
    return Variant("staged, index_select", measure, staged.check, batch * data.workload.row_bytes, batches)


def _even_rows(sizes: Sizes) -> list[RowKind]:
    """Rows that start on a 128-byte line."""
    kinds = []
    for count in sorted(sizes.rows):
        name = "step128" if count >= 128 else "step64"
        step = STEP_WORDS[name] * 4
        kinds.append(RowKind(name, count // step, 128 // step, step))
    return kinds


def _uneven_rows(sizes: Sizes) -> list[RowKind]:
    """Rows of about the same sizes, that start anywhere."""
    lengths = sorted({max(1, min(round(count / 44), sizes.steps)) for count in sizes.rows})
    return [RowKind("step44", length, 1, 44) for length in lengths]


def _sweep(rig: _Rig, table: gear.Table, kinds: Sequence[RowKind], batches: Sequence[int]) -> None:
    sizes = rig.sizes
    size_of = sizes.steps, sizes.trajectories
    for batch in sorted(batches, reverse=True):  # the largest first: they matter most, should time run out
        for kind in kinds:
            label = f"rows of {kind.bytes} B in steps of {kind.step_bytes} B, batch {batch}"
            if rig.session.late(label):
                continue
            rows = SweepRows(rig.engine, table, kind, batch, _launches(batch * kind.bytes, sizes), size_of)
            kernels = [_kernel(rig.engine, rows, programs) for programs in sizes.programs]
            target = max((share for least, share in TARGETS.items() if kind.bytes >= least), default=None)
            if target is not None and kind.aligned:
                for variant in kernels:
                    variant.targets = {YARDSTICK: target}
            parameters = {"batch": batch, "row_bytes": kind.bytes, "step_bytes": kind.step_bytes}
            rig.measure("rows", label, kernels, rows, **parameters)


def _kernel(engine: Engine, rows: QueueRows, programs: int | None) -> Variant:
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


def _launches(count: int, sizes: Sizes) -> int:
    return max(1, min(sizes.queue_launches, sizes.queue_bytes // count))
