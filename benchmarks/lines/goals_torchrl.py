"""SAC with HER: observation and goals, four goals of the future for one of the environment."""

import torch
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer, LazyTensorStorage

from benchmarks.lines.world import compute_reward, learn_goals, play_goals


def reward_of(batch):
    return torch.as_tensor(compute_reward(batch["next", "achieved_goal"], batch["desired_goal"]))[:, None]


buffer = HERReplayBuffer(
    reward_of, her_ratio=0.8, achieved_goal_key=("next", "achieved_goal"), storage=LazyTensorStorage(100_000)
)
for number, transition in enumerate(play_goals(20)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    ends = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
    ends = {name: torch.tensor([value]) for name, value in ends.items()}
    following = {**next_obs, **ends, "reward": torch.tensor([reward])}
    buffer.extend(TensorDict({**obs, "action": torch.as_tensor(action), "next": following}).unsqueeze(0))
    if number > 500:  # shared
        batch = buffer.sample(512)
        reward, achieved = batch["next", "reward"], batch["next", "achieved_goal"]
        discount = 0.99 * ~batch["next", "terminated"]
        learn_goals(
            batch["observation"], batch["desired_goal"], batch["action"], reward, achieved, discount
        )  # shared
