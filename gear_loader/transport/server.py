"""The server of a node: serves windows of its tables, and stores what others send, for those who know the secret."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gear_loader.errors import HandshakeError
from gear_loader.transport.capacity import told_room
from gear_loader.transport.channel import Channel, Listener, carrier
from gear_loader.transport.connection import Connection
from gear_loader.transport.handshake import answer, check_secret, refuse
from gear_loader.transport.served_tables import TableCache, warm_up
from gear_loader.transport.wire import Limits, ProtocolError, printable

__all__ = ["Server", "Threads"]

_T = TypeVar("_T")
_SWEEP = 1.0  # seconds between looks at who is stuck and which tables have gone
_LINGER = 1.0  # seconds that a refused requester has to take the reason
_LINGER_BYTES = 1 << 20  # that one who has not proven himself may send meanwhile
_LINES = 20  # of the log between two sweeps about connections that fail; of more only the number is told
_WRITERS = 4  # threads a table that store
_WAITERS = 4  # threads a table that may wait for its lock


class Threads:
    """Threads that work for the loop. At the end nobody waits for them."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[], _T]) -> _T:
        """The result of `work`. Who is cancelled meanwhile waits for it, because it may write into his memory."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()
            raise

    def close(self) -> None:
        """Take no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Server:
    """Serves tables. All but making it runs in one event loop.

    Args:
        tables: their names on this machine; no other is served. They are attached when first asked for.
        secret: what requesters must know.
        limits: most that is taken; see `Limits`.
        store_timeout: seconds that storing waits for room in a table.
        threads: that gather; by default as many as there are cores, 8 at most.

    Neither the event loop nor the threads that gather ever wait for a table's lock: what may wait for one runs in
    threads of that table, so that a lock that is held elsewhere delays nothing of other tables.

    Attributes:
        metadata: by name, what else it tells of a table to those who know the secret: called with the table's name,
            in a thread. "room" for those who place trajectories, and what carriers that read by themselves need.

    Raises:
        HandshakeError: an invalid secret. RegionError: a name that cannot be one of a table.
    """

    log = logging.getLogger("gear_loader.transport")

    def __init__(
        self,
        tables: Sequence[str],
        secret: bytes,
        *,
        limits: Limits | None = None,
        store_timeout: float = 10.0,
        threads: int | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.metadata: dict[str, Callable[[str], bytes]] = {}
        self._secret = check_secret(secret)
        self.shelf = TableCache(tables, store_timeout)
        self.metadata["room"] = lambda name: told_room(self.shelf.get(name).table)
        self.gatherers = Threads(threads or min(8, os.cpu_count() or 1), "gear-loader-gather")
        self._waiters = {name: Threads(_WAITERS, "gear-loader-wait") for name in tables}
        self._writers = {name: Threads(_WRITERS, "gear-loader-store") for name in tables}
        self._listeners: list[Listener] = []
        self._tasks: dict[Channel, asyncio.Task[None] | None] = {}  # of all connections
        self._unproven: dict[Channel, None] = {}  # the oldest first
        self._proven: dict[Channel, Connection | None] = {}  # None until the handshake is over
        self._lines = self._crowded_out = 0  # since the last sweep
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """Connections at the moment, those that have not proven themselves included."""
        return len(self._tasks)

    def waiters(self, table: str) -> Threads:
        """Threads for what may wait for this table's lock.

        Raises:
            RegionError: the table is not served.
        """
        self.shelf.check(table)
        return self._waiters[table]

    def writers(self, table: str) -> Threads:
        """Threads that store into this table, and wait for room in it.

        Raises:
            RegionError: the table is not served.
        """
        self.shelf.check(table)
        return self._writers[table]

    async def listen(self, name: str, host: str = "127.0.0.1", port: int = 0) -> str:
        """Accept connections.

        Args:
            name: of the carrier. host: an address or name of this machine. port: 0 for any that is free.

        Returns:
            The address, as `Peer` takes it.

        Raises:
            TransportError: there is no such carrier here. OSError: it cannot listen there.
        """
        if self._sweeper is None:
            await self.gatherers.run(warm_up)
            self._sweeper = asyncio.ensure_future(self._sweep())
        listener = await carrier(name).listen(host, port, lambda channel: self.serve(channel, name))
        self._listeners.append(listener)
        return listener.address

    async def serve(self, channel: Channel, name: str) -> None:
        """Serve one connection of the carrier `name` until it ends; closes the channel. Raises nothing."""
        connection: Connection | None = None
        self._crowd_out()
        self._tasks[channel] = asyncio.current_task()
        self._unproven[channel] = None
        try:
            proof = answer(channel, self._secret, name, self.limits, lambda: self._admit(channel))
            await asyncio.wait_for(proof, self.limits.handshake)
            connection = self._proven[channel] = Connection(channel, self)
            await connection.run()
        except (HandshakeError, ConnectionRefusedError) as error:
            self._say("refused", channel, str(error))
            await channel.linger(_LINGER, _LINGER_BYTES)
        except ProtocolError as error:
            self._say("closed", channel, str(error))
            if connection is None or not connection.is_cut:
                await self._refuse(channel, str(error))
        except asyncio.TimeoutError:
            self._say("closed", channel, f"it has not proven itself within {self.limits.handshake:g} s")
        except ConnectionError as error:
            self.log.debug("%s: %s", channel.peer, error)
        except asyncio.CancelledError:
            pass  # the server closes, or newer connections took its place
        except Exception as error:  # nothing that one connection does may end the others
            self.log.error("%s: %s", channel.peer, error, exc_info=error)
        finally:
            self._unproven.pop(channel, None)
            self._proven.pop(channel, None)
            self._tasks.pop(channel, None)
            with contextlib.suppress(Exception):
                await channel.close()

    def _crowd_out(self) -> None:
        """Make room for one more unproven connection: the oldest goes."""
        while len(self._unproven) >= self.limits.unproven:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            self._crowded_out += 1
            task = self._tasks[oldest]
            if task is not None:
                task.cancel()

    def _admit(self, channel: Channel) -> str:
        """Count a connection as proven; or why it has to come again later."""
        if len(self._proven) >= self.limits.connections:
            return f"it serves {self.limits.connections} connections, as many as it takes at a time."
        self._unproven.pop(channel, None)
        self._proven[channel] = None
        return ""

    def _say(self, what: str, channel: Channel, why: str) -> None:
        self._lines += 1
        if self._lines <= _LINES:
            self.log.warning("%s %s: %s", what, channel.peer or "a connection", printable(why))

    async def _refuse(self, channel: Channel, why: str) -> None:
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await asyncio.wait_for(refuse(channel, why), _LINGER)
            await channel.linger(_LINGER)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP)
            self._sum_up()
            for channel, connection in list(self._proven.items()):
                if connection is None:
                    continue
                if connection.is_stuck(loop.time()):
                    self._say("closed", channel, f"nothing came or went for {self.limits.patience:g} s")
                    await channel.close()
                connection.release()
            for name in await self.gatherers.run(self.shelf.sweep):  # unmapping a large table takes a while
                self.log.info("let go of table %r: it has been removed", name)

    def _sum_up(self) -> None:
        """Log what was not logged line by line: a flood of connections is no flood of lines."""
        if self._crowded_out:
            self.log.warning(
                "closed %d connections: more than %d at a time had not proven themselves",
                self._crowded_out,
                self.limits.unproven,
            )
        if self._lines > _LINES:
            self.log.warning("refused or closed %d more connections", self._lines - _LINES)
        self._lines = self._crowded_out = 0

    async def close(self) -> None:
        """Accept no more connections and cut those that there are; idempotent."""
        for listener in self._listeners:
            await listener.close()
        self._listeners.clear()
        tasks = [
            task for task in self._tasks.values() if task is not None and task is not asyncio.current_task()
        ]
        if self._sweeper is not None:
            self._sweeper.cancel()
            tasks.append(self._sweeper)
            self._sweeper = None
        for channel in list(self._tasks):
            await channel.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for threads in (self.gatherers, *self._waiters.values(), *self._writers.values()):
            threads.close()
        self.shelf.close()
