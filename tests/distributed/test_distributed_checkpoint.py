"""Checkpoints of several ranks: loaded by any number of ranks; no trajectory is lost or duplicated when one dies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import xxhash
from cases import mostly_long
from checkpoint_common import CALLS, SIZES, contents, draw, dying, everything, files, flip, link, make
from options_common import nested_table
from table_common import COLUMNS, Died, bits, fresh_name, rows

import gear_loader as gear
from gear_loader.checkpoint import loading, saving
from gear_loader.checkpoint.sharded_loading import assign_ranks, split_counts
from gear_loader.distributed import checkpoint_loading, checkpoint_saving
from gear_loader.distributed.checkpoint_ranks import CheckpointRanks
from gear_loader.distributed.checkpoint_saving import save
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.topology import MeshCoordinates
from gear_loader.errors import CheckpointError, RankError, RegionError
from gear_loader.storage.counters import NEXT_SEQUENCE

MonkeyPatch = pytest.MonkeyPatch
PATIENCE = 60.0
SCHEMA = {**COLUMNS, "odd": gear.Column(torch.uint8, (13,)), "half": gear.Column(torch.bfloat16)}
Table = gear.Table


class Meeting:
    """The all-gather of ranks that are threads of this process; it fails on all ranks once one of them has died."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._said: list[str] = [""] * size

    def wait(self) -> None:
        self._barrier.wait(PATIENCE)

    def leave(self) -> None:
        self._barrier.abort()

    def share(self, rank: int, said: Any) -> list[Any]:
        self._said[rank] = json.dumps(said)
        self.wait()
        answers = [json.loads(text) for text in self._said]
        self.wait()
        return answers


@dataclasses.dataclass
class Member(SingleProcess):
    """A rank's end of a meeting, in place of an `Exchange`; without one, all ranks answer as this one does."""

    rank: int
    size: int
    meeting: Meeting | None = None

    def share(self, data: Any) -> list[Any]:
        try:
            return [data] * self.size if self.meeting is None else self.meeting.share(self.rank, data)
        except threading.BrokenBarrierError as error:
            raise RankError("This rank lost the other ranks.") from error

    def barrier(self) -> None:
        self.share({})

    @property
    def ranks_of_checkpoint(self) -> CheckpointRanks:
        return CheckpointRanks(self, [MeshCoordinates(rank, 0) for rank in range(self.size)])


def load(path: Any, rank: int, size: int, meeting: Meeting | None = None, **options: Any) -> gear.Table:
    """`checkpoint_loading.load` of a rank, with all options by name."""
    member = Member(rank, size, meeting)
    return checkpoint_loading.load(path, loading.LoadOptions(**options), member.ranks_of_checkpoint)


def together(size: int, act: Callable[[int, Meeting], Any]) -> list[Any]:
    """What each rank's call returns or raises."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank, meeting)
        except Exception as error:
            results[rank] = error
        except Died as error:
            results[rank] = error
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    return results


def save_all(tables: list[Table], path: Path) -> list[Any]:
    """What each rank's `save` returns or raises."""
    size = len(tables)
    return together(size, lambda rank, m: save(tables[rank], path, Member(rank, size, m).ranks_of_checkpoint))


def load_all(path: Path, size: int, name: str | None = None, **options: Any) -> list[Any]:
    """What each rank's `load` returns or raises."""

    def act(rank: int, meeting: Meeting) -> Table:
        named = {} if name is None else {"name": f"{name}.{rank}"}
        return load(path, rank, size, meeting, **named, **options)

    return together(size, act)


@contextlib.contextmanager
def closing(tables: list[Any]) -> Iterator[list[Table]]:
    try:
        for table in tables:
            if isinstance(table, BaseException):
                raise table
        yield tables
    finally:
        for table in tables:
            if isinstance(table, Table):
                table.close()


def loaded(path: Path, size: int, **options: Any) -> contextlib.AbstractContextManager[list[Table]]:
    return closing(load_all(path, size, **options))


def saved(tables: list[Table], path: Path) -> None:
    assert save_all(tables, path) == [None] * len(tables)


def steps_of(number: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    odd = torch.randint(0, 256, (length, 13), dtype=torch.uint8, generator=generator)
    return {**rows(number, length), "odd": odd, "half": torch.randn(length, generator=generator).bfloat16()}


def create(rank: int, schema: Any = SCHEMA, **options: Any) -> Table:
    sizes: dict[str, Any] = {"max_steps": 900, "max_trajectories": 60, "block_steps": 4, **options}
    table = Table.create(schema, **nested_table(sizes))
    table.set_origin(rank)
    return table


@contextlib.contextmanager
def shards(size: int = 4) -> Iterator[list[Table]]:
    """Tables of uneven trajectories, one without any, one with ids of others, each with a history."""
    generator = np.random.default_rng(0)
    with closing([create(rank) for rank in range(size)]) as tables:
        for rank, table in enumerate(tables):
            if rank == 2:
                continue
            for i in range(10 + 3 * rank):
                length = int(generator.integers(1, 40)) if i % 5 else 1
                number = 100 * rank + i
                ids = [(500 + i) << 16 | 9] if rank == 1 and i % 3 == 0 else [-1]
                priority = None if i % 4 == 0 else float(number)
                table.extend_as([steps_of(number, length)], ids=ids, priority=priority)
            draw(table, 4)
            draw(table, 2)
            table.remove(table.indices()[[3, 5]])
            slots = table.indices()
            table._engine.region.array("created")[slots] -= (slots + rank) * 1_000 * 10**9
        yield tables


def by_id(tables: list[Table]) -> dict[int, dict[str, Any]]:
    """Everything of each trajectory; fails if one is there twice."""
    found: dict[int, dict[str, Any]] = {}
    for table in tables:
        table.check_valid()
        slots = table.indices()
        _, ages = table._engine.reader().ages(slots, table._engine.region.array("sequence")[slots])
        for i, (name, slot) in enumerate(zip(ids_of(table), slots.tolist(), strict=True)):
            assert name not in found, f"the trajectory {name} is there twice"
            found[name] = {
                "contents": {key: bits(value) for key, value in table[slot].items()},
                "priority": float(table._engine.reader().arrays.priority[slot]),
                "times_sampled": int(table._engine.region.array("sampled")[slot]),
                "age": round(ages[i] / 1e9 / 500) * 500,
            }
    return found


def ids_of(table: Table) -> list[int]:
    return [int(i) for i in table.ids(table.indices())]


def read_in_chunks(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CHUNK_BYTES", 4096)


# Round trips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "chunks"), mostly_long([(4, True), (2, True), (1, False), (6, False)], (2, True), (6, False))
)
def test_saved_by_four_and_loaded_by_others(
    tmp_path: Path, size: int, chunks: bool, monkeypatch: MonkeyPatch
) -> None:
    if chunks:
        read_in_chunks(monkeypatch)
    with shards() as tables:
        before = by_id(tables)
        stats = [table.stats() for table in tables]
        saved(tables, tmp_path / "four")
    with loaded(tmp_path / "four", size) as others:
        assert by_id(others) == before
        _check_tables(others, before)
        for name in ("num_inserted", "num_sampled"):
            assert sum(getattr(t.stats(), name) for t in others) == sum(getattr(one, name) for one in stats)
        for rank, table in enumerate(others):
            for i in range(3):
                table.extend_as([steps_of(1000 + 10 * rank + i, 2)], ids=[-1])
        more = by_id(others)
        assert len(more) == len(before) + 3 * size
        saved(others, tmp_path / "others")
        saved(others, tmp_path / "others")
    with loaded(tmp_path / "others", 4) as back:
        assert by_id(back) == more


@pytest.mark.parametrize("size", [2, 4])
def test_groups_that_other_ranks_load(tmp_path: Path, size: int) -> None:
    """Also where some of a group come to one rank, and others to another, without the first that was written."""
    columns = {"number": gear.Column(torch.int64), "words": gear.Column(torch.int64, (None,))}
    schema = {**columns, "text": gear.Column(str, per="group")}
    with closing([create(rank, schema, payload="32KiB", prefixes=True) for rank in range(2)]) as tables:
        for rank, table in enumerate(tables):
            for group in range(3):
                number = 100 * rank + 10 * group
                words = [np.arange(each % 5) for each in range(number, number + 20)]
                given = {"number": number + np.arange(20), "words": words}
                first = table.add({**given, "text": f"prompt {number} " * 9})
                rest = [{"number": np.arange(2) + i, "words": words[i : i + 2]} for i in range(5)]
                table.extend(rest, prefix=first, prefix_steps=17)
                if group == 1:
                    table.remove(first)
        before = by_id(tables)
        saved(tables, tmp_path / "two")
    with loaded(tmp_path / "two", size) as others:
        found = by_id(others)
        assert {name: each["contents"] for name, each in found.items()} == {
            name: each["contents"] for name, each in before.items()
        }
        used = sum(table.stats().value_resident_bytes for table in others)
        assert used < size * 6 * (9 * 11 + 20 * 2 * 8 + 200)
        for table in others:
            table.add(
                {"number": np.arange(1), "words": words[:1]}, prefix=int(table.indices()[0]), prefix_steps=9
            )
            table.check_valid()


def _check_tables(tables: list[Table], before: dict[int, Any]) -> None:
    steps = [table.num_steps for table in tables]
    if len(tables) != 4:
        assert max(steps) - min(steps) <= 40, "the longest trajectory"
    for rank, table in enumerate(tables):
        assert table.origin == rank
        if len(tables) != 4:
            assert ids_of(table) == sorted(ids_of(table))
            slots = table.indices()
            came_after, _ = table._engine.reader().ages(slots, table._engine.region.array("sequence")[slots])
            assert came_after.tolist() == list(range(len(table)))[::-1]
            assert table._engine.region.array("counters")[NEXT_SEQUENCE] > max(before) >> 16
        layout = table._engine.region.layout
        assert layout.max_steps >= -(-4 * 900 // len(tables))
        assert layout.max_trajectories == -(-4 * 60 // len(tables))
        assert layout.num_blocks >= -(-4 * tables[0]._engine.region.layout.num_blocks // 4 // len(tables))


def test_as_many_ranks_get_their_own_tables_back(tmp_path: Path) -> None:
    with shards() as tables:
        saved(tables, tmp_path / "a")
        before = [(contents(table), ids_of(table)) for table in tables]
    with loaded(tmp_path / "a", 4) as others:
        assert [(contents(table), ids_of(table)) for table in others] == before
        for table, (known, ids) in zip(others, before, strict=True):
            table.add(steps_of(5, 3))
            assert ids_of(table) == [*ids, known["next_sequence"] << 16 | table.origin]
    with closing([create(rank) for rank in (2, 0, 7)]) as tables:  # shard numbers that are not the ranks
        for i, table in enumerate(tables):
            table.extend([steps_of(10 * i + j, 3 + j) for j in range(3 + i)])
        known_ids, own = by_id(tables), [ids_of(table) for table in tables]
        saved(tables, tmp_path / "b")
    with loaded(tmp_path / "b", 3) as others:
        assert [ids_of(table) for table in others] == own
        assert [table.origin for table in others] == [0, 1, 2]
        for table in others:
            table.add(steps_of(77, 3))
        found = by_id(others)
        assert {i: one for i, one in found.items() if i in known_ids} == known_ids
        assert len(found) == len(known_ids) + 3


def test_a_single_rank_without_a_shard_number_and_empty_tables(tmp_path: Path) -> None:
    with make() as table:
        table.extend([rows(0, 3), rows(1, 3)])
        saved([table], tmp_path / "a")
    with load(tmp_path / "a", 0, 1) as copy:
        assert (ids_of(copy), copy.origin) == ([0, 1 << 16], 0)
    with closing([load(tmp_path / "a", rank, 2) for rank in range(2)]) as others:
        assert sorted(by_id(others)) == [0, 1 << 16]
    with closing([create(rank) for rank in range(2)]) as tables:
        saved(tables, tmp_path / "b")
    for size in (1, 2, 3):
        with loaded(tmp_path / "b", size) as others:
            assert by_id(others) == {}
            others[-1].add(steps_of(0, 3))


def test_each_rank_reads_what_it_needs(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CHUNK_BYTES", 4096)
    with Table.create(
        {"x": gear.Column(torch.int64, (8,))}, max_steps=20_000, max_trajectories=2000
    ) as table:
        table.extend([{"x": torch.full((10, 8), i)} for i in range(2000)])
        saved([table], tmp_path)
    read: dict[str, int] = {}
    genuine = loading.read_columns

    def counting(directory: Any, reads: Any, ids: Any, **options: Any) -> None:
        genuine(directory, reads, ids, **options)
        read[threading.current_thread().name] = sum(size for each in reads for _, _, size in each.tasks())

    monkeypatch.setattr(loading, "read_columns", counting)
    with loaded(tmp_path, 4) as others:
        assert sum(len(table) for table in others) == 2000
    amounts, size = [read[f"rank {rank}"] for rank in range(4)], 2000 * 10 * 64
    assert max(amounts) < 0.4 * size, "a quarter of the file, and the chunks at the ends of runs"
    assert sum(amounts) >= size


def test_sizes_that_are_given_and_rules(tmp_path: Path) -> None:
    limiter = gear.SampleToInsertRatio(2.0, min_size=25, error_buffer=300)
    options: dict[str, Any] = {"on_full": "evict_oldest", "rate_limiter": limiter, "max_age": 1e9}
    with closing([create(rank, **options) for rank in range(4)]) as tables:
        for table in tables:
            table.extend([steps_of(i, 3) for i in range(5)])
        rules = tables[0].rules
        saved(tables, tmp_path)
    for size in (4, 2, 12):
        with loaded(tmp_path, size) as others:
            assert all(table.rules == rules for table in others)
            assert all(table._engine.region.layout.max_trajectories >= 25 for table in others)
    with loaded(tmp_path, 2, max_steps=5000, max_trajectories=333, block_steps=8) as others:
        for table in others:
            layout = table._engine.region.layout
            assert (layout.max_steps, layout.max_trajectories, layout.block_steps) == (5000, 333, 8)
            assert layout.num_blocks == (5000 + 333 * 7) // 8
    with loaded(tmp_path, 2, max_blocks=4000, on_full="wait") as others:
        assert [(t._engine.region.layout.num_blocks, t.on_full) for t in others] == [(4000, "wait")] * 2
    for message in refused(tmp_path, 2, max_steps=10):
        assert re.search(r"needs max_steps=\d+ \(with blocks of 4 steps\); 10 was given", message)


def _segments(path: Path) -> dict[str, int]:
    """Rank, segment and column -> inode."""
    found = path.glob("saves/*/*/segments/*/*.npy")
    return {"/".join((file.parts[-4], *file.parts[-2:])): file.stat().st_ino for file in found}


@pytest.mark.parametrize("links", [True, False])
def test_what_has_not_changed_is_not_written_again(
    tmp_path: Path, links: bool, monkeypatch: MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise PermissionError(1, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with shards() as tables:
        saved(tables, tmp_path)
        first = _segments(tmp_path)
        tables[1].add(steps_of(900, 5))
        before = by_id(tables)
        saved(tables, tmp_path)
        second = _segments(tmp_path)
    assert len(os.listdir(tmp_path / "saves")) == 1
    assert set(second) > set(first)
    assert {name.split("/")[0] for name in set(second) - set(first)} == {"00001"}
    assert (first.items() <= second.items()) == links
    for size in (4, 2):
        with loaded(tmp_path, size) as others:
            assert by_id(others) == before
            saved(others, tmp_path)
        if size == 4:
            assert (second.items() <= _segments(tmp_path).items()) == links
    assert sorted(os.listdir(next((tmp_path / "saves").iterdir()))) == ["00000", "00001"]
    with loaded(tmp_path, 3) as others:
        assert by_id(others) == before
    assert not [name for name in files(tmp_path) if name.endswith(".part")]


def test_a_previous_save_that_is_damaged_is_not_used(tmp_path: Path) -> None:
    with shards() as tables:
        saved(tables, tmp_path)
        flip(next(tmp_path.glob("saves/*/00001/manifest.json")), 100)
        before = by_id(tables)
        saved(tables, tmp_path)
    with loaded(tmp_path, 2) as others:
        assert by_id(others) == before


# Ranks that fail and die -----------------------------------------------------------------------------


FAILING = [("save_table", 0), ("save_table", 1), ("write_shards", 0), ("check_shards_directory", 0)]


@pytest.mark.parametrize(("where", "bad"), FAILING)
def test_a_rank_that_fails(tmp_path: Path, where: str, bad: int, monkeypatch: MonkeyPatch) -> None:
    with shards(3) as tables:
        saved(tables, tmp_path)
        before = by_id(tables)
        names = set(files(tmp_path))
        tables[0].add(steps_of(700, 5))
        genuine = getattr(checkpoint_saving, where)

        def fail(*args: Any, **options: Any) -> Any:
            if threading.current_thread().name == f"rank {bad}":
                raise OSError(28, "No space left on device", "/somewhere")
            return genuine(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_saving, where, fail)
            found = save_all(tables, tmp_path)
        for rank, error in enumerate(found):
            assert isinstance(error, CheckpointError if rank == bad else RankError)
            assert "/somewhere cannot be written: No space left on device" in str(error)
            assert rank == bad or re.match(rf"Rank {bad} could not .*: /somewhere cannot", str(error))
        with loaded(tmp_path, 2) as others:
            assert by_id(others) == before
        if where != "write_shards":
            assert set(files(tmp_path)) == names, "nothing is left of it"
        saved(tables, tmp_path)
        with loaded(tmp_path, 2) as others:
            assert by_id(others) == by_id(tables)
        assert len(os.listdir(tmp_path / "saves")) == 1


def test_a_rank_that_does_not_hear_the_answers(tmp_path: Path) -> None:
    """It gives up, but rank 0 has heard it, and completes the checkpoint: so its files have to stay."""

    def act(rank: int, meeting: Meeting) -> None:
        class Deaf(Member):
            def share(self, data: Any) -> list[Any]:
                answers = super().share(data)
                if rank == 1 and self.doing == "is to save its table":
                    deadline = time.monotonic() + PATIENCE
                    while not (tmp_path / "shards.json").exists() and time.monotonic() < deadline:
                        time.sleep(0.01)
                    meeting.leave()
                    raise RankError("This rank lost the other ranks.")
                return answers

        save(tables[rank], tmp_path, Deaf(rank, 2, meeting).ranks_of_checkpoint)

    with shards(2) as tables:
        for error in together(2, act):
            assert isinstance(error, RankError)
            assert "lost the other ranks" in str(error)
        with loaded(tmp_path, 2) as others:
            assert by_id(others) == by_id(tables)


def test_a_rank_that_dies_while_all_load(path: Path, monkeypatch: MonkeyPatch) -> None:
    genuine, name, read = checkpoint_loading.load_share, fresh_name(), threading.Event()

    def fatal(*args: Any) -> Any:
        if args[2].counters.origin == 1:
            assert read.wait(PATIENCE)
            raise Died
        table = genuine(*args)
        read.set()
        return table

    monkeypatch.setattr(checkpoint_loading, "load_share", fatal)
    found = load_all(path, 2, name)
    assert isinstance(found[0], RankError)
    assert "lost the other ranks" in str(found[0])
    with pytest.raises(RegionError):
        Table.attach(f"{name}.0")


def calls_of(rank: int) -> Callable[[tuple[Any, ...]], bool]:
    """Which calls of the system are those of one rank, or of a thread that writes its files: by their arguments."""

    def counts(args: tuple[Any, ...]) -> bool:
        name = threading.current_thread().name
        if name.startswith("rank "):
            return name == f"rank {rank}"
        with contextlib.suppress(OSError):
            return isinstance(args[0], int) and f"/{rank:05d}/" in os.readlink(f"/proc/self/fd/{args[0]}")
        return False

    return counts


POINTS = [(victim, first, every) for every in (6, 1) for first in (True, False) for victim in (0, 1)]


@pytest.mark.parametrize(
    ("victim", "first", "every"), mostly_long(POINTS, (1, True, 6), (0, False, 6), sample=3)
)
def test_dying_at_every_call_of_the_system(tmp_path: Path, victim: int, first: bool, every: int) -> None:
    columns = {"x": gear.Column(torch.int32), "y": gear.Column(torch.uint8, (3,))}
    path = tmp_path / "ck"

    def trajectory(number: int) -> dict[str, Any]:
        return {"x": torch.arange(number, number + 5).int(), "y": torch.full((5, 3), number % 256).byte()}

    tables = [create(rank, columns, max_steps=100, max_trajectories=20) for rank in range(2)]
    with closing(tables):
        for rank, table in enumerate(tables):
            table.extend([trajectory(10 * rank + i) for i in range(3)])
        before = None
        if not first:
            saved(tables, path)
            before = by_id(tables)
            for rank, table in enumerate(tables):
                table.extend([trajectory(100 + rank)])
        after = by_id(tables)
        seen, deaths, died = set(), -every, True
        while died and "after" not in seen:
            deaths += every
            with dying(deaths, CALLS, calls_of(victim)):
                found = save_all(tables, path)
            died, other = isinstance(found[victim], Died), found[1 - victim]
            assert other is None or (isinstance(other, RankError) and died)
            assert other is None or "lost the other ranks" in str(other)
            assert not any(table._engine.region.array("readers")[:, 2].any() for table in tables)
            if before is None and not (path / "shards.json").exists():
                seen.add("before")
            else:
                with loaded(path, 2) as others:
                    now = by_id(others)
                assert now in (before, after)
                seen.add("before" if now == before else "after")
            assert other is not None or "after" in seen, "the save was said to be complete"
        assert seen == {"before", "after"}
        assert deaths > 25 - every
        saved(tables, path)
        assert len(os.listdir(path / "saves")) == 1
        assert not [name for name in files(path) if name.endswith(".part")]
        with loaded(path, 3) as others:
            assert by_id(others) == after


# Damage ----------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with shards(3) as tables:
        saved(tables, tmp_path / "ck")
    return tmp_path / "ck"


def refused(path: Path, size: int, **options: Any) -> list[str]:
    """The errors of all ranks; no table is left."""
    name = fresh_name()
    found = load_all(path, size, name, **options)
    for rank in range(size):
        assert isinstance(found[rank], (CheckpointError, RankError)), found[rank]
        with pytest.raises(RegionError):
            Table.attach(f"{name}.{rank}")
    assert any(isinstance(one, CheckpointError) for one in found)
    return [str(one) for one in found]


@pytest.mark.parametrize(
    ("size", "chunks"), mostly_long([(3, False), (2, True), (7, True)], (3, False), (2, True))
)
def test_damage_is_found_by_all(path: Path, size: int, chunks: bool, monkeypatch: MonkeyPatch) -> None:
    if chunks:
        read_in_chunks(monkeypatch)
        with loaded(path, 3) as tables:
            shutil.rmtree(path)
            saved(tables, path)
    inner = ("manifest.json", "index.*.records", "segments/000001/odd.npy", "segments/000001/checksums.xxh3")
    for pattern in ("shards.json", *(f"saves/*/00001/{name}" for name in inner)):
        (file,) = path.glob(pattern)
        data = file.read_bytes()
        place = len(data) - 200 if len(data) > 400 else len(data) // 2
        if file.suffix == ".records":  # its end is of no trajectory
            place = 100
        for damaged in (data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], data[:place], None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            messages = refused(path, size)
            assert all(str(file) in m or file.name == "shards.json" for m in messages), messages
            assert all(str(path) in message for message in messages)
        file.write_bytes(data)
    with loaded(path, size) as others:
        assert len(others) == size


@pytest.mark.parametrize("size", [3, 2])
def test_a_shard_of_another_save(path: Path, tmp_path: Path, size: int) -> None:
    (shard,) = path.glob("saves/*/00001")
    shutil.copytree(shard, tmp_path / "old")
    with loaded(path, 3) as tables:
        tables[1].add(steps_of(1, 3))
        saved(tables, path)
    (shard,) = path.glob("saves/*/00001")
    shutil.rmtree(shard)
    shutil.copytree(tmp_path / "old", shard)
    messages = refused(path, size)
    expected = f"{shard / 'manifest.json'} is not the one that {path / 'shards.json'} names: it has "
    assert all(expected in message for message in messages)
    assert "It is damaged, or of another save." in messages[1]


def _rewrite(path: Path, value: Any, *keys: Any) -> None:
    """Another value in the manifest, with a checksum that fits."""
    fields = inner = json.loads((path / "shards.json").read_bytes())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    fields["checksum"] = "0" * 32
    data = json.dumps(fields).encode()
    (path / "shards.json").write_bytes(data.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(data).encode(), 1))


def test_every_field_of_the_manifest_is_checked(path: Path) -> None:
    data = (path / "shards.json").read_bytes()
    fields = json.loads(data)
    places: list[tuple[Any, ...]] = [(key,) for key in fields if key != "checksum"]
    for keys in [*places, *(("shards", 1, key) for key in fields["shards"][1])]:
        for value in (None, -1, 2**70, 1.5, True, "1", "../up", [], {}, [{}]):
            _rewrite(path, value, *keys)
            with pytest.raises(CheckpointError, match=re.escape(str(path))):
                load(path, 1, 3)
            (path / "shards.json").write_bytes(data)
    _rewrite(path, 2, "version")
    expected = "has checkpoint version 2; this version of Gear Loader reads version 1. Use the one that"
    assert expected in refused(path, 2)[0]


# What is refused -------------------------------------------------------------------------------------


def test_tables_that_do_not_fit_together(tmp_path: Path) -> None:
    with closing([create(0), create(1), create(1)]) as tables:
        for error in save_all(tables, tmp_path / "ck"):
            assert isinstance(error, CheckpointError)
            assert "The tables of ranks 1 and 2 both have the shard number 1" in str(error)
    with closing([create(0), create(1, COLUMNS, **SIZES)]) as tables:
        for error in save_all(tables, tmp_path / "ck"):
            assert isinstance(error, CheckpointError)
            assert "The tables of ranks 0 and 1 have different schemas: Schema({" in str(error)
    assert not (tmp_path / "ck" / "shards.json").exists()
    with closing([create(0), create(1)]) as tables:
        saved(tables, tmp_path / "ck")


def test_tables_that_only_as_many_ranks_can_load(tmp_path: Path) -> None:
    with closing([create(0), create(1, max_age=1e6)]) as tables:
        saved(tables, tmp_path / "a")
    with loaded(tmp_path / "a", 2) as others:
        assert [table.rules.max_age for table in others] == [None, 1e6]
    messages = refused(tmp_path / "a", 3)
    assert all("The tables of ranks 0 and 1" in m and "have different rules: Rules(" in m for m in messages)
    assert "Load it with 2 ranks, as it was saved." in messages[0]
    one = 77 << 16 | 9
    with closing([create(0), create(1)]) as tables:
        for table in tables:
            table.extend_as([steps_of(1, 3)], ids=[one])
        saved(tables, tmp_path / "b")
    with loaded(tmp_path / "b", 2) as others:
        assert [ids_of(table) for table in others] == [[one]] * 2
    expected = f"The tables of ranks 0 and 1 in {tmp_path / 'b'} both hold the trajectory {one}. Load it with"
    assert expected in refused(tmp_path / "b", 1)[0]


def test_other_directories_and_schemas(tmp_path: Path, path: Path) -> None:
    messages = refused(path, 2, schema=COLUMNS)
    assert all("holds tables with the schema Schema({" in message for message in messages)
    with loaded(path, 2, schema=SCHEMA) as others:
        assert len(others) == 2
    with create(0) as table:
        table.save(tmp_path / "single")
        with pytest.raises(CheckpointError, match=r"it has no shards\.json\. Give the"):
            load(tmp_path / "single", 0, 1)
        (error,) = save_all([table], tmp_path / "single")
        assert "holds '.gear-loader.lock' and no shards.json: it is no checkpoint of several" in str(error)
        with pytest.raises(CheckpointError, match=r"is a checkpoint of several tables: it has shards\.json"):
            Table.load(path)
        with pytest.raises(CheckpointError, match=r"and no manifest\.json: it is no checkpoint"):
            table.save(path)
        (tmp_path / "file").write_text("")
        (error,) = save_all([table], tmp_path / "file")
        assert "is a file; expected a directory" in str(error)


def test_a_save_between_looking_and_reading(path: Path, monkeypatch: MonkeyPatch) -> None:
    """All ranks read the new one then."""
    genuine, done = checkpoint_loading.load_share, []

    def late(*args: Any) -> Any:
        if args[2].counters.origin == 1 and not done:
            done.append(True)
            with loaded(path, 3) as tables:
                tables[2].add(steps_of(4321, 3))
                saved(tables, path)
        return genuine(*args)

    monkeypatch.setattr(checkpoint_loading, "load_share", late)
    with loaded(path, 2) as others:
        numbers = {int(table[int(slot)]["number"][0]) for table in others for slot in table.indices()}
    assert 4321 in numbers


# Symbolic links --------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    for name in ("00000", "00001", "000001"):
        (folder / name).mkdir(parents=True)
        (folder / name / "step.npy").write_text("theirs")
    return folder


LINKS = ["saves", "saves/*", "saves/*/00001", "saves/*/00001/segments", "saves/*/00001/segments/*"]
LINKS += [".gear-loader.lock", "shards.json", "shards.json.part"]


@pytest.mark.parametrize("pattern", mostly_long(LINKS, "saves", *LINKS[2:4], *LINKS[5:]))
def test_a_directory_or_a_file_that_is_a_link(
    tmp_path: Path, path: Path, elsewhere: Path, pattern: str
) -> None:
    theirs, aside, is_file = everything(elsewhere), tmp_path / "aside", not pattern.startswith("saves")
    with loaded(path, 3) as tables:
        place = path / pattern if is_file else next(path.glob(pattern))
        target = tmp_path / "nowhere" if is_file else elsewhere
        if place.exists():
            shutil.move(place, aside)
        place.symlink_to(target)
        ours = everything(path)
        tables[0].add(steps_of(7, 3))
        errors = save_all(tables, path)
        message = f"{place} is a symbolic link to {target}; "
        assert sum(isinstance(error, CheckpointError) and message in str(error) for error in errors) == 1
        assert all(isinstance(error, (CheckpointError, RankError)) for error in errors)
        assert (everything(elsewhere), everything(path), target.exists()) == (theirs, ours, not is_file)
        if not is_file:
            with pytest.raises(CheckpointError, match=re.escape(message)):
                load(path, 1, 3)
        place.unlink()
        if aside.exists():
            shutil.move(aside, place)
        saved(tables, path)
        with loaded(path, 2) as others:
            assert by_id(others) == by_id(tables)


def test_foreign_files_in_old_saves_stay(path: Path, elsewhere: Path) -> None:
    theirs = everything(elsewhere)
    with loaded(path, 3) as tables:
        first = next((path / "saves").iterdir())
        (first / "00000" / "mine").symlink_to(elsewhere)
        (first / "notes.txt").write_text("mine")
        saved(tables, path)
        saved(tables, path)
        assert sorted(everything(first)) == ["00000", "00000/mine", "notes.txt"]
        assert everything(elsewhere) == theirs
        with loaded(path, 2) as others:
            assert by_id(others) == by_id(tables)


def test_a_stage_that_is_a_link(tmp_path: Path, elsewhere: Path) -> None:
    """Where a pipeline has several stages, each has a directory of its own in the checkpoint's."""
    theirs = everything(elsewhere)
    ranks = CheckpointRanks(Member(1, 2), [MeshCoordinates(0, 0), MeshCoordinates(0, 1)])
    options = loading.LoadOptions()
    with make() as table:
        table.add(rows(0, 5))
        save(table, tmp_path / "ck", ranks)
        with checkpoint_loading.load(tmp_path / "ck", options, ranks) as copy:
            assert len(copy) == 1
        place = tmp_path / "ck" / "stage-1"
        link(place, elsewhere)
        message = re.escape(f"{place} is a symbolic link to {elsewhere}; ")
        with pytest.raises(CheckpointError, match=message):
            save(table, tmp_path / "ck", ranks)
        with pytest.raises(CheckpointError, match=message):
            checkpoint_loading.load(tmp_path / "ck", options, ranks)
    assert everything(elsewhere) == theirs


# Dealing ---------------------------------------------------------------------------------------------


@hypothesis.given(
    st.lists(st.one_of(st.integers(1, 5), st.integers(1, 3000)), max_size=300), st.integers(1, 9)
)
def test_dealing(lengths: list[int], size: int) -> None:
    values = np.array(lengths, dtype=np.int64)
    ranks = assign_ranks(values, size)
    assert ranks.shape == values.shape
    assert ((ranks >= 0) & (ranks < size)).all()
    steps = np.bincount(ranks, weights=values, minlength=size)
    assert steps.max() - steps.min() <= max(lengths, default=0)
    assert assign_ranks(values.copy(), size).tolist() == ranks.tolist()


def test_dealing_keeps_neighbours_together() -> None:
    ranks = assign_ranks(np.random.default_rng(0).integers(1, 1000, 100_000), 8)
    assert (np.diff(ranks) != 0).sum() < 2000
    some = np.bincount(ranks, weights=np.arange(100_000) < 50_000, minlength=8)
    assert some.min() > 3000, "of every age some"


@hypothesis.given(st.integers(0, 2**62), st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
def test_split_counts(total: int, weights: list[int]) -> None:
    parts = split_counts(total, weights)
    assert sum(parts) == total
    weights = weights if any(weights) else [1] * len(weights)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * sum(weights) - total * weight) < 2 * sum(weights)
