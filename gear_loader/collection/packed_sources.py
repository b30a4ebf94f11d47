"""Where a GPU gathers the rows of a packed batch from: the blocks of tables, and rows that lie in staging memory.

Staged rows come from a disk or from another node. Their steps lie one after another, column by column, so one piece
is a whole row, or a part of one::

    column  uint8 [total, step bytes], of a column per trajectory uint8 [n, bytes], from a multiple of 128 bytes on
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch

from gear_loader.kernels.packed_plan import (
    PIECE_BLOCK,
    PIECE_FIRST,
    PIECE_NUMBER,
    PIECE_OUT,
    PIECE_STEPS,
    PIECE_WIDTH,
)
from gear_loader.kernels.plan import LINE
from gear_loader.native.packed_lines import list_pieces
from gear_loader.storage.layout import round_up
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["PackedSource", "StagedPieces", "TablePieces", "TableSources", "staged_pieces", "starts_of"]


@dataclasses.dataclass(frozen=True)
class TablePieces:
    """Rows in the blocks of a table, which the GPU can read.

    Attributes:
        table: the table.
        pieces: int32 [P, PIECE_WIDTH], see `gear_loader.kernels.packed_plan`.
        num_pieces: those of steps; the others are those of columns per trajectory.
    """

    table: Table
    pieces: Array
    num_pieces: int


@dataclasses.dataclass(frozen=True)
class StagedPieces:
    """Rows in staging memory.

    Attributes:
        memory: uint8 [bytes], pinned, from a multiple of 128 bytes on; it must not change before the gather has run.
        offsets: column -> first byte.
        pieces, num_pieces: as of `TablePieces`; all are in block 0.
    """

    memory: torch.Tensor
    offsets: Mapping[str, int]
    pieces: Array
    num_pieces: int

    def source(self, column: str) -> torch.Tensor:
        """The values of a column and what follows them, as one block, uint8 [1, bytes]."""
        first = self.offsets[column]
        end = len(self.memory) - (len(self.memory) - first) % LINE
        return self.memory[None, first:end]


PackedSource = TablePieces | StagedPieces


def starts_of(spans: Array) -> Array:
    """``cu_seqlens`` of rows of these spans, int64 [2, n]: int32 [n + 1]."""
    starts: Array = np.zeros(spans.shape[1] + 1, dtype=np.int32)
    np.cumsum(spans[1], out=starts[1:])
    return starts


def staged_pieces(
    begins: Array, counts: Array, outs: Array, numbers: Array, once: tuple[Array, Array] | None
) -> tuple[Array, int]:
    """The pieces of staged rows, int32 [P, PIECE_WIDTH], and the number of those of steps.

    Args:
        begins, counts: first step in the memory, and steps, int64 [n]. outs: place of the first step in the batch.
        numbers: number of the first step in its trajectory.
        once: rows of the memory and of the batch that have the values of columns per trajectory, int64 [m] each; None
            if there are no such columns.
    """
    some = np.flatnonzero(counts)
    more = 0 if once is None else len(once[0])
    pieces: Array = np.zeros((len(some) + more, PIECE_WIDTH), dtype=np.int32)
    steps, rows = pieces[: len(some)], pieces[len(some) :]
    steps[:, PIECE_FIRST], steps[:, PIECE_STEPS] = begins[some], counts[some]
    steps[:, PIECE_OUT], steps[:, PIECE_NUMBER] = outs[some], numbers[some]
    if once is not None:
        rows[:, PIECE_FIRST], rows[:, PIECE_STEPS], rows[:, PIECE_OUT] = once[0], 1, once[1]
    assert PIECE_BLOCK == 0
    return pieces, len(some)


class TableSources:
    """Lists rows of one table for a packed batch, and reads those that lie on disk only. The caller holds their ticket.

    Args:
        table: the table. steps, once: columns of steps, and per trajectory, that are read.
    """

    def __init__(self, table: Table, steps: Collection[str], once: Collection[str]) -> None:
        self.table, self._steps, self._once = table, tuple(steps), tuple(once)
        layout, self._block_steps = table._engine.region.layout, table._engine.region.layout.block_steps
        strides = [
            (table._engine.region.blocks(name).strides[0], layout.columns[name].step_stride)
            for name in self._steps
        ]
        # Whether a block's last step lies before the first of the next one, in every column.
        self._adjoin = all(stride == self._block_steps * step for stride, step in strides)

    def list(
        self,
        slots: Array,
        generations: Array,
        spans: Array,
        starts: Array,
        which: Array,
        room: Callable[[int], torch.Tensor],
    ) -> list[PackedSource]:
        """Where rows of the table lie.

        Args:
            slots, generations: int64 [n], of all rows of the batch. spans: int64 [2, n]. starts: int32 [n + 1].
            which: int64 [m], numbers of the rows of this table.
            room: returns pinned memory of at least so many bytes, from a multiple of 128 bytes on.

        Raises:
            CorruptTableError: the index names no slot or block.
            LostRowsError: trajectories on disk cannot be read.
        """
        extent = self.table._engine.reader().index_arrays()[0]
        inside = which
        while True:
            if self.table._engine.has_tier:
                places = extent[slots[which], 1]
                inside = which[places >= 0]
            found, bad = self._list(slots, spans, starts, inside)
            if not bad or not self.table._engine.has_tier or (extent[slots[which], 1] == places).all():
                break  # else some of them were moved to disk meanwhile, and may be back
        self.table._engine.reader().check_gathered(bad)
        if len(inside) == len(which):
            return [found]
        outside = np.setdiff1d(which, inside, assume_unique=True)
        return [found, self._stage(slots, generations, spans, starts, outside, room)]

    def _list(self, slots: Array, spans: Array, starts: Array, which: Array) -> tuple[TablePieces, int]:
        """Rows in memory, and the number of invalid slots and blocks."""
        count, spans = len(which), np.ascontiguousarray(spans[:, which])
        most = int((spans[1] // self._block_steps + 2).sum()) + count
        pieces: Array = np.empty((most, PIECE_WIDTH), dtype=np.int32)
        extent, block_ids = self.table._engine.reader().index_arrays()
        found, bad = list_pieces(
            slots[which],
            spans,
            starts[which],
            extent,
            block_ids,
            self._block_steps,
            self.table._engine.region.layout.num_blocks,
            self._adjoin,
            bool(self._once),
            pieces,
        )
        pieces = pieces[: found + (count if self._once else 0)]
        pieces[found:, PIECE_OUT] = which[: len(pieces) - found]
        return TablePieces(self.table, pieces, found), bad

    def _stage(
        self,
        slots: Array,
        generations: Array,
        spans: Array,
        starts: Array,
        which: Array,
        room: Callable[[int], torch.Tensor],
    ) -> StagedPieces:
        """Read rows that lie on disk only into staging memory."""
        firsts, counts = spans[:, which]
        begins, total = np.cumsum(counts) - counts, int(counts.sum())
        sizes = {name: self.table.schema[name].step_bytes for name in (*self._steps, *self._once)}
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += round_up((len(which) if name in self._once else total) * size, LINE)
        memory = room(end)
        outs = {
            name: (
                memory.numpy(),
                offsets[name] + (np.arange(len(which)) if name in self._once else begins) * size,
            )
            for name, size in sizes.items()
        }
        self.table._engine.tier_reader().read(slots[which], generations[which], firsts, counts, outs)
        once = (np.arange(len(which)), which) if self._once else None
        return StagedPieces(memory, offsets, *staged_pieces(begins, counts, starts[which], firsts, once))
