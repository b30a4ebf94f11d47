"""Lightning's requeue under Slurm, which saves a checkpoint in the handler of a signal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SLURM = {
    "SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


@pytest.mark.long
def test_a_requeued_job_goes_on_with_the_batches_of_an_undisturbed_one(tmp_path: Path) -> None:
    programs, told, runs = tmp_path / "bin", tmp_path / "told", tmp_path / "runs"
    programs.mkdir()
    runs.mkdir()
    scontrol = programs / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    scontrol.chmod(0o755)
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "lightning_requeue.py"), str(runs)],
        env={
            **os.environ,
            **SLURM,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    saved = int(done.stdout.split()[-1])
    assert saved >= 6
    assert told.read_text().splitlines() == ["requeue 1234"] * saved
