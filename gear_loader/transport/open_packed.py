"""A query that a requester has opened: gathers the spans of a `PackedSpec` into replies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gear_loader.collection.plans import locate_columns
from gear_loader.collection.sources import Place, read_packed
from gear_loader.errors import LockTimeoutError
from gear_loader.kernels.plan import OUT, WIDTH
from gear_loader.native.packed import gather_packed
from gear_loader.storage.disk import LostRowsError
from gear_loader.transport.open_table import OpenTable
from gear_loader.transport.packed_spec import PackedSpec, Span
from gear_loader.transport.table_cache import AttachedTable, TableCache
from gear_loader.utils.arrays import Array

__all__ = ["OpenPacked", "warm_up"]


class OpenPacked(OpenTable):
    """Gathers the spans of one spec.

    Args:
        spec: table and columns. tables: of the server.

    Raises:
        GearError: as `TableCache.get` and `AttachedTable.check_schema`.
    """

    def __init__(self, spec: PackedSpec, tables: TableCache) -> None:
        self.spec = spec
        super().__init__(spec.table, tables)

    def _attach(self) -> AttachedTable:
        attached = self._tables.get(self.spec.table)
        attached.check_schema(self.spec.schema)
        sources = list(self.spec.columns.values())
        columns: Array = np.zeros((len(sources), WIDTH), dtype=np.int64)
        self._columns = locate_columns(columns, sources, attached.table._engine.region)
        return attached

    def reply_bytes(self, rows: Array) -> int:
        """Bytes of the reply to a request, int64 [4, n], not validated.

        Raises:
            TransportError: a number out of bounds.
        """
        _, firsts, _, counts = rows
        return self.spec.reply_bytes(len(firsts), self.spec.check_rows(firsts, counts))

    def read(self, attached: AttachedTable, rows: Array, out: Array, *, at_once: bool) -> None:
        """Fill the data and status of a reply.

        Args:
            attached: the result of `table`.
            rows: int64 [4, n], slots, first steps, generations, numbers of steps; `reply_bytes` has checked them.
            out: uint8 [reply_bytes(rows)], aligned to 128 bytes; fully overwritten.
            at_once: do not wait for the table's lock, or its disk.

        Raises:
            LockTimeoutError: the lock is held, or rows lie on disk only.
        """
        slots, firsts, generations, counts = rows
        n, total = len(slots), int(counts.sum())
        table = self._columns.copy()
        spans, status = self.spec.spans(n, total), self.spec.data_bytes(n, total)
        base, end = out.ctypes.data, 0
        for row, span in zip(table, spans, strict=True):
            row[OUT] = base + span.offset
            out[end : span.offset] = 0  # do not send old contents of the buffer
            end = span.offset + (n if span.once else total) * span.step_bytes
        out[end:status], out[status + n :] = 0, 0
        once = np.array([span.once for span in spans])
        tables = np.ascontiguousarray(table[~once]), np.ascontiguousarray(table[once])
        starts = (np.cumsum(counts) - counts).astype(np.int32)
        with attached.reading(at_once=at_once):
            served = attached.live(slots, generations)
            served &= firsts + counts <= attached.extent[:, 0].take(slots, mode="clip")
            which = np.flatnonzero(served)
            while True:
                if len(which) < n:
                    out[:status] = 0
                inside, places = which, attached.extent[slots[which], 1]
                if attached.table._engine.has_tier:
                    inside = which[places >= 0]
                    if at_once and len(inside) < len(which):
                        raise LockTimeoutError("Rows lie on disk only, so that this takes a while.")
                bad = self._gather(attached, tables, rows, starts, inside)
                if bad and (attached.extent[slots[which], 1] != places).any():
                    continue  # some were moved to disk meanwhile, and may be back
                attached.table._engine.reader().check_gathered(bad)
                if attached.table._engine.has_tier:
                    attached.table._engine.tier_reader().count_hits(len(inside))
                try:
                    self._read_disk(attached, rows, starts, np.setdiff1d(which, inside), spans, out)
                    break
                except LostRowsError as error:
                    attached.table._engine.remove_lost(error)
                    served &= ~np.isin(slots, error.slots)
                    which = np.flatnonzero(served)
        np.logical_not(served, out=out[status : status + n].view(np.bool_))

    def _gather(
        self, attached: AttachedTable, tables: tuple[Array, Array], rows: Array, starts: Array, which: Array
    ) -> int:
        """Copy rows in memory, `which` (int64 [m]); return the number of invalid blocks.

        Args:
            tables: of the columns of steps, and of those per trajectory. rows: as for `read`.
            starts: int32 [n], place of the first step of each row.
        """
        slots, firsts, _, counts = rows
        bad: int = gather_packed(
            *tables,
            np.ascontiguousarray(slots),
            np.stack((firsts, counts)),
            starts,
            attached.extent,
            attached.block_ids,
            attached.block_steps,
            np.empty(int(counts.sum()), dtype=np.int32),
            False,
            which,
        )
        return bad

    def _read_disk(
        self,
        attached: AttachedTable,
        rows: Array,
        starts: Array,
        which: Array,
        spans: Sequence[Span],
        out: Array,
    ) -> None:
        """Read rows that lie on disk only, `which` (int64 [m]), into the reply.

        Raises:
            LostRowsError: trajectories cannot be read.
        """
        if not len(which):
            return
        slots, firsts, generations, counts = (part[which] for part in rows)
        begins = starts[which].astype(np.int64)
        places = [
            Place(column, out, span.offset, span.step_bytes, span.once)
            for column, span in zip(self.spec.columns.values(), spans, strict=True)
        ]
        read_packed(
            attached.table._engine.tier_reader(),
            places,
            slots,
            generations,
            np.stack((firsts, counts)),
            begins,
            which,
            drawn=len(which),
        )


def warm_up() -> None:
    """Load the compiled gather, which may take seconds the first time on a machine."""
    columns, none = np.zeros((1, WIDTH), dtype=np.int64), np.empty(0, dtype=np.int64)
    places, extent = np.empty(0, dtype=np.int32), np.zeros((1, 3), dtype=np.int64)
    spans, ids = np.empty((2, 0), dtype=np.int64), np.zeros(1, dtype=np.int32)
    gather_packed(columns, columns, none, spans, places, extent, ids, 1, places, False, none)
