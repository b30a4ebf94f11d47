"""What a table does by itself goes on after a load: its rules, what it has counted, ages, and blocks in common."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from checkpoint_common import contents, draw, files, loaded, loaded_numbers, make, segments
from options_common import nested_table
from table_common import fresh_name, named, numbers_of, rows

import gear_loader as gear
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint import saving
from gear_loader.errors import (
    CheckpointError,
    LockTimeoutError,
    RateLimitError,
    RegionError,
    SchemaError,
    TableEmptyError,
    TableFullError,
)
from gear_loader.storage.limiters import RateLimiter

SECOND = 10**9


# Rules -----------------------------------------------------------------------------------------------

RULES: list[dict[str, Any]] = [
    {"on_full": "error"},
    {"on_full": "evict_oldest", "max_times_sampled": 1},
    {"on_full": "evict_lowest_priority", "max_age": 0.5e3},
    {"on_full": "wait", "max_age": 1_000_000, "max_times_sampled": 2**31 - 1},
    {"rate_limiter": gear.MinSize(2)},
    {"rate_limiter": gear.Queue(3), "max_times_sampled": 1},
    {"rate_limiter": gear.SampleToInsertRatio(0.1, min_size=1, error_buffer=7)},
    {"rate_limiter": gear.SampleToInsertRatio(1 / 3, min_size=2, error_buffer=math.inf)},
    {"rate_limiter": gear.SampleToInsertRatio(4.0, min_size=2, error_buffer=(-3.5, 1e300))},
    {"rate_limiter": RateLimiter(1.5, 1, -math.inf, 5.0), "max_age": 1e6, "on_full": "evict_oldest"},
]


def test_every_rule_comes_back(tmp_path: Path) -> None:
    for number, rules in enumerate(RULES):
        path = tmp_path / str(number)
        with make(**rules) as table:
            for each in range(3):
                table.add(rows(each, 5))
            table.save(path)
            with gear.Table.load(path) as copy:
                assert copy.rules == table.rules
                assert repr(copy.rules.rate_limiter) == repr(table.rules.rate_limiter)
                assert copy.on_full == rules.get("on_full", "error")
                assert contents(copy) == contents(table)
            with gear.Table.load(path, on_full="wait", block_steps=3) as copy:
                assert copy.rules.to_json() == {**table.rules.to_json(), "on_full": "wait"}
                assert copy.on_full == "wait"


def test_the_rules_are_those_of_the_table_and_have_to_fit(tmp_path: Path) -> None:
    """And not of the handle that saves."""
    name = fresh_name()
    with named(on_full="evict_oldest") as table, gear.Table.attach(str(table.name), on_full="wait") as other:
        other.save(tmp_path / "a")
        assert loaded(tmp_path / "a")["rules"]["on_full"] == "evict_oldest"
    with make(rate_limiter=gear.MinSize(20)) as table:
        table.add(rows(0, 5))
        table.save(tmp_path / "b")
    for message, options in (
        ("on_full is 'drop'; expected 'error'", {"on_full": "drop"}),
        (r"MinSize\(min_size=20\) waits for more trajectories", {"max_trajectories": 19}),
    ):
        with pytest.raises(SchemaError, match=message):
            gear.Table.load(tmp_path / "b", name=name, **options)  # type: ignore[arg-type]
        with pytest.raises(RegionError):
            gear.Table.attach(name)
    with gear.Table.load(tmp_path / "b", max_trajectories=20) as copy:
        assert copy.rules == table.rules


# Counts ----------------------------------------------------------------------------------------------


def allowed(table: gear.Table) -> tuple[int, int]:
    """How many rows may be drawn and how many trajectories added one by one, each with nothing of the other between."""
    limiter, stats = table.rules.rate_limiter, table.stats()
    assert limiter is not None
    counts = {"size": len(table), "inserted": stats.num_inserted, "sampled": stats.num_sampled}
    sampled = next(n for n in itertools.count() if not limiter.may_sample(n + 1, **counts))
    return sampled, next(n for n in itertools.count() if not limiter.may_insert(n + 1, **counts))


@pytest.mark.parametrize("drawn", [0, 7])
def test_a_rate_limiter_goes_on_where_it_was(tmp_path: Path, drawn: int) -> None:
    limiter = gear.SampleToInsertRatio(2.5, min_size=3, error_buffer=8)
    with make(rate_limiter=limiter, timeout=0.02) as table:
        for number in range(6):
            table.add(rows(number, 5))
        for _ in range(drawn):
            draw(table, 1)
        table.remove(table.indices()[:3])  # counted all the same
        table.save(tmp_path)
        expected = allowed(table)
        assert contents(table)["counts"] == (6, drawn)
    with gear.Table.load(tmp_path) as copy:
        assert allowed(copy) == expected
        copy._engine.index.admission.timeout = 0.02
        for _ in range(expected[0]):
            draw(copy, 1)
        with pytest.raises(RateLimitError):
            draw(copy, 1)
        assert contents(copy)["counts"] == (6, drawn + expected[0])
    with gear.Table.load(tmp_path) as copy:
        copy._engine.index.admission.timeout = 0.02
        for number in range(expected[1]):
            copy.add(rows(10 + number, 5))
        with pytest.raises(RateLimitError):
            copy.add(rows(99, 5))
        assert contents(copy)["counts"] == (6 + expected[1], drawn)


def test_what_changes_by_itself_is_written_to_the_index_alone(tmp_path: Path) -> None:
    with make() as table:
        for number in range(5):
            table.add(rows(number, 10))
        table.save(tmp_path)
        before = files(tmp_path)
        for _ in range(3):
            draw(table, 4)
            slots = table.indices()[2:4]
            table._engine.reader().set_priorities(
                slots, np.full(2, -1), np.array([5.0, 6.0], dtype=np.float32)
            )
            table.save(tmp_path)
        after = files(tmp_path)
        written = {name for name in after if after[name] != before.get(name)}
        assert written == {"manifest.json", "index.000004.records"}
        assert set(before) - set(after) == {"index.000001.records"}
        found = loaded(tmp_path)
        assert found == contents(table)
        assert found["times_sampled"] == [3, 3, 3, 3, 0]
        assert found["priorities"] == [-1, -1, 5, 6, -1]


class Clock:
    """The machine's clock, which moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 10**15

    def move(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock.now)
    return clock


def ages(table: gear.Table) -> list[float]:
    """In seconds, oldest first."""
    slots = table.indices()
    found = table._engine.reader().ages(slots, table._engine.region.array("sequence")[slots])[1] / SECOND
    return [float(age) for age in found]


def test_ages_go_on(tmp_path: Path, clock: Clock) -> None:
    with make() as table:
        for number, pause in enumerate([0, 30, 0, 12.5]):
            clock.move(pause)
            table.add(rows(number, 5))
        clock.move(7)
        table.save(tmp_path)
        assert ages(table) == [49.5, 19.5, 19.5, 7]
    clock.move(10_000)
    with gear.Table.load(tmp_path) as copy:
        assert ages(copy) == [49.5, 19.5, 19.5, 7], "the time between does not count"
        clock.move(1)
        copy.add(rows(4, 5))
        copy.save(tmp_path)
        assert ages(copy) == [50.5, 20.5, 20.5, 8, 0]
    clock.now = 5 * SECOND  # the machine was restarted since, and has not been up for so long
    with gear.Table.load(tmp_path) as copy:
        assert ages(copy) == [50.5, 20.5, 20.5, 8, 0]
    with make() as table:  # a clock that goes back: each is as old as it was, and nothing is younger than now
        for number, seconds in enumerate([0, -50, 20, 100]):
            clock.move(seconds)
            table.add(rows(number, 5))
        clock.move(-60)
        table.save(tmp_path)
        assert ages(table) == [10, 60, 40, -60], "as the clock has it"
    with gear.Table.load(tmp_path) as copy:
        assert ages(copy) == [10, 60, 40, 0]


def test_max_age_after_a_load(tmp_path: Path, clock: Clock) -> None:
    with make(max_age=100) as table:
        for number in range(3):
            table.add(rows(number, 5))
            clock.move(40)
        table.save(tmp_path)  # the first is 120 s old
    assert loaded_numbers(tmp_path) == [1, 2]
    clock.move(3600)
    with gear.Table.load(tmp_path) as copy:
        for seconds, left in ((0, [1, 2]), (20, [1, 2]), (0.001, [2]), (39, [2]), (2, [])):
            clock.move(seconds)
            assert numbers_of(copy) == left
        assert copy.stats().num_expired == 2


@pytest.mark.parametrize("hold", mostly_long([1 << 30, 3000], 3000))
def test_counts_and_trajectories_are_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: int
) -> None:
    """Each trajectory leaves when it has been drawn 3 times: so all draws are those of the ones that left and are."""
    monkeypatch.setattr(saving, "HOLD_BYTES", hold)
    monkeypatch.setattr(files_module, "PIECE_BYTES", 4096)
    limiter = gear.SampleToInsertRatio(3.0, min_size=5, error_buffer=25)
    stop = threading.Event()
    failures: list[BaseException] = []
    expected = (LockTimeoutError, RateLimitError, TableEmptyError, TableFullError)

    def repeat(action: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                with contextlib.suppress(*expected):
                    action()
        except BaseException as error:
            failures.append(error)

    with make(on_full="wait", max_times_sampled=3, rate_limiter=limiter, timeout=0.1) as table:
        number = 0

        def add() -> None:
            nonlocal number
            table.add(rows(number, 1 + 37 * number % 40), priority=float(number))
            number += 1

        actions = [add, lambda: draw(table, 2), lambda: draw(table, 3)]
        threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()
        seen, saves = set(), 0
        try:
            while saves < 6 or len(seen) < 3:  # between two saves the threads may have had no turn
                saves += 1
                table.save(tmp_path)
                with gear.Table.load(tmp_path) as copy:
                    kept = contents(copy)
                    inserted, sampled = kept["counts"]
                    assert kept["next_sequence"] == inserted
                    found = numbers_of(copy)
                    assert kept["sequences"] == found == list(range(inserted - len(found), inserted))
                    assert kept["priorities"] == [float(each) for each in found]
                    times = kept["times_sampled"]
                    assert sampled == sum(times) + 3 * (inserted - len(times))
                    assert limiter.min_diff <= inserted * 3 - sampled
                    assert inserted * 3 - sampled <= limiter.max_diff or len(times) < 5
                    assert (np.diff(ages(copy)) <= 0).all()
                    seen.add(sampled)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failures
        table.save(tmp_path)
        assert loaded(tmp_path) == contents(table)


# Blocks in common, and trajectories that are not finished ---------------------------------------------


def steps(first: int, count: int) -> dict[str, np.ndarray]:
    """Steps of a stream, numbered."""
    x = np.arange(first, first + count)
    return {"x": x, "y": np.repeat(x[:, None], 5, axis=1).astype(np.uint8)}


@pytest.fixture
def stream() -> Iterator[gear.Table]:
    """A table with room for 8 chunks of 8 steps, of which each has 4 in common with the next one, and no more."""
    sizes: dict[str, Any] = {"max_steps": 72, "max_trajectories": 9, "block_steps": 4, "max_blocks": 10}
    columns = {"x": gear.Column(torch.int64), "y": gear.Column(torch.uint8, (5,))}
    with gear.Table.create(columns, **nested_table({**sizes, "on_full": "evict_oldest"})) as table:
        yield table


def _cut_stream(table: gear.Table, first: int, count: int) -> None:
    with table.writer(chunk_steps=8, overlap_steps=4) as writer:
        for step in range(first, first + count):
            writer.append({name: values[0] for name, values in steps(step, 1).items()})


def _without_blocks(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "sizes": found["sizes"][:3]}


def _x(table: gear.Table) -> list[list[int]]:
    return [table[int(i)]["x"].tolist() for i in table.indices()]


def test_chunks_that_share_blocks(tmp_path: Path, stream: gear.Table) -> None:
    _cut_stream(stream, 0, 36)
    assert len(stream) == 8
    assert stream.stats().blocks_in_use == 9
    stream.save(tmp_path)
    assert len(np.load(tmp_path / "segments" / "000001" / "x.npy")) == 64, "each is whole"
    expected = _without_blocks(contents(stream))
    good: list[dict[str, Any]] = [{"max_blocks": 16}, {"max_steps": 72}, {"max_trajectories": 9}]
    for sizes in (*good, {"max_steps": 64}, {"block_steps": 3, "max_blocks": 24}):
        with gear.Table.load(tmp_path, **sizes) as copy:
            assert contents(copy)["contents"] == expected["contents"]
    small: list[tuple[dict[str, Any], str]] = [
        ({"max_blocks": 15}, r"needs max_blocks=16 \(with blocks of 4 steps\); 15 was given"),
        (
            {"max_blocks": 23, "block_steps": 3},
            r"needs max_blocks=24 \(with blocks of 3 steps\); 23 was given",
        ),
        ({"max_steps": 63}, "needs max_steps=64 .*; 63 was given"),
        ({"max_trajectories": 7}, "needs max_trajectories=8 .*; 7 was given"),
    ]
    for sizes, message in small:
        with pytest.raises(CheckpointError, match=f"{message}. Load it with larger sizes, or with the saved"):
            gear.Table.load(tmp_path, **sizes)
    with gear.Table.load(tmp_path) as copy:
        assert _without_blocks(contents(copy)) == expected
        assert _x(copy) == [list(range(4 * i, 4 * i + 8)) for i in range(8)]
        assert copy._engine.region.layout.num_blocks == copy.stats().blocks_in_use == 16, (
            "they share nothing now"
        )
        _cut_stream(copy, 100, 50)  # goes on, and evicts them
        assert _x(copy)[-1] == list(range(144, 150))
        copy.check_valid()
        copy.save(tmp_path)
        with gear.Table.load(tmp_path) as again:
            assert _without_blocks(contents(again)) == _without_blocks(contents(copy))
            assert again._engine.region.layout.num_blocks == 18, "what the new ones need"


def test_what_is_not_committed_is_not_saved(tmp_path: Path, stream: gear.Table) -> None:
    path = tmp_path / "table"
    with make() as table:
        table.add(rows(0, 10))
        writer = table.writer()
        writer.append(rows(1, 15))
        assert table.stats().num_writing == 1
        table.save(path)
        with gear.Table.load(path) as copy:
            assert numbers_of(copy) == [0]
            assert copy.stats().num_writing == 0
            assert contents(copy) == contents(table)
        writer.commit(priority=3.0)
        table.save(path)
        assert segments(path) == ["000001", "000002"]
        assert loaded_numbers(path) == [0, 1]
        assert loaded(path) == contents(table)
    path = tmp_path / "stream"  # an unfinished chunk shares blocks with one that is saved
    writer = stream.writer(chunk_steps=8, overlap_steps=4)
    writer.append(steps(0, 10))
    stream.save(path)
    with gear.Table.load(path) as copy:
        assert _x(copy) == [list(range(8))]
        assert copy.stats().num_inserted == 1
    writer.append(steps(10, 1))
    stream.save(path)
    writer.commit()
    stream.save(path)
    assert segments(path) == ["000001", "000002"]
    with gear.Table.load(path) as copy:
        assert _x(copy) == [list(range(8)), list(range(4, 11))]
        assert _without_blocks(contents(copy)) == _without_blocks(contents(stream))
