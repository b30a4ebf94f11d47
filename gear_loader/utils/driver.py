"""CUDA's driver: the functions that PyTorch does not offer."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

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
    "cuDeviceGet": [_POINTER, _NUMBER],
    "cuDeviceGetAttribute": [_POINTER, _NUMBER, _NUMBER],
}
_PAGEABLE_ACCESS, _HOST_PAGE_TABLES = 88, 100
"""CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, and the same by hardware, through the page tables of the host."""
_NOT_SUPPORTED = 801
"""cudaErrorNotSupported."""


@functools.cache
def library() -> Any:
    """The driver's library, whose functions return 0 or the number of an error; None without one that has all, and for
    ROCm."""
    if torch.version.hip:
        return None
    try:
        found = ctypes.CDLL("libcuda.so.1")
        for name, types in _FUNCTIONS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = types, _NUMBER
    except (OSError, AttributeError):
        return None
    return found


def reads_pageable_memory(index: int, refused: int = 0) -> bool:
    """Whether kernels of a GPU read host memory that is not registered with CUDA, at full speed.

    Coherent machines (GB10, GH200, GB200) do. Others may do it in software, and move each page to the GPU.

    Args:
        index: of the GPU. refused: what cudaHostRegister returned there, if it was called.
    """
    found, device, value = library(), ctypes.c_int(), ctypes.c_int()
    if found is None or found.cuDeviceGet(ctypes.byref(device), index):
        return False

    def has(attribute: int) -> bool:
        return not found.cuDeviceGetAttribute(ctypes.byref(value), attribute, device.value) and bool(
            value.value
        )

    return has(_PAGEABLE_ACCESS) and (refused == _NOT_SUPPORTED or has(_HOST_PAGE_TABLES))
