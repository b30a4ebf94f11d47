"""Ray actors write into a named table: the example, with Ray itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_actors.py"


@pytest.mark.long
def test_ray_actors_write_while_the_driver_samples(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs pip install '.[ray]'")
    command = [sys.executable, EXAMPLE, "--rounds", "2", "--steps", "200", "--batches", "10"]
    variables = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (added,) = re.findall(r"2 actors added ([\d,]+) steps", done.stdout)
    assert int(added.replace(",", "")) >= 1200
