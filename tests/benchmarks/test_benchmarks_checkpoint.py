"""The benchmark of checkpoints compares what was loaded with what was saved, and says what it left out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks_common import Here, call, check_row, interpreter, rows_of, run, session, worker

__all__ = ["interpreter"]  # a fixture

checkpoint = importlib.import_module("benchmarks.experiments.checkpoint")
harness = importlib.import_module("benchmarks.harness")
peers = importlib.import_module("benchmarks.peers.checkpoint")
process = importlib.import_module("benchmarks.peers.process")
catalog = importlib.import_module("benchmarks.peers.catalog")
gear = importlib.import_module("benchmarks.peers.gear")
plain = importlib.import_module("benchmarks.peers.plain")
sources = importlib.import_module("benchmarks.peers.source")
workloads = importlib.import_module("benchmarks.workloads")

SPEC = {
    "columns": {"observation": [3], "reward": []},
    "steps": 10,
    "trajectories": 60,
    "more": 20,
    "seed": 1,
}
WORKLOADS = ["save", "save again", "load", "load, cold"]


class Stale(plain.Saved):  # type: ignore[misc, name-defined]
    """Saves once only."""

    def open(self) -> None:
        super().open()
        for values in self._tensors.values():
            values.fill_(float("nan"))

    def save(self) -> None:
        if not (Path(self.folder) / "tensors.pt").exists():
            super().save()


class Changed(gear.Checkpoint):  # type: ignore[misc, name-defined]
    """Loads the sign of a zero wrongly."""

    def add(self, first: int, rows: Any) -> None:
        super().add(first, {**rows, "action": -np.zeros_like(rows["action"])})


def measured(tmp_path: Path, kinds: list[Any]) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what was left out."""
    out = tmp_path / "new" / "rows.jsonl"
    made = session(out, experiment="checkpoint")
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        checkpoint.measured(made, workloads.W1.of(60), kinds, folder)
    finally:
        assert not list(folder.iterdir())  # nothing stays
    return [row for row in rows_of(out) if "left_out" not in row], "\n".join(made.reasons)


def kind(name: str, subject: Any, *, ours: bool = False) -> Any:
    return checkpoint.Kind(name, lambda: Here(worker("checkpoint", subject)), ours)


# What is measured ------------------------------------------------------------------------------------


def test_rows_have_what_was_measured_and_others_that_fail_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise process.PeerFailed("nowhere: No such file or directory")

    kinds = [
        kind("yardstick", plain.Yardstick, ours=True),
        kind(checkpoint.KEPT, plain.Kept, ours=True),
        kind("ours", gear.Checkpoint, ours=True),
        kind("torch.save", plain.Saved),
        kind("stale", Stale),
        checkpoint.Kind("cpprb", missing),
    ]
    rows, reasons = measured(tmp_path, kinds)
    for row in rows:
        check_row(row, "checkpoint")
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
    assert "left out: stale: ValueError: row 0 begins with nan" in reasons
    assert reasons.count("left out: ") == 2
    assert "left out: cpprb: nowhere: No such file or directory" in reasons
    assert "seconds until it returns" in capsys.readouterr().out


def test_ours_that_fails_ends_the_run(tmp_path: Path) -> None:
    kinds = [kind("yardstick", plain.Yardstick, ours=True), kind("ours", Changed, ours=True)]
    with pytest.raises(process.PeerFailed, match="ours: ValueError: action of row 0 differs"):
        measured(tmp_path, kinds)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", [*plain.KINDS["checkpoint"].values(), gear.Checkpoint])
def test_each_variant_loads_what_it_saved(kind: Any, tmp_path: Path) -> None:
    found = worker("checkpoint", kind).journey(SPEC, str(tmp_path))
    assert all(found[workload] > 0 for workload in WORKLOADS)
    assert found["extras"]["save again"]["bytes on disk"] >= 80 * 10 * 16
    assert found["synced"] is (kind is not plain.Saved)


def test_what_was_not_loaded_is_found(tmp_path: Path) -> None:
    class Lost(plain.Saved):  # type: ignore[misc, name-defined]
        def everything(self) -> Any:
            return list(super().everything())[self.skip]

    source = sources.Source({**SPEC, "trajectories": 80})
    for skip, message in (
        (slice(3), "60 trajectories were loaded; expected 80"),
        (slice(1, 4), "20 comes after 0"),
    ):
        subject = Lost(source, str(tmp_path))
        subject.skip = skip
        subject.open()
        for first, rows in source.stacked(peers.UNIT):
            subject.add(first, rows)
        with pytest.raises(ValueError, match=message):
            subject.check()
    bare = plain.Yardstick(source, str(tmp_path))
    bare.open()
    bare.save()
    (tmp_path / "bytes").write_bytes(b"short")
    bare.restore()
    with pytest.raises(ValueError, match="5 bytes were read; expected 12800"):
        bare.check()


# Peers -----------------------------------------------------------------------------------------------


def test_the_journey_of_a_peer_in_its_own_interpreter(interpreter: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    process_of = catalog.started([interpreter], "checkpoint", "cpprb")
    try:
        found = process_of.ask("journey", spec=SPEC, folder=str(tmp_path / "disk"))
    finally:
        process_of.close()
    assert process_of.about["versions"]["cpprb"] == "11.0.0"
    assert found["synced"] is False
    assert all(found[workload] > 0 for workload in WORKLOADS)


# The command line ------------------------------------------------------------------------------------


@pytest.mark.long
def test_quick_measures_in_processes_and_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--quick", "--trajectories", "100", "--folder", str(tmp_path), "--out", str(out)]
    done = run("checkpoint", *options, "--peers", str(tmp_path / "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(out) if "left_out" not in row]
    for row in rows:
        check_row(row, "checkpoint")
    assert len(rows) == 2 * 3 + 2 * 4
    for name in catalog.peers_of("checkpoint"):
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
