"""Encoded values of a table, decoded where they lie in its payload memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from gear_loader.storage.codecs import Coded
from gear_loader.storage.coders import video_of
from gear_loader.storage.decoding import Group, damaged, decoded, decoded_frames
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY
from gear_loader.storage.video import FrameCache
from gear_loader.utils.arrays import Array
from gear_loader.utils.lazy_torch import torch


class CodedReader:
    """Decodes values of a table by their records, under a read ticket.

    Args:
        region, index: of the table. check: raises CorruptTableError if so many records of bytes are invalid. copy:
            copies a value that is split, of a record int64 [1, 2], to an address.
    """

    def __init__(
        self,
        region: Region,
        index: IndexArrays,
        check: Callable[[Array], None],
        copy: Callable[[Array, int], None],
    ) -> None:
        self._region, self._index, self._check, self._copy = region, index, check, copy
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
        return decoded(coded, self._blobs(records), shape, name=name, pinned=pinned, device=device)

    def _blobs(self, records: Array) -> list[memoryview | None]:
        """The bytes of each value, where they lie; None of empty ones. The same object for the same record."""
        self._check(records)
        found: dict[tuple[int, int], memoryview | None] = {(0, 0): None}
        keys = [(place, rows) if rows else (0, 0) for place, rows in records.tolist()]
        for key in keys:
            if key not in found:
                place, rows = key
                piece = self._bytes[place : place + rows]
                if rows < 0:
                    piece = np.empty(-rows, dtype=np.uint8)
                    record: Array = np.array([key], dtype=np.int64)
                    self._copy(record, piece.ctypes.data)
                found[key] = memoryview(piece)  # type: ignore[arg-type]  # numpy's types lack the buffer protocol
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
        blobs, generations = self._blobs(records), self._index.generation
        most = int(coded.codec.cache or 0)
        # Of each process its own: a fork may find the lock of its parent's held.
        cache = self._caches.setdefault((os.getpid(), column), FrameCache(most)) if most else None
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
