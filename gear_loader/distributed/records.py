"""What travels with selection's exchange, and which rows of a batch belong to whom."""

from __future__ import annotations

import functools

import numpy as np

from gear_loader.utils.arrays import Array

__all__ = ["MOVE", "NAME", "PUBLISHED", "UPDATE", "record_dtype", "slice_rows"]

PUBLISHED = np.dtype(
    [
        ("mass", "<f8"),  # of all that may be drawn next: sum of leaves, or number of items
        ("least", "<f8"),  # smallest positive leaf, where weights need it
        (
            "batch_least",
            "<f8",
        ),  # smallest leaf among the rows that this shard has in the batch of this exchange
        (
            "emptied",
            "<i8",
        ),  # 1: it has nothing left to draw from, so that its rows of this batch fall to others
    ]
)
"""What a shard tells with each exchange: of what the next batch is drawn from, and of this one."""

UPDATE = np.dtype(
    [
        ("shard", "<i8"),
        ("slot", "<i8"),
        ("step", "<i8"),
        ("generation", "<i8"),  # -1: whatever is there
        ("when", "<i8"),  # draws after which it counts
        ("priority", "<f4"),
        ("turn", "<i4"),  # which call of its rank gave it: of all ranks' the last counts
    ]
)
"""A new priority for a row that another rank owns."""


NAME = np.dtype([("slot", "<i8"), ("generation", "<i8")])
"""How batches call a trajectory: as it is in the table of stage 0, which draws."""


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
"""A trajectory that has moved to another shard: where it was and is, in stage 0."""


@functools.cache
def record_dtype(blocks: int) -> np.dtype[np.void]:
    """A row of a batch as its owner describes it.

    Args:
        blocks: where rows are read one-sidedly: most blocks that a window touches; else 0.
    """
    fields: list[tuple[str, str] | tuple[str, str, tuple[int, ...]]] = [
        ("slot", "<i8"),
        ("step", "<i8"),
        ("generation", "<i8"),
        ("id", "<i8"),
        ("leaf", "<f8"),
        ("time", "<f8"),  # of candidates: when it would be drawn
    ]
    if blocks:
        fields += [("steps", "<i8"), ("low", "<i8"), ("blocks", "<i4", (blocks + blocks % 2,))]
    return np.dtype(fields)


def slice_rows(count: int, slices: int, number: int) -> Array:
    """Which of `count` rows slice `number` has, int64 [m].

    Slices differ by one row at most. If there are fewer rows than slices, some rows come in several.
    """
    if count < slices:
        return np.array([number % count], dtype=np.int64) if count else np.empty(0, dtype=np.int64)
    size, more = divmod(count, slices)
    first = number * size + min(number, more)
    return np.arange(first, first + size + (number < more))
