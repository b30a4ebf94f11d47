"""Tables that are written to a disk in the background: what is there, who may write, and what goes on without it."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_common import (
    SIZES,
    contents,
    everything,
    files,
    loaded,
    loaded_numbers,
    make,
    segments,
    small_disk,
)
from options_common import nested_table
from table_common import COLUMNS, fresh_name, named, numbers_of, rows
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.checkpoint import behind, changes, index, open_files, saving, spilling
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint.trajectory_records import RECORD
from gear_loader.errors import CheckpointError, LockTimeoutError, SchemaError

MonkeyPatch = pytest.MonkeyPatch
PATIENCE = 60.0  # seconds for what takes milliseconds
NEVER = 1e6
"""Seconds between two writes of a table that writes only when it is told to."""


def disk(path: Path, sync_seconds: float = NEVER) -> gear.Disk:
    return gear.Disk(path, sync_seconds=sync_seconds)


def on_disk(table: gear.Table) -> bool:
    """Whether everything that is committed is on disk."""
    stats = table.stats().disk
    assert stats is not None
    return stats.unwritten_trajectories == 0


# What is written -------------------------------------------------------------------------------------


def test_a_table_comes_back_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "replay"
    assert not disk(path).exists()
    with make(on_full="evict_oldest", disk=disk(path)) as table:
        assert disk(path).exists(), "an empty table can be recovered too"
        for number in range(30):
            table.add(rows(number, 5 + number % 7), priority=float(number))
        table.remove(table.indices()[3])
        before = contents(table)
    for turn in range(3):
        written = files(path)
        with gear.Table.recover(disk(path)) as table:
            assert contents(table) == before
            table.add(rows(100 + turn, 20), priority=0.5)
            before = contents(table)
        assert written.items() - files(path).items() <= {
            (name, info) for name, info in written.items() if not name.startswith("segments")
        }, "what was on disk was not written again"
    assert loaded(path) == before


def test_commits_of_all_processes_are_written_without_a_word(tmp_path: Path) -> None:
    with named(disk=disk(tmp_path, 0.01)) as table:
        table.add(rows(0, 10))
        child = multiprocessing.get_context("forkserver").Process(target=_add_elsewhere, args=(table.name,))
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 0
        wait_until(lambda: on_disk(table) and loaded_numbers(tmp_path) == [0, 1, 2])
        table.remove(table.indices()[0])
        wait_until(lambda: loaded_numbers(tmp_path) == [1, 2])
        stats = table.stats()
        assert stats.disk is not None
        assert stats.disk.writes >= 3
        assert stats.disk.bytes_written > 0
        assert 0 < stats.disk.write_seconds <= stats.disk.longest_write_seconds
        assert f"{stats.disk.writes:,} writes of {stats.disk.bytes_written:,} B" in str(stats)


def _add_elsewhere(name: str) -> None:
    with gear.Table.attach(name) as table:
        assert table.stats().disk is None
        table.extend([rows(1, 3), rows(2, 30)])


def test_segments_are_merged_little_by_little(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MAX_SEGMENTS_BEHIND", 6)
    with make(on_full="evict_oldest", disk=disk(tmp_path)) as table:
        for budget in (0, 1000):
            monkeypatch.setattr(saving, "REWRITE_BYTES", budget)
            for number in range(30):
                table.add(rows(number, 1 + number * 7 % 40))
                if number % 13 == 5:
                    table.remove(table.indices()[:: 2 + number % 3])
                table.save(tmp_path)
                if number % 3 == 2:
                    assert loaded(tmp_path) == contents(table)
                assert len(segments(tmp_path)) <= 6 + 3, "of this manifest and the one before it"


def test_priorities_are_those_of_the_last_write(tmp_path: Path) -> None:
    with make(disk=disk(tmp_path)) as table:
        slot = table.add(rows(0, 5), priority=1.0)
        table.save(tmp_path)
        table._engine.region.array("priority")[slot] = 7.0
    with gear.Table.recover(tmp_path) as table:
        assert table._engine.region.array("priority")[table.indices()].tolist() == [7.0], "close writes them"


def test_an_error_after_the_manifest_is_written_is_followed_by_writes_that_can_be_read(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """What the directory holds is known again, whatever happens between the write and its end."""
    tier = gear.Disk(tmp_path, sync_seconds=NEVER, size="1MiB")
    real = spilling.Spiller.spill

    def fails(self: spilling.Spiller) -> None:
        raise LockTimeoutError("later")

    with make(disk=tier, memory="1MiB") as table:
        for turn in range(4):
            table.add(rows(turn, 5))
            monkeypatch.setattr(spilling.Spiller, "spill", fails)
            with pytest.raises(LockTimeoutError, match="later"):
                table.save(tmp_path)
            assert table.stats().disk.error == "later"  # type: ignore[union-attr]
            monkeypatch.setattr(spilling.Spiller, "spill", real)
            assert loaded(tmp_path) == contents(table)
            table.add(rows(100 + turn, 5))
            table.save(tmp_path)
            assert loaded(tmp_path) == contents(table)


def test_an_error_of_a_move_between_memory_and_disk_is_shown(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def fails(self: spilling.Spiller, table: gear.Table) -> int:
        raise LockTimeoutError("later")

    def error() -> str | None:
        return table.stats().disk.error  # type: ignore[union-attr]

    disk = gear.Disk(tmp_path, sync_seconds=NEVER, size="1MiB")
    with make(disk=disk, memory="1MiB") as table, monkeypatch.context() as patch:
        patch.setattr(spilling.Spiller, "is_due", lambda self: True)
        patch.setattr(spilling.Spiller, "move", fails)
        wait_until(lambda: error() is not None)
        assert error() == "Trajectories of the private table stay where they are: later"
        patch.setattr(spilling.Spiller, "move", lambda self, table: 0)
        wait_until(lambda: error() is None)


def test_an_index_grows_by_what_has_changed_and_is_compacted(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def records() -> tuple[str, int]:
        """Name of the index, and records in it: of trajectories, also those that are gone."""
        found = json.loads((tmp_path / "manifest.json").read_text())["index"]
        data = np.fromfile(tmp_path / found["path"], RECORD, found["bytes"] // RECORD.itemsize)
        return found["path"], int((data["sequence"] >= 0).sum())

    with make(on_full="evict_oldest", disk=disk(tmp_path)) as table:
        table.extend([rows(number, 5) for number in range(10)], priority=1.0)
        table.save(tmp_path)
        monkeypatch.setattr(index, "_SPARE", 400)  # what fills blocks between the writes counts
        table.save(tmp_path)
        name, count = records()
        reader, slots = table._engine.reader(), table.indices()
        for more, change in (
            (1, lambda: table.add(rows(10, 5))),
            (0, lambda: None),
            (1, lambda: table.remove(slots[2])),
            (2, lambda: reader.set_priorities(slots[:2], np.full(2, -1), np.full(2, 3, "f4"))),
        ):
            change()
            table.save(tmp_path)
            count += more
            assert records() == (name, count)
            assert loaded(tmp_path) == contents(table)
        monkeypatch.setattr(index, "_SPARE", 0)
        table.remove(table.indices()[:5])
        table.save(tmp_path)
        assert (records()[0] != name, records()[1]) == (True, 5), "more than half would be out of date"
        assert loaded(tmp_path) == contents(table)
        expected = contents(table)
    assert loaded(tmp_path) == expected


def test_what_changes_while_a_write_compares_slots_is_compared_again(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Trajectories that the first pass has seen, or not, are gone, have grown, or have others in their slots."""
    monkeypatch.setattr(saving, "SURE_BYTES", 0)  # what is lost is not looked for again
    genuine = changes._differing

    with make(disk=disk(tmp_path)) as table, table.writer(commit_every_step=True) as writer:
        slots = [table.add(rows(number, 5)) for number in range(4)]
        table.save(tmp_path)
        grown = rows(9, 3)
        writer.append({name: value[:1] for name, value in grown.items()})
        slots.append(table.add(rows(4, 5)))

        def meanwhile(index: Any, on_disk: Any, among: Any) -> Any:
            found = genuine(index, on_disk, among)
            if among is None and len(slots):
                table.remove([slots.pop(4), slots.pop(1)])
                slots.clear()
                table.add(rows(5, 7))
                writer.append({name: value[1:] for name, value in grown.items()})
            return found

        monkeypatch.setattr(changes, "_differing", meanwhile)
        table.save(tmp_path)
        assert loaded(tmp_path)["contents"] == contents(table)["contents"]


@pytest.mark.parametrize(("ragged", "stage"), [(False, saving.STAGE_BYTES), (True, 1000), (True, 30_000)])
def test_a_write_copies_what_others_evict_meanwhile_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: MonkeyPatch, ragged: bool, stage: int
) -> None:
    """Two threads replace all trajectories of a small table again and again, with no ticket to wait for."""
    monkeypatch.setattr(saving, "SURE_BYTES", 0)
    monkeypatch.setattr(saving, "STAGE_BYTES", stage)
    stop = threading.Event()

    def add(first: int) -> None:
        number = first
        while not stop.is_set():
            table.add(rows(number, 1 + number % 37, ragged=ragged))
            number += 1

    with make(on_full="evict_oldest", disk=disk(tmp_path), ragged=ragged) as table:
        threads = [threading.Thread(target=add, args=(first,)) for first in (0, 10**6)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                table.save(tmp_path)
                loaded_numbers(tmp_path)  # fails unless each is whole
        finally:
            stop.set()
            for thread in threads:
                thread.join()


# Adding does not wait --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "ragged"), [(0, False), (3000, False), (1 << 20, False), (0, True), (1 << 20, True)]
)
def test_a_full_table_turns_over_while_the_disk_stands_still(
    tmp_path: Path, monkeypatch: MonkeyPatch, stage: int, ragged: bool
) -> None:
    """Most blocks are used again meanwhile; what comes back is whole, and no ticket is held."""
    monkeypatch.setattr(files_module, "PIECE_BYTES", 4096)
    monkeypatch.setattr(saving, "STAGE_BYTES", stage)
    standing, go = threading.Event(), threading.Event()
    genuine = files_module._write_piece

    def write_piece(*args: Any) -> None:
        standing.set()
        assert go.wait(PATIENCE)
        genuine(*args)

    with make(on_full="evict_oldest", timeout=5.0, disk=disk(tmp_path), ragged=ragged) as table:
        table._engine.region.lock.timeout = 5.0
        for number in range(20):
            table.add(rows(number, 20, ragged=ragged))
        monkeypatch.setattr(files_module, "_write_piece", write_piece)
        thread = threading.Thread(target=table.save, args=(tmp_path,))
        thread.start()
        assert standing.wait(PATIENCE)
        for number in range(20, 35):
            table.add(rows(number, 20, ragged=ragged))
        stats = table.stats().disk
        assert stats is not None
        assert stats.unwritten_trajectories == 20
        assert stats.unwritten_seconds > 0
        go.set()
        thread.join(PATIENCE)
        found = set(loaded_numbers(tmp_path))
        assert found == set(range(20)) if stage > 3000 else set(range(15, 20)) <= found < set(range(20))
        table.save(tmp_path)
        assert loaded(tmp_path) == contents(table)


# A disk that is full or fails ------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: MonkeyPatch) -> threading.Event:
    """While it is set, nothing can be written."""
    event, genuine = threading.Event(), open_files.write_all

    def write_all(*args: Any) -> None:
        if event.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        genuine(*args)

    monkeypatch.setattr(open_files, "write_all", write_all)
    return event


def test_a_full_disk_stops_no_table_and_is_caught_up(
    tmp_path: Path, full: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gear_loader")
    with make(disk=disk(tmp_path, 0.01)) as table:
        table.add(rows(0, 5))
        wait_until(lambda: on_disk(table))
        full.set()
        table.extend([rows(1, 5), rows(2, 5)])
        wait_until(lambda: table.stats().disk.error is not None)  # type: ignore[union-attr]
        wait_until(lambda: len(caplog.records) == 1)
        message = caplog.records[0].getMessage()
        assert "cannot be written: No space left on device" in message
        assert "Free some space there" in message
        assert "Of the private table, 2 trajectories committed in the last 0." in message
        assert message.endswith(f"are not in {tmp_path}.")
        stats = table.stats().disk
        assert stats is not None
        assert stats.unwritten_trajectories == 2
        assert "2 trajectories not on disk" in str(stats)
        assert "No space left on device" in str(stats)
        assert numbers_of(table) == [0, 1, 2]
        assert loaded_numbers(tmp_path) == [0]
        with pytest.raises(CheckpointError, match="No space left on device"):
            table.save(tmp_path)
        full.clear()
        wait_until(lambda: loaded_numbers(tmp_path) == [0, 1, 2])
        wait_until(lambda: len(caplog.records) == 2)
        assert f"Writing the private table to {tmp_path} works again" in caplog.records[1].getMessage()
        assert table.stats().disk.error is None  # type: ignore[union-attr]


def test_closing_says_what_is_not_on_disk(tmp_path: Path, full: threading.Event) -> None:
    table = make(disk=disk(tmp_path))
    table.add(rows(0, 5))
    table.save(tmp_path)
    table.extend([rows(1, 5), rows(2, 5)])
    full.set()
    with pytest.raises(
        CheckpointError, match=r"No space left.*2 trajectories committed in the last .* are not in"
    ):
        table.close()
    assert repr(table) == "<Table private, closed>"
    table.close()
    full.clear()
    assert loaded_numbers(tmp_path) == [0]
    with gear.Table.recover(tmp_path) as again:
        assert numbers_of(again) == [0]


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "small", 400) as small,
        make(max_steps=100_000, disk=disk(small / "replay", 0.01)) as table,
    ):
        table.add(rows(0, 50))
        table.save(small / "replay")
        table.add(rows(1, 20_000))
        table.add(rows(2, 50))
        wait_until(lambda: "No space left" in str(table.stats()))
        assert loaded_numbers(small / "replay") == [0]
        table.remove(table.indices()[1])
        wait_until(lambda: loaded_numbers(small / "replay") == [0, 2])


# Who may write ---------------------------------------------------------------------------------------


def refused(message: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        call(*args, **options)


def test_directories_that_are_in_use_or_hold_something(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    path, name = tmp_path / "replay", fresh_name()
    with make(disk=disk(path)) as table:
        table.add(rows(0, 5))
        table.save(path)
        in_use = r"gear-loader\.lock is locked: a private table of process \d+ is written into this directory"
        refused(in_use, make, name=name, disk=disk(path))
        refused(in_use, gear.Table.recover, path)
        with make() as other:
            refused(in_use, other.save, path)
        assert loaded(path) == contents(table), "loading a copy needs no lock"
    before = files(path)
    refused(r"holds a table of 1 trajectories.*Table\.recover\(", make, name=name, disk=disk(path))
    assert files(path) == before
    with pytest.raises(gear.errors.RegionError):
        gear.Table.attach(name)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    refused(r"holds 'notes.txt' and no manifest", make, disk=disk(foreign))
    refused(r"is no checkpoint", gear.Table.recover, foreign)
    refused(r"is a file", make, disk=disk(foreign / "notes.txt"))
    refused(r"is no checkpoint", gear.Table.recover, tmp_path / "nothing")
    assert everything(foreign) == {"notes.txt": b"mine"}

    def denied(*args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/somewhere")

    monkeypatch.setattr(os, "makedirs", denied)
    refused("cannot be written: Permission denied", make, name=name, disk=disk(tmp_path / "denied"))
    with pytest.raises(gear.errors.RegionError):
        gear.Table.attach(name)


def test_invalid_options(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="sync_seconds is 0"):
        disk(tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"The path 5 was received"):
        gear.Disk(5)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r"disk is '/x'; expected None or a gear_loader\.Disk"):
        make(disk="/x")
    with make(disk=disk(tmp_path)) as table:
        table.add(rows(0, 5))
    other = {"x": gear.Column(torch.float32)}
    refused("expected", gear.Table.recover, tmp_path, schema=other)
    refused("needs max_trajectories=1|needs max_steps=5", gear.Table.recover, tmp_path, max_steps=2)
    assert loaded_numbers(tmp_path) == [0]


def test_processes_that_start_in_any_order(tmp_path: Path) -> None:
    name = fresh_name()
    options: dict[str, Any] = {**SIZES, "name": name, "if_exists": "attach", "disk": disk(tmp_path)}
    with (
        gear.Table.create(COLUMNS, **nested_table(options)) as first,
        gear.Table.create(COLUMNS, **nested_table(options)) as second,
    ):
        assert first.stats().disk is not None
        assert second.stats().disk is None, "one of them writes"
        second.add(rows(0, 5))
        first.save(tmp_path)
        first.close()
        second.add(rows(1, 5))
        # The memory has outlived the first process: a restarted one goes on with it.
        with gear.Table.create(COLUMNS, **nested_table(options)) as third:
            third.save(tmp_path)
            assert loaded_numbers(tmp_path) == numbers_of(third) == [0, 1]
        second.unlink()
    refused("holds a table of 2 trajectories", gear.Table.create, COLUMNS, **options)
    with pytest.raises(gear.errors.RegionError):
        gear.Table.attach(name)
    with gear.Table.recover(tmp_path, name=name) as table:
        assert numbers_of(table) == [0, 1]
        table.unlink()


def test_saves_elsewhere_and_into_the_same_directory(tmp_path: Path) -> None:
    path, other = tmp_path / "disk", tmp_path / "copy"
    with named(disk=disk(path)) as table, gear.Table.attach(str(table.name)) as handle:
        for number in range(4):
            table.add(rows(number, 5))
            table.save(other if number % 2 else path)
            assert loaded_numbers(other if number % 2 else path) == list(range(number + 1))
        handle.save(other)
        refused("is written into this directory", handle.save, path)
        (tmp_path / "link").symlink_to(path)
        table.add(rows(4, 5))
        table.save(tmp_path / "link")
        expected = contents(table)
    assert loaded(path) == expected
    assert loaded_numbers(other) == [0, 1, 2, 3]
    with gear.Table.recover(other, name=fresh_name()) as table:
        table.unlink()
        assert numbers_of(table) == [0, 1, 2, 3], "a saved table can be written on"
    with gear.Table.load(path) as table:
        table.save(path)
    assert not (path / "manifest.previous.json").exists(), "a save leaves what it needs"
    assert len(segments(path)) <= 5


# The end of a process --------------------------------------------------------------------------------


def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    with make(disk=disk(tmp_path)) as table:
        table.add(rows(0, 5))
        ours, theirs = os.pipe()
        done, tell = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                table.add(rows(1, 5))
                assert table.stats().disk is None
                refused("is written into this directory", table.save, tmp_path)
                table.close()
                os.close(theirs)
                os.write(tell, b"!")
                os.read(ours, 1)
                status = 0
            os._exit(status)
        os.close(ours)
        os.close(tell)
        with open(done, "rb") as pipe:
            assert pipe.read(1)  # its save was refused while the parent holds the lock
    try:
        assert loaded_numbers(tmp_path) == [0]
        with gear.Table.recover(tmp_path) as again:  # the living child holds no lock
            assert numbers_of(again) == [0]
    finally:
        os.close(theirs)
        _, status = os.waitpid(child, 0)
    assert status == 0


PROGRAM = """
import sys, torch, gear_loader as gear
table = gear.Table.create({"x": gear.Column(torch.int64)}, max_steps=100, max_trajectories=10,
                          disk=gear.Disk(sys.argv[1], sync_seconds=1e6))
table.add({"x": torch.arange(5)})
"""


@pytest.mark.long
def test_the_end_of_a_program_writes_the_rest(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    with gear.Table.load(tmp_path) as table:
        assert [table[int(slot)]["x"].tolist() for slot in table.indices()] == [[0, 1, 2, 3, 4]]


def test_a_table_that_nothing_refers_to_any_more(tmp_path: Path) -> None:
    table = make(disk=disk(tmp_path))
    table.add(rows(0, 5))
    del table
    gc.collect()
    with gear.Table.recover(tmp_path) as table:  # waits until the thread has written the rest
        assert numbers_of(table) == [0]
    again = make(disk=disk(tmp_path / "again"))
    again.add(rows(0, 5))
    del again
    gc.collect()
    with pytest.raises(CheckpointError, match="holds a table of 1 trajectories"):  # and not: is locked
        make(disk=disk(tmp_path / "again"))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not behind._writers
    wait_until(lambda: not any(thread.name == "gear-loader-disk" for thread in threading.enumerate()))
