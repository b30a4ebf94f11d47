"""Which trajectories to keep in memory: hit rates of policies on priorities that drift.

    python -m benchmarks.tier_policies

A trace has the priorities of n trajectories in each of several rounds; trajectories are drawn by them. `hit_rates`
simulates: a policy decides before each round, from the priorities of the round before, what lies in memory.
`table_hit_rates` draws from a table with a disk tier, whose owner's thread moves trajectories as it always does, and
gives the other policies the same draws.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch

import gear_loader as gear
from benchmarks.caches import Others
from gear_loader.checkpoint import spilling
from gear_loader.checkpoint.spilling import coldness
from gear_loader.storage.tier_swaps import exchange
from gear_loader.utils.arrays import Array

__all__ = ["TRACES", "drifting", "hit_rates", "table_hit_rates"]


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
    others = Others(shares, capacity, generator, warm=True)
    ours, found = others.random.copy(), 0
    sizes, sequences = np.ones(count, dtype=np.int64), np.arange(count)
    for i in range(rounds):
        if i:
            order = coldness("priority", sequences, trace[i - 1].astype(np.float32))
            come, leave = exchange(order, ours, sizes, capacity, budget)
            ours[leave], ours[come] = False, True
        drawn = generator.choice(count, size=draws, p=shares[i])
        found += int(ours[drawn].sum())
        others.draw(drawn)
    return {"priority": found / (rounds * draws), **others.rates()}


def table_hit_rates(
    trace: Array, *, capacity: int, batches: int = 4, budget: int, seconds: float = 0.05, seed: int = 1
) -> dict[str, float]:
    """Share of the rows drawn from a table with a disk tier that were in memory; and of other policies, as `hit_rates`.

    Args:
        trace: float64 [rounds, n], priorities, which the dataset gets by `update_priority` in each round.
        capacity: trajectories in memory. batches: of 256 rows, of each round.
        budget: trajectories that come into memory in one exchange, every hundredth of a second.
        seconds: between two rounds.
    """
    count = trace.shape[1]
    shares = trace / trace.sum(axis=1, keepdims=True)
    others = Others(shares, capacity, np.random.default_rng(seed), warm=True)
    # Of the table's blocks as many stay free as it takes for `capacity` to be in use.
    blocks = next(n for n in range(capacity, 2 * capacity) if n - n // 4 >= capacity)
    with _table(count, blocks, budget) as table:
        slots = table.indices()
        dataset = gear.ReplayDataset(
            table,
            batch_size=256,
            windows=gear.Window(1),
            sampler=gear.Prioritized(alpha=1.0),
            device="cpu",
            prefetch=0,
            seed=seed,
        )
        number = np.empty(int(slots.max()) + 1, dtype=np.int64)
        number[slots] = np.arange(count)
        dataset.update_priority(slots, trace[0])
        _settle(table)
        before = table.stats()
        for priorities in trace:
            dataset.update_priority(slots, priorities)
            for _ in range(batches):
                others.draw(number[dataset.sample()["index"].numpy()])
            time.sleep(seconds)
        stats = table.stats()
    hits, misses = stats.num_hits - before.num_hits, stats.num_misses - before.num_misses
    return {"table": hits / (hits + misses), **others.rates()}


@contextlib.contextmanager
def _table(count: int, blocks: int, budget: int) -> Iterator[gear.Table]:
    """A table of `count` trajectories of one step, whose memory has so many blocks."""
    schema = {"number": gear.Column(torch.int64), "value": gear.Column(torch.float32, (254,))}
    with (
        tempfile.TemporaryDirectory(prefix="gear-loader-bench-", ignore_cleanup_errors=True) as folder,
        mock.patch.object(spilling, "EXCHANGE_SECONDS", 0.01),
        mock.patch.object(spilling, "EXCHANGE_BYTES", budget * 1024),
        gear.Table.create(
            schema,
            max_steps=count,
            max_trajectories=count,
            block_steps=1,
            memory=gear.Memory(max_blocks=blocks),
            timeout=60.0,
            disk=gear.Disk(folder, size="1GiB"),
        ) as table,
    ):
        value = np.zeros((1, 254), dtype=np.float32)
        for number in range(count):
            table.add({"number": np.array([number]), "value": value})
        table.save(folder)
        yield table


def _settle(table: gear.Table) -> None:
    """Wait until nothing has come into memory for a while."""
    before = -1
    for _ in range(100):
        now = table.stats().promoted_bytes
        if now == before:
            return
        before = now
        time.sleep(0.2)


def main() -> None:
    """Print hit rates for shares of the trajectories in memory."""
    for name, kind in TRACES.items():
        trace = drifting(kind, count=10_000, rounds=100, drift=0.01)
        for share in (0.75, 0.5, 0.25, 0.1):
            rates = hit_rates(trace, capacity=int(share * 10_000), draws=1_000, budget=500)
            print(
                f"{name:<12} {share:>5.0%} in memory  " + "  ".join(f"{k} {v:.3f}" for k, v in rates.items())
            )
        trace = drifting(kind, count=4_000, rounds=50, drift=0.01)
        for share in (0.75, 0.5, 0.25, 0.1):
            rates = table_hit_rates(trace, capacity=int(share * 4_000), budget=200)
            print(
                f"{name:<12} {share:>5.0%} a table    " + "  ".join(f"{k} {v:.3f}" for k, v in rates.items())
            )


if __name__ == "__main__":
    main()
