"""A thread pool that gathers one batch in parallel, padded or packed.

Waking a sleeping thread takes about 80 us on a virtual machine, as long as gathering a small batch. So the rows are cut
into chunks, which all members take from one counter: the caller starts at once, and members that wake up late find
fewer chunks. If batches follow each other closely (about 0.1 ms of drawing and bookkeeping between them), an idle
member polls for 0.3 ms before it sleeps, so that it is awake for the next batch. A consumer that works on its batch for
longer needs the cores, so members sleep at once. The caller gathers batches of up to 1 MiB alone: waking a thread takes
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

from gear_loader.native import gathering, packed, sharing, system_calls
from gear_loader.utils.arrays import Array, data_address

MAX_THREADS = 1 + sharing.MAX_MEMBERS if system_calls.KNOWN else 1
_CHUNK_BYTES = 1 << 17
_ALONE_BYTES = 1 << 20
"""Largest batch that the caller gathers alone. On two cores, loops that ask at once take for 32 trajectories of 42 KB
140 us with a member and 247 without, for 1,024 windows of 1.9 KB 370 and 540. After a pause of 2 ms, or a call of torch
whose threads still poll, the first take about as long either way, and the windows 0.8 of the time."""


class _ThreadPool:
    """The caller and `members` threads."""

    def __init__(self, members: int) -> None:
        self._members = members
        memory = np.zeros(sharing.MAILBOX + 8, dtype=np.int64)
        self.mailbox = memory[-memory.ctypes.data // 8 % 8 :][: sharing.MAILBOX]  # aligned to a cache line
        self.mailbox[sharing.KEPT_OFF] = -1
        self.mailbox[sharing.STATE : sharing.STATE + members] = sharing.ASLEEP
        none: Array = np.zeros(sharing.JOB_WORDS, dtype=np.int64)
        for member in range(members):
            given = self.mailbox, member, members, none, 0
            name = f"gear-loader-{member}"
            thread = threading.Thread(target=sharing.run, args=given, name=name, daemon=True)
            thread.start()
            assert thread.native_id is not None
            self.mailbox[sharing.MEMBERS + member] = thread.native_id

    def run(self, job: Array, chunks: int) -> int:
        """See `sharing.run`."""
        bad: int = sharing.run(self.mailbox, sharing.CALLER, self._members, job, chunks)
        return bad


@functools.cache
def _pool(pid: int, members: int) -> _ThreadPool:
    return _ThreadPool(members)


def alone(count: int, row_bytes: int) -> bool:
    """Whether the caller gathers a batch of `count` rows alone."""
    return count == 1 or count * row_bytes <= alone_bytes()


def alone_bytes() -> int:
    """Bytes of the largest batch of several rows that the caller gathers alone."""
    return _ALONE_BYTES if torch.get_num_threads() > 1 and MAX_THREADS > 1 else 1 << 62


def _share(job: Array, rows: int, size: int) -> int:
    """Let threads process a job over so many rows, of `size` bytes together; BUSY, having done nothing, if the caller
    has to gather alone."""
    members = min(torch.get_num_threads(), MAX_THREADS) - 1
    chunks = min(rows, size // _CHUNK_BYTES, 16 * (members + 1))
    if members == 0 or chunks <= 1:
        return sharing.BUSY
    return _pool(os.getpid(), members).run(job, chunks)


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
    """Gather a padded batch by as many threads as torch uses (at most `MAX_THREADS`).

    Args:
        columns, slots, anchors, extent, ids, block_steps: as for `gear_loader.native.gathering.gather`, of all entries;
            all contiguous.
        row_bytes: bytes of one row of the batch, which determine the number of chunks.
        rows: int64 [n], contiguous, distinct: row of the batch for each entry; None: row b for entry b.

    Returns:
        As `gear_loader.native.gathering.gather`.
    """
    count = len(slots)
    if not alone(count, row_bytes):
        job = _job(columns, slots, anchors, extent, ids, block_steps, rows)
        bad = _share(job, count, count * row_bytes)
        if bad != sharing.BUSY:
            return bad
    return int(gathering.gather(columns, slots, anchors, extent, ids, block_steps, 0, count, rows))


def gather_packed(
    columns: Array,
    once: Array,
    slots: Array,
    spans: Array,
    starts: Array,
    extent: Array,
    ids: Array,
    block_steps: int,
    position: Array,
    streams: bool,
    rows: Array,
    *,
    size: int,
) -> int:
    """Gather a packed batch by as many threads as torch uses (at most `MAX_THREADS`).

    Args:
        size: bytes of the batch. The others: as for `gear_loader.native.packed.gather_packed`; all contiguous.

    Returns:
        As `gear_loader.native.packed.gather_packed`.
    """
    if size > alone_bytes():
        job = _job(columns, slots, spans, extent, ids, block_steps, rows)
        job[sharing.PACKED] = 1
        job[sharing.ONCE], job[sharing.NUM_ONCE] = data_address(once), len(once)
        job[sharing.STARTS], job[sharing.BATCH] = data_address(starts), len(slots)
        job[sharing.POSITION], job[sharing.NUM_STEPS] = data_address(position), len(position)
        job[sharing.STREAMS] = streams
        bad = _share(job, len(rows), size)
        if bad != sharing.BUSY:
            return bad
    index = extent, ids, block_steps
    return int(packed.gather_packed(columns, once, slots, spans, starts, *index, position, streams, rows))


def _job(
    columns: Array,
    slots: Array,
    anchors: Array,
    extent: Array,
    ids: Array,
    block_steps: int,
    rows: Array | None,
) -> Array:
    """The words of a job that both kinds have; the caller keeps the arrays alive."""
    job: Array = np.zeros(sharing.JOB_WORDS, dtype=np.int64)
    job[sharing.ROWS] = len(slots) if rows is None else len(rows)
    job[sharing.COLUMNS], job[sharing.NUM_COLUMNS] = data_address(columns), len(columns)
    job[sharing.SLOTS], job[sharing.ANCHORS] = data_address(slots), data_address(anchors)
    job[sharing.EXTENT], job[sharing.NUM_SLOTS] = data_address(extent), len(extent)
    job[sharing.IDS], job[sharing.NUM_IDS] = data_address(ids), len(ids)
    job[sharing.STEPS] = block_steps
    job[sharing.PLACES] = 0 if rows is None else data_address(rows)
    return job
