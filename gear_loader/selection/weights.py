"""Importance weights of prioritized draws."""

from __future__ import annotations

import numpy as np

from gear_loader.native import sum_tree
from gear_loader.utils.arrays import Array

__all__ = ["importance_weights"]


def importance_weights(leaves: Array, least: float | None, beta: float, *, scale: float = 1.0) -> Array:
    """Compute the importance weights of drawn items: ``(scale * min(least / leaf, 1)) ** beta``.

    Weights of Schaul et al. (2016, section 3.4), divided by the largest one: with ``scale=1`` an item whose leaf is
    `least` weighs 1.

    Args:
        leaves: float [n], positive leaves of the drawn items.
        least: smallest leaf of the table; None for the smallest of `leaves`.
        beta: exponent of the correction, from 0 (no correction) to 1 (full).
        scale: factor of all weights before the exponent, for draws from several tables.

    Returns:
        float32 [n]; the arithmetic is in float64.
    """
    weights = np.empty(len(leaves), dtype=np.float32)
    sum_tree.importance(leaves, -1.0 if least is None else float(least), float(beta), float(scale), weights)
    return weights
