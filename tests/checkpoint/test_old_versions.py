"""Disk tables that earlier versions wrote: they are loaded, recovered and written on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from disk_recorded import SCHEMA, contents_of

import gear_loader as gear

RECORDED = Path(__file__).parent.parent / "data" / "disk"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy of a disk table of version 3, with columns of every kind, whose owner was killed after two writes."""
    found = Path(shutil.copytree(RECORDED, tmp_path / "disk"))
    (found / "contents.json").unlink()
    return found


@pytest.fixture
def expected() -> dict[str, object]:
    found: dict[str, object] = json.loads((RECORDED / "contents.json").read_text())
    return found


def test_a_disk_table_of_version_3_loads(path: Path, expected: dict[str, object]) -> None:
    with gear.Table.load(path, schema=SCHEMA) as table:
        assert contents_of(table) == expected


@pytest.mark.parametrize("size", [None, "1GiB"])
def test_a_disk_table_of_version_3_is_written_on(
    path: Path, expected: dict[str, object], size: str | None
) -> None:
    disk = gear.Disk(path, sync_seconds=1e6, size=size)
    for turn in range(3):
        with gear.Table.recover(disk) as table:
            assert contents_of(table) == expected
            if turn == 1:
                table.remove(table.indices()[2])
                table.save(path)
                expected = contents_of(table)
    with gear.Table.load(path) as table:
        table.save(path)
    with gear.Table.load(path) as table:
        assert contents_of(table) == expected


def test_the_previous_manifest_of_version_3_is_recovered(path: Path) -> None:
    newest = json.loads((path / "manifest.json").read_text())["index"]["path"]
    (path / newest).unlink()
    with gear.Table.recover(path) as table:
        assert table.ids(table.indices()).tolist() == [3 + (number << 16) for number in range(6)]
