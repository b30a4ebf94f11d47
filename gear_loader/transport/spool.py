"""The spool of a client: trajectories that its writers have begun, until the server has stored them."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from typing import NamedTuple

import numpy as np

from gear_loader.errors import GearError, PeerTimeoutError, TransportError
from gear_loader.storage.schema import Schema
from gear_loader.transport.change_messages import MOST_PART
from gear_loader.transport.delivery import Delivery
from gear_loader.transport.store_message import Rows
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import Condition, uninterrupted
from gear_loader.utils.waiting import Backoff

_log = logging.getLogger("gear_loader.transport")
_OVERHEAD = 512  # bytes that a trajectory is counted with besides its steps
_QUIET = 5.0  # seconds before a line about a server that does not answer, and between two
# Most seconds between two looks at what is waited for: an interrupt may have ended a notification.
_LOOK = 1.0
_END = 5.0  # most seconds that the end of the thread is waited for
_PIECE_BYTES = 1 << 18
_SPARE_BYTES = 1 << 25  # of memory of stored trajectories that is kept: those of a few requests

Piece = dict[str, Array]
"""Consecutive steps of a trajectory: column name -> uint8 [steps, step_bytes], contiguous."""


class Buffer(NamedTuple):
    """Memory of one piece.

    Attributes:
        steps: that it has room for. piece: column name -> uint8 [steps, step_bytes]. views: the same as values
            [steps, *shape], a column each; empty until a writer needs them.
    """

    steps: int
    piece: Piece
    views: list[Array]


class Account:
    """Bytes of a spool that somebody holds.

    Attributes:
        size: that number.
    """

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class Episode(Account):
    """A trajectory on its way to the server.

    Attributes:
        pieces: its steps; of a committed one, the final step is the last row. rows: number of rows in them.
        buffers: their memory, for other pieces when it is stored.
        once: column per trajectory -> uint8 [1, step_bytes]. priority: -1 for none. final: 1 with a final step, else 0.
        values: of ragged columns, in parts: the step after it, and its values; of columns per trajectory the last part.
        id: its global id, once it has one; else -1. ahead: pieces that were sent before the commit.
        flows: whether pieces are sent before the commit. again: whether it was sent and may be stored.
        here: whether the thread that committed it sends it. number: of the commit in its spool, 0 before it.
        is_stored: whether the server has confirmed it. index: in the server's table, -1 until it is known.
    """

    __slots__ = (
        *("again", "ahead", "buffers", "final", "flows", "here", "id", "index", "is_stored", "number"),
        *("once", "pieces", "priority", "rows", "values"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.buffers: list[Buffer] = []
        self.once: Piece = {}
        self.values: list[tuple[int, Piece]] = []
        self.rows = self.final = self.ahead = self.number = 0
        self.again = self.flows = self.here = self.is_stored = False
        self.priority, self.id, self.index = -1.0, -1, -1

    def add(self, piece: Piece, rows: int) -> None:
        """Add steps."""
        self.pieces.append(piece)
        self.rows += rows

    def complete(self, priority: float, once: Piece, *, final: bool) -> None:
        """Add what is known at the commit; the values of the columns per trajectory are copied."""
        self.once = {name: values.copy() for name, values in once.items()}
        self.priority, self.final = priority, int(final)

    @property
    def value_bytes(self) -> int:
        """Bytes of the ragged values."""
        return sum(part.nbytes for _, values in self.values for part in values.values())

    @property
    def as_rows(self) -> Rows:
        """The trajectory as it is sent."""
        names = dict.fromkeys(name for _, values in self.values for name in values)
        values = {name: [part[name] for _, part in self.values if name in part] for name in names}
        return Rows(self.rows, self.pieces, self.once, values)

    def last(self, count: int) -> Piece:
        """A copy of the last `count` steps."""
        found: list[Piece] = []
        for piece in reversed(self.pieces):
            rows = len(next(iter(piece.values())))
            begin = max(0, rows - count)
            found.append({name: values[begin:] for name, values in piece.items()})
            count -= rows - begin
            if not count:
                break
        return {name: np.concatenate([piece[name] for piece in reversed(found)]) for name in self.pieces[0]}


class _Ahead(NamedTuple):
    """A piece that is sent before its trajectory is committed.

    Attributes:
        order: among all that is sent. episode: its trajectory. number: of the piece in it. piece: its rows.
    """

    order: int
    episode: Episode
    number: int
    piece: Piece


class _Attempt:
    """What came of an attempt to store a trajectory.

    Attributes:
        found: as `Delivery.store_here` returns it. has_ended: whether it has.
    """

    def __init__(self) -> None:
        self.found: int | GearError | None = None
        self.has_ended = False


class Spool:
    """Trajectories of all writers of a connection, which a thread sends in order, each exactly once.

    Pieces of long trajectories are sent while these are still being written; the server keeps them until the
    trajectory is committed, and if it does not, the whole trajectory is sent with the commit.

    When the server cannot be reached, the thread goes on trying and writers go on until the spool is full; then they
    wait for space. When the server refuses a trajectory for good (another schema or secret, say), every later call
    raises its error.

    An exception at any bytecode of a writer leaves it usable: a trajectory is committed by one insertion into a
    dictionary, counters are computed again after a change that was interrupted, and no lock stays held.

    Args:
        schema: the table's columns. longest: steps of the longest trajectory that it holds.
        delivery: stores in it. name: of the table and its server in errors.
        spool_bytes: bytes of steps from which on writers wait while committed trajectories are being sent.
        max_in_flight: number of committed trajectories that are being sent from which on writers wait; None for any.
    """

    def __init__(
        self,
        schema: Schema,
        longest: int,
        delivery: Delivery,
        name: str,
        spool_bytes: int,
        max_in_flight: int | None = None,
    ) -> None:
        self.schema = schema
        self.longest = longest
        self.name = name
        self.piece_steps = max(1, min(longest, _PIECE_BYTES // schema.step_bytes))
        """Steps of a piece."""
        self._most = spool_bytes
        self._most_in_flight = max_in_flight
        self._delivery = delivery
        self._changed = Condition()  # something is to be sent, or is stored
        self._ahead: collections.deque[_Ahead] = collections.deque()
        self._accounts: set[Account] = set()
        self._held = 0  # bytes of all accounts
        self._spare: dict[int, list[Buffer]] = {}  # by the bit length of their steps
        self._spare_bytes = 0
        self._is_settled = True  # False while `_held` and `_spare_bytes` are changed
        self._order = itertools.count(1)  # of commits and pieces
        self._committed = 0  # order of the last commit
        # Committed, by their numbers, which ascend.
        self._unstored: collections.OrderedDict[int, Episode] = collections.OrderedDict()
        self._stopped = False
        self._failed: GearError | None = None  # for good
        self._last: GearError | None = None  # of the latest attempt
        self._quiet = Backoff(_QUIET)
        self._asked = time.monotonic()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"gear-loader-spool-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread; `stop` ends it."""
        uninterrupted(self._thread.start)

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

    @property
    def num_waiting(self) -> int:
        """Committed trajectories that the server has not confirmed yet."""
        return len(self._unstored)

    def reserve(self, account: Account, size: int) -> None:
        """Let an account hold `size` bytes of steps; while they do not fit, wait until something is stored.

        What is not committed is never waited for: open trajectories alone may take more. With `max_in_flight`, w
        writers that have begun a trajectory each may commit w - 1 more.

        Raises:
            PeerTimeoutError: nothing was stored before the deadline; nothing was counted. Any error of `check`.
        """
        with self._changed:
            backoff = Backoff(self._delivery.timeout)
            while (
                (is_full := self._is_full(size - account.size))
                and self._failed is None
                and not self._stopped
                and backoff.left
            ):
                self._changed.wait(min(backoff.left, _LOOK))
            self.check()
            if is_full:
                limit = "max_in_flight" if self._in_flight_are_most else "spool_bytes"
                raise PeerTimeoutError(
                    f"The spool is full: {self.num_waiting:,} trajectories wait for {self.name}. {self._why()} Nothing "
                    f"is lost: retry, or connect with a larger {limit}."
                )
            self._hold(account, size)

    def hold(self, account: Account, size: int) -> None:
        """Let an account hold `size` bytes without a wait; 0 closes it."""
        with self._changed:
            self._hold(account, size)
            if not size:
                self._changed.notify_all()

    def _hold(self, account: Account, size: int) -> None:
        if not self._is_settled:
            self._settle()
        self._is_settled = False
        change, account.size = size - account.size, size
        if size:
            self._accounts.add(account)
        else:
            self._accounts.discard(account)
        if not self._is_settled:  # else a signal handler has made a change meanwhile, and counted this one
            self._held += change
            self._is_settled = True

    def _settle(self) -> None:
        """Compute the counters again if a change of them was interrupted."""
        if not self._is_settled:
            self._held = sum(account.size for account in list(self._accounts))
            steps = sum(buffer.steps for found in list(self._spare.values()) for buffer in list(found))
            self._spare_bytes = steps * self.schema.step_bytes
            self._is_settled = True

    def take_buffer(self, least: int, most: int) -> Buffer | None:
        """Memory of stored steps, with room for `least` to `most` of them; None if there is none of about that size."""
        with self._changed:
            found = self._spare.get(most.bit_length())
            if not found or not least <= found[-1].steps <= most:
                return None
            self._settle()
            self._is_settled = False
            buffer = found.pop()
            self._spare_bytes -= buffer.steps * self.schema.step_bytes
            self._is_settled = True
            return buffer

    def _keep_buffers(self, episode: Episode) -> None:
        """Keep the memory of a stored trajectory for the next ones: the kernel clears each page of new memory."""
        if not episode.buffers:
            return
        self._settle()
        self._is_settled = False
        while episode.buffers:
            buffer = episode.buffers.pop()  # first: memory that were kept twice would be given to two writers
            size = buffer.steps * self.schema.step_bytes
            if self._spare_bytes + size <= min(_SPARE_BYTES, self._most):
                self._spare.setdefault(buffer.steps.bit_length(), []).append(buffer)
                self._spare_bytes += size
        self._is_settled = True

    def _is_full(self, size: int) -> bool:
        self._settle()
        return self.num_waiting > 0 and (self._held + size > self._most or self._in_flight_are_most)

    @property
    def _in_flight_are_most(self) -> bool:
        return self._most_in_flight is not None and self.num_waiting >= self._most_in_flight

    def send_ahead(self, episode: Episode) -> None:
        """Send the last piece of an open trajectory."""
        episode.flows = True
        with self._changed:
            self._ahead.append(
                _Ahead(next(self._order), episode, len(episode.pieces) - 1, episode.pieces[-1])
            )
            self._changed.notify_all()

    def commit(self, episode: Episode) -> None:
        """Hand over a trajectory; `is_committed` tells whether an interrupted call has done so."""
        with self._changed:
            self._count_in(episode)
            self._changed.notify_all()

    def is_committed(self, episode: Episode) -> bool:
        """Whether a trajectory was handed over: it is stored, or will be."""
        return episode.is_stored or episode.number in self._unstored

    def _count_in(self, episode: Episode) -> None:
        self._hold(episode, episode.size + _OVERHEAD)
        number = next(self._order)
        self._committed = number
        episode.number = number
        self._unstored[number] = episode

    def _count_out(self, episode: Episode, index: int) -> None:
        if episode.number in self._unstored:
            episode.index, episode.is_stored = index, True
            del self._unstored[episode.number]
            self._hold(episode, 0)
            episode.pieces.clear()
            episode.values.clear()
            self._keep_buffers(episode)

    def store_now(self, episode: Episode) -> None:
        """Store a trajectory from the calling thread if no other waits, without hand-overs between threads.

        If that is not possible, or fails, it is handed over as by `commit`.
        """
        attempt = _Attempt()
        try:
            try:
                with self._changed:
                    episode.here = not self._unstored and not self._ahead and not episode.flows
                    self._count_in(episode)
                    self._changed.notify_all()
                if not episode.here:
                    return
                episode.id = self._delivery.new_id()
                given = episode.as_rows, episode.priority, episode.final, episode.id
                attempt.found = self._delivery.store_here(*given)
                attempt.has_ended = True
            finally:  # also after an interruption
                if episode.here:
                    self._end_here(episode, attempt)
        finally:
            if episode.here:  # that was interrupted
                self._end_here(episode, attempt)

    def _end_here(self, episode: Episode, attempt: _Attempt) -> None:
        found = attempt.found
        with self._changed:
            if isinstance(found, int):
                self._count_out(episode, found)
            else:
                self._last, episode.again = found, found is not None or not attempt.has_ended
            episode.here = False
            self._changed.notify_all()

    def _why(self) -> str:
        """What the thread waits for, as a sentence for errors."""
        if self._last is not None:
            return f"The last attempt failed: {self._last}"
        return f"The server has not answered the request of {time.monotonic() - self._asked:.1f} s ago yet."

    def flush(self, timeout: float, since: Backoff | None = None) -> None:
        """Wait until all trajectories committed before are stored.

        Args:
            timeout: seconds until the deadline. since: the wait that this one continues, of the same seconds.

        Raises:
            PeerTimeoutError: not before the deadline; they stay in the spool. Any error of `check`.
        """
        self.check()
        backoff = Backoff(timeout) if since is None else since
        with self._changed:
            target = self._committed
            while (waits := self._waits_for(target)) and self._failed is None and backoff.left:
                self._changed.wait(min(backoff.left, _LOOK))
        self.check()
        if waits:
            raise PeerTimeoutError(
                f"Timed out after {timeout:g} s: {self.num_waiting:,} trajectories are not stored by {self.name} yet. "
                f"{self._why()} They stay in the spool: call flush() again."
            )

    def _waits_for(self, number: int) -> bool:
        """Whether a trajectory up to this number is not stored."""
        while True:
            with contextlib.suppress(RuntimeError):  # a signal handler has committed something meanwhile
                return next(iter(self._unstored), number + 1) <= number

    def report_loss(self) -> None:
        """Log that committed trajectories were not stored."""
        _log.error(
            "%d committed trajectories were not stored by %s: %s", self.num_waiting, self.name, self._last
        )

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def stop(self) -> None:
        """Let the thread end after its current request; idempotent."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the end of the thread, for seconds at most."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_END)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while work := self._next():
            try:
                if isinstance(work, _Ahead):
                    self._send_piece(work)
                else:
                    self._store(work)
            except GearError as error:
                if not self._stopped:
                    self._fail(error)
                    _log.error("%s refused a trajectory: %s", self.name, error)
                return
            except Exception as error:  # an internal error: writers must learn of it
                self._fail(GearError(f"{type(error).__name__}: {error}"))
                _log.error("the spool of %s failed: %s", self.name, error, exc_info=error)
                return

    def _fail(self, error: GearError) -> None:
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def _next(self) -> list[Episode] | _Ahead | None:
        """Wait for work: a piece, or committed trajectories for one request; None when the thread is to end."""
        with self._changed:
            while not self._stopped:
                before = self._ahead[0].order if self._ahead else sys.maxsize
                chosen = self._take(before)
                if chosen:
                    return chosen
                if self._ahead:
                    return self._ahead.popleft()
                self._changed.wait(_LOOK)
            return None

    def _take(self, before: int) -> list[Episode]:
        """The next committed trajectories for one request, of those with a smaller number than `before`."""
        chosen: list[Episode] = []
        size = 0
        for episode in self._unstored.values():
            if episode.here:
                continue
            size += self._bytes(episode)
            alone = self._goes_alone(episode)
            if episode.number > before or (chosen and (alone or size > self._delivery.request_bytes)):
                break
            chosen.append(episode)
            if alone or len(chosen) == self._delivery.most:
                break
        return chosen

    def _goes_alone(self, episode: Episode) -> bool:
        """Whether a trajectory needs a request of its own: parts of it, or all of it, were sent before."""
        return episode.ahead > 0 or episode.again

    def _bytes(self, episode: Episode) -> int:
        fixed = episode.rows * self.schema.step_bytes + self.schema.trajectory_bytes
        return fixed + episode.value_bytes

    def _send_piece(self, work: _Ahead) -> None:
        """Send a piece ahead, if all before it were; otherwise it goes with the commit."""
        episode = work.episode
        size = sum(values.nbytes + 128 for values in work.piece.values())
        if episode.ahead != work.number or self._last is not None or size > MOST_PART:
            return
        if episode.id < 0:
            episode.id = self._delivery.new_id()
        if self._delivery.send_part(episode.id, work.number, work.piece):
            episode.ahead += 1

    def _store(self, episodes: list[Episode]) -> None:
        fresh = [episode for episode in episodes if episode.id < 0]
        for episode, identity in zip(fresh, self._delivery.ids(len(fresh)).tolist(), strict=True):
            episode.id = identity
        self._asked = time.monotonic()
        stored = self._delivery.store_rows(
            [each.as_rows for each in episodes],
            np.array([each.priority for each in episodes], dtype=np.float32),
            np.array([each.final for each in episodes], dtype=np.int64),
            np.array([each.id for each in episodes], dtype=np.int64),
            ahead=episodes[0].ahead if len(episodes) == 1 else 0,
            again=any(each.again for each in episodes),
            failed=self._note,
        )
        with self._changed:
            for episode, index in zip(episodes, stored.tolist(), strict=True):
                self._count_out(episode, index)
            self._last, self._quiet = None, Backoff(_QUIET)
            self._changed.notify_all()

    def _note(self, error: GearError) -> None:
        """Remember why an attempt failed, and log it now and then; raise it if the thread is to end."""
        if self._stopped:
            raise error
        self._last = error
        if not self._quiet.left:
            _log.warning("%d trajectories wait for %s: %s", self.num_waiting, self.name, error)
            self._quiet = Backoff(_QUIET)
