"""Tables whose trajectories beyond the memory lie on disk: they equal a table that fits, bit for bit."""

from __future__ import annotations

import contextlib
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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

import gear_loader as gear
from gear_loader.checkpoint import promoting, spilling, stored
from gear_loader.errors import SchemaError, TableFullError
from gear_loader.storage.disk import Tier
from gear_loader.transport.open_query import OpenQuery
from gear_loader.transport.spec import WindowSpec
from gear_loader.transport.table_cache import TableCache

PATIENCE = 60.0  # seconds for what takes milliseconds


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {"batch_size": 8, "windows": WINDOWS, "device": "cpu", "seed": 5, "prefetch": 0}
    return gear.ReplayDataset(table, **{**given, **options})


SELECTORS: list[Any] = [
    gear.Uniform(),
    gear.Uniform(unit="step"),
    gear.Uniform(replacement=False),
    gear.Prioritized(),
    gear.TopK(),
    gear.Fifo(),
    gear.Lifo(),
]


def add(table: gear.Table, number: int, length: int) -> int:
    ends = final(number, length) if number % 3 == 0 else None
    return table.add(rows(number, length), priority=float(number % 5), final=ends)


def test_batches_equal_those_of_a_table_that_fits(tmp_path: Path) -> None:
    with fitting() as whole, tiered(tmp_path) as table:
        for number in range(40):
            assert add(table, number, 1 + number * 7 % 23) == add(whole, number, 1 + number * 7 % 23)
        assert table.num_spilled > 20, "most do not fit into the memory"
        assert f"{table.num_spilled:,} trajectories" in str(table.stats())
        assert everything(table) == everything(whole)
        for selector in SELECTORS:
            pair = [dataset(one, selector=selector) for one in (table, whole)]
            for turn in range(6):
                batches = [one.sample() for one in pair]
                assert batch_bits(batches[0]) == batch_bits(batches[1]), (selector, turn)


def test_windows_of_all_kinds(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"windows": gear.Window(1)},
        {"windows": gear.Window(30, -15)},
        {"windows": gear.Window(6, -3, pad="edge"), "complete": False},
        {"windows": gear.Window(3), "complete": True},
        {"windows": {"wide": gear.Window(2, 9, pad="tail")}},
        {"windows": gear.Window(4), "columns": ["value", "task"], "sample_info": True},
        {"windows": gear.Window(2), "selector": gear.Prioritized(replacement=False), "batch_size": 5},
    ]
    with fitting(block_steps=16) as whole, tiered(tmp_path, block_steps=16, blocks=8) as table:
        for number in range(30):
            add(table, number, 1 + number * 11 % 40)
            add(whole, number, 1 + number * 11 % 40)
        table.save(tmp_path)
        spill(table, table.indices()[::2])
        for options in kinds:
            pair = [dataset(one, **options) for one in (table, whole)]
            for _ in range(4):
                one, other = (one.sample() for one in pair)
                for batch in (one, other):
                    batch.get("sample_info", {}).pop("age_seconds", None)
                assert batch_bits(one) == batch_bits(other), options


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
        assert table.num_spilled > 0
        table.check_valid()


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(0, 4)),
        st.tuples(st.just("extend"), st.integers(1, 12), st.integers(1, 4)),
        st.tuples(st.just("stream"), st.integers(2, 6), st.integers(1, 20)),
        st.tuples(st.just("write"), st.just(0), st.just(0)),
        st.tuples(st.just("spill"), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("promote"), st.integers(0, 59), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 59), st.just(0)),
        st.tuples(st.just("revise"), st.integers(0, 59), st.integers(0, 9)),
        st.tuples(st.just("draw"), st.integers(0, 6), st.integers(1, 9)),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=_ACTIONS, policy=st.sampled_from(["evict_oldest", "evict_lowest_priority"]))
def test_any_history_equals_that_of_a_table_that_fits(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]], policy: Any
) -> None:
    sizes = {"max_steps": 240, "max_trajectories": 18, "on_full": policy}
    path = tmp_path_factory.mktemp("tier")
    with fitting(**sizes) as whole, tiered(path, blocks=20, **sizes) as table:
        tables = (table, whole)
        pairs = [[dataset(one, selector=selector) for one in tables] for selector in SELECTORS]
        for number, (action, first, second) in enumerate(actions):
            if action == "add":
                assert add(table, number, first) == add(whole, number, first)
            elif action == "extend":
                several = [rows(100 + number + i, first) for i in range(second)]
                assert (table.extend(several) == whole.extend(several)).all()
            elif action == "stream":
                for one in tables:
                    with one.writer(chunk_steps=first, overlap_steps=first // 2) as writer:
                        data = rows(number, second)
                        writer.trajectory = {"task": data.pop("task")}
                        writer.append(data)
                        writer.commit()
            elif action == "write":
                table.save(path)
            elif action == "spill" and len(table):
                spill(table, table.indices()[first::second])
            elif action == "promote" and len(table):
                promote(table, int(table.indices()[first % len(table)]))
            elif action == "remove" and len(table):
                slot = int(table.indices()[first % len(table)])
                table.remove(slot)
                whole.remove(slot)
            elif action == "revise" and len(table):
                slot = int(table.indices()[first % len(table)])
                assert table.update_priority([slot], [second]) == whole.update_priority([slot], [second]) == 0
            elif action == "draw" and len(whole):
                drawn = []
                for one in pairs[first]:
                    try:
                        drawn.append(batch_bits(one.sample(second)))
                    except gear.errors.GearError as error:
                        drawn.append({"error": str(error)})
                assert drawn[0] == drawn[1]
            assert table.indices().tolist() == whole.indices().tolist()
        assert everything(table) == everything(whole)
        assert table.lengths().tolist() == whole.lengths().tolist()


def promote(table: gear.Table, slot: int) -> None:
    """Bring a trajectory back into memory, if it lies on disk only and there are blocks."""
    promoting.promote(table, np.array([slot]))


def test_hot_trajectories_change_places_with_cold_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling, "EXCHANGE_SECONDS", 0.01)
    with fitting() as whole, tiered(tmp_path, keep="priority", blocks=32) as table:
        for number in range(40):
            for one in (table, whole):
                one.add(rows(number, 8), priority=float(40 - number))
        table.save(tmp_path)
        for shift in (0, 13, 29):
            slots = table.indices()
            priorities = np.arange(40.0)[(np.arange(40) + shift) % 40]
            for one in (table, whole):
                one.update_priority(slots, priorities)
            hottest = slots[np.argsort(priorities)[-8:]]
            deadline = time.monotonic() + PATIENCE
            while (table.region.array("extent")[hottest, 1] < 0).any():
                assert time.monotonic() < deadline
                time.sleep(0.005)
            assert 20 < table.num_spilled < 40
            assert everything(table) == everything(whole)
            pair = [dataset(one, selector=gear.Prioritized()) for one in (table, whole)]
            assert batch_bits(pair[0].sample()) == batch_bits(pair[1].sample())


def test_it_comes_back(tmp_path: Path) -> None:
    with fitting() as whole, tiered(tmp_path) as table:
        for number in range(40):
            add(table, number, 1 + number * 7 % 23)
            add(whole, number, 1 + number * 7 % 23)
        expected = [part[1:] for part in everything(whole)]
    for keep in ("newest", "oldest", "priority"):
        disk = gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB", keep=keep)
        with gear.Table.recover(disk) as table:
            assert table.region.layout.num_blocks == 24
            assert table.num_spilled > 20
            assert [part[1:] for part in everything(table)] == expected
            outside = table.region.array("extent")[table.indices(), 1] < 0
            if keep == "newest":
                assert not outside[-1]
                assert outside[0]
            elif keep == "oldest":
                assert not outside[0]
                assert outside[-1]
            add(table, 99, 20)
            table.remove(table.indices()[-1])
    with gear.Table.recover(gear.Disk(tmp_path, size="1GiB"), memory="300KiB") as table:
        assert table.region.layout.num_blocks > 24
        assert table.region.layout.region_bytes <= 300 << 10
    with gear.Table.load(tmp_path) as table:
        assert table.num_spilled == 0
        assert [part[1:] for part in everything(table)] == expected


def test_a_save_elsewhere_reads_them(tmp_path: Path) -> None:
    with tiered(tmp_path / "tier") as table:
        for number in range(30):
            add(table, number, 1 + number * 7 % 23)
        table.save(tmp_path / "copy")
        expected = [part[1:] for part in everything(table)]
    with gear.Table.load(tmp_path / "copy") as copy:
        assert [part[1:] for part in everything(copy)] == expected


def test_files_are_rewritten_under_trajectories_that_lie_there_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_SEGMENTS_BEHIND", 6)
    moved = 0
    with fitting(on_full="evict_oldest") as whole, tiered(tmp_path, on_full="evict_oldest") as table:
        for number in range(50):
            add(table, number, 10)
            add(whole, number, 10)
            if number % 3 == 2:
                slot = int(table.indices()[number // 2 % len(table)])
                table.remove(slot)
                whole.remove(slot)
            before = table.region.array("stored").copy()
            spilled = table.region.array("extent")[:, 1] < 0
            table.save(tmp_path)
            now = table.region.array("stored")
            moved += int((spilled & (before[:, 0] == now[:, 0]) & (before[:, 1] != now[:, 1])).sum())
            assert everything(table) == everything(whole)
    assert moved > 10


# Other processes -------------------------------------------------------------------------------------


def test_other_processes_read_and_wait_for_room(tmp_path: Path) -> None:
    name = fresh_name()
    with tiered(tmp_path, name=name) as table:
        try:
            for number in range(30):
                add(table, number, 12)
            assert table.num_spilled > 10
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


def test_workers_of_a_loader(tmp_path: Path) -> None:
    with fitting() as whole, tiered(tmp_path, name=fresh_name()) as table:
        try:
            for number in range(30):
                add(table, number, 12)
                add(whole, number, 12)
            batches = []
            for one, workers in ((table, 2), (whole, 0)):
                loader = torch.utils.data.DataLoader(
                    dataset(one, batches_per_epoch=6),
                    batch_size=None,
                    num_workers=workers,
                    multiprocessing_context="forkserver" if workers else None,
                )
                batches.append([batch_bits(batch) for batch in loader])
            assert batches[0] == batches[1]
        finally:
            table.unlink()


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
        arrays = table.index.arrays
        free = set(arrays.free_blocks[: table.region.layout.num_blocks - 8].tolist())
        ids = {int(i) for slot in slots[:2] for i in arrays.row(slot)}
        ticket = table.reader().begin_read()
        assert spill(table, slots[:2]) == 2
        assert spill(table, slots[2:]) == -1, "blocks of the first two are still read"
        table.check_valid()
        assert everything(table)
        late = table.reader().begin_read()
        taken = {int(i) for number in range(4) for i in arrays.row(add(table, 10 + number, 8))}
        assert not taken & ids
        assert taken <= free
        ticket.end()
        assert spill(table, slots[2:]) == 2, "a later reader does not see them"
        late.end()
        table.check_valid()
        assert table.num_spilled == 4


def test_shared_blocks_wait_for_all_readers(tmp_path: Path) -> None:
    with tiered(tmp_path) as table:
        with table.writer(chunk_steps=8, overlap_steps=4) as writer:
            data = rows(0, 20)
            writer.trajectory = {"task": data.pop("task")}
            writer.append(data)
            writer.commit()
        table.save(tmp_path)
        before = everything(table)
        ticket = table.reader().begin_read()
        assert spill(table, table.indices()) == 0
        ticket.end()
        for slot in table.indices().tolist():
            assert spill(table, [slot]) == 1
            table.check_valid()
        assert everything(table) == before


# Refused ---------------------------------------------------------------------------------------------


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    with tiered(tmp_path) as table:
        add(table, 0, 5)
        with pytest.raises(SchemaError, match="commit_every_step was given for a table with a disk tier"):
            table.writer(commit_every_step=True)
        with pytest.raises(SchemaError, match="group='task' was given with a table that has a disk tier"):
            dataset(table, group="task", group_size=2)
        with pytest.raises(SchemaError, match="a selector with unit='trajectory'"):
            dataset(table, selector=gear.Prioritized(unit="step"))
        with pytest.raises(SchemaError, match="has a disk tier"):
            gear.distributed.Shards(table)


def test_a_server_sends_no_rows_of_it(tmp_path: Path) -> None:
    name = fresh_name()
    with tiered(tmp_path, name=name) as table, contextlib.closing(TableCache([name], 1.0)) as tables:
        try:
            spec = WindowSpec(name, table.schema, {"number": gear.Window(1)})
            with pytest.raises(SchemaError, match="a server sends no rows for now"):
                OpenQuery(spec, tables)
        finally:
            table.unlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "1MiB", "max_blocks": 4}, "memory is '1MiB' and max_blocks 4; expected one of them"),
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
            layout = table.region.layout
            assert layout.region_bytes <= size < layout.region_bytes + layout.block_bytes + 3 * 4096
    with fitting(memory="1GiB") as table, fitting() as other:
        assert table.region.layout.num_blocks == other.region.layout.num_blocks


def test_options_of_disks(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="size is '5 loaves'; expected a number of bytes"):
        gear.Disk(tmp_path, size="5 loaves")
    with pytest.raises(SchemaError, match="keep is 'best'; expected one of 'newest', 'oldest', 'priority'"):
        gear.Disk(tmp_path, keep="best")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="neither memory nor max_blocks was given"):
        gear.Table.create(COLUMNS, **SIZES, disk=gear.Disk(tmp_path, size=10**6))
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
