"""Ragged values of a table: stored in its payload memory, and read by their records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gear_loader.native.ragged_copies import measure_values, read_values, write_values
from gear_loader.storage.coded_values import CodedReader
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
from gear_loader.storage.ragged import Ragged, Values, texts
from gear_loader.storage.ragged_input import Payload, StepValues
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array
from gear_loader.utils.lazy_torch import torch

assert (HEADER, SIZE, NEXT) == (32, 0, 3)
assert (SPOT_SLOT, SPOT_GENERATION, SPOT_EXTENT, SPOT_AT, SPOT_END, SPOT_TAKEN) == (
    0,
    1,
    2,
    3,
    4,
    5,
)  # compiled into `gear_loader.native.ragged_copies`


def needed_bytes(payload: Payload) -> int:
    """Bytes that values take in one gap for each trajectory."""
    runs = payload.runs
    ends = np.concatenate(([0], np.cumsum(payload.sizes)))
    each = ends[runs[:, 2]] - ends[runs[:, 1]]
    return int((-(-each // GRAIN) * GRAIN).sum()) + HEADER * len(np.unique(runs[:, 0])) + FIRST


def write_steps(values: StepValues, lanes: Array, steps: slice | Array, heap: Array, offsets: Array) -> bool:
    """As `write_payload`, of values that got places in the order of `StepValues.runs`; `steps` may be int64 [k] too."""
    sizes, addresses = values.placed(lanes, steps, offsets)
    return bool(write_values(heap.ctypes.data, heap.nbytes, addresses, offsets, sizes))


def write_payload(payload: Payload, heap: Array, offsets: Array) -> bool:
    """Copy values to their places, int64 [V], and complete their records; False if the memory is corrupt."""
    if not write_values(heap.ctypes.data, heap.nbytes, payload.addresses, offsets, payload.sizes):
        return False
    rows = np.where(offsets < 0, -payload.rows, payload.rows)
    for (_, begin, end), records in zip(payload.runs.tolist(), payload.records, strict=True):
        records[:, 0], records[:, 1] = abs(offsets[begin:end]), rows[begin:end]
    return True


class PayloadReader:
    """Reads ragged values of a table by their records, under a read ticket.

    Args:
        region, index: of the table. check: raises CorruptTableError if so many records are invalid.
    """

    def __init__(self, region: Region, index: IndexArrays, check: Callable[[int], None]) -> None:
        heap = region.payload()
        self._coded = CodedReader(region, index, self._check_bytes, self._copy_bytes)
        self._hold, self._base, self._end, self._check = heap, heap.ctypes.data, heap.nbytes, check

    def read(
        self, values: Values, records: Array, shape: tuple[int, ...], *, slots: Array, pinned: bool = False
    ) -> Any:
        """Values of ``records``, int64 ``[n, 2]``: a `Ragged` of n values of this shape, lists of text, or what
        `decoding.decoded` makes of encoded ones.

        Args:
            slots: int64 [n], of their trajectories. pinned: into pinned memory, except text.

        Raises:
            CorruptTableError: a record names no memory of the table. CodecError: a value cannot be decoded.
        """
        records, row_bytes = np.ascontiguousarray(records), values.row_bytes
        if values.coded is not None:
            return self._coded.read(values, records, shape, slots, pinned=pinned)
        pinned = pinned and values.kind == "array"
        offsets = torch.empty(len(records) + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        places = offsets.numpy()
        self._check(int(measure_values(records, row_bytes, FIRST, self._end, places)))
        memory = torch.empty(
            (int(places[-1]), *values.shape), dtype=values.dtype, device="cpu", pin_memory=pinned
        )
        self._check(self.copy(records, row_bytes, 0, int(places[-1]) * row_bytes, memory.data_ptr()))
        if values.kind != "array":
            try:
                return texts(memory.numpy(), places, values.kind, shape)
            except ValueError:
                self._check(1)
                raise
        return Ragged._of(memory, offsets, shape)

    def _check_bytes(self, records: Array) -> None:
        offsets = np.empty(len(records) + 1, dtype=np.int64)
        self._check(int(measure_values(np.ascontiguousarray(records), 1, FIRST, self._end, offsets)))

    def _copy_bytes(self, record: Array, address: int) -> None:
        self._check(self.copy(record, 1, 0, abs(int(record[0, 1])), address))

    def most_rows(self, values: Values) -> int:
        """Most rows that a value can have."""
        return self._end // values.row_bytes

    def copy(self, records: Array, row_bytes: int, skip: int, size: int, address: int) -> int:
        """Copy bytes of the values of records, as they lie one after another; return how many are invalid.

        Args:
            records: int64 [n, 2], contiguous. row_bytes: of a row. skip, size: first byte, and number of bytes.
            address: of the memory that they are copied to.
        """
        return int(read_values(self._base, self._end, FIRST, records, row_bytes, skip, size, address))


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
    for slot in np.flatnonzero(index.state == READY).tolist():
        length, blocks = int(index.extent[slot, 0]), index.row(slot)
        filled = int(filled_bits(index, np.array([slot]))[0]) if schema.late else 0
        for name, values in schema.ragged.items():
            if schema[name].late and not filled & schema.late_bits([name]):
                continue
            records = np.ascontiguousarray(region.column(name)[blocks]).reshape(-1, 16).view(np.int64)
            records = records[: 1 if schema[name].trajectory else length]
            each = (_parts_of(heap, place, rows, values.row_bytes) for place, rows in records.tolist())
            parts = list(itertools.chain.from_iterable(each))
            begins, sizes = np.array(parts, dtype=np.int64).reshape(-1, 2).T
            which = np.searchsorted(extents[:, 0], begins, side="right") - 1
            inside = (begins >= extents[which, 0] + HEADER) & (begins + sizes <= extents[which, 1])
            own = (extents[which, 2] == slot) & (extents[which, 3] == index.generation[slot])
            assert (inside & own).all(), f"values of column {name!r} of slot {slot} lie in memory of others"


def _parts_of(heap: Array, place: int, rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """First byte and bytes of each part of a value."""
    left = abs(rows) * row_bytes
    if rows > 0:
        yield place, left
    while rows < 0 and left > 0:
        part = min(left, extent_size(heap, place) - HEADER)
        yield place + HEADER, part
        left, place = left - part, int(heap[place // 8 + NEXT])
