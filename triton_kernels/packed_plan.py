"""Packed plans: the columns of packed batches, and the work of one batch: one piece of memory that the host writes.

::

    header      int64 [WORK_WIDTH]
    columns     int64 [C, PACKED_WIDTH]: of all sources of the batch, one after another
    tiles       int64 [T]: ``group << 32 | shift << 24 | column``: the first group of a tile, whose groups have
                ``1 << shift`` lines each
    groups      int64 [G]: ``line << 32 | piece``: lines of a piece one after another, the first of which has this
                number, counted from the line of the piece's first byte; a line after the piece's last does nothing
    pieces      int32 [P, PIECE_WIDTH]: those of steps, then those of columns per trajectory
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from gear_loader.kernels.plan import LINE
from gear_loader.kernels.tensor_checks import check_tensor, word_of

__all__ = [
    "PACKED_BASE",
    "PACKED_OUT",
    "PACKED_STEP_BYTES",
    "PACKED_STRIDE",
    "PACKED_WIDTH",
    "PIECE_BLOCK",
    "PIECE_FIRST",
    "PIECE_NUMBER",
    "PIECE_OUT",
    "PIECE_STEPS",
    "PIECE_WIDTH",
    "TABLE_ONCE",
    "TABLE_WIDTH",
    "TABLE_WORDS",
    "TILE_LINES",
    "WORK_COLUMNS",
    "WORK_END_4",
    "WORK_END_16",
    "WORK_GROUPS",
    "WORK_LINE_TILES",
    "WORK_NUM_TILES",
    "WORK_PIECES",
    "WORK_ROWS",
    "WORK_STEPS",
    "WORK_TILES",
    "WORK_WIDTH",
    "PackedColumn",
    "PackedPlan",
]

TILE_LINES = 128
"""Lines of a tile, all of one column."""

# One row of the columns: int64 [PACKED_WIDTH].
PACKED_BASE = 0  # address of the column in host memory
PACKED_STRIDE = 1  # bytes from block to block, a multiple of LINE
PACKED_STEP_BYTES = 2
PACKED_OUT = 3  # address of the output [capacity, step bytes]
PACKED_WIDTH = 4

# A plan's table tells the host two numbers more: int64 [TABLE_WIDTH].
TABLE_ONCE = 4  # whether the column has one value per trajectory
TABLE_WORDS = 5  # words in which it is written: 0 of 16 bytes, 1 of 4, 2 single bytes
TABLE_WIDTH = 6

# One piece: int32 [PIECE_WIDTH]. Steps that lie one after another in host memory and in the batch.
PIECE_BLOCK = 0  # block of its first step
PIECE_FIRST = 1  # its first step, counted from the start of that block
# Number of steps; more than a block holds only if all columns fill their blocks without padding.
PIECE_STEPS = 2
PIECE_OUT = 3  # its first step in the batch, or the row of a column per trajectory
PIECE_NUMBER = 4  # number of its first step in the trajectory
PIECE_WIDTH = 5

# The header of a batch's work: int64 [WORK_WIDTH].
WORK_END_16 = 0  # where the tiles of columns written in words of 16 bytes end, which are the first;
WORK_END_4 = 1  # those of 4;
WORK_LINE_TILES = 2  # those of single bytes;
WORK_NUM_TILES = 3  # and those of `position`, which are the last
WORK_COLUMNS = 4  # first word of each list, counted from the header
WORK_TILES = 5
WORK_GROUPS = 6
WORK_PIECES = 7
WORK_STEPS = 8  # steps of the batch
WORK_ROWS = 9  # rows of the batch
WORK_WIDTH = 16


@dataclasses.dataclass(frozen=True)
class PackedColumn:
    """One column of a packed batch.

    Attributes:
        source: uint8 [blocks, stride], the blocks that hold the column; its address and stride are multiples of 128. A
            step lies after another, from a block's first byte on. None for rows that lie elsewhere in each batch.
        out: uint8 [capacity, step_bytes], contiguous; on the device that gathers.
        once: whether the column has one value per trajectory, which is a row of `out`.
    """

    source: torch.Tensor | None
    out: torch.Tensor
    once: bool = False

    def check(self) -> None:
        """Raise ValueError or TypeError unless the column fits the kernel."""
        for name, tensor in (("source", self.source), ("out", self.out)):
            if tensor is not None and (tensor.dtype != torch.uint8 or tensor.ndim != 2):
                raise TypeError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; expected uint8 with 2 dimensions."
                )
        if not self.out.is_contiguous() or self.out.shape[1] < 1:
            raise ValueError(
                f"out {list(self.out.shape)} has strides {self.out.stride()}; expected contiguous steps of at least "
                "one byte."
            )
        if self.source is None:
            return
        if self.source.stride(0) % LINE or self.source.data_ptr() % LINE or self.source.stride(1) != 1:
            raise ValueError(
                f"source has strides {self.source.stride()} and address {self.source.data_ptr():#x}; expected bytes "
                f"one after another, in blocks at multiples of {LINE}."
            )
        if self.out.shape[1] > self.source.shape[1]:
            raise ValueError(
                f"A step of {self.out.shape[1]} bytes does not fit into blocks of {self.source.shape[1]} bytes."
            )

    @property
    def word(self) -> int:
        """Bytes of the words in which its output is written: 16, 4 or 1."""
        return word_of(self.out.shape[1], self.out.data_ptr())


class PackedPlan:
    """The validated columns of packed batches.

    Args:
        columns: at least one; those of steps have as many rows of `out`.
        position: int32 [capacity of steps], on the same device: the steps' numbers in their trajectories.

    Attributes:
        table: int64 [C, TABLE_WIDTH] on the CPU, from which a batch's work is made; base and stride are 0 of columns
            without a source.

    Raises:
        TypeError, ValueError: a column that the kernel does not support.
    """

    def __init__(self, columns: Sequence[PackedColumn], position: torch.Tensor) -> None:
        if not columns:
            raise ValueError("No columns were given; expected at least one.")
        for column in columns:
            column.check()
        check_tensor("position", position, torch.int32, "[capacity]")
        self.columns = tuple(columns)
        self.device = position.device
        self.position = position
        steps = {len(position), *(len(each.out) for each in columns if not each.once)}
        if len(steps) > 1 or any(each.out.device != self.device for each in columns):
            raise ValueError("The columns differ in capacity or device; expected the same for all.")
        words = (16, 4, 1)
        self.table = torch.tensor(
            [
                [
                    *((0, 0) if each.source is None else (each.source.data_ptr(), each.source.stride(0))),
                    *(each.out.shape[1], each.out.data_ptr(), int(each.once), words.index(each.word)),
                ]
                for each in self.columns
            ],
            dtype=torch.int64,
            device="cpu",
        )

    def check_work(self, work: torch.Tensor) -> None:
        """Raise TypeError or ValueError unless the kernel can read it. Values are not checked."""
        check_tensor("work", work, torch.int64, "[words]", device=self.device)
        if len(work) < WORK_WIDTH:
            raise ValueError(f"work is {list(work.shape)}; expected at least {WORK_WIDTH} words.")
