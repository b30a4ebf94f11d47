"""`ReplayMonitor`: logs a table's fill, insert and sample rates, and the ages and priorities of drawn items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gear_loader.dataset import ReplayDataset
from gear_loader.errors import SchemaError
from gear_loader.utils.checks import at_least

_COUNTS = (  # of `TableStats`
    "num_trajectories",
    "num_steps",
    "blocks_in_use",
    "num_blocks",
    "num_inserted",
    "num_sampled",
    "num_evicted",
    "num_expired",
    "insert_wait",
    "sample_wait",
    "num_spilled",
    "num_hits",
    "num_misses",
    "miss_bytes",
    "miss_seconds",
)
_LIMITS = ("max_trajectories", "max_steps")  # of `Layout`
_DRAWN = ("age", "age_seconds", "times_sampled")  # of a batch's sample_info


class ReplayMonitor(Callback):
    """Logs metrics of a replay table to all loggers of the trainer, from its first process.

    ``Trainer(callbacks=[ReplayMonitor()]).fit(model, ReplayDataModule(...))``. Names begin with `prefix`; rates and
    means are those since the last log, at first since training began. Rates count all processes that use the table:

    ============================= ===================================================================================
    ``fill_trajectories``         number of trajectories as a share of `max_trajectories`
    ``fill_steps``                number of steps as a share of `max_steps`
    ``fill_blocks``               share of all blocks in use
    ``fill_batches``              with `Steps`: see `ReplayDataset.batch_fill`
    ``insert_rate``               trajectories added per second
    ``sample_rate``               rows drawn per second
    ``samples_per_insert``        rows drawn per trajectory added; omitted if no trajectory was added
    ``evict_rate``                trajectories evicted per second
    ``expire_rate``               trajectories per second removed for their age or number of draws
    ``insert_wait``               seconds per second that writers waited: 1 is one writer that only waited, or two that
                                  waited half of the time. A wait counts when it has ended.
    ``sample_wait``               seconds per second that samplers waited for the rate limiter
    ``disk_trajectories``         of a table with a disk tier: trajectories that lie on disk only
    ``disk_hits``                 share of the rows that were in memory; omitted if none was drawn
    ``disk_read_bytes``           bytes read from disk per second
    ``disk_wait``                 seconds per second during which batches were read from disk
    ``age_mean``, ``age_max``     number of trajectories added after a drawn one
    ``age_seconds_mean``,         seconds since a drawn trajectory was added
    ``age_seconds_max``
    ``times_sampled_mean``        number of draws of a drawn trajectory
    ``priority_q10``, ...         quantiles of the priorities, see `ReplayDataset.priority_quantiles`
    ``num_stale``                 stale rows that `ReplayDataset.update_priority` has skipped so far
    ============================= ===================================================================================

    Ages and numbers of draws are those of this process's batches, and need ``Draws(sample_info=True)``; priorities need
    a selector that draws by priority. Without a logger, and with the trainer's `fast_dev_run`, it does nothing.

    Over `Shards` the metrics are those of all tables together, rows drawn are those of the batches that all ranks have
    trained on, and priorities are those of the first rank's shard. All ranks must have the callback, because a log is a
    small exchange between them.

    Between two logs nothing waits for a GPU: ages are summed on their device. A log reads them, and the priorities,
    once, which waits for the GPU.

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
        shares = list(quantiles)
        if not all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in shares):
            raise SchemaError(f"quantiles is {quantiles!r}; expected numbers from 0 to 1.")
        self._given = dataset
        self._every = at_least("every_n_steps", every_n_steps)
        self._shares = shares
        self._prefix = prefix
        self._dataset: ReplayDataset | None = None  # while training, on ranks that take part in logs
        self._rows = 0  # rows of this rank's batches

    # ---------------------------------------------------------------- Lightning's hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the first counters, if there is a logger."""
        tried_out = getattr(trainer, "fast_dev_run", False)
        if not trainer.loggers or tried_out:
            return
        found = self._dataset_to_log(trainer) if trainer.is_global_zero else self._candidate(trainer)
        if trainer.is_global_zero or (isinstance(found, ReplayDataset) and found.shards is not None):
            self._dataset, self._rows = found, 0
            self._begin(monotonic(), self._totals(self._dataset))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; log every `every_n_steps` batches."""
        if self._dataset is None:
            return
        self._batches += 1
        if isinstance(batch, Mapping) and "sample_info" in batch:
            self._drawn.add(batch["sample_info"])
        if isinstance(batch, Mapping) and "index" in batch:
            self._rows += len(batch["index"])
        if self._batches < self._every:
            return
        metrics = {f"{self._prefix}{name}": value for name, value in self._metrics(self._dataset).items()}
        if not trainer.is_global_zero:
            return
        # The step of Lightning's own logs; `global_step` counts the steps of each optimizer.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the reference to the dataset."""
        self._dataset = None

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

    def _begin(self, now: float, totals: dict[str, float]) -> None:
        self._since, self._before = now, totals
        self._batches = 0
        self._drawn = _DrawStatistics()

    def _totals(self, dataset: ReplayDataset) -> dict[str, float]:
        """Current sizes and counters, summed over all tables."""
        shards = dataset.shards
        mine = dict.fromkeys((*_COUNTS, *_LIMITS, "num_stale"), 0.0)
        for table in [dataset.table] if shards is None else shards.own.values():
            stats, layout = table.stats(), table._engine.region.layout
            for name in _COUNTS:
                mine[name] += getattr(stats, name)
            for name in _LIMITS:
                mine[name] += getattr(layout, name)
        if dataset.selector.by_priority:
            mine["num_stale"] = dataset.num_stale
        if shards is None:
            return mine
        # Tables do not count draws of other ranks. Ranks of later stages get the same rows again.
        mine["num_sampled"] = self._rows if shards.place.stage == 0 else 0
        answers = shards.exchange.share(mine)
        return {name: sum(answer[name] for answer in answers) for name in mine}

    def _metrics(self, dataset: ReplayDataset) -> dict[str, float]:
        """The metrics by name; starts the interval of the next log."""
        now, totals = monotonic(), self._totals(dataset)
        seconds, before = max(now - self._since, 1e-9), self._before
        since = {name: totals[name] - before[name] for name in _COUNTS}
        inserted, sampled = since["num_inserted"], since["num_sampled"]
        metrics = {
            "fill_trajectories": totals["num_trajectories"] / totals["max_trajectories"],
            "fill_steps": totals["num_steps"] / totals["max_steps"],
            "fill_blocks": totals["blocks_in_use"] / totals["num_blocks"],
            "insert_rate": inserted / seconds,
            "sample_rate": sampled / seconds,
            "evict_rate": since["num_evicted"] / seconds,
            "expire_rate": since["num_expired"] / seconds,
            "insert_wait": since["insert_wait"] / seconds,
            "sample_wait": since["sample_wait"] / seconds,
        }
        if dataset.batch_fill is not None:
            metrics["fill_batches"] = dataset.batch_fill
        own = [dataset.table] if dataset.shards is None else dataset.shards.own.values()
        if any(table._engine.has_tier for table in own):
            metrics["disk_trajectories"] = totals["num_spilled"]
            metrics["disk_read_bytes"] = since["miss_bytes"] / seconds
            metrics["disk_wait"] = since["miss_seconds"] / seconds
            if rows := since["num_hits"] + since["num_misses"]:
                metrics["disk_hits"] = since["num_hits"] / rows
        if inserted:
            metrics["samples_per_insert"] = sampled / inserted
        metrics.update(self._drawn.read())
        if dataset.selector.by_priority:
            quantiles = dataset.priority_quantiles(self._shares)
            for share, value in zip(self._shares, quantiles, strict=True):
                metrics[f"priority_q{100 * share:g}"] = value
            metrics["num_stale"] = totals["num_stale"]
        self._begin(now, totals)
        return metrics


class _DrawStatistics:
    """Means and maxima over the rows of several batches, accumulated on their device."""

    def __init__(self) -> None:
        self._rows = 0
        self._sums: torch.Tensor | None = None  # float32 [3], as `_DRAWN`
        self._largest: torch.Tensor | None = None

    def add(self, info: Mapping[str, torch.Tensor]) -> None:
        """Add the rows of a batch's ``sample_info``. Does not wait for a GPU."""
        values = torch.stack([info[name].to(torch.float32) for name in _DRAWN])  # [3, B]
        sums, largest = values.sum(dim=1), values.amax(dim=1)
        self._rows += values.shape[1]
        self._sums = sums if self._sums is None else self._sums + sums
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def read(self) -> dict[str, float]:
        """The metrics by name; empty without rows. Waits for the GPU."""
        if self._sums is None or self._largest is None:
            return {}
        means, largest = torch.stack((self._sums / self._rows, self._largest)).tolist()
        return {
            "age_mean": means[0],
            "age_max": largest[0],
            "age_seconds_mean": means[1],
            "age_seconds_max": largest[1],
            "times_sampled_mean": means[2],
        }
