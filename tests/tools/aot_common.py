"""Kernels compiled by each Triton that they must compile with: the installed one, and others that pip fetches.

What became of them is kept in a folder below, and read there until a kernel, or how it is compiled, has changed.

A Triton that is not installed goes into `$XDG_CACHE_HOME/gear-loader-tests` (else `~/.cache/gear-loader-tests`; about
640 MB each) and stays there for the next run. Where it cannot be fetched, its tests are skipped with pip's reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ARCHITECTURES = (80, 90, 100)
INSTALLED = importlib.metadata.version("triton")
VERSIONS = tuple(sorted({"3.6.0", "3.7.1", INSTALLED}))
SAMPLE = ("cast_uint8_bfloat16", "gather_16", "packed", "place", "priority_draw", "split", "store")


def _marks(version: str, arch: int) -> list[pytest.MarkDecorator]:
    """In CI: the kernels that are emulated, and by the installed version those of the newest architecture."""
    in_ci = arch == 90 or (version == INSTALLED and arch == ARCHITECTURES[-1])
    return [pytest.mark.long, *([] if in_ci else [pytest.mark.exhaustive])]


TARGETS = [
    pytest.param((INSTALLED, 90, SAMPLE), id="some kernels"),
    *(
        pytest.param((version, arch, ()), id=f"{version}-sm_{arch}", marks=_marks(version, arch))
        for version in VERSIONS
        for arch in ARCHITECTURES
    ),
]
"""Triton's version, the GPU's architecture, and what the kernels' names begin with; all kernels without that."""

Target = tuple[str, int, tuple[str, ...]]
Report = dict[str, Any]
Reports = dict[str, Report]
"""What tests/tools/aot.py printed for each kernel, by the kernel's name."""


def reports(target: Target) -> Reports:
    """Compile kernels, or read what became of them when an earlier run compiled the same sources."""
    version, arch, kernels = target
    result = _cache() / f"aot-{'-'.join(kernels) or 'all'}-{version}-sm_{arch}-{_sources()}.json"
    with _locked(result.with_suffix(".lock")):
        if not result.exists():
            compiled = _compile(kernels, version, arch)
            if isinstance(compiled, str):
                pytest.skip(compiled)
            part = result.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(compiled))
            part.rename(result)  # whole, or not at all
    found = json.loads(result.read_text())
    assert {report["triton"] for report in found} == {version}
    return {report["kernel"]: report for report in found}


def _cache() -> Path:
    """The folder of what is kept from run to run."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gear-loader-tests"
    root.mkdir(parents=True, exist_ok=True)
    return root


@functools.cache
def _sources() -> str:
    """A digest of the kernels and of the program that compiles them."""
    here = Path(__file__).parent
    files = [here / "aot.py", *sorted((here.parents[1] / "triton_kernels").glob("*.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _compile(kernels: tuple[str, ...], version: str, arch: int) -> list[Report] | str:
    """The reports of tests/tools/aot.py, a program of its own, or why that Triton is not here."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if version != INSTALLED:
        try:
            folders = [str(fetched(version)), *filter(None, [os.environ.get("PYTHONPATH")])]
        except NotFetchedError as error:
            return str(error)
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    command = [
        sys.executable,
        str(Path(__file__).with_name("aot.py")),
        "--ptx",
        "--arch",
        str(arch),
        *kernels,
    ]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class NotFetchedError(Exception):
    """Why a version of Triton could not be fetched."""


def fetched(version: str) -> Path:
    """A folder from which this version of Triton can be imported.

    Raises:
        NotFetchedError: pip could not fetch it.
    """
    root = _cache()
    folder = root / f"triton-{version}-{sys.implementation.cache_tag}-{platform.machine()}"
    if folder.is_dir():  # renamed when it was complete
        return folder
    with _locked(root / f"{folder.name}.lock"):
        if not folder.is_dir():
            part = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root)
            try:
                _pip_install(version, part)
                os.rename(part, folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def _pip_install(version: str, folder: str) -> None:
    options = ["--disable-pip-version-check", "--quiet", "--no-input", "--retries=1", "--timeout=30"]
    what = ["--no-deps", "--only-binary=:all:", "--target", folder, f"triton=={version}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *what],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()] or ["pip printed no error"]
        raise NotFetchedError(f"Triton {version} could not be fetched: {errors[-1]}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
