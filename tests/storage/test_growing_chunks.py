"""Chunks whose newest steps are visible at once, against lists of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gear_loader as gear
from gear_loader.errors import SchemaError, TableFullError

SCHEMA = {
    "x": gear.Column(torch.int64),
    "state": gear.Column(torch.float32, (3,)),
    "obs": gear.Column(torch.float32, (2,), final=True),
    "env": gear.Column(torch.int32, per="trajectory"),
}


def columns(numbers: Any) -> dict[str, Any]:
    numbers = np.asarray(numbers)
    return {
        "x": numbers.astype(np.int64),
        "state": np.repeat(numbers[..., None], 3, -1).astype(np.float32),
        "obs": np.repeat(numbers[..., None], 2, -1).astype(np.float32),
    }


def there(table: gear.Table) -> list[list[int]]:
    """The steps of all trajectories, oldest first; -1000 - x for a final step."""
    found = []
    for slot in table.indices().tolist():
        rows = table[slot]
        steps = rows["x"].tolist()
        assert (rows["env"] == steps[0] // 10_000).all()
        assert torch.equal(rows["state"], torch.tensor(steps)[:, None].expand(-1, 3).float())
        assert torch.equal(rows["obs"], torch.tensor(steps)[:, None].expand(-1, 2).float())
        last = table.final(slot)
        found.append(steps + ([] if last is None else [-1000 - int(last["obs"][0])]))
    return found


@given(data=st.data())
def test_each_step_of_a_chunk_is_there_at_once(data: Any) -> None:
    chunk = data.draw(st.integers(1, 7), "chunk")
    overlap = data.draw(st.integers(0, chunk - 1), "overlap")
    n = data.draw(st.integers(1, 3), "environments")
    block_steps = data.draw(st.integers(1, 5), "block_steps")
    with gear.Table.create(SCHEMA, max_steps=2_000, max_trajectories=400, block_steps=block_steps) as table:
        writer = table.writers(n, chunk_steps=chunk, overlap_steps=overlap, commit_every_step=True)
        writer.trajectory = {"env": np.arange(n, dtype=np.int32)}
        chunks: list[list[int]] = []
        open_: list[list[int] | None] = [None] * n
        for turn in range(data.draw(st.integers(1, 30), "turns")):
            active = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n), "active"))
            done = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n), "done")) & (
                turn % 4 == 3
            )
            last = turn % 8 == 7
            numbers = 10_000 * np.arange(n) + turn
            begun: list[list[int]] = []
            whole = np.zeros(n, bool)
            for lane in np.flatnonzero(active):
                current = open_[lane]
                if current is None or len(current) == chunk:
                    current = ([] if current is None else current[chunk - overlap :]) + [int(numbers[lane])]
                    # Those without common steps begin together, then the others one by one.
                    begun.append(current)
                    open_[lane] = current
                else:
                    current.append(int(numbers[lane]))
                whole[lane] = len(current) == chunk
            chunks += sorted(begun, key=lambda each: len(each) > 1)
            out = writer.append(
                columns(numbers),
                done=done,
                active=active,
                final={"obs": np.repeat(numbers[:, None], 2, 1).astype(np.float32)} if last else None,
            )
            assert ((out >= 0) == (active & (done | whole))).all()
            for lane in np.flatnonzero(active & done):
                current = open_[lane]
                assert current is not None
                assert table[int(out[lane])]["x"].tolist() == current
                if last:
                    current.append(-1000 - current[-1])
                open_[lane] = None
            assert there(table) == chunks
        table.check_valid()


def test_a_writer_of_one_environment() -> None:
    with gear.Table.create(SCHEMA, max_steps=200, max_trajectories=40, block_steps=4) as table:
        writer = table.writer(chunk_steps=6, overlap_steps=2, commit_every_step=True)
        writer.trajectory = {"env": 0}
        assert len(writer.append(columns(np.arange(5)))) == 1
        assert len(writer.append(columns(np.arange(5, 12)))) == 3
        assert there(table) == [[*range(6)], [*range(4, 10)], [8, 9, 10, 11]]
        assert writer.num_committed == 3
        writer.append(columns(12))
        writer.append(columns(13))
        assert writer.num_steps == 6
        slot = writer.commit(final={"obs": np.full(2, 14, np.float32)})
        assert table[slot]["x"].tolist() == [8, 9, 10, 11, 12, 13]
        last = table.final(slot)
        assert last is not None
        assert last["obs"].tolist() == [14, 14]
        with pytest.raises(SchemaError, match="Nothing has been appended"):
            writer.commit()
        table.check_valid()


def test_the_newest_steps_are_drawn_and_next_ones_too() -> None:
    with gear.Table.create(SCHEMA, max_steps=2_000, max_trajectories=200, block_steps=4) as table:
        writer = table.writers(2, chunk_steps=5, commit_every_step=True)
        writer.trajectory = {"env": np.arange(2, dtype=np.int32)}
        replay = gear.ReplayDataset(
            table,
            windows=gear.Window(1),
            sampler=gear.Lifo(unit="step"),
            batch_size=2,
            device="cpu",
            prefetch=0,
        )
        for turn in range(23):
            numbers = np.array([turn, 10_000 + turn])
            writer.append(columns(numbers), next={"obs": columns(numbers + 1)["obs"]})
            assert turn in replay.sample()["x"] % 10_000
        assert sorted(map(len, there(table))) == [4, 4, 6, 6, 6, 6, 6, 6, 6, 6]  # with what follows
        other = table.writers(2, chunk_steps=5, overlap_steps=1, commit_every_step=True)
        other.trajectory = writer.trajectory
        with pytest.raises(SchemaError, match="without overlap_steps"):
            other.append(columns(np.arange(2)), next={"obs": columns(np.arange(2))["obs"]})


def test_a_chunk_that_finds_no_room_begins_later() -> None:
    """The step is not appended; the call is repeated when there is room."""
    sizes: dict[str, Any] = {"max_steps": 40, "max_trajectories": 10, "block_steps": 4}
    with gear.Table.create(SCHEMA, **sizes, on_full="error") as table:
        writer = table.writers(2, chunk_steps=6, overlap_steps=2, commit_every_step=True)
        writer.trajectory = {"env": np.arange(2, dtype=np.int32)}
        for turn in range(6):
            writer.append(columns(np.array([turn, 10_000 + turn])))
        taken = table.add({**columns(np.arange(23)), "env": 0})
        numbers = columns(np.array([6, 10_006]))
        with pytest.raises(TableFullError):
            writer.append(numbers)
        active = ~writer.appended
        table.remove(taken)
        writer.append(numbers, active=active)
        assert sorted(map(len, there(table))) == [3, 3, 6, 6]
        # A chunk that was removed has no steps that the next one could begin with.
        for turn in range(7, 10):
            writer.append(columns(np.array([turn, 10_000 + turn])))
        table.clear()
        writer.append(columns(np.array([10, 10_010])))
        assert sorted(there(table)) == [[10], [10_010]]
        table.check_valid()


def test_common_steps_of_a_chunk_on_disk(tmp_path: Path) -> None:
    disk = gear.Disk(tmp_path, sync_seconds=0.01, size="1GiB", keep="newest")
    sizes: dict[str, Any] = {"max_steps": 400, "max_trajectories": 40, "block_steps": 4}
    with gear.Table.create(SCHEMA, **sizes, memory=gear.Memory(max_blocks=12), disk=disk) as table:
        writer = table.writer(chunk_steps=6, overlap_steps=2, commit_every_step=True)
        writer.trajectory = {"env": 0}
        writer.append(columns(np.arange(6)))
        for number in range(10):
            table.add({**columns(np.arange(20) + 100 * number), "env": 0})
        assert table.stats().num_spilled > 0
        writer.append(columns(6))
        assert table[int(table.indices()[-1])]["x"].tolist() == [4, 5, 6]
        table.check_valid()
