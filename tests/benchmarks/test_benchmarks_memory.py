"""The benchmark of memory measures what is stored, finds what is stored wrongly, and says what it left out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks_common import Here, call, check_row, interpreter, rows_of, run, session, worker

__all__ = ["interpreter"]  # a fixture

harness = importlib.import_module("benchmarks.harness")
memory = importlib.import_module("benchmarks.experiments.memory")
process = importlib.import_module("benchmarks.peers.process")
gear = importlib.import_module("benchmarks.peers.gear")
plain = importlib.import_module("benchmarks.peers.plain")
sources = importlib.import_module("benchmarks.peers.source")

COLUMNS = {"observation": (17,), "action": (6,), "reward": ()}
LARGE = 300_000  # steps of 29 MB, of which what allocators keep is a small part


class Changed(plain.Listed):  # type: ignore[misc, name-defined]
    """Stores one value wrongly."""

    def fill(self) -> None:
        super().fill()
        self._episodes[-1]["action"][-1, 3] += 1


class Shorter(plain.Listed):  # type: ignore[misc, name-defined]
    """Loses a step."""

    def read(self, i: int) -> Any:
        return {name: values[:-1] for name, values in super().read(i).items()}


def setting(name: str = "uneven", steps: int = 30_000) -> Any:
    lengths = np.random.default_rng(0).integers(1, 300, steps // 150)
    return memory.Setting(name, "W2", COLUMNS, lengths)


def measured(path: Path, kinds: list[Any], *settings: Any) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what was left out."""
    made = session(path, experiment="memory")
    for one in settings:
        memory.measured(made, one, iter(kinds))
    return [row for row in rows_of(path) if "left_out" not in row], "\n".join(made.reasons)


# What is measured ------------------------------------------------------------------------------------


@pytest.mark.long
def test_rows_have_what_was_measured_and_others_that_fail_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise process.PeerFailed("nowhere: No such file or directory")

    kinds = [
        memory.Kind(
            "ours",
            lambda: Here(worker("memory", gear.Memory)),
            {"block_steps": 32},
            ours=True,
            at_most=memory.AT_MOST,
        ),
        memory.Kind(
            "ours, named",
            lambda: Here(worker("memory", gear.Memory)),
            {"block_steps": 16, "named": True},
            ours=True,
        ),
        memory.Kind("fixed rows", lambda: Here(worker("memory", plain.FixedRows))),
        memory.Kind("list of tensors", lambda: Here(worker("memory", plain.Listed))),
        memory.Kind("wrong", lambda: Here(worker("memory", Changed))),
        memory.Kind("short", lambda: Here(worker("memory", Shorter))),
        memory.Kind("Reverb", missing),
    ]
    rows, reasons = measured(
        tmp_path / "new" / "rows.jsonl", kinds, setting("first", LARGE), setting("second", LARGE)
    )
    for row in rows:
        check_row(row, "memory")
    assert [(row["workload"], row["variant"]) for row in rows] == [
        (workload, kind.name) for workload in ("first", "second") for kind in kinds[:4]
    ]
    ours, named, fixed, _ = rows[:4]
    assert ours["at_most"] == 1.05
    assert "at_most" not in named
    assert (named["parameters"]["block_steps"], named["parameters"]["named"]) == (16, True)
    for row in (ours, named):
        extras = row["extras"]
        assert extras["stats"] == pytest.approx(1 + extras["ends"] + extras["padding"] + extras["index"])
        assert row["amount"]["p50"] == pytest.approx(extras["stats"], rel=0.25)
    assert fixed["amount"]["p50"] == pytest.approx(2, rel=0.15)
    assert fixed["parameters"]["peer"] == {"versions": {}, "note": None}
    assert "ValueError: action of row 0 differs" in reasons
    assert "left out: short, first, columns of W2: ValueError: " in reasons
    assert "left out: Reverb, second, columns of W2: nowhere: No such file" in reasons
    shown = capsys.readouterr().out
    assert "bytes resident / byte of payload" in shown


def test_ours_that_fails_ends_the_run(tmp_path: Path) -> None:
    kinds = [memory.Kind("ours", lambda: Here(worker("memory", Changed)), ours=True)]
    with pytest.raises(process.PeerFailed, match="differs from what was stored"):
        measured(tmp_path / "rows.jsonl", kinds, setting())
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_named_table_is_counted_by_its_file_and_removed() -> None:
    source = sources.Source({"columns": COLUMNS, "lengths": [40, 7, 300], "seed": 1})
    subject = gear.Memory(source, block_steps=32, named=True)
    path = Path(gear.region_path(subject._name))
    try:
        assert subject.beside() >= subject._table.stats().reserved_bytes > 0
    finally:
        subject.close()
    assert not path.exists()
    assert gear.Memory(source, block_steps=32).beside() == 0


# What is stored --------------------------------------------------------------------------------------


def test_the_longest_is_among_those_that_have_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROWS_BYTES", 50 * 300 * 96)
    uneven = memory.Setting("x", "W2", COLUMNS, np.array([*[100] * 80, 300, *[20] * 80]))
    assert uneven.of_rows().lengths.tolist() == [300, *[100] * 49]
    few = memory.Setting("x", "W2", COLUMNS, np.array([5, 300, 7]))
    assert few.of_rows().lengths.tolist() == [300, 5, 7]


@pytest.mark.parametrize(("lengths", "block"), [([100] * 64, 100), ([320, 64, 96] * 20, 32)])
def test_the_best_block_is_found(lengths: list[int], block: int) -> None:
    assert memory.best_block(memory.Setting("x", "W2", COLUMNS, np.array(lengths))) == block


@pytest.mark.parametrize("name", memory.DISTRIBUTIONS)
def test_distributions_have_as_many_steps_as_asked_for(name: str) -> None:
    lengths = memory._enough(memory.DISTRIBUTIONS[name], 400_000)
    assert lengths.min() >= 1
    assert lengths.sum() == pytest.approx(400_000, rel=0.1)


# Peers -----------------------------------------------------------------------------------------------


def test_a_peer_is_measured_in_its_own_interpreter(interpreter: Path, tmp_path: Path) -> None:
    kinds = [
        kind
        for kind in memory.kinds(session(tmp_path / "x", pythons=[interpreter]), setting(steps=LARGE))
        if kind.name in ("cpprb", "Reverb")
    ]
    rows, reasons = measured(tmp_path / "rows.jsonl", kinds, setting(steps=LARGE))
    (row,) = rows
    check_row(row, "memory")
    assert row["variant"] == "cpprb"
    assert row["parameters"]["peer"]["versions"]["cpprb"] == "11.0.0"
    assert row["amount"]["p50"] == pytest.approx(1.01, abs=0.15)
    assert "ModuleNotFoundError: No module named 'reverb'" in reasons


# The command line ------------------------------------------------------------------------------------


@pytest.mark.long
def test_quick_measures_ours_in_processes_and_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run("memory", "--quick", "--payload", "4", "--peers", str(tmp_path / "none"), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(out) if "left_out" not in row]
    for row in rows:
        check_row(row, "memory")
        assert row["configuration"]["payload_bytes"] == 4_000_000
    assert [row["variant"] for row in rows] == ["ours", "ours, named", "fixed rows", "list of tensors"]
    assert "left out: cpprb, uniform 1-512, columns of W2" in done.stdout


def test_too_late_is_said(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = call("memory", "--quick", "--minutes", "0", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "left out for lack of time: uniform 1-512, columns of W2" in done.stdout
    assert not out.exists()
