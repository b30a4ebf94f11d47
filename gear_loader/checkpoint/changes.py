"""What has changed in a table since its last save, and what the files of that save hold of it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection

import numpy as np

from gear_loader.checkpoint.segments import Segment
from gear_loader.checkpoint.shared_places import referred_rows
from gear_loader.checkpoint.trajectory_records import (
    SHARING,
    Counters,
    no_records,
    own_rows,
    record_of,
    segments_of,
    words_of,
)
from gear_loader.native.saving_loops import find_changes
from gear_loader.storage.counters import FIRST_SEQUENCE, NEXT_SEQUENCE, NUM_SAMPLED, NUM_TOUCHED, POLICY
from gear_loader.storage.ids import origin_of
from gear_loader.storage.index import Index
from gear_loader.storage.readers import Ticket
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

_SPARSE = 0.25
"""Share of live rows up to which a segment in an archive is rewritten."""
_FILLED_BY_REWRITING = 0.5
"""Share of `Disk.size` that rewriting such segments may fill; from more on segments go to the archive."""
_NO_SLOTS: Array = np.empty(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class SavedChanges:
    """How a table differs at one moment from what is on disk.

    Attributes:
        slots: int64 [n]. records: [n], of their trajectories now: without a number where there is none any
            more, with segment 0 where the rows have to be written.
        counters: of the table. clock: time of the moment, as `created` of records tells it.
    """

    slots: Array
    records: Array
    counters: Counters
    clock: int

    @property
    def gone(self) -> Array:
        """Whether a slot's trajectory is gone, and there is none in its place; bool [n]."""
        gone: Array = self.records["sequence"] < 0
        return gone

    def unwritten(self) -> tuple[Array, Array]:
        """Slots, int64 [m], and records, [m], of the trajectories whose rows have to be written, oldest first."""
        which = np.flatnonzero(~self.gone & (self.records["segment"] == 0))
        which = which[np.argsort(self.records["sequence"][which], kind="stable")]
        return self.slots[which], self.records[which]


def take_changes(
    index: Index, on_disk: OnDisk, ticket: Ticket | None = None, *, brief: bool = False
) -> SavedChanges:
    """Compare a table with what is on disk; begin `ticket`, if given, at the same moment.

    Args:
        brief: hold the table's lock for a time that does not grow with the table: all slots are compared without it,
            and under it those once more that others have committed, lengthened or retired meanwhile. Draws and
            priorities of the other trajectories are then of the moment before.
    """
    recovery, counters = index.recovery, index.arrays.counters
    since, slots, records = -1, _NO_SLOTS, no_records(0, on_disk.records.dtype)
    if brief:
        since = recovery.read(lambda: int(counters[NUM_TOUCHED]))
        slots, records = _differing(index, on_disk, None)

    def take() -> tuple[Array | None, tuple[Array, Array], Counters, int]:
        now = time.monotonic_ns()  # before expiry, so that no remaining trajectory exceeds the maximum age
        if not amid:
            index.admission.expire()
        again = index.arrays.touched_since(since)  # None for all
        found = _differing(index, on_disk, again)
        following = int(counters[NEXT_SEQUENCE])
        counted = Counters(
            origin=origin_of(index.arrays.view),
            next_sequence=following,
            num_inserted=following - int(counters[FIRST_SEQUENCE]),
            num_sampled=int(counters[NUM_SAMPLED]),
            policy_version=int(counters[POLICY]),
        )
        if ticket is not None:
            ticket.begin(index.readers)
        return again, found, counted, now

    amid = recovery.lock.is_mine  # in a signal handler
    again, found, counted, now = recovery.read(take)
    same = ~np.isin(slots, again) if again is not None else np.zeros(len(slots), dtype=bool)
    return SavedChanges(
        np.concatenate((slots[same], found[0])), np.concatenate((records[same], found[1])), counted, now
    )


def _differing(index: Index, on_disk: OnDisk, among: Array | None) -> tuple[Array, Array]:
    """The slots whose trajectories differ from what is on disk, int64 [n], and records of these, [n].

    Args:
        among: slots to compare, int64 [m]; None for all.
    """
    arrays = index.arrays
    most = arrays.num_slots if among is None else len(among)
    slots: Array = np.empty(most, dtype=np.int64)  # pages that are not written take no memory
    known = words_of(on_disk.records)
    words: Array = np.empty((most, known.shape[1]), dtype=np.int64)
    count = find_changes(
        most,
        slots[:0] if among is None else among,
        arrays.state,
        arrays.generation,
        arrays.sequence,
        arrays.extent,
        arrays.created,
        arrays.ident,
        arrays.filled,
        arrays.sampled,
        arrays.priority.view(np.int32),
        known,
        slots,
        words,
    )
    return slots[:count].copy(), words[:count].copy().view(on_disk.records.dtype).reshape(-1)


class OnDisk:
    """What the files of a save hold of a table: a record for each slot, and the segments.

    Attributes:
        records: [slots], without a number where the trajectory of a slot is not there.
        segments: by number. live: rows of each that belong to trajectories in `records`; that hold what these share
            counts, too.
        num_trajectories, num_steps: in `records`.
    """

    def __init__(self, num_slots: int, *, shares: bool) -> None:
        self.records = no_records(num_slots, record_of(shares))
        self.segments: dict[int, Segment] = {}
        self.live: dict[int, int] = {}
        self.num_trajectories = self.num_steps = 0

    @classmethod
    def of(cls, index: Index, records: Array, segments: Collection[Segment]) -> OnDisk:
        """What a directory holds of a table.

        Args:
            records: of the directory's index, by ascending number. segments: those that can be read.
        """
        arrays = index.arrays
        found = cls(arrays.num_slots, shares=records.dtype == SHARING)
        found.segments = {segment.number: segment for segment in segments}
        found.live = dict.fromkeys(found.segments, 0)
        records = records[np.isin(segments_of(records), list(found.segments)).all(axis=1)]
        if not len(records):
            return found
        slots = np.flatnonzero(arrays.state == READY)
        place = np.searchsorted(records["sequence"], arrays.sequence[slots])
        place[place == len(records)] = 0
        same = records["sequence"][place] == arrays.sequence[slots]
        found.records[slots[same]] = records[place[same]]
        found._count(slots[same], 1)
        found._count_shared()
        return found

    def _count(self, slots: Array, sign: int) -> None:
        """Count what is in some slots in or out."""
        slots = slots[self.records["sequence"][slots] >= 0]
        self.num_trajectories += sign * len(slots)
        self.num_steps += sign * int(self.records["length"][slots].sum())
        if not self._shares:
            for number, rows in _rows_by_segment(self.records[slots]).items():
                self.live[number] += sign * rows

    @property
    def _shares(self) -> bool:
        return bool(self.records.dtype == SHARING)

    def _count_shared(self) -> None:
        """Count live rows anew, in a table whose trajectories share some."""
        if self._shares:
            self.live = self._live_of(self.records)

    def _live_of(self, records: Array) -> dict[int, int]:
        """Rows of each segment that trajectories use, of records that are `SHARING`."""
        records = words_of(records)[records["sequence"] >= 0].reshape(-1).view(SHARING)
        live = dict.fromkeys(self.segments, 0) | _rows_by_segment(records)
        numbers, rows, groups = referred_rows(records)
        for number, count in zip(numbers.tolist(), rows.tolist(), strict=True):
            live[number] += count
        for number in groups.tolist():  # as much as a trajectory with values has on average
            segment = self.segments[number]
            live[number] += max(1, segment.steps // max(1, segment.trajectories))
        return {number: min(rows, self.segments[number].steps) for number, rows in live.items()}

    def live_after(self, changes: SavedChanges) -> dict[int, int]:
        """Rows of each segment that stay in use after some changes."""
        leave = changes.slots[changes.records["segment"] == 0]
        if self._shares:
            records = self.records.copy()
            records["sequence"][leave] = -1
            return self._live_of(records)
        live, records = dict(self.live), self.records[leave]
        for number, rows in _rows_by_segment(records[records["sequence"] >= 0]).items():
            live[number] -= rows
        return live

    # ---------------------------------------------------------------- which segments stay

    def sparsest(
        self,
        changes: SavedChanges,
        new: int,
        budget: float,
        most_segments: int,
        most_steps: int | None = None,
    ) -> set[int]:
        """Numbers of segments to rewrite so that half of all their rows are live, and no more than a number stay.

        Args:
            new: rows that the changes write.
            budget: rows of old trajectories that are rewritten, unless there are more new ones: a write that rewrites
                much would delay what is committed meanwhile.
            most_segments: with as many, the smallest are rewritten as one, so that half of them stay.
            most_steps: that all segments on the disk may have, new ones included; as much is rewritten as that takes.
                None for no limit.
        """
        live = self.live_after(changes)
        dropped = {number for number in self.segments if not live[number]}
        budget = max(budget, new)
        # What is in an archive stays there as long as one trajectory of it is live.
        kept = [
            number for number, each in self.segments.items() if number not in dropped and not each.archive
        ]
        used = sum(live[number] for number in kept)
        total = sum(self.segments[number].steps for number in kept)
        rewritten = 0
        limit = math.inf if most_steps is None else most_steps - new
        for number in sorted(kept, key=lambda number: live[number] / self.segments[number].steps):
            if total <= limit and (total <= 2 * used or (rewritten and rewritten + live[number] > budget)):
                break
            if live[number] == self.segments[number].steps:
                break  # nothing is gained from here on
            dropped.add(number)
            total += live[number] - self.segments[number].steps
            rewritten += live[number]
        kept = [number for number in kept if number not in dropped]
        if len(kept) >= most_segments:
            for i, number in enumerate(sorted(kept, key=lambda number: live[number])):
                if i >= 2 and (rewritten + live[number] > budget or i >= most_segments // 2):
                    break
                dropped.add(number)
                rewritten += live[number]
        return dropped

    def sparse_in_archive(
        self,
        changes: SavedChanges,
        new: int,
        dropped: Collection[int],
        bytes_of: Callable[[Segment], int],
        most_bytes: int,
        most_steps: int | None,
    ) -> set[int]:
        """Numbers of segments in the archive to bring back: few of their rows are live, which then lie on the disk.

        Args:
            new: as for `sparsest`. dropped: what that has returned. bytes_of: bytes of a segment.
            most_bytes: of what is brought back. most_steps: as for `sparsest`, of which some are left.
        """
        live = self.live_after(changes)
        local = [each for number, each in self.segments.items() if not each.archive and number not in dropped]
        steps = sum(each.steps for each in local) + new
        steps += sum(live[number] for number in dropped if not self.segments[number].archive)
        room = math.inf if most_steps is None else most_steps * _FILLED_BY_REWRITING - steps
        found: set[int] = set()
        for number in sorted((n for n, each in self.segments.items() if each.archive), key=live.__getitem__):
            segment, rows = self.segments[number], live[number]
            if not rows or rows > segment.steps * _SPARSE:
                continue
            room, most_bytes = room - rows, most_bytes - bytes_of(segment) * rows // segment.steps
            if room < 0 or most_bytes < 0:
                break
            found.add(number)
        return found

    def rewriting(self, changes: SavedChanges, dropped: Collection[int]) -> SavedChanges:
        """The changes, and that the trajectories in some segments have to be written."""
        if not dropped:
            return changes
        records = changes.records.copy()
        here = _in_any(records, dropped) & ~changes.gone
        records["segment"][here] = 0
        others = np.flatnonzero((self.records["sequence"] >= 0) & _in_any(self.records, dropped))
        others = others[~np.isin(others, changes.slots)]
        moved = self.records[others]
        moved["segment"] = 0
        return dataclasses.replace(
            changes,
            slots=np.concatenate((changes.slots, others)),
            records=np.concatenate((records, moved)),
        )

    # ---------------------------------------------------------------- after a write

    def apply(self, changes: SavedChanges, dropped: Collection[int], written: Collection[Segment]) -> Array:
        """Take over changes whose rows are on disk now; those of lost trajectories still have the segment 0.

        Args:
            dropped: numbers of the segments that are not used any more. written: the new ones.

        Returns:
            Records to append to the index, [m].
        """
        before, lost = self.records[changes.slots], changes.records["segment"] == 0
        after = changes.records.copy()
        after["sequence"][lost] = -1
        ended = before[(before["sequence"] >= 0) & (before["sequence"] != after["sequence"])]
        ended["length"] = 0
        self._count(changes.slots, -1)
        for number in dropped:
            del self.segments[number], self.live[number]
        for segment in written:
            self.segments[segment.number], self.live[segment.number] = segment, 0
        self.records[changes.slots] = after
        self._count(changes.slots, 1)
        self._count_shared()
        return np.concatenate((ended, after[after["sequence"] >= 0]))

    def all_records(self) -> Array:
        """Records of all trajectories, oldest first."""
        records = self.records[self.records["sequence"] >= 0]
        found: Array = records[np.argsort(records["sequence"], kind="stable")]
        return found


def _in_any(records: Array, segments: Collection[int]) -> Array:
    """Whether something of each trajectory is in one of some segments, bool [n]."""
    return np.asarray(np.isin(segments_of(records), list(segments)).any(axis=1))


def _rows_by_segment(records: Array) -> dict[int, int]:
    """Rows that each segment has of trajectories."""
    numbers, inverse = np.unique(records["segment"], return_inverse=True)
    rows = np.bincount(inverse, weights=own_rows(records), minlength=len(numbers)).astype(np.int64)
    return dict(zip(numbers.tolist(), rows.tolist(), strict=True))
