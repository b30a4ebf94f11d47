"""Final steps, the observation after the last action, in a table. How windows read them: `tests/oracle.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested_table

import gear_loader as gear

SCHEMA = {
    "obs": gear.Column(torch.float32, (2,), final=True),
    "action": gear.Column(torch.int64),
    "done": gear.Column(torch.bool),
}
BLOCK = 4


def episode(length: int, first: int = 0) -> dict[str, Any]:
    steps = np.arange(first, first + length)
    return {"obs": np.stack((steps, -steps), 1).astype(np.float32), "action": steps, "done": steps < 0}


def final(value: float) -> dict[str, Any]:
    return {"obs": np.array([value, -value], dtype=np.float32)}


def table(**options: Any) -> gear.Table:
    sizes = {"max_steps": 200, "max_trajectories": 20, "block_steps": BLOCK, **options}
    return gear.Table.create(SCHEMA, **nested_table(sizes))


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("writer", [False, True])
def test_a_final_step_is_stored_and_no_step(length: int, writer: bool) -> None:
    with table() as made:
        for turn in range(2):  # in fresh memory, and in memory that was used before
            if writer:
                with made.writer() as open_writer:
                    for step in range(length):
                        open_writer.append({name: value[step] for name, value in episode(length).items()})
                    index = open_writer.commit(final=final(99))
            else:
                index = made.add(episode(length), final=final(99), priority=2.0)
            other = made.add(episode(length, 50))
            made.check_valid()
            assert made.num_steps == 2 * length
            assert made.lengths().tolist() == [length, length]
            assert torch.equal(made[index]["obs"], torch.from_numpy(episode(length)["obs"]))
            last = made.final(index)
            assert last is not None
            assert list(last) == ["obs"]
            assert last["obs"].tolist() == [99, -99]
            assert made.final(other) is None
            rows = made._engine.rows(index, final=True)
            assert rows is not None
            assert rows["action"].tolist() == [*range(length), 0]  # zeros, not what was in memory
            made.clear()
            made.check_valid()
            assert made.num_steps == 0, turn


def test_chunks_get_it_at_the_end_of_the_stream() -> None:
    with table() as made, made.writer(chunk_steps=4, overlap_steps=1) as writer:
        rows = episode(7)
        writer.append(rows)
        index = writer.commit(final=final(70))
        assert made.lengths().tolist() == [4, 4, 1]  # 0 to 3, 3 to 6, and 6 again with what follows it
        assert made[index]["action"].tolist() == [6]
        found = made.final(index)
        assert found is not None
        assert found["obs"][0] == 70
        made.check_valid()
    with table() as made, made.writer(chunk_steps=4) as writer:
        writer.append(episode(4))
        with pytest.raises(gear.errors.SchemaError, match="overlap_steps"):
            writer.commit(final=final(70))
        writer.commit()


def test_it_survives_a_checkpoint_and_a_second_one(tmp_path: Path) -> None:
    with table() as made:
        for length in (4, 3, 8):
            made.add(episode(length), final=final(length))
        made.add(episode(2))
        made.save(tmp_path)
        made.add(episode(5), final=final(5))
        made.save(tmp_path)
        with gear.Table.load(tmp_path) as loaded:
            loaded.check_valid()
            finals = [loaded.final(int(index)) for index in loaded.indices()]
            assert [None if each is None else int(each["obs"][0]) for each in finals] == [4, 3, 8, None, 5]
            for old, new in zip(made.indices().tolist(), loaded.indices().tolist(), strict=True):
                assert all(torch.equal(value, loaded[new][name]) for name, value in made[old].items())


def test_a_full_table_evicts_for_its_blocks() -> None:
    with table(max_steps=16, max_trajectories=4, max_blocks=4, on_full="evict_oldest") as made:
        for number in range(20):
            made.add(episode(BLOCK, number), final=final(number))  # two blocks each
            made.check_valid()
        assert len(made) == 2
        found = made.final(int(made.indices()[-1]))
        assert found is not None
        assert found["obs"][0] == 19


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"final has \[\]; expected the columns \['obs'\]"),
        ({"obs": np.zeros(2, np.float32), "action": 1}, r"final has \['action', 'obs'\]"),
        (
            {"obs": np.zeros(3, np.float32)},
            r"'obs' of final is of shape \[3\]; expected one value of shape \[2\]",
        ),
        ({"obs": np.zeros(2, np.float64)}, "'obs' of final has dtype float64"),
        ({"obs": None}, "'obs' of final is a NoneType"),
        (3, "final is 3"),
    ],
)
def test_what_does_not_fit_changes_nothing(given: Any, message: str) -> None:
    with table() as made, made.writer() as writer:
        with pytest.raises(gear.errors.SchemaError, match=message):
            made.add(episode(3), final=given)
        writer.append(episode(3))
        with pytest.raises(gear.errors.SchemaError, match=message):
            writer.commit(final=given)
        assert len(made) == 0
        index = writer.commit(final=final(3))
        assert made.final(index) is not None
    plain = gear.Table.create(
        {"obs": gear.Column(torch.float32, (2,))}, max_steps=10, max_trajectories=2, block_steps=2
    )
    with (
        plain,
        pytest.raises(gear.errors.SchemaError, match=r"expected the columns \[\]: .*Column\(final=True\)"),
    ):
        plain.add({"obs": np.zeros((2, 2), np.float32)}, final=final(1))
