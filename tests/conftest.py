"""What holds for every test: threads, Triton's interpreter, GPU tests, random seeds, shared memory."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator

from tables_directory import make_directory

gc.disable()  # until all is imported: collections would search it again and again, and find nothing

# Libraries read these when they are first imported, so they come before the imports below. Spawned
# processes inherit them.
_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, str(min(4, _cores)))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the core from what they wait for

os.environ.setdefault("GEAR_LOADER_PEERS", "")  # the benchmarks' peers are not what is tested

# Named tables of this process and its children lie in a directory of their own, which is removed in the end, or by the
# next run. A worker of xdist makes its own in that of the process that started it.
TABLES = make_directory(os.environ.get("GEAR_LOADER_DIR") or "/dev/shm")
TABLES.chmod(0o711)  # a test becomes another user, who has to reach a directory in it
os.environ["GEAR_LOADER_DIR"] = str(TABLES)

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
    # For runs that leave out what is marked long.
    hypothesis.settings.register_profile(
        "gear-loader-short",
        deadline=None,
        derandomize=bool(os.environ.get("CI")),
        max_examples=10,
        stateful_step_count=30,
    )


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--emulated",
        metavar="TRITON",
        help="run kernels as this version of Triton, or the installed one, compiled them",
    )
    parser.addoption(
        "--storm-seconds",
        type=float,
        default=15.0,
        help="duration of tests/transport/test_storm.py; 15 by default",
    )
    parser.addoption(
        "--seconds",
        type=float,
        help="skip tests that would begin later than so many seconds after the run did: where a run has an end",
    )
    if not pluginmanager.has_plugin("timeout"):
        parser.addini("timeout", "seconds a test may take (not enforced: pytest-timeout is not installed)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("GEAR_LOADER_TESTS_BEGAN", str(time.time()))  # workers of xdist get that of the run
    if importlib.util.find_spec("hypothesis") is not None:
        short = "not long" in config.getoption("markexpr")
        full = "gear-loader-ci" if os.environ.get("CI") else "gear-loader"
        hypothesis.settings.load_profile("gear-loader-short" if short else full)
    if config.getoption("emulated"):
        from emulation.launch import install  # imports the kernels

        version = config.getoption("emulated")
        install(importlib.metadata.version("triton") if version == "installed" else version)
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): not enforced, pytest-timeout is not installed")


# Loaded once, in the fork server, and not in each process that tests start with it. It runs in the repository's root.
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.forked"])


def pytest_collection_finish() -> None:
    # Tests that look for what is left behind collect garbage; each collection would search all that has been imported.
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds = item.config.getoption("seconds")
    if seconds is not None and time.time() - float(os.environ["GEAR_LOADER_TESTS_BEGAN"]) > seconds:
        pytest.skip(f"not begun within --seconds {seconds:g}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("emulated") and not config.getoption("numprocesses", None):
        from emulation.launch import LAUNCHES

        launches = ", ".join(f"{name} {count}" for name, count in sorted(LAUNCHES.items())) or "none here"
        terminalreporter.write_line(f"Emulated launches: {launches}")


def pytest_unconfigure() -> None:
    shutil.rmtree(TABLES, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
            )


# Shared memory ---------------------------------------------------------------------------------------

_PATIENCE = 60.0  # seconds for a child on its way out: the machine may be busy


def _files() -> set[bytes]:
    """Whatever lies in the tests' directory, half made files too. Bytes, because a name may be any."""
    return {entry for entry in os.listdir(os.fsencode(TABLES)) if b"gear-loader." in entry}


def _check(before: set[bytes], what: str) -> None:
    """Fail if files were made after `before` was taken and are still there; removes them."""
    deadline = time.monotonic() + _PATIENCE
    while (left := _files() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    for name in left:
        (TABLES / os.fsdecode(name)).unlink(missing_ok=True)
    if left:
        # Escaped: what a worker of xdist reports has to be UTF-8.
        names = ", ".join(name.decode("ascii", "backslashreplace") for name in sorted(left))
        pytest.fail(
            f"{what} left {names} in {TABLES}: call table.unlink(), or use "
            "the table in a with-statement and unlink it (the files have been removed now).",
            pytrace=False,
        )


@pytest.fixture(scope="session", autouse=True)
def _no_region_outlives_the_session() -> Iterator[None]:
    before = _files()
    yield
    _check(before, "A fixture wider than one test")


@pytest.fixture(autouse=True)
def _what_a_test_imports_is_not_searched() -> Iterator[None]:
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 100:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _start_method_is_as_before() -> Iterator[None]:
    # Importing torchrl changes how all later processes start.
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    if multiprocessing.get_start_method(allow_none=True) != before:
        multiprocessing.set_start_method(before, force=True)


@pytest.fixture(autouse=True)
def _no_region_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    # pytest sets up wider fixtures first and this one before the test's own, and takes them down in reverse:
    # what wider fixtures hold is in `before`, what the test's own fixtures hold is gone by the check.
    before = _files()
    yield
    _check(before, request.node.nodeid)
