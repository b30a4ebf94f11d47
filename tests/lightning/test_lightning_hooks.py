"""Which entries of Lightning's `Trainer` work with which strategy and source: the table in docs/lightning.md."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_hooks
import numpy as np
import pytest
import torch
from cases import mostly_long
from distributed_common import SCHEMA, filled, trajectory
from lightning_ddp import IGNORED, quiet
from lightning_hooks import BATCHES, ROWS, VAL_BATCHES, Model, calls_of, module

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.lightning.validation_split import Split

COUNTS = [9, 5]
LENGTHS = {
    100 * shard + i: (100 * shard + i) * 7 % 23 + 1 for shard in range(2) for i in range(COUNTS[shard])
}
STEPS = [1000 * number + step for number, length in LENGTHS.items() for step in range(length)]
CASES = [
    f"{strategy} {source}"
    for strategy in ("auto", "ddp", "ddp_spawn")
    for source in ("name", "table", "shards")
]
pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in IGNORED]

Batches = list[list[int]]
Noted = dict[
    str, list[tuple[Batches, list[Batches]]]
]  # call -> for each rank: batches, and those of validations


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    """The name of a table with all trajectories; NAME-0 and NAME-1 have those of a rank each."""
    name = f"test-hooks-{os.getpid()}"
    whole = gear.Table.create(SCHEMA, name=name, max_steps=1000, max_trajectories=50, block_steps=8)
    whole.extend([trajectory(number, length) for number, length in LENGTHS.items()])
    tables = [whole, *(filled(f"{name}-{shard}", shard, COUNTS) for shard in range(2))]
    yield name
    for table in tables:
        table.unlink()
        table.close()


@pytest.fixture(scope="module", params=mostly_long(CASES, *CASES[:3], sample=3))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def noted(case: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> Noted:
    """What each rank was shown by each call."""
    folder = tmp_path_factory.mktemp("noted")
    strategy, source = case.split()
    if strategy == "auto":
        lightning_hooks.call(folder, name, strategy, source)
    else:
        # Lightning starts a process as rank 0 if these are not there.
        mine = {
            k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")
        }
        mine |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, lightning_hooks.__file__, folder, name, strategy, source]
        done = subprocess.run(command, env=mine, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    ranks = range(1 if strategy == "auto" else 2)
    return {what: [torch.load(folder / f"{what}-{rank}.pt") for rank in ranks] for what in calls_of(strategy)}


def held_out(case: str) -> set[int]:
    """The steps set aside for validation: a share of the trajectories by their order in their table."""
    split = Split(0.2, seed=0, second=True)
    tables = (
        [list(LENGTHS)] if "shards" not in case else [[n for n in LENGTHS if n // 100 == s] for s in range(2)]
    )
    aside = {numbers[i] for numbers in tables for i in np.flatnonzero(split(np.arange(len(numbers))))}
    return {step for step in STEPS if step // 1000 in aside}


def once(parts: list[Batches], expected: set[int]) -> None:
    """The ranks were shown exactly these rows, as many batches each, and repeated no more than fills the last one."""
    rows = [row for part in parts for batch in part for row in batch]
    assert set(rows) == expected
    assert len({len(part) for part in parts}) == 1
    assert len(rows) - len(expected) <= (len(parts) - 1) * ROWS


def test_fit(noted: Noted, case: str) -> None:
    aside = held_out(case)
    for what, batches in (("fit", BATCHES), ("limits", 3)):
        if what not in noted:
            continue
        parts = [seen for seen, _ in noted[what]]
        assert all(len(part) == 2 * batches for part in parts)
        assert not aside & {row for part in parts for batch in part for row in batch}
        assert len({tuple(batch) for part in parts for batch in part}) == 2 * batches * len(parts)
    for epoch in range(2):
        once([validated[epoch] for _, validated in noted["fit"]], aside)
    for what, count in (("val_batches", VAL_BATCHES), ("limits", 1)):
        if what not in noted:
            continue
        for (_, validated), (_, whole) in zip(noted[what], noted["fit"], strict=True):
            assert validated == [whole[0][:count]] * 2


def test_overfit_batches_repeats_them(noted: Noted) -> None:
    for seen, validated in noted["overfit"]:
        assert len(seen) == 4
        assert seen[:2] == seen[2:]
        assert validated[0] == validated[1]
        assert len(validated[0]) == 2


def test_validate_and_test_pass_over_what_was_set_aside(noted: Noted) -> None:
    for (_, validated), (tested, _), (_, whole) in zip(
        noted["validate"], noted["test"], noted["fit"], strict=True
    ):
        assert validated == [tested] == [whole[0]]


def test_predict_passes_over_the_table_in_order(noted: Noted, case: str) -> None:
    parts = [seen for seen, _ in noted["predict"]]
    once(parts, set(STEPS))
    if "predict last" in noted:
        lasts = [seen for seen, _ in noted["predict last"]]
        once(lasts, {1000 * number + length - 1 for number, length in LENGTHS.items()})
    if case in ("auto name", "ddp name"):
        turns = [batch for batches in zip(*parts, strict=True) for batch in batches]
        assert list(itertools.chain(*turns))[: len(STEPS)] == STEPS


@pytest.mark.parametrize("method", ["validate", "test"])
def test_nothing_set_aside_is_said(method: str, tmp_path: Path) -> None:
    with filled(None, 0, [3]) as table:
        run: Any = getattr(quiet(), method)
        with pytest.raises(SchemaError, match=rf"Trainer\.{method} was called .* val_fraction=0"):
            run(Model(str(tmp_path / "none")), datamodule=module(table, val_fraction=0))
