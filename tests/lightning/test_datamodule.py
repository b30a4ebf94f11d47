"""`ReplayDataModule` under Lightning's `Trainer`: stop and resume, the split, tables, names and files."""

from __future__ import annotations

import gc
import itertools
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import lightning
import numpy as np
import pytest
import torch
from cases import mostly_long, points
from dataset_common import drawn, episode, make_table, named_table, nothing_left, prefetch_threads
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning_ddp import IGNORED, SaveAt, quiet
from options_common import nested

import gear_loader as gear
from gear_loader import errors
from gear_loader.errors import SchemaError
from gear_loader.lightning.datamodule import ReplayDataModule
from gear_loader.lightning.validation_split import Split

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in IGNORED]

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
        return (error.square() * batch.get("mask", 1)).mean()

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated[-1].append(drawn([batch]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


def module(table: Any, **options: Any) -> ReplayDataModule:
    return ReplayDataModule(
        table, **nested({"batch_size": 8, "windows": WINDOW, "val_fraction": 0.2, **options})
    )


def trainer(folder: Path | None = None, *callbacks: Callback, **options: Any) -> lightning.Trainer:
    """A quiet trainer; with a folder, it keeps a checkpoint of every training step, ``step=7.ckpt``."""
    every: list[Callback] = []
    if folder is not None:
        every = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
    told = {"max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": folder is not None}
    return quiet(callbacks=[*every, *callbacks], **{**told, **options})


def fit(data: Any, run: Any = None, checkpoint: Path | None = None, **options: Any) -> Model:
    """A new model, trained on a data module; `options` of the trainer, or the trainer itself."""
    model = Model()
    (run or trainer(**options)).fit(model, data, ckpt_path=checkpoint)
    return model


def indices(batches: Any) -> set[int]:
    """All trajectories of batches."""
    return {index for index, _ in itertools.chain(*batches)}


# Stop and resume -------------------------------------------------------------------------------------

PACKED: dict[str, Any] = {
    "windows": gear.Whole(), "layout": "packed", "batch_size": None, "max_steps": 30, "lookahead": 2,
    "val_batch_size": 8, "batches_per_epoch": 9,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the data module and of the trainer
    "plain": ({}, {}),
    "trajectories once": ({"sampler": gear.Uniform(False)}, {}),
    "steps once": ({"sampler": gear.Uniform(False, "step"), "prefetch": 0, "batch_size": 32}, {}),
    "endless": ({"batches_per_epoch": math.inf}, {"max_steps": 14, "max_epochs": -1}),
    "limited": ({"sampler": gear.Uniform(False)}, {"limit_train_batches": 3}),
    "accumulated": ({"batches_per_epoch": 5}, {"accumulate_grad_batches": 2}),
    "no validation": ({"val_fraction": 0}, {}),
    "validation within": ({"batches_per_epoch": 6}, {"val_check_interval": 2}),
    "workers": ({"num_workers": 2, "sampler": gear.Uniform(False)}, {}),
    "packed": (PACKED, {}),
    "packed, workers": ({**PACKED, "num_workers": 2}, {}),
}


@pytest.mark.parametrize(
    "case", mostly_long(CASES, "limited", "accumulated", "validation within", "packed, workers")
)
@points(6, 0)
def test_resuming_from_the_checkpoint_of_every_step(
    table: gear.Table, tmp_path: Path, case: str, every: int
) -> None:
    options, settings = CASES[case]
    full = trainer(tmp_path, **settings)
    whole = fit(module(table, **options), full)
    epoch = int(full.num_training_batches) if case != "endless" else len(whole.seen)
    assert len({tuple(rows) for rows in whole.seen}) == len(whole.seen)
    accumulated = settings.get("accumulate_grad_batches", 1)
    steps: Any = range(1, full.global_step)[::every]
    if case.endswith("workers"):  # each resumption starts four processes
        steps = (1, epoch, epoch + 2) if every == 1 else (epoch + 2,)
    for step in steps:
        resumed = fit(module(table, **options), checkpoint=tmp_path / f"step={step}.ckpt", **settings)
        per_epoch = -(-5 // accumulated)  # the last step of an epoch takes what is left of it
        taken = step if accumulated == 1 else step // per_epoch * 5 + step % per_epoch * accumulated
        assert resumed.seen == whole.seen[taken:], f"from step {step}"
        assert resumed.validated == whole.validated[len(whole.validated) - len(resumed.validated) :]
    gc.collect()
    nothing_left(table)


@pytest.mark.parametrize(
    ("hook", "step", "workers"),
    [
        ("on_fit_start", 0, 0),
        ("on_train_epoch_start", 0, 0),  # of a later epoch Lightning resumes without training that epoch
        ("on_train_batch_start", 3, 0),
        pytest.param("on_train_batch_start", 3, 2, marks=pytest.mark.long),
        ("on_train_batch_end", 6, 0),
        ("on_validation_start", 2, 0),
        pytest.param("on_validation_end", 2, 2, marks=pytest.mark.long),
        ("on_validation_end", 6, 0),
        ("on_train_epoch_end", 6, 0),
    ],
)
def test_saving_in_any_hook(table: gear.Table, tmp_path: Path, hook: str, step: int, workers: int) -> None:
    options = {"batches_per_epoch": 6, "num_workers": workers}
    settings = {"max_epochs": 2, "val_check_interval": 2}
    by_hand = tmp_path / "by hand"
    whole = fit(module(table, **options), trainer(None, SaveAt(by_hand, hook, step), **settings))
    assert fit(module(table, **options), checkpoint=by_hand, **settings).seen == whole.seen[step:]


def test_training_on_after_the_last_epoch(table: gear.Table, tmp_path: Path) -> None:
    whole, finished = fit(module(table)), trainer(tmp_path, max_epochs=2)
    first = fit(module(table), finished)
    finished.save_checkpoint(tmp_path / "last")
    for name in ("last", f"step={finished.global_step}.ckpt"):
        assert first.seen + fit(module(table), checkpoint=tmp_path / name).seen == whole.seen


@pytest.mark.filterwarnings("ignore:`.fit\\(ckpt_path=None\\)` was called without a model")
@pytest.mark.filterwarnings('ignore:.fit\\(ckpt_path="last"\\) is set, but there is no last checkpoint')
@pytest.mark.parametrize("fail_at", mostly_long([0, 5, 7], 0, 7))
def test_resuming_after_an_exception(table: gear.Table, tmp_path: Path, fail_at: int) -> None:
    options = {"batches_per_epoch": 5}
    whole, failing = fit(module(table, **options)), Model(fail_at)
    rescue = OnExceptionCheckpoint(tmp_path, filename="rescue")
    with pytest.raises(FloatingPointError, match="in the middle of training"):
        trainer(tmp_path, rescue).fit(failing, module(table, **options))
    gc.collect()
    nothing_left(table)
    for name in ["rescue.ckpt"] + ([f"step={fail_at}.ckpt"] if fail_at else []):
        resumed = fit(module(table, **options), checkpoint=tmp_path / name)
        assert failing.seen + resumed.seen == whole.seen, name


def test_the_state_by_itself(table: gear.Table) -> None:
    whole = fit(module(table, batches_per_epoch=5), max_epochs=2)
    data = module(table, batches_per_epoch=5)
    assert data.state_dict() == {}
    fit(data, max_epochs=-1, max_steps=3)
    state = json.loads(json.dumps(data.state_dict()))
    assert (state["train"]["epoch"], state["train"]["step"]) == (0, 3)
    # Without the trainer's checkpoint: its own count starts at 0, the data goes on.
    other = module(table, batches_per_epoch=5)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert fit(other, max_epochs=-1, max_steps=1).seen == whole.seen[3:4]
    assert other.state_dict()["train"]["step"] == 4
    strange = module(table, seed=9)
    strange.setup()
    with pytest.raises(SchemaError, match=r"other options \(saved, here\): {'seed': \(0, 9\)}"):
        strange.load_state_dict(state)


def test_a_checkpoint_after_fit_with_a_table_by_name(table: gear.Table, tmp_path: Path) -> None:
    """By then the module has closed the table; the loader's state is the one that it had."""
    options = {"val_fraction": 0, "batches_per_epoch": math.inf, "prefetch": 3}
    data = module(table.name, load_options={"timeout": 5}, **options)
    fitted = trainer(max_steps=3, max_epochs=-1)
    before = set(threading.enumerate())
    fit(data, fitted)
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    assert data.table is None
    gc.collect()
    assert prefetch_threads() == []
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"gear-loader-0"}  # the crew


# Loops -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_passes_over_every_step_of_its_part_in_the_same_order(
    table: gear.Table, workers: int
) -> None:
    model = fit(module(table, val_batch_size=7, num_workers=workers), max_epochs=2)
    assert len(model.validated) == 2
    assert model.validated[0] == model.validated[1]
    rows = list(itertools.chain(*model.validated[0]))
    part = Split(0.2, seed=0, second=True)(np.arange(len(LENGTHS)))
    members = zip(table.indices()[part].tolist(), table.lengths()[part].tolist(), strict=True)
    assert sorted(rows) == sorted((index, step) for index, length in members for step in range(length))
    assert rows != sorted(rows)
    assert {len(batch) for batch in model.validated[0][:-1]} == {7}
    assert not {index for index, _ in rows} & indices(model.seen)


def test_validation_without_training_and_as_a_trial_before_it(table: gear.Table) -> None:
    model, run, data, plain = Model(), trainer(), module(table), fit(module(table))
    for _ in range(2):
        run.validate(model, data, verbose=False)
    assert model.validated[0] == model.validated[1] == plain.validated[0]
    checked = fit(module(table), num_sanity_val_steps=2)
    assert checked.seen == plain.seen
    assert checked.validated[0] == checked.validated[1][:2]


def test_training_sees_the_batches_of_the_dataset(table: gear.Table) -> None:
    options: dict[str, Any] = {"batch_size": 8, "windows": WINDOW, "sampler": gear.Uniform(False), "seed": 4}
    model = fit(module(table, **options), max_epochs=2)
    subset = Split(0.2, seed=0, second=False)
    data = gear.ReplayDataset(table, **nested({**options, "subset": subset, "device": "cpu"}))
    assert model.seen == [drawn([batch]) for _ in range(2) for batch in data]
    assert len(model.seen) == 2 * len(data)


@pytest.mark.parametrize("workers", mostly_long([0, 2], 0))
def test_overfitting_repeats_the_same_batches_and_is_resumed(
    table: gear.Table, tmp_path: Path, workers: int
) -> None:
    model = fit(module(table, num_workers=workers), trainer(tmp_path, overfit_batches=2))
    assert len(model.seen) == 6
    assert model.seen[0] != model.seen[1]
    assert model.seen[:2] == model.seen[2:4] == model.seen[4:]
    assert model.validated == [model.validated[0]] * 3
    assert len(model.validated[0]) == 2
    for step in (1, 4):
        path = tmp_path / f"step={step}.ckpt"
        resumed = fit(module(table, num_workers=workers), checkpoint=path, overfit_batches=2)
        assert resumed.seen == model.seen[step:]
    gc.collect()
    nothing_left(table)
    share = fit(module(table, val_fraction=0, batch_size=6), overfit_batches=0.5, max_epochs=2)
    assert len(share.seen) == 10
    assert share.seen[:5] == share.seen[5:]


# Tables, names, files --------------------------------------------------------------------------------


def test_a_table_is_left_open_and_one_that_a_name_opened_is_closed(table: gear.Table) -> None:
    given, data, by_name = module(table), module(table.name), Model()
    by_table = fit(given, max_epochs=2)
    assert given.table is table
    given.teardown("fit")
    for _ in range(2):  # trained on with the same data module, it attaches again and goes on
        trainer(max_epochs=1).fit(by_name, data)
        assert data.table is data.train_dataset is None
    assert by_name.seen == by_table.seen
    assert len(table) == len(LENGTHS)
    data.setup()
    opened = data.table
    assert opened is not None
    data.setup()
    assert data.table is opened
    for _ in range(2):
        data.teardown()
    assert "closed" in repr(opened)


def write_file(path: Path) -> Path:
    ends = np.zeros(sum(LENGTHS), dtype=bool)
    ends[np.cumsum(LENGTHS) - 1] = True
    rows = np.concatenate([episode(i, length)["observation"] for i, length in enumerate(LENGTHS)])
    columns = {"observations": rows, "actions": rows[:, :2], "rewards": rows[:, 2]}
    with h5py.File(path, "w") as file:
        for name, values in {**columns, "terminals": ends, "timeouts": np.zeros_like(ends)}.items():
            file[name] = values
    return path


def test_a_file_is_loaded_with_options_closed_and_resumed(table: gear.Table, tmp_path: Path) -> None:
    by_table = fit(module(table), max_epochs=1)
    for path in (write_file(tmp_path / "episodes.hdf5"), str(write_file(tmp_path / "episodes.h5"))):
        data = module(path, load_options={"progress": False})
        by_file = fit(data, max_epochs=1)
        assert (by_file.seen, by_file.validated) == (by_table.seen, by_table.validated)
        assert data.table is None
    run, options = tmp_path / "run", {"load_options": {"progress": False, "max_trajectories": 30}}
    whole = fit(module(path, **options), trainer(run, max_epochs=2))
    assert fit(module(path, **options), checkpoint=run / "step=3.ckpt", max_epochs=2).seen == whole.seen[3:]
    assert max(indices(whole.seen)) < 30


def test_what_is_not_there(table: gear.Table, tmp_path: Path) -> None:
    data = module(tmp_path / "nothing.h5")
    message = r"There is no file '.*nothing\.h5'; expected a D4RL-style HDF5 file, or a table's name"
    for use in (data.prepare_data, lambda: fit(data)):
        with pytest.raises(errors.SourceError, match=message):
            use()
    with pytest.raises(errors.SourceError):
        data.setup()
    data = module("test-datamodule-missing")
    data.prepare_data()
    with pytest.raises(errors.RegionError, match="There is no table named 'test-datamodule-missing'"):
        data.setup()
    assert data.table is None
    data.teardown()
    data, message = module(table), r"dataloader\(\) was called before setup\(\), .* call it first"
    for loader in (data.train_dataloader, data.val_dataloader):
        with pytest.raises(SchemaError, match=message):
            loader()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, r"val_fraction is 1\.0; expected a share from 0 to below 1"),
        ({"val_fraction": -0.1}, r"val_fraction is -0\.1; expected a share from 0 to below 1"),
        ({"val_fraction": math.nan}, r"val_fraction is nan; expected a share from 0 to below 1"),
        ({"val_fraction": "0.1"}, r"val_fraction is '0\.1'; expected a share from 0 to below 1"),
        ({"subset": len}, "subset was given; ReplayDataModule sets it. Use val_fraction, or ReplayDataset"),
        ({"groups": gear.Groups("reward", 2)}, "val_fraction=0.2, which would split groups"),
        ({"split_seed": 0.5}, r"split_seed is 0\.5; expected an integer"),
        ({"num_workers": -1}, "num_workers is -1; expected an integer of at least 0"),
        ({"load_options": 3}, "load_options is 3; expected a mapping of options"),
        ({"val_batch_size": 0}, "val_batch_size is 0; expected an integer of at least 1"),
        ({"batch_size": 0}, "batch_size is 0; expected an integer of at least 1"),  # the dataset's own
        ({"windows": {"reward": 4}}, "The window of column 'reward' is 4; expected"),
        ({"sampler": "prioritized"}, "sampler is 'prioritized'; expected an object such as"),
    ],
)
def test_wrong_options_are_refused_at_once(
    table: gear.Table, tmp_path: Path, options: Any, message: str
) -> None:
    for source in (table, "a-name", tmp_path / "file.hdf5", lambda: table):
        with pytest.raises(SchemaError, match=message):
            module(source, **options)


def test_what_does_not_fit_an_open_table_is_refused_at_once(table: gear.Table) -> None:
    with pytest.raises(SchemaError, match=r"Columns \['speed'\] were asked for; .* Unknown: \['speed'\]"):
        module(table, columns=["speed"])
    with pytest.raises(TypeError, match=r"Options of ReplayDataset: .* argument 'batchsize'"):
        module(table, batchsize=3)
    with pytest.raises(SchemaError, match="table is 3; expected a Table, Shards, a table's name, the path"):
        module(3)
    limiter = gear.SampleToInsertRatio(1.0, 2, 2)
    with make_table(LENGTHS[:2], rate_limiter=limiter) as limited:
        with pytest.raises(SchemaError, match="A batch of 800 rows does not fit"):
            module(limited, batch_size=800)
        module(limited, batch_size=800, rate_limited=False)
    with gear.distributed.Shards(table) as shards, pytest.raises(SchemaError, match="it is not a rank"):
        module(shards, num_workers=1)


def test_too_few_trajectories_for_a_part() -> None:
    seed = next(seed for seed in range(1000) if Split(0.9, seed=seed, second=True)(np.arange(1)).all())
    aside = (
        "val_fraction=0.1 sets none of the table's 3 trajectories aside for validation: it takes about one "
        "in 10. Add trajectories, raise val_fraction, or give val_fraction=0"
    )
    leaves = (
        "val_fraction=0.9 leaves none of the table's 1 trajectories for training. Add trajectories, or lower"
    )
    for count, part, message in ((3, {"val_fraction": 0.1}, aside), (1, {"val_fraction": 0.9}, leaves)):
        with make_table([5] * count) as table:
            with pytest.raises(errors.TableEmptyError, match=message):
                fit(module(table, **part, split_seed=0 if count == 3 else seed))
            fit(module(table, val_fraction=0), max_epochs=1)


def test_all_options_of_the_dataset_pass_through(table: gear.Table) -> None:
    options = {"anchor": "last", "seed": 4, "device": "cpu", "prefetch": 1, "copy": True, "keep": 3}
    options |= {"drop_last": True, "programs": 2, "sampler": gear.Uniform(False), "columns": ["reward"]}
    data = module(table, windows={"reward": WINDOW}, **options)
    data.setup()
    train, val = data.train_dataset, data.val_dataset
    assert train is not None
    assert val is not None
    assert (train.anchor, train.seed, train.prefetch, train.copy, train.keep) == ("last", 4, 1, True, 3)
    assert (train.drop_last, train.programs, list(train.windows)) == (True, 2, ["reward"])
    assert set(next(iter(data.train_dataloader()))) == {"reward", "mask", "index", "anchor", "generation"}
    assert (val.anchor, val.drop_last) == ("uniform", False)
    assert repr(val.sampler) == "Uniform(replacement=False, unit='step')"
    (loader,) = data.val_dataloader()
    assert len(loader) == len(list(loader))
    assert module(table, val_fraction=0).val_dataloader() == []
    nothing_left(table)


@pytest.mark.parametrize("val_fraction", [0, 0.5])
def test_fit_waits_for_a_writer_that_begins_later(val_fraction: float) -> None:
    options = {"rate_limiter": gear.MinSize(20), "timeout": 30, "max_trajectories": 40, "max_steps": 200}
    with make_table([], **options) as table:

        class Begun(Model):
            def on_fit_start(self) -> None:
                assert len(table) == 0
                work = lambda: [table.add(episode(number, 3)) for number in range(40)]  # noqa: E731
                self.writer = threading.Thread(target=work)
                self.writer.start()

        model = Begun()
        trainer(max_steps=2, num_sanity_val_steps=2).fit(model, module(table, val_fraction=val_fraction))
        model.writer.join()
        assert len(model.seen) == 2
        assert table.stats().num_inserted == 40


def test_nothing_is_waited_for_beyond_the_deadline() -> None:
    message = "MinSize\\(min_size=5\\) did not let 8 rows be sampled"
    with make_table([3] * 4, rate_limiter=gear.MinSize(5), timeout=0.2) as table:
        for val_fraction in (0, 0.5):
            with pytest.raises(errors.RateLimitError, match=message):
                fit(module(table, val_fraction=val_fraction))
        table.add(episode(4, 3))
        fit(module(table, val_fraction=0), max_steps=1)


# The split -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.01, 0.07, 0.1, 1 / 3, 0.5, 0.9, 0.999])
def test_the_split_is_disjoint_exact_and_stable_under_growth(fraction: float) -> None:
    train, val = Split(fraction, seed=3, second=False), Split(fraction, seed=3, second=True)
    whole = val(np.arange(5000))
    assert (whole != train(np.arange(5000))).all()
    assert (np.abs(np.cumsum(whole) - fraction * np.arange(1, 5001)) <= 1 + 1e-9).all()
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


def test_the_split_is_the_same_in_every_process_and_may_be_left_out() -> None:
    here = np.flatnonzero(Split(0.07, seed=-5, second=True)(np.arange(300))).tolist()
    assert here[:4] == [6, 27, 37, 55]
    assert Split(0, seed=0, second=False)(np.arange(5)).all()
    assert not Split(0, seed=0, second=True)(np.arange(5)).any()
