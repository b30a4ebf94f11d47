"""Rows of a batch, drawn by a selection and gathered by a collector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.utils.arrays import Array


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
        spans: int64 [2, n], first step and number of steps that a packed batch has of each row; None: its whole window.
    """

    slots: Array
    anchors: Array
    generations: Array
    weights: Array | None = None
    counts: Array | None = None
    numbers: Array | None = None
    spans: Array | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def names(self) -> tuple[Array, Array, Array]:
        """What identifies the rows in a batch: slots, anchors, generations."""
        return self.slots, self.anchors, self.generations

    def take(self, which: Array) -> SelectedRows:
        """The rows of a mask, bool [n]; every part is contiguous."""
        places = np.flatnonzero(which)
        names = (part.take(places) for part in self.names)
        return SelectedRows(*names, *(None if part is None else part.take(places, -1) for part in self._more))

    def moved(self, which: Array, anchors: Array) -> SelectedRows:
        """Some rows, int64 [m], with other anchors, int64 [m], and nothing but what identifies them."""
        return SelectedRows(self.slots[which], np.ascontiguousarray(anchors), self.generations[which])

    def joined(self, others: SelectedRows) -> SelectedRows:
        """These rows, then `others`, which have the same parts."""
        names = (np.concatenate(pair) for pair in zip(self.names, others.names, strict=True))
        more = (
            None if one is None or other is None else np.concatenate((one, other), -1)
            for one, other in zip(self._more, others._more, strict=True)
        )
        return SelectedRows(*names, *more)

    @property
    def _more(self) -> tuple[Array | None, ...]:
        return self.weights, self.counts, self.numbers, self.spans


@dataclasses.dataclass(frozen=True, slots=True)
class DrawPlaces:
    """Where a draw on the GPU puts its rows, and what comes after it.

    Attributes:
        random: pinned int64 [3], which the draw may write on the host, as `beta`, pinned float32 [1].
        out: device tensors that get the rows, as `gear_loader.kernels.items.resolve` writes them; then the weights.
        memory: uint8 device tensor, of which `out` are parts.
        reach: that of all windows.
        work: the `RepeatedWork` of the batch's buffers.
        whole: whether the draw fills the buffers, so that its launches are those of the last such draw.
        gather: queues the gather of the rows on the current stream.
    """

    random: torch.Tensor
    beta: torch.Tensor
    out: tuple[torch.Tensor, ...]
    memory: torch.Tensor
    reach: Reach
    work: Any
    whole: bool
    gather: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class UniformPlaces:
    """Where a draw of uniform rows on the GPU puts them, and what comes after it.

    Attributes:
        random: pinned int64 [6], which the host writes; see `gear_loader.kernels.uniform`.
        rows, ids, reach: as the first two of `DrawPlaces.out`, and its `reach`.
        stream: that fills the batch. gather: as of `DrawPlaces`.
    """

    random: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    reach: Reach
    stream: torch.cuda.Stream
    gather: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class CudaRows:
    """Rows of one table that the GPU draws when the batch is gathered.

    Attributes:
        count: number of rows.
        write: queues the draw, then the gather, on the given stream, the current one.
    """

    count: int
    write: Callable[[DrawPlaces, torch.cuda.Stream], None]

    def __len__(self) -> int:
        return self.count
