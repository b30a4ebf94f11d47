"""Groups of trajectories that lie on disk: they equal those of a table that fits, bit for bit."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested
from table_common import bits
from tier_common import spill, tiered

import gear_loader as gear

COLUMNS = {
    "token": gear.Column(torch.int32, (5,)),
    "prompt": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
}
SIZE = 3


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


def test_values_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiered(tmp_path, COLUMNS, blocks=20, on_full="evict_oldest") as table:
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
    with tiered(tmp_path, COLUMNS, blocks=20) as table:
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
    with tiered(tmp_path, COLUMNS, blocks=20) as table:
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
