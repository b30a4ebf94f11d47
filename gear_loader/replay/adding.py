"""Rows of n environments, as `ReplayBuffer.add` gets them, checked and appended to a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.replay.ended_rows import EndedRows
from gear_loader.replay.nesting import Nesting, as_array
from gear_loader.storage.casting import cast_to
from gear_loader.storage.schema import Column
from gear_loader.storage.step_columns import StepColumn
from gear_loader.storage.table import Table
from gear_loader.storage.waiting_rows import WaitingRows
from gear_loader.utils.arrays import Array

_STAGED_BYTES, _MOST_ROWS = 4 << 20, 64
"""Most memory for rows that wait, unless one needs more, and most of them."""
_BOOL, _FLOAT, _DOUBLE = np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.float64)


class RowColumn(StepColumn):
    """Checks the rows of one column, and writes them into memory [K, n, *shape].

    Args:
        name: of the column. what: of the values, in errors. column: as in the schema. rows: that memory.
    """

    def __init__(self, name: str, what: str, column: Column, rows: Array) -> None:
        super().__init__(name, column)
        self.what, self.rows, self._many = what, rows, rows.shape[1:]
        # `put` writes the row of the only environment.
        self.view = rows[:, 0] if rows.shape[1] == 1 else self._spare
        self._flat = rows.reshape(len(rows), -1)
        self._zeros = np.zeros_like(self._flat[0])

    def put_rows(self, place: int, value: Any) -> bool:
        """Take a row of each environment, [n, *shape]; return False if it needs `convert`."""
        if type(value) is not np.ndarray or value.shape != self._many:
            return False
        if value.dtype is self._dtype:
            self.rows[place] = value
            return True
        if value.dtype is _DOUBLE and self._dtype is _FLOAT:
            self.rows[place] = value
            return bool(self._flat[place].dot(self._zeros) == 0)  # NaN if one is infinite now, or was NaN
        return False

    def convert(self, place: int, value: Any, *, single: bool) -> None:
        """Take a row of each environment, or of the only one, of whatever can be converted.

        Raises:
            SchemaError: another shape, or a dtype that cannot be cast.
        """
        wanted = self._many[1:] if single else self._many
        self.rows[place] = self._cast(as_array(value), wanted)

    def converted(self, values: Any) -> Array:
        """T rows of the only environment as an array of the column's dtype, [T, *shape]; raises as `convert`."""
        array = as_array(values)
        return self._cast(array, (len(array), *self._many[1:]))

    def _cast(self, array: Array, shape: tuple[int, ...]) -> Array:
        if array.shape != shape:
            raise SchemaError(f"{self.what!r} has the shape {list(array.shape)}; expected {list(shape)}.")
        found: Array = cast_to(array, self._column.dtype_name, repr(self.what))
        return found


class Adder:
    """Appends transitions of n environments to a table, each observation once, and ends trajectories.

    Rows wait until there are enough of them, or `flush` is called: to append many costs little more than one.

    Args:
        table: with the columns of `nestings`, ``reward`` and ``terminated``; those of ``obs`` have final steps.
        nestings: name of a value -> its columns. num_envs: n. piece: most steps of a trajectory.
        waits: whether rows may wait; else each is in the table when `add` has returned.
        waiting: makes the memory of rows that wait, for so many of them; by default that of a writer.
        growing: whether a trajectory can be drawn before it has ended.
    """

    def __init__(
        self,
        table: Table,
        nestings: Mapping[str, Nesting],
        num_envs: int,
        piece: int,
        *,
        waits: bool,
        waiting: Callable[[int], Any] | None = None,
        growing: bool = True,
    ) -> None:
        self.num_envs, self.nestings, self.waits = num_envs, nestings, waits
        schema = table.schema
        row_bytes = num_envs * 2 * schema.step_bytes
        length = min(max(_STAGED_BYTES // row_bytes, 1), _MOST_ROWS)
        self._staged: Any
        if waiting is not None:
            self._staged = waiting(length)
        elif growing:
            writer = table.writers(num_envs, commit_every_step=True)
            self._staged = WaitingRows.of(writer, length, cut=piece, reward="reward")
        else:
            self._staged = EndedRows(table, num_envs, piece)
        staged = self._staged
        self._columns = {
            name: RowColumn(name, name, schema[name], rows) for name, rows in staged.rows.items()
        }
        self._following = {
            name: RowColumn(name, f"next_{name}", schema[name], rows)
            for name, rows in staged.following.items()
        }
        # A value that is one column is looked up at once.
        leaves = [name for name, nesting in nestings.items() if nesting.columns() == [name]]
        self._leaves = {name: self._columns[name] for name in leaves}
        self._next_leaf = self._following["obs"] if "obs" in leaves else None
        self._reward = self._columns["reward"]
        self._terminated = staged.rows["terminated"]
        self._truncated = np.zeros_like(self._terminated)
        self.shape = (num_envs,)

    def flush(self) -> None:
        """Append what waits to the table."""
        staged, count = self._staged, self._staged.count
        if count:
            np.logical_or(self._terminated[:count], self._truncated[:count], out=staged.done[:count])
            staged.append()

    def add(
        self,
        values: Mapping[str, Any],
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        active: Any,
        *,
        single: bool,
    ) -> None:
        """See `ReplayBuffer.add`.

        Args:
            values: as for `nestings`. single: whether values are those of one environment, without a dimension for it.
        """
        leaves, staged = self._leaves, self._staged
        if values.keys() != self.nestings.keys():
            self._check_names(values)
        place = staged.count
        if place == staged.length:  # an error has left them there
            self.flush()
            place = 0
        for name, value in values.items():
            column = leaves.get(name)
            if column is None or not (column.put(place, value) if single else column.put_rows(place, value)):
                self._convert(self._columns, name, place, value, single=single)
        column = self._next_leaf
        if column is None or not (
            column.put(place, next_obs) if single else column.put_rows(place, next_obs)
        ):
            self._convert(self._following, "obs", place, next_obs, single=single)
        column = self._reward
        if not (column.put(place, reward) if single else column.put_rows(place, reward)):
            column.convert(place, reward, single=single)
        shape = self.shape
        if type(terminated) is bool and type(truncated) is bool and single:
            self._terminated[place, 0], self._truncated[place, 0] = terminated, truncated
        else:
            for flags, name, value in (
                (self._terminated, "terminated", terminated),
                (self._truncated, "truncated", truncated),
            ):
                known = type(value) is np.ndarray and value.dtype is _BOOL and value.shape == shape
                flags[place] = value if known else flags_of(name, value, self.num_envs)
        if single:
            staged.active[place, 0] = 1
        if active is not None:
            staged.active[place] = flags_of("active", active, self.num_envs)
        staged.count = place + 1
        if staged.count == staged.length or not self.waits:
            self.flush()

    def extend(
        self,
        values: Mapping[str, Any],
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        active: Any,
    ) -> None:
        """Add T transitions of the only environment; see `ReplayBuffer.extend`.

        Args:
            values: as for `add`, each [T, *shape], as the others.
        """
        self._check_names(values)
        columns, nestings, staged = self._columns, self.nestings, self._staged
        pairs = [
            (columns[c], leaf) for name, each in values.items() for c, leaf in nestings[name].leaves(each)
        ]
        pairs += [(self._following[c], leaf) for c, leaf in nestings["obs"].leaves(next_obs)]
        pairs.append((self._reward, reward))
        parts = [(column.rows, column.converted(leaf)) for column, leaf in pairs]
        count = len(parts[0][1])
        flags = (self._terminated, terminated, "terminated"), (self._truncated, truncated, "truncated")
        parts += [(rows, flags_of(name, each, count)) for rows, each, name in flags]
        if active is not None:
            chosen = flags_of("active", active, count)
            parts = [(rows, array[chosen]) for rows, array in parts]
            count = int(chosen.sum())
        done = 0
        while done < count:
            if staged.count == staged.length:
                self.flush()
            place = staged.count
            upto = min(place + count - done, staged.length)
            for rows, array in parts:
                rows[place:upto, 0] = array[done : done + upto - place]
            staged.active[place:upto] = 1
            done += upto - place
            staged.count = upto
        if staged.count == staged.length or not self.waits:
            self.flush()

    def _check_names(self, values: Mapping[str, Any]) -> None:
        if values.keys() != self.nestings.keys():
            raise SchemaError(
                f"The columns {sorted(values)} were given; expected {sorted(self.nestings)}, as before: "
                f"{sorted(values.keys() ^ self.nestings.keys())}."
            )

    def _convert(
        self, columns: Mapping[str, RowColumn], name: str, place: int, value: Any, *, single: bool
    ) -> None:
        for column, leaf in self.nestings[name].leaves(value):
            columns[column].convert(place, leaf, single=single)


def flags_of(name: str, value: Any, count: int) -> Array:
    """A flag of each environment, bool [n].

    Raises:
        SchemaError: another shape, or numbers that are not whole.
    """
    array = np.atleast_1d(as_array(value))
    if array.shape != (count,) or array.dtype.kind not in "biu":
        raise SchemaError(
            f"{name} has the shape {list(array.shape)} and dtype {array.dtype}; expected bool [{count}]."
        )
    return array.astype(bool)


def count_of(reward: Any, known: int | None) -> tuple[int, bool]:
    """Number of environments of a call, and whether its values are those of one, without a dimension for it.

    Args:
        known: the number of environments, if it is known.

    Raises:
        SchemaError: another number.
    """
    kind = type(reward)
    if kind is float:
        shape: tuple[int, ...] = ()
    elif kind is np.ndarray or isinstance(reward, (torch.Tensor, np.generic)):
        shape = tuple(reward.shape)
    else:
        shape = np.shape(reward)
    count = shape[0] if len(shape) == 1 else 1
    if len(shape) > 1 or count == 0 or (known or count) != count:
        wanted = "a number, or one for each environment" if known is None else f"[{known}]"
        raise SchemaError(f"reward has the shape {list(shape)}; expected {wanted}.")
    return count, not shape
