"""Which trajectories stay in memory: the exchange's limits, and its hit rate beside the best static choice."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tier_policies import TRACES, drifting, hit_rates, table_hit_rates
from gear_loader.checkpoint.spilling import coldness
from gear_loader.storage.tier_swaps import BAND, exchange


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_the_hit_rate_is_near_that_of_the_best_static_choice(name: str, share: float) -> None:
    trace = drifting(TRACES[name], count=2_000, rounds=40, drift=0.02)
    rates = hit_rates(trace, capacity=int(share * 2_000), draws=500, budget=200)
    assert rates["priority"] >= 0.95 * rates["oracle"], rates
    assert rates["priority"] > max(rates["lru"], rates["fifo"], rates["random"]), rates


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in TRACES])
def test_a_table_keeps_what_is_drawn_most(name: str) -> None:
    """Priorities drift, and the owner's thread follows those that the dataset is given."""
    trace = drifting(TRACES[name], count=1_000, rounds=20, drift=0.02)
    rates = table_hit_rates(trace, capacity=250, budget=100)
    assert rates["table"] >= 0.95 * rates["oracle"], rates
    assert rates["table"] > max(rates["lru"], rates["fifo"], rates["random"]), rates


def test_what_changes_places() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        count = int(generator.integers(1, 60))
        sizes = generator.integers(1, 5, count)
        capacity, budget = int(generator.integers(1, 120)), int(generator.integers(1, 30))
        inside = np.zeros(count, dtype=bool)
        mixed = generator.permutation(count)
        inside[mixed[np.cumsum(sizes[mixed]) <= capacity]] = True
        heat = generator.permutation(count).astype(np.float32)
        order = coldness("priority", np.arange(count), heat)
        come, leave = exchange(order, inside, sizes, capacity, budget)
        assert not inside[come].any()
        assert inside[leave].all()
        assert sizes[come].sum() <= budget
        if len(come) and len(leave):
            assert heat[come].min() > heat[leave].max(), "only colder ones leave"
        inside[leave], inside[come] = False, True
        assert sizes[inside].sum() <= capacity
        for _ in range(100):  # without a limit it comes to rest
            come, leave = exchange(order, inside, sizes, capacity, 10**6)
            inside[leave], inside[come] = False, True
            if not len(come):
                break
        assert not len(exchange(order, inside, sizes, capacity, 10**6)[0])
        hot = order[::-1][np.cumsum(sizes[order[::-1]]) <= capacity - capacity // BAND]
        assert inside[hot].all(), "the hottest are in memory"


def test_the_order_in_which_they_leave() -> None:
    sequences, priorities = np.array([5, 3, 9, 4]), np.array([2.0, -1.0, 0.5, 2.0], dtype=np.float32)
    assert coldness("newest", sequences, priorities).tolist() == [1, 3, 0, 2]
    assert coldness("oldest", sequences, priorities).tolist() == [2, 0, 3, 1]
    assert coldness("priority", sequences, priorities).tolist() == [2, 3, 0, 1]
