"""What tests of the benchmarks share. Importing it skips them where the benchmarks cannot run."""

from __future__ import annotations

import importlib
import importlib.util
import json
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


def session(path: Path, repeats: int = 1, experiment: str = "", **options: Any) -> Any:
    """A session that appends to a file."""
    made = importlib.import_module("benchmarks.harness").Session
    told = {"quick": True, "threads": 1}
    return made(
        path,
        experiment=experiment,
        configuration=told,
        device="cpu",
        repeats=repeats,
        **{"quick": True, **options},
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of what was measured."""
    return [row for row in all_rows(path) if "left_out" not in row]


def reasons_of(path: Path) -> dict[str, str]:
    """What was not measured, and why."""
    return {row["left_out"]: row["why"] for row in all_rows(path) if "left_out" in row}


def all_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_row(row: dict[str, Any], experiment: str, *configured: str) -> None:
    """Every row says what was measured, how, with what result, and on what."""
    assert row["experiment"] == experiment
    assert isinstance(row["workload"], str)
    assert isinstance(row["variant"], str)
    assert row["repeats"] > 0
    if "amount" in row:
        assert set(row["amount"]) == {"p10", "p50", "p90"}
        assert isinstance(row["unit"], str)
    else:
        assert row["batches_per_repeat"] > 0
        assert ("bytes" in row) == ("gb_per_s" in row) == ("rows" not in row)
        for name in ("seconds", "ratio", *(["gb_per_s"] if "bytes" in row else [])):
            assert 0 < row[name]["p10"] <= row[name]["p50"] <= row[name]["p90"]
        if "bytes" in row:
            assert row["gb_per_s"]["p50"] == pytest.approx(row["bytes"] / row["seconds"]["p50"] / 1e9)
        assert set(row["targets"]) <= {row["yardstick"], *row["ratios"]}
    assert {"quick", "threads", *configured} <= set(row["configuration"])
    assert {"cpu", "cores", "memory_bytes", "last_level_cache_bytes", "gpu", "load"} <= set(row["machine"])
    assert {"python", "torch", "triton", "numpy", "numba", "cuda"} <= set(row["versions"])
    assert {"commit", "dirty", "source", "date", "run", "device"} <= set(row)


class Here:
    """Stands in for a peer's process: works in this one.

    Args:
        worker: answers the commands, as it does in the process.
        versions: that it tells. faults: command -> why it fails, or what its answer is changed by.
    """

    def __init__(self, worker: Any, versions: dict[str, str] | None = None, **faults: Any) -> None:
        self.about = {"versions": versions or {}, "note": None}
        self.worker, self._faults = worker, faults

    def ask(self, what: str, **arguments: Any) -> Any:
        failed = importlib.import_module("benchmarks.peers.process").PeerFailed
        fault = self._faults.get(what, {})
        if isinstance(fault, str):
            raise failed(fault)
        try:
            answer = getattr(self.worker, what)(**json.loads(json.dumps(arguments)))
        except Exception as error:
            raise failed(f"{type(error).__name__}: {error}") from error
        return json.loads(json.dumps({**(answer or {}), **fault}))

    def close(self) -> None:
        self.worker.close()


def worker(task: str, kind: Any) -> Any:
    """What does a task with a variant, as in its process."""
    return importlib.import_module(f"benchmarks.peers.{task}").Worker({"it": kind}, "it")
