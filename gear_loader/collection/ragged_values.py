"""Ragged values of a batch, which follow the records that were gathered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gear_loader.storage.ragged import Values
from gear_loader.storage.table import Table


def read_ragged(
    table: Table, columns: Mapping[str, Values], batch: Mapping[str, torch.Tensor], *, pinned: bool = False
) -> dict[str, Any]:
    """Copy the values of a batch on the CPU, under the read ticket of its rows.

    Args:
        columns: windows that read ragged columns, and what the values are.
        batch: has their records, int64 ``[..., 2]``. pinned: copy into pinned memory.

    Returns:
        Name -> `Ragged` of the records' shape without the last dimension, or lists of text.

    Raises:
        CorruptTableError: a record is invalid.
    """
    found = {}
    for name, values in columns.items():
        records = batch[name]
        numbers, shape = records.reshape(-1, 2).numpy(), tuple(records.shape[:-1])
        found[name] = table._engine.payload.read(values, numbers, shape, pinned=pinned)
    return found
