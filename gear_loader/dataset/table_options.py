"""Checks of the options of `ReplayDataset` against its table or shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gear_loader.collection.windows import packed_span, reads_final
from gear_loader.dataset.options import Ranks
from gear_loader.dataset.position import MAX_WORKERS
from gear_loader.distributed.shards import Shards
from gear_loader.errors import PrivateTableError, SchemaError
from gear_loader.selection.grouping import Groups
from gear_loader.selection.selectors import Selector
from gear_loader.selection.step_budget import StepBudget, Steps
from gear_loader.storage.table import Table

__all__ = [
    "check_dealing",
    "check_freshness",
    "check_groups",
    "check_packed",
    "check_worker",
    "step_budget_of",
]


def check_freshness(selector: Selector, table: Table, *, is_global: bool) -> None:
    """Raise SchemaError if the selector asks for the freshness of versions that there are not.

    Args:
        is_global: batches are drawn over all shards.
    """
    fresh = selector.freshness < 1
    if fresh and (table.rules.version is None or is_global):
        raise SchemaError(
            f"{selector!r} was given; expected a Table created with version= for a freshness below 1, or Shards of "
            "such with scope='local'."
        )


def check_groups(groups: Groups | None, table: Table, *, is_global: bool, batch_size: int) -> None:
    """Raise SchemaError for groups that do not go with the table or the batch; is_global: drawn over all shards."""
    if groups is None:
        return
    groups.check_columns(table.schema)
    if is_global or table.rules.max_times_sampled is not None:
        raise SchemaError(
            f"{groups!r} was given with Shards and scope='global', or a table with max_times_sampled; expected a "
            "Table without, or Shards with Ranks('local'): groups lie in one table, and are drawn whole."
        )
    if batch_size % groups.size:
        raise SchemaError(
            f"batch_size is {batch_size} and the groups' size {groups.size}; expected a multiple of it: groups are "
            "drawn whole."
        )


def check_dealing(ranks: Ranks, steps: Steps | None, *, deals: bool) -> None:
    """Raise SchemaError for options that deal rows to ranks, where none are dealt.

    Args:
        steps: of a batch; None for a number of rows.
        deals: packed batches are drawn over all shards.
    """
    if (ranks.balance is not None or ranks.micro_batches > 1) and not deals:
        raise SchemaError(
            f"{ranks!r} was given; expected balance and micro_batches with Shards, scope='global' and "
            "layout='packed' or 'jagged': they deal the rows of a step to ranks."
        )
    if ranks.micro_batches > 1 and steps is None:
        raise SchemaError(
            f"{ranks!r} was given with a batch_size in rows; expected batch_size=Steps(...), whose batches are "
            "planned together, or accumulate gradients over batches."
        )


def check_packed(
    windows: Mapping[str, Any], layout: str, *, shards: Shards | None, scope: str, device: torch.device
) -> None:
    """Raise SchemaError if rows cannot be packed on this device, or from these shards."""
    if shards is not None and scope == "global" and shards.num_stages > 1:
        raise SchemaError(
            f"layout={layout!r} was given with Shards of {shards.num_stages} pipeline stages; expected one stage, "
            "or layout='padded': stages would not know each other's lengths."
        )
    if reads_final(windows) and (shards is not None or device.type == "cuda"):
        other = "Shards" if shards is not None else f"device={str(device)!r}"
        raise SchemaError(
            f"Whole(final=True) was given with {other}; expected "
            "a Table and device='cpu', where alone final steps are packed for now. Leave final out, or use those."
        )


def step_budget_of(
    table: Table, windows: Mapping[str, Any], steps: Steps | None, drop_last: bool
) -> StepBudget | None:
    """The options of packed batches that have a number of steps; None if they have a number of rows."""
    offset, length = packed_span(table.schema, windows)
    if steps is None:
        return None
    if table.rules.max_times_sampled is not None:
        raise SchemaError(
            f"{steps!r} was given with a table that has max_times_sampled, which removes a trajectory when it is "
            "drawn for the last time, and it may have to wait for its batch. Use a batch_size in rows, or a table "
            "without."
        )
    if drop_last:
        raise SchemaError(f"drop_last was given with {steps!r}, whose batches are seldom full; leave it out.")
    return StepBudget(steps.max_steps, steps.lookahead, steps.too_long, offset, length, reads_final(windows))


def check_worker(
    number: int, *, table: Table, shards: Shards | None, selector: Selector, device: torch.device
) -> None:
    """Raise an error if a `DataLoader` worker of this number cannot iterate."""
    if shards is not None:
        raise SchemaError(
            "A DataLoader worker cannot draw from Shards: it is not a rank. Use num_workers=0 (batches are "
            "prefetched in the background anyway)."
        )
    if selector.by_priority:
        raise SchemaError(
            f"A DataLoader worker cannot draw for {selector!r}: update_priority would not reach it. Use "
            "num_workers=0 (batches are prefetched in the background anyway)."
        )
    if table.name is None:
        raise PrivateTableError(
            "A DataLoader worker cannot read a private table. Create it with a name, "
            "Table.create(..., name='replay'), or use num_workers=0 (prefetch already works in the background)."
        )
    if device.type == "cuda":
        raise SchemaError(
            "A DataLoader worker cannot gather for a GPU. Use num_workers=0 (batches are prefetched on a side "
            "stream), or device='cpu' in the dataset."
        )
    if number >= MAX_WORKERS:
        raise SchemaError(f"There are more than {MAX_WORKERS} DataLoader workers; use fewer.")
