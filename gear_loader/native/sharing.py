"""The compiled loops (numba) by which the threads of a pool share a gather; see `gear_loader.native.threads`."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from gear_loader.kernels.plan import WIDTH
from gear_loader.native.compile import compiled
from gear_loader.native.gathering import gather
from gear_loader.native.memory import atomic_add, atomic_cas, atomic_load, atomic_store, pause, pointer
from gear_loader.native.packed import gather_packed
from gear_loader.native.system_calls import current_processor, futex_wait, futex_wake, keep_off, monotonic

# The mailbox of a thread pool (`gear_loader.native.threads`), int64:
#
#     TICKET        job number << 32 | number of its chunks << 16 | next free chunk
#     DONE          chunks finished
#     BAD           sum of the results of the loop for the job's chunks
#     TURN          1 while a thread shares a gather
#     PATIENCE      nanoseconds that an idle member polls before it sleeps
#     ENDED         end of the last job, by `monotonic`
#     KEPT_OFF      the processor that members do not use; -1: none
#     MEMBERS + i   member i as the kernel numbers threads
#     STATE + i     member i: AWAKE or ASLEEP; a futex
#     JOB, ...      the job: valid for a thread that has taken a chunk, until all chunks are finished
#     SCRATCH       of the thread whose turn it is
#
# The ticket itself shows whether a chunk is left, so no thread takes one while the next job is being written.
_CHUNK_BITS = 16
_CHUNK_MASK = (1 << _CHUNK_BITS) - 1

# Places in the mailbox, 64 bytes apart where several threads write.
_TICKET, DONE, _TURN, _PATIENCE, _ENDED, KEPT_OFF, _BAD, MEMBERS, STATE, _JOB, _SCRATCH = (
    *(0, 8, 16, 24, 25, 26, 32, 40, 48, 56, 80),
)
# A job: addresses of the arguments of `gather` or, with PACKED, of `gather_packed`, and their sizes.
(
    PACKED,
    ROWS,  # number of entries that are gathered
    COLUMNS,
    NUM_COLUMNS,
    SLOTS,
    ANCHORS,  # or `spans`
    EXTENT,
    NUM_SLOTS,
    IDS,
    NUM_IDS,
    STEPS,
    PLACES,  # address of `rows`, or 0
    ONCE,
    NUM_ONCE,
    STARTS,
    POSITION,
    NUM_STEPS,  # of the batch
    BATCH,  # rows of the batch
    STREAMS,
) = range(19)
JOB_WORDS = 19
_AWAKE, ASLEEP = 0, 1
MAX_MEMBERS = 7
MAILBOX = _SCRATCH + 128
"""Words of a mailbox; the scratch has a bit for each of 8,192 processors."""
_AWAKE_NS = 300_000
CALLER = -1
"""For `run`: the thread that shares a gather."""
BUSY = -1
"""Result of `run` if another thread shares a gather."""


@njit(inline="always")
def _int64s(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (count,), np.int64)


@njit(inline="always")
def _table(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (count, WIDTH), np.int64)


@njit(inline="always")
def _part(job, chunk, chunks):  # type: ignore[no-untyped-def]
    """Gather the entries of one chunk; return the number of invalid windows or rows."""
    first, last = job[ROWS] * chunk // chunks, job[ROWS] * (chunk + 1) // chunks
    columns = _table(job[COLUMNS], job[NUM_COLUMNS])
    extent = carray(pointer(job[EXTENT]), (job[NUM_SLOTS], 3), np.int64)
    ids = carray(pointer(job[IDS]), (job[NUM_IDS],), np.int32)
    if job[PACKED] != 0:
        return gather_packed(
            columns,
            _table(job[ONCE], job[NUM_ONCE]),
            _int64s(job[SLOTS], job[BATCH]),
            carray(pointer(job[ANCHORS]), (2, job[BATCH]), np.int64),
            carray(pointer(job[STARTS]), (job[BATCH],), np.int32),
            extent,
            ids,
            job[STEPS],
            carray(pointer(job[POSITION]), (job[NUM_STEPS],), np.int32),
            job[STREAMS] != 0,
            _int64s(job[PLACES], job[ROWS])[first:last],
        )
    slots, anchors = _int64s(job[SLOTS], job[ROWS]), _int64s(job[ANCHORS], job[ROWS])
    if job[PLACES] != 0:
        places = _int64s(job[PLACES], job[ROWS])
        return gather(columns, slots, anchors, extent, ids, job[STEPS], first, last, places)
    return gather(columns, slots, anchors, extent, ids, job[STEPS], first, last, None)


@njit
def _work(mailbox, base):  # type: ignore[no-untyped-def]
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
        bad = _part(mailbox[_JOB : _JOB + JOB_WORDS], chunk, chunks)
        if bad:
            atomic_add(base + 8 * _BAD, bad)
        atomic_add(base + 8 * DONE, 1)


@njit  # type: ignore[untyped-decorator]
def _idle(base, member, clock, since) -> bool:  # type: ignore[no-untyped-def]
    """Sleep, if nothing has come for long enough; return whether the member slept, or work has come."""
    if monotonic(clock) - since < atomic_load(base + 8 * _PATIENCE):
        return False
    state, before = base + 8 * (STATE + member), atomic_load(base + 8 * _TICKET)
    atomic_store(state, ASLEEP)
    # A job posted before the mark was visible does not wake this member, so check once more.
    if atomic_load(base + 8 * _TICKET) == before or atomic_cas(state, ASLEEP, _AWAKE) != ASLEEP:
        while atomic_load(state) == ASLEEP:
            futex_wait(state, ASLEEP)
    return True


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
def run(mailbox, member, members, job, chunks):  # type: ignore[no-untyped-def]
    """Share a gather with the members of a pool; or be one of them until the process ends.

    One function, because the loops that gather are compiled into it.

    Args:
        mailbox: int64 [MAILBOX], at an address that is a multiple of 64. member: number of the member, or CALLER.
        members: number of them. job: int64 [JOB_WORDS]. chunks: number of parts, less than 65,536.

    Returns:
        The sum of what `gather` or `gather_packed` returns; BUSY, having done nothing, if another thread shares one.
    """
    base = mailbox.ctypes.data
    if member != CALLER:
        clock, polls, since = np.zeros(2, dtype=np.int64), 0, 0
        while polls >= 0:  # numba needs an end
            if _work(mailbox, base) or polls == 0:
                since = monotonic(clock)
            polls += 1
            pause()
            if polls % 16 == 0 and _idle(base, member, clock, since):
                polls = 0
        return 0
    if atomic_cas(base + 8 * _TURN, 0, 1) != 0:
        return BUSY
    scratch = mailbox[_SCRATCH:]
    mailbox[_JOB : _JOB + JOB_WORDS] = job
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
