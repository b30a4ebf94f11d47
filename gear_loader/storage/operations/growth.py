"""Trajectories that grow while they are written."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.native.compile import inlined
from gear_loader.native.copying import copy_common, copy_steps
from gear_loader.native.lanes import (
    LANE_COMMON,
    LANE_GENERATION,
    LANE_HELD,
    LANE_LAST,
    LANE_RUN,
    LANE_SLOT,
    LANE_STEPS,
    LANE_WIDTH,
)
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
from gear_loader.storage.operations.lifecycle import abort, describe, let_go, publish, touch
from gear_loader.storage.operations.room import begin, has_room, make_room, take_block, take_slot
from gear_loader.storage.operations.view import (
    ADVANCE_STEPS,
    ALL,
    DONE,
    FLIP,
    FULL,
    GENEROUS,
    GONE,
    LIVE,
    OUTSIDE,
    REFUSE,
    UNREADY,
    begin_change,
    blocks_of,
    check_extent,
    end_change,
    fence,
    require,
)
from gear_loader.storage.states import READY, WRITING

# Compiled into the cached machine code.
assert (LANE_SLOT, LANE_GENERATION, LANE_STEPS, LANE_HELD, LANE_COMMON, LANE_RUN) == (0, 1, 2, 3, 4, 5)
assert (LANE_LAST, LANE_WIDTH) == (7, 8)


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
def lengthen(
    v: Any, slot: Any, generation: Any, state: Any, more: Any, final: Any, evict: Any, run: Any
) -> Any:
    """Allocate the blocks for more steps of a trajectory; `publish_steps` follows if DONE.

    Args:
        generation: of the trajectory. state: its state, READY (it is visible) or WRITING.
        more: steps to add. final: 1 if a final step follows them, else 0. A trajectory that has one gets both, so the
            final step moves behind the new steps; else it is GONE.
        run: as for `grow`.

    Returns:
        As `make_room`, or GONE, or OUTSIDE. After DONE the index stays dirty until `publish_steps`.
    """
    counters = v.counters
    if v.state[slot] != state or v.generation[slot] != generation:
        return GONE
    before, start = v.extent[slot, 0], v.extent[slot, 1]
    if v.extent[slot, 2] != 0 and (more == 0 or final == 0):
        return GONE
    if start < 0:
        return OUTSIDE
    had, count = blocks_of(v, before + v.extent[slot, 2]), blocks_of(v, before + more + final)
    check_extent(v, start, had)
    if evict is None:  # noqa: SIM108 - decided when it is compiled
        answer = has_room(v, 0, count - had, more)
    else:
        answer = make_room(v, 0, count - had, more, evict)
    if answer != DONE and answer != FLIP:
        return answer
    if v.state[slot] != state:
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
        if state == WRITING:
            counters[WRITING_BLOCKS] += count - had
        fence()
        v.extent[slot, 1] = start  # before the length: a reader finds the old steps at the new place too
    return DONE


@inlined
def publish_steps(v: Any, slot: Any, more: Any, final: Any) -> None:
    """Count the steps that were written after `lengthen`; those of a READY trajectory become visible."""
    fence()
    v.extent[slot, 0] += more
    v.extent[slot, 2] = final
    if v.state[slot] == WRITING:
        v.counters[WRITING_STEPS] += more
    else:
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
def finish(v: Any, slot: Any, length: Any, final: Any, priority: Any, now: Any) -> None:
    """`shorten` and `commit` a slot; `final`: the last of the `length` steps is the final one."""
    begin_change(v)
    if v.extent[slot, 0] != length:
        shorten(v, slot, length)
    if final:
        require(v.state[slot] == WRITING and length > 1)
        v.extent[slot, 0] = length - 1  # first: the slot must never have fewer blocks than its extent says
        fence()
        v.extent[slot, 2] = 1
        v.counters[WRITING_STEPS] -= 1
    describe(v, slot, v.counters[NEXT_SEQUENCE], priority, now, 0)
    publish(v, np.full(1, slot))
    end_change(v)


@inlined
def roll(
    v: Any,
    slot: Any,
    length: Any,
    shared: Any,
    priority: Any,
    now: Any,
    evict: Any,
    pid: Any,
    start: Any,
    out: Any,
) -> Any:
    """Commit a slot that is being written, and continue in a new slot that shares its last blocks.

    Args:
        length: steps of the trajectory.
        shared: position of the first block that both slots share. Blocks beyond the trajectory pass to the new slot.
        out: int64 [1], output: the new slot.

    Returns:
        As `make_room`.
    """
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
    out[0] = following
    shorten(v, slot, length)
    describe(v, slot, v.counters[NEXT_SEQUENCE], priority, now, 0)
    publish(v, np.full(1, slot))
    end_change(v)
    return DONE


# Operations on lanes (`gear_loader.native.lanes`), one environment after another. `at`, int64 [1], is the place in
# `chosen` (int64 [m], lanes) of the next one, and is counted up. An operation changes index and lanes in one step for
# the thread: no exception of a signal handler comes in between.


@inlined
def is_ready(v: Any) -> Any:
    """Whether the index needs no recovery."""
    return v.counters[DIRTY] == 0 and v.counters[INITIALIZED] != 0


@inlined
def free_steps(v: Any) -> Any:
    """Steps that fit without eviction."""
    counters = v.counters
    free = v.max_steps - counters[NUM_STEPS] - counters[WRITING_STEPS]
    return max(min(free, counters[NUM_FREE_BLOCKS] * v.block_steps), 0)


@inlined
def clear_lane(lane: Any, last: Any) -> None:
    """Forget a lane's trajectory; `last` was its stream's last chunk, or -1."""
    for i in range(LANE_WIDTH):
        lane[i] = 0
    lane[LANE_SLOT] = -1
    lane[LANE_LAST] = last


@inlined
def reserve_lanes(
    v: Any,
    lanes: Any,
    chosen: Any,
    at: Any,
    blocks: Any,
    more: Any,
    most: Any,
    evict: Any,
    pid: Any,
    process_start: Any,
) -> Any:
    """Make room for `more` steps in each lane; one without a trajectory begins one.

    Args:
        blocks: int32 [n, W], output: blocks of the lanes' trajectories. most: most steps of a trajectory.
        evict, pid, process_start: as for `begin`.

    Returns:
        DONE, or why the next lane did not get its room, as `make_room`, or UNREADY.
    """
    if not is_ready(v):
        return UNREADY
    lengths, slots = np.empty(1, dtype=np.int64), np.empty(1, dtype=np.int64)
    for j in range(at[0], len(chosen)):
        at[0] = j
        lane, ids = lanes[chosen[j]], blocks[chosen[j]]
        needed, held = lane[LANE_STEPS] + more, lane[LANE_HELD]
        if needed <= held:
            continue
        free = free_steps(v)
        if lane[LANE_SLOT] < 0:
            held = min(max(needed, v.block_steps), most)
            # No lane gets more than all could have, else the last ones would take what the first were refused.
            fair = held * len(chosen) <= v.max_steps and held <= free // (len(chosen) - j)
            held = held if fair else needed
            lengths[0] = held
            answer = begin(v, lengths, lengths[:0], evict, pid, process_start, slots, ids)
            if answer != DONE:
                return answer
            lane[LANE_SLOT], lane[LANE_GENERATION] = slots[0], v.generation[slots[0]]
        else:
            taken = ids[blocks_of(v, held) :]
            full = blocks_of(v, needed) * v.block_steps
            full = full if full * len(chosen) <= v.max_steps else needed  # as above
            ahead = min(free // GENEROUS, ADVANCE_STEPS // len(chosen))
            generous = min(max(2 * held, needed), held + ahead, most)
            answer = FULL
            for turn in range(3):
                held = max(generous, full) if turn == 0 else (full if turn == 1 else needed)
                if evict is None:  # decided when it is compiled
                    answer = grow(v, lane[LANE_SLOT], held, None, lane[LANE_RUN:], taken)
                else:
                    policy = REFUSE if turn == 0 else evict
                    answer = grow(v, lane[LANE_SLOT], held, policy, lane[LANE_RUN:], taken)
                if answer in (DONE, FLIP):
                    break
            if answer != DONE:
                return answer
        lane[LANE_HELD] = held
    at[0] = len(chosen)
    return DONE


@inlined
def end_lanes(
    v: Any,
    lanes: Any,
    chosen: Any,
    at: Any,
    blocks: Any,
    columns: Any,
    chunk: Any,
    overlap: Any,
    ending: Any,
    final: Any,
    priorities: Any,
    now: Any,
    grows: Any,
    evict: Any,
    pid: Any,
    process_start: Any,
    out: Any,
) -> Any:
    """Commit the trajectory of each lane, and return what it did not use.

    One with `chunk` steps is a chunk: unless its lane ends, the next one begins with the last `overlap` of them. Where
    the first common step begins a block, both chunks share blocks; else the common steps are copied.

    Args:
        blocks, evict, pid, process_start: as for `reserve_lanes`.
        columns: as for `gear_loader.native.copying.scatter`.
        ending: bool [n], lanes that end with a chunk. final: 1 if a final step follows the steps of each that is no
            chunk, else 0. priorities: float32 [n].
        grows: whether the lanes go on with their trajectories, by `grow_lanes`.
        out: int64 [n], output: the slot of each.

    Returns:
        As `reserve_lanes`.
    """
    if not is_ready(v):
        return UNREADY
    lengths, slots = np.empty(1, dtype=np.int64), np.empty(1, dtype=np.int64)
    ids = np.empty(blocks_of(v, overlap), dtype=np.int32)
    for j in range(at[0], len(chosen)):
        i = chosen[j]
        lane, own = lanes[i], blocks[i]
        slot, steps, held = lane[LANE_SLOT], lane[LANE_STEPS], lane[LANE_HELD]
        cut = steps == chunk
        stride = steps - overlap
        shared = stride // v.block_steps
        answer = DONE
        if not cut or ending[i] or overlap == 0:
            more = 0 if cut else final
            finish(v, slot, steps + more, more, priorities[i], now)
            if grows:
                lane[LANE_HELD] = lane[LANE_RUN] = 0
            else:
                clear_lane(lane, slot if cut and not ending[i] else -1)
        else:
            if shared * v.block_steps == stride:
                answer = roll(v, slot, steps, shared, priorities[i], now, evict, pid, process_start, slots)
                if answer != DONE:
                    return answer
                lane[LANE_RUN] = max(0, lane[LANE_RUN] - shared)
                lane[LANE_HELD] = held - stride
                for k in range(blocks_of(v, held) - shared):
                    own[k] = own[shared + k]
            else:
                held = min(max(overlap, v.block_steps), steps)
                lengths[0] = held if held <= free_steps(v) else overlap
                answer = begin(v, lengths, lengths[:0], evict, pid, process_start, slots, ids)
                if answer != DONE:
                    return answer
                # Its machine code is linked into the cached code of this file: a change of it needs a change here.
                copy_common(columns, v.block_steps, own, stride, ids, overlap)
                finish(v, slot, steps, 0, priorities[i], now)
                lane[LANE_RUN], lane[LANE_HELD] = 0, lengths[0]
                for k in range(len(ids)):
                    own[k] = ids[k]
            lane[LANE_SLOT], lane[LANE_GENERATION] = slots[0], v.generation[slots[0]]
            lane[LANE_STEPS] = lane[LANE_COMMON] = overlap
            lane[LANE_LAST] = slot
        out[i] = slot
        at[0] = j + 1
    return DONE


@inlined
def grow_lanes(
    v: Any,
    lanes: Any,
    chosen: Any,
    at: Any,
    columns: Any,
    sources: Any,
    first: Any,
    count: Any,
    final: Any,
    evict: Any,
) -> Any:
    """`lengthen`, copy and `publish_steps` for the growing trajectory of each lane; those without one are left out.

    A lane whose trajectory was evicted or removed has none afterwards.

    Args:
        columns, sources, first, count: as for `gear_loader.native.copying.put_rows`.
        final: 1 if the step is the final one, and `count` 1; else 0. evict: as for `make_room`.

    Returns:
        As `reserve_lanes`, or OUTSIDE.
    """
    if not is_ready(v):
        return UNREADY
    for j in range(at[0], len(chosen)):
        at[0] = j
        i = chosen[j]
        lane, slot = lanes[i], lanes[i, LANE_SLOT]
        if lane[LANE_STEPS] == 0:
            continue
        more = 0 if final else count
        answer = lengthen(v, slot, lane[LANE_GENERATION], READY, more, final, evict, lane[LANE_RUN:])
        if answer == GONE:
            clear_lane(lane, -1)
            continue
        if answer != DONE:
            return answer
        done, length = 0, v.extent[slot, 0]
        while done < count:
            place = (length + done) // v.block_steps
            inside = length + done - place * v.block_steps
            steps = min(v.block_steps - inside, count - done)
            block = np.int64(v.block_ids[v.extent[slot, 1] + place])
            require(block >= 0 and block < v.num_blocks)
            # Its machine code is linked into the cached code of this file: a change of it needs a change here.
            copy_steps(columns, block, inside, sources, i, first + done, steps)
            done += steps
        publish_steps(v, slot, more, final)
        lane[LANE_STEPS] += more
    at[0] = len(chosen)
    return DONE


@inlined
def abort_lanes(v: Any, lanes: Any, chosen: Any) -> Any:
    """Free what the lanes are writing, and forget it; UNREADY, having done nothing, if the index needs recovery."""
    if not is_ready(v):
        return UNREADY
    slots = np.empty(len(chosen), dtype=np.int64)
    count = 0
    for i in chosen:
        slot = lanes[i, LANE_SLOT]
        if slot >= 0 and v.state[slot] == WRITING and v.generation[slot] == lanes[i, LANE_GENERATION]:
            slots[count] = slot
            count += 1
    abort(v, slots[:count])
    for i in chosen:
        clear_lane(lanes[i], -1)
    return DONE
