"""Learning as a task: a learner of Stable-Baselines3, the same but for its replay buffer.

DQN learns CartPole-v1, SAC Pendulum-v1. A seed decides everything that is random, so two buffers that give the same
batches lead to the same weights.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers import source

LEARNERS: Mapping[str, Mapping[str, Any]] = {
    "DQN, CartPole-v1": {
        "learning_rate": 2.3e-3,
        "batch_size": 64,
        "buffer_size": 100_000,
        "learning_starts": 1_000,
        "gamma": 0.99,
        "target_update_interval": 10,
        "train_freq": 256,
        "gradient_steps": 128,
        "exploration_fraction": 0.16,
        "exploration_final_eps": 0.04,
        "policy_kwargs": {"net_arch": [256, 256]},
    },
    "SAC, Pendulum-v1": {
        "learning_rate": 1e-3,
        "batch_size": 256,
        "buffer_size": 100_000,
        "learning_starts": 200,
        "policy_kwargs": {"net_arch": [64, 64]},
    },
}
"""The learner and its environment, and what it is told: as in RL Baselines3 Zoo, with smaller networks for SAC."""


class Learner:
    """Trains with the library's own buffer."""

    def buffer(self) -> Any:
        from stable_baselines3.common.buffers import ReplayBuffer

        return ReplayBuffer

    def run(self, learner: str, seed: int, steps: int, episodes: int) -> dict[str, Any]:
        """Train for so many steps of the environment, then play episodes without noise.

        Returns:
            seconds, processor_seconds: of training. replay_seconds: processor time of the buffer's `add` and `sample`.
            returns: of each episode played. weights: a digest of the policy's weights.
        """
        import gymnasium
        import stable_baselines3 as sb3
        from stable_baselines3.common.evaluation import evaluate_policy

        name, environment = learner.split(", ")
        kind = timed(self.buffer())
        env = gymnasium.make(environment)
        model = getattr(sb3, name)(
            "MlpPolicy", env, seed=seed, device="cpu", replay_buffer_class=kind, **LEARNERS[learner]
        )
        gc.collect()
        begin, processor = time.perf_counter(), time.process_time()
        model.learn(steps)
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        played = gymnasium.make(environment)
        played.reset(seed=10_000 + seed)
        returns, _ = evaluate_policy(model, played, episodes, return_episode_rewards=True, warn=False)
        digest = hashlib.sha256()
        for values in model.policy.state_dict().values():
            digest.update(np.ascontiguousarray(values.numpy()).tobytes())
        return {
            "seconds": seconds,
            "processor_seconds": processor,
            "replay_seconds": kind.seconds,
            "returns": [float(value) for value in returns],
            "weights": digest.hexdigest(),
        }

    def close(self) -> None:
        """It holds nothing."""


def timed(kind: Any) -> Any:
    """A subclass of a buffer that adds up the processor time of `add` and `sample` in its attribute `seconds`."""

    class Timed(kind):  # type: ignore[misc]
        seconds = 0.0

        def add(self, *args: Any, **options: Any) -> None:
            begin = time.process_time()
            super().add(*args, **options)
            Timed.seconds += time.process_time() - begin

        def sample(self, *args: Any, **options: Any) -> Any:
            begin = time.process_time()
            batch = super().sample(*args, **options)
            Timed.seconds += time.process_time() - begin
            return batch

    return Timed


class Worker(source.Worker):
    """Trains."""

    def run(self, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.kind().run(**arguments)
        return found
