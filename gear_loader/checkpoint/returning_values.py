"""The ragged values of trajectories that come back into memory from disk."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gear_loader.storage.coded_values import records_of
from gear_loader.storage.counters import COMING_BACK, NUM_PARKED
from gear_loader.storage.disk_records import rows_of
from gear_loader.storage.engine import Engine
from gear_loader.storage.operations.extents import SPOT_WIDTH
from gear_loader.storage.operations.view import DONE
from gear_loader.storage.payload import needed_bytes, places_of, write_payload
from gear_loader.storage.prefixes import Relative, kept_leaders, keys_of, leaders_of
from gear_loader.storage.ragged_input import Payload
from gear_loader.storage.states import FREE, WRITING
from gear_loader.storage.tier_counts import WANTED_BYTES
from gear_loader.utils.arrays import Array, data_address


class ReturningValues:
    """Reads the values of trajectories, and puts them into the memory of ragged values, one trajectory at a time.

    Those that a trajectory has in common with one in memory are there, and not stored again.

    Args:
        engine: of the table. slots, generations, rows: int64 [n], the trajectories, and their steps.
        outs: memory of each column and the first byte of each trajectory there, as `Source.read` has filled it.
        most_bytes: of the values of a trajectory; others stay where they are. None for any, for which memory is asked
            for.

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
        self._read = [self._values(i) if total[i] <= most else None for i in range(len(slots))]
        self._heap = engine.region.payload()
        engine.index.recovery.locked(self._forget)
        self._asks = most_bytes is None
        self._payload: Payload | None = None  # of the trajectory that has got room last
        self._offsets: Array = np.empty(0, dtype=np.int64)

    def _forget(self) -> None:
        """Make gaps of what is left of the trajectories, and of what nobody has of their leaders'; under the lock."""
        engine, arrays, heap = self._engine, self._engine.index.arrays, self._heap
        arrays.ops.reclaim(arrays.where)  # what no reader sees any more
        keys, kept, places = keys_of(arrays, self._slots), kept_leaders(arrays), list[int]()
        common = np.intersect1d(keys, kept)
        if len(common) and not arrays.counters[NUM_PARKED]:
            used = np.flatnonzero(arrays.state != FREE)
            who, since = leaders_of(arrays, used)
            found = since * arrays.num_slots + who
            # The records of what is being written are not complete.
            common = np.setdiff1d(common, found[arrays.state[used] == WRITING])
            kept = np.setdiff1d(kept, common)
            for slot in used[np.isin(found, common) & (arrays.extent[used, 1] >= 0)].tolist():
                for name, values in engine.schema.ragged.items():
                    records = records_of(engine.region, arrays, slot, name).tolist()
                    places += places_of(heap, records, values.row_bytes)
        arrays.ops.forget_payload(arrays.where, heap, keys, kept, np.unique(np.array(places, dtype=np.int64)))

    def _values(self, i: int) -> dict[str, Array]:
        """Read the values of a trajectory: the bytes of each column's."""
        found = {}
        for name, records in self._records[i].items():
            values, count = self._engine.schema.ragged[name], int(rows_of(records).sum())
            found[name] = np.empty(count * values.row_bytes, dtype=np.uint8)
            self._engine.payload.copy(values, records, 0, count, found[name])
        return found

    def _chosen(self, i: int, relative: Relative) -> Payload:
        """The values that are not in memory, under the lock; the records of the others are complete afterwards.

        Values are of the trajectory, number 0, or of its leader, number 1.
        """
        engine, slot = self._engine, int(self._slots[i])
        read, parts = self._read[i], list[tuple[int, Array, Array, Array, Array]]()
        assert read is not None
        is_leader = relative.leader in ((-1, -1), (slot, int(self._generations[i])))
        for name, records in self._records[i].items():
            column, counts = engine.schema[name], rows_of(records)
            sizes = counts * engine.schema.ragged[name].row_bytes
            addresses = data_address(read[name]) + np.cumsum(sizes) - sizes
            source, known, common = -1, 0, 0
            if column.group:
                source, known, common = relative.group, 1, 1
            elif not column.trajectory:
                source, known, common = relative.slot, relative.steps, relative.common
            known = 0 if source < 0 else min(known, len(records))
            if known:
                others = records_of(engine.region, engine.index.arrays, source, name)
                records[:known] = others[:known]
            middle = known if is_leader else max(known, min(common, len(records)))
            for number, span in ((1, slice(known, middle)), (0, slice(middle, None))):
                parts.append((number, records[span], counts[span], sizes[span], addresses[span]))
        parts = sorted((part for part in parts if len(part[1])), key=lambda part: part[0])
        ends = np.cumsum([len(part[1]) for part in parts], dtype=np.int64).tolist()
        runs = [(part[0], end - len(part[1]), end) for part, end in zip(parts, ends, strict=True)]
        none: Array = np.empty(0, dtype=np.int64)
        counts, sizes, addresses = (
            np.concatenate([none, *(part[kind] for part in parts)]) for kind in (2, 3, 4)
        )
        owned = np.array(runs, dtype=np.int64).reshape(-1, 3)
        return Payload(owned, sizes, counts, addresses, [part[1] for part in parts], read)

    def place(self, i: int, relative: Relative) -> bool:
        """Find room for the values of a trajectory; return whether there is some. The caller holds the lock.

        What it takes is a gap again unless the trajectory gets its blocks under the same lock.
        """
        if self._read[i] is None:
            return False
        arrays, slot = self._engine.index.arrays, int(self._slots[i])
        payload = self._payload = self._chosen(i, relative)
        self._offsets = np.zeros(len(payload.sizes), dtype=np.int64)
        owners: Array = np.array([(slot, self._generations[i]), relative.leader], dtype=np.int64)
        kept = np.union1d(kept_leaders(arrays), owners[1:, 1] * arrays.num_slots + owners[1:, 0])
        arrays.counters[COMING_BACK] = slot + 1
        try:
            given = *np.ascontiguousarray(owners.T), payload.runs, payload.sizes
            spots: Array = np.zeros((2, SPOT_WIDTH), dtype=np.int64)
            answer: int = arrays.ops.take_payload(
                arrays.where, self._heap, *given, kept, self._offsets, spots, 0
            )
        finally:
            arrays.counters[COMING_BACK] = 0
        if answer != DONE and self._asks:
            tier = arrays.tier_counts
            tier[WANTED_BYTES] = max(int(tier[WANTED_BYTES]), needed_bytes(payload))
        return answer == DONE

    def write(self) -> None:
        """Copy the values of the trajectory that has got room last, and complete its records; under the same lock.

        Raises:
            CorruptTableError: an extent is not valid.
        """
        assert self._payload is not None
        if not write_payload(self._payload, self._heap, self._offsets):
            raise self._engine.index.arrays.corrupt("a ragged value has a part outside of its memory")
