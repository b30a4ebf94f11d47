"""A job saved by some ranks goes on with others: tables, ids, learnt priorities."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from distributed_common import check_batch, run_ranks
from test_distributed_state import dataset, steps
from test_global_selection import COUNTS, shards_of

import gear_loader as gear
from gear_loader import distributed
from gear_loader.distributed import Shards

WINDOWS = gear.Window(3)


def contents(table: gear.Table) -> dict[int, tuple[Any, ...]]:
    slots = table.indices()
    return {
        int(name): (table[slot]["act"].numpy().tobytes(), float(table.reader().arrays.priority[slot]))
        for name, slot in zip(table.ids(slots), slots, strict=True)
    }


def saving_rank(rank: int, world: int, folder: str) -> Any:
    with shards_of(rank, COUNTS) as shards:
        data = dataset(shards, gear.Prioritized(), 0)
        steps(data, 0, 4)
        distributed.save(shards, Path(folder, "tables"))
        state = data.state_dict()
        if rank == 0:
            torch.save(state, Path(folder, "state"))
        shards.table.remove(shards.table.indices()[0])
        distributed.save(shards, Path(folder, "later"))
        return contents(shards.table), int(shards.table.ids(shards.table.indices()).max())


def loading_rank(rank: int, world: int, folder: str) -> Any:
    table = distributed.load(Path(folder, "tables"), name=f"gear-elastic-{os.getppid()}-{rank}")
    with Shards(table, timeout=30) as shards:
        table.unlink()
        found = contents(table)
        state = torch.load(Path(folder, "state"), weights_only=False)
        data = gear.ReplayDataset(
            shards,
            batch_size=24 // world,
            windows=WINDOWS,
            selector=gear.Prioritized(),
            prefetch=0,
            copy=True,
        )
        data.load_state_dict(state)
        restored = data.state_dict()["priorities"]
        for batch in data:
            check_batch(batch, WINDOWS)
        new = table.ids(np.array([table.add({k: v.numpy() for k, v in table[table.indices()[0]].items()})]))
        return found, [restored[name] for name in ("ids", "leaves", "lengths")], int(new[0])


@pytest.mark.parametrize("world", mostly_long([2, 3], 3))
def test_four_ranks_save_and_two_or_three_go_on(tmp_path: Path, world: int) -> None:
    saved = run_ranks(4, saving_rank, str(tmp_path))
    state = torch.load(tmp_path / "state", weights_only=False)["priorities"]
    order = state["ids"].argsort()
    loaded = run_ranks(world, loading_rank, str(tmp_path))
    together: dict[int, Any] = {}
    for found, priorities, new in loaded:
        assert not set(found) & set(together)
        together |= found
        assert new not in found
        at = priorities[0].argsort()
        assert torch.equal(priorities[0][at], state["ids"][order])
        assert torch.equal(priorities[1][at], state["leaves"][order])
    fresh = [new for _, _, new in loaded]
    assert len(set(fresh)) == world
    assert not set(fresh) & set(together)
    for found, _ in saved:  # taken after one of each was removed
        assert all(together[name] == value for name, value in found.items())
    assert len(together) == sum(COUNTS)
