"""A query that a requester has opened: gathers the windows of a `WindowSpec` into replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gear_loader.collection.windows import reach_of
from gear_loader.errors import LockTimeoutError, StaleIndexError, TransportError
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
from gear_loader.storage.disk import LostRowsError
from gear_loader.transport.spec import Piece, WindowSpec
from gear_loader.transport.table_cache import AttachedTable, TableCache
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.collection.tier_rows import TierRows

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


class OpenQuery:
    """Gathers the windows of one spec.

    Args:
        spec: table and windows. tables: of the server.

    Raises:
        GearError: as `TableCache.get` and `AttachedTable.check_schema`.
    """

    def __init__(self, spec: WindowSpec, tables: TableCache) -> None:
        self.spec = spec
        self._tables = tables
        self._layouts: dict[tuple[int, int], _Layout] = {}
        self._attached: AttachedTable | None = self._attach()

    def _attach(self) -> AttachedTable:
        attached = self._tables.get(self.spec.table)
        attached.check_schema(self.spec.schema)
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
        self._tier: TierRows | None = None
        if attached.table.has_tier:
            from gear_loader.collection.tier_rows import TierRows

            self._tier = TierRows(
                attached.table, reach_of(layout.schema, self.spec.windows), self.spec.row_bytes
            )
        self._masked = [names.index(piece.name) for piece in self.spec.pieces(1) if piece.kind == "mask"]
        return attached

    @property
    def is_attached(self) -> bool:
        """Whether `table` returns without attaching, and so without waiting for a lock."""
        return self._attached is not None

    def release(self) -> None:
        """Detach the table if its name was removed or replaced; the next request attaches again."""
        if self._attached is not None and not self._attached.is_current:
            self._attached = None

    def table(self) -> AttachedTable:
        """Return the attached table; attach it if necessary, which may wait for its lock (see `is_attached`).

        Raises:
            StaleIndexError: the table was removed or replaced. The next call attaches the table of that name.
        """
        attached = self._attached
        if attached is None:
            attached = self._attached = self._attach()
        elif not attached.is_current:
            self._attached = None
            raise StaleIndexError(
                f"Table {self.spec.table!r} has been removed since the first request; slots and generations drawn "
                "before are invalid. Draw again: the next request attaches to the table that has the name then."
            )
        return attached

    def read(
        self,
        attached: AttachedTable,
        slots: Array,
        anchors: Array,
        generations: Array,
        out: Array,
        *,
        at_once: bool,
    ) -> None:
        """Fill the data and status of a reply.

        Args:
            attached: the result of `table`.
            slots, anchors, generations: int64 [n], contiguous, not validated.
            out: uint8 [reply_bytes(n)], aligned to 128 bytes; fully overwritten.
            at_once: do not wait for the table's lock, or its disk.

        Raises:
            TransportError: an anchor out of bounds. LockTimeoutError: the lock is held, or rows lie on disk only.
        """
        n = len(slots)
        if n and (anchors.min() < -_MOST_ANCHOR or anchors.max() > _MOST_ANCHOR):
            bad = int(np.flatnonzero((anchors < -_MOST_ANCHOR) | (anchors > _MOST_ANCHOR))[0])
            raise TransportError(f"anchors[{bad}] is {anchors[bad]}; expected a step, at most 2**40 from 0.")
        layout = self._layout(n, out)
        with attached.reading(at_once=at_once):
            served = attached.live(slots, generations)
            rows = None if served.all() else np.flatnonzero(served)
            if rows is not None:
                out[:] = 0
                slots, anchors, generations = slots[rows], anchors[rows], generations[rows]
            if self._tier is not None:
                if at_once and self._tier.outside(slots).any():
                    raise LockTimeoutError("Rows lie on disk only, so that this takes a while.")
                kept = np.arange(n) if rows is None else rows
                lost = self._read_tiers(self._tier, layout.table, slots, anchors, generations, kept)
                served[lost] = False
                for piece in layout.pieces if len(lost) else ():
                    out[piece.offset : piece.offset + n * piece.row_bytes].reshape(n, -1)[lost] = 0
            elif len(slots):
                bad = copying.gather(
                    layout.table,
                    slots,
                    anchors,
                    attached.extent,
                    attached.block_ids,
                    attached.block_steps,
                    0,
                    len(slots),
                    rows,
                )
                attached.table.reader().check_gathered(bad)
        status = layout.status
        np.logical_not(served, out=out[status : status + n].view(np.bool_))
        if rows is None:  # do not send old contents of the buffer
            for begin, end in layout.gaps:
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
                tier.table.remove_lost(error)
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
        return _Layout(table, pieces, status, gaps)


def warm_up() -> None:
    """Load the compiled gather, which may take seconds the first time on a machine."""
    empty = np.empty(0, dtype=np.int64)
    table, extent = np.zeros((1, WIDTH), dtype=np.int64), np.zeros((1, 3), dtype=np.int64)
    for rows in (None, empty):
        copying.gather(table, empty, empty, extent, np.zeros(1, dtype=np.int32), 1, 0, 0, rows)
