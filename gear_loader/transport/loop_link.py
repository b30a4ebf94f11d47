"""A connection that the event loop uses, of any carrier: reconnects after a failure, and keeps deadlines."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ssl
from collections.abc import Callable
from typing import Any

from gear_loader.errors import GearError, PeerTimeoutError, TransportError
from gear_loader.transport.channel import Address, Channel, as_bytes, carrier
from gear_loader.transport.handshake import check_library, introduce
from gear_loader.transport.loop import within
from gear_loader.transport.request import Request
from gear_loader.transport.session import Session, lost, os_error_text, timed_out
from gear_loader.transport.wire import Kind, Limits, send

_SHORTEST, _LONGEST = 0.02, 0.25  # seconds between attempts to connect
_FAREWELL = 0.5  # seconds for the BYE message
_CLOSED = "the peer was closed."


class LoopLink:
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
        self._conversation: _Conversation | None = None
        self._last: str = ""
        self._closing: set[asyncio.Task[None]] = set()  # conversations
        self._is_closed = False

    def submit(self, request: Request[Any]) -> None:
        """Queue a request and start its deadline; connect if necessary."""
        request.timer = self._loop.call_later(request.seconds, self._expired, request)
        self._waiting.append(request)
        if self._is_closed:
            self._fail_waiting(TransportError(_CLOSED))
        elif self._conversation is not None and self._conversation.is_open:
            self._conversation.wake()
        elif self._task is None:
            self._task = self._loop.create_task(self._run())

    @property
    def _peer(self) -> str:
        return f"{self._name} ({self._where})"

    def _expired(self, request: Request[Any]) -> None:
        if request.has_ended:
            return
        if request in self._waiting:
            self._waiting.remove(request)
            why = (
                f"it could not be reached ({self._last})"
                if self._last
                else "earlier requests were still being sent"
                if self._conversation is not None
                else "it did not answer the handshake"
            )
            request.end(
                PeerTimeoutError(
                    f"{self._peer} was asked for {request.what()} and waited for {request.seconds:g} s: {why}. "
                    "Is its server running there? `gear-loader serve` starts one."
                )
            )
            return
        request.end(timed_out(self._peer, request))
        if self._conversation is not None:
            self._conversation.abort(
                f"the connection was closed, because {request.what()} did not arrive within {request.seconds:g} s"
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
                channel, limits = connected
                session = Session(self._peer, limits)
                self._conversation = _Conversation(self._peer, channel, session, self._waiting)
                try:
                    await self._conversation.run()
                finally:
                    conversation, self._conversation = self._conversation, None
                    self._close(conversation)
        except Exception as error:  # an internal error: no request may wait forever
            self._fail_waiting(TransportError(f"{self._peer}: {type(error).__name__}: {error}"))
            raise
        finally:
            self._task = None

    def _fail_waiting(self, error: TransportError) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            made = type(error)(f"{self._name} was asked for {request.what()}: {error}")
            made.__cause__ = error
            request.end(made)

    def _close(self, conversation: _Conversation) -> None:
        """Close it in the background; buffers that its carrier may still write into are kept until then."""
        task = self._loop.create_task(conversation.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _connect(self) -> tuple[Channel, Limits] | None:
        """Connect and perform the handshake; returns None when no request is waiting any more.

        Raises:
            HandshakeError: one side refused the other. TransportError: an error that a retry cannot fix.
        """
        pause = _SHORTEST
        # Short enough to find a restarted server before the deadline.
        attempt = max(self._timeout / 4, min(self._timeout, 2.0))
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
            except ConnectionRefusedError:  # it has none now: a server that is being started again
                raise
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
        task, conversation = self._task, self._conversation
        if conversation is not None:
            await conversation.send_bye()
            conversation.abort("the peer was closed")
        elif task is not None:
            task.cancel()
        if task is not None:
            await asyncio.wait((task,), timeout=_FAREWELL)
        self._fail_waiting(error)
        if self._closing:
            await asyncio.wait(self._closing, timeout=_FAREWELL)


class _Conversation:
    """One connection after its handshake: two tasks that send the messages of its session, and receive into it.

    Args:
        peer: name and address of the server in errors. channel: the connection. session: its requests.
        waiting: queue of requests, shared with the `LoopLink`.
    """

    def __init__(
        self, peer: str, channel: Channel, session: Session, waiting: collections.deque[Request[Any]]
    ) -> None:
        self._peer = peer
        self._channel = channel
        self._session = session
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._asleep: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._kept: list[Request[Any]] = []
        self._is_sending = False

    @property
    def is_open(self) -> bool:
        """Whether it accepts requests."""
        return not self._over.done()

    def wake(self) -> None:
        """Wake the sending task: the queue has a request."""
        if self._asleep is not None and not self._asleep.done():
            self._asleep.set_result(None)

    def abort(self, why: str) -> None:
        """End it; all requests in flight fail with the reason `why`."""
        if not self._over.done():
            self._over.set_exception(ConnectionAbortedError(why))

    async def run(self) -> None:
        """Send and receive until the connection ends; then fail the requests in flight."""
        tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._receive())]
        why: BaseException | str = "the connection was closed"
        try:
            done, _ = await asyncio.wait([*tasks, self._over], return_when=asyncio.FIRST_COMPLETED)
            # An error reported by the server is more useful than the end of the connection.
            errors = sorted(
                (each.exception() for each in done), key=lambda error: not isinstance(error, GearError)
            )
            why = errors[0] or why
        finally:
            self.abort("the connection was closed")
            self._over.exception()
            for task in tasks:
                task.cancel()
            self._kept = list(self._session.pending.values())
            self._session.fail(lost(why))
            await asyncio.gather(*tasks, return_exceptions=True)

    async def send_bye(self) -> None:
        """Send BYE, so that the server does not log a lost connection."""
        if self._is_sending or not self.is_open:
            return
        self._is_sending = True
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await within(_FAREWELL, send(self._channel, Kind.BYE, 0))

    async def close(self) -> None:
        """Close the channel; buffers that it may write into are kept until then."""
        try:
            await self._channel.close()
        finally:
            self._kept.clear()

    async def _send(self) -> None:
        while True:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.has_ended:
                    self._is_sending = True
                    await self._send_one(request)
                    self._is_sending = False
            self._asleep = self._loop.create_future()
            await self._asleep

    async def _send_one(self, request: Request[Any]) -> None:
        refused = self._session.refusal(request)
        if refused is not None:
            request.end(refused)
            return
        try:
            for parts in self._session.messages(request):
                views = [as_bytes(part) for part in parts]
                await self._channel.send(*(view for view in views if len(view)))
        except BaseException as error:
            if request.answer is None:
                why = type(error).__name__
                request.end(TransportError(f"{self._peer}: {request.what()} was not sent ({why})."))
            raise
        if request.answer is None:
            request.end(received=memoryview(b""))

    async def _receive(self) -> None:
        while True:
            view = self._session.following()
            await self._channel.recv_into(view)
            self._session.received(len(view))
