"""Memory of trajectories of uneven length as a task, in a process in which nothing else has happened before.

First a few trajectories are stored and forgotten, so that what is loaded on first use does not count. Then all are
stored, some are read back and compared, what was needed for a moment only is given back to the system, and the growth
of the process's own resident memory (anonymous, as nothing is stored in files) is the figure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import source
from benchmarks.peers.source import Source, Steps

BATCH = 64
"""Trajectories that are handed over at a time, where that can be."""


class Subject(source.Subject):
    """A store of trajectories, with options of the variant.

    `open` makes it, with room for all trajectories of the source and no more, `fill` stores them, `read(i)` gives one
    as it is in the store: name -> ``[T, *shape]``.
    """

    open: Callable[[], None]
    fill: Callable[[], None]
    read: Callable[[int], Mapping[str, Any]]

    def __init__(self, source: Source, **options: Any) -> None:
        self.source, self.options = source, options
        self.open()

    def each(self) -> Iterator[Steps]:
        """All trajectories, one after another."""
        for _, batch in self.source.parts(BATCH):
            yield from batch

    def check(self) -> None:
        """Raise `ValueError` unless some that are looked at are what was stored."""
        lengths = self.source.lengths
        others = np.random.default_rng(self.source.seed).integers(len(lengths), size=16).tolist()
        for i in {0, len(lengths) - 1, int(np.argmax(lengths)), int(np.argmin(lengths)), *others}:
            self.verify(self.read(i), i)

    def verify(self, rows: Mapping[str, Any], i: int | None = None) -> None:
        """Compare one trajectory with what was stored, of the number `i` if it is known."""
        found = self.source.verify({name: np.asarray(rows[name])[None] for name in self.source.columns})
        if i is not None and found[0] != self.source.begins[i]:
            raise ValueError(f"another trajectory is in the place of {i}")

    def beside(self) -> int:
        """Bytes that it holds outside of this process's own memory."""
        return 0

    def extras(self) -> dict[str, float]:
        return {}


def resident() -> int:
    """Bytes of this process's own memory, after what is not in use has been given back: without files."""
    source.give_back()
    return source.memory_of("Anonymous")


class Worker(source.Worker):
    """Measures one store."""

    def measure(self, spec: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Bytes resident, and those of the payload. spec: of a `Source`. options: of the variant."""
        trajectories, lengths = Source(spec), spec["lengths"]
        few = lengths[
            -(BATCH + len(lengths) % BATCH) :
        ]  # a whole batch, and the last one, which may be smaller
        with contextlib.closing(self.kind(Source({**spec, "lengths": few}), **options)) as small:
            small.fill()
            small.check()
        del small
        before = resident()
        with contextlib.closing(self.kind(trajectories, **options)) as subject:
            subject.fill()
            subject.check()
            held = resident() - before + subject.beside()
            return {"bytes": held, "payload": trajectories.payload, "extras": subject.extras()}
