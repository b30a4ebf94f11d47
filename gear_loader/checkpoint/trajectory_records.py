"""The record of one trajectory, in memory and in the index of a checkpoint."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.storage.ids import joined
from gear_loader.utils.arrays import Array

RECORD = np.dtype(
    [
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
)
"""`gear_loader.native.saving_loops` knows it as 9 words."""
WORDS = RECORD.itemsize // 8


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counters of a table. See `Manifest`."""

    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int
    policy_version: int


def no_records(count: int = 0) -> Array:
    """Records, [count], that are of no trajectory: with the number -1."""
    records: Array = np.zeros(count, dtype=RECORD)
    records["sequence"] = -1
    return records


def rows_of(records: Array) -> Array:
    """Rows in the segment, int64 [n]: steps and final steps."""
    rows: Array = records["length"] + records["final"]
    return rows


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
    words = np.ascontiguousarray(records).view(np.int64).reshape(-1, WORDS)
    found: Array = words[order].reshape(-1).view(RECORD)
    return found
