"""Batches drawn over all shards: the same on every number of ranks, with the right frequencies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from distributed_common import check_batch, filled, run_ranks, trajectory

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed.collector import ShardCollector

WINDOWS = gear.Window(5, offset=-2)
COUNTS = [40, 10, 25, 3]
ROWS = 32
BATCHES = 6
SELECTORS: dict[str, gear.selectors.Selector] = {
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
"""One selector of each kind."""


def dataset(shards: Shards, selector: str, world: int, **options: Any) -> gear.ReplayDataset:
    options = {"batches_per_epoch": BATCHES, "seed": 5, "copy": True} | options
    return gear.ReplayDataset(
        shards, batch_size=ROWS // world, windows=WINDOWS, selector=SELECTORS[selector], **options
    )


def new_priorities(batch: dict[str, Any], number: int) -> torch.Tensor:
    """Some that a row's name and the batch's number decide, so that it does not matter who gives them."""
    return ((batch["index"] * 7 + batch["anchor"] * 3 + batch["shard"] * 5 + number) % 11 + 0.25).float()


def kept(batch: dict[str, Any]) -> dict[str, Any]:
    names = ("index", "anchor", "generation", "shard", "act", "priority_weight")
    return {name: batch[name].numpy().copy() for name in names if name in batch}


def draw_all(
    shards: Shards, world: int, prefetch: int, names: Iterable[str] = SELECTORS
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        selector = SELECTORS[name]
        data = dataset(shards, name, world, prefetch=prefetch)
        found[name] = []
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            found[name].append(kept(batch))
            if isinstance(selector, BY_PRIORITY):
                data.update_priority(batch, new_priorities(batch, number))
    return found


def shards_of(rank: int, counts: list[int], **options: Any) -> Shards:
    table = filled(f"gear-test-{os.getppid()}-{rank}", rank, counts)
    try:
        return Shards(table, **({"timeout": 30} | options))
    finally:
        table.unlink()  # whoever has attached goes on


def drawing_rank(rank: int, world: int, prefetch: int) -> dict[str, list[dict[str, Any]]]:
    with shards_of(rank, COUNTS) as shards:
        return draw_all(shards, world, prefetch)


def alone(counts: list[int]) -> Shards:
    return Shards([filled(None, shard, counts) for shard in range(len(counts))])


@pytest.mark.parametrize(("world", "prefetch"), mostly_long([(1, 0), (2, 2), (4, 2)], (1, 0), (2, 2)))
def test_the_ranks_together_draw_what_one_process_draws(world: int, prefetch: int) -> None:
    ranks = run_ranks(world, drawing_rank, prefetch)
    one = draw_all(alone(COUNTS[:world]), 1, prefetch)
    for name in SELECTORS:
        for number in range(BATCHES):
            for key, expected in one[name][number].items():
                together = np.concatenate([rank[name][number][key] for rank in ranks])
                np.testing.assert_array_equal(together, expected, err_msg=f"{name}, batch {number}, {key}")


FEW = [12, 1, 1]


def skewed(shards: Shards, world: int) -> list[dict[str, Any]]:
    """More new priorities for one shard than a message has room for, and several batches' at once."""
    selector = gear.Prioritized(alpha=0.6)
    data = gear.ReplayDataset(
        shards, batch_size=192 // world, windows=WINDOWS, selector=selector, batches_per_epoch=4, copy=True
    )
    found = []
    for epoch in range(
        2
    ):  # the first draw of an epoch sends what the last batches of the one before have left
        for number, batch in enumerate(data):
            found.append(kept(batch))
            data.update_priority(batch, new_priorities(batch, 4 * epoch + number))
    return found


def skewed_rank(rank: int, world: int) -> list[dict[str, Any]]:
    with shards_of(rank, FEW) as shards:
        return skewed(shards, world)


def test_new_priorities_count_at_the_same_time_however_many_there_are() -> None:
    ranks, one = run_ranks(3, skewed_rank), skewed(alone(FEW), 1)
    for number, expected in enumerate(one):
        for key, values in expected.items():
            together = np.concatenate([rank[number][key] for rank in ranks])
            np.testing.assert_array_equal(together, values, err_msg=f"batch {number}, {key}")


def test_new_priorities_that_come_before_a_batch_are_known_two_batches_later() -> None:
    shards = alone([6, 6])
    data = dataset(shards, "prioritized", 1, prefetch=0, batches_per_epoch=4)
    seen = []
    for batch in data:
        seen.append(set(zip(batch["shard"].tolist(), batch["index"].tolist(), strict=True)))
        everything = np.arange(6)
        for shard in range(2):  # all but one of shard 1 are never to be drawn again
            priority = np.where((everything == 2) & (shard == 1), 1.0, 0.0)
            data.update_priority(everything, priority, shard=np.full(6, shard))
    assert len(seen[0]) > 1
    assert len(seen[1]) > 1
    assert len(seen[2]) > 1
    assert seen[3] == {(1, 2)}


def one_table(counts: list[int]) -> gear.Table:
    table = gear.Table.create(
        dict(filled(None, 0, [1]).schema), max_steps=16000, max_trajectories=400, block_steps=8
    )
    for shard in range(len(counts)):
        part = filled(None, shard, counts)
        table.extend(
            [part[index] for index in part.indices()], priority=part.reader().arrays.priority[: counts[shard]]
        )
    return table


@pytest.mark.parametrize("name", ["uniform", "uniform steps", "uniform pass"])
def test_uniform_is_that_of_one_table_with_all_data(name: str) -> None:
    windows = {"windows": WINDOWS, "selector": SELECTORS[name], "seed": 5, "copy": True}
    whole = gear.ReplayDataset(
        one_table(COUNTS), batch_size=ROWS, batches_per_epoch=BATCHES, prefetch=0, **windows
    )
    for mine, expected in zip(dataset(alone(COUNTS), name, 1), whole, strict=True):
        for key in ("obs", "act", "flag", "mask", "anchor"):
            assert torch.equal(mine[key], expected[key])


@pytest.mark.parametrize("name", ["prioritized", "prioritized distinct", "prioritized steps", "top", "fifo"])
def test_a_single_shard_is_drawn_from_as_a_table(name: str) -> None:
    options = {"windows": WINDOWS, "selector": SELECTORS[name], "seed": 5, "copy": True, "prefetch": 0}
    plain = gear.ReplayDataset(filled(None, 0, COUNTS), batch_size=ROWS, batches_per_epoch=BATCHES, **options)
    for mine, expected in zip(dataset(alone(COUNTS[:1]), name, 1), plain, strict=True):
        for key in expected:
            if name != "fifo" or key not in ("anchor", "obs", "act", "flag", "mask"):
                assert torch.equal(mine[key], expected[key]), key


def frequencies(selector: gear.selectors.Selector, rows: int, batches: int) -> np.ndarray[Any, Any]:
    """How often each of ten trajectories of three shards comes."""
    tables = []
    for shard, priorities in enumerate(PRIORITIES):
        table = filled(None, shard, [0, 0, 0])
        for i, priority in enumerate(priorities):
            table.add(trajectory(100 * shard + i, 1), priority=priority)
        tables.append(table)
    data = gear.ReplayDataset(
        Shards(tables), batch_size=rows, windows=gear.Window(1), selector=selector, prefetch=0, seed=11
    )
    seen = np.zeros(10)
    for _ in range(batches):
        batch = data.sample()
        np.add.at(seen, FIRST[batch["shard"].numpy()] + batch["index"].numpy(), 1)
    return seen


PRIORITIES = ([1.0, 2.0, 0.0, 4.0], [0.5], [3.0, 1.0, 8.0, 0.25, 2.0])
FIRST = np.array([0, 4, 5])
WEIGHTS = np.concatenate(PRIORITIES)


def test_prioritized_draws_in_proportion_over_all_shards() -> None:
    seen = frequencies(gear.Prioritized(alpha=1.0), 200, 200)
    expected = 40_000 * WEIGHTS / WEIGHTS.sum()
    assert seen[2] == 0
    some = expected > 0
    statistic = ((seen - expected)[some] ** 2 / expected[some]).sum()
    assert statistic < 27.9  # chi-squared with 8 degrees of freedom: once in 2,000 seeds


def test_distinct_rows_are_drawn_one_after_another_over_all_shards() -> None:
    seen = frequencies(gear.Prioritized(alpha=1.0, replacement=False), 3, 2000)
    expected = np.zeros(10)
    total = WEIGHTS.sum()
    for a in range(10):
        for b in set(range(10)) - {a}:
            first = WEIGHTS[a] / total * WEIGHTS[b] / (total - WEIGHTS[a])
            rest = total - WEIGHTS[a] - WEIGHTS[b]
            thirds = first * WEIGHTS / rest
            thirds[[a, b]] = 0
            expected += thirds
            expected[a] += thirds.sum()
            expected[b] += thirds.sum()
    expected *= 2000
    assert seen.sum() == pytest.approx(expected.sum())
    assert seen[2] == 0
    deviation = np.abs(seen - expected) / np.sqrt(np.maximum(expected * (1 - expected / 2000), 1))
    assert deviation.max() < 4.5


def test_weights_are_those_of_the_probability_over_all_shards() -> None:
    tables = [filled(None, shard, [5, 9]) for shard in range(2)]
    data = gear.ReplayDataset(
        Shards(tables),
        batch_size=64,
        windows=gear.Window(1),
        selector=gear.Prioritized(alpha=1.0, beta=0.7),
        prefetch=0,
    )
    batch = data.sample()
    priorities = np.array(
        [
            tables[shard].reader().arrays.priority[index]
            for shard, index in zip(batch["shard"].tolist(), batch["index"].tolist(), strict=True)
        ]
    )
    expected = (priorities.min() / priorities) ** 0.7
    np.testing.assert_allclose(batch["priority_weight"].numpy(), expected, rtol=1e-6)


# ---------------------------------------------------------------- trajectories that come and go


def test_evicted_trajectories_are_replaced_and_new_ones_are_drawn() -> None:
    shards = alone([30, 30])
    data = dataset(shards, "prioritized", 1, prefetch=0, batches_per_epoch=30)
    for number, batch in enumerate(data):
        check_batch(batch, WINDOWS)
        for shard, table in shards.own.items():
            table.remove(table.indices()[:3])
            for i in range(3):
                name = 10_000 + 1000 * shard + 3 * number + i
                table.add(trajectory(name, 4))
    assert (batch["act"] // 1000 >= 10_000).any()


def test_nothing_to_draw_is_an_error_until_there_is() -> None:
    shards = alone([0, 0])
    data = dataset(shards, "uniform", 1, prefetch=0)
    with pytest.raises(gear.errors.TableEmptyError, match="All shards are empty"):
        data.sample()
    shards.own[1].add(trajectory(7, 3))
    batch = data.sample()
    assert set(batch["shard"].tolist()) == {1}
    by_priority = dataset(shards, "prioritized", 1, prefetch=0)
    by_priority.sample()
    for _ in range(2):
        by_priority.update_priority([0], [0.0], shard=[1])
        by_priority.sample()
    with pytest.raises(gear.errors.PriorityError, match="Every priority in every shard is zero"):
        by_priority.sample()


def test_bad_input_is_refused_before_anything_changes() -> None:
    shards = alone([5, 5])
    data = dataset(shards, "prioritized", 1, prefetch=0)
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
        dataset(shards, "uniform", 1, sample_info=True)
    with pytest.raises(gear.errors.SchemaError, match="expected 'global' or 'local'"):
        dataset(shards, "uniform", 1, scope="all")
    loader = torch.utils.data.DataLoader(dataset(shards, "uniform", 1), batch_size=None, num_workers=1)
    with pytest.raises(gear.errors.SchemaError, match="is no rank"):
        list(loader)


def test_tables_that_limit_themselves_are_refused() -> None:
    table = filled(None, 0, [1], rate_limiter=gear.MinSize(1))
    with pytest.raises(gear.errors.SchemaError, match="has a rate limiter or max_times_sampled"):
        Shards(table)


@pytest.mark.parametrize("name", ["prioritized", "prioritized distinct", "top", "uniform", "fifo"])
@pytest.mark.parametrize("anchor", ["first", "last"])
def test_anchors_at_an_end(name: str, anchor: str) -> None:
    shards = alone([9, 12, 20])
    for batch in dataset(shards, name, 1, prefetch=0, anchor=anchor):
        rows = zip(batch["shard"].tolist(), batch["index"].tolist(), strict=True)
        lengths = [int(shards.own[shard].reader().index_arrays()[0][index, 0]) for shard, index in rows]
        assert batch["anchor"].tolist() == [0 if anchor == "first" else length - 1 for length in lengths]


# ---------------------------------------------------------------- shards without anything to draw


def batches_of(shards: Shards, name: str, **options: Any) -> list[dict[str, Any]]:
    data = dataset(shards, name, 1, prefetch=0, batches_per_epoch=4, **options)
    found = [kept(batch) for batch in data]
    found.append(kept(data.sample()))
    return found


@pytest.mark.parametrize("name", list(SELECTORS))
@pytest.mark.parametrize("counts", [[40, 0], [0, 0, 30, 5, 0]])
def test_shards_without_mass_bring_nothing_and_end_nothing(name: str, counts: list[int]) -> None:
    for batch in batches_of(alone(counts), name):
        assert set(np.flatnonzero(counts)) >= set(batch["shard"].tolist())
        numbers = batch["act"].max(axis=1) // 1000
        assert set((numbers // 100).tolist()) == set(batch["shard"].tolist())


@pytest.mark.parametrize(
    "name", ["uniform", "uniform steps", "uniform pass", "top", "fifo", "lifo steps", "fifo pass"]
)
def test_an_empty_shard_changes_nothing_in_what_one_table_draws(name: str) -> None:
    """Of a job whose data lie in one shard of three the batches are those of one table."""
    options = {"anchor": "first"} if SELECTORS[name].unit == "trajectory" else {}
    one = gear.ReplayDataset(
        filled(None, 1, [0, 23, 0]), batch_size=ROWS, windows=WINDOWS, selector=SELECTORS[name], seed=5, copy=True,
        prefetch=0, batches_per_epoch=4, **options,
    )  # fmt: skip
    many = dataset(alone([0, 23, 0]), name, 1, prefetch=0, batches_per_epoch=4, **options)
    for mine, expected in zip(many, one, strict=True):
        for key in ("obs", "act", "flag", "mask", "anchor"):
            assert torch.equal(mine[key], expected[key]), key


def sparse_rank(rank: int, world: int) -> dict[str, list[dict[str, Any]]]:
    with shards_of(rank, [0, 40]) as shards:
        return draw_all(shards, world, 2, KINDS)


def test_ranks_with_empty_shards_draw_what_one_process_draws() -> None:
    ranks, one = run_ranks(2, sparse_rank), draw_all(alone([0, 40]), 1, 2, KINDS)
    for name in KINDS:
        for number in range(BATCHES):
            for key, expected in one[name][number].items():
                together = np.concatenate([rank[name][number][key] for rank in ranks])
                np.testing.assert_array_equal(together, expected, err_msg=f"{name}, batch {number}, {key}")


@pytest.mark.parametrize("name", list(SELECTORS))
@pytest.mark.parametrize("lost", [[1], [0, 2]])
def test_shards_that_cannot_be_reached_are_left_out(name: str, lost: list[int], monkeypatch: Any) -> None:
    shards = alone([36, 40, 40])
    monkeypatch.setattr(shards, "lost", lambda: lost)
    data = dataset(shards, name, 1, prefetch=0, batches_per_epoch=4)
    for batch in data:
        check_batch(batch, WINDOWS)
        if not SELECTORS[name].passes:  # a pass goes over what there was when it began
            assert not set(lost) & set(batch["shard"].tolist())


@pytest.mark.parametrize("name", list(SELECTORS))
def test_if_no_shard_can_be_reached_by_all_ranks_all_are_drawn_from(name: str, monkeypatch: Any) -> None:
    """Then each rank reads what it can reach, and takes rows of its own shard for the others."""
    shards = alone([36, 40, 40])
    expected = batches_of(shards, name)
    shards = alone([36, 40, 40])
    monkeypatch.setattr(shards, "lost", lambda: [0, 1, 2])
    for mine, batch in zip(batches_of(shards, name), expected, strict=True):
        for key in batch:
            np.testing.assert_array_equal(mine[key], batch[key])


# ---------------------------------------------------------------- shards that are emptied


@pytest.mark.parametrize("name", list(SELECTORS))
@pytest.mark.parametrize("emptied", [[0, 2], [1]])
def test_rows_of_a_shard_that_is_emptied_fall_to_the_others(name: str, emptied: list[int]) -> None:
    shards = alone([40, 40, 40])
    data = dataset(shards, name, 1, prefetch=0, batches_per_epoch=6)
    for number, batch in enumerate(data):
        check_batch(batch, WINDOWS)
        assert len(batch["index"]) == ROWS or SELECTORS[name].passes
        if number >= 1:
            assert not set(emptied) & set(batch["shard"].tolist())
        if number == 0:
            for shard in emptied:
                shards.own[shard].remove(shards.own[shard].indices())
    for shard in set(range(3)) - set(emptied):
        shards.own[shard].remove(shards.own[shard].indices())
    with pytest.raises((gear.errors.TableEmptyError, gear.errors.PriorityError)):
        data.sample()
    shards.own[emptied[0]].add(trajectory(7, 3))
    if name != "prioritized distinct":  # which finds too few
        assert set(data.sample()["shard"].tolist()) == {emptied[0]}


def emptying(shards: Shards, world: int, barrier: Any) -> dict[str, list[dict[str, Any]]]:
    """Shard 1 is emptied before the third batch, and shard 2 before the fifth; shard 1 is filled again by then."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in KINDS:
        selector = SELECTORS[name]
        for shard, table in shards.own.items():
            refill(table, shard)
        barrier()
        data = dataset(shards, name, world, prefetch=0)
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
            if isinstance(selector, BY_PRIORITY):
                data.update_priority(batch, new_priorities(batch, number))
            barrier()
    return found


def refill(table: gear.Table, shard: int) -> None:
    table.remove(table.indices())
    for i in range(20):
        table.add(trajectory(100 * shard + i, i + 1), priority=i % 5 + 0.5)


def emptying_rank(rank: int, world: int) -> dict[str, list[dict[str, Any]]]:
    with shards_of(rank, [0] * world) as shards:
        return emptying(shards, world, torch.distributed.barrier)


def test_ranks_draw_the_same_instead_of_what_was_emptied() -> None:
    ranks, one = run_ranks(4, emptying_rank), emptying(alone([0] * 4), 1, lambda: None)
    for name in KINDS:
        shards = [set(batch["shard"].tolist()) for batch in one[name]]
        assert 1 not in shards[2], name
        assert 2 not in shards[4], name
        for number in range(BATCHES):
            for key, expected in one[name][number].items():
                together = np.concatenate([rank[name][number][key] for rank in ranks])
                np.testing.assert_array_equal(together, expected, err_msg=f"{name}, batch {number}, {key}")


def test_rows_that_vanish_before_they_are_read_come_from_a_shard_that_has_some(monkeypatch: Any) -> None:
    """This process's first shard is emptied between the draw and the read."""
    for name in SELECTORS:
        shards = alone([20, 20])
        data = dataset(shards, name, 1, prefetch=0)
        gather = ShardCollector.gather

        def remove_first(collector: Any, buffers: Any, rows: Any, shards: Shards = shards) -> None:
            shards.own[0].remove(shards.own[0].indices())
            gather(collector, buffers, rows)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(ShardCollector, "gather", remove_first)
            batch = data.sample()
        check_batch(batch, WINDOWS)
        assert set(batch["shard"].tolist()) == {1}, name
