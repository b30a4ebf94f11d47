"""Movers: how rows get into the buffers of one layout. The base of those of the CPU, and of those of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gear_loader.collection.buffers import GpuSide, Staging
from gear_loader.collection.tree_rows import tree_rows
from gear_loader.storage.ragged import Values
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.streams import current_stream


class GoneRowsError(Exception):
    """Rows that a batch has in other forms too were gone when they were read; attribute `rows`: their numbers."""

    def __init__(self, rows: Array) -> None:
        super().__init__(f"{len(rows)} rows are gone")
        self.rows = rows


class RowMover:
    """Moves rows into the buffers of one layout.

    A batch of one table takes `fill`. One of several sources takes `begin`; `copy`, `load` and `place` for each of
    them; `flush` when the rows of this machine are there, while others are on their way; and `finish`.

    Attributes:
        layout: `PaddedLayout` or `PackedLayout`.
        staging: memory of rows on their way into a batch.
        zero_copy: whether a GPU reads the tables itself. pinned: whether batches lie in pinned memory.
        ragged: windows of which it copies ragged values, and what these are.
        decodes_on: the GPU that decodes jpegs among them; None for the CPU.
    """

    decodes_on: torch.device | None = None
    zero_copy = pinned = False
    layout: Any
    ragged: Mapping[str, Values] = {}
    staging: Staging

    def buffers(self, *, shared: Any = False) -> Any:
        """New buffers for one batch; `shared`: in shared memory."""
        raise NotImplementedError

    def is_quick(self, count: int) -> bool:
        """Whether a batch of `count` rows is filled in less time than a thread takes to hand it over."""
        return False

    def run(self, buffers: Any, rows: Any, read: Callable[[Any, Any, Any], None]) -> None:
        """Let `read` fill the buffers, by this mover; see `Collector.gather`."""
        read(self, buffers, rows)

    def fill(self, buffers: Any, table: Table, rows: Any) -> None:
        """Gather a batch of one table."""
        if self.layout.packed:
            if rows.spans is None:
                rows.spans = self.layout.measure(table, rows)
            if self.layout.tree:
                count, rows = len(rows), tree_rows(table, rows)
                buffers.segments, buffers.leaders = len(rows) - count, rows.leaders
        self.begin(buffers, rows)
        self.copy(buffers, table, rows)
        self.finish(buffers, rows)

    def begin(self, buffers: Any, rows: Any) -> None:
        """Prepare the buffers for rows; packed ones have their `spans`. Called again when these have changed.

        Raises:
            SchemaError: a packed batch would have 2**31 steps or more.
        """

    def copy(self, buffers: Any, table: Table, rows: Any, which: Array | None = None) -> None:
        """Move rows of a table of this machine, its disk included; `which`: their numbers, int64 [m], None for all.

        Raises:
            LostRowsError: trajectories cannot be read from disk. CorruptTableError: the index is corrupt.
        """
        raise NotImplementedError

    def flush(self, buffers: Any) -> None:
        """Start what `copy` has prepared."""

    def place(self, buffers: Any, part: Any, numbers: Array) -> None:
        """Move rows out of staging memory, which is given back when it has been read.

        Args:
            part: `Part`, or `SpanPart` of a packed batch. numbers: of packed batches, as for `SpanPart.placed`.
        """
        raise NotImplementedError

    def load(self, buffers: Any, copy: Callable[[Array, Array], None], which: Array) -> None:
        """Let `copy` put kept rows into their places: it takes the address of each piece, and the rows there."""
        raise NotImplementedError

    def finish(self, buffers: Any, rows: Any) -> None:
        """Write what a batch has by row, compute what is computed, launch what is left."""
        raise NotImplementedError


class HostMover(RowMover):
    """Fills batches by the CPU's loop.

    Args:
        layout: of the batches. pinned: whether they lie in pinned memory, from which a GPU gets copies.
        only: the table of all rows, so that a small batch may be gathered under its lock; None for several.
        arrays: whether it copies arrays of ragged columns; else text alone, and a GPU reads the arrays.
        decodes_on: as of `RowMover`.
    """

    def __init__(
        self,
        layout: Any,
        *,
        pinned: bool = False,
        only: Table | None = None,
        arrays: bool = True,
        decodes_on: torch.device | None = None,
    ) -> None:
        self.layout, self.pinned, self.only, self.decodes_on = layout, pinned, only, decodes_on
        self.ragged = {
            name: values for name, values in layout.ragged.items() if arrays or values.kind != "array"
        }
        self.staging = Staging(pinned=False)


class CudaMover(RowMover):
    """Fills batches by a GPU that reads the tables itself.

    Args:
        layout: of the batches. device: the GPU. tables: that it reads.
        programs: size of the kernels' grids, see `gear_loader.kernels.gather`.

    Attributes:
        follows: regions with blocks on the device: batches come after what is on its way there.
    """

    zero_copy = True

    def __init__(
        self, layout: Any, *, device: torch.device, programs: int | None, tables: Sequence[Table]
    ) -> None:
        self.layout, self._device, self._programs = layout, device, programs
        self.follows = [table._engine.region for table in tables if table._engine.device is not None]
        self.staging = Staging(pinned=device.type == "cuda")

    def follow(self) -> None:
        """Let what is queued from here on come after what is on its way into the memory of `follows`."""
        for region in self.follows:
            if region.device_memory is not None:  # else it is closed
                region.device_memory.follow(current_stream(self._device))

    def run(self, buffers: Any, rows: Any, read: Callable[[Any, Any, Any], None]) -> None:
        """Let `read` queue a batch on the current stream, and record `filled` after it."""
        gpu: GpuSide = buffers.gpu
        # The host memory of the previous batch in these buffers is about to be overwritten. That batch was delivered,
        # so this waits only if the host is ahead of the GPU by as many batches as there are buffers.
        gpu.filled.synchronize()
        while gpu.parts:
            self.staging.give(gpu.parts.pop())
        self.follow()
        graph = gpu.work.graph
        try:
            read(self, buffers, rows)
        finally:  # also after a failed batch, whose queued part reads the same memory
            gpu.filled.record(current_stream(self._device))
            if gpu.work.graph is not graph:  # it refers to the batch's memory
                buffers.references = None
