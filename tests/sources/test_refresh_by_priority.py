"""`refresh=Refresh(sampler=Prioritized(...))`: how often episodes are fetched and drawn, and what is known of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources_common import kill_after_go
from test_refresh import LENGTHS, STEPS, Numbered, held, measures, table_of
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import PriorityError, SourceError
from gear_loader.sources import Refresh, load
from gear_loader.sources.fetch_orders import PriorityOrder
from gear_loader.sources.fetched_episodes import FetchedEpisodes
from gear_loader.sources.priority_record import PriorityRecord

OWN = Refresh(sampler=gear.Prioritized()).own_columns
COUNT = 20


def by_priority(alpha: float = 1.0, **options: Any) -> Refresh:
    return Refresh(sampler=gear.Prioritized(alpha, 1.0), **options)


def table(size: int, **options: Any) -> gear.Table:
    """A table of so many episodes, with the columns that they get."""
    columns = {"x": gear.Column(torch.float32), **OWN}
    options = {"on_full": "evict_oldest", "block_steps": STEPS, **options}
    return gear.Table.create(columns, max_steps=STEPS * size, max_trajectories=size, **options)


def draw_until(table: gear.Table, fetched: int) -> None:
    """Draw as many rows as let so many episodes be fetched, and end the fetch."""
    loading = table.loading
    assert loading is not None
    table.sample(max(1, fetched - loading.num_loaded))
    wait_until(lambda: loading.num_loaded == fetched)
    loading.cancel()


def chi2(found: np.ndarray, expected: np.ndarray) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def test_episodes_are_fetched_in_proportion_to_their_powers() -> None:
    """Also while they change; weights are those of importance sampling."""
    order = PriorityOrder(PriorityRecord(COUNT), COUNT, by_priority(0.5, seed=3))
    priorities = np.linspace(0, 4, COUNT, dtype=np.float32)
    order.draws.update(np.arange(COUNT), priorities)
    for epoch, shares in ((0, priorities**0.5), (200, priorities[::-1] ** 0.5)):
        drawn = [piece for each in range(epoch, epoch + 100) for piece in order.pieces(each)]
        counts = np.bincount([piece.first for piece in drawn], minlength=COUNT)
        expected = shares / shares.sum() * len(drawn)
        assert counts[expected == 0] == 0
        assert chi2(counts[expected > 0], expected[expected > 0]) < 49  # 0.9998 of chi-square of 18 degrees
        weights = shares.mean() / shares[[piece.first for piece in drawn]]
        np.testing.assert_allclose([piece.weight for piece in drawn], weights, rtol=1e-6)
        order.draws.update_later(np.arange(COUNT), priorities[::-1].copy())


def test_parts_of_shards_and_new_episodes() -> None:
    """Parts are disjoint and complete; an episode that was never fetched has the largest priority so far."""
    record = PriorityRecord(COUNT)
    orders = [PriorityOrder(record, COUNT, by_priority(), rank, 3) for rank in range(3)]
    numbers = np.concatenate([order.numbers for order in orders])
    assert sorted(numbers) == list(range(COUNT))
    assert numbers.tolist() != sorted(numbers)
    first = orders[0]
    known, new = first.numbers[:2], first.numbers[2:]
    first.draws.update(known, np.array([9, 1], dtype=np.float32))
    assert first.draws.priority(first.numbers).tolist() == [9, 1, *[9] * len(new)]
    drawn = [piece.first for epoch in range(100) for piece in first.pieces(epoch)]
    assert set(drawn) == set(first.numbers)
    assert drawn.count(known[1]) < len(drawn) / 20
    assert orders[1].draws.update_later(first.numbers, np.ones(len(first.numbers), np.float32)).sum() == 0


def test_priorities_set_in_the_table_are_kept_when_episodes_leave(tmp_path: Path) -> None:
    refresh = by_priority(record=tmp_path / "priorities.npy", seed=1, samples_per_insert=1.0)
    with table(4) as filled:
        load(Numbered(COUNT), filled, refresh=refresh, progress=False)
        loading = filled.loading
        assert loading is not None
        given: dict[int, float] = {}
        for value in range(2, 12):
            batch = filled.gather(slots := filled.indices(), windows=gear.Window(1))
            assert (batch["source_episode"] == batch["x"][:, 0]).all()
            assert (
                filled.update_priority(slots, np.full(len(slots), value), generation=batch["generation"]) == 0
            )
            given |= dict.fromkeys(batch["source_episode"].tolist(), float(value))
            before = loading.num_loaded
            filled.sample(2)
            wait_until(lambda before=before: loading.num_loaded == before + 2)
        loading.cancel()
        known = np.load(tmp_path / "priorities.npy")
        inside = set(filled.gather(filled.indices(), windows=gear.Window(1))["source_episode"].tolist())
        left = [number for number in given if number not in inside]
        assert len(left) >= 4
        assert [known[number] for number in left] == [given[number] for number in left]


def test_the_order_is_that_of_the_seed_and_goes_on(tmp_path: Path) -> None:
    """A table that is refreshed in two parts holds what another one holds."""
    ends = []
    for parts in ((31,), (12, 31)):
        with table(5) as filled:
            path = tmp_path / f"{len(parts)}.npy"
            for part in parts:
                refresh = by_priority(record=path, seed=7, samples_per_insert=1.0)
                load(Numbered(COUNT), filled, refresh=refresh, resume=part != parts[0], progress=False)
                draw_until(filled, part)
            ends.append(held(filled))
    order = PriorityOrder(PriorityRecord(COUNT), COUNT, by_priority(seed=7))
    drawn = [piece.first for epoch in range(2) for piece in order.pieces(epoch)]
    assert ends == [drawn[26:31]] * 2


def test_priorities_by_number_and_columns_of_a_table_that_is_made(tmp_path: Path) -> None:
    refresh = by_priority(record=tmp_path / "priorities.npy", number="n", weight=None)
    options: dict[str, Any] = {"max_bytes": 5 * (STEPS * 4 + 8), "block_steps": STEPS, "progress": False}
    with load(Numbered(COUNT), refresh=refresh, **options) as made:
        assert list(made.schema) == ["x", "n"]
        loading = made.loading
        assert loading is not None
        assert loading.update_priority([3, 19, 3], [1.0, 2.0, 5.0]) == 0
        with pytest.raises(SourceError, match=r"index\[1\] is 20; expected a number of the 20 episodes"):
            loading.update_priority([3, COUNT], [9.0, 1.0])
        with pytest.raises(PriorityError, match=r"priority\[0\] is -1"):
            loading.update_priority([3], [-1.0])
        other = gear.Table.create(made.schema, max_steps=12, max_trajectories=3, on_full="evict_oldest")
        with pytest.raises(SourceError, match="is used by another load"):
            load(Numbered(COUNT), other, refresh=refresh, resume=True, progress=False)
        assert np.load(tmp_path / "priorities.npy")[[3, 19]].tolist() == [5.0, 2.0]
        made.sample(40)
        wait_until(lambda: loading.num_loaded >= 15)
        again = np.arange(COUNT)[::-1] + 1.0
        loading.update_priority(np.arange(COUNT), again)
        before = loading.num_loaded
        made.sample(2 * STEPS)
        wait_until(lambda: loading.num_loaded > before)
        loading.cancel()
        options = {"resume": True, "wait": False, "progress": False}
        load(Numbered(COUNT), made, refresh=refresh, **options)
        assert np.load(tmp_path / "priorities.npy").tolist() == again.tolist()
    with load(Numbered(COUNT), table_of(3), progress=False, refresh=Refresh()) as plain:
        loading = plain.loading
        assert loading is not None
        with pytest.raises(SourceError, match=r"expected loading with refresh=Refresh\(sampler=Prioritized"):
            loading.update_priority([3], [1.0])


def test_priorities_by_number_are_in_the_table_while_the_fetch_waits(tmp_path: Path) -> None:
    """So that a process that is killed then goes on with them; once it has ended, others may use the record."""
    path = tmp_path / "priorities.npy"
    with table(5) as filled:
        load(Numbered(COUNT), filled, refresh=by_priority(record=path), progress=False)
        loading = filled.loading
        assert loading is not None
        slots = filled.indices()
        numbers = [int(filled[slot]["source_episode"]) for slot in slots.tolist()]
        assert loading.update_priority(numbers, [7.0] * 5) == 0
        priorities = filled._engine.index.arrays.priority
        wait_until(lambda: (priorities[slots] == 7).all())
        loading.cancel()
        assert loading.update_priority(numbers, [3.0] * 5) == 5
        assert (np.load(path)[numbers] == 7).all()


def test_a_priority_by_number_counts_after_the_episode_has_left() -> None:
    """Not the one that it left the table with."""
    order = PriorityOrder(PriorityRecord(COUNT), COUNT, by_priority())
    with table(3) as filled:
        held = FetchedEpisodes(filled, "source_episode", order.draws)
        rows = {"x": np.ones(2, np.float32), "source_episode": 7, "source_weight": 1.0}
        slot = filled.add(rows, priority=1.0)
        held.added(np.array([slot]), np.array([7]), np.ones(1, np.float32))
        held.follow()
        filled.remove(slot)
        order.draws.update_later(np.array([7]), np.array([5], np.float32))
        order.draws.apply()
        held.follow()
        assert order.draws.priority(np.array([7])) == 5


def test_a_table_that_holds_all_is_refreshed_too(tmp_path: Path) -> None:
    path = tmp_path / "priorities.npy"
    with load(Numbered(COUNT), refresh=by_priority(record=path), max_bytes="1MiB", progress=False) as made:
        loading = made.loading
        assert loading is not None
        assert (made.on_full, loading.done, made.num_steps) == ("evict_oldest", False, COUNT * STEPS)
        numbers = [int(made[slot]["source_episode"]) for slot in made.indices().tolist()]
        assert np.flatnonzero(~np.isnan(np.load(path))).tolist() == sorted(set(numbers))


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    for options, problem in (
        ({"sampler": gear.Uniform()}, "sampler is Uniform"),
        ({"sampler": gear.Prioritized(unit="step")}, "expected Prioritized with alpha, beta and eps alone"),
        ({"record": "x"}, "record= was given without sampler="),
        ({"sampler": gear.Prioritized(), "weight": "source_episode"}, "number and weight are both"),
        ({"sampler": gear.Prioritized(), "number": 3}, "number is 3"),
        ({"sampler": gear.Prioritized(), "record": 3}, "record is 3; expected the path of a file"),
    ):
        with pytest.raises(SourceError, match=problem):
            Refresh(**options)
    reader, path = Numbered(COUNT), tmp_path / "record.npy"
    np.save(path, np.zeros(3))
    whole, cut, damaged = (tmp_path / f"{name}.npy" for name in ("whole", "cut", "damaged"))
    np.save(whole, np.ones(COUNT, np.float32))
    cut.write_bytes(whole.read_bytes()[:-40])
    np.save(damaged, np.full(COUNT, -1, np.float32))
    before = cut.read_bytes()
    with pytest.raises(SourceError, match=r"record='.*cut.npy' cannot be used"):
        PriorityRecord(COUNT, cut, resume=True)
    assert cut.read_bytes() == before
    with pytest.raises(SourceError, match=r"has priorities from -1.0 to -1.0; expected finite ones"):
        PriorityRecord(COUNT, damaged, resume=True)
    with table_of(3) as plain, table(3) as own:
        with pytest.raises(SourceError, match="the table has None as column 'source_episode'"):
            load(reader, plain, refresh=by_priority(), progress=False)
        with pytest.raises(SourceError, match="is there already; expected a new path, or resume=True"):
            load(reader, own, refresh=by_priority(record=path), progress=False)
        with pytest.raises(SourceError, match=r"has float64 \[3\]; expected float32 \[20\]"):
            load(reader, own, refresh=by_priority(record=path), resume=True, progress=False)
        own.add({"x": np.ones(2, np.float32), "source_episode": 7, "source_weight": 1.0})
        with pytest.raises(SourceError, match="holds others than the 20 episodes of Mine"):
            load(reader, own, refresh=by_priority(), resume=True, progress=False)
        assert len(own) == 1
    named = {"x": gear.Column(torch.float32), "source_weight": gear.Column(torch.float32)}
    other = Numbered(3)
    other.schema = named
    with pytest.raises(SourceError, match="has a column 'source_weight', as Refresh"):
        load(other, refresh=by_priority(), max_bytes=99, progress=False)
    assert not reader.read


@pytest.mark.long
def test_draws_are_in_proportion_to_priorities() -> None:
    """Each fetched episode is drawn once and leaves: draws are independent, and in proportion to the priorities."""
    limits = gear.Limits(max_times_sampled=1)
    count = 50
    with table(10, on_full="wait", limits=limits, timeout=60.0) as filled:
        load(Numbered(count), filled, refresh=by_priority(seed=5), progress=False)
        priorities = np.random.default_rng(0).permutation(np.linspace(0.2, 3, count)).astype(np.float32)
        assert filled.loading is not None
        filled.loading.update_priority(np.arange(count), priorities)
        for _ in range(40):  # drawn with the priorities before
            filled.sample(1)
        batches = [filled.sample(1) for _ in range(3000)]
    drawn = np.array([int(batch["source_episode"][0]) for batch in batches])
    weights = np.array([float(batch["source_weight"][0]) for batch in batches])
    assert chi2(np.bincount(drawn, minlength=count), priorities / priorities.sum() * len(drawn)) < 90
    np.testing.assert_allclose(weights, priorities.mean() / priorities[drawn], rtol=1e-6)
    assert abs(weights.mean() - 1) < 0.1  # so a weighted mean is that of all episodes
    x = np.array([float(batch["x"].ravel()[0]) for batch in batches])
    assert abs((weights * x).sum() / weights.sum() - (count - 1) / 2) < 2.5


@pytest.mark.long
def test_a_table_that_evicts_the_oldest_draws_and_shuffles() -> None:
    """Rows are drawn from what is in the table several times, which adds to their spread."""
    count, size, drawn = 50, 10, []
    with table(size) as filled:
        load(Numbered(count), filled, refresh=by_priority(seed=5, samples_per_insert=STEPS), progress=False)
        loading = filled.loading
        assert loading is not None
        priorities = np.random.default_rng(1).permutation(np.linspace(0.2, 3, count)).astype(np.float32)
        loading.update_priority(np.arange(count), priorities)
        dataset = gear.ReplayDataset(filled, batch_size=STEPS, windows=gear.Window(1), seed=7)
        for batch in range(2000):
            wait_until(lambda batch=batch: loading.num_loaded >= size + batch, pause=5e-4)
            drawn.append(dataset.sample()["source_episode"].numpy())
    drawn = drawn[30:]
    found = np.concatenate(drawn)
    shares = priorities / priorities.sum()
    # Of a fetched episode about 4 rows are drawn, with a variance of 4: the counts vary five times as much.
    assert chi2(np.bincount(found, minlength=count), shares * len(found)) < 90 * (1 + STEPS)
    assert abs(measures(found, count)[1]) < 0.06
    assert abs(np.corrcoef(priorities[found[:-STEPS]], priorities[found[STEPS:]])[0, 1]) < 0.15


@pytest.mark.long
def test_a_killed_refresh_keeps_its_priorities(tmp_path: Path) -> None:
    name, path = f"test-priorities-{os.getpid()}", tmp_path / "priorities.npy"
    program = f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        from test_refresh_by_priority import *
        filled = table(7, name={name!r})
        refresh = by_priority(record={str(path)!r}, samples_per_insert=1.0)
        load(Numbered(30, lengths=LENGTHS), filled, refresh=refresh, progress=False)
        filled.loading.update_priority(np.arange(30), np.arange(30) + 2)
        done = False
        while True:
            filled.sample(2)
            time.sleep(0.002)
            if filled.loading.num_loaded > 40 and not done:
                print("go", flush=True)
                done = True
    """
    kill_after_go(program)
    with gear.Table.attach(name, on_full="evict_oldest") as filled:
        try:
            filled.check_valid()
            assert np.load(path).tolist() == [number + 2.0 for number in range(30)]
            given, before = filled.stats().num_inserted, held(filled)
            refresh = by_priority(record=path, samples_per_insert=1.0)
            load(
                Numbered(30, lengths=LENGTHS),
                filled,
                refresh=refresh,
                resume=True,
                wait=False,
                progress=False,
            )
            loading = filled.loading
            assert loading is not None
            while loading.num_loaded < given + 2:
                filled.sample(1)
                time.sleep(0.002)
            loading.cancel()
            order = PriorityOrder(PriorityRecord(30), 30, refresh)
            order.draws.update(np.arange(30), np.arange(30, dtype=np.float32) + 2)
            drawn = [piece.first for epoch in range(9) for piece in order.pieces(epoch)]
            new = loading.num_loaded - given
            assert held(filled)[-new:] == drawn[given : given + new]
            assert held(filled)[:-new] == before[-len(held(filled)[:-new]) :]
        finally:
            filled.unlink()
