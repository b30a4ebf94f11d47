"""Columns that are filled after their trajectory was added; see `Table.fill`.

A trajectory has one bit for each late column, in the index. It is set after the bytes are written, under the lock: a
process that dies before leaves the column unfilled, and no reader reads the bytes of an unfilled column. The bits carry
the generation of the slot, so that those of an earlier trajectory in the slot do not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gear_loader.errors import FilledError, SchemaError
from gear_loader.native.copying import copy_rows
from gear_loader.storage.counters import NUM_TOUCHED, VERSION
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations import begin_change, end_change
from gear_loader.storage.priority_updates import checked_rows
from gear_loader.storage.schema import Column, Schema, as_mapping
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.storage.table import Table

__all__ = ["fill_columns", "filled_bits", "set_filled", "unfilled"]


def filled_bits(arrays: IndexArrays, slots: Array) -> Array:
    """Bits of the late columns that are filled, int64 [n], of the trajectories in `slots`, int64 [n].

    Takes no lock; the caller holds it, or reads the columns under a read ticket.
    """
    if not len(arrays.filled):
        return np.zeros(len(slots), dtype=np.int64)
    bits: Array = np.where(
        arrays.filled[slots, 0] == arrays.generation[slots], arrays.filled[slots, 1], np.int64(0)
    )
    return bits


def set_filled(arrays: IndexArrays, slots: Array, bits: Array | int) -> None:
    """Set bits of late columns, int64 [n] or one for all. The caller holds the lock and has written the bytes."""
    new = slots[arrays.filled[slots, 0] != arrays.generation[slots]]
    # In this order: bits of an earlier trajectory never count for this one.
    arrays.filled[new, 1] = 0
    arrays.filled[new, 0] = arrays.generation[new]
    arrays.filled[slots, 1] |= bits


def unfilled(table: Table, columns: Sequence[str]) -> tuple[Array, Array]:
    """See `Table.unfilled`."""
    names = list(columns) or list(table.schema.late)
    _check_late(table.schema, names)
    snapshot = table.reader().snapshot()
    wanted = table.schema.late_bits(names)
    missing = (filled_bits(table.index.arrays, snapshot.slots) & wanted) != wanted
    return snapshot.slots[missing], snapshot.generations[missing]


@dataclasses.dataclass(frozen=True)
class _Values:
    """Values of one column for n trajectories.

    Attributes:
        name, column: of the table.
        data: uint8 [rows, step_bytes].
        lengths: int64 [n], rows of each trajectory in `data`.
    """

    name: str
    column: Column
    data: Array
    lengths: Array


def fill_columns(
    table: Table, index: Any, generation: Any, columns: Mapping[str, Any], *, strict: bool
) -> int:
    """See `Table.fill`."""
    _check_late(table.schema, list(columns))
    starts: Any = None
    single = isinstance(index, (int, np.integer)) or (isinstance(index, torch.Tensor) and index.ndim == 0)
    batch = as_mapping(index)
    if isinstance(batch, Mapping):
        if generation is not None or "index" not in batch or "generation" not in batch:
            raise SchemaError(
                f"A mapping with the keys {list(batch)} was received as index; expected a whole batch alone, or "
                "batch['index'] with generation. Nothing was changed."
            )
        index, generation, starts = batch["index"], batch["generation"], batch.get("cu_seqlens")
    elif single:
        index = [int(index)]
        generation = None if generation is None else np.asarray(generation).reshape(-1)
        columns = {
            name: value if table.schema[name].trajectory else [value] for name, value in columns.items()
        }
    slots, generations = checked_rows(index, generation)
    values = [
        _values(name, table.schema[name], value, len(slots), starts, single)
        for name, value in columns.items()
    ]
    bits = table.schema.late_bits(columns)
    if not len(slots):
        return 0
    return table.index.recovery.locked(lambda: _fill(table, slots, generations, values, bits, strict))


def _check_late(schema: Schema, names: list[str]) -> None:
    wrong = [name for name in names if name not in schema.late]
    if wrong or not names:
        raise SchemaError(
            f"The columns {names} were received; expected one or more of those with Column(late=True): "
            f"{list(schema.late)}. Nothing was changed."
        )


def _values(name: str, column: Column, value: Any, count: int, starts: Any, single: bool) -> _Values:
    """Check the values of one column."""
    plain = Schema({name: Column(column.dtype, column.shape, cast=column.cast)})
    if column.trajectory:
        if single:
            whole = Schema({"step": Column(torch.bool), name: dataclasses.replace(column, late=False)})
            data = whole.validate_once({name: value}, what="the values")[name]
        else:
            data = plain.validate({name: value}, what="the values")[1][name]
        if len(data) != count:
            raise SchemaError(
                f"Column {name!r} has {len(data)} values for {count} trajectories; expected one for each, as it is per "
                "trajectory. Nothing was changed."
            )
        return _Values(name, column, data, np.ones(count, dtype=np.int64))
    if isinstance(value, (list, tuple)) and len(value) == count:
        parts = [
            plain.validate({name: each}, what=f"the values of trajectory {i}")[1][name]
            for i, each in enumerate(value)
        ]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return _Values(name, column, parts[0] if count == 1 else np.concatenate(parts), lengths)
    if starts is None:
        raise SchemaError(
            f"Column {name!r} is {type(value).__name__}; expected a list of {count} arrays [T, ...], one for each "
            "trajectory; or [total, ...] with a packed batch as index. Nothing was changed."
        )
    data = plain.validate({name: value}, what="the values")[1][name]
    bounds: Array = np.asarray(starts).astype(np.int64)
    lengths = bounds[1:] - bounds[:-1]
    if len(lengths) != count or lengths.sum() != len(data):
        raise SchemaError(
            f"Column {name!r} has {len(data):,} steps; expected {lengths.sum():,}, as the batch has. Nothing was "
            "changed."
        )
    return _Values(name, column, data, lengths)


def _fill(
    table: Table, slots: Array, generations: Array, values: list[_Values], bits: int, strict: bool
) -> int:
    """Write values and set the bits, or raise. The caller holds the lock.

    Returns:
        Number of stale rows.
    """
    arrays = table.index.arrays
    rows = np.flatnonzero(arrays.live_rows(slots, generations, strict=strict, what="rows are of"))
    chosen = slots[rows]
    _check_unfilled(table.schema, arrays, chosen, bits)
    for each in values:
        if each.column.trajectory:
            continue
        wrong = np.flatnonzero(each.lengths[rows] != arrays.extent[chosen, 0])
        if len(wrong):
            row, slot = rows[wrong[0]], chosen[wrong[0]]
            raise SchemaError(
                f"Column {each.name!r} has {each.lengths[row]:,} steps for row {row}; expected "
                f"{arrays.extent[slot, 0]:,}, as the trajectory of index {slot} has. Nothing was changed."
            )
    if not len(rows):
        return len(slots) - len(rows)
    for each in values:
        _write(table, each, rows, chosen)
    begin_change(arrays.view)
    set_filled(arrays, chosen, bits)
    first = int(arrays.counters[NUM_TOUCHED])
    arrays.touched[np.arange(first, first + len(chosen)) % arrays.num_slots] = chosen
    arrays.counters[NUM_TOUCHED] = first + len(chosen)
    arrays.counters[VERSION] += 1
    end_change(arrays.view)
    return len(slots) - len(rows)


def _check_unfilled(schema: Schema, arrays: IndexArrays, slots: Array, bits: int) -> None:
    found = filled_bits(arrays, slots) & bits
    if found.any():
        row = int(np.flatnonzero(found)[0])
        names = [name for i, name in enumerate(schema.late) if found[row] >> i & 1]
        raise FilledError(
            f"The trajectory of index {slots[row]} has {names} already; a late column is filled once. Nothing was "
            "changed."
        )
    different, first = np.unique(slots, return_index=True)
    if len(different) != len(slots):
        row = int(np.setdiff1d(np.arange(len(slots)), first)[0])
        raise FilledError(
            f"Index {slots[row]} was given twice; a late column is filled once. Nothing was changed."
        )


def _write(table: Table, values: _Values, rows: Array, slots: Array) -> None:
    """Copy the values of these rows into the blocks of their trajectories."""
    arrays, layout = table.index.arrays, table.region.layout
    place = layout.columns[values.name]
    column = np.array(
        [
            table.region.column(values.name).ctypes.data,
            place.block_stride,
            place.step_bytes,
            place.step_stride,
            layout.block_steps,
        ],
        dtype=np.int64,
    )
    ends = np.cumsum(values.lengths)
    first = (ends - values.lengths)[rows]
    ends = ends[rows]
    counts = np.ones(len(rows), dtype=np.int64)
    if not values.column.trajectory:
        counts = -(-values.lengths[rows] // layout.block_steps)
    places = np.cumsum(counts) - counts
    starts = np.repeat(arrays.extent[slots, 1] - places, counts)
    ids = arrays.ids_at(starts + np.arange(len(starts)))
    data = np.ascontiguousarray(values.data)
    copy_rows(data.ctypes.data, 0, data.size, first, ends, places, ids, column, True)
