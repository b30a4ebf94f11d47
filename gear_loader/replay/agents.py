"""Several agents in one row: dicts by agent, of which some are missing, become complete ones and a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.native.row_values import RowReader
from gear_loader.replay.adding import RowAdder, flags_of
from gear_loader.replay.nesting import Nesting, as_array, on_cpu, on_gpu
from gear_loader.storage.operations.appending import ENDS, GOES_ON
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, shown

Blank = Callable[[str], Array]
"""Column -> value of an agent that has none."""


class Agents:
    """What `ReplayBuffer` does with the dicts by agent of PettingZoo's parallel environments.

    An agent acts in a step if it has an action there. Of an agent that does not act, missing values are zeros, but for
    the observation after its last action, which `add` had as `next_obs`.

    Args:
        names: of all agents that there may be.

    Raises:
        SchemaError: no names, equal ones, or one that is no text or has a dot.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = [names] if isinstance(names, str) else list(names)
        fits = all(isinstance(name, str) and name and "." not in name for name in self.names)
        if isinstance(names, str) or not fits or not self.names or len(set(self.names)) != len(self.names):
            raise SchemaError(
                f"agents is {shown(names)}; expected the names of all agents, such as env.possible_agents: different "
                "texts without dots."
            )

    def nesting(self, name: str) -> Nesting:
        """That of a dict with one array for each agent."""
        return Nesting(name, {each: Nesting(f"{name}.{each}") for each in self.names}, kind="dict")

    def check_first(self, nestings: Mapping[str, Nesting]) -> None:
        """Raise SchemaError unless observations and actions, or their spaces, are those of all agents."""
        for name in ("obs", "action"):
            found = nestings[name]
            if found.kind != "dict" or set(found.parts) != set(self.names):
                raise SchemaError(
                    f"{name!r} is {found.expected()}; expected those of all agents, {self.names}, in the first step. "
                    "Where agents come later, give observation_space and action_space: dicts by agent."
                )

    def first(self, name: str, value: Any) -> Any:
        """The value of the first agent."""
        given = self._dict(name, value)
        if not given:
            raise SchemaError(f"{name!r} has no agent; expected that of each agent that acts.")
        return next(iter(given.values()))

    def complete(
        self,
        values: dict[str, Any],
        numbers: dict[str, Any],
        next_obs: Any,
        active: Any,
        nestings: Mapping[str, Nesting],
        blanks: Blanks,
    ) -> Any:
        """Replace dicts by agent in `values` and `numbers` by complete ones; add ``active`` to `numbers`.

        Args:
            values: observation, action and other columns. numbers: reward, terminated and truncated.
            next_obs, active: as `ReplayBuffer.add` got them.

        Returns:
            `next_obs`, complete.

        Raises:
            SchemaError: an unknown agent, none that acts, or one that acts and has no value.
        """
        self.first("action", values["action"])
        acting = list(values["action"])
        for name, value in numbers.items():
            numbers[name] = self._completed(self.nesting(name), value, blanks.zeros, acting)
        for name, value in values.items():
            blank = blanks.last if name == "obs" else blanks.zeros
            values[name] = self._completed(nestings[name], value, blank, acting)
        on = {} if active is None else self._dict("active", active)
        numbers["active"] = {name: on.get(name, blanks.flags(name in acting)) for name in self.names}
        goes_on = [name for name in acting if not np.all(as_array(numbers["terminated"][name]))]
        return self._completed(nestings["obs"], next_obs, blanks.zeros, goes_on)

    def _dict(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise SchemaError(
                f"{name!r} is {shown(value)}; expected a dict by agent, of some of {self.names}."
            )
        if unknown := [key for key in value if key not in self.names]:
            raise SchemaError(f"{name!r} has the agents {unknown}; expected some of {self.names}.")
        return value

    def _completed(self, nesting: Nesting, value: Any, blank: Blank, needed: list[str]) -> Any:
        """A dict of all agents, with `blank` of those that are missing; a value that is not by agent as it is."""
        if nesting.kind != "dict" or set(nesting.parts) != set(self.names):
            return value
        given = self._dict(nesting.name, value)
        if missing := [name for name in needed if name not in given]:
            raise SchemaError(f"{nesting.name!r} has no {missing}, which act; expected a value of each.")
        return {
            name: given[name]
            if name in given
            else part.build({column: blank(column) for column in part.columns()})
            for name, part in nesting.parts.items()
        }

    def rows(
        self,
        nestings: Mapping[str, Nesting],
        schema: Mapping[str, Column],
        before: Mapping[str, Array] | None,
        count: int,
        single: bool,
        values: Mapping[str, Any],
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        active: Any,
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Check what `ReplayBuffer.add` got.

        Args:
            schema: columns of `nestings` at least. before: observations that followed the last step, if there is one.
            count, single: number of environments, and whether values have no dimension for it.

        Returns:
            Rows [n, *shape] of a step by column; observations that follow; ``terminated``, ``truncated`` and
            ``active`` of each agent, bool [n].

        Raises:
            SchemaError: something does not fit.
        """
        if values.keys() != nestings.keys():
            raise SchemaError(
                f"The columns {sorted(values)} were given; expected {sorted(nestings)}, as before."
            )
        values = dict(values)
        numbers = {"reward": reward, "terminated": terminated, "truncated": truncated}
        blanks = Blanks(None if single else count, schema, before)
        next_obs = self.complete(values, numbers, next_obs, active, nestings, blanks)
        rows = {
            column: _row(column, leaf, count, single, schema[column].shape)
            for name, value in values.items()
            for column, leaf in nestings[name].leaves(value)
        }
        for column, leaf in self.nesting("reward").leaves(numbers.pop("reward")):
            rows[column] = _row(column, leaf, count, single, ())
        flags = {
            column: flags_of(column, leaf, count)
            for name, value in numbers.items()
            for column, leaf in self.nesting(name).leaves(value)
        }
        rows |= {column: flag for column, flag in flags.items() if not column.startswith("truncated.")}
        following = {
            column: _row(column, leaf, count, single, schema[column].shape, "next_")
            for column, leaf in nestings["obs"].leaves(next_obs)
        }
        return rows, following, flags


class AgentAdder(RowAdder):
    """Appends steps of all agents of n environments to a table, each observation once, and ends trajectories.

    Args:
        agents, nestings: as of the buffer. table: with their columns. num_envs, piece, waits: as for `RowAdder`.
    """

    plain = False

    def __init__(
        self,
        agents: Agents,
        table: Table,
        nestings: Mapping[str, Nesting],
        num_envs: int,
        piece: int,
        *,
        waits: bool,
    ) -> None:
        super().__init__(table, num_envs, piece, waits=waits)
        self._agents, self._schema, self._nestings = agents, table.schema, nestings
        self._numbers = {name: agents.nesting(name) for name in ("reward", "terminated", "truncated")}
        self._before = {name: np.zeros_like(column.rows) for name, column in self._following.items()}
        self._acted: list[
            Array
        ] = []  # bool [n] of each agent, in the last step; none: all did, or there was none
        self._begun = False
        columns = [column for nesting in nestings.values() for column in nesting.columns()]
        flags = [f"{kind}.{name}" for kind in ("terminated", "active") for name in agents.names]
        read = [*columns, *self._numbers["reward"].columns()]
        self._use(
            [
                *(self._columns[name] for name in read),
                *(self._following[name] for name in nestings["obs"].columns()),
                *(self._columns[name] for name in flags),
            ]
        )
        self._values = self._order[: -len(flags)]  # but for the flags, which are copied
        self._nobody, count = np.zeros(num_envs, dtype=bool), len(self._values)
        memory = [*(column.rows for column in self._values), self._nobody.copy(), self._nobody.copy()]
        found = [*self._found[:count], None, None]
        self._reader = RowReader(memory, found, self._kinds, single=1, envs=1, ends=ENDS)

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
        """See `ReplayBuffer.add`."""
        if self._appending.left:
            self._appending.resume()
        if active is None and self._quick(values, reward, next_obs, terminated, truncated):
            return
        given = {**values, "reward": reward, "next_obs": next_obs, "terminated": terminated}
        given = on_cpu({**given, "truncated": truncated, "active": active})
        reward, next_obs, terminated, truncated, active = (
            given.pop(name) for name in ("reward", "next_obs", "terminated", "truncated", "active")
        )
        values, before = given, self._before if self._begun else None
        rows, following, flags = self._agents.rows(
            self._nestings, self._schema, before, self.num_envs, single, values, reward, next_obs, terminated,
            truncated, active,
        )  # fmt: skip
        for column in self._order:
            of = following if column is self._following.get(column.name) else rows
            column.take(of[column.name], single=False)
        acts, terminated, truncated = (
            [flags[f"{kind}.{name}"].copy() for name in self._agents.names]
            for kind in ("active", "terminated", "truncated")
        )
        self._kinds[:] = 1 + ENDS * self._ends(acts, terminated, truncated) + GOES_ON * self._alike(rows)
        for name, column in self._following.items():
            self._before[name][...] = column.rows
        self._acted, self._begun = [] if np.all(acts) else acts, True
        self._use_memory()
        self._appending.append()

    def _quick(
        self, values: Mapping[str, Any], reward: Any, next_obs: Any, terminated: Any, truncated: Any
    ) -> bool:
        """Add a step in which all agents act, as they did before, if it needs no other look; return whether it was."""
        if self._acted or values.keys() != self._nestings.keys() or on_gpu(terminated) or on_gpu(truncated):
            return False
        numbers, nestings, n = self._numbers, self._nestings, self.num_envs
        try:
            leaves = [leaf for name, each in nestings.items() for _, leaf in each.leaves(values[name])]
            leaves += [leaf for _, leaf in numbers["reward"].leaves(reward)]
            after = [leaf for _, leaf in nestings["obs"].leaves(next_obs)]
            over = [
                [flags_of(column, leaf, n) for column, leaf in numbers[name].leaves(each)]
                for name, each in (("terminated", terminated), ("truncated", truncated))
            ]
        except SchemaError:
            return False
        ends = self._ends([], *over)
        if not self._reader.read((*leaves, *after, ends, self._nobody)):
            return False
        names = self._agents.names
        for name, flag in zip(names, over[0], strict=True):
            self._columns[f"terminated.{name}"].rows[:] = flag
            self._columns[f"active.{name}"].rows[:] = True
        for column, leaf in zip(nestings["obs"].columns(), after, strict=True):
            self._before[column][...] = as_array(leaf)
        self._begun = True
        try:
            self._appending.append()
        except BaseException:
            for into, leaf in zip(self._values, (*leaves, *after), strict=True):
                array = as_array(leaf)
                into.take(array if array.shape == into.rows.shape else array[None], single=False)
            self._use_memory()
            raise
        return True

    def _ends(self, acts: list[Array], terminated: list[Array], truncated: list[Array]) -> Array:
        """Whether the trajectory ends, bool [n]: no agent goes on, or one is cut off, whose last observation is then
        stored as a final one.

        Args:
            acts, terminated, truncated: bool [n] of each agent; no `acts`: all act.
        """
        ends, cut = ~self._nobody, self._nobody.copy()
        for i, (over, short) in enumerate(zip(terminated, truncated, strict=True)):
            ends &= over | short | ~acts[i] if acts else over | short
            cut |= short & acts[i] if acts else short
        ends |= cut
        return ends

    def _alike(self, rows: Mapping[str, Array]) -> Array:
        """Where agents that did not act in the last step may come with any observation, without beginning another
        episode: the observations of all others are those that followed; bool [n]."""
        if not self._acted:
            return self._nobody
        obs = self._nestings["obs"]
        same: Array = ~np.all(self._acted, 0)
        for name, acted in zip(self._agents.names, self._acted, strict=True):
            columns = obs.parts[name].columns()
            same &= ~acted | same_rows(rows, {column: self._before[column] for column in columns})
        return same


def _row(name: str, value: Any, count: int, single: bool, shape: tuple[int, ...], prefix: str = "") -> Array:
    """The values of a column, [n, *shape]."""
    array = as_array(value)
    array = array[None] if single else array
    if array.shape != (count, *shape):
        found, wanted = (array.shape[1:], shape) if single else (array.shape, (count, *shape))
        raise SchemaError(f"{prefix + name!r} has the shape {list(found)}; expected {list(wanted)}.")
    return array


class Blanks:
    """Values of agents that have none.

    Args:
        count: number of environments, of values with a dimension for it; None without.
        schema: columns of the table. before: observations that followed the last step, [n, *shape].
    """

    def __init__(
        self, count: int | None, schema: Mapping[str, Column], before: Mapping[str, Array] | None
    ) -> None:
        self._first = () if count is None else (count,)
        self._schema, self._before = schema, before

    def zeros(self, column: str) -> Array:
        """Zeros of a column."""
        known = self._schema.get(column)
        shape, dtype = ((), np.dtype(bool)) if known is None else (known.shape, known.numpy_dtype)
        return np.zeros((*self._first, *shape), dtype)

    def last(self, column: str) -> Array:
        """What followed the last step; zeros before the first one."""
        if self._before is None:
            return self.zeros(column)
        return self._before[column] if self._first else self._before[column][0]

    def flags(self, value: bool) -> Array:
        """The same flag in all environments."""
        return np.full(self._first, value)


def same_rows(rows: Mapping[str, Array], before: Mapping[str, Array]) -> Array:
    """Whether all values of each environment are those of `before` ([n, *shape] a column), NaN too; bool [n]."""
    same = []
    for name, values in before.items():
        row = rows[name].astype(values.dtype, copy=False)  # as they are stored
        equal = row == values
        if not equal.all():
            equal |= (row != row) & (values != values)
        same.append(equal.reshape(len(equal), -1).all(1))
    found: Array = np.logical_and.reduce(same)
    return found
