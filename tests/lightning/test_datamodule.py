"""`ReplayDataModule` under Lightning's `Trainer`: stop and resume, the split, tables, names and files."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import lightning
import numpy as np
import pytest
import torch
from cases import mostly_long, points
from dataset_common import SCHEMA, drawn, episode, make_table, named_table, nothing_left, prefetch_threads
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

import gear_loader as gear
from gear_loader.errors import (
    PrivateTableError,
    RateLimitError,
    RegionError,
    SchemaError,
    SourceError,
    TableEmptyError,
)
from gear_loader.lightning.datamodule import ReplayDataModule, Split

pytestmark = [
    # Lightning imports and calls what torch has deprecated meanwhile.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\).*"),
    # Runs are resumed here without the callback that saved the checkpoint.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
    # Advice on machines with a GPU: the tests run on the CPU on purpose.
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    # Python 3.12 and newer warn when a process with threads forks, which is what a DataLoader does by default.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Advice that depends on the machine's number of cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, 12, 60)]
WINDOW = gear.Window(4, -3)
Rows = list[tuple[int, int]]


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    with named_table("test-datamodule", LENGTHS) as table:
        yield table
        gc.collect()
        nothing_left(table)


class Model(lightning.LightningModule):
    """Notes (index, anchor) of every row that it is shown; raises at step `fail_at` of the run."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.fail_at = fail_at
        self.seen: list[Rows] = []
        self.validated: list[list[Rows]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        if len(self.seen) == self.fail_at:
            raise FloatingPointError("in the middle of training")
        self.seen.append(drawn([batch]))
        error = self.layer(batch["observation"])[..., 0] - batch["reward"].float()
        return (error.square() * batch["mask"]).mean()

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated[-1].append(drawn([batch]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


def module(table: Any, **options: Any) -> ReplayDataModule:
    return ReplayDataModule(table, **{"batch_size": 8, "windows": WINDOW, "val_fraction": 0.2, **options})


def trainer(folder: Path | None = None, *callbacks: Callback, **options: Any) -> lightning.Trainer:
    """A quiet trainer; with a folder, it keeps a checkpoint of every training step, ``step=7.ckpt``."""
    every: list[Callback] = []
    if folder is not None:
        every = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=folder is not None or any(isinstance(c, ModelCheckpoint) for c in callbacks),
        callbacks=[*every, *callbacks],
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **options},
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the data module and of the trainer
    "plain": ({}, {}),
    "trajectories once": ({"selector": gear.Uniform(False)}, {}),
    "steps once, no prefetch": (
        {"selector": gear.Uniform(False, "step"), "prefetch": 0, "batch_size": 32},
        {},
    ),
    "short epochs": ({"batches_per_epoch": 4}, {}),
    "endless": ({"batches_per_epoch": math.inf}, {"max_steps": 14, "max_epochs": -1}),
    "limited": ({"selector": gear.Uniform(False)}, {"limit_train_batches": 3}),
    "limited share": ({"batches_per_epoch": 8}, {"limit_train_batches": 0.5}),
    "accumulated": ({"batches_per_epoch": 5}, {"accumulate_grad_batches": 2}),
    "no validation": ({"val_fraction": 0}, {}),
    "validation within": ({"batches_per_epoch": 6}, {"val_check_interval": 2}),
    "workers": ({"num_workers": 2, "selector": gear.Uniform(False)}, {}),
}


# ---------------------------------------------------------------- stop and resume


@pytest.mark.parametrize("case", CASES)
@points(6)
def test_resuming_from_the_checkpoint_of_every_step(
    table: gear.Table, tmp_path: Path, case: str, every: int
) -> None:
    options, settings = CASES[case]
    whole = Model()
    full = trainer(tmp_path, **settings)
    full.fit(whole, module(table, **options))
    epoch = whole.seen[: int(full.num_training_batches)] if case != "endless" else whole.seen
    assert len({tuple(rows) for rows in whole.seen}) == len(whole.seen)
    accumulated = settings.get("accumulate_grad_batches", 1)
    steps = range(1, full.global_step)[::every]
    if case == "workers":
        steps = (
            (1, len(epoch), len(epoch) + 2) if every == 1 else (len(epoch) + 2,)
        )  # each resumption starts four processes
    for step in steps:
        checkpoint = tmp_path / f"step={step}.ckpt"
        resumed = Model()
        trainer(**settings).fit(resumed, module(table, **options), ckpt_path=checkpoint)
        if accumulated == 1:
            taken = step
        else:  # the last step of an epoch takes what is left of it
            per_epoch = -(-5 // accumulated)
            taken = step // per_epoch * 5 + step % per_epoch * accumulated
        assert resumed.seen == whole.seen[taken:], f"from step {step}"
        assert resumed.validated == whole.validated[len(whole.validated) - len(resumed.validated) :]
    gc.collect()
    nothing_left(table)


class SaveAt(Callback):
    """Saves a checkpoint by hand in a hook of the trainer, once a step count has been reached."""

    def __init__(self, path: Path, hook: str, step: int) -> None:
        self.path, self.step = path, step
        setattr(self, hook, self.save)

    def save(self, trainer: lightning.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("hook", "step", "workers"),
    [
        ("on_fit_start", 0, 0),
        ("on_train_start", 0, 0),
        (
            "on_train_epoch_start",
            0,
            0,
        ),  # of a later epoch Lightning itself resumes without training that epoch
        ("on_train_batch_start", 3, 0),
        ("on_train_batch_start", 3, 2),
        ("on_train_batch_end", 3, 0),
        ("on_train_batch_end", 6, 0),
        ("on_validation_start", 2, 0),
        ("on_validation_end", 2, 0),
        ("on_validation_end", 2, 2),
        ("on_validation_end", 6, 0),
        ("on_train_epoch_end", 6, 0),
    ],
)
def test_saving_in_any_hook(table: gear.Table, tmp_path: Path, hook: str, step: int, workers: int) -> None:
    options = {"batches_per_epoch": 6, "num_workers": workers}
    settings = {"max_epochs": 2, "val_check_interval": 2}
    whole = Model()
    trainer(None, SaveAt(tmp_path / "by hand", hook, step), **settings).fit(whole, module(table, **options))
    resumed = Model()
    trainer(**settings).fit(resumed, module(table, **options), ckpt_path=tmp_path / "by hand")
    assert resumed.seen == whole.seen[step:]


@pytest.mark.long
@pytest.mark.parametrize(("stop", "workers"), [(3, 0), (3, 2), (5, 0), (5, 2), (8, 0), (10, 0)])
def test_saving_after_a_run_was_stopped(table: gear.Table, tmp_path: Path, stop: int, workers: int) -> None:
    options = {"batches_per_epoch": 5, "num_workers": workers}
    whole = Model()
    trainer(max_epochs=3).fit(whole, module(table, **options))
    first, data = Model(), module(table, **options)
    stopped = trainer(max_epochs=-1, max_steps=stop)
    stopped.fit(first, data)
    stopped.save_checkpoint(tmp_path / "last")
    resumed = Model()
    trainer(max_epochs=3).fit(resumed, module(table, **options), ckpt_path=tmp_path / "last")
    # For Lightning a stop within an epoch ends it: fewer epochs are left. The batches follow one another all the same.
    assert first.seen + resumed.seen == whole.seen[: stop + len(resumed.seen)]
    assert len(resumed.seen) >= (3 - -(-stop // 5)) * 5 - stop % 5


@pytest.mark.parametrize("epochs", [1, 2])
def test_training_on_after_the_last_epoch(table: gear.Table, tmp_path: Path, epochs: int) -> None:
    whole = Model()
    trainer(max_epochs=3).fit(whole, module(table))
    first, finished = Model(), trainer(tmp_path, max_epochs=epochs)
    finished.fit(first, module(table))
    finished.save_checkpoint(tmp_path / "last")
    for checkpoint in ("last", f"step={finished.global_step}.ckpt"):
        resumed = Model()
        trainer(max_epochs=3).fit(resumed, module(table), ckpt_path=tmp_path / checkpoint)
        assert first.seen + resumed.seen == whole.seen


# Lightning's own advice, whenever its callback is used.
@pytest.mark.filterwarnings("ignore:`.fit\\(ckpt_path=None\\)` was called without a model")
@pytest.mark.filterwarnings('ignore:.fit\\(ckpt_path="last"\\) is set, but there is no last checkpoint')
@pytest.mark.parametrize("fail_at", [0, 2, 5, 7])
def test_resuming_after_an_exception(table: gear.Table, tmp_path: Path, fail_at: int) -> None:
    options = {"batches_per_epoch": 5}
    whole = Model()
    trainer(max_epochs=3).fit(whole, module(table, **options))
    failing = Model(fail_at)
    rescue = OnExceptionCheckpoint(tmp_path, filename="rescue")
    with pytest.raises(FloatingPointError, match="in the middle of training"):
        trainer(tmp_path, rescue, max_epochs=3).fit(failing, module(table, **options))
    gc.collect()
    nothing_left(table)
    checkpoints = ["rescue.ckpt"] + ([f"step={fail_at}.ckpt"] if fail_at else [])
    for checkpoint in checkpoints:
        resumed = Model()
        trainer(max_epochs=3).fit(resumed, module(table, **options), ckpt_path=tmp_path / checkpoint)
        assert failing.seen + resumed.seen == whole.seen, checkpoint


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # each run has a folder of its own
def test_resuming_twice(table: gear.Table, tmp_path: Path) -> None:
    whole = Model()
    trainer(max_epochs=3).fit(whole, module(table, batches_per_epoch=5))
    seen: list[Rows] = []
    checkpoint = None
    for stop in (2, 3, 7, 9, 15):
        model = Model()
        folder = tmp_path / str(stop)
        run = trainer(folder, max_epochs=3, max_steps=stop)
        run.fit(model, module(table, batches_per_epoch=5), ckpt_path=checkpoint)
        checkpoint = folder / f"step={stop}.ckpt"
        seen += model.seen
    assert seen == whole.seen


def test_one_data_module_in_several_runs(table: gear.Table) -> None:
    data = module(table, batches_per_epoch=4)
    whole, first, second = Model(), Model(), Model()
    trainer(max_epochs=3).fit(whole, module(table, batches_per_epoch=4))
    trainer(max_epochs=1).fit(first, data)
    assert data.state_dict()["train"]["step"] == 0
    trainer(max_epochs=2).fit(second, data)
    assert first.seen + second.seen == whole.seen


def test_the_state_by_itself(table: gear.Table) -> None:
    whole = Model()
    trainer(max_epochs=2).fit(whole, module(table, batches_per_epoch=5))
    data = module(table, batches_per_epoch=5)
    assert data.state_dict() == {}
    first = Model()
    trainer(max_epochs=-1, max_steps=3).fit(first, data)
    state = json.loads(json.dumps(data.state_dict()))
    assert (state["train"]["epoch"], state["train"]["step"]) == (0, 3)
    # Without the trainer's checkpoint: its own count starts at 0, the data goes on.
    other, second = module(table, batches_per_epoch=5), Model()
    other.load_state_dict(state)
    assert other.state_dict() == state
    run = trainer(max_epochs=-1, max_steps=1)
    run.fit(second, other)
    assert second.seen == whole.seen[3:4]
    assert other.state_dict()["train"]["step"] == 4
    strange = module(table, seed=9)
    strange.setup()
    with pytest.raises(SchemaError, match=r"other options \(saved, here\): {'seed': \(0, 9\)}"):
        strange.load_state_dict(state)


# ---------------------------------------------------------------- loops


def test_validation_passes_over_every_step_of_its_part_in_the_same_order(table: gear.Table) -> None:
    for workers in (0, 2):
        model, data = Model(), module(table, val_batch_size=7, num_workers=workers)
        trainer(max_epochs=2).fit(model, data)
        assert len(model.validated) == 2
        assert model.validated[0] == model.validated[1]
        rows = list(itertools.chain(*model.validated[0]))
        part = Split(0.2, seed=0, second=True)(np.arange(len(LENGTHS)))
        steps = [
            (int(index), step)
            for index, length, member in zip(table.indices(), table.lengths(), part, strict=True)
            if member
            for step in range(length)
        ]
        assert sorted(rows) == sorted(steps)
        assert rows != sorted(rows)
        assert {len(batch) for batch in model.validated[0][:-1]} == {7}
        assert not {index for index, _ in rows} & {index for index, _ in itertools.chain(*model.seen)}


def test_validation_without_training(table: gear.Table) -> None:
    model = Model()
    run = trainer()
    data = module(table)
    run.validate(model, data, verbose=False)
    run.validate(model, data, verbose=False)
    assert model.validated[0] == model.validated[1]
    with_training = Model()
    trainer(max_epochs=1).fit(with_training, module(table))
    assert model.validated[0] == with_training.validated[0]


def test_sanity_validation_does_not_disturb_training(table: gear.Table) -> None:
    plain, checked = Model(), Model()
    trainer().fit(plain, module(table))
    trainer(num_sanity_val_steps=2).fit(checked, module(table))
    assert checked.seen == plain.seen
    assert checked.validated[0] == checked.validated[1][:2]


def test_training_sees_the_batches_of_the_dataset(table: gear.Table) -> None:
    model = Model()
    trainer(max_epochs=2).fit(model, module(table, selector=gear.Uniform(False), seed=4))
    data = gear.ReplayDataset(
        table,
        batch_size=8,
        windows=WINDOW,
        selector=gear.Uniform(False),
        seed=4,
        subset=Split(0.2, seed=0, second=False),
        device="cpu",
    )
    assert model.seen == [drawn([batch]) for _ in range(2) for batch in data]
    assert len(model.seen) == 2 * len(data)


def test_a_batch_stays_valid_while_the_trainer_uses_it(table: gear.Table) -> None:
    class Slow(Model):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            copy = {key: value.clone() for key, value in batch.items()}
            loss = super().training_step(batch, number)
            time.sleep(0.005)  # the prefetch thread has all the time it wants
            assert all(torch.equal(batch[key], copy[key]) for key in copy)
            return loss

    model = Slow()
    trainer(max_epochs=2, val_check_interval=2).fit(model, module(table, batches_per_epoch=8, prefetch=3))
    assert len(model.seen) == 16


def test_a_table_that_grows_during_training() -> None:
    with make_table([3] * 50, max_steps=2000, max_trajectories=400) as table:

        class Growing(Model):
            def training_step(self, batch: Any, number: int) -> torch.Tensor:
                table.add(episode(1000 + len(self.seen), 5))
                return super().training_step(batch, number)

        model, data = Growing(), module(table, selector=gear.Uniform(False))
        trainer(max_epochs=5).fit(model, data)
        trained = {index for index, _ in itertools.chain(*model.seen)}
        assert max(trained) >= 50
        assert not trained & {index for index, _ in itertools.chain(*itertools.chain(*model.validated))}
        nothing_left(table)


def test_no_thread_is_left_after_training(table: gear.Table) -> None:
    before = set(threading.enumerate())
    trainer(max_steps=3, max_epochs=-1).fit(Model(), module(table, batches_per_epoch=math.inf, prefetch=3))
    gc.collect()
    assert prefetch_threads() == []
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"gear-loader-0"}  # the crew


# ---------------------------------------------------------------- tables, names, files


def test_a_table_is_left_open(table: gear.Table) -> None:
    data = module(table)
    trainer(max_epochs=1).fit(Model(), data)
    assert data.table is table
    data.teardown("fit")
    assert len(table) == len(LENGTHS)


def test_a_name_is_attached_to_and_closed(table: gear.Table) -> None:
    assert table.name is not None
    by_table, by_name, data = Model(), Model(), module(table.name)
    trainer(max_epochs=2).fit(by_table, module(table))
    trainer(max_epochs=1).fit(by_name, data)
    assert data.table is None
    assert data.train_dataset is None
    # Trained on with the same data module: it attaches anew and goes on.
    trainer(max_epochs=1).fit(by_name, data)
    assert by_name.seen == by_table.seen
    assert len(table) == len(LENGTHS)
    data.setup()
    opened = data.table
    assert opened is not None
    data.setup()
    assert data.table is opened
    data.teardown()
    data.teardown()
    assert "closed" in repr(opened)


def write_file(path: Path) -> str:
    ends = np.zeros(sum(LENGTHS), dtype=bool)
    ends[np.cumsum(LENGTHS) - 1] = True
    rows = [episode(i, length) for i, length in enumerate(LENGTHS)]
    with h5py.File(path, "w") as file:
        file["observations"] = np.concatenate([row["observation"] for row in rows])
        file["actions"] = np.concatenate([row["observation"][:, :2] for row in rows])
        file["rewards"] = np.concatenate([row["observation"][:, 2] for row in rows])
        file["terminals"] = ends
        file["timeouts"] = np.zeros_like(ends)
    return str(path)


@pytest.mark.parametrize("suffix", [".hdf5", ".h5"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_loaded_and_closed(table: gear.Table, tmp_path: Path, suffix: str, kind: Any) -> None:
    path = kind(write_file(tmp_path / f"episodes{suffix}"))
    by_table, by_file = Model(), Model()
    data = module(path, load_options={"progress": False})
    trainer(max_epochs=1).fit(by_table, module(table))
    trainer(max_epochs=1).fit(by_file, data)
    assert by_file.seen == by_table.seen
    assert by_file.validated == by_table.validated
    assert data.table is None


def test_loading_a_file_with_options_and_resuming(tmp_path: Path) -> None:
    path = write_file(tmp_path / "episodes.h5")
    options = {"load_options": {"progress": False, "max_trajectories": 30}, "batches_per_epoch": 4}
    whole, first, second = Model(), Model(), Model()
    trainer(max_epochs=2).fit(whole, module(path, **options))
    trainer(tmp_path / "run", max_epochs=-1, max_steps=3).fit(first, module(path, **options))
    trainer(max_epochs=2).fit(second, module(path, **options), ckpt_path=tmp_path / "run" / "step=3.ckpt")
    assert first.seen + second.seen == whole.seen
    assert max(index for index, _ in itertools.chain(*whole.seen)) < 30


def test_a_missing_file_or_table(tmp_path: Path) -> None:
    data = module(tmp_path / "nothing.h5")
    message = r"There is no file '.*nothing\.h5'; expected a D4RL-style HDF5 file, or a table's name"
    with pytest.raises(SourceError, match=message):
        data.prepare_data()
    with pytest.raises(SourceError, match=message):
        trainer().fit(Model(), data)
    with pytest.raises(SourceError):
        data.setup()
    data = module("test-datamodule-nobody")
    data.prepare_data()
    with pytest.raises(RegionError, match="There is no table named 'test-datamodule-nobody'"):
        data.setup()
    assert data.table is None
    data.teardown()


def test_workers_with_a_private_table() -> None:
    with (
        make_table(LENGTHS) as table,
        pytest.raises(PrivateTableError, match=r"(?s)private table.*name='replay'"),
    ):
        trainer().fit(Model(), module(table, num_workers=1, val_fraction=0))
    gc.collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, r"val_fraction is 1\.0; expected a share from 0 to below 1"),
        ({"val_fraction": -0.1}, r"val_fraction is -0\.1; expected a share from 0 to below 1"),
        ({"val_fraction": math.nan}, r"val_fraction is nan; expected a share from 0 to below 1"),
        ({"val_fraction": "0.1"}, r"val_fraction is '0\.1'; expected a share from 0 to below 1"),
        (
            {"subset": lambda s: s > 0},
            "subset was given; ReplayDataModule sets it. Use val_fraction, or ReplayDataset",
        ),
        ({"val_fraction": None}, r"val_fraction is None; expected a share from 0 to below 1"),
        ({"split_seed": 0.5}, r"split_seed is 0\.5; expected an integer"),
        ({"num_workers": -1}, "num_workers is -1; expected an integer of at least 0"),
        ({"load_options": 3}, "load_options is 3; expected a mapping of options"),
        ({"val_batch_size": 0}, "val_batch_size is 0; expected an integer of at least 1"),
        ({"batch_size": 0}, "batch_size is 0; expected an integer of at least 1"),
        ({"windows": 4}, "windows is 4; expected a Window or a mapping"),
        ({"windows": {"reward": 4}}, "The window of column 'reward' is 4; expected"),
        ({"keep": 0}, "keep is 0; expected an integer of at least 1"),
        ({"anchor": "middle"}, "anchor is 'middle'; expected"),
        ({"selector": "prioritized"}, "selector is 'prioritized'; expected an object such as"),
        ({"device": "gpu"}, "device is 'gpu'; expected 'auto', 'cpu' or a CUDA device"),
        ({"batches_per_epoch": 0}, "batches_per_epoch is 0; expected"),
        ({"scope": "all"}, "scope is 'all'; expected 'global' or 'local'"),
    ],
)
def test_wrong_options_are_refused_at_once(
    table: gear.Table, tmp_path: Path, options: Any, message: str
) -> None:
    """Before there is a table: also of one that is only named, or made later."""
    for source in (table, "a-name", tmp_path / "file.hdf5", lambda: table):
        with pytest.raises(SchemaError, match=message):
            module(source, **options)


def test_what_does_not_fit_an_open_table_is_refused_at_once(table: gear.Table) -> None:
    with pytest.raises(SchemaError, match=r"Columns \['speed'\] were asked for; .* Unknown: \['speed'\]"):
        module(table, columns=["speed"])
    limiter = gear.SampleToInsertRatio(1.0, 2, 2)
    with make_table(LENGTHS[:2], rate_limiter=limiter) as limited:
        with pytest.raises(SchemaError, match="A batch of 800 rows does not fit"):
            module(limited, batch_size=800)
        module(limited, batch_size=800, rate_limited=False)
    with gear.distributed.Shards(table) as shards, pytest.raises(SchemaError, match="it is not a rank"):
        module(shards, num_workers=1)


def test_options_that_there_are_not(table: gear.Table) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        module(table, batchsize=3)
    with pytest.raises(SchemaError, match="table is 3; expected a Table, Shards, a table's name, the path"):
        module(3)


def test_loaders_before_setup(table: gear.Table) -> None:
    data = module(table)
    for loader in (data.train_dataloader, data.val_dataloader):
        with pytest.raises(
            SchemaError, match=r"dataloader\(\) was called before setup\(\), .* call it first"
        ):
            loader()


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_trajectories_to_set_any_aside(count: int) -> None:
    with make_table([5] * count) as table:
        message = (
            rf"val_fraction=0.1 sets none of the table's {count} trajectories aside for validation: it takes about one "
            r"in 10. Add trajectories, raise val_fraction, or give val_fraction=0"
        )
        with pytest.raises(TableEmptyError, match=message):
            trainer().fit(Model(), module(table, val_fraction=0.1))
        trainer(max_epochs=1).fit(Model(), module(table, val_fraction=0))


def test_too_few_trajectories_to_train_on() -> None:
    seed = next(seed for seed in range(1000) if Split(0.9, seed=seed, second=True)(np.arange(1)).all())
    message = (
        r"val_fraction=0.9 leaves none of the table's 1 trajectories for training. Add trajectories, or lower"
    )
    with make_table([5]) as table, pytest.raises(TableEmptyError, match=message):
        trainer().fit(Model(), module(table, val_fraction=0.9, split_seed=seed))


# ---------------------------------------------------------------- a few batches again and again


@pytest.mark.parametrize("workers", [0, 2])
def test_overfitting_repeats_the_same_batches(table: gear.Table, workers: int) -> None:
    model = Model()
    trainer(overfit_batches=2, max_epochs=3).fit(model, module(table, num_workers=workers))
    assert len(model.seen) == 6
    assert model.seen[0] != model.seen[1]
    assert model.seen[:2] == model.seen[2:4] == model.seen[4:]
    assert model.validated == [model.validated[0]] * 3
    assert len(model.validated[0]) == 2
    gc.collect()
    nothing_left(table)


def test_overfitting_on_a_share_and_without_validation(table: gear.Table) -> None:
    model = Model()
    trainer(overfit_batches=0.5, max_epochs=2).fit(model, module(table, val_fraction=0, batch_size=6))
    assert len(model.seen) == 10
    assert model.seen[:5] == model.seen[5:]


@pytest.mark.parametrize("stop", [1, 2, 4, 5])
def test_overfitting_is_resumed(table: gear.Table, tmp_path: Path, stop: int) -> None:
    whole, first, second = Model(), Model(), Model()
    trainer(overfit_batches=3, max_epochs=3).fit(whole, module(table))
    trainer(tmp_path, overfit_batches=3, max_epochs=3, max_steps=stop).fit(first, module(table))
    resumed = trainer(overfit_batches=3, max_epochs=3)
    resumed.fit(second, module(table), ckpt_path=tmp_path / f"step={stop}.ckpt")
    assert first.seen + second.seen == whole.seen


def test_all_options_of_the_dataset_pass_through(table: gear.Table) -> None:
    data = module(
        table,
        windows={"reward": WINDOW},
        anchor="last",
        seed=4,
        device="cpu",
        prefetch=1,
        copy=True,
        keep=3,
        drop_last=True,
        programs=2,
        selector=gear.Uniform(False),
        columns=["reward"],
    )
    data.setup()
    train, val = data.train_dataset, data.val_dataset
    assert train is not None
    assert val is not None
    assert (train.anchor, train.seed, train.prefetch, train.copy, train.keep) == ("last", 4, 1, True, 3)
    assert (train.drop_last, train.programs, list(train.windows)) == (True, 2, ["reward"])
    assert set(next(iter(data.train_dataloader()))) == {"reward", "mask", "index", "anchor", "generation"}
    assert (val.anchor, val.drop_last, repr(val.selector)) == (
        "uniform",
        False,
        "Uniform(replacement=False, unit='step')",
    )
    assert module(table, val_fraction=0).val_dataloader() == []
    nothing_left(table)


def test_columns_of_the_table(table: gear.Table) -> None:
    data = module(table)
    data.setup("fit")
    for loader in (data.train_dataloader(), *data.val_dataloader()):
        assert set(next(iter(loader))) == {*SCHEMA, "mask", "index", "anchor", "generation"}
        assert len(loader) == len(list(loader))


# ---------------------------------------------------------------- actors that begin later

README = Path(__file__).parents[2] / "README.md"
ACTOR = """
import sys, time, numpy as np, gear_loader as gear

class Steps:
    # The environment of one episode: it is done after 25 steps.
    left = 25
    def __bool__(self):
        self.left -= 1
        return self.left < 0

obs, action, reward = np.ones(11, np.float32), np.ones(3, np.float32), np.float32(1)
while True:
    done = Steps()
    exec(sys.argv[1])
    table.close()
"""


def readme_code(section: str) -> str:
    """The first Python block of a section of the README."""
    text = README.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    return text.partition("```python\n")[2].partition("```")[0]


@pytest.mark.parametrize("val_fraction", mostly_long([0, 0.1], 0))
def test_fit_waits_for_actors_that_begin_later(tmp_path: Path, val_fraction: float) -> None:
    """The README's own code; the actor's process is started when fit has begun."""
    name = f"actors-begin-later-{os.getpid()}"
    code = readme_code("Train while actors collect").replace('"replay"', repr(name))
    create, act, fit = code.split("\n\n")
    fit = fit.replace("val_fraction=0", f"val_fraction={val_fraction}")
    assert all(word in code for word in ("SampleToInsertRatio", "min_size=100", "val_fraction=0"))
    actors: list[subprocess.Popen[bytes]] = []

    class Learner(lightning.LightningModule):
        batches = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(11, 1)

        def on_fit_start(self) -> None:
            assert len(table) == 0
            actors.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", ACTOR, act]))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            assert batch["observation"].shape == (128, 20, 11)
            self.batches += 1
            return self.layer(batch["observation"]).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            assert batch["mask"].any()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    def made(callbacks: list[Callback]) -> lightning.Trainer:
        return trainer(None, *callbacks, max_steps=12, max_epochs=-1, num_sanity_val_steps=2)

    schema = {
        "observation": gear.Column(torch.float32, (11,)),
        "action": gear.Column(torch.float32, (3,)),
        "reward": gear.Column(torch.float32),
    }
    model = Learner()
    names: dict[str, Any] = {
        "gear": gear,
        "schema": schema,
        "model": model,
        "lightning": types.SimpleNamespace(Trainer=made),
    }
    exec(create, names)
    table = names["table"]
    try:
        exec(fit, names)
        assert model.batches == 12
        assert table.stats().num_inserted >= 100
    finally:
        for actor in actors:
            actor.kill()
            actor.wait()
        table.unlink()
        table.close()


def test_nothing_is_waited_for_beyond_the_deadline() -> None:
    options = {"rate_limiter": gear.MinSize(5), "timeout": 0.2}
    with make_table([3] * 4, **options) as table:
        for val_fraction in (0, 0.5):
            with pytest.raises(RateLimitError, match="MinSize\\(min_size=5\\) did not let 8 rows be sampled"):
                trainer().fit(Model(), module(table, val_fraction=val_fraction))
        table.add(episode(4, 3))
        trainer(max_steps=1).fit(Model(), module(table, val_fraction=0))


# ---------------------------------------------------------------- split

FRACTIONS = (0.01, 0.05, 0.07, 0.1, 0.2, 0.25, 1 / 3, 0.3, 0.5, 0.6, 0.9, 0.95, 0.999)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_split_is_disjoint_exact_and_stable_under_growth(fraction: float) -> None:
    train, val = Split(fraction, seed=3, second=False), Split(fraction, seed=3, second=True)
    whole = val(np.arange(5000))
    assert (whole != train(np.arange(5000))).all()
    count = np.cumsum(whole)
    assert (np.abs(count - fraction * np.arange(1, 5001)) <= 1 + 1e-9).all()
    for first, last in [(0, 0), (0, 1), (0, 17), (17, 18), (4000, 5000), (123, 4567)]:
        assert (val(np.arange(first, last)) == whole[first:last]).all()
    order = np.random.default_rng(0).permutation(5000)
    assert (val(order) == whole[order]).all()
    if 0.1 <= fraction <= 0.9:
        assert (Split(fraction, seed=4, second=True)(np.arange(5000)) != whole).any()


def test_the_split_is_random_within_each_stretch() -> None:
    # A periodic choice would be correlated with anything periodic in the data.
    members = np.flatnonzero(Split(0.1, seed=0, second=True)(np.arange(20_000)))
    assert (members // 10 == np.arange(2000)).all()
    observed = np.bincount(members % 10, minlength=10)
    assert ((observed - 200) ** 2 / 200).sum() < 33.7  # 9 degrees of freedom, significance 1e-4


def test_the_split_is_the_same_in_every_process() -> None:
    here = np.flatnonzero(Split(0.07, seed=-5, second=True)(np.arange(300))).tolist()
    assert here[:4] == [6, 27, 37, 55]


def test_a_million_trajectories_are_split_in_no_time() -> None:
    sequences = np.arange(1_000_000)
    start = time.process_time()
    count = int(Split(0.1, seed=0, second=True)(sequences).sum())
    assert time.process_time() - start < 2
    assert count == 100_000


def test_no_split() -> None:
    assert Split(0, seed=0, second=False)(np.arange(5)).tolist() == [True] * 5
    assert Split(0, seed=0, second=True)(np.arange(5)).tolist() == [False] * 5


def test_a_checkpoint_after_fit_with_a_table_by_name(tmp_path: Path) -> None:
    """By then the module has closed the table; the loader's state is the one that it had."""
    with named_table("saved-after-fit") as table:
        data = module(table.name, val_fraction=0, load_options={"timeout": 5})
        fitted = trainer(max_epochs=1)
        fitted.fit(Model(), data)
        fitted.save_checkpoint(tmp_path / "last.ckpt")
        assert data.table is None
