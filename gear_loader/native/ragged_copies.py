"""Compiled loops that copy ragged values into a table's payload memory, and out of it (numba).

Values that lie one after another are copied at once. Addresses are raw, and the callers have checked them.
"""

from __future__ import annotations

from gear_loader.native.compile import compiled
from gear_loader.native.memory import copy_bytes


@compiled
def write_values(base, addresses, offsets, sizes) -> None:  # type: ignore[no-untyped-def]
    """Copy values from their addresses to ``base + offsets``; int64 [n] each, `sizes` in bytes."""
    i, count = 0, len(sizes)
    while i < count:
        source, target, size = addresses[i], offsets[i], sizes[i]
        i += 1
        while i < count and addresses[i] == source + size and offsets[i] == target + size:
            size += sizes[i]
            i += 1
        if size > 0:
            copy_bytes(base + target, source, size)


@compiled
def measure_values(records, row_bytes, first, end, offsets) -> int:  # type: ignore[no-untyped-def]
    """Write where each value begins among the rows of all, int64 [n + 1]; return how many records are invalid.

    Args:
        records: int64 [n, 2], first byte and rows of each. row_bytes: of a row. first, end: the bytes of the payload.
    """
    total, bad = 0, 0
    offsets[0] = 0
    for i in range(len(records)):
        place, rows = records[i, 0], records[i, 1]
        if rows < 0 or (rows > 0 and (place < first or place > end or rows > (end - place) // row_bytes)):
            bad += 1
            rows = 0
        total += rows
        offsets[i + 1] = total
    return bad


@compiled
def read_values(base, records, row_bytes, first, end, out) -> None:  # type: ignore[no-untyped-def]
    """Copy the values of records `first` to ``end - 1``, which are valid, one after another to the address `out`."""
    i = first
    while i < end:
        source, size = records[i, 0], records[i, 1] * row_bytes
        i += 1
        while i < end and (records[i, 1] == 0 or records[i, 0] == source + size):
            size += records[i, 1] * row_bytes
            i += 1
        if size > 0:
            copy_bytes(out, base + source, size)
        out += size
