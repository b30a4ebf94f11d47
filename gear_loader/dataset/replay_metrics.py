"""`ReplayLogger`: a dataset's metrics, to TensorBoard, W&B and others, without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import torch

from gear_loader.dataset.replay_dataset import ReplayDataset
from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least, integer

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


class ReplayLogger:
    """Logs metrics of a training loop's replay: how full the table is, rates, waits, ages, priorities::

        log = gear.ReplayLogger(buffer, SummaryWriter())        # or wandb.init(...), or any function (metrics, step)
        for step in range(100_000):
            batch = buffer.sample()
            ...
            log(batch)

    Rates and means are those since the last log, at first since it was made. Rates count all processes that use the
    table:

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
    ``disk_trajectories``         of a table with a disk tier: trajectories that are on disk only
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

    Ages and numbers of draws are those of the batches that it was called with, and need ``Draws(sample_info=True)``;
    priorities need a sampler that draws by priority. Over `Shards` the metrics are those of all tables together, and
    all ranks call it, of which one or more have writers; priorities are those of the rank's shard.

    Between two logs nothing waits for a GPU. A log waits once, for ages and priorities.

    Args:
        source: a `ReplayDataset`, or what has one as its attribute `dataset`, such as a `ReplayBuffer`.
        writers: where metrics go: what has ``add_scalar(name, value, step)`` (TensorBoard), ``log_metrics(metrics,
            step=)`` (MLflow, Fabric's loggers) or ``log(metrics, step=)`` (W&B), or is a function ``(metrics, step)``.
        every_n_steps: calls between two logs.
        quantiles: shares of the priority quantiles: 0 is the smallest priority, 1 the largest.
        prefix: prefix of all names.

    Raises:
        SchemaError: an invalid option.
    """

    def __init__(
        self,
        source: Any,
        *writers: Any,
        every_n_steps: int = 50,
        quantiles: Sequence[float] = (0.1, 0.5, 0.9, 1.0),
        prefix: str = "replay/",
    ) -> None:
        if not isinstance(source, ReplayDataset) and not hasattr(source, "dataset"):
            raise SchemaError(f"source is {shown(source)}; expected a ReplayDataset, or a ReplayBuffer.")
        self._source, self._every = source, at_least("every_n_steps", every_n_steps)
        self._writers = [_writer(each) for each in writers]
        self._quantiles, self._prefix = check_quantiles(quantiles), prefix
        self._calls = 0
        self._metrics: ReplayMetrics | None = None
        self._begin()

    def __call__(self, batch: Any = None, step: int | None = None) -> dict[str, float] | None:
        """Count a batch; log every `every_n_steps` calls.

        Args:
            batch: as it was drawn; None for none.
            step: number of the step, for the writers; by default the number of calls before this one.

        Returns:
            The metrics by name, if this call logged them.

        Raises:
            SchemaError: a step that is no integer.
        """
        step = self._calls if step is None else integer("step", step)
        self._calls += 1
        metrics = self._metrics or self._begin()
        if metrics is None:
            return None
        metrics.add(batch)
        if metrics.batches < self._every:
            return None
        found = {f"{self._prefix}{name}": value for name, value in metrics.read().items()}
        for write in self._writers:
            write(found, step)
        return found

    def _begin(self) -> ReplayMetrics | None:
        """Read the first counters, if there is a dataset: a buffer has one from its first transition on."""
        dataset = self._source if isinstance(self._source, ReplayDataset) else self._source.dataset
        if dataset is not None:
            self._metrics = ReplayMetrics(dataset, self._quantiles)
        return self._metrics


class ReplayMetrics:
    """The metrics that `ReplayLogger` lists, of one interval after another.

    Args:
        dataset: what they are about. quantiles: as of `ReplayLogger`.

    Attributes:
        batches: number of batches since the last `read`.
    """

    def __init__(self, dataset: ReplayDataset, quantiles: Sequence[float]) -> None:
        self._dataset, self._shares = dataset, quantiles
        self._rows = 0  # rows of this rank's batches
        self._begin(monotonic(), self._totals(dataset))

    def add(self, batch: Any) -> None:
        """Count a batch. Does not wait for a GPU."""
        self.batches += 1
        if isinstance(batch, Mapping) and "sample_info" in batch:
            self._drawn.add(batch["sample_info"])
        if isinstance(batch, Mapping) and "index" in batch:
            self._rows += len(batch["index"])

    def _begin(self, now: float, totals: dict[str, float]) -> None:
        self._since, self._before = now, totals
        self.batches = 0
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
        if dataset.sampler.by_priority:
            mine["num_stale"] = dataset.num_stale
        if shards is None:
            return mine
        # Tables do not count draws of other ranks. Ranks of later stages get the same rows again.
        mine["num_sampled"] = self._rows if shards.place.stage == 0 else 0
        answers = shards.exchange.share(mine)
        return {name: sum(answer[name] for answer in answers) for name in mine}

    def read(self) -> dict[str, float]:
        """The metrics by name; starts the interval of the next log."""
        dataset = self._dataset
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
        if dataset.sampler.by_priority:
            quantiles = dataset.priority_quantiles(self._shares)
            for share, value in zip(self._shares, quantiles, strict=True):
                metrics[f"priority_q{100 * share:g}"] = value
            metrics["num_stale"] = totals["num_stale"]
        self._begin(now, totals)
        return metrics


def check_quantiles(quantiles: Any) -> list[float]:
    """Raise SchemaError unless they are numbers from 0 to 1."""
    shares = list(quantiles)
    if not all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in shares):
        raise SchemaError(f"quantiles is {quantiles!r}; expected numbers from 0 to 1.")
    return shares


def _writer(target: Any) -> Callable[[dict[str, float], int], Any]:
    """A function (metrics, step) that writes them there."""
    add_scalar = getattr(target, "add_scalar", None)
    if add_scalar is not None:

        def each(metrics: dict[str, float], step: int) -> None:
            for name, value in metrics.items():
                add_scalar(name, value, step)

        return each
    for name in ("log_metrics", "log"):
        log = getattr(target, name, None)
        if callable(log):
            return lambda metrics, step: log(metrics, step=step)
    if callable(target):
        return target  # type: ignore[no-any-return]
    raise SchemaError(
        f"{shown(target)} was received; expected what has add_scalar, log_metrics or log, such as TensorBoard's "
        "SummaryWriter or a run of W&B, or a function (metrics, step)."
    )


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
