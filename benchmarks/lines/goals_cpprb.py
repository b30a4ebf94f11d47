"""SAC with HER: observation and goals, four goals of the future for one of the environment."""

import numpy as np
from cpprb import HindsightReplayBuffer

from benchmarks.lines.world import LENGTH, compute_reward, learn_goals, play_goals

columns = {"obs": {"shape": 6}, "act": {"dtype": np.int64}, "next_obs": {"shape": 6}}
buffer = HindsightReplayBuffer(
    100_000,
    columns,
    max_episode_len=LENGTH,
    reward_func=lambda obs, act, goal: compute_reward(obs[..., 4:], goal),
    goal_func=lambda obs: obs[..., 4:],
    goal_shape=2,
    state="next_obs",
    additional_goals=4,
)
for number, transition in enumerate(play_goals(20)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    observed = np.concatenate([obs["observation"], obs["achieved_goal"]])
    following = np.concatenate([next_obs["observation"], next_obs["achieved_goal"]])
    buffer.add(obs=observed, act=action, next_obs=following)
    if terminated or truncated:
        buffer.on_episode_end(obs["desired_goal"])
    if number > 500:  # shared
        batch = buffer.sample(512)
        observed, achieved = batch["obs"][:, :4], batch["next_obs"][:, 4:]
        goal, discount = batch["goal"], np.full(512, 0.99)
        learn_goals(observed, goal, batch["act"], batch["rew"], achieved, discount)  # shared
