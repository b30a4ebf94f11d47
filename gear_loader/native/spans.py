"""The compiled loop that copies spans of steps out of the blocks of a table (numba): padded and packed batches use it.

A span is some consecutive steps of one trajectory, and a place in the outputs of the columns that have the same window.
It is resolved once into segments, one a block, and not once a column. The cache lines of a segment are requested when
it is resolved; segments are copied when `AHEAD` of them wait, so the memory works on many at the same time.

Addresses are raw, and the callers have checked them.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit

from gear_loader.kernels.plan import (
    BASE,
    BLOCKS,
    FINAL,
    LENGTH,
    LINES,
    OFFSET,
    OUT,
    PAD,
    STEP_BYTES,
    STEP_STRIDE,
    STRIDE,
)
from gear_loader.native.memory import copy_apart, copy_bytes, copy_past_caches, copy_step, fill, prefetch

__all__ = [
    "ADJOINS",
    "AHEAD",
    "BEGIN",
    "END",
    "SEGMENT",
    "SINGLE_BYTES",
    "add_span",
    "copy_segments",
    "grouped",
    "request",
    "source_of",
]

assert (BASE, STRIDE, STEP_BYTES, OUT, LENGTH, OFFSET, PAD) == (0, 1, 2, 3, 4, 5, 6)
assert (LINES, BLOCKS, FINAL, STEP_STRIDE) == (8, 9, 10, 11)

AHEAD = 32
"""Segments whose lines are requested before the first of them is copied: 8 to 32 measure alike."""
_LINES_AHEAD = 40
"""Cache lines of a segment that are requested; the processor's own prefetching goes on from there."""
SINGLE_BYTES = 1 << 12
"""Largest single steps that are copied without a call of the C library's `memcpy`, where their size allows it."""
_PAST_CACHES_BYTES = 1 << 10
"""Smallest piece of a large batch that is written past the caches."""

BEGIN, END, ADJOINS = range(3)  # of a group: its columns; whether the blocks of all of them lie side by side
_FIRST, _LAST, _BLOCK, _INSIDE, _TAKE, _PLACE, _REPEATS = range(7)  # of a segment
SEGMENT = 7
"""Numbers of a segment."""
_FRESH = LINES  # in the table of `grouped`: whether no column before has the same cache lines


@njit
def grouped(columns, block_steps):  # type: ignore[no-untyped-def]
    """Bring columns with the same window together.

    Args:
        columns: int64 [C, WIDTH], of a gather plan.

    Returns:
        The columns in another order, int64 [C, WIDTH]; and where each group of them begins and ends, int64 [G, 3].
    """
    width, filled, count = columns.shape[0], 0, 0
    table, groups = np.empty(columns.shape, dtype=np.int64), np.empty((width, 3), dtype=np.int64)
    taken = np.zeros(width, dtype=np.bool_)
    for first in range(width):
        if taken[first]:
            continue
        begin, adjoins = filled, True
        for c in range(first, width):
            if taken[c] or not _same_window(columns, first, c):
                continue
            taken[c], fresh = True, True
            for field in range(columns.shape[1]):  # a slice takes ten times as long
                table[filled, field] = columns[c, field]
            for before in range(begin, filled):
                fresh = fresh and not _same_record(table, before, filled)
            table[filled, _FRESH] = fresh
            adjoins = adjoins and columns[c, STRIDE] == block_steps * columns[c, STEP_BYTES]
            filled += 1
        groups[count, BEGIN], groups[count, END], groups[count, ADJOINS] = begin, filled, adjoins
        count += 1
    return table, groups[:count]


@njit(inline="always")
def _same_window(columns, c, d):  # type: ignore[no-untyped-def]
    same = columns[c, LENGTH] == columns[d, LENGTH] and columns[c, OFFSET] == columns[d, OFFSET]
    return same and columns[c, PAD] == columns[d, PAD] and columns[c, FINAL] == columns[d, FINAL]


@njit(inline="always")
def _same_record(table, c, d):  # type: ignore[no-untyped-def]
    alike = table[c, STRIDE] == table[d, STRIDE] and table[c, STEP_STRIDE] == table[d, STEP_STRIDE]
    return alike and abs(table[c, BASE] - table[d, BASE]) < table[c, STEP_STRIDE]


@njit(inline="always")
def source_of(table, c, number, inside):  # type: ignore[no-untyped-def]
    """Address of a step of a column in a block."""
    return table[c, BASE] + number * table[c, STRIDE] + inside * table[c, STEP_STRIDE]


@njit(inline="always")
def request(table, begin, end, number, inside, take):  # type: ignore[no-untyped-def]
    """Request the cache lines of `take` steps of a block, of the columns `begin` to `end - 1`."""
    for c in range(begin, end):
        if table[c, _FRESH] != 0:
            source = source_of(table, c, number, inside)
            for line in range(min((take * table[c, STEP_STRIDE] + 63) // 64, _LINES_AHEAD)):
                prefetch(source + 64 * line)


@njit(inline="always")
def add_span(  # type: ignore[no-untyped-def]
    table,
    begin,
    end,
    adjoins,
    segments,
    waiting,
    row,
    low,
    count,
    place,
    repeats,
    block_ids,
    block_steps,
    streams,
):
    """Resolve a span into segments, request their lines, and copy segments when `AHEAD` of them wait.

    Args:
        table, begin, end, adjoins: of `grouped`, and of one of its groups. segments: int64 [AHEAD, SEGMENT].
        waiting: segments that wait. row: place of the trajectory's first block in `block_ids`.
        low, count: first step, and steps. place: step of the outputs that gets the first one.
        repeats: the span has one step, which is copied `count` times.
        block_ids: int32 [H]. block_steps: steps of a block. streams: write large pieces past the caches.

    Returns:
        Segments that wait now; whether the block table has an invalid place or block. Steps in those are zeros.
    """
    step, done = low, int64(0)
    while done < count:
        block = step // block_steps
        inside = step - block * block_steps
        take = count - done if repeats else min(block_steps - inside, count - done)
        at = row + block
        number = int64(block_ids[at]) if at >= 0 and at < len(block_ids) else int64(-1)
        if number < 0 or number >= table[begin, BLOCKS]:
            for c in range(begin, end):
                size = table[c, STEP_BYTES]
                fill(table[c, OUT] + (place + done) * size, 0, (count - done) * size)
            return waiting, True
        if adjoins and not repeats:
            more = number + 1
            while done + take < count and more < table[begin, BLOCKS]:
                at += 1
                if at >= len(block_ids) or int64(block_ids[at]) != more:
                    break
                take += min(block_steps, count - done - take)
                more += 1
        request(table, begin, end, number, inside, 1 if repeats else take)
        if waiting == AHEAD:
            copy_segments(table, segments, waiting, streams)
            waiting = 0
        segments[waiting, _FIRST], segments[waiting, _LAST] = begin, end
        segments[waiting, _BLOCK], segments[waiting, _INSIDE] = number, inside
        segments[waiting, _TAKE], segments[waiting, _PLACE] = take, place + done
        segments[waiting, _REPEATS] = repeats
        waiting += 1
        step += take
        done += take
    return waiting, False


@njit
def copy_segments(table, segments, count, streams):  # type: ignore[no-untyped-def]
    """Copy the first `count` of `segments`; see `add_span`."""
    for s in range(count):
        number, inside = segments[s, _BLOCK], segments[s, _INSIDE]
        take, place = segments[s, _TAKE], segments[s, _PLACE]
        for c in range(segments[s, _FIRST], segments[s, _LAST]):
            size, every = table[c, STEP_BYTES], table[c, STEP_STRIDE]
            source = source_of(table, c, number, inside)
            target = table[c, OUT] + place * size
            if take == 1 and size <= SINGLE_BYTES:
                copy_step(target, source, size)
            elif segments[s, _REPEATS] != 0:
                copy_apart(target, size, source, 0, take, size)
            elif every != size:
                copy_apart(target, size, source, every, take, size)
            elif streams and take * size >= _PAST_CACHES_BYTES:
                copy_past_caches(target, source, take * size)
            else:
                copy_bytes(target, source, take * size)
