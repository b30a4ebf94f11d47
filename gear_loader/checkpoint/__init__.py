"""Tables on disk: a directory that any tool can read, always whole, and cheap to bring up to date.

::

    manifest.json                  version, schema, sizes, rules, counts, and bytes and checksum of every file; see
                                   `.manifest`
    index.<n>.safetensors          one entry a trajectory, oldest first: sequence, length, priority, times_sampled, age
                                   (nanoseconds, when it was saved), ident (the global id that it brought, or -1),
                                   segment, first
    segments/<number>/<column>.npy whole trajectories one after another, [steps, *shape] (bfloat16 as uint16)
    .gear-loader.lock              held by whoever saves

Trajectory i is the rows ``first[i]`` to ``first[i] + length[i] - 1`` of every column in segment ``segment[i]``.

Besides the checksum of each file the manifest has one of every 4 MiB, for who reads a part (`.runs`).

Those that share blocks in memory are whole here, each for itself.

Trajectories never change once they are committed, so a save writes those that the directory does not have yet as a new
segment, a new index and a new manifest. Everything is written under names that no manifest mentions, and synced;
replacing the manifest is what makes it the checkpoint, and only then goes what the new manifest does not name. Whoever
is killed before leaves the previous checkpoint and some files that the next save removes.

Checkpoints of several tables, one a rank, are described in `.sharded`.
"""

from __future__ import annotations

from gear_loader.checkpoint.loading import load
from gear_loader.checkpoint.saving import save

__all__ = ["load", "save"]
