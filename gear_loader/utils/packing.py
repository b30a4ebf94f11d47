"""Several tensors in one piece of memory, so that one copy takes them all to a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from gear_loader.utils.arrays import Array

Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

_ALIGNMENT = 128


def _offsets(parts: Sequence[Layout]) -> list[int]:
    """First byte of each tensor, a multiple of 128, and the end of all."""
    sizes = (-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in parts)
    return [0, *itertools.accumulate(sizes)]


def packed_bytes(parts: Sequence[Layout]) -> int:
    """Bytes of memory for these tensors, each from a multiple of 128 bytes on."""
    return _offsets(parts)[-1]


def packed_views(memory: torch.Tensor, parts: Sequence[Layout]) -> tuple[torch.Tensor, ...]:
    """The tensors in their memory, uint8 [at least `packed_bytes`]; views."""
    return tuple(
        memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for first, (shape, dtype) in zip(_offsets(parts), parts, strict=False)
    )


def upload(device: torch.device, *arrays: Array) -> tuple[torch.Tensor, ...]:
    """Arrays as tensors on a device, on its current stream, by one copy. Does not wait for the GPU."""
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type != "cuda":
        return tuple(tensor.clone() for tensor in tensors)
    parts: list[Layout] = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    memory = torch.empty(packed_bytes(parts), dtype=torch.uint8, device="cpu", pin_memory=True)
    for view, tensor in zip(packed_views(memory, parts), tensors, strict=True):
        view.copy_(tensor)
    return packed_views(memory.to(device, non_blocking=True), parts)
