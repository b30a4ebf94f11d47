"""Trajectories that begin with steps of others: `prefix` of `Table.add`.

Whole blocks of these steps belong to all of them and are freed with the last one. The block in which the steps end is
copied; so is the first one of a table with columns per trajectory, whose values lie there. A trajectory whose own first
steps are those of another takes its blocks from that one, so both have the same prefix.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gear_loader.errors import SchemaError, StaleIndexError
from gear_loader.storage.incoming import Steps
from gear_loader.storage.readers import Ticket
from gear_loader.utils.arrays import Array, numbers, shown

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine
    from gear_loader.storage.index_arrays import IndexArrays


class Prefixes(NamedTuple):
    """What trajectories to store begin with.

    Attributes:
        slots, generations: int64 [n], trajectories in the table; -1 for none.
        steps: int64 [n], their first steps that are used.
        shared: int64 [n]; blocks number `IndexArrays.copied_blocks` to `shared` - 1 are those of the other trajectory.
        rows: the steps to write into the new blocks: what is copied, then those that are given.
    """

    slots: Array
    generations: Array
    steps: Array
    shared: Array
    rows: Steps


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


def set_prefixes(arrays: IndexArrays, slots: Array, prefixes: Prefixes) -> None:
    """Write down what trajectories begin with, which are not committed yet. The caller holds the lock."""
    chosen = prefixes.slots >= 0
    slots, parents, steps = slots[chosen], prefixes.slots[chosen], prefixes.steps[chosen]
    roots, common = prefixes_of(arrays, parents)
    roots = np.where((roots >= 0) & (steps <= common), roots, arrays.sequence[parents])
    arrays.prefix[slots, 1], arrays.prefix[slots, 2] = roots, steps
    arrays.prefix[slots, 0] = arrays.generation[slots]  # last: until then there is none


def located_after(
    engine: Engine, steps: Steps, prefix: Any, prefix_steps: Any, prefix_generation: Any
) -> Prefixes:
    """Check what trajectories are to begin with, and copy what they cannot share.

    Args:
        steps: of the trajectories, without those of others. prefix, prefix_steps, prefix_generation: as for `Table.add`.

    Raises:
        SchemaError: values that do not fit. StaleIndexError: a trajectory that is not there.
    """
    arrays, count = engine.index.arrays, len(steps.lengths)
    if not engine.region.layout.prefixes:
        raise SchemaError(
            "A prefix was given, and the table shares no blocks; expected a table that was created with "
            "memory=gear_loader.Memory(prefixes=True)."
        )
    slots = _integers("prefix", prefix, count)
    chosen = np.flatnonzero(slots >= 0)
    known, counts = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64)
    wanted = None if prefix_generation is None else _integers("prefix_generation", prefix_generation, count)
    given = None if prefix_steps is None else _integers("prefix_steps", prefix_steps, count)
    ticket = Ticket()

    def locate() -> Prefixes:
        known[chosen], lengths = engine.index.reader.begin_read_rows(slots[chosen], ticket)
        if wanted is not None and (bad := np.flatnonzero(known[chosen] != wanted[chosen])).size:
            row = chosen[bad[0]]
            raise StaleIndexError(
                f"The prefix of trajectory {row} is index {slots[row]} of generation {wanted[row]}, which was removed or "
                f"evicted; another trajectory, of generation {known[row]}, has that index now. Nothing was stored."
            )
        counts[chosen] = lengths if given is None else given[chosen]
        if (bad := np.flatnonzero((counts[chosen] < 1) | (counts[chosen] > lengths))).size:
            row = chosen[bad[0]]
            raise SchemaError(
                f"prefix_steps of trajectory {row} is {counts[row]:,}; expected 1 to {lengths[bad[0]]:,}, the steps of "
                f"index {slots[row]}."
            )
        shared = counts // arrays.block_steps
        shared[shared <= arrays.copied_blocks] = 0
        return Prefixes(slots, known, counts, shared, _rows(engine, steps, slots, counts, shared))

    return ticket.during(locate)


def _integers(name: str, value: Any, count: int) -> Array:
    values = numbers(value, name, "iu", f"an integer, or {count} of them")
    if values.shape not in ((), (count,)):
        raise SchemaError(f"{name} is {shown(value)}; expected an integer, or [{count}] of them.")
    return np.broadcast_to(values, (count,)).astype(np.int64)


def _rows(engine: Engine, steps: Steps, slots: Array, counts: Array, shared: Array) -> Steps:
    """The steps to write into new blocks, under a read ticket: a first block that is copied is a trajectory by itself."""
    arrays, schema, region = engine.index.arrays, engine.schema.added, engine.region
    size = arrays.block_steps
    addresses: list[list[int]] = []
    lengths: list[int] = []
    holds: list[object] = [steps.hold]

    def copied(ids: Array, first: int, end: int, given: list[int], more: int) -> None:
        """Rows `first` to `end` - 1 of blocks, then the first `more` of what is given."""
        places = []
        for (name, column), address in zip(schema.items(), given, strict=True):
            if column.trajectory:
                places.append(address)
                continue
            blocks = ids[first // size : -(-end // size)]
            begin = first // size * size
            rows = region.column(name)[blocks].reshape(-1, column.step_bytes)[first - begin : end - begin]
            joined = np.empty((len(rows) + more, column.step_bytes), dtype=np.uint8)
            joined[: len(rows)] = rows
            if more:
                ctypes.memmove(joined.ctypes.data + rows.nbytes, address, more * column.step_bytes)
            holds.append(joined)
            places.append(joined.ctypes.data)
        addresses.append(places)
        lengths.append(end - first + more)

    for i, given in enumerate(steps.addresses.tolist()):
        more, begin, end = int(steps.lengths[i]), int(shared[i]) * size, int(counts[i])
        ids = arrays.row(int(slots[i])) if end else np.empty(0, dtype=np.int32)
        if begin and arrays.copied_blocks:
            copied(ids, 0, size, given, 0)
        if begin < end:
            copied(ids, begin, end, given, more)
        else:
            addresses.append(given)
            lengths.append(more)
    return Steps(np.array(addresses, dtype=np.int64), np.array(lengths, dtype=np.int64), holds)
