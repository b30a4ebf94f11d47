"""The spool of a client: trajectories that its writers have committed, until the server has stored them."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from typing import Any, NamedTuple

from gear_loader.errors import GearError, PeerTimeoutError, TableFullError, TransportError
from gear_loader.storage.counters import NEXT_SEQUENCE
from gear_loader.storage.table import Table
from gear_loader.transport.delivery import Delivery
from gear_loader.transport.table_report import TableReport
from gear_loader.utils.arrays import Array
from gear_loader.utils.waiting import Backoff

__all__ = ["Spool"]

_log = logging.getLogger("gear_loader.transport")
_MOST_TRAJECTORIES = 1 << 12
_IDLE = (
    0.02  # seconds between looks for chunks and vector writers' trajectories, which do not wake the thread
)
_QUIET = 5.0  # seconds before a line about a server that does not answer, and between two

Key = tuple[int, int]
"""Slot and generation of a trajectory in the spool."""


class _Request(NamedTuple):
    """Trajectories to be stored by one request: their slots and ids, int64 [n], and the sequence number of the last."""

    slots: Array
    ids: Array
    last: int


class Spool:
    """A private table that writers fill and a thread empties in the same order, each trajectory exactly once.

    When the server cannot be reached, the thread goes on trying and writers go on until the spool is full; then they
    wait for space. When the server refuses a trajectory for good (another schema or secret, say), every later call
    raises its error.

    Args:
        report: the server's table. delivery: stores in it. name: of the server in errors.
        spool_bytes: bytes of steps that the spool holds.
    """

    def __init__(self, report: TableReport, delivery: Delivery, name: str, spool_bytes: int) -> None:
        step_bytes = report.schema.step_bytes
        steps = max(_MOST_TRAJECTORIES, spool_bytes // step_bytes)
        self.table = Table.create(
            report.schema,
            max_steps=min(steps, 2**36),
            max_trajectories=_MOST_TRAJECTORIES,
            on_full="wait",
            timeout=delivery.timeout,
        )
        self.table.longest = min(self.table.longest, report.longest)
        self.name = name
        self.wanted: dict[Key, int] = {}
        """Where writers that wait want to know the index in the server's table: -1 until it is known."""
        self._delivery = delivery
        self._changed = threading.Condition()
        self._work = threading.Event()
        self._stopped = False
        self._failed: GearError | None = None  # for good
        self._last: GearError | None = None  # of the latest attempt
        self._quiet = Backoff(_QUIET)
        self._asked = time.monotonic()
        self._stored = 0  # sequence number up to which trajectories are stored
        self._pid = os.getpid()
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self),), daemon=True)
        self._thread.name = f"gear-loader-spool-{name}"
        self._thread.start()

    # ---------------------------------------------------------------- writers

    def check(self) -> None:
        """Raise what makes it impossible to store anything."""
        if self._pid != os.getpid():
            raise TransportError(
                f"This connection to {self.name} was made in process {self._pid} and is used in {os.getpid()}: call "
                "gear_loader.connect in each process."
            )
        if self._failed is not None:
            raise type(self._failed)(
                f"{self.name} refused a trajectory, and {self.num_waiting} are not stored: {self._failed}"
            ) from self._failed
        if self._stopped:
            raise TransportError(f"The connection to {self.name} has been closed; connect again.")

    def wake(self) -> None:
        """Tell the thread that something was committed."""
        self._work.set()

    @property
    def num_waiting(self) -> int:
        """Committed trajectories that the server has not confirmed yet."""
        return len(self.table)

    def full(self, error: TableFullError) -> TransportError:
        """The error of a writer whose wait for space timed out."""
        return PeerTimeoutError(
            f"The spool is full: {self.num_waiting:,} trajectories wait for {self.name}. {self._why()} Nothing is "
            f"lost: retry, or connect with a larger spool_bytes. ({error})"
        )

    def _why(self) -> str:
        """What the thread waits for, as a sentence for errors."""
        if self._last is not None:
            return f"The last attempt failed: {self._last}"
        return f"The server has not answered the request of {time.monotonic() - self._asked:.1f} s ago yet."

    def flush(self, timeout: float) -> None:
        """Wait until all trajectories committed before are stored.

        Raises:
            PeerTimeoutError: not before the deadline; they stay in the spool. Any error of `check`.
        """
        self.check()
        target = int(self.table.index.arrays.counters[NEXT_SEQUENCE])
        backoff = Backoff(timeout)
        self.wake()
        with self._changed:
            while self._stored < target and self._failed is None and backoff.left:
                self._changed.wait(min(backoff.left, 1.0))
        self.check()
        if self._stored < target:
            raise PeerTimeoutError(
                f"Timed out after {timeout:g} s: {self.num_waiting:,} trajectories are not stored by {self.name} yet. "
                f"{self._why()} They stay in the spool: call flush() again."
            )

    def report_loss(self) -> None:
        """Log that committed trajectories were not stored."""
        _log.error(
            "%d committed trajectories were not stored by %s: %s", self.num_waiting, self.name, self._last
        )

    def stop(self) -> None:
        """End the thread after its current request; idempotent."""
        self._stopped = True
        self._work.set()

    # ---------------------------------------------------------------- the thread

    def send(self) -> bool:
        """Store what has been committed, by one request; return whether there was anything."""
        request = self._next()
        if request is None:
            return False
        arrays = self.table.index.arrays
        finals = arrays.extent[request.slots, 2]
        pairs = zip(request.slots.tolist(), finals.tolist(), strict=True)
        rows: list[Any] = [self.table.rows(slot, final=bool(final)) for slot, final in pairs]
        self._asked = time.monotonic()
        try:
            stored = self._delivery.store(
                rows,
                arrays.priority[request.slots],
                finals,
                ids=request.ids,
                timeout=math.inf,
                failed=self._note,
            )
        except GearError as error:
            if not self._stopped:
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                _log.error("%s refused a trajectory: %s", self.name, error)
            return False
        for slot, index in zip(request.slots.tolist(), stored.tolist(), strict=True):
            key = slot, int(arrays.generation[slot])
            if key in self.wanted:
                self.wanted[key] = index
        self.table.remove(request.slots)
        with self._changed:
            self._stored, self._last, self._quiet = request.last + 1, None, Backoff(_QUIET)
            self._changed.notify_all()
        return True

    def _note(self, error: GearError) -> None:
        """Remember why an attempt failed, and log it now and then; raise it if the thread is to end."""
        if self._stopped:
            raise error
        self._last = error
        if not self._quiet.left:
            _log.warning("%d trajectories wait for %s: %s", self.num_waiting, self.name, error)
            self._quiet = Backoff(_QUIET)

    def _next(self) -> _Request | None:
        """The oldest committed trajectories, as many as go into a request."""
        slots = self.table.indices()
        if not len(slots):
            return None
        arrays, schema = self.table.index.arrays, self.table.schema
        rows = arrays.extent[slots][:, 0] + arrays.extent[slots][:, 2]
        slots = slots[: self._delivery.counts(rows * schema.step_bytes + schema.trajectory_bytes)]
        return _Request(slots, self._delivery.ids(len(slots)), int(arrays.sequence[slots[-1]]))

    def idle(self) -> bool:
        """Wait for work; return False when the thread is to end."""
        self._work.wait(_IDLE)
        self._work.clear()
        return not self._stopped and self._failed is None


def _run(reference: weakref.ref[Spool]) -> None:
    """The thread, which does not keep the spool alive."""
    while True:
        spool = reference()
        if spool is None or not spool.idle():
            return
        try:
            while spool.send():
                pass
        except Exception as error:  # an internal error: writers must learn of it
            spool._failed = GearError(f"{type(error).__name__}: {error}")
            _log.error("the spool of %s failed: %s", spool.name, error, exc_info=error)
            return
        del spool
