"""Which selection draws a dataset's batches: on the host or a GPU, from one table, one shard, or all shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gear_loader.collection.windows import reach_of
from gear_loader.distributed.global_selection import GlobalSelection
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.shards import Shards
from gear_loader.selection.base import Selection, SelectionContext, ShardShare
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.prioritized_cuda import CudaPrioritizedSelection
from gear_loader.selection.snapshot_selection import SnapshotSelection
from gear_loader.storage.schema import Window
from gear_loader.utils.arrays import Array
from gear_loader.utils.notices import notice

__all__ = ["selection_for"]


def selection_for(
    context: SelectionContext,
    *,
    history: int,
    device: torch.device,
    windows: Mapping[str, Window],
    shards: Shards | None,
    exchange: SingleProcess | None,
    packed: bool = False,
    deal: Callable[[Array], Array] | None = None,
    shared: bool = False,
) -> Selection:
    """Make the selection of a dataset.

    Args:
        context: selector, table, and the options that they go with.
        history: batches whose rows a state keeps, because they may have been drawn ahead of it.
        device: of the batches.
        windows: column -> window.
        shards: None for a single table.
        exchange: of this dataset, where all shards are drawn from; else None.
        packed, deal: as for `GlobalSelection`.
        shared: whether other ranks draw from the table, too.
    """
    if shards is not None and exchange is not None:
        # Records carry the blocks of windows that are read one-sidedly. Those of packed rows, which may be of any
        # length, are looked up by the reader.
        one_sided = shards.transport == "nixl" and shards.remote and not packed
        reach = reach_of(context.table.schema, windows) if one_sided else None
        options: dict[str, Any] = {"history": history, "reach": reach, "packed": packed, "deal": deal}
        return GlobalSelection(context, shards, exchange, **options)
    if not context.selector.by_priority:
        return SnapshotSelection(context)
    alone = shards is None and context.grouping is None
    if (
        alone
        and device.type == "cuda"
        and context.table._engine.region.pin(device)
        and not _host_draws(context, shared)
    ):
        return CudaPrioritizedSelection(context, history=history, device=device)
    selection = PrioritizedSelection(context, history=history)
    selection.share = None if shards is None else ShardShare()
    return selection


def _host_draws(context: SelectionContext, shared: bool) -> bool:
    """Whether the host has to know, batch by batch, what was drawn or updated."""
    needs = context.counts or context.waits or context.selector.freshness < 1
    needs |= shared and context.selector.unit == "trajectory"
    if (
        not needs
        and context.table.rules.on_full != "evict_lowest_priority"
        and not context.table._engine.has_tier
    ):
        return False
    notice(
        "host-draws",
        f"{context.selector!r} is drawn on the host, because sample_info, max_times_sampled, late columns, "
        "max_lag, freshness, on_full='evict_lowest_priority', a disk tier or other ranks of the same named table need "
        "to know what is drawn or updated: the GPU only gathers.",
    )
    return True
