"""Nested dicts wherever a mapping of columns is taken, and nested batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError

SCHEMA: Any = {
    "obs": {
        "image": gear.Column(torch.uint8, (2, 2), final=True),
        "body": {"speed": gear.Column(torch.float32, final=True)},
    },
    "reward": gear.Column(torch.float32),
    "task": {"id": gear.Column(torch.int64, per="trajectory")},
}
NAMES = ["obs.image", "obs.body.speed", "reward", "task.id"]


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with gear.Table.create(SCHEMA, max_steps=100, max_trajectories=10, block_steps=4) as table:
        assert list(table.schema) == NAMES
        yield table


def obs(steps: Any) -> dict[str, Any]:
    steps = np.asarray(steps)
    image = np.broadcast_to(steps[..., None, None], (*steps.shape, 2, 2)).astype(np.uint8)
    return {"image": image, "body": {"speed": np.asarray(steps, np.float32)}}


def episode(task: int) -> dict[str, Any]:
    return {"obs": obs(np.arange(5)), "reward": np.arange(5, dtype=np.float32), "task": {"id": task}}


def by_steps(table: gear.Table, task: int, *, together: bool) -> None:
    with table.writer() as writer:
        for step in range(5):
            each = {"obs": obs(step), "reward": np.float32(step)}
            if together:
                writer.append(each)
            else:
                writer.append(**each)
        writer.commit(final=final(), trajectory={"task": {"id": task}})


def by_rows(table: gear.Table, task: int) -> None:
    with table.writers(1) as writer:
        writer.trajectory = {"task.id": np.array([task])}
        for step in range(5):
            ends = np.array([step == 4])
            last = {"obs": obs(np.array([5]))} if step == 4 else None
            writer.append(
                obs=obs(np.array([step])), reward=np.array([step], np.float32), done=ends, final=last
            )


def final() -> dict[str, Any]:
    return {"obs": obs(5)}


WAYS: list[Callable[[gear.Table, int], Any]] = [
    lambda table, task: table.add(episode(task), final=final()),
    lambda table, task: by_steps(table, task, together=True),
    lambda table, task: by_steps(table, task, together=False),
    by_rows,
]


@pytest.mark.parametrize("way", WAYS)
def test_nested_values_are_stored(table: gear.Table, way: Callable[[gear.Table, int], Any]) -> None:
    way(table, 7)
    (index,) = table.indices().tolist()
    rows, last = table[index], table.final(index)
    assert list(rows) == NAMES
    assert rows["obs.image"][:, 1, 1].tolist() == rows["obs.body.speed"].tolist() == [0, 1, 2, 3, 4]
    assert rows["task.id"] == 7
    assert last is not None
    assert last["obs.body.speed"] == 5


def test_many_trajectories_at_once(table: gear.Table) -> None:
    table.extend([episode(1), episode(2)])
    stacked = {
        "obs": obs(np.arange(10).reshape(2, 5)),
        "reward": np.zeros((2, 5), np.float32),
        "task": {"id": np.array([3, 4])},
    }
    table.extend(stacked, lengths=[5, 3])
    assert [int(table[index]["task.id"]) for index in table.indices()] == [1, 2, 3, 4]
    assert table[int(table.indices()[3])]["obs.body.speed"].tolist() == [5, 6, 7]
    with gear.sources.load([episode(5)], per_trajectory=["task.id"], progress=False) as loaded:
        assert list(loaded.schema) == NAMES


def test_batches_are_nested(table: gear.Table) -> None:
    table.extend([episode(1), episode(2)])
    flat, nested = (
        gear.ReplayDataset(
            table,
            batch_size=6,
            windows=gear.Window(2),
            sampler=gear.Prioritized(),
            output=output,
            device="cpu",
        )
        for output in ("dict", "nested")
    )
    for one, other in ((flat.sample(), nested.sample()), (next(iter(flat)), next(iter(nested)))):
        assert isinstance(other, gear.Batch)
        assert torch.equal(one["obs.image"], other["obs"]["image"])
        assert torch.equal(one["obs.body.speed"], other["obs"]["body"]["speed"])
        assert torch.equal(one["task.id"], other["task"]["id"])
        assert torch.equal(one["index"], other["index"])
        nested.update_priority(other, torch.ones(6))
    with pytest.raises(
        SchemaError, match=r"With output='nested' the window 'obs\.image\.x' would be the entry"
    ):
        gear.ReplayDataset(
            table, batch_size=2, output="nested", device="cpu",
            windows={"obs.image": gear.Window(1), "obs.image.x": gear.Window(1, column="reward")},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": {"image": obs(np.arange(5))["image"]}}, r"missing: \['obs\.body\.speed'\]"),
        ({"obs": {**obs(np.arange(5)), "more": np.zeros(5)}}, r"unknown: \['obs\.more'\]"),
        ({"obs.image": obs(np.arange(5))["image"]}, r"would be the column 'obs\.image'"),
        ({"reward": {}}, r"missing: \['reward'\]"),
    ],
)
def test_other_nestings_are_refused(table: gear.Table, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        table.add({**episode(1), **change})
    assert len(table) == 0


def test_a_schema_that_is_no_nesting() -> None:
    column = gear.Column(torch.float32)
    for schema, message in (
        ({"a": {"b": column}, "a.b": column}, r"would be the column 'a\.b'"),
        ({"a": {}}, "A schema"),
    ):
        with pytest.raises(SchemaError, match=message):
            gear.Table.create(schema, max_steps=8, max_trajectories=2)  # type: ignore[arg-type]
