"""The replay buffer for stable-baselines3, beside SB3's own."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long

import gear_loader as gear
from gear_loader.errors import SchemaError, TableEmptyError

stable_baselines3 = pytest.importorskip("stable_baselines3", reason="needs pip install '.[sb3]'")

from gymnasium import spaces  # noqa: E402
from stable_baselines3.common import buffers, vec_env  # noqa: E402

from gear_loader.integrations.sb3 import DictReplayBuffer, HerReplayBuffer, NStepReplayBuffer, ReplayBuffer  # noqa: E402

BOX = spaces.Box(-np.inf, np.inf, (5,), np.float32)
DICT = spaces.Dict(
    {"vector": BOX, "image.left": spaces.Box(0, 255, (2, 3), np.uint8), "mode": spaces.Discrete(7)}
)
PARTS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def calls(n_envs: int, steps: int, mean: float, seed: int = 0) -> Iterator[tuple[Any, ...]]:
    """Arguments of `add`: episodes of random lengths, of which half end by a time limit."""
    rng = np.random.default_rng(seed)

    def observe() -> np.ndarray:
        return rng.standard_normal((n_envs, 5)).astype(np.float32)

    observation = observe()
    for _ in range(steps):
        following, done = observe(), rng.random(n_envs) < 1 / mean
        infos = [{"TimeLimit.truncated": bool(rng.random() < 0.5)} if end else {} for end in done]
        yield observation, following, rng.integers(0, 3, n_envs), rng.standard_normal(n_envs), done, infos
        observation = np.where(done[:, None], observe(), following)


def as_dicts(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments of `add` with observations of the space DICT."""

    def parts(observation: np.ndarray) -> dict[str, np.ndarray]:
        image = np.abs(observation[:, :3, None].repeat(2, 2).transpose(0, 2, 1) * 50)
        mode = (np.abs(observation[:, 4]) * 2).astype(np.int64) % 7
        return {"vector": observation, "image.left": image.astype(np.uint8), "mode": mode}

    return parts(call[0]), parts(call[1]), *call[2:]


def same(expected: Any, found: Any) -> bool:
    """Whether arrays, tensors or dicts of them are the same, of the same dtypes."""
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(same(expected[key], found[key]) for key in expected)
    if expected is None:
        return found is None
    expected, found = (torch.as_tensor(each) for each in (expected, found))
    return expected.dtype == found.dtype and torch.equal(expected, found)


def same_samples(ours: ReplayBuffer, theirs: Any, seed: int, **options: Any) -> None:
    """The same batch, and the same random state after it."""
    drawn = []
    for each in (theirs, ours):
        np.random.seed(seed)  # noqa: NPY002
        drawn.append((each.sample(32, **options), np.random.randint(1 << 30)))  # noqa: NPY002
    assert drawn[0][1] == drawn[1][1]
    assert type(drawn[0][0]) is type(drawn[1][0])
    for expected, found in zip(drawn[0][0], drawn[1][0], strict=True):
        assert same(expected, found)


@pytest.mark.parametrize(
    ("n_envs", "optimize", "copy", "n_steps"),
    [(1, False, True, 1), (3, False, False, 1), (3, True, True, 1), (1, True, False, 5), (3, False, True, 3)],
)
def test_the_same_batches_as_the_buffer_of_sb3(n_envs: int, optimize: bool, copy: bool, n_steps: int) -> None:
    """Through filling, wrapping around, and pickling in the middle of an episode."""
    returns: dict[str, Any] = {} if n_steps == 1 else {"n_steps": n_steps, "gamma": 0.9}
    kind = buffers.NStepReplayBuffer if returns else buffers.ReplayBuffer
    theirs = kind(600, BOX, spaces.Discrete(3), device="cpu", n_envs=n_envs, **returns)
    options = {"optimize_memory_usage": optimize, "copy": copy, "n_envs": n_envs, "device": "cpu", **returns}
    ours = ReplayBuffer(600, BOX, spaces.Discrete(3), **options)
    for number, call in enumerate(calls(n_envs, 1500 // n_envs, mean=30)):
        theirs.add(*call)
        ours.add(*call)
        assert (ours.pos, ours.full, ours.size()) == (theirs.pos, theirs.full, theirs.size())
        if number % 23 == 0:
            same_samples(ours, theirs, number)
        if number in (100, 400):
            ours = pickle.loads(pickle.dumps(ours))
            same_samples(ours, theirs, number)
    for part in PARTS:
        assert same(getattr(theirs, part), getattr(ours, part)), part
    ours.table.check_valid()
    ours.reset()
    assert ours.size() == len(ours.table) == 0
    ours.add(*call)
    np.testing.assert_array_equal(ours.observations[0], call[0])


@pytest.mark.parametrize(("n_envs", "optimize"), [(1, False), (3, True)])
def test_the_same_batches_of_dict_observations(n_envs: int, optimize: bool) -> None:
    theirs = buffers.DictReplayBuffer(600, DICT, spaces.Discrete(3), device="cpu", n_envs=n_envs)
    ours = DictReplayBuffer(
        600, DICT, spaces.Discrete(3), device="cpu", n_envs=n_envs, optimize_memory_usage=optimize
    )
    assert "next_observation.image.left" in ours.table.schema or optimize
    for number, call in enumerate(calls(n_envs, 1500 // n_envs, mean=30)):
        theirs.add(*as_dicts(call))
        ours.add(*as_dicts(call))
        if number % 50 == 0:
            same_samples(ours, theirs, number)
        if number == 400:
            ours = pickle.loads(pickle.dumps(ours))
    for part in PARTS:
        assert same(getattr(theirs, part), getattr(ours, part)), part
    with pytest.raises(SchemaError, match=r"obs dict, next_obs dict.*Nothing was added: .*mode"):
        ours.add({"vector": 1, "image.left": 2}, {}, *call[2:])
    assert ours.pos == theirs.pos


def test_returns_end_at_a_truncation_without_done() -> None:
    theirs, ours = (
        kind(50, BOX, spaces.Discrete(3), device="cpu")
        for kind in (buffers.NStepReplayBuffer, NStepReplayBuffer)
    )
    for number, call in enumerate(calls(1, 70, mean=1e9)):
        for each in (theirs, ours):
            each.add(*call[:5], [{"TimeLimit.truncated": number % 20 == 0}])
    same_samples(ours, theirs, 1)


def test_timeouts_and_normalisation_are_those_of_sb3() -> None:
    class Idle(vec_env.DummyVecEnv):
        def __init__(self) -> None:
            vec_env.VecEnv.__init__(self, 2, BOX, spaces.Discrete(3))

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None, None]

    normalize = vec_env.VecNormalize(Idle())
    for handle in (False, True):
        options = {"n_envs": 2, "device": "cpu", "handle_timeout_termination": handle}
        theirs = buffers.ReplayBuffer(200, BOX, spaces.Discrete(3), **options)
        ours = ReplayBuffer(200, BOX, spaces.Discrete(3), **options)
        for call in calls(2, 150, mean=25):
            theirs.add(*call)
            ours.add(*call)
        same_samples(ours, theirs, 1)
        same_samples(ours, theirs, 2, env=normalize)


def test_episodes_are_trajectories_of_a_table_that_others_read() -> None:
    """Also with observations stored once, and the episode that has not ended."""
    name = f"sb3-{np.random.default_rng().integers(1 << 40)}"
    ours = ReplayBuffer(4000, BOX, spaces.Discrete(3), device="cpu", optimize_memory_usage=True, name=name)
    try:
        given = list(calls(1, 200, mean=25))
        for call in given:
            ours.add(*call)
        ends = np.flatnonzero([call[4][0] for call in given])
        with gear.Table.attach(name) as table:
            assert ends[-1] < len(given) - 1
            first = 0
            for index, end in zip(table.indices(), [*ends, len(given) - 1], strict=True):
                found, final = table[int(index)], table.final(int(index))
                assert final is not None
                expected = np.concatenate([call[0] for call in given[first : end + 1]])
                np.testing.assert_array_equal(found["observation"], expected)
                np.testing.assert_array_equal(final["observation"], given[end][1][0])
                if end == len(given) - 1:
                    break
                stops = found["terminated"] | found["truncated"]
                assert torch.nonzero(stops).flatten().tolist() == [end - first]
                first = end + 1
        # A stream that is cut without a done: the true next observation stays.
        ours.add(*next(calls(1, 1, mean=1e9, seed=9)))
        ours.add(*next(calls(1, 1, mean=1e9, seed=8)))
        np.testing.assert_array_equal(ours.next_observations[200], next(calls(1, 1, mean=1e9, seed=9))[1])
    finally:
        ours.table.unlink()


@pytest.mark.parametrize("n_envs", [1, 5])
def test_very_short_episodes_leave_fewer_transitions_never_wrong_ones(n_envs: int) -> None:
    """Also of an environment whose episodes are long, which are removed while they go on."""
    size = 2000
    theirs = buffers.ReplayBuffer(size * n_envs, BOX, spaces.Discrete(3), device="cpu", n_envs=n_envs)
    options = {"device": "cpu", "n_envs": n_envs, "optimize_memory_usage": True}
    ours = ReplayBuffer(size * n_envs, BOX, spaces.Discrete(3), **options)
    long = np.arange(n_envs) == 1
    for call in calls(n_envs, 5000, mean=1.5):
        observation, following, action, reward, done, infos = call
        done &= ~long
        infos = [info if end else {} for info, end in zip(infos, done, strict=True)]
        call = observation, following, action, reward, done, infos
        theirs.add(*call)
        ours.add(*call)
    assert size // 10 < ours.size() < size
    live = np.arange(5000 - ours.size(), 5000) % size
    for part in PARTS:
        np.testing.assert_array_equal(getattr(ours, part)[live], getattr(theirs, part)[live])
    known = {row.tobytes() for row in ours.observations[live].reshape(-1, 5)}
    assert {row.tobytes() for row in ours.sample(500).observations.numpy()} <= known
    ours.table.check_valid()


def test_what_it_refuses() -> None:
    empty = ReplayBuffer(100, BOX, spaces.Discrete(3), device="cpu")
    with pytest.raises(TableEmptyError, match="add a transition before the first sample"):
        empty.sample(4)
    with pytest.raises(SchemaError, match="expected one that is not a Dict; use DictReplayBuffer"):
        ReplayBuffer(100, spaces.Dict({"a": BOX}), spaces.Discrete(3))
    with pytest.raises(SchemaError, match="expected a Dict; use ReplayBuffer"):
        DictReplayBuffer(100, BOX, spaces.Discrete(3))
    with pytest.raises(SchemaError, match="observation space has dtype uint16"):
        ReplayBuffer(100, spaces.Box(0, 9, (2,), np.uint16), spaces.Discrete(3))


GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), BOX))


class GoalEnvs(vec_env.DummyVecEnv):
    """Stands for environments that compute rewards of goals, and look at the infos."""

    def __init__(self, n_envs: int) -> None:
        vec_env.VecEnv.__init__(self, n_envs, GOALS, spaces.Discrete(3))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        achieved, desired, infos = args
        assert (method_name, indices) == ("compute_reward", [0])
        return [-np.linalg.norm(achieved - desired, axis=1) + [info.get("bonus", 0) for info in infos]]


@pytest.mark.parametrize(
    ("n_envs", "strategy", "optimize", "size"),
    [
        (1, "future", False, 600),
        (3, "episode", True, 600),
        (3, "future", False, 600),
        (2, "final", True, 2000),
    ],
)
def test_hindsight_draws_what_that_of_sb3_draws(
    n_envs: int, strategy: str, optimize: bool, size: int
) -> None:
    """Through wrapping around, episodes longer than a trajectory may be, and pickling."""
    made = []
    for kind in (stable_baselines3.HerReplayBuffer, HerReplayBuffer):
        options = {"copy_info_dict": True, "goal_selection_strategy": strategy, "n_envs": n_envs}
        options |= {"optimize_memory_usage": optimize} if kind is HerReplayBuffer else {}
        made.append(kind(size, GOALS, spaces.Discrete(3), GoalEnvs(n_envs), device="cpu", **options))
    theirs, ours = made
    with pytest.raises(TableEmptyError, match="No episode has ended, so there are no goals"):
        ours.sample(4)
    for number, (obs, following, action, reward, done, infos) in enumerate(calls(n_envs, 900, mean=25)):
        goals = {"observation": obs, "achieved_goal": obs + 1, "desired_goal": obs * 2}
        later = {"observation": following, "achieved_goal": following + 1, "desired_goal": following * 2}
        for each in (theirs, ours):
            told = [{**info, "bonus": number} for info in infos]
            each.add(dict(goals), dict(later), action, reward, done, told)
        if number % 20 == 0 and (theirs.ep_length > 0).any():
            same_samples(ours, theirs, number)
            same_samples(ours, theirs, number, env=vec_env.VecNormalize(GoalEnvs(n_envs)))
            assert np.array_equal(ours.ep_length, theirs.ep_length)
        if number == 333:
            ours = pickle.loads(pickle.dumps(ours))
            with pytest.raises(SchemaError, match="call set_env"):
                ours.sample(4)
            ours.set_env(GoalEnvs(n_envs))
    for each in (theirs, ours):
        with pytest.warns(UserWarning, match="last trajectory in the replay buffer will be truncated"):
            each.truncate_last_trajectory()
    same_samples(ours, theirs, 5)
    for part in PARTS:
        assert same(getattr(theirs, part), getattr(ours, part)), part
    ours.table.check_valid()


def test_hindsight_of_very_short_episodes_is_never_wrong() -> None:
    """The table removes some early; each goal was achieved in the episode of its transition."""
    ours = HerReplayBuffer(2000, GOALS, spaces.Discrete(3), GoalEnvs(1), device="cpu", n_sampled_goal=9)
    episode = 0
    for obs, following, action, reward, done, infos in calls(1, 5000, mean=1.5):
        parts = {
            "observation": obs * 0 + episode,
            "achieved_goal": following * 0 + episode,
            "desired_goal": obs - 1e6,
        }
        ours.add(parts, parts, action, reward, done, infos)
        episode += int(done[0])
    assert 200 < ours.size() < 2000
    batch = ours.sample(500)
    assert torch.equal(batch.observations["observation"][50:], batch.observations["desired_goal"][50:])
    assert (batch.observations["desired_goal"][:50] < -1e5).all()
    assert (ours.ep_length > 0).sum() <= ours.size()
    for options, message in (
        ({"goal_selection_strategy": "best"}, "goal_selection_strategy is 'best'; expected one of"),
        ({"observation_space": DICT}, r"lacks \['achieved_goal', 'desired_goal'\]"),
    ):
        given = {
            "observation_space": GOALS,
            "action_space": spaces.Discrete(3),
            "env": GoalEnvs(1),
            **options,
        }
        with pytest.raises(SchemaError, match=message):
            HerReplayBuffer(100, **given)


TRAININGS = [("DQN", "CartPole-v1", 2), ("SAC", "Pendulum-v1", 1), ("TD3", "Pendulum-v1", 2)]


@pytest.mark.parametrize(("algorithm", "env", "n_envs"), mostly_long(TRAININGS, TRAININGS[0]))
def test_training_is_the_same_to_the_bit(tmp_path: Path, algorithm: str, env: str, n_envs: int) -> None:
    """And goes on after save_replay_buffer and load_replay_buffer."""
    from stable_baselines3.common.env_util import make_vec_env

    trained = []
    for kind in (buffers.ReplayBuffer, ReplayBuffer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(stable_baselines3, algorithm)(
                "MlpPolicy",
                make_vec_env(env, n_envs=n_envs, seed=3),
                replay_buffer_class=kind,
                buffer_size=120,
                learning_starts=50,
                batch_size=32,
                seed=3,
                device="cpu",
                policy_kwargs={"net_arch": [16]},
            )
            model.learn(100)
            model.save_replay_buffer(tmp_path / "buffer.pkl")
            model.load_replay_buffer(tmp_path / "buffer.pkl")
            model.learn(100, reset_num_timesteps=False)
        trained.append(torch.cat([value.flatten() for value in model.policy.state_dict().values()]))
    assert torch.equal(*trained)


def test_options_and_infos_that_do_not_fit() -> None:
    for options, message in (
        ({"n_steps": 0}, "n_steps is 0"),
        ({"n_steps": 2, "gamma": 2}, "gamma is 2; expected a"),
    ):
        with pytest.raises(SchemaError, match=message):
            ReplayBuffer(100, BOX, spaces.Discrete(3), **options)
    buffer = ReplayBuffer(100, BOX, spaces.Discrete(3), device="cpu", n_envs=2)
    *call, _ = next(calls(2, 1, 9))
    with pytest.raises(
        SchemaError, match=r"infos is a dict with the keys .*; expected a list with one dict for each"
    ):
        buffer.add(*call, {"TimeLimit.truncated": np.zeros(2, bool)})
    assert buffer.size() == 0
    reads_none = ReplayBuffer(100, BOX, spaces.Discrete(3), "cpu", n_envs=2, handle_timeout_termination=False)
    for infos in ({"final_info": None}, [{}, {}]):  # as CleanRL gives them
        reads_none.add(*call, infos)
    assert reads_none.size() == 2
    assert np.array_equal(*reads_none.next_observations[:2])


def test_a_refused_transition_leaves_no_mark_of_an_end() -> None:
    space = spaces.Box(-1, 1, (2,))
    ours = ReplayBuffer(20, space, spaces.Discrete(2), "cpu", n_envs=2)
    obs, none = np.zeros((2, 2), np.float32), np.zeros(2, bool)
    with pytest.raises(SchemaError, match="Nothing was added"):
        ours.add(obs, obs, none, none, ~none, [{"TimeLimit.truncated": True}, None])  # type: ignore[list-item]
    ours.add(obs, obs, np.zeros(2, int), np.zeros(2, np.float32), none, [{}, {}])
    assert not ours.timeouts.any()
    assert not ours.dones.any()


@pytest.mark.parametrize("optimize", [False, True])
def test_a_copy_is_right_after_an_interrupted_add(optimize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    space = spaces.Box(-1e6, 1e6, (1,))
    ours = ReplayBuffer(40, space, spaces.Discrete(2), "cpu", n_envs=2, optimize_memory_usage=optimize)

    def add(number: int) -> None:
        obs, rewards = np.full((2, 1), number, np.float32), np.full(2, number, np.float32)
        ours.add(obs, obs + 1, np.zeros(2, int), rewards, np.zeros(2, bool), [{}, {}])

    lock: Any = ours.table._engine.index.recovery.lock
    run = lock.run

    def interrupted(*given: Any) -> None:
        run(*given)
        raise KeyboardInterrupt

    for number in range(60):
        if number % 20 == 10:
            with monkeypatch.context() as patch:
                patch.setattr(lock, "run", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    add(number)
        else:
            add(number)
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.size() == ours.size() == 20
    for name in ("observations", "next_observations", "rewards"):
        np.testing.assert_array_equal(getattr(copy, name), getattr(ours, name))
    assert set(ours.rewards[:, 0].tolist()) == set(range(39, 60)) - {50}
