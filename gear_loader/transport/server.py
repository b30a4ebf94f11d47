"""The server of a node: serves windows of its tables and stores trajectories for authenticated requesters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Sequence

from gear_loader.errors import HandshakeError
from gear_loader.transport.access import Allow
from gear_loader.transport.channel import Channel, Listener, carrier
from gear_loader.transport.connection import Connection
from gear_loader.transport.handshake import answer, check_secret, refuse
from gear_loader.transport.loop import within
from gear_loader.transport.queries import warm_up
from gear_loader.transport.resources import Resources
from gear_loader.transport.unauthenticated import Unauthenticated
from gear_loader.transport.wire import Limits, ProtocolError, printable

_SWEEP = 1.0  # seconds between checks for stalled connections and removed tables
_LINGER = 1.0  # seconds for a refused requester to receive the reason
_LINGER_BYTES = 1 << 20  # bytes that an unauthenticated requester may send during that time
_LINES = 20  # log lines about failed connections between two sweeps; further ones are only counted


class Server:
    """Serves tables of this machine. All methods run in one event loop.

    The event loop and the gather threads never wait for a table's lock. Calls that may wait run in threads of that
    table, so a held lock does not delay requests for other tables.

    Args:
        tables: names of the tables to serve. Each is attached by the first request for it.
        secret: shared secret of the requesters.
        limits: see `Limits`.
        store_timeout: seconds that a store waits for free space in a table.
        threads: number of gather threads; by default the number of cores, at most 8.
        allow: "read" refuses requests that change a table, "write" those for rows.
        tls: context of a server, to encrypt all connections; with the carrier "socket" only.

    Attributes:
        resources: what all connections share.

    Raises:
        HandshakeError: invalid secret. RegionError: invalid table name. TransportError: invalid `allow`.
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
        allow: Allow = "all",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._secret = check_secret(secret)
        self._limits = limits or Limits()
        self.resources = Resources(tables, self._limits, allow, store_timeout, threads)
        self._tls = tls
        self._listeners: list[Listener] = []
        self._tasks: dict[Channel, asyncio.Task[None] | None] = {}  # of all connections
        self._unproven = Unauthenticated(self._limits.unproven, self._limits.handshake)
        self._proven: dict[Channel, Connection | None] = {}  # None until the handshake is over
        self._lines = 0  # since the last sweep
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """Number of open connections, authenticated or not."""
        return len(self._tasks)

    async def listen(self, name: str, host: str = "127.0.0.1", port: int = 0) -> str:
        """Accept connections.

        Args:
            name: of the carrier. host: address or name of this machine. port: port number, or 0 for a free port.

        Returns:
            The address for `Peer`.

        Raises:
            TransportError: the carrier cannot be used here. OSError: it cannot listen at this address.
        """
        if self._sweeper is None:
            await self.resources.gatherers.run(warm_up)
            self._sweeper = asyncio.ensure_future(self._sweep())
        listener = await carrier(name, self._tls).listen(
            host, port, lambda channel: self.serve(channel, name), self._unproven.room
        )
        self._listeners.append(listener)
        return listener.address

    async def serve(self, channel: Channel, name: str) -> None:
        """Serve one connection of the carrier `name` until it ends, and close its channel. Raises no exception."""
        connection: Connection | None = None
        self._tasks[channel] = asyncio.current_task()
        self._unproven.add(channel)
        try:
            proof = answer(channel, self._secret, name, self._limits, lambda: self._admit(channel))
            await within(self._limits.handshake, proof)
            connection = self._proven[channel] = Connection(channel, self.resources)
            await connection.run()
        except (HandshakeError, ConnectionRefusedError) as error:
            self._log("refused", channel, str(error))
            await channel.linger(_LINGER, _LINGER_BYTES)
        except ProtocolError as error:
            self._log("closed", channel, str(error))
            if connection is None or not connection.is_sending:
                await self._refuse(channel, str(error))
        except asyncio.TimeoutError:
            self._log(
                "closed", channel, f"it did not complete the handshake within {self._limits.handshake:g} s"
            )
        except ConnectionError as error:
            self.log.debug("%s: %s", channel.peer, error)
        except asyncio.CancelledError:
            pass  # the server closes, or a newer connection took its place
        except Exception as error:  # an error of one connection must not affect others
            self.log.error("%s: %s", channel.peer, error, exc_info=error)
        finally:
            self._unproven.remove(channel)
            self._proven.pop(channel, None)
            self._tasks.pop(channel, None)
            with contextlib.suppress(Exception):
                await channel.close()

    def _admit(self, channel: Channel) -> str:
        """Count a connection as authenticated and return "", or return why the server is busy."""
        if len(self._proven) >= self._limits.connections:
            return f"it serves {self._limits.connections} connections, the most it accepts at a time."
        self._unproven.authenticated(channel)
        self._proven[channel] = None
        return ""

    def _log(self, what: str, channel: Channel, why: str) -> None:
        self._lines += 1
        if self._lines <= _LINES:
            self.log.warning("%s %s: %s", what, channel.peer or "a connection", printable(why))

    async def _refuse(self, channel: Channel, why: str) -> None:
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await within(_LINGER, refuse(channel, why))
            await channel.linger(_LINGER)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP)
            self._unproven.trim()
            self._sum_up()
            for channel, connection in list(self._proven.items()):
                if connection is None:
                    continue
                if connection.is_stalled(loop.time()):
                    self._log(
                        "closed", channel, f"a message made no progress for {self._limits.patience:g} s"
                    )
                    await channel.close()
                connection.release()
            await self.resources.gatherers.run(self.resources.learners.sweep)
            gone = await self.resources.gatherers.run(self.resources.tables.sweep)  # unmapping takes time
            for name in gone:
                self.log.info("detached table %r: it has been removed", name)

    def _sum_up(self) -> None:
        """Log the number of connections that were not logged individually."""
        displaced, self._unproven.displaced = self._unproven.displaced, 0
        if displaced:
            self.log.warning(
                "closed %d connections: more than %d at a time were not authenticated",
                displaced,
                self._limits.unproven,
            )
        if self._lines > _LINES:
            self.log.warning("refused or closed %d more connections", self._lines - _LINES)
        self._lines = 0

    async def close(self) -> None:
        """Accept no more connections and close all open ones; idempotent."""
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
        self.resources.close()
