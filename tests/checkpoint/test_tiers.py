"""Tables whose trajectories beyond the memory lie on disk: they equal a table that fits, bit for bit."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested, nested_table
from table_common import fresh_name
from tier_common import (
    COLUMNS,
    NEVER,
    SIZES,
    WINDOWS,
    batch_bits,
    everything,
    final,
    fitting,
    rows,
    spill,
    tiered,
)
from waiting_common import wait_until

import gear_loader as gear
from gear_loader import cli, doctor, top
from gear_loader.checkpoint import saving, spilling, tier_reader
from gear_loader.errors import SchemaError, TableFullError
from gear_loader.storage import stats as stats_module
from gear_loader.storage import tier_counts, tier_state
from gear_loader.storage.disk import Tier
from gear_loader.storage.disk_copies import copies_of
from gear_loader.storage.shared_memory import region_path

PATIENCE = 60.0  # seconds for what takes milliseconds


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {"batch_size": 8, "windows": WINDOWS, "device": "cpu", "seed": 5, "prefetch": 0}
    return gear.ReplayDataset(table, **nested({**given, **options}))


def add(table: gear.Table, number: int, length: int) -> int:
    ends = final(number, length) if number % 3 == 0 else None
    return table.add(rows(number, length), priority=float(number % 5), final=ends)


def test_rows_of_packed_batches_are_counted(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=200) as table:
        for number in range(20):
            table.add(rows(number, 12))
        table.save(tmp_path)
        spill(table, range(8))
        before = table.stats()
        windows = {"number": gear.Whole(), "value": gear.Whole()}
        data = dataset(
            table, windows=windows, layout="packed", sampler=gear.Uniform(replacement=False), batch_size=5
        )
        for _ in range(4):
            data.sample()
        after = table.stats()
        hits, misses = after.num_hits - before.num_hits, after.num_misses - before.num_misses
        assert hits + misses == 20
        assert misses > 0
        assert after.miss_bytes > before.miss_bytes


@pytest.mark.parametrize("every", [1, 2, 1000])
def test_what_is_not_in_the_page_cache_is_read_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The first try finds only some of the pieces."""
    original = tier_reader.file_reads.read_pieces

    def some(reads: Any, done: Any, cached: bool) -> None:
        which = slice(0, None, every if cached else 1)
        found = done[which].copy()
        original(reads[which].copy(), found, False)
        done[which] = found

    with fitting() as whole, tiered(tmp_path) as table:
        for number in range(40):
            add(table, number, 1 + number * 7 % 23)
            add(whole, number, 1 + number * 7 % 23)
        assert everything(table) == everything(whole)  # all checksums are compared
        monkeypatch.setattr(tier_reader.file_reads, "read_pieces", some)
        pair = [dataset(one, batch_size=32) for one in (table, whole)]
        for _ in range(5):
            assert batch_bits(pair[0].sample()) == batch_bits(pair[1].sample())


def test_an_epoch_with_prefetch_and_a_writer(tmp_path: Path) -> None:
    """Trajectories are moved while batches are made; none is torn."""
    stop = threading.Event()
    with tiered(tmp_path, on_full="evict_oldest") as table:
        for number in range(30):
            add(table, number, 12)

        def write() -> None:
            number = 30
            while not stop.is_set():
                add(table, number, 12)
                number = (number + 1) % 1000

        writer = threading.Thread(target=write)
        writer.start()
        try:
            windows = {"number": gear.Window(12), "value": gear.Window(12)}
            loader = dataset(table, windows=windows, anchor="first", prefetch=3, batches_per_epoch=math.inf)
            deadline = time.monotonic() + PATIENCE
            for turn, batch in enumerate(loader):
                if turn >= 100 and table.stats().num_evicted >= 20:
                    break
                assert time.monotonic() < deadline
                number = batch["number"][:, :1]
                assert (batch["number"] == number).all()
                expected = 1000.0 * number[..., None] + torch.arange(12)[None, :, None]
                assert (batch["value"] == expected + torch.tensor([0.0, 0.25, 0.5])).all()
        finally:
            stop.set()
            writer.join(PATIENCE)
        assert table._engine.num_spilled > 0
        table.check_valid()


@pytest.mark.parametrize(("keep", "by"), [("priority", "table"), ("auto", "dataset")])
def test_hot_trajectories_change_places_with_cold_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str, by: str
) -> None:
    """By the priorities that the table knows, and by those of a dataset, which the table does not take over."""
    monkeypatch.setattr(spilling, "EXCHANGE_SECONDS", 0.01)
    with fitting() as whole, tiered(tmp_path, keep=keep, blocks=32) as table:
        for number in range(40):
            for one in (table, whole):
                one.add(rows(number, 8), priority=float(40 - number))
        table.save(tmp_path)
        sets = [dataset(one, sampler=gear.Prioritized()) for one in (table, whole)]
        for shift in (0, 13, 29):
            slots = table.indices()
            priorities = np.arange(40.0)[(np.arange(40) + shift) % 40]
            for one in (table, whole) if by == "table" else sets:
                one.update_priority(slots, priorities)
            hottest = slots[np.argsort(priorities)[-8:]]
            inside = lambda slots=hottest: (table._engine.region.array("extent")[slots, 1] >= 0).all()  # noqa: E731
            wait_until(inside)
            assert 20 < table._engine.num_spilled < 40
            assert everything(table) == everything(whole)
            for pair in (sets, [dataset(one, sampler=gear.Prioritized()) for one in (table, whole)]):
                assert batch_bits(pair[0].sample()) == batch_bits(pair[1].sample())


def test_what_stays_in_memory_follows_the_sampler(tmp_path: Path) -> None:
    with tiered(tmp_path, keep="auto") as table:
        add(table, 1, 4)
        spiller = spilling.Spiller(table._engine.index, table._engine.region, "auto")
        assert spiller._keep == "auto"  # as "newest"
        expected = [(gear.Fifo(), "oldest"), (gear.TopK(), "priority"), (gear.Lifo(), "newest")]
        for sampler, keep in [*expected, (gear.Prioritized(), "priority"), (gear.Uniform(), "newest")]:
            dataset(table, sampler=sampler).sample()
            assert spiller._keep == keep
        assert spilling.Spiller(table._engine.index, table._engine.region, "oldest")._keep == "oldest"


def test_rows_are_counted_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fresh_name()
    with tiered(tmp_path, name=name) as table:
        try:
            for number in range(40):
                add(table, number, 10)
            table.save(tmp_path)
            spiller = spilling.Spiller(table._engine.index, table._engine.region, "newest")
            wait_until(lambda: not spiller.missing())
            before = top.read_file(region_path(name))
            data, misses = dataset(table), 0
            outside = table._engine.region.array("extent")[:, 1] < 0
            for _ in range(20):
                misses += int(outside[data.sample()["index"]].sum())
            stats = table.stats()
            assert (stats.num_hits, stats.num_misses) == (160 - misses, misses)
            assert 0 < misses < 160
            assert stats.miss_bytes > misses * 17 * 8
            assert stats.miss_seconds > 0
            assert stats.spilled_bytes == stats.num_spilled * (10 * table.schema.step_bytes + 4)
            assert f"{misses:>16,} rows of 160" in str(stats)
            (entry,) = (entry for entry in cli._entries() if entry.name == name)
            assert entry.disk is not None
            assert (entry.disk["misses"], entry.disk["spilled"]) == (misses, table._engine.num_spilled)
            line = f"{table._engine.num_spilled} trajectories in {tmp_path} only, {1 - misses / 160:.0%} of the rows"
            assert line in entry.disk["summary"]
            assert line in str(doctor._of_tables(doctor._tier)[name])
            cells = top._disk_cells(top.read_file(region_path(name)), before)
            assert cells[:2] == (str(table._engine.num_spilled), f"{1 - misses / 160:.0%}")

            said: list[str] = []
            monkeypatch.setattr(tier_reader, "notice", lambda key, message: said.append(message))
            monkeypatch.setattr(tier_reader, "_WINDOW_SECONDS", 0.0)
            data.sample()
            assert not said, "most of the time went elsewhere"
            for module in (tier_reader, tier_counts, tier_state, doctor, stats_module):
                monkeypatch.setattr(module, "SLOW_SHARE", 0.0)
            data.sample()
            assert f"Batches of table {name!r} wait for the disk: " in said[0]
            assert "slow disk" in str(table.stats())
            assert 0 < table.stats().disk_wait <= 1
            assert "; too slow: batches wait for it" in str(doctor._of_tables(doctor._tier)[name])
            monkeypatch.setattr(tier_reader, "_WINDOW_SECONDS", 1e9)
            assert doctor._memory()["slow_disks"][name] == table.stats().disk_wait
            counts = table._engine.index.arrays.tier_counts
            counts[tier_counts.WAIT] = 0
            tier_counts.note_wait(counts, 0.9)
            tier_counts.note_wait(counts, 0.2)
            assert table.stats().disk_wait == 0.9, "that of the process that waits most"
            counts[tier_counts.WAIT_TIME] -= 61 * 10**9
            assert table.stats().disk_wait == 0.0
            tier_counts.note_wait(counts, 0.2)
            assert table.stats().disk_wait == 0.2
        finally:
            table.unlink()


def test_it_comes_back(tmp_path: Path) -> None:
    with fitting() as whole, tiered(tmp_path) as table:
        for number in range(40):
            add(table, number, 1 + number * 7 % 23)
            add(whole, number, 1 + number * 7 % 23)
        expected = [part[1:] for part in everything(whole)]
    for keep in ("newest", "oldest", "priority"):
        disk = gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB", keep=keep)
        with gear.Table.recover(disk) as table:
            assert table._engine.region.layout.num_blocks == 24
            assert table._engine.num_spilled > 20
            assert [part[1:] for part in everything(table)] == expected
            outside = table._engine.region.array("extent")[table.indices(), 1] < 0
            if keep == "newest":
                assert not outside[-1]
                assert outside[0]
            elif keep == "oldest":
                assert not outside[0]
                assert outside[-1]
            add(table, 99, 20)
            table.remove(table.indices()[-1])
    with gear.Table.recover(gear.Disk(tmp_path, size="1GiB"), memory="300KiB") as table:
        assert table._engine.region.layout.num_blocks > 24
        assert table._engine.region.layout.region_bytes <= 300 << 10
    with gear.Table.load(tmp_path) as table:
        assert table._engine.num_spilled == 0
        assert [part[1:] for part in everything(table)] == expected


VERSIONED = {
    **COLUMNS,
    "small": gear.Column(torch.int32, per="trajectory"),
    "large": gear.Column(torch.int64, per="trajectory"),
}


@pytest.mark.parametrize("column", ["small", "large"])
def test_versions_come_back(tmp_path: Path, column: str) -> None:
    rules: dict[str, Any] = {"version": column, "max_lag": 2}
    with fitting(VERSIONED, **rules) as whole:
        with tiered(tmp_path, VERSIONED, blocks=20, **rules) as table:
            for number in range(45):
                for one in (table, whole):
                    if number % 15 == 14:
                        one.advance_version()
                    version = one.policy_version - number % 2
                    one.add(
                        {
                            **rows(number, 1 + number * 7 % 11),
                            "small": np.int32(version),
                            "large": np.int64(version),
                        }
                    )
            assert len(table) == len(whole)
        with gear.Table.recover(gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB")) as table:
            assert table._engine.num_spilled > 15
            assert table.policy_version == 3
            lengths = table.lengths().tolist()
            for _ in range(3):
                assert lengths == whole.lengths().tolist()
                for one in (table, whole):
                    one.advance_version()
                before, lengths = lengths, table.lengths().tolist()
                assert len(lengths) < len(before)
            assert lengths == whole.lengths().tolist() == []


def test_files_are_rewritten_under_trajectories_that_lie_there_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "MAX_SEGMENTS_BEHIND", 6)
    moved = 0
    with fitting(on_full="evict_oldest") as whole, tiered(tmp_path, on_full="evict_oldest") as table:
        for number in range(50):
            add(table, number, 10)
            add(whole, number, 10)
            if number % 3 == 2:
                slot = int(table.indices()[number // 2 % len(table)])
                table.remove(slot)
                whole.remove(slot)
            slots = np.flatnonzero(table._engine.region.array("extent")[:, 1] < 0)
            before = copies_of(table._engine.index.arrays, slots)
            table.save(tmp_path)
            moved += int((before["segment"] != copies_of(table._engine.index.arrays, slots)["segment"]).sum())
            if number % 5 == 4:
                assert everything(table) == everything(whole)
    assert moved > 10


# Other processes -------------------------------------------------------------------------------------


def test_other_processes_read_and_wait_for_room(tmp_path: Path) -> None:
    name = fresh_name()
    with tiered(tmp_path, name=name) as table:
        try:
            for number in range(30):
                add(table, number, 12)
            assert table._engine.num_spilled > 10
            pipe, theirs = multiprocessing.Pipe()
            child = multiprocessing.get_context("forkserver").Process(target=_elsewhere, args=(name, theirs))
            child.start()
            theirs.close()
            assert pipe.poll(PATIENCE)
            found, batch = pipe.recv()
            child.join(PATIENCE)
            assert child.exitcode == 0
            assert len(table) == 45
            assert found == everything(table)[:30]
            assert everything(table)[30:] != found
            table.check_valid()
            assert batch
        finally:
            table.unlink()


def _elsewhere(name: str, pipe: Any) -> None:
    with gear.Table.attach(name, timeout=30.0) as table:
        found = everything(table)
        batch = batch_bits(dataset(table).sample())
        for number in range(30, 45):
            add(table, number, 12)
        pipe.send((found, batch))


def test_without_its_owner_it_is_read_and_full_at_once(tmp_path: Path) -> None:
    name = fresh_name()
    table = tiered(tmp_path, name=name)
    other = gear.Table.attach(name, timeout=30.0)
    try:
        for number in range(30):
            add(table, number, 12)
        before = everything(table)
        table.close()
        assert everything(other) == before
        with pytest.raises(TableFullError, match=r"on the disk .* only, and no process moves more there"):
            _fill(other)
    finally:
        other.unlink()
        other.close()


def _fill(table: gear.Table) -> None:
    for number in range(30):
        add(table, number, 12)


# Readers that hold blocks ----------------------------------------------------------------------------


def test_blocks_are_not_reused_while_somebody_reads(tmp_path: Path) -> None:
    with tiered(tmp_path) as table:
        slots = [add(table, number, 8) for number in range(4)]
        table.save(tmp_path)
        arrays = table._engine.index.arrays
        free = set(arrays.free_blocks[: table._engine.region.layout.num_blocks - 8].tolist())
        ids = {int(i) for slot in slots[:2] for i in arrays.row(slot)}
        ticket = table._engine.reader().begin_read()
        assert spill(table, [*slots[:2], slots[0]]) == 2, "one of them is named twice"
        assert spill(table, slots[2:]) == -1, "blocks of the first two are still read"
        table.check_valid()
        assert everything(table)
        late = table._engine.reader().begin_read()
        taken = {int(i) for number in range(4) for i in arrays.row(add(table, 10 + number, 8))}
        assert not taken & ids
        assert taken <= free
        ticket.end()
        assert spill(table, slots[2:]) == 2, "a later reader does not see them"
        late.end()
        table.check_valid()
        assert table._engine.num_spilled == 4


def test_blocks_that_were_read_are_free_for_the_next_that_comes_back(tmp_path: Path) -> None:
    """All blocks are in use or were read when their trajectories left; nobody reads them now."""
    with tiered(tmp_path, blocks=4) as table:
        slots = [add(table, number, 8) for number in (1, 2)]
        table.save(tmp_path)
        ticket = table._engine.reader().begin_read()
        assert spill(table, slots) == 2
        assert spilling.promote(table._engine, np.array(slots)) == 0, "a reader may see the blocks"
        ticket.end()
        assert spilling.promote(table._engine, np.array(slots)) == 2
        table.check_valid()


def test_shared_blocks_are_kept_for_readers(tmp_path: Path) -> None:
    with tiered(tmp_path) as table:
        with table.writer(chunk_steps=8, overlap_steps=4) as writer:
            data = rows(0, 20)
            writer.trajectory = {"task": data.pop("task")}
            writer.append(data)
            writer.commit()
        table.save(tmp_path)
        before, used = everything(table), table.stats().blocks_in_use
        first, *others = table.indices().tolist()
        ticket = table._engine.reader().begin_read()
        assert spill(table, [first]) == 1
        assert spill(table, others) == -1  # a block of the first one is parked
        assert table.stats().blocks_in_use == used
        table.check_valid()
        ticket.end()
        for slot in others:
            assert spill(table, [slot]) == 1
            table.check_valid()
        assert table.stats().blocks_in_use == 0
        assert everything(table) == before


# Refused ---------------------------------------------------------------------------------------------


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    with tiered(tmp_path) as table:
        add(table, 0, 5)
        with pytest.raises(
            SchemaError, match="with transport='nixl', which reads only the memory of other nodes"
        ):
            gear.distributed.Shards(table, transport="nixl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "1MiB", "max_blocks": 4}, "size is '1MiB' and max_blocks 4; expected one of them"),
        ({"memory": "1 parsec"}, "memory is '1 parsec'; expected a number of bytes"),
        ({"memory": 0}, "memory is 0; expected a number of bytes"),
        ({"memory": True}, "memory is True; expected a number of bytes"),
        (
            {"memory": "4KiB"},
            "memory is '4KiB', 4,096 bytes; the index of 60 trajectories and one block of 4 steps",
        ),
    ],
)
def test_sizes_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        fitting(**options)


def test_memory_is_a_limit_of_the_region() -> None:
    for memory, size in (("100KiB", 102_400), (120_000, 120_000), ("0.125MiB", 131_072)):
        with fitting(memory=memory) as table:
            size = (
                int(float(memory[:-3]) * {"K": 1 << 10, "M": 1 << 20}[memory[-3]])
                if isinstance(memory, str)
                else memory
            )
            layout = table._engine.region.layout
            assert layout.region_bytes <= size < layout.region_bytes + layout.block_bytes + 3 * 4096
    with fitting(memory="1GiB") as table, fitting() as other:
        assert table._engine.region.layout.num_blocks == other._engine.region.layout.num_blocks


def test_options_of_disks(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="size is '5 loaves'; expected a number of bytes"):
        gear.Disk(tmp_path, size="5 loaves")
    with pytest.raises(
        SchemaError, match="keep is 'best'; expected 'auto', 'newest', 'oldest' or 'priority'"
    ):
        gear.Disk(tmp_path, keep="best")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="memory was not given"):
        gear.Table.create(COLUMNS, **nested_table({**SIZES, "disk": gear.Disk(tmp_path, size=10**6)}))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        5,
        {},
        {"path": "no hexadecimal digits", "size": 1},
        {"path": b"relative".hex(), "size": 1},
        {"path": b"/with\0".hex(), "size": 1},
        {"path": b"/sound".hex(), "size": 0},
        {"path": b"/sound".hex(), "size": True},
        {"path": b"/sound".hex(), "size": 1, "more": 2},
    ],
)
def test_headers_with_an_impossible_tier(fields: Any) -> None:
    with pytest.raises(SchemaError, match="expected an absolute path and a positive size"):
        Tier.from_json(fields)


def test_a_header_names_any_path() -> None:
    for path in ("/plain", "/\u00fcber/\udcff"):
        assert Tier.from_json(Tier(path, 7).to_json()) == Tier(path, 7)
