"""CUDA's driver: the functions that PyTorch does not offer."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, ClassVar

import torch

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int
_FUNCTIONS: dict[str, list[Any]] = {
    "cuThreadExchangeStreamCaptureMode": [_POINTER],
    "cuStreamCreateWithPriority": [_POINTER, ctypes.c_uint, _NUMBER],
    "cuStreamIsCapturing": [_POINTER, _POINTER],
    "cuCtxGetCurrent": [_POINTER],
    "cuGraphCreate": [_POINTER, ctypes.c_uint],
    "cuGraphAddKernelNode_v2": [_POINTER, _POINTER, _POINTER, ctypes.c_size_t, _POINTER],
    "cuGraphAddMemcpyNode": [_POINTER, _POINTER, _POINTER, ctypes.c_size_t, _POINTER, _POINTER],
    "cuGraphAddChildGraphNode": [_POINTER, _POINTER, _POINTER, ctypes.c_size_t, _POINTER],
    "cuGraphInstantiateWithFlags": [_POINTER, _POINTER, ctypes.c_ulonglong],
    "cuGraphDestroy": [_POINTER],
    "cuGraphExecDestroy": [_POINTER],
    "cuGraphLaunch": [_POINTER, _POINTER],
    "cuStreamWaitEvent": [_POINTER, _POINTER, ctypes.c_uint],
    "cuEventQuery": [_POINTER],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuMemcpyDtoDAsync_v2": [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, _POINTER],
    "cuDeviceGet": [_POINTER, _NUMBER],
    "cuDeviceGetAttribute": [_POINTER, _NUMBER, _NUMBER],
}
_HOST_MEMORY, _DEVICE_MEMORY = 1, 2
"""CU_MEMORYTYPE_HOST and CU_MEMORYTYPE_DEVICE."""
_PAGEABLE_ACCESS, _HOST_PAGE_TABLES = 88, 100
"""CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, and the same by hardware, through the page tables of the host."""
_NOT_SUPPORTED = 801
"""cudaErrorNotSupported."""


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", _POINTER),
        *((f"{part}Dim{axis}", ctypes.c_uint) for part in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint),
        ("kernelParams", ctypes.POINTER(_POINTER)),
        *((name, _POINTER) for name in ("extra", "kern", "ctx")),
    )


class CopyNode(ctypes.Structure):
    """CUDA_MEMCPY3D_v2."""

    _fields_: ClassVar[Any] = (
        *(
            (name, kind)
            for i, side in enumerate(("src", "dst"))
            for name, kind in (
                *((side + part, ctypes.c_size_t) for part in ("XInBytes", "Y", "Z", "LOD")),
                (f"{side}MemoryType", _NUMBER),
                *((side + part, _POINTER) for part in ("Host", "Device", "Array")),
                (f"reserved{i}", _POINTER),
                *((side + part, ctypes.c_size_t) for part in ("Pitch", "Height")),
            )
        ),
        *((name, ctypes.c_size_t) for name in ("WidthInBytes", "Height", "Depth")),
    )


def copy_node(target: torch.Tensor, source: torch.Tensor, count: int) -> CopyNode:
    """A copy of `count` bytes between memory of a GPU and pinned memory, or of the GPU alone."""
    node = CopyNode(WidthInBytes=count, Height=1, Depth=1)
    for side, tensor in (("src", source), ("dst", target)):
        on_gpu = tensor.device.type == "cuda"
        setattr(node, f"{side}MemoryType", _DEVICE_MEMORY if on_gpu else _HOST_MEMORY)
        setattr(node, side + ("Device" if on_gpu else "Host"), tensor.data_ptr())
        setattr(node, f"{side}Pitch", count)
        setattr(node, f"{side}Height", 1)
    return node


@functools.cache
def library() -> Any:
    """The driver's library, whose functions return 0 or the number of an error; None without one that has all, and for
    ROCm."""
    if torch.version.hip:
        return None
    try:
        # Its calls take microseconds: without the GIL, a busy thread would get it, and keep it for milliseconds.
        found = ctypes.PyDLL("libcuda.so.1")
        for name, types in _FUNCTIONS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = types, _NUMBER
    except (OSError, AttributeError):
        return None
    return found


def address_of(name: str) -> int:
    """The address of a function of the driver, which `library` has found."""
    found: int | None = ctypes.cast(getattr(library(), name), _POINTER).value
    assert found
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
