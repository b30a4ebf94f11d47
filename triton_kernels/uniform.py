"""Draw uniform rows on the GPU: those that `gear_loader.native.random.uniform_rows` draws, to the last bit.

Random numbers are Philox-4x64-10 (Salmon et al., 2011) with numpy's order of counters. What there is to draw from lies
in the GPU's memory, copied once as long as it does not change; of the table's index only the rows' block tables are
read, across the bus.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gear_loader.kernels import uniform_reference as _set
from gear_loader.kernels.devices import on_device
from gear_loader.kernels.items import store_rows
from gear_loader.kernels.launching import launch
from gear_loader.kernels.tensor_checks import check_tensor
from gear_loader.kernels.uniform_reference import ANCHORS, RANDOM

__all__ = ["draw"]

EXTENT = tl.constexpr(_set.EXTENT)
BLOCK_IDS = tl.constexpr(_set.BLOCK_IDS)
HEADER = tl.constexpr(_set.HEADER)
SLOTS, GENERATIONS, STEPS, FINALS, COUNTS, SUMS = (tl.constexpr(i) for i in range(6))
assert (_set.SLOTS, _set.GENERATIONS, _set.STEPS, _set.FINALS, _set.COUNTS, _set.SUMS) == tuple(range(6))
UNIFORM, FIRST, LAST, ITEM = (tl.constexpr(i) for i in range(4))

LAUNCH = {"ROWS": 32, "num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def _word(seed, stream: tl.constexpr, step, epoch, i_row):
    """Random uint64 number `i_row` of a stream, [ROWS]."""
    a = (i_row // 4).to(tl.uint64) + 1
    b = a * 0
    c = b + step.to(tl.uint64)
    d = b + epoch.to(tl.uint64)
    m_0 = b + 0xD2E7470EE14C6C93
    m_1 = b + 0xCA5A826395121157
    k_0 = b + seed.to(tl.uint64)
    k_1 = b + stream
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(m_0, a), m_0 * a
        high_1, low_1 = tl.umulhi(m_1, c), m_1 * c
        a, b, c, d = high_1 ^ b ^ k_0, low_1, high_0 ^ d ^ k_1, low_0
        k_0 += 0x9E3779B97F4A7C15
        k_1 += 0xBB67AE8584CAA73B
    i_word = i_row % 4
    return tl.where(i_word < 2, tl.where(i_word == 0, a, b), tl.where(i_word == 2, c, d))


@triton.jit
def _below(b_word, high):
    """Random integers from 0 to high - 1, int64 [ROWS]."""
    b_uniform = (b_word >> 11).to(tl.int64).to(tl.float64) * (2.0**-53)
    return tl.minimum((b_uniform * high.to(tl.float64)).to(tl.int64), high - 1)


@triton.jit(
    do_not_specialize=["count", "size", "width", "block_steps", "first", "last", "once", "lead", "stride"]
)
def uniform_kernel(
    p_random,  # int64 [RANDOM]
    p_rows,  # int64 [6, size]
    p_ids,  # int32 [size, width]
    count,
    size,
    width,
    block_steps,
    first,
    last,
    once,
    lead,
    stride,
    ANCHOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < count
    seed, step, epoch = tl.load(p_random), tl.load(p_random + 1), tl.load(p_random + 2)
    p_set = tl.load(p_random + 3).to(tl.pointer_type(tl.int64))
    held, items = tl.load(p_random + 4), tl.load(p_random + 5)
    p_extent = tl.load(p_set + EXTENT).to(tl.pointer_type(tl.int64))
    p_blocks = tl.load(p_set + BLOCK_IDS).to(tl.pointer_type(tl.int32))
    p_set += HEADER
    b_item = _below(_word(seed, 0, step, epoch, i_row), items)
    if ANCHOR == ITEM:
        # The first of the ascending sums above the item.
        i_place = b_item * 0
        left = held
        while left > 1:
            half = left // 2
            b_sum = tl.load(p_set + SUMS * held + i_place + half - 1, mask=m_row, other=0)
            i_place += tl.where(b_sum <= b_item, half, 0)
            left -= half
    else:
        i_place = b_item
    p_place = p_set + i_place
    i_slot = tl.load(p_place + SLOTS * held, mask=m_row, other=0)
    o_ids = tl.load(p_extent + i_slot * 3 + 1, mask=m_row, other=0)
    b_generation = tl.load(p_place + GENERATIONS * held, mask=m_row, other=0)
    steps = tl.load(p_place + STEPS * held, mask=m_row, other=0)
    final = tl.load(p_place + FINALS * held, mask=m_row, other=0)
    counts = tl.load(p_place + COUNTS * held, mask=m_row, other=1)
    if ANCHOR == ITEM:
        b_number = b_item - (tl.load(p_place + SUMS * held, mask=m_row, other=0) - counts)
    elif ANCHOR == UNIFORM:
        b_number = _below(_word(seed, 1, step, epoch, i_row), counts)
    elif ANCHOR == FIRST:
        b_number = counts * 0
    else:
        b_number = counts - 1
    b_anchor = lead + stride * b_number
    store_rows(
        p_rows, p_ids, p_blocks, o_ids, i_row, m_row, m_row, i_slot, b_anchor, b_generation, steps, final, size,
        width, block_steps, first, last, once,
    )  # fmt: skip


def draw(
    random: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    *,
    anchor: str,
    block_steps: int,
    first: int,
    last: int,
    once: bool = False,
    lead: int = 0,
    stride: int = 1,
) -> None:
    """Draw rows uniformly, with replacement, and look up what the gather needs of them.

    Args:
        random: int64 [RANDOM] in memory that the device can read: seed, step and epoch as for `uniform_rows`; address
            of what is drawn from (`uniform_reference.drawn_from`), a tensor on the device; number of its trajectories,
            and of its items.
        rows, ids, first, last, once: as for `items.resolve`, for all rows of `ids`.
        anchor: one of `ANCHORS`; ``"item"`` draws steps, the others trajectories.
        block_steps: steps of a block.
        lead: the step of the first anchor of a trajectory. stride: steps from one to the next.

    A read ticket, taken when nothing had changed that is drawn from, protects the trajectories while this runs. Does
    not wait for the GPU.

    Raises:
        TypeError, ValueError: other shapes, dtypes or devices; nothing was launched.
    """
    count, device = len(ids), ids.device
    check_tensor("ids", ids, torch.int32, (count, ids.shape[-1]), device)
    check_tensor("rows", rows, torch.int64, (6, count), device)
    check_tensor("random", random, torch.int64, (RANDOM,))
    if anchor not in ANCHORS:
        raise ValueError(f"anchor is {anchor!r}; expected one of {ANCHORS}.")
    if count == 0:
        return
    with on_device(device):
        launch(
            uniform_kernel,
            (triton.cdiv(count, LAUNCH["ROWS"]),),
            random,
            rows,
            ids,
            count,
            count,
            ids.shape[-1],
            block_steps,
            first,
            last,
            int(once),
            lead,
            stride,
            ANCHOR=ANCHORS.index(anchor),
            **LAUNCH,
        )
