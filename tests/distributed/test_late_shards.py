"""Late columns, and versions of the policy, over shards: all ranks draw what is filled and recent, wherever it lies."""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import run_ranks
from options_common import nested
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.distributed import Placement, Shards
from gear_loader.distributed.migration import Mover
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
        COLUMNS,
        name=name,
        max_steps=500,
        max_trajectories=50,
        block_steps=4,
        limits=gear.Limits(version="policy", max_lag=1),
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
    return gear.ReplayDataset(
        shards, **nested({**given, "sampler": gear.Uniform(replacement=False), **options})
    )


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
            data = dataset(shards, sampler=weighted, batches_per_epoch=10)
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
                TableEmptyError, match=r"write-once columns .* filled, of a policy at most 1 versions old"
            ):
                numbers(dataset(shards))
            found["seconds"] = time.monotonic() - began
            with pytest.raises(SchemaError, match="write-once columns"):
                Placement(shards)
            shards.timeout = 20
        return found
    finally:
        table.unlink()


@pytest.mark.long
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


# ---------------------------------------------------------------- migration


def tiered(path: Path, shard: int, count: int, name: str | None = None) -> gear.Table:
    """A table of `count` trajectories, of which two thirds lie on disk only, and each third one lacks something."""
    disk = gear.Disk(path / str(shard), sync_seconds=NEVER, size="64MiB")
    table = gear.Table.create(
        COLUMNS,
        name=name,
        max_steps=900,
        max_trajectories=100,
        block_steps=4,
        memory=gear.Memory(max_blocks=60),
        disk=disk,
        timeout=20,
    )
    for i in range(count):
        number = 100 * shard + i
        slot = add(table, number)
        if number % 3:
            fill(table, [slot])
        elif number % 2:
            table.fill(slot, reward=np.float32(number))
    if count:
        table.save(path / str(shard))
        spill(table, table.indices()[: 2 * count // 3])
        assert count // 2 < table._engine.num_spilled < count
    return table


def held(table: gear.Table) -> dict[int, list[str]]:
    """The late columns of each trajectory; fails unless every value is right."""
    table.check_valid()
    found = {}
    for slot in table.indices().tolist():
        row = table[slot]
        number = int(row["number"])
        assert row["token"].tolist() == [number] * (1 + number % 7)
        assert float(row.get("reward", number)) == number
        assert set(row.get("logprob", torch.tensor([number / 2])).tolist()) == {number / 2}
        found[number] = sorted(set(row) & {"reward", "logprob"})
    return found


def test_late_columns_and_trajectories_on_disk_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a memory that holds a part of them. What is filled after its copy was made stays where it is."""
    with tiered(tmp_path, 0, 60) as full, tiered(tmp_path, 1, 0) as empty:
        shards = Shards([full, empty])
        before, copy = held(full), Mover.fill

        def beside(mover: Mover, source: gear.Table, *given: Any) -> Any:
            bits = copy(mover, source, *given)
            one, two = (slot for slot in source.indices().tolist() if int(source[slot]["number"]) in (54, 57))
            fill(source, [one])
            source.fill(two, logprob=source[two]["token"].double() / 2)
            return bits

        monkeypatch.setattr(Mover, "fill", beside)
        told = dataset(shards).rebalance()
        now = [held(full), held(empty)]
        assert told["moved"] == len(now[1]) > 20
        assert {54, 57} <= set(now[0])
        assert not set(now[0]) & set(now[1])
        assert now[0] | now[1] == before | {54: ["logprob", "reward"], 57: ["logprob", "reward"]}
        shards.close()


def test_of_two_copies_the_one_that_is_filled_stays(tmp_path: Path) -> None:
    """A migration was interrupted before the columns were copied, from a shard that did not number the trajectories."""
    with tiered(tmp_path, 0, 0) as first, tiered(tmp_path, 1, 6) as second:
        shards = Shards([first, second])
        ids = np.array([(7 << 16) | 2])
        slots = [add(table, 4) for table in (first, second)]
        for table, slot in zip((first, second), slots, strict=True):
            table._engine.index.arrays.ident[slot] = ids[0]
        fill(second, [slots[1]])
        assert dataset(shards).rebalance(max_bytes=0)["leftovers"] == 1
        assert held(first) == {}
        assert held(second)[4] == ["logprob", "reward"]
        shards.close()


def moving(rank: int, world: int, path: str) -> dict[int, list[str]]:
    table = tiered(Path(path), rank, 40 * (1 - rank), name=f"gear-late-move-{os.getppid()}-{rank}")
    try:
        with Shards(table, timeout=20, transport="socket", node=f"node-{rank}") as shards:
            told = dataset(shards).rebalance()
            assert told["moved"] > 10
            shards.exchange.barrier()
            return held(table)
    finally:
        table.close()
        table.unlink()


@pytest.mark.long
def test_they_move_to_another_node(tmp_path: Path) -> None:
    found = run_ranks(2, functools.partial(moving, path=str(tmp_path)))
    with tiered(tmp_path / "again", 0, 40) as table:
        assert found[0] | found[1] == held(table)
    assert not set(found[0]) & set(found[1])
