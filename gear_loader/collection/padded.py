"""Padded batches: windows of one length, with masks; their memory, and how the CPU fills it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.buffers import Buffers, Part, RowValues, TensorMemory, shown_values
from gear_loader.collection.conversions import Casts, converted_dtype
from gear_loader.collection.movers import HostMover
from gear_loader.collection.n_step import NStep, Returns
from gear_loader.collection.plans import Output, locate_columns, window_columns
from gear_loader.collection.references import Arena, BatchReferences
from gear_loader.collection.tier_rows import TierRows
from gear_loader.collection.windows import (
    ROW_KEYS,
    Whole,
    expand,
    in_schema_order,
    mask_of,
    reach_of,
    source_of,
    steps_only,
)
from gear_loader.kernels.cast_plan import CastColumn
from gear_loader.kernels.plan import MASK, OUT, PLACE_OUT, PlacePlan
from gear_loader.native import gathering, threads
from gear_loader.storage.inline import InlineBatch
from gear_loader.storage.schema import Schema, Window
from gear_loader.storage.selected_rows import Reach, SelectedRows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


class PaddedBuffers(Buffers):
    """The tensors of one padded batch.

    Args:
        layout: of the batch. memory: allocates the tensors. mover: what fills them.
        converts: as for `PaddedLayout.tensors`.

    Attributes:
        batch: column -> ``[B, L, *shape]``, masks, and the values of the rows.
        outputs: what each window fills. masks: of the distinct windows, in the order of the first with each.
        only_launches: whether `compute` launches kernels, and allocates nothing.
    """

    batch: Batch

    def __init__(
        self, layout: PaddedLayout, memory: TensorMemory, mover: Any, *, converts: bool = True
    ) -> None:
        self.layout, self.mover = layout, mover

        def new(_: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return memory.empty(*shape, dtype=dtype)

        made = layout.tensors(new, layout.batch_size, memory.device, converts=converts)
        self.batch, self.outputs, self.masks, self.computed = made
        self.values: RowValues
        self._columns: dict[int, Array] = {}
        self._early: tuple[Table, Array, list[tuple[Array, list[int], torch.Tensor]]] | None = None
        self._place: PlacePlan | None = None
        self.only_launches = all(isinstance(each, Casts) for each in self.computed)

    def allocate_values(self, memory: TensorMemory) -> None:
        """Allocate the values of the rows beside the windows."""
        layout = self.layout
        names = memory.empty(len(layout.keys), layout.batch_size, dtype=torch.int64)
        parts = layout.row_layouts().items()
        tensors = {name: memory.empty(*shape, dtype=dtype) for name, (shape, dtype) in parts}
        self.batch.update(shown_values(layout.keys, names, tensors))
        if memory.device.type == "cpu":
            self.values = RowValues.of(names.numpy(), tensors)

    def names_on_host(self, count: int) -> tuple[Array, ...] | None:
        values = self.values if self.gpu is None or self.gpu.staging is None else self.gpu.staging.values
        return tuple(each[:count] for each in values.names[: len(ROW_KEYS)])

    def compute(self, count: int, limits: Array | None = None) -> None:
        """Compute what is computed of the first n rows; `limits`: see `Returns.compute`."""
        for each in self.computed:
            each.compute(self.batch["anchor"][:count], limits)

    def late_of(self, table: Table) -> list[tuple[Array, list[int], torch.Tensor]]:
        """`_late_columns` of a table, made once."""
        self.columns_of(table)
        return [] if self._early is None else self._early[2]

    def _late_columns(self, table: Table) -> list[tuple[Array, list[int], torch.Tensor]]:
        """The windows of a table that are gathered at bootstrap steps: as `columns_of`, their numbers, these steps."""
        columns, names = self._all_columns(table), list(self.layout.windows)
        found = []
        for returns, name in zip(self.computed, self.layout.returns, strict=False):
            which = [i for i, each in enumerate(names) if self.layout.late.get(each) == name]
            if which:
                found.append((np.ascontiguousarray(columns[which]), which, returns.out["bootstrap"]))
        return found

    def columns_of(self, table: Table) -> Array:
        """How the CPU's loop gathers the windows of a table that are gathered at anchors, int64 [C, WIDTH]."""
        if not self.layout.late:
            return self._all_columns(table)
        if self._early is None or self._early[0] is not table:
            chosen = [name not in self.layout.late for name in self.layout.windows]
            self._early = (
                table,
                np.ascontiguousarray(self._all_columns(table)[chosen]),
                self._late_columns(table),
            )
        return self._early[1]

    def _all_columns(self, table: Table) -> Array:
        if id(table) not in self._columns:
            columns = self.layout.columns()
            columns[:, OUT] = [output.out.data_ptr() for output in self.outputs]
            columns[:, MASK] = [
                0 if output.mask is None else output.mask.data_ptr() for output in self.outputs
            ]
            self._columns[id(table)] = locate_columns(columns, self.layout.sources, table._engine.region)
        return self._columns[id(table)]

    @property
    def place(self) -> PlacePlan:
        """The plan that places rows in staging memory: a piece for each window, then one for each mask."""
        if self._place is None:
            outs = [output.out.view(len(output.out), -1) for output in self.outputs]
            self._place = PlacePlan([*outs, *(mask.view(torch.uint8) for mask in self.masks)])
            self.references = None  # the plan refers to the batch's memory
        return self._place

    def lend(self, count: int) -> Batch:
        if self.references is None:
            self.references = BatchReferences(self.batch)
        return self.rows(count) if count < self.layout.batch_size else self.references.aliases()

    def rows(self, count: int) -> Batch:
        def head(value: Any) -> Any:
            return (
                {key: head(part) for key, part in value.items()} if isinstance(value, dict) else value[:count]
            )

        whole = count == self.layout.batch_size
        return Batch(self.batch if whole else {key: head(value) for key, value in self.batch.items()})


class PaddedLayout:
    """What padded batches are made of.

    Args:
        schema: of the tables. windows: name in the batch -> window or `NStep`.
        batch_size: most rows of a batch. keys: that identify its rows.
        weighs: whether batches carry ``priority_weight``. informs: whether they carry ``sample_info``.
        twice: whether rows can be gathered twice: then the columns of `NStep.next` are gathered at the bootstrap step
            alone, when the returns are known; else a window of all steps up to it.

    Attributes:
        returns: names of the windows that are computed. early_sources: `sources` of the windows but `late`.
        late: windows that are gathered at the bootstrap step -> name of the `NStep`.
        windows: that are gathered, in the order of the schema. sources: the column that each reads.
        reach: what they read of a trajectory. row_bytes: bytes of a row over all windows.
        spans, late_spans: of the windows but `late` and of these, as for `gathering.gather_batch`.
    """

    packed = False

    def __init__(
        self,
        schema: Schema,
        windows: Mapping[str, Window | NStep | Whole],
        *,
        batch_size: int,
        keys: tuple[str, ...] = ROW_KEYS,
        weighs: bool = False,
        informs: bool = False,
        twice: bool = False,
    ) -> None:
        self.schema, self.batch_size, self.keys = schema, batch_size, keys
        self.weighs, self.informs = weighs, informs
        plain, self._hidden = expand(schema, windows)
        self.late = {
            hidden: name
            for name, parts in self._hidden.items()
            for part, hidden in parts.items()
            if twice and part.startswith("next.")
        }
        plain.update((name, dataclasses.replace(plain[name], length=1)) for name in self.late)
        for name in set(self.late.values()):  # the lengths of trajectories tell it
            del plain[self._hidden[name].pop("follows")]
        self.windows = in_schema_order(schema, plain)
        self.returns = list(self._hidden)
        self._computed = {name: window for name, window in windows.items() if isinstance(window, NStep)}
        self.sources = [source_of(name, window) for name, window in self.windows.items()]
        self.early_sources = [
            source for name, source in zip(self.windows, self.sources, strict=True) if name not in self.late
        ]
        self.spans = self._spans(late=False)
        self.late_spans = self._spans(late=True)
        self.row_bytes = sum(
            schema[source].step_bytes * window.length
            for source, window in zip(self.sources, self.windows.values(), strict=True)
        )
        self.reach: Reach = reach_of(schema, self.windows)

    def _spans(self, *, late: bool) -> bool | None:
        """`spans` of `gathering.gather_batch`, for the windows that are gathered at bootstrap steps or the others."""
        each = zip(self.windows.items(), self.sources, strict=True)
        single = all(
            window.length == 1 and self.schema[source].step_bytes <= gathering.SINGLE_BYTES
            for (name, window), source in each
            if (name in self.late) == late
        )
        return None if single else True

    def row_layouts(self) -> dict[str, Any]:
        """Shapes and dtypes of what a batch has by row, beside its names; see `RowValues`."""
        return RowValues.layouts(self.batch_size, weighs=self.weighs, informs=self.informs)

    @property
    def mask_kinds(self) -> set[tuple[Any, ...]]:
        """The different masks of windows that batches show, by their keys, and whether they are squeezed."""
        hidden = {part for parts in self._hidden.values() for part in parts.values()}
        steps = steps_only(self.schema, self.windows).items()
        return {
            (mask_of(self.schema, name, window), window.squeeze)
            for name, window in steps
            if name not in hidden
        }

    def columns(self) -> Array:
        """Rows of a gather plan for the windows, without addresses."""
        return window_columns(self.schema, self.sources, self.windows.values())

    def piece_bytes(self) -> list[int]:
        """Bytes of a row in each piece of staging memory; see `PaddedBuffers.place`."""
        masks = {
            mask_of(self.schema, *item): item[1].length
            for item in steps_only(self.schema, self.windows).items()
        }
        columns = zip(self.sources, self.windows.values(), strict=True)
        return [*(self.schema[source].step_bytes * each.length for source, each in columns), *masks.values()]

    def tensors(
        self,
        new: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor],
        size: int,
        device: torch.device,
        *,
        converts: bool = True,
    ) -> tuple[Batch, list[Output], list[torch.Tensor], tuple[Any, ...]]:
        """Tensors of a batch of `size` rows, without the values of the rows.

        Args:
            new: makes one on `device`, from its name in the batch, ``"mask"``, or ``""`` for others, its shape and its
                dtype.
            converts: whether windows of another dtype are converted here; False for copies of batches that are.

        Returns:
            The batch; what each window fills; the distinct masks; and what is computed after the gather.
        """
        schema, hidden = self.schema, {part for parts in self._hidden.values() for part in parts.values()}
        # One mask for each key; in the plan it belongs to the column with the smallest steps.
        keys = {name: mask_of(schema, name, window) for name, window in self.windows.items()}
        masks: dict[Any, torch.Tensor] = {}
        owners: dict[Any, str] = {}
        sources = dict(zip(self.windows, self.sources, strict=True))
        for name, window in steps_only(schema, self.windows).items():
            if name in self.late:  # they have none
                continue
            if keys[name] not in masks:
                masks[keys[name]] = new("" if name in hidden else "mask", (size, window.length), torch.bool)
            owner = owners.setdefault(keys[name], name)
            if schema[sources[name]].step_bytes < schema[sources[owner]].step_bytes:
                owners[keys[name]] = name
        batch, outputs, casts = Batch(), list[Output](), list[CastColumn]()
        for name, window in self.windows.items():
            column, dtype = schema[sources[name]], converted_dtype(name, window, schema[sources[name]])
            shape = (size, window.length, *column.shape)
            out = values = new("" if name in hidden else name, shape, dtype or column.dtype)
            if dtype is not None and converts:
                out = new("", shape, column.dtype)
                casts.append(CastColumn(out, values, window.scale))
            batch[name] = values[:, 0] if window.squeeze else values
            mask = masks[keys[name]] if owners.get(keys[name]) == name else None
            flat = out.view(size, window.length, math.prod(column.shape)).view(torch.uint8)
            outputs.append(Output(sources[name], window, flat, mask))
        shown = {
            name: masks[keys[name]][:, 0] if window.squeeze else masks[keys[name]]
            for name, window in steps_only(schema, self.windows).items()
            if name not in self.late
        }
        returns = [
            Returns.of(
                self._computed[name],
                {part: batch.pop(hidden) for part, hidden in parts.items()},
                {part: shown.pop(hidden) for part, hidden in parts.items() if hidden not in self.late},
            )
            for name, parts in self._hidden.items()
        ]
        batch.update((name, each.shown) for name, each in zip(self._hidden, returns, strict=True))
        batch["mask"] = next(iter(shown.values())) if len(self.mask_kinds) == 1 else shown
        conversions = [Casts(casts, device)] if casts else []
        return batch, outputs, list(masks.values()), (*returns, *conversions)


class PaddedHost(HostMover):
    """Fills padded batches by the CPU's loop."""

    layout: PaddedLayout

    def __init__(self, layout: PaddedLayout, **options: Any) -> None:
        super().__init__(layout, **options)
        self._tables: dict[int, TierRows] = {}

    def buffers(self, *, shared: bool = False) -> PaddedBuffers:
        arena = None if shared or self._pinned else Arena()
        memory = TensorMemory(torch.device("cpu"), shared, self._pinned, arena)
        made = PaddedBuffers(self.layout, memory, self)
        made.allocate_values(memory)
        if self._only is not None and not self._pinned and not self.layout.late:
            weights = np.empty(0, dtype=np.float32) if made.values.weights is None else made.values.weights
            columns = made.columns_of(self._only)
            made.inline = InlineBatch(
                columns, made.values.names, weights, self.layout.row_bytes, self.layout.spans
            )
        return made

    def fill(self, buffers: PaddedBuffers, table: Table, rows: SelectedRows) -> None:
        count = len(rows)
        if threads.alone(count, self.layout.row_bytes) and not (
            table._engine.has_tier and table._engine.num_spilled
        ):
            values, (extent, block_ids) = buffers.values, table._engine.reader().index_arrays()
            columns, steps = buffers.columns_of(table), table._engine.region.layout.block_steps
            names = rows.slots, rows.anchors, rows.generations
            spans = self.layout.spans
            bad = gathering.gather_batch(columns, *names, extent, block_ids, steps, values.names, spans)
            if not bad:
                values.write_more(rows)
                if buffers.computed:
                    buffers.compute(count, self._limits(table, rows))
                for late, _, steps_at in buffers.late_of(table):
                    at, wide = steps_at.numpy()[:count], self.layout.late_spans
                    bad += gathering.gather(
                        late, rows.slots, at, extent, block_ids, steps, 0, count, None, wide
                    )
                if not bad:
                    return
            if not table._engine.has_tier:  # else a trajectory may have been on disk meanwhile
                table._engine.reader().check_gathered(bad)
        self.copy(buffers, table, rows)
        buffers.values.write(rows)
        buffers.compute(count, self._limits(table, rows))
        for late, which, steps_at in buffers.late_of(table):
            sources = [self.layout.sources[i] for i in which]
            names = rows.slots, np.ascontiguousarray(steps_at.numpy()[:count]), rows.generations
            self._tables[id(table)].gather(late, sources, *names)

    def _limits(self, table: Table, rows: SelectedRows) -> Array | None:
        """See `Returns.compute`."""
        if not self.layout.late:
            return None
        extent = table._engine.reader().index_arrays()[0][rows.slots]
        limits: Array = extent[:, 0] + extent[:, 2]
        return limits

    def copy(self, buffers: PaddedBuffers, table: Table, rows: Any, which: Array | None = None) -> None:
        if id(table) not in self._tables:
            self._tables[id(table)] = TierRows(table, self.layout.reach, self.layout.row_bytes)
        names = names_of(rows, which)
        self._tables[id(table)].gather(buffers.columns_of(table), self.layout.early_sources, *names, which)

    def place(self, buffers: PaddedBuffers, part: Part, numbers: Array) -> None:
        gathering.place(buffers.place.pieces(part.memory, len(part.rows)).numpy(), part.rows)
        self.staging.give(part.memory)

    def load(self, buffers: PaddedBuffers, copy: Callable[[Array, Array], None], which: Array) -> None:
        copy(buffers.place.table[:, PLACE_OUT].numpy(), which)

    def finish(self, buffers: PaddedBuffers, rows: Any) -> None:
        buffers.values.write(rows)
        buffers.compute(len(rows))


def names_of(rows: Any, which: Array | None) -> tuple[Array, Array, Array]:
    """Slots, anchors and generations of some rows, int64 [n]; None: of all."""
    names = rows.slots, rows.anchors, rows.generations
    return names if which is None else tuple(values[which] for values in names)
