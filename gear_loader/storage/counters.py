"""Positions in `counters`, the int64 array at the head of an index.

OLDEST and NEWEST hold slot + 1, or 0 for no slot, so that zeros describe an empty table. These numbers are compiled
into the operations, and numba's cache stays valid until the file of a function changes. So `operations.view` asserts
`DIGEST` and must be edited when a number changes.
"""

from __future__ import annotations

import zlib

(
    EPOCH,
    VERSION,
    NUM_READY,
    NUM_STEPS,
    NUM_WRITING,
    WRITING_STEPS,
    WRITING_BLOCKS,
    NUM_FREE_SLOTS,
    NUM_FREE_BLOCKS,  # of those that writers get
    NEXT_SEQUENCE,
    HALF,
    HEAD,  # two entries, one per half: used entries of `block_ids`
    _HEAD_1,
    FLIP_EPOCH,
    OLDEST,
    NEWEST,
    RETIRED_FIRST,
    NUM_RETIRED,
    RETIRED_BLOCKS,  # blocks of writers used by retired trajectories only
    DIRTY,
    INITIALIZED,
    NUM_EVICTED,
    NUM_REMOVED,
    NUM_EXPIRED,  # removed by `max_age` or `max_times_sampled`
    MOVING,  # 1 + the half that block tables are being moved to, or 0
    NUM_TOUCHED,  # entries written to the ring `touched` so far
    COMMITTING,
    REMOVING,
    DRAWING,
    DRAWING_TIMES,
    DRAWING_TOTAL,
    STREAMS,  # streams cut into trajectories with shared blocks so far
    RUNS,  # compactions of the block tables; each drops the reserve of growing block tables
    FIRST_SEQUENCE,  # NEXT_SEQUENCE minus the trajectories committed so far, as rate limiters count them
    NUM_SAMPLED,  # rows drawn so far
    INSERT_WAIT,  # nanoseconds that writers have waited for space or the rate limiter
    SAMPLE_WAIT,  # nanoseconds that readers have waited for the rate limiter
    ORIGIN,  # 1 + the table's shard number, or 0
    RAISING,
    RAISING_FIRST,
    LEAVING,
    LEAVING_COUNT,
    LEAVING_TOTAL,
    TIERED,  # 1 if trajectories move out of the blocks that writers get
    NUM_SPILLED,  # live trajectories that do
    NUM_PARKED,  # entries of `parked`
    PARKED_EPOCH,  # epoch in which their trajectories were spilled
    WANTED_BLOCKS,  # most blocks that a writer has waited for since trajectories were spilled last
    SPILLER,  # pid of the process that spills, or 0
    SPILLER_START,  # its start time
    DISK_FULL,  # 1 while it cannot, because the disk is full
    NUM_LOST,  # trajectories removed because they could not be read from disk
    POLICY,  # version of the policy, see `Table.advance_version`
    LAG_CHECKED,  # NUM_TOUCHED up to which versions of trajectories were compared with it; -1: compare all
    NUM_OUTDATED,  # removed by `max_lag`
) = range(55)
LOGGED = slice(55, 56)
"""Bytes of the sealed log of `gear_loader.storage.edit_log`, or 0."""
BELL = 56
"""The futex of `gear_loader.storage.lock`, 8 bytes."""
TOLD = slice(57, 58)
"""1 when a process has logged that the table wastes memory."""
COMING_BACK = 58
"""1 + the slot whose ragged values get memory, while a trajectory comes back from disk; or 0."""
WRITABLE_BLOCKS = 59
"""Blocks that writers get, the last ones; the others are those of `Table.create(host=)`."""
IDENTITY = slice(60, 64)
"""Used by checkpoints: random name of the table; save that it was loaded from, or 0; pid and start time of the process
that named a private table, because a forked child has its own copy."""
DIGEST = zlib.crc32(
    repr(sorted((name, value) for name, value in globals().items() if type(value) is int)).encode()
)
"""CRC-32 of all names and numbers above."""
