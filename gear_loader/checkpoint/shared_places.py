"""Where what trajectories share lies on disk: it is written once, and the records of all of them say where.

A trajectory that begins with steps of another has only the other steps among its rows. Values per group lie with one of
the trajectories that they were stored for. The place may be in an earlier segment: one whose trajectories are all gone
stays as long as a record names something in it, and whoever rewrites a segment writes all trajectories anew that have
something there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from gear_loader.checkpoint.trajectory_records import SHARING, rows_of, segments_of
from gear_loader.storage.disk_records import tag_of
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.prefixes import leaders_of, prefixes_of
from gear_loader.storage.schema import Schema
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

_HERE = 0
"""In place of the number of a segment: the one that is being written."""


def group_columns(schema: Schema) -> tuple[str, ...]:
    """The columns whose values several trajectories may have at one place."""
    return tuple(name for name in schema.per_group if name not in schema.late)


class SharedPlaces(NamedTuple):
    """Where trajectories that are to be written as a segment have what they share.

    Attributes:
        begin_rows: int64 [n], their first steps that are those of another trajectory.
        begins, groups: int64 [n, 2], the segment of these steps and their first row; the segment of the values per
            group and the place there. In place of row or place in the new segment (`_HERE`): the number, among the n,
            of the trajectory that has it.
    """

    begin_rows: Array
    begins: Array
    groups: Array

    @property
    def brings(self) -> Array:
        """Whether each trajectory's values per group are written with it, bool [n]."""
        own: Array = (self.groups[:, 0] == _HERE) & (self.groups[:, 1] == np.arange(len(self.groups)))
        return own

    def without(self, lost: Array, segment: int) -> Array:
        """Trajectories that are to be written once more, bool [n].

        They were to have something of one that is lost, or their steps lie in two segments that `tag_of` cannot tell
        apart.

        Args:
            lost: bool [n], whether each could not be written. segment: number of the new one.
        """
        other = (self.begin_rows > 0) & (self.begins[:, 0] != _HERE) & (self.begins[:, 0] != segment)
        found: Array = other & (tag_of(self.begins[:, 0]) == tag_of(np.array(segment)))
        for used, (segments, who) in ((self.begin_rows > 0, self.begins.T), (True, self.groups.T)):
            here = np.flatnonzero(used & (segments == _HERE))
            found[here] |= lost[who[here]]
        return found & ~lost

    def write(self, records: Array, at: Array, which: Array, segment: int, first: Array) -> None:
        """Note the places in records.

        Args:
            records: `SHARING`. at: int64 [m], positions there of the trajectories `which`, int64 [m].
            segment: number of the new one. first: int64 [n], first rows there.
        """
        begins, groups = self.begins[which], self.groups[which]
        here = begins[:, 0] == _HERE
        row = np.where(here, first[np.where(here, begins[:, 1], 0)], begins[:, 1])
        rows = self.begin_rows[which]
        records["begin_rows"][at] = rows
        records["begin_segment"][at] = np.where(rows > 0, np.where(here, segment, begins[:, 0]), 0)
        records["begin_first"][at] = np.where(rows > 0, row, 0)
        records["group_segment"][at] = np.where(groups[:, 0] == _HERE, segment, groups[:, 0])
        records["group_place"][at] = groups[:, 1]


class _Kin(NamedTuple):
    """What trajectories in slots have in common with others: leaders, as of `keys_of`, and `prefixes_of`; int64 [n].

    And whether they are those that were asked for, bool [n]: another may have the slot of one that is gone.
    """

    keys: Array
    roots: Array
    common: Array
    fresh: Array

    @classmethod
    def of(cls, arrays: IndexArrays, slots: Array, numbers: Array) -> _Kin:
        """Look without the lock. Numbers: int64 [n], of the trajectories."""
        generations = arrays.generation[slots]
        fresh = (arrays.state[slots] == READY) & (arrays.sequence[slots] == numbers)
        roots, common = prefixes_of(arrays, slots)
        leaders, since = leaders_of(arrays, slots)
        fresh &= arrays.generation[slots] == generations
        return cls(since * arrays.num_slots + leaders, np.where(fresh, roots, -1), common, fresh)


def places_for(
    arrays: IndexArrays,
    schema: Schema,
    trajectories: tuple[Array, Array],
    known: Array,
    dropped: Collection[int],
) -> SharedPlaces:
    """Find what trajectories that are to be written share with one another, and with what is on disk. Takes no lock.

    Args:
        arrays: of the index. trajectories: slots, int64 [n], and records, `SHARING` [n], in order of commitment.
        known: `SHARING`, of each slot what is on disk. dropped: numbers of segments that do not stay there.
    """
    slots, records = trajectories
    count = len(slots)
    found = SharedPlaces(
        np.zeros(count, dtype=np.int64),
        np.zeros((count, 2), dtype=np.int64),
        np.stack((np.zeros(count, dtype=np.int64), np.arange(count)), axis=1),
    )
    kin = _Kin.of(arrays, slots, records["sequence"])
    there = np.flatnonzero(known["sequence"] >= 0)
    if len(there) and count:  # those that may have something in common with them
        everyone, wanted = _Kin.of(arrays, there, known["sequence"][there]), np.unique(kin.roots)
        near = np.isin(everyone.keys, kin.keys) if group_columns(schema) else np.zeros(len(there), dtype=bool)
        near |= np.isin(known["sequence"][there], wanted)
        near |= (everyone.roots >= 0) & np.isin(everyone.roots, wanted)
        there = there[near & everyone.fresh]
        if dropped:
            there = there[~np.isin(segments_of(known[there]), list(dropped)).any(axis=1)]
    on_disk = known[there]
    others = _Kin.of(arrays, there, on_disk["sequence"])
    on_disk, others = on_disk[others.fresh], _Kin(*(each[others.fresh] for each in others))
    if group_columns(schema):
        keys = np.where(kin.fresh, kin.keys, -1 - np.arange(count))
        _find_groups(found.groups, keys, others.keys, on_disk)
    _find_begins(found, records, kin.roots, kin.common, (on_disk, others.roots, others.common))
    return found


def _find_groups(groups: Array, keys: Array, known_keys: Array, known: Array) -> None:
    """Fill `SharedPlaces.groups`: of all with the same key one has the values."""
    names, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    groups[:, 1] = first[inverse.reshape(-1)]
    if not len(known_keys):
        return
    on_disk, at = np.unique(known_keys, return_index=True)
    place = np.minimum(np.searchsorted(on_disk, names), len(on_disk) - 1)
    there = (on_disk[place] == names)[inverse.reshape(-1)]
    source = known[at[place[inverse.reshape(-1)]]]
    groups[there, 0], groups[there, 1] = source["group_segment"][there], source["group_place"][there]


def _find_begins(
    found: SharedPlaces, records: Array, roots: Array, common: Array, known: tuple[Array, Array, Array]
) -> None:
    """Fill `SharedPlaces.begin_rows` and `begins`.

    Args:
        records: of the trajectories. roots, common: as of `prefixes_of`. known: the same three of those on disk.
    """
    wanted = np.unique(roots[roots >= 0])
    if not len(wanted):
        return
    # Of each trajectory, by number, where the most of its first steps are: rows, segment and first row.
    best = dict[int, tuple[int, int, int]]()

    def offer(number: int, rows: int, segment: int, first: int) -> None:
        if rows > best.get(number, (0,))[0]:
            best[number] = rows, segment, first

    on_disk, their_roots, their_common = known
    for i in np.flatnonzero(np.isin(on_disk["sequence"], wanted) | np.isin(their_roots, wanted)).tolist():
        each = on_disk[i]
        rows, place = int(each["begin_rows"]), (int(each["begin_segment"]), int(each["begin_first"]))
        if not rows:
            rows, place = int(each["length"]), (int(each["segment"]), int(each["first"]))
        offer(int(each["sequence"]), rows, *place)
        offer(int(their_roots[i]), min(rows, int(their_common[i])), *place)
    numbers, lengths, ends = (
        each.tolist() for each in (records["sequence"], records["length"], rows_of(records))
    )
    for i in np.flatnonzero(np.isin(records["sequence"], wanted) | (roots >= 0)).tolist():
        root, steps = int(roots[i]), int(common[i])
        rows, segment, first = best.get(root, (0, 0, 0)) if root >= 0 else (0, 0, 0)
        rows = min(rows, steps, ends[i] - 1)  # a segment has a row of each
        if rows > 0 and 2 * rows >= steps:
            found.begin_rows[i], found.begins[i] = rows, (segment, first)
        else:  # what follows has more in common with this one
            rows, segment, first = lengths[i], _HERE, i
        offer(numbers[i], rows, segment, first)
        if root >= 0:
            offer(root, min(rows, steps), segment, first)


def referred_rows(records: Array) -> tuple[Array, Array, Array]:
    """What live trajectories have of others that are gone: numbers of segments and rows there, of steps; and numbers of
    the segments of values per group. Each counts once.

    Args:
        records: `SHARING`, of all live trajectories.
    """
    own = records["segment"], records["place"]
    which = np.flatnonzero(records["begin_rows"])
    segments, first, rows = (records[f"begin_{name}"][which] for name in ("segment", "first", "rows"))
    gone = _gone(segments, first, records["segment"], records["first"])
    segments, first, rows = segments[gone], first[gone], rows[gone]
    order = np.lexsort((rows, first, segments))
    last = order[_ends(segments[order], first[order])]
    segments, rows = segments[last], rows[last]
    away = np.flatnonzero((records["group_segment"] != own[0]) | (records["group_place"] != own[1]))
    groups, places = records["group_segment"][away], records["group_place"][away]
    gone = _gone(groups, places, *own)
    groups, places = groups[gone], places[gone]
    order = np.lexsort((places, groups))
    return segments, rows, groups[order][_ends(groups[order], places[order])]


def _ends(*columns: Array) -> Array:
    """Whether a row differs from the next one, bool [n]."""
    found: Array = np.ones(len(columns[0]), dtype=bool)
    found[:-1] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return found


def _gone(segments: Array, places: Array, own_segments: Array, own_places: Array) -> Array:
    """Whether no trajectory is at each of some places in segments any more, bool [n].

    Args:
        segments, places: int64 [n]. own_segments, own_places: int64 [m], where live trajectories are.
    """
    numbers = np.unique(np.concatenate((segments, own_segments)))
    bits = int(max(places.max(initial=0), own_places.max(initial=0))).bit_length()
    keys, own = (
        np.searchsorted(numbers, of) << bits | at
        for of, at in ((segments, places), (own_segments, own_places.astype(np.int64)))
    )
    own = np.sort(own)
    at = np.minimum(np.searchsorted(own, keys), max(len(own) - 1, 0))
    return np.asarray(own[at] != keys) if len(own) else np.ones(len(keys), dtype=bool)


class Common(NamedTuple):
    """What n trajectories that are loaded have in common.

    Attributes:
        leaders: int64 [n], which of them has the values per group of each, and of the steps in common.
        roots, steps: int64 [n], with which of them each begins, -1 for none, and how many steps they have in common.
        in_blocks: whether they share the blocks of these steps: not if steps have ragged values.
    """

    leaders: Array
    roots: Array
    steps: Array
    in_blocks: bool

    @classmethod
    def of(cls, schema: Schema, parts: Iterable[tuple[Array, Array]], count: int) -> Common:
        """Find it.

        Args:
            parts: records of one checkpoint each, and int64, their numbers among the n, ascending.
        """
        roots, in_blocks = np.full(count, -1, dtype=np.int64), not schema.steps.ragged
        found = cls(np.arange(count), roots, np.zeros(count, dtype=np.int64), in_blocks)
        for records, numbers in parts:
            if records.dtype != SHARING or not len(records):
                continue
            own = np.stack((records["segment"], records["place"].astype(np.int64)), axis=1)
            groups, rows = (
                np.stack((records["group_segment"], records["group_place"]), axis=1),
                records["begin_rows"],
            )
            if group_columns(schema):
                found.leaders[numbers] = numbers[_holders(own, groups) % len(own)]
            who = np.flatnonzero(rows)
            who = who[
                np.argsort(-rows[who], kind="stable")
            ]  # without its owner the one with the most holds a place
            own = np.stack((records["segment"], records["first"]), axis=1)
            own[who] = -1
            begins = np.stack((records["begin_segment"], records["begin_first"]), axis=1)[who]
            holders = np.concatenate((np.arange(len(own)), who))[_holders(own, begins)]
            others = holders != who
            who, holders = who[others], holders[others]
            who, holders, rows = numbers[who], numbers[holders], rows[who]
            if schema.steps.ragged:
                if not group_columns(schema):
                    found.leaders[who] = holders
                alike = found.leaders[who] == found.leaders[holders]  # else each has values for itself
                who, holders, rows = who[alike], holders[alike], rows[alike]
            found.roots[who], found.steps[who] = holders, rows
        return found

    def parents(self, inside: Array, block_steps: int, copied: int) -> tuple[Array, Array]:
        """Whose blocks each of those inside (bool [n]) has, and up to which; int64 [n], see `Index.begin_stored`."""
        parents, shared = np.full(len(inside), -1, dtype=np.int64), np.zeros(len(inside), dtype=np.int64)
        who, keys, steps = self._alike(inside)
        if len(who):
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            first = first[inverse.reshape(-1)]
            blocks = np.minimum(steps, steps[first]) // block_steps
            chosen = (who != who[first]) & (blocks > copied)
            parents[who[chosen]], shared[who[chosen]] = who[first][chosen], blocks[chosen]
        return parents, shared

    def least_shared(self, order: Array, block_steps: int, copied: int) -> Array:
        """Blocks that each has of others, whichever these are, if all before it in some order are there; int64 [n]."""
        found: Array = np.zeros(len(order), dtype=np.int64)
        who, keys, steps = self._alike(np.ones(len(order), dtype=bool))
        if len(who):
            rank: Array = np.empty(len(order), dtype=np.int64)
            rank[order] = np.arange(len(order))
            by_rank = np.argsort(rank[who], kind="stable")
            who, keys, steps = who[by_rank], keys[by_rank], steps[by_rank]
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            least = np.full(len(first), 1 << 62)
            np.minimum.at(least, inverse.reshape(-1), steps)
            blocks = np.maximum(least[inverse.reshape(-1)] // block_steps - copied, 0)
            blocks[first] = 0
            found[who] = blocks
        return found

    def _alike(self, inside: Array) -> tuple[Array, Array, Array]:
        """Those inside that begin as others do, ascending; as which; and the steps, many of one that others begin with;
        int64 [m] each."""
        begun = self.roots >= 0
        keys = np.where(begun, self.roots, np.arange(len(self.roots)))
        who = np.flatnonzero(inside & self.in_blocks & (begun | np.isin(keys, self.roots)))
        return who, keys[who], np.where(begun, self.steps, 1 << 62)[who]

    def note(self, arrays: IndexArrays, slots: Array, sequences: Array) -> None:
        """Write down in the index of an empty table what trajectories in slots have in common. Under its lock.

        Args:
            slots, sequences: int64 [n], and the numbers that they will have.
        """
        numbers = np.arange(len(slots))
        chosen = numbers[(self.roots >= 0) | (self.leaders != numbers)]
        roots, leaders = self.roots[chosen], slots[self.leaders[chosen]]
        rows = arrays.prefix[slots[chosen]]
        rows[:, 1] = np.where(roots >= 0, sequences[np.maximum(roots, 0)], -1)
        rows[:, 2], rows[:, 3] = self.steps[chosen], leaders
        rows[:, 4], rows[:, 0] = arrays.generation[leaders], arrays.generation[slots[chosen]]
        arrays.prefix[slots[chosen]] = rows


def _holders(own: Array, places: Array) -> Array:
    """The first of `own`, int64 [n, 2], that is each of some places, int64 [m, 2]; int64 [m]. Where there is none: the
    first of the places that is the same one, counted from n on."""
    _, first, inverse = np.unique(
        np.concatenate((own, places)), axis=0, return_index=True, return_inverse=True
    )
    found: Array = first[inverse.reshape(-1)[len(own) :]]
    return found
