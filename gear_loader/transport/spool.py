"""The spool of a client: trajectories that its writers have begun, until the server has stored them."""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gear_loader.errors import GearError, PeerTimeoutError, TransportError
from gear_loader.storage.schema import Schema
from gear_loader.transport.delivery import Delivery
from gear_loader.transport.part_message import MOST_PART
from gear_loader.transport.trajectory_rows import Rows
from gear_loader.utils.arrays import Array
from gear_loader.utils.waiting import Backoff

__all__ = ["Buffer", "Episode", "Piece", "Spool"]

_log = logging.getLogger("gear_loader.transport")
_OVERHEAD = 512  # bytes that a trajectory is counted with besides its steps
_QUIET = 5.0  # seconds before a line about a server that does not answer, and between two
_PIECE_BYTES = 1 << 18
_SPARE_BYTES = 1 << 25  # of memory of stored trajectories that is kept: those of a few requests

Piece = dict[str, Array]
"""Consecutive steps of a trajectory: column name -> uint8 [steps, step_bytes], contiguous."""


class Buffer(NamedTuple):
    """Memory of one piece.

    Attributes:
        steps: that it has room for. piece: column name -> uint8 [steps, step_bytes]. views: the same as values
            [steps, *shape], a column each.
    """

    steps: int
    piece: Piece
    views: Sequence[Array]


class Episode:
    """A trajectory on its way to the server.

    Attributes:
        pieces: its steps; of a committed one, the final step is the last row. rows: number of rows in them.
        buffers: their memory, for other pieces when it is stored.
        once: column per trajectory -> uint8 [1, step_bytes]. priority: -1 for none. final: 1 with a final step, else 0.
        id: its global id, once it has one; else -1. ahead: pieces that were sent before the commit.
        flows: whether pieces are sent before the commit. again: whether it was sent and may be stored.
        number: of the commit among those of its spool. is_stored: whether the server has confirmed it.
        size: bytes that it is counted with. index: in the server's table, -1 until it is known.
    """

    __slots__ = (
        *("again", "ahead", "buffers", "final", "flows", "id", "index", "is_stored", "number", "once"),
        *("pieces", "priority", "rows", "size"),
    )

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.buffers: list[Buffer] = []
        self.once: Piece = {}
        self.rows = self.final = self.size = self.ahead = self.number = 0
        self.again = self.flows = self.is_stored = False
        self.priority, self.id, self.index = -1.0, -1, -1

    def add(self, piece: Piece, rows: int) -> None:
        """Add steps."""
        self.pieces.append(piece)
        self.rows += rows

    def complete(self, priority: float, once: Piece, *, final: bool) -> None:
        """Add what is known at the commit; the values of the columns per trajectory are copied."""
        self.once = {name: values.copy() for name, values in once.items()}
        self.priority, self.final = priority, int(final)

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
    """A piece that is sent before its trajectory is committed: its trajectory, its number, and its rows."""

    episode: Episode
    number: int
    piece: Piece


class Spool:
    """Trajectories of all writers of a connection, which a thread sends in order, each exactly once.

    Pieces of long trajectories are sent while these are still being written; the server keeps them until the
    trajectory is committed, and if it does not, the whole trajectory is sent with the commit.

    When the server cannot be reached, the thread goes on trying and writers go on until the spool is full; then they
    wait for space. When the server refuses a trajectory for good (another schema or secret, say), every later call
    raises its error.

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
        guard = threading.Lock()
        self._changed = threading.Condition(guard)  # for writers: something is stored
        self._work = threading.Condition(guard)  # for the thread: something is to be sent
        self._queue: collections.deque[Episode | _Ahead] = collections.deque()
        self._held = 0  # bytes
        self._spare: dict[int, list[Buffer]] = {}  # by the bit length of their steps
        self._spare_bytes = 0
        self._committed = 0  # trajectories so far
        self._unstored: collections.OrderedDict[int, None] = (
            collections.OrderedDict()
        )  # their numbers, ascending
        self._stopped = False
        self._failed: GearError | None = None  # for good
        self._last: GearError | None = None  # of the latest attempt
        self._quiet = Backoff(_QUIET)
        self._asked = time.monotonic()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"gear-loader-spool-{name}", daemon=True)
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

    @property
    def num_waiting(self) -> int:
        """Committed trajectories that the server has not confirmed yet."""
        return len(self._unstored)

    def reserve(self, size: int) -> None:
        """Count bytes of steps that a writer is about to hold; while the spool is full, wait until something is stored.

        What is not committed is never waited for: open trajectories alone may take more. With `max_in_flight`, w
        writers that have begun a trajectory each may commit w - 1 more.

        Raises:
            PeerTimeoutError: nothing was stored before the deadline; nothing was counted. Any error of `check`.
        """
        with self._changed:
            backoff = Backoff(self._delivery.timeout)
            while self._is_full(size) and self._failed is None and not self._stopped and backoff.left:
                self._changed.wait(min(backoff.left, 1.0))
            self.check()
            if self._is_full(size):
                limit = "max_in_flight" if self._in_flight_are_most else "spool_bytes"
                raise PeerTimeoutError(
                    f"The spool is full: {self.num_waiting:,} trajectories wait for {self.name}. {self._why()} Nothing "
                    f"is lost: retry, or connect with a larger {limit}."
                )
            self._held += size

    def take_buffer(self, least: int, most: int) -> Buffer | None:
        """Memory of stored steps, with room for `least` to `most` of them; None if there is none of about that size."""
        with self._changed:
            found = self._spare.get(most.bit_length())
            if not found or not least <= found[-1].steps <= most:
                return None
            buffer = found.pop()
            self._spare_bytes -= buffer.steps * self.schema.step_bytes
            return buffer

    def _keep_buffers(self, episode: Episode) -> None:
        """Keep the memory of a stored trajectory for the next ones: the kernel clears each page of new memory."""
        for buffer in episode.buffers:
            size = buffer.steps * self.schema.step_bytes
            if self._spare_bytes + size <= min(_SPARE_BYTES, self._most):
                self._spare.setdefault(buffer.steps.bit_length(), []).append(buffer)
                self._spare_bytes += size
        episode.buffers.clear()

    def _is_full(self, size: int) -> bool:
        return self.num_waiting > 0 and (self._held + size > self._most or self._in_flight_are_most)

    @property
    def _in_flight_are_most(self) -> bool:
        return self._most_in_flight is not None and self.num_waiting >= self._most_in_flight

    def count(self, size: int) -> None:
        """Count bytes without a wait, for what was reserved before under another size."""
        with self._changed:
            self._held += size

    def release(self, size: int) -> None:
        """Give back bytes of `reserve`."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    def send_ahead(self, episode: Episode) -> None:
        """Send the last piece of an open trajectory."""
        episode.flows = True
        with self._work:
            self._queue.append(_Ahead(episode, len(episode.pieces) - 1, episode.pieces[-1]))
            self._work.notify()

    def commit(self, episode: Episode) -> None:
        """Hand over a trajectory."""
        with self._work:
            self._count_in(episode)
            self._queue.append(episode)
            self._work.notify()

    def _count_in(self, episode: Episode) -> None:
        episode.size += _OVERHEAD
        self._held += _OVERHEAD
        self._committed = episode.number = self._committed + 1
        self._unstored[episode.number] = None

    def _count_out(self, episode: Episode, index: int) -> None:
        episode.index, episode.is_stored = index, True
        episode.pieces.clear()
        self._keep_buffers(episode)
        self._held -= episode.size
        del self._unstored[episode.number]

    def store_now(self, episode: Episode) -> None:
        """Store a trajectory from the calling thread if no other waits, without hand-overs between threads.

        If that is not possible, or fails, it is handed over as by `commit`.
        """
        with self._changed:
            is_alone = not self._unstored and not self._queue and not episode.flows
            self._count_in(episode)
            if not is_alone:
                self._queue.append(episode)
                self._work.notify()
                return
        index: int | None = None
        failed: GearError | None = None
        was_sent = True
        try:
            episode.id = self._delivery.new_id()
            rows = Rows(episode.rows, episode.pieces, episode.once)
            found = self._delivery.store_here(rows, episode.priority, episode.final, episode.id)
            index, failed = (None, found) if isinstance(found, GearError) else (found, None)
            was_sent = found is not None
        finally:  # also after an interruption
            with self._changed:
                if index is None:
                    self._last, episode.again = failed, was_sent
                    self._queue.appendleft(episode)
                    self._work.notify()
                else:
                    self._count_out(episode, index)
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
                self._changed.wait(min(backoff.left, 1.0))
        self.check()
        if waits:
            raise PeerTimeoutError(
                f"Timed out after {timeout:g} s: {self.num_waiting:,} trajectories are not stored by {self.name} yet. "
                f"{self._why()} They stay in the spool: call flush() again."
            )

    def _waits_for(self, number: int) -> bool:
        """Whether a trajectory up to this number is not stored."""
        return next(iter(self._unstored), number + 1) <= number

    def report_loss(self) -> None:
        """Log that committed trajectories were not stored."""
        _log.error(
            "%d committed trajectories were not stored by %s: %s", self.num_waiting, self.name, self._last
        )

    def stop(self) -> None:
        """End the thread after its current request; idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._work.notify()

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
        with self._work:
            while not self._queue and not self._stopped:
                self._work.wait()
            if self._stopped:
                return None
            first = self._queue.popleft()
            if isinstance(first, _Ahead):
                return first
            if self._goes_alone(first):
                return [first]
            chosen, size = [first], self._bytes(first)
            while self._queue and len(chosen) < self._delivery.most:
                following = self._queue[0]
                if isinstance(following, _Ahead) or self._goes_alone(following):
                    break
                size += self._bytes(following)
                if size > self._delivery.request_bytes:
                    break
                chosen.append(following)
                self._queue.popleft()
            return chosen

    def _goes_alone(self, episode: Episode) -> bool:
        """Whether a trajectory needs a request of its own: parts of it, or all of it, were sent before."""
        return episode.ahead > 0 or episode.again

    def _bytes(self, episode: Episode) -> int:
        return episode.rows * self.schema.step_bytes + self.schema.trajectory_bytes

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
            [Rows(each.rows, each.pieces, each.once) for each in episodes],
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
