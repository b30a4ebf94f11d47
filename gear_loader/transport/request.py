"""A request of a peer, from its submission to its result."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from gear_loader.errors import TransportError
from gear_loader.transport.channel import Bytes
from gear_loader.transport.wire import Kind, Limits
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import Future

if TYPE_CHECKING:
    from gear_loader.transport.spec import PackedSpec, WindowSpec

__all__ = ["Request"]

_T = TypeVar("_T")


@dataclasses.dataclass(eq=False)
class Request(Generic[_T]):
    """One request.

    Attributes:
        kind, small: the message. A session fills in the first 4 bytes of `small` of a FETCH.
        answer: kind of the answer; None for a message without one, whose result comes when it is sent.
        finish: converts the received part into the result: the small part, or the bulk part if that has no `out`.
        what: returns the description of the request in errors.
        bulk: the bulk part in pieces. bulk_bytes: bytes of these.
        spec: the spec that must be opened first, or None.
        out: buffer of the answer's bulk part, of its exact size.
        small_bytes: most bytes of the answer's small part.
        check: returns why the server would refuse the request, or None.
        seconds: until its deadline.
        future: of the result. timer: of the deadline, in an event loop.
    """

    kind: Kind
    small: Array | bytes
    answer: Kind | None
    finish: Callable[[memoryview], _T]
    what: Callable[[], str]
    seconds: float
    bulk: Sequence[Bytes | bytes] = ()
    bulk_bytes: int = 0
    spec: WindowSpec | PackedSpec | None = None
    out: Array | None = None
    small_bytes: int = 0
    check: Callable[[Limits], str | None] | None = None
    future: Future[_T] = dataclasses.field(default_factory=Future)
    timer: asyncio.TimerHandle | None = None

    def end(self, error: TransportError | None = None, received: memoryview | None = None) -> None:
        """Set the result or the error of the future, unless it has one."""
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
