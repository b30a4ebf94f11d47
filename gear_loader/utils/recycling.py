"""Memory of large tensors, which is used again when nobody refers to it any more."""

from __future__ import annotations

import collections
import sys

import numpy as np

from gear_loader.utils.arrays import Array
from gear_loader.utils.lazy_torch import torch

LEAST = 1 << 17
"""Bytes from which on memory is recycled; the allocator keeps what is smaller."""
_box: list[Array] = [np.empty(0, dtype=np.uint8)]
_ALONE = sys.getrefcount(_box[0])  # of an array that is in such a list only


class Recycler:
    """A pool of memory; any thread may use it.

    The kernel clears each page of fresh memory, which takes up to a tenth of the time that images take to decode. A
    tensor and its views refer to the array that they lie in, so the array's references tell whether one is left.

    Args:
        most: pieces that are remembered; what is made beyond belongs to whoever refers to it.
    """

    def __init__(self, most: int = 6) -> None:
        # Taken out while it is looked at, so there is no lock that a fork could find held.
        self._known: collections.deque[list[Array]] = collections.deque(maxlen=most)

    def empty(self, size: int) -> torch.Tensor:
        """Uninitialised memory, uint8 [size], on the CPU."""
        if size < LEAST:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        for _ in range(len(self._known)):
            try:
                box = self._known.popleft()
            except IndexError:  # other threads look at the rest
                break
            fits = size <= len(box[0]) <= 2 * size and sys.getrefcount(box[0]) == _ALONE
            found = torch.from_numpy(box[0])[:size] if fits else None
            self._known.append(box)
            if found is not None:
                return found
        box = [np.empty(size + size // 8, dtype=np.uint8)]
        found = torch.from_numpy(box[0])[:size]
        self._known.append(box)
        return found
