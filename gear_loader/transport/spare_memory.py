"""Memory of requests that have ended, kept for the next ones: the kernel clears each page of new memory."""

from __future__ import annotations

import numpy as np

from gear_loader.transport.message_schema import ALIGNMENT
from gear_loader.utils.arrays import Array, data_address

__all__ = ["SpareMemory", "aligned"]


def aligned(size: int) -> Array:
    """New memory of `size` bytes that begins at a multiple of `ALIGNMENT`, uint8 [size]."""
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -data_address(memory) % ALIGNMENT
    return memory[start : start + size]


class SpareMemory:
    """Buffers that no request uses; not thread-safe.

    Args:
        most: bytes that are kept at most.

    Attributes:
        held: bytes that are kept.
    """

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most
        self._free: list[Array] = []  # the latest last: a cache is more likely to hold it

    def take(self, size: int) -> Array:
        """A buffer of at least `size` bytes, and at most four times as many, aligned to `ALIGNMENT`."""
        for i in reversed(range(len(self._free))):
            if size <= len(self._free[i]) <= 4 * size:
                buffer = self._free.pop(i)
                self.held -= len(buffer)
                return buffer
        step = 1 << max(0, size.bit_length() - 4)  # some room, for the next request is about as large
        return aligned(-(-size // step) * step)

    def give(self, buffer: Array) -> None:
        """Keep a buffer of `take` that nothing refers to any longer; the oldest make room for it."""
        if len(buffer) > self._most:
            return
        while self.held + len(buffer) > self._most:
            self.held -= len(self._free.pop(0))
        self._free.append(buffer)
        self.held += len(buffer)
