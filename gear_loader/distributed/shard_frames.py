"""Frames of videos of a batch over several shards.

A frame is decoded from its key frame on. Those of this node are decoded out of their tables. Of another node's frames
that do not begin a group, the records of the frames before them are requested when these have arrived, then the frames.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.remote import RemoteShard
from gear_loader.errors import TransportError
from gear_loader.storage.coders import video_of
from gear_loader.storage.decoding import Group, damaged, decoded_frames
from gear_loader.storage.ragged import Values
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

Key = tuple[int, int, int]  # slot, generation and step


class RemoteFrames:
    """Frames of one shard of another node, and those before them in their groups.

    Args:
        source: the shard. column: its column of video. values: what this holds. name: of a frame, for errors.
        fetch: requests and receives values, of slots, generations and records: returns them one after another, which of
            them did not come, bool [n], and an error.
        staging: memory of parts.
    """

    def __init__(
        self, source: RemoteShard, column: str, values: Values, fetch: Callable[..., Any], staging: Any
    ) -> None:
        assert values.coded is not None
        self._source, self._column, self._coded = source, column, values.coded
        self._fetch, self._staging, self._video = fetch, staging, video_of(values.coded)
        self._blobs: dict[Key, memoryview] = {}
        self._places: dict[Key, list[int]] = {}

    def add(self, key: Key, blob: memoryview, place: int) -> None:
        """A frame that the batch shows at a place."""
        self._blobs[key] = blob
        self._places.setdefault(key, []).append(place)

    def _name(self, key: Key) -> str:
        return f"Column {self._column!r} of trajectory {key[0]} of another node, step {key[2]},"

    def groups(self, end: float) -> tuple[list[Group], list[int], TransportError | None]:
        """What has to be decoded; places of frames whose groups did not come by `end`; and an error.

        Raises:
            CodecError: a value is no frame.
        """
        wanted: dict[Key, int] = {}  # of the key frame -> the last step of its group that is shown
        first: dict[Key, Key] = {}
        for key, blob in self._blobs.items():
            try:
                distance = self._video.distance(blob)
                if distance > key[2]:
                    raise ValueError("its key frame is not there")
            except Exception as error:
                raise damaged(self._coded, self._name(key), error) from error
            begin = first[key] = (*key[:2], key[2] - distance)
            wanted[begin] = max(wanted.get(begin, 0), key[2])
        lost, failure = self._complete(wanted, end)
        made, left = list[Group](), list[int]()
        for begin, last in wanted.items():
            shown = [key for key, group in first.items() if group == begin] if begin in lost else []
            left += itertools.chain(*(self._places[key] for key in shown))
            if begin not in lost:
                steps = [(*begin[:2], step) for step in range(begin[2], last + 1)]
                places = {i: self._places[key] for i, key in enumerate(steps) if key in self._places}
                made.append(Group([self._blobs[key] for key in steps], places))
        return made, left, failure

    def _complete(self, wanted: dict[Key, int], end: float) -> tuple[set[Key], TransportError | None]:
        """Request what lacks before the last frames of groups; return the groups that did not come, and an error."""
        lacking = {
            begin: last
            for begin, last in wanted.items()
            if any((*begin[:2], step) not in self._blobs for step in range(begin[2], last))
        }
        if not lacking:
            return set(), None
        groups = list(lacking)
        names: Array = np.zeros(len(groups), dtype=[("slot", "<i8"), ("generation", "<i8")])
        names["slot"], names["generation"] = (np.array([group[i] for group in groups]) for i in (0, 1))
        spans: Array = np.array([(group[2], lacking[group] - group[2]) for group in groups], dtype=np.int64).T
        records, lost, failure = self._records(names, spans, end)
        found = [
            (group, step) for group in groups if group not in lost for step in range(group[2], lacking[group])
        ]
        some = [(*group[:2], step) for group, step in found]
        new = [i for i, key in enumerate(some) if key not in self._blobs]
        given = [np.array([some[i][part] for i in new], dtype=np.int64) for part in (0, 1)]
        chosen = np.array([records[found[i]] for i in new], dtype=np.int64).reshape(-1, 2)
        memory, absent, error = self._fetch(*given, chosen, end)
        ends = np.cumsum(abs(chosen[:, 1])).tolist()
        for i, size, stop, gone in zip(new, abs(chosen[:, 1]).tolist(), ends, absent.tolist(), strict=True):
            self._blobs[some[i]] = memory.data[stop - size : stop]
            if gone:
                lost.add(found[i][0])
        return lost, failure or error

    def _records(
        self, names: Array, spans: Array, end: float
    ) -> tuple[dict[tuple[Key, int], Array], set[Key], TransportError | None]:
        """The records of spans of steps, by group and step; the groups that did not come, and an error."""
        groups = [
            (int(name["slot"]), int(name["generation"]), int(first))
            for name, first in zip(names, spans[0], strict=True)
        ]
        found, lost = dict[tuple[Key, int], Array](), set[Key]()
        failure: TransportError | None = None
        requests = self._source.start_spans(
            [self._column], np.arange(len(names)), names, spans, self._staging
        )
        for request in requests:
            part = request.part
            try:
                part, status = request.wait(end)
            except TransportError as error:
                failure = failure or error
                lost.update(groups[row] for row in part.rows.tolist())
                continue
            total, offset = int(part.counts.sum()), part.offsets[self._column]
            records = part.memory.numpy()[offset : offset + 16 * total].view(np.int64).reshape(-1, 2).copy()
            self._staging.give(part.memory)
            ends = np.cumsum(part.counts).tolist()
            given = zip(
                part.rows.tolist(), part.firsts.tolist(), part.counts.tolist(), ends, status, strict=True
            )
            for row, first, count, stop, gone in given:
                if gone:
                    lost.add(groups[row])
                for i in range(count):
                    found[groups[row], first + i] = records[stop - count + i]
        return found, lost, failure


def local_frames(table: Table, column: str, records: Array, slots: Array) -> Array:
    """Frames of a table of this node, uint8 [n, h, w, 3], whose read ticket the caller holds."""
    values = table.schema.ragged[column]
    read: torch.Tensor = table._engine.payload.read(values, records, (len(records),), slots=slots)
    return read.numpy()


def shown_frames(
    values: Values,
    records: Array,
    local: dict[int, Any],
    groups: list[Group],
    column: str,
    *,
    pinned: bool,
) -> torch.Tensor:
    """The frames of all records, int64 [n, 2], of which some are known by their number; zeros where there is none.

    Raises:
        CodecError: a frame is damaged.
    """
    assert values.coded is not None
    known = dict.fromkeys(np.flatnonzero(records[:, 1] == 0).tolist(), 0) | local
    count = len(records)
    name = lambda _: f"A frame of column {column!r} of another node"  # noqa: E731
    result, _ = decoded_frames(values.coded, groups, known, count, (count,), name=name, pinned=pinned)
    return result
