"""Interfaces of message transports, channels and carriers; addresses; listening sockets, and what accepts at them."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import importlib
import ipaddress
import itertools
import re
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from gear_loader.errors import TransportError

Bytes = memoryview | np.ndarray[Any, Any]
"""Contiguous memory; an array of any dtype stands for its bytes."""


def as_bytes(part: Bytes | bytes | bytearray) -> memoryview:
    """View contiguous memory as bytes."""
    view = memoryview(part)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def drop_sent(views: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes, which have been sent, from the pieces of a message."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if count:
        views[0] = views[0][count:]


@dataclasses.dataclass(frozen=True)
class TransportEntry:
    """A transport by the places of its classes, ``<module>:<class>``. No other module imports these: they are loaded
    when the transport is used.

    Attributes:
        carrier: a `Carrier`. encrypted: that with TLS, made of a context. reader, owner: of one-sided reads, which need
            no carrier of their own: what fetches rows as a `Peer` does, and what lets others read its process's tables.
        remedy: command that installs what it needs.
    """

    carrier: str = ""
    encrypted: str = ""
    reader: str = ""
    owner: str = ""
    remedy: str = ""


TRANSPORTS = {
    "socket": TransportEntry(carrier="socket:SocketCarrier", encrypted="tls:TlsCarrier"),
    "ucx": TransportEntry(
        carrier="ucx:UcxCarrier", remedy="pip install '.[ucx]' (in a clone of Gear Loader)"
    ),
    "nixl": TransportEntry(reader="nixl_reader:NixlPeer", owner="nixl_server:NixlOwner"),
}
"""All transports by name; each has one entry here, and is known nowhere else."""
CARRIERS = tuple(name for name, entry in TRANSPORTS.items() if entry.carrier)
"""Names of those that are carriers."""


def load(place: str) -> Any:
    """The class at a place of an `TransportEntry`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"gear_loader.transport.{module}"), name)


_ADDRESS = "expected <carrier>://<host>:<port>, such as socket://127.0.0.1:5555"
_LIBRARY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_NOTHING = memoryview(b"")
_BACKLOG = 4096  # connections that the kernel queues until they are accepted, if net.core.somaxconn allows
_IN_A_ROW = 8  # accepted connections before other tasks of the event loop take their turn


class Channel(abc.ABC):
    """One end of a connection. All methods run in the thread of the event loop.

    At most one coroutine at a time may send, and at most one may receive.

    Attributes:
        library: the transport library with its version, such as "socket", "ucxx-0.52.0" or "ucx-py-0.45.0"; compared
            in the handshake.
        peer: address of the other side for log lines, such as "127.0.0.1:40322", or "".
        is_local: whether both sides have one address, so that they are probably on one machine.
    """

    library: str
    peer: str = ""
    is_local: bool = False

    @abc.abstractmethod
    async def send(self, *parts: Bytes) -> None:
        """Send messages in order. The other side receives each part by one `recv_into` of the same size.

        The memory may be reused after the return. No part is empty.

        Raises:
            ConnectionError: the connection is closed.
        """

    async def secured(self) -> None:  # noqa: B027 - most carriers have nothing to do
        """Called once by both sides after the handshake, before larger messages are sent.

        Raises:
            HandshakeError, ConnectionError: the carrier cannot go on.
        """

    @abc.abstractmethod
    async def recv_into(self, buffer: Bytes) -> None:
        """Receive the next message into a writable, non-empty buffer of its size.

        Raises:
            ConnectionError: the connection is closed; a part of the buffer may have been written.
        """

    async def fill(  # noqa: B027 - most carriers read nothing ahead
        self, at_once: Callable[[], bool] | None = None
    ) -> None:
        """Wait until there are bytes in `ahead`, where a carrier reads ahead at all.

        Args:
            at_once: called when bytes have come, by the event loop itself if the carrier can, which takes less time
                than to go on with the waiting task; returns whether to wait for more.

        Raises:
            ConnectionError: the connection is closed. Any error of `at_once`.
        """

    def ahead(self) -> memoryview:
        """Bytes that were received ahead, and not taken yet; empty where a carrier reads nothing ahead."""
        return _NOTHING

    def skip(self, count: int) -> None:  # noqa: B027 - as `fill`
        """Take the first bytes of `ahead`."""

    def send_some(self, *parts: Bytes | bytes) -> list[memoryview]:
        """Send what can be sent without waiting; returns what is left, for `send`.

        Raises:
            ConnectionError: the connection is closed.
        """
        return [as_bytes(part) for part in parts]

    def sender(self, *parts: Bytes) -> Callable[[], list[memoryview]]:
        """A function by which another thread sends as much as goes without a long wait; no other may send meanwhile.

        Returns:
            What is left, for `send`. Errors are for that, too. The channel may be closed meanwhile.
        """
        return lambda: [as_bytes(part) for part in parts]

    def detached(self) -> tuple[socket.socket, bytes] | None:
        """The socket, which a thread uses alone from now on, and what was received ahead; None if no thread can.

        The caller closes it; the channel is closed, too.
        """
        return None

    async def linger(  # noqa: B027 - for carriers whose `close` can lose the last messages
        self, seconds: float, most: float = float("inf")
    ) -> None:
        """Wait before `close` until the other side has received the last messages and closed the connection.

        Args:
            seconds: longest wait.
            most: bytes to receive from the other side, and discard, before giving up.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the connection; idempotent. Pending sends and receives fail with ConnectionError.

        After the return no buffer of `recv_into` is written.
        """


async def listening_sockets(
    host: str, port: int, *, receive_buffer: int | None = None
) -> list[socket.socket]:
    """Listen on all addresses of a host, or on the first one if the port is 0.

    Args:
        receive_buffer: bytes of the kernel's receive buffer for each connection; None for the default.

    Raises:
        OSError: it cannot listen at an address.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for kind, type_, protocol, _, place in found[:1] if port == 0 else found:
            listening = socket.socket(kind, type_, protocol)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if receive_buffer is not None:  # the accepted sockets inherit it
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            if kind == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.setblocking(False)
            listening.bind(place)
            listening.listen(_BACKLOG)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


class Listener:
    """Accepts the connections of listening sockets, from its constructor on.

    It yields to the event loop after a few connections, so a flood of connections does not delay accepted ones.

    Args:
        sockets: from `listening_sockets`; closed with the listener.
        address: for `Carrier.connect`.
        serve: called with each accepted socket in a task of its own; closes it and raises no exception.
        room: awaited before each is accepted; meanwhile connections wait in the kernel's queue.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        address: str,
        serve: Callable[[socket.socket], Awaitable[None]],
        room: Callable[[], Awaitable[None]],
    ) -> None:
        self.address = address
        self._sockets = sockets
        self._serve = serve
        self._room = room
        self._tasks = [asyncio.ensure_future(self._accept(each)) for each in sockets]
        self._served: set[asyncio.Future[None]] = set()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count():
            await self._room()
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # too many open files, or a connection that was closed already
                await asyncio.sleep(0.05)
                continue
            task = asyncio.ensure_future(self._serve(connection))
            self._served.add(task)
            task.add_done_callback(self._served.discard)
            if number % _IN_A_ROW == 0:
                await asyncio.sleep(0)  # `sock_accept` does not yield while connections are queued

    async def close(self) -> None:
        """Accept no more connections; idempotent. Existing connections stay open."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for each in self._sockets:
            each.close()


async def always() -> None:
    """Connections are accepted at any time."""


class Carrier(abc.ABC):
    """A transport. The constructor loads its library; the methods run in the event loop.

    Attributes:
        name: as in addresses and in `CARRIERS`.
        library: as in `Channel`.
    """

    name: str
    library: str

    @abc.abstractmethod
    async def connect(self, address: str) -> Channel:
        """Connect. The caller cancels at its deadline.

        Raises:
            OSError: the address cannot be reached, or has no listener.
            TransportError: the address is of another carrier.
        """

    @abc.abstractmethod
    async def listen(
        self,
        host: str,
        port: int,
        serve: Callable[[Channel], Awaitable[None]],
        room: Callable[[], Awaitable[None]] = always,
    ) -> Listener:
        """Accept connections and serve each in a task of its own.

        Args:
            host: address or name of this machine. port: port number, or 0 for a free port.
            serve: called with each channel; closes it and raises no exception.
            room: awaited before each connection is accepted.

        Raises:
            OSError: it cannot listen at this address.
        """


@dataclasses.dataclass(frozen=True)
class Address:
    """The parts of an address. `library` is "" if the address does not name one."""

    carrier: str
    host: str
    port: int
    library: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``<carrier>://<host>:<port>[?library=<library>]``; an IPv6 host is in brackets.

        Raises:
            TransportError: invalid address.
        """
        if not isinstance(text, str) or len(text) > 1024:
            raise TransportError(f"Address {str(text)[:100]!r} was received; {_ADDRESS}.")
        try:
            parts = urllib.parse.urlsplit(text)
            port, host = parts.port, parts.hostname
            query = urllib.parse.parse_qs(
                parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)
            )
        except ValueError as error:
            raise TransportError(f"Address {text!r} was received ({error}); {_ADDRESS}.") from None
        plain = parts.path in ("", "/") and not parts.fragment and "@" not in parts.netloc
        libraries = query.pop("library", [""])
        if not host or not port or not plain or query or len(libraries) != 1:
            raise TransportError(f"Address {text!r} was received; {_ADDRESS}.")
        if libraries[0] and not _LIBRARY.fullmatch(libraries[0]):
            raise TransportError(
                f"Address {text!r} was received; expected a library with its version, such as ucxx-0.52.0."
            )
        return cls(parts.scheme, host, port, libraries[0])

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.carrier}://{host}:{self.port}" + (f"?library={self.library}" if self.library else "")


def family(library: str) -> str:
    """Name of a library without its version, as in "ucx-py-0.45.0" -> "ucx-py". Equal names are compatible."""
    return re.sub(r"-[0-9].*", "", library)


def carrier(name: str, tls: ssl.SSLContext | None = None) -> Carrier:
    """Create the carrier called `name`.

    Args:
        tls: context of this side, to encrypt connections; with the carrier "socket" only.

    Raises:
        TransportError: unknown name, or a package that the carrier needs is not installed.
    """
    if tls is not None and name != "socket":
        raise TransportError(f"TLS was asked for with the carrier {name!r}; expected the carrier 'socket'.")
    if name not in CARRIERS:
        raise TransportError(f"Carrier {name!r} was received; expected one of {', '.join(sorted(CARRIERS))}.")
    entry = TRANSPORTS[name]
    try:
        made: Carrier = load(entry.carrier)() if tls is None else load(entry.encrypted)(tls)
    except ImportError as error:
        raise TransportError(
            f"The carrier {name!r} cannot be used here ({error}). Install what it needs: "
            f"{entry.remedy or 'see the error'}; or choose another: `gear-loader doctor` shows which there are."
        ) from error
    return made


def is_loopback(host: str) -> bool:
    """Whether a host name or address can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
