"""Listening TCP sockets and the tasks that accept their connections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable

from gear_loader.transport.channel import Listener

__all__ = ["TcpListener", "listening_sockets"]

_BACKLOG = 4096  # connections that the kernel queues until they are accepted, if net.core.somaxconn allows
_IN_A_ROW = 8  # accepted connections before other tasks of the event loop take their turn


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


class TcpListener(Listener):
    """Accepts the connections of listening sockets.

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
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for each in self._sockets:
            each.close()
