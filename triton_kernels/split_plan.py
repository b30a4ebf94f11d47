"""Split plans: the columns of gathered records as a table of addresses and sizes, built once for a set of buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from gear_loader.kernels.tensor_checks import check_like, check_tensor, word_of

__all__ = [
    "SPLIT_LENGTH",
    "SPLIT_OUT",
    "SPLIT_RECORD_BYTES",
    "SPLIT_ROW_BYTES",
    "SPLIT_SOURCE",
    "SPLIT_STEP_BYTES",
    "SPLIT_WIDTH",
    "SPLIT_WORD",
    "SplitColumn",
    "SplitPlan",
]

# One row of the table: int64 [SPLIT_WIDTH].
SPLIT_SOURCE = 0  # address of the column's first step in row 0 of the records
SPLIT_ROW_BYTES = 1  # bytes from row to row of the records
SPLIT_RECORD_BYTES = 2  # bytes from step to step
SPLIT_OUT = 3  # address of the output [batch, length, step bytes]
SPLIT_LENGTH = 4  # steps of a row of the output
SPLIT_STEP_BYTES = 5  # bytes of a step of the output
SPLIT_WORD = 6  # word size in bytes that divides all of these: 16, 4 or 1
SPLIT_WIDTH = 7


@dataclasses.dataclass(frozen=True)
class SplitColumn:
    """One column of a batch, which lies in records.

    Attributes:
        records: uint8 [B, steps, record bytes], contiguous.
        out: uint8 [B, L, step_bytes], contiguous, on the same device.
        first: the step of `records` with which a row of `out` begins.
        inside: bytes before the column in a record.
    """

    records: torch.Tensor
    out: torch.Tensor
    first: int
    inside: int

    def check(self) -> None:
        """Raise ValueError or TypeError unless the column fits the kernel."""
        for name, tensor in (("records", self.records), ("out", self.out)):
            check_tensor(name, tensor, torch.uint8, "[B, steps, bytes]")
        steps, size = self.records.shape[1:]
        length, width = self.out.shape[1:]
        if min(length, width) < 1 or self.first < 0 or self.first + length > steps:
            raise ValueError(
                f"{length} steps of {width} bytes from step {self.first} on; expected at least one of each, inside "
                f"the {steps} steps of the records."
            )
        if self.inside < 0 or self.inside + width > size:
            raise ValueError(
                f"A column of {width} bytes from byte {self.inside} on does not fit into records of {size} bytes."
            )
        # Counted in int32 by the kernel: bytes of a row, each up to the end of a tile.
        if max(steps * size, length * width) >= 2**31 - 2**14:
            raise ValueError(
                f"A row has {steps * size:,} bytes of records and {length * width:,} of the column; expected less "
                "than 2**31 - 2**14."
            )


class SplitPlan:
    """The validated columns of gathered records, as a table on the CPU and on the splitting device.

    Args:
        columns: at least one, all with the same batch size and device.

    Attributes:
        table: int64 [C, SPLIT_WIDTH] on the CPU; `device_table` the same on the splitting device.

    Raises:
        TypeError, ValueError: a column that the kernel does not support.
    """

    def __init__(self, columns: Sequence[SplitColumn]) -> None:
        for column in columns:
            column.check()
        check_like(columns, [tensor for column in columns for tensor in (column.out, column.records)])
        self.columns = tuple(columns)
        self.batch_size = len(columns[0].out)
        self.device = columns[0].out.device
        self.table = torch.tensor([self._row(column) for column in columns], dtype=torch.int64, device="cpu")
        self.device_table = self.table.to(self.device)
        self._sizes = self.table[:, [SPLIT_LENGTH, SPLIT_STEP_BYTES, SPLIT_WORD]].tolist()

    @staticmethod
    def _row(column: SplitColumn) -> list[int]:
        row = [0] * SPLIT_WIDTH
        steps, size = column.records.shape[1:]
        row[SPLIT_SOURCE] = column.records.data_ptr() + column.first * size + column.inside
        row[SPLIT_ROW_BYTES], row[SPLIT_RECORD_BYTES] = steps * size, size
        row[SPLIT_OUT], row[SPLIT_LENGTH] = column.out.data_ptr(), column.out.shape[1]
        row[SPLIT_STEP_BYTES] = column.out.shape[2]
        divided = (SPLIT_SOURCE, SPLIT_RECORD_BYTES, SPLIT_OUT, SPLIT_STEP_BYTES)
        row[SPLIT_WORD] = word_of(*(row[place] for place in divided))
        return row

    def tiles(self, count: int, words: int) -> int:
        """Number of tiles of `words` words each for `count` rows; a tile belongs to one column."""
        return sum(-(-count * length * size // (word * words)) for length, size, word in self._sizes)

    def check_rows(self, count: int, rows: torch.Tensor | None) -> int:
        """Validate the rows to split and return their number, at most the batch size."""
        if rows is not None:
            check_tensor("rows", rows, torch.int64, "[n]", device=self.device)
            if len(rows) != count:
                raise ValueError(f"{len(rows)} rows for a count of {count}; expected as many.")
        if not 0 <= count <= self.batch_size:
            raise ValueError(f"{count} rows; expected at most {self.batch_size}, the batch size.")
        return count
