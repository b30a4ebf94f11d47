"""A decision transformer on offline episodes: windows of 20 steps with returns-to-go; none shorter, at starts."""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.envs.transforms import Reward2GoTransform

from benchmarks.lines.world import episodes, learn_transformer

buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(2_000),
    sampler=SliceSampler(slice_len=20, end_key=("next", "done")),
    batch_size=64 * 20,
    transform=Reward2GoTransform(out_keys=["returns"]),
)
for episode in map(TensorDict, episodes(20)):
    count = len(episode["reward"])
    done = torch.arange(count)[:, None] == count - 1
    reward = episode["reward"][:, None]
    following = {"reward": reward, "done": done, "terminated": done}
    steps = {"obs": episode["obs"][:-1], "action": episode["action"], "next": following}
    buffer.extend(TensorDict(steps, batch_size=[count]))
for _ in range(20):
    batch = buffer.sample().reshape(64, 20)
    mask = torch.ones(64, 20, dtype=torch.bool)
    learn_transformer(batch["obs"], batch["action"], batch["returns"], mask)  # shared
