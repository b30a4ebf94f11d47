"""Rows of a batch whose trajectories lie on disk only: read into staging memory and gathered from there on the CPU.

The staging memory holds, of each such trajectory, the blocks that the batch's windows touch, column by column. It is
gathered by the same loop as a table's blocks, so windows, padding, masks and final steps are the same.
"""

from __future__ import annotations

import numpy as np

from gear_loader.collection.plans import Output
from gear_loader.kernels.plan import BASE, BLOCKS, STEP_STRIDE, STRIDE
from gear_loader.native import threads
from gear_loader.storage.rows import Reach, SelectedRows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, data_address

__all__ = ["TierRows"]

_LONGEST_BLOCK = 64
"""Most steps of a block in staging memory: fewer steps beside a window are read."""


class TierRows:
    """Gathers rows whose trajectories lie on disk only.

    Args:
        table: with a disk tier. reach: of the windows. row_bytes: bytes of a row of a batch.
    """

    def __init__(self, table: Table, reach: Reach, row_bytes: int) -> None:
        self._table, self._reach, self._row_bytes = table, reach, row_bytes
        self._block_steps = min(table.region.layout.block_steps, _LONGEST_BLOCK)
        # Memory of gathers that have ended, column -> uint8 [bytes]; several threads may gather at once.
        self._spare: list[dict[str, Array]] = []

    def outside(self, slots: Array) -> Array:
        """Which trajectories lie on disk only now, bool [n]."""
        found: Array = self._table.index.arrays.extent[slots, 1] < 0
        return found

    def gather(self, columns: Array, outputs: tuple[Output, ...], rows: SelectedRows, which: Array) -> int:
        """Read the trajectories of some rows, and gather these rows into the batch.

        Args:
            columns: int64 [C, WIDTH], the plan of the batch. outputs: what each column of it fills.
            rows: of the batch, under a read ticket. which: int64 [n], those whose trajectories lie on disk.

        Returns:
            As `gear_loader.native.copying.gather`.

        Raises:
            LostRowsError: trajectories cannot be read.
        """
        schema, size = self._table.schema, self._block_steps
        slots, anchors = rows.slots[which], rows.anchors[which]
        chosen, some, place = np.unique(slots, return_index=True, return_inverse=True)
        extent = self._table.index.arrays.extent[chosen]
        totals = extent[:, 0] + extent[:, 2]
        low, high = totals - 1, np.zeros_like(totals)
        np.minimum.at(low, place, np.clip(anchors + self._reach.first, 0, extent[place, 0] - 1))
        np.maximum.at(high, place, np.clip(anchors + self._reach.last, 0, totals[place] - 1))
        low //= size
        blocks = high // size - low + 1
        begins = np.cumsum(blocks) - blocks
        first = low * size
        counts = np.minimum(totals, (low + blocks) * size) - first
        memory = self._spare.pop() if self._spare else {}
        outs: dict[str, tuple[Array, Array]] = {}
        for name in {output.column for output in outputs}:
            step = schema[name].step_bytes
            once = schema[name].trajectory
            needed = (len(chosen) if once else int(blocks.sum()) * size) * step
            if name not in memory or len(memory[name]) < needed:
                memory[name] = np.empty(needed, dtype=np.uint8)
            outs[name] = memory[name], (np.arange(len(chosen)) if once else begins * size) * step
        self._table.tier_reader().read(chosen, rows.generations[which][some], first, counts, outs)
        # The blocks of each trajectory from `low` on, one trajectory after another; columns per trajectory have one
        # block of each.
        staged, bad = extent.copy(), 0
        for once in (False, True):
            part = [i for i, output in enumerate(outputs) if schema[output.column].trajectory is once]
            if not part:
                continue
            plan = columns[part]
            for row, i in zip(plan, part, strict=True):
                step = schema[outputs[i].column].step_bytes
                row[BASE] = data_address(memory[outputs[i].column])
                row[STRIDE] = step if once else size * step
                row[STEP_STRIDE] = step
                row[BLOCKS] = len(chosen) if once else int(blocks.sum())
            staged[:, 1] = np.arange(len(chosen)) if once else begins - low
            ids = np.arange(len(chosen) if once else int(blocks.sum()), dtype=np.int32)
            bad += threads.gather(
                plan,
                np.ascontiguousarray(place.reshape(-1), dtype=np.int64),
                anchors,
                staged,
                ids,
                size,
                self._row_bytes,
                rows=which,
            )
        self._spare.append(memory)
        return bad
