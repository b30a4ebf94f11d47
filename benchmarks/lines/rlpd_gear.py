"""RLPD: half of each batch out of offline episodes, half out of what was just played."""

import gear_loader as gear
from benchmarks.lines.world import OFFLINE, learn_mixed, play

offline, online = gear.ReplayBuffer(10_000), gear.ReplayBuffer(100_000)
for transition in play(1_000, OFFLINE):  # shared
    offline.add(*transition)
mixed = None
for number, transition in enumerate(play(1_000)):  # shared
    online.add(*transition)
    if number > 500:  # shared
        mixed = mixed or gear.Mixture(
            {"a": (offline.dataset, 0.5), "b": (online.dataset, 0.5)}, batch_size=64, batches_per_epoch=1_000
        )
        batch = mixed.sample()
        learn_mixed(
            batch["obs"], batch["action"], batch["reward"], batch["next_obs"], batch["discount"]
        )  # shared
