"""Several windows of one column, and windows of one step without the dimension of the steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gear_loader as gear
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
