"""The compiled loops (numba) by which the threads of a pool share a gather; see `gear_loader.native.threads`."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from gear_loader.kernels.plan import WIDTH
from gear_loader.native.compile import compiled
from gear_loader.native.gathering import gather
from gear_loader.native.memory import atomic_add, atomic_cas, atomic_load, atomic_store, pause, pointer
from gear_loader.native.system_calls import current_processor, futex_wait, futex_wake, keep_off, monotonic
from gear_loader.utils.arrays import Array

# The mailbox of a thread pool (`gear_loader.native.threads`), int64:
#
#     TICKET        job number << 32 | number of its chunks << 16 | next free chunk
#     DONE          chunks finished
#     BAD           sum of the results of `gather` for the job's chunks
#     TURN          1 while a thread shares a gather
#     ROWS, ...     the job: valid for a thread that has taken a chunk, until all chunks are finished
#     PATIENCE      nanoseconds that an idle member polls before it sleeps
#     ENDED         end of the last job, by `monotonic`
#     KEPT_OFF      the processor that members do not use; -1: none
#     MEMBERS + i   member i as the kernel numbers threads
#     STATE + i     member i: AWAKE or ASLEEP; a futex
#     SCRATCH       of the thread whose turn it is
#
# The ticket itself shows whether a chunk is left, so no thread takes one while the next job is being written.
_CHUNK_BITS = 16
_CHUNK_MASK = (1 << _CHUNK_BITS) - 1

# Places in the mailbox, 64 bytes apart where several threads write.
_TICKET, DONE, _TURN, _JOB, _PATIENCE, _ENDED, KEPT_OFF, _BAD, MEMBERS, STATE, _SCRATCH = (
    *(0, 8, 16, 24, 36, 37, 38, 40, 48, 56, 64),
)
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
MAX_MEMBERS = 7
MAILBOX = _SCRATCH + 128
"""Words of a mailbox; the scratch has a bit for each of 8,192 processors."""
_AWAKE_NS = 300_000
BUSY = -1
"""Result of `share` if another thread shares a gather."""


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
def serve(mailbox: Array, member: int) -> None:
    """Process jobs as a member, until the process ends."""
    base = mailbox.ctypes.data
    state, clock = base + 8 * (STATE + member), np.zeros(2, dtype=np.int64)
    idle, since = 0, 0
    while True:
        if _work(mailbox, base):
            idle = 0
        if idle == 0:
            since = monotonic(clock)
        idle += 1
        pause()
        if idle % 16 == 0 and monotonic(clock) - since >= atomic_load(base + 8 * _PATIENCE):
            before = atomic_load(base + 8 * _TICKET)
            atomic_store(state, ASLEEP)
            # A job posted before the mark was visible does not wake this member, so check once more.
            if atomic_load(base + 8 * _TICKET) == before or atomic_cas(state, ASLEEP, _AWAKE) != ASLEEP:
                while atomic_load(state) == ASLEEP:
                    futex_wait(state, ASLEEP)
            idle = 0


@njit  # type: ignore[untyped-decorator]
def _post(base, members, chunks) -> None:  # type: ignore[no-untyped-def]
    """Publish the job in the mailbox and wake the members that sleep."""
    atomic_store(base + 8 * DONE, 0)
    atomic_store(base + 8 * _BAD, 0)
    number = (atomic_load(base + 8 * _TICKET) >> 2 * _CHUNK_BITS) + 1
    atomic_store(base + 8 * _TICKET, (number << _CHUNK_BITS | chunks) << _CHUNK_BITS)
    for member in range(members):
        state = base + 8 * (STATE + member)
        if atomic_cas(state, ASLEEP, _AWAKE) == ASLEEP:
            futex_wake(state)


@compiled
def share(  # type: ignore[no-untyped-def]
    mailbox, members, chunks, columns, slots, anchors, extent, ids, steps, places
):
    """`gather` by the calling thread and the members of its pool.

    Args:
        mailbox: int64 [MAILBOX], at an address that is a multiple of 64. members: number of them.
        chunks: number of parts, less than 65,536.
        columns, slots, anchors, extent, ids, steps: as for `gather`. places: address of `rows`, or 0.

    Returns:
        As `gather`; BUSY, having done nothing, if another thread shares a gather.
    """
    base = mailbox.ctypes.data
    if atomic_cas(base + 8 * _TURN, 0, 1) != 0:
        return BUSY
    scratch = mailbox[_SCRATCH:]
    mailbox[ROWS] = len(slots)
    mailbox[_COLUMNS], mailbox[_NUM_COLUMNS] = columns.ctypes.data, len(columns)
    mailbox[_SLOTS], mailbox[_ANCHORS] = slots.ctypes.data, anchors.ctypes.data
    mailbox[_EXTENT], mailbox[_NUM_SLOTS] = extent.ctypes.data, len(extent)
    mailbox[_IDS], mailbox[_NUM_IDS], mailbox[_STEPS] = ids.ctypes.data, len(ids), steps
    mailbox[_PLACES] = places
    here = current_processor(scratch)
    if here != mailbox[KEPT_OFF]:
        mailbox[KEPT_OFF] = here
        keep_off(mailbox[MEMBERS : MEMBERS + members], here, scratch)
    soon = monotonic(scratch) - mailbox[_ENDED] < _AWAKE_NS
    atomic_store(base + 8 * _PATIENCE, _AWAKE_NS if soon else 0)
    _post(base, members, chunks)
    _work(mailbox, base)
    while atomic_load(base + 8 * DONE) < chunks:
        pause()
    bad = atomic_load(base + 8 * _BAD)
    mailbox[_ENDED] = monotonic(scratch)
    atomic_store(base + 8 * _TURN, 0)
    return bad
