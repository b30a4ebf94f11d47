"""Record types of selection's exchange, and the slices of a batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from gear_loader.storage.selected_rows import Reach
from gear_loader.utils.arrays import Array

__all__ = [
    "MOVE",
    "SLOT_KEY",
    "SUMMARY",
    "UPDATE",
    "max_window_blocks",
    "record_dtype",
    "slice_rows",
]

SUMMARY = np.dtype(
    [
        ("mass", "<f8"),  # mass of the next draw: sum of the leaves, or number of items
        ("least", "<f8"),  # smallest positive leaf of the shard, where importance weights need it
        ("batch_least", "<f8"),  # smallest leaf among the shard's rows in the batch of this exchange
        ("emptied", "<i8"),  # 1: the shard is empty, and its rows of this batch are drawn from other shards
    ]
)
"""Shard summary: sent with each exchange, about the batch of the exchange and the next draw."""

UPDATE = np.dtype(
    [
        ("shard", "<i8"),
        ("slot", "<i8"),
        ("step", "<i8"),
        ("generation", "<i8"),  # -1: any generation
        ("draw", "<i8"),  # number of draws after which the update counts
        ("priority", "<f4"),
        ("order", "<i4"),  # number of the call on its rank: over all ranks the last call counts
    ]
)
"""Priority update of a row that another rank owns."""


SLOT_KEY = np.dtype([("slot", "<i8"), ("generation", "<i8")])
"""Key of a trajectory in batches: its slot and generation in the table of stage 0, which draws."""


MOVE = np.dtype(
    [
        ("id", "<i8"),
        ("length", "<i8"),
        ("old_shard", "<i8"),
        ("old_slot", "<i8"),
        ("old_generation", "<i8"),
        ("new_shard", "<i8"),
        ("new_slot", "<i8"),
        ("new_generation", "<i8"),
    ]
)
"""Migration of one trajectory to another shard: its old and new slot in stage 0."""


@functools.cache
def record_dtype(blocks: int, *, extents: bool = False) -> np.dtype[np.void]:
    """Return the type of a row record: a row of a batch as its owner describes it.

    Args:
        blocks: most blocks that a window touches, where rows are read one-sidedly; else 0.
        extents: whether records tell the extents of their trajectories without blocks, too: a cache and packed batches
            need them.
    """
    fields: list[tuple[str, str] | tuple[str, str, tuple[int, ...]]] = [
        ("slot", "<i8"),
        ("step", "<i8"),
        ("generation", "<i8"),
        ("id", "<i8"),
        ("leaf", "<f8"),
        ("time", "<f8"),  # of candidates: simulated time of the draw, by which shards are merged
    ]
    if blocks or extents:
        fields += [("steps", "<i8"), ("final", "<i8")]
    if blocks:
        fields += [("low", "<i8"), ("blocks", "<i4", (blocks + blocks % 2,))]
    return np.dtype(fields)


def max_window_blocks(reach: Reach, block_steps: Iterable[int]) -> int:
    """Return the most blocks that a row's windows need in any shard.

    Args:
        reach: of the windows; with `once`, one more block is the trajectory's first.
        block_steps: steps of a block in each shard.
    """
    first, last, once = reach
    return max((last - first) // steps + 2 + once for steps in block_steps)


def slice_rows(count: int, slices: int, number: int) -> Array:
    """Return the rows of a batch that belong to one slice, int64 [m].

    Slices differ by one row at most. If there are fewer rows than slices, some rows belong to several.

    Args:
        count: rows of the batch.
        slices: number of slices.
        number: number of the slice.
    """
    if count < slices:
        return np.array([number % count], dtype=np.int64) if count else np.empty(0, dtype=np.int64)
    size, more = divmod(count, slices)
    first = number * size + min(number, more)
    return np.arange(first, first + size + (number < more))
