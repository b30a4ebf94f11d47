"""Rows that the caller chose, gathered into memory that the caller may give: `Table.gather` and what it is made of."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.buffers import TensorMemory
from gear_loader.collection.collector import TableSource
from gear_loader.collection.conversions import converted_dtype
from gear_loader.collection.n_step import NStep
from gear_loader.collection.packed import PackedBuffers, PackedHost, PackedLayout
from gear_loader.collection.padded import PaddedLayout
from gear_loader.collection.plans import locate_columns, window_columns
from gear_loader.collection.ragged_values import read_ragged
from gear_loader.collection.sources import StagedRows
from gear_loader.collection.tier_rows import TierRows
from gear_loader.collection.timed import TimedSource
from gear_loader.collection.windows import (
    ROW_KEYS,
    Whole,
    check_layout,
    chosen_parts,
    has_whole,
    is_late,
    ragged_of,
    reach_of,
    reads,
    source_of,
    timed_of,
    windows_of,
    without_late,
)
from gear_loader.errors import SchemaError
from gear_loader.kernels.plan import LENGTH, MASK, OUT, STEP_BYTES
from gear_loader.storage.disk_records import MovedRowsError
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Schema, Window
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.source import Source
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, numbers, shown, unreadable

Windows = Mapping[str, Window | NStep | Whole]


class SchemaSource(Source, Protocol):
    """A source that knows its columns."""

    @property
    def schema(self) -> Schema:
        """Columns of the trajectories."""


class RowGather:
    """Gathers windows of rows into any memory of the host; several threads may do so at once.

    Args:
        source: a table of this machine, or any other source with a schema. windows: name -> window, as `expand` gives
            them; or a layout, with what its windows need.

    Attributes:
        row_bytes: bytes of a row over all windows. sources: the column that each window reads.
        tier: of a table with a disk tier, what reads its rows; else None.
    """

    def __init__(self, source: Table | SchemaSource, windows: Mapping[str, Window] | PaddedLayout) -> None:
        layout = windows if isinstance(windows, PaddedLayout) else None
        if isinstance(windows, PaddedLayout):
            windows = windows.windows
        self.source, self.windows = source, dict(windows)
        self.sources = [source_of(name, window) for name, window in windows.items()]
        self._plan = (
            window_columns(source.schema, self.sources, windows.values())
            if layout is None
            else layout.columns()
        )
        self.row_bytes = int((self._plan[:, LENGTH] * self._plan[:, STEP_BYTES]).sum())
        reach = reach_of(source.schema, windows) if layout is None else layout.reach
        self._reader: Any
        if isinstance(source, Table):
            locate_columns(self._plan, self.sources, source._engine.region)
            self._reader = TierRows(source, reach, self.row_bytes)
        else:
            self._reader = StagedRows(lambda: source, source.schema, reach, self.row_bytes)
        has_tier = isinstance(self._reader, TierRows) and self._reader.table._engine.has_tier
        self.tier = self._reader if has_tier else None

    def gather(
        self,
        slots: Array,
        anchors: Array,
        generations: Callable[[], Array],
        outs: Sequence[torch.Tensor],
        masks: Mapping[int, torch.Tensor] | None = None,
        into: Array | None = None,
    ) -> int:
        """Fill rows of tensors. The caller holds a read ticket, under which the trajectories were there.

        Args:
            slots, anchors: int64 [n], contiguous. generations: returns int64 [n]; called unless the rows lie in memory.
            outs: contiguous ``[m, L, *shape]`` of each window, on the CPU.
            masks: number of a window -> its mask, contiguous bool ``[m, L]``.
            into: int64 [n], distinct: row of `outs` for each; None: row i for row i.

        Returns:
            How many of the rows were read, and not copied out of memory.

        Raises:
            LostRowsError: trajectories cannot be read. CorruptTableError: see `TableReader.check_gathered`.
        """
        plan = self._plan.copy()
        plan[:, OUT] = [out.data_ptr() for out in outs]
        for number, mask in (masks or {}).items():
            plan[number, MASK] = mask.data_ptr()

        def read() -> int:
            count: int = self._reader.gather(plan, self.sources, slots, anchors, generations, into)
            return count

        if not isinstance(self.source, Table):
            return read()
        return self.source._engine.reader().read_whole(slots, read)


_known: weakref.WeakKeyDictionary[Table, tuple[Any, PaddedLayout, RowGather, bool]] = (
    weakref.WeakKeyDictionary()
)
"""Of each table, the windows of the last call of `gather`, and what gathers them."""


def gather(table: Table, index: Any, anchor: Any, windows: Any, out: Any) -> Batch:
    """See `Table.gather`."""
    windows = Whole() if windows is None else windows
    wanted, packed = windows_of(table.schema, windows, None), has_whole(windows)
    check_layout("packed" if packed else "padded", windows)
    slots = _rows(index, "index")
    if packed and anchor is not None:
        raise SchemaError(
            f"anchor is {shown(anchor)}, and the windows are whole trajectories, which have no anchor; expected None, "
            "or gear_loader.Window as windows."
        )
    anchors = np.zeros_like(slots) if anchor is None else _rows(anchor, "anchor")
    if len(anchors) != len(slots):
        raise SchemaError(f"anchor has {len(anchors)} rows and index {len(slots)}; expected as many of both.")
    given = _given(wanted, packed, out)
    if ragged := list(ragged_of(table.schema, wanted)) if given else []:
        raise SchemaError(f"out was given, and the windows {ragged} read ragged columns; expected no out.")
    if given and (some := [*chosen_parts(wanted), *timed_of(wanted)]):
        raise SchemaError(
            f"out was given, and the windows {some} have every or at, whose steps lie apart in memory; expected no out."
        )
    ticket = Ticket()

    def read() -> Batch:
        generations, lengths = table._engine.reader().begin_read_rows(slots, ticket)
        _check_anchors(anchors, lengths)
        _check_late(table, wanted, slots)
        while True:
            with contextlib.suppress(MovedRowsError):  # what was on disk has been written anew meanwhile
                rows = SelectedRows(slots, anchors, generations)
                return (_packed if packed else _padded)(table, wanted, rows, given)

    return ticket.during(read)


def _rows(value: Any, name: str) -> Array:
    found = numbers(value, name, "iu", "integers [n]")
    if found.ndim != 1:
        raise SchemaError(f"{name} is {shown(value)}; expected integers [n].")
    return np.array(found, dtype=np.int64)  # a copy: `out` may share memory with what was given


def _check_anchors(anchors: Array, lengths: Array) -> None:
    wrong = np.flatnonzero((anchors < 0) | (anchors >= lengths))
    if len(wrong):
        row = int(wrong[0])
        raise SchemaError(
            f"{len(wrong)} of {len(anchors)} anchors are no steps of their trajectories; the first is anchor[{row}], "
            f"{anchors[row]}, of a trajectory of {lengths[row]} steps. Nothing was written; windows may reach beyond a "
            "trajectory, anchors may not."
        )


def _check_late(table: Table, windows: Windows, slots: Array) -> None:
    read = {source for source, _ in reads(table.schema, windows)}
    late = [name for name in table.schema.late if name in read]
    bits = table.schema.late_bits(late) if late else 0
    missing = np.flatnonzero((filled_bits(table._engine.index.arrays, slots) & bits) != bits)
    if len(missing):
        raise SchemaError(
            f"{len(missing)} of {len(slots)} trajectories have no values yet in some of the write-once columns {late}; "
            f"the first is index[{missing[0]}], {slots[missing[0]]}. Nothing was written; Table.fill gives them values."
        )


# ---------------------------------------------------------------- memory of the caller


def _given(windows: Windows, packed: bool, out: Any) -> dict[str, torch.Tensor]:
    """The tensors that the caller gives, name -> tensor, as far as they can be checked without the rows."""
    if out is None:
        return {}
    if not isinstance(out, Mapping) or not all(isinstance(value, torch.Tensor) for value in out.values()):
        raise SchemaError(f"out is {shown(out)}; expected a mapping of names to tensors, or None.")
    computed = [name for name, window in windows.items() if isinstance(window, NStep)]
    names = {*windows} | (set() if packed else {"mask"})
    if computed or not {*windows} <= {*out} <= names:
        why = f", and NStep windows {computed}, which are computed" if computed else ""
        raise SchemaError(
            f"out has {list(out)}{why}; expected a tensor for each window, {list(windows)}, and for nothing else"
            f"{'' if packed else ' but mask'}."
        )
    ends: list[tuple[int, int, str]] = []
    for name, tensor in out.items():
        kind = unreadable(tensor)
        if kind or tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.requires_grad:
            raise SchemaError(
                f"out[{name!r}] is {kind or _described(tensor)}; expected a contiguous tensor on the CPU that needs no "
                "gradient. For a GPU gather into pinned memory and copy that."
            )
        ends.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
    ends.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(ends):
        if begin < end:
            raise SchemaError(
                f"out[{one!r}] and out[{other!r}] share memory; expected tensors that do not overlap."
            )
    return dict(out)


def _check_memory(name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise SchemaError(
            f"out[{name!r}] is {_described(tensor)}; expected {str(dtype).removeprefix('torch.')} {list(shape)}. "
            "Nothing was written."
        )


def _described(tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{kind}{strides}{' that requires a gradient' if tensor.requires_grad else ''}"


# ---------------------------------------------------------------- layouts


def _padded(table: Table, windows: Windows, rows: SelectedRows, given: Mapping[str, torch.Tensor]) -> Batch:
    count, key, known = len(rows), tuple(windows.items()), _known.get(table)
    if known is None or known[0] != key:  # a proxy: the value must not keep its key
        plain = without_late(table.schema, windows)
        layout = PaddedLayout(table.schema, plain, batch_size=0, returns="at once")
        gatherer = RowGather(weakref.proxy(table), layout)
        known = _known[table] = key, layout, gatherer, is_late(table.schema, windows)
    layout, gatherer, late = known[1:]  # this call's; another thread may replace the entry
    kinds = layout.mask_kinds
    if "mask" in given and len(kinds) != 1:
        raise SchemaError(
            "out has mask, and the windows have different ones; expected out without mask, or windows of one span."
        )

    def new(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in given:
            return torch.empty(shape, dtype=dtype, device="cpu")
        squeezes = next(iter(kinds))[1] if name == "mask" else layout.windows[name].squeeze
        _check_memory(name, given[name], (shape[0], *shape[2:]) if squeezes else shape, dtype)
        return given[name].view(shape)

    batch, outputs, _, computed = layout.tensors(new, count, torch.device("cpu"))
    masks = {number: each.mask for number, each in enumerate(outputs) if each.mask is not None}
    gatherer.gather(rows.slots, rows.anchors, lambda: rows.generations, [each.out for each in outputs], masks)
    batch.update(
        {name: torch.from_numpy(part.copy()) for name, part in zip(ROW_KEYS, rows.names, strict=True)}
    )
    for each in computed:
        each.compute(batch["anchor"])
    batch.update(given)
    batch.update(read_ragged(table, layout.ragged, batch))
    if late:
        source = TimedSource(TableSource(table), table.schema, windows, count)
        batch.update(source.read_late(rows, batch))
    return batch


def _packed(table: Table, windows: Windows, rows: SelectedRows, given: Mapping[str, torch.Tensor]) -> Batch:
    layout = PackedLayout(table.schema, windows)
    rows.spans = layout.measure(table, rows)
    total = int(rows.spans[1].sum())
    for name, tensor in given.items():
        column, window = layout.column_of(name), layout.windows[name]
        dtype = converted_dtype(name, window, column) or column.dtype
        first = len(rows) if column.trajectory else total
        _check_memory(name, tensor, (first, *column.shape), dtype)
    mover = PackedHost(layout)
    buffers = PackedBuffers(layout, TensorMemory(torch.device("cpu")), mover, given=given)
    table._engine.reader().read_whole(rows.slots, lambda: mover.fill(buffers, table, rows))
    batch = buffers.rows(len(rows))
    batch.update(read_ragged(table, layout.ragged, batch))
    return batch
