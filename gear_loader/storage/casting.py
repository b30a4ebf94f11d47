"""Conversion of what users add into the dtype of a column with ``cast=True``, and the rules for it."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.dtypes import NUMPY_DTYPES, largest_float, torch_dtypes
from gear_loader.utils.arrays import Array, as_array, shown
from gear_loader.utils.lazy_torch import is_tensor, torch

_FLOAT = np.dtype(np.float32)
_PLAIN = (list, tuple, numbers.Real, np.generic)


def can_cast(given: Any, name: str) -> bool:
    """Whether numpy casts one dtype to the other by its rule ``same_kind``: not floats to integers, numbers to bool, or
    signed integers to unsigned ones. bfloat16 counts as float32.

    Args:
        given: a dtype of torch or numpy. name: of the column's dtype.
    """
    try:
        source = given if isinstance(given, np.dtype) else np.dtype(_numpy_name(given))
    except TypeError:  # one that numpy lacks
        return False
    return source.kind in "biuf" and np.can_cast(source, _target(name), "same_kind")


def _numpy_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _FLOAT.name if name == "bfloat16" else name


def _target(name: str) -> np.dtype[Any]:
    """The numpy dtype of a column, float32 for bfloat16."""
    return NUMPY_DTYPES.get(name, _FLOAT)


def cast_to(value: Any, name: str, what: str) -> Any:
    """Convert a value to a column's dtype; return values unchanged that have it, and those of types without a dtype.

    Args:
        value: a numpy array, a torch tensor, a number or (nested) sequences of them. Integers in sequences may go into
            any integer dtype that holds them; otherwise `can_cast` decides.
        name: of the column's dtype.
        what: name of the value in errors.

    Returns:
        An array, or of bfloat16 a CPU tensor, of the same shape.

    Raises:
        SchemaError: dtypes that cannot be cast, numbers that overflow, sequences of uneven lengths.
    """
    loose = isinstance(value, _PLAIN)
    if isinstance(value, np.ma.MaskedArray) or not (
        loose or isinstance(value, np.ndarray) or is_tensor(value)
    ):
        return value
    if is_tensor(value):
        exact = value.dtype is torch_dtypes()[name]
    else:
        exact = isinstance(value, np.ndarray) and name in NUMPY_DTYPES and value.dtype == _target(name)
    if exact:
        return value
    value = _listed(value, name, what) if loose else value
    target = _target(name)
    fits = can_cast(value.dtype, name) or (loose and value.dtype.kind in "iu" and target.kind in "iu")
    if not fits:
        raise SchemaError(
            f"{what} has dtype {value.dtype}; a column of torch.{name} with cast=True takes what numpy casts to it by "
            "its rule 'same_kind'. Convert it first."
        )
    return _narrowed(as_array(value, what), name, target, what)


def _listed(value: Any, name: str, what: str) -> Array:
    """A number, or sequences of numbers, as an array; integers beyond 64 bits as floats for a column of floats."""
    try:
        array = np.asarray(value)
        if array.dtype == object and all(isinstance(number, int) for number in array.flat):
            if not largest_float(name):
                raise _overflow(max(array.flat, key=abs), name, what)
            array = array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SchemaError(f"{what} is {shown(value)}; expected numbers of torch.{name}: {error}") from None
    return array


def _narrowed(array: Array, name: str, target: np.dtype[Any], what: str) -> Any:
    """Convert an array of a kind that can be cast; refuse numbers that overflow."""
    if target.kind in "iu":
        limits = np.iinfo(target)
        if array.size and array.dtype.kind in "iu":
            for number in (int(array.min()), int(array.max())):
                if not limits.min <= number <= limits.max:
                    raise _overflow(number, name, what)
        return array.astype(target)
    result: Any
    with np.errstate(over="ignore"):
        if name == "bfloat16":
            result = torch.from_numpy(array.astype(_FLOAT)).to(torch.bfloat16)
            infinite = result.isinf().numpy()
        else:
            result = array.astype(target)
            infinite = np.isinf(result)
    if infinite.any():
        finite = infinite & np.isfinite(array)
        if finite.any():
            raise _overflow(array[finite].flat[0], name, what)
    return result


def _overflow(number: Any, name: str, what: str) -> SchemaError:
    largest: float = largest_float(name)
    low, high = -largest, largest
    if not largest:
        limits = np.iinfo(_target(name)) if name != "bool" else None
        low, high = (0, 1) if limits is None else (limits.min, limits.max)
    return SchemaError(
        f"{what} has the value {number}, which torch.{name} cannot hold ({low} to {high}). Clip it first, or give the "
        "column a wider dtype."
    )
