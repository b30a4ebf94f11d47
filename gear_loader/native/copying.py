"""The compiled loops of the CPU path (numba) that copy steps to and from the blocks of a table.

The arguments are raw addresses, which the callers have checked. The loops release the GIL, so that several threads can
copy at once.
"""

from __future__ import annotations

import numpy as np
from numba import carray, int64, njit

from gear_loader.native.compile import compiled
from gear_loader.native.lanes import LANE_HELD, LANE_STEPS, LANE_WIDTH
from gear_loader.native.memory import (
    copy_apart,
    copy_bytes,
    copy_past_caches,
    copy_step,
    order_stores,
    pointer,
    prefetch,
)

assert (LANE_STEPS, LANE_HELD, LANE_WIDTH) == (2, 3, 8)  # compiled into the cached machine code

STREAM_BYTES = 1 << 18
"""Smallest copy in bytes that bypasses the caches, because new data are not read soon. Copies of 420 KB to 42 MB take
0.66 to 0.92 of memcpy's time on a Xeon with 105 MiB L3."""


@compiled
def scatter(columns, block_steps, ids, addresses, lengths) -> None:  # type: ignore[no-untyped-def]
    """Copy trajectories into their blocks.

    Args:
        columns: int64 [C, 4], address of the column's first step, bytes from block to block, bytes of a step, bytes
            from step to step. If the second is negative, a trajectory has one value, which goes to its first block.
        block_steps: steps of a block.
        ids: int32 [blocks], blocks of the trajectories, one trajectory after another.
        addresses: int64 [n, C], address of the contiguous steps of each trajectory in each column.
        lengths: int64 [n], in steps.
    """
    first, total = 0, 0
    for i in range(len(lengths)):
        total += lengths[i]
    streams = total * columns[:, 2].sum() >= STREAM_BYTES
    for i in range(len(lengths)):
        blocks = (lengths[i] + block_steps - 1) // block_steps
        for c in range(columns.shape[0]):
            base, stride, step_bytes, every = columns[c, 0], columns[c, 1], columns[c, 2], columns[c, 3]
            if stride < 0:
                copy_bytes(base - int64(ids[first]) * stride, addresses[i, c], step_bytes)
                continue
            if every != step_bytes:
                continue
            block_bytes = block_steps * step_bytes
            for j in range(blocks):
                count = min(block_steps, lengths[i] - j * block_steps) * step_bytes
                target = base + int64(ids[first + j]) * stride
                source = addresses[i, c] + j * block_bytes
                if streams:
                    copy_past_caches(target, source, count)
                else:
                    copy_bytes(target, source, count)
        # Block by block, so that the lines of the records are written while they are in the cache.
        for j in range(blocks):
            count = min(block_steps, lengths[i] - j * block_steps)
            for c in range(columns.shape[0]):
                stride, step_bytes, every = columns[c, 1], columns[c, 2], columns[c, 3]
                if every != step_bytes:
                    target = columns[c, 0] + int64(ids[first + j]) * stride
                    source = addresses[i, c] + j * block_steps * step_bytes
                    copy_apart(target, every, source, step_bytes, count, step_bytes)
        first += blocks
    if streams:
        order_stores()


@compiled
def copy_spans(column, begins, counts, outs) -> None:  # type: ignore[no-untyped-def]
    """Copy spans of steps out of blocks that follow one another.

    Args:
        column: int64 [5], as for `copy_rows`. begins: int64 [n], first step of each span, of those of all blocks.
        counts: int64 [n], steps of each. outs: int64 [n], address at which each goes, one step after another.
    """
    base, stride, size, every, block_steps = column[0], column[1], column[2], column[3], column[4]
    for i in range(len(begins)):
        done = 0
        while done < counts[i]:
            block = (begins[i] + done) // block_steps
            inside = begins[i] + done - block * block_steps
            count = min(block_steps - inside, counts[i] - done)
            source, target = base + block * stride + inside * every, outs[i] + done * size
            if every == size:
                copy_bytes(target, source, count * size)
            else:
                copy_apart(target, size, source, every, count, size)
            done += count


@compiled
def copy_rows(  # type: ignore[no-untyped-def]
    address, low, high, first, ends, before, places, ids, column, into
) -> None:
    """Copy bytes of a file that holds trajectories one after another (gaps allowed) to or from their blocks.

    Args:
        address: of the buffer that holds bytes `low` to `high` - 1 of the file's rows.
        first, ends: int64 [n], ascending: first row of each trajectory, and the row after its last.
        before: int64 [n], its steps that the file does not have: those before the first row; [0] if there are none.
        places: int64 [n], where each trajectory's blocks begin in `ids`; -1 for one that is left out.
        ids: int32, blocks.
        column: int64 [5]: address of the column's first step, bytes from block to block, bytes of a step, bytes from
            step to step, steps of a block.
        into: copy into the blocks; else out of them.
    """
    base, stride, size, every, block_steps = column[0], column[1], column[2], column[3], column[4]
    i = np.searchsorted(ends, low // size, side="right")
    while i < len(first) and first[i] * size < high:
        start, stop = max(low, first[i] * size), min(high, ends[i] * size)
        zero = first[i] - (before[i] if len(before) > 0 else 0)  # where the row of its first step would be
        while places[i] >= 0 and start < stop:
            step = start // size - zero
            part = start - (zero + step) * size  # bytes of this step that precede `start`
            block = step // block_steps
            limit = min(stop, (zero + (block + 1) * block_steps) * size)
            here = base + int64(ids[places[i] + block]) * stride + (step - block * block_steps) * every + part
            there = address + start - low
            if every == size:
                count = limit - start
            elif part > 0 or limit - start < size:
                count = min(size - part, limit - start)
            else:
                count = (limit - start) // size * size
                if into:
                    copy_apart(here, every, there, size, count // size, size)
                else:
                    copy_apart(there, size, here, every, count // size, size)
                start += count
                continue
            if into:
                copy_bytes(here, there, count)
            else:
                copy_bytes(there, here, count)
            start += count
        i += 1


# Request to `append_rows`, int64: this head, the columns as for `scatter` [C, 4], sources as for `copy_steps` [C, 2],
# and the lanes [n, LANE_WIDTH]. Of the head: number of environments and of columns; steps of a block; addresses of
# the masks `active` and `done`, bool [n], or 0 (all are active, none is done); steps of a chunk, or 0; address of the
# blocks of each lane, int32 [n, width], and that width.
(
    ROWS_COUNT,
    ROWS_COLUMNS,
    ROWS_BLOCK_STEPS,
    ROWS_ACTIVE,
    ROWS_DONE,
    ROWS_CHUNK,
    ROWS_BLOCKS,
    ROWS_WIDTH,
    ROWS_HEAD,
) = range(9)
_AHEAD, _LINES_AHEAD = 16, 8
"""Environments whose place in memory is requested before the row of the first of them is copied; lines a column."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def copy_steps(columns, block, inside, sources, row, first, count) -> None:  # type: ignore[no-untyped-def]
    """Copy steps of each column into one block.

    Args:
        columns: int64 [C, 4], as for `scatter`. block, inside: the block, and the first step within it.
        sources: int64 [C, 2], address of contiguous steps of each column, and bytes from one lane's to the next's.
        row: the lane. first: its first step that is copied. count: number of steps, which the block has room for.
    """
    for c in range(columns.shape[0]):
        step_bytes, every = columns[c, 2], columns[c, 3]
        target = columns[c, 0] + block * columns[c, 1] + inside * every
        source = sources[c, 0] + row * sources[c, 1] + first * step_bytes
        if every == step_bytes:
            copy_bytes(target, source, count * step_bytes)
        else:
            copy_apart(target, every, source, step_bytes, count, step_bytes)


@njit(inline="always")
def place_of(columns, c, block, inside):  # type: ignore[no-untyped-def]
    """Address of a step in a block; `columns` as for `scatter`."""
    return columns[c, 0] + block * columns[c, 1] + inside * columns[c, 3]


@njit(inline="always")  # type: ignore[untyped-decorator]
def put_step(target, source, size) -> None:  # type: ignore[no-untyped-def]
    """`copy_step`, also for Python."""
    copy_step(target, source, size)


@njit(inline="always")
def row_of(sources, c, lane, row):  # type: ignore[no-untyped-def]
    """Address of a lane's row: sources are int64 [C, 3], address of the rows of each column, bytes from one lane's to
    the next's, and bytes from row to row."""
    return sources[c, 0] + lane * sources[c, 1] + row * sources[c, 2]


@njit(inline="always")  # type: ignore[untyped-decorator]
def is_zero(address, count) -> bool:  # type: ignore[no-untyped-def]
    """Whether all bytes at an address are zero."""
    return not carray(pointer(address), (count,), np.uint8).any()


@compiled
def put_rows(  # type: ignore[no-untyped-def]
    columns, block_steps, lanes, blocks, chosen, sources, first, count, at
) -> None:
    """Copy steps into the blocks of the open trajectories of lanes, which have room for them; they are not counted.

    Args:
        columns, block_steps: as for `scatter`. lanes: int64 [n, LANE_WIDTH]. blocks: int32 [n, W], blocks of each.
        chosen: int64 [m], the lanes. sources, first, count: as for `copy_steps`.
        at: the step at which they are written; -1 for behind the steps of each lane.
    """
    for j in range(len(chosen)):
        i = chosen[j]
        step = lanes[i, LANE_STEPS] if at < 0 else at
        done = 0
        while done < count:
            place = (step + done) // block_steps
            inside = step + done - place * block_steps
            steps = min(block_steps - inside, count - done)
            copy_steps(columns, int64(blocks[i, place]), inside, sources, i, first + done, steps)
            done += steps


@compiled
def copy_common(columns, block_steps, source, first, target, count) -> None:  # type: ignore[no-untyped-def]
    """Copy `count` steps of a trajectory, from step `first` on, to the beginning of another one.

    Args:
        columns, block_steps: as for `scatter`. source, target: int32, the blocks of the trajectories.
    """
    for c in range(columns.shape[0]):
        base, stride, step_bytes, every = columns[c, 0], columns[c, 1], columns[c, 2], columns[c, 3]
        for done in range(count):
            step = first + done
            old, new = step // block_steps, done // block_steps
            old_place = base + int64(source[old]) * stride + (step - old * block_steps) * every
            new_place = base + int64(target[new]) * stride + (done - new * block_steps) * every
            copy_bytes(new_place, old_place, step_bytes)


@compiled
def append_rows(request):  # type: ignore[no-untyped-def]
    """Copy one row for each of n environments to the next step of its trajectory, and count it.

    Args:
        request: int64, as described above.

    Returns:
        Number of environments that are done, or have a complete chunk; -1, having counted nothing, if an active one has
        no room.
    """
    count, width, block_steps = request[ROWS_COUNT], request[ROWS_COLUMNS], request[ROWS_BLOCK_STEPS]
    rows = ROWS_HEAD + 4 * width
    columns = request[ROWS_HEAD:rows].reshape((width, 4))
    sources = request[rows : rows + 2 * width].reshape((width, 2))
    lanes = request[rows + 2 * width : rows + 2 * width + count * LANE_WIDTH].reshape((count, LANE_WIDTH))
    blocks = carray(pointer(request[ROWS_BLOCKS]), (count, request[ROWS_WIDTH]), np.int32)
    every, none = request[ROWS_ACTIVE] == 0, request[ROWS_DONE] == 0
    chunk = request[ROWS_CHUNK]
    # An unused mask is never read: any valid address will do.
    spare = request.ctypes.data
    active = carray(pointer(spare if every else request[ROWS_ACTIVE]), (count,), np.uint8)
    done = carray(pointer(spare if none else request[ROWS_DONE]), (count,), np.uint8)
    for i in range(count):
        if (every or active[i] != 0) and lanes[i, LANE_STEPS] >= lanes[i, LANE_HELD]:
            return -1
    due = 0
    for i in range(-_AHEAD, count):
        later = i + _AHEAD
        if later < count and (every or active[later] != 0):
            step = lanes[later, LANE_STEPS]
            place = step // block_steps
            block, inside = int64(blocks[later, place]), step - place * block_steps
            for c in range(width):
                target = columns[c, 0] + block * columns[c, 1] + inside * columns[c, 3]
                for line in range(min((columns[c, 2] + 63) // 64, _LINES_AHEAD)):
                    prefetch(target + 64 * line)
        if i < 0 or not (every or active[i] != 0):
            continue
        step = lanes[i, LANE_STEPS]
        place = step // block_steps
        block, inside = int64(blocks[i, place]), step - place * block_steps
        for c in range(width):
            step_bytes = columns[c, 2]
            target = columns[c, 0] + block * columns[c, 1] + inside * columns[c, 3]
            copy_step(target, sources[c, 0] + i * sources[c, 1], step_bytes)
        lanes[i, LANE_STEPS] = step + 1
        due += (not none and done[i] != 0) or step + 1 == chunk
    return due
