"""Stable-Baselines3's replay buffer, alone and below its learners. It has none that draws by priority."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import learn, transitions
from benchmarks.peers.transitions import ENVS, UNIFORM

PACKAGES = ("stable-baselines3", "gymnasium", "torch", "numpy")
MODULES = ("stable_baselines3", "torch")


class Transitions(transitions.Subject):
    """`ReplayBuffer`, with the time limits that it has by default; calls of `add` are those of its learners."""

    modes = (UNIFORM, *ENVS)

    def open(self) -> None:
        from gymnasium import spaces

        space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        np.random.seed(self.data.seed)  # noqa: NPY002 - it draws by the global state
        kind, size = self.kind(), self.data.steps
        self.store = kind(size, space, spaces.Discrete(2), device="cpu", n_envs=self.envs)

    def kind(self) -> Any:
        from stable_baselines3.common.buffers import ReplayBuffer

        return ReplayBuffer

    def fill(self) -> None:
        """Write its arrays, which are public: a million calls of `add` take longer."""
        store, rows = self.store, self.data.columns()
        parts = {
            "observations": rows["obs"],
            "next_observations": rows["next_obs"],
            "actions": rows["action"],
            "rewards": rows["reward"],
            "dones": self.data.terminated | self.data.truncated,
            "timeouts": self.data.truncated,
        }
        for name, values in parts.items():
            array = getattr(store, name)
            array[...] = values[: len(array) * self.envs].reshape(array.shape)
        store.pos, store.full = 0, True

    def sample(self) -> Any:
        return self.store.sample(self.batch)

    def found(self, batch: Any) -> Mapping[str, Any]:
        rows = (batch.observations, batch.actions, batch.rewards, batch.next_observations, batch.dones)
        return dict(zip(transitions.COLUMNS, rows, strict=True))

    def calls(self, steps: np.ndarray, ends: np.ndarray) -> Iterator[Any]:
        data = self.data
        for row, done in zip(steps, ends, strict=True):
            cut = done & ~data.terminated[row]
            infos = [{"TimeLimit.truncated": bool(c)} if d else {} for c, d in zip(cut, done, strict=True)]
            yield data.obs[row], data.next_obs[row], data.action[row], data.reward[row], done, infos

    def append(self, call: Any) -> None:
        self.store.add(*call)


KINDS: dict[str, dict[str, Any]] = {"transitions": {"SB3": Transitions}, "learn": {"SB3": learn.Learner}}
