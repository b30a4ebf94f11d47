"""Owners that save, write behind or spill, and writers, are killed again and again: what they told of is there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from checkpoint_common import contents, make
from options_common import nested_table
from table_common import COLUMNS, RAGGED, bury, fresh_name, number_of, numbers_of, rows

import gear_loader as gear
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint import saving
from gear_loader.errors import StaleIndexError, TableFullError

pytestmark = pytest.mark.long
CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 60.0  # seconds for what takes milliseconds
SIZES: dict[str, Any] = {
    "max_steps": 6000,
    "max_trajectories": 600,
    "block_steps": 4,
    "on_full": "evict_oldest",
}


def disk_of(path: str | Path, kind: str) -> gear.Disk:
    if "tier" in kind:  # writes when memory is short
        return gear.Disk(path, sync_seconds=1e6, size="1GiB", keep="newest")
    return gear.Disk(path, sync_seconds=0.01)


def _save(pipe: Connection, path: str, turn: int, ragged: bool) -> None:
    """Save again and again, and tell how many trajectories have been."""
    files_module.PIECE_BYTES = 4096
    saving.HOLD_BYTES = 4096 if turn % 2 else 1 << 30
    table = gear.Table.load(path) if turn else make(on_full="evict_oldest", max_steps=600, ragged=ragged)
    generator, first = random.Random(turn), table.stats().num_inserted
    pipe.send(first)
    for number in range(first, first + 10_000):
        table.add(rows(number, generator.randint(1, 60), ragged=ragged), priority=float(number))
        table.save(path)
        pipe.send(number + 1)


def _own(pipe: Connection, path: str, kind: str, name: str) -> None:
    """Create or recover the table, and tell how many trajectories are on disk."""
    disk = disk_of(path, kind)
    memory: dict[str, Any] = {"max_blocks": 60} if "tier" in kind else {}
    if "ragged" in kind:
        memory["payload"] = 40_000 if "tier" in kind else 200_000
    if "shared" in kind and not disk.exists():  # a table that comes back has what it had
        memory["prefixes"] = True
    if disk.exists():
        table = gear.Table.recover(disk, name=name, **memory)
    else:
        columns = RAGGED if "ragged" in kind else COLUMNS
        table = gear.Table.create(columns, **nested_table({**SIZES, **memory, "name": name, "disk": disk}))
    pipe.send(0)
    while True:
        pipe.send(table._engine.disk._following)  # type: ignore[union-attr]
        time.sleep(0.002)


def _add(name: str, seed: int) -> None:
    generator = random.Random(seed)
    with gear.Table.attach(name, timeout=PATIENCE) as table:
        for number in range(10**6):
            length = generator.randint(1, 60)
            slot = table.add(rows(number, length, ragged=bool(table.schema.ragged)))
            if table._engine.region.layout.prefixes and length > 3:
                steps = length - length // 4
                generation = int(table._engine.index.arrays.generation[slot])
                rest = {name: values[steps:] for name, values in rows(number, length).items()}
                begin: Any = {"prefix": slot, "prefix_steps": steps, "prefix_generation": generation}
                with contextlib.suppress(StaleIndexError):  # it has been evicted meanwhile
                    table.extend([rest] * 3, **begin)


def started(work: Any, *given: Any) -> Any:
    process = CONTEXT.Process(target=work, args=given, daemon=True)
    process.start()
    return process


def fill(table: gear.Table) -> None:
    for number in range(200):
        table.add(rows(number, 20, ragged=bool(table.schema.ragged)))


def check_memory(name: str, pid: int, kind: str) -> None:
    """What is left in memory, and of a tier on disk, is whole for those who have attached."""
    with gear.Table.attach(name, timeout=1.0) as table:
        bury(table)
        table.check_valid()
        numbers_of(table)
        if "tier" in kind:
            with pytest.raises(
                TableFullError, match=f"process {pid} that moved trajectories there has ended"
            ):
                fill(table)
        table.unlink()


@pytest.mark.parametrize(
    "kind",
    ["save", "behind", "tier", "ragged save", "ragged behind", "ragged tier", "shared behind", "shared tier"],
)
@pytest.mark.parametrize("turns", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_what_was_told_is_there_and_everything_is_whole(tmp_path: Path, kind: str, turns: int) -> None:
    """The last complete write is there, or a later one; each process goes on with what its predecessor left."""
    saves = kind.endswith("save")
    generator, path, inserted = random.Random(0), str(tmp_path / "table"), 0
    for turn in range(turns if saves else turns // 2):
        name = fresh_name()
        pipe, theirs = CONTEXT.Pipe()
        owner = (
            started(_save, theirs, path, turn, "ragged" in kind)
            if saves
            else started(_own, theirs, path, kind, name)
        )
        theirs.close()
        assert pipe.poll(PATIENCE)
        assert pipe.recv() == (inserted if saves else 0)
        beside = [] if saves else [started(_add, name, 2 * turn + i) for i in range(2)]
        told, wanted = 0, inserted + (20 if beside else int(turn == 0 or generator.random() < 0.7))
        while told < wanted:
            assert pipe.poll(PATIENCE)
            told = pipe.recv()
        time.sleep(generator.random() * 0.1)
        for process in (*beside, owner):
            os.kill(process.pid, signal.SIGKILL)
            process.join(PATIENCE)
            assert process.exitcode == -signal.SIGKILL
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll(0):
                told = max(told, pipe.recv())
        pipe.close()
        if not saves:
            check_memory(name, owner.pid, kind)
        with gear.Table.load(path) if saves else gear.Table.recover(disk_of(path, kind)) as table:
            kept = contents(table)
            numbers = [number_of(table[int(slot)]) for slot in table.indices()]
            assert kept["counts"][0] == kept["sequences"][-1] + 1 >= told
            inserted = kept["counts"][0]
            if saves:  # no more than the save that was under way
                assert inserted <= told + 1
                assert numbers == kept["sequences"] == [int(each) for each in kept["priorities"]]
                assert numbers == list(range(numbers[0], numbers[-1] + 1)), (
                    "the newest that there was room for"
                )
            elif "tier" in kind:
                assert table._engine.num_spilled > 0
    assert inserted >= turns // 2
