"""Compilation of the loops of the CPU path (numba), safe against forks."""

from __future__ import annotations

import functools
import hashlib
import os
import time
import types
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import _Intrinsic, register_jitable

from gear_loader.utils.notices import notice

loops: list[Any] = []
"""The loops that `compiled` has made, each a numba dispatcher."""
timings: dict[str, float] = {}
"""Name of each loop that was compiled in this process, and not read from the cache -> seconds."""
_inlined: set[Any] = set()

# A fork while another thread compiles, or loads cached code, would leave this lock held forever in the child. So a fork
# waits for the lock.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


def compiled(function: Any, *, nogil: bool = True) -> Any:
    """Compile a loop that runs without the GIL, and cache the machine code on disk for the next process.

    With ``nogil=False`` it holds the GIL, so that it may call what uses Python's objects.

    Cached code stays valid until the function's own file changes, or one that has a loop which the file uses. Constants
    from other files are asserted.
    """
    try:
        loop = njit(nogil=nogil, cache=True)(function)
        _stamp(loop)
    except RuntimeError as error:
        notice(
            "numba-cache",
            f"numba finds no directory to cache compiled loops in ({error}): every process compiles them again, "
            "which takes some seconds. Set NUMBA_CACHE_DIR to a directory that can be written to.",
        )
        loop = njit(nogil=nogil)(function)
    loops.append(loop)
    return loop


def inlined(function: Any) -> Any:
    """Let compiled loops call a function, which stays a function of Python too.

    An index outside an array raises IndexError, as in Python; negative ones count from the end. Its code is inlined:
    calls that pass many arrays take ten times as long.
    """
    _inlined.add(function)
    return register_jitable(boundscheck=True, forceinline=True)(function)


def entry_of(loop: Any) -> Any:
    """The compiled code of a loop that was called with arguments of one kind: without a look at them, which takes half
    of a short call. The loop itself, where numba keeps that elsewhere."""
    found = list(getattr(loop, "overloads", {}).values())
    return getattr(found[0], "entry_point", loop) if len(found) == 1 else loop


def _stamp(loop: Any) -> None:
    """Make the cached code of a loop depend on all files that its machine code comes from.

    By default numba looks only at the file of the loop itself. Code of another version of a loop that is linked into it
    could then write where this version keeps other data.
    """
    cached: Any = getattr(getattr(loop, "_cache", None), "_cache_file", None)
    if hasattr(cached, "_source_stamp"):  # other versions of numba may call it otherwise
        files = _files(loop.py_func.__globals__, {loop.py_func.__code__.co_filename})
        cached._source_stamp = b"".join(map(_digest, sorted(files)))


@functools.cache
def _digest(file: str) -> bytes:
    return hashlib.sha256(Path(file).read_bytes()).digest()


def _files(names: dict[str, Any], found: set[str]) -> set[str]:
    """Add the files of the loops and intrinsics among the names of a module, and of those that they use."""
    for value in list(names.values()):
        function = value if _is_inlined(value) else getattr(value, "py_func", None)
        if isinstance(value, _Intrinsic):
            function = value._defn
        if function is not None and function.__code__.co_filename not in found:
            found.add(function.__code__.co_filename)
            _files(function.__globals__, found)
    return found


def _is_inlined(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value in _inlined


class _Watch(event.Listener):  # type: ignore[misc]
    """Logs that loops are compiled, and how long each took. Called under numba's compiler lock."""

    def __init__(self) -> None:
        self._started: list[tuple[Any, float]] = []  # the one in progress; those it calls compile within it

    def on_start(self, event: Any) -> None:
        loop = (event.data or {}).get("dispatcher")
        if self._started or not any(loop is one for one in loops):
            return
        self._started.append((loop, time.perf_counter()))
        notice(
            "numba-compile",
            f"Compiling loops of the CPU path on first use ({_name(loop)} first): 10 to 30 s of one core until the "
            "first batch, cached on this machine. `gear-loader warmup` compiles all of them ahead.",
        )

    def on_end(self, event: Any) -> None:
        loop = (event.data or {}).get("dispatcher")
        if self._started and self._started[-1][0] is loop:
            _, start = self._started.pop()
            timings[_name(loop)] = timings.get(_name(loop), 0.0) + time.perf_counter() - start


def _name(loop: Any) -> str:
    return f"{loop.py_func.__module__.rpartition('.')[2]}.{loop.py_func.__name__.strip('_')}"


event.register("numba:compile", _Watch())
