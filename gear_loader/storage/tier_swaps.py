"""Which trajectories move from the disk into memory, and which leave it for them."""

from __future__ import annotations

import numpy as np

from gear_loader.utils.arrays import Array

BAND = 16
"""Hysteresis: an item comes in when it belongs to the hottest that fill 15/16 of what the memory keeps, and leaves when
it does not belong to the hottest that fill all of it."""


def exchange(order: Array, inside: Array, sizes: Array, capacity: int, budget: int) -> tuple[Array, Array]:
    """Which items to bring into memory, and which to take out for them.

    Args:
        order: int64 [n], positions, the coldest first.
        inside: bool [n], which are in memory. sizes: int64 [n], of each.
        capacity: sum of the sizes in memory. budget: most of them that change places.

    Returns:
        Positions to bring in, the hottest first, and to take out, the coldest first; int64 each.
    """
    hot = order[::-1]
    before = np.cumsum(sizes[hot])
    come = hot[(before <= capacity - capacity // BAND) & ~inside[hot]]
    come = come[np.cumsum(sizes[come]) <= budget]
    cold = order[::-1][before > capacity][::-1]
    cold = cold[inside[cold]]
    free = capacity - int(sizes[inside].sum())
    ends = np.cumsum(sizes[cold])
    needed = int(sizes[come].sum()) - free
    leave = cold[: int(np.searchsorted(ends, needed)) + 1] if needed > 0 else cold[:0]
    # What does not find room stays where it is.
    come = come[np.cumsum(sizes[come]) <= max(0, free) + int(sizes[leave].sum())]
    return come, leave if len(come) else leave[:0]
