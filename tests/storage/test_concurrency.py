"""Many processes at full speed on one table; processes killed anywhere, stopped anywhere: nothing torn, lost or hung.

`GEAR_LOADER_STRESS_SECONDS` says how long the first test runs (the second, a third of it).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from concurrency_common import (
    COLUMNS,
    PATIENCE,
    WAYS,
    Author,
    Child,
    Journal,
    Look,
    Memory,
    Nursery,
    Voice,
    check_batch,
    check_named,
    columns_of,
    drop_the_dead,
    fork,
    look,
    rows,
)
from table_common import Died, bury, fresh_name, mortal

import gear_loader as gear
from gear_loader.errors import (
    LockTimeoutError,
    PriorityError,
    RateLimitError,
    StaleIndexError,
    TableEmptyError,
    TableFullError,
)
from gear_loader.storage import operations
from gear_loader.storage.counters import NUM_EVICTED, NUM_REMOVED
from gear_loader.storage.operations import FREE, READING, WRITING
from gear_loader.utils.waiting import Backoff

SECONDS = float(os.environ.get("GEAR_LOADER_STRESS_SECONDS", "3"))
pytestmark = [
    pytest.mark.skipif(operations.COMPILED is None, reason="numba cannot be imported"),
    pytest.mark.timeout(600 + 3 * SECONDS),
]


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("test_concurrency")
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test(nursery: Nursery) -> Iterator[None]:
    yield
    nursery.clear()


@contextlib.contextmanager
def named(**options: Any) -> Iterator[gear.Table]:
    settings: dict[str, Any] = {
        "max_steps": 2000,
        "max_trajectories": 120,
        "block_steps": 4,
        "name": fresh_name(),
        "timeout": PATIENCE,
    }
    with gear.Table.create(COLUMNS, **{**settings, **options}) as table:
        try:
            yield table
        finally:
            table.unlink()


@contextlib.contextmanager
def waiting(table: gear.Table, seconds: float) -> Iterator[None]:
    """Other deadlines, of the lock and of room, for a while; and nothing takes much longer than them."""
    live = table.index
    before = table.region.lock.timeout, live.admission.timeout
    table.region.lock.timeout = live.admission.timeout = seconds
    try:
        yield
    finally:
        table.region.lock.timeout, live.admission.timeout = before


def attach(name: str, **options: Any) -> gear.Table:
    """In a child: attached, and with deadlines that a busy machine does not miss."""
    table = gear.Table.attach(name, timeout=PATIENCE, **options)
    table.region.lock.timeout = PATIENCE
    assert table.index.arrays.operations is operations.COMPILED
    return table


def nothing_is_left(table: gear.Table) -> None:
    """Once everything has been removed, everything is free."""
    drop_the_dead(table)
    table.check_valid()
    table.remove(table.indices())
    drop_the_dead(table)
    table.check_valid()
    assert table.stats().blocks_in_use == 0
    assert (table.region.array("state") == FREE).all()
    assert not table.region.array("readers")[:, READING].any()


def watch(children: list[Child], seconds: float, meanwhile: Callable[[], object]) -> None:
    """Let children work for a while; whoever fails is heard at once."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for child in children:
            if child.has_spoken:
                child.result()
                pytest.fail("a child has ended before its time")
        meanwhile()
        time.sleep(0.1)


# Full speed ------------------------------------------------------------------------------------------


def _write(
    voice: Voice, name: str, seed: int, on_full: Any, threads: int = 1
) -> list[tuple[int, int, dict[str, int]]]:
    """Write until called: trajectories added and removed by each thread, and what each has done."""
    with attach(name, on_full=on_full) as table:
        authors = [Author(table, seed + 50 * i, (seed + 50 * i) * 10**9) for i in range(threads)]
        called = threading.Event()

        def write(author: Author) -> None:
            while not called.is_set():
                for _ in range(8):
                    author.act()
                if author is authors[0] and (voice.is_called or dead()):
                    called.set()

        def dead() -> bool:
            return any(future.done() for future in futures)

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(write, author) for author in authors[1:]]
            write(authors[0])
            for future in futures:
                future.result()
        return [(author.committed, author.removed, author.actions) for author in authors]


_WIDE = gear.Window(6, offset=-2)
_OWN = dict.fromkeys(("number", "step", "length", "cut"), gear.Window(3, offset=-1))
_VARIOUS = {
    **_OWN,
    "value": gear.Window(9, offset=-6, pad="head"),
    "half": gear.Window(5, offset=2, pad="tail"),
    "tag": gear.Window(1),
    "check": gear.Window(12, offset=-4),
}
_TAIL = dict.fromkeys(COLUMNS, gear.Window(8, offset=-5, pad="tail"))
_READINGS: list[dict[str, Any]] = [
    {"selector": gear.Uniform(), "windows": _WIDE, "prefetch": 0},
    {"selector": gear.Prioritized(), "windows": _VARIOUS, "prefetch": 2},
    {"selector": gear.Uniform(replacement=False), "windows": _VARIOUS, "prefetch": 2, "keep": 3},
    {"selector": gear.Prioritized(unit="step", replacement=False), "windows": _TAIL, "prefetch": 2},
    {"selector": gear.Uniform(unit="step"), "windows": _WIDE, "prefetch": 2, "sample_info": True},
    {"selector": gear.Prioritized(eps=0.1), "windows": _WIDE, "prefetch": 0, "sample_info": True, "keep": 1},
    {"selector": gear.Fifo(), "windows": _WIDE, "prefetch": 2, "anchor": "last"},
    {"selector": gear.TopK(), "windows": _TAIL, "prefetch": 0},
    {"selector": gear.Lifo(unit="step"), "windows": _VARIOUS, "prefetch": 0},
    {"selector": gear.Uniform(), "windows": _TAIL, "prefetch": 2, "copy": True, "anchor": "first"},
]


def _clone(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: _clone(part) if isinstance(part, dict) else part.clone() for key, part in batch.items()}


def _unchanged(batch: dict[str, Any], before: dict[str, Any]) -> None:
    for key, part in batch.items():
        if isinstance(part, dict):
            _unchanged(part, before[key])
        else:
            same = torch.equal(part, before[key])
            assert same, f"{key!r} of a batch has changed before its time"


def _read_batches(voice: Voice, name: str, seed: int) -> dict[str, int]:
    """Every kind of selector in turn; all rows of all batches are checked."""
    seen = collections.Counter[str]()
    with attach(name) as table:
        memory = Memory(table.region.layout.max_trajectories)
        turn = 0
        while not voice.is_called:
            reading = dict(_READINGS[turn % len(_READINGS)])
            dataset = gear.ReplayDataset(
                table, batch_size=32, seed=seed + turn, batches_per_epoch=math.inf, device="cpu", **reading
            )
            try:
                _read_some(voice, table, dataset, memory, seen, one_by_one=turn // len(_READINGS) % 3 == 2)
            except (TableEmptyError, PriorityError):  # everything may go at once, or nearly
                seen["empty"] += 1
            turn += 1
    return dict(seen)


def _read_some(
    voice: Voice,
    table: gear.Table,
    dataset: gear.ReplayDataset,
    memory: Memory,
    seen: collections.Counter[str],
    *,
    one_by_one: bool,
) -> None:
    held: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=dataset.keep)
    generator = random.Random(dataset.seed)
    by_priority = isinstance(dataset.selector, gear.Prioritized)
    end = time.monotonic() + 0.6
    iterator: Any = None if one_by_one else iter(dataset)
    while time.monotonic() < end and not voice.is_called:
        batch = dataset.sample() if iterator is None else next(iterator)
        numbers, firsts = check_batch(batch, dataset.windows)
        index, generation = batch["index"].numpy(), batch["generation"].numpy()
        memory.check(index, generation, numbers, firsts)
        seen["named"] += check_named(table, batch, numbers)
        seen["rows"] += len(index)
        seen[type(dataset.selector).__name__] += 1
        held.append((batch, _clone(batch)))
        if generator.random() < 0.2:
            time.sleep(generator.random() * 0.003)  # what was prefetched becomes old
        for each, before in held:
            _unchanged(each, before)
        if dataset.sample_info:
            info = batch["sample_info"]
            assert (info["times_sampled"] >= 0).all()
            assert (info["age"] >= 0).all()
            assert (info["age_seconds"] >= 0).all()
            assert (info["probability"] > 0).all()
        if by_priority and generator.random() < 0.7:
            old = held[0][1]  # also one that has gone meanwhile
            if generator.random() < 0.5:
                dataset.update_priority(old, torch.rand(len(old["index"])) + 0.01)
            else:
                anchors = {"anchor": old["anchor"][:9]} if dataset.selector.unit == "step" else {}
                dataset.update_priority(
                    old["index"][:9], torch.rand(9) + 0.01, generation=old["generation"][:9], **anchors
                )
            seen["updates"] += 1
    if iterator is not None:
        iterator.close()


def _read_directly(voice: Voice, name: str, seed: int) -> dict[str, int]:
    """Single trajectories; everything at a moment; and now and then a reading that takes long. Each at least once."""
    seen = collections.Counter[str]()
    generator = random.Random(seed)
    with attach(name) as table:
        memory = Memory(table.region.layout.max_trajectories)
        next_long = time.monotonic() + 1.0
        while not (voice.is_called and seen["long"] and seen["single"]):
            now = Look(table)
            memory.check(now.slots, now.generations, now.numbers, now.firsts)
            seen["looks"] += 1
            seen["trajectories"] += len(now.slots)
            if time.monotonic() > next_long:
                for _ in range(5):
                    time.sleep(0.3)
                    now.check_again()
                seen["long"] += 1
                next_long = time.monotonic() + 6.0
            now.close()
            for slot in generator.sample(now.slots.tolist(), min(10, len(now.slots))):
                try:
                    _check_one(table[slot])
                    seen["single"] += 1
                except StaleIndexError:
                    seen["stale"] += 1
    return dict(seen)


def _check_one(trajectory: dict[str, torch.Tensor]) -> None:
    found = {name: values.numpy() for name, values in trajectory.items()}
    number, first, length = (int(found[name][0]) for name in ("number", "step", "length"))
    chunk, overlap = found["cut"][0].tolist()
    last = length if chunk == 0 else min(first + chunk, length)
    assert first % (chunk - overlap if chunk else length + 1) == 0
    expected = columns_of(number, np.arange(first, last), length, chunk, overlap)
    for name, right in expected.items():
        assert found[name].dtype == right.dtype
        assert found[name].shape == right.shape, f"column {name!r} has another length"
        assert (found[name] == right).all(), f"column {name!r} is torn"


@pytest.mark.slow
def test_writers_and_readers_at_full_speed() -> None:
    _at_full_speed(SECONDS, max_steps=2000)


@pytest.mark.slow
def test_full_speed_where_blocks_are_short_and_everything_grows_old() -> None:
    _at_full_speed(
        SECONDS / 3, max_steps=20_000, max_blocks=400, block_steps=2, max_trajectories=400, max_age=0.6
    )


def _at_full_speed(seconds: float, **options: Any) -> None:
    with named(on_full="evict_lowest_priority", **options) as table:
        first = Author(table, 99, 99 * 10**9)
        while table.stats().num_evicted < 100:
            first.act()
        readers = [Child(_read_batches, table.name, 1), Child(_read_directly, table.name, 2)]
        policies = ("evict_oldest", "evict_lowest_priority")
        writers = [Child(_write, table.name, seed, policies[seed % 2], 1 + seed // 8) for seed in range(1, 9)]

        def meanwhile() -> None:
            table.check_valid()
            look(table)

        watch(readers + writers, seconds, meanwhile)
        deadline = time.monotonic() + PATIENCE
        while table.stats().num_inserted < 1000:  # a busy machine
            assert time.monotonic() < deadline
            watch(readers + writers, 0.5, meanwhile)
        for child in readers:
            child.say()
        batches, direct = (child.result() for child in readers)
        for child in writers:
            child.say()
        results = [each for child in writers for each in child.result()]
        stats = table.stats()
        print({"inserted": stats.num_inserted, "expired": stats.num_expired, **batches, **direct})
        committed = first.committed + sum(committed for committed, _, _ in results)
        removed = first.removed + sum(removed for _, removed, _ in results)
        counters = table.region.array("counters")
        assert stats.num_inserted == committed
        assert counters[NUM_REMOVED] == removed
        assert counters[NUM_EVICTED] == committed - removed - stats.num_expired - stats.num_trajectories
        assert (stats.num_expired > 0) == (table.rules.max_age is not None)
        assert {way for _, _, actions in results for way, count in actions.items() if count} >= set(WAYS)
        if table.rules.max_age is None:  # else a busy machine sees them too late
            assert batches["named"] > batches["rows"] / 50, "what is checked is hardly ever still there"
            assert "empty" not in batches
        assert direct["long"] > 0
        assert direct["single"] > 0
        look(table)
        nothing_is_left(table)


# Killed while they write -----------------------------------------------------------------------------

_NUMBERS = 10**5  # numbers that one life may use


def _live(table: gear.Table, journal: Journal, kind: int, seed: int, first: int) -> None:
    """Write until killed: in every way (kind 0), or so that the index is half changed for much of the time."""
    author = Author(table, seed, first, journal=journal, longest=40 if kind == 0 else 6)
    index = table.index
    count = min(600, table.region.layout.max_trajectories // 4)
    ones = np.ones(count, dtype=np.int64)
    bulk = columns_of(first + np.arange(count)[:, None], np.zeros((1, 1)), 1, 0, 0)
    author.next += count
    while True:
        if journal.is_full or author.next > first + _NUMBERS - 1000:
            time.sleep(PATIENCE)
        if kind == 0:
            author.act()
        elif kind == 1:
            _add_and_remove(table, journal, bulk, ones, first)
        elif kind == 2:
            slots, _ = index.begin(ones)
            index.abort(slots)
        else:
            author.two()
            author.remove()
        journal.head[6] += 1


def _add_and_remove(
    table: gear.Table, journal: Journal, bulk: dict[str, np.ndarray], ones: np.ndarray, first: int
) -> None:
    """Many at once, the same again and again: nothing but changes of the index."""
    journal.extending(first, len(ones))
    slots = table.extend(bulk, lengths=ones)
    names = [(first + i, 0) for i in range(len(ones))]
    journal.done[: len(ones)] = names
    journal.head[0] = len(ones)
    journal.going[: len(ones)] = names
    journal.head[1] = len(ones)
    table.remove(slots)
    journal.clear()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def _until_at_work(journal: Journal, pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not journal.head[6]:
        assert time.monotonic() < deadline, "it does not begin"
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended by itself"
        time.sleep(2e-4)


def _kill_writers(voice: Voice, name: str, seed: int, lives: int) -> list[tuple[int, int]]:
    """Fork writers and kill them, and compare what they reported with what is there.

    Returns:
        What has been left in the table on purpose.
    """
    generator = random.Random(seed)
    left: list[tuple[int, int]] = []
    journal = Journal()
    with attach(name) as table:
        for life in range(lives):
            journal.clear()
            low = (seed * 1000 + life) * _NUMBERS
            pid = fork(lambda life=life, low=low: _live(table, journal, life % 4, life, low))
            _until_at_work(journal, pid)
            time.sleep(generator.random() * 0.006)
            _kill(pid)
            table.check_valid()
            seen = look(table)
            mine = journal.check(seen.names(), low, low + _NUMBERS)
            keep = set(sorted(mine)[-2:]) if life % 2 else set()
            left += sorted(keep)
            names = zip(seen.numbers.tolist(), seen.firsts.tolist(), strict=True)
            away = [name in mine and name not in keep for name in names]
            table.remove(seen.slots[away])
    return left


@pytest.mark.parametrize("lives", mostly_long([15, 150], 15))
def test_what_killed_writers_had_committed_is_there(nursery: Nursery, lives: int) -> None:
    """Nothing may go (on_full="error"), and of what was reported nothing has gone."""
    before = nursery.rebuilds()
    with named(max_steps=200_000, max_trajectories=20_000) as table:
        killers = [Child(_kill_writers, table.name, seed, lives) for seed in (1, 2)]
        left = {tuple(name) for killer in killers for name in killer.result(4 * PATIENCE)}
        inside = nursery.rebuilds() - before
        assert len(left) > lives / 3
        assert look(table).names() == left
        assert inside > 20 or lives < 150, "hardly any death left the index half changed"
        nothing_is_left(table)
        table.add(rows(1, 200_000))
        nothing_is_left(table)


def _kill_where_it_evicts(voice: Voice, name: str, seed: int, lives: int) -> None:
    """As `_kill_writers`, where everything goes sooner or later."""
    generator = random.Random(seed)
    journal = Journal()
    with attach(name) as table:
        for life in range(lives):
            journal.clear()
            low = (seed * 1000 + life) * _NUMBERS
            policy = generator.choice(("evict_oldest", "evict_lowest_priority"))
            pid = fork(lambda life=life, low=low, policy=policy: _evict(table, journal, policy, life, low))
            _until_at_work(journal, pid)
            time.sleep(generator.random() * 0.004)
            _kill(pid)
            table.check_valid()
            look(table)


def _evict(table: gear.Table, journal: Journal, on_full: Any, seed: int, first: int) -> None:
    table.on_full = on_full
    author = Author(table, seed, first)
    count = 400
    ones = np.ones(count, dtype=np.int64)
    index = table.index
    evict, _ = table.policy
    while True:
        if seed % 4 == 0:
            author.act()
        elif seed % 4 == 1:
            numbers = author._take(count) + np.arange(count)[:, None]
            table.extend(columns_of(numbers, np.zeros((1, 1)), 1, 0, 0), lengths=ones)
            table.add(rows(author._take(), 1200))
        else:
            slots, _ = index.begin(ones, evict=evict)
            index.abort(slots)
            if author.random.random() < 0.2:
                author.add()
        journal.head[6] += 1


@pytest.mark.long
@pytest.mark.slow
def test_writers_are_killed_while_others_go_on(nursery: Nursery) -> None:
    """With eviction every kind of change is left half done; those who are left must not notice."""
    before = nursery.rebuilds()
    with named(on_full="evict_lowest_priority", max_steps=1500, max_trajectories=600) as table:
        Author(table, 98, 98 * 10**9).add()
        reader = Child(_read_batches, table.name, 3)
        writer = Child(_write, table.name, 97, "evict_oldest")
        killers = [Child(_kill_where_it_evicts, table.name, seed, 100) for seed in (1, 2)]
        for killer in killers:
            killer.result(4 * PATIENCE)
        inside = nursery.rebuilds() - before
        print({"kills": 200, "inside": inside})
        for child in (reader, writer):
            child.say()
            child.result()
        assert inside > 8, "hardly any death left the index half changed"
        nothing_is_left(table)
        table.add(rows(1, 1500))
        look(table)
        nothing_is_left(table)


# Killed while they read ------------------------------------------------------------------------------


def _read_until_killed(table: gear.Table, journal: Journal, seed: int) -> None:
    kind = seed % 3
    if kind == 2:
        while True:
            for _ in range(40):
                Look(table)  # and never over
                journal.head[6] += 1
            drop_own_tickets(table)
    dataset = gear.ReplayDataset(
        table,
        batch_size=64,
        windows=_WIDE,
        seed=seed,
        prefetch=2 * kind,
        batches_per_epoch=math.inf,
        selector=gear.Prioritized() if seed % 2 else gear.Uniform(),
        device="cpu",
    )
    for batch in dataset:
        check_batch(batch, dataset.windows)
        if seed % 2:
            dataset.update_priority(batch, torch.rand(64) + 0.01)
        journal.head[6] += 1


def drop_own_tickets(table: gear.Table) -> None:
    readers = table.region.array("readers")
    readers[readers[:, 0] == os.getpid(), READING] = 0


def _kill_readers(voice: Voice, name: str, lives: int) -> int:
    """Returns how many died with tickets in their hands."""
    generator = random.Random(5)
    journal = Journal(512)
    readers = 0
    with attach(name) as table:
        for life in range(lives):
            journal.clear()
            pid = fork(lambda life=life: _read_until_killed(table, journal, life))
            _until_at_work(journal, pid)
            time.sleep(generator.random() * 0.01)
            _kill(pid)
            tickets = table.region.array("readers")
            readers += bool(((tickets[:, 0] == pid) & (tickets[:, READING] > 0)).any())
            # All of the room is needed, so that nothing may be withheld by the dead.
            table.add(rows(life, table.longest))
            look(table)
            tickets = table.region.array("readers")
            assert not ((tickets[:, 0] == pid) & (tickets[:, READING] > 0)).any()
            author = Author(table, life, 1000 + life * _NUMBERS)
            for _ in range(15):
                author.act()
    return readers


@pytest.mark.long
@pytest.mark.slow
def test_what_killed_readers_read_is_room_again() -> None:
    with named(on_full="evict_lowest_priority", max_steps=800, max_blocks=200, max_trajectories=60) as table:
        Author(table, 98, 98 * 10**9).add()
        killer = Child(_kill_readers, table.name, 60)
        died_reading = killer.result(2 * PATIENCE)
        print({"kills": 60, "reading": died_reading})
        assert died_reading > 15
        table.check_valid()
        nothing_is_left(table)


def _hold_a_ticket(voice: Voice, name: str) -> None:
    with attach(name) as table:
        seen = Look(table)
        voice.say()
        voice.hear()
        seen.check_again()
        seen.close()


def _add(voice: Voice, name: str, number: int, length: int) -> float:
    with attach(name) as table:
        voice.say()
        table.add(rows(number, length))
        return table.stats().insert_wait


def _add_that_waits(voice: Voice, name: str, number: int, length: int) -> float:
    """`_add`, which speaks when it has begun to wait, for room or for the rate limiter, not before."""
    with attach(name) as table:
        sleep, waits = Backoff.sleep, iter([True])

        def said(patience: Backoff) -> bool:
            if next(waits, False):
                voice.say()
            return sleep(patience)

        Backoff.sleep = said  # type: ignore[method-assign]
        try:
            table.add(rows(number, length))
        finally:
            Backoff.sleep = sleep  # type: ignore[method-assign]
        return table.stats().insert_wait


def test_who_waits_for_a_reader_goes_on_when_it_is_killed() -> None:
    with named(on_full="evict_oldest", max_steps=300, max_blocks=75) as table:
        table.add(rows(1, 200))
        reader = Child(_hold_a_ticket, table.name)
        reader.hear()
        writer = Child(_add_that_waits, table.name, 2, 300)
        writer.hear()
        time.sleep(0.3)
        assert not writer.has_spoken, "it had no room"
        assert table.region.array("readers")[:, READING].any()
        reader.kill()
        assert writer.result() > 0.1
        assert look(table).names() == {(2, 0)}
        nothing_is_left(table)


# Stopped ---------------------------------------------------------------------------------------------


def _refused(table: gear.Table, pattern: str, calls: list[Callable[[], Any]]) -> None:
    """Each call is given up, in time, with an error that says so."""
    for call in calls:
        began = time.monotonic()
        with waiting(table, 0.2), pytest.raises(LockTimeoutError, match=pattern):
            call()
        assert time.monotonic() - began < PATIENCE / 4


def _change_all_the_time(voice: Voice, name: str) -> None:
    with attach(name) as table:
        index = table.index
        many = np.ones(100, dtype=np.int64)
        voice.say()
        while not voice.is_called:
            for _ in range(20):
                index.abort(index.begin(many)[0])


def _is_locked(table: gear.Table) -> bool:
    with waiting(table, 0.05):
        try:
            with table.region.lock:
                return False
        except LockTimeoutError:
            return True


def test_a_process_stopped_at_work_in_the_lock() -> None:
    with named() as table:
        table.add(rows(1, 30))
        dataset = gear.ReplayDataset(table, batch_size=4, windows=_WIDE, device="cpu")
        worker = Child(_change_all_the_time, table.name)
        worker.hear()
        generator = random.Random(0)
        deadline = time.monotonic() + PATIENCE
        while True:
            time.sleep(generator.random() * 0.003)
            worker.stop()
            if _is_locked(table):
                break
            worker.go_on()
            assert time.monotonic() < deadline, "it is never stopped in the lock"
        others = [Child(_add, table.name, number, 10) for number in (2, 3)]
        for other in others:
            other.hear()
        _refused(
            table,
            rf"Another process has held the lock of Table '{table.name}' .* for over 0\.2 s\. It may be stopped",
            [
                lambda: table.add(rows(9, 3)),
                lambda: table.extend([rows(9, 3)]),
                lambda: table.remove(0),
                lambda: table[0],
                table.indices,
                lambda: table.reader().begin_snapshot(),
                table.check_valid,
                dataset.sample,
                lambda: table.writer().append(rows(9, 3)),
            ],
        )
        worker.go_on()
        for other in others:
            other.result()
        worker.say()
        worker.result()
        assert look(table).names() == {(1, 0), (2, 0), (3, 0)}
        nothing_is_left(table)


def _write_slowly(voice: Voice, name: str, shares: bool) -> None:
    with attach(name) as table:
        cut = (24, 20) if shares else (0, 0)
        options = {"chunk_steps": cut[0], "overlap_steps": cut[1]} if shares else {}
        with table.writer(**options) as writer:
            writer.append(rows(7, 60, last=30, cut=cut))
            voice.say()
            voice.hear()
            writer.append(rows(7, 60, first=30, cut=cut))


@pytest.mark.parametrize("shares", [False, True])
def test_a_writer_stopped_before_it_has_committed(shares: bool) -> None:
    """It is not dead: what it has is not taken, and what needs it is given up in time."""
    with named(on_full="evict_oldest", max_steps=300, max_trajectories=40) as table:
        table.add(rows(1, 50))
        writer = Child(_write_slowly, table.name, shares)
        writer.hear()
        writer.stop()
        _refused(table, rf"written by \[{writer.pid}\]", [lambda: table.add(rows(2, 290))])
        author = Author(table, 1, 1000)
        for _ in range(200):
            author.act()
        assert (table.region.array("state") == WRITING).sum() == 1
        waits = Child(_add, table.name, 3, 290)
        waits.hear()
        writer.go_on()
        writer.say()
        writer.result()
        waits.result()
        assert look(table).names() >= {(3, 0)}
        nothing_is_left(table)


def test_a_reader_stopped_with_a_ticket() -> None:
    with named(on_full="evict_oldest", max_steps=300, max_blocks=75) as table:
        table.add(rows(1, 200))
        reader = Child(_hold_a_ticket, table.name)
        reader.hear()
        reader.stop()
        writer = table.writer()
        writer.append(rows(3, 80))
        _refused(
            table,
            rf"still being read by the processes \[{reader.pid}\]",
            [
                lambda: table.add(rows(2, 200)),
                lambda: table.extend([rows(2, 100), rows(3, 100)]),
                lambda: writer.append(rows(3, 210)),
            ],
        )
        waits = Child(_add, table.name, 4, 220)
        waits.hear()
        reader.go_on()
        reader.say()
        reader.result()
        waits.result()
        writer.commit()
        assert look(table).names() == {(4, 0), (3, 0)}
        nothing_is_left(table)


# Waiting for each other ------------------------------------------------------------------------------

_WHOLE = gear.Window(12)
"""With the first step as anchor: all of the trajectories here."""


def _feed(voice: Voice, name: str, seed: int, count: int, ways: tuple[str, ...]) -> None:
    """Add numbers seed * 1000, ..., each when it is allowed."""
    generator = random.Random(seed)
    with attach(name) as table:
        number, end = seed * 1000, seed * 1000 + count
        with table.writer() as writer:
            while number < end:
                way, length = generator.choice(ways), generator.randint(1, _WHOLE.length)
                if way == "add":
                    table.add(rows(number, length))
                elif way == "extend" and number + 2 <= end:
                    table.extend([rows(number, length), rows(number + 1, 3)])
                    number += 1
                else:
                    writer.append(rows(number, length))
                    writer.commit()
                number += 1


def _feed_stream(voice: Voice, name: str, seed: int, chunks: int) -> None:
    """Add a stream of so many chunks that share blocks."""
    cut, length = (8, 4), 4 + 4 * chunks
    with attach(name) as table, table.writer(chunk_steps=8, overlap_steps=4) as writer:
        for first in range(0, length, 3):
            last = min(first + 3, length)
            writer.append(rows(seed * 1000, length, first=first, last=last, cut=cut))


def _draw(voice: Voice, name: str, count: int | None, options: dict[str, Any]) -> list[tuple[int, int]]:
    """Draw `count` batches, or until called; the numbers of all rows, and where their trajectories begin."""
    drawn: list[tuple[int, int]] = []
    timeout = PATIENCE if count is not None else 0.5
    with gear.Table.attach(name, timeout=timeout) as table:
        dataset = gear.ReplayDataset(
            table, windows=_WHOLE, anchor="first", batches_per_epoch=math.inf, device="cpu", **options
        )
        voice.say()
        batches = 0
        while count is None or batches < count:
            iterator: Any = iter(dataset)
            try:
                for batch in iterator:
                    drawn += zip(
                        *(part.tolist() for part in check_batch(batch, dataset.windows)), strict=True
                    )
                    batches += 1
                    if batches == count:
                        break
            except RateLimitError:
                assert count is None
                if voice.is_called:
                    break
            iterator.close()
    return drawn


def _counts(table: gear.Table) -> tuple[int, int]:
    """Trajectories added, and rows drawn, at one moment."""

    def look() -> tuple[int, int]:
        counters = table.region.array("counters")
        added = int(counters[operations.NEXT_SEQUENCE] - counters[operations.FIRST_SEQUENCE])
        return added, int(counters[operations.NUM_SAMPLED])

    return table.index.recovery.locked(look)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_ratio_of_samples_to_inserts_is_kept(prefetch: int) -> None:
    """It is kept at every moment, and nobody waits for ever."""
    limiter = gear.SampleToInsertRatio(ratio=4, min_size=10, error_buffer=16)
    with named(on_full="evict_oldest", max_trajectories=40, rate_limiter=limiter) as table:
        options = {"batch_size": 8, "prefetch": prefetch, "seed": 3}
        reader = Child(_draw, table.name, 145, options)  # 300 * 4 rows less 40, to within the buffer
        reader.hear()
        time.sleep(0.3)  # it waits
        writers = [Child(_feed, table.name, seed, 150, ("add", "extend", "writer")) for seed in (1, 2)]
        deadline = time.monotonic() + PATIENCE
        moments = 0
        while not reader.has_spoken or not all(writer.has_spoken for writer in writers):
            assert time.monotonic() < deadline
            added, drawn = _counts(table)
            assert 4 * added - drawn <= 56
            assert drawn == 0 or 4 * added - drawn >= 24
            moments += 1
            time.sleep(1e-3)
        assert moments > 0
        assert len(reader.result()) == 145 * 8
        for writer in writers:
            writer.result()
        stats = table.stats()
        assert stats.num_inserted == 300
        assert 145 * 8 <= stats.num_sampled <= (145 + prefetch) * 8
        assert stats.sample_wait > 0
        nothing_is_left(table)


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_queue_gives_each_trajectory_out_once(readers: int, prefetch: int) -> None:
    with named(rate_limiter=gear.Queue(8), max_times_sampled=1, max_trajectories=20) as table:
        options = {"batch_size": 4, "prefetch": prefetch, "selector": gear.Fifo()}
        writers = [Child(_feed, table.name, seed, 120, ("add", "extend", "writer")) for seed in (1, 2)]
        writers.append(Child(_feed_stream, table.name, 3, 40))
        deadline = time.monotonic() + PATIENCE
        while len(table) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)  # they wait
        consumers = [Child(_draw, table.name, None, options) for _ in range(readers)]
        for consumer in consumers:
            consumer.hear()
        for writer in writers:
            writer.result()
        deadline = time.monotonic() + PATIENCE
        while _counts(table)[1] < 280:
            assert time.monotonic() < deadline
            assert not any(consumer.has_spoken for consumer in consumers), consumers[0].hear()
            time.sleep(0.01)
        for consumer in consumers:
            consumer.say()
        drawn = [consumer.result() for consumer in consumers]
        for names in drawn:
            for seed in (1, 2, 3):
                own = [name for name in names if name[0] // 1000 == seed]
                assert own == sorted(own), "drawn in another order than added"
        expected = {(number, 0) for number in (*range(1000, 1120), *range(2000, 2120))}
        expected |= {(3000, 4 * chunk) for chunk in range(40)}
        assert sum(map(len, drawn)) == 280
        assert set().union(*drawn) == expected
        stats = table.stats()
        assert (stats.num_inserted, stats.num_sampled, stats.num_expired) == (280, 280, 280)
        assert stats.insert_wait > 0
        assert len(table) == 0
        nothing_is_left(table)


def _consume_until_killed(table: gear.Table, journal: Journal, seed: int) -> None:
    dataset = gear.ReplayDataset(
        table,
        batch_size=4,
        windows=_WHOLE,
        anchor="first",
        selector=gear.Fifo() if seed % 2 else gear.Uniform(),
        prefetch=seed % 4,
        batches_per_epoch=math.inf,
        device="cpu",
        seed=seed,
    )
    for batch in dataset:
        numbers, _ = check_batch(batch, dataset.windows)
        for number in numbers.tolist():
            journal.committed(number, 0)
        journal.head[6] += 1


def _kill_consumers(voice: Voice, name: str, lives: int) -> tuple[int, int]:
    """Readers that use up what they draw are killed; what they have drawn is drawn by nobody else.

    Returns:
        How many trajectories were drawn; how many had been added.
    """
    generator = random.Random(4)
    journal = Journal()
    drawn: set[int] = set()
    added = 0
    with attach(name) as table:
        for life in range(lives):
            while len(table) < 250:
                table.extend([rows(added + i, generator.randint(1, 12)) for i in range(50)])
                added += 50
            journal.clear()
            pid = fork(lambda life=life: _consume_until_killed(table, journal, life))
            _until_at_work(journal, pid)
            time.sleep(generator.random() * 0.004)
            _kill(pid)
            table.check_valid()
            numbers = journal.done[: journal.head[0], 0].tolist()
            left = set(look(table).numbers.tolist())
            assert len(set(numbers)) == len(numbers)
            assert not drawn & set(numbers), "drawn twice"
            assert not left & set(numbers), "drawn, and still there"
            drawn |= set(numbers)
            lost = added - len(drawn) - len(left)
            assert 0 <= lost <= 4 * 6 * (life + 1), "more has gone than was drawn ahead"
    return len(drawn), added


@pytest.mark.slow
def test_consumers_are_killed() -> None:
    with named(max_times_sampled=1, max_steps=10_000, max_trajectories=1000) as table:
        killer = Child(_kill_consumers, table.name, 60)
        drawn, added = killer.result(2 * PATIENCE)
        assert drawn > 60 * 4
        stats = table.stats()
        assert stats.num_expired == added - len(table)
        nothing_is_left(table)


def test_who_waits_for_a_least_size() -> None:
    with named(rate_limiter=gear.MinSize(5)) as table:
        reader = Child(_draw, table.name, 1, {"batch_size": 2, "prefetch": 0})
        reader.hear()
        Child(_feed, table.name, 1, 4, ("add",)).result()
        time.sleep(0.2)
        assert not reader.has_spoken
        dataset = gear.ReplayDataset(table, batch_size=2, windows=_WHOLE, device="cpu")
        message = (
            r"^Waited 0\.2 s in vain\. MinSize\(min_size=5\) did not let 2 rows be sampled: it waits for 1 more "
            r"trajectory to be added.*Counts: size 4 "
        )
        with waiting(table, 0.2), pytest.raises(RateLimitError, match=message):
            dataset.sample()
        Child(_feed, table.name, 2, 1, ("writer",)).result()
        assert len(reader.result()) == 2
        assert table.stats().sample_wait > 0.1


@pytest.mark.parametrize(
    ("limiter", "room"),
    [(gear.Queue(3), 3), (gear.SampleToInsertRatio(ratio=2, min_size=2, error_buffer=4), 4)],
)
def test_a_rate_limiter_that_nobody_serves(limiter: Any, room: int) -> None:
    """The error names it, and nothing has changed; when it is served, those who wait go on."""
    name = type(limiter).__name__
    with named(rate_limiter=limiter) as table:
        for number in range(room):
            table.add(rows(number, 5))
        writer = table.writer()
        writer.append(rows(50, 6))
        before = look(table).names()
        pattern = rf"Waited 0\.2 s in vain\. {name}\(.* did not let 1 trajectory be added"
        with waiting(table, 0.2):
            for call in (lambda: table.add(rows(60, 3)), lambda: table.extend([rows(60, 3)]), writer.commit):
                with pytest.raises(RateLimitError, match=pattern):
                    call()
        assert look(table).names() == before
        waits = Child(_add_that_waits, table.name, 70, 4)
        waits.hear()
        time.sleep(0.1)
        assert not waits.has_spoken
        dataset = gear.ReplayDataset(table, batch_size=1, windows=_WHOLE, device="cpu", prefetch=0)
        dataset.sample()
        if name != "Queue":
            dataset.sample()
        assert waits.result() > 0

        def draw_all() -> None:
            for _ in range(20):
                dataset.sample()

        with (
            waiting(table, 0.2),
            pytest.raises(RateLimitError, match=rf"{name}\(.* did not let 1 row be sampled"),
        ):
            draw_all()
        writer.commit()
        assert (50, 0) in look(table).names()
        nothing_is_left(table)


def test_a_full_table_is_waited_for() -> None:
    """on_full="wait": writers go on as trajectories are removed, nothing is lost, and the deadline is kept."""
    with named(on_full="wait", max_steps=60, max_blocks=15, max_trajectories=8) as table:
        writers = [Child(_feed, table.name, seed, 150, ("add", "extend", "writer")) for seed in (1, 2)]
        deadline = time.monotonic() + PATIENCE
        while len(table) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)  # they wait
        seen: list[int] = []
        while len(seen) < 300:
            assert time.monotonic() < deadline
            now = look(table)
            seen += now.numbers.tolist()
            table.remove(now.slots)
            time.sleep(1e-3)
        for writer in writers:
            writer.result()
        for seed in (1, 2):
            assert [number for number in seen if number // 1000 == seed] == [
                *range(seed * 1000, seed * 1000 + 150)
            ]
        waited = table.stats().insert_wait
        assert waited > 0
        table.add(rows(1, 50))
        with (
            waiting(table, 0.2),
            pytest.raises(TableFullError, match=r"^Waited 0\.2 s in vain. The table is full"),
        ):
            table.add(rows(2, 20))
        waits = Child(_add_that_waits, table.name, 3, 20)
        waits.hear()
        time.sleep(0.2)
        assert not waits.has_spoken
        table.remove(table.indices())
        assert waits.result() > waited + 0.1
        nothing_is_left(table)


def test_a_queue_is_no_smaller_when_a_consumer_has_died() -> None:
    """Whatever the store that is its last: what was taken is counted, and what is counted was taken."""
    wrong = []
    for stores in range(0, 200, 3):
        with named(
            rate_limiter=gear.Queue(8), max_times_sampled=1, max_steps=64, max_trajectories=16
        ) as table:
            table.extend([rows(number, 3) for number in range(8)])
            try:
                with mortal(table, stores) as index:
                    index.reader.take_ends(4, newest=False, samples=4)
                    break
            except Died:
                bury(table)
            table.check_valid()
            added, drawn = _counts(table)
            if added - drawn != len(table):
                wrong.append((stores, added - drawn, len(table)))
    else:
        pytest.fail("it never comes to an end")
    assert not wrong, f"stores before the death, balance, size: {wrong}"
