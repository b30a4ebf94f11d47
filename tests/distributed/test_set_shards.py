"""Values of rows that were drawn over shards are overwritten in the tables of their owners, while others read them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import run_ranks

import gear_loader as gear
from gear_loader.distributed import Shards
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
