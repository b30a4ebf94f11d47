"""Loading the values of ragged columns, whose records have been read into the blocks of a new table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.checkpoint.names import column_file, values_of
from gear_loader.checkpoint.reading import ColumnRead, read_columns
from gear_loader.checkpoint.segments import stored_columns
from gear_loader.checkpoint.sharing import group_columns
from gear_loader.errors import CheckpointError, TableFullError
from gear_loader.native.ragged_copies import find_values, move_records
from gear_loader.storage.operations.extents import GRAIN
from gear_loader.storage.operations.view import REFUSE
from gear_loader.storage.payload import needed_bytes
from gear_loader.storage.ragged_input import Payload
from gear_loader.storage.schema import Schema
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

_LONGEST = 1 << 44
"""Rows of a block of values: all of them."""


def load_values(
    table: Table,
    directory: Directory,
    reads: Sequence[ColumnRead],
    slots: Array,
    generations: Array,
    leaders: Array,
    first_ids: Array,
    ids: Array,
    *,
    progress: bool,
) -> int:
    """Read the values of trajectories into the memory of ragged values, and complete their records.

    Args:
        table: the new table, in which nothing is committed. directory: the loaded one.
        reads: the reads that have put the records into the blocks, and others.
        slots, generations: int64 [n], of all trajectories. leaders: int64 [n], number of the one whose values per group
            each has. first_ids: int64 [n], where the blocks of each begin in `ids`, int32.

    Returns:
        Bytes of the memory of values that are needed, if it has fewer; then nothing has been read. Else 0.

    Raises:
        CheckpointError: a file is damaged, or its records contradict it.
    """
    schema, heap = table.schema, table._engine.region.payload()
    names, files = list(schema.ragged), stored_columns(schema)
    reads = [read for read in reads if read.name in schema.ragged]
    bounds = [value_bounds(schema, directory, read, ids) for read in reads]
    owners = [np.searchsorted(first_ids, read.places, side="right") - 1 for read in reads]
    groups = group_columns(schema)
    owners = [
        leaders[each] if read.name in groups else each for read, each in zip(reads, owners, strict=True)
    ]
    sizes: Array = np.zeros((len(slots), len(names)), dtype=np.int64)
    for read, found, owner in zip(reads, bounds, owners, strict=True):
        row_bytes = schema.ragged[read.name].row_bytes
        sizes[owner, names.index(read.name)] = (found[:, 1] - found[:, 0]) * row_bytes
    numbers = np.arange(sizes.size)
    runs = np.stack((np.repeat(np.arange(len(slots)), len(names)), numbers, numbers + 1), axis=1)
    payload = Payload(runs, sizes.reshape(-1), numbers, numbers, (), None)
    needed = needed_bytes(payload)
    if needed > heap.nbytes:
        return needed
    try:
        offsets = table._engine.index.place_payload(
            heap, payload, slots, generations, evict=REFUSE, wait=False
        )
    except TableFullError:  # by what another process has added, which is an error of the commit
        return 0
    targets = offsets.reshape(sizes.shape)
    if (targets < 0).any():
        return 0
    blocks, value_reads = (targets // GRAIN).reshape(-1), []
    for read, found, owner in zip(reads, bounds, owners, strict=True):
        number, values = names.index(read.name), schema.ragged[read.name]
        rows = read.ends - read.first
        move_records(rows, read.places, ids, read.place, values.row_bytes, found, targets[owner, number])
        _, once = np.unique(
            owner, return_index=True
        )  # what several share is read once, and lies in one place
        once = np.sort(once)
        place = [heap.ctypes.data, GRAIN, values.row_bytes, values.row_bytes, _LONGEST]
        value_reads.append(
            dataclasses.replace(
                read,
                name=values_of(read.name),
                column=files[values_of(read.name)],
                checksums=read.more,
                first=np.ascontiguousarray(found[once, 0]),
                ends=np.ascontiguousarray(found[once, 1]),
                places=owner[once] * len(names) + number,
                place=np.array(place, dtype=np.int64),
            )
        )
    read_columns(directory, value_reads, blocks, progress=progress)
    return 0


def value_bounds(schema: Schema, directory: Directory, read: ColumnRead, ids: Array) -> Array:
    """First row of the values of each trajectory of a read in their file, and the row after their last; int64 [n, 2].

    Raises:
        CheckpointError: the records contradict the file.
    """
    found: Array = np.empty((len(read.first), 2), dtype=np.int64)
    most = read.segment.values[values_of(read.name)]
    find_values(read.ends - read.first, read.places, ids, read.place, most, found)
    following = found[1:, 0] >= found[:-1, 1]
    if read.name in group_columns(schema):
        following |= (read.first[1:] == read.first[:-1]) & (found[1:] == found[:-1]).all(axis=1)
    if (found < 0).any() or not following.all():
        where = read.segment.archive or directory.at(read.folder)
        raise CheckpointError(
            f"{where}/{column_file(read.name)} is damaged: its records do not name {most:,} rows of values one "
            f"after another. {REMEDY}"
        )
    return found
