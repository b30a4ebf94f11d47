"""A crew of threads that gather one batch together.

Handing a job to a sleeping thread takes some 80 us on a virtual machine, which is as long as gathering a small batch
takes. So the rows are cut into chunks that every member takes from one counter: the caller starts at once, and who
wakes up late finds fewer chunks left, or none. A member that has run out of work looks for more for about 100 us
before it sleeps, so that back-to-back batches find it awake.

All of it, but for the sleeping, happens in compiled code without the GIL. The members share a mailbox of int64:

    STATE + i     member i: AWAKE or ASLEEP
    TICKET        job number << 32 | number of its chunks << 16 | next chunk that nobody has taken
    DONE          chunks finished
    ROWS, ...     the job: valid for whoever has taken a chunk of it, until all its chunks are finished

The ticket says itself whether a chunk is left, so one that has none can never be taken from, however far the writing
of the next job into the mailbox has come meanwhile.
"""

from __future__ import annotations

import functools
import os
import threading

import numpy as np
import torch

from gear_loader import native
from gear_loader.index import Array

__all__ = ["MAX_THREADS", "gather"]

MAX_THREADS = 8
_CHUNK_BYTES = 1 << 17
_CHUNK_BITS = 16  # far above 16 chunks for each of MAX_THREADS
_CHUNK_MASK = (1 << _CHUNK_BITS) - 1
_SPINS = 2000
_STREAM_BYTES = 8 << 20

# Places in the mailbox, 64 bytes apart where several threads write.
_TICKET, _DONE, _JOB, _STATE = 0, 8, 16, 32
(
    _ROWS,
    _COLUMNS,
    _NUM_COLUMNS,
    _SLOTS,
    _ANCHORS,
    _EXTENT,
    _NUM_SLOTS,
    _IDS,
    _NUM_IDS,
    _STEPS,
    _STREAM,
) = range(_JOB, _JOB + 11)
_AWAKE, _ASLEEP = 0, 1

if native.AVAILABLE:
    from numba import carray, njit

    from gear_loader.native import atomic_add, atomic_cas, atomic_load, atomic_store, pause, pointer

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _work(mailbox: Array, base: int) -> bool:
        """Take chunks of the current job until none is left; whether there was one."""
        found = False
        while True:
            ticket = atomic_load(base + 8 * _TICKET)
            chunk, chunks = ticket & _CHUNK_MASK, ticket >> _CHUNK_BITS & _CHUNK_MASK
            if chunk >= chunks:
                return found
            if atomic_cas(base + 8 * _TICKET, ticket, ticket + 1) != ticket:
                continue
            found = True
            rows = mailbox[_ROWS]
            native.gather(
                carray(pointer(mailbox[_COLUMNS]), (mailbox[_NUM_COLUMNS], native.WIDTH), np.int64),
                carray(pointer(mailbox[_SLOTS]), (rows,), np.int64),
                carray(pointer(mailbox[_ANCHORS]), (rows,), np.int64),
                carray(pointer(mailbox[_EXTENT]), (mailbox[_NUM_SLOTS], 2), np.int64),
                carray(pointer(mailbox[_IDS]), (mailbox[_NUM_IDS],), np.int32),
                mailbox[_STEPS],
                rows * chunk // chunks,
                rows * (chunk + 1) // chunks,
                mailbox[_STREAM] != 0,
            )
            atomic_add(base + 8 * _DONE, 1)

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _serve(mailbox: Array, base: int, member: int) -> None:
        """A member's work, until it has found none for a while and is marked asleep."""
        state = base + 8 * (_STATE + member)
        idle = 0
        while True:
            if _work(mailbox, base):
                idle = 0
            idle += 1
            pause()
            if idle > _SPINS:
                before = atomic_load(base + 8 * _TICKET)
                atomic_store(state, _ASLEEP)
                # A job posted before the mark was seen would not wake this member: look once more.
                if atomic_load(base + 8 * _TICKET) == before or atomic_cas(state, _ASLEEP, _AWAKE) != _ASLEEP:
                    return
                idle = 0

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _post(base: int, members: int, chunks: int) -> int:
        """Open the job that has been written into the mailbox; a bit mask of the members to wake."""
        atomic_store(base + 8 * _DONE, 0)
        number = (atomic_load(base + 8 * _TICKET) >> 2 * _CHUNK_BITS) + 1
        atomic_store(base + 8 * _TICKET, (number << _CHUNK_BITS | chunks) << _CHUNK_BITS)
        asleep = 0
        for member in range(members):
            if atomic_cas(base + 8 * (_STATE + member), _ASLEEP, _AWAKE) == _ASLEEP:
                asleep |= 1 << member
        return asleep

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _finish(mailbox: Array, base: int, chunks: int) -> None:
        """The caller's share of the work, then wait for the chunks that others have taken."""
        _work(mailbox, base)
        while atomic_load(base + 8 * _DONE) < chunks:
            pause()


class _Crew:
    """The caller and `members` threads."""

    def __init__(self, members: int) -> None:
        self._members = members
        memory = np.zeros(256, dtype=np.int64)
        self._mailbox = memory[-memory.ctypes.data // 8 % 8 :][:128]  # on a cache line
        self._base = self._mailbox.ctypes.data
        self._mailbox[_STATE : _STATE + members] = _ASLEEP
        self._wake = [threading.Semaphore(0) for _ in range(members)]
        self._turn = threading.Lock()
        for member in range(members):
            threading.Thread(
                target=self._run, args=(member,), name=f"gear-loader-{member}", daemon=True
            ).start()

    def _run(self, member: int) -> None:
        while True:
            self._wake[member].acquire()
            _serve(self._mailbox, self._base, member)

    def gather(
        self,
        chunks: int,
        columns: Array,
        slots: Array,
        anchors: Array,
        extent: Array,
        ids: Array,
        steps: int,
        stream: bool,
    ) -> bool:
        """Gather all rows in so many chunks; False, and nothing done, while another thread has the crew at work."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            job: tuple[int, ...] = (
                len(slots),
                columns.ctypes.data,
                len(columns),
                slots.ctypes.data,
                anchors.ctypes.data,
            )
            job += (extent.ctypes.data, len(extent), ids.ctypes.data, len(ids), steps, stream)
            self._mailbox[_ROWS : _STREAM + 1] = job
            asleep = _post(self._base, self._members, chunks)
            try:
                for member in range(self._members):
                    if asleep >> member & 1:
                        self._wake[member].release()
            finally:  # also when interrupted: members that have taken a chunk write into the caller's memory
                _finish(self._mailbox, self._base, chunks)
            return True
        finally:
            self._turn.release()


@functools.cache
def _crew(pid: int, members: int) -> _Crew:
    return _Crew(members)


def gather(
    columns: Array, slots: Array, anchors: Array, extent: Array, ids: Array, block_steps: int, row_bytes: int
) -> None:
    """`gear_loader.native.gather` of all rows, by as many threads as torch uses (at most `MAX_THREADS`).

    Args:
        columns, slots, anchors, extent, ids, block_steps: see there; all contiguous.
        row_bytes: bytes of one row of the batch, to decide how many chunks are worth it.
    """
    rows = len(slots)
    stream = rows * row_bytes >= _STREAM_BYTES  # about what a core's own cache does not hold
    threads = min(torch.get_num_threads(), MAX_THREADS)
    chunks = min(rows, rows * row_bytes // _CHUNK_BYTES, 16 * threads)
    if threads > 1 and chunks > 1:
        crew = _crew(os.getpid(), threads - 1)
        if crew.gather(chunks, columns, slots, anchors, extent, ids, block_steps, stream):
            return
    native.gather(columns, slots, anchors, extent, ids, block_steps, 0, rows, stream)
