"""Writers of this project's tables, and the yardsticks beside them, each in a process of its own.

    python -m benchmarks.online_workers VARIANT THREADS

Commands and answers are those of `benchmarks.peers.online_peers`; the address is a table's name.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.peers.answering import serve
from benchmarks.peers.online_peers import Subject, Worker, pieces
from gear_loader.errors import RateLimitError

__all__ = ["PATIENCE", "WORKERS", "Memcpy", "Ours", "Torch"]

PATIENCE = 0.2
"""Seconds that a writer waits for the rate limiter, until it looks whether its time is over."""

_KEPT = 4
_tables: dict[
    str, gear.Table
] = {}  # the last few are kept: a mapping made anew would have to be paged in anew
_warm: set[str] = set()


def _attached(name: str) -> gear.Table:
    if name not in _tables:
        while len(_tables) >= _KEPT:
            _tables.pop(next(iter(_tables))).close()
        _tables[name] = gear.Table.attach(name, timeout=PATIENCE)
    return _tables[name]


class Ours(Subject):
    """`Table.add`, `Table.extend`, and the writer's `append` of single steps and of several."""

    packages = ("torch", "numpy")
    several = True

    def open(self) -> None:
        self._table = _attached(self.address)
        self._batches = [
            (batch, np.full(len(batch[self.source.mark]), self.source.steps)) for batch in self.source.batches
        ]
        self._writer = None
        if self.mode not in ("whole", "batches"):
            self._writer = self._table.writer()
            parts = pieces(self.mode, self.source.steps)
            single = self.mode == "steps"
            self._pieces = [
                [{n: v[part.start if single else part] for n, v in one.items()} for part in parts]
                for one in self.source.each
            ]

    def work(self) -> int:
        try:
            if self.mode == "whole":
                self._table.add(self.next(self.source.each))
                return 1
            if self._writer is None:
                return self._extend()
            append = self._writer.append
            for piece in self.next(self._pieces):
                append(piece)
            self._writer.commit()
            return self.source.steps
        except RateLimitError:  # the others may have stopped
            if self._writer is not None:
                self._writer.discard()
            return 0

    def _extend(self) -> int:
        batch, lengths = self.next(self._batches)
        self._table.extend(batch, lengths=lengths)
        return len(lengths)

    def fill(self) -> None:
        """Write to every block once, which also pages it in here."""
        if self.address not in _warm:
            done = 0
            while done < self.spec["trajectories"]:
                done += self._extend()
            _warm.add(self.address)

    def check(self) -> None:
        """The other side looks into the table."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Memcpy(Subject):
    """A plain copy of as many bytes, in one piece, into the same kind of memory: the largest column of a table."""

    packages = ("torch", "numpy")
    several = True

    def open(self) -> None:
        column = max(self.spec["columns"], key=lambda name: np.prod(self.spec["columns"][name]))
        part = np.array_split(_attached(self.address).region.column(column).reshape(-1), self.of)[self.number]
        self._memory = part
        one = sum(values[0].nbytes for values in self.source.stacked.values())
        self._arena = np.frombuffer(
            b"".join(values.tobytes() for one in self.source.each for values in one.values()), dtype=np.uint8
        )
        batch = min(self.spec["batch"], self.source.count)
        self._items = {"whole": 1, "batches": batch}.get(self.mode, self.source.steps)
        self._sizes = [one * self._items]
        if self.mode not in ("whole", "batches"):
            parts = pieces(self.mode, self.source.steps)
            self._sizes = [(part.stop - part.start) * one // self.source.steps for part in parts]
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


class Torch(Subject):
    """torch alone: `copy_` into tensors ``[trajectories, steps, ...]`` that were made before, one after another."""

    packages = ("torch",)

    def open(self) -> None:
        steps, count = self.source.steps, self.spec["trajectories"]
        self._store = {
            name: torch.empty(count, steps, *shape) for name, shape in self.spec["columns"].items()
        }
        self._place = 0

        def tensors(values: dict[str, np.ndarray]) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(self._store[name], torch.from_numpy(array)) for name, array in values.items()]

        self._each = [tensors(one) for one in self.source.each]
        self._batches = [tensors(batch) for batch in self.source.batches]
        self._pieces = [] if self.mode in ("whole", "batches") else pieces(self.mode, steps)

    def work(self) -> int:
        place = self._place
        if self.mode == "batches":
            batch = self.next(self._batches)
            count = len(batch[0][1])
            if place + count > self.spec["trajectories"]:
                place = 0
            for store, values in batch:
                store[place : place + count].copy_(values)
            self._place = place + count
            return count
        if place == self.spec["trajectories"]:
            place = 0
        one = self.next(self._each)
        self._place = place + 1
        if self.mode == "whole":
            for store, values in one:
                store[place].copy_(values)
            return 1
        single = self.mode == "steps"
        for piece in self._pieces:
            at: Any = piece.start if single else piece
            for store, values in one:
                store[place, at].copy_(values[at])
        return self.source.steps

    def fill(self) -> None:
        for values in self._store.values():
            values.zero_()

    def check(self) -> None:
        before = self._place % self.spec["trajectories"]
        self.work()
        first = self._place - (len(self._batches[0][0][1]) if self.mode == "batches" else 1)
        if first not in (before, 0):
            raise ValueError(f"place {first} was written, after {before}")
        self.source.verify({n: values[first : self._place].numpy() for n, values in self._store.items()})


WORKERS: dict[str, Any] = {"ours": Ours, "memcpy": Memcpy, "torch": Torch}


if __name__ == "__main__":
    serve(WORKERS[sys.argv[1]], int(sys.argv[2]), Worker)
