"""A connection of a learner, used by one thread with blocking calls."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gear_loader.transport.channel import Bytes, Channel, as_bytes, drop_sent
from gear_loader.transport.socket import GONE, MOST_PARTS

AHEAD = 1 << 18
"""Bytes of the buffer for what is small."""
_JOINED = 1 << 16  # most bytes that are copied into one piece: one call with one piece takes less


class Pipe:
    """A socket.

    Args:
        connection: nothing else uses it. seconds: of each of its calls. idle: called when they have passed without
            progress; raises an error to give up.
        ahead: bytes that were received before.
    """

    def __init__(
        self,
        connection: socket.socket,
        seconds: float,
        idle: Callable[[], None],
        ahead: bytes | memoryview = b"",
    ) -> None:
        self.connection = connection
        self._apart = not isinstance(connection, ssl.SSLSocket)
        if self._apart:  # Python's own timeouts take a second call of the system each
            connection.setblocking(True)
            wait = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, wait)
        else:
            connection.settimeout(seconds)
        self._idle = idle
        self._buffer = memoryview(bytearray(max(AHEAD, len(ahead))))
        self._buffer[: len(ahead)] = ahead
        self._begin, self._end = 0, len(ahead)

    @property
    def is_local(self) -> bool:
        """Whether both sides have one address; see `Channel`."""
        here, there = self.connection.getsockname(), self.connection.getpeername()
        return bool(here[0] == there[0])

    def has_ended(self) -> bool:
        """Whether the other side has closed the connection; what it has sent before may not be received yet."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)  # and errors
        return bool(poll.poll(0))

    def receive(self, view: memoryview) -> None:
        """Receive exactly these bytes, and others ahead if they are few."""
        while len(view):
            if self._begin == self._end:
                direct = len(view) >= AHEAD
                count = self._receive_some(view if direct else self._buffer)
                if direct:
                    view = view[count:]
                    continue
                self._begin, self._end = 0, count
            count = min(self._end - self._begin, len(view))
            view[:count] = self._buffer[self._begin : self._begin + count]
            self._begin += count
            view = view[count:]

    def _receive_some(self, view: memoryview) -> int:
        while True:
            try:
                count = self.connection.recv_into(view)
            except (BlockingIOError, TimeoutError):
                self._idle()
                continue
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, GONE)
            return count

    def send(self, parts: Sequence[Bytes | bytes]) -> None:
        """Send bytes, whose memory may be used again after the return."""
        if len(parts) > 1 and sum(map(len, map(as_bytes, parts))) <= _JOINED:
            parts = [b"".join(parts)]  # type: ignore[arg-type]
        views = [as_bytes(part) for part in parts if len(part)]
        while views:
            try:
                some = views[:MOST_PARTS]
                sent = self.connection.sendmsg(some) if self._apart else self.connection.send(some[0])
            except (BlockingIOError, TimeoutError):
                self._idle()
                continue
            drop_sent(views, sent)

    def drain(self, seconds: float, reader: threading.Thread | None) -> None:
        """Send no more, and drop what comes until the other side has closed the connection, for `seconds` at most.

        A connection that is closed before all has been received is reset: the other side loses what was sent last.

        Args:
            reader: a thread that receives until then.
        """
        if not self._apart:  # TLS does not end one direction alone
            return
        deadline = time.monotonic() + seconds
        self.connection.shutdown(socket.SHUT_WR)
        if reader is not None:
            reader.join(seconds)
            return
        while time.monotonic() < deadline and self.connection.recv_into(self._buffer):
            pass

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class LoopPipe(Pipe):
    """A channel whose calls an event loop makes, for carriers that a thread cannot use itself.

    Args:
        channel, loop: of the connection.
    """

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel, self._loop = channel, loop

    def has_ended(self) -> bool:
        return False  # not known before a call of the channel

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def receive(self, view: memoryview) -> None:
        if len(view):
            self._run(self._channel.recv_into(view))

    def send(self, parts: Sequence[Bytes | bytes]) -> None:
        self._run(self._channel.send(*(part for part in map(as_bytes, parts) if len(part))))

    def drain(self, seconds: float, reader: threading.Thread | None) -> None:
        pass  # the channel's owner ends it

    def close(self) -> None:
        pass  # the server closes the channel
