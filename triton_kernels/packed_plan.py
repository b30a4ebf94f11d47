"""Packed plans: the columns of packed batches as a table of addresses and sizes, and the list of one batch's pieces."""

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
    "TILE_LINES",
    "PackedColumn",
    "PackedPlan",
    "PackedWork",
]

TILE_LINES = 128
"""Lines of a tile, all of one column."""

# One row of the table of columns: int64 [PACKED_WIDTH].
PACKED_BASE = 0  # address of the column in host memory
PACKED_STRIDE = 1  # bytes from block to block, a multiple of LINE
PACKED_STEP_BYTES = 2
PACKED_OUT = 3  # address of the output [capacity, step bytes]
PACKED_WIDTH = 4

# One piece: int32 [PIECE_WIDTH]. Steps that lie one after another in host memory and in the batch.
PIECE_BLOCK = 0  # block of its first step
PIECE_FIRST = 1  # its first step, counted from the start of that block
# Number of steps; more than a block holds only if all columns fill their blocks without padding.
PIECE_STEPS = 2
PIECE_OUT = 3  # its first step in the batch, or the row of a column per trajectory
PIECE_NUMBER = 4  # number of its first step in the trajectory
PIECE_WIDTH = 5


@dataclasses.dataclass(frozen=True)
class PackedColumn:
    """One column of a packed batch.

    Attributes:
        source: uint8 [blocks, stride], the blocks that hold the column; its address and stride are multiples of 128. A
            step lies after another, from a block's first byte on.
        out: uint8 [capacity, step_bytes], contiguous; on the device that gathers.
        once: whether the column has one value per trajectory, which is a row of `out`.
    """

    source: torch.Tensor
    out: torch.Tensor
    once: bool = False

    def check(self) -> None:
        """Raise ValueError or TypeError unless the column fits the kernel."""
        for name, tensor in (("source", self.source), ("out", self.out)):
            if tensor.dtype != torch.uint8 or tensor.ndim != 2:
                raise TypeError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; expected uint8 with 2 dimensions."
                )
        if not self.out.is_contiguous() or self.source.stride(1) != 1 or self.out.shape[1] < 1:
            raise ValueError(
                f"out {list(self.out.shape)} has strides {self.out.stride()}, source {self.source.stride()}; expected "
                "contiguous steps of at least one byte."
            )
        if self.source.stride(0) % LINE or self.source.data_ptr() % LINE:
            raise ValueError(
                f"source has stride {self.source.stride(0)} and address {self.source.data_ptr():#x}; expected "
                f"multiples of {LINE}."
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
    """The validated columns of packed batches, as a table on the CPU and on the gathering device.

    Args:
        columns: at least one; those of steps have as many rows of `out`, and so have those per trajectory.
        position: int32 [capacity of steps], on the same device: the steps' numbers in their trajectories.

    Attributes:
        columns: ordered by the words in which they are written, the widest first.
        table: int64 [C, PACKED_WIDTH] on the CPU.
        kinds: int64 [C, 3] on the CPU, of each column: bytes of a step, whether it has one value per trajectory, and
            which words it is written in: 0 of 16 bytes, 1 of 4, 2 single bytes. What a batch's list is made from.

    Raises:
        TypeError, ValueError: a column that the kernel does not support.
    """

    def __init__(self, columns: Sequence[PackedColumn], position: torch.Tensor) -> None:
        if not columns:
            raise ValueError("No columns were given; expected at least one.")
        for column in columns:
            column.check()
        check_tensor("position", position, torch.int32, "[capacity]")
        self.columns = tuple(sorted(columns, key=lambda column: -column.word))
        self.device = position.device
        self.position = position
        steps = {len(position), *(len(each.out) for each in columns if not each.once)}
        rows = {len(each.out) for each in columns if each.once}
        if len(steps) > 1 or len(rows) > 1 or any(each.out.device != self.device for each in columns):
            raise ValueError("The columns differ in capacity or device; expected the same for all.")
        words = (16, 4, 1)
        self.table = torch.tensor(
            [
                [each.source.data_ptr(), each.source.stride(0), each.out.shape[1], each.out.data_ptr()]
                for each in self.columns
            ],
            dtype=torch.int64,
            device="cpu",
        )
        self.kinds = torch.tensor(
            [[each.out.shape[1], int(each.once), words.index(each.word)] for each in self.columns],
            dtype=torch.int64,
            device="cpu",
        )
        self._device_table: torch.Tensor | None = None

    @property
    def device_table(self) -> torch.Tensor:
        """`table` on the gathering device: a copy, which waits when it is first asked for; or what was set, int64
        [C, PACKED_WIDTH], to which the caller copies `table` before the gather."""
        if self._device_table is None:
            self._device_table = self.table.to(self.device)
        return self._device_table

    @device_table.setter
    def device_table(self, table: torch.Tensor) -> None:
        if table.dtype != torch.int64 or table.shape != self.table.shape or table.device != self.device:
            raise ValueError(
                f"device_table is {table.dtype} {list(table.shape)} on {table.device}; expected torch.int64 "
                f"{list(self.table.shape)} on {self.device}."
            )
        self._device_table = table


@dataclasses.dataclass(frozen=True)
class PackedWork:
    """What one packed batch is gathered from, in tiles of `TILE_LINES` lines of one column.

    Attributes:
        pieces: int32 [P, PIECE_WIDTH]: those of steps, then one a row with the values of its trajectory.
        groups: int64 [G]: ``line << 32 | piece``: lines of a piece one after another, the first of which has this
            number, counted from the line of the piece's first byte. A line after the piece's last one does nothing.
        tiles: int64 [T]: ``group << 32 | shift << 16 | column``: the first group of a tile, whose groups have
            ``1 << shift`` lines each.
        ends: where in `tiles` those of columns written in words of 16 bytes, of 4, and by single bytes end, and those
            of `position`, which are the last.
        num_pieces: pieces of steps, and rows.
    """

    pieces: torch.Tensor
    groups: torch.Tensor
    tiles: torch.Tensor
    ends: tuple[int, int, int, int]
    num_pieces: tuple[int, int]

    def check(self, device: torch.device) -> None:
        """Raise TypeError or ValueError unless the kernel can read it. Values are not checked."""
        check_tensor("pieces", self.pieces, torch.int32, "[P, 5]", device=device)
        check_tensor("groups", self.groups, torch.int64, "[G]", device=device)
        check_tensor("tiles", self.tiles, torch.int64, "[T]", device=device)
        if list(self.ends) != sorted(self.ends) or self.ends[-1] != len(self.tiles):
            raise ValueError(
                f"ends is {self.ends} for {len(self.tiles)} tiles; expected that the last is as many."
            )
        if len(self.pieces) != sum(self.num_pieces):
            raise ValueError(
                f"pieces is {list(self.pieces.shape)}; expected [{sum(self.num_pieces)}, {PIECE_WIDTH}]."
            )
