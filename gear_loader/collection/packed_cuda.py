"""Packed batches for a GPU, which reads rows of different lengths out of the table itself, without padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.collector import COUNTS, NUMBERS, ROW_KEYS, Buffers, GpuSide
from gear_loader.collection.conversions import Casts, converted_dtype
from gear_loader.collection.n_step import NStep
from gear_loader.collection.packed import PackedBuffers, PackedCollector, grown
from gear_loader.collection.windows import Whole
from gear_loader.kernels.cast_plan import CastColumn
from gear_loader.kernels.packed_plan import PIECE_WIDTH, PackedColumn, PackedPlan, PackedWork
from gear_loader.kernels.split_plan import SplitColumn, SplitPlan
from gear_loader.native.packed_lines import count_lists, list_lines, list_pieces
from gear_loader.storage.rows import SelectedRows
from gear_loader.storage.schema import Window
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.packing import Layout, packed_bytes, packed_views

__all__ = ["CudaPackedBuffers", "CudaPackedCollector"]

_LIST_BYTES = 1 << 12
"""Least memory for a batch's lists of pieces and lines."""


class _PinnedBuffers(PackedBuffers):
    """A batch in pinned memory, gathered on the CPU."""

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


@dataclasses.dataclass(frozen=True)
class _Plans:
    """The plans of a set of buffers; made again when their memory grows.

    Attributes:
        gather: of all columns; those of a record are one column.
        split: of the columns in gathered records. steps, rows: of the columns of each kind that are converted.
    """

    gather: PackedPlan
    split: SplitPlan | None
    steps: Casts | None
    rows: Casts | None


class CudaPackedBuffers(PackedBuffers):
    """The tensors of one packed batch on a GPU, as large as the largest one that they have held.

    One piece of pinned memory has what the host writes for a batch, and one of the GPU's is the copy of it::

        index, anchor, generation | cu_seqlens | weights, sample_info | tiles, groups and pieces of `PackedWork`
    """

    def __init__(self, collector: CudaPackedCollector) -> None:
        super().__init__(collector, shared=False)
        self._device = collector.device
        staging = None if collector.zero_copy else _PinnedBuffers(collector, shared=False)
        # The first is blocking: a waiting thread sleeps instead of spinning.
        filled, released = torch.cuda.Event(blocking=True), torch.cuda.Event()
        self.gpu: GpuSide = GpuSide(None, None, None, staging, filled, released)
        self._list_bytes = 0
        self._lists: tuple[torch.Tensor, ...] = ()
        self._plans: _Plans | None = None

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def reserve(self, num_rows: int, num_steps: int, list_bytes: int = 0) -> None:
        """Make room for a batch; what grows is allocated on the current stream, and holds no batch any longer."""
        before = self._num_rows, self._num_steps, self._list_bytes
        super().reserve(num_rows, num_steps)
        if list_bytes > self._list_bytes:
            self._list_bytes = grown(list_bytes)
            self._allocate_names(self._num_rows)
        if before == (self._num_rows, self._num_steps, self._list_bytes):
            return
        if before[:2] != (self._num_rows, self._num_steps):
            self._plans = None
        self.batch = Batch(
            steps=self.steps_memory,
            rows=self.rows_memory,
            info=self.info_memory,
            position=self.position,
            cu_seqlens=self.starts,
        )
        self.gpu.consumers.clear()  # the allocator does not know them as users of the new memory

    def _allocate_rows(self, count: int) -> None:
        self._once, self._once_shown, self._row_casts = self._columns(self._collector.once, count)
        self._allocate_names(count)

    def _allocate_names(self, count: int) -> None:
        """Allocate what the host writes for `count` rows, and for the lists."""
        collector = self._collector
        self.references = None
        parts: list[Layout] = [((3, count), torch.int64), ((count + 1,), torch.int32)]
        if collector.weighs:
            parts.append(((count,), torch.float32))
        if collector.informs:
            parts += [((2, count), torch.int64), ((2, count), torch.float32)]
        self._lists_at = packed_bytes(parts)
        size = self._lists_at + self._list_bytes
        self._host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._mirror = self._empty(size, dtype=torch.uint8)
        host, mirror = packed_views(self._host, parts), packed_views(self._mirror, parts)
        self.names, self.starts_array, self.starts = host[0].numpy(), host[1].numpy(), mirror[1]
        self.rows_memory = dict(zip(ROW_KEYS, mirror[0], strict=True))
        self.weights_array, self.info_arrays, self.info_memory = None, None, {}
        if collector.weighs:
            self.weights_array, self.rows_memory["priority_weight"] = host[2].numpy(), mirror[2]
        if collector.informs:
            self.info_arrays = host[-2].numpy(), host[-1].numpy()
            self.info_memory = dict(zip(COUNTS + NUMBERS, (*mirror[-2], *mirror[-1]), strict=True))
        self.rows_memory.update(self._once_shown)

    def _allocate_steps(self, count: int) -> None:
        self.references = None
        self._steps, self.steps_memory, self._step_casts = self._columns(self._collector.steps, count)
        self.position = self._empty(count, dtype=torch.int32)

    def _columns(
        self, columns: Mapping[str, tuple[int, ...]], count: int
    ) -> tuple[list[tuple[str, torch.Tensor]], dict[str, torch.Tensor], list[CastColumn]]:
        """Memory of `count` values: (column, tensor) of what is gathered, name -> tensor of what is delivered, and what
        is converted from the former to the latter. Windows of one column that are converted share what is gathered."""
        collector, staged = self._collector, self.gpu.staging is not None
        gathered: list[tuple[str, torch.Tensor]] = []
        shown: dict[str, torch.Tensor] = {}
        casts: list[CastColumn] = []
        first: dict[str, torch.Tensor] = {}
        kinds = {
            name: converted_dtype(name, collector.windows[name], collector.column_of(name))
            for name in columns
        }
        for name in sorted(columns, key=lambda name: kinds[name] is not None):
            source, column, shape = collector.source_of(name), collector.column_of(name), columns[name]
            dtype = kinds[name]
            if staged:  # it is converted on the host
                shown[name] = self._empty(count, *shape, dtype=dtype or column.dtype)
                continue
            if dtype is None or source not in first:
                values = self._empty(count, *shape, dtype=column.dtype)
                gathered.append((source, values))
                first.setdefault(source, values)
            if dtype is None:
                shown[name] = values
            else:
                shown[name] = self._empty(count, *shape, dtype=dtype)
                casts.append(CastColumn(first[source], shown[name], collector.windows[name].scale))
        return gathered, shown, casts

    # ---------------------------------------------------------------- plans and lists

    def packed_plans(self) -> _Plans:
        """The plans for the present memory. Making them waits for the GPU, after memory has grown."""
        if self._plans is None:
            self._plans = self._new_plans()
        return self._plans

    def _new_plans(self) -> _Plans:
        region = self._collector.table.region
        layout = region.layout
        columns, split = [], []
        records: torch.Tensor | None = None
        for source, values in self._steps:
            blocks, place = torch.from_numpy(region.blocks(source)), layout.columns[source]
            out = values.view(len(values), -1).view(torch.uint8)
            if not place.is_packed:
                columns.append(PackedColumn(blocks, out))
                continue
            assert layout.record is not None
            if records is None:
                records = self._empty(len(values), layout.record.bytes, dtype=torch.uint8)
                columns.append(PackedColumn(blocks, records))
            split.append(SplitColumn(records[:, None], out[:, None], 0, place.inside))
        for source, values in self._once:
            out = values.view(len(values), -1).view(torch.uint8)
            columns.append(PackedColumn(torch.from_numpy(region.blocks(source)), out, once=True))
        return _Plans(
            PackedPlan(columns, self.position),
            SplitPlan(split) if split else None,
            Casts(self._step_casts) if self._step_casts else None,
            Casts(self._row_casts) if self._row_casts else None,
        )

    def write_lists(self, tiles: Array, groups: Array, pieces: Array) -> int:
        """Write a batch's lists behind its rows; returns the bytes of both."""
        layouts = _layouts(tiles, groups, pieces)
        host = packed_views(self._host[self._lists_at :], layouts)
        for place, part in zip(host, (tiles, groups, pieces), strict=True):
            place.numpy()[...] = part
        self._lists = packed_views(self._mirror[self._lists_at :], layouts)
        return self._lists_at + packed_bytes(layouts)

    def copy_rows(self, size: int) -> tuple[torch.Tensor, ...]:
        """Queue the copy of the first bytes of what the host has written; returns tiles, groups and pieces there."""
        self._mirror[:size].copy_(self._host[:size], non_blocking=True)
        lists, self._lists = self._lists, ()
        return lists


class CudaPackedCollector(PackedCollector):
    """Gathers packed batches of one table for a GPU, as `PackedCollector` does on the CPU.

    Rows are drawn on the host, which so knows their lengths. What it writes for a batch crosses the bus in one copy;
    one launch gathers all columns, one splits the records of a packed table, one for each pair of dtypes converts.
    """

    def __init__(
        self,
        table: Table,
        windows: Mapping[str, Window | NStep | Whole],
        *,
        device: torch.device,
        programs: int | None = None,
        weighs: bool = False,
        informs: bool = False,
    ) -> None:
        super().__init__(table, windows, weighs=weighs, informs=informs, device=device, programs=programs)
        layout = table.region.layout
        strides = {}
        for name in self.steps:
            place = layout.columns[self.source_of(name)]
            strides[self.source_of(name)] = (
                table.region.blocks(self.source_of(name)).strides[0],
                place.step_stride,
            )
        self._adjoin = all(stride == self._block_steps * step for stride, step in strides.values())

    def buffers(self, *, shared: bool = False) -> Buffers:
        """Buffers for one batch, which get their memory at their first gather."""
        return CudaPackedBuffers(self)

    def gather(self, buffers: Buffers, rows: Any) -> None:
        """Queue a batch on the current stream, and record `filled` after it; see `Collector.gather`.

        Args:
            buffers: buffers of this collector.
            rows: `SelectedRows`. The caller holds their read ticket until `filled` has passed.

        The host does not wait for the GPU, unless the buffers' memory has to grow, or the GPU cannot read the region:
        then it waits for the last copy out of the staging buffers.

        Raises:
            SchemaError: the batch would have 2**31 steps or more.
            CorruptTableError: the index names no slot or block. Nothing was launched.
        """
        assert isinstance(buffers, CudaPackedBuffers)
        assert isinstance(rows, SelectedRows)
        gpu = buffers.gpu
        gpu.filled.synchronize()  # see `Collector.gather`
        try:
            if gpu.staging is not None:
                self._gather_staged(buffers, gpu.staging, rows)
            else:
                self._gather_listed(buffers, rows)
        finally:
            gpu.filled.record()

    def _gather_staged(self, buffers: CudaPackedBuffers, staging: Buffers, rows: SelectedRows) -> None:
        assert isinstance(staging, _PinnedBuffers)
        super().gather(staging, rows)
        count = len(rows)
        buffers.reserve(count, staging.total)
        buffers.total, buffers.longest = staging.total, staging.longest
        torch.cuda.current_stream().wait_event(buffers.gpu.released)
        _copy(buffers.rows(count), staging.rows(count))

    def _gather_listed(self, buffers: CudaPackedBuffers, rows: SelectedRows) -> None:
        count, (spans, total, bad) = len(rows), self.measure(rows)
        starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(spans[1], out=starts[1:])
        num_pieces, pieces, more = self._pieces(rows, spans, starts)
        self.table.reader().check_gathered(bad + more)
        buffers.reserve(count, total, _LIST_BYTES)
        plans = buffers.packed_plans()
        kinds = plans.gather.kinds.numpy()
        classes = np.zeros((len(kinds) + 1, 4), dtype=np.int64)
        groups, tiles = (np.empty(n, dtype=np.int64) for n in count_lists(pieces, num_pieces, kinds, classes))
        ends = np.zeros(4, dtype=np.int64)
        list_lines(pieces, num_pieces, kinds, classes, groups, tiles, ends)
        buffers.reserve(count, total, packed_bytes(_layouts(tiles, groups, pieces)))
        buffers.total, buffers.longest = total, int(spans[1].max(initial=0))
        buffers.starts_array[: count + 1] = starts
        for place, values in zip(buffers.names, (rows.slots, rows.anchors, rows.generations), strict=True):
            place[:count] = values
        if rows.weights is not None and buffers.weights_array is not None:
            buffers.weights_array[:count] = rows.weights
        if rows.counts is not None and rows.numbers is not None and buffers.info_arrays is not None:
            buffers.info_arrays[0][:, :count] = rows.counts
            buffers.info_arrays[1][:, :count] = rows.numbers
        size = buffers.write_lists(tiles, groups, pieces)
        torch.cuda.current_stream().wait_event(buffers.gpu.released)
        there = buffers.copy_rows(size)
        end_16, end_4, end_1, end = ends.tolist()
        numbers = num_pieces, len(pieces) - num_pieces
        work = PackedWork(there[2], there[1], there[0], (end_16, end_4, end_1, end), numbers)
        self._launch_packed(plans, work, count, total)

    def _pieces(self, rows: SelectedRows, spans: Array, starts: Array) -> tuple[int, Array, int]:
        """Number of pieces of steps, all pieces, and number of invalid slots and blocks."""
        count = len(rows)
        most = int((spans[1] // self._block_steps + 2).sum()) + count
        pieces = np.empty((most, PIECE_WIDTH), dtype=np.int32)
        found, bad = list_pieces(
            rows.slots,
            spans,
            starts,
            self._extent,
            self._block_ids,
            self._block_steps,
            self.table.region.layout.num_blocks,
            self._adjoin,
            bool(self.once),
            pieces,
        )
        return found, pieces[: found + (count if self.once else 0)], bad

    def _launch_packed(self, plans: _Plans, work: PackedWork, count: int, total: int) -> None:
        from gear_loader.kernels import packed, split

        packed.gather_packed(plans.gather, work, programs=self.programs)
        if plans.split is not None:
            split.split(plans.split, total, programs=self.programs)
        if plans.steps is not None:
            plans.steps.convert(total)
        if plans.rows is not None:
            plans.rows.convert(count)


def _layouts(tiles: Array, groups: Array, pieces: Array) -> list[Layout]:
    """Shapes and dtypes of a batch's lists."""
    return [(tiles.shape, torch.int64), (groups.shape, torch.int64), (pieces.shape, torch.int32)]


def _copy(target: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Copy the tensors of a packed batch. Does not wait for the GPU if the source is pinned."""
    for key, value in source.items():
        if isinstance(value, dict):
            _copy(target[key], value)
        elif isinstance(value, torch.Tensor):
            target[key].copy_(value, non_blocking=True)
