"""Leaves of priorities, and importance weights of what is drawn by them."""

from __future__ import annotations

import numpy as np

from gear_loader.errors import PriorityError
from gear_loader.kernels.sum_tree import LOWEST_LEAF
from gear_loader.native import sum_tree
from gear_loader.native.priority_updates import leaves_of
from gear_loader.selection.samplers import Sampler
from gear_loader.utils.arrays import Array

LARGEST_LEAF = float(np.finfo(np.float32).max)
SHARE = 2.0**-10
"""Most share of the probability that leaves outside float32's range may have in a draw."""
_DOUBTFUL_EPS = 2.0**100  # with a smaller eps, sums exceed float32's range by rounding only


def weigh(values: Array, alpha: float, eps: float) -> Array:
    """Leaves of priorities (float32 [n]): ``(values + eps) ** alpha``, float64 [n], 0 only for 0."""
    weighed: Array = np.empty(len(values))
    sum_tree.weigh(values, alpha, eps, weighed)
    return weighed


def first_leaves(sampler: Sampler, priorities: Array) -> Array:
    """Leaves of new items with these priorities (float32 [n]), float32 [n], clipped to float32's range."""
    leaves: Array = np.minimum(weigh(priorities, *sampler.exponent), LARGEST_LEAF).astype(np.float32)
    return leaves


def checked_leaves(sampler: Sampler, priorities: Array) -> Array:
    """Leaves of priorities (float32 [n]), float32 [n].

    Raises:
        PriorityError: a leaf exceeds float32's range.
    """
    leaves: Array = np.empty(len(priorities), dtype=np.float32)
    bad = leaves_of(priorities, *sampler.exponent, leaves)
    if bad >= 0:
        raise PriorityError(
            f"priority[{bad}] is {priorities[bad]}, which {sampler!r} raises beyond float32's "
            "range; expected a smaller one, or use a smaller alpha. Nothing was changed."
        )
    return leaves


def scaled(leaves: Array, factor: Array | float) -> Array:
    """Leaves times a factor, float32 [n]; positive ones stay so."""
    scaled = (leaves * np.asarray(factor, dtype=np.float64)).astype(np.float32)
    result: Array = np.where(leaves > 0, np.maximum(scaled, np.float32(LOWEST_LEAF)), np.float32(0))
    return result


def may_leave_range(sampler: Sampler) -> bool:
    """Whether leaves of valid priorities may exceed float32's range."""
    alpha, eps = sampler.exponent
    return alpha > 1 or eps > _DOUBTFUL_EPS


def out_of_range(sampler: Sampler) -> PriorityError:
    """The error of a draw in which leaves clipped to float32's range have too much of the probability."""
    return PriorityError(
        f"{sampler!r} raises the priorities out of float32's range (1.2e-38 to 3.4e38), so that very different ones "
        "would be drawn equally often. Use a smaller alpha (with 1 or less every priority fits), scale the priorities "
        "so that they are about 1, or use an eps that keeps small ones from vanishing."
    )


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
    weights, least = np.empty(len(leaves), dtype=np.float32), -1.0 if least is None else float(least)
    leaves = np.ascontiguousarray(leaves)  # else the loop would be compiled for strided ones too
    sum_tree.importance(leaves, least, float(beta), float(scale), weights)
    return weights
