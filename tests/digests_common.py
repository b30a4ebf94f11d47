"""Batches of fixed seeds as digests: what `tests/data/digests.json` holds, and how it was recorded.

``python -m tests.digests_common FOLDER`` writes digests and a checkpoint of each kind into a new folder. The recorded
ones stand for promises to users: a seed gives the same batches, and a checkpoint the same table, in later versions.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options_common import nested, nested_table
from torch.utils.data import DataLoader

import gear_loader as gear
import gear_loader.distributed as gd

if __package__:  # recorded as a module, collected by pytest as a file beside its tests
    from tests.distributed_common import run_ranks
else:
    from distributed_common import run_ranks

SCHEMA = {
    "observation": gear.Column(torch.float32, (3,)),
    "action": gear.Column(torch.int16, (2,)),
    "reward": gear.Column(torch.float64),
    "done": gear.Column(torch.bool),
}
WINDOW = gear.Window(5, offset=-2)
WINDOWS = {"observation": gear.Window(4, pad="tail"), "reward": gear.Window(6, offset=-5, pad="head")}
SIZE = 7


def trajectory(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """One whose values and length follow from its number."""
    length = number * 7 % 23 + 1
    steps = np.arange(length)
    return {
        "observation": (number + steps[:, None] / 64 + np.arange(3) / 8).astype(np.float32),
        "action": (number * 3 + steps[:, None] - np.arange(2)).astype(np.int16),
        "reward": number * 4096.0 + steps,
        "done": steps == length - 1,
    }


def table(count: int = 60, first: int = 0, **options: Any) -> gear.Table:
    """Trajectories number `first` to `first + count - 1`; the first third is replaced as one that is full does."""
    sizes = {"max_steps": 2000, "max_trajectories": 100, "block_steps": 4, **options}
    made = gear.Table.create(SCHEMA, **nested_table(sizes))
    indices = [made.add(trajectory(first + i), priority=i % 5 + 0.5) for i in range(count)]
    made.remove(indices[: count // 3])
    for i in range(count, count + count // 3):
        made.add(trajectory(first + i), priority=i % 7 + 0.25)
    return made


def update(digest: Any, value: Any) -> None:
    """Add names, dtypes, shapes and bytes of a batch."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(key.encode())
            update(digest, value[key])
        return
    array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


def digest_of(batches: Iterable[Mapping[str, Any]], *, timeless: bool = False) -> str:
    """SHA-256 of batches; `timeless` leaves out how many seconds a trajectory has been there."""
    digest = hashlib.sha256()
    for batch in batches:
        kept = dict(batch)
        if timeless:
            kept["sample_info"] = {k: v for k, v in batch["sample_info"].items() if k != "age_seconds"}
        update(digest, kept)
    return digest.hexdigest()


def epochs(dataset: gear.ReplayDataset, count: int = 2) -> list[dict[str, Any]]:
    """All batches of some epochs, each in memory of its own."""
    return [batch for _ in range(count) for batch in dataset]


def learned(dataset: gear.ReplayDataset, batches: int = 40) -> list[dict[str, Any]]:
    """Batches, after each of which its items get new priorities that follow from what they hold."""
    seen: list[dict[str, Any]] = []
    unit = dataset.sampler.unit
    while len(seen) < batches:
        for batch in dataset:
            seen.append(batch)
            priority = (batch["index"] * 31 + batch["anchor"] * 7 + len(seen)) % 11 + 0.125
            dataset.update_priority(
                batch["index"],
                priority,
                generation=batch["generation"],
                anchor=batch["anchor"] if unit == "step" else None,
            )
    return seen


def _dataset(source: Any, sampler: gear.Uniform | None = None, **options: Any) -> gear.ReplayDataset:
    options = {"batch_size": SIZE, "windows": WINDOW, "seed": 5, "device": "cpu", "copy": True} | options
    return gear.ReplayDataset(source, **nested({"sampler": sampler, **options}))


def _uniform() -> str:
    return digest_of(epochs(_dataset(table())))


def _uniform_once() -> str:
    return digest_of(epochs(_dataset(table(), gear.Uniform(replacement=False), windows=WINDOWS)))


def _uniform_steps() -> str:
    sampler = gear.Uniform(replacement=False, unit="step")
    return digest_of(epochs(_dataset(table(), sampler, drop_last=True, prefetch=0)))


def _large_epoch() -> str:
    # Above 65,536 items the order is a permutation that is computed.
    with gear.Table.create(
        {"x": gear.Column(torch.int32)}, max_steps=70_000, max_trajectories=10, block_steps=64
    ) as large:
        for part in range(7):
            large.add({"x": np.arange(part * 10_000, part * 10_000 + 10_000, dtype=np.int32)})
        sampler = gear.Uniform(replacement=False, unit="step")
        dataset = _dataset(large, sampler, windows=gear.Window(1), batch_size=4096)
        return digest_of(epochs(dataset, 1))


def _ends() -> str:
    batches = []
    for sampler in (gear.Fifo(), gear.Lifo(), gear.Fifo(replacement=False), gear.Lifo(unit="step")):
        batches += epochs(_dataset(table(), sampler))
    return digest_of(batches)


def _anchors() -> str:
    return digest_of(
        batch for anchor in ("first", "last") for batch in epochs(_dataset(table(), anchor=anchor))
    )


def _subset() -> str:
    odd = lambda sequences: sequences % 2 == 1  # noqa: E731  (stands for a user's lambda)
    batches = epochs(_dataset(table(), subset=odd))
    return digest_of(
        batches + epochs(_dataset(table(), gear.Prioritized(), subset=odd, batches_per_epoch=20))
    )


def _counted() -> str:
    options = {"sample_info": True, "batches_per_epoch": 25, "prefetch": 0}
    batches = epochs(_dataset(table(max_times_sampled=6), **options), 1)
    batches += epochs(_dataset(table(), gear.Prioritized(), **options), 1)
    return digest_of(batches, timeless=True)


def _prioritized() -> str:
    sampler = gear.Prioritized(alpha=0.7, beta=gear.LinearSchedule(0.4, 1.0, 30), eps=1e-3)
    return digest_of(learned(_dataset(table(), sampler)))


def _prioritized_steps() -> str:
    sampler = gear.Prioritized(alpha=0.5, unit="step", normalize="table")
    return digest_of(learned(_dataset(table(), sampler, prefetch=0)))


def _prioritized_distinct() -> str:
    batches = learned(_dataset(table(), gear.Prioritized(replacement=False)))
    return digest_of(batches + learned(_dataset(table(), gear.Prioritized(replacement=False, unit="step"))))


def _top_k() -> str:
    batches = learned(_dataset(table(), gear.TopK(), batches_per_epoch=10))
    return digest_of(
        batches + learned(_dataset(table(), gear.TopK(False, unit="step"), batches_per_epoch=10))
    )


def _resumed() -> str:
    """A state in the middle of the second epoch, taken up by a new dataset."""
    batches = []
    for sampler in (gear.Uniform(replacement=False), gear.Prioritized(), gear.Prioritized(unit="step")):
        made = table()
        dataset = _dataset(made, sampler, batches_per_epoch=9)
        epochs(dataset, 1)
        iterator = iter(dataset)
        for _ in range(4):
            batch = next(iterator)
            steps = sampler.unit == "step"
            if isinstance(sampler, gear.Prioritized):
                dataset.update_priority(
                    batch["index"], batch["anchor"] + 0.5, anchor=batch["anchor"] if steps else None
                )
        state = dataset.state_dict()
        resumed = _dataset(made, sampler, batches_per_epoch=9)
        resumed.load_state_dict(state)
        batches += epochs(resumed, 2)
        batches.append(resumed.sample())
    return digest_of(batches)


def _sampled() -> str:
    batches = []
    for sampler in (gear.Uniform(), gear.Prioritized()):
        dataset = _dataset(table(), sampler)
        batches += [dataset.sample() for _ in range(10)]
    return digest_of(batches)


def _of_ranks() -> str:
    batches = []
    for rank in range(3):
        batches += epochs(_dataset(table(), gear.Uniform(replacement=False), rank=rank, world_size=3))
    return digest_of(batches)


def _workers() -> str:
    with table(name="digests-of-workers") as named:
        try:
            dataset = _dataset(named, gear.Uniform(replacement=False))
            loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver")
            return digest_of({k: v.clone() for k, v in batch.items()} for _ in range(2) for batch in loader)
        finally:
            named.unlink()


def rank_of_shards(rank: int, world: int, name: str) -> list[str]:
    """Digests of one rank of three: global and local selection."""
    found = []
    with table(30, first=100 * rank, name=f"{name}-{rank}") as own:
        try:
            shards = gd.Shards(own)
            for sampler in (
                gear.Uniform(),
                gear.Uniform(replacement=False),
                gear.Uniform(replacement=False, unit="step"),
                gear.Prioritized(alpha=0.7),
                gear.Prioritized(unit="step", replacement=False),
                gear.TopK(),
                gear.Fifo(),
            ):
                dataset = _dataset(shards, sampler, batches_per_epoch=8)
                batches = []
                for batch in epochs(dataset):
                    batches.append(batch)
                    if isinstance(sampler, gear.Prioritized):
                        dataset.update_priority(
                            batch["index"],
                            (batch["index"] * 31 + batch["anchor"]) % 11 + 0.125,
                            shard=batch["shard"],
                            anchor=batch["anchor"] if sampler.unit == "step" else None,
                        )
                found.append(digest_of(batches))
            for local in (gear.Uniform(), gear.Prioritized()):
                dataset = _dataset(shards, local, scope="local", batches_per_epoch=8)
                found.append(digest_of(epochs(dataset)))

        finally:
            own.unlink()
    return found


def _shards() -> list[list[str]]:
    return run_ranks(3, rank_of_shards, "digests-of-shards")


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "uniform": _uniform,
    "uniform, each once": _uniform_once,
    "uniform steps, each once": _uniform_steps,
    "more than 65,536 items, each once": _large_epoch,
    "fifo and lifo": _ends,
    "anchors": _anchors,
    "subset": _subset,
    "counted": _counted,
    "prioritized": _prioritized,
    "prioritized steps": _prioritized_steps,
    "prioritized, distinct": _prioritized_distinct,
    "top k": _top_k,
    "resumed": _resumed,
    "sampled": _sampled,
    "ranks without shards": _of_ranks,
    "workers": _workers,
    "three shards": _shards,
}


def loaded(made: gear.Table) -> str:
    """Digest of all that a loaded table holds, and of a state that was saved beside it."""
    digest = hashlib.sha256()
    ids = made.ids(made.indices())
    for index, number in zip(made.indices(), ids, strict=True):
        update(digest, {"id": np.int64(number), **made[int(index)]})
    return digest.hexdigest()


def save_rank(rank: int, world: int, folder: str, name: str) -> None:
    """Save one rank's table as part of a checkpoint of all."""
    with table(20, first=100 * rank, name=f"{name}-{rank}") as own:
        try:
            with gd.Shards(own) as shards:
                gd.save(shards, folder)
        finally:
            own.unlink()


def record(folder: Path) -> None:
    """Write digests, and checkpoints of one table and of two ranks."""
    folder.mkdir(parents=True)
    digests: dict[str, Any] = {name: make() for name, make in CONFIGURATIONS.items()}
    made = table(15)
    made.save(folder / "checkpoint")
    digests["checkpoint"] = loaded(made)
    dataset = _dataset(made, gear.Prioritized(), batches_per_epoch=9)
    iterator = iter(dataset)
    for _ in range(4):
        dataset.update_priority(next(iterator)["index"], torch.arange(SIZE) + 0.5)
    torch.save(dataset.state_dict(), folder / "state.pt")
    digests["after the state"] = digest_of(epochs(resumed(folder)))
    run_ranks(2, save_rank, str(folder / "shards"), "digests-saved")
    (folder / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


def resumed(folder: Path) -> gear.ReplayDataset:
    """The dataset of a recorded table and state."""
    dataset = _dataset(gear.Table.load(folder / "checkpoint"), gear.Prioritized(), batches_per_epoch=9)
    dataset.load_state_dict(torch.load(folder / "state.pt", weights_only=False))
    return dataset


if __name__ == "__main__":
    if len(sys.argv) == 2:
        record(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            record(Path(scratch) / "digests")
            print((Path(scratch) / "digests" / "digests.json").read_text())
