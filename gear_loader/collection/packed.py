"""Packed batches: the steps of rows of different lengths one after another, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.collector import COUNTS, NUMBERS, ROW_KEYS, Buffers, Collector
from gear_loader.collection.conversions import Conversion, converted_dtype
from gear_loader.collection.n_step import NStep
from gear_loader.collection.plans import locate_columns
from gear_loader.collection.references import BatchReferences
from gear_loader.collection.sources import Place, read_packed
from gear_loader.collection.windows import FINAL_KEY, Whole, packed_span, reads_final, source_of, steps_only
from gear_loader.errors import SchemaError
from gear_loader.kernels.plan import OUT, WIDTH
from gear_loader.native.gathering import STREAM_BATCH_BYTES
from gear_loader.native.packed import gather_packed, measure
from gear_loader.storage.schema import Column, Window
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["PackedBuffers", "PackedCollector", "grown"]


class PackedBuffers(Buffers):
    """The tensors of one packed batch, as large as the largest one that they have held.

    ::

        steps   [capacity, *shape]   row 0 | row 1 ... | row n - 1 | unused
        starts  cu_seqlens           0     cu[1]   ... cu[n - 1]   cu[n]

    Args:
        collector: whose batches they hold.
        shared: allocate the tensors in shared memory, just as large as a batch needs.
        pinned: allocate them in pinned memory, for a GPU that gets copies.
        given: memory of some windows, name -> tensor, as large as the only batch that they will hold.
    """

    def __init__(
        self,
        collector: PackedCollector,
        *,
        shared: bool,
        pinned: bool = False,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.batch = Batch()
        self.gpu, self.inline, self.references = None, None, None
        self.computed = ()
        self._collector = collector
        self._shared, self._pinned, self._given = shared, pinned, given
        self._num_rows = self._num_steps = -1  # capacity
        self.total, self.longest = 0, 0
        self._tables: dict[int, tuple[Array, Array]] = {}
        self.gathered: dict[str, torch.Tensor] = {}  # name -> values as they are gathered
        # Set by `_replace`.
        self.rows_memory: dict[str, torch.Tensor]
        self.info_memory: dict[str, torch.Tensor]
        self.steps_memory: dict[str, torch.Tensor]
        self.starts: torch.Tensor
        self.position: torch.Tensor
        self.starts_array: Array
        self.position_array: Array
        self._row_conversions: list[Conversion]
        self._step_conversions: list[Conversion]

    def reserve(self, num_rows: int, num_steps: int) -> None:
        """Make room for a batch of so many rows and steps; the tensors hold no batch any longer if they grow.

        After a failure or an interruption, rows and steps each have their old memory and size, or all of the new ones.
        """
        if num_rows > self._num_rows:
            count = num_rows if self._shared or self._given is not None else grown(num_rows)
            self._replace(_num_rows=count, **self._new_rows(count))
        if num_steps > self._num_steps:
            count = num_steps if self._shared or self._given is not None else grown(num_steps)
            self._replace(_num_steps=count, **self._new_steps(count))

    def _replace(self, **made: Any) -> None:
        """Put new memory in place: attributes that belong together, with its size, in one step."""
        self.__dict__.update(made, references=None, _tables={})

    def tables(self, table: Table) -> tuple[Array, Array]:
        """Where columns of steps, and per trajectory, are copied from and to, int64 [C, WIDTH] for `native.packed`."""
        if id(table) not in self._tables:
            collector, gathered = self._collector, self.gathered
            steps, once = (
                collector.table_of({name: gathered[name] for name in names}, table)
                for names in (collector.steps, collector.once)
            )
            self._tables[id(table)] = steps, once
        return self._tables[id(table)]

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pinned)
        return tensor.share_memory_() if self._shared else tensor

    def _new_rows(self, count: int) -> dict[str, Any]:
        """Memory for the values of `count` rows, as attributes for `_replace`."""
        collector = self._collector
        names = self._empty(len(collector.row_keys), count, dtype=torch.int64)
        once, converted, conversions = self._values(collector.once, count)
        memory = {**dict(zip(collector.row_keys, names, strict=True)), **once, **converted}
        if collector.weighs:
            memory["priority_weight"] = self._empty(count, dtype=torch.float32)
        if collector.final:
            memory[FINAL_KEY] = self._empty(count, dtype=torch.bool)
        info: dict[str, torch.Tensor] = {}
        if collector.informs:
            counts, numbers = (self._empty(2, count, dtype=kind) for kind in (torch.int64, torch.float32))
            info = dict(zip(COUNTS + NUMBERS, (*counts, *numbers), strict=True))
        starts = self._empty(count + 1, dtype=torch.int32)
        return {
            "rows_memory": memory,
            "info_memory": info,
            "starts": starts,
            "names": names.numpy(),
            "starts_array": starts.numpy(),
            "gathered": {**self.gathered, **once},
            "_row_conversions": conversions,
        }

    def _new_steps(self, count: int) -> dict[str, Any]:
        """Memory for the values of `count` steps, as attributes for `_replace`."""
        collector = self._collector
        steps, converted, conversions = self._values(collector.steps, count)
        position = self._empty(count, dtype=torch.int32)
        return {
            "steps_memory": {**steps, **converted},
            "position": position,
            "position_array": position.numpy(),
            "gathered": {**self.gathered, **steps},
            "_step_conversions": conversions,
        }

    def _values(
        self, columns: Mapping[str, tuple[int, ...]], count: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[Conversion]]:
        """Memory of `count` values as they are gathered, and as they are delivered where they are converted."""
        collector = self._collector
        gathered, converted, conversions = {}, {}, []
        for name, shape in columns.items():
            window, column = collector.windows[name], collector.column_of(name)
            dtype = converted_dtype(name, window, column)
            given = None if self._given is None else self._given.get(name)
            shown = self._empty(count, *shape, dtype=dtype or column.dtype) if given is None else given
            gathered[name] = shown if dtype is None else self._empty(count, *shape, dtype=column.dtype)
            if dtype is not None:
                converted[name] = shown
                conversions.append(Conversion(gathered[name], converted[name], window.scale))
        return gathered, converted, conversions

    def convert(self, num_rows: int, num_steps: int) -> None:
        """Convert the values of a gathered batch, where windows have another dtype."""
        for each in self._row_conversions:
            each.convert(num_rows)
        for each in self._step_conversions:
            each.convert(num_steps)

    def lend(self, count: int) -> Batch:
        """`rows` as new tensors, whose references `references` finds."""
        if self.references is None:
            self.references = BatchReferences(
                {
                    **self.steps_memory,
                    **self.rows_memory,
                    **self.info_memory,
                    "position": self.position,
                    "cu_seqlens": self.starts,
                }
            )
        return self.rows(count)

    def rows(self, count: int) -> Batch:
        """The batch of `count` rows that was gathered last; views of the buffers."""
        batch, total = Batch(), self.total
        for name in self._collector.windows:
            if name in self.steps_memory:
                batch[name] = self.steps_memory[name].narrow(0, 0, total)
            else:
                batch[name] = self.rows_memory[name].narrow(0, 0, count)
        batch["cu_seqlens"] = self.starts.narrow(0, 0, count + 1)
        batch["max_seqlen"] = self.longest
        batch["position"] = self.position.narrow(0, 0, total)
        for name in self._collector.row_keys:
            batch[name] = self.rows_memory[name].narrow(0, 0, count)
        if self._collector.weighs:
            batch["priority_weight"] = self.rows_memory["priority_weight"].narrow(0, 0, count)
        if self._collector.final:
            batch[FINAL_KEY] = self.rows_memory[FINAL_KEY].narrow(0, 0, count)
        if self.info_memory:
            batch["sample_info"] = {name: part.narrow(0, 0, count) for name, part in self.info_memory.items()}
        return batch


class PackedCollector(Collector):
    """Gathers packed batches of one table, on the CPU.

    Args:
        table: table to read.
        windows: name in the batch -> window; those of steps are all the same.
        weighs, informs: as for `Collector`.
        device, programs: for a subclass that gathers for a GPU, as for `Collector`.

    Attributes:
        steps, once: name in the batch -> shape of a value, of columns of steps and per trajectory.
        final: whether final steps are among those of rows.

    Raises:
        SchemaError: windows that differ.
    """

    row_keys: tuple[str, ...] = ROW_KEYS
    """Keys of a batch that identify its rows."""

    def __init__(
        self,
        table: Table,
        windows: Mapping[str, Window | NStep | Whole],
        *,
        weighs: bool = False,
        informs: bool = False,
        device: torch.device | None = None,
        programs: int | None = None,
    ) -> None:
        options: dict[str, Any] = {"programs": programs, "weighs": weighs, "informs": informs}
        device = torch.device("cpu") if device is None else device
        super().__init__(table, windows, batch_size=1, device=device, **options)
        self._offset, self._length = packed_span(table.schema, windows)
        self.final = reads_final(windows)
        self._sources = {name: source_of(name, window) for name, window in self.windows.items()}
        shapes = {name: self.column_of(name).shape for name in self.windows}
        self.steps = {name: shapes[name] for name in steps_only(table.schema, self.windows)}
        self.once = {name: shape for name, shape in shapes.items() if name not in self.steps}
        self._step_bytes = sum(self.column_of(name).step_bytes for name in self.steps)

    def source_of(self, name: str) -> str:
        """The name of the column that a window reads."""
        return self._sources[name]

    def column_of(self, name: str) -> Column:
        """The column that a window reads."""
        return self.table.schema[self._sources[name]]

    @property
    def columns_read(self) -> tuple[list[str], list[str]]:
        """The columns of steps, and per trajectory, that windows read."""
        steps, once = (sorted({self._sources[name] for name in names}) for names in (self.steps, self.once))
        return steps, once

    def buffers(self, *, shared: bool = False) -> Buffers:
        """Buffers for one batch, which get their memory at their first gather; see `Collector.buffers`."""
        return PackedBuffers(self, shared=shared)

    def table_of(self, memory: Mapping[str, torch.Tensor], source: Table | None = None) -> Array:
        """Where windows (name -> memory) are copied from and to, int64 [C, WIDTH], for `native.packed`.

        Args:
            source: the table to read; by default the collector's.
        """
        region, table = (source or self.table)._engine.region, np.zeros((len(memory), WIDTH), dtype=np.int64)
        table[:, OUT] = [values.data_ptr() for values in memory.values()]
        return locate_columns(table, [self._sources[name] for name in memory], region)

    def measure(self, rows: SelectedRows) -> tuple[Array, int, int]:
        """The rows' first steps and numbers of steps, int64 [2, n], all steps, and the number of invalid slots.

        Raises:
            SchemaError: the batch would have 2**31 steps or more.
        """
        spans, bad = rows.spans, 0
        if spans is None:
            spans = np.empty((2, len(rows)), dtype=np.int64)
            span = self._offset, self._length, self.final
            bad = measure(rows.slots, rows.anchors, self._extent, *span, spans)
        return spans, total_steps(spans), bad

    def gather(self, buffers: Buffers, rows: Any) -> None:
        """Fill `buffers` with these rows, which are complete when this returns.

        Args:
            buffers: buffers of this collector.
            rows: `SelectedRows`. The caller holds their read ticket.

        Raises:
            SchemaError: the batch would have 2**31 steps or more.
            LostRowsError: trajectories on disk cannot be read.
        """
        assert isinstance(buffers, PackedBuffers)
        assert isinstance(rows, SelectedRows)
        count, (spans, _, bad) = len(rows), self.measure(rows)
        self._begin(buffers, spans)
        for place, values in zip(buffers.names, (rows.slots, rows.anchors, rows.generations), strict=True):
            place[:count] = values
        if rows.weights is not None:
            buffers.rows_memory["priority_weight"].numpy()[:count] = rows.weights
        if rows.counts is not None and rows.numbers is not None:
            for key, values in zip(COUNTS + NUMBERS, (*rows.counts, *rows.numbers), strict=True):
                buffers.info_memory[key].numpy()[:count] = values
        bad += self._copy(buffers, self.table, rows.slots, rows.generations, spans, np.arange(count))
        self.table._engine.reader().check_gathered(bad)
        if self.final:
            self._mark_final(buffers, rows.slots, spans)
        buffers.convert(count, buffers.total)

    def _mark_final(self, buffers: PackedBuffers, slots: Array, spans: Array) -> None:
        """Tell which rows end with a final step, and write zeros there into columns without."""
        count = len(slots)
        finals = spans.sum(0) > self._extent[slots, 0]
        buffers.rows_memory[FINAL_KEY].numpy()[:count] = finals
        last = torch.from_numpy(buffers.starts_array[1 : count + 1][finals].astype(np.int64) - 1)
        for name in self.steps:
            if not self.column_of(name).final:
                buffers.gathered[name][last] = 0

    def _begin(self, buffers: PackedBuffers, spans: Array) -> None:
        """Make room for rows of these spans, int64 [2, n], and write where each begins."""
        count, total = spans.shape[1], total_steps(spans)
        buffers.reserve(count, total)
        buffers.total, buffers.longest = total, int(spans[1].max(initial=0))
        buffers.starts_array[0] = 0
        np.cumsum(spans[1], out=buffers.starts_array[1 : count + 1])

    def _copy(
        self,
        buffers: PackedBuffers,
        table: Table,
        slots: Array,
        generations: Array,
        spans: Array,
        which: Array,
    ) -> int:
        """Copy rows of one table into their places.

        Args:
            slots, generations: int64 [n]. spans: int64 [2, n], of all rows of the batch.
            which: int64 [m], numbers of the rows of this table.

        Returns:
            Number of invalid slots and blocks, 0 unless the index is corrupt.

        Raises:
            LostRowsError: trajectories on disk cannot be read.
        """
        extent, block_ids = table._engine.reader().index_arrays()
        streams = buffers.total * self._step_bytes >= STREAM_BATCH_BYTES
        inside = which
        while True:
            if table._engine.has_tier:
                places = extent[slots[which], 1]
                inside = which[places >= 0]
            bad = gather_packed(
                *buffers.tables(table),
                slots,
                spans,
                buffers.starts_array,
                extent,
                block_ids,
                table._engine.region.layout.block_steps,
                buffers.position_array,
                streams,
                inside,
            )
            if not bad or not table._engine.has_tier or (extent[slots[which], 1] == places).all():
                break  # else some of them were moved to disk meanwhile, and may be back
        if len(inside) < len(which):
            outside = np.setdiff1d(which, inside, assume_unique=True)
            self._read(buffers, table, slots[outside], generations[outside], spans[:, outside], outside)
        return int(bad)

    def _read(
        self,
        buffers: PackedBuffers,
        table: Table,
        slots: Array,
        generations: Array,
        spans: Array,
        which: Array,
    ) -> None:
        """Read trajectories that lie on disk only into their places; `which`: numbers of these rows."""
        places = []
        for name, memory in buffers.gathered.items():
            column = self.column_of(name)
            out = self._sources[name], _bytes_of(memory)
            places.append(Place(*out, 0, column.step_bytes, column.trajectory))
        starts = buffers.starts_array[which].astype(np.int64)
        read_packed(table._engine.tier_reader(), places, slots, generations, spans, starts, which)
        self._number(buffers, spans, which)

    @staticmethod
    def _number(buffers: PackedBuffers, spans: Array, which: Array) -> None:
        """Write the numbers of the steps of rows `which`, whose spans are int64 [2, m]."""
        places = zip(buffers.starts_array[which].tolist(), *spans.tolist(), strict=True)
        for start, low, count in places:
            buffers.position_array[start : start + count] = np.arange(low, low + count, dtype=np.int32)


def _bytes_of(memory: torch.Tensor) -> Array:
    """The bytes of a contiguous tensor, uint8 [n]."""
    found: Array = memory.view(torch.uint8).reshape(-1).numpy()
    return found


def total_steps(spans: Array) -> int:
    """All steps of rows of these spans, int64 [2, n].

    Raises:
        SchemaError: 2**31 steps or more.
    """
    total = int(spans[1].sum())
    if total >= 2**31:
        raise SchemaError(
            f"A packed batch would have {total:,} steps, more than its cu_seqlens (int32) count; expected less than "
            "2**31. Use a smaller batch_size, or max_steps."
        )
    return total


def grown(count: int) -> int:
    """The next power of two, so that memory grows seldom."""
    return 1 << max(count - 1, 0).bit_length()
