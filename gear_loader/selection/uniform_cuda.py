"""Uniform rows that a GPU draws itself, as long as the table stands still."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch

from gear_loader.kernels.uniform_reference import ARRAYS, HEADER
from gear_loader.selection.base import SelectionContext
from gear_loader.storage.inline import Places
from gear_loader.storage.queue_loops import list_drawn
from gear_loader.storage.queued import QueuedBatch, QueuedPadded, QueuedSeveral
from gear_loader.storage.selected_rows import UniformPlaces
from gear_loader.utils.arrays import Array, outside_inference
from gear_loader.utils.captures import beside_captures
from gear_loader.utils.streams import on_stream

LEAST_ROWS = 128
"""Smallest batch that a GPU draws. The host needs 20 ns a row, of large tables 100; the GPU's look-up has three reads
of host memory, one after another."""
STANDING = 8
"""Batches that the host draws after a change, before what is drawn from is copied to the GPU."""
ROWS_EACH = 4
"""And trajectories for which it has drawn a row each: a copy of one takes 2 to 10 ns, so it costs what these draws did,
or less."""

_numbers = itertools.count(1)
_BY_HOST: Array = np.zeros(3, dtype=np.int64)


class CudaUniform:
    """Decides whether a GPU draws a batch, and has there what it draws from.

    Args:
        context: the table, and the options of the selection. steps: whether an item is a step.
    """

    def __init__(self, context: SelectionContext, *, steps: bool) -> None:
        self._context, self._number = context, next(_numbers)
        self._launch = functools.partial(_launch, context, "item" if steps else context.anchor)
        self._by_step = steps
        self._seen: Places | None = None
        self._rows = 0  # that the host has drawn since the last change, or copy for another stream
        self._held, self._stream = _BY_HOST, 0
        self._memory: torch.Tensor | None = None

    def held(self, items: Places, batch: QueuedBatch | QueuedSeveral, rows: int) -> Array:
        """What the GPU draws from, as `queue_uniform` takes it; zeros if the host draws.

        Args:
            items: what is drawn from, another object after each change. batch: which is queued next.
            rows: of all its batches.
        """
        if not isinstance(batch, (QueuedPadded, QueuedSeveral)) or batch.count < LEAST_ROWS:
            return _BY_HOST
        if items is not self._seen:
            self._seen, self._held, self._rows = items, _BY_HOST, 0
        first = batch if isinstance(batch, QueuedPadded) else batch.batches[0]
        if self._held is _BY_HOST or self._stream != first.stream:
            self._rows += rows
            least = max(STANDING * batch.count, len(items.arrays[0]) // ROWS_EACH)
            if self._rows <= least or first.places is None:
                return _BY_HOST
            self._copy(items, first.places)
        return self._held if batch.draws_by(self._number, self._launch) else _BY_HOST

    def _copy(self, items: Places, places: UniformPlaces) -> None:
        """Copy what is drawn from to the GPU, on the stream that draws. Memory of the last copy is used again there.

        What changes meanwhile is no part of a batch: its read ticket is taken only if nothing has changed.
        """
        size, sums = len(items.arrays[0]), items.arrays[3]
        device, stream, count = places.rows.device, places.stream, HEADER + ARRAYS * size
        self._held, self._rows = _BY_HOST, 0  # until the copy is queued
        with outside_inference(), beside_captures(device), on_stream(device, stream):
            pinned = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
            list_drawn(self._context.table._engine.reader().places.table, items.table, pinned.numpy())
            self._memory = pinned.to(device, non_blocking=True)
        total = int(sums[-1] - sums[0] + items.arrays[1][0]) if self._by_step else size
        self._stream = stream.cuda_stream
        self._held = np.array([self._memory.data_ptr(), size, total], dtype=np.int64)


def _launch(context: SelectionContext, anchor: Any, places: UniformPlaces) -> None:
    """Launch the draw of a batch."""
    from gear_loader.kernels import uniform

    uniform.draw(
        places.random,
        places.rows,
        places.ids,
        anchor=anchor,
        block_steps=context.table._engine.region.layout.block_steps,
        lead=context.first,
        stride=context.stride,
        **places.reach._asdict(),
    )
