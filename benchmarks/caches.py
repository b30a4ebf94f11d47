"""Simulated choices of what to keep near, beside ours: LRU, FIFO, at random, and the best that never changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from gear_loader.utils.arrays import Array


class Cache:
    """Holds at most `capacity` items; the first to leave is the one read longest ago (LRU), or that came first (FIFO).

    Args:
        lru: LRU if True, else FIFO. kept: items that it has at first.
    """

    def __init__(self, capacity: int, *, lru: bool, kept: Iterable[int] = ()) -> None:
        self._capacity, self._lru = capacity, lru
        self._items: OrderedDict[int, None] = OrderedDict.fromkeys(kept)

    def read(self, items: Array) -> int:
        """Read items, int64 [n], one after another; returns how many it had."""
        hits, held = 0, self._items
        for item in items.tolist():
            if item in held:
                hits += 1
                if self._lru:
                    held.move_to_end(item)
            else:
                if len(held) == self._capacity:
                    held.popitem(last=False)
                held[item] = None
        return hits

    def drop(self, items: Array) -> None:
        """Forget items that no longer exist."""
        for item in items.tolist():
            self._items.pop(item, None)


class Others:
    """The policies that ours is compared with, for the same draws.

    Args:
        shares: float64 [rounds, n], how likely each item is drawn; each round sums to 1. capacity: items kept.
        warm: whether LRU and FIFO begin with the choice at random instead of empty.

    Attributes:
        random: bool [n], what a choice at random keeps.
    """

    def __init__(self, shares: Array, capacity: int, generator: np.random.Generator, *, warm: bool) -> None:
        count = shares.shape[1]
        self._best, self.random = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        self._best[np.argsort(shares.sum(axis=0))[count - capacity :]] = True
        self.random[generator.permutation(count)[:capacity]] = True
        kept = np.flatnonzero(self.random).tolist() if warm else ()
        self.caches = {name: Cache(capacity, lru=name == "lru", kept=kept) for name in ("lru", "fifo")}
        self._hits = dict.fromkeys(("oracle", "lru", "fifo", "random"), 0)
        self._drawn = 0

    def draw(self, drawn: Array, *, counted: bool = True) -> None:
        """Read items, int64 [n], and count the hits unless the caches are still filling."""
        self._drawn += counted * len(drawn)
        for name, inside in (("oracle", self._best), ("random", self.random)):
            self._hits[name] += counted * int(inside[drawn].sum())
        for name, cache in self.caches.items():
            self._hits[name] += cache.read(drawn) * counted

    def rates(self) -> dict[str, float]:
        """Share of the counted draws that were hits, by policy."""
        return {name: found / self._drawn for name, found in self._hits.items()}
