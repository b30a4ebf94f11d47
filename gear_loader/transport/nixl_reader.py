"""One-sided reads of a table on another node, without involving its processor.

**One-sided reads trust the network.** They are meant for closed fabrics and must be enabled explicitly: a reader with
the owner's description, or any process that can reach UCX's sockets, can read the owner's memory. Blocks, lengths and
slots are checked against the description before anything is read.

A read may overlap with writes of the owner. After the data, two more reads follow, one after the other:

1. `state` of the slots: READY or RETIRED means that the slot's blocks had not been reused by then; and a word of the
   owner, which shows that the name still refers to this table,
2. `generation` of the slots: if it is unchanged, the state of step 1 was that of the requested trajectory.

The generation of a slot only grows, and a slot is freed before its blocks are reused. A row that fails is GONE.

After a time-out the read **may still complete** later and write the reply's memory. The agent is then abandoned, the
memory is kept until the read has ended, and the next fetch uses a new agent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

import numpy as np

from gear_loader.errors import PeerTimeoutError, SchemaError, TransportError
from gear_loader.storage.states import READY, RETIRED
from gear_loader.transport.nixl_agent import Description
from gear_loader.transport.nixl_plan import Rows, pieces_of, reads_of
from gear_loader.transport.nixl_session import NixlRead, NixlSession
from gear_loader.transport.spec import WindowSpec
from gear_loader.utils.arrays import Array

__all__ = ["NixlPeer"]

_SPIN = 3e-4  # seconds of polling without sleep after a read was started
_PAUSE = 5e-5  # seconds between later polls
_WORTH = (
    256  # bytes that cost as much as another transfer; gaps between slots of up to this size are read, too
)
_QUARANTINE_POLL = 0.05  # seconds between polls of abandoned reads
_GRACE = 0.25  # seconds before the deadline at which connecting gives up, so that its error is reported

_kept_forever: list[Any] = []
"""Reads that had not ended when their peer was closed; their memory can never be reused."""


class _Owners(Protocol):
    def metadata(self, name: str, table: str) -> Future[bytes]: ...


class _Fetch:
    """One fetch: its arguments, future, session, current read and remaining steps."""

    def __init__(self, spec: WindowSpec, rows: Rows, out: Array, deadline: float) -> None:
        self.spec, self.rows, self.out, self.deadline = spec, rows, out, deadline
        self.future: Future[Array] = Future()
        self.session: NixlSession | None = None
        self.read: NixlRead | None = None
        self.steps: Iterator[None] = iter(())


class NixlPeer:
    """Fetches windows of a server's tables by one-sided reads.

    Thread-safe; any number of fetches may be in flight. One thread runs all of them. It connects at the first fetch,
    and again after a failure, with new descriptions from the server.

    Args:
        peer: the server's `Peer`, for descriptions.
        timeout: seconds within which every fetch ends.
        name: of the server in errors, such as "node b".
        loopback: restrict UCX's sockets to the loopback device, unless the user has set UCX_NET_DEVICES; or a function
            that returns this.
    """

    def __init__(
        self, peer: _Owners, *, timeout: float, name: str, loopback: bool | Callable[[], bool] = True
    ) -> None:
        self._peer, self._timeout, self._name, self._loopback = peer, timeout, name, loopback
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._new: deque[_Fetch] = deque()
        self._closed = False
        self._session: NixlSession | None = None
        self._quarantine: list[tuple[NixlRead, int]] = []
        self._posted = 0  # reads started so far
        self._thread: threading.Thread | None = None

    @property
    def quarantined(self) -> tuple[int, int]:
        """Number of abandoned reads that may still complete, and bytes of the memory kept for them."""
        kept = list(self._quarantine)
        return len(kept), sum(count for _, count in kept)

    def fetch(
        self,
        spec: WindowSpec,
        slots: Array,
        anchors: Array,
        generations: Array,
        out: Array,
        *,
        extent: Array,
        block_ids: Array,
    ) -> Future[Array]:
        """Fetch windows of rows into `out`, in the layout of `WindowSpec`.

        Args:
            slots, anchors, generations: int64 [n].
            out: uint8 [at least `spec.reply_bytes(n)`], contiguous. It stays registered, so reuse a few buffers. After
                an error it may still be written: never reuse it.
            extent: int64 [n, 3]. block_ids: int32 [n, K]. Both as `gear_loader.native.gathering.resolve` writes them.

        Returns:
            A future of the status, uint8 [n], a view of `out`. Within the time-out it has a result, or fails with
            TransportError (the owner ended, the table was replaced, or invalid rows) or PeerTimeoutError.

        Raises:
            SchemaError: arrays of other dtypes or sizes. TransportError: closed, or used after a fork.
        """
        rows = Rows(slots, anchors, generations, extent, block_ids)
        needed = spec.reply_bytes(len(rows))
        if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous or out.nbytes < needed:
            raise SchemaError(
                f"out is {out.dtype} {list(out.shape)}; expected contiguous uint8 of at least {needed:,} bytes."
            )
        if os.getpid() != self._pid:
            raise TransportError(
                f"NIXL runs in process {self._pid}, of which this one, {os.getpid()}, is a fork; it cannot be used "
                "here. Start processes by spawning: multiprocessing.get_context('spawn')."
            )
        job = _Fetch(spec, rows, out, time.monotonic() + self._timeout)
        with self._wake:
            if self._closed:
                raise TransportError(f"The connection to {self._name} has been closed.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gear-loader-nixl", daemon=True)
                self._thread.start()
            self._new.append(job)
            self._wake.notify()
        return job.future

    def close(self) -> None:
        """Fail the fetches in flight and end the thread; idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(self._timeout + 1.0)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        active: list[_Fetch] = []
        since = time.monotonic()
        while True:
            with self._wake:
                while not (self._new or active or self._closed):
                    self._wake.wait(_QUARANTINE_POLL if self._quarantine else None)
                    if self._quarantine:
                        break
                if self._closed:
                    active += self._new
                    break
                while self._new:
                    job = self._new.popleft()
                    job.steps = self._fetch(job)
                    active.append(job)
            posted = self._posted
            active = [job for job in active if self._advance(job)]
            if self._posted > posted:
                since = time.monotonic()
            if self._quarantine:
                self._poll_quarantine()
            time.sleep(0 if time.monotonic() - since < _SPIN else _PAUSE)
        for job in active:
            self._fail(job, TransportError(f"the connection to {self._name} has been closed"))
        self._poll_quarantine()
        _kept_forever.extend(self._quarantine)
        self._session = None

    def _advance(self, job: _Fetch) -> bool:
        """Run one step of a fetch; returns whether more follow."""
        try:
            if time.monotonic() > job.deadline:
                raise PeerTimeoutError(f"no answer within {self._timeout:g} s")
            next(job.steps)
            return True
        except StopIteration:
            return False
        except Exception as error:
            self._fail(job, error)
            return False

    def _fail(self, job: _Fetch, error: Exception) -> None:
        if job.read is not None:
            self._quarantine.append((job.read, job.out.nbytes))
            job.read = None
        if job.session is not None and job.session is self._session:
            self._session = None  # the next fetch uses a new session; other fetches may finish with this one
        if job.session is not None:
            job.session.users -= 1
        text = (
            f"{self._name}: {str(error).rstrip('.') or type(error).__name__}; {len(job.rows)} rows of table "
            f"{job.spec.table!r} ({job.spec.data_bytes(len(job.rows)):,} bytes) were to be read by NIXL. See whether "
            "its server runs; the next call reconnects."
        )
        kind = PeerTimeoutError if isinstance(error, TimeoutError) else TransportError
        failure = kind(text)
        failure.__cause__ = error
        if not job.future.done():
            job.future.set_exception(failure)

    def _poll_quarantine(self) -> None:
        left = []
        for read, count in self._quarantine:
            try:
                done = read.is_done()
            except TransportError:
                done = True  # the owner ended: nothing is written any more
            if not done:
                left.append((read, count))
        self._quarantine = left

    # ---------------------------------------------------------------- one fetch

    def _fetch(self, job: _Fetch) -> Iterator[None]:
        """The steps of a fetch, none of which waits for a read."""
        spec, rows, out = job.spec, job.rows, job.out
        count = len(rows)
        start = spec.data_bytes(count)
        status = out[start : start + count]
        if count:
            session, described = self._connect(job)
            reads = reads_of(spec, described, count)
            sides = [pieces_of(spec, described, rows, reads.columns, out)]
            session.hold(out)
            # Columns of a record are read together, with one transfer a block, and split here.
            records = session.borrow(reads.record_bytes) if reads.splits else out[:0]
            if reads.splits:
                sides.append(pieces_of(spec, described, rows, reads.records, records))
            remote, local = (np.concatenate(parts) for parts in zip(*sides, strict=True))
            yield from self._read(job, remote, local, out, records)
            if reads.splits:
                reads.split(records, out, count)
                session.give_back(records)
            gone = yield from self._gone(job, described)
            status[:] = np.where(gone, WindowSpec.GONE, WindowSpec.SERVED)
            for piece in spec.pieces(count) if gone.any() else ():
                end = piece.offset + count * piece.row_bytes
                out[piece.offset : end].reshape(count, -1)[gone] = 0
            session.users -= 1
        if not job.future.done():
            job.future.set_result(status)

    def _connect(self, job: _Fetch) -> tuple[NixlSession, Description]:
        if self._session is None:
            loopback = self._loopback() if callable(self._loopback) else self._loopback
            self._session = NixlSession(loopback=loopback)
        session = job.session = self._session
        session.users += 1
        described = session.tables.get(job.spec.table)
        if described is None:
            timeout = max(job.deadline - time.monotonic() - _GRACE, 0.01)
            try:
                data = self._peer.metadata("nixl", job.spec.table).result(timeout)
            except FutureTimeoutError:
                raise PeerTimeoutError(f"no answer within {self._timeout:g} s") from None
            described = session.learn(job.spec.table, data)
        return session, described

    def _read(self, job: _Fetch, remote: Array, local: Array, *hold: Array) -> Iterator[None]:
        assert job.session is not None
        if not len(remote):
            return
        job.read = NixlRead(job.session, remote, local, *hold)
        self._posted += 1
        try:
            while not job.read.is_done():
                yield
        except TransportError:
            job.read = None  # the read has ended
            raise
        job.read = None

    def _gone(self, job: _Fetch, described: Description) -> Generator[None, None, Array]:
        """Whether the trajectory of each row is gone, bool [n]; see the docstring of the module."""
        session = job.session
        assert session is not None
        slots, inverse = np.unique(job.rows.slots, return_inverse=True)
        buffer = session.borrow(_WORTH * len(slots) + 8)
        word, numbers = buffer[:8], described.numbers
        also = _listed([numbers["word"]], 8), _listed([word.ctypes.data], 8)
        state = yield from self._values(job, described, "state", slots, buffer[8:], np.int32, *also)
        generation = yield from self._values(job, described, "generation", slots, buffer[8:], np.int64)
        replaced = int(word.view(np.uint64)[0]) != numbers["value"]
        session.give_back(buffer)
        if replaced:
            raise TransportError("the table has been replaced by another of its name")
        live = (state == READY) | (state == RETIRED)
        gone: Array = ~(live[inverse] & (generation[inverse] == job.rows.generations))
        return gone

    def _values(
        self,
        job: _Fetch,
        described: Description,
        name: str,
        slots: Array,
        buffer: Array,
        dtype: type,
        *also: Array,
    ) -> Generator[None, None, Array]:
        """Read an array of the owner's index at sorted, distinct slots.

        Args:
            name: of the array. buffer: registered memory for it. dtype: of its values.
            also: remote and local side of another transfer, made at the same time.
        """
        size = np.dtype(dtype).itemsize
        base, here = described.numbers["base"] + described.numbers[name], buffer.ctypes.data
        low, span = int(slots[0]), int(slots[-1] - slots[0]) + 1
        if span * size <= _WORTH * len(slots):  # one transfer from the first slot to the last
            remote, local = _listed([base + low * size], span * size), _listed([here], span * size)
            places = slots - low
        else:
            places = np.arange(len(slots))
            remote, local = _listed(base + slots * size, size), _listed(here + places * size, size)
        if also:
            remote, local = np.concatenate((remote, also[0])), np.concatenate((local, also[1]))
        yield from self._read(job, remote, local, buffer)
        values: Array = buffer[: (int(places[-1]) + 1) * size].view(dtype)[places]
        return values


def _listed(addresses: Any, size: int) -> Array:
    """Transfers of one size for NIXL, int64 [p, 5]."""
    listed = np.empty((len(addresses), 5), dtype=np.int64)
    listed[:, 0] = addresses
    listed[:, 1:] = size, 0, size, 1
    return listed
