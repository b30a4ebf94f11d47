"""The compiled loops of the CPU path (numba) that gather the windows of a batch out of the blocks of a table.

The arguments are raw addresses, which the callers have checked. The loops release the GIL, so that several threads can
copy at once.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from gear_loader.kernels.plan import (
    BLOCKS,
    FINAL,
    LENGTH,
    MASK,
    OFFSET,
    OUT,
    PAD,
    PAD_EDGE,
    PAD_HEAD,
    PAD_TAIL,
    ROLE,
    STEP_BYTES,
    WIDTH,
)
from gear_loader.native.compile import compiled
from gear_loader.native.memory import copy_bytes, fill, order_stores
from gear_loader.native.returns import NEXT, ROLES, n_step
from gear_loader.native.singles import gather_singles
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

SINGLE_BYTES = 1 << 12
"""Largest single steps that `gather_singles` copies."""
STREAM_BATCH_BYTES = 1 << 22
"""Bytes of a batch from which on its rows are written past the caches: by the time that the batch is read, others have
been gathered. Whole trajectories of 42 KB, 256 and 1,024 a batch, take 0.8 of the time on an EPYC with 32 MiB of L3,
also where the batch is read at once."""
assert (STEP_BYTES, OUT, LENGTH, OFFSET, PAD, MASK) == (2, 3, 4, 5, 6, 7)
assert (ROLE, BLOCKS, FINAL, WIDTH) == (8, 9, 10, 12)
assert (PAD_HEAD, PAD_TAIL, PAD_EDGE) == (1, 2, 3)
assert (NEXT, ROLES) == (3, 4)


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _window(begin, length, steps, pad):  # type: ignore[no-untyped-def]
    """First existing step of a window, number of existing steps, and padding before them."""
    low = min(max(begin, 0), steps)
    count = max(min(begin + length, steps), low) - low
    if pad == PAD_HEAD:
        return low, count, length - count
    if pad == PAD_TAIL:
        return low, count, int64(0)
    return low, count, low - begin if count > 0 else length


@njit(inline="always")  # type: ignore[untyped-decorator]
def gather_windows(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
) -> int:
    """`gather`, where `rows` counts if `chosen`."""
    single, returns = True, False
    for c in range(columns.shape[0]):
        if columns[c, ROLE] == 0:
            single = single and columns[c, LENGTH] == 1 and columns[c, STEP_BYTES] <= SINGLE_BYTES
        else:
            returns = True
    if single:
        bad = gather_singles(
            columns, 0, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
        )
    else:
        bad = _gather_spans(
            columns, 0, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
        )
    if returns:
        bad += _gather_returns(
            columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen, True
        )
    return int64(bad)  # type: ignore[no-any-return]


@njit  # type: ignore[untyped-decorator]
def _gather_returns(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen, spans
) -> int:
    """Compute n-step returns, and gather what is delivered at their bootstrap steps; `spans`: see `gather_batch`."""
    bad, most, steps = 0, int64(0), np.empty(len(slots), dtype=np.int64)
    for c in range(columns.shape[0]):
        most = max(most, columns[c, ROLE])
    for number in range(most // ROLES + 1):
        bad += n_step(
            columns,
            number,
            slots,
            anchors,
            extent,
            block_ids,
            block_steps,
            first,
            last,
            rows,
            chosen,
            steps,
        )
        role = ROLES * number + NEXT
        if spans is None:
            bad += gather_singles(
                columns, role, slots, steps, extent, block_ids, block_steps, first, last, rows, chosen
            )
        else:
            bad += _gather_spans(
                columns, role, slots, steps, extent, block_ids, block_steps, first, last, rows, chosen
            )
    return bad


@njit(inline="always")  # type: ignore[untyped-decorator]
def _gather_spans(  # type: ignore[no-untyped-def]
    columns, role, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
) -> int:
    bad, waiting, row_bytes = 0, 0, 0
    table, groups = grouped(columns, role, block_steps)
    segments = segments_for()
    for c in range(table.shape[0]):
        row_bytes += table[c, LENGTH] * table[c, STEP_BYTES]
    streams = len(slots) * row_bytes >= STREAM_BATCH_BYTES
    for b in range(first - 2 * ROWS_AHEAD, last):
        near, far = b + ROWS_AHEAD, b + 2 * ROWS_AHEAD
        request_index(
            slots[near] if first <= near < last else -1, slots[far] if far < last else -1, extent, block_ids
        )
        if b < first:
            continue
        if slots[b] >= 0 and slots[b] < len(extent):
            steps, row, more = extent_of(extent, slots[b])
        else:
            steps, row, more, bad = int64(0), int64(0), int64(0), bad + 1
        target = rows[b] if chosen else b
        for g in range(groups.shape[0]):
            c, end = groups[g, BEGIN], groups[g, END]
            length, pad = table[c, LENGTH], table[c, PAD]
            stop = steps + more * table[c, FINAL]
            low, count, head = _window(anchors[b] + table[c, OFFSET], length, stop, pad)
            place = target * length
            edges = pad == PAD_EDGE and stop > 0
            if count < length and not edges:
                _fill_zeros(table, c, end, place, head, count, length)
            _fill_masks(table, c, end, place, head, count, length)
            for part in range(3 if edges and count < length else 1):
                # The steps that exist; with edges, the steps next to them before and after.
                begin, number, to = low, count, place + head
                if part == 1:
                    begin, number, to = min(low, stop - 1), head, place
                elif part == 2:
                    begin, number, to = low + count - 1, length - head - count, place + head + count
                waiting, wrong = add_span(
                    table,
                    c,
                    end,
                    groups[g, ADJOINS],
                    segments,
                    waiting,
                    row,
                    begin,
                    number,
                    to,
                    part > 0,
                    block_ids,
                    block_steps,
                    streams,
                )
                bad += wrong
    copy_segments(table, segments, waiting, streams)
    if streams:
        order_stores()
    return bad


@njit(inline="always")  # type: ignore[untyped-decorator]
def _fill_zeros(table, begin, end, place, head, count, length) -> None:  # type: ignore[no-untyped-def]
    """Fill the padding of a window."""
    for c in range(begin, end):
        size = table[c, STEP_BYTES]
        out = table[c, OUT] + place * size
        if head > 0:
            fill(out, 0, head * size)
        if head + count < length:
            fill(out + (head + count) * size, 0, (length - head - count) * size)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _fill_masks(table, begin, end, place, head, count, length) -> None:  # type: ignore[no-untyped-def]
    """Write which steps of a window exist."""
    for c in range(begin, end):
        if table[c, MASK] != 0:
            mask = table[c, MASK] + place
            if count == length:
                fill(mask, 1, length)
            else:
                fill(mask, 0, head)
                fill(mask + head, 1, count)
                fill(mask + head + count, 0, length - head - count)


@compiled
def gather(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows
):
    """Fill rows of a batch from entries `first` to `last - 1`: steps, padding and masks of every column.

    Args:
        columns: int64 [C, WIDTH], one row a column, as defined in `gear_loader.kernels.plan`; those of n-step returns
            as in `gear_loader.native.returns`.
        slots, anchors: int64 [n]. extent: int64 [T, 3]. block_ids: int32 [H]. block_steps: int.
        rows: int64 [n], entry b fills row ``rows[b]`` of the batch; None: row b.

    Returns:
        Number of windows of which a slot or block is invalid, 0 unless the index is corrupt. Its steps are zeros.
    """
    # An unused argument is an array of the right type.
    if rows is None:
        bad = gather_windows(
            columns, slots, anchors, extent, block_ids, block_steps, first, last, slots, False
        )
    else:
        bad = gather_windows(columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, True)
    return int64(bad)


@compiled
def gather_batch(  # type: ignore[no-untyped-def]
    columns, slots, anchors, generations, extent, block_ids, block_steps, names, spans, returns
):
    """`gather` all n entries; write their slots, anchors and generations to `names`, int64 [3, at least n].

    Of what is None less is compiled. Without columns only `names` are written.

    Args:
        spans: None if every window is one step of at most `SINGLE_BYTES`. Else all are treated as spans of steps.
        returns: None if there are no n-step returns.
    """
    for b in range(len(slots)):
        names[0, b], names[1, b], names[2, b] = slots[b], anchors[b], generations[b]
    count = len(slots)
    if columns.shape[0] == 0:
        return 0
    if spans is None:
        bad = gather_singles(
            columns, 0, slots, anchors, extent, block_ids, block_steps, 0, count, slots, False
        )
    else:
        bad = _gather_spans(
            columns, 0, slots, anchors, extent, block_ids, block_steps, 0, count, slots, False
        )
    if returns is not None:
        bad += _gather_returns(
            columns, slots, anchors, extent, block_ids, block_steps, 0, count, slots, False, spans
        )
    return int64(bad)


@compiled
def place(pieces, rows) -> None:  # type: ignore[no-untyped-def]
    """Copy contiguous rows to rows of a batch.

    Args:
        pieces: int64 [P, 3], address of the rows, address of row 0 of the output, bytes of a row.
        rows: int64 [n], output row of row b of each piece.
    """
    for p in range(pieces.shape[0]):
        source, out, row_bytes = pieces[p, 0], pieces[p, 1], pieces[p, 2]
        for b in range(len(rows)):
            copy_bytes(out + rows[b] * row_bytes, source + b * row_bytes, row_bytes)


@compiled
def resolve(  # type: ignore[no-untyped-def]
    slots, anchors, extent, block_ids, block_steps, first, last, out_extent, out_ids, num_blocks, once
) -> int:
    """Copy the index entries of a batch's windows, so that a GPU does not read the index.

    Args:
        slots, anchors: int64 [B]. extent: int64 [T, 3]. block_ids: int32 [H]. block_steps: int.
        first, last: first and last step of all windows, relative to the anchor.
        out_extent: int64 [B, 3], output: length in steps; position in `out_ids` of the trajectory's first block,
            negative if that block is before the windows, which alone are copied; number of final steps.
        out_ids: int32 [B, K], output: blocks of the windows; the last one again in the places that are left.
        num_blocks: number of blocks of the table.
        once: whether the last of the K blocks is the trajectory's first, which has the values per trajectory; the
            windows then touch at most K - 1.

    Returns:
        Number of invalid slots, block tables and blocks, 0 unless the index is corrupt. Their blocks are 0.
    """
    count, width, bad = len(slots), out_ids.shape[1], 0
    inside, each = width - 1 if once else width, uint64(block_steps)  # signed, a division takes twice as long
    for b in range(-2 * ROWS_AHEAD, count):
        near, far = b + ROWS_AHEAD, b + 2 * ROWS_AHEAD
        request_index(
            slots[near] if 0 <= near < count else -1, slots[far] if far < count else -1, extent, block_ids
        )
        if b < 0:
            continue
        steps, row, more = int64(1), int64(-1), int64(0)
        if slots[b] >= 0 and slots[b] < len(extent):
            steps, row, more = extent_of(extent, slots[b])
        # Of a column without final steps, a window after the last step shows that step.
        low = int64(uint64(min(max(anchors[b] + first, 0), steps - 1)) // each)
        high = int64(uint64(min(max(anchors[b] + last, 0), steps + more - 1)) // each)
        out_extent[b, 0] = steps
        out_extent[b, 2] = more
        out_extent[b, 1] = b * width - low
        # All places, the last block again after the last one: how many a window touches would be predicted wrongly.
        for i in range(inside):
            out_ids[b, i], wrong = _checked(block_ids, row + min(low + i, high), num_blocks)
            bad += wrong
        if once:
            out_ids[b, inside], wrong = _checked(block_ids, row, num_blocks)
            bad += wrong
    return bad


@njit(inline="always")
def _checked(block_ids, place, num_blocks):  # type: ignore[no-untyped-def]
    """The block at a place of the block tables, and 0; or 0, and 1 for an invalid place or block."""
    inside = uint64(place) < uint64(len(block_ids))  # so are negative ones outside
    number = int64(block_ids[uint64(place)]) if inside else int64(-1)
    good = uint64(number) < uint64(num_blocks)
    return number if good else int64(0), int64(0) if good else int64(1)
