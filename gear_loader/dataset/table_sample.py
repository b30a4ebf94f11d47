"""`Table.sample`: batches from a table by a single call."""

from __future__ import annotations

from typing import Any

from gear_loader.collection.batches import Batch
from gear_loader.dataset.replay_dataset import ReplayDataset
from gear_loader.storage.schema import Window
from gear_loader.storage.table import Table


def sample(table: Table, batch_size: int, options: dict[str, Any]) -> Batch:
    """See `Table.sample`. The table keeps a dataset for each set of options, so that draws go on."""
    if options["windows"] is None:
        options["windows"] = Window(1, squeeze=True)
    kept = table._engine.sampled
    with kept.mutex:
        dataset = next((each for known, each in kept.datasets if known == options), None)
        if dataset is None:
            dataset = ReplayDataset(table, batch_size=batch_size, prefetch=0, **options)
            kept.datasets.append((dict(options), dataset))
        return dataset.sample(batch_size)
