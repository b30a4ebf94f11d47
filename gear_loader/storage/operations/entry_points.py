"""Entry points: the operations in Python and compiled."""

from __future__ import annotations

import functools
import types as types_module
from typing import Any

import numpy as np
from numba import carray, njit

from gear_loader.native.compile import compiled
from gear_loader.native.copying import scatter
from gear_loader.native.memory import pointer
from gear_loader.storage.counters import DIRTY, INITIALIZED, NUM_WRITING
from gear_loader.storage.operations.appending import append_lanes, write_ahead
from gear_loader.storage.operations.extents import (
    forget_payload,
    measure_payload,
    take_payload,
    trim_payload,
)
from gear_loader.storage.operations.growth import (
    abort_lanes,
    end_lanes,
    grow_lanes,
    lengthen,
    publish_steps,
    reserve_lanes,
)
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
from gear_loader.storage.operations.prefix_blocks import begin_after
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
    REQUEST_AT_ONCE,
    REQUEST_COUNT,
    REQUEST_EVICT,
    REQUEST_HEAD,
    REQUEST_NOW,
    REQUEST_PID,
    REQUEST_START,
    TIGHT,
    UNREADY,
    blocks_of,
    view_at,
)

_OPERATIONS = (
    *(commit, commit_as, raise_numbering, abort, reclaim, remove, expire, outdate, begin),
    *(reserve_lanes, end_lanes, grow_lanes, abort_lanes, append_lanes),
    *(spill, take_back, give_place, begin_stored, evict),
    *(take_payload, trim_payload, measure_payload, forget_payload, begin_after),
    *(begin_read, begin_unchanged, end_read, count_samples, set_priorities, walk),
)
_PARTS = (lengthen, publish_steps)
PLAIN = types_module.SimpleNamespace(**{each.__name__: each for each in (*_OPERATIONS, *_PARTS)})
"""The operations in Python, and parts of them; the first argument is a `View`."""


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
def _reserve_lanes_light(p, lanes, chosen, at, blocks, more, most, evict, pid, start):  # type: ignore[no-untyped-def]
    return reserve_lanes(view_at(p), lanes, chosen, at, blocks, more, most, None, pid, start)


@compiled
def _reserve_lanes(p, lanes, chosen, at, blocks, more, most, evict, pid, start):  # type: ignore[no-untyped-def]
    return reserve_lanes(view_at(p), lanes, chosen, at, blocks, more, most, evict, pid, start)


@compiled
def _end_lanes_light(  # type: ignore[no-untyped-def]
    p,
    lanes,
    chosen,
    at,
    blocks,
    columns,
    chunk,
    overlap,
    ending,
    final,
    priorities,
    now,
    grows,
    evict,
    pid,
    start,
    out,
):
    v = view_at(p)
    return end_lanes(
        v,
        lanes,
        chosen,
        at,
        blocks,
        columns,
        chunk,
        overlap,
        ending,
        final,
        priorities,
        now,
        grows,
        None,
        pid,
        start,
        out,
    )


@compiled
def _end_lanes(  # type: ignore[no-untyped-def]
    p,
    lanes,
    chosen,
    at,
    blocks,
    columns,
    chunk,
    overlap,
    ending,
    final,
    priorities,
    now,
    grows,
    evict,
    pid,
    start,
    out,
):
    v = view_at(p)
    return end_lanes(
        v,
        lanes,
        chosen,
        at,
        blocks,
        columns,
        chunk,
        overlap,
        ending,
        final,
        priorities,
        now,
        grows,
        evict,
        pid,
        start,
        out,
    )


@compiled
def _grow_lanes(p, lanes, chosen, at, columns, sources, first, count, final, evict):  # type: ignore[no-untyped-def]
    return grow_lanes(view_at(p), lanes, chosen, at, columns, sources, first, count, final, evict)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _plain(array: Any) -> Any:
    """The same memory, whose references are not counted: each slice of it would be an atomic operation."""
    return carray(pointer(array.ctypes.data), array.shape, np.int64)


@compiled
def _append_lanes_light(p, lanes, request, now, evict):  # type: ignore[no-untyped-def]
    write_ahead(p, lanes, request)
    return append_lanes(view_at(p), _plain(lanes), _plain(request), now, None)


@compiled
def _append_lanes(p, lanes, request, now, evict):  # type: ignore[no-untyped-def]
    write_ahead(p, lanes, request)
    return append_lanes(view_at(p), _plain(lanes), _plain(request), now, evict)


@compiled
def _abort_lanes(p, lanes, chosen):  # type: ignore[no-untyped-def]
    return abort_lanes(view_at(p), lanes, chosen)


@compiled
def _spill(p, slots, generations, ids):  # type: ignore[no-untyped-def]
    return spill(view_at(p), slots, generations, ids)


@compiled
def _take_back(p, slot, generation, parent, shared, copied, ids):  # type: ignore[no-untyped-def]
    return take_back(view_at(p), slot, generation, parent, shared, copied, ids)


@compiled
def _give_place(p, slot, blocks):  # type: ignore[no-untyped-def]
    give_place(view_at(p), slot, blocks)


@compiled
def _begin_stored(  # type: ignore[no-untyped-def]
    p, lengths, finals, inside, parents, shared, copied, pid, process_start, slots, ids
):
    given = lengths, finals, inside, parents, shared, copied
    return begin_stored(view_at(p), *given, pid, process_start, slots, ids)


@compiled
def _evict(p, steps, how):  # type: ignore[no-untyped-def]
    return evict(view_at(p), steps, how)


@compiled
def _take_payload(  # type: ignore[no-untyped-def]
    p, heap, slots, generations, runs, sizes, kept, offsets, spots, ahead
):
    return take_payload(view_at(p), heap, slots, generations, runs, sizes, kept, offsets, spots, ahead)


@compiled
def _trim_payload(p, heap, spots, chosen):  # type: ignore[no-untyped-def]
    trim_payload(view_at(p), heap, spots, chosen)


@compiled
def _measure_payload(p, heap, kept, used):  # type: ignore[no-untyped-def]
    measure_payload(view_at(p), heap, kept, used)


@compiled
def _forget_payload(p, heap, keys, kept, places):  # type: ignore[no-untyped-def]
    forget_payload(view_at(p), heap, keys, kept, places)


@compiled
def _begin_after(  # type: ignore[no-untyped-def]
    p, lengths, finals, parents, generations, shared, copied, evict, pid, process_start, slots, ids
):
    v = view_at(p)
    given = lengths, finals, parents, generations, shared, copied
    return begin_after(v, *given, evict, pid, process_start, slots, ids)


@compiled
def _begin_read(p, pid, process_start, number):  # type: ignore[no-untyped-def]
    return begin_read(view_at(p), pid, process_start, number)


@functools.partial(compiled, nogil=False)
def _end_read(p, row, number):  # type: ignore[no-untyped-def]
    end_read(view_at(p), row, number)


@functools.partial(compiled, nogil=False)
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


_ENTRIES = {operation.__name__: globals()[f"_{operation.__name__}"] for operation in _OPERATIONS} | {
    "begin": _on_demand(_begin_light, _begin),
    "store": _on_demand(_store_light, _store),
    "reserve_lanes": _on_demand(_reserve_lanes_light, _reserve_lanes),
    "end_lanes": _on_demand(_end_lanes_light, _end_lanes),
    "append_lanes": _on_demand(_append_lanes_light, _append_lanes),
}
COMPILED = types_module.SimpleNamespace(**_ENTRIES)
"""The compiled operations, and those that exist only compiled; the first argument is the result of `places_of`."""
