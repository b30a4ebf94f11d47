"""The connection to one server, as it lives in the event loop: connects, sends what waits, receives what comes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import numpy as np

from gear_loader.errors import GearError, PeerTimeoutError, TransportError
from gear_loader.transport.channel import Address, Channel, carrier
from gear_loader.transport.handshake import check_library, introduce
from gear_loader.transport.spec import WindowSpec
from gear_loader.transport.wire import (
    HEADER,
    MAX_TEXT,
    Fields,
    Header,
    Kind,
    Limits,
    ProtocolError,
    failure,
    printable,
    read_error,
    send,
)
from gear_loader.utils.arrays import Array

__all__ = ["Link", "Request"]

_T = TypeVar("_T")

_SHORTEST, _LONGEST = 0.02, 0.25  # seconds between attempts to connect
_FAREWELL = 0.5  # seconds to say goodbye
_MOST_DESCRIBED = 1 << 26
_MOST_ERROR = 4 + MAX_TEXT


@dataclasses.dataclass(eq=False)
class Request(Generic[_T]):
    """One request.

    Attributes:
        kind, small, bulk: what is sent. Of FETCH, the first 4 bytes of `small` are written here.
        answer: kind of the answer; small_bytes: bytes of its small part.
        finish: makes the result, of what was received.
        what: how errors call what was asked.
        spec: what has to be opened first.
        out: where the bulk part of the answer goes, of exactly this size.
        check: why the server would refuse it, if it would.
    """

    kind: Kind
    small: Array | bytes
    answer: Kind
    finish: Callable[[memoryview], _T]
    what: str
    bulk: Array | None = None
    spec: WindowSpec | None = None
    out: Array | None = None
    small_bytes: int = 0
    check: Callable[[Limits], str | None] | None = None
    future: Future[_T] = dataclasses.field(default_factory=Future)
    timer: asyncio.TimerHandle | None = None

    def end(self, error: TransportError | None = None, received: memoryview | None = None) -> None:
        """Give the result, or the error; what ended before stays as it is."""
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
            return
        try:
            assert received is not None
            result = self.finish(received)
        except Exception as wrong:
            self.future.set_exception(wrong)
            raise
        self.future.set_result(result)


class Link:
    """See `gear_loader.transport.client.Peer`, which has the same arguments. Everything here runs in the loop."""

    def __init__(
        self,
        name: str,
        address: str | Callable[[], str],
        secret: bytes,
        timeout: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._name = name
        self._address = address
        self._secret = secret
        self._timeout = timeout
        self._loop = loop
        self._where = address if isinstance(address, str) else "not connected yet"
        self._waiting: collections.deque[Request[Any]] = collections.deque()
        self._task: asyncio.Task[None] | None = None
        self._session: _Session | None = None
        self._last: str = ""
        self._farewells: set[asyncio.Task[None]] = set()

    def ask(self, request: Request[Any]) -> None:
        """Send a request as soon as possible."""
        request.timer = self._loop.call_later(self._timeout, self._expired, request)
        self._waiting.append(request)
        if self._session is not None and self._session.is_open:
            self._session.wake()
        elif self._task is None:
            self._task = self._loop.create_task(self._run())

    @property
    def _peer(self) -> str:
        return f"{self._name} ({self._where})"

    def _expired(self, request: Request[Any]) -> None:
        if request.future.done():
            return
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
                    f"{self._peer} was asked for {request.what} and waited for {self._timeout:g} s: {why}. "
                    "Is its server running there? `gear-loader serve` starts one."
                )
            )
            return
        request.end(
            PeerTimeoutError(
                f"{self._peer} was asked for {request.what} and did not answer within {self._timeout:g} s. Its server "
                "may be stopped or overloaded, or the network cut; raise the timeout if it is only slow. The "
                "connection was given up."
            )
        )
        if self._session is not None:
            self._session.give_up(
                f"the connection was given up, because {request.what} did not come within {self._timeout:g} s"
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
                self._session = _Session(self._peer, *connected, self._waiting)
                try:
                    await self._session.run()
                finally:
                    session, self._session = self._session, None
                    self._part(session)
        except Exception as error:  # a bug of ours: nobody may wait for ever
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

    def _part(self, session: _Session) -> None:
        """Close a session's channel; what its carrier may still write into is kept until then."""
        task = self._loop.create_task(session.close())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _connect(self) -> tuple[Channel, Limits] | None:
        """A connection that both sides have proven themselves on; None when nobody waits for it any more.

        Raises:
            HandshakeError: the server refuses, or is refused. TransportError: there is no way to connect.
        """
        pause = _SHORTEST
        attempt = max(
            self._timeout / 4, min(self._timeout, 2.0)
        )  # so that a restarted server is found in time
        self._last = ""
        while self._waiting:
            try:
                return await asyncio.wait_for(self._attempt(), attempt)
            except TransportError:
                raise
            except asyncio.TimeoutError:
                self._last = f"{self._where} did not answer within {attempt:g} s"
            except OSError as error:
                self._last = f"{self._where}: {_said(error)}"
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
        by = carrier(address.carrier)
        if address.library:
            check_library(by.library, address.library, peer=self._peer)
        channel = await by.connect(text)
        try:
            return channel, await introduce(channel, self._secret, address, peer=self._peer)
        except BaseException:
            await channel.close()
            raise

    async def close(self) -> None:
        """End everything that waits with an error, and disconnect."""
        error = TransportError("the peer was closed.")
        self._fail_waiting(error)
        task, session = self._task, self._session
        if session is not None:
            await session.say_goodbye()
            session.give_up("the peer was closed")
        elif task is not None:
            task.cancel()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        self._fail_waiting(error)
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=_FAREWELL)


class _Session:
    """One connection from the end of its handshake on."""

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
        self._specs: dict[WindowSpec, int] = {}  # the one used last at the end
        self._next = 1
        self._kept: list[Request[Any]] = []
        self._is_sending = False

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return not self._over.done()

    def wake(self) -> None:
        """There is something waiting."""
        if self._asleep is not None and not self._asleep.done():
            self._asleep.set_result(None)

    def give_up(self, why: str) -> None:
        """End it: all that has been sent fails."""
        if not self._over.done():
            self._over.set_exception(ConnectionAbortedError(why))

    async def run(self) -> None:
        """Send and receive until the connection is gone. Then what was under way has failed."""
        tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._receive())]
        try:
            done, _ = await asyncio.wait([*tasks, self._over], return_when=asyncio.FIRST_COMPLETED)
            # What the server said is worth more than that it is gone.
            errors = sorted(
                (each.exception() for each in done), key=lambda error: not isinstance(error, GearError)
            )
            why = _reason(errors[0])
        except BaseException:
            why = "the connection was given up"
            raise
        finally:
            self.give_up(why)
            self._over.exception()
            for task in tasks:
                task.cancel()
            self._kept = list(self._pending.values())
            self._pending.clear()
            for request in self._kept:
                request.end(
                    TransportError(
                        f"{self._peer} was asked for {request.what}, and then {why}. Its server may have been stopped, "
                        "killed or restarted: the next request connects anew."
                    )
                )
            await asyncio.gather(*tasks, return_exceptions=True)

    async def say_goodbye(self) -> None:
        """Tell the server that this was no accident."""
        if self._is_sending or not self.is_open:
            return
        self._is_sending = True
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(send(self._channel, Kind.BYE, 0), _FAREWELL)

    async def close(self) -> None:
        """Close the channel; until it is closed, all that it may write into is kept."""
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
            request.end(TransportError(f"{self._peer} was asked for {request.what}, but {why}."))
            return
        number = self._enter(request)
        if request.spec is not None:
            opened = self._specs.pop(request.spec, None)
            if opened is None:
                opened = await self._open(request.spec)
            self._specs[request.spec] = opened
            request.small[:4] = np.frombuffer(opened.to_bytes(4, "little"), dtype=np.uint8)  # type: ignore[index]
        bulk = () if request.bulk is None else (request.bulk,)
        await send(self._channel, request.kind, number, request.small, *bulk)

    def _enter(self, request: Request[Any]) -> int:
        number, self._next = self._next, self._next + 1
        self._pending[number] = request
        return number

    async def _open(self, spec: WindowSpec) -> int:
        """Open a spec without waiting for the answer: should it be refused, so is what is asked of it."""
        if len(self._specs) < self._limits.specs:
            number = min(set(range(len(self._specs) + 1)) - set(self._specs.values()))
        else:  # the one that was not used for longest
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
                small = await self._small(header, _MOST_ERROR)
                text = Fields(small, Kind.REFUSE.name).text("The text")
                raise TransportError(f"the server closed the connection: {printable(text, MAX_TEXT)}")
            if header.request in self._opening:
                await self._opened(header)
            else:
                await self._answered(header)

    async def _small(self, header: Header, most: int, bulk: int = 0) -> memoryview:
        if header.small > most or header.bulk != bulk:
            raise ProtocolError(
                f"A message {header.kind.name} has parts of {header.small:,} and {header.bulk:,} bytes; expected at "
                f"most {most:,}, and {bulk:,}."
            )
        small = memoryview(bytearray(header.small))
        if header.small:
            await self._channel.recv_into(small)
        return small

    async def _opened(self, header: Header) -> None:
        number = self._opening[header.request]
        if header.kind is Kind.OPENED:
            small = await self._small(header, 4)
            if int.from_bytes(small, "little") != number:
                raise ProtocolError(
                    f"A message OPENED has another number than {number}, which was asked for."
                )
        elif header.kind is Kind.ERROR:
            await self._small(header, _MOST_ERROR)
            for spec in [spec for spec, used in self._specs.items() if used == number]:
                del self._specs[spec]
        else:
            raise ProtocolError(f"A message {header.kind.name} came; expected OPENED or ERROR.")
        del self._opening[header.request]

    async def _answered(self, header: Header) -> None:
        request = self._pending.get(header.request)
        if request is None:
            raise ProtocolError(
                f"A message {header.kind.name} answers a request {header.request} that nobody made."
            )
        if header.kind is Kind.ERROR:
            error = read_error(await self._small(header, _MOST_ERROR))
            del self._pending[header.request]
            request.end(failure(error, f"{self._peer} was asked for {request.what}"))
            return
        if header.kind is not request.answer:
            raise ProtocolError(
                f"A message {header.kind.name} came; expected {request.answer.name} or ERROR."
            )
        if request.answer is Kind.DESCRIBED:
            received = await self._described(header)
        else:
            out = request.out
            received = await self._small(header, request.small_bytes, 0 if out is None else len(out))
            if out is not None and len(out):
                await self._channel.recv_into(out)
        del self._pending[header.request]
        request.end(received=received)

    async def _described(self, header: Header) -> memoryview:
        if header.small or header.bulk > _MOST_DESCRIBED:
            raise ProtocolError(
                f"A message DESCRIBED has {header.bulk:,} bytes; expected at most {_MOST_DESCRIBED:,}."
            )
        received = memoryview(bytearray(header.bulk))
        if header.bulk:
            await self._channel.recv_into(received)
        return received


def _reason(error: BaseException | None) -> str:
    """Why a connection has ended, as part of a sentence."""
    if isinstance(error, GearError):
        return str(error).rstrip(".")
    if isinstance(error, ConnectionAbortedError) and error.errno is None:
        return str(error)
    if isinstance(error, OSError):
        return f"the connection was lost ({_said(error)})"
    return f"the connection failed ({type(error).__name__}: {error})"


def _said(error: OSError) -> str:
    """What the system says of it; of asyncio's own errors, what is behind them."""
    known = isinstance(error, ConnectionRefusedError) and error.errno is not None
    return os.strerror(error.errno) if known and error.errno else (error.strerror or str(error)).rstrip(".")
