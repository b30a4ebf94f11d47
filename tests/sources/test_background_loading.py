"""`wait=False`: a table that is filled while it is drawn from; errors, kills, and how it goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sources_common import kill_after_go
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import Episode, EpisodeReader, load, source_loading

LENGTHS = np.array([3, 5, 2, 4, 6, 1])


class Reader(EpisodeReader):
    """Episodes of their number; waits before `pause`, fails at `broken`."""

    def __init__(self, pause: int | None = None, broken: int | None = None, lengths: Any = LENGTHS) -> None:
        schema = {"x": gear.Column(torch.float32), "task": gear.Column(str, per="trajectory")}
        super().__init__("Mine", lengths, schema)
        self.pause, self.broken, self.go = pause, broken, threading.Event()

    def __iter__(self) -> Iterator[Episode]:
        for number, count in enumerate(self.lengths.tolist()):
            if number == self.pause:
                assert self.go.wait(60)
            if number == self.broken:
                raise SourceError(f"Mine, episode {number}: it is damaged")
            yield Episode({"x": np.full(count, number, np.float32), "task": f"task {number}"})


def check(table: gear.Table, count: int = len(LENGTHS)) -> None:
    assert table.lengths().tolist() == LENGTHS[:count].tolist()
    assert [table[i]["task"] for i in table.indices().tolist()] == [f"task {i}" for i in range(count)]
    assert all((table[i]["x"] == n).all() for n, i in enumerate(table.indices().tolist()))


@pytest.fixture(autouse=True)
def _pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_loading, "BACKGROUND_BYTES", 1)


def test_a_table_is_drawn_from_while_it_is_filled() -> None:
    reader = Reader(pause=4)
    table = load(reader, wait=False, payload=10_000, statistics=True, progress=False)
    loading = table.loading
    assert loading is not None
    wait_until(lambda: loading.num_loaded == 3)  # the piece with the fourth ends where the fifth begins
    assert table.sample(8)["x"].max() <= 2
    assert (loading.done, repr(loading)) == (False, "<Mine: loading, 3 of 6 trajectories>")
    with pytest.raises(
        TimeoutError, match=r"Mine: loading, 3 of 6 trajectories> is not complete after 0.01 seconds"
    ):
        loading.wait(0.01)
    assert table.statistics is None
    reader.go.set()
    loading.wait(60)
    check(table)
    assert (loading.done, loading.num_loaded, repr(loading)) == (
        True,
        6,
        "<Mine: loaded, 6 of 6 trajectories>",
    )
    assert table.statistics is not None
    assert table.statistics["x"].count == 21


def test_an_error_comes_out_of_wait_and_the_table_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "gear_loader"):
        table = load(Reader(broken=4), wait=False, payload=10_000, progress=False)
        assert table.loading is not None
        with pytest.raises(SourceError, match="Mine, episode 4: it is damaged"):
            table.loading.wait(60)
    assert "Loading ended after 3 trajectories of Mine: Mine, episode 4" in caplog.text
    check(table, 3)
    with pytest.raises(
        SourceError, match="holds others than the first of 6 of Mine; expected a table that was"
    ):
        load(Reader(lengths=LENGTHS + 1), table, resume=True, progress=False)
    check(table, 3)
    load(Reader(), table, resume=True, statistics=True, progress=False)
    check(table)
    assert table.statistics is not None
    assert table.statistics["x"].count == 21
    load(Reader(), table, resume=True, progress=False)  # nothing is missing
    check(table)
    with pytest.raises(SourceError, match="resume=True was given without a table"):
        load(Reader(), resume=True)


@pytest.mark.long
def test_it_is_cancelled_and_resumed_with_what_was_evicted() -> None:
    reader = Reader(pause=4)
    schema = reader.schema
    table = gear.Table.create(
        schema, max_steps=12, max_trajectories=2, memory=gear.Memory(payload=9999), on_full="evict_oldest"
    )
    load(reader, table, wait=False, progress=False)
    loading = table.loading
    assert loading is not None
    wait_until(lambda: loading.num_loaded == 3)
    threading.Timer(0.1, reader.go.set).start()
    loading.cancel()
    assert loading.done
    assert "cancelled" in repr(loading)
    loading.wait()
    load(Reader(), table, resume=True, progress=False)
    assert table.lengths().tolist() == [6, 1]
    assert table.stats().num_inserted == 6


def test_the_first_trajectories_that_fit() -> None:
    for most, count in ((4 * 10 + 3 * (16 + 32 + 16), 3), ("1GiB", 6)):
        with load(Reader(), max_bytes=most, progress=False) as table:
            check(table, count)
    with pytest.raises(SourceError, match="max_bytes=1 was given, and the first episode of Mine takes"):
        load(Reader(), max_bytes=1)


@pytest.mark.long
def test_a_killed_load_is_resumed(tmp_path: Path) -> None:
    name = f"test-killed-{os.getpid()}"
    program = f"""
        import sys, time
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        from test_background_loading import Reader, load, source_loading
        source_loading.BACKGROUND_BYTES = 1
        class Slow(Reader):
            def __iter__(self):
                for episode in super().__iter__():
                    time.sleep(0.2)
                    yield episode
        table = load(Slow(), wait=False, payload=10_000, name={name!r}, progress=False)
        while table.loading.num_loaded < 2:
            time.sleep(0.01)
        print("go", flush=True)
        table.loading.wait()
    """
    kill_after_go(program)
    with gear.Table.attach(name) as table:
        try:
            assert 2 <= len(table) < 6
            table.save(tmp_path / "part")
            load(Reader(), table, resume=True, progress=False)
            check(table)
            table.check_valid()
            with gear.Table.load(tmp_path / "part") as saved:
                load(Reader(), saved, resume=True, wait=False, progress=False)
                assert saved.loading is not None
                saved.loading.wait(60)
                check(saved)
        finally:
            table.unlink()


def test_a_table_smaller_than_a_piece_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_loading, "BACKGROUND_BYTES", 1 << 20)
    columns = {"x": gear.Column(torch.float32), "task": gear.Column(str, per="trajectory")}
    for wait in (False, True):
        with gear.Table.create(
            columns,
            max_steps=12,
            max_trajectories=2,
            memory=gear.Memory(payload=9999),
            on_full="evict_oldest",
        ) as table:
            load(Reader(), table, wait=wait, progress=False)
            if table.loading is not None:
                table.loading.wait(60)
            assert table.lengths().tolist() == [6, 1]


def test_nothing_is_missing() -> None:
    with load(Reader(), payload=10_000, progress=False) as table:
        load(Reader(), table, resume=True, wait=False, progress=False)
        assert table.loading is not None
        table.loading.wait(60)
        assert "loaded, 6 of 6" in repr(table.loading)


def test_a_generator_is_read_by_the_thread() -> None:
    """Without reading it to its end first; its errors are those of others, and the table keeps what was added."""
    go = threading.Event()

    def episodes(broken: bool) -> Iterator[dict[str, Any]]:
        for number, count in enumerate(LENGTHS.tolist()):
            if number == 4:
                assert go.wait(60)
                if broken:
                    raise ValueError("no more")
            yield {"x": np.full(count, number, np.float64), "task": f"task {number}"}

    for broken in (False, True):
        table = gear.Table.create(
            Reader().schema, max_steps=99, max_trajectories=9, memory=gear.Memory(payload=9999)
        )
        with table:
            go.clear()
            load(episodes(broken), table, wait=False, progress=False, statistics=True)
            loading = table.loading
            assert loading is not None
            wait_until(lambda loading=loading: loading.num_loaded == 3)
            assert (loading.num_trajectories, repr(loading)) == (
                None,
                "<The source: loading, 3 trajectories>",
            )
            go.set()
            if broken:
                with pytest.raises(
                    SourceError, match=r"The source raised ValueError at episode 4: no more\.$"
                ):
                    loading.wait(60)
                check(table, 3)
                continue
            loading.wait(60)
            check(table)
            assert repr(loading) == "<The source: loaded, 6 trajectories>"
            load(iter([{"y": np.ones(3)}]), table, wait=False, columns=["y"], progress=False)
            with pytest.raises(
                SourceError, match=r"The source gives the columns \['y'\]; the table has \['x', 'task'\]"
            ):
                table.loading.wait(60)  # type: ignore[union-attr]


def test_the_bytes_of_the_first_are_counted_where_only_all_are_told() -> None:
    """Of a reader that tells its payload: the first episodes have most of it."""

    class Told(Reader):
        def __iter__(self) -> Iterator[Episode]:
            for number, episode in enumerate(super().__iter__()):
                yield Episode({**episode, "task": "y" * (1000 if number < 2 else 1)})

    reader = Told()
    reader.payload = 2004
    with load(reader, max_bytes=1500, progress=False) as table:
        assert len(table) == 1
    with load(reader, max_bytes=2200, progress=False) as table:
        assert len(table) == 2
    with load(reader, max_bytes=4000, progress=False) as table:
        assert len(table) == 6


def several(count: int, **options: Any) -> list[gear.Table]:
    memory = gear.Memory(payload=9999)
    limits = {"max_steps": 99, "max_trajectories": 9, "memory": memory}
    return [gear.Table.create(Reader().schema, **{**limits, **options}) for _ in range(count)]


def tasks(tables: Sequence[gear.Table]) -> list[list[str]]:
    return [[table[i]["task"] for i in table.indices().tolist()] for table in tables]


def test_episodes_are_dealt_over_several_tables() -> None:
    """By one pass of the reader; what some of them have already is not added again."""
    dealt = [["task 0", "task 2", "task 4"], ["task 1", "task 3", "task 5"]]
    tables = several(2)
    reader = Reader(pause=4)
    first = load(reader, tables, wait=False, statistics=True, progress=False)
    loading = first.loading
    assert first is tables[0]
    assert loading is not None
    assert loading is tables[1].loading
    wait_until(lambda: loading.num_loaded == 3)
    assert repr(loading) == "<Mine: loading, 3 of 6 trajectories>"
    loading._stop()
    reader.go.set()
    loading.cancel()
    assert 3 <= sum(map(len, tables)) < 6
    load(Reader(), tables, resume=True, wait=False, statistics=True, progress=False)
    assert tables[0].loading is not None
    tables[0].loading.wait(60)
    assert tasks(tables) == dealt
    assert all(table.statistics is not None and table.statistics["x"].count == 21 for table in tables)
    with pytest.raises(SourceError, match="holds others than the first of 3 of Mine"):
        load(Reader(), tables[::-1], resume=True, progress=False)
    load(Reader(), whole := several(2), progress=False)
    assert tasks(whole) == dealt
    with gear.distributed.Shards(several(2)) as shards:
        load(Reader(), shards, progress=False)
        assert tasks(list(shards.own.values())) == dealt
        with pytest.raises(SourceError, match=r"shard=\(0, 2\) was given with Shards"):
            load(Reader(), shards, shard=(0, 2))


def test_a_rank_of_shards_takes_its_part() -> None:
    """What `Shards` tell of a rank of three; a stage without columns of its own has no table to fill."""
    (table,) = several(1)
    load(Reader(), SimpleNamespace(own={1: table}, num_shards=3), progress=False)
    assert tasks([table]) == [["task 2", "task 3"]]
    with pytest.raises(SourceError, match="on a rank that holds the columns of a later stage"):
        load(Reader(), SimpleNamespace(own={}, num_shards=3), progress=False)


def test_an_error_leaves_several_tables_as_they_were() -> None:
    tables = several(2)
    tables[1].add({"x": np.ones(1, np.float32), "task": "own"})
    with pytest.raises(SourceError, match="Mine, episode 5: it is damaged"):
        load(Reader(broken=5), tables, progress=False)
    assert tasks(tables) == [[], ["own"]]
    for given, problem in (
        ([], "expected a gear_loader.Table, a list of them"),
        ([tables[0], 3], "expected a gear_loader.Table, a list of them"),
        ([tables[0], tables[0]], "with the same table twice"),
        (several(7), "7 tables were given, and Mine has 6 episodes; expected more"),
        (
            [
                tables[0],
                gear.Table.create({"x": gear.Column(torch.float32)}, max_steps=9, max_trajectories=9),
            ],
            "Table 1",
        ),
    ):
        with pytest.raises(SourceError, match=problem):
            load(Reader(), given, progress=False)
