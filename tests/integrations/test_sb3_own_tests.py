"""stable-baselines3's own tests of its replay buffers, run on ours. They come from its source package, by pip."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3", reason="needs pip install '.[sb3]'")

TOOLS = Path(__file__).resolve().parents[1] / "tools"
# Left out: buffers that are told that they are full while nothing was added, also of dtypes that columns do not have
# (uint16, uint32, uint64); and a value written into the array `dones`, of which ours is a copy.
LEFT_OUT = "not test_buffer_dtypes and not test_nstep_no_terminations"
REST = "not PPO and not A2C"  # of algorithms without a replay buffer


@pytest.fixture(scope="session")
def own_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests of the installed version."""
    folder = tmp_path_factory.mktemp("sb3")
    wanted = f"stable-baselines3=={importlib.metadata.version('stable-baselines3')}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "-q", "-d", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    packages = list(folder.glob("*.tar.gz"))
    if done.returncode != 0 or not packages:
        pytest.skip(f"the source package of {wanted} cannot be fetched: {done.stderr[-300:]}")
    with tarfile.open(packages[0]) as package:
        members = [each for each in package.getmembers() if re.match(r"[^/]+/tests/\w+\.py$", each.name)]
        package.extractall(folder, members, filter="data")
    return next(folder.glob("*/tests"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("files", "chosen", "least"),
    [
        (["test_buffers.py", "test_n_step_replay.py"], LEFT_OUT, 25),
        (["test_dict_env.py"], REST, 40),
        (["test_her.py"], "not multiprocessing", 30),
        (["test_save_load.py"], "save_load_replay_buffer", 3),
        (["test_vec_normalize.py"], "offpolicy or her", 2),
    ],
)
def test_it_passes_on_ours(own_tests: Path, files: list[str], chosen: str, least: int) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "sb3_substitutes",
        "-p",
        "no:cacheprovider",
        "-q",
        "-k",
        chosen,
    ]
    # One thread: those of torch wait for each other in a loop where cores are shared.
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TOOLS}{os.pathsep}{TOOLS.parents[1]}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, *(str(own_tests / file) for file in files)],
        capture_output=True,
        text=True,
        timeout=290,
        cwd=own_tests.parent,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-500:]
