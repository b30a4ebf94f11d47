"""Several tensors in one piece of memory, so that one copy takes them all to a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["Layout", "packed_bytes", "packed_views"]

Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

_ALIGNMENT = 128


def packed_bytes(parts: Sequence[Layout]) -> int:
    """Bytes of memory for these tensors, each from a multiple of 128 bytes on."""
    return sum(-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in parts)


def packed_views(memory: torch.Tensor, parts: Sequence[Layout]) -> tuple[torch.Tensor, ...]:
    """The tensors in their memory, uint8 [at least `packed_bytes`]; views."""
    views, end = [], 0
    for shape, dtype in parts:
        first, size = end, math.prod(shape) * dtype.itemsize
        views.append(memory[first : first + size].view(dtype).view(shape))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(views)
