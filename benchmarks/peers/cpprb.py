"""cpprb's replay buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import batches, checkpoint, memory, online, select
from benchmarks.peers.select import ALPHA, BETA
from benchmarks.peers.source import Source, Steps

PACKAGES = ("cpprb", "numpy")


def load(task: str, threads: int) -> str | None:
    import cpprb  # noqa: F401

    return None


def rows_of(source: Source) -> dict[str, Any]:
    """Columns of a buffer that has a trajectory a row."""
    shapes = source.columns.items()
    return {name: {"shape": (source.steps, *shape), "dtype": np.float32} for name, shape in shapes}


def steps_of(source: Source) -> dict[str, Any]:
    """Columns of a buffer of single steps."""
    return {name: {"shape": shape or 1, "dtype": np.float32} for name, shape in source.columns.items()}


class Selection(select.Subject):
    """`PrioritizedReplayBuffer` with one int32 column, so `sample` also gathers 4 bytes a row, and weights."""

    item_bytes = 40
    power = ALPHA

    def __init__(self, items: int, priorities: np.ndarray) -> None:
        from cpprb import PrioritizedReplayBuffer

        self.items = items
        self._buffer = PrioritizedReplayBuffer(items, {"x": {"dtype": np.int32}}, alpha=ALPHA, eps=0.0)
        for part in select.chunks(items):
            self._buffer.add(x=np.arange(part.start, part.stop, dtype=np.int32), priorities=priorities[part])

    def draw(self, batch: int) -> Any:
        return self._buffer.sample(batch, beta=BETA)

    def update(self, drawn: Any, values: Any) -> None:
        self._buffer.update_priorities(drawn["indexes"], values)

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        items = drawn["indexes"].astype(np.int64)
        if not np.array_equal(drawn["x"][:, 0], items):
            raise ValueError("the rows are not those of the items drawn")
        return items, None

    def chosen(self, items: np.ndarray) -> Any:
        return {"indexes": items.astype(np.uint64)}


class Batches(batches.Subject):
    """`PrioritizedReplayBuffer`, a trajectory a row: `sample`."""

    cost = 2

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        from cpprb import PrioritizedReplayBuffer

        self._buffer = PrioritizedReplayBuffer(len(source), rows_of(source), alpha=ALPHA, eps=0.0)
        priorities = source.priorities
        for first, values in source.stacked(batches.CHUNK):
            self._buffer.add(**values, priorities=priorities[first : first + batches.CHUNK])

    def batches(self) -> Iterator[Any]:
        while True:
            yield self._buffer.sample(self.batch, beta=BETA)

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["weights"])


class Checkpoint(checkpoint.Subject):
    """`save_transitions` and `load_transitions` of a `ReplayBuffer` with a row a trajectory.

    It writes one numpy archive, and does not wait for the disk.
    """

    def open(self) -> None:
        from cpprb import ReplayBuffer

        self._buffer = ReplayBuffer(len(self.source), rows_of(self.source))

    def add(self, first: int, rows: Steps) -> None:
        self._buffer.add(**rows)

    def save(self) -> None:
        self._buffer.save_transitions(self.path("buffer.npz"))

    def restore(self) -> None:
        self.open()
        self._buffer.load_transitions(self.path("buffer.npz"))

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        rows, unit = self._buffer.get_all_transitions(), checkpoint.UNIT
        for first in range(0, self._buffer.get_stored_size(), unit):
            yield first, {name: rows[name][first : first + unit] for name in self.source.columns}

    def close(self) -> None:
        self._buffer = None


class Memory(memory.Subject):
    """`ReplayBuffer` of single steps; ``done`` tells where a trajectory ends."""

    def open(self) -> None:
        from cpprb import ReplayBuffer

        columns = {**steps_of(self.source), "done": {"shape": 1, "dtype": np.bool_}}
        self._buffer = ReplayBuffer(self.source.total, columns)

    def fill(self) -> None:
        for one in self.each():
            done = np.zeros(len(one[self.source.mark]), dtype=np.bool_)
            done[-1] = True
            self._buffer.add(**one, done=done)
            self._buffer.on_episode_end()

    def check(self) -> None:
        self._everything = self._buffer.get_all_transitions()
        super().check()
        del self._everything

    def read(self, i: int) -> Mapping[str, Any]:
        part = slice(self.source.begins[i], self.source.begins[i] + self.source.lengths[i])
        return {name: values[part] for name, values in self._everything.items()}

    def close(self) -> None:
        del self._buffer


class Writer(online.Subject):
    """`ReplayBuffer.add`, of one row or of several."""

    modes = ("whole", "batches", "steps")

    def open(self) -> None:
        from cpprb import ReplayBuffer

        single = self.mode == "steps"
        self._size = self.room * (self.steps if single else 1)
        self._buffer = ReplayBuffer(self._size, (steps_of if single else rows_of)(self.source))
        self._several = self.each if single else self.batches
        self._each = self.rows() if single else [[one] for one in self.each]

    def work(self) -> int:
        if self.mode == "batches":
            return self._extend()
        rows = self.next(self._each)
        for row in rows:
            self._buffer.add(**row)
        return len(rows)

    def _extend(self) -> int:
        batch = self.next(self._several)
        self._buffer.add(**batch)
        return len(batch[self.source.mark])

    def fill(self) -> None:
        while self._buffer.get_stored_size() < self._size:
            self._extend()

    def check(self) -> None:
        self.work()
        rows = self._buffer.sample(32)
        self.verify({name: rows[name] for name in self.source.columns})


KINDS: dict[str, dict[str, Any]] = {
    "batches": {"cpprb": Batches},
    "select": {"cpprb": Selection},
    "online": {"cpprb": Writer},
    "checkpoint": {"cpprb": Checkpoint},
    "memory": {"cpprb": Memory},
}
