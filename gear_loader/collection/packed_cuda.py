"""Packed batches on a GPU that reads host memory: the host lists pieces of rows, and one launch a source gathers them.

A source is a table, or rows in staging memory: they come from a disk or from another node. Their steps lie one after
another, column by column, so one piece is a whole row, or a part of one::

    column  uint8 [total, step bytes], of a column per trajectory uint8 [n, bytes], from a multiple of 128 bytes on
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.buffers import GpuSide, SpanPart, TensorMemory
from gear_loader.collection.movers import CudaMover
from gear_loader.collection.packed import PackedBuffers, PackedLayout
from gear_loader.collection.tier_rows import split_rows
from gear_loader.kernels.packed_plan import (
    PIECE_BLOCK,
    PIECE_FIRST,
    PIECE_NUMBER,
    PIECE_OUT,
    PIECE_STEPS,
    PIECE_WIDTH,
    PackedColumn,
    PackedPlan,
    PackedWork,
)
from gear_loader.kernels.plan import LINE
from gear_loader.kernels.split_plan import SplitColumn, SplitPlan
from gear_loader.native.packed_lines import count_lists, list_lines, list_pieces
from gear_loader.storage.layout import round_up
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.packing import Layout, packed_bytes, packed_views
from gear_loader.utils.streams import current_stream

_LIST_BYTES = 1 << 12
"""Least memory for a batch's lists of pieces and lines."""


@dataclasses.dataclass(frozen=True)
class _PackedRows:
    """Rows of a batch that one launch gathers.

    Attributes:
        pieces: int32 [P, PIECE_WIDTH], see `gear_loader.kernels.packed_plan`.
        num_pieces: those of steps; the others are those of columns per trajectory.
        table: whose blocks they lie in; None for staging memory, where all are in block 0.
        memory: staging memory, uint8, from a multiple of 128 bytes on. offsets: column -> first byte in it.
    """

    pieces: Array
    num_pieces: int
    table: Table | None = None
    memory: torch.Tensor | None = None
    offsets: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def blocks(self, column: str) -> torch.Tensor:
        """The values of a column and what follows them in staging memory, as one block, uint8 [1, bytes]."""
        assert self.memory is not None
        first = self.offsets[column]
        return self.memory[None, first : len(self.memory) - (len(self.memory) - first) % LINE]


def staged_pieces(
    begins: Array, counts: Array, outs: Array, numbers: Array, once: tuple[Array, Array] | None
) -> tuple[Array, int]:
    """The pieces of staged rows, int32 [P, PIECE_WIDTH], and the number of those of steps.

    Args:
        begins, counts: first step in the memory, and steps, int64 [n]. outs: place of the first step in the batch.
        numbers: number of the first step in its trajectory.
        once: rows of the memory and of the batch that have the values of columns per trajectory, int64 [m] each; None
            if there are no such columns.
    """
    some = np.flatnonzero(counts)
    more = 0 if once is None else len(once[0])
    pieces: Array = np.zeros((len(some) + more, PIECE_WIDTH), dtype=np.int32)
    steps, rows = pieces[: len(some)], pieces[len(some) :]
    steps[:, PIECE_FIRST], steps[:, PIECE_STEPS] = begins[some], counts[some]
    steps[:, PIECE_OUT], steps[:, PIECE_NUMBER] = outs[some], numbers[some]
    if once is not None:
        rows[:, PIECE_FIRST], rows[:, PIECE_STEPS], rows[:, PIECE_OUT] = once[0], 1, once[1]
    assert PIECE_BLOCK == 0
    return pieces, len(some)


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
    def of(cls, plan: PackedPlan, source: _PackedRows, *, in_records: bool) -> _Launch:
        """List the lines of a source's pieces."""
        pieces, number, kinds = source.pieces, source.num_pieces, plan.kinds.numpy()
        classes = np.zeros((len(kinds) + 1, 4), dtype=np.int64)
        groups, tiles = (np.empty(n, dtype=np.int64) for n in count_lists(pieces, number, kinds, classes))
        ends = np.zeros(4, dtype=np.int64)
        list_lines(pieces, number, kinds, classes, groups, tiles, ends)
        end_16, end_4, end_1, end = ends.tolist()
        numbers = number, len(pieces) - number
        own_table = source.table is None
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


class PackedDeviceBuffers(PackedBuffers):
    """The tensors of one packed batch on a GPU.

    Attributes:
        sources: of the running batch's rows, as far as they are known. row_starts: its ``cu_seqlens``, int32 [n + 1].
    """

    gpu: GpuSide

    def __init__(self, layout: PackedLayout, memory: TensorMemory, mover: Any) -> None:
        super().__init__(layout, memory, mover, gpu=GpuSide())
        self.sources: list[_PackedRows] = []
        self.row_starts: Array = np.zeros(1, dtype=np.int32)

    def plan_of(self, source: _PackedRows) -> tuple[PackedPlan, bool]:
        """The plan that gathers a source, and whether it gathers records. The plan of a table is made once for the
        present memory, and its first launch waits for the GPU."""
        if source.table is None:
            steps = self.steps.gathered if source.num_pieces else []
            once = self.once.gathered if len(source.pieces) > source.num_pieces else []
            columns = [PackedColumn(source.blocks(name), _flat(out)) for name, out in steps]
            columns += [PackedColumn(source.blocks(name), _flat(out), once=True) for name, out in once]
            return PackedPlan(columns, self.position), False
        if id(source.table) not in self.plans:
            self.plans[id(source.table)] = self._table_plan(source.table)
            self.references = None  # the plan refers to the batch's memory
        found: tuple[PackedPlan, bool] = self.plans[id(source.table)]
        return found

    def _table_plan(self, table: Table) -> tuple[PackedPlan, bool]:
        region, layout, in_records = table._engine.region, table._engine.region.layout, False
        columns = []
        for source, values in self.steps.gathered:
            blocks = torch.from_numpy(region.blocks(source))
            if not layout.columns[source].is_packed:
                columns.append(PackedColumn(blocks, _flat(values)))
            elif not in_records:  # the first column stands for the record
                columns.append(PackedColumn(blocks, self._records_of(table)))
                in_records = True
        for source, values in self.once.gathered:
            blocks = torch.from_numpy(region.blocks(source))
            columns.append(PackedColumn(blocks, _flat(values), once=True))
        return PackedPlan(columns, self.position), in_records

    def _records_of(self, table: Table) -> torch.Tensor:
        """Memory of gathered records, which are the same in all packed tables of a schema; uint8 [steps, bytes]."""
        layout = table._engine.region.layout
        assert layout.record is not None
        if "records" not in self.plans:
            records = self.memory.empty(len(self.position), layout.record.bytes, dtype=torch.uint8)
            columns = [
                SplitColumn(records[:, None], _flat(values)[:, None], 0, layout.columns[source].inside)
                for source, values in self.steps.gathered
                if layout.columns[source].is_packed
            ]
            self.plans["records"] = records, SplitPlan(columns)
        found: torch.Tensor = self.plans["records"][0]
        return found

    def copy_over(self, lists: Sequence[Array]) -> tuple[torch.Tensor, ...]:
        """Write lists behind the rows, and queue one copy of both; returns the lists on the GPU."""
        layouts = _layouts(lists)
        host, mirror = self.sides
        for place, part in zip(packed_views(host[self.lists_at :], layouts), lists, strict=True):
            place.numpy()[...] = part
        size = self.lists_at + packed_bytes(layouts)
        current_stream(mirror.device).wait_event(self.gpu.released)
        mirror[:size].copy_(host[:size], non_blocking=True)
        return packed_views(mirror[self.lists_at :], layouts)


class PackedCuda(CudaMover):
    """Fills packed batches by a GPU that reads the tables itself.

    Rows are drawn on the host, which so knows their lengths. What it writes for a batch crosses the bus in one copy.
    There is one launch for each table, for the rows on disk of each, and for each answer of another node; one split of
    all records of packed tables; and one conversion for each pair of dtypes. The host waits where the memory grows.

    Args:
        layout, device, programs: as for `CudaMover`.
    """

    layout: PackedLayout

    def __init__(self, layout: PackedLayout, *, device: torch.device, programs: int | None, **_: Any) -> None:
        super().__init__(layout, device=device, programs=programs)
        self._steps, self._once = layout.columns_read
        self._adjoins: dict[int, bool] = {}

    def buffers(self, *, shared: bool = False) -> PackedDeviceBuffers:
        """Buffers for one batch, which get their memory at their first gather."""
        return PackedDeviceBuffers(self.layout, TensorMemory(self._device), self)

    def begin(self, buffers: PackedDeviceBuffers, rows: Any) -> None:
        buffers.measured(rows.spans)
        buffers.sources = []
        buffers.row_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(rows.spans[1], out=buffers.row_starts[1:])

    def copy(self, buffers: PackedDeviceBuffers, table: Table, rows: Any, which: Array | None = None) -> None:
        which = np.arange(len(rows)) if which is None else which
        slots, found = rows.slots, list[_PackedRows]()

        def inside(part: slice | Array) -> int:
            listed, bad = self._listed(buffers, table, slots, which[part])
            found[:] = [listed]
            return bad

        _, outside = split_rows(table, slots[which], inside)
        if len(outside):
            part = self._read(buffers, table, rows, which[outside])
            self.place(buffers, part, np.arange(len(rows)))
        if len(outside) < len(which):  # else `found` is of an earlier look, or empty
            buffers.sources += found

    def _listed(
        self, buffers: PackedDeviceBuffers, table: Table, slots: Array, which: Array
    ) -> tuple[_PackedRows, int]:
        """Rows in memory, and the number of invalid slots and blocks."""
        layout, count = table._engine.region.layout, len(which)
        spans, steps = np.ascontiguousarray(buffers.spans[:, which]), layout.block_steps
        pieces: Array = np.empty((int((spans[1] // steps + 2).sum()) + count, PIECE_WIDTH), dtype=np.int32)
        if id(table) not in self._adjoins:
            # Whether a block's last step lies before the first of the next one, in every column.
            self._adjoins[id(table)] = all(
                table._engine.region.blocks(name).strides[0] == steps * layout.columns[name].step_stride
                for name in self._steps
            )
        found, bad = list_pieces(
            slots[which],
            spans,
            buffers.row_starts[which],
            *table._engine.reader().index_arrays(),
            steps,
            layout.num_blocks,
            self._adjoins[id(table)],
            bool(self._once),
            pieces,
        )
        pieces = pieces[: found + (count if self._once else 0)]
        pieces[found:, PIECE_OUT] = which[: len(pieces) - found]
        return _PackedRows(pieces, found, table), bad

    def _read(self, buffers: PackedDeviceBuffers, table: Table, rows: Any, which: Array) -> SpanPart:
        """Read rows that lie on disk only into staging memory."""
        firsts, counts = buffers.spans[:, which]
        begins, total, schema = np.cumsum(counts) - counts, int(counts.sum()), self.layout.schema
        offsets, places, end = {}, {}, 0
        for name in (*self._steps, *self._once):
            size, once = schema[name].step_bytes, schema[name].trajectory
            offsets[name], places[name] = end, (np.arange(len(which)) if once else begins) * size
            end += round_up((len(which) if once else total) * size, LINE)
        memory = self.staging.take(end)
        outs = {name: (memory.numpy(), offsets[name] + places[name]) for name in offsets}
        try:
            names = rows.slots[which], rows.generations[which]
            table._engine.tier_reader().read(*names, firsts, counts, outs, drawn=len(which))
        except BaseException:
            self.staging.give(memory)
            raise
        return SpanPart(which, memory, firsts, counts, np.zeros_like(firsts), offsets)

    def place(self, buffers: PackedDeviceBuffers, part: SpanPart, numbers: Array) -> None:
        buffers.gpu.parts.append(part.memory)
        which, rows, begins = part.placed(numbers)
        firsts, counts, inside = part.firsts[which], part.counts[which], part.inside[which]
        once = None
        if self._once:
            whole = np.flatnonzero(inside == 0)
            once = which[whole], rows[whole]
        outs = buffers.row_starts[rows] + inside
        pieces = staged_pieces(begins, counts, outs, firsts, once)
        buffers.sources.append(_PackedRows(*pieces, memory=part.memory, offsets=part.offsets))

    def finish(self, buffers: PackedDeviceBuffers, rows: Any) -> None:
        # What lies in records of packed tables is gathered first and split, for all steps of the batch; then all others
        # are gathered into their places.
        from gear_loader.kernels import split

        count, total, programs = len(rows), buffers.total, self._programs
        buffers.reserve(count, total, _LIST_BYTES)
        launches = []
        for source in buffers.sources:
            if len(source.pieces):
                plan, in_records = buffers.plan_of(source)
                launches.append(_Launch.of(plan, source, in_records=in_records))
        launches.sort(key=lambda launch: not launch.in_records)
        lists = [each for launch in launches for each in launch.lists]
        buffers.reserve(count, total, packed_bytes(_layouts(lists)))
        buffers.values.write(rows)
        buffers.write_starts()
        there = buffers.copy_over(lists)
        for i, launch in enumerate(launches):
            mine, there = there[: len(launch.lists)], there[len(launch.lists) :]
            launch.run(mine, programs)
            if launch.in_records and not (i + 1 < len(launches) and launches[i + 1].in_records):
                split.split(buffers.plans["records"][1], total, programs=programs)
        buffers.steps.convert(total)
        buffers.once.convert(count)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """The bytes of values, uint8 [n, bytes of one]."""
    return values.view(len(values), -1).view(torch.uint8)


def _layouts(lists: Sequence[Array]) -> list[Layout]:
    """Shapes and dtypes of a batch's lists."""
    return [(part.shape, torch.from_numpy(part).dtype) for part in lists]
