"""Small pieces of an owner's memory, scattered, which are read with few transfers."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.storage.index_arrays import ranges
from gear_loader.utils.arrays import Array

__all__ = ["Intervals", "transfers"]

_WORTH = 256  # bytes that cost as much as another transfer; gaps of up to this size are read, too


class Intervals:
    """Intervals of memory, and the transfers that read them; they may overlap.

    Args:
        base: address at the owner from which they are counted.
        starts, sizes: int64 [n], bytes; multiples of the item size of `dtype`.
        dtype: of the values, of at most 8 bytes each.

    Attributes:
        nbytes: bytes of the local memory that a read fills.
    """

    def __init__(self, base: int, starts: Array, sizes: Array, dtype: Any) -> None:
        self._base, self._dtype = base, np.dtype(dtype)
        self._counts = sizes // self._dtype.itemsize
        order = np.argsort(starts, kind="stable")
        order = order[sizes[order] > 0]
        begins, ends = starts[order], np.maximum.accumulate((starts + sizes)[order])
        gap = _WORTH
        if len(order) and ends[-1] - begins[0] <= _WORTH * len(order):
            gap = int(ends[-1] - begins[0])  # one transfer from the first to the last
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = begins[1:] > ends[:-1] + gap
        heads = np.flatnonzero(first)
        self._firsts = begins[heads]
        self._lengths = ends[np.append(heads[1:], len(order))[: len(heads)] - 1] - self._firsts
        padded = -(-self._lengths // 8) * 8
        self._offsets = np.cumsum(padded) - padded
        self.nbytes = int(padded.sum())
        group = np.cumsum(first) - 1
        self._places = np.zeros_like(starts)
        self._places[order] = self._offsets[group] + begins - self._firsts[group]

    def transfers(self, memory: Array) -> tuple[Array, Array]:
        """Remote and local sides of the transfers into `memory`, uint8 [nbytes or more]; int64 [p, 5] each."""
        remote = transfers(self._base + self._firsts, self._lengths)
        return remote, transfers(memory.ctypes.data + self._offsets, self._lengths)

    def values(self, memory: Array) -> Array:
        """A copy of the values that were read into `memory`, one interval after another."""
        size = self._dtype.itemsize
        read: Array = memory[: self.nbytes].view(self._dtype)
        found: Array = read[ranges(self._places // size, self._counts)]
        return found


def transfers(addresses: Array, sizes: Array) -> Array:
    """One side of transfers for NIXL, int64 [p, 5]: address, bytes, 0, bytes, 1."""
    listed = np.empty((len(addresses), 5), dtype=np.int64)
    listed[:, 0], listed[:, 1], listed[:, 2], listed[:, 3], listed[:, 4] = addresses, sizes, 0, sizes, 1
    return listed
