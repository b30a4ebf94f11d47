"""``python -m benchmarks overlap``: how much a training step slows down with the loader beside it.

On the CPU, a small network trains on batches of W1's columns, 20 steps a row; the yardstick is a step with a batch that
is there, the same one each time. All use the same number of threads; what a loader does beside the training takes its
time from the same cores. A step is forward, backward, optimizer, and waiting for the batch. On a GPU: see
`overlap_cuda`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader

import gear_loader as gear
from benchmarks import loading
from benchmarks.experiments import overlap_cuda
from benchmarks.harness import Incorrect, Session
from benchmarks.loading import check_dataset, check_map_style
from benchmarks.options import command as as_command
from benchmarks.options import numbers, option
from benchmarks.training import ALONE, MODELS, Feed, Training, fed, train
from benchmarks.workloads import W1, Data, Workload, expect

STEPS = 20
SECONDS = 0.2
"""About how long one measurement takes."""

Batches = option(str, "Batch sizes on the CPU: 32,256,1024 by default.")


@as_command("overlap", repeats=(3, 9, 7))
def command(
    session: Session,
    batches: Batches = None,
    trajectories: Annotated[int | None, typer.Option(min=1, help="20,000 by default.")] = None,
) -> None:
    """How much a training step slows down with the loader beside it."""
    chosen = numbers(batches, "--batches", 1, 2**20) or ((32,) if session.quick else (32, 256, 1024))
    torch.manual_seed(0)
    count = trajectories or (2000 if session.quick else W1.trajectories)
    if session.cuda:
        overlap_cuda.measured(session, trajectories=count)
        return
    data = Data(workload(count))
    settings = list(itertools.product(MODELS, chosen))
    seconds = 0.03 if session.quick else SECONDS
    with data.table(STEPS) as table, session.progress("overlap", len(settings)):
        for model, batch in settings:
            label = f"{model}, batch {batch}"
            if session.late(label):
                continue
            feeds, training = _feeds(data, table, batch), Training(MODELS[model]())
            steps = max(4, min(200, round(seconds / _step_seconds(feeds[0], training))))
            parameters = {"batch": batch, "model": model, "steps": STEPS}
            session.compare("step", label, fed(feeds, training, batch, steps), ALONE, parameters, unit="rows")


def workload(trajectories: int) -> Workload:
    """Whole trajectories of 20 steps with W1's columns: 8,400 B each."""
    return Workload("W1, 20 steps", W1.columns, trajectories, STEPS, gear.Window(length=STEPS), "first")


def _feeds(data: Data, table: gear.Table, batch: int) -> list[Feed]:
    rows = data.draw(batch)
    there = data.expected(rows)

    def ours(prefetch: int, *, loader: bool = False) -> Feed:
        dataset = loading.dataset(data, table, batch, device="cpu", prefetch=prefetch, copy=False)
        source: Any = DataLoader(dataset, batch_size=None) if loader else dataset
        name = f"ours, prefetch {prefetch}{', DataLoader' if loader else ''}"
        check = functools.partial(check_dataset, data, dataset, source)
        return Feed(name, lambda: iter(source), check, {"prefetch": prefetch})

    def map_style(workers: int) -> Feed:
        loader = loading.map_style(data, batch, workers, numbered=True)
        check, name = (
            functools.partial(check_map_style, data, loader),
            f"DataLoader, map-style, {workers} workers",
        )
        return Feed(name, lambda: iter(loader), check, {"workers": workers})

    return [
        Feed(ALONE, lambda: itertools.repeat(there), lambda: expect(there, data.expected(rows))),
        ours(0),
        ours(2),
        ours(2, loader=True),
        map_style(0),
        map_style(2),
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
