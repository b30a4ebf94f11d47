"""Encoded values of a table, decoded where they lie in its payload memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import StaleIndexError
from gear_loader.storage.codecs import Coded
from gear_loader.storage.coders import video_of
from gear_loader.storage.decoding import Group, damaged, decoded, decoded_frames
from gear_loader.storage.disk import LostRowsError, ValueReader
from gear_loader.storage.disk_records import MovedRowsError, parts_of, rows_of
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY
from gear_loader.storage.video import FrameCache
from gear_loader.utils.arrays import Array
from gear_loader.utils.lazy_torch import torch


class CodedReader:
    """Decodes values of a table by their records, under a read ticket.

    Args:
        region, index: of the table. check: raises CorruptTableError if records of bytes are invalid. copy: copies the
            bytes of values of a column, by records int64 [n, 2], one after another into memory, uint8.
        tier: as for `PayloadReader`.
    """

    def __init__(
        self,
        region: Region,
        index: IndexArrays,
        check: Callable[[Array], None],
        copy: Callable[[str, Array, Array], None],
        tier: Callable[[], ValueReader] | None,
    ) -> None:
        self._region, self._index, self._check, self._copy, self._tier = region, index, check, copy, tier
        self._bytes = region.payload().view(np.uint8)
        self._caches: dict[tuple[int, str], FrameCache] = {}

    def read(
        self,
        column: str,
        records: Array,
        shape: tuple[int, ...],
        slots: Array,
        *,
        pinned: bool,
        device: torch.device | None = None,
    ) -> Any:
        """As `PayloadReader.read`, of a column with a codec."""
        coded = self._region.layout.schema.ragged[column].coded
        assert coded is not None
        if coded.codec.name == "video":
            return self._frames(column, coded, records, shape, slots, pinned)
        name = lambda i: self._name(records[i])  # noqa: E731
        blobs = self._blobs(column, records, {})
        return decoded(coded, blobs, shape, name=name, pinned=pinned, device=device)

    def _blobs(
        self, column: str, records: Array, found: dict[tuple[int, int], memoryview | None]
    ) -> list[memoryview | None]:
        """The bytes of each value, where they lie in memory, or copies; None of empty ones.

        Args:
            found: of values that are known, to which those of others are added: the same object for the same record.
        """
        self._check(records)
        found[0, 0] = None
        sizes = rows_of(records).tolist()
        keys = [
            (place, rows) if size else (0, 0)
            for (place, rows), size in zip(records.tolist(), sizes, strict=True)
        ]
        new = sorted(set(keys) - found.keys(), reverse=True)  # of one trajectory on disk as they lie there
        apart: Array = np.array([key for key in new if min(key) < 0], dtype=np.int64).reshape(-1, 2)
        ends = np.cumsum(rows_of(apart))
        memory: Array = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
        if len(apart):
            self._copy(column, apart, memory)
        pieces = iter(np.split(memory, ends[:-1]) if len(ends) else ())
        for place, rows in new:
            piece = next(pieces) if min(place, rows) < 0 else self._bytes[place : place + rows]
            found[place, rows] = memoryview(piece)  # type: ignore[arg-type]  # numpy's types lack the buffer protocol
        return [found[key] for key in keys]

    def _frames(
        self,
        column: str,
        coded: Coded,
        records: Array,
        shape: tuple[int, ...],
        slots: Array,
        pinned: bool,
    ) -> Any:
        """Frames of videos: those of one group are decoded in one pass, from its key frame on, unless they are kept."""
        generations, bytes_of = self._index.generation, dict[tuple[int, int], memoryview | None]()
        blobs = self._blobs(column, records, bytes_of)
        most = int(coded.codec.cache or 0)
        # Of each process its own: a fork may find the lock of its parent's held.
        cache = self._caches.setdefault((os.getpid(), column), FrameCache(most)) if most else None
        there = np.flatnonzero(rows_of(records))
        known: dict[int, Any] = dict.fromkeys(np.flatnonzero(rows_of(records) == 0).tolist(), 0)
        groups: dict[tuple[int, int], tuple[Array, dict[int, list[int]]]] = {}
        fresh: dict[Hashable, int] = {}
        for slot in np.unique(slots[there]).tolist():
            places, own = there[slots[there] == slot], self._records(slot, column)
            steps = matched(own, records[places])
            if self._tier is not None and (steps < 0).any():
                raise MovedRowsError
            for place, step in zip(places.tolist(), steps.tolist(), strict=True):
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
                [
                    blob
                    for blob in self._blobs(column, own[key : key + max(wanted) + 1], bytes_of)
                    if blob is not None
                ],
                wanted,
            )
            for (_, key), (own, wanted) in groups.items()
        ]
        name = lambda i: self._name(records[i])  # noqa: E731
        result, frames = decoded_frames(coded, made, known, len(records), shape, name=name, pinned=pinned)
        if cache is not None:
            for each, place in fresh.items():
                cache.put(each, frames[place])
        return result

    def _records(self, slot: int, column: str) -> Array:
        """The records of a trajectory's values, int64 [T, 2], from where it lies now.

        Raises:
            MovedRowsError: it was moved meanwhile. LostRowsError, StaleIndexError: see `Source.read`.
        """
        if self._tier is None:
            return records_of(self._region, self._index, slot, column)
        extent, slots = self._index.extent[slot].tolist(), np.array([slot])
        if extent[1] >= 0:
            own = records_of(self._region, self._index, slot, column, extent)
        else:
            reader, zero = self._tier(), np.zeros(1, dtype=np.int64)
            counts = reader.sizes(slots)[:, 0]
            if self._region.layout.schema[column].trajectory:
                counts = zero + 1
            out: Array = np.empty(16 * int(counts[0]), dtype=np.uint8)
            reader.read(slots, self._index.generation[slots], zero, counts, {column: (out, zero)})
            own = out.view(np.int64).reshape(-1, 2)
        if self._index.extent[slot, 1] != extent[1]:
            raise MovedRowsError
        return own

    def _name(self, record: Array) -> str:
        """Which value has a record, for errors: a search through the table."""
        schema, index = self._region.layout.schema, self._index
        slots = np.flatnonzero((index.state == READY) & ((index.extent[:, 1] >= 0) | (record[0] < 0)))
        if record[0] < 0:
            slots = np.intersect1d(slots, parts_of(record[None])[0])
        for slot in slots.tolist():
            for name in schema.ragged:
                with contextlib.suppress(LostRowsError, MovedRowsError, StaleIndexError):
                    step = matched(self._records(slot, name), record[None])[0]
                    if step >= 0:
                        what = f"Column {name!r} of trajectory {slot}"
                        return what if schema[name].trajectory else f"{what}, step {step},"
        return "A value of a trajectory that has left"


def records_of(
    region: Region, index: IndexArrays, slot: int, name: str, extent: Sequence[int] | None = None
) -> Array:
    """The records of a trajectory's values in a column, int64 [T, 2], or [1, 2] of a column per trajectory.

    Args:
        extent: as for `IndexArrays.row`.
    """
    ids = index.row(slot, extent)
    records = np.ascontiguousarray(region.column(name)[ids]).reshape(-1, 16).view(np.int64)
    length = int(index.extent[slot, 0]) if extent is None else extent[0]
    count = 1 if region.layout.schema[name].trajectory else length
    found: Array = records[:count]
    return found


def matched(records: Array, wanted: Array) -> Array:
    """The place of each record, int64 [n, 2], among others, int64 [T, 2]; -1 if it is not there."""
    order = np.argsort(records[:, 0], kind="stable")
    near = np.searchsorted(records[order, 0], wanted[:, 0])
    found = order[np.minimum(near, len(order) - 1)]
    return np.where((records[found] == wanted).all(axis=1), found, -1)
