"""`ReplayMonitor`: logs a table's fill, insert and sample rates, and the ages and priorities of drawn items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gear_loader.dataset import ReplayDataset
from gear_loader.dataset.replay_metrics import ReplayMetrics, check_quantiles
from gear_loader.errors import SchemaError
from gear_loader.utils.checks import at_least


class ReplayMonitor(Callback):
    """Callback that logs metrics of a replay table to all loggers of the trainer, on rank 0.

    ``Trainer(callbacks=[ReplayMonitor()]).fit(model, ReplayDataModule(...))``. The metrics are those of `ReplayLogger`;
    rates and means cover the time since the last log (at first since training began).

    Ages and numbers of draws are of this process's batches, and need ``Draws(sample_info=True)``; priorities need a
    sampler that draws by priority. Without a logger, and with the trainer's `fast_dev_run`, the callback does nothing.

    With `Shards` the metrics cover all tables together, the rows drawn are those of the batches that all ranks have
    trained on, and priorities are of the first rank's shard. All ranks must have the callback, because each log is a
    small exchange between them.

    Between two logs nothing waits for a GPU: ages are summed on their device. A log waits for the GPU once, to read
    them and the priorities.

    Args:
        dataset: dataset to monitor; by default `train_dataset` of the trainer's data module, a `ReplayDataModule` or
            similar.
        every_n_steps: training batches between two logs; the trainer's `log_every_n_steps` has no effect.
        quantiles: shares of the priority quantiles: 0 is the smallest priority, 1 the largest.
        prefix: prefix of all names.

    Raises:
        SchemaError: invalid options; when training starts: no dataset to monitor.
    """

    def __init__(
        self,
        dataset: ReplayDataset | None = None,
        *,
        every_n_steps: int = 50,
        quantiles: Sequence[float] = (0.1, 0.5, 0.9, 1.0),
        prefix: str = "replay/",
    ) -> None:
        if dataset is not None and not isinstance(dataset, ReplayDataset):
            raise SchemaError(f"dataset is a {type(dataset).__name__}; expected a ReplayDataset or None.")
        self._given = dataset
        self._every = at_least("every_n_steps", every_n_steps)
        self._shares = check_quantiles(quantiles)
        self._prefix = prefix
        self._metrics: ReplayMetrics | None = None  # while training, on ranks that take part in logs

    # ---------------------------------------------------------------- Lightning's hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the first counters, if there is a logger."""
        tried_out = getattr(trainer, "fast_dev_run", False)
        if not trainer.loggers or tried_out:
            return
        found = self._dataset_to_log(trainer) if trainer.is_global_zero else self._candidate(trainer)
        if trainer.is_global_zero or (isinstance(found, ReplayDataset) and found.shards is not None):
            self._metrics = ReplayMetrics(found, self._shares)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; log every `every_n_steps` batches."""
        if self._metrics is None:
            return
        self._metrics.add(batch)
        if self._metrics.batches < self._every:
            return
        metrics = {f"{self._prefix}{name}": value for name, value in self._metrics.read().items()}
        if not trainer.is_global_zero:
            return
        # The step of Lightning's own logs; `global_step` counts the steps of each optimizer.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the reference to the dataset."""
        self._metrics = None

    # ---------------------------------------------------------------- parts

    def _candidate(self, trainer: Trainer) -> Any:
        if self._given is not None:
            return self._given
        return getattr(getattr(trainer, "datamodule", None), "train_dataset", None)

    def _dataset_to_log(self, trainer: Trainer) -> ReplayDataset:
        found = self._candidate(trainer)
        if not isinstance(found, ReplayDataset):
            raise SchemaError(
                "ReplayMonitor found no dataset: the trainer has no data module whose train_dataset is a "
                "ReplayDataset. Give it one, ReplayMonitor(dataset), or train from a ReplayDataModule."
            )
        return found
