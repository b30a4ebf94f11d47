"""Read tickets: what a process reads is not reused until it gives its ticket back, or dies."""

from __future__ import annotations

import functools
import itertools
import os

import numpy as np

from gear_loader.errors import GearError
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.lock import process_start
from gear_loader.storage.operations import READING, TICKET

__all__ = ["Readers", "Ticket"]

_numbers = itertools.count(1)


class Ticket:
    """The right to read what a table holds now, until `end`. It is made before it is taken.

    Process and number find its row among the readers whenever the call that takes it is interrupted, so that `end`
    in an exception handler gives back whatever was taken. A ticket is for one read; in a forked child it is void.

    Attributes:
        number: unique in this process.
        row: of `readers`; -1 until it is known.
        counted: rows that were counted as drawn under it.
    """

    __slots__ = ("_pid", "_readers", "counted", "number", "row")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.row = -1
        self.counted = 0
        self._pid = os.getpid()
        self._readers: Readers | None = None

    def begin(self, readers: Readers) -> None:
        """Take it: the caller holds the lock. Raises `GearError` if too many are taken."""
        self._readers = readers  # before it is taken: from here on `end` looks for its row
        self.row = readers.take(self.number)

    def begin_unchanged(self, readers: Readers, counter: int, value: int, samples: int) -> bool:
        """Take it, and count rows as drawn, if nothing has changed; see `operations.begin_unchanged`."""
        pid, start = _process(self._pid)
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
        """Give it back; idempotent. Takes no lock."""
        readers = self._readers
        if readers is None or self._pid != os.getpid():
            return  # in a forked child the region may not even be mapped, see `Region.pin`
        if self.row >= 0:
            readers.arrays.operations.end_read(readers.arrays.where, self.row, self.number)
            self._readers = None
            return
        for row in np.flatnonzero(readers.arrays.readers[:, TICKET] == self.number).tolist():
            pid, _, reading, number = readers.arrays.readers[row].tolist()
            # Read in this order by `tolist`: a row that another reader has taken since has another number.
            if number == self.number and pid == self._pid and reading:
                readers.arrays.readers[row, READING] = 0
        self._readers = None


@functools.cache
def _process(pid: int) -> tuple[int, int]:
    return pid, process_start(pid)


os.register_at_fork(after_in_child=_process.cache_clear)


class Readers:
    """The read tickets taken on an index by all processes.

    Args:
        arrays: of the index.
    """

    def __init__(self, arrays: IndexArrays) -> None:
        self.arrays = arrays

    @staticmethod
    def here() -> tuple[int, int]:
        """This process: its id, and when it started."""
        return _process(os.getpid())

    def alive(self, pid: int, start: int) -> bool:
        """Whether the process with this id that started then is running."""
        # With the start time even for the own pid: in a container a restarted process often has its predecessor's.
        return (pid, start) == self.here() or (start != 0 and process_start(pid) == start)

    def take(self, number: int) -> int:
        """The row of `readers` that the ticket of this number gets.

        Raises:
            GearError: all are taken.
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
        """The processes that read: id and start time, one for each ticket."""
        active = np.flatnonzero(self.arrays.readers[:, READING])
        return [(int(pid), int(start)) for pid, start in self.arrays.readers[active, :READING]]

    def oldest(self) -> int:
        """The epoch of the oldest ticket; the largest int64 if there is no ticket."""
        epochs = self.arrays.readers[:, READING]
        epochs = epochs[epochs > 0]
        return int(epochs.min()) if len(epochs) else int(np.iinfo(np.int64).max)

    def drop_dead(self) -> bool:
        """Forget the readers that have died; whether there were any."""
        tickets = np.flatnonzero(self.arrays.readers[:, READING]).tolist()
        dead = [
            ticket for ticket in tickets if not self.alive(*self.arrays.readers[ticket, :READING].tolist())
        ]
        for ticket in dead:
            self.arrays.readers[ticket, READING] = 0
        return bool(dead)
