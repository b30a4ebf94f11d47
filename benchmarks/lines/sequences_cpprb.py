"""R2D2: sequences of 40 steps that overlap by 20, with a recurrent state, by priority: each is an item."""

import numpy as np
from cpprb import PrioritizedReplayBuffer

from benchmarks.lines.world import learn_sequences, play, recurrent_state

columns = {
    "obs": {"shape": (40, 4)},
    "act": {"shape": 40, "dtype": np.int64},
    "rew": {"shape": 40},
    "state": {"shape": 8},
}
buffer = PrioritizedReplayBuffer(5_000, columns, alpha=0.9)
steps = []
for number, transition in enumerate(play(2_000)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    steps.append((obs, action, reward, recurrent_state(obs)))
    if len(steps) == 40:
        observed, actions, rewards, states = map(np.array, zip(*steps, strict=True))
        buffer.add(obs=observed, act=actions, rew=rewards, state=states[0])
        steps = steps[20:]
    if terminated or truncated:
        steps = []
    if number > 1_000:  # shared
        batch = buffer.sample(16, beta=0.6)
        error = learn_sequences(batch["obs"], batch["act"], batch["rew"], batch["state"])  # shared
        buffer.update_priorities(batch["indexes"], error)
