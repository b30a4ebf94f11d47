"""Ways to get batches that several experiments measure, ours, plain torch, a map-style dataset; how they are timed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import gear_loader as gear
from benchmarks.engine import Engine
from benchmarks.harness import Incorrect, Variant, per_batch
from benchmarks.workloads import Data, Empty, Plain, PlainTrajectories, PlainWindows, Rows, expect, poison
from gear_loader.native.row_cache import load_rows

WARM_UP = 4


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


def memcpy_rows(data: Data, batch: int, batches: int) -> Variant:
    """Copies of as many bytes as a batch has, in one piece a row from random places: what a gather cannot beat."""
    size = data.workload.row_bytes
    out = torch.empty(batch * size, dtype=torch.uint8)
    arena = data.arena.view(torch.uint8)
    pieces, rows = np.array([[0, out.data_ptr(), size]]), np.arange(batch)
    last = (len(arena) - size) // 4

    def draw() -> torch.Tensor:
        return 4 * torch.randint(last + 1, (batch,), generator=data.generator)

    def work(places: torch.Tensor) -> None:
        load_rows(arena.data_ptr() + places.numpy(), pieces, rows)

    def check() -> None:
        out.fill_(255)
        places = draw()
        work(places)
        if not torch.equal(
            out.view(batch, size), torch.stack([arena[i : i + size] for i in places.tolist()])
        ):
            raise Incorrect("the copies differ")

    return Variant("memcpy, rows", per_batch(draw, work, batches), check, batch * size, batches)


def plain(data: Data, batch: int, empty: Empty | None = None) -> Plain:
    """The fastest that plain torch does, into buffers that are kept."""
    if data.workload.anchor == "first":
        return PlainTrajectories(data, batch, empty)
    return PlainWindows(data, batch, "strided", empty)


class _Trajectories(Dataset[dict[str, Any]]):
    """A map-style dataset of whole trajectories; `numbered`: with their number."""

    def __init__(self, data: Data, numbered: bool) -> None:
        self._stacked, self._length, self._numbered = data.stacked, data.workload.trajectories, numbered

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {name: values[index] for name, values in self._stacked.items()}
        return {"index": index, **row} if self._numbered else row


def map_style(
    data: Data, batch: int, workers: int = 0, *, pin: bool = False, numbered: bool = False
) -> DataLoader[Any]:
    """`DataLoader` over a map-style dataset of whole trajectories, drawn uniformly, without end."""
    trajectories = _Trajectories(data, numbered)
    order = RandomSampler(trajectories, replacement=True, num_samples=1 << 40, generator=data.generator)
    context = "fork" if workers else None  # what is forked need not be copied to the workers
    return DataLoader(
        trajectories,
        batch_size=batch,
        sampler=order,
        num_workers=workers,
        multiprocessing_context=context,
        pin_memory=pin,
    )


def check_map_style(data: Data, loader: DataLoader[Any]) -> None:
    """Compare two of its numbered batches with what they hold; raises `Incorrect`."""
    with closed(loader) as batches:
        for found in itertools.islice(batches, 2):
            expected = data.expected(Rows(found["index"], torch.zeros_like(found["index"])))
            expect(found, {name: expected[name] for name in data.flat})


def dataset(
    data: Data,
    table: gear.Table,
    batch: int,
    *,
    device: Any = "cpu",
    prefetch: int = 2,
    programs: int | None = None,
    **options: Any,
) -> gear.ReplayDataset:
    """Ours, of a workload's rows, without end; keep and copy: of `Prefetch`."""
    workload = data.workload
    kept = {name: options.pop(name) for name in ("keep", "copy") if name in options}
    return gear.ReplayDataset(
        table,
        batch_size=batch,
        windows=workload.window,
        draws=gear.Draws(anchor=workload.anchor),
        device=gear.Gpu(device, programs=programs),
        prefetch=gear.Prefetch(prefetch, **kept),
        batches_per_epoch=math.inf,
        **options,
    )


@dataclasses.dataclass
class Feed:
    """Where batches come from. start: makes an iterator of batches without end. parameters: for the rows."""

    name: str
    start: Callable[[], Iterator[Any]]
    check: Callable[[], None]
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def ours(
    name: str, data: Data, table: gear.Table, batch: int, *, loader: bool = False, **options: Any
) -> Feed:
    """`dataset` with these options, through `DataLoader` or not."""
    found = dataset(data, table, batch, **options)
    source: Any = DataLoader(found, batch_size=None) if loader else found
    told = {name: options[name] for name in ("prefetch", "programs") if name in options}
    return Feed(name, lambda: iter(source), functools.partial(check_dataset, data, found, source), told)


def map_styled(name: str, data: Data, batch: int, workers: int = 0) -> Feed:
    """`map_style`, with the numbers of the rows."""
    loader = map_style(data, batch, workers, numbered=True)
    check = functools.partial(check_map_style, data, loader)
    return Feed(name, lambda: iter(loader), check, {"workers": workers})


def iterated(
    start: Callable[[], Iterator[Any]], batches: int, synchronize: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """A `Variant.measure` that takes a few batches of a new iterator untimed, then times the others together.

    As in a user's loop, a batch is let go when the next one has come. `synchronize` waits for a device, before and
    after.
    """

    def measure() -> float:
        with closed(start()) as iterator:
            for _ in range(WARM_UP):
                next(iterator)
            synchronize()
            begin = time.perf_counter()
            for _held in itertools.islice(iterator, batches):
                pass
            synchronize()
            return time.perf_counter() - begin

    return measure


@contextlib.contextmanager
def closed(batches: Any) -> Iterator[Iterator[Any]]:
    """An iterator that ends in the end, with the thread behind it, rather than when it is collected."""
    iterator = iter(batches)
    try:
        yield iterator
    finally:
        # DataLoader's iterator cannot be closed: its source can.
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        end = getattr(iterator if fetcher is None else getattr(fetcher, "dataset_iter", None), "close", None)
        if end is not None:
            end()


def check_dataset(data: Data, dataset: gear.ReplayDataset, batches: Any) -> None:
    """Compare some batches with what their index and anchor say they hold."""
    slots = dataset.table.indices()
    place = np.empty(slots.max() + 1, dtype=np.int64)
    place[slots] = np.arange(len(slots))
    with closed(batches) as iterator:
        for batch in itertools.islice(iterator, 3):
            positions = torch.from_numpy(place[batch["index"].cpu().numpy()])
            expect(batch, data.expected(Rows(positions, batch["anchor"].cpu())))


class Staged:
    """`index_select` into one of two pinned buffers, then a copy to the GPU that the host does not wait for."""

    def __init__(self, engine: Engine, data: Data, batch: int) -> None:
        self._engine, self._data, self._size = engine, data, batch
        self._hosts = [plain(data, batch, engine.pinned) for _ in range(2)]
        self._targets = [
            {name: torch.empty_like(values, device=engine.device) for name, values in host.batch.items()}
            for host in self._hosts
        ]
        self._events = [engine.event() for _ in self._hosts]
        self._turn = 0

    def batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The batch of these rows, on the GPU, until two more have been asked for."""
        turn = self._turn = 1 - self._turn
        self._events[turn].synchronize()  # the copies out of these buffers, two batches ago
        self._hosts[turn].gather(rows)
        for name, values in self._hosts[turn].batch.items():
            self._targets[turn][name].copy_(values, non_blocking=True)
        self._events[turn].record()
        return self._targets[turn]

    def check(self) -> None:
        """Compare a batch of each buffer with what it should hold."""
        for _ in self._hosts:
            rows = self._data.draw(self._size)
            poison(self._targets[1 - self._turn])
            found = self.batch(rows)
            self._engine.synchronize()
            expect(found, self._data.expected(rows))
