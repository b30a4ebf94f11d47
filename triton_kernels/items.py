"""Convert items of a priority tree to rows of a batch and back, without copying indices to the host.

The table's index lies in host memory, which the kernels read across the bus; so `resolve` reads each row's entries once
and stores them in device memory for the gather.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from gear_loader.kernels import sum_tree as _tree
from gear_loader.kernels.devices import on_device
from gear_loader.kernels.launching import launch
from gear_loader.kernels.priority import uniform
from gear_loader.kernels.sum_tree import SumTree
from gear_loader.kernels.tensor_checks import check_tensor

__all__ = ["ANCHORS", "Blocks", "IndexAddresses", "locate", "resolve", "weigh"]

STALE = tl.constexpr(_tree.STALE)

ANCHORS = ("uniform", "first", "last", "item")
"""Choices of a row's anchor: a random step of the trajectory, its first, its last, or the item's step."""

UNIFORM, FIRST, LAST, ITEM = (tl.constexpr(i) for i in range(4))
LAUNCH = {"ROWS": 32, "num_warps": 1, "enable_fp_fusion": False}
WEIGH = {"ROWS": 512, "num_warps": 4}


@dataclasses.dataclass(frozen=True)
class IndexAddresses:
    """A table's index, as seen by kernels.

    Attributes:
        addresses: int64 [3] on the device: addresses of `generation` (int64 [T]), `extent` (int64 [T, 3]) and
            `block_ids` (int32 [num_ids]), in memory that the device can read.
        num_ids: entries of `block_ids`.
        block_steps: steps of a block.
        known: int32 [T] on the device: low 32 bits of the generation of the slot's trajectory in the tree; 0 if the
            tree has no such trajectory.
        blocks: blocks of the tree's trajectories if an item is a step, else None.
        anchors: which steps of a trajectory can be anchors: the first of them, the steps that must follow, and the same
            with a final step counted; all steps by default. See `selection.complete`.
    """

    addresses: torch.Tensor
    num_ids: int
    block_steps: int
    known: torch.Tensor
    blocks: Blocks | None
    anchors: tuple[int, int, int] = (0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of the tree's trajectories; all tensors on the device. See `selection.item_map`.

    Attributes:
        owner: int32 [num_blocks]: slot that owns the block; -1 for a free block.
        number: int32 [num_blocks]: number of the block within its owner's trajectory.
        place: int64 [num_blocks]: place of the block in its stream of steps; -1 for a free block.
        first: int64 [T]: place of the trajectory's first block. Its block number n has the place ``first + n``, also if
            shared.
        steps: int32 [T]: end of the steps that can be anchors.
    """

    owner: torch.Tensor
    number: torch.Tensor
    place: torch.Tensor
    first: torch.Tensor
    steps: torch.Tensor


# ---------------------------------------------------------------- locate


@triton.jit(do_not_specialize=["count", "num_slots", "num_blocks", "num_ids", "block_steps", "anchor_first"])
def locate_kernel(
    p_index,  # int64 [B]
    p_anchor,  # int64 [B]
    p_generation,  # int64 [B]
    p_known,
    p_owner,
    p_number,
    p_place,
    p_first,
    p_steps,
    p_addresses,
    p_status,
    p_items,  # int64 [B]
    count,
    num_slots,
    num_blocks,
    num_ids,
    block_steps,
    anchor_first,
    STEPS: tl.constexpr,
    CHECK: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < count
    i_slot = tl.load(p_index + i_row, mask=m_row, other=-1)
    m_known = m_row & (i_slot >= 0) & (i_slot < num_slots)
    b_known = tl.load(p_known + i_slot, mask=m_known, other=0)
    m_known = m_known & (b_known != 0)
    if CHECK:
        b_generation = tl.load(p_generation + i_row, mask=m_row, other=0)
        m_known = m_known & (b_generation.to(tl.int32) == b_known)
    i_item = i_slot
    if STEPS:
        # The index may change during the read: a block is valid if it belongs to the tree's trajectory, alone or shared
        # with others cut from the same stream.
        p_extent = tl.load(p_addresses + 1).to(tl.pointer_type(tl.int64))
        p_ids = tl.load(p_addresses + 2).to(tl.pointer_type(tl.int32))
        i_step = tl.load(p_anchor + i_row, mask=m_row, other=0)
        steps = tl.load(p_steps + i_slot, mask=m_known, other=0)
        m_known = m_known & (i_step >= anchor_first) & (i_step < steps)
        i_number = tl.where(m_known, i_step // block_steps, 0)
        o_ids = tl.load(p_extent + i_slot * 3 + 1, mask=m_known, other=0)
        o_id = tl.minimum(tl.maximum(o_ids + i_number, 0), num_ids - 1)
        i_block = tl.load(p_ids + o_id, mask=m_known, other=0).to(tl.int64)
        i_block = tl.minimum(tl.maximum(i_block, 0), num_blocks - 1)
        first = tl.load(p_first + i_slot, mask=m_known, other=0)
        m_known = m_known & (tl.load(p_place + i_block, mask=m_known, other=-1) == first + i_number)
        i_inside = i_step - i_number * block_steps
        i_item = i_block * block_steps + i_inside
        # The item is a step of the block's owner, and must be one that can be an anchor there.
        i_owner = tl.load(p_owner + i_block, mask=m_known, other=0).to(tl.int64)
        i_own = tl.load(p_number + i_block, mask=m_known, other=0).to(tl.int64) * block_steps + i_inside
        end = tl.load(p_steps + i_owner, mask=m_known, other=0)
        m_known = m_known & (i_own >= anchor_first) & (i_own < end)
    tl.store(p_items + i_row, tl.where(m_known, i_item, -1), mask=m_row)
    stale = tl.sum((m_row & ~m_known).to(tl.int64), axis=0)
    if stale > 0:
        tl.atomic_add(p_status + STALE, stale)


def locate(
    tree: SumTree,
    known: IndexAddresses,
    index: torch.Tensor,
    items: torch.Tensor,
    *,
    anchor: torch.Tensor | None = None,
    generation: torch.Tensor | None = None,
) -> None:
    """Compute the items of trajectories, or of steps, for `priority.update`.

    Args:
        tree: the tree; its `status` counts stale rows.
        known: the index.
        index: int64 [n], slots.
        items: int64 [n], filled; -1 for stale rows.
        anchor: int64 [n], steps; required if an item is a step.
        generation: int64 [n]; None accepts any trajectory of the slot.

    All tensors lie on the tree's device. Does not wait for the GPU.

    Raises:
        TypeError, ValueError: other shapes, dtypes or devices; nothing was launched.
    """
    count = len(index)
    blocks = known.blocks
    if blocks is not None and anchor is None:
        raise ValueError("No anchor was given, but an item is a step.")
    for name, tensor in (("index", index), ("items", items), ("anchor", anchor), ("generation", generation)):
        if tensor is not None:
            check_tensor(name, tensor, torch.int64, (count,), tree.device)
    if count == 0:
        return
    dummy = known.known
    with on_device(tree.device):
        launch(
            locate_kernel,
            (triton.cdiv(count, LAUNCH["ROWS"]),),
            index,
            index if blocks is None else anchor,
            index if generation is None else generation,
            known.known,
            dummy if blocks is None else blocks.owner,
            dummy if blocks is None else blocks.number,
            dummy if blocks is None else blocks.place,
            dummy if blocks is None else blocks.first,
            dummy if blocks is None else blocks.steps,
            known.addresses,
            tree.status,
            items,
            count,
            len(known.known),
            0 if blocks is None else len(blocks.place),
            known.num_ids,
            known.block_steps,
            known.anchors[0],
            STEPS=blocks is not None,
            CHECK=generation is not None,
            **LAUNCH,
        )


# ---------------------------------------------------------------- resolve


@triton.jit
def store_rows(
    p_rows, p_ids, p_blocks, o_ids, i_row, m_row, m_item, i_slot, b_anchor, b_generation, steps, final, size, width,
    block_steps, first, last, once,
):  # fmt: skip
    """Store what the gather needs of rows: what `resolve` fills.

    Args:
        o_ids: places of the rows' block tables among those at `p_blocks`. m_item: which rows are no padding.
    """
    # Of a column without final steps, a window after the last step shows that step.
    low = tl.minimum(tl.maximum(b_anchor + first, 0), steps - 1) // block_steps
    high = tl.minimum(tl.maximum(b_anchor + last, 0), steps + final - 1) // block_steps
    # A row without an item has no steps and becomes padding.
    tl.store(p_rows + i_row, tl.where(m_item, i_slot, -1), mask=m_row)
    tl.store(p_rows + size + i_row, tl.where(m_item, b_anchor, 0), mask=m_row)
    tl.store(p_rows + 2 * size + i_row, b_generation, mask=m_row)
    o_own = i_row.to(tl.int64) * width
    tl.store(p_rows + 3 * size + 3 * i_row, steps, mask=m_row)
    tl.store(p_rows + 3 * size + 3 * i_row + 1, tl.where(m_item, o_own - low, o_own), mask=m_row)
    tl.store(p_rows + 3 * size + 3 * i_row + 2, final, mask=m_row)
    for k in range(width):
        m_block = m_item & (low + k <= high)
        b_block = tl.load(p_blocks + o_ids + low + k, mask=m_block, other=0)
        tl.store(p_ids + o_own + k, b_block, mask=m_row)
    if once:
        b_block = tl.load(p_blocks + o_ids, mask=m_item, other=0)
        tl.store(p_ids + o_own + width - 1, b_block, mask=m_row)


@triton.jit(
    do_not_specialize=[
        *("count", "size", "width", "block_steps", "first", "last"),
        *("anchor_first", "ahead", "ahead_final", "once"),
    ]
)
def resolve_kernel(
    p_items,  # int64 [B]
    p_random,  # int64 [3]
    p_owner,
    p_number,
    p_addresses,
    p_rows,  # int64 [6, size]
    p_ids,  # int32 [size, width]
    count,
    size,
    width,
    block_steps,
    first,
    last,
    anchor_first,
    ahead,
    ahead_final,
    once,
    ANCHOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < count
    i_item = tl.load(p_items + i_row, mask=m_row, other=-1)
    m_item = i_item >= 0
    i_item = tl.where(m_item, i_item, 0)
    if ANCHOR == ITEM:
        i_block = i_item // block_steps
        i_slot = tl.load(p_owner + i_block, mask=m_item, other=0).to(tl.int64)
        b_anchor = tl.load(p_number + i_block, mask=m_item, other=0).to(tl.int64) * block_steps
        b_anchor += i_item - i_block * block_steps
    else:
        i_slot = i_item
    p_generation = tl.load(p_addresses).to(tl.pointer_type(tl.int64))
    p_extent = tl.load(p_addresses + 1).to(tl.pointer_type(tl.int64))
    p_blocks = tl.load(p_addresses + 2).to(tl.pointer_type(tl.int32))
    b_generation = tl.load(p_generation + i_slot, mask=m_item, other=0)
    steps = tl.load(p_extent + i_slot * 3, mask=m_item, other=0)
    final = tl.load(p_extent + i_slot * 3 + 2, mask=m_item, other=0)
    # A trajectory that grows gets its new place first and its new length then. So the length is read first: this
    # address depends on it, or the GPU could load a new length with the old place, whose next entry is another's.
    o_place = i_slot * 3 + tl.where((steps < 0) | (final < 0), 0, 1)
    o_ids = tl.load(p_extent + o_place, mask=m_item, other=0)
    if ANCHOR != ITEM:
        anchors = steps - anchor_first - tl.maximum(ahead, ahead_final - final)
        if ANCHOR == UNIFORM:
            b_uniform = uniform(tl.load(p_random + 2), tl.load(p_random + 1), i_row.to(tl.uint32), 0)
            b_anchor = tl.minimum((b_uniform * anchors.to(tl.float64)).to(tl.int64), anchors - 1)
        elif ANCHOR == FIRST:
            b_anchor = anchors * 0
        else:
            b_anchor = anchors - 1
        b_anchor += anchor_first
    store_rows(
        p_rows, p_ids, p_blocks, o_ids, i_row, m_row, m_item, i_slot, b_anchor, b_generation, steps, final, size,
        width, block_steps, first, last, once,
    )  # fmt: skip


def resolve(
    known: IndexAddresses,
    items: torch.Tensor,
    random: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    *,
    anchor: str,
    first: int,
    last: int,
    once: bool = False,
) -> None:
    """Compute the gather's inputs for drawn items.

    Args:
        known: the index; a read ticket protects its slots while this runs.
        items: int64 [n]; -1 for a row of padding only.
        random: int64 [3] in memory that the device can read: [1] is the counter, [2] the key of the anchors' random
            numbers.
        rows: int64 [6, size], size >= n, whose first n entries are filled: index, anchor, generation; from ``rows[3]``
            on, int64 [size, 3], the extents: length in steps, the position in `ids` where the trajectory's block
            table would start, and the number of final steps.
        ids: int32 [size, K], filled with the blocks of the windows.
        anchor: one of `ANCHORS`.
        first, last: first and last step covered by any window, relative to the anchor; they touch at most K blocks.
        once: whether the last of the K is the trajectory's first block, and the windows touch at most K - 1.

    Does not wait for the GPU.

    Raises:
        TypeError, ValueError: other shapes, dtypes or devices; nothing was launched.
    """
    count, device = len(items), known.known.device
    check_tensor("items", items, torch.int64, (count,), device)
    size = rows.shape[-1]
    check_tensor("rows", rows, torch.int64, (6, max(size, count)), device)
    check_tensor("ids", ids, torch.int32, (size, ids.shape[-1]), device)
    check_tensor("random", random, torch.int64, (3,), random.device)
    if anchor not in ANCHORS or (anchor == "item") != (known.blocks is not None):
        raise ValueError(f"anchor is {anchor!r}; expected one of {ANCHORS}, 'item' where an item is a step.")
    if count == 0:
        return
    dummy, blocks = known.known, known.blocks
    with on_device(device):
        launch(
            resolve_kernel,
            (triton.cdiv(count, LAUNCH["ROWS"]),),
            items,
            random,
            dummy if blocks is None else blocks.owner,
            dummy if blocks is None else blocks.number,
            known.addresses,
            rows,
            ids,
            count,
            size,
            ids.shape[-1],
            known.block_steps,
            first,
            last,
            *known.anchors,
            int(once),
            ANCHOR=ANCHORS.index(anchor),
            **LAUNCH,
        )


# ---------------------------------------------------------------- weigh


@triton.jit(do_not_specialize=["offset", "count"])
def weigh_kernel(
    p_leaves,  # float32 [B], of the rows
    p_mins,
    p_beta,  # float32 [1]
    p_weights,  # float32 [B]
    offset,
    count,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    if TABLE:
        least = tl.min(tl.load(p_mins + offset + tl.arange(0, 32)), axis=0)
    else:
        b_least = tl.full([ROWS], float("inf"), dtype=tl.float32)
        for i in range(tl.cdiv(count, ROWS)):
            i_row = i * ROWS + tl.arange(0, ROWS)
            b_leaf = tl.load(p_leaves + i_row, mask=i_row < count, other=0.0)
            b_least = tl.minimum(b_least, tl.where(b_leaf > 0, b_leaf, float("inf")))
        least = tl.min(b_least, axis=0)
    least = least.to(tl.float64)
    beta = tl.load(p_beta)
    for i in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        i_row = i * ROWS + tl.arange(0, ROWS)
        b_leaf = tl.load(p_leaves + i_row, mask=i_row < count, other=0.0)
        m_leaf = b_leaf > 0
        b_ratio = tl.where(m_leaf, least, 1.0) / tl.where(m_leaf, b_leaf.to(tl.float64), 1.0)
        b_weight = tl.where(m_leaf, tl.exp2(beta * tl.log2(b_ratio)), 0.0)
        tl.store(p_weights + i_row, b_weight.to(tl.float32), mask=i_row < count)


def weigh(
    tree: SumTree, leaves: torch.Tensor, weights: torch.Tensor, *, beta: torch.Tensor, table: bool
) -> None:
    """Compute importance weights ``(least / leaf) ** beta`` of drawn items.

    Args:
        tree: the tree.
        leaves: float32 [n], leaves of the items. weights: float32 [n], filled; 0 where the leaf is 0.
        beta: float32 [1] in memory that the device can read, the exponent: it may change from one replay of a CUDA
            graph to the next.
        table: whether `least` is the smallest positive leaf of the tree, or else of the batch.

    Does not wait for the GPU.

    Raises:
        TypeError, ValueError: other shapes, dtypes or devices; nothing was launched.
    """
    count = len(leaves)
    check_tensor("leaves", leaves, torch.float32, (count,), tree.device)
    check_tensor("weights", weights, torch.float32, (count,), tree.device)
    check_tensor("beta", beta, torch.float32, (1,), beta.device)
    if count == 0:
        return
    programs = min(triton.cdiv(count, WEIGH["ROWS"]), 32)
    offset = tree.shape[-1][0]
    with on_device(tree.device):
        launch(
            weigh_kernel, (programs,), leaves, tree.mins, beta, weights, offset, count, TABLE=table, **WEIGH
        )
