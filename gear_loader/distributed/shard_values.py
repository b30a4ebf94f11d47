"""Ragged values of a batch over several shards: read by their records out of the tables of this node, requested from
the servers of others.

Each distinct value is requested once for a batch, however many rows and windows show it. Values of a table with a disk
tier, and frames of video in windows, are named by their steps: the row records tell which trajectories share them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.collection.movers import RowMover
from gear_loader.collection.ragged_values import rows_of
from gear_loader.collection.windows import source_of, steps_of
from gear_loader.distributed.records import ORIGINS
from gear_loader.distributed.remote import RemoteShard, RowRequest, ValuePart
from gear_loader.distributed.shard_frames import RemoteFrames, local_frames, shown_frames
from gear_loader.errors import TransportError
from gear_loader.native.ragged_copies import write_values
from gear_loader.storage.decoding import decoded
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.disk_records import rows_of as sizes_of
from gear_loader.storage.disk_records import steps_in
from gear_loader.storage.ragged import Ragged, Values, texts
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


class _Asked(NamedTuple):
    """Distinct values of one shard of another node.

    Attributes:
        shard, requests: where they are, and what was asked for. rows: int64 [u], of each.
        which, place: int64 [m], the values of the batch that show them, and the number of each among them.
        entries: int64 [2, m], numbers of what was asked for: the value, and its own trajectory. Several values are
            asked for as one; one that several trajectories share, of one of them, and whether the others are there.
    """

    shard: int
    requests: list[RowRequest]
    rows: Array
    which: Array
    place: Array
    entries: Array


class ShardValues:
    """Reads the ragged values of batches.

    Args:
        source: returns the source of a shard's rows. lose: called with a shard that did not answer, and the error.

    Attributes:
        num_bytes: bytes of values that were requested from other nodes.
    """

    def __init__(
        self,
        source: Callable[[int], Table | RemoteShard],
        lose: Callable[[int, TransportError], None],
    ) -> None:
        self._source, self._lose = source, lose
        self.num_bytes = 0

    def read(
        self,
        mover: RowMover,
        batch: Mapping[str, Any],
        rows: Any,
        leaders: Array | None = None,
        *,
        timeout: float,
        strict: bool,
    ) -> tuple[dict[str, Any], Array]:
        """Read the values whose records have been gathered. The caller holds the read tickets of this node's tables.

        Args:
            mover: has the windows, and the memory that values arrive in. batch: of records, see `read_ragged`.
            rows: `ShardRows` of the batch. leaders: int64 [G], a row of each group of a tree, whose values per group
                come once; else None. timeout: seconds in which lost requests are repeated.
            strict: whether a shard that does not answer is an error.

        Returns:
            What `read_ragged` returns; and the rows that could not be read, int64 [m]. If there are some, no values.

        Raises:
            TransportError: with `strict`, a shard did not answer. CorruptTableError, CodecError: as `read_ragged`.
            MovedRowsError: the records of values on disk have to be read again.
        """
        columns: dict[str, list[str]] = {}
        for name in mover.ragged:
            columns.setdefault(source_of(name, mover.layout.shown[name]), []).append(name)
        found, reads = dict[str, Any](), []
        shapes = {name: tuple(batch[name].shape[:-1]) for name in mover.ragged}
        for column, names in columns.items():
            parts = [batch[name].reshape(-1, 2).numpy() for name in names]
            owners = [rows_of(batch, shapes[name]) for name in names]
            if leaders is not None and mover.layout.schema[column].group:
                parts, owners = [part[leaders] for part in parts], [leaders] * len(names)
                shapes.update(dict.fromkeys(names, (len(leaders),)))
            records, numbers = np.concatenate(parts), np.concatenate(owners)
            asked = self._ask(column, records, numbers, rows, mover)
            reads.append((column, names, records, numbers, asked))
        end, gone = time.monotonic() + timeout, [np.empty(0, dtype=np.int64)]
        failure: TransportError | None = None
        for column, names, records, numbers, asked in reads:
            values = mover.ragged[names[0]]
            each_shape = [shapes[name] for name in names]
            if values.coded is not None and values.coded.codec.name == "video":
                steps = _steps_shown(mover.layout, batch, names, rows)
                steps = np.where(records[:, 0] < 0, steps_in(records), steps)  # as its server has found them
                frames = self._frames(column, records, numbers, steps, rows, mover, asked, end)
                failure = failure or frames[2]
                gone.append(frames[1])
                if not any(len(each) for each in gone):
                    parts = frames[0].split([int(np.prod(shape)) for shape in each_shape])
                    for name, part, shape in zip(names, parts, each_shape, strict=True):
                        found[name] = part.view(*shape, *part.shape[1:])
                continue
            places, hold, unread = self._read_here(column, records, numbers, rows)
            gone.append(unread)
            for each in asked:
                memory, lost, error = self._received(each, values, mover, end)
                failure = failure or error
                ends = np.cumsum(each.rows) * values.row_bytes
                places[each.which] = (memory.ctypes.data + ends - each.rows * values.row_bytes)[each.place]
                gone.append(numbers[each.which][lost])
                hold.append(memory)
            if not any(len(each) for each in gone):
                plain = np.stack((records[:, 0], sizes_of(records)), axis=1)
                slots, shards = rows.records["slot"][numbers], rows.shards[numbers]
                named = [f"Column {column!r} of trajectory", slots, "of shard", shards]
                made = _delivered(values, plain, places, each_shape, named, pinned=mover.pinned)
                found.update(zip(names, made, strict=True))
        if failure is not None and strict:
            raise failure
        return found, np.unique(np.concatenate(gone))

    def _frames(
        self,
        column: str,
        records: Array,
        numbers: Array,
        steps: Array,
        rows: Any,
        mover: RowMover,
        asked: list[_Asked],
        end: float,
    ) -> tuple[torch.Tensor, Array, TransportError | None]:
        """Frames of a column of video; the rows of those that did not come, int64 [m], and an error.

        Args:
            steps: int64 [n], of the values. Others as of `read`, `_ask` and `_received`.
        """
        values, local, groups, gone = (
            mover.layout.schema.ragged[column],
            dict[int, Any](),
            list[Any](),
            list[Array](),
        )
        failure: TransportError | None = None
        slots, generations = (rows.records[field][numbers] for field in ("slot", "generation"))
        for each in asked:
            source = self._source(each.shard)
            assert isinstance(source, RemoteShard)
            memory, lost, error = self._received(each, values, mover, end)
            failure = failure or error
            gone.append(numbers[each.which][lost])
            fetch = functools.partial(self._fetch, each.shard, source, column, values, mover)
            frames = RemoteFrames(source, column, values, fetch, mover.staging)
            ends = np.cumsum(each.rows)
            for i in np.flatnonzero(~lost).tolist():
                place, number = int(each.which[i]), int(each.place[i])
                key = int(slots[place]), int(generations[place]), int(steps[place])
                frames.add(key, memory.data[ends[number] - each.rows[number] : ends[number]], place)
            some, left, error = frames.groups(end)
            failure = failure or error
            groups += some
            gone.append(numbers[np.array(left, dtype=np.int64)])
        lost_rows = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *gone]))
        if len(lost_rows):
            return torch.empty(0, device="cpu"), lost_rows, failure
        for shard, which in self._by_shard(records, numbers, rows):
            source = self._source(shard)
            if len(which) and isinstance(source, Table):
                given = np.ascontiguousarray(records[which]), np.ascontiguousarray(slots[which])
                local.update(zip(which.tolist(), local_frames(source, column, *given), strict=True))
        return (
            shown_frames(values, records, local, groups, column, pinned=mover.pinned),
            lost_rows,
            failure,
        )

    def _fetch(
        self,
        shard: int,
        source: RemoteShard,
        column: str,
        values: Values,
        mover: RowMover,
        slots: Array,
        generations: Array,
        records: Array,
        end: float,
    ) -> tuple[Array, Array, TransportError | None]:
        """Request values of another node, and wait for them; returns as `_received`."""
        which = np.arange(len(records))
        if not len(which):
            return np.empty(0, dtype=np.uint8), np.empty(0, dtype=bool), None
        requests = source.start_values(column, slots, generations, records, mover.staging)
        sizes = abs(records[:, 1])
        self.num_bytes += int(sizes.sum())
        return self._received(
            _Asked(shard, requests, sizes, which, which, np.stack((which, which))), values, mover, end
        )

    def _by_shard(self, records: Array, numbers: Array, rows: Any) -> list[tuple[int, Array]]:
        """Each shard, and the values there that are not empty, int64 [m]."""
        shards, there = rows.shards[numbers], records[:, 1] != 0
        return [(shard, np.flatnonzero(there & (shards == shard))) for shard in np.unique(shards).tolist()]

    def _ask(self, column: str, records: Array, numbers: Array, rows: Any, mover: RowMover) -> list[_Asked]:
        """Request the values of other nodes."""
        found = []
        for shard, which in self._by_shard(records, numbers, rows):
            source = self._source(shard)
            if not len(which) or not isinstance(source, RemoteShard):
                continue
            row_bytes = source.schema.ragged[column].row_bytes
            row, asked = rows.records[numbers[which]], records[which]
            owners, own = np.unique(np.stack((row["slot"], row["generation"])), axis=1, return_inverse=True)
            own = own.reshape(-1)
            # What names a step, of a table with a disk tier, is another value in each trajectory, unless they share it.
            keys = asked
            if (asked[:, 0] < 0).any():
                keys = np.column_stack((_sharing(mover.layout.schema[column], row, steps_in(asked)), asked))
            keys, first, place = np.unique(keys, axis=0, return_index=True, return_inverse=True)
            known = keys[:, -2:]
            # Values of a trajectory that lie one after another are asked for as one.
            follows = (known[1:, 0] == known[:-1, 0] + known[:-1, 1] * row_bytes) & (known[1:, 1] > 0)
            follows &= (known[:-1] > 0).all(axis=1) & (own[first][1:] == own[first][:-1])
            begins = np.flatnonzero(np.concatenate(([True], ~follows)))
            joined = known[begins]
            joined[:, 1] = np.add.reduceat(known[:, 1], begins)
            runs, place = np.cumsum(np.concatenate(([True], ~follows))) - 1, place.reshape(-1)
            # A trajectory that is gone may have had the memory of another one: each is looked for.
            asking = own[first][begins]
            others = np.setdiff1d(np.arange(owners.shape[1]), asking)
            entry: Array = np.empty(owners.shape[1], dtype=np.int64)
            entry[asking], entry[others] = np.arange(len(begins)), len(begins) + np.arange(len(others))
            slots, generations = owners[:, np.concatenate((asking, others))]
            requests = source.start_values(column, slots, generations, joined, mover.staging)
            rows_of_each = abs(known[:, 1])
            self.num_bytes += int(rows_of_each.sum()) * row_bytes
            entries = np.stack((runs[place], entry[own]))
            found.append(_Asked(shard, requests, rows_of_each, which, place, entries))
        return found

    def _read_here(
        self, column: str, records: Array, numbers: Array, rows: Any
    ) -> tuple[Array, list[object], Array]:
        """The address of each value that a table of this node has, int64 [n], else 0; what holds some of them; and rows
        that cannot be read from disk, int64 [m], which their tables lose.

        Raises:
            MovedRowsError: the records have to be read again.
        """
        addresses, hold = np.zeros(len(records), dtype=np.int64), list[object]()
        lost = [np.empty(0, dtype=np.int64)]
        for shard, which in self._by_shard(records, numbers, rows):
            source = self._source(shard)
            if len(which) and isinstance(source, Table):
                given = source.schema.ragged[column], np.ascontiguousarray(records[which])
                try:
                    addresses[which], copies = source._engine.payload.located(*given)
                    hold.append(copies)
                except LostRowsError as error:
                    source._engine.remove_lost(error)
                    some = numbers[which]
                    lost.append(some[np.isin(rows.records["slot"][some], error.slots)])
        return addresses, hold, np.concatenate(lost)

    def _received(
        self, asked: _Asked, values: Values, mover: RowMover, end: float
    ) -> tuple[Array, Array, TransportError | None]:
        """Wait for values; return them one after another, which of the batch's did not come, bool [m], and an error."""
        memory: Array = np.empty(int(asked.rows.sum()) * values.row_bytes, dtype=np.uint8)
        lost = np.zeros(int(asked.entries.max()) + 1, dtype=bool)
        failure: TransportError | None = None
        for request in asked.requests:
            part: ValuePart = request.part
            try:
                part, status = request.wait(end)
            except TransportError as error:
                failure = failure or error
                self._lose(asked.shard, error)
                lost[part.rows] = True
                continue
            lost[part.rows[status != 0]] = True
            memory[part.begin : part.end] = part.memory.numpy()[: part.end - part.begin]
            mover.staging.give(part.memory)
        gone: Array = np.any(lost[asked.entries], axis=0)
        return memory, gone, failure


def _sharing(column: Column, rows: Array, steps: Array) -> Array:
    """What tells apart the trajectories of values that are named by their steps, int64 [n, 2]: the same for values that
    several share.

    Args:
        column: theirs. rows: records of their rows. steps: int64 [n].
    """
    own, roots, common, slots, generations = (rows[name] for name in ORIGINS)
    if column.group and not column.late:
        return np.stack((slots, generations), axis=1)
    begins = (roots >= 0) & (steps < common) & (not column.trajectory)
    return np.stack((np.where(begins, roots, own), np.zeros_like(own)), axis=1)


def _steps_shown(layout: Any, batch: Mapping[str, Any], names: list[str], rows: Any) -> Array:
    """The step of each value of some windows of steps, int64 [n], of trajectories as long as they were when they were
    drawn; -1 of padding."""
    if layout.packed:
        position = batch["position"].numpy().astype(np.int64)
        return np.concatenate([position] * len(names))
    lengths = rows.records["steps"]
    shown = [steps_of(layout.shown[name], rows.anchors, lengths).reshape(-1) for name in names]
    return np.concatenate(shown)


def _delivered(
    values: Values,
    records: Array,
    addresses: Array,
    shapes: list[tuple[int, ...]],
    named: list[Any],
    *,
    pinned: bool,
) -> list[Any]:
    """What batches have in place of records, int64 [n, 2]: of each window, of these shapes; named: see `_decoded`."""
    counts = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = [
        slice(end - int(np.prod(shape)), end) for end, shape in zip(counts.tolist(), shapes, strict=True)
    ]
    if values.coded is not None:
        return _decoded(values, records, addresses, shapes, parts, named, pinned=pinned)
    made: list[Any] = []
    for shape, part in zip(shapes, parts, strict=True):
        offsets = torch.zeros(len(records[part]) + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        np.cumsum(abs(records[part, 1]), out=offsets.numpy()[1:])
        total = int(offsets[-1])
        memory = torch.empty((total, *values.shape), dtype=values.dtype, device="cpu", pin_memory=pinned)
        flat = memory.reshape(-1).view(torch.uint8).numpy()
        _copy(values, records[part], addresses[part], flat)
        if values.kind == "array":
            made.append(Ragged._of(memory, offsets, shape))
        else:
            made.append(texts(flat, offsets.numpy(), values.kind, shape))
    return made


def _copy(values: Values, records: Array, addresses: Array, out: Array) -> None:
    """Copy values from their addresses into memory, one after another."""
    sizes = abs(records[:, 1]) * values.row_bytes
    write_values(
        out.ctypes.data, out.nbytes, np.ascontiguousarray(addresses), np.cumsum(sizes) - sizes, sizes
    )


def _decoded(
    values: Values,
    records: Array,
    addresses: Array,
    shapes: list[tuple[int, ...]],
    parts: list[slice],
    named: list[Any],
    *,
    pinned: bool,
) -> list[Any]:
    """`_delivered` of encoded values: the same one is decoded once.

    Args:
        named: words of the name of a value in errors, or an array [n] of them.
    """
    assert values.coded is not None
    _, first, place = np.unique(
        np.stack((addresses, records[:, 1])), axis=1, return_index=True, return_inverse=True
    )
    memory: Array = np.empty(int(abs(records[first, 1]).sum()), dtype=np.uint8)
    _copy(values, records[first], addresses[first], memory)
    ends = np.cumsum(abs(records[first, 1])).tolist()
    views = [
        memory.data[end - size : end] if size else None
        for end, size in zip(ends, abs(records[first, 1]).tolist(), strict=True)
    ]
    blobs: list[Any] = [views[number] for number in place.reshape(-1).tolist()]

    def name(number: int, first: int = 0) -> str:
        return " ".join(str(each if isinstance(each, str) else each[first + number]) for each in named)

    if not values.coded.fixed:
        return [
            decoded(
                values.coded,
                blobs[part],
                shape,
                name=functools.partial(name, first=part.start),
                pinned=pinned,
            )
            for shape, part in zip(shapes, parts, strict=True)
        ]
    whole = decoded(values.coded, blobs, (len(blobs),), name=name, pinned=pinned)
    return [whole[part].view(*shape, *whole.shape[1:]) for shape, part in zip(shapes, parts, strict=True)]
