"""Which late columns of a trajectory are filled.

A trajectory has one bit for each late column, in the index. It is set after the bytes are written, under the lock: a
process that dies before leaves the column unfilled, and no reader reads the bytes of an unfilled column. The bits carry
the generation of the slot, so that those of an earlier trajectory in the slot do not count. Of tables with mutable
columns the bits above count the trajectory's edits, see `gear_loader.storage.edits`.
"""

from __future__ import annotations

import numpy as np

from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.utils.arrays import Array


def filled_bits(arrays: IndexArrays, slots: Array) -> Array:
    """Bits of the late columns that are filled, int64 [n], of the trajectories in `slots`, int64 [n].

    Takes no lock; the caller holds it, or reads the columns under a read ticket.
    """
    if not len(arrays.filled):
        return np.zeros(len(slots), dtype=np.int64)
    bits: Array = np.where(
        arrays.filled[slots, 0] == arrays.generation[slots], arrays.filled[slots, 1], np.int64(0)
    )
    return bits


def set_filled(arrays: IndexArrays, slots: Array, bits: Array | int) -> None:
    """Set bits of late columns, int64 [n] or one for all. The caller holds the lock and has written the bytes."""
    new = slots[arrays.filled[slots, 0] != arrays.generation[slots]]
    # In this order: bits of an earlier trajectory never count for this one.
    arrays.filled[new, 1] = 0
    arrays.filled[new, 0] = arrays.generation[new]
    arrays.filled[slots, 1] |= bits
