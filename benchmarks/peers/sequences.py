"""Sequences of uneven length as a task: a store is filled, and batches of given ones are read, checked and timed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.peers import source

CHUNK = 200  # sequences that are stored at a time


class Subject(source.Subject):
    """A store of sequences: `fill` stores them, `read` returns a batch.

    Attributes:
        columns: number of columns of int32. lengths: of the sequences. starts: number of each one's first step.
    """

    def __init__(self, columns: int, lengths: list[int]) -> None:
        self.columns, self.lengths = columns, np.array(lengths, dtype=np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths

    def values(self, column: int, number: int) -> np.ndarray:
        """The steps of a sequence: their numbers, counted from that of the column."""
        start = int(self.starts[number])
        return np.arange(start, start + int(self.lengths[number]), dtype=np.int32) + np.int32(column)

    def fill(self) -> None:
        """Store all sequences."""
        raise NotImplementedError

    def read(self, chosen: list[int]) -> Any:
        """A batch of these sequences."""
        raise NotImplementedError

    def rows(self, batch: Any, column: int) -> list[np.ndarray]:
        """The rows of a batch in one column."""
        raise NotImplementedError


class Worker(source.Worker):
    """Batches of sequences of one variant."""

    def build(self, columns: int, lengths: list[int]) -> None:
        self.close()
        self.held = self.kind(columns, lengths)
        self.subject.fill()

    def check(self, batches: list[list[int]]) -> dict[str, Any]:
        """Compare batches with what was stored."""
        subject = self.subject
        for chosen in batches:
            batch = subject.read(chosen)
            for column in range(subject.columns):
                for number, row in zip(chosen, subject.rows(batch, column), strict=True):
                    if not np.array_equal(row, subject.values(column, number)):
                        raise ValueError(f"row {number} of column {column} is not what was stored")
        return {}

    def measure(self, batches: list[list[int]]) -> dict[str, Any]:
        """Seconds of these batches."""
        subject = self.subject
        with source.undisturbed():
            started = time.perf_counter()
            for chosen in batches:
                subject.read(chosen)
            return {"seconds": time.perf_counter() - started}
