"""`Table.sample`: batches from a table by a single call."""

from __future__ import annotations

from typing import Any

from gear_loader.collection.batches import Batch
from gear_loader.dataset.replay_dataset import ReplayDataset
from gear_loader.storage.engine import Sampled
from gear_loader.storage.schema import Window


def sample(table: Any, batch_size: int, options: dict[str, Any], kept: Sampled) -> Batch:
    """See `Table.sample`; `table` may be that of a server. Of it `kept` has a dataset for each set of options, so that
    draws go on."""
    if options["windows"] is None:
        options["windows"] = Window(1, squeeze=True)
    with kept.mutex:
        dataset = next((each for known, each in kept.datasets if known == options), None)
        if dataset is None:
            dataset = ReplayDataset(table, batch_size=batch_size, prefetch=0, **options)
            kept.datasets.append((dict(options), dataset))
        return dataset.sample(batch_size)
