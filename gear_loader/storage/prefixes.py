"""Trajectories that begin with steps of others: `prefix` of `Table.add`.

Whole blocks of these steps belong to all of them and are freed with the last one. The block in which the steps end is
copied; so is the first one of a table with columns per trajectory, whose values lie there. A trajectory whose own first
steps are those of another takes its blocks from that one, so both have the same prefix.

Ragged values that are shared lie in the memory of one trajectory, the leader, which stays until nobody has it. Of a
table with ragged steps the shared ones are all the leader's: who begins with more than the common steps of one that has
a leader gets copies of all, and is a leader itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gear_loader.storage.incoming import Steps
from gear_loader.storage.ragged_input import Payload
from gear_loader.storage.states import FREE
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
        records: where records are copied to, and from, and bytes of them, when they are complete.
    """

    slots: Array
    generations: Array
    steps: Array
    shared: Array
    rows: Steps
    payload: Payload | None
    leads: Array
    records: list[tuple[int, int, int]]


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
    """The leaders that trajectories have, ascending, each generation * slots of the table + slot. Under the lock."""
    if not len(arrays.prefix):
        return np.empty(0, dtype=np.int64)
    used = (arrays.state != FREE) & (arrays.prefix[:, 0] == arrays.generation)
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
