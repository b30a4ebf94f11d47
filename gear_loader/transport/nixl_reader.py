"""One-sided reads of another node's table: its blocks, without its processor.

**One-sided reads trust the network.** They are meant for closed fabrics and off unless chosen by name: what the owner
tells a reader lets that read the owner's memory, and who can reach the sockets that UCX opens can do the same. Blocks,
lengths and slots are checked against the owner's description before anything is read.

A read sees memory while others may write it. So when the data is here, two more are made, one after the other:

1. `state` of the rows' slots: READY or RETIRED means that the slot's blocks had not been given out again by then; and
   a word of the owner, which says that the table is still the one that has the name,
2. `generation` of the slots: that it is still the one asked for means that what 1. saw was that of this trajectory.

A slot's generation only grows, and a slot is freed before its blocks are used again. A row that fails is gone.

After a time-out the read **may still land** in the reply's memory, whenever the owner goes on. So the agent is given
up, the memory is kept until the read is known to have ended, and the next call begins with a new agent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

import numpy as np

from gear_loader.errors import PeerTimeoutError, SchemaError, TransportError
from gear_loader.storage.operations import READY, RETIRED
from gear_loader.transport.nixl_agent import Description, new_agent, register
from gear_loader.transport.nixl_plan import Rows, pieces_of
from gear_loader.transport.spec import WindowSpec
from gear_loader.utils.arrays import Array

__all__ = ["NixlPeer"]

_REGISTERED = 8  # replies' memories that stay registered
_SPIN = 3e-4  # seconds in which the thread asks again and again, before it begins to sleep in between
_PAUSE = 5e-5
_WORTH = (
    256  # bytes that cost as much as another piece: what lies between two slots is read with them up to here
)
_PATIENCE = 0.05  # seconds between two looks at reads that were given up
_GRACE = 0.25  # seconds before a time-out that connecting leaves for the error

_kept_for_ever: list[Any] = []
"""Reads that had not ended when their peer was closed: their memory can never be used again."""


class _Owners(Protocol):
    def metadata(self, name: str, table: str) -> Future[bytes]: ...


class _Session:
    """An agent and what it knows of the owner. One that has failed is not used again."""

    def __init__(self, *, loopback: bool) -> None:
        self.agent: Any = new_agent(f"gear-loader-{os.getpid()}-{secrets.token_hex(8)}", loopback=loopback)
        self.owner: str | None = None
        self.tables: dict[str, Description] = {}
        self.registered: OrderedDict[tuple[int, int], tuple[Any, Array]] = OrderedDict()
        self.users = 0
        self._free: list[Array] = []  # small registered memories

    def borrow(self, count: int) -> Array:
        """Registered memory of so many bytes, uint8."""
        for i, room in enumerate(self._free):
            if len(room) >= count:
                return self._free.pop(i)
        room = np.empty(max(1 << 16, 1 << (count - 1).bit_length()), dtype=np.uint8)
        register(self.agent, room.ctypes.data, room.nbytes)
        return room

    def give_back(self, room: Array) -> None:
        """It is not needed any more."""
        self._free.append(room)

    def learn(self, table: str, data: bytes) -> Description:
        """Remember where a table lies.

        Raises:
            TransportError: it is no description, or of another owner than before.
        """
        described = Description.from_bytes(data)
        if self.owner not in (None, described.agent):
            raise TransportError("The owner has been started anew.")
        # Again for each table: what was registered since then belongs to it.
        name = self.agent.add_remote_agent(described.connection)
        name = name.decode() if isinstance(name, bytes) else name
        if name != described.agent:
            raise TransportError(f"The owner calls itself {described.agent!r} and its agent {name!r}.")
        self.owner = name
        self.tables[table] = described
        return described

    def hold(self, memory: Array) -> None:
        """Register memory, if it is not; the last few stay so, and are kept alive."""
        key = memory.ctypes.data, memory.nbytes
        if key in self.registered:
            self.registered.move_to_end(key)
            return
        while len(self.registered) >= _REGISTERED and self.users <= 1:
            _, (listed, _) = self.registered.popitem(last=False)
            self.agent.deregister_memory(listed)
        self.registered[key] = register(self.agent, *key), memory


class _Read:
    """One NIXL transfer, with everything that it needs to stay."""

    def __init__(self, session: _Session, remote: Array, local: Array, *hold: Array) -> None:
        self.session = session
        self.hold = hold
        agent, places = session.agent, np.arange(len(remote), dtype=np.int32)
        self._lists = [
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", local.astype(np.uint64), "DRAM"),
            agent.prep_xfer_dlist(session.owner, remote.astype(np.uint64), "DRAM"),
        ]
        self._handle = agent.make_prepped_xfer("READ", self._lists[0], places, self._lists[1], places)
        self._posted = False

    def is_done(self) -> bool:
        """Go on with it.

        Raises:
            TransportError: it failed, and will write nothing any more.
        """
        agent = self.session.agent
        try:
            # The message tells the owner to look often, where it has to.
            state = (
                agent.check_xfer_state(self._handle) if self._posted else agent.transfer(self._handle, b"r")
            )
            self._posted = True
        except Exception as error:
            self.release()
            raise TransportError(f"the read failed ({error or type(error).__name__})") from error
        if state == "ERR":
            self.release()
            raise TransportError("the read failed")
        if state == "DONE":
            self.release()
        return bool(state == "DONE")

    def release(self) -> None:
        """Give back the handles."""
        with contextlib.suppress(Exception):  # NIXL keeps what it cannot release
            self._handle.release()
        for each in self._lists:
            with contextlib.suppress(Exception):
                each.release()


class _Job:
    """One fetch."""

    def __init__(self, spec: WindowSpec, rows: Rows, out: Array, deadline: float) -> None:
        self.spec, self.rows, self.out, self.deadline = spec, rows, out, deadline
        self.future: Future[Array] = Future()
        self.session: _Session | None = None
        self.read: _Read | None = None
        self.steps: Iterator[None] = iter(())


class NixlPeer:
    """Reads windows of a server's tables by one-sided reads.

    Threads may use it at the same time; any number of fetches may be in flight. Everything happens in one thread of
    its own. It connects when first asked, and again after a failure, asking the server anew where its tables lie.

    Args:
        peer: how to ask the server: its `Peer`.
        timeout: seconds within which every fetch ends.
        name: how errors call the server ("node b").
        loopback: keep UCX's sockets to the loopback device, unless the user has set UCX_NET_DEVICES.
    """

    def __init__(
        self, peer: _Owners, *, timeout: float, name: str, loopback: bool | Callable[[], bool] = True
    ) -> None:
        self._peer, self._timeout, self._name, self._loopback = peer, timeout, name, loopback
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._new: deque[_Job] = deque()
        self._closed = False
        self._session: _Session | None = None
        self._quarantine: list[tuple[_Read, int]] = []
        self._posted = 0  # reads ever
        self._thread: threading.Thread | None = None

    @property
    def quarantined(self) -> tuple[int, int]:
        """Reads that were given up and may still land: how many, and the bytes of the memory that is kept for them."""
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
        """Read windows of rows into `out`, laid out as `WindowSpec` says.

        Args:
            slots, anchors, generations: int64 [n].
            out: uint8 [at least `spec.reply_bytes(n)`], contiguous. It stays registered for the next call that gives
                it, so a few that are used again and again are best. After an error it may still be written: the
                caller never uses it again.
            extent: int64 [n, 2]. block_ids: int32 [n, K]. Both as `gear_loader.native.copying.resolve` writes them.

        Returns:
            A future of the status, uint8 [n], a view of `out`. It ends within the time-out, or fails with
            TransportError (the owner is gone, has another table, or rows that it cannot have) or PeerTimeoutError.

        Raises:
            SchemaError: arrays that do not fit. TransportError: it is closed, or the process was forked.
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
        job = _Job(spec, rows, out, time.monotonic() + self._timeout)
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
        """Fail what is in flight, and end the thread; idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(self._timeout + 1.0)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        active: list[_Job] = []
        since = time.monotonic()
        while True:
            with self._wake:
                while not (self._new or active or self._closed):
                    self._wake.wait(_PATIENCE if self._quarantine else None)
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
            active = [job for job in active if self._go_on(job)]
            if self._posted > posted:
                since = time.monotonic()
            if self._quarantine:
                self._look_at_quarantine()
            time.sleep(0 if time.monotonic() - since < _SPIN else _PAUSE)
        for job in active:
            self._fail(job, TransportError(f"the connection to {self._name} has been closed"))
        self._look_at_quarantine()
        _kept_for_ever.extend(self._quarantine)
        self._session = None

    def _go_on(self, job: _Job) -> bool:
        """One step of a fetch; whether there are more."""
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

    def _fail(self, job: _Job, error: Exception) -> None:
        if job.read is not None:
            self._quarantine.append((job.read, job.out.nbytes))
            job.read = None
        if job.session is not None and job.session is self._session:
            self._session = None  # the next fetch begins anew; others that use it may end
        if job.session is not None:
            job.session.users -= 1
        text = (
            f"{self._name}: {str(error).rstrip('.') or type(error).__name__}; {len(job.rows)} rows of table "
            f"{job.spec.table!r} ({job.spec.data_bytes(len(job.rows)):,} bytes) were to be read by NIXL. See whether "
            "its server runs; the next call connects anew."
        )
        kind = PeerTimeoutError if isinstance(error, TimeoutError) else TransportError
        failure = kind(text)
        failure.__cause__ = error
        if not job.future.done():
            job.future.set_exception(failure)

    def _look_at_quarantine(self) -> None:
        left = []
        for read, count in self._quarantine:
            try:
                done = read.is_done()
            except TransportError:
                done = True  # the owner is gone: nothing comes any more
            if not done:
                left.append((read, count))
        self._quarantine = left

    # ---------------------------------------------------------------- one fetch

    def _fetch(self, job: _Job) -> Iterator[None]:
        """A fetch in steps, none of which waits for a read."""
        spec, rows, out = job.spec, job.rows, job.out
        count = len(rows)
        start = spec.data_bytes(count)
        status = out[start : start + count]
        if count:
            session, described = self._connect(job)
            remote, local = pieces_of(spec, described, rows, out)
            session.hold(out)
            yield from self._read(job, remote, local, out)
            gone = yield from self._gone(job, described)
            status[:] = np.where(gone, WindowSpec.GONE, WindowSpec.SERVED)
            for piece in spec.pieces(count) if gone.any() else ():
                end = piece.offset + count * piece.row_bytes
                out[piece.offset : end].reshape(count, -1)[gone] = 0
            session.users -= 1
        if not job.future.done():
            job.future.set_result(status)

    def _connect(self, job: _Job) -> tuple[_Session, Description]:
        if self._session is None:
            loopback = self._loopback() if callable(self._loopback) else self._loopback
            self._session = _Session(loopback=loopback)
        session = job.session = self._session
        session.users += 1
        described = session.tables.get(job.spec.table)
        if described is None:
            patience = max(job.deadline - time.monotonic() - _GRACE, 0.01)
            try:
                data = self._peer.metadata("nixl", job.spec.table).result(patience)
            except FutureTimeoutError:
                raise PeerTimeoutError(f"no answer within {self._timeout:g} s") from None
            described = session.learn(job.spec.table, data)
        return session, described

    def _read(self, job: _Job, remote: Array, local: Array, *hold: Array) -> Iterator[None]:
        assert job.session is not None
        if not len(remote):
            return
        job.read = _Read(job.session, remote, local, *hold)
        self._posted += 1
        try:
            while not job.read.is_done():
                yield
        except TransportError:
            job.read = None  # it has ended
            raise
        job.read = None

    def _gone(self, job: _Job, described: Description) -> Generator[None, None, Array]:
        """Which rows have no live trajectory of their generation any more, bool [n]; see the module."""
        session = job.session
        assert session is not None
        slots, inverse = np.unique(job.rows.slots, return_inverse=True)
        room = session.borrow(_WORTH * len(slots) + 8)
        word, numbers = room[:8], described.numbers
        also = _listed([numbers["word"]], 8), _listed([word.ctypes.data], 8)
        state = yield from self._values(job, described, "state", slots, room[8:], np.int32, *also)
        generation = yield from self._values(job, described, "generation", slots, room[8:], np.int64)
        replaced = int(word.view(np.uint64)[0]) != numbers["value"]
        session.give_back(room)
        if replaced:
            raise TransportError("the table has been replaced by another of its name")
        live = (state == READY) | (state == RETIRED)
        gone: Array = ~(live[inverse] & (generation[inverse] == job.rows.generations))
        return gone

    def _values(
        self,
        job: _Job,
        described: Description,
        name: str,
        slots: Array,
        room: Array,
        dtype: type,
        *also: Array,
    ) -> Generator[None, None, Array]:
        """One value a slot (sorted, each once) of an array of the owner's index; `also` is read with it."""
        size = np.dtype(dtype).itemsize
        base, here = described.numbers["base"] + described.numbers[name], room.ctypes.data
        low, span = int(slots[0]), int(slots[-1] - slots[0]) + 1
        if span * size <= _WORTH * len(slots):  # all between the first and the last
            remote, local = _listed([base + low * size], span * size), _listed([here], span * size)
            places = slots - low
        else:
            places = np.arange(len(slots))
            remote, local = _listed(base + slots * size, size), _listed(here + places * size, size)
        if also:
            remote, local = np.concatenate((remote, also[0])), np.concatenate((local, also[1]))
        yield from self._read(job, remote, local, room)
        values: Array = room[: (int(places[-1]) + 1) * size].view(dtype)[places]
        return values


def _listed(addresses: Any, size: int) -> Array:
    """Pieces of one size as NIXL takes them, int64 [p, 5]."""
    listed = np.empty((len(addresses), 5), dtype=np.int64)
    listed[:, 0] = addresses
    listed[:, 1:] = size, 0, size, 1
    return listed
