"""The quick check of new trajectories: contiguous CPU data of exactly the columns' dtypes and shapes.

It returns where the data lie, or None for everything else, valid or not, which `Schema.validate` checks.

A call into torch takes 0.1 us, so a tensor is asked as little as possible: one that is not strided, or nested, or
without a storage of its own (sparse, mkldnn, inside `torch.func`) raises RuntimeError when it is asked for its shape,
its address or its storage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.utils.arrays import data_address

__all__ = ["Expected", "located"]


class Expected(NamedTuple):
    """What a column's values have to be.

    Attributes:
        name: of the column. dtype: torch's. array_dtype: numpy's; None if it has none.
        shape: of one step, or of the value per trajectory. once: whether it is one per trajectory.
        step_bytes: bytes of it.
    """

    name: str
    dtype: torch.dtype
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
            if type(value) is torch.Tensor:
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
            elif type(value) is np.ndarray:
                given = value.shape
                if array_dtype is None or value.dtype != array_dtype or not value.flags.c_contiguous:
                    return None
                address, held = data_address(value), -1
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
