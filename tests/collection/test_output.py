"""Batches as TensorDicts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from options_common import nested
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.errors import SchemaError

SCHEMA = {
    "observation": gear.Column(torch.float32, (3,)),
    "next.observation": gear.Column(torch.float32, (3,)),
    "next.reward": gear.Column(torch.float32),
}
STEP = gear.Window(1, squeeze=True)


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with gear.Table.create(SCHEMA, max_steps=100, max_trajectories=10, block_steps=4) as table:
        for length in (5, 9):
            steps = torch.arange(length, dtype=torch.float32)
            row = steps.unsqueeze(-1).expand(-1, 3).contiguous()
            table.add({"observation": row, "next.observation": row + 1, "next.reward": steps})
        yield table


def test_batches_have_the_entries_of_dicts_and_take_priorities(table: gear.Table) -> None:
    tensordict = pytest.importorskip("tensordict", reason="needs pip install '.[tensordict]'")
    options: dict[str, Any] = {"batch_size": 6, "windows": STEP, "device": "cpu", "seed": 3}
    options["sampler"] = gear.Prioritized(unit="step")
    plain = gear.ReplayDataset(table, **nested(options))
    dictionary = gear.ReplayDataset(table, **nested({**options, "output": "tensordict"}))
    for _ in range(3):
        expected, found = plain.sample(), dictionary.sample()
        assert type(found) is tensordict.TensorDict
        assert found.batch_size == torch.Size([6])
        assert torch.equal(found["next", "reward"], expected["next.reward"])
        flat = found.flatten_keys(".")
        assert set(flat.keys()) == set(expected)
        assert all(torch.equal(flat[name], value) for name, value in expected.items())
        for dataset, batch in ((plain, expected), (dictionary, found)):
            dataset.update_priority(batch, expected["next.reward"] + 0.1)
    two = gear.ReplayDataset(
        table,
        batch_size=4,
        windows={"observation": gear.Window(3), "next.reward": STEP},
        output="tensordict",
        draws=gear.Draws(sample_info=True),
        batches_per_epoch=2,
        device="cpu",
    )
    with pytest.raises(SchemaError, match=r"collate_fn=dataset\.collate"):
        next(iter(DataLoader(two, batch_size=None)))
    loaded = list(DataLoader(two, batch_size=None, collate_fn=two.collate))
    assert [batch["mask", "next", "reward"].shape for batch in loaded] == [torch.Size([4])] * 2
    assert loaded[0]["sample_info", "age"].dtype == torch.int64


def test_names_that_cannot_be_nested_and_a_missing_package(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 6, "device": "cpu", "output": "tensordict"}
    with pytest.raises(SchemaError, match="output is 'td'; expected 'dict', 'nested' or 'tensordict'"):
        gear.ReplayDataset(table, batch_size=6, windows=STEP, output="td")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match=r"pip install '.\[tensordict\]'"):
        gear.ReplayDataset(table, **nested({"windows": STEP, **options}))
    monkeypatch.setitem(sys.modules, "tensordict", sys)
    for name, message in (("mask.reward", "beneath 'mask'"), ("observation.x", "beneath 'observation'")):
        windows = {"observation": STEP, name: gear.Window(1, column="next.reward")}
        with pytest.raises(SchemaError, match=message):
            gear.ReplayDataset(table, **nested({"windows": windows, **options}))
