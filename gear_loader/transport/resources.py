"""What the requests of all connections of a server share, each with a limit: memory, threads, and the tables."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from gear_loader.transport.access import Allow, check_allow
from gear_loader.transport.capacity import capacity_report
from gear_loader.transport.change_messages import Part
from gear_loader.transport.learners import Learners
from gear_loader.transport.mapped_batches import MappedMemory
from gear_loader.transport.message_schema import ALIGNMENT
from gear_loader.transport.table_cache import TableCache
from gear_loader.transport.table_report import table_report
from gear_loader.transport.wire import Limits
from gear_loader.utils.arrays import Array, data_address

_T = TypeVar("_T")
_SPARE = 1 << 25  # bytes of memory of requests that are kept for later ones
_WRITERS = 4  # threads for each table that change it
_WAITERS = 4  # threads for each table that may wait for its lock
_TOGETHER = 0.01  # seconds within which two connections count as busy at the same time


class Threads:
    """A thread pool for the event loop, not joined at the end."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread. A cancelled call waits for its end, because it may write into the caller's memory."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()
            raise

    def close(self) -> None:
        """Reject further work and cancel queued work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


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
        if count and (self._waiting or not self._fits(count)):
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


def aligned(size: int) -> Array:
    """New memory of `size` bytes that begins at a multiple of `ALIGNMENT`, uint8 [size]."""
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -data_address(memory) % ALIGNMENT
    return memory[start : start + size]


class SpareMemory:
    """Buffers of ended requests for later ones: the kernel clears each page of new memory. Not thread-safe.

    Args:
        most: bytes that are kept at most.

    Attributes:
        held: bytes that are kept.
    """

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most
        self._free: list[Array] = []  # the latest last: a cache is more likely to hold it

    def take(self, size: int) -> Array:
        """A buffer of at least `size` bytes, and at most four times as many, aligned to `ALIGNMENT`."""
        for i in reversed(range(len(self._free))):
            if size <= len(self._free[i]) <= 4 * size:
                buffer = self._free.pop(i)
                self.held -= len(buffer)
                return buffer
        step = 1 << max(0, size.bit_length() - 4)  # some room, for the next request is about as large
        return aligned(-(-size // step) * step)

    def give(self, buffer: Array) -> None:
        """Keep a buffer of `take` that nothing refers to any longer; the oldest make room for it."""
        if len(buffer) > self._most:
            return
        while self.held + len(buffer) > self._most:
            self.held -= len(self._free.pop(0))
        self._free.append(buffer)
        self.held += len(buffer)


@dataclasses.dataclass
class _Open:
    """Parts of one trajectory: rows and data of each, bytes of all, and when the last came."""

    parts: list[tuple[int, Array]]
    size: int = 0
    since: float = 0.0


class OpenParts:
    """PART messages of open trajectories: those of a connection, or, as `held`, those of all.

    A trajectory of which a part does not follow the one before, or that does not fit into the limits, is forgotten:
    its client sends it again as a whole when it is committed.

    Attributes:
        size: bytes of all parts.
    """

    def __init__(self, limits: Limits, held: OpenParts | None = None) -> None:
        self.size = 0
        self._held = held
        self._limits = limits
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def fits(self, part: Part, bulk: int) -> bool:
        """Whether a part is to be kept; if not, its trajectory is forgotten."""
        entry = self._open.get(part.id)
        fits = part.number == (0 if entry is None else len(entry.parts))
        fits = fits and self.size + bulk <= self._limits.open_bytes
        fits = fits and (self._held is None or self._held.size + bulk <= self._limits.all_open_bytes)
        fits = fits and (entry is not None or len(self._open) < self._limits.open_trajectories)
        if not fits:
            self.take(part.id)
        return fits

    def add(self, part: Part, data: Array) -> None:
        """Keep a part, after `fits`."""
        entry = self._open.setdefault(part.id, _Open([]))
        entry.parts.append((part.rows, data))
        entry.size += len(data)
        entry.since = time.monotonic()
        self._count(len(data))

    def take(self, identity: int) -> list[tuple[int, Array]]:
        """The parts of a trajectory, rows and data of each, which are forgotten; none if there are none."""
        entry = self._open.pop(identity, None)
        if entry is None:
            return []
        self._count(-entry.size)
        return entry.parts

    def _count(self, size: int) -> None:
        self.size += size
        if self._held is not None:
            self._held.size += size

    def clear(self) -> None:
        """Forget all."""
        for identity in list(self._open):
            self.take(identity)

    def expire(self) -> None:
        """Forget trajectories that have got no part for `Limits.open_seconds`."""
        now = time.monotonic()
        for identity in [i for i, each in self._open.items() if now - each.since > self._limits.open_seconds]:
            self.take(identity)


class Resources:
    """What the connections of a server share. Belongs to one event loop.

    Args:
        names: of the tables. limits, allow, store_timeout, threads: as for `Server`.

    Attributes:
        limits, allow: as given. tables: the attached tables.
        metadata: functions by name, called in a thread with a table's name, that return bytes for METADATA: "capacity",
            the capacity report, "table", the schema and statistics; one-sided carriers add their own.
        budget: of the memory of bulk parts that are received or used. spare_memory: for them.
        open_parts: counts the PART messages of all connections.
        gatherers: threads for what waits for nothing.
        learners: those that draw here.
    """

    def __init__(
        self, names: Sequence[str], limits: Limits, allow: Allow, store_timeout: float, threads: int | None
    ) -> None:
        self.limits, self.allow = limits, check_allow(allow)
        self.tables = tables = TableCache(names, store_timeout)
        self.metadata: dict[str, Callable[[str], bytes]] = {
            "capacity": lambda name: capacity_report(tables.open(name).table),
            "table": lambda name: table_report(tables.open(name).table, self.allow),
        }
        self.budget = ByteBudget(limits.total_bytes)
        self.spare_memory = SpareMemory(min(_SPARE, limits.total_bytes // 4))
        self.open_parts = OpenParts(limits)
        self.learners = Learners(limits)
        self.files = MappedMemory()
        self.gatherers = Threads(threads or min(8, os.cpu_count() or 1), "gear-loader-gather")
        self._waiters = {name: Threads(_WAITERS, "gear-loader-wait") for name in names}
        self._writers = {name: Threads(_WRITERS, "gear-loader-store") for name in names}
        self._reader = 0  # identity of the connection that has asked for many rows last
        self._together = float("-inf")  # when two have done so in turn

    def threads(self, table: str, *, changes: bool) -> Threads:
        """Threads of a table, for calls that may wait for its lock, or for space in it if they change it.

        Raises:
            RegionError: the table is not served.
        """
        self.tables.check(table)
        return (self._writers if changes else self._waiters)[table]

    def is_alone(self, connection: object, now: float) -> bool:
        """Whether a connection that asks for many rows is the only one that does at present."""
        if self._reader not in (0, id(connection)):
            self._together = now
        self._reader = id(connection)
        return now - self._together > _TOGETHER

    def close(self) -> None:
        """End the threads and detach the tables."""
        for threads in (self.gatherers, *self._waiters.values(), *self._writers.values()):
            threads.close()
        self.learners.sweep(keep=False)
        self.tables.close()
