"""Ragged values of a table: stored in its payload memory, and read by their records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

from gear_loader.native.ragged_copies import measure_values, read_values, write_values
from gear_loader.storage.coders import video_of
from gear_loader.storage.decoding import Group, damaged, decoded, decoded_frames
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
    extent_size,
)
from gear_loader.storage.ragged import Ragged, Values, texts
from gear_loader.storage.ragged_input import Payload
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY
from gear_loader.storage.video import FrameCache
from gear_loader.utils.arrays import Array
from gear_loader.utils.lazy_torch import torch

assert (HEADER, SIZE, NEXT) == (32, 0, 3)  # compiled into `gear_loader.native.ragged_copies`


def needed_bytes(payload: Payload) -> int:
    """Bytes that values take in one gap for each trajectory."""
    runs = payload.runs
    ends = np.concatenate(([0], np.cumsum(payload.sizes)))
    each = ends[runs[:, 2]] - ends[runs[:, 1]]
    return int((-(-each // GRAIN) * GRAIN).sum()) + HEADER * len(np.unique(runs[:, 0])) + FIRST


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
        self._region, self._index, self._check = region, index, check
        self._caches: dict[str, FrameCache] = {}
        self._bytes, self._base, self._end = heap.view(np.uint8), heap.ctypes.data, heap.nbytes

    def read(
        self,
        values: Values,
        records: Array,
        shape: tuple[int, ...],
        *,
        slots: Array,
        pinned: bool = False,
    ) -> Any:
        """Values of ``records``, int64 ``[n, 2]``: a `Ragged` of n values of this shape, lists of text, or
        what `decoding.decoded` makes of encoded ones.

        Args:
            slots: int64 [n], of their trajectories. pinned: into pinned memory, except text.

        Raises:
            CorruptTableError: a record names no memory of the table. CodecError: a value cannot be decoded.
        """
        if values.coded is not None and values.coded.codec.name == "video":
            return self._frames(values, np.ascontiguousarray(records), slots, shape, pinned)
        if values.coded is not None:
            blobs = self._blobs(records)
            return decoded(values.coded, blobs, shape, name=lambda i: self._name(records[i]), pinned=pinned)
        pinned = pinned and values.kind == "array"
        records, row_bytes = np.ascontiguousarray(records), values.row_bytes
        offsets = torch.empty(len(records) + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        places = offsets.numpy()
        self._check(int(measure_values(records, row_bytes, FIRST, self._end, places)))
        memory = torch.empty(
            (int(places[-1]), *values.shape), dtype=values.dtype, device="cpu", pin_memory=pinned
        )
        self._check(int(read_values(self._base, self._end, records, row_bytes, memory.data_ptr())))
        if values.kind != "array":
            try:
                return texts(memory.numpy(), places, values.kind, shape)
            except UnicodeDecodeError:
                self._check(1)
                raise
        return Ragged._of(memory, offsets, shape)

    def _blobs(self, records: Array) -> list[memoryview | None]:
        """The bytes of each value, where they lie; None of empty ones. The same object for the same record."""
        records = np.ascontiguousarray(records)
        self._check(
            int(measure_values(records, 1, FIRST, self._end, np.empty(len(records) + 1, dtype=np.int64)))
        )
        found: dict[tuple[int, int], memoryview | None] = {(0, 0): None}
        keys = [(place, rows) if rows else (0, 0) for place, rows in records.tolist()]
        for key in keys:
            if key not in found:
                place, rows = key
                piece = self._bytes[place : place + rows]
                if rows < 0:
                    piece = np.empty(-rows, dtype=np.uint8)
                    record: Array = np.array([key], dtype=np.int64)
                    self._check(int(read_values(self._base, self._end, record, 1, piece.ctypes.data)))
                found[key] = memoryview(piece)  # type: ignore[arg-type]  # numpy's types lack the buffer protocol
        return [found[key] for key in keys]

    def _frames(
        self, values: Values, records: Array, slots: Array, shape: tuple[int, ...], pinned: bool
    ) -> Any:
        """Frames of videos: those of one group are decoded in one pass, from its key frame on, unless they are kept."""
        coded, blobs, generations = values.coded, self._blobs(records), self._index.generation
        assert coded is not None
        column = next(name for name, each in self._region.layout.schema.ragged.items() if each is values)
        most = int(coded.codec.cache or 0)
        cache = self._caches.setdefault(column, FrameCache(most)) if most else None
        there = np.flatnonzero(records[:, 1])
        known: dict[int, Any] = dict.fromkeys(np.flatnonzero(records[:, 1] == 0).tolist(), 0)
        groups: dict[tuple[int, int], tuple[Array, dict[int, list[int]]]] = {}
        fresh: dict[Hashable, int] = {}
        for slot in np.unique(slots[there]).tolist():
            places, own = there[slots[there] == slot], records_of(self._region, self._index, slot, column)
            for place, step in zip(places.tolist(), matched(own, records[places]).tolist(), strict=True):
                key, blob = (slot, int(generations[slot]), step), blobs[place]
                if cache is not None and (frame := cache.get(key)) is not None:
                    known[place] = frame
                    continue
                try:
                    assert blob is not None
                    number = video_of(coded).distance(blob)
                    if number > step:
                        raise ValueError("its key frame is not there")
                except Exception as error:
                    raise damaged(coded, self._name(records[place]), error) from error
                wanted = groups.setdefault((slot, step - number), (own, {}))[1]
                wanted.setdefault(number, []).append(place)
                fresh[key] = place
        made = [
            Group(
                [blob for blob in self._blobs(own[key : key + max(wanted) + 1]) if blob is not None], wanted
            )
            for (_, key), (own, wanted) in groups.items()
        ]
        name = lambda i: self._name(records[i])  # noqa: E731
        result, frames = decoded_frames(coded, made, known, len(records), shape, name=name, pinned=pinned)
        if cache is not None:
            for each, place in fresh.items():
                cache.put(each, frames[place])
        return result

    def _name(self, record: Array) -> str:
        """Which value has a record, for errors: a search through the table."""
        schema, index = self._region.layout.schema, self._index
        for slot in np.flatnonzero(index.state == READY).tolist():
            for name in schema.ragged:
                step = matched(records_of(self._region, index, slot, name), record[None])[0]
                if step >= 0:
                    what = f"Column {name!r} of trajectory {slot}"
                    return what if schema[name].trajectory else f"{what}, step {step},"
        return "A value of a trajectory that has left"


def records_of(region: Region, index: IndexArrays, slot: int, name: str) -> Array:
    """The records of a trajectory's values in a column, int64 [T, 2], or [1, 2] of a column per trajectory."""
    records = np.ascontiguousarray(region.column(name)[index.row(slot)]).reshape(-1, 16).view(np.int64)
    count = 1 if region.layout.schema[name].trajectory else int(index.extent[slot, 0])
    found: Array = records[:count]
    return found


def matched(records: Array, wanted: Array) -> Array:
    """The place of each record, int64 [n, 2], among others, int64 [T, 2]; -1 if it is not there."""
    order = np.argsort(records[:, 0], kind="stable")
    near = np.searchsorted(records[order, 0], wanted[:, 0])
    found = order[np.minimum(near, len(order) - 1)]
    return np.where((records[found] == wanted).all(axis=1), found, -1)


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
        for name, values in schema.ragged.items():
            records = records_of(region, index, slot, name)
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
