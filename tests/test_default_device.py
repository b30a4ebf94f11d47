"""Modes of torch that the caller may be in: another default device, and inference mode."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested

import gear_loader as gear

ROOT = Path(__file__).resolve().parents[1]
FACTORIES = (
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
    ),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
)
SCHEMA = {
    "value": gear.Column(torch.float32, (6,)),
    "half": gear.Column(torch.bfloat16),
    "number": gear.Column(torch.int64),
}


def rows(number: int, length: int = 9) -> dict[str, Any]:
    return {
        "value": np.full((length, 6), number, np.float32),
        "half": torch.full((length,), 1.0, dtype=torch.bfloat16, device="cpu"),
        "number": np.arange(length),
    }


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with gear.Table.create(SCHEMA, max_steps=2000, max_trajectories=100, block_steps=8) as table:
        for number in range(40):
            table.add(rows(number))
        yield table


def factories_without_device(source: str) -> list[int]:
    """The lines with a call of a factory of torch's that does not say where."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
            and "device" not in {keyword.arg for keyword in node.keywords}
        ):
            found.append(node.lineno)
    return found


def test_every_factory_names_its_device() -> None:
    """What it makes would be wherever `torch.set_default_device` says."""
    assert factories_without_device("torch.zeros(3, dtype=int)\ntorch.ones(3, device='cpu')") == [1]
    paths = [*(ROOT / "gear_loader").rglob("*.py"), *(ROOT / "triton_kernels").rglob("*.py")]
    assert len(paths) > 80
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    sources = {
        path: source
        for path, source in sources.items()
        if any(f"torch.{name}(" in source for name in FACTORIES)
    }
    found = {path: factories_without_device(source) for path, source in sources.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("sampler", "prefetch"),
    [
        (gear.Uniform(replacement=False), 2),
        (gear.Prioritized(unit="step", replacement=False), 0),
        (gear.TopK(), 2),
    ],
    ids=str,
)
def test_batches_are_on_the_cpu_whatever_the_default_device(
    table: gear.Table, sampler: gear.Sampler, prefetch: int
) -> None:
    def batches() -> list[dict[str, Any]]:
        windows = {"value": gear.Window(4, -3), "half": gear.Window(2)}
        options: dict[str, Any] = {"copy": True, "batches_per_epoch": 4, "sample_info": True, "device": "cpu"}
        options |= {"sampler": sampler, "prefetch": prefetch}
        data = gear.ReplayDataset(table, **nested({"batch_size": 8, "windows": windows, **options}))
        found = []
        for batch in data:
            found.append(batch)
            if isinstance(sampler, (gear.Prioritized, gear.TopK)):
                data.update_priority(batch, np.arange(8) + 1.0)
        found.append(data.sample())
        data.load_state_dict(data.state_dict())
        return found

    expected = batches()
    torch.set_default_device("meta")
    try:
        found = batches()
    finally:
        torch.set_default_device(None)
    for one, other in zip(found, expected, strict=True):
        for key in ("value", "half", "index", "anchor", "generation"):
            assert one[key].device.type == "cpu"
            assert torch.equal(one[key], other[key]), key
        assert one["mask"]["value"].device.type == "cpu"


def test_tables_work_whatever_the_default_device(tmp_path: Path) -> None:
    torch.set_default_device("meta")
    try:
        with gear.Table.create(SCHEMA, max_steps=500, max_trajectories=30, block_steps=8) as table:
            table.add(rows(0))
            table.extend([rows(1), rows(2)])
            with table.writer(chunk_steps=8, overlap_steps=0) as writer:
                for step in range(16):
                    writer.append(value=np.full(6, 3, np.float32), half=1.0, number=step)
            assert table[1]["value"].device.type == "cpu"
            table.stats()
            table.check_valid()
            table.save(tmp_path)
            before = [{name: part.numpy(force=True).copy() for name, part in table[i].items() if name != "half"}
                      for i in table.indices().tolist()]  # fmt: skip
        with gear.Table.load(tmp_path) as loaded:
            for i, wanted in zip(loaded.indices().tolist(), before, strict=True):
                for name, values in wanted.items():
                    np.testing.assert_array_equal(loaded[i][name].numpy(), values)
    finally:
        torch.set_default_device(None)
