"""`ReplayMonitor` under Lightning's `Trainer`: exact values by a clock of the test's own, loggers, what is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from dataset_common import episode, make_table, named_table, nothing_left, snapshot
from lightning.pytorch.loggers import CSVLogger
from lightning_ddp import IGNORED, Memory, SaveAt, quiet
from options_common import nested

import gear_loader as gear
from gear_loader.dataset import replay_metrics
from gear_loader.errors import SchemaError
from gear_loader.lightning.monitor import ReplayMonitor
from gear_loader.storage.counters import INSERT_WAIT, SAMPLE_WAIT

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in IGNORED]

RATES = ("insert_rate", "sample_rate", "evict_rate", "expire_rate", "insert_wait", "sample_wait")
FILL = ("fill_trajectories", "fill_steps", "fill_blocks")
AGES = ("age_mean", "age_max", "age_seconds_mean", "age_seconds_max", "times_sampled_mean")


class Clock:
    """The monitor's clock: it stands still until a test moves it."""

    now = 1000.0

    def script(self, seconds: float) -> Callable[[int, Any], None]:
        """What a `Model` does in every step: let so much time pass."""

        def script(number: int, batch: Any) -> None:
            self.now += seconds

        return script


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replay_metrics, "monotonic", lambda: clock.now)
    return clock


class Model(lightning.LightningModule):
    """In training step number i of the run, calls `script(i, batch)`; keeps copies of the batches."""

    def __init__(self, script: Callable[[int, Any], object] = lambda number, batch: None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.script = script
        self.batches: list[Any] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.batches.append(snapshot(batch))
        self.script(len(self.batches) - 1, batch)
        loss = self.layer(batch["observation"]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


class ManualModel(Model):
    """Two optimizers, each of which makes a step in every batch."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        self.manual_backward(super().training_step(batch, number))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 1e-6) for _ in range(2)]


def module(table: Any, **options: Any) -> gear.ReplayDataModule:
    told = {"batch_size": 2, "windows": gear.Window(1), "val_fraction": 0, "prefetch": 0, "device": "cpu"}
    return gear.ReplayDataModule(table, **nested({**told, "batches_per_epoch": 6, **options}))


def trainer(loggers: Any, *callbacks: Any, **options: Any) -> lightning.Trainer:
    return quiet(logger=loggers, callbacks=list(callbacks), **{"max_epochs": 1, **options})


def add(table: gear.Table, *lengths: int) -> None:
    table.extend([episode(1000, length) for length in lengths])


def approximately(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-6, abs=0)


# Values ----------------------------------------------------------------------------------------------


def test_a_sequence_computed_by_hand(clock: Clock) -> None:
    """Two trajectories a step are drawn, always the two oldest."""
    options = {"max_steps": 64, "max_trajectories": 8, "block_steps": 4, "on_full": "evict_oldest"}
    with make_table((4, 4, 4, 4), **options) as table:
        counters, blocks = table._engine.index.arrays.counters, table.stats().num_blocks
        lengths = {1: (8,), 2: (3, 5), 4: (4, 4, 4, 4)}  # that are added in a step

        def script(number: int, batch: Any) -> None:
            clock.now += 2.0
            add(table, *lengths.get(number, ()))
            counters[INSERT_WAIT] += 1_500_000_000 * (number == 1)
            counters[SAMPLE_WAIT] += 3_000_000_000 * (number == 2)

        memory, model = Memory(), Model(script)
        data = module(table, sampler=gear.Fifo(), sample_info=True, batches_per_epoch=8)
        trainer(memory, ReplayMonitor(every_n_steps=3)).fit(model, data)
        seconds = torch.stack([batch["sample_info"]["age_seconds"] for batch in model.batches[:6]])
        # First of 4, 4 and 5 trajectories, the oldest and the one after it; then of 7, 7 and 8 (numbers 3 to 10, as
        # 0 to 2 had to make room).
        expected = {
            "fill_trajectories": (7 / 8, 8 / 8),
            "fill_steps": (32 / 64, (4 + 8 + 3 + 5 + 16) / 64),
            "fill_blocks": (9 / blocks, (1 + 2 + 1 + 2 + 4) / blocks),
            "insert_rate": (3 / 6, 4 / 6),
            "sample_rate": (6 / 6, 6 / 6),
            "samples_per_insert": (6 / 3, 6 / 4),
            "evict_rate": (0.0, 3 / 6),
            "expire_rate": (0.0, 0.0),
            "insert_wait": (1.5 / 6, 0.0),
            "sample_wait": (3.0 / 6, 0.0),
            "age_mean": ((3 + 2 + 3 + 2 + 4 + 3) / 6, (6 + 5 + 6 + 5 + 7 + 6) / 6),
            "age_max": (4.0, 7.0),
            "age_seconds_mean": (float(seconds[:3].mean()), float(seconds[3:].mean())),
            "age_seconds_max": (float(seconds[:3].max()), float(seconds[3:].max())),
            "times_sampled_mean": ((1 + 1 + 2 + 2 + 3 + 3) / 6, (4 + 4 + 5 + 5 + 1 + 1) / 6),
        }
        assert memory.steps == [2, 5]  # the last two batches of eight wait for a third
        for log, found in enumerate(memory.logs):
            assert found == approximately({name: values[log] for name, values in expected.items()})
        nothing_left(table)


def test_what_is_left_out_and_what_expires(clock: Clock) -> None:
    memory = Memory()
    with make_table() as table:
        trainer(memory, ReplayMonitor(every_n_steps=2)).fit(Model(clock.script(1)), module(table))
    assert memory.steps == [1, 3, 5]
    for log in memory.logs:  # without sample_info and without insertions
        assert set(log) == {*FILL, *RATES}
        assert (log["insert_rate"], log["sample_rate"]) == (0.0, 2.0)
    with make_table([3] * 10, max_times_sampled=1) as table:
        data, memory = module(table, sampler=gear.Fifo(), batches_per_epoch=3), Memory()
        trainer(memory, ReplayMonitor(every_n_steps=3)).fit(Model(clock.script(4)), data)
    assert (memory.logs[0]["expire_rate"], memory.logs[0]["evict_rate"]) == (6 / 12, 0)


def test_priorities(clock: Clock) -> None:
    memory = Memory()
    with make_table((), max_steps=64, max_trajectories=11, on_full="evict_oldest") as table:
        table.extend([episode(number, 4) for number in range(11)], priority=np.arange(1.0, 12.0))
        data = module(table, sampler=gear.Prioritized(alpha=1.0), batches_per_epoch=2)

        def script(number: int, batch: Any) -> None:
            if number == 1:
                add(table, *[4] * 11)  # everything else goes, and these begin with the running maximum
                assert data.train_dataset is not None
                data.train_dataset.update_priority(batch, torch.ones(2))

        trainer(memory, ReplayMonitor(every_n_steps=1, quantiles=(0, 0.25, 0.5, 1))).fit(Model(script), data)
        nothing_left(table)
    found = [{name: log[name] for name in log if name.startswith("priority")} for log in memory.logs]
    names = [f"priority_q{percent}" for percent in (0, 25, 50, 100)]
    assert found[0] == approximately(dict(zip(names, (1.0, 3.5, 6.0, 11.0), strict=True)))
    assert found[1] == approximately(dict.fromkeys(names, 11.0))
    assert [log["num_stale"] for log in memory.logs] == [0, 2]


def test_what_all_handles_of_a_table_do_together(clock: Clock) -> None:
    memory = Memory()
    with named_table("test-monitor", on_full="evict_oldest") as table:
        others = [gear.Table.attach(table.name) for _ in range(2)]
        reader = gear.ReplayDataset(others[0], batch_size=5, windows=gear.Window(1), device="cpu")

        def script(number: int, batch: Any) -> None:
            clock.now += 1
            for length, other in enumerate((table, *others), start=1):
                with other.writer() as writer:
                    writer.append({name: rows[:length] for name, rows in episode(7, 4).items()})
            reader.sample()

        trainer(memory, ReplayMonitor(every_n_steps=2)).fit(Model(script), module(table.name))  # attaches too
        for other in others:
            other.close()
    for name, rate in (("insert_rate", 3.0), ("sample_rate", 7.0), ("samples_per_insert", 7 / 3)):
        assert [log[name] for log in memory.logs] == approximately([rate] * 3)


def test_ages_wait_for_nothing_before_they_are_read() -> None:
    """Tensors of the meta device hold no values: whatever looks at one fails."""
    drawn = replay_metrics._DrawStatistics()
    info = {"age": torch.int64, "age_seconds": torch.float32, "times_sampled": torch.int64}
    for _ in range(3):
        drawn.add({name: torch.empty(5, dtype=dtype, device="meta") for name, dtype in info.items()})
    with pytest.raises((NotImplementedError, RuntimeError)):
        drawn.read()


# Lightning -------------------------------------------------------------------------------------------


def test_steps_of_the_trainer_and_another_prefix(clock: Clock) -> None:
    """The trainer's own interval does not matter; steps are those of the optimizer; a callback may be used twice."""
    with make_table() as table:
        for interval in (1, 50):
            memory, options = Memory(), {"log_every_n_steps": interval, "max_epochs": 2}
            trainer(memory, ReplayMonitor(every_n_steps=4), **options).fit(Model(), module(table))
            assert memory.steps == [3, 7, 11]
            if interval == 1:  # the same steps as what the module logs has
                assert [step for step, metrics in memory.others if "loss" in metrics] == list(range(12))
        callbacks = (ReplayMonitor(every_n_steps=2), ReplayMonitor(every_n_steps=1, prefix="other/"))
        for _ in range(2):
            memory = Memory()
            run = trainer(memory, *callbacks, accumulate_grad_batches=2)
            run.fit(Model(clock.script(1)), module(table))
            assert memory.steps == [0, 1, 2]
            assert [log["sample_rate"] for log in memory.logs] == [2.0] * 3
            assert sum("other/insert_rate" in metrics for _, metrics in memory.others) == 6
            clock.now += 100


@pytest.mark.parametrize("model", [Model, ManualModel])
def test_several_loggers_and_manual_optimisation(tmp_path: Path, model: type[Model]) -> None:
    memory, other = Memory(), Memory()
    with make_table() as table:
        loggers = [memory, CSVLogger(tmp_path, name="csv", version=0), other]
        trainer(loggers, ReplayMonitor(every_n_steps=3, prefix="replay/")).fit(model(), module(table))
    assert memory.steps == other.steps == [2, 5]
    assert memory.logs == other.logs
    header = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert set(header.split(",")) >= {f"replay/{name}" for name in (*FILL, *RATES)}


def test_a_resumed_run_counts_from_where_it_was(tmp_path: Path, clock: Clock) -> None:
    path, whole, rest = tmp_path / "checkpoint", Memory(), Memory()
    with make_table() as table:
        callbacks = (ReplayMonitor(every_n_steps=3), SaveAt(path, "on_train_batch_end", 4))
        trainer(whole, *callbacks, max_epochs=2).fit(Model(clock.script(1)), module(table))
        clock.now += 1e6  # the rates of the resumed run know nothing of the time in between
        resumed = trainer(rest, ReplayMonitor(every_n_steps=3), max_epochs=2)
        resumed.fit(Model(clock.script(1)), module(table), ckpt_path=path)
    assert whole.steps == [2, 5, 8, 11]
    assert rest.steps == [6, 9]
    assert [log["sample_rate"] for log in (*whole.logs, *rest.logs)] == [2.0] * 6


def test_a_dataset_that_is_given_or_missing(clock: Clock) -> None:
    options = {"batch_size": 2, "windows": gear.Window(1), "device": "cpu", "batches_per_epoch": 6}
    with make_table() as table:
        dataset = gear.ReplayDataset(table, **nested({**options, "sample_info": True}))
        loader, memory = torch.utils.data.DataLoader(dataset, batch_size=None), Memory()
        trainer(memory, ReplayMonitor(dataset, every_n_steps=6)).fit(Model(clock.script(1)), loader)
        assert set(memory.logs[0]) == {*FILL, *RATES, *AGES}
        nothing_left(table)
        message = r"ReplayMonitor found no dataset: .* Give it one, ReplayMonitor\("
        with pytest.raises(SchemaError, match=message):
            trainer(Memory(), ReplayMonitor()).fit(Model(), loader)


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(table: gear.Table) -> None:
        raise AssertionError("the monitor looked at the table")

    monkeypatch.setattr(gear.Table, "stats", look)


@pytest.mark.usefixtures("no_looks")
def test_without_a_logger_in_a_fast_dev_run_and_on_other_ranks_nothing_is_done() -> None:
    memory, callback = Memory(), ReplayMonitor(every_n_steps=1)
    with make_table() as table:
        trainer(False, ReplayMonitor(every_n_steps=1)).fit(Model(), module(table, sample_info=True))
        trainer(memory, ReplayMonitor(every_n_steps=1), fast_dev_run=3).fit(Model(), module(table))
        data = module(table)
        data.setup()
        assert data.train_dataset is not None
        rank: Any = SimpleNamespace(
            loggers=[memory], is_global_zero=False, fast_dev_run=False, datamodule=data
        )
        callback.on_train_start(rank, Model())
        callback.on_train_batch_end(rank, Model(), None, data.train_dataset.sample(), 0)
        callback.teardown(rank, Model(), "fit")
    assert memory.logs == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps is 0; expected"),
        ({"quantiles": (0.5, 1.5)}, r"quantiles is \(0\.5, 1\.5\); expected numbers from 0 to 1"),
        ({"quantiles": (np.nan,)}, r"quantiles is \(nan,\); expected"),
        ({"dataset": "replay"}, "dataset is a str; expected a ReplayDataset or None"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        ReplayMonitor(**options)
