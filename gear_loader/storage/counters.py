"""Places in `counters`, the int64 array at the head of an index.

OLDEST and NEWEST hold slot + 1, 0 for no slot, so that zeros describe an empty table. The compiled operations have
these numbers in their code: `operations` checks `DIGEST`, and has to be edited when one of them changes, as numba takes
machine code on disk for current until the file of its functions changes.
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
    NUM_FREE_BLOCKS,
    NEXT_SEQUENCE,
    HALF,
    HEAD,  # two entries, one a half
    _HEAD_1,
    FLIP_EPOCH,
    OLDEST,
    NEWEST,
    RETIRED_FIRST,
    NUM_RETIRED,
    RETIRED_BLOCKS,  # blocks of which nothing but retired trajectories is left
    DIRTY,
    INITIALIZED,
    NUM_EVICTED,
    NUM_REMOVED,
    NUM_EXPIRED,  # removed by age, or because they had been sampled often enough
    MOVING,  # 1 + the half to which the block tables are being moved, 0 for none
    NUM_TOUCHED,  # entries ever written to the ring `touched`
    COMMITTING,
    REMOVING,
    DRAWING,
    DRAWING_TIMES,
    DRAWING_TOTAL,
    STREAMS,  # streams of steps ever cut into trajectories that share blocks
    RUNS,  # how often block tables have been packed: room behind one that was kept for growth is lost then
    FIRST_SEQUENCE,  # NEXT_SEQUENCE less the trajectories ever committed, as rate limiters count them
    NUM_SAMPLED,  # rows ever drawn
    INSERT_WAIT,  # nanoseconds that writers have waited, for room or for the rate limiter
    SAMPLE_WAIT,  # nanoseconds that readers have waited for the rate limiter
    ORIGIN,  # 1 + the table's shard number, 0 if it has none
    RAISING,
    RAISING_FIRST,
    LEAVING,
    LEAVING_COUNT,
    LEAVING_TOTAL,
) = range(43)
BELL = 56
"""8 bytes of `gear_loader.storage.lock`."""
IDENTITY = slice(60, 64)
"""Places that belong to checkpoints: a random name for the table; the save that it was loaded from, or 0; and for a
private table the process that got the name, since a forked child has a table of its own from then on."""
DIGEST = zlib.crc32(
    repr(sorted((name, value) for name, value in globals().items() if type(value) is int)).encode()
)
"""Of all names and numbers above."""
