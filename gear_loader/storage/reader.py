"""Reading a table under a read ticket: snapshots, changes, and counts of draws."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gear_loader.errors import StaleIndexError
from gear_loader.storage.admission import Admission
from gear_loader.storage.counters import NEXT_SEQUENCE, NUM_READY, NUM_SAMPLED, NUM_TOUCHED, VERSION
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.inline import HELD, InlineBatch, Places
from gear_loader.storage.operations.view import begin_change, end_change
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.queue_loops import BUSY, IN_STEPS, REFUSED
from gear_loader.storage.queued import QueuedBatch, QueuedSeveral
from gear_loader.storage.readers import Readers, Ticket
from gear_loader.storage.recovery import Recovery
from gear_loader.storage.snapshot import Log, Snapshot
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array
from gear_loader.utils.waiting import Backoff

_T = TypeVar("_T")
_DISK_READS = 4
"""Attempts of `read_whole` without the lock, where trajectories may have to be read from a disk."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """Trajectories committed, retired or given another priority since an earlier position.

    Attributes:
        position: argument `since` of the next call.
        next_sequence: sequence number above those of all trajectories.
        num_ready: number of live trajectories.
        everything: whether `slots` are all slots, because the ring of changes has overflowed.
        slots: int64 [n], distinct: slots in which a trajectory was committed, retired or revised.
        ready: bool [n], whether the slot has a live trajectory now.
        sequences: int64 [n]. priorities: float32 [n], `UNSET` for a trajectory without one.
        revised: bool [n], whether `TableReader.revise` has set the priority of the slot since.
        steps_revised: bool [n], whether the last of these calls was for the trajectory's steps, too.
        extents: int64 [n, 3], `extent` of the slots at that moment; None of a table of which nothing moves.
    """

    position: int
    next_sequence: int
    num_ready: int
    everything: bool
    slots: Array
    ready: Array
    sequences: Array
    priorities: Array
    revised: Array
    steps_revised: Array
    extents: Array | None


class TableReader:
    """The read interface of a table for selections, collectors, transports and checkpoints; see `Engine.reader`.

    Args:
        arrays: index arrays. recovery: runs critical sections under the lock.
        readers, admission: parts of the same index.

    Attributes:
        places: of `counters`, `extent`, `block_ids`, `generation` and `sequence`, for compiled loops.
        arrays: views of the index: `extent` (length in steps and place of the block table), `block_ids`, `state`,
            `generation`, `sequence`, `priority` (-1 if not given) and more; see `gear_loader.storage.layout`.
    """

    def __init__(
        self, arrays: IndexArrays, recovery: Recovery, readers: Readers, admission: Admission
    ) -> None:
        self.arrays = arrays
        self._recovery = recovery
        self._readers = readers
        self._admission = admission
        self._log = Log()
        self.places = Places(
            arrays.counters, arrays.extent, arrays.block_ids, arrays.generation, arrays.sequence
        )
        self.draws_inline = not admission.has_conditions
        """Whether `draw_inline` may be used: no rule of the table asks more of a draw than an unchanged index."""
        self._needs_lock = arrays.moves or arrays.edit_unit != 0  # for what is drawn and gathered in one call
        self.queues_inline = self.draws_inline and not self._needs_lock
        """Whether `queue_inline` may be used."""
        self._no_changes: Changes | None = None  # latest result of `begin_changes`, if it was empty

    def known(self) -> Snapshot | None:
        """The latest snapshot if the table has not changed since, else None. Takes no lock."""
        known = self._log.known
        return None if known is None or known.version != self.arrays.counters[VERSION] else known

    def draw_inline(
        self,
        loop: Callable[..., int],
        batch: InlineBatch,
        places: Places,
        counter: int,
        since: int,
        samples: int,
        *given: object,
    ) -> bool:
        """Draw and gather a batch in one compiled call: a small one under the lock, others under a read ticket. What
        several threads gather is drawn in a call of its own.

        Args:
            loop: of `gear_loader.storage.inline`. batch: where the batch goes. places: of what is drawn from.
            counter: position in `counters`. since: value of it that what is drawn from belongs to.
            samples: rows to be drawn. given: the loop's other arguments.

        Returns:
            False, having done nothing, if the batch must be drawn and gathered in steps.

        Raises:
            CorruptTableError: the index or a record is corrupt.
        """
        into = batch.begin()
        tables = self.places.table, into.table, places.table, batch.spans, batch.returns
        if batch.under_lock:
            bad = self._recovery.lock.run(loop, *tables, since, samples, *given)
        elif self._needs_lock:
            return False  # a trajectory may move to disk or be edited meanwhile
        else:
            ticket = Ticket()
            try:
                try:
                    begin, readers = ticket.begin_unchanged, self._readers
                    if not self._recovery.lock.run(begin, readers, counter, since, samples):
                        return False
                    bad = loop(*tables, HELD, 0, *given)
                    if not bad:
                        bad = batch.share(into, *self.index_arrays(), self.arrays.block_steps)
                    if not bad:
                        batch.read_values()
                        ticket.counted = 0  # they stay counted
                finally:
                    ticket.end()
            finally:
                ticket.end()  # again: the call above may be interrupted
                if ticket.counted:
                    self.undo(ticket)
        if bad > 0:
            self.check_gathered(bad)
        return not bad

    def queue_inline(
        self,
        loop: Callable[..., int],
        batch: QueuedBatch | QueuedSeveral,
        words: Array,
        counter: int,
        since: int,
        samples: int,
        ticket: Ticket,
        *given: object,
    ) -> bool:
        """Draw a batch, or several, and queue the gather on a GPU in one compiled call. Waits for the GPU only if it
        still reads the arguments of the last batch in the same memory.

        Args:
            loop: of `gear_loader.storage.queue_loops`. batch: where the rows go. words: of it, for the loop.
            ticket: begun, for the caller to release.
            counter, since, samples: as for `draw_inline`. given: the loop's arguments after these.

        Returns:
            False, having done nothing, if the batch must be drawn and gathered in steps.

        Raises:
            CorruptTableError: the index is corrupt. RuntimeError: the driver refuses.
        """
        if not self._begin_unchanged(ticket, counter, since, samples):
            return False
        while (bad := loop(self.places.table, words, *given)) == BUSY:
            batch.wait()
        if bad == IN_STEPS:
            self.undo(ticket)
            return False
        if bad == REFUSED:
            raise RuntimeError(f"CUDA could not queue a batch: the driver returned {batch.code}.")
        self.check_gathered(bad)
        return True

    def undo(self, ticket: Ticket) -> None:
        """End the ticket of a failed batch and subtract its rows from the sample count. Idempotent."""
        ticket.end()
        count, ticket.counted = ticket.counted, 0
        self.count_drawn(-count)

    @property
    def position(self) -> int:
        """The current position for `begin_changes`. Takes no lock."""
        return int(self.arrays.counters[NUM_TOUCHED])

    def index_arrays(self) -> tuple[Array, Array]:
        """`extent` and `block_ids` of the index, as views; see `gear_loader.storage.layout`."""
        return self.arrays.extent, self.arrays.block_ids

    def slot_states(self) -> tuple[Array, Array, Array]:
        """`state`, `generation` and `sequence` of the index, as views."""
        return self.arrays.state, self.arrays.generation, self.arrays.sequence

    def ages(self, slots: Array, sequences: Array) -> tuple[Array, Array]:
        """Ages of trajectories, int64 [n] each: number of trajectories committed since, and nanoseconds."""
        arrays = self.arrays
        return arrays.counters[NEXT_SEQUENCE] - 1 - sequences, time.monotonic_ns() - arrays.created[slots]

    def backoff(self) -> Backoff:
        """Start a wait with this handle's timeout."""
        return self._admission.backoff()

    def check_gathered(self, bad: int) -> None:
        """Raise CorruptTableError if `native.gathering.gather` or `resolve` found `bad` invalid windows."""
        if bad:
            raise self.arrays.corrupt(f"{bad:,} windows of a batch have slots or blocks that do not exist")

    # The caller may create the ticket before the call, so that it can end the ticket even if the call is interrupted.

    def begin_read(self, ticket: Ticket | None = None) -> Ticket:
        """Begin a read: no block retired from now on is reused before `Ticket.end`.

        Args:
            ticket: a new read ticket, or None to create one.

        Returns:
            The ticket; the caller ends it.
        """
        ticket = ticket or Ticket()
        self._recovery.read(lambda: ticket.begin(self._readers))
        return ticket

    def read_whole(self, slots: Array, read: Callable[[], _T]) -> _T:
        """Call a function that copies values of trajectories, so that it sees no edit in part; see `storage.edits`.

        It is called again, under the lock, if one of them was edited meanwhile.

        Args:
            slots: int64 [n], of the trajectories, of which the caller holds a read ticket.
        """
        filled, unit = self.arrays.filled, self.arrays.edit_unit
        if not unit:
            return read()
        for _ in range(1 if self.arrays.tier is None else _DISK_READS):
            before = filled[slots]
            if not (before[:, 1] & unit).any():
                found = read()
                if np.array_equal(filled[slots], before):
                    return found
        return self.under_lock(read)

    def under_lock(self, section: Callable[[], _T]) -> _T:
        """Call a short function that reads trajectories: no block is reused before it has returned.

        Raises:
            LockTimeoutError: timed out waiting for the lock.
        """
        return self._recovery.locked(section)

    def begin_snapshot(self, samples: int = 0, ticket: Ticket | None = None) -> tuple[Ticket, Snapshot]:
        """`begin_read`, and a snapshot at the same moment.

        Args:
            samples: rows to be drawn; waits until the rate limiter allows them.
            ticket: as for `begin_read`.

        Raises:
            RateLimitError: timed out.
        """
        ticket = ticket or Ticket()
        known = self._log.known
        if known is not None and self._begin_unchanged(ticket, VERSION, known.version, samples):
            return ticket, known
        return self._begin(samples, ticket, self._snapshot)

    def begin_changes(
        self, since: int, samples: int = 0, ticket: Ticket | None = None
    ) -> tuple[Ticket, Changes]:
        """`begin_read`, and the changes since an earlier call.

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
        """Begin a read in one compiled call if a counter still has a value; otherwise do nothing and return False.

        Args:
            counter: position in `counters`. value: expected value. samples: rows to be drawn.
        """
        if self._admission.has_conditions:
            return False
        return self._recovery.lock.run(ticket.begin_unchanged, self._readers, counter, value, samples)

    def _begin(self, samples: int, ticket: Ticket | None, look: Callable[[], _T]) -> tuple[Ticket, _T]:
        ticket = ticket or Ticket()

        def take() -> tuple[_T]:
            ticket.begin(self._readers)
            return (look(),)

        return ticket, self._admission.when_samplable(samples, take, ticket=ticket)[0]

    def _changes(self, since: int) -> Changes:
        position = int(self.arrays.counters[NUM_TOUCHED])
        slots = self.arrays.touched_since(since)
        everything = slots is None
        if slots is None:
            slots = np.arange(self.arrays.num_slots)
        marks = self.arrays.revised[slots]
        revised = (marks >> 1) > since
        return Changes(
            position,
            int(self.arrays.counters[NEXT_SEQUENCE]),
            self.arrays.num_ready(),
            everything,
            slots,
            self.arrays.state[slots] == READY,
            self.arrays.sequence[slots],
            self.arrays.priority[slots],
            revised,
            revised & ((marks & 1) > 0),
            self.arrays.extent[slots] if self.arrays.moves else None,
        )

    def follow(self, since: int, read: Callable[[Array | None], _T]) -> tuple[int, _T]:
        """Read the index at one moment, with the slots that have changed since an earlier call.

        Args:
            since: position that the earlier call returned; -1 for everything.
            read: called under the lock with the distinct slots that were committed, retired or revised since, int64
                [n]; None for all, because the ring of changes has overflowed.

        Returns:
            The position, and what `read` returned.
        """
        return self._recovery.locked(
            lambda: (int(self.arrays.counters[NUM_TOUCHED]), read(self.arrays.touched_since(since)))
        )

    def begin_ends(
        self, count: int, *, newest: bool, samples: int = 0, ticket: Ticket | None = None
    ) -> tuple[Ticket, Array]:
        """`begin_read`, and the oldest (or newest) slots in order, int64 [at most `count`].

        Args:
            samples, ticket: as for `begin_snapshot`.
        """
        return self._begin(samples, ticket, lambda: self._ends(count, newest))

    def take_ends(
        self, count: int, *, newest: bool, samples: int = 0, ticket: Ticket | None = None
    ) -> tuple[Ticket, Array, Array]:
        """`begin_ends` and `count_samples` under one lock; waits until the table has `count` trajectories.

        Args:
            samples, ticket: as for `begin_snapshot`.

        Returns:
            The ticket; slots, int64 [count]; number of draws of each, int64 [count].

        Raises:
            TableEmptyError, RateLimitError: timed out.
        """
        ticket = ticket or Ticket()

        def look() -> tuple[Ticket, Array, Array] | None:
            if self.arrays.counters[NUM_READY] < count:
                return None
            ticket.begin(self._readers)
            slots = self._ends(count, newest)
            return ticket, slots, self._count_samples(slots, self.arrays.generation[slots], total=samples > 0)

        return self._admission.when_samplable(samples, look)

    def _ends(self, count: int, newest: bool) -> Array:
        slots = np.empty(min(count, self.arrays.num_ready()), dtype=np.int64)
        self.arrays.ops.walk(self.arrays.where, newest, slots)
        return slots

    def begin_read_of(self, slot: int, ticket: Ticket) -> tuple[list[int], int]:
        """`begin_read`, after a check that `slot` is live.

        Args:
            slot: index of the trajectory. ticket: as for `begin_read`.

        Returns:
            Its row of `extent`, and the bits of its filled columns. What lies in memory now stays readable where it
            is; what lies on disk only may come back.

        Raises:
            StaleIndexError: the slot has no live trajectory.
        """

        def begin() -> tuple[list[int], int]:
            if not 0 <= slot < self.arrays.num_slots or self.arrays.state[slot] != READY:
                raise stale(self.arrays, slot)
            ticket.begin(self._readers)
            return self.arrays.extent[slot].tolist(), int(filled_bits(self.arrays, np.array([slot]))[0])

        return self._recovery.locked(begin)

    def begin_read_rows(self, slots: Array, ticket: Ticket) -> tuple[Array, Array]:
        """`begin_read`, after a check that all rows are live.

        Args:
            slots: int64 [n]. ticket: as for `begin_read`.

        Returns:
            Generations and lengths of the trajectories, int64 [n] each.

        Raises:
            StaleIndexError: slots without a live trajectory. The ticket has not begun.
        """
        arrays = self.arrays

        def begin() -> tuple[Array, Array]:
            live = arrays.live_rows(slots, np.full_like(slots, -1), strict=False, what="")
            if not live.all():
                gone = np.flatnonzero(~live)
                raise StaleIndexError(
                    f"{len(gone)} of {len(slots)} rows are stale, as their trajectories were removed or evicted, or "
                    f"never added: index {np.unique(slots[gone])[:10].tolist()}{' ...' if len(gone) > 10 else ''}, the "
                    f"first in row {gone[0]}. Nothing was written; table.indices() lists those that are there."
                )
            ticket.begin(self._readers)
            return arrays.generation[slots], arrays.extent[slots, 0]

        return self._recovery.locked(begin)

    def begin_read_live(self, slots: Array, generations: Array, ticket: Ticket) -> tuple[Array, Array]:
        """`begin_read` of rows that were drawn earlier, of which some may be gone.

        Args:
            slots, generations: int64 [n]. ticket: as for `begin_read`.

        Returns:
            Whether each row's trajectory is in the table, bool [n]; and its row of `extent`, int64 [n, 3], which for
            others is that of anything.
        """
        arrays = self.arrays

        def begin() -> tuple[Array, Array]:
            live = arrays.live_rows(slots, generations, strict=False, what="")
            ticket.begin(self._readers)
            return live, arrays.extent[np.where(live, slots, 0)]

        return self._recovery.locked(begin)

    def snapshot(self) -> Snapshot:
        """A snapshot of the live trajectories, oldest first; also for a signal handler amid another call."""

        def look() -> Snapshot:
            if amid:
                return Log().snapshot(self.arrays.view, lambda _: None)
            self._admission.expire()
            return self._snapshot()

        amid = self._recovery.lock.is_mine
        return self._recovery.read(look)

    def count_samples(self, slots: Array, generations: Array) -> Array:
        """Count rows as drawn, and retire trajectories that reach `max_times_sampled`.

        Args:
            slots, generations: int64 [n], the rows.

        Returns:
            int64 [n], number of draws of each trajectory; 0 if it is stale or had reached the limit before.
        """
        rows = [np.ascontiguousarray(part, dtype=np.int64) for part in (slots, generations)]
        return self._recovery.locked(lambda: self._count_samples(*rows))

    def _count_samples(self, slots: Array, generations: Array, *, total: bool = False) -> Array:
        times = np.empty(len(slots), dtype=np.int64)
        limit = self.arrays.rules.max_times_sampled or 0
        self.arrays.ops.count_samples(self.arrays.where, slots, generations, limit, total, times)
        return times

    def count_drawn(self, count: int) -> None:
        """Count rows drawn elsewhere; fewer than none: that were counted but not drawn."""

        def add() -> None:
            self.arrays.counters[NUM_SAMPLED] += count

        if count:
            self._recovery.locked(add)

    def await_samplable(self, count: int) -> None:
        """Wait until the rate limiter allows `count` rows to be drawn.

        Raises:
            RateLimitError: timed out.
        """
        self._admission.when_samplable(count, lambda: True)

    def _snapshot(self) -> Snapshot:
        return self._log.snapshot(self.arrays.view, self.arrays.touched_since)

    def set_priorities(self, slots: Array, generations: Array, priorities: Array) -> None:
        """Write new priorities; rows with stale generations are skipped.

        Args:
            slots, generations: int64 [n]; generation -1 matches any. priorities: float32 [n].
        """
        rows = [np.ascontiguousarray(part, dtype=np.int64) for part in (slots, generations)]
        priorities = np.ascontiguousarray(priorities, dtype=np.float32)
        self._recovery.locked(lambda: self.arrays.ops.set_priorities(self.arrays.where, *rows, priorities))

    def revise(
        self, updates: PriorityUpdates, *, strict: bool, steps: bool = True
    ) -> tuple[int, tuple[int, int]]:
        """Write new priorities of trajectories, which selections by priority follow; see `Table.update_priority`.

        Args:
            updates: rows; their steps are ignored. strict: whether a stale row is an error.
            steps: whether selections of steps follow, too.

        Returns:
            Number of stale rows, which are skipped; positions (see `Changes`) before and after the change.

        Raises:
            StaleIndexError: with `strict`, a row is stale. Nothing was changed.
        """
        slots, arrays = updates.slots, self.arrays
        generations = np.full(len(slots), -1) if updates.generations is None else updates.generations

        def write() -> tuple[int, tuple[int, int]]:
            live = arrays.live_rows(slots, generations, strict=strict, what="priorities are for")
            chosen = slots if live.all() else slots[live]
            first, count = int(arrays.counters[NUM_TOUCHED]), len(chosen)
            if count:
                begin_change(arrays.view)
                arrays.ops.set_priorities(arrays.where, slots, generations, updates.priorities)
                arrays.revised[chosen] = 2 * (first + count) + steps
                arrays.touched[np.arange(first, first + count) % arrays.num_slots] = chosen
                arrays.counters[NUM_TOUCHED] = first + count
                end_change(arrays.view)
            return len(slots) - count, (first, first + count)

        return self._recovery.locked(write)


def stale(arrays: IndexArrays, slot: int) -> StaleIndexError:
    """The error for a slot without a live trajectory."""
    return StaleIndexError(
        f"Index {slot} is stale: its trajectory was removed or evicted, or it was never used. "
        f"The table holds {int(arrays.counters[NUM_READY])} trajectories; table.indices() lists them."
    )
