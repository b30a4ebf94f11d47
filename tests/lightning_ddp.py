"""Trains under Lightning with ``strategy="ddp"``: the script that Lightning starts again for each rank.

    python tests/lightning_ddp.py FOLDER NAME RUN

Rank r leaves FOLDER/rank-r.pt, what `train` has returned there.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from distributed_common import filled
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from options_common import nested

import gear_loader as gear
from gear_loader.dataset import replay_metrics
from gear_loader.distributed import Shards

COUNTS = [30, 12]
BATCHES, EPOCHS, ROWS = 5, 2, 16  # batches of an epoch, rows of a batch on all ranks together
RUNS: dict[str, dict[str, Any]] = {  # options of the data module
    "prioritized": {"sampler": gear.Prioritized(alpha=0.7, beta=0.5)},
    "uniform pass": {"sampler": gear.Uniform(replacement=False), "batches_per_epoch": None},  # of 3 batches
}
STEPS = {"prioritized": 3, "uniform pass": 4}
"""After which step each run is resumed: in the middle of an epoch."""
Rows = list[tuple[int, ...]]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Memory(DummyLogger):
    """A logger that keeps what it is given: `logs` has what was named ``replay/``, without that."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []
        self.logs: list[dict[str, float]] = []
        self.others: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("replay/") for name in metrics):
            assert all(name.startswith("replay/") for name in metrics)
            assert all(type(value) is float or type(value) is int for value in metrics.values())
            self.steps.append(step)
            self.logs.append({name.removeprefix("replay/"): value for name, value in metrics.items()})
        else:
            self.others.append((step, dict(metrics)))


class SaveAt(Callback):
    """Saves a checkpoint by hand in a hook of the trainer, once a step count has been reached."""

    def __init__(self, path: Path, hook: str, step: int) -> None:
        self.path, self.step = path, step
        setattr(self, hook, self.save)

    def save(self, trainer: lightning.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def quiet(**options: Any) -> lightning.Trainer:
    """A trainer on the CPU that shows and keeps nothing unless it is told to."""
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    return lightning.Trainer(accelerator="cpu", **{**dict.fromkeys(off, False), **options})


class Model(lightning.LightningModule):
    """Notes the rows that it is shown and its losses, and gives new priorities that a row's name decides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[Rows] = []
        self.weights: list[list[float]] = []
        self.losses: list[float] = []
        self.validated: list[list[Rows]] = []
        self.val_losses: list[float] = []
        self.logged: list[dict[str, float]] = []

    def loss(self, batch: Any) -> torch.Tensor:
        observation = batch["obs"] / 100
        error = (self.layer(observation)[..., 0] - observation.square().sum(dim=-1)).square() * batch["mask"]
        return error.sum(dim=1)  # [B]

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.seen.append(rows_of(batch))
        loss = self.loss(batch)
        dataset = self.trainer.datamodule.train_dataset
        if "priority_weight" in batch:
            self.weights.append(batch["priority_weight"].tolist())
            loss = loss * batch["priority_weight"]
            sums = batch["index"] * 7 + batch["anchor"] * 3 + batch["shard"] * 5 + self.global_step
            dataset.update_priority(batch, (sums % 11 + 0.25).float())
        self.losses.append(float(loss.detach().mean()))
        return loss.mean()

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, number: int) -> None:
        self.validated[-1].append(rows_of(batch))
        self.log("val_loss", self.loss(batch).mean(), batch_size=len(batch["index"]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.val_losses.append(float(self.trainer.callback_metrics.get("val_loss", 0.0)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.005)


def rows_of(batch: Any) -> Rows:
    """What the rows of a batch are, and a value of each that tells whether it is what its name says."""
    names = torch.stack([batch["shard"], batch["index"], batch["anchor"], batch["act"][:, 0]], dim=1)
    return [tuple(row) for row in names.tolist()]


def module(source: Any, run: str, ranks: int) -> gear.ReplayDataModule:
    options = {"batches_per_epoch": BATCHES, **RUNS[run]}
    return gear.ReplayDataModule(
        source,
        **nested(
            {
                "batch_size": ROWS // ranks,
                "windows": gear.Window(3),
                "val_fraction": 0.2,
                "seed": 7,
                **options,
            }
        ),
    )


def fit(data: gear.ReplayDataModule, folder: Path | None, ckpt_path: Path | None, **options: Any) -> Model:
    """Train, with a checkpoint in `folder` after every step."""
    model, memory = Model(), Memory()
    every = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    watch = gear.ReplayMonitor(every_n_steps=2)
    seconds = itertools.count()
    replay_metrics.monotonic = lambda: float(next(seconds))  # one from a log to the next
    callbacks = [watch] if folder is None else [every, watch]
    told = {"logger": memory, "enable_checkpointing": folder is not None, "max_epochs": EPOCHS}
    quiet(callbacks=callbacks, **told, **options).fit(model, data, ckpt_path=ckpt_path)
    model.logged = memory.logs
    return model


def train(source: Callable[[], Any], folder: Path, ranks: int, run: str, **options: Any) -> Any:
    """A run, and the same resumed in the middle of an epoch: what the models have noted."""
    checkpoints = folder / str(ranks)
    whole = noted(fit(module(source, run, ranks), checkpoints, None, **options))
    middle = checkpoints / f"step={STEPS[run]}.ckpt"
    return {"whole": whole, "resumed": noted(fit(module(source, run, ranks), None, middle, **options))}


def noted(model: Model) -> dict[str, Any]:
    names = ("seen", "weights", "losses", "validated", "val_losses", "logged")
    return {name: getattr(model, name) for name in names} | {"state": model.state_dict()}


def main() -> None:
    folder, name, run = Path(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in IGNORED:
            warnings.filterwarnings("ignore", message=message)
        made: list[gear.Table] = []

        def source() -> Shards:
            rank = torch.distributed.get_rank()
            if not made:
                made.append(filled(f"{name}-{rank}", rank, COUNTS))
            return Shards(gear.Table.attach(f"{name}-{rank}"), timeout=60, transport="socket")

        try:
            found = train(source, folder, 2, run, strategy="ddp", devices=2)
        finally:
            for table in made:
                table.unlink()
    torch.save(found, folder / f"rank-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


IGNORED = (
    # Lightning imports and calls what torch has deprecated meanwhile.
    ".*LeafSpec.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    # Runs are resumed without the callback that saved the checkpoint.
    "Be aware that when using `ckpt_path`, callbacks used to create",
    "GPU available but not used",
    "The number of training batches .* is smaller than the logging interval",
    # Advice that depends on the machine's number of cores, or on Python's version.
    "This DataLoader will create .* worker processes",
    "This process .* is multi-threaded",
    # Models and data modules of the tests have what they need.
    "You passed in a `val_dataloader` but have no `validation_step`",
    "Your `IterableDataset` has `__len__` defined",
    ".*does not have many workers",
)

if __name__ == "__main__":
    main()
