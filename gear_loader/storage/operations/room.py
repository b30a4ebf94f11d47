"""Room for new trajectories: slots, blocks, and evictions that free them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.native.compile import inlined
from gear_loader.storage.counters import (
    HALF,
    HEAD,
    NUM_EVICTED,
    NUM_FREE_BLOCKS,
    NUM_FREE_SLOTS,
    NUM_READY,
    NUM_RETIRED,
    NUM_STEPS,
    NUM_WRITING,
    OLDEST,
    RETIRED_BLOCKS,
    TIERED,
    WANTED_BLOCKS,
    WRITABLE_BLOCKS,
    WRITING_BLOCKS,
    WRITING_STEPS,
)
from gear_loader.storage.operations.lifecycle import reclaim, retire
from gear_loader.storage.operations.view import (
    ALL,
    BUSY,
    DONE,
    EVICT_LOWEST,
    FLIP,
    FULL,
    LIVE,
    PID,
    READ,
    REFUSE,
    SHORT,
    SPILL,
    START,
    TIGHT,
    begin_change,
    blocks_of,
    end_change,
    fence,
    require,
    slot_blocks,
)
from gear_loader.storage.states import FREE, READY, WRITING


@inlined
def missing(v: Any, slots: Any, blocks: Any, steps: Any) -> Any:
    """Whether the space is insufficient even after all retired slots are reclaimed; what is below the memory makes up
    for blocks."""
    counters = v.counters
    return (
        counters[NUM_FREE_SLOTS] + counters[NUM_RETIRED] < slots
        or (counters[TIERED] == 0 and counters[NUM_FREE_BLOCKS] + counters[RETIRED_BLOCKS] < blocks)
        or counters[NUM_STEPS] + counters[WRITING_STEPS] + steps > v.max_steps
    )


@inlined
def lowest(v: Any) -> Any:
    """The READY slot with the lowest priority; the oldest if no slot has a priority; -1 if no slot is READY.

    Each group of slots has a lower bound of its priorities. The group with the lowest bound is searched; if the bound
    was too low it is corrected, and the search continues.
    """
    for _ in range(len(v.lowest) + 1):  # each bound is corrected at most once
        first, best = 0, np.float32(np.inf)
        for i in range(len(v.lowest)):
            if v.lowest[i] < best:
                first, best = i, v.lowest[i]
        if best == np.inf:
            return v.counters[OLDEST] - 1
        found, least = -1, np.float32(np.inf)
        for slot in range(first * v.group, min((first + 1) * v.group, v.num_slots)):
            priority = v.priority[slot]
            if v.state[slot] != READY or priority < 0 or priority > least:
                continue
            if priority < least or v.sequence[slot] < v.sequence[found]:
                found, least = slot, priority
        if found >= 0 and least == best:
            return found
        v.lowest[first] = least
    raise IndexError("the bounds of the priorities change")


@inlined
def make_room(v: Any, slots: Any, blocks: Any, steps: Any, evict: Any) -> Any:
    """Free space for a number of slots, blocks and steps, with eviction according to the policy.

    Returns:
        DONE; SHORT if eviction is needed and refused; FULL if the table is too small; BUSY if unfinished writes hold
        the space; READ if readers hold it; FLIP if the block tables must be compacted first; SPILL if trajectories must
        be moved to disk, or to host memory, first.
    """
    counters = v.counters
    require(counters[HALF] >= 0 and counters[HALF] <= 1 and counters[HEAD + counters[HALF]] >= 0)
    if blocks > counters[WRITABLE_BLOCKS]:
        return FULL
    if missing(v, slots, blocks, steps):
        if slots > v.num_slots or steps > v.max_steps:
            return FULL
        if evict == REFUSE:
            return SHORT
        if (
            v.num_slots - counters[NUM_WRITING] < slots
            or counters[WRITABLE_BLOCKS] - counters[WRITING_BLOCKS] < blocks
            or counters[WRITING_STEPS] + steps > v.max_steps
        ):
            return BUSY
        begin_change(v)
        while missing(v, slots, blocks, steps) and counters[NUM_READY] > 0:
            retire(v, lowest(v) if evict == EVICT_LOWEST else counters[OLDEST] - 1, NUM_EVICTED)
        end_change(v)
    reclaim(v)
    if counters[NUM_FREE_SLOTS] < slots or counters[NUM_FREE_BLOCKS] < blocks:
        if counters[TIERED] != 0 and counters[NUM_FREE_BLOCKS] + counters[RETIRED_BLOCKS] < blocks:
            counters[WANTED_BLOCKS] = max(counters[WANTED_BLOCKS], blocks)
            return SPILL if counters[WRITABLE_BLOCKS] - counters[WRITING_BLOCKS] >= blocks else BUSY
        return READ
    if counters[HEAD + counters[HALF]] + blocks > v.half_size:
        return FLIP
    return DONE


@inlined
def has_room(v: Any, slots: Any, blocks: Any, steps: Any) -> Any:
    """As `make_room` where nothing needs to be evicted, reclaimed or compacted; else TIGHT, having done nothing."""
    counters = v.counters
    require(counters[HALF] >= 0 and counters[HALF] <= 1 and counters[HEAD + counters[HALF]] >= 0)
    head = counters[HEAD + counters[HALF]]
    if counters[NUM_RETIRED] != 0 or missing(v, slots, blocks, steps) or head + blocks > v.half_size:
        return TIGHT
    if counters[NUM_FREE_BLOCKS] < blocks:
        return TIGHT
    return DONE


@inlined
def take_slot(v: Any, length: Any, final: Any, start: Any, pid: Any, process_start: Any, stream: Any) -> Any:
    """Allocate a slot in state WRITING with an extent; the caller allocates the blocks."""
    counters = v.counters
    require(counters[NUM_FREE_SLOTS] > 0)
    slot = v.free_slots[counters[NUM_FREE_SLOTS] - 1]
    require(slot >= 0 and v.state[slot] == FREE)
    counters[NUM_FREE_SLOTS] -= 1
    v.extent[slot, 0] = length
    v.extent[slot, 1] = start
    v.extent[slot, 2] = final
    v.generation[slot] += 1
    v.sequence[slot] = -1
    v.ident[slot] = -1
    v.owner[slot, PID] = pid
    v.owner[slot, START] = process_start
    v.stream[slot] = stream
    fence()
    v.state[slot] = WRITING
    counters[NUM_WRITING] += 1
    counters[WRITING_STEPS] += length
    counters[WRITING_BLOCKS] += slot_blocks(v, slot)
    return slot


@inlined
def use_block(v: Any, place: Any, block: Any) -> None:
    """Write a block that nobody uses to a position in `block_ids`."""
    v.block_ids[place] = block
    v.uses[block, LIVE] = 1
    v.uses[block, ALL] = 1


@inlined
def take_block(v: Any, place: Any) -> Any:
    """Allocate a block and write it to a position in `block_ids`."""
    counters = v.counters
    require(counters[NUM_FREE_BLOCKS] > 0)
    block = v.free_blocks[counters[NUM_FREE_BLOCKS] - 1]
    require(block >= 0 and v.uses[block, ALL] == 0)
    counters[NUM_FREE_BLOCKS] -= 1
    use_block(v, place, block)
    return block


@inlined
def final_of(finals: Any, i: Any) -> Any:
    """Number of final steps of trajectory i; `finals` is empty if no trajectory has any."""
    return finals[i] if len(finals) > 0 else 0


@inlined
def allocate(v: Any, lengths: Any, finals: Any, pid: Any, process_start: Any, slots: Any, ids: Any) -> None:
    """Allocate slots and blocks for trajectories of these lengths, after `make_room`."""
    counters = v.counters
    begin_change(v)
    half = counters[HALF]
    taken = 0
    for i in range(len(lengths)):
        start = half * v.half_size + counters[HEAD + half]
        blocks = blocks_of(v, lengths[i] + final_of(finals, i))
        for j in range(blocks):
            ids[taken] = take_block(v, start + j)
            taken += 1
        counters[HEAD + half] += blocks
        fence()
        slots[i] = take_slot(v, lengths[i], final_of(finals, i), start, pid, process_start, 0)
    end_change(v)


@inlined
def begin(
    v: Any, lengths: Any, finals: Any, evict: Any, pid: Any, process_start: Any, slots: Any, ids: Any
) -> Any:
    """`make_room` and `allocate`; with `evict` None `has_room` instead, which compiles in half of the time.

    Args:
        lengths: int64 [n], in steps. finals: int64 [n], final steps (0 or 1), or [0] for none.
        slots: int64 [n], output. ids: int32 [blocks of all trajectories], output.
    """
    blocks, steps = 0, 0
    for i in range(len(lengths)):
        blocks += blocks_of(v, lengths[i] + final_of(finals, i))
        steps += lengths[i]
    if evict is None:  # decided when it is compiled
        answer = has_room(v, len(lengths), blocks, steps)
    else:
        answer = make_room(v, len(lengths), blocks, steps, evict)
    if answer == DONE:
        allocate(v, lengths, finals, pid, process_start, slots, ids)
    return answer
