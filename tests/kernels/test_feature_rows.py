"""Rows of nodes by the kernels that read host memory, against the compiled gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.graph.table_rows import DeviceRows, TableRows
from gear_loader.kernels import gather, reference, split

SCHEMA = {
    "x": gear.Column(torch.float32, (36,)),  # longer than a line
    "odd": gear.Column(torch.uint8, (7,)),
    "label": gear.Column(torch.int64),
}

ALL = pytest.mark.parametrize(
    ("gathering", "splitting"),
    [
        pytest.param(
            gather.gather,
            split.split,
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="they are compiled here"),
        ),
        (reference.gather, reference.split),
    ],
    ids=["kernel", "twin"],
)


@ALL
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_compiled_gather(
    gathering: Callable[..., None], splitting: Callable[..., None], packed: bool, monkeypatch: Any
) -> None:
    random = np.random.default_rng(0)
    total = 90
    with gear.Table.create(
        SCHEMA, max_steps=100, max_trajectories=4, block_steps=8, memory=gear.Memory(packed=packed)
    ) as table:
        rows: dict[str, Any] = {
            "x": random.standard_normal((total, 36), dtype=np.float32),
            "odd": random.integers(0, 256, (total, 7)).astype(np.uint8),
            "label": np.arange(total) * 7919,
        }
        for part in (slice(0, 37), slice(37, 38), slice(38, total)):
            table.add({name: values[part] for name, values in rows.items()})
        features = gear.Features(table)
        source = features._sources[0]
        assert isinstance(source, TableRows)
        device = torch.device("cpu")
        features._zero_copy[0] = DeviceRows(source, device, gather=gathering, split=splitting)
        for ids in ([89, 0, 89, 37], random.integers(0, total, 9)):
            for name, values in features[ids].items():
                assert torch.equal(values, torch.from_numpy(rows[name])[ids]), name
        # Several launches, and rows of a device cache beside them.
        monkeypatch.setattr("gear_loader.graph.table_rows._SCRATCH_BYTES", 6 * features.row_bytes)
        features._zero_copy[0] = DeviceRows(source, device, gather=gathering, split=splitting)
        features.place(np.arange(total), device_bytes=10 * features.row_bytes)
        ids = random.integers(0, total, 12)
        for name, values in features[ids].items():
            assert torch.equal(values, torch.from_numpy(rows[name])[ids]), name
        hits = int((ids >= 80).sum())
        assert (features.reads.device, features.reads.host) == (hits, 12 - hits)
        with pytest.raises(gear.errors.UnknownNodeError, match=r"^ids has node 90, which"):
            features[[3, 90]]
