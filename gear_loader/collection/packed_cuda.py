"""Packed batches on a GPU that reads host memory: the host lists pieces of rows, and one launch gathers them all.

A source is a table, or rows in staging memory: they come from a disk or from another node. Their steps lie one after
another, column by column, so one piece is a whole row, or a part of one::

    column  uint8 [total, step bytes], of a column per trajectory uint8 [n, bytes], from a multiple of 128 bytes on
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.buffers import GpuSide, SpanPart, TensorMemory, grown
from gear_loader.collection.movers import CudaMover
from gear_loader.collection.packed import PackedBuffers, PackedLayout
from gear_loader.collection.tier_rows import split_rows
from gear_loader.collection.windows import ROW_KEYS
from gear_loader.kernels.launching import copy
from gear_loader.kernels.packed_plan import (
    PACKED_BASE,
    PIECE_BLOCK,
    PIECE_FIRST,
    PIECE_NUMBER,
    PIECE_OUT,
    PIECE_STEPS,
    PIECE_WIDTH,
    TABLE_WIDTH,
    WORK_ROWS,
    WORK_STEPS,
    WORK_WIDTH,
    PackedColumn,
    PackedPlan,
)
from gear_loader.kernels.plan import LINE
from gear_loader.kernels.split_plan import SplitColumn, SplitPlan
from gear_loader.native.packed_lines import PLANNED_WIDTH, SOURCE_WIDTH, list_pieces, list_work, plan_rows
from gear_loader.storage.layout import round_up
from gear_loader.storage.queued import QueuedBatch, QueuedPacked
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.launch_graph import LaunchGraph
from gear_loader.utils.streams import current_stream

_LIST_BYTES = 1 << 12
"""Least memory for a batch's lists of pieces and lines."""


@dataclasses.dataclass(frozen=True)
class _PackedRows:
    """Rows of a batch in one piece of memory.

    Attributes:
        pieces: int32 [P, PIECE_WIDTH], see `gear_loader.kernels.packed_plan`.
        num_pieces: those of steps; the others are those of columns per trajectory.
        table: whose blocks they lie in; None for staging memory, where all are in block 0.
        first: of staging memory, its address, a multiple of 128. offsets: column -> first byte in it.
        host: whether the blocks are those of the table's host part.
    """

    pieces: Array
    num_pieces: int
    table: Table | None = None
    first: int = 0
    offsets: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host: bool = False


def _by_level(rows: _PackedRows) -> list[_PackedRows]:
    """Rows of a table, those of its host part apart; the others get the numbers of blocks on the GPU."""
    assert rows.table is not None
    layout = rows.table._engine.region.layout
    if not layout.host_blocks:
        return [rows]
    hosted = rows.pieces[:, PIECE_BLOCK] < layout.host_blocks
    parts = []
    for host in (False, True):
        chosen = hosted == host
        pieces = rows.pieces[chosen]
        if not host:
            pieces[:, PIECE_BLOCK] -= layout.host_blocks
        count = int(chosen[: rows.num_pieces].sum())
        parts.append(dataclasses.replace(rows, pieces=pieces, num_pieces=count, host=host))
    return parts


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


class PackedDeviceBuffers(PackedBuffers):
    """The tensors of one packed batch on a GPU.

    The work of a batch is that of two launches, whose headers come first: of records, which are split after it, and of
    all other columns.

    Attributes:
        sources: of the running batch's rows, as far as they are known. row_starts: its ``cu_seqlens``, int32 [n + 1].
        pieces: int32 [most, PIECE_WIDTH], scratch. window, planned: arguments of `plan_rows`.
        has_records, has_others: whether a batch in this memory had work of either launch.
    """

    gpu: GpuSide

    def __init__(self, layout: PackedLayout, memory: TensorMemory, mover: Any) -> None:
        super().__init__(layout, memory, mover, gpu=GpuSide())
        self.sources: list[_PackedRows] = []
        self.row_starts: Array = np.zeros(1, dtype=np.int32)
        self.pieces: Array = np.empty((0, PIECE_WIDTH), dtype=np.int32)
        self.window: Array = np.array([layout.offset, layout.length, layout.final], dtype=np.int64)
        self.planned: Array = np.zeros(PLANNED_WIDTH, dtype=np.int64)
        self.has_records = self.has_others = False
        self._queued: QueuedPacked | None = None

    def _replace(self, **made: Any) -> None:
        # What a batch in the memory before had was made for that memory.
        super()._replace(**made, has_records=False, has_others=False)

    def _made(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What was made for the present memory."""
        found = self.plans.get(name)
        if found is None:
            found = self.plans[name] = make()
            self.references = None  # it refers to the batch's memory
        return found

    @property
    def words(self) -> Array:
        """The memory of the work, on the host, int64 [words]."""
        found: Array = self._made("words", lambda: self.sides[0][self.lists_at :].view(torch.int64).numpy())
        return found

    def columns_of(self, source: _PackedRows) -> tuple[Array, bool]:
        """The columns of a source, int64 [C, TABLE_WIDTH], and whether they are records."""
        if source.table is not None:
            return self.table_columns(source.table, host=source.host)
        columns = self._outputs().table.numpy().copy()
        names = [name for name, _ in (*self.steps.gathered, *self.once.gathered)]
        columns[:, PACKED_BASE] = [source.first + source.offsets[name] for name in names]
        return columns, False

    def table_columns(self, table: Table, *, host: bool = False) -> tuple[Array, bool]:
        """`columns_of` a table, or of its `host` part."""
        name = (table, "host") if host else table
        found: tuple[Array, bool] = self._made(name, lambda: self._table_columns(table, host))
        return found

    def _table_columns(self, table: Table, host: bool) -> tuple[Array, bool]:
        region, layout, in_records = table._engine.region, table._engine.region.layout, False
        blocks_of = region.host_blocks if host else region.blocks
        columns = []
        for once, values in ((False, self.steps), (True, self.once)):
            for source, out in values.gathered:
                blocks = blocks_of(source)
                if not layout.columns[source].is_packed:
                    columns.append(PackedColumn(blocks, _flat(out), once))
                elif not in_records:  # the first column stands for the record
                    columns.append(PackedColumn(blocks, self._records(table)[0]))
                    in_records = True
        return PackedPlan(columns, self.position).table.numpy(), in_records

    def _outputs(self) -> PackedPlan:
        """All columns, as they are gathered one by one."""

        def make() -> PackedPlan:
            columns = [PackedColumn(None, _flat(out)) for _, out in self.steps.gathered]
            columns += [PackedColumn(None, _flat(out), once=True) for _, out in self.once.gathered]
            return PackedPlan(columns, self.position)

        found: PackedPlan = self._made("outputs", make)
        return found

    def _records(self, table: Table) -> tuple[torch.Tensor, SplitPlan, PackedPlan]:
        """Memory of gathered records, which are the same in all packed tables of a schema, uint8 [steps, bytes]; how
        they are split; and all that a launch with records writes."""
        layout = table._engine.region.layout
        assert layout.record is not None
        size = layout.record.bytes

        def make() -> tuple[torch.Tensor, SplitPlan, PackedPlan]:
            records = self.memory.empty(len(self.position), size, dtype=torch.uint8)
            columns = [
                SplitColumn(records[:, None], _flat(values)[:, None], 0, layout.columns[source].inside)
                for source, values in self.steps.gathered
                if layout.columns[source].is_packed
            ]
            outputs = PackedPlan([PackedColumn(None, records), *self._outputs().columns], self.position)
            return records, SplitPlan(columns), outputs

        found: tuple[torch.Tensor, SplitPlan, PackedPlan] = self._made("records", make)
        return found

    def list_sources(self, count: int) -> int:
        """Write the work of the batch's rows; return the words that it takes. If there are fewer, call it again."""
        parts: tuple[list[tuple[_PackedRows, Array]], ...] = ([], [])
        for source in self.sources:
            if len(source.pieces):
                columns, in_records = self.columns_of(source)
                parts[not in_records].append((source, columns))
        self.has_records |= bool(parts[0])
        self.has_others |= not parts[0] or bool(parts[1])
        end = 2 * WORK_WIDTH
        for header, some, has in ((0, parts[0], self.has_records), (WORK_WIDTH, parts[1], self.has_others)):
            if has:
                end = list_work(*_joined(some), self.total, count, self.words, header, end)
        return end

    def launches(self, programs: int | None) -> Callable[[], None]:
        """What queues the batch's work: its lists are copied, its rows gathered, split and converted. It is the same
        for all batches in this memory."""

        def make() -> Callable[[], None]:
            from gear_loader.kernels import packed, split

            host, mirror = self.sides
            work = mirror[self.lists_at :].view(torch.int64)
            heads = work, work[WORK_WIDTH:]
            head = heads[not self.has_records]
            steps, rows = head[WORK_STEPS : WORK_STEPS + 1], head[WORK_ROWS : WORK_ROWS + 1]
            outputs, records = self._outputs(), self.plans.get("records")
            records, then = records if self.has_records else None, self.has_others

            def queue() -> None:
                copy(mirror, host)
                if records is not None:
                    packed.gather_packed(records[2], heads[0], programs=programs)
                    split.split(records[1], steps, programs=programs)
                if then:
                    packed.gather_packed(outputs, heads[1], programs=programs)
                self.steps.convert(steps)
                self.once.convert(rows)

            return queue

        found: Callable[[], None] = self._made((self.has_records, self.has_others), make)
        return found

    # ---------------------------------------------------------------- queueing in one call

    def queued(self, stream: torch.cuda.Stream) -> QueuedBatch | None:
        """A batch of as many rows as the last one."""
        mover, gpu, queued = self.mover, self.gpu, self._queued
        graph, key, count, table = gpu.work.graph, gpu.work.key, self.spans.shape[1], mover.own
        if graph is None or table is None or gpu.parts or mover.follows or self.layout.informs:
            return None
        in_records = self.table_columns(table)[1]
        if key != (self.version, in_records, not in_records):
            return None
        if (
            queued is None
            or queued.graph is not graph
            or queued.pieces is not self.pieces
            or queued.count != count
        ):
            self._queued = queued = self._made_queued(graph, table, count, stream)
        queued.after(gpu.released.cuda_event)
        return queued

    def _made_queued(
        self, graph: LaunchGraph, table: Table, count: int, stream: torch.cuda.Stream
    ) -> QueuedPacked:
        columns, in_records = self.table_columns(table)
        return QueuedPacked(
            key=self.gpu.work.key,
            graph=graph,
            stream=stream.cuda_stream,
            filled=self.gpu.filled.cuda_event,
            wait=self.gpu.filled.synchronize,
            count=count,
            names=self.values.names,
            weights=self.values.weights,
            window=self.window,
            columns=columns,
            starts=self.starts_array,
            pieces=self.pieces,
            lists=self.words,
            planned=self.planned,
            header=0 if in_records else WORK_WIDTH,
            adjoin=self.mover.blocks_of(table)[2],
            most_steps=self.num_steps,
        )

    def was_queued(self) -> None:
        assert self._queued is not None
        self.spans = self._queued.spans
        self.total, self.longest = self.planned[:2].tolist()


class PackedCuda(CudaMover):
    """Fills packed batches by a GPU that reads the tables itself.

    Rows are drawn on the host, which so knows their lengths. What it writes for a batch crosses the bus in one copy.
    One launch gathers all rows, of tables, disks and other nodes; there is one more with one split if some lie in
    records of packed tables; and one conversion for each pair of dtypes. All of them are the same for each batch, and
    are replayed as a graph. The host waits where the memory grows.

    Args:
        layout, device, programs, tables: as for `CudaMover`.

    Attributes:
        own: the only table, whose rows all are; None if they may lie elsewhere.
    """

    layout: PackedLayout

    def __init__(
        self, layout: PackedLayout, *, splits: bool, bus_programs: int | None = None, **options: Any
    ) -> None:
        super().__init__(layout, **options)
        tables = options["tables"]
        self.own = tables[0] if len(tables) == 1 and layout.keys == ROW_KEYS else None
        self._steps, self._once = layout.columns_read
        self._tables: dict[Table, tuple[int, int, bool]] = {}

    def buffers(self, *, shared: Any = False) -> PackedDeviceBuffers:
        """Buffers for one batch, which get their memory at their first gather."""
        return PackedDeviceBuffers(self.layout, TensorMemory(self._device), self)

    def fill(self, buffers: PackedDeviceBuffers, table: Table, rows: Any) -> None:
        if not self._planned(buffers, table, rows):
            super().fill(buffers, table, rows)

    def _planned(self, buffers: PackedDeviceBuffers, table: Table, rows: Any) -> bool:
        """Fill buffers by one call that plans the batch; return whether all rows are in memory, and it has room."""
        count, engine = len(rows), table._engine
        if count > buffers.num_rows or buffers.num_steps < 0 or engine.moves:
            return False
        columns, in_records = buffers.table_columns(table)
        extent, block_ids = engine.reader().index_arrays()
        steps, blocks, adjoin = self.blocks_of(table)
        known, spans = rows.spans is not None, rows.spans
        spans = np.ascontiguousarray(spans) if known else np.empty((2, count), dtype=np.int64)
        slots, anchors = np.ascontiguousarray(rows.slots), np.ascontiguousarray(rows.anchors)
        header = 0 if in_records else WORK_WIDTH
        while True:
            plan_rows(
                slots, anchors, known, buffers.window, extent, block_ids, steps, blocks, adjoin, columns, spans,
                buffers.starts_array, buffers.pieces, buffers.words, header, buffers.planned,
            )  # fmt: skip
            total, longest, bad, pieces, words = buffers.planned.tolist()
            if pieces <= len(buffers.pieces):
                break
            buffers.pieces = np.empty((grown(pieces), PIECE_WIDTH), dtype=np.int32)
        if bad or total > buffers.num_steps or words == 0 or words > len(buffers.words):
            return False
        buffers.spans, buffers.total, buffers.longest = spans, total, longest
        buffers.has_records, buffers.has_others = in_records, not in_records
        self._queue(buffers, rows)
        return True

    def _queue(self, buffers: PackedDeviceBuffers, rows: Any) -> None:
        """Queue the work that the host has written."""
        buffers.values.write(rows)
        stream, key = current_stream(self._device), (buffers.version, buffers.has_records, buffers.has_others)
        stream.wait_event(buffers.gpu.released)
        buffers.gpu.work.run(key, buffers.launches(self._programs), stream)

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
            found[:] = _by_level(listed)
            return bad

        _, outside = split_rows(table, slots[which], inside, on_gpu=True)
        self.follow()  # trajectories may have come back from the disk since `run`
        if len(outside):
            part = self._read(buffers, table, rows, which[outside])
            self.place(buffers, part, np.arange(len(rows)))
        if len(outside) < len(which):  # else `found` is of an earlier look, or empty
            buffers.sources += found

    def _listed(
        self, buffers: PackedDeviceBuffers, table: Table, slots: Array, which: Array
    ) -> tuple[_PackedRows, int]:
        """Rows in memory, and the number of invalid slots and blocks."""
        count, (steps, blocks, adjoin) = len(which), self.blocks_of(table)
        spans = np.ascontiguousarray(buffers.spans[:, which])
        pieces: Array = np.empty((int((spans[1] // steps + 2).sum()) + count, PIECE_WIDTH), dtype=np.int32)
        found, bad = list_pieces(
            slots[which],
            spans,
            buffers.row_starts[which],
            *table._engine.reader().index_arrays(),
            steps,
            blocks,
            adjoin,
            bool(self._once),
            pieces,
        )
        pieces = pieces[: found + (count if self._once else 0)]
        pieces[found:, PIECE_OUT] = which[: len(pieces) - found]
        return _PackedRows(pieces, found, table), bad

    def blocks_of(self, table: Table) -> tuple[int, int, bool]:
        """Steps of a block, number of blocks, and whether a block's last step lies before the first of the next one, in
        every column."""
        if table not in self._tables:
            layout = table._engine.region.layout
            steps = layout.block_steps
            self._tables[table] = (
                steps,
                layout.num_blocks,
                all(
                    layout.columns[name].block_stride == steps * layout.columns[name].step_stride
                    for name in self._steps
                ),
            )
        return self._tables[table]

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
            table._engine.tier_reader().read(*names, firsts, counts, outs, drawn=np.ones_like(which))
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
        buffers.sources.append(_PackedRows(*pieces, first=part.memory.data_ptr(), offsets=part.offsets))

    def finish(self, buffers: PackedDeviceBuffers, rows: Any) -> None:
        count, total = len(rows), buffers.total
        buffers.reserve(count, total, _LIST_BYTES)
        while (words := buffers.list_sources(count)) > len(buffers.words):
            buffers.reserve(count, total, words * 8)
        buffers.write_starts()
        self._queue(buffers, rows)


def _joined(parts: Sequence[tuple[_PackedRows, Array]]) -> tuple[Array, Array, Array]:
    """Pieces, sources and columns of rows, as `list_work` takes them."""
    sources: Array = np.zeros((len(parts), SOURCE_WIDTH), dtype=np.int64)
    piece = column = 0
    for source, (rows, columns) in zip(sources, parts, strict=True):
        steps, ends = piece + rows.num_pieces, (piece + len(rows.pieces), column + len(columns))
        source[:] = piece, steps, steps, ends[0], column, ends[1]
        piece, column = ends
    pieces = [np.empty((0, PIECE_WIDTH), dtype=np.int32), *(rows.pieces for rows, _ in parts)]
    tables = [np.empty((0, TABLE_WIDTH), dtype=np.int64), *(columns for _, columns in parts)]
    return np.concatenate(pieces), sources, np.concatenate(tables)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """The bytes of values, uint8 [n, bytes of one]."""
    return values.view(len(values), -1).view(torch.uint8)
