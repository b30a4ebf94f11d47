"""Compiled loops that copy ragged values into a table's payload memory, and out of it (numba).

Values that lie one after another are copied at once. Addresses are raw, and the callers have checked them.
"""

from __future__ import annotations

import numpy as np
from numba import carray, int64, njit

from gear_loader.native.compile import compiled
from gear_loader.native.lanes import LANE_GENERATION, LANE_SLOT
from gear_loader.native.memory import copy_bytes, order_stores, pointer

_SLOT, _GENERATION, _EXTENT, _AT, _END, _TAKEN, _GRAIN = 0, 1, 2, 3, 4, 5, 16  # of a spot
_HEADER, _SIZE, _NEXT = 32, 0, 3  # all as `gear_loader.storage.operations.extents` has them
_COUNT = (1 << 41) - 1  # as `gear_loader.storage.disk_records` has them

assert (LANE_SLOT, LANE_GENERATION) == (0, 1)  # compiled into the cached machine code


@njit  # type: ignore[untyped-decorator]
def _copy_split(base, end, at, memory, skip, size, into) -> bool:  # type: ignore[no-untyped-def]
    """Copy bytes of a value between `memory` and its extents, of which the first begins at byte `at`.

    Args:
        base, end: address and bytes of the payload. skip, size: first byte of the value, and number of bytes.
        into: whether they go into the extents.

    Returns:
        False if an extent is not valid.
    """
    words = carray(pointer(base), (end // 8,), np.int64)
    while size > 0:
        if at < _HEADER or at > end - _HEADER or at % 8 != 0:
            return False
        part = words[at // 8 + _SIZE] - _HEADER
        if part <= 0 or part > end - _HEADER - at:
            return False
        inside = min(size, part - skip)
        if inside > 0:
            if into:
                copy_bytes(base + at + _HEADER + skip, memory, inside)
            else:
                copy_bytes(memory, base + at + _HEADER + skip, inside)
            memory, size = memory + inside, size - inside
        skip, at = max(0, skip - part), words[at // 8 + _NEXT]
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
            if not _copy_split(base, end, -target, source, 0, size, True):
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


@njit  # type: ignore[untyped-decorator]
def _measure(records, row_bytes, first, end, on_disk, offsets) -> int:  # type: ignore[no-untyped-def]
    """Write where each value begins among the rows of all, int64 [n + 1]; return how many records are invalid.

    Args:
        records: int64 [n, 2], first byte and rows of each; negative rows of a split one. row_bytes: of a row.
        first, end: the bytes of the payload. on_disk: whether some may be of values on disk.
    """
    total, bad = 0, 0
    offsets[0] = 0
    for i in range(len(records)):
        place, rows = records[i, 0], records[i, 1]
        if place < 0 and rows >= 0 and on_disk:
            rows &= _COUNT
        elif rows < 0:
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
def measure_values(records, row_bytes, first, end, on_disk, offsets) -> int:  # type: ignore[no-untyped-def]
    """See `_measure`."""
    return int(_measure(records, row_bytes, first, end, on_disk, offsets))


@njit  # type: ignore[untyped-decorator]
def _read(base, end, first, records, row_bytes, on_disk, skip, size, out) -> int:  # type: ignore[no-untyped-def]
    """Copy a part of the values of records, as they lie one after another, to the address `out`.

    Args:
        base, end: address and bytes of the payload, whose values begin at byte `first`.
        records: int64 [n, 2], as for `measure_values`, and not checked. row_bytes: of a row.
        on_disk: whether some may be of values on disk, which are left out.
        skip, size: first byte of the part, and its bytes.

    Returns:
        How many values were found not to be valid.
    """
    i, bad, count = 0, 0, len(records)
    while size > 0 and i < count:
        place, rows = records[i, 0], records[i, 1]
        outside = on_disk and place < 0 and rows >= 0
        if outside:
            rows &= _COUNT
        split, total = rows < 0, abs(rows) * row_bytes
        i += 1
        if outside:
            taken = min(size, max(0, total - skip))
            skip, out, size = max(0, skip - total), out + taken, size - taken
            continue
        if total < 0 or total > end or abs(rows) > end:
            bad += 1
            continue
        while (
            not split
            and i < count
            and (records[i, 1] == 0 or (records[i, 0] == place + total and 0 < records[i, 1] <= end))
        ):
            total += records[i, 1] * row_bytes
            i += 1
        if total <= skip:
            skip -= total
            continue
        taken = min(size, total - skip)
        if split:
            bad += not _copy_split(base, end, place, out, skip, taken, False)
        elif place < first or place > end or total > end - place:
            bad += 1
        else:
            copy_bytes(out, base + place + skip, taken)
        out, size, skip = out + taken, size - taken, 0
    order_stores()
    return bad


@compiled
def read_values(base, end, first, records, row_bytes, on_disk, skip, size, out) -> int:  # type: ignore[no-untyped-def]
    """See `_read`."""
    return int(_read(base, end, first, records, row_bytes, on_disk, skip, size, out))


COLUMN_RECORDS, COLUMN_COUNT, COLUMN_ROW_BYTES, COLUMN_OUT, COLUMN_WIDTH = 0, 1, 2, 3, 4
"""A column of `measure_columns` and `read_columns`: address of its records, int64 [count, 2], their number, bytes of a
row, address of the output."""


@compiled
def measure_columns(columns, first, end, offsets) -> int:  # type: ignore[no-untyped-def]
    """`_measure` of several columns of values in memory, int64 [C, COLUMN_WIDTH], whose offsets follow one another."""
    bad, at = 0, 0
    for c in range(len(columns)):
        count = columns[c, COLUMN_COUNT]
        records = carray(pointer(columns[c, COLUMN_RECORDS]), (count, 2), np.int64)
        bad += _measure(
            records, columns[c, COLUMN_ROW_BYTES], first, end, False, offsets[at : at + count + 1]
        )
        at += count + 1
    return bad


@compiled
def read_columns(base, end, first, columns, offsets) -> int:  # type: ignore[no-untyped-def]
    """`_read` of the whole values of several columns that `measure_columns` has measured."""
    bad, at = 0, -1
    for c in range(len(columns)):
        count, row_bytes = columns[c, COLUMN_COUNT], columns[c, COLUMN_ROW_BYTES]
        records = carray(pointer(columns[c, COLUMN_RECORDS]), (count, 2), np.int64)
        at += count + 1
        size = offsets[at] * row_bytes
        bad += _read(base, end, first, records, row_bytes, False, 0, size, columns[c, COLUMN_OUT])
    return bad


BLOCK_SHIFT, PART_SHIFT = 20, 30
"""Log2 of the bytes of a block of `list_values`, and of the bytes of values of a part."""
PIECE_WIDTH = 5  # as `gear_loader.kernels.packed_plan` has it


@njit(inline="always")
def _put_piece(pieces, ends, count, place, size, at, unit, part_shift):  # type: ignore[no-untyped-def]
    """Add bytes that lie one after another, cut where parts end; return how many pieces there are."""
    part = int64(1) << part_shift
    while size > 0:
        taken = min(size, part - (at & part - 1))
        if count < len(pieces):
            pieces[count, 0], pieces[count, 1] = (
                place >> BLOCK_SHIFT,
                (place & (1 << BLOCK_SHIFT) - 1) // unit,
            )
            pieces[count, 2], pieces[count, 3], pieces[count, 4] = taken // unit, (at & part - 1) // unit, 0
        count += 1
        ends[at >> part_shift] = count
        place, size, at = place + taken, size - taken, at + taken
    return count


@compiled
def list_values(base, end, records, row_bytes, unit, part_shift, pieces, ends):  # type: ignore[no-untyped-def]
    """List the pieces of memory that hold the values of records, as a GPU gathers them, one after another.

    Args:
        base, end: address and bytes of the payload. records: int64 [n, 2], checked by `measure_values`.
        row_bytes: of a row. unit: bytes of which all places and sizes are multiples.
        part_shift: log2 of the bytes of a part, in which the places of a piece are counted.
        pieces: int32 [most, PIECE_WIDTH], output, see `gear_loader.kernels.packed_plan`: blocks are of
            ``1 << BLOCK_SHIFT`` bytes, steps of `unit`.
        ends: int64 [parts], output: the piece after the last one of each part.

    Returns:
        Number of pieces, of which those that `pieces` has no room for were not written; -1 if an extent is not valid.
    """
    words = carray(pointer(base), (end // 8,), np.int64)
    count, begin, size, at = (
        int64(0),
        int64(0),
        int64(0),
        int64(0),
    )  # of the piece that may go on: place, bytes, out
    for i in range(len(records)):
        place, left = records[i, 0], abs(records[i, 1]) * row_bytes
        split = records[i, 1] < 0
        while left > 0:
            inside, taken = place, left
            if split:
                if place < _HEADER or place > end - _HEADER or place % 8 != 0:
                    return -1
                most = words[place // 8 + _SIZE] - _HEADER
                if most <= 0 or most > end - _HEADER - place:
                    return -1
                inside, taken, place = place + _HEADER, min(left, most), words[place // 8 + _NEXT]
            if inside != begin + size:
                count = _put_piece(pieces, ends, count, begin, size, at, unit, part_shift)
                begin, size, at = inside, int64(0), at + size
            size, left = size + taken, left - taken
    return _put_piece(pieces, ends, count, begin, size, at, unit, part_shift)


@njit(inline="always")
def _record(column, ids, place, step):  # type: ignore[no-untyped-def]
    """A record in its block."""
    block = step // column[4]
    at = column[0] + int64(ids[place + block]) * column[1] + (step - block * column[4]) * column[3]
    return carray(pointer(at), (2,), np.int64)


@compiled
def find_values(rows, before, places, ids, column, most, found) -> None:  # type: ignore[no-untyped-def]
    """Find the values of trajectories by their records as a file has them, which say the first row and the rows.

    Args:
        rows, before: int64 [n], records of each trajectory, 1 or more, and the steps before them.
        places, ids, column: of the records, as for `gear_loader.native.copying.copy_rows`.
        most: rows of the values in the file.
        found: int64 [n, 2], output: first row of the values of each trajectory, and the row after their last; -1 twice
            where they do not follow one another.
    """
    for i in range(len(rows)):
        first = _record(column, ids, places[i], before[i])[0]
        following, valid = first, first >= 0
        for step in range(rows[i]):
            record = _record(column, ids, places[i], before[i] + step)
            valid &= record[0] == following and 0 <= record[1] <= most
            following += record[1]
            valid &= following <= most
        found[i, 0], found[i, 1] = (first, following) if valid else (-1, -1)


@compiled
def move_records(  # type: ignore[no-untyped-def]
    rows, before, places, ids, column, row_bytes, found, targets
) -> None:
    """Make records as a file has them those of values in memory.

    Args:
        As for `find_values`, with its output. row_bytes: of a row. targets: int64 [n], first byte of each trajectory's
            values in the payload.
    """
    for i in range(len(rows)):
        for step in range(rows[i]):
            record = _record(column, ids, places[i], before[i] + step)
            record[0] = targets[i] + (record[0] - found[i, 0]) * row_bytes


@compiled
def count_rows(slots, extent, block_ids, num_blocks, column, once) -> int:  # type: ignore[no-untyped-def]
    """Rows of all values of trajectories in memory; of those that change meanwhile it means nothing.

    Args:
        slots: int64 [n]. extent, block_ids: arrays of the index. num_blocks: of the table.
        column: of the records, as for `gear_loader.native.copying.copy_rows`. once: whether each has one value.
    """
    total = 0
    for slot in slots:
        place, length = int64(extent[slot, 1]), 1 if once else int64(extent[slot, 0])
        for step in range(length):
            at = place + step // column[4]
            if place >= 0 and at < len(block_ids) and 0 <= block_ids[at] < num_blocks:
                total += abs(_record(column, block_ids, place, step)[1])
    return total
