"""The device that kernels are launched on."""

from __future__ import annotations

import contextlib
import functools

import torch

__all__ = ["BUS_PROGRAMS", "bus_programs", "multiprocessors", "on_device", "shared_memory"]

BUS_PROGRAMS = 16
"""Programs that read host memory at a time, each on a multiprocessor of its own, unless a launch says otherwise.

Measured on a H100 with PCIe 5.0 x16: 16 programs move 0.9 to 1.0 of what 132 do. A kernel that wants all registers of a
multiprocessor, as large products of matrices do, waits while one of them is there; with one on each of the 132, until
no batch is being gathered.
"""

_NOTHING = contextlib.nullcontext()
current_device = getattr(torch._C, "_cuda_getDevice", lambda: torch.cuda.current_device())
"""`torch.cuda.current_device` without its look whether CUDA is there."""


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current device for launches."""
    # Entering the device costs the host as much as some launches.
    if device.type != "cuda" or current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


@functools.cache
def _shared_memory(index: int | None) -> int:
    properties = torch.cuda.get_device_properties(index)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def shared_memory(device: torch.device, interpreted: int) -> int:
    """Bytes of shared memory that a block can have on a GPU; `interpreted` for Triton's interpreter."""
    return _shared_memory(device.index) if device.type == "cuda" else interpreted


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def bus_programs(device: torch.device) -> int:
    """Default size of the grid of a kernel that reads host memory."""
    return BUS_PROGRAMS if device.type == "cuda" else 4


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 for Triton's interpreter."""
    return _multiprocessors(device.index) if device.type == "cuda" else 4
