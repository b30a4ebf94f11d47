"""Which trajectories to keep in memory, simulated: hit rates of policies on priorities that drift.

    python -m benchmarks.tier_policies

A trace has the priorities of n trajectories in each of several rounds; trajectories are drawn by them. A policy decides
before each round, from the priorities of the round before, what lies in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from gear_loader.checkpoint.spilling import coldness
from gear_loader.storage.exchange import exchange
from gear_loader.utils.arrays import Array

__all__ = ["TRACES", "drifting", "hit_rates"]


def zipf(count: int, generator: np.random.Generator) -> Array:
    """Priorities 1 / rank, in random order, float64 [n]."""
    return 1.0 / (1.0 + generator.permutation(count))


def pareto(count: int, generator: np.random.Generator) -> Array:
    """Priorities of a Pareto distribution with exponent 1.5, float64 [n]."""
    return 1.0 + generator.pareto(1.5, count)


TRACES: dict[str, Callable[[int, np.random.Generator], Array]] = {"Zipf": zipf, "Pareto(1.5)": pareto}


def drifting(
    kind: Callable[[int, np.random.Generator], Array], *, count: int, rounds: int, drift: float, seed: int = 0
) -> Array:
    """A trace, float64 [rounds, count]: in each round a share `drift` of the trajectories swap their priorities."""
    generator = np.random.default_rng(seed)
    trace = np.empty((rounds, count))
    trace[0] = kind(count, generator)
    for i in range(1, rounds):
        moved = generator.permutation(count)[: int(drift * count)]
        trace[i] = trace[i - 1]
        trace[i, moved] = trace[i, generator.permutation(moved)]
    return trace


def hit_rates(trace: Array, *, capacity: int, draws: int, budget: int, seed: int = 1) -> dict[str, float]:
    """Share of the draws that find their trajectory in memory, for each policy.

    Args:
        trace: float64 [rounds, n], priorities. capacity: trajectories in memory. draws: of each round.
        budget: trajectories that `exchange` may bring into memory between two rounds.

    Returns:
        "priority": the library's, see `gear_loader.checkpoint.spilling`; "oracle": the best choice that never changes,
        made with the whole trace in view; "lru", "fifo" (the trajectory drawn longest ago, or that has been in memory
        longest, makes room for each that is drawn and not there) and "random" (never changes).
    """
    generator = np.random.default_rng(seed)
    rounds, count = trace.shape
    shares = trace / trace.sum(axis=1, keepdims=True)
    best = np.zeros(count, dtype=bool)
    best[np.argsort(shares.sum(axis=0))[count - capacity :]] = True
    random = np.zeros(count, dtype=bool)
    random[generator.permutation(count)[:capacity]] = True
    ours = random.copy()
    cached: dict[str, OrderedDict[int, None]] = {
        name: OrderedDict.fromkeys(np.flatnonzero(random).tolist()) for name in ("lru", "fifo")
    }
    hits = dict.fromkeys(("priority", "oracle", "lru", "fifo", "random"), 0)
    sizes, sequences = np.ones(count, dtype=np.int64), np.arange(count)
    for i in range(rounds):
        if i:
            order = coldness("priority", sequences, trace[i - 1].astype(np.float32))
            come, leave = exchange(order, ours, sizes, capacity, budget)
            ours[leave], ours[come] = False, True
        drawn = generator.choice(count, size=draws, p=shares[i])
        for name, inside in (("priority", ours), ("oracle", best), ("random", random)):
            hits[name] += int(inside[drawn].sum())
        for name, known in cached.items():
            for item in drawn.tolist():
                if item in known:
                    hits[name] += 1
                    if name == "lru":
                        known.move_to_end(item)
                else:
                    known.popitem(last=False)
                    known[item] = None
    return {name: found / (rounds * draws) for name, found in hits.items()}


def main() -> None:
    """Print hit rates for shares of the trajectories in memory."""
    for name, kind in TRACES.items():
        trace = drifting(kind, count=10_000, rounds=100, drift=0.01)
        for share in (0.75, 0.5, 0.25, 0.1):
            rates = hit_rates(trace, capacity=int(share * 10_000), draws=1_000, budget=500)
            print(
                f"{name:<12} {share:>5.0%} in memory  " + "  ".join(f"{k} {v:.3f}" for k, v in rates.items())
            )


if __name__ == "__main__":
    main()
