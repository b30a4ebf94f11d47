"""torch and numpy alone, in processes of their own: what one writes without any library, and yardsticks."""

from __future__ import annotations

import concurrent.futures
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.peers import checkpoint, episodes, memory, online
from benchmarks.peers.source import Source, Steps

PACKAGES = MODULES = ("torch", "numpy")
_PIECE = 8 << 20
_THREADS = 8
"""Most threads that a load of ours has."""


def empty_of(source: Source, rows: int) -> dict[str, torch.Tensor]:
    """A tensor for each column, with a row as long as the longest trajectory for each of so many."""
    return {name: torch.empty(rows, source.steps, *shape) for name, shape in source.columns.items()}


class FixedRows(memory.Subject):
    """A row as long as the longest trajectory for each of them, as GEAR has it; every page is touched.

    GEAR's rows are pinned, so all of their memory is resident from the start, whether it is written or not.
    """

    def open(self) -> None:
        self.store = empty_of(self.source, len(self.source))
        for rows in self.store.values():
            rows.zero_()

    def fill(self) -> None:
        for place, one in enumerate(self.each()):
            for name, values in one.items():
                self.store[name][place, : len(values)] = torch.from_numpy(values)

    def read(self, i: int) -> Mapping[str, Any]:
        return {name: rows[i, : int(self.source.lengths[i])] for name, rows in self.store.items()}


class Listed(memory.Subject):
    """A list with a dictionary of tensors for each trajectory: what one writes without any library."""

    def open(self) -> None:
        self.store = []

    def fill(self) -> None:
        for one in self.each():
            self.store.append({n: torch.from_numpy(values).clone() for n, values in one.items()})

    def read(self, i: int) -> Mapping[str, Any]:
        return self.store[i]


class Saved(checkpoint.Subject):
    """`torch.save` of a flat tensor for each column, and `torch.load`; nothing waits for the disk."""

    def open(self) -> None:
        self.store = empty_of(self.source, len(self.source))

    def add(self, first: int, rows: Steps) -> None:
        for name, values in rows.items():
            self.store[name][first : first + checkpoint.UNIT] = torch.from_numpy(values)

    def save(self) -> None:
        # A part of a tensor is saved with all of its memory, which has room for the last percent.
        torch.save(self.store, self.path("tensors.pt"))

    def restore(self) -> None:
        self.store = torch.load(self.path("tensors.pt"), weights_only=True)

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for first in range(0, len(self.source), checkpoint.UNIT):
            part = slice(first, first + checkpoint.UNIT)
            yield first, {name: values[part].numpy() for name, values in self.store.items()}


class Yardstick(checkpoint.Subject):
    """As many bytes: written to one file from a buffer, and synced; read from it into a buffer."""

    synced = True

    def open(self) -> None:
        self._path = self.path("bytes")
        self._buffer = np.random.default_rng(0).integers(256, size=_PIECE, dtype=np.uint8)

    def save(self) -> None:
        left, view = self.source.payload, memoryview(self._buffer)
        with open(self._path, "wb", buffering=0) as file:
            while left:
                left -= file.write(view[: min(left, _PIECE)])
            os.fsync(file.fileno())

    def restore(self) -> None:
        self._read, view = 0, memoryview(self._buffer)
        with open(self._path, "rb", buffering=0) as file:
            while count := file.readinto(view):
                self._read += count

    def check(self) -> None:
        if self._read != self.source.payload:
            raise ValueError(f"{self._read} bytes were read; expected {self.source.payload}")


class Kept(Yardstick):
    """The same, read into memory that is mapped for it, by as many threads as a load of ours has; all of it is kept."""

    def restore(self) -> None:
        size = self.source.payload
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # as a table's memory
        threads = max(1, min(_THREADS, len(os.sched_getaffinity(0))))
        bounds = [size * i // threads for i in range(threads + 1)]
        view = memoryview(memory)
        with (
            open(self._path, "rb", buffering=0) as file,
            concurrent.futures.ThreadPoolExecutor(threads) as pool,
        ):

            def read(begin: int, end: int) -> int:
                at = begin
                while at < end and (
                    count := os.preadv(file.fileno(), [view[at : min(end, at + _PIECE)]], at)
                ):
                    at += count
                return at - begin

            self._read = sum(pool.map(read, bounds[:-1], bounds[1:]))
        self.store = memory


class Torch(online.Subject):
    """torch alone: `copy_` into tensors ``[trajectories, steps, ...]`` that were made before, one after another."""

    def open(self) -> None:
        self.store, self._place = empty_of(self.source, self.room), 0

        def tensors(values: Steps) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(self.store[name], torch.from_numpy(array)) for name, array in values.items()]

        self._things = [tensors(part) for part in (self.batches if self.mode == "batches" else self.each)]
        self._count = len(self._things[0][0][1]) if self.mode == "batches" else 1
        self._pieces = [] if self.mode in ("whole", "batches") else online.pieces(self.mode, self.steps)

    def work(self) -> int:
        count, place = self._count, self._place
        if place + count > self.room:
            place = 0
        self._place = place + count
        one = self.next(self._things)
        if self.mode == "batches":
            for store, values in one:
                store[place : place + count].copy_(values)
            return count
        if self.mode == "whole":
            for store, values in one:
                store[place].copy_(values)
            return 1
        single = self.mode == "steps"
        for piece in self._pieces:
            at: Any = piece.start if single else piece
            for store, values in one:
                store[place, at].copy_(values[at])
        return self.steps

    def fill(self) -> None:
        for values in self.store.values():
            values.zero_()

    def check(self) -> None:
        before = self._place % self.room
        self.work()
        first = self._place - self._count
        if first not in (before, 0):
            raise ValueError(f"place {first} was written, after {before}")
        self.verify({n: values[first : self._place].numpy() for n, values in self.store.items()})


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A map-style data set: the window that ends at each step, with padding where the episode had not begun."""

    def __init__(self, data: episodes.Data) -> None:
        self._columns = {name: torch.from_numpy(values) for name, values in data.columns.items()}
        self._begins = np.repeat(data.begins, data.lengths).tolist()

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, last: int) -> dict[str, torch.Tensor]:
        first = max(self._begins[last], last - episodes.WINDOW + 1)
        count = last + 1 - first
        row = {"mask": torch.arange(episodes.WINDOW) < count}
        for name, values in self._columns.items():
            row[name] = values[first : last + 1]
            if count < episodes.WINDOW:
                row[name] = functional.pad(
                    row[name], (0, 0) * (values.ndim - 1) + (0, episodes.WINDOW - count)
                )
        return row


class MapStyle(episodes.Loader):
    """`DataLoader` over a map-style data set, windows drawn uniformly over steps with replacement.

    With CUDA, batches are pinned and copied without waiting.
    """

    workers = 0

    def open(self) -> None:
        torch.manual_seed(self.seed)
        windows = Windows(self.data)
        cuda = self.device.type == "cuda"
        order = torch.utils.data.RandomSampler(windows, replacement=True, num_samples=2**50)
        self._iterator = iter(
            torch.utils.data.DataLoader(
                windows, batch_size=self.batch, sampler=order, num_workers=self.workers, pin_memory=cuda
            )
        )

    def next(self) -> Mapping[str, torch.Tensor]:
        batch = next(self._iterator)
        return {name: values.to(self.device, non_blocking=True) for name, values in batch.items()}

    def close(self) -> None:
        del self._iterator  # ends its workers


class MapStyleWorkers(MapStyle):
    """The same with two worker processes, each two batches ahead."""

    workers = 2
    ahead = 4


class PlainTorch(episodes.Loader):
    """Plain indexing of whole tensors by the numbers of all steps of a batch, as one writes it for such windows."""

    def open(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        self._columns = {name: torch.from_numpy(values) for name, values in self.data.columns.items()}
        self._begins = torch.from_numpy(np.repeat(self.data.begins, self.data.lengths))

    def next(self) -> Mapping[str, torch.Tensor]:
        last = torch.randint(len(self._begins), (self.batch,), generator=self._random)
        first = torch.maximum(self._begins[last], last - episodes.WINDOW + 1)
        steps = first[:, None] + torch.arange(episodes.WINDOW)
        mask = steps <= last[:, None]
        steps = torch.where(mask, steps, 0)
        batch = {"mask": mask}
        for name, values in self._columns.items():
            rows = values[steps]
            batch[name] = rows.masked_fill_(~mask.view(*mask.shape, *(1,) * (rows.ndim - 2)), 0)
        return {name: values.to(self.device) for name, values in batch.items()}


class Ready(episodes.Loader):
    """The yardstick: one batch, which is there already."""

    varied = False

    def open(self) -> None:
        batch = PlainTorch(self.data, self.batch, self.seed, self.device).next()
        self.next = lambda: batch


KINDS: dict[str, dict[str, Any]] = {
    "memory": {"fixed rows": FixedRows, "list of tensors": Listed},
    "checkpoint": {"yardstick": Yardstick, "read, kept": Kept, "torch.save": Saved},
    "online": {"torch": Torch},
    "train": {
        "batch ready": Ready,
        "plain torch": PlainTorch,
        "DataLoader, map-style": MapStyle,
        "DataLoader, map-style, 2 workers": MapStyleWorkers,
    },
}
