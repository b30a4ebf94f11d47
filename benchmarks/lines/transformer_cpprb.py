"""A decision transformer on offline episodes: windows of 20 steps with returns-to-go: each is an item, copied."""

import numpy as np
from cpprb import ReplayBuffer

from benchmarks.lines.world import episodes, learn_transformer

columns = {
    "obs": {"shape": (20, 4)},
    "act": {"shape": 20, "dtype": np.int64},
    "returns": {"shape": 20},
    "mask": {"shape": 20, "dtype": bool},
}
buffer = ReplayBuffer(2_000, columns)
for episode in episodes(20):
    count = len(episode["reward"])
    returns = episode["reward"][::-1].cumsum()[::-1]
    for step in range(count):
        which = np.arange(step - 19, step + 1)
        mask, which = which >= 0, which.clip(0)
        buffer.add(obs=episode["obs"][which], act=episode["action"][which], returns=returns[which], mask=mask)
for _ in range(20):
    batch = buffer.sample(64)
    learn_transformer(batch["obs"], batch["act"], batch["returns"], batch["mask"])  # shared
