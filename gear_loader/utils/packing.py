"""Several tensors in one piece of memory, so that one copy takes them all to a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

__all__ = ["Layout", "packed_bytes", "packed_views"]

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
