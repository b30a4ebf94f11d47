"""The connection to one server: connects, reconnects after a failure, and keeps the deadlines of requests."""

from __future__ import annotations

import asyncio
import collections
import ssl
from collections.abc import Callable
from typing import Any

from gear_loader.errors import PeerTimeoutError, TransportError
from gear_loader.transport.channel import Address, Channel, carrier
from gear_loader.transport.handshake import check_library, introduce
from gear_loader.transport.loop import within
from gear_loader.transport.request import Request
from gear_loader.transport.session import FAREWELL, Session, os_error_text
from gear_loader.transport.wire import Limits

__all__ = ["Link"]

_SHORTEST, _LONGEST = 0.02, 0.25  # seconds between attempts to connect
_CLOSED = "the peer was closed."


class Link:
    """The connection of a `Peer`, which has the same arguments. All methods run in the event loop."""

    def __init__(
        self,
        name: str,
        address: str | Callable[[], str],
        secret: bytes,
        timeout: float,
        loop: asyncio.AbstractEventLoop,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._name = name
        self._address = address
        self._secret = secret
        self._timeout = timeout
        self._loop = loop
        self._tls = tls
        self._where = address if isinstance(address, str) else "not connected yet"
        self._waiting: collections.deque[Request[Any]] = collections.deque()
        self._task: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._last: str = ""
        self._closing: set[asyncio.Task[None]] = set()  # sessions
        self._is_closed = False

    def submit(self, request: Request[Any]) -> None:
        """Queue a request and start its deadline; connect if necessary."""
        seconds = self._timeout if request.seconds is None else request.seconds
        request.timer = self._loop.call_later(seconds, self._expired, request)
        self._waiting.append(request)
        if self._is_closed:
            self._fail_waiting(TransportError(_CLOSED))
        elif self._session is not None and self._session.is_open:
            self._session.wake()
        elif self._task is None:
            self._task = self._loop.create_task(self._run())

    @property
    def _peer(self) -> str:
        return f"{self._name} ({self._where})"

    def _expired(self, request: Request[Any]) -> None:
        if request.future.done():
            return
        seconds = self._timeout if request.seconds is None else request.seconds
        if request in self._waiting:
            self._waiting.remove(request)
            why = (
                f"it could not be reached ({self._last})"
                if self._last
                else "earlier requests were still being sent"
                if self._session is not None
                else "it did not answer the handshake"
            )
            request.end(
                PeerTimeoutError(
                    f"{self._peer} was asked for {request.what} and waited for {seconds:g} s: {why}. "
                    "Is its server running there? `gear-loader serve` starts one."
                )
            )
            return
        request.end(
            PeerTimeoutError(
                f"{self._peer} was asked for {request.what} and did not answer within {seconds:g} s. Its server "
                "may be stopped or overloaded, or the network cut; raise the timeout if it is only slow. The "
                "connection was closed."
            )
        )
        if self._session is not None:
            self._session.abort(
                f"the connection was closed, because {request.what} did not arrive within {seconds:g} s"
            )

    # ---------------------------------------------------------------- connecting

    async def _run(self) -> None:
        try:
            while self._waiting:
                try:
                    connected = await self._connect()
                except TransportError as error:
                    self._fail_waiting(error)
                    return
                if connected is None:
                    return
                self._session = Session(self._peer, *connected, self._waiting)
                try:
                    await self._session.run()
                finally:
                    session, self._session = self._session, None
                    self._close_session(session)
        except Exception as error:  # an internal error: no request may wait forever
            self._fail_waiting(TransportError(f"{self._peer}: {type(error).__name__}: {error}"))
            raise
        finally:
            self._task = None

    def _fail_waiting(self, error: TransportError) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            made = type(error)(f"{self._name} was asked for {request.what}: {error}")
            made.__cause__ = error
            request.end(made)

    def _close_session(self, session: Session) -> None:
        """Close a session in the background; buffers that its carrier may still write into are kept until then."""
        task = self._loop.create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _connect(self) -> tuple[Channel, Limits] | None:
        """Connect and perform the handshake; returns None when no request is waiting any more.

        Raises:
            HandshakeError: one side refused the other. TransportError: an error that a retry cannot fix.
        """
        pause = _SHORTEST
        attempt = max(
            self._timeout / 4, min(self._timeout, 2.0)
        )  # short enough to find a restarted server before the deadline
        self._last = ""
        while self._waiting:
            connecting = asyncio.ensure_future(self._attempt())
            try:
                return await within(attempt, connecting)
            except asyncio.CancelledError:
                if not connecting.cancelled() and connecting.exception() is None:
                    await connecting.result()[0].close()
                raise
            except TransportError:
                raise
            except asyncio.TimeoutError:
                self._last = f"{self._where} did not answer within {attempt:g} s"
            except OSError as error:
                self._last = f"{self._where}: {os_error_text(error)}"
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return None

    async def _attempt(self) -> tuple[Channel, Limits]:
        text = self._address
        if not isinstance(text, str):
            try:
                text = await self._loop.run_in_executor(None, text)
            except Exception as error:
                raise TransportError(
                    f"its address could not be had ({type(error).__name__}: {error})"
                ) from error
        address = Address.parse(text)
        self._where = text
        by = carrier(address.carrier, self._tls)
        if address.library:
            check_library(by.library, address.library, peer=self._peer)
        channel = await by.connect(text)
        try:
            return channel, await introduce(channel, self._secret, address, peer=self._peer)
        except BaseException:
            await channel.close()
            raise

    async def close(self) -> None:
        """Fail all requests and disconnect, within seconds; may be called again, also after a call was cancelled."""
        self._is_closed = True
        error = TransportError(_CLOSED)
        self._fail_waiting(error)
        task, session = self._task, self._session
        if session is not None:
            await session.send_bye()
            session.abort("the peer was closed")
        elif task is not None:
            task.cancel()
        if task is not None:
            await asyncio.wait((task,), timeout=FAREWELL)
        self._fail_waiting(error)
        if self._closing:
            await asyncio.wait(self._closing, timeout=FAREWELL)
