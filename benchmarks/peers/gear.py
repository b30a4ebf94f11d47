"""This project in processes of its own, beside other libraries; and copies into the memory of its tables."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import gear_loader as gear
from benchmarks.peers import checkpoint, episodes, memory, online
from benchmarks.peers.source import Steps
from gear_loader.errors import RateLimitError, RegionError
from gear_loader.storage.shared_memory import region_path

PACKAGES = MODULES = ("torch", "numpy")


def table_of(shapes: Mapping[str, Any], lengths: np.ndarray, **options: Any) -> gear.Table:
    """A table with room for trajectories of these lengths and no more."""
    if "block_steps" in options:
        blocks = gear.Table.required_blocks(lengths, options["block_steps"])
        options["memory"] = gear.Memory(max_blocks=blocks)
    columns = {name: gear.Column(torch.float32, shape) for name, shape in shapes.items()}
    return gear.Table.create(columns, max_steps=int(lengths.sum()), max_trajectories=len(lengths), **options)


class Memory(memory.Subject):
    """A table with as many blocks as `Table.required_blocks` says; options: ``block_steps``, and ``named``.

    A named one lies in a memory file, of which all is there from the start and counted, whoever uses it.
    """

    def open(self) -> None:
        named = self.options.get("named", False)
        self._name = f"bench-memory-{os.getpid()}-{secrets.token_hex(4)}" if named else None
        told = {"block_steps": self.options["block_steps"], "name": self._name}
        self._table = table_of(self.source.columns, self.source.lengths, **told)

    def fill(self) -> None:
        for _, batch in self.source.parts(memory.BATCH):
            self._table.extend(batch)

    def read(self, i: int) -> Mapping[str, Any]:
        return self._table[int(self._table.indices()[i])]

    def beside(self) -> int:
        return 0 if self._name is None else os.stat(region_path(self._name)).st_blocks * 512

    def extras(self) -> dict[str, float]:
        """By `Table.stats`, as parts of the payload: all of it; steps that ends of blocks leave empty; padding of
        blocks to 128 bytes; the index."""
        stats, layout = self._table.stats(), self._table._engine.region.layout
        payload, steps = stats.payload_bytes, stats.blocks_in_use * stats.block_steps
        step_bytes = payload // stats.num_steps
        blocks = stats.blocks_in_use * layout.block_bytes
        return {
            "stats": stats.overhead,
            "ends": steps * step_bytes / payload - 1,
            "padding": (blocks - steps * step_bytes) / payload,
            "index": (stats.resident_bytes - blocks) / payload,
            "reserved": stats.reserved_bytes / payload,
        }

    def close(self) -> None:
        if self._name is not None:
            with contextlib.suppress(RegionError):
                self._table.unlink()
        self._table.close()


class Checkpoint(checkpoint.Subject):
    """`Table.save`, which waits for the disk and writes what is new, and `Table.load`, which checks every byte."""

    synced = True

    def open(self) -> None:
        self._table = table_of(self.source.columns, self.source.lengths)

    def add(self, first: int, rows: Steps) -> None:
        self._table.extend(rows, lengths=np.full(checkpoint.UNIT, self.source.steps))

    def save(self) -> None:
        self._table.save(self.path("table"))

    def restore(self) -> None:
        self._table = gear.Table.load(self.path("table"))

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        indices = self._table.indices().tolist()
        for first in range(0, len(indices), checkpoint.UNIT):
            each = [self._table[index] for index in indices[first : first + checkpoint.UNIT]]
            yield first, {name: torch.stack([one[name] for one in each]).numpy() for name in each[0]}

    def close(self) -> None:
        self._table.close()


PATIENCE = 0.2
"""Seconds that a writer waits for the rate limiter, until it looks whether its time is over."""

_KEPT = 4
_tables: dict[str, gear.Table] = {}  # the last few are kept: a new mapping would have to be paged in anew
_warm: set[str] = set()


def _attached(name: str) -> gear.Table:
    if name not in _tables:
        while len(_tables) >= _KEPT:
            _tables.pop(next(iter(_tables))).close()
        _tables[name] = gear.Table.attach(name, timeout=PATIENCE)
    return _tables[name]


class Writer(online.Subject):
    """`Table.add`, `Table.extend`, and the writer's `append` of single steps and of several."""

    several = True

    def open(self) -> None:
        self._table = _attached(self.address)
        self._several = [(batch, np.full(len(batch[self.source.mark]), self.steps)) for batch in self.batches]
        self._writer = None
        if self.mode not in ("whole", "batches"):
            self._writer = self._table.writer()
            parts: list[Any] = online.pieces(self.mode, self.steps)
            if self.mode == "steps":
                parts = [part.start for part in parts]
            self._pieces = [[{n: v[part] for n, v in one.items()} for part in parts] for one in self.each]

    def work(self) -> int:
        try:
            if self.mode == "whole":
                self._table.add(self.next(self.each))
                return 1
            if self._writer is None:
                return self._extend()
            append = self._writer.append
            for piece in self.next(self._pieces):
                append(piece)
            self._writer.commit()
            return self.steps
        except RateLimitError:  # the others may have stopped
            if self._writer is not None:
                self._writer.discard()
            return 0

    def _extend(self) -> int:
        batch, lengths = self.next(self._several)
        self._table.extend(batch, lengths=lengths)
        return len(lengths)

    def fill(self) -> None:
        """Write to every block once, which also pages it in here."""
        if self.address not in _warm:
            done = 0
            while done < self.room:
                done += self._extend()
            _warm.add(self.address)

    def check(self) -> None:
        """The other side looks into the table."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Memcpy(online.Subject):
    """A plain copy of as many bytes, in one piece, into the same kind of memory: the largest column of a table."""

    several = True

    def open(self) -> None:
        column = max(self.spec["columns"], key=lambda name: np.prod(self.spec["columns"][name]))
        part = np.array_split(
            _attached(self.address)._engine.region.blocks(column).numpy().reshape(-1), self.of
        )[self.number]
        self._memory = part
        one = sum(values[0].nbytes for values in self.stacked.values())
        self._arena = np.frombuffer(
            b"".join(values.tobytes() for one in self.each for values in one.values()), dtype=np.uint8
        )
        batch = min(self.spec["batch"], len(self.each))
        self._items = {"whole": 1, "batches": batch}.get(self.mode, self.steps)
        self._sizes = [one * self._items]
        if self.mode not in ("whole", "batches"):
            parts = online.pieces(self.mode, self.steps)
            self._sizes = [(part.stop - part.start) * one // self.steps for part in parts]
        self._total = sum(self._sizes)
        if len(part) < self._total or len(self._arena) < self._total:
            raise ValueError(f"{self._total:,} bytes do not fit; make the table larger or the batch smaller")
        self._from = self._to = 0

    def work(self) -> int:
        self._from = self._from + self._total if self._from + 2 * self._total <= len(self._arena) else 0
        self._to = self._to + self._total if self._to + 2 * self._total <= len(self._memory) else 0
        source, target = self._arena.ctypes.data + self._from, self._memory.ctypes.data + self._to
        copy = ctypes.memmove
        for size in self._sizes:
            copy(target, source, size)
            source += size
            target += size
        return self._items

    def fill(self) -> None:
        self._memory[:] = 0

    def check(self) -> None:
        self.work()
        copied = self._memory[self._to : self._to + self._total]
        if not np.array_equal(copied, self._arena[self._from : self._from + self._total]):
            raise ValueError("the copy differs")


BLOCK_STEPS = 32


class Loader(episodes.Loader):
    """`ReplayDataset` through `DataLoader(batch_size=None)`, windows drawn uniformly over steps, padding last."""

    prefetch = 0

    def open(self) -> None:
        data = self.data
        shapes = {name: values.shape[1:] for name, values in data.columns.items()}
        self._table = table_of(shapes, data.lengths, block_steps=BLOCK_STEPS)
        for begin, end in zip(data.begins, data.begins + data.lengths, strict=True):
            self._table.add({name: values[begin:end] for name, values in data.columns.items()})
        dataset = gear.ReplayDataset(
            self._table,
            batch_size=self.batch,
            windows=gear.Window(length=episodes.WINDOW, offset=1 - episodes.WINDOW, pad="tail"),
            sampler=gear.Uniform(unit="step"),
            seed=self.seed,
            device=self.device,
            prefetch=gear.Prefetch(self.prefetch, copy=False),
            batches_per_epoch=math.inf,
        )
        self._iterator: Any = iter(DataLoader(dataset, batch_size=None))

    def next(self) -> Mapping[str, Any]:
        return next(self._iterator)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._iterator._dataset_fetcher.dataset_iter.close()  # ends its thread
        self._table.close()


class LoaderPrefetch(Loader):
    """The same with a thread that makes two batches ahead, as is the default."""

    prefetch = ahead = 2


KINDS: dict[str, dict[str, Any]] = {
    "memory": {"ours": Memory},
    "checkpoint": {"ours": Checkpoint},
    "online": {"ours": Writer, "memcpy": Memcpy},
    "train": {"ours": Loader, "ours, prefetch 2": LoaderPrefetch},
}
