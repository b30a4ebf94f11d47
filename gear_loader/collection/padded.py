"""Padded batches: windows of one length, with masks; their memory, and how the CPU fills it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.buffers import Buffers, Part, RowValues, TensorMemory, shown_values
from gear_loader.collection.conversions import Casts, converted_dtype
from gear_loader.collection.movers import HostMover
from gear_loader.collection.n_step import OUTPUTS, NStep, Returns, ReturnWindows, mark_returns
from gear_loader.collection.plans import Output, locate_columns, window_columns
from gear_loader.collection.ragged_values import RaggedBatch, only_records
from gear_loader.collection.references import Arena, BatchReferences
from gear_loader.collection.tier_rows import TierRows
from gear_loader.collection.windows import (
    ROW_KEYS,
    Whole,
    chosen_parts,
    expand,
    in_schema_order,
    mask_of,
    piece_rows,
    ragged_of,
    reach_of,
    source_of,
    steps_only,
)
from gear_loader.kernels.cast_plan import CastColumn
from gear_loader.kernels.plan import MASK, OUT, PLACE_OUT, PlacePlan
from gear_loader.native import gathering, threads
from gear_loader.storage.inline import INLINE_BATCH_BYTES, InlineBatch
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

    def compute(self, count: int) -> None:
        for each in self.computed:
            each.compute(self.batch["anchor"][:count])

    def columns_of(self, table: Table) -> Array:
        """How the CPU's loop gathers the windows of a table, int64 [C, WIDTH]."""
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
        """The plan that places rows in staging memory; the pieces are those of `piece_rows`."""
        if self._place is None:
            outs = [output.out for output in self.outputs] + self.masks
            named = dict(zip(self.layout.windows, self.outputs, strict=True))
            for each in self.layout.returns:
                outs += [named[each.reward].mask, named[each.done].mask]
            self._place = PlacePlan([out.view(len(out), -1).view(torch.uint8) for out in outs])
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


class PaddedRows(Buffers):
    """Some rows of a padded batch on the CPU, as buffers of their own.

    Holds no reference to the batch's tensors, so that these can tell whether they are still in use.

    Args:
        whole: buffers of the batch, whose `compute` remains to be called. mover: fills the rows.
        first, count: of the rows. weighs: whether what draws them weighs.

    Attributes:
        values: with names of their own, which `write_names` copies into the batch.
    """

    def __init__(
        self, whole: PaddedBuffers, mover: PaddedHost, first: int, count: int, *, weighs: bool
    ) -> None:
        self.mover, self._whole, self._rows = mover, whole, slice(first, first + count)
        own: Array = np.empty((len(whole.layout.keys), count), dtype=np.int64)
        weights = whole.values.weights
        self._unweighed = None if weights is None or weighs else weights[self._rows]
        kept = weights[self._rows] if weighs and weights is not None else None
        self.values = RowValues(own, kept, None, None)
        self._columns: dict[int, Array] = {}
        if mover.only is not None:
            columns, given = (
                self.columns_of(mover.only),
                np.empty(0, dtype=np.float32) if kept is None else kept,
            )
            layout = whole.layout
            self.inline = InlineBatch(columns, own, given, layout.row_bytes, layout.spans, layout.has_returns)

    def columns_of(self, table: Table) -> Array:
        """See `PaddedBuffers.columns_of`."""
        if id(table) not in self._columns:
            columns = self._columns[id(table)] = self._whole.columns_of(table).copy()
            first, outputs = self._rows.start, self._whole.outputs
            columns[:, OUT] += [first * output.out[0].nbytes for output in outputs]
            columns[:, MASK] += [0 if each.mask is None else first * each.mask[0].nbytes for each in outputs]
        return self._columns[id(table)]

    def write_names(self) -> None:
        """Complete the rows in the batch after they were filled."""
        self._whole.values.names[:, self._rows] = self.values.names
        if self._unweighed is not None:
            self._unweighed[:] = 1.0


class ChosenMasks:
    """The masks of windows with `Window.chosen` steps, which are joined of those of the steps.

    Attributes:
        masks: by their kind, bool ``[B, L]``, and those of the steps, ``[B, 1]`` each.
    """

    def __init__(self) -> None:
        self.masks: dict[Any, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def of(self, kind: Any, parts: list[torch.Tensor], new: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The mask of a kind; made of `parts` if it is not there."""
        if kind not in self.masks:
            self.masks[kind] = new(len(parts[0]), len(parts)), parts
        return self.masks[kind][0]

    def compute(self, anchors: torch.Tensor) -> None:
        """Join as many rows as there are anchors. Does not wait for a GPU."""
        for mask, parts in self.masks.values():
            torch.cat([part[: len(anchors)] for part in parts], dim=1, out=mask[: len(anchors)])


class PaddedLayout:
    """What padded batches are made of.

    Args:
        schema: of the tables. windows: name in the batch -> window or `NStep`.
        batch_size: most rows of a batch. keys: that identify its rows.
        weighs: whether batches carry ``priority_weight``. informs: whether they carry ``sample_info``.
        returns: how n-step returns are computed: ``"at once"``: by the CPU's loop while it gathers, and gathers
            `NStep.next` at the bootstrap steps; ``"between"``: of windows of rewards, before a second gather of
            `NStep.next`; ``"after"``: of windows of all steps up to there.

    Attributes:
        windows: that are gathered, in the order of the schema. sources: the column that each reads.
        late: names of those that a second gather fills, at the bootstrap steps -> name of the `NStep`.
        returns: those that are computed while the windows are gathered.
        chosen: the windows with `Window.chosen` steps -> names of the windows of these. shown: `windows` as batches
            show them, with those in their place.
        ragged: those that read ragged columns, of which records are gathered.
        reach: what they read of a trajectory. row_bytes: bytes of a row over all windows.
        spans, has_returns: as for `gathering.gather_batch`.
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
        returns: Literal["at once", "between", "after"] = "after",
    ) -> None:
        self.schema, self.batch_size, self.keys = schema, batch_size, keys
        self.weighs, self.informs = weighs, informs
        self._given: Mapping[str, Any] = windows
        plain, self._hidden = expand(schema, windows)
        self.reach: Reach = reach_of(schema, plain)
        self._at_once = returns == "at once"
        self.late: dict[str, str] = {}
        self._only_masks: set[str] = set()
        for spec, parts in self._hidden.items():
            follows = parts["follows"]
            if self._at_once:
                del plain[parts.pop("follows")]  # the lengths of trajectories tell it
            elif returns == "between":
                self._only_masks.add(follows)
            elif same := parts.get(f"next.{plain[follows].column}"):
                del plain[follows]
                parts["follows"] = same
            for name in (name for part, name in parts.items() if part.startswith("next.")):
                if returns != "after":
                    plain[name] = dataclasses.replace(plain[name], length=1)
                if returns == "between":
                    self.late[name] = spec
        self.windows = in_schema_order(schema, plain)
        self.chosen = chosen_parts(windows)
        self._parts = {
            part: (name, number) for name, parts in self.chosen.items() for number, part in enumerate(parts)
        }
        self.shown = self._shown_windows()
        self.ragged = ragged_of(schema, self.shown)
        self._computed = {name: window for name, window in windows.items() if isinstance(window, NStep)}
        self.returns = tuple(
            ReturnWindows(
                parts["reward"],
                parts["done"],
                self._computed[name].gamma,
                tuple(hidden for part, hidden in parts.items() if part.startswith("next.")),
            )
            for name, parts in (self._hidden.items() if self._at_once else ())
        )
        self.sources = [source_of(name, window) for name, window in self.windows.items()]
        self.spans, self.has_returns = self._spans(), True if self._at_once and self._hidden else None
        self.row_bytes = sum(
            schema[source].step_bytes * window.length
            for name, source, window in zip(self.windows, self.sources, self.windows.values(), strict=True)
            if name not in self._only_masks
        )

    def _shown_windows(self) -> dict[str, Window]:
        names = ((part, self._parts.get(part, (part, 0))[0]) for part in self.windows)
        return {
            name: self._given[name] if name in self.chosen else self.windows[part] for part, name in names
        }

    def _spans(self) -> bool | None:
        hidden = {parts[name] for parts in self._hidden.values() for name in ("reward", "done")}
        single = all(
            window.length == 1 and self.schema[source].step_bytes <= gathering.SINGLE_BYTES
            for (name, window), source in zip(self.windows.items(), self.sources, strict=True)
            if not self._at_once or name not in hidden
        )
        return None if single else True

    def row_layouts(self) -> dict[str, Any]:
        """Shapes and dtypes of what a batch has by row, beside its names; see `RowValues`."""
        return RowValues.layouts(self.batch_size, weighs=self.weighs, informs=self.informs)

    @property
    def mask_kinds(self) -> set[tuple[Any, ...]]:
        """The different masks of windows that batches show, by their keys, and whether they are squeezed."""
        hidden = {part for parts in self._hidden.values() for part in parts.values()}
        steps = steps_only(self.schema, self.shown).items()
        return {
            ((*mask_of(self.schema, name, window), window.chosen), window.squeeze)
            for name, window in steps
            if name not in hidden
        }

    def columns(self) -> Array:
        """Rows of a gather plan for the windows, without addresses."""
        columns, names = window_columns(self.schema, self.sources, self.windows.values()), list(self.windows)
        for number, each in enumerate(self.returns):
            which = [names.index(hidden) for hidden in each.names]
            marked, dtypes = columns[which], [self.schema[self.sources[i]].dtype for i in which]
            mark_returns(self.windows[each.reward].length, each.gamma, number, marked, dtypes)
            columns[which] = marked
        return columns

    def piece_bytes(self) -> list[int]:
        """Bytes of a row in each piece of staging memory; see `PaddedBuffers.place`."""
        return [size for _, _, size in piece_rows(self.schema, self.windows, self.returns)]

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
        skipped = hidden if self._at_once else set(self.late)
        # One mask for each key; in the plan it belongs to the column with the smallest steps.
        keys = {name: mask_of(schema, name, window) for name, window in self.windows.items()}
        masks: dict[Any, torch.Tensor] = {}
        owners: dict[Any, str] = {}
        sources = dict(zip(self.windows, self.sources, strict=True))
        for name, window in steps_only(schema, self.windows).items():
            if name in skipped:
                continue
            if keys[name] not in masks:
                masks[keys[name]] = new("" if name in hidden else "mask", (size, window.length), torch.bool)
            owner = owners.setdefault(keys[name], name)
            if schema[sources[name]].step_bytes < schema[sources[owner]].step_bytes:
                owners[keys[name]] = name
        batch, casts, found = Batch(), list[CastColumn](), dict[str, Output]()
        for name, window in self.windows.items():
            if name in skipped:
                continue
            first, number = self._parts.get(name, (name, 0))
            mask = masks[keys[name]] if owners.get(keys[name]) == name else None
            if name in self._only_masks:
                found[name] = Output(sources[name], window, None, mask)
                continue
            column, dtype = schema[sources[name]], converted_dtype(name, window, schema[sources[name]])
            shape = (size, window.length, *column.shape)
            if first not in self.chosen:
                out = values = new("" if name in hidden else name, shape, dtype or column.dtype)
                batch[name] = values[:, 0] if window.squeeze else values
            else:
                if not number:  # by step, then by row: each is gathered as a window of its own
                    steps = len(self.chosen[first]), size, *column.shape
                    batch[first] = new(first, steps, dtype or column.dtype).transpose(0, 1)
                out = values = batch[first].transpose(0, 1)[number].unsqueeze(1)
            if dtype is not None and converts:
                out = new("", shape, column.dtype)
                casts.append(CastColumn(out, values, window.scale))
            flat = out.view(size, window.length, math.prod(column.shape)).view(torch.uint8)
            found[name] = Output(sources[name], window, flat, mask)
        shown: dict[str, torch.Tensor] = {}
        joined = ChosenMasks()
        for name, window in steps_only(schema, self.shown).items():
            if name in self.chosen:
                single = [masks[keys[part]] for part in self.chosen[name]]
                kind = *mask_of(schema, name, window), window.chosen
                shown[name] = joined.of(kind, single, lambda *shape: new("mask", shape, torch.bool))
            elif name not in skipped:
                shown[name] = masks[keys[name]][:, 0] if window.squeeze else masks[keys[name]]
        returns = []
        for name, parts in self._hidden.items():
            gathered = [(part, hidden) for part, hidden in parts.items() if hidden not in skipped]
            windows = {part: batch[hidden] for part, hidden in gathered if hidden in batch}
            kept = {part: shown[hidden] for part, hidden in gathered}
            for _, done in gathered:
                batch.pop(done, None)
                shown.pop(done, None)
            spec = self._computed[name]
            outs = {each: new("", (size,), dtype) for each, dtype in OUTPUTS.items()}
            ends = [new("", (size, *schema[each].shape), schema[each].dtype) for each in spec.delivered]
            found |= self._return_outputs(parts, outs, ends, skipped)
            if self._at_once:
                batch[name] = Returns(spec, outs, ends).shown
            else:
                returns.append(Returns(spec, outs, ends, windows, kept["reward"], kept["follows"]))
                batch[name] = returns[-1].shown
        batch["mask"] = next(iter(shown.values())) if len(self.mask_kinds) == 1 else shown
        conversions = [Casts(casts, device)] if casts else []
        outputs = [found[name] for name in self.windows]
        computed = (*returns, *conversions, *([joined] if joined.masks else []))
        return batch, outputs, list(masks.values()), computed

    def _return_outputs(
        self,
        parts: Mapping[str, str],
        outs: Mapping[str, torch.Tensor],
        ends: Sequence[torch.Tensor],
        which: Collection[str],
    ) -> dict[str, Output]:
        """What those windows of a return fill that are no windows of the batch; see `gear_loader.native.returns`.

        Args:
            parts: the names of its windows. which: of them.
        """
        filled: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
            "reward": (outs["return"], outs["mask"]),
            "done": (outs["discount"], outs["bootstrap"]),
        }
        nexts = [part for part in parts if part.startswith("next.")]
        filled |= {
            part: (end.view(len(end), 1, math.prod(end.shape[1:])).view(torch.uint8), None)
            for part, end in zip(nexts, ends, strict=True)
        }
        return {
            parts[part]: Output(
                source_of(parts[part], self.windows[parts[part]]), self.windows[parts[part]], *pair
            )
            for part, pair in filled.items()
            if parts[part] in which
        }


class PaddedHost(HostMover):
    """Fills padded batches by the CPU's loop; `kind`: the class of their buffers."""

    layout: PaddedLayout
    kind: type[PaddedBuffers] = PaddedBuffers

    def __init__(self, layout: PaddedLayout, **options: Any) -> None:
        super().__init__(layout, **options)
        self._tables: dict[int, TierRows] = {}

    def buffers(self, *, shared: Any = False) -> PaddedBuffers:
        arena = None if shared is True or self.pinned else Arena()
        memory = TensorMemory(torch.device("cpu"), shared, self.pinned, arena)
        made = self.kind(self.layout, memory, self)
        made.allocate_values(memory)
        values = None
        if self.only is not None and self.ragged and only_records(self.only, self.ragged):
            values = RaggedBatch.of(self.only, self.ragged, made.batch)
        if self.only is not None and not self.pinned and (values is not None or not self.layout.ragged):
            weights = np.empty(0, dtype=np.float32) if made.values.weights is None else made.values.weights
            columns, spans, returns = made.columns_of(self.only), self.layout.spans, self.layout.has_returns
            names, row_bytes = made.values.names, self.layout.row_bytes
            made.inline = InlineBatch(columns, names, weights, row_bytes, spans, returns, values)
        return made

    def is_quick(self, count: int) -> bool:
        layout, row_bytes = self.layout, self.layout.row_bytes
        if self.only is None or self.pinned or self.only._engine.has_tier:
            return False
        if layout.ragged:  # of which the table has room for so many bytes a step
            if not only_records(self.only, layout.ragged):
                return False
            region = self.only._engine.region.layout
            counts = {True: region.max_trajectories, False: region.max_steps}
            row_bytes += max(
                region.payload // counts[layout.schema[source_of(name, each)].trajectory] * each.length
                for name, each in layout.shown.items()
                if name in layout.ragged
            )
        return count * row_bytes <= INLINE_BATCH_BYTES

    def fill(self, buffers: PaddedBuffers, table: Table, rows: SelectedRows) -> None:
        count = len(rows)
        if threads.alone(count, self.layout.row_bytes) and table._engine.all_in_memory:
            values, (extent, block_ids) = buffers.values, table._engine.reader().index_arrays()
            columns, steps = buffers.columns_of(table), table._engine.region.layout.block_steps
            names = rows.slots, rows.anchors, rows.generations
            kind = self.layout.spans, self.layout.has_returns
            bad = gathering.gather_batch(columns, *names, extent, block_ids, steps, values.names, *kind)
            if not bad:
                values.write_more(rows)
                if buffers.computed:
                    buffers.compute(count)
                return
            if not table._engine.has_tier:  # else a trajectory may have been on disk meanwhile
                table._engine.reader().check_gathered(bad)
        self.copy(buffers, table, rows)
        self.finish(buffers, rows)

    def copy(self, buffers: PaddedBuffers, table: Table, rows: Any, which: Array | None = None) -> None:
        if id(table) not in self._tables:
            self._tables[id(table)] = TierRows(table, self.layout.reach, self.layout.row_bytes)
        names = names_of(rows, which)
        self._tables[id(table)].gather(buffers.columns_of(table), self.layout.sources, *names, which)

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
