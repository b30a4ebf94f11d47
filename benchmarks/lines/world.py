"""What the programs of this folder have in common, and is not counted: environments, episodes, learners that check.

An observation is (episode, step, origin, 0), so that a learner can tell whether a batch is right. Episodes have
`LENGTH` steps and end by turns in `terminated` and `truncated`; each reward is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

LENGTH, GAMMA = 60, 0.99
OFFLINE, ONLINE = 0.0, 1.0
checked: list[str] = []
"""One entry a batch that a learner has checked."""


def observation(episode: int, step: int, origin: float = ONLINE) -> np.ndarray:
    return np.array([episode, step, origin, 0], np.float32)


def play(steps: int, origin: float = ONLINE) -> Iterator[tuple[Any, ...]]:
    """obs, action, reward, next_obs, terminated, truncated: float32 [4], int64, float, float32 [4], bool, bool."""
    for number in range(steps):
        episode, step = divmod(number, LENGTH)
        over = step == LENGTH - 1
        yield (
            observation(episode, step, origin),
            np.int64(step % 2),
            1.0,
            observation(episode, step + 1, origin),
            over and episode % 2 == 0,
            over and episode % 2 == 1,
        )


def episodes(count: int) -> list[dict[str, np.ndarray]]:
    """Whole offline episodes: obs [T + 1, 4], with the last one; action [T], reward [T], terminated [T]."""
    return [
        {
            "obs": np.stack([observation(episode, step, OFFLINE) for step in range(LENGTH + 1)]),
            "action": np.arange(LENGTH) % 2,
            "reward": np.ones(LENGTH, np.float32),
            "terminated": np.arange(LENGTH) == (LENGTH - 1 if episode % 2 == 0 else -1),
        }
        for episode in range(count)
    ]


def flat(values: Any) -> np.ndarray:
    return np.asarray(values).squeeze()


def learn_td(obs: Any, action: Any, reward: Any, next_obs: Any, discount: Any, *, n: int = 3) -> None:
    """A step of DQN or SAC: returns of `n` steps, fewer at an end; no bootstrap where the episode terminated."""
    obs, action, reward, next_obs, discount = map(flat, (obs, action, reward, next_obs, discount))
    steps = next_obs[:, 1] - obs[:, 1]
    assert (obs[:, 0] == next_obs[:, 0]).all(), "two episodes in one row"
    assert steps.min() >= 1
    assert steps.max() == n
    assert (steps == n).mean() > 0.5  # fewer at an end, and at the newest step
    assert (action == obs[:, 1] % 2).all()
    np.testing.assert_allclose(reward, (1 - GAMMA**steps) / (1 - GAMMA), rtol=1e-5)
    terminated = (next_obs[:, 1] == LENGTH) & (obs[:, 0] % 2 == 0)
    np.testing.assert_allclose(discount, np.where(terminated, 0, GAMMA**steps), rtol=1e-5)
    checked.append("td")


def learn_mixed(obs: Any, action: Any, reward: Any, next_obs: Any, discount: Any) -> None:
    """A step of RLPD: half of the rows are offline."""
    assert (flat(obs)[:, 2] == OFFLINE).sum() == len(flat(obs)) / 2
    learn_td(obs, action, reward, next_obs, discount, n=1)


def recurrent_state(obs: np.ndarray) -> np.ndarray:
    """The state of a recurrent network before a step, float32 [8]."""
    return np.full(8, obs[1], np.float32)


def learn_sequences(
    obs: Any, action: Any, reward: Any, state: Any, mask: Any = True, *, length: int = 40
) -> np.ndarray:
    """A step of R2D2: sequences of consecutive steps, with the state at the start of each; TD errors, float32 [B]."""
    obs, state = np.asarray(obs), np.asarray(state)
    assert obs.shape[1:] == (length, 4)
    mask = np.broadcast_to(np.asarray(mask), obs.shape[:2])
    assert mask[:, 0].all()
    assert (obs[:, :, 1] == obs[:, :1, 1] + np.arange(length))[mask].all()
    assert (obs[:, :, 0] == obs[:, :1, 0])[mask].all()
    assert (state == obs[:, 0, 1, None]).all()
    assert flat(action).shape == flat(reward).shape == obs.shape[:2]
    checked.append("sequences")
    return np.random.default_rng(0).random(len(obs)).astype(np.float32)


def learn_transformer(obs: Any, action: Any, returns: Any, mask: Any, *, length: int = 20) -> None:
    """A step of a decision transformer: windows with returns-to-go; mask bool [B, L] of the steps that exist."""
    obs, returns, mask = (np.asarray(each) for each in (obs, returns, mask))
    assert obs.shape[1:] == (length, 4)
    assert (returns.reshape(mask.shape)[mask] == LENGTH - obs[:, :, 1][mask]).all()
    assert flat(action).shape == mask.shape
    checked.append("windows")


def play_goals(episodes: int) -> Iterator[tuple[Any, ...]]:
    """As `play`, with observations of goal environments: a dict of observation, achieved_goal, desired_goal."""
    for episode in range(episodes):
        wanted = np.array([-1, -1], np.float32)  # never achieved

        def seen(step: int, episode: int = episode, wanted: np.ndarray = wanted) -> dict[str, np.ndarray]:
            achieved = np.array([episode, step], np.float32)
            return {
                "observation": observation(episode, step),
                "achieved_goal": achieved,
                "desired_goal": wanted,
            }

        for step in range(LENGTH):
            yield seen(step), np.int64(step % 2), -1.0, seen(step + 1), False, step == LENGTH - 1


def compute_reward(achieved: np.ndarray, desired: np.ndarray, info: Any = None) -> np.ndarray:
    """0 where the goal is achieved, else -1; float32 [n]."""
    return -(np.abs(np.asarray(achieved) - np.asarray(desired)).max(-1) > 0.5).astype(np.float32)


def learn_goals(
    observation: Any, goal: Any, action: Any, reward: Any, next_achieved: Any, discount: Any
) -> None:
    """A step of SAC with goals: about 4 of 5 goals are later ones of the episode; rewards are those of the goals."""
    observation, goal, reward, achieved, discount = map(
        flat, (observation, goal, reward, next_achieved, discount)
    )
    relabelled = goal[:, 1] >= 0
    assert 0.7 < relabelled.mean() < 0.9
    assert (goal[relabelled, 0] == observation[relabelled, 0]).all()
    assert (goal[relabelled, 1] > observation[relabelled, 1]).all()
    assert (reward == compute_reward(achieved, goal)).all()
    np.testing.assert_allclose(
        discount, GAMMA, rtol=1e-6
    )  # these episodes are truncated, and never terminate
    checked.append("goals")
