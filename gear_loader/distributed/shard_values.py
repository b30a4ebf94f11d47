"""Ragged values of a batch over several shards: read by their records out of the tables of this node, requested from
the servers of others.

Each distinct value is requested once for a batch, however many rows and windows show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.collection.movers import RowMover
from gear_loader.collection.ragged_values import rows_of
from gear_loader.collection.windows import source_of
from gear_loader.distributed.remote import RemoteShard, RowRequest, ValuePart
from gear_loader.errors import TransportError
from gear_loader.native.ragged_copies import write_values
from gear_loader.storage.decoding import decoded
from gear_loader.storage.ragged import Ragged, Values, texts
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
        self, mover: RowMover, batch: Mapping[str, Any], rows: Any, *, timeout: float, strict: bool
    ) -> tuple[dict[str, Any], Array]:
        """Read the values whose records have been gathered. The caller holds the read tickets of this node's tables.

        Args:
            mover: has the windows, and the memory that values arrive in. batch: of records, see `read_ragged`.
            rows: `ShardRows` of the batch. timeout: seconds in which lost requests are repeated.
            strict: whether a shard that does not answer is an error.

        Returns:
            What `read_ragged` returns; and the rows that could not be read, int64 [m]. If there are some, no values.

        Raises:
            TransportError: with `strict`, a shard did not answer. CorruptTableError, CodecError: as `read_ragged`.
        """
        columns: dict[str, list[str]] = {}
        for name in mover.ragged:
            columns.setdefault(source_of(name, mover.layout.shown[name]), []).append(name)
        found, reads = dict[str, Any](), []
        for column, names in columns.items():
            records = np.concatenate([batch[name].reshape(-1, 2).numpy() for name in names])
            numbers = np.concatenate([rows_of(batch, tuple(batch[name].shape[:-1])) for name in names])
            asked = self._ask(column, records, numbers, rows, mover)
            reads.append((column, names, records, numbers, asked))
        end, gone = time.monotonic() + timeout, [np.empty(0, dtype=np.int64)]
        failure: TransportError | None = None
        for column, names, records, numbers, asked in reads:
            values = mover.ragged[names[0]]
            places, hold = self._read_here(column, records, numbers, rows)
            for each in asked:
                memory, lost, error = self._received(each, values, mover, end)
                failure = failure or error
                ends = np.cumsum(each.rows) * values.row_bytes
                places[each.which] = (memory.ctypes.data + ends - each.rows * values.row_bytes)[each.place]
                gone.append(numbers[each.which][lost])
                hold.append(memory)
            shapes = [tuple(batch[name].shape[:-1]) for name in names]
            if not any(len(each) for each in gone):
                made = _delivered(values, records, places, shapes, pinned=mover.pinned)
                found.update(zip(names, made, strict=True))
        if failure is not None and strict:
            raise failure
        return found, np.unique(np.concatenate(gone))

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
            known, first, place = np.unique(records[which], axis=0, return_index=True, return_inverse=True)
            row = rows.records[numbers[which]]
            owners, own = np.unique(np.stack((row["slot"], row["generation"])), axis=1, return_inverse=True)
            own = own.reshape(-1)
            # Values of a trajectory that lie one after another are asked for as one.
            follows = (known[1:, 0] == known[:-1, 0] + known[:-1, 1] * row_bytes) & (known[1:, 1] > 0)
            follows &= (known[:-1, 1] > 0) & (own[first][1:] == own[first][:-1])
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
    ) -> tuple[Array, list[object]]:
        """The address of each value that a table of this node has, int64 [n], else 0; and what holds some of them."""
        addresses, hold = np.zeros(len(records), dtype=np.int64), list[object]()
        for shard, which in self._by_shard(records, numbers, rows):
            source = self._source(shard)
            if len(which) and isinstance(source, Table):
                given = source.schema.ragged[column], np.ascontiguousarray(records[which])
                addresses[which], copies = source._engine.payload.located(*given)
                hold.append(copies)
        return addresses, hold

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


def _delivered(
    values: Values, records: Array, addresses: Array, shapes: list[tuple[int, ...]], *, pinned: bool
) -> list[Any]:
    """What batches have in place of records, int64 [n, 2]: of each window, of these shapes."""
    counts = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = [
        slice(end - int(np.prod(shape)), end) for end, shape in zip(counts.tolist(), shapes, strict=True)
    ]
    if values.coded is not None:
        return _decoded(values, records, addresses, shapes, parts, pinned=pinned)
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
    *,
    pinned: bool,
) -> list[Any]:
    """`_delivered` of encoded values: the same one is decoded once."""
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

    def name(_: int) -> str:
        return "A value of the batch"

    if not values.coded.fixed:
        return [
            decoded(values.coded, blobs[part], shape, name=name, pinned=pinned)
            for shape, part in zip(shapes, parts, strict=True)
        ]
    whole = decoded(values.coded, blobs, (len(blobs),), name=name, pinned=pinned)
    return [whole[part].view(*shape, *whole.shape[1:]) for shape, part in zip(shapes, parts, strict=True)]
