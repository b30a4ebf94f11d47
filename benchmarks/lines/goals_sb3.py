"""SAC with HER: a dict of observation and goals, four goals of the future for one of the environment."""

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.her import HerReplayBuffer

from benchmarks.lines.stand_ins import GoalEnv
from benchmarks.lines.world import learn_goals, play_goals

box = spaces.Box(-np.inf, np.inf, (2,))
observations = spaces.Dict(
    {"observation": spaces.Box(-np.inf, np.inf, (4,)), "achieved_goal": box, "desired_goal": box}
)
buffer = HerReplayBuffer(
    100_000, observations, spaces.Discrete(2), DummyVecEnv([GoalEnv]), "cpu", n_sampled_goal=4
)
for number, transition in enumerate(play_goals(20)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    obs, next_obs = ({name: value[None] for name, value in each.items()} for each in (obs, next_obs))
    done, infos = np.array([terminated or truncated]), [{"TimeLimit.truncated": truncated}]
    buffer.add(obs, next_obs, np.array([action]), np.array([reward]), done, infos)
    if number > 500:  # shared
        batch = buffer.sample(512)
        observed, following = batch.observations, batch.next_observations
        goal, achieved, discount = (
            observed["desired_goal"],
            following["achieved_goal"],
            0.99 * (1 - batch.dones),
        )
        learn_goals(observed["observation"], goal, batch.actions, batch.rewards, achieved, discount)  # shared
