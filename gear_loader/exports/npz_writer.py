"""Trajectories as a folder of ``.npz`` files, one each, which `numpy.load` reads without pickle."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.exports.exported import NEXT, chosen_columns, images_of, new_place, trajectories
from gear_loader.sources.episodes import Columns
from gear_loader.storage.table import Table


def write_npz(table: Table, place: str, *, columns: Columns = None, compressed: bool = False) -> str:
    """Write a folder with a file ``00000000.npz`` for each trajectory, oldest first.

    An array of a step's column is ``[T, *shape]``, of one per trajectory ``[*shape]``. bfloat16 becomes float32. The
    value after the last step of a column with ``final=True`` is ``next_<column>``, ``[*shape]``.

    Args:
        compressed: with deflate.

    Returns:
        The folder.

    Raises:
        SchemaError: as `Table.export`; columns of values of any length, but for text and arrays per trajectory.
    """
    chosen = chosen_columns(table, columns)
    images = images_of(table, chosen)
    for role, name in chosen.items():
        column = table.schema[name]
        if role in images or (column.ragged is not None and not column.trajectory):
            raise SchemaError(
                f"Column {name!r} has values of any length for each step, which npz has not; name others by columns=, "
                f"or export to parquet. ({role!r} was asked for.)"
            )
    save = np.savez_compressed if compressed else np.savez
    with new_place(place) as partial:
        os.mkdir(partial)
        for number, each in enumerate(trajectories(table, chosen)):
            arrays = {role: _array(value) for role, value in each.values.items()}
            arrays |= {NEXT + role: _array(value) for role, value in each.final.items()}
            save(os.path.join(partial, f"{number:08d}.npz"), **arrays)
    return place


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.array(value)
