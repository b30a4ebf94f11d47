"""The carrier "ucx": messages over UCX, which takes InfiniBand, shared memory or TCP, whatever there is.

A connection begins as a plain TCP connection, to exactly the host and port of the address. There the two sides prove to
each other who they are; then `UcxChannel.secured` sends over it what UCX needs:

    magic      8 B    b"GEARUCX1"
    sizes      u16, u32, little endian: bytes of the next two
    library    "ucxx-0.52.0"
    address    of the UCX worker, as UCX writes it
    tag        u64, random; the messages to the side that sends this are marked with it, xor their size, so that
               one of another size than expected is never taken for it

From then on messages go over UCX, and the TCP connection tells when the other side has gone: at once, whatever
transport UCX uses. Whoever closes in peace writes the number of messages that it has sent (u64) before it does, and
gives the other side a moment to receive them.

So UCX's own listener, which binds every address of the machine, is not used, and UCX never sees an address from
anybody who does not know the secret. What UCX opens itself are the sockets of its TCP transport, one a device: on a
connection between addresses of the loopback device it is told to use no other device, on any other the devices that
UCX_NET_DEVICES names, all if it is not set. Nothing is encrypted. UCX cannot be used after a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from gear_loader.errors import HandshakeError, TransportError
from gear_loader.transport.channel import Address, Bytes, Carrier, Channel, family
from gear_loader.transport.tcp_listener import TcpListener, listening_sockets
from gear_loader.transport.ucx_library import Library, available, library_in_loop

__all__ = ["UcxCarrier", "UcxChannel"]

_MAGIC = b"GEARUCX1"
_SIZES = struct.Struct("<HI")
_NUMBER = struct.Struct("<Q")
_MAX_LIBRARY = 64
_MAX_ADDRESS = 1 << 16
_UNSECURED_BYTES = 1 << 16  # largest message before `secured`: those of a handshake are smaller
_STREAM_BYTES = 1 << 12  # after which a connection's stream is not read ahead
_RECEIVE_BUFFER = 1 << 15  # bytes of an accepted stream that the system keeps: little is sent over it
_LINGER = 0.5  # seconds that `close` gives the other side to receive what has been sent


class UcxChannel(Channel):
    """One end of a connection: a stream until `secured`, UCX afterwards.

    Args:
        streams: of the TCP connection.
        library: the UCX worker of this loop.
    """

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], library: Library) -> None:
        self.library = library.name
        self._reader, self._writer = streams
        self._ucx = library
        self._endpoint: Any = None
        self._tags = (0, 0)  # of what is sent, of what is received
        self._counts = [0, 0]  # messages sent; receives that have begun
        self._expected: int | None = None  # messages that the other side has sent in all, if it has said so
        self._failure: str | None = None
        self._received = 0  # receives that are done
        self._sending = False
        self._watcher: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # the other side has closed its stream
        self._closed = False
        name = self._writer.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""

    # ---------------------------------------------------------------- from the stream to UCX

    async def secured(self) -> None:
        """Go over to UCX. Both sides call this, once, when each has proved to the other that it knows the secret.

        Raises:
            HandshakeError: the other side uses another library.
            ConnectionError: the connection is gone, or UCX refuses.
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
                    f"{self._other()} uses {theirs!r}, this side {self.library!r}, which do not talk to each other. "
                    "Install the same library on both: pip install '.[ucx]' (in a clone of Gear Loader) brings ucxx."
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
        """Wait for the other side's farewell, or its end."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            (self._expected,) = _NUMBER.unpack(await self._reader.readexactly(_NUMBER.size))
            self._gone.set()  # it receives no more
            if self._counts[1] <= self._expected and self._received < self._expected:
                return  # what it has sent is on its way; `recv_into` refuses what is asked for beyond that
        self._gone.set()
        self._over()

    def _over(self) -> None:
        """The other side has gone, and everything that it has sent is here."""
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
            # The message may still come, and would be taken for the next one.
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
        """Cut what is in progress; the first reason is the one that is told."""
        if self._failure is None:
            self._failure = reason
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            with contextlib.suppress(Exception):  # it may have failed by itself
                self._ucx.abort(endpoint)

    async def linger(self, seconds: float, most: float = float("inf")) -> None:
        if self._watcher is not None:
            return  # `close` does it
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self._writer.write_eof()
            await asyncio.wait_for(self._discard(most), seconds)

    async def _discard(self, most: float) -> None:
        while most > 0:
            part = await self._reader.read(1 << 16)
            most -= len(part) or most

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        whole = self._endpoint is not None and self._failure is None and not self._sending
        self._failure = self._failure or "The connection was closed"
        try:
            if whole:
                self._writer.write(_NUMBER.pack(self._counts[0]))
                self._writer.write_eof()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), _LINGER)
        except OSError:
            pass
        finally:
            self._fail(self._failure)
            if self._watcher is not None:
                self._watcher.cancel()
            self._writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._writer.wait_closed(), _LINGER)


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
                f"{address} is served by {parts.library}, and this side has {self.library}, which do not talk to each "
                "other. Install the same library on both: pip install '.[ucx]' (in a clone of Gear Loader) brings "
                "ucxx."
            )
        streams = await asyncio.open_connection(parts.host, parts.port, limit=_STREAM_BYTES)
        try:
            _no_delay(streams[1])
            library = library_in_loop(
                self._kind, loopback=_is_loopback(streams[1].get_extra_info("peername"))
            )
            return UcxChannel(streams, library)
        except BaseException:
            streams[1].close()
            raise

    async def listen(self, host: str, port: int, serve: Callable[[Channel], Awaitable[None]]) -> TcpListener:
        """Accept connections.

        UCX's sockets are kept to the loopback device if all addresses of `host` are; otherwise UCX opens one on every
        device, or on those that UCX_NET_DEVICES names.
        """

        async def begin(connection: socket.socket) -> None:
            connection.setblocking(False)
            try:
                streams = await asyncio.open_connection(sock=connection, limit=_STREAM_BYTES)
                _no_delay(streams[1])
            except OSError:  # it is gone already
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
            library = library_in_loop(self._kind, loopback=all(map(_is_loopback, names)))
        except BaseException:
            for each in sockets:
                each.close()
            raise
        return TcpListener(sockets, str(Address(self.name, names[0][0], names[0][1], self.library)), begin)


def _bytes_of(part: Bytes) -> int:
    return part.nbytes


def _small(part: Bytes) -> memoryview:
    """The bytes of a message that goes over the stream."""
    anything: Any = part  # an array is a buffer, which Python 3.10 cannot say
    whole = memoryview(anything)
    view = whole.cast("B") if whole.nbytes else memoryview(b"")
    if len(view) > _UNSECURED_BYTES:
        raise ConnectionError(
            f"A message of {len(view):,} bytes before the connection is secured; expected at most "
            f"{_UNSECURED_BYTES:,}. Call secured() on both sides after the handshake."
        )
    return view


def _is_loopback(name: Any) -> bool:
    try:
        return ipaddress.ip_address(str(name[0]).partition("%")[0]).is_loopback
    except (TypeError, ValueError, IndexError):
        return False


def _no_delay(writer: asyncio.StreamWriter) -> None:
    plain = writer.get_extra_info("socket")
    if plain is not None and plain.family in (socket.AF_INET, socket.AF_INET6):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
