"""Several agents in one row: dicts by agent, of which some are missing, become complete ones and a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.replay.adding import flags_of
from gear_loader.replay.nesting import Nesting, as_array
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


class AgentAdder:
    """Appends steps of all agents of n environments to a table, each observation once, and ends trajectories.

    Args:
        agents, nestings: as of the buffer. table: with their columns. num_envs: n. piece: most steps of a trajectory.
    """

    waits = False
    plain = False

    def __init__(
        self, agents: Agents, table: Table, nestings: Mapping[str, Nesting], num_envs: int, piece: int
    ) -> None:
        self._agents, self._table, self._nestings, self._piece = agents, table, nestings, piece
        self._writer, self._count = table.writers(num_envs, commit_every_step=True), num_envs
        self._acted: dict[str, Array] = {}  # in the last step
        self._before: dict[str, Array] | None = None  # the last `next_obs`

    def flush(self) -> None:
        """Nothing waits."""

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
        schema, before, writer = self._table.schema, self._before, self._writer
        rows, following, flags = self._agents.rows(
            self._nestings, schema, before, self._count, single, values, reward, next_obs, terminated, truncated, active
        )  # fmt: skip
        ended = self._begin(flags, rows)
        if before is not None:
            broken = ~same_rows(rows, before) & (writer.num_steps > 0)
            if broken.any():
                writer.commit(broken, final=before)
        done = ended | (writer.num_steps >= self._piece - 1)
        writer.append(rows, done=done, final=following if done.any() else None)
        self._before = {name: values.astype(schema[name].numpy_dtype) for name, values in following.items()}

    def _begin(self, flags: Mapping[str, Array], rows: Mapping[str, Array]) -> Array:
        """Note who acts. What followed for agents that did not act in the last step becomes what they have now, so
        that an agent that comes in begins no other episode.

        Returns:
            Whether the trajectory ends, bool [n]: no agent goes on, or one is cut off, whose last observation is then
            stored as a final one.
        """
        names, obs = self._agents.names, self._nestings["obs"]
        if self._before is not None:
            for name, acted in self._acted.items():
                for column in obs.parts[name].columns():
                    self._before[column][~acted] = rows[column][~acted]
        self._acted = {name: flags[f"active.{name}"] for name in names}
        acts = np.stack(list(self._acted.values()))
        terminated, truncated = (
            np.stack([flags[f"{kind}.{name}"] for name in names]) for kind in ("terminated", "truncated")
        )
        ends: Array = ~(acts & ~terminated & ~truncated).any(0) | (acts & truncated).any(0)
        return ends


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
