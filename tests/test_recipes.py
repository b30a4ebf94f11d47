"""The pages of docs/start and docs/howto: each snippet runs alone, as a reader would copy it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from test_readme import ROOT, run, snippets

PAGES = [path for folder in ("start", "howto") for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
SNIPPETS = {
    f"{path.parent.name}/{path.stem}": found[0]
    for path in PAGES
    if (found := snippets(path.read_text("utf-8")))
}
# What starts a process group, or lives on in the process, has a process of its own; the rest share this one.
APART = {"howto/ddp", "howto/lightning", "howto/ray", "howto/several-machines", "howto/slurm"}
APART |= {"howto/transfer-queue"}
NEEDS = {
    "howto/decision-transformer": ["gymnasium"],
    "howto/images": ["simplejpeg", "zstandard"],
    "howto/lightning": ["lightning"],
    "howto/offline-data": ["h5py", "pandas", "pyarrow"],
    "howto/ray": ["ray"],
    "howto/transfer-queue": ["transfer_queue"],
    "howto/vector-environments": ["gymnasium"],
    "start/first-buffer": ["gymnasium"],
}


def test_every_page_has_one_snippet_and_is_in_the_index() -> None:
    without = {"start/install", "howto/index"}
    for path in PAGES:
        name = f"{path.parent.name}/{path.stem}"
        assert len(snippets(path.read_text("utf-8"))) == (name not in without), name
    index = (ROOT / "docs/howto/index.md").read_text("utf-8")
    linked = set(re.findall(r"\]\(([\w-]+)\.md\)", index))
    assert linked == {path.stem for path in PAGES if path.parent.name == "howto"} - {"index"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in APART else ()) for name in SNIPPETS]
)
def test_a_recipe_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    if name in APART:
        run(SNIPPETS[name], tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec(compile(SNIPPETS[name], f"docs/{name}.md", "exec"), {"__name__": "__main__"})
