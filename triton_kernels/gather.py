"""Gather windows of trajectories out of host memory, all columns of a batch in one launch.

The work is cut into lines of 128 bytes of the *source*. Row b of the batch gets `LINES` of them in every column, the
most that its window can touch; a program takes a tile of them at a time, whichever rows they belong to, finds each
line's row, block and address, reads the whole line, and writes the part of it that the window wants:

    steps of a trajectory     | block 7         | block 2         |      window: steps 3 to 9
    lines of its blocks       |-----|-----|--pad|-----|-----|--pad|
    lines that are read          ===== =====     ===== =====

So host memory is only ever read in whole, aligned lines, whatever the size of a step, and small rows fill a tile as
well as large ones. The same line number also stands for 128 bytes of the *output*, of which the program writes the
padding, and for 128 entries of the mask.
"""

from __future__ import annotations

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
WIDTH = tl.constexpr(_plan.WIDTH)
PAD_KEEP = tl.constexpr(_plan.PAD_KEEP)
PAD_HEAD = tl.constexpr(_plan.PAD_HEAD)

TILE = 64
"""Lines of a tile: 8 KiB in flight a program."""


@triton.jit
def gather_kernel(
    p_columns,  # int64 [C, WIDTH]
    p_slots,  # int64 [B]
    p_anchors,  # int64 [B]
    p_extent,  # int64 [T, 2] in host memory
    p_block_ids,  # int32 [H] in host memory
    num_columns,
    batch,
    num_tiles,
    block_steps,
    WORD: tl.constexpr,  # bytes of which steps are whole multiples: 16, 4 or 1
    TILE: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    for i_tile in range(i_program, num_tiles.to(tl.int64), tl.num_programs(0)):
        # Which column this tile belongs to, and which tile of it it is.
        i_column = 0
        i_first = i_tile * 0
        o_tile = i_tile * 0
        for i in range(num_columns):
            tiles = (batch * tl.load(p_columns + i * WIDTH + LINES) + TILE - 1) // TILE
            i_column = tl.where(i_tile >= o_tile, i, i_column)
            i_first = tl.where(i_tile >= o_tile, o_tile, i_first)
            o_tile += tiles
        p_column = p_columns + i_column * WIDTH
        stride = tl.load(p_column + STRIDE)
        step_bytes = tl.load(p_column + STEP_BYTES)
        length = tl.load(p_column + LENGTH)
        pad = tl.load(p_column + PAD)
        lines = tl.load(p_column + LINES)

        # Row of the batch and number within it of each line, and the row's window.          [TILE]
        i_line = (i_tile - i_first) * TILE + tl.arange(0, TILE)
        i_row = i_line // lines
        i_line = i_line % lines
        m_row = i_row < batch
        slot = tl.load(p_slots + i_row, mask=m_row, other=0)
        begin = tl.load(p_anchors + i_row, mask=m_row, other=0) + tl.load(p_column + OFFSET)
        steps = tl.load(p_extent + slot * 2, mask=m_row, other=0)
        o_ids = tl.load(p_extent + slot * 2 + 1, mask=m_row, other=0)
        low = tl.minimum(tl.maximum(begin, 0), steps)
        high = tl.maximum(tl.minimum(begin + length, steps), low)
        count = high - low
        head = tl.where(pad == PAD_HEAD, length - count, 0)
        head = tl.where(pad == PAD_KEEP, tl.where(count > 0, low - begin, length), head)

        # The line's block and the byte at which it starts within it. A trajectory's blocks stand one after
        # another in a virtual address space, so that lines can be counted through.           [TILE]
        i_block = low // block_steps
        first_byte = i_block * stride + (low - i_block * block_steps) * step_bytes
        o_virtual = (first_byte // 128 + i_line) * 128
        last = high - 1
        last_block = last // block_steps
        end_byte = last_block * stride + (last - last_block * block_steps + 1) * step_bytes
        m_line = m_row & (count > 0) & (o_virtual < end_byte)
        i_block = o_virtual // stride
        o_inside = o_virtual - i_block * stride
        block_id = tl.load(p_block_ids + o_ids + i_block, mask=m_line, other=0).to(tl.int64)
        block_bytes = block_steps * step_bytes
        # Bytes of this line that are steps of the window: from m_from to m_to within the line.
        window_end = tl.minimum(block_bytes, high * step_bytes - i_block * block_bytes) - o_inside
        m_to = tl.where(m_line, window_end, 0)
        m_from = low * step_bytes - i_block * block_bytes - o_inside
        # Where the line's first byte goes, relative to the output.
        o_out = (i_row * length + head - low) * step_bytes + i_block * block_bytes + o_inside
        o_source = block_id * stride + o_inside

        # Whole lines in, wanted words out.                                                   [TILE, words]
        if WORD == 1:
            o_word = tl.arange(0, 128)[None, :]
            p_source = tl.load(p_column + BASE).to(tl.pointer_type(tl.int8))
            p_out = tl.load(p_column + OUT).to(tl.pointer_type(tl.int8))
            o_source = (o_source // 128) * 128
            m_word = (o_word >= m_from[:, None]) & (o_word < m_to[:, None])
            b_zero = tl.zeros([TILE, 128], dtype=tl.int8)
            zero_from = head * step_bytes - i_line * 128
            zero_to = (head + count) * step_bytes - i_line * 128
            zero_end = length * step_bytes - i_line * 128
            o_zero = i_row * length * step_bytes + i_line * 128
        else:
            # In words of 4 bytes; for WORD == 16 the compiler is shown that all bounds are multiples of 4 words.
            o_word = tl.arange(0, 32)[None, :]
            GROUP: tl.constexpr = WORD // 4
            p_source = tl.multiple_of(tl.load(p_column + BASE), 128).to(tl.pointer_type(tl.int32))
            p_out = tl.multiple_of(tl.load(p_column + OUT), WORD).to(tl.pointer_type(tl.int32))
            o_source = (o_source // 128) * 32
            o_out = (o_out // WORD) * GROUP
            m_word = (o_word >= (m_from // WORD * GROUP)[:, None]) & (o_word < (m_to // WORD * GROUP)[:, None])
            b_zero = tl.zeros([TILE, 32], dtype=tl.int32)
            zero_from = (head * step_bytes // WORD * GROUP) - i_line * 32
            zero_to = ((head + count) * step_bytes // WORD * GROUP) - i_line * 32
            zero_end = (length * step_bytes // WORD * GROUP) - i_line * 32
            o_zero = (i_row * length * step_bytes // WORD * GROUP) + i_line * 32
        b_line = tl.load(
            p_source + o_source[:, None] + o_word, mask=m_line[:, None], other=0, eviction_policy="evict_first"
        )
        tl.store(p_out + o_out[:, None] + o_word, b_line, mask=m_word)

        # Padding of the output's line of the same number, if a row of this tile has any.
        if tl.max((m_row & (count < length)).to(tl.int32), axis=0) > 0:
            m_zero = (o_word < zero_from[:, None]) | (o_word >= zero_to[:, None])
            m_zero = m_zero & (o_word < zero_end[:, None]) & m_row[:, None]
            tl.store(p_out + o_zero[:, None] + o_word, b_zero, mask=m_zero)

        # The mask's 128 entries of the same number.
        a_mask = tl.load(p_column + MASK)
        if a_mask != 0:
            p_mask = a_mask.to(tl.pointer_type(tl.int8))
            o_step = i_line[:, None] * 128 + tl.arange(0, 128)[None, :]
            b_mask = (o_step >= head[:, None]) & (o_step < (head + count)[:, None])
            o_mask = (i_row * length)[:, None] + o_step
            tl.store(p_mask + o_mask, b_mask.to(tl.int8), mask=m_row[:, None] & (o_step < length))


def gather(
    plan: GatherPlan,
    slots: torch.Tensor,
    anchors: torch.Tensor,
    extent: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Fill the plan's outputs and masks with the windows of the given rows, on the current stream.

    Args:
        plan: the columns; their sources and `extent` and `block_ids` lie in memory that the device can read.
        slots: int64 [n] on the plan's device, n <= batch size: which trajectories.
        anchors: int64 [n]: the steps that the windows are relative to.
        extent: int64 [T, 2]: slot -> length in steps, first entry in `block_ids`.
        block_ids: int32 [H]: block tables, a trajectory's blocks one after another.
        programs: programs of the grid, each of which takes tile after tile; by default one a multiprocessor. A
            few are enough for the bandwidth of the bus and leave the GPU to others.

    Does not wait for the GPU. Rows n and up of the outputs stay as they are.

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or device; nothing has been launched then.
    """
    count = plan.check_rows(slots, anchors)
    for name, tensor, dtype in (("extent", extent, torch.int64), ("block_ids", block_ids, torch.int32)):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise TypeError(f"{name} is {tensor.dtype}; expected contiguous {dtype}.")
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if count == 0:
        return
    if programs is None:
        cuda = plan.device.type == "cuda"
        programs = torch.cuda.get_device_properties(plan.device).multi_processor_count if cuda else 4
    for (word, chosen), table in zip(plan.groups, plan.device_tables, strict=True):
        tiles = sum(triton.cdiv(count * lines, TILE) for lines in plan.table[chosen, _plan.LINES].tolist())
        gather_kernel[(min(programs, tiles),)](
            table,
            slots,
            anchors,
            extent,
            block_ids,
            len(chosen),
            count,
            tiles,
            plan.block_steps,
            WORD=word,
            TILE=TILE,
            num_warps=4,
        )
