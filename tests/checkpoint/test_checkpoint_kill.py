"""A process that is killed while it saves a table, again and again: what it reported as saved is there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from checkpoint_common import contents, loaded_numbers, make
from table_common import rows

import gear_loader as gear
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint import saving

CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 60.0  # seconds for what takes milliseconds


def _save_until_killed(pipe: Connection, path: str, first: int) -> None:
    files_module.PIECE_BYTES = 4096
    saving.HOLD_BYTES = 4096 if first % 2 else 1 << 30
    if first:
        table = gear.Table.load(path)
        first = int(table[int(table.indices()[-1])]["number"][0]) + 1
    else:
        table = make(on_full="evict_oldest", max_steps=600)
    pipe.send(first - 1)
    generator = random.Random(first)
    for number in range(first, 10_000):
        table.add(rows(number, generator.randint(1, 60)), priority=float(number))
        table.save(path)
        pipe.send(number)


@pytest.mark.long
def test_a_process_is_killed_dozens_of_times_while_it_saves(tmp_path: Path) -> None:
    """Each child loads what its predecessor left, and saves again and again until it is killed."""
    CONTEXT.set_forkserver_preload(["torch", "gear_loader", "gear_loader.checkpoint"])
    path, generator, last, awaited = tmp_path / "ck", random.Random(0), -1, 0
    for turn in range(24):
        pipe, theirs = CONTEXT.Pipe()
        child = CONTEXT.Process(target=_save_until_killed, args=(theirs, str(path), last + 1), daemon=True)
        child.start()
        theirs.close()
        assert pipe.poll(PATIENCE)
        assert pipe.recv() == last, "it begins where its predecessor ended"
        if turn == 0 or generator.random() < 0.7:
            assert pipe.poll(PATIENCE)
            last, awaited = max(last, pipe.recv()), awaited + 1
        time.sleep(generator.random() * 0.05)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(PATIENCE)
        assert child.exitcode == -signal.SIGKILL
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll(0):
                last = pipe.recv()
        pipe.close()
        with gear.Table.load(path) as table:
            kept = contents(table)
        found = loaded_numbers(path)
        assert found == list(range(found[0], found[-1] + 1)), "not the newest that there was room for"
        assert kept["priorities"] == [float(number) for number in found]
        assert kept["sequences"] == found
        assert kept["counts"] == (found[-1] + 1, 0)
        # What was reported, and at most the save that was under way.
        assert last <= found[-1] <= last + 1
        last = found[-1]
    assert last + 1 >= awaited > 10
