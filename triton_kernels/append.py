"""Append a row of each of n environments to its trajectory's blocks in pinned host memory, and end those that are done.

Only the device knows how long a trajectory is. `state` holds it, and which of its environment's `lanes` the trajectory
is: each has blocks, which the host has given it beforehand. A row goes into the image of its block, and from there go
the lines that are full, and when the trajectory ends all others. So each 128-byte line crosses the bus once.

    rows     uint8 [n, 2, row bytes]     the row, and the values after it      image  uint8 [n, block bytes]
    blocks   int32 [n * lanes, W]        ends  uint8 [n]: whether the trajectory of each environment has ended
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gear_loader.kernels.append_plan import AppendPlan
from gear_loader.kernels.devices import on_device
from gear_loader.kernels.launching import launch
from gear_loader.kernels.tensor_checks import check_programs, grid_size

__all__ = ["append"]

LAUNCH: dict[str, Any] = {"TILE": 1024, "LINES": 16, "num_warps": 4}
"""Bytes of a row, and lines of an image, that a program copies at a time, and launch options."""


# Nothing is specialised on values, see `gather_kernel`.
@triton.jit
def _put(
    p_columns,
    i_column,
    i_env,
    step,
    p_block,
    block_steps,
    ends,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    LINES: tl.constexpr,
):
    """Copy row ROW (-1: it is there) into the image of its block, and from there the lines that are full; if the
    trajectory ends, all."""
    p_column = p_columns + i_column * 7
    row_bytes, block_bytes = tl.load(p_column + 3), tl.load(p_column + 5)
    step_bytes = tl.load(p_column + 6)
    image = tl.load(p_column + 1) + i_env * block_bytes
    i_block = step // block_steps
    inside = step - i_block * block_steps
    if ROW >= 0:
        p_row = tl.load(p_column) + i_env * row_bytes + ROW * tl.load(p_column + 4)
        p_row = p_row.to(tl.pointer_type(tl.uint8))
        p_image = (image + inside * step_bytes).to(tl.pointer_type(tl.uint8))
        o_byte = tl.arange(0, TILE)
        for first in range(0, step_bytes, TILE):
            m_byte = first + o_byte < step_bytes
            b_bytes = tl.load(p_row + first + o_byte, mask=m_byte, other=0)
            tl.store(p_image + first + o_byte, b_bytes, mask=m_byte)
        tl.debug_barrier()
    whole = (ends != 0) | (inside == block_steps - 1)
    first_word = inside * step_bytes // 128 * 32
    end_word = ((inside + 1) * step_bytes + tl.where(whole, 127, 0)) // 128 * 32
    # Tells the compiler that both addresses are multiples of 128, which `AppendPlan` checks.
    block = tl.load(p_block + i_block).to(tl.int64)
    p_lines = tl.multiple_of(image.to(tl.pointer_type(tl.int32)), 128)
    p_target = tl.multiple_of(
        (tl.load(p_column + 2) + block * block_bytes).to(tl.pointer_type(tl.int32)), 128
    )
    o_word = tl.arange(0, LINES * 32)
    for word in range(first_word, end_word, LINES * 32):
        at = (word // 32) * 32
        m_word = o_word < end_word - at
        b_words = tl.load(p_lines + at + o_word, mask=m_word, other=0)
        tl.store(p_target + at + o_word, b_words, mask=m_word)
    tl.debug_barrier()  # the next row may go where these bytes were read


@triton.jit(
    do_not_specialize=[
        "p_columns",
        "p_state",
        "p_done",
        "p_ends",
        "p_blocks",
        "num_columns",
        "count",
        "lanes",
        "width",
        "block_steps",
    ]
)
def append_kernel(
    p_columns,  # int64 [C, 7]: addresses of rows, image, target; bytes of an environment's rows, of a row, block, step
    p_state,  # int32 [n, 2]
    p_done,  # uint8 [n]
    p_ends,  # uint8 [n] in host memory
    p_blocks,  # int32 [n * lanes, W] in host memory
    num_columns,
    count,  # n
    lanes,
    width,  # W
    block_steps,
    ROW: tl.constexpr,  # whether there is a row; else all trajectories end with the row before
    FINAL: tl.constexpr,  # whether the values after a trajectory's last row follow it
    TILE: tl.constexpr,
    LINES: tl.constexpr,
):
    for i_env in range(tl.program_id(0), count, tl.num_programs(0)):
        step, lane = tl.load(p_state + 2 * i_env), tl.load(p_state + 2 * i_env + 1)
        p_block = p_blocks + (lane.to(tl.int64) + i_env * lanes) * width
        if ROW:
            done = tl.load(p_done + i_env).to(tl.int32)
            for i_column in range(num_columns):
                _put(
                    p_columns,
                    i_column,
                    i_env,
                    step,
                    p_block,
                    block_steps,
                    0 if FINAL else done,
                    0,
                    TILE,
                    LINES,
                )
            step += 1
            if FINAL:
                if done != 0:
                    for i_column in range(num_columns):
                        _put(p_columns, i_column, i_env, step, p_block, block_steps, 1, 1, TILE, LINES)
        else:
            done = (step > 0).to(tl.int32)
            if done != 0:
                for i_column in range(num_columns):
                    _put(p_columns, i_column, i_env, step - 1, p_block, block_steps, 1, -1, TILE, LINES)
        tl.store(p_ends + i_env, (done != 0).to(tl.uint8))
        tl.debug_barrier()  # all threads have read the state
        tl.store(p_state + 2 * i_env, tl.where(done != 0, 0, step))
        tl.store(p_state + 2 * i_env + 1, tl.where(done != 0, (lane + 1) % lanes, lane))


def append(
    plan: AppendPlan,
    done: torch.Tensor | None,
    ends: torch.Tensor,
    blocks: torch.Tensor,
    *,
    final: bool = False,
    programs: int | None = None,
) -> None:
    """Append the row of each environment that lies in the plan, on the current stream of its device.

    Args:
        plan: see `AppendPlan`. An environment whose trajectory ends goes on with its next lane, and after the last with
            the first.
        done: bool [n] on the device: environments whose trajectory ends with this row. None: no row is appended, and
            all trajectories that have one end.
        ends: uint8 [n], output, in pinned memory: 1 for each environment whose trajectory has ended.
        blocks: int32 [n * lanes, W], in memory that the device can read: of each lane its blocks, in order. Values are
            not checked: an invalid block is written to other memory.
        final: whether a trajectory that ends gets the second row of the plan behind its steps.
        programs: programs of the grid; by default one for each environment.

    Does not wait for the GPU: what a trajectory needs of `blocks` must not change until the kernel has run. Its bytes
    and `ends` are in the host's memory when an event after it has happened.

    Raises:
        TypeError, ValueError: arguments of another dtype or shape; nothing was launched.
    """
    plan.check(done, ends, blocks)
    check_programs(programs)
    with on_device(plan.device):
        launch(
            append_kernel,
            grid_size(programs, plan.num, plan.num),
            plan.device_table,
            plan.state,
            (ends if done is None else done).view(torch.uint8),
            ends,
            blocks,
            len(plan.columns),
            plan.num,
            plan.lanes,
            blocks.shape[1],
            plan.block_steps,
            ROW=done is not None,
            FINAL=final,
            **LAUNCH,
        )
