"""The index of a table: takes slots and blocks, commits, retires, and knows who is reading or writing.

What the index consists of, and how it survives a process that is killed in the middle of a change, is in
`gear_loader.slots`; the changes themselves are in `gear_loader.index_ops`. Here are the operations, each of which takes
the lock, and what they do when something has to be waited for.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import numpy as np

from gear_loader.errors import (
    GearError,
    LockTimeoutError,
    RateLimitError,
    StaleIndexError,
    TableEmptyError,
    TableFullError,
)
from gear_loader.index_ops import (
    BUSY,
    DIRTY,
    DONE,
    EVICT_LOWEST,
    EVICT_OLDEST,
    FIRST_SEQUENCE,
    FLIP,
    FLIP_EPOCH,
    FULL,
    INITIALIZED,
    INSERT_WAIT,
    NEXT_SEQUENCE,
    NUM_FREE_BLOCKS,
    NUM_READY,
    NUM_SAMPLED,
    NUM_STEPS,
    NUM_TOUCHED,
    NUM_WRITING,
    PID,
    READ,
    READING,
    READY,
    REFUSE,
    SAMPLE_WAIT,
    SHORT,
    START,
    WRITING,
    Array,
)
from gear_loader.lock import process_start
from gear_loader.patience import Patience
from gear_loader.region import Region
from gear_loader.slots import Slots
from gear_loader.snapshot import Log, Snapshot

__all__ = ["EVICT_LOWEST", "EVICT_OLDEST", "REFUSE", "Changes", "Index", "Snapshot"]

_T = TypeVar("_T")
_NO_SLOTS = np.empty(0, dtype=np.int64)
_LIMITED = -1  # beside the answers of `make_room`
_INLINE = 256 * 1024
"""Bytes of data up to which they are copied while the lock is held: that takes less time than taking it twice."""


@functools.cache
def _process(pid: int) -> tuple[int, int]:
    return pid, process_start(pid)


os.register_at_fork(after_in_child=_process.cache_clear)


def _alive(pid: int, start: int) -> bool:
    # With the start time even for the own pid: in a container a restarted process often has its predecessor's.
    return (pid, start) == _process(os.getpid()) or (start != 0 and process_start(pid) == start)


@dataclasses.dataclass(frozen=True)
class Changes:
    """What has happened to the trajectories since an earlier look.

    Attributes:
        position: what to ask the next time.
        next_sequence: every trajectory there is has a lower sequence number.
        num_ready: live trajectories.
        everything: `slots` are all slots, because too much has happened.
        slots: int64 [n], each once: slots in which a trajectory was committed or retired.
        ready: bool [n]: whether a live trajectory is there now.
        sequences: int64 [n] and priorities: float32 [n]: of that trajectory; a priority is `UNSET` if none was given.
    """

    position: int
    next_sequence: int
    num_ready: int
    everything: bool
    slots: Array
    ready: Array
    sequences: Array
    priorities: Array


class Index(Slots):
    """Mutations and snapshots of a region's index. Every method takes the lock itself unless its name starts with _.

    Attributes:
        timeout: seconds that room, or the rate limiter, is waited for; None for as long as for the lock.
    """

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self._lock = region.lock
        self._log = Log()
        self._writers_checked = time.monotonic()
        self._max_age = None if self.rules.max_age is None else int(self.rules.max_age * 1e9)
        self.timeout: float | None = None

    # ---------------------------------------------------------------- lock

    def _locked(self) -> _Locked:
        return _Locked(self)

    def _patience(self) -> Patience:
        return Patience(self._lock.timeout if self.timeout is None else self.timeout)

    # ---------------------------------------------------------------- writing

    def begin(self, lengths: Array, *, evict: int = REFUSE, wait: bool = False) -> tuple[Array, Array]:
        """Take slots and blocks for trajectories of these lengths; they stay invisible until `commit`.

        Args:
            lengths: int64 [n].
            evict: what to retire to make room: REFUSE, EVICT_OLDEST or EVICT_LOWEST.
            wait: for somebody else to make room.

        Returns:
            The slots, int64 [n], and the blocks of all of them, one trajectory after another, int32 [blocks].

        Raises:
            TableFullError: no room, and neither `evict` nor `wait`, or waited for in vain; or there can never be so
                much. Nothing was changed.
            LockTimeoutError: readers, or with `evict` unfinished writes, kept the room busy until the deadline.
                What was evicted for it stays so.
        """
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        blocks = int(self.blocks_of(lengths).sum())
        slots, ids = np.empty(len(lengths), dtype=np.int64), np.empty(blocks, dtype=np.int32)
        if len(lengths):
            self._obtain(
                (len(lengths), blocks, int(lengths.sum())),
                lambda: self._ops.begin(self._where, lengths, int(evict), *_process(os.getpid()), slots, ids),
                evict=evict,
                wait=wait,
            )
        return slots, ids

    def store(
        self,
        columns: Array,
        lengths: Array,
        addresses: Array,
        priorities: Array,
        *,
        evict: int,
        wait: bool,
        step_bytes: int,
    ) -> Array | None:
        """`begin`, copying and `commit` at once, where that is the faster way.

        Args:
            columns, lengths, addresses: as for `gear_loader.native.scatter`; priorities: float32 [n].
            step_bytes: bytes of a step over all columns.

        Returns:
            The slots, int64 [n]; None if it has to be done in three steps.

        Raises:
            As `begin`.
        """
        if not hasattr(self._ops, "store") or self.rules.rate_limiter is not None:
            return None
        steps = int(lengths.sum())
        if steps * step_bytes > _INLINE:
            return None
        blocks = int(self.blocks_of(lengths).sum())
        slots, ids = np.empty(len(lengths), dtype=np.int64), np.empty(blocks, dtype=np.int32)
        here = _process(os.getpid())
        self._obtain(
            (len(lengths), blocks, steps),
            lambda: self._ops.store(
                self._where,
                columns,
                lengths,
                addresses,
                priorities,
                time.monotonic_ns(),
                int(evict),
                *here,
                slots,
                ids,
            ),
            evict=evict,
            wait=wait,
        )
        return slots

    def commit(self, slots: Array, priorities: Array) -> None:
        """Make written slots visible, in the given order, when the rate limiter allows it.

        Args:
            slots: int64 [n] from `begin`.
            priorities: float32 [n].

        Raises:
            RateLimitError: it did not allow it until the deadline. The slots are still there, and invisible.
        """
        if len(slots) == 0:
            return
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        priorities = np.ascontiguousarray(priorities, dtype=np.float32)
        self._when_insertable(
            len(slots), lambda: self._ops.commit(self._where, slots, priorities, time.monotonic_ns())
        )

    def commit_as(
        self,
        slots: Array,
        priorities: Array,
        sequences: Array,
        *,
        ages: Array,
        times_sampled: Array,
        next_sequence: int,
        num_inserted: int,
        num_sampled: int,
    ) -> None:
        """Make written slots visible, as they were in another table: its numbers, ages and counts.

        Args:
            slots: int64 [n] from `begin`. priorities: float32 [n].
            sequences: int64 [n], ascending, none below the table's next one.
            ages: int64 [n], nanoseconds, descending. times_sampled: int64 [n].
            next_sequence, num_inserted, num_sampled: of the table as a whole.
        """
        with self._locked():
            if len(slots):
                created = time.monotonic_ns() - ages
                self._ops.commit_as(self._where, slots, sequences, priorities, created, times_sampled)
            counters = self.counters
            # The newest trajectories may have been removed before; their numbers do not come again.
            counters[NEXT_SEQUENCE] = max(int(counters[NEXT_SEQUENCE]), next_sequence)
            counters[FIRST_SEQUENCE] = counters[NEXT_SEQUENCE] - num_inserted
            counters[NUM_SAMPLED] = num_sampled

    def abort(self, slots: Array, *, wait: bool = True) -> None:
        """Give back slots from `begin` that will not be committed; what was committed stays.

        Args:
            slots: int64 [n].
            wait: for the lock. Without it, and where it cannot be had in time, they are only given up, and taken back
                by whoever needs room next, as if this process had died.
        """
        if wait:
            try:
                with self._locked():
                    self._ops.abort(self._where, np.ascontiguousarray(slots, dtype=np.int64))
                return
            except LockTimeoutError:
                pass
        self.owner[slots, PID] = 0
        self.owner[slots, START] = 0

    # ---------------------------------------------------------------- trajectories that grow

    def grow(
        self, slot: int, length: int, run: Array, *, most: int, evict: int = REFUSE, wait: bool = False
    ) -> tuple[int, Array]:
        """More room for a slot that is being written.

        Args:
            slot: from `begin`.
            length: steps that it must hold, more than it does.
            run: int64 [2], zeros at first: what `index_ops.grow` keeps.
            most: steps that it may hold from now on, if that costs nobody anything.
            evict, wait: as for `begin`.

        Returns:
            The steps that it holds now, and the new blocks, int32 [n].

        Raises:
            As `begin`.
        """
        before = int(self.extent[slot, 0])
        have = int(self.blocks_of(before))
        ids = np.empty(int(self.blocks_of(max(length, most))) - have, dtype=np.int32)
        held = length

        def attempt() -> int:
            nonlocal held
            full = -(-length // self.block_steps) * self.block_steps  # the last block is taken anyway
            for held, policy in ((most, REFUSE), (full, evict), (length, evict)):
                if held >= length:
                    answer: int = self._ops.grow(self._where, slot, held, policy, run, ids)
                    if answer in (DONE, FLIP):
                        return answer
            return answer

        needed = (0, int(self.blocks_of(length)) - have, length - before)
        self._obtain(needed, attempt, evict=evict, wait=wait, last=slot)
        return held, ids[: int(self.blocks_of(held)) - have]

    def finish(self, slot: int, length: int, priority: float) -> None:
        """Commit a slot that was given room for more than the `length` steps that it has.

        Raises:
            RateLimitError: as `commit`.
        """
        slots, priorities = np.array([slot], dtype=np.int64), np.array([priority], dtype=np.float32)
        self._when_insertable(
            1, lambda: self._ops.finish(self._where, slots, length, priorities, time.monotonic_ns())
        )

    def roll(
        self, slot: int, length: int, shared: int, priority: float, *, evict: int = REFUSE, wait: bool = False
    ) -> int:
        """Commit `length` steps of a slot that is being written, and go on in another one with its last blocks.

        Args:
            shared: the first of its blocks that the next one has too.

        Returns:
            The slot to go on in.

        Raises:
            As `begin` and `commit`; then nothing was committed.
        """
        slots, priorities = np.array([slot, -1], dtype=np.int64), np.array([priority], dtype=np.float32)

        def attempt() -> int:
            answer: int = self._ops.roll(
                self._where,
                slots,
                length,
                shared,
                priorities,
                time.monotonic_ns(),
                int(evict),
                *_process(os.getpid()),
            )
            return answer

        needed = (1, 0, length - shared * self.block_steps)
        self._obtain(needed, attempt, evict=evict, wait=wait, last=slot, inserts=1)
        return int(slots[1])

    # ---------------------------------------------------------------- removal

    def remove(self, slots: Array) -> None:
        """Retire trajectories; all or none.

        Raises:
            StaleIndexError: a slot that holds no live trajectory, or the same slot twice.
        """
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        with self._locked():
            self._check_live(slots)
            if len(np.unique(slots)) != len(slots):
                raise StaleIndexError(
                    f"Indices {slots.tolist()} name a trajectory twice; expected distinct ones."
                )
            self._ops.remove(self._where, slots)

    def set_priorities(self, slots: Array, generations: Array, priorities: Array) -> None:
        """Write new priorities of trajectories that are still there.

        Args:
            slots, generations: int64 [n]; a generation of -1 stands for any. priorities: float32 [n].
        """
        with self._locked():
            self._ops.set_priorities(self._where, slots, generations, priorities)

    def _check_live(self, slots: Array) -> None:
        inside = (slots >= 0) & (slots < self.num_slots)
        live = np.zeros(len(slots), dtype=bool)
        live[inside] = self.state[slots[inside]] == READY
        if not live.all():
            raise self._stale(int(slots[~live][0]))

    def _stale(self, slot: int) -> StaleIndexError:
        return StaleIndexError(
            f"Index {slot} names no live trajectory: it was never used, removed or evicted. "
            f"The table holds {int(self.counters[NUM_READY])} trajectories; table.indices() lists them."
        )

    # ---------------------------------------------------------------- reading

    def begin_read(self) -> int:
        """Announce that this process reads: no block retired from now on is reused before `end_read`.

        Returns:
            The ticket for `end_read`.
        """
        with self._locked():
            return self._begin_read()

    def begin_snapshot(self, samples: int = 0) -> tuple[int, Snapshot]:
        """`begin_read` and a snapshot that belongs to it.

        Args:
            samples: rows that are about to be drawn: the rate limiter is asked, and waited for.

        Raises:
            RateLimitError: it did not allow it until the deadline.
        """
        return self._when_samplable(samples, lambda: (self._begin_read(), self._snapshot()))

    def begin_changes(self, since: int, samples: int = 0) -> tuple[int, Changes]:
        """`begin_read` and what has happened since an earlier call.

        Args:
            since: `position` of the earlier call's changes; -1 for everything.
            samples: as for `begin_snapshot`.
        """
        return self._when_samplable(samples, lambda: (self._begin_read(), self._changes(since)))

    def _changes(self, since: int) -> Changes:
        position = int(self.counters[NUM_TOUCHED])
        slots = self._touched_since(since)
        everything = slots is None
        if slots is None:
            slots = np.arange(self.num_slots)
        return Changes(
            position,
            int(self.counters[NEXT_SEQUENCE]),
            int(self.counters[NUM_READY]),
            everything,
            slots,
            self.state[slots] == READY,
            self.sequence[slots],
            self.priority[slots],
        )

    def _touched_since(self, since: int) -> Array | None:
        """The slots that were touched since a position, each once; None if that is not known any more."""
        position = int(self.counters[NUM_TOUCHED])
        count = position - since
        if since < 0 or count > self.num_slots:
            return None
        if count == 0:
            return _NO_SLOTS
        return np.unique(self.touched[np.arange(since, position) % self.num_slots]).astype(np.int64)

    def begin_ends(self, count: int, *, newest: bool, samples: int = 0) -> tuple[int, Array]:
        """`begin_read`, and the oldest (or newest) `count` slots in order, or all if there are fewer.

        Args:
            samples: as for `begin_snapshot`.
        """
        return self._when_samplable(samples, lambda: (self._begin_read(), self._ends(count, newest)))

    def take_ends(self, count: int, *, newest: bool, samples: int = 0) -> tuple[int, Array, Array]:
        """`begin_ends` and `count_samples` at once, so that nobody else takes the same; waits until there are so many.

        Args:
            samples: as for `begin_snapshot`.

        Raises:
            TableEmptyError: there were fewer until the deadline.
        """

        def look() -> tuple[int, Array, Array] | None:
            if self.counters[NUM_READY] < count:
                return None
            ticket, slots = self._begin_read(), self._ends(count, newest)
            return ticket, slots, self._count_samples(slots, self.generation[slots])

        return self._when_samplable(samples, look)

    def _ends(self, count: int, newest: bool) -> Array:
        slots = np.empty(min(count, int(self.counters[NUM_READY])), dtype=np.int64)
        self._ops.walk(self._where, newest, slots)
        return slots

    def begin_read_of(self, slot: int) -> int:
        """`begin_read`, having checked that `slot` is live.

        Raises:
            StaleIndexError: it is not.
        """
        with self._locked():
            if not 0 <= slot < self.num_slots or self.state[slot] != READY:
                raise self._stale(slot)
            return self._begin_read()

    def end_read(self, ticket: int) -> None:
        """What was read under `ticket` may be reused. Takes no lock."""
        self.readers[ticket, READING] = 0

    def snapshot(self) -> Snapshot:
        """The live trajectories now, oldest first."""
        with self._locked():
            self._expire()
            return self._snapshot()

    def count_samples(self, slots: Array, generations: Array) -> Array:
        """Count that these rows are drawn, and retire trajectories that have been drawn often enough.

        Args:
            slots, generations: int64 [n].

        Returns:
            int64 [n]: how often each has been drawn by now; 0 for rows whose trajectory is gone or used up.
        """
        with self._locked():
            return self._count_samples(
                np.ascontiguousarray(slots, dtype=np.int64), np.ascontiguousarray(generations, dtype=np.int64)
            )

    def _count_samples(self, slots: Array, generations: Array) -> Array:
        times = np.empty(len(slots), dtype=np.int64)
        limit = self.rules.max_times_sampled or 0
        self._ops.count_samples(self._where, slots, generations, limit, times)
        return times

    def await_samplable(self, count: int) -> None:
        """Wait until the rate limiter would let `count` rows be drawn.

        Raises:
            RateLimitError: it would not until the deadline.
        """
        self._when_samplable(count, lambda: True, drawn=False)

    def _snapshot(self) -> Snapshot:
        return self._log.snapshot(self._view, self._touched_since)

    def _begin_read(self) -> int:
        here = _process(os.getpid())
        ticket = int(self._ops.begin_read(self._where, *here))
        if ticket < 0:
            self._drop_dead_readers()
            ticket = int(self._ops.begin_read(self._where, *here))
            if ticket < 0:
                raise GearError(
                    f"{len(self.readers)} batches are being read at once, which is the limit. "
                    "Let fewer processes read the same table, or lower prefetch."
                )
        return ticket

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

    def _when_samplable(self, count: int, look: Callable[[], _T | None], *, drawn: bool = True) -> _T:
        """What `look` returns under the lock, once `count` rows may be drawn and it does not return None."""
        limiter = self.rules.rate_limiter if count else None
        patience: Patience | None = None
        while True:
            with self._locked():
                self._expire()
                used_up = count and self.rules.max_times_sampled is not None and not self.counters[NUM_READY]
                if not used_up and (limiter is None or limiter.may_sample(count, **self._counts())):
                    found = look()
                    if found is not None:
                        if drawn:
                            self.counters[NUM_SAMPLED] += count
                        if patience is not None:
                            self.counters[SAMPLE_WAIT] += patience.waited
                        return found
                counts = self._counts()
            patience = patience or self._patience()
            if not patience.sleep():
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

    def _refuse_insert(self, count: int, patience: Patience) -> RateLimitError:
        limiter = self.rules.rate_limiter
        assert limiter is not None
        return RateLimitError(
            f"Waited {patience.timeout:g} s in vain. {limiter.explain('insert', count, **self._counts())}"
        )

    def _when_insertable(self, count: int, change: Callable[[], object]) -> None:
        patience: Patience | None = None
        while True:
            with self._locked():
                self._expire()
                if self._may_insert(count):
                    change()
                    if patience is not None:
                        self.counters[INSERT_WAIT] += patience.waited
                    return
            patience = patience or self._patience()
            if not patience.sleep():
                raise self._refuse_insert(count, patience)

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
            attempt: tries it under the lock; what `index_ops.make_room` returns.
            last: the slot that is to grow.
            inserts: trajectories that `attempt` commits: the rate limiter has to allow it.
        """
        patience: Patience | None = None
        while True:
            with self._locked():
                self._expire()
                self._reclaim_writers(every=1.0)
                answer = attempt() if not inserts or self._may_insert(inserts) else _LIMITED
                while answer != DONE and self._help(answer, needed, evict, last):
                    answer = attempt()
                if answer == DONE:
                    if patience is not None:
                        self.counters[INSERT_WAIT] += patience.waited
                    return
                if answer == FULL or (answer == SHORT and not wait):
                    raise TableFullError(self._full_message(*needed, evict, wait))
                message = (
                    self._full_message(*needed, evict, wait) if answer == SHORT else self._busy_message()
                )
            patience = patience or self._patience()
            if not patience.sleep():
                waited = f"{patience.timeout:g} s"
                if answer == SHORT:
                    raise TableFullError(f"Waited {waited} in vain. {message}")
                if answer == _LIMITED:
                    raise self._refuse_insert(inserts, patience)
                raise LockTimeoutError(
                    f"Room for {needed[0]} trajectories was waited for {waited}: {message}"
                )

    def _help(self, answer: int, needed: tuple[int, int, int], evict: int, last: int) -> bool:
        """Do what may bring room; whether anything was done."""
        if answer == FLIP:
            return self._flip(needed[1], evict, last)
        if answer == READ:
            return self._drop_dead_readers()
        return answer in (SHORT, FULL, BUSY) and self._reclaim_writers(every=0.0)

    def _flip(self, blocks: int, evict: int, last: int) -> bool:
        """Move the live block tables to the other half; False while a reader may still use that half."""
        counters = self.counters
        if self._oldest_reader() <= counters[FLIP_EPOCH]:
            self._drop_dead_readers()
            if self._oldest_reader() <= counters[FLIP_EPOCH]:
                return False
        total = self._pieces(last)[4]
        if total + blocks > self.half_size and evict != REFUSE and counters[NUM_READY]:
            # Block tables of streams may be there more than once: then they are more than there are blocks.
            self._ops.evict_one(self._where, int(evict))
            self._ops.reclaim(self._where)
            total = self._pieces(last)[4]
        if total > self.half_size:
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
            "stopped, or hold a batch too long."
        )

    # ---------------------------------------------------------------- processes that died

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
        dead = [slot for slot, owner in owners if not _alive(*owner)]
        if dead:
            self._ops.abort(self._where, np.array(dead, dtype=np.int64))
        return bool(dead)

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
        dead = [ticket for ticket in tickets if not _alive(*self.readers[ticket, :READING].tolist())]
        for ticket in dead:
            self.readers[ticket, READING] = 0
        return bool(dead)

    def _reclaim(self) -> None:
        self._ops.reclaim(self._where)

    def check_valid(self) -> None:
        """Compare everything derived with the slots.

        Raises:
            AssertionError: the index contradicts itself; the message says where.
        """
        with self._locked():
            self._check()


class _Locked:
    """Context manager: the lock is held, and the index is whole."""

    __slots__ = ("_index",)

    def __init__(self, index: Index) -> None:
        self._index = index

    def __enter__(self) -> None:
        index = self._index
        index._lock.__enter__()
        try:
            if index.counters[DIRTY] or not index.counters[INITIALIZED]:
                index._rebuild()
        except BaseException:
            index._lock.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._index._lock.__exit__(kind, value, trace)
