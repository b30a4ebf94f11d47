"""Checkpoints at addresses of fsspec, here ``memory://``; `test_buckets_s3` has a server that fails."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table_common import COLUMNS, RAGGED, numbers_of, rows

import gear_loader as gear
from gear_loader.checkpoint import bucket
from gear_loader.checkpoint.bucket import Bucket
from gear_loader.checkpoint.manifest import read_manifest
from gear_loader.checkpoint.names import column_file
from gear_loader.checkpoint.saving import Save
from gear_loader.checkpoint.segments import stored_columns
from gear_loader.errors import CheckpointError, SourceError
from gear_loader.utils import addresses, remote_file

fsspec = pytest.importorskip("fsspec")

ADDRESS = "memory://runs/one"


@pytest.fixture(autouse=True)
def objects() -> Iterator[dict[str, Any]]:
    """All objects by path."""
    store = fsspec.filesystem("memory").store
    store.clear()
    yield store
    store.clear()


def new_table(*numbers: int, ragged: bool = True) -> gear.Table:
    columns = RAGGED if ragged else COLUMNS
    table = gear.Table.create(
        columns, max_steps=400, max_trajectories=32, block_steps=4, on_full="evict_oldest",
        memory=gear.Memory(payload="1MiB") if ragged else None,
    )  # fmt: skip
    add(table, *numbers)
    return table


def add(table: gear.Table, *numbers: int) -> None:
    for number in numbers:
        table.add(rows(number, 5 + number % 7, ragged="words" in table.schema))


def named_by_manifest() -> set[str]:
    """Objects that a checkpoint has, by its manifest."""
    manifest = read_manifest(Bucket.at_address(ADDRESS, write=False))
    files = [*map(column_file, stored_columns(manifest.schema)), "checksums.xxh3"]
    segments = {f"{segment.folder}/{file}" for segment in manifest.segments for file in files}
    return {f"/runs/one/{name}" for name in {"manifest.json", manifest.index_name, *segments}}


def test_what_was_saved_is_loaded_and_nothing_else_stays(objects: dict[str, Any]) -> None:
    table = new_table(*range(8))
    table.save(ADDRESS)
    before = set(objects)
    add(table, 8, 9)
    table.save(ADDRESS)
    assert len(before & set(objects)) == len(before) - 1  # segments are not written again; the index is
    loaded = gear.Table.load(ADDRESS)
    assert numbers_of(loaded) == list(range(10))
    assert loaded.stats() == table.stats()
    for number in range(10, 60, 10):  # evicts all
        add(loaded, *range(number, number + 10))
        loaded.save(ADDRESS)
        assert set(objects) == named_by_manifest()
    assert numbers_of(gear.Table.load(ADDRESS)) == numbers_of(loaded)


def test_no_listing_is_believed(objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table(1, 2)
    table.save(ADDRESS)
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "ls", lambda *given, **options: [])
    assert numbers_of(gear.Table.load(ADDRESS)) == [1, 2]
    add(table, 3)
    table.save(ADDRESS)  # finds the checkpoint, and continues it
    assert numbers_of(gear.Table.load(ADDRESS)) == [1, 2, 3]
    assert read_manifest(Bucket.at_address(ADDRESS, write=False)).saves == 2


def test_a_checkpoint_is_copied_from_and_into_a_directory(tmp_path: Path) -> None:
    store, here, there = fsspec.filesystem("memory"), str(tmp_path / "a"), str(tmp_path / "b")
    new_table(1, 2).save(ADDRESS)
    store.get("/runs/one", here, recursive=True)
    table = gear.Table.load(here)
    add(table, 3)
    table.save(here)
    assert numbers_of(gear.Table.recover(here)) == [1, 2, 3]
    new_table(4, 5).save(there)
    store.put(there, "/runs/two", recursive=True)
    table = gear.Table.load("memory://runs/two")
    add(table, 6)
    table.save("memory://runs/two")
    assert numbers_of(gear.Table.load("memory://runs/two")) == [4, 5, 6]


def test_files_of_killed_saves_are_removed_when_they_are_old(objects: dict[str, Any]) -> None:
    table = new_table(1)
    table.save(ADDRESS)
    kept, foreign = set(objects), "/runs/one/notes.txt"
    names = ("index.000007-0123456789abcdef.records", "segments/000009-0123456789abcdef/x.npy")
    late = {f"/runs/one/{name}" for name in names}
    store = fsspec.filesystem("memory")
    for path in {*late, foreign}:
        store.pipe_file(path, b"x")
    add(table, 2)
    table.save(ADDRESS)
    assert late < set(objects)  # another save may be writing them
    day = datetime.timedelta(seconds=bucket.ABANDONED_SECONDS)
    for path in {*late, foreign}:
        objects[path].modified -= day
    table.save(ADDRESS)
    assert not late & set(objects)
    assert foreign in objects
    assert numbers_of(gear.Table.load(ADDRESS)) == [1, 2]
    assert len(kept & set(objects)) >= len(kept) - 1


def test_of_two_saves_at_once_one_fails(objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = new_table(1), new_table(2)
    write = Save._write_index
    saves = [lambda: second.save(ADDRESS)]

    def interrupted(self: Save, *given: Any) -> None:
        if saves:
            saves.pop()()
        write(self, *given)

    monkeypatch.setattr(Save, "_write_index", interrupted)
    with pytest.raises(CheckpointError, match="written by another save while this one ran"):
        first.save(ADDRESS)
    assert numbers_of(gear.Table.load(ADDRESS)) == [2]
    assert set(objects) == named_by_manifest()


def test_an_interrupted_save_leaves_the_checkpoint_and_nothing_else(
    objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(1)
    table.save(ADDRESS)
    held = 1
    for name in ("put", "new_file", "read_range"):
        real = getattr(Bucket, name)
        for turn in range(3):
            calls = iter(range(100))

            def fails(*given: Any, **options: Any) -> Any:
                if next(calls) == turn:  # noqa: B023
                    raise KeyboardInterrupt
                return real(*given, **options)  # noqa: B023

            before, saved = set(objects), numbers_of(gear.Table.load(ADDRESS))
            held += 1
            add(table, held)
            with monkeypatch.context() as patch:
                patch.setattr(Bucket, name, fails)
                with contextlib.suppress(KeyboardInterrupt):
                    table.save(ADDRESS)
            if numbers_of(gear.Table.load(ADDRESS)) == saved:
                assert before < set(objects) if (name, turn) == ("put", 1) else before == set(objects)
            else:
                assert numbers_of(gear.Table.load(ADDRESS)) == list(range(1, held + 1))
    table.save(ADDRESS)
    assert numbers_of(gear.Table.load(ADDRESS)) == list(range(1, held + 1))
    assert named_by_manifest() < set(objects)  # when the manifest is put, nobody knows whether it arrives


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_damage_is_found(objects: dict[str, Any], damage: str) -> None:
    new_table(*range(5)).save(ADDRESS)
    for path in sorted(objects):
        file = objects[path]
        data = file.getvalue()
        if damage == "missing":
            del objects[path]
        else:
            file.seek(0)
            file.truncate()
            file.write(data[:-1] if damage == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        if damage == "missing" or "index" not in path:  # whose end is not named by the manifest
            with pytest.raises(CheckpointError, match="memory://runs/one"):
                gear.Table.load(ADDRESS)
        objects[path] = file
        file.seek(0)
        file.truncate()
        file.write(data)
    assert numbers_of(gear.Table.load(ADDRESS)) == list(range(5))


def test_all_ranks_save_and_load(objects: dict[str, Any]) -> None:
    table = new_table(1, 2, ragged=False)
    shards = gear.distributed.Shards(table)
    gear.distributed.save(shards, ADDRESS)
    before = len(objects)
    add(table, 3)
    gear.distributed.save(shards, ADDRESS)
    loaded = gear.distributed.load(ADDRESS)
    assert numbers_of(loaded) == [1, 2, 3]
    gear.distributed.save(gear.distributed.Shards(loaded), ADDRESS)
    assert numbers_of(gear.distributed.load(ADDRESS)) == [1, 2, 3]
    assert len(objects) == before + len(COLUMNS) + 1  # a second segment; saves that were replaced are removed
    with pytest.raises(CheckpointError, match=r"gear_loader\.distributed\.load"):
        gear.Table.load(ADDRESS)


def test_addresses_that_cannot_hold_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = new_table(1)
    for address in ("http://127.0.0.1/x", "sftp://host/x", "simplecache::memory://x"):
        with pytest.raises(CheckpointError, match="expected one of abfs, abfss"):
            table.save(address)
    with pytest.raises(CheckpointError, match="cannot be opened: Protocol not known"):
        gear.Table.load("nowhere://x")
    with pytest.raises(CheckpointError, match=r"memory://x is no checkpoint: it has no manifest\.json"):
        gear.Table.load("memory://x")
    fsspec.filesystem("memory").pipe_file("/x/mine.txt", b"x")
    with pytest.raises(CheckpointError, match=r"memory://x holds 'mine\.txt' and no manifest"):
        table.save("memory://x")
    assert not os.listdir(tmp_path)


# Requests --------------------------------------------------------------------------------------------


class Busy(Exception):
    """As `aiohttp` raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class ClientError(Exception):
    """Has the name that aiohttp's error of a connection has."""


@pytest.mark.parametrize(
    "problem", [OSError(5, "Internal Error"), TimeoutError(), Busy(429), Busy(503), ClientError()]
)
def test_requests_are_repeated_until_the_deadline(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(addresses.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(addresses.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    problems = [problem] * 3

    def attempt() -> int:
        clock[0] += 1
        if problems:
            raise problems.pop()
        return 7

    if isinstance(problem, Busy) and problem.status == 503:
        problem.__class__ = type("HttpError", (Busy,), {})
    assert addresses.repeated(attempt, "s3://x", "read") == 7
    problems = [problem] * 1000
    with pytest.raises(
        SourceError, match=r"s3://x cannot be read: \d+ tries in [56]\d s failed, the last with"
    ):
        addresses.repeated(attempt, "s3://x", "read", SourceError)


@pytest.mark.parametrize(
    "problem", [PermissionError(13, "Forbidden"), Busy(401), KeyError("x"), OSError(28, "full")]
)
def test_refused_requests_are_not_repeated(problem: Exception) -> None:
    calls = []

    def attempt() -> None:
        calls.append(1)
        raise problem

    with pytest.raises(CheckpointError, match=r"s3://x cannot be written: the store answered"):
        addresses.repeated(attempt, "s3://x", "written")
    assert len(calls) == 1


def test_a_file_at_an_address_is_read_by_range() -> None:
    data = np.random.default_rng(0).bytes(300_000)
    fsspec.filesystem("memory").pipe_file("/data/x", data)
    with remote_file.open_address("memory://data/x") as file:
        file.seek(200_000)
        assert file.read(10) == data[200_000:200_010]
    with pytest.raises(FileNotFoundError, match="memory://data/y"):
        remote_file.open_address("memory://data/y")
    for wrong in ("/data/x", "file:///data/x"):
        with pytest.raises(SourceError, match="expected scheme://"):
            remote_file.open_address(wrong, SourceError)


def test_large_columns_are_uploaded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []
    store = fsspec.get_filesystem_class("memory")
    real = store.open

    def opened(self: Any, path: str, mode: str = "rb", block_size: int = 0, **options: Any) -> Any:
        blocks.append(block_size)
        return real(self, path, mode, **options)

    monkeypatch.setattr(store, "open", opened)
    monkeypatch.setattr(bucket, "_MOST_PARTS", 1)
    table = gear.Table.create({"x": gear.Column(torch.uint8, (1 << 20,))}, max_steps=20, max_trajectories=2)
    table.add({"x": np.zeros((20, 1 << 20), np.uint8)})
    table.save(ADDRESS)
    assert max(blocks) == (20 << 20) + 4096


def test_a_replay_buffer_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = gear.ReplayBuffer(100, batch_size=4, device="cpu")
    for turn in range(2):
        for step in range(10):
            obs, following = np.full((2, 2), [[step], [step + 1]], np.float32)
            buffer.add(obs, turn, 1.0, following, terminated=step == 9, truncated=False)
        buffer.save(ADDRESS)
    assert len(gear.ReplayBuffer.load(ADDRESS, batch_size=4, device="cpu")) == 20
    with pytest.raises(CheckpointError, match=r"memory://runs/two/buffer\.json cannot be read"):
        gear.ReplayBuffer.load("memory://runs/two")
    assert not os.listdir(tmp_path)
