"""Single steps of a column, checked and written into memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.casting import can_cast
from gear_loader.storage.dtypes import largest_float
from gear_loader.storage.ragged_input import StepValues, with_step_records
from gear_loader.storage.schema import Column, Schema, exactly
from gear_loader.utils.arrays import Array, address_of, shown, unreadable
from gear_loader.utils.lazy_torch import is_tensor, torch


def checked_once(
    schema: Schema, values: Mapping[str, Any] | None
) -> tuple[dict[str, Array], StepValues | None]:
    """The values of the columns per trajectory for a commit, uint8 [1, step_bytes] each, and those that are ragged.

    Args:
        schema: the table's columns. values: column name -> ``[*shape]``, or None.

    Raises:
        SchemaError: a column is missing or unknown, or a value does not fit.
    """
    if not schema.per_trajectory and values is None:
        return {}, None
    if not schema.ragged:
        return schema.validate_once(values, what="trajectory"), None
    values = exactly(values, schema.per_trajectory, "per='trajectory'", "trajectory", schema.objects)
    ragged = {name: [values[name]] for name in schema.per_trajectory if name in schema.ragged}
    records, found = with_step_records(schema, ragged, "trajectory", by_lane=True)
    once = {**values, **{name: each[0] for name, each in records.items()}}
    return schema.validate_once(once, what="trajectory"), found


_BOOLS: frozenset[type] = frozenset({bool, np.bool_})
_INTEGERS: frozenset[type] = frozenset(
    {int, *(np.dtype(f"{kind}{size}").type for kind in "iu" for size in (1, 2, 4, 8))}
)
_FLOATS: frozenset[type] = frozenset({float, int, np.float64})


class StepColumn:
    """Writes single steps into one column, through a view of the current block."""

    def __init__(self, name: str, column: Column) -> None:
        self.name = name
        self.shape = column.shape
        self.step_bytes = step_bytes = column.step_bytes
        self._column = column
        self._dtype = column.numpy_dtype
        self._kind = "" if self._dtype is None else self._dtype.kind
        self._largest = largest_float(column.dtype_name)
        whole = np.iinfo(self._dtype) if self._dtype is not None and self._kind in "iu" else None
        self._limits = (0, -1) if whole is None else (int(whole.min), int(whole.max))
        # Types of numbers that always fit, and of those that fit within limits: both are written as they are.
        # `_put_number` looks at all others.
        self._always: frozenset[type] = frozenset()
        self._quick: tuple[frozenset[type], float, float] = (frozenset(), 0, 0)
        if not self.shape and self._dtype is not None:
            self._always = _BOOLS if self._kind == "b" else frozenset({self._dtype.type})
            if whole is not None:
                self._quick = _INTEGERS, *self._limits
            elif self._kind == "f":
                self._quick = _FLOATS, -self._largest, self._largest
        self.spare: Array = np.empty((1, step_bytes), dtype=np.uint8)
        """The value that `fits` has accepted last."""
        self._spare = self.as_steps(self.spare)
        self.view = self._spare
        """Where steps are written, values [steps, *shape]."""

    def as_steps(self, rows: Array) -> Array:
        """Steps uint8 [n, step_bytes], which need not lie one after another, as values [n, *shape]."""
        dtype = np.dtype(np.int16) if self._dtype is None else self._dtype
        return rows.view(dtype).reshape(len(rows), *self.shape)

    def fits(self, value: Any) -> bool:
        """Whether `put` would accept a value of one step."""
        view, self.view = self.view, self._spare
        try:
            return self.put(0, value)
        finally:
            self.view = view

    def put(self, place: int, value: Any) -> bool:
        """Write the value of one step; return False, having written nothing, if it does not fit."""
        kind = type(value)
        if kind in self._always:
            self.view[place] = value
            return True
        if kind is np.ndarray and value.dtype == self._dtype and value.shape == self.shape:
            self.view[place] = value
            return self._dtype is not None
        kinds, low, high = self._quick
        if kind in kinds and low <= value <= high:
            self.view[place] = value
            return True
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
            if value.dtype == self._dtype and value.shape == self.shape and self._dtype is not None:
                self.view[place] = value
                return True
            return False
        if is_tensor(value):
            return self._put_tensor(place, value)
        return not self.shape and self._put_number(place, value)

    @functools.cached_property
    def _tensor_dtype(self) -> torch.dtype:
        return self._column.dtype

    def _put_tensor(self, place: int, value: torch.Tensor) -> bool:
        if value.is_nested or value.dtype is not self._tensor_dtype or tuple(value.shape) != self.shape:
            return False
        plain = value.is_contiguous() and address_of(value) != 0
        if not plain and unreadable(value) is not None:
            return False
        if value.requires_grad or not value.is_cpu or value.is_neg():
            value = value.detach().resolve_neg().cpu()
        self.view[place] = (value.view(torch.int16) if self._dtype is None else value).numpy()
        return True

    def _put_number(self, place: int, value: Any) -> bool:
        number = value.item() if isinstance(value, np.generic) else value
        if isinstance(number, bool):
            fits = self._kind == "b"
        elif not isinstance(number, (int, float)):
            fits = False
        elif self._largest:
            special = isinstance(number, float) and not math.isfinite(number)
            fits = special or -self._largest <= number <= self._largest
        else:
            fits = self._kind in "iu" and isinstance(number, int) and self._in_range(number)
        if not fits:
            return False
        if self._dtype is None:
            number = torch.tensor(float(number), dtype=torch.bfloat16, device="cpu").view(torch.int16).item()
        self.view[place] = number
        return True

    def _in_range(self, value: int) -> bool:
        low, high = self._limits
        return low <= value <= high

    def misfit(self, value: Any) -> SchemaError:
        """The error for a value that does not fit."""
        shape = list(self.shape)
        name = self._column.dtype_name
        expected = f"torch.{name} and shape {shape} (or [k, ...] of k steps in every column)"
        kind = unreadable(value) if is_tensor(value) else None
        given = getattr(value, "dtype", None)
        exact = given == (self._column.dtype if is_tensor(value) else self._dtype)
        casts = not exact and can_cast(given, name)
        casts = isinstance(value, (list, tuple)) if given is None else casts
        remedy = " With cast=True the column converts it." if casts and not self._column.cast else ""
        if kind is not None:
            what = f"is a {kind}"
        elif isinstance(value, np.ndarray) or is_tensor(value):
            what = f"has dtype {value.dtype} and shape {list(value.shape)}"
        else:
            what = f"is {shown(value)}, of type {type(value).__name__}"
        return SchemaError(
            f"Column {self.name!r} of the step {what}; expected an array or a tensor of {expected}"
            f"{', or a number' if not shape else ''}.{remedy} Nothing was appended."
        )
