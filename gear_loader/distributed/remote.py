"""Rows of a shard on another node: requested in parts, into reused staging memory."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.buffers import Part, SpanPart, Staging
from gear_loader.collection.n_step import ReturnWindows
from gear_loader.errors import HandshakeError, PeerTimeoutError, TransportError
from gear_loader.storage.schema import Schema, Window
from gear_loader.transport.request import Answer
from gear_loader.transport.spec import AnySpec, PackedSpec, ValueSpec, WindowSpec
from gear_loader.utils.arrays import Array

PART_BYTES = 1 << 20
"""Bytes of a request: while the server sends one part it gathers the next one, and the client places the last."""
MOST_RECEIVED_HERE = 1 << 24
"""Most bytes that are asked for at a time and received by the thread that waits for them. It gathers the rows of this
node first; meanwhile the buffers of the sockets fill (by default up to 6 MiB on Linux). More is received by the thread
of the event loop as it arrives."""
_MOST_VALUES = 1 << 14  # of a request
_PAUSE = 0.05  # seconds before a lost request is repeated


@dataclasses.dataclass
class RowRequest:
    """A requested part of a batch.

    Attributes:
        part: its rows, `SpanPart` for a packed batch; its memory is written until the future is done.
        future: status of each row, or piece of a row, uint8 [n]: 0 where it was served.
        again: repeats the request, into other memory.
    """

    part: Any
    future: Answer[Array]
    again: Callable[[], RowRequest]

    def wait(self, end: float) -> tuple[Any, Array]:
        """Wait for the rows; return the part, and the future's result. Repeat the request after a lost connection: the
        server may have been restarted.

        Args:
            end: deadline of repeated requests, by `time.monotonic`.
        """
        request = self
        while True:
            try:
                return request.part, request.future.result()
            except (PeerTimeoutError, HandshakeError):
                raise
            except TransportError:
                if time.monotonic() > end:
                    raise
                time.sleep(_PAUSE)
                request = request.again()


class RemoteShard:
    """A shard whose rows come over a transport.

    Args:
        one_sided: whether `peer` reads the table's memory itself, by the blocks of the records.
        asked: the connection to the table's server, which ragged values are asked of; by default `peer`.
    """

    def __init__(
        self, peer: Any, name: str, schema: Schema, *, one_sided: bool = False, asked: Any = None
    ) -> None:
        self.peer = peer
        self._asked = peer if asked is None else asked
        self.name = name
        self.schema = schema
        self.one_sided = one_sided
        self._specs: dict[tuple[Any, ...], Any] = {}

    # ---------------------------------------------------------------- windows of one length

    def spec(self, windows: Mapping[str, Window], returns: tuple[ReturnWindows, ...] = ()) -> WindowSpec:
        """Return the request's windows, the same object for the same windows."""
        key = returns, tuple(windows.items())
        if key not in self._specs:
            self._specs[key] = WindowSpec(self.name, self.schema, windows, returns)
        found: WindowSpec = self._specs[key]
        return found

    def start(
        self,
        windows: Mapping[str, Window],
        rows: Array,
        records: Array,
        staging: Staging,
        returns: tuple[ReturnWindows, ...] = (),
        *,
        moved: bool = False,
    ) -> list[RowRequest]:
        """Request windows of rows.

        Args:
            moved: whether the anchors are others than the drawn ones, whose blocks the records do not tell: then the
                table's server reads the rows.
            returns: n-step returns of them that the owner computes; not one-sided.
            rows: rows of the batch, int64 [n].
            records: row records of these rows, [n].
            staging: pool of the parts' memory.
        """
        spec = self.spec(windows, returns)
        size = max(1, PART_BYTES // spec.row_bytes)
        one_sided = self.one_sided and not moved
        peer = self._asked if moved else self.peer
        here = not one_sided and spec.row_bytes * len(rows) <= MOST_RECEIVED_HERE
        requests = []
        for begin in range(0, len(rows), size):
            some = records[begin : begin + size]
            given = [np.ascontiguousarray(some[field]) for field in ("slot", "step", "generation")]
            options = self._places(some) if one_sided else {"here": here}
            part = functools.partial(Part, rows[begin : begin + size])
            requests.append(self._ask(peer, spec, given, spec.reply_bytes(len(some)), part, staging, options))
        return requests

    def _ask(
        self,
        peer: Any,
        spec: AnySpec,
        given: Sequence[Array],
        size: int,
        part: Callable[[torch.Tensor], Any],
        staging: Staging,
        options: dict[str, Any],
    ) -> RowRequest:
        """Request rows, whose reply has `size` bytes; `part` makes a part of its memory."""
        memory = staging.take(size)
        future = peer.fetch(spec, *given, out=memory.numpy(), **options)
        again = functools.partial(self._ask, peer, spec, given, size, part, staging, options)
        return RowRequest(part(memory), future, again)

    @staticmethod
    def _places(records: Array) -> dict[str, Array]:
        """Return the blocks of the rows' windows, as `gear_loader.native.gathering.resolve` returns them."""
        ids = np.ascontiguousarray(records["blocks"])
        extent: Array = np.empty((len(records), 3), dtype=np.int64)
        extent[:, 0], extent[:, 2] = records["steps"], records["final"]
        extent[:, 1] = np.arange(len(records)) * ids.shape[1] - records["low"]
        return {"extent": extent, "block_ids": ids}

    # ---------------------------------------------------------------- spans of steps

    def start_spans(
        self, columns: Sequence[str], rows: Array, records: Array, spans: Array, staging: Staging
    ) -> list[RowRequest]:
        """Request spans of steps of rows; those of more than `PART_BYTES` are cut into pieces.

        Args:
            columns: to read. rows, records, staging: as for `start`.
            spans: first step and number of steps of each row, int64 [2, n].
        """
        key = tuple(columns)
        if key not in self._specs:
            self._specs[key] = PackedSpec(self.name, self.schema, dict(zip(columns, columns, strict=True)))
        spec: PackedSpec = self._specs[key]
        most = max(1, PART_BYTES // spec.step_bytes)
        pieces = np.maximum(1, -(-spans[1] // most))
        which = np.repeat(np.arange(len(rows)), pieces)
        inside = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
        counts = np.minimum(spans[1, which] - inside, most)
        asked = rows[which], records[which], spans[0, which] + inside, counts, inside
        ends = np.cumsum(counts * spec.step_bytes + spec.row_bytes)
        requests, begin = [], 0
        while begin < len(which):
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + PART_BYTES, side="right")))
            numbers, some, firsts, steps, places = (values[begin:end] for values in asked)
            given = [np.ascontiguousarray(each) for each in (some["slot"], firsts, some["generation"], steps)]
            sizes = len(some), int(steps.sum())
            offsets = {span.name: span.offset for span in spec.spans(*sizes)}
            part = functools.partial(_span_part, numbers, firsts, steps, places, offsets)
            requests.append(self._ask(self.peer, spec, given, spec.reply_bytes(*sizes), part, staging, {}))
            begin = end
        return requests

    # ---------------------------------------------------------------- ragged values

    def start_values(
        self, column: str, slots: Array, generations: Array, records: Array, staging: Staging
    ) -> list[RowRequest]:
        """Request ragged values; those of more than `PART_BYTES` are cut into pieces.

        Args:
            column: of the values. records: int64 [n, 2]. staging: as for `start`.
            slots, generations: int64 [n or more], of their trajectories, and of others of which only the status is
                wanted.

        Returns:
            Requests of `ValuePart`, together of all rows.
        """
        key = None, column  # spans of this column alone have its name as their key
        if key not in self._specs:
            self._specs[key] = ValueSpec(self.name, self.schema, {column: None})
        spec: ValueSpec = self._specs[key]
        ends, rows = np.cumsum(abs(records[:, 1])), abs(records[:, 1])
        total = int(ends[-1]) if len(ends) else 0
        size, row_bytes = max(1, PART_BYTES // spec.values.row_bytes), spec.values.row_bytes
        options, requests, low = {"here": total * row_bytes <= MOST_RECEIVED_HERE}, [], 0
        while low < total:
            first = int(np.searchsorted(ends, low, side="right"))
            last = min(int(np.searchsorted(ends, low + size)), first + _MOST_VALUES - 1, len(ends) - 1)
            high = min(low + size, int(ends[last]))
            which = slice(first, last + 1)
            firsts = np.maximum(low - (ends - rows)[which], 0)
            counts = np.minimum(ends[which], high) - np.maximum((ends - rows)[which], low)
            names = slots[which], firsts, generations[which], counts, *records[which].T
            given = [np.ascontiguousarray(each) for each in names]
            part = functools.partial(ValuePart, np.arange(first, last + 1), low * row_bytes, high * row_bytes)
            requests.append(
                self._ask(
                    self._asked,
                    spec,
                    given,
                    spec.reply_bytes(len(firsts), high - low),
                    part,
                    staging,
                    dict(options),
                )
            )
            low = high
        for first in range(len(rows), len(slots), _MOST_VALUES):
            more = slots[first : first + _MOST_VALUES], generations[first : first + _MOST_VALUES]
            none = np.zeros_like(more[0])
            part = functools.partial(
                ValuePart, first + np.arange(len(none)), total * row_bytes, total * row_bytes
            )
            given = [np.ascontiguousarray(each) for each in (more[0], none, more[1], none, none, none)]
            requests.append(
                self._ask(
                    self._asked, spec, given, spec.reply_bytes(len(none), 0), part, staging, dict(options)
                )
            )
        return requests


@dataclasses.dataclass
class ValuePart:
    """Ragged values in staging memory, one after another.

    Attributes:
        rows: number of each value that it has a piece of, int64 [n], among those that were asked for.
        begin, end: where its bytes lie among those of all.
        memory: uint8.
    """

    rows: Array
    begin: int
    end: int
    memory: torch.Tensor


def _span_part(
    rows: Array, firsts: Array, counts: Array, inside: Array, offsets: dict[str, int], memory: torch.Tensor
) -> SpanPart:
    return SpanPart(rows, memory, firsts, counts, inside, offsets)
