"""Many processes at full speed on one table; processes killed anywhere, stopped anywhere: nothing torn, lost or hung.

`GEAR_LOADER_STRESS_SECONDS` says how long the test at full speed runs.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import functools
import itertools
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import amounts
from concurrency_common import (
    COLUMNS,
    PATIENCE,
    WAYS,
    Author,
    Child,
    Journal,
    Look,
    Nursery,
    Voice,
    check_batch,
    check_named,
    columns_of,
    drop_the_dead,
    fork,
    look,
    rows,
    waiting,
)
from options_common import nested, nested_table
from table_common import Died, bury, fresh_name, mortal
from waiting_common import go_on, stop_process, wait_until

import gear_loader as gear
from gear_loader.errors import (
    LockTimeoutError,
    PriorityError,
    RateLimitError,
    StaleIndexError,
    TableEmptyError,
    TableFullError,
)
from gear_loader.storage.counters import FIRST_SEQUENCE, NEXT_SEQUENCE, NUM_EVICTED, NUM_REMOVED, NUM_SAMPLED
from gear_loader.storage.operations.view import READING
from gear_loader.storage.states import FREE
from gear_loader.utils.waiting import Backoff

SECONDS = float(os.environ.get("GEAR_LOADER_STRESS_SECONDS", "1.2"))
pytestmark = pytest.mark.timeout(600 + SECONDS)


@pytest.fixture(autouse=True)
def nursery() -> Iterator[Nursery]:
    nursery = Nursery.shared()
    yield nursery
    nursery.clear()


@contextlib.contextmanager
def named(**options: Any) -> Iterator[gear.Table]:
    sizes: dict[str, Any] = {"max_steps": 2000, "max_trajectories": 120, "block_steps": 4}
    settings = {**sizes, "name": fresh_name(), "timeout": PATIENCE, **options}
    with gear.Table.create(COLUMNS, **nested_table(settings)) as table:
        try:
            yield table
        finally:
            table.unlink()


def attach(name: str, **options: Any) -> gear.Table:
    """In a child: attached, and with deadlines that a busy machine does not miss."""
    table = gear.Table.attach(name, timeout=PATIENCE, **options)
    table._engine.region.lock.timeout = PATIENCE
    return table


def nothing_is_left(table: gear.Table) -> None:
    """Once everything has been removed, everything is free."""
    drop_the_dead(table)
    table.check_valid()
    table.remove(table.indices())
    drop_the_dead(table)
    table.check_valid()
    assert table.stats().blocks_in_use == 0
    assert (table._engine.region.array("state") == FREE).all()
    assert not table._engine.region.array("readers")[:, READING].any()


def _write(
    voice: Voice, name: str, seed: int, on_full: Any, threads: int = 1
) -> list[tuple[int, int, set[str]]]:
    """Write until called: trajectories added and removed by each thread, and what each has done."""
    with attach(name, on_full=on_full) as table:
        authors = [Author(table, seed + 50 * i, (seed + 50 * i) * 10**9) for i in range(threads)]
        called = threading.Event()

        def write(author: Author) -> None:
            while not called.is_set():
                for _ in range(8):
                    author.act()
                if author is authors[0] and (voice.is_called or any(future.done() for future in futures)):
                    called.set()

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(write, author) for author in authors[1:]]
            write(authors[0])
            for future in futures:
                future.result()
        return [(author.committed, author.removed, author.actions) for author in authors]


_WIDE = gear.Window(6, offset=-2)
_VARIOUS = {
    **dict.fromkeys(("number", "step", "length", "cut"), gear.Window(3, offset=-1)),
    "value": gear.Window(9, offset=-6, pad="head"),
    "half": gear.Window(5, offset=2, pad="tail"),
    "tag": gear.Window(1),
    "check": gear.Window(12, offset=-4),
}
_READINGS: list[dict[str, Any]] = [
    {"sampler": gear.Uniform(), "windows": _WIDE, "prefetch": 0},
    {"sampler": gear.Prioritized(), "windows": _VARIOUS, "prefetch": 2},
    {"sampler": gear.Uniform(replacement=False), "windows": _VARIOUS, "prefetch": 2, "keep": 3},
    {"sampler": gear.Prioritized(unit="step", replacement=False), "windows": _WIDE, "prefetch": 2},
    {"sampler": gear.Uniform(unit="step"), "windows": _WIDE, "prefetch": 2, "sample_info": True},
    {"sampler": gear.Prioritized(eps=0.1), "windows": _WIDE, "prefetch": 0, "sample_info": True, "keep": 1},
    {"sampler": gear.Fifo(), "windows": _WIDE, "prefetch": 2, "anchor": "last", "copy": True},
    {"sampler": gear.TopK(), "windows": _VARIOUS, "prefetch": 0},
]


def _read_batches(voice: Voice, name: str, seed: int) -> dict[str, int]:
    """Every kind of sampler in turn; all rows of all batches are checked."""
    seen = collections.Counter[str]()
    with attach(name) as table:
        for turn in itertools.count():
            if voice.is_called:
                break
            options = {**_READINGS[turn % len(_READINGS)], "batches_per_epoch": math.inf, "device": "cpu"}
            dataset = gear.ReplayDataset(table, **nested({"batch_size": 32, "seed": seed + turn, **options}))
            try:
                _read_some(voice, table, dataset, seen, one_by_one=turn // len(_READINGS) % 3 == 2)
            except (TableEmptyError, PriorityError):  # everything may go at once, or nearly
                seen["empty"] += 1
    return dict(seen)


def _read_some(voice: Voice, table: gear.Table, dataset: Any, seen: Any, *, one_by_one: bool) -> None:
    generator = random.Random(dataset.seed)
    end = time.monotonic() + 0.25
    iterator: Any = None if one_by_one else iter(dataset)
    old: Any = None
    while time.monotonic() < end and not voice.is_called:
        batch = dataset.sample() if iterator is None else next(iterator)
        numbers, _ = check_batch(batch, dataset.windows)
        seen["named"] += check_named(table, batch, numbers)
        seen["rows"] += len(numbers)
        if generator.random() < 0.2:
            time.sleep(generator.random() * 0.003)  # what was prefetched becomes old
        if dataset.sample_info:
            info = batch["sample_info"]
            assert all((info[key] >= 0).all() for key in ("times_sampled", "age", "age_seconds"))
        if isinstance(dataset.sampler, gear.Prioritized) and generator.random() < 0.7:
            if old is not None:  # some of it has gone meanwhile
                dataset.update_priority(old, torch.rand(32) + 0.01)
            old = copy.deepcopy(batch)
    if iterator is not None:
        iterator.close()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_steps": 2000}, id="usual"),
        pytest.param(
            {"max_blocks": 400, "block_steps": 2, "max_trajectories": 400, "max_age": 0.6},
            id="short blocks, old age",
            marks=pytest.mark.long,
        ),
    ],
)
def test_writers_and_readers_at_full_speed(options: dict[str, Any]) -> None:
    with named(on_full="evict_lowest_priority", **options) as table:
        first = Author(table, 99, 99 * 10**9)
        while table.stats().num_evicted < 100:
            first.act()
        reader = Child(_read_batches, table.name, 1)
        policies = ("evict_oldest", "evict_lowest_priority")
        writers = [Child(_write, table.name, seed, policies[seed % 2], 1 + seed // 5) for seed in range(1, 6)]
        end = time.monotonic() + SECONDS
        while (now := time.monotonic()) < end or table.stats().num_inserted < 1000:
            assert now < end + PATIENCE
            for child in (reader, *writers):
                if child.has_spoken:
                    child.result()
                    pytest.fail("a child has ended before its time")
            table.check_valid()
            seen = Look(table)
            for slot in seen.slots[:10].tolist():
                with contextlib.suppress(StaleIndexError):
                    one = {name: values.numpy() for name, values in table[slot].items()}
                    number, begin, length = (int(one[name][0]) for name in ("number", "step", "length"))
                    cut = tuple(one["cut"][0].tolist())
                    last = min(begin + cut[0], length) if cut[0] else length
                    for name, right in rows(number, length, first=begin, last=last, cut=cut).items():
                        assert (one[name].dtype, one[name].tolist()) == (right.dtype, right.tolist()), name
            time.sleep(0.2)
            seen.check_again()
            seen.close()
        reader.say()
        batches = reader.result()
        for child in writers:
            child.say()
        results = [each for child in writers for each in child.result()]
        stats = table.stats()
        committed = first.committed + sum(committed for committed, _, _ in results)
        removed = first.removed + sum(removed for _, removed, _ in results)
        counters = table._engine.region.array("counters")
        assert (stats.num_inserted, counters[NUM_REMOVED]) == (committed, removed)
        assert counters[NUM_EVICTED] == committed - removed - stats.num_expired - stats.num_trajectories
        assert (stats.num_expired > 0) == (table.rules.max_age is not None)
        assert set().union(*(actions for _, _, actions in results)) >= set(WAYS)
        if table.rules.max_age is None:  # else a busy machine sees them too late
            assert batches["named"] > 0, "what is checked is never still there"
            assert "empty" not in batches
        look(table)
        nothing_is_left(table)


# Killed while they write -----------------------------------------------------------------------------

_NUMBERS = 10**5  # numbers that one life may use


def _live(table: gear.Table, journal: Journal, kind: int, seed: int, first: int) -> None:
    """Write until killed: in every way (kind 0), or so that the index is half changed for much of the time."""
    author = Author(table, seed, first, journal=journal, longest=40 if kind == 0 else 6)
    index = table._engine.index
    count = min(600, table._engine.region.layout.max_trajectories // 4)
    ones = np.ones(count, dtype=np.int64)
    bulk = columns_of(first + np.arange(count)[:, None], np.zeros((1, 1)), 1, 0, 0)
    names = [(first + i, 0) for i in range(count)]
    author.next += count
    while True:
        if journal.is_full or author.next > first + _NUMBERS - 1000:
            time.sleep(PATIENCE)
        if kind == 0:
            author.act()
        elif kind == 1:  # many at once, the same again and again
            journal.extending(first, count)
            slots = table.extend(bulk, lengths=ones)
            journal.done[:count] = journal.going[:count] = names
            journal.head[0] = count
            journal.head[1] = count
            table.remove(slots)
            journal.clear()
        elif kind == 2:
            slots, _ = index.begin(ones)
            index.abort(slots)
        else:
            author.streams()
            author.remove()
        journal.head[6] += 1


def _kill_at_work(journal: Journal, work: Callable[[], object], seconds: float) -> int:
    """Fork a process, wait until it is at work, and some seconds more, and kill it; its id."""
    journal.clear()
    pid = fork(work)
    deadline = time.monotonic() + PATIENCE
    while not journal.head[6]:
        assert time.monotonic() < deadline, "it does not begin"
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended by itself"
        time.sleep(2e-4)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return pid


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
            low = (seed * 1000 + life) * _NUMBERS
            work = functools.partial(_live, table, journal, life % 4, life, low)
            _kill_at_work(journal, work, generator.random() * 0.006)
            table.check_valid()
            seen = look(table)
            mine = journal.check(seen.names(), low, low + _NUMBERS)
            keep = set(sorted(mine)[-2:]) if life % 2 else set()
            left += sorted(keep)
            names = zip(seen.numbers.tolist(), seen.firsts.tolist(), strict=True)
            away = [name in mine and name not in keep for name in names]
            table.remove(seen.slots[away])
    return left


@pytest.mark.parametrize("lives", amounts(8, 40, 150))
def test_what_killed_writers_had_committed_is_there(lives: int) -> None:
    """Nothing may go (on_full="error"), and of what was reported nothing has gone."""
    with named(max_steps=200_000, max_trajectories=20_000) as table:
        killers = [Child(_kill_writers, table.name, seed, lives) for seed in (1, 2)]
        left = {tuple(name) for killer in killers for name in killer.result(4 * PATIENCE)}
        assert len(left) > lives / 3
        assert look(table).names() == left
        nothing_is_left(table)
        table.add(rows(1, 200_000))
        nothing_is_left(table)


def _hold_room(voice: Voice, name: str, reads: bool) -> None:
    """Read, or write a stream, and go on when told."""
    cut = (24, 20)
    with attach(name) as table, table.writer(chunk_steps=24, overlap_steps=20) as writer:
        seen = Look(table)
        if not reads:
            seen.close()
            writer.append(rows(7, 60, last=30, cut=cut))
        voice.say()
        voice.hear()
        if reads:
            seen.check_again()
            seen.close()
        else:
            writer.append(rows(7, 60, first=30, cut=cut))


@pytest.mark.parametrize(("reads", "end"), [(True, "goes on"), (False, "is killed")])
def test_room_that_a_stopped_process_holds_is_waited_for(reads: bool, end: str) -> None:
    """It is not dead: what it has is not taken, and what needs it is given up in time."""
    with named(on_full="evict_oldest", max_steps=300, max_blocks=80) as table:
        table.add(rows(1, 200))
        holder = Child(_hold_room, table.name, reads)
        holder.hear()
        stop_process(holder.pid)
        read, written = ([holder.pid], []) if reads else ([], [holder.pid])
        message = re.escape(f"still being read by the processes {read} or written by {written}. They may")
        calls: list[Callable[[], Any]] = [
            *(lambda: table.add(rows(2, 290)), lambda: table.extend([rows(2, 145), rows(3, 145)])),
            lambda: table.writer().append(rows(3, 290)),
        ]
        for call in calls:
            with waiting(table, 0.1), pytest.raises(LockTimeoutError, match=message):
                call()
        waits = Child(_add_that_waits, table.name, 4, 290)
        waits.hear()
        assert not waits.has_spoken
        if end == "goes on":
            go_on(holder.pid)
            holder.say()
            holder.result()
        else:
            holder.kill()
        assert waits.result() > 0
        assert look(table).names() >= {(4, 0)}
        nothing_is_left(table)


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
    options = {
        **options,
        "windows": _WHOLE,
        "anchor": "first",
        "batches_per_epoch": math.inf,
        "device": "cpu",
    }
    with gear.Table.attach(name, timeout=0.5 if count is None else PATIENCE) as table:
        dataset = gear.ReplayDataset(table, **nested(options))
        voice.say()
        batches = 0
        while count is None or batches < count:
            iterator: Any = iter(dataset)
            try:
                for batch in iterator:
                    parts = check_batch(batch, dataset.windows)
                    drawn += zip(*(part.tolist() for part in parts), strict=True)
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
        counters = table._engine.region.array("counters")
        added = int(counters[NEXT_SEQUENCE] - counters[FIRST_SEQUENCE])
        return added, int(counters[NUM_SAMPLED])

    return table._engine.index.recovery.locked(look)


@pytest.mark.parametrize(("readers", "prefetch"), [(1, 0), (2, 2)])
def test_a_queue_gives_each_trajectory_out_once(readers: int, prefetch: int) -> None:
    with named(rate_limiter=gear.Queue(8), max_times_sampled=1, max_trajectories=20) as table:
        options = {"batch_size": 4, "prefetch": prefetch, "sampler": gear.Fifo()}
        writers = [Child(_feed, table.name, seed, 60, ("add", "extend", "writer")) for seed in (1, 2)]
        writers.append(Child(_feed_stream, table.name, 3, 40))
        wait_until(lambda: len(table) >= 7)
        time.sleep(0.2)  # they wait
        consumers = [Child(_draw, table.name, None, options) for _ in range(readers)]
        for consumer in consumers:
            consumer.hear()
        for writer in writers:
            writer.result()
        wait_until(lambda: _counts(table)[1] == 160 or any(consumer.has_spoken for consumer in consumers))
        for consumer in consumers:
            consumer.say()
        drawn = [consumer.result() for consumer in consumers]
        for names in drawn:
            for seed in (1, 2, 3):
                own = [name for name in names if name[0] // 1000 == seed]
                assert own == sorted(own), "drawn in another order than added"
        expected = {(number, 0) for number in (*range(1000, 1060), *range(2000, 2060))}
        expected |= {(3000, 4 * chunk) for chunk in range(40)}
        assert sum(map(len, drawn)) == 160
        assert set().union(*drawn) == expected
        stats = table.stats()
        assert (stats.num_inserted, stats.num_sampled, stats.num_expired) == (160, 160, 160)
        assert stats.insert_wait > 0
        assert len(table) == 0
        nothing_is_left(table)


def test_room_in_a_full_table_is_waited_for() -> None:
    """on_full="wait": writers go on as trajectories are removed, nothing is lost, and the deadline is kept."""
    with named(on_full="wait", max_steps=60, max_blocks=15, max_trajectories=8) as table:
        writers = [Child(_feed, table.name, seed, 100, ("add", "extend", "writer")) for seed in (1, 2)]
        seen: list[int] = []

        def removed() -> bool:
            now = look(table)
            seen.extend(now.numbers.tolist())
            table.remove(now.slots)
            return len(seen) == 200

        wait_until(lambda: len(table) > 2)
        wait_until(removed, pause=1e-3)
        for writer in writers:
            writer.result()
        for seed in (1000, 2000):
            assert [number for number in seen if seed <= number < seed + 1000] == [*range(seed, seed + 100)]
        table.add(rows(1, 50))
        message = r"^Waited 0\.1 s, then timed out. The table is full"
        with waiting(table, 0.1), pytest.raises(TableFullError, match=message):
            table.add(rows(2, 20))
        waited = table.stats().insert_wait
        assert waited >= table.seconds_waited >= 0.1  # the writers' and this handle's
        waits = Child(_add_that_waits, table.name, 3, 20)
        waits.hear()
        assert not waits.has_spoken
        table.remove(table.indices())
        assert waits.result() > waited
        assert look(table).numbers.tolist() == [3]
        nothing_is_left(table)


def test_a_queue_is_no_smaller_when_a_consumer_has_died() -> None:
    """Whatever the store that is its last: what was taken is counted, and what is counted was taken."""
    for stores in itertools.count(0, 3):
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
            assert added - drawn == len(table), f"after {stores} stores"
    assert 5 < stores < 200
