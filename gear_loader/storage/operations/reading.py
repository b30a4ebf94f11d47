"""Read tickets, counts of draws, priorities, and the order of age."""

from __future__ import annotations

from typing import Any

from gear_loader.native.compile import inlined
from gear_loader.storage.counters import (
    DIRTY,
    DRAWING,
    DRAWING_TIMES,
    DRAWING_TOTAL,
    EPOCH,
    INITIALIZED,
    NEWEST,
    NUM_EXPIRED,
    NUM_SAMPLED,
    OLDEST,
)
from gear_loader.storage.operations.lifecycle import bound, retire
from gear_loader.storage.operations.view import (
    PID,
    READING,
    START,
    TICKET,
    begin_change,
    end_change,
    fence,
    require,
)
from gear_loader.storage.states import READY


@inlined
def begin_read(v: Any, pid: Any, process_start: Any, number: Any) -> Any:
    """Register the read ticket `number` and return its row in `readers`; -1 if all rows are in use.

    No block retired from now on is reused before its `READING` is 0 again.
    """
    for row in range(len(v.readers)):
        if v.readers[row, READING] == 0:
            v.readers[row, PID] = pid
            v.readers[row, START] = process_start
            v.readers[row, TICKET] = number
            fence()
            v.readers[row, READING] = v.counters[EPOCH]
            return row
    return -1


@inlined
def end_read(v: Any, row: Any, number: Any) -> None:
    """Release the row of a read ticket, unless another ticket uses the row now. Takes no lock."""
    if v.readers[row, TICKET] == number:
        v.readers[row, READING] = 0


@inlined
def begin_unchanged(
    v: Any, pid: Any, process_start: Any, number: Any, counter: Any, value: Any, samples: Any
) -> Any:
    """`begin_read`, and count `samples` rows as drawn, if a counter still has a value.

    Returns:
        As `begin_read`; -2, having done nothing, if the counter has changed or the index needs recovery.
    """
    counters = v.counters
    if counters[DIRTY] != 0 or counters[INITIALIZED] == 0 or counters[counter] != value:
        return -2
    row = begin_read(v, pid, process_start, number)
    if row >= 0:
        counters[NUM_SAMPLED] += samples
    return row


@inlined
def count_samples(v: Any, slots: Any, generations: Any, limit: Any, total: Any, times: Any) -> Any:
    """Count rows as drawn.

    Args:
        slots, generations: int64 [n], the rows.
        limit: draws after which a trajectory is retired; 0 for no limit.
        total: whether `NUM_SAMPLED` counts them too.
        times: int64 [n], output: number of draws of each trajectory; 0 if it is stale or had reached the limit.

    Returns:
        Number of rows counted.
    """
    counted, used_up = 0, 0
    counters = v.counters
    if limit > 0 or total:
        begin_change(v)
    for i in range(len(slots)):
        slot = slots[i]
        times[i] = 0
        if slot < 0 or slot >= v.num_slots or v.state[slot] != READY:
            continue
        if v.generation[slot] != generations[i]:
            continue
        if limit > 0 and v.sampled[slot] >= limit:
            continue
        if total:
            counters[DRAWING_TIMES] = v.sampled[slot] + 1
            counters[DRAWING_TOTAL] = counters[NUM_SAMPLED] + 1
            fence()
            counters[DRAWING] = slot + 1
            fence()
        v.sampled[slot] += 1
        if total:
            fence()
            counters[NUM_SAMPLED] += 1
            fence()
            counters[DRAWING] = 0
        times[i] = v.sampled[slot]
        counted += 1
        used_up += limit > 0 and v.sampled[slot] == limit
    if used_up > 0:
        for i in range(len(slots)):
            slot = slots[i]
            if times[i] == limit:
                retire(v, slot, NUM_EXPIRED)
    if limit > 0 or total:
        end_change(v)
    return counted


@inlined
def set_priorities(v: Any, slots: Any, generations: Any, priorities: Any) -> None:
    """Write new priorities; stale rows are skipped, the last of equal slots counts.

    Args:
        slots, generations: int64 [n]; generation -1 matches any. priorities: float32 [n].
    """
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0 or slot >= v.num_slots or v.state[slot] != READY:
            continue
        if generations[i] >= 0 and v.generation[slot] != generations[i]:
            continue
        bound(v, slot, priorities[i])
        fence()
        v.priority[slot] = priorities[i]


@inlined
def walk(v: Any, newest: Any, slots: Any) -> None:
    """Fill `slots` (int64 [n], n at most NUM_READY) with the oldest or newest slots in order."""
    slot = v.counters[NEWEST if newest else OLDEST] - 1
    for i in range(len(slots)):
        require(slot >= 0)
        slots[i] = slot
        slot = v.links[slot, 0 if newest else 1]
