"""A thread pool that gathers one batch in parallel.

Waking a sleeping thread takes about 80 us on a virtual machine, as long as gathering a small batch. So the rows are cut
into chunks, which all members take from one counter: the caller starts at once, and members that wake up late find
fewer chunks. If batches follow each other closely (about 0.1 ms of drawing and bookkeeping between them), an idle
member polls for 0.3 ms before it sleeps, so that it is awake for the next batch. A consumer that works on its batch for
longer needs the cores, so members sleep at once. The caller gathers batches of up to 2 MiB alone: waking a thread takes
about as long as half of the copy. Members keep off the caller's processor, where Linux may wake them although others
are idle: there they would wait until the copy is done.

All of this except sleeping runs in compiled code without the GIL (`gear_loader.native.sharing`: `post`, `serve`,
`finish`), through the mailbox defined there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from typing import Any

import numpy as np
import torch

from gear_loader.native import gathering, sharing
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import new_mutex, run_alone

MAX_THREADS = 8
_CHUNK_BYTES = 1 << 17
_AWAKE_SECONDS = 3e-4
_ALONE_BYTES = 1 << 21
"""Largest batch that the caller gathers alone. On two shared cores 32 trajectories of 42 KB took it 98 us at best and
180 us in the median, with a member 194 us and 488 us; 128 of them took 534 us and 463 us at best.
Since members keep off the caller's processor, 32 take 90 us with a member instead of 110 after a pause, but 180 instead
of 134 right after a call of torch, whose threads still poll."""


# Without a release of the GIL, which may take milliseconds to get back.
_processor: Any = (
    getattr(ctypes.PyDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None
)
"""The processor of the calling thread; None where it is not known."""


class _ThreadPool:
    """The caller and `members` threads."""

    def __init__(self, members: int) -> None:
        self._members = members
        memory = np.zeros(256, dtype=np.int64)
        self._mailbox = memory[-memory.ctypes.data // 8 % 8 :][:128]  # aligned to a cache line
        self._base = self._mailbox.ctypes.data
        self._mailbox[sharing.STATE : sharing.STATE + members] = sharing.ASLEEP
        self._spins = self._count_spins(_AWAKE_SECONDS)
        self._ended = -1.0  # end of the last job, by `time.perf_counter`
        self._wake = [threading.Semaphore(0) for _ in range(members)]
        self._turn = new_mutex()
        self._kept_off = -1  # the processor that members do not use
        self._ids: list[int] = []  # of the members, as the kernel counts threads
        for member in range(members):
            thread = threading.Thread(
                target=self._run, args=(member,), name=f"gear-loader-{member}", daemon=True
            )
            thread.start()
            assert thread.native_id is not None
            self._ids.append(thread.native_id)

    def _run(self, member: int) -> None:
        while True:
            self._wake[member].acquire()
            sharing.serve(self._mailbox, self._base, member)

    def _count_spins(self, seconds: float) -> int:
        """Measure the number of polls in a time: a pause takes up to ten times longer on some processors."""
        count = 1000
        sharing.look(self._base, 1)  # compiles it
        each = []
        for _ in range(3):  # a measurement may be interrupted
            begin = time.perf_counter()
            sharing.look(self._base, count)
            each.append((time.perf_counter() - begin) / count)
        return max(1, int(seconds / min(each)))

    def gather(
        self,
        chunks: int,
        columns: Array,
        slots: Array,
        anchors: Array,
        extent: Array,
        ids: Array,
        steps: int,
        rows: Array | None = None,
    ) -> int | None:
        """Gather all entries in `chunks` chunks; return None, having done nothing, if another thread uses the pool."""
        job: tuple[int, ...] = (
            len(slots),
            columns.ctypes.data,
            len(columns),
            slots.ctypes.data,
            anchors.ctypes.data,
        )
        job += (extent.ctypes.data, len(extent), ids.ctypes.data, len(ids), steps)
        job += (0 if rows is None else rows.ctypes.data,)
        return run_alone(self._turn, lambda: self._work_on(job, chunks))

    def _work_on(self, job: tuple[int, ...], chunks: int) -> int:
        mailbox, base = self._mailbox, self._base
        mailbox[sharing.ROWS : sharing.ROWS + len(job)] = job
        soon = time.perf_counter() - self._ended < _AWAKE_SECONDS
        mailbox[sharing.SPINS] = self._spins if soon else 0
        mailbox[sharing.DONE] = chunks  # `finish` of a job that has not been posted returns at once
        try:
            self._keep_off()
            asleep = sharing.post(base, self._members, chunks)
            for member in range(self._members):
                if asleep >> member & 1:
                    self._wake[member].release()
            bad: int = sharing.finish(mailbox, base, chunks)
        except BaseException:
            # Interrupted: `post` may have marked members as awake, and members with a chunk write to the caller's
            # memory. A member woken without need finds no work.
            try:
                for wake in self._wake:
                    wake.release()
            finally:
                sharing.finish(mailbox, base, chunks)
            raise
        self._ended = time.perf_counter()
        return bad

    def _keep_off(self) -> None:
        """Let members use the processors that the caller may use, except the one that it is on."""
        here = -1 if _processor is None else _processor()
        if here == self._kept_off:
            return
        self._kept_off = here
        allowed = os.sched_getaffinity(0)
        for thread in self._ids:
            with contextlib.suppress(OSError):  # a container may forbid it
                os.sched_setaffinity(thread, allowed - {here} or allowed)


@functools.cache
def _pool(pid: int, members: int) -> _ThreadPool:
    return _ThreadPool(members)


def alone(count: int, row_bytes: int) -> bool:
    """Whether the caller gathers a batch of `count` rows alone."""
    return count == 1 or count * row_bytes <= _ALONE_BYTES or torch.get_num_threads() == 1


def gather(
    columns: Array,
    slots: Array,
    anchors: Array,
    extent: Array,
    ids: Array,
    block_steps: int,
    row_bytes: int,
    rows: Array | None = None,
) -> int:
    """`gear_loader.native.gathering.gather` of all entries, by as many threads as torch uses (at most `MAX_THREADS`).

    Args:
        columns, slots, anchors, extent, ids, block_steps: as there; all contiguous.
        row_bytes: bytes of one row of the batch, which determine the number of chunks.
        rows: int64 [n], contiguous, distinct: row of the batch for each entry; None: row b for entry b.

    Returns:
        As `gear_loader.native.gathering.gather`.
    """
    count = len(slots)
    threads = min(torch.get_num_threads(), MAX_THREADS)
    chunks = min(count, count * row_bytes // _CHUNK_BYTES, 16 * threads)
    if threads > 1 and chunks > 1 and count * row_bytes > _ALONE_BYTES:
        pool = _pool(os.getpid(), threads - 1)
        bad = pool.gather(chunks, columns, slots, anchors, extent, ids, block_steps, rows)
        if bad is not None:
            return bad
    alone: int = gathering.gather(columns, slots, anchors, extent, ids, block_steps, 0, count, rows)
    return alone
