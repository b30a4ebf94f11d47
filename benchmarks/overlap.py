"""``python -m benchmarks overlap``: how much a training step slows down with the loader beside it.

On the CPU, a small network trains on batches of W1's columns, 20 steps a row:

===================== ========================================================================================
alone                 the yardstick: the batch is there; the same one in every step
ours, ...             `ReplayDataset` with prefetch 0 and 2, and through `DataLoader`
DataLoader, map-style over a map-style dataset, with 0 and with 2 worker processes
plain torch           `index_select` into buffers that are kept, in line with the training
===================== ========================================================================================

All use the same number of threads; what a loader does beside the training takes its time from the same cores. A step
is forward, backward, optimizer, and waiting for the batch. On a GPU: see `benchmarks.overlap_gpu`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.utils.data import DataLoader, Dataset, RandomSampler

import gear_loader as gear
from benchmarks.collect import check_dataset, close
from benchmarks.harness import Comparison, Incorrect, Result, Session, Variant, grid
from benchmarks.options import Device, Minutes, Out, Quick, Repeats, Threads, numbers, opened
from benchmarks.overlap_training import MODELS, Training
from benchmarks.workloads import W1, Data, PlainTrajectories, Rows, Workload, expect

__all__ = ["ALONE", "Clock", "Feed", "command", "cpu", "show"]

ALONE = "alone"
STEPS = 20
WARM_UP = 3
SECONDS = 0.2
"""About how long one measurement takes."""

Batches = Iterator[Any]


class Feed:
    """Where batches come from.

    Args:
        name: of the variant.
        start: makes an iterator of batches without end.
        check: raises `Incorrect` unless its batches are right.
        parameters: for the rows.
    """

    def __init__(
        self, name: str, start: Callable[[], Batches], check: Callable[[], None], **parameters: Any
    ) -> None:
        self.name, self.start, self.check, self.parameters = name, start, check, parameters


class Clock:
    """Seconds of a step of every variant of a comparison, by turns, and the share of them spent waiting."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.waiting: dict[str, list[float]] = {}

    def note(self, name: str, seconds: float, waiting: float) -> None:
        """One measurement, and the part of it that was spent waiting for batches."""
        self.seconds.setdefault(name, []).append(seconds)
        self.waiting.setdefault(name, []).append(waiting / seconds)

    def slowdown(self, name: str) -> float:
        """Median of a step's time over that of one alone in the same turn."""
        return float(np.median(np.array(self.seconds[name]) / np.array(self.seconds[ALONE])))

    def extras(self, name: str) -> dict[str, float]:
        """For the rows."""
        return {"slowdown": self.slowdown(name), "waiting": float(np.median(self.waiting[name]))}


def command(
    device: Annotated[Device, typer.Option(help="Where the training runs.")] = Device.cpu,
    quick: Quick = False,
    batches: Annotated[
        str | None, typer.Option(help="Batch sizes on the CPU: 32,256,1024 by default.")
    ] = None,
    repeats: Repeats = None,
    out: Out = None,
    threads: Threads = None,
    trajectories: Annotated[int | None, typer.Option(min=1, help="20,000 by default.")] = None,
    minutes: Minutes = None,
) -> None:
    """How much a training step slows down with the loader beside it."""
    chosen = numbers(batches, "--batches", 1, 2**20) or ((32,) if quick else (32, 256, 1024))
    with opened(
        "overlap",
        quick=quick,
        repeats=repeats or (3 if quick else 9 if device is Device.cpu else 7),
        out=out,
        threads=threads,
        minutes=minutes,
        device=device,
    ) as session:
        torch.manual_seed(0)
        trajectories = trajectories or (2000 if quick else W1.trajectories)
        if device is Device.cpu:
            cpu(session, batches=chosen, trajectories=trajectories, seconds=0.03 if quick else SECONDS)
        else:
            from benchmarks import overlap_gpu

            overlap_gpu.cuda(session, trajectories=trajectories, quick=quick)


def workload(trajectories: int) -> Workload:
    """Whole trajectories of 20 steps with W1's columns: 8,400 B each."""
    return Workload("W1, 20 steps", W1.columns, trajectories, STEPS, gear.Window(length=STEPS), "first")


def cpu(session: Session, *, batches: tuple[int, ...], trajectories: int, seconds: float) -> None:
    """Measure both networks with each batch size."""
    data = Data(workload(trajectories))
    settings = list(itertools.product(MODELS, batches))
    with data.table(STEPS) as table, session.progress("overlap", len(settings)):
        for model, batch in settings:
            label = f"{model}, batch {batch}"
            if session.deadline.passed(label):
                continue
            feeds = _feeds(data, table, batch)
            comparison = Comparison(
                experiment="overlap",
                workload="step",
                label=label,
                variants=_variants(feeds, Training(MODELS[model]()), batch, seconds),
                yardstick=ALONE,
                parameters={"batch": batch, "model": model, "steps": STEPS},
                unit="rows",
            )
            show(session, session.run(comparison))
    session.finish()


# ---------------------------------------------------------------- feeds


class _Trajectories(Dataset[dict[str, Any]]):
    """A map-style dataset of trajectories, with their number."""

    def __init__(self, data: Data) -> None:
        self._stacked, self._length = data.stacked, data.workload.trajectories

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, **{name: values[index] for name, values in self._stacked.items()}}


def _feeds(data: Data, table: gear.Table, batch: int) -> list[Feed]:
    return [
        _alone(data, batch),
        _ours(data, table, batch, 0),
        _ours(data, table, batch, 2),
        _ours(data, table, batch, 2, loader=True),
        _map_style(data, batch, 0),
        _map_style(data, batch, 2),
        _plain(data, batch),
    ]


def _alone(data: Data, batch: int) -> Feed:
    rows = data.draw(batch)
    there = data.expected(rows)
    return Feed(ALONE, lambda: itertools.repeat(there), lambda: expect(there, data.expected(rows)))


def _ours(data: Data, table: gear.Table, batch: int, prefetch: int, *, loader: bool = False) -> Feed:
    dataset = gear.ReplayDataset(
        table,
        batch_size=batch,
        windows=data.workload.window,
        anchor=data.workload.anchor,
        device="cpu",
        prefetch=prefetch,
        batches_per_epoch=math.inf,
    )
    source: Any = DataLoader(dataset, batch_size=None) if loader else dataset
    name = f"ours, prefetch {prefetch}{', DataLoader' if loader else ''}"
    return Feed(name, lambda: iter(source), lambda: check_dataset(data, dataset, source), prefetch=prefetch)


def _map_style(data: Data, batch: int, workers: int) -> Feed:
    trajectories = _Trajectories(data)

    def start() -> Batches:
        order = RandomSampler(trajectories, replacement=True, num_samples=2**40, generator=data.generator)
        return iter(DataLoader(trajectories, batch_size=batch, sampler=order, num_workers=workers))

    def check() -> None:
        batches = start()
        try:
            for _ in range(2):
                found = next(batches)
                expected = data.expected(Rows(found["index"], torch.zeros_like(found["index"])))
                expect(found, {name: expected[name] for name in data.flat})
        finally:
            close(batches)

    return Feed(f"DataLoader, map-style, {workers} workers", start, check, workers=workers)


def _plain(data: Data, batch: int) -> Feed:
    plain = PlainTrajectories(data, batch)

    def start() -> Batches:
        while True:
            plain.gather(data.draw(batch))
            yield plain.batch

    def check() -> None:
        rows = data.draw(batch)
        plain.gather(rows)
        expect(plain.batch, data.expected(rows))

    return Feed("plain torch", start, check)


# ---------------------------------------------------------------- measuring


def _variants(feeds: list[Feed], training: Training, batch: int, seconds: float) -> list[Variant]:
    clock = Clock()
    steps = max(4, min(200, round(seconds / _step_seconds(feeds[0], training))))

    def variant(feed: Feed) -> Variant:
        def measure() -> float:
            taken, waited = _train(feed, training, steps)
            clock.note(feed.name, taken, waited)
            return taken

        return Variant(
            feed.name,
            measure,
            feed.check,
            batch,
            steps,
            feed.parameters,
            extras=lambda: clock.extras(feed.name),
        )

    return [variant(feed) for feed in feeds]


def _step_seconds(feed: Feed, training: Training) -> float:
    """About how long a step takes.

    Raises:
        Incorrect: it does not train.
    """
    before = [values.clone() for values in training.model.parameters()]
    shortest = min(_train(feed, training, 1)[0] for _ in range(3))
    if any(torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True)):
        raise Incorrect("a step leaves parameters as they are")
    return shortest


def _train(feed: Feed, training: Training, steps: int) -> tuple[float, float]:
    """Seconds of so many steps after a few others, and the part of them spent waiting for batches."""
    waited = 0.0
    batches = feed.start()
    try:
        for _ in range(WARM_UP):
            training.step(next(batches))
        begin = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            training.step(batch)
        return time.perf_counter() - begin, waited
    finally:
        close(batches)


_SHOWN = {"waiting": "{:.1%}", "gb_per_s": "{:.2f}", "gb_per_s_alone": "{:.2f}", "host_seconds": "{:.6f}"}


def show(session: Session, results: list[Result]) -> None:
    """A comparison as a table: milliseconds a step, over alone, and the further figures."""
    heads = [name for name in _SHOWN if any(name in result.extras for result in results)]
    table = grid(results[0].comparison.label)
    table.add_column("variant", no_wrap=True)
    for head in ("step, ms", "÷ alone", *(head.replace("_", " ") for head in heads)):
        table.add_column(head, justify="right")
    for result in results:
        table.add_row(
            result.variant.name,
            f"{float(np.median(result.seconds)) * 1e3:,.2f}",
            f"{result.extras['slowdown']:.3f}",
            *(_SHOWN[head].format(result.extras[head]) if head in result.extras else "-" for head in heads),
        )
    session.console.print(table)
