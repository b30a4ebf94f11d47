"""Validation of priority updates."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from gear_loader.errors import PriorityError, SchemaError
from gear_loader.native.priority_updates import take
from gear_loader.utils.arrays import Array, address_of, as_array, data_address, narrowed, shown

__all__ = ["PriorityUpdates", "check_names", "request"]


class PriorityUpdates(NamedTuple):
    """A validated priority update.

    Attributes:
        slots, steps: int64 [n]. generations: int64 [n] or None. priorities: float32 [n].
    """

    slots: Array
    steps: Array
    generations: Array | None
    priorities: Array


def request(
    index: Any, priority: Any, *, generation: Any, anchor: Any, unit: Literal["trajectory", "step"]
) -> PriorityUpdates:
    """Validate a user's priority update.

    Args:
        index: integers [n], slots. priority: numbers [n]. All are tensors or arrays.
        generation, anchor: integers [n] or None.
        unit: unit of the selector.

    Raises:
        PriorityError: a priority that is NaN, infinite (as float32) or negative; the message names the first.
        SchemaError: another shape or dtype, or `anchor` does not fit `unit`.
    """
    taken = _take(index, priority, generation, anchor) if (anchor is None) == (unit == "trajectory") else None
    if taken is not None:
        rows, narrow, bad = taken
        if bad >= 0:
            raise _invalid(bad, narrow[bad])
        return PriorityUpdates(rows[0], rows[1], None if generation is None else rows[2], narrow)
    slots = _array("index", index, "iu")
    count = len(slots)
    values = _array("priority", priority, "fiub", count)
    if values.dtype != np.float32:
        values = values.astype(np.float64)
    generations = None if generation is None else _int64(_array("generation", generation, "iu", count))
    check_names(anchor, unit)
    steps = np.zeros(count, dtype=np.int64) if anchor is None else _array("anchor", anchor, "iu", count)
    narrow, bad = narrowed(values)
    if bad >= 0:
        raise _invalid(bad, values[bad])
    return PriorityUpdates(_int64(slots), _int64(steps), generations, np.array(narrow))


def _invalid(row: int, value: Any) -> PriorityError:
    return PriorityError(
        f"priority[{row}] is {value}; expected a finite number (as float32) that is not negative. "
        "Nothing was changed."
    )


_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


def _take(index: Any, priority: Any, generation: Any, anchor: Any) -> tuple[Array, Array, int] | None:
    """Copy an update of contiguous host memory and look for an invalid priority, in one compiled call.

    Returns:
        Slots, steps and generations as int64 [3, n], priorities as float32 [n], and the first invalid one or -1; None
        if the arguments need the full validation.
    """
    if type(priority) not in (torch.Tensor, np.ndarray) or priority.ndim != 1 or not len(priority):
        return None
    count = len(priority)
    slots = _address(index, count, torch.int64, _INT64)
    steps = 0 if anchor is None else _address(anchor, count, torch.int64, _INT64)
    generations = 0 if generation is None else _address(generation, count, torch.int64, _INT64)
    values = _address(priority, count, torch.float32, _FLOAT32)
    if slots < 0 or steps < 0 or generations < 0 or values < 0:
        return None
    rows, priorities = np.empty((3, count), dtype=np.int64), np.empty(count, dtype=np.float32)
    return rows, priorities, take(slots, steps, generations, values, rows, priorities)


def _address(value: Any, count: int, dtype: torch.dtype, array_dtype: Any) -> int:
    """Address of the elements of a contiguous array or CPU tensor [n] of this dtype; -1 for other values."""
    if type(value) is torch.Tensor:
        if (
            value.dtype is not dtype
            or value.layout is not torch.strided
            or not value.is_cpu
            or value.is_nested
        ):
            return -1
        if value.shape != (count,) or not value.is_contiguous() or value.is_neg():
            return -1
        return address_of(value) or -1
    if type(value) is not np.ndarray or value.dtype != array_dtype or value.shape != (count,):
        return -1
    return data_address(value) if value.flags.c_contiguous and value.flags.aligned else -1


def _int64(values: Array) -> Array:
    # Copied, because the update may run after the user has overwritten the array.
    return np.array(values, dtype=np.int64)


def check_names(anchor: Any, unit: Literal["trajectory", "step"]) -> None:
    """Raise SchemaError unless `anchor` is given exactly if the unit is a step."""
    if unit == "step" and anchor is None:
        raise SchemaError(
            "No anchor was received; with unit='step' a step is named by index and anchor: pass anchor=batch['anchor']."
        )
    if unit == "trajectory" and anchor is not None:
        raise SchemaError(
            "anchor was received; with unit='trajectory' a priority is that of the whole trajectory: leave it out, or "
            "use a selector with unit='step'."
        )


def _array(name: str, value: Any, kinds: str, count: int | None = None) -> Array:
    value = as_array(value, name)
    try:
        array = np.atleast_1d(np.asarray(value))
        fits = array.dtype.kind in kinds or array.size == 0
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits or array.ndim != 1 or (count is not None and len(array) != count):
        shape = f"{array.dtype} {list(array.shape)}" if fits else shown(value)
        kind = "numbers" if "f" in kinds else "integers"
        raise SchemaError(
            f"{name} is {shape}; expected {kind} [{'n' if count is None else count}]"
            f"{'' if count is None else ', as many as index has'}. Nothing was changed."
        )
    return array
