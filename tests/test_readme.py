"""The README and the pages for users of other libraries: every snippet runs as it stands, in order, in one process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDS = {"docs/from-sb3.md": ["stable_baselines3"], "docs/from-torchrl.md": ["torchrl", "tensordict"]}
PAGES = [
    "README.md",
    "docs/from-reverb.md",
    "docs/graph-serving.md",
    "docs/preemption.md",
    "docs/sequences.md",
    "docs/tiers.md",
    *NEEDS,
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str, tmp_path: Path) -> None:
    for package in (*NEEDS.get(page, []), "gymnasium", "lightning"):
        pytest.importorskip(package)
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.S | re.M)
    assert snippets, page
    program = tmp_path / "snippets.py"
    program.write_text("\n\n".join(snippets), "utf-8")
    # As `torchrun` sets it for one process.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, **alone, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if page == "README.md":
        found = re.search(r"mean return of the last 20 episodes: (\d+)", done.stdout)
        assert found is not None
        assert int(found[1]) > 100  # the start is at about 20
