"""What is read of checkpoints of earlier versions; the next save writes the present one.

Version 3 differs in its index: a safetensors file ``index.<saves>.safetensors`` of one array for each field, written
anew by every save, with ages instead of times. Arrays without a value are missing.
"""

from __future__ import annotations

import numpy as np

from gear_loader.checkpoint.directory import REMEDY
from gear_loader.checkpoint.trajectory_records import RECORD
from gear_loader.errors import CheckpointError
from gear_loader.storage.schema import Schema
from gear_loader.utils.arrays import Array

VERSION = 3
_HEADER_BYTES = 1 << 16  # limit of the safetensors header, which has less than 1,000 bytes for these arrays
_NAMES = [*RECORD.names, "age"]  # type: ignore[misc]
_NAMES.remove("created")


def index_file(saves: int) -> str:
    """The name of the index of a checkpoint that was saved so many times."""
    return f"index.{saves:06d}.safetensors"


def largest_index(schema: Schema, num_trajectories: int) -> int:
    """Most bytes of an index."""
    each = 68 + 8 * (bool(schema.per_trajectory) + bool(schema.late))
    return each * num_trajectories + _HEADER_BYTES


def records_of(path: str, data: bytes, schema: Schema, count: int) -> Array:
    """The records in an index, of a manifest with the clock 0.

    Raises:
        CheckpointError: it is not an index of so many trajectories.
    """
    import safetensors
    import safetensors.numpy

    try:
        arrays = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error}). {REMEDY}") from error
    for name in ("final", "filled") if schema.per_trajectory else ("final", "filled", "place"):
        arrays.setdefault(name, np.zeros(count, dtype=np.int64))
    if sorted(arrays) != sorted(_NAMES):
        raise CheckpointError(f"{path} has the tensors {sorted(arrays)}; expected {sorted(_NAMES)}. {REMEDY}")
    records: Array = np.zeros(count, dtype=RECORD)
    for name in _NAMES:
        dtype = np.dtype(np.float32 if name == "priority" else np.int64)
        values = arrays[name]
        if values.dtype != dtype or values.shape != (count,):
            raise CheckpointError(
                f"{path}: {name!r} is {values.dtype} {list(values.shape)}; expected {dtype} [{count}]. {REMEDY}"
            )
        if name == "age":
            if values.min(initial=0) < 0:
                raise CheckpointError(f"{path} contradicts its manifest: an age is below 0. {REMEDY}")
            values, name = -values, "created"
        if (values.astype(RECORD[name]) != values).any():
            # The checks of the present version would see another value.
            raise CheckpointError(f"{path}: a value of {name!r} is too large. {REMEDY}")
        records[name] = values
    return records
