"""Collecting episodes from a Gymnasium environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import Columns, Episode, check_count, describe
from gear_loader.sources.recording import CollectionLimits, Recorder, Values, action_seed, first_too_long
from gear_loader.sources.vector_environment import collect_vector, make_environment
from gear_loader.utils.checks import at_least, flag
from gear_loader.utils.progress import progress_bar

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
    num_envs: int | None = None,
) -> list[Episode]:
    """Run a policy in an environment and return the episodes.

    Each episode has the standard columns (see `gear_loader.sources.episodes`); `next_observation` comes when
    `columns` asks for it. `observation` holds the T observations on which the T actions were taken, `Episode.final`
    the one after them. Box
    spaces keep shape and dtype, except that float64 becomes float32; Discrete becomes int64 scalars,
    MultiDiscrete int64 [n], MultiBinary int8 [n]; Dict and Tuple spaces become one column for each leaf.

    **Vector environments.** With `num_envs`, or a `gymnasium.vector.VectorEnv`, the n environments take their steps
    at the same time, and the policy gets observations ``[n, ...]`` and returns actions ``[n, ...]`` (in a Dict or
    Tuple space, for each leaf). Environment i gives the episodes that it gives alone with the seed ``seed + i``, in
    every autoreset mode. They are taken in turns, and not in the order in which they end, which would prefer short
    episodes: the k-th episode of environment i is number ``k * n + i`` of the result. `episodes` and `max_steps` count
    in this order, so they keep the same episodes however long each takes; further ones are dropped. In mode NEXT_STEP
    the policy also sees the last observation of an episode; its action there is ignored. In mode SAME_STEP,
    `next_observation` and `Episode.final` have the first observation of the next episode at the end if an environment
    hands out one array again and again, because Gymnasium does not copy it.

    Args:
        env: a Gymnasium environment or vector environment (left open), or the id,
            `gymnasium.envs.registration.EnvSpec` or function to make an environment from (closed at the end).
        policy: observation -> action; None draws random actions from the action space.
        episodes: how many episodes to collect. This or `max_steps` must be given.
        max_steps: the most steps to collect altogether. Episodes stay whole: the one that would exceed it is
            left out and ends the collection.
        max_episode_steps: cut episodes after so many steps and mark them truncated. For an environment that
            may never end an episode by itself. Of vector environments, only SyncVectorEnv and AsyncVectorEnv can.
        seed: makes the collection repeatable: the first reset gets it, later ones none, as Gymnasium
            recommends; random actions are drawn from a seed derived from it. Environment i of several gets
            ``seed + i``.
        columns: names of the columns to take, or {name in the table: standard name}.
        keep_float64: keep float64, which the rewards of an environment are, too, instead of making it float32.
        allow_nonfinite: take NaN and infinite rewards, which otherwise are an error.
        progress: show a progress bar where standard error is a terminal.
        num_envs: make a SyncVectorEnv of so many environments from `env`: an id, EnvSpec or function. Make an
            AsyncVectorEnv yourself. None for a single environment, or the given vector environment.

    Returns:
        Episodes, each ``{column: array [T, *shape]}``, T >= 1, with the last observation as `Episode.final`.

    Raises:
        SourceError: an environment that cannot be made, raises, or returns something that does not fit its
            spaces; a policy that raises or returns such an action. The message names the episode and the
            step. Also options that do not fit.
        ImportError: Gymnasium is not installed.
    """
    flag("progress", progress)
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
            num_envs=num_envs,
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
    num_envs: int | None = None,
) -> Iterator[Episode]:
    """Like `collect`, but yields each episode as soon as it (and, of several environments, all before it) is complete.

    For collections that do not fit in memory beside the table, or whose finished episodes should outlast an
    error: ``for episode in collect_iter(...): table.add(episode)``, with ``final=episode.final`` if the table's
    observations have ``Column(final=True)``.
    """
    gymnasium = require("gymnasium", "Collecting episodes")
    check_count("episodes", episodes)
    check_count("max_steps", max_steps)
    check_count("max_episode_steps", max_episode_steps)
    for option, value in (("keep_float64", keep_float64), ("allow_nonfinite", allow_nonfinite)):
        flag(option, value)
    if seed is not None and at_least("seed", seed, least=0) >= 2**63:
        raise SourceError(f"seed={seed}; expected an integer below 2**63.")
    if episodes is None and max_steps is None:
        raise SourceError(
            "Neither episodes= nor max_steps= was given; expected at least one, to know when to stop."
        )
    if policy is not None and not callable(policy):
        raise SourceError(
            f"The policy is {describe(policy)}; expected a function observation -> action, or None."
        )
    check_count("num_envs", num_envs)
    vector = gymnasium.vector.VectorEnv
    if not isinstance(
        env, (gymnasium.Env, vector, str, gymnasium.envs.registration.EnvSpec)
    ) and not callable(env):
        raise SourceError(
            f"The environment is {describe(env)}; expected a gymnasium.Env or VectorEnv, an id, or a function that "
            "makes an environment."
        )
    if num_envs is not None and isinstance(env, gymnasium.Env):
        raise SourceError(
            f"num_envs={num_envs} was given with a single environment; expected its id or a function that makes one, "
            "to make several."
        )
    if isinstance(env, vector) and num_envs not in (None, env.num_envs):
        raise SourceError(f"num_envs={num_envs} was given with a vector of {env.num_envs} environments.")
    recorder = functools.partial(
        Recorder, columns=columns, keep_float64=keep_float64, allow_nonfinite=allow_nonfinite
    )
    limits = CollectionLimits(episodes, max_steps, max_episode_steps)
    return _run(gymnasium, env, num_envs, policy, recorder, limits, seed, progress)


def _run(
    gymnasium: Any,
    env: Any,
    num_envs: int | None,
    policy: Policy | None,
    make_recorder: Callable[..., Recorder],
    limits: CollectionLimits,
    seed: int | None,
    progress: bool,
) -> Iterator[Episode]:
    owned = not isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv))
    if owned:
        env = make_environment(gymnasium, env, num_envs)
    collect_from = collect_vector if isinstance(env, gymnasium.vector.VectorEnv) else _collect_single
    try:
        yield from collect_from(gymnasium, env, policy, make_recorder, limits, seed, progress)
    finally:
        if owned:
            env.close()


def _collect_single(
    gymnasium: Any,
    env: Any,
    policy: Policy | None,
    make_recorder: Callable[..., Recorder],
    limits: CollectionLimits,
    seed: int | None,
    progress: bool,
) -> Iterator[Episode]:
    """Run a policy in one environment and yield the episodes."""
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    recorder = make_recorder(name, env.observation_space, env.action_space)
    if policy is None:
        if seed is not None:
            env.action_space.seed(action_seed(seed))
        policy = _random_policy(env.action_space)
    total, unit = (limits.steps, "steps") if limits.episodes is None else (limits.episodes, "episodes")
    steps = number = 0
    with progress_bar(f"Collecting {recorder.name}", total, unit=unit, enabled=progress) as (advance, _):
        while limits.episodes is None or number < limits.episodes:
            longest = None if limits.steps is None else limits.steps - steps
            values = recorder.new()
            first = seed if number == 0 else None
            length = _run_episode(env, policy, recorder, values, number, first, limits, longest)
            if length is None:  # the episode exceeds max_steps
                if number == 0:
                    raise first_too_long(recorder, limits)
                return
            yield recorder.episode(values, number)
            number += 1
            steps += length
            advance(1 if unit == "episodes" else length)
            if steps == limits.steps:
                return


def _random_policy(space: Any) -> Policy:
    return lambda observation: space.sample()


def _run_episode(
    env: Any,
    policy: Policy,
    recorder: Recorder,
    values: Values,
    number: int,
    seed: int | None,
    limits: CollectionLimits,
    longest: int | None,
) -> int | None:
    """Run one episode.

    Args:
        values: output. number: position of the episode, for errors. seed: of the reset, or None.
        limits: `episode_steps` cuts the episode. longest: most steps, or None.

    Returns:
        Its number of steps, or None if it has more than `longest`.
    """
    try:
        observation, _ = env.reset(seed=seed)
    except Exception as error:
        raise recorder.failed("raised in reset", number, 0, error) from error
    step = 0
    while True:
        if step == longest:
            return None
        recorder.keep(values, "observation", observation, number, step)
        try:
            action = policy(observation)
        except Exception as error:
            raise recorder.failed("the policy raised", number, step, error) from error
        recorder.keep(values, "action", action, number, step)
        try:
            observation, reward, terminated, truncated, _ = env.step(action)
        except Exception as error:
            raise recorder.failed("raised in step", number, step, error) from error
        recorder.keep(values, "next_observation", observation, number, step)
        step += 1
        truncated = bool(truncated) or step == limits.episode_steps
        recorder.end(values, reward, bool(terminated), truncated)
        if terminated or truncated:
            recorder.keep_final(values, observation, number, step)
            return step
