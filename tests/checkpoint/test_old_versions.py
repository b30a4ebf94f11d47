"""Disk tables that earlier versions wrote: they are loaded, recovered and written on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from disk_recorded import SCHEMA, contents_of

import gear_loader as gear
from gear_loader.errors import CheckpointError

RECORDED = Path(__file__).parent.parent / "data" / "disk"


@pytest.fixture(params=[3, 4])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a disk table, with columns of every kind, whose owner was killed after two writes.

    That of version 3, as it was recorded; or as version 4 wrote it on, which kept the segments.
    """
    found = Path(shutil.copytree(RECORDED, tmp_path / "disk"))
    (found / "contents.json").unlink()
    if request.param == 4:
        for index in found.glob("index.*"):
            index.unlink()
        shutil.copytree(RECORDED.with_name("disk_version_4"), found, dirs_exist_ok=True)
    return found


@pytest.fixture
def expected() -> dict[str, object]:
    found: dict[str, object] = json.loads((RECORDED / "contents.json").read_text())
    return found


def test_a_disk_table_of_an_earlier_version_loads(path: Path, expected: dict[str, object]) -> None:
    with gear.Table.load(path, schema=SCHEMA) as table:
        assert contents_of(table) == expected


@pytest.mark.parametrize("size", [None, "1GiB"])
def test_a_disk_table_of_an_earlier_version_is_written_on(
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
    assert json.loads((path / "manifest.json").read_text())["version"] == 5
    with gear.Table.load(path) as table:
        table.save(path)
    with gear.Table.load(path) as table:
        assert contents_of(table) == expected


@pytest.mark.parametrize("path", [3], indirect=True)
def test_the_previous_manifest_of_version_3_is_recovered(path: Path) -> None:
    newest = json.loads((path / "manifest.json").read_text())["index"]["path"]
    (path / newest).unlink()
    with gear.Table.recover(path) as table:
        assert table.ids(table.indices()).tolist() == [3 + (number << 16) for number in range(6)]


@pytest.mark.parametrize("path", [3], indirect=True)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("length", np.ones(8), r"'length' is float64 \[8\]; expected int64 \[8\]"),
        ("length", np.ones(3, dtype=np.int64), r"'length' is int64 \[3\]; expected int64 \[8\]"),
        ("times_sampled", np.full(8, 2**31), "a value of 'times_sampled' is too large"),
        ("age", np.full(8, -1), "an age is below 0"),
        ("other", np.ones(8), "has the tensors"),
        (None, None, "is not a safetensors file"),
    ],
)
def test_an_index_of_version_3_that_says_something_else(
    path: Path, name: str | None, value: np.ndarray, message: str
) -> None:
    fields = json.loads((path / "manifest.json").read_text())
    index = path / fields["index"]["path"]
    if name is None:
        index.write_bytes(b"\xff" * 100)
    else:
        safetensors.numpy.save_file({**safetensors.numpy.load_file(index), name: value}, index)
    fields["index"] |= {
        "bytes": index.stat().st_size,
        "xxh128": xxhash.xxh3_128_hexdigest(index.read_bytes()),
    }
    data = json.dumps(fields | {"checksum": "0" * 32}).encode()
    digest = xxhash.xxh3_128_hexdigest(data)
    (path / "manifest.json").write_bytes(data.replace(b"0" * 32, digest.encode(), 1))
    with pytest.raises(CheckpointError, match=message):
        gear.Table.load(path)
