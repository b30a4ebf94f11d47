"""Complete windows: which anchors are drawn, and how often, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from options_common import nested

import gear_loader as gear

LENGTHS = (1, 2, 5, 3, 9, 4, 12, 2)
FINAL = (2, 3, 6, 7)  # trajectories with a final step
SCHEMA = {"obs": gear.Column(torch.int64, final=True), "action": gear.Column(torch.int64)}
WINDOWS = [
    {"obs": gear.Window(1), "next": gear.Window(1, 1, column="obs"), "action": gear.Window(1)},
    {"obs": gear.Window(3, -2), "action": gear.Window(2)},
    {"action": gear.Window(4, -1)},
    {"obs": gear.Window(5, 1)},
    {"action": gear.Window(1, -3)},
]


def filled(**options: Any) -> gear.Table:
    table = gear.Table.create(SCHEMA, max_steps=100, max_trajectories=16, block_steps=4, **options)
    for number, length in enumerate(LENGTHS):
        add(table, number, length)
    return table


def add(table: gear.Table, number: int, length: int) -> int:
    steps = torch.arange(length) + 100 * number
    last = {"obs": 100 * number + length} if number in FINAL else None
    return table.add({"obs": steps, "action": steps}, final=last)


def complete_anchors(table: gear.Table, windows: dict[str, gear.Window]) -> set[tuple[int, int]]:
    """By definition: (slot, step) at which each window lies inside what the trajectory has of its column."""
    found = set()
    for slot, length in zip(table.indices().tolist(), table.lengths().tolist(), strict=True):
        more = table.final(slot) is not None
        for anchor in range(length):
            inside = [
                anchor + window.offset >= 0
                and anchor + window.offset + window.length
                <= length + (more and SCHEMA[window.column or name].final)
                for name, window in windows.items()
            ]
            if all(inside):
                found.add((slot, anchor))
    return found


def dataset(table: gear.Table, windows: Any, sampler: Any, **options: Any) -> gear.ReplayDataset:
    defaults: dict[str, Any] = {"batch_size": 8, "device": "cpu", "prefetch": 0, "complete": True, "seed": 3}
    return gear.ReplayDataset(
        table, **nested({"windows": windows, "sampler": sampler, **defaults, **options})
    )


def rows_of(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True))


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("case", range(len(WINDOWS)))
def test_a_pass_has_each_item_once(unit: Any, case: int) -> None:
    """Also of what was added and removed since the dataset was made; `test_distributions` has the other samplers."""
    with filled() as table:
        replay = dataset(table, WINDOWS[case], gear.Uniform(replacement=False, unit=unit), batch_size=5)
        for turn in range(2):
            allowed = complete_anchors(table, WINDOWS[case])
            slots, stats = {slot for slot, _ in allowed}, replay.stats()
            assert (stats["anchors"], stats["trajectories"]) == (len(allowed), len(slots))
            assert stats["too_short"] == len(table) - len(slots)
            rows = [row for batch in replay for row in rows_of(batch)]
            if unit == "step":
                assert sorted(rows) == sorted(allowed)
                assert len(replay) == -(-len(allowed) // 5)
            else:
                assert sorted(slot for slot, _ in rows) == sorted(slots)
                assert set(rows) <= allowed
            if turn == 0:
                table.remove(int(table.indices()[2]))
                add(table, 1, 7)
                add(table, 1, 1)


def test_windows_that_may_begin_before_the_trajectory() -> None:
    windows = {"stack": gear.Window(3, -2, pad="edge", column="action"), "obs": gear.Window(2)}
    with filled() as table:
        replay = dataset(table, windows, gear.Fifo(unit="step"), complete="end", batch_size=100)
        ends = complete_anchors(table, {"obs": windows["obs"]})
        assert set(rows_of(replay.sample())) == ends > complete_anchors(table, windows)


def test_chunks_that_share_steps() -> None:
    """A shared step belongs to the chunk added last; while and after that chunk lives, windows are complete."""
    windows = {"action": gear.Window(3, -2)}
    with gear.Table.create(SCHEMA, max_steps=100, max_trajectories=16, block_steps=4) as table:
        with table.writer(chunk_steps=8, overlap_steps=4) as writer:
            steps = torch.arange(22)
            writer.append(obs=steps, action=steps)
        for sampler in (gear.Prioritized(unit="step"), gear.TopK(unit="step"), gear.Uniform(unit="step")):
            replay = dataset(table, windows, sampler, batch_size=64)
            for _ in range(4):
                assert set(rows_of(batch := replay.sample())) <= complete_anchors(table, windows)
                assert all(mask.all() for mask in batch["mask"].values())
                if len(table) > 1:
                    table.remove(int(table.indices()[-1]))


def test_errors() -> None:
    with filled() as table:
        state = dataset(table, WINDOWS[1], gear.Prioritized(unit="step")).state_dict()
        with pytest.raises(gear.errors.SchemaError, match="complete"):
            dataset(table, WINDOWS[1], gear.Prioritized(unit="step"), complete=False).load_state_dict(state)
        for sampler in (gear.Uniform(), gear.Prioritized(), gear.Fifo()):
            with pytest.raises(gear.errors.TableEmptyError, match="long enough for the windows"):
                dataset(table, gear.Window(50), sampler).sample()
        with pytest.raises(gear.errors.SchemaError, match="complete is 1"):
            dataset(table, WINDOWS[1], None, complete=1)
