"""Environments that a library wants to see, and that the programs do not play."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from benchmarks.lines.world import compute_reward


class GoalEnv(gymnasium.Env[Any, Any]):
    """A goal environment of which stable-baselines3 asks for `compute_reward`."""

    goal = spaces.Box(-np.inf, np.inf, (2,))
    observation_space = spaces.Dict(
        {"observation": spaces.Box(-np.inf, np.inf, (4,)), "achieved_goal": goal, "desired_goal": goal}
    )
    action_space = spaces.Discrete(2)
    compute_reward = staticmethod(compute_reward)
