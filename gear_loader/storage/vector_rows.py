"""Rows of the environments of a vector environment, checked: what all vector writers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Column, Schema, as_mapping, settled
from gear_loader.utils.arrays import Array, address_of, known, numbers, shown
from gear_loader.utils.checks import at_least
from gear_loader.utils.lazy_torch import is_tensor, torch

__all__ = ["VectorRows"]

_BOOL = np.dtype(np.bool_)
_OPTIONS = ("done", "active", "priority", "final")
"""Options of `append` of vector writers."""


def _on_host(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Values of which rows are read one by one: tensors of a GPU are copied in one piece, for which the host waits.

    Args:
        values: also arrays of other libraries, which become tensors or arrays. what: name of the values in errors.
    """
    found = {name: known(value, f"Column {name!r} of {what}") for name, value in values.items()}
    return {
        name: value.detach().cpu() if is_tensor(value) and value.is_cuda else value
        for name, value in found.items()
    }


class VectorRows:
    """Checks rows, masks and other values of n environments.

    Args:
        schema: the table's columns. n: number of environments.

    Attributes:
        num_envs: number of environments.
        trajectory: values of the columns per trajectory, ``{name: [n, *shape]}``; None at first.
    """

    def __init__(self, schema: Schema, n: int) -> None:
        self._whole_schema = schema
        self.num_envs = count = at_least("n", n)
        self.trajectory: Mapping[str, Any] | None = None
        self._what = f"the rows (T = {count}, one for each environment)"
        once = {name: column.by_step() for name, column in schema.per_trajectory.items()}
        self._once_schema = Schema(once) if once else None
        self._options = [name for name in _OPTIONS if name in schema.steps]
        self._no_index = np.full(count, -1, dtype=np.int64)

    def _given(self, rows: Any, columns: dict[str, Any]) -> Any:
        """One mapping of what was given by position and by keywords."""
        if rows is None:
            return columns
        rows = as_mapping(rows)
        return {**settled(rows), **columns} if columns and isinstance(rows, Mapping) else rows

    def _check_option_names(self, rows: Any) -> None:
        """Raise SchemaError if a column is missing that has the name of an option, which was taken for it."""
        if not self._options:
            return
        taken = [name for name in self._options if isinstance(rows, Mapping) and name not in rows]
        if taken:
            raise SchemaError(
                f"The columns {taken} are missing: append() has options of that name. Give such columns in one "
                f"mapping, append({{{taken[0]!r}: ..., ...}}, ...). Nothing was appended."
            )

    def _check_count(self, length: int) -> None:
        """Raise SchemaError unless there is a row for each environment."""
        if length != self.num_envs:
            raise SchemaError(
                f"The rows have {length} entries; expected arrays [n, ...] with one row for each of the "
                f"{self.num_envs} environments. Nothing was appended."
            )

    def _mask(self, name: str, value: Any) -> Array:
        """A mask as a contiguous array, bool [n]."""
        if is_tensor(value) and type(value) is torch.Tensor:
            fits = value.dtype is torch.bool and value.is_cpu and not value.is_nested
            if fits and address_of(value):
                value = value.numpy()
        if type(value) is not np.ndarray:
            value = numbers(value, name, "b", f"a mask, bool [{self.num_envs}]. Nothing was changed")
        if value.dtype != _BOOL or value.shape != (self.num_envs,):
            raise SchemaError(
                f"{name} has dtype {value.dtype} and shape {list(value.shape)}; expected a mask, bool "
                f"[{self.num_envs}], one value for each environment. Nothing was changed."
            )
        return value if value.flags.c_contiguous else np.ascontiguousarray(value)

    def _checked_final(self, final: Any, ends: Array) -> dict[str, Array]:
        """Check the values after the last step.

        Args:
            final: column name -> ``[n, *shape]``; or one object for each environment, None where no trajectory ends, as
                Gymnasium gives ``info["final_obs"]``: an array [n] of them for each column, or of mappings.
            ends: bool [n], environments whose trajectory ends; of objects only theirs are looked at.

        Returns:
            Bytes of a step of every column that has steps, uint8 [n, step_bytes], or [1, step_bytes] of zeros; of
            objects, zeros for the other environments.

        Raises:
            SchemaError: a value does not fit.
        """
        final, finals = as_mapping(final), self._whole_schema.finals
        wanted: Mapping[str, Column] = {} if finals is None else finals
        if isinstance(final, np.ndarray) and final.dtype == object and final.shape == ends.shape:
            final = _by_column(final, wanted, ends)
        if not isinstance(final, Mapping) or set(final) != set(wanted):
            given = sorted(map(str, final)) if isinstance(final, Mapping) else type(final).__name__
            raise SchemaError(
                f"final has {given}; expected the columns {sorted(wanted)}: all with Column(final=True) and no other."
            )
        rows = _on_host(settled(final), "final")
        if finals is None:
            return dict(self._whole_schema.zero_step)
        for name, value in rows.items():
            if value is None or _holds_objects(value):
                rows[name] = _stacked_ends(name, finals[name], value, ends)
        length, found = finals.validate(rows, what=f"final, {self._what}")
        if length != self.num_envs:
            raise SchemaError(
                f"final has {length} rows; expected one for each of {self.num_envs} environments."
            )
        return {**self._whole_schema.zero_step, **found}

    def _checked_trajectory(self) -> dict[str, Array]:
        """The attribute `trajectory` as bytes, uint8 [n, step_bytes] a column; SchemaError if it does not fit."""
        if self._once_schema is None and self.trajectory is None:
            return {}
        wanted = sorted(self._whole_schema.per_trajectory)
        if self._once_schema is None or not isinstance(self.trajectory, Mapping):
            raise SchemaError(
                f"The attribute trajectory is {shown(self.trajectory)}; expected arrays [{self.num_envs}, ...] of the "
                f"columns with per='trajectory': {wanted}."
            )
        once = _on_host(self.trajectory, "the attribute trajectory")
        length, found = self._once_schema.validate(once, what="the attribute trajectory")
        if length != self.num_envs:
            raise SchemaError(
                f"The attribute trajectory has {length} rows; expected one for each of {self.num_envs} environments."
            )
        return found


def _holds_objects(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype == object)
    return isinstance(value, (list, tuple)) and any(each is None for each in value)


def _by_column(final: Array, wanted: Mapping[str, Column], ends: Array) -> dict[str, Array]:
    """Mappings of environments, an array [n] of objects, as an array [n] of objects for each column."""
    columns = {name: np.full(len(final), None, dtype=object) for name in wanted}
    for i in np.flatnonzero(ends).tolist():
        row = as_mapping(final[i])
        if not isinstance(row, Mapping) or set(row) != set(wanted):
            given = (
                f"has {sorted(map(str, row))}" if isinstance(row, Mapping) else f"is a {type(row).__name__}"
            )
            raise SchemaError(
                f"final of environment {i}, whose trajectory ends, {given}; expected a mapping of the columns "
                f"{sorted(wanted)}: all with Column(final=True) and no other."
            )
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
