"""The examples run: the short forms that they offer for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
def test_prioritized_dqn(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "prioritized_dqn.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert set(json.loads((tmp_path / "summary.json").read_text())["runs"]) == {"prioritized", "uniform"}


@pytest.mark.slow
def test_plain_pytorch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "plain_pytorch.py"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
