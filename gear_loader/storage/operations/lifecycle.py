"""Trajectories are committed, retired and freed."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.native.compile import inlined
from gear_loader.storage.counters import (
    COMMITTING,
    EPOCH,
    FIRST_SEQUENCE,
    LEAVING,
    LEAVING_COUNT,
    LEAVING_TOTAL,
    NEWEST,
    NEXT_SEQUENCE,
    NUM_EXPIRED,
    NUM_FREE_BLOCKS,
    NUM_FREE_SLOTS,
    NUM_OUTDATED,
    NUM_PARKED,
    NUM_READY,
    NUM_REMOVED,
    NUM_RETIRED,
    NUM_SPILLED,
    NUM_STEPS,
    NUM_TOUCHED,
    NUM_WRITING,
    OLDEST,
    PARKED_EPOCH,
    RAISING,
    RAISING_FIRST,
    REMOVING,
    RETIRED_BLOCKS,
    RETIRED_FIRST,
    VERSION,
    WRITABLE_BLOCKS,
    WRITING_BLOCKS,
    WRITING_STEPS,
)
from gear_loader.storage.operations.view import (
    ALL,
    LIVE,
    MARKED,
    PID,
    READING,
    begin_change,
    check_extent,
    end_change,
    fence,
    require,
    slot_blocks,
)
from gear_loader.storage.states import FREE, READY, RETIRED, WRITING


@inlined
def touch(v: Any, slot: Any) -> None:
    """Record in the ring `touched` that a slot's trajectory was committed or retired."""
    v.touched[v.counters[NUM_TOUCHED] % v.num_slots] = slot
    v.counters[NUM_TOUCHED] += 1


@inlined
def append(v: Any, slot: Any) -> None:
    """Link a slot as the newest."""
    counters = v.counters
    newest = counters[NEWEST] - 1
    v.links[slot, 0] = newest
    v.links[slot, 1] = -1
    if newest >= 0:
        v.links[newest, 1] = slot
    else:
        counters[OLDEST] = slot + 1
    counters[NEWEST] = slot + 1


@inlined
def bound(v: Any, slot: Any, priority: Any) -> None:
    """Lower the bound of a slot's group to its priority, if the bound is above it."""
    if priority >= 0 and priority < v.lowest[slot // v.group]:
        v.lowest[slot // v.group] = priority


@inlined
def describe(v: Any, slot: Any, sequence: Any, priority: Any, created: Any, times: Any) -> None:
    """Write the metadata of a trajectory before it becomes visible."""
    v.sequence[slot] = sequence
    v.priority[slot] = priority
    v.created[slot] = created
    v.sampled[slot] = times
    bound(v, slot, priority)


@inlined
def publish(v: Any, slots: Any) -> None:
    """Make slots visible after `describe` with ascending sequence numbers."""
    counters, count = v.counters, len(slots)
    fence()
    counters[COMMITTING] = 1 + v.sequence[slots[0]]
    fence()
    for i in range(count):
        v.state[slots[i]] = READY
    counters[NEXT_SEQUENCE] = max(counters[NEXT_SEQUENCE], v.sequence[slots[count - 1]] + 1)
    for i in range(count):
        slot = slots[i]
        append(v, slot)
        touch(v, slot)
        steps = v.extent[slot, 0]
        counters[NUM_WRITING] -= 1
        counters[WRITING_STEPS] -= steps
        counters[WRITING_BLOCKS] -= slot_blocks(v, slot)
        counters[NUM_READY] += 1
        counters[NUM_STEPS] += steps
        if v.extent[slot, 1] < 0:
            counters[NUM_SPILLED] += 1
    counters[VERSION] += 1
    fence()
    counters[COMMITTING] = 0


@inlined
def commit(v: Any, slots: Any, priorities: Any, now: Any) -> None:
    """Make written slots visible, with the next sequence numbers."""
    begin_change(v)
    for i in range(len(slots)):
        describe(v, slots[i], v.counters[NEXT_SEQUENCE] + i, priorities[i], now, 0)
    publish(v, slots)
    end_change(v)


@inlined
def commit_as(v: Any, slots: Any, sequences: Any, priorities: Any, created: Any, times: Any) -> None:
    """Make written slots visible, with given metadata.

    Args:
        sequences: int64 [n], ascending and unused. priorities: float32 [n].
        created, times: int64 [n], time of the commit (ascending) and number of draws.
    """
    begin_change(v)
    for i in range(len(slots)):
        describe(v, slots[i], sequences[i], priorities[i], created[i], times[i])
    publish(v, slots)
    end_change(v)


@inlined
def raise_numbering(v: Any, following: Any) -> None:
    """Raise NEXT_SEQUENCE to at least `following`; the number of trajectories added stays the same."""
    counters = v.counters
    if following <= counters[NEXT_SEQUENCE]:
        return
    begin_change(v)
    counters[RAISING_FIRST] = counters[FIRST_SEQUENCE] + following - counters[NEXT_SEQUENCE]
    fence()
    counters[RAISING] = following
    fence()
    counters[FIRST_SEQUENCE] = counters[RAISING_FIRST]
    counters[NEXT_SEQUENCE] = following
    fence()
    counters[RAISING] = 0
    end_change(v)


@inlined
def unlink(v: Any, slot: Any) -> None:
    """Unlink a slot from the order of commitment."""
    counters = v.counters
    older, newer = v.links[slot, 0], v.links[slot, 1]
    require((v.links[older, 1] if older >= 0 else counters[OLDEST] - 1) == slot)
    require((v.links[newer, 0] if newer >= 0 else counters[NEWEST] - 1) == slot)
    if older >= 0:
        v.links[older, 1] = newer
    else:
        counters[OLDEST] = newer + 1
    if newer >= 0:
        v.links[newer, 0] = older
    else:
        counters[NEWEST] = older + 1


@inlined
def writable(v: Any, block: Any) -> Any:
    """1 for a block that writers get, 0 for one of the host part of a table on a GPU."""
    return 1 if block >= v.num_blocks - v.counters[WRITABLE_BLOCKS] else 0


@inlined
def give_back(v: Any, block: Any) -> Any:
    """Put a block that nobody uses on the stack of free ones, if writers get it; return 1 if so, else 0."""
    counters = v.counters
    if writable(v, block) == 0:
        return 0
    v.free_blocks[counters[NUM_FREE_BLOCKS]] = block
    counters[NUM_FREE_BLOCKS] += 1
    return 1


@inlined
def retire(v: Any, slot: Any, count: Any) -> None:
    """Retire a trajectory: later reads do not find it, earlier reads continue.

    Args:
        count: position in `counters` of the count for the reason: NUM_EVICTED, NUM_REMOVED, NUM_EXPIRED or
            NUM_OUTDATED.
    """
    counters = v.counters
    require(slot >= 0 and v.state[slot] == READY)
    length, start = v.extent[slot, 0], v.extent[slot, 1]
    blocks = slot_blocks(v, slot)
    check_extent(v, start, blocks)
    unlink(v, slot)
    v.epoch[slot] = counters[EPOCH]
    counters[LEAVING_COUNT] = count
    counters[LEAVING_TOTAL] = counters[count] + 1
    fence()
    counters[LEAVING] = slot + 1
    fence()
    v.state[slot] = RETIRED
    fence()
    counters[count] += 1
    fence()
    counters[LEAVING] = 0
    v.retired[(counters[RETIRED_FIRST] + counters[NUM_RETIRED]) % v.num_slots] = slot
    touch(v, slot)
    counters[EPOCH] += 1
    counters[VERSION] += 1
    counters[NUM_RETIRED] += 1
    counters[NUM_READY] -= 1
    counters[NUM_STEPS] -= length
    if start < 0:
        counters[NUM_SPILLED] -= 1
    for i in range(start, start + blocks):
        block = v.block_ids[i]
        require(block >= 0)
        v.uses[block, LIVE] -= 1
        if v.uses[block, LIVE] == 0:
            counters[RETIRED_BLOCKS] += writable(v, block)


@inlined
def let_go(v: Any, start: Any, count: Any, live: Any) -> None:
    """Release a part of a block table, last block first; `live`: the slot was not retired."""
    counters = v.counters
    check_extent(v, start, count)
    for i in range(start + count - 1, start - 1, -1):
        block = v.block_ids[i]
        require(block >= 0 and v.uses[block, ALL] > 0 and counters[NUM_FREE_BLOCKS] >= 0)
        v.uses[block, ALL] -= 1
        if live:
            v.uses[block, LIVE] -= 1
        if v.uses[block, ALL] == 0:
            given = give_back(v, block)
            if not live:
                counters[RETIRED_BLOCKS] -= given
        elif live and v.uses[block, LIVE] == 0:
            counters[RETIRED_BLOCKS] += writable(v, block)


@inlined
def free(v: Any, slot: Any, live: Any) -> None:
    """Free a slot and its blocks."""
    start, blocks = v.extent[slot, 1], slot_blocks(v, slot)
    require(v.counters[NUM_FREE_SLOTS] >= 0)
    v.state[slot] = FREE
    let_go(v, start, blocks, live)
    v.free_slots[v.counters[NUM_FREE_SLOTS]] = slot
    v.counters[NUM_FREE_SLOTS] += 1


@inlined
def abort(v: Any, slots: Any) -> None:
    """Free the slots that are still WRITING."""
    begin_change(v)
    counters = v.counters
    for i in range(len(slots)):
        slot = slots[i]
        if v.state[slot] == WRITING:
            steps = v.extent[slot, 0]
            counters[NUM_WRITING] -= 1
            counters[WRITING_STEPS] -= steps
            counters[WRITING_BLOCKS] -= slot_blocks(v, slot)
            free(v, slot, True)
    end_change(v)


@inlined
def oldest_reader(v: Any) -> Any:
    """The earliest epoch of the active readers."""
    oldest = np.int64(2**63 - 1)
    for i in range(len(v.readers)):
        epoch = v.readers[i, READING]
        if epoch > 0 and epoch < oldest:
            oldest = epoch
    return oldest


@inlined
def release(v: Any) -> None:
    """Free the parked blocks if no reader can still see them."""
    counters = v.counters
    if counters[NUM_PARKED] == 0 or counters[PARKED_EPOCH] >= oldest_reader(v):
        return
    begin_change(v)
    while counters[NUM_PARKED] > 0:
        block = v.parked[counters[NUM_PARKED] - 1]
        require(block >= 0 and v.uses[block, ALL] == 1 and counters[NUM_FREE_BLOCKS] >= 0)
        counters[NUM_PARKED] -= 1
        fence()
        v.uses[block, ALL] = 0
        counters[RETIRED_BLOCKS] -= give_back(v, block)
    end_change(v)


@inlined
def reclaim(v: Any) -> None:
    """Free the retired slots and the parked blocks that no reader can still see."""
    counters = v.counters
    release(v)
    if counters[NUM_RETIRED] == 0:
        return
    oldest = oldest_reader(v)
    if v.epoch[v.retired[counters[RETIRED_FIRST]]] >= oldest:
        return
    begin_change(v)
    while counters[NUM_RETIRED] > 0:
        slot = v.retired[counters[RETIRED_FIRST]]
        require(slot >= 0 and v.state[slot] == RETIRED)
        if v.epoch[slot] >= oldest:
            break
        counters[RETIRED_FIRST] = (counters[RETIRED_FIRST] + 1) % v.num_slots
        counters[NUM_RETIRED] -= 1
        free(v, slot, False)
    end_change(v)


@inlined
def remove(v: Any, slots: Any) -> None:
    """Retire distinct READY slots atomically, through the intent record REMOVING."""
    begin_change(v)
    for i in range(len(slots)):
        v.owner[slots[i], PID] = MARKED
    fence()
    v.counters[REMOVING] = 1
    fence()
    for i in range(len(slots)):
        retire(v, slots[i], NUM_REMOVED)
        v.owner[slots[i], PID] = 0
    fence()
    v.counters[REMOVING] = 0
    end_change(v)
    reclaim(v)


@inlined
def expire(v: Any, before: Any) -> None:
    """Retire trajectories committed before a time (monotonic, nanoseconds)."""
    counters = v.counters
    if counters[OLDEST] == 0 or v.created[counters[OLDEST] - 1] >= before:
        return
    begin_change(v)
    while counters[OLDEST] > 0 and v.created[counters[OLDEST] - 1] < before:
        retire(v, counters[OLDEST] - 1, NUM_EXPIRED)
    end_change(v)


@inlined
def outdate(v: Any, slots: Any) -> None:
    """Retire distinct READY slots one after another, counted as outdated."""
    begin_change(v)
    for i in range(len(slots)):
        retire(v, slots[i], NUM_OUTDATED)
    end_change(v)
