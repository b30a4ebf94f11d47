"""Trajectories that begin with steps of others: `prefix` of `Table.add`.

Whole blocks of these steps belong to all of them and are freed with the last one. The block in which the steps end is
copied; so is the first one of a table with columns per trajectory, whose values lie there. A trajectory whose own first
steps are those of another takes its blocks from that one, so both have the same prefix.

Ragged values that are shared lie in the memory of one trajectory, the leader, which stays until nobody has it. Of a
table with ragged steps the shared ones are all the leader's: who begins with more than the common steps of one that has
a leader gets copies of all, and is a leader itself.

On disk, too, what is shared is there once (`gear_loader.checkpoint.shared_places`). One that is moved there leaves the
blocks and values that others have in memory to these; one that comes back has those of such a trajectory again
(`Relative`), and what is missing is stored anew, as the leader's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gear_loader.storage.counters import NUM_PARKED
from gear_loader.storage.incoming import Steps
from gear_loader.storage.ragged_input import Payload
from gear_loader.storage.states import FREE, READY, WRITING
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.storage.index_arrays import IndexArrays


class Prefixes(NamedTuple):
    """What trajectories to store begin with.

    Attributes:
        slots, generations: int64 [n], trajectories in the table; -1 for none.
        steps: int64 [n], their first steps that are used.
        shared: int64 [n]; blocks number `IndexArrays.copied_blocks` to `shared` - 1 are those of the other trajectory.
        rows: the steps to write into the new blocks: what is copied, then those that are given. payload: the ragged
            values to store, with copies.
        leads: bool [n], trajectories that share no values.
        moves: RUNS of the table's counters when they were looked at; -1 without a disk tier.
        records: where records are copied to, and from, and bytes of them, when they are complete.
    """

    slots: Array
    generations: Array
    steps: Array
    shared: Array
    rows: Steps
    payload: Payload | None
    leads: Array
    moves: int
    records: list[tuple[int, int, int]]


class AwayError(Exception):
    """Trajectories that others are to begin with lie on disk only, or have come back from there meanwhile.

    Attributes:
        slots: int64 [n], those that are to be brought into memory.
        blocks: that the others need beside them, if it is known.
    """

    def __init__(self, slots: Array, blocks: int = 0) -> None:
        super().__init__()
        self.slots, self.blocks = slots, blocks


def prefixes_of(arrays: IndexArrays, slots: Array) -> tuple[Array, Array]:
    """Sequence numbers of the trajectories whose first steps others begin with, -1 for none, and how many steps.

    Args:
        slots: int64 [n], the others. The caller holds the lock or a read ticket.
    """
    if not len(arrays.prefix):
        return np.full(len(slots), -1, dtype=np.int64), np.zeros(len(slots), dtype=np.int64)
    found = arrays.prefix[slots]
    known = found[:, 0] == arrays.generation[slots]
    return np.where(known, found[:, 1], -1), np.where(known, found[:, 2], 0)


def leaders_of(arrays: IndexArrays, slots: Array) -> tuple[Array, Array]:
    """Slots and generations of the trajectories that values per group were stored with, int64 [n] each.

    Args:
        slots: int64 [n], of a table with prefixes. The caller holds the lock or a read ticket.
    """
    found, generations = arrays.prefix[slots], arrays.generation[slots]
    known = found[:, 0] == generations
    return np.where(known, found[:, 3], slots), np.where(known, found[:, 4], generations)


def kept_leaders(arrays: IndexArrays) -> Array:
    """The leaders that trajectories in memory have, ascending, each generation * slots of the table + slot.

    Those on disk, too, as long as readers may see what they had in memory. Under the lock.
    """
    if not len(arrays.prefix):
        return np.empty(0, dtype=np.int64)
    used = (arrays.state != FREE) & (arrays.prefix[:, 0] == arrays.generation)
    if arrays.tier is not None and not arrays.counters[NUM_PARKED]:
        used &= (arrays.extent[:, 1] >= 0) | (arrays.state == WRITING)
    leaders: Array = np.unique(arrays.prefix[used, 4] * arrays.num_slots + arrays.prefix[used, 3])
    return leaders


def set_prefixes(arrays: IndexArrays, slots: Array, prefixes: Prefixes) -> None:
    """Write down what trajectories begin with, which are not committed yet. The caller holds the lock."""
    chosen = prefixes.slots >= 0
    slots, parents, steps = slots[chosen], prefixes.slots[chosen], prefixes.steps[chosen]
    roots, common = prefixes_of(arrays, parents)
    roots = np.where((roots >= 0) & (steps <= common), roots, arrays.sequence[parents])
    own = slots, arrays.generation[slots]
    leaders = [
        np.where(prefixes.leads[chosen], *each) for each in zip(own, leaders_of(arrays, parents), strict=True)
    ]
    for place, values in enumerate((roots, steps, *leaders), start=1):
        arrays.prefix[slots, place] = values
    arrays.prefix[slots, 0] = arrays.generation[slots]  # last: until then there is none


def keys_of(arrays: IndexArrays, slots: Array) -> Array:
    """What values of trajectories (int64 [n]) are stored with: their own, and their leaders'; as `kept_leaders`."""
    pairs = [(slots, arrays.generation[slots])]
    if len(arrays.prefix):
        pairs.append(leaders_of(arrays, slots))
    keys: Array = np.unique(np.concatenate([since * arrays.num_slots + who for who, since in pairs]))
    return keys


class Relative(NamedTuple):
    """What a trajectory that comes back from disk has in common with those in memory.

    Attributes:
        slot: of one that begins as it does, or -1. steps: first steps that both have, 0 without one.
        shared: its first `shared` blocks are those of that one, but for `IndexArrays.copied_blocks`; or 0.
        group: slot of one that has the same values per group, or -1.
        leader: slot and generation of the trajectory that they are stored with.
        common: first steps whose ragged values are stored with that one.
    """

    slot: int = -1
    steps: int = 0
    shared: int = 0
    group: int = -1
    leader: tuple[int, int] = (-1, -1)
    common: int = 0


class Relatives:
    """Finds `Relative` for trajectories that come back from disk; those that are added after it are unknown to it.

    Args:
        arrays: of the index. slots: int64 [n], the trajectories.
        ragged_steps: whether steps have ragged values: then only blocks are shared that have the leader's.
    """

    def __init__(self, arrays: IndexArrays, slots: Array, *, ragged_steps: bool) -> None:
        self._arrays, self._slots, self._ragged_steps = arrays, slots, ragged_steps
        if not len(arrays.prefix):
            return
        live = np.flatnonzero(arrays.state == READY)
        live = live[np.argsort(arrays.sequence[live], kind="stable")]
        self._generations = arrays.generation.copy()
        who, since = leaders_of(arrays, live)
        keys = since * arrays.num_slots + who
        # What trajectories begin as: number and first steps of each, by the number.
        self._begins, begins = (
            [*_begins(arrays, live, slots)],
            [*_begins(arrays, live, live)] or [(live, live)],
        )
        numbers = np.concatenate([each[0] for each in begins])
        order = np.argsort(numbers, kind="stable")
        self._numbers = numbers[order]
        self._steps = np.concatenate([each[1] for each in begins])[order]
        self._who = np.tile(live, len(begins))[order]
        self._keys, self._members = np.sort(keys), live[np.argsort(keys, kind="stable")]

    def of(self, i: int) -> Relative:
        """What trajectory number i has in common with those in memory now; the caller holds the lock."""
        arrays, slot = self._arrays, int(self._slots[i])
        if not len(arrays.prefix):
            return Relative()
        who, since = (int(each[0]) for each in leaders_of(arrays, self._slots[i : i + 1]))
        leader, own = (who, since), int(prefixes_of(arrays, self._slots[i : i + 1])[1][0])
        found, common = self._alike(i)
        if self._ragged_steps:
            others = leaders_of(arrays, found)
            same = (others[0] == who) & (others[1] == since)
            found, common = found[same], common[same]
        which, steps = (int(found[common.argmax()]), int(common.max())) if len(found) else (-1, 0)
        shared = steps // arrays.block_steps
        key = np.searchsorted(self._keys, since * arrays.num_slots + who + np.array([0, 1]))
        group = self._inside(self._members[key[0] : key[1]])
        return Relative(
            which,
            steps,
            shared if shared > arrays.copied_blocks else 0,
            int(group[0]) if len(group) else -1,
            leader,
            0 if leader == (slot, int(arrays.generation[slot])) else own,
        )

    def _alike(self, i: int) -> tuple[Array, Array]:
        """Trajectories in memory that begin as number i does, and their first steps in common; int64 [m] each."""
        found, common = [self._slots[:0]], [self._slots[:0]]
        for numbers, steps in self._begins:
            low, high = np.searchsorted(self._numbers, (max(0, numbers[i]), numbers[i] + 1))
            found.append(self._who[low:high])
            common.append(np.minimum(self._steps[low:high], steps[i]))
        slots = np.concatenate(found)
        inside = np.isin(slots, self._inside(slots))
        return slots[inside], np.concatenate(common)[inside]

    def _inside(self, slots: Array) -> Array:
        """Those that are in memory."""
        arrays = self._arrays
        there = (arrays.state[slots] == READY) & (arrays.generation[slots] == self._generations[slots])
        found: Array = slots[there & (arrays.extent[slots, 1] >= 0)]
        return found


def _begins(arrays: IndexArrays, live: Array, slots: Array) -> Iterator[tuple[Array, Array]]:
    """What trajectories begin as, int64 [n] each: their own numbers and steps; the trajectories that they begin with,
    -1 for none, and how many steps; those that these begin with, as far as they are `live`; and so on.

    Args:
        live: int64 [m], by ascending number. slots: int64 [n].
    """
    numbers, steps = arrays.sequence[slots].copy(), arrays.extent[slots, 0].copy()
    while len(live) and (numbers >= 0).any():
        yield numbers, steps
        place = np.minimum(np.searchsorted(arrays.sequence[live], numbers), len(live) - 1)
        found = live[place]
        roots, counts = prefixes_of(arrays, found)
        known = (numbers >= 0) & (arrays.sequence[found] == numbers)
        numbers, steps = np.where(known, roots, -1), np.minimum(steps, counts)
