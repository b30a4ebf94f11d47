"""Adding as a task: writers of a store, each in a process of its own, told when to start on the monotonic clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import source
from benchmarks.peers.source import Source, Steps

MODES = ("whole", "batches", "steps", "chunks 10", "chunks 50")
"""Whole trajectories one by one, or in batches; single steps, or so many at a time, made a trajectory when complete.

Besides, "commits": whole trajectories one by one, each of which is waited for.
"""
_MOST_WRITERS = 64


def item_of(mode: str) -> str:
    """What a mode's rate counts."""
    return "trajectory" if mode in ("whole", "batches", "commits") else "step"


def pieces(mode: str, steps: int) -> list[slice]:
    """The parts of a trajectory that are appended at a time."""
    count = int(mode.split()[1]) if mode.startswith("chunks") else 1
    return [slice(first, min(first + count, steps)) for first in range(0, steps, count)]


def trajectories_of(spec: Mapping[str, Any]) -> Source:
    """The trajectories of all writers: ``sources`` of each, one writer's after another's."""
    return Source({**spec, "trajectories": _MOST_WRITERS * spec["sources"]})


class Subject(source.Subject):
    """A writer of a store, which adds its trajectories over and over.

    `open` makes the store or attaches to it, `work` adds something and returns how many items that were, `check` raises
    `ValueError` unless what was added is there. spec: ``columns``, ``steps``, ``seed`` as in a `Source`;
    ``trajectories`` that the store has room for, ``sources`` of a writer, ``batch``. number: of the writer, of so many.
    address: where the store is; None makes it. source: trajectories of all writers. each, stacked, batches: its own.
    """

    modes: tuple[str, ...] = MODES  # what it can do
    several = False  # whether more processes may write
    waits = False  # whether it can do "commits" too
    open: Callable[[], None]
    work: Callable[[], int]
    check: Callable[[], None]

    def __init__(self, spec: dict[str, Any], mode: str, number: int, of: int, address: Any = None) -> None:
        self.spec, self.mode, self.number, self.of, self.address = spec, mode, number, of, address
        self.source, count = trajectories_of(spec), int(spec["sources"])
        self.steps, self.room, self.turn = int(spec["steps"]), int(spec["trajectories"]), 0
        ((_, self.stacked),) = self.source.stacked(count, number * count, (number + 1) * count)
        self.each = [{name: values[i] for name, values in self.stacked.items()} for i in range(count)]
        batch = min(int(spec["batch"]), count)
        firsts = range(0, count - batch + 1, batch)
        self.batches = [{n: values[i : i + batch] for n, values in self.stacked.items()} for i in firsts]
        self.open()

    def rows(self) -> list[list[Steps]]:
        """Its trajectories as single steps: for each trajectory, name -> ``[*shape]`` of each step."""
        return [[{n: v[t] for n, v in one.items()} for t in range(self.steps)] for one in self.each]

    def fill(self) -> None:
        if self.number == 0:
            done = 0
            while done < self.room * (1 if item_of(self.mode) == "trajectory" else self.steps):
                done += self.work()
            self.finish()

    def finish(self) -> None:
        """Wait until everything is stored."""

    def verify(self, rows: Mapping[str, Any]) -> None:
        """Compare whole trajectories, name -> ``[n, steps, *shape]``, or single steps, where these are added."""
        alone = self.mode == "steps" and rows[self.source.mark].size == len(rows[self.source.mark])
        self.source.verify(rows, 1 if alone else self.steps)

    def next(self, things: list[Any]) -> Any:
        """The next thing to add."""
        self.turn += 1
        return things[(self.turn - 1) % len(things)]


class Rows(Subject):
    """A writer of a buffer whose rows are trajectories or single steps.

    `make` makes it, `add` and `extend` add a row or several; `packed` and `split` make trajectories, and the steps of
    one, what it takes.
    """

    modes = ("whole", "batches", "steps")
    make: Callable[[int, bool], None]
    add: Callable[[Any], object]
    extend: Callable[[Any], object]

    def open(self) -> None:
        single = self.mode == "steps"
        self.size = self.room * (self.steps if single else 1)
        self.make(self.size, single)
        parts = self.each if single else self.batches
        self._group = len(parts[0][self.source.mark])
        self.groups = [self.packed(part, self._group) for part in parts]
        whole = [[self.packed(one)] for one in self.each]
        self.singles = [self.split(part) for part in self.groups] if single else whole

    def packed(self, values: Steps, *size: int) -> Any:
        return values

    def split(self, steps: Any) -> list[Any]:
        return [{n: v[t] for n, v in steps.items()} for t in range(self.steps)]

    def work(self) -> int:
        if self.mode == "batches":
            return self._extended()
        rows = self.next(self.singles)
        for row in rows:
            self.add(row)
        return len(rows)

    def _extended(self) -> int:
        self.extend(self.next(self.groups))
        return self._group

    def fill(self) -> None:
        done = 0
        while done < self.size:
            done += self._extended()

    def check(self) -> None:
        self.work()
        sample = self.store.sample(32)
        self.verify({name: np.asarray(sample[name]) for name in self.source.columns})


class Worker(source.Worker):
    """One writer."""

    def build(self, **arguments: Any) -> dict[str, Any]:
        """Make the writer; the first one makes the store and says where the others find it."""
        self.close()  # first gives back what the one before held
        self.held = self.kind(**arguments)
        gc.collect()
        return {"address": self.subject.address}

    def fill(self) -> None:
        self.subject.fill()

    def run(self, begin: float, seconds: float) -> dict[str, Any]:
        """Add for so many seconds from a point of the monotonic clock on."""
        subject = self.subject
        gc.disable()  # collected when the writer was made, which takes longer than a start may be late
        try:
            time.sleep(max(0.0, begin - time.monotonic()))
            start = now = time.monotonic()
            items, times = 0, [now]
            while now - start < seconds:
                items += subject.work()
                now = time.monotonic()
                if subject.mode == "commits":
                    times.append(now)
            subject.finish()
            answer = {"items": items, "seconds": time.monotonic() - start}
            if len(times) > 1:
                p50, p99 = np.quantile(np.diff(times), (0.5, 0.99)).tolist()
                answer.update(commit_p50=p50, commit_p99=p99)
            return answer
        finally:
            gc.enable()

    def check(self) -> None:
        self.subject.check()
