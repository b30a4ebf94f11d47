"""Several processes on one table, one step at a time: handles, the lock, deaths, stops, creation and forks."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from concurrency_common import Child, Nursery, Voice, waiting
from table_common import (
    COLUMNS,
    bury,
    forked,
    forks,
    fresh_name,
    named,
    numbers_of,
    rows,
)
from waiting_common import go_on, stop_process

import gear_loader as gear
from gear_loader.errors import LockTimeoutError, RegionError, TableFullError
from gear_loader.storage import shared_memory
from gear_loader.storage.counters import DIRTY
from gear_loader.storage.lock import process_start
from gear_loader.storage.shared_memory import region_path
from gear_loader.storage.states import FREE


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with named() as table:
        yield table
        table.check_valid()


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test() -> Iterator[None]:
    yield
    Nursery.shared().clear()


def nothing_leaked(table: gear.Table) -> None:
    """Once the index has been repaired, whatever is not live is free."""
    bury(table)
    index = table._engine.index

    def reclaim() -> None:
        index.arrays.counters[DIRTY] = 1
        index.arrays.ops.reclaim(index.arrays.where)
        index.arrays.counters[DIRTY] = 0

    index.recovery.locked(reclaim)
    table.check_valid()
    lengths = table.lengths().tolist()
    blocks = gear.Table.required_blocks(lengths, table._engine.region.layout.block_steps)
    assert table.stats().blocks_in_use == blocks
    assert (table._engine.region.array("state") != FREE).sum() == len(lengths)


def _use_handle(voice: Voice, handle: bytes) -> list[int]:
    with pickle.loads(handle) as table:
        assert table.on_full == "evict_oldest"
        voice.say("attached")
        voice.hear()
        table.add(rows(2, 9))
        table.check_valid()
        return numbers_of(table)


def test_a_handle_in_another_process_and_after_unlink() -> None:
    with named(on_full="evict_oldest") as table:
        table.add(rows(1, 7))
        child = Child(_use_handle, pickle.dumps(table))
        assert child.hear() == "attached"
        table.unlink()
        with named(name=table.name) as another:  # the name is free at once
            child.say()
            assert child.result() == numbers_of(table) == [1, 2]
            assert numbers_of(another) == []


# The lock --------------------------------------------------------------------------------------------


def _count(voice: Voice, name: str, times: int) -> None:
    with gear.Table.attach(name) as table:
        voice.hear()
        _count_in(table, times)


def _count_in(table: gear.Table, times: int) -> None:
    counter = table._engine.region.array("counters")
    for _ in range(times):
        with table._engine.region.lock:
            value = int(counter[63])
            time.sleep(0)
            counter[63] = value + 1


def test_the_lock_is_exclusive_between_processes_and_threads(table: gear.Table) -> None:
    children = [Child(_count, table.name, 300) for _ in range(3)]
    for child in children:
        child.say()
    with gear.Table.create(COLUMNS, max_steps=50, max_trajectories=5) as private:
        tables = (table, table, private, private)
        threads = [threading.Thread(target=_count_in, args=(each, 150)) for each in tables]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert private._engine.region.array("counters")[63] == 2 * 150
    for child in children:
        child.result()
    assert table._engine.region.array("counters")[63] == 3 * 300 + 2 * 150


def _hold(voice: Voice, name: str) -> None:
    table = gear.Table.attach(name)
    with table._engine.region.lock:
        voice.say("held")
        voice.hear()


def _add(voice: Voice, name: str) -> None:
    with gear.Table.attach(name) as table:
        voice.say()
        table.add(rows(7, 3))


def test_a_process_stopped_in_the_lock_and_one_killed_there(table: gear.Table) -> None:
    table.add(rows(1, 5))
    dataset = gear.ReplayDataset(table, batch_size=4, windows=gear.Window(2), device="cpu")
    child = Child(_hold, table.name)
    child.hear()
    stop_process(child.pid)
    other = Child(_add, table.name)
    other.hear()
    message = (
        rf"^Another process has held the lock of Table '{table.name}' \({region_path(str(table.name))}\) for over 0.05"
        r" s\. It may be stopped; `fuser` on the file names the processes that use it\.$"
    )
    calls: list[Callable[[], Any]] = [
        *(lambda: table.add(rows(2, 3)), lambda: table.extend([rows(2, 3)]), lambda: table.remove(0)),
        *(
            lambda: table[0],
            table.indices,
            lambda: table._engine.reader().begin_snapshot(),
            table.check_valid,
            dataset.sample,
        ),
        lambda: table.writer().append(rows(9, 3)),
    ]
    with waiting(table, 0.05):
        for call in calls:
            with pytest.raises(LockTimeoutError, match=message):
                call()
        assert (len(table), table.num_steps) == (1, 5), "these take no lock"
    go_on(child.pid)
    child.say()
    child.result()
    other.result()
    assert numbers_of(table) == [1, 7]
    child = Child(_hold, table.name)
    child.hear()
    child.kill()
    with waiting(table, 5):
        table.add(rows(2, 3))
    assert numbers_of(table) == [1, 7, 2]


def _try_lock(voice: Voice, name: str) -> bool:
    with gear.Table.attach(name) as table, waiting(table, 0.05):
        try:
            table.indices()
        except LockTimeoutError:
            return False
        return True


def test_nothing_that_this_process_closes_drops_its_lock() -> None:
    """The kernel drops a process's locks on a file whenever any of its descriptors of that file is closed."""
    with named() as table:
        name = str(table.name)
        view = torch.from_numpy(table._engine.region.column("number"))
        table.close()
        table = gear.Table.attach(name)
        with table._engine.region.lock:
            del view
            gc.collect()
            gear.Table.attach(name).close()
            pickle.loads(pickle.dumps(table)).close()
            copy = gear.Table.attach(name)
            del copy
            with pytest.raises(RegionError):
                gear.Table.create(COLUMNS, max_steps=5, max_trajectories=5, name=name)
            assert Child(_try_lock, name).result() is False
        assert Child(_try_lock, name).result() is True
        table.close()
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    assert not [link for link in links if name in link]


# The dead: test_concurrency.py has them killed anywhere -----------------------------------------------


def _read_and_wait(voice: Voice, name: str) -> None:
    table = gear.Table.attach(name)
    kept = [table._engine.reader().begin_snapshot() for _ in range(256)]
    voice.say()
    voice.hear()
    del kept


def test_the_places_of_dead_readers_are_given_out_again(table: gear.Table) -> None:
    table.add(rows(1, 5))
    child = Child(_read_and_wait, table.name)
    child.hear()
    with pytest.raises(gear.errors.GearError, match="256 batches are being read at once, which is the limit"):
        table[0]
    child.kill()
    assert numbers_of(table) == [1]


def test_a_process_is_known_by_its_start_too(table: gear.Table) -> None:
    """In a container a restarted process often has the id of its predecessor."""
    pid, start = os.getpid(), process_start(os.getpid())
    assert start > 0
    table.add(rows(1, 100))
    index = table._engine.index
    slots, _ = index.begin(np.array([90]), evict=False)
    ticket = index.reader.begin_read()
    table.remove(int(table.indices()[0]))
    with waiting(table, 0.05):
        with pytest.raises(TableFullError):
            table.add(rows(2, 160))
        index.arrays.owner[slots] = pid, start - 1
        with pytest.raises(LockTimeoutError):
            table.add(rows(2, 160))
        index.arrays.readers[ticket.row, :2] = pid, start - 1
        table.add(rows(2, 160))
    assert numbers_of(table) == [2]


def test_the_start_of_a_process() -> None:
    assert process_start(2**30) == 0
    child = Child(_die_forked)
    zombie = child.hear()
    assert process_start(child.pid) not in (0, process_start(os.getpid()))
    assert Path(f"/proc/{zombie}/stat").exists()
    assert process_start(zombie) == 0, "a zombie does nothing any more"
    child.say()
    child.result()
    assert process_start(child.pid) == 0


def _die_forked(voice: Voice) -> None:
    """Fork a child that exits at once, and do not fetch its status."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    while b") Z " not in Path(f"/proc/{pid}/stat").read_bytes():
        time.sleep(0.001)
    voice.say(pid)
    voice.hear()
    os.waitpid(pid, 0)


def _create_race(voice: Voice, rounds: int, base: str) -> list[str]:
    outcome = []
    for i in range(rounds):
        voice.hear()
        try:
            table = gear.Table.create(COLUMNS, max_steps=50, max_trajectories=4, name=f"{base}.{i}")
            table.add(rows(os.getpid(), 3))
            outcome.append("made")
        except RegionError as error:
            with gear.Table.attach(f"{base}.{i}") as table:
                table.check_valid()  # whole, as soon as it can be found
            outcome.append(str(error))
        voice.say()
    return outcome


def test_of_several_that_create_the_same_name_one_succeeds() -> None:
    base, rounds = fresh_name(), 4
    children = [Child(_create_race, rounds, base) for _ in range(3)]
    tables = []
    for i in range(rounds):
        for child in children:
            child.say()
        for child in children:
            child.hear()
        tables.append(gear.Table.attach(f"{base}.{i}"))
    outcomes = [child.result() for child in children]
    for i, table in enumerate(tables):
        made = [child.pid for child, outcome in zip(children, outcomes, strict=True) if outcome[i] == "made"]
        assert len(made) == 1
        assert numbers_of(table) == made
        message = f"There is already a table named '{base}.{i}'. Use it with"
        assert sum(outcome[i].startswith(message) for outcome in outcomes) == 2
        table.unlink()
        table.close()


def _die_creating(voice: Voice, name: str, where: str) -> None:
    setattr(os, where, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
    gear.Table.create(COLUMNS, max_steps=50, max_trajectories=4, name=name)


@pytest.mark.parametrize("where", ["posix_fallocate", "fstat", "link"])
def test_a_process_killed_while_it_creates_leaves_nothing(where: str) -> None:
    name = fresh_name()
    assert os.WTERMSIG(Child(_die_creating, name, where).reap()) == signal.SIGKILL
    assert not [entry for entry in os.listdir(shared_memory.DIRECTORY) if name in entry]
    with named(name=name):
        pass


@forks
def test_a_forked_child_shares_a_named_table(table: gear.Table) -> None:
    table.add(rows(1, 5))

    def work() -> None:
        table.add(rows(2, 6))
        slots, _ = table._engine.index.begin(np.array([4]), evict=False)
        assert table._engine.index.arrays.owner[slots].tolist() == [[os.getpid(), process_start(os.getpid())]]
        table._engine.reader().begin_snapshot()
        with gear.Table.attach(str(table.name)) as other:
            assert numbers_of(other) == [1, 2]
        table.close()

    forked(work)
    assert numbers_of(table) == [1, 2]
    nothing_leaked(table)
    table.remove([0, 1])
    table.add(rows(3, 200))


@forks
@pytest.mark.parametrize("private", [True, False])
def test_a_fork_while_another_thread_holds_the_lock(private: bool) -> None:
    """That thread does not exist in the child; nothing there will ever release the lock."""
    sizes: dict[str, Any] = {"max_steps": 50, "max_trajectories": 5, "block_steps": 4}
    with gear.Table.create(COLUMNS, **sizes) if private else named(**sizes) as table:
        table.add(rows(1, 5))
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with table._engine.region.lock:
                held.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()

        def work() -> None:
            with waiting(table, 0.2):
                if private:
                    table.add(rows(2, 5))
                    assert numbers_of(table) == [1, 2]
                else:
                    with pytest.raises(LockTimeoutError, match="Another process has held the lock"):
                        table.add(rows(2, 5))
                    table.close()  # closes the child's descriptors, not the parent's lock

        forked(work)
        assert private or Child(_try_lock, table.name).result() is False
        done.set()
        thread.join()
        assert numbers_of(table) == [1], "a private table is the child's own copy"
        table.check_valid()
