"""A thread pool that gathers one batch in parallel.

Waking a sleeping thread takes about 80 us on a virtual machine, as long as gathering a small batch. So the rows are cut
into chunks, which all members take from one counter: the caller starts at once, and members that wake up late find
fewer chunks. If batches follow each other closely (about 0.1 ms of drawing and bookkeeping between them), an idle
member polls for 0.3 ms before it sleeps, so that it is awake for the next batch. A consumer that works on its batch for
longer needs the cores, so members sleep at once. The caller gathers batches of up to 2 MiB alone: waking a thread takes
about as long as half of the copy. Members keep off the caller's processor, where Linux may wake them although others
are idle: there they would wait until the copy is done.

All of this runs in compiled code without the GIL (`gear_loader.native.sharing`), through the mailbox defined there:
signals arrive when a batch is finished.
"""

from __future__ import annotations

import functools
import os
import threading

import numpy as np
import torch

from gear_loader.native import gathering, sharing, system_calls
from gear_loader.utils.arrays import Array

MAX_THREADS = 1 + sharing.MAX_MEMBERS if system_calls.KNOWN else 1
_CHUNK_BYTES = 1 << 17
_ALONE_BYTES = 1 << 21
"""Largest batch that the caller gathers alone. On two shared cores 32 trajectories of 42 KB took it 98 us at best and
180 us in the median, with a member 194 us and 488 us; 128 of them took 534 us and 463 us at best.
Since members keep off the caller's processor, 32 take 90 us with a member instead of 110 after a pause, but 180 instead
of 134 right after a call of torch, whose threads still poll."""


class _ThreadPool:
    """The caller and `members` threads."""

    def __init__(self, members: int) -> None:
        self._members = members
        memory = np.zeros(sharing.MAILBOX + 8, dtype=np.int64)
        self.mailbox = memory[-memory.ctypes.data // 8 % 8 :][: sharing.MAILBOX]  # aligned to a cache line
        self.mailbox[sharing.KEPT_OFF] = -1
        self.mailbox[sharing.STATE : sharing.STATE + members] = sharing.ASLEEP
        for member in range(members):
            thread = threading.Thread(
                target=sharing.serve,
                args=(self.mailbox, member),
                name=f"gear-loader-{member}",
                daemon=True,
            )
            thread.start()
            assert thread.native_id is not None
            self.mailbox[sharing.MEMBERS + member] = thread.native_id

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
    ) -> int:
        """Gather all entries in `chunks` chunks; see `sharing.share`."""
        places = 0 if rows is None else rows.ctypes.data
        index = extent, ids, steps
        bad: int = sharing.share(self.mailbox, self._members, chunks, columns, slots, anchors, *index, places)
        return bad


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
        if bad != sharing.BUSY:
            return bad
    alone: int = gathering.gather(columns, slots, anchors, extent, ids, block_steps, 0, count, rows)
    return alone
