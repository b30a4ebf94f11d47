"""`Batch`: a dict whose `repr` shows shapes, which DataLoader does not stack again, and which travels like any dict."""

from __future__ import annotations

import collections
import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import mostly_long
from dataset_common import drawn, equal, make_table, named_table
from lightning_ddp import IGNORED, quiet
from options_common import nested
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

import gear_loader as gear
from gear_loader.collection.batches import Batch
from gear_loader.errors import SchemaError

OPTIONS: dict[str, Any] = {"batch_size": 4, "windows": gear.Window(3), "device": "cpu"}


def test_the_repr_shows_shapes_and_dtypes() -> None:
    windows = {"observation": gear.Window(3), "reward": gear.Window(1, squeeze=True)}
    with make_table() as table:
        batch = gear.ReplayDataset(table, batch_size=4, windows=windows, device="cpu").sample()
    assert repr(batch).splitlines()[:4] == [
        "<Batch of 4 rows:",
        "  observation  float32 [4, 3, 3]",
        "  reward       float64 [4]",
        "  mask         {observation: bool [4, 3], reward: bool [4]}",
    ]
    assert repr(Batch()) == "<Batch of 0 keys>"
    tokens = gear.Ragged(torch.zeros(5, 2), torch.tensor([0, 3, 5]))
    assert repr(Batch(tokens=tokens, text=["a", "b"])).splitlines()[1:] == [
        "  tokens  Ragged float32 [2], values [5, 2]",
        "  text    list of 2 str>",
    ]
    assert "note   str" in repr(Batch(note="mine", index=torch.tensor(3)))


def test_it_travels_like_any_dict(tmp_path: Path) -> None:
    with make_table() as table:
        batch = gear.ReplayDataset(table, **nested(OPTIONS)).sample()
    doubled = pytree.tree_map(lambda part: part * 2, batch)
    assert (type(doubled), doubled["index"].tolist()) == (Batch, (batch["index"] * 2).tolist())
    for made in (copy.copy(batch), copy.deepcopy(batch)):
        assert type(made) is Batch
        assert equal(made, batch)
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert type(read) is collections.OrderedDict
    assert equal(read, batch)


class Wrapped(IterableDataset[Any]):
    def __init__(self, dataset: gear.ReplayDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        yield from self.dataset


class Rows(Wrapped):
    """The rows of the batches one by one, which may be stacked."""

    def __iter__(self) -> Any:
        rows = (
            dict(zip(batch, row, strict=True))
            for batch in self.dataset
            for row in zip(*batch.values(), strict=True)
        )
        return iter(rows)


@pytest.mark.parametrize("workers", mostly_long([0, 2], 0))
def test_a_data_loader_that_would_stack_batches_is_refused(workers: int) -> None:
    with named_table("test-batches") as table:
        dataset = gear.ReplayDataset(table, **nested({**OPTIONS, "batches_per_epoch": 4}))
        expected = [drawn([batch]) for batch in dataset]
        for options in ({}, {"batch_size": 3, "drop_last": True}):
            with pytest.raises(SchemaError, match=r"use DataLoader\(dataset, batch_size=None\)"):
                next(iter(DataLoader(dataset, num_workers=workers, **options)))
        with pytest.raises(SchemaError, match=r"use DataLoader\(dataset, batch_size=None\)"):
            next(iter(DataLoader(Wrapped(dataset), num_workers=workers)))
        rows: Any = DataLoader(Rows(dataset), batch_size=8, num_workers=workers)
        assert len(next(iter(rows))["index"]) == 8
        dataset.set_epoch(0)
        loader: Any = DataLoader(dataset, batch_size=None, num_workers=workers)
        batches = list(loader)
        assert [drawn([batch]) for batch in batches] == expected
        assert {type(batch) for batch in batches} == {Batch}
        mine = DataLoader(
            dataset, batch_size=1, collate_fn=lambda batches: batches[0]
        )  # asked for: left alone
        assert len(next(iter(mine))["index"]) == 4
        del loader, mine, rows


@pytest.mark.filterwarnings(*(f"ignore:{message}" for message in IGNORED), "ignore:.*with no optimizer")
def test_lightning_is_refused_too_and_keeps_the_type() -> None:
    import lightning

    class Model(lightning.LightningModule):
        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            assert type(batch) is Batch
            return batch["observation"].sum().requires_grad_()

        def configure_optimizers(self) -> None: ...

    with make_table() as table:
        dataset = gear.ReplayDataset(table, **nested({**OPTIONS, "batches_per_epoch": 2}))
        quiet(max_epochs=1).fit(Model(), DataLoader(dataset, batch_size=None))
        with pytest.raises(SchemaError, match="batch_size=None"):
            quiet(max_epochs=1).fit(Model(), DataLoader(dataset))
