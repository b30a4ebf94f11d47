"""DQN: 3-step returns of one environment, by hand: `Nstep=` loses the next observation where an episode is cut off."""

import numpy as np
from cpprb import ReplayBuffer

from benchmarks.lines.world import learn_td, play

columns = {
    "obs": {"shape": 4},
    "act": {"dtype": np.int64},
    "rew": {},
    "next_obs": {"shape": 4},
    "discount": {},
}
buffer = ReplayBuffer(100_000, columns)
steps = []
for number, transition in enumerate(play(1_000)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    steps.append((obs, action, reward))
    while len(steps) == 3 or (steps and (terminated or truncated)):
        returned = sum(0.99**k * step[2] for k, step in enumerate(steps))
        discount = 0.0 if terminated else 0.99 ** len(steps)
        first = steps.pop(0)
        buffer.add(obs=first[0], act=first[1], rew=returned, next_obs=next_obs, discount=discount)
    if number > 500:  # shared
        batch = buffer.sample(32)
        learn_td(batch["obs"], batch["act"], batch["rew"], batch["next_obs"], batch["discount"])  # shared
