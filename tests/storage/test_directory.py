"""Where named tables lie: $GEAR_LOADER_DIR, who may own it, and that tests touch nothing outside theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gear_loader as gear
from gear_loader.distributed.topology import this_node
from gear_loader.errors import RegionError
from gear_loader.storage import region, shared_memory

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = {"x": gear.Column(torch.int64, ())}
SIZES = {"max_steps": 16, "max_trajectories": 4, "block_steps": 4}
PATIENCE = 120.0  # seconds for what takes a few


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=shared_memory.DIRECTORY) as path:
        monkeypatch.setattr(shared_memory, "DIRECTORY", path)
        yield Path(path)


def program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these words, in the repository, as a program of its own."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_without_the_variable_tables_lie_in_shared_memory() -> None:
    assert os.environ["GEAR_LOADER_DIR"] == shared_memory.DIRECTORY
    assert Path(shared_memory.DIRECTORY).stat().st_mode & 0o7777 == 0o711
    code = "from gear_loader.storage import shared_memory; print(shared_memory.region_path('x'))"
    assert program("-c", code, GEAR_LOADER_DIR="").stdout == "/dev/shm/gear-loader.x\n"


@pytest.mark.long
def test_the_variable_says_where_tables_lie(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gear.Table.create(COLUMNS, **SIZES, name="here") as table:
        table.add({"x": torch.arange(3)})
        assert (directory / "gear-loader.here").exists()
        code = "import gear_loader as gear; print(len(gear.Table.attach('here')))"
        other = program("-c", code, GEAR_LOADER_DIR=str(directory))
        assert other.stdout == "1\n", other.stderr
        node = this_node()
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "DIRECTORY", os.environ["GEAR_LOADER_DIR"])
            with pytest.raises(RegionError, match="no table named 'here'"):
                gear.Table.attach("here")
            assert this_node() != node, "processes that cannot attach to each other's tables"
        table.unlink()
    assert os.listdir(directory) == []


def test_directories_in_which_tables_cannot_be_safe(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mode in {
        "shared": 0o777,
        "group": 0o770,
        "sticky": 0o1777,
        "own": 0o700,
        "other": 0o700,
    }.items():
        (directory / name).mkdir()
        (directory / name).chmod(mode)
    (directory / "file").touch()
    refused = {
        str(
            directory / "shared"
        ): "has mode 0o777, so that other users can replace tables in it; expected 0o700",
        str(directory / "group"): "has mode 0o770, so that",
        str(directory / "file"): "which is no directory",
        str(directory / "nowhere"): r"\[Errno 2\] .* Make it, or unset GEAR_LOADER_DIR",
        "relative": "expected an absolute path",
        str(directory / "other"): r"belongs to user [0-9]+, and this process runs as user [0-9]+",
    }
    for path, message in refused.items():
        monkeypatch.setattr(shared_memory, "DIRECTORY", path)
        if path.endswith("other"):
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
            if directory.stat().st_uid == 0:  # root's would be right
                monkeypatch.undo()
                monkeypatch.setattr(shared_memory, "DIRECTORY", path)
                os.chown(path, 12345, -1)
        message = f"^GEAR_LOADER_DIR is {path!r}.*{message}"
        with pytest.raises(RegionError, match=message):
            gear.Table.create(COLUMNS, **SIZES, name="a")
        with pytest.raises(RegionError, match=message):
            gear.Table.attach("a")
    monkeypatch.undo()
    for path in (directory / "sticky", directory / "own"):
        monkeypatch.setattr(shared_memory, "DIRECTORY", str(path))
        with gear.Table.create(COLUMNS, **SIZES, name="a") as table:
            table.unlink()


def test_a_directory_on_storage_is_noticed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory.filesystem() == "tmpfs"
    seen: list[str] = []
    monkeypatch.setattr(region, "notice", lambda key, message: seen.append(message))
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_mount", list)  # as without a file descriptor to read /proc
        with gear.Table.create(COLUMNS, **SIZES, name="b") as table:
            table.unlink()
    assert not seen
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "filesystem", lambda: "ext4")
        with gear.Table.create(COLUMNS, **SIZES, name="a") as table:
            table.unlink()
    (message,) = seen
    assert message.startswith(f"Named tables lie in {directory}, which is ext4 and not tmpfs")
    monkeypatch.setattr(shared_memory, "DIRECTORY", "/proc")
    assert shared_memory.filesystem() == "proc"
