"""The environment of `train`: episodes of a one-legged robot, and what a policy reaches in it.

Gymnasium's Hopper-v5, simulated by MuJoCo; an episode ends when the robot falls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.peers.episodes import WINDOW
from benchmarks.peers.policy import Policy

ENVIRONMENT = "Hopper-v5"
# Torques of thigh, leg and foot as a linear function of the 11 observed positions and velocities: a hopping gait that
# random search found (Mania et al. 2018, arXiv:1803.07055), rounded.
GAIT = np.array(
    [
        [0.30, -1.55, -1.56, 0.58, 0.16, 0.25, 0.06, -0.05, -0.18, 0.00, 0.01],
        [0.15, -3.73, 0.22, -0.27, 0.14, -0.47, 0.03, -0.78, -0.03, 0.00, -0.01],
        [3.11, 0.16, -0.04, 0.75, -0.21, -0.34, -0.32, -0.22, 0.17, 0.08, 0.00],
    ]
)
TORQUE = np.array([-0.64, 0.18, -2.61])
# With an additional torque of -0.05 on the foot the robot hops at full speed. The more of it, the slower it hops; at
# -1.1 it stands, and from -1.15 on it falls.
FOOT_TORQUES = (-0.05, -0.4, -0.8, -1.1, -1.18, -1.25)
NOISE = 0.1  # standard deviation of the noise on every action
EVALUATION_SEED = 1_000_000  # no episode that was collected has such seeds


def _environment(horizon: int) -> Any:
    import gymnasium

    return gymnasium.make(ENVIRONMENT, max_episode_steps=horizon)


def collect(path: Path, *, episodes: int, horizon: int, seed: int) -> float:
    """Collect episodes of behaviours from good to bad, in random order, and write them to a file.

    See `benchmarks.peers.episodes.Data` for what is in it. Returns: The mean return of the best behaviour.
    """
    collected: list[dict[str, np.ndarray]] = []
    best, environment = -np.inf, _environment(horizon)
    for i, part in enumerate(np.array_split(range(episodes), len(FOOT_TORQUES))):
        random = np.random.default_rng([seed, i])

        def act(observation: np.ndarray, foot: float = FOOT_TORQUES[i], random: Any = random) -> np.ndarray:
            action = (
                GAIT @ observation + (TORQUE + np.array([0.0, 0.0, foot])) + NOISE * random.standard_normal(3)
            )
            return np.asarray(action.clip(-1.0, 1.0), dtype=np.float32)

        found = gear.sources.collect(
            environment,
            act,
            episodes=len(part),
            seed=1000 * seed + i,
            columns=("observation", "action", "reward"),
            progress=False,
        )
        best = max(best, float(np.mean([episode["reward"].sum() for episode in found])))
        collected += found
    environment.close()
    order = np.random.default_rng(seed).permutation(len(collected))
    chosen = [collected[i] for i in order]
    lengths = np.array([len(episode["reward"]) for episode in chosen])
    to_go = [np.cumsum(episode["reward"][::-1])[::-1] for episode in chosen]
    np.savez(
        path,
        **{n: np.concatenate([e[n] for e in chosen]).astype(np.float32) for n in ("observation", "action")},
        return_to_go=np.concatenate(to_go).astype(np.float32),
        step=np.concatenate([np.arange(length) for length in lengths]).astype(np.float32),
        lengths=lengths,
        horizon=horizon,
        scale=max(float(values[0]) for values in to_go),
    )
    return best


@torch.inference_mode()
def evaluate(policy: Policy, asked: float, *, episodes: int, horizon: int) -> float:
    """The mean return of a policy that is asked for one, over episodes that all policies get alike."""
    environments = [_environment(horizon) for _ in range(episodes)]
    observation, action = torch.zeros(episodes, horizon, 11), torch.zeros(episodes, horizon, 3)
    to_go, returns = torch.zeros(episodes, horizon), np.zeros(episodes)
    for i, environment in enumerate(environments):
        observation[i, 0] = torch.as_tensor(environment.reset(seed=EVALUATION_SEED + i)[0])
    running = list(range(episodes))
    for t in range(horizon):
        to_go[running, t] = torch.as_tensor(asked - returns, dtype=torch.float32)[running]
        recent = slice(max(0, t - WINDOW + 1), t + 1)
        batch = {
            "observation": observation[running, recent],
            "action": action[running, recent],
            "return_to_go": to_go[running, recent],
            "step": torch.arange(recent.start, recent.stop, dtype=torch.float32).expand(len(running), -1),
        }
        action[running, t] = policy(batch)[:, -1]
        for i in list(running):
            seen, reward, terminated, truncated, _ = environments[i].step(action[i, t].numpy())
            returns[i] += reward
            if terminated or truncated:
                running.remove(i)
            else:
                observation[i, t + 1] = torch.as_tensor(seen)
        if not running:
            break
    for environment in environments:
        environment.close()
    return float(returns.mean())
