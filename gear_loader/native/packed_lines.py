"""The work of a packed batch, from which a GPU gathers it: its pieces and lines (numba).

A piece is a run of steps of one row that lie side by side in every column; `gear_loader.kernels.packed_plan` tells what
the memory of a batch's work holds.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit

from gear_loader.kernels import packed_plan, plan
from gear_loader.native.compile import compiled
from gear_loader.native.packed import measure
from gear_loader.native.spans import extent_of

_LINE = 128
_TILE = 128
_BLOCK, _FIRST, _STEPS, _OUT, _NUMBER, _PIECE = 0, 1, 2, 3, 4, 5
_BASE, _STEP_BYTES, _ONCE, _WORDS, _COLUMN, _TABLE = 0, 2, 4, 5, 4, 6
_HEADER = 16
assert (_LINE, _TILE) == (plan.LINE, packed_plan.TILE_LINES)
assert (_BLOCK, _FIRST, _STEPS, _OUT, _NUMBER, _PIECE) == (
    packed_plan.PIECE_BLOCK,
    packed_plan.PIECE_FIRST,
    packed_plan.PIECE_STEPS,
    packed_plan.PIECE_OUT,
    packed_plan.PIECE_NUMBER,
    packed_plan.PIECE_WIDTH,
)
assert (_BASE, _STEP_BYTES, _ONCE, _WORDS, _COLUMN, _TABLE) == (
    packed_plan.PACKED_BASE,
    packed_plan.PACKED_STEP_BYTES,
    packed_plan.TABLE_ONCE,
    packed_plan.TABLE_WORDS,
    packed_plan.PACKED_WIDTH,
    packed_plan.TABLE_WIDTH,
)
assert _HEADER == packed_plan.WORK_WIDTH
assert tuple(range(10)) == (
    packed_plan.WORK_END_16,
    packed_plan.WORK_END_4,
    packed_plan.WORK_LINE_TILES,
    packed_plan.WORK_NUM_TILES,
    packed_plan.WORK_COLUMNS,
    packed_plan.WORK_TILES,
    packed_plan.WORK_GROUPS,
    packed_plan.WORK_PIECES,
    packed_plan.WORK_STEPS,
    packed_plan.WORK_ROWS,
)
# A source of rows: int64 [SOURCE_WIDTH]. Its pieces of steps, its pieces of values per trajectory, its columns.
SOURCE_STEPS, SOURCE_STEPS_END, SOURCE_ONCE, SOURCE_ONCE_END, SOURCE_COLUMNS, SOURCE_COLUMNS_END = range(6)
SOURCE_WIDTH = 6
# What `plan_rows` tells: int64 [PLANNED_WIDTH].
PLANNED_STEPS, PLANNED_LONGEST, PLANNED_BAD, PLANNED_PIECES, PLANNED_WORDS = range(5)
PLANNED_WIDTH = 5
_GROUPED = 8
"""Groups have several lines where pieces have at least so many times as many: few lines then do nothing."""
_MOST_GROUPED = 5  # log2 of the most lines of a group
_NOWHERE = 1 << 30  # number of a line after the last of any piece
_TILE_SHIFT = 7  # log2 of the lines of a tile
assert 1 << _TILE_SHIFT == _TILE
_NUMBERS = 4  # bytes of a step of `position`


@compiled
def list_pieces(  # type: ignore[no-untyped-def]
    slots, spans, starts, extent, block_ids, block_steps, num_blocks, adjoin, once, pieces
):
    """List the pieces of rows, and after them one of each row with the values of its trajectory.

    Args:
        slots: int64 [n]. spans: int64 [2, n], first step and number of steps of each row.
        starts: int32 [at least n], place of each row's first step in the batch.
        extent: int64 [T, 3]. block_ids: int32 [H]. block_steps: steps of a block. num_blocks: a block id is below it.
        adjoin: whether a block's last step lies before the first of the next one, in every column.
        once: whether there are columns per trajectory.
        pieces: int32 [at least sum(steps // block_steps + 2) + n, PIECE_WIDTH], output.

    Returns:
        Number of pieces of steps; of invalid slots and blocks, 0 unless the index is corrupt.
    """
    count, bad = 0, 0
    for b in range(len(slots)):
        if slots[b] < 0 or slots[b] >= len(extent):
            bad += 1
            continue
        _, row, _ = extent_of(extent, slots[b])
        low, end = spans[0, b], spans[0, b] + spans[1, b]
        step = low
        while step < end:
            block = step // block_steps
            inside = step - block * block_steps
            take = min(block_steps - inside, end - step)
            number = _block(block_ids, row + block, num_blocks)
            if number < 0:
                bad += 1
                break
            following = number + 1
            while (
                adjoin
                and step + take < end
                and _block(block_ids, row + block + following - number, num_blocks) == following
            ):
                take += min(block_steps, end - step - take)
                following += 1
            pieces[count, _BLOCK], pieces[count, _FIRST], pieces[count, _STEPS] = number, inside, take
            pieces[count, _OUT], pieces[count, _NUMBER] = starts[b] + step - low, step
            count += 1
            step += take
    if once and not bad:
        for b in range(len(slots)):
            _, row, _ = extent_of(extent, slots[b])
            number = _block(block_ids, row, num_blocks)
            if number < 0:
                bad += 1
            pieces[count + b, _BLOCK], pieces[count + b, _FIRST], pieces[count + b, _STEPS] = number, 0, 1
            pieces[count + b, _OUT], pieces[count + b, _NUMBER] = b, 0
    return count, bad


@compiled
def list_work(pieces, sources, columns, steps, rows, memory, header, first):  # type: ignore[no-untyped-def]
    """Write the work of a launch: its header, columns, tiles, groups and pieces.

    Args:
        pieces: int32 [P, PIECE_WIDTH], of all sources. sources: int64 [S, SOURCE_WIDTH].
        columns: int64 [C, TABLE_WIDTH], of all sources.
        steps, rows: of the batch.
        memory: int64 [words], output. header: where the header goes. first: where the lists go.

    Returns:
        The word after the last one. If that is more than there are, nothing was written.
    """
    # Of each column: log2 of the lines of a group, number of groups, and the first of them; of `position` at the end.
    shifts = np.zeros(len(columns) + 1, dtype=np.int64)
    counts, begins = np.zeros_like(shifts), np.zeros_like(shifts)
    groups, tiles = int64(0), int64(0)
    for s in range(len(sources)):
        for c in range(sources[s, SOURCE_COLUMNS], sources[s, SOURCE_COLUMNS_END]):
            like = _first_like(columns, sources[s, SOURCE_COLUMNS], c)
            if like < c:  # its groups are listed already
                shifts[c], counts[c], begins[c] = shifts[like], counts[like], begins[like]
            else:
                begin, end = _pieces_of(sources, s, columns[c, _ONCE])
                lines = _count_lines(pieces, begin, end, columns[c, _STEP_BYTES], False)
                shifts[c] = _shift(lines, end - begin)
                begins[c] = groups
                number = _count_groups(pieces, begin, end, columns[c, _STEP_BYTES], False, shifts[c])
                counts[c] = _whole(number, shifts[c])
                groups += counts[c]
            tiles += (counts[c] << shifts[c]) // _TILE
    n, lines, number, some = len(columns), int64(0), int64(0), int64(0)
    for s in range(len(sources)):
        begin, end = _pieces_of(sources, s, 0)
        lines += _count_lines(pieces, begin, end, _NUMBERS, True)
        some += end - begin
    shifts[n] = _shift(lines, some)
    begins[n] = groups
    for s in range(len(sources)):
        begin, end = _pieces_of(sources, s, 0)
        number += _count_groups(pieces, begin, end, _NUMBERS, True, shifts[n])
    counts[n] = _whole(number, shifts[n])
    groups += counts[n]
    line_tiles = tiles
    tiles += (counts[n] << shifts[n]) // _TILE

    # One tile can always be read, with a group for all of its lines, and a piece.
    o_tiles = first + len(columns) * _COLUMN
    o_groups = o_tiles + max(tiles, 1)
    o_pieces = o_groups + max(groups, 1)
    words = o_pieces + (max(len(pieces), 1) * _PIECE + 1) // 2
    if words > len(memory):
        return words
    memory[header + 2], memory[header + 3] = line_tiles, tiles
    memory[header + 4], memory[header + 5] = first - header, o_tiles - header
    memory[header + 6], memory[header + 7] = o_groups - header, o_pieces - header
    memory[header + 8], memory[header + 9] = steps, rows
    memory[o_tiles], memory[o_groups] = int64(_TILE_SHIFT) << 24, int64(_NOWHERE) << 32
    out = memory.view(np.int32)[2 * o_pieces : 2 * words]
    for i in range(_PIECE):
        out[i] = 0
    for p in range(len(pieces)):
        for i in range(_PIECE):
            out[p * _PIECE + i] = pieces[p, i]
    for c in range(len(columns)):
        for i in range(_COLUMN):
            memory[first + c * _COLUMN + i] = columns[c, i]

    place = o_tiles
    for words_of in range(3):
        for c in range(len(columns)):
            if columns[c, _WORDS] == words_of:
                place = _write_tiles(memory, place, begins[c], counts[c], shifts[c], c)
        if words_of < 2:
            memory[header + words_of] = place - o_tiles
    _write_tiles(memory, place, begins[n], counts[n], shifts[n], 0)
    for s in range(len(sources)):
        for c in range(sources[s, SOURCE_COLUMNS], sources[s, SOURCE_COLUMNS_END]):
            if _first_like(columns, sources[s, SOURCE_COLUMNS], c) == c:
                begin, end = _pieces_of(sources, s, columns[c, _ONCE])
                at = o_groups + begins[c]
                done = _write_groups(
                    memory, at, pieces, begin, end, columns[c, _STEP_BYTES], False, shifts[c]
                )
                memory[done : at + counts[c]] = int64(_NOWHERE) << 32
    done = o_groups + begins[n]
    for s in range(len(sources)):
        begin, end = _pieces_of(sources, s, 0)
        done = _write_groups(memory, done, pieces, begin, end, _NUMBERS, True, shifts[n])
    memory[done : o_groups + begins[n] + counts[n]] = int64(_NOWHERE) << 32
    return words


@njit(inline="always")
def _pieces_of(sources, s, once):  # type: ignore[no-untyped-def]
    """The first piece of a source's columns of a kind, and the end."""
    if once:
        return sources[s, SOURCE_ONCE], sources[s, SOURCE_ONCE_END]
    return sources[s, SOURCE_STEPS], sources[s, SOURCE_STEPS_END]


@njit(inline="always")
def _first_like(columns, first, c):  # type: ignore[no-untyped-def]
    """The first column of a source that has the same lines as column c."""
    for i in range(first, c):
        if columns[i, _STEP_BYTES] == columns[c, _STEP_BYTES] and columns[i, _ONCE] == columns[c, _ONCE]:
            return i
    return c


@njit(inline="always")
def _count_lines(pieces, begin, end, size, numbers):  # type: ignore[no-untyped-def]
    lines = int64(0)
    for p in range(begin, end):
        lines += _lines_of(pieces, p, size, numbers)
    return lines


@njit(inline="always")
def _shift(lines, pieces):  # type: ignore[no-untyped-def]
    """Log2 of the lines of a group."""
    shift = 0
    while shift < _MOST_GROUPED and lines >= (_GROUPED << shift + 1) * pieces and lines > 0:
        shift += 1
    return shift


@njit(inline="always")
def _count_groups(pieces, begin, end, size, numbers, shift):  # type: ignore[no-untyped-def]
    groups = int64(0)
    for p in range(begin, end):
        groups += (_lines_of(pieces, p, size, numbers) + (1 << shift) - 1) >> shift
    return groups


@njit(inline="always")
def _whole(groups, shift):  # type: ignore[no-untyped-def]
    """The groups of whole tiles."""
    whole = _TILE >> shift
    return (groups + whole - 1) // whole * whole


@njit(inline="always")
def _write_tiles(memory, place, begin, count, shift, column):  # type: ignore[no-untyped-def]
    for t in range((count << shift) // _TILE):
        memory[place] = (begin + t * (_TILE >> shift)) << 32 | shift << 24 | int64(column)
        place += 1
    return place


@njit(inline="always")
def _write_groups(memory, place, pieces, begin, end, size, numbers, shift):  # type: ignore[no-untyped-def]
    for p in range(begin, end):
        lines = _lines_of(pieces, p, size, numbers)
        line = int64(0)
        while line < lines:
            memory[place] = line << 32 | int64(p)
            place += 1
            line += 1 << shift
    return place


@njit(inline="always")
def _lines_of(pieces, p, size, numbers):  # type: ignore[no-untyped-def]
    """Lines of the source that hold bytes of a piece; of `position`, of the output from its first step on."""
    first = int64(0) if numbers else int64(pieces[p, _FIRST]) * size
    steps = int64(pieces[p, _STEPS])
    return (first + steps * size + _LINE - 1) // _LINE - first // _LINE if steps else int64(0)


@njit(inline="always")
def _block(block_ids, place, num_blocks):  # type: ignore[no-untyped-def]
    """The block id at a place of the block tables; -1 if there is no such place, or no such block."""
    if place < 0 or place >= len(block_ids) or block_ids[place] < 0 or block_ids[place] >= num_blocks:
        return int64(-1)
    return int64(block_ids[place])


@compiled
def plan_rows(  # type: ignore[no-untyped-def]
    slots, anchors, known, window, extent, block_ids, block_steps, num_blocks, adjoin, columns, spans, starts, pieces,
    memory, header, planned
) -> None:  # fmt: skip
    """Plan a batch of rows of one table that lie in memory: spans, starts, pieces, and the work.

    Args:
        slots, anchors: int64 [n]. known: whether the spans are input.
        window: int64 [3], offset and length of windows, and whether a final step is one of theirs.
        extent, block_ids, block_steps, num_blocks, adjoin: as for `list_pieces`.
        columns, memory, header: as for `list_work`; there is room for a header before and after it.
        spans: int64 [2, n]. starts: int32 [at least n + 1], output. pieces: int32 [most pieces, PIECE_WIDTH], scratch.
        planned: int64 [PLANNED_WIDTH], output: steps of the batch and of its longest row; invalid slots and blocks; the
            pieces and the words of memory that are needed. If there are fewer, or a slot is invalid, it is not planned.
    """
    n, total, longest = len(slots), int64(0), int64(0)
    planned[:] = 0
    if not known:
        planned[PLANNED_BAD] = measure(slots, anchors, extent, window[0], window[1], window[2] != 0, spans)
    most = int64(2 * n)
    starts[0] = 0
    for b in range(n):
        steps = spans[1, b]
        total += steps
        longest = max(longest, steps)
        starts[b + 1] = total
        most += steps // block_steps + 1
    planned[PLANNED_STEPS], planned[PLANNED_LONGEST], planned[PLANNED_PIECES] = total, longest, most
    once = False
    for c in range(len(columns)):
        once |= columns[c, _ONCE] != 0
    if planned[PLANNED_BAD] or most > len(pieces) or total >= 1 << 31:
        return
    count, bad = list_pieces(
        slots, spans, starts, extent, block_ids, block_steps, num_blocks, adjoin, once, pieces
    )
    planned[PLANNED_BAD] = bad
    if bad:
        return
    source = np.empty((1, SOURCE_WIDTH), dtype=np.int64)
    end = count + (n if once else 0)
    source[0, SOURCE_STEPS], source[0, SOURCE_STEPS_END] = 0, count
    source[0, SOURCE_ONCE], source[0, SOURCE_ONCE_END] = count, end
    source[0, SOURCE_COLUMNS], source[0, SOURCE_COLUMNS_END] = 0, len(columns)
    planned[PLANNED_WORDS] = list_work(pieces[:end], source, columns, total, n, memory, header, 2 * _HEADER)
