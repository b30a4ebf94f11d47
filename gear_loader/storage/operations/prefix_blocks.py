"""Trajectories that begin with blocks of others."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.native.compile import inlined
from gear_loader.storage.counters import HALF, HEAD, NUM_EVICTED, NUM_WRITING, OLDEST
from gear_loader.storage.operations.lifecycle import retire
from gear_loader.storage.operations.room import (
    final_of,
    lowest,
    make_room,
    missing,
    take_block,
    take_slot,
)
from gear_loader.storage.operations.view import (
    ALL,
    BUSY,
    DONE,
    EVICT_LOWEST,
    FLIP,
    FULL,
    GONE,
    LIVE,
    OUTSIDE,
    REFUSE,
    SHORT,
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
def contains(slots: Any, slot: Any) -> Any:
    """Whether a slot is one of `slots`."""
    found = False
    for each in slots:
        found = found or each == slot
    return found


@inlined
def least_needed(v: Any, kept: Any, evict: Any) -> Any:
    """The slot to evict next that is none of `kept`; -1 without one."""
    if evict == EVICT_LOWEST:
        slot = lowest(v)
        if not contains(kept, slot):
            return slot
    slot = v.counters[OLDEST] - 1
    for _ in range(len(kept)):
        if slot < 0 or not contains(kept, slot):
            break
        slot = np.int64(v.links[slot, 1])
    return -1 if contains(kept, slot) else slot


@inlined
def make_room_beside(v: Any, kept: Any, slots: Any, blocks: Any, steps: Any, evict: Any) -> Any:
    """`make_room` that evicts no slot of `kept`."""
    if evict != REFUSE and blocks <= v.num_blocks and slots <= v.num_slots and steps <= v.max_steps:
        begin_change(v)
        while missing(v, slots, blocks, steps):
            slot = least_needed(v, kept, evict)
            if slot < 0:
                break
            retire(v, slot, NUM_EVICTED)
        end_change(v)
    answer = make_room(v, slots, blocks, steps, REFUSE)
    if answer == SHORT and evict != REFUSE:
        return BUSY if v.counters[NUM_WRITING] > 0 else FULL
    return answer


@inlined
def take_blocks(v: Any, start: Any, count: Any, first: Any, copied: Any, shared: Any, ids: Any) -> Any:
    """Write the blocks of a trajectory to `count` positions in `block_ids` from `start` on; return how many are new.

    Args:
        first: position of the first block of another trajectory, whose blocks `copied` to `shared` - 1 it has.
        ids: int32 [new blocks], output.
    """
    taken = 0
    for j in range(count):
        if copied <= j < shared:
            block = v.block_ids[first + j]
            require(block >= 0 and v.uses[block, LIVE] > 0)
            v.block_ids[start + j] = block
            v.uses[block, LIVE] += 1
            v.uses[block, ALL] += 1
        else:
            ids[taken] = take_block(v, start + j)
            taken += 1
    return taken


@inlined
def begin_after(
    v: Any,
    lengths: Any,
    finals: Any,
    parents: Any,
    generations: Any,
    shared: Any,
    copied: Any,
    evict: Any,
    pid: Any,
    process_start: Any,
    slots: Any,
    ids: Any,
) -> Any:
    """`begin` of trajectories that begin with steps of others, which are not evicted for them.

    Args:
        lengths, finals, evict, pid, process_start, slots: as for `begin`; lengths count the steps of others.
        parents, generations: int64 [n], the slots that have them, -1 for none, and their generations.
        shared: int64 [n]; blocks number `copied` to `shared` - 1 are those of the parent, all others new.
        ids: int32 [new blocks of all trajectories], output.

    Returns:
        As `make_room`, or GONE if a parent is no longer there, or OUTSIDE if it lies on disk only.
    """
    counters = v.counters
    blocks, entries, steps = 0, 0, 0
    for i in range(len(lengths)):
        count = blocks_of(v, lengths[i] + final_of(finals, i))
        steps += lengths[i]
        entries += count
        blocks += count - max(shared[i] - copied, 0)
        parent = parents[i]
        if parent < 0:
            continue
        if v.state[parent] != READY or v.generation[parent] != generations[i]:
            return GONE
        if v.extent[parent, 1] < 0:
            return OUTSIDE
        require(shared[i] <= slot_blocks(v, parent) and shared[i] <= count)
    require(blocks <= len(ids))
    answer = make_room_beside(v, parents, len(lengths), blocks, steps, evict)
    if answer != DONE:
        return answer
    half, taken = counters[HALF], 0
    if counters[HEAD + half] + entries > v.half_size:
        return FLIP
    begin_change(v)
    for i in range(len(lengths)):
        start = half * v.half_size + counters[HEAD + half]
        count, first = blocks_of(v, lengths[i] + final_of(finals, i)), 0
        if parents[i] >= 0:
            first = v.extent[parents[i], 1]
            check_extent(v, first, shared[i])
        taken += take_blocks(v, start, count, first, copied, shared[i], ids[taken:])
        counters[HEAD + half] += count
        fence()
        slots[i] = take_slot(v, lengths[i], final_of(finals, i), start, pid, process_start, 0)
    end_change(v)
    return DONE
