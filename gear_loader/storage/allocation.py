"""Room for what is added, and waiting for it: the lock, readers and writers that died, the rate limiter.

Whatever has to be waited for is waited for here, outside the lock, with a deadline.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from gear_loader.errors import GearError, LockTimeoutError, RateLimitError, TableEmptyError, TableFullError
from gear_loader.storage.counters import (
    DIRTY,
    FIRST_SEQUENCE,
    FLIP_EPOCH,
    INITIALIZED,
    INSERT_WAIT,
    NEXT_SEQUENCE,
    NUM_FREE_BLOCKS,
    NUM_READY,
    NUM_SAMPLED,
    NUM_STEPS,
    NUM_WRITING,
    SAMPLE_WAIT,
)
from gear_loader.storage.lock import process_start
from gear_loader.storage.operations import BUSY, DONE, FLIP, FULL, PID, READ, READING, SHORT, TICKET, WRITING
from gear_loader.storage.recovery import Slots
from gear_loader.storage.region import Region
from gear_loader.utils.arrays import Array
from gear_loader.utils.waiting import Backoff

__all__ = ["Claim", "Room", "Ticket"]

_T = TypeVar("_T")
_LIMITED = -1  # beside the answers of `make_room`
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

    __slots__ = ("_pid", "_room", "counted", "number", "row")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.row = -1
        self.counted = 0
        self._pid = os.getpid()
        self._room: Room | None = None

    def begin(self, room: Room) -> None:
        """Take it: the caller holds the lock. Raises `GearError` if too many are taken."""
        self._room = room  # before it is taken: from here on `end` looks for its row
        self.row = room._take_reader(self.number)

    def begin_unchanged(self, room: Room, counter: int, value: int, samples: int) -> bool:
        """Take it, and count rows as drawn, if nothing has changed; see `operations.begin_unchanged`."""
        pid, start = _process(self._pid)
        self._room = room
        row: int = room.operations.begin_unchanged(
            room._where, pid, start, self.number, counter, value, samples
        )
        if row < 0:
            self._room = None
            return False
        self.row, self.counted = row, samples
        return True

    def end(self) -> None:
        """Give it back; idempotent. Takes no lock."""
        room = self._room
        if room is None or self._pid != os.getpid():
            return  # in a forked child the region may not even be mapped, see `Region.pin`
        if self.row >= 0:
            room.operations.end_read(room._where, self.row, self.number)
            self._room = None
            return
        for row in np.flatnonzero(room.readers[:, TICKET] == self.number).tolist():
            pid, _, reading, number = room.readers[row].tolist()
            # Read in this order by `tolist`: a row that another reader has taken since has another number.
            if number == self.number and pid == self._pid and reading:
                room.readers[row, READING] = 0
        self._room = None


class Claim:
    """Slots that a caller is about to take, and to write. It is made before they are taken.

    Attributes:
        slots: int64 [n], -1 where not taken.
        generations: int64 [n], of the slots when they were taken; None until known. What has another generation was
            committed, and then given to another trajectory.
    """

    __slots__ = ("generations", "slots")

    def __init__(self, count: int) -> None:
        self.slots = np.full(count, -1, dtype=np.int64)
        self.generations: Array | None = None


@functools.cache
def _process(pid: int) -> tuple[int, int]:
    return pid, process_start(pid)


os.register_at_fork(after_in_child=_process.cache_clear)


class OpenWriter(Protocol):
    """What is asked of a `gear_loader.storage.writer.Writer`."""

    @property
    def open_slots(self) -> tuple[int, list[int]]: ...


class Room(Slots):
    """What the operations of an `Index` have in common.

    Attributes:
        timeout: seconds that room, or the rate limiter, is waited for; None for as long as for the lock.
        waited: nanoseconds that additions have waited here so far.
        writers: those that write through this handle.
    """

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self._lock = region.lock
        self._writers_checked = time.monotonic()
        self._has_conditions = (
            self.rules.rate_limiter is not None
            or self.rules.max_times_sampled is not None
            or self.rules.max_age is not None
        )
        self._max_age = None if self.rules.max_age is None else int(self.rules.max_age * 1e9)
        self.timeout: float | None = None
        self.waited = 0
        self.writers: weakref.WeakSet[OpenWriter] = weakref.WeakSet()

    # ---------------------------------------------------------------- lock

    def _locked(self, section: Callable[[], _T]) -> _T:
        """Call `section` while the lock is held and the index is whole; see `IndexLock.run`."""

        def whole() -> _T:
            counters = self.counters
            if counters[DIRTY] or not counters[INITIALIZED]:
                self._rebuild()
            return section()

        return self._lock.run(whole)

    def _patience(self) -> Backoff:
        return Backoff(self._lock.timeout if self.timeout is None else self.timeout)

    def check_bounds(self) -> None:
        """Check that all values of the index name existing slots, blocks and places. Takes the lock only in doubt.

        Raises:
            CorruptTableError: a value does not.
        """
        if self.damage() is None:
            return
        # Another process may have been in the middle of a change.
        self._locked(lambda: self._require_whole(self.damage()))

    # ---------------------------------------------------------------- the rate limiter, and age

    def _expire(self) -> None:
        if self._max_age is not None:
            self._ops.expire(self._where, time.monotonic_ns() - self._max_age)

    def _counts(self) -> dict[str, int]:
        counters = self.counters
        return {
            "size": int(counters[NUM_READY]),
            "inserted": int(counters[NEXT_SEQUENCE] - counters[FIRST_SEQUENCE]),
            "sampled": int(counters[NUM_SAMPLED]),
        }

    def _when_samplable(
        self, count: int, look: Callable[[], _T | None], *, ticket: Ticket | None = None
    ) -> _T:
        """What `look` returns under the lock, once `count` rows may be drawn and it does not return None.

        Args:
            ticket: under which the rows are drawn; None if none are drawn yet, or `look` counts them.
        """
        limiter = self.rules.rate_limiter if count else None
        counters = self.counters
        patience: Backoff | None = None

        def attempt() -> tuple[_T | None, dict[str, int]]:
            self._expire()
            used_up = count and self.rules.max_times_sampled is not None and not counters[NUM_READY]
            if not used_up and (limiter is None or limiter.may_sample(count, **self._counts())):
                found = look()
                if found is not None:
                    if ticket is not None:
                        counters[NUM_SAMPLED] += count
                        ticket.counted = count
                    self._note_sample_wait(patience)
                    return found, {}
            return None, self._counts()

        while True:
            found, counts = self._locked(attempt)
            if found is not None:
                return found
            patience = patience or self._patience()
            if not patience.sleep():
                self._locked(functools.partial(self._note_sample_wait, patience))
                if limiter is None or limiter.may_sample(count, **counts):
                    raise TableEmptyError(
                        f"{count} trajectories were waited for {patience.timeout:g} s; the table holds "
                        f"{counts['size']}. Is somebody adding to it?"
                    )
                raise RateLimitError(
                    f"Waited {patience.timeout:g} s in vain. {limiter.explain('sample', count, **counts)}"
                )

    def _may_insert(self, count: int) -> bool:
        limiter = self.rules.rate_limiter
        return limiter is None or limiter.may_insert(count, **self._counts())

    def _refuse_insert(self, count: int, patience: Backoff) -> RateLimitError:
        limiter = self.rules.rate_limiter
        assert limiter is not None
        return RateLimitError(
            f"Waited {patience.timeout:g} s in vain. {limiter.explain('insert', count, **self._counts())}"
        )

    def _when_insertable(self, count: int, change: Callable[[], object]) -> None:
        patience: Backoff | None = None

        def attempt() -> bool:
            self._expire()
            if not self._may_insert(count):
                return False
            change()
            self._note_wait(patience)
            return True

        def refuse() -> RateLimitError:
            assert patience is not None
            self._note_wait(patience)
            return self._refuse_insert(count, patience)

        while not self._locked(attempt):
            patience = patience or self._patience()
            if not patience.sleep():
                raise self._locked(refuse)

    # ---------------------------------------------------------------- room

    def _obtain(
        self,
        needed: tuple[int, int, int],
        attempt: Callable[[], int],
        *,
        evict: int,
        wait: bool,
        last: int = -1,
        inserts: int = 0,
    ) -> None:
        """Try to get room until it is there, doing what helps.

        Args:
            needed: slots, blocks and steps.
            attempt: tries it under the lock; what `operations.make_room` returns.
            last: the slot that is to grow.
            inserts: trajectories that `attempt` commits: the rate limiter has to allow it.
        """
        patience: Backoff | None = None

        def try_all() -> tuple[int, str]:
            self._expire()
            self._reclaim_writers(every=1.0)
            answer = attempt() if not inserts or self._may_insert(inserts) else _LIMITED
            while answer != DONE and self._help(answer, last):
                answer = attempt()
            if answer == DONE:
                self._note_wait(patience)
                return answer, ""
            if answer == FULL or (answer == SHORT and not wait) or self._is_own_doing(answer):
                raise TableFullError(self._full_message(*needed, evict, wait))
            return answer, (
                self._full_message(*needed, evict, wait) if answer == SHORT else self._busy_message()
            )

        while True:
            answer, message = self._locked(try_all)
            if answer == DONE:
                return
            patience = patience or self._patience()
            if not patience.sleep():
                self._locked(functools.partial(self._note_wait, patience))
                waited = f"{patience.timeout:g} s"
                if answer == SHORT:
                    raise TableFullError(f"Waited {waited} in vain. {message}")
                if answer == _LIMITED:
                    raise self._refuse_insert(inserts, patience)
                raise LockTimeoutError(
                    f"Room for {needed[0]} trajectories was waited for {waited}: {message}"
                )

    def _note_wait(self, patience: Backoff | None) -> None:
        if patience is not None:
            self.waited += patience.waited
            self.counters[INSERT_WAIT] += patience.waited

    def _note_sample_wait(self, patience: Backoff | None) -> None:
        if patience is not None:
            self.counters[SAMPLE_WAIT] += patience.waited

    def _help(self, answer: int, last: int) -> bool:
        """Do what may bring room; whether anything was done."""
        if answer == FLIP:
            return self._flip(last)
        if answer == READ:
            return self._drop_dead_readers()
        return answer in (SHORT, FULL, BUSY) and self._reclaim_writers(every=0.0)

    def _flip(self, last: int) -> bool:
        """Move the live block tables to the other half; False while a reader may still use that half."""
        counters = self.counters
        if self._oldest_reader() <= counters[FLIP_EPOCH]:
            self._drop_dead_readers()
            if self._oldest_reader() <= counters[FLIP_EPOCH]:
                return False
        self._move(last)
        return True

    def _full_message(self, slots: int, blocks: int, steps: int, evict: int, wait: bool) -> str:
        counters = self.counters
        remedy = (
            "Add fewer at a time, or create the table larger."
            if evict or wait
            else "Create the table larger, remove trajectories, or create it with on_full='evict_oldest'."
        )
        writing = int(counters[NUM_WRITING])
        unfinished = f" ({writing:,} more are being written)" if writing else ""
        if writing:
            remedy = f"{self._writing_message()} {remedy}"
        return (
            f"The table is full: {slots} trajectories of {steps:,} steps ({blocks:,} blocks of {self.block_steps}) "
            f"were to be added to {int(counters[NUM_READY]):,} of at most {self.num_slots:,} trajectories{unfinished}, "
            f"{int(counters[NUM_STEPS]):,} of {self.max_steps:,} steps and "
            f"{self.num_blocks - int(counters[NUM_FREE_BLOCKS]):,} of {self.num_blocks:,} blocks. {remedy}"
        )

    def _busy_message(self) -> str:
        busy = sorted({pid for pid, _ in self._active_readers()})
        writing = sorted({int(pid) for pid in self.owner[self.state == WRITING, PID]})
        return (
            f"what is to be reused is still being read by the processes {busy} or written by {writing}. They may be "
            f"stopped, or hold a batch too long. {self._writing_message()}"
        ).rstrip()

    def _writing_message(self) -> str:
        """Which processes hold how many steps by trajectories that they have not committed; "" if there are none."""
        slots = np.flatnonzero(self.state == WRITING)
        pids, lengths = self.owner[slots, PID], self.extent[slots, 0]
        here = os.getpid()
        held = []
        for pid in sorted(set(pids.tolist()), key=lambda pid: (pid != here, pid)):
            count, steps = int((pids == pid).sum()), int(lengths[pids == pid].sum())
            whose = f"this process ({pid})" if pid == here else f"process {pid}"
            held.append(f"{count:,} of {whose} with {steps:,} steps")
        if not held:
            return ""
        remedy = " commit() or discard() in this process gives room back." if here in pids else ""
        return f"Unfinished trajectories of open writers hold room: {', '.join(held)}.{remedy}"

    def _is_own_doing(self, answer: int) -> bool:
        """Whether there is no room because of writers of this very thread: then waiting for it cannot help.

        A writer is for one thread, so nobody else commits or discards what these hold.
        """
        if answer not in (SHORT, BUSY) or (answer == SHORT and self.counters[NUM_READY]):
            return False
        try:
            writers = list(self.writers)
        except RuntimeError:  # another thread has just made one
            return False
        mine: set[int] = set()
        for writer in writers:
            thread, slots = writer.open_slots
            if thread == threading.get_ident():
                mine.update(slots)
        return bool(mine) and mine.issuperset(np.flatnonzero(self.state == WRITING).tolist())

    # ---------------------------------------------------------------- processes that died

    def _here(self) -> tuple[int, int]:
        """This process: its id, and when it started."""
        return _process(os.getpid())

    def _alive(self, pid: int, start: int) -> bool:
        # With the start time even for the own pid: in a container a restarted process often has its predecessor's.
        return (pid, start) == self._here() or (start != 0 and process_start(pid) == start)

    def _reclaim_writers(self, *, every: float) -> bool:
        """Take back what dead writers had, if that was not looked for in the last `every` seconds."""
        if self.counters[NUM_WRITING] == 0:
            return False
        now = time.monotonic()
        if now < self._writers_checked + every:
            return False
        self._writers_checked = now
        writing = np.flatnonzero(self.state == WRITING)
        owners = [(slot, self.owner[slot].tolist()) for slot in writing.tolist()]
        dead = [slot for slot, owner in owners if not self._alive(*owner)]
        if dead:
            self._ops.abort(self._where, np.array(dead, dtype=np.int64))
        return bool(dead)

    def _take_reader(self, number: int) -> int:
        """The row of `readers` that the ticket of this number gets.

        Raises:
            GearError: all are taken.
        """
        here = self._here()
        row = int(self._ops.begin_read(self._where, *here, number))
        if row < 0:
            self._drop_dead_readers()
            row = int(self._ops.begin_read(self._where, *here, number))
            if row < 0:
                raise GearError(
                    f"{len(self.readers)} batches are being read at once, which is the limit. "
                    "Let fewer processes read the same table, or lower prefetch."
                )
        return row

    def _active_readers(self) -> list[tuple[int, int]]:
        active = np.flatnonzero(self.readers[:, READING])
        return [(int(pid), int(start)) for pid, start in self.readers[active, :READING]]

    def _oldest_reader(self) -> int:
        epochs = self.readers[:, READING]
        epochs = epochs[epochs > 0]
        return int(epochs.min()) if len(epochs) else int(np.iinfo(np.int64).max)

    def _drop_dead_readers(self) -> bool:
        """Forget the readers that have died; whether there were any."""
        tickets = np.flatnonzero(self.readers[:, READING]).tolist()
        dead = [ticket for ticket in tickets if not self._alive(*self.readers[ticket, :READING].tolist())]
        for ticket in dead:
            self.readers[ticket, READING] = 0
        return bool(dead)

    def _reclaim(self) -> None:
        self._ops.reclaim(self._where)
