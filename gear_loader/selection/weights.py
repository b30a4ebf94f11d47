"""Importance weights of prioritized draws."""

from __future__ import annotations

import numpy as np

from gear_loader.utils.arrays import Array

__all__ = ["importance_weights"]


def importance_weights(leaves: Array, least: float, beta: float, *, scale: float = 1.0) -> Array:
    """Compute the importance weights of drawn items: ``(scale * min(least / leaf, 1)) ** beta``.

    Weights of Schaul et al. (2016, section 3.4), divided by the largest one: with ``scale=1`` an item whose leaf is
    `least` weighs 1.

    Args:
        leaves: leaves of the drawn items, float [n], positive.
        least: the smallest leaf that is compared with: of the batch, or of the table.
        beta: exponent of the correction, 0 (none) to 1 (full).
        scale: factor of all weights before the exponent, where items are drawn from several tables.

    Returns:
        float32 [n]; the arithmetic is in float64.
    """
    ratios = np.minimum(np.float64(least) / leaves.astype(np.float64), 1.0) * scale
    weights: Array = (ratios**beta).astype(np.float32)
    return weights
