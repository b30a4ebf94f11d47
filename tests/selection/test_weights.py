"""Importance weights: one pure function."""

from __future__ import annotations

import numpy as np
import pytest

from gear_loader.selection.weights import importance_weights

LEAVES = np.array([0.3, 1.0, 7.5, 1e-6, 2.0], dtype=np.float32)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_of_a_batch(beta: float, dtype: type) -> None:
    leaves = LEAVES.astype(dtype)
    weights = importance_weights(leaves, leaves.min(), beta)
    assert weights.dtype == np.float32
    expected = (leaves.min().astype(np.float64) / leaves.astype(np.float64)) ** beta
    np.testing.assert_array_equal(weights, expected.astype(np.float32))
    assert weights.max() == 1.0


def test_no_weight_is_above_the_scale() -> None:
    weights = importance_weights(LEAVES, 5.0, 1.0, scale=0.25)
    np.testing.assert_array_equal(weights[LEAVES <= 5], np.float32(0.25))
    assert weights[2] == np.float32(5.0 / 7.5 * 0.25)


def test_beta_zero_gives_ones() -> None:
    assert importance_weights(LEAVES, 0.1, 0.0, scale=0.5).tolist() == [1.0] * len(LEAVES)
