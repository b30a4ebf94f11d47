"""``python -m benchmarks exhaustion``: tables larger than their memory, the rest of which lies on a disk.

W1: whole trajectories of 42,000 bytes. "fill": a table whose memory holds a quarter of them is filled, until all of it
is on the disk; the yardstick writes as many bytes to one file, with `fsync`. Row extras: seconds of the longest
addition, and bytes of the region, which is all the memory that the table takes, over those of the steps.

"uniform" and "prioritized": batches of 32 of tables whose memory holds all, three quarters, half, a quarter and a tenth
of them; the priorities are a Zipf distribution's, and the hottest stay in memory (`Disk(keep="priority")`). Before each
measurement nothing of the files is in the page cache; every trajectory has been read and compared once before, so all
chunks of the files are verified. The yardsticks: "fits", the same table without a disk, and
"preadv", which reads as many trajectories as were not in memory, column by column, by as many threads as ours, from
random places of files of the same sizes, and does nothing with them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import gear_loader as gear
from benchmarks.harness import Medians, Session, Variant
from benchmarks.options import command as as_command
from benchmarks.options import described, numbers
from benchmarks.workloads import W1, Data, Workload, expect
from gear_loader.checkpoint.tier_reader import THREADS

BATCH = 32
BLOCK_STEPS = 100
SHARES = (100, 75, 50, 25, 10)
FILL_SHARE = 25
TARGET = 0.8
SEED = 23
TRAJECTORIES = 20_000


@as_command("exhaustion", repeats=(1, 5))
def command(
    session: Session,
    trajectories: Annotated[
        int | None, described(f"Of W1: {TRAJECTORIES:,} by default (0.84 GB).", min=200)
    ] = None,
    shares: Annotated[
        str | None, described("Percentages that memory holds: 100,75,50,25,10 by default.")
    ] = None,
    batches: Annotated[int | None, described("Of a measurement: 20 by default.", min=1)] = None,
    folder: Annotated[
        Path | None, described("On the disk to measure; the system's temporary one by default.")
    ] = None,
) -> None:
    """Filling and reading tables larger than their memory, beside a bare write and bare reads."""
    if folder is not None and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder; make it first.", param_hint="--folder")
    workload = W1.of(trajectories or (400 if session.quick else TRAJECTORIES))
    held = numbers(shares, "--shares", 1, 100) or ((100, 25) if session.quick else SHARES)
    count = batches or (2 if session.quick else 20)
    session.configure(trajectories=workload.trajectories, shares=held, batches=count, seed=SEED)
    data = Data(workload, seed=SEED)
    if not session.late("fill"):
        with tempfile.TemporaryDirectory(prefix="gear-loader-bench-", dir=folder) as place:
            _fill(session, data, Path(place))
    for share in held:
        if not session.late(f"{share}% in memory"):
            with tempfile.TemporaryDirectory(prefix="gear-loader-bench-", dir=folder) as place:
                _draw(session, data, Path(place), share, count)


def _table(workload: Workload, share: int, path: Path | None) -> gear.Table:
    """An empty table whose memory holds a share of the trajectories, in percent, or all without a path."""
    count = workload.trajectories
    # A part of the blocks stays free, see `gear_loader.checkpoint.spilling`.
    blocks = count if path is None or share == 100 else max(8, count * share * 4 // 300)
    disk = None if path is None else gear.Disk(path, size=2 * workload.table_bytes, keep="priority")
    return gear.Table.create(
        workload.schema,
        max_steps=count * workload.steps,
        max_trajectories=count,
        block_steps=BLOCK_STEPS,
        max_blocks=blocks + (count if share == 100 and path is not None else 0),
        timeout=300.0,
        disk=disk,
    )


def _zipf(count: int) -> np.ndarray:
    return 1.0 / (1.0 + np.random.default_rng(SEED).permutation(count))


# Filling ---------------------------------------------------------------------------------------------


def _fill(session: Session, data: Data, place: Path) -> None:
    workload, medians = data.workload, Medians()
    turns = iter(range(1_000_000))

    def ours() -> float:
        path = place / f"table{next(turns)}"
        began = time.perf_counter()
        with _table(workload, FILL_SHARE, path) as table:
            longest = _add(table, data)
            table.save(path)
            seconds = time.perf_counter() - began
            stats = table.stats()
            medians.note(longest_wait=longest, region_share=stats.reserved_bytes / stats.payload_bytes)
        shutil.rmtree(path)
        return seconds

    def bare() -> float:
        data_bytes = memoryview(data.arena.numpy().view(np.uint8).reshape(-1))[: workload.table_bytes]
        began = time.perf_counter()
        with open(place / "bare", "wb", buffering=0) as file:
            for first in range(0, len(data_bytes), 8 << 20):
                file.write(data_bytes[first : first + (8 << 20)])
            os.fsync(file.fileno())
        return time.perf_counter() - began

    def check() -> None:
        with _table(workload, FILL_SHARE, place / "checked") as table:
            _add(table, data)
            for number in range(0, workload.trajectories, max(1, workload.trajectories // 50)):
                expect(table[number], {name: values[number] for name, values in data.stacked.items()})

    variants = [
        Variant("write", bare, lambda: None, workload.table_bytes, 1),
        Variant("ours", ours, check, workload.table_bytes, 1, targets={"write": 0.7}, extras=medians),
    ]
    parameters = {"bytes": workload.table_bytes, "share": FILL_SHARE}
    session.compare("fill", f"{workload.name}, filled to 4 times its memory", variants, "write", parameters)


def _add(table: gear.Table, data: Data) -> float:
    """Add all trajectories one by one; return the seconds of the longest addition."""
    longest, priorities = 0.0, _zipf(data.workload.trajectories)
    stacked = {name: values.numpy() for name, values in data.stacked.items()}
    for number in range(data.workload.trajectories):
        began = time.perf_counter()
        table.add({name: values[number] for name, values in stacked.items()}, priority=priorities[number])
        longest = max(longest, time.perf_counter() - began)
    return longest


# Reading ---------------------------------------------------------------------------------------------


def _draw(session: Session, data: Data, place: Path, share: int, count: int) -> None:
    workload = data.workload
    with _table(workload, 100, None) as fits, _table(workload, share, place / "table") as table:
        for one in (fits, table):
            _add(one, data)
        table.save(place / "table")
        _settle(table)
        for number in range(workload.trajectories):
            expect(table[number], {name: values[number] for name, values in data.stacked.items()})
        for kind in ("uniform", "prioritized"):
            with _variants(data, place, fits, table, kind, count) as (variants, misses):
                parameters = {"share": share, "batch": BATCH, "misses": misses}
                label = f"{workload.name}, {kind}, {share}% in memory"
                beside = ["preadv"] if len(variants) > 2 else []
                session.compare(kind, label, variants, "fits", parameters, beside)


def _settle(table: gear.Table) -> None:
    """Wait until the hottest trajectories are in memory."""
    before, deadline = None, time.monotonic() + 30.0
    while time.monotonic() < deadline:
        now = (table.region.array("extent")[:, 1] < 0).tobytes()
        if now == before:
            return
        before = now
        time.sleep(1.5)


def _dataset(table: gear.Table, kind: str) -> gear.ReplayDataset:
    selector = gear.Uniform() if kind == "uniform" else gear.Prioritized(alpha=1.0)
    return gear.ReplayDataset(
        table,
        batch_size=BATCH,
        windows=W1.window,
        anchor=W1.anchor,
        selector=selector,
        seed=SEED,
        device="cpu",
        prefetch=0,
    )


@contextlib.contextmanager
def _variants(
    data: Data, place: Path, fits: gear.Table, table: gear.Table, kind: str, count: int
) -> Iterator[tuple[list[Variant], float]]:
    """The variants of reading, and the share of rows that were not in memory."""
    workload = data.workload
    sets = {"fits": _dataset(fits, kind), "ours": _dataset(table, kind)}
    misses = _misses(table, kind)
    amount = BATCH * workload.row_bytes

    def measure(name: str) -> float:
        _forget(place)
        began = time.perf_counter()
        for _ in range(count):
            sets[name].sample()
        return time.perf_counter() - began

    def check(name: str) -> None:
        batch = sets[name].sample()
        wanted = {key: values[batch["index"]] for key, values in data.stacked.items()}
        expect(batch, wanted)

    variants = [
        Variant("fits", lambda: measure("fits"), lambda: check("fits"), amount, count),
        Variant("ours", lambda: measure("ours"), lambda: check("ours"), amount, count),
    ]
    missed = round(misses * BATCH)
    if not missed:
        yield variants, misses
        return
    with _bare(data, place / "flat", missed, count) as bare:
        variants.append(Variant("preadv", bare, lambda: None, amount, count))
        variants[1].targets = {"preadv": TARGET}
        yield variants, misses


def _misses(table: gear.Table, kind: str) -> float:
    """Share of 4,096 drawn rows whose trajectories are not in memory."""
    outside = table.region.array("extent")[:, 1] < 0
    dataset = gear.ReplayDataset(
        table,
        batch_size=4096,
        windows={"reward": gear.Window(1)},
        selector=_dataset(table, kind).selector,
        seed=SEED,
        device="cpu",
        prefetch=0,
    )
    return float(outside[dataset.sample()["index"].numpy()].mean())


def _forget(place: Path) -> None:
    """Drop all files below a directory from the page cache."""
    for file in place.rglob("*.npy"):
        with contextlib.suppress(OSError), open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _bare(data: Data, place: Path, missed: int, count: int) -> Iterator[Any]:
    """A function that reads the columns of `missed` trajectories, `count` times, from random places; its seconds."""
    workload, generator = data.workload, np.random.default_rng(SEED)
    place.mkdir(exist_ok=True)
    sizes = {name: workload.steps * column.step_bytes for name, column in workload.schema.items()}
    with contextlib.ExitStack() as stack:
        files = {}
        for name, values in data.flat.items():
            path = place / f"{name}.npy"
            if not path.exists():
                torch.as_tensor(values).numpy().tofile(path)
            with open(path, "rb") as written:
                os.fsync(written.fileno())
            files[name] = stack.enter_context(open(path, "rb", buffering=0)).fileno()
            os.posix_fadvise(files[name], 0, 0, os.POSIX_FADV_RANDOM)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(THREADS))
        buffers = {name: np.empty((missed, size), dtype=np.uint8) for name, size in sizes.items()}

        def read(part: list[tuple[str, int, int]]) -> None:
            for name, row, number in part:
                os.preadv(files[name], [buffers[name][row]], number * sizes[name])

        def measure() -> float:
            _forget(place)
            drawn = generator.integers(0, workload.trajectories, (count, missed))
            began = time.perf_counter()
            for numbers_of_batch in drawn.tolist():
                reads = [(name, row, n) for name in sizes for row, n in enumerate(sorted(numbers_of_batch))]
                size = max(1, -(-len(reads) // (4 * THREADS)))
                list(pool.map(read, [reads[i : i + size] for i in range(0, len(reads), size)]))
            return time.perf_counter() - began

        yield measure
