"""Packed batches: the steps of rows of different lengths one after another, without padding; their memory, and how the
CPU fills it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.buffers import (
    Buffers,
    GpuSide,
    RowValues,
    SpanPart,
    TensorMemory,
    grown,
    named_views,
    shown_values,
)
from gear_loader.collection.conversions import Casts, converted_dtype
from gear_loader.collection.movers import HostMover
from gear_loader.collection.plans import locate_columns
from gear_loader.collection.ragged_values import RaggedBatch, only_records
from gear_loader.collection.references import BatchReferences
from gear_loader.collection.sources import Place, read_packed
from gear_loader.collection.tier_rows import split_rows
from gear_loader.collection.tree_rows import TREE_KEYS
from gear_loader.collection.windows import (
    FINAL_KEY,
    ROW_KEYS,
    expand,
    in_schema_order,
    packed_span,
    ragged_of,
    reads_final,
    source_of,
)
from gear_loader.errors import SchemaError
from gear_loader.kernels.cast_plan import CastColumn
from gear_loader.kernels.plan import OUT, WIDTH
from gear_loader.native import threads
from gear_loader.native.gathering import STREAM_BATCH_BYTES
from gear_loader.native.packed import measure, place_packed, place_rows, summed
from gear_loader.storage.inline import INLINE_BATCH_BYTES, PackedInline
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.packing import Layout, packed_bytes


class PackedLayout:
    """What packed batches are made of.

    Args:
        schema: of the tables. windows: name in the batch -> window; those of steps are all the same.
        keys, weighs, informs: as for `PaddedLayout`. tree: whether steps that rows share are segments of their own.

    Attributes:
        windows: in the order of the schema. ragged: those that read ragged columns, of which records are gathered.
        offset, length: of the windows of steps.
        steps, once: name in the batch -> column that it reads, of columns of steps and per trajectory.
        step_bytes: of a step, as they are stored. final: whether final steps are among those of rows.

    Raises:
        SchemaError: windows that differ.
    """

    packed = True

    def __init__(
        self,
        schema: Schema,
        windows: Mapping[str, Any],
        *,
        keys: tuple[str, ...] = ROW_KEYS,
        weighs: bool = False,
        informs: bool = False,
        tree: bool = False,
        **_: Any,
    ) -> None:
        self.schema, self.weighs, self.informs, self.tree = schema, weighs, informs, tree
        self.keys = (*keys, *TREE_KEYS) if tree else keys
        if tree and (taken := sorted(set(windows) & set(TREE_KEYS))):
            raise SchemaError(
                f"A window has the name {taken[0]!r}, which is a key of batches with layout='tree'. Give it another "
                f"one: windows={{'other_name': Whole(column={taken[0]!r})}}."
            )
        self.offset, self.length = packed_span(schema, windows)
        self.final = reads_final(windows)
        self.windows = in_schema_order(schema, expand(schema, windows)[0])
        self.shown = self.windows
        self.ragged = ragged_of(schema, self.windows)
        sources = {name: schema[source_of(name, window)] for name, window in self.windows.items()}
        named = {name: source_of(name, window) for name, window in self.windows.items()}
        self.steps = {name: named[name] for name, column in sources.items() if not column.trajectory}
        self.once = {name: named[name] for name, column in sources.items() if column.trajectory}
        self.step_bytes = sum(schema[name].step_bytes for name in self.steps.values())

    def column_of(self, name: str) -> Column:
        """The column that a window reads."""
        return self.schema[source_of(name, self.windows[name])]

    @property
    def columns_read(self) -> tuple[list[str], list[str]]:
        """The columns of steps, and per trajectory, that windows read."""
        return sorted(set(self.steps.values())), sorted(set(self.once.values()))

    def measure(self, table: Table, rows: Any) -> Array:
        """The first steps and numbers of steps of rows of a table, int64 [2, n].

        Raises:
            CorruptTableError: the index names no slot.
        """
        spans = np.empty((2, len(rows)), dtype=np.int64)
        extent = table._engine.reader().index_arrays()[0]
        bad = measure(rows.slots, rows.anchors, extent, self.offset, self.length, self.final, spans)
        table._engine.reader().check_gathered(bad)
        return spans


class PackedValues:
    """Memory of some values of a batch, as they are gathered and as they are delivered.

    Args:
        layout: of the batch. names: name -> column that it reads. count: most values. memory: allocates it.
        given: memory of some windows, name -> tensor.
        converts: whether windows of another dtype are converted here; False for copies of batches that are.

    Attributes:
        gathered: (column, tensor) of what is gathered. Windows of one column that are converted share it.
        shown: name -> tensor of what is delivered.
    """

    def __init__(
        self,
        layout: PackedLayout,
        names: Mapping[str, str],
        count: int,
        memory: TensorMemory,
        given: Mapping[str, torch.Tensor],
        *,
        converts: bool,
    ) -> None:
        self.gathered: list[tuple[str, torch.Tensor]] = []
        self.shown: dict[str, torch.Tensor] = {}
        casts: list[CastColumn] = []
        first: dict[str, torch.Tensor] = {}
        kinds = {name: converted_dtype(name, layout.windows[name], layout.column_of(name)) for name in names}
        for name in sorted(names, key=lambda name: kinds[name] is not None):
            source, column = names[name], layout.column_of(name)
            dtype = kinds[name] or column.dtype
            shown = given.get(name)
            if shown is None:
                shown = memory.empty(count, *column.shape, dtype=dtype)
            self.shown[name] = shown
            if not converts:
                continue
            if kinds[name] is None:
                self.gathered.append((source, shown))
                first.setdefault(source, shown)
                continue
            if source not in first:
                first[source] = memory.empty(count, *column.shape, dtype=column.dtype)
                self.gathered.append((source, first[source]))
            casts.append(CastColumn(first[source], shown, layout.windows[name].scale))
        self._columns, self._device = casts, memory.device
        self._casts: Casts | None = None

    def convert(self, count: int | torch.Tensor) -> None:
        """Convert the first `count` values where windows have another dtype. Does not wait for a GPU, where `count`
        may be int64 [1]."""
        if not self._columns:
            return
        if self._casts is None:
            self._casts = Casts(self._columns, self._device)
        self._casts.convert(count)


class PackedBuffers(Buffers):
    """The tensors of one packed batch, as large as the largest one that they have held.

    ::

        steps   [capacity, *shape]   row 0 | row 1 ... | row n - 1 | unused
        starts  cu_seqlens           0     cu[1]   ... cu[n - 1]   cu[n]

    On a GPU one piece of pinned memory has what the host writes for a batch, and one of the GPU's is the copy of it::

        names | cu_seqlens | weights, counts, numbers | lists: of the kernels

    Args:
        layout: of the batch. memory: allocates the tensors; those in shared memory are just as large as a batch needs.
        mover: what fills them. gpu: see `Buffers`.
        given: memory of some windows, name -> tensor, as large as the only batch that they will hold.
        converts: as for `PackedValues`.

    Attributes:
        segments, leaders: of the running batch, behind its rows, and of its groups; see `tree_rows`.
        version: how often memory was replaced.
        total, longest: steps of the batch that was gathered last, and of its longest row.
        spans: of the rows of the running batch, int64 [2, n].
        steps, once: memory of columns of steps, and per trajectory. values: of the rows.
        starts_array: ``cu_seqlens``, which the host writes; starts: the tensor of the batch.
    """

    def __init__(
        self,
        layout: PackedLayout,
        memory: TensorMemory,
        mover: Any,
        *,
        gpu: GpuSide | None = None,
        given: Mapping[str, torch.Tensor] | None = None,
        converts: bool = True,
    ) -> None:
        self.layout, self.memory, self.mover, self.gpu, self.batch = layout, memory, mover, gpu, Batch()
        self._given, self._converts = given or {}, converts
        self._exact = memory.shared is True or given is not None
        self.num_rows = self.num_steps = -1  # capacity
        self.list_bytes = self.lists_at = self.version = 0
        self.total, self.longest, self.segments = 0, 0, 0
        self.spans: Array = np.empty((2, 0), dtype=np.int64)
        self.leaders: Array | None = None
        self.plans: dict[Any, Any] = {}  # for the present memory
        # Set by `_replace`.
        self.steps: PackedValues
        self.once: PackedValues
        self.values: RowValues
        self.starts: torch.Tensor
        self.starts_array: Array
        self.position: torch.Tensor
        self.sides: tuple[torch.Tensor, torch.Tensor]
        self._shown_rows: dict[str, Any]

    def reserve(self, num_rows: int, num_steps: int, list_bytes: int = 0) -> None:
        """Make room for a batch; the tensors hold no batch any longer if they grow.

        On a GPU what grows is allocated on the current stream. After a failure or an interruption, rows and steps each
        have their old memory and size, or all of the new ones.
        """
        if num_rows > self.num_rows:
            count = num_rows if self._exact else grown(num_rows)
            once = self._new_values(self.layout.once, count)
            self._replace(num_rows=count, once=once, **self._new_rows(count, self.list_bytes))
        if num_steps > self.num_steps:
            count = num_steps if self._exact else grown(num_steps)
            position = self.memory.empty(count, dtype=torch.int32)
            steps = self._new_values(self.layout.steps, count)
            self._replace(num_steps=count, steps=steps, position=position)
        if list_bytes > self.list_bytes:
            self._replace(**self._new_rows(self.num_rows, grown(list_bytes)))

    def _replace(self, **made: Any) -> None:
        """Put new memory in place: attributes that belong together, with its size, in one step."""
        if self.gpu is not None:
            self.gpu.consumers.clear()  # the allocator does not know them as users of the new memory
        now = {**vars(self), **made}
        batch = Batch()
        if "steps" in now:
            batch.update({**now["steps"].shown, "position": now["position"]})
        if "once" in now:
            batch.update({**now["once"].shown, **now["_shown_rows"], "cu_seqlens": now["starts"]})
        now = {"plans": {}, "references": None, "inline": None, "version": self.version + 1}
        self.__dict__.update(made, batch=batch, **now)

    def _new_values(self, names: Mapping[str, str], count: int) -> PackedValues:
        return PackedValues(self.layout, names, count, self.memory, self._given, converts=self._converts)

    def _new_rows(self, count: int, list_bytes: int) -> dict[str, Any]:
        """Memory of what the host writes for `count` rows, and for lists of so many bytes, as attributes."""
        layout = self.layout
        parts: dict[str, Layout] = {
            "names": ((len(layout.keys), count), torch.int64),
            "starts": ((count + 1,), torch.int32),
            **RowValues.layouts(count, weighs=layout.weighs, informs=layout.informs),
        }
        made: dict[str, Any] = {"list_bytes": list_bytes}
        if self.gpu is None:
            host = shown = {
                name: self.memory.empty(*shape, dtype=dtype) for name, (shape, dtype) in parts.items()
            }
        else:
            lists_at = packed_bytes(list(parts.values()))
            sides = self.memory.mirrored(lists_at + list_bytes)
            host, shown = (named_views(side, parts) for side in sides)
            made.update(sides=sides, lists_at=lists_at)
        rows = shown_values(layout.keys, shown["names"], shown)
        if layout.final:
            rows[FINAL_KEY] = self.memory.empty(count, dtype=torch.bool)
        values = RowValues.of(host["names"].numpy(), host)
        return {
            **made,
            "values": values,
            "starts": shown["starts"],
            "starts_array": host["starts"].numpy(),
            "_shown_rows": rows,
        }

    def tables(self, table: Table) -> tuple[Array, Array]:
        """How the CPU's loop copies columns of steps, and per trajectory, of a table, int64 [C, WIDTH] each."""
        if table not in self.plans:
            self.plans[table] = tuple(_located(values.gathered, table) for values in (self.steps, self.once))
        found: tuple[Array, Array] = self.plans[table]
        return found

    def lend(self, count: int) -> Batch:
        if self.references is None:
            self.references = BatchReferences(self.batch)
        return self._rows(count, self.ragged)

    def rows(self, count: int) -> Batch:
        return self._rows(count, {})

    def _rows(self, count: int, ragged: Mapping[str, Any]) -> Batch:
        """`rows`, with these values in place of their records."""
        batch = Batch()
        for name in self.layout.windows:
            batch[name] = ragged[name] if name in ragged else self._window(name, count)
        room, segments = self.num_rows, count + self.segments
        batch["cu_seqlens"] = _first(self.starts, segments + 1, room + 1)
        batch["max_seqlen"] = self.longest
        batch["position"] = _first(self.position, self.total, self.num_steps)
        for name, value in self._shown_rows.items():
            if isinstance(value, dict):
                batch[name] = {key: _first(part, count, room) for key, part in value.items()}
            else:
                batch[name] = _first(value, count, room)
        return batch

    def _window(self, name: str, count: int) -> torch.Tensor:
        shown, size = (self.steps, self.total) if name in self.layout.steps else (self.once, count)
        return shown.shown[name].narrow(0, 0, size)

    def some(self, count: int, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        return {name: self._window(name, count) for name in names}

    def measured(self, spans: Array) -> None:
        """Take the spans of the running batch's rows, int64 [2, n].

        Raises:
            SchemaError: the batch would have 2**31 steps or more.
        """
        # Chosen columns of an array may lie in another order, for which numba would compile the loops again.
        spans = np.ascontiguousarray(spans)
        total, longest = summed(spans)
        if total >= 2**31:
            raise SchemaError(
                f"A packed batch would have {total:,} steps, more than its cu_seqlens (int32) count; expected less "
                "than 2**31. Use a smaller batch_size, or max_steps."
            )
        self.spans, self.total, self.longest = spans, total, longest

    def write_starts(self) -> None:
        """Write where each row of the running batch begins."""
        place_rows(self.spans, self.starts_array)

    def compute(self, count: int) -> None:
        """Take what a compiled call has found out about the batch that it has gathered; see `Buffers`."""
        inline = self.inline
        assert isinstance(inline, PackedInline)
        self.segments, self.spans, (self.total, self.longest) = 0, inline.windows, inline.sizes.tolist()
        self.values.names[:, :count] = inline.names
        self.once.convert(count)
        self.steps.convert(self.total)

    def follow(self, staged: PackedBuffers, count: int) -> None:
        self.segments = staged.segments
        self.reserve(count + self.segments, staged.total)
        self.total, self.longest = staged.total, staged.longest


def _located(gathered: list[tuple[str, torch.Tensor]], table: Table) -> Array:
    columns: Array = np.zeros((len(gathered), WIDTH), dtype=np.int64)
    columns[:, OUT] = [values.data_ptr() for _, values in gathered]
    return locate_columns(columns, [source for source, _ in gathered], table._engine.region)


class PackedHost(HostMover):
    """Fills packed batches by the CPU's loop."""

    layout: PackedLayout

    def buffers(self, *, shared: Any = False) -> PackedBuffers:
        """Buffers for one batch, which get their memory at their first gather."""
        return PackedBuffers(self.layout, TensorMemory(torch.device("cpu"), shared, self.pinned), self)

    def begin(self, buffers: PackedBuffers, rows: Any) -> None:
        buffers.measured(rows.spans)
        buffers.reserve(len(rows), buffers.total)
        buffers.write_starts()

    def copy(self, buffers: PackedBuffers, table: Table, rows: Any, which: Array | None = None) -> None:
        which = np.arange(len(rows)) if which is None else which
        extent, block_ids = table._engine.reader().index_arrays()
        slots, steps = rows.slots, table._engine.region.layout.block_steps
        streams = buffers.total * self.layout.step_bytes >= STREAM_BATCH_BYTES
        tables, size = buffers.tables(table), buffers.total * self.layout.step_bytes
        spans, starts, position = buffers.spans, buffers.starts_array, buffers.position.numpy()

        def inside(part: slice | Array) -> int:
            return threads.gather_packed(
                *tables,
                slots,
                spans,
                starts,
                extent,
                block_ids,
                steps,
                position,
                streams,
                which[part],
                size=size,
            )

        _, outside = split_rows(table, slots[which], inside)
        if len(outside):
            self._read(buffers, table, rows, which[outside])
        if self.layout.final:
            self._mark_final(buffers, extent, slots, which)

    def _read(self, buffers: PackedBuffers, table: Table, rows: Any, which: Array) -> None:
        """Read trajectories that lie on disk only into their places; `which`: numbers of these rows."""
        places = [
            Place(source, _bytes_of(memory), 0, self.layout.schema[source].step_bytes, once)
            for values, once in ((buffers.steps, False), (buffers.once, True))
            for source, memory in values.gathered
        ]
        starts, spans = buffers.starts_array[which].astype(np.int64), buffers.spans[:, which]
        read_packed(
            table._engine.tier_reader(),
            places,
            rows.slots[which],
            rows.generations[which],
            spans,
            starts,
            which,
            drawn=np.ones_like(which),
        )
        _number(buffers, starts, *spans)

    def _mark_final(self, buffers: PackedBuffers, extent: Array, slots: Array, which: Array) -> None:
        """Tell which rows end with a final step, and write zeros there into columns without."""
        finals = buffers.spans[:, which].sum(0) > extent[slots[which], 0]
        buffers.batch[FINAL_KEY].numpy()[which] = finals
        last = torch.from_numpy(buffers.starts_array[which[finals] + 1].astype(np.int64) - 1)
        for source, values in buffers.steps.gathered:
            if not self.layout.schema[source].final:
                values[last] = 0

    def place(self, buffers: PackedBuffers, part: SpanPart, numbers: Array) -> None:
        which, rows, begins = part.placed(numbers)
        firsts, counts = part.firsts[which], part.counts[which]
        ends = buffers.starts_array[rows] + part.inside[which]
        place_packed(self._pieces(buffers.steps, part), begins, ends, counts)
        place_packed(self._pieces(buffers.once, part), which, rows, np.ones_like(rows))
        _number(buffers, ends, firsts, counts)
        self.staging.give(part.memory)

    def _pieces(self, values: PackedValues, part: SpanPart) -> Array:
        base, schema = part.memory.data_ptr(), self.layout.schema
        pieces = [
            (base + part.offsets[source], out.data_ptr(), schema[source].step_bytes)
            for source, out in values.gathered
        ]
        return np.array(pieces, dtype=np.int64).reshape(-1, 3)

    def finish(self, buffers: PackedBuffers, rows: Any) -> None:
        buffers.values.write(rows)
        buffers.once.convert(len(rows))
        buffers.steps.convert(buffers.total)
        inline = buffers.inline
        if (inline is None or inline.count != len(rows)) and self.only is not None and self._draws_inline:
            buffers.inline = self._inline(buffers, self.only, len(rows))

    def is_quick(self, count: int) -> bool:
        if not self._draws_inline or self.only is None:
            return False
        layout, region = self.layout, self.only._engine.region.layout
        steps = min(layout.length, -(-region.max_steps // region.max_trajectories))
        row_bytes = steps * (layout.step_bytes + (region.payload // region.max_steps if self.ragged else 0))
        return count * row_bytes <= INLINE_BATCH_BYTES

    @functools.cached_property
    def _draws_inline(self) -> bool:
        """Whether a compiled call may draw and gather a batch."""
        layout, table = self.layout, self.only
        if table is None or layout.tree or layout.final or layout.weighs or layout.informs or self.pinned:
            return False
        in_memory = not table._engine.has_tier and table._engine.device is None
        return in_memory and (not self.ragged or only_records(table, self.ragged))

    def _inline(self, buffers: PackedBuffers, table: Table, count: int) -> PackedInline:
        """Where such a call puts batches of `count` rows, as long as the memory is this."""
        layout, values = self.layout, None
        if self.ragged:
            values = RaggedBatch.of(table, self.ragged, {name: buffers.batch[name] for name in self.ragged})
        return PackedInline(
            count,
            buffers.starts_array,
            buffers.position.numpy(),
            *buffers.tables(table),
            (layout.offset, layout.length),
            layout.step_bytes,
            values,
            [name in layout.once for name in self.ragged],
        )


def _first(values: torch.Tensor, count: int, room: int) -> torch.Tensor:
    """A new tensor over the first of `room` values: of all in a fifth of the time that a view takes."""
    return values.data if count == room else values.narrow(0, 0, count)


def _number(buffers: PackedBuffers, starts: Array, firsts: Array, counts: Array) -> None:
    """Write the numbers of the steps of pieces that begin at `starts` of the batch, int64 [m] each."""
    inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    buffers.position.numpy()[np.repeat(starts, counts) + inside] = np.repeat(firsts, counts) + inside


def _bytes_of(memory: torch.Tensor) -> Array:
    """The bytes of a contiguous tensor, uint8 [n]."""
    found: Array = memory.view(torch.uint8).reshape(-1).numpy()
    return found
