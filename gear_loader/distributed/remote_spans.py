"""Steps of trajectories on another node, fetched in parts, into reused staging memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch

from gear_loader.distributed.remote import PART_BYTES, RemoteShard, Staging
from gear_loader.native.packed import place_packed
from gear_loader.transport.spec import PackedSpec
from gear_loader.utils.arrays import Array

__all__ = ["RemoteSpans", "SpanPart"]


@dataclasses.dataclass
class SpanPart:
    """A requested part of a packed batch: pieces of rows.

    Attributes:
        spec: of the request.
        rows: row of the batch of each piece, int64 [n]. firsts, counts: first step and steps of each, int64 [n].
        memory: staging memory of the reply.
        future: status of each piece, uint8 [n]: 0 where it was served.
        again: repeats the request, into other memory.
    """

    spec: PackedSpec
    rows: Array
    firsts: Array
    counts: Array
    memory: torch.Tensor
    future: concurrent.futures.Future[Array]
    again: Callable[[], SpanPart]

    def place(
        self, outs: Mapping[str, torch.Tensor], starts: Array, lows: Array, numbers: Array, served: Array
    ) -> None:
        """Copy the pieces of some rows to their places in a batch.

        Args:
            outs: name -> memory of the batch.
            starts, lows, numbers: int64 [B], of the requested rows: place of the first step, number of that step, and
                number of the row in the batch.
            served: bool [n], the pieces to copy.
        """
        n, total = len(self.rows), int(self.counts.sum())
        pieces: dict[bool, list[list[int]]] = {False: [], True: []}
        first = self.memory.data_ptr()
        for span in self.spec.spans(n, total):
            pieces[span.once].append([first + span.offset, outs[span.name].data_ptr(), span.step_bytes])
        rows, begins = self.rows[served], (np.cumsum(self.counts) - self.counts)[served]
        ends = starts[rows] + self.firsts[served] - lows[rows]
        place_packed(np.array(pieces[False], dtype=np.int64), begins, ends, self.counts[served])
        if pieces[True]:
            once = np.array(pieces[True], dtype=np.int64)
            place_packed(once, np.flatnonzero(served), numbers[rows], np.ones_like(rows))


class RemoteSpans:
    """Requests steps from shards of other nodes.

    Args:
        columns: name in the batch -> column.
        pinned: whether answers arrive in pinned memory, which a GPU can read.
    """

    def __init__(self, columns: Mapping[str, str], *, pinned: bool = False) -> None:
        self._columns = dict(columns)
        self._specs: dict[tuple[int, str], PackedSpec] = {}
        self.staging = Staging(pinned=pinned)

    def start(self, source: RemoteShard, rows: Array, records: Array, spans: Array) -> list[SpanPart]:
        """Request the steps of rows; return the parts.

        Args:
            source: their shard. rows: numbers of the rows, int64 [n]. records: row records of these rows, [n].
            spans: first step and number of steps of each, int64 [2, n].
        """
        key = id(source), source.name
        if key not in self._specs:
            self._specs[key] = PackedSpec(source.name, source.schema, self._columns)
        spec = self._specs[key]
        # Rows of more than a part's bytes are cut into pieces.
        most = max(1, PART_BYTES // spec.step_bytes)
        pieces = np.maximum(1, -(-spans[1] // most))
        which = np.repeat(np.arange(len(rows)), pieces)
        numbers = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        firsts = spans[0, which] + numbers * most
        counts = np.minimum(spans[1, which] - numbers * most, most)
        ends = np.cumsum(counts * spec.step_bytes + spec.row_bytes)
        parts, begin = [], 0
        while begin < len(which):
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + PART_BYTES, side="right")))
            chosen = which[begin:end]
            part = rows[chosen], records[chosen], firsts[begin:end], counts[begin:end]
            parts.append(self._ask(source, spec, *part))
            begin = end
        return parts

    def _ask(
        self, source: RemoteShard, spec: PackedSpec, rows: Array, records: Array, firsts: Array, counts: Array
    ) -> SpanPart:
        memory = self.staging.take(spec.reply_bytes(len(rows), int(counts.sum())))
        slots, generations = (np.ascontiguousarray(records[field]) for field in ("slot", "generation"))
        future = source.peer.fetch_spans(
            spec,
            slots,
            np.ascontiguousarray(firsts),
            generations,
            np.ascontiguousarray(counts),
            memory.numpy(),
        )

        def again() -> SpanPart:
            return self._ask(source, spec, rows, records, firsts, counts)

        return SpanPart(spec, rows, firsts, counts, memory, future, again)
