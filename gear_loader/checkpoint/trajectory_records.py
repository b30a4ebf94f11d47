"""The record of one trajectory, in memory and in the index of a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gear_loader.storage.ids import joined
from gear_loader.utils.arrays import Array

_FIELDS = [
    ("sequence", "<i8"),  # number in order of commitment
    ("length", "<i8"),  # steps; 0 in an index: the trajectory with this number is gone
    ("created", "<i8"),  # time of the commit, nanoseconds of the manifest's `clock`
    ("ident", "<i8"),  # global id that it was added with, -1 if the table assigned one
    ("filled", "<i8"),  # bits of the late columns that are filled
    ("times_sampled", "<i4"),  # draws so far, 0 if the table does not count them
    ("priority", "<f4"),  # -1 if not given
    ("final", "<i4"),  # final steps (0 or 1), which follow the steps in the segment
    ("place", "<i4"),  # position among the trajectories of the segment: its row of columns per trajectory
    ("segment", "<i8"),  # number of the segment
    ("first", "<i8"),  # first row in the segment
]
RECORD = np.dtype(_FIELDS)
"""`gear_loader.native.saving_loops` knows its words."""
SHARING = np.dtype(
    [
        *_FIELDS,
        ("begin_rows", "<i8"),  # first steps that are not among its rows: those of another trajectory
        ("begin_segment", "<i8"),  # number of the segment that has them, and their first row there
        ("begin_first", "<i8"),
        ("group_segment", "<i8"),  # number of the segment that has its values per group, and the place there
        ("group_place", "<i8"),
    ]
)
"""The record in a table whose trajectories may share steps and values."""


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counters of a table. See `Manifest`."""

    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int
    policy_version: int


def record_of(shares: bool) -> Any:
    """`SHARING`, or `RECORD`."""
    return SHARING if shares else RECORD


def words_of(records: Array) -> Array:
    """The words of records, int64 [n, words]."""
    return np.ascontiguousarray(records).view(np.int64).reshape(-1, records.dtype.itemsize // 8)


def no_records(count: int = 0, dtype: Any = RECORD) -> Array:
    """Records, [count], that are of no trajectory: with the number -1."""
    records: Array = np.zeros(count, dtype=dtype)
    records["sequence"] = -1
    return records


def rows_of(records: Array) -> Array:
    """Rows of trajectories, int64 [n]: steps and final steps."""
    rows: Array = records["length"] + records["final"]
    return rows


def own_rows(records: Array) -> Array:
    """Rows that the segment has of them, int64 [n]: without those of others that they begin with."""
    return rows_of(records) - records["begin_rows"] if records.dtype == SHARING else rows_of(records)


def segments_of(records: Array) -> Array:
    """Numbers of the segments in which something of trajectories is, int64 [n, 1] or [n, 3]."""
    segment = records["segment"]
    if "begin_rows" not in (records.dtype.fields or {}):
        return np.stack((segment,), axis=1)
    begin = np.where(records["begin_rows"] > 0, records["begin_segment"], segment)
    return np.stack((segment, begin, records["group_segment"]), axis=1)


def as_sharing(records: Array) -> Array:
    """Records of an earlier version, in which each trajectory has everything for itself, as `SHARING`."""
    if records.dtype == SHARING:
        return records
    found = no_records(len(records), SHARING)
    for name in RECORD.names or ():
        found[name] = records[name]
    found["group_segment"], found["group_place"] = records["segment"], records["place"]
    return found


def ids_of(records: Array, origin: int | None) -> Array:
    """Global ids of trajectories, int64 [n].

    Args:
        origin: shard number of their table, or None.
    """
    ident = records["ident"]
    return np.where(ident >= 0, ident, joined(records["sequence"], origin or 0))


def newest_of(records: Array) -> Array:
    """The last record of each trajectory of an index, oldest trajectory first, without those that are gone."""
    sequence = records["sequence"]
    order = np.argsort(sequence, kind="stable")
    sequence = sequence[order]
    last = np.ones(len(records), dtype=bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    order = order[last & (records["length"][order] != 0)]
    # As words: indexing with records takes ten times as long.
    found: Array = words_of(records)[order].reshape(-1).view(records.dtype)
    return found
