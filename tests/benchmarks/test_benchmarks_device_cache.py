"""The simulated policy of the device cache."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.device_cache import NAMES, Trace, hit_rates
from benchmarks.tier_policies import TRACES, drifting


@pytest.mark.parametrize("kind", TRACES)
def test_the_policy_finds_what_the_best_static_choice_finds(kind: str) -> None:
    likelihoods = drifting(TRACES[kind], count=2_000, rounds=40, drift=0.01)
    trace = Trace(likelihoods.astype(np.float32), np.zeros_like(likelihoods, dtype=np.int64), 200, 500)
    for share in (0.1, 0.5):
        rates = hit_rates(trace, share)
        assert rates.keys() == NAMES.keys()
        assert rates["policy"] >= 0.95 * rates["oracle"]
        assert rates["policy"] > max(rates["lru"], rates["fifo"], rates["random"])


def test_blocks_of_another_trajectory_leave_all_caches() -> None:
    likelihoods = np.ones((10, 50), dtype=np.float32)
    owners = np.arange(10)[:, None] * np.ones(50, dtype=np.int64)  # all are new in each round
    rates = hit_rates(Trace(likelihoods, owners, 100, 10), 1.0)
    assert rates["oracle"] == 1  # which knows nothing of them
    assert rates["policy"] == 1  # a round's blocks are chosen before its draws
    assert rates["lru"] < 0.2
