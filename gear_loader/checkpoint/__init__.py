"""Checkpoints of tables: directories that other tools can read, saved incrementally and atomically::

    manifest.json                     version, schema, sizes, rules, counts, names of columns' files, and the segments
    index.<n>.records                 records of trajectories; save n began the file, and later ones of a table that
                                      is written in the background append to it
    segments/<number>/<column>.npy    whole trajectories one after another, [steps, *shape] (bfloat16 as uint16); of a
                                      column per trajectory, [trajectories, *shape]; of a ragged column int64 [.., 2],
                                      the first row and the rows of each value in <column>%values.npy, [rows, *shape]
    segments/<number>/checksums.xxh3  of every 4 MiB of these files
    manifest.previous.json            the manifest before it, of tables that are written in the background
    .gear-loader.lock                 locked by a save while it runs, or while a table is written in the background

The modules are `.manifest`, `.trajectory_records` and `.segments`.

Trajectory i is the rows ``first[i]`` to ``first[i] + length[i] - 1`` of every column in segment ``segment[i]``, and the
row ``place[i]`` of columns per trajectory.

The manifest has a checksum of the index and of each file of checksums, so its size does not grow with the data; and
several threads can read and check parts of a column (`.reading`). Trajectories with overlapping chunks, which share
blocks in memory, are stored separately, each as a whole.

In a table whose trajectories may share steps and values per group (`Memory(prefixes=True)`) these are stored once
(`.shared_places`), the records have 112 bytes, and the version is 6: ``begin_rows`` steps of a trajectory are the rows
from ``begin_first`` on of segment ``begin_segment``, and only what follows them is at ``first``. Its values per group
are those that row ``group_place`` of these columns in segment ``group_segment`` names.

The manifest says which fields a record has, and how many bytes of the index are valid. The last record of a trajectory
counts; one of length 0 says that it is gone, or fills a block of the disk::

    fields = json.load(open("manifest.json"))["index"]
    record = np.dtype([tuple(field) for field in fields["record"]])
    records = np.fromfile(fields["path"], record, fields["bytes"] // record.itemsize)

A new index is written when more than half of the records are out of date, as segments are of which less than half is
live.

Committed trajectories never change, except that they may grow, or that values of theirs are filled once, or
overwritten: then they are written again. A save therefore writes new segments with the trajectories that the directory
does not have yet, a new index or the end of one, and a new manifest. It writes where no manifest points to, syncs that,
and replaces the manifest: this makes the new checkpoint valid. Then it removes the files that the new manifest does not
name. A save that is killed earlier leaves the previous checkpoint and files that the next save removes.

`.behind` saves a table in the background. There the files of the previous manifest are kept too, and `Table.recover`
takes that one if a file of the current one is damaged.

`.sharded` describes checkpoints of several tables, one per rank.
"""

from __future__ import annotations

__all__: list[str] = []
