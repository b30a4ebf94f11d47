"""Waiting with back-off and a deadline, interruptible by another thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_local = threading.local()


class Interrupted(BaseException):
    """The wait was cancelled; raised only inside `interruptible`."""


def interruptible(stop: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
    """Make waits of this thread inside the block raise `Interrupted` once `stop()` returns True."""
    return _set("stop", stop)


def limited(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Make waits that this thread begins inside the block end after at most so many seconds."""
    return _set("limit", seconds)


@contextlib.contextmanager
def _set(name: str, value: object) -> Iterator[None]:
    """Give this thread's waits a value inside the block."""
    before = getattr(_local, name, None)
    setattr(_local, name, value)
    try:
        yield
    finally:
        setattr(_local, name, before)


class Backoff:
    """One wait with exponential back-off, until a deadline.

    Args:
        timeout: seconds from now to the deadline; fewer inside `limited`.
        shortest, longest: seconds of the first sleep and of the longest ones.
    """

    def __init__(self, timeout: float, *, shortest: float = 20e-6, longest: float = 2e-3) -> None:
        limit = getattr(_local, "limit", None)
        timeout = timeout if limit is None else min(timeout, limit)
        self.timeout = timeout
        self._began = time.monotonic_ns()
        self._deadline = time.monotonic() + timeout
        self._pause, self._longest = shortest, longest

    @property
    def waited(self) -> int:
        """Nanoseconds since the wait began."""
        return time.monotonic_ns() - self._began

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def sleep(self) -> bool:
        """Sleep; return False without sleeping if the deadline has passed.

        Raises:
            Interrupted: see `interruptible`.
        """
        stop = getattr(_local, "stop", None)
        if stop is not None and stop():
            raise Interrupted
        if time.monotonic() >= self._deadline:
            return False
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, self._longest)
        return True
