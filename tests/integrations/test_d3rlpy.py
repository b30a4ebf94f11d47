"""Episodes of d3rlpy, by objects with its documented fields."""

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
