"""`ReplayDataModule`: training and validation batches of a table for Lightning's `Trainer`."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from gear_loader.collection.batches import Batch
from gear_loader.collection.windows import Whole, has_whole, windows_of
from gear_loader.dataset import ReplayDataset
from gear_loader.dataset.options import Draws, Gpu
from gear_loader.distributed.shards import Shards
from gear_loader.errors import SchemaError, SourceError
from gear_loader.lightning.evaluation import EvaluationDataset, evaluation_dataset, prediction_dataset
from gear_loader.lightning.validation_split import Split
from gear_loader.selection.step_budget import Steps
from gear_loader.storage.schema import Window
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least
from gear_loader.utils.paths import local_path

_FILES = (".hdf5", ".h5")


class ReplayDataLoader(DataLoader[Batch]):
    """The `DataLoader` of `ReplayDataModule`, with a state, so that Lightning resumes it."""

    def __init__(
        self,
        module: ReplayDataModule,
        dataset: ReplayDataset,
        *,
        num_workers: int,
        sampler: None = None,
        batch_sampler: None = None,
    ) -> None:
        # Lightning passes these two when it recreates the loader for `overfit_batches`; None for an IterableDataset.
        del sampler, batch_sampler
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=dataset.collate,
        )
        self._module = module

    def __iter__(self) -> Any:
        assert isinstance(self.dataset, ReplayDataset)
        if self._module._overfits():
            self.dataset.repeat_epoch()
        if self.num_workers:
            self.dataset.start_workers()
        iterator = super().__iter__()
        self._module._record_start()
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """The state of training; see `ReplayDataset.state_dict`."""
        state: dict[str, Any] = self._module.state_dict().get("train", {})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._module.load_state_dict({"train": state} if state else {})


class ReplayDataModule(LightningDataModule):
    """Data module for a table: ``Trainer.fit(model, ReplayDataModule(table, batch_size=..., windows=...))``.

    It yields the batches of a `ReplayDataset`, and saves the dataset's state in Lightning's checkpoints: a run that is
    stopped in the middle of an epoch and resumed gets the same batches as an uninterrupted run.

    With ``strategy="ddp"`` `Shards` must be made after the process group, so pass a function that makes them::

        def shards():
            rank = torch.distributed.get_rank()
            return Shards(Table.attach(f"replay-{rank}"))

        Trainer(strategy="ddp", devices=2).fit(model, ReplayDataModule(shards, batch_size=..., windows=...))

    If the table has a rate limiter, `fit` waits for it before it computes the length of an epoch, so actors may start
    after the trainer.

    Each rank gets its slice of each batch. The checkpoint, which Lightning saves on rank 0, has the state of all ranks.

    Args:
        table: a `Table` or `Shards`; the name of a table to attach to; the path of a D4RL-style file (.hdf5, .h5),
            which each process loads into a private table; or a function without arguments that returns a `Table` or
            `Shards`: each process calls it in `setup`, and closes the result in `teardown`.
        batch_size, windows: as for `ReplayDataset`.
        val_fraction: share of the trajectories for validation, which is a pass over all their steps in a fixed order;
            with `Shards` the ranks share the pass. 0 disables validation.
        val_batches: largest number of validation batches on each rank, the same ones each time; by default the whole
            pass.
        val_batch_size: rows of a batch on each rank in validation, test and prediction; `batch_size` by default. If
            that is `Steps`, validation and test need this option, and prediction has batches of 1 by default.
        split_seed: seed that chooses the validation trajectories.
        num_workers: workers of the `DataLoader`. 0 is fastest: batches are prefetched in the background anyway.
        load_options: for a path: options of `gear_loader.sources.load`; for a name: options of `Table.attach`.
        **options: other options of `ReplayDataset`, for training. `device` is the trainer's by default.

    Attributes:
        table: the table, from `setup` on; with `Shards` this rank's table.
        shards: the `Shards`, if given, from `setup` on.
        train_dataset, val_dataset: the datasets from `setup` on.
        test_dataset, predict_dataset: the datasets from `test_dataloader` and `predict_dataloader` on.

    Raises:
        SchemaError, TypeError: invalid options, including those of `ReplayDataset`; in `setup`: options that do not fit
            the opened table, and `Shards` that were made before the process group.
        SourceError, RegionError: in `prepare_data` or `setup`: the file or the table does not exist.
    """

    table: Table | None
    shards: Shards | None
    train_dataset: ReplayDataset | None
    val_dataset: ReplayDataset | None
    test_dataset: ReplayDataset | None
    predict_dataset: ReplayDataset | None

    def __init__(
        self,
        table: Table | Shards | str | os.PathLike[str] | Callable[[], Table | Shards],
        *,
        batch_size: int | Steps,
        windows: Window | Whole | Mapping[str, Any],
        val_fraction: float = 0.1,
        val_batches: int | None = None,
        val_batch_size: int | None = None,
        split_seed: int = 0,
        num_workers: int = 0,
        load_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        numbers = (int, float, np.integer, np.floating)
        if not isinstance(val_fraction, numbers) or not 0 <= val_fraction < 1:
            raise SchemaError(f"val_fraction is {shown(val_fraction)}; expected a share from 0 to below 1.")
        if isinstance(split_seed, bool) or not isinstance(split_seed, (int, np.integer)):
            raise SchemaError(f"split_seed is {shown(split_seed)}; expected an integer.")
        at_least("num_workers", num_workers, least=0)
        for name, value in (("val_batches", val_batches), ("val_batch_size", val_batch_size)):
            if value is not None:
                at_least(name, value)
        if load_options is not None and not isinstance(load_options, Mapping):
            raise SchemaError(f"load_options is {shown(load_options)}; expected a mapping of options.")
        if isinstance(options.get("draws"), Draws) and options["draws"].subset is not None:
            raise SchemaError(
                "subset was given; ReplayDataModule sets it. Use val_fraction, or ReplayDataset."
            )
        if val_fraction and options.get("groups") is not None:
            raise SchemaError(
                f"{options['groups']!r} was given with val_fraction={val_fraction}, which would split groups: it sets "
                "trajectories aside one by one, and a group without one of its trajectories is never drawn. Pass "
                "val_fraction=0, and a validation dataset of groups of another table."
            )
        if not isinstance(table, (Table, Shards, str, os.PathLike)) and not callable(table):
            raise SchemaError(
                f"table is {shown(table)}; expected a Table, Shards, a table's name, the path of an HDF5 file, or a "
                "function that returns a Table or Shards."
            )
        self._source = os.fspath(table) if isinstance(table, (str, os.PathLike)) else table
        if self._is_path():
            local_path(str(self._source), SchemaError, "table")
        self._options = {"batch_size": batch_size, "windows": windows, **options}
        self._val_fraction = val_fraction
        self._val_batches = val_batches
        self._val_batch_size = val_batch_size
        if val_batch_size is None and not isinstance(batch_size, Steps):
            self._val_batch_size = batch_size
        if self._val_batch_size is None and val_fraction:
            raise SchemaError(
                f"batch_size={batch_size!r} was given without val_batch_size; expected val_batch_size, the rows of a "
                "batch of "
                "validation, or val_fraction=0."
            )
        self._split_seed = int(split_seed)
        self._num_workers = num_workers
        self._load_options = dict(load_options or {})
        self._restored: Mapping[str, Any] | None = None
        # Start of the training loader's running iteration: epoch, step, the trainer's count of batches.
        self._start: tuple[int, int, int] | None = None
        self.table = None
        self.shards = None
        self.train_dataset = None
        self.val_dataset = self.test_dataset = self.predict_dataset = None
        self._check_options()

    def _check_options(self) -> None:
        """Validate the datasets' options, as far as possible before `setup`."""
        options = dict(self._options)
        device = options.get("device")
        if isinstance(device, torch.device) and device.type not in ("cpu", "cuda"):
            options["device"] = "cpu"  # as in `_device_options`
        ReplayDataset.check_options(**options)
        if not isinstance(self._source, (Table, Shards)):
            return
        table = self._source if isinstance(self._source, Table) else self._source.table
        windows_of(table.schema, options["windows"], options.get("columns"))
        if isinstance(self._source, Shards):
            self._check_workers()
        limiter = table.rules.rate_limiter
        size = options["batch_size"]
        if limiter is not None and not isinstance(size, Steps) and options.get("draws", Draws()).rate_limited:
            limiter.check_batch(size)

    # ---------------------------------------------------------------- Lightning's hooks

    def prepare_data(self) -> None:
        """Check, once per node, that the file to load exists."""
        if self._is_path() and not Path(str(self._source)).is_file():
            raise SourceError(
                f"There is no file {self._source!r}; expected a D4RL-style HDF5 file, or a table's name."
            )

    def setup(self, stage: str | None = None) -> None:
        """Open the table and make the datasets; idempotent."""
        if self.table is None:
            self._use_table(self._open())
        if self.train_dataset is None:
            self.train_dataset = self._training_dataset()
            self.val_dataset = self._held_out(self._val_batches) if self._val_fraction else None
            if self._restored is not None:
                self._load_train_state(self._restored)
                self._restored = None
        # Inapplicable advice: batches are prefetched without workers, and each worker yields its share of the length.
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")
        # With overfit_batches the loader itself repeats the epoch.
        warnings.filterwarnings("ignore", message="You requested to overfit but enabled")
        if not self._val_fraction:
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            warnings.filterwarnings("ignore", message="You passed in a `val_dataloader` but have no")

    def train_dataloader(self) -> ReplayDataLoader:
        """The training loader: `ReplayDataset` in a `DataLoader`.

        With the trainer's `overfit_batches` every epoch repeats epoch 0: the same batches, unless the table or the
        priorities change.

        Raises:
            SchemaError: `setup` has not been called.
        """
        if self.train_dataset is None:
            raise _not_set_up("train_dataloader")
        return ReplayDataLoader(self, self.train_dataset, num_workers=self._num_workers)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """The validation loader: a pass over all validation steps. An empty list if `val_fraction` is 0.

        With `val_batches` it ends after this number of batches.

        With `Shards` each rank gets its slice of every batch. Slices differ by one row at most; if the last batch has
        fewer rows than there are ranks, some ranks get the same row.

        Raises:
            SchemaError: `setup` has not been called; in `validate`: `val_fraction` is 0.
            RateLimitError: in `fit`: timed out waiting for the table's rate limiter.
        """
        if not self._val_fraction:
            if self.trainer is not None and self.trainer.state.fn == "validate":
                raise _nothing_held_out("validate")
            return []
        if self.train_dataset is None or self.val_dataset is None:
            raise _not_set_up("val_dataloader")
        if self.trainer is not None and self.trainer.state.fn == "fit":
            self.train_dataset._await_first()  # validation itself does not count for the rate limiter
        return [self._loader(self.val_dataset)]

    def test_dataloader(self) -> DataLoader[Batch]:
        """The loader of ``Trainer.test``: the whole pass over the validation steps, without the limit `val_batches`.

        Raises:
            SchemaError: `val_fraction` is 0, or `setup` has not been called.
        """
        if not self._val_fraction:
            raise _nothing_held_out("test")
        if self.train_dataset is None:
            raise _not_set_up("test_dataloader")
        if self.test_dataset is None:
            self.test_dataset = self._held_out(None)
        return self._loader(self.test_dataset)

    def predict_dataloader(self) -> DataLoader[Batch]:
        """The loader of ``Trainer.predict``: one pass over all trajectories, of training and validation, oldest first.

        With ``Draws(anchor="first")`` or ``"last"`` each trajectory is one row. Otherwise, and with a sampler of steps,
        each step is a row: step 0 of the oldest trajectory, its step 1, and so on. ``index`` and ``anchor`` identify a
        row. If there are not enough last batches for all ranks, some ranks repeat the first ones.

        Raises:
            SchemaError: `setup` has not been called.
        """
        if self.train_dataset is None:
            raise _not_set_up("predict_dataloader")
        if self.predict_dataset is None:
            self.predict_dataset = prediction_dataset(
                self._opened(),
                self._device_options(),
                batch_size=self._val_batch_size or 1,
            )
        return self._loader(self.predict_dataset)

    def state_dict(self) -> dict[str, Any]:
        """The state of training; see `ReplayDataset.state_dict`. With `Shards` all ranks call it at the same time, and
        that of rank 0, which the trainer saves, has the state of all of them."""
        if self.train_dataset is None:
            return {} if self._restored is None else {"train": dict(self._restored)}
        return {"train": self._train_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict`."""
        state = state_dict.get("train")
        if state is None:
            return
        if self.train_dataset is None:
            self._restored = state
        else:
            self._load_train_state(state)

    def teardown(self, stage: str | None = None) -> None:
        """Close the datasets over `Shards`, and what `setup` opened. A named table persists until it is removed.

        The next `setup` continues training where it was.
        """
        if self.table is None or isinstance(self._source, Table):
            return
        if self.train_dataset is not None:
            self._restored = self._train_state()
        for dataset in (self.train_dataset, self.val_dataset, self.test_dataset, self.predict_dataset):
            if dataset is not None and self.shards is not None:
                dataset.settle()  # finish requests of a broken-off iteration, as the other ranks do
                dataset.close()
        self.train_dataset = self.val_dataset = self.test_dataset = self.predict_dataset = None
        if isinstance(self._source, Shards):
            return
        if self.shards is not None:
            self.shards.close()
        self.table.close()
        self.table = self.shards = None

    def __repr__(self) -> str:
        if not hasattr(self, "val_dataset"):
            return "<ReplayDataModule, not opened>"
        opened = self.shards or self.table
        state = "" if opened is not None else ", opened in setup()"
        options = [f"{name}={value!r}" for name, value in self._options.items() if name != "windows"]
        lines = [
            f"<ReplayDataModule of {self._source if opened is None else opened!r}{state}",
            f"  {', '.join(options)}, val_fraction={self._val_fraction}",
        ]
        for part, dataset in (("train", self.train_dataset), ("validation", self.val_dataset)):
            if dataset is not None:
                epoch, before, step = dataset.position
                lines.append(f"  {part}: epoch {epoch}, {before + step:,} batches delivered")
        return "\n".join(lines) + ">"

    __str__ = __repr__  # Lightning's makes loaders, and waits for their lengths

    # ---------------------------------------------------------------- parts

    def _is_path(self) -> bool:
        return isinstance(self._source, str) and self._source.endswith(_FILES)

    def _open(self) -> Table | Shards:
        if isinstance(self._source, (Table, Shards)):
            return self._source
        if callable(self._source):
            return self._source()
        if self._is_path():
            from gear_loader import sources

            return sources.load(self._source, **self._load_options)
        return Table.attach(self._source, **self._load_options)

    def _use_table(self, opened: Table | Shards) -> None:
        """Validate and keep the result of `_open`."""
        if isinstance(opened, Shards):
            self._check_shards(opened)
            self.table, self.shards = opened.table, opened
        elif isinstance(opened, Table):
            self.table = opened
        else:
            raise SchemaError(
                f"The function that was given as table returned {shown(opened)}; expected a Table or Shards."
            )

    def _check_shards(self, shards: Shards) -> None:
        self._check_workers()
        ranks = torch.distributed.get_world_size() if _distributed() else 1
        if ranks > 1 and not shards.members:
            raise SchemaError(
                f"The Shards were made before torch.distributed was initialised, so they know {shards.num_shards} "
                f"shards of this process only; {ranks} processes train. Give ReplayDataModule a function that makes "
                "them: it is called in setup, when the process group exists."
            )

    def _check_workers(self) -> None:
        """Refuse workers for Shards."""
        if self._num_workers:
            raise SchemaError(
                f"num_workers is {self._num_workers}, but a DataLoader worker cannot draw from Shards: it is not a "
                "rank. Use num_workers=0: batches are prefetched in the background anyway."
            )

    def _opened(self) -> Table | Shards:
        source = self.table if self.shards is None else self.shards
        assert source is not None
        return source

    def _device_options(self) -> dict[str, Any]:
        """The options of the datasets, with the device of the trainer."""
        options = dict(self._options)
        device = options.get("device", "auto")
        if (device.device if isinstance(device, Gpu) else device) == "auto" and self.trainer is not None:
            root = self.trainer.strategy.root_device
            shared = isinstance(device, Gpu) and root.type in ("cpu", "cuda")
            options["device"] = dataclasses.replace(device, device=root) if shared else root
        if options.get("layout", "padded") != "padded" or has_whole(options.get("windows")):
            options["device"] = "cpu"  # which packs; Lightning moves the batch
        if isinstance(options.get("device"), torch.device) and options["device"].type not in ("cpu", "cuda"):
            options["device"] = "cpu"  # another kind of accelerator: Lightning moves the batch there
        return options

    def _training_dataset(self) -> ReplayDataset:
        options = self._device_options()
        if self._val_fraction:
            split = Split(self._val_fraction, seed=self._split_seed, second=False)
            options["draws"] = dataclasses.replace(options.get("draws", Draws()), subset=split)
        return ReplayDataset(self._opened(), **options)

    def _held_out(self, most: int | None) -> EvaluationDataset:
        """A pass over the validation steps, of at most `most` batches."""
        return evaluation_dataset(
            self._opened(),
            self._device_options(),
            batch_size=self._val_batch_size or 1,
            subset=Split(self._val_fraction, seed=self._split_seed, second=True),
            most=most,
        )

    def _loader(self, dataset: ReplayDataset) -> DataLoader[Batch]:
        return DataLoader(dataset, batch_size=None, num_workers=self._num_workers, collate_fn=dataset.collate)

    def _overfits(self) -> bool:
        """Whether the trainer repeats the same batches in every epoch."""
        return bool(getattr(self.trainer, "overfit_batches", 0) > 0)

    def _record_start(self) -> None:
        """Record the position and the trainer's count at the start of the training loader's iteration."""
        assert self.train_dataset is not None
        epoch, _, step = self.train_dataset.position
        self._start = (epoch, step, self._processed())

    def _processed(self) -> int:
        """Number of batches of the running epoch that the trainer has used."""
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        return int(progress.current.processed)

    def _train_state(self) -> dict[str, Any]:
        """The dataset's state by the trainer's count, because the trainer may have fetched a batch ahead."""
        assert self.train_dataset is not None
        state = self.train_dataset.state_dict()
        if self.trainer is None or self._start is None or self._start[0] != state["epoch"]:
            return state  # no iteration in this process, or the dataset has reached the end of the epoch
        epoch, step, before = self._start
        if self._processed() >= self.trainer.num_training_batches:
            past = state["past"] + int(self.trainer.num_training_batches)
            state.update(epoch=epoch + 1, step=0, past=past)
        else:
            state.update(step=step + self._processed() - before)
        return state

    def _load_train_state(self, state: Mapping[str, Any]) -> None:
        assert self.train_dataset is not None
        self.train_dataset.load_state_dict(state)
        self._start = None


def _not_set_up(what: str) -> SchemaError:
    return SchemaError(
        f"{what}() was called before setup(), which opens the table. A Trainer calls setup() itself; in a loop of your "
        "own call it first, or use ReplayDataset."
    )


def _nothing_held_out(what: str) -> SchemaError:
    return SchemaError(
        f"Trainer.{what} was called with a data module of val_fraction=0, which sets no trajectories aside. Make it "
        f"with a val_fraction, such as 0.1, or give Trainer.{what} a DataLoader(dataset, batch_size=None) of your own."
    )


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
