"""Waiting for others: with a deadline, and so that another thread can end it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Backoff", "Interrupted", "interruptible"]

_LONGEST = 2e-3
_local = threading.local()


class Interrupted(BaseException):
    """What was waited for is no longer wanted; raised only inside `interruptible`."""


@contextlib.contextmanager
def interruptible(stop: Callable[[], bool]) -> Iterator[None]:
    """Whatever waits in this thread, inside of this, gives up by raising `Interrupted` once `stop()` is true."""
    before = getattr(_local, "stop", None)
    _local.stop = stop
    try:
        yield
    finally:
        _local.stop = before


class Backoff:
    """One wait: short sleeps that become longer, until a deadline.

    Args:
        timeout: seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._began = time.monotonic_ns()
        self._deadline = time.monotonic() + timeout
        self._pause = 20e-6

    @property
    def waited(self) -> int:
        """Nanoseconds since it began."""
        return time.monotonic_ns() - self._began

    def sleep(self) -> bool:
        """Sleep a little; False, without having slept, if the deadline has passed."""
        stop = getattr(_local, "stop", None)
        if stop is not None and stop():
            raise Interrupted
        if time.monotonic() >= self._deadline:
            return False
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _LONGEST)
        return True
