"""The benchmark of adding and reading runs, finds what is wrong, leaves nothing behind; not how fast anything is."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import ROOT, call, rows_of, run

import gear_loader as gear
from gear_loader.storage import shared_memory

harness = importlib.import_module("benchmarks.harness")
online = importlib.import_module("benchmarks.online")
parts = importlib.import_module("benchmarks.online_parts")
peers = importlib.import_module("benchmarks.peers.online_peers")
environments = importlib.import_module("benchmarks.peers.environments")
processes = importlib.import_module("benchmarks.peers.process")
subjects = importlib.import_module("benchmarks.online_subjects")
workers = importlib.import_module("benchmarks.online_workers")
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
    assert row["experiment"] == "online"
    assert row["workload"] in {*peers.MODES, "update", "read, uniform", "read, prioritized", "loop"}
    assert row["parameters"]["item"] in ("trajectory", "step", "priority", "batch")
    assert row["repeats"] > 0
    assert ("rows" in row) == (row["workload"] == "update")
    assert ("bytes" in row) == ("gb_per_s" in row) == ("rows" not in row)
    for name in ("seconds", "ratio"):
        assert set(row[name]) == {"p10", "p50", "p90"}
        assert 0 < row[name]["p10"] <= row[name]["p50"] <= row[name]["p90"]
    keys = {"quick", "threads", "writer_threads", "writers", "trajectories", "block_steps", "seconds", "seed"}
    assert keys <= set(row["configuration"])
    assert {"cpu", "cores", "memory_bytes", "gpu", "load"} <= set(row["machine"])
    assert {"python", "torch", "triton", "numpy", "numba", "cuda"} <= set(row["versions"])
    assert {"commit", "dirty", "source", "date", "run", "device"} <= set(row)


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
        if row["workload"] in peers.MODES and row["variant"] not in peers.PEERS
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
    for name in set(peers.PEERS) - {row["variant"] for row in rows}:
        assert f"left out: {name}: {sys.executable}: " in done.stdout
    for shown in (
        "Targets",
        "40,000/s",
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("online", "--writers", "0"), "expected numbers from 1"),
        (("online", "--items", "many"), "expected numbers from 2,048"),
        (("online", "--parts", "insert,delete"), "expected some of insert,priorities,read,loop"),
        (("online", "--trajectories", "5"), "--trajectories"),
    ],
)
def test_bad_options_are_errors_that_name_the_remedy(arguments: Sequence[str], message: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_tables_are_gone_when_the_benchmark_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from benchmarks import online_subjects as s, workloads as w\n"
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


def test_sources_are_always_the_same_and_say_whose_they_are() -> None:
    one, again, other = (peers.Source(SPEC, number) for number in (1, 1, 2))
    for name in SPEC["columns"]:
        assert np.array_equal(one.stacked[name], again.stacked[name])
        assert not np.array_equal(one.stacked[name], other.stacked[name])
    assert one.stacked["reward"][:, 0].tolist() == list(range(12, 24))
    again.verify({name: np.concatenate([one.stacked[name], other.stacked[name]]) for name in SPEC["columns"]})
    again.verify_steps({name: values[3] for name, values in one.stacked.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows["action"][2, 9].fill(7), "action of row 2 differs from what was added"),
        (lambda rows: rows["reward"][1].fill(0.25), "row 1 begins with 0.25, which marks no trajectory"),
        (lambda rows: rows["observation"][[1, 2]].sort(), None),
    ],
)
def test_wrong_trajectories_are_found(change: Any, message: str | None) -> None:
    source = peers.Source(SPEC, 0)
    rows = {name: values.copy() for name, values in source.stacked.items()}
    change(rows)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        source.verify(rows)


def test_wrong_steps_are_found() -> None:
    source = peers.Source(SPEC, 0)
    rows = {name: values[0].copy() for name, values in source.stacked.items()}
    rows["action"][4] += 1
    with pytest.raises(ValueError, match="action of row 4 differs"):
        source.verify_steps(rows)
    rows["observation"][2] += 1
    with pytest.raises(ValueError, match="observation of step 2 is none that was added"):
        source.verify_steps(rows)


@pytest.mark.parametrize("mode", peers.MODES)
def test_ours_adds_what_it_says_in_every_mode(shelf: Any, mode: str) -> None:
    with shelf.table(SMALL, block_steps=4) as table:
        subject = workers.Ours(SPEC, mode, 0, 1, table.name)
        subject.fill()
        before = table.stats().num_inserted
        done = peers.spin(subject, time.monotonic(), 0.02)
        subject.close()
        unit = 1 if peers.item_of(mode) == "trajectory" else SMALL.steps
        assert table.stats().num_inserted - before == done["items"] // unit > 0
        assert done["seconds"] >= 0.02
        table.check_valid()
        rows = [table[int(index)] for index in table.indices()]
        assert len(rows) >= SMALL.trajectories - 1
        subject.source.verify({n: np.stack([row[n].numpy() for row in rows]) for n in SPEC["columns"]})
    workers._tables.popitem()[1].close()


@pytest.mark.parametrize("mode", peers.MODES)
@pytest.mark.parametrize("name", ["memcpy", "torch"])
def test_yardsticks_copy_what_they_say(shelf: Any, name: str, mode: str) -> None:
    with shelf.table(SMALL, block_steps=4) as table:
        subject = workers.WORKERS[name](SPEC, mode, 0, 1, table.name)
        subject.fill()
        for _ in range(30):  # around the end of the store
            subject.check()
        per = {"whole": 1, "batches": 4}.get(mode, SMALL.steps)
        assert subject.work() == per
        store = subject._memory if name == "memcpy" else subject._store["action"]
        store.fill(0) if name == "memcpy" else store.zero_()
        subject.work = lambda: per  # does nothing
        with pytest.raises(ValueError, match=r"differs|marks no trajectory|was written, after"):
            subject.check()
    while workers._tables:
        workers._tables.popitem()[1].close()


@pytest.mark.long
def test_writers_in_several_processes_are_checked_and_measured(
    shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = subjects.Crew("ours", patience=100.0)
    with contextlib.closing(crew), shelf.table(SMALL, block_steps=4) as table:
        group = subjects.Group(crew, SPEC, "whole", 2, table=table)
        group.check()
        assert 0 < group.measure(0.02) < 0.02
        reader = subjects.Reader(table, SPEC, gear.Uniform(), batch=8, writers=2)
        begin = group.start(0.1)
        assert reader.until(begin + 0.1, look=True) > 0
        assert group.rate() > 0

        monkeypatch.setattr(group, "_inserted", iter((0, 1)).__next__)
        with pytest.raises(harness.Incorrect, match="1 trajectories have arrived, of "):
            group.measure(0.02)
        monkeypatch.undo()

        # What nobody adds is found among what is there and in batches.
        wrong = {n: torch.full((SMALL.steps, *shape), 0.5) for n, shape in SMALL.columns}
        wrong["reward"][0] = 1
        table.extend([wrong] * SMALL.trajectories)
        with pytest.raises(harness.Incorrect, match="8 of 8 rows are torn or mixed up"):
            reader.verify(reader.read())
        monkeypatch.setattr(group, "measure", lambda seconds: 1.0)
        with pytest.raises(harness.Incorrect, match="of row 0 differs from what was added"):
            group.check()
        group.close()
        with pytest.raises(processes.PeerFailed, match="build comes first"):
            crew.start()[0].ask("fill")


# Peers -----------------------------------------------------------------------------------------------

_FAKES = {
    "cpprb.py": """
        import numpy as np
        print("a library that prints")
        class ReplayBuffer:
            def __init__(self, size, columns):
                self.size, self.n = size, 0
                self.store = {name: np.zeros((size, *np.atleast_1d(c["shape"]))) for name, c in columns.items()}
            def get_stored_size(self):
                return min(self.n, self.size)
            def add(self, **rows):
                store = self.store["observation"]
                single = np.ndim(rows["observation"]) < store.ndim
                for i in range(1 if single else len(rows["observation"])):
                    for name, value in rows.items():
                        value = value if single else value[i]
                        self.store[name][self.n % self.size] = value
                    self.n += 1
            def sample(self, count):
                picked = np.random.default_rng(0).integers(self.get_stored_size(), size=count)
                return {name: values[picked].astype(np.float32) for name, values in self.store.items()}
    """,
    "cpprb-11.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cpprb\nVersion: 11.0.0\n",
}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder of environments, of which one has a stand-in of a peer."""
    site = tmp_path / "site"
    for name, text in _FAKES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        (site / name).write_text("\n".join(line[indent:] for line in lines) + "\n", encoding="utf-8")
    script = tmp_path / "peers" / "torch" / "bin" / "python"
    script.parent.mkdir(parents=True)
    start = f"import runpy, sys; sys.path.insert(0, {str(site)!r}); sys.argv = sys.argv[1:]; " + (
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" -I -c "{start}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return tmp_path / "peers"


@pytest.mark.long
def test_peers_are_measured_in_turn_with_ours_and_what_fails_is_left_out(
    environment: Path, tmp_path: Path, shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pythons = environments.interpreters([environment, tmp_path / "none"])
    assert pythons == [environment / "torch" / "bin" / "python", tmp_path / "none"]
    left: list[str] = []
    out = tmp_path / "rows.jsonl"
    keys = ("quick", "threads", "writer_threads", "writers", "trajectories", "block_steps", "seconds", "seed")
    session = harness.Session(out, configuration=dict.fromkeys(keys, 0), device="cpu", repeats=2)
    setting = parts.Setting(
        SMALL, block_steps=4, modes=("whole", "steps"), writers=(1,), batch=4, window=0.005
    )
    with contextlib.ExitStack() as stack:
        crews = {name: subjects.Crew(name) for name in ("memcpy", "ours")}
        for name, crew, reason in subjects.peer_crews(pythons):
            if crew is None:
                left.append(f"{name}: {reason}")
            else:
                crews[name] = crew
        for crew in crews.values():
            stack.callback(crew.close)
        assert set(crews) >= {"memcpy", "ours", "cpprb"}
        assert crews["cpprb"].about["versions"]["cpprb"] == "11.0.0"
        missing = "\n".join(left)
        for name in ("Reverb", "TorchRL"):
            if name not in crews:
                assert f"{name}: {pythons[0]}: ModuleNotFoundError" in missing
        crews = {name: crews[name] for name in ("memcpy", "ours", "cpprb")}
        note = lambda what, why: left.append(f"{what}: {why}")  # noqa: E731 - as short as `list.append`

        list(parts.inserting(session, note, setting, crews, shelf))
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
        one = parts.dataclasses.replace(setting, modes=("whole",))
        list(parts.inserting(session, note, one, crews, shelf))
        assert [row["variant"] for row in rows_of(out)[len(rows) :]] == ["memcpy", "ours"]
        assert left[-1] == "cpprb, whole trajectories one by one, 1 writer: it has ended"
        ending = "memcpy"
        with pytest.raises(processes.PeerFailed, match="it has ended"):
            list(parts.inserting(session, note, one, crews, shelf))


def test_the_script_of_peers_imports_nothing_of_this_project() -> None:
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]); "
        "print([n for n in sys.modules if n.split('.')[0] in ('gear_loader', 'benchmarks', 'torch')])"
    )
    command = [sys.executable, "-I", "-c", code, peers.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
