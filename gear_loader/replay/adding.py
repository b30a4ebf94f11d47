"""Rows of n environments, as `ReplayBuffer.add` gets them, checked and appended to a table."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.native.row_values import RowReader
from gear_loader.replay.nesting import Nesting, as_array
from gear_loader.storage.casting import cast_to
from gear_loader.storage.growing_rows import GrowingRows
from gear_loader.storage.operations.appending import ENDS, UNLESS_RESET
from gear_loader.storage.schema import Column
from gear_loader.storage.step_columns import StepColumn
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, data_address, on_host

_TOGETHER = 256
"""Most rows of the only environment that `extend` appends at once."""


class RowColumn(StepColumn):
    """Checks the rows of one column, and writes them into memory [n, *shape].

    Args:
        name: of the column. what: of the values, in errors. column: as in the schema. rows: that memory.
    """

    def __init__(self, name: str, what: str, column: Column, rows: Array) -> None:
        super().__init__(name, column)
        self.what, self.rows = what, rows
        if len(rows) == 1:
            self.view = rows  # `put` writes the row of the only environment

    def take(self, value: Any, *, single: bool) -> None:
        """Take a row of each environment, or of the only one, of whatever can be converted.

        Raises:
            SchemaError: another shape, or a dtype that cannot be cast.
        """
        if not single:
            self.rows[...] = self._cast(as_array(value), self.rows.shape)
        elif not self.put(0, value):
            self.rows[0] = self._cast(as_array(value), self.rows.shape[1:])

    def converted(self, values: Any) -> Array:
        """T rows of the only environment as a contiguous array of the column's dtype, [T, *shape]; raises as `take`."""
        array = as_array(values)
        return np.ascontiguousarray(self._cast(array, (len(array), *self.rows.shape[1:])))

    def _cast(self, array: Array, shape: tuple[int, ...]) -> Array:
        if array.shape != shape:
            raise SchemaError(f"{self.what!r} has the shape {list(array.shape)}; expected {list(shape)}.")
        found: Array = cast_to(array, self._column.dtype_name, repr(self.what))
        return found


class RowAdder:
    """Appends rows of n environments to a table; what the adders of transitions have in common.

    Args:
        table: some columns of which have final steps. num_envs: n. piece: most steps of a trajectory.
        waits: whether rows may wait in the table until `flush` makes them visible; else that is when `add` returns.
        growing: whether a trajectory can be drawn before it has ended.
        more: of `GrowingRows`.
    """

    def __init__(
        self, table: Table, num_envs: int, piece: int, *, waits: bool, growing: bool = True, **more: Any
    ) -> None:
        self.num_envs = num_envs
        schema = table.schema
        self._writer = table.writers(num_envs, commit_every_step=growing)
        length = _TOGETHER if num_envs == 1 else 1
        self._appending = GrowingRows.of(self._writer, length=length, cut=piece, **more)
        rows, following = (
            {name: _row(schema[name], num_envs) for name in names}
            for names in (self._appending.names, self._appending.finals)
        )
        self._columns = {name: RowColumn(name, name, schema[name], each) for name, each in rows.items()}
        self._following = {
            name: RowColumn(name, f"next_{name}", schema[name], each) for name, each in following.items()
        }
        self._kinds = self._appending.kinds[0]
        self._order: list[RowColumn] = []
        self._found: list[Array] = []
        self._turn = threading.RLock()  # of the threads that flush
        self.waits = waits

    def _use(self, order: list[RowColumn]) -> None:
        """Have the columns in this order; `_found` is where the address of each one's values goes, int64 [1]."""
        growing, following = self._appending, set(map(id, self._following.values()))
        self._order = order
        for column in order:
            table = growing.following if id(column) in following else growing.sources
            place = table[growing.names.index(column.name)]
            place[:] = data_address(column.rows), column.step_bytes, column.step_bytes
            self._found.append(place[:1])

    @property
    def waits(self) -> bool:
        """Whether rows may wait until `flush`."""
        return not self._appending.at_once

    @waits.setter
    def waits(self, value: bool) -> None:
        self._appending.at_once = not value

    def flush(self) -> None:
        """Make all rows visible in the table. Calls of several threads take turns."""
        appending = self._appending
        if not appending.left and not appending.unpublished:
            return
        with self._turn:
            if appending.left:
                appending.resume()
            if self.waits and appending.unpublished:
                appending.publish()

    def _use_memory(self) -> None:
        """Append what the memory holds."""
        for column, found in zip(self._order, self._found, strict=True):
            found[0] = data_address(column.rows)


class Adder(RowAdder):
    """Appends transitions of n environments to a table, each observation once, and ends trajectories.

    Args:
        table: with the columns of `nestings`, ``reward`` and ``terminated``; those of ``obs`` have final steps.
        nestings: name of a value -> its columns. num_envs, piece, more: as for `RowAdder`.
    """

    def __init__(
        self, table: Table, nestings: Mapping[str, Nesting], num_envs: int, piece: int, **more: Any
    ) -> None:
        super().__init__(table, num_envs, piece, reward="reward", **more)
        self.nestings = nestings
        self._truncated = np.zeros(num_envs, dtype=bool)
        self._names = list(nestings)
        # In the order of `_leaves`.
        self._use(
            [
                *(self._columns[column] for nesting in nestings.values() for column in nesting.columns()),
                *(self._columns["reward"], *(self._following[name] for name in nestings["obs"].columns())),
                self._columns["terminated"],
            ]
        )
        memory = [column.rows for column in self._order] + [self._truncated]
        found = [*self._found, None]
        self._reader = RowReader(memory, found, self._kinds, single=1, envs=UNLESS_RESET, ends=ENDS)
        self.plain = len(nestings) == 2 and all(nesting.kind == "leaf" for nesting in nestings.values())

    def quick(self, values: tuple[Any, ...]) -> bool:
        """Add a row, if it needs no other look; return whether it was added.

        Args:
            values: observation, action, other columns, reward, next observation, terminated, truncated.
        """
        appending = self._appending
        if appending.left:
            appending.resume()
        if not self._reader.read(values):
            return False
        try:
            appending.append()
        except BaseException:
            self._keep(values)
            raise
        return True

    def _keep(self, values: tuple[Any, ...]) -> None:
        """Copy values that are not appended, after an error, into memory of this object."""
        if self._appending.left:
            single = self.num_envs == 1 and np.ndim(as_array(values[-2])) == 0
            for column, value in zip(self._order, values, strict=False):
                column.take(value, single=single)
            self._use_memory()

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
        check_names(values, self.nestings)
        nestings = self.nestings
        leaves = [leaf for name in self._names for _, leaf in nestings[name].leaves(values[name])]
        leaves += [reward, *(leaf for _, leaf in nestings["obs"].leaves(next_obs))]
        if active is None and self.quick((*leaves, terminated, truncated)):
            return
        if self._appending.left:
            self._appending.resume()
        given = {str(i): each for i, each in enumerate((*leaves, terminated, truncated, active))}
        *leaves, terminated, truncated, active = on_host(given)[0].values()
        *columns, last = self._order
        for column, leaf in zip(columns, leaves, strict=True):
            column.take(leaf, single=single)
        n = self.num_envs
        last.rows[:], self._truncated[:] = (
            flags_of("terminated", terminated, n),
            flags_of("truncated", truncated, n),
        )
        kinds: Any = 1 if single else UNLESS_RESET
        if active is not None:
            kinds = flags_of("active", active, n).astype(np.int64)
        self._kinds[:] = kinds + ENDS * (last.rows | self._truncated)
        self._use_memory()
        self._appending.append()

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
        check_names(values, self.nestings)
        nestings = self.nestings
        leaves = [leaf for name in self._names for _, leaf in nestings[name].leaves(values[name])]
        leaves += [reward, *(leaf for _, leaf in nestings["obs"].leaves(next_obs))]
        arrays = [column.converted(leaf) for column, leaf in zip(self._order, leaves, strict=False)]
        count = len(arrays[0])
        flags = [
            flags_of(name, each, count)
            for name, each in (("terminated", terminated), ("truncated", truncated))
        ]
        arrays.append(flags[0])
        kinds = 1 + ENDS * (flags[0] | flags[1])
        if active is not None:
            chosen = flags_of("active", active, count)
            arrays, kinds = [array[chosen] for array in arrays], kinds[chosen]
        if self._appending.left:
            self._appending.resume()
        done = 0
        while done < len(kinds):
            upto = min(done + _TOGETHER, len(kinds))
            self._appending.kinds[: upto - done, 0] = kinds[done:upto]
            for found, array in zip(self._found, arrays, strict=True):
                found[0] = data_address(array[done:])
            try:
                self._appending.append(upto - done)
            except BaseException:
                self._appending.drop()
                raise
            done = upto


def _row(column: Column, num_envs: int) -> Array:
    """Zeros for a row of each environment."""
    return np.zeros((num_envs, *column.shape), column.numpy_dtype)


def check_names(values: Mapping[str, Any], nestings: Mapping[str, Nesting]) -> None:
    """Raise SchemaError for columns that are not those of the first call."""
    if values.keys() != nestings.keys():
        raise SchemaError(
            f"The columns {sorted(values)} were given; expected those of the first add, {sorted(nestings)}; missing: "
            f"{sorted(nestings.keys() - values.keys())}, unknown: {sorted(values.keys() - nestings.keys())}."
        )


def flags_of(name: str, value: Any, count: int) -> Array:
    """A flag of each environment, bool [n]; the array itself, if it is one.

    Raises:
        SchemaError: another shape, or numbers that are not whole.
    """
    if type(value) is np.ndarray and value.dtype == np.bool_ and value.shape == (count,):
        return value
    if type(value) is bool and count == 1:
        return np.full(1, value)
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
        wanted = (
            "a number, or one for each environment" if known is None else f"[{known}], as num_envs is {known}"
        )
        if known == 1:
            wanted = "a number or [1]: this buffer has one environment (num_envs, or that of the first add)"
        raise SchemaError(f"reward has the shape {list(shape)}; expected {wanted}.")
    return count, not shape
