"""The index of a table: takes slots and blocks, commits, retires, and knows who is reading or writing.

What the index consists of, and how it survives a process that is killed in the middle of a change, is in
`gear_loader.slots`. Here are the operations, each of which takes the lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator

import numpy as np

from gear_loader import native
from gear_loader.errors import GearError, LockTimeoutError, StaleIndexError, TableFullError
from gear_loader.lock import process_start
from gear_loader.region import Region
from gear_loader.slots import (
    DIRTY,
    EPOCH,
    FLIP_EPOCH,
    HALF,
    HEAD,
    INITIALIZED,
    MOVING,
    NEWEST,
    NEXT_SEQUENCE,
    NUM_EVICTED,
    NUM_FREE_BLOCKS,
    NUM_FREE_SLOTS,
    NUM_READY,
    NUM_REMOVED,
    NUM_RETIRED,
    NUM_STEPS,
    NUM_TOUCHED,
    NUM_WRITING,
    OLDEST,
    READING,
    READY,
    READY_BLOCKS,
    RETIRED_BLOCKS,
    RETIRED_FIRST,
    VERSION,
    WRITING,
    WRITING_STEPS,
    Array,
    Slots,
)

__all__ = ["Changes", "Index", "Snapshot"]


@functools.cache
def _process(pid: int) -> tuple[int, int]:
    return pid, process_start(pid)


os.register_at_fork(after_in_child=_process.cache_clear)

_NO_SLOTS = np.empty(0, dtype=np.int64)


def _alive(pid: int, start: int) -> bool:
    # With the start time even for the own pid: in a container a restarted process often has its predecessor's.
    return (pid, start) == _process(os.getpid()) or (start != 0 and process_start(pid) == start)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The live trajectories at one version of the index, oldest first; all arrays int64 [n]."""

    version: int
    slots: Array
    lengths: Array
    generations: Array
    sequences: Array

    def __len__(self) -> int:
        return len(self.slots)

    @functools.cached_property
    def ends(self) -> Array:
        """Running sum of the lengths: step number i of the whole table lies in the first trajectory with end > i."""
        return np.cumsum(self.lengths)

    @property
    def num_steps(self) -> int:
        """Steps of all trajectories together."""
        return int(self.ends[-1]) if len(self.slots) else 0

    def take(self, chosen: Array) -> Snapshot:
        """The snapshot of the trajectories where the boolean array `chosen` is True."""
        arrays = (self.slots, self.lengths, self.generations, self.sequences)
        return Snapshot(self.version, *(array[chosen] for array in arrays))


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
    """Mutations and snapshots of a region's index. Every method takes the lock itself unless its name starts with _."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self._lock = region.lock
        self._snapshot: Snapshot | None = None
        self._writers_checked = time.monotonic()

    # ---------------------------------------------------------------- lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self.counters[DIRTY] or not self.counters[INITIALIZED]:
                self._rebuild()
            yield

    # ---------------------------------------------------------------- writing

    def begin(self, lengths: Array, *, evict: bool) -> tuple[Array, Array]:
        """Take slots and blocks for trajectories of these lengths; they stay invisible until `commit`.

        Args:
            lengths: int64 [n].
            evict: make room by retiring the oldest trajectories.

        Returns:
            The slots, int64 [n], and the blocks of all of them, one trajectory after another, int32 [blocks].

        Raises:
            TableFullError: no room and `evict` is False, or there can never be so much; nothing was changed.
            LockTimeoutError: readers, or with `evict` unfinished writes, kept the room busy until the deadline.
                What was evicted for it stays so.
        """
        deadline = time.monotonic() + self._lock.timeout
        pause = 50e-6
        while True:
            with self._locked():
                self._reclaim_writers(every=1.0)
                if self._make_room(lengths, evict):
                    return self._allocate(lengths)
                busy = sorted({pid for pid, _ in self._active_readers()})
                writing = sorted({int(pid) for pid in self.owner[self.state == WRITING, 0]})
            if time.monotonic() > deadline:
                raise LockTimeoutError(
                    f"Room for {len(lengths)} trajectories was waited for {self._lock.timeout:g} s: what is to be "
                    f"reused is still being read by the processes {busy} or written by {writing}. They may be "
                    "stopped, or hold a batch too long."
                )
            time.sleep(pause)
            pause = min(pause * 2, 1e-3)

    def commit(self, slots: Array, priorities: Array, *, sequences: Array | None = None) -> None:
        """Make written slots visible, in the given order.

        Args:
            slots: int64 [n] from `begin`.
            priorities: float32 [n].
            sequences: int64 [n], ascending, none below the table's next one: the sequence numbers, if not the next ones
                (a table that is restored keeps those that it had).
        """
        counters, count = self.counters, len(slots)
        if count == 0:
            return
        with self._locked(), self._mutation():
            if sequences is None:
                sequences = counters[NEXT_SEQUENCE] + np.arange(count)
            self.sequence[slots] = sequences
            counters[NEXT_SEQUENCE] = sequences[-1] + 1
            self.priority[slots] = priorities
            self._append(slots)
            self._touch(slots)
            self.state[slots] = READY
            steps = int(self.extent[slots, 0].sum())
            counters[NUM_WRITING] -= count
            counters[WRITING_STEPS] -= steps
            counters[NUM_READY] += count
            counters[NUM_STEPS] += steps
            counters[READY_BLOCKS] += int(self.blocks_of(self.extent[slots, 0]).sum())
            counters[VERSION] += 1

    def abort(self, slots: Array, *, wait: bool = True) -> None:
        """Give back slots from `begin` that will not be committed; what was committed stays.

        Args:
            slots: int64 [n].
            wait: for the lock. Without it, and where it cannot be had in time, they are only given up, and taken back
                by whoever needs room next, as if this process had died.
        """
        if wait:
            try:
                with self._locked(), self._mutation():
                    self._abort(slots[self.state[slots] == WRITING])
                return
            except LockTimeoutError:
                pass
        self.owner[slots] = 0

    # ---------------------------------------------------------------- removal

    def remove(self, slots: Array) -> None:
        """Retire trajectories; all or none.

        Raises:
            StaleIndexError: a slot that holds no live trajectory, or the same slot twice.
        """
        with self._locked():
            self._check_live(slots)
            if len(np.unique(slots)) != len(slots):
                raise StaleIndexError(
                    f"Indices {slots.tolist()} name a trajectory twice; expected distinct ones."
                )
            with self._mutation():
                for slot in slots.tolist():
                    self._retire(slot)
                self.counters[NUM_REMOVED] += len(slots)
                self._reclaim()

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

    def begin_snapshot(self) -> tuple[int, Snapshot]:
        """`begin_read` and a snapshot that belongs to it."""
        with self._locked():
            return self._begin_read(), self._take_snapshot()

    def begin_changes(self, since: int) -> tuple[int, Changes]:
        """`begin_read` and what has happened since an earlier call.

        Args:
            since: `position` of the earlier call's changes; -1 for everything.
        """
        with self._locked():
            position = int(self.counters[NUM_TOUCHED])
            count = position - since
            everything = since < 0 or count > self.num_slots
            if everything:
                slots = np.arange(self.num_slots)
            elif count == 0:
                slots = _NO_SLOTS
            else:
                slots = np.unique(self.touched[np.arange(since, position) % self.num_slots]).astype(np.int64)
            ready = self.state[slots] == READY
            return self._begin_read(), Changes(
                position,
                int(self.counters[NEXT_SEQUENCE]),
                int(self.counters[NUM_READY]),
                everything,
                slots,
                ready,
                self.sequence[slots],
                self.priority[slots],
            )

    def ends(self, count: int, *, newest: bool) -> tuple[int, Array]:
        """`begin_read`, and the oldest (or newest) `count` slots in order, or all if there are fewer."""
        with self._locked():
            slots = np.empty(min(count, int(self.counters[NUM_READY])), dtype=np.int64)
            slot, side = int(self.counters[NEWEST if newest else OLDEST]) - 1, 0 if newest else 1
            if native.require():
                native.walk(self.links, slot, side, slots)
            else:
                for i in range(len(slots)):
                    slots[i], slot = slot, int(self.links[slot, side])
            return self._begin_read(), slots

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
            return self._take_snapshot()

    def _begin_read(self) -> int:
        free = np.flatnonzero(self.readers[:, READING] == 0)
        if len(free) == 0:
            self._drop_dead_readers()
            free = np.flatnonzero(self.readers[:, READING] == 0)
            if len(free) == 0:
                raise GearError(
                    f"{len(self.readers)} batches are being read at once, which is the limit. "
                    "Let fewer processes read the same table, or lower prefetch."
                )
        ticket = int(free[0])
        self.readers[ticket, :READING] = _process(os.getpid())
        self.readers[ticket, READING] = self.counters[EPOCH]
        return ticket

    def _take_snapshot(self) -> Snapshot:
        version = int(self.counters[VERSION])
        if self._snapshot is None or self._snapshot.version != version:
            slots = np.flatnonzero(self.state == READY)
            slots = slots[np.argsort(self.sequence[slots], kind="stable")]
            self._snapshot = Snapshot(
                version, slots, self.extent[slots, 0], self.generation[slots], self.sequence[slots]
            )
        return self._snapshot

    # ---------------------------------------------------------------- room

    def _make_room(self, lengths: Array, evict: bool) -> bool:
        counters = self.counters
        slots, steps = len(lengths), int(lengths.sum())
        blocks = int(self.blocks_of(lengths).sum())

        def missing() -> bool:
            return bool(
                counters[NUM_FREE_SLOTS] + counters[NUM_RETIRED] < slots
                or counters[NUM_FREE_BLOCKS] + counters[RETIRED_BLOCKS] < blocks
                or counters[NUM_STEPS] + counters[WRITING_STEPS] + steps > self.max_steps
            )

        if missing():
            self._reclaim_writers(every=0.0)
        if missing():
            largest = slots <= self.num_slots and blocks <= self.num_blocks and steps <= self.max_steps
            if not (evict and largest):
                raise TableFullError(self._full_message(slots, blocks, steps, evict))
            attainable = (
                counters[NUM_FREE_SLOTS] + counters[NUM_RETIRED] + counters[NUM_READY] >= slots
                and counters[NUM_FREE_BLOCKS] + counters[RETIRED_BLOCKS] + counters[READY_BLOCKS] >= blocks
                and counters[WRITING_STEPS] + steps <= self.max_steps
            )
            if not attainable:
                # Unfinished writes hold it. Their trajectories can be evicted once they are there.
                return False
            with self._mutation():
                while missing():
                    self._retire(int(counters[OLDEST]) - 1)
                    counters[NUM_EVICTED] += 1
        if counters[NUM_RETIRED]:
            with self._mutation():
                self._reclaim()
        if counters[NUM_FREE_SLOTS] < slots or counters[NUM_FREE_BLOCKS] < blocks:
            self._drop_dead_readers()
            with self._mutation():
                self._reclaim()
            if counters[NUM_FREE_SLOTS] < slots or counters[NUM_FREE_BLOCKS] < blocks:
                return False
        if counters[HEAD + counters[HALF]] + blocks > self.half_size:
            return self._flip()
        return True

    def _full_message(self, slots: int, blocks: int, steps: int, evict: bool) -> str:
        counters = self.counters
        remedy = (
            "Add fewer at a time, or create the table larger."
            if evict
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

    def _allocate(self, lengths: Array) -> tuple[Array, Array]:
        counters, count = self.counters, len(lengths)
        if count == 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        blocks = self.blocks_of(lengths)
        total = int(blocks.sum())
        with self._mutation():
            top = int(counters[NUM_FREE_SLOTS])
            slots = self.free_slots[top - count : top][::-1].astype(np.int64)
            counters[NUM_FREE_SLOTS] = top - count
            top = int(counters[NUM_FREE_BLOCKS])
            ids = self.free_blocks[top - total : top][::-1].copy()
            counters[NUM_FREE_BLOCKS] = top - total
            half = int(counters[HALF])
            start = half * self.half_size + int(counters[HEAD + half])
            self.block_ids[start : start + total] = ids
            counters[HEAD + half] += total
            self.extent[slots, 0] = lengths
            self.extent[slots, 1] = start + np.cumsum(blocks) - blocks
            self.generation[slots] += 1
            self.owner[slots] = _process(os.getpid())
            self.state[slots] = WRITING
            counters[NUM_WRITING] += count
            counters[WRITING_STEPS] += int(lengths.sum())
        return slots, ids

    def _flip(self) -> bool:
        """Move the live block tables to the other half; False while a reader may still use that half."""
        counters = self.counters
        if self._oldest_reader() <= counters[FLIP_EPOCH]:
            self._drop_dead_readers()
            if self._oldest_reader() <= counters[FLIP_EPOCH]:
                return False
        half = 1 - int(counters[HALF])
        with self._mutation():
            slots, offsets, total = self._packed()
            blocks = self.blocks_of(self.extent[slots, 0])
            source = np.repeat(self.extent[slots, 1] - offsets, blocks) + np.arange(total)
            target = half * self.half_size
            self.block_ids[target : target + total] = self.block_ids[source]
            # Readers see the new places one by one. If this process dies between, both halves are in use; so from
            # here on whoever takes the lock next finishes the move.
            counters[MOVING] = 1 + half
            self._finish_flip()
        return True

    # ---------------------------------------------------------------- slots

    def _reclaim(self) -> None:
        """Free the retired slots that no reader can still see."""
        counters = self.counters
        oldest = self._oldest_reader()
        while counters[NUM_RETIRED]:
            slot = int(self.retired[counters[RETIRED_FIRST]])
            if self.epoch[slot] >= oldest:
                break
            counters[RETIRED_FIRST] = (counters[RETIRED_FIRST] + 1) % self.num_slots
            counters[NUM_RETIRED] -= 1
            counters[RETIRED_BLOCKS] -= self._free(slot)

    # ---------------------------------------------------------------- processes that died

    def _reclaim_writers(self, *, every: float) -> None:
        now = time.monotonic()
        if self.counters[NUM_WRITING] == 0 or now < self._writers_checked + every:
            return
        self._writers_checked = now
        writing = np.flatnonzero(self.state == WRITING)
        dead = [slot for slot in writing.tolist() if not _alive(*self.owner[slot].tolist())]
        if dead:
            with self._mutation():
                self._abort(np.array(dead))

    def _active_readers(self) -> list[tuple[int, int]]:
        active = np.flatnonzero(self.readers[:, READING])
        return [(int(pid), int(start)) for pid, start in self.readers[active, :READING]]

    def _oldest_reader(self) -> int:
        epochs = self.readers[:, READING]
        epochs = epochs[epochs > 0]
        return int(epochs.min()) if len(epochs) else int(np.iinfo(np.int64).max)

    def _drop_dead_readers(self) -> None:
        for ticket in np.flatnonzero(self.readers[:, READING]).tolist():
            if not _alive(*self.readers[ticket, :READING].tolist()):
                self.readers[ticket, READING] = 0

    def check_valid(self) -> None:
        """Compare everything derived with the slots.

        Raises:
            AssertionError: the index contradicts itself; the message says where.
        """
        with self._locked():
            self._check()
