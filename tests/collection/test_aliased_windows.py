"""Several windows of one column, and windows of one step without the dimension of the steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader import distributed
from gear_loader.collection.windows import windows_of
from gear_loader.errors import SchemaError
from gear_loader.transport.spec import WindowSpec, read_spec

SCHEMA = {"obs": gear.Column(torch.float32, (3,)), "reward": gear.Column(torch.float32)}
TRANSITION = {
    "reward": gear.Window(1, squeeze=True),
    "next_obs": gear.Window(1, 1, column="obs", squeeze=True),
    "obs": gear.Window(1, squeeze=True),
    "recent": gear.Window(4, -3, column="obs"),
}


def filled(first: int) -> gear.Table:
    table = gear.Table.create(SCHEMA, max_steps=200, max_trajectories=20, block_steps=4)
    for length in (1, 5, 9):
        steps = np.arange(first, first + length, dtype=np.float32)
        table.add({"obs": np.stack([steps, -steps, steps], 1), "reward": steps})
        first += 100
    return table


@pytest.mark.parametrize("shards", [False, True])
def test_transitions(shards: bool) -> None:
    tables = [filled(1000), filled(5000)]
    source = distributed.Shards(tables) if shards else tables[0]
    dataset = gear.ReplayDataset(source, windows=TRANSITION, batch_size=16, prefetch=0, seed=3)
    batch = dataset.sample()
    assert {name: tuple(batch[name].shape) for name in TRANSITION} == {
        "reward": (16,),
        "next_obs": (16, 3),
        "obs": (16, 3),
        "recent": (16, 4, 3),
    }
    mask = batch["mask"]
    assert {name: tuple(mask[name].shape) for name in TRANSITION} == {
        "reward": (16,),
        "next_obs": (16,),
        "obs": (16,),
        "recent": (16, 4),
    }
    rewards = batch["reward"]
    assert (batch["obs"] == torch.stack([rewards, -rewards, rewards], 1)).all()
    following = torch.where(mask["next_obs"], rewards + 1, 0)
    assert (batch["next_obs"] == torch.stack([following, -following, following], 1)).all()
    assert mask["next_obs"].any()
    assert not mask["next_obs"].all()
    steps = rewards[:, None] + torch.arange(-3, 1)
    assert (batch["recent"][..., 0] == torch.where(mask["recent"], steps, 0)).all()
    assert (mask["recent"].sum(1) == torch.clamp(batch["anchor"] + 1, max=4)).all()


def test_masks_by_name_where_all_windows_are_alike() -> None:
    windows = {"obs": gear.Window(1, squeeze=True), "again": gear.Window(1, column="obs", squeeze=True)}
    batch = gear.ReplayDataset(filled(0), windows=windows, batch_size=4, prefetch=0).sample()
    assert {name: mask.shape for name, mask in batch["mask"].items()} == {"obs": (4,), "again": (4,)}
    assert (batch["obs"] == batch["again"]).all()


def test_what_is_sent_to_servers() -> None:
    schema = filled(0).schema
    spec = WindowSpec("replay", schema, windows_of(schema, TRANSITION, None))
    assert list(spec.windows) == ["next_obs", "obs", "recent", "reward"]
    read = read_spec(spec.to_bytes())
    assert read.sources == spec.sources
    assert read.pieces(7) == spec.pieces(7)
    assert [piece.row_bytes for piece in spec.pieces(1)] == [12, 12, 48, 4, 1, 1, 4]


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (lambda: gear.Window(2, squeeze=True), "squeeze and 2 steps; expected length 1"),
        (lambda: gear.Window(1, column=3), "expected the name of a column"),  # type: ignore[arg-type]
        (lambda: gear.Window(1, column="obs"), "expected a mapping of names"),
        (lambda: {"index": gear.Window(1, column="obs")}, "has the name 'index'"),
        (lambda: {"next": gear.Window(1, column="absent")}, r"Unknown: \['absent'\]"),
    ],
)
def test_errors(windows: object, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.ReplayDataset(filled(0), windows=windows(), batch_size=4)  # type: ignore[operator]
