"""The README and the pages of docs/: their snippets run as they stand, and their links lead somewhere.

A snippet runs alone, as a reader copies it, or where a page tells one program in pieces, after those before it. The
recipes of docs/start and docs/howto are in test_recipes.py.
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
NEEDS["docs/other-libraries.md"], NEEDS["docs/data.md"] = ["minari"], ["datasets", "msgpack", "h5py"]
IN_ORDER = ["docs/datasets.md", "docs/from-reverb.md", "docs/graph-serving.md", "docs/hindsight.md"]
IN_ORDER += ["docs/tables.md", "docs/transforms.md", *NEEDS]
ALONE = ["README.md", "docs/index.md", "docs/sequences.md"]
TEXTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
TEXTS += sorted((ROOT / "docs").rglob("*.md"))

pytestmark = pytest.mark.timeout(900)


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
    alone["MINARI_DATASETS_PATH"] = str(folder / "minari")
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


PROGRAMS = {
    f"{page}-{number}": snippet
    for page in ALONE
    for number, snippet in enumerate(snippets((ROOT / page).read_text("utf-8")), 1)
}


def anchors(path: Path) -> set[str]:
    """The headings of a page, as GitHub makes links of them."""
    prose = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)", prose, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.long
def test_the_dqn_learns(tmp_path: Path) -> None:
    program = "\n\n".join(snippets((ROOT / "docs/dqn.md").read_text("utf-8")))
    found = re.search(r"mean return of the last 20 episodes: (\d+)", run(program, tmp_path))
    assert found is not None
    assert int(found[1]) > 100  # the start is at about 20


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_snippet_runs_alone(program: str, tmp_path: Path) -> None:
    run(program, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", IN_ORDER)
def test_the_snippets_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    for package in NEEDS.get(page, []):
        pytest.importorskip(package)
    found = snippets((ROOT / page).read_text("utf-8"))
    assert found, page
    run("\n\n".join(found), tmp_path)


def test_every_page_with_snippets_is_run() -> None:
    with_snippets = {str(path.relative_to(ROOT)) for path in TEXTS if snippets(path.read_text("utf-8"))}
    recipes = {name for name in with_snippets if name.startswith(("docs/start/", "docs/howto/"))}
    assert with_snippets - recipes == {*IN_ORDER, *ALONE, "docs/dqn.md"}


def test_programs_with_a_model_say_where_it_is() -> None:
    """Batches are on the GPU if there is one, and modules on the CPU, unless both are told."""
    programs = {path.name: "\n".join(snippets(path.read_text("utf-8"))) for path in TEXTS}
    models = {name: program for name, program in programs.items() if re.search(r"\bnn\.[A-Z]", program)}
    assert len(models) > 5
    told = r'device="cpu"|\.to\((device|\w+\.device)\)|lightning\.Trainer'
    assert [name for name, program in models.items() if not re.search(told, program)] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if not link.startswith("https://"):
            name, _, heading = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), link
            assert not heading or heading in anchors(target), link
