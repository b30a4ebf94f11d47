"""DQN: 3-step returns of one environment."""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.transforms import MultiStepTransform

from benchmarks.lines.world import learn_td, play

buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(100_000), batch_size=32, transform=MultiStepTransform(n_steps=3, gamma=0.99)
)
for number, transition in enumerate(play(1_000)):  # shared
    obs, action, reward, next_obs, terminated, truncated = map(torch.as_tensor, transition)
    following = {
        "obs": next_obs,
        "reward": reward[None].float(),
        "terminal": terminated[None],  # not "terminated", which the transform does not move
        "truncated": truncated[None],
        "done": (terminated | truncated)[None],
    }
    step = TensorDict({"obs": obs, "action": action, "next": following}, batch_size=[])
    buffer.extend(step[None])
    if number > 500:  # shared
        batch = buffer.sample()
        discount = 0.99 ** batch["steps_to_next_obs"] * ~batch["next", "terminal"][:, 0]
        learn_td(
            batch["obs"], batch["action"], batch["next", "reward"], batch["next", "obs"], discount
        )  # shared
