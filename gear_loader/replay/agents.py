"""Several agents in one row: dicts by agent, of which some are missing, become complete ones and a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.replay.nesting import Nesting, as_array
from gear_loader.storage.schema import Schema
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
        self._acted: dict[str, Array] = {}  # in the last step

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

    def begin(
        self,
        flags: Mapping[str, Array],
        obs: Nesting,
        rows: Mapping[str, Array],
        before: Mapping[str, Array] | None,
    ) -> Array:
        """Note who acts in a step that is now added. What `before` has of agents that did not act in the last step
        becomes what they have now, so that an agent that comes in begins no other episode.

        Args:
            flags: ``terminated``, ``truncated`` and ``active`` by agent, bool [n]. obs: nesting of the observations.
            rows: the step. before: the observations that followed the last one.

        Returns:
            Whether the trajectory ends, bool [n]: no agent goes on, or one is cut off, whose last observation is then
            stored as a final one.
        """
        if before is not None:
            for name, acted in self._acted.items():
                for column in obs.parts[name].columns():
                    before[column][~acted] = rows[column][~acted]
        self._acted = {name: flags[f"active.{name}"] for name in self.names}
        acts = np.stack(list(self._acted.values()))
        terminated, truncated = (
            np.stack([flags[f"{kind}.{name}"] for name in self.names]) for kind in ("terminated", "truncated")
        )
        ends: Array = ~(acts & ~terminated & ~truncated).any(0) | (acts & truncated).any(0)
        return ends


class Blanks:
    """Values of agents that have none.

    Args:
        count: number of environments, of values with a dimension for it; None without.
        schema: columns of the table, if there is one. before: observations that followed the last step, [n, *shape].
    """

    def __init__(self, count: int | None, schema: Schema | None, before: Mapping[str, Array] | None) -> None:
        self._first = () if count is None else (count,)
        self._schema, self._before = schema, before

    def zeros(self, column: str) -> Array:
        """Zeros of a column."""
        known = None if self._schema is None else self._schema.get(column)
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
