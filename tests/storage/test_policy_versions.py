"""Versions of the policy: what is too old is removed and counted, and draws wait for what is recent."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import chi_square, chi_square_limit
from hypothesis import given
from hypothesis import strategies as st
from options_common import nested_table
from table_common import Died, bury, fresh_name, mortal

import gear_loader as gear
from gear_loader.errors import SchemaError, TableEmptyError

COLUMNS = {"token": gear.Column(torch.int32), "policy": gear.Column(torch.int32, per="trajectory")}


def make(max_lag: int | None = 2, **options: Any) -> gear.Table:
    sizes = {"max_steps": 400, "max_trajectories": 40, "block_steps": 4}
    return gear.Table.create(
        COLUMNS, **nested_table({**sizes, **options, "version": "policy", "max_lag": max_lag})
    )


def add(table: gear.Table, policy: int, length: int = 3) -> int:
    return table.add({"token": torch.zeros(length, dtype=torch.int32), "policy": policy})


def policies(table: gear.Table) -> list[int]:
    return [int(table[index]["policy"]) for index in table.indices()]


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {"batch_size": 8, "device": "cpu", "prefetch": 0, **options}
    return gear.ReplayDataset(table, windows=gear.Window(1), **given)


@given(acts=st.lists(st.one_of(st.none(), st.integers(-3, 3)), max_size=40), max_lag=st.integers(0, 4))
def test_only_recent_trajectories_stay(acts: list[int | None], max_lag: int) -> None:
    """None advances the version; a number adds a trajectory of a policy so many versions behind, or ahead."""
    twin: list[int] = []
    with make(max_lag) as table:
        removed = version = 0
        for act in acts:
            if act is None:
                version += 1
                assert table.advance_version() == version
            else:
                twin.append(version - act)
                add(table, version - act)
            kept = [policy for policy in twin if version - policy <= max_lag]
            removed, twin = removed + len(twin) - len(kept), kept
            assert policies(table) == kept
            stats = table.stats()
            assert (stats.num_outdated, stats.num_evicted, stats.num_expired) == (removed, 0, 0)
            assert table.policy_version == version
        table.check_valid()


@pytest.mark.parametrize("sampler", [gear.Uniform(), gear.Uniform(False), gear.Fifo(), gear.Prioritized()])
def test_draws_of_other_handles_follow(sampler: Any) -> None:
    name = fresh_name()
    with make(1, name=name) as table, gear.Table.attach(name) as other:
        table.unlink()
        for policy in (0, 0, 0):
            add(table, policy)
        data = dataset(other, sampler=sampler)
        assert set(data.sample()["policy"].tolist()) == {0}
        table.advance_version()
        add(other, 1)
        table.advance_version()
        assert set(data.sample()["policy"].tolist()) == {1}
        assert other.policy_version == 2
        assert table.stats().num_outdated == 3


@pytest.mark.parametrize("sampler", [gear.Uniform(), gear.Uniform(False), gear.Prioritized(), gear.TopK()])
def test_starvation_is_an_error_after_the_deadline(sampler: Any) -> None:
    with make(0, timeout=0.05) as table:
        add(table, 0)
        table.advance_version()
        with pytest.raises(TableEmptyError, match="of a policy at most 0 versions old"):
            dataset(table, sampler=sampler).sample()
        with pytest.raises(TableEmptyError, match="Timed out"):
            next(iter(dataset(table, sampler=sampler, prefetch=2)))
        assert not (table._engine.region.array("readers")[:, 2] != 0).any()  # no ticket is left


def test_a_draw_waits_for_what_is_added() -> None:
    with make(0, timeout=30.0) as table:
        table.advance_version()
        timer = threading.Timer(0.2, lambda: add(table, 1))
        timer.start()
        assert dataset(table).sample()["policy"].tolist() == [1] * 8
        timer.join()


@pytest.mark.parametrize("torn", [False, True])
def test_a_death_at_every_store_of_an_advance(torn: bool) -> None:
    for stores in itertools.count():
        with make(1) as table:
            table._engine.region.lock.timeout = 0
            for policy in (0, 1, 0, 2):
                add(table, policy)
            table.advance_version()
            try:
                with mortal(table, stores, torn=torn) as index:
                    index.admission.advance_version()
                    break
            except Died:
                pass
            bury(table)
            table.check_valid()
            version = table.policy_version
            assert policies(table) == [policy for policy in (0, 1, 0, 2) if version - policy <= 1]
            assert table.stats().num_outdated == 4 - len(table)
    assert stores > 5


def test_checkpoints_keep_the_version(tmp_path: Path) -> None:
    with make(3) as table:
        for _ in range(5):
            table.advance_version()
            add(table, table.policy_version)
        table.save(tmp_path)
    with gear.Table.load(tmp_path) as loaded:
        assert loaded.policy_version == 5
        assert policies(loaded) == [2, 3, 4, 5]
        loaded.advance_version()
        assert policies(loaded) == [3, 4, 5]
    with gear.Table.create({"x": gear.Column(torch.int32)}, max_steps=8, max_trajectories=2) as plain:
        plain.save(tmp_path / "plain")
        assert b"policy_version" not in (tmp_path / "plain" / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (COLUMNS, {"max_lag": 2}, "without version"),
        (COLUMNS, {"version": "token"}, "per='trajectory'"),
        (COLUMNS, {"version": "other"}, "expected the name of a column of int32"),
        (COLUMNS, {"version": "policy", "max_lag": -1}, "max_lag"),
        (
            {**COLUMNS, "policy": gear.Column(torch.int32, per="trajectory", late=True)},
            {"version": "policy"},
            "late",
        ),
    ],
)
def test_options_that_do_not_fit(columns: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.Table.create(columns, **nested_table({"max_steps": 8, "max_trajectories": 2, **options}))


def test_a_table_without_versions_has_none_to_advance() -> None:
    with gear.Table.create(COLUMNS, max_steps=8, max_trajectories=2) as table:
        with pytest.raises(SchemaError, match="created with version="):
            table.advance_version()
        with pytest.raises(SchemaError, match="freshness"):
            dataset(table, sampler=gear.Prioritized(freshness=0.5))


# ---------------------------------------------------------------- freshness

FRESH = gear.Prioritized(alpha=1.0, freshness=0.5)


def test_freshness_is_a_factor_for_each_version() -> None:
    with make(None) as table:
        data = dataset(table, sampler=FRESH, batch_size=4000)
        slots = []
        for policy, priority in enumerate((4.0, 1.0, 2.0)):
            slots.append(
                table.add({"token": torch.zeros(2, dtype=torch.int32), "policy": policy}, priority=priority)
            )
            data.sample(1)
            table.advance_version()
        for priorities in ([4.0, 1.0, 2.0], [1.0, 3.0, 0.0]):
            data.update_priority(np.array(slots), np.array(priorities))
            expected = np.array(priorities) * 0.5 ** (table.policy_version - np.arange(3))
            drawn = np.bincount(data.sample()["policy"].numpy(), minlength=3)
            expected *= 4000 / expected.sum()
            assert drawn[expected == 0].sum() == 0
            some = expected > 0
            assert chi_square(drawn[some], expected[some]) < chi_square_limit(int(some.sum()) - 1)
            table.advance_version()


def test_freshness_resumes_to_the_bit() -> None:
    with make(None) as table:
        for policy in (0, 0, 1, 2, 2):
            add(table, policy)
        table.advance_version()
        options: dict[str, Any] = {"sampler": FRESH, "batches_per_epoch": 40}
        data = dataset(table, **options)
        batches = iter(data)
        for number in range(5):
            batch = next(batches)
            data.update_priority(batch, torch.arange(8) + number + 1.0)
        table.advance_version()
        data.update_priority(next(batches), torch.ones(8))
        state = data.state_dict()
        again = dataset(table, **options)
        again.load_state_dict(state)
        resumed = iter(again)
        for number in range(20):
            one, other = next(batches), next(resumed)
            assert torch.equal(one["index"], other["index"])
            assert torch.equal(one["priority_weight"], other["priority_weight"])
            if number % 7 == 3:
                table.advance_version()
