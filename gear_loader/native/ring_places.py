"""The compiled loops of a ring whose transitions lie in growing trajectories of a table."""

from __future__ import annotations

import numpy as np

from gear_loader.native.compile import compiled
from gear_loader.native.lanes import LANE_GENERATION, LANE_SLOT, LANE_STEPS

assert (LANE_SLOT, LANE_GENERATION, LANE_STEPS) == (0, 1, 2)  # compiled into the cached machine code


@compiled
def note(lanes, out, before, extent, generation, places, row) -> None:  # type: ignore[no-untyped-def]
    """Note where a row of n lanes lies that `append_lanes` has appended.

    Args:
        lanes, out: of `append_lanes`, int64 [n, LANE_WIDTH] and [n].
        before: int64 [n, 2], slot and generation of each lane's trajectory after the row before, -1 for none; updated.
        extent, generation: of the table's index: int64 [slots, 3] and [slots].
        places: int32 [rows, n, 3], output: `row` of it gets slot, step and generation (lower half) of each lane.
    """
    for e in range(len(lanes)):
        slot, step, version = lanes[e, LANE_SLOT], lanes[e, LANE_STEPS] - 1, lanes[e, LANE_GENERATION]
        if slot < 0:  # it has ended with this row
            slot = out[e]
            version = before[e, 1] if before[e, 0] == slot else generation[slot]
            step = extent[slot, 0] - 1
            before[e, 0] = -1
        else:
            before[e, 0], before[e, 1] = slot, version
        places[row, e, 0], places[row, e, 1], places[row, e, 2] = slot, step, np.int32(version)


@compiled
def first_live(places, first, added, state, ready, generation):  # type: ignore[no-untyped-def]
    """The first row, from `first` up to `added`, of which all trajectories are in the table.

    places: of `note`; row r is ``places[r % len(places)]``. state, generation: of the table's index; `ready`: a state.
    """
    while first < added:
        row = first % len(places)
        live = True
        for e in range(places.shape[1]):
            slot = places[row, e, 0]
            live &= state[slot] == ready and np.int32(generation[slot]) == places[row, e, 2]
        if live:
            break
        first += 1
    return first


@compiled
def look_up(places, rows, members, slots, steps) -> None:  # type: ignore[no-untyped-def]
    """Slots and steps (int64 [n], outputs) at entries (rows, members) (int64 [n] each) of `note`'s places."""
    for i in range(len(rows)):
        slots[i], steps[i] = places[rows[i], members[i], 0], places[rows[i], members[i], 1]
