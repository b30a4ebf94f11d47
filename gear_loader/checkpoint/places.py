"""Where the rows of a column's file lie in a table."""

from __future__ import annotations

import numpy as np

from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["column_places"]


def column_places(table: Table, name: str) -> Array:
    """A column's place in the region, int64 [5], as `copy_rows` takes it. The caller keeps it mapped."""
    column, layout = table.region.layout.columns[name], table.region.layout
    base = table.region.column(name).ctypes.data
    return np.array(
        [base, column.block_stride, column.step_bytes, column.step_stride, layout.block_steps], dtype=np.int64
    )
