"""Gather windows of trajectories from host memory, all columns of a batch in one launch.

The work is split into units of the *source*: a 128-byte line, or two lines where no block ends within a pair. Row b
of the batch gets `lines` units, of each column the most that its window can touch; `GatherPlan` lists them. A program
processes one tile of adjacent units at a time, of any rows and columns: it computes each unit's address, reads the
whole lines that the window touches, and writes the part of them within the window:

    steps of a trajectory     | block 7         | block 2         |      window: steps 3 to 9
    lines of its blocks       |-----|-----|--pad|-----|-----|--pad|
    lines that are read          ===== =====     ===== =====

So host memory is read only in whole, aligned lines, whatever the size of a step, and small rows fill a tile as well as
large ones. The unit with the same number of the *output* is the one whose padding the program writes. Masks have tiles
of their own, of `ENTRIES` entries.

**Pipeline.** Three loads, one after another, lead to a unit's address. A program has several tiles under way and waits
only for loads that it issued at least a tile ago. Lines are copied asynchronously into a ring of tiles in shared memory
(`cp.async`), S = `STAGES` - 1 tiles ahead, before a tile is stored:

    slot, anchor    of tile k + S + 3   into registers
    extent          of tile k + S + 2
    block id        of tile k + S + 1
    lines           of tile k + S       into shared memory
    stores          of tile k

With 128 KiB in flight in each program, two should fill the bus; with 32 KiB it took 16. What bounds a program then are
the instructions for a tile, so it has 8 warps, and one thread computes the address of a unit; the threads that move its
words read it from shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gear_loader.kernels import plan as _plan
from gear_loader.kernels.devices import BUS_PROGRAMS, on_device, shared_memory
from gear_loader.kernels.launching import launch
from gear_loader.kernels.plan import GatherPlan
from gear_loader.kernels.tensor_checks import check_programs, check_tensor, grid_size

__all__ = ["gather", "launch_options", "launch_programs", "reciprocal"]

BASE = tl.constexpr(_plan.BASE)
STRIDE = tl.constexpr(_plan.STRIDE)
STEP_BYTES = tl.constexpr(_plan.STEP_BYTES)
OUT = tl.constexpr(_plan.OUT)
LENGTH = tl.constexpr(_plan.LENGTH)
OFFSET = tl.constexpr(_plan.OFFSET)
PAD = tl.constexpr(_plan.PAD)
LINES = tl.constexpr(_plan.LINES)
FINAL = tl.constexpr(_plan.FINAL)
WIDTH = tl.constexpr(_plan.WIDTH)
PAD_KEEP = tl.constexpr(_plan.PAD_KEEP)
PAD_HEAD = tl.constexpr(_plan.PAD_HEAD)
PAD_EDGE = tl.constexpr(_plan.PAD_EDGE)
EDGE = tl.constexpr(1 << 30)  # in a unit's padding: it repeats a step
PART = tl.constexpr(1024)  # words whose padding is written at a time

ENTRIES = 512
"""Entries per tile of a mask."""

SHARED = 163 << 10
"""Bytes of shared memory that a block can have on the smallest of the GPUs that the kernel is made for, sm_80."""

PROGRAMS = {(16, 256): 2, (16, 128): 3, (4, 128): 4, (1, 128): 8}
"""Word and unit -> programs that fill a PCIe 5.0 bus, predicted by `python -m benchmarks predict`."""


def launch_options(word: int, unit: int, shared: int = SHARED) -> dict[str, int]:
    """Launch options for GPUs whose blocks can have `shared` bytes of shared memory.

    `TILE`: units of a tile, one a thread. `STAGES`: tiles whose lines are requested or stored at a time; all but one
    are in flight: 128 KiB, or 64 or 32 on GPUs that have less shared memory.
    """
    ring = 128 << 10 if shared >= SHARED else 64 << 10 if shared >= 98 << 10 else 32 << 10
    tile = 256 if ring == 128 << 10 else 128
    return {"TILE": tile, "ENTRIES": ENTRIES, "STAGES": ring // (tile * unit) + 1, "num_warps": tile // 32}


def launch_programs(word: int, unit: int, shared: int = SHARED) -> int:
    """Default size of the grid: twice `PROGRAMS` and at least 8, until these are measured; `BUS_PROGRAMS` at most."""
    fill = 2 * PROGRAMS[word, unit] if shared >= SHARED else BUS_PROGRAMS
    return min(max(fill, 8), BUS_PROGRAMS)


@triton.jit
def _clip(x, UNIT: tl.constexpr):
    return tl.minimum(tl.maximum(x, 0), UNIT)


@triton.jit
def _window(begin, steps, length, pad):
    """Windows: first step, number of existing steps, padding before them."""
    low = tl.minimum(tl.maximum(begin, 0), steps)
    count = (tl.maximum(tl.minimum(begin + length, steps), low) - low).to(tl.int32)
    head = tl.where(pad == PAD_HEAD, length - count, 0)
    keep = tl.where(count > 0, (low - begin).to(tl.int32), length)
    head = tl.where((pad == PAD_KEEP) | (pad == PAD_EDGE), keep, head)
    # Of a window without any, the step next to it.
    return tl.minimum(low, tl.maximum(steps - 1, 0)), count, head


@triton.jit
def _names(
    p_lines, p_slots, p_anchors, p_rows, i_tile, lines, batch, CHOSEN: tl.constexpr, TILE: tl.constexpr
):
    """Row of the outputs (-1: no such line), column and number within it, slot and anchor of a tile's lines."""
    i_line = i_tile * TILE + tl.arange(0, TILE)
    i_row = (i_line.to(tl.uint32) // lines.to(tl.uint32)).to(tl.int32)
    m_row = i_row < batch
    b_name = tl.load(p_lines + (i_line - i_row * lines), mask=m_row, other=0)
    slot = tl.load(p_slots + i_row, mask=m_row, other=0)
    anchor = tl.load(p_anchors + i_row, mask=m_row, other=0)
    if CHOSEN:
        i_out = tl.load(p_rows + i_row, mask=m_row, other=-1)
    else:
        i_out = tl.where(m_row, i_row, -1).to(tl.int64)
    return i_out, b_name, slot, anchor


@triton.jit
def _extents(p_extent, i_out, slot):
    """Length, place of the block table and final steps of trajectories."""
    m_row = i_out >= 0
    steps = tl.load(p_extent + slot * 3, mask=m_row, other=0)
    o_ids = tl.load(p_extent + slot * 3 + 1, mask=m_row, other=0)
    return steps, o_ids, tl.load(p_extent + slot * 3 + 2, mask=m_row, other=0)


@triton.jit
def _block(low, block_steps, magic, shift):
    """Block of a step, counted from the trajectory's first, and the step within it: int64 and int32 [TILE].

    By a multiplication and a shift, see `reciprocal`: there is no instruction that divides int64.
    """
    i_block = (tl.umulhi((low * 4).to(tl.uint64), magic.to(tl.uint64)) >> shift).to(tl.int64)
    return i_block, (low - i_block * block_steps).to(tl.int32)


@triton.jit
def _lines(
    p_columns,
    p_block_ids,
    i_out,
    b_name,
    anchor,
    steps,
    o_ids,
    finals,
    block_steps,
    magic,
    shift,
    UNIT: tl.constexpr,
):
    """Where lines come from and go to; loads their block ids.

    Returns, each [TILE]: id of the line's block; address of the line in block 0; bytes from block to block; address in
    the output of the line's byte 0; bytes of it within the window (`_range`); address of the output's line of the same
    number; the padding there (`_padding`), or 0 if there is none.
    """
    m_row = i_out >= 0
    p_column = p_columns + b_name.to(tl.int32) * WIDTH
    i_line = (b_name >> 32).to(tl.int32)
    a_source = tl.load(p_column + BASE, mask=m_row, other=0)
    stride = tl.load(p_column + STRIDE, mask=m_row, other=128).to(tl.int32)
    step_bytes = tl.load(p_column + STEP_BYTES, mask=m_row, other=0).to(tl.int32)
    a_out = tl.load(p_column + OUT, mask=m_row, other=0)
    length = tl.load(p_column + LENGTH, mask=m_row, other=0).to(tl.int32)
    offset = tl.load(p_column + OFFSET, mask=m_row, other=0)
    pad = tl.load(p_column + PAD, mask=m_row, other=0).to(tl.int32)
    final = tl.load(p_column + FINAL, mask=m_row, other=0)
    low, count, head = _window(anchor + offset, steps + tl.where(final != 0, finals, 0), length, pad)
    # A window of a single step that does not exist is, with this padding, one of the step next to it.
    m_other = (pad == PAD_EDGE) & (length == 1)
    count, head = tl.where(m_other, 1, count), tl.where(m_other, 0, head)
    i_block, first = _block(low, block_steps, magic, shift)

    # The line's block, counted from the window's first, and the line's first byte within it. Lines are numbered as if
    # a trajectory's blocks were adjacent.
    o_lines = (first * step_bytes // UNIT + i_line) * UNIT
    n_block = (o_lines.to(tl.uint32) // stride.to(tl.uint32)).to(tl.int32)
    o_inside = o_lines - n_block * stride
    block_bytes = block_steps * step_bytes
    # Start of the line relative to the window's first step, in bytes without block padding.
    o_steps = n_block * block_bytes + o_inside - first * step_bytes
    window_bytes = count * step_bytes
    m_line = m_row & (o_steps < window_bytes)
    block_id = tl.load(p_block_ids + o_ids + i_block + n_block, mask=m_line, other=0)
    end = tl.where(m_line, _clip(tl.minimum(block_bytes - o_inside, window_bytes - o_steps), UNIT), 0)
    b_range = _clip(-o_steps, UNIT) | (end << 10)
    row_bytes = length * step_bytes
    a_out += i_out * row_bytes

    pad_from = head * step_bytes - i_line * UNIT
    pad_to = _clip(pad_from + window_bytes, UNIT)
    pad_from = _clip(pad_from, UNIT)
    pad_stop = tl.where(m_row, _clip(row_bytes - i_line * UNIT, UNIT), 0)
    b_pad = pad_from | (pad_to << 10) | (pad_stop << 20) | tl.where(pad == PAD_EDGE, EDGE, 0)
    b_pad = tl.where((tl.minimum(pad_from, pad_stop) > 0) | (pad_to < pad_stop), b_pad, 0)
    a_line = a_out + i_line.to(tl.int64) * UNIT
    a_out += head * step_bytes + o_steps
    return block_id, a_source + o_inside, stride, a_out, tl.where(m_line, b_range, 0), a_line, b_pad


@triton.jit
def _edges(
    p_columns,
    p_lines,
    p_slots,
    p_anchors,
    p_extent,
    p_block_ids,
    p_rows,
    i_tile,
    lines,
    batch,
    block_steps,
    magic,
    shift,
    CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Addresses of the first and of the last step of windows, or of the step next to them, and bytes of a step.

    Loads once more what leads to a tile's lines, rather than keep it: few tiles have such padding.
    """
    i_out, b_name, slot, anchor = _names(
        p_lines, p_slots, p_anchors, p_rows, i_tile, lines, batch, CHOSEN, TILE
    )
    steps, o_ids, finals = _extents(p_extent, i_out, slot)
    m_row = i_out >= 0
    p_column = p_columns + b_name.to(tl.int32) * WIDTH
    a_source = tl.load(p_column + BASE, mask=m_row, other=0)
    stride = tl.load(p_column + STRIDE, mask=m_row, other=0)
    step_bytes = tl.load(p_column + STEP_BYTES, mask=m_row, other=128).to(tl.int32)
    length = tl.load(p_column + LENGTH, mask=m_row, other=0).to(tl.int32)
    begin = anchor + tl.load(p_column + OFFSET, mask=m_row, other=0)
    final = tl.load(p_column + FINAL, mask=m_row, other=0)
    low, count, _ = _window(begin, steps + tl.where(final != 0, finals, 0), length, PAD_EDGE)
    i_block, first = _block(low, block_steps, magic, shift)
    o_ids += i_block
    last = first + tl.maximum(count - 1, 0)
    n_block = last // block_steps
    head = tl.load(p_block_ids + o_ids, mask=m_row, other=0).to(tl.int64)
    a_head = a_source + head * stride + first * step_bytes
    tail = tl.load(p_block_ids + o_ids + n_block, mask=m_row, other=0).to(tl.int64)
    a_tail = a_source + tail * stride + (last - n_block * block_steps) * step_bytes
    i_line = (b_name >> 32).to(tl.int32)
    return a_head, a_tail, step_bytes, i_line * UNIT % step_bytes


@triton.jit
def _words(b_bytes, WORD: tl.constexpr):
    """Numbers of bytes as numbers of words of 4 bytes, which come four at a time if WORD is 16; of bytes if it is 1."""
    if WORD == 16:
        return b_bytes // 16 * 4
    elif WORD == 4:
        return b_bytes // 4
    else:
        return b_bytes


@triton.jit
def _pointers(address, WORD: tl.constexpr):
    """Pointers to words of 4 bytes, or to bytes; tells the compiler what addresses are multiples of."""
    if WORD == 16:
        return tl.multiple_of((address // 16 * 16).to(tl.pointer_type(tl.int32)), 16)[:, None]
    elif WORD == 4:
        return address.to(tl.pointer_type(tl.int32))[:, None]
    else:
        return address.to(tl.pointer_type(tl.int8))[:, None]


@triton.jit
def _store(b_line, a_out, b_range, i_tile, line_tiles, FIRST: tl.constexpr, WORD: tl.constexpr):
    """Write the parts of lines, int32 [TILE, 32], that are within their ranges; bytes if the tile is one of lines.

    `a_out` and `b_range` are those of units, of which each line is the one that begins at byte `FIRST`.
    """
    o_word = tl.arange(0, 32)[None, :] + FIRST // 4
    p_out = _pointers(a_out, WORD)
    b_range = b_range[:, None]
    start, end = _words(b_range & 1023, WORD), _words(b_range >> 10, WORD)
    if WORD == 1:
        if i_tile < line_tiles:
            for k in range(4):
                o_byte = o_word * 4 + k
                m_byte = (o_byte >= start) & (o_byte < end)
                tl.store(p_out + o_byte, (b_line >> (8 * k)).to(tl.int8), mask=m_byte)
    else:
        tl.store(p_out + o_word, b_line, mask=(o_word >= start) & (o_word < end))


@triton.jit
def _store_padding(
    a_line,
    b_pad,
    a_head,
    a_tail,
    step_bytes,
    phase,
    WORD: tl.constexpr,
    EDGES: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Write the padding of units of the outputs: zeros, or with `EDGES` the step next to it where units have `EDGE`."""
    PARTS: tl.constexpr = PART // (UNIT // 4)
    o_word = tl.arange(0, UNIT // 4)[None, :]
    SIZE: tl.constexpr = 1 if WORD == 1 else 4
    for i_part in range(a_line.shape[0] // PARTS):
        i_line = i_part * PARTS + tl.arange(0, PARTS)
        b_part = tl.gather(b_pad, i_line, 0)[:, None]  # [PARTS, 1]
        p_out = _pointers(tl.gather(a_line, i_line, 0), WORD)
        pad_from, pad_to = _words(b_part & 1023, WORD), _words((b_part >> 10) & 1023, WORD)
        pad_stop = _words((b_part >> 20) & 1023, WORD)
        if EDGES:
            a_from = tl.gather(a_head, i_line, 0)[:, None]
            a_to = tl.gather(a_tail, i_line, 0)[:, None]
            size = tl.gather(step_bytes, i_line, 0)[:, None]
            o_from = tl.gather(phase, i_line, 0)[:, None]
        for k in tl.static_range(4 // SIZE):
            o_out = o_word * (4 // SIZE) + k
            m_pad = ((o_out < pad_from) | (o_out >= pad_to)) & (o_out < pad_stop)
            if EDGES:
                a_edge = tl.where(o_out < pad_from, a_from, a_to) + (o_from + o_out * SIZE) % size
                p_edge = (a_edge // 4 * 4).to(tl.pointer_type(tl.int32))
                b_edge = tl.load(p_edge, mask=m_pad & (b_part >= EDGE), other=0)
                if WORD == 1:
                    b_edge = (b_edge >> (a_edge % 4 * 8).to(tl.int32)).to(tl.int8)
            else:
                b_edge = tl.zeros([PARTS, UNIT // 4], dtype=tl.int8 if WORD == 1 else tl.int32)
            tl.store(p_out + o_out, b_edge, mask=m_pad)


@triton.jit
def _write_mask(
    p_slots,
    p_anchors,
    p_extent,
    p_rows,
    p_column,
    i_tile,
    batch,
    CHOSEN: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One tile of a mask: consecutive entries over the rows of the batch."""
    length = tl.load(p_column + LENGTH).to(tl.int32)
    i_entry = i_tile * ENTRIES + tl.arange(0, ENTRIES)
    i_row = i_entry // length
    m_row = i_row < batch
    slot = tl.load(p_slots + i_row, mask=m_row, other=0)
    begin = tl.load(p_anchors + i_row, mask=m_row, other=0) + tl.load(p_column + OFFSET)
    steps = tl.load(p_extent + slot * 3, mask=m_row, other=0)
    steps += tl.load(p_extent + slot * 3 + 2, mask=m_row & (tl.load(p_column + FINAL) != 0), other=0)
    _, count, head = _window(begin, steps, length, tl.load(p_column + PAD).to(tl.int32))
    i_step = i_entry - i_row * length - head
    b_mask = ((i_step >= 0) & (i_step < count)).to(tl.int8)
    o_entry = i_entry.to(tl.int64)
    if CHOSEN:
        o_entry = tl.load(p_rows + i_row, mask=m_row, other=0) * length + (i_entry - i_row * length)
    tl.store(tl.load(p_column + OUT).to(tl.pointer_type(tl.int8)) + o_entry, b_mask, mask=m_row)


# No argument is specialised on its value: a smaller last batch, or one of a single row, must not recompile in
# mid-epoch, and the code is the same (tests/tools/aot.py shows it).
@triton.jit(
    do_not_specialize=[
        *(
            "p_columns",
            "p_slots",
            "p_anchors",
            "p_extent",
            "p_block_ids",
            "p_rows",
            "num_columns",
            "num_masks",
        ),
        *("lines", "batch", "line_tiles", "block_steps", "magic", "shift"),
    ]
)
def gather_kernel(
    p_columns,  # int64 [C + masks, WIDTH], then int64 [lines]: number of the line << 32 | its column
    p_slots,  # int64 [B]
    p_anchors,  # int64 [B]
    p_extent,  # int64 [T, 3]
    p_block_ids,  # int32 [H]
    p_rows,  # int64 [B] if CHOSEN
    num_columns,
    num_masks,
    lines,  # of a row of the batch, over all columns
    batch,
    line_tiles,
    block_steps,
    magic,  # see `reciprocal`
    shift,
    WORD: tl.constexpr,  # bytes of which steps are whole multiples: 16, 4 or 1
    UNIT: tl.constexpr,  # bytes of a unit: a line, or two that lie side by side
    CHOSEN: tl.constexpr,  # whether entry b goes to row p_rows[b] of the outputs, or to row b
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Positions within a window, a block or a batch's lines fit into int32 (the plan checks it); addresses and steps of
    # a trajectory are int64.
    program, programs = tl.program_id(0), tl.num_programs(0)
    p_lines = p_columns + (num_columns + num_masks) * WIDTH
    # Of the tile after the next, of that after it: in these registers. A tile beyond the last has no rows.
    i_out, b_name, slot, anchor = _names(
        p_lines, p_slots, p_anchors, p_rows, tl.minimum(program, line_tiles), lines, batch, CHOSEN, TILE
    )
    steps, o_ids, finals = _extents(p_extent, i_out, slot)
    i_next = tl.minimum(program + programs, line_tiles)
    y_out, y_name, slot, y_anchor = _names(
        p_lines, p_slots, p_anchors, p_rows, i_next, lines, batch, CHOSEN, TILE
    )
    block_id, a_first, stride, a_out, b_range, a_line, b_pad = _lines(
        p_columns, p_block_ids, i_out, b_name, anchor, steps, o_ids, finals, block_steps, magic, shift, UNIT
    )
    steps, o_ids, finals = _extents(p_extent, y_out, slot)
    i_next = tl.minimum(i_next + programs, line_tiles)
    z_out, z_name, z_slot, z_anchor = _names(
        p_lines, p_slots, p_anchors, p_rows, i_next, lines, batch, CHOSEN, TILE
    )
    for i_tile in tl.range(program, line_tiles, programs, num_stages=STAGES):
        # Loads in a branch stay where they are, so that Triton pipelines only those of the lines. What the lines need
        # comes out of it, so that it runs before they are requested.
        if i_tile + programs < line_tiles:
            a_source = a_first + block_id.to(tl.int64) * stride
            x_out, x_range, x_line, x_pad = a_out, b_range, a_line, b_pad
            block_id, a_first, stride, a_out, b_range, a_line, b_pad = _lines(
                p_columns,
                p_block_ids,
                y_out,
                y_name,
                y_anchor,
                steps,
                o_ids,
                finals,
                block_steps,
                magic,
                shift,
                UNIT,
            )
            y_out, y_name, y_anchor = z_out, z_name, z_anchor
            steps, o_ids, finals = _extents(p_extent, z_out, z_slot)
            i_next = tl.minimum(i_next + programs, line_tiles)
            z_out, z_name, z_slot, z_anchor = _names(
                p_lines, p_slots, p_anchors, p_rows, i_next, lines, batch, CHOSEN, TILE
            )
        else:
            a_source = a_first + block_id.to(tl.int64) * stride
            x_out, x_range, x_line, x_pad = a_out, b_range, a_line, b_pad
        # Whole lines, in words of 4 bytes.                                                   [TILE, 32]
        p_source = tl.multiple_of((a_source // 128 * 128).to(tl.pointer_type(tl.int32)), 128)
        for i in tl.static_range(UNIT // 128):
            m_line = (x_range >> 10 > i * 128) & (x_range & 1023 < i * 128 + 128)
            b_line = tl.load(
                p_source[:, None] + (i * 32 + tl.arange(0, 32)[None, :]),
                mask=m_line[:, None],
                other=0,
                eviction_policy="evict_first",
            )
            _store(b_line, x_out, x_range, i_tile, line_tiles, i * 128, WORD)
        padded = tl.max(x_pad, axis=0)
        if padded > 0:
            if padded >= EDGE:
                a_head, a_tail, step_bytes, phase = _edges(
                    p_columns,
                    p_lines,
                    p_slots,
                    p_anchors,
                    p_extent,
                    p_block_ids,
                    p_rows,
                    i_tile,
                    lines,
                    batch,
                    block_steps,
                    magic,
                    shift,
                    CHOSEN,
                    TILE,
                    UNIT,
                )
                _store_padding(x_line, x_pad, a_head, a_tail, step_bytes, phase, WORD, True, UNIT)
            else:
                _store_padding(x_line, x_pad, x_line, x_line, x_pad, x_pad, WORD, False, UNIT)

    o_tile = line_tiles
    for i_column in range(num_columns, num_columns + num_masks):
        p_column = p_columns + i_column * WIDTH
        tiles = (batch * tl.load(p_column + LENGTH).to(tl.int32) + ENTRIES - 1) // ENTRIES
        # The program's next tile, as if those of all columns were in one row.
        for i_tile in range((program + programs - o_tile % programs) % programs, tiles, programs):
            _write_mask(p_slots, p_anchors, p_extent, p_rows, p_column, i_tile, batch, CHOSEN, ENTRIES)
        o_tile += tiles


def reciprocal(steps: int) -> tuple[int, int]:
    """A factor and a shift that divide by `steps`: ``x // steps == (4 * x * factor >> 64) >> shift`` for x below 2**61.

    The factor is ``2**(62 + shift) / steps`` rounded up: by less than one, so 4 * x * factor is too large by less than
    what would reach the next multiple of `steps`. It has at least 61 bits, so every launch passes an int64.
    """
    shift = steps.bit_length() - 1
    return -(-(1 << (62 + shift)) // steps), shift


def gather(
    plan: GatherPlan,
    slots: torch.Tensor,
    anchors: torch.Tensor,
    extent: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Fill rows of the plan's outputs and masks with windows of trajectories, on its device's current stream.

    Args:
        plan: the columns; their sources, `extent` and `block_ids` lie in memory that the device can read.
        slots: int64 [n] on the plan's device, n <= batch size: slots of the trajectories.
        anchors: int64 [n]: the steps that the windows are relative to.
        extent: int64 [T, 3]: slot -> length in steps, first entry in `block_ids`, number of final steps (0 or 1).
        block_ids: int32 [H]: block tables, each with consecutive entries.
        rows: int64 [n] on the plan's device, distinct: window b goes to row ``rows[b]`` of the outputs and masks; by
            default to row b. Values of `rows` and `slots` are not checked: an invalid one is written to, or read from,
            other memory.
        programs: programs of the grid, each of which processes several tiles; by default `launch_programs`,
            which fill the bus and leave the rest of the GPU free.

    Does not wait for the GPU. Other rows of the outputs do not change, so a batch can be gathered from several tables
    with one launch per table (see `gear_loader.collection.plans`).

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or device; nothing was launched.
    """
    count = plan.check_rows(slots, anchors, rows)
    check_tensor("extent", extent, torch.int64, "[T, 3]")
    check_tensor("block_ids", block_ids, torch.int32, "[H]")
    check_programs(programs)
    if count == 0:
        return
    magic, shift = reciprocal(plan.block_steps)
    with on_device(plan.device):
        for word, table, device_table in plan.launches:
            unit, shared = plan.unit_of(word), shared_memory(plan.device, SHARED)
            options = launch_options(word, unit, shared)
            lines, masks, line_tiles, mask_tiles = plan.tiles(table, count, options["TILE"], ENTRIES)
            default = launch_programs(word, unit, shared)
            launch(
                gather_kernel,
                grid_size(programs, default, line_tiles + mask_tiles),
                device_table,
                slots,
                anchors,
                extent,
                block_ids,
                slots if rows is None else rows,
                len(table) - masks,
                masks,
                lines,
                count,
                line_tiles,
                plan.block_steps,
                magic,
                shift,
                WORD=word,
                UNIT=unit,
                CHOSEN=rows is not None,
                **options,
            )
