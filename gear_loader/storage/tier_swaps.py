"""Which trajectories move from the disk into memory, and which leave it."""

from __future__ import annotations

import numpy as np

from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.disk import Keep
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.layout import Layout
from gear_loader.storage.tier_counts import KEEP, KEEPS, unpack_priorities
from gear_loader.utils.arrays import Array

FREE_BYTES = 256 << 20
"""Bytes of blocks that are kept free, but at least a sixteenth of all blocks and at most a quarter."""

BAND = 16
"""Hysteresis: an item comes in when it belongs to the hottest that fill 15/16 of what the memory keeps, and leaves when
it does not belong to the hottest that fill all of it."""


def kept_free(layout: Layout, blocks: int) -> int:
    """Number of so many blocks that are free after moving trajectories out of them; it begins when fewer than half of
    them are."""
    return min(max(-(-FREE_BYTES // layout.block_bytes), blocks // 16), blocks // 4)


def missing_blocks(kept: int, blocks: int, free: int, wanted: int) -> int:
    """Number of blocks to take from trajectories; 0 while enough are free.

    Args:
        kept: as of `kept_free`. blocks, free: all blocks, and those that are free or will be. wanted: by writers.
    """
    if free >= max(kept // 2, wanted):
        return 0
    return max(kept, min(blocks, wanted + kept // 2)) - free


def coldness(keep: Keep, sequences: Array, priorities: Array) -> Array:
    """The order in which trajectories leave the memory, int64 [n]: positions, the coldest first.

    Args:
        keep: see `gear_loader.Disk`; ``"auto"`` is ``"newest"`` here.
        sequences: int64 [n], order of commitment. priorities: float32 [n], -1 for one without.
    """
    if keep == "priority":
        given = np.where(priorities == UNSET, np.float32(np.inf), priorities)
        return np.lexsort((sequences, given))
    return np.argsort(-sequences if keep == "oldest" else sequences, kind="stable")


def kept_now(arrays: IndexArrays, keep: Keep) -> Keep:
    """Which trajectories stay in memory now: ``"auto"`` goes by the dataset that was made last."""
    wished = int(arrays.tier_counts[KEEP])
    return KEEPS[wished - 1] if keep == "auto" and 0 < wished <= len(KEEPS) else keep


def coldest_first(
    arrays: IndexArrays, keep: Keep, slots: Array, sequences: Array, generations: Array
) -> Array:
    """`coldness` of trajectories, by their latest priorities; of all slots sequences and generations."""
    given = arrays.tier_priority[slots], generations[slots], arrays.priority[slots]
    return coldness(kept_now(arrays, keep), sequences[slots], unpack_priorities(*given))


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
