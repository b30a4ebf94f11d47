"""The device that kernels are launched on."""

from __future__ import annotations

import contextlib
import functools

import torch

__all__ = ["multiprocessors", "on_device"]

_NOTHING = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current device for launches."""
    # Entering the device costs the host as much as some launches.
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 for Triton's interpreter."""
    return _multiprocessors(device.index) if device.type == "cuda" else 4
