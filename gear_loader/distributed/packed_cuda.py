"""Packed batches of several shards for a GPU, which reads this node's tables itself, and rows of others where they
arrive: in pinned memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gear_loader.collection.collector import Buffers
from gear_loader.collection.packed import PackedBuffers, total_steps
from gear_loader.collection.packed_cuda import CudaPackedBuffers, PackedRows
from gear_loader.collection.packed_sources import (
    PackedSource,
    StagedPieces,
    TableSources,
    staged_pieces,
    starts_of,
)
from gear_loader.distributed.collector import ShardRows, table_here
from gear_loader.distributed.packed_collector import ServedRows, ShardPackedCollector
from gear_loader.distributed.remote_spans import RemoteSpans, SpanPart
from gear_loader.utils.arrays import Array

__all__ = ["CudaShardPackedCollector", "StagedShardPackedCollector"]


class StagedShardPackedCollector(ShardPackedCollector):
    """A `ShardPackedCollector` for a GPU that cannot read the tables of this node: it gets copies of batches that the
    CPU gathers in pinned memory."""

    def buffers(self, *, shared: bool = False) -> Buffers:
        """See `Collector.buffers`."""
        return CudaPackedBuffers(self, PackedBuffers(self, shared=False, pinned=True))

    def gather(self, buffers: Buffers, rows: ShardRows) -> None:
        """See `ShardPackedCollector.gather`. Waits for the last copy out of the staging buffers."""
        assert isinstance(buffers, CudaPackedBuffers)
        gpu = buffers.gpu
        assert gpu.staging is not None
        gpu.filled.synchronize()
        try:
            super().gather(gpu.staging, rows)
            buffers.copy_staged(len(rows))
        finally:
            gpu.filled.record()


class _DeviceBuffers(CudaPackedBuffers):
    """Buffers on a GPU.

    Attributes:
        row_starts: ``cu_seqlens`` of the running batch, int32 [n + 1]. sources: of its rows, as far as they are known.
        parts: memory of rows of other nodes that the GPU may still read.
    """

    def __init__(self, collector: ShardPackedCollector) -> None:
        super().__init__(collector, None)
        self.row_starts: Array = np.zeros(1, dtype=np.int32)
        self.sources: list[PackedSource] = []
        self.parts: list[torch.Tensor] = []

    def begin(self) -> None:
        super().begin()
        self.sources = []


class CudaShardPackedCollector(ShardPackedCollector):
    """A `ShardPackedCollector` whose GPU reads the tables of this node itself.

    While requests to other nodes are on their way the host lists the rows of this one, and reads those that lie on disk
    only. What it writes for a batch crosses the bus in one copy. There is one launch for each table, for the rows on
    disk of each, and for each answer of another node, and one split of all records of packed tables.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.zero_copy = True
        steps, once = self.columns_read
        self._remote = RemoteSpans({name: name for name in (*steps, *once)}, pinned=True)
        self._tables: dict[int, TableSources] = {}

    def buffers(self, *, shared: bool = False) -> Buffers:
        """See `Collector.buffers`."""
        return _DeviceBuffers(self)

    def gather(self, buffers: Buffers, rows: ShardRows) -> None:
        """Queue a batch on the current stream, and record `filled` after it; see `ShardPackedCollector.gather`."""
        assert isinstance(buffers, _DeviceBuffers)
        buffers.gpu.filled.synchronize()  # the host memory of the last batch in these buffers is about to be written
        while buffers.parts:
            self._remote.staging.give(buffers.parts.pop())
        try:
            super().gather(buffers, rows)
        finally:
            buffers.gpu.filled.record()  # also after a failed batch: the GPU reads it from the same memory

    def _begin(self, buffers: PackedBuffers, spans: Array) -> None:
        assert isinstance(buffers, _DeviceBuffers)
        total_steps(spans)
        buffers.begin()
        buffers.row_starts = starts_of(spans)

    def _gather_shard(
        self,
        buffers: PackedBuffers,
        shard: int,
        slots: Array,
        generations: Array,
        spans: Array,
        which: Array,
    ) -> None:
        assert isinstance(buffers, _DeviceBuffers)
        if shard not in self._tables:
            self._tables[shard] = TableSources(table_here(self.shards, shard), *self.columns_read)
        starts, room = buffers.row_starts, buffers.room
        buffers.sources += self._tables[shard].list(slots, generations, spans, starts, which, room)

    def _finish(self, buffers: PackedBuffers, rows: ShardRows, spans: Array, far: ServedRows) -> None:
        assert isinstance(buffers, _DeviceBuffers)
        for part in far.parts:
            buffers.parts.append(part.memory)  # it is given back when the kernel has run
            buffers.sources.append(self._arrived(part, far, buffers.row_starts))
        names, weights = self._names(rows)
        batch = PackedRows(names, spans, buffers.row_starts, buffers.sources, weights)
        buffers.gather(batch, self.programs)

    def _arrived(self, part: SpanPart, far: ServedRows, starts: Array) -> StagedPieces:
        """The rows of a part that are in the batch."""
        total = int(part.counts.sum())
        which = np.flatnonzero(far.served[part.rows])
        rows, firsts, counts = part.rows[which], part.firsts[which], part.counts[which]
        begins = (np.cumsum(part.counts) - part.counts)[which]
        inside = firsts - far.lows[rows]  # of a row that is cut, a later piece has more than 0
        once = None
        if self.once:
            whole = np.flatnonzero(inside == 0)
            once = which[whole], far.numbers[rows[whole]]
        offsets = {span.name: span.offset for span in part.spec.spans(len(part.rows), total)}
        outs = starts[far.numbers[rows]] + inside
        return StagedPieces(part.memory, offsets, *staged_pieces(begins, counts, outs, firsts, once))
