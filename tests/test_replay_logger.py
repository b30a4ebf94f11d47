"""`ReplayLogger`: what it logs, when, and to whom. The values are those of `ReplayMonitor`, tested there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_common import make_table

import gear_loader as gear
from gear_loader.dataset import replay_metrics
from gear_loader.errors import SchemaError


class Wandb:
    """A run of W&B, or any that takes ``log(metrics, step=)``."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.logs.append((step, metrics))


class Fabric(Wandb):
    """A logger of Lightning's Fabric, or the module of MLflow."""

    log = None  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        Wandb.log(self, metrics, step)


def test_a_buffer_is_logged_from_its_first_transition_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(replay_metrics, "monotonic", lambda: now)
    run, other, found = Wandb(), Fabric(), []
    buffer = gear.ReplayBuffer(800, batch_size=8, device="cpu")
    log = gear.ReplayLogger(
        buffer, run, other, lambda metrics, step: found.append((step, metrics)), every_n_steps=3
    )
    assert log() is None  # there is no table yet
    for step in range(8):
        buffer.add(np.zeros(2), 0, 0.0, np.ones(2), False, step % 2 == 1)
        now += 2.0
        if step:
            log(buffer.sample())
    assert run.logs == other.logs == found
    assert [step for step, _ in found] == [3, 6]
    first, second = found[0][1], found[1][1]
    assert first["replay/sample_rate"] == second["replay/sample_rate"] == 8 * 3 / 6
    assert second["replay/insert_rate"] == 3 / 6  # no observation follows the one before
    assert second["replay/fill_steps"] == pytest.approx(7 / 800)
    assert all(type(value) in (int, float) for value in first.values())


def test_steps_of_the_callers_own_and_all_metrics() -> None:
    with make_table() as table:
        dataset = gear.ReplayDataset(
            table, batch_size=4, windows=gear.Window(1), sampler=gear.Prioritized(), device="cpu",
            draws=gear.Draws(sample_info=True),
        )  # fmt: skip
        run = Wandb()
        log = gear.ReplayLogger(dataset, run, every_n_steps=1, quantiles=(0.5,), prefix="")
        logged = log(dataset.sample(), step=40)
    assert run.logs == [(40, logged)]
    assert logged is not None
    assert {"age_mean", "times_sampled_mean", "priority_q50", "num_stale", "sample_rate"} <= set(logged)


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make_table() as table, tensorboard.SummaryWriter(str(tmp_path)) as writer:
        dataset = gear.ReplayDataset(table, batch_size=4, windows=gear.Window(1), device="cpu")
        log = gear.ReplayLogger(dataset, writer, every_n_steps=2)
        logged = [log(dataset.sample()) for _ in range(4)]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = events.Scalars("replay/fill_steps")
    assert [value.step for value in values] == [1, 3]
    assert values[0].value == pytest.approx(logged[1]["replay/fill_steps"])  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3,), {}, "source is 3; expected a ReplayDataset, or a ReplayBuffer"),
        ((gear.ReplayBuffer(9), 3), {}, "3 was received; expected what has add_scalar, log_metrics or log"),
        ((gear.ReplayBuffer(9),), {"every_n_steps": 0}, "every_n_steps is 0"),
        ((gear.ReplayBuffer(9),), {"quantiles": [2]}, "quantiles is"),
    ],
)
def test_wrong_options(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.ReplayLogger(*arguments, **options)


@pytest.mark.long  # their imports take seconds
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with make_table() as table, mlflow.start_run() as run:
        dataset = gear.ReplayDataset(table, batch_size=4, windows=gear.Window(1), device="cpu")
        log = gear.ReplayLogger(dataset, mlflow, every_n_steps=2)
        logged = [log(dataset.sample()) for _ in range(4)]
    values = mlflow.MlflowClient().get_metric_history(run.info.run_id, "replay/fill_steps")
    assert [value.step for value in values] == [1, 3]
    assert values[0].value == pytest.approx(logged[1]["replay/fill_steps"])  # type: ignore[index]


@pytest.mark.long
def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with make_table() as table, wandb.init(project="replay", mode="offline", dir=tmp_path) as run:
        dataset = gear.ReplayDataset(table, batch_size=4, windows=gear.Window(1), device="cpu")
        log = gear.ReplayLogger(dataset, run, every_n_steps=2)
        logged = [log(dataset.sample()) for _ in range(4)]
        assert logged[1] is not None  # W&B commits a step when the next one begins
        assert {name: run.summary[name] for name in logged[1]} == pytest.approx(logged[1])
        assert run.step == 3
