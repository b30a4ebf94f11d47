"""Compiled loops that copy ragged values into a table's payload memory, and out of it (numba).

Values that lie one after another are copied at once. Addresses are raw, and the callers have checked them.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from gear_loader.native.compile import compiled
from gear_loader.native.lanes import LANE_GENERATION, LANE_SLOT
from gear_loader.native.memory import copy_bytes, pointer

_SLOT, _GENERATION, _EXTENT, _AT, _END, _TAKEN, _GRAIN = 0, 1, 2, 3, 4, 5, 16  # of a spot
_HEADER, _SIZE, _NEXT = 32, 0, 3  # all as `gear_loader.storage.operations.extents` has them

assert (LANE_SLOT, LANE_GENERATION) == (0, 1)  # compiled into the cached machine code


@njit  # type: ignore[untyped-decorator]
def _copy_split(base, end, at, memory, size, into) -> bool:  # type: ignore[no-untyped-def]
    """Copy a value of `size` bytes between `memory` and its extents, of which the first begins at byte `at`.

    Args:
        base, end: address and bytes of the payload. into: whether it goes into the extents.

    Returns:
        False if an extent is not valid.
    """
    words = carray(pointer(base), (end // 8,), np.int64)
    while size > 0:
        if at < _HEADER or at > end - _HEADER or at % 8 != 0:
            return False
        part = min(size, words[at // 8 + _SIZE] - _HEADER)
        if part <= 0 or part > end - _HEADER - at:
            return False
        if into:
            copy_bytes(base + at + _HEADER, memory, part)
        else:
            copy_bytes(memory, base + at + _HEADER, part)
        memory, size, at = memory + part, size - part, words[at // 8 + _NEXT]
    return True


@compiled
def write_values(base, end, addresses, offsets, sizes) -> bool:  # type: ignore[no-untyped-def]
    """Copy values from their addresses to `offsets` behind `base`, as `take_payload` gives them; int64 [n] each.

    Args:
        base, end: address and bytes of the payload. sizes: in bytes.

    Returns:
        False if an extent is not valid.
    """
    i, count = 0, len(sizes)
    while i < count:
        source, target, size = addresses[i], offsets[i], sizes[i]
        i += 1
        if target < 0:
            if not _copy_split(base, end, -target, source, size, True):
                return False
            continue
        while i < count and addresses[i] == source + size and offsets[i] == target + size:
            size += sizes[i]
            i += 1
        if size > 0:
            copy_bytes(base + target, source, size)
    return True


@compiled
def append_values(base, lanes, chosen, spots, first, count, parts, records) -> bool:  # type: ignore[no-untyped-def]
    """Copy values into the room that trajectories keep for their next ones, and complete their records.

    Args:
        base: address of the payload. lanes: int64 [n, LANE_WIDTH]. chosen: int64 [m], lanes whose values they are.
        spots: int64 [n, SPOT_WIDTH], as `take_payload` has made them.
        first, count: the values of the only lane; a negative count: that of each lane is number `lane`.
        parts, records: of a `StepValues`.

    Returns:
        False, having done nothing, if one has not enough room.
    """
    for write in range(2):
        for lane in chosen:
            spot = spots[lane]
            if spot[_SLOT] != lanes[lane, LANE_SLOT] or spot[_GENERATION] != lanes[lane, LANE_GENERATION]:
                return False
            begin, end = (first, first + count) if count >= 0 else (lane, lane + 1)
            at = spot[_AT]
            for c in range(parts.shape[1]):
                at = (at + _GRAIN - 1) // _GRAIN * _GRAIN
                for i in range(begin, end):
                    size = parts[0, c, i]
                    if write == 1:
                        records[c, i, 0] = at if size > 0 else 0
                        records[c, i, 1] = parts[1, c, i]
                        if size > 0:
                            copy_bytes(base + at, parts[2, c, i], size)
                            spot[_TAKEN] += size
                    at += size
            if spot[_EXTENT] <= 0 or at > spot[_END]:
                return False
            if write == 1:
                spot[_AT] = at
    return True


@compiled
def measure_values(records, row_bytes, first, end, offsets) -> int:  # type: ignore[no-untyped-def]
    """Write where each value begins among the rows of all, int64 [n + 1]; return how many records are invalid.

    Args:
        records: int64 [n, 2], first byte and rows of each; negative rows of a split one. row_bytes: of a row.
        first, end: the bytes of the payload.
    """
    total, bad = 0, 0
    offsets[0] = 0
    for i in range(len(records)):
        place, rows = records[i, 0], records[i, 1]
        if rows < 0:
            if place < first or place > end or rows < -(end // row_bytes):
                bad, rows = bad + 1, 0
            rows = -rows
        elif rows > 0 and (place < first or place > end or rows > (end - place) // row_bytes):
            bad += 1
            rows = 0
        total += rows
        offsets[i + 1] = total
    return bad


@compiled
def read_values(base, end, records, row_bytes, out) -> int:  # type: ignore[no-untyped-def]
    """Copy the values of records that `measure_values` found valid one after another to the address `out`.

    Args:
        base, end: address and bytes of the payload. The others as for `measure_values`.

    Returns:
        How many have an extent that is not valid.
    """
    i, bad, count = 0, 0, len(records)
    while i < count:
        source, size = records[i, 0], records[i, 1] * row_bytes
        i += 1
        if size < 0:
            bad += not _copy_split(base, end, source, out, -size, False)
            out -= size
            continue
        while i < count and (records[i, 1] == 0 or (records[i, 1] > 0 and records[i, 0] == source + size)):
            size += records[i, 1] * row_bytes
            i += 1
        if size > 0:
            copy_bytes(out, base + source, size)
        out += size
    return bad
