"""RLPD: half of each batch out of offline episodes, half out of what was just played."""

import numpy as np
from cpprb import ReplayBuffer

from benchmarks.lines.world import OFFLINE, learn_mixed, play

columns = {"obs": {"shape": 4}, "act": {"dtype": np.int64}, "rew": {}, "next_obs": {"shape": 4}, "done": {}}
offline, online = ReplayBuffer(10_000, columns), ReplayBuffer(100_000, columns)


def add(buffer, transition):
    obs, action, reward, next_obs, terminated, truncated = transition
    buffer.add(obs=obs, act=action, rew=reward, next_obs=next_obs, done=terminated)
    if terminated or truncated:
        buffer.on_episode_end()


for transition in play(1_000, OFFLINE):  # shared
    add(offline, transition)
for number, transition in enumerate(play(1_000)):  # shared
    add(online, transition)
    if number > 500:  # shared
        old, new = offline.sample(32), online.sample(32)
        batch = {name: np.concatenate([old[name], new[name]]) for name in columns}
        discount = 0.99 * (1 - batch["done"])
        learn_mixed(batch["obs"], batch["act"], batch["rew"], batch["next_obs"], discount)  # shared
