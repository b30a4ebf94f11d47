"""The compiled loops of the CPU path (numba) that gather the windows of a batch out of the blocks of a table.

The arguments are raw addresses, which the callers have checked. The loops release the GIL, so that several threads can
copy at once.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit

from gear_loader.kernels.plan import (
    BASE,
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
    STEP_BYTES,
    STEP_STRIDE,
    STRIDE,
    WIDTH,
)
from gear_loader.native.compile import compiled
from gear_loader.native.memory import (
    atomic_load,
    copy_apart,
    copy_bytes,
    copy_past_caches,
    copy_step,
    fill,
    order_stores,
    prefetch,
)

__all__ = ["STREAM_BATCH_BYTES", "extent_of", "gather", "gather_batch", "gather_rows", "place", "resolve"]


STREAM_BATCH_BYTES = 1 << 22
"""Bytes of a batch from which on its rows are written past the caches: by the time that the batch is read, others have
been gathered. Whole trajectories of 42 KB, 256 and 1,024 a batch, take 0.8 of the time on an EPYC with 32 MiB of L3,
also where the batch is read at once."""
_AHEAD = 32
"""Rows of single steps whose places are fetched into the cache before they are copied."""
_SINGLE_BYTES = 1 << 12
"""Largest single steps that are: larger ones are copied at the speed of memory anyhow."""
assert (BASE, STRIDE, STEP_BYTES, OUT, LENGTH, OFFSET, PAD, MASK) == (0, 1, 2, 3, 4, 5, 6, 7)
assert (BLOCKS, FINAL, STEP_STRIDE, WIDTH) == (9, 10, 11, 12)
assert (PAD_HEAD, PAD_TAIL, PAD_EDGE) == (1, 2, 3)


@njit(inline="always")
def _window(begin, length, steps, pad):  # type: ignore[no-untyped-def]
    """First existing step of a window, number of existing steps, and padding before them."""
    low = min(max(begin, 0), steps)
    count = max(min(begin + length, steps), low) - low
    if pad == PAD_HEAD:
        return low, count, length - count
    if pad == PAD_TAIL:
        return low, count, 0
    return low, count, low - begin if count > 0 else length


# Inlined: as a function call, it costs benchmark W2 a fifth of its speed.
@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy_steps(  # type: ignore[no-untyped-def]
    target, base, stride, step_bytes, every, blocks, low, count, block_ids, row, block_steps, streams
) -> bool:
    """Copy steps `low` to `low + count - 1` of a trajectory out of its blocks of one column.

    Args:
        every: bytes from step to step in a block. streams: write past the caches.

    Returns:
        False if its block table has an invalid place or block; then some steps may have been copied.
    """
    step, end = low, low + count
    while step < end:
        block = step // block_steps
        inside = step - block * block_steps
        take = min(block_steps - inside, end - step)
        place = row + block
        if place < 0 or place >= len(block_ids):
            return False
        number = int64(block_ids[place])
        if number < 0 or number >= blocks:
            return False
        source = base + number * stride + inside * every
        size = take * step_bytes
        if every != step_bytes:
            copy_apart(target, step_bytes, source, every, take, step_bytes)
        elif streams and size >= 1024:
            copy_past_caches(target, source, size)
        else:
            copy_bytes(target, source, size)
        target += size
        step += take
    return True


@njit  # type: ignore[untyped-decorator]
def _fill_edges(  # type: ignore[no-untyped-def]
    begin, head, tail, base, stride, step_bytes, every, blocks, near, block_ids, row, block_steps, length
) -> bool:
    """Fill the padding of a window at `begin`, whose steps are copied, with the steps next to it.

    Args:
        near: if no step of the window exists, the one next to it.

    Returns:
        False as `_copy_steps`.
    """
    if head == length:
        if not _copy_steps(
            begin, base, stride, step_bytes, every, blocks, near, 1, block_ids, row, block_steps, False
        ):
            return False
        head, tail = 0, length - 1
    for i in range(head):
        copy_bytes(begin + i * step_bytes, begin + head * step_bytes, step_bytes)
    for i in range(length - tail, length):
        copy_bytes(begin + i * step_bytes, begin + (length - tail - 1) * step_bytes, step_bytes)
    return True


@njit(inline="always")
def extent_of(extent, slot):  # type: ignore[no-untyped-def]
    """Length, place of the block table, and final steps of a trajectory, which may grow meanwhile.

    The place is read last: a trajectory that grows gets its new place first. A new length with the old place would lead
    to the next entry there, which is another trajectory's.
    """
    address = extent.ctypes.data + 24 * slot
    steps, more = atomic_load(address), atomic_load(address + 16)
    return steps, atomic_load(address + 8), more


@njit(inline="always")
def _step_address(  # type: ignore[no-untyped-def]
    columns, c, anchor, block, inside, steps, row, more, block_ids, block_steps
):
    """Address of the step that a window of one step shows, and whether it exists; 0 for one of zeros, -1 if the block
    table is invalid.

    Args:
        anchor, block, inside: the anchor, its block and its step within the block.
        steps, row, more: of the trajectory, as in `extent`.
    """
    step = anchor + columns[c, OFFSET]
    end = steps + more * columns[c, FINAL]
    exists = 0 <= step < end
    if not exists:
        if columns[c, PAD] != PAD_EDGE or end <= 0:
            return int64(0), False
        step = min(max(step, 0), end - 1)
    apart = step - anchor
    inside += apart
    if apart < -block_steps or apart > block_steps:
        block = step // block_steps
        inside = step - block * block_steps
    elif inside >= block_steps:
        block, inside = block + 1, inside - block_steps
    elif inside < 0:
        block, inside = block - 1, inside + block_steps
    place = row + block
    if place < 0 or place >= len(block_ids):
        return int64(-1), False
    number = int64(block_ids[place])
    if number < 0 or number >= columns[c, BLOCKS]:
        return int64(-1), False
    return columns[c, BASE] + number * columns[c, STRIDE] + inside * columns[c, STEP_STRIDE], exists


@njit
def _beside(columns):  # type: ignore[no-untyped-def]
    """An earlier column of the same record and window, in whose line the step of each column lies; or -1."""
    found = np.full(columns.shape[0], -1, dtype=np.int64)
    for c in range(columns.shape[0]):
        for d in range(c):
            same = abs(columns[c, BASE] - columns[d, BASE]) < columns[c, STEP_STRIDE]
            for field in (STRIDE, STEP_STRIDE, OFFSET, PAD, FINAL):
                same = same and columns[c, field] == columns[d, field]
            if same:
                found[c] = d
                break
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def _gather_single(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
) -> int:
    """`gather_rows` of windows of one step each.

    The places of some rows are found first and fetched into the cache, all at the same time, then they are copied.
    """
    bad, width = 0, columns.shape[0]
    places = np.empty((_AHEAD, width), dtype=np.int64)
    there = np.empty((_AHEAD, width), dtype=np.uint8)
    beside = _beside(columns)
    for begin in range(first, last, _AHEAD):
        count = min(_AHEAD, last - begin)
        for i in range(count):
            slot, anchor = slots[begin + i], anchors[begin + i]
            if slot >= 0 and slot < len(extent):
                steps, row, more = extent_of(extent, slot)
            else:
                steps, row, more, bad = int64(0), int64(0), int64(0), bad + 1
            block = anchor // block_steps
            inside = anchor - block * block_steps
            for c in range(width):
                before = beside[c]
                if before >= 0 and places[i, before] != 0:
                    places[i, c] = places[i, before] + columns[c, BASE] - columns[before, BASE]
                    there[i, c] = there[i, before]
                    continue
                place, exists = _step_address(
                    columns, c, anchor, block, inside, steps, row, more, block_ids, block_steps
                )
                if place < 0:
                    place, bad = int64(0), bad + 1
                prefetch(place)  # which may be any address
                places[i, c], there[i, c] = place, exists
        for i in range(count):
            target = rows[begin + i] if chosen else begin + i
            for c in range(width):
                step_bytes = columns[c, STEP_BYTES]
                out = columns[c, OUT] + target * step_bytes
                if places[i, c] != 0:
                    copy_step(out, places[i, c], step_bytes)
                else:
                    fill(out, 0, step_bytes)
                if columns[c, MASK] != 0:
                    fill(columns[c, MASK] + target, int64(there[i, c]), 1)
    return bad


@njit(inline="always")  # type: ignore[untyped-decorator]
def gather_rows(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
) -> int:
    bad = 0
    if columns[:, LENGTH].max() == 1 and columns[:, STEP_BYTES].max() <= _SINGLE_BYTES:
        bad += _gather_single(
            columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
        )
        return int64(bad)  # type: ignore[no-any-return]
    streams = len(slots) * (columns[:, LENGTH] * columns[:, STEP_BYTES]).sum() >= STREAM_BATCH_BYTES
    for b in range(first, last):
        if slots[b] >= 0 and slots[b] < len(extent):
            steps, row, more = extent_of(extent, slots[b])
        else:
            steps, row, more, bad = int64(0), int64(0), int64(0), bad + 1
        target = rows[b] if chosen else b
        for c in range(columns.shape[0]):
            step_bytes, length = columns[c, STEP_BYTES], columns[c, LENGTH]
            end = steps + more * columns[c, FINAL]
            low, count, head = _window(anchors[b] + columns[c, OFFSET], length, end, columns[c, PAD])
            begin = columns[c, OUT] + target * length * step_bytes
            out = begin
            if head > 0:
                fill(out, 0, head * step_bytes)
            out += head * step_bytes
            base, stride, blocks = columns[c, BASE], columns[c, STRIDE], columns[c, BLOCKS]
            every = columns[c, STEP_STRIDE]
            if not _copy_steps(
                out, base, stride, step_bytes, every, blocks, low, count, block_ids, row, block_steps, streams
            ):
                fill(begin, 0, length * step_bytes)
                bad += 1
            tail = length - head - count
            if tail > 0:
                fill(out + count * step_bytes, 0, tail * step_bytes)
            if columns[c, PAD] == PAD_EDGE and count < length and end > 0:
                near = min(low, end - 1)
                if not _fill_edges(
                    begin,
                    head,
                    tail,
                    base,
                    stride,
                    step_bytes,
                    every,
                    blocks,
                    near,
                    block_ids,
                    row,
                    block_steps,
                    length,
                ):
                    bad += 1
            mask = columns[c, MASK]
            if mask != 0:
                mask += target * length
                fill(mask, 0, head)
                fill(mask + head, 1, count)
                fill(mask + head + count, 0, tail)
    if streams:
        order_stores()
    return bad


@compiled
def gather(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows=None
):
    """Fill rows of a batch from entries `first` to `last - 1`: steps, padding and masks of every column.

    Args:
        columns: int64 [C, WIDTH], one row a column, as defined in `gear_loader.kernels.plan`.
        slots, anchors: int64 [n]. extent: int64 [T, 3]. block_ids: int32 [H]. block_steps: int.
        rows: int64 [n], entry b fills row ``rows[b]`` of the batch; None: row b.

    Returns:
        Number of invalid slots, block tables and blocks, 0 unless the index is corrupt. Their windows are zeros.
    """
    # An unused argument is an array of the right type.
    if rows is None:
        bad = gather_rows(columns, slots, anchors, extent, block_ids, block_steps, first, last, slots, False)
    else:
        bad = gather_rows(columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, True)
    return int64(bad)


@compiled
def gather_batch(  # type: ignore[no-untyped-def]
    columns, slots, anchors, generations, extent, block_ids, block_steps, names
):
    """`gather` all n entries; write their slots, anchors and generations to `names`, int64 [3, at least n]."""
    for b in range(len(slots)):
        names[0, b], names[1, b], names[2, b] = slots[b], anchors[b], generations[b]
    bad = gather_rows(columns, slots, anchors, extent, block_ids, block_steps, 0, len(slots), slots, False)
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
    slots, anchors, extent, block_ids, block_steps, first, last, out_extent, out_ids, num_blocks, once=False
) -> int:
    """Copy the index entries of a batch's windows, so that a GPU does not read the index.

    Args:
        slots, anchors: int64 [B]. extent: int64 [T, 3]. block_ids: int32 [H]. block_steps: int.
        first, last: first and last step of all windows, relative to the anchor.
        out_extent: int64 [B, 3], output: length in steps; position in `out_ids` of the trajectory's first block,
            negative if that block is before the windows, which alone are copied; number of final steps.
        out_ids: int32 [B, K], output: blocks of the windows.
        num_blocks: number of blocks of the table.
        once: whether the last of the K blocks is the trajectory's first, which has the values per trajectory; the
            windows then touch at most K - 1.

    Returns:
        Number of invalid slots, block tables and blocks, 0 unless the index is corrupt. Their blocks are 0.
    """
    width, bad = out_ids.shape[1], 0
    for b in range(len(slots)):
        steps, row, more = int64(1), int64(-1), int64(0)
        if slots[b] >= 0 and slots[b] < len(extent):
            steps, row, more = extent_of(extent, slots[b])
        # Of a column without final steps, a window after the last step shows that step.
        low = min(max(anchors[b] + first, 0), steps - 1) // block_steps
        high = min(max(anchors[b] + last, 0), steps + more - 1) // block_steps
        out_extent[b, 0] = steps
        out_extent[b, 2] = more
        out_extent[b, 1] = b * width - low
        for i in range(min(high - low + 1, width)):
            place = row + low + i
            number = block_ids[place] if place >= 0 and place < len(block_ids) else -1
            if number < 0 or number >= num_blocks:
                number, bad = 0, bad + 1
            out_ids[b, i] = number
        if once:
            number = block_ids[row] if row >= 0 and row < len(block_ids) else -1
            if number < 0 or number >= num_blocks:
                number, bad = 0, bad + 1
            out_ids[b, width - 1] = number
    return bad
