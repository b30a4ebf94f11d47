"""The index of a checkpoint: a file of records, to which a table that is written in the background appends.

The manifest says how many bytes of it are valid, and their checksum; what follows is of a write that did not end. The
last record of a trajectory counts, and one with the length 0 says that it is gone. After each write come records of no
trajectory, so that no later one touches a block of the disk with valid bytes: a torn block damages one manifest's
records, and not those of the manifest before it too.

The file may be damaged or come from an untrusted source; every value is checked before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from gear_loader.checkpoint import old_versions
from gear_loader.checkpoint.directory import REMEDY, Directory, named
from gear_loader.checkpoint.json_file import FileRecord, read_limited
from gear_loader.checkpoint.manifest import LARGEST_COUNT, Manifest
from gear_loader.checkpoint.names import MANIFEST_NAME, PART, index_file
from gear_loader.checkpoint.open_files import NewFile
from gear_loader.checkpoint.trajectory_records import (
    SHARING,
    as_sharing,
    ids_of,
    newest_of,
    no_records,
    own_rows,
    record_of,
)
from gear_loader.errors import CheckpointError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.ids import LARGEST_ID, following
from gear_loader.utils.arrays import Array

_LARGEST_TIMES = 2**31 - 1
_SPARE = 1 << 12
"""Records that a file may have in any case before it is written anew."""
_BLOCK = 4096
"""Bytes that a disk may damage together."""


class IndexFile:
    """The index that a save has written, to which the next one can append.

    Attributes:
        name: of the file. dtype: of its records.
        record: its valid bytes and their checksum.
    """

    def __init__(self, name: str, dtype: Any) -> None:
        self.name, self._checksum, self._size, self._dtype = name, xxhash.xxh3_128(), 0, dtype
        self.record = FileRecord(0, self._checksum.hexdigest())

    @classmethod
    def write(cls, directory: Directory, number: int, records: Array) -> IndexFile:
        """Write a new file with the records of all trajectories, and sync it."""
        file = cls(index_file(number, directory.token), records.dtype)
        name, size = file.name + PART, (len(records) + _BLOCK) * records.dtype.itemsize
        with directory.new_file(name, size) as part, named(directory.at(name)):
            file._put(part, records)
        directory.rename(name, file.name)
        return file

    def _put(self, file: NewFile, records: Array) -> None:
        """Write and sync records, and others up to the next block."""
        data = np.ascontiguousarray(records).view(np.uint8).data
        self._size += len(data)
        self._checksum.update(data)
        self.record = FileRecord(self._size, self._checksum.hexdigest())
        rest = no_records(-(-(-self._size % _BLOCK) // self._dtype.itemsize), self._dtype).tobytes()
        self._size += len(rest)
        self._checksum.update(rest)
        for part in (data, memoryview(rest)):
            file.write(part)
        file.sync()

    def has_room(self, more: int, live: int) -> bool:
        """Whether `more` records can be appended; else half of the file would be out of date.

        Args:
            live: number of trajectories.
        """
        return self._size // int(self._dtype.itemsize) + more <= _most_records(live)

    def append(self, directory: Directory, records: Array) -> IndexFile:
        """Append records, sync the file, and return it as it is then.

        Raises:
            CheckpointError: the file was cut or changed.
        """
        name, after = self.name, IndexFile(self.name, self._dtype)
        after._size, after._checksum = self._size, self._checksum.copy()
        with directory.open_to_append(name) as file, named(directory.at(name)):
            found = os.fstat(file.fileno()).st_size
            if found != self._size:
                raise CheckpointError(
                    f"{directory.at(name)} has {found:,} bytes; expected {self._size:,}: it was cut or changed. "
                    "The next write replaces it."
                )
            after._put(NewFile(file), records)
        return after


def _most_records(live: int) -> int:
    """Most records of a file, for a number of trajectories."""
    return 2 * live + _SPARE


def read_records(directory: Directory, manifest: Manifest) -> Array:
    """Read and check the index.

    Returns:
        Records of all trajectories, oldest first; `created` is less than 0 by their age.

    Raises:
        CheckpointError: the index is missing, damaged, or contradicts the manifest.
    """
    path = directory.at(manifest.index_name)
    expected, old = manifest.index.bytes, manifest.has_old_index
    dtype = record_of(manifest.shares)
    if old:
        limit = old_versions.largest_index(manifest.schema, manifest.num_trajectories)
    else:
        limit = _most_records(manifest.num_trajectories) * dtype.itemsize

    def check(size: int) -> None:
        if size < expected or (old and size > expected):
            raise CheckpointError(f"{path} has {size:,} bytes; expected {expected:,}. {REMEDY}")
        if expected > limit:
            raise CheckpointError(
                f"{path} has {expected:,} bytes; expected at most {limit:,} for {manifest.num_trajectories:,} "
                f"trajectories. {REMEDY}"
            )

    try:
        data = read_limited(directory, manifest.index_name, check, expected)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {MANIFEST_NAME} beside it names it. {REMEDY}") from error
    found = xxhash.xxh3_128_hexdigest(data)
    if found != manifest.index.xxh128:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {found}, expected {manifest.index.xxh128}. {REMEDY}"
        )
    if old:
        records = old_versions.records_of(path, data, manifest.schema, manifest.num_trajectories)
    elif expected % dtype.itemsize:
        raise CheckpointError(
            f"{path} has {expected} bytes, which are no whole records of {dtype.itemsize}. {REMEDY}"
        )
    else:
        records = newest_of(np.frombuffer(data, dtype=dtype))
    records = as_sharing(records) if manifest.prefixes else records
    problem = _problem(records, manifest)
    if problem:
        raise CheckpointError(f"{path} contradicts {MANIFEST_NAME}: {problem}. {REMEDY}")
    records["created"] = np.minimum(records["created"], manifest.clock) - manifest.clock
    return records


def _problem(records: Array, manifest: Manifest) -> str | None:
    """The first inconsistency of the records, or None."""
    if len(records) != manifest.num_trajectories:
        return f"there are {len(records)} trajectories, expected {manifest.num_trajectories}"
    if not len(records):
        return None if manifest.num_steps == 0 else "there are steps and no trajectory"
    sequence, length, first = records["sequence"], records["length"], records["first"]
    if sequence[0] < 0 or sequence[-1] >= manifest.next_sequence or (np.diff(sequence) <= 0).any():
        return f"sequence numbers do not ascend from 0 to {manifest.next_sequence - 1}"
    if length.min() < 1 or length.max() > manifest.max_steps:
        return f"a length is not between 1 and {manifest.max_steps}"
    if length.sum() != manifest.num_steps:
        return f"lengths add up to {length.sum()}, expected {manifest.num_steps}"
    if records["final"].min() < 0 or records["final"].max() > 1:
        return "a number of final steps is not 0 or 1"
    edits = 0 if manifest.schema.mutable else records["filled"].max() >> len(manifest.schema.late)
    if records["filled"].min() < 0 or edits:
        return f"bits of filled columns are not of {len(manifest.schema.late)} late ones"
    priority = records["priority"][records["priority"] != UNSET]
    if not (np.isfinite(priority) & (priority >= 0)).all():
        return f"a priority is neither {UNSET:g} nor finite and at least 0"
    times = records["times_sampled"]
    most = (manifest.rules.max_times_sampled or _LARGEST_TIMES + 1) - 1
    if times.min() < 0 or times.max() > most:
        return f"a trajectory was drawn less than 0 or more than {most} times"
    if records["created"].min() < manifest.clock - LARGEST_COUNT:
        return f"an age is not between 0 and {LARGEST_COUNT}"
    if records["ident"].min() < -1 or records["ident"].max() > LARGEST_ID:
        return f"an id is neither -1 nor between 0 and {LARGEST_ID}"
    ids = np.sort(ids_of(records, manifest.origin))  # `np.unique` takes several times as long
    if (ids[1:] == ids[:-1]).any():
        return "two trajectories have the same id"
    if following(records["ident"], manifest.origin or 0) > manifest.next_sequence:
        return f"an id of the table's own origin has a number above {manifest.next_sequence - 1}"
    steps, rows = {segment.number: segment.steps for segment in manifest.segments}, own_rows(records)
    counts = {segment.number: segment.trajectories for segment in manifest.segments}
    if records.dtype == SHARING and (problem := _problem_of_shared(records, steps, counts, manifest)):
        return problem
    for number in sorted(set(records["segment"].tolist())):
        if number not in steps:
            return f"segment {number} does not exist"
        here = np.flatnonzero(records["segment"] == number)
        here = here[np.argsort(first[here], kind="stable")]
        # By subtraction: the sum of two invalid numbers could overflow.
        if first[here[0]] < 0 or (first[here] > steps[number] - rows[here]).any():
            return f"a trajectory lies outside segment {number}, which has {steps[number]} steps"
        if (np.diff(first[here]) < rows[here[:-1]]).any():
            return f"two trajectories of segment {number} overlap"
        place = records["place"][here]
        if manifest.schema.per_trajectory and (
            place[0] < 0 or place[-1] >= counts[number] or (np.diff(place) <= 0).any()
        ):
            return f"places in segment {number} do not ascend from 0 to {counts[number] - 1}"
    return None


def _problem_of_shared(
    records: Array, steps: Mapping[int, int], counts: Mapping[int, int], manifest: Manifest
) -> str | None:
    """The first inconsistency of what records say of shared rows, or None.

    Args:
        steps, counts: of each segment, by its number.
    """
    rows = records["begin_rows"]
    if rows.min() < 0 or (rows > np.minimum(records["length"], own_rows(records) + rows - 1)).any():
        return "a number of shared steps is below 0, or as large as a trajectory"
    for segments, first, most, sizes in (
        ("begin_segment", "begin_first", rows, steps),
        ("group_segment", "group_place", 1, counts if manifest.schema.per_trajectory else None),
    ):
        used = np.flatnonzero(np.broadcast_to(most, len(records)) > 0)
        numbers, at = records[segments][used], records[first][used]
        known, inverse = np.unique(numbers, return_inverse=True)
        if missing := sorted(set(known.tolist()) - set(steps)):
            return f"segment {missing[0]} does not exist"
        if sizes is not None:
            end = np.array([sizes[number] for number in known.tolist()], dtype=np.int64)[inverse.reshape(-1)]
            if (at < 0).any() or (at > end - np.broadcast_to(most, len(records))[used]).any():
                return "what trajectories share lies outside of its segment"
    return None
