"""DQN: 3-step returns of one environment."""

import gear_loader as gear
from benchmarks.lines.world import learn_td, play

buffer = gear.ReplayBuffer(100_000, n_step=3, gamma=0.99, batch_size=32)
for number, transition in enumerate(play(1_000)):  # shared
    buffer.add(*transition)
    if number > 500:  # shared
        batch = buffer.sample()
        learn_td(
            batch["obs"], batch["action"], batch["reward"], batch["next_obs"], batch["discount"]
        )  # shared
