"""``python -m benchmarks exhaustion``: tables larger than their memory, the rest of which lies on a disk.

W1: whole trajectories of 42,000 bytes. "fill": a table whose memory holds a quarter of them is filled, until all of it
is on the disk, and then drawn from; the yardstick writes as many bytes to one file, with `fsync`. Row extras: seconds
of the longest addition, the memory that the process has taken over the budget of the table (its buffers for writing
included), and seconds of a batch of 32 afterwards. ``--fill-bytes 30e9`` fills more than `trajectories` are.

"uniform" and "prioritized": batches of 32 of tables whose memory holds all, three quarters, half, a quarter and a tenth
of them; the priorities are a Zipf distribution's, and the hottest stay in memory (`Disk(keep="priority")`). Before each
measurement nothing of the files is in the page cache; every trajectory has been read and compared once before, so all
chunks of the files are verified. The yardsticks: "fits", the same table without a disk, and
"preadv", which reads as many trajectories as were not in memory, column by column, by as many threads as ours, from
random places of files of the same sizes, and does nothing with them.

Beside them, each in a process of its own whose memory, page cache included, is limited to the same share by a control
group (`benchmarks/limits.py`; this needs root): "memmap", `numpy.memmap` of the columns' files; "swap", arrays of which
the kernel swaps out the rest; "TorchRL", its `LazyMemmapStorage` with its samplers, if its environment is there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import shutil
import sys
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
from benchmarks.limits import MemoryGroup, Unlimited, memory_limited, swap_file
from benchmarks.options import Folder, described, experiment, numbers
from benchmarks.peers import limited as limited_script
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.workloads import W1, Data, Workload, expect
from gear_loader.checkpoint.tier_reader import THREADS

BATCH = 32
BLOCK_STEPS = 100
SHARES = (100, 75, 50, 25, 10)
FILL_SHARE = 25
DISTINCT = 2000  # trajectories whose steps differ, when a table is filled
TARGET = 0.8
SEED = 23
TRAJECTORIES = 20_000


@experiment("exhaustion", repeats=(1, 5))
def command(
    session: Session,
    trajectories: Annotated[
        int | None, described(f"Of W1: {TRAJECTORIES:,} by default (0.84 GB).", min=200)
    ] = None,
    shares: Annotated[
        str | None, described("Percentages that memory holds: 100,75,50,25,10 by default.")
    ] = None,
    batches: Annotated[int | None, described("Of a measurement: 20 by default.", min=1)] = None,
    fill_bytes: Annotated[
        float | None,
        described('Bytes that the table of "fill" gets: those of the trajectories by default.', min=1e6),
    ] = None,
    limited: Annotated[
        bool, typer.Option(help="Also numpy.memmap, swapping and TorchRL with as little memory; as root.")
    ] = True,
    folder: Folder = None,
) -> None:
    """Filling and reading tables larger than their memory, beside a bare write and bare reads."""
    workload = W1.of(trajectories or (400 if session.quick else TRAJECTORIES))
    held = numbers(shares, "--shares", 1, 100) or ((100, 25) if session.quick else SHARES)
    count = batches or (2 if session.quick else 20)
    filled = W1.of(int((fill_bytes or workload.table_bytes) // W1.row_bytes))
    session.configure(
        trajectories=workload.trajectories,
        fill_bytes=filled.table_bytes,
        shares=held,
        batches=count,
        seed=SEED,
    )
    if not session.late("fill"):
        with tempfile.TemporaryDirectory(prefix="gear-loader-bench-", dir=folder) as place:
            _fill(session, filled, Path(place), count)
    data = Data(workload, seed=SEED)
    for share in held:
        if not session.late(f"{share}% in memory"):
            with tempfile.TemporaryDirectory(prefix="gear-loader-bench-", dir=folder) as place:
                _draw(session, data, Path(place), share, count, limited=limited)


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
        memory=gear.Memory(max_blocks=blocks + (count if share == 100 and path is not None else 0)),
        timeout=300.0,
        disk=disk,
    )


def _zipf(count: int) -> np.ndarray:
    return 1.0 / (1.0 + np.random.default_rng(SEED).permutation(count))


# Filling ---------------------------------------------------------------------------------------------


class _Numbered:
    """Any number of trajectories in little memory: their steps are those of a few, their rewards their number."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._base = Data(workload.of(min(workload.trajectories, DISTINCT)), seed=SEED)
        self._stacked = {name: values.numpy() for name, values in self._base.stacked.items()}

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """The trajectory with this number; its rewards are in memory that is used again."""
        rows = {name: values[number % len(values)] for name, values in self._stacked.items()}
        rows["reward"] = np.full(self.workload.steps, number, dtype=np.float32)
        return rows

    def check(self, batch: Any) -> None:
        """Compare a batch of whole trajectories."""
        numbers = batch["reward"][:, 0].to(torch.int64)
        base = numbers % self._base.workload.trajectories
        wanted = {name: values[base] for name, values in self._base.stacked.items()}
        wanted["reward"] = numbers.to(torch.float32)[:, None].expand(-1, self.workload.steps)
        expect(batch, wanted)

    def write(self, file: Any) -> None:
        """Write as many bytes to a file as all of them have."""
        piece = memoryview(self._base.arena.numpy().view(np.uint8).reshape(-1))[
            : self._base.workload.table_bytes
        ]
        left = self.workload.table_bytes
        while left:
            for first in range(0, min(left, len(piece)), 8 << 20):
                part = piece[first : min(first + (8 << 20), left, len(piece))]
                file.write(part)
            left -= min(left, len(piece))
        os.fsync(file.fileno())


def _fill(session: Session, workload: Workload, place: Path, count: int) -> None:
    medians, source = Medians(), _Numbered(workload)
    turns = iter(range(1_000_000))
    budget = workload.table_bytes * FILL_SHARE // 100
    small = _Numbered(workload.of(min(workload.trajectories, 2000)))

    def filled(source: _Numbered, path: Path, *, measured: bool) -> float:
        before = _resident()
        began = time.perf_counter()
        with _sized_table(source.workload, path) as table:
            longest, most = _add_all(table, source)
            table.save(path)
            seconds = time.perf_counter() - began
            found: dict[str, float] = {}
            for kind in ("uniform", "prioritized"):
                data = _dataset(table, kind)
                source.check(data.sample())
                began = time.perf_counter()
                for _ in range(count):
                    batch = data.sample()
                found[f"{kind}_batch"] = (time.perf_counter() - began) / count
                source.check(batch)
            if measured:
                most = max(most, _resident())
                medians.note(longest_wait=longest, memory_of_budget=(most - before) / budget, **found)
        shutil.rmtree(path)
        return seconds

    def bare() -> float:
        began = time.perf_counter()
        with open(place / "bare", "wb", buffering=0) as file:
            source.write(file)
        seconds = time.perf_counter() - began
        (place / "bare").unlink()
        return seconds

    def check() -> None:
        filled(small, place / "checked", measured=False)

    variants = [
        Variant("write", bare, lambda: None, workload.table_bytes, 1),
        Variant(
            "ours",
            lambda: filled(source, place / f"table{next(turns)}", measured=True),
            check,
            workload.table_bytes,
            1,
            targets={"write": 0.7},
            extras=medians,
        ),
    ]
    parameters = {"bytes": workload.table_bytes, "share": FILL_SHARE}
    session.compare("fill", f"{workload.name}, filled to 4 times its memory", variants, "write", parameters)


def _sized_table(workload: Workload, path: Path) -> gear.Table:
    """An empty table whose memory is a quarter of the bytes of the trajectories."""
    count, size = workload.trajectories, workload.table_bytes
    return gear.Table.create(
        workload.schema,
        max_steps=count * workload.steps,
        max_trajectories=count,
        block_steps=BLOCK_STEPS,
        memory=max(size * FILL_SHARE // 100, 1 << 20),
        timeout=300.0,
        disk=gear.Disk(path, size=2 * size),
    )


def _resident() -> int:
    """Bytes of this process in memory, without those of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def _add_all(table: gear.Table, source: _Numbered) -> tuple[float, int]:
    """Add all trajectories one by one; return the seconds of the longest addition, and the most memory seen."""
    longest, most, count = 0.0, 0, source.workload.trajectories
    priorities = _zipf(count)
    for number in range(count):
        rows = source[number]
        began = time.perf_counter()
        table.add(rows, priority=priorities[number])
        longest = max(longest, time.perf_counter() - began)
        if number % 500 == 0:
            most = max(most, _resident())
    return longest, most


def _add(table: gear.Table, data: Data) -> None:
    """Add all trajectories one by one."""
    priorities = _zipf(data.workload.trajectories)
    stacked = {name: values.numpy() for name, values in data.stacked.items()}
    for number in range(data.workload.trajectories):
        table.add({name: values[number] for name, values in stacked.items()}, priority=priorities[number])


# Reading ---------------------------------------------------------------------------------------------


def _draw(session: Session, data: Data, place: Path, share: int, count: int, *, limited: bool) -> None:
    workload = data.workload
    with _table(workload, 100, None) as fits, _table(workload, share, place / "table") as table:
        for one in (fits, table):
            _add(one, data)
        table.save(place / "table")
        _settle(table)
        _write_flat(data, place / "flat")
        for number in range(workload.trajectories):
            expect(table[number], {name: values[number] for name, values in data.stacked.items()})
        for kind in ("uniform", "prioritized"):
            with (
                _variants(data, place, fits, table, kind, count) as (variants, misses),
                _limited(
                    session, data.workload, place / "flat", share if limited else 100, kind, count
                ) as others,
            ):
                parameters = {"share": share, "batch": BATCH, "misses": misses}
                label = f"{workload.name}, {kind}, {share}% in memory"
                beside = ["preadv"] if len(variants) > 2 else []
                session.compare(kind, label, [*variants, *others], "fits", parameters, beside)


def _write_flat(data: Data, place: Path) -> None:
    """Write a file of each column, without a header."""
    place.mkdir()
    for name, values in data.flat.items():
        values.numpy().tofile(place / f"{name}.npy")
        with open(place / f"{name}.npy", "rb") as written:
            os.fsync(written.fileno())


def _settle(table: gear.Table) -> None:
    """Wait until the hottest trajectories are in memory."""
    before, deadline = None, time.monotonic() + 30.0
    while time.monotonic() < deadline:
        now = (table._engine.region.array("extent")[:, 1] < 0).tobytes()
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
        draws=gear.Draws(anchor=W1.anchor),
        sampler=selector,
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
    outside = table._engine.region.array("extent")[:, 1] < 0
    dataset = gear.ReplayDataset(
        table,
        batch_size=4096,
        windows={"reward": gear.Window(1)},
        sampler=_dataset(table, kind).sampler,
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
    sizes = {name: workload.steps * column.step_bytes for name, column in workload.schema.items()}
    with contextlib.ExitStack() as stack:
        files = {}
        for name in data.flat:
            path = place / f"{name}.npy"
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


# The same share of memory otherwise -------------------------------------------------------------------


def limited_process(
    python: Path, kind: str, group: MemoryGroup, allowed: int, options: dict[str, Any]
) -> PeerProcess:
    """A process of `benchmarks/peers/limited.py` in a control group, whose memory is limited when it has started."""
    process = PeerProcess([str(python), "-I", str(limited_script.__file__), kind], patience=900.0)
    try:
        resident = process.ask("begin", procs=str(group.procs), **options)["resident"]
        group.allow(resident + allowed + (8 << 20))
        process.ask("open")
    except BaseException:
        process.close()
        raise
    return process


@contextlib.contextmanager
def _limited(
    session: Session, workload: Workload, folder: Path, share: int, kind: str, count: int
) -> Iterator[list[Variant]]:
    """Variants that have the same share of memory; those that cannot be had here are left out."""
    options = {
        "folder": str(folder),
        "columns": {name: workload.steps * column.step_bytes for name, column in workload.schema.items()},
        "trajectories": workload.trajectories,
        "batch": BATCH,
        "batches": count,
        "draw": kind,
        "seed": SEED,
    }
    allowed, variants = workload.table_bytes * share // 100, []
    with contextlib.ExitStack() as stack:
        for name, library in {"memmap": "", "swap": "", "TorchRL": "torchrl"}.items() if share < 100 else ():
            try:
                python = Path(sys.executable)
                if library:
                    python = (session.peers or Path()) / library / "bin" / "python"
                    if session.peers is None or not python.exists():
                        raise PeerFailed("there is no environment torchrl (benchmarks/peers/make.sh)")
                if name == "swap":
                    stack.enter_context(swap_file(folder / "swap", workload.table_bytes + (64 << 20)))
                group = stack.enter_context(memory_limited())
                process = limited_process(python, library or name, group, allowed, options)
                stack.callback(process.close)
            except (Unlimited, PeerFailed) as error:
                session.leave(f"{name}, {kind}, {share}% in memory", str(error))
                continue
            variants.append(
                Variant(
                    name,
                    lambda process=process: process.ask("measure")["seconds"],
                    functools.partial(process.ask, "check"),
                    BATCH * workload.row_bytes,
                    count,
                    required=False,
                )
            )
        yield variants
