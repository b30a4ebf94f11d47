"""What tests of the benchmarks share. Importing it skips them where the benchmarks cannot run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("rich", "typer"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the benchmarks need {package}", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `pytest` alone does not put it there, `python -m pytest` does
    sys.path.insert(0, str(ROOT))

HAS_GPU = torch.cuda.is_available()
needs_no_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a GPU, for which the real thing runs")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, on few threads and without this process's interpreter of kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.update(COLUMNS="200", TERM="dumb")
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def call(*arguments: str) -> Any:
    """The command line in this process, which is quicker."""
    from typer.testing import CliRunner

    app = importlib.import_module("benchmarks.__main__").app
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, arguments)
        finally:
            torch.set_num_threads(threads)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of what was measured."""
    return [row for row in all_rows(path) if "left_out" not in row]


def reasons_of(path: Path) -> dict[str, str]:
    """What was not measured, and why."""
    return {row["left_out"]: row["why"] for row in all_rows(path) if "left_out" in row}


def all_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Here:
    """Stands in for a peer's process: works in this one.

    Args:
        worker: answers the commands, as it does in the process.
    """

    def __init__(self, worker: Any) -> None:
        self.about = {"versions": {}, "note": None}
        self._worker = worker

    def ask(self, what: str, **arguments: Any) -> Any:
        failed = importlib.import_module("benchmarks.peers.process").PeerFailed
        try:
            return getattr(self._worker, what)(**arguments)
        except Exception as error:
            raise failed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        pass
