"""The compiled loop of `gear_loader.storage.edits`: values of steps are overwritten in their blocks."""

from __future__ import annotations

from numba import int64

from gear_loader.native.compile import compiled
from gear_loader.native.memory import copy_apart, copy_bytes


@compiled
def write_runs(sources, slots, steps, counts, extent, block_ids, num_blocks, column) -> int:  # type: ignore[no-untyped-def]
    """Write runs of consecutive steps of trajectories, in order.

    Args:
        sources: int64 [n], address of each run's contiguous values. slots, steps, counts: int64 [n], of each run the
            trajectory, the first step and the number of steps.
        extent, block_ids, num_blocks: of the index, which the caller has locked.
        column: int64 [5], see `Region.column_place`.

    Returns:
        Number of runs that were not written, because the index has blocks that do not exist.
    """
    base, stride, size, every, block_steps = column[0], column[1], column[2], column[3], column[4]
    bad = 0
    for i in range(len(slots)):
        start, end = extent[slots[i], 1], steps[i] + counts[i]
        last = start + (end - 1) // block_steps
        if start < 0 or last >= len(block_ids):
            bad += 1
            continue
        step = steps[i]
        while step < end:
            number = step // block_steps
            inside = step - number * block_steps
            count = min(block_steps - inside, end - step)
            block = int64(block_ids[start + number])
            if block < 0 or block >= num_blocks:
                bad += 1
                break
            here = base + block * stride + inside * every
            there = sources[i] + (step - steps[i]) * size
            if every == size:
                copy_bytes(here, there, count * size)
            else:
                copy_apart(here, every, there, size, count, size)
            step += count
    return bad
