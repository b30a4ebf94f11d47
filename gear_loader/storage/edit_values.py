"""The arguments of `Table.set`, checked without the table: clients of a server load no compiled code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.dtypes import DtypeName
from gear_loader.storage.priority_updates import checked_rows
from gear_loader.storage.schema import Column, Schema
from gear_loader.utils.arrays import Array, numbers
from gear_loader.utils.lazy_torch import is_tensor


class Runs(NamedTuple):
    """Runs of consecutive steps of one column that are overwritten, in order.

    Attributes:
        column: its number in `Schema.mutable`. where: int64 [3, n], of each run trajectory, first step and number of
            steps. values: uint8 [m, step_bytes]. chosen: int64 [steps], which of the values are those of the runs; ()
            of a log that was read.
    """

    column: int
    where: Array
    values: Array
    chosen: Array | tuple[()] = ()

    @property
    def size(self) -> int:
        """Bytes of the values that are written."""
        return len(self.chosen) * int(self.values.shape[-1])


@dataclasses.dataclass(frozen=True)
class EditValues:
    """Values of one column for n rows.

    Attributes:
        name: of the column. data: uint8 [n, L, step_bytes]. steps: int64 [n, L]. given: bool [n, L], those to write.
    """

    name: str
    data: Array
    steps: Array
    given: Array

    def runs(self, schema: Schema, rows: Array, slots: Array) -> Runs:
        """What is to be written of `rows`, int64 [m], whose trajectories are `slots`."""
        given = self.given[rows]
        row, at = np.nonzero(given)
        begins = np.ones(len(row), dtype=bool)
        begins[1:] = (np.diff(row) != 0) | (np.diff(at) != 1)
        first = np.flatnonzero(begins)
        counts = np.diff(np.append(first, len(row)))
        where = np.stack((slots[row[first]], self.steps[rows][row[first], at[first]], counts))
        steps = rows[row] * given.shape[1] + at
        return Runs(schema.mutable.index(self.name), where, self.data.reshape(-1, self.data.shape[-1]), steps)


@dataclasses.dataclass(frozen=True)
class Edits:
    """The checked arguments of `Table.set`.

    Attributes:
        slots, generations, anchors: int64 [n]. mask: bool [n, L], or None. values: of each column.
    """

    slots: Array
    generations: Array
    anchors: Array
    mask: Array | None
    values: list[EditValues]

    def take(self, rows: Array | slice) -> Edits:
        """Some of the rows."""
        mask = None if self.mask is None else self.mask[rows]
        values = [
            dataclasses.replace(each, data=each.data[rows], steps=each.steps[rows], given=each.given[rows])
            for each in self.values
        ]
        return Edits(self.slots[rows], self.generations[rows], self.anchors[rows], mask, values)


def checked_edits(
    schema: Schema, index: Any, anchor: Any, generation: Any, mask: Any, columns: Mapping[str, Any]
) -> Edits:
    """Check the arguments of `Table.set`, without the table.

    Raises:
        SchemaError: they do not fit the schema.
    """
    wrong = [name for name in columns if name not in schema.mutable]
    if wrong or not columns:
        raise SchemaError(
            f"The columns {list(columns)} were received; expected one or more of those with Column(mutable=True): "
            f"{list(schema.mutable)}. Nothing was changed."
        )
    single = index.ndim == 0 if is_tensor(index) else np.ndim(index) == 0
    slots, generations = checked_rows(index, generation)
    anchors = np.atleast_1d(numbers(anchor, "anchor", "iu", "integers [n]. Nothing was changed")).astype(
        np.int64
    )
    if anchors.shape != slots.shape:
        raise SchemaError(
            f"anchor has the shape {list(anchors.shape)}; expected {list(slots.shape)}, as index has. Nothing was "
            "changed."
        )
    flags = None if mask is None else np.array(numbers(mask, "mask", "b", "bool [n, L]. Nothing was changed"))
    values = [
        _values(name, schema[name], value, anchors, flags, single=single) for name, value in columns.items()
    ]
    return Edits(slots, generations, anchors, None if flags is None else values[0].given, values)


def _values(
    name: str, column: Column, value: Any, anchors: Array, flags: Array | None, *, single: bool
) -> EditValues:
    """Check the values of one column."""
    count, inner = len(anchors), len(column.shape)
    value = value if is_tensor(value) or isinstance(value, np.ndarray) else np.asarray(value)
    shape = (1, *value.shape) if single else tuple(value.shape)
    length = shape[1] if len(shape) == inner + 2 else 1
    if (
        len(shape) not in (inner + 1, inner + 2)
        or shape[0] != count
        or shape[len(shape) - inner :] != column.shape
    ):
        wanted = ", ".join(map(str, column.shape))
        raise SchemaError(
            f"Column {name!r} has the shape {list(shape)}; expected [{count}, L, {wanted}] for L steps from each "
            f"anchor on, or [{count}, {wanted}] for one. Nothing was changed."
        )
    dtype: Any = DtypeName(column.dtype_name)  # which loads no torch
    plain = Schema({name: Column(dtype, column.shape, cast=column.cast)})
    steps = anchors[:, None] + np.arange(length)
    given = np.ones(steps.shape, dtype=bool)
    if flags is not None:
        flags = flags[None] if single and flags.ndim == 1 else flags
        flags = flags[:, None] if flags.ndim == 1 and length == 1 else flags
        if flags.shape != given.shape:
            raise SchemaError(
                f"mask has the shape {list(flags.shape)}; expected {list(given.shape)}, a value for each step of "
                f"{name!r}. Nothing was changed."
            )
        given = flags
    if not steps.size:
        return EditValues(name, np.empty((*steps.shape, column.step_bytes), dtype=np.uint8), steps, given)
    flat = value.reshape((count * length, *column.shape))
    data = plain.validate({name: flat}, what="the values")[1][name]
    return EditValues(name, data.reshape(count, length, -1), steps, given)
