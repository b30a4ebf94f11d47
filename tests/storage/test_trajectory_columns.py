"""Columns per trajectory: what a trajectory has once, through every way in and every way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError

SCHEMA = {
    "goal": gear.Column(torch.float32, (3,), per="trajectory"),
    "obs": gear.Column(torch.float32, (2,), final=True),
    "score": gear.Column(torch.float64, per="trajectory", cast=True),
    "number": gear.Column(torch.int64),
}
LENGTHS = (1, 4, 5, 17, 8, 3)


def once(number: int) -> dict[str, Any]:
    return {"goal": np.full(3, number, np.float32), "score": 1.5 * number}


def steps(number: int, length: int) -> dict[str, Any]:
    return {"obs": np.full((length, 2), number, np.float32), "number": np.full(length, number)}


def episode(number: int, length: int) -> dict[str, Any]:
    return {**once(number), **steps(number, length)}


def made(**options: Any) -> gear.Table:
    return gear.Table.create(
        SCHEMA, **{"max_steps": 400, "max_trajectories": 40, "block_steps": 4, **options}
    )


def check(table: gear.Table, numbers: list[int]) -> None:
    table.check_valid()
    for index, number in zip(table.indices().tolist(), numbers, strict=True):
        found = table[index]
        assert found["number"].unique().tolist() == [number]
        assert (found["goal"].tolist(), found["score"].item()) == ([number] * 3, 1.5 * number)


def by_add(table: gear.Table) -> None:
    for number, length in enumerate(LENGTHS):
        last = {"obs": np.zeros(2, np.float32)} if number % 2 else None
        table.add(episode(number, length), final=last)


def by_list(table: gear.Table) -> None:
    table.extend([episode(number, length) for number, length in enumerate(LENGTHS)])


def by_iterator(table: gear.Table) -> None:
    goal = np.zeros(3, np.float32)  # one array for all

    def each() -> Any:
        for number, length in enumerate(LENGTHS):
            goal[:] = number
            yield {**episode(number, length), "goal": goal}

    table.extend(each())


def by_stack(table: gear.Table, contiguous: bool = True) -> None:
    numbers = np.arange(len(LENGTHS))
    goals = np.repeat(numbers[:, None], 3, axis=1).astype(np.float32)
    columns = {
        "goal": goals if contiguous else np.asfortranarray(goals),
        "obs": np.zeros((len(LENGTHS), 17, 2), np.float32),
        "score": 1.5 * numbers,
        "number": np.repeat(numbers[:, None], 17, axis=1),
    }
    table.extend(columns, lengths=LENGTHS)


WAYS = {
    "add": by_add,
    "list": by_list,
    "iterator": by_iterator,
    "stack": by_stack,
    "any stack": lambda table: by_stack(table, False),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in(way: str) -> None:
    """Writers are in `test_sinks`."""
    with made() as table:
        for _ in range(2):  # in fresh blocks, and in some that were used before
            WAYS[way](table)
            check(table, list(range(len(LENGTHS))))
            table.clear()


def test_chunks_that_share_blocks_have_values_of_their_own() -> None:
    with made() as table, table.writer(chunk_steps=12, overlap_steps=4) as writer:
        for step in range(30):
            writer.trajectory = once(step)
            writer.append({name: value[0] for name, value in steps(step, 1).items()})
        writer.commit(trajectory=once(99))
        assert [int(table[index]["goal"][0]) for index in table.indices().tolist()] == [11, 19, 27, 99]
        assert table.stats().blocks_in_use == 8


def test_checkpoints_have_a_row_for_each_trajectory(tmp_path: Path) -> None:
    with made() as table:
        by_add(table)
        table.save(tmp_path)
        table.remove(table.indices()[[0, 2]])
        table.add(episode(6, 9))
        table.save(tmp_path)  # the first segment is used on, with two trajectories fewer
        segment = tmp_path / "segments" / "000001"
        shapes = sorted(np.load(file).shape for file in segment.glob("*.npy"))
        assert shapes == [(6,), (6, 3), (41,), (41, 2)]
        with gear.Table.load(tmp_path, block_steps=8) as loaded:
            check(loaded, [1, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"goal": np.zeros((3, 3), np.float32)},
            r"'goal' of .*trajectory.* is of shape \[3, 3\]; expected one",
        ),
        ({"goal": np.zeros(3)}, r"'goal' of .*trajectory.* has dtype float64; expected torch.float32"),
        ({"goal": 1.0}, "'goal' of .*trajectory.* is a float; expected one value of shape"),
        ({"score": None}, "'score' of .*trajectory.* is a NoneType; expected one value"),
    ],
)
def test_values_that_do_not_fit_change_nothing(change: dict[str, Any], message: str) -> None:
    with made() as table:
        with pytest.raises(SchemaError, match=message):
            table.add({**episode(1, 3), **change})
        with pytest.raises(SchemaError, match=message):
            table.extend([episode(1, 2), {**episode(2, 3), **change}])
        writer = table.writer()
        writer.append(steps(1, 3))
        with pytest.raises(SchemaError, match=message):
            writer.commit(trajectory={**once(1), **change})
        for missing in ({}, {"goal": np.zeros(3, np.float32)}, None):
            with pytest.raises(SchemaError, match=r"all with per='trajectory' and no other"):
                writer.commit(trajectory=missing)
        with pytest.raises(SchemaError, match=r"goal': \(6, 2\)|shape \[6, 2\]; expected \[6, 3\]"):
            table.extend(
                {**episode(1, 3), "goal": np.zeros((6, 2), np.float32), "score": np.zeros(6)}
                | {name: np.repeat(value[None], 6, axis=0) for name, value in steps(1, 3).items()},
                lengths=[3] * 6,
            )
        assert len(table) == 0
        writer.commit(trajectory=once(1))
        check(table, [1])


def test_writers_without_them_append_nothing() -> None:
    with made() as table:
        rows = {"obs": np.zeros((2, 2), np.float32), "number": np.zeros(2, np.int64)}
        writers = table.writers(2)
        wrong: Any
        for wrong, message in (
            (None, "The attribute trajectory is None"),
            ({"goal": np.zeros((2, 3), np.float32)}, "missing: \\['score'\\]"),
            (
                {"goal": np.zeros((3, 3), np.float32), "score": np.zeros(3)},
                "has 3 rows; expected one for each of 2",
            ),
        ):
            writers.trajectory = wrong
            with pytest.raises(SchemaError, match=message):
                writers.append(rows, done=[True, True])
        assert writers.num_steps.tolist() == [0, 0]
        one = table.writer(commit_every_step=True)
        with pytest.raises(SchemaError, match="trajectory is None; expected the columns"):
            one.append(steps(1, 1))
        one.trajectory = once(1)
        one.append(steps(1, 1))
        with pytest.raises(SchemaError, match=r"set writer\.trajectory before"):
            one.commit(trajectory=once(2))
        check(table, [1])
    with gear.Table.create({"x": gear.Column(torch.bool)}, max_steps=4, max_trajectories=2) as plain:
        plain_writer = plain.writer()
        plain_writer.append(x=True)
        with pytest.raises(SchemaError, match=r"trajectory has \['y'\]; expected the columns \[\]"):
            plain_writer.commit(trajectory={"y": 1})


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ({"goal": None}, "Only columns per trajectory were asked for"),
        ({"obs": None}, "this one has steps, so give it"),
        ({"obs": gear.Window(2), "goal": gear.Window(2)}, "has one value per trajectory; expected None"),
        (
            {"r": gear.NStep(column="score", n=2, gamma=0.9, done="score"), "obs": gear.Window(1)},
            "does not exist",
        ),
    ],
)
def test_windows_that_make_no_sense(windows: Any, message: str) -> None:
    with made() as table, pytest.raises(SchemaError, match=message):
        gear.ReplayDataset(table, batch_size=2, windows=windows)


def test_columns_that_make_no_sense() -> None:
    with pytest.raises(SchemaError, match="per is 'episode'; expected 'step', 'trajectory' or 'group'"):
        gear.Column(torch.bool, per="episode")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="expected one of them"):
        gear.Column(torch.bool, per="trajectory", final=True)
    with pytest.raises(
        SchemaError, match=r"expected at least one with a value for each step\. Leave per= out"
    ):
        gear.Table.create({"x": gear.Column(torch.bool, per="trajectory")}, max_steps=1, max_trajectories=1)
