"""RLPD: half of each batch out of offline episodes, half out of what was just played."""

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from benchmarks.lines.world import OFFLINE, learn_mixed, play

observations, actions = spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2)
offline = ReplayBuffer(10_000, observations, actions, "cpu")
online = ReplayBuffer(100_000, observations, actions, "cpu")


def add(buffer, transition):
    obs, action, reward, next_obs, terminated, truncated = transition
    done, infos = np.array([terminated or truncated]), [{"TimeLimit.truncated": truncated}]
    buffer.add(obs, next_obs, np.array([action]), np.array([reward]), done, infos)


for transition in play(1_000, OFFLINE):  # shared
    add(offline, transition)
for number, transition in enumerate(play(1_000)):  # shared
    add(online, transition)
    if number > 500:  # shared
        parts = zip(offline.sample(32), online.sample(32), strict=True)
        batch = ReplayBufferSamples(*(None if a is None else torch.cat([a, b]) for a, b in parts))
        discount = 0.99 * (1 - batch.dones)
        learn_mixed(
            batch.observations, batch.actions, batch.rewards, batch.next_observations, discount
        )  # shared
