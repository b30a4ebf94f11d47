"""Copy consecutive rows of staging memory to chosen rows of a batch, all pieces in one launch.

Rows received from another node lie in pinned host memory, one piece per column and mask (drawn in `PlacePlan`). The
work is split into tiles of 128-byte lines of the *source*: a program processes one tile at a time, reads whole lines,
computes each word's row, and writes the word to its target row. So host memory is read only in whole, aligned lines,
whatever the size of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gear_loader.kernels import plan as _plan
from gear_loader.kernels.devices import bus_programs, on_device
from gear_loader.kernels.launching import launch
from gear_loader.kernels.plan import LINE, PlacePlan
from gear_loader.kernels.tensor_checks import check_programs, grid_size

__all__ = ["place"]

OUT = tl.constexpr(_plan.PLACE_OUT)
ROW_BYTES = tl.constexpr(_plan.PLACE_ROW_BYTES)
WORD = tl.constexpr(_plan.PLACE_WORD)
WIDTH = tl.constexpr(_plan.PLACE_WIDTH)

LAUNCH: dict[str, Any] = {"TILE": 64, "num_warps": 8}
"""Lines per tile (8 KiB in flight per program) and launch options."""


@triton.jit
def _target(p_rows, i_first, o_first, o_byte, m_byte, row_bytes):
    """Byte offsets of a tile's bytes in the output, int64.

    `o_byte` counts from the tile's start, which lies `o_first` bytes into row `i_first` of the piece.
    """
    o_byte += o_first
    i_row = o_byte // row_bytes
    i_out = tl.load(p_rows + i_first + i_row, mask=m_byte, other=0)
    return i_out * row_bytes + (o_byte - i_row * row_bytes)


@triton.jit
def _place_16(p_source, p_rows, a_out, i_first, o_first, left, row_bytes, TILE: tl.constexpr):
    """One tile of a piece whose rows are whole 16-byte words."""
    i_part = tl.arange(0, 4)[None, :]  # words of 4 bytes within one of 16
    o_word = tl.arange(0, TILE * 8) * 4
    m_word = o_word * 4 < left
    o_out = _target(p_rows, i_first, o_first, o_word * 4, m_word, row_bytes) // 16 * 4
    # Tells the compiler that both addresses are multiples of 16, which the plan checks.
    p_source = tl.multiple_of(p_source.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)
    p_out = tl.multiple_of(a_out.to(tl.pointer_type(tl.int32)), 16)
    b_words = tl.load(  # [TILE * 8, 4]
        p_source + o_word[:, None] + i_part, mask=m_word[:, None], other=0, eviction_policy="evict_first"
    )
    tl.store(p_out + o_out[:, None] + i_part, b_words, mask=m_word[:, None])


@triton.jit
def _place_4(p_source, p_rows, a_out, i_first, o_first, left, row_bytes, TILE: tl.constexpr):
    """One tile of a piece whose rows are whole 4-byte words."""
    o_word = tl.arange(0, TILE * 32)
    m_word = o_word * 4 < left
    o_out = _target(p_rows, i_first, o_first, o_word * 4, m_word, row_bytes) // 4
    b_words = tl.load(p_source + o_word, mask=m_word, other=0, eviction_policy="evict_first")  # [TILE * 32]
    tl.store(a_out.to(tl.pointer_type(tl.int32)) + o_out, b_words, mask=m_word)


@triton.jit
def _place_1(p_source, p_rows, a_out, i_first, o_first, left, row_bytes, TILE: tl.constexpr):
    """One tile of any other piece; also read in words of 4 bytes, because pieces are padded to lines."""
    o_word = tl.arange(0, TILE * 32)
    m_word = o_word * 4 < left
    b_words = tl.load(p_source + o_word, mask=m_word, other=0, eviction_policy="evict_first")  # [TILE * 32]
    for k in tl.static_range(4):
        o_byte = o_word * 4 + k
        m_byte = o_byte < left
        o_out = _target(p_rows, i_first, o_first, o_byte, m_byte, row_bytes)
        tl.store(a_out.to(tl.pointer_type(tl.int8)) + o_out, (b_words >> (8 * k)).to(tl.int8), mask=m_byte)


# Nothing is specialised on values, see `gather_kernel`.
@triton.jit(do_not_specialize=["p_pieces", "p_staging", "p_rows", "num_pieces", "count", "num_tiles"])
def place_kernel(
    p_pieces,  # int64 [P, WIDTH]
    p_staging,  # int32 in host memory
    p_rows,  # int64 [n]
    num_pieces,
    count,
    num_tiles,
    TILE: tl.constexpr,
):
    # Positions within a row or a tile fit into int32 (the plan checks it); positions within a piece and rows of the
    # batch are int64.
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # The tile's piece, the line at which the piece begins, and the piece's first tile.
        i_piece = 0
        i_first = 0
        o_tile = 0
        o_piece = tl.zeros([], dtype=tl.int64)  # in lines
        o_line = tl.zeros([], dtype=tl.int64)
        for i in range(num_pieces):
            m_here = i_tile >= o_tile
            i_piece = tl.where(m_here, i, i_piece)
            i_first = tl.where(m_here, o_tile, i_first)
            o_piece = tl.where(m_here, o_line, o_piece)
            lines = (count * tl.load(p_pieces + i * WIDTH + ROW_BYTES) + 127) // 128
            o_tile += ((lines + TILE - 1) // TILE).to(tl.int32)
            o_line += lines
        p_piece = p_pieces + i_piece * WIDTH
        a_out = tl.load(p_piece + OUT)
        row_bytes = tl.load(p_piece + ROW_BYTES)
        word = tl.load(p_piece + WORD)

        # The tile begins `o_first` bytes into row `i_row` of the piece and has `left` bytes.
        o_byte = tl.cast(i_tile - i_first, tl.int64) * (TILE * 128)
        left = tl.minimum(count * row_bytes - o_byte, TILE * 128).to(tl.int32)
        i_row = o_byte // row_bytes
        o_first = (o_byte - i_row * row_bytes).to(tl.int32)
        row_bytes = row_bytes.to(tl.int32)
        p_source = p_staging + (o_piece * 32 + o_byte // 128 * 32)

        if word == 16:
            _place_16(p_source, p_rows, a_out, i_row, o_first, left, row_bytes, TILE)
        elif word == 4:
            _place_4(p_source, p_rows, a_out, i_row, o_first, left, row_bytes, TILE)
        else:
            _place_1(p_source, p_rows, a_out, i_row, o_first, left, row_bytes, TILE)


def place(plan: PlacePlan, staging: torch.Tensor, rows: torch.Tensor, *, programs: int | None = None) -> None:
    """Copy rows out of staging memory to rows of the plan's outputs, on its device's current stream.

    Args:
        plan: the outputs.
        staging: uint8 [at least ``plan.size(n)``] in memory that the device can read, from a multiple of 128 bytes
            on: the pieces of n rows as `PlacePlan` draws them.
        rows: int64 [n] on the plan's device, distinct, n <= batch size: row b of each piece goes to row ``rows[b]`` of
            its output. Values are not checked: an invalid row is written to other memory.
        programs: as for `gear_loader.kernels.gather.gather`.

    Does not wait for the GPU, so `staging` must not change until the kernel has run. Other rows of the outputs do not
    change.

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or device, or staging memory that is too small, not
            aligned or not pinned; nothing was launched.
    """
    count = plan.check_rows(staging, rows)
    check_programs(programs)
    if count == 0:
        return
    if plan.device.type == "cuda" and not (staging.is_cuda or staging.is_pinned()):
        raise ValueError(
            "staging is in memory that the GPU cannot read; expected pinned memory or the GPU's own."
        )
    tile = LAUNCH["TILE"] * LINE
    tiles = sum(-(-count * out.shape[1] // tile) for out in plan.outs)
    with on_device(plan.device):
        launch(
            place_kernel,
            grid_size(programs, bus_programs(plan.device), tiles),
            plan.device_table,
            staging[: plan.size(count)].view(torch.int32),
            rows,
            len(plan.outs),
            count,
            tiles,
            **LAUNCH,
        )
