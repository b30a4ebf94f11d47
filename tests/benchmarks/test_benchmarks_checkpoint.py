"""The benchmark of checkpoints compares what was loaded with what was saved, and says what it left out."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import Here, call, rows_of, run

checkpoint = importlib.import_module("benchmarks.checkpoint")
harness = importlib.import_module("benchmarks.harness")
peers = importlib.import_module("benchmarks.peers.checkpoint_peers")
process = importlib.import_module("benchmarks.peers.process")
workers = importlib.import_module("benchmarks.checkpoint_workers")
workloads = importlib.import_module("benchmarks.workloads")

SPEC = {
    "columns": {"observation": [3], "reward": []},
    "steps": 10,
    "trajectories": 60,
    "more": 20,
    "seed": 1,
}
WORKLOADS = ["save", "save again", "load", "load, cold"]


def check_row(row: dict[str, Any]) -> None:
    """Every row says what was measured, how, with what result, and on what."""
    assert row["experiment"] == "checkpoint"
    assert row["workload"] in WORKLOADS
    assert row["yardstick"] == ("write" if row["workload"].startswith("save") else "read")
    assert row["bytes"] > 0
    assert row["parameters"]["bytes"] > 0
    for name in ("seconds", "ratio", "gb_per_s"):
        assert set(row[name]) == {"p10", "p50", "p90"}
        assert 0 < row[name]["p10"] <= row[name]["p50"] <= row[name]["p90"]
    if row["workload"].startswith("save"):
        assert isinstance(row["parameters"]["synced"], bool)
        assert row["extras"]["seconds until it returns"] <= row["seconds"]["p90"]
    assert {"machine", "versions", "commit", "dirty", "source", "date", "run", "device"} <= set(row)


class Stale(workers.Plain):  # type: ignore[misc, name-defined]
    """Saves once only."""

    def open(self) -> None:
        super().open()
        for values in self._tensors.values():
            values.fill_(float("nan"))

    def save(self) -> None:
        if not (Path(self.folder) / "tensors.pt").exists():
            super().save()


class Changed(workers.Ours):  # type: ignore[misc, name-defined]
    """Loads the sign of a zero wrongly."""

    def add(self, first: int, rows: Any) -> None:
        super().add(first, {**rows, "reward": -np.zeros_like(rows["reward"])})


def measured(tmp_path: Path, kinds: list[Any]) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what was left out."""
    out = tmp_path / "new" / "rows.jsonl"
    session = harness.Session(out, experiment="checkpoint", configuration={}, device="cpu", repeats=1)
    left = harness.Left(session)
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        checkpoint.run(session, left, workloads.W1.of(60), iter(kinds), folder)
    finally:
        assert not list(folder.iterdir())  # nothing stays
    return [row for row in rows_of(out) if "left_out" not in row], "\n".join(left.reasons)


def kind(name: str, subject: Any, *, ours: bool = False) -> Any:
    return checkpoint.Kind(name, lambda: Here(peers.Worker(subject)), ours)


# What is measured ------------------------------------------------------------------------------------


def test_rows_have_what_was_measured_and_others_that_fail_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise process.PeerFailed("nowhere: No such file or directory")

    kinds = [
        kind("yardstick", workers.Yardstick, ours=True),
        kind(checkpoint.KEPT, workers.Kept, ours=True),
        kind("ours", workers.Ours, ours=True),
        kind("torch.save", workers.Plain),
        kind("stale", Stale),
        checkpoint.Kind("cpprb", missing),
    ]
    rows, reasons = measured(tmp_path, kinds)
    for row in rows:
        check_row(row)
    assert [(row["workload"], row["variant"]) for row in rows] == [
        *((workload, name) for workload in WORKLOADS[:2] for name in ("write", "ours", "torch.save")),
        *((load, name) for load in WORKLOADS[2:] for name in ("read", "read, kept", "ours", "torch.load")),
    ]
    assert [row["targets"] for row in rows if row["variant"] == "ours"] == [
        {"write": 0.7},
        {},
        {"read": 0.7},
        {"read": 0.7},
    ]
    assert rows[1]["bytes"] == 60 * 42_000
    assert rows[4]["bytes"] == 80 * 42_000
    assert "left out: stale: ValueError: observation of trajectories 40 to 59 differs" in reasons
    assert reasons.count("left out: ") == 2
    assert "left out: cpprb: nowhere: No such file or directory" in reasons
    assert "waits for the disk" in capsys.readouterr().out


def test_ours_that_fails_ends_the_run(tmp_path: Path) -> None:
    kinds = [kind("yardstick", workers.Yardstick, ours=True), kind("ours", Changed, ours=True)]
    with pytest.raises(process.PeerFailed, match="ours: ValueError: reward of trajectories 0 to 19 differs"):
        measured(tmp_path, kinds)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", workers.WORKERS)
def test_each_variant_loads_what_it_saved(name: str, tmp_path: Path) -> None:
    found = peers.Worker(workers.WORKERS[name]).journey(SPEC, str(tmp_path))
    assert all(found[workload] > 0 for workload in WORKLOADS)
    payload = peers.Source(SPEC).payload
    assert payload == 80 * 10 * 16
    assert found["extras"]["save again"]["bytes on disk"] >= payload
    assert found["synced"] is (name != "torch.save")


def test_what_was_not_loaded_is_found(tmp_path: Path) -> None:
    class Lost(workers.Plain):  # type: ignore[misc, name-defined]
        def everything(self) -> Any:
            return list(super().everything())[self.skip]

    source = peers.Source(SPEC)
    for skip, message in (
        (slice(3), "60 trajectories were loaded; expected 80"),
        (slice(1, 4), "20 comes after 0"),
    ):
        subject = Lost(source, str(tmp_path))
        subject.skip = skip
        subject.open()
        for first, rows in source.units(0, 80):
            subject.add(first, rows)
        with pytest.raises(ValueError, match=message):
            subject.check()
    bare = workers.Yardstick(source, str(tmp_path))
    bare.open()
    bare.save()
    (tmp_path / "bytes").write_bytes(b"short")
    bare.restore()
    with pytest.raises(ValueError, match="5 bytes were read; expected 12800"):
        bare.check()


# Peers -----------------------------------------------------------------------------------------------


def test_the_journey_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReplayBuffer:
        """A stand-in of cpprb's."""

        def __init__(self, size: int, columns: Any) -> None:
            self.rows: dict[str, list[Any]] = {name: [] for name in columns}

        def add(self, **rows: Any) -> None:
            for name, values in rows.items():
                self.rows[name].append(torch.from_numpy(values))

        def get_all_transitions(self) -> Any:
            return {name: torch.cat(values).numpy() for name, values in self.rows.items()}

        def get_stored_size(self) -> int:
            return sum(len(part) for part in self.rows["reward"])

        def save_transitions(self, file: str) -> None:
            torch.save(self.rows, file)

        def load_transitions(self, file: str) -> None:
            self.rows = torch.load(file)

    monkeypatch.setitem(sys.modules, "cpprb", type(sys)("cpprb"))
    monkeypatch.setattr(sys.modules["cpprb"], "ReplayBuffer", ReplayBuffer, raising=False)
    found = peers.Worker(peers.Cpprb).journey(SPEC, str(tmp_path))
    assert found["synced"] is False
    assert all(found[workload] > 0 for workload in WORKLOADS)


def test_the_script_imports_nothing_of_this_project() -> None:
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]); "
        "print([n for n in sys.modules if n.split('.')[0] in ('gear_loader', 'benchmarks', 'torch')])"
    )
    command = [sys.executable, "-I", "-c", code, peers.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# The command line ------------------------------------------------------------------------------------


@pytest.mark.long
def test_quick_measures_in_processes_and_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--quick", "--trajectories", "100", "--folder", str(tmp_path), "--out", str(out)]
    done = run("checkpoint", *options, "--peers", str(tmp_path / "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(out) if "left_out" not in row]
    for row in rows:
        check_row(row)
    assert len(rows) == 2 * 3 + 2 * 4
    for name in peers.PEERS:
        assert f"left out: {name}: " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_options_and_lateness_are_told(tmp_path: Path) -> None:
    done = call("checkpoint", "--folder", str(tmp_path / "nowhere"))
    assert done.exit_code == 2
    assert "make it first" in " ".join(done.stderr.replace("│", " ").split())
    late = call("checkpoint", "--quick", "--minutes", "0", "--out", str(tmp_path / "rows.jsonl"))
    assert late.exit_code == 0, late.output
    assert "left out for lack of time: 1,000 trajectories" in late.stdout
    assert not (tmp_path / "rows.jsonl").exists()
