"""DQN: 3-step returns of one environment."""

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer

from benchmarks.lines.world import learn_td, play

observations, actions = spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2)
buffer = NStepReplayBuffer(100_000, observations, actions, "cpu", n_steps=3, gamma=0.99)
for number, transition in enumerate(play(1_000)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    done, infos = np.array([terminated or truncated]), [{"TimeLimit.truncated": truncated}]
    buffer.add(obs, next_obs, np.array([action]), np.array([reward]), done, infos)
    if number > 500:  # shared
        batch = buffer.sample(32)
        discount = batch.discounts * (1 - batch.dones)
        learn_td(
            batch.observations, batch.actions, batch.rewards, batch.next_observations, discount
        )  # shared
