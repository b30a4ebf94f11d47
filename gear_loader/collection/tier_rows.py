"""Rows of a batch of which some lie on disk only: those are read into staging memory and gathered from there.

For a GPU they are gathered into pinned memory, from which `gear_loader.kernels.place` puts them into the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gear_loader.collection.plans import Output, window_columns
from gear_loader.collection.sources import StagedRows
from gear_loader.kernels.plan import LINE, MASK, OUT, PlacePlan
from gear_loader.native import gathering, threads
from gear_loader.storage.schema import Schema
from gear_loader.storage.selected_rows import Reach
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["TierRows", "TierStaging"]

_LONGEST_BLOCK = 64
"""Most steps of a block in staging memory: fewer steps beside a window are read."""


class TierRows:
    """Gathers rows of a table with a disk tier. The caller holds their read ticket.

    Args:
        table: with a disk tier. reach: of the windows. row_bytes: bytes of a row of a batch.
    """

    def __init__(self, table: Table, reach: Reach, row_bytes: int) -> None:
        self.table, self._reach, self._row_bytes = table, reach, row_bytes
        block_steps = min(table._engine.region.layout.block_steps, _LONGEST_BLOCK)
        # Not the bound method, which would hold the table.
        self._staged = StagedRows(
            lambda: table._engine.tier_reader(), table.schema, reach, row_bytes, block_steps
        )

    def outside(self, slots: Array) -> Array:
        """Which trajectories lie on disk only now, bool [n]."""
        found: Array = self.table._engine.index.arrays.extent[slots, 1] < 0
        return found

    def gather(
        self,
        columns: Array,
        sources: Sequence[str],
        slots: Array,
        anchors: Array,
        generations: Array,
        rows: Array | None = None,
    ) -> int:
        """Fill rows of a batch in host memory.

        Args:
            columns: int64 [C, WIDTH], the plan of the batch. sources: the table's column that each of its rows reads.
            slots, anchors, generations: int64 [n]. rows: int64 [n], distinct: row of the batch for each entry; None:
                row b for entry b.

        Returns:
            Number of rows that were read from disk.

        Raises:
            LostRowsError: trajectories cannot be read. CorruptTableError: see `TableReader.check_gathered`.
        """
        extent, block_ids = self.table._engine.reader().index_arrays()
        steps = self.table._engine.region.layout.block_steps

        def inside(which: Array) -> int:
            return threads.gather(
                columns,
                slots[which],
                anchors[which],
                extent,
                block_ids,
                steps,
                self._row_bytes,
                rows=which if rows is None else rows[which],
            )

        hits, which = self._split(slots, inside)
        self.table._engine.tier_reader().count_hits(len(hits))
        if len(which):
            self.read(
                columns,
                sources,
                slots[which],
                anchors[which],
                generations[which],
                which if rows is None else rows[which],
            )
        return len(which)

    def resolve(self, slots: Array, anchors: Array, extent: Array, ids: Array) -> tuple[Array, Array]:
        """Copy the index entries of the windows of trajectories in memory; see `gear_loader.native.gathering.resolve`.

        Args:
            slots, anchors: int64 [n]. extent: int64 [n, 3]. ids: int32 [n, K].

        Returns:
            Entries in memory, int64 [m], whose index entries are the first m of `extent` and `ids`; and the others.
        """
        lengths, block_ids = self.table._engine.reader().index_arrays()
        layout = self.table._engine.region.layout

        def inside(which: Array) -> int:
            bad: int = gathering.resolve(
                slots[which],
                anchors[which],
                lengths,
                block_ids,
                layout.block_steps,
                self._reach.first,
                self._reach.last,
                extent,
                ids,
                layout.num_blocks,
                self._reach.once,
            )
            return bad

        hits, outside = self._split(slots, inside)
        self.table._engine.tier_reader().count_hits(len(hits))
        return hits, outside

    def _split(self, slots: Array, inside: Callable[[Array], int]) -> tuple[Array, Array]:
        """Call a function with the entries in memory, again if some of them were moved to disk meanwhile.

        Args:
            inside: takes int64 [m] and returns the number of invalid windows.

        Returns:
            Entries in memory and on disk only, int64 each.
        """
        extent = self.table._engine.index.arrays.extent
        while True:
            places = extent[slots, 1]
            which, outside = np.flatnonzero(places >= 0), np.flatnonzero(places < 0)
            bad = inside(which) if len(which) else 0
            if not bad:
                return which, outside
            if (extent[slots, 1] == places).all():  # else some were moved to disk meanwhile, and may be back
                self.table._engine.reader().check_gathered(bad)

    def read(
        self,
        columns: Array,
        sources: Sequence[str],
        slots: Array,
        anchors: Array,
        generations: Array,
        rows: Array | None,
    ) -> None:
        """Read trajectories that lie on disk only, and gather their windows. Arguments and errors as of `gather`."""
        bad = self._staged.read(columns, sources, slots, anchors, generations, rows)
        self.table._engine.reader().check_gathered(bad)


class TierStaging:
    """Places the rows of a batch that lie on disk only on a GPU, out of pinned memory.

    Args:
        schema: of the table. outputs: of the batch, on the GPU.

    Attributes:
        place: plan of `gear_loader.kernels.place`.
        memory: uint8, pinned: of the last call of `room`.
    """

    def __init__(self, schema: Schema, outputs: Sequence[Output]) -> None:
        self._sources = [output.column for output in outputs]
        self._columns = window_columns(schema, self._sources, [output.window for output in outputs])
        self._masked = [i for i, output in enumerate(outputs) if output.mask is not None]
        outs = [output.out for output in outputs]
        outs += [output.mask.view(torch.uint8) for output in outputs if output.mask is not None]
        self.place = PlacePlan([out.view(len(out), -1) for out in outs])
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def room(self, count: int) -> torch.Tensor:
        """The memory, with room for so many rows. The GPU does not read it any more."""
        size = self.place.size(count)
        if len(self.memory) < size:
            size = min(2 * size, self.place.size(self.place.batch_size))
            memory = torch.empty(size + LINE, dtype=torch.uint8, device="cpu", pin_memory=True)
            first = -memory.data_ptr() % LINE
            self.memory = memory[first : first + size]
        return self.memory

    def read(
        self, tier: TierRows, slots: Array, anchors: Array, generations: Array, memory: torch.Tensor
    ) -> None:
        """Read rows into pinned memory of ``place.size(n)`` bytes; else as `TierRows.read`."""
        base, outputs = memory.data_ptr(), len(self._sources)
        places = [base + offset for offset in self.place.offsets(len(slots))]
        columns = self._columns
        columns[:, OUT] = places[:outputs]
        columns[self._masked, MASK] = places[outputs:]
        tier.read(columns, self._sources, slots, anchors, generations, None)
