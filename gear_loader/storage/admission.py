"""Admission: waiting for the rate limiter before rows are drawn or trajectories added, and expiry by age."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gear_loader.errors import RateLimitError, SchemaError, TableEmptyError
from gear_loader.storage import counters as at
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.readers import Ticket
from gear_loader.storage.recovery import Recovery
from gear_loader.storage.states import READY
from gear_loader.utils.waiting import Backoff

_T = TypeVar("_T")


class Admission:
    """Applies a table's rate limiter and its `max_age`. Waits outside the lock, with back-off and a deadline.

    Args:
        arrays: index arrays. recovery: runs critical sections under the lock.

    Attributes:
        timeout: seconds until a wait for free space or the rate limiter times out; None for the lock's timeout.
        waited: nanoseconds that additions through this handle have waited.
        has_conditions: whether the table has a rate limiter, `max_times_sampled`, `max_age`, or versions of a policy.
    """

    def __init__(self, arrays: IndexArrays, recovery: Recovery) -> None:
        self.arrays = arrays
        self._recovery = recovery
        rules = arrays.rules
        self.has_conditions = (
            rules.rate_limiter is not None or rules.max_times_sampled is not None or rules.max_age is not None
        )
        self.has_conditions |= rules.version is not None
        self.max_age = None if rules.max_age is None else int(rules.max_age * 1e9)
        self.timeout: float | None = None
        self.waited = 0

    def backoff(self) -> Backoff:
        """Start a wait with this handle's timeout."""
        return Backoff(self._recovery.lock.timeout if self.timeout is None else self.timeout)

    def expire(self) -> None:
        """Retire trajectories that are too old, in seconds or in versions. The caller holds the lock."""
        if self.max_age is not None:
            self.arrays.ops.expire(self.arrays.where, time.monotonic_ns() - self.max_age)
        if self.arrays.rules.max_lag is not None:
            self._expire_versions(self.arrays.rules.max_lag)

    def _expire_versions(self, max_lag: int) -> None:
        arrays, counters = self.arrays, self.arrays.counters
        checked = int(counters[at.LAG_CHECKED])
        if checked == counters[at.NUM_TOUCHED]:
            return
        slots = arrays.touched_since(checked)
        slots = np.arange(arrays.num_slots) if slots is None else slots
        slots = slots[arrays.state[slots] == READY]
        old = slots[arrays.versions(slots) < counters[at.POLICY] - max_lag]
        if len(old):
            arrays.ops.outdate(arrays.where, old)
        counters[at.LAG_CHECKED] = counters[at.NUM_TOUCHED]

    def advance_version(self, expected: int | None = None) -> int | None:
        """Raise the version of the policy by one, and retire what is too old then.

        Args:
            expected: the version from which it is raised; None for any.

        Returns:
            The version; None, having changed nothing, if it was not the expected one.

        Raises:
            SchemaError: the table was created without `version`.
        """
        if self.arrays.rules.version is None:
            raise SchemaError("advance_version() was called; expected a table created with version=.")

        def advance() -> int | None:
            counters = self.arrays.counters
            if expected is not None and counters[at.POLICY] != expected:
                return None
            counters[at.LAG_CHECKED] = -1  # first: after a death in here the next call compares all
            counters[at.POLICY] += 1
            self.expire()
            return int(counters[at.POLICY])

        return self._recovery.locked(advance)

    def _counts(self) -> dict[str, int]:
        counters = self.arrays.counters
        return {
            "size": int(counters[at.NUM_READY]),
            "inserted": int(counters[at.NEXT_SEQUENCE] - counters[at.FIRST_SEQUENCE]),
            "sampled": int(counters[at.NUM_SAMPLED]),
        }

    def when_samplable(
        self, count: int, look: Callable[[], _T | None], *, ticket: Ticket | None = None
    ) -> _T:
        """Wait until `count` rows may be drawn and `look`, called under the lock, returns a value; return that value.

        Args:
            count: rows to draw; 0 bypasses the rate limiter.
            look: callback that returns None if the table cannot serve the draw yet.
            ticket: read ticket that counts the drawn rows; None if `look` counts them, or nothing is drawn yet.

        Raises:
            TableEmptyError, RateLimitError: timed out.
        """
        limiter = self.arrays.rules.rate_limiter if count else None
        counters = self.arrays.counters
        backoff: Backoff | None = None

        def attempt() -> tuple[_T | None, dict[str, int]]:
            self.expire()
            used_up = count and self.arrays.rules.max_times_sampled is not None and not counters[at.NUM_READY]
            if not used_up and (limiter is None or limiter.may_sample(count, **self._counts())):
                found = look()
                if found is not None:
                    if ticket is not None:
                        counters[at.NUM_SAMPLED] += count
                        ticket.counted = count
                    self._note_sample_wait(backoff)
                    return found, {}
            return None, self._counts()

        while True:
            found, counts = self._recovery.locked(attempt)
            if found is not None:
                return found
            backoff = backoff or self.backoff()
            if not backoff.sleep():
                self._recovery.locked(functools.partial(self._note_sample_wait, backoff))
                if limiter is None or limiter.may_sample(count, **counts):
                    raise TableEmptyError(
                        f"{count} trajectories were not available after {backoff.timeout:g} s; the table holds "
                        f"{counts['size']}. Check that a writer is running."
                    )
                raise RateLimitError(
                    f"Waited {backoff.timeout:g} s, then timed out. {limiter.explain('sample', count, **counts)}"
                )

    def may_insert(self, count: int) -> bool:
        limiter = self.arrays.rules.rate_limiter
        return limiter is None or limiter.may_insert(count, **self._counts())

    def refuse_insert(self, count: int, backoff: Backoff) -> RateLimitError:
        limiter = self.arrays.rules.rate_limiter
        assert limiter is not None
        return RateLimitError(
            f"Waited {backoff.timeout:g} s, then timed out. {limiter.explain('insert', count, **self._counts())}"
        )

    def note_insert_wait(self, backoff: Backoff | None) -> None:
        if backoff is not None:
            self.waited += backoff.waited
            self.arrays.counters[at.INSERT_WAIT] += backoff.waited

    def _note_sample_wait(self, backoff: Backoff | None) -> None:
        if backoff is not None:
            self.arrays.counters[at.SAMPLE_WAIT] += backoff.waited
