"""Groups and freshness over shards: each rank draws whole groups of its own, as of a table alone."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import run_ranks
from options_common import nested, nested_table

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.errors import SchemaError

COLUMNS = {
    "token": gear.Column(torch.int32),
    "prompt": gear.Column(torch.int64, per="trajectory"),
    "single": gear.Column(torch.int64, per="trajectory"),
    "policy": gear.Column(torch.int64, per="trajectory", cast=True),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
}
SIZE, GROUPS = 3, 7
ONCE = gear.Uniform(replacement=False)
WEIGHTED = ("weighted", "table", "fresh")
SAMPLERS = {
    "once": ONCE,
    "weighted": gear.Prioritized(),
    "table": gear.Prioritized(normalize="table"),
    "fresh": gear.Prioritized(alpha=1.0, freshness=0.5),
}


def make(shard: int, name: str | None = None) -> gear.Table:
    """GROUPS - shard complete groups, and one that is not."""
    sizes = {"max_steps": 400, "max_trajectories": 40, "block_steps": 4}
    table = gear.Table.create(COLUMNS, **nested_table({"name": name, "version": "policy", **sizes}))
    for number in range(SIZE * (GROUPS - shard) + 1):
        length = 1 + number % 5
        steps = {
            "token": np.full(length, number, np.int32),
            "prompt": 100 * shard + number // SIZE,
            "single": number,
            "policy": number // 9,
        }
        slot = table.add(steps, priority=0.5 + number % 4 + 3 * shard)
        table.fill(slot, reward=np.float32(number))
    table.advance_version()
    return table


def dataset(source: Any, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {
        "windows": {"token": gear.Whole(), "prompt": None, "reward": None},
        "layout": "packed",
        "batch_size": 2 * SIZE,
        "group": "prompt",
        "group_size": SIZE,
        "device": "cpu",
        "seed": 5,
        **options,
    }
    return gear.ReplayDataset(source, **nested(given))


def batches_of(data: gear.ReplayDataset, count: int | None = None) -> list[dict[str, Any]]:
    found = []
    for batch in data:
        found.append({name: torch.as_tensor(value).clone() for name, value in batch.items()})
        if data.groups is not None and data.groups.size == SIZE and data.batch_size > 1:
            prompts = batch["prompt"].view(-1, SIZE)
            assert (prompts == prompts[:, :1]).all()
        if len(found) == count:
            break
    return found


def drawing(rank: int, world: int) -> dict[str, Any]:
    table = make(rank, f"gear-groups-{os.getppid()}-{rank}")
    try:
        with Shards(table, timeout=20, transport="socket", node=f"node-{rank}") as shards:
            found: dict[str, Any] = {}
            for name, sampler in SAMPLERS.items():
                options = {"sampler": sampler, "scope": "local"}
                if name != "once":
                    options["batches_per_epoch"] = 6
                data = dataset(shards, **options)
                found[name] = batches_of(data, 3)
                state = data.state_dict()
                found[f"{name}, whole"] = batches_of(dataset(shards, **options))
                again = dataset(shards, **options)
                again.load_state_dict(state)
                found[f"{name}, resumed"] = batches_of(again)
                if name != "once":  # a group of one is a trajectory
                    found[f"{name}, single"] = batches_of(
                        dataset(shards, group_size=1, group="single", **options)
                    )
                    plain = {"group": None, "group_size": None, **options}
                    found[f"{name}, no groups"] = batches_of(dataset(shards, **plain))
            budget = {"batch_size": None, "max_steps": 40, "batches_per_epoch": 3, "scope": "local"}
            found["budget"] = batches_of(dataset(shards, sampler=ONCE, **budget))
            with pytest.raises(SchemaError, match=r"Ranks\('local'\): groups lie in one table"):
                dataset(shards)
            shards.exchange.barrier()
        return found
    finally:
        table.unlink()


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], *, less: tuple[str, ...] = ()) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert set(one) - {"shard"} == set(other) - {"shard"}
        for name in set(other) - {"shard", *less}:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=name)


@pytest.mark.long
def test_each_rank_draws_whole_groups_of_its_own() -> None:
    ranks = run_ranks(2, drawing)
    # The first shard's draws are those of its table alone; weights differ by the shares of the shards' masses.
    with make(0) as table:
        alone = dataset(table, sampler=ONCE)
        same([*ranks[0]["once"]], batches_of(alone, 3))
        for name in WEIGHTED:
            alone = dataset(table, sampler=SAMPLERS[name], batches_per_epoch=6)
            same(ranks[0][name], batches_of(alone, 3), less=("weight", "priority_weight"))
        budget = dataset(table, sampler=ONCE, batch_size=None, max_steps=40, batches_per_epoch=3)
        same(ranks[0]["budget"], batches_of(budget))
    for rank, found in enumerate(ranks):
        groups = set(range(100 * rank, 100 * rank + GROUPS - rank))
        drawn = [int(p) for batch in found["once, whole"] for p in batch["prompt"][::SIZE]]
        assert set(drawn) == groups
        assert len(found["once, whole"]) == 4  # on both ranks, though the second has six groups
        for name in SAMPLERS:
            same([*found[name], *found[f"{name}, resumed"]], found[f"{name}, whole"])
        for name in WEIGHTED:
            assert {int(p) for batch in found[name] for p in batch["prompt"]} <= groups
            same(found[f"{name}, single"], found[f"{name}, no groups"])
