"""`gear_loader.sources.collect`: what it records, and what it says when an environment misbehaves."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sources_common import LENGTHS, ScriptedEnv, same

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import collect, collect_iter, infer_schema


def replay(env: gymnasium.Env[Any, Any], actions: list[np.ndarray], seed: int | None) -> dict[str, Any]:
    """One episode, written down in the plainest way."""
    observation, _ = env.reset(seed=seed)
    seen, rewards, ends = [np.array(observation)], [], []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(np.array(observation))
        rewards.append(reward)
        ends.append((terminated, truncated))
    return {"observations": np.stack(seen), "rewards": rewards, "ends": ends}


def test_every_step_of_a_real_environment() -> None:
    columns = ["observation", "action", "reward", "terminated", "truncated", "next_observation"]
    episodes = collect("Hopper-v5", episodes=3, seed=7, columns=columns, keep_float64=True)
    env = gymnasium.make("Hopper-v5")
    for number, episode in enumerate(episodes):
        assert list(episode) == columns
        expected = replay(env, list(episode["action"]), 7 if number == 0 else None)
        same(episode["observation"], expected["observations"][:-1])
        same(episode["next_observation"], expected["observations"][1:])
        same(episode["reward"], np.array(expected["rewards"], np.float64))
        same(episode["terminated"], np.array([terminated for terminated, _ in expected["ends"]]))
        same(episode["truncated"], np.array([truncated for _, truncated in expected["ends"]]))
        assert not (episode["terminated"] | episode["truncated"])[:-1].any()
    env.close()
    (narrow, *_) = collect("Hopper-v5", episodes=1, seed=7)
    assert list(narrow) == columns[:-1]
    for name, values in narrow.items():
        same(values, episodes[0][name].astype(values.dtype))
        assert values.dtype.name == ("bool" if name.endswith("ated") else "float32")
    assert len({len(episode["reward"]) for episode in episodes}) > 1  # uneven lengths


def test_a_policy_sees_what_the_environment_gives() -> None:
    seen: list[np.ndarray] = []

    def policy(observation: np.ndarray) -> np.ndarray:
        seen.append(observation.copy())
        return np.array([len(seen) / 1000, -1.0])

    env = ScriptedEnv()
    episodes = collect(env, policy, episodes=7, seed=5)
    assert [len(episode["reward"]) for episode in episodes] == [*LENGTHS, LENGTHS[0]]
    assert env.seeds == [5, None, None, None, None, None, None]
    assert not env.closed  # it was given, not made
    same(np.concatenate([episode["observation"] for episode in episodes]), np.float32(seen))
    clock = np.concatenate([episode["observation"][:, 0] for episode in episodes])
    same(clock, np.arange(len(seen), dtype=np.float32))
    same(np.concatenate([episode["reward"] for episode in episodes]), (clock + 1) / 4)
    action = np.concatenate([episode["action"] for episode in episodes])
    same(action[:, 0], np.float32(np.arange(1, len(seen) + 1) / 1000))
    ends = [(bool(episode["terminated"][-1]), bool(episode["truncated"][-1])) for episode in episodes]
    both, terminated, truncated = (True, True), (True, False), (False, True)
    assert ends == [both, truncated, terminated, truncated, terminated, truncated, both]


def test_an_action_that_the_environment_overwrites_is_kept_as_it_was() -> None:
    class Greedy(ScriptedEnv):
        def step(self, action: Any) -> Any:
            action[:] = 99
            return super().step(action)

    (episode,) = collect(Greedy([4]), lambda observation: np.array([0.5, 0.25], np.float32), episodes=1)
    assert (episode["action"] == [0.5, 0.25]).all()


class NestedEnv(ScriptedEnv):
    """Dict and Tuple spaces of many kinds."""

    def __init__(self, lengths: Any = LENGTHS) -> None:
        super().__init__(lengths)
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                "pose": spaces.Dict(
                    {"position": spaces.Box(-1000, 1000, (3,), np.float64), "gear": spaces.Discrete(5)}
                ),
                "switches": spaces.MultiBinary(4),
                "parts": spaces.Tuple((spaces.MultiDiscrete([3, 4]), spaces.Box(0, 1000, (), np.uint16))),
                "mission": spaces.Text(20),
            }
        )
        self.action_space = spaces.Dict(
            {"turn": spaces.Discrete(3, start=-1), "push": spaces.Box(-1, 1, (1,))}
        )

    def observe(self) -> Any:
        clock = self.clock
        return {
            "image": np.full((4, 4, 3), clock % 256, np.uint8),
            "pose": {"position": np.full(3, clock / 7), "gear": clock % 5},
            "switches": np.array([clock >> i & 1 for i in range(4)], np.int8),
            "parts": (np.array([clock % 3, clock % 4]), np.array(clock, np.uint16)),
            "mission": "onwards",
        }


NESTED = [*(f"observation.{part}" for part in ("image", "pose", "switches", "parts")), "action", "reward"]


def test_dict_and_tuple_spaces_become_columns() -> None:
    episodes = collect(NestedEnv(), episodes=6, seed=0, columns=[*NESTED, "next_observation.pose.gear"])
    assert infer_schema(episodes) == {
        "observation.image": gear.Column(torch.uint8, (4, 4, 3)),
        "observation.pose.gear": gear.Column(torch.int64),
        "observation.pose.position": gear.Column(torch.float32, (3,)),
        "observation.switches": gear.Column(torch.int8, (4,)),
        "observation.parts.0": gear.Column(torch.int64, (2,)),
        "observation.parts.1": gear.Column(torch.int32),
        "action.push": gear.Column(torch.float32, (1,)),
        "action.turn": gear.Column(torch.int64),
        "reward": gear.Column(torch.float32),
        "next_observation.pose.gear": gear.Column(torch.int64),
    }
    clock = np.arange(sum(LENGTHS))
    together = {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]}
    same(together["observation.image"][:, 2, 1, 0], (clock % 256).astype(np.uint8))
    same(together["observation.pose.position"][:, 1], (clock / 7).astype(np.float32))
    same(together["observation.pose.gear"], clock % 5)
    same(together["next_observation.pose.gear"], (clock + 1) % 5)
    same(together["observation.switches"][:, 1], (clock >> 1 & 1).astype(np.int8))
    same(together["observation.parts.0"], np.stack([clock % 3, clock % 4], 1))
    same(together["observation.parts.1"], clock.astype(np.int32))
    assert set(together["action.turn"].tolist()) == {-1, 0, 1}


def test_a_space_that_no_column_holds_is_named() -> None:
    with pytest.raises(SourceError, match=r"'observation.mission' is of the space Text.*columns=") as caught:
        collect(NestedEnv(), episodes=1)
    # The message shows the columns that can be taken.
    rest = ast.literal_eval(str(caught.value).partition("columns=")[2].partition("]")[0] + "]")
    (episode,) = collect(NestedEnv(), episodes=1, columns=rest)
    assert list(episode) == rest
    assert set(rest) > {"observation.image", "reward"}


def test_columns_are_selected_and_renamed() -> None:
    (episode,) = collect(ScriptedEnv(), episodes=1, columns={"state": "observation", "gain": "reward"})
    assert list(episode) == ["state", "gain"]
    assert episode["gain"].tolist() == [0.25, 0.5, 0.75]
    (episode,) = collect(NestedEnv(), episodes=1, columns={"o": "observation.pose"})
    assert list(episode) == ["o.gear", "o.position"]
    with pytest.raises(SourceError, match=r"no column 'obervation'; it has .*Did you mean 'observation'"):
        collect(ScriptedEnv(), episodes=1, columns=["obervation"])
    with pytest.raises(SourceError, match=r"columns=\['reward'\]"):
        collect(ScriptedEnv(), episodes=1, columns="reward")
    with pytest.raises(SourceError, match="names 'reward' twice"):
        collect(ScriptedEnv(), episodes=1, columns=["reward", "reward"])


def test_max_steps_keeps_whole_episodes() -> None:
    for max_steps, kept in ((3, [3]), (4, [3, 1]), (10, [3, 1]), (11, [3, 1, 7]), (75, [3, 1, 7, 64])):
        episodes = collect(ScriptedEnv(), max_steps=max_steps)
        assert [len(episode["reward"]) for episode in episodes] == kept
    with pytest.raises(SourceError, match=r"first episode of ScriptedEnv has more than max_steps=2"):
        collect(ScriptedEnv(), max_steps=2)


def test_max_episode_steps_cuts_and_marks() -> None:
    episodes = collect(ScriptedEnv([10**9]), episodes=2, max_episode_steps=5)
    for episode in episodes:
        assert episode["truncated"].tolist() == [False] * 4 + [True]
        assert not episode["terminated"].any()


def test_an_environment_made_here_is_closed() -> None:
    made: list[ScriptedEnv] = []

    def make() -> ScriptedEnv:
        made.append(ScriptedEnv())
        return made[-1]

    collect(make, episodes=1)
    episodes = collect_iter(make, episodes=3)
    assert len(made) == 1  # nothing happens before the first episode is asked for
    next(episodes)
    assert not made[1].closed
    episodes.close()
    assert [env.closed for env in made] == [True, True]


class BrokenEnv(ScriptedEnv):
    """Does something at step 2 of episode 1 (or at its reset)."""

    def __init__(self, action: Any, lengths: Any = (3, 7), *, at_reset: bool = False) -> None:
        super().__init__(lengths)
        self.action, self.at_reset = action, at_reset

    def reset(self, **options: Any) -> Any:
        result = super().reset(**options)
        return self.action(*result) if self.at_reset and self.episode == 1 else result

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return (
            self.action(*result) if not self.at_reset and (self.episode, self.step_of) == (1, 3) else result
        )


def boom(*_: Any) -> Any:
    raise RuntimeError("the simulator exploded")


def giving(**changes: Any) -> BrokenEnv:
    """Returns something else than it should; a function is applied to what it should return."""

    def change(observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> tuple[Any, ...]:
        values = {"observation": observation, "reward": reward}
        for name, value in changes.items():
            values[name] = value(values[name]) if callable(value) else value
        return values["observation"], values["reward"], terminated, truncated, info

    return BrokenEnv(change)


# fmt: off
BROKEN: list[tuple[Any, str]] = [
    (BrokenEnv(boom), r"step 2: raised in step: RuntimeError: the simulator exploded"),
    (BrokenEnv(boom, at_reset=True), r"step 0: raised in reset: RuntimeError: the simulator exploded"),
    (BrokenEnv(lambda *result: result[:4]), r"step 2: raised in step: ValueError"),
    (giving(reward=np.nan), r"step 2: column 'reward' holds nan, .* allow_nonfinite"),
    (giving(reward=-np.inf), r"step 2: column 'reward' holds -inf"),
    (giving(reward=1e300), r"step 2: column 'reward' holds 1e\+300, which float32 cannot hold"),
    (giving(reward=[1, 2]), r"step 2: column 'reward' is \[1, 2\]; expected one number"),
    (giving(reward="x"), r"step 2: column 'reward' is 'x'; expected one number"),
    (giving(observation=lambda o: o[:2]), r"step 3: column 'observation' has shape \[2\]; expected \[3\]"),
    (giving(observation="x"), r"step 3: column 'observation' has shape \[\]"),
    (giving(observation=lambda o: o * 1e305), r"step 3: column 'observation' holds .*e\+305, which float32"),
]
DISCRETE = ScriptedEnv()
DISCRETE.action_space = spaces.Discrete(2)
CALLS: list[tuple[Any, dict[str, Any], str]] = [  # environment, options, message
    (ScriptedEnv, {"max_steps": 2}, r"first episode of ScriptedEnv has more than max_steps=2"),
    (ScriptedEnv, {"policy": boom, "episodes": 1}, "episode 0, step 0: the policy raised: RuntimeError"),
    (ScriptedEnv, {"policy": lambda _: np.zeros(3), "episodes": 1},
     r"step 0: column 'action' has shape \[3\]; expected \[2\]"),
    (ScriptedEnv, {"policy": lambda _: None, "episodes": 1}, r"step 0: column 'action' has shape \[\]"),
    (DISCRETE, {"policy": lambda _: 0.5, "episodes": 1},
     r"episode 0: column 'action' holds values of float64 where int64 is expected"),
    (ScriptedEnv, {}, "Neither episodes= nor max_steps="),
    (ScriptedEnv, {"episodes": 0}, "episodes is 0; expected an integer of at least 1"),
    (ScriptedEnv, {"episodes": True}, "episodes is True; expected an integer"),
    (ScriptedEnv, {"max_steps": 1.5}, "max_steps is 1.5; expected an integer"),
    (ScriptedEnv, {"episodes": 1, "policy": 3}, "The policy is an object of type int; expected a function"),
    ("Nowhere-v0", {"episodes": 1}, "environment 'Nowhere-v0' cannot be made: NameNotFound"),
    (3.5, {"episodes": 1}, r"of type float; expected a gymnasium\.Env"),
    (lambda: 3, {"episodes": 1}, r"returned an object of type int; expected a gymnasium\.Env"),
]
# fmt: on


def test_a_broken_environment_is_reported_with_its_place() -> None:
    for env, message in BROKEN:
        episodes = collect_iter(env, episodes=3)
        assert len(next(episodes)["reward"]) == 3
        with pytest.raises(SourceError, match=f"The environment BrokenEnv, episode 1, {message}"):
            next(episodes)


def test_nonfinite_rewards_can_be_allowed() -> None:
    episodes = collect(giving(reward=np.nan), episodes=2, allow_nonfinite=True)
    assert np.isnan(episodes[1]["reward"]).tolist() == [False, False, True, False, False, False, False]


def test_environments_policies_and_options_that_do_not_fit() -> None:
    for env, options, message in CALLS:
        with pytest.raises(SourceError, match=message):
            collect(env, **options)


@pytest.mark.long
def test_a_missing_package_is_named() -> None:
    code = """
import sys
from gear_loader.sources import collect, load, read_hdf5, read_minari
print(sorted({"gymnasium", "minari", "h5py", "rich", "mujoco"} & set(sys.modules)))
sys.modules |= dict.fromkeys(("gymnasium", "h5py", "minari", "rich"))
for call in (
    lambda: collect("CartPole-v1", episodes=1),
    lambda: read_hdf5("x.hdf5"),
    lambda: load("x.h5"),
    lambda: read_minari("a/b-v0"),
    lambda: load("a/b-v0"),
    lambda: load([{"reward": [1.0, 2.0]}]).close(),  # needs none of them, not even for its progress bar
):
    try:
        call()
        print("done")
    except ImportError as error:
        print(error.name, "pip install '.[sources]'" in str(error))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [
        "[]",  # importing the sources loads none of them
        "gymnasium True",
        "h5py True",
        "h5py True",
        "minari True",
        "minari True",
        "done",
    ]
