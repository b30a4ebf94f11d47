"""`gear_loader.sources.collect` from vector environments: each episode is what its environment gives alone."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from sources_common import ScriptedEnv, same_episodes
from test_sources_environment import NESTED, NestedEnv, boom

from gear_loader.errors import SourceError
from gear_loader.sources import collect, collect_iter

COLUMNS = ["observation", "action", "reward", "terminated", "truncated", "next_observation"]
MODES = list(AutoresetMode)
N = 3


class SeededEnv(gymnasium.Env[Any, Any]):
    """Lengths and observations come from the environment's own random numbers; ends take turns."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.ends = 0
        self.left: int | None = None

    def observe(self) -> Any:
        return np.array([self.np_random.random(), self.np_random.random() - 0.5, self.left])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.ends = self.ends if seed is None else 0
        self.left = int(self.np_random.integers(1, 9))
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.left, "an episode that is over goes on"
        self.left -= 1
        done = self.left == 0
        self.ends += done
        kind = self.ends % 3
        return (
            self.observe(),
            float(action @ [1, 2]),
            done and kind != 0,
            done and kind != 1,
            {"left": self.left},
        )


def policy(observation: Any) -> Any:
    """The same for one observation and for a batch."""
    return (observation[..., :2] * 0.5).astype(np.float32)


def in_turns(
    count: int, *, episodes: int | None = None, max_steps: int | None = None, **options: Any
) -> list[Any]:
    """What `count` environments give alone, in the order and within the limits of `collect`."""
    alone = [
        collect(SeededEnv(), policy, episodes=30, seed=5 + i, columns=COLUMNS, **options)
        for i in range(count)
    ]
    found, steps = [], 0
    for number in range(30 * count if episodes is None else episodes):
        episode = alone[number % count][number // count]
        steps += len(episode["reward"])
        if max_steps is not None and steps > max_steps:
            break
        found.append(episode)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{"episodes": 1}, {"episodes": 11}, {"max_steps": 60}, {"episodes": 10, "max_episode_steps": 4}]
    + [{"max_steps": steps} for steps in (8, 9, 10, 11, 12, 13)]
    + [{"episodes": 8, "max_steps": 40}],
)
def test_the_episodes_are_those_of_the_environments_alone(
    mode: AutoresetMode, options: dict[str, int]
) -> None:
    envs = SyncVectorEnv([SeededEnv] * N, autoreset_mode=mode)
    expected = in_turns(N, **options)
    lengths = [len(episode["reward"]) for episode in expected]
    same_episodes(collect(envs, policy, seed=5, columns=COLUMNS, **options), expected)
    same_episodes(
        collect(envs, policy, seed=5, columns=COLUMNS, **options), expected
    )  # in the middle of others
    if lengths[3:]:
        flags = {(bool(e["terminated"][-1]), bool(e["truncated"][-1])) for e in expected}
        assert len(flags) > 1
        assert len(set(lengths)) > 1
    envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_environments_in_other_processes(mode: AutoresetMode) -> None:
    for options in ({"shared_memory": True}, {"shared_memory": False, "copy": False}):
        envs = AsyncVectorEnv([SeededEnv] * N, autoreset_mode=mode, **options)
        if mode is AutoresetMode.NEXT_STEP and not options["shared_memory"]:
            with pytest.raises(SourceError, match="NEXT_STEP and shared_memory=False, with which"):
                collect(envs, policy, episodes=1)
            envs.close()
            continue
        for limits in ({"max_steps": 50}, {"episodes": 7, "max_episode_steps": 4}):
            same_episodes(collect(envs, policy, seed=5, columns=COLUMNS, **limits), in_turns(N, **limits))
        envs.close()


def test_environments_that_are_made_here() -> None:
    made: list[ScriptedEnv] = []

    def make() -> ScriptedEnv:
        made.append(ScriptedEnv())
        return made[-1]

    episodes = collect_iter(make, episodes=4, num_envs=2)
    assert [len(next(episodes)["reward"]) for _ in range(3)] == [3, 3, 1]
    assert [env.closed for env in made] == [False, False]
    episodes.close()
    assert [env.closed for env in made] == [True, True]
    alone = [collect("CartPole-v1", episodes=2, seed=3 + i) for i in range(2)]
    found = collect("CartPole-v1", episodes=4, seed=3, num_envs=2)  # random actions too
    same_episodes(found, [alone[0][0], alone[1][0], alone[0][1], alone[1][1]])


@pytest.mark.parametrize("mode", MODES)
def test_spaces_of_many_kinds(mode: AutoresetMode) -> None:
    columns = [*NESTED, "next_observation.pose", "next_observation.parts"]
    envs = SyncVectorEnv([NestedEnv] * 2, autoreset_mode=mode)
    alone = [collect(NestedEnv(), episodes=3, seed=i, columns=columns) for i in range(2)]
    expected = [alone[number % 2][number // 2] for number in range(6)]
    same_episodes(collect(envs, episodes=6, seed=0, columns=columns), expected)
    envs.close()


class BadVector(gymnasium.vector.VectorWrapper):
    """Returns something else than it should."""

    def __init__(self, change: Any, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> None:
        super().__init__(SyncVectorEnv([SeededEnv] * 2, autoreset_mode=mode))
        self.change = change

    def step(self, actions: Any) -> Any:
        return self.change(*super().step(actions))


def without_mode() -> Any:
    envs = SyncVectorEnv([SeededEnv])
    del envs.metadata["autoreset_mode"]
    return envs


class Custom(gymnasium.vector.VectorEnv):
    """As a simulator on a GPU might be."""

    def __init__(self) -> None:
        inner = SeededEnv()
        self.num_envs, self.metadata = 2, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = inner.observation_space, inner.action_space


# fmt: off
CALLS: list[tuple[Any, dict[str, Any], str]] = [
    (SeededEnv(), {"num_envs": 2}, "num_envs=2 was given with a single environment; expected its id or a function"),
    (SyncVectorEnv([SeededEnv] * 2), {"num_envs": 3}, "num_envs=3 was given with a vector of 2 environments"),
    (SeededEnv, {"num_envs": 0}, "num_envs is 0; expected an integer of at least 1"),
    (lambda: 3, {"num_envs": 2}, r"returned an object of type int; expected a gymnasium\.Env"),
    ("Nowhere-v0", {"num_envs": 2}, "environment 'Nowhere-v0' cannot be made: NameNotFound"),
    (without_mode(), {}, r"has metadata\['autoreset_mode'\] None; expected a gymnasium.vector.AutoresetMode"),
    (Custom(), {"max_episode_steps": 3}, "max_episode_steps=3 was given with a Custom; expected a SyncVectorEnv"),
    (SeededEnv, {"num_envs": 2, "policy": boom}, "SeededEnv, step 0 of the collection: the policy raised: RuntimeE"),
    (SeededEnv, {"num_envs": 2, "policy": lambda _: np.zeros(2)},
     r"step 0 of the collection: column 'action' has shape \[2\]; expected \[2, 2\]"),
    (SeededEnv, {"num_envs": 2, "max_steps": 1, "seed": 5}, "first episode of SeededEnv has more than max_steps=1"),
    (BadVector(boom), {}, "step 0 of the collection: raised in step: RuntimeError: the simulator exploded"),
    (BadVector(lambda o, r, *rest: (o, r[:1], *rest)), {}, r"column 'reward' has shape \[1\]; expected \[2\]"),
    (BadVector(lambda o, r, *rest: (o, r * np.nan, *rest)), {}, r"episode 0, step 0: column 'reward' holds nan"),
    (BadVector(lambda o, *rest: (o[:, :2], *rest)), {}, r"has shape \[2, 2\]; expected \[2, 3\]"),
    (BadVector(lambda *values: (*values[:4], {})), {"columns": ["next_observation"]},
     r"environment \d ended without infos\['final_obs'\]"),
]
# fmt: on


def test_vectors_and_options_that_do_not_fit() -> None:
    for env, options, message in CALLS:
        with pytest.raises(SourceError, match=message):
            collect(env, **{"episodes": 5, "seed": 0, **options})
