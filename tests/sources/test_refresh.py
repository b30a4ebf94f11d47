"""`refresh=`: tables that cannot hold their data set at once, how well they shuffle, and how a killed one goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources_common import kill_after_go
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import Episode, EpisodeReader, Refresh, load
from gear_loader.sources.fetch_orders import EpisodeRange, Passes

STEPS = 4
LENGTHS = np.arange(30) % STEPS + 1


class Numbered(EpisodeReader):
    """Episodes of their number, of four steps each, that can be read from some of them on."""

    def __init__(
        self, count: int, starts: Any = None, broken: int | None = None, lengths: Any = None
    ) -> None:
        lengths = np.full(count, STEPS) if lengths is None else lengths
        super().__init__("Mine", lengths, {"x": gear.Column(torch.float32)})
        self.starts = np.arange(count) if starts is None else np.array(starts)
        self.broken, self.read = broken, list[int]()

    def __iter__(self) -> Iterator[Episode]:
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        for number in range(first, last):
            if number == self.broken:
                raise SourceError(f"Mine, episode {number}: it is damaged")
            self.read.append(number)
            yield Episode({"x": np.full(self.lengths[number], number, np.float32)})


def table_of(held: int, **options: Any) -> gear.Table:
    return gear.Table.create(
        {"x": gear.Column(torch.float32)},
        max_steps=STEPS * held,
        max_trajectories=held,
        block_steps=STEPS,
        **{"on_full": "evict_oldest", **options},
    )


def held(table: gear.Table) -> list[int]:
    """The episodes in a table, oldest first."""
    return [int(table[i]["x"][0]) for i in table.indices().tolist()]


def order(passes: Passes, count: int) -> list[int]:
    found: list[int] = passes.numbers(np.arange(count)).tolist()
    return found


def spread(pieces: Iterator[EpisodeRange]) -> list[int]:
    """The episodes of pieces, one after another."""
    return [number for piece in pieces for number in range(piece.first, piece.last)]


def draws(reader: EpisodeReader, size: int, epochs: int) -> np.ndarray:
    """The episodes drawn, in order, over so many epochs of a table of so many episodes that keeps up."""
    with table_of(size) as table:
        load(reader, table, refresh=Refresh(epochs=epochs, seed=3), progress=False)
        loading = table.loading
        assert loading is not None
        assert loading.num_loaded == size
        dataset = gear.ReplayDataset(table, batch_size=STEPS, windows=gear.Window(1), seed=7)
        found = []
        for batch in range(len(reader) * epochs - size):
            wait_until(lambda batch=batch: loading.num_loaded == size + batch, pause=5e-4)
            found.append(dataset.sample()["x"].numpy().ravel())
        loading.wait(60)
        assert held(table) == order(Passes(reader.starts, len(reader), 3), epochs * len(reader))[-size:]
    return np.concatenate(found)


def measures(drawn: np.ndarray, count: int) -> tuple[float, float]:
    """How far apart in the source two draws after each other are, over that of independent uniform ones; and the
    correlation of the place of a draw within the epoch with the place in the source."""
    distance = np.abs(np.diff(drawn)).mean() / (count / 3)
    return float(distance), float(np.corrcoef(np.arange(len(drawn)), drawn)[0, 1])


@pytest.mark.long
def test_draws_are_as_from_the_whole_set() -> None:
    """With access to each episode: shares as of uniform draws, and no trace of the order in the source."""
    count, size, epochs = 200, 20, 6
    drawn = draws(Numbered(count), size, epochs)
    distance, correlation = measures(drawn, count)
    assert 0.9 < distance < 1.05  # of 20 held at a moment the same one is drawn again once in 20
    assert abs(correlation) < 0.06
    # Each was fetched six times, and was in the table for as many draws but at the beginning and the end.
    shares = np.bincount(drawn.astype(int), minlength=count)
    expected = len(drawn) / count
    chi2 = ((shares - expected) ** 2 / expected).sum()
    assert chi2 < 281, chi2  # 0.9999 of chi-square of 199 degrees
    assert shares.min() > 0


@pytest.mark.long
def test_the_order_of_one_file_is_seen_through_the_window() -> None:
    """What the measures above are worth: a source that is read from its begin alone leaves its order in the draws."""
    distance, correlation = measures(draws(Numbered(200, starts=[0]), 20, 1), 200)
    assert distance < 0.15  # of a window of 20 of 200
    assert correlation > 0.95
    distance, _ = measures(draws(Numbered(200, starts=np.arange(0, 200, 5)), 20, 1), 200)
    assert 0.6 < distance < 1.0  # four files of five are in the table


def test_epochs_are_permutations_that_shards_share() -> None:
    starts, count = np.array([0, 3, 4, 9]), 11
    whole = Passes(starts, count, 5)
    epochs = [order(whole, 4 * count)[i * count :][:count] for i in range(4)]
    assert all(sorted(each) == list(range(count)) for each in epochs)
    assert len({tuple(each) for each in epochs}) == 4
    groups = [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10]]
    for each in epochs:
        assert all(each[each.index(g[0]) :][: len(g)] == g for g in groups)
    for epoch in range(4):
        parts = [spread(Passes(starts, count, 5, r, 3).pieces(epoch)) for r in range(3)]
        assert [number for part in parts for number in part] == epochs[epoch]
        assert [len(Passes(starts, count, 5, r, 3)) for r in range(3)] == [len(p) for p in parts] == [3, 4, 4]
    rest = spread(whole.pieces(2, skip=5))
    assert rest == epochs[2][5:]


def test_ranks_take_another_part_in_each_epoch() -> None:
    readers = [Numbered(40) for _ in range(2)]
    for rank, reader in enumerate(readers):
        with table_of(5) as table:
            load(
                reader,
                table,
                refresh=Refresh(epochs=2, samples_per_insert=0.01),
                shard=(rank, 2),
                progress=False,
            )
            assert table.loading is not None
            table.sample(8)
            table.loading.wait(60)
            assert repr(table.loading) == "<Mine: loaded, epoch 1 of 2, 20 of 20 trajectories>"
    for epoch in range(2):
        first, second = (set(reader.read[20 * epoch :][:20]) for reader in readers)
        assert first | second == set(range(40))
    assert set(readers[0].read[:20]) != set(readers[0].read[20:])
    for rank in range(3):
        with load(Numbered(10), shard=(rank, 3), progress=False) as table:
            assert held(table) == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]][rank]


def test_each_is_drawn_so_often_and_leaves() -> None:
    """A table that waits, with a limit of draws: the fetch goes as trajectories leave."""
    limits = gear.Limits(max_times_sampled=3)
    with table_of(8, on_full="wait", limits=limits, timeout=30.0) as table:
        load(Numbered(30), table, refresh=Refresh(epochs=2), progress=False)
        drawn = np.concatenate([table.sample(1)["x"].numpy() for _ in range(3 * 60)])
        assert (np.bincount(drawn.astype(int)) == 6).all()
        assert table.loading is not None
        table.loading.wait(60)


def test_a_rate_limiter_holds_the_fetch_and_the_draws() -> None:
    limiter = gear.SampleToInsertRatio(2.0, min_size=4, error_buffer=8)
    with table_of(6, rate_limiter=limiter, timeout=0.05) as table:
        load(
            Numbered(50),
            table,
            refresh=Refresh(epochs=1, samples_per_insert=0.001),
            wait=False,
            progress=False,
        )
        loading = table.loading
        assert loading is not None
        for _ in range(15):
            wait_until(
                lambda: limiter.may_sample(
                    1, size=len(table), inserted=table.stats().num_inserted, sampled=table.stats().num_sampled
                )
            )
            table.sample(1)
            assert loading.num_loaded * 2 - table.stats().num_sampled <= 2 * 4 + 8
        assert not loading.done


def test_several_threads_read_ahead() -> None:
    """What takes long to be fetched; the order stays."""

    class Far(Numbered):
        def between(self, first: int, last: int) -> Iterator[Episode]:
            assert barrier.wait(30) >= 0
            return super().between(first, last)

    barrier, reader = threading.Barrier(8), Far(40)
    with table_of(30) as table:
        load(reader, table, refresh=Refresh(epochs=1), progress=False)
        assert held(table) == order(Passes(reader.starts, 40, 0), 30)


def test_draws_over_shards_are_counted() -> None:
    """Each table goes on as the rows drawn from it by all ranks tell."""
    tables = [table_of(5, name=f"test-refresh-{rank}-{os.getpid()}") for rank in range(2)]
    try:
        for rank, table in enumerate(tables):
            load(Numbered(40), table, refresh=Refresh(epochs=2), shard=(rank, 2), progress=False)
        with gear.distributed.Shards(tables) as shards:
            dataset = gear.ReplayDataset(shards, batch_size=16, windows=gear.Window(1))
            seen, drawn = set[float](), 0
            while not all(table.loading is not None and table.loading.done for table in tables):
                seen |= set(dataset.sample()["x"].ravel().tolist())
                drawn += 16
                time.sleep(0.002)
        assert sum(table.stats().num_sampled for table in tables) == drawn
        assert len(seen) >= 36
    finally:
        for table in tables:
            table.close()
            table.unlink()


def test_the_fetch_is_not_held_up_by_other_processes() -> None:
    """A thread of low priority that is not scheduled holds what draws wait for; threads that read are of such."""
    reading = list[int]()

    class Noted(Numbered):
        def between(self, first: int, last: int) -> Iterator[Episode]:
            reading.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().between(first, last)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    for options in ({"refresh": True}, {"wait": False}):
        reading.clear()
        with table_of(5) as table:
            load(Noted(40), table, progress=False, **options)
            loading = table.loading
            assert loading is not None
            wait_until(lambda loading=loading: loading.num_loaded > 0)
            assert loading._thread.native_id is not None
            if not loading.done:
                assert os.getpriority(os.PRIO_PROCESS, loading._thread.native_id) == own
            assert set(reading) == {10} or own >= 10


@pytest.mark.parametrize("on_full", ["evict_oldest", "evict_lowest_priority"])
def test_an_error_and_a_close_end_it(on_full: Any) -> None:
    with table_of(4, on_full=on_full) as table:
        load(
            Numbered(20, broken=17),
            table,
            refresh=Refresh(samples_per_insert=0.01),
            wait=False,
            progress=False,
        )
        loading = table.loading
        assert loading is not None
        wait_until(lambda: loading.done or (len(table) > 0 and table.sample(2) is not None))
        wait_until(lambda: loading.done or table.sample(2) is None)
        with pytest.raises(SourceError, match="Mine, episode 17: it is damaged"):
            loading.wait()
        load(Numbered(20), table, refresh=True, wait=True, progress=False)
        loading = table.loading
        assert loading is not None
        assert not loading.done
    assert loading.done
    assert repr(loading).startswith("<Mine: cancelled, epoch 0,")
    loading.wait()


def test_a_table_of_so_many_bytes_is_made_and_one_that_holds_all_is_filled() -> None:
    with load(
        Numbered(100), refresh=True, max_bytes=10 * STEPS * 4, block_steps=STEPS, progress=False
    ) as table:
        assert (len(table), table.on_full) == (10, "evict_oldest")
        assert table.loading is not None
        assert not table.loading.done
    for options in ({"max_bytes": "1GiB"}, {"table": table_of(101)}):
        with load(Numbered(100), refresh=True, progress=False, **options) as table:
            assert held(table) == list(range(100))
            assert table.loading is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"refresh": 3}, "refresh is 3; expected True, False, or a gear_loader.sources.Refresh"),
        ({"refresh": True}, "refresh= was given without a table or max_bytes="),
        ({"refresh": True, "max_bytes": 999, "statistics": True}, "statistics=True was given with refresh="),
        ({"refresh": True, "table": 9, "max_bytes": 999}, "max_bytes= was given with refresh= and a table"),
        ({"refresh": True, "table": "error"}, "refresh= was given with a table of on_full='error'"),
        (
            {"refresh": True, "max_bytes": 30},
            "max_bytes= leaves 30 bytes for the steps, and the longest episode of Mine",
        ),
        ({"shard": (2, 2)}, r"shard is \(2, 2\); expected \(number, count\)"),
        ({"shard": (0, 30)}, r"shard=\(0, 30\) was given, and Mine has 20 episodes; expected more"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], problem: str) -> None:
    if "table" in options:
        on_full = "error" if options["table"] == "error" else "evict_oldest"
        options = {**options, "table": table_of(9, on_full=on_full)}
    reader = Numbered(20)
    with pytest.raises(SourceError, match=problem):
        load(reader, progress=False, **options)
    assert not reader.read
    for bad in ({"epochs": 0}, {"samples_per_insert": 0}, {"samples_per_insert": float("inf")}, {"seed": -1}):
        with pytest.raises(SourceError, match=f"{next(iter(bad))} is"):
            Refresh(**bad)


@pytest.mark.long
def test_a_killed_refresh_goes_on(tmp_path: Path) -> None:
    """The process is killed in the second epoch; another one goes on with the episode that was to follow."""
    name = f"test-refresh-{os.getpid()}"
    program = f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        from test_refresh import *
        table = table_of(7, name={name!r})
        load(Numbered(30, lengths=LENGTHS), table, refresh=Refresh(seed=3), progress=False)
        while table.loading.num_loaded < 40:
            table.sample(2)
            time.sleep(0.002)
        print("go", flush=True)
        while True:
            table.sample(2)
    """
    kill_after_go(program)
    with gear.Table.attach(name, on_full="evict_oldest") as table:
        try:
            reader = Numbered(30, lengths=LENGTHS)
            table.check_valid()
            table.save(tmp_path / "part")
            with pytest.raises(SourceError, match="holds others than the last in the order of refresh="):
                load(reader, table, refresh=Refresh(seed=4), resume=True, progress=False)
            expected = order(Passes(np.arange(30), 30, 3), 3000)
            for each in (table, gear.Table.load(tmp_path / "part")):
                given = each.stats().num_inserted
                assert given >= 40
                assert held(each) == expected[given - len(each) : given]
                load(reader, each, refresh=Refresh(seed=3), resume=True, wait=False, progress=False)
                loading = each.loading
                assert loading is not None
                while loading.num_loaded < given + 45:
                    each.sample(2)
                    time.sleep(0.002)
                loading.cancel()
                given = loading.num_loaded
                assert held(each) == expected[given - len(each) : given]
                each.check_valid()
        finally:
            table.unlink()


def test_a_table_with_room_for_its_part_is_not_waited_for() -> None:
    with table_of(30) as large, table_of(5) as small:
        load(Numbered(40), [large, small], refresh=Refresh(epochs=1), progress=False)
        assert (len(large), len(small)) == (20, 5)


@pytest.mark.long
def test_nothing_is_logged_at_the_end_of_the_process() -> None:
    """Whatever the threads are in the middle of."""
    script = """
        import sys, time
        sys.path[:0] = sys.argv[1:]
        from test_refresh import Numbered, Refresh, load, table_of
        class Slow(Numbered):
            def between(self, first, last):
                time.sleep(0.1)
                return super().between(first, last)
        table = table_of(5)
        load(Slow(500), table, refresh=Refresh(samples_per_insert=0.001), progress=False)
        table.sample(4)
        time.sleep(0.3)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *sys.path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Loading ended" not in ended.stderr


def test_refresh_of_several_tables_at_once() -> None:
    """Each has a part of every epoch; one thread fetches for all, and all are cancelled together."""
    tables = [table_of(5) for _ in range(2)]
    reader = Numbered(40)
    first = load(reader, tables, refresh=Refresh(epochs=2, samples_per_insert=0.01), progress=False)
    loading = first.loading
    assert (first, loading) == (tables[0], tables[1].loading)
    assert loading is not None
    assert [len(table) for table in tables] == [5, 5]
    for table in tables:
        table.sample(4)
    loading.wait(60)
    assert repr(loading) == "<Mine: loaded, epoch 1 of 2, 40 of 40 trajectories>"
    for number, table in enumerate(tables):
        assert held(table) == order(Passes(np.arange(40), 40, 0, number, 2), 40)[-5:]
        assert table.stats().num_inserted == 40
    load(reader, tables, refresh=Refresh(), progress=False, wait=False)
    assert tables[0].loading is tables[1].loading
    tables[1].close()
    assert tables[0].loading is not None
    assert tables[0].loading.done
    tables[0].close()
