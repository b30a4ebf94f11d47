"""Priority updates of plain arrays, copied and validated by one compiled call."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from gear_loader.native.priority_updates import take
from gear_loader.storage import priority_updates
from gear_loader.storage.priority_updates import PriorityUpdates, invalid
from gear_loader.utils.arrays import Array, address_of, data_address


def request(
    index: Any, priority: Any, *, generation: Any, anchor: Any, unit: Literal["trajectory", "step"]
) -> PriorityUpdates:
    """As `gear_loader.storage.priority_updates.request`, for int64 and float32 in host memory faster."""
    taken = _take(index, priority, generation, anchor) if (anchor is None) == (unit == "trajectory") else None
    if taken is None:
        return priority_updates.request(index, priority, generation=generation, anchor=anchor, unit=unit)
    rows, narrow, bad = taken
    if bad >= 0:
        raise invalid(bad, narrow[bad])
    return PriorityUpdates(rows[0], rows[1], None if generation is None else rows[2], narrow)


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
