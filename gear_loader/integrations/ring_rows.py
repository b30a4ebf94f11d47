"""A ring of rows that another library overwrites in place, in a table: one column, one contiguous array."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gear_loader.storage.memory_options import Memory
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table


def table_of_rows(schema: Mapping[str, Column], count: int, name: str | None) -> Table:
    """A table whose only trajectory has `count` steps, of zeros.

    Args:
        name: of the table; None for private memory.
    """
    table = Table.create(
        schema,
        max_steps=count,
        max_trajectories=1,
        block_steps=count,
        memory=Memory(packed=False),  # each column is contiguous
        name=name,
    )
    writer = table.writer()
    writer.reserve(count)
    writer.written(count)
    writer.commit()
    return table


def row_tensors(table: Table) -> dict[str, torch.Tensor]:
    """The columns of such a table, ``[rows, *shape]``: its memory, not copies."""
    columns = {}
    for name, column in table.schema.items():
        # One block, whose steps are bytes.
        steps = torch.from_numpy(table._engine.region.column(name)[0]).view(column.dtype)
        columns[name] = steps.unflatten(1, column.shape) if column.shape else steps.squeeze(1)
    return columns
