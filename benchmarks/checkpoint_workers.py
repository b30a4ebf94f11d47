"""Saving and loading tables and plain tensors, and the yardsticks, each in a process of its own.

    python -m benchmarks.checkpoint_workers VARIANT THREADS

The command and its answer are those of `benchmarks.peers.checkpoint_peers`.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.peers.answering import serve
from benchmarks.peers.checkpoint_peers import UNIT, Rows, Subject, Worker

__all__ = ["WORKERS", "Kept", "Ours", "Plain", "Yardstick"]

_PIECE = 8 << 20


class Ours(Subject):
    """`Table.save`, which waits for the disk and writes what is new, and `Table.load`, which checks every byte."""

    packages = ("torch", "numpy")
    synced = True

    def open(self) -> None:
        source = self.source
        self._table = gear.Table.create(
            {name: gear.Column(torch.float32, shape) for name, shape in source.columns.items()},
            max_steps=source.total * source.steps,
            max_trajectories=source.total,
        )

    def add(self, first: int, rows: Rows) -> None:
        self._table.extend(rows, lengths=np.full(UNIT, self.source.steps))

    def save(self) -> None:
        self._table.save(os.path.join(self.folder, "table"))

    def restore(self) -> None:
        self._table = gear.Table.load(os.path.join(self.folder, "table"))

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        indices = self._table.indices().tolist()
        for first in range(0, len(indices), UNIT):
            each = [self._table[index] for index in indices[first : first + UNIT]]
            yield first, {name: torch.stack([one[name] for one in each]).numpy() for name in each[0]}

    def close(self) -> None:
        self._table.close()


class Plain(Subject):
    """`torch.save` of a flat tensor for each column, and `torch.load`; nothing waits for the disk."""

    packages = ("torch",)

    def open(self) -> None:
        source = self.source
        self._tensors = {
            n: torch.empty(source.total, source.steps, *shape) for n, shape in source.columns.items()
        }

    def add(self, first: int, rows: Rows) -> None:
        for name, values in rows.items():
            self._tensors[name][first : first + UNIT] = torch.from_numpy(values)

    def save(self) -> None:
        # A part of a tensor is saved with all of its memory, which has room for the last percent.
        torch.save(self._tensors, os.path.join(self.folder, "tensors.pt"))

    def restore(self) -> None:
        self._tensors = torch.load(os.path.join(self.folder, "tensors.pt"), weights_only=True)

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for first in range(0, self.source.total, UNIT):
            yield (
                first,
                {name: values[first : first + UNIT].numpy() for name, values in self._tensors.items()},
            )

    def close(self) -> None:
        self._tensors = {}


class Yardstick(Subject):
    """As many bytes: written to one file from a buffer, and synced; read from it into a buffer."""

    synced = True

    def open(self) -> None:
        self._path = os.path.join(self.folder, "bytes")
        self._memory: mmap.mmap | None = None
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

    def close(self) -> None:
        self._memory = None


class Kept(Yardstick):
    """The same, read into memory that is mapped for it, and keeps all of it."""

    def restore(self) -> None:
        memory = mmap.mmap(-1, self.source.payload, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # as a table's memory
        self._read, view = 0, memoryview(memory)
        with open(self._path, "rb", buffering=0) as file:
            while count := file.readinto(view[self._read : self._read + _PIECE]):
                self._read += count
        self._memory = memory


WORKERS: dict[str, Any] = {"yardstick": Yardstick, "read, kept": Kept, "ours": Ours, "torch.save": Plain}


if __name__ == "__main__":
    serve(WORKERS[sys.argv[1]], int(sys.argv[2]), Worker)
