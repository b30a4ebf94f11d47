"""The event loop of a process: one daemon thread that runs all connections."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gear_loader.utils.mutex import Future, new_mutex, uninterrupted

_T = TypeVar("_T")
_guard = new_mutex()
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
        self._is_started = False

    def begin(self) -> None:
        """Start the thread, unless it has been started; an interrupted call is to be repeated."""
        if not self._is_started:
            uninterrupted(self._start_thread)

    def _start_thread(self) -> None:
        self._thread.start()
        self._is_started = True

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
        """Start a coroutine in the loop; returns its future, which cancels it."""
        future: Future[_T] = Future()

        def ended(task: asyncio.Task[_T]) -> None:
            if task.cancelled():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                error = task.exception()
                future.set_result(task.result()) if error is None else future.set_exception(error)

        def begin() -> None:
            task = self.loop.create_task(work)
            task.add_done_callback(ended)
            future.add_done_callback(lambda each: self.soon(task.cancel) if each.cancelled() else None)

        self.soon(begin)
        return future

    def run(self, work: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
        """Run a coroutine in the loop and wait for its result. Not to be called from the loop's thread.

        Raises:
            concurrent.futures.TimeoutError: no result within `timeout` seconds; the coroutine is cancelled.
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
        _current.begin()
        return _current


async def within(seconds: float, work: Awaitable[_T]) -> _T:
    """Wait for a coroutine or a future, for so many seconds at most; then it is cancelled.

    As `asyncio.wait_for`, but a cancellation of the caller always ends it: before Python 3.12 `wait_for` returns the
    result instead if both come at the same time, and the task that was cancelled goes on.

    Raises:
        asyncio.TimeoutError: it has not ended in time.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # it counts as seen
        raise
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


def _at_end() -> None:
    if _current is not None:
        _current.stop()


# The newest finalizer runs first: those of connections, made later, still have the loop. An atexit handler would run
# before all of them.
weakref.finalize(EventLoop, _at_end)


def _after_fork() -> None:
    global _guard
    _guard = new_mutex()


os.register_at_fork(after_in_child=_after_fork)
