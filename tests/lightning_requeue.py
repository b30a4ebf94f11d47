"""Lightning's requeue under Slurm: a script that sends itself SIGUSR1 in the middle of epochs and resumes.

    python tests/lightning_requeue.py FOLDER

Slurm's variables are set, and `scontrol` is on the PATH. It prints how many checkpoints were resumed from.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from dataset_common import drawn, make_table
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning_ddp import quiet

import gear_loader as gear

LENGTHS = [1 + number % 11 for number in range(60)]
EPOCHS, BATCHES = 2, 12
SIGNALS = 4
CASES: dict[
    str, tuple[dict[str, Any], bool]
] = {  # options of the data module; whether signals come at any time
    "uniform": ({"sampler": gear.Uniform()}, True),
    "once": ({"sampler": gear.Uniform(replacement=False)}, True),
    "prioritized": ({"sampler": gear.Prioritized()}, False),
}


class Model(lightning.LightningModule):
    """Notes (index, anchor) of every row that it is shown, and is sent signals: at its steps or at any time."""

    def __init__(self, *, signals: bool = False, any_time: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[list[tuple[int, int]]] = []
        self.signals, self.any_time = signals, any_time

    def on_train_start(self) -> None:
        if self.signals and self.any_time:
            threading.Thread(target=self.send, daemon=True).start()

    def send(self) -> None:
        generator = random.Random(5)
        for _ in range(SIGNALS):
            time.sleep(generator.uniform(0.01, 0.06))
            os.kill(os.getpid(), signal.SIGUSR1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        if self.signals and not self.any_time and len(self.seen) % 5 == 3:
            signal.raise_signal(signal.SIGUSR1)
        self.seen.append(drawn([batch]))
        if "priority_weight" in batch:
            priorities = (batch["index"] * 7 + batch["anchor"] * 3) % 11 + 0.25
            self.trainer.datamodule.train_dataset.update_priority(batch, priorities.float())
        time.sleep(0.01)
        return self.layer(batch["observation"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


def fit(folder: Path, options: dict[str, Any], checkpoint: Path | None = None, **signals: Any) -> Model:
    """A new model, trained on a new table of the same trajectories."""
    model = Model(**signals)
    slurm = SLURMEnvironment(auto_requeue=True)
    trainer = quiet(
        devices=1, max_epochs=EPOCHS, default_root_dir=folder, plugins=[slurm], num_sanity_val_steps=0
    )
    with make_table(LENGTHS) as table:
        data = gear.ReplayDataModule(
            table, batch_size=8, windows=gear.Window(4, -3), batches_per_epoch=BATCHES, **options
        )
        trainer.fit(model, data, ckpt_path=checkpoint)
    return model


def requeued(folder: Path, options: dict[str, Any], *, any_time: bool) -> int:
    whole = fit(folder, options).seen
    assert len(whole) == EPOCHS * BATCHES
    assert fit(folder, options, signals=True, any_time=any_time).seen == whole  # and is not disturbed
    saved = sorted(folder.glob("hpc_ckpt_*.ckpt"))
    assert saved
    for number, path in enumerate(saved):
        state = torch.load(path, weights_only=False)["ReplayDataModule"]["train"]
        position = state["epoch"] * BATCHES + state["step"]
        assert 0 <= position < len(whole)
        # The newest one is found by Lightning, as in a requeued job.
        again = fit(folder, options, None if number == len(saved) - 1 else path).seen
        assert again == whole[position:], (position, len(again))
    return len(saved)


if __name__ == "__main__":
    done = 0
    for name, (chosen, sent) in CASES.items():
        place = Path(sys.argv[1]) / name
        place.mkdir()
        done += requeued(place, chosen, any_time=sent)
    print(done)
