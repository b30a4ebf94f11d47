"""Data parallelism and pipeline stages: each stage gets its columns of the same rows in the same order."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_common import SCHEMA, new_priorities, run_ranks, trajectory
from options_common import nested
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gear_loader as gear
from gear_loader.distributed import Placement, Shards

COLUMNS = (("obs", "act"), ("task", "flag", "act"))
STAGES = {"obs": 0, "act": [0, 1], "flag": -1, "task": 1}
WINDOWS: tuple[dict[str, gear.Window | None], ...] = (
    {"obs": gear.Window(5, offset=-2), "act": gear.Window(2)},
    {"flag": gear.Window(1), "act": gear.Window(3, offset=-1), "task": None},
)
SAMPLERS: dict[str, gear.samplers.Sampler] = {
    "pass": gear.Uniform(replacement=False, unit="step"),
    "fifo pass": gear.Fifo(replacement=False, unit="step"),
    "top": gear.TopK(),
    "prioritized": gear.Prioritized(),
    "distinct": gear.Prioritized(replacement=False, unit="step", normalize="table"),
}
DRAWN = {"one": ("prioritized",), "two": tuple(SAMPLERS)}
ROWS, BATCHES, EACH = 24, 5, 13
PREFETCH = {"one": 2, "two": 0}
NAMES = ("index", "anchor", "generation", "shard", "act", "obs", "task", "flag", "mask", "priority_weight")
SIZES = {"max_steps": 4000, "max_trajectories": 60, "block_steps": 8}
Ranks = list[dict[str, Any]]


def table_of(stage: int, name: str | None = None, **sizes: Any) -> gear.Table:
    name = None if name is None else f"gear-test-{os.getppid()}-{name}-{dist.get_rank()}"
    return gear.Table.create({key: SCHEMA[key] for key in COLUMNS[stage]}, name=name, **{**SIZES, **sizes})


def made_by(rank: int) -> tuple[list[dict[str, Any]], list[float]]:
    """What a rank places, and its priorities."""
    numbers = range(100 * rank, 100 * rank + EACH)
    return [trajectory(n, n * 7 % 23 + 1) for n in numbers], [n % 5 + 0.5 for n in numbers]


def draw_all(shards: Shards, stage: int, rows: int, variant: str, *, updates: bool) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    options: dict[str, Any] = {"batches_per_epoch": BATCHES, "seed": 5, "prefetch": PREFETCH[variant]}
    for name in DRAWN[variant]:
        sampler = SAMPLERS[name]
        data = gear.ReplayDataset(
            shards,
            **nested(
                {"batch_size": rows, "windows": WINDOWS[stage], "sampler": sampler, "copy": True, **options}
            ),
        )
        found[name] = []
        for number, batch in enumerate(data):
            found[name].append({key: batch[key] for key in NAMES if key in batch})
            if updates and isinstance(sampler, (gear.Prioritized, gear.TopK)):
                data.update_priority(batch, new_priorities(batch, number))
    return found


def full_stage(placement: Placement, table: gear.Table) -> tuple[str, int]:
    """The error of a stage without room, and how many trajectories this rank's table has after it."""
    before, message = len(table), ""
    dist.barrier()
    if dist.get_rank() == 0:
        message = error_of(lambda: placement.extend([trajectory(9000 + i, 1) for i in range(80)]))
    dist.barrier()
    return message, len(table) - before


def error_of(act: Callable[[], object]) -> str:
    with pytest.raises(gear.errors.GearError) as error:
        act()
    return str(error.value)


def pipeline_rank(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": errors_of_meshes(rank)}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    stage = rank % 2
    for variant, node in (("one", "here"), ("two", f"node-{stage}")):
        table = table_of(stage, variant, max_trajectories=90 if stage else 60)
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
                found[variant].update(draw_all(shards, stage, ROWS // 2, variant, updates=stage == 1))
                found[variant]["full"] = full_stage(placement, table)
                found[variant]["leftovers"] = leftovers(shards, table, stage)
                if variant == "two":
                    found["moved"] = moving(shards, table)
                dist.barrier()
        finally:
            table.unlink()
    return found


def leftovers(shards: Shards, table: gear.Table, stage: int) -> tuple[list[int], int]:
    """Duplicates that `rebalance` removes at once, and those that it removes after the grace period."""
    data = gear.ReplayDataset(shards, batch_size=1, windows=WINDOWS[stage], prefetch=0)
    told = shards.exchange.share({"ids": table.ids(table.indices()).tolist()})
    if dist.get_rank() == 1:  # as of a rank that was killed while it moved here
        part = {name: values for name, values in trajectory(1, 2).items() if name in COLUMNS[1]}
        table.extend_as([part], ids=[told[2]["ids"][3]])
    removed = [data.rebalance(max_bytes=0)["leftovers"]]
    table._engine.index.arrays.created[:] -= 31 * 10**9
    removed.append(data.rebalance(max_bytes=0)["leftovers"])
    table.check_valid()
    return removed, len(table)


def errors_of_meshes(rank: int) -> list[str]:
    small = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("data",), _init_backend=False)
    strange = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    table, evicting = table_of(rank == 3, "wrong"), table_of(rank % 2, "evicting", on_full="evict_oldest")
    try:
        meshes = (strange, [0, 1], *([small] if rank == 3 else []), None)
        messages = [error_of(lambda mesh=mesh: Shards(table, mesh=mesh, timeout=30)) for mesh in meshes]
        with Shards(evicting, mesh=mesh, timeout=30) as shards:
            messages.append(error_of(lambda: Placement(shards)))
            dist.barrier()
    finally:
        table.unlink()
        evicting.unlink()
    return messages


def moving(shards: Shards, table: gear.Table) -> Any:
    """All begin in one shard, of which half moves while training goes on."""
    found = []
    table.remove(table.indices())
    dist.barrier()
    placement = Placement(shards, "local")
    if dist.get_rank() == 1:
        placement.extend([trajectory(i, i % 7 + 1) for i in range(30)], priority=1.0)
    dist.barrier()
    options: dict[str, Any] = {"sampler": gear.Prioritized(), "prefetch": 1, "batches_per_epoch": 6}
    data = gear.ReplayDataset(
        shards, **nested({"batch_size": 8, "windows": gear.Window(1), "copy": True, **options})
    )
    for number, batch in enumerate(data):
        found.append(batch["act"].squeeze(1).clone())
        data.update_priority(batch, batch["act"].squeeze(1) % 5 + 1.0)
        if number == 2:
            told = data.rebalance()
    return found, told, sorted(table.ids(table.indices()).tolist())


def alone(stage: int, ids: list[Any]) -> Shards:
    """The tables of one stage, all in this process, as the ranks have filled them with trajectories of these ids."""
    tables = [table_of(stage) for _ in range(2)]
    for rank in range(4):
        for i, (each, priority) in enumerate(zip(*made_by(rank), strict=True)):
            table, known = tables[(rank + i) % 2], ids[(rank + i) % 2]
            part = {name: each[name] for name in table.schema}
            table.extend_as([part], priority=priority, ids=known[len(table)][None])
    return Shards(tables)


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run_ranks(4, pipeline_rank)


@pytest.mark.parametrize("variant", DRAWN)
def test_each_stage_gets_its_columns_of_what_one_process_draws(ranks: Ranks, variant: str) -> None:
    ids = [found[variant]["ids"] for found in ranks]
    for data in range(2):
        assert sorted(ids[2 * data]) == sorted(ids[2 * data + 1])
    everything = np.concatenate((ids[0], ids[2]))
    assert len(np.unique(everything)) == len(everything) == 4 * EACH
    assert set(np.unique(everything & 0xFFFF)) == {0, 1}
    for stage in range(2):
        whole = draw_all(alone(stage, [ids[0], ids[2]]), stage, ROWS, variant, updates=True)
        for name in DRAWN[variant]:
            for number, expected in enumerate(whole[name]):
                parts = [ranks[2 * data + stage][variant][name][number] for data in range(2)]
                assert ("obs", "flag")[1 - stage] not in parts[0]
                assert set(parts[0]) == set(parts[1]) == set(expected)
                pairs = {
                    key: ([part[key] for part in parts], expected[key]) for key in expected if key != "mask"
                }
                pairs |= {
                    c: ([part["mask"][c] for part in parts], expected["mask"][c]) for c in expected["mask"]
                }
                for key, (some, all_rows) in pairs.items():
                    where = f"{name}, stage {stage}, batch {number}, {key}"
                    assert torch.equal(torch.cat(some), all_rows), where


def test_updates_of_the_last_stage_change_what_is_drawn(ranks: Ranks) -> None:
    ids = [ranks[2 * data]["two"]["ids"] for data in range(2)]
    still = draw_all(alone(0, ids), 0, ROWS, "two", updates=False)
    for name in ("prioritized", "top", "distinct"):
        learnt = torch.cat([ranks[rank]["two"][name][-1]["index"] for rank in (0, 2)])
        assert not torch.equal(learnt, still[name][-1]["index"])


def test_a_stage_without_room_leaves_nothing_in_the_others(ranks: Ranks) -> None:
    for variant, more in (("one", 0), ("two", 40)):
        message = ranks[0][variant]["full"][0]
        assert "stage 0 (table 'gear-test-" in message
        assert "The table is full" in message
        # What another node has stored is not drawn, and cannot be taken back from here.
        assert [found[variant]["full"][1] for found in ranks] == [0, more, 0, more]
        assert all(found[variant]["leftovers"] == ([1, 2 * more], 2 * EACH) for found in ranks)


def test_meshes_and_tables_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks):
        strange, number, *small, different, evicting = found["errors"]
        expected = "mesh has the dimensions ['data', 'expert']; expected mesh_dim_names out of"
        assert strange.startswith(expected)
        assert number == "mesh is [0, 1]; expected a torch.distributed.DeviceMesh."
        assert small == (["Rank 3 is not in the mesh, which has the ranks [0, 1, 2]."] if rank == 3 else [])
        assert different.startswith("The table of rank 3 has the columns [['task'")
        assert "has on_full='evict_oldest'; stages that evict independently" in evicting


def test_all_stages_move_the_same_trajectories(ranks: Ranks) -> None:
    moved = [found["moved"] for found in ranks]
    for first, last in (moved[:2], moved[2:]):
        assert first[2] == last[2]
        assert all(torch.equal(a, b) for a, b in zip(first[0], last[0], strict=True))
    told = moved[0][1]
    assert told["before"][1] == 0
    assert told["moved"] > 10
    assert abs(told["after"][0] - told["after"][1]) <= 8
    everything = moved[0][2] + moved[2][2]
    assert len(everything) == len(set(everything)) == 30
