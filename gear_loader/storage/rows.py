"""Rows of a batch: what a selection draws, and a collector gathers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from gear_loader.utils.arrays import Array

__all__ = ["CudaRows", "SelectedRows"]


@dataclasses.dataclass(slots=True)
class SelectedRows:
    """Rows of one table, drawn by the host. They stay readable until the read ticket is released.

    Attributes:
        slots, anchors, generations: int64 [n].
        weights: float32 [n], if batches carry them.
        counts, numbers: int64 [2, n] and float32 [2, n], if batches carry ``sample_info``: its values, in the order
            times sampled, age; probability, age in seconds.
    """

    slots: Array
    anchors: Array
    generations: Array
    weights: Array | None = None
    counts: Array | None = None
    numbers: Array | None = None

    def __len__(self) -> int:
        return len(self.slots)


@dataclasses.dataclass(frozen=True)
class CudaRows:
    """Rows of one table that the GPU draws when they are gathered.

    Attributes:
        count: rows.
        write: queues the draw on the current stream: ``write(random, out, reach)``. It may write int64 [3] into the
            pinned tensor `random`; it writes the rows into `out`, as `gear_loader.kernels.items.resolve` does;
            `reach` is the first and last step, relative to the anchor, that any window covers.
    """

    count: int
    write: Callable[[torch.Tensor, tuple[torch.Tensor, ...], tuple[int, int]], None]

    def __len__(self) -> int:
        return self.count
