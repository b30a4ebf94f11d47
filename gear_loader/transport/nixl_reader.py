"""One-sided reads of a table on another node, without involving its processor.

**One-sided reads trust the network.** They are meant for closed fabrics and must be enabled explicitly: a reader with
the owner's description, or any process that can reach UCX's sockets, can read the owner's memory. Blocks, lengths and
slots are checked against the description before anything is read.

A read may overlap with writes of the owner. After the steps, two more reads follow, one after the other:

1. `state` of the slots: READY or RETIRED means that the slot's blocks had not been reused by then; and a word of the
   owner, which shows that the name still refers to this table,
2. `generation` of the slots: if it is unchanged, the state of step 1 was that of the requested trajectory.

The generation of a slot only grows, and a slot is freed before its blocks are reused. A row that fails is GONE.

Windows bring their blocks along, from the rank that drew them. **Spans** of steps (`PackedSpec`) do not: two
reads before the steps look them up in the owner's index:

1. `extent` of the slots: the places of their block tables; and `RUNS`, which counts compactions of the block tables. It
   must have the value that was read before, or this read is repeated;
2. the block ids at these places.

The read of the states, after the steps, reads `RUNS` again. If it is still the same, no compaction ended in between and
the ids are those of the trajectory: a place in `block_ids` is used again only after a compaction has moved all block
tables away from it, or after a recovery, and both raise `RUNS` before. Until then an old place stays valid, while
`extent` changes from one half to the other, and for a trajectory that grows, whose old place has the blocks of its old
steps. If `RUNS` has changed, places and ids are read again, and the steps if the ids differ; those of a live trajectory
never change. A row that is not GONE and has no valid ids is an error: the table is corrupt. Ids are checked before any
step is read, so no read leaves the columns of the table.

After a time-out the read **may still complete** later and write the reply's memory. The agent is then abandoned, the
memory is kept until the read has ended, and the next fetch uses a new agent.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

import numpy as np

from gear_loader.errors import PeerTimeoutError, TransportError
from gear_loader.storage.states import READY, RETIRED
from gear_loader.transport.nixl_agent import Description
from gear_loader.transport.nixl_plan import Intervals, Rows, SpanReads, WindowReads
from gear_loader.transport.nixl_session import NixlRead, NixlSession
from gear_loader.transport.spec import PackedSpec, WindowSpec
from gear_loader.utils.arrays import Array
from gear_loader.utils.background import background_thread
from gear_loader.utils.forks import keep_for_ever
from gear_loader.utils.mutex import Condition, Future, uninterrupted

_SPIN = 3e-4  # seconds of polling without sleep after a read was started
_PAUSE = 5e-5  # seconds between later polls
_QUARANTINE_POLL = 0.05  # seconds between polls of abandoned reads
_LOOK = 1.0  # most seconds between two looks for new work
_GRACE = 0.25  # seconds before the deadline at which connecting gives up, so that its error is reported


class _TableError(TransportError):
    """The owner's memory has other contents than expected; the connection to it is sound."""


class _Owners(Protocol):
    def metadata(self, name: str, table: str) -> Future[bytes]: ...


@dataclasses.dataclass(eq=False)
class _Fetch:
    """One fetch: its arguments, future, session, current read and remaining steps.

    Attributes:
        spec, rows, out: what is read, and where to.
        data_bytes: offset of the status in `out`.
    """

    spec: WindowSpec | PackedSpec
    rows: Rows
    out: Array
    data_bytes: int
    deadline: float
    future: Future[Array] = dataclasses.field(default_factory=Future)
    session: NixlSession | None = None
    read: NixlRead | None = None
    steps: Iterator[None] = dataclasses.field(init=False)


class NixlPeer:
    """Fetches windows and spans of a server's tables by one-sided reads.

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
        self._wake = Condition()
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
        spec: WindowSpec | PackedSpec,
        *given: Array,
        out: Array,
        extent: Array | None = None,
        block_ids: Array | None = None,
    ) -> Future[Array]:
        """Fetch windows of rows, or spans of steps, into `out`; see `Peer.fetch`.

        The blocks of spans are looked up in the owner's block tables, by one-sided reads, too.

        Args:
            spec, given: as for `Peer.fetch`.
            out: as for `Peer.fetch`. It stays registered, so reuse a few buffers.
            extent: int64 [n, 3]. block_ids: int32 [n, K]. Both of windows only, as
                `gear_loader.native.gathering.resolve` writes them.

        Returns:
            A future of the status, uint8 [n], a view of `out`. Within the time-out it has a result, or fails with
            TransportError (the owner ended, the table was replaced, or invalid rows) or PeerTimeoutError.

        Raises:
            SchemaError: arrays of other dtypes or sizes. TransportError: closed, or used after a fork.
        """
        rows, status, _ = spec.checked(given, out)
        if os.getpid() != self._pid:
            raise TransportError(
                f"NIXL runs in process {self._pid}, of which this one, {os.getpid()}, is a fork; it cannot be used "
                "here. Start processes by spawning: multiprocessing.get_context('spawn')."
            )
        job = _Fetch(spec, Rows(rows, extent, block_ids), out, status, time.monotonic() + self._timeout)
        with self._wake:
            if self._closed:
                raise TransportError(f"The connection to {self._name} has been closed.")
            if self._thread is None:
                self._thread = background_thread(self._run, "gear-loader-nixl", stop=self._ask_to_end)
            if self._thread.ident is None:
                uninterrupted(self._thread.start)
            self._new.append(job)
            self._wake.notify_all()
        return job.future

    def close(self) -> None:
        """Fail the fetches in flight and end the thread; idempotent."""
        self._ask_to_end()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(self._timeout + 1.0)

    def _ask_to_end(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        active: list[_Fetch] = []
        since = time.monotonic()
        while True:
            with self._wake:
                while not (self._new or active or self._closed):
                    self._wake.wait(_QUARANTINE_POLL if self._quarantine else _LOOK)
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
        # They may still write, and the end of the process would free their memory before it destroys the agent.
        keep_for_ever(*self._quarantine)
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
        if job.session is not None:
            if job.session is self._session:
                self._session = None  # the next fetch uses a new one; others may finish with this one
            job.session.users -= 1
            if not isinstance(error, _TableError):
                job.session.keep()  # the error's traceback refers to it: a garbage collection would destroy the agent
        text = (
            f"{self._name}: {str(error).rstrip('.') or type(error).__name__}; {len(job.rows)} rows of table "
            f"{job.spec.table!r} ({job.data_bytes:,} bytes) were to be read by NIXL. See whether "
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
        rows, out = job.rows, job.out
        status = out[job.data_bytes : job.data_bytes + len(rows)]
        if len(rows):
            session, described = self._connect(job)
            kind = WindowReads if isinstance(job.spec, WindowSpec) else SpanReads
            reads = kind(job.spec, described, rows)  # type: ignore[arg-type]
            session.hold(out)
            # Columns of a record are read together, with one transfer a block, and split here.
            records = session.borrow(reads.record_bytes) if reads.record_bytes else out[:0]
            if isinstance(reads, WindowReads):
                yield from self._read(job, *reads.pieces(out, records), out, records)
                gone, _ = yield from self._gone(job, session, described)
            else:
                gone = yield from self._spans(job, session, described, reads, records)
            if reads.record_bytes:
                reads.split(records, out)
                session.give_back(records)
            if gone.any():
                reads.clear(gone, out)
            status[:] = np.where(gone, WindowSpec.GONE, WindowSpec.SERVED)
            session.users -= 1
        if not job.future.done():
            job.future.set_result(status)

    def _spans(
        self,
        job: _Fetch,
        session: NixlSession,
        described: Description,
        reads: SpanReads,
        records: Array,
    ) -> Generator[None, None, Array]:
        """Read spans; returns which rows are gone, bool [n]. See the docstring of the module."""
        table, rows, out = job.spec.table, job.rows, job.out
        gone, valid, read = np.zeros(len(rows), dtype=np.bool_), None, None
        while not gone.all():
            runs, extents = yield from self._extents(job, session, described, reads)
            gone |= reads.lacking(extents)
            wanted, there = reads.block_ids(extents, ~gone)
            (found,) = yield from self._index(job, session, wanted)
            ids = reads.listed(found, there)
            valid = reads.valid(ids)
            # Blocks of a live trajectory do not change: steps that were read from the same ones need no second read.
            if read is None or reads.differ(ids, read, ~gone & valid):
                remote, local = reads.pieces(ids, ~gone & valid, out, records)
                yield from self._read(job, remote, local, out, records)
            read = ids
            replaced, latest = yield from self._gone(job, session, described)
            gone |= replaced
            if latest == runs:
                break
            session.runs[table] = latest
        if valid is not None and (broken := ~gone & ~valid).any():
            row = int(np.argmax(broken))
            raise _TableError(
                f"row {row}, slot {rows.slots[row]}, has no valid block table in the memory of its owner; the table is "
                "corrupt, or has a disk tier, which one-sided reads do not see"
            )
        return gone

    def _extents(
        self, job: _Fetch, session: NixlSession, described: Description, reads: SpanReads
    ) -> Generator[None, None, tuple[int, Array]]:
        """Number of compactions before, and the extents of a fetch's rows, int64 [n, 3]."""
        table = job.spec.table
        while True:
            before = session.runs.get(table, -1)
            counter = _word(described, "runs")
            extents, latest = yield from self._index(job, session, reads.extents(), counter)
            if latest[0] == before:
                return before, extents.reshape(-1, 3)
            session.runs[table] = int(latest[0])  # read before the next extents

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

    def _gone(
        self, job: _Fetch, session: NixlSession, described: Description
    ) -> Generator[None, None, tuple[Array, int]]:
        """Whether the trajectory of each row is gone, bool [n], and the number of compactions; see the docstring of the
        module."""
        numbers, slots = described.numbers, job.rows.slots
        state, word, runs = yield from self._index(
            job,
            session,
            _entries(described, "state", slots, np.int32),
            Intervals(numbers["word"], np.zeros(1, np.int64), np.full(1, 8, np.int64), np.uint64),
            _word(described, "runs"),
        )
        (generation,) = yield from self._index(
            job, session, _entries(described, "generation", slots, np.int64)
        )
        if int(word[0]) != numbers["value"]:
            raise _TableError("the table has been replaced by another of its name")
        live = (state == READY) | (state == RETIRED)
        gone: Array = ~(live & (generation == job.rows.generations))
        return gone, int(runs[0])

    def _index(
        self, job: _Fetch, session: NixlSession, *wanted: Intervals
    ) -> Generator[None, None, list[Array]]:
        """Read values of the owner's index, at the same time."""
        buffer = session.borrow(sum(each.nbytes for each in wanted))
        places = np.cumsum([0, *(each.nbytes for each in wanted)]).tolist()
        parts = [buffer[place:] for place in places[:-1]]
        sides = [each.transfers(part) for each, part in zip(wanted, parts, strict=True)]
        remote, local = (np.concatenate(side) for side in zip(*sides, strict=True))
        yield from self._read(job, remote, local, buffer)
        found = [each.values(part) for each, part in zip(wanted, parts, strict=True)]
        session.give_back(buffer)
        return found


def _entries(described: Description, name: str, slots: Array, dtype: type) -> Intervals:
    """Entries of an array of the owner's index, one a slot."""
    size, base = np.dtype(dtype).itemsize, described.numbers["base"] + described.numbers[name]
    return Intervals(base, slots * size, np.full(len(slots), size, np.int64), dtype)


def _word(described: Description, name: str) -> Intervals:
    """A counter of the owner's index, int64."""
    return _entries(described, name, np.zeros(1, np.int64), np.int64)
