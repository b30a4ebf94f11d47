"""Mutexes that stay usable after an exception at any bytecode, and calls that signals cannot interrupt."""

from __future__ import annotations

import _thread
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["holds_any", "new_mutex", "run_alone", "uninterrupted"]

_T = TypeVar("_T")

_CHECK_INTERVAL = 0.1  # seconds between checks while waiting for a thread
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
