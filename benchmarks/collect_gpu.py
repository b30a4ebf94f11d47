"""``python -m benchmarks collect --device cuda``: gathering from pinned host memory, against the copy engine.

=================== ==========================================================================================
cudaMemcpyAsync     the yardstick: ``copy_(non_blocking=True)`` of 256 MiB in one piece from a random place of a
                    pinned tensor of 1 GiB, timed in turn with everything else; and the same out of the table
kernel, p programs  the gather kernel alone, with p programs; the rows to gather are on the GPU
dataset             `ReplayDataset` from the draw to the batch on the GPU, with prefetch 0 and 2
staged              what there is without the kernel: `index_select` into pinned buffers, then a copy to the GPU
=================== ==========================================================================================

Kernels are timed by CUDA events around a queue of launches that was captured as a CUDA graph, so that the GPU never
waits for the host; before every replay all launches get new random rows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

import gear_loader as gear
from benchmarks.collect import BATCHES, BLOCK_STEPS, PREFETCH, WARM_UP, check_dataset
from benchmarks.collect_gpu_tables import show_programs, show_sweep, show_verdict, show_workload
from benchmarks.engine import YARDSTICK, Copies, CudaEngine, Engine, Launch
from benchmarks.harness import Comparison, Incorrect, Result, Session, Variant
from benchmarks.workloads import W1, W2, Data, Plain, PlainTrajectories, PlainWindows, Rows, expect, poison
from gear_loader.collector import Collector
from gear_loader.kernels import gather as kernel

__all__ = ["Sizes", "cuda"]

TARGETS = {4096: 0.95, 512: 0.80}
"""Row bytes from which on the share of the copy engine's rate is aimed for."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What to sweep over.

    Attributes:
        rows: bytes of a row of the batch, in steps of 128 B (64 B for the smallest).
        batches, uneven_batches: rows of a batch, with steps of 128 B and of 44 B.
        programs: sizes of the grid.
        steps, trajectories: of the table that is swept over.
        queue_bytes, queue_launches: a queue is as many launches as make that many bytes, at most so many.
        copy_bytes: bytes of a yardstick's copy; its source is four times as large.
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


QUICK = Sizes(
    rows=(64, 512, 4096, 65536),
    batches=(32, 256),
    uneven_batches=(256,),
    programs=(1, 8, 132),
    steps=512,
    trajectories=512,
    queue_bytes=4 << 20,
    queue_launches=8,
    copy_bytes=32 << 20,
)


def cuda(
    session: Session,
    *,
    trajectories: int,
    quick: bool,
    engine: Engine | None = None,
    sizes: Sizes | None = None,
) -> None:
    """Measure the GPU side: both workloads, then sweeps over rows, batches and programs."""
    engine = CudaEngine() if engine is None else engine
    sizes = (QUICK if quick else Sizes()) if sizes is None else sizes
    copies = Copies.fresh(engine, sizes.copy_bytes)
    batches = sizes.batches if quick else BATCHES
    for workload in (W1.of(trajectories), W2.of(trajectories)):
        data = Data(workload)
        results = []
        with session.progress(workload.name, len(BLOCK_STEPS) * len(batches)):
            for steps in BLOCK_STEPS:
                with data.table(steps) as table:
                    results += _workload(session, engine, copies, data, table, batches, sizes)
        show_workload(session, results)
    even, uneven = _even_rows(sizes), _uneven_rows(sizes)
    count = len(even) * len(sizes.batches) + len(uneven) * len(sizes.uneven_batches)
    with _sweep_table(sizes) as table, session.progress("rows", count):
        even_results = _sweep(session, engine, copies, table, even, sizes.batches, sizes)
        uneven_results = _sweep(session, engine, copies, table, uneven, sizes.uneven_batches, sizes)
    show_sweep(session, even_results, "steps of 128 B (64 B in the first row)")
    show_sweep(session, uneven_results, "steps of 44 B")
    show_programs(session, even_results)
    show_verdict(session, even_results)
    session.finish()


# ---------------------------------------------------------------- workloads


def _workload(
    session: Session,
    engine: Engine,
    copies: Copies,
    data: Data,
    table: gear.Table,
    batches: Sequence[int],
    sizes: Sizes,
) -> list[Result]:
    workload, steps = data.workload, table.region.layout.block_steps
    results = []
    for batch in batches:
        label = f"{workload.name}, batch {batch}, blocks {steps}"
        if session.deadline.passed(label):
            continue
        count = batch * workload.row_bytes
        rows = _WorkloadRows(engine, data, table, batch, _launches(count, sizes))
        long = max(8, min(200, 16 * sizes.queue_bytes // count))
        comparison = Comparison(
            experiment="collect",
            workload=workload.name,
            label=label,
            variants=[
                copies.variant(),
                _table_copies(engine, table, sizes).variant(),
                *(_kernel(engine, rows, programs) for programs in (*sizes.programs, None)),
                *(_dataset(engine, data, table, batch, long, prefetch) for prefetch in PREFETCH),
                *([_staged(engine, data, batch, long)] if steps == BLOCK_STEPS[0] else []),
            ],
            yardstick=YARDSTICK,
            parameters={"batch": batch, "block_steps": steps, "trajectories": workload.trajectories},
        )
        results += session.run(comparison)
    return results


def _table_copies(engine: Engine, table: gear.Table, sizes: Sizes) -> Copies:
    """Copies out of the table's own memory, which is registered with CUDA rather than allocated by it."""
    largest = max(table.schema, key=lambda name: table.schema[name].step_bytes)
    source = torch.from_numpy(table.region.column(largest)).view(-1).view(torch.int64)
    return Copies(engine, source, min(sizes.copy_bytes, len(source) * 4), f"{YARDSTICK}, table")


class _WorkloadRows:
    """Random rows of a workload for a queue of launches: their slots and anchors on the device."""

    def __init__(self, engine: Engine, data: Data, table: gear.Table, batch: int, launches: int) -> None:
        self._data, self._batch = data, batch
        windows = dict.fromkeys(data.workload.schema, data.workload.window)
        self._collector = _collector(engine, table, windows, batch)
        self.buffers = [self._collector.buffers() for _ in range(2)]
        self.index = _index(engine, table)
        self._indices = torch.from_numpy(table.indices())
        self._rows = [data.draw(batch) for _ in range(launches)]
        self.slots = torch.empty(launches, batch, dtype=torch.int64, device=engine.device)
        self.anchors = torch.empty_like(self.slots)
        self.bytes = batch * data.workload.row_bytes

    def refresh(self) -> None:
        """New random rows for every launch."""
        self._rows = [self._data.draw(self._batch) for _ in self._rows]
        positions = torch.stack([rows.positions for rows in self._rows])
        self.slots.copy_(self._indices[positions])
        self.anchors.copy_(torch.stack([rows.anchors for rows in self._rows]))

    def check(self, i: int) -> None:
        """Compare what launch `i` has just written with what it should have."""
        expect(self.buffers[i % 2].batch, self._data.expected(self._rows[i]))


def _dataset(
    engine: Engine, data: Data, table: gear.Table, batch: int, batches: int, prefetch: int
) -> Variant:
    dataset = gear.ReplayDataset(
        table,
        batch_size=batch,
        windows=data.workload.window,
        anchor=data.workload.anchor,
        device=engine.device,
        prefetch=prefetch,
        batches_per_epoch=math.inf,
    )
    thread: list[float] = []
    process: list[float] = []

    def measure() -> float:
        iterator: Any = iter(dataset)
        try:
            for _ in range(WARM_UP):
                next(iterator)
            engine.synchronize()
            begin = time.perf_counter(), time.thread_time(), time.process_time()
            for _ in range(batches):
                next(iterator)
            thread.append((time.thread_time() - begin[1]) / batches)
            process.append((time.process_time() - begin[2]) / batches)
            engine.synchronize()
            return time.perf_counter() - begin[0]
        finally:
            iterator.close()

    return Variant(
        f"dataset, prefetch {prefetch}",
        measure,
        lambda: check_dataset(data, dataset, dataset),
        batch * data.workload.row_bytes,
        batches,
        {"prefetch": prefetch},
        extras=lambda: {
            "host_seconds": float(np.median(thread)),
            "process_seconds": float(np.median(process)),
        },
    )


def _staged(engine: Engine, data: Data, batch: int, batches: int) -> Variant:
    def plain() -> Plain:
        if data.workload.anchor == "first":
            return PlainTrajectories(data, batch, engine.pinned)
        return PlainWindows(data, batch, "strided", engine.pinned)

    hosts = [plain() for _ in range(2)]
    targets = [
        {name: torch.empty_like(v, device=engine.device) for name, v in host.batch.items()} for host in hosts
    ]
    events = [engine.event() for _ in hosts]
    turn = 0

    def work(rows: Rows) -> None:
        nonlocal turn
        turn = 1 - turn
        events[turn].synchronize()  # the copies out of these buffers, two batches ago
        hosts[turn].gather(rows)
        for name, values in hosts[turn].batch.items():
            targets[turn][name].copy_(values, non_blocking=True)
        events[turn].record()

    def measure() -> float:
        first, *rows = [data.draw(batch) for _ in range(batches + 1)]
        work(first)
        engine.synchronize()
        begin = time.perf_counter()
        for item in rows:
            work(item)
        engine.synchronize()
        return time.perf_counter() - begin

    def check() -> None:
        for _ in hosts:
            rows = data.draw(batch)
            poison(targets[1 - turn])
            work(rows)
            engine.synchronize()
            expect(targets[turn], data.expected(rows))

    return Variant("staged, index_select", measure, check, batch * data.workload.row_bytes, batches)


# ---------------------------------------------------------------- sweeps


@dataclasses.dataclass(frozen=True)
class _RowKind:
    """Rows of one size: windows of `length` steps of a column, starting at multiples of `stride` steps."""

    column: str
    length: int
    stride: int
    step_bytes: int

    @property
    def bytes(self) -> int:
        return self.length * self.step_bytes


_STEP_WORDS = {"step128": 32, "step64": 16, "step44": 11}


def _even_rows(sizes: Sizes) -> list[_RowKind]:
    """Rows that start on a 128-byte line."""
    kinds = []
    for count in sorted(sizes.rows):
        name = "step128" if count >= 128 else "step64"
        step = _STEP_WORDS[name] * 4
        kinds.append(_RowKind(name, count // step, 128 // step, step))
    return kinds


def _uneven_rows(sizes: Sizes) -> list[_RowKind]:
    """Rows of about the same sizes, that start anywhere."""
    lengths = sorted({max(1, min(round(count / 44), sizes.steps)) for count in sizes.rows})
    return [_RowKind("step44", length, 1, 44) for length in lengths]


def _sweep_table(sizes: Sizes) -> gear.Table:
    """A table in which every word of a column holds its own number; a trajectory lies in one piece."""
    table = gear.Table.create(
        {name: gear.Column(torch.int32, (words,)) for name, words in _STEP_WORDS.items()},
        max_steps=sizes.steps * sizes.trajectories,
        max_trajectories=sizes.trajectories,
        block_steps=sizes.steps,
        max_blocks=sizes.trajectories,
    )
    chunk = max(1, sizes.trajectories // 32)
    for first in range(0, sizes.trajectories, chunk):
        count = min(chunk, sizes.trajectories - first)
        stacked = {}
        for name, words in _STEP_WORDS.items():
            each = sizes.steps * words
            values = torch.arange(first * each, (first + count) * each, dtype=torch.int32)
            stacked[name] = values.view(count, sizes.steps, words)
        table.extend(stacked, lengths=[sizes.steps] * count)
    return table


class _SweepRows:
    """Random rows of one kind for a queue of launches, drawn on the device."""

    def __init__(self, engine: Engine, table: gear.Table, kind: _RowKind, batch: int, sizes: Sizes) -> None:
        self._kind, self._sizes = kind, sizes
        windows = {kind.column: gear.Window(kind.length)}
        self._collector = _collector(engine, table, windows, batch)
        self.buffers = [self._collector.buffers() for _ in range(2)]
        self.index = _index(engine, table)
        self._indices = torch.from_numpy(table.indices()).to(engine.device)
        self.bytes = batch * kind.bytes
        launches = _launches(self.bytes, sizes)
        self._positions = torch.empty(launches, batch, dtype=torch.int64, device=engine.device)
        self.slots = torch.empty_like(self._positions)
        self.anchors = torch.empty_like(self._positions)

    def refresh(self) -> None:
        """New random rows for every launch."""
        kind, sizes = self._kind, self._sizes
        self._positions.random_(0, sizes.trajectories)
        self.slots.copy_(self._indices[self._positions])
        self.anchors.random_(0, (sizes.steps - kind.length) // kind.stride + 1).mul_(kind.stride)

    def check(self, i: int) -> None:
        """Compare what launch `i` has just written with what it should have."""
        kind, words = self._kind, _STEP_WORDS[self._kind.column]
        batch = self.buffers[i % 2].batch
        device = batch["mask"].device
        first = ((self._positions[i] * self._sizes.steps + self.anchors[i]) * words).to(torch.int32)
        inside = torch.arange(kind.length * words, dtype=torch.int32, device=device)
        found = batch[kind.column].view(len(first), -1)
        for start in range(0, len(first), 64):  # in parts, so that the check needs little memory
            part = slice(start, start + 64)
            if not torch.equal(found[part], first[part, None] + inside):
                raise Incorrect(f"rows {start} to {start + 63} differ from the table")
        if not bool(batch["mask"].all()):
            raise Incorrect("the mask is False where the steps exist")


def _sweep(
    session: Session,
    engine: Engine,
    copies: Copies,
    table: gear.Table,
    kinds: Sequence[_RowKind],
    batches: Sequence[int],
    sizes: Sizes,
) -> list[Result]:
    results = []
    for batch in sorted(batches, reverse=True):  # the largest first: they matter most, should time run out
        for kind in kinds:
            label = f"rows of {kind.bytes} B in steps of {kind.step_bytes} B, batch {batch}"
            if session.deadline.passed(label):
                continue
            rows = _SweepRows(engine, table, kind, batch, sizes)
            variants = [copies.variant(), *(_kernel(engine, rows, programs) for programs in sizes.programs)]
            target = max((share for least, share in TARGETS.items() if kind.bytes >= least), default=None)
            if target is not None and kind.stride * kind.step_bytes % 128 == 0:
                for variant in variants[1:]:
                    variant.targets = {YARDSTICK: target}
            comparison = Comparison(
                experiment="collect",
                workload="rows",
                label=label,
                variants=variants,
                yardstick=YARDSTICK,
                parameters={"batch": batch, "row_bytes": kind.bytes, "step_bytes": kind.step_bytes},
            )
            results += session.run(comparison)
    return results


# ---------------------------------------------------------------- kernels


class _QueueRows(Protocol):
    """Rows for a queue of launches."""

    buffers: list[Any]
    index: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor
    anchors: torch.Tensor
    bytes: int

    def refresh(self) -> None: ...

    def check(self, i: int) -> None: ...


def _kernel(engine: Engine, rows: _QueueRows, programs: int | None) -> Variant:
    """A queue of launches, which write to two batches by turns; without `programs` with the launcher's choice."""
    launches = [_launch(rows, i, programs) for i in range(len(rows.slots))]
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
        for launch in launches:
            launch()
        host.append((time.perf_counter() - begin) / len(launches))
        engine.synchronize()
        queue.append(engine.queue(launches))

    def measure() -> float:
        rows.refresh()
        engine.synchronize()
        return engine.timed(queue[0])

    return Variant(
        "kernel, default" if programs is None else f"kernel, {programs} programs",
        measure,
        check,
        rows.bytes,
        len(launches),
        {"programs": programs},
        extras=lambda: {"launch_seconds": host[0]},
    )


def _launch(rows: _QueueRows, i: int, programs: int | None) -> Launch:
    plan, slots, anchors = rows.buffers[i % 2].plan, rows.slots[i], rows.anchors[i]
    return lambda: kernel.gather(plan, slots, anchors, *rows.index, programs=programs)


def _launches(count: int, sizes: Sizes) -> int:
    return max(1, min(sizes.queue_launches, sizes.queue_bytes // count))


def _collector(engine: Engine, table: gear.Table, windows: dict[str, gear.Window], batch: int) -> Collector:
    collector = Collector(table, windows, batch_size=batch, device=engine.device)
    if engine.device.type == "cuda" and not collector.zero_copy:
        raise Incorrect("the table could not be pinned (see the notice): there is no kernel to measure")
    return collector


def _index(engine: Engine, table: gear.Table) -> tuple[torch.Tensor, torch.Tensor]:
    """The table's index on the device."""
    extent, block_ids = (torch.from_numpy(array).to(engine.device) for array in table.index_arrays())
    return extent, block_ids.reshape(-1)
