"""Connections that have not proven the secret yet: at most a number of them, the oldest of which give way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Hashable

from gear_loader.transport.loop import within

_FIRST = 0.1  # seconds that a handshake is assumed to take before one has been measured
_TIMES = 4.0  # a connection may take so many times as long as recent handshakes took
_LEAST = 0.1  # seconds that each may take


class Unauthenticated:
    """The connections of a server before authentication. All methods run in one event loop.

    Beyond `most`, a new connection takes the place of the oldest, if that has had several times as long as handshakes
    take at present. Until then new connections wait in the kernel's queue (`room`): so silent connections give way
    soon, and many clients that connect at once do not displace each other, however slow the loop is.

    Args:
        most: connections at a time.
        longest: seconds after which a connection is closed in any case.
    """

    def __init__(self, most: int, longest: float) -> None:
        self._most = most
        self._longest = longest
        self._since: dict[Hashable, tuple[float, asyncio.Task[None] | None]] = {}  # oldest first
        self._usual = _FIRST  # moving average of the seconds of handshakes
        self._left = asyncio.Event()
        self.displaced = 0
        """Number of connections that were closed for newer ones."""

    @property
    def patience(self) -> float:
        """Seconds that a connection keeps its place in any case."""
        return min(self._longest, max(_LEAST, _TIMES * self._usual))

    async def room(self) -> None:
        """Wait until a new connection may be accepted."""
        while self.trim(self._most - 1):
            self._left.clear()
            since, _ = next(iter(self._since.values()))
            with contextlib.suppress(asyncio.TimeoutError):
                await within(since + self.patience - time.monotonic(), self._left.wait())

    def trim(self, count: int | None = None) -> bool:
        """Cancel the tasks of the oldest connections beyond `count` (by default the limit) whose time is over.

        Returns:
            Whether there are still more: those whose time is not over.
        """
        most = self._most if count is None else count
        while len(self._since) > most:
            oldest, (since, task) = next(iter(self._since.items()))
            if time.monotonic() < since + self.patience:
                return True
            del self._since[oldest]
            self.displaced += 1
            if task is not None:
                task.cancel()
        return False

    def add(self, connection: Hashable) -> None:
        """Add a connection, which the current task serves."""
        self._since[connection] = time.monotonic(), asyncio.current_task()

    def authenticated(self, connection: Hashable) -> None:
        """Remove a connection that has proven the secret."""
        if connection in self._since:
            self._usual += (time.monotonic() - self._since[connection][0] - self._usual) / 8
            self.remove(connection)

    def remove(self, connection: Hashable) -> None:
        """Remove a connection that has ended, if it is there."""
        if self._since.pop(connection, None) is not None:
            self._left.set()
