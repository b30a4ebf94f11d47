"""Trajectories as a folder of ``.npz`` files, one each, which `numpy.load` reads without pickle."""

from __future__ import annotations

import os
import zipfile
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.exports.exported import NEXT, chosen_columns, images_of, new_place, trajectories
from gear_loader.sources.episodes import Columns
from gear_loader.storage.table import Table


def write_npz(table: Table, place: str, *, columns: Columns = None, compressed: bool = False) -> str:
    """Write a folder with a file ``00000000.npz`` for each trajectory, oldest first.

    An array of a step's column is ``[T, *shape]``, of one per trajectory ``[*shape]``. bfloat16 becomes float32. Of a
    column with ``final=True`` ``next_<column>``, ``[T, *shape]``, is what follows each step, if the trajectory was
    added with its final step.

    Args:
        compressed: with deflate.

    Returns:
        The folder.

    Raises:
        SchemaError: as `Table.export`; columns of values of any length, but for text and arrays per trajectory; text
            that ends in NUL, which NumPy cuts off.
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
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with new_place(place) as partial:
        os.mkdir(partial)
        for number, each in enumerate(trajectories(table, chosen, encoded=())):
            arrays = {role: _array(role, value) for role, value in each.values.items()}
            for role, value in each.final.items():
                arrays[NEXT + role] = _array(role, torch.cat([each.values[role][1:], value[None]]))
            # Not by numpy.savez, which has parameters of its own among the names.
            with zipfile.ZipFile(os.path.join(partial, f"{number:08d}.npz"), "w", method) as file:
                for name, array in arrays.items():
                    with file.open(f"{name}.npy", "w", force_zip64=True) as stream:
                        np.lib.format.write_array(stream, array, allow_pickle=False)
    return place


def _array(role: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, (str, bytes)) and value[-1:] in ("\0", b"\0"):
        raise SchemaError(
            f"Column {role!r} has a value that ends in NUL, which NumPy cuts off; name others by columns=, or export "
            "to parquet. Nothing was written."
        )
    return np.array(value)
