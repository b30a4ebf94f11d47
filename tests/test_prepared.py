"""Loaders as other libraries prepare them: each row once on two ranks, or an error that says what to pass."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import run_ranks
from options_common import nested
from table_common import fresh_name
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.errors import SchemaError

STEPS = 160
ALONE = {"rank": 0, "world_size": 1}


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    options = {
        "windows": gear.Window(1, squeeze=True),
        "sampler": gear.Uniform(False, unit="step"),
    } | options
    return gear.ReplayDataset(table, **nested({"batch_size": 10, "device": "cpu", "seed": 1, **options}))


def rows(loader: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader]


def errors(loader: Any) -> list[str]:
    """Of its length and of its first batch."""
    found = []
    for call in (len, lambda it: next(iter(it))):
        with pytest.raises(SchemaError) as error:
            call(loader)
        found.append(str(error.value))
    return found


def with_torchdata(rank: int, table: gear.Table) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader: Any = StatefulDataLoader(dataset(table), batch_size=None)
    first = [batch["x"].tolist() for _, batch in zip(range(3), loader, strict=False)]
    resumed: Any = StatefulDataLoader(dataset(table), batch_size=None)
    resumed.load_state_dict(loader.state_dict())
    return first + rows(resumed)


def with_fabric(rank: int, table: gear.Table) -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return rows(fabric.setup_dataloaders(DataLoader(dataset(table), batch_size=None)))


def with_accelerate(rank: int, table: gear.Table) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    def prepared(data: Any, dispatch: bool | None = None) -> Any:
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        return Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(data, batch_size=None))

    mixture = gear.Mixture({"x": (dataset(table), 1.0)}, batch_size=10, batches_per_epoch=4)
    for data in (dataset(table), mixture):
        assert all(
            "ranks=gear_loader.Ranks(rank=0, world_size=1)" in error for error in errors(prepared(data))
        )
    packed = dataset(table, windows=gear.Whole(), layout="packed", sampler=None, **ALONE)
    assert "packed ones cannot be" in errors(prepared(packed))[1]
    for data in (dataset(table, **ALONE), mixture):
        assert all("without dispatching" in error for error in errors(prepared(data, dispatch=False)))
    return rows(prepared(dataset(table, **ALONE)))


def on_a_rank(rank: int, world: int, name: str, library: str) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    with gear.Table.attach(name) as table:
        return globals()[f"with_{library}"](rank, table)


@pytest.mark.long
@pytest.mark.parametrize("library", ["torchdata", "lightning.fabric", "accelerate"])
def test_two_ranks_see_each_row_once(library: str) -> None:
    pytest.importorskip(library)
    columns, sizes = {"x": gear.Column(torch.int64)}, {"max_steps": STEPS, "max_trajectories": 20}
    with gear.Table.create(columns, **sizes, name=fresh_name()) as table:
        for first in range(0, STEPS, 8):
            table.add({"x": np.arange(first, first + 8)})
        seen = run_ranks(2, on_a_rank, table.name, library.rpartition(".")[2])
        table.unlink()
    assert [[len(batch) for batch in each] for each in seen] == [[10] * 8] * 2
    assert sorted(x for each in seen for batch in each for x in batch) == list(range(STEPS))


def test_a_trainer_of_transformers_that_would_stack_batches_is_refused() -> None:
    def collate(features: Any) -> Any:
        return features

    collate.__module__ = "transformers.trainer_utils"
    with gear.Table.create({"x": gear.Column(torch.int64)}, max_steps=20, max_trajectories=2) as table:
        table.add({"x": np.arange(20)})
        loader: Any = DataLoader(dataset(table), batch_size=2, collate_fn=collate)
        with pytest.raises(SchemaError, match="override the trainer's get_train_dataloader"):
            next(iter(loader))
