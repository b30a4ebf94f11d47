"""``layout="tree"`` over ranks of two nodes: expanded they have the batches of one process, bit for bit."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from typing import Any

import pytest
import torch
from distributed_common import on_two_nodes, run_ranks
from tree_common import IMAGES, check_groups, expanded, grouped, rows

import gear_loader as gear
from gear_loader.distributed import Shards

WINDOWS = {"token": gear.Whole(), "hidden": gear.Whole(), "images": None}


def draw(shards: Shards, rank: int, world: int) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"windows": WINDOWS, "device": "cpu", "seed": 3, "batches_per_epoch": 4}
    data = gear.ReplayDataset(shards, layout="tree", batch_size=24 // world, **options)
    found = []
    for batch in data:
        check_groups(batch, 24 // world)
        images = batch["images"].tolist()
        found.append(
            {
                **{name: expanded(batch, name) for name in ("token", "hidden", "position")},
                "images": torch.cat([images[group] for group in batch["group"].tolist()]),
                "index": batch["index"],
                "steps": torch.tensor(len(batch["token"])),
            }
        )
    return found


def rank_of(rank: int, world: int, work: Any) -> Any:
    table = grouped(4 * rank, f"gear-tree-{os.getppid()}-{rank}")
    return on_two_nodes(table, rank, world, work)


@pytest.mark.long
def test_ranks_have_the_batches_of_one_process() -> None:
    ranks = run_ranks(3, rank_of, draw)
    with Shards([grouped(4 * shard) for shard in range(3)]) as shards:
        whole = draw(shards, 0, 1)
    for number, expected in enumerate(whole):
        for key in ("token", "hidden", "position", "images", "index"):
            assert torch.cat([found[number][key] for found in ranks]).equal(expected[key]), (number, key)
        assert sum(int(found[number]["steps"]) for found in ranks) < len(expected["token"])


def replace(table: gear.Table, rank: int, ends: threading.Event) -> None:
    for number in itertools.count():
        if ends.wait(0.003):
            return
        group = 4 * rank + number % 4
        images = torch.full((group % 3 + 1, 5), group, dtype=torch.uint8)
        first = table.add({**rows(group, 20 + group), "images": images})
        table.extend([rows(group, 3 + i) for i in range(5)], prefix=first, prefix_steps=9 + group)


def storm(shards: Shards, rank: int, world: int) -> int:
    ends = threading.Event()
    writer = threading.Thread(target=replace, args=(shards.table, rank, ends))
    writer.start()
    try:
        options: dict[str, Any] = {
            "windows": WINDOWS,
            "device": "cpu",
            "batch_size": 24,
            "batches_per_epoch": 40,
        }
        data = gear.ReplayDataset(shards, layout="tree", **options)
        for batch in data:
            check_groups(batch, 24)
            shown, own = expanded(batch, "token"), expanded(batch, "position")
            assert (shown % 10_000 <= own).all()
        gone: int = data.num_gone
        shards.exchange.barrier()
    finally:
        ends.set()
        writer.join()
    return gone


def small_rank(rank: int, world: int) -> int:
    sizes: dict[str, Any] = {
        "max_steps": 900,
        "max_trajectories": 40,
        "block_steps": 4,
        "on_full": "evict_oldest",
    }
    memory = gear.Memory(payload="16KiB", prefixes=True)
    name = f"gear-tree-storm-{os.getppid()}-{rank}"
    with gear.Table.create(IMAGES, memory=memory, name=name, **sizes) as table:
        replaced = threading.Event()
        threading.Timer(0.5, replaced.set).start()
        replace(table, rank, replaced)
        found: int = on_nodes_of_their_own(table, rank, world)
        return found


def on_nodes_of_their_own(table: gear.Table, rank: int, world: int) -> Any:
    try:
        with Shards(table, timeout=200, transport="socket", node=f"node-{rank}") as shards:
            return storm(shards, rank, world)
    finally:
        table.unlink()


@pytest.mark.long
def test_trees_are_whole_while_trajectories_leave() -> None:
    assert sum(run_ranks(2, functools.partial(small_rank))) > 0
