"""Mutexes of one process that an exception at any bytecode leaves free, and calls that signals cannot cut short."""

from __future__ import annotations

import _thread
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["holds_any", "new_mutex", "run_alone", "uninterrupted"]

_T = TypeVar("_T")

_LOOK = 0.1  # seconds after which a thread that waits for another looks again
_mutexes: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_mutex() -> Any:
    """A mutex of one process that knows its owner, and that `holds_any` asks about. It must not be taken twice."""
    mutex = threading.RLock()
    _mutexes[id(mutex)] = mutex
    return mutex


def holds_any() -> bool:
    """Whether this thread holds the lock of a table or a mutex of `new_mutex`, so that it must not wait for others."""
    for reference in _mutexes.valuerefs():
        mutex = reference()
        if mutex is not None and mutex._is_owned():
            return True
    return False


def run_alone(mutex: Any, section: Callable[[], _T]) -> _T | None:
    """What `section` returns, called while holding a mutex of `new_mutex`; None, and not called, if it is held already.

    As with `IndexLock.run`, an exception at any bytecode leaves the mutex free.
    """
    owned = mutex._is_owned
    if owned():
        return None
    try:
        try:
            return section() if mutex.acquire(blocking=False) else None
        finally:
            if owned():
                mutex.release()
    finally:
        if owned():  # the release above was interrupted
            mutex.release()


def uninterrupted(section: Callable[[], object]) -> None:
    """Call `section`, wholly or not at all, whatever signals arrive; their exceptions come out afterwards.

    Python runs signal handlers in the main thread alone, so there the section gets a thread of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        section()
        return
    # Of C alone: an exception in the middle of a `threading.Event` leaves that one broken.
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
            ended.acquire(timeout=_LOOK)
    except BaseException:
        if not _takes(turn):  # it has begun
            while not finished:
                with contextlib.suppress(BaseException):  # one exception is on its way already
                    ended.acquire(timeout=_LOOK)
        raise
    if failures:
        raise failures[0]


def _takes(turn: list[bool]) -> bool:
    """Whether this thread is the first of two to take `turn`."""
    try:
        return turn.pop()
    except IndexError:
        return False
