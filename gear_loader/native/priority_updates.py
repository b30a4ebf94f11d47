"""The compiled loops of priority updates on the CPU (numba): copies and checks, items of steps, live rows.

The callers have checked shapes and dtypes; slots, steps and generations may have any value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, int64, njit, uint64

from gear_loader.native.compile import compiled
from gear_loader.native.memory import pointer, prefetch
from gear_loader.native.sum_tree import weighed

READY = 2  # as in `gear_loader.storage.states`


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copied(address: Any, row: Any) -> None:
    if address == 0:
        row[:] = 0
    else:
        row[:] = carray(pointer(address), (len(row),), np.int64)


@compiled
def take(index, step, generation, priority, rows, priorities) -> int:  # type: ignore[no-untyped-def]
    """Copy a priority update, and look for an invalid priority: NaN, infinite or negative.

    Args:
        index, step, generation: addresses of int64 [n], n > 0, or 0 for zeros. priority: address of float32 [n].
        rows: int64 [3, n], priorities: float32 [n], output.

    Returns:
        Number of the first invalid priority, or -1.
    """
    _copied(index, rows[0])
    _copied(step, rows[1])
    _copied(generation, rows[2])
    values = carray(pointer(priority), (len(priorities),), np.float32)
    bad = -1
    for i in range(len(values)):
        value = values[i]
        priorities[i] = value
        if bad < 0 and not 0 <= value < np.inf:
            bad = i
    return bad


@compiled
def leaves_of(priorities, alpha, eps, leaves) -> int:  # type: ignore[no-untyped-def]
    """Weigh priorities (float32 [n]) into leaves (float32 [n], output).

    Returns:
        Number of the first priority whose leaf exceeds float32's range, or -1.
    """
    largest = np.float64(np.finfo(np.float32).max)
    for i in range(len(priorities)):
        leaf = weighed(priorities[i], alpha, eps)
        if leaf > largest:
            return i
        leaves[i] = np.float32(leaf)
    return -1


@compiled
def step_items(  # type: ignore[no-untyped-def]
    slots, steps, extent, block_ids, block_steps, first, shares, length, owner, number, inside, items
) -> int:
    """Find the items of steps; see `gear_loader.selection.item_map.ItemMap`, whose arrays `length` to `inside` are.

    Args:
        slots, steps: int64 [n]. extent, block_ids: index arrays, which may change meanwhile.
        first: first step of a trajectory that can be drawn. shares: whether trajectories share blocks.
        items: int64 [n], output: -1 for an unknown slot or step; -2 - block for a step in a block of another slot,
            which the trajectory may share.

    Returns:
        Number of steps of the last kind; 0 without `shares`, when they are unknown.
    """
    for i in range(len(slots)):
        if 0 <= slots[i] < len(length):
            prefetch(uint64(length.ctypes.data) + uint64(slots[i]) * uint64(4))
            prefetch(uint64(extent.ctypes.data) + uint64(slots[i]) * uint64(24))
    for i in range(len(slots)):
        items[i] = -1
        slot, step = slots[i], steps[i]
        if slot < 0 or slot >= len(length) or step < first or step >= length[slot]:
            continue
        place = extent[slot, 1] + step // block_steps
        if place < 0 or place >= len(block_ids):
            continue
        block = int64(block_ids[place])
        if block < 0 or block >= len(owner):
            continue
        items[i] = -2 - block
        prefetch(uint64(owner.ctypes.data) + uint64(block) * uint64(4))
        prefetch(uint64(number.ctypes.data) + uint64(block) * uint64(4))
        prefetch(uint64(inside.ctypes.data) + uint64(block) * uint64(8))
    shared = 0
    for i in range(len(slots)):
        if items[i] == -1:
            continue
        block, part = -2 - items[i], steps[i] // block_steps
        if owner[block] == slots[i] and number[block] == part:
            at = steps[i] - part * block_steps
            items[i] = block * block_steps + at if inside[block, 0] <= at < inside[block, 1] else -1
        elif shares:
            shared += 1
        else:
            items[i] = -1
    return shared


@compiled
def live_items(  # type: ignore[no-untyped-def]
    items, slots, wanted, state, generation, sequence, next_sequence, live
) -> None:
    """Keep the items of rows whose trajectories are live.

    Args:
        items, slots: int64 [n]. wanted: int64 [n], expected generations, or int64 [0] for any.
        state, generation, sequence: index arrays. next_sequence: bound of the known sequence numbers, for any
            generation.
        live: int64 [n], output: the items, -1 for the others.
    """
    for i in range(len(items)):
        live[i] = -1
        slot = slots[i]
        if items[i] < 0 or slot < 0 or slot >= len(state) or state[slot] != READY:
            continue
        if len(wanted):
            if generation[slot] != wanted[i]:
                continue
        elif sequence[slot] >= next_sequence:
            continue
        live[i] = items[i]


@compiled
def known_items(items, priorities, leaves):  # type: ignore[no-untyped-def]
    """Move the items (int64 [n]) that are not -1, and their leaves (float32 [n]), to the front.

    Returns:
        Their number; the largest of their priorities (float32 [n]), or 0.
    """
    count, largest = 0, np.float32(0)
    for i in range(len(items)):
        if items[i] >= 0:
            largest = max(largest, priorities[i])
            items[count], leaves[count] = items[i], leaves[i]
            count += 1
    return count, largest
