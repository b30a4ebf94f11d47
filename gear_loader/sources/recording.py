"""Recording of episodes from Gymnasium environments: the columns of their spaces, and the values of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import (
    FINITE_REMEDY,
    STANDARD,
    Columns,
    Episode,
    MisfitError,
    column_of,
    convert,
    is_finite_role,
    plan_dtype,
    refuse_objects,
    requested,
    select,
)
from gear_loader.storage.schema import Column

Values = dict[str, list[Any]]
"""Values of one episode: standard column -> one value a step; under `FINAL` the observation after the last step."""

FINAL = "final"


@dataclasses.dataclass(frozen=True)
class CollectionLimits:
    """Limits of a collection: `episodes`, `max_steps` and `max_episode_steps` of `gear_loader.sources.collect`."""

    episodes: int | None
    steps: int | None
    episode_steps: int | None


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One leaf of a space.

    Attributes:
        path: keys that lead to it in a value. space: its space.
        shape: shape of its values; None for a space whose values are not arrays of one fixed shape.
    """

    path: tuple[Any, ...]
    space: Any
    shape: tuple[int, ...] | None

    def take(self, value: Any) -> Any:
        """The part of a value of the whole space that belongs to this leaf."""
        for key in self.path:
            value = value[key]
        return value


def leaves(space: Any, name: str) -> dict[str, _Leaf]:
    """Leaves of an observation or action space by column name, in the order of the space."""
    spaces = require("gymnasium", "Reading a space").spaces
    found: dict[str, _Leaf] = {}

    def walk(part: Any, path: tuple[Any, ...]) -> None:
        if isinstance(part, spaces.Dict):
            for key, below in part.spaces.items():
                walk(below, (*path, key))
            return
        if isinstance(part, spaces.Tuple):
            for position, below in enumerate(part.spaces):
                walk(below, (*path, position))
            return
        column = ".".join((name, *map(str, path)))
        if column in found:
            raise SourceError(
                f"Two parts of the space {space} would both be the column {column!r}; expected keys that differ "
                "when they are joined by dots."
            )
        plain = isinstance(part, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
        found[column] = _Leaf(path, part, tuple(part.shape) if plain else None)

    walk(space, ())
    return found


def check_leaves(found: Mapping[str, _Leaf], chosen: Mapping[str, str], where: str) -> None:
    """Check that all chosen leaves are arrays of one fixed shape.

    Args:
        found: leaves by column of the source. chosen: {name in the table: name in the source}.
        where: the source in errors.

    Raises:
        SourceError: kinds of space that no column holds (text, sequences, graphs); the message names all such columns,
            and the `columns` without them.
    """
    roles = [role for role in chosen.values() if role in found and found[role].shape is None]
    unfit = {role: f"of the space {found[role].space}" for role in roles}
    refuse_objects(where, unfit, chosen, "Box, Discrete, MultiDiscrete or MultiBinary")


def leaf_column(leaf: _Leaf, role: str, what: str, *, keep_float64: bool) -> Column:
    """The column for a leaf of a space, which `check_leaves` has accepted.

    Raises:
        SourceError: a dtype that no column holds.
    """
    assert leaf.shape is not None
    # Discrete values are indices; the table's own index dtype serves for all of them.
    dtype = (
        torch.int64
        if leaf.shape == () and leaf.space.dtype.kind in "iu" and hasattr(leaf.space, "n")
        else None
    )
    dtype = dtype or plan_dtype(role, leaf.space.dtype, what, keep_float64=keep_float64)
    return column_of(dtype, leaf.shape, what)


class Recorder:
    """Checks and keeps the values of the selected columns.

    Args:
        name: of the environment, for errors.
        observation_space, action_space: of a single environment.
        columns, keep_float64, allow_nonfinite: as for `gear_loader.sources.collect`.

    Attributes:
        schema: the columns. used: standard columns that are recorded.
    """

    def __init__(
        self,
        name: str,
        observation_space: Any,
        action_space: Any,
        *,
        columns: Columns,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        self.name = name
        self._allow_nonfinite = allow_nonfinite
        source = f"The environment {self.name}"
        observed = leaves(observation_space, "observation")
        followed = {f"next_{name}": leaf for name, leaf in observed.items()}
        self._leaves = observed | leaves(action_space, "action") | followed
        available = [*self._leaves, "reward", "terminated", "truncated"]
        self._chosen = select(requested(columns, STANDARD), available, source)
        check_leaves(self._leaves, self._chosen, source)
        self.schema: dict[str, Column] = {}
        for name, role in self._chosen.items():
            if role in self._leaves:
                what = f"{source}: column {role!r}"
                self.schema[name] = leaf_column(self._leaves[role], role, what, keep_float64=keep_float64)
            else:
                dtype = plan_dtype(
                    role, np.float64 if role == "reward" else np.bool_, role, keep_float64=keep_float64
                )
                self.schema[name] = Column(dtype)
        self.used = set(self._chosen.values())
        self._wanted = {
            kind: [name for name in self._leaves if name.split(".")[0] == kind and name in self.used]
            for kind in ("observation", "action", "next_observation")
        }

    def new(self) -> Values:
        """Values of an episode without steps."""
        return {role: [] for role in self._chosen.values()}

    def keep(self, values: Values, kind: str, value: Any, number: int, step: int) -> None:
        """Record an observation or action of one step.

        Args:
            values: of the episode. kind: `observation`, `action` or `next_observation`. value: of the whole space.
            number, step: of the episode, for errors.
        """
        for role in self._wanted[kind]:
            # A copy: environments may hand out the same buffer at every step.
            values[role].append(self._leaf(role, value, (), number, step).copy())

    def rows(self, kind: str, value: Any, count: tuple[int, ...], step: int) -> dict[str, np.ndarray]:
        """Check the observations or actions of a vector environment; they are not copied.

        Args:
            kind: as for `keep`. value: of the batched space. count: ``(n,)``, number of environments; () for a value of
                one of them. step: for errors.

        Returns:
            Standard column -> array ``[*count, *shape]``.
        """
        return {role: self._leaf(role, value, count, None, step) for role in self._wanted[kind]}

    def end(self, values: Values, reward: Any, terminated: bool, truncated: bool) -> None:
        """Record the reward and the flags of one step."""
        for role, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if role in self.used:
                values[role].append(value)

    def keep_final(self, values: Values, value: Any, number: int, step: int) -> None:
        """Record the observation after the last step, as `keep`."""
        rows = {
            role: self._leaf(role, value, (), number, step).copy() for role in self._wanted["observation"]
        }
        values[FINAL] = [rows]

    def episode(self, values: Values, number: int) -> Episode:
        """Arrays of an episode."""
        (last,) = values.get(FINAL) or [{}]
        final = {
            name: self._array([last[role]], role, name, number)[0]
            for name, role in self._chosen.items()
            if role in last
        }
        return Episode(
            {name: self._array(values[role], role, name, number) for name, role in self._chosen.items()},
            final,
        )

    def _leaf(
        self, role: str, value: Any, count: tuple[int, ...], number: int | None, step: int
    ) -> np.ndarray:
        leaf = self._leaves[role]
        try:
            array = np.asarray(leaf.take(value))
        except Exception as error:
            raise self.misfit(
                role, number, step, f"is {value!r}, which is not a value of its space"
            ) from error
        shape = (*count, *(leaf.shape or ()))
        if array.shape != shape:
            raise self.misfit(role, number, step, f"has shape {list(array.shape)}; expected {list(shape)}")
        return array

    def _array(self, values: list[Any], role: str, name: str, number: int) -> np.ndarray:
        if role == "reward":
            values = [self._scalar(value, number, step) for step, value in enumerate(values)]
        try:
            return convert(
                np.stack(values) if role in self._leaves else np.asarray(values),
                self.schema[name].dtype,
                finite=is_finite_role(role, self._allow_nonfinite),
            )
        except MisfitError as misfit:
            remedy = FINITE_REMEDY if role == "reward" else "Check the environment's spaces and the policy."
            raise self.misfit(role, number, misfit.step, f"{misfit.problem}. {remedy}") from None

    def _scalar(self, value: Any, number: int, step: int) -> float:
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise self.misfit("reward", number, step, f"is {value!r}; expected one number")
        return float(array.reshape(()))

    def failed(self, what: str, number: int | None, step: int, error: Exception) -> SourceError:
        """The error for an environment or a policy that raises; `number` is None for several environments at once."""
        place = self._place(number, step)
        return SourceError(f"The environment {self.name}, {place}: {what}: {type(error).__name__}: {error}")

    def misfit(self, role: str, number: int | None, step: int | None, problem: str) -> SourceError:
        """The error for a value that its column cannot hold."""
        place = self._place(number, step)
        return SourceError(f"The environment {self.name}, {place}: column {role!r} {problem}")

    @staticmethod
    def _place(number: int | None, step: int | None) -> str:
        if number is None:
            return f"step {step} of the collection"
        return f"episode {number}" if step is None else f"episode {number}, step {step}"


def action_seed(seed: int) -> int:
    """Seed of random actions. (The environment's own seed would give actions that repeat the environment's draws.)"""
    return int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])


def first_too_long(recorder: Recorder, limits: CollectionLimits) -> SourceError:
    """The error for a first episode that has more than `limits.steps` steps."""
    return SourceError(
        f"The first episode of {recorder.name} has more than max_steps={limits.steps} steps; expected room for at "
        "least one episode. Raise max_steps, or cut episodes with max_episode_steps."
    )
