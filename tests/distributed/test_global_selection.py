"""Batches drawn over all shards: the same on every number of ranks, with the right frequencies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import iterating
from distributed_common import check_batch, filled, new_priorities, run_ranks, same_rows, trajectory
from options_common import nested

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed.shard_source import ShardSource

WINDOWS = gear.Window(5, offset=-2)
COUNTS = [40, 10, 25, 3]
ROWS = 32
BATCHES = 6
SAMPLERS: dict[str, gear.samplers.Sampler] = {
    "uniform": gear.Uniform(),
    "uniform steps": gear.Uniform(unit="step"),
    "uniform pass": gear.Uniform(replacement=False),
    "fifo": gear.Fifo(),
    "lifo steps": gear.Lifo(unit="step"),
    "fifo pass": gear.Fifo(replacement=False, unit="step"),
    "top": gear.TopK(),
    "smallest steps": gear.TopK(largest=False, unit="step"),
    "prioritized": gear.Prioritized(),
    "prioritized distinct": gear.Prioritized(replacement=False),
    "prioritized steps": gear.Prioritized(unit="step", normalize="table"),
}
BY_PRIORITY = (gear.Prioritized, gear.TopK)
KINDS = ("uniform pass", "lifo steps", "top", "prioritized distinct")
"""One sampler of each kind."""
Batches = list[dict[str, Any]]


def dataset(shards: Shards, sampler: str, world: int = 1, **options: Any) -> gear.ReplayDataset:
    options = {"batches_per_epoch": BATCHES, "seed": 5, "copy": True, "prefetch": 0} | options
    rows = options.pop("rows", ROWS) // world
    return gear.ReplayDataset(
        shards, **nested({"batch_size": rows, "windows": WINDOWS, "sampler": SAMPLERS[sampler], **options})
    )


def kept(batch: dict[str, Any]) -> dict[str, Any]:
    names = ("index", "anchor", "generation", "shard", "act", "priority_weight")
    return {name: batch[name].numpy().copy() for name in names if name in batch}


def draw(data: gear.ReplayDataset, first: int = 0) -> Batches:
    """An epoch's batches, with new priorities after each."""
    found = []
    for number, batch in enumerate(data):
        check_batch(batch, WINDOWS)
        found.append(kept(batch))
        if isinstance(data.sampler, BY_PRIORITY):
            data.update_priority(batch, new_priorities(batch, first + number))
    return found


def draw_all(
    shards: Shards, world: int, prefetch: int, names: Iterable[str] = SAMPLERS
) -> dict[str, Batches]:
    return {name: draw(dataset(shards, name, world, prefetch=prefetch)) for name in names}


def shards_of(rank: int, counts: list[int], **options: Any) -> Shards:
    table = filled(f"gear-test-{os.getppid()}-{rank}", rank, counts)
    try:
        return Shards(table, **({"timeout": 30} | options))
    finally:
        table.unlink()  # those who have attached go on


def alone(counts: list[int]) -> Shards:
    return Shards([filled(None, shard, counts) for shard in range(len(counts))])


FEW, SPARSE = [12, 1, 1, 1], [0, 40, 0, 0]


def skewed(shards: Shards, world: int) -> Batches:
    """More new priorities for one shard than a message has room for, and several batches' at once."""
    data = dataset(shards, "prioritized", world, rows=192, batches_per_epoch=4, prefetch=2)
    # The first draw of an epoch sends what the last batches of the one before have left.
    return draw(data) + draw(data, 4)


def emptying(shards: Shards, world: int, barrier: Any) -> dict[str, Batches]:
    """Shard 1 is emptied before the third batch, and shard 2 before the fifth; shard 1 is filled again by then."""
    found: dict[str, Batches] = {}
    for name in KINDS:
        for shard, table in shards.own.items():
            refill(table, shard)
        barrier()
        data = dataset(shards, name, world)
        found[name] = []
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            found[name].append(kept(batch))
            barrier()
            for shard, table in shards.own.items():
                if (number, shard) in ((1, 1), (3, 2)):
                    table.remove(table.indices())
                elif (number, shard) == (3, 1):
                    refill(table, shard)
            if isinstance(data.sampler, BY_PRIORITY):
                data.update_priority(batch, new_priorities(batch, number))
            barrier()
    return found


def refill(table: gear.Table, shard: int) -> None:
    table.remove(table.indices())
    for i in range(20):
        table.add(trajectory(100 * shard + i, i + 1), priority=i % 5 + 0.5)


def edge_rank(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with shards_of(rank, [0] * world) as shards:
        found["emptied"] = emptying(shards, world, torch.distributed.barrier)
    with shards_of(rank, FEW) as shards:
        found["skewed"] = skewed(shards, world)
    with shards_of(rank, SPARSE) as shards:
        found["sparse"] = draw_all(shards, world, 2, KINDS)
    return found


def test_ranks_draw_what_one_process_draws_of_uneven_empty_and_emptied_shards() -> None:
    ranks = run_ranks(4, edge_rank)
    same_rows([rank["skewed"] for rank in ranks], skewed(alone(FEW), 1), "skewed")
    sparse, emptied = draw_all(alone(SPARSE), 1, 2, KINDS), emptying(alone([0] * 4), 1, lambda: None)
    for name in KINDS:
        same_rows([rank["sparse"][name] for rank in ranks], sparse[name], name)
        same_rows([rank["emptied"][name] for rank in ranks], emptied[name], name)
        shards = [set(batch["shard"].tolist()) for batch in emptied[name]]
        assert 1 not in shards[2], name
        assert 2 not in shards[4], name


# ---------------------------------------------------------------- one process


def test_new_priorities_that_come_before_a_batch_are_known_two_batches_later() -> None:
    data = dataset(alone([6, 6]), "prioritized", batches_per_epoch=4)
    seen = []
    for batch in data:
        seen.append(set(zip(batch["shard"].tolist(), batch["index"].tolist(), strict=True)))
        everything = np.arange(6)
        for shard in range(2):  # all but one of shard 1 are never to be drawn again
            priority = np.where((everything == 2) & (shard == 1), 1.0, 0.0)
            data.update_priority(everything, priority, shard=np.full(6, shard))
    assert all(len(each) > 1 for each in seen[:3])
    assert seen[3] == {(1, 2)}


def one_table(counts: list[int]) -> gear.Table:
    parts = [filled(None, shard, counts) for shard in range(len(counts))]
    table = gear.Table.create(dict(parts[0].schema), max_steps=16000, max_trajectories=400, block_steps=8)
    for part, count in zip(parts, counts, strict=True):
        table.extend(
            [part[index] for index in part.indices()], priority=part._engine.reader().arrays.priority[:count]
        )
    return table


CONTENT = ("obs", "act", "flag", "mask", "anchor")
ONE_SHARD = ("prioritized", "prioritized distinct", "prioritized steps", "top", "fifo")
EMPTY_SHARDS = ("uniform", "uniform steps", "uniform pass", "top", "fifo", "lifo steps", "fifo pass")


def as_of_a_table(
    shards: Shards, table: gear.Table, name: str, keys: Iterable[str] | None, **options: Any
) -> None:
    options = {
        "windows": WINDOWS,
        "sampler": SAMPLERS[name],
        "seed": 5,
        "copy": True,
        "prefetch": 0,
        **options,
    }
    whole = gear.ReplayDataset(table, **nested({"batch_size": ROWS, "batches_per_epoch": BATCHES, **options}))
    anchor = {"anchor": options["anchor"]} if "anchor" in options else {}
    for mine, expected in zip(dataset(shards, name, **anchor), whole, strict=True):
        for key in keys or expected:
            assert torch.equal(mine[key], expected[key]), (name, key)


def test_shards_are_drawn_from_as_one_table() -> None:
    """Uniform draws are those of one table with all data; a single shard, or one beside empty ones, is a table."""
    whole = one_table(COUNTS)
    for name in ("uniform", "uniform steps", "uniform pass"):
        as_of_a_table(alone(COUNTS), whole, name, CONTENT)
    for name in ONE_SHARD:
        keys = ("index", "generation") if name == "fifo" else None
        as_of_a_table(alone(COUNTS[:1]), filled(None, 0, COUNTS), name, keys)
    for name in EMPTY_SHARDS:
        anchor = {"anchor": "first"} if SAMPLERS[name].unit == "trajectory" else {}
        as_of_a_table(alone([0, 23, 0]), filled(None, 1, [0, 23, 0]), name, CONTENT, **anchor)


PRIORITIES = ([1.0, 2.0, 0.0, 4.0], [0.5], [3.0, 1.0, 8.0, 0.25, 2.0])
FIRST = np.array([0, 4, 5])
WEIGHTS = np.concatenate(PRIORITIES)


def frequencies(sampler: gear.samplers.Sampler, rows: int, batches: int) -> np.ndarray[Any, Any]:
    """How often each of ten trajectories of three shards comes."""
    tables = [filled(None, shard, [0, 0, 0]) for shard in range(3)]
    for shard, priorities in enumerate(PRIORITIES):
        for i, priority in enumerate(priorities):
            tables[shard].add(trajectory(100 * shard + i, 1), priority=priority)
    data = gear.ReplayDataset(
        Shards(tables), batch_size=rows, windows=gear.Window(1), sampler=sampler, prefetch=0, seed=11
    )
    seen = np.zeros(10)
    for _ in range(batches):
        batch = data.sample()
        np.add.at(seen, FIRST[batch["shard"].numpy()] + batch["index"].numpy(), 1)
    return seen


def test_distinct_rows_are_drawn_one_after_another_over_all_shards() -> None:
    seen = frequencies(gear.Prioritized(alpha=1.0, replacement=False), 3, 2000)
    expected = np.zeros(10)
    total = WEIGHTS.sum()
    for a in range(10):
        for b in set(range(10)) - {a}:
            first = WEIGHTS[a] / total * WEIGHTS[b] / (total - WEIGHTS[a])
            thirds = first * WEIGHTS / (total - WEIGHTS[a] - WEIGHTS[b])
            thirds[[a, b]] = 0
            expected += thirds
            expected[[a, b]] += thirds.sum()
    expected *= 2000
    assert seen.sum() == pytest.approx(expected.sum())
    assert seen[2] == 0
    deviation = np.abs(seen - expected) / np.sqrt(np.maximum(expected * (1 - expected / 2000), 1))
    assert deviation.max() < 4.5


# ---------------------------------------------------------------- trajectories that come and go


def test_nothing_to_draw_is_an_error_until_there_is() -> None:
    shards = alone([0, 0])
    data = dataset(shards, "uniform")
    with pytest.raises(gear.errors.TableEmptyError, match="All shards are empty"):
        data.sample()
    shards.own[1].add(trajectory(7, 3))
    assert set(data.sample()["shard"].tolist()) == {1}
    by_priority = dataset(shards, "prioritized")
    by_priority.sample()
    for _ in range(2):
        by_priority.update_priority([0], [0.0], shard=[1])
        by_priority.sample()
    with pytest.raises(gear.errors.PriorityError, match="Every priority in every shard is zero"):
        by_priority.sample()


def test_bad_input_is_refused_before_anything_changes() -> None:
    shards = alone([5, 5])
    data = dataset(shards, "prioritized")
    batch = data.sample()
    for arguments, message in (
        (([1], [1.0]), r"shard is missing; expected integers \[1\]"),
        (([1], [1.0], None, None, [2]), "shard has 2 to 2; expected 0 to 1"),
        ((batch, torch.full((ROWS,), -1.0)), r"priority\[0\] is -1.0"),
    ):
        names = ("index", "priority", "generation", "anchor", "shard")
        with pytest.raises(gear.errors.GearError, match=message):
            data.update_priority(**dict(zip(names, arguments, strict=False)))
    with pytest.raises(gear.errors.SchemaError, match="stale='error' was given; with Shards"):
        data.update_priority(batch, torch.ones(ROWS), stale="error")
    with pytest.raises(
        gear.errors.SchemaError, match="rank, world_size or sample_info was given with Shards"
    ):
        dataset(shards, "uniform", sample_info=True)
    with pytest.raises(gear.errors.SchemaError, match="expected 'global' or 'local'"):
        dataset(shards, "uniform", scope="all")
    loader = torch.utils.data.DataLoader(dataset(shards, "uniform"), batch_size=None, num_workers=1)
    with iterating(loader) as batches, pytest.raises(gear.errors.SchemaError, match="is not a rank"):
        next(batches)
    limited = filled(None, 0, [1], rate_limiter=gear.MinSize(1))
    with pytest.raises(gear.errors.SchemaError, match="has a rate limiter or max_times_sampled"):
        Shards(limited)


# ---------------------------------------------------------------- shards without anything to draw


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_shards_that_are_empty_or_cannot_be_reached(name: str, monkeypatch: Any) -> None:
    def batches_of(shards: Shards) -> Batches:
        data = dataset(shards, name, batches_per_epoch=4)
        return [kept(batch) for batch in (*data, data.sample())]

    for counts in ([40, 0], [0, 0, 30, 5, 0]):
        for batch in batches_of(alone(counts)):
            assert set(np.flatnonzero(counts)) >= set(batch["shard"].tolist())
            numbers = batch["act"].max(axis=1) // 1000
            assert set((numbers // 100).tolist()) == set(batch["shard"].tolist())
    expected = batches_of(alone([36, 40, 40]))
    for lost in ([1], [0, 2], [0, 1, 2]):
        shards = alone([36, 40, 40])
        monkeypatch.setattr(shards, "lost", lambda lost=lost: lost)
        found = batches_of(shards)
        if len(lost) == 3:  # no shard can be reached by all ranks: then each reads what it can reach
            same_rows([found], expected, name)
        elif not SAMPLERS[name].passes:  # a pass goes over what there was when it began
            assert not any(set(lost) & set(batch["shard"].tolist()) for batch in found)


def test_rows_that_vanish_before_they_are_read_come_from_a_shard_that_has_some(monkeypatch: Any) -> None:
    """This process's first shard is emptied between the draw and the read."""
    read = ShardSource.read
    for name in SAMPLERS:
        shards = alone([20, 20])
        data = dataset(shards, name)

        def remove_first(source: Any, *args: Any, shards: Shards = shards) -> None:
            shards.own[0].remove(shards.own[0].indices())
            read(source, *args)

        with monkeypatch.context() as patch:
            patch.setattr(ShardSource, "read", remove_first)
            batch = data.sample()
        check_batch(batch, WINDOWS)
        assert set(batch["shard"].tolist()) == {1}, name
