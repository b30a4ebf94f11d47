"""A query that a requester has opened: gathers the windows of a `WindowSpec` into replies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gear_loader.errors import SchemaError, TransportError
from gear_loader.kernels.plan import (
    BASE,
    BLOCKS,
    FINAL,
    LENGTH,
    MASK,
    OFFSET,
    OUT,
    PAD,
    PAD_EDGE,
    PAD_HEAD,
    PAD_KEEP,
    PAD_TAIL,
    STEP_BYTES,
    STEP_STRIDE,
    STRIDE,
    WIDTH,
)
from gear_loader.native import copying
from gear_loader.transport.open_table import OpenTable
from gear_loader.transport.spec import Piece, WindowSpec
from gear_loader.transport.table_cache import AttachedTable, TableCache
from gear_loader.utils.arrays import Array

__all__ = ["OpenQuery", "warm_up"]

_PADS = {"keep": PAD_KEEP, "head": PAD_HEAD, "tail": PAD_TAIL, "edge": PAD_EDGE}
_MOST_ANCHOR = 1 << 40
_MOST_LAYOUTS = 16


class _Layout(NamedTuple):
    """Layout of a reply with n rows in one buffer.

    Attributes:
        table: the column table of the gather, with addresses of the buffer. pieces: columns and masks.
        status: offset of the status. gaps: begin and end of unused ranges between and after the pieces.
    """

    table: Array
    pieces: tuple[Piece, ...]
    status: int
    gaps: list[tuple[int, int]]


class OpenQuery(OpenTable):
    """Gathers the windows of one spec.

    Args:
        spec: table and windows. tables: of the server.

    Raises:
        GearError: as `TableCache.get` and `AttachedTable.check_schema`.
    """

    def __init__(self, spec: WindowSpec, tables: TableCache) -> None:
        self.spec = spec
        self._layouts: dict[tuple[int, int], _Layout] = {}
        super().__init__(spec.table, tables)

    def _attach(self) -> AttachedTable:
        attached = self._tables.get(self.spec.table)
        attached.check_schema(self.spec.schema)
        if attached.table.has_tier:
            raise SchemaError(
                f"Table {self.spec.table!r} has a disk tier (Disk(size=)), of which a server sends no rows for now. "
                "Read it on its own machine, or create it with memory for all of its trajectories."
            )
        region = attached.table.region
        layout = region.layout
        base = attached.table.column_addresses()
        order = {name: i for i, name in enumerate(layout.schema)}
        self._layouts = {}
        self._columns = np.zeros((len(self.spec.windows), WIDTH), dtype=np.int64)
        for row, (name, window) in zip(self._columns, self.spec.windows.items(), strict=True):
            row[[BASE, STRIDE, STEP_BYTES, STEP_STRIDE]] = base[order[self.spec.sources[name]]]
            row[BLOCKS] = layout.num_blocks
            row[LENGTH], row[OFFSET], row[PAD] = window.length, window.offset, _PADS[window.pad]
            row[FINAL] = layout.schema[self.spec.sources[name]].final
        names = list(self.spec.windows)
        self._masked = [names.index(piece.name) for piece in self.spec.pieces(1) if piece.kind == "mask"]
        return attached

    def reply_bytes(self, rows: Array) -> int:
        """Bytes of the reply to a request, int64 [3, n]."""
        return self.spec.reply_bytes(rows.shape[1])

    def read(self, attached: AttachedTable, rows: Array, out: Array, *, at_once: bool) -> None:
        """Fill the data and status of a reply.

        Args:
            attached: the result of `table`.
            rows: int64 [3, n], slots, anchors and generations, contiguous, not validated.
            out: uint8 [reply_bytes(rows)], aligned to 128 bytes; fully overwritten.
            at_once: do not wait for the table's lock.

        Raises:
            TransportError: an anchor out of bounds. LockTimeoutError: the lock is held.
        """
        slots, anchors, generations = rows
        n = len(slots)
        if n and (anchors.min() < -_MOST_ANCHOR or anchors.max() > _MOST_ANCHOR):
            bad = int(np.flatnonzero((anchors < -_MOST_ANCHOR) | (anchors > _MOST_ANCHOR))[0])
            raise TransportError(f"anchors[{bad}] is {anchors[bad]}; expected a step, at most 2**40 from 0.")
        layout = self._layout(n, out)
        with attached.reading(at_once=at_once):
            served = attached.live(slots, generations)
            which = None if served.all() else np.flatnonzero(served)
            if which is not None:
                out[:] = 0
                slots, anchors = slots[which], anchors[which]
            if len(slots):
                bad = copying.gather(
                    layout.table,
                    slots,
                    anchors,
                    attached.extent,
                    attached.block_ids,
                    attached.block_steps,
                    0,
                    len(slots),
                    which,
                )
                attached.table.reader().check_gathered(bad)
        status = layout.status
        np.logical_not(served, out=out[status : status + n].view(np.bool_))
        if which is None:  # do not send old contents of the buffer
            for begin, end in layout.gaps:
                out[begin:end] = 0

    def _layout(self, n: int, out: Array) -> _Layout:
        """Layout of a reply with n rows in `out`, cached."""
        base = out.ctypes.data
        layout = self._layouts.get((n, base))
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[n, base] = self._new_layout(n, base)
        return layout

    def _new_layout(self, n: int, base: int) -> _Layout:
        pieces, status, count = self.spec.pieces(n), self.spec.data_bytes(n), len(self._columns)
        table = self._columns.copy()
        table[:, OUT] = [base + piece.offset for piece in pieces[:count]]
        for row, piece in zip(self._masked, pieces[count:], strict=True):
            table[row, MASK] = base + piece.offset
        begins = [piece.offset + n * piece.row_bytes for piece in pieces] + [status + n]
        ends = [piece.offset for piece in pieces[1:]] + [status, self.spec.reply_bytes(n)]
        gaps = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
        return _Layout(table, pieces, status, gaps)


def warm_up() -> None:
    """Load the compiled gather, which may take seconds the first time on a machine."""
    empty = np.empty(0, dtype=np.int64)
    table, extent = np.zeros((1, WIDTH), dtype=np.int64), np.zeros((1, 3), dtype=np.int64)
    for rows in (None, empty):
        copying.gather(table, empty, empty, extent, np.zeros(1, dtype=np.int32), 1, 0, 0, rows)
