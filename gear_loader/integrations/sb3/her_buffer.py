"""Hindsight experience replay (HER) for stable-baselines3 on a `gear_loader.Table`."""

from __future__ import annotations

import collections
import copy as copies
import warnings
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY, GoalSelectionStrategy
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer as _HerReplayBuffer

from gear_loader.errors import SchemaError, TableEmptyError
from gear_loader.integrations.sb3.transition_buffers import DictReplayBuffer, randint
from gear_loader.storage.schema import Window
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import at_least, flag

_ACHIEVED, _DESIRED = "achieved_goal", "desired_goal"


class HerReplayBuffer(DictReplayBuffer, _HerReplayBuffer):
    """Drop-in for `stable_baselines3.HerReplayBuffer` (Andrychowicz et al., 2017), of goal environments.

    Like `DictReplayBuffer`, but in a share of each batch, ``n_sampled_goal / (n_sampled_goal + 1)``, the desired goal
    is replaced by one that the episode achieved, and the reward by that of the environment's ``compute_reward``. From
    the same seed it samples the same batches as SB3's buffer. Episodes that have not ended, or that are partly
    overwritten, are not sampled. The time of a draw does not grow with `buffer_size`.

    Args:
        env: the environments; the first one computes rewards. SB3's algorithms pass it.
        n_sampled_goal: transitions with another goal for each one with its own.
        goal_selection_strategy: ``"future"`` (a step from the transition on), ``"episode"`` or ``"final"``.
        copy_info_dict: whether ``compute_reward`` gets copies of the infos; else empty dicts.
        optimize_memory_usage, copy, name: and all others, as of `ReplayBuffer`.

    Raises:
        SchemaError: a space without the keys ``achieved_goal`` and ``desired_goal``, or an unknown strategy.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        *,
        copy: bool = True,
        name: str | None = None,
    ) -> None:
        strategy = goal_selection_strategy
        if isinstance(strategy, str):
            strategy = KEY_TO_GOAL_STRATEGY.get(strategy.lower(), strategy)
        if not isinstance(strategy, GoalSelectionStrategy):
            raise SchemaError(
                f"goal_selection_strategy is {shown(strategy)}; expected one of {sorted(KEY_TO_GOAL_STRATEGY)}."
            )
        missing = {_ACHIEVED, _DESIRED} - set(getattr(observation_space, "spaces", ()))
        if missing:
            raise SchemaError(
                f"The observation space {shown(observation_space)} lacks {sorted(missing)}; expected that of a goal "
                "environment. Without goals use DictReplayBuffer or ReplayBuffer."
            )
        self.goal_selection_strategy = strategy
        self.n_sampled_goal = at_least("n_sampled_goal", n_sampled_goal, 0)
        self.copy_info_dict = flag("copy_info_dict", copy_info_dict)
        self.her_ratio = 1 - 1.0 / (self.n_sampled_goal + 1)
        self.env: Any = env
        DictReplayBuffer.__init__(
            self,
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            copy=copy,
            name=name,
        )
        self.infos: Any = np.empty((self.buffer_size if copy_info_dict else 0, self.n_envs), dtype=object)
        self._forget()

    def _forget(self) -> None:
        """There are no episodes."""
        # Of each transition of an ended episode: the episode's first call of `add`, and the one after its last.
        self._bounds: Array = np.zeros((self.buffer_size, self.n_envs, 2), dtype=np.int64)
        self._begins: Array = np.full(self.n_envs, self._added, dtype=np.int64)  # of the open episodes
        # The first calls of the episodes that have ended, oldest first, of each environment.
        self._episodes = [collections.deque[int]() for _ in range(self.n_envs)]

    def reset(self) -> None:
        """Remove all transitions."""
        super().reset()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """As of `ReplayBuffer`, without the environments: call `set_env` before the loaded buffer is sampled."""
        return {key: value for key, value in DictReplayBuffer.__getstate__(self).items() if key != "env"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DictReplayBuffer.__setstate__(self, state)
        self.env = None

    # ---------------------------------------------------------------- episodes

    @property
    def _reads_infos(self) -> bool:
        return bool(self.copy_info_dict) or super()._reads_infos

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]] | dict[str, Any],
    ) -> None:
        """As `ReplayBuffer.add`; transitions can be sampled when their episode has ended."""
        row = self.pos
        DictReplayBuffer.add(self, obs, next_obs, action, reward, done, infos)
        if self.copy_info_dict:
            self.infos[row] = infos
        for member in np.flatnonzero(self._ring.ended).tolist():
            self._end_episode(member)

    def _end_episode(self, member: int) -> None:
        begin, end = int(self._begins[member]), self._added
        self._begins[member] = end
        if begin >= end - self.buffer_size:
            self._bounds[np.arange(begin, end) % self.buffer_size, member] = begin, end
            self._episodes[member].append(begin)

    def _whole(self) -> Array:
        """The first call of `add` of each environment from which on all ended episodes are whole: int64 [n_envs]."""
        oldest = self._added - self.size()
        whole = self._begins.copy()
        for member, episodes in enumerate(self._episodes):
            while episodes and episodes[0] < oldest:
                episodes.popleft()
            if episodes:
                whole[member] = episodes[0]
        return whole

    @property
    def _current_ep_start(self) -> Array:
        """The ring position at which each environment's open episode begins, or its next one: int64 [n_envs]."""
        return self._begins % self.buffer_size

    @property
    def ep_start(self) -> Array:
        """A copy: the ring position of each transition's first one of its episode; int64 ``[buffer_size, n_envs]``."""
        return self._bounds[..., 0] % self.buffer_size

    @property
    def ep_length(self) -> Array:
        """A copy: steps of the episode, 0 where it cannot be sampled; int64 ``[buffer_size, n_envs]``."""
        known = self._bounds[..., 0] >= self._whole()
        return np.where(known, self._bounds[..., 1] - self._bounds[..., 0], 0)

    def truncate_last_trajectory(self) -> None:
        """End the open episodes, as after loading a buffer for environments that begin new ones; with a warning.

        Their last transitions count as ended by a time limit with `handle_timeout_termination`, else as terminated.
        """
        open_members = np.flatnonzero(self._begins != self._added).tolist()
        if not open_members:
            return
        warnings.warn(  # as SB3 words it
            "The last trajectory in the replay buffer will be truncated.\n"
            "If you are in the same episode as when the replay buffer was saved,\n"
            "you should use `truncate_last_trajectory=False` to avoid that issue.",
            stacklevel=2,
        )
        for member in open_members:
            self._ring.end(member, "truncated" if self.handle_timeout_termination else "terminated")
            self._end_episode(member)

    # ---------------------------------------------------------------- sampling

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw transitions of whole episodes uniformly with replacement, by numpy's global random state, as SB3 does.

        Args:
            batch_size: number of transitions B; the first ones have their own goals.
            env: a `VecNormalize`, which then normalises observations and rewards; or None.

        Returns:
            As of `DictReplayBuffer.sample`.

        Raises:
            TableEmptyError: no episode has ended. SchemaError: there is no environment; call `set_env`.
        """
        batch_size = at_least("batch_size", batch_size)
        virtual = int(self.her_ratio * batch_size)
        if virtual and self.env is None:
            raise SchemaError(
                "The buffer has no environment to compute rewards; call set_env(model.get_env()) first."
            )
        rows, members = self._draw(batch_size)
        goals = self._goals(rows[:virtual], members[:virtual])
        rows, members = (np.concatenate((each[virtual:], each[:virtual])) for each in (rows, members))
        batch = self._gather(rows, members)
        reward = batch["reward"]
        if virtual:
            relabelled = slice(batch_size - virtual, None)
            reward[relabelled] = self._relabel(
                batch, relabelled, rows[relabelled], members[relabelled], goals
            )
        reward = reward.reshape(-1, 1)
        if env is not None:
            reward = self.to_torch(self._normalize_reward(reward.cpu().numpy(), env))
        return self._as_samples(batch, slice(None), slice(None), reward, env)

    def _draw(self, count: int) -> tuple[Array, Array]:
        """Ring positions and environments, int64 [count] each, of whole episodes."""
        # Between neighbouring edges each environment's rows are all drawn or none.
        whole, size = self._whole(), self.buffer_size
        edges = np.unique(np.concatenate(([0, size], whole % size, self._begins % size)))
        drawn = (edges[:-1, None] - whole) % size < self._begins - whole  # [edges - 1, n_envs]
        width = drawn.sum(1)
        ends = np.cumsum(width * np.diff(edges))
        if ends[-1] == 0:
            raise TableEmptyError(
                "No episode has ended, so there are no goals. Choose learning_starts above the longest episode, "
                "or end one before the first sample."
            )
        ranks = randint(0, ends[-1], size=count)  # in SB3's order: by row, then by environment
        parts = np.searchsorted(ends, ranks, side="right")
        rows, places = np.divmod(ranks - (ends - width * np.diff(edges))[parts], width[parts])
        return edges[parts] + rows, np.argsort(~drawn, axis=1, kind="stable")[parts, places]

    def _goals(self, rows: Array, members: Array) -> Array:
        """Ring positions of transitions at whose ends the goals were achieved."""
        begins, ends = self._bounds[rows, members].T
        strategy = self.goal_selection_strategy
        if strategy == GoalSelectionStrategy.FINAL:
            steps = ends - begins - 1
        elif strategy == GoalSelectionStrategy.FUTURE:
            steps = randint((rows - begins) % self.buffer_size, ends - begins)
        else:
            steps = randint(0, ends - begins)
        goals: Array = (begins + steps) % self.buffer_size
        return goals

    def _relabel(self, batch: Any, rows: slice, places: Array, members: Array, goals: Array) -> torch.Tensor:
        """Put achieved goals into rows of a batch; return the rewards for them, float32."""
        window = self._windows()[f"next_observation.{_ACHIEVED}"]
        window = Window(
            1, window.offset, column=window.column or f"next_observation.{_ACHIEVED}", squeeze=True
        )
        both = np.concatenate((places, goals))
        achieved = self._host_rows({_ACHIEVED: window}, both, np.concatenate((members, members)))[0]
        achieved, desired = np.split(achieved, 2)
        infos = copies.deepcopy(self.infos[places, members]) if self.copy_info_dict else [{} for _ in places]
        rewards = self.env.env_method("compute_reward", achieved, desired, infos, indices=[0])[0]
        goal = torch.as_tensor(desired, device="cpu")
        for column in (f"observation.{_DESIRED}", f"next_observation.{_DESIRED}"):
            batch[column][rows] = goal.to(batch[column].device)
        found: torch.Tensor = torch.as_tensor(np.asarray(rewards, dtype=np.float32).reshape(-1), device="cpu")
        return found.to(batch["reward"].device)
