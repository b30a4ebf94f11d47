"""Data parallelism and pipeline stages: each stage gets its columns of the same rows in the same order."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_common import SCHEMA, run_ranks, trajectory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gear_loader as gear
from gear_loader.distributed import Placement, Shards

COLUMNS = (("obs", "act"), ("flag", "act"))
STAGES = {"obs": 0, "act": [0, 1], "flag": -1}
WINDOWS: tuple[dict[str, gear.Window], ...] = (
    {"obs": gear.Window(5, offset=-2), "act": gear.Window(2)},
    {"flag": gear.Window(1), "act": gear.Window(3, offset=-1)},
)
SELECTORS: dict[str, gear.selectors.Selector] = {
    "pass": gear.Uniform(replacement=False, unit="step"),
    "fifo pass": gear.Fifo(replacement=False, unit="step"),
    "top": gear.TopK(),
    "prioritized": gear.Prioritized(),
    "distinct": gear.Prioritized(replacement=False, unit="step", normalize="table"),
}
ROWS, BATCHES, EACH = 24, 5, 13
PREFETCH = {"one": 2, "four": 0}
NAMES = ("index", "anchor", "generation", "shard", "act", "obs", "flag", "mask", "priority_weight")
SIZES = {"max_steps": 4000, "max_trajectories": 60, "block_steps": 8}


def made_by(rank: int) -> tuple[list[dict[str, Any]], list[float]]:
    """What a rank places, and its priorities."""
    numbers = range(100 * rank, 100 * rank + EACH)
    return [trajectory(n, n * 7 % 23 + 1) for n in numbers], [n % 5 + 0.5 for n in numbers]


def new_priorities(batch: dict[str, Any], number: int) -> torch.Tensor:
    return ((batch["index"] * 7 + batch["anchor"] * 3 + batch["shard"] * 5 + number) % 11 + 0.25).float()


def draw_all(
    shards: Shards, windows: Any, rows: int, prefetch: int, *, updates: bool
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, selector in SELECTORS.items():
        data = gear.ReplayDataset(
            shards,
            batch_size=rows,
            windows=windows,
            selector=selector,
            batches_per_epoch=BATCHES,
            seed=5,
            prefetch=prefetch,
            copy=True,
        )
        found[name] = []
        for number, batch in enumerate(data):
            found[name].append({key: batch[key] for key in NAMES if key in batch})
            if updates and isinstance(selector, (gear.Prioritized, gear.TopK)):
                data.update_priority(batch, new_priorities(batch, number))
    return found


def full_stage(placement: Placement, table: gear.Table) -> tuple[str, int]:
    """The error of a stage without room, and how many trajectories this rank's table has after it."""
    before = len(table)
    dist.barrier()
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(gear.errors.TableFullError) as error:
            placement.extend([trajectory(9000 + i, 1) for i in range(80)])
        message = str(error.value)
    dist.barrier()
    return message, len(table) - before


def pipeline_rank(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": errors_of_meshes(rank)}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    for variant, node in (("one", "here"), ("four", f"node-{rank}")):
        stage = rank % 2
        sizes = SIZES | ({"max_trajectories": 90} if stage else {})
        table = gear.Table.create(
            {name: SCHEMA[name] for name in COLUMNS[stage]},
            name=f"gear-test-{os.getppid()}-{variant}-{rank}",
            **sizes,
        )
        try:
            with Shards(table, mesh=mesh, transport="socket", timeout=30, node=node) as shards:
                placement = Placement(shards, stages=STAGES)
                for turn in range(world):
                    if rank == turn:
                        trajectories, priorities = made_by(rank)
                        placement.extend(trajectories[:-1], priority=priorities[:-1])
                        placement.add(trajectories[-1], priorities[-1])
                    dist.barrier()
                found[variant] = {"ids": table.ids(table.indices())}
                found[variant].update(
                    draw_all(shards, WINDOWS[stage], ROWS // 2, PREFETCH[variant], updates=stage == 1)
                )
                found[variant]["full"] = full_stage(placement, table)
                found[variant]["leftovers"] = leftovers(shards, table, WINDOWS[stage])
                dist.barrier()
        finally:
            table.unlink()
    found["moved"] = moving(rank, mesh)
    return found


def leftovers(shards: Shards, table: gear.Table, windows: Any) -> tuple[list[int], int]:
    """Duplicates that `rebalance` removes at once, and those that it removes after the grace period."""
    data = gear.ReplayDataset(shards, batch_size=1, windows=windows, prefetch=0)
    told = shards.exchange.share({"ids": table.ids(table.indices()).tolist()})
    if dist.get_rank() == 1:  # as if somebody had been killed while it moved here
        part = {name: values for name, values in trajectory(1, 2).items() if name in COLUMNS[1]}
        table.extend_as([part], ids=[told[2]["ids"][3]])
    removed = [data.rebalance(max_bytes=0)["leftovers"]]
    live = table.index
    live.arrays.created[:] -= 31 * 10**9
    removed.append(data.rebalance(max_bytes=0)["leftovers"])
    table.check_valid()
    return removed, len(table)


def errors_of_meshes(rank: int) -> list[str]:
    table = gear.Table.create(
        {name: SCHEMA[name] for name in COLUMNS[rank == 3]},
        name=f"gear-test-{os.getppid()}-wrong-{rank}",
        **SIZES,
    )
    messages = []
    small = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("data",), _init_backend=False)
    strange = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    try:
        for mesh in (strange, [0, 1], *([small] if rank == 3 else []), None):
            with pytest.raises(gear.errors.GearError) as error:
                Shards(table, mesh=mesh, timeout=30)
            messages.append(str(error.value))
    finally:
        table.unlink()
    evicting = gear.Table.create(
        {name: SCHEMA[name] for name in COLUMNS[rank % 2]},
        name=f"gear-test-{os.getppid()}-evicting-{rank}",
        on_full="evict_oldest",
        **SIZES,
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    try:
        with Shards(evicting, mesh=mesh, timeout=30) as shards:
            with pytest.raises(gear.errors.SchemaError) as refused:
                Placement(shards)
            messages.append(str(refused.value))
            dist.barrier()
    finally:
        evicting.unlink()
    return messages


def moving(rank: int, mesh: DeviceMesh) -> Any:
    """All begin in one shard, of which half moves while training goes on."""
    table = gear.Table.create(
        {name: SCHEMA[name] for name in COLUMNS[rank % 2]},
        name=f"gear-test-{os.getppid()}-stages-{rank}",
        **SIZES,
    )
    found = []
    try:
        with Shards(table, mesh=mesh, timeout=30, transport="socket", node=f"node-{rank % 3}") as shards:
            placement = Placement(shards, "local")
            if rank == 1:
                placement.extend([trajectory(i, i % 7 + 1) for i in range(30)], priority=1.0)
            dist.barrier()
            data = gear.ReplayDataset(
                shards,
                batch_size=8,
                windows=gear.Window(1),
                selector=gear.Prioritized(),
                prefetch=1,
                batches_per_epoch=6,
                copy=True,
            )
            for number, batch in enumerate(data):
                found.append(batch["act"].squeeze(1).clone())
                data.update_priority(batch, batch["act"].squeeze(1) % 5 + 1.0)
                if number == 2:
                    told = data.rebalance()
            slots = table.indices()
            result = found, told, sorted(table.ids(slots).tolist())
            dist.barrier()
            return result
    finally:
        table.unlink()


def alone(stage: int, ids: list[Any]) -> Shards:
    """The tables of one stage, all in this process, as the ranks have filled them.

    Args:
        ids: of each shard's trajectories.
    """
    schema = {name: SCHEMA[name] for name in COLUMNS[stage]}
    tables = [gear.Table.create(schema, **SIZES) for _ in range(2)]
    for rank in range(4):
        trajectories, priorities = made_by(rank)
        for i, (each, priority) in enumerate(zip(trajectories, priorities, strict=True)):
            table, known = tables[(rank + i) % 2], ids[(rank + i) % 2]
            part = {name: each[name] for name in schema}
            table.extend_as([part], priority=priority, ids=known[len(table)][None])
    return Shards(tables)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(4, pipeline_rank)


@pytest.mark.parametrize("variant", ["one", "four"])
def test_stages_have_the_same_trajectories(ranks: list[dict[str, Any]], variant: str) -> None:
    ids = [found[variant]["ids"] for found in ranks]
    for data in range(2):
        assert sorted(ids[2 * data]) == sorted(ids[2 * data + 1])
    everything = np.concatenate((ids[0], ids[2]))
    assert len(np.unique(everything)) == len(everything) == 4 * EACH
    assert set(np.unique(everything & 0xFFFF)) == {0, 1}


@pytest.mark.parametrize("variant", ["one", "four"])
@pytest.mark.parametrize("name", list(SELECTORS))
def test_each_stage_gets_its_columns_of_what_one_process_draws(
    ranks: list[dict[str, Any]], variant: str, name: str
) -> None:
    ids = [ranks[2 * data][variant]["ids"] for data in range(2)]
    one = [draw_of(stage, variant, ids)[name] for stage in range(2)]
    for stage in range(2):
        for number in range(BATCHES):
            parts = [ranks[2 * data + stage][variant][name][number] for data in range(2)]
            expected = one[stage][number]
            other = "obs" if stage else "flag"
            assert other not in parts[0]
            assert set(parts[0]) == set(parts[1]) == set(expected)
            for key in expected:
                pairs = [(parts, expected)]
                if key == "mask":
                    pairs = [([part[key][c] for part in parts], expected[key][c]) for c in COLUMNS[stage]]
                else:
                    pairs = [([part[key] for part in parts], expected[key])]
                for some, whole in pairs:
                    assert torch.equal(torch.cat(some), whole), (
                        f"{name}, stage {stage}, batch {number}, {key}"
                    )


_DRAWN: dict[tuple[int, str], dict[str, list[Any]]] = {}


def draw_of(stage: int, variant: str, ids: list[Any]) -> dict[str, list[Any]]:
    """What one process draws from the tables of a stage."""
    if (stage, variant) not in _DRAWN:
        _DRAWN[stage, variant] = draw_all(
            alone(stage, ids), WINDOWS[stage], ROWS, PREFETCH[variant], updates=True
        )
    return _DRAWN[stage, variant]


def test_updates_of_the_last_stage_change_what_is_drawn(ranks: list[dict[str, Any]]) -> None:
    ids = [ranks[2 * data]["four"]["ids"] for data in range(2)]
    still = draw_all(alone(0, ids), WINDOWS[0], ROWS, 0, updates=False)
    for name in ("prioritized", "top", "distinct"):
        learnt = torch.cat([ranks[rank]["four"][name][-1]["index"] for rank in (0, 2)])
        assert not torch.equal(learnt, still[name][-1]["index"])


def test_a_stage_without_room_leaves_nothing_in_the_others(ranks: list[dict[str, Any]]) -> None:
    for variant, more in (("one", 0), ("four", 40)):
        message = ranks[0][variant]["full"][0]
        assert "stage 0 (table 'gear-test-" in message
        assert "The table is full" in message
        grown = [found[variant]["full"][1] for found in ranks]
        # What another node has stored is not drawn, and cannot be taken back from here.
        assert grown == [0, more, 0, more]
        for found in ranks:
            removed, count = found[variant]["leftovers"]
            assert removed == [1, 2 * more]
            assert count == 2 * EACH


def test_meshes_and_tables_that_do_not_fit_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        strange, none, *small, different, evicting = found["errors"]
        assert strange.startswith(
            "mesh has the dimensions ['data', 'expert']; expected mesh_dim_names out of"
        )
        assert none == "mesh is [0, 1]; expected a torch.distributed.DeviceMesh."
        assert small == (["Rank 3 is not in the mesh, which has the ranks [0, 1, 2]."] if rank == 3 else [])
        assert different.startswith("The table of rank 3 has the columns [['flag'")
        assert "has on_full='evict_oldest'; stages that evict independently" in evicting


def test_all_stages_move_the_same_trajectories(ranks: list[dict[str, Any]]) -> None:
    moved = [found["moved"] for found in ranks]
    for data in range(2):
        first, last = moved[2 * data], moved[2 * data + 1]
        assert first[2] == last[2]
        assert all(torch.equal(a, b) for a, b in zip(first[0], last[0], strict=True))
    told = moved[0][1]
    assert told["before"][1] == 0
    assert told["moved"] > 10
    assert abs(told["after"][0] - told["after"][1]) <= 8
    assert sorted(moved[0][2] + moved[2][2]) == sorted(set(moved[0][2]) | set(moved[2][2]))
    assert len(moved[0][2]) + len(moved[2][2]) == 30
