"""Where new trajectories go, and that they go there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import filled, trajectory

import gear_loader as gear
from gear_loader.distributed import Placement, Shards
from gear_loader.errors import SchemaError, TableFullError, TransportError
from gear_loader.transport.capacity import capacity_report, parse_capacity_report


def tables(count: int, **options: Any) -> list[gear.Table]:
    return [filled(None, shard, [0] * count, **options) for shard in range(count)]


def lengths_of(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(1, 40, count).tolist()


def some(lengths: list[int]) -> list[dict[str, Any]]:
    return [trajectory(number, length) for number, length in enumerate(lengths)]


def numbers_in(table: gear.Table) -> list[int]:
    return [int(table[index]["act"][0]) // 1000 for index in table.indices().tolist()]


def check_stored(parts: list[gear.Table], shards: Any, indices: Any, length: int) -> None:
    """The trajectories 0, 1, ... are where they are said to be."""
    for number, (shard, index) in enumerate(zip(shards.tolist(), indices.tolist(), strict=True)):
        stored = parts[shard][index]
        assert all(torch.equal(stored[n], torch.as_tensor(v)) for n, v in trajectory(number, length).items())


# ---------------------------------------------------------------- policies


def test_round_robin_takes_shards_in_turn() -> None:
    parts = tables(3)
    placement = Placement(Shards(parts))
    where = [placement.add(each) for each in some([4, 4])]
    shards, indices = placement.extend(iter(some([2] * 5)), priority=np.arange(5.0))
    assert [shard for shard, _ in where] + shards.tolist() == [0, 1, 2, 0, 1, 2, 0]
    check_stored(parts, shards, indices, 2)
    where = zip(shards.tolist(), indices.tolist(), strict=True)
    assert [parts[shard]._engine.reader().arrays.priority[index] for shard, index in where] == list(range(5))


def test_free_space_evens_out_uneven_lengths() -> None:
    parts = tables(3, block_steps=1)
    parts[1].add(trajectory(99, 500))
    placement = Placement(Shards(parts), "free_space")
    for each in some(lengths_of(40)):
        placement.add(each)
    placement.extend(some(lengths_of(60, seed=4)))
    steps = [table.num_steps for table in parts]
    assert sum(len(table) for table in parts) == 101
    assert max(steps) - min(steps) <= 40


def test_free_space_leaves_out_a_table_without_slots() -> None:
    parts = [filled(None, 0, [0, 0], max_trajectories=2), filled(None, 1, [0, 0], max_steps=400)]
    shards, _ = Placement(Shards(parts), "free_space").extend(some([1] * 2))
    assert shards.tolist() == [0, 0]
    assert Placement(Shards(parts), "free_space").add(trajectory(1, 1))[0] == 1


def test_priority_mass_evens_out_priorities() -> None:
    parts = tables(3)
    parts[2].add(trajectory(99, 5), priority=20.0)
    placement = Placement(Shards(parts), "priority_mass")
    priorities = np.random.default_rng(5).uniform(0.5, 4, 60)
    for each, priority in zip(some([1] * 30), priorities, strict=False):
        placement.add(each, priority=float(priority))
    placement.extend(some([1] * 30), priority=priorities[30:])
    masses = [float(table._engine.reader().arrays.priority[table.indices()].sum()) for table in parts]
    assert max(masses) - min(masses) <= 4
    assert sum(masses) == pytest.approx(20 + priorities.sum(), rel=1e-5)
    assert len(parts[2]) < len(parts[0])


def test_priority_mass_goes_by_what_the_dataset_has_learnt() -> None:
    parts = [filled(None, shard, [4, 4]) for shard in range(2)]
    shards = Shards(parts)
    data = gear.ReplayDataset(
        shards, batch_size=4, windows=gear.Window(1), sampler=gear.Prioritized(alpha=1.0), prefetch=0
    )
    data.sample()
    everything = np.arange(4)
    data.update_priority(everything, np.full(4, 100.0), shard=np.zeros(4, dtype=np.int64))
    for _ in range(3):  # given, sent, known
        data.sample()
    placement = Placement(shards, "priority_mass", dataset=data)
    found, _ = placement.extend(some([3] * 10), priority=2.0)
    assert found.tolist() == [1] * 10
    data.sample()
    data.sample()
    placement.add(trajectory(7, 3), priority=500.0)
    assert placement.add(trajectory(8, 3), priority=1.0)[0] == 0


def test_local_is_this_ranks_own() -> None:
    parts = tables(3)
    shards, _ = Placement(Shards(parts), "local").extend(some([2] * 4))
    assert shards.tolist() == [0] * 4
    assert numbers_in(parts[0]) == [0, 1, 2, 3]


# ---------------------------------------------------------------- what is refused


def test_bad_input_changes_nothing() -> None:
    parts = tables(2)
    placement = Placement(Shards(parts))
    good = trajectory(1, 4)
    short = {**good, "act": good["act"][:3]}
    for bad, message in (
        ([good, {**good, "more": good["act"]}], r"trajectory 1 has the columns .*unknown: \['more'\]"),
        ([good, {"obs": good["obs"]}], r"missing: \['act', 'task', 'flag'\]"),
        ([good, short], "columns of uneven lengths"),
        ([good, trajectory(2, 4001)], "has 4,001 steps; the tables hold at most 4,000"),
        (good, "One mapping was received"),
        (3, "A int was received"),
    ):
        with pytest.raises(SchemaError, match=message):
            placement.extend(bad)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r"priority has shape \[3\]"):
        placement.extend([good, good], priority=[1.0, 2.0, 3.0])
    with pytest.raises(SchemaError, match="finite number"):
        placement.add(good, priority=-1.0)
    assert [len(table) for table in parts] == [0, 0]
    assert placement.extend([])[0].shape == (0,)


def test_options_that_make_no_sense_are_refused() -> None:
    shards = Shards(tables(2))
    data = gear.ReplayDataset(Shards(tables(1)), batch_size=1, windows=gear.Window(1))
    for options, message in (
        ({"policy": "random"}, "policy is 'random'; expected one of round_robin"),
        ({"dataset": data}, "dataset draws from another table"),
        ({"stages": [1]}, "expected a mapping of column names"),
        ({"stages": {"obs": 1, "act": 0, "flag": 0}}, r"stages\['obs'\] has 1; expected stages from 0 to 0"),
        ({"stages": {"obs": "0", "act": 0}}, r"stages\['obs'\] is '0'"),
        ({"stages": {"obs": 0, "act": [0]}}, r"stage 0 have the columns \['act', 'flag', 'obs', 'task'\]"),
    ):
        with pytest.raises(SchemaError, match=message):
            Placement(shards, **options)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="A list was received"):
        Placement(tables(1))  # type: ignore[arg-type]
    assert len(Placement(shards, stages={"obs": -1, "act": [0], "flag": 0, "task": 0}).schema) == 4


def test_a_full_shard_takes_back_what_others_had_stored() -> None:
    parts = [filled(None, 0, [0, 0]), filled(None, 1, [0, 0], max_trajectories=2)]
    placement = Placement(Shards(parts))
    placement.extend(some([2] * 4))
    before = [table.ids(table.indices()).tolist() for table in parts]
    with pytest.raises(TableFullError, match=r"Shard 1, stage 0 \(table \(private\)\): .*"):
        placement.extend(some([2] * 4))
    assert [table.ids(table.indices()).tolist() for table in parts] == before
    for table in parts:
        table.check_valid()


def test_a_shard_that_cannot_be_reached_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> int:
        raise TransportError("node b is gone.")

    for on_failure in ("redraw", "raise"):
        shards = Shards(tables(3), on_failure=on_failure)
        placement = Placement(shards, "free_space")
        monkeypatch.setattr(shards.stage_table(1, 0), "free_steps", unreachable)
        if on_failure == "raise":
            with pytest.raises(TransportError, match="node b is gone"):
                placement.add(trajectory(1, 2))
        else:
            found = [placement.add(each)[0] for each in some([2] * 6)]
            assert sorted(found) == [0, 0, 0, 2, 2, 2]
            assert Placement(shards).extend(some([2] * 4))[0].tolist() == [0, 2, 0, 2]


def test_a_capacity_report_is_checked() -> None:
    table = filled(None, 0, [5])
    table.add(trajectory(9, 2))
    free, mass = parse_capacity_report(capacity_report(table))
    assert free == table._engine.free_steps()
    assert mass == 0.5 + 1.5 + 2.5 + 3.5 + 4.5 + 4.5
    numbers = (b'{"free_steps": -1, "priority_sum": 0}', b'{"free_steps": 1, "priority_sum": NaN}')
    for data in (b"", b"[]", b"{}", *numbers):
        with pytest.raises(TransportError, match="A capacity report"):
            parse_capacity_report(data)


class Refilling:
    """An iterable (no iterator) that fills the same arrays for each trajectory."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        shared = {name: np.array(values) for name, values in trajectory(0, 5).items()}
        for number in range(6):
            for name, values in trajectory(number, 5).items():
                shared[name][...] = values
            yield shared


def test_an_iterable_may_use_its_arrays_again() -> None:
    parts = tables(2)
    shards, indices = Placement(Shards(parts)).extend(Refilling())
    check_stored(parts, shards, indices, 5)
