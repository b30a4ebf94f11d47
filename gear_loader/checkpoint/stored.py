"""The trajectories that a directory holds, and which of its segments the next save keeps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gear_loader.checkpoint.index import Entries
from gear_loader.checkpoint.manifest import Segment
from gear_loader.checkpoint.snapshot import Snapshot
from gear_loader.utils.arrays import Array

__all__ = ["MAX_SEGMENTS", "Stored", "no_entries"]

MAX_SEGMENTS = 16
"""With more segments, the trajectories of the smallest are rewritten as one, so that half as many stay."""

MAX_SEGMENTS_BEHIND = 64
"""The same of tables that are written in the background, whose segments are small."""
REWRITE_BYTES = 64 << 20
"""Bytes of old trajectories that one write in the background rewrites, unless there are more new ones."""


def no_entries() -> Entries:
    """The entries of an empty table."""
    empty: Any = np.empty(0, dtype=np.int64)
    return Entries(empty, empty, np.empty(0, dtype=np.float32), *(empty,) * 8)


class Stored:
    """Trajectories on disk, of the previous save and of this one.

    Attributes:
        entries: by ascending sequence number. segments: those that the new manifest may name, by number.
    """

    def __init__(self, entries: Entries, segments: dict[int, Segment]) -> None:
        self.entries, self.segments = entries, segments
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop the entries of other segments; their trajectories are written again."""
        self.entries = self.entries.take(np.isin(self.entries.segment, list(self.segments)))

    def positions(self, snapshot: Snapshot) -> Array:
        """Position of each trajectory in `entries`, or -1; int64 [n]."""
        entries = self.entries
        place = np.searchsorted(entries.sequence, snapshot.sequences)
        place[place == len(entries.sequence)] = 0
        if not len(entries.sequence):
            return np.full(len(snapshot.sequences), -1)
        found = entries.sequence[place] == snapshot.sequences
        found &= (entries.length[place] == snapshot.lengths) & (entries.final[place] == snapshot.finals)
        found &= entries.filled[place] == snapshot.filled
        return np.where(found, place, -1)

    def contains(self, snapshot: Snapshot) -> Array:
        """Whether each trajectory is on disk as it is in the snapshot, bool [n]."""
        found: Array = self.positions(snapshot) >= 0
        return found

    def add(self, segment: Segment, written: Entries) -> None:
        """Add a new segment. Earlier entries of its trajectories, which have changed since, are replaced."""
        self.segments[segment.number] = segment
        kept = self.entries.take(~np.isin(self.entries.sequence, written.sequence))
        pairs = zip(kept.arrays().values(), written.arrays().values(), strict=True)
        joined = Entries(*(np.concatenate(pair) for pair in pairs))
        self.entries = joined.take(np.argsort(joined.sequence, kind="stable"))

    def _live_steps(self, snapshot: Snapshot) -> dict[int, int]:
        """Steps of live trajectories by segment number."""
        places = self.positions(snapshot)
        places = places[places >= 0]
        live = dict.fromkeys(self.segments, 0)
        numbers, inverse = np.unique(self.entries.segment[places], return_inverse=True)
        steps = np.zeros(len(numbers), dtype=np.int64)
        np.add.at(steps, inverse, self.entries.rows[places])
        live.update(zip(numbers.tolist(), steps.tolist(), strict=True))
        return live

    def keep_dense(self, snapshot: Snapshot) -> None:
        """Keep the segments of whose steps at least half are live, and fewer than `MAX_SEGMENTS`."""
        live = self._live_steps(snapshot)
        self.segments = {
            number: segment for number, segment in self.segments.items() if 2 * live[number] >= segment.steps
        }
        if len(self.segments) >= MAX_SEGMENTS:
            by_size = sorted(self.segments, key=lambda number: self.segments[number].steps, reverse=True)
            self.segments = {number: self.segments[number] for number in sorted(by_size[: MAX_SEGMENTS // 2])}
        self._drop_unused()

    def keep_most(self, snapshot: Snapshot, step_bytes: int, most_steps: int | None = None) -> None:
        """Keep segments so that half of all their steps are live, and about `MAX_SEGMENTS_BEHIND`, but rewrite little.

        A write that rewrites much would delay what is committed meanwhile. So one write does a part of it.

        Args:
            most_steps: that all segments may have, new ones included; as much is rewritten as that takes. None for no
                limit.
        """
        live = self._live_steps(snapshot)
        self.segments = {number: segment for number, segment in self.segments.items() if live[number]}
        new = snapshot.take(~self.contains(snapshot))
        budget = max(REWRITE_BYTES // max(1, step_bytes), int(new.rows.sum()))
        used, total = sum(live.values()), sum(segment.steps for segment in self.segments.values())
        dropped = 0
        limit = math.inf if most_steps is None else most_steps - int(new.rows.sum())
        for number in sorted(self.segments, key=lambda number: live[number] / self.segments[number].steps):
            if total <= limit and (total <= 2 * used or (dropped and dropped + live[number] > budget)):
                break
            if live[number] == self.segments[number].steps:
                break  # nothing is gained from here on
            total += live[number] - self.segments.pop(number).steps
            dropped += live[number]
        if len(self.segments) >= MAX_SEGMENTS_BEHIND:
            for i, number in enumerate(sorted(self.segments, key=lambda number: live[number])):
                if i >= 2 and (dropped + live[number] > budget or i >= MAX_SEGMENTS_BEHIND // 2):
                    break
                del self.segments[number]
                dropped += live[number]
        self._drop_unused()
