"""Values of columns that are filled later, as a user gives them; checked without a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.dtypes import DtypeName
from gear_loader.storage.priority_updates import checked_rows
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.ragged_input import StepValues, with_step_records
from gear_loader.storage.schema import Column, Schema, as_mapping
from gear_loader.utils.arrays import Array, numbers, shown, unreadable
from gear_loader.utils.lazy_torch import is_tensor


@dataclasses.dataclass(frozen=True)
class LateValues:
    """Values of one column for n trajectories.

    Attributes:
        name, column: of the table.
        data: uint8 [rows, step_bytes].
        lengths: int64 [n], rows of each trajectory in `data`.
        ragged: the values, if `data` are records of them, to be completed; else None.
    """

    name: str
    column: Column
    data: Array
    lengths: Array
    ragged: StepValues | None = None

    @property
    def value_bytes(self) -> int:
        """Bytes of the ragged values."""
        return 0 if self.ragged is None else int(self.ragged.parts[0].sum())

    @property
    def sizes(self) -> Array:
        """Bytes of the values of each trajectory, int64 [n]."""
        fixed = self.lengths * self.column.step_bytes
        if self.ragged is None:
            return fixed
        sums = np.concatenate(([0], np.cumsum(self.ragged.parts[0, 0])))
        return fixed + np.diff(sums[np.concatenate(([0], np.cumsum(self.lengths)))])

    def part(self, low: int, high: int) -> LateValues:
        """The values of trajectories `low` to `high`."""
        ends = np.cumsum(self.lengths)
        which = slice(int(ends[low] - self.lengths[low]), int(ends[high - 1]))
        ragged = self.ragged
        if ragged is not None:
            ragged = ragged._replace(parts=ragged.parts[:, :, which], records=ragged.records[:, which])
        return LateValues(self.name, self.column, self.data[which], self.lengths[low:high], ragged)


def check_late(schema: Schema, names: list[str]) -> None:
    """Raise SchemaError unless these are names of write-once columns, at least one."""
    wrong = [name for name in names if not isinstance(name, str) or name not in schema.late]
    if wrong or not names:
        raise SchemaError(
            f"The columns {shown(names)} were received; expected one or more of those with Column(late=True): "
            f"{list(schema.late)}. Nothing was changed."
        )


def checked_fill(
    schema: Schema, index: Any, generation: Any, columns: Mapping[str, Any]
) -> tuple[Array, Array, list[LateValues]]:
    """Check the arguments of `Table.fill`.

    Returns:
        Slots and generations of the rows, int64 [n] each, and the values of each column.

    Raises:
        SchemaError: they do not fit the schema.
    """
    check_late(schema, list(columns))
    starts: Any = None
    single = (
        np.ndim(index) == 0 and not isinstance(index, bool)
        if isinstance(index, (int, np.integer, np.ndarray))
        else (is_tensor(index) and unreadable(index) is None and index.ndim == 0)
    )
    batch = as_mapping(index)
    if isinstance(batch, Mapping):
        if generation is not None or "index" not in batch or "generation" not in batch:
            raise SchemaError(
                f"A mapping with the keys {list(batch)} was received as index; expected a whole batch alone, or "
                "batch['index'] with generation. Nothing was changed."
            )
        index, generation, starts = batch["index"], batch["generation"], batch.get("cu_seqlens")
    elif single:
        index = numbers(index, "index", "iu", "an integer or integers [n]").reshape(1)
        generation = (
            None if generation is None else numbers(generation, "generation", "iu", "an integer").reshape(-1)
        )
        columns = {name: value if schema[name].trajectory else [value] for name, value in columns.items()}
    slots, generations = checked_rows(index, generation)
    values = [
        _values(name, schema[name], value, len(slots), starts, single) for name, value in columns.items()
    ]
    return slots, generations, values


def _values(name: str, column: Column, value: Any, count: int, starts: Any, single: bool) -> LateValues:
    """Check the values of one column."""
    if isinstance(value, LateValues):  # which were checked as they were received
        return value
    if column.ragged is not None:
        return _ragged_values(name, column, value, count, starts, single)
    dtype: Any = DtypeName(column.dtype_name)  # which loads no torch
    plain = Schema({name: Column(dtype, column.shape, cast=column.cast)})
    if column.trajectory:
        if single:
            once = Column(dtype, column.shape, per="trajectory", cast=column.cast)
            whole = Schema({f"{name} of a step": Column(dtype), name: once})  # a schema has a column of steps
            data = whole.validate_once({name: value}, what="the values")[name]
        else:
            data = plain.validate({name: value}, what="the values")[1][name]
        if len(data) != count:
            raise SchemaError(
                f"Column {name!r} has {len(data)} values for {count} trajectories; expected one for each, as it is per "
                "trajectory. Nothing was changed."
            )
        return LateValues(name, column, data, np.ones(count, dtype=np.int64))
    if isinstance(value, (list, tuple)) and len(value) == count:
        parts = [
            plain.validate({name: each}, what=f"the values of trajectory {i}")[1][name]
            for i, each in enumerate(value)
        ]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return LateValues(name, column, parts[0] if count == 1 else np.concatenate(parts), lengths)
    if starts is None:
        raise SchemaError(
            f"Column {name!r} is {type(value).__name__}; expected a list of {count} arrays [T, ...], one for each "
            "trajectory; or [total, ...] with a packed batch as index. Nothing was changed."
        )
    data = plain.validate({name: value}, what="the values")[1][name]
    return LateValues(name, column, data, _packed_lengths(name, starts, count, len(data)))


def _packed_lengths(name: str, starts: Any, count: int, total: int) -> Array:
    """Steps of each trajectory in values of a packed batch, int64 [count]."""
    bounds = numbers(starts, "cu_seqlens", "iu", "integers [n + 1], as the batch has").astype(np.int64)
    lengths: Array = bounds[1:] - bounds[:-1]
    if len(lengths) != count or lengths.sum() != total:
        raise SchemaError(
            f"Column {name!r} has {total:,} steps; expected {lengths.sum():,}, as the batch has. Nothing was "
            "changed."
        )
    return lengths


def _ragged_values(
    name: str, column: Column, value: Any, count: int, starts: Any, single: bool
) -> LateValues:
    """`_values` of a ragged column."""
    assert column.ragged is not None
    coded = column.ragged.coded is not None
    packed = starts is not None and (column.ragged.kind == "object" or not _is_listed(value, count, coded))
    whole = column.trajectory or packed
    if column.trajectory and single:
        value = [value]
    parts = [value] if whole else value
    if not whole and not _is_listed(value, count, coded):
        raise SchemaError(
            f"Column {name!r} is {shown(value)}; expected a list of {count} lists of values, one for each trajectory. "
            "Nothing was changed."
        )
    found = []
    for i, part in enumerate(parts):
        what = "the values" if whole else f"the values of trajectory {i}"
        records, values = with_step_records({name: column}, {name: part}, what, by_lane=False)
        assert values is not None
        found.append(values)
    lengths: Array = np.array([each.parts.shape[2] for each in found], dtype=np.int64)
    parts = np.concatenate([each.parts for each in found], axis=2)
    records = np.concatenate([each.records[0] for each in found])
    if column.trajectory:
        lengths = np.ones(len(records), dtype=np.int64)
        if len(records) != count:
            raise SchemaError(
                f"Column {name!r} has {len(records)} values for {count} trajectories; expected one for each, as it is "
                "per trajectory. Nothing was changed."
            )
    elif whole:
        lengths = _packed_lengths(name, starts, count, len(records))
    ragged = StepValues(parts, records[None], False, [each.hold for each in found])
    return LateValues(name, column, records.view(np.uint8), lengths, ragged)


def _is_listed(value: Any, count: int, coded: bool) -> bool:
    """Whether these are `count` lists of values (or arrays of values that are encoded), and not one list of values."""
    listed = isinstance(value, (list, tuple)) and len(value) == count
    kinds: Any = (list, tuple, Ragged, np.ndarray) if coded else (list, tuple, Ragged)
    return listed and all(
        isinstance(each, kinds) or _is_nested(each) or (coded and is_tensor(each)) for each in value
    )


def _is_nested(value: Any) -> bool:
    return bool(is_tensor(value) and value.is_nested)
