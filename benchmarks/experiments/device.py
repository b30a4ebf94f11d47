"""``python -m benchmarks device --device cuda``: what a batch on a GPU costs the host and the GPU, part by part.

Marks say what host and bus can do: a copy within memory, a call of Python, copies of 256 MiB to the GPU, from it and
within it, pinning. Calls are microseconds of the host for what a batch is made of: streams, events, small copies, the
replay of a graph, a launch of the gather kernel. Then a batch of single steps of W2: uniformly by `sample`, and by an
iteration, which has several queued at a time; by priority with an annealed beta; the cycle of a draw and
`update_priority`; and packed whole trajectories. Microseconds of the host alone (`thread`), and until the GPU is
through. Of each the functions that take most of the host's time, in shares of a profile, and the kernels and copies, as
CUPTI counts them.
"""

from __future__ import annotations

import cProfile
import functools
import math
import pstats
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.engine import CudaEngine, Engine
from benchmarks.gather_rows import WorkloadRows, launch
from benchmarks.harness import Amount, Incorrect, Session, Unmeasured
from benchmarks.loading import dataset
from benchmarks.options import described, experiment, numbers
from benchmarks.workloads import STEPS, W1, Data

PARTS = 12
"""Functions of a profile, and kernels, that rows have."""
TARGETS = {
    ("uniform", 32): 20, ("uniform", 256): 25, ("uniform", 1024): 35,
    ("uniform, iterated", 32): 15, ("uniform, iterated", 256): 15, ("uniform, iterated", 1024): 15,
    ("by priority", 32): 20, ("by priority", 256): 20, ("by priority", 1024): 20,
    ("cycle", 32): 25, ("cycle", 256): 25, ("cycle", 1024): 25, ("packed", 32): 80,
}  # fmt: skip
"""Microseconds of the host at most."""


@experiment("device", repeats=(2, 5))
def command(
    session: Session,
    batches: Annotated[str | None, described("Batch sizes: 32,256,1024 by default.")] = None,
    trajectories: Annotated[int | None, described("Of the table: 20,000 by default.", min=1)] = None,
) -> None:
    """What a batch on a GPU costs the host and the GPU, part by part."""
    if not session.cuda:
        session.leave("device", "it is about a GPU: --device cuda")
        return
    chosen = numbers(batches, "--batches", 1, 2**20) or ((32,) if session.quick else (32, 256, 1024))
    measured(session, CudaEngine(), chosen, trajectories or (300 if session.quick else 20_000))


def measured(session: Session, engine: Engine, batches: tuple[int, ...], trajectories: int) -> None:
    """Marks, calls, then batches."""
    session.configure(batches=batches, trajectories=trajectories)
    for part in session.each("machine", (_marks, _calls), lambda part: part.__name__[1:]):
        part(session, engine)
    count = 5 if session.quick else 300
    steps, whole = Data(STEPS.of(trajectories)), Data(W1.of(min(trajectories, 2000)))
    with steps.table(100) as table, whole.table(100) as rows:
        for batch in session.each("batches", batches, "batch {}".format):
            for name, work in _works(engine, steps, table, whole, rows, batch).items():
                label = f"{name}, batch {batch}"
                _timed(session, engine, label, work, count, TARGETS.get((name, batch)))
                session.attempt(
                    f"functions, {label}", functools.partial(_functions, session, label, work, count)
                )
                session.attempt(f"kernels, {label}", functools.partial(_kernels, session, label, work, count))


def _note(session: Session, workload: str, label: str, values: Mapping[str, list[float]], unit: str) -> None:
    session.show_amounts(
        [
            session.record(Amount("device", workload, label, name, found, unit))
            for name, found in values.items()
            if found
        ]
    )


def _marks(session: Session, engine: Engine) -> None:
    size = (1 << 20) if session.quick else (256 << 20)
    source, target = (np.ones(size // 8) for _ in range(2))
    pinned = engine.pinned((size,), torch.uint8)
    pinned.fill_(1)
    here, there = (torch.zeros(size, dtype=torch.uint8, device=engine.device) for _ in range(2))

    def host() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - begin

    copies: dict[str, Callable[[], float]] = {
        "host memory, one thread": host,
        "to the GPU": lambda: engine.timed(lambda: here.copy_(pinned, non_blocking=True)),
        "from the GPU": lambda: engine.timed(lambda: pinned.copy_(here, non_blocking=True)),
        "within the GPU": lambda: engine.timed(lambda: there.copy_(here)),
    }
    found = {
        name: [size / copy() / 1e9 for _ in range(session.repeats + 1)][1:] for name, copy in copies.items()
    }
    if not bool((here == 1).all()) or not bool((there == 1).all()):
        raise Incorrect("a copy of 256 MiB did not arrive")
    _note(session, "marks", "copies of 256 MiB", found, "GB/s")


def _calls(session: Session, engine: Engine) -> None:
    count = 20 if session.quick else 1000
    pinned, there = (
        engine.pinned((256,), torch.int32),
        torch.zeros(256, dtype=torch.int32, device=engine.device),
    )
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()
    replay = engine.queue([lambda: there.add_(1)])
    data = Data(STEPS.of(100))
    with data.table(100, packed=False) as table:
        rows = WorkloadRows(engine, data, table, 32, 1)
        rows.refresh()
        calls: dict[str, Callable[[], object]] = {
            "a call of Python": lambda: None,
            "current stream": torch.cuda.current_stream,
            "record an event": lambda: event.record(stream),
            "query an event": event.query,
            "wait for an event on a stream": lambda: stream.wait_event(event),
            "copy 1 KiB to the GPU": lambda: there.copy_(pinned, non_blocking=True),
            "an operation of torch": lambda: there.add_(1),
            "replay a graph of one kernel": replay,
            "launch the gather kernel": launch(rows, 0, None),
        }
        found = {
            name: [_each(engine, call, count) * 1e6 for _ in range(session.repeats)]
            for name, call in calls.items()
        }
    _note(session, "calls", "a call of the host", found, "us")
    _note(session, "calls", "pinning 1 GB", {"cudaHostRegister": [_pinning(session.quick)]}, "ms")


def _each(engine: Engine, call: Callable[[], object], count: int) -> float:
    """Seconds of the host for a call, of as many as fit into the GPU's queue."""
    call()
    engine.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    seconds = (time.perf_counter() - begin) / count
    engine.synchronize()
    return seconds


def _pinning(quick: bool) -> float:
    memory = np.ones((1 << 20) if quick else (256 << 20), dtype=np.uint8)
    begin = time.perf_counter()
    code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 1)
    seconds = time.perf_counter() - begin
    if int(code):
        raise Unmeasured(f"cudaHostRegister returned {code}")
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
    return seconds * 1e3 / (memory.nbytes / 1e9)


# ---------------------------------------------------------------- batches


def _works(
    engine: Engine, steps: Data, table: gear.Table, whole: Data, rows: gear.Table, batch: int
) -> dict[str, Callable[[], object]]:
    """What is done again and again, of each kind."""
    made = functools.partial(dataset, steps, table, batch, device=engine.device, copy=False)
    annealed = gear.Prioritized(0.6, gear.LinearSchedule(0.4, 1.0, batches=10_000), unit="step")
    drawn = made(sampler=annealed, prefetch=0)
    cycled = made(sampler=gear.Prioritized(0.6, 0.4, unit="step"), prefetch=0)
    priority = torch.ones(batch, device=engine.device)
    packed = dataset(
        whole, rows, min(batch, 64), device=engine.device, prefetch=0, copy=False, layout="packed"
    )

    def cycle() -> object:
        found = cycled.sample()
        cycled.update_priority(found, priority)
        return found

    def check(found: Any, column: str) -> None:
        if found[column].device.type != engine.device.type or not bool(torch.isfinite(found[column]).all()):
            raise Incorrect(f"{column} of a batch is on {found[column].device}, or not what was stored")

    # Several at a time, and from 128 rows on drawn by the GPU, once a few have found nothing changed.
    ahead = iter(made(prefetch=2))
    works = {
        "uniform": made(prefetch=0).sample,
        "uniform, iterated": lambda: next(ahead),
        "by priority": drawn.sample,
        "cycle": cycle,
        "packed": packed.sample,
    }
    for name, work in works.items():
        check(work(), "observation" if name == "packed" else "reward")
    return works


def _timed(
    session: Session, engine: Engine, label: str, work: Callable[[], object], count: int, target: float | None
) -> None:
    """Microseconds of a batch: of the calling thread, of all threads, until the GPU is through."""
    found: dict[str, list[float]] = {"host": [], "thread": [], "process": [], "until the GPU is through": []}
    for _ in range(session.repeats):
        for _ in range(24):  # records, replays, and sees that the table stands still
            work()
        engine.synchronize()
        begin = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(count):
            work()
        times = time.perf_counter(), time.thread_time(), time.process_time()
        engine.synchronize()
        passed = [(end - start) / count * 1e6 for start, end in zip(begin, times, strict=True)]
        for name, value in zip(found, [*passed, (time.perf_counter() - begin[0]) / count * 1e6], strict=True):
            found[name].append(value)
    session.show_amounts(
        [
            session.record(
                Amount(
                    "device", "batch", label, name, values, "us", at_most=target if name == "host" else None
                )
            )
            for name, values in found.items()
        ]
    )


def _functions(session: Session, label: str, work: Callable[[], object], count: int) -> None:
    """Microseconds of the functions that take most time of the host: shares of a profile, times what a batch takes."""
    begin = time.thread_time()
    for _ in range(count):
        work()
    each = (time.thread_time() - begin) / count * 1e6
    profile = cProfile.Profile(time.thread_time)
    with profile:
        for _ in range(count):
            work()
    stats: Any = pstats.Stats(profile)
    whole = stats.total_tt or math.inf
    most = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:PARTS]
    found = {
        f"{path.rsplit('/', 1)[-1]}:{line} {name}" if line else name: [own / whole * each]
        for (path, line, name), (_, _, own, _, _) in most
    }
    _note(session, "functions", f"functions of the host, {label}", found, "us")


def _kernels(session: Session, label: str, work: Callable[[], object], count: int) -> None:
    """Microseconds of kernels and copies of a batch, and how many there are, in the label."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        raise Unmeasured("this PyTorch has no profiler of GPUs")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(count):
            work()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.key_averages():
        took = getattr(event, "self_device_time_total", 0) or getattr(event, "self_cuda_time_total", 0)
        if took:
            found[f"{event.count / count:.3g} x {event.key[:60]}"] = [took / count]
    if not found:
        raise Unmeasured("the profiler saw nothing on a GPU")
    most = dict(sorted(found.items(), key=lambda item: -item[1][0])[:PARTS])
    _note(session, "kernels", f"kernels and copies, {label}", most, "us")
