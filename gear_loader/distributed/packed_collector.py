"""Packed batches of several shards: rows of this node from their regions, rows of others over a transport."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.collection.collector import Buffers
from gear_loader.collection.n_step import NStep
from gear_loader.collection.packed import PackedBuffers, PackedCollector
from gear_loader.collection.windows import Whole
from gear_loader.distributed.collector import ROW_KEYS, ReadTickets, ShardRows, awaited, present, table_here
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.remote_spans import RemoteSpans, SpanPart
from gear_loader.distributed.shards import Shards
from gear_loader.errors import SchemaError, TableEmptyError, TransportError
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.region import Region
from gear_loader.storage.schema import Window
from gear_loader.utils.arrays import Array

__all__ = [
    "PackedShardRows",
    "ServedRows",
    "ShardPackedCollector",
    "check_packed_shards",
    "spans_of",
]

_TURNS = 8  # attempts to draw spare rows


@dataclasses.dataclass
class PackedShardRows(ShardRows):
    """This rank's rows of a batch with a budget of steps.

    Attributes:
        spans: int64 [2, n], first step and number of steps of each row.
        weights: float32 [n], importance weights; None if batches carry none.
        max_steps: most steps of the batch. Rows that are gone are left out.
        gone, lost_steps: rows that were left out, and their steps.
    """

    spans: Array = dataclasses.field(default_factory=lambda: np.empty((2, 0), dtype=np.int64))
    weights: Array | None = None
    max_steps: int = 0
    gone: int = 0
    lost_steps: int = 0

    def take(self, which: Array) -> PackedShardRows:
        """The rows of a mask, bool [n], with tickets of their own."""
        weights = None if self.weights is None else self.weights[which]
        chosen: dict[str, Any] = {"spans": self.spans[:, which], "weights": weights, "tickets": ReadTickets()}
        return dataclasses.replace(self, shards=self.shards[which], records=self.records[which], **chosen)

    def copy(self) -> PackedShardRows:
        """The same rows, with tickets of their own."""
        return self.take(np.ones(len(self), dtype=bool))

    def keep(self, which: Array) -> None:
        """Keep the rows of a mask, bool [n]."""
        self.gone += int((~which).sum())
        self.lost_steps += int(self.spans[1, ~which].sum())
        self.shards, self.records, self.spans = self.shards[which], self.records[which], self.spans[:, which]
        self.weights = None if self.weights is None else self.weights[which]


def spans_of(records: Array, offset: int, length: int) -> Array:
    """First step and number of steps of the rows' windows that exist, int64 [2, n].

    Args:
        records: row records with the lengths of their trajectories. offset, length: of the windows.
    """
    steps = records["steps"]
    low = np.clip(records["step"] + offset, 0, steps)
    high = np.maximum(np.minimum(records["step"] + offset + length, steps), low)
    return np.stack((low, high - low))


def check_packed_shards(shards: Shards, layout: str) -> None:
    """Raise SchemaError if packed batches cannot be made of these shards."""
    if shards.num_stages > 1:
        raise SchemaError(
            f"layout={layout!r} was given with Shards of {shards.num_stages} pipeline stages; expected one stage, or "
            "layout='padded': stages would not know each other's lengths."
        )


class ServedRows(NamedTuple):
    """The rows of other nodes that came.

    Attributes:
        parts: the answers.
        served: bool [n], which of the rows that were asked for, n, are in the batch.
        numbers: their numbers in the batch, int64 [n]. lows: first step of each, int64 [n].
    """

    parts: list[SpanPart]
    served: Array
    numbers: Array
    lows: Array


class ShardPackedCollector(PackedCollector):
    """Gathers packed batches of any shards, on the CPU.

    Args:
        shards: the sharded table.
        windows, weighs: as for `PackedCollector`.
        device, programs: for a subclass that gathers for a GPU, as for `Collector`.

    Attributes:
        num_gone: rows that were replaced, or left out, because their trajectory was gone before it was read.
        num_lost: rows whose shard could not be reached.
    """

    row_keys = ROW_KEYS

    def __init__(
        self,
        shards: Shards,
        windows: Mapping[str, Window | NStep | Whole],
        *,
        weighs: bool = False,
        device: torch.device | None = None,
        programs: int | None = None,
    ) -> None:
        super().__init__(shards.table, windows, weighs=weighs, device=device, programs=programs)
        self.zero_copy = self.awaits_pinning = False
        self.shards = shards
        self.waits = shards.exchange.size > 1
        self.num_gone = self.num_lost = 0
        self._remote = RemoteSpans({name: self._sources[name] for name in (*self.steps, *self.once)})

    @property
    def regions(self) -> list[Region]:
        """See `Collector.regions`."""
        return [table_here(self.shards, shard)._engine.region for shard in self.shards.local_shards()]

    # ---------------------------------------------------------------- collecting

    def gather(self, buffers: Buffers, rows: ShardRows) -> None:
        """Fill `buffers` with these rows; see `ShardCollector.gather`.

        Raises:
            TransportError: a shard of another node did not answer, and `on_failure` is "raise".
            TableEmptyError: rows were gone, and there are no spare rows.
            SchemaError: the batch would have 2**31 steps or more.
        """
        assert isinstance(buffers, PackedBuffers)
        spans = self._spans(rows)
        requested: list[tuple[int, SpanPart]] = []
        missing: list[Array] = []
        lost = self.shards.lost() if self.shards.on_failure == "redraw" else []
        for shard, which in self._by_shard(rows):
            source = self.shards.source(shard)
            if not isinstance(source, RemoteShard):
                alive = present(self.shards, shard, rows.records[which], rows.tickets)
                self.num_gone += int((~alive).sum())
                missing.append(which[~alive])
            elif shard in lost:  # no request until the shard is tried again
                self.num_lost += len(which)
                missing.append(which)
            else:
                started = self._remote.start(source, which, rows.records[which], spans[:, which])
                requested += [(shard, part) for part in started]
        here = np.concatenate([np.empty(0, dtype=np.int64), *missing])
        far = ~np.isin(rows.shards, self.shards.local_shards())
        unread = here[:0]
        if not len(here):  # else the places are not known before it is known which rows there are
            unread = self._gather_local(buffers, rows, spans)
        parts, gone = self._received(requested)
        served = far.copy()
        served[here], served[gone] = False, False
        lows, numbers = spans[0], np.arange(len(rows))
        changed = np.unique(np.concatenate((here, gone, unread)))
        while len(changed):
            moved = self._without(rows, changed)
            numbers = np.where(numbers >= 0, moved[numbers], -1)
            spans = self._spans(rows)
            changed = self._gather_local(buffers, rows, spans)
        served &= numbers >= 0
        self._finish(buffers, rows, spans, ServedRows(parts, served, numbers, lows))

    def _spans(self, rows: ShardRows) -> Array:
        return (
            rows.spans
            if isinstance(rows, PackedShardRows)
            else spans_of(rows.records, self._offset, self._length)
        )

    def _by_shard(self, rows: ShardRows) -> Iterator[tuple[int, Array]]:
        """Yield each shard of a batch, and the numbers of its rows."""
        for shard in np.unique(rows.shards).tolist():
            yield shard, np.flatnonzero(rows.shards == shard)

    # ---------------------------------------------------------------- rows that are gone

    def _without(self, rows: ShardRows, which: Array) -> Array:
        """Replace rows that are gone, or leave them out; return the new number of each row, int64 [n], -1 for none."""
        numbers = np.arange(len(rows))
        if not isinstance(rows, PackedShardRows):
            self._replace(rows, which)
            return numbers
        kept = np.ones(len(rows), dtype=bool)
        kept[which] = False
        if not kept.any():  # all ranks have as many batches, so this one has a row
            kept[0] = True
            rows.keep(kept)
            rows.gone, rows.lost_steps = rows.gone + 1, rows.lost_steps + int(rows.spans[1, 0])
            self._replace(rows, np.array([0]))
            return np.full_like(numbers, -1)
        rows.keep(kept)
        numbers = np.cumsum(kept) - 1
        numbers[~kept] = -1
        return numbers

    def _replace(self, rows: ShardRows, which: Array) -> None:
        """Replace rows that cannot be read by spare rows of this rank's shard, that fit into the batch."""
        assert rows.spare is not None
        left = which
        for turn in range(_TURNS):
            records, shard = rows.spare(len(left), turn)
            for name in records.dtype.names or ():
                rows.records[name][left] = records[name]
            rows.shards[left] = shard
            extent = table_here(self.shards, shard)._engine.reader().index_arrays()[0]
            alive = present(self.shards, shard, rows.records[left], rows.tickets)
            rows.records["steps"][left] = extent[rows.records["slot"][left], 0]
            if isinstance(rows, PackedShardRows):
                rows.spans[:, left] = spans_of(rows.records[left], self._offset, self._length)
                alive &= rows.spans[1, left] <= rows.max_steps
            left = left[~alive]
            if len(left) == 0:
                return
        raise TableEmptyError(
            f"{len(left)} rows were drawn {_TURNS} times, and were evicted each time before they could be read, or had "
            "more steps than max_steps. The table is replaced faster than it is read: make it larger."
        )

    # ---------------------------------------------------------------- rows of this node and of others

    def _gather_local(self, buffers: PackedBuffers, rows: ShardRows, spans: Array) -> Array:
        """Gather rows of this node's shards; return those that cannot be read from disk, int64 [n]."""
        self._begin(buffers, spans)
        slots, generations = (np.ascontiguousarray(rows.records[name]) for name in ("slot", "generation"))
        lost = [np.empty(0, dtype=np.int64)]
        for shard, which in self._by_shard(rows):
            if isinstance(self.shards.source(shard), RemoteShard):
                continue
            try:
                self._gather_shard(buffers, shard, slots, generations, spans, which)
            except LostRowsError as error:
                table_here(self.shards, shard)._engine.remove_lost(error)
                lost.append(which[np.isin(slots[which], error.slots)])
        unread: Array = np.concatenate(lost)
        self.num_gone += len(unread)
        return unread

    def _gather_shard(
        self,
        buffers: PackedBuffers,
        shard: int,
        slots: Array,
        generations: Array,
        spans: Array,
        which: Array,
    ) -> None:
        """Gather rows of one shard of this node; see `PackedCollector._copy`."""
        table = table_here(self.shards, shard)
        bad = self._copy(buffers, table, slots, generations, spans, which)
        table._engine.reader().check_gathered(bad)

    def _finish(self, buffers: PackedBuffers, rows: ShardRows, spans: Array, far: ServedRows) -> None:
        """Place the rows of other nodes, and write what else the batch has."""
        self._place(buffers, far)
        still = far.numbers[far.served]
        self._number(buffers, spans[:, still], still)
        names, weights = self._names(rows)
        for place, value in zip(buffers.names, names, strict=True):
            place[: len(rows)] = value
        if weights is not None:
            buffers.rows_memory["priority_weight"].numpy()[: len(rows)] = weights
        buffers.convert(len(rows), buffers.total)

    def _received(self, parts: list[tuple[int, SpanPart]]) -> tuple[list[SpanPart], Array]:
        """Wait for the parts; return those that came, and the rows that did not, int64 [n]."""
        came, missing = [], [np.empty(0, dtype=np.int64)]
        failure: TransportError | None = None
        end = time.monotonic() + self.shards.rows_timeout
        for shard, part in parts:
            try:
                received, status = awaited(part, end)
            except TransportError as error:
                failure = failure or error
                self.shards.mark_lost(shard, error)
                missing.append(part.rows)
                self.num_lost += len(np.unique(part.rows))
                continue
            gone = np.unique(received.rows[status != 0])
            self.num_gone += len(gone)
            missing.append(gone)
            came.append(received)
        if failure is not None and self.shards.on_failure == "raise":
            raise failure
        return came, np.unique(np.concatenate(missing))

    def _place(self, buffers: PackedBuffers, far: ServedRows) -> None:
        """Place rows of other nodes into the batch; give the memory of the parts back."""
        places = np.zeros(len(far.numbers), dtype=np.int64)
        places[far.served] = buffers.starts_array[far.numbers[far.served]]
        for part in far.parts:
            part.place(buffers.gathered, places, far.lows, far.numbers, far.served[part.rows])
            self._remote.staging.give(part.memory)

    # ---------------------------------------------------------------- keys

    def _names(self, rows: ShardRows) -> tuple[tuple[Array, ...], Array | None]:
        """The values of `row_keys`, int64 [n] each, and importance weights, float32 [n], or None."""
        records = rows.records
        weights = rows.weights if isinstance(rows, PackedShardRows) else None
        if self.weighs and weights is None and rows.weigh is not None:
            weights = rows.weigh(records["leaf"])
        names = records["slot"], records["step"], records["generation"], rows.shards
        return names, weights if self.weighs else None
