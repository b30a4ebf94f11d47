"""Windows in another dtype: converted and scaled when their batch is gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gear_loader.errors import SchemaError
from gear_loader.kernels.cast_plan import CastColumn, CastPlan
from gear_loader.storage.schema import Column, Window


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


class Casts:
    """The windows of a batch that are converted.

    Args:
        columns: what is gathered, and what is delivered, all on one device.
        device: of them; on a GPU there is one launch for each pair of dtypes.
    """

    def __init__(self, columns: Sequence[CastColumn], device: torch.device) -> None:
        self._columns = columns
        self._plan = CastPlan(columns) if device.type == "cuda" else None

    def compute(self, anchors: torch.Tensor) -> None:
        """Convert as many rows as there are anchors. Does not wait for a GPU."""
        self.convert(len(anchors))

    def convert(self, count: int | torch.Tensor) -> None:
        """Convert the first `count` values along the first dimension: ``(source * scale).to(dtype)``; on a GPU it may
        be int64 [1] there."""
        if self._plan is not None:
            from gear_loader.kernels import cast

            cast.cast(self._plan, count)
            return
        for each in self._columns:
            if each.scale is None:
                each.out[:count].copy_(each.source[:count])
            else:
                torch.mul(each.source[:count], each.scale, out=each.out[:count])
