"""The owners' own tests of replay buffers and storage, on ours: stable-baselines3, TorchRL, Tianshou, TransferQueue.

They are fetched from the owners' packages or repositories, of the installed version; SB3_TESTS, TORCHRL_TESTS and
TIANSHOU_TESTS name a checkout in their place. Those of TransferQueue are installed with it. A library that this
environment does not have, or cannot load whole, is taken from `make peers`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "tools"
PEERS = Path(os.environ.get("GEAR_LOADER_PEERS", ROOT / ".peers"))

RAY = {"RAY_memory_monitor_refresh_ms": "0"}  # a monitor that kills workers for memory that others have
LIBRARIES = {  # distribution, what has to be imported, its repository and the folder that its tests run in
    "sb3": ("stable-baselines3", "stable_baselines3", None, "."),
    "torchrl": ("torchrl", "torchrl._torchrl", "https://github.com/pytorch/rl", "test/rb"),
    "tianshou": ("tianshou", "tianshou.data", "https://github.com/thu-ml/tianshou", "."),
    "transferqueue": ("TransferQueue", "transfer_queue", None, "tests/e2e"),
}


def interpreter(name: str, module: str) -> str:
    """One that has a library: this one, or that of `make peers`."""
    for python in (Path(sys.executable), PEERS / name / "bin" / "python"):
        program = f"import {module}, gear_loader, pytest, pytest_timeout"
        if python.exists() and subprocess.run([python, "-c", program], capture_output=True).returncode == 0:
            return str(python)
    pytest.skip(
        f"{module} cannot be imported here; make peers ARGS='.peers {name}' makes an environment that has it"
    )


@pytest.fixture(scope="session")
def checkouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in LIBRARIES}


def own_tests(name: str, python: str, folder: Path) -> Path:
    """The folder that the tests of the installed version run in; fetched once."""
    distribution, module, repository, place = LIBRARIES[name]
    if known := os.environ.get(f"{name.upper()}_TESTS"):
        return Path(known) / place
    if name == "transferqueue":
        program = f"import importlib.util as found; print(found.find_spec({module!r}).origin)"
        origin = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
        return Path(origin.stdout.strip()).parents[1] / place
    program = f"import importlib.metadata as found; print(found.version({distribution!r}))"
    version = subprocess.run(
        [python, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    release = version.stdout.strip().partition("+")[0]
    if not any(folder.iterdir()):
        if repository is None:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-q"]
            command += ["--no-build-isolation", "-d", str(folder), f"{distribution}=={release}"]
        else:
            command = [
                "git",
                "clone",
                "-q",
                "--depth=1",
                f"--branch=v{release}",
                repository,
                str(folder / "it"),
            ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
        if done.returncode != 0:
            pytest.skip(f"the tests of {distribution} {release} cannot be fetched: {done.stderr[-300:]}")
        for package in folder.glob("*.tar.gz"):
            with tarfile.open(package) as opened:
                members = [
                    each for each in opened.getmembers() if re.match(r"[^/]+/tests/\w+\.py$", each.name)
                ]
                opened.extractall(folder, members, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir()) / place


SB3 = {
    # Left out: buffers that are told that they are full while nothing was added, also of dtypes that columns do not
    # have (uint16, uint32, uint64); and a value written into the array `dones`, of which ours is a copy.
    "tests/test_buffers.py tests/test_n_step_replay.py": (
        25,
        "not test_buffer_dtypes and not test_nstep_no_terminations",
    ),
    "tests/test_dict_env.py": (40, "not PPO and not A2C"),  # which have no replay buffer
    "tests/test_her.py": (30, "not multiprocessing"),
    "tests/test_save_load.py": (3, "save_load_replay_buffer"),
    "tests/test_vec_normalize.py": (2, "offpolicy or her"),
}
TORCHRL = {
    # Left out: a race, which TorchRL's own storage loses too: it compares views while a thread writes.
    "test_rb_core.py": (500, "not concurrent_updates_do_not_tear_records"),
    "test_writers.py": (20, ""),
    # Left out: rows of a TensorDict that its owner changes after it was added. Ours are copies, as those of
    # LazyTensorStorage; the default storage of TorchRL keeps the TensorDict itself.
    "test_prioritized.py": (36, "not (test_ptdrb and 0.7)"),
    # 40 cases of one test take six minutes; they pass.
    "test_samplers.py": (250, "not prioritized_span"),
    # Left out: shared_init, and rows that a forked process sees without a name (a table's name does that); entries of
    # several shapes; a storage that is made while torch.compile traces it.
    "test_storages.py": (
        80,
        "not shared_storage_multiprocess and not shared_init_reconciles and not cache_invalidated_across "
        "and not test_extend_lazystack[ and not ndim_recompile",
    ),
    "test_ensemble.py test_query.py test_her.py test_rb_transforms.py": (250, ""),
}
TIANSHOU = {"test/base/test_buffer.py": (18, "")}
TRANSFERQUEUE = {
    "test_kv_interface_e2e.py": (56, ""),
    "test_e2e_lifecycle_consistency.py": (8, ""),
    # Left out: tests that look for the files of its own simple storage in a checkpoint.
    "test_checkpoint_e2e.py": (
        10,
        "not mismatch and not test_tensor_fields and not test_storage_saved_is_true",
    ),
}
MINUTES = ("test_samplers.py", "test_storages.py", "tests/test_dict_env.py", "tests/test_her.py")
"""Files that take minutes, which CI leaves out."""
RUNS = [
    pytest.param(
        *(name, files, chosen, least),
        id=f"{name}-{files.split()[0]}",
        marks=pytest.mark.exhaustive if files in MINUTES else (),
    )
    for name, runs in (
        ("sb3", SB3),
        ("torchrl", TORCHRL),
        ("tianshou", TIANSHOU),
        ("transferqueue", TRANSFERQUEUE),
    )
    for files, (least, chosen) in runs.items()
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "files", "chosen", "least"), RUNS)
def test_they_pass_on_ours(
    checkouts: dict[str, Path], name: str, files: str, chosen: str, least: int
) -> None:
    python = interpreter(name, LIBRARIES[name][1])
    folder = own_tests(name, python, checkouts[name])
    command = [python, "-m", "pytest", "-p", f"{name}_substitutes", "-p", "no:cacheprovider", "-q"]
    # An environment inside of this project would take its rule that warnings are errors.
    command += ["-o", "filterwarnings=default"]
    # One thread: those of torch wait for each other in a loop where cores are shared.
    paths = os.pathsep.join(map(str, (TOOLS, ROOT)))
    done = subprocess.run(
        [*command, *(["-k", chosen] if chosen else []), *files.split()],
        capture_output=True,
        text=True,
        timeout=290,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local", **RAY},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-500:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "module", "chosen", "seconds"),
    [
        ("tianshou", "tianshou", "not exhaustive", 290),
        ("d3rlpy", "d3rlpy", "not exhaustive", 290),
        ("rllib", "ray.rllib", "not exhaustive", 290),
        pytest.param(
            "rllib",
            "ray.rllib",
            "exhaustive",
            1100,
            marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)],
        ),
        ("transferqueue", "transfer_queue", "not exhaustive", 290),
    ],
)
def test_ours_pass_in_an_environment_that_has_the_library(
    name: str, module: str, chosen: str, seconds: int
) -> None:
    python = interpreter(name, module)
    file = ROOT / "tests" / "integrations" / f"test_{name}.py"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", "-m", chosen, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-500:]
