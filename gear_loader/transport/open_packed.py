"""A query that a requester has opened: gathers the spans of a `PackedSpec` into replies."""

from __future__ import annotations

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.native.packed import (
    PACKED_BASE,
    PACKED_BLOCKS,
    PACKED_OUT,
    PACKED_STEP_BYTES,
    PACKED_STEP_STRIDE,
    PACKED_STRIDE,
    PACKED_WIDTH,
    gather_packed,
)
from gear_loader.transport.open_table import OpenTable
from gear_loader.transport.packed_spec import PackedSpec
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
        if attached.table.has_tier:
            raise SchemaError(
                f"Table {self.spec.table!r} has a disk tier (Disk(size=)), of which a server sends no rows for now. "
                "Read it on its own machine, or create it with memory for all of its trajectories."
            )
        region = attached.table.region
        self._columns = np.zeros((len(self.spec.columns), PACKED_WIDTH), dtype=np.int64)
        for row, column in zip(self._columns, self.spec.columns.values(), strict=True):
            blocks, place = region.blocks(column), region.layout.columns[column]
            row[PACKED_BASE] = blocks.ctypes.data + place.inside
            row[PACKED_STRIDE], row[PACKED_BLOCKS] = blocks.strides[0], len(blocks)
            row[PACKED_STEP_BYTES], row[PACKED_STEP_STRIDE] = place.step_bytes, place.step_stride
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
            at_once: do not wait for the table's lock.

        Raises:
            LockTimeoutError: the lock is held.
        """
        slots, firsts, generations, counts = rows
        n, total = len(slots), int(counts.sum())
        table = self._columns.copy()
        spans, status = self.spec.spans(n, total), self.spec.data_bytes(n, total)
        base, end = out.ctypes.data, 0
        for row, span in zip(table, spans, strict=True):
            row[PACKED_OUT] = base + span.offset
            out[end : span.offset] = 0  # do not send old contents of the buffer
            end = span.offset + (n if span.once else total) * span.step_bytes
        out[end:status], out[status + n :] = 0, 0
        once = np.array([span.once for span in spans])
        starts = (np.cumsum(counts) - counts).astype(np.int32)
        with attached.reading(at_once=at_once):
            served = attached.live(slots, generations)
            served &= firsts + counts <= attached.extent[:, 0].take(slots, mode="clip")
            which = np.flatnonzero(served)
            if len(which) < n:
                out[:status] = 0
            bad = gather_packed(
                np.ascontiguousarray(table[~once]),
                np.ascontiguousarray(table[once]),
                np.ascontiguousarray(slots),
                np.stack((firsts, counts)),
                starts,
                attached.extent,
                attached.block_ids,
                attached.block_steps,
                np.empty(total, dtype=np.int32),
                False,
                which,
            )
            attached.table.reader().check_gathered(bad)
        np.logical_not(served, out=out[status : status + n].view(np.bool_))


def warm_up() -> None:
    """Load the compiled gather, which may take seconds the first time on a machine."""
    columns, none = np.zeros((1, PACKED_WIDTH), dtype=np.int64), np.empty(0, dtype=np.int64)
    places, extent = np.empty(0, dtype=np.int32), np.zeros((1, 3), dtype=np.int64)
    spans, ids = np.empty((2, 0), dtype=np.int64), np.zeros(1, dtype=np.int32)
    gather_packed(columns, columns, none, spans, places, extent, ids, 1, places, False, none)
