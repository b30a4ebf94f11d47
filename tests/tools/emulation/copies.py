"""Asynchronous copies into shared memory, which are complete as late as they may be."""

from __future__ import annotations

import numpy as np

from .arithmetic import Array
from .memory import WRITE, Accesses, RaceError

_Copy = tuple[
    Array, Array, Array, int
]  # positions [n, width], data [n, width], warps [n], line of the instruction


class AsyncCopies:
    """The copies of a block: those of a group are written when the block waits for the group, and not before.

    Args:
        shared: uint8 [n], the block's shared memory.
        accesses: of that memory; a copy counts as a write when it begins and when it is complete.
    """

    def __init__(self, shared: Array, accesses: Accesses) -> None:
        self._shared, self._accesses = shared, accesses
        self._groups: list[list[_Copy]] = [[]]  # the open one last
        self._under_way = np.zeros(len(shared), dtype=bool)

    def begin(self, places: Array, data: Array, warps: Array, line: int, what: str) -> None:
        """Warps start to copy `data` to these positions."""
        self.check(places, what)
        self._under_way[places] = True
        self._shared[places] = 0xA5
        self._accesses.note(places[:, 0].astype(np.uint64), places.shape[1], warps, WRITE, line, data)
        self._groups[-1].append((places, data, warps, line))

    def commit(self) -> None:
        """Close a group."""
        self._groups.append([])

    def wait(self, left: int) -> None:
        """Complete all groups but the last `left`."""
        for group in self._groups[: max(len(self._groups) - 1 - left, 0)]:
            for places, data, warps, line in group:
                self._shared[places] = data
                self._under_way[places] = False
                self._accesses.note(places[:, 0].astype(np.uint64), places.shape[1], warps, WRITE, line, data)
            group.clear()

    def check(self, places: Array, what: str) -> None:
        """Raise RaceError if a copy to one of these positions has not been waited for."""
        if self._under_way[places].any():
            raise RaceError(f"{what}: shared memory that an asynchronous copy has not been waited for.")
