"""Gather windows of trajectories from host memory, all columns of a batch in one launch.

The work is split into 128-byte lines of the *source*. Row b of the batch gets `LINES` of them in every column, the
most that its window can touch. A program processes one tile of lines at a time, of any rows: it computes each line's
row, block and address, reads the whole line, and writes the part of it within the window:

    steps of a trajectory     | block 7         | block 2         |      window: steps 3 to 9
    lines of its blocks       |-----|-----|--pad|-----|-----|--pad|
    lines that are read          ===== =====     ===== =====

So host memory is read only in whole, aligned lines, whatever the size of a step, and small rows fill a tile as well as
large ones. The line with the same number of the *output* is the one whose padding the program writes. Masks have tiles
of their own, of `ENTRIES` entries.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from gear_loader.kernels import plan as _plan
from gear_loader.kernels.plan import GatherPlan

__all__ = ["gather"]

BASE = tl.constexpr(_plan.BASE)
STRIDE = tl.constexpr(_plan.STRIDE)
STEP_BYTES = tl.constexpr(_plan.STEP_BYTES)
OUT = tl.constexpr(_plan.OUT)
LENGTH = tl.constexpr(_plan.LENGTH)
OFFSET = tl.constexpr(_plan.OFFSET)
PAD = tl.constexpr(_plan.PAD)
MASK = tl.constexpr(_plan.MASK)
LINES = tl.constexpr(_plan.LINES)
FINAL = tl.constexpr(_plan.FINAL)
WIDTH = tl.constexpr(_plan.WIDTH)
PAD_KEEP = tl.constexpr(_plan.PAD_KEEP)
PAD_HEAD = tl.constexpr(_plan.PAD_HEAD)
PAD_EDGE = tl.constexpr(_plan.PAD_EDGE)

TILES = {16: 128, 4: 64, 1: 64}
"""Lines per tile, by word size: 16 or 8 KiB in flight per program. A bus of 55 GB/s and 1.5 us needs 82 KB of them."""

ENTRIES = 512
"""Entries per tile of a mask."""

LAUNCH: dict[int, dict[str, int | None]] = {
    16: {"num_warps": 8, "maxnreg": None},
    4: {"num_warps": 8, "maxnreg": 168},
    1: {"num_warps": 8, "maxnreg": 168},
}
"""Launch options by word size; without a limit the last two take 174 and 212 registers, and need no more than this."""


@triton.jit
def _window(p_slots, p_anchors, p_extent, i_row, m_row, offset, length, pad, final):
    """Windows of rows of the batch: first step, number of existing steps, padding before them, block table offset."""
    slot = tl.load(p_slots + i_row, mask=m_row, other=0)
    begin = tl.load(p_anchors + i_row, mask=m_row, other=0) + offset
    steps = tl.load(p_extent + slot * 3, mask=m_row, other=0)
    o_ids = tl.load(p_extent + slot * 3 + 1, mask=m_row, other=0)
    steps += tl.load(p_extent + slot * 3 + 2, mask=m_row & (final != 0), other=0)
    low = tl.minimum(tl.maximum(begin, 0), steps)
    count = (tl.maximum(tl.minimum(begin + length, steps), low) - low).to(tl.int32)
    head = tl.where(pad == PAD_HEAD, length - count, 0)
    head = tl.where(
        (pad == PAD_KEEP) | (pad == PAD_EDGE), tl.where(count > 0, (low - begin).to(tl.int32), length), head
    )
    # Of a window without any, the step next to it.
    low = tl.minimum(low, tl.maximum(steps - 1, 0))
    return low, count, head, o_ids


@triton.jit
def _edges(p_block_ids, o_ids, first, count, m_row, block_steps, stride, step_bytes):
    """Source bytes of the first and of the last step of windows, or of the step next to them; int64 [TILE] each.

    `o_ids` are the places of the windows' first blocks, `first` the steps within them.
    """
    last = first + tl.maximum(count - 1, 0)
    n_block = last // block_steps
    head = tl.load(p_block_ids + o_ids, mask=m_row, other=0).to(tl.int64) * stride + first * step_bytes
    tail = tl.load(p_block_ids + o_ids + n_block, mask=m_row, other=0).to(tl.int64) * stride
    return head, tail + (last - n_block * block_steps) * step_bytes


@triton.jit
def _write_mask(
    p_slots,
    p_anchors,
    p_extent,
    p_rows,
    i_tile,
    batch,
    a_out,
    offset,
    length,
    pad,
    final,
    CHOSEN: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One tile of a mask: consecutive entries over the rows of the batch."""
    i_entry = i_tile * ENTRIES + tl.arange(0, ENTRIES)
    i_row = i_entry // length
    m_row = i_row < batch
    _, count, head, _ = _window(p_slots, p_anchors, p_extent, i_row, m_row, offset, length, pad, final)
    i_step = i_entry - i_row * length - head
    b_mask = ((i_step >= 0) & (i_step < count)).to(tl.int8)
    o_entry = i_entry
    if CHOSEN:
        o_entry = tl.load(p_rows + i_row, mask=m_row, other=0) * length + (i_entry - i_row * length)
    tl.store(a_out.to(tl.pointer_type(tl.int8)) + o_entry, b_mask, mask=m_row)


# No argument is specialised on its value: a smaller last batch, or one of a single row, must not recompile in
# mid-epoch, and the code is the same (tests/aot.py shows it).
@triton.jit(
    do_not_specialize=[
        "p_columns",
        "p_slots",
        "p_anchors",
        "p_extent",
        "p_block_ids",
        "p_rows",
        "num_columns",
        "batch",
        "num_tiles",
        "block_steps",
        "block_shift",
    ]
)
def gather_kernel(
    p_columns,  # int64 [C, WIDTH]
    p_slots,  # int64 [B]
    p_anchors,  # int64 [B]
    p_extent,  # int64 [T, 3] in host memory
    p_block_ids,  # int32 [H] in host memory
    p_rows,  # int64 [B] if CHOSEN
    num_columns,
    batch,
    num_tiles,
    block_steps,
    block_shift,  # its logarithm if it is a power of two, else -1
    WORD: tl.constexpr,  # bytes of which steps are whole multiples: 16, 4 or 1
    CHOSEN: tl.constexpr,  # whether entry b goes to row p_rows[b] of the outputs, or to row b
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    # Positions within a window, a block or a column of the batch fit into int32 (the plan checks it); addresses and
    # steps of a trajectory are int64.
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # The tile's column and its number within the column.
        i_column = 0
        i_first = 0
        o_tile = 0
        for i in range(num_columns):
            i_column = tl.where(i_tile >= o_tile, i, i_column)
            i_first = tl.where(i_tile >= o_tile, o_tile, i_first)
            lines = tl.load(p_columns + i * WIDTH + LINES).to(tl.int32)
            entries = tl.load(p_columns + i * WIDTH + LENGTH).to(tl.int32)
            o_tile += tl.where(
                lines > 0, (batch * lines + TILE - 1) // TILE, (batch * entries + ENTRIES - 1) // ENTRIES
            )
        i_first = i_tile - i_first
        p_column = p_columns + i_column * WIDTH
        lines = tl.load(p_column + LINES).to(tl.int32)
        length = tl.load(p_column + LENGTH).to(tl.int32)
        offset = tl.load(p_column + OFFSET)
        pad = tl.load(p_column + PAD)
        final = tl.load(p_column + FINAL)
        a_out = tl.load(p_column + OUT)

        if lines == 0:
            _write_mask(
                p_slots,
                p_anchors,
                p_extent,
                p_rows,
                i_first,
                batch,
                a_out,
                offset,
                length,
                pad,
                final,
                CHOSEN,
                ENTRIES,
            )
        else:
            stride = tl.load(p_column + STRIDE).to(tl.int32)
            step_bytes = tl.load(p_column + STEP_BYTES).to(tl.int32)
            # Row of the batch and number within it of each line, and the row's window.      [TILE]
            i_line = i_first * TILE + tl.arange(0, TILE)
            i_row = i_line // lines
            i_line = i_line - i_row * lines
            m_row = i_row < batch
            low, count, head, o_ids = _window(
                p_slots, p_anchors, p_extent, i_row, m_row, offset, length, pad, final
            )

            # The line's block, counted from the window's first, and the line's first byte within it. Lines are
            # numbered as if a trajectory's blocks were adjacent.                              [TILE]
            if block_shift >= 0:
                i_block = low >> block_shift  # there is no instruction that divides int64
            else:
                i_block = low // block_steps
            o_ids += i_block
            first = (low - i_block * block_steps).to(tl.int32)  # step within the window's first block
            o_line = (first * step_bytes // 128 + i_line) * 128
            n_block = o_line // stride
            o_inside = o_line - n_block * stride
            block_bytes = block_steps * step_bytes
            # Start of the line relative to the window's first step, in bytes without block padding.
            o_steps = n_block * block_bytes + o_inside - first * step_bytes
            m_line = m_row & (o_steps < count * step_bytes)
            block_id = tl.load(p_block_ids + o_ids + n_block, mask=m_line, other=0).to(tl.int64)
            # Bytes [start, end) of the line are in the window; byte 0 of the line goes to `o_out`.
            start = -o_steps
            end = tl.where(m_line, tl.minimum(block_bytes - o_inside, count * step_bytes - o_steps), 0)
            row_bytes = length * step_bytes
            if CHOSEN:
                i_out = tl.load(p_rows + i_row, mask=m_row, other=0)
            else:
                i_out = i_row.to(tl.int64)
            o_row = i_out * row_bytes
            o_out = o_row + head * step_bytes + o_steps
            # Padding in the output's line of the same number: bytes before `pad_from` and [pad_to, pad_stop).
            pad_from = head * step_bytes - i_line * 128
            pad_to = pad_from + count * step_bytes
            pad_stop = tl.where(m_row, row_bytes - i_line * 128, 0)

            # Whole lines in, wanted words out, in words of 4 bytes.                          [TILE, 32]
            o_word = tl.arange(0, 32)[None, :]
            p_source = tl.load(p_column + BASE).to(tl.pointer_type(tl.int32))
            o_source = ((block_id * stride + o_inside) // 128) * 32
            if WORD == 16:
                # Tells the compiler that every bound is a whole number of 16-byte words.
                p_source = tl.multiple_of(p_source, 128)
                p_out = tl.multiple_of(a_out.to(tl.pointer_type(tl.int32)), 16)
                o_out = (o_out // 16) * 4
                o_row = (o_row // 16) * 4 + i_line * 32
                start, end = start // 16 * 4, end // 16 * 4
                pad_from, pad_to, pad_stop = pad_from // 16 * 4, pad_to // 16 * 4, pad_stop // 16 * 4
            elif WORD == 4:
                p_out = a_out.to(tl.pointer_type(tl.int32))
                o_out = o_out // 4
                o_row = o_row // 4 + i_line * 32
                start, end = start // 4, end // 4
                pad_from, pad_to, pad_stop = pad_from // 4, pad_to // 4, pad_stop // 4
            b_line = tl.load(
                p_source + o_source[:, None] + o_word,
                mask=m_line[:, None],
                other=0,
                eviction_policy="evict_first",
            )
            if WORD != 1:
                m_word = (o_word >= start[:, None]) & (o_word < end[:, None])
                tl.store(p_out + o_out[:, None] + o_word, b_line, mask=m_word)
                m_pad = (o_word < pad_from[:, None]) | (o_word >= pad_to[:, None])
                m_pad = m_pad & (o_word < pad_stop[:, None])
                b_pad = tl.zeros([TILE, 32], dtype=tl.int32)
                if pad == PAD_EDGE:
                    o_head, o_tail = _edges(
                        p_block_ids, o_ids, first, count, m_row, block_steps, stride, step_bytes
                    )
                    o_edge = tl.where(o_word < pad_from[:, None], o_head[:, None], o_tail[:, None]) // 4
                    o_edge += (i_line[:, None] * 32 + o_word) % (step_bytes // 4)
                    b_pad = tl.load(p_source + o_edge, mask=m_pad, other=0)
                tl.store(p_out + o_row[:, None] + o_word, b_pad, mask=m_pad)
            else:
                p_out = a_out.to(tl.pointer_type(tl.int8))
                o_row += i_line * 128
                o_head = tl.zeros([TILE], dtype=tl.int64)
                o_tail = tl.zeros([TILE], dtype=tl.int64)
                if pad == PAD_EDGE:  # before the loop, which takes fewer registers than in it
                    o_head, o_tail = _edges(
                        p_block_ids, o_ids, first, count, m_row, block_steps, stride, step_bytes
                    )
                for k in tl.static_range(4):
                    o_byte = o_word * 4 + k
                    m_byte = (o_byte >= start[:, None]) & (o_byte < end[:, None])
                    tl.store(p_out + o_out[:, None] + o_byte, (b_line >> (8 * k)).to(tl.int8), mask=m_byte)
                    m_pad = (o_byte < pad_from[:, None]) | (o_byte >= pad_to[:, None])
                    m_pad = m_pad & (o_byte < pad_stop[:, None])
                    b_pad = tl.zeros([TILE, 32], dtype=tl.int8)
                    if pad == PAD_EDGE:
                        o_edge = tl.where(o_byte < pad_from[:, None], o_head[:, None], o_tail[:, None])
                        o_edge += (i_line[:, None] * 128 + o_byte) % step_bytes
                        b_word = tl.load(p_source + o_edge // 4, mask=m_pad, other=0)
                        b_pad = (b_word >> (o_edge % 4 * 8).to(tl.int32)).to(tl.int8)
                    tl.store(p_out + o_row[:, None] + o_byte, b_pad, mask=m_pad)


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
        programs: programs of the grid, each of which processes several tiles; by default one per multiprocessor. A few
            saturate the bus and leave the rest of the GPU free.

    Does not wait for the GPU. Other rows of the outputs do not change, so a batch can be gathered from several tables
    with one launch per table (see `GatherPlan.of_source`).

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or device; nothing was launched.
    """
    count = plan.check_rows(slots, anchors, rows)
    if extent.dtype != torch.int64 or extent.shape[1:] != (3,) or not extent.is_contiguous():
        raise TypeError(
            f"extent is {extent.dtype} {list(extent.shape)}; expected contiguous torch.int64 [T, 3]."
        )
    if block_ids.dtype != torch.int32 or block_ids.ndim != 1 or not block_ids.is_contiguous():
        raise TypeError(
            f"block_ids is {block_ids.dtype} {list(block_ids.shape)}; expected contiguous torch.int32 [H]."
        )
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if count == 0:
        return
    cuda = plan.device.type == "cuda"
    if programs is None:
        programs = torch.cuda.get_device_properties(plan.device).multi_processor_count if cuda else 4
    steps = plan.block_steps
    shift = -1 if steps & (steps - 1) else steps.bit_length() - 1
    with torch.cuda.device(plan.device) if cuda else contextlib.nullcontext():
        for word, table, device_table in plan.launches:
            tiles = plan.tiles(table, count, TILES[word], ENTRIES)
            gather_kernel[(min(programs, tiles),)](
                device_table,
                slots,
                anchors,
                extent,
                block_ids,
                slots if rows is None else rows,
                len(table),
                count,
                tiles,
                steps,
                shift,
                WORD=word,
                CHOSEN=rows is not None,
                TILE=TILES[word],
                ENTRIES=ENTRIES,
                **LAUNCH[word],
            )
