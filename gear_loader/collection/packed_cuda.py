"""Packed batches for a GPU, which reads rows of different lengths out of tables and staging memory, without padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.collector import COUNTS, NUMBERS, Buffers, GpuSide
from gear_loader.collection.conversions import Casts, converted_dtype
from gear_loader.collection.n_step import NStep
from gear_loader.collection.packed import PackedBuffers, PackedCollector, grown
from gear_loader.collection.packed_sources import PackedSource, StagedPieces, TableSources, starts_of
from gear_loader.collection.windows import Whole
from gear_loader.kernels.cast_plan import CastColumn
from gear_loader.kernels.packed_plan import PackedColumn, PackedPlan, PackedWork
from gear_loader.kernels.plan import LINE
from gear_loader.kernels.split_plan import SplitColumn, SplitPlan
from gear_loader.native.packed_lines import count_lists, list_lines
from gear_loader.storage.schema import Window
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.packing import Layout, packed_bytes, packed_views
from gear_loader.utils.streams import current_stream

__all__ = ["CudaPackedBuffers", "CudaPackedCollector", "PackedRows"]

_LIST_BYTES = 1 << 12
"""Least memory for a batch's lists of pieces and lines."""


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The rows of a batch, for a GPU.

    Attributes:
        names: values of the collector's `row_keys`, int64 [n] each.
        spans: first step and number of steps of each row, int64 [2, n]. starts: ``cu_seqlens``, int32 [n + 1].
        sources: where they lie; those in memory that others read too may change when the gather has run.
        weights, counts, numbers: as of `SelectedRows`.
    """

    names: Sequence[Array]
    spans: Array
    starts: Array
    sources: Sequence[PackedSource]
    weights: Array | None = None
    counts: Array | None = None
    numbers: Array | None = None


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One launch of `gear_loader.kernels.packed`, with its lists on the host.

    Attributes:
        plan: of the columns that have pieces.
        in_records: whether it gathers the records of a packed table, which are split after it.
        own_table: whether the plan's table is one of the lists.
        tiles, groups, pieces, ends, num_pieces: as of `PackedWork`.
    """

    plan: PackedPlan
    in_records: bool
    own_table: bool
    tiles: Array
    groups: Array
    pieces: Array
    ends: tuple[int, int, int, int]
    num_pieces: tuple[int, int]

    @classmethod
    def of(cls, plan: PackedPlan, source: PackedSource, *, in_records: bool) -> _Launch:
        """List the lines of a source's pieces."""
        pieces, number, kinds = source.pieces, source.num_pieces, plan.kinds.numpy()
        classes = np.zeros((len(kinds) + 1, 4), dtype=np.int64)
        groups, tiles = (np.empty(n, dtype=np.int64) for n in count_lists(pieces, number, kinds, classes))
        ends = np.zeros(4, dtype=np.int64)
        list_lines(pieces, number, kinds, classes, groups, tiles, ends)
        end_16, end_4, end_1, end = ends.tolist()
        own_table = isinstance(source, StagedPieces)
        numbers = number, len(pieces) - number
        return cls(plan, in_records, own_table, tiles, groups, pieces, (end_16, end_4, end_1, end), numbers)

    @property
    def lists(self) -> list[Array]:
        """What is copied to the GPU for it."""
        table = [self.plan.table.numpy()] if self.own_table else []
        return [self.tiles, self.groups, self.pieces, *table]

    def run(self, lists: Sequence[torch.Tensor], programs: int | None) -> None:
        """Queue it, with `lists` on the GPU."""
        from gear_loader.kernels import packed

        tiles, groups, pieces, *table = lists
        if table:
            self.plan.device_table = table[0]
        work = PackedWork(pieces, groups, tiles, self.ends, self.num_pieces)
        packed.gather_packed(self.plan, work, programs=programs)


class CudaPackedBuffers(PackedBuffers):
    """The tensors of one packed batch on a GPU, as large as the largest one that they have held.

    One piece of pinned memory has what the host writes for a batch, and one of the GPU's is the copy of it::

        row_keys | cu_seqlens | weights, sample_info | of each launch: tiles, groups and pieces of `PackedWork`, and the
                                                       table of a plan that reads staging memory

    Args:
        collector: whose batches they hold.
        staging: a batch in pinned memory, gathered on the CPU; None if the GPU reads the tables itself.
    """

    def __init__(self, collector: PackedCollector, staging: PackedBuffers | None) -> None:
        super().__init__(collector, shared=False)
        self._device = collector.device
        # The first is blocking: a waiting thread sleeps instead of spinning.
        filled, released = torch.cuda.Event(blocking=True), torch.cuda.Event()
        self.gpu: GpuSide = GpuSide(None, None, None, staging, filled, released)
        self._staged = staging
        self._list_bytes = 0
        self._lists_at = 0
        self._host: torch.Tensor
        self._mirror: torch.Tensor
        self._once: list[tuple[str, torch.Tensor]]
        self._steps: list[tuple[str, torch.Tensor]]
        self._once_shown: dict[str, torch.Tensor]
        self._row_casts: list[CastColumn]
        self._step_casts: list[CastColumn]
        self.weights_array: Array | None
        self.info_arrays: tuple[Array, Array] | None
        # For the present memory, see `_no_plans`: plans of tables; records and their split; conversions.
        self._plans: dict[int, tuple[PackedPlan, bool]] = {}
        self._records: tuple[torch.Tensor, SplitPlan] | None = None
        self._casts: tuple[Casts | None, Casts | None] | None = None
        self._rooms: list[torch.Tensor] = []
        self._used_rooms = 0

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def reserve(self, num_rows: int, num_steps: int, list_bytes: int = 0) -> None:
        """Make room for a batch; what grows is allocated on the current stream, and holds no batch any longer."""
        super().reserve(num_rows, num_steps)
        if list_bytes > self._list_bytes:
            size = grown(list_bytes)
            self._replace(**self._new_names(self._num_rows, size, self._once_shown))

    def _replace(self, **made: Any) -> None:
        """See `PackedBuffers._replace`; without plans for columns that are replaced."""
        self.gpu.consumers.clear()  # the allocator does not know them as users of the new memory
        now = {**vars(self), **made}
        parts = {
            "steps": "steps_memory",
            "rows": "rows_memory",
            "info": "info_memory",
            "position": "position",
            "cu_seqlens": "starts",
        }
        batch = Batch({key: now[name] for key, name in parts.items() if name in now})
        columns = "_num_rows" in made or "_num_steps" in made
        super()._replace(batch=batch, **(self._no_plans() if columns else {}), **made)

    def _new_rows(self, count: int) -> dict[str, Any]:
        once, shown, casts = self._columns(self._collector.once, count)
        names = self._new_names(count, self._list_bytes, shown)
        return {**names, "_once": once, "_once_shown": shown, "_row_casts": casts}

    def _new_names(self, count: int, list_bytes: int, shown: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Memory of what the host writes for `count` rows, and for lists of so many bytes.

        Args:
            shown: the delivered columns per trajectory.
        """
        collector = self._collector
        keys = collector.row_keys
        parts: list[Layout] = [((len(keys), count), torch.int64), ((count + 1,), torch.int32)]
        if collector.weighs:
            parts.append(((count,), torch.float32))
        if collector.informs:
            parts += [((2, count), torch.int64), ((2, count), torch.float32)]
        lists_at = packed_bytes(parts)
        size = lists_at + list_bytes
        host_memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        mirror_memory = self._empty(size, dtype=torch.uint8)
        host, mirror = packed_views(host_memory, parts), packed_views(mirror_memory, parts)
        made: dict[str, Any] = {
            "_lists_at": lists_at,
            "_list_bytes": list_bytes,
            "_host": host_memory,
            "_mirror": mirror_memory,
            "names": host[0].numpy(),
            "starts_array": host[1].numpy(),
            "starts": mirror[1],
            "rows_memory": dict(zip(keys, mirror[0], strict=True)),
            "weights_array": None,
            "info_arrays": None,
            "info_memory": {},
        }
        if collector.weighs:
            made["weights_array"], made["rows_memory"]["priority_weight"] = host[2].numpy(), mirror[2]
        if collector.informs:
            made["info_arrays"] = host[-2].numpy(), host[-1].numpy()
            made["info_memory"] = dict(zip(COUNTS + NUMBERS, (*mirror[-2], *mirror[-1]), strict=True))
        made["rows_memory"].update(shown)
        return made

    def _new_steps(self, count: int) -> dict[str, Any]:
        steps, shown, casts = self._columns(self._collector.steps, count)
        position = self._empty(count, dtype=torch.int32)
        return {"_steps": steps, "steps_memory": shown, "_step_casts": casts, "position": position}

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

    # ---------------------------------------------------------------- staging memory

    def begin(self) -> None:
        """Let staging memory be used again: the GPU does not read it any more."""
        self._used_rooms = 0

    def room(self, size: int) -> torch.Tensor:
        """Pinned memory of this batch, uint8 [at least `size`], from a multiple of 128 bytes on."""
        number = self._used_rooms
        self._used_rooms += 1
        if number == len(self._rooms):
            self._rooms.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if len(self._rooms[number]) < size:
            size = grown(size)
            memory = torch.empty(size + LINE, dtype=torch.uint8, device="cpu", pin_memory=True)
            first = -memory.data_ptr() % LINE
            self._rooms[number] = memory[first : first + size]
        return self._rooms[number]

    def copy_staged(self, count: int) -> None:
        """Queue the copy of a batch of `count` rows that was gathered on the CPU."""
        staging = self._staged
        assert staging is not None
        self.reserve(count, staging.total)
        self.total, self.longest = staging.total, staging.longest
        current_stream(self._device).wait_event(self.gpu.released)
        _copy(self.rows(count), staging.rows(count))

    # ---------------------------------------------------------------- plans

    @staticmethod
    def _no_plans() -> dict[str, Any]:
        """Attributes without plans, each of which is made when it is needed."""
        return {"_plans": {}, "_records": None, "_casts": None}

    def _plan_of(self, source: PackedSource) -> tuple[PackedPlan, bool]:
        """The plan that gathers a source, and whether it gathers records. The plan of a table is made once for the
        present memory, and its first launch waits for the GPU."""
        if isinstance(source, StagedPieces):
            steps = self._steps if source.num_pieces else []
            once = self._once if len(source.pieces) > source.num_pieces else []
            columns = [PackedColumn(source.source(name), _flat(out)) for name, out in steps]
            columns += [PackedColumn(source.source(name), _flat(out), once=True) for name, out in once]
            return PackedPlan(columns, self.position), False
        if id(source.table) not in self._plans:
            self._plans[id(source.table)] = self._table_plan(source.table)
        return self._plans[id(source.table)]

    def _table_plan(self, table: Table) -> tuple[PackedPlan, bool]:
        region, layout, in_records = table._engine.region, table._engine.region.layout, False
        columns = []
        for source, values in self._steps:
            blocks = torch.from_numpy(region.blocks(source))
            if not layout.columns[source].is_packed:
                columns.append(PackedColumn(blocks, _flat(values)))
            elif not in_records:  # the first column stands for the record
                columns.append(PackedColumn(blocks, self._records_of(table)))
                in_records = True
        for source, values in self._once:
            blocks = torch.from_numpy(region.blocks(source))
            columns.append(PackedColumn(blocks, _flat(values), once=True))
        return PackedPlan(columns, self.position), in_records

    def _records_of(self, table: Table) -> torch.Tensor:
        """Memory of gathered records, which are the same in all packed tables of a schema; uint8 [steps, bytes]."""
        layout = table._engine.region.layout
        assert layout.record is not None
        if self._records is None:
            records = self._empty(len(self.position), layout.record.bytes, dtype=torch.uint8)
            columns = [
                SplitColumn(records[:, None], _flat(values)[:, None], 0, layout.columns[source].inside)
                for source, values in self._steps
                if layout.columns[source].is_packed
            ]
            self._records = records, SplitPlan(columns)
        return self._records[0]

    # ---------------------------------------------------------------- gathering

    def gather(self, rows: PackedRows, programs: int | None) -> None:
        """Queue a batch on the current stream. The host does not wait, unless the memory has to grow.

        What lies in records of packed tables is gathered first and split, for all steps of the batch; then all others
        are gathered into their places.
        """
        from gear_loader.kernels import split

        count, total = rows.spans.shape[1], int(rows.starts[-1])
        self.reserve(count, total, _LIST_BYTES)
        launches = []
        for source in rows.sources:
            if len(source.pieces):
                plan, in_records = self._plan_of(source)
                launches.append(_Launch.of(plan, source, in_records=in_records))
        launches.sort(key=lambda launch: not launch.in_records)
        lists = [each for launch in launches for each in launch.lists]
        self.reserve(count, total, packed_bytes(_layouts(lists)))
        self.total, self.longest = total, int(rows.spans[1].max(initial=0))
        self._write(rows)
        there = self._copy_over(lists)
        for i, launch in enumerate(launches):
            mine, there = there[: len(launch.lists)], there[len(launch.lists) :]
            launch.run(mine, programs)
            if launch.in_records and not (i + 1 < len(launches) and launches[i + 1].in_records):
                assert self._records is not None
                split.split(self._records[1], total, programs=programs)
        self._convert(count, total)

    def _write(self, rows: PackedRows) -> None:
        """Write what the host knows of the rows."""
        count = rows.spans.shape[1]
        self.starts_array[: count + 1] = rows.starts
        for place, values in zip(self.names, rows.names, strict=True):
            place[:count] = values
        if rows.weights is not None and self.weights_array is not None:
            self.weights_array[:count] = rows.weights
        if rows.counts is not None and rows.numbers is not None and self.info_arrays is not None:
            self.info_arrays[0][:, :count] = rows.counts
            self.info_arrays[1][:, :count] = rows.numbers

    def _copy_over(self, lists: Sequence[Array]) -> tuple[torch.Tensor, ...]:
        """Write lists behind the rows, and queue one copy of both; returns the lists on the GPU."""
        layouts = _layouts(lists)
        host = packed_views(self._host[self._lists_at :], layouts)
        for place, part in zip(host, lists, strict=True):
            place.numpy()[...] = part
        size = self._lists_at + packed_bytes(layouts)
        current_stream(self._device).wait_event(self.gpu.released)
        self._mirror[:size].copy_(self._host[:size], non_blocking=True)
        return packed_views(self._mirror[self._lists_at :], layouts)

    def _convert(self, count: int, total: int) -> None:
        """Queue the conversions of `count` rows and `total` steps."""
        if self._casts is None:
            steps, rows = (
                Casts(columns) if columns else None for columns in (self._step_casts, self._row_casts)
            )
            self._casts = steps, rows
        for casts, number in zip(self._casts, (total, count), strict=True):
            if casts is not None:
                casts.convert(number)


class CudaPackedCollector(PackedCollector):
    """Gathers packed batches of one table for a GPU, as `PackedCollector` does on the CPU.

    Rows are drawn on the host, which so knows their lengths. What it writes for a batch crosses the bus in one copy;
    one launch gathers all columns, one splits the records of a packed table, one for each pair of dtypes converts.
    Trajectories that lie on disk only are read into pinned memory, from which one more launch gathers them.
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
        self._lister = TableSources(table, *self.columns_read)

    def buffers(self, *, shared: bool = False) -> Buffers:
        """Buffers for one batch, which get their memory at their first gather."""
        staging = None if self.zero_copy else PackedBuffers(self, shared=False, pinned=True)
        return CudaPackedBuffers(self, staging)

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
            LostRowsError: trajectories on disk cannot be read. Nothing was launched.
        """
        assert isinstance(buffers, CudaPackedBuffers)
        assert isinstance(rows, SelectedRows)
        gpu = buffers.gpu
        gpu.filled.synchronize()  # see `Collector.gather`
        try:
            if gpu.staging is not None:
                super().gather(gpu.staging, rows)
                buffers.copy_staged(len(rows))
            else:
                self._gather_listed(buffers, rows)
        finally:
            gpu.filled.record()

    def _gather_listed(self, buffers: CudaPackedBuffers, rows: SelectedRows) -> None:
        buffers.begin()
        spans, _, bad = self.measure(rows)
        self.table._engine.reader().check_gathered(bad)
        starts, which = starts_of(spans), np.arange(len(rows))
        sources = self._lister.list(rows.slots, rows.generations, spans, starts, which, buffers.room)
        names = rows.slots, rows.anchors, rows.generations
        more = rows.weights, rows.counts, rows.numbers
        buffers.gather(PackedRows(names, spans, starts, sources, *more), self.programs)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """The bytes of values, uint8 [n, bytes of one]."""
    return values.view(len(values), -1).view(torch.uint8)


def _layouts(lists: Sequence[Array]) -> list[Layout]:
    """Shapes and dtypes of a batch's lists."""
    return [(part.shape, torch.from_numpy(part).dtype) for part in lists]


def _copy(target: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Copy the tensors of a packed batch. Does not wait for the GPU if the source is pinned."""
    for key, value in source.items():
        if isinstance(value, dict):
            _copy(target[key], value)
        elif isinstance(value, torch.Tensor):
            target[key].copy_(value, non_blocking=True)
