"""Disk tiers whose cold segments lie in an object store, here ``memory://``; `test_archive_s3` has one that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tier_common import COLUMNS, WINDOWS, batch_bits, everything, final, fitting, rows, spill, tiered
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.checkpoint import archive_reads, behind
from gear_loader.checkpoint.archive import ARCHIVE_NAME
from gear_loader.checkpoint.bucket import Bucket
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.manifest import read_manifest
from gear_loader.errors import CheckpointError, SchemaError
from gear_loader.utils import addresses

fsspec = pytest.importorskip("fsspec")

ADDRESS = "memory://archive/one"
SIZE = "100KiB"
LENGTH = 20


@pytest.fixture(autouse=True)
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """All objects by path. Nothing is listed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("listed")

    system = fsspec.filesystem("memory")
    system.store.clear()
    for name in ("ls", "find", "glob", "walk"):
        monkeypatch.setattr(type(system), name, refuse)
    monkeypatch.setattr(addresses, "DEADLINE_SECONDS", 0.2)
    yield system.store
    system.store.clear()


def options(path: Path) -> gear.Disk:
    return gear.Disk(path, sync_seconds=0.2, size=SIZE, keep="newest", archive=ADDRESS)


def three_tiers(path: Path, **given: Any) -> gear.Table:
    return tiered(path, **{"size": SIZE, "archive": ADDRESS, "sync_seconds": 0.2, **given})


def add(table: gear.Table, *numbers: int) -> None:
    for number in numbers:
        table.add(rows(number, LENGTH), final=final(number, LENGTH) if number % 2 else None)


def segments_of(path: Path) -> dict[bool, list[Any]]:
    """Segments of the manifest, by whether they are in the archive."""
    with Directory.open(str(path)) as directory:
        segments = read_manifest(directory).segments
    return {far: [each for each in segments if bool(each.archive) is far] for far in (False, True)}


def columns_in(path: Path) -> set[str]:
    return {Path(each).parent.name for each in glob.glob(f"{path}/segments/*/*.npy")}  # some may go meanwhile


def settle(table: gear.Table, path: Path) -> None:
    """Wait until everything cold has gone to the archive, and nothing else is on the disk or there."""
    with contextlib.suppress(AssertionError):
        return wait_until(lambda: all(is_settled(table, path)), patience=30)
    writer: Any = table._engine.disk
    raise AssertionError((is_settled(table, path), writer.stats(), vars(writer._archive)))


def is_settled(table: gear.Table, path: Path) -> list[Any]:
    stats = table.stats().disk
    assert stats is not None
    found = segments_of(path)
    archived = {each.archive.partition("://")[2] for each in found[True]}
    there = {key.strip("/").rpartition("/")[0] for key in fsspec.filesystem("memory").store}
    local = sum(each.bytes(name, COLUMNS[name]) for each in found[False] for name in COLUMNS)
    return [
        not stats.unwritten_trajectories,
        there ^ archived == set(),
        columns_in(path) == {each.name for each in found[False]},
        local <= behind._ARCHIVED_FROM * 100 * 1024,
    ]


@contextlib.contextmanager
def archived(path: Path, *numbers: int, **given: Any) -> Iterator[gear.Table]:
    """A table most of whose trajectories are in the archive."""
    with three_tiers(path, **given) as table:
        for number in numbers or range(40):
            add(table, number)
            if number % 4 == 3:
                table.save(path)
        settle(table, path)
        yield table


def test_batches_are_those_of_a_table_that_fits(tmp_path: Path, objects: dict[str, Any]) -> None:
    def batches(table: gear.Table) -> list[Any]:
        given: dict[str, Any] = {
            "batch_size": 16,
            "windows": WINDOWS,
            "device": "cpu",
            "prefetch": 0,
            "seed": 3,
        }
        dataset = gear.ReplayDataset(table, **given)
        return [batch_bits(dataset.sample()) for _ in range(10)]

    with fitting() as twin, archived(tmp_path) as table:
        add(twin, *range(40))
        found = segments_of(tmp_path)
        assert len(found[True]) > 4
        assert not columns_in(tmp_path) & {each.name for each in found[True]}
        stats = table.stats().disk
        assert stats is not None
        assert stats.archived_bytes == sum(len(file.getvalue()) for file in objects.values())
        assert "in the archive" in str(stats)
        assert everything(table) == everything(twin)
        expected = batches(twin)
        assert batches(table) == expected
        with gear.Table.load(tmp_path) as copy:
            assert everything(copy) == everything(twin)
        table.close()
        with gear.Table.recover(options(tmp_path)) as again:
            assert everything(again) == everything(twin)
            assert batches(again) == expected
            add(again, *range(40, 50))
            add(twin, *range(40, 50))
            settle(again, tmp_path)
            assert everything(again) == everything(twin)


def test_objects_are_removed_with_the_last_trajectory_of_a_segment(
    tmp_path: Path, objects: dict[str, Any]
) -> None:
    with archived(tmp_path) as table:
        assert len(json.loads((tmp_path / ARCHIVE_NAME).read_bytes())) == len(segments_of(tmp_path)[True])
        kept = table.indices()[5].item()
        bits = {name: value.clone() for name, value in table[kept].items()}
        for index in table.indices().tolist():
            if index != kept:
                table.remove(index)
        table.save(tmp_path)
        table.save(tmp_path)  # the manifest before it names the objects until now
        settle(table, tmp_path)
        assert len(segments_of(tmp_path)[True]) == 1
        assert all((table[kept][name] == value).all() for name, value in bits.items())
        table.remove(kept)
        table.save(tmp_path)
        table.save(tmp_path)  # the manifest before it names the objects until now
        settle(table, tmp_path)
        assert not objects
        wait_until(lambda: json.loads((tmp_path / ARCHIVE_NAME).read_bytes()) == [])


def test_what_a_killed_owner_has_uploaded_is_removed_by_the_next(
    tmp_path: Path, objects: dict[str, Any]
) -> None:
    with archived(tmp_path) as table:
        before = everything(table)
        table.close()
    names = json.loads((tmp_path / ARCHIVE_NAME).read_bytes())
    left = f"{ADDRESS}/segments/000077-0123456789abcdef"
    others = [f"{ADDRESS}/mine", "memory://archive/one/segments/000077"]
    (tmp_path / ARCHIVE_NAME).write_text(json.dumps([*names, left, *others, 7]))
    system = fsspec.filesystem("memory")
    for address in (left, *others):
        system.pipe_file(f"{address}/value.npy", b"x")
    with gear.Table.recover(options(tmp_path)) as table:
        wait_until(lambda: not any("0123456789abcdef" in key for key in objects))
        assert len([key for key in objects if key.endswith(("mine/value.npy", "000077/value.npy"))]) == 2
        assert everything(table) == before


@pytest.mark.parametrize("fault", ["refused", "cut", "other bytes", "short"])
def test_local_files_stay_while_uploads_fail(
    tmp_path: Path, objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    kind = type(fsspec.filesystem("memory"))
    real, broken = kind.open, [True]

    def opened(self: Any, path: str, mode: str = "rb", **given: Any) -> Any:
        file = real(self, path, mode, **given)
        if mode == "wb" and broken:
            if fault == "refused":
                raise PermissionError(13, "Forbidden")
            write = file.write

            def damaged(data: Any) -> int:
                if fault == "cut":
                    raise OSError(104, "reset")
                data = bytes(data)
                return int(write(data[:-1] if fault == "short" else data[:-1] + bytes([data[-1] ^ 1])))

            file.write = damaged
        return file

    monkeypatch.setattr(kind, "open", opened)
    with three_tiers(tmp_path, size="1MiB") as table:
        add(table, *range(8))
        table.save(tmp_path)
        writer = table._engine.disk
        monkeypatch.setattr(behind, "_ARCHIVED_FROM", 0.0)
        add(table, 8)
        wait_until(lambda: "stay in" in str(writer.stats().error))  # type: ignore[union-attr]
        assert not segments_of(tmp_path)[True]
        assert columns_in(tmp_path) == {each.name for each in segments_of(tmp_path)[False]}
        broken.clear()
        add(table, 9)
        wait_until(lambda: not columns_in(tmp_path) and writer.stats().error is None)  # type: ignore[union-attr]
        wait_until(lambda: len(objects) == len(COLUMNS) * len(segments_of(tmp_path)[True]))
        spill(table, table.indices())
        with fitting() as twin:
            add(twin, *range(10))
            assert everything(table) == everything(twin)


def test_a_full_disk_waits_for_the_archive_and_evicts_only_while_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three_tiers(tmp_path, size="20KiB", on_full="evict_oldest") as table:
        add(table, *range(50))
        table.save(tmp_path)
        assert len(table) == 50
        kind = type(fsspec.filesystem("memory"))

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Forbidden")

        monkeypatch.setattr(kind, "_open", refuse)
        for number in range(50, 60):
            add(table, number)
            table.save(tmp_path)
        assert len(table) < 60
        table.check_valid()
        monkeypatch.undo()


@pytest.mark.parametrize("damage", ["missing", "bytes", "refused", "short"])
def test_an_object_that_cannot_be_read_is_named_with_the_trajectory(
    tmp_path: Path, objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    with archived(tmp_path) as table:
        index = int(table.indices()[0])
        first = min(segments_of(tmp_path)[True], key=lambda each: each.number)
        key = f"/{first.archive.partition('://')[2]}/wide.npy"
        file = objects[key]
        table._engine.tier_reader()._reset()  # type: ignore[attr-defined]  # nothing is kept
        if damage == "missing":
            del objects[key]
        elif damage in ("bytes", "short"):
            data = file.getvalue()
            file.seek(0)
            file.truncate()
            file.write(data[:-1] if damage == "short" else data[:5000] + b"?" + data[5001:])
        else:

            def refuse(*_: Any, **__: Any) -> None:
                raise PermissionError(13, "Forbidden")

            monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", refuse)
        if damage == "bytes":  # as of a damaged file
            count = len(table)
            dataset = gear.ReplayDataset(
                table, batch_size=64, windows=gear.Window(4), device="cpu", prefetch=0
            )
            dataset.sample()
            assert table.stats().num_lost == count - len(table) > 0
            return
        texts = {"missing": "there is no such object", "refused": "Forbidden", "short": "tries in"}
        with pytest.raises(
            CheckpointError, match=rf"Trajectory \d+ cannot be read: .*{texts[damage]}"
        ) as caught:
            table[index]
        assert f"{ADDRESS}/segments/" in str(caught.value)
        assert len(table) == 40
        objects[key] = file
        if damage != "short":
            monkeypatch.undo()
            assert (table[index]["number"].numpy() == table[index]["number"].numpy()[0]).all()


def test_requests_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that lie near one another are read by one request, several at a time, and once."""
    with archived(tmp_path) as table:
        files = len(COLUMNS) * len(segments_of(tmp_path)[True])
        calls: list[str] = []
        together, most, real, mutex = [0], [0], Bucket.read_range, threading.Lock()
        gate = threading.Barrier(8)

        def counted(self: Bucket, name: str, begin: int, end: int, **given: Any) -> bytes:
            with mutex:
                calls.append(name)
                together[0] += 1
                most[0] = max(most[0], together[0])
            with contextlib.suppress(threading.BrokenBarrierError):
                gate.wait(1.0)
            data = real(self, name, begin, end, **given)
            with mutex:
                together[0] -= 1
            return data

        monkeypatch.setattr(Bucket, "read_range", counted)
        reader: Any = table._engine.tier_reader()
        reader._reset()
        dataset = gear.ReplayDataset(table, batch_size=256, windows=gear.Window(4), device="cpu", prefetch=0)
        dataset.sample()
        assert len(calls) <= files < 256
        assert most[0] >= 8
        before = len(calls)
        dataset.sample()
        assert len(calls) <= files
        assert len(calls) - before < before
        monkeypatch.setattr(archive_reads, "CACHE_BYTES", 0)
        reader._reset()
        dataset.sample()
        assert not reader._archives._kept


def test_what_cannot_be_an_archive(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="archive= was received without size="):
        gear.Disk(tmp_path, archive=ADDRESS)
    for wrong in ("bucket/x", "/x", 7, "file:///x"):
        with pytest.raises(CheckpointError, match="expected the address of an object store"):
            gear.Disk(tmp_path, size="1GiB", archive=wrong)  # type: ignore[arg-type]
    for wrong in ("http://127.0.0.1/x", "sftp://host/x"):
        with pytest.raises(CheckpointError, match="expected one of abfs"):
            three_tiers(tmp_path / "x", archive=wrong)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [7, "s3://b/x", "http://h/segments/000001-0123456789abcdef", "{}/segments/000999-0123456789abcdef"],
)
def test_hostile_addresses_in_a_manifest(tmp_path: Path, wrong: Any) -> None:
    with archived(tmp_path) as table:
        table.close()
    with Directory.open(str(tmp_path)) as directory:
        manifest = read_manifest(directory)
    given = wrong.format(ADDRESS) if isinstance(wrong, str) else wrong
    segments = tuple(
        dataclasses.replace(each, archive=given) if each.archive else each for each in manifest.segments
    )
    (tmp_path / "manifest.json").write_bytes(dataclasses.replace(manifest, segments=segments).to_bytes())
    with pytest.raises(CheckpointError, match=r"archive'?: it has .* expected the address of segment"):
        gear.Table.load(tmp_path)


def test_steps_that_trajectories_share_lie_in_the_archive(tmp_path: Path) -> None:
    """In a segment there, to which trajectories in others refer, also when that of the steps' first has left."""
    with three_tiers(tmp_path, prefixes=True, blocks=200) as table:
        add(table, 1)
        first, after = int(table.indices()[0]), rows(1, LENGTH + 8)
        for number in range(2, 40):
            if number % 4:
                add(table, number)
            else:
                given = {
                    name: values if COLUMNS[name].trajectory else values[15:]
                    for name, values in after.items()
                }
                table.add(given, prefix=first, prefix_steps=15)
            if number % 4 == 3:
                table.save(tmp_path)
        settle(table, tmp_path)
        expected = everything(table)
        assert segments_of(tmp_path)[True]
        spill(table, table.indices())
        assert everything(table) == expected
        table.remove(first)
        table.save(tmp_path)
        settle(table, tmp_path)
        assert everything(table) == expected[1:]
    with gear.Table.recover(options(tmp_path)) as again:
        assert [each[1:] for each in everything(again)] == [each[1:] for each in expected[1:]]
