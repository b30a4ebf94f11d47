"""Groups of trajectories that lie on disk: their batches equal those of a table that fits, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_common import flip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from options_common import nested, nested_table
from tier_common import NEVER, batch_bits, spill

import gear_loader as gear
from gear_loader.storage.disk_copies import copies_of

COLUMNS = {
    "token": gear.Column(torch.int32),
    "wide": gear.Column(torch.float64, (17,)),
    "prompt": gear.Column(torch.int16, per="trajectory"),
    "number": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.bfloat16, per="trajectory", late=True),
}
SIZE = 2


def make(path: Path | None = None, **options: Any) -> gear.Table:
    sizes = {"max_steps": 800, "max_trajectories": 40, "block_steps": 4, "timeout": 30.0}
    if path is not None:
        sizes["max_blocks"] = 24
        options["disk"] = gear.Disk(path, sync_seconds=NEVER, size="1GiB", keep="newest")
    return gear.Table.create(COLUMNS, **nested_table({**sizes, **options}))


def add(table: gear.Table, number: int, prompt: int, length: int) -> int:
    steps = torch.arange(length)
    wide = (number + steps / 64).double()[:, None].repeat(1, 17)
    values = {"token": (number * 100 + steps).int(), "wide": wide, "prompt": prompt, "number": number}
    return table.add(values, priority=1.0 + number % 5)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {
        "windows": {"token": gear.Whole(), "wide": gear.Whole(), "prompt": None, "number": None},
        "layout": "packed", "device": "cpu", "seed": 5, "selector": gear.Uniform(replacement=False),
        "group": "prompt", "group_size": SIZE, **({} if "max_steps" in options else {"batch_size": 2 * SIZE}),
    }  # fmt: skip
    return gear.ReplayDataset(table, **nested({**given, **options}))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    acts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=4, max_size=30),
    out=st.lists(st.integers(0, 29), max_size=40),
    rewards=st.lists(st.integers(0, 1) | st.none(), min_size=30, max_size=30),
    options=st.sampled_from(
        [
            {},
            {"selector": gear.Prioritized(), "batches_per_epoch": 6, "group_priority": "mean"},
            {"selector": gear.TopK(), "batches_per_epoch": 3},
            {"max_steps": 40, "lookahead": 3},
            {"windows": {"token": gear.Window(3), "prompt": None, "number": None}, "layout": "padded"},
        ]
    ),
    varies=st.booleans(),
)
def test_groups_equal_those_of_a_table_that_fits(
    tmp_path_factory: pytest.TempPathFactory, acts: Any, out: Any, rewards: Any, options: Any, varies: bool
) -> None:
    """Trajectories are moved to disk before the epoch and during it."""
    path = tmp_path_factory.mktemp("tier")
    if varies:
        options = {**options, "group_varies": "reward"}
    with make() as fits, make(path) as table:
        counts: dict[int, int] = {}
        for number, (prompt, length) in enumerate(acts):
            counts[prompt] = counts.get(prompt, 0) + 1
            number_of = prompt + 100 * ((counts[prompt] - 1) // SIZE)
            for each in (fits, table):
                add(each, number, number_of, length)
        table.save(path)
        turns = iter(out)
        spill(table, sorted({0, *(i for i in itertools.islice(turns, len(out) // 2) if i < len(acts))}))
        if varies:
            for number, reward in enumerate(rewards[: len(acts)]):
                for each in (fits, table):
                    if reward is not None:
                        each.fill(number, reward=reward)
            table.save(path)
            spill(table, sorted({i for i in itertools.islice(turns, 8) if i < len(acts)}))
        data, twin = (dataset(each, **options) for each in (table, fits))
        members: dict[int, list[Any]] = {}
        for number in range(len(acts)):
            prompt = int(fits[number]["prompt"])
            members.setdefault(prompt, []).append(rewards[number])
        whole = [each for each in members.values() if len(each) == SIZE]
        if varies:
            whole = [each for each in whole if None not in each and len(set(each)) > 1]
        if not whole:
            return
        for expected, found in zip(twin, data, strict=True):
            assert expected.pop("max_seqlen", 0) == found.pop("max_seqlen", 0)
            assert batch_bits(found) == batch_bits(expected)
            spill(table, sorted({i for i in itertools.islice(turns, 4) if i < len(acts)}))
        assert data.stats()["groups_complete"] == twin.stats()["groups_complete"] == len(whole)
        assert table._engine.num_spilled or varies  # what is filled comes back into memory


def test_an_incomplete_group_on_disk_expires(tmp_path: Path) -> None:
    with make(tmp_path) as table:
        for number, prompt in enumerate((0, 0, 1, 2, 2)):
            add(table, number, prompt, 5)
        table.save(tmp_path)
        spill(table, [2, 3])
        assert table._engine.num_spilled == 2
        table._engine.region.array("created")[:] -= 3600 * 10**9
        data = dataset(table, group_max_age=1800.0)
        assert {n for batch in data for n in batch["prompt"].tolist()} == {0, 2}
        assert data.stats()["groups_expired"] == 1
        assert table.indices().tolist() == [0, 1, 3, 4]
        table.check_valid()


def test_a_group_of_which_a_number_is_damaged_is_left_out(tmp_path: Path) -> None:
    with make(tmp_path) as table:
        for number in range(8):
            add(table, number, number // SIZE, 5)
            table.save(tmp_path)
        spill(table, np.arange(8))
        segments = copies_of(table._engine.index.arrays, np.arange(8)).segments
        segment = int(segments[4])
        hit = np.flatnonzero(segments == segment).tolist()
        file = tmp_path / "segments" / f"{segment:06d}" / "prompt.npy"
        flip(file, file.stat().st_size - 1)
        data = dataset(table)
        left = {n // SIZE for n in range(8)} - {n // SIZE for n in hit}
        assert {n for batch in data for n in batch["prompt"].tolist()} == left
        assert table.stats().num_lost == len(hit)
