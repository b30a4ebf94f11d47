"""The index of a table: which slot holds which trajectory, in which blocks, and who is reading or writing.

The slots are the truth: state, extent (length and place in `block_ids`), generation, sequence, epoch, owner,
priority. Everything else (free lists, links, ring, counts) is derived from them. A mutation marks the index dirty
while it works; whoever takes the lock and finds it dirty, because a process was killed in the middle, derives it
all anew. That is why a slot's state is always written last.

Block tables grow in one half of `block_ids`; when it is full, the live ones are copied to the other half. The half
that was left stays as it was until the next such move, so a reader that still uses it is not disturbed. A writer
gets its block ids when it gets its slots, and looks at no block table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from gear_loader.errors import GearError, LockTimeoutError, StaleIndexError, TableFullError
from gear_loader.lock import process_start
from gear_loader.region import Region

__all__ = ["FREE", "READY", "RETIRED", "WRITING", "Index", "Snapshot"]

FREE, WRITING, READY, RETIRED = range(4)
Array = np.ndarray[Any, Any]

# Places in `counters`. OLDEST and NEWEST hold slot + 1, 0 for none, so that zeros describe an empty table.
(
    EPOCH,
    VERSION,
    NUM_READY,
    NUM_STEPS,
    READY_BLOCKS,
    NUM_WRITING,
    WRITING_STEPS,
    NUM_FREE_SLOTS,
    NUM_FREE_BLOCKS,
    NEXT_SEQUENCE,
    HALF,
    HEAD,  # two entries, one a half
    _HEAD_1,
    FLIP_EPOCH,
    OLDEST,
    NEWEST,
    RETIRED_FIRST,
    NUM_RETIRED,
    RETIRED_BLOCKS,
    DIRTY,
    INITIALIZED,
    NUM_EVICTED,
    NUM_REMOVED,
    MOVING,  # 1 + the half to which the block tables are being moved, 0 for none
) = range(24)
_PID, _START, _READING = range(3)  # columns of `readers`


@functools.cache
def _process(pid: int) -> tuple[int, int]:
    return pid, process_start(pid)


os.register_at_fork(after_in_child=_process.cache_clear)


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


class Index:
    """Mutations and snapshots of a region's index. Every method takes the lock itself unless its name starts with _."""

    def __init__(self, region: Region) -> None:
        layout = region.layout
        self._lock = region.lock
        self.block_steps = layout.block_steps
        self.max_steps = layout.max_steps
        self.num_slots = layout.max_trajectories
        self.num_blocks = layout.num_blocks
        self.counters: Array = region.array("counters")
        self.readers: Array = region.array("readers")
        self.extent: Array = region.array("extent")
        self.generation: Array = region.array("generation")
        self.sequence: Array = region.array("sequence")
        self.epoch: Array = region.array("epoch")
        self.owner: Array = region.array("owner")
        self.priority: Array = region.array("priority")
        self.state: Array = region.array("state")
        self.links: Array = region.array("links")
        self.block_ids: Array = region.array("block_ids").reshape(-1)
        self.half_size = layout.half
        self.free_slots: Array = region.array("free_slots")
        self.retired: Array = region.array("retired")
        self.free_blocks: Array = region.array("free_blocks")
        self._snapshot: Snapshot | None = None
        self._writers_checked = time.monotonic()

    # ---------------------------------------------------------------- lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self.counters[DIRTY] or not self.counters[INITIALIZED]:
                self._rebuild()
            yield

    @contextlib.contextmanager
    def _mutation(self) -> Iterator[None]:
        # Left set when the body fails or the process dies: then the next holder of the lock rebuilds.
        self.counters[DIRTY] = 1
        yield
        self.counters[DIRTY] = 0

    # ---------------------------------------------------------------- writing

    def blocks_of(self, lengths: Any) -> Any:
        """Blocks that trajectories of these lengths take."""
        return -(-lengths // self.block_steps)

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

    def commit(self, slots: Array, priorities: Array) -> None:
        """Make written slots visible, in the given order.

        Args:
            slots: int64 [n] from `begin`.
            priorities: float32 [n].
        """
        counters, count = self.counters, len(slots)
        if count == 0:
            return
        with self._locked(), self._mutation():
            first = counters[NEXT_SEQUENCE]
            self.sequence[slots] = np.arange(first, first + count)
            counters[NEXT_SEQUENCE] = first + count
            self.priority[slots] = priorities
            self._append(slots)
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

    def row(self, slot: int) -> Array:
        """The block ids of a slot, int32 [blocks] (a copy). The caller holds the lock, or a ticket for the slot."""
        length, start = self.extent[slot].tolist()
        return self.block_ids[start : start + self.blocks_of(length)].copy()

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
        self.readers[ticket, _READING] = 0

    def snapshot(self) -> Snapshot:
        """The live trajectories now, oldest first."""
        with self._locked():
            return self._take_snapshot()

    def _begin_read(self) -> int:
        free = np.flatnonzero(self.readers[:, _READING] == 0)
        if len(free) == 0:
            self._drop_dead_readers()
            free = np.flatnonzero(self.readers[:, _READING] == 0)
            if len(free) == 0:
                raise GearError(
                    f"{len(self.readers)} batches are being read at once, which is the limit. "
                    "Let fewer processes read the same table, or lower prefetch."
                )
        ticket = int(free[0])
        self.readers[ticket, :_READING] = _process(os.getpid())
        self.readers[ticket, _READING] = self.counters[EPOCH]
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
                return (
                    False  # unfinished writes hold it: their trajectories can be evicted when they are there
                )
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

    def _packed(self) -> tuple[Array, Array, int]:
        """Slots in use, where their block tables begin when packed one after another, and the length of it all."""
        slots = np.flatnonzero(self.state != FREE)
        ends = np.cumsum(self.blocks_of(self.extent[slots, 0]))
        return slots, ends - self.blocks_of(self.extent[slots, 0]), int(ends[-1]) if len(slots) else 0

    def _finish_flip(self) -> None:
        counters = self.counters
        half = int(counters[MOVING]) - 1
        slots, offsets, total = self._packed()
        self.extent[slots, 1] = half * self.half_size + offsets
        counters[HEAD + half] = total
        counters[HEAD + 1 - half] = 0
        counters[FLIP_EPOCH] = counters[EPOCH]
        counters[EPOCH] += 1
        counters[HALF] = half
        counters[MOVING] = 0

    # ---------------------------------------------------------------- slots

    def _append(self, slots: Array) -> None:
        counters = self.counters
        newest = int(counters[NEWEST]) - 1
        self.links[slots, 0] = np.concatenate(([newest], slots[:-1]))
        self.links[slots, 1] = np.concatenate((slots[1:], [-1]))
        if newest >= 0:
            self.links[newest, 1] = slots[0]
        else:
            counters[OLDEST] = slots[0] + 1
        counters[NEWEST] = slots[-1] + 1

    def _retire(self, slot: int) -> None:
        counters = self.counters
        older, newer = self.links[slot].tolist()
        if older >= 0:
            self.links[older, 1] = newer
        else:
            counters[OLDEST] = newer + 1
        if newer >= 0:
            self.links[newer, 0] = older
        else:
            counters[NEWEST] = older + 1
        length = int(self.extent[slot, 0])
        blocks = self.blocks_of(length)
        self.epoch[slot] = counters[EPOCH]
        self.state[slot] = RETIRED
        self.retired[(counters[RETIRED_FIRST] + counters[NUM_RETIRED]) % self.num_slots] = slot
        counters[EPOCH] += 1
        counters[VERSION] += 1
        counters[NUM_RETIRED] += 1
        counters[RETIRED_BLOCKS] += blocks
        counters[READY_BLOCKS] -= blocks
        counters[NUM_READY] -= 1
        counters[NUM_STEPS] -= length

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

    def _free(self, slot: int) -> int:
        counters = self.counters
        ids = self.row(slot)
        self.state[slot] = FREE
        top = int(counters[NUM_FREE_BLOCKS])
        self.free_blocks[top : top + len(ids)] = ids[::-1]
        counters[NUM_FREE_BLOCKS] = top + len(ids)
        self.free_slots[counters[NUM_FREE_SLOTS]] = slot
        counters[NUM_FREE_SLOTS] += 1
        return len(ids)

    def _abort(self, slots: Array) -> None:
        for slot in slots.tolist():
            self.counters[WRITING_STEPS] -= self.extent[slot, 0]
            self.counters[NUM_WRITING] -= 1
            self._free(slot)

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
        active = np.flatnonzero(self.readers[:, _READING])
        return [(int(pid), int(start)) for pid, start in self.readers[active, :_READING]]

    def _oldest_reader(self) -> int:
        epochs = self.readers[:, _READING]
        epochs = epochs[epochs > 0]
        return int(epochs.min()) if len(epochs) else int(np.iinfo(np.int64).max)

    def _drop_dead_readers(self) -> None:
        for ticket in np.flatnonzero(self.readers[:, _READING]).tolist():
            if not _alive(*self.readers[ticket, :_READING].tolist()):
                self.readers[ticket, _READING] = 0

    # ---------------------------------------------------------------- derived from the slots

    def _derive(self) -> dict[str, Any]:
        """Everything that follows from the slots, as `_rebuild` writes it and `check_valid` expects it."""
        lengths, starts = self.extent[:, 0], self.extent[:, 1]
        used = np.flatnonzero(self.state != FREE)
        blocks = self.blocks_of(lengths)
        rows = [self.block_ids[starts[s] : starts[s] + blocks[s]] for s in used.tolist()]
        taken = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
        ready = np.flatnonzero(self.state == READY)
        ready = ready[np.argsort(self.sequence[ready], kind="stable")]
        retired = np.flatnonzero(self.state == RETIRED)
        retired = retired[np.argsort(self.epoch[retired], kind="stable")]
        writing = np.flatnonzero(self.state == WRITING)
        ends = [0, 0]
        for slot in used.tolist():
            half, place = divmod(int(starts[slot]), self.half_size)
            ends[half] = max(ends[half], place + int(blocks[slot]))
        free = np.ones(self.num_blocks, dtype=bool)
        free[taken] = False
        return {
            "taken": taken,
            "ready": ready,
            "retired": retired,
            "free_slots": np.flatnonzero(self.state == FREE),
            "free_blocks": np.flatnonzero(free),
            "ends": ends,
            "counts": {
                NUM_READY: len(ready),
                NUM_STEPS: int(lengths[ready].sum()),
                READY_BLOCKS: int(blocks[ready].sum()),
                NUM_WRITING: len(writing),
                WRITING_STEPS: int(lengths[writing].sum()),
                NUM_RETIRED: len(retired),
                RETIRED_BLOCKS: int(blocks[retired].sum()),
                NUM_FREE_SLOTS: int((self.state == FREE).sum()),
                NUM_FREE_BLOCKS: int(free.sum()),
            },
        }

    def _rebuild(self) -> None:
        counters = self.counters
        counters[DIRTY] = 1
        if counters[MOVING]:
            self._finish_flip()
        derived = self._derive()
        for place, value in derived["counts"].items():
            counters[place] = value
        # Stacks grow upwards: the lowest slots and blocks are handed out first.
        self.free_slots[: len(derived["free_slots"])] = derived["free_slots"][::-1]
        self.free_blocks[: len(derived["free_blocks"])] = derived["free_blocks"][::-1]
        self.retired[: len(derived["retired"])] = derived["retired"]
        counters[RETIRED_FIRST] = 0
        counters[OLDEST] = counters[NEWEST] = 0
        if len(derived["ready"]):
            self._append(derived["ready"])
            counters[NEXT_SEQUENCE] = max(counters[NEXT_SEQUENCE], self.sequence[derived["ready"][-1]] + 1)
        counters[HEAD : HEAD + 2] = derived["ends"]
        used = np.flatnonzero(self.state == RETIRED)
        last = int(self.epoch[used].max()) if len(used) else 0
        counters[EPOCH] = max(counters[EPOCH], last, 0) + 1
        counters[VERSION] += 1
        counters[INITIALIZED] = 1
        counters[DIRTY] = 0

    def check_valid(self) -> None:
        """Compare everything derived with the slots.

        Raises:
            AssertionError: the index contradicts itself; the message says where.
        """
        with self._locked():
            derived, counters = self._derive(), self.counters
            taken = derived["taken"]
            assert len(np.unique(taken)) == len(taken), "a block belongs to two trajectories"
            assert ((taken >= 0) & (taken < self.num_blocks)).all(), "a block id is out of range"
            for place, value in derived["counts"].items():
                assert counters[place] == value, f"counter {place} is {counters[place]}, expected {value}"
            for name in ("free_slots", "free_blocks"):
                count = len(derived[name])
                found = np.sort(getattr(self, name)[:count])
                assert (found == derived[name]).all(), f"{name} does not hold exactly what is free"
            ring = (counters[RETIRED_FIRST] + np.arange(counters[NUM_RETIRED])) % self.num_slots
            assert (self.retired[ring] == derived["retired"]).all(), (
                "the ring of retired slots is out of order"
            )
            order: list[int] = []
            slot = int(counters[OLDEST]) - 1
            while slot >= 0 and len(order) <= self.num_slots:
                order.append(slot)
                slot = int(self.links[slot, 1])
            assert order == derived["ready"].tolist(), (
                "the links do not lead through the trajectories in order"
            )
            older = [-1, *order[:-1]]
            assert self.links[order, 0].tolist() == older[: len(order)], "the links back are wrong"
            assert int(counters[NEWEST]) - 1 == (order[-1] if order else -1), "the newest trajectory is wrong"
            half = int(counters[HALF])
            assert derived["ends"][1 - half] == 0, "a block table lies in the half that was left"
            assert derived["ends"][half] <= counters[HEAD + half] <= self.half_size, (
                "a block table lies beyond the head"
            )
            lengths = self.extent[np.flatnonzero(self.state != FREE), 0]
            assert (lengths >= 1).all(), "a trajectory has no steps"
            assert lengths.max(initial=0) <= self.max_steps, "a trajectory has more than max_steps steps"
            steps = counters[NUM_STEPS] + counters[WRITING_STEPS]
            assert steps <= self.max_steps, f"{steps} steps are more than max_steps"
            sequences = self.sequence[derived["ready"]]
            assert len(np.unique(sequences)) == len(order), "a sequence number is used twice"
            assert counters[NEXT_SEQUENCE] > sequences.max(initial=-1), "a sequence number comes again"
            priorities = self.priority[derived["ready"]]
            assert (np.isfinite(priorities) & (priorities >= 0)).all(), "a priority is negative or not finite"
            assert (self.readers[:, _READING] <= counters[EPOCH]).all(), "a reader announced an epoch to come"
