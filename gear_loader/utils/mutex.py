"""Mutexes that stay usable after an exception at any bytecode, and calls that signals cannot interrupt."""

from __future__ import annotations

import _thread
import collections
import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

_RLock: Any = _thread.RLock
_CHECK_INTERVAL = 0.1  # seconds between checks while waiting for a thread
_LONGEST_WAIT = 1.0  # seconds until a waiting thread looks whether a notification was interrupted
_mutexes: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_mutex() -> Any:
    """Create a mutex for the threads of one process, registered for `holds_any`. Not to be acquired recursively."""
    mutex = threading.RLock()
    _mutexes[id(mutex)] = mutex
    return mutex


def holds_any() -> bool:
    """Whether this thread holds a table's lock or a mutex of `new_mutex`, so it must not wait for other threads."""
    for reference in _mutexes.valuerefs():
        mutex = reference()
        if mutex is not None and mutex._is_owned():
            return True
    return False


class Condition(_RLock):  # type: ignore[misc]
    """As `threading.Condition`, for threads that a signal handler may interrupt by an exception.

    ``with`` takes and gives back a lock in C, between which and the block Python raises nothing; `threading.Condition`
    does so in functions of Python, and an exception in one of them leaves its lock held for ever.
    """

    def __init__(self) -> None:
        self._waiters: collections.deque[Any] = collections.deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock back until `notify_all`, for `timeout` seconds at most; returns whether it came.

        An exception of a caller of `notify_all` may have come before it: wait with a timeout, and look again.
        """
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        state: Any = (1, _thread.get_ident())
        try:
            try:
                state = self._release_save()
                seconds = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
                return waiter.acquire(timeout=seconds)
            finally:
                if not self._is_owned():
                    self._acquire_restore(state)
        finally:
            if not self._is_owned():  # the line above was interrupted
                self._acquire_restore(state)
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake all threads that wait."""
        while self._waiters:
            waiter = self._waiters[0]
            with contextlib.suppress(RuntimeError):  # it was released already, before an interrupt
                waiter.release()
            if self._waiters and self._waiters[0] is waiter:
                self._waiters.popleft()


class Event:
    """As `threading.Event`, for threads that a signal handler may interrupt and for finalisers; see `Condition`."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        """Whether `set` has been called."""
        return self._is_set

    def set(self) -> None:
        """Wake all threads that wait; those of a call that was interrupted wake up within a second."""
        self._is_set = True
        with self._condition:
            self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`, for `timeout` seconds at most; returns whether it has been called."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_set and (left := end - time.monotonic()) > 0:
            with self._condition:
                if not self._is_set:
                    self._condition.wait(min(left, _LONGEST_WAIT))
        return self._is_set


class Future(concurrent.futures.Future[_T]):
    """A future for which a thread that a signal handler may interrupt can wait; see `Condition`."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


def run_alone(mutex: Any, section: Callable[[], _T], timeout: float = 0.0) -> _T | None:
    """Call `section` while holding an RLock; if this thread holds it, or cannot have it, return None without calling.

    As with `IndexLock.run`, an exception at any bytecode leaves the mutex free.

    Args:
        mutex: as `new_mutex` makes it. timeout: seconds to wait for another thread; -1 for any time.
    """
    owned = mutex._is_owned
    if owned():
        return None
    try:
        try:
            return section() if mutex.acquire(timeout=timeout) else None
        finally:
            if owned():
                mutex.release()
    finally:
        if owned():  # the release above was interrupted
            mutex.release()


def uninterrupted(section: Callable[[], object]) -> None:
    """Call `section` completely or not at all; exceptions of signal handlers are raised afterwards.

    Python runs signal handlers only in the main thread, so a call from there runs in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        section()
        return
    # Only primitives in C: an exception inside a `threading.Event` would leave it broken.
    turn: list[bool] = [True]
    finished: list[bool] = []
    failures: list[BaseException] = []
    ended = _thread.allocate_lock()
    ended.acquire()

    def work() -> None:
        try:
            if _takes(turn):
                section()
        except BaseException as error:
            failures.append(error)
        finally:
            finished.append(True)
            ended.release()

    try:
        _thread.start_new_thread(work, ())
        while not finished:
            ended.acquire(timeout=_CHECK_INTERVAL)
    except BaseException:
        if not _takes(turn):  # the section has begun
            while not finished:
                with contextlib.suppress(BaseException):  # an exception is already propagating
                    ended.acquire(timeout=_CHECK_INTERVAL)
        raise
    if failures:
        raise failures[0]


def _takes(turn: list[bool]) -> bool:
    """Whether this thread is the first of two to take `turn`."""
    try:
        return turn.pop()
    except IndexError:
        return False
