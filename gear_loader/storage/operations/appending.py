"""Rows of n growing trajectories, with the values that follow each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.native.compile import inlined
from gear_loader.native.copying import continues, copy_final, copy_run, copy_steps, holds, is_zero
from gear_loader.native.lanes import LANE_GENERATION, LANE_RUN, LANE_SLOT, LANE_STEPS
from gear_loader.storage.operations.growth import clear_lane, is_ready, lengthen, publish_steps
from gear_loader.storage.operations.lifecycle import commit
from gear_loader.storage.operations.room import begin
from gear_loader.storage.operations.view import DONE, GONE, UNREADY, blocks_of, require
from gear_loader.storage.states import READY

# Compiled into the cached machine code.
assert (LANE_SLOT, LANE_GENERATION, LANE_STEPS, LANE_RUN) == (0, 1, 2, 5)

UNLESS_RESET = 2
"""Of `active`, see `append_lanes`."""


@inlined
def append_lanes(
    v: Any,
    lanes: Any,
    chosen: Any,
    at: Any,
    columns: Any,
    sources: Any,
    following: Any,
    finals: Any,
    once_columns: Any,
    once_sources: Any,
    active: Any,
    done: Any,
    over: Any,
    cut: Any,
    reward: Any,
    priorities: Any,
    out: Any,
    now: Any,
    evict: Any,
    pid: Any,
    process_start: Any,
) -> Any:
    """Append rows to the growing trajectories of lanes, whose final steps are the values that follow.

    A row goes on with its lane's trajectory if it has the values that followed the row before. Else, and where that
    trajectory is not in memory any longer, it begins another one.

    Args:
        at: int64 [2], place in `chosen` of the next lane, and its next row. lanes, chosen: as for `reserve_lanes`.
        columns: as for `gear_loader.native.copying.scatter`. sources: as for `gear_loader.native.copying.copy_run`.
        following: the same, of the values after each row. finals: int64 [C], 1 for columns that have final steps.
        once_columns, once_sources: int64 [O, 4] and [O, 2], as for `copy_steps`: values per trajectory.
        active: uint8 [K, n], whether a row counts: 0, 1, or UNLESS_RESET. The latter does not after one that is done if
            it repeats what followed that one, has zeros in the column `reward`, and is not done itself.
        done: bool [K, n], rows that end their trajectories. over: bool [n], whether the last row of a lane was done.
            Updated.
        cut: steps of a trajectory at which it ends, or -1. reward: the column's number.
        priorities: float32 [n]. out: int64 [n], output: slot of the trajectory that each lane has ended last.
        now, evict, pid, process_start: as for `begin` and `commit`.

    Returns:
        DONE; or why the next row was not appended, as `reserve_lanes`.
    """
    if not is_ready(v):
        return UNREADY
    rows = len(done)
    one, final, slots = np.empty(1, np.int64), np.empty(1, np.int64), np.empty(1, np.int64)
    final[0] = 1
    ids = np.empty(blocks_of(v, rows + 1), np.int32)
    for j in range(at[0], len(chosen)):
        at[0] = j
        i = chosen[j]
        lane = lanes[i]
        while at[1] < rows:
            k = at[1]
            if active[k, i] == 0:
                at[1] += 1
                continue
            if over[i]:
                over[i] = False
                if (
                    active[k, i] == UNLESS_RESET
                    and not done[k, i]
                    and continues(columns, following, sources, i, k, finals)
                ):
                    place = sources[reward, 0] + i * sources[reward, 1] + k * sources[reward, 2]
                    if is_zero(place, columns[reward, 2]):
                        at[1] += 1
                        continue
            steps = lane[LANE_STEPS]
            if steps > 0 and not goes_on(v, lane, columns, sources, i, k, finals):
                clear_lane(lane, -1)
                steps = 0
            most = rows - k if cut < 0 else min(cut - steps, rows - k)
            count = 1
            while (
                count < most
                and not done[k + count - 1, i]
                and active[k + count, i] != 0
                and continues(columns, following, sources, i, k + count, finals)
            ):
                count += 1
            if steps > 0:
                slot = lane[LANE_SLOT]
                answer = lengthen(v, slot, lane[LANE_GENERATION], count, 1, evict, lane[LANE_RUN:])
                if answer == GONE:
                    clear_lane(lane, -1)
                    continue
            else:
                one[0] = count
                answer = begin(v, one, final, evict, pid, process_start, slots, ids)
                slot = slots[0]
            if answer != DONE:
                return answer
            put_run(v, slot, steps, columns, sources, following, i, k, count, finals)
            if steps > 0:
                publish_steps(v, slot, count, 1)
            else:
                if len(once_columns):
                    block = np.int64(v.block_ids[v.extent[slot, 1]])
                    copy_steps(once_columns, block, 0, once_sources, i, 0, 1)
                commit(v, slots, priorities[i : i + 1], now)
                lane[LANE_SLOT], lane[LANE_GENERATION] = slot, v.generation[slot]
            lane[LANE_STEPS] = steps + count
            at[1] = k + count
            over[i] = done[k + count - 1, i]
            if over[i] or lane[LANE_STEPS] == cut:
                out[i] = slot
                clear_lane(lane, -1)
        at[1] = 0
    at[0] = len(chosen)
    return DONE


@inlined
def goes_on(v: Any, lane: Any, columns: Any, sources: Any, i: Any, row: Any, finals: Any) -> Any:
    """Whether a lane's trajectory is in memory, and its final step has the values of a row.

    So the row can be written where the final step is: who knows the length before reads the same bytes.
    """
    slot = lane[LANE_SLOT]
    if v.state[slot] != READY or v.generation[slot] != lane[LANE_GENERATION]:
        return False
    length, start = v.extent[slot, 0], v.extent[slot, 1]
    if start < 0 or v.extent[slot, 2] == 0:
        return False
    place = length // v.block_steps
    block = np.int64(v.block_ids[start + place])
    require(block >= 0 and block < v.num_blocks)
    return holds(columns, block, length - place * v.block_steps, sources, i, row, finals)


@inlined
def put_run(
    v: Any,
    slot: Any,
    steps: Any,
    columns: Any,
    sources: Any,
    following: Any,
    i: Any,
    row: Any,
    count: Any,
    finals: Any,
) -> None:
    """Copy rows of lane `i` behind the `steps` steps of a trajectory that has room, and the values after the last."""
    done = 0
    while done <= count:
        place = (steps + done) // v.block_steps
        inside = steps + done - place * v.block_steps
        block = np.int64(v.block_ids[v.extent[slot, 1] + place])
        require(block >= 0 and block < v.num_blocks)
        if done == count:
            copy_final(columns, block, inside, following, i, row + count - 1, finals)
            return
        taken = min(v.block_steps - inside, count - done)
        copy_run(columns, block, inside, sources, i, row + done, taken)
        done += taken
