"""Features over tiers: own node ids, device cache, copies in host memory, disk, and tables of other ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import run_ranks
from options_common import nested_table
from table_common import COLUMNS, fresh_name
from test_features import check, columns
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.errors import LockTimeoutError, RankError, SchemaError, UnknownNodeError
from gear_loader.graph import place

WORLD, PER_RANK = 2, 40


def of_nodes(nodes: Any) -> dict[str, torch.Tensor]:
    """The rows of nodes, in their order."""
    whole = columns(1 + int(np.max(nodes, initial=0)))
    return {name: values[torch.as_tensor(np.asarray(nodes))] for name, values in whole.items()}


def counted(features: gear.Features) -> dict[str, int]:
    """Reads of the tiers that had some."""
    return {tier: count for tier, count in vars(features.reads).items() if count}


def test_node_ids_of_rows() -> None:
    with gear.Table.create(COLUMNS, max_steps=100, max_trajectories=4) as table:
        nodes = np.array([7, 0, 30, 2, 11])
        table.add(of_nodes(nodes))
        features = gear.Features(table, nodes=nodes)
        assert features.num_nodes == 31
        check(features[[30, 7, 7, 0]], [30, 7, 7, 0])
        for wrong in ([1], [-1], [31], [7, 5]):
            with pytest.raises(
                UnknownNodeError, match=r"^ids has node (1|-1|31|5), which the table does not hold"
            ):
                features[wrong]
        with pytest.raises(SchemaError, match=r"^nodes has a node twice"):
            gear.Features(table, nodes=[1, 2, 1])
        with pytest.raises(
            SchemaError, match=r"^nodes has 6 ids from 0 on; expected one, at least 0, for each of the 5"
        ):
            gear.Features(table, nodes=range(6))


def test_the_most_read_rows_are_copied_and_removed_ones_are_not_served() -> None:
    with gear.Table.create(COLUMNS, max_steps=200, max_trajectories=10, block_steps=4) as table:
        first = table.add(columns(50))
        table.add(columns(50, 50))
        features = gear.Features(table)
        chance = np.random.default_rng(0).permutation(100) / 100.0
        moved = features.place(chance, device_bytes=30 * features.row_bytes + 1, host_bytes="1GiB")
        assert (moved.device_rows, moved.device_bytes) == (30, 30 * features.row_bytes)
        assert moved.host_rows == 0  # all rows lie in memory of this machine
        hottest = np.argsort(-chance)[:30]
        check(features[hottest], hottest)
        assert counted(features) == {"device": 30}
        ids = np.random.default_rng(1).integers(0, 100, 500)
        check(features[ids], ids)
        hits = int(np.isin(ids, hottest).sum())
        assert counted(features) == {"device": 30 + hits, "host": 500 - hits}
        table.add(columns(10, 100))
        check(features[[109, 3]], [109, 3])
        table.remove(first)
        kept = [int(node) for node in hottest if node >= 50]
        check(features[kept], kept)
        for node in hottest[hottest < 50]:
            with pytest.raises(UnknownNodeError, match=rf"^ids has node {node}, which"):
                features[[int(node)]]
        with pytest.raises(UnknownNodeError, match=r"^ids has nodes -5, 110, "):
            features[[110, kept[0], -5]]
        chance = np.zeros(110)
        assert features.place(chance, device_bytes="1MiB").device_rows == 0
        check(features[kept], kept)
        assert counted(features) == {"host": len(kept)}


def test_invalid_placement_changes_nothing() -> None:
    with gear.Table.create(COLUMNS, max_steps=20, max_trajectories=1) as table:
        table.add(columns(10))
        features = gear.Features(table)
        features.place(np.ones(10), device_bytes=4 * features.row_bytes)
        for chance, message in [
            (np.ones(9), r"^probabilities is float64 \[9\]; expected floats \[10\]"),
            (np.full(10, np.nan), r"^probabilities has values that are negative or not finite"),
        ]:
            with pytest.raises(SchemaError, match=message):
                features.place(chance)
        with pytest.raises(SchemaError, match=r"^device_bytes is 'much'; expected a number of bytes"):
            features.place(np.ones(10), device_bytes="much")
        features[[0, 9]]
        assert counted(features) == {"device": 1, "host": 1}


def test_a_placement_that_cannot_give_priorities_changes_no_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(tmp_path / "disk", "priority") as table:
        table.add(columns(10))
        features = gear.Features(table)
        features.place(np.ones(10), device_bytes=4 * features.row_bytes)
        reads = features.reads

        def locked(*_: Any, **__: Any) -> int:
            raise LockTimeoutError("held by somebody else")

        monkeypatch.setattr(gear.Table, "update_priority", locked)
        with pytest.raises(LockTimeoutError):
            features.place(np.arange(10), device_bytes=4 * features.row_bytes)
        assert features.reads is reads
        features[[0, 3, 9]]
        assert features.reads.device == 2


def test_late_columns_have_no_rows_to_copy() -> None:
    schema = {"x": gear.Column(torch.float32), "later": gear.Column(torch.float32, late=True)}
    with gear.Table.create(schema, max_steps=20, max_trajectories=1) as table:
        assert gear.Features(table).columns == ("x",)
        with pytest.raises(SchemaError, match=r"^columns is 'later'; expected some of \['x'\]"):
            gear.Features(table, "later")


def tiered(path: Path, keep: Any, sync_seconds: float = NEVER, blocks: int = 40) -> gear.Table:
    disk = gear.Disk(path, sync_seconds=sync_seconds, size="1GiB", keep=keep)
    sizes = {"max_steps": 1000, "max_trajectories": 100, "block_steps": 4, "max_blocks": blocks}
    return gear.Table.create(COLUMNS, **nested_table({**sizes, "disk": disk, "timeout": 30.0}))


def test_rows_on_disk(tmp_path: Path) -> None:
    with tiered(tmp_path / "disk", "newest", blocks=100) as table:
        for number in range(20):
            table.add(columns(5, 5 * number))
        table.save(tmp_path / "disk")
        features = gear.Features(table)
        assert spill(table, table.indices()[[0, 2, 3, 11]]) == 4
        ids = np.random.default_rng(0).integers(0, 100, 300)
        check(features[ids], ids)
        on_disk = np.isin(ids // 5, [0, 2, 3, 11])
        assert counted(features) == {"disk": int(on_disk.sum()), "host": int((~on_disk).sum())}
        assert torch.equal(gear.Features(table, "check")[[0, 99, 1]], of_nodes([0, 99, 1])["check"])
        with Shards([table]) as shards:
            check(gear.Features(shards)[ids], ids)
        # Those that are read most come into memory: the first four of the nodes on disk.
        chance = np.zeros(100)
        chance[[10, 11, 12, 13, 55]] = 5, 4, 3, 2, 1
        moved = features.place(chance, host_bytes=4 * features.row_bytes)
        assert (moved.device_rows, moved.host_rows, moved.disk_trajectories) == (0, 4, 20)
        check(features[[10, 13, 55, 99, 10]], [10, 13, 55, 99, 10])
        assert counted(features) == {"replica": 3, "disk": 1, "host": 1}
        table.remove(int(table.indices()[2]))
        with pytest.raises(UnknownNodeError, match=r"^ids has node 10, which"):
            features[[10]]


def test_the_most_read_trajectories_stay_in_memory(tmp_path: Path) -> None:
    """40 blocks hold 20 trajectories of 5 nodes at most; those that are read most come back from disk."""
    with tiered(tmp_path / "disk", "priority", sync_seconds=0.05) as table:
        for number in range(60):
            table.add(columns(5, 5 * number), priority=1.0)
        features = gear.Features(table)
        table.save(tmp_path / "disk")
        assert table._engine.num_spilled >= 40
        before = features.table._engine.index.arrays.extent[table.indices(), 1] < 0
        hot = np.flatnonzero(before)[:8]  # on disk now
        chance = np.full(300, 1e-3)
        chance[(hot[:, None] * 5 + np.arange(5)).reshape(-1)] = 0.9
        assert features.place(chance).disk_trajectories == 60
        ids = (hot[:, None] * 5 + np.arange(5)).reshape(-1)
        end = time.monotonic() + 60
        while True:
            before_reads = features.reads.disk
            check(features[ids], ids)
            if features.reads.disk == before_reads:
                break
            assert time.monotonic() < end, (features.reads, table.stats())
            time.sleep(0.1)
        everything = np.arange(300)
        check(features[everything], everything)


# ---------------------------------------------------------------- several tables


def test_tables_of_one_process() -> None:
    names = [fresh_name() for _ in range(2)]
    tables = [gear.Table.create(COLUMNS, name=name, max_steps=50, max_trajectories=5) for name in names]
    try:
        tables[0].add(columns(20))
        tables[1].add(columns(13, 20))
        with Shards(tables) as shards:
            features = gear.Features(shards)
            assert len(features) == 33
            ids = np.random.default_rng(0).integers(0, 33, 200)
            check(features[ids], ids)
            with pytest.raises(UnknownNodeError, match=r"^ids has node 33, which"):
                features[[1, 33]]
            with pytest.raises(SchemaError, match=r"^nodes was given for several tables of one process"):
                gear.Features(shards, nodes=range(20))
    finally:
        for table in tables:
            table.unlink()
            table.close()


def plan() -> tuple[np.ndarray, Any]:
    """Rank 0 reads the even nodes, rank 1 the odd ones, all the same few most of all."""
    size = WORLD * PER_RANK - 10
    chance = np.random.default_rng(0).random((WORLD, size)) / 100 + 0.1
    chance[0, 1::2] /= 5
    chance[1, 0::2] /= 5
    chance[:, :10] = 3.0
    return chance, place(chance, capacity=PER_RANK, replicated=10)


def rank_with_features(rank: int, world: int, transport: str) -> dict[str, Any]:
    chance, placement = plan()
    nodes = placement.rows(rank)
    name = f"gear-features-{os.getppid()}-{rank}"
    table = gear.Table.create(COLUMNS, name=name, max_steps=100, max_trajectories=20, block_steps=8)
    found: dict[str, Any] = {}
    try:
        for part in np.array_split(nodes, 3):
            table.add(of_nodes(part))
        with Shards(table, node=f"node-{rank}", transport=transport, timeout=90) as shards:
            features = gear.Features(shards, nodes=nodes)
            size = chance.shape[1]
            assert len(features) == size
            check(features[np.arange(size)], range(size))
            found["all"] = counted(features)
            ids = np.random.default_rng(rank).choice(size, 2000, p=chance[rank] / chance[rank].sum())
            check(features[ids], ids)
            found["far"] = features.reads.remote - found["all"].get("remote", 0)
            moved = features.place(chance[rank], host_bytes=12 * features.row_bytes)
            assert moved.host_rows == 12
            check(features[ids], ids)
            found["reads"] = counted(features)
            with pytest.raises(UnknownNodeError, match=rf"^ids has node {size}, which"):
                features[[0, size]]
            shards.exchange.barrier()
            if rank == 1:
                table.remove(table.indices()[0])
            shards.exchange.barrier()
            if rank == 0:
                own = set(nodes.tolist())
                gone = next(int(node) for node in placement.rows(1)[:20] if int(node) not in own)
                features.place(np.zeros(size))
                with pytest.raises(UnknownNodeError, match=rf"^ids has node {gone}, which"):
                    features[[gone]]
            shards.exchange.barrier()
            with pytest.raises((SchemaError, RankError)) as error:
                gear.Features(shards)
            found["refused"] = str(error.value)
    finally:
        table.unlink()
        table.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("transport", ["socket", "nixl"])
def test_rows_of_other_nodes(transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12")
    ranks = run_ranks(WORLD, rank_with_features, transport)
    chance, placement = plan()
    size = chance.shape[1]
    for rank, found in enumerate(ranks):
        own = len(placement.rows(rank))
        assert found["all"] == {"host": own, "remote": size - own}
        reads = found["reads"]
        assert sum(reads.values()) == 2000
        assert reads["replica"] > 0
        assert reads["replica"] + reads["remote"] == found["far"]
        assert "The table holds 2 of the trajectories 0 to 2: others have been removed" in found["refused"]
        # The plan has each rank's own reads near: a random half would leave about half of the rest far.
        assert found["far"] < 0.2 * 2000
