"""Values that are overwritten: `Table.set`.

A trajectory has a count of its edits, above the bits of its late columns (`gear_loader.storage.filled_bits`): odd while
one is copied, which happens under the table's lock. Who reads without the lock compares the counts before and after,
and reads once more under the lock if one has changed: `TableReader.read_whole`. Checkpoints compare the same counts.
What a killed process has begun to copy the next one copies: `gear_loader.storage.edit_log`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import FilledError, SchemaError
from gear_loader.storage.dtypes import DtypeName
from gear_loader.storage.edit_log import Runs
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.priority_updates import checked_rows
from gear_loader.storage.schema import Column, Schema
from gear_loader.utils.arrays import Array, numbers
from gear_loader.utils.lazy_torch import is_tensor

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine

_AT_ONCE = 1 << 19
"""Bytes of rows that are copied under the lock at once, unless one row has more."""


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


def check_not_mutable(schema: Schema) -> None:
    """Raise SchemaError for columns that may change in a table that is written to a disk in the background.

    The writer copies column after column, without the lock, so that nobody waits for the disk. If a row were
    overwritten between two columns, a crash before the next write would leave it on disk in part.
    """
    if schema.mutable:
        raise SchemaError(
            f"The columns {list(schema.mutable)} have mutable=True, and disk was given; expected one of both: what is "
            "written in the background could have new values in one column of a row, and old ones in another, after a "
            "crash. Leave out disk, and call Table.save, which writes what was changed at one moment."
        )


def set_columns(
    engine: Engine,
    index: Any,
    anchor: Any,
    generation: Any,
    mask: Any,
    columns: Mapping[str, Any],
    *,
    strict: bool,
) -> int:
    """See `Table.set`."""
    return set_rows(
        engine, checked_edits(engine.schema, index, anchor, generation, mask, columns), strict=strict
    )


def set_rows(engine: Engine, edits: Edits, *, strict: bool) -> int:
    """`set_columns` of arguments that were checked."""
    if not len(edits.slots):
        return 0
    call = _SetCall(engine, edits.slots, edits.generations, edits.values, strict)
    return engine.region.fill_lock.run(call.run)


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


@dataclasses.dataclass
class _SetCall:
    """One call of `set_columns`, which holds the lock of those who write into trajectories of the table."""

    engine: Engine
    slots: Array
    generations: Array
    values: list[EditValues]
    strict: bool

    def run(self) -> int:
        """Write the rows; return the number of stale ones."""
        locked = self.engine.index.recovery.locked
        locked(self._check)
        sizes = np.sum([each.data[0].size for each in self.values])
        rows = max(1, _AT_ONCE // max(1, int(sizes)))
        done = 0
        for begin in range(0, len(self.slots), rows):
            chosen = np.arange(begin, min(begin + rows, len(self.slots)))
            done += locked(functools.partial(self._write, chosen))
        return len(self.slots) - done

    def _check(self) -> None:
        """Raise unless all live rows can be written; the caller holds the lock."""
        arrays, schema = self.engine.index.arrays, self.engine.schema
        live = arrays.live_rows(self.slots, self.generations, strict=self.strict, what="values are of")
        rows = np.flatnonzero(live)
        slots = self.slots[rows]
        lengths = arrays.extent[slots, 0]
        for each in self.values:
            steps = each.steps[rows]
            outside = each.given[rows] & ((steps < 0) | (steps >= lengths[:, None]))
            if outside.any():
                row, step = (int(part[0]) for part in np.nonzero(outside))
                raise SchemaError(
                    f"Column {each.name!r} has a value for step {steps[row, step]} of row {rows[row]}, whose "
                    f"trajectory has {lengths[row]} steps; expected values of its steps, or a mask that leaves out the "
                    "others. Nothing was changed."
                )
        bits = schema.late_bits([each.name for each in self.values])
        missing = np.flatnonzero((filled_bits(arrays, slots) & bits) != bits) if bits else rows[:0]
        if len(missing):
            raise FilledError(
                f"The trajectory of index {slots[missing[0]]} has no values yet in some of the columns "
                f"{[each.name for each in self.values]}; Table.fill gives it the first ones. Nothing was changed."
            )

    def _write(self, rows: Array) -> int:
        """Write those of the rows (int64 [m]) that are live, and return their number; the caller holds the lock."""
        index = self.engine.index
        live = index.arrays.live_rows(self.slots[rows], self.generations[rows], strict=False, what="")
        rows = rows[live]
        slots = self.slots[rows]
        columns = [each.runs(self.engine.schema, rows, slots) for each in self.values]
        index.edit_log.write([each for each in columns if each.where.size])
        return len(rows)
