"""The README and the pages for users of other libraries: their snippets run as they stand.

Each snippet of the README runs alone, in a process of its own, after the lines that the README names for all; those of
a page run in order, in one process.
"""

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
    "docs/from-reverb.md",
    "docs/graph-serving.md",
    "docs/preemption.md",
    "docs/sequences.md",
    "docs/tiers.md",
    *NEEDS,
]
COMMON = "Each snippet below runs alone after these lines:\n\n"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def snippets(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)


def run(program: str, folder: Path) -> str:
    """Run a program in a folder, as `torchrun` runs one process; return what it prints."""
    for package in ("gymnasium", "lightning"):
        pytest.importorskip(package)
    path = folder / "snippet.py"
    path.write_text(program, "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, **alone, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{program}\n{done.stderr[-4000:]}"
    return done.stdout


README = (ROOT / "README.md").read_text("utf-8")
FIRST, REST = README.split(COMMON)
LINES, *ALONE = snippets(REST)


def test_the_first_program_learns(tmp_path: Path) -> None:
    (program,) = snippets(FIRST)
    found = re.search(r"mean return of the last 20 episodes: (\d+)", run(program, tmp_path))
    assert found is not None
    assert int(found[1]) > 100  # the start is at about 20


@pytest.mark.parametrize("snippet", ALONE, ids=range(1, len(ALONE) + 1))
def test_each_snippet_of_the_readme_runs_alone(snippet: str, tmp_path: Path) -> None:
    run(LINES + snippet, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    for package in NEEDS.get(page, []):
        pytest.importorskip(package)
    found = snippets((ROOT / page).read_text("utf-8"))
    assert found, page
    run("\n\n".join(found), tmp_path)
