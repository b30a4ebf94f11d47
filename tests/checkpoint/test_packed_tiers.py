"""Packed batches of trajectories that lie on disk: they equal those of a table that fits, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_common import flip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tier_common import batch_bits, final, fitting, rows, spill, tiered

import gear_loader as gear

ONCE = gear.Uniform(replacement=False)
WINDOWS = {
    "number": gear.Whole(),
    "again": gear.Whole(column="number", dtype=torch.float64, scale=0.5),
    "value": gear.Whole(dtype=torch.bfloat16),
    "wide": gear.Whole(),
    "flag": gear.Whole(),
    "task": None,
    "task_again": gear.Window(1, column="task"),
}
FINAL = {
    name: dataclasses.replace(window, final=True) if isinstance(window, gear.Whole) else window
    for name, window in WINDOWS.items()
}


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {
        "windows": WINDOWS, "layout": "packed", "device": "cpu", "seed": 5, "selector": ONCE,
        **({} if "max_steps" in options else {"batch_size": 5}),
    }  # fmt: skip
    return gear.ReplayDataset(table, **{**given, **options})


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=30),
    out=st.lists(st.integers(0, 29), max_size=40),
    window=st.none() | st.tuples(st.integers(1, 12), st.integers(-9, 4)),
    options=st.sampled_from(
        [
            {},
            {"selector": gear.Prioritized(), "batches_per_epoch": 6},
            {"max_steps": 40, "lookahead": 3},
            {"max_steps": 20, "too_long": "truncate"},
            {"max_steps": 25, "too_long": "skip", "selector": gear.Fifo(replacement=False)},
        ]
    ),
    prefetch=st.integers(0, 2),
    finals=st.booleans(),
)
def test_batches_equal_those_of_a_table_that_fits(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: Any,
    out: Any,
    window: Any,
    options: Any,
    prefetch: int,
    finals: bool,
) -> None:
    """Trajectories are moved to disk before the epoch and during it."""
    plain = {"number": gear.Window(*(window or (1,))), "wide": gear.Window(*(window or (1,))), "task": None}
    windows = (FINAL if finals else WINDOWS) if window is None else plain
    path = tmp_path_factory.mktemp("tier")
    with fitting() as fits, tiered(path, blocks=40) as table:
        for number, length in enumerate(lengths):
            for each in (fits, table):
                end = final(number, length) if number % 2 else None
                each.add(rows(number, length), final=end, priority=number % 5 + 0.5)
        table.save(path)
        turns = iter(out)
        spill(table, sorted({0, *(i for i in itertools.islice(turns, len(out) // 2) if i < len(lengths))}))
        data = dataset(table, windows=windows, prefetch=prefetch, **options)
        for expected, found in zip(dataset(fits, windows=windows, **options), data, strict=True):
            assert found.pop("max_seqlen") == expected.pop("max_seqlen")
            assert batch_bits(found) == batch_bits(expected)
            spill(table, sorted({i for i in itertools.islice(turns, 4) if i < len(lengths)}))
        assert table.num_spilled


def test_damage_leaves_trajectories_out_of_their_batch(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=200) as table:
        for number in range(20):
            table.add(rows(number, 12))
        table.save(tmp_path)
        for number in range(20, 40):
            table.add(rows(number, 12))
        table.save(tmp_path)
        spill(table, range(40))
        places = table.region.array("stored")
        segment = int(places[0, 1])
        hit = np.flatnonzero(places[:40, 1] == segment).tolist()
        assert 0 < len(hit) < 40
        file = tmp_path / "segments" / f"{segment:06d}" / "wide.npy"
        flip(file, os.path.getsize(file) - 1)
        data = dataset(table, max_steps=60)
        numbers = [n for batch in data for n in batch["task"][:, 0].tolist()]
        assert sorted(numbers) == sorted(set(range(40)) - set(hit))
        assert data.stats()["gone"] == len(hit) == table.stats().num_lost
