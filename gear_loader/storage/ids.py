"""Global ids: names of trajectories that do not change in a migration.

An id is an int64, ``sequence << 16 | origin``: the sequence number of the trajectory in the table that first stored it,
and that table's shard number (0 if not set). Ids are computed from these two, except for trajectories that were added
with an id: `ident` holds it, and -1 for all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.counters import NEXT_SEQUENCE, ORIGIN
from gear_loader.storage.states import READY, WRITING
from gear_loader.utils.arrays import Array, numbers, shown

if TYPE_CHECKING:
    from gear_loader.storage.operations.view import View

_BITS = 16
LARGEST_ORIGIN = (1 << _BITS) - 1
CLIENT_ORIGIN = LARGEST_ORIGIN
"""Origin of the ids that clients of a server make up: a random number and a count, see `Delivery`."""
LARGEST_ID = 2**62 - 1
"""Leaves sequence numbers above it for the table that holds it."""
_SIEVE = 4096
_AT_ONCE = 1 << 14  # ids per pass, so that they stay in the cache


def joined(sequences: Array, origin: int) -> Array:
    """The ids that a table of this origin assigns to sequence numbers; both int64 [n]."""
    ids: Array = sequences << _BITS | origin
    return ids


def joined_one(sequence: int, origin: int) -> int:
    """`joined` of one sequence number."""
    return sequence << _BITS | origin


def sequences_of(ids: Array) -> Array:
    """The sequence numbers of ids, int64 [n], in the tables that first stored the trajectories."""
    sequences: Array = ids >> _BITS
    return sequences


def following(ids: Array, origin: int | None = None) -> int:
    """The first sequence number above those of `ids` (int64 [n], -1 is skipped), optionally of one origin only."""
    if origin is not None:
        ids = ids[(ids >= 0) & ((ids & LARGEST_ORIGIN) == origin)]
    return int(ids.max(initial=-1) >> _BITS) + 1


def origin_of(v: View) -> int | None:
    """The shard number of the table, or None."""
    return int(v.counters[ORIGIN]) - 1 if v.counters[ORIGIN] else None


def ids_of(v: View, slots: Array) -> Array:
    """The ids of the trajectories in slots, int64 [n]."""
    ids: Array = v.ident[slots]
    own = ids < 0
    if own.any():
        np.copyto(ids, joined(v.sequence[slots], origin_of(v) or 0), where=own)
    return ids


def check_origin(shard: Any) -> int:
    """Return a shard number as an int.

    Raises:
        SchemaError: not an integer from 0 to `LARGEST_ORIGIN`.
    """
    if (
        isinstance(shard, bool)
        or not isinstance(shard, (int, np.integer))
        or not 0 <= shard <= LARGEST_ORIGIN
    ):
        raise SchemaError(
            f"shard is {shown(shard)}; expected an integer from 0 to {LARGEST_ORIGIN}: an id has {_BITS} bits for it."
        )
    return int(shard)


def check_ids(ids: Any, count: int) -> Array:
    """Return the ids for new trajectories as int64 [count].

    Raises:
        SchemaError: an id is invalid or given twice.
    """
    values = numbers(ids, "ids", "iu", f"int64 [{count}], -1 for a new id")
    if values.shape != (count,):
        raise SchemaError(
            f"ids has shape {list(values.shape)}; expected [{count}], one for each trajectory, -1 for a new id."
        )
    if count == 1 and values.dtype == np.int64 and -1 <= values[0] <= LARGEST_ID:
        return values
    bad = np.flatnonzero((values < -1) | (values > LARGEST_ID))
    if len(bad):
        raise SchemaError(
            f"ids[{bad[0]}] is {values[bad[0]]}; expected an id, from 0 to {LARGEST_ID}, or -1 for one of the table's "
            "own numbering."
        )
    values = np.ascontiguousarray(values, dtype=np.int64)
    given, counts = np.unique(values[values >= 0], return_counts=True)
    if (counts > 1).any():
        twice = given[counts > 1][0]
        where = np.flatnonzero(values == twice)[:2].tolist()
        raise SchemaError(
            f"ids[{where[0]}] and ids[{where[1]}] are both {twice}; expected different ids. Store each trajectory once."
        )
    return values


def check_unused(v: View, given: Array) -> Array:
    """Check that no live trajectory has one of the ids `given`, int64 [n].

    Returns:
        The slots that are being written under one of these ids, int64 [m].

    Raises:
        SchemaError: a live trajectory has one.
    """
    slots = _slots_with(v, given)
    ready = slots[v.state[slots] == READY]
    if len(ready):
        raise SchemaError(
            f"The id {ids_of(v, ready)[0]} is that of a trajectory that is here already, at index {ready[0]}; expected "
            "one of a trajectory that is not. Remove the one that is here first, or leave out the other."
        )
    writing: Array = slots[(v.state[slots] == WRITING) & (v.ident[slots] >= 0)]
    return writing


def slots_of(v: View, ids: Array) -> Array:
    """The slots of the live trajectories with these ids (int64 [n], distinct), int64 [n]; -1 where there is none."""
    slots = _slots_with(v, ids)
    slots = slots[v.state[slots] == READY]
    found = np.full(len(ids), -1, dtype=np.int64)
    order = np.argsort(ids)
    found[order[np.searchsorted(ids, ids_of(v, slots), sorter=order)]] = slots
    return found


def _slots_with(v: View, given: Array) -> Array:
    """All slots, in any state, that hold one of the ids `given` (int64 [n]); int64 [m]."""
    sieve = np.zeros(_SIEVE, dtype=bool)
    sieve[_sifted(given)] = True
    origin, hits = origin_of(v) or 0, []
    for begin in range(0, len(v.ident), _AT_ONCE):
        ids = v.ident[begin : begin + _AT_ONCE]
        ids = np.where(ids < 0, joined(v.sequence[begin : begin + _AT_ONCE], origin), ids)
        likely = np.flatnonzero(sieve[_sifted(ids)])
        hits.append(begin + likely[np.isin(ids[likely], given)])
    slots: Array = np.concatenate(hits)
    return slots


def check_origin_free(v: View, shard: int) -> None:
    """Check that a table without an origin can become shard `shard` without duplicate ids.

    Raises:
        SchemaError: a computed id would equal an id that another trajectory was added with.
    """
    own = np.flatnonzero((v.state == READY) & (v.ident < 0))
    brought = v.ident[(v.state == READY) & (v.ident >= 0)]
    both = np.intersect1d(joined(v.sequence[own], shard), brought)
    if len(both):
        raise SchemaError(
            f"The table cannot become shard {shard}: one of its trajectories would get the id {both[0]}, which another "
            "one here was stored with. Call set_origin() before anything is stored."
        )


def first_free(v: View, shard: int) -> int:
    """The first sequence number that a table may assign as shard `shard`."""
    brought = v.ident[((v.state == READY) | (v.state == WRITING)) & (v.ident >= 0)]
    return max(int(v.counters[NEXT_SEQUENCE]), following(brought, shard))


def _sifted(ids: Array) -> Array:
    places: Array = (ids ^ ids >> _BITS) & (_SIEVE - 1)
    return places
