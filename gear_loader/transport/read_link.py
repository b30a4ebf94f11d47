"""A connection for rows whose answers are received by the thread that waits for them.

A request is sent by the thread that makes it, and its answer received by the one that asks its future for the result:
neither is handed over to the thread of the event loop and back. Any number of requests may be under way; a server
answers those for rows in their order.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gear_loader.errors import GearError, PeerTimeoutError, TransportError
from gear_loader.transport.answers import MOST_ERROR
from gear_loader.transport.blocking_link import connected
from gear_loader.transport.channel import Address
from gear_loader.transport.session import os_error_text
from gear_loader.transport.socket import GONE
from gear_loader.transport.wire import (
    HEADER,
    Fields,
    Header,
    Kind,
    Limits,
    ProtocolError,
    failure,
    printable,
    read_error,
)
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import Future, run_alone

if TYPE_CHECKING:
    from gear_loader.transport.spec import PackedSpec, WindowSpec

__all__ = ["ReadLink"]

_PAUSE = 5.0  # seconds after a failed attempt to connect in which there is no other
_HANDSHAKE = 1.0  # most seconds of an attempt
_MOST_UNANSWERED = 1 << 16  # bytes of requests without an answer; two sockets' buffers hold more


class _Read(Future[Any]):
    """Status of the rows of one request; whoever asks for it receives it.

    Args:
        link: the connection. number: of the request. data: buffer of the answer. status: its last part.
        size: bytes of the request. what: description of the request in errors.
    """

    def __init__(
        self, link: ReadLink, number: int, data: memoryview, status: Array, size: int, what: str
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # it cannot be cancelled: its answer comes in its turn
        self.number = number
        self.data = data
        self.status = status
        self.size = size
        self.what = what
        self._link = link

    def result(self, timeout: float | None = None) -> Any:
        self._link.pull(self, timeout)
        return super().result(0)  # without a limit it has come

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._link.pull(self, timeout)
        return super().exception(0)


class _NotYet(Exception):
    """The caller's time is over; what has been received of an answer is kept."""


class ReadLink:
    """A connection over the carrier "socket" for requests of rows; thread-safe.

    Args:
        name: of the server in errors. address, secret: as for `Peer`. timeout: seconds that an answer may take.
    """

    def __init__(self, name: str, address: str | Callable[[], str], secret: bytes, timeout: float) -> None:
        self._name = name
        self._address = address
        self._secret = secret
        self._timeout = timeout
        self._guard = threading.RLock()
        self._socket: socket.socket | None = None
        self._limits = Limits()
        self._pending: collections.deque[_Read] = collections.deque()
        self._unanswered = 0  # bytes of their requests
        self._specs: dict[WindowSpec | PackedSpec, int] = {}
        self._head = memoryview(bytearray(HEADER))
        self._got = 0  # bytes received of the next answer, in `_head` and the buffer of its request
        self._carry = memoryview(b"")  # bytes that were received beyond the last message
        self._number = 0
        self._where = ""
        self._not_before = 0.0
        self._closed = False

    def fetch(
        self, spec: WindowSpec | PackedSpec, small: Array, data: Array, status: Array, what: str
    ) -> Future[Array] | None:
        """Send a request for rows.

        Args:
            spec: table and windows. small: uint8, the small part of FETCH; its first 4 bytes are filled in.
            data: uint8, buffer of the answer. status: the part of it that is the result.
            what: description of the request in errors.

        Returns:
            A future of `status`, which receives when it is asked for its result; None, having sent nothing, if the
            request is to be made in another way: another thread uses the connection, the server cannot be reached at
            once, or it would refuse the request.
        """
        if self._closed:
            return None
        return run_alone(self._guard, lambda: self._fetch(spec, small, data, status, what))

    def _fetch(
        self, spec: WindowSpec | PackedSpec, small: Array, data: Array, status: Array, what: str
    ) -> _Read | None:
        try:
            if self._socket is None and not self._connect():
                return None
            if self._closed:  # meanwhile
                self._disconnect()
                return None
            rows = int(small[4:8].view("<u4")[0])
            if rows > self._limits.rows or len(data) > self._limits.reply_bytes:
                return None
            number = self._specs.get(spec)
            if number is None:
                number = self._open(spec)
                if number is None:
                    return None
            while self._pending and self._unanswered + len(small) > _MOST_UNANSWERED:
                self._receive()
            small[:4].view("<u4")[0] = number
            self._number += 1
            read = _Read(self, self._number, data.data, status, len(small), what)
            self._send(Header(Kind.FETCH, read.number, len(small), 0).pack() + small.data)
            self._pending.append(read)
            self._unanswered += read.size
            return read
        except OSError as error:  # errors of the transport among them
            self._fail(error)
            return None
        except BaseException as error:
            self._fail(error)
            raise

    def pull(self, read: _Read, timeout: float | None = None) -> None:
        """Receive answers until a request has its own, or `timeout` seconds have passed.

        Raises:
            TransportError: this thread is receiving already, and a signal handler has interrupted it.
        """
        if read.done():
            return
        end = None if timeout is None else time.monotonic() + timeout
        wait = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if run_alone(self._guard, lambda: self._pull(read, end), wait) is None and timeout is None:
            raise TransportError(
                f"{self._where} was asked for {read.what} by a signal handler or finalizer while this thread was "
                "receiving from it. Ask after that call has returned."
            )

    def _pull(self, read: _Read, end: float | None) -> bool:
        try:
            while not read.done():
                self._receive(end)
        except _NotYet:
            pass
        except OSError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise
        return True

    # ---------------------------------------------------------------- the connection

    def _connect(self) -> bool:
        if self._pending:  # an interrupt has ended `_fail`
            self._fail(ConnectionResetError("the connection was closed"))
        if time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + _PAUSE
        try:
            address = self._address if isinstance(self._address, str) else self._address()
            parts = Address.parse(address)
        except Exception:  # reported by whoever makes the request in the other way
            return False
        if parts.carrier != "socket":
            self._closed = True
            return False
        self._where = f"{self._name} ({address})"
        try:
            seconds = min(_HANDSHAKE, self._timeout / 4)
            found, self._limits = connected(parts, self._secret, time.monotonic() + seconds, peer=self._where)
        except OSError:
            return False
        # One call then waits for a whole answer, and no longer than the time for it.
        found.settimeout(None)
        wait = struct.pack("@ll", int(self._timeout), int(self._timeout % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            found.setsockopt(socket.SOL_SOCKET, option, wait)
        self._socket, self._not_before, self._unanswered = found, 0.0, 0
        return True

    def _open(self, spec: WindowSpec | PackedSpec) -> int | None:
        """Open a query; None if the server refuses, or has as many as it takes."""
        while self._pending:
            self._receive()
        number = len(self._specs)
        if number >= self._limits.specs:
            return None
        self._number += 1
        small = number.to_bytes(4, "little") + spec.to_bytes()
        self._send(Header(Kind.OPEN, self._number, len(small), 0).pack() + small)
        self._exactly(self._head)
        header = Header.parse(self._head)
        self._rest(header, Kind.OPENED, self._number)
        self._got = 0
        if header.kind is not Kind.OPENED:
            return None
        self._specs[spec] = number
        return number

    def _live(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionResetError("the connection was closed")
        return self._socket

    def _send(self, message: bytes) -> None:
        self._live().sendall(message)

    # ---------------------------------------------------------------- receiving

    def _receive(self, end: float | None = None) -> None:
        """Receive the next answer, which is that of the oldest request.

        Raises:
            _NotYet: it has not come as a whole by `end`, of `time.monotonic`; the next call goes on.
        """
        read = self._pending[0]
        head, data = self._head, read.data
        if not self._got and not self._carry:
            self._wait(end)
            self._got = self._live().recvmsg_into((head, data))[0]
            if not self._got:
                raise ConnectionResetError(GONE)
        if self._got < HEADER:
            self._exactly(head[self._got :], end)
        header = Header.parse(head)
        if header.kind is Kind.REPLY and header[1:] == (read.number, 0, len(data)):
            if self._got < HEADER + len(data):
                self._exactly(data[self._got - HEADER :], end)
            read.set_result(read.status)
            self._done(read)
            return
        self._carry = memoryview(bytes(data[: self._got - HEADER]) + bytes(self._carry))
        self._got = HEADER
        small = self._rest(header, Kind.ERROR, read.number, end)
        read.set_exception(failure(read_error(small), f"{self._where} was asked for {read.what}"))
        self._done(read)

    def _done(self, read: _Read) -> None:
        self._got = 0
        self._pending.popleft()
        self._unanswered -= read.size

    def _rest(self, header: Header, kind: Kind, number: int, end: float | None = None) -> memoryview:
        """Receive the small part of a message that has to be of this kind, or ERROR, and answer this request."""
        if header.small > MOST_ERROR or header.bulk:
            raise ProtocolError(
                f"A message {header.kind.name} has parts of {header.small:,} and {header.bulk:,} bytes."
            )
        small = memoryview(bytearray(header.small))
        try:
            self._exactly(small, end)
        except _NotYet:
            self._carry, self._got = small[: self._got - HEADER], HEADER
            raise
        if header.kind is Kind.REFUSE:
            text = Fields(small, Kind.REFUSE.name).text("The text")
            raise TransportError(f"the server closed the connection: {printable(text)}")
        if header.kind not in (kind, Kind.ERROR) or header.request != number:
            raise ProtocolError(
                f"A message {header.kind.name} came for request {header.request}; expected {kind.name} for {number}."
            )
        return small

    def _exactly(self, view: memoryview, end: float | None = None) -> None:
        """Fill a buffer, and count it in `_got`; raises `_NotYet` at `end`."""
        if self._carry:
            count = min(len(self._carry), len(view))
            view[:count], self._carry = self._carry[:count], self._carry[count:]
            self._got += count
            view = view[count:]
        last = 0.0
        while view:
            self._wait(end)
            count = self._live().recv_into(view, len(view), socket.MSG_WAITALL if end is None else 0)
            if not count:
                raise ConnectionResetError(GONE)
            self._got += count
            view = view[count:]
            if view:
                last = last or time.monotonic() + self._timeout
                if time.monotonic() > last:
                    raise BlockingIOError

    def _wait(self, end: float | None) -> None:
        """Wait until there is something to receive; with `end` None, receiving waits itself."""
        if end is None:
            return
        left = max(0.0, end - time.monotonic())
        poll = select.poll()
        poll.register(self._live(), select.POLLIN)
        if not poll.poll(min(left, self._timeout) * 1e3):
            raise _NotYet if left < self._timeout else BlockingIOError

    # ---------------------------------------------------------------- the end

    def _fail(self, error: BaseException) -> None:
        """Disconnect; the requests under way fail."""
        self._disconnect()
        while self._pending:
            read = self._pending[0]
            if not read.done():
                read.set_exception(self._failed(read, error))
            self._done(read)

    def _failed(self, read: _Read, error: BaseException) -> TransportError:
        if isinstance(error, (BlockingIOError, TimeoutError)) and not isinstance(error, GearError):
            return PeerTimeoutError(
                f"{self._where} was asked for {read.what} and did not answer within {self._timeout:g} s. Its server "
                "may be stopped or overloaded, or the network cut; raise the timeout if it is only slow. The "
                "connection was closed."
            )
        known = isinstance(error, OSError) and not isinstance(error, GearError)
        why = os_error_text(error) if known else error  # type: ignore[arg-type]
        return TransportError(
            f"{self._where} was asked for {read.what}, and then the connection was lost ({why}). Its server may have "
            "been stopped, killed or restarted: the next request reconnects."
        )

    def _disconnect(self) -> None:
        found, self._socket = self._socket, None
        self._specs.clear()
        self._carry, self._got = memoryview(b""), 0
        if found is not None:
            found.close()

    def close(self) -> None:
        """Disconnect; requests under way fail. Idempotent."""
        self._closed = True
        found = self._socket
        if found is None:
            return
        if run_alone(self._guard, self._say_bye) is None:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)  # the thread that waits gets an error

    def _say_bye(self) -> bool:
        if not self._pending and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(Header(Kind.BYE, 0, 0, 0).pack(), socket.MSG_DONTWAIT)
        self._fail(TransportError("the peer was closed"))
        return True
