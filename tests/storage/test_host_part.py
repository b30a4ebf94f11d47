"""The part of host memory below a table on a GPU, on the stand-in: what moves, when it waits, deaths, refusals."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long, points
from dataset_common import on_host
from streams.cuda import Cuda
from streams.machine import Policy
from table_common import Died, bury, fresh_name, mortal
from test_device_server import RETURNS, fill, same
from tier_common import COLUMNS, move_out, tier_at
from tier_common import SIZES as ROWS

import gear_loader as gear
from gear_loader.errors import CheckpointError, CorruptTableError, RegionError, SchemaError, TableFullError
from gear_loader.storage import tier_swaps
from gear_loader.storage.counters import NUM_FREE_BLOCKS
from gear_loader.storage.operations.view import REFUSE
from gear_loader.storage.shared_memory import region_names

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
DEVICE = torch.device("cuda", 1)
SCHEMA = {"value": gear.Column(torch.float32, (40,)), "number": gear.Column(torch.int64, per="trajectory")}
STEPS, BLOCK_BYTES = 4, 4 * 160 + 128
SIZES: dict[str, Any] = {"max_steps": 1000, "max_trajectories": 60, "block_steps": STEPS, "device": DEVICE}


@contextlib.contextmanager
def stand_in(policy: Policy = "random") -> Iterator[Cuda]:
    cuda = Cuda(0, policy)
    with cuda.installed():
        yield cuda
    cuda.check()


def make(blocks: int = 16, host: Any = 100 * BLOCK_BYTES, **options: Any) -> gear.Table:
    """A table of so many blocks on the device, and others below; the part has room for all by default."""
    given = {**SIZES, "memory": gear.Memory(max_blocks=blocks), "host": host, **options}
    return gear.Table.create(SCHEMA, **given)


def rows(number: int, length: int = 7) -> dict[str, Any]:
    values = np.arange(length * 40, dtype=np.float32).reshape(length, 40) + 1000 * number
    return {"value": values, "number": number}


def add(table: gear.Table, count: int) -> None:
    for number in range(count):
        table.add(rows(number))


def check(table: gear.Table, numbers: list[int], length: int = 7) -> None:
    """The table holds these trajectories, and each lies in one place."""
    table.check_valid()
    assert [int(table[slot]["number"]) for slot in table.indices().tolist()] == numbers
    for slot, number in zip(table.indices().tolist(), numbers, strict=True):
        assert np.array_equal(table[slot]["value"], rows(number, length)["value"])
        ids = table._engine.index.arrays.row(slot)
        assert len(set((ids < table._engine.region.layout.host_blocks).tolist())) == 1


def levels(table: gear.Table) -> list[int]:
    """1 for each trajectory on the device, 2 for one in the part of host memory."""
    arrays = table._engine.index.arrays
    return arrays.levels(arrays.extent[table.indices(), 1]).tolist()


@pytest.mark.parametrize("policy", mostly_long(["random", "latest", "eager"], "latest"))
def test_the_oldest_move_and_nothing_is_stored_twice(policy: Policy) -> None:
    with stand_in(policy), make() as table:
        layout, memory = table._engine.region.layout, table._engine.region.device_memory
        assert memory is not None
        assert layout.block_bytes == BLOCK_BYTES
        assert (layout.writable_blocks, layout.host_blocks) == (16, 100)
        assert memory.num_bytes == 16 * BLOCK_BYTES
        region = table._engine.region.bytes
        assert region is not None
        assert 0 <= len(region) - layout.index_bytes - 100 * BLOCK_BYTES < 8192
        for number in range(30):
            table.add(rows(number))
            if number % 6 == 5:
                check(table, list(range(number + 1)))
        where = levels(table)
        assert where == sorted(where, reverse=True)
        stats = table.stats()
        assert stats.host_part_bytes == where.count(2) * 2 * BLOCK_BYTES
        assert stats.device_bytes == 16 * BLOCK_BYTES - 2 * BLOCK_BYTES * (8 - where.count(1))
        assert stats.blocks_in_use * BLOCK_BYTES == stats.host_part_bytes + stats.device_bytes
        assert f"in host memory below {stats.host_part_bytes:,} B" in str(stats)
        table.clear()
        check(table, [])
        assert table.stats().host_part_bytes == 0


def test_copies_are_queued_ahead_and_published_by_a_later_call() -> None:
    """On a device that does nothing before somebody waits for it."""
    with stand_in("latest") as cuda, make(blocks=64) as table:
        cuda.threads.frequency = 0.0
        memory, part = table._engine.region.device_memory, table._engine.index.allocator.host_part
        assert memory is not None
        assert part is not None
        numbers = [0]
        table.add(rows(0))
        while not part._missing():
            numbers.append(len(numbers))
            table.add(rows(numbers[-1]))
        assert table._engine.index.arrays.counters[NUM_FREE_BLOCKS] > 0
        for _ in range(3):
            part.look_ahead(REFUSE)
            assert not memory.moves.arrived.query()
            assert set(levels(table)) == {1}
        torch.cuda.synchronize(DEVICE)
        part.look_ahead(REFUSE)
        assert memory.moves is None
        assert levels(table).count(2) > 0
        check(table, numbers)


def test_what_is_removed_on_its_way_stays_removed() -> None:
    with stand_in("latest") as cuda, make() as table:
        cuda.threads.frequency = 0.0
        memory = table._engine.region.device_memory
        assert memory is not None
        numbers = list[int]()
        while memory.moves is None:
            numbers.append(len(numbers))
            table.add(rows(numbers[-1]))
        gone = memory.moves.slots.tolist()
        table.remove(gone[:-1])
        left = [n for n, slot in zip(numbers, range(len(numbers)), strict=True) if slot not in gone[:-1]]
        for number in range(100, 104):  # into the blocks of the removed ones
            table.add(rows(number))
        check(table, left + list(range(100, 104)))


def test_batches_read_the_part_in_place() -> None:
    """Of a batch one launch for each level, and nothing comes to the host; a batch of one level is replayed."""
    with stand_in("latest") as cuda, make() as table:
        cuda.threads.frequency = 0.0
        table.extend([rows(number) for number in range(6)])
        windows: dict[str, Any] = {"value": gear.Window(2), "number": None}
        data = gear.ReplayDataset(table, batch_size=32, windows=windows, device=DEVICE, prefetch=0)

        def sample() -> dict[str, int]:
            before = dict(cuda.machine.counts)
            batch = data.sample()
            assert torch.equal(batch["value"][:, 0, 0].cpu() // 1000, batch["number"].float().cpu())
            return {name: count - before.get(name, 0) for name, count in cuda.machine.counts.items()}

        for moved, launches in (([], 2), ([0, 3], 4), (range(6), 2)):
            if len(moved):
                move_out(table, moved)
            torch.cuda.synchronize(DEVICE)
            counts = sample()
            assert counts["gather"] == launches  # of steps, and of values per trajectory
            assert counts.get("place", 0) == 0


SETS: dict[str, dict[str, Any]] = {
    "n-step": {"windows": RETURNS},
    "n-step by priority": {"windows": RETURNS, "sampler": gear.Prioritized(0.7, unit="step")},
    "every": {"windows": {"number": gear.Window(3, -4, every=2), "value": gear.Window(2)}},
    "packed": {"windows": gear.Whole(), "layout": "packed"},
}


@pytest.mark.parametrize("kind", SETS)
def test_batches_are_those_of_a_table_with_a_disk(kind: str, tmp_path: Path) -> None:
    """On the CPU and on the GPU, while trajectories move."""

    def batches(table: gear.Table, device: Any) -> list[Any]:
        given = {"batch_size": 8, "seed": 3, "device": device, "batches_per_epoch": 3, "prefetch": 0}
        data = gear.ReplayDataset(table, **given, **SETS[kind])
        return [on_host(batch) for batch in (*data, data.sample())]

    memory, host = gear.Memory(max_blocks=400), {"device": DEVICE, "host": "1MiB"}
    with (
        stand_in("latest"),
        gear.Table.create(COLUMNS, **ROWS, memory=memory, **tier_at(tmp_path)) as whole,
        gear.Table.create(COLUMNS, **ROWS, memory=memory, **host) as table,
    ):
        fill(whole)
        fill(table)
        for step in range(3):
            for device in ("cpu", DEVICE):
                for one, other in zip(batches(table, device), batches(whole, "cpu"), strict=True):
                    same(one, other)
            move_out(table, table.indices()[step::2])


def test_blocks_of_one_trajectory_in_both_are_found() -> None:
    with stand_in(), make() as table:
        table.add(rows(0))
        move_out(table, [0])
        arrays = table._engine.index.arrays
        place = int(arrays.extent[0, 1]) + 1
        before, arrays.block_ids[place] = int(arrays.block_ids[place]), 110
        for device, layout in itertools.product(("cpu", DEVICE), ("padded", "packed")):
            windows: Any = {"value": gear.Window(7) if layout == "padded" else gear.Whole()}
            options: dict[str, Any] = {"windows": windows, "layout": layout, "device": device}
            data = gear.ReplayDataset(table, batch_size=3, **options)
            if (device, layout) != (DEVICE, "packed"):  # which reads each piece where it lies
                with pytest.raises(CorruptTableError):
                    data.sample()
        with pytest.raises(CorruptTableError, match="a trajectory lies on a GPU and in host memory"):
            assert table[0]
        with pytest.raises(AssertionError):
            table.check_valid()
        arrays.block_ids[place] = before
        check(table, [0])


@pytest.mark.parametrize("on_full", ["evict_oldest", "evict_lowest_priority"])
def test_a_full_table_evicts_by_its_policy(on_full: Any) -> None:
    with stand_in(), make(host=8 * BLOCK_BYTES, on_full=on_full) as table:
        priorities = np.random.default_rng(0).permutation(40)
        for number in range(40):
            table.add(rows(number), priority=float(priorities[number]))
            table.check_valid()
        assert len(table) >= 9  # of 12; two have left ahead of need, and a third for the last one
        found = [int(table[slot]["number"]) for slot in table.indices().tolist()]
        if on_full == "evict_oldest":
            assert found == list(range(40 - len(found), 40))
        else:  # those that were evicted were lower than what is left of those before them
            kept = set(found)
            for number in range(20):
                assert number in kept or priorities[number] < max(priorities[list(kept)])
        assert table.stats().num_evicted == 40 - len(found)
        part, policy = table._engine.index.allocator.host_part, table._engine.policy[0]
        assert part is not None
        assert part._evict_for(3, policy)  # blocks; each trajectory has two
        assert len(table) == len(found) - 2


def test_a_full_table_without_a_policy_says_so() -> None:
    with stand_in(), make(host=8 * BLOCK_BYTES, timeout=0.05) as table:
        expected = r"16 of 16 blocks.* on cuda:1 is full, and so is .*: 8 blocks"
        with pytest.raises(TableFullError, match=expected):
            add(table, 40)
        check(table, list(range(len(table))))
        assert len(table) == 12
    with stand_in(), make(host=8 * BLOCK_BYTES, on_full="wait", timeout=0.05) as table:
        with pytest.raises(TableFullError, match=r"timed out.*: the part of host memory below is full"):
            add(table, 40)
        table.remove(table.indices()[:3])
        table.add(rows(77))
        check(table, [*range(3, 12), 77])


@pytest.mark.parametrize("keep", ["priority", "oldest", "newest"])
def test_what_moves_follows_the_disk(keep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_swaps, "FREE_BYTES", 0)
    disk = gear.Disk(tmp_path, sync_seconds=1e6, size="1GiB", keep=keep)
    with stand_in() as cuda, cuda.disks_in_turn(), make(disk=disk) as table:
        for number in range(8):
            table.add(rows(number), priority=float(number * 5 % 8))
        table.add(rows(8), priority=100.0)
        moved = [number for number, level in enumerate(levels(table)) if level == 2]
        by = {"priority": lambda n: n * 5 % 8, "oldest": lambda n: -n, "newest": lambda n: n}[keep]
        assert moved
        assert max(map(by, moved)) < min(by(n) for n in range(8) if n not in moved)


@points(11, 0)
def test_a_death_at_every_store_of_a_move(every: int) -> None:
    """Another process repairs the index: each trajectory lies here or there, and no block is lost."""
    for stores in itertools.count(0, every):
        with stand_in("eager") as cuda, make(blocks=40) as table:
            cuda.threads.frequency = 0.0
            slots = np.array([table.add(rows(number)) for number in range(4)])
            live = table._engine.index
            arrays, memory = live.arrays, table._engine.region.device_memory
            assert memory is not None
            blocks = arrays.blocks_at(slots[:3])
            ids = np.concatenate([arrays.row(slot) for slot in slots[:3].tolist()])
            into = np.arange(len(ids), dtype=np.int32)
            memory.copy_out(ids, table._engine.region.host_blocks, into).synchronize()
            died = False
            with mortal(table, stores) as index:
                try:
                    index.move_out(slots[:3], arrays.generation[slots[:3]].copy(), blocks, into)
                except Died:
                    died = True
            bury(table)
            check(table, list(range(4)))
            table.remove(slots[1:])
            table.extend([rows(number) for number in range(10, 27)])
            check(table, [0, *range(10, 27)])
        if not died:
            assert stores > 20
            break


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    with stand_in():
        with make() as table:
            table.extend([rows(number) for number in range(8)])
            table.save(tmp_path / "saved")
        with pytest.raises(SchemaError, match="host is '1MiB' without max_blocks; expected both"):
            gear.Table.load(tmp_path / "saved", device=DEVICE, host="1MiB")
        given: dict[str, Any] = {"device": DEVICE, "max_blocks": 4}
        with pytest.raises(
            CheckpointError, match="8 trajectories, and 4 of them fit neither into 4 blocks on cuda:1"
        ):
            gear.Table.load(tmp_path / "saved", **given, host=4 * BLOCK_BYTES)
        with gear.Table.load(tmp_path / "saved", **given, host=12 * BLOCK_BYTES) as loaded:
            check(loaded, list(range(8)))
            assert levels(loaded) == [2] * 6 + [1] * 2


def test_what_is_refused() -> None:
    with stand_in() as cuda:
        for options, expected in (
            ({"device": None}, "host is '1MiB', and the blocks are not in the memory of a GPU"),
            ({"device": "cpu"}, "host is '1MiB', and the blocks are not in the memory of a GPU"),
            ({"memory": None}, "host is '1MiB', and memory was not given"),
            ({"host": "100B"}, "host is '100B', 100 bytes, and one block of 4 steps takes 768"),
            ({"host": "lots"}, "host"),
        ):
            with pytest.raises(SchemaError, match=expected):
                make(**{"host": "1MiB", **options})
        with (
            make(host=4 * BLOCK_BYTES) as table,
            pytest.raises(SchemaError, match=r"at most 16.* memory and host: it"),
        ):
            table.add(rows(1, 17))
        cuda.refuse_pinning = True
        before = region_names()
        for name in (None, fresh_name()):
            with (
                cuda.serving_blocks(),
                pytest.raises(RegionError, match="in the memory of cuda:1 cannot be pinned"),
            ):
                make(name=name)
        assert region_names() == before
