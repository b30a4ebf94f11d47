"""Records of ragged values that lie on disk, as whoever has read them there has them until the values are read too.

A record is int64 [2]. That of values in memory says where they begin, and their rows. The first word of one of values
on disk is negative. Its bits are the first row in the segment's file of values, the rows, the slot of the trajectory,
and the lowest bits of the segment's number, which tell whether the trajectory still lies there.

Other nodes ask for values after they have got the records, and hold no read ticket meanwhile, so that values of a table
with a disk tier may have moved by then. Its server sends records with the step in place of where the values lie. So
does any server with frames of video in windows: the frames before a frame are found by its step, and only the server
knows which steps a window shows of a trajectory that may have grown since it was drawn.
"""

from __future__ import annotations

import numpy as np

from gear_loader.utils.arrays import Array

ROW_BITS, COUNT_BITS = 44, 41
_SLOT_BITS, _SEGMENT_BITS, _LOW_BITS = 31, 10, 19
_STEPS = 1 << 62
assert _LOW_BITS + ROW_BITS == 63
assert _SLOT_BITS + _SEGMENT_BITS - _LOW_BITS + COUNT_BITS == 63


class MovedRowsError(Exception):
    """Values lie elsewhere than their records say: the records have to be read again."""


def tag_of(segments: Array) -> Array:
    """The lowest bits of the numbers of segments, int64 [n]."""
    return segments & ((1 << _SEGMENT_BITS) - 1)


def on_disk(records: Array, slots: Array, segments: Array) -> Array:
    """Records of values on disk, of such in a segment's file: first rows and rows, int64 [n, 2] each.

    Args:
        slots, segments: int64 [n], of their trajectories.
    """
    who = slots | tag_of(segments) << _SLOT_BITS
    place = -1 - (records[:, 0] | (who & ((1 << _LOW_BITS) - 1)) << ROW_BITS)
    return np.stack((place, records[:, 1] | (who >> _LOW_BITS) << COUNT_BITS), axis=1)


def parts_of(records: Array) -> tuple[Array, Array, Array, Array]:
    """Slots, `tag_of` the segments, first rows in their files and rows, int64 [n] each, of records from `on_disk`."""
    place, rows = -1 - records[:, 0], records[:, 1]
    who = place >> ROW_BITS | (rows >> COUNT_BITS) << _LOW_BITS
    first, count = place & ((1 << ROW_BITS) - 1), rows & ((1 << COUNT_BITS) - 1)
    return who & ((1 << _SLOT_BITS) - 1), who >> _SLOT_BITS, first, count


def by_step(records: Array, steps: Array) -> Array:
    """Records for other nodes, int64 [n, 2]: step - 2**62 and rows; zeros of values without rows.

    Args:
        records: int64 [n, 2], of values in memory or on disk. steps: int64 [n], of the values in their trajectories.
    """
    rows = rows_of(records)
    return np.stack((np.where(rows > 0, steps - _STEPS, 0), rows), axis=1)


def steps_in(records: Array) -> Array:
    """The steps that records from `by_step` name, int64 [n]; numbers of no step for others."""
    return records[:, 0] + _STEPS


def rows_of(records: Array) -> Array:
    """Rows of values, int64 [n], by any records."""
    rows = records[:, 1]
    return np.where(records[:, 0] < 0, rows & ((1 << COUNT_BITS) - 1), abs(rows))
