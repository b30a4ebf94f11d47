"""Rows of a batch, drawn by a selection and gathered by a collector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from gear_loader.utils.arrays import Array

__all__ = ["CudaRows", "SelectedRows"]


@dataclasses.dataclass(slots=True)
class SelectedRows:
    """Rows of one table, drawn on the host; readable until the read ticket ends.

    Attributes:
        slots, anchors, generations: int64 [n].
        weights: float32 [n], importance weights; None for batches without them.
        counts: int64 [2, n], times sampled and age; numbers: float32 [2, n], probability and age in seconds; None for
            batches without ``sample_info``.
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
    """Rows of one table that the GPU draws when the batch is gathered.

    Attributes:
        count: number of rows.
        write: ``write(random, out, reach)`` queues the draw on the current stream. It may write int64 [3] into the
            pinned tensor `random`, and writes the rows into `out`, as `gear_loader.kernels.items.resolve` does;
            `reach` is the first and last step of all windows, relative to the anchor.
    """

    count: int
    write: Callable[[torch.Tensor, tuple[torch.Tensor, ...], tuple[int, int]], None]

    def __len__(self) -> int:
        return self.count
