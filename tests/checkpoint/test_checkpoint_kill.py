"""A process that dies while it saves, wherever: then the previous checkpoint loads, or the new one, and no mixture."""

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
from checkpoint_common import contents, dying, files, loaded, loaded_numbers, make
from table_common import Died, rows

import gear_loader as gear
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint import saving

CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 60.0

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "close")


@pytest.mark.parametrize(
    "case",
    [
        "more",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("first", "rewritten", "rounds", "another table")
        ),
    ],
)
def test_dying_at_every_call_of_the_system(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "rounds":
        monkeypatch.setattr(saving, "HOLD_BYTES", 0)
        monkeypatch.setattr(files_module, "PIECE_BYTES", 4096)
    path = tmp_path / "ck"
    with make() as table:
        for number in range(6):
            table.add(rows(number, 10 + number))
        before: dict[str, Any] | None = None
        if case == "another table":
            with make() as other:
                other.add(rows(77, 20))
                other.save(path)
                before = contents(other)
        elif case != "first":
            table.save(path)
            before = contents(table)
            if case == "rewritten":
                table.remove(table.indices()[:4])
            table.add(rows(6, 30))
        after = contents(table)
        assert before != after
        deaths, seen = 0, set()
        while True:
            died = False
            with dying(deaths, CALLS):
                try:
                    table.save(path)
                except Died:
                    died = True
            assert not table.region.array("readers")[:, 2].any()
            if before is None and not (path / "manifest.json").exists():
                with pytest.raises(gear.errors.CheckpointError, match=r"no manifest\.json"):
                    gear.Table.load(path)
                seen.add("before")
            else:
                found = loaded(path)
                assert found in (before, after)
                seen.add("before" if found == before else "after")
            if not died:
                break
            deaths += 1
            if "after" in seen:  # the rest is tidying up, which the next save would find nothing to do for
                table.save(path)
                assert loaded(path) == after
                break
        assert seen == {"before", "after"}
        assert deaths > 25
        table.save(path)
        named = set(files(path))
        table.save(path)
        assert {name for name in files(path) if "segments" in name} == {
            name for name in named if "segments" in name
        }
        assert not [name for name in files(path) if name.endswith(".part")], "nothing half done is left"
        assert loaded(path) == after


@pytest.mark.long
def test_dying_while_tidying_up(tmp_path: Path) -> None:
    """The new checkpoint holds, and the save after the next finds only what is needed."""
    path = tmp_path / "ck"
    with make() as table:
        for number in range(30):
            table.add(rows(number, 10))
            table.remove(table.indices()[:-2])
            calls = 30 + 2 * number
            with dying(calls, CALLS), contextlib.suppress(Died):
                table.save(path)
            if (path / "manifest.json").exists():
                found = loaded_numbers(path)
                assert found == list(range(found[0], found[-1] + 1))
        table.save(path)
        manifest_names = files(path)
        assert len(manifest_names) <= 2 + 2 * 5
        assert loaded(path) == contents(table)


def _save_for_ever(pipe: Connection, path: str, first: int) -> None:
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
def test_killed_dozens_of_times(tmp_path: Path) -> None:
    """Each child loads what its predecessor left, and saves again and again until it is killed."""
    CONTEXT.set_forkserver_preload(["torch", "gear_loader", "gear_loader.checkpoint"])
    path, generator, last, awaited = tmp_path / "ck", random.Random(0), -1, 0
    for turn in range(24):
        pipe, theirs = CONTEXT.Pipe()
        child = CONTEXT.Process(target=_save_for_ever, args=(theirs, str(path), last + 1), daemon=True)
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
        assert found == list(range(found[0], found[-1] + 1)), (
            "consecutive: the newest that there was room for"
        )
        assert kept["priorities"] == [float(number) for number in found]
        assert kept["sequences"] == found
        assert kept["counts"] == (found[-1] + 1, 0)
        assert last <= found[-1] <= last + 1, (
            "what was reported is there, and at most the save that was under way"
        )
        last = found[-1]
    assert last + 1 >= awaited > 10
