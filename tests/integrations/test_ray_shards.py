"""Shards that Ray actors own on two nodes: processes are killed while others write and read, then a node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_common import ray_directory
from waiting_common import wait_until

import gear_loader as gear

NUMBER = {"number": gear.Column(torch.int64)}
SIZES = {"max_steps": 8000, "max_trajectories": 4000}
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
TIMEOUT = 240.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes; the driver is on the first."""
    ray = pytest.importorskip("ray", reason="needs pip install '.[ray]'")
    from ray.cluster_utils import Cluster

    with ray_directory() as folder:
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            second = made.add_node(**NODE)
            ray.init(address=made.address, namespace="tests", log_to_driver=False)
            yield ray, made, second, Path(folder)
        finally:
            ray.shutdown()
            made.shutdown()


def numbers_in(shards: Any) -> list[int]:
    found: list[int] = []
    for table in shards.tables:
        rows = table.indices()
        if len(rows):
            found += table.gather(rows, windows=gear.Window(1, squeeze=True))["number"].tolist()
    return sorted(found)


def is_written(ray: Any, replay: Any) -> bool:
    found = ray.get([shard.stats.remote() for shard in replay.shards])
    return not any(stats.disk.unwritten_trajectories for stats in found)


def test_shards_come_back_with_what_was_committed(cluster: Any) -> None:
    ray, nodes, second, folder = cluster
    from gear_loader.integrations.ray import Replay, ReplayShards, connect

    disk = gear.Disk(folder / "disk", sync_seconds=0.1)
    replay = ReplayShards(NUMBER, num_shards=2, disk=disk, timeout=TIMEOUT, **SIZES)
    places = ray.get([shard.where.remote() for shard in replay.shards])
    here = ray.get_runtime_context().get_node_id()
    assert len({place["node"] for place in places}) == 2
    away = next(number for number, place in enumerate(places) if place["node"] != here)
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(places[away]["node"], soft=True)
    forgets = Replay.options(name="forgets", num_cpus=0.001, scheduling_strategy=there).remote(
        NUMBER, timeout=TIMEOUT, **SIZES
    )

    def write(first: int, count: int) -> list[str]:  # nested, so that Ray sends it as code
        from gear_loader.integrations.ray import connect

        with connect("ray://replay", timeout=240.0) as shards:
            for table in shards.tables:
                with table.writer() as writer:
                    for number in range(count):
                        writer.append(number=first + number)
                        writer.commit()
                first += count
            return [type(table).__name__ for table in shards.tables]

    task = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(write)
    with connect("ray://replay", timeout=TIMEOUT) as shards:
        assert [type(table).__name__ for table in shards.tables].count("Table") == 1
        shards.extend([{"number": torch.tensor([0])}])
        dataset = gear.ReplayDataset(
            shards, batch_size=8, windows=gear.Window(1), batches_per_epoch=float("inf"), device="cpu"
        )
        batches = iter(dataset)
        # Owners die while two tasks write into both shards.
        running = [task.remote(1 + 2000 * number, 1000) for number in range(2)]
        wait_until(lambda: len(shards) > 100, "the first trajectories", patience=TIMEOUT)
        for shard in replay.shards:
            ray.kill(shard, no_restart=False)
        kinds = ray.get(running)
        assert {kind for each in kinds for kind in each} == {"Table", "RemoteTable"}
        assert numbers_in(shards) == list(range(4001))
        for _ in range(4):
            next(batches)
        again = ray.get([shard.where.remote() for shard in replay.shards])
        assert [each["node"] for each in again] == [each["node"] for each in places]

        with gear.connect("ray://forgets") as table:
            table.extend([{"number": torch.tensor([0])}])
        wait_until(lambda: is_written(ray, replay), "the disks", patience=TIMEOUT, pause=0.2)
        nodes.remove_node(second, allow_graceful=False)
        # Processes of a node may live on for a moment after it.
        wait_until(
            lambda: all(each["node"] == here for each in ray.get([e.where.remote() for e in replay.shards])),
            "the shard of the lost node",
            patience=TIMEOUT,
            pause=0.5,
        )
        assert numbers_in(shards) == list(range(4001))
        for _ in range(4):
            assert next(batches)["shard"].numel() == 8
        wait_until(
            lambda: ray.get(forgets.where.remote())["node"] == here, "the other actor", patience=TIMEOUT
        )
        assert ray.get(forgets.stats.remote()).num_trajectories == 0

        # The table that was brought back goes on to the disk, also after one more death.
        ray.kill(replay.shards[away], no_restart=False)
        shards.tables[away].extend([{"number": torch.tensor([4001])}])
        assert numbers_in(shards) == list(range(4002))
        paths = replay.export(folder / "export")
        assert sum(_rows(path) for path in paths) == 4002
        dataset.close()
    replay.close()
    ray.get(forgets.close.remote())
    assert not [name for name in os.listdir("/dev/shm") if name.endswith(here) or places[0]["name"] in name]
    with gear.Table.load(folder / "disk" / f"shard-{away}-of-2") as table:
        assert 4001 in [int(table[int(index)]["number"]) for index in table.indices()]


def _rows(path: str) -> int:
    parquet = pytest.importorskip("pyarrow.parquet")
    count: int = parquet.ParquetFile(path).metadata.num_rows
    return count
