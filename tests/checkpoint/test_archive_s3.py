"""Archives of disk tiers on a server of the S3 protocol that fails at each request, or whose client is killed there."""

from __future__ import annotations

import glob
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import needs
from object_store import ObjectStore, object_store
from table_common import fresh_name
from tier_common import spill
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.checkpoint import behind, bucket
from gear_loader.checkpoint.archive import ARCHIVE_NAME
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.manifest import read_manifest
from gear_loader.errors import CheckpointError
from gear_loader.utils import addresses

fsspec = pytest.importorskip("fsspec")
needs("s3fs", "moto", "flask_cors")  # the last of moto's server

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
WIDTH = 1 << 13
COLUMNS = {"number": gear.Column(torch.int64), "wide": gear.Column(torch.float32, (WIDTH,))}
COUNT = 3
LARGE = 170
"""Steps of a trajectory that is uploaded in parts."""


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> Iterator[None]:
    """The library's own retries are what is tested, for two seconds; the sizes of parts are the least of S3."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    _be_impatient(monkeypatch.setattr)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield
    store.plan()


def _be_impatient(set_to: Any) -> None:
    set_to(fsspec.get_filesystem_class("s3"), "retries", 1)
    set_to(addresses, "DEADLINE_SECONDS", 2.0)
    set_to(bucket, "_PART_BYTES", 5 << 20)
    set_to(behind, "_ARCHIVED_FROM", 0.0)  # everything is moved


def disk_at(path: Path, address: str) -> gear.Disk:
    return gear.Disk(path, sync_seconds=0.05, size="1GiB", archive=address)


def new_table(path: Path, address: str, **options: Any) -> gear.Table:
    given = {"max_steps": 1000, "max_trajectories": 20, "block_steps": 10, **options}
    return gear.Table.create(COLUMNS, disk=disk_at(path, address), memory=gear.Memory(max_blocks=50), **given)


def add(table: gear.Table, *numbers: int, steps: int = 10) -> None:
    for number in numbers:
        wide = np.full((steps, WIDTH), number, np.float32)
        table.add({"number": np.full(len(wide), number), "wide": wide})


def numbers_in(table: gear.Table) -> list[int]:
    """The numbers of the trajectories, all of whose values are right."""
    found = []
    for index in table.indices().tolist():
        values = table[index]
        found.append(int(values["number"][0]))
        assert (values["wide"] == found[-1]).all()
    return found


def segments_of(path: Path) -> dict[str, bool]:
    """Names of segments of the manifest, and whether each is in the archive."""
    with Directory.open(str(path)) as directory:
        return {each.name: bool(each.archive) for each in read_manifest(directory).segments}


def is_moved(path: Path) -> bool:
    return all(segments_of(path).values()) and not glob.glob(f"{path}/segments/*/*.npy")


def objects_at(address: str) -> set[str]:
    system = fsspec.filesystem("s3", use_listings_cache=False)
    system.invalidate_cache()
    return {f"s3://{each.rpartition('/')[0]}" for each in system.find(address)}


@pytest.mark.parametrize("act", ["cut-body", "403", "half"])
def test_each_request_of_an_upload_may_fail(tmp_path: Path, store: ObjectStore, act: str) -> None:
    """The local files stay until a whole upload is confirmed, and what failed leaves nothing behind."""
    at, count = 0, 1
    while at < count:
        path, address = tmp_path / f"{at}", f"s3://bucket/up-{act}-{at}"
        with new_table(path, address) as table:
            store.plan(at=at, act=act)
            add(table, 0, steps=LARGE)
            table.save(path)
            wait_until(lambda path=path: is_moved(path), patience=60)  # type: ignore[misc]
            count = len(store.seen())
            store.plan()
            spill(table, table.indices())
            assert numbers_in(table) == [0]
            wait_until(lambda a=address, p=path: len(objects_at(a)) == len(segments_of(p)))  # type: ignore[misc]
        shutil.rmtree(path)
        at += 1
    assert at > 6


def fill(environment: dict[str, str], path: Path, address: str, planned: Any) -> None:
    """What the process that is killed does; `environment`: of the test, later than that of the fork server."""
    os.environ.update(environment)
    _be_impatient(setattr)
    with gear.Table.recover(disk_at(path, address)) as table:
        planned.send(None)
        planned.recv()
        add(table, 2)
        table.save(path)
        wait_until(lambda: is_moved(path))
        table.remove(int(table.indices()[0]))
        for number in (3, 4):
            add(table, number)
            table.save(path)
        wait_until(lambda: is_moved(path))
        wait_until(lambda: len(json.loads((path / ARCHIVE_NAME).read_bytes())) == len(segments_of(path)))


def test_the_owner_may_be_killed_at_a_request(tmp_path: Path, store: ObjectStore) -> None:
    context = multiprocessing.get_context("forkserver")  # children share no event loop with this process
    context.set_forkserver_preload([__name__])
    at, killed = 0, True
    while killed:
        path, address = tmp_path / f"{at}", f"s3://bucket/killed-{at}"
        with new_table(path, address) as table:
            add(table, 0, 1)
            table.save(path)
            wait_until(lambda path=path: is_moved(path))  # type: ignore[misc]
        mine, theirs = context.Pipe()
        process = context.Process(target=fill, args=(dict(os.environ), path, address, theirs))
        process.start()
        theirs.close()
        mine.recv()
        store.plan(at=at, act=("kill-body", "kill-lost")[at // 2 % 2], pid=process.pid)
        mine.send(None)
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        assert killed or process.exitcode == 0
        store.plan()
        with gear.Table.recover(disk_at(path, address)) as table:
            after = numbers_in(table)
            assert after in ([0, 1], [0, 1, 2], [1, 2], [1, 2, 3], [1, 2, 3, 4])
            add(table, 5)
            for _ in range(2):
                table.save(path)
            wait_until(lambda path=path: is_moved(path))  # type: ignore[misc]
            table.save(path)
            spill(table, table.indices())
            assert numbers_in(table) == [*after, 5]
            named = {f"{address}/segments/{each}" for each in segments_of(path)}
            wait_until(lambda a=address, n=named: {x.rpartition("-")[0] for x in objects_at(a)} == n)  # type: ignore[misc]
        shutil.rmtree(path)
        at += 2
    assert at > 10


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, store: ObjectStore) -> tuple[Path, str]:
    """A directory all of whose segments are in the archive, and its address."""
    path, address = tmp_path_factory.mktemp("moved"), "s3://bucket/moved"
    with pytest.MonkeyPatch.context() as patch:
        _be_impatient(patch.setattr)
        with new_table(path, address) as table:
            for number in range(COUNT):
                add(table, number)
                table.save(path)
            wait_until(lambda: is_moved(path))
    return path, address


@pytest.mark.parametrize("act", ["half", "429", "403", "404", "slow"])
def test_each_request_of_a_read_may_fail(
    moved: tuple[Path, str], store: ObjectStore, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, address = moved
    monkeypatch.setattr(addresses, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(addresses, "DEADLINE_SECONDS", 5.0)
    with gear.Table.recover(disk_at(path, address)) as table:
        spill(table, table.indices())
        reader: Any = table._engine.tier_reader()
        store.plan()
        assert numbers_in(table) == list(range(COUNT))
        count, failures = len(store.seen()), 0
        assert count >= COUNT * len(COLUMNS)
        for at in range(0, count, 5 if act == "slow" else 1):  # it takes a second
            reader._reset()
            store.plan(at=at, act=act)
            try:
                assert numbers_in(table) == list(range(COUNT))
            except CheckpointError as error:
                assert f"{address}/segments/" in str(error)  # noqa: PT017
                assert "Trajectory " in str(error)  # noqa: PT017
                failures += 1
            store.plan()
            assert len(table) == COUNT
        assert failures == (count if act == "403" else 0)  # after 404 it asks once more


def test_a_store_that_is_away_ends_in_an_error_before_long(
    moved: tuple[Path, str], store: ObjectStore
) -> None:
    path, address = moved
    with gear.Table.recover(disk_at(path, address)) as table:
        spill(table, table.indices())
        store.plan(act="500", times=-1)
        with pytest.raises(
            CheckpointError, match=rf"Trajectory \d+ cannot be read: {address}.*tries in \d s failed"
        ):
            numbers_in(table)
        store.plan()
        assert numbers_in(table) == list(range(COUNT))


def read_attached(name: str) -> None:
    table = gear.Table.attach(name)
    assert numbers_in(table) == list(range(COUNT))
    table.close()


def test_other_processes_read_from_the_archive(moved: tuple[Path, str], store: ObjectStore) -> None:
    path, address = moved
    name = fresh_name()
    with gear.Table.recover(disk_at(path, address), name=name) as table:
        spill(table, table.indices())
        process = multiprocessing.get_context("spawn").Process(target=read_attached, args=(name,))
        process.start()
        process.join()
        assert process.exitcode == 0
        table.unlink()
    with gear.Table.load(path) as copy:
        assert numbers_in(copy) == list(range(COUNT))


def test_requests_of_a_batch(moved: tuple[Path, str], store: ObjectStore) -> None:
    path, address = moved
    with gear.Table.recover(disk_at(path, address)) as table:
        spill(table, table.indices())
        dataset = gear.ReplayDataset(table, batch_size=256, windows=gear.Window(1), device="cpu", prefetch=0)
        store.plan(latency=0.02)
        dataset.sample()
        seen = store.seen()
        assert all(each.startswith("GET") for each in seen)
        assert len(seen) <= 2 * COUNT
