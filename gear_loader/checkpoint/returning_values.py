"""The ragged values of trajectories that come back into memory from disk."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gear_loader.storage.counters import COMING_BACK
from gear_loader.storage.disk_records import rows_of
from gear_loader.storage.engine import Engine
from gear_loader.storage.operations.extents import SPOT_WIDTH
from gear_loader.storage.operations.view import DONE
from gear_loader.storage.payload import write_payload
from gear_loader.storage.prefixes import kept_leaders
from gear_loader.storage.ragged_input import Payload
from gear_loader.utils.arrays import Array, data_address


class ReturningValues:
    """Reads the values of trajectories, and puts them into the memory of ragged values, one trajectory at a time.

    Args:
        engine: of the table. slots, generations, rows: int64 [n], the trajectories, and their steps.
        outs: memory of each column and the first byte of each trajectory there, as `Source.read` has filled it.
        most_bytes: of the values of a trajectory; others stay where they are. None for any.

    Raises:
        LostRowsError, MovedRowsError: see `PayloadReader.read`.
    """

    def __init__(
        self,
        engine: Engine,
        slots: Array,
        generations: Array,
        rows: Array,
        outs: Mapping[str, tuple[Array, Array]],
        most_bytes: int | None,
    ) -> None:
        self._engine, self._slots, self._generations = engine, slots, generations
        schema = engine.schema
        self._records: list[dict[str, Array]] = [{} for _ in slots]
        total: Array = np.zeros(len(slots), dtype=np.int64)
        for name, values in schema.ragged.items():
            out, offsets = outs[name]
            counts = np.ones_like(rows) if schema[name].trajectory else rows
            for i, (at, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=True)):
                records = out[at : at + 16 * count].view(np.int64).reshape(-1, 2)
                self._records[i][name] = records
                total[i] += int(rows_of(records).sum()) * values.row_bytes
        most = engine.region.layout.payload if most_bytes is None else most_bytes
        self._payloads = [self._payload(i) if total[i] <= most else None for i in range(len(slots))]
        ops, where = engine.index.arrays.ops, engine.index.arrays.where
        heap = self._heap = engine.region.payload()
        engine.index.recovery.locked(lambda: ops.forget_payload(where, heap, slots))
        self._offsets: Array = np.empty(0, dtype=np.int64)

    def _payload(self, i: int) -> Payload:
        """Read the values of a trajectory."""
        runs: list[tuple[int, int, int]] = []
        rows, sizes, addresses, holds, parts, first = [], [], [], [], [], 0
        for name, records in self._records[i].items():
            values = self._engine.schema.ragged[name]
            counts = rows_of(records)
            memory: Array = np.empty(int(counts.sum()) * values.row_bytes, dtype=np.uint8)
            self._engine.payload.copy(values, records, 0, int(counts.sum()), memory)
            sizes.append(counts * values.row_bytes)
            addresses.append(data_address(memory) + np.cumsum(sizes[-1]) - sizes[-1])
            rows.append(counts)
            runs.append((0, first, first + len(counts)))
            first += len(counts)
            holds.append(memory)
            parts.append(records)
        numbers = np.concatenate(sizes), np.concatenate(rows), np.concatenate(addresses)
        return Payload(np.array(runs, dtype=np.int64), *numbers, parts, holds)

    def place(self, i: int) -> bool:
        """Find room for the values of a trajectory; return whether there is some. The caller holds the lock.

        What it takes is a gap again unless the trajectory gets its blocks under the same lock.
        """
        payload = self._payloads[i]
        if payload is None:
            return False
        arrays, who = self._engine.index.arrays, slice(i, i + 1)
        self._offsets = np.zeros(len(payload.sizes), dtype=np.int64)
        arrays.counters[COMING_BACK] = int(self._slots[i]) + 1
        try:
            given = self._slots[who], self._generations[who], payload.runs, payload.sizes
            spots: Array = np.zeros((1, SPOT_WIDTH), dtype=np.int64)
            answer: int = arrays.ops.take_payload(
                arrays.where, self._heap, *given, kept_leaders(arrays), self._offsets, spots, 0
            )
        finally:
            arrays.counters[COMING_BACK] = 0
        return answer == DONE

    def write(self, i: int) -> None:
        """Copy the values of a trajectory that has room, and complete its records; under the same lock.

        Raises:
            CorruptTableError: an extent is not valid.
        """
        payload = self._payloads[i]
        assert payload is not None
        if not write_payload(payload, self._heap, self._offsets):
            raise self._engine.index.arrays.corrupt("a ragged value has a part outside of its memory")
