"""Trajectories that move: to disk, back, and to the host part of a table on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.native.compile import inlined
from gear_loader.storage.counters import (
    EPOCH,
    HALF,
    HEAD,
    NUM_EVICTED,
    NUM_FREE_BLOCKS,
    NUM_PARKED,
    NUM_READY,
    NUM_SPILLED,
    OLDEST,
    PARKED_EPOCH,
    RETIRED_BLOCKS,
)
from gear_loader.storage.operations.lifecycle import reclaim, release, retire, writable
from gear_loader.storage.operations.prefix_blocks import take_blocks
from gear_loader.storage.operations.room import final_of, has_room, lowest, take_slot, use_block
from gear_loader.storage.operations.view import (
    ALL,
    DONE,
    EVICT_LOWEST,
    FLIP,
    GONE,
    LIVE,
    ON_DISK,
    SHORT,
    SPILL,
    begin_change,
    blocks_of,
    check_extent,
    end_change,
    fence,
    require,
    slot_blocks,
)
from gear_loader.storage.states import READY


@inlined
def spill(v: Any, slots: Any, generations: Any, ids: Any) -> Any:
    """Take the blocks of trajectories that are on disk, or were copied to other blocks; everything else of them stays.

    Readers may see the blocks until they end their tickets, so the blocks are parked until then. `parked` is written
    before the first trajectory changes. Blocks that other live trajectories have in memory stay theirs.

    Args:
        slots, generations: int64 [n], the trajectories, distinct; stale ones and those without blocks are skipped.
        ids: int32, the other blocks, of one trajectory after another, none of which is stale, or shares blocks; [0] for
            those on disk.

    Returns:
        Number of trajectories that were spilled; having done nothing, -1 if blocks are still parked, -2 if the block
        tables must be compacted first.
    """
    counters = v.counters
    reclaim(v)
    if counters[NUM_PARKED] != 0:
        return -1
    require(counters[HALF] >= 0 and counters[HALF] <= 1 and counters[HEAD + counters[HALF]] >= 0)
    half = counters[HALF]
    place = half * v.half_size + counters[HEAD + half]
    if counters[HEAD + half] + len(ids) > v.half_size:
        return -2
    for j in range(len(ids)):
        require(ids[j] >= 0 and writable(v, ids[j]) == 0 and v.uses[ids[j], ALL] == 0)
    begin_change(v)
    chosen = np.zeros(len(slots), dtype=np.bool_)
    parked, spilled = 0, 0
    for i in range(len(slots)):
        slot = slots[i]
        require(slot >= 0)
        start = v.extent[slot, 1]
        if v.state[slot] != READY or v.generation[slot] != generations[i] or start < 0:
            continue
        blocks = slot_blocks(v, slot)
        check_extent(v, start, blocks)
        free = True
        for j in range(start, start + blocks):
            block = v.block_ids[j]
            require(block >= 0)
            # A block of a retired trajectory, too, is not parked: readers that began after that may see it.
            free = free and (v.uses[block, LIVE] > 1 or v.uses[block, ALL] == 1)
        chosen[i] = free
        for j in range(start, start + blocks if free else start):
            block = v.block_ids[j]
            v.uses[block, LIVE] -= 1
            if v.uses[block, LIVE] > 0:
                v.uses[block, ALL] -= 1
            else:
                v.parked[parked] = block
                parked += 1
                counters[RETIRED_BLOCKS] += writable(v, block)
    counters[PARKED_EPOCH] = counters[EPOCH]
    fence()
    counters[NUM_PARKED] = parked
    for j in range(len(ids)):
        use_block(v, place + j, ids[j])
    counters[HEAD + half] += len(ids)
    fence()
    for i in range(len(slots)):
        if chosen[i] and len(ids) > 0:
            blocks = slot_blocks(v, slots[i])
            v.extent[slots[i], 1] = place
            place += blocks
            spilled += 1
        elif chosen[i]:
            v.extent[slots[i], 1] = ON_DISK
            counters[NUM_SPILLED] += 1
            spilled += 1
    require(len(ids) == 0 or place == half * v.half_size + counters[HEAD + half])
    counters[EPOCH] += 1
    end_change(v)
    release(v)
    return spilled


@inlined
def take_back(v: Any, slot: Any, generation: Any, parent: Any, shared: Any, copied: Any, ids: Any) -> Any:
    """Allocate blocks for a trajectory that lies on disk only; `give_place` follows if DONE.

    Args:
        parent, shared: a trajectory in memory, of which it has blocks `copied` to `shared` - 1; -1 and 0 for none.
        ids: int32 [new blocks], output.

    Returns:
        DONE; GONE if it is stale or has blocks; FLIP; SPILL if too few blocks are free. After DONE the index stays
        dirty until `give_place`.
    """
    counters = v.counters
    require(counters[HALF] >= 0 and counters[HALF] <= 1 and counters[HEAD + counters[HALF]] >= 0)
    if v.state[slot] != READY or v.generation[slot] != generation or v.extent[slot, 1] >= 0:
        return GONE
    blocks = blocks_of(v, v.extent[slot, 0] + v.extent[slot, 2])
    require(blocks == len(ids) + max(shared - copied, 0) and shared <= blocks)
    release(v)
    if counters[NUM_FREE_BLOCKS] < len(ids):
        return SPILL
    half, first = counters[HALF], 0
    if counters[HEAD + half] + blocks > v.half_size:
        return FLIP
    if shared > 0:
        first = v.extent[parent, 1]
        check_extent(v, first, shared)
    begin_change(v)
    take_blocks(v, half * v.half_size + counters[HEAD + half], blocks, first, copied, shared, ids)
    counters[HEAD + half] += blocks
    return DONE


@inlined
def give_place(v: Any, slot: Any, blocks: Any) -> None:
    """Make the blocks of `take_back`, which hold its steps now, those of the trajectory."""
    counters = v.counters
    fence()
    v.extent[slot, 1] = counters[HALF] * v.half_size + counters[HEAD + counters[HALF]] - blocks
    counters[NUM_SPILLED] -= 1
    end_change(v)


@inlined
def begin_stored(
    v: Any,
    lengths: Any,
    finals: Any,
    inside: Any,
    parents: Any,
    shared: Any,
    copied: Any,
    pid: Any,
    process_start: Any,
    slots: Any,
    ids: Any,
) -> Any:
    """`begin` of trajectories of which some are on disk and get no blocks, and others lie in the host part.

    Args:
        inside: int8 [n], 0 of those on disk, 1 of those that get blocks, 2 of those whose blocks are in `ids`.
        parents, shared: int64 [n]; blocks number `copied` to `shared` - 1 are those of an earlier one of the n, which
            is inside. The others as for `begin`; ids: int32 [new blocks], output but for those of the host part.

    Returns:
        DONE, or SHORT, having done nothing, if the table has too little space.
    """
    counters = v.counters
    blocks, steps = 0, 0
    for i in range(len(lengths)):
        steps += lengths[i]
        if inside[i] == 1:
            blocks += blocks_of(v, lengths[i] + final_of(finals, i)) - max(shared[i] - copied, 0)
    if has_room(v, len(lengths), blocks, steps) != DONE:
        return SHORT
    begin_change(v)
    half, taken = counters[HALF], 0
    for i in range(len(lengths)):
        start = np.int64(ON_DISK)
        if inside[i] > 0:
            start = half * v.half_size + counters[HEAD + half]
            blocks = blocks_of(v, lengths[i] + final_of(finals, i))
            require(counters[HEAD + half] + blocks <= v.half_size)
            first = np.int64(0)
            if shared[i] > 0:
                require(
                    0 <= parents[i] < i and inside[parents[i]] == 1 and inside[i] == 1 and shared[i] <= blocks
                )
                first = np.int64(v.extent[slots[parents[i]], 1])
                require(shared[i] <= slot_blocks(v, slots[parents[i]]))
            if inside[i] == 1:
                taken += take_blocks(v, start, blocks, first, copied, shared[i], ids[taken:])
            else:
                for j in range(blocks):
                    block = ids[taken]
                    require(block >= 0 and writable(v, block) == 0 and v.uses[block, ALL] == 0)
                    use_block(v, start + j, block)
                    taken += 1
            counters[HEAD + half] += blocks
            fence()
        slots[i] = take_slot(v, lengths[i], final_of(finals, i), start, pid, process_start, 0)
    end_change(v)
    return DONE


@inlined
def evict(v: Any, steps: Any, how: Any) -> Any:
    """Evict trajectories by a policy until they had this many steps; return how many.

    Args:
        how: EVICT_OLDEST or EVICT_LOWEST.
    """
    counters = v.counters
    begin_change(v)
    count, left = 0, steps
    while left > 0 and counters[NUM_READY] > 0:
        slot = lowest(v) if how == EVICT_LOWEST else counters[OLDEST] - 1
        left -= v.extent[slot, 0]
        retire(v, slot, NUM_EVICTED)
        count += 1
    end_change(v)
    return count
