"""Values of rows that were drawn over shards are overwritten in the tables of their owners, while others read them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import gear_loader as gear
from gear_loader.distributed import Placement, Shards
from gear_loader.errors import SchemaError, StaleIndexError

LENGTH, COUNT, TURNS = 24, 6, 40
COLUMNS = {
    "token": gear.Column(torch.int64),
    "state": gear.Column(torch.float32, (3,), mutable=True),
    "wide": gear.Column(torch.int32, (80,), mutable=True),
}
PADDED: dict[str, Any] = {"windows": gear.Window(LENGTH), "draws": gear.Draws(complete=True)}
PACKED: dict[str, Any] = {"windows": gear.Whole(), "layout": "packed"}


def values(numbers: Any) -> dict[str, Any]:
    """Rows of one number each."""
    numbers = torch.as_tensor(numbers)[:, None, None]
    state = numbers.expand(-1, LENGTH, 3).float()
    return {"state": state, "wide": numbers.expand(-1, LENGTH, 80).int()}


def make(name: str | None, shard: int, **options: Any) -> gear.Table:
    table = gear.Table.create(
        COLUMNS, max_steps=400, max_trajectories=20, block_steps=8, name=name, **options
    )
    for number in range(COUNT):
        token = np.full(LENGTH, 100 * shard + number)
        table.add({"token": token, **{key: value[0] for key, value in values([0]).items()}})
    return table


def numbers_of(batch: Any) -> list[int]:
    """The number of each row; fails if one has two."""
    both = torch.cat((batch["state"].reshape(-1, LENGTH, 3), batch["wide"].reshape(-1, LENGTH, 80)), -1)
    first = both[:, :1, :1]
    assert (both == first).all()
    return [int(number) for number in first.flatten()]


def rank_of(rank: int, world: int, layout: str) -> tuple[list[int], dict[int, int]]:
    """Overwrite what is drawn, as all ranks do; what was read, and what the own table has at the end."""
    shards = Shards(
        make(f"gear-set-{os.getppid()}-{rank}", rank),
        node=f"node-{rank // 2}",
        transport="socket",
        timeout=90,
    )
    try:
        options = PADDED if layout == "padded" else PACKED
        replay = gear.ReplayDataset(
            shards, batch_size=8, batches_per_epoch=TURNS, seed=3, device="cpu", **options
        )
        read: set[int] = set()
        for turn, batch in enumerate(replay):
            assert set(batch["shard"].tolist()) <= set(range(world))
            read |= set(numbers_of(batch))
            given = values(1_000_000 * (rank + 1) + 100 * turn + np.arange(8))
            assert replay.set(batch, **given) == 0
        with pytest.raises(SchemaError, match=r"without \['shard'\]"):
            replay.set({key: batch[key] for key in ("index", "anchor", "generation")}, **values([1] * 8))
        with pytest.raises(SchemaError, match="rebalance was called"):
            replay.rebalance()
        shards.exchange.barrier()
        mine = numbers_of(shards.table.gather(np.arange(COUNT), windows=gear.Window(LENGTH)))
        if rank == 0:  # of all shards, one of which is gone
            sample = {
                "index": np.zeros(world, int),
                "anchor": np.zeros(world, int),
                "shard": np.arange(world),
            }
            assert (
                replay.set({**sample, "generation": np.array([1] * (world - 1) + [7])}, **values([5] * world))
                == 1
            )
            with pytest.raises(StaleIndexError, match="removed"):
                replay.set({**sample, "generation": np.full(world, 7)}, stale="error", **values([6] * world))
        shards.exchange.barrier()
        first = numbers_of(shards.table.gather([0], windows=gear.Window(LENGTH)))[0]
        shards.table.check_valid()
        shards.exchange.barrier()
        shards.close()
    finally:
        shards.table.unlink()
    return sorted(read), {**dict(enumerate(mine)), 0: first}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_rows_are_written_to_their_owners(layout: str) -> None:
    """Ranks 0 and 1 share a node, rank 2 has its own: it is written to, and read, by requests."""
    found = run_ranks(3, rank_of, layout)
    for rank, (read, mine) in enumerate(found):
        assert {number // 1_000_000 for number in read} >= {1, 2, 3}
        assert {number // 1_000_000 for number in list(mine.values())[1:]} & {1, 2, 3}
        assert (mine[0] == 5) == (rank < 2)


STAGES = ({"token": COLUMNS["token"]}, {name: COLUMNS[name] for name in ("state", "wide")})


def stage_of(rank: int, world: int, apart: bool) -> tuple[str, set[int], int]:
    """Rank 1, of the second stage, overwrites what it draws of both shards; what the other rank of its stage reads."""
    stage, mesh = rank % 2, init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    name = f"gear-stage-{os.getppid()}-{rank}"
    sizes: dict[str, Any] = {"max_steps": 400, "max_trajectories": 20, "block_steps": 8}
    table = gear.Table.create(STAGES[stage], name=name, **sizes)
    twice = gear.Table.create({**STAGES[stage], "state": COLUMNS["state"]}, name=f"{name}-twice", **sizes)
    node = f"node-{rank // 2}" if apart else "here"
    options: dict[str, Any] = {"mesh": mesh, "node": node, "transport": "socket", "timeout": 90}
    read: set[int] = set()
    skipped = 0
    try:
        with pytest.raises(SchemaError) as error:
            Shards(twice, **options)
        with Shards(table, **options) as shards:
            placement = Placement(shards)
            new = [
                {"token": np.full(LENGTH, i), **{key: each[0] for key, each in values([0]).items()}}
                for i in range(8)
            ]
            if rank == 0:
                placement.extend(new)
            shards.exchange.barrier()
            windows = {key: gear.Window(LENGTH) for key in STAGES[stage]}
            draws: dict[str, Any] = {"windows": windows, "draws": gear.Draws(complete=True), "prefetch": 0}
            replay = gear.ReplayDataset(
                shards, batch_size=8, batches_per_epoch=TURNS, seed=3, device="cpu", **draws
            )
            model: dict[tuple[int, ...], int] = {}
            for turn, batch in enumerate(replay):
                if stage == 1:
                    numbers = numbers_of(batch)
                    rows = list(
                        zip(*(batch[key].tolist() for key in ("shard", "index", "generation")), strict=True)
                    )
                    if rank == 1:
                        assert numbers == [model.get(row, 0) for row in rows]
                    read |= set(numbers)
                shards.exchange.barrier()
                if rank == 1:
                    new_numbers = 100 * (turn + 1) + np.arange(len(rows))
                    assert replay.set(batch, **values(new_numbers)) == 0
                    model |= dict(zip(rows, new_numbers.tolist(), strict=True))
                shards.exchange.barrier()
            if rank == 1:
                assert {row[0] for row in model} == {0, 1}
                strange = {key: batch[key].clone() for key in ("index", "anchor", "generation", "shard")}
                strange["generation"] += 1
                with pytest.raises(SchemaError, match="was not drawn by this rank"):
                    replay.set(strange, **values(new_numbers))
                with pytest.raises(SchemaError, match="expected one or more of those"):
                    replay.set(batch, token=torch.zeros(len(rows), LENGTH, dtype=torch.int64))
            with pytest.raises(
                SchemaError, match=r"rebalance was called, and the tables have .*'state', 'wide'"
            ):
                replay.rebalance()
            shards.exchange.barrier()
            for each in range(2):  # all are replaced: first in stage 0
                if stage == each:
                    for slot in table.indices().tolist():
                        table.remove(slot)
                shards.exchange.barrier()
            if rank == 0:
                placement.extend(new)
            shards.exchange.barrier()
            if rank == 1:
                skipped = replay.set(batch, **values(new_numbers))
                assert skipped == len(rows)
                with pytest.raises(StaleIndexError):
                    replay.set(batch, stale="error", **values(new_numbers))
            replay.sample()
            if stage == 1:
                assert (replay.sample()["state"] == 0).all()
                if rank == 1:  # now it knows that stage 0 has another one
                    assert replay.set(batch, **values(new_numbers)) == len(rows)
                    assert (table[int(table.indices()[0])]["state"] == 0).all()
            else:
                replay.sample()
            shards.exchange.barrier()
            table.check_valid()
    finally:
        table.unlink()
        twice.unlink()
    return str(error.value), read, skipped


@pytest.mark.long
@pytest.mark.parametrize("apart", [False, True])
def test_values_of_a_later_stage_are_overwritten(apart: bool) -> None:
    found = run_ranks(4, stage_of, apart)
    assert all("is in the tables of stages 0 and 1; expected one stage" in message for message, _, _ in found)
    assert found[3][1] & {100 * turn + i for turn in range(1, TURNS) for i in range(8)}
    assert found[1][2] > 0


def test_shards_of_one_process_and_a_table() -> None:
    with make(None, 0) as first, make(None, 1) as second:
        both = gear.ReplayDataset(Shards([first, second]), batch_size=8, device="cpu", prefetch=0, **PADDED)
        batch = both.sample()
        assert both.set(batch, **values(1 + np.arange(8))) == 0
        for shard, index, number in zip(batch["shard"], batch["index"], range(1, 9), strict=True):
            last = max(i + 1 for i in range(8) if (batch["shard"][i], batch["index"][i]) == (shard, index))
            found = (first, second)[int(shard)][int(index)]["state"]
            assert (found == last).all(), number
        alone = gear.ReplayDataset(first, batch_size=4, device="cpu", prefetch=0, **PADDED)
        batch = alone.sample()
        assert alone.set(batch, mask=batch["mask"], **values([70] * 4)) == 0
        assert (first[int(batch["index"][0])]["wide"] == 70).all()
        with pytest.raises(SchemaError, match="with transport='nixl'"):
            Shards([first, second], transport="nixl")
