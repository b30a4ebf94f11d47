"""What the clients of a server may do, and how much memory their requests may take."""

from __future__ import annotations

import asyncio
import collections
from typing import Any, Literal, cast

from gear_loader.errors import TransportError
from gear_loader.transport.wire import Kind
from gear_loader.utils.arrays import shown

__all__ = ["WRITES", "Allow", "ByteBudget", "check_allow", "refusal"]

Allow = Literal["all", "read", "write"]

WRITES = frozenset({Kind.ADVANCE, Kind.FILL, Kind.PART, Kind.STORE, Kind.UPDATE})
"""Requests that change a table."""
_READS = frozenset({Kind.OPEN, Kind.FETCH})
_REFUSED: dict[str, frozenset[Kind]] = {"all": frozenset(), "read": WRITES, "write": _READS}


def check_allow(allow: Any) -> Allow:
    """Check the option `allow` of a server and return it.

    Raises:
        TransportError: another value.
    """
    if not isinstance(allow, str) or allow not in _REFUSED:
        raise TransportError(f"allow is {shown(allow)}; expected 'all', 'read' or 'write'.")
    return cast(Allow, allow)


def refusal(allow: str, kind: Kind) -> str | None:
    """Why a server refuses a kind of request, for errors; None if it does not."""
    if kind not in _REFUSED[allow]:
        return None
    one, other = ("read", "written to") if allow == "read" else ("written to", "read")
    return (
        f"The server lets its tables be {one}, and not {other}: it was started with allow={allow!r}. Nothing was "
        f"changed. Start it with allow='all'."
    )


class ByteBudget:
    """Bytes that the requests of all connections may take together; in order of arrival. Not thread-safe.

    Args:
        most: bytes. A single larger request is let in when no other holds any.

    Attributes:
        held: bytes that are taken.
    """

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may be taken, and take them."""
        if self.take_now(count):
            return
        granted = asyncio.get_running_loop().create_future()
        entry = count, granted
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give(count)
            else:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                self._admit()
            raise

    def take_now(self, count: int) -> bool:
        """Take `count` more bytes, if that needs no wait; return whether it did."""
        if self._waiting or not self._fits(count):
            return False
        self.held += count
        return True

    def give(self, count: int) -> None:
        """Give back bytes that were taken."""
        self.held -= count
        self._admit()

    def _fits(self, count: int) -> bool:
        return self.held == 0 or self.held + count <= self._most

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            count, granted = self._waiting.popleft()
            if not granted.done():
                self.held += count
                granted.set_result(None)
