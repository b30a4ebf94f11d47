"""A connection that the calling thread uses itself: a request takes no hand-over to another thread and back.

The coroutines of the handshake run on a channel whose calls block, so that they end without an event loop.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from gear_loader.errors import GearError, PeerTimeoutError, TransportError
from gear_loader.transport.answers import MOST_ERROR, refusal, wrong_size
from gear_loader.transport.channel import Address, Bytes, Channel, as_bytes, drop_sent
from gear_loader.transport.handshake import introduce
from gear_loader.transport.session import FAREWELL, os_error_text
from gear_loader.transport.socket import AHEAD, GONE, MOST_PARTS, set_options
from gear_loader.transport.wire import HEADER, Header, Kind, Limits, ProtocolError, failure, read_error
from gear_loader.utils.mutex import run_alone

__all__ = ["Asked", "BlockingLink", "connected"]

_T = TypeVar("_T")
_PAUSE = 1.0  # seconds between the longest time of an attempt to connect and the next one
_CONNECT = 2.0  # most seconds of an attempt: the request can be made in another way
_ANSWER = 1 << 12  # bytes of memory for an answer; it grows
_JOINED = 1 << 17  # largest bulk part that is copied behind its header: one call with one piece takes less
_APART = 1 << 12  # bytes of a bulk part's pieces, on average, from which on they are sent without a copy
_SLACK = 0.05  # seconds by which a call may go beyond the deadline


class Asked(NamedTuple):
    """A request of a `BlockingLink`.

    Attributes:
        kind, small: the message. bulk: its bulk part in pieces. size: bytes of these.
        answer: kind of the answer, which has a small part of at most `most` bytes and no bulk part.
        what: returns the description of the request in errors.
        check: returns why the server would refuse the request, or None.
    """

    kind: Kind
    small: bytes
    bulk: Sequence[Bytes | bytes]
    size: int
    answer: Kind
    most: int
    what: Callable[[], str]
    check: Callable[[Limits], str | None]


class BlockingLink:
    """A connection to a server over the carrier "socket", for one request at a time.

    Args:
        name: of the server in errors. address, secret, tls: as for `Peer`.
    """

    def __init__(self, name: str, address: str, secret: bytes, tls: ssl.SSLContext | None) -> None:
        self._name = f"{name} ({address})"
        self._address = Address.parse(address)
        self._secret = secret
        self._tls = tls
        self._guard = threading.RLock()
        self._socket: socket.socket | None = None
        self._limits = Limits()
        self._number = 0
        self._closed = False
        self._not_before = 0.0  # of the next attempt to connect
        self._seconds = 0.0  # time limit of the socket's calls
        self._memory = memoryview(bytearray(_ANSWER))  # of the answer

    def ask(self, asked: Asked, seconds: float) -> bytes | None:
        """Send a request and wait for its answer.

        Args:
            asked: the request. seconds: until the deadline.

        Returns:
            The small part of the answer; None, having sent nothing, if another thread uses the connection, or the
            server cannot be reached at once.

        Raises:
            PeerTimeoutError, TransportError: as the future of a `Peer`.
        """
        return run_alone(self._guard, lambda: self._ask(asked, seconds))

    def _ask(self, asked: Asked, seconds: float) -> bytes | None:
        deadline = time.monotonic() + seconds
        connection = self._connected(deadline)
        if connection is None:
            return None
        why = asked.check(self._limits)
        if why is not None:
            raise TransportError(f"{self._name} was asked for {asked.what()}: {why}.")
        try:
            error, received = self._exchange(connection, asked, seconds, deadline)
        except BaseException as failed:
            self._drop()
            if not isinstance(failed, (GearError, OSError)):
                raise
            raise self._failed(asked, failed, seconds) from None
        if error is not None:
            raise failure(error, f"{self._name} was asked for {asked.what()}")
        return received

    def _connected(self, deadline: float) -> socket.socket | None:
        """The connection, made if necessary; None if it cannot be made now."""
        if self._socket is None and not self._closed and (now := time.monotonic()) >= self._not_before:
            deadline = min(deadline, now + _CONNECT)
            self._not_before = deadline + _PAUSE
            with contextlib.suppress(OSError):  # errors of the transport among them
                found = connected(self._address, self._secret, deadline, peer=self._name, tls=self._tls)
                self._socket, self._limits = found
                self._seconds = 0.0
        return self._socket

    def _exchange(
        self, connection: socket.socket, asked: Asked, seconds: float, deadline: float
    ) -> tuple[GearError | None, bytes]:
        """Send a request and receive its answer: the error that it reports, or None; and its small part."""
        self._number += 1
        head = Header(asked.kind, self._number, len(asked.small), asked.size).pack()
        self._limit(connection, seconds)
        parts: list[Any] = [head, asked.small, *asked.bulk]
        is_small = asked.size <= max(_JOINED, _APART * len(asked.bulk))
        if is_small or isinstance(connection, ssl.SSLSocket):
            connection.sendall(b"".join(parts))
        else:
            self._send(connection, parts, deadline)
        memory, got = self._memory, 0
        header: Header | None = None
        needed = HEADER
        while got < needed:
            left = deadline - time.monotonic()
            if left < self._seconds - _SLACK or left > self._seconds:
                self._limit(connection, left)
            count = connection.recv_into(memory[got:])
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, GONE)
            got += count
            if header is None and got >= HEADER:
                header = Header.parse(memory[:HEADER])
                needed = HEADER + self._answer_bytes(header, asked)
                if needed > len(memory):
                    memory = self._memory = _grown(memory, got, needed)
        assert header is not None
        if got > needed:
            raise ProtocolError(f"{got - needed:,} bytes came behind the answer {header.kind.name}.")
        small = bytes(memory[HEADER:needed])  # the next call reuses the memory
        if header.kind is Kind.REFUSE:
            raise refusal(memoryview(small))
        return (read_error(memoryview(small)) if header.kind is Kind.ERROR else None), small

    def _send(self, connection: socket.socket, parts: Sequence[Bytes | bytes], deadline: float) -> None:
        """Send a message without a copy of its parts."""
        views = [as_bytes(part) for part in parts]
        drop_sent(views, connection.sendmsg(views[:MOST_PARTS]))
        while views:
            self._limit(connection, deadline - time.monotonic())
            drop_sent(views, connection.sendmsg(views[:MOST_PARTS]))

    def _answer_bytes(self, header: Header, asked: Asked) -> int:
        """Bytes of the small part of an answer."""
        kind, most = header.kind, asked.most
        if kind is Kind.REFUSE or kind is Kind.ERROR:
            most = MOST_ERROR
        elif kind is not asked.answer:
            raise ProtocolError(f"A message {kind.name} came; expected {asked.answer.name} or ERROR.")
        if header.small > most or header.bulk:
            raise wrong_size(header, most, 0)
        if kind is not Kind.REFUSE and header.request != self._number:
            raise ProtocolError(f"A message {kind.name} answers another request than the last one.")
        return header.small

    def _limit(self, connection: socket.socket, seconds: float) -> None:
        """Let each of the socket's calls take so long."""
        seconds = max(1e-3, seconds)
        if seconds != self._seconds:
            connection.settimeout(seconds)
            self._seconds = seconds

    def _failed(self, asked: Asked, error: GearError | OSError, seconds: float) -> TransportError:
        if isinstance(error, TimeoutError) and not isinstance(error, GearError):
            return PeerTimeoutError(
                f"{self._name} was asked for {asked.what()} and did not answer within {seconds:g} s. Its server may be "
                "stopped or overloaded, or the network cut; raise the timeout if it is only slow. The connection was "
                "closed."
            )
        why = (
            os_error_text(error) if isinstance(error, OSError) and not isinstance(error, GearError) else error
        )
        return TransportError(
            f"{self._name} was asked for {asked.what()}, and then the connection was lost ({why}). Its server may have "
            "been stopped, killed or restarted: the next request reconnects."
        )

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Disconnect; a request that is under way in another thread fails. Idempotent."""
        self._closed = True
        connection = self._socket
        if connection is None:
            return
        if run_alone(self._guard, self._say_bye) is None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the thread that waits gets an error

    def _say_bye(self) -> bool:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._limit(self._socket, FAREWELL)
                self._socket.sendall(Header(Kind.BYE, 0, 0, 0).pack())
            self._drop()
        return True


def _grown(memory: memoryview, got: int, needed: int) -> memoryview:
    """Larger memory with the first `got` bytes of this."""
    larger = memoryview(bytearray(needed))
    larger[:got] = memory[:got]
    return larger


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
        return channel.detach(), _run(introduce(channel, secret, address, peer=peer))
    except BaseException:
        channel.end()
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
        self._socket = socket.create_connection((address.host, address.port), self._left())
        self._ahead = memoryview(bytearray(AHEAD))
        self._begin = self._end = 0
        try:
            if self._socket.getsockname() == self._socket.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, "the socket connected to itself")
            set_options(self._socket)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=address.host)
        except BaseException:
            self._socket.close()
            raise

    def _left(self) -> float:
        return max(1e-3, self.deadline - time.monotonic())

    async def send(self, *parts: Bytes) -> None:
        views = [as_bytes(part) for part in parts]
        encrypted = isinstance(self._socket, ssl.SSLSocket)
        while views:
            self._socket.settimeout(self._left())
            sent = self._socket.send(views[0]) if encrypted else self._socket.sendmsg(views[:MOST_PARTS])
            drop_sent(views, sent)

    async def recv_into(self, buffer: Bytes) -> None:
        view = as_bytes(buffer)
        while True:
            count = min(self._end - self._begin, len(view))
            view[:count] = self._ahead[self._begin : self._begin + count]
            self._begin += count
            view = view[count:]
            if not len(view):
                return
            if len(view) < AHEAD:
                self._begin, self._end = 0, self._receive(self._ahead)
            else:
                view = view[self._receive(view) :]

    def _receive(self, view: memoryview) -> int:
        self._socket.settimeout(self._left())
        count = self._socket.recv_into(view)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, GONE)
        return count

    def detach(self) -> socket.socket:
        """Return the socket."""
        return self._socket

    def end(self) -> None:
        """Close the socket."""
        self._socket.close()

    async def close(self) -> None:
        self.end()
