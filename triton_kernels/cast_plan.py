"""Cast plans: the converted columns of a batch as tables of addresses, built once for a set of buffers."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence

import torch

from gear_loader.kernels.tensor_checks import check_like

__all__ = [
    "CAST_DTYPES",
    "CAST_OUT",
    "CAST_SCALE",
    "CAST_SIZE",
    "CAST_SOURCE",
    "CAST_WIDTH",
    "CastColumn",
    "CastPlan",
]

# One row of a table: int64 [CAST_WIDTH].
CAST_SOURCE = 0  # address of the values
CAST_OUT = 1  # address of the output
CAST_SIZE = 2  # values of a row
CAST_SCALE = 3  # bits of the factor, float64
CAST_WIDTH = 4

CAST_DTYPES = {
    getattr(torch, name): name
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    )
}
"""Dtypes of values, and their names in the kernel."""


@dataclasses.dataclass(frozen=True)
class CastColumn:
    """One column whose values are converted.

    Attributes:
        source: [rows, ...], contiguous. out: the same shape in another dtype, contiguous, on the same device.
        scale: factor of the values, or None.
    """

    source: torch.Tensor
    out: torch.Tensor
    scale: float | None = None

    def check(self) -> None:
        """Raise ValueError or TypeError unless the column fits the kernel."""
        for name, tensor in (("source", self.source), ("out", self.out)):
            if tensor.dtype not in CAST_DTYPES or tensor.ndim < 1 or not tensor.is_contiguous():
                raise TypeError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; expected contiguous [rows, ...] of "
                    f"{', '.join(CAST_DTYPES.values())}."
                )
        if self.source.shape != self.out.shape or self.source.device != self.out.device:
            raise ValueError(
                f"source is {list(self.source.shape)} on {self.source.device}, out {list(self.out.shape)} on "
                f"{self.out.device}; expected the same."
            )
        if self.scale is not None and not self.out.is_floating_point():
            raise TypeError(
                f"out is {self.out.dtype} with scale={self.scale}; expected a floating-point dtype."
            )

    @property
    def kind(self) -> tuple[str, str, str]:
        """Names of the dtypes of source and output, and of the product with the scale, ``""`` without one."""
        product = "" if self.scale is None else CAST_DTYPES[torch.result_type(self.source, 1.0)]
        return CAST_DTYPES[self.source.dtype], CAST_DTYPES[self.out.dtype], product


class CastPlan:
    """The validated columns of a batch that are converted, on the CPU and on the device that converts.

    Args:
        columns: at least one, all with as many rows.

    Attributes:
        launches: (kind, table on the CPU, table on the device) of each kernel launch: int64 [C, CAST_WIDTH], one for
            all columns of the same `CastColumn.kind`.

    Raises:
        TypeError, ValueError: a column that the kernel does not support.
    """

    def __init__(self, columns: Sequence[CastColumn]) -> None:
        for column in columns:
            column.check()
        self.columns = tuple(columns)
        check_like(columns, [column.out for column in columns])
        self.device, self.num_rows = columns[0].out.device, len(columns[0].out)
        kinds: dict[tuple[str, str, str], list[list[int]]] = {}
        for column in columns:
            kinds.setdefault(column.kind, []).append(self._row(column))
        tables = {
            kind: torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, CAST_WIDTH)
            for kind, rows in kinds.items()
        }
        self.launches = [(kind, table, table.to(self.device)) for kind, table in tables.items()]

    @staticmethod
    def _row(column: CastColumn) -> list[int]:
        row = [0] * CAST_WIDTH
        row[CAST_SOURCE], row[CAST_OUT] = column.source.data_ptr(), column.out.data_ptr()
        row[CAST_SIZE] = math.prod(column.out.shape[1:])
        (row[CAST_SCALE],) = struct.unpack(
            "<q", struct.pack("<d", 1.0 if column.scale is None else column.scale)
        )
        return row

    def tiles(self, table: torch.Tensor, count: int, size: int) -> int:
        """Number of tiles of `size` values each for `count` rows; a tile belongs to one column."""
        return sum(-(-count * each // size) for each in table[:, CAST_SIZE].tolist())

    def check_count(self, count: int) -> int:
        """Validate the number of rows to convert and return it."""
        if not 0 <= count <= self.num_rows:
            raise ValueError(f"{count} rows; expected at most {self.num_rows}, which the outputs have.")
        return count
