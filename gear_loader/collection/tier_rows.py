"""Rows of a table, of which some may lie on disk only: those are read into staging memory and gathered from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gear_loader.collection.sources import StagedRows
from gear_loader.native import gathering, threads
from gear_loader.storage.selected_rows import Reach
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

_LONGEST_BLOCK = 64
"""Most steps of a block in staging memory: fewer steps beside a window are read."""


class TierRows:
    """Gathers windows of a table of this machine, its disk tier included. The caller holds the rows' read ticket.

    Args:
        table: the table. reach: of the windows. row_bytes: bytes of a row of a batch.
    """

    def __init__(self, table: Table, reach: Reach, row_bytes: int) -> None:
        self.table, self._reach, self._row_bytes = table, reach, row_bytes
        block_steps = min(table._engine.region.layout.block_steps, _LONGEST_BLOCK)
        # Not the bound method, which would hold the table.
        self._staged = StagedRows(
            lambda: table._engine.tier_reader(), table.schema, reach, row_bytes, block_steps
        )

    def outside(self, slots: Array) -> Array:
        """Which trajectories lie on disk only now, or on a GPU, bool [n]."""
        found: Array = self.table._engine.index.arrays.extent[slots, 1] < 0
        return found | (self.table._engine.device is not None)

    def gather(
        self,
        columns: Array,
        sources: Sequence[str],
        slots: Array,
        anchors: Array,
        generations: Array | Callable[[], Array],
        rows: Array | None = None,
    ) -> int:
        """Fill rows of a batch in host memory; several threads may do so at once.

        Args:
            columns: int64 [C, WIDTH], the plan of the batch. sources: the table's column that each of its rows reads.
            slots, anchors, generations: int64 [n], contiguous, the last perhaps by a function that is called if some
                rows are read. rows: int64 [n], distinct: row of the batch for each entry; None: row b for entry b.

        Returns:
            Number of rows that were read from disk.

        Raises:
            LostRowsError: trajectories cannot be read. CorruptTableError: see `TableReader.check_gathered`.
        """
        extent, block_ids = self.table._engine.reader().index_arrays()
        steps = self.table._engine.region.layout.block_steps

        def inside(which: slice | Array) -> int:
            into = rows[which] if rows is not None else None if isinstance(which, slice) else which
            names = slots[which], anchors[which]
            return threads.gather(columns, *names, extent, block_ids, steps, self._row_bytes, rows=into)

        _, which = split_rows(self.table, slots, inside)
        if len(which):
            known = generations() if callable(generations) else generations
            names = slots[which], anchors[which], known[which]
            self.read(columns, sources, *names, which if rows is None else rows[which])
        return len(which)

    def resolve(self, slots: Array, anchors: Array, extent: Array, ids: Array) -> tuple[Array | None, Array]:
        """Copy the index entries of the windows of trajectories in memory; see `gear_loader.native.gathering.resolve`.

        Args:
            slots, anchors: int64 [n]. extent: int64 [n, 3]. ids: int32 [n, K].

        Returns:
            Entries in memory, int64 [m], None for all, whose index entries are the first m of `extent` and `ids`; and
            those on disk only.

        Raises:
            CorruptTableError: see `TableReader.check_gathered`.
        """

        def inside(which: slice | Array) -> int:
            return resolved(self.table, slots[which], anchors[which], self._reach, extent, ids)

        return split_rows(self.table, slots, inside, on_gpu=True)

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


def resolved(table: Table, slots: Array, anchors: Array, reach: Reach, extent: Array, ids: Array) -> int:
    """`resolve`, but return the number of invalid windows instead of raising an error."""
    lengths, block_ids = table._engine.reader().index_arrays()
    layout, (first, last, once) = table._engine.region.layout, reach
    steps, blocks = layout.block_steps, layout.num_blocks
    bad: int = gathering.resolve(
        slots, anchors, lengths, block_ids, steps, first, last, extent, ids, blocks, once
    )
    return bad


def resolve(
    table: Table, slots: Array, anchors: Array, reach: Reach | tuple[int, int], extent: Array, ids: Array
) -> None:
    """Copy the index entries of a batch's windows.

    Args:
        table: table of the rows.
        slots, anchors: int64 [B].
        reach: `Reach` of the windows.
        extent: int64 [B, 3], filled with lengths in steps, the positions in `ids` where the trajectories' block tables
            would start (may be negative, because `ids` holds the blocks of the windows only), and final steps (0 or 1).
        ids: int32 [B, K], filled with the windows' blocks; with ``reach.once`` the last of K is the trajectory's first.
    """
    table._engine.reader().check_gathered(resolved(table, slots, anchors, Reach(*reach), extent, ids))


def split_rows(
    table: Table, slots: Array, inside: Callable[[slice | Array], int], *, on_gpu: bool = False
) -> tuple[Array | None, Array]:
    """Call a function with the entries in memory, again if some of them were moved to disk meanwhile; count them.

    Args:
        slots: int64 [n]. inside: takes entries, a slice of all or int64 [m], and returns the number of invalid ones.
        on_gpu: whether a GPU gathers them, which reads the memory where the table lies; the CPU reads none of a GPU.

    Returns:
        Entries in memory, int64 [m], or None for all; and those on disk only, or that the CPU does not read, int64.

    Raises:
        CorruptTableError: see `TableReader.check_gathered`.
    """
    engine = table._engine
    apart = engine.device is not None and not on_gpu  # what lies on a GPU is read by others
    if apart and not engine.region.layout.host_blocks:
        return slots[:0], np.arange(len(slots))
    if not apart and (not engine.has_tier or not engine.num_spilled):
        bad = inside(slice(None))
        if not engine.has_tier:
            engine.reader().check_gathered(bad)
        if not bad:  # else one may have been on disk meanwhile
            return None, slots[:0]
    extent = engine.reader().index_arrays()[0]
    while True:
        places = extent[slots, 1]
        found = engine.index.arrays.levels(places) == 2 if apart else places >= 0
        which, outside = np.flatnonzero(found), np.flatnonzero(~found)
        bad = inside(which) if len(which) else 0
        if not bad:
            if engine.has_tier and engine.num_spilled:
                engine.tier_reader().count_hits(len(which))
            return which, outside
        if (extent[slots, 1] == places).all():  # else some were moved to disk meanwhile, and may be back
            engine.reader().check_gathered(bad)
