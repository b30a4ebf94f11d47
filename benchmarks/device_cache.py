"""A cache of blocks in a GPU's memory: its policy on recorded priorities, and on a GPU its speed.

    python -m benchmarks.device_cache policy --out docs/device-cache.png   # simulated: minutes, needs no GPU
    python -m benchmarks.device_cache gather                               # measured: needs a GPU

`policy` trains the prioritized DQN of the examples, records how likely each block of its table is read, and simulates
caches of several sizes: the library's policy, the best choice that never changes, LRU, FIFO, and a random choice.
`gather` draws batches by Zipf priorities with caches of several sizes, and prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.caches import Others
from benchmarks.tier_policies import zipf
from gear_loader.collection.cache_policy import choose
from gear_loader.collection.device_cache import SHARE
from gear_loader.utils.arrays import Array

__all__ = ["Trace", "hit_rates", "measure", "record"]

EXAMPLE = Path(__file__).parents[1] / "examples" / "prioritized_dqn.py"
EVERY = 50  # batches between two records
STEPS = 80  # of a trajectory that is measured, of 1 KiB each
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75)
NAMES = {
    "policy": "by priority (the library's)",
    "oracle": "best choice that never changes",
    "lru": "LRU",
    "fifo": "FIFO",
    "random": "random",
}


@dataclasses.dataclass(frozen=True)
class Trace:
    """What was recorded while something trained.

    Attributes:
        likelihoods: float32 [rounds, blocks], how likely each block is read, relative to the others.
        owners: int64 [rounds, blocks], sequence number of the block's trajectory; -1 for none.
        copies: blocks that a cache may take between two records.
        draws: blocks that are read between two records.
    """

    likelihoods: Array
    owners: Array
    copies: int
    draws: int


def record(steps: int) -> Trace:
    """Train the example's prioritized DQN for some steps in its environment."""
    spec = importlib.util.spec_from_file_location("prioritized_dqn", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found: list[tuple[Array, Array]] = []
    count, update = 0, gear.ReplayDataset.update_priority

    def updating(dataset: Any, *args: Any, **options: Any) -> None:
        nonlocal count
        update(dataset, *args, **options)
        count += 1
        if count % EVERY == 0:
            found.append((dataset._selected().likelihoods()[0], owners_of(dataset.table)))

    example.gear = SimpleNamespace(**{name: getattr(gear, name) for name in gear.__all__})
    example.gear.ReplayDataset = type("Recorded", (gear.ReplayDataset,), {"update_priority": updating})
    options = SimpleNamespace(seed=0, steps=steps, evaluate_every=steps, episodes=1)
    example.train("prioritized", options)
    likelihoods, owners = (np.stack(part) for part in zip(*found, strict=True))
    # A row reads RETURN_STEPS steps; copies have a part of what batches read.
    per_batch = example.BATCH * example.RETURN_STEPS / example.PIECE
    return Trace(likelihoods, owners, int(EVERY * per_batch / SHARE), EVERY * example.BATCH)


def owners_of(table: gear.Table) -> Array:
    """Sequence number of the trajectory of each block, int64 [blocks]; -1 for none. Its trajectories have one each."""
    extent, block_ids = table.reader().index_arrays()
    snapshot = table.reader().snapshot()
    owners = np.full(table.region.layout.num_blocks, -1, dtype=np.int64)
    owners[block_ids[extent[snapshot.slots, 1]]] = snapshot.sequences
    return owners


def hit_rates(trace: Trace, share: float, seed: int = 1) -> dict[str, float]:
    """Share of the reads that find their block in a cache.

    Args:
        share: places of the cache, as a share of the blocks that were ever used.
    """
    generator = np.random.default_rng(seed)
    used = np.flatnonzero((trace.owners >= 0).any(axis=0))
    likelihoods, owners = trace.likelihoods[:, used].astype(np.float64), trace.owners[:, used]
    count = len(used)
    capacity = max(1, int(share * count))
    sums = likelihoods / likelihoods.sum(axis=1, keepdims=True)
    others = Others(sums, capacity, generator, warm=False)
    ours = np.zeros(count, dtype=bool)
    hits = reads = 0
    for i in range(len(sums)):
        if i:
            gone = np.flatnonzero(owners[i] != owners[i - 1])
            ours[gone] = False
            for cache in others.caches.values():
                cache.drop(gone)
            order = np.argsort(likelihoods[i - 1], kind="stable")
            come, leave = choose(order, ours, capacity, trace.copies, swaps=True)
            ours[leave], ours[come] = False, True
        drawn = generator.choice(count, size=trace.draws, p=sums[i])
        counted = 2 * i >= len(sums)  # all caches fill until then
        reads += counted * len(drawn)
        hits += counted * int(ours[drawn].sum())
        others.draw(drawn, counted=counted)
    return {"policy": hits / reads, **others.rates()}


def plot(rates: dict[float, dict[str, float]], out: Path, steps: int) -> None:
    """Draw hit rates over the size of the cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label in NAMES.items():
        axes.plot(list(rates), [each[name] for each in rates.values()], marker="o", label=label)
    axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="uniform draws, any choice")
    axes.set(
        xlabel="size of the cache, as a share of the blocks", ylabel="hit rate", xlim=(0, 1), ylim=(0, 1)
    )
    axes.set_title(f"Simulated on the priorities of the DQN example, {steps:,} steps")
    axes.legend(frameon=False)
    figure.savefig(out, dpi=120)


def measure(device: str, megabytes: int, seconds: float) -> list[dict[str, Any]]:
    """Batches of 256 rows of 20 KiB, drawn by Zipf priorities, with caches of several sizes."""
    steps, block_steps = STEPS, 20
    trajectories = max(64, megabytes * 1024 // steps)
    table = gear.Table.create(
        {"x": gear.Column(torch.int32, (256,))},
        max_steps=steps * trajectories,
        max_trajectories=trajectories,
        block_steps=block_steps,
    )
    rows = []
    with table:
        values = torch.arange(trajectories * steps, dtype=torch.int32)
        priorities = zipf(trajectories, np.random.default_rng(0))
        for i in range(trajectories):
            part = values[i * steps : (i + 1) * steps, None].expand(-1, 256).contiguous()
            table.add({"x": part}, priority=float(priorities[i]))
        total = table.region.layout.num_blocks * block_steps * 1024
        for share in (0.0, 0.05, 0.1, 0.25, 0.5, 1.0):
            data = gear.ReplayDataset(
                table,
                batch_size=256,
                windows=gear.Window(block_steps),
                selector=gear.Prioritized(1.0),
                device=device,
                device_cache=int(share * total) or None,
                batches_per_epoch=math.inf,
                copy=False,
            )
            rows.append({"share": share, **_timed(data, seconds)})
            print(json.dumps(rows[-1]), flush=True)
            del data
    return rows


def _timed(data: gear.ReplayDataset, seconds: float) -> dict[str, Any]:
    """Batches a second after a warm-up that fills the cache, hit rate, and GB/s delivered; checks the last batch."""
    batches = iter(data)
    for deadline in (time.monotonic() + seconds, time.monotonic() + 2 * seconds):
        before, start, count = data.cache_counts(), time.monotonic(), 0
        while True:
            batch = next(batches)
            count += 1
            if count % 8 == 0:
                torch.cuda.synchronize()
                if time.monotonic() > deadline:
                    break
        duration = time.monotonic() - start
    counts = data.cache_counts()
    # A row holds the numbers of its steps, counted over all trajectories.
    x, mask = batch["x"][:, :, 0].cpu(), batch["mask"].cpu()
    correct = bool(((x == x[:, :1] + torch.arange(x.shape[1])) | ~mask).all())
    correct = correct and bool((x[:, 0] % STEPS == batch["anchor"].cpu()).all())
    hits, misses = (counts[name] - before[name] for name in ("hits", "misses"))
    return {
        "batches_per_second": count / duration,
        "gigabytes_per_second": count * batch["x"].nbytes / duration / 1e9,
        "hit_rate": hits / max(hits + misses, 1),
        "cached_bytes": counts["bytes"],
        "correct": correct,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("policy", "gather"))
    parser.add_argument("--steps", type=int, default=20_000, help="of the DQN's environment")
    parser.add_argument("--out", type=Path, help="file of the plot")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--megabytes", type=int, default=4096, help="of the table")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement, and of its warm-up")
    options = parser.parse_args()
    if options.what == "gather":
        if not all(row["correct"] for row in measure(options.device, options.megabytes, options.seconds)):
            raise SystemExit("batches differ from the table")
        return
    trace = record(options.steps)
    rates = {share: hit_rates(trace, share) for share in SHARES}
    for share, each in rates.items():
        print(f"{share:>4.0%}  " + "  ".join(f"{name} {rate:.3f}" for name, rate in each.items()))
    if options.out is not None:
        plot(rates, options.out, options.steps)


if __name__ == "__main__":
    main()
