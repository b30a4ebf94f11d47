"""The compiled loops of packed batches (numba): rows of different lengths, one after another, without padding.

Arguments are raw addresses and arrays that the callers have checked; see `gear_loader.native.memory`.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit

from gear_loader.kernels.plan import LENGTH, WIDTH
from gear_loader.native.compile import compiled
from gear_loader.native.memory import copy_bytes, order_stores
from gear_loader.native.spans import (
    ADJOINS,
    BEGIN,
    END,
    ROWS_AHEAD,
    add_span,
    copy_segments,
    extent_of,
    grouped,
    request_index,
    segments_for,
)


@compiled
def measure(slots, anchors, extent, offset, length, final, spans) -> int:  # type: ignore[no-untyped-def]
    """Find the steps of windows that exist.

    Args:
        slots, anchors: int64 [n]. extent: int64 [T, 3].
        offset, length: first step relative to the anchor, and steps, of a window.
        final: bool, whether a final step is one of them.
        spans: int64 [2, n], output: first step and number of steps of each row.

    Returns:
        Number of invalid slots, 0 unless the index is corrupt. Their rows have no steps.
    """
    bad = 0
    for b in range(len(slots)):
        steps = int64(0)
        if slots[b] >= 0 and slots[b] < len(extent):
            steps, _, more = extent_of(extent, slots[b])
            if final:
                steps += more
        else:
            bad += 1
        spans[0, b], spans[1, b] = _span(anchors[b] + offset, length, steps)
    return bad


@compiled
def summed(spans):  # type: ignore[no-untyped-def]
    """The steps of all rows, and of the longest; spans as of `measure`."""
    total, longest = int64(0), int64(0)
    for b in range(spans.shape[1]):
        total += spans[1, b]
        longest = max(longest, spans[1, b])
    return total, longest


@compiled
def place_rows(spans, starts) -> None:  # type: ignore[no-untyped-def]
    """Write where each row begins, one after another, and where the last one ends: int32 [n + 1]."""
    at = int64(0)
    for b in range(spans.shape[1]):
        starts[b] = at
        at += spans[1, b]
    starts[spans.shape[1]] = at


# A queue of drawn rows: int64 [QUEUE_WIDTH, n].
QUEUE_SLOT, QUEUE_ANCHOR, QUEUE_GENERATION = 0, 1, 2
QUEUE_DRAW, QUEUE_ROW = 3, 4  # number of the row's draw, and the row in it
QUEUE_FIRST, QUEUE_STEPS = 5, 6  # of `measure`
QUEUE_WIDTH = 7
KEPT, GONE, LONG = 0, 1, 2  # results of `screen`


@compiled
def screen(  # type: ignore[no-untyped-def]
    queue, begin, states, generations, ready, extent, offset, length, final, max_steps, truncates, results
) -> int:
    """Measure the queued rows from number `begin` on, and find those that cannot be in a batch.

    Args:
        queue: int64 [QUEUE_WIDTH, n], of which QUEUE_FIRST and QUEUE_STEPS are output.
        states, generations: of the index, int64 [T]. ready: state of a trajectory that can be read.
        extent, offset, length, final: as for `measure`.
        max_steps: most steps of a row; with `truncates` longer ones have as many.
        results: int8 [n], output: KEPT; GONE if the trajectory has been removed; LONG if it has too many steps.

    Returns:
        Number of rows that are not KEPT.
    """
    others = 0
    for i in range(begin, queue.shape[1]):
        slot, results[i] = queue[QUEUE_SLOT, i], KEPT
        inside = slot >= 0 and slot < len(extent)
        if not inside or states[slot] != ready or generations[slot] != queue[QUEUE_GENERATION, i]:
            results[i] = GONE
            others += 1
            continue
        steps, _, more = extent_of(extent, slot)
        if final:
            steps += more
        low, count = _span(queue[QUEUE_ANCHOR, i] + offset, length, steps)
        if count > max_steps:
            if truncates:
                count = max_steps
            else:
                results[i] = LONG
                others += 1
        queue[QUEUE_FIRST, i], queue[QUEUE_STEPS, i] = low, count
    return others


@compiled
def choose(queue, max_steps, lookahead, places):  # type: ignore[no-untyped-def]
    """Choose the rows of a batch: in order, each that still fits, until more than `lookahead` did not.

    Args:
        queue: int64 [QUEUE_WIDTH, n], rows of at most `max_steps` steps.
        max_steps: most steps, and rows, of the batch.
        lookahead: rows that may be passed over.
        places: int64 [n], output: numbers of the chosen rows, then those of the others, both in order.

    Returns:
        Number of chosen rows, and their steps; whether a row after these might belong to the batch too.
    """
    total, room, passed, rows, more = queue.shape[1], max_steps, 0, 0, True
    for i in range(total):
        if not more or queue[QUEUE_STEPS, i] > room:
            places[total - 1 - (i - rows)] = i
            passed += 1
            more = more and passed <= lookahead
        else:
            places[rows] = i
            rows += 1
            room -= queue[QUEUE_STEPS, i]
            more = room > 0 and rows < max_steps
    places[rows:] = places[rows:][::-1].copy()
    return rows, max_steps - room, more


@compiled
def gather_packed(  # type: ignore[no-untyped-def]
    columns, once, slots, spans, starts, extent, block_ids, block_steps, position, streams, rows
) -> int:
    """Copy the steps of rows one after another, and the values of their trajectories.

    Args:
        columns, once: int64 [C, WIDTH], columns of steps, and per trajectory, as defined in `gear_loader.kernels.plan`,
            without windows. OUT is the address of [steps, step bytes], and of [rows, step bytes] in `once`.
        slots: int64 [n]. spans: int64 [2, n], of `measure`.
        starts: int32 [at least n], place of each row's first step in the outputs.
        extent: int64 [T, 3]. block_ids: int32 [H]. block_steps: steps of a block.
        position: int32 [steps], output: the step's number in its trajectory.
        streams: whether to write past the caches.
        rows: int64 [m], numbers of the rows to copy.

    Returns:
        Number of rows of which a slot or block is invalid, 0 unless the index is corrupt. Their steps are zeros.
    """
    bad, waiting, width = 0, 0, columns.shape[0]
    both = np.zeros((width + once.shape[0], WIDTH), dtype=np.int64)
    both[:width], both[width:] = columns, once
    both[width:, LENGTH] = 1  # a window of its own
    table, groups = grouped(both, 0, block_steps)
    segments = segments_for()
    last = len(rows)
    for i in range(-2 * ROWS_AHEAD, last):
        near, far = i + ROWS_AHEAD, i + 2 * ROWS_AHEAD
        request_index(
            slots[rows[near]] if 0 <= near < last else -1,
            slots[rows[far]] if far < last else -1,
            extent,
            block_ids,
        )
        if i < 0:
            continue
        b = rows[i]
        row = int64(-1) << 40  # no place in `block_ids`
        if slots[b] >= 0 and slots[b] < len(extent):
            _, row, _ = extent_of(extent, slots[b])
        low, count, start = spans[0, b], spans[1, b], int64(starts[b])
        own = position[start : start + count]
        for step in range(len(own)):
            own[step] = low + step
        wrong = row < 0
        for g in range(groups.shape[0]):
            first = groups[g, BEGIN]
            if table[first, LENGTH] == 1:
                low, count, start = int64(0), int64(1), int64(b)
            waiting, invalid = add_span(
                table,
                first,
                groups[g, END],
                groups[g, ADJOINS],
                segments,
                waiting,
                row,
                low,
                count,
                start,
                False,
                block_ids,
                block_steps,
                streams,
            )
            wrong = wrong or invalid
        bad += wrong
    copy_segments(table, segments, waiting, streams)
    if streams:
        order_stores()
    return bad


@compiled
def place_packed(pieces, source_starts, out_starts, counts) -> None:  # type: ignore[no-untyped-def]
    """Copy rows that lie one after another to their places in a packed batch.

    Args:
        pieces: int64 [P, 3], address of the rows, address of the output, bytes of a step.
        source_starts, out_starts: int64 [n], first step of each row there. counts: int64 [n], steps.
    """
    for p in range(pieces.shape[0]):
        source, out, step_bytes = pieces[p, 0], pieces[p, 1], pieces[p, 2]
        for i in range(len(counts)):
            copy_bytes(
                out + out_starts[i] * step_bytes,
                source + source_starts[i] * step_bytes,
                counts[i] * step_bytes,
            )


@njit(inline="always")
def _span(start, length, steps):  # type: ignore[no-untyped-def]
    """First existing step of a window in a trajectory of `steps`, and number of them."""
    low = min(max(start, 0), steps)
    return low, max(min(start + length, steps), low) - low
