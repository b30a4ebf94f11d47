"""Rows of n environments with values of any length, as `ReplayBuffer.add` gets them, appended to a table.

Ragged columns have no final steps. So what follows the last row of a trajectory is a row of its own, with zeros in the
other columns: a row is drawn if the next one is there (``Draws(complete=True)``), and this one never is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.replay.adding import RowColumn, check_names, flags_of
from gear_loader.replay.nesting import Nesting, as_array
from gear_loader.storage.casting import cast_to
from gear_loader.storage.dtypes import NUMPY_DTYPES
from gear_loader.storage.operations.extents import FIRST, GRAIN, HEADER
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, shown


class ValueColumn:
    """Checks the values of one ragged column, one for each environment.

    Args:
        what: of the values, in errors. column: as in the schema. num_envs: n.

    Attributes:
        rows: the values, n of them. blank: an empty one.
    """

    def __init__(self, what: str, column: Column, num_envs: int) -> None:
        assert column.ragged is not None
        self.what, self._values = what, column.ragged
        self._kind: Any = {"str": str, "bytes": bytes}.get(self._values.kind)
        dtype = NUMPY_DTYPES.get(self._values.dtype_name)
        self.blank: Any = self._kind() if self._kind else np.zeros((0, *self._values.shape), dtype)
        self.rows: list[Any] = [self.blank] * num_envs

    def take(self, value: Any, *, single: bool) -> None:
        """Take a value of each environment, or of the only one; copies arrays.

        Raises:
            SchemaError: another number of values, type, shape, or a dtype that cannot be cast.
        """
        values, n = [value] if single else value, len(self.rows)
        if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != n:
            raise SchemaError(
                f"{self.what!r} is {shown(value)}; expected a list of {n} values, one for each environment."
            )
        self.rows = [self._text(each) if self._kind else self._array(each) for each in values]

    def sizes(self) -> list[int]:
        """Bytes of each value."""
        if self._kind is None:
            return [each.nbytes for each in self.rows]
        return [len(each.encode() if isinstance(each, str) else each) for each in self.rows]

    def _text(self, value: Any) -> Any:
        if not isinstance(value, self._kind):
            raise SchemaError(f"{self.what!r} is {shown(value)}; expected {self._kind.__name__}.")
        return self._kind(value)

    def _array(self, value: Any) -> Array:
        array, shape = as_array(value), self._values.shape
        if not len(array.reshape(-1)):
            return self.blank  # type: ignore[no-any-return]
        if array.ndim != 1 + len(shape) or array.shape[1:] != shape:
            raise SchemaError(
                f"{self.what!r} has the shape {list(array.shape)}; expected [{', '.join(map(str, ('n', *shape)))}], of "
                "any n."
            )
        return np.array(cast_to(array, self._values.dtype_name, repr(self.what)))


class ValueAdder:
    """Appends transitions of n environments to a table with ragged columns, and ends trajectories.

    A row can be drawn when the next one of its environment was appended, or its episode has ended.

    Args:
        table: with the columns of `nestings`, ``reward`` and ``terminated``. nestings: name of a value -> its columns.
        num_envs: n. piece: most transitions of a trajectory. growing: as for `RowAdder`.
        first: name of a column that is True in the first row of an episode; None for none.
        overlap: transitions that consecutive trajectories of an episode have in common.
    """

    plain = waits = False

    def __init__(
        self,
        table: Table,
        nestings: Mapping[str, Nesting],
        num_envs: int,
        piece: int,
        *,
        growing: bool = True,
        first: str | None = None,
        overlap: int = 0,
    ) -> None:
        self.nestings, self.num_envs, self._piece = nestings, num_envs, piece
        self._first, self._overlap = first, overlap
        # The last rows of the episode of each environment, column -> value.
        self._recent: list[deque[dict[str, Any]]] = [deque(maxlen=overlap) for _ in range(num_envs)]
        self._writer = table.writers(num_envs, commit_every_step=growing)
        self._most_bytes = table._engine.region.layout.payload
        obs, self._schema = nestings["obs"].columns(), dict(table.schema)
        self._columns = {name: self._column(name, name, column) for name, column in table.schema.items()}
        self._next = {name: self._column(name, f"next_{name}", table.schema[name]) for name in obs}
        # What followed the last row of each environment.
        self._after = {name: self._column(name, name, table.schema[name]).rows for name in obs}
        self._steps = np.zeros(num_envs, dtype=np.int64)  # rows of the trajectories that have not been closed
        self._ended = np.zeros(num_envs, dtype=bool)  # whether the last row ended its episode
        self._ending = self._ended  # whether the rows of the last call do
        self._left: list[
            tuple[str, Array]
        ] = []  # what remains to be appended of the last call, by environment

    def _column(self, name: str, what: str, column: Column) -> RowColumn | ValueColumn:
        if column.ragged is not None:
            return ValueColumn(what, column, self.num_envs)
        return RowColumn(name, what, column, np.zeros((self.num_envs, *column.shape), column.numpy_dtype))

    def quick(self, values: tuple[Any, ...]) -> bool:
        """See `Adder.quick`: these values need another look."""
        return False

    def flush(self) -> None:
        """Append what remains of a call that raised."""
        while self._left:
            kind, which = self._left[0]
            try:
                if which.any():
                    self._append(kind, which)
            except SchemaError:  # values that the table's memory cannot hold
                self._left = []
                if kind == "close":  # end them without what followed, as those of a killed process
                    self._writer.commit(which)
                    self._steps[which] = 0
                raise
            self._left.pop(0)

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
        """See `ReplayBuffer.add`, and `Adder.add` for the arguments."""
        check_names(values, self.nestings)
        self.flush()
        for name, nesting in self.nestings.items():
            for column, leaf in nesting.leaves(values[name]):
                self._columns[column].take(leaf, single=single)
        for column, leaf in self.nestings["obs"].leaves(next_obs):
            self._next[column].take(leaf, single=single)
        self._check_next()
        self._columns["reward"].take(reward, single=single)
        ends = flags_of("terminated", terminated, self.num_envs)
        self._columns["terminated"].rows[:] = ends
        ends = ends | flags_of("truncated", truncated, self.num_envs)
        follows = self._follows()
        resets = self._ended & follows & ~ends & (np.asarray(self._columns["reward"].rows) == 0)
        acting = ~resets if not single else np.ones(1, dtype=bool)
        if active is not None:
            acting = flags_of("active", active, self.num_envs)
        goes_on = (self._steps > 0) & follows
        full = acting & goes_on & (self._steps >= self._piece)
        closes = full | (acting & (self._steps > 0) & ~follows)
        if self._first is not None:
            self._columns[self._first].rows[:] = ~goes_on
        for i in np.flatnonzero(acting & ~goes_on):
            self._recent[i].clear()
        again = [(f"again {i}", full.copy()) for i in range(self._overlap)]
        self._left = [("close", closes), *again, ("row", acting.copy()), ("close", acting & ends)]
        self._ending = ends
        self.flush()

    def _check_next(self) -> None:
        """Raise SchemaError for next observations that the table's memory cannot hold, before anything is added."""
        columns = [column for column in self._next.values() if isinstance(column, ValueColumn)]
        sizes: Array = np.array([column.sizes() for column in columns], dtype=np.int64)
        rounded = -(-sizes // GRAIN) * GRAIN
        needed, most = int(rounded.sum()) + HEADER * self.num_envs + FIRST, self._most_bytes
        if columns and needed > most:
            raise SchemaError(
                f"The values of next_obs take {needed:,} bytes; this buffer has {most:,} for those of all. Create it "
                "with a larger payload. Nothing was added."
            )

    def _follows(self) -> Array:
        """Whether the observation of each environment is what followed its last row, bool [n]."""
        found = np.ones(self.num_envs, dtype=bool)
        for name, after in self._after.items():
            found &= [_same(now, before) for now, before in zip(self._columns[name].rows, after, strict=True)]
        return found

    def _append(self, kind: str, which: Array) -> None:
        """Append a row of each of the environments: of what was given, what followed the last one, or was there before.

        Args:
            kind: "row", "close", or "again" and a number, of a row among the last ones.
            which: bool [n]; those that were appended are taken out of it, also after an error.
        """
        closes, done = kind == "close", np.zeros(self.num_envs, dtype=bool)
        rows: dict[str, Any] = {name: column.rows for name, column in self._columns.items()}
        if closes:
            rows = {
                name: self._column(name, name, each).rows for name, each in self._schema.items()
            } | self._after
        elif kind != "row":
            rows = {name: self._column(name, name, each).rows for name, each in self._schema.items()}
            for i in np.flatnonzero(which):
                for name, value in self._recent[i][int(kind.split()[1])].items():
                    rows[name][i] = value
        try:
            self._writer.append(rows, active=which.copy(), done=which.copy() if closes else None)
            done = which.copy()
        except SchemaError:
            raise
        except BaseException:
            done = self._writer.appended & which
            raise
        finally:
            which &= ~done
            self._steps[done] = 0 if closes else self._steps[done] + 1
            if kind == "row":
                self._ended = np.where(done, self._ending, self._ended)
                for name, column in self._next.items():
                    for i in np.flatnonzero(done):
                        self._after[name][i] = column.rows[i]
                for i in np.flatnonzero(done) if self._overlap else ():
                    kept = {name: column.rows[i] for name, column in self._columns.items()}
                    self._recent[i].append({name: _copied(value) for name, value in kept.items()})


def _copied(value: Any) -> Any:
    return value if isinstance(value, (str, bytes)) else np.copy(value)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit."""
    if isinstance(one, (str, bytes)):
        return bool(one == other)
    one, other = np.asarray(one), np.asarray(other)
    return bool(one.shape == other.shape and one.tobytes() == other.tobytes())


# ---------------------------------------------------------------- what columns are


def is_ragged(column: tuple[Any, tuple[Any, ...]]) -> bool:
    """Whether a column of this dtype and shape has values of any length."""
    dtype, shape = column
    return dtype is str or dtype is bytes or None in shape


def names_of(value: Any) -> tuple[str, ...]:
    """The names of the option `ragged`; SchemaError for others."""
    names = None if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if names is None or not all(isinstance(name, str) for name in names):
        raise SchemaError(f"ragged is {shown(value)}; expected names of columns, such as ('obs.tokens',).")
    return names


def example_of(name: str, value: Any, count: int, single: bool) -> tuple[Any, Array | None]:
    """`str` or `bytes`, or an array ``[n, ...]``: one of the values of a first row.

    Raises:
        SchemaError: there is none.
    """
    listed = isinstance(value, (list, tuple, np.ndarray)) and len(value) == count
    one = value if single else value[0] if listed else None
    if isinstance(one, (str, bytes)):
        return str if isinstance(one, str) else bytes, None
    array = None if one is None else as_array(one)
    if array is None or array.ndim < 1 or array.dtype.kind in "USO":
        wanted = "text, bytes or an array [n, ...]"
        wanted = wanted if single else f"a list of {count} of them, one for each environment"
        raise SchemaError(f"{name!r} is {shown(value)}; expected {wanted}.")
    return None, array


def transitions_of(transitions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments of `add` of each of several transitions, some with values of any length.

    Raises:
        SchemaError: they have different lengths.
    """

    def leaves(value: Any) -> list[Any]:
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else None
        return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]

    def one(value: Any, step: int) -> Any:
        if isinstance(value, Mapping):
            return {key: one(part, step) for key, part in value.items()}
        return tuple(one(part, step) for part in value) if isinstance(value, tuple) else value[step]

    values = [leaf for each in transitions.values() for leaf in leaves(each)]
    lengths = {
        len(leaf) if hasattr(leaf, "__len__") and not isinstance(leaf, (str, bytes)) else -1
        for leaf in values
    }
    if len(lengths) != 1 or -1 in lengths:
        raise SchemaError(
            f"The transitions have the lengths {sorted(lengths)}; expected the same length T of all: arrays, a "
            "gear_loader.Ragged, or a list. Nothing was added."
        )
    return [{name: one(each, step) for name, each in transitions.items()} for step in range(lengths.pop())]
