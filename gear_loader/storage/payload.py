"""Ragged values of a table: stored in its payload memory, and read by their records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.native.ragged_copies import (
    COLUMN_COUNT,
    COLUMN_OUT,
    PIECE_WIDTH,
    count_rows,
    list_values,
    measure_columns,
    measure_values,
    read_columns,
    read_values,
    write_values,
)
from gear_loader.storage.coded_values import CodedReader, records_of
from gear_loader.storage.disk import ValueReader
from gear_loader.storage.disk_records import MovedRowsError, parts_of, rows_of
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations.extents import (
    CURSOR,
    FIRST,
    GENERATION,
    GRAIN,
    HEADER,
    NEXT,
    SIZE,
    SLOT,
    SPOT_AT,
    SPOT_END,
    SPOT_EXTENT,
    SPOT_GENERATION,
    SPOT_SLOT,
    SPOT_TAKEN,
    extent_size,
)
from gear_loader.storage.prefixes import kept_leaders, leaders_of
from gear_loader.storage.ragged import Ragged, Values, texts
from gear_loader.storage.ragged_input import Payload, StepValues
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array
from gear_loader.utils.lazy_torch import torch

if TYPE_CHECKING:
    from gear_loader.storage.index import Index

assert (HEADER, SIZE, NEXT) == (32, 0, 3)
_SPOT = SPOT_SLOT, SPOT_GENERATION, SPOT_EXTENT, SPOT_AT, SPOT_END, SPOT_TAKEN
assert tuple(range(6)) == _SPOT  # compiled into `gear_loader.native.ragged_copies`


def needed_bytes(payload: Payload) -> int:
    """Bytes that values take in one gap for each trajectory."""
    runs = payload.runs
    ends = np.concatenate(([0], np.cumsum(payload.sizes)))
    each = ends[runs[:, 2]] - ends[runs[:, 1]]
    return int((-(-each // GRAIN) * GRAIN).sum()) + HEADER * len(np.unique(runs[:, 0])) + FIRST


def check_payload_fits(payload: Payload, most: int, taken: int = 0) -> None:
    """Raise SchemaError for values that the memory cannot hold, whatever is evicted for them.

    Args:
        most: bytes of the memory. taken: bytes that the trajectories have already.
    """
    needed = needed_bytes(payload) + taken
    if needed > most:
        raise SchemaError(
            f"The ragged values of {len(np.unique(payload.runs[:, 0])):,} trajectories take {needed:,} bytes; this "
            f"table has {most:,} for those of all. Create it with a larger Memory payload, or add fewer at a time."
        )


def write_steps(values: StepValues, lanes: Array, steps: slice | Array, heap: Array, offsets: Array) -> bool:
    """As `write_payload`, of values that got places in the order of `StepValues.runs`; `steps` may be int64 [k] too."""
    sizes, addresses = values.placed(lanes, steps, offsets)
    return bool(write_values(heap.ctypes.data, heap.nbytes, addresses, offsets, sizes))


def write_payload(payload: Payload, heap: Array, offsets: Array) -> bool:
    """Copy values to their places, int64 [V], and complete their records; False if the memory is corrupt."""
    if not write_values(heap.ctypes.data, heap.nbytes, payload.addresses, offsets, payload.sizes):
        return False
    rows = np.where(offsets < 0, -payload.rows, payload.rows)
    if isinstance(payload.records, np.ndarray):
        payload.records[:, 0], payload.records[:, 1] = abs(offsets), rows
        return True
    for (_, begin, end), records in zip(payload.runs.tolist(), payload.records, strict=True):
        records[:, 0], records[:, 1] = abs(offsets[begin:end]), rows[begin:end]
    return True


def used_bytes(region: Region, index: Index) -> Array:
    """Bytes of the memory of ragged values that each slot has, with headers and padding, int64 [slots]."""
    used: Array = np.zeros(index.arrays.num_slots, dtype=np.int64)
    if region.layout.payload:
        ops, where, heap = index.arrays.ops, index.arrays.where, region.payload()
        index.recovery.read(lambda: ops.measure_payload(where, heap, kept_leaders(index.arrays), used))
    return used


def value_bytes(region: Region, arrays: IndexArrays, slots: Array) -> int:
    """Bytes of the ragged values of trajectories, int64 [n], that are in memory. Takes no lock."""
    total, schema, filled = 0, region.layout.schema, filled_bits(arrays, slots)
    for name, values in schema.ragged.items():
        given = arrays.extent, arrays.block_ids, arrays.num_blocks, region.column_place(name)
        # Records of what is not filled yet name nothing.
        chosen = slots[filled & schema.late_bits([name]) != 0] if name in schema.late else slots
        total += int(count_rows(chosen, *given, schema[name].trajectory)) * values.row_bytes
    return total


class PayloadReader:
    """Reads ragged values of a table by their records, under a read ticket.

    Args:
        region, index: of the table. check: raises CorruptTableError if so many records are invalid.
        tier: returns what reads values on disk, of a table with a disk tier; else None.

    Attributes:
        address, end: of the payload memory, and its bytes. check: as given.
    """

    def __init__(
        self,
        region: Region,
        index: IndexArrays,
        check: Callable[[int], None],
        tier: Callable[[], ValueReader] | None = None,
    ) -> None:
        heap = region.payload()
        self._coded = CodedReader(region, index, self._check_bytes, self._copy_bytes, tier)
        self._hold, self.address, self.end, self.check = heap, heap.ctypes.data, heap.nbytes, check
        self._tier, self._region, self._index = tier, region, index
        self._names = {id(values): name for name, values in region.layout.schema.ragged.items()}

    def read(
        self,
        values: Values,
        records: Array,
        shape: tuple[int, ...],
        *,
        slots: Array,
        pinned: bool = False,
        device: torch.device | None = None,
        encoded: bool = False,
    ) -> Any:
        """Values of ``records``, int64 ``[n, 2]``: a `Ragged` of n values of this shape, lists of text, or what
        `decoding.decoded` makes of encoded ones.

        Args:
            values: of the table's schema. slots: int64 [n], of their trajectories.
            pinned: into pinned memory, except text. device: as for `decoding.decoded`. encoded: those with a codec as
                lists of bytes.

        Raises:
            CorruptTableError: a record names no memory of the table. CodecError: a value cannot be decoded.
            LostRowsError, MovedRowsError: of values on disk.
        """
        records, row_bytes = np.ascontiguousarray(records), values.row_bytes
        if values.coded is not None and not encoded:
            name = self._names[id(values)]
            return self._coded.read(name, records, shape, slots, pinned=pinned, device=device)
        pinned = pinned and values.kind == "array"
        offsets = torch.empty(len(records) + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        places = offsets.numpy()
        rows = self.measure(records, row_bytes, places)
        memory = torch.empty((rows, *values.shape), dtype=values.dtype, device="cpu", pin_memory=pinned)
        flat = memory.reshape(-1).view(torch.uint8).numpy()
        self.check(self.copy(values, records, 0, rows, flat))
        if values.kind != "array":
            try:
                return texts(memory.numpy(), places, values.kind, shape)
            except ValueError:
                self.check(1)
                raise
        return Ragged._of(memory, offsets, shape)

    @property
    def in_memory(self) -> bool:
        """Whether no value is on disk only."""
        return self._tier is None

    def read_arrays(
        self, columns: Sequence[tuple[Values, torch.Tensor]], *, pinned: bool = False
    ) -> list[Ragged]:
        """Values of several columns of arrays, of a table whose values are all in memory; see `ArrayRead`."""
        return ArrayRead(self, columns, pinned=pinned).read()

    def measure(self, records: Array, row_bytes: int, offsets: Array) -> int:
        """Write the `Ragged.offsets` of records, int64 [n + 1]; return the rows of all. Errors as of `read`."""
        self.check(int(measure_values(records, row_bytes, FIRST, self.end, self._tier is not None, offsets)))
        return int(offsets[-1])

    def list(
        self, records: Array, row_bytes: int, unit: int, part_shift: int, size: int
    ) -> tuple[Array, Array]:
        """Pieces and ends of measured records, see `list_values`, for a GPU; `size`: bytes of all. Errors as of `read`.

        It has them one after another, so pieces are at most as many as records, but for splits and ends of parts.
        """
        ends: Array = np.zeros(-(-size >> part_shift), dtype=np.int64)
        count = len(records) + len(ends)
        while True:
            pieces: Array = np.empty((count, PIECE_WIDTH), dtype=np.int32)
            count = int(
                list_values(self.address, self.end, records, row_bytes, unit, part_shift, pieces, ends)
            )
            self.check(int(count < 0))
            if count <= len(pieces):
                return pieces[:count], ends

    def count_invalid(self, values: Values, records: Array) -> int:
        """How many records, int64 [n, 2], name no memory for such values; of a table without a disk tier."""
        offsets = np.empty(len(records) + 1, dtype=np.int64)
        return int(measure_values(records, values.row_bytes, FIRST, self.end, False, offsets))

    def records(self, values: Values, slots: Array, steps: Array) -> Array:
        """The records of values, int64 [n, 2], from where they lie now; zeros of steps that are not there.

        Args:
            values: as for `read`. slots: int64 [n], of live trajectories, of which the caller holds a read ticket.
            steps: int64 [n]; 0 of a column per trajectory.

        Raises:
            MovedRowsError: some were moved meanwhile. LostRowsError, StaleIndexError: see `Source.read`.
            CorruptTableError: the index names blocks that do not exist.
        """
        name, index = self._names[id(values)], self._index
        once = self._region.layout.schema[name].trajectory
        lengths, places = index.extent[slots, 0], index.extent[slots, 1]
        there = (steps >= 0) & (steps < (1 if once else lengths))
        inside, outside = np.flatnonzero(there & (places >= 0)), np.flatnonzero(there & (places < 0))
        found: Array = np.zeros((len(slots), 2), dtype=np.int64)
        block, step = np.divmod(steps[inside], self._region.layout.block_steps)
        ids = index.ids_at(places[inside] + block)  # of others if they were moved meanwhile
        found[inside] = np.ascontiguousarray(self._region.column(name)[ids, step]).view(np.int64)
        if self._tier is not None and len(outside):
            some, first, out = slots[outside], steps[outside], np.empty(16 * len(outside), dtype=np.uint8)
            follows = (some[1:] == some[:-1]) & (first[1:] == first[:-1] + 1)
            begins = np.flatnonzero(np.concatenate(([True], ~follows)))
            some, first, counts = some[begins], first[begins], np.diff(begins, append=len(outside))
            self._tier().read(some, index.generation[some], first, counts, {name: (out, 16 * begins)})
            found[outside] = out.view(np.int64).reshape(-1, 2)
        if (index.extent[slots, 1] != places).any():
            raise MovedRowsError
        return found

    def located(self, values: Values, records: Array) -> tuple[Array, object]:
        """The address of each value, int64 [n], while its trajectory may be read.

        Returns:
            Addresses; and what holds copies of values that lie in parts, or with a disk tier of all.

        Raises:
            CorruptTableError: a record names no memory of the table. LostRowsError, MovedRowsError: of values on disk.
        """
        if self._tier is not None:
            count = rows_of(records)
            memory: Array = np.empty(int(count.sum()) * values.row_bytes, dtype=np.uint8)
            self.check(self.copy(values, records, 0, int(count.sum()), memory))
            return memory.ctypes.data + (np.cumsum(count) - count) * values.row_bytes, memory
        self.check(self.count_invalid(values, records))
        addresses, split = self.address + records[:, 0], np.flatnonzero(records[:, 1] < 0)
        rows = -records[split, 1]
        copies: Array = np.empty(int(rows.sum()) * values.row_bytes, dtype=np.uint8)
        if len(split):
            self.check(self.copy(values, records[split], 0, int(rows.sum()), copies))
            addresses[split] = copies.ctypes.data + (np.cumsum(rows) - rows) * values.row_bytes
        return addresses, copies

    def _check_bytes(self, records: Array) -> None:
        self.measure(np.ascontiguousarray(records), 1, np.empty(len(records) + 1, dtype=np.int64))

    def _copy_bytes(self, column: str, records: Array, out: Array) -> None:
        values = self._region.layout.schema.ragged[column]
        self.check(self.copy(values, records, 0, len(out), out))

    def most_rows(self, values: Values) -> int:
        """Most rows that a value can have."""
        return self.end // values.row_bytes

    def copy(self, values: Values, records: Array, skip: int, count: int, out: Array) -> int:
        """Copy rows of the values of records, as they lie one after another; return how many are invalid.

        Args:
            values: as for `read`. records: int64 [n, 2], contiguous. skip, count: first row, and number of rows.
            out: uint8 [bytes], contiguous.

        Raises:
            LostRowsError, MovedRowsError: of values on disk.
        """
        size, tiered = values.row_bytes, self._tier is not None
        given = FIRST, records, size, tiered, skip * size, count * size, out.ctypes.data
        bad = int(read_values(self.address, self.end, *given))
        if self._tier is not None and (records[:, 0] < 0).any():
            rows = rows_of(records)
            ends = np.cumsum(rows)
            low, high = np.maximum(ends - rows, skip), np.minimum(ends, skip + count)
            which = np.flatnonzero((records[:, 0] < 0) & (records[:, 1] >= 0) & (high > low))
            slots, tags, first, _ = parts_of(records[which])
            first, low = first + low[which] - (ends - rows)[which], low[which]
            name = self._names[id(values)]
            if len(which):
                spans = first, high[which] - low
                self._tier().read_values(name, slots, tags, *spans, (out, (low - skip) * size))
        return bad


class ArrayRead:
    """Reads values of several columns of arrays in one call, and again those of other records in the same memory.

    Args:
        reader: of a table whose values are all in memory.
        columns: what the values are, and their records, int64 ``[..., 2]``, contiguous, to which the caller refers.
        pinned: as for `PayloadReader.read`.
    """

    def __init__(
        self, reader: PayloadReader, columns: Sequence[tuple[Values, torch.Tensor]], *, pinned: bool = False
    ) -> None:
        self._reader, self._pinned = reader, pinned
        self._places: Array = np.array(
            [(each.data_ptr(), each.numel() // 2, values.row_bytes, 0) for values, each in columns],
            dtype=np.int64,
        )
        self._kinds = [(values.dtype, values.shape) for values, _ in columns]
        self._arrange([tuple(each.shape[:-1]) for _, each in columns])

    def _arrange(self, shapes: list[tuple[int, ...]]) -> None:
        """Let the records of each column be arranged so."""
        self._shapes, self._counts = shapes, [math.prod(shape) for shape in shapes]
        self._places[:, COLUMN_COUNT] = self._counts

    def read(self, counts: Sequence[int] | None = None) -> list[Ragged]:
        """The values, under the read ticket of their rows.

        Args:
            counts: number of records of each column, the first ones of it; by default as before, at first all.

        Raises:
            CorruptTableError: a record names no memory of the table.
        """
        reader, places, pinned = self._reader, self._places, self._pinned
        if counts is not None and counts != self._counts:  # seldom with windows of one step
            self._arrange([(count,) for count in counts])
        shapes, sizes = self._shapes, [count + 1 for count in self._counts]
        offsets = torch.empty(sum(sizes), dtype=torch.int64, device="cpu", pin_memory=pinned)
        bounds = offsets.numpy()
        reader.check(measure_columns(places, FIRST, reader.end, bounds))
        parts = offsets.split(sizes) if len(sizes) > 1 else (offsets,)
        found, at = list[Ragged](), -1
        for number, ((dtype, shape), arranged) in enumerate(zip(self._kinds, shapes, strict=True)):
            at += sizes[number]
            rows = int(bounds[at])
            memory = torch.empty((rows, *shape), dtype=dtype, device="cpu", pin_memory=pinned)
            places[number, COLUMN_OUT] = memory.data_ptr()
            found.append(Ragged._of(memory, parts[number], arranged))
        reader.check(read_columns(reader.address, reader.end, FIRST, places, bounds))
        return found


def check_payload(region: Region, index: IndexArrays) -> None:
    """Check the extents of ragged values, and that those of live trajectories hold their values; under the lock.

    Raises:
        AssertionError: the message says where.
    """
    try:
        _check_payload(region, index)
    except IndexError as error:
        raise AssertionError("an extent of ragged values, or a record of one, is invalid") from error


def _check_payload(region: Region, index: IndexArrays) -> None:
    heap = region.payload()
    if not len(heap) or not heap[CURSOR]:
        return
    at, found = FIRST, []
    while at < heap.nbytes:
        size = extent_size(heap, at)
        found.append((at, at + size, *heap[at // 8 + SLOT : at // 8 + GENERATION + 1].tolist()))
        at += size
    extents: Array = np.array(found, dtype=np.int64)
    assert at == heap.nbytes, "the extents end beyond their memory"
    assert heap[CURSOR] in (*extents[:, 0].tolist(), at), "the cursor is no beginning of an extent"
    schema = region.layout.schema
    for slot in np.flatnonzero((index.state == READY) & (index.extent[:, 1] >= 0)).tolist():
        filled = int(filled_bits(index, np.array([slot]))[0]) if schema.late else 0
        for name, values in schema.ragged.items():
            if schema[name].late and not filled & schema.late_bits([name]):
                continue
            records = records_of(region, index, slot, name)
            each = (_parts_of(heap, place, rows, values.row_bytes) for place, rows in records.tolist())
            parts = list(itertools.chain.from_iterable(each))
            begins, sizes = np.array(parts, dtype=np.int64).reshape(-1, 2).T
            which = np.searchsorted(extents[:, 0], begins, side="right") - 1
            inside = (begins >= extents[which, 0] + HEADER) & (begins + sizes <= extents[which, 1])
            owners = [(slot, int(index.generation[slot]))]
            if len(index.prefix) and (schema[name].group or not schema[name].trajectory):
                leader, since = leaders_of(index, np.array([slot]))
                owners = [*owners[: not schema[name].group], (int(leader[0]), int(since[0]))]
            own = np.any([(extents[which, 2:4] == owner).all(axis=1) for owner in owners], axis=0)
            assert (inside & own).all(), f"values of column {name!r} of slot {slot} lie in memory of others"


def places_of(heap: Array, records: list[list[int]], row_bytes: int) -> list[int]:
    """A byte in each extent that values have, by their records; under the lock."""
    found = [place for place, rows in records if rows > 0]
    split = [_parts_of(heap, place, rows, row_bytes) for place, rows in records if rows < 0]
    return found + [place for parts in split for place, _ in parts]


def _parts_of(heap: Array, place: int, rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """First byte and bytes of each part of a value."""
    left = abs(rows) * row_bytes
    if rows > 0:
        yield place, left
    while rows < 0 and left > 0:
        part = min(left, extent_size(heap, place) - HEADER)
        yield place + HEADER, part
        left, place = left - part, int(heap[place // 8 + NEXT])
