"""Late columns, and versions of the policy, over shards: all ranks draw what is filled and recent, wherever it lies."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import run_ranks

import gear_loader as gear
from gear_loader.distributed import Placement, Shards
from gear_loader.errors import SchemaError, TableEmptyError

COLUMNS = {
    "token": gear.Column(torch.int32),
    "number": gear.Column(torch.int64, per="trajectory", cast=True),
    "policy": gear.Column(torch.int64, per="trajectory", cast=True),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
    "logprob": gear.Column(torch.float64, late=True),
}
COUNT = 12


def add(table: gear.Table, number: int, policy: int = 0) -> int:
    length = 1 + number % 7
    return table.add({"token": np.full(length, number, np.int32), "number": number, "policy": policy})


def make(name: str | None, shard: int) -> gear.Table:
    table = gear.Table.create(
        COLUMNS, name=name, max_steps=500, max_trajectories=50, block_steps=4, version="policy", max_lag=1
    )
    for i in range(COUNT):
        add(table, 100 * shard + i)
    return table


def fill(table: gear.Table, slots: Any) -> None:
    """Fill them all at once: whoever waits for a filled one sees all."""
    rows = [table[slot] for slot in slots]
    numbers = [int(row["number"]) for row in rows]
    logprob = [np.full(len(row["token"]), n / 2) for row, n in zip(rows, numbers, strict=True)]
    table.fill(slots, reward=np.array(numbers, np.float32), logprob=logprob)


def dataset(shards: Shards, **options: Any) -> gear.ReplayDataset:
    given = {"windows": gear.Whole(), "layout": "packed", "device": "cpu", "max_steps": 20, "seed": 3}
    return gear.ReplayDataset(shards, **{**given, "selector": gear.Uniform(replacement=False), **options})


def numbers(data: gear.ReplayDataset) -> list[int]:
    found = []
    for batch in data:
        starts = batch["cu_seqlens"].tolist()
        for b, number in enumerate(batch["number"].tolist()):
            part = slice(starts[b], starts[b + 1])
            assert float(batch["reward"][b]) == number
            assert batch["logprob"][part].tolist() == [number / 2] * (starts[b + 1] - starts[b])
            assert batch["token"][part].tolist() == [number] * (starts[b + 1] - starts[b])
            found.append(number)
    return found


def drawing(rank: int, world: int) -> dict[str, Any]:
    table = make(f"gear-late-{os.getppid()}-{rank}", rank)
    try:
        with Shards(table, timeout=20, transport="socket", node=f"node-{rank}") as shards:
            barrier = shards.exchange.barrier
            found: dict[str, Any] = {}
            slots = table.indices().tolist()
            # Nothing is filled: all wait until one rank fills some of its trajectories.
            filler = threading.Timer(1.0, fill, (table, slots[:4]))
            if rank == 1:
                filler.start()
            found["first"] = numbers(dataset(shards))
            barrier()
            fill(table, slots[4:8] if rank == 1 else slots[:5])
            barrier()
            found["more"] = numbers(dataset(shards, micro_batches=2))
            weighted = gear.Prioritized(normalize="table")
            data = dataset(shards, selector=weighted, batches_per_epoch=10)
            found["weighted"] = sorted(set(numbers(data)))
            sized = dataset(shards, max_steps=None, batch_size=3)
            found["sized"] = numbers(sized)
            barrier()
            # Two versions later only what is new remains.
            table.advance_version()
            new = add(table, 100 * rank + 50, policy=1)
            table.advance_version()
            if rank == 0:
                fill(table, [new])
            barrier()
            found["recent"] = numbers(dataset(shards))
            found["outdated"] = table.stats().num_outdated
            barrier()
            table.advance_version()
            barrier()
            shards.timeout = 3  # the deadline of its exchange too: ranks of a busy machine need some of it
            began = time.monotonic()
            with pytest.raises(
                TableEmptyError, match=r"late columns .* filled, of a policy at most 1 versions old"
            ):
                numbers(dataset(shards))
            found["seconds"] = time.monotonic() - began
            with pytest.raises(SchemaError, match="late columns"):
                Placement(shards)
            shards.timeout = 20
        return found
    finally:
        table.unlink()


def test_all_ranks_draw_what_is_filled_and_recent() -> None:
    ranks = run_ranks(2, drawing)
    together = {
        name: sorted(ranks[0][name] + ranks[1][name]) for name in ("first", "more", "sized", "recent")
    }
    assert set(together["first"]) == {100, 101, 102, 103}
    filled = [*range(5), *range(100, 108)]
    assert sorted(set(together["more"])) == sorted(set(together["sized"])) == filled
    for found in ranks:
        assert set(found["weighted"]) <= set(filled)
        assert len(found["weighted"]) > 4
        assert found["outdated"] == COUNT
        assert 2.9 < found["seconds"] < 20
    assert set(together["recent"]) == {50}
