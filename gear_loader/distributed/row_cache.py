"""The cache for rows of other nodes: those that are likely to be drawn again are kept in local host memory."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from gear_loader.native import row_cache as loops
from gear_loader.native.row_cache import ABSENT, KEY
from gear_loader.utils.arrays import Array

_ALIGNMENT = 16  # bytes, of an entry
_ENTRY_BYTES = 8 * KEY + 8 + 16 + 8  # of an entry's key, value, places in the index, and of the sort
_SLAB_BYTES = 1 << 26
_SLABS = 8  # least number of slabs that the budget is cut into
_LISTED = 16  # a list of the coldest entries has at most one of so many
_TRUSTED = 4.0  # draws that a known probability is worth against draws that did not come
_HOTTER = 1.25  # times that a row must be more probable than the entry whose place it takes
_IDLE = 3.0  # mean times between draws after which an entry makes room, where no probability is known
_SMOOTHING = 0.05  # of that mean time


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """State of the cache of remote rows.

    Attributes:
        budget_bytes: as given. resident_bytes: of its rows and their index; never more than `budget_bytes`.
        num_rows: rows that it holds.
        num_hits, num_misses: remote rows drawn so far that were in the cache, and that were not.
        saved_bytes: bytes of the rows that did not have to be sent.
    """

    budget_bytes: int
    resident_bytes: int
    num_rows: int
    num_hits: int
    num_misses: int
    saved_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the remote rows that were in the cache; 0 before the first one."""
        return self.num_hits / max(1, self.num_hits + self.num_misses)


class CacheBudget:
    """The bytes that the caches of all datasets over one `Shards` may use together; thread-safe."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._guard = threading.Lock()
        self._used = self._rows = self._hits = self._misses = self._saved = 0

    @property
    def left(self) -> int:
        """Bytes that are not used."""
        return self.total - self._used

    def take(self, count: int) -> bool:
        """Take so many bytes, if they are left."""
        with self._guard:
            if count > self.total - self._used:
                return False
            self._used += count
            return True

    def give(self, count: int, rows: int) -> None:
        """Give back bytes, and the count of rows in them."""
        with self._guard:
            self._used -= count
            self._rows -= rows

    def count(self, *, rows: int = 0, hits: int = 0, misses: int = 0, saved: int = 0) -> None:
        """Add to the counters of `stats`."""
        with self._guard:
            self._rows += rows
            self._hits += hits
            self._misses += misses
            self._saved += saved

    def stats(self) -> CacheStats:
        """Return the state of all caches."""
        with self._guard:
            counts = self._rows, self._hits, self._misses, self._saved
            return CacheStats(self.total, self._used, *counts)


class _Holding:
    """What a cache has taken of its budget."""

    def __init__(self) -> None:
        self.num_bytes = self.num_rows = 0

    def end(self, budget: CacheBudget) -> None:
        budget.give(self.num_bytes, self.num_rows)


class RowCache:
    """Rows of other nodes, as the collector of one dataset has received them.

    An entry is the windows of one row. Its key names shard, slot and step, and has the generation and the extent
    (number of steps, and of final steps) of the trajectory. Each owner sends both with every row that it draws.
    Trajectories do not change, except that some grow, so an entry with the same key is the same row: an evicted
    trajectory, whose slot is used again, has another generation, one that has grown another extent.

    Which rows stay: the coldest entries make room, and only for rows that are hotter by a margin. Where rows are drawn
    by priority, the owner has sent the leaf of the row, so that p draws are expected a batch. After a batches without
    a draw, coldness is k / p + a: k over the mean of a gamma prior of k draws at the rate p. So an entry that is gone,
    or whose priority has fallen, cools down, and the order of entries does not depend on when they are compared. Else
    coldness is the number of batches since the row was drawn last.

    Not thread-safe: one collector uses it, batch after batch.

    Args:
        budget: bytes for this and other caches. Memory is taken from it as the cache fills.
        sizes: bytes of a row in each piece, in the order of `WindowSpec.pieces`.
    """

    def __init__(self, budget: CacheBudget, sizes: Sequence[int]) -> None:
        self._budget = budget
        self.row_bytes = sum(sizes)
        self._offsets = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        self._sizes: Array = np.array(sizes, dtype=np.int64)
        self._stride = -(-self.row_bytes // _ALIGNMENT) * _ALIGNMENT
        self._capacity = budget.left // (self._stride + _ENTRY_BYTES)
        self._holding = _Holding()
        weakref.finalize(self, self._holding.end, budget)
        if not self._take(self._capacity * _ENTRY_BYTES):
            self._capacity = 0
        most = self._capacity
        self._index = np.full(1 << max(1, (2 * most - 1).bit_length()), ABSENT, dtype=np.int32)
        self._keys: Array = np.zeros((most, KEY), dtype=np.int64)
        self._value: Array = np.zeros(most, dtype=np.float64)
        self._state: Array = np.zeros(3, dtype=np.int64)
        self._coldest: Array = np.empty(0, dtype=np.int64)
        self._threshold = 0.0
        self._slab_rows = max(1, min(_SLAB_BYTES // self._stride, -(-most // _SLABS)))
        self._slabs: list[Array] = []
        self._bases: Array = np.empty(0, dtype=np.int64)
        self._now = 0.0
        self._gap = 0.0  # mean number of batches between two draws of an entry
        self._drawn = 1.0  # mean number of rows of other nodes in a batch

    def _take(self, count: int) -> bool:
        if not self._budget.take(count):
            return False
        self._holding.num_bytes += count
        return True

    # ---------------------------------------------------------------- reading

    @staticmethod
    def keys_of(shards: Array, records: Array) -> Array:
        """Return the keys of rows, int64 [n, KEY].

        Args:
            shards: shard of each row, int64 [n]. records: their records, with the extents of their trajectories.
        """
        keys: Array = np.empty((len(records), KEY), dtype=np.int64)
        keys[:, 0] = shards
        for i, name in enumerate(("slot", "step", "generation"), 1):
            keys[:, i] = records[name]
        keys[:, 4] = 2 * records["steps"] + records["final"]
        return keys

    def find(self, keys: Array, rates: Array | None) -> Array:
        """Find the rows of the next batch.

        Args:
            rates: expected number of draws of each row in a batch, float64 [n]; None if it is not known.

        Returns:
            The entry of each row, int64 [n]; -1 for rows that the cache does not have.
        """
        self._now += 1
        self._drawn += _SMOOTHING * (len(keys) - self._drawn)
        found: Array = np.empty(len(keys), dtype=np.int64)
        loops.find(self._index, self._keys, keys, found)
        hit = found >= 0
        entries = found[hit]
        if rates is None and len(entries):
            self._gap += _SMOOTHING * (float((self._now + self._value[entries]).mean()) - self._gap)
        self._value[entries] = self._values(None if rates is None else rates[hit], len(entries))
        count = len(entries)
        self._budget.count(hits=count, misses=len(keys) - count, saved=count * self.row_bytes)
        return found

    def load(self, entries: Array, outs: Array, rows: Array) -> None:
        """Copy entries to rows of a batch.

        Args:
            entries: from `find`, int64 [n]. outs: address of row 0 of each piece's output, int64 [P].
            rows: row of the output of each entry, int64 [n].
        """
        loops.load_rows(self._addresses(entries), self._pieces(outs), rows)

    def _addresses(self, entries: Array) -> Array:
        found: Array = self._bases[entries // self._slab_rows] + entries % self._slab_rows * self._stride
        return found

    def _pieces(self, addresses: Array) -> Array:
        return np.stack((self._offsets, addresses, self._sizes), axis=1)

    # ---------------------------------------------------------------- what is kept

    def _values(self, rates: Array | None, count: int) -> Array:
        """Return how cold rows are that are drawn now, less the time: see the class; float64 [n]."""
        if rates is None:
            return np.full(count, -self._now)
        values: Array = _TRUSTED / np.maximum(rates, 1e-300) - self._now
        return values

    def _least(self, rates: Array | None, count: int) -> Array:
        """Return how cold an entry must be to make room for rows that are drawn now, float64 [n]."""
        if rates is None:
            # If the cache is full there are more rows than it holds, of which each is drawn as often as any other.
            gap = max(self._gap, int(self._state[0]) / self._drawn)
            return np.full(count, _IDLE * gap)
        least: Array = _HOTTER * _TRUSTED / np.maximum(rates, 1e-300)
        return least

    def keep(self, keys: Array, rates: Array | None, sources: Array, rows: Array) -> None:
        """Keep rows that were received, as far as they are worth it.

        Args:
            keys, rates: of the rows, as for `find`.
            sources: address of row 0 of each piece in memory, int64 [P].
            rows: row there of each of them, int64 [n].
        """
        if not self._capacity or not len(keys):
            return
        try:
            self._keep(keys, rates, sources, rows)
        except BaseException:  # an interrupt may come between keys and bytes
            self.clear()
            raise

    def clear(self) -> None:
        """Forget all rows; their memory stays taken."""
        self._index[:] = ABSENT
        self._budget.count(rows=-self._holding.num_rows)
        self._holding.num_rows = 0
        self._state[0] = self._state[2] = 0
        self._coldest = self._coldest[:0]

    def _keep(self, keys: Array, rates: Array | None, sources: Array, rows: Array) -> None:
        values, least = self._values(rates, len(keys)), self._least(rates, len(keys))
        entries: Array = np.empty(len(keys), dtype=np.int64)
        done, before = 0, int(self._state[0])
        while done < len(keys):
            self._make_room(len(keys) - done)
            if not self._state[1]:
                return
            done += loops.put(
                *(self._index, self._keys, self._value, self._state, self._coldest, self._threshold),
                *(keys[done:], values[done:], least[done:], self._now, entries[done:]),
            )
        added = int(self._state[0]) - before
        self._holding.num_rows += added
        self._budget.count(rows=added)
        kept = entries >= 0
        loops.save_rows(self._addresses(entries[kept]), self._pieces(sources), rows[kept])

    def _make_room(self, wanted: int) -> None:
        """Take memory for so many entries if there is some; else list the coldest ones, if none is listed."""
        used, usable, listed = self._state.tolist()
        while used + wanted > usable and usable < self._capacity:
            count = min(self._slab_rows, self._capacity - usable)
            if not self._take(count * self._stride):
                self._capacity = usable  # another cache has the rest
                break
            self._slabs.append(np.empty(count * self._stride, dtype=np.uint8))
            self._bases = np.append(self._bases, self._slabs[-1].ctypes.data)
            usable = self._state[1] = usable + count
        if used < usable or listed < len(self._coldest) or not usable:
            return
        value = self._value[:usable]
        count = max(1, usable // _LISTED)
        listed_now = np.argpartition(value, usable - count)[usable - count :]
        self._coldest = listed_now[np.argsort(-value[listed_now], kind="stable")]
        self._threshold = float(value[self._coldest[-1]])
        self._state[2] = 0
