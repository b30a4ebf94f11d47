"""Selection by priority as a task: what a variant is, how it is timed, and what its process does."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.peers import source

ALPHA, BETA = 0.6, 0.4
"""Of the variants that raise priorities to a power and weigh samples; the others take priorities as they are."""
OPERATIONS = ("draw", "update", "cycle")
SEED = 12


def priorities(items: int, seed: int) -> np.ndarray:
    """The priorities that every variant starts with: float32, uniform in (0, 1]."""
    values = np.random.default_rng(seed).random(items, dtype=np.float32)
    return np.subtract(np.float32(1), values, out=values)


def chunks(items: int, size: int = 1 << 18) -> Iterator[slice]:
    for first in range(0, items, size):
        yield slice(first, min(items, first + size))


def weighed(values: np.ndarray, power: float) -> np.ndarray:
    return values.astype(np.float64) ** power


class Subject(source.Subject):
    """A way of selecting by priority: `draw(batch)` with replacement; `update(drawn, values)` sets new priorities.

    items: how many there are. power: what priorities are raised to. item_bytes: memory that each needs about.
    """

    power = 1.0
    item_bytes: float = 24
    items: int
    draw: Callable[[int], Any]
    update: Callable[[Any, Any], None]

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """The items drawn, int64, and what they weigh, where `draw` tells."""
        return drawn  # type: ignore[no-any-return]

    def values(self, values: np.ndarray) -> Any:
        """Priorities, float32, in the form that `update` is meant for."""
        return values

    def chosen(self, items: np.ndarray) -> Any:
        """Items, int64, in the form that `draw` returns."""
        return items, None

    def set_all(self, priorities: np.ndarray) -> None:
        for part in chunks(len(priorities)):
            items = np.arange(part.start, part.stop)
            self.update(self.chosen(items), self.values(priorities[part]))

    def finish(self) -> None:
        """Wait until everything is done."""


def measure(subject: Subject, operation: str, batch: int, batches: int, random: np.random.Generator) -> float:
    """Seconds that `batches` operations take, after one more that is not timed (unless it is for a single one).

    New priorities are prepared beforehand, and for updates alone the items: uniformly random ones.
    """
    warm = int(batches > 1)
    count = batches + warm
    values = [subject.values(row) for row in np.float32(1) - random.random((count, batch), dtype=np.float32)]
    drawn = []
    if operation == "update":
        drawn = [subject.chosen(row) for row in random.integers(subject.items, size=(count, batch))]
    work = {
        "draw": lambda i: subject.draw(batch),
        "update": lambda i: subject.update(drawn[i], values[i]),
        "cycle": lambda i: subject.update(subject.draw(batch), values[i]),
    }[operation]
    if warm:
        work(batches)
    subject.finish()
    begin = time.perf_counter()
    for i in range(batches):
        work(i)
    subject.finish()
    return time.perf_counter() - begin


class Worker(source.Worker):
    """Builds a variant, draws, updates and measures."""

    random = np.random.default_rng(SEED)

    def build(self, items: int, seed: int) -> dict[str, Any]:
        """Make it with the usual priorities."""
        self.held = None  # first gives back what the one before held
        self.held = self.kind(items, priorities(items, seed))
        gc.collect()
        gc.freeze()  # what was imported and built is not looked through at each measurement
        return {}

    def draw(self, batch: int, times: int) -> dict[str, Any]:
        """So many batches, one after another in one list."""
        subject = self.subject
        items, leaves = zip(*(subject.found(subject.draw(batch)) for _ in range(times)), strict=True)
        told = None if leaves[0] is None else np.concatenate(leaves).tolist()
        return {"items": np.concatenate(items).tolist(), "leaves": told}

    def update(self, items: list[int], priorities: list[float]) -> None:
        subject = self.subject
        chosen = subject.chosen(np.array(items, dtype=np.int64))
        subject.update(chosen, subject.values(np.array(priorities, dtype=np.float32)))

    def measure(self, operation: str, batch: int, batches: int) -> dict[str, Any]:
        """Seconds of so many operations."""
        with source.undisturbed():
            return {"seconds": measure(self.subject, operation, batch, batches, self.random)}
