"""Checks of what trajectories to store begin with; the steps of others that they cannot share are copied."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import SchemaError, StaleIndexError
from gear_loader.storage.incoming import Steps, prefix_missing, prefix_numbers
from gear_loader.storage.prefixes import Prefixes
from gear_loader.storage.readers import Ticket
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine


class Beginning:
    """What trajectories to store begin with, as it was given.

    Args:
        engine: of the table. prefix, steps, generation: as `Table.extend` takes them.

    Raises:
        SchemaError: the table does not share blocks.
    """

    def __init__(self, engine: Engine, prefix: Any, steps: Any, generation: Any) -> None:
        if prefix is None:
            raise prefix_missing(steps, generation)
        if not engine.region.layout.prefixes:
            raise SchemaError(
                "A prefix was given, and the table shares no blocks; expected a table that was created with "
                "memory=gear_loader.Memory(prefixes=True)."
            )
        self._engine, self._prefix, self._steps, self._generation = engine, prefix, steps, generation

    def records(self, count: int) -> list[dict[str, Array]]:
        """The records of values per group that each of `count` trajectories has in common with what it begins with.

        Raises:
            As `located`.
        """
        arrays, region, names = self._engine.index.arrays, self._engine.region, self._engine.schema.per_group
        ticket = Ticket()

        def read() -> list[dict[str, Array]]:
            slots, self._generation, _ = self._begin(count, ticket)
            found: list[dict[str, Array]] = []
            for slot in slots.tolist():
                first = arrays.row(slot)[0] if slot >= 0 and names else 0
                each = names if slot >= 0 else ()
                found.append({name: region.column(name)[first, 0].copy().view(np.int64) for name in each})
            return found

        return ticket.during(read)

    def located(self, steps: Steps) -> Prefixes:
        """Find what trajectories are to begin with, and copy what they cannot share.

        Args:
            steps: of the trajectories, without those of others.

        Raises:
            SchemaError: values that do not fit. StaleIndexError: a trajectory that is not there.
        """
        arrays, ticket = self._engine.index.arrays, Ticket()

        def locate() -> Prefixes:
            slots, known, counts = self._begin(len(steps.lengths), ticket)
            shared = counts // arrays.block_steps
            shared[shared <= arrays.copied_blocks] = 0
            return Prefixes(slots, known, counts, shared, _rows(self._engine, steps, slots, counts, shared))

        return ticket.during(locate)

    def _begin(self, count: int, ticket: Ticket) -> tuple[Array, Array, Array]:
        """Begin a read ticket; return slots, generations and steps of what trajectories begin with, int64 [count]."""
        slots = prefix_numbers("prefix", self._prefix, count)
        chosen = np.flatnonzero(slots >= 0)
        known, counts = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64)
        wanted = self._generation
        wanted = None if wanted is None else prefix_numbers("prefix_generation", wanted, count)
        given = None if self._steps is None else prefix_numbers("prefix_steps", self._steps, count)
        known[chosen], lengths = self._engine.index.reader.begin_read_rows(slots[chosen], ticket)
        if wanted is not None and (bad := np.flatnonzero(known[chosen] != wanted[chosen])).size:
            row = chosen[bad[0]]
            raise StaleIndexError(
                f"The prefix of trajectory {row} is index {slots[row]} of generation {wanted[row]}, which was removed "
                f"or evicted; another trajectory, of generation {known[row]}, has that index now. Nothing was stored."
            )
        counts[chosen] = lengths if given is None else given[chosen]
        least = 0 if self._engine.schema.per_group else 1
        if (bad := np.flatnonzero((counts[chosen] < least) | (counts[chosen] > lengths))).size:
            row = chosen[bad[0]]
            raise SchemaError(
                f"prefix_steps of trajectory {row} is {counts[row]:,}; expected {least} to {lengths[bad[0]]:,}, the "
                f"steps of index {slots[row]}."
            )
        return slots, known, counts


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
