"""One-sided reads of spans of steps: what arrives is what the table holds, whatever moves or dies between two reads."""

from __future__ import annotations

import ctypes
import gc
import itertools
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nixl_common import COLUMNS, SCHEMA, Owner, World, steps
from waiting_common import PATIENCE, SLOWER, go_on, stop_process

from gear_loader.errors import PeerTimeoutError, SchemaError, TransportError
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table import Table
from gear_loader.transport import nixl_agent
from gear_loader.transport.nixl_agent import Description
from gear_loader.transport.nixl_intervals import Intervals
from gear_loader.transport.nixl_reader import NixlPeer
from gear_loader.transport.nixl_spans import SpanReads, SpanRows
from gear_loader.transport.packed_spec import PackedSpec

Array = np.ndarray[Any, Any]
needs_nixl = pytest.mark.skipif(nixl_agent.installed() is None, reason="NIXL is not installed")
ALL = {"x": "x", "again": "x", "flag": "flag", "big": "big", "task": "task"}
NAME = "nixl-spans"


def expected(spec: PackedSpec, held: dict[int, Any], slots: Any, firsts: Any, counts: Any, gone: Any) -> Any:
    """Bytes of every column of a reply; rows that are gone are zeros."""
    found = {}
    for name, column in spec.columns.items():
        once, parts = spec.schema[column].trajectory, []
        for slot, first, count, lost in zip(slots, firsts, counts, gone, strict=True):
            stored = held[slot][column][None] if once else held[slot][column][first : first + count]
            values = np.zeros((1 if once else count) * spec.schema[column].step_bytes, dtype=np.uint8)
            if not lost:
                values[:] = np.frombuffer(stored.tobytes(), np.uint8)
            parts.append(values)
        found[name] = np.concatenate([np.empty(0, np.uint8), *parts])
    return found


class Interrupted(NixlPeer):
    """Calls a function before one of its reads."""

    before: Callable[[], None] = staticmethod(lambda: None)
    at = -1
    reads = 0

    def _read(self, *args: Any) -> Any:
        if self.reads == self.at:
            self.before()
        self.reads += 1
        return super()._read(*args)


class SpanWorld(World):
    """A table, packed or not, its owner in another process, and a reader of spans."""

    peer: Interrupted

    def __init__(self, owner: Owner, *, packed: bool = True, name: str = NAME) -> None:
        self.name = name
        self.table = Table.create(
            COLUMNS,
            max_steps=600,
            max_trajectories=40,
            block_steps=4,
            name=name,
            memory=Memory(packed=packed),
        )
        self.held: dict[int, dict[str, Array]] = {}
        for i in range(20):
            self.add(1 + (7 * i) % 25, i)
        self.owner = owner
        self.peer = Interrupted(owner, timeout=20.0 * SLOWER, name="node b")

    def add(self, length: int, seed: int) -> int:
        rows = steps(length, seed)
        slot = self.table.add(rows)
        self.held[slot] = rows
        return slot

    def begin(
        self, slots: Any, firsts: Any, counts: Any, columns: dict[str, str] = ALL, generations: Any = None
    ) -> tuple[Future[Array], Array, PackedSpec]:
        spec = PackedSpec(self.name, SCHEMA, columns)
        slots, firsts, counts = (np.asarray(part, dtype=np.int64) for part in (slots, firsts, counts))
        if generations is None:
            generations = self.table._engine.region.array("generation")[slots]
        out = np.full(spec.reply_bytes(len(slots), int(counts.sum())), 205, dtype=np.uint8)
        return self.peer.fetch_spans(spec, slots, firsts, generations, counts, out), out, spec

    def served(self, slots: Any, firsts: Any, counts: Any, held: Any = None, **options: Any) -> list[bool]:
        """Fetch spans and check their bytes; return which were served."""
        future, out, spec = self.begin(slots, firsts, counts, **options)
        gone = future.result(PATIENCE).astype(bool)
        wanted = expected(spec, self.held if held is None else held, slots, firsts, counts, gone)
        for span in spec.spans(len(slots), int(np.sum(counts))):
            values = wanted[span.name]
            assert (out[span.offset : span.offset + len(values)] == values).all(), span
        return (~gone).tolist()

    def whole(self, slots: Any) -> tuple[Any, list[int], list[int]]:
        return slots, [0] * len(slots), [len(self.held[slot]["x"]) for slot in slots]

    def flip(self) -> None:
        """Compact the block tables."""
        index = self.table._engine.index
        assert index.recovery.locked(lambda: index.allocator.flip(-1))


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    made = Owner(NAME)
    yield made
    made.end()


@pytest.fixture(params=[True, False], ids=["packed", "apart"])
def world(owner: Owner, request: pytest.FixtureRequest) -> Iterator[SpanWorld]:
    world = SpanWorld(owner, packed=request.param)
    yield world
    world.close()


# ---------------------------------------------------------------- what arrives


@needs_nixl
@pytest.mark.parametrize("columns", [ALL, {"big": "big"}, {"flag": "flag", "task": "task"}], ids=len)
def test_spans_are_those_of_the_table(world: SpanWorld, columns: dict[str, str]) -> None:
    random = np.random.default_rng(len(columns))
    for number in (1, 7, 40):
        slots = random.choice(list(world.held), number).tolist()
        lengths = np.array([len(world.held[slot]["x"]) for slot in slots])
        firsts = random.integers(0, lengths + 1)
        counts = random.integers(0, lengths - firsts + 1)
        assert all(world.served(slots, firsts.tolist(), counts.tolist(), columns=columns))
    assert world.served(*world.whole(list(world.held)), columns=columns) == [True] * 20
    assert world.served([], [], [], columns=columns) == []


@needs_nixl
def test_a_fetch_takes_five_reads_and_one_more_after_a_compaction(world: SpanWorld) -> None:
    slots = list(world.held)[:5]
    for reads in (6, 5, 5):  # at first the number of compactions is not known
        world.peer.reads = 0
        assert all(world.served(*world.whole(slots)))
        assert world.peer.reads == reads
    world.flip()
    world.peer.reads = 0
    assert all(world.served(*world.whole(slots)))
    assert world.peer.reads == 6


@needs_nixl
def test_rows_that_are_gone(world: SpanWorld) -> None:
    slots = list(world.held)[:6]
    spans, generations = world.whole(slots), world.table._engine.region.array("generation")[slots]
    held = dict(world.held)
    ticket = world.table._engine.index.reader.begin_read()  # what is retired now stays
    world.table.remove([slots[1]])
    assert world.served(*spans, generations=generations) == [True] * 6
    ticket.end()
    world.table.remove([slots[2], slots[3]])
    again = [world.add(3, 99) for _ in range(12)]  # takes what has been freed
    assert {slots[2], slots[3]} <= set(again)
    found = world.served(*spans, generations=generations, held=held)
    assert found == [True, False, False, False, True, True]
    counts = [*spans[2][:5], spans[2][5] + 1]  # a step more than there are
    assert world.served(*spans[:2], counts, generations=generations, held=held)[4:] == [True, False]


# ---------------------------------------------------------------- between two reads


def change_nothing(world: SpanWorld, slots: list[int]) -> None:
    pass


def compact(world: SpanWorld, slots: list[int]) -> None:
    world.flip()


def compact_twice(world: SpanWorld, slots: list[int]) -> None:
    """Both halves are written: the places that the reader knows have ids of others."""
    for _ in range(2):
        world.table.remove([slot for slot in world.held if slot not in slots][:3])
        world.flip()
        for i in range(3):
            world.table.add(steps(9 + i, 700 + i))


def evict_some(world: SpanWorld, slots: list[int]) -> None:
    """The slots and blocks of the first half of the rows get other trajectories."""
    world.table.remove(slots[: len(slots) // 2])
    for i in range(12):
        world.table.add(steps(1 + 2 * i, 800 + i))


def evict_all(world: SpanWorld, slots: list[int]) -> None:
    """Everything is replaced, also what lies in both halves of the block tables."""
    for turn in range(3):
        world.table.clear()
        world.flip()
        for i in range(20):
            world.table.add(steps(1 + i, 900 + 20 * turn + i))


def recover(world: SpanWorld, slots: list[int]) -> None:
    """As after a process that was killed in the middle of a change."""
    index = world.table._engine.index
    world.table.remove([slot for slot in world.held if slot not in slots][:4])
    index.recovery.locked(index.recovery.rebuild)
    for i in range(6):
        world.table.add(steps(20, 600 + i))


CHANGES = (change_nothing, compact, compact_twice, evict_some, evict_all, recover)


@needs_nixl
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("at", range(6))
def test_rows_are_whole_whatever_happens_before_a_read(
    world: SpanWorld, change: Callable[[SpanWorld, list[int]], None], at: int
) -> None:
    """Rows are those that were asked for, or GONE; and they are served where their trajectories stay."""
    slots = [slot for slot, rows in world.held.items() if len(rows["x"]) > 4][::2]
    held = dict(world.held)
    assert all(world.served(*world.whole(slots)))
    world.peer.reads, world.peer.at = 0, at
    world.peer.before = lambda: change(world, slots)
    found = world.served(*world.whole(slots), held=held)
    assert world.peer.reads > at or at == 5
    evicted = {"evict_some": len(slots) // 2, "evict_all": len(slots)}.get(change.__name__, 0)
    assert all(found[evicted:])
    if at < 4:  # before the read of the states
        assert not any(found[:evicted])
    world.table._engine.index.recovery.check_valid()


@needs_nixl
@pytest.mark.parametrize("at", range(5))
def test_a_trajectory_that_grows_has_its_old_steps(world: SpanWorld, at: int) -> None:
    rows = steps(70, 5)
    with world.table.writer(commit_every_step=True) as writer:
        writer.trajectory = {"task": rows["task"]}
        append = lambda i: writer.append(x=rows["x"][i], flag=rows["flag"][i], big=rows["big"][i])  # noqa: E731
        for i in range(6):
            append(i)
        slot = int(world.table.indices()[-1])
        world.add(5, 6)  # behind it in the block tables
        world.held[slot] = rows
        assert world.served([slot], [0], [6]) == [True]
        world.peer.reads, world.peer.at = 0, at
        world.peer.before = lambda: [append(i) for i in range(6, 70)]  # type: ignore[assignment, return-value]
        assert world.served([slot, slot], [0, 5], [6, 1]) == [True, True]
        assert world.served([slot], [3], [60]) == [True]


@needs_nixl
def test_compactions_that_do_not_end_leave_the_deadline(world: SpanWorld) -> None:
    """A table whose block tables move during every fetch: rows come as soon as they stand still for three reads."""
    slots = list(world.held)[:6]
    assert all(world.served(*world.whole(slots)))
    read, flips = Interrupted._read, itertools.count()

    def flipping(self: Any, *args: Any) -> Any:
        if next(flips) < 40:
            world.flip()
        return read(self, *args)

    world.peer._read = flipping.__get__(world.peer)  # type: ignore[method-assign]
    assert all(world.served(*world.whole(slots)))
    assert 40 < next(flips) < 50


# ---------------------------------------------------------------- what is refused


@needs_nixl
def test_what_no_table_has_is_refused(world: SpanWorld) -> None:
    slots = list(world.held)[:4]

    def refused(slots: Array, firsts: Array, counts: Array) -> None:
        spec, out = PackedSpec(NAME, SCHEMA, ALL), np.zeros(1 << 20, np.uint8)
        world.peer.fetch_spans(spec, slots, firsts, np.zeros_like(slots), counts, out).result(PATIENCE)

    for place, value in ((0, -1), (0, 40), (1, -1), (1, 601), (2, -1), (2, 601)):
        spans: list[Any] = [list(part) for part in world.whole(slots)]
        spans[place][2] = value
        with pytest.raises(
            TransportError, match=r"node b: Row 2 of 4 of table 'nixl-spans' has slot .*Nothing was read"
        ):
            refused(*(np.array(part, dtype=np.int64) for part in spans))
    other = PackedSpec(NAME, Schema({"x": Column(torch.float64, (5,))}), {"x": "x"})
    one = np.zeros(1, np.int64)
    with pytest.raises(TransportError, match=r"has the columns .*float32.* at its owner; expected .*float64"):
        world.peer.fetch_spans(other, one, one, one, one, np.zeros(1024, np.uint8)).result(PATIENCE)
    with pytest.raises(SchemaError, match=r"counts is int32 \[1\]; expected int64 \[1\]"):
        world.peer.fetch_spans(other, one, one, one, one.astype(np.int32), np.zeros(1024, np.uint8))
    with pytest.raises(SchemaError, match=r"out is uint8 \[8\]; expected contiguous uint8 of at least 1,152"):
        world.peer.fetch_spans(other, one, one, one, one + 25, np.zeros(8, np.uint8))
    assert all(world.served(*world.whole(slots)))


@needs_nixl
@pytest.mark.parametrize("value", [-1, 2**31 - 1])
def test_a_corrupt_block_table_is_an_error(world: SpanWorld, value: int) -> None:
    slots = list(world.held)[:4]
    assert all(world.served(*world.whole(slots)))
    extent, ids = (world.table._engine.region.array(name) for name in ("extent", "block_ids"))
    place = int(extent[slots[2], 1])
    before, ids.reshape(-1)[place] = int(ids.reshape(-1)[place]), value
    with pytest.raises(TransportError, match=r"row 2, slot \d+, has no valid block table .*; 4 rows"):
        world.served(*world.whole(slots))
    ids.reshape(-1)[place] = before
    for wrong in (-(1 << 62), ids.size, 1 << 62):
        extent[slots[2], 1] = wrong
        with pytest.raises(TransportError, match=r"row 2, slot \d+, has no valid block table"):
            world.served(*world.whole(slots))
    extent[slots[2], 1] = place
    assert all(world.served(*world.whole(slots)))


# ---------------------------------------------------------------- owners that end or stand still


@needs_nixl
def test_an_owner_that_is_killed_and_comes_again(owner: Owner) -> None:
    world = SpanWorld(owner)
    try:
        slots = list(world.held)[:4]
        assert all(world.served(*world.whole(slots)))
        session = weakref.ref(world.peer._session)
        world.owner.signal(signal.SIGKILL)
        world.owner.process.join()
        for message in (r"node b: .*; 4 rows of table 'nixl-spans' \([\d,]+ bytes\) were to", "node b: "):
            with pytest.raises(TransportError, match=message):
                world.served(*world.whole(slots))
        world.owner.start()
        assert all(world.served(*world.whole(slots)))
        gc.collect()
        kept = session()
        assert kept is not None, "UCX may end the process when the agent is destroyed"
        assert kept is not world.peer._session
    finally:
        world.close()


@needs_nixl
@pytest.mark.long
def test_an_owner_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # shared memory can be read without it
    owner = Owner(NAME, UCX_TLS="tcp")
    world = SpanWorld(owner)
    try:
        slots = list(world.held)[:4]
        for at in range(5):  # before each of the reads
            assert all(world.served(*world.whole(slots)))
            world.peer.reads, world.peer.at = 0, at
            world.peer.before = lambda: stop_process(world.owner.process.pid or 0)
            world.peer._timeout = 0.5
            with pytest.raises(PeerTimeoutError, match=r"node b: no answer within 0\.5 s; 4 rows"):
                world.served(*world.whole(slots))
            world.peer._timeout, world.peer.at = 20.0, -1
            go_on(world.owner.process.pid or 0)
    finally:
        world.close()
        owner.end()


# ---------------------------------------------------------------- the lists


@settings(max_examples=100)
@given(data=st.data())
def test_intervals_read_every_value(data: st.DataObject) -> None:
    """Any intervals of a memory, overlapping or empty, near each other or far apart."""
    memory = np.random.default_rng(0).integers(0, 1 << 31, 4096, dtype=np.int32)
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 90)), max_size=20))
    starts, counts = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    wanted = Intervals(memory.ctypes.data, 4 * starts, 4 * counts, np.int32)
    here = np.full(wanted.nbytes + 8, 205, dtype=np.uint8)
    remote, local = wanted.transfers(here)
    assert (remote[:, 1:] == local[:, 1:]).all()
    copy(remote, local)
    found = np.concatenate([np.empty(0, np.int32), *(memory[a : a + n] for a, n in pairs)])
    assert wanted.values(here).tolist() == found.tolist()
    assert (here[wanted.nbytes :] == 205).all()
    gaps = remote[1:, 0] - remote[:-1, 0] - remote[:-1, 1]
    assert (gaps > 256).all()
    assert (remote[:, 1] > 0).all()


def copy(remote: Array, local: Array) -> None:
    """Carry out transfers within this process."""

    for (source, size, *_), (target, *_) in zip(remote.tolist(), local.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def described(table: Table) -> Description:
    layout, view = table._engine.region.layout, table._engine.region.bytes
    assert view is not None
    numbers = {"base": view.ctypes.data, "region_bytes": layout.region_bytes, "half": layout.half}
    numbers |= {"num_blocks": layout.num_blocks, "num_slots": layout.max_trajectories}
    numbers |= {"block_steps": layout.block_steps, "max_steps": layout.max_steps}
    numbers |= {name: layout.arrays[name][0] for name in ("generation", "state", "extent", "block_ids")}
    return Description("agent", b"", layout.schema, tuple(layout.columns.values()), numbers)


@pytest.mark.parametrize("block_steps", [32, 24])
def test_blocks_side_by_side_are_one_transfer(block_steps: int) -> None:
    schema = {"token": Column(torch.int32), "wide": Column(torch.uint8, (8,))}
    with Table.create(
        schema, max_steps=4000, max_trajectories=8, block_steps=block_steps, memory=Memory(packed=False)
    ) as table:
        for length in (1000, 500):
            table.add({"token": np.arange(length, dtype=np.int32), "wide": np.zeros((length, 8), np.uint8)})
        rows = SpanRows(*(np.array(part, dtype=np.int64) for part in ([1, 0], [40, 100], [0, 0], [300, 800])))
        spec = PackedSpec("t", table.schema, {"token": "token"})
        reads = SpanReads(spec, described(table), rows)
        extents = table._engine.region.array("extent")[rows.slots]
        wanted, there = reads.block_ids(extents, np.ones(2, dtype=bool))
        assert there.all()
        here = np.zeros(wanted.nbytes, np.uint8)
        copy(*wanted.transfers(here))
        ids = reads.listed(wanted.values(here), there)
        assert reads.valid(ids).all()
        out = np.zeros(spec.reply_bytes(2, 1100), np.uint8)
        remote, local = reads.pieces(ids, there, out, out[:0])
        copy(remote, local)
        tokens = out[:4400].view(np.int32).tolist()
        assert tokens == [*range(40, 340), *range(100, 900)]
        # Blocks of 32 steps of 4 bytes follow each other without a gap, those of 24 do not.
        blocks = sum(-(-(a % 24 + n) // 24) for a, n in ((40, 300), (100, 800)))
        assert len(remote) == (2 if block_steps == 32 else blocks)
