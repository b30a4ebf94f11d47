"""Several agents in a `ReplayBuffer`, against the transitions of each agent; PettingZoo's parallel environments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import gear_loader as gear
from gear_loader.errors import SchemaError

GAMMA = 0.9
AGENTS = ("red", "blue", "green")


class Arena:
    """Agents that come late, terminate and are truncated, as a parallel environment of PettingZoo. Observations are
    numbers that never come back, of another shape for each agent.

    Attributes:
        added: agent -> its transitions: observation, reward, next observation, terminated, truncated.
    """

    def __init__(self, seed: int, *, drops_dead: bool) -> None:
        self.choose, self.drops_dead, self._number = random.Random(seed), drops_dead, 0
        self.added: dict[str, list[tuple[int, float, int, bool, bool]]] = {name: [] for name in AGENTS}
        self.reset()

    def _new(self) -> int:
        self._number += 1
        return self._number

    def reset(self) -> None:
        self.agents = list(AGENTS)
        self.left: set[str] = set()
        self.obs = {name: self._new() for name in self.agents}

    def step(self, buffer: gear.ReplayBuffer) -> None:
        """A step of all agents, into the buffer."""
        if not self.agents:
            self.reset()
        acting = list(self.agents)
        reward = {name: float(self.choose.randrange(-2, 3)) for name in acting}
        next_obs = {name: self._new() for name in acting}
        terminated = {name: self.choose.random() < 0.1 for name in acting}
        truncated = {name: self.choose.random() < 0.05 for name in acting}
        for name in acting:
            each = (self.obs[name], reward[name], next_obs[name], terminated[name], truncated[name])
            self.added[name].append(each)
        buffer.add(
            {name: shaped(self.obs[name], name) for name in self.obs},
            {name: reward[name] for name in acting},
            reward,
            {name: shaped(number, name) for name, number in next_obs.items()},
            terminated,
            truncated,
            world=self.added[acting[0]][-1][0],
        )
        self.agents = [name for name in acting if not terminated[name] and not truncated[name]]
        self.left |= set(acting) - set(self.agents)
        kept = self.agents if self.drops_dead else acting
        self.obs = {name: next_obs[name] for name in kept}
        if self.agents and self.left and self.choose.random() < 0.3:  # one comes back
            name = self.left.pop()
            self.agents.append(name)
            self.obs[name] = self._new()

    def expected(self, name: str, obs: int, n_step: int, last: int) -> tuple[float, int, float]:
        """Return, observation to bootstrap from and discount; `last` was delivered: pieces end anywhere."""
        part = self.added[name]
        (at,) = [i for i, row in enumerate(part) if row[0] == obs]
        total, factor = 0.0, 1.0
        for step, (start, reward, following, terminated, truncated) in enumerate(part[at : at + n_step]):
            assert step == 0 or start == part[at + step - 1][2]
            total, factor = total + factor * reward, factor * GAMMA
            if terminated or truncated or following == last or step == n_step - 1:
                return total, following, 0.0 if terminated else factor
        raise AssertionError("a return goes beyond what was added")


def shaped(number: int, name: str) -> Any:
    return (
        {"at": np.full(2 + AGENTS.index(name), number, np.int64)} if name == "green" else np.full(3, number)
    )


def numbers(values: dict[str, Any], name: str) -> list[int]:
    part = values[name]["at"] if name == "green" else values[name]
    assert (part == part[:, :1]).all()
    return part[:, 0].tolist()  # type: ignore[no-any-return]


def check(buffer: gear.ReplayBuffer, arena: Arena, batch: Any) -> None:
    for name in AGENTS:
        active, obs, last = (
            batch["active"][name].tolist(),
            numbers(batch["obs"], name),
            numbers(batch["next_obs"], name),
        )
        for row, on in enumerate(active):
            if not on:
                assert batch["reward"][name][row] == batch["discount"][name][row] == 0
                continue
            total, following, discount = arena.expected(name, obs[row], buffer.n_step, last[row])
            assert batch["reward"][name][row] == pytest.approx(total)
            assert batch["discount"][name][row] == pytest.approx(discount)
            # Of an agent that terminated in the newest step, which needs none, it is not there yet.
            assert last[row] == following or (last[row] == discount == 0)
            first = next(each for each in arena.added[name] if each[0] == obs[row])
            assert batch["action"][name][row] == first[1]


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 4]), st.sampled_from([40, 2_000]), st.booleans())
def test_each_agent_gets_what_it_added(seed: int, n_step: int, capacity: int, drops_dead: bool) -> None:
    arena = Arena(seed, drops_dead=drops_dead)
    buffer = gear.ReplayBuffer(
        capacity, n_step=n_step, gamma=GAMMA, agents=AGENTS, batch_size=16, device="cpu"
    )
    for turn in range(80):
        arena.step(buffer)
        if turn % 4 == 3:
            check(buffer, arena, buffer.sample())
    assert len(buffer) <= 80
    if capacity > 80:
        assert len(buffer) == 80


def test_a_saved_buffer_goes_on(tmp_path: Path) -> None:
    arena = Arena(5, drops_dead=True)
    buffer = gear.ReplayBuffer(1_000, gamma=GAMMA, agents=AGENTS, device="cpu")
    for _ in range(60):
        arena.step(buffer)
    buffer.save(tmp_path / "saved")
    again = gear.ReplayBuffer.load(tmp_path / "saved", gamma=GAMMA, device="cpu")
    assert len(again) == 60
    for _ in range(30):
        arena.step(again)
    check(again, arena, again.sample(200))


def test_several_environments_of_agents() -> None:
    """Arrays [n] of each agent; `active` says who acts in which environment."""
    buffer = gear.ReplayBuffer(4_000, agents=("a", "b"), gamma=0.5, device="cpu")
    number = np.arange(3.0)
    for step in range(20):
        obs = dict.fromkeys("ab", number + 10 * step)
        following = dict.fromkeys("ab", number + 10 * (step + 1))
        ends = {name: np.full(3, step == 19) for name in "ab"}
        on = {"b": np.array([True, step < 10, False])}
        buffer.add(obs, obs, {"a": number, "b": -number}, following, ends, {n: np.zeros(3, bool) for n in "ab"},
                   active=on)  # fmt: skip
    assert len(buffer) == 60
    batch = buffer.sample(300)
    env = (batch["obs"]["a"] % 10).long()
    step = (batch["obs"]["a"] // 10).long()
    assert batch["active"]["a"].all()
    assert torch.equal(batch["active"]["b"], (env == 0) | ((env == 1) & (step < 10)))
    assert torch.equal(batch["reward"]["b"], torch.where(batch["active"]["b"], -batch["reward"]["a"], 0.0))
    assert torch.equal(batch["next_obs"]["b"], batch["obs"]["b"] + 10)
    assert torch.equal(batch["discount"]["a"], torch.where(step == 19, 0.0, 0.5))


GOOD: dict[str, Any] = {
    "obs": {"a": 1.0, "b": 2.0}, "action": {"a": 0, "b": 1}, "reward": {"a": 0.0, "b": 1.0},
    "next_obs": {"a": 2.0, "b": 3.0}, "terminated": {"a": False, "b": False}, "truncated": {"a": False, "b": False},
}  # fmt: skip
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"reward": 1.0}, "'reward' is 1.0; expected a dict by agent"),
    ({"reward": {"a": 1.0}}, r"'reward' has no \['b'\], which act"),
    ({"obs": {"a": 1.0}}, r"'obs' has no \['b'\], which act"),
    ({"next_obs": {"a": 1.0}}, r"'obs' has no \['b'\], which act"),
    ({"action": {}}, "'action' has no agent"),
    ({"terminated": {"a": False}}, r"'terminated' has no \['b'\]"),
    ({"action": {"a": 0, "b": 0, "c": 1}}, r"'action' has the agents \['c'\]; expected some of \['a', 'b'\]"),
    ({"active": [True]}, "'active' is .*; expected a dict by agent"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_calls_change_nothing(change: dict[str, Any], message: str) -> None:
    buffer = gear.ReplayBuffer(50, agents=["a", "b"], device="cpu")
    buffer.add(**GOOD)
    with pytest.raises(SchemaError, match=message):
        buffer.add(**{**GOOD, **change})
    assert len(buffer) == 1
    buffer.add(**GOOD)
    assert len(buffer) == 2


def test_extend_adds_what_add_adds() -> None:
    buffer = gear.ReplayBuffer(1_000, agents=["a", "b"], gamma=0.5, device="cpu")
    steps, never = np.arange(8.0), np.zeros(8, bool)
    both = {name: {"a": steps + more, "b": -steps - more} for name, more in (("obs", 0), ("next_obs", 1))}
    ends = {"a": steps == 7, "b": never}
    buffer.extend({**both, "action": both["obs"], "reward": both["obs"], "terminated": ends,
                   "truncated": {"a": never, "b": never}})  # fmt: skip
    batch = buffer.sample(100)
    assert set(batch["obs"]["a"].tolist()) == set(range(7)) or set(batch["obs"]["a"].tolist()) == set(
        range(8)
    )
    assert torch.equal(batch["next_obs"]["b"], batch["obs"]["b"] - 1)
    assert torch.equal(batch["reward"]["b"], -batch["reward"]["a"])


def test_the_first_step_has_all_agents() -> None:
    buffer = gear.ReplayBuffer(50, agents=["a", "b"], device="cpu")
    with pytest.raises(SchemaError, match=r"'obs' is a dict of \['a'\]; expected those of all agents"):
        buffer.add(**{name: {"a": value["a"]} for name, value in GOOD.items()})
    buffer.add(**GOOD)


@pytest.mark.parametrize("agents", ["ab", [], ["a", "a"], ["a.b"], [1]])
def test_wrong_agents(agents: Any) -> None:
    with pytest.raises(SchemaError, match="expected the names of all agents"):
        gear.ReplayBuffer(10, agents=agents)


def test_hindsight_is_of_one_agent() -> None:
    with pytest.raises(SchemaError, match="agents and hindsight were given"):
        gear.ReplayBuffer(
            10, agents=["a"], hindsight=gear.Hindsight(lambda achieved, desired, info: achieved)
        )


def test_a_parallel_environment_of_pettingzoo() -> None:
    """With spaces, so that an agent may come later than the first step."""
    pettingzoo, spaces = pytest.importorskip("pettingzoo"), pytest.importorskip("gymnasium").spaces
    from pettingzoo.test import parallel_api_test

    class Line(pettingzoo.ParallelEnv):  # type: ignore[misc, name-defined]
        metadata = {"name": "line_v0"}  # noqa: RUF012
        possible_agents = ["slow", "fast"]  # noqa: RUF012

        def __init__(self) -> None:
            self.observation_spaces = {
                a: spaces.Box(0, 99, (n,), np.float32) for a, n in (("slow", 1), ("fast", 2))
            }
            self.action_spaces = {a: spaces.Discrete(2) for a in self.possible_agents}

        def observation_space(self, agent: str) -> Any:
            return self.observation_spaces[agent]

        def action_space(self, agent: str) -> Any:
            return self.action_spaces[agent]

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            self.agents, self.time = ["slow"], 0
            return self._seen(self.agents), {a: {} for a in self.agents}

        def _seen(self, agents: list[str]) -> dict[str, Any]:
            return {a: np.full(self.observation_spaces[a].shape, self.time, np.float32) for a in agents}

        def step(self, actions: dict[str, int]) -> Any:
            self.time += 1
            acted = list(actions)
            over = self.time == 12
            terminated = {a: a == "fast" and self.time == 9 for a in acted}
            self.agents = [] if over else [a for a in acted if not terminated[a]]
            if self.time == 3:
                self.agents.append("fast")
            seen = self._seen(list(dict.fromkeys([*acted, *self.agents])))
            everyone = list(seen)
            return (
                seen,
                {a: 1.0 if a in acted else 0.0 for a in everyone},
                {a: terminated.get(a, False) for a in everyone},
                dict.fromkeys(everyone, over),
                {a: {} for a in everyone},
            )

    env = Line()
    parallel_api_test(env, num_cycles=50)
    buffer = gear.ReplayBuffer(
        10_000, gamma=0.5, agents=env.possible_agents, device="cpu",
        observation_space=env.observation_spaces, action_space=env.action_spaces,
    )  # fmt: skip
    for _ in range(3):
        obs, _ = env.reset()
        while env.agents:
            actions = {agent: int(env.action_space(agent).sample()) for agent in env.agents}
            next_obs, rewards, terminations, truncations, _ = env.step(actions)
            buffer.add(obs, actions, rewards, next_obs, terminations, truncations)
            obs = next_obs
    assert len(buffer) == 36
    batch = buffer.sample(500)
    time = batch["obs"]["slow"][:, 0]
    assert torch.equal(batch["active"]["fast"], (time >= 3) & (time < 9))
    assert torch.equal(batch["next_obs"]["slow"][:, 0], time + 1)
    on = batch["active"]["fast"]
    assert torch.equal(batch["next_obs"]["fast"][on], batch["obs"]["fast"][on] + 1)
    assert torch.equal(batch["discount"]["fast"][on], torch.where(time[on] == 8, 0.0, 0.5))
