"""The client's side of one connection after its handshake: which bytes are sent, and what received bytes mean.

It does no input or output itself. `DirectLink` moves the bytes in the threads that ask, `LoopLink` in the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import GearError, PeerTimeoutError, TransportError
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.channel import Bytes
from gear_loader.transport.request import Request
from gear_loader.transport.wire import (
    HEADER,
    MAX_TEXT,
    Fields,
    Header,
    Kind,
    Limits,
    ProtocolError,
    failure,
    pack_header,
    printable,
    read_error,
)

if TYPE_CHECKING:
    from gear_loader.transport.spec import AnySpec

_MOST_ERROR = 4 + MAX_TEXT
_MOST_DESCRIBED = 1 << 26
_AHEAD = 1 << 10  # bytes of memory for what follows a header, where the next answer has no buffer


class Session:
    """Requests of one connection, and their answers.

    Args:
        peer: name and address of the server in errors. limits: of the server.

    Attributes:
        pending: requests without a complete answer by their numbers, the oldest first.
        unanswered: bytes of their messages.
        missing: memory of what is missing of the answer that is being received; empty between two of them.
    """

    def __init__(self, peer: str, limits: Limits) -> None:
        self.pending: dict[int, Request[Any]] = {}
        self.unanswered = 0
        self._peer = peer
        self._limits = limits
        self._number = 0
        self._specs: dict[AnySpec, int] = {}  # least recently used first
        self._memory = memoryview(bytearray(HEADER + _AHEAD))
        self._head, self._spare = self._memory[:HEADER], self._memory[HEADER:]
        self._ahead = self._spare  # memory of the bytes behind the header that is being received
        self._got = 0  # bytes received of the next header
        self._header: Header | None = None  # of the message of which parts are missing
        self.missing: list[memoryview] = []  # what is missing of its parts
        self._received = memoryview(b"")  # its small part, or a bulk part without a buffer

    # ---------------------------------------------------------------- sending

    def refusal(self, request: Request[Any]) -> TransportError | None:
        """The error of a request that the server would refuse."""
        limits, out = self._limits, request.out
        size, most = (
            (request.bulk_bytes, limits.store_bytes) if out is None else (len(out), limits.reply_bytes)
        )
        if request.rows <= limits.rows and size <= most:
            return None
        verb = "takes" if out is None else "sends"
        why = f"the server {verb} at most {limits.rows:,} rows and {most:,} bytes at a time: ask for less at once."
        return failure(TransportError(why), f"{self._peer} was asked for {request.what()}")

    def messages(self, request: Request[Any]) -> list[tuple[Bytes | bytes, ...]]:
        """The messages of a request in their parts, to be sent in this order; from now on its answer is expected."""
        if request.spec is None:
            return [self._message(request)]
        parts: list[tuple[Bytes | bytes, ...]] = []
        number = self._specs.pop(request.spec, None)
        if number is None:
            opening = self._opening(request.spec, request.seconds)
            number = messages.OPENED.parse(opening.small[:4]).number
            parts.append(self._message(opening))
        self._specs[request.spec] = number
        request.small[:4] = np.frombuffer(number.to_bytes(4, "little"), dtype=np.uint8)  # type: ignore[index]
        return [*parts, self._message(request)]

    def _message(self, request: Request[Any]) -> tuple[Bytes | bytes, ...]:
        self._number += 1
        if request.answer is not None:
            self.pending[self._number] = request
            self.unanswered += len(request.small)
        head = pack_header(request.kind, self._number, len(request.small), request.bulk_bytes)
        return head, request.small, *request.bulk

    def _opening(self, spec: AnySpec, seconds: float) -> Request[None]:
        """OPEN of a spec. Nobody waits for its answer: if the server refuses it, it also refuses its fetches."""
        if len(self._specs) < self._limits.specs:
            number = min(set(range(len(self._specs) + 1)) - set(self._specs.values()))
        else:  # replace the least recently used one
            number = self._specs.pop(next(iter(self._specs)))

        def finish(small: memoryview) -> None:
            if messages.OPENED.parse(small).number != number:
                raise ProtocolError(
                    f"A message OPENED has another number than {number}, which was asked for."
                )

        return Request(
            kind=Kind.OPEN,
            small=messages.OPEN.pack(number=number, spec=spec.to_bytes()),
            answer=Kind.OPENED,
            finish=finish,
            what=lambda: f"windows of table {spec.table!r}",
            seconds=seconds,
            small_bytes=messages.OPENED.most(),
        )

    # ---------------------------------------------------------------- receiving

    def following(self) -> memoryview:
        """Memory for the next bytes of which it is sure that they come, and that no others follow."""
        if self.missing:
            return self.missing[0]
        self._ahead = self._spare
        return self._head[self._got :]

    def wanted(self) -> list[memoryview]:
        """Memory for the next bytes while nothing is `missing`: a header, and as much as there is of what follows it.

        What follows is in its place if the next answer is that of the oldest request, and is copied there otherwise.
        """
        out = next(iter(self.pending.values())).out if self.pending else None
        if out is None or not len(out):
            self._ahead = self._spare
            return [self._memory[self._got :]]
        self._ahead = out.data
        return [self._head[self._got :], self._ahead]

    def received(self, count: int) -> None:
        """Count bytes that were received into `wanted` or `following`; ends the request whose answer they complete.

        Raises:
            ProtocolError: they are no valid answer. TransportError: the server has refused the connection.
        """
        if self._header is not None:
            self._count(count)
            return
        more = count - (HEADER - self._got)
        if more < 0:
            self._got += count
            return
        self._got, ahead = 0, self._ahead
        header = Header.parse(self._head)
        request = self.pending.get(header.request)
        if request is not None and header.kind is request.answer and header.small + header.bulk == more:
            out = request.out  # the commonest case: the whole answer has come in one call
            if out is None and not header.bulk and more <= request.small_bytes:
                request.end(None, memoryview(bytes(ahead[:more])))
                self._forget(header.request)
                return
            if out is not None and out.data.obj is ahead.obj and not header.small and more == len(out):
                request.end(None, ahead[:0])
                self._forget(header.request)
                return
        self._begin(header)
        if not self.missing:
            self._count(0)
        if not more:
            return
        if self.missing and self.missing[0].obj is ahead.obj:
            self._count(more)  # they are in their place
        else:
            self._copy(bytes(ahead[:more]))

    def _copy(self, data: bytes) -> None:
        """Receive bytes that lie elsewhere."""
        at = 0
        while at < len(data):
            view = self.following()
            count = min(len(view), len(data) - at)
            view[:count] = data[at : at + count]
            at += count
            self.received(count)

    def _begin(self, header: Header) -> None:
        """Make room for the parts of a message."""
        kind, request = header.kind, self.pending.get(header.request)
        out: memoryview | None = None
        if kind is Kind.REFUSE:
            most, bulk = _MOST_ERROR, 0
        elif request is None:
            raise ProtocolError(
                f"A message {kind.name} answers a request {header.request} that was not made."
            )
        elif kind is Kind.ERROR:
            most, bulk = _MOST_ERROR, 0
        elif kind is not request.answer:
            raise ProtocolError(
                f"A message {kind.name} came; expected {request.answer and request.answer.name} or ERROR."
            )
        elif kind is Kind.DESCRIBED:
            most, bulk = 0, min(header.bulk, _MOST_DESCRIBED)
        else:
            out = None if request.out is None else request.out.data
            most, bulk = request.small_bytes, 0 if out is None else len(out)
        if header.small > most or header.bulk != bulk:
            raise ProtocolError(
                f"A message {kind.name} has parts of {header.small:,} and {header.bulk:,} bytes; expected at most "
                f"{most:,}, and {bulk:,}."
            )
        self._received = memoryview(bytearray(header.small if out is not None or not bulk else bulk))
        parts = (self._received[: header.small], self._received if out is None and bulk else out)
        self.missing = [part for part in parts if part is not None and len(part)]
        self._header = header

    def _count(self, count: int) -> None:
        missing = self.missing
        while missing and count >= len(missing[0]):
            count -= len(missing.pop(0))
        if missing:
            missing[0] = missing[0][count:]
            return
        header, self._header = self._header, None
        assert header is not None
        small = self._received
        if header.kind is Kind.REFUSE:
            text = Fields(small, Kind.REFUSE.name).text("The text")
            raise TransportError(f"the server closed the connection: {printable(text, MAX_TEXT)}")
        request = self.pending[header.request]
        error = None
        if header.kind is Kind.ERROR:
            error = failure(read_error(small), f"{self._peer} was asked for {request.what()}")
            if request.kind is Kind.OPEN:
                opened = messages.OPEN.parse(request.small).number
                self._specs = {spec: number for spec, number in self._specs.items() if number != opened}
        request.end(error, small)
        self._forget(header.request)

    def _forget(self, number: int) -> None:
        request = self.pending.pop(number, None)
        if request is not None:
            self.unanswered -= len(request.small)

    # ---------------------------------------------------------------- the end

    def withdraw(self, request: Request[Any]) -> None:
        """No longer expect the answer of a request, because the connection is to end."""
        for number in [number for number, each in self.pending.items() if each is request]:
            self._forget(number)

    def fail(self, error: Callable[[str, Request[Any]], TransportError]) -> None:
        """End all pending requests.

        Args:
            error: makes the error of a request, from the name of the server and the request.
        """
        while self.pending:
            number, request = next(iter(self.pending.items()))
            if not request.has_ended:
                request.end(error(self._peer, request))
            self._forget(number)


def lost(error: BaseException | str) -> Callable[[str, Request[Any]], TransportError]:
    """Errors for `Session.fail` of a connection that has ended.

    Args:
        error: of the connection; or a clause that says why it was closed.
    """
    if isinstance(error, str) or (isinstance(error, ConnectionAbortedError) and error.errno is None):
        why = str(error)
    elif isinstance(error, GearError):
        why = str(error).rstrip(".")
    elif isinstance(error, OSError):
        why = f"the connection was lost ({os_error_text(error)})"
    else:
        why = f"the connection failed ({type(error).__name__}: {error})"

    def make(peer: str, request: Request[Any]) -> TransportError:
        return TransportError(
            f"{peer} was asked for {request.what()}, and then {why}. Its server may have been stopped, killed or "
            "restarted: the next request reconnects."
        )

    return make


def timed_out(peer: str, request: Request[Any]) -> PeerTimeoutError:
    """The error of a request whose answer did not come before its deadline; for `Session.fail`, too."""
    return PeerTimeoutError(
        f"{peer} was asked for {request.what()} and did not answer within {request.seconds:g} s. Its server may be "
        "stopped or overloaded, or the network cut; raise the timeout if it is only slow. The connection was closed."
    )


def os_error_text(error: OSError) -> str:
    """Text of a system error, without the prefix that asyncio adds."""
    known = isinstance(error, ConnectionRefusedError) and error.errno is not None
    return os.strerror(error.errno) if known and error.errno else (error.strerror or str(error)).rstrip(".")
