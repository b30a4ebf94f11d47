"""The index of a table: takes slots and blocks, commits, retires, and knows who is reading or writing.

What the index consists of, and how it survives a process that is killed in the middle of a change, is in `recovery`;
the changes themselves are in `operations`. Here are the calls, each of which takes the lock, and what they do when
something has to be waited for.
"""

from __future__ import annotations

import dataclasses
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gear_loader.errors import LockTimeoutError, SchemaError, StaleIndexError
from gear_loader.storage.allocation import Claim, Room, Ticket
from gear_loader.storage.counters import (
    FIRST_SEQUENCE,
    NEXT_SEQUENCE,
    NUM_READY,
    NUM_SAMPLED,
    NUM_TOUCHED,
    ORIGIN,
    VERSION,
)
from gear_loader.storage.ids import check_origin_free, check_unused, first_free, following, origin_of
from gear_loader.storage.operations import (
    DONE,
    EVICT_LOWEST,
    EVICT_OLDEST,
    FLIP,
    PID,
    READY,
    REFUSE,
    REQUEST_HEAD,
    REQUEST_NOW,
    START,
    WRITING,
)
from gear_loader.storage.region import Region
from gear_loader.storage.snapshot import Log, Snapshot
from gear_loader.utils.arrays import Array

__all__ = ["EVICT_LOWEST", "EVICT_OLDEST", "REFUSE", "Changes", "Claim", "Index", "Snapshot", "Ticket"]

_T = TypeVar("_T")
_NO_SLOTS = np.empty(0, dtype=np.int64)
INLINE_BYTES = 512 * 1024
"""Bytes of data up to which they are copied while the lock is held: that takes less time than taking it twice."""


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


class Index(Room):
    """Mutations and snapshots of a region's index. Every method takes the lock itself unless its name starts with _."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self._log = Log()
        self._no_changes: Changes | None = None  # what `begin_changes` returned last, if nothing had changed
        self._request: tuple[Array, memoryview, struct.Struct] | None = None

    # ---------------------------------------------------------------- writing

    def begin(
        self,
        lengths: Array,
        *,
        evict: int = REFUSE,
        wait: bool = False,
        ids: Array | None = None,
        claim: Claim | None = None,
    ) -> tuple[Array, Array]:
        """Take slots and blocks for trajectories of these lengths; they stay invisible until `commit`.

        Args:
            lengths: int64 [n].
            evict: what to retire to make room: REFUSE, EVICT_OLDEST or EVICT_LOWEST.
            wait: until other processes or threads make room.
            ids: int64 [n], the global ids that they bring with them, each once; -1 for those that bring none.
            claim: for n slots: says what was taken also if this call is interrupted, for `abort`.

        Returns:
            The slots, int64 [n], and the blocks of all of them, one trajectory after another, int32 [blocks].

        Raises:
            SchemaError: a trajectory that is here already has one of `ids`. Nothing was changed.
            TableFullError: no room, and neither `evict` nor `wait`, or waited for in vain; or there can never be so
                much. Nothing was changed.
            LockTimeoutError: readers, or with `evict` unfinished writes, kept the room busy until the deadline.
                What was evicted for it stays so.
        """
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        blocks = int(self.blocks_of(lengths).sum())
        claim = Claim(len(lengths)) if claim is None else claim
        slots, taken = claim.slots, np.empty(blocks, dtype=np.int32)

        def attempt() -> int:
            if ids is not None:
                self._check_unused(ids)
            answer: int = self._ops.begin(self._where, lengths, int(evict), *self._here(), slots, taken)
            if ids is not None and answer == DONE:
                above = following(ids, origin_of(self._view) or 0)
                self._ops.raise_numbering(self._where, above)
                self.ident[slots] = ids
            return answer

        if len(lengths):
            self._obtain((len(lengths), blocks, int(lengths.sum())), attempt, evict=evict, wait=wait)
        claim.generations = self.generation[slots]
        return slots, taken

    def _check_unused(self, ids: Array) -> None:
        given = ids[ids >= 0]
        writing = check_unused(self._view, given)
        if len(writing):
            self._reclaim_writers(every=0.0)  # perhaps they are only what a dead process left
            writing = check_unused(self._view, given)
        if len(writing):
            raise SchemaError(
                f"The id {int(self.ident[writing[0]])} is that of a trajectory that is being stored by process "
                f"{int(self.owner[writing[0], PID])}; expected one that is not. Store each trajectory once."
            )

    def set_origin(self, shard: int) -> None:
        """Become shard `shard`, for good.

        Raises:
            SchemaError: it is another one already, or an id would be that of two trajectories. Nothing was changed.
        """
        self._locked(lambda: self._set_origin(shard))

    def _set_origin(self, shard: int) -> None:
        known = origin_of(self._view)
        if known is not None:
            if known != shard:
                raise SchemaError(
                    f"The table is shard {known} and was to become shard {shard}; its number is set once, "
                    f"because ids hold it. Use {known}, or create another table for shard {shard}."
                )
            return
        check_origin_free(self._view, shard)
        self._ops.raise_numbering(self._where, first_free(self._view, shard))
        self.counters[ORIGIN] = 1 + shard

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
            columns, lengths, addresses: as for `gear_loader.native.copying.scatter`; priorities: float32 [n].
            step_bytes: bytes of a step over all columns.

        Returns:
            The slots, int64 [n]; None if it has to be done in three steps.

        Raises:
            As `begin`.
        """
        if not self.stores_at_once:
            return None
        steps, count = int(lengths.sum()), len(lengths)
        if steps * step_bytes > INLINE_BYTES:
            return None
        request = np.empty(REQUEST_HEAD + count * (3 + len(columns)), dtype=np.int64)
        request[:REQUEST_HEAD] = (count, False, 0, evict, *self._here())
        request[REQUEST_HEAD : REQUEST_HEAD + count] = lengths
        slots = request[REQUEST_HEAD + count : REQUEST_HEAD + 2 * count]
        request[REQUEST_HEAD + 2 * count : REQUEST_HEAD + 3 * count].view(np.float64)[:] = priorities
        request[REQUEST_HEAD + 3 * count :] = addresses.reshape(-1)

        def attempt() -> int:
            request[REQUEST_NOW] = time.monotonic_ns()
            answer: int = self._ops.store(self._where, columns, request)
            return answer

        needed = count, int(self.blocks_of(lengths).sum()), steps
        self._obtain(needed, attempt, evict=evict, wait=wait)
        return slots.copy()

    def store_one(
        self, columns: Array, length: int, addresses: list[int], priority: float, *, evict: int
    ) -> int | None:
        """`store` of one trajectory, if there is room for it and nothing else to be done first.

        Args:
            length: in steps; few enough to be copied while others wait for the lock.
            addresses: where the steps of each column lie. priority: as float32 can hold it.

        Returns:
            Its slot. None if nothing was done: then `store`, or `begin` and the rest.
        """
        if not self.stores_at_once or self._max_age is not None:
            return None
        if self._request is None or len(self._request[0]) < REQUEST_HEAD + 3 + len(addresses):
            memory = np.zeros(REQUEST_HEAD + 3 + len(addresses), dtype=np.int64)
            self._request = memory, memory.data, struct.Struct(f"={REQUEST_HEAD + 2}qd{len(addresses)}q")
        request, view, form = self._request
        operation, where, here = self.operations.store, self._where, self._here()

        def section() -> int | None:
            # The request is this handle's: only who holds the lock writes into it.
            form.pack_into(
                view, 0, 1, True, time.monotonic_ns(), evict, *here, length, -1, priority, *addresses
            )
            slot: int = view[REQUEST_HEAD + 1] if operation(where, columns, request) == DONE else -1
            return None if slot < 0 else slot

        try:
            return self._lock.run(section)
        except IndexError as error:
            raise self.corrupt(str(error)) from error

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
        ids: Array,
        origin: int | None,
        next_sequence: int,
        num_inserted: int,
        num_sampled: int,
    ) -> bool:
        """Make written slots visible in an empty table, as they were in another one: its numbers, ages and counts.

        Args:
            slots: int64 [n] from `begin`. priorities: float32 [n].
            sequences: int64 [n], ascending, none below the table's next one.
            ages: int64 [n], nanoseconds, descending. times_sampled: int64 [n].
            ids: int64 [n], what they were stored with, -1 for none.
            origin, next_sequence, num_inserted, num_sampled: of the table as a whole.

        Returns:
            False, having done nothing, if somebody has added to the table already.
        """

        def commit() -> bool:
            counters = self.counters
            if counters[NEXT_SEQUENCE]:
                return False
            # The newest trajectories may have been removed before; their numbers do not come again.
            counters[NEXT_SEQUENCE] = next_sequence
            counters[FIRST_SEQUENCE] = next_sequence - num_inserted
            counters[NUM_SAMPLED] = num_sampled
            counters[ORIGIN] = 0 if origin is None else 1 + origin
            if len(slots):
                self.ident[slots] = ids
                created = time.monotonic_ns() - ages
                self._ops.commit_as(self._where, slots, sequences, priorities, created, times_sampled)
            return True

        return self._locked(commit)

    def abort(self, slots: Array, *, wait: bool = True, generations: Array | None = None) -> None:
        """Give back slots from `begin` that will not be committed; what was committed stays.

        Args:
            slots: int64 [n]; -1 for a slot that was not taken.
            wait: for the lock. Without it, and where it cannot be had in time, they are only given up, and taken back
                by whoever needs room next, as if this process had died.
            generations: int64 [n], of the slots when they were taken; None if none of them can have been committed,
                and given to another trajectory, since.
        """
        slots = np.ascontiguousarray(slots, dtype=np.int64)

        def still() -> Array:
            taken = (slots >= 0) & (self.state[slots] == WRITING)
            if generations is not None:
                taken &= self.generation[slots] == generations
            found: Array = slots[taken]
            return found

        if wait:
            try:
                self._locked(lambda: self._ops.abort(self._where, still()))
                return
            except LockTimeoutError:
                pass
        slots = still()
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
            run: int64 [2], zeros at first: what `operations.grow` keeps.
            most: steps that it may hold from now on, if that costs nobody anything.
            evict, wait: as for `begin`.

        Returns:
            The steps that it holds now, and the new blocks, int32 [n].

        Raises:
            As `begin`.
        """
        before = int(self.extent[slot, 0])
        if not 0 < before < length:
            raise self.corrupt(f"slot {slot}, which is to hold {length} steps, has {before}")
        have = int(self.blocks_of(before))
        full = -(-length // self.block_steps) * self.block_steps  # the last block is taken anyway
        most = max(most, full)
        ids = np.empty(int(self.blocks_of(most)) - have, dtype=np.int32)
        held = length

        def attempt() -> int:
            nonlocal held
            for held, policy in ((most, REFUSE), (full, evict), (length, evict)):
                answer: int = self._ops.grow(self._where, slot, held, policy, run, ids)
                if answer in (DONE, FLIP):
                    break
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
        self,
        slot: int,
        length: int,
        shared: int,
        priority: float,
        *,
        evict: int = REFUSE,
        wait: bool = False,
        claim: Claim | None = None,
    ) -> int:
        """Commit `length` steps of a slot that is being written, and go on in another one with its last blocks.

        Args:
            shared: the first of its blocks that the next one has too.
            claim: for the slot to go on in; as for `begin`.

        Returns:
            The slot to go on in.

        Raises:
            As `begin` and `commit`; then nothing was committed.
        """
        slots, priorities = np.array([slot, -1], dtype=np.int64), np.array([priority], dtype=np.float32)
        claim = Claim(1) if claim is None else claim
        claim.slots = slots[1:]  # a view: the operation writes into it

        def attempt() -> int:
            answer: int = self._ops.roll(
                self._where,
                slots,
                length,
                shared,
                priorities,
                time.monotonic_ns(),
                int(evict),
                *self._here(),
            )
            return answer

        needed = (1, 0, length - shared * self.block_steps)
        self._obtain(needed, attempt, evict=evict, wait=wait, last=slot, inserts=1)
        claim.generations = self.generation[claim.slots]
        return int(slots[1])

    # ---------------------------------------------------------------- removal

    def remove(self, slots: Array) -> None:
        """Retire trajectories; all or none.

        Raises:
            StaleIndexError: a slot that holds no live trajectory, or the same slot twice.
        """
        slots = np.ascontiguousarray(slots, dtype=np.int64)

        def remove() -> None:
            self._check_live(slots)
            if len(np.unique(slots)) != len(slots):
                raise StaleIndexError(
                    f"Indices {slots.tolist()} name a trajectory twice; expected distinct ones."
                )
            self._ops.remove(self._where, slots)

        self._locked(remove)

    def set_priorities(self, slots: Array, generations: Array, priorities: Array) -> None:
        """Write new priorities of trajectories that are still there.

        Args:
            slots, generations: int64 [n]; a generation of -1 stands for any. priorities: float32 [n].
        """
        rows = [np.ascontiguousarray(part, dtype=np.int64) for part in (slots, generations)]
        priorities = np.ascontiguousarray(priorities, dtype=np.float32)
        self._locked(lambda: self._ops.set_priorities(self._where, *rows, priorities))

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

    # Each of these takes a ticket that the caller has made before, so that the caller can give it back also if the
    # call is interrupted; without one it makes one.

    def begin_read(self, ticket: Ticket | None = None) -> Ticket:
        """Announce that this process reads: no block retired from now on is reused before `end_read`.

        Args:
            ticket: a new one, or None.

        Returns:
            The ticket for `end_read`.
        """
        ticket = ticket or Ticket()
        self._locked(lambda: ticket.begin(self))
        return ticket

    def begin_snapshot(self, samples: int = 0, ticket: Ticket | None = None) -> tuple[Ticket, Snapshot]:
        """`begin_read` and a snapshot that belongs to it.

        Args:
            samples: rows that are about to be drawn: the rate limiter is asked, and waited for.
            ticket: as for `begin_read`.

        Raises:
            RateLimitError: it did not allow it until the deadline.
        """
        ticket = ticket or Ticket()
        known = self._log.known
        if known is not None and self._begin_unchanged(ticket, VERSION, known.version, samples):
            return ticket, known
        return self._begin(samples, ticket, self._snapshot)

    def begin_changes(
        self, since: int, samples: int = 0, ticket: Ticket | None = None
    ) -> tuple[Ticket, Changes]:
        """`begin_read` and what has happened since an earlier call.

        Args:
            since: `position` of the earlier call's changes; -1 for everything.
            samples, ticket: as for `begin_snapshot`.
        """
        ticket = ticket or Ticket()
        known = self._no_changes
        if (
            known is not None
            and known.position == since
            and self._begin_unchanged(ticket, NUM_TOUCHED, since, samples)
        ):
            return ticket, known
        ticket, changes = self._begin(samples, ticket, lambda: self._changes(since))
        if len(changes.slots) == 0:
            self._no_changes = changes
        return ticket, changes

    def _begin_unchanged(self, ticket: Ticket, counter: int, value: int, samples: int) -> bool:
        """Begin a read in one compiled call, if nothing has changed since a counter had a value; else do nothing.

        Args:
            samples: rows that are about to be drawn.
        """
        if self._has_conditions:
            return False

        return self._lock.run(lambda: ticket.begin_unchanged(self, counter, value, samples))

    def _begin(self, samples: int, ticket: Ticket | None, look: Callable[[], _T]) -> tuple[Ticket, _T]:
        ticket = ticket or Ticket()

        def take() -> tuple[_T]:
            ticket.begin(self)
            return (look(),)

        return ticket, self._when_samplable(samples, take, ticket=ticket)[0]

    def _changes(self, since: int) -> Changes:
        position = int(self.counters[NUM_TOUCHED])
        slots = self._touched_since(since)
        everything = slots is None
        if slots is None:
            slots = np.arange(self.num_slots)
        return Changes(
            position,
            int(self.counters[NEXT_SEQUENCE]),
            self.num_ready(),
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
        if since < 0 or not 0 <= count <= self.num_slots:
            return None
        if count == 0:
            return _NO_SLOTS
        slots = np.unique(self.touched[np.arange(since, position) % self.num_slots]).astype(np.int64)
        if slots[0] < 0 or slots[-1] >= self.num_slots:
            raise self.corrupt(
                f"slots {slots[0]} to {slots[-1]} were touched, expected 0 to {self.num_slots - 1}"
            )
        return slots

    def begin_ends(
        self, count: int, *, newest: bool, samples: int = 0, ticket: Ticket | None = None
    ) -> tuple[Ticket, Array]:
        """`begin_read`, and the oldest (or newest) `count` slots in order, or all if there are fewer.

        Args:
            samples, ticket: as for `begin_snapshot`.
        """
        return self._begin(samples, ticket, lambda: self._ends(count, newest))

    def take_ends(
        self, count: int, *, newest: bool, samples: int = 0, ticket: Ticket | None = None
    ) -> tuple[Ticket, Array, Array]:
        """`begin_ends` and `count_samples` at once, so that nobody else takes the same; waits until there are so many.

        Args:
            samples, ticket: as for `begin_snapshot`.

        Raises:
            TableEmptyError: there were fewer until the deadline.
        """
        ticket = ticket or Ticket()

        def look() -> tuple[Ticket, Array, Array] | None:
            if self.counters[NUM_READY] < count:
                return None
            ticket.begin(self)
            slots = self._ends(count, newest)
            return ticket, slots, self._count_samples(slots, self.generation[slots], total=samples > 0)

        return self._when_samplable(samples, look)

    def _ends(self, count: int, newest: bool) -> Array:
        slots = np.empty(min(count, self.num_ready()), dtype=np.int64)
        self._ops.walk(self._where, newest, slots)
        return slots

    def begin_read_of(self, slot: int, ticket: Ticket | None = None) -> Ticket:
        """`begin_read`, having checked that `slot` is live.

        Args:
            ticket: as for `begin_read`.

        Raises:
            StaleIndexError: it is not.
        """
        ticket = ticket or Ticket()

        def begin() -> None:
            if not 0 <= slot < self.num_slots or self.state[slot] != READY:
                raise self._stale(slot)
            ticket.begin(self)

        self._locked(begin)
        return ticket

    def end_read(self, ticket: Ticket) -> None:
        """What was read under `ticket` may be reused; idempotent. Takes no lock."""
        ticket.end()

    def snapshot(self) -> Snapshot:
        """The live trajectories now, oldest first."""

        def look() -> Snapshot:
            self._expire()
            return self._snapshot()

        return self._locked(look)

    def count_samples(self, slots: Array, generations: Array) -> Array:
        """Count that these rows are drawn, and retire trajectories that have been drawn often enough.

        Args:
            slots, generations: int64 [n].

        Returns:
            int64 [n]: how often each has been drawn by now; 0 for rows whose trajectory is gone or used up.
        """
        rows = [np.ascontiguousarray(part, dtype=np.int64) for part in (slots, generations)]
        return self._locked(lambda: self._count_samples(*rows))

    def _count_samples(self, slots: Array, generations: Array, *, total: bool = False) -> Array:
        times = np.empty(len(slots), dtype=np.int64)
        limit = self.rules.max_times_sampled or 0
        self._ops.count_samples(self._where, slots, generations, limit, total, times)
        return times

    def uncount_samples(self, count: int) -> None:
        """Rows for which the rate limiter was asked were not drawn after all."""

        def uncount() -> None:
            self.counters[NUM_SAMPLED] -= count

        if count:
            self._locked(uncount)

    def await_samplable(self, count: int) -> None:
        """Wait until the rate limiter would let `count` rows be drawn.

        Raises:
            RateLimitError: it would not until the deadline.
        """
        self._when_samplable(count, lambda: True)

    def _snapshot(self) -> Snapshot:
        return self._log.snapshot(self._view, self._touched_since)

    def check_valid(self) -> None:
        """Compare everything derived with the slots.

        Raises:
            AssertionError: the index contradicts itself; the message says where.
        """
        self._locked(self._check)
