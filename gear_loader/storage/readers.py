"""Read tickets: blocks are not reused until the processes that may read them end their tickets, or die."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gear_loader.errors import GearError
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.lock import process_start
from gear_loader.storage.operations.view import READING, TICKET

_T = TypeVar("_T")
_numbers = itertools.count(1)


class Ticket:
    """Keeps the current contents of a table readable from `begin` to `end`. Used for one read.

    Its number identifies its row in `readers` even if `begin` was interrupted, so `end` in an exception handler always
    releases it; at the latest it is released when nothing refers to it any longer. In a forked child it has no effect.

    Attributes:
        number: unique in this process.
        row: row in `readers`; -1 until known.
        counted: rows counted as drawn under the ticket.
    """

    __slots__ = ("_pid", "_readers", "counted", "number", "row")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.row = -1
        self.counted = 0
        self._pid = (_own or _here())[0]
        self._readers: Readers | None = None

    def __del__(self) -> None:
        # What interrupted its user may have come in the call of `end`.
        if getattr(self, "_readers", None) is not None and not sys.is_finalizing():
            self.end()

    def during(self, section: Callable[[], _T]) -> _T:
        """Call a function that begins the ticket, and end it, also if an exception arrives at any bytecode."""
        try:
            try:
                return section()
            finally:
                self.end()
        finally:
            self.end()  # again: the call above may be interrupted

    def begin(self, readers: Readers) -> None:
        """Register the ticket; the caller holds the lock. Raises `GearError` if all rows of `readers` are in use."""
        self._readers = readers  # before the registration: from here on `end` searches for the row
        self.row = readers.take(self.number)

    def begin_unchanged(self, readers: Readers, counter: int, value: int, samples: int) -> bool:
        """Register the ticket and count rows as drawn, if nothing has changed; see `operations.begin_unchanged`."""
        pid, start = _own or _here()
        self._readers = readers
        row: int = readers.arrays.operations.begin_unchanged(
            readers.arrays.where, pid, start, self.number, counter, value, samples
        )
        if row < 0:
            self._readers = None
            return False
        self.row, self.counted = row, samples
        return True

    def end(self) -> None:
        """Release the ticket; idempotent. Takes no lock."""
        readers = self._readers
        if readers is None or self._pid != (_own or _here())[0]:
            return  # in a forked child the region may not be mapped, see `Region.pin`
        if self.row >= 0:
            readers.arrays.operations.end_read(readers.arrays.where, self.row, self.number)
            self._readers = None
            return
        for row in np.flatnonzero(readers.arrays.readers[:, TICKET] == self.number).tolist():
            pid, _, reading, number = readers.arrays.readers[row].tolist()
            # `tolist` reads in this order, so a row reused by another ticket shows another number.
            if number == self.number and pid == self._pid and reading:
                readers.arrays.readers[row, READING] = 0
        self._readers = None


_own: tuple[int, int] | None = None  # pid and start time of this process


def _here() -> tuple[int, int]:
    global _own
    if _own is None:
        pid = os.getpid()
        _own = pid, process_start(pid)
    return _own


def _after_fork() -> None:
    global _own
    _own = None


os.register_at_fork(after_in_child=_after_fork)


class Readers:
    """The active read tickets of all processes.

    Args:
        arrays: index arrays.
    """

    def __init__(self, arrays: IndexArrays) -> None:
        self.arrays = arrays

    @staticmethod
    def here() -> tuple[int, int]:
        """Pid and start time of this process."""
        return _own or _here()

    def alive(self, pid: int, start: int) -> bool:
        """Whether the process with this pid and start time is running."""
        # The start time matters even for the own pid: in a container a restarted process often reuses it.
        return (pid, start) == self.here() or (start != 0 and process_start(pid) == start)

    def take(self, number: int) -> int:
        """Register a ticket and return its row in `readers`.

        Raises:
            GearError: all rows are in use.
        """
        here = self.here()
        row = int(self.arrays.ops.begin_read(self.arrays.where, *here, number))
        if row < 0:
            self.drop_dead()
            row = int(self.arrays.ops.begin_read(self.arrays.where, *here, number))
            if row < 0:
                raise GearError(
                    f"{len(self.arrays.readers)} batches are being read at once, which is the limit. "
                    "Let fewer processes read the same table, or lower prefetch."
                )
        return row

    def active(self) -> list[tuple[int, int]]:
        """Pid and start time of the process of each active ticket."""
        active = np.flatnonzero(self.arrays.readers[:, READING])
        return [(int(pid), int(start)) for pid, start in self.arrays.readers[active, :READING]]

    def oldest(self) -> int:
        """The epoch of the oldest active ticket; the largest int64 without one."""
        epochs = self.arrays.readers[:, READING]
        epochs = epochs[epochs > 0]
        return int(epochs.min()) if len(epochs) else int(np.iinfo(np.int64).max)

    def drop_dead(self) -> bool:
        """Release the tickets of dead processes; return whether there were any."""
        tickets = np.flatnonzero(self.arrays.readers[:, READING]).tolist()
        dead = [
            ticket for ticket in tickets if not self.alive(*self.arrays.readers[ticket, :READING].tolist())
        ]
        for ticket in dead:
            self.arrays.readers[ticket, READING] = 0
        return bool(dead)
