"""Checks of what trajectories to store begin with; the steps of others that they cannot share are copied."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import SchemaError, StaleIndexError
from gear_loader.storage.incoming import Steps
from gear_loader.storage.prefixes import Prefixes
from gear_loader.storage.readers import Ticket
from gear_loader.utils.arrays import Array, numbers, shown

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine


def located_after(
    engine: Engine, steps: Steps, prefix: Any, prefix_steps: Any, prefix_generation: Any
) -> Prefixes:
    """Check what trajectories are to begin with, and copy what they cannot share.

    Args:
        steps: of the trajectories, without those of others.
        prefix, prefix_steps, prefix_generation: as for `Table.add`.

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
                f"The prefix of trajectory {row} is index {slots[row]} of generation {wanted[row]}, which was removed "
                f"or evicted; another trajectory, of generation {known[row]}, has that index now. Nothing was stored."
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
    """The steps to write into new blocks, under a read ticket.

    A first block that is copied is a trajectory by itself.
    """
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
