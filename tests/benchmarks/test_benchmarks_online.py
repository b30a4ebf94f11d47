"""The benchmark of adding and reading runs, finds what is wrong, leaves nothing behind; not how fast anything is."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import ROOT, call, interpreter, rows_of, run, session
from benchmarks_common import check_row as check_any_row

__all__ = ["interpreter"]  # a fixture

import gear_loader as gear
from gear_loader.storage import shared_memory

harness = importlib.import_module("benchmarks.harness")
online = importlib.import_module("benchmarks.experiments.online")
peers = importlib.import_module("benchmarks.peers.online")
processes = importlib.import_module("benchmarks.peers.process")
subjects = importlib.import_module("benchmarks.experiments.adding")
gear_peer = importlib.import_module("benchmarks.peers.gear")
plain = importlib.import_module("benchmarks.peers.plain")
workloads = importlib.import_module("benchmarks.workloads")

SMALL = workloads.Workload(
    name="small",
    columns=(("observation", (3,)), ("action", (2, 2)), ("reward", ())),
    trajectories=24,
    steps=10,
    window=gear.Window(length=10),
    anchor="first",
)
SPEC = subjects.specify(SMALL, batch=4, seed=5)


def left_in_memory() -> set[str]:
    return {name for name in os.listdir(shared_memory.DIRECTORY) if "bench-online-" in name}


def check_row(row: dict[str, Any]) -> None:
    """Every row says what was measured, how, with what result, and on what."""
    check_any_row(row, "online")
    assert row["workload"] in {*peers.MODES, "update", "read, uniform", "read, prioritized", "loop"}
    assert row["parameters"]["item"] in ("trajectory", "step", "priority", "batch")
    assert ("rows" in row) == (row["workload"] == "update")


@pytest.fixture
def shelf() -> Iterator[Any]:
    with subjects.TableCache() as shelf:
        yield shelf


# The command line ------------------------------------------------------------------------------------


@pytest.mark.long
def test_it_measures_names_what_is_left_out_and_can_be_plotted(tmp_path: Path) -> None:
    for package in ("jinja2", "matplotlib"):
        pytest.importorskip(package)
    before = left_in_memory()
    out = tmp_path / "new" / "rows.jsonl"
    options = ["online", "--quick", "--repeats", "1", "--threads", "1", "--seconds", "0.02"]
    options += ["--trajectories", "512", "--writers", "1"]
    # An interpreter without the peers, and one that is not there.
    pythons = ("--peers", sys.executable, "--peers", str(tmp_path / "python"))
    done = run(*options, *pythons, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    for row in rows:
        check_row(row)
    adding = {
        (row["workload"], row["variant"], row["parameters"]["writers"])
        for row in rows
        if row["workload"] in peers.MODES and row["variant"] not in subjects.PEERS
    }
    modes = ("whole", "batches", "steps", "chunks 10")
    assert adding == {(mode, name, 1) for mode in modes for name in ("memcpy", "ours", "torch")}
    assert {row["variant"] for row in rows if row["workload"] == "update"} >= {
        "numpy assignment",
        "ours",
        "ours, the tree alone",
    }
    for selector in ("uniform", "prioritized"):
        found = [row for row in rows if row["workload"] == f"read, {selector}"]
        assert [row["variant"] for row in found] == ["0 writers", "2 writers"]
        assert found[0]["extras"] == {}
        assert all(value > 0 for value in found[1]["extras"].values())
    loop = {row["variant"]: row["extras"] for row in rows if row["workload"] == "loop"}
    assert set(loop) == {"no limit", "1 row a trajectory", "8 rows a trajectory", "64 rows a trajectory"}
    assert set(loop["no limit"]) == {
        "trajectories_per_s",
        "rows_per_trajectory",
        "writers_waiting",
        "reader_waiting",
    }
    for name in set(subjects.PEERS) - {row["variant"] for row in rows}:
        assert f"left out: {name}: {sys.executable}: " in done.stdout
    for shown in (
        "Targets",
        "at most 25 µs",
        "× memcpy",
        f"{len(rows)} rows",
    ):
        assert shown in done.stdout
    assert left_in_memory() <= before

    report = call("report", str(out), "--out", str(tmp_path / "report"))
    assert report.exit_code == 0, report.output
    assert (tmp_path / "report" / "online-cpu.png").read_bytes().startswith(b"\x89PNG")

    late = call(*options, "--minutes", "0", "--out", str(out))
    assert late.exit_code == 0, late.output
    assert "left out for lack of time: single steps, 1 writer" in late.stdout
    assert "left out: cpprb: no interpreter with peers is there (benchmarks/peers/make.sh)" in late.stdout
    assert rows_of(out) == rows


def test_tables_are_gone_when_the_benchmark_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from benchmarks import workloads as w; from benchmarks.experiments import adding as s\n"
        "with s.TableCache() as shelf, shelf.table(w.W1.of(20), block_steps=100) as table:\n"
        "    print(table.name, flush=True)\n"
        "    os.killpg(os.getpgid(0), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    name = done.stdout.strip()
    assert name.startswith("bench-online-"), done.stderr
    deadline = time.monotonic() + 30
    while any(name in entry for entry in left_in_memory()):
        assert time.monotonic() < deadline, "the table's name is still there"
        time.sleep(0.02)


# What is added ---------------------------------------------------------------------------------------


def test_writers_have_trajectories_of_their_own() -> None:
    first, second = (plain.Torch(SPEC, "whole", number, 2) for number in (0, 1))
    source = peers.trajectories_of(SPEC)
    for subject, begin in ((first, 0), (second, 12)):
        assert source.verify(subject.stacked).tolist() == [SMALL.steps * (begin + i) for i in range(12)]
    steps = {name: values[3] for name, values in first.stacked.items()}
    source.verify({name: values[:, None] for name, values in steps.items()}, 1)


@pytest.mark.parametrize("mode", peers.MODES)
def test_ours_adds_what_it_says_in_every_mode(shelf: Any, mode: str) -> None:
    with shelf.table(SMALL, block_steps=4) as table:
        subject = gear_peer.Writer(SPEC, mode, 0, 1, table.name)
        subject.fill()
        before = table.stats().num_inserted
        worker = peers.Worker({}, "")
        worker.held = subject
        done = worker.run(time.monotonic(), 0.02)
        subject.close()
        unit = 1 if peers.item_of(mode) == "trajectory" else SMALL.steps
        assert table.stats().num_inserted - before == done["items"] // unit > 0
        assert done["seconds"] >= 0.02
        table.check_valid()
        rows = [table[int(index)] for index in table.indices()]
        assert len(rows) >= SMALL.trajectories - 1
        subject.verify({n: np.stack([row[n].numpy() for row in rows]) for n in SPEC["columns"]})
    gear_peer._tables.popitem()[1].close()


@pytest.mark.parametrize("mode", peers.MODES)
@pytest.mark.parametrize("name", ["memcpy", "torch"])
def test_yardsticks_copy_what_they_say(shelf: Any, name: str, mode: str) -> None:
    with shelf.table(SMALL, block_steps=4) as table:
        subject = {"memcpy": gear_peer.Memcpy, "torch": plain.Torch}[name](SPEC, mode, 0, 1, table.name)
        subject.fill()
        for _ in range(30):  # around the end of the store
            subject.check()
        per = {"whole": 1, "batches": 4}.get(mode, SMALL.steps)
        assert subject.work() == per
        store = subject._memory if name == "memcpy" else subject._store["action"]
        store.fill(0) if name == "memcpy" else store.zero_()
        subject.work = lambda: per  # does nothing
        with pytest.raises(ValueError, match=r"differs|number of no step|was written, after|another"):
            subject.check()
    while gear_peer._tables:
        gear_peer._tables.popitem()[1].close()


@pytest.mark.long
def test_writers_in_several_processes_are_checked_and_measured(
    shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = subjects.Crew("ours", patience=100.0)
    with contextlib.closing(crew), shelf.table(SMALL, block_steps=4) as table:
        group = subjects.Group(crew, SPEC, "whole", 2, table=table)
        group.check()
        assert 0 < group.measure(0.02) < 0.02
        reader = online.Reader(table, SPEC, gear.Uniform(), batch=8, writers=2)
        begin = group.start(0.1)
        assert reader.until(begin + 0.1, look=True) > 0
        assert group.rate() > 0

        monkeypatch.setattr(group, "_inserted", iter((0, 1)).__next__)
        with pytest.raises(harness.Incorrect, match="1 trajectories have arrived, of "):
            group.measure(0.02)
        monkeypatch.undo()

        # What nobody adds is found among what is there and in batches.
        wrong = {n: torch.full((SMALL.steps, *shape), 0.5) for n, shape in SMALL.columns}
        wrong["reward"][0] = SMALL.steps
        table.extend([wrong] * SMALL.trajectories)
        with pytest.raises(harness.Incorrect, match="8 of 8 rows are torn or mixed up"):
            reader.verify(reader.read())
        monkeypatch.setattr(group, "measure", lambda seconds: 1.0)
        with pytest.raises(harness.Incorrect, match="row 0 begins with"):
            group.check()
        group.close()
        with pytest.raises(processes.PeerFailed, match="build comes first"):
            crew.start()[0].ask("fill")


# Peers -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_peers_are_measured_in_turn_with_ours_and_what_fails_is_left_out(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    made = session(out, 2, "online", pythons=[interpreter, tmp_path / "none"])
    setting = subjects.Setting(
        SMALL, block_steps=4, modes=("whole", "steps"), writers=(1,), batch=4, window=0.005
    )
    with subjects.crews_of(made) as (crews, tables):
        assert set(crews) == {"memcpy", "torch", "ours", "cpprb"}
        missing = "\n".join(made.reasons)
        for name in ("Reverb", "TorchRL"):
            assert f"{name}: {interpreter}: ModuleNotFoundError" in missing
        del crews["torch"]
        subjects.inserting(made, setting, crews, tables)
        rows = rows_of(out)
        for row in rows:
            check_row(row)
        assert [(row["workload"], row["variant"]) for row in rows] == [
            (mode, name) for mode in ("whole", "steps") for name in ("memcpy", "ours", "cpprb")
        ]
        assert "limit" in rows[1]
        assert rows[2]["parameters"]["peer"]["versions"]["cpprb"] == "11.0.0"

        # One that ends under way is left out, the others are measured all the same; ours ends the run.
        measure = subjects.Group.measure

        def ends(group: Any, seconds: float) -> float:
            if group._crew.name == ending:
                raise processes.PeerFailed("it has ended")
            return float(measure(group, seconds))

        monkeypatch.setattr(subjects.Group, "measure", ends)
        ending = "cpprb"
        one = dataclasses.replace(setting, modes=("whole",))
        subjects.inserting(made, one, crews, tables)
        assert [row["variant"] for row in rows_of(out)[len(rows) :]] == ["memcpy", "ours"]
        assert made.reasons[-1].endswith("cpprb, whole trajectories one by one, 1 writer: it has ended")
        ending = "memcpy"
        with pytest.raises(processes.PeerFailed, match="it has ended"):
            subjects.inserting(made, one, crews, tables)
