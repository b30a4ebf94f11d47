"""Checkpoints on a server of the S3 protocol that fails at each request, or whose client is killed there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import exhaustive_but, needs
from object_store import ObjectStore, object_store

import gear_loader as gear
from gear_loader.checkpoint import bucket
from gear_loader.errors import CheckpointError
from gear_loader.utils import addresses

fsspec = pytest.importorskip("fsspec")
needs("s3fs", "moto", "flask_cors")  # the last of moto's server

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
COUNT = 21 << 16  # floats of `wide`, which is uploaded in parts
KEPT = 2  # trajectories


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> Iterator[None]:
    """The library's own retries are what is tested, for a second; the sizes of parts are the least of S3."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    monkeypatch.setattr(addresses, "DEADLINE_SECONDS", 1.0)
    monkeypatch.setattr(bucket, "_PART_BYTES", 5 << 20)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield
    store.plan()


def new_table(*numbers: int) -> gear.Table:
    columns = {"wide": gear.Column(torch.float32, (COUNT,))}
    table = gear.Table.create(columns, max_steps=KEPT, max_trajectories=KEPT, on_full="evict_oldest")
    add(table, *numbers)
    return table


def add(table: gear.Table, *numbers: int) -> None:
    for number in numbers:
        table.add({"wide": np.full((1, COUNT), number, np.float32)})


def numbers_at(address: str) -> list[int]:
    """The numbers of the trajectories of a checkpoint, all of whose values are right."""
    with gear.Table.load(address) as table:
        found = []
        for index in table.indices().tolist():
            wide = table[index]["wide"]
            found.append(int(wide[0, 0]))
            assert (wide == found[-1]).all()
        return found


def test_parts_and_the_manifest_last(store: ObjectStore) -> None:
    address = "s3://bucket/parts"
    store.plan()
    new_table(0).save(address)
    written = [each for each in store.seen() if each.startswith(("PUT", "POST"))]
    assert [each.partition("?")[2].partition("=")[0] for each in written if "wide" in each] == [
        "uploads",
        "partNumber",
        "uploadId",
    ]
    assert [turn for turn, each in enumerate(written) if "manifest.json" in each] == [len(written) - 1]
    assert numbers_at(address) == [0]
    system = fsspec.filesystem("s3")
    for path in system.find("bucket/parts"):
        system.chmod(path, "public-read")
    assert numbers_at(f"{store.url}/bucket/parts") == [0]  # by fsspec's http


@pytest.mark.parametrize("act", exhaustive_but("cut-body", "lost", "500", "403", "404"))
def test_each_request_of_a_save_may_fail(store: ObjectStore, act: str) -> None:
    """One that may succeed later is repeated; else the save says so, and the checkpoint is the one before."""
    at, count, failures = 0, 1, 0
    while at < count:
        table = new_table(0)
        address = f"s3://bucket/failing-{act}-{at}"  # a failure may leave more to look at
        table.save(address)
        add(table, 1)
        store.plan(at=at, act=act)
        after = [0, 1]
        try:
            table.save(address)
        except CheckpointError as error:
            assert address in str(error)  # noqa: PT017
            failures, after = failures + 1, [0]
        count = len(store.seen())
        store.plan()
        assert numbers_at(address) == after
        if after == [0]:
            table.save(address)
            assert numbers_at(address) == [0, 1]
            count = at + 2
        at += 1
    assert at > 10
    assert failures == 0 if act not in ("403", "404") else failures > 3


def load_and_save(environment: dict[str, str], address: str, number: int, planned: Any) -> None:
    """What the process that is killed does; `environment`: of the test, later than that of the fork server."""
    os.environ.update(environment)
    bucket._PART_BYTES = 5 << 20
    table = gear.Table.load(address)
    add(table, number)
    planned.send(None)
    planned.recv()
    table.save(address)


@pytest.mark.parametrize("act", exhaustive_but("kill-lost", "kill-body"))
def test_a_saving_process_may_be_killed_at_each_request(store: ObjectStore, act: str) -> None:
    table, at, killed, replaced = new_table(0), 0, True, 0
    context = multiprocessing.get_context("forkserver")  # children share no event loop with this process
    context.set_forkserver_preload([__name__])
    while killed:
        address = f"s3://bucket/{act}-{at}"  # files of killed saves make more requests
        table.save(address)
        mine, theirs = context.Pipe()
        process = context.Process(target=load_and_save, args=(dict(os.environ), address, 1, theirs))
        process.start()
        theirs.close()
        mine.recv()
        store.plan(at=at, act=act, pid=process.pid)
        mine.send(None)
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        assert killed or process.exitcode == 0
        store.plan()
        after = numbers_at(address)
        assert after == [0, 1] or (killed and after == [0])
        replaced += after == [0, 1]
        at += 1
    assert at - replaced > 10
    assert replaced > 2  # also killed when the manifest was there


def test_a_store_that_goes_away_ends_in_an_error_before_long(store: ObjectStore) -> None:
    address = "s3://bucket/away"
    table = new_table(0)
    table.save(address)
    add(table, 1)
    for at in (0, 4, 8, 12):
        for act in ("cut", "500"):
            store.plan(at=at, act=act, times=-1)
            began = time.monotonic()
            with pytest.raises(
                CheckpointError, match=rf"{address}.* cannot be \w+: \d+ tries in \d s failed"
            ):
                table.save(address)
            assert time.monotonic() - began < 20
            store.plan()
            assert numbers_at(address) == [0]


@pytest.mark.parametrize("act", ["cut", "half", "429", "403"])
def test_each_request_of_a_load_may_fail(store: ObjectStore, act: str) -> None:
    address = f"s3://bucket/load-{act}"
    new_table(0, 1).save(address)
    at = failures = 0
    while True:
        store.plan(at=at, act=act)
        try:
            assert numbers_at(address) == [0, 1]
        except CheckpointError as error:
            assert address in str(error)  # noqa: PT017
            failures += 1
        if at >= len(store.seen()):
            break
        at += 1
    assert at > 4
    assert failures == 0 if act != "403" else failures > 3


def test_what_killed_saves_have_left_is_removed(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    address, system = "s3://bucket/left", fsspec.filesystem("s3")
    names = ("index.000007-0123456789abcdef.records", "segments/000009-0123456789abcdef/wide.npy")
    for name in (*names, "segments/mine.txt"):
        system.pipe_file(f"{address}/{name}", b"x")
    table = new_table(0)
    for seconds, left in ((60.0, [True, True]), (-60.0, [False, False])):
        monkeypatch.setattr(bucket, "ABANDONED_SECONDS", seconds)
        table.save(address)
        system.invalidate_cache()
        assert [system.exists(f"{address}/{name}") for name in names] == left
    assert system.exists(f"{address}/segments/mine.txt")
    assert numbers_at(address) == [0]


def test_all_ranks(store: ObjectStore) -> None:
    table = new_table(0)
    shards = gear.distributed.Shards(table)
    gear.distributed.save(shards, "s3://bucket/ranks")
    add(table, 1)
    gear.distributed.save(shards, "s3://bucket/ranks")
    with gear.distributed.load("s3://bucket/ranks") as loaded:
        assert [int(loaded[int(index)]["wide"][0, 0]) for index in loaded.indices()] == [0, 1]


def test_a_stalled_request_is_given_up(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "s3://bucket/stalled"
    new_table(0).save(address)
    monkeypatch.setattr(addresses, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(addresses, "DEADLINE_SECONDS", 4.0)
    store.plan(act="slow")
    assert numbers_at(address) == [0]
    store.plan(act="slow", times=-1)
    with pytest.raises(
        CheckpointError, match=r"cannot be read: \d tries in \d s failed, the last with FSTimeoutError"
    ):
        gear.Table.load(address)
