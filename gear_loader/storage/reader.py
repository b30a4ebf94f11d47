"""Reading a table: what it holds now, or what has changed, under a read ticket."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gear_loader.errors import StaleIndexError
from gear_loader.storage.admission import Admission
from gear_loader.storage.counters import NEXT_SEQUENCE, NUM_READY, NUM_SAMPLED, NUM_TOUCHED, VERSION
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations import READY
from gear_loader.storage.readers import Readers, Ticket
from gear_loader.storage.recovery import Recovery
from gear_loader.storage.snapshot import Log, Snapshot
from gear_loader.utils.arrays import Array
from gear_loader.utils.waiting import Backoff

__all__ = ["Changes", "Snapshot", "TableReader", "Ticket", "stale"]

_T = TypeVar("_T")
_NO_SLOTS = np.empty(0, dtype=np.int64)


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


class TableReader:
    """What selections, collectors, transports and checkpoints read of a table; see `Table.reader`.

    Args:
        arrays: of the index. recovery: runs sections under the lock. readers, admission: of the index.

    Attributes:
        arrays: the index as views: `extent` (length in steps and place of the block table), `block_ids`, `state`,
            `generation`, `sequence`, `priority` (-1 where none was given) and more; see `gear_loader.storage.layout`.
    """

    def __init__(
        self, arrays: IndexArrays, recovery: Recovery, readers: Readers, admission: Admission
    ) -> None:
        self.arrays = arrays
        self._recovery = recovery
        self._readers = readers
        self._admission = admission
        self._log = Log()
        self._no_changes: Changes | None = None  # what `begin_changes` returned last, if nothing had changed

    @property
    def position(self) -> int:
        """What `begin_changes` would return as the position now. Takes no lock."""
        return int(self.arrays.counters[NUM_TOUCHED])

    def index_arrays(self) -> tuple[Array, Array]:
        """`extent` and `block_ids` of the index, as views; see `gear_loader.storage.layout`."""
        return self.arrays.extent, self.arrays.block_ids

    def slot_states(self) -> tuple[Array, Array, Array]:
        """`state`, `generation` and `sequence` of the index, as views."""
        return self.arrays.state, self.arrays.generation, self.arrays.sequence

    def ages(self, slots: Array, sequences: Array) -> tuple[Array, Array]:
        """How old trajectories are, int64 [n] each: trajectories that came after, and nanoseconds."""
        arrays = self.arrays
        return arrays.counters[NEXT_SEQUENCE] - 1 - sequences, time.monotonic_ns() - arrays.created[slots]

    def backoff(self) -> Backoff:
        """A new wait with the deadline of this handle."""
        return self._admission.backoff()

    def check_gathered(self, bad: int) -> None:
        """Raise CorruptTableError if `native.copying.gather` or `resolve` found `bad` windows that cannot be."""
        if bad:
            raise self.arrays.corrupt(f"{bad:,} windows of a batch have slots or blocks that do not exist")

    # Each of these takes a ticket that the caller has made before, so that the caller can give it back also if the
    # call is interrupted; without one it makes one.

    def begin_read(self, ticket: Ticket | None = None) -> Ticket:
        """Announce that this process reads: no block retired from now on is reused before `Ticket.end`.

        Args:
            ticket: a new one, or None.

        Returns:
            The ticket, to be ended by its `end`.
        """
        ticket = ticket or Ticket()
        self._recovery.locked(lambda: ticket.begin(self._readers))
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
        if self._admission.has_conditions:
            return False

        return self._recovery.lock.run(lambda: ticket.begin_unchanged(self._readers, counter, value, samples))

    def _begin(self, samples: int, ticket: Ticket | None, look: Callable[[], _T]) -> tuple[Ticket, _T]:
        ticket = ticket or Ticket()

        def take() -> tuple[_T]:
            ticket.begin(self._readers)
            return (look(),)

        return ticket, self._admission.when_samplable(samples, take, ticket=ticket)[0]

    def _changes(self, since: int) -> Changes:
        position = int(self.arrays.counters[NUM_TOUCHED])
        slots = self._touched_since(since)
        everything = slots is None
        if slots is None:
            slots = np.arange(self.arrays.num_slots)
        return Changes(
            position,
            int(self.arrays.counters[NEXT_SEQUENCE]),
            self.arrays.num_ready(),
            everything,
            slots,
            self.arrays.state[slots] == READY,
            self.arrays.sequence[slots],
            self.arrays.priority[slots],
        )

    def _touched_since(self, since: int) -> Array | None:
        """The slots that were touched since a position, each once; None if that is not known any more."""
        position = int(self.arrays.counters[NUM_TOUCHED])
        count = position - since
        if since < 0 or not 0 <= count <= self.arrays.num_slots:
            return None
        if count == 0:
            return _NO_SLOTS
        slots = np.unique(self.arrays.touched[np.arange(since, position) % self.arrays.num_slots]).astype(
            np.int64
        )
        if slots[0] < 0 or slots[-1] >= self.arrays.num_slots:
            raise self.arrays.corrupt(
                f"slots {slots[0]} to {slots[-1]} were touched, expected 0 to {self.arrays.num_slots - 1}"
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

    def begin_read_of(self, slot: int, ticket: Ticket | None = None) -> Ticket:
        """`begin_read`, having checked that `slot` is live.

        Args:
            ticket: as for `begin_read`.

        Raises:
            StaleIndexError: it is not.
        """
        ticket = ticket or Ticket()

        def begin() -> None:
            if not 0 <= slot < self.arrays.num_slots or self.arrays.state[slot] != READY:
                raise stale(self.arrays, slot)
            ticket.begin(self._readers)

        self._recovery.locked(begin)
        return ticket

    def snapshot(self) -> Snapshot:
        """The live trajectories now, oldest first."""

        def look() -> Snapshot:
            self._admission.expire()
            return self._snapshot()

        return self._recovery.locked(look)

    def count_samples(self, slots: Array, generations: Array) -> Array:
        """Count that these rows are drawn, and retire trajectories that have been drawn often enough.

        Args:
            slots, generations: int64 [n].

        Returns:
            int64 [n]: how often each has been drawn by now; 0 for rows whose trajectory is gone or used up.
        """
        rows = [np.ascontiguousarray(part, dtype=np.int64) for part in (slots, generations)]
        return self._recovery.locked(lambda: self._count_samples(*rows))

    def _count_samples(self, slots: Array, generations: Array, *, total: bool = False) -> Array:
        times = np.empty(len(slots), dtype=np.int64)
        limit = self.arrays.rules.max_times_sampled or 0
        self.arrays.ops.count_samples(self.arrays.where, slots, generations, limit, total, times)
        return times

    def uncount_samples(self, count: int) -> None:
        """Rows for which the rate limiter was asked were not drawn after all."""

        def uncount() -> None:
            self.arrays.counters[NUM_SAMPLED] -= count

        if count:
            self._recovery.locked(uncount)

    def await_samplable(self, count: int) -> None:
        """Wait until the rate limiter would let `count` rows be drawn.

        Raises:
            RateLimitError: it would not until the deadline.
        """
        self._admission.when_samplable(count, lambda: True)

    def _snapshot(self) -> Snapshot:
        return self._log.snapshot(self.arrays.view, self._touched_since)

    def set_priorities(self, slots: Array, generations: Array, priorities: Array) -> None:
        """Write new priorities of trajectories that are still there.

        Args:
            slots, generations: int64 [n]; a generation of -1 stands for any. priorities: float32 [n].
        """
        rows = [np.ascontiguousarray(part, dtype=np.int64) for part in (slots, generations)]
        priorities = np.ascontiguousarray(priorities, dtype=np.float32)
        self._recovery.locked(lambda: self.arrays.ops.set_priorities(self.arrays.where, *rows, priorities))


def stale(arrays: IndexArrays, slot: int) -> StaleIndexError:
    """The error for a slot without a live trajectory."""
    return StaleIndexError(
        f"Index {slot} names no live trajectory: it was never used, removed or evicted. "
        f"The table holds {int(arrays.counters[NUM_READY])} trajectories; table.indices() lists them."
    )
