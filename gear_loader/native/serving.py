"""The compiled loop of a server: rows that a requester names are checked and gathered in one call."""

from __future__ import annotations

from numba import int64

from gear_loader.native.compile import compiled
from gear_loader.native.gathering import gather_windows


@compiled
def serve(  # type: ignore[no-untyped-def]
    columns, names, most, state, ready, generation, extent, block_ids, block_steps, out, status, gaps
) -> int:
    """Fill the data and the status of a reply. The caller holds the table's lock or a read ticket.

    Args:
        columns: int64 [C, WIDTH], as for `gathering.gather`, with addresses of `out`.
        names: int64 [3, n]: slots, anchors and generations, which are not validated.
        most: largest distance of an anchor from 0.
        state: [T] and `ready`: states of the slots, and that of a live one. generation: int64 [T].
        extent, block_ids, block_steps: the index, as for `gathering.gather`.
        out: uint8 [size], overwritten. status: offset of the status in it. gaps: int64 [G, 2], begin and end of ranges
            that are not filled otherwise.

    Returns:
        Number of invalid slots and blocks, 0 unless the index is corrupt; or -1 - b if anchor b is out of bounds.
    """
    slots, anchors = names[0], names[1]
    n = len(slots)
    for b in range(n):
        if anchors[b] < -most or anchors[b] > most:
            return int64(-1 - b)  # type: ignore[no-any-return]
    gone = 0
    for b in range(n):
        slot = slots[b]
        # In this order: a slot that is READY under a read ticket keeps its blocks and generation.
        served = slot >= 0 and slot < len(state) and state[slot] == ready and generation[slot] == names[2, b]
        out[status + b] = 0 if served else 1
        gone += not served
    if gone == 0:
        for i in range(len(gaps)):
            out[gaps[i, 0] : gaps[i, 1]] = 0
        bad = gather_windows(columns, slots, anchors, extent, block_ids, block_steps, 0, n, slots, False)
        return int64(bad)  # type: ignore[no-any-return]
    out[:status] = 0
    out[status + n :] = 0
    some, at, where = slots[gone:].copy(), anchors[gone:].copy(), anchors[gone:].copy()
    count = 0
    for b in range(n):
        if out[status + b] == 0:
            some[count], at[count], where[count] = slots[b], anchors[b], b
            count += 1
    bad = 0
    if count:
        bad = gather_windows(columns, some, at, extent, block_ids, block_steps, 0, count, where, True)
    return int64(bad)  # type: ignore[no-any-return]
