"""The event loop of a process: one daemon thread that runs all connections."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["EventLoop", "event_loop"]

_T = TypeVar("_T")
_guard = threading.Lock()
_current: EventLoop | None = None


class EventLoop:
    """A thread that runs an asyncio loop. It does not survive a fork: `event_loop` starts another in the child.

    Attributes:
        pid: process id of its process.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gear-loader-transport", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Schedule a call in the loop's thread.

        Raises:
            RuntimeError: the process is ending.
        """
        self.loop.call_soon_threadsafe(call, *args)

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine in the loop; returns its future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
        """Run a coroutine in the loop and wait for its result. Not to be called from the loop's thread.

        Raises:
            TimeoutError: no result within `timeout` seconds; the coroutine is cancelled.
        """
        future = self.start(work)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop and its thread at the end of the process."""
        if self.pid != os.getpid() or self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self.loop.close()


def event_loop() -> EventLoop:
    """The loop of this process, started by the first call."""
    global _current
    with _guard:
        if _current is None or _current.pid != os.getpid():
            _current = EventLoop()
            # The newest finalizer runs first: those of connections, made later, still have the loop. An atexit handler
            # would run before all of them.
            weakref.finalize(_current, _current.stop)
        return _current


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
