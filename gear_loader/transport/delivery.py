"""Delivery of trajectories to the table of a server, each exactly once."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from gear_loader.errors import (
    GearError,
    HandshakeError,
    LockTimeoutError,
    PeerTimeoutError,
    RateLimitError,
    TableFullError,
    TransportError,
)
from gear_loader.storage.edit_values import Edits
from gear_loader.storage.ids import CLIENT_ORIGIN, joined, joined_one
from gear_loader.storage.late_values import LateValues
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.schema import Schema
from gear_loader.transport.change_messages import (
    Advance,
    Advanced,
    Fill,
    Overwrite,
    Question,
    Unfilled,
    Update,
)
from gear_loader.transport.client import Peer
from gear_loader.transport.store_message import OneStore, Rows, Stacked
from gear_loader.transport.wire import PartsMissingError
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import new_mutex
from gear_loader.utils.waiting import Backoff

_T = TypeVar("_T")
_COUNT_BITS = 14
_RANDOM_BYTES = 4
_LEAST = 0.5  # seconds of an attempt after a refusal
_STORED_OR_NOT = "the trajectories may be stored or not"  # after a deadline
_FLOWING = 15.0  # seconds that a piece may take to be sent ahead
_PUSHED_BACK = (TableFullError, RateLimitError, LockTimeoutError)
"""Errors of a server that a later attempt may not meet: the table is full, limited, or locked."""


class _Ids:
    """Ids that no other trajectory has: 32 random bits, new ones after each 16,384, and a count; thread-safe."""

    def __init__(self) -> None:
        self._guard = new_mutex()
        self._first, self._left = 0, 0

    def take(self, count: int) -> Array:
        """The next ids, int64 [count]."""
        first = self._sequence(count)
        return joined(np.arange(first, first + count, dtype=np.int64), CLIENT_ORIGIN)

    def take_one(self) -> int:
        """The next id."""
        return joined_one(self._sequence(1), CLIENT_ORIGIN)

    def _sequence(self, count: int) -> int:
        """The first of so many sequence numbers."""
        with self._guard:
            if count > self._left:
                self._left = 1 << _COUNT_BITS
                self._first = int.from_bytes(os.urandom(_RANDOM_BYTES), "little") << _COUNT_BITS
            first, self._first, self._left = self._first, self._first + count, self._left - count
        return first


class Delivery:
    """Stores trajectories in a table of a server, again and again until the server answers or the deadline passes.

    Each trajectory gets an id before it is sent. A request whose answer did not arrive, because the server was killed,
    the connection lost or the time of an attempt over, is sent again with the same ids, by which the server recognises
    it (`StoredOnce`). While the server's table is full, or its rate limiter holds inserts back, it tries again too.
    Thread-safe.

    Args:
        peer: the server. table: name of the table. schema: its columns. timeout: seconds for one call of `store`.

    Attributes:
        most: most trajectories of one request. request_bytes: most bytes of one, unless a single trajectory has more.
    """

    most = 1 << 10
    request_bytes = 8 << 20

    def __init__(self, peer: Peer, table: str, schema: Schema, timeout: float) -> None:
        self.timeout = timeout
        self._peer = peer
        self._table = table
        self._schema = schema
        self._one = OneStore(table, schema)
        self._ids = _Ids()

    def counts(self, sizes: Array) -> int:
        """How many of the first trajectories, whose bytes are `sizes` (int64 [n], n at least 1), go into a request."""
        fit = int(np.searchsorted(np.cumsum(sizes[: self.most]), self.request_bytes, side="right"))
        return max(1, fit)

    def ids(self, count: int) -> Array:
        """New ids for trajectories, int64 [count], count at most `most`."""
        return self._ids.take(count)

    def new_id(self) -> int:
        """A new id for a trajectory."""
        return self._ids.take_one()

    def store_one(self, rows: Rows, priority: float, final: int = 0, *, waits: bool = True) -> int:
        """`store` of one trajectory.

        Args:
            rows: the trajectory. priority: -1 for none. final: 1 if the last row is the final step, else 0.
            waits: as for `store`.

        Returns, raises:
            As `store`.
        """
        identity = self.new_id()

        def attempt(again: bool, seconds: float) -> int:
            if not again:
                return self._store_one(rows, priority, final, identity, seconds)
            values = np.array([priority], np.float32), np.array([final]), np.array([identity])
            return int(self._store([rows], *values, again=True, seconds=seconds)[0])

        return until_done(attempt, _STORED_OR_NOT, timeout=self.timeout, waits=waits)

    def _store_one(self, rows: Rows, priority: float, final: int, identity: int, seconds: float) -> int:
        if self._schema.ragged:
            values = np.array([priority], np.float32), np.array([final]), np.array([identity])
            return int(self._store([rows], *values, again=False, seconds=seconds)[0])
        given = self._one, rows, priority, final, identity
        return self._peer.store_one(*given, seconds=seconds, wait=self._wait(seconds)).result()

    def store(
        self,
        rows: Sequence[Rows] | Stacked,
        priorities: Array,
        finals: Array | None = None,
        *,
        waits: bool = True,
        prefixes: Sequence[Array] = (),
    ) -> Array:
        """Store trajectories, all or none, and wait for it.

        Args:
            rows: at most `most` checked trajectories.
            priorities: float32 [n], -1 for a trajectory without one.
            finals: int64 [n], 1 if the last row of the trajectory is its final step, else 0; None for none.
            waits: whether to try again while the table is full; a rate limiter that holds inserts back, or a lock, is
                always waited for.
            prefixes: as for `Peer.store`.

        Returns:
            Their indices in the server's table, int64 [n]; -1 for one that was evicted before the answer came.

        Raises:
            TableFullError, RateLimitError, LockTimeoutError: the table did not take them before the deadline; they are
                not stored.
            PeerTimeoutError: no answer before the deadline; they may be stored, or may still be.
            HandshakeError, TransportError: the server refused the connection or the request.
        """
        ids = self.ids(len(priorities))

        def attempt(again: bool, seconds: float) -> Array:
            given = rows, priorities, finals, ids
            return self._store(*given, again=again, seconds=seconds, prefixes=prefixes)

        return until_done(attempt, _STORED_OR_NOT, timeout=self.timeout, waits=waits)

    def store_rows(
        self,
        rows: Sequence[Rows],
        priorities: Array,
        finals: Array,
        ids: Array,
        *,
        ahead: int,
        again: bool,
        failed: Callable[[GearError], None],
    ) -> Array:
        """As `store`, for trajectories that have been checked, without a deadline.

        Args:
            ids: int64 [n], from `ids`.
            again: whether a request with these ids was sent before.
            failed: called with the error of an attempt before the next one; may raise to give up.
            ahead: pieces of the only trajectory that were sent before; if the server has lost them, all is sent again.
        """

        def attempt(repeated: bool, seconds: float) -> Array:
            sent, before = again or repeated, 0 if repeated else ahead
            return self._store(rows, priorities, finals, ids, again=sent, seconds=seconds, ahead=before)

        return until_done(attempt, "", timeout=self.timeout, total=math.inf, failed=failed)

    def _store(
        self,
        rows: Sequence[Rows] | Stacked,
        priorities: Array,
        finals: Array | None,
        ids: Array,
        *,
        again: bool,
        seconds: float,
        ahead: int = 0,
        prefixes: Sequence[Array] = (),
    ) -> Array:
        given = self._table, self._schema, rows, priorities, ids, finals
        wait, here = self._wait(seconds), not ahead  # parts are those of a connection
        more: Any = {"ahead": ahead, "again": again, "prefixes": prefixes}
        return self._peer.store(*given, seconds=seconds, wait=wait, here=here, **more).result()

    def _wait(self, seconds: float) -> float:
        """Seconds that a server may wait in an attempt of so many: its refusal comes before any deadline of ours."""
        return min(seconds - min(1.0, seconds / 4), self.timeout / 2)

    def store_here(self, rows: Rows, priority: float, final: int, identity: int) -> int | GearError:
        """One attempt to store a checked trajectory from the calling thread.

        Args:
            rows: the trajectory. priority, final: as for `store_one`. identity: its id, from `new_id`.

        Returns:
            Its index in the server's table; or an error: it may be stored or not, and `store_rows` is to go on.
        """
        seconds = min(self.timeout, _longest_attempt(self.timeout))
        try:
            return self._store_one(rows, priority, final, identity, seconds)
        except TransportError as error:
            return error.__cause__ if isinstance(error.__cause__, GearError) else error

    def send_part(self, identity: int, number: int, piece: Mapping[str, Array]) -> bool:
        """Send steps of a trajectory that is stored later; returns whether they were sent.

        Args:
            identity: id of the trajectory. number: of the piece in it. piece: as for `Peer.send_part`.
        """
        try:
            self._peer.send_part(self._schema, identity, number, piece, seconds=_FLOWING).result()
        except HandshakeError:
            raise
        except TransportError:
            return False
        return True

    def update(self, updates: PriorityUpdates, *, strict: bool) -> int:
        """Set priorities, and wait for it; a request whose answer is lost is sent again.

        Args:
            updates: any number of rows. strict: whether a row of a removed trajectory is an error.

        Returns:
            Number of rows of removed trajectories, which were skipped.

        Raises:
            StaleIndexError: with `strict`. PeerTimeoutError: no answer before the deadline; they may be set or not.
            HandshakeError, TransportError: as `store`.
        """
        rows = updates.slots, updates.generations, updates.priorities
        return self._ask(Update(self._table, *rows, strict), "the priorities may be set or not")

    def fill(self, slots: Array, generations: Array, values: list[LateValues], *, strict: bool) -> int:
        """Write write-once columns, and wait for it; a request whose answer is lost is sent again, and executed once.

        Args:
            slots, generations: int64 [n]. values: of n trajectories; those of steps have the same lengths.
            strict: whether a row of a removed trajectory is an error.

        Returns:
            Number of rows of removed trajectories, which were skipped.

        Raises:
            FilledError, StaleIndexError, SchemaError: as `Table.fill`. PeerTimeoutError: no answer before the deadline;
            they may be filled or not. HandshakeError, TransportError: as `store`.
        """
        steps = [each for each in values if not each.column.trajectory]
        lengths = steps[0].lengths if steps else np.ones(len(slots), dtype=np.int64)
        names = tuple(each.name for each in values)
        identity = int.from_bytes(os.urandom(8), "little")
        payload = sum(each.value_bytes for each in values)
        given = slots, generations, lengths, identity, strict
        request = Fill(self._table, self._schema, names, *given, payload=payload)
        return self._ask(request, "the columns may be filled or not", bulk=[request.bulk(values)])

    def set(self, edits: Edits, *, strict: bool) -> int:
        """Overwrite values of rows, and wait for it; a request whose answer is lost is sent again.

        Args:
            edits: one row or more. strict: whether a row of a removed trajectory is an error.

        Returns:
            Number of rows of removed trajectories, which were skipped.

        Raises:
            FilledError, StaleIndexError, SchemaError, RegionError: as `Table.set`. PeerTimeoutError: no answer before
            the deadline; they may be written or not. HandshakeError, TransportError: as `store`.
        """
        rows = edits.slots, edits.anchors, edits.generations
        lengths = np.array([each.data.shape[1] for each in edits.values], dtype=np.int64)
        names, identity = tuple(each.name for each in edits.values), int.from_bytes(os.urandom(8), "little")
        masked = edits.mask is not None
        request = Overwrite(self._table, self._schema, names, *rows, lengths, masked, identity, strict)
        return self._ask(request, "the values may be written or not", bulk=[request.bulk(edits)])

    def advance(self) -> int:
        """Raise the version of the policy by one, and wait for it; a request whose answer is lost is sent again.

        Returns:
            The version that this call has made.

        Raises:
            SchemaError: as `Table.advance_version`. PeerTimeoutError: no answer before the deadline; it may be raised,
            or not. HandshakeError, TransportError: as `store`.
        """
        backoff = Backoff(self.timeout)
        found = Advanced(0, 0, False)
        # Asks first; then again if another client was faster, or the server has changed.
        while not found.done:
            identity = int.from_bytes(os.urandom(8), "little")
            request = Advance(self._table, found.version, found.memory, identity)
            found = self._ask(request, "the version may be raised or not", total=backoff.left)
        return found.version

    def unfilled(self, names: tuple[str, ...]) -> tuple[Array, Array]:
        """Slots and generations of trajectories with unfilled columns, int64 [n] each; see `Table.unfilled`."""
        slots, generations = self._ask(Unfilled(self._table, names), "nothing was changed")
        return slots, generations

    def _ask(
        self, question: Question[_T], what: str, *, bulk: Sequence[Array] = (), total: float | None = None
    ) -> _T:
        """Ask until there is an answer; `what` and `total` as of `until_done`."""

        def attempt(again: bool, seconds: float) -> _T:
            asked = question.repeated() if again else question
            return self._peer.ask(asked, bulk=bulk, seconds=seconds, here=True).result()

        return until_done(attempt, what, timeout=self.timeout, total=total)


def fill_parts(
    filler: Delivery, slots: Array, generations: Array, values: list[LateValues], *, strict: bool
) -> int:
    """`Delivery.fill` of any number of trajectories, in requests of a limited size; the number of stale ones."""
    sizes = sum((each.sizes for each in values), np.zeros(len(slots), np.int64))

    def fill(low: int, high: int) -> int:
        part = [each.part(low, high) for each in values]
        return filler.fill(slots[low:high], generations[low:high], part, strict=strict)

    return _in_parts(filler, sizes, fill)


def set_parts(filler: Delivery, edits: Edits, *, strict: bool) -> int:
    """`Delivery.set` of any number of rows, in requests of a limited size; the number of stale ones."""
    count = len(edits.slots)
    sizes = np.full(count, sum(each.data.size // count for each in edits.values) if count else 0)
    return _in_parts(filler, sizes, lambda low, high: filler.set(edits.take(slice(low, high)), strict=strict))


def _in_parts(filler: Delivery, sizes: Array, send: Callable[[int, int], int]) -> int:
    """Send rows of these bytes, int64 [n], in requests of a limited size: rows `low` to `high`; the sum of answers."""
    total, low = 0, 0
    while low < len(sizes):
        high = low + filler.counts(sizes[low:])
        total += send(low, high)
        low = high
    return total


def _longest_attempt(timeout: float) -> float:
    """Seconds of an attempt: more than a server waits for space."""
    return max(15.0, timeout / 4)


def until_done(
    attempt: Callable[[bool, float], _T],
    what: str,
    *,
    timeout: float,
    total: float | None = None,
    waits: bool = True,
    failed: Callable[[GearError], None] | None = None,
) -> _T:
    """Make a request until it is answered.

    Args:
        attempt: sends it and waits for the answer: whether it was sent before, and seconds until its deadline.
        what: the consequence of a deadline that passes, for its error.
        timeout: seconds of a call, of which an attempt has a part. total: seconds until the deadline; `timeout` by
            default.
        waits, failed: as for `Delivery.store` and `Delivery.store_rows`.

    Raises:
        HandshakeError, PeerTimeoutError: the server refused the connection, or there was no answer before the deadline.
        GearError: the error of the server.
    """
    total = timeout if total is None else total
    longest = _longest_attempt(timeout)
    backoff = Backoff(total, shortest=0.02, longest=1.0)
    for number in itertools.count():
        try:
            return attempt(number > 0, max(0.05, min(longest, backoff.left)))
        except HandshakeError:
            raise
        except TransportError as error:
            refusal = error.__cause__
            if isinstance(refusal, PartsMissingError):
                continue  # the next attempt sends the whole trajectory
            if isinstance(refusal, GearError):
                if not isinstance(refusal, _PUSHED_BACK) or (
                    isinstance(refusal, TableFullError) and not waits
                ):
                    raise refusal from None
                # An attempt in the little time that is left may end without an answer.
                if backoff.left < min(_LEAST, total / 4):
                    raise type(refusal)(f"Timed out after {total:g} s. {error}") from None
            if failed is not None:
                failed(refusal if isinstance(refusal, GearError) else error)
            if not backoff.sleep():
                raise PeerTimeoutError(f"Timed out after {total:g} s; {what}. {error}") from None
    raise AssertionError("unreachable")
