"""Rows of a batch, drawn by a selection and gathered by a collector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from gear_loader.utils.arrays import Array

__all__ = ["CudaRows", "Reach", "SelectedRows"]


class Reach(NamedTuple):
    """What the windows of a batch read of a trajectory.

    Attributes:
        first, last: the first and last step, relative to the anchor.
        once: whether also its first block, which has the values of columns per trajectory.
    """

    first: int
    last: int
    once: bool = False


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
            `reach` is that of all windows.
    """

    count: int
    write: Callable[[torch.Tensor, tuple[torch.Tensor, ...], Reach], None]

    def __len__(self) -> int:
        return self.count
