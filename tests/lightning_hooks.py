"""Calls every entry of Lightning's `Trainer` with a data module: a script, which strategies start again for each rank.

    python tests/lightning_hooks.py FOLDER NAME STRATEGY SOURCE

NAME, NAME-0 and NAME-1 are tables that exist. Rank r leaves FOLDER/CALL-r.pt, what the model was shown in that call.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning_ddp import IGNORED, quiet

import gear_loader as gear
from gear_loader.distributed import Shards

ROWS, BATCHES, VAL_BATCHES = 4, 5, 3
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # method, options of trainer and data module
    "fit": ("fit", {"max_epochs": 2}, {}),
    "val_batches": ("fit", {"max_epochs": 2}, {"val_batches": VAL_BATCHES}),
    "limits": ("fit", {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1}, {}),
    "overfit": ("fit", {"max_epochs": 2, "overfit_batches": 2}, {}),
    "validate": ("validate", {}, {}),
    "test": ("test", {}, {"val_batches": VAL_BATCHES}),
    "predict": ("predict", {}, {}),
    "predict last": ("predict", {}, {"draws": gear.Draws(anchor="last")}),
}


class Model(lightning.LightningModule):
    """Notes the step of every row that it is shown, by the values of `act`, and leaves a file in the end."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.path = path
        self.seen: list[list[int]] = []
        self.validated: list[list[list[int]]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append(batch["act"].flatten().tolist())
        return self.layer(batch["obs"] / 100).square().mean()

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated[-1].append(batch["act"].flatten().tolist())

    def test_step(self, batch: Any) -> None:
        self.seen.append(batch["act"].flatten().tolist())

    def predict_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append(batch["act"].flatten().tolist())
        return batch["act"]

    def teardown(self, stage: str) -> None:
        # Nobody else does in a process of ddp_spawn; PyTorch may abort at its exit if Gloo's threads still run.
        atexit.register(leave_group)
        torch.save((self.seen, self.validated), f"{self.path}-{self.global_rank}.pt")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class ShardsOfRanks:
    """Makes the `Shards` of a rank; alone, of both tables. A class, because ``ddp_spawn`` pickles it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> Shards:
        if torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
            return Shards(gear.Table.attach(f"{self.name}-{rank}"), timeout=60, transport="socket")
        return Shards([gear.Table.attach(f"{self.name}-{shard}") for shard in range(2)])


def module(source: Any, **options: Any) -> gear.ReplayDataModule:
    told = {"batch_size": ROWS, "windows": gear.Window(1), "val_fraction": 0.2, "batches_per_epoch": BATCHES}
    return gear.ReplayDataModule(source, **{**told, **options})


def source_of(name: str, kind: str) -> Any:
    """What is given to the data module: a table's name, a table, or a function that returns `Shards`."""
    return {
        "name": lambda: name,
        "table": lambda: gear.Table.attach(name),
        "shards": lambda: ShardsOfRanks(name),
    }[kind]()


def calls_of(strategy: str) -> list[str]:
    """What is called with a strategy; ``ddp_spawn`` starts processes for each call."""
    return ["fit", "overfit", "validate", "test", "predict"] if strategy == "ddp_spawn" else list(CALLS)


def call(folder: Path, name: str, strategy: str, kind: str) -> None:
    """Make the calls of a strategy, each with a model, a trainer and a data module of its own."""
    source = source_of(name, kind)
    for what in calls_of(strategy):
        method, settings, options = CALLS[what]
        devices = 1 if strategy == "auto" else 2
        trainer = quiet(strategy=strategy, devices=devices, num_sanity_val_steps=0, **settings)
        getattr(trainer, method)(Model(str(folder / what)), datamodule=module(source, **options))
    if kind == "table":
        source.close()


def main() -> None:
    folder, name, strategy, kind = Path(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in IGNORED:
            warnings.filterwarnings("ignore", message=message)
        call(folder, name, strategy, kind)
    leave_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
