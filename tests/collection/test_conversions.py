"""Windows in another dtype, and scaled: the same as converting the batch by torch, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import snapshot

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.storage.dtypes import torch_dtypes

DTYPES = torch_dtypes()
LENGTHS = (5, 1, 40, 8, 3)
SCHEMA = {
    **{name: gear.Column(dtype, (3,)) for name, dtype in DTYPES.items()},
    "goal": gear.Column(torch.uint8, (2,), per="trajectory"),
}


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    """Random values, among them those that do not fit into a smaller dtype."""
    random = np.random.default_rng(1)
    with gear.Table.create(SCHEMA, max_steps=100, max_trajectories=8, block_steps=4) as table:
        for length in LENGTHS:
            rows: dict[str, Any] = {"goal": torch.from_numpy(random.integers(0, 256, 2).astype(np.uint8))}
            for name, dtype in DTYPES.items():
                values = torch.from_numpy(random.normal(0, 60, (length, 3)))
                rows[name] = (values.abs() if name == "uint8" else values).to(dtype)
            table.add(rows)
        yield table


def pairs() -> list[tuple[str, torch.dtype, float | None]]:
    floating = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]
    return [
        *[(name, dtype, None) for name in DTYPES for dtype in (*floating, torch.int64, torch.int32)],
        *[(name, dtype, scale) for name in DTYPES for dtype in floating for scale in (1 / 255, -3.7, 2)],
    ]


@pytest.mark.parametrize("size", [3, 4000], ids=["inline", "large"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_values_are_those_of_torch(table: gear.Table, layout: Any, size: int) -> None:
    found = {f"{name}, {dtype}, {scale}": (name, dtype, scale) for name, dtype, scale in pairs()}
    chosen = dict(itertools.islice(found.items(), None, None, 1 if size == 3 else 7))
    kind = {"padded": gear.Window(4, -1), "packed": gear.Window(4, -1)}[layout]
    windows: dict[str, Any] = dict.fromkeys(DTYPES, kind)
    for key, (name, dtype, scale) in chosen.items():
        windows[key] = gear.Window(4, -1, column=name, dtype=dtype, scale=scale)
    windows["goal"] = None
    windows["scaled"] = gear.Window(1, column="goal", dtype=torch.float32, scale=1 / 255)
    data = gear.ReplayDataset(
        table, batch_size=size, windows=windows, layout=layout, device="cpu", prefetch=0
    )
    for batch in itertools.islice(data, 2):
        for key, (name, dtype, scale) in chosen.items():
            source = batch[name]
            expected = (source if scale is None else source * scale).to(dtype)
            assert batch[key].dtype == dtype
            assert torch.equal(batch[key].view(torch.uint8), expected.view(torch.uint8)), key
        assert torch.equal(batch["scaled"], batch["goal"] * (1 / 255))


def snapshot_of(batch: Any) -> dict[str, Any]:
    return snapshot({key: value for key, value in batch.items() if key != "max_seqlen"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.complex64}, "Window dtype is torch.complex64; expected one of bool, uint8"),
        ({"dtype": "float32"}, "Window dtype is 'float32'"),
        ({"scale": float("nan")}, "Window scale is nan; expected a finite number"),
        ({"scale": True}, "Window scale is True"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.Window(1, **options)
    with pytest.raises(SchemaError, match=message):
        gear.Whole(**options)


def test_a_scaled_window_needs_a_floating_dtype(table: gear.Table) -> None:
    for window in (gear.Window(1, scale=0.5), gear.Window(1, dtype=torch.int64, scale=0.5)):
        with pytest.raises(
            SchemaError, match=r"The window of 'uint8' has scale=0.5 and would be torch\.u?int"
        ):
            gear.ReplayDataset(table, batch_size=1, windows={"uint8": window}, device="cpu")
    assert repr(gear.Window(1, dtype=torch.bfloat16, scale=0.5)) == (
        "Window(length=1, offset=0, pad='keep', dtype=torch.bfloat16, scale=0.5)"
    )
