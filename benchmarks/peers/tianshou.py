"""Tianshou's sum tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers import select

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


KINDS: dict[str, dict[str, Any]] = {"select": {"Tianshou tree": Tree}}
