"""Gather and place plans: a batch as a table of addresses and sizes, built once for a set of buffers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from gear_loader.kernels.tensor_checks import check_like, check_tensor, word_of

__all__ = [
    "BASE",
    "BLOCKS",
    "FINAL",
    "LENGTH",
    "LINE",
    "LINES",
    "MASK",
    "OFFSET",
    "OUT",
    "PAD",
    "PAD_EDGE",
    "PAD_HEAD",
    "PAD_KEEP",
    "PAD_TAIL",
    "PAIR",
    "PLACE_OUT",
    "PLACE_ROW_BYTES",
    "PLACE_WIDTH",
    "PLACE_WORD",
    "ROLE",
    "STEP_BYTES",
    "STEP_STRIDE",
    "STRIDE",
    "WIDTH",
    "GatherColumn",
    "GatherMask",
    "GatherPlan",
    "PlacePlan",
    "with_lines",
]

LINE = 128
"""Bytes of a line, which a GPU reads from host memory in one request."""

PAIR = 2 * LINE
"""Bytes of a unit of two lines: half as many addresses have to be computed."""

# One row of the table: int64 [WIDTH].
BASE = 0  # address of the column in host memory
STRIDE = 1  # bytes from block to block, a multiple of LINE
STEP_BYTES = 2  # bytes of a step
OUT = 3  # address of the output [batch, length, step bytes]
LENGTH = 4  # steps of the window
OFFSET = 5  # first step of the window relative to the anchor
PAD = 6  # PAD_KEEP, PAD_HEAD, PAD_TAIL, PAD_EDGE
MASK = 7  # address of the mask [batch, length], or 0
LINES = 8  # most units (lines, or pairs of lines) that a row of the batch can touch; 0: a mask, whose address is OUT
BLOCKS = 9  # blocks of the column: a block id is below it
FINAL = 10  # 1: the window may read the final step, which follows the last step; else 0
STEP_STRIDE = 11  # bytes from step to step in a block; the GPU's kernels expect STEP_BYTES
WIDTH = 12
ROLE = LINES  # of the CPU's loop: what a column is for, see `gear_loader.native.returns`; 0: a window at the anchor

PAD_KEEP, PAD_HEAD, PAD_TAIL, PAD_EDGE = range(4)


@dataclasses.dataclass(frozen=True)
class GatherColumn:
    """One column of a batch.

    Attributes:
        source: uint8 [blocks, stride], the blocks that hold the column; its address and stride are multiples of 128.
        out: uint8 [B, L, step_bytes], contiguous; on the device that gathers.
        offset: first step of the window relative to the anchor.
        pad: PAD_KEEP leaves padding in place, PAD_HEAD and PAD_TAIL collect it at one end. PAD_EDGE leaves it in place
            and fills it with the trajectory's first or last step; the others fill it with zeros.
        mask: bool [B, L], True where the step exists, or None.
        final: whether the window may read a trajectory's final step.
        once: whether a block has one value, of a whole trajectory, and the window shows that of its first block: an
            offset below 0 by more than any trajectory's length, and PAD_EDGE.
        inside: bytes before the column in a step of `source`, which may be a record of several columns.
        step_stride: bytes from step to step in a block; None: ``step_bytes``.
    """

    source: torch.Tensor
    out: torch.Tensor
    offset: int
    pad: int = PAD_KEEP
    mask: torch.Tensor | None = None
    final: bool = False
    once: bool = False
    inside: int = 0
    step_stride: int | None = None

    @property
    def step_bytes(self) -> int:
        return self.out.shape[2]

    @property
    def stride(self) -> int:
        """Bytes from step to step in a block."""
        return self.step_bytes if self.step_stride is None else self.step_stride

    def check(self, block_steps: int) -> None:
        """Raise ValueError or TypeError unless the column fits the kernels."""
        source, out, mask = self.source, self.out, self.mask
        for name, tensor, dims in (("source", source, 2), ("out", out, 3)):
            if tensor.dtype != torch.uint8 or tensor.ndim != dims:
                raise TypeError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; expected uint8 with {dims} dimensions."
                )
        if min(out.shape[1:]) < 1:
            raise ValueError(f"out is {list(out.shape)}; expected at least one step of at least one byte.")
        if not out.is_contiguous() or source.stride(1) != 1:
            raise ValueError(
                f"out and the rows of source must be contiguous; strides {out.stride()}, {source.stride()}."
            )
        if source.stride(0) % LINE or source.data_ptr() % LINE:
            raise ValueError(
                f"source has stride {source.stride(0)} and address {source.data_ptr():#x}; "
                f"expected multiples of {LINE}."
            )
        block_steps = 1 if self.once else block_steps
        if self.inside < 0 or self.inside + self.step_bytes > self.stride:
            raise ValueError(
                f"A step of {self.step_bytes} bytes begins {self.inside} bytes into one of {self.stride} bytes of the "
                "source; expected it to lie inside."
            )
        if block_steps < 1 or block_steps * self.stride > source.shape[1]:
            raise ValueError(
                f"{block_steps} steps of {self.stride} bytes do not fit into blocks of {source.shape[1]} bytes."
            )
        if mask is not None and (
            mask.dtype != torch.bool
            or mask.shape != out.shape[:2]
            or mask.device != out.device
            or not mask.is_contiguous()
        ):
            raise ValueError(
                f"mask is {mask.dtype} {list(mask.shape)} on {mask.device}; expected contiguous bool "
                f"{list(out.shape[:2])} on {out.device}."
            )
        # Counted in int32 by the kernels: bytes from the start of a window's first block to the end of its last line,
        # lines of a batch, entries of its mask; each up to the end of a tile.
        lines = self.lines(block_steps)
        largest = max(source.stride(0) + lines * LINE, out.shape[0] * lines, out.shape[0] * out.shape[1])
        if largest + 4096 >= 2**31:
            raise ValueError(
                f"Blocks of {source.stride(0):,} bytes and a batch of {list(out.shape)} bytes are more than the "
                "kernels count; expected a block and a window, with the padding of the blocks that it crosses, "
                "below 2**31 bytes together, and a batch below 2**31 lines of 128 bytes and 2**31 steps."
            )
        if self.pad not in range(PAD_KEEP, PAD_EDGE + 1):
            raise ValueError(f"pad is {self.pad}; expected {PAD_KEEP} to {PAD_EDGE}.")

    def lines(self, block_steps: int, unit: int = LINE) -> int:
        """Most units of `unit` bytes of the source, by default lines, that one window can touch.

        A window starts at a multiple of gcd(step bytes, unit) within a unit, and passes the padding at the end of
        each block that it crosses.
        """
        length, step_bytes = self.out.shape[1], self.stride
        crossings = -(-(length - 1) // block_steps)
        padding = self.source.stride(0) - block_steps * step_bytes
        span = length * step_bytes + crossings * padding + unit - math.gcd(step_bytes, unit)
        return -(-span // unit)


@dataclasses.dataclass(frozen=True)
class GatherMask:
    """The mask of a window that no column of a plan has.

    Attributes:
        out: bool [B, L], True where the step exists.
        offset, pad, final: as of a `GatherColumn`.
    """

    out: torch.Tensor
    offset: int
    pad: int = PAD_KEEP
    final: bool = False

    def row(self) -> list[int]:
        """The mask as a row of a plan's table."""
        row = [0] * WIDTH
        row[OUT], row[LENGTH], row[OFFSET] = self.out.data_ptr(), self.out.shape[1], self.offset
        row[PAD], row[FINAL] = self.pad, int(self.final)
        return row

    def check(self, like: torch.Tensor) -> None:
        """Raise ValueError unless the mask fits the kernels, and a batch with the output `like`."""
        out = self.out
        fits = out.dtype == torch.bool and out.ndim == 2 and out.is_contiguous() and out.shape[1] > 0
        if not fits or out.device != like.device or len(out) != len(like) or out.numel() + 4096 >= 2**31:
            raise ValueError(
                f"A mask is {out.dtype} {list(out.shape)} on {out.device}; expected contiguous bool [{len(like)}, L] "
                f"on {like.device}, of less than 2**31 entries."
            )
        if self.pad not in range(PAD_KEEP, PAD_EDGE + 1):
            raise ValueError(f"pad is {self.pad}; expected {PAD_KEEP} to {PAD_EDGE}.")


class GatherPlan:
    """The validated columns of a batch as rows of an int64 table on the CPU and on the gathering device.

    Args:
        columns: at least one, all with the same batch size and device of `out`.
        block_steps: steps of a block.
        masks: masks beside those of the columns; only for the GPU's kernels.

    Attributes:
        table: int64 [C, WIDTH] on the CPU, with `ROLE` 0.
        unit: bytes that a launch with 16-byte words reads from an address: 128, or 256 where blocks and windows allow.
        launches: (word bytes, table on the CPU, table on the device) of each kernel launch: one launch with 16-byte
            words if all steps are whole such words; otherwise one with 4-byte words for the columns that allow it, and
            one with single bytes for the rest. The masks are additional rows of the first launch, after its columns.
            That on the device also lists the lines of a row of the batch, see `with_lines`. Columns whose steps do not
            lie one after another are for the CPU only: the kernels expect that ``inside`` is 0 and ``step_stride`` is
            None.

    Raises:
        TypeError, ValueError: a column that the kernels do not support, or columns of too many lines together.
    """

    def __init__(
        self, columns: Sequence[GatherColumn], block_steps: int, masks: Sequence[GatherMask] = ()
    ) -> None:
        for column in columns:
            column.check(block_steps)
        check_like(columns, [column.out for column in columns])
        first = columns[0].out
        lines = sum(column.lines(block_steps) for column in columns) * first.shape[0]
        if lines + 4096 >= 2**31:
            raise ValueError(
                f"A batch of {first.shape[0]:,} rows has {lines:,} lines of {LINE} bytes in its columns, more than the "
                "kernels count; expected less than 2**31: a smaller batch, shorter windows or fewer columns."
            )
        for mask in masks:
            mask.check(first)
        self.columns, self.masks = tuple(columns), tuple(masks)
        self.block_steps = block_steps
        self.unit = _unit(columns, block_steps)
        self.batch_size = first.shape[0]
        self.device = first.device
        self.table = torch.tensor(
            [self._row(column) for column in columns], dtype=torch.int64, device="cpu"
        ).reshape(-1, WIDTH)
        self.launches = [(word, table, with_lines(table).to(self.device)) for word, table in self._launches()]
        self._tiles: dict[tuple[int, int, int, int], tuple[int, int, int, int]] = {}

    def unit_of(self, word: int) -> int:
        """Bytes of the units of a launch; narrow words, of which a thread writes more, leave no registers for pairs."""
        return self.unit if word == 16 else LINE

    def _row(self, column: GatherColumn) -> list[int]:
        row = [0] * WIDTH
        row[BASE] = column.source.data_ptr() + column.inside
        row[STRIDE] = column.source.stride(0)
        row[STEP_BYTES] = column.step_bytes
        row[OUT] = column.out.data_ptr()
        row[LENGTH] = column.out.shape[1]
        row[OFFSET] = column.offset
        row[PAD] = column.pad
        row[MASK] = column.mask.data_ptr() if column.mask is not None else 0
        row[BLOCKS] = column.source.shape[0]
        row[FINAL] = int(column.final)
        row[STEP_STRIDE] = column.stride
        return row

    def _launches(self) -> list[tuple[int, torch.Tensor]]:
        def fits(row: list[int], word: int) -> bool:
            return row[STEP_BYTES] % word == 0 and row[OUT] % word == 0

        rows = [(column, row) for column, row in zip(self.columns, self.table.tolist(), strict=True)]
        if all(fits(row, 16) for _, row in rows):
            chosen = [(16, rows)]
        else:
            words = [each for each in rows if fits(each[1], 4)]
            chosen = [(4, words), (1, [each for each in rows if not fits(each[1], 4)])]
        for word, part in chosen:
            for column, row in part:
                row[LINES] = column.lines(self.block_steps, self.unit_of(word))
        parts = [(word, [row for _, row in part]) for word, part in chosen]
        masks = [
            GatherMask(column.mask, column.offset, column.pad, column.final).row()
            for column in self.columns
            if column.mask is not None
        ]
        masks += [mask.row() for mask in self.masks]
        parts = [(word, part) for word, part in parts if part]
        parts[0][1].extend(masks)
        return [(word, torch.tensor(part, dtype=torch.int64, device="cpu")) for word, part in parts]

    def tiles(self, table: torch.Tensor, count: int, tile: int, entries: int) -> tuple[int, int, int, int]:
        """What a launch over `count` rows is made of.

        Args:
            table: of one of `launches`. tile, entries: units, and entries of a mask, of a tile.

        Returns:
            Units of a row; masks; tiles of units; tiles of masks.
        """
        key = (id(table), count, tile, entries)
        if key not in self._tiles:
            masks = table[table[:, LINES] == 0, LENGTH].tolist()
            lines = int(table[:, LINES].sum())
            mask_tiles = sum(-(-length * count // entries) for length in masks)
            self._tiles[key] = lines, len(masks), -(-lines * count // tile), mask_tiles
        return self._tiles[key]

    def check_rows(self, slots: torch.Tensor, anchors: torch.Tensor, rows: torch.Tensor | None = None) -> int:
        """Validate the rows to gather and return their number, at most the batch size."""
        given = {"slots": slots, "anchors": anchors}
        if rows is not None:
            given["rows"] = rows
        for name, tensor in given.items():
            check_tensor(name, tensor, torch.int64, "[n]", device=self.device)
        if rows is not None and len(rows) != len(slots):
            raise ValueError(f"{len(rows)} rows and {len(slots)} slots; expected as many of both.")
        if len(slots) != len(anchors) or len(slots) > self.batch_size:
            raise ValueError(
                f"{len(slots)} slots and {len(anchors)} anchors; expected as many of both, at most {self.batch_size}."
            )
        return len(slots)


def _unit(columns: Sequence[GatherColumn], block_steps: int) -> int:
    """Bytes of the units that a batch is read in: of two lines, if no block ends within one and few lines are idle."""
    if any(column.source.stride(0) % PAIR for column in columns):
        return LINE
    lines, pairs = (sum(column.lines(block_steps, unit) for column in columns) for unit in (LINE, PAIR))
    return PAIR if 2 * pairs <= 1.25 * lines else LINE


def with_lines(table: torch.Tensor) -> torch.Tensor:
    """The table of a launch as the kernel reads it, int64 on the CPU: its entries, then those of the units of a row.

    The entry of a unit: its number within its column << 32 | the column.
    """
    # By numpy: threads of torch, which `repeat_interleave` uses, hang in a forked child.
    counts = table[:, LINES].numpy()
    columns = np.repeat(np.arange(len(table)), counts)
    first = (np.cumsum(counts) - counts)[columns]
    lines = (np.arange(len(columns)) - first) << 32 | columns
    return torch.from_numpy(np.concatenate([table.numpy().reshape(-1), lines]))


# One row of a placing plan's table: int64 [PLACE_WIDTH].
PLACE_OUT = 0  # address of the output [batch, row bytes]
PLACE_ROW_BYTES = 1
PLACE_WORD = 2  # word size in bytes that divides row bytes and address: 16, 4 or 1
PLACE_WIDTH = 3


class PlacePlan:
    """The validated outputs of rows in staging memory, as a table on the CPU and on the placing device.

    The staging memory of n rows; each piece begins at a multiple of 128 bytes::

        rows 0 to n - 1 of outs[0] | padding | rows 0 to n - 1 of outs[1] | padding | ...

    Args:
        outs: at least one uint8 [B, row_bytes], contiguous, all with the same batch size and device.

    Attributes:
        table: int64 [P, PLACE_WIDTH] on the CPU; `device_table` the same on the placing device.

    Raises:
        TypeError, ValueError: an output that the kernel does not support.
    """

    def __init__(self, outs: Sequence[torch.Tensor]) -> None:
        for out in outs:
            check_tensor("out", out, torch.uint8, "[B, row bytes]")
            # Counted in int32 by the kernel: bytes of a row and of a tile after it.
            if not 1 <= out.shape[1] < 2**31 - 2**13:
                raise ValueError(
                    f"out is {list(out.shape)}; expected rows of 1 to less than 2**31 - 2**13 bytes."
                )
        check_like(outs, outs, "outputs")
        self.outs = tuple(outs)
        self.batch_size = len(outs[0])
        self.device = outs[0].device
        self.table = torch.tensor([self._row(out) for out in outs], dtype=torch.int64, device="cpu")
        self.device_table = self.table.to(self.device)

    @staticmethod
    def _row(out: torch.Tensor) -> list[int]:
        row = [0] * PLACE_WIDTH
        row[PLACE_OUT], row[PLACE_ROW_BYTES] = out.data_ptr(), out.shape[1]
        row[PLACE_WORD] = word_of(*row[:PLACE_WORD])
        return row

    def offsets(self, count: int) -> list[int]:
        """Byte offsets of the pieces of `count` rows in staging memory."""
        offsets, end = [], 0
        for out in self.outs:
            offsets.append(end)
            end += -(-count * out.shape[1] // LINE) * LINE
        return offsets

    def size(self, count: int) -> int:
        """Bytes of staging memory for `count` rows, a multiple of 128."""
        return sum(-(-count * out.shape[1] // LINE) * LINE for out in self.outs)

    def pieces(self, staging: torch.Tensor, count: int) -> torch.Tensor:
        """The pieces of `count` rows for `gear_loader.native.gathering.place`, int64 [P, 3] on the CPU."""
        first = staging.data_ptr()
        return torch.tensor(
            [
                [first + offset, out.data_ptr(), out.shape[1]]
                for offset, out in zip(self.offsets(count), self.outs, strict=True)
            ],
            dtype=torch.int64,
            device="cpu",
        )

    def check_rows(self, staging: torch.Tensor, rows: torch.Tensor) -> int:
        """Validate the rows to place and return their number, at most the batch size."""
        check_tensor("rows", rows, torch.int64, "[n]", device=self.device)
        check_tensor("staging", staging, torch.uint8, "[bytes]")
        count = len(rows)
        if count > self.batch_size:
            raise ValueError(f"{count} rows; expected at most {self.batch_size}, the batch size.")
        if len(staging) < self.size(count) or (count and staging.data_ptr() % LINE):
            raise ValueError(
                f"staging has {len(staging):,} bytes at {staging.data_ptr():#x}; expected at least "
                f"{self.size(count):,} for {count} rows, at a multiple of {LINE}."
            )
        return count
