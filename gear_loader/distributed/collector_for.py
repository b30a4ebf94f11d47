"""Which collector gathers a dataset's batches: into host or GPU memory, from one table or all shards, packed or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gear_loader.collection.collector import Collector
from gear_loader.collection.packed import PackedCollector
from gear_loader.collection.packed_cuda import CudaPackedCollector
from gear_loader.distributed.collector import ShardCollector
from gear_loader.distributed.collector_cuda import CudaShardCollector
from gear_loader.distributed.packed_collector import ShardPackedCollector
from gear_loader.distributed.packed_cuda import CudaShardPackedCollector, StagedShardPackedCollector
from gear_loader.distributed.shards import Shards
from gear_loader.selection.selectors import Selector
from gear_loader.storage.table import Table

__all__ = ["collector_for"]


def collector_for(
    table: Table,
    windows: Mapping[str, Any],
    *,
    batch_size: int,
    device: torch.device,
    selector: Selector,
    shards: Shards | None,
    packed: bool,
    informs: bool,
    programs: int | None,
    stream_priority: int,
) -> Collector:
    """Make a collector of a dataset.

    Args:
        table: of this process.
        windows: column -> window, as the dataset has them.
        batch_size: most rows of a batch, if it has a number of rows.
        device: of the batches.
        selector: of the dataset: what batches carry, and what has to be pinned, depends on it.
        shards: None if batches come from one table.
        packed: rows are gathered one after another.
        informs: batches carry ``sample_info``.
        programs, stream_priority: as for `ReplayDataset`.
    """
    made: Collector
    options: dict[str, Any] = {"batch_size": batch_size, "device": device, "programs": programs}
    if packed and device.type != "cuda":
        if shards is not None:
            return ShardPackedCollector(shards, windows, weighs=selector.weighs)
        return PackedCollector(table, windows, weighs=selector.weighs, informs=informs)
    if packed:
        del options["batch_size"]
        if shards is not None:
            packs = CudaShardPackedCollector if shards.pin(device) else StagedShardPackedCollector
            made = packs(shards, windows, weighs=selector.weighs, **options)
        else:
            made = CudaPackedCollector(table, windows, weighs=selector.weighs, informs=informs, **options)
    elif shards is not None:
        zero_copy = device.type == "cuda" and shards.pin(device)
        kind = CudaShardCollector if zero_copy else ShardCollector
        made = kind(shards, windows, weighs=selector.weighs, **options)
    else:
        if device.type == "cuda" and selector.by_priority:
            table._engine.region.pin(device)  # draws read it too, so it cannot be pinned during the iteration
        made = Collector(table, windows, weighs=selector.weighs, informs=informs, **options)
    made.stream_priority = stream_priority
    return made
