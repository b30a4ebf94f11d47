"""Allocation of slots and blocks: eviction, reclaiming from dead writers, and back-pressure."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np

from gear_loader.errors import LockTimeoutError, TableFullError
from gear_loader.storage import counters as at
from gear_loader.storage.admission import Admission
from gear_loader.storage.block_tables import BlockTables
from gear_loader.storage.host_part import HostPart
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations.view import BUSY, DONE, FLIP, FULL, PID, READ, SHORT, SPILL
from gear_loader.storage.readers import Readers
from gear_loader.storage.recovery import Recovery
from gear_loader.storage.states import WRITING
from gear_loader.utils.arrays import Array
from gear_loader.utils.waiting import Backoff

_LIMITED = -1  # in addition to the results of `make_room`: the rate limiter refused


class Claim:
    """Slots that a caller allocates for writing. Created before the allocation, so an interrupted call can abort.

    Attributes:
        slots: int64 [n], -1 where not allocated.
        generations: int64 [n], generations of the slots at allocation; None until known. A slot with another
            generation has been committed and reused since.
    """

    __slots__ = ("generations", "slots")

    def __init__(self, count: int) -> None:
        self.slots = np.full(count, -1, dtype=np.int64)
        self.generations: Array | None = None


class OpenWriter(Protocol):
    """The interface of a `gear_loader.storage.writer.Writer` that the allocator uses."""

    @property
    def open_slots(self) -> tuple[int, list[int]]: ...


class Allocator:
    """Allocates slots and blocks for new trajectories: evicts, reclaims memory that no reader holds, and waits.

    Args:
        arrays: index arrays. recovery: runs critical sections under the lock.
        block_tables, readers, admission: parts of the same index.

    Attributes:
        writers: open writers of this handle. host_part: what makes room in a GPU's memory by moving trajectories to the
            table's part of host memory, or None.
    """

    def __init__(
        self,
        arrays: IndexArrays,
        recovery: Recovery,
        block_tables: BlockTables,
        readers: Readers,
        admission: Admission,
    ) -> None:
        self.arrays = arrays
        self._recovery = recovery
        self._block_tables = block_tables
        self._readers = readers
        self._admission = admission
        self._writers_checked = time.monotonic()
        self.writers: weakref.WeakSet[OpenWriter] = weakref.WeakSet()
        self.host_part: HostPart | None = None

    def look_ahead(self, evict: int) -> None:
        """Begin to make room in a GPU's memory, before it is needed. Waits for nothing."""
        if self.host_part is not None:
            self.host_part.look_ahead(evict)

    def obtain(
        self,
        needed: tuple[int, int, int],
        attempt: Callable[[], int],
        *,
        evict: int,
        wait: bool,
        last: int = -1,
        inserts: int = 0,
    ) -> None:
        """Call `attempt` under the lock until it succeeds; reclaim memory and back off in between.

        Args:
            needed: slots, blocks and steps, for errors.
            attempt: performs the allocation and returns a result of `room.make_room`.
            evict: eviction policy, for errors. wait: whether to wait for space.
            last: slot to grow, or -1.
            inserts: trajectories that `attempt` commits, subject to the rate limiter.

        Raises:
            TableFullError, RateLimitError, LockTimeoutError: see `Index.begin`.
        """
        backoff: Backoff | None = None
        stuck = ""  # why the host part cannot make room
        self.look_ahead(evict)

        def try_all() -> tuple[int, str]:
            self._admission.expire()
            self.reclaim_writers(every=1.0)
            answer = attempt() if not inserts or self._admission.may_insert(inserts) else _LIMITED
            while answer != DONE and self._help(answer, last):
                answer = attempt()
            if answer == DONE:
                self._admission.note_insert_wait(backoff)
                return answer, ""
            if answer == FULL or (answer == SHORT and not wait) or self._is_own_doing(answer):
                raise TableFullError(self._full_message(*needed, evict, wait))
            if answer == SPILL:
                problem = stuck or self._tier_problem(wait)
                if problem:
                    raise TableFullError(f"{self._full_message(*needed, evict, wait)} {problem}")
            return answer, (
                self._full_message(*needed, evict, wait) if answer in (SHORT, SPILL) else self._busy_message()
            )

        while True:
            answer, message = self._recovery.locked(try_all)
            if answer == DONE:
                return
            if answer == SPILL and self.host_part is not None:
                found = self.host_part.make_room(evict, wait)
                if found is None:
                    continue
                stuck = found
                if found:
                    continue  # once more, for the error
            backoff = backoff or self._admission.backoff()
            if not backoff.sleep():
                self._recovery.locked(functools.partial(self._admission.note_insert_wait, backoff))
                waited = f"{backoff.timeout:g} s"
                if answer == SHORT:
                    raise TableFullError(f"Waited {waited}, then timed out. {message}")
                if answer == SPILL:
                    raise TableFullError(
                        f"Waited {waited}, then timed out. {message} Its memory is full, and trajectories were not "
                        f"moved out of it in time{self._tier_remedy()}."
                    )
                if answer == _LIMITED:
                    raise self._admission.refuse_insert(inserts, backoff)
                raise LockTimeoutError(
                    f"Room for {needed[0]} trajectories was not available within {waited}: {message}"
                )

    def _help(self, answer: int, last: int) -> bool:
        """React to a result of `make_room`; return whether a retry may succeed."""
        if answer == FLIP:
            return self.flip(last)
        if answer == READ:
            return self._readers.drop_dead()
        return answer in (SHORT, FULL, BUSY) and self.reclaim_writers(every=0.0)

    def flip(self, last: int) -> bool:
        """Compact the live block tables into the other half; return False while a reader may still use that half."""
        counters = self.arrays.counters
        if self._readers.oldest() <= counters[at.FLIP_EPOCH]:
            self._readers.drop_dead()
            if self._readers.oldest() <= counters[at.FLIP_EPOCH]:
                return False
        self._block_tables.move(last)
        return True

    def _full_message(self, slots: int, blocks: int, steps: int, evict: int, wait: bool) -> str:
        index = self.arrays
        counters = index.counters
        remedy = (
            "Add fewer at a time, or create the table larger."
            if evict or wait
            else "Create the table larger, remove trajectories, or create it with on_full='evict_oldest'."
        )
        writing = int(counters[at.NUM_WRITING])
        unfinished = f" ({writing:,} more are being written)" if writing else ""
        if writing:
            remedy = f"{self._writing_message()} {remedy}"
        what = (
            f"{slots:,} trajectories of {steps:,} steps" if slots > 1 else f"1 trajectory of {steps:,} steps"
        )
        what = what if slots else f"{steps:,} steps of a trajectory that is being written"
        return (
            f"The table is full: {what} ({blocks:,} {'block' if blocks == 1 else 'blocks'} of {index.block_steps}) "
            f"to be added to {int(counters[at.NUM_READY]):,} of at most {index.num_slots:,} trajectories"
            f"{unfinished}, {int(counters[at.NUM_STEPS] + counters[at.WRITING_STEPS]):,} of {index.max_steps:,} steps "
            f"and {index.writable_blocks - int(counters[at.NUM_FREE_BLOCKS]):,} of {index.writable_blocks:,} blocks. "
            f"{remedy}"
        )

    def _tier_remedy(self) -> str:
        tier = self.arrays.tier
        if tier is None:
            return ": the part of host memory below is full (host)"
        return f", to {tier.path}: see `Table.stats().disk` of the process that does it"

    def _tier_problem(self, wait: bool) -> str:
        """Why waiting for trajectories to be moved to disk is useless; "" if it is not."""
        counters, tier = self.arrays.counters, self.arrays.tier
        if tier is None:
            return ""
        pid, start = int(counters[at.SPILLER]), int(counters[at.SPILLER_START])
        spilled = f"{int(counters[at.NUM_SPILLED]):,} of its trajectories are on the disk {tier.path} only"
        if counters[at.DISK_FULL] and not wait:
            return (
                f"Its memory is full, and so is the disk: {spilled}, which takes at most {tier.size:,} bytes "
                "(Disk.size) and must have room for them. Raise memory or size, free space there, remove trajectories, "
                "or create the table with on_full='evict_oldest'."
            )
        if not pid or not self._readers.alive(pid, start):
            who = (
                f"process {pid} that moved trajectories there has ended"
                if pid
                else "no process moves more there"
            )
            return (
                f"Its memory is full, {spilled}, and {who}. Create or recover the table with "
                "disk=gear_loader.Disk(..., size=) in a process that stays."
            )
        return ""

    def _busy_message(self) -> str:
        busy = sorted({pid for pid, _ in self._readers.active()})
        writing = sorted({int(pid) for pid in self.arrays.owner[self.arrays.state == WRITING, PID]})
        return (
            f"the memory to reuse is still being read by the processes {busy} or written by {writing}. They may be "
            f"stopped, or hold a batch too long. {self._writing_message()}"
        ).rstrip()

    def _writing_message(self) -> str:
        """Uncommitted trajectories and steps of each process, for errors; "" without any."""
        slots = np.flatnonzero(self.arrays.state == WRITING)
        pids, lengths = self.arrays.owner[slots, PID], self.arrays.extent[slots, 0]
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
        """Whether open writers of the calling thread hold all the space, so that a wait would deadlock."""
        if answer not in (SHORT, BUSY) or (answer == SHORT and self.arrays.counters[at.NUM_READY]):
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
        return bool(mine) and mine.issuperset(np.flatnonzero(self.arrays.state == WRITING).tolist())

    def look_for_dead_writers(self) -> None:
        """`reclaim_writers` at most once a second, in a lock of its own."""
        if self.arrays.counters[at.NUM_WRITING] and time.monotonic() >= self._writers_checked + 1.0:
            self._recovery.locked(functools.partial(self.reclaim_writers, every=1.0))

    def reclaim_writers(self, *, every: float) -> bool:
        """Abort the slots of dead writers, checking at most once in `every` seconds; return whether any were found."""
        index = self.arrays
        if index.counters[at.NUM_WRITING] == 0:
            return False
        now = time.monotonic()
        if now < self._writers_checked + every:
            return False
        self._writers_checked = now
        writing = np.flatnonzero(index.state == WRITING)
        owners = [(slot, index.owner[slot].tolist()) for slot in writing.tolist()]
        dead = [slot for slot, owner in owners if not self._readers.alive(*owner)]
        if dead:
            index.ops.abort(index.where, np.array(dead, dtype=np.int64))
        return bool(dead)
