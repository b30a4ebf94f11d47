"""The compiled loops of `gear_loader.selection.item_map`: trajectories of steps come and go, in one pass over slots.

The arrays are those of `ItemMap`; it has checked their sizes. What comes from a table's index is checked here.
"""

from __future__ import annotations

from numba import int64

from gear_loader.native.compile import compiled

INVALID = -1


@compiled
def add(  # type: ignore[no-untyped-def]
    slots,
    lengths,
    priorities,
    extent,
    block_ids,
    block_steps,
    anchors,
    stream,
    starts,
    lists,
    known,
    blocks,
    values,
):
    """Add trajectories in order, up to one with a block that has an owner.

    Args:
        slots, lengths: int64 [n]. priorities: float32 [n]. extent, block_ids: index arrays.
        anchors: those of `CompleteAnchors`: first step that can be drawn, the steps that must follow it without and
            with a final step, stride and length; the second and third are negative if all steps can be drawn.
        stream: int64 [3]: streams so far, streams until their numbers wrap around, places of a stream.
        starts, lists, known: `start`; `_first`, `_count`, `_next`; `length`, `owner`, `number`, `inside`, `place`.
        blocks: int64 [k], values: float32 [k], output: blocks of the added trajectories, and their priorities.

    Returns:
        Number of added trajectories, or `INVALID` for one with an invalid block; number of their blocks.
    """
    first_block, num_blocks, following = lists
    length, owner, number, inside, place = known
    filled = 0
    for i in range(len(slots)):
        slot = slots[i]
        count = (lengths[i] + block_steps - 1) // block_steps
        begin = extent[slot, 1]
        if count < 1 or begin < 0 or begin > len(block_ids) - count:
            return INVALID, filled
        for n in range(count):
            block = int64(block_ids[begin + n])
            if block < 0 or block >= len(owner):
                return INVALID, filled
            if owner[block] >= 0:
                return i, filled
        first, end = int64(anchors[0]), lengths[i]
        if anchors[1] >= 0:
            end = first + max(end - first - max(anchors[1], anchors[2] - extent[slot, 2]), 0)
        stride = int64(anchors[3])
        if stride > 1 or anchors[4] > 1:
            more = max(end - first - anchors[4], 0)
            end = first if end == first else first + (more + stride - 1) // stride * stride + 1
        start = (stream[0] + i) % stream[1] * stream[2]
        starts[slot], length[slot] = start, end
        num_blocks[slot], first_block[slot] = count, block_ids[begin]
        for n in range(count):
            block = int64(block_ids[begin + n])
            owner[block], number[block], place[block] = slot, n, start + n
            if n + 1 < count:
                following[block] = block_ids[begin + n + 1]
            begins = first
            if stride > 1:  # a block has one anchor at most
                begins += max(n * block_steps - first + stride - 1, 0) // stride * stride
            ends = end if stride == 1 else min(end, begins + 1)
            inside[block, 0] = min(max(begins - n * block_steps, 0), block_steps)
            inside[block, 1] = min(max(ends - n * block_steps, inside[block, 0]), block_steps)
            blocks[filled], values[filled] = block, priorities[i]
            filled += 1
    return len(slots), filled


@compiled
def remove(slots, lists, owner, place, freed) -> None:  # type: ignore[no-untyped-def]
    """Remove trajectories, no two of which share blocks.

    Args:
        slots: int64 [n], of trajectories in the map. lists: as for `add`.
        freed: int64 [their blocks], output.
    """
    first_block, num_blocks, following = lists
    filled = 0
    for slot in slots:
        block = int64(first_block[slot])
        for _ in range(num_blocks[slot]):
            owner[block] = place[block] = -1
            freed[filled] = block
            filled += 1
            block = int64(following[block])
        first_block[slot] = -1
