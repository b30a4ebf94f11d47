"""A cache of blocks in device memory: what rows read through it is what the table holds, whatever changes meanwhile."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.checkpoint.promoting import promote
from gear_loader.collection import cache_policy, device_cache
from gear_loader.collection.cache_policy import Contents, choose, rank
from gear_loader.collection.collector import resolve
from gear_loader.collection.device_cache import DeviceCache
from gear_loader.errors import CorruptTableError, LockTimeoutError, SchemaError, TableFullError
from gear_loader.kernels import gather as gathering
from gear_loader.kernels import items, reference
from gear_loader.kernels.plan import PAD_EDGE, GatherColumn, GatherPlan
from gear_loader.storage.rows import Reach

pytest.importorskip("triton")
BATCH, LENGTH = 8, 5
REACH = Reach(-2, 2, True)
CPU = torch.device("cpu")


class AtOnce(cache_policy.Ranker):
    """Chooses when it is asked."""

    def __init__(self, most: int) -> None:
        self._most, self.busy = most, False
        self._made: Any = None

    def request(self, contents: Contents) -> None:
        self._made, self.busy = rank(contents, self._most), True

    def take(self) -> Any:
        made, self._made, self.busy = self._made, None, False
        return made

    def stop(self) -> None:
        pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is asked with every batch, and answers; blocks are copied by the twin of the kernel."""
    monkeypatch.setattr(device_cache, "PAUSE", 1)
    monkeypatch.setattr(device_cache, "REST", 1)
    monkeypatch.setattr(device_cache, "Ranker", AtOnce)
    monkeypatch.setattr(gathering, "gather", reference.gather)


class Driven:
    """A small table that changes in every way, and rows read through a cache beside rows read from the table.

    Args:
        seed: decides what happens. packed: whether the columns share a record. late: whether one of them is filled
            later, for which no trajectory grows or shares steps.
        tier: directory of a disk tier, to which trajectories are moved and from which they come back; or None.
    """

    def __init__(self, seed: int, *, packed: bool, late: bool, places: int, tier: Path | None = None) -> None:
        self.random, self.late, self.tier = random.Random(seed), late, tier
        schema = {
            "value": gear.Column(torch.int64, (3,)),
            "late": gear.Column(torch.int64, late=late),
            "task": gear.Column(torch.int64, (2,), per="trajectory"),
        }
        sizes: dict[str, Any] = {"max_steps": 70, "max_trajectories": 12, "block_steps": 4}
        if tier is not None:  # trajectories take each other's blocks
            disk = gear.Disk(tier, sync_seconds=1e6, size="1GiB", keep="newest")
            sizes |= {"max_blocks": 18, "disk": disk}
        self.table = gear.Table.create(
            schema,
            **sizes,
            packed=packed,
            on_full="evict_oldest",
            timeout=0.001,
        )
        self.number = 0
        size = DeviceCache.check(self.table, schema, 1 << 40)
        order = self.random.choice(["any", "newest", "oldest"])
        self.cache = DeviceCache(self.table, schema, places * size, CPU, order=order)  # type: ignore[arg-type]
        self.writers: list[Any] = []
        self.plans = self._plans(None), self._plans(self.cache.memory)

    def _plans(self, memory: Callable[[str], torch.Tensor] | None) -> list[GatherPlan]:
        """A plan of each kind of column; steps by a column of their own, or of whole records."""
        layout, made = self.table.region.layout, []
        for name, offset, length, block_steps in (
            ("value", -2, LENGTH, layout.block_steps),
            ("late", -2, LENGTH, layout.block_steps),
            ("task", 0, 1, 1),
        ):
            place = layout.columns[name]
            column = GatherColumn(
                torch.from_numpy(self.table.region.blocks(name)),
                torch.zeros(BATCH, length, place.step_bytes, dtype=torch.uint8),
                offset,
                PAD_EDGE if name == "task" else 0,
                once=name == "task",
                inside=place.inside,
                step_stride=place.step_stride,
                cache=None if memory is None else memory(name),
            )
            made.append(GatherPlan([column], block_steps))
        return made

    # ---------------------------------------------------------------- what changes

    def change(self) -> None:
        """One random change of the table."""
        table, choose_ = self.table, self.random
        more = ["fill", "fill", "fill"] if self.late else ["grow", "grow", "chunks"]
        moves = ["spill", "spill", "promote", "promote"] if self.tier is not None else []
        kind = choose_.choice(["add", "add", "remove", "clear", "priority", *more, *moves])
        if kind == "add":
            table.add(self._rows(6 if choose_.random() < 0.7 else choose_.randrange(1, 12)), priority=1.0)
        elif kind == "spill":
            self._spill()
        elif kind == "promote" and len(table):
            promote(table, np.array(choose_.sample(table.indices().tolist(), min(3, len(table)))))
        elif kind == "grow":
            if not self.writers or choose_.random() < 0.3:
                self.writers.append(table.writer(commit_every_step=True))
                self.writers[-1].trajectory = {"task": self._task()}
            writer = choose_.choice(self.writers)
            self._append(writer)
            if choose_.random() < 0.2:
                writer.commit()
                self.writers.remove(writer)
        elif kind == "chunks":
            with table.writer(chunk_steps=6, overlap_steps=2) as writer:
                writer.trajectory = {"task": self._task()}
                for _ in range(choose_.randrange(1, 4)):
                    for _ in range(5):
                        self._append(writer)
                    self.look()
                writer.commit()
        elif kind == "remove" and len(table):
            table.remove(int(choose_.choice(table.indices().tolist())))
        elif kind == "fill":
            slots, generations = table.unfilled("late")
            if len(slots):
                i = choose_.randrange(len(slots))
                length = int(table.reader().index_arrays()[0][slots[i], 0])
                table.fill(
                    slots[i : i + 1],
                    generation=generations[i : i + 1],
                    late=[self._steps(length)["value"][:, 0]],
                )
        elif kind == "clear" and choose_.random() < 0.1:
            table.clear()
        elif kind == "priority" and len(table):
            table.update_priority(table.indices()[:1], [2.0])

    def _spill(self) -> None:
        """Move some trajectories to disk, if the blocks of those that were moved before are free by now."""
        table, choose_ = self.table, self.random
        table.save(self.tier)
        slots = table.indices()
        slots = slots[[choose_.random() < 0.3 for _ in slots]]
        arrays = table.index.arrays
        table.index.spill(slots, arrays.generation[slots].copy())

    def _steps(self, count: int) -> dict[str, Any]:
        self.number += 1
        value = self.number * 1000 + np.arange(3 * count).reshape(count, 3)
        return {"value": value} if self.late else {"value": value, "late": value[:, 0] + 5}

    def _append(self, writer: Any) -> None:
        writer.append({name: values[0] for name, values in self._steps(1).items()})

    def _task(self) -> Any:
        return np.array([self.number, -self.number])

    def _rows(self, length: int) -> dict[str, Any]:
        return {**self._steps(length), "task": self._task()}

    def _append_under_ticket(self) -> None:
        """Let a trajectory grow, if that needs no blocks of others, which are being read."""
        if self.writers and self.random.random() < 0.3:
            with contextlib.suppress(LockTimeoutError, TableFullError):
                self._append(self.random.choice(self.writers))

    # ---------------------------------------------------------------- what is read

    def look(self) -> None:
        """Read random rows both ways, and compare every byte."""
        reader = self.table.reader()
        ticket, snapshot = reader.begin_snapshot()
        try:
            if not len(snapshot):
                return
            self._append_under_ticket()
            which = np.array([self.random.randrange(len(snapshot)) for _ in range(BATCH)])
            slots = snapshot.slots[which]
            with self.cache.using(10**6):
                self._append_under_ticket()  # after the cache has followed the table
                if self.tier is not None:
                    if self.random.random() < 0.3:
                        self._spill()
                    extent = reader.index_arrays()[0]
                    inside = snapshot.slots[extent[snapshot.slots, 1] >= 0]
                    if not len(inside):
                        return
                    slots = inside[which % len(inside)]
                lengths = reader.index_arrays()[0][slots, 0]
                anchors = np.array([self.random.randrange(int(length)) for length in lengths])
                try:
                    self._compare(slots, anchors)
                except CorruptTableError:  # the table's own thread has moved one of them to disk meanwhile
                    if self.tier is None or (reader.index_arrays()[0][slots, 1] >= 0).all():
                        raise
        finally:
            ticket.end()
        self.cache.check_valid()

    def _compare(self, slots: Any, anchors: Any) -> None:
        extent, ids = np.zeros((BATCH, 3), dtype=np.int64), np.zeros((BATCH, 4), dtype=np.int32)
        resolve(self.table, slots, anchors, REACH, extent, ids)
        cached = ids.copy()
        self.cache.look_up(slots, anchors, extent, cached, REACH)
        own = torch.arange(BATCH)
        first = torch.from_numpy(
            np.stack((np.ones(BATCH), np.arange(BATCH) * 4 + 3, np.zeros(BATCH)), axis=1)
        )
        for i, (plain, through) in enumerate(zip(*self.plans, strict=True)):
            extents = first.long() if i == 2 else torch.from_numpy(extent)
            for plan, blocks in ((plain, ids), (through, cached)):
                steps = own if i == 2 else torch.from_numpy(anchors)
                if i == 2:
                    steps = torch.zeros(BATCH, dtype=torch.int64)
                reference.gather(plan, own, steps, extents, torch.from_numpy(blocks.reshape(-1)))
            assert torch.equal(plain.columns[0].out, through.columns[0].out), (
                f"rows differ: {slots}, {anchors}"
            )


def drive(seed: int, rounds: int = 120, tier: Path | None = None) -> DeviceCache:
    places = [3, 12, 200][seed % 3]
    driven = Driven(seed, packed=seed % 4 < 2, late=seed % 2 == 1, places=places, tier=tier)
    with driven.table:
        for _ in range(rounds):
            with contextlib.suppress(TableFullError):  # its memory, from which nothing moves by itself
                driven.change()
            driven.look()
        for writer in driven.writers:
            writer.close()
        return driven.cache


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(i, marks=pytest.mark.long) for i in range(3, 60))]
)
def test_rows_through_a_cache_are_those_of_the_table(seed: int) -> None:
    counts = drive(seed).counts()
    assert counts["hits"] > 20
    assert counts["misses"] > 20 or seed % 3 == 2


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(i, marks=pytest.mark.long) for i in range(3, 60))]
)
def test_rows_of_a_disk_tier_through_a_cache_are_those_of_the_table(seed: int, tmp_path: Path) -> None:
    """Trajectories leave memory, and others take their blocks; some come back, to other blocks."""
    counts = drive(seed, tier=tmp_path).counts()
    assert counts["hits"] > 20


def _late(patch: pytest.MonkeyPatch) -> None:
    follow = DeviceCache._follow
    patch.setattr(
        DeviceCache,
        "_follow",
        lambda self: follow(self) if self._position < 0 or self._batches % 3 == 0 else None,
    )


def _changed(patch: pytest.MonkeyPatch, keep: Callable[[Any, Any, Any], Any]) -> None:
    read = DeviceCache._read
    patch.setattr(DeviceCache, "_read", lambda self, slots: keep(*read(self, slots)))


def _any_length(patch: pytest.MonkeyPatch) -> None:
    look_up = DeviceCache.look_up

    def always(self: Any, slots: Any, anchors: Any, extent: Any, ids: Any, reach: Any) -> None:
        known = self._totals
        self._totals = known.copy()
        self._totals[slots] = extent[:, 0] + extent[:, 2]
        look_up(self, slots, anchors, extent, ids, reach)
        self._totals = known

    patch.setattr(DeviceCache, "look_up", always)


DEFECTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "changes are followed some batches late": _late,
    "copies stay when their trajectory is gone": lambda patch: _changed(
        patch, lambda gone, changed, blocks: (gone[:0], changed, blocks[:0])
    ),
    "copies stay when a trajectory grows, or shares their block": lambda patch: _changed(
        patch, lambda gone, changed, blocks: (gone, changed, blocks[:0])
    ),
    "copies are used by rows of a longer trajectory": _any_length,
    "late columns are not looked at": lambda patch: patch.setattr(
        device_cache, "filled_bits", lambda arrays, slots: np.zeros(len(slots), dtype=np.int64)
    ),
}


@pytest.mark.parametrize("part", ["_follow_moves", "_follow"])
def test_a_cache_that_does_not_follow_moves_is_found(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With blocks that are those of others by now."""
    follow = DeviceCache._follow
    left_out = {
        "_follow_moves": lambda self: None,
        "_follow": lambda self: follow(self) if self._position < 0 else None,
    }
    monkeypatch.setattr(DeviceCache, part, left_out[part])

    def drive_all() -> None:
        for seed in range(30):
            drive(seed, tier=tmp_path / str(seed))

    with pytest.raises(AssertionError, match="rows differ"):
        drive_all()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_put_back_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFECTS[name](monkeypatch)

    def drive_all() -> None:
        for seed in range(60):
            drive(seed)

    with pytest.raises(AssertionError, match="rows differ"):
        drive_all()


# ---------------------------------------------------------------- the look-up of a GPU that draws


@pytest.mark.parametrize("anchor", ["uniform", "first", "last", "item"])
def test_blocks_are_looked_up_by_the_kernel(anchor: str) -> None:
    """Those of trajectories that have as many steps as their copies; the others keep their ids."""
    table = gear.Table.create(
        {"x": gear.Column(torch.int32)}, max_steps=200, max_trajectories=8, block_steps=4
    )
    for length in (3, 9, 30, 4, 17):
        table.add({"x": np.arange(length, dtype=np.int32)})
    extent, block_ids = table.reader().index_arrays()
    generation = table.reader().slot_states()[1]
    blocks, slots = table.region.layout.num_blocks, 8
    owner, number = torch.full((blocks,), 0, dtype=torch.int32), torch.zeros(blocks, dtype=torch.int32)
    for slot in table.indices().tolist():
        for i in range(-(-int(extent[slot, 0]) // 4)):
            owner[block_ids[extent[slot, 1] + i]], number[block_ids[extent[slot, 1] + i]] = slot, i
    steps = items.Blocks(owner, number, *(torch.zeros(1) for _ in range(3)))
    index = items.Index(
        torch.tensor([array.ctypes.data for array in (generation, extent, block_ids)]),
        len(block_ids),
        4,
        torch.ones(slots, dtype=torch.int32),
        steps if anchor == "item" else None,
    )
    drawn = torch.from_numpy(table.indices()).repeat(4)
    if anchor == "item":
        drawn = torch.from_numpy(block_ids[extent[drawn.numpy(), 1]].astype(np.int64)) * 4 + 1
    drawn[::7] = -1
    where = torch.arange(blocks, dtype=torch.int32)
    where[::3] = ~torch.arange(len(where[::3]), dtype=torch.int32)
    totals = torch.from_numpy(extent[:, 0].astype(np.int32))
    totals[int(table.indices()[2])] -= 1  # it has grown since
    results = []
    copies = items.CacheMap(where, totals, torch.zeros(2, dtype=torch.int64))
    for cache in (None, copies):
        rows, ids = torch.full((6, 20), -9), torch.full((20, 5), -9, dtype=torch.int32)
        random_ = torch.tensor([1, 2, 3])
        items.resolve(
            index, drawn, random_, rows, ids, anchor=anchor, first=-3, last=9, once=True, cache=cache
        )
        results.append((rows, ids))
    (rows, ids), (other, cached) = results
    assert torch.equal(rows, other)
    lengths, starts, _ = rows[3:].reshape(-1, 3).T
    low = torch.arange(20) * 5 - starts
    high = (rows[1] + 9).clamp(min=0).minimum(lengths - 1) // 4
    same = (drawn >= 0) & (lengths == totals[rows[0].clamp(min=0)])
    inside = (drawn >= 0)[:, None] & (torch.arange(5) <= (high - low)[:, None])
    inside[:, 4] = False
    looked = inside.clone()
    looked[:, 4] = True
    expected = torch.where(looked & same[:, None], where[ids.clamp(min=0).long()], ids)
    assert torch.equal(cached, expected)
    found = int((inside & (cached < 0)).sum())
    assert copies.counts.tolist() == [found, int(inside.sum()) - found]
    assert 0 < found < int(inside.sum())
    table.close()


# ---------------------------------------------------------------- the policy


def test_free_places_go_to_the_hottest_and_others_change_by_hysteresis() -> None:
    order = np.arange(100)  # the hottest last
    inside = np.zeros(100, dtype=bool)
    come, leave = choose(order, inside, 32, 1000, swaps=True)
    assert come.tolist() == list(range(99, 67, -1))
    assert len(leave) == 0
    inside[60:92] = True  # eight colder ones are in; the two at the edge may stay
    come, leave = choose(order, inside, 32, 1000, swaps=True)
    assert come.tolist() == list(range(99, 91, -1))
    assert leave.tolist() == list(range(60, 68))
    assert [part.tolist() for part in choose(order, inside, 32, 3, swaps=True)] == [
        [99, 98, 97],
        [60, 61, 62],
    ]
    assert [len(part) for part in choose(order, inside, 32, 1000, swaps=False)] == [0, 0]
    inside[:] = False
    inside[67:99] = True  # one that is a little hotter does not change places
    inside[98], inside[67] = False, True
    come, leave = choose(order, inside, 31, 1000, swaps=True)
    assert len(come) == len(leave)


def test_a_budget_as_large_as_the_table_holds_all_of_it() -> None:
    driven = Driven(5, packed=True, late=False, places=10_000)
    with driven.table as table:
        while len(table) < 5:
            table.add(driven._rows(9), priority=1.0)
        for _ in range(6):
            driven.look()
        counts = driven.cache.counts()
        assert counts["bytes"] == 15 * driven.cache.block_bytes  # of 5 trajectories of 3 blocks
        assert counts["budget"] == table.region.layout.num_blocks * driven.cache.block_bytes
        before = counts["misses"]
        driven.look()
        assert driven.cache.counts()["misses"] == before


def test_a_failure_in_between_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(3, packed=False, late=False, places=20)
    with driven.table as table:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceCache, "_launch", lambda *_: (_ for _ in ()).throw(MemoryError()))

            def until_it_fails() -> None:
                for _ in range(5):
                    table.add(driven._rows(9), priority=1.0)
                    driven.look()

            with pytest.raises(MemoryError):
                until_it_fails()
        assert driven.cache.counts()["bytes"] > 0  # of copies that were never made
        for _ in range(5):
            driven.look()
        assert driven.cache.counts()["bytes"] > 0


def test_options_that_are_refused() -> None:
    sizes = {"max_steps": 100, "max_trajectories": 9, "block_steps": 10}
    with gear.Table.create({"x": gear.Column(torch.float32, (8,))}, **sizes) as table:
        options: dict[str, Any] = {"batch_size": 2, "windows": gear.Window(2), "device": "cpu"}
        with pytest.raises(
            SchemaError, match=r"device_cache='1GiB' was given with device='cpu'; expected a CUDA"
        ):
            gear.ReplayDataset(table, **options, device_cache="1GiB")
        with pytest.raises(SchemaError, match="device_cache is '1 pound'; expected a number of bytes"):
            gear.ReplayDataset(table, **options, device_cache="1 pound")
        with pytest.raises(SchemaError, match="device_cache=9 was given with layout='packed'"):
            gear.ReplayDataset(table, **options, layout="packed", device_cache=9)
        with pytest.raises(
            SchemaError, match="device_cache is 300 bytes; expected at least 384, those of one block"
        ):
            DeviceCache.check(table, ["x"], 300)
        with (
            gear.distributed.Shards([table]) as shards,
            pytest.raises(SchemaError, match="was given with Shards"),
        ):
            gear.ReplayDataset(shards, **options, device_cache="1GiB")
