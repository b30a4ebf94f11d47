"""Lightning's ``strategy="ddp"`` over `Shards`: two ranks train as one process does, and go on where they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from distributed_common import filled
from lightning_ddp import COUNTS, EPOCHS, IGNORED, ROWS, RUNS, STEPS, Model, fit, module, quiet, train
from options_common import nested

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.errors import SchemaError

SCRIPT = Path(__file__).parents[1] / "lightning_ddp.py"
pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in IGNORED]


@pytest.fixture(scope="module", params=mostly_long(RUNS))
def run(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(run: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks have noted."""
    folder = tmp_path_factory.mktemp("ranks")
    # Lightning starts a process as rank 0 if these are not there.
    mine = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")}
    mine |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, folder, f"test-lightning-{os.getpid()}", run]
    done = subprocess.run(command, env=mine, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def alone() -> Shards:
    return Shards([filled(None, shard, COUNTS) for shard in range(len(COUNTS))])


@pytest.fixture(scope="module")
def one(run: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process notes that draws the same batches from both shards."""
    found: dict[str, Any] = train(alone, tmp_path_factory.mktemp("one"), 1, run, devices=1)
    return found


Noted = list[dict[str, Any]]


def test_the_ranks_together_see_what_one_process_sees(ranks: Noted, one: dict[str, Any]) -> None:
    whole = one["whole"]
    together = [a + b for a, b in zip(*(rank["whole"]["seen"] for rank in ranks), strict=True)]
    assert together == whole["seen"]
    assert {row[0] for batch in together for row in batch} == {0, 1}
    for batch in together:
        for shard, index, anchor, value in batch:  # the row is what its name says
            assert value == (100 * shard + index) * 1000 + anchor
    weights = [np.concatenate(b) for b in zip(*(rank["whole"]["weights"] for rank in ranks), strict=True)]
    assert len(weights) == len(whole["weights"])
    for mine, expected in zip(weights, whole["weights"], strict=True):
        np.testing.assert_array_equal(mine, expected)
    losses = np.array([rank["whole"]["losses"] for rank in ranks]).mean(axis=0)
    np.testing.assert_allclose(losses, whole["losses"], rtol=1e-5)
    for rank in ranks:  # the gradients' mean over the ranks is that of the whole batch
        for name, value in whole["state"].items():
            torch.testing.assert_close(rank["whole"]["state"][name], value, rtol=1e-5, atol=1e-7)


def test_validation_passes_once_over_what_was_set_aside(ranks: Noted, one: dict[str, Any]) -> None:
    passes = [rank["whole"]["validated"] for rank in ranks]
    assert len(passes[0]) == len(passes[1]) == EPOCHS + 1  # the first is Lightning's trial
    last = sorted(row for rank in passes for batch in rank[-1] for row in batch)
    assert last == sorted(row for batch in one["whole"]["validated"][-1] for row in batch)
    assert len(set(last)) == len(last) > 2 * ROWS
    trained = {row[:2] for rank in ranks for batch in rank["whole"]["seen"] for row in batch}
    assert not trained & {row[:2] for row in last}
    counts = {(row[0], row[1]) for row in last}
    assert len(last) == sum((100 * shard + index) * 7 % 23 + 1 for shard, index in counts)
    assert ranks[0]["whole"]["val_losses"] == ranks[1]["whole"]["val_losses"]


def test_resuming_in_the_middle_of_an_epoch_goes_on_bit_for_bit(ranks: Noted, one: Any, run: str) -> None:
    for noted in (*ranks, one):
        whole, resumed = noted["whole"], noted["resumed"]
        for name in ("seen", "weights", "losses"):
            assert len(resumed[name]) > 0 or not whole[name]
            assert resumed[name] == whole[name][STEPS[run] :], name
        assert resumed["validated"][-1:] == whole["validated"][-1:]
        for name, value in whole["state"].items():
            assert torch.equal(resumed["state"][name], value)


def test_the_monitor_logs_what_all_shards_have_together(ranks: Noted, one: dict[str, Any], run: str) -> None:
    logged, expected = ranks[0]["whole"]["logged"], one["whole"]["logged"]
    assert ranks[1]["whole"]["logged"] == []
    assert len(logged) == len(expected) >= 3
    for mine, alike in zip(logged, expected, strict=True):
        assert mine["fill_trajectories"] == sum(COUNTS) / 200
        assert mine["sample_rate"] == alike["sample_rate"] > 0
        for name in ("fill_steps", "fill_blocks", "insert_rate", "evict_rate", "num_stale"):
            assert mine.get(name) == alike.get(name)
        if run == "prioritized":
            assert mine["sample_rate"] == 2 * ROWS  # since two batches and one second
            assert mine["priority_q50"] > 0


def test_shards_are_left_open_and_those_of_a_function_closed() -> None:
    shards = alone()
    data = module(shards, "prioritized", 1)
    fit(data, None, None, devices=1)
    assert data.shards is shards
    assert data.train_dataset is None  # and its connections to other ranks are closed
    assert data.table is shards.table
    assert len(shards.table) == COUNTS[0]
    made: list[Shards] = []

    def source() -> Shards:
        made.append(alone())
        return made[-1]

    data = module(source, "prioritized", 1)
    first = fit(data, None, None, devices=1)
    assert data.table is data.shards is data.train_dataset is None
    assert "closed" in repr(made[0].table)
    again = fit(data, None, None, devices=1)  # over new ones, where the first have ended
    assert len(made) == 2
    assert not {tuple(batch) for batch in first.seen} & {tuple(batch) for batch in again.seen}


def test_what_a_function_returns_is_checked_in_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(source: Any, **options: Any) -> gear.ReplayDataModule:
        return gear.ReplayDataModule(
            source, **nested({"batch_size": 4, "windows": gear.Window(3), "val_fraction": 0, **options})
        )

    for data, message in (
        (made(lambda: 3), "The function that was given as table returned 3; expected a Table or Shards"),
        (made(alone, num_workers=2), "num_workers is 2, but a DataLoader worker cannot draw from Shards"),
    ):
        with pytest.raises(SchemaError, match=message):
            data.setup()
        assert data.table is None
    data = made(lambda: filled(None, 0, COUNTS))  # a table
    data.setup()
    assert data.shards is None
    assert data.train_dataset is not None
    assert len(next(iter(data.train_dataset))["index"]) == 4
    data.teardown()
    assert data.table is None
    data = made(alone())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    message = (
        r"(?s)before torch.distributed was initialised, so they know 2 shards.*2 processes train\. Give "
    )
    with pytest.raises(SchemaError, match=message + "ReplayDataModule a function"):
        data.setup()


def test_a_model_without_training_is_validated() -> None:
    model = Model()
    quiet().validate(model, module(alone, "prioritized", 1), verbose=False)
    assert len(model.validated) == 1
