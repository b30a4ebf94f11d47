"""``python -m benchmarks collect``: gathering batches, against a copy of as many bytes and against plain torch.

On the CPU, of workloads W1 (whole trajectories) and W2 (windows), see `benchmarks.workloads`:

=================== ==========================================================================================
memcpy              the yardstick: one ``torch.Tensor.copy_`` of as many bytes as the batch's columns have, in one
                    piece from a random place of a range as large as the table into a buffer that is kept
collector           `Collector.collect` into the same buffers again and again, rows drawn beforehand
dataset             `ReplayDataset` from the draw to the batch, with prefetch 0 and 2
index_select        plain torch into buffers that are kept; for W2 in three ways, see `PlainWindows`
x[idx]              plain torch into fresh memory
DataLoader          over a map-style dataset, no workers; and over `ReplayDataset`
=================== ==========================================================================================

All use the same number of threads. All but `DataLoader` give the same columns and mask.
"""

from __future__ import annotations

import contextlib
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
from benchmarks import machine
from benchmarks.harness import Comparison, Incorrect, Session, Variant, per_batch, size
from benchmarks.options import Device, Minutes, Out, Quick, Repeats, opened
from benchmarks.workloads import (
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
from gear_loader.collection.collector import Collector
from gear_loader.storage.rows import SelectedRows

__all__ = ["WARM_UP", "Trajectories", "check_dataset", "close", "command", "cpu", "iterated", "memcpy"]

BATCHES = (32, 256, 1024)
QUICK_BATCHES = (32, 128)
BLOCK_STEPS = (100, 64)
PREFETCH = (0, 2)
WARM_UP = 4


def command(
    device: Annotated[Device, typer.Option(help="Where batches are wanted.")] = Device.cpu,
    quick: Quick = False,
    repeats: Repeats = None,
    out: Out = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads on the CPU: 2, or all with cuda.")
    ] = None,
    trajectories: Annotated[int | None, typer.Option(min=1, help="Of W1 and W2, 20,000 by default.")] = None,
    minutes: Minutes = None,
) -> None:
    """Gathering batches, against a plain copy of as many bytes and against plain torch."""
    trajectories = trajectories or (300 if quick else W1.trajectories)
    largest = max(QUICK_BATCHES if quick else BATCHES)
    if trajectories < largest:
        message = f"{trajectories} is less than the largest batch, {largest}."
        raise typer.BadParameter(message, param_hint="--trajectories")
    with opened(
        "collect",
        quick=quick,
        repeats=repeats or (3 if quick else 15 if device is Device.cpu else 7),
        out=out,
        threads=threads,
        minutes=minutes,
        device=device,
        pause=0.005,
    ) as session:
        if device is Device.cpu:
            cpu(session, trajectories=trajectories, quick=quick)
        else:
            from benchmarks import collect_gpu

            collect_gpu.cuda(session, trajectories=trajectories, quick=quick)


def cpu(session: Session, *, trajectories: int, quick: bool) -> None:
    """Measure the CPU side of both workloads."""
    batches = QUICK_BATCHES if quick else BATCHES
    cache = machine.cache_bytes() or 0
    for workload in (W1.of(trajectories), W2.of(trajectories)):
        if workload.table_bytes < 4 * cache:
            session.console.print(
                f"{workload.name} has {size(workload.table_bytes)}, the largest cache {size(cache)}: figures are of "
                "memory that is partly in the cache, the yardstick's too. --trajectories makes it larger.",
                style="yellow",
                highlight=False,
            )
        data = Data(workload)
        with contextlib.ExitStack() as stack, session.progress(workload.name, len(batches)):
            tables = {steps: stack.enter_context(data.table(steps)) for steps in BLOCK_STEPS}
            for batch in batches:
                if session.deadline.passed(f"{workload.name}, batch {batch}"):
                    continue
                results = session.run(_comparison(data, tables, batch, quick=quick))
                session.show(results)
    session.show_targets()
    session.finish()


def _comparison(data: Data, tables: dict[int, gear.Table], batch: int, *, quick: bool) -> Comparison:
    workload = data.workload
    count = batch * workload.row_bytes
    batches = 3 if quick else max(4, min(64, 256_000_000 // count))
    windows = workload.anchor == "uniform"
    plain = _plain(data, batch)
    copy = 0.8 if batch < 256 else 1.0
    references = tuple(name for name in plain if name != "index_select masked")  # slower than the others
    goals = ({} if windows else {"memcpy": copy}) | dict.fromkeys(references, 1.0)
    variants = [memcpy(data, count, batches)]
    for steps, table in tables.items():
        parameters = {"block_steps": steps}
        name = f"collector, blocks {steps}"
        variants.append(
            _collector(data, table, batch, batches, name=name, parameters=parameters, targets=goals)
        )
    for steps, table in tables.items():
        for prefetch in PREFETCH:
            parameters = {"block_steps": steps, "prefetch": prefetch}
            name = f"dataset, blocks {steps}, prefetch {prefetch}"
            variants.append(_dataset(data, table, batch, batches, name=name, parameters=parameters))
    for name, way in plain.items():
        variants.append(_plain_variant(name, data, way, batch, batches))
    if not windows:
        variants.append(_fancy(data, batch, batches))
        variants.append(_map_style(data, batch, max(2, batches // 8)))
    table = tables[BLOCK_STEPS[0]]
    parameters = {"block_steps": BLOCK_STEPS[0], "prefetch": PREFETCH[-1]}
    name = "DataLoader, dataset"
    variants.append(_dataset(data, table, batch, batches, name=name, parameters=parameters, loader=True))
    return Comparison(
        experiment="collect",
        workload=workload.name,
        label=f"{workload.name}, batch {batch}",
        variants=variants,
        yardstick="memcpy",
        references=references,
        parameters={"batch": batch, "trajectories": workload.trajectories},
    )


# ---------------------------------------------------------------- variants


def memcpy(data: Data, count: int, batches: int) -> Variant:
    """Copies of so many bytes in one piece: the yardstick."""
    words = count // 4
    out = torch.empty(words)
    last = (len(data.arena) - words) // 16

    def work(start: int) -> None:
        out.copy_(data.arena[start : start + words])

    def draw() -> int:
        return 16 * int(torch.randint(last + 1, (), generator=data.generator))

    def check() -> None:
        out.fill_(float("nan"))
        start = draw()
        work(start)
        if not torch.equal(out, data.arena[start : start + words]):
            raise Incorrect("the copy differs")

    return Variant("memcpy", per_batch(draw, work, batches), check, count, batches)


def _plain(data: Data, batch: int) -> dict[str, Plain]:
    if data.workload.anchor == "first":
        return {"index_select": PlainTrajectories(data, batch)}
    return {
        "index_select": PlainWindows(data, batch, "zero row"),
        "index_select masked": PlainWindows(data, batch, "masked"),
        "index_select strided": PlainWindows(data, batch, "strided"),
    }


def _plain_variant(name: str, data: Data, way: Plain, batch: int, batches: int) -> Variant:
    def draw() -> Rows:
        return data.draw(batch)

    def check() -> None:
        rows = draw()
        poison(
            {
                key: value
                for key, value in way.batch.items()
                if key != "mask" or data.workload.anchor != "first"
            }
        )
        way.gather(rows)
        expect(way.batch, data.expected(rows))

    return Variant(
        name, per_batch(draw, way.gather, batches), check, batch * data.workload.row_bytes, batches
    )


def _fancy(data: Data, batch: int, batches: int) -> Variant:
    def work(rows: Rows) -> dict[str, torch.Tensor]:
        return {name: values[rows.positions] for name, values in data.stacked.items()}

    def draw() -> Rows:
        return data.draw(batch)

    def check() -> None:
        rows = draw()
        expected = data.expected(rows)
        expect(work(rows), {name: expected[name] for name in data.flat})

    return Variant("x[idx]", per_batch(draw, work, batches), check, batch * data.workload.row_bytes, batches)


class Trajectories(Dataset[dict[str, torch.Tensor]]):
    """A map-style dataset of whole trajectories, with their number."""

    def __init__(self, data: Data) -> None:
        self._stacked = data.stacked
        self._length = data.workload.trajectories

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self._stacked.items()}


def _map_style(data: Data, batch: int, batches: int) -> Variant:
    trajectories = Trajectories(data)
    order = RandomSampler(
        trajectories, replacement=True, num_samples=(batches + WARM_UP) * batch, generator=data.generator
    )

    def check() -> None:
        positions = data.draw(batch).positions
        expected = data.expected(Rows(positions, torch.zeros_like(positions)))
        for found in DataLoader(trajectories, batch_size=batch, sampler=positions.tolist()):
            expect(found, {name: expected[name] for name in data.flat})

    loader = DataLoader(trajectories, batch_size=batch, sampler=order)
    measure = iterated(lambda: iter(loader), batches)
    return Variant("DataLoader, map-style", measure, check, batch * data.workload.row_bytes, batches)


def _collector(
    data: Data,
    table: gear.Table,
    batch: int,
    batches: int,
    *,
    name: str,
    parameters: dict[str, Any],
    targets: dict[str, float],
) -> Variant:
    workload = data.workload
    windows = dict.fromkeys(workload.schema, workload.window)
    collector = Collector(table, windows, batch_size=batch, device=torch.device("cpu"))
    buffers = collector.buffers()
    slots = table.indices()
    generations = table.slot_states()[1][slots]

    def request(rows: Rows) -> tuple[Any, Any, Any]:
        positions = rows.positions.numpy()
        return slots[positions], rows.anchors.numpy(), generations[positions]

    def work(rows: tuple[Any, Any, Any]) -> None:
        collector.gather(buffers, SelectedRows(*rows))

    def check() -> None:
        rows = data.draw(batch)
        poison(buffers.batch)
        work(request(rows))
        expect(buffers.batch, data.expected(rows))

    measure = per_batch(lambda: request(data.draw(batch)), work, batches)
    return Variant(name, measure, check, batch * workload.row_bytes, batches, parameters, targets)


def _dataset(
    data: Data,
    table: gear.Table,
    batch: int,
    batches: int,
    *,
    name: str,
    parameters: dict[str, Any],
    loader: bool = False,
) -> Variant:
    dataset = gear.ReplayDataset(
        table,
        batch_size=batch,
        windows=data.workload.window,
        anchor=data.workload.anchor,
        device="cpu",
        prefetch=parameters["prefetch"],
        batches_per_epoch=math.inf,
    )
    source: Any = DataLoader(dataset, batch_size=None) if loader else dataset
    return Variant(
        name,
        iterated(lambda: iter(source), batches),
        lambda: check_dataset(data, dataset, source),
        batch * data.workload.row_bytes,
        batches,
        parameters,
    )


# ---------------------------------------------------------------- iterators


def iterated(
    start: Callable[[], Iterator[Any]], batches: int, synchronize: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """A `Variant.measure` that takes a few batches of a new iterator untimed, then times the others together.

    As in a user's loop, a batch is let go when the next one has come. `synchronize` waits for a device, before and
    after.
    """

    def measure() -> float:
        iterator = start()
        try:
            for _ in range(WARM_UP):
                next(iterator)
            synchronize()
            begin = time.perf_counter()
            for _held in itertools.islice(iterator, batches):
                pass
            synchronize()
            return time.perf_counter() - begin
        finally:
            close(iterator)

    return measure


def close(iterator: Any) -> None:
    """End an iterator now, with the thread behind it, rather than when it is collected."""
    fetcher = getattr(
        iterator, "_dataset_fetcher", None
    )  # DataLoader's iterator cannot be closed: its source can
    end = getattr(iterator if fetcher is None else getattr(fetcher, "dataset_iter", None), "close", None)
    if end is not None:
        end()


def check_dataset(data: Data, dataset: gear.ReplayDataset, batches: Any) -> None:
    """Compare some batches with what their index and anchor say they hold.

    Raises:
        Incorrect: they differ.
    """
    slots = dataset.table.indices()
    place = np.empty(slots.max() + 1, dtype=np.int64)
    place[slots] = np.arange(len(slots))
    iterator = iter(batches)
    try:
        for _ in range(3):
            batch = next(iterator)
            positions = torch.from_numpy(place[batch["index"].cpu().numpy()])
            expect(batch, data.expected(Rows(positions, batch["anchor"].cpu())))
    finally:
        close(iterator)
