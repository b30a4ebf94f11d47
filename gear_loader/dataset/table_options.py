"""Checks of the options of `ReplayDataset` against its table or shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gear_loader.collection.windows import packed_span, reads_final
from gear_loader.dataset.position import MAX_WORKERS
from gear_loader.distributed.packed_collector import check_packed_shards
from gear_loader.distributed.shards import Shards
from gear_loader.errors import PrivateTableError, SchemaError
from gear_loader.selection.grouping import Grouping
from gear_loader.selection.prioritized import needs_priorities
from gear_loader.selection.selectors import Selector
from gear_loader.selection.step_budget import StepBudget, TooLong
from gear_loader.storage.table import Table

__all__ = [
    "check_dealing",
    "check_freshness",
    "check_packed",
    "check_worker",
    "grouping_of",
    "step_budget_of",
]


def check_freshness(selector: Selector, table: Table, *, is_global: bool) -> None:
    """Raise SchemaError if the selector asks for the freshness of versions that there are not.

    Args:
        is_global: batches are drawn over all shards.
    """
    fresh = getattr(selector, "freshness", 1.0) < 1
    if fresh and (table.rules.version is None or is_global):
        raise SchemaError(
            f"{selector!r} was given; expected a Table created with version= for a freshness below 1, or Shards of "
            "such with scope='local'."
        )


def grouping_of(
    table: Table,
    column: Any,
    size: Any,
    priority: Any,
    varies: Any,
    max_age: float | None,
    *,
    is_global: bool,
    batch_size: int,
) -> Grouping | None:
    """The options of groups; None without groups. is_global: batches are drawn over all shards."""
    if column is None:
        return None
    grouping = Grouping.of(table.schema, column, size, priority, varies, max_age)
    if is_global or table.rules.max_times_sampled is not None:
        raise SchemaError(
            f"group={column!r} was given with Shards and scope='global', or a table with max_times_sampled; expected a "
            "Table without, or Shards with scope='local': groups lie in one table, and are drawn whole."
        )
    if batch_size % grouping.size:
        raise SchemaError(
            f"batch_size is {batch_size} and group_size {grouping.size}; expected a multiple of it: groups are drawn "
            "whole."
        )
    return grouping


def check_dealing(balance: Any, micro_batches: int, *, deals: bool, max_steps: int | None) -> None:
    """Raise SchemaError for options that deal rows to ranks, where none are dealt.

    Args:
        deals: packed batches are drawn over all shards.
    """
    if (balance is not None or micro_batches > 1) and not deals:
        raise SchemaError(
            f"balance={balance!r} and micro_batches={micro_batches} were given; expected both with "
            "Shards, scope='global' and layout='packed' or 'jagged': they deal the rows of a step to ranks."
        )
    if micro_batches > 1 and max_steps is None:
        raise SchemaError(
            f"micro_batches={micro_batches} was given with batch_size; expected max_steps, whose batches are "
            "planned together, or accumulate gradients over batches."
        )


def check_packed(
    windows: Mapping[str, Any], layout: str, *, shards: Shards | None, scope: str, device: torch.device
) -> None:
    """Raise SchemaError if rows cannot be packed on this device, or from these shards."""
    if shards is not None and scope == "global":
        check_packed_shards(shards, layout)
    if reads_final(windows) and (shards is not None or device.type == "cuda"):
        other = "Shards" if shards is not None else f"device={str(device)!r}"
        raise SchemaError(
            f"Whole(final=True) was given with {other}; expected "
            "a Table and device='cpu', where alone final steps are packed for now. Leave final out, or use those."
        )


def step_budget_of(
    table: Table,
    windows: Mapping[str, Any],
    max_steps: int | None,
    lookahead: int,
    too_long: TooLong,
    drop_last: bool,
) -> StepBudget | None:
    """The options of packed batches that have a number of steps; None if they have a number of rows."""
    offset, length = packed_span(table.schema, windows)
    if max_steps is None:
        return None
    if table.rules.max_times_sampled is not None:
        raise SchemaError(
            "max_steps was given with a table that has max_times_sampled, which removes a trajectory when it is "
            "drawn for the last time, and it may have to wait for its batch. Use batch_size, or a table without."
        )
    if drop_last:
        raise SchemaError("drop_last was given with max_steps, whose batches are seldom full; leave it out.")
    return StepBudget(int(max_steps), int(lookahead), too_long, offset, length, reads_final(windows))


def check_worker(
    number: int, *, table: Table, shards: Shards | None, selector: Selector, device: torch.device
) -> None:
    """Raise an error if a `DataLoader` worker of this number cannot iterate."""
    if shards is not None:
        raise SchemaError(
            "A DataLoader worker cannot draw from Shards: it is not a rank. Use num_workers=0 (batches are "
            "prefetched in the background anyway)."
        )
    if needs_priorities(selector):
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
