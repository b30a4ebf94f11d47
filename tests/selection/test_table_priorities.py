"""`Table.update_priority`: datasets of any process draw by the priorities that it sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested
from table_common import fresh_name

import gear_loader as gear
from gear_loader.errors import PriorityError, SchemaError, StaleIndexError

COLUMNS = {"number": gear.Column(torch.int64)}


def table_of(count: int, **options: object) -> gear.Table:
    """Trajectory i has the number i, two steps and the priority 1."""
    sizes = {"max_steps": 40, "max_trajectories": 8, **options}
    table = gear.Table.create(COLUMNS, **sizes)  # type: ignore[arg-type]
    table.extend([{"number": np.full(2, i)} for i in range(count)], priority=1.0)
    return table


def dataset(table: gear.Table, *, unit: Any = "trajectory", **options: Any) -> gear.ReplayDataset:
    sampler = gear.Prioritized(alpha=1.0, unit=unit)
    options = {"windows": gear.Window(1), "prefetch": 0, "seed": 5} | options
    return gear.ReplayDataset(table, **nested({"batch_size": 64, "sampler": sampler, **options}))


def drawn(data: gear.ReplayDataset) -> set[int]:
    return set(data.sample()["number"].reshape(-1).tolist())


def test_a_dataset_draws_by_the_latest_of_both_kinds_of_updates() -> None:
    with table_of(4) as table:
        data = dataset(table)
        assert drawn(data) == {0, 1, 2, 3}
        assert table.update_priority([0, 1, 3], [0.0, 0.0, 0.0]) == 0
        assert drawn(data) == {2}
        data.update_priority([1], [2.0])
        assert drawn(data) == {1, 2}
        table.update_priority(np.array([1, 3, 3]), torch.tensor([0.0, 0.0, 4.0]))  # the last of equal ones
        assert drawn(data) == {2, 3}
        assert drawn(dataset(table)) == {2, 3}
        table.check_valid()


@pytest.mark.parametrize("more", [0, 30])
def test_updates_are_found_though_the_ring_of_changes_has_overflowed(more: int) -> None:
    with table_of(4) as table:
        data = dataset(table)
        drawn(data)
        table.update_priority([0, 1], [0.0, 0.0])
        for _ in range(more):
            table.remove(table.add({"number": np.full(2, 9)}))
        assert drawn(data) == {2, 3}
        data.update_priority([0], [1.0])
        for _ in range(more):  # an update that has been followed does not return
            table.remove(table.add({"number": np.full(2, 9)}))
        assert drawn(data) == {0, 2, 3}


def test_an_update_finds_no_later_trajectory_of_its_index() -> None:
    with table_of(3) as table:
        data = dataset(table)
        generations = table._engine.region.array("generation")[:3].copy()
        drawn(data)
        table.remove(1)
        table.add({"number": np.full(2, 7)}, priority=1.0)
        assert table.update_priority([0, 1, 5], [0.0, 0.0, 1.0], generation=[*generations[:2], 1]) == 2
        assert drawn(data) == {2, 7}
        with pytest.raises(
            StaleIndexError, match=r"1 of 2 priorities are for removed trajectories; .* row 1, index 6"
        ):
            table.update_priority([2, 6], [0.0, 0.0], stale="error")
        assert drawn(data) == {2, 7}


@pytest.mark.parametrize("complete", [False, True])
def test_they_are_the_priorities_of_all_steps(complete: bool) -> None:
    with table_of(3) as table, table.writer(chunk_steps=4, overlap_steps=2) as writer:
        for _ in range(6):  # two that share steps
            writer.append(number=7)
        writer.commit(priority=1.0)
        data = dataset(table, unit="step", windows=gear.Window(1 + complete), complete=complete)
        assert drawn(data) == {0, 1, 2, 7}
        table.update_priority([0, 1, 3, 4], [0.0] * 4)
        assert drawn(data) == {2}
        data.update_priority([0], [1.0], anchor=[0])
        assert drawn(data) == {0, 2}
        table.update_priority([0, 3], [0.0, 1.0])
        assert drawn(data) == {2, 7}


def test_updates_of_a_rank_reach_the_other_ranks_of_a_named_table() -> None:
    with table_of(4, name=fresh_name()) as table:
        first, second = (dataset(table, rank=rank, world_size=2) for rank in range(2))
        steps, alone = dataset(table, unit="step"), dataset(table)
        for data in (first, second, steps, alone):
            assert drawn(data) == {0, 1, 2, 3}
        first.update_priority([0, 1, 2], [0.0, 0.0, 0.0])
        second.update_priority([1, 2], [5.0, 0.0], generation=[1, 99])  # the second row is stale
        for data in (first, second, alone, dataset(table)):
            assert drawn(data) == {1, 3}
        assert drawn(steps) == {0, 1, 2, 3}
        alone.update_priority([3], [0.0])  # of one process: its own
        assert [drawn(alone), drawn(first), second.num_stale] == [{1}, {1, 3}, 1]
        table.unlink()


def test_ranks_that_draw_steps_of_a_named_table_are_told_of_shards() -> None:
    with table_of(4, name=fresh_name()) as table, table_of(4) as own:
        data = dataset(table, unit="step", rank=0, world_size=2)
        with pytest.raises(SchemaError, match="Shards"):
            data.update_priority(data.sample(), torch.zeros(64))
        assert drawn(data) == {0, 1, 2, 3}
        for data in (
            dataset(table, unit="step", rank=0, world_size=1),
            dataset(own, unit="step", rank=0, world_size=2),
        ):
            data.update_priority([0], [0.0], anchor=[0])
        table.unlink()


def test_eviction_by_the_lowest_priority_sees_it() -> None:
    with table_of(3, max_trajectories=3, on_full="evict_lowest_priority") as table:
        table.update_priority([0, 1, 2], [3.0, 1.0, 2.0])
        table.add({"number": np.full(2, 7)}, priority=9.0)
        assert sorted(int(table[int(slot)]["number"][0]) for slot in table.indices()) == [0, 2, 7]


def test_invalid_updates_change_nothing() -> None:
    with table_of(3) as table:
        for value in (-1.0, np.nan, np.inf, 1e39):
            with pytest.raises(PriorityError, match=r"priority\[1\] is"):
                table.update_priority([0, 1], [5.0, value])
        with pytest.raises(SchemaError, match=r"priority is .*; expected numbers \[2\]"):
            table.update_priority([0, 1], [5.0])
        with pytest.raises(SchemaError, match=r"index is .*; expected integers \[n\]"):
            table.update_priority([0.5], [5.0])
        with pytest.raises(SchemaError, match="stale is 'skip'"):
            table.update_priority([0], [5.0], stale="skip")  # type: ignore[arg-type]
        assert table._engine.region.array("priority")[:3].tolist() == [1.0, 1.0, 1.0]
        assert table.update_priority([], []) == 0
