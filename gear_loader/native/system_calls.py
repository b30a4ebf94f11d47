"""System calls of Linux from compiled loops (numba): of threads, and the time."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_NUMBERS: dict[str, tuple[int, ...]] = {
    # futex, sched_setaffinity, sched_getaffinity, getcpu, clock_gettime
    "x86_64": (202, 203, 204, 309, 228),
    "aarch64": (98, 122, 123, 168, 113),
}
KNOWN = platform.system() == "Linux" and platform.machine() in _NUMBERS
"""Whether this machine has these calls; elsewhere none of these functions may be called."""
_FUTEX, _SET_AFFINITY, _GET_AFFINITY, _GET_CPU, _CLOCK = _NUMBERS.get(platform.machine(), (0,) * 5)
_WAIT, _WAKE = 128, 129  # within this process
_MONOTONIC = 1


@intrinsic  # type: ignore[untyped-decorator]
def _system_call(_context: Any, _number: Any, _a: Any, _b: Any, _c: Any, _d: Any) -> Any:
    """A system call by the C library's `syscall`; -1 if it fails."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word], var_arg=True)
        function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        return builder.call(function, args)

    return types.int64(*[types.int64] * 5), codegen


@njit(inline="always")  # type: ignore[untyped-decorator]
def futex_wait(address, value) -> None:  # type: ignore[no-untyped-def]
    """Sleep until `futex_wake` if the int32 at an address has a value; may return earlier."""
    _system_call(_FUTEX, address, _WAIT, value, 0)


@njit(inline="always")  # type: ignore[untyped-decorator]
def futex_wake(address) -> None:  # type: ignore[no-untyped-def]
    """Wake a thread that sleeps at an address."""
    _system_call(_FUTEX, address, _WAKE, 1, 0)


@njit(inline="always")
def current_processor(scratch):  # type: ignore[no-untyped-def]
    """The processor that this thread runs on; scratch: int64 [1 or more], overwritten."""
    scratch[0] = 0
    _system_call(_GET_CPU, scratch.ctypes.data, 0, 0, 0)
    return scratch[0]


@njit(inline="always")
def monotonic(scratch):  # type: ignore[no-untyped-def]
    """Nanoseconds of the monotonic clock; scratch: int64 [2 or more], overwritten."""
    _system_call(_CLOCK, _MONOTONIC, scratch.ctypes.data, 0, 0)
    return scratch[0] * 1_000_000_000 + scratch[1]


@njit(inline="always")  # type: ignore[untyped-decorator]
def keep_off(threads, processor, scratch) -> None:  # type: ignore[no-untyped-def]
    """Let threads use the processors that this thread may use, except one; if there are others, and the system allows
    it.

    Args:
        threads: int64 [n], as the kernel numbers threads. processor: that they do not use.
        scratch: int64, a bit for each processor, overwritten.
    """
    size, address = 8 * len(scratch), scratch.ctypes.data
    scratch[:] = 0
    if _system_call(_GET_AFFINITY, 0, size, address, 0) <= 0:
        return
    if processor < 8 * size:
        scratch[processor // 64] &= ~(1 << processor % 64)
    if not scratch.any():
        scratch[processor // 64] |= 1 << processor % 64
    for thread in threads:
        _system_call(_SET_AFFINITY, thread, size, address, 0)
