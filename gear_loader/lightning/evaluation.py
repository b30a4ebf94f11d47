"""The datasets of validation, test and prediction: passes over a table in a fixed order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gear_loader.collection.batches import Batch
from gear_loader.collection.windows import Whole
from gear_loader.dataset import ReplayDataset
from gear_loader.dataset.epoch_draws import EpochDraws
from gear_loader.dataset.options import Draws, Ranks
from gear_loader.dataset.transforming import evaluating
from gear_loader.distributed.shards import Shards
from gear_loader.selection.samplers import Fifo, Sampler, Uniform
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


class EvaluationDataset(ReplayDataset):
    """A dataset that repeats the same pass.

    Attributes:
        most: most batches of the pass on each rank; None for all.
    """

    most: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        self.set_epoch(0)
        return super().__iter__()

    def _epoch_draws(self) -> EpochDraws:
        draws = super()._epoch_draws()
        return draws if self.most is None else dataclasses.replace(draws, most=self.most)


def evaluation_dataset(
    source: Table | Shards,
    options: Mapping[str, Any],
    *,
    batch_size: int,
    subset: Callable[[Array], Array],
    most: int | None,
) -> EvaluationDataset:
    """A pass over all steps of a subset, or with whole trajectories over these, in a fixed random order.

    Args:
        source, options: as for `ReplayDataset`; options of the draw are replaced.
        batch_size, subset: of the pass.
        most: see `EvaluationDataset`.
    """
    sampler = Uniform(replacement=False, unit="trajectory" if _whole(options) else "step")
    draws = dataclasses.replace(options.get("draws", Draws()), subset=subset)
    return _pass(source, {**options, "draws": draws}, sampler, "uniform", batch_size, most)


def prediction_dataset(
    source: Table | Shards, options: Mapping[str, Any], *, batch_size: int
) -> EvaluationDataset:
    """A pass over all trajectories, oldest first: a row each at the anchor ``"first"`` or ``"last"``, else every step.

    Args:
        source, options, batch_size: as for `evaluation_dataset`.
    """
    anchor, sampler = options.get("draws", Draws()).anchor, options.get("sampler")
    by_step = (anchor == "uniform" and not _whole(options)) or (
        sampler is not None and sampler.unit == "step"
    )
    chosen = Fifo(replacement=False, unit="step" if by_step else "trajectory")
    return _pass(source, options, chosen, anchor, batch_size, None)


def _pass(
    source: Table | Shards,
    options: Mapping[str, Any],
    sampler: Sampler,
    anchor: Any,
    batch_size: int,
    most: int | None,
) -> EvaluationDataset:
    draws, told = (
        options.get("draws", Draws()),
        {"sample_info": False, "rate_limited": False, "drop_last": False},
    )
    replaced = {
        "draws": dataclasses.replace(draws, anchor=anchor, **told),
        "ranks": dataclasses.replace(
            options.get("ranks", Ranks()), scope="global", balance=None, micro_batches=1
        ),
        "batches_per_epoch": None,
        "sampler": sampler,
        "batch_size": batch_size,
        "transform": evaluating(options.get("transform")),
    }
    dataset = EvaluationDataset(source, **{**options, **replaced})
    dataset.most = most
    return dataset


def _whole(options: Mapping[str, Any]) -> bool:
    """Whether the windows are whole trajectories."""
    windows = options["windows"]
    each = windows.values() if isinstance(windows, Mapping) else [windows]
    return any(isinstance(window, Whole) for window in each)
