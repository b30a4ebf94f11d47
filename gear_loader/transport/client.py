"""The client of a server on another node."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gear_loader.errors import HandshakeError, SchemaError, TransportError
from gear_loader.storage.schema import Schema
from gear_loader.transport.change_messages import Metadata, Part, Question
from gear_loader.transport.channel import Address, Bytes
from gear_loader.transport.direct_link import DirectLink, connected
from gear_loader.transport.handshake import check_secret
from gear_loader.transport.loop import EventLoop, event_loop
from gear_loader.transport.loop_link import LoopLink
from gear_loader.transport.message_schema import shape_of
from gear_loader.transport.request import Answer, Request
from gear_loader.transport.store_message import (
    One,
    OneStore,
    Rows,
    Stacked,
    Store,
    bulk_parts,
    contiguous,
    step_places,
)
from gear_loader.transport.wire import Fields, Kind, ProtocolError
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import Future, new_mutex

if TYPE_CHECKING:
    from gear_loader.transport.spec import PackedSpec, ValueSpec, WindowSpec

_T = TypeVar("_T")
_LONGEST_WAIT = 1 << 31  # milliseconds
_CLOSE = 5.0  # most seconds of `Peer.close`, which takes less unless the event loop is busy


class Peer:
    """Client of one server.

    Thread-safe; any number of requests may be in flight. It connects at the first request, and reconnects after a
    failure; a callable `address` is called each time, so a server restarted at another address is found; if it raises
    ConnectionRefusedError, it is called again until the deadline. It cannot be used after a fork: create another one in
    the child.

    A request returns an `Answer`, a future or what has the same methods to get a result. It ends within `timeout`
    seconds, with a result or with one of

    - HandshakeError: a server of another version, library, schema or secret; both sides are named.
    - PeerTimeoutError: no answer before the deadline. The connection is closed; its other requests fail, too.
    - TransportError: any other failure. An error reported by the server, such as `TableFullError`, is its
      ``__cause__``.

    Messages name the peer, its address, the request and the remedy. A store that failed without an answer may still
    have been executed.

    With ``here=True`` a request is sent by the calling thread, which is faster: no other thread takes part. Rows have
    a connection of their own, and so have the other requests, which are answered when the call returns. An answer with
    rows is received by the thread that asks for its result. Until then it waits in the buffers of the sockets, so all
    that is asked for before should fit there; it must be asked for, and its deadline begins then. Where it is not
    possible, as over UCX, the event loop makes the request.

    Args:
        address: such as "socket://10.0.0.2:5555"; or a function that returns it, called in a thread at each connect.
        secret: shared secret of the server.
        timeout: seconds from a request to its deadline.
        name: of the server in errors, such as "node b".
        tls: context of a client, to encrypt the connection; with the carrier "socket" only.

    Raises:
        TransportError: invalid address. HandshakeError: invalid secret. SchemaError: invalid timeout.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        *,
        secret: bytes,
        timeout: float,
        name: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e6:
            raise SchemaError(f"timeout is {timeout!r}; expected a positive number of seconds.")
        self.name = name
        self._address = address
        self._secret = check_secret(secret)
        self._timeout = float(timeout)
        self._tls = tls
        self._pid = os.getpid()
        self._guard = new_mutex()
        self._loop: EventLoop | None = None
        self._link: LoopLink | None = None
        self._closed = False
        if isinstance(address, str):
            Address.parse(address)
        # Rows; and what is answered before the call returns, for which the rows of other threads do not wait.
        self._direct, self._asking = (DirectLink(name, address, self._secret, tls) for _ in range(2))

    @property
    def timeout(self) -> float:
        """Seconds from a request to its deadline."""
        return self._timeout

    def dial(self, deadline: float) -> socket.socket:
        """A connection of its own over the carrier "socket", after the handshake, for who speaks the protocol itself.

        Args:
            deadline: by `time.monotonic`.

        Raises:
            TransportError: another carrier, or as for requests. OSError: it cannot be connected.
        """
        with self._guard:
            self._check()
        address = Address.parse(self._address if isinstance(self._address, str) else self._address())
        if address.carrier != "socket":
            raise HandshakeError(
                f"{self.name} was asked for batches over {address.carrier!r}; expected 'socket': connect "
                "by gear://<host>:<port>/<table>."
            )
        return connected(address, self._secret, deadline, peer=self.name, tls=self._tls)[0]

    # ---------------------------------------------------------------- requests

    def fetch(
        self, spec: WindowSpec | PackedSpec | ValueSpec, *given: Array, out: Array, here: bool = False
    ) -> Answer[Array]:
        """Fetch windows of rows, or spans of steps, one after another.

        Args:
            spec: table and windows, or columns. Pass the same object for repeated fetches: each new one is sent to the
                server.
            given: int64 [n] each, as the spec's class names them: slots, anchors, generations; of spans slots,
                first steps, generations, numbers of steps.
            out: buffer of the reply, uint8 [reply_bytes or more], contiguous; may be pinned memory. Do not use it
                before the future has its result. After an error the carrier may still write into it, so it must not be
                reused; the peer keeps a reference until the connection is closed.
            here: whether the threads that ask may use a connection themselves; see the class.

        Returns:
            A future of the status, uint8 [n], a view of `out`; 0 where the row was served.

        Raises:
            SchemaError: arrays of other dtypes or sizes. TransportError: the peer is closed, or was created before a
                fork.
        """
        rows, status, size = spec.checked(given, out)
        n, data = rows.shape[1], out[:size]
        small = np.empty(8 + rows.nbytes, dtype=np.uint8)
        small[:8].view(np.uint32)[:] = 0, n
        small[8:].view(np.int64)[:] = rows.reshape(-1)

        return self._submit(
            Request(
                kind=Kind.FETCH,
                small=small,
                answer=Kind.REPLY,
                finish=lambda _: data[status : status + n],
                what=lambda: f"{n:,} rows ({size:,} bytes) of table {spec.table!r}",
                seconds=self._timeout,
                spec=spec,
                out=data,
                rows=n,
            ),
            here=here,
        )

    def store(
        self,
        table: str,
        schema: Schema,
        rows: Sequence[Rows] | Stacked,
        priorities: Array,
        ids: Array,
        finals: Array | None = None,
        *,
        ahead: int = 0,
        again: bool = False,
        seconds: float | None = None,
        wait: float | None = None,
        here: bool = False,
        prefixes: Sequence[Array] = (),
    ) -> Answer[Array]:
        """Add trajectories to a table of the server, all or none.

        Args:
            table: name of the table. schema: its columns.
            rows: the trajectories.
            priorities: float32 [n], -1 for a trajectory without one.
            ids: int64 [n], global ids; -1 lets the table assign one.
            finals: int64 [n], 1 if the last row of the trajectory is its final step, else 0; None for none.
            ahead: pieces of the only trajectory that `send_part` has sent before.
            again: whether a request with the same ids was sent before and may have been executed.
            seconds: until the deadline; by default the peer's timeout.
            wait: seconds that the server may wait for free space or the rate limiter; by default until shortly before
                the deadline. A server has a limit of its own.
            here: as for `fetch`.
            prefixes: slots of what the trajectories begin with, steps and generations, as of STORE; none by default.

        Returns:
            A future of their slots, int64 [n].

        Raises:
            SchemaError: arrays of other dtypes or sizes. TransportError: the peer is closed, or was created before a
                fork.
        """
        if isinstance(rows, Stacked):
            lengths, before = rows.lengths, 0
        else:
            lengths = np.array([each.length for each in rows], dtype=np.int64)
            first = next(iter(schema.steps))
            before = sum(len(piece[first]) for piece in rows[0].pieces[:ahead]) if ahead else 0
        n = len(lengths)
        finals = np.zeros(n, dtype=np.int64) if finals is None else finals
        for name, values, dtype in (
            ("priorities", priorities, np.float32),
            ("ids", ids, np.int64),
            ("finals", finals, np.int64),
        ):
            if not isinstance(values, np.ndarray) or values.dtype != dtype or values.shape != (n,):
                raise SchemaError(f"{name} is {shape_of(values)}; expected {np.dtype(dtype).name} [{n}].")
        deadline = self._timeout if seconds is None else seconds
        wait = deadline - min(1.0, deadline / 4) if wait is None else wait
        milliseconds = min(int(wait * 1e3), _LONGEST_WAIT)
        payload = (
            0 if isinstance(rows, Stacked) or not schema.ragged else sum(each.value_bytes for each in rows)
        )
        said = again, ahead, before, milliseconds, payload
        begins: Any = prefixes
        request = Store(table, schema, lengths, ids, priorities, finals, *said, *begins)
        parts = bulk_parts(request, rows)

        def finish(small: memoryview) -> Array:
            fields = Fields(small, Kind.STORED.name)
            slots = fields.array(n, "<i8", "slots")
            fields.end()
            return slots.astype(np.int64)

        return self._store(request.pack(), parts, n, request.bulk_bytes, table, finish, deadline, here=here)

    def store_one(
        self,
        kind: OneStore,
        rows: Rows,
        priority: float,
        final: int,
        identity: int,
        *,
        seconds: float,
        wait: float,
    ) -> Answer[int]:
        """Add one trajectory; as `store` with `here`.

        Args:
            kind: table and schema. priority: -1 for none. final: 1 if the last row is the final step, else 0.
            identity: global id. seconds: until the deadline. wait: as for `store`.

        Returns:
            A future of its slot.
        """
        one = One(rows.length, final, priority, identity, min(int(wait * 1e3), _LONGEST_WAIT))
        small, parts, size = kind.pack(one, rows.pieces, rows.once)
        return self._store(small, parts, 1, size, kind.table, _stored_slot, seconds, here=True)

    def _store(
        self,
        small: bytes,
        parts: Sequence[Bytes | bytes],
        n: int,
        size: int,
        table: str,
        finish: Callable[[memoryview], _T],
        seconds: float,
        *,
        here: bool,
    ) -> Answer[_T]:
        """Send a STORE of `n` trajectories, whose bulk part has `size` bytes."""

        return self._submit(
            Request(
                kind=Kind.STORE,
                small=small,
                answer=Kind.STORED,
                finish=finish,
                what=lambda: f"{n:,} trajectories ({size:,} bytes) to be stored into table {table!r}",
                seconds=seconds,
                bulk=parts,
                bulk_bytes=size,
                small_bytes=8 * n,
                rows=n,
            ),
            here=here,
            at_once=here,
        )

    def send_part(
        self, schema: Schema, identity: int, number: int, piece: Mapping[str, Array], *, seconds: float
    ) -> Answer[None]:
        """Send steps of a trajectory that is stored later, by `store` with `ahead`.

        Args:
            schema: the table's columns. identity: id of the trajectory. number: of the piece in it, from 0 on.
            piece: column name -> uint8 [rows, step_bytes], at most 4 MiB. seconds: until the deadline.

        Returns:
            A future that ends when they are sent; the server may not keep them.
        """
        rows = len(next(iter(piece.values())))
        places, size = step_places(schema, rows)
        data = np.zeros(size, dtype=np.uint8)
        for name, (at, count) in places.items():
            data[at : at + count] = piece[name].reshape(-1)
        return self._submit(
            Request(
                kind=Kind.PART,
                small=Part(identity, number, rows).pack(),
                answer=None,
                finish=lambda _: None,
                what=lambda: f"a part of a trajectory ({size:,} bytes)",
                seconds=seconds,
                bulk=[data],
                bulk_bytes=size,
            )
        )

    def ask(
        self,
        question: Question[_T],
        *,
        bulk: Sequence[Bytes] = (),
        seconds: float | None = None,
        here: bool = False,
    ) -> Answer[_T]:
        """Ask for something else.

        Args:
            question: what. bulk: its bulk part. seconds: until the deadline; by default the peer's timeout.
            here: as for `fetch`; it is then answered when this returns, unless the event loop makes the request.
        """
        answer = question.answer
        return self._submit(
            Request(
                kind=question.message.kind,
                small=question.pack(),
                answer=Kind.DESCRIBED if answer is None else answer.kind,
                finish=question.finish,
                what=question.what,
                seconds=self._timeout if seconds is None else seconds,
                bulk=bulk,
                bulk_bytes=sum(each.nbytes for each in bulk),
                small_bytes=0 if answer is None else answer.most(),
                rows=question.rows,
            ),
            here=here,
            at_once=here,
        )

    def metadata(self, name: str, table: str) -> Answer[bytes]:
        """Ask for `Metadata`."""
        return self.ask(Metadata(name, table))

    # ---------------------------------------------------------------- the link

    def _submit(self, request: Request[_T], *, here: bool = False, at_once: bool = False) -> Answer[_T]:
        with self._guard:
            self._check()
        if here and (self._asking if at_once else self._direct).submit(request, at_once=at_once):
            return request
        if request.kind is Kind.STORE:  # the caller may change its memory before it is sent
            request.bulk = [contiguous(request.bulk, request.bulk_bytes)]
        with self._guard:
            self._check()
            if self._link is None or self._loop is None:
                self._loop = event_loop()
                known = self.name, self._address, self._secret, self._timeout
                made = LoopLink(*known, self._loop.loop, self._tls)
                self._link = self._link or made  # a signal handler may have been faster
            link, loop = self._link, self._loop
        request.future = Future()
        request.future.set_running_or_notify_cancel()  # the request cannot be cancelled any more
        try:
            loop.soon(link.submit, request)
        except RuntimeError:
            raise TransportError(
                f"A request to {self.name} was made while this process was ending."
            ) from None
        return request.future

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise TransportError(
                f"This peer ({self.name}) was made in process {self._pid} and is used in {os.getpid()}: connections do "
                "not survive a fork. Make a Peer in each process, or start processes with 'spawn'."
            )
        if self._closed:
            raise TransportError(f"The peer {self.name} has been closed; make another one.")

    def close(self) -> None:
        """Fail all requests in flight and disconnect, within seconds; idempotent. Not for the loop's thread."""
        if self._pid != os.getpid():
            return
        with self._guard:
            self._closed = True
            link, loop = self._link, self._loop
        self._direct.close()
        self._asking.close()
        if link is not None and loop is not None:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                loop.run(link.close(), _CLOSE)
            self._link = None


def _stored_slot(small: memoryview) -> int:
    if len(small) != 8:
        raise ProtocolError(f"A message STORED has {len(small)} bytes; expected 8.")
    return int.from_bytes(small, "little", signed=True)
