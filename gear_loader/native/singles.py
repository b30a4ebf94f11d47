"""The compiled loop that gathers windows of one step each (numba), such as those of single transitions.

They need no segments, as spans do: places are found column by column for some rows at once, so that what a column has
is read once for all of them. Batches of 256 transitions of 29 bytes take a quarter of the time of spans on an EPYC of
the fourth generation.

Addresses are raw, and the callers have checked them.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from gear_loader.kernels.plan import (
    BASE,
    BLOCKS,
    FINAL,
    MASK,
    OFFSET,
    OUT,
    PAD,
    PAD_EDGE,
    STEP_BYTES,
    STEP_STRIDE,
    STRIDE,
)
from gear_loader.native.memory import copy_step, fill, prefetch
from gear_loader.native.spans import BEGIN, END, FRESH, extent_of, grouped

assert (BASE, STRIDE, STEP_BYTES, OUT, OFFSET, PAD, MASK) == (0, 1, 2, 3, 5, 6, 7)
assert (BLOCKS, FINAL, STEP_STRIDE, PAD_EDGE) == (9, 10, 11, 3)

_TOGETHER = 32
"""Rows whose places are found, and whose lines are requested, before the first of them is copied."""
_LINES_EACH = 8
"""Cache lines of a step that are requested, as the processor's own prefetching goes on from there."""
_BLOCK, _INSIDE, _EXISTS = range(
    3
)  # of a row and group: its block or -1, the step in it, whether the step exists


@njit(inline="always")  # type: ignore[untyped-decorator]
def gather_singles(  # type: ignore[no-untyped-def]
    columns, role, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
) -> int:
    """`gear_loader.native.gathering.gather` of the columns with a role, if all windows have one step."""
    bad = 0
    table, groups = grouped(columns, role, block_steps)
    known = np.empty(
        (3, _TOGETHER), dtype=np.int64
    )  # of each row: steps, place of the block table, final steps
    found = np.empty((groups.shape[0], 3, _TOGETHER), dtype=np.int64)
    for begin in range(first, last, _TOGETHER):
        here, whole = min(_TOGETHER, last - begin), True
        for i in range(here):
            slot = slots[begin + i]
            known[0, i], known[1, i], known[2, i] = 0, 0, 0
            if slot >= 0 and slot < len(extent):
                known[0, i], known[1, i], known[2, i] = extent_of(extent, slot)
            else:
                bad += 1
        for g in range(groups.shape[0]):
            c = groups[g, BEGIN]
            offset, final, most, edge = (
                table[c, OFFSET],
                table[c, FINAL],
                table[c, BLOCKS],
                table[c, PAD] == PAD_EDGE,
            )
            for i in range(here):
                step, stop = anchors[begin + i] + offset, known[0, i] + known[2, i] * final
                exists, number, inside = 0 <= step < stop, int64(-1), int64(0)
                if exists or (edge and stop > 0):
                    step = min(max(step, 0), stop - 1)
                    block = int64(uint64(step) // uint64(block_steps))
                    inside = step - block * block_steps
                    place = known[1, i] + block
                    number = int64(block_ids[place]) if 0 <= place < len(block_ids) else int64(-1)
                    if number >= most:
                        number = int64(-1)
                    bad += number < 0
                    exists = exists and number >= 0
                whole = whole and number >= 0
                found[g, _BLOCK, i], found[g, _INSIDE, i], found[g, _EXISTS, i] = number, inside, exists
            for c in range(groups[g, BEGIN], groups[g, END]):
                if table[c, FRESH] != 0:
                    _request(table, c, found[g], here)
        for g in range(groups.shape[0]):
            for c in range(groups[g, BEGIN], groups[g, END]):
                _copy(table, c, found[g], here, whole, begin, rows, chosen)
    return bad


@njit  # type: ignore[untyped-decorator]
def _request(table, c, found, count) -> None:  # type: ignore[no-untyped-def]
    """Request the cache lines of one step of a column for each of `count` rows."""
    base, stride, every = table[c, BASE], table[c, STRIDE], table[c, STEP_STRIDE]
    for line in range(min((every + 63) // 64, _LINES_EACH)):
        for i in range(count):
            if found[_BLOCK, i] >= 0:
                prefetch(base + 64 * line + found[_BLOCK, i] * stride + found[_INSIDE, i] * every)


@njit  # type: ignore[untyped-decorator]
def _copy(table, c, found, count, whole, begin, rows, chosen) -> None:  # type: ignore[no-untyped-def]
    """Copy one step of a column for each of `count` rows from `begin` on; `whole`: each of them has a block."""
    base, stride, every = table[c, BASE], table[c, STRIDE], table[c, STEP_STRIDE]
    size, out, mask = table[c, STEP_BYTES], table[c, OUT], table[c, MASK]
    for i in range(count):
        target = out + (rows[begin + i] if chosen else begin + i) * size
        if whole or found[_BLOCK, i] >= 0:
            copy_step(target, base + found[_BLOCK, i] * stride + found[_INSIDE, i] * every, size)
        else:
            fill(target, 0, size)
    if mask != 0:
        for i in range(count):
            fill(mask + (rows[begin + i] if chosen else begin + i), found[_EXISTS, i], 1)
