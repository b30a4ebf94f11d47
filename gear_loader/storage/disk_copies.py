"""Where a table's trajectories lie on disk, and what their copies there hold: the array `stored` of its index.

A row of `stored`, int64 [COPIES_WIDTH], of a table with prefixes [SHARED_WIDTH], is of a slot:

    MARK   2 * (sequence number + 1) + which of the two copies counts; 0 if there is none
    twice  SEGMENT, FIRST (row of the segment), PLACE (position in it), ROWS (2 * steps + final steps),
           FILLED (bits of the late columns); with prefixes also number of the first steps that lie elsewhere, their
           segment and first row; segment of the values per group, and the place there

The owner writes the copy that does not count, then the mark: one killed in between leaves the earlier copy, which is
still on disk. A copy says itself what it holds, so whoever lengthens a trajectory or fills a column of it does nothing
here: the copy is current (`are_current`) only while it has what the trajectory has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.tier_counts import COPIES_WIDTH, SHARED_WIDTH
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.storage.index_arrays import IndexArrays

_MARK, _COPIES = 0, 1
_SHARED = ("begin_rows", "begin_segment", "begin_first", "group_segment", "group_place")
_FIELDS = 5
assert COPIES_WIDTH == _COPIES + 2 * _FIELDS
assert _COPIES + 2 * (_FIELDS + len(_SHARED)) == SHARED_WIDTH


COPY = np.dtype(
    [
        (name, "<i8")
        for name in ("sequence", "segment", "first", "place", "length", "final", "filled", *_SHARED)
    ]
)
"""A trajectory's copy on disk: its number, -1 for a slot without a copy; where it lies; steps, final steps and bits of
the late columns that it has; where the steps and values lie that it shares, as records of a checkpoint say it."""


def copies_of(arrays: IndexArrays, slots: Array) -> Array:
    """The copies that count, `COPY` [n], of slots (int64 [n]). The caller holds the lock, or asks again under it."""
    rows = arrays.stored[slots]
    width = (rows.shape[1] - _COPIES) // 2
    fields = rows[:, _COPIES:].reshape(-1, 2, width)[np.arange(len(rows)), rows[:, _MARK] & 1]
    copies: Array = np.empty(len(rows), dtype=COPY)
    copies["sequence"] = (rows[:, _MARK] >> 1) - 1
    copies["length"], copies["final"] = fields[:, 3] >> 1, fields[:, 3] & 1
    for name, i in (("segment", 0), ("first", 1), ("place", 2), ("filled", 4)):
        copies[name] = fields[:, i]
    shares = width > _FIELDS
    for i, name in enumerate(_SHARED):
        copies[name] = fields[:, _FIELDS + i] if shares else 0
    if not shares:
        copies["group_segment"], copies["group_place"] = copies["segment"], copies["place"]
    return copies


def note_copies(arrays: IndexArrays, slots: Array, copies: Array) -> None:
    """Note copies, with the fields of `COPY`, in distinct slots, int64 [n]. The caller holds the lock."""
    which = 1 - (arrays.stored[slots, _MARK] & 1)
    sizes = 2 * copies["length"] + copies["final"]
    fields = [copies["segment"], copies["first"], copies["place"], sizes, copies["filled"]]
    if arrays.stored.shape[1] == SHARED_WIDTH:
        fields += [copies[name] for name in _SHARED]
    count = len(fields)
    place = _COPIES + count * which[:, None] + np.arange(count)
    arrays.stored[slots[:, None], place] = np.stack(fields, axis=1)
    arrays.stored[slots, _MARK] = 2 * (copies["sequence"] + 1) + which


def are_current(arrays: IndexArrays, slots: Array) -> Array:
    """Whether the copies of live trajectories (int64 [n]) have all that these have, bool [n].

    The caller holds the lock, or asks again under it.
    """
    copies, extent = copies_of(arrays, slots), arrays.extent[slots]
    current = copies["sequence"] == arrays.sequence[slots]
    current &= (copies["length"] == extent[:, 0]) & (copies["final"] == extent[:, 2])
    found: Array = current & (copies["filled"] == filled_bits(arrays, slots))
    return found
