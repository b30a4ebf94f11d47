"""Split gathered records into the columns of a batch, all columns in one launch, within the GPU's memory.

A packed table stores its narrow columns step by step in records, which `gather` reads from host memory as one wide
column. The work here is split into tiles of consecutive words of the *output*: a program processes one tile of one
column at a time, finds each word's row, step and record, and copies it. Writes are side by side; the words that are
read of one record lie in the lines that the other columns read too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gear_loader.kernels import split_plan as _plan
from gear_loader.kernels.devices import multiprocessors, on_device
from gear_loader.kernels.launching import launch
from gear_loader.kernels.split_plan import SplitPlan
from gear_loader.kernels.tensor_checks import check_programs, check_tensor, grid_size

__all__ = ["split"]

SOURCE = tl.constexpr(_plan.SPLIT_SOURCE)
ROW_BYTES = tl.constexpr(_plan.SPLIT_ROW_BYTES)
RECORD_BYTES = tl.constexpr(_plan.SPLIT_RECORD_BYTES)
OUT = tl.constexpr(_plan.SPLIT_OUT)
LENGTH = tl.constexpr(_plan.SPLIT_LENGTH)
STEP_BYTES = tl.constexpr(_plan.SPLIT_STEP_BYTES)
WORD = tl.constexpr(_plan.SPLIT_WORD)
WIDTH = tl.constexpr(_plan.SPLIT_WIDTH)

LAUNCH: dict[str, Any] = {"TILE": 1024, "num_warps": 8}
"""Words of a tile and launch options."""


@triton.jit
def _words(
    p_rows,
    i_row,
    o_first,
    o_word,
    m_word,
    row_words,
    step_words,
    row_bytes,
    record_bytes,
    CHOSEN: tl.constexpr,
):
    """Offsets of a tile's words: in bytes of the records, and in words of the output; int64 [TILE] each.

    `o_word` counts from the tile's start, which lies `o_first` words into row `i_row` of those that are split.
    """
    o_word += o_first
    i_more = o_word // row_words
    o_word -= i_more * row_words
    i_out = i_row + i_more
    if CHOSEN:
        i_out = tl.load(p_rows + i_out, mask=m_word, other=0)
    i_step = o_word // step_words
    return i_out * row_bytes + i_step * record_bytes, o_word - i_step * step_words, i_out * row_words + o_word


@triton.jit
def _copy_16(a_source, a_out, o_source, o_out, m_word):
    """Copy words of 16 bytes, as four of 4."""
    i_part = tl.arange(0, 4)[None, :]
    # Tells the compiler that both addresses are multiples of 16, which the plan checks.
    p_source = tl.multiple_of(a_source.to(tl.pointer_type(tl.int32)), 16)
    p_out = tl.multiple_of(a_out.to(tl.pointer_type(tl.int32)), 16)
    b_words = tl.load(p_source + (o_source * 4)[:, None] + i_part, mask=m_word[:, None], other=0)  # [TILE, 4]
    tl.store(p_out + (o_out * 4)[:, None] + i_part, b_words, mask=m_word[:, None])


@triton.jit
def _copy_4(a_source, a_out, o_source, o_out, m_word):
    """Copy words of 4 bytes."""
    b_words = tl.load(a_source.to(tl.pointer_type(tl.int32)) + o_source, mask=m_word, other=0)  # [TILE]
    tl.store(a_out.to(tl.pointer_type(tl.int32)) + o_out, b_words, mask=m_word)


@triton.jit
def _copy_1(a_source, a_out, o_source, o_out, m_word):
    """Copy single bytes."""
    b_words = tl.load(a_source.to(tl.pointer_type(tl.int8)) + o_source, mask=m_word, other=0)  # [TILE]
    tl.store(a_out.to(tl.pointer_type(tl.int8)) + o_out, b_words, mask=m_word)


@triton.jit
def _tiles(p_column, count, TILE: tl.constexpr):
    """Tiles of a column of `count` rows."""
    words = count * tl.load(p_column + LENGTH) * tl.load(p_column + STEP_BYTES) // tl.load(p_column + WORD)
    return ((words + TILE - 1) // TILE).to(tl.int32)


# Nothing is specialised on values, see `gather_kernel`.
@triton.jit(do_not_specialize=["p_columns", "p_rows", "p_count", "num_columns", "count", "num_tiles"])
def split_kernel(
    p_columns,  # int64 [C, WIDTH]
    p_rows,  # int64 [n] if CHOSEN
    p_count,  # int64 [1] if COUNTED: the number of rows
    num_columns,
    count,
    num_tiles,
    CHOSEN: tl.constexpr,  # whether entry b is row p_rows[b] of records and outputs, or row b
    COUNTED: tl.constexpr,
    TILE: tl.constexpr,
):
    if COUNTED:
        count = tl.load(p_count)
        num_tiles = 0
        for i in range(num_columns):
            num_tiles += _tiles(p_columns + i * WIDTH, count, TILE)
    # Positions within a row or a tile fit into int32 (the plan checks it); rows of the batch are int64.
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # The tile's column, and the column's first tile.
        i_column = 0
        i_first = 0
        o_tile = 0
        for i in range(num_columns):
            m_here = i_tile >= o_tile
            i_column = tl.where(m_here, i, i_column)
            i_first = tl.where(m_here, o_tile, i_first)
            o_tile += _tiles(p_columns + i * WIDTH, count, TILE)
        p_column = p_columns + i_column * WIDTH
        a_source = tl.load(p_column + SOURCE)
        a_out = tl.load(p_column + OUT)
        row_bytes = tl.load(p_column + ROW_BYTES)
        record_bytes = tl.load(p_column + RECORD_BYTES).to(tl.int32)
        word = tl.load(p_column + WORD)
        step_words = (tl.load(p_column + STEP_BYTES) // word).to(tl.int32)
        row_words = tl.load(p_column + LENGTH).to(tl.int32) * step_words

        # The tile begins `o_first` words into row `i_row` and has `left` words.
        o_begin = tl.cast(i_tile - i_first, tl.int64) * TILE
        left = tl.minimum(count * tl.cast(row_words, tl.int64) - o_begin, TILE).to(tl.int32)
        i_row = o_begin // row_words
        o_first = (o_begin - i_row * row_words).to(tl.int32)
        o_word = tl.arange(0, TILE)
        m_word = o_word < left
        o_record, o_inside, o_out = _words(
            p_rows, i_row, o_first, o_word, m_word, row_words, step_words, row_bytes, record_bytes, CHOSEN
        )
        if word == 16:
            _copy_16(a_source, a_out, o_record // 16 + o_inside, o_out, m_word)
        elif word == 4:
            _copy_4(a_source, a_out, o_record // 4 + o_inside, o_out, m_word)
        else:
            _copy_1(a_source, a_out, o_record + o_inside, o_out, m_word)


def split(
    plan: SplitPlan,
    count: int | torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Copy the columns of gathered records into their outputs, on the plan's device's current stream.

    Args:
        plan: records and outputs.
        count: number of rows, n <= batch size; or int64 [1] on the plan's device, which is not checked.
        rows: int64 [n] on the plan's device, distinct: the rows to split; by default rows 0 to n - 1. Values are not
            checked: an invalid row reads and writes other memory.
        programs: programs of the grid, each of which processes several tiles; by default one per multiprocessor.

    Does not wait for the GPU. Other rows of the outputs do not change.

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or device; nothing was launched.
    """
    counted = isinstance(count, torch.Tensor)
    if isinstance(count, torch.Tensor):
        check_tensor("count", count, torch.int64, "[1]", device=plan.device)
        limit = plan.batch_size
    else:
        limit = count
    plan.check_rows(limit, rows)
    check_programs(programs)
    if limit == 0:
        return
    tiles = plan.tiles(limit, LAUNCH["TILE"])
    with on_device(plan.device):
        launch(
            split_kernel,
            grid_size(programs, multiprocessors(plan.device), tiles),
            plan.device_table,
            plan.device_table if rows is None else rows,
            count if counted else plan.device_table,
            len(plan.columns),
            limit,
            tiles,
            CHOSEN=rows is not None,
            COUNTED=counted,
            **LAUNCH,
        )
