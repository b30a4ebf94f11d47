"""Episodes of d3rlpy: by objects with its documented fields, and where it is installed by d3rlpy itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError, SourceError
from gear_loader.integrations.d3rlpy import from_episodes, to_episodes


@dataclasses.dataclass(frozen=True)
class Episode:
    """The fields of `d3rlpy.dataset.Episode`."""

    observations: Any
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool


def episode(length: int, seed: int, *, parts: bool = False) -> Episode:
    rng = np.random.default_rng(seed)
    plain = rng.standard_normal((length, 3)).astype(np.float32)
    image = rng.integers(0, 255, (length, 2, 2), dtype=np.uint8)
    actions = rng.integers(0, 4, (length, 1))
    return Episode(
        (plain, image) if parts else plain,
        actions,
        rng.random((length, 1)).astype(np.float32),
        terminated=seed % 2 == 0,
    )


@pytest.mark.parametrize("parts", [False, True])
def test_episodes_go_in_and_come_out_the_same(parts: bool) -> None:
    given = [episode(5 + seed, seed, parts=parts) for seed in range(4)]
    found = list(from_episodes(given))
    assert [bool(each["truncated"][-1]) for each in found] == [False, True, False, True]
    assert not any(each["terminated"][:-1].any() for each in found)
    with gear.Table.create(gear.sources.infer_schema(found[0]), max_steps=500, max_trajectories=10) as table:
        table.extend(found)
        for expected, out in zip(given, to_episodes(table, Episode), strict=True):
            pairs = zip(expected.observations, out.observations, strict=True) if parts else ()
            for first, second in pairs:
                np.testing.assert_array_equal(first, second, strict=True)
            if not parts:
                np.testing.assert_array_equal(expected.observations, out.observations, strict=True)
            np.testing.assert_array_equal(expected.actions, out.actions, strict=True)
            np.testing.assert_array_equal(expected.rewards, out.rewards, strict=True)
            assert expected.terminated is out.terminated


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_d3rlpy_itself_takes_the_episodes_of_a_replay_buffer(actions: str) -> None:
    d3rlpy = pytest.importorskip(
        "d3rlpy", reason="needs d3rlpy: make peers ARGS='.peers d3rlpy', test_own_tests.py"
    )
    rng, buffer = np.random.default_rng(3), gear.ReplayBuffer(500)
    obs = rng.integers(0, 255, (3, 8, 8), dtype=np.uint8)
    for step in range(30):
        action = step % 4 if actions == "discrete" else rng.standard_normal(2).astype(np.float32)
        next_obs = rng.integers(0, 255, (3, 8, 8), dtype=np.uint8)
        buffer.add(obs, action, float(step), next_obs, step % 10 == 4, step % 10 == 9)
        obs = next_obs
    episodes = to_episodes(buffer.table, d3rlpy.dataset.Episode)
    assert [(each.size(), each.terminated) for each in episodes] == [(5, True), (5, False)] * 3
    replay = d3rlpy.dataset.create_infinite_replay_buffer(episodes)
    assert replay.transition_count == 3 * (5 + 4)  # none of a truncated episode's last step
    info = replay.dataset_info
    assert info.action_space.value == {"discrete": 2, "continuous": 1}[actions]
    assert info.action_size == {"discrete": 4, "continuous": 2}[actions]
    shapes = [[*map(tuple, each.shape)] for each in (info.observation_signature, info.reward_signature)]
    assert shapes == [[(3, 8, 8)], [(1,)]]
    assert [info.observation_signature.dtype[0], info.reward_signature.dtype[0]] == [np.uint8, np.float32]
    batch = replay.sample_transition_batch(64)
    assert {*batch.rewards.ravel()} <= {float(step) for step in range(30) if step % 10 != 9}
    assert set(batch.terminals[batch.rewards % 10 == 4].ravel()) == {1.0}
    again = list(from_episodes(replay.episodes))
    for episode, found in zip(episodes, again, strict=True):
        np.testing.assert_array_equal(found["observation"], episode.observations, strict=True)
        np.testing.assert_array_equal(found["action"], episode.actions, strict=True)
        np.testing.assert_array_equal(found["reward"], episode.rewards[:, 0], strict=True)
    dataset = d3rlpy.dataset.MDPDataset(
        np.concatenate([each.observations for each in episodes]),
        np.concatenate([each.actions for each in episodes]),
        np.concatenate([each.rewards for each in episodes]),
        np.concatenate([each["terminated"] for each in again]).astype(np.float32),
        np.concatenate([each["truncated"] for each in again]).astype(np.float32),
    )
    for one, other in zip(from_episodes(dataset.episodes), again, strict=True):
        for name, values in one.items():
            np.testing.assert_array_equal(other[name], values, err_msg=name)


def test_what_does_not_fit() -> None:
    with pytest.raises(SourceError, match="Episode 0 is a dict without"):
        list(from_episodes([{}]))
    short = dataclasses.replace(episode(5, 0), actions=np.zeros((4, 1)))
    with pytest.raises(SourceError, match=r"Episode 1 has arrays of the lengths .*'action': 4"):
        list(from_episodes([episode(5, 0), short]))
    schema = {"observation": gear.Column(torch.float32, (3,))}
    with (
        gear.Table.create(schema, max_steps=50, max_trajectories=5) as table,
        pytest.raises(SchemaError, match=r"missing: \['action', 'reward', 'terminated'\]"),
    ):
        to_episodes(table, Episode)
