"""Steps that are visible at once: one trajectory that grows, for readers, selections, checkpoints and after a death."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested, nested_table

import gear_loader as gear

SCHEMA = {"x": gear.Column(torch.int64), "obs": gear.Column(torch.float32, (2,), final=True)}


def table(**options: Any) -> gear.Table:
    return gear.Table.create(
        SCHEMA, **nested_table({"max_steps": 300, "max_trajectories": 30, "block_steps": 4, **options})
    )


def step(number: int) -> dict[str, Any]:
    return {"x": number, "obs": np.full(2, number, np.float32)}


def steps(numbers: list[int]) -> dict[str, Any]:
    return {"x": np.array(numbers), "obs": np.repeat(np.array(numbers, np.float32)[:, None], 2, 1)}


def test_each_step_is_there_at_once() -> None:
    with table() as made, made.writer(commit_every_step=True) as writer:
        dataset = gear.ReplayDataset(
            made,
            batch_size=4,
            windows={"x": gear.Window(3, -2, "head")},
            sampler=gear.Lifo(unit="step"),
            device="cpu",
            prefetch=0,
        )
        index = None
        for number in range(11):
            (found,) = writer.append(step(number))
            assert index in (None, found)
            index = found
            assert made.num_steps == writer.num_steps == number + 1
            assert len(made) == 1
            assert made[index]["x"].tolist() == list(range(number + 1))
            newest = dataset.sample()["x"][0].tolist()
            assert newest == [max(0, number - 2 + i) if number - 2 + i >= 0 else 0 for i in range(3)]
            made.check_valid()
        assert writer.append(steps(list(range(11, 20)))) == (index,)
        assert writer.commit(final={"obs": np.full(2, 20, np.float32)}) == index
        assert made[index]["x"].tolist() == list(range(20))
        last = made.final(index)
        assert last is not None
        assert last["obs"].tolist() == [20, 20]
        made.check_valid()
        with pytest.raises(gear.errors.SchemaError, match="Nothing has been appended"):
            writer.commit()
        (other,) = writer.append(step(50))
        assert other != index
        with pytest.raises(gear.errors.SchemaError, match=r"writer\.priority before"):
            writer.commit(priority=1.0)
        with pytest.raises(gear.errors.SchemaError, match="'x' of the step"):
            writer.append(x=1.5, obs=np.zeros(2, np.float32))
        assert made[other]["x"].tolist() == [50]
        writer.discard()
        assert made[other]["x"].tolist() == [50]


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    "sampler",
    [gear.Uniform(unit="step"), gear.Uniform(), gear.Prioritized(1.0, unit="step"), gear.Prioritized(1.0)],
    ids=repr,
)
def test_selections_follow(sampler: Any, complete: bool) -> None:
    """What can be drawn, its priorities, and batches are those of a table to which whole trajectories were added."""
    generator = random.Random(5)
    options: dict[str, Any] = {"device": "cpu", "prefetch": 0, "complete": complete, "batch_size": 64}
    with table() as made:
        dataset = gear.ReplayDataset(
            made, **nested({"windows": gear.Window(2, -1), "sampler": sampler, **options})
        )
        by_priority, by_step = isinstance(sampler, gear.Prioritized), sampler.unit == "step"
        writers = [made.writer(commit_every_step=True) for _ in range(3)]
        given: dict[Any, float] = {}
        largest = 1.0
        for turn in range(60):
            writer = generator.choice(writers)
            if generator.random() < 0.15 and writer.num_steps:
                writer.commit()
            else:
                count = generator.choice([1, 1, 1, 5])
                writer.append(step(turn) if count == 1 else steps([turn] * count))
            anchors = {
                (slot, anchor)
                for slot, length in zip(made.indices().tolist(), made.lengths().tolist(), strict=True)
                for anchor in range(1 if complete else 0, length)
            }
            if not anchors:
                continue
            batch = dataset.sample()
            rows = list(zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True))
            assert set(rows) <= anchors
            if not by_priority:
                continue
            items = anchors if by_step else {slot for slot, _ in anchors}
            given = {item: given.get(item, largest) for item in items}
            tree = dataset._selected().priorities.leaves.tree  # type: ignore[attr-defined]
            assert tree.total == pytest.approx(sum(given.values()), rel=1e-5)
            values = np.random.default_rng(turn).uniform(1.0, 1.0 + turn / 50, len(rows)).astype(np.float32)
            dataset.update_priority(batch, values)
            for (slot, anchor), value in zip(rows, values.tolist(), strict=True):
                given[(slot, anchor) if by_step else slot] = value
            largest = max(largest, float(values.max()))  # the initial priority of what follows
        made.check_valid()


@pytest.mark.parametrize("seed", range(4))
def test_several_writers_readers_and_evictions(seed: int) -> None:
    """Against a twin in Python: full tables, compactions of the block tables, and trajectories evicted in growth."""
    generator = random.Random(seed)
    sizes: dict[str, Any] = {"max_steps": 60, "max_trajectories": 7, "block_steps": 2, "max_blocks": 30}
    with table(**sizes, on_full="evict_oldest") as made:
        writers = [made.writer(commit_every_step=True) for _ in range(3)]
        twin: dict[int, list[int]] = {}
        for turn in range(400):
            kind = generator.random()
            writer = generator.choice(writers)
            try:
                if kind < 0.8:
                    count = generator.choice([1, 1, 2, 3])
                    (index,) = writer.append(step(turn) if count == 1 else steps([turn] * count))
                    begun = writer.num_steps == count
                    twin[index] = ([] if begun else twin[index]) + [turn] * count
                elif kind < 0.9 and writer.num_steps:
                    writer.commit(final=None if turn % 2 else {"obs": np.zeros(2, np.float32)})
                else:
                    twin[made.add(steps([turn] * generator.randint(1, 4)))] = [turn] * 0
                    newest = int(made.indices()[-1])
                    twin[newest] = made[newest]["x"].tolist()
            except gear.errors.TableFullError:
                pytest.fail("nothing that is being written fills the table")
            live = made.indices().tolist()
            twin = {index: values for index, values in twin.items() if index in live}
            assert {index: made[index]["x"].tolist() for index in live} == twin
            if turn % 10 == 0:
                made.check_valid()
        assert made.stats().num_evicted > 20


def test_a_checkpoint_has_what_has_grown_since_the_last_one(tmp_path: Path) -> None:
    with table() as made, made.writer(commit_every_step=True) as writer:
        made.add(steps([7, 8, 9]))
        for number in range(9):
            writer.append(step(number))
            if number in (2, 5, 8):
                made.save(tmp_path)
                with gear.Table.load(tmp_path) as loaded:
                    loaded.check_valid()
                    assert [loaded[int(i)]["x"].tolist() for i in loaded.indices()] == [
                        [7, 8, 9],
                        list(range(number + 1)),
                    ]
