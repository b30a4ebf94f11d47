"""RLPD: half of each batch out of offline episodes, half out of what was just played."""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from benchmarks.lines.world import OFFLINE, learn_mixed, play

offline = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)
online = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=32)


def add(buffer, transition):
    obs, action, reward, next_obs, terminated, _ = map(torch.as_tensor, transition)
    following = {"obs": next_obs, "reward": reward.float(), "terminated": terminated}
    buffer.extend(TensorDict({"obs": obs, "action": action, "next": following}, batch_size=[])[None])


for transition in play(1_000, OFFLINE):  # shared
    add(offline, transition)
for number, transition in enumerate(play(1_000)):  # shared
    add(online, transition)
    if number > 500:  # shared
        batch = torch.cat([offline.sample(), online.sample()])
        discount = 0.99 * ~batch["next", "terminated"]
        learn_mixed(
            batch["obs"], batch["action"], batch["next", "reward"], batch["next", "obs"], discount
        )  # shared
