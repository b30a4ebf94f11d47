"""The state of priorities by sequence numbers, checked before anything is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.selection.history import BatchKey, BatchRows, batches_of
from gear_loader.selection.selectors import Selector
from gear_loader.selection.weights import LARGEST_LEAF
from gear_loader.utils.arrays import Array

__all__ = ["PriorityState", "fits_leaves", "parse_state"]


@dataclasses.dataclass(frozen=True)
class PriorityState:
    """The priorities of a table's trajectories.

    Attributes:
        sequences, lengths: int64 [n], of the trajectories, ascending.
        leaves: float32, of all items, concatenated.
        blocks: int32, numbers of their blocks of leaves, concatenated; None if they are the table's blocks.
        maximum: largest priority so far. num_stale: stale rows that updates have skipped.
        policy: version of the policy that the leaves are as of; None for the current one.
        recent: rows of the last batches.
    """

    sequences: Array
    lengths: Array
    leaves: Array
    blocks: Array | None
    maximum: float
    num_stale: int
    policy: int | None
    recent: dict[BatchKey, BatchRows]


def fits_leaves(names: Array, lengths: Array, leaves: Array, counts: Array, maximum: float) -> bool:
    """Whether the parts of a state fit together.

    Args:
        names, lengths: int64 [n], of trajectories. leaves: float32, of all items. counts: int64 [n], items of each.
        maximum: largest priority.
    """
    if names.dtype != np.int64 or lengths.dtype != np.int64 or leaves.dtype != np.float32:
        return False
    if names.shape != lengths.shape or not names.ndim == leaves.ndim == 1:
        return False
    if len(leaves) != counts.sum() or not (lengths > 0).all():
        return False
    return bool(np.isfinite(leaves).all() and (leaves >= 0).all()) and 0 <= maximum <= LARGEST_LEAF


def parse_state(state: Mapping[str, Any], selector: Selector) -> PriorityState:
    """Check the state of a selection by priority.

    Raises:
        SchemaError: it is invalid.
    """
    try:
        sequences, lengths, leaves = (np.asarray(state[name]) for name in ("sequences", "lengths", "leaves"))
        counts = lengths if selector.unit == "step" else np.ones_like(lengths)
        maximum, num_stale = float(state["maximum"]), int(state["num_stale"])
        policy = int(state["policy"]) if "policy" in state else None
        fits = fits_leaves(sequences, lengths, leaves, counts, maximum)
        fits = fits and bool((np.diff(sequences) > 0).all()) and num_stale >= 0 and (policy or 0) >= 0
        blocks = np.asarray(state["blocks"]) if "blocks" in state else None
        if blocks is not None:
            taken = blocks[blocks >= 0]
            fits &= blocks.dtype == np.int32 and blocks.ndim == 1
            fits &= bool((blocks >= -1).all()) and len(np.unique(taken)) == len(taken)
        recent = batches_of(state["recent"], "sequences", weighs=selector.weighs)
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise SchemaError(
            "The state's priorities are invalid; expected a state_dict() of a ReplayDataset with the same selector. "
            "Nothing was changed."
        )
    return PriorityState(sequences, lengths, leaves, blocks, maximum, num_stale, policy, recent)
