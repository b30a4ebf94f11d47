"""Collecting episodes from the environments of a Gymnasium vector environment.

The episodes are numbered in turns: the k-th episode of environment i of n has the number ``k * n + i``. Which numbers
are kept depends on nothing but the episodes themselves; see `gear_loader.sources.collect`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import Episode, describe
from gear_loader.sources.recording import (
    FINAL,
    CollectionLimits,
    Recorder,
    Values,
    action_seed,
    first_too_long,
)
from gear_loader.utils.progress import progress_bar

Array = np.ndarray[Any, Any]
NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"
"""Values of `gymnasium.vector.AutoresetMode`."""


def make_environment(gymnasium: Any, env: Any, num_envs: int | None) -> Any:
    """Make an environment, or with `num_envs` a SyncVectorEnv of so many.

    Args:
        env: an id, an EnvSpec, or a function that makes one environment.

    Raises:
        SourceError: it cannot be made.
    """
    spec = gymnasium.envs.registration.EnvSpec

    def make() -> Any:
        made = gymnasium.make(env) if isinstance(env, (str, spec)) else env()
        if not isinstance(made, gymnasium.Env):
            raise SourceError(f"The function {env!r} returned {describe(made)}; expected a gymnasium.Env.")
        return made

    try:
        return make() if num_envs is None else gymnasium.vector.SyncVectorEnv([make] * num_envs)
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(
            f"The environment {env!r} cannot be made: {type(error).__name__}: {error}"
        ) from error


def collect_vector(
    gymnasium: Any,
    envs: Any,
    policy: Callable[[Any], Any] | None,
    make_recorder: Callable[..., Recorder],
    limits: CollectionLimits,
    seed: int | None,
    progress: bool,
) -> Iterator[Episode]:
    """Run a policy in a vector environment and yield the episodes in the order of their numbers.

    Args:
        envs: a `gymnasium.vector.VectorEnv`. policy: observations [n, ...] -> actions [n, ...], or None.
        make_recorder: (name, observation space, action space) -> recorder.

    Raises:
        SourceError: as `gear_loader.sources.collect`.
    """
    name = envs.spec.id if envs.spec is not None else _inner_name(envs)
    recorder = make_recorder(name, envs.single_observation_space, envs.single_action_space)
    stepper = _Stepper(gymnasium, envs, recorder, limits)
    queue = _EpisodeQueue(envs.num_envs, recorder, limits)
    draw = _RandomActions(gymnasium, envs, seed) if policy is None else None
    total, unit = (limits.steps, "steps") if limits.episodes is None else (limits.episodes, "episodes")
    with progress_bar(f"Collecting {name}", total, unit=unit, enabled=progress) as (advance, _):
        stepper.reset(seed)
        while True:
            acting = queue.needed & ~stepper.resetting
            queue.keep(acting, stepper.rows("observation", stepper.observations))
            actions = stepper.act(policy, draw, acting)
            queue.keep(acting, stepper.rows("action", actions))
            rewards, terminated, truncated, last, finals = stepper.advance(actions, queue.lengths + 1, acting)
            queue.keep(acting, last)
            queue.end_step(acting, rewards, terminated, truncated, finals)
            for number, values, length in queue.complete():
                yield recorder.episode(values, number)
                advance(1 if unit == "episodes" else length)
            if not queue.needed.any():
                if not queue.end:
                    raise first_too_long(recorder, limits)
                return
            stepper.restart()


def _inner_name(envs: Any) -> str:
    inner = envs.unwrapped
    specs = getattr(inner, "envs", None)
    if specs:
        first = specs[0]
        return str(first.spec.id if first.spec is not None else type(first.unwrapped).__name__)
    return type(inner).__name__


class _EpisodeQueue:
    """Episodes that are being recorded, or wait for the episodes before them.

    Attributes:
        end: number of the first episode that is not needed.
        needed: bool [n], environments whose current episode is needed.
        lengths: int64 [n], steps of the current episode of each environment.
    """

    def __init__(self, count: int, recorder: Recorder, limits: CollectionLimits) -> None:
        self._count, self._recorder, self._most = count, recorder, limits.steps
        self.end = 2**62 if limits.episodes is None else limits.episodes
        self._numbers = np.arange(count)
        self.needed = self._numbers < self.end
        self.lengths = np.zeros(count, dtype=np.int64)
        self._open: list[Values] = [recorder.new() for _ in range(count)]
        self._done: dict[int, tuple[Values, int]] = {}
        self._next = 0  # number of the next episode to yield
        self._yielded = self._held = 0  # steps of the episodes yielded, and of all others

    def keep(self, acting: Array, rows: dict[str, Array]) -> None:
        """Copy a part of a step of the environments that are acting: standard column -> [n, ...]."""
        for i in np.flatnonzero(acting).tolist():
            for role, batch in rows.items():
                self._open[i][role].append(batch[i].copy())

    def end_step(
        self,
        acting: Array,
        rewards: Array,
        terminated: Array,
        truncated: Array,
        finals: dict[int, dict[str, Array]],
    ) -> None:
        """Record rewards and flags, [n], and end episodes, with their last observations: environment -> columns."""
        self.lengths += acting
        self._held += int(acting.sum())
        ended = terminated | truncated
        for i in np.flatnonzero(acting).tolist():
            self._recorder.end(self._open[i], rewards[i], bool(terminated[i]), bool(truncated[i]))
            if ended[i]:
                if i in finals:
                    self._open[i][FINAL] = [finals[i]]
                self._done[int(self._numbers[i])] = self._open[i], int(self.lengths[i])
                self._open[i], self.lengths[i] = self._recorder.new(), 0
                self._numbers[i] += self._count

    def complete(self) -> Iterator[tuple[int, Values, int]]:
        """Take the episodes whose turn has come: number, values and length."""
        if self._most is not None and self._yielded + self._held > self._most:
            self._find_end(self._most)
        while self._next < self.end and self._next in self._done:
            values, length = self._done.pop(self._next)
            self._yielded += length
            self._held -= length
            yield self._next, values, length
            self._next += 1
        if self._yielded == self._most:
            self.end = self._next
        self.needed = self._numbers < self.end

    def _find_end(self, most: int) -> None:
        """Find the first episode that exceeds `most` steps together with all before it; it is not needed."""
        known = {number: length for number, (_, length) in self._done.items()}
        known |= dict(zip(self._numbers.tolist(), self.lengths.tolist(), strict=True))
        steps = self._yielded
        for number in sorted(known):
            steps += known[number]
            if steps > most and number < self.end:
                self.end = number
        for number in [number for number in known if number >= self.end]:
            self._held -= known[number]
            self._done.pop(number, None)
        for i in np.flatnonzero(self._numbers >= self.end).tolist():
            self._open[i], self.lengths[i] = self._recorder.new(), 0


class _RandomActions:
    """Random actions: environment i gets those that it would get alone."""

    def __init__(self, gymnasium: Any, envs: Any, seed: int | None) -> None:
        self._utils = gymnasium.vector.utils
        self._space = envs.single_action_space
        self._spaces = [copy.deepcopy(self._space) for _ in range(envs.num_envs)]
        for i, space in enumerate(self._spaces):
            space.seed(None if seed is None else action_seed(seed + i))
        self._last = [space.sample() for space in map(copy.deepcopy, self._spaces)]

    def __call__(self, acting: Array) -> Any:
        """Actions [n, ...]; an environment that is not acting gets the action before."""
        for i in np.flatnonzero(acting).tolist():
            self._last[i] = self._spaces[i].sample()
        empty = self._utils.create_empty_array(self._space, n=len(self._spaces), fn=np.zeros)
        return self._utils.concatenate(self._space, self._last, empty)


class _Stepper:
    """Steps a vector environment in any autoreset mode.

    Attributes:
        observations: of the n environments, on which they act next. step: number of steps taken.
        resetting: bool [n], environments that ignore the next action, because it resets them.
    """

    def __init__(self, gymnasium: Any, envs: Any, recorder: Recorder, limits: CollectionLimits) -> None:
        self._envs, self._recorder, self._cut = envs, recorder, limits.episode_steps
        mode = envs.metadata.get("autoreset_mode")
        self._mode = getattr(mode, "value", mode)
        if self._mode not in (NEXT_STEP, SAME_STEP, DISABLED):
            raise SourceError(
                f"The environment {recorder.name} has metadata['autoreset_mode'] {mode!r}; expected a "
                "gymnasium.vector.AutoresetMode, to know when its environments are reset (Gymnasium 1.1 or newer)."
            )
        standard = gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv
        if self._mode == NEXT_STEP and not getattr(envs.unwrapped, "shared_memory", True):
            # Its reset leaves resets pending, which would show as steps (Gymnasium 1.4).
            raise SourceError(
                f"The environment {recorder.name} has autoreset mode NEXT_STEP and shared_memory=False, with which "
                "Gymnasium resets environments once more after reset(). Expected shared_memory=True or another "
                "autoreset_mode."
            )
        if self._cut is not None and not isinstance(envs.unwrapped, standard):
            raise SourceError(
                f"max_episode_steps={self._cut} was given with a {type(envs.unwrapped).__name__}; expected a "
                "SyncVectorEnv or AsyncVectorEnv, which can reset single environments. Give the limit to the "
                "environment itself."
            )
        self.observations: Any = None
        self.step = 0
        self.resetting = np.zeros(envs.num_envs, dtype=bool)
        self._over = self.resetting.copy()  # environments to be reset by `restart`

    def rows(self, kind: str, value: Any) -> dict[str, Array]:
        """As `Recorder.rows`, of all environments."""
        return self._recorder.rows(kind, value, (self._envs.num_envs,), self.step)

    def reset(self, seed: int | None) -> None:
        """Reset all environments."""
        try:
            self.observations, _ = self._envs.reset(seed=seed)
        except Exception as error:
            raise self._recorder.failed("raised in reset", None, 0, error) from error

    def restart(self) -> None:
        """Reset the environments that do not reset themselves."""
        if not self._over.any():
            return
        try:
            self.observations, _ = self._envs.reset(options={"reset_mask": self._over.copy()})
        except Exception as error:
            raise self._recorder.failed("raised in reset", None, self.step, error) from error

    def act(
        self, policy: Callable[[Any], Any] | None, draw: Callable[[Array], Any] | None, acting: Array
    ) -> Any:
        """Actions of the policy, or random ones, for all environments."""
        if policy is None:
            assert draw is not None
            return draw(acting)
        try:
            return policy(self.observations)
        except Exception as error:
            raise self._recorder.failed("the policy raised", None, self.step, error) from error

    def advance(
        self, actions: Any, lengths: Array, acting: Array
    ) -> tuple[Array, Array, Array, dict[str, Array], dict[int, dict[str, Array]]]:
        """Take one step in all environments.

        Args:
            lengths: int64 [n], steps of each episode with this one. acting: bool [n], environments that count.

        Returns:
            Rewards [n], terminated and truncated, bool [n], and the next observations as far as they are recorded:
            standard column -> [n, ...]; where an episode ends, its last observation. These again, as far as
            observations are recorded: environment -> standard column -> [*shape].
        """
        count = self._envs.num_envs
        try:
            self.observations, rewards, terminated, truncated, infos = self._envs.step(actions)
        except Exception as error:
            raise self._recorder.failed("raised in step", None, self.step, error) from error
        rewards = np.array(rewards)
        flags = [np.array(values, dtype=bool) for values in (terminated, truncated)]
        for role, values in zip(("reward", "terminated", "truncated"), (rewards, *flags), strict=True):
            if values.shape != (count,):
                raise self._recorder.misfit(
                    role, None, self.step, f"has shape {list(values.shape)}; expected {[count]}"
                )
        ended = flags[0] | flags[1]
        cut = np.zeros(count, dtype=bool) if self._cut is None else acting & (lengths == self._cut)
        last = self.rows("next_observation", self.observations)
        if last and self._mode == SAME_STEP:
            last = {role: batch.copy() for role, batch in last.items()}
            self._insert_final(last, infos, ended & acting)
        finals = self._finals(infos, ended & acting, cut)
        self.resetting = ended if self._mode == NEXT_STEP else np.zeros(count, dtype=bool)
        self._over = (cut | ended) if self._mode == DISABLED else cut & ~ended
        self.step += 1
        return rewards, flags[0], flags[1] | cut, last, finals

    def _finals(self, infos: Any, ended: Array, cut: Array) -> dict[int, dict[str, Array]]:
        """Copies of the last observations of episodes that end; without those that the environment does not give."""
        over = np.flatnonzero(ended | cut).tolist()
        finals: dict[int, dict[str, Array]] = {}
        if not over:
            return finals
        rows = self.rows("observation", self.observations)
        for i in over:
            if self._mode == SAME_STEP and ended[i]:
                if "final_obs" not in infos:
                    continue
                found = self._recorder.rows("observation", infos["final_obs"][i], (), self.step)
            else:
                found = {role: batch[i] for role, batch in rows.items()}
            finals[i] = {role: value.copy() for role, value in found.items()}
        return finals

    def _insert_final(self, last: dict[str, Array], infos: Any, ended: Array) -> None:
        """Put the last observations of episodes, which mode SAME_STEP returns apart, into the batch."""
        for i in np.flatnonzero(ended).tolist():
            try:
                final = infos["final_obs"][i]
            except (KeyError, TypeError, IndexError) as error:
                raise SourceError(
                    f"The environment {self._recorder.name}, step {self.step} of the collection: environment {i} "
                    "ended without infos['final_obs'], which autoreset mode SAME_STEP has for next_observation."
                ) from error
            for role, row in self._recorder.rows("next_observation", final, (), self.step).items():
                last[role][i] = row
