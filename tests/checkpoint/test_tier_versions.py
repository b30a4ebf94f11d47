"""Versions of a policy of trajectories that lie on disk: tables equal one that fits, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from options_common import nested_table
from tier_common import NEVER, batch_bits, spill

import gear_loader as gear
from gear_loader.checkpoint import spilling

COLUMNS = {
    "token": gear.Column(torch.int32, (5,)),
    "small": gear.Column(torch.int32, per="trajectory"),
    "large": gear.Column(torch.int64, per="trajectory"),
}


def make(path: Path | None, **options: Any) -> gear.Table:
    """A table with a small memory; one that fits without a path."""
    given: dict[str, Any] = {"max_steps": 2000, "max_trajectories": 60, "block_steps": 4, "timeout": 30.0}
    if path is not None:
        given["disk"] = gear.Disk(path, sync_seconds=NEVER, size="1GiB", keep="newest")
        given["max_blocks"] = 20
    return gear.Table.create(COLUMNS, **nested_table({**given, **options}))


def add(table: gear.Table, number: int, behind: int = 0) -> int:
    length = 1 + number * 7 % 11
    token = 1000 * number + np.arange(length * 5, dtype=np.int32).reshape(length, 5)
    version = table.policy_version - behind
    steps = {"token": token, "small": np.int32(version), "large": np.int64(version)}
    return table.add(steps, priority=1.0 + number % 4)


@settings(max_examples=15, deadline=None, database=None)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "spill", "promote", "advance", "update"]), st.integers(0, 99)
        ),
        max_size=25,
    ),
    column=st.sampled_from(["small", "large"]),
    selector=st.sampled_from([gear.Uniform(), gear.Prioritized(freshness=0.7), gear.TopK()]),
)
def test_versions_of_random_histories(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, int]], column: str, selector: Any
) -> None:
    path = tmp_path_factory.mktemp("tier")
    rules: dict[str, Any] = {"version": column, "max_lag": 3}
    with make(None, **rules) as whole, make(path, **rules) as table:
        pair = [
            gear.ReplayDataset(
                one, windows=gear.Window(3), batch_size=6, seed=3, device="cpu", prefetch=0, selector=selector
            )
            for one in (table, whole)
        ]
        for number in range(15):
            assert add(table, number) == add(whole, number)
        for number, (kind, chosen) in enumerate(kinds, 15):
            slots = table.indices()
            if kind == "add" or not len(slots):
                assert add(table, number, chosen % 3) == add(whole, number, chosen % 3)
            elif kind == "spill":
                table.save(path)
                spill(table, slots[chosen % 3 :: 3])
            elif kind == "promote":
                spilling.promote(table._engine, slots[chosen % len(slots)][None])
            elif kind == "advance":
                assert table.advance_version() == whole.advance_version()
            elif kind == "update" and not isinstance(selector, gear.Uniform):
                for one in pair:
                    one.update_priority(
                        slots[chosen % 2 :: 2], np.arange(1.0, 1 + len(slots[chosen % 2 :: 2]))
                    )
            assert table.indices().tolist() == whole.indices().tolist()
            if len(table):  # else a draw would wait
                assert batch_bits(pair[0].sample()) == batch_bits(pair[1].sample())
            assert table.stats().num_outdated == whole.stats().num_outdated
        table.check_valid()


@pytest.mark.parametrize("column", ["small", "large"])
def test_versions_come_back(tmp_path: Path, column: str) -> None:
    with make(None, version=column, max_lag=2) as whole:
        with make(tmp_path, version=column, max_lag=2) as table:
            for number in range(45):
                if number % 15 == 14:
                    for one in (table, whole):
                        one.advance_version()
                add(table, number, number % 2)
                add(whole, number, number % 2)
            assert len(table) == len(whole)
        with gear.Table.recover(gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB")) as table:
            assert table._engine.num_spilled > 15
            assert table.policy_version == 3
            lengths = table.lengths().tolist()
            for _ in range(3):
                assert lengths == whole.lengths().tolist()
                for one in (table, whole):
                    one.advance_version()
                before, lengths = lengths, table.lengths().tolist()
                assert len(lengths) < len(before)
            assert lengths == whole.lengths().tolist() == []
