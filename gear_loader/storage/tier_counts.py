"""What processes know of each other about a table's disk tier: priorities of trajectories, and counts of rows.

`tier_priority` of the index has, for each slot, the generation of a trajectory (its lower 32 bits) and a priority
(float32) in one int64, so that both are read and written together without a lock. `tier_counts` has the counts below.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from gear_loader.utils.arrays import Array

(
    KEEP,  # 1 + position in `KEEPS`, of the last dataset that was made; 0: none was
    HITS,  # rows that were in memory, of batches while some trajectories were on disk only
    MISSES,  # rows that were read from disk
    READ_BYTES,
    READ_NANOSECONDS,  # during which batches were read
    PROMOTED_BYTES,  # brought back into memory
    WAIT,  # thousandths of a process's last ten seconds during which its batches were read
    WAIT_TIME,  # when they ended, as `time.monotonic_ns` tells it
    WANTED_BYTES,  # of the memory of ragged values, most that a writer has waited for since trajectories were spilled
) = range(9)
COUNTS = 16
"""Entries of `tier_counts`."""
COPIES_WIDTH, SHARED_WIDTH = 11, 21
"""Entries of a row of `stored`, see `gear_loader.storage.disk_copies`; the same in a table with prefixes."""
SLOW_SHARE = 0.7
"""Share of the time that batches are read from disk from which on the loop waits for it, whatever else it does."""
_FRESH_SECONDS = 60.0
KEEPS: tuple[Literal["newest", "oldest", "priority"], ...] = ("newest", "oldest", "priority")
"""Which trajectories stay in memory."""


def pack_priorities(generations: Array, priorities: Array) -> Array:
    """Entries of `tier_priority`, int64 [n], of generations (int64 [n]) and priorities (float32 [n])."""
    bits = priorities.astype(np.float32).view(np.uint32).astype(np.int64)
    packed: Array = (generations << 32) | bits
    return packed


def unpack_priorities(entries: Array, generations: Array, otherwise: Array) -> Array:
    """Priorities in `tier_priority`, float32 [n]; of trajectories without one those in `otherwise`, float32 [n]."""
    known = (entries >> 32) == ((generations << 32) >> 32)
    found = (entries & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
    mixed: Array = np.where(known & (entries != 0), found, otherwise)
    return mixed


def note_wait(tier: Array, share: float) -> None:
    """Note the share of its last seconds during which a process's batches were read; under the table's lock.

    The largest of the last minute over all processes stays.
    """
    now = time.monotonic_ns()
    if share >= _last_wait(tier, now):
        tier[WAIT], tier[WAIT_TIME] = round(1000 * min(share, 1.0)), now


def _last_wait(tier: Sequence[int] | Array, now: int) -> float:
    """The share that was noted last; 0.0 if that was more than a minute ago."""
    fresh = 0 <= now - int(tier[WAIT_TIME]) <= _FRESH_SECONDS * 1e9
    return int(tier[WAIT]) / 1000 if fresh else 0.0


@dataclasses.dataclass(frozen=True)
class TierCounts:
    """Counts of a disk tier since its table was created or recovered, over all processes.

    Attributes:
        hits: rows of batches that were in memory, while some trajectories were on disk only.
        misses: rows that were read from disk. read_bytes: their bytes. read_seconds: during which they were read.
        promoted_bytes: bytes of trajectories that were brought back into memory.
        disk_wait: share of ten seconds during which batches were read from disk, of the process that waited most in the
            last minute; 0.0 if none looked.
    """

    hits: int
    misses: int
    read_bytes: int
    read_seconds: float
    promoted_bytes: int
    disk_wait: float = 0.0

    @classmethod
    def of(cls, tier: Sequence[int] | Array) -> TierCounts:
        """The counts in `tier_counts`, int64 [COUNTS]."""
        return cls(
            int(tier[HITS]),
            int(tier[MISSES]),
            int(tier[READ_BYTES]),
            int(tier[READ_NANOSECONDS]) / 1e9,
            int(tier[PROMOTED_BYTES]),
            _last_wait(tier, time.monotonic_ns()),
        )
