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
that follow one another: sizes and
owners are written when nobody refers to what they change.
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
def is_used(v: Any, heap: Any, at: Any, kept: Any) -> Any:
    """Whether a trajectory has the extent that begins at byte `at`; kept: see `take_payload`."""
    if is_own(v, heap, at):
        return True
    slot = heap[at // 8 + SLOT]
    if slot < 0 or len(kept) == 0:
        return False
    leader = heap[at // 8 + GENERATION] * v.num_slots + slot
    place = np.searchsorted(kept, leader)
    return place < len(kept) and kept[place] == leader


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
def keep(heap: Any, gap: Any, at: Any, slot: Any, generation: Any) -> None:
    """Give the bytes of a gap up to byte `at` to a slot."""
    used, size = (at + GRAIN - 1) // GRAIN * GRAIN - gap, heap[gap // 8 + SIZE]
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
def give_back(v: Any, heap: Any, slots: Any) -> None:
    """Make gaps of the extents of trajectories that are being written."""
    mine = np.zeros(v.num_slots, dtype=np.bool_)
    for i in range(len(slots)):
        mine[slots[i]] = True
    at, end = FIRST, len(heap) * 8
    while at < end:
        size = extent_size(heap, at)
        if is_own(v, heap, at) and mine[heap[at // 8 + SLOT]]:
            heap[at // 8 + SLOT] = -1
        at += size


@inlined
def forget_payload(v: Any, heap: Any, slots: Any) -> None:
    """Make gaps of what trajectories on disk had in memory: they come back, with extents of their own."""
    mine = np.zeros(v.num_slots, dtype=np.bool_)
    for i in range(len(slots)):
        mine[slots[i]] = True
    at, end = FIRST, len(heap) * 8
    while heap[CURSOR] != 0 and at < end:
        slot = heap[at // 8 + SLOT]
        if slot >= 0 and not is_own(v, heap, at) and mine[slot]:
            heap[at // 8 + SLOT] = -1
        at += extent_size(heap, at)


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
    v: Any, heap: Any, slots: Any, generations: Any, runs: Any, sizes: Any, kept: Any, offsets: Any
) -> Any:
    """Find places for all values of trajectories that are being written, or for none.

    Whoever waits for room so holds none that others wait for, and no gaps are left between its own values.

    Values of a run lie one after another, as far as a gap reaches, and a run begins at a multiple of 16 bytes.

    Args:
        heap: int64, see the module. slots, generations: int64 [n], in state WRITING.
        runs: int64 [R, 3], ascending: number of the trajectory, and first and end of its values in `sizes`.
        sizes: int64 [V], bytes.
        kept: int64 [K], of `prefixes.kept_leaders`.
        offsets: int64 [V], output: first byte of each, 0 of empty ones; negative: of the first extent of a split one.

    Returns:
        DONE, or SHORT if the gaps are too small.
    """
    reclaim(v)
    if heap[CURSOR] == 0:
        heap[FIRST // 8 + SIZE] = len(heap) * 8 - FIRST
        heap[FIRST // 8 + SLOT] = -1
        fence()
        heap[CURSOR] = FIRST
    gap, at, limit, owner = -1, 0, 0, -1
    for r in range(len(runs)):
        if gap >= 0 and runs[r, TRAJECTORY] != owner:
            keep(heap, gap, at, slots[owner], generations[owner])
            gap = -1
        owner = runs[r, TRAJECTORY]
        at = (at + GRAIN - 1) // GRAIN * GRAIN
        for i in range(runs[r, BEGIN], runs[r, END]):
            size = sizes[i]
            require(size >= 0)
            offsets[i] = 0
            if size > 0 and (gap < 0 or at + size > limit):
                if gap >= 0:
                    keep(heap, gap, at, slots[owner], generations[owner])
                gap = find_gap(v, heap, HEADER + (size + GRAIN - 1) // GRAIN * GRAIN, kept)
                if gap <= 0 and -gap < size:
                    if i > 0:
                        give_back(v, heap, slots)
                    return SHORT
                if gap <= 0:
                    gap = -1
                    offsets[i] = -split_value(v, heap, size, slots[owner], generations[owner], kept)
                    continue
                at, limit = gap + HEADER, gap + extent_size(heap, gap)
            if size > 0:
                offsets[i] = at
                at += size
    if gap >= 0:
        keep(heap, gap, at, slots[owner], generations[owner])
    return DONE
