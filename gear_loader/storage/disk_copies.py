"""Where a table's trajectories lie on disk, and what their copies there hold: the array `stored` of its index.

A row of `stored`, int64 [COPIES_WIDTH], is of a slot:

    MARK   2 * (sequence number + 1) + which of the two copies counts; 0 if there is none
    twice  SEGMENT, FIRST (row of the segment), PLACE (position in it), ROWS (2 * steps + final steps),
           FILLED (bits of the late columns)

The owner writes the copy that does not count, then the mark: one killed in between leaves the earlier copy, which is
still on disk. A copy says itself what it holds, so whoever lengthens a trajectory or fills a column of it does nothing
here: the copy is current (`are_current`) only while it has what the trajectory has.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.tier_counts import COPIES_WIDTH
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.storage.index_arrays import IndexArrays

__all__ = ["DiskCopies", "are_current", "copies_of", "note_copies"]

_MARK, _COPIES = 0, 1
_FIELDS = 5
assert _COPIES + 2 * _FIELDS == COPIES_WIDTH


@dataclasses.dataclass(frozen=True)
class DiskCopies:
    """Copies of trajectories on disk, int64 [n] each.

    Attributes:
        sequences: of the trajectories; -1 for a slot without a copy. segments, first, places: where each lies.
        lengths, finals: steps and final steps. filled: bits of the late columns that it has.
    """

    sequences: Array
    segments: Array
    first: Array
    places: Array
    lengths: Array
    finals: Array
    filled: Array

    def take(self, chosen: Array) -> DiskCopies:
        """Those at some positions, int64 [m]."""
        return DiskCopies(**{name: values[chosen] for name, values in vars(self).items()})

    def differ_from(self, others: DiskCopies) -> Array:
        """Whether each is another one than that of `others`, bool [n]."""
        found: Array = np.zeros(len(self.sequences), dtype=bool)
        for name, values in vars(self).items():
            found |= values != getattr(others, name)
        return found


def copies_of(arrays: IndexArrays, slots: Array) -> DiskCopies:
    """The copies that count, of slots (int64 [n]). The caller holds the lock, or compares them again under it."""
    rows = arrays.stored[slots]
    fields = rows[:, _COPIES:].reshape(-1, 2, _FIELDS)[np.arange(len(rows)), rows[:, _MARK] & 1]
    segments, first, places, sizes, filled = fields.T
    return DiskCopies((rows[:, _MARK] >> 1) - 1, segments, first, places, sizes >> 1, sizes & 1, filled)


def note_copies(arrays: IndexArrays, slots: Array, copies: DiskCopies) -> None:
    """Note copies of trajectories in distinct slots, int64 [n]. The caller holds the lock."""
    which = 1 - (arrays.stored[slots, _MARK] & 1)
    sizes = 2 * copies.lengths + copies.finals
    fields = np.stack((copies.segments, copies.first, copies.places, sizes, copies.filled), axis=1)
    arrays.stored[slots[:, None], _COPIES + _FIELDS * which[:, None] + np.arange(_FIELDS)] = fields
    arrays.stored[slots, _MARK] = 2 * (copies.sequences + 1) + which


def are_current(arrays: IndexArrays, slots: Array) -> Array:
    """Whether the copies of live trajectories (int64 [n]) have all that these have, bool [n].

    The caller holds the lock, or asks again under it.
    """
    copies, extent = copies_of(arrays, slots), arrays.extent[slots]
    current = copies.sequences == arrays.sequence[slots]
    current &= (copies.lengths == extent[:, 0]) & (copies.finals == extent[:, 2])
    found: Array = current & (copies.filled == filled_bits(arrays, slots))
    return found
