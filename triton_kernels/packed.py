"""Gather rows of different lengths from host memory, one after another, all columns of a batch in one launch.

The work is split into 128-byte lines of the *source*, as in `gather`. The host knows the rows' lengths, so it lists the
batch's pieces, steps that lie side by side, and the lines of each (`packed_plan`): no row has to be searched for, and
nothing is padded. A program processes one tile of lines of one column at a time: it reads whole lines, and writes the
part of each that belongs to its piece, in words as wide as the column allows:

    pieces in their blocks    | block 7    --======|  | block 2  ====------|
    in the batch                     ... previous row |======|====| next row ...

Columns of all sizes and sources, and those per trajectory, are tiles of the same launch; the last tiles write
`position`. All that differs between batches lies in memory, so each launch is the same as the one before.

**Pipeline.** Three loads, one after another, lead to a line's address:

    tile            of tile k + 3   into registers
    group           of tile k + 2
    piece, column   of tile k + 1
    lines           of tile k + 1   into shared memory, asynchronously
    stores          of tile k
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gear_loader.kernels import packed_plan as _plan
from gear_loader.kernels.devices import bus_programs, on_device
from gear_loader.kernels.gather import _clip, _store
from gear_loader.kernels.launching import launch
from gear_loader.kernels.packed_plan import PackedPlan
from gear_loader.kernels.tensor_checks import check_programs

__all__ = ["gather_packed"]

BASE = tl.constexpr(_plan.PACKED_BASE)
STRIDE = tl.constexpr(_plan.PACKED_STRIDE)
STEP_BYTES = tl.constexpr(_plan.PACKED_STEP_BYTES)
OUT = tl.constexpr(_plan.PACKED_OUT)
WIDTH = tl.constexpr(_plan.PACKED_WIDTH)
BLOCK = tl.constexpr(_plan.PIECE_BLOCK)
FIRST = tl.constexpr(_plan.PIECE_FIRST)
STEPS = tl.constexpr(_plan.PIECE_STEPS)
PLACE = tl.constexpr(_plan.PIECE_OUT)
NUMBER = tl.constexpr(_plan.PIECE_NUMBER)
PIECE = tl.constexpr(_plan.PIECE_WIDTH)
END_16 = tl.constexpr(_plan.WORK_END_16)
END_4 = tl.constexpr(_plan.WORK_END_4)
LINE_TILES = tl.constexpr(_plan.WORK_LINE_TILES)
NUM_TILES = tl.constexpr(_plan.WORK_NUM_TILES)
COLUMNS = tl.constexpr(_plan.WORK_COLUMNS)
TILES = tl.constexpr(_plan.WORK_TILES)
GROUPS = tl.constexpr(_plan.WORK_GROUPS)
PIECES = tl.constexpr(_plan.WORK_PIECES)

LAUNCH: dict[str, Any] = {"TILE": _plan.TILE_LINES, "STAGES": 3, "num_warps": 4}
"""Lines of a tile and launch options. `STAGES`: tiles whose lines are requested or stored at a time."""


@triton.jit
def _group(p_groups, tile, TILE: tl.constexpr):
    """A tile's pieces, and the lines' numbers in them: int32 and int64 [TILE]."""
    shift = (tile >> 24).to(tl.int32) & 0xFF
    i_line = tl.arange(0, TILE)
    group = tl.load(p_groups + (tile >> 32) + (i_line >> shift))
    return group.to(tl.int32), (group >> 32) + (i_line & ((1 << shift) - 1))


@triton.jit
def _piece(p_parts, i_piece):
    """Block, first step, number of steps and place in the batch of pieces: int32 [TILE] each."""
    p_part = p_parts + i_piece.to(tl.int64) * PIECE
    return tl.load(p_part + BLOCK), tl.load(p_part + FIRST), tl.load(p_part + STEPS), tl.load(p_part + PLACE)


@triton.jit
def _column(p_columns, tile):
    """Address, bytes from block to block, bytes of a step and output of a tile's column."""
    p_column = p_columns + (tile & 0xFFFFFF) * WIDTH
    return (
        tl.load(p_column + BASE),
        tl.load(p_column + STRIDE),
        tl.load(p_column + STEP_BYTES),
        tl.load(p_column + OUT),
    )


@triton.jit
def _lines(base, stride, step_bytes, a_out, block, first, steps, place, i_line):
    """Addresses of lines, of their first bytes in the output, and bytes within the piece (``start | end << 10``)."""
    o_first = first * step_bytes
    o_line = (o_first // 128 + i_line) * 128
    o_piece = o_line - o_first  # from the piece's first byte; may be below 0
    end = _clip(steps * step_bytes - o_piece, 128).to(tl.int32)
    b_range = tl.where(end > 0, _clip(-o_piece, 128).to(tl.int32) | (end << 10), 0)
    return base + block * stride + o_line, a_out + place * step_bytes + o_piece, b_range


@triton.jit
def _store_numbers(p_position, p_parts, i_piece, i_line):
    """Write the numbers of a tile's steps, 32 a line."""
    p_part = p_parts + i_piece.to(tl.int64) * PIECE
    steps, place, number = tl.load(p_part + STEPS), tl.load(p_part + PLACE), tl.load(p_part + NUMBER)
    o_step = i_line[:, None] * 32 + tl.arange(0, 32)[None, :]  # [TILE, 32]
    b_number = (number[:, None] + o_step).to(tl.int32)
    tl.store(p_position + place[:, None] + o_step, b_number, mask=o_step < steps[:, None])


# Nothing is specialised on values, see `gather_kernel`.
@triton.jit(do_not_specialize=["p_work", "p_parts", "p_position"])
def packed_kernel(
    p_work,  # int64 [words], see `packed_plan`
    p_parts,  # the same memory, int32
    p_position,  # int32 [steps]
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    # Tiles up to `end_16` are written in words of 16 bytes, up to `end_4` in words of 4, the other columns by bytes.
    end_16, end_4 = tl.load(p_work + END_16).to(tl.int32), tl.load(p_work + END_4).to(tl.int32)
    line_tiles = tl.load(p_work + LINE_TILES).to(tl.int32)
    num_tiles = tl.load(p_work + NUM_TILES).to(tl.int32)
    p_columns = p_work + tl.load(p_work + COLUMNS)
    p_tiles = p_work + tl.load(p_work + TILES)
    p_groups = p_work + tl.load(p_work + GROUPS)
    p_parts += 2 * tl.load(p_work + PIECES)
    # A tile after the last one is that one once more, which is not used; there is always one to read.
    last = tl.maximum(line_tiles - 1, 0)
    tile = tl.load(p_tiles + tl.minimum(program, last))
    i_piece, i_line = _group(p_groups, tile, TILE)
    block, first, steps, place = _piece(p_parts, i_piece)
    base, stride, step_bytes, out = _column(p_columns, tile)
    y_tile = tl.load(p_tiles + tl.minimum(program + programs, last))
    y_piece, y_line = _group(p_groups, y_tile, TILE)
    i_next = tl.minimum(program + 2 * programs, last)
    z_tile = tl.load(p_tiles + i_next)
    for i_tile in tl.range(program, line_tiles, programs, num_stages=STAGES):
        # Loads in a branch stay where they are, so that Triton pipelines only those of the lines, see `gather`.
        if i_tile + programs < line_tiles:
            a_source, a_out, b_range = _lines(
                base, stride, step_bytes, out, block.to(tl.int64), first.to(tl.int64), steps.to(tl.int64),
                place.to(tl.int64), i_line,
            )  # fmt: skip
            block, first, steps, place = _piece(p_parts, y_piece)
            base, stride, step_bytes, out = _column(p_columns, y_tile)
            i_line, y_tile = y_line, z_tile
            y_piece, y_line = _group(p_groups, z_tile, TILE)
            i_next = tl.minimum(i_next + programs, last)
            z_tile = tl.load(p_tiles + i_next)
        else:
            a_source, a_out, b_range = _lines(
                base, stride, step_bytes, out, block.to(tl.int64), first.to(tl.int64), steps.to(tl.int64),
                place.to(tl.int64), i_line,
            )  # fmt: skip
        # Whole lines, in words of 4 bytes.                                                   [TILE, 32]
        p_source = tl.multiple_of((a_source // 128 * 128).to(tl.pointer_type(tl.int32)), 128)
        b_line = tl.load(
            p_source[:, None] + tl.arange(0, 32)[None, :],
            mask=(b_range > 0)[:, None],
            other=0,
            eviction_policy="evict_first",
        )
        if i_tile < end_16:
            _store(b_line, a_out, b_range, 0, 1, 0, 16)
        elif i_tile < end_4:
            _store(b_line, a_out, b_range, 0, 1, 0, 4)
        else:
            _store(b_line, a_out, b_range, 0, 1, 0, 1)

    # The program's next tile, as if all were in one row.
    begin = line_tiles + (program + programs - line_tiles % programs) % programs
    for i_tile in range(begin, num_tiles, programs):
        i_piece, i_line = _group(p_groups, tl.load(p_tiles + i_tile), TILE)
        _store_numbers(p_position, p_parts, i_piece, i_line)


def gather_packed(plan: PackedPlan, work: torch.Tensor, *, programs: int | None = None) -> None:
    """Fill the plan's outputs with the rows of a batch, one after another, on its device's current stream.

    Args:
        plan: the columns whose outputs are written; their sources lie in memory that the device can read.
        work: int64 [words], on the plan's device, made by `gear_loader.native.packed_lines`. Its values are not
            checked: an invalid one is written to, or read from, other memory.
        programs: programs of the grid, each of which processes several tiles; by default `BUS_PROGRAMS`.

    Does not wait for the GPU. What the batch has no step or row for does not change.

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or device; nothing was launched.
    """
    plan.check_work(work)
    check_programs(programs)
    with on_device(plan.device):
        launch(
            packed_kernel,
            (bus_programs(plan.device) if programs is None else programs,),
            work,
            work.view(torch.int32),
            plan.position,
            **LAUNCH,
        )
