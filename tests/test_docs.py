"""The site builds, has every public name, and refuses a reference that leads nowhere."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import needs

needs("sphinx", "furo", "myst_parser")  # pip install '.[docs]'

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = (
    "",
    ".checkpoint",
    ".distributed",
    ".errors",
    ".graph",
    ".integrations.torchrl",
    ".sources",
    ".transforms",
    ".transport",
)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run Sphinx as `make docs` does."""
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)


@pytest.mark.long
def test_the_reference_builds_and_has_every_public_name(tmp_path: Path) -> None:
    done = build(ROOT / "docs", tmp_path)
    assert done.returncode == 0, done.stderr
    pages = "".join(page.read_text(encoding="utf-8") for page in tmp_path.glob("reference/*.html"))
    names = {
        f"{module}.{name}"
        for module in (f"gear_loader{part}" for part in PUBLIC)
        for name in importlib.import_module(module).__all__
    }
    described = set(re.findall(r'id="(?:module-)?(gear_loader[\w.]*)"', pages))
    assert sorted(names - described) == []
    options = (
        "gear-loader ls",
        "gear-loader rm",
        "gear-loader serve",
        "--secret-file",
        "gear-loader warmup",
        "gear-loader doctor",
    )
    assert all(option in pages for option in options)


@pytest.mark.long
def test_a_reference_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    """One page of one module, whose docstrings have names that exist and names that do not."""
    source = tmp_path / "source"
    source.mkdir()
    for folder in ("_static", "extensions"):
        shutil.copytree(ROOT / "docs" / folder, source / folder)
    settings = source / "conf.py"
    shutil.copy(ROOT / "docs" / "conf.py", settings)
    settings.write_text(
        settings.read_text(encoding="utf-8").replace("parents[1]", "parents[0]")
        + "\npublic_modules = ['some_module']\n",
        encoding="utf-8",
    )
    (source / "index.rst").write_text("Page\n====\n\n.. automodule:: some_module\n", encoding="utf-8")
    (source / "some_module.py").write_text(
        '__all__ = ["Thing", "unwritten"]\n'
        "unwritten = 3\n"
        "class Thing:\n"
        '    """Has `Thing.size`, `size`, `torch.Tensor`, `ValueError`, `Colour` and `word`.\n\n'
        "    Not `Thing.length`, `Thong`, `measure()` or `torch.Tensors`.\n\n"
        "    Args:\n        Colour: any.\n"
        '    """\n'
        "    def __init__(self, Colour):\n"
        "        self.size: int = 3\n"
        '        """Its size."""\n',
        encoding="utf-8",
    )
    done = build(source, tmp_path / "out")
    assert done.returncode != 0
    found = re.findall(r"`(\S+)` leads nowhere", done.stderr)
    assert found == ["Thing.length", "Thong", "measure()", "torch.Tensors"]
    assert "some_module.unwritten is public, and no page describes it" in done.stderr
    assert len(done.stderr.splitlines()) == 5, done.stderr
