"""The values after the last steps of the environments of a vector environment, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Column, Schema, exactly, settled
from gear_loader.utils.arrays import Array, known, on_host
from gear_loader.utils.lazy_torch import is_tensor, torch

_KIND = "Column(final=True)"


def whole_rows(values: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Values of which rows are read one by one: tensors of a GPU are copied in one piece, for which the host waits.

    Args:
        values: also arrays of other libraries, which become tensors or arrays. what: name of the values in errors.
    """
    return on_host({name: known(value, f"Column {name!r} of {what}") for name, value in values.items()})[0]


def checked_finals(schema: Schema, final: Any, ends: Array) -> dict[str, Array]:
    """Check the values after the last step of n environments.

    Args:
        schema: the table's columns.
        final: column name -> ``[n, *shape]``; or one object for each environment, None where no trajectory ends, as
            Gymnasium gives ``info["final_obs"]``: an array or a list [n] of them for each column, or an array of
            mappings.
        ends: bool [n], environments whose trajectory ends; of objects only theirs are looked at.

    Returns:
        Bytes of a step of every column that has steps, uint8 [n, step_bytes], or [1, step_bytes] of zeros; of objects,
        zeros for the other environments.

    Raises:
        SchemaError: a value does not fit.
    """
    finals = schema.finals
    wanted: Mapping[str, Column] = {} if finals is None else finals
    if isinstance(final, np.ndarray) and final.dtype == object and final.shape == ends.shape:
        final = _by_column(final, wanted, ends)
    rows = dict(whole_rows(settled(exactly(final, wanted, _KIND, "final")), "final"))
    if finals is None:
        return dict(schema.zero_step)
    for name, value in rows.items():
        if value is None or _holds_objects(value):
            rows[name] = _stacked_ends(name, finals[name], value, ends)
    length, found = finals.validate(rows, what=f"final, the rows (T = {len(ends)}, one for each environment)")
    if length != len(ends):
        raise SchemaError(f"final has {length} rows; expected one for each of {len(ends)} environments.")
    return {**schema.zero_step, **found}


def _holds_objects(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype == object)
    objects = isinstance(value, (list, tuple))
    return objects and any(row is None or isinstance(row, np.ndarray) or is_tensor(row) for row in value)


def _by_column(final: Array, wanted: Mapping[str, Column], ends: Array) -> dict[str, Array]:
    """Mappings of environments, an array [n] of objects, as an array [n] of objects for each column."""
    columns = {name: np.full(len(final), None, dtype=object) for name in wanted}
    for i in np.flatnonzero(ends).tolist():
        row = exactly(final[i], wanted, _KIND, f"final of environment {i}, whose trajectory ends,")
        for name, value in row.items():
            columns[name][i] = value
    return columns


def _stacked_ends(name: str, column: Column, values: Any, ends: Array) -> Any:
    """Objects of environments as ``[n, *shape]``: those of trajectories that end; zeros elsewhere."""
    which = np.flatnonzero(ends)
    count = len(values) if isinstance(values, (list, tuple)) or np.ndim(values) else 0
    if values is not None and count != len(ends):
        raise SchemaError(
            f"Column {name!r} of final has {count} rows; expected one for each of {len(ends)} environments."
        )
    found = [None if values is None else values[i] for i in which.tolist()]
    rows: list[Any] = [each if each is None or is_tensor(each) else np.asarray(each) for each in found]
    for i, row in zip(which.tolist(), rows, strict=True):
        if row is None or tuple(row.shape) != column.shape:
            given = "None" if row is None else f"of shape {list(row.shape)}"
            raise SchemaError(
                f"Column {name!r} of final is {given} for environment {i}, whose trajectory ends; expected its value "
                f"after the last action, of shape {list(column.shape)}."
            )
    shape = (len(ends), *column.shape)
    if any(is_tensor(row) for row in rows):
        stacked = torch.stack([row if is_tensor(row) else torch.from_numpy(row) for row in rows])
        tensor = torch.zeros(shape, dtype=stacked.dtype, device=stacked.device)
        tensor[torch.from_numpy(which).to(stacked.device)] = stacked
        return tensor
    if not rows:
        return (
            np.zeros(shape, column.numpy_dtype)
            if column.numpy_dtype
            else torch.zeros(shape, dtype=column.dtype, device="cpu")
        )
    array = np.zeros(shape, np.stack(rows).dtype)
    array[which] = rows
    return array
