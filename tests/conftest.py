"""What holds for every test: threads, Triton's interpreter, GPU tests, random seeds, shared memory."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

# Libraries read these when they are first imported, so they come before the imports below. Spawned
# processes inherit them.
_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, str(min(4, _cores)))

os.environ.setdefault("GEAR_LOADER_PEERS", "")  # the benchmarks' peers are not what is tested

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# `@triton.jit` reads this while it decorates. With a GPU the kernels are compiled, as in production.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A GPU machine may lack the two plugins; everything that does not need them still runs there.
if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    hypothesis.settings.register_profile("gear-loader", deadline=None)
    # The same examples each time: half as many as a run that looks for new ones has.
    hypothesis.settings.register_profile(
        "gear-loader-ci", deadline=None, derandomize=True, database=None, max_examples=50
    )
    hypothesis.settings.load_profile("gear-loader-ci" if os.environ.get("CI") else "gear-loader")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.has_plugin("timeout"):
        parser.addini("timeout", "seconds a test may take (not enforced: pytest-timeout is not installed)")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): not enforced, pytest-timeout is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
            )


# Shared memory ---------------------------------------------------------------------------------------

_SHARED_MEMORY = Path("/dev/shm")
_foreign: set[Path] = set()  # files that other processes of this machine brought along


def _regions() -> set[Path]:
    found = {*_SHARED_MEMORY.glob("gear-loader.*"), *_SHARED_MEMORY.glob(".gear-loader.*")}  # dot: half made
    return found - _foreign


def _ancestors(pid: int) -> Iterator[int]:
    """`pid`, its parent, its parent's parent, ..."""
    while pid > 0:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return


def _used_elsewhere(region: Path) -> bool:
    """Whether a process that does not descend from this one has the file mapped."""
    try:
        info = region.stat()
    except OSError:
        return False
    # By number: in the process that made it, the mapping does not bear the file's name.
    file = [f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}", str(info.st_ino)]
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped = any(line.split()[3:5] == file for line in maps.read_text().splitlines())
            if mapped and os.getpid() not in _ancestors(int(maps.parent.name)):
                return True
        except OSError:  # gone in the meantime, or not ours to read
            continue
    return False


def _left_behind(before: set[Path]) -> list[str]:
    """Names of the regions that were made after `before` was taken and are still there; removes them."""
    deadline = (
        time.monotonic() + 2.0
    )  # for a child on its way out, and another test run between two attachments
    while (candidates := _regions() - before) and time.monotonic() < deadline:
        _foreign.update(region for region in candidates if _used_elsewhere(region))
        time.sleep(0.05)
    for region in candidates:
        region.unlink(missing_ok=True)
    return sorted(region.name for region in candidates)


def _check(before: set[Path], what: str) -> None:
    leaked = _left_behind(before)
    if leaked:
        pytest.fail(
            f"{what} left {', '.join(leaked)} in {_SHARED_MEMORY}: call table.unlink(), or use "
            "the table in a with-statement and unlink it (the files have been removed now).",
            pytrace=False,
        )


@pytest.fixture(scope="session", autouse=True)
def _no_region_outlives_the_session() -> Iterator[None]:
    before = _regions()
    yield
    _check(before, "A fixture wider than one test")


@pytest.fixture(autouse=True)
def _no_region_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    # pytest sets up wider fixtures first and this one before the test's own, and takes them down in reverse:
    # what wider fixtures hold is in `before`, what the test's own fixtures hold is gone by the check.
    before = _regions()
    yield
    _check(before, request.node.nodeid)
