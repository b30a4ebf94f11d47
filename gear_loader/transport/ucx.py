"""The carrier "ucx": messages over UCX, which uses InfiniBand, shared memory or TCP, as available.

A connection begins as a plain TCP connection to the host and port of the address. After the handshake,
`UcxChannel.secured` exchanges over it the data that UCX needs:

    magic      8 B    b"GEARUCX1"
    sizes      u16, u32, little endian: bytes of the next two
    library    "ucxx-0.52.0"
    address    of the UCX worker, in UCX's format
    tag        u64, random; messages to this side have the tag xor their size, so that a message never matches a
               receive of another size

Further messages go over UCX. The TCP connection reports the end of the other side at once, whichever transport UCX
uses. Before an orderly close, a side writes the number of messages it has sent (u64) to the TCP connection, and waits
a moment for the other side to receive them.

UCX's own listener, which would bind every address of the machine, is not used, and UCX receives addresses only from
authenticated peers. UCX opens the sockets of its TCP transport, one for each device: only the loopback device for a
connection between loopback addresses, otherwise the devices in UCX_NET_DEVICES, or all if it is not set. Nothing is
encrypted. UCX cannot be used after a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from gear_loader.errors import HandshakeError, TransportError
from gear_loader.transport.channel import (
    Address,
    Bytes,
    Carrier,
    Channel,
    Listener,
    always,
    family,
    is_loopback,
    listening_sockets,
)
from gear_loader.transport.loop import within
from gear_loader.transport.ucx_library import Library, available, library_in_loop

_MAGIC = b"GEARUCX1"
_SIZES = struct.Struct("<HI")
_NUMBER = struct.Struct("<Q")
_MAX_LIBRARY = 64
_MAX_ADDRESS = 1 << 16
_UNSECURED_BYTES = 1 << 16  # largest message before `secured`; handshake messages are smaller
_STREAM_BYTES = 1 << 12  # read-ahead limit of the TCP stream
_RECEIVE_BUFFER = 1 << 15  # kernel receive buffer of an accepted stream, which carries few bytes
_LINGER = 0.5  # seconds that `close` waits for the other side to receive the last messages


class UcxChannel(Channel):
    """One end of a connection: a TCP stream until `secured`, UCX afterwards.

    Args:
        streams: reader and writer of the TCP connection.
        library: the UCX worker of this event loop.
    """

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], library: Library) -> None:
        self.library = library.name
        self._reader, self._writer = streams
        self._ucx = library
        self._endpoint: Any = None
        self._tags = (0, 0)  # for sending, for receiving
        self._counts = [0, 0]  # messages sent; receives begun
        # Total of messages sent by the other side, once it has announced it.
        self._expected: int | None = None
        self._failure: str | None = None
        self._received = 0  # completed receives
        self._sending = False
        self._watcher: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # the other side has closed its stream
        self._closed = False
        name = self._writer.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""

    # ---------------------------------------------------------------- from the stream to UCX

    async def secured(self) -> None:
        """Switch to UCX; called once by both sides after the handshake.

        Raises:
            HandshakeError: the other side uses an incompatible library.
            ConnectionError: the connection is closed, or UCX fails.
        """
        self._check()
        mine = secrets.randbits(64)
        name, address = self._ucx.name.encode(), self._ucx.address()
        try:
            sizes = _SIZES.pack(len(name), len(address))
            self._writer.write(_MAGIC + sizes + name + address + _NUMBER.pack(mine))
            await self._writer.drain()
            magic = await self._reader.readexactly(len(_MAGIC))
            if magic != _MAGIC:
                raise HandshakeError(f"{self._other()} began with {magic!r}; expected {_MAGIC!r}.")
            name_bytes, address_bytes = _SIZES.unpack(await self._reader.readexactly(_SIZES.size))
            if name_bytes > _MAX_LIBRARY or not 0 < address_bytes <= _MAX_ADDRESS:
                raise HandshakeError(
                    f"{self._other()} announced a library of {name_bytes} bytes and an address of {address_bytes}; "
                    f"expected at most {_MAX_LIBRARY} and {_MAX_ADDRESS:,}."
                )
            theirs = (await self._reader.readexactly(name_bytes)).decode(errors="replace")
            if family(theirs) != family(self.library):
                raise HandshakeError(
                    f"{self._other()} uses {theirs!r}, this side {self.library!r}, which are not compatible. "
                    "Install the same library on both: pip install '.[ucx]' (in a clone of Gear Loader) installs ucxx."
                )
            remote = await self._reader.readexactly(address_bytes)
            (tag,) = _NUMBER.unpack(await self._reader.readexactly(_NUMBER.size))
        except (asyncio.IncompleteReadError, OSError) as error:
            if isinstance(error, TransportError):
                raise
            raise ConnectionError(f"{self._other()} closed the connection ({error}).") from error
        self._tags = tag, mine
        try:
            self._endpoint = await self._ucx.endpoint(remote)
        except Exception as error:
            raise ConnectionError(f"UCX cannot reach {self._other()}: {error}.") from error
        self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Wait for the other side's message count, or the end of its stream."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            (self._expected,) = _NUMBER.unpack(await self._reader.readexactly(_NUMBER.size))
            self._gone.set()  # the other side has stopped receiving
            if self._counts[1] <= self._expected and self._received < self._expected:
                return  # messages are still in flight; `recv_into` ends the connection after the last one
        self._gone.set()
        self._over()

    def _over(self) -> None:
        """End the connection after the other side has closed and all its messages have arrived."""
        self._fail(f"{self._other()} closed the connection")
        self._writer.close()

    # ---------------------------------------------------------------- messages

    async def send(self, *parts: Bytes) -> None:
        self._check()
        if self._endpoint is None:
            await self._stream_send(parts)
            return
        self._sending = True
        for part in parts:
            await self._do(self._ucx.send(self._endpoint, part, self._tags[0] ^ _bytes_of(part)), "send")
            self._counts[0] += 1
            self._check()
        self._sending = False

    async def recv_into(self, buffer: Bytes) -> None:
        self._check()
        if self._endpoint is None:
            await self._stream_recv(buffer)
            return
        self._counts[1] += 1
        await self._do(self._ucx.recv(self._endpoint, buffer, self._tags[1] ^ _bytes_of(buffer)), "receive")
        self._received += 1
        if self._expected == self._received:
            self._over()

    async def _do(self, work: Any, what: str) -> None:
        try:
            await work
        except asyncio.CancelledError:
            # The message may still arrive, and would match the next receive.
            self._fail(f"A {what} was cancelled")
            raise
        except Exception as error:
            self._fail(f"UCX failed to {what}: {error}")
            raise ConnectionError(f"{self._failure}.") from error

    async def _stream_send(self, parts: tuple[Bytes, ...]) -> None:
        try:
            for part in parts:
                self._writer.write(_small(part))
            await self._writer.drain()
        except OSError as error:
            raise ConnectionError(f"{self._other()} closed the connection ({error}).") from error

    async def _stream_recv(self, buffer: Bytes) -> None:
        view = _small(buffer)
        try:
            view[:] = await self._reader.readexactly(len(view))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionError(f"{self._other()} closed the connection ({error}).") from error

    def _check(self) -> None:
        if self._failure is not None:
            raise ConnectionError(f"{self._failure}.")

    def _other(self) -> str:
        return f"The other side ({self.peer or 'unknown'})"

    # ---------------------------------------------------------------- the end

    def _fail(self, reason: str) -> None:
        """Abort pending operations; the first reason is kept for errors."""
        if self._failure is None:
            self._failure = reason
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            with contextlib.suppress(Exception):  # the endpoint may have failed already
                self._ucx.abort(endpoint)

    async def linger(self, seconds: float, most: float = float("inf")) -> None:
        if self._watcher is not None:
            return  # `close` waits
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self._writer.write_eof()
            await within(seconds, self._discard(most))

    async def _discard(self, most: float) -> None:
        while most > 0:
            part = await self._reader.read(1 << 16)
            most -= len(part) or most

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        orderly = self._endpoint is not None and self._failure is None and not self._sending
        self._failure = self._failure or "The connection was closed"
        try:
            if orderly:
                self._writer.write(_NUMBER.pack(self._counts[0]))
                self._writer.write_eof()
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(_LINGER, self._gone.wait())
        except OSError:
            pass
        finally:
            self._fail(self._failure)
            if self._watcher is not None:
                self._watcher.cancel()
            self._writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await within(_LINGER, self._writer.wait_closed())


class UcxCarrier(Carrier):
    """Connects over UCX.

    Raises:
        ImportError: neither ucxx nor ucx-py is installed, or it cannot be loaded.
    """

    name = "ucx"

    def __init__(self) -> None:
        self._kind = available()
        self.library = self._kind.title()

    async def connect(self, address: str) -> UcxChannel:
        parts = Address.parse(address)
        if parts.carrier != self.name:
            raise TransportError(f"Address {address!r} was received; expected one that begins with ucx://.")
        if parts.library and family(parts.library) != family(self.library):
            raise HandshakeError(
                f"{address} is served by {parts.library}, and this side has {self.library}, which are not "
                "compatible. Install the same library on both: pip install '.[ucx]' (in a clone of Gear Loader) "
                "installs ucxx."
            )
        streams = await asyncio.open_connection(parts.host, parts.port, limit=_STREAM_BYTES)
        try:
            _no_delay(streams[1])
            peer = streams[1].get_extra_info("peername")
            library = library_in_loop(self._kind, loopback=bool(peer) and is_loopback(peer[0]))
            return UcxChannel(streams, library)
        except BaseException:
            streams[1].close()
            raise

    async def listen(
        self,
        host: str,
        port: int,
        serve: Callable[[Channel], Awaitable[None]],
        room: Callable[[], Awaitable[None]] = always,
    ) -> Listener:
        """Accept connections.

        UCX's sockets are kept to the loopback device if all addresses of `host` are; otherwise UCX opens one on every
        device, or on those that UCX_NET_DEVICES names.
        """

        async def begin(connection: socket.socket) -> None:
            connection.setblocking(False)
            try:
                streams = await asyncio.open_connection(sock=connection, limit=_STREAM_BYTES)
                _no_delay(streams[1])
            except OSError:  # already closed
                connection.close()
                return
            channel = UcxChannel(streams, library)
            try:
                await serve(channel)
            finally:
                await channel.close()

        sockets = await listening_sockets(host, port, receive_buffer=_RECEIVE_BUFFER)
        try:
            names = [each.getsockname() for each in sockets]
            library = library_in_loop(self._kind, loopback=all(is_loopback(name[0]) for name in names))
        except BaseException:
            for each in sockets:
                each.close()
            raise
        return Listener(sockets, str(Address(self.name, names[0][0], names[0][1], self.library)), begin, room)


def _bytes_of(part: Bytes) -> int:
    return part.nbytes


def _small(part: Bytes) -> memoryview:
    """View a message for the TCP stream as bytes."""
    buffer: Any = part  # Python 3.10 has no type for buffers, which arrays are
    memory = memoryview(buffer)
    view = memory.cast("B") if memory.nbytes else memoryview(b"")
    if len(view) > _UNSECURED_BYTES:
        raise ConnectionError(
            f"A message of {len(view):,} bytes before the connection is secured; expected at most "
            f"{_UNSECURED_BYTES:,}. Call secured() on both sides after the handshake."
        )
    return view


def _no_delay(writer: asyncio.StreamWriter) -> None:
    plain = writer.get_extra_info("socket")
    if plain is not None and plain.family in (socket.AF_INET, socket.AF_INET6):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
