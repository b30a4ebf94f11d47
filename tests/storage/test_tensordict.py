"""TensorDicts wherever a mapping of columns is taken: those of the package, where it is installed, and a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensordict_stand_in
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError, SourceError

SCHEMA = {
    "observation": gear.Column(torch.float32, (3,)),
    "done": gear.Column(torch.bool, (1,)),
    "next.observation": gear.Column(torch.float32, (3,)),
    "next.reward": gear.Column(torch.float32),
}


@pytest.fixture(params=["stand-in", "tensordict"])
def kind(request: pytest.FixtureRequest) -> Any:
    """The class."""
    if request.param == "stand-in":
        return tensordict_stand_in.TensorDict
    return pytest.importorskip("tensordict").TensorDict


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with gear.Table.create(SCHEMA, max_steps=100, max_trajectories=10, block_steps=4) as table:
        yield table


def columns(first: int, length: int, *shape: int) -> dict[str, torch.Tensor]:
    """What a rollout of that number and length holds, by the names of `SCHEMA`."""
    numbers = torch.arange(first, first + length, dtype=torch.float32).expand(*shape, length).contiguous()
    observation = torch.stack([numbers, -numbers, numbers * 2], dim=-1)
    return {
        "observation": observation,
        "done": (numbers % 2 == 0).unsqueeze(-1),
        "next.observation": observation + 1,
        "next.reward": numbers / 2,
    }


def rollout(kind: Any, first: int, length: int, *shape: int) -> Any:
    """The same as TorchRL lays it out: what comes next in a TensorDict of its own."""
    flat = columns(first, length, *shape)
    inner = {name.partition(".")[2]: value for name, value in flat.items() if "." in name}
    outer: dict[str, Any] = {name: value for name, value in flat.items() if "." not in name}
    return kind({**outer, "next": inner}, batch_size=[*shape, length])


def same(table: gear.Table, index: int, first: int, length: int) -> None:
    for name, expected in columns(first, length).items():
        assert torch.equal(table[index][name], expected), name


def test_one_and_many(table: gear.Table, kind: Any) -> None:
    same(table, table.add(rollout(kind, 5, 7), priority=2.0), 5, 7)
    given = [rollout(kind, 20, 3), rollout(kind, 30, 4)]
    for many in (given, iter(given)):
        for index, (first, length) in zip(table.extend(many), ((20, 3), (30, 4)), strict=True):
            same(table, int(index), first, length)
    indices = table.extend(rollout(kind, 1, 6, 2), lengths=[6, 4])
    same(table, int(indices[0]), 1, 6)
    same(table, int(indices[1]), 1, 4)
    whole = table.extend(rollout(kind, 2, 5, 2))  # [2, 5]: two trajectories of 5 steps
    same(table, int(whole[1]), 2, 5)
    with pytest.raises(SchemaError, match="One mapping was received without lengths"):
        table.extend(rollout(kind, 1, 6))
    twice = rollout(kind, 0, 4)
    twice["next.reward"] = torch.zeros(4)
    with pytest.raises(SchemaError, match=r"Two entries would be the column 'next.reward'"):
        table.add(twice)
    with table.writer() as writer:
        for step in range(3):
            writer.append(rollout(kind, 4, 3)[step])
        writer.append(rollout(kind, 7, 2))
        same(table, writer.commit(), 4, 5)
    extra = rollout(kind, 0, 4)
    extra["extra"] = torch.zeros(4)
    message = r"the columns \['observation', 'done', 'next.observation', 'next.reward', 'extra'\]; missing: \[\], un"
    with pytest.raises(SchemaError, match=message):
        table.add(extra)
    table.check_valid()


def test_a_source_of_them(kind: Any) -> None:
    given = [rollout(kind, 0, 4), rollout(kind, 10, 2)]
    assert gear.sources.infer_schema(given) == gear.sources.infer_schema(given[0]) == SCHEMA
    with gear.sources.load(given, progress=False) as table:
        assert dict(table.schema) == SCHEMA
        for index, (first, length) in enumerate([(0, 4), (10, 2)]):
            same(table, index, first, length)
    with gear.sources.load(given, columns={"seen": "observation", "reward": "next.reward"}) as table:
        np.testing.assert_array_equal(table[1]["reward"], columns(10, 2)["next.reward"])
    with pytest.raises(SourceError, match=r"A single episode goes into a list: load\(\[episode\]\)"):
        gear.sources.load(given[0])
