"""A connection that the threads which ask use themselves, without a hand-over to another thread and back.

A request is sent by the thread that makes it, and its answer received by the one that asks its future for the result.
Any number of requests may be under way.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from gear_loader.errors import GearError, TransportError
from gear_loader.transport.access import WRITES
from gear_loader.transport.channel import Address, Bytes, Channel, as_bytes, drop_sent
from gear_loader.transport.handshake import introduce
from gear_loader.transport.request import Request
from gear_loader.transport.session import Session, lost, timed_out
from gear_loader.transport.socket import GONE, MOST_PARTS, set_options
from gear_loader.transport.wire import Header, Kind, Limits
from gear_loader.utils.mutex import run_alone

_T = TypeVar("_T")
_CONNECT = 1.0  # most seconds of an attempt to connect: the request can be made in another way
_PAUSE = 2.0  # seconds after a failed attempt in which there is no other
_MOST_UNANSWERED = 1 << 16  # bytes of requests without an answer; two sockets' buffers hold more
_JOINED = 1 << 17  # largest bulk part that is copied behind its header: one call with one piece takes less
_APART = 1 << 12  # bytes of a bulk part's pieces, on average, from which on they are sent without a copy
_SLACK = 0.05  # seconds by which a call may go beyond the deadline
_FAREWELL = 0.5  # seconds for the BYE message


class _NotYet(Exception):
    """The caller's time is over; what has been received of an answer is kept."""


class DirectLink:
    """A connection over the carrier "socket"; thread-safe.

    Args:
        name: of the server in errors. address, secret, tls: as for `Peer`.
    """

    def __init__(
        self, name: str, address: str | Callable[[], str], secret: bytes, tls: ssl.SSLContext | None
    ) -> None:
        self._name = name
        self._address = address
        self._secret = secret
        self._tls = tls
        self._guard = threading.RLock()
        self._socket: socket.socket | None = None
        self._session: Session | None = None
        self._where = name
        self._not_before = 0.0  # of the next attempt to connect
        self._seconds = 0.0  # time limit of the socket's calls
        self._closed = False

    def submit(self, request: Request[Any], *, at_once: bool) -> bool:
        """Send a request, which receives its answer when it is asked for the result; or receive it `at_once`, too.

        Returns:
            False, having sent nothing, if the request is to be made in another way: another thread uses the connection,
            the server cannot be reached at once, or it would refuse the request.
        """
        return not self._closed and bool(run_alone(self._guard, lambda: self._submit(request, at_once)))

    def _submit(self, request: Request[Any], at_once: bool) -> bool:
        begun, session = False, None
        try:
            session = self._connected(request.seconds)
            if session is None or session.refusal(request) is not None:
                return False
            deadline = time.monotonic() + request.seconds
            size = len(request.small) + request.bulk_bytes
            while session.pending and session.unanswered + size > _MOST_UNANSWERED:
                self._receive(session, deadline)
            begun = True
            request.receive = functools.partial(self._receive_until, session)
            for parts in session.messages(request):
                self._send(parts, request, deadline)
            if request.answer is None:
                request.end(received=memoryview(b""))
        except OSError as error:  # errors of the transport among them
            # What may have been executed is not repeated without a word.
            final = begun and request.kind in WRITES
            if session is not None and not final:
                session.withdraw(request)
            self._fail(error)
            if final:
                request.end(_error_of(error)(self._where, request))
            return final
        except BaseException as error:
            self._fail(error)
            raise
        return not at_once or self._alone(session, request, deadline, None)

    def _receive_until(self, session: Session, request: Request[Any], timeout: float | None) -> None:
        """Receive answers until a request has its own, or `timeout` seconds have passed.

        Raises:
            TransportError: this thread is receiving already, and a signal handler has interrupted it.
        """
        now = time.monotonic()
        end = None if timeout is None else now + timeout
        deadline = now + request.seconds
        wait = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        done = run_alone(self._guard, lambda: self._alone(session, request, deadline, end), wait)
        if done is None and timeout is None:
            raise TransportError(
                f"{self._where} was asked for {request.what()} by a signal handler or finalizer while this thread was "
                "receiving from it. Ask after that call has returned."
            )

    def _alone(self, session: Session, request: Request[Any], deadline: float, end: float | None) -> bool:
        try:
            while not request.has_ended:
                self._receive(session, deadline, end)
        except _NotYet:
            pass
        except OSError as error:
            if session is self._session:
                self._fail(error)
            else:
                session.fail(_error_of(error))
        except BaseException as error:
            self._fail(error)
            raise
        return True

    # ---------------------------------------------------------------- the connection

    def _connected(self, seconds: float) -> Session | None:
        """The session, of a new connection if necessary; None if it cannot be connected now."""
        if self._session is not None and self._socket is not None:
            return self._session
        if self._session is not None:  # an interrupt has ended `_fail`
            self._fail(ConnectionResetError("the connection was closed"))
        if time.monotonic() < self._not_before:
            return None
        self._not_before = time.monotonic() + _CONNECT + _PAUSE
        try:
            address = self._address if isinstance(self._address, str) else self._address()
            parts = Address.parse(address)
        except Exception:  # reported by whoever makes the request in the other way
            return None
        if parts.carrier != "socket":
            self._closed = True
            return None
        self._where = f"{self._name} ({address})"
        deadline = time.monotonic() + min(_CONNECT, seconds / 4)
        try:
            found, limits = connected(parts, self._secret, deadline, peer=self._where, tls=self._tls)
        except OSError:
            return None
        if self._closed:  # meanwhile
            found.close()
            return None
        if self._tls is None:
            found.settimeout(None)  # one call then waits for a whole answer; see `_limit`
        self._seconds, self._not_before = 0.0, 0.0
        self._session, self._socket = Session(self._where, limits), found
        return self._session

    def _limit(self, connection: socket.socket, left: float) -> None:
        """Let each of the socket's calls take so many seconds."""
        if left <= 0:
            raise TimeoutError
        if self._seconds - _SLACK <= left <= self._seconds:
            return
        left = self._seconds = left + _SLACK / 2  # the calls after this one need no other limit
        if self._tls is not None:
            connection.settimeout(left)
            return
        wait = struct.pack("@ll", int(left), int(left % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, wait)

    def _send(self, parts: Sequence[Bytes | bytes], request: Request[Any], deadline: float) -> None:
        connection = self._socket
        if connection is None:
            raise ConnectionResetError("the connection was closed")
        self._limit(connection, deadline - time.monotonic())
        joined = request.bulk_bytes <= max(_JOINED, _APART * len(request.bulk))
        if joined or self._tls is not None:
            connection.sendall(b"".join(parts))  # type: ignore[arg-type]
            return
        views = [as_bytes(part) for part in parts]
        while views:
            drop_sent(views, connection.sendmsg(views[:MOST_PARTS]))
            self._limit(connection, deadline - time.monotonic())

    # ---------------------------------------------------------------- receiving

    def _receive(self, session: Session, deadline: float, end: float | None = None) -> None:
        """Receive something.

        Raises:
            _NotYet: nothing has come until `end`, of `time.monotonic`; the next call goes on.
        """
        connection = self._socket
        if connection is None or session is not self._session:
            raise ConnectionResetError("the connection was closed")
        if end is not None:
            self._wait(connection, deadline, end)
        self._limit(connection, deadline - time.monotonic())
        if session.missing:
            waits = socket.MSG_WAITALL if end is None and self._tls is None else 0
            count = connection.recv_into(session.missing[0], 0, waits)
        elif len(views := session.wanted()) == 1 or self._tls is not None:
            count = connection.recv_into(views[0])
        else:
            count = connection.recvmsg_into(views)[0]
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, GONE)
        session.received(count)

    def _wait(self, connection: socket.socket, deadline: float, end: float) -> None:
        """Wait until there is something to receive."""
        if isinstance(connection, ssl.SSLSocket) and connection.pending():
            return
        now = time.monotonic()
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(max(0.0, min(end, deadline) - now) * 1e3):
            raise _NotYet if end < deadline else TimeoutError

    # ---------------------------------------------------------------- the end

    def _fail(self, error: BaseException) -> None:
        """Disconnect; the requests under way fail."""
        found, self._socket = self._socket, None
        if found is not None:
            found.close()
        session = self._session
        if session is not None:
            session.fail(_error_of(error))
        self._session = None

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
        if self._socket is not None and self._session is not None and not self._session.pending:
            with contextlib.suppress(OSError):
                self._limit(self._socket, _FAREWELL)
                self._socket.sendall(Header(Kind.BYE, 0, 0, 0).pack())
        self._fail(TransportError("the peer was closed"))
        return True


def _error_of(error: BaseException) -> Callable[[str, Request[Any]], TransportError]:
    if isinstance(error, (BlockingIOError, TimeoutError)) and not isinstance(error, GearError):
        return timed_out
    return lost(error)


# ---------------------------------------------------------------- connecting


def connected(
    address: Address, secret: bytes, deadline: float, *, peer: str, tls: ssl.SSLContext | None = None
) -> tuple[socket.socket, Limits]:
    """Connect to a server over the carrier "socket" in the calling thread.

    Args:
        address, secret: of the server. deadline: by `time.monotonic`. peer: the server in errors.
        tls: context of a client, or None.

    Returns:
        The connected socket, after the handshake, with some timeout; and the server's limits.

    Raises:
        OSError: it cannot be connected; HandshakeError: one side refused the other.
    """
    channel = _BlockingChannel(address, tls, deadline)
    try:
        return channel.connection, _run(introduce(channel, secret, address, peer=peer))
    except BaseException:
        channel.connection.close()
        raise


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that waits for blocking calls only."""
    try:
        work.send(None)
    except StopIteration as done:
        value: _T = done.value
        return value
    raise AssertionError("A coroutine on a blocking channel has waited for an event loop.")


class _BlockingChannel(Channel):
    """A connected socket whose coroutines never suspend, for the handshake.

    Args:
        address: of the server. tls: context of a client, or None. deadline: `time.monotonic` of all calls.

    Raises:
        OSError: it cannot be connected.
    """

    library = "socket"

    def __init__(self, address: Address, tls: ssl.SSLContext | None, deadline: float) -> None:
        self.deadline = deadline
        self.connection = socket.create_connection((address.host, address.port), self._left())
        try:
            if self.connection.getsockname() == self.connection.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, "the socket connected to itself")
            set_options(self.connection)
            if tls is not None:
                self.connection = tls.wrap_socket(self.connection, server_hostname=address.host)
        except BaseException:
            self.connection.close()
            raise

    def _left(self) -> float:
        return max(1e-3, self.deadline - time.monotonic())

    async def send(self, *parts: Bytes) -> None:
        self.connection.settimeout(self._left())
        self.connection.sendall(b"".join(as_bytes(part) for part in parts))

    async def recv_into(self, buffer: Bytes) -> None:
        view = as_bytes(buffer)
        while len(view):
            self.connection.settimeout(self._left())
            count = self.connection.recv_into(view)
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, GONE)
            view = view[count:]

    async def close(self) -> None:
        self.connection.close()
