"""Background threads that end before the interpreter does.

A daemon thread that wants the GIL back while the interpreter ends is unwound by Python, and where PyTorch or another
library in C++ waits for the GIL, unwinding is fatal: the process ends with "terminate called without an active
exception" and signal 6, after all its work is done. So threads that call such libraries are asked to end, and are
waited for, by an `atexit` handler. A process that ends by `os._exit`, as forked children of multiprocessing do, does
not need that.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["is_ending", "start_thread", "stop_at_end"]

_EXIT_TIMEOUT = 5.0  # seconds that the end of the interpreter waits for all threads

_Stop = Callable[[], object]
_threads: weakref.WeakKeyDictionary[threading.Thread, Callable[[], _Stop | None]] = (
    weakref.WeakKeyDictionary()
)
_ending = False


def start_thread(
    run: Callable[..., object], name: str, *, args: tuple[Any, ...] = (), stop: _Stop | None = None
) -> threading.Thread:
    """Start a daemon thread that ends before the interpreter does.

    Args:
        run: main function of the thread. name: of the thread. args: of `run`.
        stop: a method that asks the thread to end, without waiting; its object is referred to weakly. None: the thread
            ends by itself.
    """
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    _threads[thread] = (lambda: None) if stop is None else weakref.WeakMethod(stop)
    # Newest last, and so run first: before the finalizers of what threads use, which `weakref` runs in a handler too.
    atexit.unregister(_end_all)
    atexit.register(_end_all)
    thread.start()
    return thread


def is_ending() -> bool:
    """Whether the process ends, and threads started now would not be waited for."""
    return _ending


def stop_at_end() -> None:
    """Let the calling thread run no further once the process ends, if it is a daemon thread; Python does so soon after.

    For what uses a background thread, which may have ended already: an error now would only be noise.
    """
    if _ending and threading.current_thread().daemon:
        threading.Event().wait()


def _end_all() -> None:
    global _ending
    _ending = True
    alive = [(thread, stop()) for thread, stop in list(_threads.items()) if thread.is_alive()]
    for _, stop in alive:
        if stop is not None:
            stop()
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for thread, _ in alive:
        thread.join(max(0.0, deadline - time.monotonic()))
