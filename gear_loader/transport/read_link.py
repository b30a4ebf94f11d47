"""A connection for rows whose answers are received by the thread that waits for them.

A request is sent by the thread that makes it, and its answer received by the one that asks its future for the result:
neither is handed over to the thread of the event loop and back. Any number of requests may be under way; a server
answers those for rows in their order.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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

if TYPE_CHECKING:
    from gear_loader.transport.packed_spec import PackedSpec
    from gear_loader.transport.spec import WindowSpec

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
        self._link.pull(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._link.pull(self)
        return super().exception(timeout)


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
        if self._closed or not self._guard.acquire(blocking=False):
            return None
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
        finally:
            self._guard.release()

    def pull(self, read: _Read) -> None:
        """Receive answers until a request has its own."""
        if read.done():
            return
        with self._guard:
            try:
                while not read.done():
                    self._receive()
            except OSError as error:
                self._fail(error)
            except BaseException as error:
                self._fail(error)
                raise

    # ---------------------------------------------------------------- the connection

    def _connect(self) -> bool:
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
        self._socket, self._not_before = found, 0.0
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

    def _receive(self) -> None:
        """Receive the next answer, which is that of the oldest request."""
        read = self._pending[0]
        head, data, got = self._head, read.data, 0
        if self._carry:
            self._exactly(head)
        else:
            got = self._live().recvmsg_into((head, data))[0] - HEADER
            if got == -HEADER:
                raise ConnectionResetError(GONE)
            if got < 0:
                self._exactly(head[got:])
                got = 0
        header = Header.parse(head)
        if header.kind is Kind.REPLY and header[1:] == (read.number, 0, len(data)):
            if got < len(data):
                self._exactly(data[got:])
            self._done(read)
            read.set_result(read.status)
            return
        self._carry = memoryview(bytes(data[:got]) + bytes(self._carry))
        small = self._rest(header, Kind.ERROR, read.number)
        self._done(read)
        read.set_exception(failure(read_error(small), f"{self._where} was asked for {read.what}"))

    def _done(self, read: _Read) -> None:
        self._pending.popleft()
        self._unanswered -= read.size

    def _rest(self, header: Header, kind: Kind, number: int) -> memoryview:
        """Receive the small part of a message that has to be of this kind, or ERROR, and answer this request."""
        if header.small > MOST_ERROR or header.bulk:
            raise ProtocolError(
                f"A message {header.kind.name} has parts of {header.small:,} and {header.bulk:,} bytes."
            )
        small = memoryview(bytearray(header.small))
        self._exactly(small)
        if header.kind is Kind.REFUSE:
            text = Fields(small, Kind.REFUSE.name).text("The text")
            raise TransportError(f"the server closed the connection: {printable(text)}")
        if header.kind not in (kind, Kind.ERROR) or header.request != number:
            raise ProtocolError(
                f"A message {header.kind.name} came for request {header.request}; expected {kind.name} for {number}."
            )
        return small

    def _exactly(self, view: memoryview) -> None:
        """Fill a buffer."""
        if self._carry:
            count = min(len(self._carry), len(view))
            view[:count], self._carry = self._carry[:count], self._carry[count:]
            view = view[count:]
        end = 0.0
        while view:
            count = self._live().recv_into(view, len(view), socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError(GONE)
            view = view[count:]
            if view:
                end = end or time.monotonic() + self._timeout
                if time.monotonic() > end:
                    raise BlockingIOError

    # ---------------------------------------------------------------- the end

    def _fail(self, error: BaseException) -> None:
        """Disconnect; the requests under way fail."""
        self._disconnect()
        pending, self._pending, self._unanswered = list(self._pending), collections.deque(), 0
        for read in pending:
            read.set_exception(self._failed(read, error))

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
        self._carry = memoryview(b"")
        if found is not None:
            found.close()

    def close(self) -> None:
        """Disconnect; requests under way fail. Idempotent."""
        self._closed = True
        found = self._socket
        if found is None:
            return
        if not self._guard.acquire(blocking=False):
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)  # the thread that waits gets an error
            return
        try:
            if not self._pending:
                with contextlib.suppress(OSError):
                    found.send(Header(Kind.BYE, 0, 0, 0).pack(), socket.MSG_DONTWAIT)
            self._fail(TransportError("the peer was closed"))
        finally:
            self._guard.release()
