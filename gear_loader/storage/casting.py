"""Conversion of what users add into the dtype of a column with ``cast=True``, and the rules for it."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import Array, as_array, shown

__all__ = ["can_cast", "cast_to"]

_FLOAT = np.dtype(np.float32)
_PLAIN = (list, tuple, numbers.Real, np.generic)


def can_cast(given: Any, dtype: torch.dtype) -> bool:
    """Whether numpy casts one dtype to the other by its rule ``same_kind``: not floats to integers, numbers to bool, or
    signed integers to unsigned ones. bfloat16 counts as float32.

    Args:
        given: a dtype of torch or numpy. dtype: of the column.
    """
    try:
        source = given if isinstance(given, np.dtype) else _numpy_dtype(given)
    except TypeError:  # one that numpy lacks
        return False
    return source.kind in "biuf" and np.can_cast(source, _numpy_dtype(dtype), "same_kind")


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return _FLOAT if dtype is torch.bfloat16 else np.dtype(str(dtype).removeprefix("torch."))


def cast_to(value: Any, dtype: torch.dtype, what: str) -> Any:
    """Convert a value to a column's dtype; return values unchanged that have it, and those of types without a dtype.

    Args:
        value: a numpy array, a torch tensor, a number or (nested) sequences of them. Integers in sequences may go into
            any integer dtype that holds them; otherwise `can_cast` decides.
        dtype: of the column.
        what: name of the value in errors.

    Returns:
        An array, or of bfloat16 a CPU tensor, of the same shape.

    Raises:
        SchemaError: dtypes that cannot be cast, numbers that overflow, sequences of uneven lengths.
    """
    if isinstance(value, np.ma.MaskedArray) or not isinstance(value, (np.ndarray, torch.Tensor, *_PLAIN)):
        return value
    loose = isinstance(value, _PLAIN)
    if isinstance(value, torch.Tensor):
        exact = value.dtype is dtype
    else:
        exact = isinstance(value, np.ndarray) and _is_exact(value.dtype, dtype)
    if exact:
        return value
    value = _listed(value, dtype, what) if loose else value
    target = _numpy_dtype(dtype)
    fits = can_cast(value.dtype, dtype) or (loose and value.dtype.kind in "iu" and target.kind in "iu")
    if not fits:
        raise SchemaError(
            f"{what} has dtype {value.dtype}; a column of {dtype} with cast=True takes what numpy casts to it by its "
            "rule 'same_kind'. Convert it first."
        )
    return _narrowed(as_array(value, what), dtype, target, what)


def _is_exact(given: np.dtype[Any], dtype: torch.dtype) -> bool:
    return dtype is not torch.bfloat16 and given == _numpy_dtype(dtype)


def _listed(value: Any, dtype: torch.dtype, what: str) -> Array:
    """A number, or sequences of numbers, as an array; integers beyond 64 bits as floats for a column of floats."""
    try:
        array = np.asarray(value)
        if array.dtype == object and all(isinstance(number, int) for number in array.flat):
            if not dtype.is_floating_point:
                raise _overflow(max(array.flat, key=abs), dtype, what)
            array = array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SchemaError(f"{what} is {shown(value)}; expected numbers of {dtype}: {error}") from None
    return array


def _narrowed(array: Array, dtype: torch.dtype, target: np.dtype[Any], what: str) -> Any:
    """Convert an array of a kind that can be cast; refuse numbers that overflow."""
    if target.kind in "iu":
        limits = np.iinfo(target)
        if array.size and array.dtype.kind in "iu":
            for number in (int(array.min()), int(array.max())):
                if not limits.min <= number <= limits.max:
                    raise _overflow(number, dtype, what)
        return array.astype(target)
    result: Any
    with np.errstate(over="ignore"):
        if dtype is torch.bfloat16:
            result = torch.from_numpy(array.astype(_FLOAT)).to(dtype)
            infinite = result.isinf().numpy()
        else:
            result = array.astype(target)
            infinite = np.isinf(result)
    if infinite.any():
        finite = infinite & np.isfinite(array)
        if finite.any():
            raise _overflow(array[finite].flat[0], dtype, what)
    return result


def _overflow(number: Any, dtype: torch.dtype, what: str) -> SchemaError:
    limits: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return SchemaError(
        f"{what} has the value {number}, which {dtype} cannot hold ({limits.min} to {limits.max}). Clip it first, or "
        "give the column a wider dtype."
    )
