"""Compilation of the loops of the CPU path (numba), safe against forks."""

from __future__ import annotations

import os
from typing import Any

from numba import njit
from numba.core.compiler_lock import global_compiler_lock

from gear_loader.utils.notices import notice

__all__ = ["compiled"]

# A fork while another thread compiles, or loads cached code, would leave this lock held forever in the child. So a fork
# waits for the lock.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


def compiled(function: Any) -> Any:
    """Compile a loop that runs without the GIL, and cache the machine code on disk for the next process.

    Cached code stays valid until the function's own file changes. So the loops that it calls are in the same file, and
    constants from other files are asserted there.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        notice(
            "numba-cache",
            f"numba finds no directory to cache compiled loops in ({error}): every process compiles them again, "
            "which takes some seconds. Set NUMBA_CACHE_DIR to a directory that can be written to.",
        )
        return njit(nogil=True)(function)
