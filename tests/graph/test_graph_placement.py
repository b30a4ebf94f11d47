"""Placement over ranks and tiers: by hand, its properties, and against an exhaustive search."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gear_loader.errors import SchemaError
from gear_loader.graph.feature_placement import REPLICATED, UNPLACED, place


def test_by_hand() -> None:
    reads = np.array([[9, 1, 5, 0, 3, 2.0], [9, 6, 0, 1, 3, 1.0]])
    placed = place(reads, capacity=2, replicated=1, host_capacity=2)
    # Row 0 is on both; scores 3 p - total: row 2 is best at rank 0 (10), row 1 at rank 1 (11).
    assert placed.owner.tolist() == [REPLICATED, 1, 0, UNPLACED, UNPLACED, UNPLACED]
    assert placed.in_host.tolist() == [False, False, False, False, True, True]
    assert placed.rows(0).tolist() == [0, 2]
    assert placed.rows(1).tolist() == [0, 1]
    shares = placed.shares(reads)
    total = reads.sum()
    assert shares == pytest.approx(
        {"local": (18 + 5 + 6) / total, "peer": 1 / total, "host": 9 / total, "disk": 1 / total}
    )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("capacity", [0, 4, 25])
@pytest.mark.parametrize("replicated", [0, 3])
def test_properties(ranks: int, capacity: int, replicated: int) -> None:
    if replicated > capacity:
        pytest.skip("more than the capacity")
    reads = np.random.default_rng(ranks).random((ranks, 40)) ** 3
    placed = place(reads, capacity=capacity, replicated=replicated, host_capacity=5)
    held = [placed.rows(rank) for rank in range(ranks)]
    assert all(len(rows) <= capacity for rows in held)
    assert sum(map(len, held)) == min(ranks * capacity, ranks * replicated + 40 - replicated)
    assert (placed.owner == REPLICATED).sum() == replicated
    assert not (placed.in_host & (placed.owner != UNPLACED)).any()
    assert placed.in_host.sum() == min(5, (placed.owner == UNPLACED).sum())
    assert sum(placed.shares(reads).values()) == pytest.approx(1)


def test_one_rank_holds_the_rows_that_it_reads_most() -> None:
    reads = np.random.default_rng(0).random(30)
    for replicated in (0, 4, 9):
        placed = place(reads, capacity=9, replicated=replicated)
        assert set(placed.rows(0).tolist()) == set(np.argsort(-reads)[:9].tolist())


def test_devices_together_hold_what_is_read_most_when_ranks_read_alike() -> None:
    reads = np.random.default_rng(1).random(30)
    placed = place(reads, capacity=5, ranks=3)
    assert set(np.flatnonzero(placed.owner >= 0).tolist()) == set(np.argsort(-reads)[:15].tolist())
    assert np.bincount(placed.owner[placed.owner >= 0]).tolist() == [5, 5, 5]


def test_near_the_best_share_of_local_reads() -> None:
    """Two ranks with room for two rows each, of six: local reads against all ways to place them."""
    shares = []
    for seed in range(20):
        reads = np.random.default_rng(seed).random((2, 6)) ** 2
        best = max(
            reads[0, list(a)].sum() + reads[1, list(b)].sum()
            for a in itertools.combinations(range(6), 2)
            for b in itertools.combinations(sorted(set(range(6)) - set(a)), 2)
        )
        shares.append(place(reads, capacity=2).shares(reads)["local"] * reads.sum() / best)
    assert min(shares) > 0.75
    assert np.mean(shares) > 0.95


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (np.ones(4), {"capacity": 2, "replicated": 3}, "^replicated is 3; expected at most capacity, 2"),
        (np.ones(4), {"capacity": -1}, "^capacity is -1"),
        (
            np.ones((2, 4)),
            {"capacity": 1, "ranks": 3},
            r"^probabilities is float64 \[2, 4\]; expected floats \[4\] or \[3, 4\]",
        ),
        (np.array([1, -1.0]), {"capacity": 1}, "^probabilities has values that are negative or not finite"),
        (np.array(["a"]), {"capacity": 1}, "^probabilities is <U1"),
    ],
)
def test_invalid(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        place(given, **options)


def test_no_reads() -> None:
    placed = place(np.zeros(3), capacity=1)
    with pytest.raises(SchemaError, match=r"^No probability is above 0"):
        placed.shares(np.zeros(3))
