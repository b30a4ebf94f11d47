"""Checks of the options of `ReplayDataset` against its table or shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gear_loader.collection.windows import (
    expand,
    has_whole,
    packed_span,
    ragged_of,
    reads_final,
    timed_of,
)
from gear_loader.errors import SchemaError
from gear_loader.selection.grouping import Groups
from gear_loader.selection.step_budget import StepBudget, Steps
from gear_loader.storage.table import Table


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


def check_final(windows: Mapping[str, Any], *, shards: Any, device: torch.device) -> None:
    """Raise SchemaError if final steps cannot be packed from these shards, or on this device."""
    if reads_final(windows) and (shards is not None or device.type == "cuda"):
        other = "Shards" if shards is not None else f"device={str(device)!r}"
        raise SchemaError(
            f"Whole(final=True) was given with {other}; expected "
            "a Table and device='cpu', where alone final steps are packed for now. Leave final out, or use those."
        )


def check_ragged(table: Table, dataset: Any) -> None:
    """Raise SchemaError if a dataset that reads ragged columns has options that they do not go with."""
    windows = {**expand(table.schema, dataset.windows)[0], **timed_of(dataset.windows)}
    found = ragged_of(table.schema, windows)
    names = [name for name, values in found.items() if values.coded is None or not values.coded.fixed]
    padded = dataset.layout == "padded" and has_whole(dataset.windows)
    if not names or not (padded or dataset.layout == "jagged" or dataset.output == "tensordict"):
        return
    raise SchemaError(
        f"The windows {names} read ragged columns, with layout={dataset.layout!r} and output="
        f"{dataset.output!r}; expected layout='packed', or 'padded' with gear_loader.Window, and output 'dict' "
        "or 'nested'."
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
