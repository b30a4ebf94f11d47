"""``layout="tree"``: steps that several rows begin with lie in a batch once, as tree attention takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tree_common import COLUMNS, check_groups, expanded, grouped, rows

import gear_loader as gear
from gear_loader.errors import SchemaError


def table_of(**options: Any) -> gear.Table:
    sizes = {"max_steps": 5000, "max_trajectories": 100, "block_steps": 4}
    return gear.Table.create(COLUMNS, memory=gear.Memory(prefixes=True), **{**sizes, **options})


def fill(table: gear.Table, groups: int, size: int, random: np.random.Generator) -> None:
    """Groups of answers to one prompt, of several turns, some without the first answer; and others."""
    for group in range(groups):
        prompt = int(random.integers(1, 30))
        first = table.add(rows(group, prompt + int(random.integers(0, 9)) + 1))
        others = [rows(50 + group, int(random.integers(1, 20))) for _ in range(size - 1)]
        slots = table.extend(others, prefix=first, prefix_steps=prompt)
        table.add(rows(99, 3), prefix=int(slots[0]))
        if group % 3 == 2:
            table.remove(first)
        table.add(rows(200 + group, 5))


@pytest.mark.parametrize(
    "windows", [gear.Whole(), gear.Window(12), {"token": gear.Whole(dtype=torch.float32)}], ids=repr
)
@pytest.mark.parametrize("seed", range(2))
def test_they_are_packed_batches_when_expanded(windows: Any, seed: int) -> None:
    random, fewer = np.random.default_rng(seed), 0
    with table_of() as table:
        fill(table, 6, 5, random)
        options: Any = {"windows": windows, "batch_size": 16, "device": "cpu", "seed": seed}
        options |= {"draws": gear.Draws(anchor="first")} if isinstance(windows, gear.Window) else {}
        tree = gear.ReplayDataset(table, layout="tree", **options)
        packed = gear.ReplayDataset(table, layout="packed", **options)
        for one, other in zip(iter(tree), iter(packed), strict=True):
            shared = set(one["parent"].tolist()) - {-1}
            assert shared == set(range(16, len(one["cu_seqlens"]) - 1)), "every segment has rows"
            assert all((one["parent"] == segment).sum() > 1 for segment in shared)
            assert one["cu_seqlens"][-1] == len(one["position"]) == len(one["token"])
            assert one["max_seqlen"] == one["cu_seqlens"].diff().max()
            for name in (*(windows if isinstance(windows, dict) else ("token", "hidden")), "position"):
                assert torch.equal(expanded(one, name), other[name]), name
            assert all(torch.equal(one[name], other[name]) for name in ("index", "anchor", "generation"))
            if not isinstance(windows, dict):
                assert torch.equal(one["reward"], other["reward"])
            fewer += len(other["token"]) - len(one["token"])
        assert fewer > 0


def test_every_prefix_of_a_group_lies_once() -> None:
    with table_of(max_steps=1_300_000, block_steps=64) as table:
        for group in range(3):
            first = table.add(rows(group, 24_000 + 2_000))
            table.extend([rows(group, 2_000)] * 15, prefix=first, prefix_steps=24_000)
        stored = table.stats()
        assert stored.payload_bytes > 7 * stored.resident_bytes
        dataset = gear.ReplayDataset(
            table,
            windows=gear.Whole(),
            batch_size=48,
            layout="tree",
            device="cpu",
            seed=1,
            sampler=gear.Fifo(),
        )
        batch = dataset.sample()
        assert len(batch["token"]) == 3 * (24_000 + 16 * 2_000)
        assert 7 * len(batch["token"]) < table.num_steps
        assert batch["parent"].tolist() == [48 + row // 16 for row in range(48)]


@pytest.mark.long
def test_large_images_of_a_group_lie_once() -> None:
    images = torch.randint(0, 256, (2, 1_344, 1_344, 3), dtype=torch.uint8)
    columns = {
        "token": gear.Column(torch.int64),
        "images": gear.Column(images.dtype, (None, *images.shape[1:]), per="group"),
    }
    memory = gear.Memory(payload="48MiB", prefixes=True)
    with gear.Table.create(columns, max_steps=1_000, max_trajectories=16, memory=memory) as table:
        for _ in range(2):
            first = table.add({"token": torch.arange(20), "images": images})
            table.extend([{"token": torch.arange(10)}] * 7, prefix=first, prefix_steps=10)
        expanded = 16 * images.nbytes
        assert expanded > 7 * table.stats().value_resident_bytes
        options: dict[str, Any] = {
            "windows": gear.Whole(),
            "batch_size": 16,
            "device": "cpu",
            "sampler": gear.Fifo(),
        }
        batch = gear.ReplayDataset(table, layout="tree", **options).sample()
        assert expanded > 7 * batch["images"].values.nbytes
        whole = gear.ReplayDataset(table, layout="packed", **options).sample()["images"].tolist()
        once = batch["images"].tolist()
        assert all(once[group].equal(one) for group, one in zip(batch["group"].tolist(), whole, strict=True))


def test_over_shards_prefixes_and_values_per_group_come_once_too() -> None:
    with gear.distributed.Shards([grouped(0), grouped(4)]) as shards:
        windows = {"token": gear.Whole(), "hidden": gear.Whole(), "images": None}
        for size in ({"batch_size": 24}, {"batch_size": gear.Steps(200, lookahead=2)}):
            options: dict[str, Any] = {"windows": windows, "device": "cpu", "seed": 3, **size}
            tree = gear.ReplayDataset(shards, layout="tree", **options)
            packed = gear.ReplayDataset(shards, layout="packed", **options)
            fewer = 0
            for one, other in zip(iter(tree), iter(packed), strict=True):
                for name in ("token", "hidden", "position"):
                    assert torch.equal(expanded(one, name), other[name]), name
                assert all(
                    one[name].equal(other[name]) for name in ("index", "anchor", "generation", "shard")
                )
                check_groups(one, len(other["index"]))
                fewer += len(other["token"]) - len(one["token"])
            assert fewer > 0


def test_what_is_refused() -> None:
    columns = {"parent": gear.Column(torch.int64)}
    with gear.Table.create(columns, max_steps=9, max_trajectories=2) as table:
        table.add({"parent": torch.arange(3)})
        options: Any = {"batch_size": 2, "device": "cpu", "layout": "tree"}
        with pytest.raises(SchemaError, match="'parent', which is a key of batches with layout='tree'"):
            gear.ReplayDataset(table, windows=gear.Whole(), **options).sample()
        windows = {"x": gear.Whole(column="parent")}
        batch = gear.ReplayDataset(table, windows=windows, **options).sample()
        assert batch["x"].tolist() == [0, 1, 2] * 2
        assert batch["parent"].tolist() == [-1, -1]
        dataset = gear.ReplayDataset(table, windows=windows, **options)
        with pytest.raises(SchemaError, match="has layout='tree', groups"):
            gear.Mixture({"a": (dataset, 1)}, batch_size=2)
