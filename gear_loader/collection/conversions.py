"""Windows in another dtype: converted and scaled when their batch is gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from gear_loader.errors import SchemaError
from gear_loader.kernels.cast_plan import CastColumn, CastPlan
from gear_loader.storage.schema import Column, Window

__all__ = ["Casts", "Conversion", "converted_dtype"]


def converted_dtype(name: str, window: Window, column: Column) -> torch.dtype | None:
    """The dtype of a window in a batch if its values are converted; None if they are as they are stored.

    Raises:
        SchemaError: the values are to be scaled, but the result would be integers.
    """
    dtype = column.dtype if window.dtype is None else window.dtype
    if window.scale is not None and not dtype.is_floating_point:
        raise SchemaError(
            f"The window of {name!r} has scale={window.scale!r} and would be {dtype}; expected a floating-point dtype: "
            f"Window(..., dtype=torch.float32, scale={window.scale!r})."
        )
    return None if window.scale is None and dtype == column.dtype else dtype


@dataclasses.dataclass(frozen=True)
class Conversion:
    """One window of a batch whose values are converted.

    Attributes:
        source: gathered values, ``[B, ...]``. out: of the same shape, in the dtype of the batch.
        scale: factor of the values, or None.
    """

    source: torch.Tensor
    out: torch.Tensor
    scale: float | None

    def compute(self, anchors: torch.Tensor) -> None:
        """Convert as many rows as there are anchors. Does not wait for a GPU."""
        self.convert(len(anchors))

    def convert(self, count: int) -> None:
        """Convert the first `count` values along the first dimension: ``(source * scale).to(dtype)``."""
        if self.scale is None:
            self.out[:count].copy_(self.source[:count])
        else:
            torch.mul(self.source[:count], self.scale, out=self.out[:count])


class Casts:
    """The windows of a batch on a GPU that are converted, by one launch for each pair of dtypes.

    Args:
        columns: what is gathered, and what is delivered.
    """

    def __init__(self, columns: Sequence[CastColumn]) -> None:
        self._plan = CastPlan(columns)

    def compute(self, anchors: torch.Tensor) -> None:
        """Convert as many rows as there are anchors. Does not wait for the GPU."""
        self.convert(len(anchors))

    def convert(self, count: int) -> None:
        """Convert the first `count` values along the first dimension, as `Conversion` does."""
        from gear_loader.kernels import cast

        cast.cast(self._plan, count)
