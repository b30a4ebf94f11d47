"""``python -m benchmarks collect``: whole batches, against `memcpy`, plain torch, other libraries, the commit before.

On the CPU: whole trajectories (W1), windows of 20 steps (W2) and single steps of a private and of a named table, drawn
uniformly, by `ReplayDataset.sample` and through `DataLoader`, on one thread and on two. The yardstick copies as many
bytes, in one piece a row, from random rows of as much memory, on one thread. Plain torch draws rows and copies them by
`index_select` into kept buffers (windows in the faster of two ways, see `PlainWindows`), also as an iterable data set
through `DataLoader`. No cache holds the rows of a batch, unless a warning says so. With ``--before
REVISION`` the same cases run with the `gear_loader` of that commit, in a process of its own as ours has one. cpprb and
TorchRL, a trajectory a row, draw by priority. A table of medians of ratios, each of the same turn, comes last.

With ``--device cuda`` the yardstick is ``copy_(non_blocking=True)`` of 256 MiB in one piece from a random place of a
pinned tensor of 1 GiB, timed in turn with everything else. The dataset draws uniformly, by priority, and packed (W1). A
kernel gathers rows that are on the GPU with p programs; cuMemcpyBatchAsync copies the rows that lie in one piece: see
`benchmarks.copies`; staged does without the kernel: `index_select` into pinned buffers, then a copy. The ring
has all data on the GPU, and so has TorchRL's buffer, if this interpreter has TorchRL. Kernels are timed by CUDA events
around a queue of launches that was captured as a CUDA graph, so that the GPU never waits for the host; before every
replay all launches get new random rows. See `benchmarks.gpu_batches`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.utils.data import DataLoader, IterableDataset

from benchmarks import gpu_batches, machine
from benchmarks.engine import CudaEngine
from benchmarks.harness import Comparison, Result, Session, Variant
from benchmarks.loading import iterated, memcpy_rows
from benchmarks.options import described, experiment
from benchmarks.peers.catalog import peers_of, started
from benchmarks.peers.process import PeerProcess, start
from benchmarks.showing import size
from benchmarks.workloads import (
    STEPS,
    W1,
    W2,
    Data,
    Plain,
    PlainTrajectories,
    PlainWindows,
    Workload,
    expect,
    poison,
)

BATCHES, QUICK_BATCHES = (32, 256, 1024), (32, 128)
THREADS = (1, 2)
MEMCPY, PLAIN = "memcpy, rows", "plain torch, DataLoader, 2 threads"


@experiment("collect", repeats=(2, 15, 7), pause=0.002)
def command(
    session: Session,
    trajectories: Annotated[int | None, described("Of W1 and W2, 20,000 by default.", min=1)] = None,
    before: Annotated[
        str | None, described("A commit whose `gear_loader` is measured beside; on the CPU.")
    ] = None,
) -> None:
    """Whole batches, against a copy of as many bytes, plain torch, and the commit before."""
    count = trajectories or (300 if session.quick else W1.trajectories)
    batches = QUICK_BATCHES if session.quick else BATCHES
    if count < max(batches):
        message = f"{count} is less than the largest batch, {max(batches)}."
        raise typer.BadParameter(message, param_hint="--trajectories")
    if session.cuda:
        gpu_batches.measured(session, CudaEngine(), count)
        return
    session.configure(before=before, trajectories=count)
    cache = machine.cache_bytes() or 0
    own = functools.partial(start, None, "gear_collect", "gear_collect", "ours")
    launches = {"ours": own}
    if before is not None:
        launches["before"] = functools.partial(own, own=sources_of(before))
    table = Ratios()
    with session.processes(launches, required=("ours",)) as processes:
        for workload in (W1.of(count), W2.of(count), STEPS.of(count)):
            if workload.table_bytes < 4 * cache:
                session.warn(
                    f"{workload.name} has {size(workload.table_bytes)}, the largest cache {size(cache)}: figures are "
                    "of memory that is partly in the cache, the yardstick's too. --trajectories makes it larger."
                )
            data, told = Data(workload), {"workload": workload.name, "trajectories": count, "sizes": batches}
            for name, process in list(processes.items()):
                build = functools.partial(process.ask, "build", **told)
                what = f"{name}, {workload.name}"
                if session.attempt(what, lambda build=build: (build(),), required=name == "ours") is None:
                    processes.pop(name).close()
            with peers_with(session, workload) as peers:
                for batch in session.each(workload.name, batches, f"{workload.name}, batch {{}}".format):
                    table.add(batch, _compare(session, data, processes, peers, batch))
    table.show(session)


def sources_of(revision: str) -> Path:
    """A folder with the `gear_loader` of a commit. It is kept, with the machine code that numba makes of it.

    It begins with the machine code of this tree: numba takes that of the loops that have not changed since.
    """
    git = ["git", "-C", str(machine.ROOT)]
    named = subprocess.run(
        [*git, "rev-parse", "--verify", f"{revision}^{{commit}}"], capture_output=True, text=True
    )
    if named.returncode:
        raise typer.BadParameter(f"{revision!r} is no commit here.", param_hint="--before")
    folder = Path(tempfile.gettempdir()) / f"gear-loader-before-{os.getuid()}-{named.stdout.strip()[:12]}"
    if not folder.is_dir():
        packed = subprocess.run(
            [*git, "archive", named.stdout.strip(), "gear_loader", "triton_kernels"],
            capture_output=True,
            check=True,
        )
        with (
            tempfile.TemporaryDirectory(dir=folder.parent) as made,
            tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar,
        ):
            tar.extractall(Path(made) / "all", filter="tar")
            for code in machine.ROOT.glob("gear_loader/**/*.nb[ci]"):
                kept = Path(made) / "all" / code.relative_to(machine.ROOT)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(code, kept)
            with contextlib.suppress(OSError):  # another process was faster
                (Path(made) / "all").rename(folder)
    return folder


@contextlib.contextmanager
def peers_with(session: Session, workload: Workload) -> Iterator[dict[str, PeerProcess]]:
    """cpprb and TorchRL with trajectories of the same sizes."""
    spec = {
        "columns": {name: list(shape) for name, shape in workload.columns},
        "steps": workload.steps,
        "trajectories": workload.trajectories,
        "window": workload.window.length,
        "seed": 0,
    }

    def built(name: str) -> PeerProcess:
        process = started(session.peers, "batches", name, session.threads)
        process.ask("build", spec=spec)
        return process

    names = [name for name, kind in peers_of("batches").items() if kind.workload == workload.name]
    chosen = [name for name in names if not name.startswith("Reverb")]
    with session.processes({name: functools.partial(built, name) for name in chosen}) as found:
        yield found


def _compare(
    session: Session,
    data: Data,
    processes: Mapping[str, PeerProcess],
    peers: Mapping[str, PeerProcess],
    batch: int,
) -> list[Result]:
    workload = data.workload
    count = batch * workload.row_bytes
    batches = 3 if session.quick else max(4, min(100, 64_000_000 // count))
    made = functools.partial(Variant, amount=count, batches=batches)
    variants = [memcpy_rows(data, batch, batches)]
    least = {"W1": 0.8, "W2": 0.7}.get(workload.name)
    for threads, loader in itertools.product(THREADS, (False, True)):
        variants.append(_plain(data, batch, batches, threads, loader))
        for named, (who, process) in itertools.product((False, True), processes.items()):
            name = _name(who, threads, loader=loader, named=named)
            goals = {PLAIN: 1.0} if loader else {_name("plain torch", threads): 1.0} if threads > 1 else {}
            if who != "ours":
                goals = {}
            elif threads == 1 and not loader and least is not None:
                goals = {MEMCPY: least}
            ask = functools.partial(
                process.ask,
                "measure",
                batch=batch,
                named=named,
                loader=loader,
                threads=threads,
                batches=batches,
            )
            told = {"threads": threads, "loader": loader, "named": named}
            measure = lambda ask=ask: float(ask()["seconds"])  # noqa: E731
            required = who == "ours"
            variants.append(
                made(name, measure, lambda: None, parameters=told, targets=goals, required=required)
            )
    for name, process in peers.items():
        variants.append(_peer(name, process, batch, batches, count))
    parameters = {"batch": batch, "trajectories": workload.trajectories}
    label = f"{workload.name}, batch {batch}"
    compared = {PLAIN, *itertools.chain(*(each.targets for each in variants))} - {MEMCPY}
    comparison = Comparison("collect", workload.name, label, variants, MEMCPY, sorted(compared), parameters)
    found = session.run(comparison)
    session.show(found)
    return found


def _name(who: str, threads: int, *, loader: bool = False, named: bool = False) -> str:
    parts = [who, "named" * named, "DataLoader" * loader, f"{threads} threads" * (threads > 1)]
    return ", ".join(filter(None, parts))


def _plain(data: Data, batch: int, batches: int, threads: int, loader: bool) -> Variant:
    """Plain torch: rows drawn, and gathered in the fastest way into kept buffers."""
    ways: list[Plain]
    if data.workload.anchor == "first":
        ways = [PlainTrajectories(data, batch)]
    else:
        ways = [PlainWindows(data, batch, "zero row"), PlainWindows(data, batch, "strided")]

    class Batches(IterableDataset[Any]):
        def __init__(self, way: Plain) -> None:
            self._way = way

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            while True:
                self._way.gather(data.draw(batch))
                yield self._way.batch

    def measure(way: Plain | None = None) -> float:
        torch.set_num_threads(threads)
        source: Any = Batches(way or ways[0])
        return iterated(
            functools.partial(iter, DataLoader(source, batch_size=None) if loader else source), batches
        )()

    def check() -> None:
        for way in ways:
            rows = data.draw(batch)
            # Plain torch leaves the mask of whole trajectories as it is.
            poison({k: v for k, v in way.batch.items() if k != "mask" or data.workload.anchor != "first"})
            way.gather(rows)
            expect(way.batch, data.expected(rows))
        ways.sort(key=lambda way: min(measure(way) for _ in range(2)))

    told = {"threads": threads, "loader": loader}
    name = _name("plain torch", threads, loader=loader)
    return Variant(name, measure, check, batch * data.workload.row_bytes, batches, told)


def _peer(name: str, process: PeerProcess, batch: int, batches: int, count: int) -> Variant:
    def check() -> None:
        process.ask("prepare", batch=batch)
        process.ask("check", times=2)

    times = max(2, batches // 4)
    measure = lambda: float(process.ask("measure", batches=times)["seconds"])  # noqa: E731
    return Variant(name, measure, check, count, times, {"peer": process.about}, required=False)


class Ratios:
    """Medians over the turns of how many times as fast one variant is as another; a line a batch."""

    COLUMNS = (
        ("÷ memcpy", "ours", MEMCPY),
        ("2 threads ÷ plain torch's 2", "ours, 2 threads", "plain torch, 2 threads"),
        ("÷ plain torch", "ours", "plain torch"),
        ("named ÷ private", "ours, named", "ours"),
        ("DataLoader, 2 threads ÷ plain torch's DataLoader, 2", "ours, DataLoader, 2 threads", PLAIN),
        ("DataLoader, 2 threads ÷ plain torch, 2", "ours, DataLoader, 2 threads", "plain torch, 2 threads"),
        ("÷ before", "ours", "before"),
        ("2 threads ÷ before", "ours, 2 threads", "before, 2 threads"),
        ("DataLoader, 2 threads ÷ before", "ours, DataLoader, 2 threads", "before, DataLoader, 2 threads"),
        ("2 threads ÷ cpprb", "ours, 2 threads", "cpprb"),
        ("2 threads ÷ TorchRL", "ours, 2 threads", "TorchRL"),
        ("2 threads ÷ TorchRL, slices", "ours, 2 threads", "TorchRL, slices"),
    )

    def __init__(self) -> None:
        self._lines: list[tuple[str, list[str]]] = []

    def add(self, batch: int, results: Sequence[Result]) -> None:
        """Take the ratios of a comparison."""
        seconds = {result.variant.name: result.seconds for result in results}
        found = [
            f"{np.median(seconds[other] / seconds[one]):.2f}" if {one, other} <= set(seconds) else ""
            for _, one, other in self.COLUMNS
        ]
        label = f"{results[0].comparison.workload}, {batch}"
        self._lines.append((label, [f"{1e6 * np.median(seconds['ours']):.0f}", *found]))

    def show(self, session: Session) -> None:
        """Print the table, a ratio a line, as Markdown."""
        heads = ["ours, one thread, µs", *(name for name, _, _ in self.COLUMNS)]
        labels, columns = zip(*self._lines, strict=True) if self._lines else ((), ())
        lines = ["| |" + "".join(f" {label} |" for label in labels), "|---|" + "---|" * len(labels)]
        for head, *values in zip(heads, *columns, strict=True):
            if any(values):
                lines.append(f"| {head} |" + "".join(f" {value} |" for value in values))
        for line in lines:
            session.console.print(line, markup=False, highlight=False, soft_wrap=True)
