"""The list of a packed batch's pieces and lines, from which a GPU gathers it (numba).

A piece is a run of steps of one row that lie side by side in every column; `gear_loader.kernels.packed_plan` tells what
the lists hold.
"""

from __future__ import annotations

from numba import int64, njit

from gear_loader.kernels import packed_plan, plan
from gear_loader.native.compile import compiled
from gear_loader.native.spans import extent_of

_LINE = 128
_TILE = 128
_BLOCK, _FIRST, _STEPS, _OUT, _NUMBER = 0, 1, 2, 3, 4
assert (_LINE, _TILE) == (plan.LINE, packed_plan.TILE_LINES)
assert (_BLOCK, _FIRST, _STEPS, _OUT, _NUMBER) == (
    packed_plan.PIECE_BLOCK,
    packed_plan.PIECE_FIRST,
    packed_plan.PIECE_STEPS,
    packed_plan.PIECE_OUT,
    packed_plan.PIECE_NUMBER,
)
_GROUPED = 8
"""Groups have several lines where pieces have at least so many times as many: few lines then do nothing."""
_MOST_GROUPED = 5  # log2 of the most lines of a group
_NOWHERE = 1 << 30  # number of a line after the last of any piece


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
def count_lists(pieces, num_pieces, kinds, classes):  # type: ignore[no-untyped-def]
    """Count the groups and tiles of a batch, for `list_lines`.

    Args:
        pieces: int32 [P, PIECE_WIDTH]. num_pieces: those of steps; the others are those of columns per trajectory.
        kinds: int64 [C, 3], of a `PackedPlan`.
        classes: int64 [C + 1, 4], output, of each kind of columns with the same lines: bytes of a step, whether per
            trajectory, shift (log2 of the lines of a group), number of groups. The last row is that of `position`.

    Returns:
        Number of groups, and of tiles.
    """
    groups, tiles = 0, 0
    for c in range(kinds.shape[0] + 1):
        numbers = c == kinds.shape[0]
        size, once = (int64(4), int64(0)) if numbers else (kinds[c, 0], kinds[c, 1])
        classes[c, 0], classes[c, 1], classes[c, 2], classes[c, 3] = size, once, 0, 0
        like = -1 if numbers else _first_like(kinds, c)
        if like >= 0 and like < c:  # its groups are listed already
            classes[c, 2], classes[c, 3] = classes[like, 2], classes[like, 3]
        else:
            begin, end = (num_pieces, len(pieces)) if once else (0, num_pieces)
            lines = int64(0)
            for p in range(begin, end):
                lines += _lines_of(pieces, p, size, numbers)
            shift = 0
            while shift < _MOST_GROUPED and lines >= (_GROUPED << shift + 1) * (end - begin) and lines > 0:
                shift += 1
            number = int64(0)
            for p in range(begin, end):
                number += (_lines_of(pieces, p, size, numbers) + (1 << shift) - 1) >> shift
            whole = _TILE >> shift  # groups of a tile
            classes[c, 2], classes[c, 3] = shift, (number + whole - 1) // whole * whole
            groups += classes[c, 3]
        tiles += (classes[c, 3] << classes[c, 2]) // _TILE
    return groups, tiles


@compiled
def list_lines(pieces, num_pieces, kinds, classes, groups, tiles, ends) -> None:  # type: ignore[no-untyped-def]
    """List the groups and tiles that `count_lists` has counted.

    Args:
        pieces, num_pieces, kinds, classes: as of `count_lists`.
        groups: int64 [G], tiles: int64 [T], output. ends: int64 [4], output, see `PackedWork`.
    """
    first = int64(0)
    place = int64(0)
    begins = classes[:, 3].copy()
    for c in range(len(classes)):
        numbers = c == len(kinds)
        like = c if numbers else _first_like(kinds, c)
        size, once, shift, number = classes[c]
        if like < c:
            begins[c] = begins[like]
        else:
            begins[c] = first
            i = first
            begin, end = (num_pieces, len(pieces)) if once else (0, num_pieces)
            for p in range(begin, end):
                lines = _lines_of(pieces, p, size, numbers)
                line = int64(0)
                while line < lines:
                    groups[i] = line << 32 | int64(p)
                    i += 1
                    line += 1 << shift
            first += number
            while i < first:
                groups[i] = int64(_NOWHERE) << 32
                i += 1
        for t in range((number << shift) // _TILE):
            tiles[place] = (begins[c] + t * (_TILE >> shift)) << 32 | shift << 16 | int64(0 if numbers else c)
            place += 1
        if numbers:
            ends[3] = place
        else:
            for k in range(kinds[c, 2], 3):
                ends[k] = place


@njit(inline="always")
def _first_like(kinds, c):  # type: ignore[no-untyped-def]
    """The first column that has the same lines as column c."""
    for i in range(c):
        if kinds[i, 0] == kinds[c, 0] and kinds[i, 1] == kinds[c, 1]:
            return i
    return c


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
