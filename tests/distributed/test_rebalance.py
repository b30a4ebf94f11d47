"""Trajectories move between shards while training goes on: nothing is lost, nothing is drawn otherwise."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import mostly_long
from distributed_common import check_batch, filled, run_ranks, same_rows, trajectory
from options_common import nested

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed.migration import Mover
from gear_loader.distributed.rebalance import Rebalance, plan

WINDOWS = gear.Window(5, offset=-2)
COUNTS = [40, 4, 10, 2]
ROWS = 32
SAMPLERS: dict[str, gear.samplers.Sampler] = {
    "prioritized": gear.Prioritized(),
    "steps": gear.Prioritized(unit="step", normalize="table"),
    "top": gear.TopK(),
    "fifo": gear.Fifo(),
    "uniform": gear.Uniform(),
}
BY_PRIORITY = ("prioritized", "steps", "top")


def dataset(shards: Shards, name: str, rows: int = ROWS, **options: Any) -> gear.ReplayDataset:
    options = {"batches_per_epoch": 8, "seed": 5, "copy": True, "prefetch": 0} | options
    return gear.ReplayDataset(
        shards, **nested({"batch_size": rows, "windows": WINDOWS, "sampler": SAMPLERS[name], **options})
    )


def new_priorities(batch: dict[str, Any], number: int) -> torch.Tensor:
    """Some that a row's content and the batch's number decide."""
    return ((batch["act"].amax(dim=1) // 1000 * 7 + batch["anchor"] * 3 + number) % 11 + 0.25).float()


def held(tables: dict[int, gear.Table]) -> dict[int, dict[int, int]]:
    """id -> number of the trajectory, of each shard; every value is checked."""
    found: dict[int, dict[int, int]] = {}
    for shard, table in tables.items():
        found[shard] = {}
        slots = table.indices()
        for one, slot in zip(table.ids(slots).tolist(), slots.tolist(), strict=True):
            stored = table[slot]
            number = int(next(v for k, v in stored.items() if k == "act")[0]) // 1000
            for name, values in trajectory(number, len(stored["act"])).items():
                assert name not in stored or torch.equal(stored[name], torch.as_tensor(values))
            found[shard][one] = number
        table.check_valid()
    return found


def leaves_by_id(data: gear.ReplayDataset) -> dict[int, list[float]]:
    """Learnt leaves of all trajectories of all shards; a trajectory that is there twice fails."""
    state = data.state_dict()["priorities"]
    counts = state["lengths"] if data.sampler.unit == "step" else torch.ones_like(state["lengths"])
    parts = [part.tolist() for part in torch.split(state["leaves"], counts.tolist())]
    ids = state["ids"].tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, parts, strict=True))


def train(
    data: gear.ReplayDataset, name: str, *, moves: dict[int, dict[str, Any]]
) -> tuple[list[Any], list[Any]]:
    """Batches with updates; `rebalance` before the batches that `moves` names, and its results."""
    batches, told = [], []
    last: list[Any] = []
    iterator = iter(data)
    for number in range(8):
        if number in moves:
            told.append(data.rebalance(**moves[number]))
        batch = next(iterator)
        check_batch(batch, WINDOWS)
        batches.append({k: batch[k].numpy().copy() for k in ("act", "anchor", "shard", "index")})
        if name in BY_PRIORITY:
            last.append((batch, new_priorities(batch, number)))
            if len(last) > 2:  # one that was drawn before the move, and is given after it
                data.update_priority(*last.pop(0))
    list(iterator)
    return batches, told


def test_plan_ends_within_the_tolerance() -> None:
    random = np.random.default_rng(3)
    for size in range(1, 12):
        loads = random.integers(0, 1000, size).astype(np.float64)
        for flow in plan(loads, 0.0):
            loads[flow.source] -= flow.amount
            loads[flow.target] += flow.amount
        np.testing.assert_allclose(loads, loads.mean())
    assert plan(np.array([100.0, 104.0, 96.0]), 0.05) == []
    assert plan(np.zeros(3), 0.05) == []


# ---------------------------------------------------------------- one process


def priorities_by_id(tables: dict[int, gear.Table]) -> dict[int, float]:
    return {
        one: float(table._engine.reader().arrays.priority[slot])
        for table in tables.values()
        for one, slot in zip(table.ids(table.indices()).tolist(), table.indices().tolist(), strict=True)
    }


BY = [("steps", "steps"), ("steps", "mass"), ("prioritized", "mass"), ("top", "steps"), ("fifo", "steps")]


@pytest.mark.parametrize(("name", "by"), BY)
def test_shards_become_equal_and_keep_what_was_learnt(name: str, by: Any) -> None:
    shards = Shards([filled(None, shard, COUNTS) for shard in range(4)])
    data = dataset(shards, name)
    for number in range(4):
        batch = data.sample()
        if name in BY_PRIORITY:
            data.update_priority(batch, new_priorities(batch, number))
    before = held(shards.own)
    learnt = leaves_by_id(data) if name in BY_PRIORITY else {}
    table_priorities = priorities_by_id(shards.own)
    told = data.rebalance(by=by)
    after = held(shards.own)
    together = {one: number for part in before.values() for one, number in part.items()}
    assert {one: number for part in after.values() for one, number in part.items()} == together
    assert sum(len(part) for part in after.values()) == len(together)
    assert told["moved"] == sum(len(set(part) - set(before[shard])) for shard, part in after.items())
    assert told["before"].sum() == pytest.approx(told["after"].sum(), rel=1e-12)
    assert told["moved"] > 5
    assert np.ptp(told["after"]) < 0.35 * np.ptp(told["before"])
    if by == "steps":
        assert told["after"].tolist() == [table.num_steps for table in shards.own.values()]
        assert np.abs(told["after"] - told["after"].mean()).max() < 23
    if learnt:
        assert leaves_by_id(data) == learnt  # bit for bit
    assert priorities_by_id(shards.own) == table_priorities
    assert data.rebalance(by=by, tolerance=0.5)["moved"] == 0
    check_batch(data.sample(), WINDOWS)


def test_no_more_is_moved_than_allowed_or_than_there_is_room_for() -> None:
    shards = Shards([filled(None, 0, [60]), filled(None, 1, [0, 0], max_steps=80, block_steps=8)])
    data = dataset(shards, "uniform")
    step = shards.table.schema.step_bytes
    told = data.rebalance(max_bytes=30 * step)
    assert 0 < told["steps"] <= 30
    assert told["bytes"] == told["steps"] * step
    told = data.rebalance()
    assert told["moved"] > 0
    assert shards.own[1].num_steps <= 80
    assert len(shards.own[0]) + len(shards.own[1]) == 60
    assert data.rebalance(max_bytes=0)["moved"] == 0


def test_trajectories_that_share_steps_stay() -> None:
    shards = Shards([filled(None, shard, [6, 0]) for shard in range(2)])
    source = shards.table
    alone = set(source.ids(source.indices()).tolist())
    with source.writer(chunk_steps=16, overlap_steps=8) as writer:
        rows = trajectory(50, 80)
        writer.trajectory = {"task": rows.pop("task")}
        for step in range(80):
            writer.append({name: values[step] for name, values in rows.items()})
    shared = set(source.ids(source.indices()).tolist()) - alone
    assert len(shared) > 5
    data = dataset(shards, "steps")
    data.sample()
    total = sum(sum(part) for part in leaves_by_id(data).values())
    assert data.rebalance()["moved"] == 6
    assert set(source.ids(source.indices()).tolist()) == shared
    assert sum(sum(part) for part in leaves_by_id(data).values()) == pytest.approx(total)


def test_the_oldest_are_still_the_oldest() -> None:
    shards = Shards([filled(None, 0, [0]), filled(None, 1, [0, 0])])
    for number in range(20):
        shards.own[0].add(trajectory(number, 3))
    for number in range(20, 24):
        shards.own[1].add(trajectory(number, 3))
    data = dataset(shards, "fifo", rows=10)
    data.rebalance()
    order = {**held(shards.own)[0], **held(shards.own)[1]}
    expected = [order[one] for one in sorted(order)][:10]
    batch = data.sample()
    assert (batch["act"].amax(dim=1) // 1000).tolist() == expected


def test_options_are_checked() -> None:
    table = filled(None, 0, [5])
    shards = Shards([table])
    data = dataset(shards, "uniform")
    for options, message in (
        ({"by": "size"}, "by is 'size'; expected 'steps' or 'mass'"),
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"tolerance": 1.0}, "tolerance is 1.0; expected a number from 0 to below 1"),
    ):
        with pytest.raises(gear.errors.SchemaError, match=message):
            data.rebalance(**options)
    plain = gear.ReplayDataset(filled(None, 0, [5]), batch_size=2, windows=WINDOWS)
    subset = dataset(shards, "uniform", subset=lambda sequences: sequences > 1)
    for each in (plain, subset, dataset(shards, "uniform", scope="local")):
        with pytest.raises(gear.errors.SchemaError, match="does not draw over all Shards"):
            each.rebalance()
    assert data.rebalance()["moved"] == 0


# ---------------------------------------------------------------- ranks

MOVES: dict[int, dict[str, Any]] = {2: {"by": "steps"}, 5: {"by": "mass", "max_bytes": 4000}}


VARIANTS = (("prioritized", 2), ("steps", 0))


@contextlib.contextmanager
def shared(rank: int, sizes: Any = (), **options: Any) -> Iterator[Shards]:
    """This rank's table with those of the others; servers find it by its name until it is removed."""
    table = filled(f"gear-test-{os.getppid()}-{rank}", rank, COUNTS, **dict(sizes))
    try:
        with Shards(table, timeout=30, transport="socket", **options) as shards:
            yield shards
            dist.barrier()
    finally:
        table.unlink()


def moving_rank(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, prefetch in VARIANTS:
        # Half of the ranks are another node.
        node = f"node-{rank * 2 // world}" if name == "steps" else None
        with shared(rank, node=node) as shards:
            data = dataset(shards, name, ROWS // world, prefetch=prefetch)
            batches, told = train(data, name, moves=MOVES)
            found[name] = (batches, told, leaves_by_id(data), held({rank: shards.table}))
    if world == 2:
        found["writer"] = while_a_writer_adds(rank)
        found["failed"] = while_one_fails(rank)
    return found


def while_one_fails(rank: int) -> Any:
    """Rank 0 fails when it has copied."""

    def copy(mover: Mover, *args: Any) -> None:
        _COPY(mover, *args)
        raise RuntimeError("no")

    with shared(rank) as shards:
        data, table = dataset(shards, "prioritized"), shards.table
        before = held({rank: table})
        Mover.copy = copy  # type: ignore[method-assign]
        try:
            with pytest.raises((RuntimeError, gear.errors.RankError)) as error:
                data.rebalance()
        finally:
            Mover.copy = _COPY  # type: ignore[method-assign]
        dist.barrier()
        same = held({rank: table}) == before
        dist.barrier()
        return str(error.value), same, data.rebalance()["moved"]


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_copies_of_an_interrupted_migration_are_gone_before_the_next_draw(name: str, caplog: Any) -> None:
    shards = Shards([filled(None, shard, [9, 5]) for shard in range(2)])
    slots = shards.own[0].indices()[3:7]
    copied = [shards.own[0][slot] for slot in slots.tolist()], shards.own[0].ids(slots).tolist()
    shards.own[1].extend_as(copied[0], ids=copied[1])
    data = dataset(shards, name)
    if name in ("prioritized", "uniform"):
        data.sample()
    else:
        next(iter(data))
    assert [len(part) for part in held(shards.own).values()] == [9, 5]
    assert "Removed 4 duplicates of an interrupted migration" in caplog.text
    caplog.clear()
    dataset(shards, name).sample()
    assert "duplicates" not in caplog.text
    shards.own[1].extend_as(copied[0], ids=copied[1])
    assert [data.rebalance(max_bytes=0)["leftovers"] for _ in range(2)] == [4, 0]
    assert [len(part) for part in held(shards.own).values()] == [9, 5]


_COPY = Mover.copy


def killed_rank(rank: int, world: int, parent: int) -> Any:
    """Rank 0 dies when all has been copied, and nothing removed."""
    table = filled(f"gear-test-{parent}-killed-{rank}", rank, COUNTS)
    shards = Shards(table, timeout=30, transport="socket")
    data = dataset(shards, "prioritized")
    if rank == 0:
        Rebalance._hand_over = lambda *_: os._exit(1)  # type: ignore[method-assign, assignment]
    with pytest.raises(gear.errors.RankError) as error:
        data.rebalance()
    shards.close()
    return str(error.value)


def while_a_writer_adds(rank: int) -> Any:
    stop, told = threading.Event(), []

    def write(table: gear.Table) -> None:
        number = 1000 * (rank + 1)
        while not stop.wait(0.002):
            table.add(trajectory(number, number % 9 + 1), priority=1.0)
            number += 1

    with shared(rank, {"on_full": "evict_oldest", "max_steps": 600}) as shards:
        writer = threading.Thread(target=write, args=(shards.table,))
        try:
            data = dataset(shards, "prioritized", batches_per_epoch=30, prefetch=2)
            if rank == 1:
                writer.start()
            for number, batch in enumerate(data):
                check_batch(batch, WINDOWS)
                data.update_priority(batch, new_priorities(batch, number))
                if number % 6 == 5:
                    told.append(data.rebalance(tolerance=0.0))
        finally:
            stop.set()
        if rank == 1:
            writer.join()
        dist.barrier()
        data.rebalance(max_bytes=0)
        data.sample()  # a state holds what has been seen
        return told, leaves_by_id(data), held({rank: shards.table})[rank]


@pytest.mark.parametrize("world", mostly_long([2, 4], 2))
def test_ranks_draw_after_a_move_what_one_process_draws(world: int) -> None:
    ranks = run_ranks(world, moving_rank)
    for name, prefetch in VARIANTS:
        alone = Shards([filled(None, shard, COUNTS) for shard in range(world)])
        data = dataset(alone, name, prefetch=prefetch)
        batches, told = train(data, name, moves=MOVES)
        parts = [found[name] for found in ranks]
        same_rows([part[0] for part in parts], batches, name)
        assert all(parts[0][2] | part[2] == parts[0][2] for part in parts)  # each has its shard's, rank 0 all
        assert leaves_by_id(data) == parts[0][2]
        assert data.num_stale == 0
        everything = {shard: ids for part in parts for shard, ids in part[3].items()}
        assert everything == held(alone.own)
        for part in parts:
            assert [t["moved"] for t in part[1]] == [t["moved"] for t in told]
        assert told[0]["moved"] > 3
    if world == 2:
        told, leaves, _ = ranks[0]["writer"]
        assert sum(each["moved"] for each in told) > 0
        ids = [one for found in ranks for one in found["writer"][2]]
        assert len(set(ids)) == len(ids)
        assert set(ids) == set(leaves)
        numbers = [number for found in ranks for number in found["writer"][2].values()]
        assert len(set(numbers)) == len(numbers)
        failed = [found["failed"] for found in ranks]
        assert failed[0][0] == "no"
        assert failed[1][0] == "Rank 0 could not copy trajectories: RuntimeError: no"
        assert all(same and moved > 3 for _, same, moved in failed)


def test_a_rank_that_is_killed_loses_nothing() -> None:
    messages = run_ranks(2, killed_rank, os.getpid(), dies=(0,))
    assert messages[1].startswith("Rank 0 did not send ")
    tables = [gear.Table.attach(f"gear-test-{os.getpid()}-killed-{rank}") for rank in range(2)]
    for table in tables:
        table.unlink()
    shards = Shards(tables)
    everything = sorted(held({0: filled(None, 0, COUNTS)})[0].values())
    everything += sorted(held({1: filled(None, 1, COUNTS)})[1].values())
    copies = sum(len(table) for table in tables) - len(everything)
    assert copies > 3
    data = dataset(shards, "prioritized")
    data.sample()  # removes them
    assert data.rebalance(max_bytes=0)["leftovers"] == 0
    assert sorted(number for part in held(shards.own).values() for number in part.values()) == everything
    assert data.rebalance()["moved"] > 3
