"""Adding and reading: what writers add is what is there, torn rows are found, tables are removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import ROOT
from waiting_common import wait_until

import gear_loader as gear
from benchmarks import adding, harness, workloads
from benchmarks.experiments import online
from benchmarks.peers import gear as gear_peer
from benchmarks.peers import online as peers
from benchmarks.peers import plain
from benchmarks.peers import process as processes
from gear_loader.storage import shared_memory

COLUMNS = (("observation", (3,)), ("action", (2, 2)), ("reward", ()))
SMALL = workloads.Workload("small", COLUMNS, 24, 10, gear.Window(length=10), "first")
SPEC = adding.specify(SMALL, batch=4, seed=5)


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with adding.TableCache() as shelf, shelf.table(SMALL, block_steps=4) as table:
        yield table
    while gear_peer._tables:
        gear_peer._tables.popitem()[1].close()


@pytest.mark.long
def test_tables_are_gone_when_the_benchmark_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from benchmarks import adding as s, workloads as w\n"
        "with s.TableCache() as shelf, shelf.table(w.W1.of(20), block_steps=100) as table:\n"
        "    print(table.name, flush=True)\n"
        "    os.killpg(os.getpgid(0), signal.SIGKILL)\n"
    )
    told: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, **told)
    assert done.returncode == -signal.SIGKILL
    name = done.stdout.strip()
    assert name.startswith("bench-online-"), done.stderr
    wait_until(
        lambda: not any(name in entry for entry in os.listdir(shared_memory.DIRECTORY)), "the table's end"
    )


def test_writers_have_trajectories_of_their_own() -> None:
    first, second = (plain.Torch(SPEC, "whole", number, 2) for number in (0, 1))
    source = peers.trajectories_of(SPEC)
    for subject, begin in ((first, 0), (second, 12)):
        assert source.verify(subject.stacked).tolist() == [SMALL.steps * (begin + i) for i in range(12)]
    steps = {name: values[3] for name, values in first.stacked.items()}
    source.verify({name: values[:, None] for name, values in steps.items()}, 1)


@pytest.mark.parametrize("mode", peers.MODES)
def test_ours_adds_what_it_says_in_every_mode(table: gear.Table, mode: str) -> None:
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


@pytest.mark.parametrize("mode", ["whole", "batches", "steps", "chunks 10"])
@pytest.mark.parametrize("name", ["memcpy", "torch"])
def test_yardsticks_copy_what_they_say(table: gear.Table, name: str, mode: str) -> None:
    subject = {"memcpy": gear_peer.Memcpy, "torch": plain.Torch}[name](SPEC, mode, 0, 1, table.name)
    subject.fill()
    for _ in range(30):  # around the end of the store
        subject.check()
    per = {"whole": 1, "batches": 4}.get(mode, SMALL.steps)
    assert subject.work() == per
    store = subject._memory if name == "memcpy" else subject.store["action"]
    store.fill(0) if name == "memcpy" else store.zero_()
    subject.work = lambda: per  # does nothing
    with pytest.raises(ValueError, match=r"differs|number of no step|was written, after|another"):
        subject.check()


@pytest.mark.long
def test_writers_in_several_processes_are_checked_and_measured(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = adding.Crew("ours")
    with contextlib.closing(crew):
        group = adding.Group(crew, SPEC, "whole", 2, table=table)
        group.check()
        assert 0 < group.measure(0.2) < 0.2
        reader = online.Reader(table, SPEC, gear.Uniform(), batch=8, writers=2)
        begin = group.start(0.1)
        assert reader.until(begin + 0.1, look=True) > 0
        assert group.rate() > 0

        monkeypatch.setattr(group, "_inserted", iter((0, 1)).__next__)
        with pytest.raises(harness.Incorrect, match="1 trajectories have arrived, of "):
            group.measure(0.02)
        monkeypatch.undo()

        # What no writer adds is found among what is there and in batches.
        wrong = {n: torch.full((SMALL.steps, *shape), 0.5) for n, shape in SMALL.columns}
        wrong["reward"][0] = SMALL.steps
        table.extend([wrong] * SMALL.trajectories)
        with pytest.raises(harness.Incorrect, match="8 of 8 rows are torn or mixed up"):
            reader.verify(reader.read())
        monkeypatch.setattr(group, "measure", lambda seconds: 1.0)
        with pytest.raises(harness.Incorrect, match="observation of row 0 differs"):
            group.check()
        group.close()
        with pytest.raises(processes.PeerFailed, match="build comes first"):
            crew.start()[0].ask("fill")
