"""SAC with HER: a dict of observation and goals, four goals of the future for one of the environment."""

import gear_loader as gear
from benchmarks.lines.world import compute_reward, learn_goals, play_goals

buffer = gear.ReplayBuffer(100_000, batch_size=512, hindsight=gear.Hindsight(compute_reward))
for number, transition in enumerate(play_goals(20)):  # shared
    buffer.add(*transition)
    if number > 500:  # shared
        batch = buffer.sample()
        obs, achieved = batch["obs"], batch["next_obs"]["achieved_goal"]
        goal = obs["desired_goal"]
        learn_goals(
            obs["observation"], goal, batch["action"], batch["reward"], achieved, batch["discount"]
        )  # shared
