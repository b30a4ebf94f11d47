"""The dtypes of columns, by the names stored with a table, and their counterparts in numpy and torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gear_loader.utils.lazy_torch import torch

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of a value of each dtype."""

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ITEM_BYTES if name != "bfloat16"}
"""The numpy dtypes; numpy lacks bfloat16."""

_LARGEST_BFLOAT16 = float.fromhex("0x1.fep127")


class DtypeName(str):
    """The name of a dtype, in place of a torch dtype, which only a process that has loaded torch can have."""

    __slots__ = ()


@functools.cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """The torch dtypes."""
    return {name: getattr(torch, name) for name in ITEM_BYTES}


@functools.cache
def dtype_names() -> dict[torch.dtype, str]:
    """The names of the torch dtypes."""
    return {dtype: name for name, dtype in torch_dtypes().items()}


def largest_float(name: str) -> float:
    """The largest finite number of a floating-point dtype; 0 for other dtypes."""
    if name == "bfloat16":
        return _LARGEST_BFLOAT16
    dtype = NUMPY_DTYPES[name]
    return float(np.finfo(dtype).max) if dtype.kind == "f" else 0.0
