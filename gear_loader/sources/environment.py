"""Collecting episodes from a Gymnasium environment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
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
    check_count,
    column_of,
    convert,
    describe,
    is_finite_role,
    plan_dtype,
    refuse_objects,
    requested,
    select,
)
from gear_loader.storage.schema import Column
from gear_loader.utils.progress import progress_bar

__all__ = ["check_leaves", "collect", "collect_iter", "leaf_column", "leaves"]

Policy = Callable[[Any], Any]
"""Observation, as the environment gives it -> action, as the environment takes it."""


def collect(
    env: Any,
    policy: Policy | None = None,
    *,
    episodes: int | None = None,
    max_steps: int | None = None,
    max_episode_steps: int | None = None,
    seed: int | None = None,
    columns: Columns = None,
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
    progress: bool = True,
) -> list[Episode]:
    """Run a policy in an environment and return the episodes.

    Each episode has the standard columns (see `gear_loader.sources.episodes`); `next_observation` comes when
    `columns` asks for it. `observation` holds the T observations on which the T actions were taken. Box
    spaces keep shape and dtype, except that float64 becomes float32; Discrete becomes int64 scalars,
    MultiDiscrete int64 [n], MultiBinary int8 [n]; Dict and Tuple spaces become one column for each leaf.

    Args:
        env: a Gymnasium environment (left open), or the id, `gymnasium.envs.registration.EnvSpec` or
            function to make one from (closed at the end).
        policy: observation -> action; None draws random actions from the action space.
        episodes: how many episodes to collect. This or `max_steps` must be given.
        max_steps: the most steps to collect altogether. Episodes stay whole: the one that would exceed it is
            left out and ends the collection.
        max_episode_steps: cut episodes after so many steps and mark them truncated. For an environment that
            may never end an episode by itself.
        seed: makes the collection repeatable: the first reset gets it, later ones none, as Gymnasium
            recommends; random actions are drawn from a seed derived from it.
        columns: names of the columns to take, or {name in the table: standard name}.
        keep_float64: keep float64, which the rewards of an environment are, too, instead of making it float32.
        allow_nonfinite: take NaN and infinite rewards, which otherwise are an error.
        progress: show a progress bar where standard error is a terminal.

    Returns:
        Episodes, each ``{column: array [T, *shape]}``, T >= 1.

    Raises:
        SourceError: an environment that cannot be made, raises, or returns something that does not fit its
            spaces; a policy that raises or returns such an action. The message names the episode and the
            step. Also options that do not fit.
        ImportError: Gymnasium is not installed.
    """
    return list(
        collect_iter(
            env,
            policy,
            episodes=episodes,
            max_steps=max_steps,
            max_episode_steps=max_episode_steps,
            seed=seed,
            columns=columns,
            keep_float64=keep_float64,
            allow_nonfinite=allow_nonfinite,
            progress=progress,
        )
    )


def collect_iter(
    env: Any,
    policy: Policy | None = None,
    *,
    episodes: int | None = None,
    max_steps: int | None = None,
    max_episode_steps: int | None = None,
    seed: int | None = None,
    columns: Columns = None,
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
    progress: bool = True,
) -> Iterator[Episode]:
    """Like `collect`, but yields each episode as soon as it is complete.

    For collections that do not fit in memory beside the table, or whose finished episodes should outlast an
    error: ``for episode in collect_iter(...): table.add(episode)``.
    """
    gymnasium = require("gymnasium", "Collecting episodes")
    check_count("episodes", episodes)
    check_count("max_steps", max_steps)
    check_count("max_episode_steps", max_episode_steps)
    if episodes is None and max_steps is None:
        raise SourceError(
            "Neither episodes= nor max_steps= was given; expected at least one, to know when to stop."
        )
    if policy is not None and not callable(policy):
        raise SourceError(
            f"The policy is {describe(policy)}; expected a function observation -> action, or None."
        )
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise SourceError(
            f"The environment is a vector of {env.num_envs} environments; expected a single one. "
            "Collect from each of them, or make one environment."
        )
    if not isinstance(env, (gymnasium.Env, str, gymnasium.envs.registration.EnvSpec)) and not callable(env):
        raise SourceError(
            f"The environment is {describe(env)}; expected a gymnasium.Env, its id, or a function that makes one."
        )
    recorder = functools.partial(
        _Recorder, columns=columns, keep_float64=keep_float64, allow_nonfinite=allow_nonfinite
    )
    limits = _Limits(episodes, max_steps, max_episode_steps)
    return _run(gymnasium, env, policy, recorder, limits, seed, progress)


@dataclasses.dataclass(frozen=True)
class _Limits:
    """Limits of a collection; see `collect`."""

    episodes: int | None
    steps: int | None
    episode_steps: int | None


def _run(
    gymnasium: Any,
    env: Any,
    policy: Policy | None,
    make_recorder: Callable[[Any], _Recorder],
    limits: _Limits,
    seed: int | None,
    progress: bool,
) -> Iterator[Episode]:
    owned = not isinstance(env, gymnasium.Env)
    if owned:
        env = _make(gymnasium, env)
    try:
        recorder = make_recorder(env)
        if policy is None:
            if seed is not None:
                # A seed of its own: the same seed would give actions that repeat the environment's own draws.
                env.action_space.seed(int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]))
            policy = _random_policy(env.action_space)
        total, unit = (limits.steps, "steps") if limits.episodes is None else (limits.episodes, "episodes")
        steps = number = 0
        with progress_bar(f"Collecting {recorder.name}", total, unit=unit, enabled=progress) as (advance, _):
            while limits.episodes is None or number < limits.episodes:
                longest = None if limits.steps is None else limits.steps - steps
                episode_seed = seed if number == 0 else None
                length = recorder.run(policy, number, episode_seed, limits.episode_steps, longest)
                if length is None:  # the episode exceeds max_steps
                    if number == 0:
                        raise SourceError(
                            f"The first episode of {recorder.name} has more than max_steps={limits.steps} steps; "
                            "expected room for at least one episode. Raise max_steps, or cut episodes with "
                            "max_episode_steps."
                        )
                    return
                yield recorder.episode(number)
                number += 1
                steps += length
                advance(1 if unit == "episodes" else length)
                if steps == limits.steps:
                    return
    finally:
        if owned:
            env.close()


def _make(gymnasium: Any, env: Any) -> Any:
    by_id = isinstance(env, (str, gymnasium.envs.registration.EnvSpec))
    try:
        made = gymnasium.make(env) if by_id else env()
    except Exception as error:
        raise SourceError(
            f"The environment {env!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, gymnasium.Env):
        raise SourceError(f"The function {env!r} returned {describe(made)}; expected a gymnasium.Env.")
    return made


def _random_policy(space: Any) -> Policy:
    return lambda observation: space.sample()


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


class _Recorder:
    """Runs episodes and keeps the values of the selected columns."""

    def __init__(self, env: Any, *, columns: Columns, keep_float64: bool, allow_nonfinite: bool) -> None:
        self.env = env
        self.name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        self._allow_nonfinite = allow_nonfinite
        source = f"The environment {self.name}"
        observed = leaves(env.observation_space, "observation")
        followed = {f"next_{name}": leaf for name, leaf in observed.items()}
        self._leaves = observed | leaves(env.action_space, "action") | followed
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
        used = set(self._chosen.values())
        self._wanted = {
            kind: [name for name in self._leaves if name.split(".")[0] == kind and name in used]
            for kind in ("observation", "action", "next_observation")
        }
        self._values: dict[str, list[Any]] = {}

    def run(
        self, policy: Policy, number: int, seed: int | None, cut: int | None, longest: int | None
    ) -> int | None:
        """Run one episode.

        Args:
            number: position of the episode, for errors. seed: of the reset, or None.
            cut: steps after which the episode is truncated, or None. longest: most steps, or None.

        Returns:
            Its number of steps, or None if it has more than `longest`.
        """
        values = self._values = {role: [] for role in self._chosen.values()}
        keep = {role: values[role].append for role in ("reward", "terminated", "truncated") if role in values}
        try:
            observation, _ = self.env.reset(seed=seed)
        except Exception as error:
            raise self._failed("raised in reset", number, 0, error) from error
        step = 0
        while True:
            if step == longest:
                return None
            self._keep("observation", observation, number, step)
            try:
                action = policy(observation)
            except Exception as error:
                raise self._failed("the policy raised", number, step, error) from error
            self._keep("action", action, number, step)
            try:
                observation, reward, terminated, truncated, _ = self.env.step(action)
            except Exception as error:
                raise self._failed("raised in step", number, step, error) from error
            self._keep("next_observation", observation, number, step)
            step += 1
            truncated = bool(truncated) or step == cut
            for role, value in (
                ("reward", reward),
                ("terminated", bool(terminated)),
                ("truncated", truncated),
            ):
                if role in keep:
                    keep[role](value)
            if terminated or truncated:
                return step

    def episode(self, number: int) -> Episode:
        """Arrays of the episode that was run last."""
        return {name: self._array(role, name, number) for name, role in self._chosen.items()}

    def _keep(self, kind: str, value: Any, number: int, step: int) -> None:
        for role in self._wanted[kind]:
            leaf = self._leaves[role]
            try:
                # A copy: environments may hand out the same buffer at every step.
                array = np.array(leaf.take(value))
            except Exception as error:
                raise self._misfit(
                    role, number, step, f"is {value!r}, which is not a value of its space"
                ) from error
            if array.shape != leaf.shape:
                raise self._misfit(
                    role, number, step, f"has shape {list(array.shape)}; expected {list(leaf.shape or ())}"
                )
            self._values[role].append(array)

    def _array(self, role: str, name: str, number: int) -> np.ndarray:
        values = self._values[role]
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
            raise self._misfit(role, number, misfit.step, f"{misfit.problem}. {remedy}") from None

    def _scalar(self, value: Any, number: int, step: int) -> float:
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise self._misfit("reward", number, step, f"is {value!r}; expected one number")
        return float(array.reshape(()))

    def _failed(self, what: str, number: int, step: int, error: Exception) -> SourceError:
        return SourceError(
            f"The environment {self.name}, episode {number}, step {step}: {what}: {type(error).__name__}: {error}"
        )

    def _misfit(self, role: str, number: int, step: int | None, problem: str) -> SourceError:
        place = f"episode {number}" if step is None else f"episode {number}, step {step}"
        return SourceError(f"The environment {self.name}, {place}: column {role!r} {problem}")
