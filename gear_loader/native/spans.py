"""The compiled loop that copies spans of steps out of the blocks of a table (numba): padded and packed batches use it.

A span is some consecutive steps of one trajectory, and a place in the outputs of the columns that have the same window.
It is resolved once into segments, one a block, and not once a column. Segments are copied when `SEGMENTS` of them wait:
the loop that resolves touches the index alone, whose lines are requested rows ahead, and the loop that copies requests
the first lines of the next segments, so the memory works on many at the same time.

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
    ROLE,
    STEP_BYTES,
    STEP_STRIDE,
    STRIDE,
)
from gear_loader.native.memory import (
    atomic_load,
    copy_ahead,
    copy_apart,
    copy_bytes,
    copy_past_caches,
    fill,
    prefetch,
)

assert (BASE, STRIDE, STEP_BYTES, OUT, LENGTH, OFFSET, PAD) == (0, 1, 2, 3, 4, 5, 6)
assert (LINES, ROLE, BLOCKS, FINAL, STEP_STRIDE) == (8, 8, 9, 10, 11)

_SEGMENTS = 64
"""Segments that are resolved before the first of them is copied."""
_LINES_EACH, _LINES_AHEAD = 32, 128
"""Cache lines of a segment and column that are requested, as the processor's own prefetching goes on from there; and of
all segments together. Windows of 20 steps of 96 B take 0.57 to 0.67 of the time that they take with 8 and 64, whole
trajectories of 42 KB 0.97 to 0.99, on an EPYC with 32 MiB of L3. More lines of a segment make the latter slower."""
ROWS_AHEAD = 16
"""Rows before a row is resolved when its block table is requested; its extent is as many rows before that."""
_SINGLE_BYTES = 1 << 7
"""Largest single steps of longer windows that are copied without a call of the C library's `memcpy`."""
_PAST_CACHES_BYTES = 1 << 10
"""Smallest piece of a large batch that is written past the caches."""
_LONG_BYTES = 1 << 12
"""Smallest piece whose lines are requested while it is copied: a page, at whose end the processor ceases to."""

BEGIN, END, ADJOINS = range(3)  # of a group: its columns; whether the blocks of all of them lie side by side
_FIRST, _LAST, _BLOCK, _INSIDE, _TAKE, _PLACE, _REPEATS, _LINES = range(8)  # of a segment
FRESH = LINES  # in the table of `grouped`: whether no column before has the same cache lines


@njit
def grouped(columns, role, block_steps):  # type: ignore[no-untyped-def]
    """Bring columns with the same window together.

    Args:
        columns: int64 [C, WIDTH], of a gather plan. role: of the columns, others are left out.

    Returns:
        The columns in another order, int64 [n, WIDTH]; and where each group of them begins and ends, int64 [G, 3].
    """
    width, filled, count = columns.shape[0], 0, 0
    table, groups = np.empty(columns.shape, dtype=np.int64), np.empty((width, 3), dtype=np.int64)
    taken = np.empty(width, dtype=np.bool_)
    for c in range(width):
        taken[c] = columns[c, ROLE] != role
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
            table[filled, FRESH] = fresh
            adjoins = adjoins and columns[c, STRIDE] == block_steps * columns[c, STEP_BYTES]
            filled += 1
        groups[count, BEGIN], groups[count, END], groups[count, ADJOINS] = begin, filled, adjoins
        count += 1
    return table[:filled], groups[:count]


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _same_window(columns, c, d):  # type: ignore[no-untyped-def]
    same = columns[c, LENGTH] == columns[d, LENGTH] and columns[c, OFFSET] == columns[d, OFFSET]
    return same and columns[c, PAD] == columns[d, PAD] and columns[c, FINAL] == columns[d, FINAL]


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _same_record(table, c, d):  # type: ignore[no-untyped-def]
    alike = table[c, STRIDE] == table[d, STRIDE] and table[c, STEP_STRIDE] == table[d, STEP_STRIDE]
    return alike and abs(table[c, BASE] - table[d, BASE]) < table[c, STEP_STRIDE]


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def extent_of(extent, slot):  # type: ignore[no-untyped-def]
    """Length, place of the block table, and final steps of a trajectory, which may grow meanwhile.

    The place is read last: a trajectory that grows gets its new place first. A new length with the old place would lead
    to the next entry there, which is another trajectory's.
    """
    address = extent.ctypes.data + 24 * slot
    steps, more = atomic_load(address), atomic_load(address + 16)
    return steps, atomic_load(address + 8), more


@njit(inline="always")
def request_index(near, far, extent, block_ids):  # type: ignore[no-untyped-def]
    """Request what the index has of two rows to come: the block table of slot `near`, and the extent of slot `far`.

    -1: none. A caller begins `2 * ROWS_AHEAD` rows before its first.
    """
    if far >= 0:
        prefetch(extent.ctypes.data + 24 * far)
        prefetch(extent.ctypes.data + 24 * far + 23)
    if 0 <= near < len(extent):
        prefetch(block_ids.ctypes.data + 4 * extent_of(extent, near)[1])


@njit(inline="always")
def segments_for():  # type: ignore[no-untyped-def]
    """Memory of the segments that wait."""
    return np.empty((_SEGMENTS, _LINES + 1), dtype=np.int64)


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def source_of(table, c, number, inside):  # type: ignore[no-untyped-def]
    """Address of a step of a column in a block."""
    return table[c, BASE] + number * table[c, STRIDE] + inside * table[c, STEP_STRIDE]


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def request(table, begin, end, number, inside, take):  # type: ignore[no-untyped-def]
    """Request the first cache lines of `take` steps of a block, of columns `begin` to `end - 1`; returns how many."""
    total = 0
    for c in range(begin, end):
        if table[c, FRESH] != 0:
            source = source_of(table, c, number, inside)
            lines = min((take * table[c, STEP_STRIDE] + 63) // 64, _LINES_EACH)
            for line in range(lines):
                prefetch(source + 64 * line)
            total += lines
    return total


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
    """Resolve a span into segments, and copy these when there is no room for more.

    Args:
        table, begin, end, adjoins: of `grouped`, and of one of its groups. segments: of `segments_for`.
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
        if waiting == len(segments):
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
    asked, lines = 0, 0  # segments whose lines were requested, and lines of those that are not copied yet
    for s in range(count):
        while asked < count and lines < _LINES_AHEAD:
            first, last = segments[asked, _FIRST], segments[asked, _LAST]
            steps = 1 if segments[asked, _REPEATS] != 0 else segments[asked, _TAKE]
            block, inside = segments[asked, _BLOCK], segments[asked, _INSIDE]
            segments[asked, _LINES] = request(table, first, last, block, inside, steps)
            lines += segments[asked, _LINES]
            asked += 1
        lines -= segments[s, _LINES]
        number, inside = segments[s, _BLOCK], segments[s, _INSIDE]
        take, place = segments[s, _TAKE], segments[s, _PLACE]
        for c in range(segments[s, _FIRST], segments[s, _LAST]):
            size = table[c, STEP_BYTES]
            every = 0 if segments[s, _REPEATS] != 0 else table[c, STEP_STRIDE]
            source = source_of(table, c, number, inside)
            target = table[c, OUT] + place * size
            if every != size or (take == 1 and size <= _SINGLE_BYTES):
                copy_apart(target, size, source, every, take, size)
            elif streams and take * size >= _PAST_CACHES_BYTES:
                copy_past_caches(target, source, take * size)
            elif take * size >= _LONG_BYTES:
                copy_ahead(target, source, take * size)
            else:
                copy_bytes(target, source, take * size)
