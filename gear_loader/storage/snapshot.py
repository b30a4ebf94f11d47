"""Snapshots of the live trajectories of a table, updated incrementally as the table changes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from gear_loader.storage.counters import NUM_READY, NUM_TOUCHED, VERSION
from gear_loader.storage.operations.view import View
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

_SLOT, _LENGTH, _GENERATION, _SEQUENCE, _END = range(5)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The live trajectories at one version of the index, oldest first; all arrays int64 [n]."""

    version: int
    slots: Array
    lengths: Array
    generations: Array
    sequences: Array
    running: Array | None = None
    """Running sum of the lengths plus a constant, int64 [n]; None if not computed."""

    def __len__(self) -> int:
        return len(self.slots)

    @functools.cached_property
    def sums(self) -> tuple[int, Array]:
        """A constant, and the running sum of the lengths plus this constant."""
        if self.running is None:
            return 0, np.cumsum(self.lengths)
        return (int(self.running[0] - self.lengths[0]), self.running) if len(self) else (0, self.running)

    @property
    def ends(self) -> Array:
        """Running sum of the lengths, int64 [n]: step i of the table lies in the first trajectory with end > i."""
        before, sums = self.sums
        return sums - before

    @property
    def num_steps(self) -> int:
        """Total number of steps."""
        before, sums = self.sums
        return int(sums[-1]) - before if len(self.slots) else 0

    def locate(self, steps: Array) -> tuple[Array, Array]:
        """Positions of the trajectories that hold `steps` of the table, int64 [m], and the steps within them."""
        before, sums = self.sums
        positions = np.searchsorted(sums, steps + before, side="right")
        return positions, steps + before - (sums[positions] - self.lengths[positions])

    def take(self, chosen: Array) -> Snapshot:
        """The snapshot restricted to the trajectories where `chosen`, bool [n], is True."""
        arrays = (self.slots, self.lengths, self.generations, self.sequences)
        return Snapshot(self.version, *(array[chosen] for array in arrays))


class Log:
    """Creates snapshots of an index; reads the changes since the previous one from the ring of touched slots.

    Trajectories are appended at the end of a buffer and mostly removed from its beginning. The part that a snapshot
    shows is never written again. The caller of a method holds the lock.

    Attributes:
        known: the latest snapshot, or None; read without the lock.
    """

    def __init__(self) -> None:
        self.known: Snapshot | None = None
        self._position = -1
        self._buffer: Array = np.empty((5, 0), dtype=np.int64)
        self._begin = self._end = 0

    def snapshot(self, index: View, touched_since: Callable[[int], Array | None]) -> Snapshot:
        """The live trajectories now.

        Args:
            index: index arrays.
            touched_since: returns the distinct slots touched since a position, or None if the ring has overflowed.
        """
        version = int(index.counters[VERSION])
        if self.known is None or self.known.version != version:
            position, self._position = self._position, -1  # after an interruption everything is read again
            touched = touched_since(position)
            many = touched is None or 4 * len(touched) > self._end - self._begin
            if touched is None or many or not self._follow(index, touched):
                self._rebuild(index)
            self._position = int(index.counters[NUM_TOUCHED])
            self.known = Snapshot(version, *self._buffer[:, self._begin : self._end])
        return self.known

    def _rebuild(self, index: View) -> None:
        slots = np.flatnonzero(index.state == READY)
        slots = slots[np.argsort(index.sequence[slots], kind="stable")]
        self._make(np.empty((5, 0), dtype=np.int64), len(slots))
        self._append(index, slots)

    def _follow(self, index: View, touched: Array) -> bool:
        """Apply the changes of some slots, int64 [n]; return False if a rebuild is as fast."""
        rows = self._buffer[:, self._begin : self._end]
        last = rows[_SEQUENCE, -1] if rows.shape[1] else -1
        live = index.state[touched] == READY
        rows = self._lengthened(index, rows, touched[live & (index.sequence[touched] <= last)])
        fresh = touched[live & (index.sequence[touched] > last)]
        fresh = fresh[np.argsort(index.sequence[fresh], kind="stable")]
        removed = rows.shape[1] + len(fresh) - int(index.counters[NUM_READY])
        if not 0 <= removed <= rows.shape[1]:
            return False
        if removed:
            kept = _is_live(index, rows[:, :removed])
            if kept.any():
                kept = _is_live(index, rows)
                rows = rows[:, kept]
                if rows.shape[1] + len(fresh) != index.counters[NUM_READY]:
                    return False
                self._make(rows, len(fresh))
            else:
                self._begin += removed
                rows = rows[:, removed:]
        if self._end + len(fresh) > self._buffer.shape[1]:
            self._make(rows, len(fresh))
        self._append(index, fresh)
        return True

    def _lengthened(self, index: View, rows: Array, slots: Array) -> Array:
        """`rows` with the present lengths of the trajectories in some slots, int64 [n]; the same array if none changed.

        Then the buffer is a new one: the part that a snapshot shows is never written again.
        """
        places = np.searchsorted(rows[_SEQUENCE], index.sequence[slots])
        lengths = index.extent[slots, 0]
        if (rows[_LENGTH, places] == lengths).all():
            return rows
        self._make(rows, 0)
        rows = self._buffer[:, self._begin : self._end]
        rows[_LENGTH, places] = lengths
        np.cumsum(rows[_LENGTH], out=rows[_END])
        return rows

    def _make(self, rows: Array, more: int) -> None:
        """Allocate a buffer that begins with `rows`, with capacity for twice as many and twice `more`."""
        count = rows.shape[1]
        self._buffer = np.empty((5, 2 * count + 2 * more + 64), dtype=np.int64)
        self._buffer[:_END, :count] = rows[:_END]
        np.cumsum(rows[_LENGTH], out=self._buffer[_END, :count])
        self._begin, self._end = 0, count

    def _append(self, index: View, slots: Array) -> None:
        begin, end = self._end, self._end + len(slots)
        rows = self._buffer[:, begin:end]
        rows[_SLOT] = slots
        rows[_LENGTH] = index.extent[slots, 0]
        rows[_GENERATION] = index.generation[slots]
        rows[_SEQUENCE] = index.sequence[slots]
        np.cumsum(rows[_LENGTH], out=rows[_END])
        if begin > 0:
            rows[_END] += self._buffer[_END, begin - 1]
        self._end = end


def _is_live(index: View, rows: Array) -> Array:
    slots = rows[_SLOT]
    kept: Array = (index.state[slots] == READY) & (index.generation[slots] == rows[_GENERATION])
    return kept
