"""Hindsight: goals against the episodes that were added, their distribution against Stable-Baselines3's."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from hypothesis import given, settings
from hypothesis import strategies as st
from table_common import fresh_name
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader import transforms
from gear_loader.errors import SchemaError, TableEmptyError

GAMMA = 0.9
DESIRED = 10_000  # from here on goals that were desired; achieved ones are below


def reward(achieved: Any, desired: Any, info: Any) -> Any:
    """Different for each pair of goals, and exact in float32."""
    assert achieved.shape == desired.shape == (len(info["bonus"]), 2)
    assert (info["pair"][0] == -info["bonus"]).all()
    return (achieved[:, 0] * 3 - desired[:, 0]) % 1013 + info["bonus"]


class Episodes:
    """Observations with numbers that never come back: those of `achieved_goal` count up.

    Attributes:
        of: number of an observation -> (episode, step), or None for its first one. length: steps of each episode.
    """

    def __init__(self, buffer: gear.ReplayBuffer, *, envs: int = 1, seed: int = 0) -> None:
        self.buffer, self.envs = buffer, envs
        self.choose = np.random.default_rng(seed)
        self.number = 0
        self.paths: list[list[int]] = []  # observations of each episode
        self.ends: list[bool] = []  # whether it terminated
        self.open = [self.begin() for _ in range(envs)]
        self.place = {path[0]: (at, 0) for at, path in enumerate(self.paths)}

    def begin(self) -> int:
        self.paths.append([self.number])
        self.ends.append(False)
        self.number += 1
        return len(self.paths) - 1

    def obs(self, episode: int, number: int) -> dict[str, Any]:
        return {
            "observation": np.float32(number),
            "achieved_goal": np.array([number, -number], np.float32),
            "desired_goal": np.array([DESIRED + episode, 0], np.float32),
        }

    def step(self, *, ends: bool | None = None) -> None:
        rows = []
        for env, episode in enumerate(self.open):
            before = self.paths[episode][-1]
            now, self.number = self.number, self.number + 1
            self.paths[episode].append(now)
            self.place[now] = (episode, len(self.paths[episode]) - 1)
            over = self.choose.random() < 0.12 if ends is None else ends
            terminated = bool(over and self.choose.random() < 0.5)
            self.ends[episode] = terminated
            rows.append(
                (
                    self.obs(episode, before),
                    before,
                    self.obs(episode, now),
                    terminated,
                    over and not terminated,
                )
            )
            if over:
                self.open[env] = self.begin()
                self.place[self.paths[-1][0]] = (len(self.paths) - 1, 0)
        many = [stacked(part) for part in zip(*rows, strict=True)]
        obs, action, following, terminated, truncated = (
            many if self.envs > 1 else [first(part) for part in many]
        )
        bonus = np.float32(1) * (action % 7)
        self.buffer.add(
            obs, action, bonus * 0 - 5000, following, terminated, truncated, bonus=bonus, pair=(-bonus, bonus)
        )

    def check(self, batch: Any, strategy: str, n_step: int, *, whole: bool) -> None:
        """Every row is what was added, or what Hindsight says."""
        numbers = batch["obs"]["observation"].long()
        for row, number in enumerate(numbers.tolist()):
            episode, step = self.place[number]
            path = self.paths[episode]
            assert not (whole and episode in self.open)
            following = int(batch["next_obs"]["observation"][row])
            count = self.place[following][1] - step
            assert 1 <= count <= n_step
            over = episode not in self.open and following == path[-1]
            assert count == n_step or following == path[-1]
            discount = 0.0 if over and self.ends[episode] else GAMMA**count
            assert batch["discount"][row] == pytest.approx(discount)
            goal = batch["obs"]["desired_goal"][row]
            assert torch.equal(goal, batch["next_obs"]["desired_goal"][row])
            assert batch["obs"]["achieved_goal"][row].tolist() == [number, -number]
            assert batch["next_obs"]["achieved_goal"][row].tolist() == [following, -following]
            wanted = int(goal[0])
            if not batch["relabelled"][row]:
                assert goal.tolist() == [DESIRED + episode, 0]
                assert batch["reward"][row] == pytest.approx(sum(-5000 * GAMMA**i for i in range(count)))
                continue
            assert goal[1] == -wanted
            where, at = self.place[wanted]
            assert where == episode
            least = {"future": step + 1, "episode": 1, "final": len(path) - 1}[strategy]
            assert least <= at < len(path)
            rewards = [(path[step + i + 1] * 3 - wanted) % 1013 + path[step + i] % 7 for i in range(count)]
            total = sum(GAMMA**i * each for i, each in enumerate(rewards))
            assert batch["reward"][row] == (total if count == 1 else pytest.approx(total))


def stacked(parts: Any) -> Any:
    if isinstance(parts[0], dict):
        return {key: np.stack([part[key] for part in parts]) for key in parts[0]}
    return np.array(parts)


def first(value: Any) -> Any:
    return {key: part[0] for key, part in value.items()} if isinstance(value, dict) else value[0]


def make(strategy: Any = "future", **options: Any) -> gear.ReplayBuffer:
    own = {name: options.pop(name) for name in ("running", "tensors", "n_sampled_goal") if name in options}
    return gear.ReplayBuffer(
        **{
            "capacity": 2_000,
            "gamma": GAMMA,
            "device": "cpu",
            "batch_size": 20,
            "hindsight": gear.Hindsight(reward, strategy=strategy, **own),
            **options,
        }
    )


@settings(deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1, 1, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["future", "final", "episode"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_rows_are_what_was_added_or_relabelled(
    seed: int,
    envs: int,
    n_step: int,
    strategy: str,
    running: bool,
    tensors: bool,
    goals: int,
    by_priority: bool,
) -> None:
    sampler = gear.Prioritized(unit="step") if by_priority else None
    buffer = make(
        strategy, n_step=n_step, running=running, tensors=tensors, n_sampled_goal=goals, sampler=sampler
    )
    episodes = Episodes(buffer, envs=envs, seed=seed)
    for _ in range(25):
        episodes.step()
    episodes.step(ends=True)
    for _ in range(4):
        episodes.step(ends=False)
    batch = buffer.sample()
    assert int(batch["relabelled"].sum()) == 20 * goals // (goals + 1)
    episodes.check(batch, strategy, n_step, whole=not running)
    for batch, _ in zip(buffer, range(3), strict=False):
        episodes.check(batch, strategy, n_step, whole=not running)


def test_the_ratio_is_exact() -> None:
    buffer = make(n_sampled_goal=2)
    episodes = Episodes(buffer)
    for step in range(40):
        episodes.step(ends=step % 8 == 7)
    counts = [int(buffer.sample(32)["relabelled"].sum()) for _ in range(900)]
    assert set(counts) == {21, 22}
    assert abs(np.mean(counts) - 32 * 2 / 3) < 3.3 * np.sqrt(2 / 9 / 900)
    assert all(int(buffer.sample(30)["relabelled"].sum()) == 20 for _ in range(50))


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_distributed_as_those_of_sb3(strategy: Any) -> None:
    """Numbers of (step, step of the goal) in episodes of 3, 5 and 8 steps: two samples, compared by chi-square."""
    buffers = pytest.importorskip("stable_baselines3.her.her_replay_buffer")
    spaces = pytest.importorskip("gymnasium").spaces
    box = {
        name: spaces.Box(-1e6, 1e6, (2,), np.float32)
        for name in ("achieved_goal", "desired_goal", "observation")
    }

    class Env:
        def env_method(self, name: str, achieved: Any, desired: Any, info: Any, indices: Any) -> list[Any]:
            return [achieved[:, 0] - desired[:, 0]]

    theirs = buffers.HerReplayBuffer(
        100, spaces.Dict(box), spaces.Discrete(3), env=Env(), device="cpu", goal_selection_strategy=strategy
    )
    ours = gear.ReplayBuffer(
        100,
        device="cpu",
        seed=1,
        hindsight=gear.Hindsight(lambda a, d, info: a[:, 0] - d[:, 0], strategy=strategy),
    )
    np.random.seed(0)  # noqa: NPY002 (what SB3 draws from)
    number = 0
    for length in (3, 5, 8, 4):  # the last one is still running
        for step in range(length):
            obs, following = (
                {
                    "observation": np.full(2, at),
                    "achieved_goal": np.full(2, at),
                    "desired_goal": np.full(2, -1),
                }
                for at in (number, number + 1)
            )
            obs, following = ({k: v.astype(np.float32) for k, v in part.items()} for part in (obs, following))
            done = step == length - 1 and length != 4
            ours.add(obs, 0, 0.0, following, False, done)
            theirs.add(
                {k: v[None] for k, v in obs.items()}, {k: v[None] for k, v in following.items()},
                np.array([[0]]), np.array([0.0]), np.array([done]), [{"TimeLimit.truncated": True}],
            )  # fmt: skip
            number += 1
        number += 1

    def counted(obs: Any, following: Any, rewards: Any, dones: Any) -> torch.Tensor:
        there = obs["desired_goal"][:, 0] >= 0
        assert int(there.sum()) == 204
        steps, goals = (obs[name][there, 0].long() for name in ("observation", "desired_goal"))
        assert torch.equal(rewards.flatten()[there], following["achieved_goal"][there, 0] - goals)
        assert not dones.any()
        return torch.bincount(steps * 32 + goals, minlength=32 * 32)

    mine = yours = torch.zeros(32 * 32)
    for _ in range(100):
        batch = ours.sample(255)  # of 256 SB3 relabels 204; so of 255 do we
        mine = mine + counted(batch["obs"], batch["next_obs"], batch["reward"], batch["discount"] == 0)
        other = theirs.sample(256)
        yours = yours + counted(other.observations, other.next_observations, other.rewards, other.dones)
    assert torch.equal(mine > 0, yours > 0)
    both = (mine + yours)[mine > 0]
    cells = len(both)
    statistic = float(((mine - yours)[mine > 0] ** 2 / both).sum())
    assert cells == {"future": 6 + 15 + 36, "episode": 9 + 25 + 64, "final": 16}[strategy]
    assert statistic < cells - 1 + 3.3 * np.sqrt(2 * (cells - 1)) + 5  # about the 99.95% quantile


@pytest.mark.parametrize(("envs", "running"), mostly_long([(1, False), (3, True)], (3, True)))
def test_goals_come_from_the_whole_of_a_long_episode(envs: int, running: bool) -> None:
    """Of 1,500 steps and more; the place of a goal among what remains is uniform, by chi-square."""
    buffer = make(capacity=3_100 * envs, running=running, batch_size=500)
    episodes = Episodes(buffer, envs=envs)
    for step in range(3_600):  # the first episodes have been dropped whole, the last ones go on
        episodes.step(ends=step % 1_500 == 1_499)
    counts = torch.zeros(10)
    for _ in range(12):
        batch = buffer.sample()
        episodes.check(batch, "future", 1, whole=not running)
        there = batch["relabelled"]
        numbers, goals = batch["obs"]["observation"][there], batch["obs"]["desired_goal"][there, 0]
        for number, goal in zip(numbers.tolist(), goals.tolist(), strict=True):
            episode, step = episodes.place[int(number)]
            remaining = len(episodes.paths[episode]) - 1 - step
            if remaining >= 100:
                counts[10 * (episodes.place[int(goal)][1] - step - 1) // remaining] += 1
    assert counts.sum() > 3_000
    statistic = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert statistic < 35  # of 9 degrees of freedom: 99.99%


def test_draws_go_on_from_a_state(tmp_path: Path) -> None:
    buffer = make(n_step=2, transform=transforms.Normalize("obs.observation", "next_obs.observation"))
    episodes = Episodes(buffer)
    for step in range(60):
        episodes.step(ends=step % 9 == 8)
    buffer.sample()
    state = pickle.loads(pickle.dumps(buffer.state_dict()))
    buffer.save(tmp_path / "saved")
    again = gear.ReplayBuffer.load(
        tmp_path / "saved", n_step=2, gamma=GAMMA, device="cpu", hindsight=buffer._hindsight, batch_size=20,
        transform=transforms.Normalize("obs.observation", "next_obs.observation"),
    )  # fmt: skip
    again.load_state_dict(state)
    for _ in range(3):
        one, other = buffer.sample(), again.sample()
        for part in ("obs", "next_obs"):
            assert all(torch.equal(one[part][name], other[part][name]) for name in one[part])
        assert torch.equal(one["reward"], other["reward"])
        assert torch.equal(one["relabelled"], other["relabelled"])


def test_rows_that_are_gone_keep_their_goals() -> None:
    """Batches were prepared ahead, and their episodes have been dropped since."""
    buffer = make(capacity=200, n_sampled_goal=1)
    episodes = Episodes(buffer)
    for step in range(200):
        episodes.step(ends=step % 5 == 4)
    iterator = iter(buffer)
    next(iterator)
    assert buffer.dataset is not None
    buffer.dataset.settle()  # two more are prepared
    drawn = len(buffer)
    for step in range(100):
        episodes.step(ends=step % 5 == 4)
    batch = next(iterator)
    assert len(buffer) <= drawn
    assert buffer.table is not None
    live = set(buffer.table.indices().tolist())
    episodes.check(batch, "future", 1, whole=True)
    gone = torch.tensor([int(index) not in live for index in batch["index"]])
    assert not batch["relabelled"][gone].any()
    for step in range(1_000):
        episodes.step(ends=step % 5 == 4)
    assert not next(iterator)["relabelled"].any()


@pytest.mark.long
def test_batches_of_workers_are_those_of_this_process() -> None:
    buffer = make(name=fresh_name())
    try:
        episodes = Episodes(buffer)
        for step in range(60):
            episodes.step(ends=step % 9 == 8)
        assert buffer.dataset is not None
        expected = [batch["obs"]["desired_goal"] for batch, _ in zip(buffer, range(4), strict=False)]
        buffer.dataset.set_epoch(0)
        for start in ("fork", "spawn"):
            loader = DataLoader(buffer.dataset, batch_size=None, num_workers=1, multiprocessing_context=start)
            for batch, other in zip(loader, expected, strict=False):
                episodes.check(batch, "future", 1, whole=True)
                assert torch.equal(batch["obs"]["desired_goal"], other)
            buffer.dataset.set_epoch(0)
    finally:
        assert buffer.table is not None
        buffer.table.unlink()


def test_a_buffer_that_nobody_refers_to_is_gone() -> None:
    buffer = make()
    episodes = Episodes(buffer)
    episodes.step(ends=True)
    buffer.sample()
    gone = weakref.ref(buffer.table)
    gc.disable()
    try:
        del buffer, episodes
        assert gone() is None
    finally:
        gc.enable()


def test_an_episode_that_has_not_ended_is_left_out_by_default() -> None:
    buffer, other = make(), make(running=True)
    for each in (buffer, other):
        episodes = Episodes(each)
        for _ in range(5):
            episodes.step(ends=False)
    with pytest.raises(TableEmptyError, match="add an episode that ends"):
        buffer.sample()
    assert (len(buffer), len(other)) == (0, 5)
    episodes.check(other.sample(), "future", 1, whole=False)


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"compute_reward": 3}, "compute_reward is 3; expected a function"),
    ({"n_sampled_goal": 0}, "n_sampled_goal is 0"),
    ({"strategy": "random"}, "strategy is 'random'"),
    ({"running": 1}, "running is 1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.Hindsight(**{"compute_reward": reward, **options})


def test_observations_without_goals_are_refused_before_there_is_a_table() -> None:
    with pytest.raises(SchemaError, match="hindsight is 4; expected"):
        gear.ReplayBuffer(10, hindsight=4)  # type: ignore[arg-type]
    buffer = make()
    goals = {"achieved_goal": np.zeros(2), "desired_goal": np.zeros(3)}
    for obs, message in ((np.zeros(2), r"the buffer has \['obs'"), (goals, r"'obs.desired_goal': \[3\]")):
        with pytest.raises(SchemaError, match=message):
            buffer.add(obs, 0, 0.0, obs, False, False)
    assert buffer.table is None
    Episodes(buffer).step(ends=True)
    assert len(buffer) == 1


def test_rewards_of_another_shape_are_refused() -> None:
    buffer = make(hindsight=gear.Hindsight(lambda achieved, desired, info: 0.0))
    Episodes(buffer).step(ends=True)
    with pytest.raises(
        SchemaError, match=r"returned the shape \[\] for 16 goals; expected one reward for each"
    ):
        buffer.sample()


@pytest.mark.parametrize("running", [False, True])
def test_an_environment_that_pauses_goes_on_where_it_was(running: bool) -> None:
    def goals(first: float, second: float) -> dict[str, np.ndarray]:
        place = np.array([[first], [second]], dtype=np.float32)
        return {"observation": place, "achieved_goal": place, "desired_goal": np.zeros_like(place)}

    hindsight = gear.Hindsight(lambda achieved, desired, info: -np.ones(len(achieved)), running=running)
    buffer = gear.ReplayBuffer(1000, num_envs=2, hindsight=hindsight, device="cpu")
    second = 50.0
    for step in range(6):
        active = np.array([True, step != 2])
        pair = (second, second + 1) if active[1] else (999.0, 777.0)  # ignored, as what is after it
        ends = np.full(2, step == 5)
        moved = goals(step + 1, pair[1])
        args = goals(step, pair[0]), np.zeros((2, 1), np.float32), np.ones(2, np.float32), moved
        buffer.add(*args, np.zeros(2, dtype=bool), ends, active=active)
        second += active[1]
    assert buffer.table is not None
    found = {}
    for index in buffer.table.indices().tolist():
        steps, final = buffer.table[index]["obs.observation"][:, 0], buffer.table.final(index)
        assert final is not None
        found[float(steps[0])] = [*steps.tolist(), *final["obs.observation"].tolist()]
    assert found == {0.0: [0, 1, 2, 3, 4, 5, 6], 50.0: [50, 51, 52, 53, 54, 55]}
