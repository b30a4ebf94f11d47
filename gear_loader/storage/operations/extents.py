"""Memory of ragged values: extents of any size, each of which belongs to the slot of a trajectory.

::

    byte 0        cursor   int64, where the search for a gap goes on; 0 before the first use; then unused up to 64
    byte 64       extents, one after another up to the end, each of a multiple of 16 bytes:
                  size, slot, generation, next   int64; then the values

A value that no gap can hold is split: it has extents of its own, of which each names the next.
An extent is in use as long as its slot has that generation and is not FREE, and its trajectory does not lie on disk
only, or blocks are still parked for readers; or other slots have it as their leader (see `prefixes.py`). Else it is a
gap. So nothing here changes when trajectories are evicted, aborted, spilled or recovered, and readers keep values as
they keep blocks. The cursor is always the beginning of an extent, or the end. A process that is killed leaves extents
that follow one another: sizes and owners are written when nobody refers to what they change.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.native.compile import inlined
from gear_loader.storage.counters import COMING_BACK, NUM_PARKED
from gear_loader.storage.operations.lifecycle import reclaim
from gear_loader.storage.operations.view import DONE, SHORT, fence, require
from gear_loader.storage.states import FREE, WRITING

CURSOR = 0
FIRST, HEADER, GRAIN = 64, 32, 16  # bytes
LEAST = 512  # bytes of the smallest gap that a part of a value goes into
SIZE, SLOT, GENERATION, NEXT = range(4)  # words of an extent's header
TRAJECTORY, BEGIN, END = range(3)  # columns of `runs`
SPOT_SLOT, SPOT_GENERATION, SPOT_EXTENT, SPOT_AT, SPOT_END, SPOT_TAKEN, SPOT_WIDTH = range(7)
"""Where the next values of a trajectory go: its slot and generation; its last extent, the byte behind its values, and
the end of that extent, or three zeros; bytes that it has taken."""


@inlined
def extent_size(heap: Any, at: Any) -> Any:
    """Bytes of the extent that begins at byte `at`."""
    size = heap[at // 8 + SIZE]
    require(size >= HEADER and size % GRAIN == 0 and size <= len(heap) * 8 - at)
    return size


@inlined
def is_own(v: Any, heap: Any, at: Any) -> Any:
    """Whether the slot of the extent that begins at byte `at` has the trajectory that it was stored with."""
    slot = heap[at // 8 + SLOT]
    require(slot < v.num_slots)
    if slot < 0 or v.state[slot] == FREE or v.generation[slot] != heap[at // 8 + GENERATION]:
        return False
    inside = v.extent[slot, 1] >= 0 or v.state[slot] == WRITING
    return inside or v.counters[NUM_PARKED] != 0 or v.counters[COMING_BACK] == slot + 1


@inlined
def is_among(v: Any, heap: Any, at: Any, keys: Any) -> Any:
    """Whether the extent that begins at byte `at` was stored with one of `keys`, int64 [m], see `take_payload`."""
    slot = heap[at // 8 + SLOT]
    if slot < 0 or len(keys) == 0:
        return False
    key = heap[at // 8 + GENERATION] * v.num_slots + slot
    place = np.searchsorted(keys, key)
    return place < len(keys) and keys[place] == key


@inlined
def is_used(v: Any, heap: Any, at: Any, kept: Any) -> Any:
    """Whether a trajectory has the extent that begins at byte `at`; kept: see `take_payload`."""
    return is_own(v, heap, at) or is_among(v, heap, at, kept)


@inlined
def find_gap(v: Any, heap: Any, need: Any, kept: Any) -> Any:
    """Where the next gap of at least `need` bytes begins, from the cursor on.

    Gaps that follow one another are joined on the way.

    Returns:
        Its place; if there is none, the negative number of bytes of values that can be split over gaps.
    """
    split, head = 0, 0  # head: of the gap at the cursor, which one at the end of the search may take in
    end, start = len(heap) * 8, heap[CURSOR]
    require(start >= FIRST and start <= end and start % GRAIN == 0)
    at, wrapped = start, False
    while not (wrapped and at >= start):
        if at == end:
            at, wrapped = FIRST, True
            continue
        size = extent_size(heap, at)
        following = at + size
        if is_used(v, heap, at, kept):
            at = following
            continue
        while following < end and not is_used(v, heap, following, kept):
            if following == heap[CURSOR]:
                heap[CURSOR] = at
                fence()
                split -= head
            size += extent_size(heap, following)
            heap[at // 8 + SIZE] = size
            following = at + size
        if size >= need:
            return at
        if size >= LEAST:
            split += size - HEADER
            head = size - HEADER if at == start else head
        at = following
    return -split


@inlined
def keep(heap: Any, gap: Any, end: Any, slot: Any, generation: Any) -> None:
    """Give the bytes of a gap up to byte `end` to a slot."""
    used, size = (end + GRAIN - 1) // GRAIN * GRAIN - gap, heap[gap // 8 + SIZE]
    require(used <= size)
    if size - used >= HEADER:
        rest = (gap + used) // 8
        heap[rest + SIZE] = size - used
        heap[rest + SLOT] = -1
    else:
        used = size
    fence()
    heap[gap // 8 + SLOT] = -1
    fence()
    heap[gap // 8 + SIZE] = used
    fence()
    heap[gap // 8 + GENERATION] = generation
    fence()
    heap[gap // 8 + SLOT] = slot
    heap[CURSOR] = gap + used


@inlined
def trim(heap: Any, extent: Any, end: Any) -> None:
    """Make a gap of what lies behind byte `end` of an extent."""
    size = extent_size(heap, extent)
    used = (end + GRAIN - 1) // GRAIN * GRAIN - extent
    require(used >= HEADER and used <= size)
    if size - used < HEADER:
        return
    rest = extent + used
    heap[rest // 8 + SIZE] = size - used
    heap[rest // 8 + SLOT] = -1
    fence()
    heap[extent // 8 + SIZE] = used
    if heap[CURSOR] == extent + size:
        fence()
        heap[CURSOR] = rest


@inlined
def split_value(v: Any, heap: Any, size: Any, slot: Any, generation: Any, kept: Any) -> Any:
    """Give gaps that can together hold a value of `size` bytes to a slot; return where the first of them begins."""
    first, last = -1, -1
    while size > 0:
        gap = find_gap(v, heap, LEAST, kept)
        require(gap > 0)
        part = min(size, extent_size(heap, gap) - HEADER)
        keep(heap, gap, gap + HEADER + part, slot, generation)
        if last < 0:
            first = gap
        else:
            heap[last // 8 + NEXT] = gap
        last = gap
        size -= part
    return first


@inlined
def give_back(heap: Any, count: Any, sizes: Any, offsets: Any, begins: Any) -> None:
    """Make gaps of the extents that the first `count` values have got."""
    for i in range(count):
        if begins[i] > 0:
            heap[begins[i] // 8 + SLOT] = -1
        at, left = -offsets[i], sizes[i]
        while at > 0 and left > 0:
            require(at <= len(heap) * 8 - HEADER and at % GRAIN == 0)
            left -= extent_size(heap, at) - HEADER
            heap[at // 8 + SLOT] = -1
            at = heap[at // 8 + NEXT]


@inlined
def put_back(heap: Any, chosen: Any, before: Any, slots: Any, generations: Any, spots: Any) -> None:
    """Make the spots of trajectories (`chosen`, int64 [m]) those of `before`, whose extents may have been trimmed."""
    for k in chosen:
        spots[k], extent = before[k], before[k, SPOT_EXTENT]
        same = before[k, SPOT_SLOT] == slots[k] and before[k, SPOT_GENERATION] == generations[k]
        if same and extent > 0:
            spots[k, SPOT_END] = extent + extent_size(heap, extent)


@inlined
def forget_payload(v: Any, heap: Any, keys: Any, kept: Any, places: Any) -> None:
    """Make gaps of what trajectories on disk had in memory, unless others have it: they come back with extents anew.

    Args:
        keys: int64 [m], ascending, of what the extents were stored with; see `prefixes.keys_of`.
        kept: as of `take_payload`, of those whose extents all stay.
        places: int64 [p], ascending, bytes in the other extents that stay.
    """
    at, end = FIRST, len(heap) * 8
    while heap[CURSOR] != 0 and at < end:
        size = extent_size(heap, at)
        named = np.searchsorted(places, at) < np.searchsorted(places, at + size)
        if is_among(v, heap, at, keys) and not named and not is_used(v, heap, at, kept):
            heap[at // 8 + SLOT] = -1
        at += size


@inlined
def measure_payload(v: Any, heap: Any, kept: Any, used: Any) -> None:
    """Add the bytes of the extents of each slot, with their headers, to `used`, int64 [slots]; kept: see `is_used`."""
    at, end = FIRST, len(heap) * 8
    while heap[CURSOR] != 0 and at < end:
        size = extent_size(heap, at)
        if is_used(v, heap, at, kept):
            used[heap[at // 8 + SLOT]] += size
        at += size


@inlined
def take_payload(
    v: Any,
    heap: Any,
    slots: Any,
    generations: Any,
    runs: Any,
    sizes: Any,
    kept: Any,
    offsets: Any,
    spots: Any,
    ahead: Any,
) -> Any:
    """Find places for all values of trajectories, which are not FREE, or for none.

    Whoever waits for room so holds none that others wait for, and no gaps are left between its own values.

    Values of a run lie one after another, as far as a gap reaches, and a run begins at a multiple of 16 bytes.

    Args:
        heap: int64, see the module. slots, generations: int64 [n].
        runs: int64 [R, 3], ascending: number of the trajectory, and first and end of its values in `sizes`.
        sizes: int64 [V], bytes.
        kept: int64 [K], of `prefixes.kept_leaders`.
        offsets: int64 [V], output: first byte of each, 0 of empty ones; negative: of the first extent of a split one.
        spots: int64 [n, SPOT_WIDTH], where each trajectory's next values go; of others, and zeros: nowhere yet.
        ahead: most bytes that a trajectory keeps for those, no more than it has taken.

    Returns:
        DONE, or SHORT if the gaps are too small.
    """
    reclaim(v)
    if heap[CURSOR] == 0:
        heap[FIRST // 8 + SIZE] = len(heap) * 8 - FIRST
        heap[FIRST // 8 + SLOT] = -1
        fence()
        heap[CURSOR] = FIRST
    begins = np.zeros(len(sizes), dtype=np.int64)  # extents that were taken for a value and those behind it
    before, fresh = spots.copy(), 0  # fresh: the extent of the last spot, while it is a gap
    for r in range(len(runs)):
        owner = runs[r, TRAJECTORY]
        slot, generation, spot = slots[owner], generations[owner], spots[owner]
        if spot[SPOT_SLOT] != slot or spot[SPOT_GENERATION] != generation:
            spot[:] = 0
            spot[SPOT_SLOT], spot[SPOT_GENERATION] = slot, generation
        at = (spot[SPOT_AT] + GRAIN - 1) // GRAIN * GRAIN
        for i in range(runs[r, BEGIN], runs[r, END]):
            size = sizes[i]
            require(size >= 0)
            offsets[i] = 0
            if size > 0 and at + size > spot[SPOT_END]:
                if spot[SPOT_EXTENT] > 0:
                    if fresh > 0:
                        keep(heap, fresh, at, slot, generation)
                    else:
                        trim(heap, spot[SPOT_EXTENT], at)
                    fresh = 0
                    spot[SPOT_EXTENT] = spot[SPOT_AT] = spot[SPOT_END] = at = 0
                gap = find_gap(v, heap, HEADER + (size + GRAIN - 1) // GRAIN * GRAIN, kept)
                if gap <= 0 and -gap < size:
                    give_back(heap, i, sizes, offsets, begins)
                    put_back(heap, runs[: r + 1, TRAJECTORY], before, slots, generations, spots)
                    return SHORT
                spot[SPOT_TAKEN] += size
                if gap <= 0:
                    offsets[i] = -split_value(v, heap, size, slot, generation, kept)
                    continue
                begins[i] = spot[SPOT_EXTENT] = fresh = gap
                at, spot[SPOT_END] = gap + HEADER, gap + extent_size(heap, gap)
                spot[SPOT_TAKEN] -= size
            if size > 0:
                offsets[i] = at
                at += size
                spot[SPOT_TAKEN] += size
                spot[SPOT_AT] = at
        if spot[SPOT_EXTENT] > 0 and (r + 1 == len(runs) or runs[r + 1, TRAJECTORY] != owner):
            end = min(spot[SPOT_AT] + min(ahead, spot[SPOT_TAKEN]), spot[SPOT_END])
            if fresh > 0:
                keep(heap, fresh, end, slot, generation)
            else:
                trim(heap, spot[SPOT_EXTENT], end)
            fresh = 0
            spot[SPOT_END] = spot[SPOT_EXTENT] + extent_size(heap, spot[SPOT_EXTENT])
    return DONE


@inlined
def trim_payload(v: Any, heap: Any, spots: Any, chosen: Any) -> None:
    """Give back what trajectories (`chosen`, int64 [m]) keep for their next values."""
    for k in chosen:
        slot, extent = spots[k, SPOT_SLOT], spots[k, SPOT_EXTENT]
        if extent <= 0:
            continue
        require(slot >= 0 and slot < v.num_slots and extent % GRAIN == 0 and extent <= len(heap) * 8 - HEADER)
        if v.state[slot] != FREE and v.generation[slot] == spots[k, SPOT_GENERATION]:
            trim(heap, extent, spots[k, SPOT_AT])
        spots[k, SPOT_EXTENT] = spots[k, SPOT_AT] = spots[k, SPOT_END] = 0
