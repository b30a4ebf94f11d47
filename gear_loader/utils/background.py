"""Background threads that end before the interpreter does.

A daemon thread that wants the GIL back while the interpreter ends is unwound by Python, and where PyTorch or another
library in C++ waits for the GIL, unwinding is fatal: the process ends with "terminate called without an active
exception" and signal 6, after all its work is done. So threads that call such libraries are asked to end, and are
waited for, by an `atexit` handler. A process that ends by `os._exit`, as forked children of multiprocessing do, does
not need that.

Handlers of `atexit` that were registered after this module was imported run before, while the threads still work.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from gear_loader.utils.mutex import uninterrupted

_EXIT_TIMEOUT = 5.0  # seconds that the end of the interpreter waits for all threads

_T = TypeVar("_T")
_Stop = Callable[[], object]
# Of each thread at work, the object that can ask it to end, and the method that does. Without callbacks of weak
# references: Python calls them while it tears objects down, and an exception of a signal handler is lost in them.
_Asks = tuple["weakref.ref[Any]", Callable[[Any], object]] | None
_threads: dict[threading.Thread, _Asks] = {}
_iterators: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()
_ending = False


def background_thread(
    run: Callable[..., object], name: str, *, args: tuple[Any, ...] = (), stop: _Stop | None = None
) -> threading.Thread:
    """Return a daemon thread, to be started, that ends before the interpreter does.

    Args:
        run: main function of the thread. name: of the thread. args: of `run`.
        stop: a method that asks the thread to end, without waiting; its object is referred to weakly. None: the thread
            ends by itself.
    """
    method: Any = stop
    asks = None if stop is None else (weakref.ref(method.__self__), method.__func__)

    def work() -> None:
        try:
            if _ending:
                _ask(asks)
            run(*args)
        finally:
            _threads.pop(thread, None)

    thread = _Thread(target=work, name=name, daemon=True)
    thread.asks = asks
    return thread


def lower_priority() -> None:
    """Let the calling thread run when others do not, out of the way of training."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class _Thread(threading.Thread):
    asks: _Asks = None

    def start(self) -> None:
        """Start completely or not at all: an interrupted `threading.Thread.start` may leave one that never runs."""

        def begin() -> None:
            _threads[self] = self.asks
            try:
                threading.Thread.start(self)
            except BaseException:
                _threads.pop(self, None)
                raise

        uninterrupted(begin)


def closed_at_end(iterator: Generator[_T]) -> Generator[_T]:
    """Let an iterator that is still open when the interpreter ends be closed before Python clears the modules."""
    _iterators.add(iterator)
    return iterator


def is_ending() -> bool:
    """Whether the process ends, and threads started now would not be waited for."""
    return _ending


def must_end() -> bool:
    """Whether the calling thread is a daemon thread of a process that ends: what waits for long should give up."""
    return _ending and threading.current_thread().daemon


def stop_at_end() -> None:
    """Hold the calling thread for some seconds if it is a daemon thread of a process that ends.

    For what uses a background thread that may have ended already: an error now would only be noise, because Python
    stops the caller too when the interpreter ends.
    """
    if must_end():
        time.sleep(_EXIT_TIMEOUT)


def _ask(asks: _Asks) -> None:
    """Ask a thread to end."""
    owner = None if asks is None else asks[0]()
    if asks is not None and owner is not None:
        with contextlib.suppress(Exception):  # the others are asked all the same
            asks[1](owner)


def _end_all() -> None:
    global _ending
    _ending = True
    for iterator in _listed(_iterators):
        with contextlib.suppress(Exception):  # a daemon thread may be in the middle of it
            iterator.close()
    alive = [
        (thread, asks)
        for thread, asks in _listed(_threads.items())
        if thread.ident is None or thread.is_alive()
    ]
    for _, asks in alive:
        _ask(asks)
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for thread, _ in alive:
        with contextlib.suppress(RuntimeError):  # it has not been started yet
            thread.join(max(0.0, deadline - time.monotonic()))


def _listed(registered: Iterable[_T]) -> list[_T]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has registered one meanwhile
            return list(registered)


# `weakref` runs the finalizers of what threads use in a handler that the first finalizer registers. The newest handler
# runs first: so these threads end before.
weakref.finalize(background_thread, bool).detach()
atexit.register(_end_all)
os.register_at_fork(after_in_child=_threads.clear)
