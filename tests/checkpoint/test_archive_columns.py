"""Archives of tables with values of any length, write-once columns and columns that are overwritten; compaction."""

from __future__ import annotations

import glob
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from tier_common import spill, tiered
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.checkpoint import behind
from gear_loader.checkpoint.bucket import Bucket
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.manifest import read_manifest
from gear_loader.utils import addresses

fsspec = pytest.importorskip("fsspec")

ADDRESS = "memory://archive/columns"
COLUMNS = {
    "number": gear.Column(torch.int64),
    "state": gear.Column(torch.float32, (9,), mutable=True),
    "tokens": gear.Column(torch.int32, (None,)),
    "text": gear.Column(str),
    "task": gear.Column(str, per="trajectory"),
    "advantage": gear.Column(torch.float32, (2,), late=True),
}


@pytest.fixture(autouse=True)
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    monkeypatch.setattr(addresses, "DEADLINE_SECONDS", 0.2)
    monkeypatch.setattr(behind, "_ARCHIVED_FROM", 0.0)  # everything is moved
    yield system.store
    system.store.clear()


def make(path: Path, **options: Any) -> gear.Table:
    given = {"blocks": 60, "payload": 60_000, "archive": ADDRESS, "sync_seconds": 0.05, **options}
    return tiered(path, COLUMNS, **given)


def rows(number: int, length: int) -> dict[str, Any]:
    return {
        "number": np.full(length, number),
        "state": np.full((length, 9), number, np.float32),
        "tokens": [np.arange(step % 5, dtype=np.int32) + number for step in range(length)],
        "text": [f"ü{number} {'x' * (step % 7)}" for step in range(length)],
        "task": f"task {number}",
    }


def same(table: gear.Table, index: int, known: dict[str, Any]) -> None:
    found = table[index]
    assert found.keys() == known.keys()
    for name, value in known.items():
        if name == "tokens":
            assert all(np.array_equal(a.numpy(), b) for a, b in zip(found[name], value, strict=True))
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name].numpy(), value)
        else:
            assert found[name] == value


def segments_of(path: Path) -> list[Any]:
    with Directory.open(str(path)) as directory:
        return list(read_manifest(directory).segments)


def is_moved(path: Path) -> bool:
    return all(each.archive for each in segments_of(path)) and not glob.glob(f"{path}/segments/*/*.npy")


def is_clean(path: Path) -> bool:
    """Whether everything is in the archive, and nothing else is there."""
    there = {key.strip("/").rpartition("/")[0] for key in fsspec.filesystem("memory").store}
    return is_moved(path) and there == {each.archive.partition("://")[2] for each in segments_of(path)}


@pytest.mark.long
@pytest.mark.parametrize("seed", mostly_long(range(6), sample=3))
def test_any_history_of_archived_rows(tmp_path: Path, seed: int) -> None:
    random, number = np.random.default_rng(seed), 0
    model: dict[int, dict[str, Any]] = {}
    table = make(tmp_path / "disk")
    try:
        for turn in range(60):
            what, slots = random.random(), sorted(model)
            if what < 0.45 or not slots:
                known = rows(number, int(random.integers(1, 12)))
                model[table.add(known)] = known
                number += 1
            elif what < 0.55:
                table.save(tmp_path / "disk")
                wait_until(lambda: is_moved(tmp_path / "disk"))
                spill(table, slots)
            elif what < 0.7:
                slot = int(random.choice(slots))
                step = int(random.integers(len(model[slot]["number"])))
                value = random.normal(size=9).astype(np.float32)
                assert table.set([slot], [step], state=value[None, None]) == 0
                model[slot]["state"][step] = value
            elif what < 0.8:
                slot = int(random.choice(slots))
                if "advantage" not in model[slot]:
                    value = random.normal(size=(len(model[slot]["number"]), 2)).astype(np.float32)
                    table.fill(slot, advantage=value)
                    model[slot]["advantage"] = value
            elif what < 0.95:
                slot = int(random.choice(slots))
                table.remove(slot)
                del model[slot]
            elif turn > 10:
                table.close()
                disk = gear.Disk(
                    tmp_path / "disk", sync_seconds=0.05, size="1GiB", keep="newest", archive=ADDRESS
                )
                before = sorted(known["number"][0] for known in model.values())
                table = gear.Table.recover(disk)
                found = {int(table[slot]["number"][0]): slot for slot in table.indices().tolist()}
                assert sorted(found) == before
                model = {found[known["number"][0]]: known for known in model.values()}
            table.check_valid()
            for slot, known in model.items():
                same(table, slot, known)
        table.save(tmp_path / "disk")
        wait_until(lambda: is_clean(tmp_path / "disk"))
        for slot, known in model.items():
            same(table, slot, known)
    finally:
        table.close()


def filled(path: Path, count: int = 12) -> tuple[gear.Table, dict[int, dict[str, Any]]]:
    """A table in whose archive are two segments, of the same number of trajectories."""
    table, model = make(path), dict[int, dict[str, Any]]()
    for half in range(2):
        for number in range(half * count // 2, (half + 1) * count // 2):
            known = rows(number, 10)
            model[table.add(known)] = known
        table.save(path)
        wait_until(lambda: is_moved(path))
    spill(table, sorted(model))
    return table, model


def keep_one(table: gear.Table, model: dict[int, dict[str, Any]]) -> None:
    """Remove all trajectories of the first segment but one."""
    for slot in sorted(model, key=lambda slot: model[slot]["number"][0])[1:6]:
        table.remove(slot)
        del model[slot]


def test_a_sparse_segment_is_rewritten_and_its_objects_are_removed(
    tmp_path: Path, objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, model = filled(tmp_path)
    with table:
        before = {each.archive for each in segments_of(tmp_path)}
        assert len(before) == 2
        named = list[set[str]]()
        real = Bucket.remove_file

        def remove_file(self: Bucket, name: str) -> None:
            named.append({each.archive for each in segments_of(tmp_path)} & {self.path})
            real(self, name)

        monkeypatch.setattr(Bucket, "remove_file", remove_file)
        keep_one(table, model)
        wait_until(lambda: len(before & {each.archive for each in segments_of(tmp_path)}) == 1)
        wait_until(lambda: is_clean(tmp_path))
        assert named
        assert not any(named)  # no manifest named what was removed
        assert sum(each.steps for each in segments_of(tmp_path)) == 70
        spill(table, sorted(model))
        table._engine.tier_reader()._reset()  # type: ignore[attr-defined]
        for slot, known in model.items():
            same(table, slot, known)
        for slot in sorted(model):
            table.remove(slot)
        wait_until(lambda: not objects)  # without another write by the user


@pytest.mark.long
def test_a_store_that_fails_stops_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, model = filled(tmp_path)
    with table:
        table._engine.tier_reader()._reset()  # type: ignore[attr-defined]

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Forbidden")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(fsspec.filesystem("memory")), "cat_file", refuse)
            keep_one(table, model)
            known = rows(50, 4)
            model[table.add(known)] = known
            table.save(tmp_path)
            assert table.stats().disk.unwritten_trajectories == 0  # type: ignore[union-attr]
        writer: Any = table._engine.disk
        assert writer._rewrite_at > time.monotonic()
        for slot, known in model.items():
            same(table, slot, known)
        writer._rewrite_at = 0.0
        table.save(tmp_path)
        wait_until(lambda: is_clean(tmp_path) and sum(each.steps for each in segments_of(tmp_path)) == 74)


@pytest.mark.long
def test_a_store_that_is_down_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a write that rewrites a segment: others wait for it."""
    table, model = filled(tmp_path)
    with table:
        table._engine.tier_reader()._reset()  # type: ignore[attr-defined]

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(5, "down")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(behind, "_REWRITE_SECONDS", 0.2)
            patch.setattr(addresses, "DEADLINE_SECONDS", 3_600)
            patch.setattr(type(fsspec.filesystem("memory")), "cat_file", fail)
            keep_one(table, model)
            table.save(tmp_path)
            writer: Any = table._engine.disk
            assert writer._rewrite_at > time.monotonic()
        for slot, known in model.items():
            same(table, slot, known)


@pytest.mark.long
def test_many_live_rows_stay_in_the_archive(tmp_path: Path) -> None:
    table, model = filled(tmp_path)
    with table:
        for slot in sorted(model)[1:4]:
            table.remove(slot)
            del model[slot]
        table.save(tmp_path)
        table.save(tmp_path)
        assert sum(each.steps for each in segments_of(tmp_path)) == 120
        assert is_moved(tmp_path)
        for slot, known in model.items():
            same(table, slot, known)
