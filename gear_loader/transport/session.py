"""One connection to a server after its handshake: sends requests and receives their answers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import GearError, TransportError
from gear_loader.transport.answers import MOST_ERROR, receive_answer, receive_part, receive_refusal
from gear_loader.transport.channel import Channel
from gear_loader.transport.loop import within
from gear_loader.transport.request import Request
from gear_loader.transport.wire import HEADER, Header, Kind, Limits, ProtocolError, failure, send

if TYPE_CHECKING:
    from gear_loader.transport.spec import PackedSpec, WindowSpec

__all__ = ["FAREWELL", "Session", "os_error_text"]

FAREWELL = 0.5  # seconds for the BYE message


class Session:
    """One connection after its handshake.

    Args:
        peer: name and address of the server in errors. channel: the connection. limits: of the server.
        waiting: queue of requests, shared with the `Link`.
    """

    def __init__(
        self, peer: str, channel: Channel, limits: Limits, waiting: collections.deque[Request[Any]]
    ) -> None:
        self._peer = peer
        self._channel = channel
        self._limits = limits
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._asleep: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._pending: dict[int, Request[Any]] = {}
        self._opening: dict[int, int] = {}  # request -> number of the spec
        self._specs: dict[WindowSpec | PackedSpec, int] = {}  # least recently used first
        self._next = 1
        self._kept: list[Request[Any]] = []
        self._is_sending = False

    @property
    def is_open(self) -> bool:
        """Whether the session accepts requests."""
        return not self._over.done()

    def wake(self) -> None:
        """Wake the sending task: the queue has a request."""
        if self._asleep is not None and not self._asleep.done():
            self._asleep.set_result(None)

    def abort(self, why: str) -> None:
        """End the session; all requests in flight fail with the reason `why`."""
        if not self._over.done():
            self._over.set_exception(ConnectionAbortedError(why))

    async def run(self) -> None:
        """Send and receive until the connection ends; then fail the requests in flight."""
        tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._receive())]
        try:
            done, _ = await asyncio.wait([*tasks, self._over], return_when=asyncio.FIRST_COMPLETED)
            # An error reported by the server is more useful than the end of the connection.
            errors = sorted(
                (each.exception() for each in done), key=lambda error: not isinstance(error, GearError)
            )
            why = _reason(errors[0])
        except BaseException:
            why = "the connection was closed"
            raise
        finally:
            self.abort(why)
            self._over.exception()
            for task in tasks:
                task.cancel()
            self._kept = list(self._pending.values())
            self._pending.clear()
            for request in self._kept:
                request.end(
                    TransportError(
                        f"{self._peer} was asked for {request.what}, and then {why}. Its server may have been stopped, "
                        "killed or restarted: the next request reconnects."
                    )
                )
            await asyncio.gather(*tasks, return_exceptions=True)

    async def send_bye(self) -> None:
        """Send BYE, so that the server does not log a lost connection."""
        if self._is_sending or not self.is_open:
            return
        self._is_sending = True
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await within(FAREWELL, send(self._channel, Kind.BYE, 0))

    async def close(self) -> None:
        """Close the channel; buffers that it may write into are kept until then."""
        try:
            await self._channel.close()
        finally:
            self._kept.clear()

    # ---------------------------------------------------------------- sending

    async def _send(self) -> None:
        while True:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.future.done():
                    self._is_sending = True
                    await self._send_one(request)
                    self._is_sending = False
            self._asleep = self._loop.create_future()
            await self._asleep

    async def _send_one(self, request: Request[Any]) -> None:
        why = None if request.check is None else request.check(self._limits)
        if why is not None:
            request.end(failure(TransportError(f"{why}."), f"{self._peer} was asked for {request.what}"))
            return
        if request.answer is None:
            await self._send_only(request)
            return
        number = self._register(request)
        if request.spec is not None:
            opened = self._specs.pop(request.spec, None)
            if opened is None:
                opened = await self._open(request.spec)
            self._specs[request.spec] = opened
            request.small[:4] = np.frombuffer(opened.to_bytes(4, "little"), dtype=np.uint8)  # type: ignore[index]
        bulk = () if request.bulk is None else (request.bulk,)
        await send(self._channel, request.kind, number, request.small, *bulk)

    async def _send_only(self, request: Request[Any]) -> None:
        """Send a message that has no answer."""
        bulk = () if request.bulk is None else (request.bulk,)
        self._next += 1
        try:
            await send(self._channel, request.kind, self._next - 1, request.small, *bulk)
        except BaseException as error:
            request.end(
                TransportError(f"{self._peer}: {request.what} was not sent ({type(error).__name__}).")
            )
            raise
        request.end(received=memoryview(b""))

    def _register(self, request: Request[Any]) -> int:
        number, self._next = self._next, self._next + 1
        self._pending[number] = request
        return number

    async def _open(self, spec: WindowSpec | PackedSpec) -> int:
        """Send OPEN without waiting for the answer. If the server refuses the spec, it also refuses its fetches."""
        if len(self._specs) < self._limits.specs:
            number = min(set(range(len(self._specs) + 1)) - set(self._specs.values()))
        else:  # replace the least recently used one
            number = self._specs.pop(next(iter(self._specs)))
        request, self._next = self._next, self._next + 1
        self._opening[request] = number
        await send(self._channel, Kind.OPEN, request, number.to_bytes(4, "little") + spec.to_bytes())
        return number

    # ---------------------------------------------------------------- receiving

    async def _receive(self) -> None:
        head = memoryview(bytearray(HEADER))
        while True:
            await self._channel.recv_into(head)
            header = Header.parse(head)
            if header.kind is Kind.REFUSE:
                raise await receive_refusal(self._channel, header)
            if header.request in self._opening:
                await self._opened(header)
            else:
                await self._answered(header)

    async def _opened(self, header: Header) -> None:
        number = self._opening[header.request]
        if header.kind is Kind.OPENED:
            small = await receive_part(self._channel, header, 4)
            if int.from_bytes(small, "little") != number:
                raise ProtocolError(
                    f"A message OPENED has another number than {number}, which was asked for."
                )
        elif header.kind is Kind.ERROR:
            await receive_part(self._channel, header, MOST_ERROR)
            for spec in [spec for spec, used in self._specs.items() if used == number]:
                del self._specs[spec]
        else:
            raise ProtocolError(f"A message {header.kind.name} came; expected OPENED or ERROR.")
        del self._opening[header.request]

    async def _answered(self, header: Header) -> None:
        request = self._pending.get(header.request)
        if request is None:
            raise ProtocolError(
                f"A message {header.kind.name} answers a request {header.request} that was not made."
            )
        error, received = await receive_answer(self._channel, header, request, self._peer)
        del self._pending[header.request]
        request.end(error, received)


def _reason(error: BaseException | None) -> str:
    """Why a connection ended, as a clause for errors."""
    if isinstance(error, GearError):
        return str(error).rstrip(".")
    if isinstance(error, ConnectionAbortedError) and error.errno is None:
        return str(error)
    if isinstance(error, OSError):
        return f"the connection was lost ({os_error_text(error)})"
    return f"the connection failed ({type(error).__name__}: {error})"


def os_error_text(error: OSError) -> str:
    """Text of a system error, without the prefix that asyncio adds."""
    known = isinstance(error, ConnectionRefusedError) and error.errno is not None
    return os.strerror(error.errno) if known and error.errno else (error.strerror or str(error)).rstrip(".")
