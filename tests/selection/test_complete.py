"""Complete windows: which anchors are drawn, and how often, against the definition."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np
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
SELECTORS = {
    "uniform steps": gear.Uniform(unit="step"),
    "uniform trajectories": gear.Uniform(),
    "steps once": gear.Uniform(replacement=False, unit="step"),
    "trajectories once": gear.Uniform(replacement=False),
    "oldest steps": gear.Fifo(replacement=False, unit="step"),
    "newest trajectories": gear.Lifo(),
    "prioritized steps": gear.Prioritized(unit="step"),
    "prioritized trajectories": gear.Prioritized(normalize="table"),
    "distinct": gear.Prioritized(unit="step", replacement=False),
    "top": gear.TopK(unit="step"),
}


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


def dataset(table: gear.Table, windows: Any, selector: Any, **options: Any) -> gear.ReplayDataset:
    defaults: dict[str, Any] = {"batch_size": 8, "device": "cpu", "prefetch": 0, "complete": True, "seed": 3}
    return gear.ReplayDataset(
        table, **nested({"windows": windows, "selector": selector, **defaults, **options})
    )


def rows_of(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True))


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("case", range(len(WINDOWS)))
def test_only_complete_windows_are_drawn(name: str, case: int) -> None:
    windows, selector = WINDOWS[case], SELECTORS[name]
    with filled() as table:
        allowed = complete_anchors(table, windows)
        replay = dataset(table, windows, selector)
        stats = replay.stats()
        slots = {slot for slot, _ in allowed}
        assert stats["anchors"] == len(allowed)
        assert stats["trajectories"] == len(slots)
        assert stats["too_short"] == len(LENGTHS) - len(slots)
        draws = 60 if selector.replacement else 1
        for turn in range(draws):
            batch = replay.sample()
            rows = rows_of(batch)
            assert set(rows) <= allowed
            masks = batch["mask"] if isinstance(batch["mask"], dict) else {"": batch["mask"]}
            assert all(mask.all() for mask in masks.values())
            if "once" not in name and "oldest" not in name:
                assert len(rows) == 8
            if turn == 20:  # what is added and removed meanwhile
                table.remove(int(table.indices()[2]))
                add(table, 1, 7)
                add(table, 1, 1)
                allowed = complete_anchors(table, windows)


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("case", range(len(WINDOWS)))
def test_a_pass_has_each_item_once(unit: Any, case: int) -> None:
    with filled() as table:
        allowed = complete_anchors(table, WINDOWS[case])
        replay = dataset(table, WINDOWS[case], gear.Uniform(replacement=False, unit=unit), batch_size=5)
        rows = [row for batch in replay for row in rows_of(batch)]
        if unit == "step":
            assert sorted(rows) == sorted(allowed)
            assert len(replay) == -(-len(allowed) // 5)
        else:
            assert sorted(slot for slot, _ in rows) == sorted({slot for slot, _ in allowed})
            assert set(rows) <= allowed


@pytest.mark.parametrize("by", ["uniform", "prioritized"])
@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_frequencies(by: str, unit: Any) -> None:
    """Uniform over all such anchors, or in proportion to their priorities; weights are relative to these."""
    windows = WINDOWS[1]
    with filled() as table:
        allowed = sorted(complete_anchors(table, windows))
        selector = gear.Uniform(unit=unit)
        if by == "prioritized":
            selector = gear.Prioritized(alpha=1.0, beta=1.0, unit=unit, normalize="table")
        replay = dataset(table, windows, selector, batch_size=500)
        items = allowed if unit == "step" else sorted({slot for slot, _ in allowed})
        priorities = dict.fromkeys(items, 1.0)
        if by == "prioritized":
            everything = list(itertools.product(table.indices().tolist(), range(12)))
            slots, steps = (np.array(part) for part in zip(*everything, strict=True))
            values = np.random.default_rng(0).uniform(0.5, 3, len(slots))
            anchor = {"anchor": steps} if unit == "step" else {}
            replay.update_priority(slots, values, **anchor)  # also of anchors that are never drawn: stale
            for (slot, step), value in zip(everything, np.float32(values).tolist(), strict=True):
                item = (slot, step) if unit == "step" else slot
                if item in priorities:
                    priorities[item] = value
        counts: collections.Counter[Any] = collections.Counter()
        for _ in range(40):
            batch = replay.sample()
            drawn = rows_of(batch)
            counts.update(drawn if unit == "step" else [slot for slot, _ in drawn])
            if by == "prioritized":
                keys = drawn if unit == "step" else [slot for slot, _ in drawn]
                least = min(priorities.values())
                expected = torch.tensor([least / priorities[key] for key in keys])
                torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-4, atol=1e-6)
        total = sum(priorities.values())
        for item in items:
            share = priorities[item] / total
            error = 5 * np.sqrt(share * (1 - share) / 20_000)
            assert abs(counts[item] / 20_000 - share) < error, item
        assert set(counts) <= set(items)


def test_chunks_that_share_steps() -> None:
    """A shared step belongs to the chunk added last; while and after that chunk lives, windows are complete."""
    windows = {"action": gear.Window(3, -2)}
    with gear.Table.create(SCHEMA, max_steps=100, max_trajectories=16, block_steps=4) as table:
        with table.writer(chunk_steps=8, overlap_steps=4) as writer:
            steps = torch.arange(22)
            writer.append(obs=steps, action=steps)
        for selector in (gear.Prioritized(unit="step"), gear.TopK(unit="step"), gear.Uniform(unit="step")):
            replay = dataset(table, windows, selector, batch_size=64)
            for _ in range(4):
                assert set(rows_of(batch := replay.sample())) <= complete_anchors(table, windows)
                assert all(mask.all() for mask in batch["mask"].values())
                if len(table) > 1:
                    table.remove(int(table.indices()[-1]))


def test_state_and_errors() -> None:
    with filled() as table:
        for name in ("prioritized steps", "prioritized trajectories", "steps once"):
            replay = dataset(table, WINDOWS[1], SELECTORS[name], batches_per_epoch=6)
            batches = iter(replay)
            for _ in range(2):
                next(batches)
            again = dataset(table, WINDOWS[1], SELECTORS[name], batches_per_epoch=6)
            again.load_state_dict(replay.state_dict())
            for expected, found in zip(batches, again, strict=True):
                assert rows_of(expected) == rows_of(found)
            incomplete = dataset(table, WINDOWS[1], SELECTORS[name], batches_per_epoch=6, complete=False)
            with pytest.raises(gear.errors.SchemaError, match="complete"):
                incomplete.load_state_dict(replay.state_dict())
        for selector in (gear.Uniform(), gear.Prioritized(), gear.Fifo()):
            with pytest.raises(gear.errors.TableEmptyError, match="long enough for the windows"):
                dataset(table, gear.Window(50), selector).sample()
        with pytest.raises(gear.errors.SchemaError, match="complete is 1"):
            dataset(table, WINDOWS[1], None, complete=1)


def test_over_shards_of_one_process() -> None:
    with filled() as one, filled() as two, gear.distributed.Shards([one, two]) as shards:
        two.remove(int(two.indices()[3]))
        allowed = {
            (shard, *row)
            for shard, table in enumerate((one, two))
            for row in complete_anchors(table, WINDOWS[1])
        }
        for name in ("uniform steps", "steps once", "prioritized steps", "prioritized trajectories", "top"):
            replay = dataset(
                shards, WINDOWS[1], SELECTORS[name], batches_per_epoch=None if "once" in name else 4
            )
            rows = []
            for batch in replay:
                assert all(mask.all() for mask in batch["mask"].values())
                rows += zip(batch["shard"].tolist(), *zip(*rows_of(batch), strict=True), strict=True)
            assert set(rows) <= allowed
            assert sorted(rows) == sorted(allowed) if "once" in name else len(rows) == 32
            stats = replay.stats()
            assert (stats["anchors"], stats["trajectories"] + stats["too_short"]) == (
                len(allowed),
                2 * len(LENGTHS) - 1,
            )
