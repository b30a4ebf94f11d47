"""``python -m benchmarks collect``: gathering batches, against a copy of as many bytes and against plain torch.

On the CPU, of workloads W1 (whole trajectories), W2 (windows) and single steps, see `benchmarks.workloads`. The
yardstick is one ``torch.Tensor.copy_`` of as many bytes as the batch's columns have, in one piece from a random place
of a range as large as the table into a buffer that is kept. "memcpy, rows" copies each row from a random place, which
is what a gather of short rows can be compared with. `Collector.gather` and `index_select` (for windows in three ways,
see `PlainWindows`) write the same buffers again and again, rows drawn beforehand; ``x[idx]`` takes fresh memory;
`dataset` goes from the draw to the batch. All use as many threads; all but `DataLoader` give the same columns and mask.

With ``--device cuda`` the yardstick is ``copy_(non_blocking=True)`` of 256 MiB in one piece from a random place of a
pinned tensor of 1 GiB, timed in turn with everything else; and the same out of the table. A kernel gathers rows that
are on the GPU with p programs; cuMemcpyBatchAsync copies the rows that lie in one piece: see `benchmarks.copies`;
staged does without the kernel: `index_select` into pinned buffers, then a copy to the GPU. Kernels are timed by CUDA
events around a queue of launches that was captured as a CUDA graph, so that the GPU never waits for the host; before
every replay all launches get new random rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

import gear_loader as gear
from benchmarks import loading, machine
from benchmarks.copies import BATCHED, Driver, Unavailable, copies_of
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
from benchmarks.loading import (
    WARM_UP,
    Feed,
    Staged,
    check_dataset,
    closed,
    dataset,
    iterated,
    map_styled,
    memcpy,
    memcpy_rows,
)
from benchmarks.options import described, experiment
from benchmarks.showing import size
from benchmarks.workloads import (
    STEPS,
    W1,
    W2,
    Data,
    Plain,
    PlainTrajectories,
    PlainWindows,
    Rows,
    expect,
    poison,
)
from gear_loader.collection.collector import TableSource, collector_for
from gear_loader.storage.selected_rows import SelectedRows

BATCHES, QUICK_BATCHES = (32, 256, 1024), (32, 128)
BLOCK_STEPS = (100, 64)
PREFETCH = (0, 2)
TARGETS = {4096: 0.95, 512: 0.80}
"""Row bytes from which on the share of the copy engine's rate is aimed for."""


@experiment("collect", repeats=(3, 15, 7), pause=0.005)
def command(
    session: Session,
    trajectories: Annotated[int | None, described("Of W1 and W2, 20,000 by default.", min=1)] = None,
    named: Annotated[bool, described("Tables in shared memory; on the CPU.")] = False,
) -> None:
    """Gathering batches, against a plain copy of as many bytes and against plain torch."""
    count = trajectories or (300 if session.quick else W1.trajectories)
    batches = QUICK_BATCHES if session.quick else BATCHES
    if count < max(batches):
        message = f"{count} is less than the largest batch, {max(batches)}."
        raise typer.BadParameter(message, param_hint="--trajectories")
    if session.cuda:
        measured_on_gpu(session, CudaEngine(), count)
        return
    cache = machine.cache_bytes() or 0
    for workload in (W1.of(count), W2.of(count), STEPS.of(count)):
        if workload.table_bytes < 4 * cache:
            session.warn(
                f"{workload.name} has {size(workload.table_bytes)}, the largest cache {size(cache)}: figures are of "
                "memory that is partly in the cache, the yardstick's too. --trajectories makes it larger."
            )
        data = Data(workload)
        with contextlib.ExitStack() as stack:
            tables = {}
            for steps in BLOCK_STEPS:
                name = f"benchmark-collect-{os.getpid()}-{steps}" if named else None
                tables[steps] = stack.enter_context(data.table(steps, name=name))
                if named:
                    stack.callback(tables[steps].unlink)
            for batch in session.each(workload.name, batches, f"{workload.name}, batch {{}}".format):
                _compare(session, data, tables, batch)


def _compare(session: Session, data: Data, tables: dict[int, gear.Table], batch: int) -> None:
    workload = data.workload
    count = batch * workload.row_bytes
    batches = 3 if session.quick else max(4, min(64, 256_000_000 // count))
    plain: dict[str, Plain] = {}
    if workload.anchor == "first":
        plain["index_select"] = PlainTrajectories(data, batch)
    else:
        plain["index_select"] = PlainWindows(data, batch, "zero row")
        plain["index_select strided"] = PlainWindows(data, batch, "strided")
    references = tuple(plain)
    goals = {} if workload.anchor == "uniform" else {"memcpy": 0.8 if batch < 256 else 1.0}
    goals |= dict.fromkeys(references, 1.0)
    made = functools.partial(Variant, amount=count)
    variants = [memcpy(data, count, batches), memcpy_rows(data, batch, batches)]

    def gathered(
        name: str,
        work: Callable[[Any], Any],
        kept: dict[str, Any] | None,
        request: Any = lambda rows: rows,
        **more: Any,
    ) -> Variant:
        """Into buffers that are kept, or into fresh memory. request: of rows, what `work` takes."""

        def check() -> None:
            rows = data.draw(batch)
            # Plain torch leaves the mask of whole trajectories as it is.
            same = ("mask",) if workload.anchor == "first" and name in plain else ()
            poison({key: value for key, value in (kept or {}).items() if key not in same})
            found, expected = work(request(rows)), data.expected(rows)
            expect(kept or found, {key: v for key, v in expected.items() if kept or key in found})

        measure = per_batch(lambda: request(data.draw(batch)), work, batches)
        return made(name, measure, check, batches=batches, **more)

    def collector(steps: int, table: gear.Table) -> Variant:
        windows = dict.fromkeys(workload.schema, workload.window)
        found = collector_for(TableSource(table), windows, batch_size=batch, device=torch.device("cpu"))
        buffers, slots = found.buffers(), table.indices()
        generations = table._engine.reader().slot_states()[1][slots]

        def request(rows: Rows) -> tuple[Any, Any, Any]:
            positions = rows.positions.numpy()
            return slots[positions], rows.anchors.numpy(), generations[positions]

        def work(rows: tuple[Any, Any, Any]) -> None:
            found.gather(buffers, SelectedRows(*rows))

        told: dict[str, Any] = {"parameters": {"block_steps": steps}, "targets": goals}
        return gathered(f"collector, blocks {steps}", work, buffers.batch, request, **told)

    def iterating(feed: Feed, count: int, **told: Any) -> Variant:
        parameters = {**told, **feed.parameters}
        return made(feed.name, iterated(feed.start, count), feed.check, batches=count, parameters=parameters)

    def ours(name: str, steps: int, prefetch: int, *, loader: bool = False) -> Variant:
        options = {"device": "cpu", "prefetch": prefetch, "loader": loader}
        return iterating(
            loading.ours(name, data, tables[steps], batch, **options), batches, block_steps=steps
        )

    variants += [collector(steps, table) for steps, table in tables.items()]
    for steps, prefetch in itertools.product(tables, PREFETCH):
        variants.append(ours(f"dataset, blocks {steps}, prefetch {prefetch}", steps, prefetch))
    for name, way in plain.items():
        variants.append(gathered(name, way.gather, way.batch))
    if workload.anchor == "first":
        stacked = data.stacked
        fancy = lambda rows: {name: values[rows.positions] for name, values in stacked.items()}  # noqa: E731
        variants.append(gathered("x[idx]", fancy, None))
        feed = dataclasses.replace(map_styled("DataLoader, map-style", data, batch), parameters={})
        variants.append(iterating(feed, max(2, batches // 8)))
    variants.append(ours("DataLoader, dataset", BLOCK_STEPS[0], PREFETCH[-1], loader=True))
    named = tables[BLOCK_STEPS[0]].name is not None
    parameters = {"batch": batch, "trajectories": workload.trajectories, **({"named": True} if named else {})}
    label = f"{workload.name}, batch {batch}"
    session.compare(workload.name, label, variants, "memcpy", parameters, references)


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
    """What all comparisons of a run on a GPU share."""

    session: Session
    engine: Engine
    copies: Copies
    driver: Driver | None
    sizes: Sizes

    def measure(
        self, workload: str, label: str, variants: list[Variant], rows: QueueRows, **parameters: Any
    ) -> None:
        """The copy engine, these variants, and the driver's copies of rows that lie in one piece."""
        found = [self.copies.variant(), *variants]
        whole = self.driver is not None and rows.whole and parameters.get("step_bytes", 128) % 64 == 0
        if self.driver is not None and whole:
            found.append(copies_of(self.engine, self.driver, rows))
        self.session.compare(workload, label, found, YARDSTICK, parameters, (BATCHED,) if whole else ())


def measured_on_gpu(
    session: Session, engine: Engine, trajectories: int, library: Any = None, sizes: Sizes | None = None
) -> None:
    """Both workloads, then sweeps over rows, batches and programs."""
    sizes = (QUICK if session.quick else Sizes()) if sizes is None else sizes
    driver: Driver | None = None
    try:
        driver = Driver(library)
    except Unavailable as error:
        session.leave("copies of the driver", str(error))
    rig = _Rig(session, engine, Copies.fresh(engine, sizes.copy_bytes), driver, sizes)
    batches = sizes.batches if session.quick else BATCHES
    for workload in (W1.of(trajectories), W2.of(trajectories)):
        data = Data(workload)
        for steps in BLOCK_STEPS:
            label = f"{workload.name}, batch {{}}, blocks {steps}".format
            with data.table(steps, packed=False) as table:
                for batch in session.each(workload.name, batches, label):
                    _workload(rig, data, table, batch, label(batch))
    with sweep_table(sizes.steps, sizes.trajectories) as table:
        # The largest batches first: they matter most, should time run out.
        kinds = [
            (batch, kind)
            for all_batches, rows in ((sizes.batches, _even_rows), (sizes.uneven_batches, _uneven_rows))
            for batch in sorted(all_batches, reverse=True)
            for kind in rows(sizes)
        ]
        for batch, kind in session.each("rows", kinds, lambda pair: _row_label(*pair)):
            _sweep(rig, table, batch, kind)


def _workload(rig: _Rig, data: Data, table: gear.Table, batch: int, label: str) -> None:
    engine, sizes, workload = rig.engine, rig.sizes, data.workload
    steps = table._engine.region.layout.block_steps
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


def _row_label(batch: int, kind: RowKind) -> str:
    return f"rows of {kind.bytes} B in steps of {kind.step_bytes} B, batch {batch}"


def _sweep(rig: _Rig, table: gear.Table, batch: int, kind: RowKind) -> None:
    sizes, launches = rig.sizes, _launches(batch * kind.bytes, rig.sizes)
    rows = SweepRows(rig.engine, table, kind, batch, launches, (sizes.steps, sizes.trajectories))
    kernels = [_kernel(rig.engine, rows, programs) for programs in sizes.programs]
    target = max((share for least, share in TARGETS.items() if kind.bytes >= least), default=None)
    if target is not None and kind.aligned:
        for variant in kernels:
            variant.targets = {YARDSTICK: target}
    parameters = {"batch": batch, "row_bytes": kind.bytes, "step_bytes": kind.step_bytes}
    rig.measure("rows", _row_label(batch, kind), kernels, rows, **parameters)


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
