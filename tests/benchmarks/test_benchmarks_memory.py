"""The benchmark of memory measures what is stored, finds what is stored wrongly, and says what it left out."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks_common import Here, call, rows_of, run

harness = importlib.import_module("benchmarks.harness")
memory = importlib.import_module("benchmarks.memory")
peers = importlib.import_module("benchmarks.peers.memory_peers")
process = importlib.import_module("benchmarks.peers.process")
workers = importlib.import_module("benchmarks.memory_workers")

COLUMNS = {"observation": (17,), "action": (6,), "reward": ()}
LARGE = 300_000  # steps of 29 MB, of which what allocators keep is a small part


def check_row(row: dict[str, Any]) -> None:
    """Every row says what was measured, how, with what result, and on what."""
    assert row["experiment"] == "memory"
    assert row["unit"] == "bytes resident / byte of payload"
    assert {"columns", "trajectories", "payload_bytes", "mean_steps", "longest"} <= set(row["parameters"])
    assert row["parameters"]["payload_bytes"] > 0
    assert row["repeats"] > 0
    assert set(row["amount"]) == {"p10", "p50", "p90"}
    assert row["amount"]["p50"] > 0.7  # nothing takes less than it holds, but for what this process had free
    assert {"machine", "versions", "commit", "dirty", "source", "date", "run", "device"} <= set(row)


class Changed(workers.Listed):  # type: ignore[misc, name-defined]
    """Stores one value wrongly."""

    def fill(self) -> None:
        super().fill()
        self._episodes[-1]["action"][-1, 3] += 1


class Shorter(workers.Listed):  # type: ignore[misc, name-defined]
    """Loses a step."""

    def read(self, i: int) -> Any:
        return {name: values[:-1] for name, values in super().read(i).items()}


def setting(name: str = "uneven", steps: int = 30_000) -> Any:
    lengths = np.random.default_rng(0).integers(1, 300, steps // 150)
    return memory.Setting(name, "W2", COLUMNS, lengths)


def session(path: Path) -> Any:
    return harness.Session(path, experiment="memory", configuration={}, device="cpu", repeats=1)


def measured(path: Path, kinds: list[Any], *settings: Any) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what was left out."""
    opened = session(path)
    left = harness.Left(opened)
    memory.run(opened, left, iter(settings), lambda _: iter(kinds))
    return [row for row in rows_of(path) if "left_out" not in row], "\n".join(left.reasons)


# What is measured ------------------------------------------------------------------------------------


def test_rows_have_what_was_measured_and_others_that_fail_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise process.PeerFailed("nowhere: No such file or directory")

    kinds = [
        memory.Kind(
            "ours",
            lambda: Here(peers.Worker(workers.Ours)),
            {"block_steps": 32},
            ours=True,
            at_most=memory.AT_MOST,
        ),
        memory.Kind(
            "ours, named",
            lambda: Here(peers.Worker(workers.Ours)),
            {"block_steps": 16, "named": True},
            ours=True,
        ),
        memory.Kind("fixed rows", lambda: Here(peers.Worker(workers.FixedRows))),
        memory.Kind("list of tensors", lambda: Here(peers.Worker(workers.Listed))),
        memory.Kind("wrong", lambda: Here(peers.Worker(Changed))),
        memory.Kind("short", lambda: Here(peers.Worker(Shorter))),
        memory.Kind("Reverb", missing),
    ]
    rows, reasons = measured(
        tmp_path / "new" / "rows.jsonl", kinds, setting("first", LARGE), setting("second", LARGE)
    )
    for row in rows:
        check_row(row)
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
    assert "ValueError: action of trajectory " in reasons
    assert "left out: short, first, columns of W2: ValueError: " in reasons
    assert "left out: Reverb, second, columns of W2: nowhere: No such file" in reasons
    shown = capsys.readouterr().out
    assert "Bytes resident for each byte of payload" in shown
    assert "2,000 trajectories of" in shown


def test_ours_that_fails_ends_the_run(tmp_path: Path) -> None:
    kinds = [memory.Kind("ours", lambda: Here(peers.Worker(Changed)), ours=True)]
    with pytest.raises(process.PeerFailed, match="differs from what was stored"):
        measured(tmp_path / "rows.jsonl", kinds, setting())
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_named_table_is_counted_by_its_file_and_removed() -> None:
    source = peers.Source(COLUMNS, [40, 7, 300], 1)
    subject = workers.Ours(source, block_steps=32, named=True)
    path = Path(workers.region_path(subject._name))
    try:
        assert subject.beside() >= subject._table.stats().reserved_bytes > 0
    finally:
        subject.close()
    assert not path.exists()
    assert workers.Ours(source, block_steps=32).beside() == 0


# What is stored --------------------------------------------------------------------------------------


def test_trajectories_are_always_the_same_and_tell_their_number() -> None:
    source, again = (peers.Source(COLUMNS, [3, 1, 9], 5) for _ in range(2))
    assert source.payload == 13 * 24 * 4
    for i in range(3):
        one = source.trajectory(i)
        assert {name: values.shape for name, values in one.items()} == {
            name: (source.lengths[i], *shape) for name, shape in COLUMNS.items()
        }
        again.verify(one)
    with pytest.raises(ValueError, match="observation of trajectory 2 differs"):
        source.verify(source.trajectory(1), 2)
    with pytest.raises(ValueError, match="has the number 77; expected one of 3"):
        source.verify({**one, "reward": np.full(9, 77.0)})


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

_FAKE = """
import numpy as np
print("a library that prints")
class ReplayBuffer:
    def __init__(self, size, columns):
        self.rows = {n: np.zeros((size, *np.atleast_1d(c["shape"])), c["dtype"]) for n, c in columns.items()}
        self.n = 0
    def add(self, **rows):
        for name, values in rows.items():
            self.rows[name][self.n : self.n + len(values)] = values.reshape(len(values), -1)
        self.n += len(values)
    def on_episode_end(self):
        pass
    def get_all_transitions(self):
        return {name: values[: self.n].copy() for name, values in self.rows.items()}
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A python that has a stand-in of cpprb."""
    site = tmp_path / "site"
    about = site / "cpprb-11.0.0.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: cpprb\nVersion: 11.0.0\n", encoding="utf-8")
    (site / "cpprb.py").write_text(_FAKE, encoding="utf-8")
    script = tmp_path / "python"
    begin = f"import runpy, sys; sys.path.insert(0, {str(site)!r}); sys.argv = sys.argv[1:]; " + (
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" -I -c "{begin}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script


def test_a_peer_is_measured_in_its_own_interpreter(interpreter: Path, tmp_path: Path) -> None:
    kinds = [
        kind for kind in memory.kinds(setting(steps=LARGE), [interpreter]) if kind.name in ("cpprb", "Reverb")
    ]
    rows, reasons = measured(tmp_path / "rows.jsonl", kinds, setting(steps=LARGE))
    (row,) = rows
    check_row(row)
    assert row["variant"] == "cpprb"
    assert row["parameters"]["peer"]["versions"]["cpprb"] == "11.0.0"
    assert row["amount"]["p50"] == pytest.approx(1.01, abs=0.15)
    assert "ModuleNotFoundError: No module named 'reverb'" in reasons


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
def test_quick_measures_ours_in_processes_and_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run("memory", "--quick", "--payload", "4", "--peers", str(tmp_path / "none"), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(out) if "left_out" not in row]
    for row in rows:
        check_row(row)
        assert row["configuration"]["payload_bytes"] == 4_000_000
    assert [row["variant"] for row in rows] == ["ours", "ours, named", "fixed rows", "list of tensors"]
    assert "left out: cpprb, uniform 1-512, columns of W2" in done.stdout


def test_too_late_is_said(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = call("memory", "--quick", "--minutes", "0", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "left out for lack of time: uniform 1-512, columns of W2" in done.stdout
    assert not out.exists()
