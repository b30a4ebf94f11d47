"""cpprb's replay buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import batches, checkpoint, memory, online, select, transitions
from benchmarks.peers.select import ALPHA, BETA
from benchmarks.peers.source import Source, Steps

PACKAGES = MODULES = ("cpprb", "numpy")


def buffer(size: int, columns: Mapping[str, Any]) -> Any:
    from cpprb import ReplayBuffer

    return ReplayBuffer(size, columns)


def prioritized(size: int, columns: Mapping[str, Any]) -> Any:
    from cpprb import PrioritizedReplayBuffer

    return PrioritizedReplayBuffer(size, columns, alpha=ALPHA, eps=0.0)


def rows_of(source: Source) -> dict[str, Any]:
    """Columns of a buffer that has a trajectory a row."""
    return {n: {"shape": s, "dtype": np.float32} for n, s in source.shapes(source.steps).items()}


def steps_of(source: Source) -> dict[str, Any]:
    """Columns of a buffer of single steps."""
    return {name: {"shape": shape or 1, "dtype": np.float32} for name, shape in source.columns.items()}


class Selection(select.Subject):
    """`PrioritizedReplayBuffer` with one int32 column, so `sample` also gathers 4 bytes a row, and weights."""

    item_bytes = 40
    power = ALPHA

    def __init__(self, items: int, priorities: np.ndarray) -> None:
        self.items, self.store = items, prioritized(items, {"x": {"dtype": np.int32}})
        for part in select.chunks(items):
            self.store.add(x=np.arange(part.start, part.stop, dtype=np.int32), priorities=priorities[part])

    def draw(self, batch: int) -> Any:
        return self.store.sample(batch, beta=BETA)

    def update(self, drawn: Any, values: Any) -> None:
        self.store.update_priorities(drawn["indexes"], values)

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
        self.store, priorities = prioritized(len(source), rows_of(source)), source.priorities
        for first, values in source.stacked(batches.CHUNK):
            self.store.add(**values, priorities=priorities[first : first + batches.CHUNK])

    def batches(self) -> Iterator[Any]:
        while True:
            yield self.store.sample(self.batch, beta=BETA)

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["weights"])


class Checkpoint(checkpoint.Subject):
    """`save_transitions` and `load_transitions` of a `ReplayBuffer` with a row a trajectory.

    It writes one numpy archive, and does not wait for the disk.
    """

    def open(self) -> None:
        self.store = buffer(len(self.source), rows_of(self.source))

    def add(self, first: int, rows: Steps) -> None:
        self.store.add(**rows)

    def save(self) -> None:
        self.store.save_transitions(self.path("buffer.npz"))

    def restore(self) -> None:
        self.open()
        self.store.load_transitions(self.path("buffer.npz"))

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        rows, unit = self.store.get_all_transitions(), checkpoint.UNIT
        for first in range(0, self.store.get_stored_size(), unit):
            yield first, {name: rows[name][first : first + unit] for name in self.source.columns}


class Memory(memory.Subject):
    """`ReplayBuffer` of single steps; ``done`` tells where a trajectory ends."""

    def open(self) -> None:
        done = {"shape": 1, "dtype": np.bool_}
        self.store = buffer(self.source.total, {**steps_of(self.source), "done": done})

    def fill(self) -> None:
        for one in self.each():
            done = np.zeros(len(one[self.source.mark]), dtype=np.bool_)
            done[-1] = True
            self.store.add(**one, done=done)
            self.store.on_episode_end()

    def check(self) -> None:
        self._everything = self.store.get_all_transitions()
        super().check()
        del self._everything

    def read(self, i: int) -> Mapping[str, Any]:
        part = slice(self.source.begins[i], self.source.begins[i] + self.source.lengths[i])
        return {name: values[part] for name, values in self._everything.items()}


class Writer(online.Rows):
    """`ReplayBuffer.add`, of one row or of several."""

    def make(self, size: int, single: bool) -> None:
        self.store = buffer(size, (steps_of if single else rows_of)(self.source))

    def add(self, row: Any) -> None:
        self.store.add(**row)

    extend = add


class Transitions(transitions.Subject):
    """`ReplayBuffer` and `PrioritizedReplayBuffer`, next observations stored, or derived by ``next_of``.

    Derived ones need steps in the order of one environment.
    """

    settings = ({"next_of": False}, {"next_of": True})

    def open(self) -> None:
        columns = {"obs": {"shape": 4}, "action": {"dtype": np.int64}, "reward": {}, "next_obs": {"shape": 4}}
        columns["terminated"] = {"dtype": np.bool_}
        options: dict[str, Any] = {}
        if self.setting["next_of"]:
            del columns["next_obs"]
            options["next_of"] = "obs"
        if self.prioritized:
            from cpprb import PrioritizedReplayBuffer

            self.store = PrioritizedReplayBuffer(self.data.steps, columns, alpha=ALPHA, eps=0.0, **options)
        else:
            from cpprb import ReplayBuffer

            self.store = ReplayBuffer(self.data.steps, columns, **options)

    def fill(self) -> None:
        data = self.data
        for begin, end in zip(data.begins, data.begins + data.lengths, strict=True):
            steps = slice(begin, end)
            more = {"priorities": data.priorities[steps]} if self.prioritized else {}
            self.store.add(**data.columns(steps), **more)
            self.store.on_episode_end()

    def sample(self) -> Any:
        return self.store.sample(self.batch, BETA) if self.prioritized else self.store.sample(self.batch)

    def update(self, batch: Any, values: Any) -> None:
        self.store.update_priorities(batch["indexes"], values)

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["weights"])

    def calls(self, steps: np.ndarray, ends: np.ndarray) -> Iterator[Any]:
        rows = steps if self.envs > 1 else steps[:, 0]
        for row, done in zip(rows, ends, strict=True):
            yield self.data.columns(row), self.envs == 1 and done[0]

    def append(self, call: Any) -> None:
        row, ends = call
        self.store.add(**row)
        if ends:
            self.store.on_episode_end()


KINDS: dict[str, dict[str, Any]] = {
    "transitions": {"cpprb": Transitions},
    "batches": {"cpprb": Batches},
    "select": {"cpprb": Selection},
    "online": {"cpprb": Writer},
    "checkpoint": {"cpprb": Checkpoint},
    "memory": {"cpprb": Memory},
}
