"""DQN: 3-step returns of one environment. Reverb has none: they are made before they are stored."""

import numpy as np
import reverb

from benchmarks.lines.world import learn_td, play

table = reverb.Table(
    "replay",
    sampler=reverb.selectors.Uniform(),
    remover=reverb.selectors.Fifo(),
    max_size=100_000,
    rate_limiter=reverb.rate_limiters.MinSize(1),
)
server = reverb.Server([table])
client = reverb.Client(f"localhost:{server.port}")
steps = []
for number, transition in enumerate(play(1_000)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    steps.append((obs, action, reward))
    while len(steps) == 3 or (steps and (terminated or truncated)):
        returned = np.float32(sum(0.99**k * step[2] for k, step in enumerate(steps)))
        discount = np.float32(0.0 if terminated else 0.99 ** len(steps))
        first = steps.pop(0)
        client.insert([first[0], first[1], returned, next_obs, discount], {"replay": 1.0})
    if number > 500:  # shared
        rows = [sample[0].data for sample in client.sample("replay", 32)]
        batch = [np.stack(values) for values in zip(*rows, strict=True)]
        learn_td(*batch)  # shared
