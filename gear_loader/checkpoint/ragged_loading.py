"""Loading the values of ragged columns, whose records have been read into the blocks of a new table."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.checkpoint.names import column_file, values_of
from gear_loader.checkpoint.reading import ColumnRead, read_columns
from gear_loader.checkpoint.segments import stored_columns
from gear_loader.checkpoint.shared_places import group_columns
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
        slots, generations: int64 [n], of all trajectories. leaders: int64 [n], number of the one with which the values
            of each are stored that others have, too. first_ids: int64 [n], where the blocks of each begin in `ids`,
            int32.

    Returns:
        Bytes of the memory of values that are needed, if it has fewer; then nothing has been read. Else 0.

    Raises:
        CheckpointError: a file is damaged, or its records contradict it.
    """
    schema, heap = table.schema, table._engine.region.payload()
    files, runs = stored_columns(schema), _ValueRuns(group_columns(schema), leaders)
    # Those that trajectories begin with last: one of them may have these values among its own.
    reads = sorted((read for read in reads if read.name in schema.ragged), key=lambda read: read.begins)
    bounds = [value_bounds(schema, directory, read, ids) for read in reads]
    for read, found in zip(reads, bounds, strict=True):
        who = np.searchsorted(first_ids, read.places, side="right") - 1
        runs.add(read, found, who, schema.ragged[read.name].row_bytes)
    owners, sizes = np.concatenate(runs.owners), np.concatenate(runs.sizes)
    order, numbers = np.argsort(owners, kind="stable"), np.arange(len(owners))
    given = np.stack((owners[order], numbers, numbers + 1), axis=1), sizes[order]
    payload = Payload(*given, numbers, numbers, (), None)
    needed = needed_bytes(payload)
    if needed > heap.nbytes:
        return needed
    try:
        offsets = table._engine.index.place_payload(
            heap, payload, slots, generations, evict=REFUSE, wait=False
        )
    except TableFullError:  # by what another process has added, which is an error of the commit
        return 0
    if len(offsets) < len(order) or (offsets < 0).any():
        return 0
    targets, value_reads = np.empty_like(offsets), []
    targets[order] = offsets
    for read, found, number, new in zip(reads, bounds, runs.numbers, runs.new, strict=True):
        values, (first, ends, places) = schema.ragged[read.name], new
        spans = read.ends - read.first, read.steps_before, read.places
        move_records(*spans, ids, read.place, values.row_bytes, found, targets[number])
        place = [heap.ctypes.data, GRAIN, values.row_bytes, values.row_bytes, _LONGEST]
        value_reads.append(
            dataclasses.replace(
                read,
                name=values_of(read.name),
                column=files[values_of(read.name)],
                checksums=read.more,
                first=first,
                ends=ends,
                places=places,
                place=np.array(place, dtype=np.int64),
                before=None,
            )
        )
    read_columns(directory, value_reads, targets // GRAIN, progress=progress)
    return 0


class _ValueRuns:
    """Values that are stored one after another: those of a trajectory in a column, or what several have in common.

    Args:
        groups: the columns per group. leaders: int64 [n], as for `load_values`.

    Attributes:
        owners, sizes: int64, of each run the trajectory that it is stored with, and bytes; in parts.
        numbers: of each read int64 [m], the run of the values of each of its trajectories.
        new: of each read first rows, rows after the last, and numbers of the runs that it brings, int64 [k] each.
    """

    def __init__(self, groups: Collection[str], leaders: Array) -> None:
        self._groups, self._leaders, self._count = groups, leaders, 0
        self.owners, self.sizes = [leaders[:0]], [leaders[:0]]
        self.numbers: list[Array] = []
        self.new: list[tuple[Array, Array, Array]] = []
        # Of each file: runs of the trajectories that have all of its rows for themselves, by these and the first row.
        self._own: dict[tuple[str, str], dict[tuple[int, int], tuple[int, int]]] = {}

    def add(self, read: ColumnRead, found: Array, who: Array, row_bytes: int) -> None:
        """Add the values of a read's trajectories.

        Args:
            found: as of `value_bounds`. who: int64 [m], the trajectories. row_bytes: of a row.
        """
        shared = read.begins or read.name in self._groups
        owners = self._leaders[who] if shared else who
        keys, inverse = np.unique(np.stack((owners, found[:, 0]), axis=1), axis=0, return_inverse=True)
        inverse, ends = inverse.reshape(-1), np.zeros(len(keys), dtype=np.int64)
        np.maximum.at(ends, inverse, found[:, 1])
        numbers = self._count + np.arange(len(keys))
        new: Array = np.ones(len(keys), dtype=bool)
        known = self._own.setdefault((read.folder, read.name), {})
        if not shared:
            leads = np.isin(keys[:, 0], self._leaders)
            places = zip(numbers[leads].tolist(), ends[leads].tolist(), strict=True)
            known.update(zip(map(tuple, keys[leads].tolist()), places, strict=True))
        elif read.begins:
            for i, key in enumerate(map(tuple, keys.tolist())):
                number, end = known.get(key, (-1, -1))
                if end >= ends[i]:
                    numbers[i], new[i] = number, False
            numbers[new] = self._count + np.arange(int(new.sum()))
        self._count += int(new.sum())
        self.owners.append(keys[new, 0])
        self.sizes.append((ends - keys[:, 1])[new] * row_bytes)
        self.numbers.append(numbers[inverse])
        first, ends, numbers = keys[new, 1], ends[new], numbers[new]
        order = np.lexsort((ends, first))
        self.new.append((first[order], ends[order], numbers[order]))


def value_bounds(schema: Schema, directory: Directory, read: ColumnRead, ids: Array) -> Array:
    """First row of the values of each trajectory of a read in their file, and the row after their last; int64 [n, 2].

    Raises:
        CheckpointError: the records contradict the file.
    """
    found: Array = np.empty((len(read.first), 2), dtype=np.int64)
    most = read.segment.values[values_of(read.name)]
    find_values(read.ends - read.first, read.steps_before, read.places, ids, read.place, most, found)
    following = found[1:, 0] >= found[:-1, 1]
    if read.begins or read.name in group_columns(schema):
        following |= (read.first[1:] == read.first[:-1]) & (found[1:, 0] == found[:-1, 0])
    if (found < 0).any() or not following.all():
        where = read.segment.archive or directory.at(read.folder)
        raise CheckpointError(
            f"{where}/{column_file(read.name)} is damaged: its records do not name {most:,} rows of values one "
            f"after another. {REMEDY}"
        )
    return found
