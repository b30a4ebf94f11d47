"""Tianshou's sum tree and replay buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import select, transitions
from benchmarks.peers.select import ALPHA, BETA

PACKAGES = ("tianshou", "numba", "numpy")
MODULES = ("tianshou.data",)


class Tree(select.Subject):
    """Its numba `SegmentTree`: sums only (64-bit), no minima."""

    def __init__(self, items: int, priorities: np.ndarray) -> None:
        from tianshou.data import SegmentTree

        self.items, self._tree = items, SegmentTree(items)
        self._random = np.random.default_rng(select.SEED)
        self.set_all(priorities)

    def draw(self, batch: int) -> Any:
        index = self._tree.get_prefix_sum_idx(self._random.random(batch) * self._tree.reduce())
        return index, self._tree[index]

    def update(self, drawn: Any, values: Any) -> None:
        self._tree[drawn[0]] = values


_NAMES = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "obs_next", "terminated": "terminated"}


class Transitions(transitions.Subject):
    """`ReplayBuffer`, `PrioritizedReplayBuffer`, and `VectorReplayBuffer` for several environments.

    Next observations are stored: derived ones are wrong where an episode is cut off.
    """

    def open(self) -> None:
        from tianshou import data

        self._batch, size = data.Batch, self.data.steps
        np.random.seed(self.data.seed)  # noqa: NPY002 - it draws by the global state
        if self.prioritized:
            self.store = data.PrioritizedReplayBuffer(size, alpha=ALPHA, beta=BETA)
        elif self.envs > 1:
            self.store = data.VectorReplayBuffer(size, self.envs)
        else:
            self.store = data.ReplayBuffer(size)

    def _rows(self, steps: Any = slice(None)) -> dict[str, Any]:
        rows = {_NAMES[name]: values for name, values in self.data.columns(steps).items()}
        return {**rows, "truncated": self.data.truncated[steps]}

    def fill(self) -> None:
        """As its `from_data` does."""
        store, rows = self.store, self._rows(slice(self.data.steps // self.envs * self.envs))
        store.set_batch(self._batch(**rows, done=rows["terminated"] | rows["truncated"]))
        for part in getattr(store, "buffers", [store]):
            part._size = part.maxsize
        if self.envs > 1:
            store._lengths[:] = [len(part) for part in store.buffers]
        if self.prioritized:
            store.update_weight(np.arange(self.data.steps), self.data.priorities)

    def sample(self) -> Any:
        return self.store.sample(self.batch)

    def update(self, batch: Any, values: Any) -> None:
        self.store.update_weight(batch[1], values)

    def found(self, batch: Any) -> Mapping[str, Any]:
        return {name: batch[0][theirs] for name, theirs in _NAMES.items()}

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch[0].weight)

    def calls(self, steps: np.ndarray, ends: np.ndarray) -> Iterator[Any]:
        rows = steps if self.envs > 1 else steps[:, 0]
        for row, done in zip(rows, ends, strict=True):
            values = self._rows(row)
            values["truncated"] = (done if self.envs > 1 else done[0]) & ~values["terminated"]
            yield self._batch(**values)

    def append(self, call: Any) -> None:
        self.store.add(call)


KINDS: dict[str, dict[str, Any]] = {
    "select": {"Tianshou tree": Tree},
    "transitions": {"Tianshou": Transitions},
}
