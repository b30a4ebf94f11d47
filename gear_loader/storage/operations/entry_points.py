"""Entry points: the operations in Python and compiled."""

from __future__ import annotations

import types as types_module
from typing import Any

import numpy as np
from numba import int64, njit

from gear_loader.native.compile import compiled
from gear_loader.native.copying import append as append_steps
from gear_loader.native.copying import copy_row, scatter
from gear_loader.storage.counters import DIRTY, INITIALIZED, NUM_WRITING
from gear_loader.storage.operations.growth import finish, grow, lengthen, publish_steps, reserve_rows, roll
from gear_loader.storage.operations.lifecycle import (
    abort,
    commit,
    commit_as,
    expire,
    outdate,
    raise_numbering,
    reclaim,
    remove,
)
from gear_loader.storage.operations.reading import (
    begin_read,
    begin_unchanged,
    count_samples,
    end_read,
    set_priorities,
    walk,
)
from gear_loader.storage.operations.room import begin
from gear_loader.storage.operations.tiers import begin_stored, evict, give_place, spill, take_back
from gear_loader.storage.operations.view import (
    DONE,
    FINISH_FINAL,
    FINISH_LENGTH,
    FINISH_PRIORITY,
    FINISH_SLOT,
    GROWN_GENERATION,
    GROWN_RUN,
    GROWN_SLOT,
    GROWN_STEPS,
    REQUEST_AT_ONCE,
    REQUEST_COUNT,
    REQUEST_EVICT,
    REQUEST_HEAD,
    REQUEST_NOW,
    REQUEST_PID,
    REQUEST_START,
    ROOM_ANSWER,
    TIGHT,
    UNREADY,
    blocks_of,
    require,
    view_at,
)
from gear_loader.utils.arrays import Array

_OPERATIONS = (
    *(commit, commit_as, raise_numbering, abort, reclaim, remove, expire, outdate, begin, grow, finish, roll),
    *(lengthen, publish_steps),
    *(spill, take_back, give_place, begin_stored, evict),
    *(begin_read, begin_unchanged, end_read, count_samples, set_priorities, walk),
)
PLAIN = types_module.SimpleNamespace(**{operation.__name__: operation for operation in _OPERATIONS})
"""The operations in Python; the first argument is a `View`."""


@compiled
def _commit(p, slots, priorities, now):  # type: ignore[no-untyped-def]
    commit(view_at(p), slots, priorities, now)


@compiled
def _commit_as(p, slots, sequences, priorities, created, times):  # type: ignore[no-untyped-def]
    commit_as(view_at(p), slots, sequences, priorities, created, times)


@compiled
def _raise_numbering(p, following):  # type: ignore[no-untyped-def]
    raise_numbering(view_at(p), following)


@compiled
def _abort(p, slots):  # type: ignore[no-untyped-def]
    abort(view_at(p), slots)


@compiled
def _reclaim(p):  # type: ignore[no-untyped-def]
    reclaim(view_at(p))


@compiled
def _remove(p, slots):  # type: ignore[no-untyped-def]
    remove(view_at(p), slots)


@compiled
def _expire(p, before):  # type: ignore[no-untyped-def]
    expire(view_at(p), before)


@compiled
def _outdate(p, slots):  # type: ignore[no-untyped-def]
    outdate(view_at(p), slots)


@compiled
def _begin_light(p, lengths, finals, evict, pid, process_start, slots, ids):  # type: ignore[no-untyped-def]
    return begin(view_at(p), lengths, finals, None, pid, process_start, slots, ids)


@compiled
def _begin(p, lengths, finals, evict, pid, process_start, slots, ids):  # type: ignore[no-untyped-def]
    return begin(view_at(p), lengths, finals, evict, pid, process_start, slots, ids)


@compiled
def _grow_light(p, slot, length, evict, run, ids):  # type: ignore[no-untyped-def]
    return grow(view_at(p), slot, length, None, run, ids)


@compiled
def _grow(p, slot, length, evict, run, ids):  # type: ignore[no-untyped-def]
    return grow(view_at(p), slot, length, evict, run, ids)


@compiled
def _lengthen(p, slot, generation, more, final, evict, run):  # type: ignore[no-untyped-def]
    return lengthen(view_at(p), slot, generation, more, final, evict, run)


@compiled
def _publish_steps(p, slot, more, final):  # type: ignore[no-untyped-def]
    publish_steps(view_at(p), slot, more, final)


@compiled
def _add_steps(p, slot, generation, more, final, evict, run, columns, addresses):  # type: ignore[no-untyped-def]
    """`lengthen`, copy and `publish_steps`."""
    v = view_at(p)
    if v.counters[DIRTY] != 0 or v.counters[INITIALIZED] == 0:
        return UNREADY
    answer = lengthen(v, slot, generation, more, final, evict, run)
    if answer == DONE:
        ids, length = v.block_ids[v.extent[slot, 1] :], v.extent[slot, 0]
        for place in range(length // v.block_steps, (length + more + final - 1) // v.block_steps + 1):
            require(ids[place] >= 0 and ids[place] < v.num_blocks)
        # Its machine code is linked into the cached code of this file: a change of it needs a change here.
        append_steps(columns, v.block_steps, ids, length, addresses, more + final)
        publish_steps(v, slot, more, final)
    return answer


@compiled
def _add_rows(p, columns, addresses, grown, chosen, longest, evict):  # type: ignore[no-untyped-def]
    """`lengthen`, copy and `publish_steps` for one step of each of several trajectories, in order.

    Args:
        columns, addresses: as for `copy_row`; the row is the number in `chosen`.
        grown: int64 [n, GROWN_WIDTH], the trajectories; their steps are counted.
        chosen: int64 [m], which of them. longest: most steps of a trajectory. evict: as for `make_room`.

    Returns:
        How many have got their step; the next one does not grow, or needs the general path.
    """
    v = view_at(p)
    if v.counters[DIRTY] != 0 or v.counters[INITIALIZED] == 0:
        return 0
    for j in range(len(chosen)):
        i = chosen[j]
        if grown[i, GROWN_STEPS] == 0 or grown[i, GROWN_STEPS] >= longest:
            return j
        slot, run = grown[i, GROWN_SLOT], grown[i, GROWN_RUN:]
        if lengthen(v, slot, grown[i, GROWN_GENERATION], 1, 0, evict, run) != DONE:
            return j
        step = v.extent[slot, 0]
        place = step // v.block_steps
        block = int64(v.block_ids[v.extent[slot, 1] + place])
        require(block >= 0 and block < v.num_blocks)
        # Its machine code is linked into the cached code of this file: a change of it needs a change here.
        copy_row(columns, block, step - place * v.block_steps, addresses, i)
        publish_steps(v, slot, 1, 0)
        grown[i, GROWN_STEPS] += 1
    return len(chosen)


@compiled
def _finish(p, slots, length, final, priorities, now):  # type: ignore[no-untyped-def]
    finish(view_at(p), slots, length, final, priorities, now)


@compiled
def _reserve_rows_light(p, rows, ids, evict, pid, process_start):  # type: ignore[no-untyped-def]
    return reserve_rows(view_at(p), rows, ids, None, pid, process_start)


@compiled
def _reserve_rows(p, rows, ids, evict, pid, process_start):  # type: ignore[no-untyped-def]
    return reserve_rows(view_at(p), rows, ids, evict, pid, process_start)


@compiled
def _finish_rows(p, rows, now):  # type: ignore[no-untyped-def]
    """`finish` for each of several slots, in order; see FINISH_SLOT. Returns False, having done nothing, if unready."""
    v = view_at(p)
    if v.counters[DIRTY] != 0 or v.counters[INITIALIZED] == 0:
        return False
    for i in range(len(rows)):
        row = rows[i]
        slots, priorities = row[FINISH_SLOT : FINISH_SLOT + 1], row[FINISH_PRIORITY:].view(np.float64)
        finish(v, slots, row[FINISH_LENGTH], row[FINISH_FINAL], priorities, now)
    return True


@compiled
def _roll(p, slots, length, shared, priorities, now, evict, pid, start):  # type: ignore[no-untyped-def]
    return roll(view_at(p), slots, length, shared, priorities, now, evict, pid, start)


@compiled
def _spill(p, slots, generations):  # type: ignore[no-untyped-def]
    return spill(view_at(p), slots, generations)


@compiled
def _take_back(p, slot, generation, ids):  # type: ignore[no-untyped-def]
    return take_back(view_at(p), slot, generation, ids)


@compiled
def _give_place(p, slot, blocks):  # type: ignore[no-untyped-def]
    give_place(view_at(p), slot, blocks)


@compiled
def _begin_stored(p, lengths, finals, inside, pid, process_start, slots, ids):  # type: ignore[no-untyped-def]
    return begin_stored(view_at(p), lengths, finals, inside, pid, process_start, slots, ids)


@compiled
def _evict(p, steps, how):  # type: ignore[no-untyped-def]
    return evict(view_at(p), steps, how)


@compiled
def _begin_read(p, pid, process_start, number):  # type: ignore[no-untyped-def]
    return begin_read(view_at(p), pid, process_start, number)


@compiled
def _end_read(p, row, number):  # type: ignore[no-untyped-def]
    end_read(view_at(p), row, number)


@compiled
def _begin_unchanged(p, pid, process_start, number, counter, value, samples):  # type: ignore[no-untyped-def]
    return begin_unchanged(view_at(p), pid, process_start, number, counter, value, samples)


@compiled
def _count_samples(p, slots, generations, limit, total, times):  # type: ignore[no-untyped-def]
    return count_samples(view_at(p), slots, generations, limit, total, times)


@compiled
def _set_priorities(p, slots, generations, priorities):  # type: ignore[no-untyped-def]
    set_priorities(view_at(p), slots, generations, priorities)


@compiled
def _walk(p, newest, slots):  # type: ignore[no-untyped-def]
    walk(view_at(p), newest, slots)


@njit(inline="always")  # type: ignore[untyped-decorator]
def store(v: Any, columns: Any, request: Any, evict: Any) -> Any:
    """`begin`, copy and `commit`; for small data, because the lock is held during the copy."""
    counters = v.counters
    clean = counters[DIRTY] == 0 and counters[INITIALIZED] != 0 and counters[NUM_WRITING] == 0
    if request[REQUEST_AT_ONCE] != 0 and not clean:
        return UNREADY
    count, width = request[REQUEST_COUNT], columns.shape[0]
    priorities = REQUEST_HEAD + 2 * count
    ends = priorities + count
    names = ends + count
    places = names + count
    lengths = request[REQUEST_HEAD : REQUEST_HEAD + count]
    slots = request[REQUEST_HEAD + count : priorities]
    finals = request[ends:names]
    addresses = request[places : places + count * width].reshape((count, width))
    rows = np.empty(count, dtype=np.int64)
    blocks = 0
    for i in range(count):
        rows[i] = lengths[i] + finals[i]
        blocks += blocks_of(v, rows[i])
    ids = np.empty(blocks, dtype=np.int32)
    answer = begin(v, lengths, finals, evict, request[REQUEST_PID], request[REQUEST_START], slots, ids)
    if answer == DONE:
        for i in range(count):
            v.ident[slots[i]] = request[names + i]
        # Its machine code is linked into the cached code of this file: a change of it needs a change here.
        scatter(columns, v.block_steps, ids, addresses, rows)
        commit(v, slots, request[priorities:ends].view(np.float64), request[REQUEST_NOW])
    return answer


@compiled
def _store_light(p, columns, request):  # type: ignore[no-untyped-def]
    return store(view_at(p), columns, request, None)


@compiled
def _store(p, columns, request):  # type: ignore[no-untyped-def]
    return store(view_at(p), columns, request, request[REQUEST_EVICT])


def _on_demand(light: Any, full: Any) -> Any:
    """An operation that loads its `full` version, which compiles for seconds, when `light` first does not suffice."""
    needed = False

    def call(*given: Any) -> Any:
        nonlocal needed
        if not needed:
            answer = light(*given)
            if answer != TIGHT:
                return answer
            needed = True
        return full(*given)

    return call


def _rows_on_demand(light: Any, full: Any) -> Any:
    """`_on_demand` for `reserve_rows`."""
    needed = False

    def call(p: Any, rows: Array, *given: Any) -> Any:
        nonlocal needed
        done = 0
        if not needed:
            done = light(p, rows, *given)
            if done == len(rows) or rows[done, ROOM_ANSWER] != TIGHT:
                return done
            needed = True
        return done + full(p, rows[done:], *given)

    return call


_ENTRIES = {operation.__name__: globals()[f"_{operation.__name__}"] for operation in _OPERATIONS} | {
    "begin": _on_demand(_begin_light, _begin),
    "grow": _on_demand(_grow_light, _grow),
    "store": _on_demand(_store_light, _store),
    "add_rows": _add_rows,
    "finish_rows": _finish_rows,
    "reserve_rows": _rows_on_demand(_reserve_rows_light, _reserve_rows),
    "add_steps": _add_steps,
}
COMPILED = types_module.SimpleNamespace(**_ENTRIES)
"""The compiled operations, and those that exist only compiled; the first argument is the result of `places_of`."""
