"""Dealing micro-batches to ranks, against all ways on small inputs and against Karmarkar and Karp on large ones."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gear_loader as gear
from gear_loader.errors import SchemaError


def karmarkar_karp(costs: Any, parts: int) -> float:
    """The largest sum of the parts, of any numbers of items, that largest differencing finds."""
    heap = [(-cost, i, [0.0] * (parts - 1) + [float(cost)]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, i, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        sums = sorted(a + b for a, b in zip(one, reversed(other), strict=True))
        heapq.heappush(heap, (sums[0] - sums[-1], i, sums))
    return max(heap[0][2])


@given(costs=st.lists(st.integers(0, 100), min_size=2, max_size=8).filter(lambda costs: len(costs) % 2 == 0))
def test_parts_are_equal_in_number_and_close_to_the_best(costs: list[int]) -> None:
    dealt = gear.balance(costs, 2)
    assert sorted(dealt.reshape(-1).tolist()) == list(range(len(costs)))
    assert dealt.shape == (2, len(costs) // 2)
    found = max(sum(costs[i] for i in part) for part in dealt)
    best = min(
        max(sum(costs[i] for i in part), sum(costs) - sum(costs[i] for i in part))
        for part in itertools.combinations(range(len(costs)), len(costs) // 2)
    )
    assert best <= found <= best * 4 / 3 + max(costs) / 6


def micro_batch(rng: np.random.Generator, power: int) -> int:
    """Sum of powers of log-normal lengths, from 100 to 8,000, that fill 16,384 tokens."""
    total = cost = 0
    while True:
        length = int(np.clip(rng.lognormal(np.log(600), 0.8), 100, 8000))
        if total + length > 16_384:
            return cost
        total, cost = total + length, cost + length**power


@pytest.mark.parametrize("what", ["sequences", "tokens", "tokens squared"])
@pytest.mark.parametrize(("ranks", "each"), [(2, 8), (8, 8), (64, 16)])
def test_ranks_are_equal_to_three_percent(what: str, ranks: int, each: int) -> None:
    rng = np.random.default_rng(ranks)
    for _ in range(3):
        if what == "sequences":  # each a micro-batch
            costs = np.clip(rng.lognormal(np.log(600), 0.8, ranks * each), 100, 8000).astype(np.int64)
        else:
            power = 1 + (what == "tokens squared")
            costs = np.array([micro_batch(rng, power) for _ in range(ranks * each)])
        sums = costs[gear.balance(costs, ranks)].sum(1)
        assert sums.max() <= 1.01 * karmarkar_karp(costs, ranks)
        assert sums.max() <= 1.03 * sums.min()


def test_arguments_that_do_not_fit() -> None:
    for costs, ranks in (([1, 2, 3], 2), ([], 1), ([1, -1], 2), ([1, float("nan")], 1), ([[1]], 1), ([1], 0)):
        with pytest.raises(SchemaError):
            gear.balance(costs, ranks)
