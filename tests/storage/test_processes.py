"""Several processes on one table: nothing torn, nothing lost, nothing leaked, whoever is killed or stopped and when.

Children come from a fork server that has imported everything, so that one costs some milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import mostly_long
from concurrency_common import Voice, answer
from table_common import (
    COLUMNS,
    Fragile,
    Reading,
    bury,
    forked,
    forks,
    fresh_name,
    in_three_steps,
    mortal,
    named,
    number_of,
    numbers_of,
    rows,
    store,
    unchanged,
)

import gear_loader as gear
from gear_loader.errors import LockTimeoutError, RegionError, StaleIndexError, TableFullError
from gear_loader.storage import shared_memory
from gear_loader.storage.counters import DIRTY
from gear_loader.storage.lock import process_start
from gear_loader.storage.operations import FREE, WRITING
from gear_loader.storage.region import region_path

CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 60.0  # seconds for what takes milliseconds


class Child:
    """`target(pipe, *args)` in another process; what it returns, or its traceback, comes back.

    Args:
        context: how the process comes about.
    """

    started: ClassVar[list[Child]] = []

    def __init__(self, target: Callable[..., Any], *args: Any, context: Any = CONTEXT) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, target, args), daemon=True)
        self.process.start()
        theirs.close()
        self.started.append(self)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> Any:
        """The next thing it says."""
        assert self.pipe.poll(PATIENCE), f"process {self.pid} says nothing"
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            self.process.join(PATIENCE)
            raise EOFError(f"process {self.pid} has ended with code {self.process.exitcode}") from None
        if kind == "failed":
            pytest.fail(f"in process {self.pid}:\n{value}", pytrace=False)
        return value

    def say(self, value: Any = None) -> None:
        self.pipe.send(value)

    def result(self) -> Any:
        value = self.hear()
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0
        return value

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(PATIENCE)
        assert self.process.exitcode == -signal.SIGKILL

    def said(self) -> list[Any]:
        """All that it said before it died."""
        heard = []
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll(0):
                heard.append(self.hear())
        return heard


def _run(pipe: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    answer(pipe, target, args)


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with named() as table:
        yield table
        table.check_valid()


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test() -> Iterator[None]:
    yield
    while Child.started:
        child = Child.started.pop()
        if child.process.is_alive():
            child.process.kill()
            child.process.join(PATIENCE)
        child.pipe.close()


@contextlib.contextmanager
def waiting(table: gear.Table, seconds: float) -> Iterator[None]:
    """Another deadline of the lock, for a while."""
    before = table.region.lock.timeout
    table.region.lock.timeout = seconds
    try:
        yield
    finally:
        table.region.lock.timeout = before


def nothing_leaked(table: gear.Table) -> None:
    """After the dead have been buried, whatever is not live is free."""
    bury(table)
    index = table.index

    def reclaim() -> None:
        index.arrays.counters[DIRTY] = 1
        index.arrays.ops.reclaim(index.arrays.where)
        index.arrays.counters[DIRTY] = 0

    index.recovery.locked(reclaim)
    table.check_valid()
    lengths = table.lengths().tolist()
    block_steps = table.region.layout.block_steps
    assert table.stats().blocks_in_use == gear.Table.required_blocks(lengths, block_steps)
    assert (table.region.array("state") != FREE).sum() == len(lengths)


# Handles ---------------------------------------------------------------------------------------------


def _use_handle(voice: Voice, table: gear.Table) -> list[int]:
    found = numbers_of(table)
    assert table.on_full == "evict_oldest"
    table.add(rows(2, 9))
    table.close()
    return found


@pytest.mark.parametrize("method", mostly_long(["forkserver", "spawn"], "forkserver"))
def test_a_handle_travels_to_another_process(method: str) -> None:
    with named(on_full="evict_oldest") as table:
        table.add(rows(1, 7))
        child = Child(_use_handle, table, context=multiprocessing.get_context(method))
        assert child.result() == [1]
        assert numbers_of(table) == [1, 2]
        table.check_valid()


def _attach(voice: Voice, name: str) -> tuple[str, list[int], list[str]]:
    with gear.Table.attach(name) as table:
        table.add(rows(2, 9))
        return table.on_full, numbers_of(table), list(table.schema)


def test_attach_by_name(table: gear.Table) -> None:
    table.add(rows(1, 7))
    assert Child(_attach, table.name).result() == ("error", [1, 2], list(COLUMNS))
    assert numbers_of(table) == [1, 2]


def _create(voice: Voice, name: str) -> None:
    table = gear.Table.create(COLUMNS, max_steps=50, max_trajectories=4, name=name)
    table.add(rows(1, 20))


def test_a_table_outlives_the_process_that_made_it() -> None:
    name = fresh_name()
    Child(_create, name).result()
    with gear.Table.attach(name) as table:
        assert numbers_of(table) == [1]
        table.unlink()


def _stay(voice: Voice, name: str) -> list[int]:
    with gear.Table.attach(name) as table:
        voice.say("attached")
        voice.hear()
        table.add(rows(2, 5))
        table.check_valid()
        return numbers_of(table)


def test_unlink_while_others_are_attached(table: gear.Table) -> None:
    table.add(rows(1, 5))
    child = Child(_stay, table.name)
    assert child.hear() == "attached"
    table.unlink()
    with named(name=table.name) as another:  # the name is free at once
        child.say()
        assert child.result() == [1, 2]
        assert numbers_of(table) == [1, 2]
        assert numbers_of(another) == []


def _see(voice: Voice, name: str) -> list[Any]:
    with gear.Table.attach(name) as table:
        seen = []
        while (index := voice.hear()) is not None:
            seen.append((len(table), table.num_steps, table.indices().tolist()))
            try:
                voice.say(number_of(table[index]))
            except StaleIndexError as error:
                voice.say(str(error))
        return seen


def test_each_sees_at_once_what_the_others_do(table: gear.Table) -> None:
    child = Child(_see, table.name)
    expected = []
    for number in range(1, 6):
        index = table.add(rows(number, number))
        child.say(index)
        assert child.hear() == number
        expected.append((len(table), table.num_steps, table.indices().tolist()))
    table.remove(0)
    child.say(0)
    assert child.hear().startswith(
        "Index 0 names no live trajectory: it was never used, removed or evicted. The table"
    )
    expected.append((4, 14, [1, 2, 3, 4]))
    child.say(None)
    assert child.result() == expected


# Many at once ----------------------------------------------------------------------------------------


def _add_many(voice: Voice, name: str, on_full: Any, first: int, count: int, longest: int) -> list[int]:
    generator = random.Random(first)
    with gear.Table.attach(name, on_full=on_full) as table:
        voice.hear()
        done: list[int] = []
        while len(done) < count:
            number = first + len(done)
            if generator.random() < 0.3:
                batch = [rows(number + i, generator.randint(1, longest)) for i in range(3)]
                table.extend(batch)
                done += [number, number + 1, number + 2]
            else:
                table.add(rows(number, generator.randint(1, longest)))
                done.append(number)
        return done


def _read_many(voice: Voice, name: str) -> int:
    """Read as a collector does: a ticket, a snapshot, then index and blocks without the lock."""
    generator = random.Random(0)
    read = 0
    with gear.Table.attach(name) as table:
        voice.say("ready")
        while not voice._pipe.poll(0):
            ticket, snapshot = table.reader().begin_snapshot()
            slots = snapshot.slots.tolist()
            readings = []
            for slot in generator.sample(slots, min(3, len(slots))):
                length, start = table.region.array("extent")[slot].tolist()
                assert length == snapshot.lengths[slots.index(slot)]
                readings.append((slot, length, start))
            for slot, length, start in readings:
                number = int(_first_number(table, start))
                Reading(number, length, start).check(table)
                assert table.region.array("generation")[slot] == snapshot.generations[slots.index(slot)]
                read += 1
            ticket.end()
            if slots:
                with contextlib.suppress(StaleIndexError):
                    number_of(table[generator.choice(slots)])
    return read


def _first_number(table: gear.Table, start: int) -> int:
    block = int(table.region.array("block_ids").reshape(-1)[start])
    return int(table.region.column("number")[block, :8].view(np.int64)[0])


@pytest.mark.slow
def test_several_writers_and_readers_at_once() -> None:
    """A small table, so that everything happens all the time: eviction, reuse, moves of the block tables."""
    with named(max_steps=90, max_trajectories=9, block_steps=4, on_full="evict_oldest") as table:
        readers = [Child(_read_many, table.name) for _ in range(2)]
        assert [reader.hear() for reader in readers] == ["ready", "ready"]
        writers = [Child(_add_many, table.name, "evict_oldest", 1000 * i, 400, 20) for i in range(1, 4)]
        for writer in writers:
            writer.say()
        added = [writer.result() for writer in writers]
        for reader in readers:
            reader.say()
        assert all(reader.result() > 20 for reader in readers)
        found = numbers_of(table)
        for done in added:  # of each writer's, the last ones are left, in its order
            mine = [number for number in found if number in set(done)]
            assert mine == done[len(done) - len(mine) :]
        assert table.stats().num_evicted == sum(map(len, added)) - len(found)
        nothing_leaked(table)
        assert not table.region.array("readers")[:, 2].any()


def test_of_what_several_writers_add_nothing_is_lost() -> None:
    with named(max_steps=4000, max_trajectories=400, block_steps=4) as table:
        writers = [Child(_add_many, table.name, "error", 1000 * i, 90, 10) for i in range(4)]
        for writer in writers:
            writer.say()
        added = [writer.result() for writer in writers]
        found = numbers_of(table)
        assert sorted(found) == sorted(number for done in added for number in done)
        for done in added:
            assert [number for number in found if number in set(done)] == done
        nothing_leaked(table)


def _count(voice: Voice, name: str, times: int) -> None:
    with gear.Table.attach(name) as table:
        voice.hear()
        counter = table.region.array("counters")
        for _ in range(times):
            with table.region.lock:
                value = int(counter[63])
                if value % 7 == 0:
                    time.sleep(0)
                counter[63] = value + 1


def test_the_lock_is_exclusive_between_processes_and_threads(table: gear.Table) -> None:
    children = [Child(_count, table.name, 500) for _ in range(3)]
    for child in children:
        child.say()
    counter = table.region.array("counters")

    def count() -> None:
        for _ in range(200):
            with table.region.lock:
                value = int(counter[63])
                time.sleep(0)
                counter[63] = value + 1

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        child.result()
    assert counter[63] == 3 * 500 + 2 * 200


# Killed ----------------------------------------------------------------------------------------------


def _write_until_killed(voice: Voice, name: str, first: int, on_full: Any, loud: bool) -> None:
    """Say before what will be added, and after that it has been; or say nothing."""
    generator = random.Random(first)
    with gear.Table.attach(name, on_full=on_full) as table:
        number = first
        while True:
            count = generator.choice([1, 1, 1, 4])
            numbers = list(range(number, number + count))
            if loud:
                voice.say(("adding", numbers))
            table.extend([rows(each, generator.randint(1, 9)) for each in numbers])
            if loud:
                voice.say(("added", numbers))
            number += count


@pytest.mark.long
@pytest.mark.slow
def test_writers_killed_at_random_points() -> None:
    generator = random.Random(5)
    with named(max_steps=100_000, max_trajectories=20_000, block_steps=4) as table:
        expected: list[int] = []
        for life in range(60):
            child = Child(_write_until_killed, table.name, 1000 * life, "error", True)
            child.hear()
            time.sleep(generator.random() * 0.02)
            child.kill()
            said = child.said()
            table.check_valid()
            added = [number for kind, numbers in said if kind == "added" for number in numbers]
            last = said[-1][1] if said and said[-1][0] == "adding" else []
            new = table.indices()[len(expected) :].tolist()
            found = [number_of(table[index]) for index in new]
            assert found in (
                _first_of(life, added),
                _first_of(life, added) + last,
                _first_of(life, found[:4]),
            )
            expected += found
        assert numbers_of(table) == expected
        nothing_leaked(table)


def _first_of(life: int, added: list[int]) -> list[int]:
    """What was said first has been heard already: the child's numbers run on from there."""
    return list(range(1000 * life, added[-1] + 1)) if added else []


@pytest.mark.parametrize("lives", mostly_long([8, 40], 8))
def test_writers_killed_while_others_go_on(lives: int) -> None:
    """With eviction, so that a death leaves every kind of mutation half done; the others must not notice."""
    generator = random.Random(6)
    with named(max_steps=90, max_trajectories=9, block_steps=4, on_full="evict_oldest") as table:
        reader = Child(_read_many, table.name)
        assert reader.hear() == "ready"
        victims: list[Child] = []
        for life in range(lives):
            victims.append(Child(_write_until_killed, table.name, 10_000 * life, "evict_oldest", False))
            if len(victims) == 3:
                time.sleep(generator.random() * 0.03)
                victims.pop(generator.randrange(3)).kill()
                table.check_valid()
                for index in table.indices().tolist():
                    with contextlib.suppress(StaleIndexError):  # evicted meanwhile
                        number_of(table[index])
        for victim in victims:
            victim.kill()
        reader.say()
        reader.result()
        nothing_leaked(table)
        table.add(rows(1, 90))
        assert numbers_of(table) == [1]


def _die_after(voice: Voice, name: str, stores: int, torn: bool, what: str) -> None:
    """A real death by SIGKILL, in the middle of an operation; see `test_index_model` for every point of each."""
    Fragile.die = staticmethod(lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[assignment]
    table = gear.Table.attach(name, on_full="evict_oldest")
    with mortal(table, stores, torn=torn, disguised=False) as index:
        if what == "extend":
            store(table, index, [50, 51], [9, 3], evict=True)
        else:
            index.remove(np.array([1, 3]))


@pytest.mark.parametrize(("what", "points"), [("extend", 90), ("remove", 40)])
@pytest.mark.parametrize("torn", [False, True])
def test_a_process_killed_between_two_stores(what: str, points: int, torn: bool) -> None:
    with named(max_steps=30, max_trajectories=5, block_steps=3, on_full="evict_oldest") as table:
        dead = 0
        for stores in range(0, points, 8):
            table.remove(table.indices())
            for number, length in [(1, 4), (2, 7), (3, 1), (4, 9), (5, 9)]:
                table.add(rows(number, length))
            indices = table.indices().tolist()
            assert sorted(indices) == [0, 1, 2, 3, 4]
            before = {index: number_of(table[index]) for index in indices}
            child = Child(_die_after, table.name, stores, torn, what)
            child.process.join(PATIENCE)
            dead += child.process.exitcode == -signal.SIGKILL
            with waiting(table, 5):
                nothing_leaked(table)
            found = numbers_of(table)
            if what == "extend":
                assert found in (
                    [1, 2, 3, 4, 5],
                    *([*range(first, 6)] for first in range(2, 6)),
                    [*range(found[0], 6), 50, 51],
                )
            else:
                assert set(before.values()) - {before[1], before[3]} <= set(found) <= set(before.values())
        assert dead > points // 16


def _die_holding(voice: Voice, name: str) -> None:
    table = gear.Table.attach(name)
    with table.region.lock:
        voice.say("held")
        voice.hear()


def test_the_lock_dies_with_its_holder(table: gear.Table) -> None:
    child = Child(_die_holding, table.name)
    child.hear()
    with waiting(table, 0.05), pytest.raises(LockTimeoutError):
        table.add(rows(1, 3))
    child.kill()
    with waiting(table, 5):
        table.add(rows(2, 3))
    assert numbers_of(table) == [2]


def _begin(voice: Voice, name: str, length: int) -> None:
    table = gear.Table.attach(name)
    slots, ids = table.index.begin(np.array([length]), evict=False)
    voice.say((slots.tolist(), ids.tolist()))
    voice.hear()
    table.index.commit(slots, np.ones(1, dtype=np.float32))


@pytest.mark.parametrize("on_full", ["error", "evict_oldest"])
def test_what_a_dead_writer_had_is_taken_back_when_it_is_needed(on_full: Any) -> None:
    with named(max_steps=40, max_trajectories=3, block_steps=4, on_full=on_full) as table:
        children = [Child(_begin, table.name, 13) for _ in range(3)]
        for child in children:
            child.hear()
        with waiting(table, 0.05), pytest.raises(TableFullError if on_full == "error" else LockTimeoutError):
            table.add(rows(1, 40))
        assert (table.region.array("state") == WRITING).sum() == 3
        for child in children:
            child.kill()
        table.add(rows(2, 40))
        assert numbers_of(table) == [2]
        nothing_leaked(table)


def _read_and_wait(voice: Voice, name: str, tickets: int) -> None:
    table = gear.Table.attach(name)
    for _ in range(tickets):
        table.reader().begin_snapshot()
    voice.say("reading")
    voice.hear()


def test_what_a_dead_reader_read_is_free_again(table: gear.Table) -> None:
    table.add(rows(1, 200))
    child = Child(_read_and_wait, table.name, 1)
    child.hear()
    table.remove(0)
    with (
        waiting(table, 0.05),
        unchanged(table),
        pytest.raises(
            LockTimeoutError, match=rf"still being read by the processes \[{child.pid}\] or written by \[\]"
        ),
    ):
        table.add(rows(2, 200))
    child.kill()
    table.add(rows(3, 200))
    assert numbers_of(table) == [3]
    assert not table.region.array("readers")[:, 2].any()


def test_the_places_of_dead_readers_are_given_out_again(table: gear.Table) -> None:
    table.add(rows(1, 5))
    child = Child(_read_and_wait, table.name, 256)
    child.hear()
    with pytest.raises(gear.errors.GearError, match="256 batches are being read at once"):
        table[0]
    child.kill()
    assert number_of(table[0]) == 1


def test_a_process_is_known_by_its_start_too(table: gear.Table) -> None:
    """In a container a restarted process often has the id of its predecessor."""
    pid, start = os.getpid(), process_start(os.getpid())
    assert start > 0
    table.add(rows(1, 100))
    index = table.index
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
    assert process_start(child.pid) > 0
    assert process_start(child.pid) != process_start(os.getpid())
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


# Stopped ---------------------------------------------------------------------------------------------


def test_a_process_stopped_inside_the_lock(table: gear.Table) -> None:
    table.add(rows(1, 5))
    child = Child(_die_holding, table.name)
    child.hear()
    child.signal(signal.SIGSTOP)
    message = (
        rf"^Another process has held the lock of Table '{table.name}' \({region_path(str(table.name))}\) for over 0.05"
        r" s\. It may be stopped; `fuser` on the file names the processes that use it\.$"
    )
    calls: list[Callable[[], Any]] = [
        lambda: table.add(rows(2, 3)),
        lambda: table.extend([rows(2, 3)]),
        lambda: table.remove(0),
        lambda: table[0],
        table.indices,
        lambda: table.reader().begin_snapshot(),
        table.check_valid,
    ]
    with waiting(table, 0.05):
        for call in calls:
            with pytest.raises(LockTimeoutError, match=message):
                call()
        assert (len(table), table.num_steps) == (1, 5), "these take no lock"
    child.signal(signal.SIGCONT)
    child.say()
    child.result()
    assert numbers_of(table) == [1]
    table.add(rows(2, 3))


def test_a_writer_stopped_before_it_has_finished() -> None:
    """It is not dead: what it has is not taken. It goes on, and its trajectory is whole."""
    with named(max_steps=40, max_trajectories=3, block_steps=4, on_full="evict_oldest") as table:
        table.add(rows(1, 10))
        child = Child(_write_and_wait, table.name)
        child.hear()
        child.signal(signal.SIGSTOP)
        assert numbers_of(table) == [1]
        with (
            waiting(table, 0.05),
            pytest.raises(
                LockTimeoutError, match=rf"read by the processes \[\] or written by \[{child.pid}\]. They may"
            ),
        ):
            table.add(rows(2, 20))
        table.add(rows(3, 19))
        assert numbers_of(table) == [3]
        child.signal(signal.SIGCONT)
        child.say()
        child.result()
        assert numbers_of(table) == [3, 9]
        nothing_leaked(table)


def _write_and_wait(voice: Voice, name: str) -> None:
    table = gear.Table.attach(name)
    genuine = table._write

    def write(*args: Any) -> None:
        genuine(*args)
        voice.say("not yet committed")
        voice.hear()

    table._write = write  # type: ignore[method-assign]
    in_three_steps(table)
    table.add(rows(9, 21))


# Creating --------------------------------------------------------------------------------------------


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
    base, rounds = fresh_name(), 5
    children = [Child(_create_race, rounds, base) for _ in range(4)]
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
        others = [outcome[i] for outcome in outcomes if outcome[i] != "made"]
        assert all(
            text.startswith(f"There is already a table named '{base}.{i}'. Use it with") for text in others
        )
        table.unlink()
        table.close()


def _die_creating(voice: Voice, name: str, where: str) -> None:
    setattr(os, where, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
    gear.Table.create(COLUMNS, max_steps=50, max_trajectories=4, name=name)


@pytest.mark.parametrize("where", ["posix_fallocate", "pwrite", "fstat", "link"])
def test_a_process_killed_while_it_creates_leaves_nothing(where: str) -> None:
    before = set(os.listdir(shared_memory.DIRECTORY))
    name = fresh_name()
    child = Child(_die_creating, name, where)
    child.process.join(PATIENCE)
    assert child.process.exitcode == -signal.SIGKILL
    assert not [entry for entry in set(os.listdir(shared_memory.DIRECTORY)) - before if name in entry]
    with named(name=name):
        pass


# Locks and descriptors -------------------------------------------------------------------------------


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
        view = torch.from_numpy(table.region.column("number"))
        table.close()
        table = gear.Table.attach(name)
        with table.region.lock:
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
        assert Child(_try_lock, name).result() is True
    assert not [link for link in _descriptors() if name in link]


def _descriptors() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return found


# Fork ------------------------------------------------------------------------------------------------


@forks
def test_a_forked_child_shares_a_named_table(table: gear.Table) -> None:
    table.add(rows(1, 5))

    def work() -> None:
        table.add(rows(2, 6))
        slots, _ = table.index.begin(np.array([4]), evict=False)
        assert table.index.arrays.owner[slots].tolist() == [[os.getpid(), process_start(os.getpid())]]
        table.reader().begin_snapshot()
        with gear.Table.attach(str(table.name)) as other:
            assert numbers_of(other) == [1, 2]
        table.close()

    forked(work)
    assert numbers_of(table) == [1, 2]
    nothing_leaked(table)
    table.remove(0)
    table.remove(1)
    table.add(rows(3, 200))


@forks
def test_locks_between_parent_and_forked_child(table: gear.Table) -> None:
    def work() -> None:
        with waiting(table, 0.05), pytest.raises(LockTimeoutError, match="Another process has held the lock"):
            table.add(rows(1, 5))
        table.close()  # closes the child's descriptors, not the parent's lock

    with table.region.lock:
        forked(work)
        assert Child(_try_lock, table.name).result() is False


@forks
@pytest.mark.parametrize("private", [True, False])
def test_a_fork_while_another_thread_holds_the_lock(private: bool) -> None:
    """That thread does not exist in the child; nobody there will ever let the lock go."""
    sizes: dict[str, Any] = {"max_steps": 50, "max_trajectories": 5, "block_steps": 4}
    with gear.Table.create(COLUMNS, **sizes) if private else named(**sizes) as table:
        table.add(rows(1, 5))
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with table.region.lock:
                held.set()
                done.wait(PATIENCE)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()

        def work() -> None:
            with waiting(table, 1.0):
                if private:
                    table.add(rows(2, 5))
                    assert numbers_of(table) == [1, 2]
                else:
                    with pytest.raises(LockTimeoutError, match="Another process has held"):
                        table.add(rows(2, 5))

        forked(work)
        done.set()
        thread.join()
        assert numbers_of(table) == [1], "a private table is the child's own copy"
        table.check_valid()


@forks
def test_a_forked_child_that_is_killed_takes_nothing_with_it(table: gear.Table) -> None:
    table.add(rows(1, 5))
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), table.region.lock:
            table.index.arrays.counters[19] = 1  # half way through a mutation
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    with waiting(table, 5):
        table.add(rows(2, 5))
    assert numbers_of(table) == [1, 2]
