"""Capacity report of a table, used by placement: free steps and the sum of priorities."""

from __future__ import annotations

import json

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table


def free_steps(table: Table) -> int:
    """Approximate number of steps that can be added without eviction. Takes no lock."""
    return table._engine.free_steps() if len(table) < table._engine.region.layout.max_trajectories else 0


def priority_sum(table: Table) -> float:
    """Approximate sum of the priorities that trajectories were added with. Takes no lock, reads every slot.

    A trajectory added without a priority counts as the largest one, and at least as 1.
    """
    given = (
        table._engine.reader()
        .arrays.priority[table._engine.reader().slot_states()[0] == READY]
        .astype(np.float64)
    )
    unset = given == UNSET
    largest = max(1.0, float(given[~unset].max(initial=0)))
    return float(given[~unset].sum() + largest * unset.sum())


def capacity_report(table: Table) -> bytes:
    """The capacity report of a table, serialized."""
    return json.dumps({"free_steps": free_steps(table), "priority_sum": priority_sum(table)}).encode()


def parse_capacity_report(data: bytes) -> tuple[int, float]:
    """Parse the capacity report of another node.

    Returns:
        `free_steps` and `priority_sum` of its table.

    Raises:
        TransportError: the report is invalid.
    """
    try:
        report = json.loads(data)
        free, total = int(report["free_steps"]), float(report["priority_sum"])
    except (KeyError, OverflowError, TypeError, ValueError):
        raise TransportError(
            f"A capacity report is {data[:100]!r}; expected free_steps and priority_sum. Run the same version of Gear "
            "Loader on all nodes."
        ) from None
    if free < 0 or not 0 <= total < float("inf"):
        raise TransportError(
            f"A capacity report has {free} free steps and a priority sum of {total}; expected numbers that are not "
            "negative. Run the same version of Gear Loader on all nodes."
        )
    return free, total
