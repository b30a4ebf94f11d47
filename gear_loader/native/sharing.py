"""The compiled loops (numba) by which the threads of a pool share a gather; see `gear_loader.native.threads`."""

from __future__ import annotations

import numpy as np
from numba import carray

from gear_loader.kernels.plan import WIDTH
from gear_loader.native.compile import compiled
from gear_loader.native.gathering import gather
from gear_loader.native.memory import atomic_add, atomic_cas, atomic_load, atomic_store, pause, pointer
from gear_loader.utils.arrays import Array

# The mailbox of a thread pool (`gear_loader.native.threads`), int64:
#
#     TICKET        job number << 32 | number of its chunks << 16 | next free chunk
#     DONE          chunks finished
#     BAD           sum of the results of `gather` for the job's chunks
#     SPINS         polls of an idle member before it sleeps
#     ROWS, ...     the job: valid for a thread that has taken a chunk, until all chunks are finished
#     STATE + i     member i: AWAKE or ASLEEP
#
# The ticket itself shows whether a chunk is left, so no thread takes one while the next job is being written.
_CHUNK_BITS = 16
_CHUNK_MASK = (1 << _CHUNK_BITS) - 1

# Places in the mailbox, 64 bytes apart where several threads write.
_TICKET, DONE, _JOB, SPINS, _BAD, STATE = 0, 8, 16, 27, 28, 32
(
    ROWS,
    _COLUMNS,
    _NUM_COLUMNS,
    _SLOTS,
    _ANCHORS,
    _EXTENT,
    _NUM_SLOTS,
    _IDS,
    _NUM_IDS,
    _STEPS,
    _PLACES,  # address of the rows of the batch that are filled, or 0
) = range(_JOB, _JOB + 11)
_AWAKE, ASLEEP = 0, 1


# The loops of the thread pool, see `gear_loader.native.threads`.


@compiled
def _work(mailbox: Array, base: int) -> bool:
    """Process chunks of the current job until all are taken; return whether any was left."""
    found = False
    while True:
        ticket = atomic_load(base + 8 * _TICKET)
        chunk, chunks = ticket & _CHUNK_MASK, ticket >> _CHUNK_BITS & _CHUNK_MASK
        if chunk >= chunks:
            return found
        if atomic_cas(base + 8 * _TICKET, ticket, ticket + 1) != ticket:
            continue
        found = True
        rows = mailbox[ROWS]
        columns = carray(pointer(mailbox[_COLUMNS]), (mailbox[_NUM_COLUMNS], WIDTH), np.int64)
        slots = carray(pointer(mailbox[_SLOTS]), (rows,), np.int64)
        anchors = carray(pointer(mailbox[_ANCHORS]), (rows,), np.int64)
        extent = carray(pointer(mailbox[_EXTENT]), (mailbox[_NUM_SLOTS], 3), np.int64)
        ids = carray(pointer(mailbox[_IDS]), (mailbox[_NUM_IDS],), np.int32)
        steps = mailbox[_STEPS]
        first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
        if mailbox[_PLACES] != 0:
            places = carray(pointer(mailbox[_PLACES]), (rows,), np.int64)
            bad = gather(columns, slots, anchors, extent, ids, steps, first, last, places)
        else:
            bad = gather(columns, slots, anchors, extent, ids, steps, first, last, None)
        if bad:
            atomic_add(base + 8 * _BAD, bad)
        atomic_add(base + 8 * DONE, 1)


@compiled
def serve(mailbox: Array, base: int, member: int) -> None:
    """Process jobs as a member until it is idle for SPINS polls and marked asleep."""
    state = base + 8 * (STATE + member)
    idle = 0
    while True:
        if _work(mailbox, base):
            idle = 0
        idle += 1
        pause()
        if idle > atomic_load(base + 8 * SPINS):
            before = atomic_load(base + 8 * _TICKET)
            atomic_store(state, ASLEEP)
            # A job posted before the mark was visible does not wake this member, so check once more.
            if atomic_load(base + 8 * _TICKET) == before or atomic_cas(state, ASLEEP, _AWAKE) != ASLEEP:
                return
            idle = 0


@compiled
def look(base: int, spins: int) -> int:
    """Poll for work `spins` times, as `serve` does, without taking any; for timing."""
    found = 0
    for _ in range(spins):
        ticket = atomic_load(base + 8 * _TICKET)
        found += (ticket & _CHUNK_MASK) < (ticket >> _CHUNK_BITS & _CHUNK_MASK)
        pause()
    return found


@compiled
def post(base: int, members: int, chunks: int) -> int:
    """Publish the job in the mailbox; return a bit mask of the members to wake."""
    atomic_store(base + 8 * DONE, 0)
    atomic_store(base + 8 * _BAD, 0)
    number = (atomic_load(base + 8 * _TICKET) >> 2 * _CHUNK_BITS) + 1
    atomic_store(base + 8 * _TICKET, (number << _CHUNK_BITS | chunks) << _CHUNK_BITS)
    asleep = 0
    for member in range(members):
        if atomic_cas(base + 8 * (STATE + member), ASLEEP, _AWAKE) == ASLEEP:
            asleep |= 1 << member
    return asleep


@compiled
def finish(mailbox, base, chunks):  # type: ignore[no-untyped-def]
    """Process chunks as the caller, then wait for the chunks of the members; return the sum of `gather`'s results."""
    _work(mailbox, base)
    while atomic_load(base + 8 * DONE) < chunks:
        pause()
    return atomic_load(base + 8 * _BAD)
