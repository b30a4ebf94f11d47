"""The carrier "socket": TCP in the event loop, without intermediate copies. It needs no other package."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
from collections.abc import Awaitable, Callable

from gear_loader.errors import TransportError
from gear_loader.transport.channel import (
    Address,
    Bytes,
    Carrier,
    Channel,
    Listener,
    always,
    as_bytes,
    drop_sent,
    listening_sockets,
)
from gear_loader.transport.loop import within

AHEAD = 1 << 16
"""Bytes of the read-ahead buffer: larger messages are not received ahead."""
_PIECE = 1 << 12  # bytes of a piece that is received directly to its place; and of that buffer at first
_LITTLE = 2  # milliseconds that a thread which sends waits for room
_CALLS_IN_A_ROW = 64  # calls without waiting, after which the channel yields to the event loop
MOST_PARTS = 64
"""Most parts of one `sendmsg`."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A machine that has vanished is noticed after 60 s."""
GONE = "The connection was closed by the other side."


def set_options(connection: socket.socket) -> None:
    """Send small messages at once, and notice a machine that has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class SocketChannel(Channel):
    """A connected socket."""

    library = "socket"
    _calls_back = True  # whether the event loop knows when there are bytes

    def __init__(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = connection
        self._fd = connection.fileno()
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._watched = False  # whether the loop watches the socket for data
        self._ahead = memoryview(bytearray(_PIECE))  # grows to AHEAD for a larger message
        self._begin = self._end = 0
        self._at_once: Callable[[], bool] | None = None  # see `fill`
        self._ended = False  # whether it has returned False
        self._calls = 0
        connection.setblocking(False)
        set_options(connection)
        try:
            host, port = connection.getpeername()[:2]
            self.peer = f"{host}:{port}"
            self.is_local = connection.getsockname()[0] == host
        except OSError:  # closed already; the first use raises the error
            self.peer = ""

    async def send(self, *parts: Bytes) -> None:
        views = [as_bytes(part) for part in parts]
        while views:
            try:
                sent = self._send_some(views)
            except (BlockingIOError, InterruptedError):
                await self._wait_to_write()
                continue
            drop_sent(views, sent)
            await self._yield()

    def send_some(self, *parts: Bytes | bytes) -> list[memoryview]:
        views = [as_bytes(part) for part in parts]
        while views:
            try:
                sent = self._send_some(views)
            except (BlockingIOError, InterruptedError):
                break
            drop_sent(views, sent)
        return views

    async def fill(self, at_once: Callable[[], bool] | None = None) -> None:
        while self._begin == self._end or (at_once is not None and at_once()):
            try:
                self._receive_ahead()
            except (BlockingIOError, InterruptedError):
                self._at_once, self._ended = at_once if self._calls_back else None, False
                try:
                    await self._wait_to_read()
                finally:
                    self._at_once = None
                if self._ended:
                    return
            else:
                await self._yield()

    def _receive_ahead(self) -> None:
        """Receive behind the bytes of the read-ahead buffer. Raises BlockingIOError if it would have to wait."""
        memory, rest = self._ahead, self._end - self._begin
        if not rest:
            self._begin = self._end = 0
        else:
            if self._begin:
                memory[:rest] = bytes(self.ahead())
                self._begin, self._end = 0, rest
            if rest == len(memory):
                memory = memoryview(bytearray(AHEAD))
                memory[:rest], self._ahead = self._ahead, memory
            memory = memory[rest:]
        count = self._receive_some(memory)
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, GONE)
        self._end += count

    def ahead(self) -> memoryview:
        return self._ahead[self._begin : self._end]

    def skip(self, count: int) -> None:
        self._begin += count

    def sender(self, *parts: Bytes) -> Callable[[], list[memoryview]]:
        views, connection = [as_bytes(part) for part in parts], self._live().dup()

        def send() -> list[memoryview]:
            waiter = select.poll()
            with connection, contextlib.suppress(OSError):  # `send` meets it, too
                waiter.register(connection, select.POLLOUT)
                while views:
                    try:
                        drop_sent(views, connection.sendmsg(views[:MOST_PARTS]))
                    except (BlockingIOError, InterruptedError):
                        if not waiter.poll(_LITTLE):
                            break
            return views

        return send

    def detached(self) -> tuple[socket.socket, bytes] | None:
        if not self._calls_back:  # the library has a state of its own
            return None
        found, ahead = self._live().dup(), bytes(self.ahead())
        self._begin = self._end = 0
        self._loop.remove_reader(self._fd)
        self._watched = False
        return found, ahead

    def _send_some(self, views: list[memoryview]) -> int:
        """Send at least one byte; returns the number. Raises BlockingIOError if it would have to wait."""
        connection = self._live()
        return connection.send(views[0]) if len(views) == 1 else connection.sendmsg(views[:MOST_PARTS])

    def _receive_some(self, view: memoryview) -> int:
        """Receive at least one byte, and 0 at the end. Raises BlockingIOError if it would have to wait."""
        return self._live().recv_into(view)

    async def recv_into(self, buffer: Bytes) -> None:
        view = as_bytes(buffer)
        while True:
            if self._begin < self._end:
                count = min(self._end - self._begin, len(view))
                view[:count] = self._ahead[self._begin : self._begin + count]
                self._begin += count
                if count == len(view):
                    return
                view = view[count:]
            if len(view) < _PIECE:
                self._begin, self._end = 0, await self._receive(self._ahead)
            else:
                count = await self._receive(view)
                if count == len(view):
                    return
                view = view[count:]

    async def _receive(self, view: memoryview) -> int:
        """Receive at least one byte; returns the number."""
        while True:
            try:
                count = self._receive_some(view)
            except (BlockingIOError, InterruptedError):
                await self._wait_to_read()
                continue
            if count == 0:
                raise ConnectionResetError(errno.ECONNRESET, GONE)
            await self._yield()
            return count

    async def linger(self, seconds: float, most: float = float("inf")) -> None:
        # A close with unread data resets the connection, and the other side would lose data it has not read.
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self._live().shutdown(socket.SHUT_WR)
            await within(seconds, self._discard(most))

    async def _discard(self, most: float) -> None:
        while most > 0:
            most -= await self._receive(self._ahead)

    async def close(self) -> None:
        connection, self._socket = self._socket, None
        if connection is None:
            return
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        for waiter in (self._reading, self._writing):
            if waiter is not None and not waiter.done():
                waiter.set_exception(_closed())
        connection.close()

    def _live(self) -> socket.socket:
        if self._socket is None:
            raise _closed()
        return self._socket

    async def _yield(self) -> None:
        """Yield to the event loop from time to time, even if the socket never blocks."""
        self._calls += 1
        if self._calls >= _CALLS_IN_A_ROW:
            self._calls = 0
            await asyncio.sleep(0)

    async def _wait_to_read(self) -> None:
        self._calls = 0
        self._live()
        self._reading = self._loop.create_future()
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._fd, self._readable)
        try:
            await self._reading
        finally:
            self._reading = None

    def _readable(self) -> None:
        if self._reading is None:  # no pending receive; `_wait_to_read` watches again
            self._watched = False
            self._loop.remove_reader(self._fd)
        elif not self._reading.done():
            try:
                if self._at_once is None or not self._goes_on(self._at_once):
                    self._reading.set_result(None)
            except Exception as error:  # the waiting task raises it
                if not self._reading.done():
                    self._reading.set_exception(error)

    def _goes_on(self, at_once: Callable[[], bool]) -> bool:
        """Receive, and call `at_once`; whether the waiting task is to wait for more."""
        try:
            self._receive_ahead()
        except (BlockingIOError, InterruptedError):
            return True
        self._ended = not at_once()
        return not self._ended

    async def _wait_to_write(self) -> None:
        self._calls = 0
        self._live()
        self._writing = self._loop.create_future()
        self._loop.add_writer(self._fd, self._writable)
        try:
            await self._writing
        finally:
            self._writing = None
            if self._socket is not None:
                self._loop.remove_writer(self._fd)

    def _writable(self) -> None:
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)


def _closed() -> ConnectionError:
    return ConnectionAbortedError(errno.ECONNABORTED, "The connection was closed on this side.")


class SocketCarrier(Carrier):
    """TCP sockets."""

    name = "socket"
    library = "socket"

    async def connect(self, address: str) -> SocketChannel:
        parts = Address.parse(address)
        if parts.carrier != self.name:
            raise TransportError(f"Address {address!r} was received; expected socket://<host>:<port>.")
        loop = asyncio.get_running_loop()
        try:  # a number needs no thread, of which none begins at the interpreter's end
            found = socket.getaddrinfo(
                parts.host, parts.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except socket.gaierror:
            found = await loop.getaddrinfo(parts.host, parts.port, type=socket.SOCK_STREAM)
        last: OSError = OSError(errno.EADDRNOTAVAIL, f"{parts.host} has no address")
        for kind, type_, protocol, _, place in found:
            connection = socket.socket(kind, type_, protocol)
            try:
                connection.setblocking(False)
                await loop.sock_connect(connection, place)
                if connection.getsockname() == connection.getpeername():
                    raise ConnectionRefusedError(
                        errno.ECONNREFUSED, "No listener at this address (the socket connected to itself)."
                    )
                return await self._channel(connection, parts.host)
            except OSError as error:
                connection.close()
                last = error
            except BaseException:
                connection.close()
                raise
        raise last

    async def _channel(self, connection: socket.socket, host: str | None) -> SocketChannel:
        """The channel of a connected socket; `host` is the server's for a client, None for a server."""
        return SocketChannel(connection)

    async def listen(
        self,
        host: str,
        port: int,
        serve: Callable[[Channel], Awaitable[None]],
        room: Callable[[], Awaitable[None]] = always,
    ) -> Listener:
        async def begin(connection: socket.socket) -> None:
            try:
                channel = await self._channel(connection, None)
            except OSError:  # closed already
                connection.close()
                return
            await serve(channel)

        sockets = await listening_sockets(host, port)
        name, number = sockets[0].getsockname()[:2]
        return Listener(sockets, str(Address(self.name, name, number)), begin, room)
