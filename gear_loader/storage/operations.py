"""The operations on a table's index, on raw arrays. The caller holds the lock.

There is one implementation, compiled by numba (`COMPILED`); tests that kill a process at every store run it as Python
(`PLAIN`). It consists of loops over plain arrays in which the order of stores matters: a process may be killed after
any of them.

Another process may have written invalid values into the index by mistake. So every value that is used as an index is
checked, loops end for any contents, and an invalid value raises IndexError, which `index_arrays` converts to an error
that names the table. The index then stays marked dirty.

The slots are authoritative (see `recovery`). An operation on several slots writes an intent record into `counters` when
the data of the record are complete; recovery replays it:

    COMMITTING    1 + first sequence number of the slots that become READY
    REMOVING      1 while the slots with owner `MARKED` are retired
    DRAWING       1 + slot counted as drawn; DRAWING_TIMES, DRAWING_TOTAL: its new count and the new total
    LEAVING       1 + slot being retired; LEAVING_COUNT, LEAVING_TOTAL: position and new value of its counter
    RAISING       new NEXT_SEQUENCE; RAISING_FIRST: new FIRST_SEQUENCE
"""

from __future__ import annotations

import types as types_module
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, int64, njit, types
from numba.extending import intrinsic, overload, register_jitable

from gear_loader.kernels.sum_tree import UNSET as UNSET
from gear_loader.native.compile import compiled
from gear_loader.native.copying import append as append_steps
from gear_loader.native.copying import copy_row, scatter
from gear_loader.native.memory import pointer
from gear_loader.storage.counters import (
    COMMITTING,
    DIGEST,
    DIRTY,
    DRAWING,
    DRAWING_TIMES,
    DRAWING_TOTAL,
    EPOCH,
    FIRST_SEQUENCE,
    HALF,
    HEAD,
    INITIALIZED,
    LEAVING,
    LEAVING_COUNT,
    LEAVING_TOTAL,
    NEWEST,
    NEXT_SEQUENCE,
    NUM_EVICTED,
    NUM_EXPIRED,
    NUM_FREE_BLOCKS,
    NUM_FREE_SLOTS,
    NUM_OUTDATED,
    NUM_PARKED,
    NUM_READY,
    NUM_REMOVED,
    NUM_RETIRED,
    NUM_SAMPLED,
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
    RUNS,
    STREAMS,
    TIERED,
    VERSION,
    WANTED_BLOCKS,
    WRITING_BLOCKS,
    WRITING_STEPS,
)
from gear_loader.storage.states import FREE as FREE
from gear_loader.storage.states import READY as READY
from gear_loader.storage.states import RETIRED as RETIRED
from gear_loader.storage.states import WRITING as WRITING
from gear_loader.utils.arrays import Array

assert UNSET == -1  # compiled into the cached machine code
assert DIGEST == 0x5D81FF7B  # of the positions in `counters`, compiled in too

PID, START, READING, TICKET = range(4)  # columns of `readers`
LIVE, ALL = range(2)  # columns of `uses`
MARKED = -1

# Results of `make_room` and `grow`.
DONE, SHORT, FULL, BUSY, READ, FLIP = range(6)
# Eviction policies.
REFUSE, EVICT_OLDEST, EVICT_LOWEST = range(3)
UNREADY, TIGHT = 6, 7
"""Additional results: of `store` with REQUEST_AT_ONCE, that the index needs recovery or has unfinished writes; of
operations with `evict` None, that they need `make_room`."""
GONE = 8
"""Additional result of `lengthen` and `promote`: the trajectory was evicted or removed."""
SPILL = 9
"""Additional result of `make_room`: the memory is full until the table's owner has spilled trajectories."""
ON_DISK = -(1 << 62)
"""Place of the block table of a trajectory that lies on disk only. With any block number added it is negative, so the
loops that gather find it invalid."""
# A growing trajectory, int64: slot, generation, steps (0: none grows), and the state of `lengthen`.
GROWN_SLOT, GROWN_GENERATION, GROWN_STEPS, GROWN_RUN, _GROWN_RUN_1, GROWN_WIDTH = range(6)
# A row of `reserve_rows`, int64: slot of the writer, or -1 for one that begins (output); steps that it holds (output
# too); steps that it needs, and the most that it may hold; address of `run` of `grow`; place of its new blocks in
# `ids`; result (output); generation of a new slot (output).
(
    ROOM_SLOT,
    ROOM_HELD,
    ROOM_NEEDED,
    ROOM_MOST,
    ROOM_RUN,
    ROOM_PLACE,
    ROOM_ANSWER,
    ROOM_GENERATION,
    ROOM_WIDTH,
) = range(9)
GENEROUS = 8
"""A writer allocates at most one eighth of the free steps in advance."""
# A row of `finish_rows`, int64: slot, steps, whether the last one is the final step, and the bits of the priority.
FINISH_SLOT, FINISH_LENGTH, FINISH_FINAL, FINISH_PRIORITY, FINISH_WIDTH = range(5)
# Head of a request to `store`, int64; followed by lengths [n], slots [n] (output), priorities [n] (float64) and
# addresses [n, C].
REQUEST_COUNT, REQUEST_AT_ONCE, REQUEST_NOW, REQUEST_EVICT, REQUEST_PID, REQUEST_START, REQUEST_HEAD = range(
    7
)


class View(NamedTuple):
    """Arrays and sizes of an index; see `gear_loader.storage.layout`."""

    counters: Any
    readers: Any
    extent: Any
    generation: Any
    sequence: Any
    epoch: Any
    owner: Any
    stream: Any
    created: Any
    priority: Any
    sampled: Any
    state: Any
    links: Any
    block_ids: Any
    free_slots: Any
    retired: Any
    touched: Any
    free_blocks: Any
    uses: Any
    lowest: Any
    ident: Any
    parked: Any
    block_steps: int
    max_steps: int
    num_slots: int
    num_blocks: int
    half_size: int
    group: int


def fence() -> None:
    """Order stores: earlier stores precede later ones."""


@intrinsic  # type: ignore[untyped-decorator]
def _barrier(_context: Any) -> Any:
    # Only the compiler must not reorder: on every processor a killed process leaves a prefix of its stores.
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst", "singlethread")

    return types.void(), codegen


@overload(fence)  # type: ignore[untyped-decorator]
def _fence() -> Any:
    return lambda: _barrier()


# An index outside an array raises IndexError, as in Python; negative ones count from the end.
# Inlined: calls, each of which passes the 22 arrays of the view, take ten times as long.
_operation = register_jitable(boundscheck=True, forceinline=True)


@_operation  # type: ignore[untyped-decorator]
def require(holds: Any) -> None:
    """Raise IndexError unless `holds`: an inconsistent value would be used as an address."""
    if not holds:
        raise IndexError("the index contradicts itself")


@_operation  # type: ignore[untyped-decorator]
def check_extent(v: Any, start: Any, count: Any) -> None:
    """Raise IndexError unless `start` to `start + count - 1` are valid positions in `block_ids`."""
    require(count == 0 or (start >= 0 and count > 0 and start <= 2 * v.half_size - count))


@_operation  # type: ignore[untyped-decorator]
def begin_change(v: Any) -> None:
    """Mark the index dirty: the next lock holder rebuilds the derived state."""
    v.counters[DIRTY] = 1
    fence()


@_operation  # type: ignore[untyped-decorator]
def end_change(v: Any) -> None:
    """Mark the index clean."""
    fence()
    v.counters[DIRTY] = 0


@_operation  # type: ignore[untyped-decorator]
def blocks_of(v: Any, length: Any) -> Any:
    """Number of blocks of a trajectory with this length."""
    return (length + v.block_steps - 1) // v.block_steps


@_operation  # type: ignore[untyped-decorator]
def slot_blocks(v: Any, slot: Any) -> Any:
    """Number of blocks of a slot's steps and final step; 0 if it lies on disk only."""
    if v.extent[slot, 1] < 0:
        return 0
    return blocks_of(v, v.extent[slot, 0] + v.extent[slot, 2])


# ---------------------------------------------------------------- commit, retire, free


@_operation  # type: ignore[untyped-decorator]
def touch(v: Any, slot: Any) -> None:
    """Record in the ring `touched` that a slot's trajectory was committed or retired."""
    v.touched[v.counters[NUM_TOUCHED] % v.num_slots] = slot
    v.counters[NUM_TOUCHED] += 1


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
def bound(v: Any, slot: Any, priority: Any) -> None:
    """Lower the bound of a slot's group to its priority, if the bound is above it."""
    if priority >= 0 and priority < v.lowest[slot // v.group]:
        v.lowest[slot // v.group] = priority


@_operation  # type: ignore[untyped-decorator]
def describe(v: Any, slot: Any, sequence: Any, priority: Any, created: Any, times: Any) -> None:
    """Write the metadata of a trajectory before it becomes visible."""
    v.sequence[slot] = sequence
    v.priority[slot] = priority
    v.created[slot] = created
    v.sampled[slot] = times
    bound(v, slot, priority)


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
def commit(v: Any, slots: Any, priorities: Any, now: Any) -> None:
    """Make written slots visible, with the next sequence numbers."""
    begin_change(v)
    for i in range(len(slots)):
        describe(v, slots[i], v.counters[NEXT_SEQUENCE] + i, priorities[i], now, 0)
    publish(v, slots)
    end_change(v)


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
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
            counters[RETIRED_BLOCKS] += 1


@_operation  # type: ignore[untyped-decorator]
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
            v.free_blocks[counters[NUM_FREE_BLOCKS]] = block
            counters[NUM_FREE_BLOCKS] += 1
            if not live:
                counters[RETIRED_BLOCKS] -= 1
        elif live and v.uses[block, LIVE] == 0:
            counters[RETIRED_BLOCKS] += 1


@_operation  # type: ignore[untyped-decorator]
def free(v: Any, slot: Any, live: Any) -> None:
    """Free a slot and its blocks."""
    start, blocks = v.extent[slot, 1], slot_blocks(v, slot)
    require(v.counters[NUM_FREE_SLOTS] >= 0)
    v.state[slot] = FREE
    let_go(v, start, blocks, live)
    v.free_slots[v.counters[NUM_FREE_SLOTS]] = slot
    v.counters[NUM_FREE_SLOTS] += 1


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
def oldest_reader(v: Any) -> Any:
    """The earliest epoch of the active readers."""
    oldest = np.int64(2**63 - 1)
    for i in range(len(v.readers)):
        epoch = v.readers[i, READING]
        if epoch > 0 and epoch < oldest:
            oldest = epoch
    return oldest


@_operation  # type: ignore[untyped-decorator]
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
        v.free_blocks[counters[NUM_FREE_BLOCKS]] = block
        counters[NUM_FREE_BLOCKS] += 1
        counters[RETIRED_BLOCKS] -= 1
    end_change(v)


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
def expire(v: Any, before: Any) -> None:
    """Retire trajectories committed before a time (monotonic, nanoseconds)."""
    counters = v.counters
    if counters[OLDEST] == 0 or v.created[counters[OLDEST] - 1] >= before:
        return
    begin_change(v)
    while counters[OLDEST] > 0 and v.created[counters[OLDEST] - 1] < before:
        retire(v, counters[OLDEST] - 1, NUM_EXPIRED)
    end_change(v)


@_operation  # type: ignore[untyped-decorator]
def outdate(v: Any, slots: Any) -> None:
    """Retire distinct READY slots one after another, counted as outdated."""
    begin_change(v)
    for i in range(len(slots)):
        retire(v, slots[i], NUM_OUTDATED)
    end_change(v)


# ---------------------------------------------------------------- allocation


@_operation  # type: ignore[untyped-decorator]
def missing(v: Any, slots: Any, blocks: Any, steps: Any) -> Any:
    """Whether the space is insufficient even after all retired slots are reclaimed; a disk makes up for blocks."""
    counters = v.counters
    return (
        counters[NUM_FREE_SLOTS] + counters[NUM_RETIRED] < slots
        or (counters[TIERED] == 0 and counters[NUM_FREE_BLOCKS] + counters[RETIRED_BLOCKS] < blocks)
        or counters[NUM_STEPS] + counters[WRITING_STEPS] + steps > v.max_steps
    )


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
def make_room(v: Any, slots: Any, blocks: Any, steps: Any, evict: Any) -> Any:
    """Free space for a number of slots, blocks and steps, with eviction according to the policy.

    Returns:
        DONE; SHORT if eviction is needed and refused; FULL if the table is too small; BUSY if unfinished writes hold
        the space; READ if readers hold it; FLIP if the block tables must be compacted first; SPILL if trajectories must
        be moved to disk first.
    """
    counters = v.counters
    require(counters[HALF] >= 0 and counters[HALF] <= 1 and counters[HEAD + counters[HALF]] >= 0)
    if blocks > v.num_blocks:
        return FULL
    if missing(v, slots, blocks, steps):
        if slots > v.num_slots or steps > v.max_steps:
            return FULL
        if evict == REFUSE:
            return SHORT
        if (
            v.num_slots - counters[NUM_WRITING] < slots
            or v.num_blocks - counters[WRITING_BLOCKS] < blocks
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
            return SPILL if v.num_blocks - counters[WRITING_BLOCKS] >= blocks else BUSY
        return READ
    if counters[HEAD + counters[HALF]] + blocks > v.half_size:
        return FLIP
    return DONE


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
def take_block(v: Any, place: Any) -> Any:
    """Allocate a block and write it to a position in `block_ids`."""
    counters = v.counters
    require(counters[NUM_FREE_BLOCKS] > 0)
    block = v.free_blocks[counters[NUM_FREE_BLOCKS] - 1]
    require(block >= 0 and v.uses[block, ALL] == 0)
    counters[NUM_FREE_BLOCKS] -= 1
    v.block_ids[place] = block
    v.uses[block, LIVE] = 1
    v.uses[block, ALL] = 1
    return block


@_operation  # type: ignore[untyped-decorator]
def final_of(finals: Any, i: Any) -> Any:
    """Number of final steps of trajectory i; `finals` is empty if no trajectory has any."""
    return finals[i] if len(finals) > 0 else 0


@_operation  # type: ignore[untyped-decorator]
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


@_operation  # type: ignore[untyped-decorator]
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


# ---------------------------------------------------------------- trajectories that grow


@_operation  # type: ignore[untyped-decorator]
def grow(v: Any, slot: Any, length: Any, evict: Any, run: Any, ids: Any) -> Any:
    """Allocate more blocks for a slot that is being written.

    Args:
        length: new capacity in steps, larger than before.
        run: int64 [2], entries of `block_ids` reserved for its block table, and `RUNS` at the reservation.
        ids: int32 [new blocks], output.

    Returns:
        As `make_room`.
    """
    counters = v.counters
    before, start = v.extent[slot, 0], v.extent[slot, 1]
    had, count = blocks_of(v, before), blocks_of(v, length)
    check_extent(v, start, had)
    require(v.state[slot] == WRITING and had <= count and count - had <= len(ids))
    if evict is None:  # decided when it is compiled
        answer = has_room(v, 0, count - had, length - before)
    else:
        answer = make_room(v, 0, count - had, length - before, evict)
    if answer != DONE and answer != FLIP:
        return answer
    half = counters[HALF]
    head = half * v.half_size + counters[HEAD + half]
    room = v.half_size - counters[HEAD + half]
    kept = run[1] == counters[RUNS] and count <= run[0]
    last = start + had == head and count - had <= room
    if not kept and not last and count > room:
        return FLIP
    if kept:
        check_extent(v, start, count)
    begin_change(v)
    place = start
    if last and not kept:
        counters[HEAD + half] += count - had
        run[0], run[1] = count, counters[RUNS]
    elif not kept:
        place = head
        run[0], run[1] = min(2 * count, room), counters[RUNS]
        counters[HEAD + half] += run[0]
        for i in range(had):
            v.block_ids[place + i] = v.block_ids[start + i]
    for i in range(count - had):
        ids[i] = take_block(v, place + had + i)
    fence()
    v.extent[slot, 1] = place
    fence()
    v.extent[slot, 0] = length
    counters[WRITING_STEPS] += length - before
    counters[WRITING_BLOCKS] += count - had
    end_change(v)
    return DONE


@_operation  # type: ignore[untyped-decorator]
def lengthen(v: Any, slot: Any, generation: Any, more: Any, final: Any, evict: Any, run: Any) -> Any:
    """Allocate the blocks for more steps of a trajectory that is visible already; `publish_steps` follows if DONE.

    Args:
        generation: of the trajectory. more: steps to add. final: 1 if a final step is added instead, else 0.
        run: as for `grow`.

    Returns:
        As `make_room`, or GONE. After DONE the index stays dirty until `publish_steps`.
    """
    counters = v.counters
    if v.state[slot] != READY or v.generation[slot] != generation or v.extent[slot, 2] != 0:
        return GONE
    before, start = v.extent[slot, 0], v.extent[slot, 1]
    had, count = blocks_of(v, before), blocks_of(v, before + more + final)
    check_extent(v, start, had)
    answer = make_room(v, 0, count - had, more, evict)
    if answer != DONE and answer != FLIP:
        return answer
    if v.state[slot] != READY:
        return GONE  # `make_room` has evicted it
    half = counters[HALF]
    head = half * v.half_size + counters[HEAD + half]
    room = v.half_size - counters[HEAD + half]
    kept = run[1] == counters[RUNS] and count <= run[0]
    last = start + had == head and count - had <= room
    if count > had and not kept and not last and count > room:
        return FLIP
    begin_change(v)
    if count > had:
        if kept:
            check_extent(v, start, count)
        elif last:
            counters[HEAD + half] += count - had
            run[0], run[1] = count, counters[RUNS]
        else:
            run[0], run[1] = min(2 * count, room), counters[RUNS]
            counters[HEAD + half] += run[0]
            for i in range(had):
                v.block_ids[head + i] = v.block_ids[start + i]
            start = head
        for i in range(had, count):
            take_block(v, start + i)
        fence()
        v.extent[slot, 1] = start  # before the length: a reader finds the old steps at the new place too
    return DONE


@_operation  # type: ignore[untyped-decorator]
def publish_steps(v: Any, slot: Any, more: Any, final: Any) -> None:
    """Make the steps visible that were written after `lengthen`."""
    fence()
    v.extent[slot, 0] += more
    v.extent[slot, 2] = final
    v.counters[NUM_STEPS] += more
    touch(v, slot)
    v.counters[VERSION] += 1
    end_change(v)


@_operation  # type: ignore[untyped-decorator]
def shorten(v: Any, slot: Any, length: Any) -> None:
    """Free the blocks of a slot being written that lie beyond `length` steps."""
    before, start = v.extent[slot, 0], v.extent[slot, 1]
    had, count = blocks_of(v, before), blocks_of(v, length)
    require(length <= before)
    check_extent(v, start, had)
    v.extent[slot, 0] = length
    fence()
    let_go(v, start + count, had - count, True)
    v.counters[WRITING_STEPS] -= before - length
    v.counters[WRITING_BLOCKS] -= had - count


@_operation  # type: ignore[untyped-decorator]
def finish(v: Any, slots: Any, length: Any, final: Any, priorities: Any, now: Any) -> None:
    """`shorten` and `commit` the single slot in `slots`; `final`: the last of the `length` steps is the final one."""
    begin_change(v)
    if v.extent[slots[0], 0] != length:
        shorten(v, slots[0], length)
    if final:
        require(v.state[slots[0]] == WRITING and length > 1)
        v.extent[slots[0], 0] = (
            length - 1
        )  # first: the slot must never have fewer blocks than its extent says
        fence()
        v.extent[slots[0], 2] = 1
        v.counters[WRITING_STEPS] -= 1
    describe(v, slots[0], v.counters[NEXT_SEQUENCE], priorities[0], now, 0)
    publish(v, slots)
    end_change(v)


@_operation  # type: ignore[untyped-decorator]
def roll(
    v: Any, slots: Any, length: Any, shared: Any, priorities: Any, now: Any, evict: Any, pid: Any, start: Any
) -> Any:
    """Commit a slot that is being written, and continue in a new slot that shares its last blocks.

    Args:
        slots: int64 [2], the slot; output: the new slot.
        length: steps of the trajectory.
        shared: position of the first block that both slots share. Blocks beyond the trajectory pass to the new slot.

    Returns:
        As `make_room`.
    """
    slot = slots[0]
    check_extent(v, v.extent[slot, 1], blocks_of(v, v.extent[slot, 0]))
    steps = v.extent[slot, 0] - shared * v.block_steps
    require(v.state[slot] == WRITING and steps > 0)
    if evict is None:  # decided when it is compiled
        answer = has_room(v, 1, 0, steps - (v.extent[slot, 0] - length))
    else:
        answer = make_room(v, 1, 0, steps - (v.extent[slot, 0] - length), evict)
    if answer != DONE:
        return answer
    begin_change(v)
    first, held = v.extent[slot, 1], blocks_of(v, v.extent[slot, 0])
    if v.stream[slot] == 0:
        v.counters[STREAMS] = (v.counters[STREAMS] + 1) & 0x7FFFFFFF
        fence()
        v.stream[slot] = max(v.counters[STREAMS], 1)
    following = take_slot(v, steps, 0, first + shared, pid, start, v.stream[slot])
    for i in range(first + shared, first + held):
        v.uses[v.block_ids[i], LIVE] += 1
        v.uses[v.block_ids[i], ALL] += 1
    slots[1] = following
    shorten(v, slot, length)
    describe(v, slot, v.counters[NEXT_SEQUENCE], priorities[0], now, 0)
    publish(v, slots[:1])
    end_change(v)
    return DONE


# ---------------------------------------------------------------- disk below memory


@_operation  # type: ignore[untyped-decorator]
def spill(v: Any, slots: Any, generations: Any) -> Any:
    """Take the blocks of trajectories that are on disk; everything else of them stays.

    Readers may see the blocks until they end their tickets, so the blocks are parked until then. `parked` is written
    before the first trajectory changes. Trajectories that share blocks are spilled only while nobody reads.

    Args:
        slots, generations: int64 [n], the trajectories, distinct; stale ones and those without blocks are skipped.

    Returns:
        Number of trajectories that were spilled; -1, having done nothing, if blocks are still parked.
    """
    counters = v.counters
    release(v)
    if counters[NUM_PARKED] != 0:
        return -1
    alone = oldest_reader(v) > counters[EPOCH]
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
        shared = False
        for j in range(start, start + blocks):
            require(v.block_ids[j] >= 0)
            shared = shared or v.uses[v.block_ids[j], ALL] != 1
        if alone or not shared:
            chosen[i] = True
            if not alone:
                for j in range(start, start + blocks):
                    v.parked[parked] = v.block_ids[j]
                    parked += 1
    counters[PARKED_EPOCH] = counters[EPOCH]
    fence()
    counters[NUM_PARKED] = parked
    fence()
    for i in range(len(slots)):
        slot = slots[i]
        start = v.extent[slot, 1]
        if not chosen[i]:
            continue
        blocks = slot_blocks(v, slot)
        v.extent[slot, 1] = ON_DISK
        fence()
        if alone:
            let_go(v, start, blocks, True)
        else:
            for j in range(start, start + blocks):
                v.uses[v.block_ids[j], LIVE] = 0
            counters[RETIRED_BLOCKS] += blocks
        counters[NUM_SPILLED] += 1
        spilled += 1
    counters[EPOCH] += 1
    end_change(v)
    return spilled


@_operation  # type: ignore[untyped-decorator]
def take_back(v: Any, slot: Any, generation: Any, ids: Any) -> Any:
    """Allocate blocks for a trajectory that lies on disk only; `give_place` follows if DONE.

    Args:
        ids: int32 [blocks], output.

    Returns:
        DONE; GONE if it is stale or has blocks; FLIP; SPILL if too few blocks are free. After DONE the index stays
        dirty until `give_place`.
    """
    counters = v.counters
    require(counters[HALF] >= 0 and counters[HALF] <= 1 and counters[HEAD + counters[HALF]] >= 0)
    if v.state[slot] != READY or v.generation[slot] != generation or v.extent[slot, 1] >= 0:
        return GONE
    blocks = blocks_of(v, v.extent[slot, 0] + v.extent[slot, 2])
    require(blocks == len(ids))
    release(v)
    if counters[NUM_FREE_BLOCKS] < blocks:
        return SPILL
    half = counters[HALF]
    if counters[HEAD + half] + blocks > v.half_size:
        return FLIP
    begin_change(v)
    start = half * v.half_size + counters[HEAD + half]
    for i in range(blocks):
        ids[i] = take_block(v, start + i)
    counters[HEAD + half] += blocks
    return DONE


@_operation  # type: ignore[untyped-decorator]
def give_place(v: Any, slot: Any, blocks: Any) -> None:
    """Make the blocks of `take_back`, which hold its steps now, those of the trajectory."""
    counters = v.counters
    fence()
    v.extent[slot, 1] = counters[HALF] * v.half_size + counters[HEAD + counters[HALF]] - blocks
    counters[NUM_SPILLED] -= 1
    end_change(v)


@_operation  # type: ignore[untyped-decorator]
def begin_stored(
    v: Any, lengths: Any, finals: Any, inside: Any, pid: Any, process_start: Any, slots: Any, ids: Any
) -> Any:
    """`begin` of trajectories of which some are on disk and get no blocks.

    Args:
        inside: bool [n], whether each one gets blocks. The others as for `begin`.

    Returns:
        DONE, or SHORT, having done nothing, if the table has too little space.
    """
    counters = v.counters
    blocks, steps = 0, 0
    for i in range(len(lengths)):
        steps += lengths[i]
        if inside[i]:
            blocks += blocks_of(v, lengths[i] + final_of(finals, i))
    if has_room(v, len(lengths), blocks, steps) != DONE:
        return SHORT
    begin_change(v)
    half, taken = counters[HALF], 0
    for i in range(len(lengths)):
        start = np.int64(ON_DISK)
        if inside[i]:
            start = half * v.half_size + counters[HEAD + half]
            blocks = blocks_of(v, lengths[i] + final_of(finals, i))
            for j in range(blocks):
                ids[taken] = take_block(v, start + j)
                taken += 1
            counters[HEAD + half] += blocks
            fence()
        slots[i] = take_slot(v, lengths[i], final_of(finals, i), start, pid, process_start, 0)
    end_change(v)
    return DONE


@_operation  # type: ignore[untyped-decorator]
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


# ---------------------------------------------------------------- reading


@_operation  # type: ignore[untyped-decorator]
def begin_read(v: Any, pid: Any, process_start: Any, number: Any) -> Any:
    """Register the read ticket `number` and return its row in `readers`; -1 if all rows are in use.

    No block retired from now on is reused before its `READING` is 0 again.
    """
    for row in range(len(v.readers)):
        if v.readers[row, READING] == 0:
            v.readers[row, PID] = pid
            v.readers[row, START] = process_start
            v.readers[row, TICKET] = number
            fence()
            v.readers[row, READING] = v.counters[EPOCH]
            return row
    return -1


@_operation  # type: ignore[untyped-decorator]
def end_read(v: Any, row: Any, number: Any) -> None:
    """Release the row of a read ticket, unless another ticket uses the row now. Takes no lock."""
    if v.readers[row, TICKET] == number:
        v.readers[row, READING] = 0


@_operation  # type: ignore[untyped-decorator]
def begin_unchanged(
    v: Any, pid: Any, process_start: Any, number: Any, counter: Any, value: Any, samples: Any
) -> Any:
    """`begin_read`, and count `samples` rows as drawn, if a counter still has a value.

    Returns:
        As `begin_read`; -2, having done nothing, if the counter has changed or the index needs recovery.
    """
    counters = v.counters
    if counters[DIRTY] != 0 or counters[INITIALIZED] == 0 or counters[counter] != value:
        return -2
    row = begin_read(v, pid, process_start, number)
    if row >= 0:
        counters[NUM_SAMPLED] += samples
    return row


@_operation  # type: ignore[untyped-decorator]
def count_samples(v: Any, slots: Any, generations: Any, limit: Any, total: Any, times: Any) -> Any:
    """Count rows as drawn.

    Args:
        slots, generations: int64 [n], the rows.
        limit: draws after which a trajectory is retired; 0 for no limit.
        total: whether `NUM_SAMPLED` counts them too.
        times: int64 [n], output: number of draws of each trajectory; 0 if it is stale or had reached the limit.

    Returns:
        Number of rows counted.
    """
    counted, used_up = 0, 0
    counters = v.counters
    if limit > 0 or total:
        begin_change(v)
    for i in range(len(slots)):
        slot = slots[i]
        times[i] = 0
        if slot < 0 or slot >= v.num_slots or v.state[slot] != READY:
            continue
        if v.generation[slot] != generations[i]:
            continue
        if limit > 0 and v.sampled[slot] >= limit:
            continue
        if total:
            counters[DRAWING_TIMES] = v.sampled[slot] + 1
            counters[DRAWING_TOTAL] = counters[NUM_SAMPLED] + 1
            fence()
            counters[DRAWING] = slot + 1
            fence()
        v.sampled[slot] += 1
        if total:
            fence()
            counters[NUM_SAMPLED] += 1
            fence()
            counters[DRAWING] = 0
        times[i] = v.sampled[slot]
        counted += 1
        used_up += limit > 0 and v.sampled[slot] == limit
    if used_up > 0:
        for i in range(len(slots)):
            slot = slots[i]
            if times[i] == limit:
                retire(v, slot, NUM_EXPIRED)
    if limit > 0 or total:
        end_change(v)
    return counted


@_operation  # type: ignore[untyped-decorator]
def set_priorities(v: Any, slots: Any, generations: Any, priorities: Any) -> None:
    """Write new priorities; stale rows are skipped, the last of equal slots counts.

    Args:
        slots, generations: int64 [n]; generation -1 matches any. priorities: float32 [n].
    """
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0 or slot >= v.num_slots or v.state[slot] != READY:
            continue
        if generations[i] >= 0 and v.generation[slot] != generations[i]:
            continue
        bound(v, slot, priorities[i])
        fence()
        v.priority[slot] = priorities[i]


@_operation  # type: ignore[untyped-decorator]
def walk(v: Any, newest: Any, slots: Any) -> None:
    """Fill `slots` (int64 [n], n at most NUM_READY) with the oldest or newest slots in order."""
    slot = v.counters[NEWEST if newest else OLDEST] - 1
    for i in range(len(slots)):
        require(slot >= 0)
        slots[i] = slot
        slot = v.links[slot, 0 if newest else 1]


# ---------------------------------------------------------------- Python and compiled entry points

_OPERATIONS = (
    *(commit, commit_as, raise_numbering, abort, reclaim, remove, expire, outdate, begin, grow, finish, roll),
    *(lengthen, publish_steps),
    *(spill, take_back, give_place, begin_stored, evict),
    *(begin_read, begin_unchanged, end_read, count_samples, set_priorities, walk),
)
PLAIN = types_module.SimpleNamespace(**{operation.__name__: operation for operation in _OPERATIONS})
"""The operations in Python; the first argument is a `View`."""


def places_of(view: View) -> Array:
    """Addresses and sizes of the arrays, int64 [n], for compiled operations. The caller keeps the arrays alive."""
    arrays: tuple[Any, ...] = view[: View._fields.index("block_steps")]
    addresses = [array.ctypes.data for array in arrays]
    lengths = [len(array) for array in (view.readers, view.block_ids, view.lowest, view.parked)]
    sizes = [*view[len(addresses) :], *lengths]
    return np.array(addresses + sizes, dtype=np.int64)


# In this file, because numba's cache stays valid until the file of the function changes.


@register_jitable  # type: ignore[untyped-decorator]
def _view(p: Any) -> Any:
    slots, blocks = p[24], p[25]
    return View(
        carray(pointer(p[0]), (64,), np.int64),
        carray(pointer(p[1]), (p[28], 4), np.int64),
        carray(pointer(p[2]), (slots, 3), np.int64),
        carray(pointer(p[3]), (slots,), np.int64),
        carray(pointer(p[4]), (slots,), np.int64),
        carray(pointer(p[5]), (slots,), np.int64),
        carray(pointer(p[6]), (slots, 2), np.int64),
        carray(pointer(p[7]), (slots,), np.int32),
        carray(pointer(p[8]), (slots,), np.int64),
        carray(pointer(p[9]), (slots,), np.float32),
        carray(pointer(p[10]), (slots,), np.int32),
        carray(pointer(p[11]), (slots,), np.int32),
        carray(pointer(p[12]), (slots, 2), np.int32),
        carray(pointer(p[13]), (p[29],), np.int32),
        carray(pointer(p[14]), (slots,), np.int32),
        carray(pointer(p[15]), (slots,), np.int32),
        carray(pointer(p[16]), (slots,), np.int32),
        carray(pointer(p[17]), (blocks,), np.int32),
        carray(pointer(p[18]), (blocks, 2), np.int32),
        carray(pointer(p[19]), (p[30],), np.float32),
        carray(pointer(p[20]), (slots,), np.int64),
        carray(pointer(p[21]), (p[31],), np.int32),
        p[22],
        p[23],
        slots,
        blocks,
        p[26],
        p[27],
    )


@compiled
def _commit(p, slots, priorities, now):  # type: ignore[no-untyped-def]
    commit(_view(p), slots, priorities, now)


@compiled
def _commit_as(p, slots, sequences, priorities, created, times):  # type: ignore[no-untyped-def]
    commit_as(_view(p), slots, sequences, priorities, created, times)


@compiled
def _raise_numbering(p, following):  # type: ignore[no-untyped-def]
    raise_numbering(_view(p), following)


@compiled
def _abort(p, slots):  # type: ignore[no-untyped-def]
    abort(_view(p), slots)


@compiled
def _reclaim(p):  # type: ignore[no-untyped-def]
    reclaim(_view(p))


@compiled
def _remove(p, slots):  # type: ignore[no-untyped-def]
    remove(_view(p), slots)


@compiled
def _expire(p, before):  # type: ignore[no-untyped-def]
    expire(_view(p), before)


@compiled
def _outdate(p, slots):  # type: ignore[no-untyped-def]
    outdate(_view(p), slots)


@compiled
def _begin_light(p, lengths, finals, evict, pid, process_start, slots, ids):  # type: ignore[no-untyped-def]
    return begin(_view(p), lengths, finals, None, pid, process_start, slots, ids)


@compiled
def _begin(p, lengths, finals, evict, pid, process_start, slots, ids):  # type: ignore[no-untyped-def]
    return begin(_view(p), lengths, finals, evict, pid, process_start, slots, ids)


@compiled
def _grow_light(p, slot, length, evict, run, ids):  # type: ignore[no-untyped-def]
    return grow(_view(p), slot, length, None, run, ids)


@compiled
def _grow(p, slot, length, evict, run, ids):  # type: ignore[no-untyped-def]
    return grow(_view(p), slot, length, evict, run, ids)


@compiled
def _lengthen(p, slot, generation, more, final, evict, run):  # type: ignore[no-untyped-def]
    return lengthen(_view(p), slot, generation, more, final, evict, run)


@compiled
def _publish_steps(p, slot, more, final):  # type: ignore[no-untyped-def]
    publish_steps(_view(p), slot, more, final)


@compiled
def _add_steps(p, slot, generation, more, final, evict, run, columns, addresses):  # type: ignore[no-untyped-def]
    """`lengthen`, copy and `publish_steps`."""
    v = _view(p)
    if v.counters[DIRTY] != 0 or v.counters[INITIALIZED] == 0:
        return UNREADY
    answer = lengthen(v, slot, generation, more, final, evict, run)
    if answer == DONE:
        ids, length = v.block_ids[v.extent[slot, 1] :], v.extent[slot, 0]
        for place in range(length // v.block_steps, (length + more + final - 1) // v.block_steps + 1):
            require(ids[place] >= 0 and ids[place] < v.num_blocks)
        # Its machine code is linked into the cached code of this file: a change of it needs a change here.
        append_steps(columns, v.block_steps, ids, length, addresses, more + final)
        publish_steps(v, slot, more, final)
    return answer


@compiled
def _add_rows(p, columns, addresses, grown, chosen, longest, evict):  # type: ignore[no-untyped-def]
    """`lengthen`, copy and `publish_steps` for one step of each of several trajectories, in order.

    Args:
        columns, addresses: as for `copy_row`; the row is the number in `chosen`.
        grown: int64 [n, GROWN_WIDTH], the trajectories; their steps are counted.
        chosen: int64 [m], which of them. longest: most steps of a trajectory. evict: as for `make_room`.

    Returns:
        How many have got their step; the next one does not grow, or needs the general path.
    """
    v = _view(p)
    if v.counters[DIRTY] != 0 or v.counters[INITIALIZED] == 0:
        return 0
    for j in range(len(chosen)):
        i = chosen[j]
        if grown[i, GROWN_STEPS] == 0 or grown[i, GROWN_STEPS] >= longest:
            return j
        slot, run = grown[i, GROWN_SLOT], grown[i, GROWN_RUN:]
        if lengthen(v, slot, grown[i, GROWN_GENERATION], 1, 0, evict, run) != DONE:
            return j
        step = v.extent[slot, 0]
        place = step // v.block_steps
        block = int64(v.block_ids[v.extent[slot, 1] + place])
        require(block >= 0 and block < v.num_blocks)
        # Its machine code is linked into the cached code of this file: a change of it needs a change here.
        copy_row(columns, block, step - place * v.block_steps, addresses, i)
        publish_steps(v, slot, 1, 0)
        grown[i, GROWN_STEPS] += 1
    return len(chosen)


@compiled
def _finish(p, slots, length, final, priorities, now):  # type: ignore[no-untyped-def]
    finish(_view(p), slots, length, final, priorities, now)


@_operation  # type: ignore[untyped-decorator]
def reserve_rows(v: Any, rows: Any, ids: Any, evict: Any, pid: Any, process_start: Any) -> Any:
    """`begin` or `grow` for each of several writers, in order, as `Writer` does for one.

    Args:
        rows: int64 [n, ROOM_WIDTH], see there. ids: int32, output: the new blocks of each.
        evict, pid, process_start: as for `begin`.

    Returns:
        How many have got their room; ROOM_ANSWER of the next one says why not.
    """
    if v.counters[DIRTY] != 0 or v.counters[INITIALIZED] == 0:
        rows[0, ROOM_ANSWER] = UNREADY
        return 0
    counters = v.counters
    for i in range(len(rows)):
        row = rows[i]
        needed, taken = row[ROOM_NEEDED], ids[row[ROOM_PLACE] :]
        free = v.max_steps - counters[NUM_STEPS] - counters[WRITING_STEPS]
        free = max(min(free, counters[NUM_FREE_BLOCKS] * v.block_steps), 0)
        if row[ROOM_SLOT] < 0:
            first = min(max(needed, v.block_steps), row[ROOM_MOST])
            row[ROOM_HELD] = first if first <= free else needed
            lengths = row[ROOM_HELD : ROOM_HELD + 1]
            slots = row[ROOM_SLOT : ROOM_SLOT + 1]
            answer = begin(v, lengths, row[:0], evict, pid, process_start, slots, taken)
            row[ROOM_GENERATION] = v.generation[row[ROOM_SLOT]] if answer == DONE else 0
        else:
            run = carray(pointer(row[ROOM_RUN]), (2,), np.int64)
            before = row[ROOM_HELD]
            full = blocks_of(v, needed) * v.block_steps
            most = min(max(2 * before, needed), before + free // GENEROUS, row[ROOM_MOST])
            answer = FULL
            for turn in range(3):
                row[ROOM_HELD] = max(most, full) if turn == 0 else (full if turn == 1 else needed)
                if evict is None:  # decided when it is compiled
                    answer = grow(v, row[ROOM_SLOT], row[ROOM_HELD], None, run, taken)
                else:
                    policy = REFUSE if turn == 0 else evict
                    answer = grow(v, row[ROOM_SLOT], row[ROOM_HELD], policy, run, taken)
                if answer in (DONE, FLIP):
                    break
            if answer != DONE:
                row[ROOM_HELD] = before
        row[ROOM_ANSWER] = answer
        if answer != DONE:
            return i
    return len(rows)


@compiled
def _reserve_rows_light(p, rows, ids, evict, pid, process_start):  # type: ignore[no-untyped-def]
    return reserve_rows(_view(p), rows, ids, None, pid, process_start)


@compiled
def _reserve_rows(p, rows, ids, evict, pid, process_start):  # type: ignore[no-untyped-def]
    return reserve_rows(_view(p), rows, ids, evict, pid, process_start)


@compiled
def _finish_rows(p, rows, now):  # type: ignore[no-untyped-def]
    """`finish` for each of several slots, in order; see FINISH_SLOT. Returns False, having done nothing, if unready."""
    v = _view(p)
    if v.counters[DIRTY] != 0 or v.counters[INITIALIZED] == 0:
        return False
    for i in range(len(rows)):
        row = rows[i]
        slots, priorities = row[FINISH_SLOT : FINISH_SLOT + 1], row[FINISH_PRIORITY:].view(np.float64)
        finish(v, slots, row[FINISH_LENGTH], row[FINISH_FINAL], priorities, now)
    return True


@compiled
def _roll(p, slots, length, shared, priorities, now, evict, pid, start):  # type: ignore[no-untyped-def]
    return roll(_view(p), slots, length, shared, priorities, now, evict, pid, start)


@compiled
def _spill(p, slots, generations):  # type: ignore[no-untyped-def]
    return spill(_view(p), slots, generations)


@compiled
def _take_back(p, slot, generation, ids):  # type: ignore[no-untyped-def]
    return take_back(_view(p), slot, generation, ids)


@compiled
def _give_place(p, slot, blocks):  # type: ignore[no-untyped-def]
    give_place(_view(p), slot, blocks)


@compiled
def _begin_stored(p, lengths, finals, inside, pid, process_start, slots, ids):  # type: ignore[no-untyped-def]
    return begin_stored(_view(p), lengths, finals, inside, pid, process_start, slots, ids)


@compiled
def _evict(p, steps, how):  # type: ignore[no-untyped-def]
    return evict(_view(p), steps, how)


@compiled
def _begin_read(p, pid, process_start, number):  # type: ignore[no-untyped-def]
    return begin_read(_view(p), pid, process_start, number)


@compiled
def _end_read(p, row, number):  # type: ignore[no-untyped-def]
    end_read(_view(p), row, number)


@compiled
def _begin_unchanged(p, pid, process_start, number, counter, value, samples):  # type: ignore[no-untyped-def]
    return begin_unchanged(_view(p), pid, process_start, number, counter, value, samples)


@compiled
def _count_samples(p, slots, generations, limit, total, times):  # type: ignore[no-untyped-def]
    return count_samples(_view(p), slots, generations, limit, total, times)


@compiled
def _set_priorities(p, slots, generations, priorities):  # type: ignore[no-untyped-def]
    set_priorities(_view(p), slots, generations, priorities)


@compiled
def _walk(p, newest, slots):  # type: ignore[no-untyped-def]
    walk(_view(p), newest, slots)


@njit(inline="always")  # type: ignore[untyped-decorator]
def store(v: Any, columns: Any, request: Any, evict: Any) -> Any:
    """`begin`, copy and `commit`; for small data, because the lock is held during the copy."""
    counters = v.counters
    clean = counters[DIRTY] == 0 and counters[INITIALIZED] != 0 and counters[NUM_WRITING] == 0
    if request[REQUEST_AT_ONCE] != 0 and not clean:
        return UNREADY
    count, width = request[REQUEST_COUNT], columns.shape[0]
    priorities = REQUEST_HEAD + 2 * count
    places = priorities + count
    lengths = request[REQUEST_HEAD : REQUEST_HEAD + count]
    slots = request[REQUEST_HEAD + count : priorities]
    addresses = request[places : places + count * width].reshape((count, width))
    blocks = 0
    for i in range(count):
        blocks += blocks_of(v, lengths[i])
    ids = np.empty(blocks, dtype=np.int32)
    answer = begin(v, lengths, lengths[:0], evict, request[REQUEST_PID], request[REQUEST_START], slots, ids)
    if answer == DONE:
        # Its machine code is linked into the cached code of this file: a change of it needs a change here.
        scatter(columns, v.block_steps, ids, addresses, lengths)
        commit(v, slots, request[priorities:places].view(np.float64), request[REQUEST_NOW])
    return answer


@compiled
def _store_light(p, columns, request):  # type: ignore[no-untyped-def]
    return store(_view(p), columns, request, None)


@compiled
def _store(p, columns, request):  # type: ignore[no-untyped-def]
    return store(_view(p), columns, request, request[REQUEST_EVICT])


def _on_demand(light: Any, full: Any) -> Any:
    """An operation that loads its `full` version, which compiles for seconds, when `light` first does not suffice."""
    needed = False

    def call(*given: Any) -> Any:
        nonlocal needed
        if not needed:
            answer = light(*given)
            if answer != TIGHT:
                return answer
            needed = True
        return full(*given)

    return call


def _rows_on_demand(light: Any, full: Any) -> Any:
    """`_on_demand` for `reserve_rows`."""
    needed = False

    def call(p: Any, rows: Array, *given: Any) -> Any:
        nonlocal needed
        done = 0
        if not needed:
            done = light(p, rows, *given)
            if done == len(rows) or rows[done, ROOM_ANSWER] != TIGHT:
                return done
            needed = True
        return done + full(p, rows[done:], *given)

    return call


_ENTRIES = {operation.__name__: globals()[f"_{operation.__name__}"] for operation in _OPERATIONS} | {
    "begin": _on_demand(_begin_light, _begin),
    "grow": _on_demand(_grow_light, _grow),
    "store": _on_demand(_store_light, _store),
    "add_rows": _add_rows,
    "finish_rows": _finish_rows,
    "reserve_rows": _rows_on_demand(_reserve_rows_light, _reserve_rows),
    "add_steps": _add_steps,
}
COMPILED = types_module.SimpleNamespace(**_ENTRIES)
"""The compiled operations, and those that exist only compiled; the first argument is the result of `places_of`."""
