"""One row for each of n growing trajectories, with the values that follow it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.kernels.special_priorities import UNSET
from gear_loader.native.compile import inlined
from gear_loader.native.copying import copy_some
from gear_loader.native.lanes import LANE_GENERATION, LANE_SLOT, LANE_STEPS, LANE_WIDTH
from gear_loader.storage.operations.growth import clear_lane, grow_lane, is_ready
from gear_loader.storage.operations.lifecycle import commit
from gear_loader.storage.operations.room import begin
from gear_loader.storage.operations.view import DONE, GONE, UNREADY

# Compiled into the cached machine code.
assert (LANE_SLOT, LANE_GENERATION, LANE_STEPS, LANE_WIDTH, UNSET) == (0, 1, 2, 8, -1)

# Request to `append_lanes`, int64: this head, then of n environments and C columns: columns [C, 4], as for
# `gear_loader.native.copying.scatter`; sources [C, 2] and following [C, 2], as for `copy_steps`; finals [C], 1 for
# columns that have final steps; lanes [n, LANE_WIDTH]; out [n], the slot that each lane has ended, else unchanged; and
# as bytes the masks active [n] and done [n]. Of the head: n, C; steps at which a trajectory ends, or -1; the lane that
# is next (input and output); ended lanes (output); the rest as for `begin` and `commit`.
(
    GROW_COUNT,
    GROW_COLUMNS,
    GROW_CUT,
    GROW_AT,
    GROW_ENDED,
    GROW_NOW,
    GROW_PID,
    GROW_START,
    GROW_HEAD,
) = range(9)


@inlined
def append_lanes(v: Any, request: Any, evict: Any) -> Any:
    """`grow_lane` for each active lane; one without a trajectory, or whose row does not go on, begins one.

    Args:
        request: int64, as described above. evict: as for `begin`.

    Returns:
        DONE; or why the lane at GROW_AT was not appended to, as `reserve_lanes`, or OUTSIDE.
    """
    if not is_ready(v):
        return UNREADY
    n, width = request[GROW_COUNT], request[GROW_COLUMNS]
    at = GROW_HEAD
    columns = request[at : at + 4 * width].reshape((width, 4))
    at += 4 * width
    sources = request[at : at + 2 * width].reshape((width, 2))
    at += 2 * width
    following = request[at : at + 2 * width].reshape((width, 2))
    at += 2 * width
    finals = request[at : at + width]
    at += width
    lanes = request[at : at + LANE_WIDTH * n].reshape((n, LANE_WIDTH))
    at += LANE_WIDTH * n
    out = request[at : at + n]
    masks = request[at + n :].view(np.uint8)
    for i in range(request[GROW_AT], n):
        request[GROW_AT] = i
        if masks[i] == 0:
            continue
        lane, answer = lanes[i], GONE
        if lane[LANE_STEPS] > 0:
            answer = grow_lane(v, lane, i, columns, sources, following, finals, 0, 1, 0, evict)
            if answer == GONE:
                clear_lane(lane, -1)
        if answer == GONE:
            answer = begin_lane(v, lane, i, columns, sources, following, finals, request, evict)
        if answer != DONE:
            return answer
        if masks[n + i] != 0 or lane[LANE_STEPS] == request[GROW_CUT]:
            out[i] = lane[LANE_SLOT]
            clear_lane(lane, -1)
            request[GROW_ENDED] += masks[n + i] != 0
    request[GROW_AT] = n
    return DONE


@inlined
def begin_lane(
    v: Any,
    lane: Any,
    i: Any,
    columns: Any,
    sources: Any,
    following: Any,
    finals: Any,
    request: Any,
    evict: Any,
) -> Any:
    """`begin`, copy and `commit` a trajectory of one step and a final one for lane `i`; as `append_lanes`."""
    one, slots, ids = np.ones(1, np.int64), np.empty(1, np.int64), np.empty(2, np.int32)
    answer = begin(v, one, one, evict, request[GROW_PID], request[GROW_START], slots, ids)
    if answer != DONE:
        return answer
    block, place = np.int64(ids[0]), 1 // v.block_steps
    # Its machine code is linked into the cached code of this file: a change of it needs a change here.
    copy_some(columns, block, 0, sources, i, finals, 0)
    copy_some(columns, block, 0, sources, i, finals, 1)
    copy_some(columns, np.int64(ids[place]), 1 - place * v.block_steps, following, i, finals, 1)
    commit(v, slots, np.full(1, UNSET, np.float32), request[GROW_NOW])
    lane[LANE_SLOT], lane[LANE_GENERATION], lane[LANE_STEPS] = slots[0], v.generation[slots[0]], 1
    return DONE
