"""Priorities as users give them, made float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["as_array", "narrowed"]

Array = np.ndarray[Any, Any]


def as_array(value: Any) -> Any:
    """A tensor as an array on the host (bfloat16, which numpy lacks, as float32); anything else as it is."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return value


def narrowed(values: Array) -> tuple[Array, int]:
    """Priorities as float32, and the position of the first that is none: NaN, infinite or negative; -1 for none.

    Args:
        values: float32 or float64 [n].

    What is positive stays so, and can be drawn; what is negative is found, however small.
    """
    if values.dtype == np.float32 and len(values) and values.min() >= 0 and values.max() < np.inf:
        return values, -1
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(narrow) & (values >= 0)))
    tiny = np.finfo(np.float32).tiny
    return np.where((narrow == 0) & (values > 0), tiny, narrow), int(bad[0]) if len(bad) else -1
