"""A query that a requester has opened: gathers the windows of a `WindowSpec` into replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gear_loader.collection.plans import locate_columns, window_columns
from gear_loader.collection.windows import reach_of
from gear_loader.errors import LockTimeoutError, TransportError
from gear_loader.kernels.plan import MASK, OUT, WIDTH
from gear_loader.native.serving import serve
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.states import READY
from gear_loader.transport.open_table import OpenTable
from gear_loader.transport.spec import WindowSpec
from gear_loader.transport.table_cache import AttachedTable, TableCache
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.collection.tier_rows import TierRows

__all__ = ["OpenQuery", "warm_up"]

_MOST_ANCHOR = 1 << 40
_MOST_LAYOUTS = 16


class _Layout(NamedTuple):
    """Layout of a reply with n rows in one buffer.

    Attributes:
        table: the column table of the gather, with addresses of the buffer.
        status: offset of the status.
        gaps: int64 [G, 2], begin and end of unused ranges between and after the pieces.
    """

    table: Array
    status: int
    gaps: Array


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
        schema, sources = attached.table.schema, list(self.spec.sources.values())
        self._layouts = {}
        columns = window_columns(schema, sources, self.spec.windows.values())
        self._columns = locate_columns(columns, sources, attached.table._engine.region)
        names = list(self.spec.windows)
        self._tier: TierRows | None = None
        if attached.table._engine.has_tier:
            from gear_loader.collection.tier_rows import TierRows

            self._tier = TierRows(attached.table, reach_of(schema, self.spec.windows), self.spec.row_bytes)
        self._masked = [names.index(piece.name) for piece in self.spec.pieces(1) if piece.kind == "mask"]
        return attached

    def reply_bytes(self, rows: Array) -> int:
        """Bytes of the reply to a request, int64 [3, n]."""
        return self.spec.reply_bytes(rows.shape[1])

    def read(self, attached: AttachedTable, rows: Array, out: Array, *, at_once: bool) -> None:
        """Fill the data and status of a reply.

        Args:
            attached: the result of `table`.
            rows: int64 [3, n]: slots, anchors and generations, contiguous, not validated.
            out: uint8 [reply_bytes(rows)], aligned to 128 bytes; fully overwritten.
            at_once: do not wait for the table's lock, or its disk.

        Raises:
            TransportError: an anchor out of bounds. LockTimeoutError: the lock is held, or rows lie on disk only.
        """
        layout = self._layout(rows.shape[1], out)
        if self._tier is not None:
            self._gather_tiered(self._tier, attached, rows, out, layout, at_once=at_once)
            return
        bad = attached.serve(
            layout.table, rows, _MOST_ANCHOR, out, layout.status, layout.gaps, at_once=at_once
        )
        if bad < 0:
            raise _invalid_anchor(-1 - bad, rows[1, -1 - bad])
        attached.table._engine.reader().check_gathered(bad)

    def _gather_tiered(
        self,
        tier: TierRows,
        attached: AttachedTable,
        names: Array,
        out: Array,
        layout: _Layout,
        *,
        at_once: bool,
    ) -> None:
        """`gather` of a table of which some trajectories lie on disk only."""
        slots, anchors, generations = names
        n = len(slots)
        if n and (anchors.min() < -_MOST_ANCHOR or anchors.max() > _MOST_ANCHOR):
            bad = int(np.flatnonzero((anchors < -_MOST_ANCHOR) | (anchors > _MOST_ANCHOR))[0])
            raise _invalid_anchor(bad, anchors[bad])
        with attached.reading(at_once=at_once):
            served = attached.live(slots, generations)
            rows = np.flatnonzero(served)
            if len(rows) < n:
                out[:] = 0
                slots, anchors, generations = slots[rows], anchors[rows], generations[rows]
            if at_once and tier.outside(slots).any():
                raise LockTimeoutError("Rows lie on disk only, so that this takes a while.")
            lost = self._read_tiers(tier, layout.table, slots, anchors, generations, rows)
        served[lost] = False
        for piece in self.spec.pieces(n) if len(lost) else ():
            out[piece.offset : piece.offset + n * piece.row_bytes].reshape(n, -1)[lost] = 0
        np.logical_not(served, out=out[layout.status : layout.status + n].view(np.bool_))
        for begin, end in layout.gaps:  # do not send old contents of the buffer
            out[begin:end] = 0

    def _read_tiers(
        self, tier: TierRows, columns: Array, slots: Array, anchors: Array, generations: Array, rows: Array
    ) -> Array:
        """Gather rows of which some lie on disk only; return those that cannot be read, int64 [n]."""
        lost: list[Array] = [rows[:0]]
        while len(rows):
            try:
                tier.gather(columns, list(self.spec.sources.values()), slots, anchors, generations, rows)
                break
            except LostRowsError as error:
                tier.table._engine.remove_lost(error)
                kept = ~np.isin(slots, error.slots)
                lost.append(rows[~kept])
                slots, anchors, generations, rows = (
                    part[kept] for part in (slots, anchors, generations, rows)
                )
        return np.concatenate(lost)

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
        return _Layout(table, status, np.array(gaps, dtype=np.int64).reshape(-1, 2))


def _invalid_anchor(row: int, anchor: int) -> TransportError:
    return TransportError(f"anchors[{row}] is {anchor}; expected a step, at most 2**40 from 0.")


def warm_up() -> None:
    """Load the compiled loop, which may take seconds the first time on a machine."""
    names, extent = np.empty((3, 0), dtype=np.int64), np.zeros((1, 3), dtype=np.int64)
    state, generation = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)
    ids, out, gaps = (
        np.zeros(1, dtype=np.int32),
        np.zeros(0, dtype=np.uint8),
        np.zeros((0, 2), dtype=np.int64),
    )
    serve(
        np.zeros((1, WIDTH), dtype=np.int64), names, 0, state, READY, generation, extent, ids, 1, out, 0, gaps
    )
