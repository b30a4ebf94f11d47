"""What `Table.recover` finds after crashes: torn files, lost writes, and processes that die at any moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import amounts
from checkpoint_common import CALLS, contents, dying, make
from lost_writes import PowerCuts, write_tree
from table_common import Died, rows

import gear_loader as gear
from gear_loader.checkpoint import behind
from gear_loader.checkpoint.index import IndexFile
from gear_loader.errors import CheckpointError

CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 60.0  # seconds for what takes milliseconds
NEVER = 1e6


def recovered(path: Path) -> dict[str, Any] | None:
    """`contents` of the table that comes back, or None with a CheckpointError; any other error fails."""
    try:
        with gear.Table.recover(gear.Disk(path, sync_seconds=NEVER)) as table:
            return contents(table)
    except CheckpointError:
        return None


def named_files(path: Path, manifest: str) -> set[str]:
    """Names of the manifest's files."""
    fields = json.loads((path / manifest).read_text())
    found = {manifest, fields["index"]["path"]}
    for segment in fields["segments"]:
        for name in ("checksums.xxh3", *fields["files"].values()):
            found.add(f"segments/{segment['number']:06d}/{name}")
    return found


def _small(number: int, length: int) -> dict[str, np.ndarray]:
    return {"x": np.full(length, number), "y": np.full((length, 2), number, dtype=np.float32)}


@pytest.mark.timeout(1800)  # thousands of recoveries
@pytest.mark.parametrize("every", amounts(211, 23, 1))
def test_files_that_are_cut_at_any_byte(tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the headers of columns, which are mostly blanks, and of records of no trajectory, some bytes."""
    path, copy = tmp_path / "disk", tmp_path / "copy"
    schema = {"x": gear.Column(torch.int64), "y": gear.Column(torch.float32, (2,))}
    disk = gear.Disk(path, sync_seconds=NEVER)
    with gear.Table.create(schema, max_steps=50, max_trajectories=5, block_steps=4, disk=disk) as table:
        table.extend([_small(0, 3), _small(1, 9)], priority=2.0)
        table.save(path)
        before = contents(table)
        table.add(_small(2, 2), priority=3.0)
        table.remove(table.indices()[0])
        table.save(path)
        after = contents(table)
        shutil.copytree(path, copy)  # `close` writes once more
    whole = {str(file.relative_to(copy)): file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    newest, older = named_files(copy, "manifest.json"), named_files(copy, "manifest.previous.json")
    assert len(newest - older) >= 2
    index, known = (
        json.loads((copy / manifest).read_text())["index"]
        for manifest in ("manifest.json", "manifest.previous.json")
    )
    assert index["path"] == known["path"], "it was appended to"
    assert known["bytes"] < index["bytes"] <= len(whole[index["path"]])
    assert recovered(copy) == after
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    found = set()
    for name, data in whole.items():
        places = set(range(0, len(data), every)) | ({len(data) - 1} if data else set())
        if name.endswith(".npy"):
            places = {size for size in places if size < 2 or size >= 4090} | {100, 2000}
        elif name.endswith(".records"):
            places = {size for size in places if size < 400 or size >= 4000 or size % 72 == 0}
        for size in places:
            shutil.rmtree(copy)
            write_tree(copy, whole)
            (copy / name).write_bytes(data[:size])
            expected = after if name not in newest else before if name not in older else None
            if name == index["path"] and size >= known["bytes"]:
                expected = before if size < index["bytes"] else after
            assert recovered(copy) == expected, (name, size)
            found.add((name in newest, name in older))
            if every > 1 and expected is not None:
                assert recovered(copy) == expected, "it has been written on"
    data = whole[index["path"]]
    for damaged, expected in (
        (data + bytes(1000), after),  # of a write that did not end
        (data[: (index["bytes"] - 1) // 4096 * 4096], before),  # the last valid block is torn
    ):
        shutil.rmtree(copy)
        write_tree(copy, {**whole, index["path"]: damaged.ljust(len(data), b"\xff")})
        assert recovered(copy) == recovered(copy) == expected
    assert found == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize(
    ("names", "appended", "ragged"),
    [(False, True, False), (True, True, True), (False, False, True)],
)
def test_a_power_cut_loses_what_was_not_synced(
    tmp_path: Path, names: bool, appended: bool, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every call of the system: of all writes, only synced ones; of all names, only synced ones, or every one."""
    if not appended:
        monkeypatch.setattr(IndexFile, "has_room", lambda *given: False)
    path, turn = tmp_path / "disk", 0
    path.mkdir()
    cuts, states = PowerCuts(path, names=names), []
    with cuts.recording():
        table = make(ragged=ragged, on_full="evict_oldest", disk=gear.Disk(path, sync_seconds=NEVER))
        states.append(contents(table))
        cuts.turn = 0
        for turn in range(1, 4):
            table.extend([rows(10 * turn + i, 5 + turn, ragged=ragged) for i in range(3)])
            table.remove(table.indices()[:2])
            states.append(contents(table))
            table.save(path)
            cuts.turn = turn
        table.close()
    seen = set()
    for turn, copy in cuts.copies(tmp_path):
        found = recovered(copy)
        if found is None:
            assert turn < 0, (copy.name, sorted(copy.iterdir()))
            continue
        place = states.index(found)
        assert place in (turn, turn + 1), (copy.name, turn, place)
        seen.add(place)
    assert seen == set(range(4))


@pytest.mark.parametrize(
    ("case", "every"),
    [("more", 5), *(pytest.param(case, 4, marks=pytest.mark.long) for case in ("rewritten", "index"))]
    + [
        pytest.param(case, 1, marks=[pytest.mark.long, pytest.mark.exhaustive])
        for case in ("more", "rewritten", "index")
    ],
)
def test_dying_at_every_call_of_the_system(
    tmp_path: Path, case: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the index is written anew, which is otherwise appended to."""
    if case == "index":
        monkeypatch.setattr(IndexFile, "has_room", lambda *given: False)
    path = tmp_path / "disk"
    with make(disk=gear.Disk(path, sync_seconds=NEVER)) as table:
        table.extend([rows(number, 10 + number) for number in range(6)])
        table.save(path)
        states = [contents(table)]
        if case == "rewritten":
            table.remove(table.indices()[:4])
        table.add(rows(6, 30))
        states.append(contents(table))
        deaths, died, found = 0, True, set()
        while died:
            died = False
            shutil.rmtree(tmp_path / "before", ignore_errors=True)
            with dying(deaths, CALLS):
                try:
                    table.save(path)
                except Died:
                    died = True
            shutil.copytree(path, tmp_path / "before")
            state = recovered(tmp_path / "before")
            assert state in states
            found.add(states.index(state))
            deaths += every
            if found == {0, 1} and case != "rewritten":
                break
    assert found == {0, 1}


@pytest.fixture(autouse=True)
def _no_writer_is_left() -> Iterator[None]:
    yield
    assert not behind._writers
