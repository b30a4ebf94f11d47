"""Where the rows of a column's file lie in a table."""

from __future__ import annotations

import numpy as np

from gear_loader.storage.region import Region
from gear_loader.utils.arrays import Array

__all__ = ["column_memory", "column_places"]


def column_places(region: Region, name: str) -> Array:
    """A column's place in the region, int64 [5], as `copy_rows` takes it. The caller keeps it mapped."""
    layout, column = region.layout, region.layout.columns[name]
    base = region.column(name).ctypes.data
    return np.array(
        [base, column.block_stride, column.step_bytes, column.step_stride, layout.block_steps], dtype=np.int64
    )


def column_memory(region: Region, name: str) -> Array | None:
    """The blocks of a column whose steps lie side by side in them, uint8 [bytes]; None if others lie between them."""
    column = region.layout.columns[name]
    if column.step_stride != column.step_bytes or column.inside:
        return None
    found: Array = region.blocks(name).reshape(-1)
    return found
