"""`tables_directory`: runs that were ended leave nothing; a run that goes on keeps its directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tables_directory import make_directory

HOLD = "import sys, tables_directory as d; print(d.make_directory(sys.argv[1]), flush=True); input()"


def start(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_run_removes_what_killed_runs_left(tmp_path: Path) -> None:
    killed, left = start(tmp_path)
    going, kept = start(tmp_path)
    try:
        (left / "gear-loader.table").write_bytes(b"0")
        killed.kill()
        killed.wait()
        fresh = tmp_path / f"gear-loader-tests-{os.getpid()}-new"  # of a run that has not locked it yet
        fresh.mkdir()
        old = tmp_path / f"gear-loader-tests-{os.getpid()}-old"
        old.mkdir()
        os.utime(old, (0, 0))
        mine = make_directory(tmp_path)
        assert set(tmp_path.iterdir()) == {kept, fresh, mine}
    finally:
        for process in (killed, going):
            process.kill()
            process.communicate()
    make_directory(tmp_path)
    assert mine.is_dir()
    assert not kept.exists()
