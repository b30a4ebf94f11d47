"""The quick check of new trajectories: contiguous CPU data of exactly the columns' dtypes and shapes.

It returns where the data lie, or None for everything else, valid or not, which `Schema.validate` checks.

A call into torch takes 0.1 us, so a tensor is asked as little as possible: one that is not strided, or nested, or
without a storage of its own (sparse, mkldnn, inside `torch.func`) raises RuntimeError when it is asked for its shape,
its address or its storage.
"""

from __future__ import annotations

import operator
import sys
from typing import Any, NamedTuple

import numpy as np

from gear_loader.utils.arrays import DATA, Array, data_address, word_at
from gear_loader.utils.lazy_torch import is_tensor, torch


class Expected(NamedTuple):
    """What a column's values have to be.

    Attributes:
        name: of the column. dtype: torch's; None if torch is not loaded. array_dtype: numpy's; None if it has none.
        shape: of one step, or of the value per trajectory. once: whether it is one per trajectory.
        step_bytes: bytes of it.
    """

    name: str
    dtype: torch.dtype | None
    array_dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    once: bool
    step_bytes: int


def located(expected: tuple[Expected, ...], rows: Any) -> tuple[int, list[int], list[Any]] | None:
    """Check one trajectory.

    Args:
        expected: the table's columns. rows: anything.

    Returns:
        T; address of each column's steps; the arrays and tensors that own this memory. None if a full validation is
        needed.
    """
    if type(rows) is not dict or len(rows) != len(expected):
        return None
    length, addresses, values = 0, [], []
    try:
        for name, dtype, array_dtype, shape, once, step_bytes in expected:
            value = rows.get(name)
            if type(value) is np.ndarray:
                given = value.shape
                if array_dtype is None or value.dtype != array_dtype or not value.flags.c_contiguous:
                    return None
                address = word_at(id(value) + DATA).value  # `data_address` without its call
                held: Any = -1
            elif is_tensor(value) and type(value) is torch.Tensor:
                given = value.shape
                if (
                    value.dtype is not dtype
                    or not value.is_cpu
                    or not value.is_contiguous()
                    or value.is_neg()
                ):
                    return None
                address = value.data_ptr()
                held = value.untyped_storage().nbytes() - value.storage_offset() * dtype.itemsize
            else:
                return None
            if once:
                if given != shape or 0 <= held < step_bytes:
                    return None
            else:
                if not length:
                    length = given[0] if given else 0
                if not length or given != (length, *shape) or 0 <= held < length * step_bytes:
                    return None
            if not address:
                return None
            addresses.append(address)
            values.append(value)
    except RuntimeError:
        return None
    return length, addresses, values


def located_list(expected: tuple[Expected, ...], rows: Any) -> tuple[Array, Array, list[Any]] | None:
    """Check many trajectories at once.

    All values of a column are asked for one property after another, by loops in C, which takes a third of the time.

    Args:
        expected: the table's columns. rows: a list or a tuple.

    Returns:
        Addresses, int64 [n, C]; lengths in steps, int64 [n]; the owners of this memory. None if a full validation is
        needed, also if there are no rows.
    """
    if set(map(type, rows)) != {dict} or set(map(len, rows)) != {len(expected)}:
        return None
    addresses = np.empty((len(rows), len(expected)), dtype=np.int64)
    lengths: Array | None = None
    owners: list[Any] = []
    try:
        for c, each in enumerate(expected):
            values = list(map(operator.itemgetter(each.name), rows))
            found = _of_arrays(values, each) or _of_tensors(values, each)
            if found is None:
                return None
            addresses[:, c], steps, held = found
            if (held < steps * each.step_bytes).any():
                return None
            if not each.once:
                lengths = steps if lengths is None else lengths
                if (steps != lengths).any():
                    return None
            owners.append(values)
    except (KeyError, RuntimeError):
        return None
    return None if lengths is None or not addresses.all() else (addresses, lengths, owners)


_Found = tuple["list[int] | Array", Array, Array]


def _of_tensors(values: list[Any], each: Expected) -> _Found | None:
    """Addresses, steps (1 of values per trajectory) and bytes from there to the storage's end, int64 [n] each."""
    dtype = each.dtype
    if dtype is None or not is_tensor(values[0]) or set(map(type, values)) != {torch.Tensor}:
        return None
    if any(map(torch.Tensor.is_neg, values)):
        return None
    storages = map(torch.Tensor.untyped_storage, values)
    ends = np.fromiter(map(torch.UntypedStorage.nbytes, storages), np.int64, len(values))
    begins = np.fromiter(map(torch.Tensor.storage_offset, values), np.int64, len(values)) * dtype.itemsize
    if "gear_loader.native.compile" in sys.modules:  # not in a client
        from gear_loader.native.tensors import can_describe, describe

        if can_describe():
            described = describe(values, dtype, each.shape, once=each.once)
            return None if described is None else (described[:, 0], described[:, 1], ends - begins)
    if any(value is not dtype for value in map(_DTYPE, values)) or not all(map(_IS_CPU, values)):
        return None
    if not all(map(torch.Tensor.is_contiguous, values)):
        return None
    steps = _steps(list(map(_SHAPE, values)), each)
    return None if steps is None else (list(map(torch.Tensor.data_ptr, values)), steps, ends - begins)


def _of_arrays(values: list[Any], each: Expected) -> _Found | None:
    """The same of C-contiguous arrays, which always hold all of their elements."""
    if set(map(type, values)) != {np.ndarray} or each.array_dtype is None:
        return None
    if "gear_loader.native.compile" in sys.modules:  # not in a client
        from gear_loader.native.array_headers import describe_arrays

        found = describe_arrays(values, each.array_dtype, each.shape if each.once else (-1, *each.shape))
        if found is not None:
            return found[:, 0], found[:, 1], found[:, 1] * each.step_bytes
    if any(value != each.array_dtype for value in set(map(_DTYPE, values))) or not all(map(_C_ORDER, values)):
        return None
    held = np.fromiter(map(_NBYTES, values), np.int64, len(values))
    steps = _steps(list(map(_SHAPE, values)), each)
    return None if steps is None else (list(map(data_address, values)), steps, held)


def _steps(shapes: list[tuple[int, ...]], each: Expected) -> Array | None:
    """Steps of values of these shapes, int64 [n]; None if one does not fit."""
    if each.once:
        return np.ones(len(shapes), dtype=np.int64) if set(shapes) == {each.shape} else None
    if not all(shape and shape[0] and shape[1:] == each.shape for shape in set(shapes)):
        return None
    return np.fromiter(map(operator.itemgetter(0), shapes), np.int64, len(shapes))


_DTYPE, _SHAPE, _IS_CPU, _NBYTES = map(operator.attrgetter, ("dtype", "shape", "is_cpu", "nbytes"))
_C_ORDER = operator.attrgetter("flags.c_contiguous")
