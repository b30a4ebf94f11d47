"""Rows of n environments, as `ReplayBuffer.add` gets them, checked and appended to a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.replay.nesting import Nesting, as_array
from gear_loader.storage.casting import cast_to
from gear_loader.storage.schema import Column
from gear_loader.storage.step_columns import StepColumn
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, data_address

_LARGE = 1 << 15
"""Bytes of the rows of a column from which on they are read where they are, if they can be."""
_BOOL, _FLOAT, _DOUBLE = np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.float64)
_NO_SOURCE: Array = np.zeros(2, dtype=np.int64)


class RowColumn(StepColumn):
    """Checks the rows of one column, and writes them into memory [n, *shape].

    Args:
        name: of the column. what: of the values, in errors. column: as in the schema. rows: that memory.
        source: int64 [2], of which the first number is the address of the rows.
    """

    def __init__(
        self, name: str, what: str, column: Column, rows: Array, source: Array = _NO_SOURCE
    ) -> None:
        super().__init__(name, column)
        self.view, self.what, self._source = rows, what, source
        self._many = rows.shape
        self._flat = rows.reshape(-1)
        self._zeros = np.zeros_like(self._flat)
        self._in_place = source is not _NO_SOURCE and len(rows) > 1 and rows.nbytes >= _LARGE
        self.now = rows
        """The rows that `put_rows` got last, or the memory with them."""

    def put_rows(self, value: Any) -> bool:
        """Take rows [n, *shape]; return False, having done nothing, if they need `convert`."""
        if type(value) is not np.ndarray or value.shape != self._many:
            return False
        if value.dtype is self._dtype:
            if self._in_place and value.flags.c_contiguous:
                self._source[0], self.now = data_address(value), value
                return True
            self._settle()
            self.view[...] = value
            return True
        if value.dtype is _DOUBLE and self._dtype is _FLOAT and not self._in_place:
            self.view[...] = value
            return bool(self._flat.dot(self._zeros) == 0)  # NaN if a value is infinite now, or was NaN
        return False

    def _settle(self) -> None:
        """Read the rows from the own memory."""
        if self._in_place:
            self._source[0], self.now = data_address(self.view), self.view

    def convert(self, value: Any, *, single: bool) -> None:
        """Take rows, or the row of the only environment, of whatever can be converted.

        Raises:
            SchemaError: another shape, or a dtype that cannot be cast.
        """
        array = as_array(value)
        wanted = self._many[1:] if single else self._many
        if array.shape != wanted:
            raise SchemaError(
                f"{self.what!r} has the shape {list(array.shape)}; expected {list(wanted)}."
            )
        found = cast_to(array, self._column.dtype_name, repr(self.what))
        self._settle()
        self.view[...] = found


class Adder:
    """Appends transitions of n environments to a table, each observation once, and ends trajectories.

    Args:
        table: with the columns of `nestings`, ``reward`` and ``terminated``; those of ``obs`` have final steps.
        nestings: name of a value -> its columns. num_envs: n. piece: most steps of a trajectory.
    """

    def __init__(self, table: Table, nestings: Mapping[str, Nesting], num_envs: int, piece: int) -> None:
        self.num_envs, self.nestings = num_envs, nestings
        self._writer = table.writers(num_envs, commit_every_step=True)
        self._staged = staged = self._writer.staged(piece)
        schema = table.schema
        self._columns = {
            name: RowColumn(name, name, schema[name], rows, staged.row_sources[name])
            for name, rows in staged.rows.items()
        }
        self._following = {
            name: RowColumn(name, f"next_{name}", schema[name], rows, staged.following_sources[name])
            for name, rows in staged.following.items()
        }
        # A value that is one column is looked up at once.
        leaves = [name for name, nesting in nestings.items() if nesting.columns() == [name]]
        self._leaves = {name: self._columns[name] for name in leaves}
        self._next_leaf = self._following.get("obs") if "obs" in leaves else None
        self._reward = self._columns["reward"]
        self._terminated = staged.rows["terminated"]
        self._truncated = np.zeros(num_envs, dtype=bool)
        self._partly = False  # whether an environment was not active in the last call
        self._over: Array | None = None  # which environments have ended in the last call, int64 [k]
        self._last: dict[str, Array] = {}  # what followed their last steps, [k, *shape]

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
        leaves, nestings = self._leaves, self.nestings
        if len(values) != len(nestings) or values.keys() != nestings.keys():
            raise SchemaError(
                f"The columns {sorted(values)} were given; expected {sorted(nestings)}, as before: "
                f"{sorted(values.keys() ^ nestings.keys())}."
            )
        for name, value in values.items():
            column = leaves.get(name)
            if column is None or not (column.put(0, value) if single else column.put_rows(value)):
                self._convert(self._columns, name, value, single)
        column = self._next_leaf
        if column is None or not (column.put(0, next_obs) if single else column.put_rows(next_obs)):
            self._convert(self._following, "obs", next_obs, single)
        column = self._reward
        if not (column.put(0, reward) if single else column.put_rows(reward)):
            column.convert(reward, single=single)
        staged = self._staged
        _put_flags(self._terminated, "terminated", terminated)
        _put_flags(self._truncated, "truncated", truncated)
        np.logical_or(self._terminated, self._truncated, out=staged.done)
        if active is not None:
            _put_flags(staged.active, "active", active)
            self._partly = True
        elif self._over is not None and not single:
            staged.active[:] = True
            staged.active[self._over[self._resets(self._over)]] = False
            self._partly = True
        elif self._partly:
            staged.active[:] = True
            self._partly = False
        ended = staged.append()
        self._over = None
        if ended:
            self._over = np.flatnonzero(staged.done & staged.active)
            self._last = {name: column.now[self._over] for name, column in self._following.items()}

    def _convert(
        self, columns: Mapping[str, RowColumn], name: str, value: Any, single: bool
    ) -> None:
        for column, leaf in self.nestings[name].leaves(value):
            columns[column].convert(leaf, single=single)

    def _resets(self, over: Array) -> Array:
        """Which of the environments that had ended only reset with these rows, bool [k]."""
        same = (self._reward.view[over] == 0) & ~self._staged.done[over]
        for name, last in self._last.items():
            rows = self._columns[name].now[over]
            equal = (rows == last) | ((rows != rows) & (last != last))  # NaN is NaN
            same &= equal.reshape(len(over), -1).all(1)
        return same


def _put_flags(out: Array, name: str, value: Any) -> None:
    """Write what `flags_of` accepts into bool [n]."""
    kind = type(value)
    if (kind is bool or kind is np.bool_) and len(out) == 1:
        out[0] = value
    elif kind is np.ndarray and value.dtype is _BOOL and value.shape == out.shape:
        out[:] = value
    else:
        out[:] = flags_of(name, value, len(out))


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
    if kind is float or kind is int:
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
