"""A connection that the calling thread uses itself: a request takes no hand-over to another thread and back.

The coroutines of the protocol run on a channel whose calls block, so that they end without an event loop.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from gear_loader.errors import GearError, PeerTimeoutError, TransportError
from gear_loader.transport.answers import receive_answer, receive_refusal
from gear_loader.transport.channel import Address, Bytes, Channel, as_bytes
from gear_loader.transport.handshake import introduce
from gear_loader.transport.request import Request
from gear_loader.transport.session import os_error_text
from gear_loader.transport.socket import AHEAD, GONE, MOST_PARTS, set_options
from gear_loader.transport.wire import HEADER, Header, Kind, Limits, ProtocolError, send
from gear_loader.utils.mutex import run_alone

__all__ = ["BlockingLink", "connected"]

_T = TypeVar("_T")
_PAUSE = 1.0  # seconds between two attempts to connect


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
        self._channel: _BlockingChannel | None = None
        self._limits = Limits()
        self._number = 0
        self._closed = False
        self._not_before = 0.0  # of the next attempt to connect

    def serve(self, request: Request[Any], seconds: float) -> bool:
        """Send a request, wait for its answer, and set its future.

        Args:
            seconds: until the deadline.

        Returns:
            False, having sent nothing, if another thread uses the connection, or the server cannot be reached at once.
        """
        return run_alone(self._guard, lambda: self._serve(request, seconds)) or False

    def _serve(self, request: Request[Any], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        channel = self._connected(deadline)
        if channel is None:
            return False
        why = None if request.check is None else request.check(self._limits)
        if why is not None:
            request.end(TransportError(f"{self._name} was asked for {request.what}: {why}."))
            return True
        try:
            error, received = _run(self._exchange(channel, request))
        except BaseException as failure:
            self._drop()
            request.end(self._failed(request, failure, seconds))
            if not isinstance(failure, (GearError, OSError)):
                raise
            return True
        request.end(error, received)
        return True

    def _connected(self, deadline: float) -> _BlockingChannel | None:
        """The connection, made if necessary; None if it cannot be made now."""
        if self._channel is None and not self._closed and time.monotonic() >= self._not_before:
            self._not_before = time.monotonic() + _PAUSE
            with contextlib.suppress(OSError):  # errors of the transport among them
                channel = _BlockingChannel(self._address, self._tls, deadline)
                try:
                    self._limits = _run(introduce(channel, self._secret, self._address, peer=self._name))
                    self._channel = channel
                finally:
                    if self._channel is None:
                        channel.end()
        if self._channel is not None:
            self._channel.deadline = deadline
        return self._channel

    async def _exchange(
        self, channel: _BlockingChannel, request: Request[Any]
    ) -> tuple[TransportError | None, memoryview]:
        self._number += 1
        bulk = () if request.bulk is None else (request.bulk,)
        await send(channel, request.kind, self._number, request.small, *bulk)
        head = memoryview(bytearray(HEADER))
        await channel.recv_into(head)
        header = Header.parse(head)
        if header.kind is Kind.REFUSE:
            raise await receive_refusal(channel, header)
        if header.request != self._number:
            raise ProtocolError(f"A message {header.kind.name} answers another request than the last one.")
        return await receive_answer(channel, header, request, self._name)

    def _failed(self, request: Request[Any], error: BaseException, seconds: float) -> TransportError:
        if isinstance(error, TimeoutError) and not isinstance(error, GearError):
            return PeerTimeoutError(
                f"{self._name} was asked for {request.what} and did not answer within {seconds:g} s. Its server may be "
                "stopped or overloaded, or the network cut; raise the timeout if it is only slow. The connection was "
                "closed."
            )
        why = (
            os_error_text(error) if isinstance(error, OSError) and not isinstance(error, GearError) else error
        )
        return TransportError(
            f"{self._name} was asked for {request.what}, and then the connection was lost ({why}). Its server may have "
            "been stopped, killed or restarted: the next request reconnects."
        )

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.end()

    def close(self) -> None:
        """Disconnect; a request that is under way in another thread fails. Idempotent."""
        self._closed = True
        channel = self._channel
        if channel is None:
            return
        if run_alone(self._guard, self._say_bye) is None:
            channel.interrupt()

    def _say_bye(self) -> bool:
        if self._channel is not None:
            self._channel.deadline = time.monotonic() + 0.5
            with contextlib.suppress(OSError):
                _run(send(self._channel, Kind.BYE, 0))
            self._drop()
        return True


def connected(address: Address, secret: bytes, deadline: float, *, peer: str) -> tuple[socket.socket, Limits]:
    """Connect to a server over the carrier "socket" in the calling thread.

    Args:
        address, secret: of the server. deadline: by `time.monotonic`. peer: the server in errors.

    Returns:
        The connected socket, after the handshake, with some timeout; and the server's limits.

    Raises:
        OSError: it cannot be connected; HandshakeError: one side refused the other.
    """
    channel = _BlockingChannel(address, None, deadline)
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
    """A connected socket whose coroutines never suspend.

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
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

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

    def interrupt(self) -> None:
        """Make the call of another thread fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def detach(self) -> socket.socket:
        """Return the socket."""
        return self._socket

    def end(self) -> None:
        """Close the socket."""
        self._socket.close()

    async def close(self) -> None:
        self.end()
