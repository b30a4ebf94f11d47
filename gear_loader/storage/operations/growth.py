"""Trajectories that grow while they are written."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from gear_loader.native.compile import inlined
from gear_loader.native.memory import pointer
from gear_loader.storage.counters import (
    DIRTY,
    HALF,
    HEAD,
    INITIALIZED,
    NEXT_SEQUENCE,
    NUM_FREE_BLOCKS,
    NUM_STEPS,
    RUNS,
    STREAMS,
    VERSION,
    WRITING_BLOCKS,
    WRITING_STEPS,
)
from gear_loader.storage.operations.lifecycle import describe, let_go, publish, touch
from gear_loader.storage.operations.room import begin, has_room, make_room, take_block, take_slot
from gear_loader.storage.operations.view import (
    ALL,
    DONE,
    FLIP,
    FULL,
    GENEROUS,
    GONE,
    LIVE,
    REFUSE,
    ROOM_ANSWER,
    ROOM_GENERATION,
    ROOM_HELD,
    ROOM_MOST,
    ROOM_NEEDED,
    ROOM_PLACE,
    ROOM_RUN,
    ROOM_SLOT,
    UNREADY,
    begin_change,
    blocks_of,
    check_extent,
    end_change,
    fence,
    require,
)
from gear_loader.storage.states import READY, WRITING


@inlined
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


@inlined
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


@inlined
def publish_steps(v: Any, slot: Any, more: Any, final: Any) -> None:
    """Make the steps visible that were written after `lengthen`."""
    fence()
    v.extent[slot, 0] += more
    v.extent[slot, 2] = final
    v.counters[NUM_STEPS] += more
    touch(v, slot)
    v.counters[VERSION] += 1
    end_change(v)


@inlined
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


@inlined
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


@inlined
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


@inlined
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
