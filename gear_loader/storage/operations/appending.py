"""Rows of n growing trajectories, with the values that follow each row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gear_loader.native.compile import inlined
from gear_loader.native.copying import copy_common, is_zero, place_of, put_step, row_of
from gear_loader.native.lanes import LANE_GENERATION, LANE_LAST, LANE_RUN, LANE_SLOT, LANE_STEPS
from gear_loader.native.memory import differ_step
from gear_loader.storage.operations.growth import clear_lane, is_ready, lengthen, publish_steps
from gear_loader.storage.operations.lifecycle import abort, commit
from gear_loader.storage.operations.quick_rows import TOGETHER, write_rows
from gear_loader.storage.operations.room import begin
from gear_loader.storage.operations.view import DONE, GONE, UNREADY, require
from gear_loader.storage.states import READY, WRITING

# Compiled into the cached machine code.
assert (LANE_SLOT, LANE_GENERATION, LANE_STEPS, LANE_RUN, LANE_LAST) == (0, 1, 2, 5, 7)

UNLESS_RESET, ENDS, GOES_ON = 2, 4, 8
"""A row's kind is 0 if it does not count, 1 if it does, or UNLESS_RESET: if it does not repeat what followed a row that
ended its trajectory, with zeros in the column of rewards, and does not end itself; plus ENDS if its trajectory ends;
plus GOES_ON if it goes on with its lane's trajectory whatever it has: its values replace the final step."""

# Head of a request to `append_lanes`, int64: number of lanes n, of columns C, of rows K, of columns per trajectory O;
# the item that is next (row k of lane i is item k * n + i), and the one to stop at; steps of a trajectory at which it
# ends, or NEVER; the column of rewards; whether each row is visible at once; whether rows that are not are only made
# visible; state of trajectories that have not ended: READY, or WRITING if they are visible when they have; the column
# that tells the first rows of episodes, or -1; steps that the trajectories of an episode have in common, with such a
# column; pid and start time of this process.
(
    AHEAD_LANES,
    AHEAD_COLUMNS,
    AHEAD_ROWS,
    AHEAD_ONCE,
    AHEAD_AT,
    AHEAD_END,
    AHEAD_CUT,
    AHEAD_REWARD,
    AHEAD_AT_ONCE,
    AHEAD_PUBLISHES,
    AHEAD_STATE,
    AHEAD_FIRST,
    AHEAD_OVERLAP,
    AHEAD_PID,
    AHEAD_START,
    AHEAD_HEAD,
) = range(16)
NEVER = 1 << 62


def parts_of(lanes: int, columns: int, rows: int, once: int, overlap: int) -> dict[str, tuple[int, ...]]:
    """What follows the head of a request, in order, int64.

    columns: as for `gear_loader.native.copying.scatter`. sources, following: as for `row_of`: rows, and the values
    after each; the rows of AHEAD_FIRST are a zero, and a one lies behind it. before: address and bytes from lane to
    lane of memory for what followed the row that ended each lane's last trajectory. finals: 1 for columns that have
    final steps. once, once_sources: columns per trajectory, and address and bytes from lane to lane of their values.
    kinds: of the rows. over: 1 where the last row of a lane ended its trajectory. out: output: slot of the trajectory
    that each lane has ended last. priorities: float32. scratch: memory.
    """
    return {
        "columns": (columns, 4),
        "sources": (columns, 3),
        "following": (columns, 3),
        "before": (columns, 2),
        "finals": (columns,),
        "once": (once, 4),
        "once_sources": (once, 2),
        "kinds": (rows, lanes),
        "over": (lanes,),
        "out": (lanes,),
        "priorities": ((lanes + 1) // 2,),
        "scratch": (3 + (overlap + 3) // 2 + 3 * TOGETHER,),
    }


@njit(inline="always")  # type: ignore[untyped-decorator]
def write_ahead(p: Any, lanes: Any, request: Any) -> None:
    """`write_rows` of a request, unless its rows are to be visible at once."""
    n, width, end = request[AHEAD_LANES], request[AHEAD_COLUMNS], request[AHEAD_END]
    if request[AHEAD_AT_ONCE] + request[AHEAD_PUBLISHES] + request[AHEAD_AT] != 0 or end != n:
        return
    columns = request.ctypes.data + 8 * AHEAD_HEAD
    sources = columns + 32 * width
    following = sources + 24 * width
    finals = following + 24 * width + 16 * width
    kinds = finals + 8 * width + 48 * request[AHEAD_ONCE]
    scratch = request.ctypes.data + 8 * (len(request) - 3 * TOGETHER)
    cut = request[AHEAD_CUT] + (request[AHEAD_STATE] == READY)  # the next row sees that it is reached
    write_rows(
        p.ctypes.data,
        lanes.ctypes.data,
        n,
        width,
        columns,
        sources,
        following,
        finals,
        kinds,
        cut,
        ENDS | GOES_ON,
        request[AHEAD_STATE],
        scratch,
    )


@inlined
def append_lanes(v: Any, lanes: Any, request: Any, now: Any, evict: Any) -> Any:
    """Append rows to the growing trajectories of lanes, whose final steps are the values that follow.

    A row goes on with its lane's trajectory if it has the values that are its final step. Else, and where that
    trajectory is not in memory any longer, it begins another one; so does a row of the same episode after AHEAD_CUT
    steps, with copies of the last AHEAD_OVERLAP. Rows that `write_rows` has written before become
    visible with the lane's row, or by AHEAD_PUBLISHES. If the trajectory is evicted before, they go with it.

    The kind of a row that has been appended is 0 then: no second call appends it.

    Args:
        lanes: int64 [n, LANE_WIDTH]; LANE_STEPS counts rows that are not visible yet too. request: see above.
        now, evict: as for `commit` and `begin`.

    Returns:
        DONE; or why AHEAD_AT was not appended, as `reserve_lanes`.
    """
    if not is_ready(v):
        return UNREADY
    n, width, rows, count = (
        request[AHEAD_LANES],
        request[AHEAD_COLUMNS],
        request[AHEAD_ROWS],
        request[AHEAD_ONCE],
    )
    a = AHEAD_HEAD
    b = a + 4 * width
    columns = request[a:b].reshape((width, 4))
    a, b = b, b + 3 * width
    sources = request[a:b].reshape((width, 3))
    a, b = b, b + 3 * width
    following = request[a:b].reshape((width, 3))
    a, b = b, b + 2 * width
    before = request[a:b].reshape((width, 2))
    a, b = b, b + width
    finals = request[a:b]
    a, b = b, b + 4 * count
    once = request[a:b].reshape((count, 4))
    a, b = b, b + 2 * count
    once_sources = request[a:b].reshape((count, 2))
    a, b = b, b + rows * n
    kinds = request[a:b]
    a, b = b, b + n
    over = request[a:b]
    a, b = b, b + n
    out = request[a:b]
    a, b = b, b + (n + 1) // 2
    priorities = request[a:b].view(np.float32)
    one, final, slots = request[b : b + 1], request[b + 1 : b + 2], request[b + 2 : b + 3]
    state, first, overlap = request[AHEAD_STATE], request[AHEAD_FIRST], request[AHEAD_OVERLAP]
    ids = request[b + 3 : b + 3 + (overlap + 3) // 2].view(np.int32)
    final[0] = 1
    cut, reward = request[AHEAD_CUT], request[AHEAD_REWARD]
    # Whether a trajectory of AHEAD_CUT steps stays that of its lane, whose next row begins another one.
    stays = state == READY and (first >= 0 or request[AHEAD_AT_ONCE] == 0)
    pid, process_start, publishes = request[AHEAD_PID], request[AHEAD_START], request[AHEAD_PUBLISHES] != 0
    item, end = request[AHEAD_AT], request[AHEAD_END]
    k, i = item // n, item % n
    while item < end:
        if kinds[item] == 0 and not publishes:
            item += 1
            i += 1
            if i == n:
                i = 0
                k += 1
            continue
        request[AHEAD_AT] = item
        lane, kind, ends = lanes[i], kinds[item] & 3, kinds[item] & ENDS != 0
        steps, slot, hidden, visible = lane[LANE_STEPS], lane[LANE_SLOT], 0, 0
        place, inside, block, goes_on = 0, 0, 0, False
        if steps > 0 and (publishes or kind != 0):
            gone = v.state[slot] != state or v.generation[slot] != lane[LANE_GENERATION]
            if gone or v.extent[slot, 1] < 0 or v.extent[slot, 2] == 0:
                clear_lane(lane, slot)
                steps = 0
            else:
                hidden = steps - v.extent[slot, 0]
                place = steps // v.block_steps
                inside = steps - place * v.block_steps
                block = int(v.block_ids[v.extent[slot, 1] + place])
                require(hidden >= 0 and block >= 0 and block < v.num_blocks)
        if publishes:
            kind = 0
            visible = hidden
        if kind != 0 and over[i] != 0:
            over[i] = 0
            if kind == UNLESS_RESET and not ends:
                same = is_zero(row_of(sources, reward, i, k), columns[reward, 2])
                for c in range(width):
                    if same and finals[c] == 1:
                        known = before[c, 0] + i * before[c, 1]
                        same = not differ_step(known, row_of(sources, c, i, k), columns[c, 2])
                if same:
                    kind = 0
        if kind != 0 and steps > 0:
            same = True
            for c in range(width):
                if same and finals[c] == 1 and kinds[item] & GOES_ON == 0:
                    known = place_of(columns, c, block, inside)
                    same = not differ_step(known, row_of(sources, c, i, k), columns[c, 2])
            goes_on = same and steps >= cut
            visible = hidden + (same and not goes_on)
        if visible > 0:
            answer = lengthen(v, slot, lane[LANE_GENERATION], state, visible, 1, evict, lane[LANE_RUN:])
            if answer == GONE:
                clear_lane(lane, slot)
                continue
            if answer != DONE:
                return answer
            if visible > hidden:
                place = (steps + 1) // v.block_steps
                after = int(v.block_ids[v.extent[slot, 1] + place])
                require(after >= 0 and after < v.num_blocks)
                inside_after = steps + 1 - place * v.block_steps
                known = kinds[item] & GOES_ON == 0
                put_row(columns, sources, following, finals, i, k, block, inside, after, inside_after, known)
                lane[LANE_STEPS] = steps + 1
            publish_steps(v, slot, visible, 1)
        if kind != 0 and visible == hidden:
            # Another trajectory begins.
            if steps > 0 and not goes_on:
                if state == WRITING:
                    slots[0] = slot
                    commit(v, slots, priorities[i : i + 1], now)
                clear_lane(lane, -1)
            goes_on = goes_on or lane[LANE_LAST] >= 0  # with the episode
            common = overlap if steps > 0 and goes_on else 0
            one[0] = common + 1
            answer = begin(v, one, final, evict, pid, process_start, slots, ids)
            if answer != DONE:
                return answer
            if common > 0:
                gone = v.state[slot] != READY or v.generation[slot] != lane[LANE_GENERATION]
                if gone or v.extent[slot, 1] < 0:  # `begin` has evicted it
                    abort(v, slots)
                    clear_lane(lane, slot)
                    continue
                # Its machine code is linked into the cached code of this file: a change of it needs a change here.
                copy_common(
                    columns, v.block_steps, v.block_ids[v.extent[slot, 1] :], steps - common, ids, common
                )
            slot = slots[0]
            start = v.extent[slot, 1]
            place = common // v.block_steps
            inside = common - place * v.block_steps
            block = int(v.block_ids[start + place])
            place = (common + 1) // v.block_steps
            after = int(v.block_ids[start + place])
            inside_after = common + 1 - place * v.block_steps
            put_row(columns, sources, following, finals, i, k, block, inside, after, inside_after, False)
            if first >= 0 and not goes_on:
                put_step(place_of(columns, first, block, inside), sources[first, 0] + 1, 1)
            for c in range(count):
                put_step(place_of(once, c, block, 0), once_sources[c, 0] + i * once_sources[c, 1], once[c, 2])
            if state == READY:
                commit(v, slots, priorities[i : i + 1], now)
            clear_lane(lane, -1)
            lane[LANE_SLOT], lane[LANE_GENERATION] = slot, v.generation[slot]
            lane[LANE_STEPS] = common + 1
        if kind != 0:
            if ends:
                over[i] = 1
                for c in range(width):
                    if finals[c] == 1:
                        put_step(before[c, 0] + i * before[c, 1], row_of(following, c, i, k), columns[c, 2])
            if ends or lane[LANE_STEPS] == cut:
                out[i] = slot
                if state == WRITING:
                    slots[0] = slot
                    commit(v, slots, priorities[i : i + 1], now)
                if ends or not stays:
                    clear_lane(lane, -1)
        if not publishes:
            kinds[item] = 0  # also if an interruption hides that the call is done
        item += 1
        i += 1
        if i == n:
            i = 0
            k += 1
    request[AHEAD_AT] = 0
    return DONE


@inlined
def put_row(
    columns: Any,
    sources: Any,
    following: Any,
    finals: Any,
    i: Any,
    k: Any,
    block: Any,
    inside: Any,
    after: Any,
    inside_after: Any,
    known: Any,
) -> None:
    """Copy row `k` of lane `i` into a block, and what follows it into the step after; `known`: what has final steps is
    there already."""
    for c in range(len(columns)):
        size = columns[c, 2]
        if finals[c] == 1:
            put_step(place_of(columns, c, after, inside_after), row_of(following, c, i, k), size)
        if finals[c] != 1 or not known:
            put_step(place_of(columns, c, block, inside), row_of(sources, c, i, k), size)
