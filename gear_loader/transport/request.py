"""A request of a peer, from its submission to its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from gear_loader.errors import TransportError
from gear_loader.transport.channel import Bytes
from gear_loader.transport.wire import Kind
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import Future

if TYPE_CHECKING:
    from gear_loader.transport.spec import AnySpec

_T = TypeVar("_T")
_Result = TypeVar("_Result", covariant=True)


class Answer(Protocol[_Result]):
    """What a `Peer` returns: a future, or a request whose answer is received by the thread that asks for it."""

    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""

    def result(self, timeout: float | None = None) -> _Result:
        """The result. Raises the error of the request; TimeoutError after `timeout` seconds."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the request, or None. Raises TimeoutError after `timeout` seconds."""


@dataclasses.dataclass(eq=False, slots=True)
class Request(Generic[_T]):
    """One request; an `Answer` once `receive` is known.

    Attributes:
        kind, small: the message. A session fills in the first 4 bytes of `small` of a FETCH.
        answer: kind of the answer; None for a message without one, whose result comes when it is sent.
        finish: converts the received part into the result: the small part, or the bulk part if that has no `out`.
        what: returns the description of the request in errors.
        bulk: the bulk part in pieces. bulk_bytes: bytes of these.
        spec: the spec that must be opened first, or None.
        out: buffer of the answer's bulk part, of its exact size.
        small_bytes: most bytes of the answer's small part.
        rows: number of rows that it asks for, or brings.
        seconds: until its deadline.
        future: gets the result, if somebody waits for it. timer: of the deadline, in an event loop.
        receive: receives answers until this one has come, or for so many seconds.
        has_ended: whether there is a result or an error.
    """

    kind: Kind
    small: Array | bytes
    answer: Kind | None
    finish: Callable[[memoryview], _T]
    what: Callable[[], str]
    seconds: float
    bulk: Sequence[Bytes | bytes] = ()
    bulk_bytes: int = 0
    spec: AnySpec | None = None
    out: Array | None = None
    small_bytes: int = 0
    rows: int = 0
    future: Future[_T] | None = None
    timer: asyncio.TimerHandle | None = None
    receive: Callable[[Request[Any], float | None], None] | None = None
    has_ended: bool = False
    _value: Any = None
    _error: BaseException | None = None

    def end(self, error: TransportError | None = None, received: memoryview | None = None) -> None:
        """Set the result or the error, unless there is one."""
        if self.timer is not None:
            self.timer.cancel()
        if self.has_ended:
            return
        try:
            if error is None:
                assert received is not None
                self._value = self.finish(received)
            self._error = error
        except Exception as wrong:
            self._error = wrong
            raise
        finally:
            self.has_ended = True
            if self.future is not None:
                if self._error is not None:
                    self.future.set_exception(self._error)
                else:
                    self.future.set_result(self._value)

    def done(self) -> bool:
        return self.has_ended

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.has_ended:
            assert self.receive is not None
            self.receive(self, timeout)
            if not self.has_ended:
                raise concurrent.futures.TimeoutError
        return self._error

    def result(self, timeout: float | None = None) -> _T:
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # the error refers to this frame
        value: _T = self._value
        return value
