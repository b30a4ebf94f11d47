"""RLlib's DQN on CartPole and its SAC on Pendulum (new API stack), with a replay buffer of Gear Loader.

Run: pip install '.[rllib]' (in a clone of Gear Loader), then python examples/rllib_replay.py --algorithm dqn, or sac

RLlib's buffers keep episodes as Python objects. The buffer below, a class of 60 lines, keeps their steps in a
`gear_loader.ReplayBuffer`: as arrays, each observation once, drawn by priority with n-step returns. The learner takes
what is drawn as from a buffer of RLlib. It takes one to three minutes on two cores; the exit status is 1 if the mean
return of the last episodes does not reach 200 (CartPole), or -300 (Pendulum, which begins at about -1,200).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

import gear_loader as gear

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import ray
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.algorithms.sac import SACConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.utils.metrics import (
        ENV_RUNNER_RESULTS,
        EPISODE_RETURN_MEAN,
        NUM_ENV_STEPS_SAMPLED_LIFETIME,
    )
    from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[rllib]', in a clone of Gear Loader.")

ENVS = {"dqn": 8, "sac": 4}  # environments, which step together
GOALS = {"dqn": 200.0, "sac": -300.0}
GAMMA = 0.99


class GearEpisodeReplayBuffer(PrioritizedEpisodeReplayBuffer):
    """Episodes of RLlib in, a list of episodes of one step out; the steps lie in a `gear_loader.ReplayBuffer`.

    Its name ends in EpisodeReplayBuffer, by which RLlib knows what it takes; it is a PrioritizedEpisodeReplayBuffer, so
    that RLlib gives it new priorities.

    Args:
        num_envs: episodes that run at the same time: environments of a runner, times the runners.
    """

    def __init__(
        self,
        capacity: int = 50_000,
        *,
        num_envs: int,
        n_step: int = 1,
        gamma: float = 0.99,
        alpha: float = 0.6,
        beta: float = 0.4,
        **options: Any,
    ) -> None:
        EpisodeReplayBuffer.__init__(self, capacity, **options)  # for its metrics
        sampler = gear.Prioritized(alpha=alpha, beta=beta, unit="step")
        self.steps = gear.ReplayBuffer(
            capacity, n_step=n_step, gamma=gamma, sampler=sampler, num_envs=num_envs, device="cpu"
        )
        # Which environment of the buffer an episode is in. A new one takes the place of the one that went on least
        # recently: it has ended, or its runner has died, and then the buffer takes it as truncated.
        self.places: OrderedDict[str, int] = OrderedDict(
            (f"none {place}", place) for place in range(num_envs)
        )

    def __len__(self) -> int:
        return len(self.steps)

    def get_num_timesteps(self, module_id: Any = None) -> int:
        return len(self.steps)

    def add(self, episodes: Any, weight: float | None = None) -> None:
        """Add episodes, or pieces of them: those of one id follow each other."""
        rows: list[list[tuple[Any, ...]]] = [[] for _ in self.places]
        for episode in episodes if isinstance(episodes, list) else [episodes]:
            if episode.id_ not in self.places:
                self.places[episode.id_] = self.places.popitem(last=False)[1]
            self.places.move_to_end(episode.id_, last=not episode.is_done)
            obs, last = episode.get_observations(), len(episode) - 1
            steps = zip(obs, episode.get_actions(), episode.get_rewards(), obs[1:], strict=False)
            rows[self.places[episode.id_]] += [
                (*step, t == last and episode.is_terminated, t == last and episode.is_truncated)
                for t, step in enumerate(steps)
            ]
        for t in range(max(map(len, rows))):
            active = np.array([t < len(each) for each in rows])
            some = rows[int(active.argmax())][
                t
            ]  # in the place of those that have no step; it is ignored there
            columns = zip(*(each[t] if t < len(each) else some for each in rows), strict=True)
            self.steps.add(*map(np.stack, columns), active=active)

    def sample(self, num_items: int | None = None, **options: Any) -> list[SingleAgentEpisode]:
        """Draw steps; as RLlib wants them, each is an episode of one step, whose reward is the n-step return."""
        self.drawn = batch = self.steps.sample(num_items)
        count = batch["discount"].log() / math.log(
            self.steps.gamma
        )  # rewards in a return; infinite at an end
        columns = {
            name: batch[name].numpy() for name in ("obs", "next_obs", "action", "reward", "priority_weight")
        }
        ended = (batch["discount"] == 0).tolist()
        return [
            SingleAgentEpisode(
                observations=[obs, next_obs],
                actions=[action],
                rewards=[reward],
                terminated=end,
                extra_model_outputs={"weights": [weight], "n_step": [rewards]},
                len_lookback_buffer=0,
            )
            for obs, next_obs, action, reward, weight, end, rewards in zip(
                *columns.values(),
                ended,
                count.nan_to_num(posinf=self.steps.n_step).round().numpy(),
                strict=True,
            )
        ]

    def update_priorities(self, priorities: Any, module_id: Any = None) -> None:
        self.steps.update_priority(self.drawn, np.abs(priorities))

    def get_state(self) -> dict[str, Any]:
        return {"draws": self.steps.state_dict()}  # save the steps with self.steps.save(path)

    def set_state(self, state: dict[str, Any]) -> None:
        self.steps.load_state_dict(state["draws"])


def buffer(envs: int, n_step: int) -> dict[str, Any]:
    """The configuration that makes RLlib use the buffer."""
    kind = f"{__name__}.GearEpisodeReplayBuffer"
    return {"type": kind, "capacity": 50_000, "num_envs": envs, "n_step": n_step, "gamma": GAMMA}


def dqn() -> DQNConfig:
    envs, n_step = ENVS["dqn"], 3
    return (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=envs, rollout_fragment_length=n_step + 1)
        .training(
            lr=1e-3,
            gamma=GAMMA,
            n_step=n_step,
            train_batch_size_per_learner=64,
            training_intensity=16,  # rows learnt from, for each step
            target_network_update_freq=400,
            epsilon=[(0, 1.0), (8_000, 0.05)],
            replay_buffer_config=buffer(envs, n_step),
        )
    )


class OpenSACConfig(SACConfig):
    """RLlib's configuration of SAC, which takes buffers of its own alone, by their names; with any buffer."""

    def validate(self) -> None:
        buffer = self.replay_buffer_config
        self.replay_buffer_config = {**buffer, "type": "PrioritizedEpisodeReplayBuffer"}
        super().validate()
        self.replay_buffer_config = buffer


def sac() -> SACConfig:
    envs = ENVS["sac"]
    small = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="relu")
    return (
        OpenSACConfig()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=envs, rollout_fragment_length=1)
        .rl_module(model_config=small)
        .training(
            actor_lr=1e-3,
            critic_lr=2e-3,
            alpha_lr=1e-3,
            gamma=GAMMA,
            tau=0.01,
            train_batch_size_per_learner=128,
            training_intensity=64,  # rows learnt from, for each step
            num_steps_sampled_before_learning_starts=800,
            replay_buffer_config=buffer(envs, 1),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--algorithm", choices=sorted(GOALS), default="dqn", help="(default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=60_000, help="in the environments (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=170, help="after which to stop (default: %(default)s)"
    )
    parser.add_argument("--stop", type=float, help="mean return to reach (default: 200, or -300 for sac)")
    options = parser.parse_args()
    goal = GOALS[options.algorithm] if options.stop is None else options.stop
    started = time.monotonic()
    torch.set_num_threads(1)  # the network is small
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    config = {"dqn": dqn, "sac": sac}[options.algorithm]().debugging(seed=0)
    config.reporting(min_sample_timesteps_per_iteration=800)
    algorithm = config.build_algo()
    best = -math.inf
    for _ in range(options.steps // config.min_sample_timesteps_per_iteration):
        result = algorithm.train()[ENV_RUNNER_RESULTS]
        best = max(best, result.get(EPISODE_RETURN_MEAN, -math.inf))
        steps, seconds = result[NUM_ENV_STEPS_SAMPLED_LIFETIME], time.monotonic() - started
        print(
            f"{steps:7,.0f} steps, {seconds:4.0f} s: return {result.get(EPISODE_RETURN_MEAN, math.nan):4.0f}",
            flush=True,
        )
        if best >= goal or seconds > options.seconds:
            break
    print(algorithm.local_replay_buffer.steps.table)
    algorithm.stop()
    ray.shutdown()
    if best < goal:
        sys.exit(f"The mean return of the last episodes reached {best:.0f}; expected {goal:.0f}.")
    print(f"Checked: the mean return of the last episodes reached {best:.0f}.")


if __name__ == "__main__":
    main()
