"""CUDA's driver: the functions that PyTorch does not offer."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int
_FUNCTIONS: dict[str, list[Any]] = {
    "cuThreadExchangeStreamCaptureMode": [_POINTER],
    "cuStreamCreateWithPriority": [_POINTER, ctypes.c_uint, _NUMBER],
    "cuStreamIsCapturing": [_POINTER, _POINTER],
    "cuStreamBeginCapture_v2": [_POINTER, _NUMBER],
    "cuStreamEndCapture": [_POINTER, _POINTER],
    "cuGraphInstantiateWithFlags": [_POINTER, _POINTER, ctypes.c_ulonglong],
    "cuGraphDestroy": [_POINTER],
    "cuGraphExecDestroy": [_POINTER],
    "cuGraphLaunch": [_POINTER, _POINTER],
}


@functools.cache
def library() -> Any:
    """The driver's library, whose functions return 0 or the number of an error; None without one that has all."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
        for name, types in _FUNCTIONS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = types, _NUMBER
    except (OSError, AttributeError):
        return None
    return found
