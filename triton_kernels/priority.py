"""Draw by priority and set priorities on a wide sum tree (`gear_loader.kernels.sum_tree`).

**Drawing.** Each row of a batch descends from the roots to a leaf; at every level it draws a new 53-bit uniform and
searches the partial sums of the node's 32 children. So an item's probability is a product of shares, each exact to
2**-53 of its node: priorities of very different sizes are all drawn.

**Setting.** An update with an invalid value is refused as a whole. Of duplicate items the last row wins: every row
first claims its leaf with a number that grows with the row (a bit pattern that no priority has); then the row that
finds its own claim writes. Then the nodes above are recomputed, level by level.

**Without replacement.** Rows are drawn as above; a row that repeats an earlier item is dropped; the drawn items are set
to 0, and the dropped rows are redrawn from the remaining items, until the batch is full. This is exact successive
sampling: in a sequence of independent draws, the next item after k distinct ones is distributed in proportion to the
remaining leaves, whatever the number of repetitions in between; setting the k items to 0 only skips these repetitions.
Exponential keys would give the same distribution, but with a pass over all items.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from gear_loader.kernels import sum_tree as _tree
from gear_loader.kernels.devices import on_device
from gear_loader.kernels.launching import launch
from gear_loader.kernels.sum_tree import SumTree
from gear_loader.kernels.tensor_checks import check_tensor

__all__ = ["build", "draw", "draw_distinct", "uniform", "update"]

BAD_POSITION = tl.constexpr(_tree.BAD_POSITION)
EMPTY_DRAWS = tl.constexpr(_tree.EMPTY_DRAWS)
DISTINCT_MISSING = tl.constexpr(_tree.DISTINCT_MISSING)
NOWHERE = tl.constexpr(_tree.NOWHERE)
UNSET = tl.constexpr(_tree.UNSET)
GONE = tl.constexpr(_tree.GONE)
LOWEST_LEAF = tl.constexpr(_tree.LOWEST_LEAF)
LARGEST_LEAF = tl.constexpr(torch.finfo(torch.float32).max)

LEVELS = tl.constexpr(4)
FIRST_CLAIM = tl.constexpr(0x7F800001)  # bits of a NaN: above those of any priority
LOWEST_CLAIM = tl.constexpr(-(1 << 31))  # bits with the sign: below those of any priority

# Fused multiply-adds would round differently from the other implementations.
DRAW = {"ROWS": 8, "num_warps": 1, "enable_fp_fusion": False}
UPDATE = {"ROWS": 256, "num_warps": 16, "enable_fp_fusion": False}
UPDATE_ALONE = {"ROWS": 512, "NODES": 256, "num_warps": 16, "maxnreg": 128, "enable_fp_fusion": False}
DISTINCT = {"ROWS": 256, "DRAWS": 32, "num_warps": 8, "maxnreg": 255, "enable_fp_fusion": False}
ALONE = 4096
"""Most rows of an update by one program, with barriers between levels instead of launches."""
MOST_CLAIMS = 1 << 22
"""Most rows that claim leaves at the same time; there are 2**23 - 1 distinct claims."""


# ---------------------------------------------------------------- parts


@triton.jit
def uniform(key, step, i_row, level):
    """53-bit uniforms in [0, 1), float64 like `i_row` (uint32), for a level of the tree."""
    c1 = (i_row * 0 + level // 2).to(tl.uint32)
    low = (i_row * 0 + (step & 0xFFFFFFFF)).to(tl.uint32)
    high = (i_row * 0 + ((step >> 32) & 0xFFFFFFFF)).to(tl.uint32)
    b_0, b_1, b_2, b_3 = tl.philox(key, i_row, c1, low, high)
    b_high = tl.where(level % 2 == 0, b_0, b_2) >> 5
    b_low = tl.where(level % 2 == 0, b_1, b_3) >> 6
    return (b_high.to(tl.float64) * 67108864.0 + b_low.to(tl.float64)) * (2.0**-53)


@triton.jit
def _add_pairs(b_part, LEAVES: tl.constexpr):
    """Add pairs, [ROWS, 2 n] -> [ROWS, n]: neighbours, or for leaves elements n apart."""
    ROWS: tl.constexpr = b_part.shape[0]
    HALF: tl.constexpr = b_part.shape[1] // 2
    if LEAVES:
        return tl.sum(tl.reshape(b_part, [ROWS, 2, HALF]), axis=1)
    else:
        return tl.sum(tl.reshape(b_part, [ROWS, HALF, 2]), axis=2)


@triton.jit
def _node_sum(b_children, LEAVES: tl.constexpr):
    """Sums of nodes, [ROWS, 32] -> [ROWS], in the order of `gear_loader.kernels.sum_tree`."""
    b_16 = _add_pairs(b_children, LEAVES)
    b_8 = _add_pairs(b_16, LEAVES)
    b_4 = _add_pairs(b_8, LEAVES)
    b_2 = _add_pairs(b_4, LEAVES)
    return tl.sum(b_2, axis=1)


@triton.jit
def _step_down(b_part, b_rest, i_place, LEAVES: tl.constexpr):
    """One binary step of a draw: choose one of two partial sums.

    Args:
        b_part: float64 or float32 [ROWS, n], partial sums; one per row is selected, exactly in either dtype.
        b_rest: float64 [ROWS], remainder of the drawn number.
        i_place: int32 [ROWS], position of the pair.
    """
    WIDTH: tl.constexpr = b_part.shape[1]
    if LEAVES:
        i_left = i_place
        i_right = i_place + WIDTH // 2
    else:
        i_left = i_place * 2
        i_right = i_left + 1
    i_part = tl.arange(0, WIDTH)[None, :]
    b_left = tl.sum(tl.where(i_part == i_left[:, None], b_part, 0.0), axis=1).to(tl.float64)
    b_right = tl.sum(tl.where(i_part == i_right[:, None], b_part, 0.0), axis=1).to(tl.float64)
    # Rounding may leave a remainder equal to the right part, even if that is 0.
    m_right = (b_rest >= b_left) & (b_right > 0)
    return tl.where(m_right, b_rest - b_left, b_rest), tl.where(m_right, i_right, i_left)


@triton.jit
def _choose(b_children, b_uniform, LEAVES: tl.constexpr):
    """Draw one of 32 children in proportion to their values; returns its position, int32 [ROWS].

    Leaves are float32 and widened only for additions: threads exchange half the bytes in the last step, and Triton 3.6
    does not repeat the sums in a second layout (which spilled 48 bytes in `draw_distinct`).
    """
    b_16 = _add_pairs(b_children.to(tl.float64), LEAVES)
    b_8 = _add_pairs(b_16, LEAVES)
    b_4 = _add_pairs(b_8, LEAVES)
    b_2 = _add_pairs(b_4, LEAVES)
    b_rest = b_uniform * tl.sum(b_2, axis=1)
    i_place = (b_uniform * 0).to(tl.int32)
    b_rest, i_place = _step_down(b_2, b_rest, i_place, LEAVES)
    b_rest, i_place = _step_down(b_4, b_rest, i_place, LEAVES)
    b_rest, i_place = _step_down(b_8, b_rest, i_place, LEAVES)
    b_rest, i_place = _step_down(b_16, b_rest, i_place, LEAVES)
    b_rest, i_place = _step_down(b_children, b_rest, i_place, LEAVES)
    return i_place


@triton.jit
def _total(p_sums, p_levels, depth):
    """Sum of all leaves."""
    offset = tl.load(p_levels + (depth - 1) * 2)
    b_roots = tl.load(p_sums + offset + tl.arange(0, 32)[None, :], volatile=True)
    return tl.sum(_node_sum(b_roots, False), axis=0)


@triton.jit
def _draw_rows(p_leaves, p_sums, p_levels, depth, key, step, i_row):
    """Draw items (int64 [ROWS]) and their leaves for rows of a batch from a tree with a positive leaf."""
    o_child = tl.arange(0, 32)[None, :]
    i_node = i_row.to(tl.int64) * 0
    for i in range(depth):
        level = depth - i
        offset = tl.load(p_levels + (level - 1) * 2)
        b_children = tl.load(p_sums + offset + i_node[:, None] * 32 + o_child)
        i_child = _choose(b_children, uniform(key, step, i_row, level), False)
        i_node = i_node * 32 + i_child
    b_leaves = tl.load(p_leaves + i_node[:, None] * 32 + o_child)
    i_child = _choose(b_leaves, uniform(key, step, i_row, 0), True)
    b_leaf = tl.sum(tl.where(o_child == i_child[:, None], b_leaves, 0.0), axis=1)
    return i_node * 32 + i_child, b_leaf


@triton.jit
def _refresh_tile(p_leaves, p_sums, p_mins, p_maxs, p_levels, level, i_node, m_node):
    """Compute nodes of a level from their children."""
    o_child = tl.arange(0, 32)[None, :]
    offset = tl.load(p_levels + (level - 1) * 2)
    o_children = i_node[:, None] * 32 + o_child
    m_children = m_node[:, None] & (o_child >= 0)
    if level == 1:
        b_leaf = tl.load(p_leaves + o_children, mask=m_children, other=0.0)
        b_low = tl.min(tl.where(b_leaf > 0, b_leaf, float("inf")), axis=1)
        b_high = tl.max(b_leaf, axis=1)
        b_sum = _node_sum(b_leaf.to(tl.float64), True)
    else:
        o_children += tl.load(p_levels + (level - 2) * 2)
        b_low = tl.min(tl.load(p_mins + o_children, mask=m_children, other=float("inf")), axis=1)
        b_high = tl.max(tl.load(p_maxs + o_children, mask=m_children, other=0.0), axis=1)
        b_sum = _node_sum(tl.load(p_sums + o_children, mask=m_children, other=0.0), False)
    tl.store(p_sums + offset + i_node, b_sum, mask=m_node)
    tl.store(p_mins + offset + i_node, b_low, mask=m_node)
    tl.store(p_maxs + offset + i_node, b_high, mask=m_node)


@triton.jit
def _refresh_level(
    p_leaves, p_sums, p_mins, p_maxs, p_levels, level, p_items, batch, i_first, stride, ROWS: tl.constexpr
):
    """Compute a level's nodes above the items, or all nodes if these are fewer than the items."""
    nodes = tl.load(p_levels + (level - 1) * 2 + 1)
    count = tl.minimum(nodes, batch)
    shift = level * 5
    for i_tile in range(i_first, tl.cdiv(count, ROWS), stride):
        i_row = (i_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        m_row = i_row < count
        i_node = i_row
        if nodes > batch:
            i_item = tl.load(p_items + i_row, mask=m_row, other=-1)
            m_row = m_row & (i_item >= 0)
            i_node = tl.where(m_row, i_item, 0) >> shift
        _refresh_tile(p_leaves, p_sums, p_mins, p_maxs, p_levels, level, i_node, m_row)


# ---------------------------------------------------------------- update


@triton.jit
def _leaf(b_value, alpha, eps, ALPHA_ONE: tl.constexpr):
    """Leaves of priorities: (priority + eps) ** alpha, float64, at least `LOWEST_LEAF`; 0 only for 0."""
    b_wide = b_value.to(tl.float64) + eps
    if not ALPHA_ONE:
        b_wide = tl.where(b_wide > 0, tl.exp2(alpha * tl.log2(tl.where(b_wide > 0, b_wide, 1.0))), 0.0)
    return tl.where(b_wide > 0, tl.maximum(b_wide, LOWEST_LEAF), 0.0)


@triton.jit
def _rows(p_items, p_values, i_tile, batch, ROWS: tl.constexpr):
    """A tile of an update: numbers of the rows, whether they count, their items (or 0) and values."""
    i_row = i_tile * ROWS + tl.arange(0, ROWS)
    m_row = i_row < batch
    i_item = tl.load(p_items + i_row, mask=m_row, other=-1)
    b_value = tl.load(p_values + i_row, mask=m_row, other=0.0)
    m_row = m_row & (i_item >= 0)
    return i_row, m_row, tl.where(m_row, i_item, 0), b_value


@triton.jit
def _invalid(i_row, m_row, b_value, alpha, eps, first_row, ALPHA_ONE: tl.constexpr):
    """Positions in the whole update of rows with an invalid value, else `NOWHERE`."""
    b_leaf = _leaf(b_value, alpha, eps, ALPHA_ONE)
    m_good = (b_value >= 0) & (b_value <= LARGEST_LEAF) & (b_leaf <= LARGEST_LEAF)
    return tl.where(m_row & ~m_good, first_row + i_row.to(tl.int64), NOWHERE)


@triton.jit
def _write(
    p_leaves,
    i_row,
    m_row,
    i_item,
    b_value,
    maximum,
    alpha,
    eps,
    UNSET_ALLOWED: tl.constexpr,
    ALPHA_ONE: tl.constexpr,
):
    """Write the leaves of rows that find their claim."""
    m_gone = b_value == GONE
    if UNSET_ALLOWED:
        b_value = tl.where(b_value == UNSET, maximum, tl.where(m_gone, 0.0, b_value))
    b_leaf = tl.minimum(_leaf(b_value, alpha, eps, ALPHA_ONE), LARGEST_LEAF)
    if UNSET_ALLOWED:
        b_leaf = tl.where(m_gone, 0.0, b_leaf)
    p_bits = p_leaves.to(tl.pointer_type(tl.int32))
    b_bits = tl.load(p_bits + i_item, mask=m_row, other=0, volatile=True)
    m_wins = m_row & (b_bits == i_row + FIRST_CLAIM)
    tl.store(p_leaves + i_item, b_leaf.to(tl.float32), mask=m_wins)


@triton.jit(do_not_specialize=["floor", "alpha", "eps", "batch", "depth"])
def update_alone_kernel(
    p_items,  # int64 [B], negative: skip
    p_values,  # float32 [B]
    p_leaves,
    p_sums,
    p_mins,
    p_maxs,
    p_levels,
    p_maximum,  # float32 [1]
    p_status,
    floor,  # lower bound of the running maximum
    alpha,
    eps,
    batch,
    depth,
    UNSET_ALLOWED: tl.constexpr,
    ALPHA_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    NODES: tl.constexpr,
):
    """A whole update by one program: it knows what it refuses, and reads status and maximum once."""
    p_bits = p_leaves.to(tl.pointer_type(tl.int32))
    tiles = tl.cdiv(batch, ROWS)
    refused = (tl.load(p_status + BAD_POSITION) != NOWHERE) & (not UNSET_ALLOWED)
    maximum = tl.maximum(tl.load(p_maximum), floor)
    if not UNSET_ALLOWED:
        b_first = tl.full([ROWS], NOWHERE, dtype=tl.int64)
        for i_tile in range(tiles):
            i_row, m_row, i_item, b_value = _rows(p_items, p_values, i_tile, batch, ROWS)
            b_first = tl.minimum(b_first, _invalid(i_row, m_row, b_value, alpha, eps, 0, ALPHA_ONE))
        first = tl.min(b_first, axis=0)
        if first != NOWHERE:
            tl.atomic_min(p_status + BAD_POSITION, first)
            refused = True
    if not refused:
        for i_tile in range(tiles):
            i_row, m_row, i_item, b_value = _rows(p_items, p_values, i_tile, batch, ROWS)
            tl.atomic_max(p_bits + i_item, i_row + FIRST_CLAIM, mask=m_row)
        tl.debug_barrier()
        b_high = tl.zeros([ROWS], dtype=tl.float32)
        for i_tile in range(tiles):
            i_row, m_row, i_item, b_value = _rows(p_items, p_values, i_tile, batch, ROWS)
            _write(p_leaves, i_row, m_row, i_item, b_value, maximum, alpha, eps, UNSET_ALLOWED, ALPHA_ONE)
            b_high = tl.maximum(b_high, tl.where(m_row, b_value, 0.0))
        tl.atomic_max(p_maximum, tl.maximum(tl.max(b_high, axis=0), floor))
        tl.debug_barrier()
        for i in range(depth):
            _refresh_level(p_leaves, p_sums, p_mins, p_maxs, p_levels, i + 1, p_items, batch, 0, 1, NODES)
            tl.debug_barrier()


@triton.jit(
    do_not_specialize=["floor", "alpha", "eps", "batch", "first_row", "depth", "first_phase", "last_phase"]
)
def update_kernel(
    p_items,  # the arguments as above
    p_values,
    p_leaves,
    p_sums,
    p_mins,
    p_maxs,
    p_levels,
    p_maximum,
    p_status,
    floor,
    alpha,
    eps,
    batch,
    first_row,  # number of p_items[0] in the whole update
    depth,
    first_phase,  # 0 check, 1 claim, 2 write, 3 raise the maximum, LEVELS and up: level 1 and up
    last_phase,
    UNSET_ALLOWED: tl.constexpr,
    ALPHA_ONE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Phases of an update by many programs, each of which sees what those of the launches before have done."""
    i_first = tl.program_id(0)
    stride = tl.num_programs(0)
    tiles = tl.cdiv(batch, ROWS)
    p_bits = p_leaves.to(tl.pointer_type(tl.int32))
    for phase in range(first_phase, last_phase):
        if phase >= LEVELS:
            level = phase - LEVELS + 1
            _refresh_level(
                p_leaves, p_sums, p_mins, p_maxs, p_levels, level, p_items, batch, i_first, stride, ROWS
            )
        else:
            refused = tl.load(p_status + BAD_POSITION, volatile=True) != NOWHERE
            refused = refused & (not UNSET_ALLOWED)
            maximum = tl.maximum(tl.load(p_maximum, volatile=True), floor)
            for i_tile in range(i_first, tiles, stride):
                i_row, m_row, i_item, b_value = _rows(p_items, p_values, i_tile, batch, ROWS)
                if phase == 0:
                    if not UNSET_ALLOWED:
                        b_first = _invalid(i_row, m_row, b_value, alpha, eps, first_row, ALPHA_ONE)
                        first = tl.min(b_first, axis=0)
                        if first != NOWHERE:
                            tl.atomic_min(p_status + BAD_POSITION, first)
                elif not refused:
                    if phase == 1:
                        tl.atomic_max(p_bits + i_item, i_row + FIRST_CLAIM, mask=m_row)
                    elif phase == 2:
                        _write(
                            p_leaves,
                            i_row,
                            m_row,
                            i_item,
                            b_value,
                            maximum,
                            alpha,
                            eps,
                            UNSET_ALLOWED,
                            ALPHA_ONE,
                        )
                    else:  # a separate phase, because the previous one reads the maximum
                        high = tl.max(tl.where(m_row, b_value, 0.0), axis=0)
                        tl.atomic_max(p_maximum, tl.maximum(high, floor))
        tl.debug_barrier()


# ---------------------------------------------------------------- draw


@triton.jit(do_not_specialize=["count", "depth"])
def draw_kernel(
    p_random,  # int64 [2]
    p_leaves,
    p_sums,
    p_levels,
    p_status,
    p_items,  # int64 [B]
    p_values,  # float32 [B]
    count,
    depth,
    ROWS: tl.constexpr,
):
    key, step = tl.load(p_random), tl.load(p_random + 1)
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < count
    empty = ~(_total(p_sums, p_levels, depth) > 0)
    i_item, b_leaf = _draw_rows(p_leaves, p_sums, p_levels, depth, key, step, i_row.to(tl.uint32))
    tl.store(p_items + i_row, tl.where(empty, -1, i_item), mask=m_row)
    tl.store(p_values + i_row, tl.where(empty, 0.0, b_leaf), mask=m_row)
    if empty & (tl.program_id(0) == 0):
        tl.atomic_add(p_status + EMPTY_DRAWS, 1)


@triton.jit(do_not_specialize=["count", "depth"])
def draw_distinct_kernel(
    p_random,
    p_leaves,
    p_sums,
    p_mins,
    p_maxs,
    p_levels,
    p_status,
    p_drawn,  # int64 [B], items that `draw_kernel` drew; then scratch
    p_drawn_leaves,  # float32 [B], their leaves
    p_items,  # int64 [B]
    p_values,  # float32 [B]
    count,
    depth,
    ROWS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    key, step = tl.load(p_random), tl.load(p_random + 1)
    p_bits = p_leaves.to(tl.pointer_type(tl.int32))
    filled = 0
    turn = 0
    total = _total(p_sums, p_levels, depth)
    while (filled < count) & (total > 0):
        rows = count - filled
        tiles = tl.cdiv(rows, ROWS)
        if turn > 0:  # the first draw of each row was made by `draw_kernel`
            for i_tile in range(tl.cdiv(rows, DRAWS)):
                i_row = i_tile * DRAWS + tl.arange(0, DRAWS)
                m_row = i_row < rows
                i_number = (turn * count + i_row).to(tl.uint32)
                i_item, b_leaf = _draw_rows(p_leaves, p_sums, p_levels, depth, key, step, i_number)
                tl.store(p_drawn + i_row, i_item, mask=m_row)
                tl.store(p_drawn_leaves + i_row, b_leaf, mask=m_row)
            tl.debug_barrier()
        for i_tile in range(tiles):  # the lowest row that drew an item keeps it
            i_row = i_tile * ROWS + tl.arange(0, ROWS)
            m_row = i_row < rows
            i_item = tl.load(p_drawn + i_row, mask=m_row, other=0)
            tl.atomic_min(p_bits + i_item, i_row + LOWEST_CLAIM, mask=m_row)
        tl.debug_barrier()
        begin = filled
        for i_tile in range(tiles):
            i_row = i_tile * ROWS + tl.arange(0, ROWS)
            m_row = i_row < rows
            i_item = tl.load(p_drawn + i_row, mask=m_row, other=0)
            b_leaf = tl.load(p_drawn_leaves + i_row, mask=m_row, other=0.0)
            b_bits = tl.load(p_bits + i_item, mask=m_row, other=0, volatile=True)
            m_first = m_row & (b_bits == i_row + LOWEST_CLAIM)
            i_out = filled + tl.cumsum(m_first.to(tl.int32), axis=0) - 1
            tl.store(p_items + i_out, i_item, mask=m_first)
            tl.store(p_values + i_out, b_leaf, mask=m_first)
            filled += tl.sum(m_first.to(tl.int32), axis=0)
        tl.debug_barrier()
        if filled < count:  # draw again, from the rest
            for i_tile in range(tl.cdiv(filled - begin, ROWS)):
                i_row = begin + i_tile * ROWS + tl.arange(0, ROWS)
                m_row = i_row < filled
                i_item = tl.load(p_items + i_row, mask=m_row, other=0)
                tl.store(p_leaves + i_item, tl.zeros([ROWS], dtype=tl.float32), mask=m_row)
            tl.debug_barrier()
            for i in range(depth):
                _refresh_level(p_leaves, p_sums, p_mins, p_maxs, p_levels, i + 1, p_drawn, rows, 0, 1, ROWS)
                tl.debug_barrier()
            total = _total(p_sums, p_levels, depth)
        turn += 1
    for i_tile in range(tl.cdiv(count, ROWS)):
        i_row = i_tile * ROWS + tl.arange(0, ROWS)
        i_item = tl.load(p_items + i_row, mask=i_row < filled, other=0)
        b_leaf = tl.load(p_values + i_row, mask=i_row < filled, other=0.0)
        tl.store(p_leaves + i_item, b_leaf, mask=i_row < filled)
        m_missing = (i_row >= filled) & (i_row < count)
        tl.store(p_items + i_row, tl.full([ROWS], -1, dtype=tl.int64), mask=m_missing)
        tl.store(p_values + i_row, tl.zeros([ROWS], dtype=tl.float32), mask=m_missing)
    if (turn > 1) | (filled < count):  # else only leaves were changed, by claims
        tl.debug_barrier()
        for i in range(depth):
            _refresh_level(p_leaves, p_sums, p_mins, p_maxs, p_levels, i + 1, p_items, count, 0, 1, ROWS)
            tl.debug_barrier()
    tl.atomic_add(p_status + DISTINCT_MISSING, (count - filled).to(tl.int64))


# ---------------------------------------------------------------- launchers


def check_update(tree: SumTree, items: torch.Tensor, values: torch.Tensor, alpha: float, eps: float) -> int:
    """Validate the arguments of `update` and return the number of rows; raises TypeError or ValueError."""
    count = len(items)
    check_tensor("items", items, torch.int64, (count,), tree.device)
    check_tensor("values", values, torch.float32, (count,), tree.device)
    largest = torch.finfo(torch.float32).max
    if not 0 <= alpha <= largest or not 0 <= eps <= largest:
        raise ValueError(
            f"alpha is {alpha} and eps {eps}; expected numbers that are finite as float32 and not negative."
        )
    return count


def check_draw(tree: SumTree, random: torch.Tensor, items: torch.Tensor, values: torch.Tensor) -> int:
    """Validate the arguments of `draw` and return the number of rows; raises TypeError or ValueError."""
    count = len(items)
    check_tensor("random", random[:2], torch.int64, (2,))
    check_tensor("items", items, torch.int64, (count,), tree.device)
    check_tensor("values", values, torch.float32, (count,), tree.device)
    return count


def update(
    tree: SumTree,
    items: torch.Tensor,
    values: torch.Tensor,
    *,
    alpha: float = 1.0,
    eps: float = 0.0,
    unset: bool = False,
    floor: float = 0.0,
) -> None:
    """Set the leaves of items to ``(value + eps) ** alpha``, and all nodes above them.

    Args:
        tree: the tree, changed in place.
        items: int64 [n] on the tree's device, below the capacity; negative ones are skipped. Of duplicate items the
            last one counts.
        values: float32 [n], finite, not negative.
        alpha, eps: exponent and offset, rounded to float32. With eps 0 the leaf of 0 is 0, whatever alpha.
        unset: `values` are initial priorities, already validated: they may be `UNSET`, the running maximum, or `GONE`,
            a leaf of 0 whatever eps. Leaves above float32's range are clipped to it; the update is never refused.
        floor: raise the running maximum to at least this value first.

    An invalid value refuses the update: nothing changes, and the lowest invalid position is stored in `tree.status`.
    Until the caller resets it all updates are refused. Does not wait for the GPU.

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or device; nothing was launched.
    """
    count = check_update(tree, items, values, alpha, eps)
    run = functools.partial(_launch_update, tree, alpha=alpha, eps=eps, unset=unset, floor=floor)
    levels, end = LEVELS.value, LEVELS.value + tree.depth
    if count <= ALONE:
        if count:
            _launch_alone(tree, items, values, alpha=alpha, eps=eps, unset=unset, floor=floor)
        return
    # Programs cannot synchronise, so every phase is a launch; the narrow levels share one.
    wide = levels + sum(nodes > ALONE for _, nodes in tree.shape)
    parts = list(zip(items.split(MOST_CLAIMS), values.split(MOST_CLAIMS), strict=True))
    for i, part in enumerate(parts):
        run(*part, 0, 1, 1024, first_row=i * MOST_CLAIMS)
    for part in parts:
        run(*part, 1, 2, 1024)
        run(*part, 2, 3, 1024)
    for part in parts:
        for phase in range(3, wide):
            run(*part, phase, phase + 1, 1024)
        run(*part, wide, end, 1)


def _launch_alone(
    tree: SumTree,
    items: torch.Tensor,
    values: torch.Tensor,
    *,
    alpha: float,
    eps: float,
    unset: bool,
    floor: float,
) -> None:
    floor, alpha, eps = _as_float32(floor, alpha, eps)
    nodes = (tree.leaves, tree.sums, tree.mins, tree.maxs, tree.levels)
    with on_device(tree.device):
        launch(
            update_alone_kernel,
            (1,),
            items,
            values,
            *nodes,
            tree.maximum,
            tree.status,
            floor,
            alpha,
            eps,
            len(items),
            tree.depth,
            UNSET_ALLOWED=unset,
            ALPHA_ONE=alpha == 1.0,
            **UPDATE_ALONE,
        )


def _as_float32(*numbers: float) -> list[float]:
    """Numbers as kernels receive them; Triton's interpreter would not round them."""
    rounded: list[float] = torch.tensor(numbers, dtype=torch.float32, device="cpu").tolist()
    return rounded


def build(tree: SumTree) -> None:
    """Compute all nodes from the leaves. Does not wait for the GPU."""
    first = LEVELS.value
    for level, (_, nodes) in enumerate(tree.shape):
        programs = triton.cdiv(nodes, UPDATE["ROWS"])
        _launch_update(
            tree,
            tree.status,
            tree.leaves,
            first + level,
            first + level + 1,
            min(programs, 1024),
            rows=len(tree.leaves),
        )


def _launch_update(
    tree: SumTree,
    items: torch.Tensor,
    values: torch.Tensor,
    first: int,
    last: int,
    programs: int,
    *,
    rows: int | None = None,
    first_row: int = 0,
    alpha: float = 1.0,
    eps: float = 0.0,
    unset: bool = False,
    floor: float = 0.0,
) -> None:
    floor, alpha, eps = _as_float32(floor, alpha, eps)
    with on_device(tree.device):
        launch(
            update_kernel,
            (programs,),
            items,
            values,
            tree.leaves,
            tree.sums,
            tree.mins,
            tree.maxs,
            tree.levels,
            tree.maximum,
            tree.status,
            floor,
            alpha,
            eps,
            len(items) if rows is None else rows,
            first_row,
            tree.depth,
            first,
            last,
            UNSET_ALLOWED=unset,
            ALPHA_ONE=alpha == 1.0,
            **UPDATE,
        )


def draw(tree: SumTree, random: torch.Tensor, items: torch.Tensor, values: torch.Tensor) -> None:
    """Draw items in proportion to their leaves, with replacement.

    Args:
        tree: the tree.
        random: int64 [2] or longer in memory that the device can read: key and counter of the random numbers, which
            determine the draw.
        items, values: int64 [n] and float32 [n] on the tree's device, filled with the items and their leaves; with -1
            and 0 if all leaves are 0, which is counted in `tree.status`.

    Does not wait for the GPU.

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or device; nothing was launched.
    """
    count = check_draw(tree, random, items, values)
    if count == 0:
        return
    with on_device(tree.device):
        _launch_draw(tree, random, items, values)


def _launch_draw(tree: SumTree, random: torch.Tensor, items: torch.Tensor, values: torch.Tensor) -> None:
    count = len(items)
    launch(
        draw_kernel,
        (triton.cdiv(count, DRAW["ROWS"]),),
        random,
        tree.leaves,
        tree.sums,
        tree.levels,
        tree.status,
        items,
        values,
        count,
        tree.depth,
        **DRAW,
    )


def draw_distinct(
    tree: SumTree,
    random: torch.Tensor,
    items: torch.Tensor,
    values: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Draw distinct items, one after another, each in proportion to the remaining leaves.

    Arguments and errors as for `draw`. Rows without a remaining item get -1 and 0 and are counted in `tree.status`. The
    tree is unchanged afterwards. After a first draw by many programs, a single one drops repetitions and redraws, so
    large batches are slow.

    Args:
        scratch: tensors as `items` and `values`, overwritten; new ones by default. Recorded in a CUDA graph, they are
            written by each replay, so their owner has to keep them as long.
    """
    count = check_draw(tree, random, items, values)
    drawn, leaves = (torch.empty_like(items), torch.empty_like(values)) if scratch is None else scratch
    for name, part, dtype in (("scratch[0]", drawn, torch.int64), ("scratch[1]", leaves, torch.float32)):
        check_tensor(name, part, dtype, (count,), tree.device)
    if count == 0:
        return
    arguments: list[Any] = [random, tree.leaves, tree.sums, tree.mins, tree.maxs, tree.levels, tree.status]
    with on_device(tree.device):
        _launch_draw(tree, random, drawn, leaves)
        launch(
            draw_distinct_kernel,
            (1,),
            *arguments,
            drawn,
            leaves,
            items,
            values,
            count,
            tree.depth,
            **DISTINCT,
        )
