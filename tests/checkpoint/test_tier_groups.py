"""Groups of trajectories that lie on disk: they equal those of a table that fits, bit for bit."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from options_common import nested, nested_table
from table_common import bits
from tier_common import NEVER, batch_bits, spill

import gear_loader as gear
from gear_loader.checkpoint import spilling

COLUMNS = {
    "token": gear.Column(torch.int32, (5,)),
    "prompt": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
}
SIZE = 3
SELECTORS = [
    gear.Uniform(),
    gear.Uniform(replacement=False),
    gear.Fifo(),
    gear.Lifo(),
    gear.Prioritized(),
    gear.TopK(),
]


def make(path: Path | None, blocks: int = 20, **options: Any) -> gear.Table:
    """A table with a small memory; one that fits without a path."""
    given: dict[str, Any] = {
        "max_steps": 2000,
        "max_trajectories": 60,
        "block_steps": 4,
        "timeout": 30.0,
        **options,
    }
    if path is not None:
        given["disk"] = gear.Disk(path, sync_seconds=NEVER, size="1GiB", keep="newest")
        given["max_blocks"] = blocks
    return gear.Table.create(COLUMNS, **nested_table(given))


def add(table: gear.Table, number: int) -> int:
    length = 1 + number * 7 % 11
    token = 1000 * number + np.arange(length * 5, dtype=np.int32).reshape(length, 5)
    steps = {"token": token, "prompt": np.int64(number // SIZE)}
    return table.add(steps, priority=1.0 + number % 4)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {
        "windows": {"token": gear.Window(3), "prompt": None},
        "batch_size": 2 * SIZE,
        "seed": 3,
        "device": "cpu",
        "prefetch": 0,
        "group": "prompt",
        "group_size": SIZE,
        **options,
    }
    return gear.ReplayDataset(table, **nested(given))


def tensors(batch: gear.Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


@settings(max_examples=15, deadline=None, database=None)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "spill", "promote", "remove", "fill", "draw"]), st.integers(0, 99)
        ),
        max_size=25,
    ),
    selector=st.sampled_from(SELECTORS),
    varies=st.booleans(),
)
def test_groups_of_random_histories(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, int]], selector: Any, varies: bool
) -> None:
    path = tmp_path_factory.mktemp("tier")
    options: dict[str, Any] = {"selector": selector}
    if varies:
        options["group_varies"] = "reward"
    with make(None) as whole, make(path) as table:
        pair = [dataset(one, **options) for one in (table, whole)]
        for number in range(15):
            assert add(table, number) == add(whole, number)
        for number, (kind, chosen) in enumerate(kinds, 15):
            slots = table.indices()
            slot = int(slots[chosen % len(slots)])
            if kind == "add":
                assert add(table, number) == add(whole, number)
            elif kind == "spill":
                table.save(path)
                spill(table, slots[chosen % 3 :: 3])
            elif kind == "promote":
                spilling.promote(table._engine, np.array([slot]))
            elif kind == "remove":
                table.remove(slot)
                whole.remove(slot)
            elif kind == "fill":
                new = table.unfilled("reward")[0][:1]
                for one in (table, whole):
                    one.fill(new, reward=(new % 2).astype(np.float32))
            groups = [len(one._selected().look()) for one in pair]
            assert groups[0] == groups[1]
            if groups[0]:  # else a draw would wait
                assert batch_bits(pair[0].sample()) == batch_bits(pair[1].sample())
        for one in (table, whole):
            one.check_valid()


@pytest.mark.parametrize(
    "options", [{"prefetch": 2}, {"max_steps": 40, "batch_size": None, "layout": "packed"}]
)
def test_epochs_and_resuming(tmp_path: Path, options: dict[str, Any]) -> None:
    with make(None) as whole, make(tmp_path) as table:
        for number in range(45):
            add(table, number)
            add(whole, number)
        assert table._engine.num_spilled > 20
        pair = []
        for one in (table, whole):
            windows = {"token": gear.Whole() if "layout" in options else gear.Window(3), "prompt": None}
            given = {**options, "windows": windows, "selector": gear.Uniform(replacement=False)}
            first = dataset(one, **given)
            iterator = iter(first)
            batches = [batch_bits(tensors(next(iterator)))]
            state = first.state_dict()
            del iterator
            again = dataset(one, **given)
            again.load_state_dict(state)
            pair.append(batches + [batch_bits(tensors(batch)) for batch in again])
        assert pair[0] == pair[1]
        assert len(pair[0]) > 2


def test_values_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path, on_full="evict_oldest") as table:
        for number in range(45):
            add(table, number)
        data = dataset(table)
        read: list[int] = []
        reader = table._engine.tier_reader()
        original = type(reader).read

        def counted(
            self: Any, slots: Any, generations: Any, first: Any, counts: Any, outs: Any, **more: Any
        ) -> None:
            if set(outs) == {"prompt"}:
                read.extend(slots.tolist())
            original(self, slots, generations, first, counts, outs, **more)

        monkeypatch.setattr(type(reader), "read", counted)
        outside = int(table._engine.num_spilled)
        data.sample()
        assert len(read) == outside > 20
        for number in range(45, 51):
            add(table, number)
            data.sample()
        assert len(read) == outside, "only new trajectories are looked at, and those are in memory"


def test_what_cannot_be_read_is_removed(tmp_path: Path) -> None:
    with make(tmp_path) as table:
        for number in range(45):
            add(table, number)
        slots = table.indices()
        lost = slots[table._engine.region.array("extent")[slots, 1] < 0]
        for file in tmp_path.glob("segments/*/prompt.npy"):
            os.truncate(file, 10)
        data = dataset(table, group_max_age=3600.0)
        batch = data.sample()
        assert table.stats().num_lost == len(lost) > 20
        assert (np.bincount(batch["prompt"].numpy())[batch["prompt"]] % SIZE == 0).all()
        incomplete = data.stats()["groups_incomplete"]
        assert incomplete == len(table) - SIZE * data.stats()["groups_complete"]


def test_incomplete_groups_expire_on_disk(tmp_path: Path) -> None:
    with make(tmp_path) as table:
        for number in range(40):  # the last is alone
            add(table, number)
        table.save(tmp_path)
        alone = table.indices()[-1:]
        spill(table, alone)
        assert table._engine.region.array("extent")[alone, 1] < 0
        table._engine.region.array("created")[:] -= 3600 * 10**9
        data = dataset(table, group_max_age=1800.0)
        data._selected().former._looked = -math.inf  # type: ignore[attr-defined]
        data.sample()
        assert data.stats()["groups_expired"] == 1
        assert len(table) == 39
        assert bits(table[0]["prompt"])
