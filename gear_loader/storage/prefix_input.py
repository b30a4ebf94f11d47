"""Checks of what trajectories to store begin with; the steps of others that they cannot share are copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import SchemaError, StaleIndexError, TableFullError
from gear_loader.storage.counters import RUNS
from gear_loader.storage.incoming import Steps, prefix_missing, prefix_numbers
from gear_loader.storage.prefixes import AwayError, Prefixes, leaders_of, prefixes_of
from gear_loader.storage.ragged_input import Payload, joined_payloads
from gear_loader.storage.readers import Ticket
from gear_loader.storage.recalling import Recall
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
        self._moves = -1

    def store(self, attempt: Callable[[], Array]) -> Array:
        """Call a function that stores trajectories with `records` and `located`, and return what it does.

        It is called again when what they begin with has been brought into memory, if that lay on disk only.

        Raises:
            TableFullError: there was no room in time. And what the function raises.
        """
        recall = Recall(self._engine)
        while True:
            self._moves = -1
            try:
                return attempt()
            except AwayError as error:
                if len(error.slots) and not recall.bring(error.slots, error.blocks):
                    raise TableFullError(
                        f"Timed out after {recall.timeout:g} s: a trajectory of the indices {error.slots.tolist()} "
                        "lies on disk only, and there is no room to bring it into memory for those that begin with its "
                        "steps. Make the memory of the table larger (max_blocks, payload)."
                    ) from None

    def records(self, count: int) -> list[dict[str, Array]]:
        """The records of values per group that each of `count` trajectories has in common with what it begins with.

        Raises:
            As `located`.
        """
        arrays, region, names = self._engine.index.arrays, self._engine.region, self._engine.schema.per_group
        ticket = Ticket()

        def read() -> list[dict[str, Array]]:
            slots, self._generation, _, extents = self._begin(count, ticket)
            found: list[dict[str, Array]] = []
            for slot, extent in zip(slots.tolist(), extents.tolist(), strict=True):
                first = arrays.row(slot, extent)[0] if slot >= 0 and names else 0
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
            slots, known, counts, extents = self._begin(len(steps.lengths), ticket)
            leads = self._leads(slots, counts)
            shared = np.where(leads, 0, counts // arrays.block_steps)
            shared[shared <= arrays.copied_blocks] = 0
            copies = _Copies(self._engine, steps, leads)
            rows = copies.rows(slots, extents, counts, shared)
            moves = self._moves
            return Prefixes(
                slots, known, counts, shared, rows, copies.payload(), leads, moves, copies.records
            )

        return ticket.during(locate)

    def _leads(self, slots: Array, counts: Array) -> Array:
        """Trajectories that get copies of ragged values, as not all of these are the leader's, bool [n]."""
        arrays, leads = self._engine.index.arrays, slots >= 0
        if not self._engine.schema.steps.ragged:
            return np.zeros(len(slots), dtype=bool)
        parents = slots[leads]
        leaders, generations = leaders_of(arrays, parents)
        followed = (leaders != parents) | (generations != arrays.generation[parents])
        leads[leads] = followed & (counts[leads] > prefixes_of(arrays, parents)[1])
        return leads

    def _begin(self, count: int, ticket: Ticket) -> tuple[Array, Array, Array, Array]:
        """Begin a read ticket; return slots, generations and steps of what trajectories begin with, int64 [count], and
        their rows of `extent`, int64 [count, 3].

        Raises:
            AwayError: some lie on disk only.
        """
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
        arrays = self._engine.index.arrays
        extents = arrays.extent[slots]
        if arrays.tier is not None:
            # What is read from here on may be stored elsewhere once one of them has left and come back.
            self._moves = int(arrays.counters[RUNS]) if self._moves < 0 else self._moves
            away = extents[chosen, 1] < 0
            if away.any():
                raise AwayError(np.unique(slots[chosen[away]]))
        return slots, known, counts, extents


class _Copies:
    """Makes the steps to write into new blocks, under a read ticket.

    Args:
        engine: of the table. steps: that are given. leads: bool [n], trajectories that get ragged values copied.

    Attributes:
        records: as of `Prefixes`.
    """

    def __init__(self, engine: Engine, steps: Steps, leads: Array) -> None:
        self._engine, self._steps, self._leads = engine, steps, leads
        self._schema = engine.schema.added
        self._addresses: list[list[int]] = []
        self._lengths: list[int] = []
        self._holds: list[object] = [steps.hold]
        self._more: list[tuple[int, Payload]] = []
        self.records: list[tuple[int, int, int]] = []

    def rows(self, slots: Array, extents: Array, counts: Array, shared: Array) -> Steps:
        """The rows; a first block that is copied is a trajectory by itself."""
        arrays = self._engine.index.arrays
        size = arrays.block_steps
        for i, given in enumerate(self._steps.addresses.tolist()):
            more, begin, end = int(self._steps.lengths[i]), int(shared[i]) * size, int(counts[i])
            ids = arrays.row(int(slots[i]), extents[i].tolist()) if end else np.empty(0, dtype=np.int32)
            if begin and arrays.copied_blocks:
                self._copy(i, ids, (0, size), given, 0)
            if begin < end:
                self._copy(i, ids, (begin, end), given, more)
            else:
                self._addresses.append(given)
                self._lengths.append(more)
        lengths = np.array(self._lengths, dtype=np.int64)
        return Steps(np.array(self._addresses, dtype=np.int64), lengths, self._holds)

    def payload(self) -> Payload | None:
        """The values to store."""
        return joined_payloads(self._steps.payload, self._more)

    def _copy(self, i: int, ids: Array, span: tuple[int, int], given: list[int], more: int) -> None:
        """Rows of blocks, from the first of `span` to before the second, then the first `more` of what is given."""
        (first, end), size, places = span, self._engine.index.arrays.block_steps, []
        begin = first // size * size
        for (name, column), address in zip(self._schema.items(), given, strict=True):
            if column.trajectory:
                places.append(self._own(i, name, address) if column.group and self._leads[i] else address)
                continue
            blocks = ids[first // size : -(-end // size)]
            rows = self._engine.region.column(name)[blocks].reshape(-1, column.step_bytes)[
                first - begin : end - begin
            ]
            joined = np.empty((len(rows) + more, column.step_bytes), dtype=np.uint8)
            joined[: len(rows)] = rows
            behind = joined.ctypes.data + rows.nbytes
            if more:
                ctypes.memmove(behind, address, more * column.step_bytes)
            if column.ragged is not None:
                if self._leads[i]:
                    own = self._values(i, name, joined[: len(rows)])
                    self.records.append((joined.ctypes.data, own.ctypes.data, own.nbytes))
                self.records.append((behind, address, more * column.step_bytes))
            self._holds.append(joined)
            places.append(joined.ctypes.data)
        self._addresses.append(places)
        self._lengths.append(end - first + more)

    def _own(self, i: int, name: str, address: int) -> int:
        """Where the record of a copy of a value per group will be."""
        record = np.frombuffer(ctypes.string_at(address, 16), dtype=np.uint8)
        return int(self._values(i, name, record).ctypes.data)

    def _values(self, i: int, name: str, rows: Array) -> Array:
        """Copy values, by their records; return the records of the copies, zeros yet."""
        values, reader = self._engine.schema.ragged[name], self._engine.payload
        records = np.ascontiguousarray(rows).reshape(-1).view(np.int64).reshape(-1, 2)
        offsets: Array = np.empty(len(records) + 1, dtype=np.int64)
        total = reader.measure(records, values.row_bytes, offsets)
        data: Array = np.empty(total * values.row_bytes, dtype=np.uint8)
        reader.check(reader.copy(values, records, 0, total, data))
        counts, own = np.diff(offsets), np.zeros_like(records)
        run: Array = np.array([[i, 0, len(records)]], dtype=np.int64)
        places = data.ctypes.data + offsets[:-1] * values.row_bytes
        self._more.append((i, Payload(run, counts * values.row_bytes, counts, places, [own], data)))
        return own
