"""What users import: an installed copy, a source distribution, a clone; and what children of the library import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from table_common import named
from transport_common import SECRET

import gear_loader
from gear_loader import doctor
from gear_loader.transport import start_server
from gear_loader.transport.child_process import child_command

ROOT = Path(__file__).resolve().parents[1]
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
PARTS = ("gear_loader", "triton_kernels", "benchmarks", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """What a Python process prints that finds packages under `path` and in the interpreter's own folders."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def origin(cwd: Path, path: Path) -> Path:
    """Where the kernels come from for a user who is in the folder `cwd` and has installed into `path`."""
    program = "import gear_loader.kernels.gather as module; print(module.__file__)"
    return Path(run("-c", program, cwd=cwd, path=path))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of what the package is built from."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, clone / name)
    return clone


@pytest.mark.long
def test_an_installed_copy_and_a_source_distribution(clone: Path, tmp_path: Path) -> None:
    site, elsewhere, again = (tmp_path / name for name in ("site", "elsewhere", "again"))
    elsewhere.mkdir()
    kernels = Path("gear_loader", "kernels", "gather.py")
    run(*PIP, site, ".", cwd=clone)
    assert origin(elsewhere, site) == site / kernels
    # In a clone its own folder comes first.
    assert origin(clone, site).resolve() == clone / "triton_kernels" / "gather.py"
    assert "single-server" in run("-m", "benchmarks", "list", cwd=clone, path=site)
    server = child_command("serve", "--help")[2:]
    assert "--secret-file" in run(site / "gear_loader" / "transport" / "child_process.py", *server, cwd=clone)

    run("-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", cwd=clone)
    (archive,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    run(*PIP, again, ".", cwd=unpacked)
    assert origin(elsewhere, again) == again / kernels
    assert origin(unpacked, again).is_relative_to(unpacked)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, where every module that a child imports by chance leaves a mark."""
    folder, mark = tmp_path / "here", tmp_path / "mark"
    for name in ("gear_loader", "nixl", "nixl_cu12", "numpy", "torch", "typer", "ucp", "ucxx"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    for name in ("asyncio", "importlib", "json", "os", "queue", "random", "re", "runpy", "types"):
        (folder / f"{name}.py").touch()
    for path in folder.rglob("*.py"):
        path.write_text(f"open({str(mark)!r}, 'a').write('{path.name}')\nraise SystemExit('hostile')\n")
    monkeypatch.chdir(folder)
    return mark


@pytest.mark.long
def test_a_server_imports_nothing_from_the_current_directory(hostile: Path) -> None:
    with named() as table, start_server([str(table.name)], secret=SECRET) as server:
        assert server.alive()
    assert not hostile.exists()


def test_the_doctors_probes_import_nothing_from_the_current_directory(hostile: Path) -> None:
    found = doctor._probe(doctor._PROBES["numba"], 60.0)
    assert found["problem"] is None
    assert found["version"]
    assert not hostile.exists()


def test_a_child_loads_the_package_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = (
        "import os, sys, gear_loader.errors as errors\n"
        "print(errors.__file__, __name__, *sys.argv)\n"
        "assert os.getcwd() not in sys.path and '' not in sys.path, sys.path\n"
    )
    done = subprocess.run(child_command("-c", program, "a word"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    place = Path(str(gear_loader.__file__)).parent / "errors.py"
    assert done.stdout.split() == [str(place), "__main__", "-c", "a", "word"]
