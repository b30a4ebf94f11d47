"""One-sided reads: what arrives is what the table holds, whatever dies or changes meanwhile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nixl_common import COLUMNS, SCHEMA, WINDOWS, Owner, World, make, steps, windows_on
from ucx_common import LOOPBACK, listening
from waiting_common import PATIENCE, SLOWER, go_on, stop_process, wait_until

from gear_loader.errors import PeerTimeoutError, SchemaError, TransportError
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.schema import Column, Schema, Window
from gear_loader.storage.table import Table
from gear_loader.transport import nixl_agent
from gear_loader.transport.nixl_agent import Description
from gear_loader.transport.nixl_plan import Intervals, Rows, SpanReads
from gear_loader.transport.nixl_reader import NixlPeer
from gear_loader.transport.nixl_server import NixlOwner
from gear_loader.transport.spec import PackedSpec, WindowSpec

needs_nixl = pytest.mark.skipif(nixl_agent.installed() is None, reason="NIXL is not installed")
Array = np.ndarray[Any, Any]
NAME = "nixl-spans"


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    made = Owner("nixl-shared", "nixl-own", NAME)
    yield made
    made.end()


@pytest.fixture(scope="module")
def shared(owner: Owner) -> Iterator[World]:
    world = World("nixl-shared", owner)
    yield world
    world.close()


@pytest.fixture
def world(owner: Owner) -> Iterator[World]:
    world = World("nixl-own", owner)
    yield world
    world.close()


@needs_nixl
@pytest.mark.parametrize(("pad", "only"), [("keep", None), ("head", None), ("tail", "big"), ("edge", None)])
def test_windows_are_those_of_the_table(shared: World, pad: Any, only: str | None) -> None:
    random = np.random.default_rng(len(pad))
    windows = windows_on({"x": Window(9, -4, pad), "flag": Window(9, -4, pad), "big": Window(3, 1)})
    shared.spec = WindowSpec("nixl-shared", SCHEMA, windows if only is None else {only: Window(30, -2, pad)})
    for _ in range(2):
        slots = random.choice(list(shared.held), 33).tolist()
        anchors = [int(random.integers(-2, len(shared.held[slot]["x"]) + 2)) for slot in slots]
        shared.check(slots, anchors)
    assert shared.fetch([], [])[0].shape == (0,)


@needs_nixl
def test_one_agent_and_one_question_serve_many_fetches_and_threads(shared: World) -> None:
    shared.spec = WindowSpec("nixl-shared", SCHEMA, WINDOWS)
    before = shared.owner.asked
    shared.check(list(shared.held), [0] * len(shared.held))

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(15):
            shared.check(random.choice(list(shared.held), 12).tolist(), [seed] * 12)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work, seed) for seed in range(3)]:
            future.result(60)
    assert shared.owner.asked - before <= 1
    found = listening(shared.owner.process.pid)
    assert found or "tcp" not in os.environ.get("UCX_TLS", "tcp")  # with verbs alone it listens nowhere
    assert set(found) <= LOOPBACK


@needs_nixl
def test_rows_that_are_gone(world: World) -> None:
    slots = list(world.held)[:6]
    rows, index = world.rows(slots, [0] * 6)
    ticket = world.table._engine.index.reader.begin_read()  # what is retired now stays
    world.table.remove([slots[1]])
    out = np.full(world.spec.reply_bytes(6), 205, dtype=np.uint8)
    assert not world.peer.fetch(world.spec, *rows, out=out, **index).result(30).any()
    ticket.end()
    world.table.remove([slots[2], slots[3]])
    again = [world.table.add(steps(3, 99)) for _ in range(12)]  # takes what has been freed
    assert {slots[2], slots[3]} <= set(again)
    out[:] = 205
    status = world.peer.fetch(world.spec, *rows, out=out, **index).result(30)
    assert status.tolist() == [0, 1, 1, 1, 0, 0]
    world.compare(out, slots, [0] * 6, gone=(1, 2, 3))


@needs_nixl
def test_a_table_that_was_replaced_is_noticed(world: World) -> None:
    slots = list(world.held)[:4]
    world.check(slots, [0] * 4)
    old = world.table
    old.unlink()
    world.table, world.held = make("nixl-own", seed=500)

    def fetch_until_it_is_noticed() -> None:
        deadline = time.monotonic() + 60  # the owner looks ten times a second
        while time.monotonic() < deadline:
            world.fetch(slots, [0] * 4)

    with pytest.raises(
        TransportError, match=r"node b: the table has been replaced by another of its name; 4 rows"
    ):
        fetch_until_it_is_noticed()
    world.check(slots, [0] * 4)
    old.close()


# ---------------------------------------------------------------- what is refused


WRONG = [("slots", -1), ("slots", 40), ("anchors", 2**41), ("block_ids", -1), ("block_ids", 2**31 - 1)]
WRONG += [("length", 0), ("length", 601), ("place", 10**6), ("place", -(10**6))]


@needs_nixl
def test_rows_that_no_table_has_are_refused(shared: World) -> None:
    shared.spec = WindowSpec("nixl-shared", SCHEMA, WINDOWS)
    slots = [slot for slot, rows in shared.held.items() if len(rows["x"]) > 10][:5]
    for name, value in WRONG:
        rows, index = shared.rows(slots, [5] * 5)
        if name in ("slots", "anchors"):
            rows[name == "anchors"][3] = value
        elif name == "block_ids":
            index["block_ids"][3] = value
        else:
            index["extent"][3, int(name == "place")] = value
        out = np.full(shared.spec.reply_bytes(5), 205, dtype=np.uint8)
        future = shared.peer.fetch(shared.spec, *rows, out=out, **index)
        with pytest.raises(
            TransportError, match=r"node b: Row 3 of 5 of table 'nixl-shared' has slot .*Nothing was read"
        ):
            future.result(30)
    rows, index = shared.rows(slots, [5] * 5)
    out = np.zeros(shared.spec.reply_bytes(5), np.uint8)
    with pytest.raises(ValueError, match=r"out has [\d,]+ bytes; expected [\d,]+ writable ones for 5 rows"):
        shared.peer.fetch(shared.spec, *rows, out=out[:-1], **index)
    with pytest.raises(ValueError, match=r"slots is int32 \[5\]; expected int64 \[5\]"):
        shared.peer.fetch(shared.spec, rows[0].astype(np.int32), *rows[1:], out=out, **index)
    index["block_ids"] = index["block_ids"].astype(np.int64)
    with pytest.raises(ValueError, match=r"block_ids is int64 \[5, 4\]; expected int32 \[5, K\]"):
        shared.peer.fetch(shared.spec, *rows, out=out, **index)
    shared.check(slots, [5] * 5)


@needs_nixl
def test_after_a_fork_and_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        def metadata(self, name: str, table: str) -> Future[bytes]:
            raise TransportError("it cannot be reached")

    spec = WindowSpec("t", SCHEMA, {"flag": Window(1)})
    one, out = np.zeros(1, np.int64), np.zeros(spec.reply_bytes(1), np.uint8)
    arrays = {"extent": np.array([[1, 0, 0]]), "block_ids": np.zeros((1, 1), np.int32)}
    peer = NixlPeer(Unreachable(), timeout=5.0, name="node c")
    with pytest.raises(TransportError, match=r"node c: it cannot be reached; 1 rows of table 't'"):
        peer.fetch(spec, one, one, one, out=out, **arrays).result(30)
    pid, peer._pid = peer._pid, -1
    with pytest.raises(
        TransportError, match=r"NIXL runs in process -1, .* is a fork; .* Start processes by spawning"
    ):
        peer.fetch(spec, one, one, one, out=out, **arrays)
    peer._pid = pid
    peer.close()
    peer.close()
    with pytest.raises(TransportError, match="The connection to node c has been closed"):
        peer.fetch(spec, one, one, one, out=out, **arrays)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TransportError, match=r"pip install '\.\[nixl\]'"):
        NixlOwner(["t"])


@needs_nixl
@pytest.mark.long
def test_an_owner_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # shared memory can be read without it
    owner = Owner("nixl-own", UCX_TLS="tcp")
    world = World("nixl-own", owner)
    try:
        slots = list(world.held)[:4]
        world.check(slots, [0] * 4)
        stop_process(world.owner.process.pid)
        world.peer._timeout = 0.5
        with pytest.raises(PeerTimeoutError, match=r"node b: no answer within 0\.5 s; 4 rows"):
            world.fetch(slots, [0] * 4)
        world.peer._timeout = 20.0
        assert world.peer.quarantined == (1, world.spec.reply_bytes(4))
        ((read, _),) = world.peer._quarantine
        assert read.session._is_kept, (
            "else the next garbage collection destroys it, which UCX may not survive"
        )
        go_on(world.owner.process.pid)
        world.check(slots, [0] * 4)
        assert world.owner.asked == 2
        wait_until(lambda: world.peer.quarantined == (0, 0))
        # One that has not ended when the peer is closed is never destroyed: it has a reference that nobody gives up.
        stop_process(world.owner.process.pid)
        world.peer._timeout = 0.5
        with pytest.raises(PeerTimeoutError):
            world.fetch(slots, [0] * 4)
        world.peer.close()
        (entry,) = world.peer._quarantine
        world.peer._quarantine.clear()
        assert sys.getrefcount(entry) == 3, "here, as an argument, and for ever"
    finally:
        world.close()
        owner.end()


# ---------------------------------------------------------------- the description


def _description() -> Description:
    table = Table.create(COLUMNS, max_steps=64, max_trajectories=4, block_steps=4)
    layout = table._engine.region.layout
    columns = tuple(layout.columns.values())
    numbers = {"base": 1 << 40, "region_bytes": layout.region_bytes, "block_steps": 4, "num_slots": 4}
    numbers |= {"num_blocks": layout.num_blocks, "max_steps": 64, "word": 1 << 41, "value": 7}
    numbers |= {name: layout.arrays[name][0] for name in ("generation", "state", "extent", "block_ids")}
    numbers |= {"half": layout.half, "runs": layout.arrays["counters"][0]}
    return Description("agent", b"\0\1nixl", SCHEMA, columns, numbers)


GOOD = _description().to_bytes()


def test_a_description_travels() -> None:
    found = Description.from_bytes(GOOD)
    assert found.numbers == _description().numbers
    assert found.columns == _description().columns
    assert found.schema.to_json() == SCHEMA.to_json()
    assert (found.agent, found.connection) == ("agent", b"\0\1nixl")


@given(st.data())
@settings(max_examples=examples(50))
def test_a_damaged_description_is_refused_or_harmless(data: st.DataObject) -> None:
    changed = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    with pytest.raises(TransportError, match=r"\S"):
        Description.from_bytes(bytes(changed[:cut]) if cut < len(changed) else bytes(changed) + b"x")
    with contextlib.suppress(TransportError):
        found = Description.from_bytes(bytes(changed))
        limit = found.numbers["region_bytes"]
        for place in found.columns:
            assert 0 <= place.base <= place.offset
            assert place.base + place.block_stride * found.numbers["num_blocks"] <= limit


def test_a_description_that_contradicts_itself_or_is_invalid() -> None:
    for name, value, message in (
        ("region_bytes", 100, "a region of 100 bytes that holds"),
        ("generation", 1 << 50, "that holds 1,125,"),
        ("num_blocks", 1 << 40, "that holds"),
        ("block_steps", 1 << 20, r"blocks of \d+ bytes, steps of"),
        ("num_slots", 0, "is invalid"),
        ("half", 1 << 50, "that holds"),
        ("extent", 1 << 50, "that holds"),
    ):
        described = _description()
        described.numbers[name] = value
        with pytest.raises(TransportError, match=message):
            Description.from_bytes(described.to_bytes())
    for data in (b"", b"GEARNIXL", json.dumps({}).encode(), b"\x80\x04\x95"):
        with pytest.raises(TransportError, match="description of its memory is invalid"):
            Description.from_bytes(data)
    with pytest.raises(TransportError, match="describes its memory in version 1; expected 4"):
        Description.from_bytes(GOOD[:8] + b"\1\0" + GOOD[10:])


# ---------------------------------------------------------------- spans


ALL = {"x": "x", "again": "x", "flag": "flag", "big": "big", "task": "task"}


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
        return self.peer.fetch(spec, slots, firsts, generations, counts, out=out), out, spec

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


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["packed", "apart"])
def spans(owner: Owner, request: pytest.FixtureRequest) -> Iterator[SpanWorld]:
    world = SpanWorld(owner, packed=request.param)
    yield world
    world.close()


# ---------------------------------------------------------------- what arrives


@needs_nixl
@pytest.mark.parametrize("columns", [ALL, {"big": "big"}, {"flag": "flag", "task": "task"}], ids=len)
def test_spans_are_those_of_the_table(spans: SpanWorld, columns: dict[str, str]) -> None:
    random = np.random.default_rng(len(columns))
    for number in (1, 7, 40):
        slots = random.choice(list(spans.held), number).tolist()
        lengths = np.array([len(spans.held[slot]["x"]) for slot in slots])
        firsts = random.integers(0, lengths + 1)
        counts = random.integers(0, lengths - firsts + 1)
        assert all(spans.served(slots, firsts.tolist(), counts.tolist(), columns=columns))
    assert spans.served(*spans.whole(list(spans.held)), columns=columns) == [True] * 20
    assert spans.served([], [], [], columns=columns) == []


@needs_nixl
def test_a_fetch_takes_five_reads_and_one_more_after_a_compaction(spans: SpanWorld) -> None:
    slots = list(spans.held)[:5]
    for reads in (6, 5, 5):  # at first the number of compactions is not known
        spans.peer.reads = 0
        assert all(spans.served(*spans.whole(slots)))
        assert spans.peer.reads == reads
    spans.flip()
    spans.peer.reads = 0
    assert all(spans.served(*spans.whole(slots)))
    assert spans.peer.reads == 6


# ---------------------------------------------------------------- between two reads


def change_nothing(spans: SpanWorld, slots: list[int]) -> None:
    pass


def compact(spans: SpanWorld, slots: list[int]) -> None:
    spans.flip()


def compact_twice(spans: SpanWorld, slots: list[int]) -> None:
    """Both halves are written: the places that the reader knows have ids of others."""
    for _ in range(2):
        spans.table.remove([slot for slot in spans.held if slot not in slots][:3])
        spans.flip()
        for i in range(3):
            spans.table.add(steps(9 + i, 700 + i))


def evict_some(spans: SpanWorld, slots: list[int]) -> None:
    """The slots and blocks of the first half of the rows get other trajectories."""
    spans.table.remove(slots[: len(slots) // 2])
    for i in range(12):
        spans.table.add(steps(1 + 2 * i, 800 + i))


def evict_all(spans: SpanWorld, slots: list[int]) -> None:
    """Everything is replaced, also what lies in both halves of the block tables."""
    for turn in range(3):
        spans.table.clear()
        spans.flip()
        for i in range(20):
            spans.table.add(steps(1 + i, 900 + 20 * turn + i))


def recover(spans: SpanWorld, slots: list[int]) -> None:
    """As after a process that was killed in the middle of a change."""
    index = spans.table._engine.index
    spans.table.remove([slot for slot in spans.held if slot not in slots][:4])
    index.recovery.locked(index.recovery.rebuild)
    for i in range(6):
        spans.table.add(steps(20, 600 + i))


CHANGES = (change_nothing, compact, compact_twice, evict_some, evict_all, recover)


@needs_nixl
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("at", range(6))
def test_rows_are_whole_whatever_happens_before_a_read(
    spans: SpanWorld, change: Callable[[SpanWorld, list[int]], None], at: int
) -> None:
    """Rows are those that were asked for, or GONE; and they are served where their trajectories stay."""
    slots = [slot for slot, rows in spans.held.items() if len(rows["x"]) > 4][::2]
    held = dict(spans.held)
    assert all(spans.served(*spans.whole(slots)))
    spans.peer.reads, spans.peer.at = 0, at
    spans.peer.before = lambda: change(spans, slots)
    found = spans.served(*spans.whole(slots), held=held)
    assert spans.peer.reads > at or at == 5
    evicted = {"evict_some": len(slots) // 2, "evict_all": len(slots)}.get(change.__name__, 0)
    assert all(found[evicted:])
    if at < 4:  # before the read of the states
        assert not any(found[:evicted])
    spans.table._engine.index.recovery.check_valid()


@needs_nixl
@pytest.mark.parametrize("at", range(5))
def test_a_trajectory_that_grows_has_its_old_steps(spans: SpanWorld, at: int) -> None:
    rows = steps(70, 5)
    with spans.table.writer(commit_every_step=True) as writer:
        writer.trajectory = {"task": rows["task"]}
        append = lambda i: writer.append(x=rows["x"][i], flag=rows["flag"][i], big=rows["big"][i])  # noqa: E731
        for i in range(6):
            append(i)
        slot = int(spans.table.indices()[-1])
        spans.add(5, 6)  # behind it in the block tables
        spans.held[slot] = rows
        assert spans.served([slot], [0], [6]) == [True]
        spans.peer.reads, spans.peer.at = 0, at
        spans.peer.before = lambda: [append(i) for i in range(6, 70)]  # type: ignore[assignment, return-value]
        assert spans.served([slot, slot], [0, 5], [6, 1]) == [True, True]
        assert spans.served([slot], [3], [60]) == [True]


@needs_nixl
def test_compactions_that_do_not_end_leave_the_deadline(spans: SpanWorld) -> None:
    """A table whose block tables move during every fetch: rows come as soon as they stand still for three reads."""
    slots = list(spans.held)[:6]
    assert all(spans.served(*spans.whole(slots)))
    read, flips = Interrupted._read, itertools.count()

    def flipping(self: Any, *args: Any) -> Any:
        if next(flips) < 40:
            spans.flip()
        return read(self, *args)

    spans.peer._read = flipping.__get__(spans.peer)  # type: ignore[method-assign]
    assert all(spans.served(*spans.whole(slots)))
    assert 40 < next(flips) < 50


# ---------------------------------------------------------------- what is refused


@needs_nixl
def test_spans_that_no_table_has_are_refused(spans: SpanWorld) -> None:
    slots = list(spans.held)[:4]

    def refused(slots: Array, firsts: Array, counts: Array) -> None:
        spec, out = PackedSpec(NAME, SCHEMA, ALL), np.zeros(1 << 20, np.uint8)
        spans.peer.fetch(spec, slots, firsts, np.zeros_like(slots), counts, out=out).result(PATIENCE)

    for place, value in ((0, -1), (0, 40), (1, -1), (1, 601), (2, -1), (2, 601)):
        rows_of: list[Any] = [list(part) for part in spans.whole(slots)]
        rows_of[place][2] = value
        with pytest.raises(
            TransportError, match=r"node b: Row 2 of 4 of table 'nixl-spans' has slot .*Nothing was read"
        ):
            refused(*(np.array(part, dtype=np.int64) for part in rows_of))
    other = PackedSpec(NAME, Schema({"x": Column(torch.float64, (5,))}), {"x": "x"})
    unknown = PackedSpec("other", SCHEMA, {"x": "x"})
    one = np.zeros(1, np.int64)
    for spec, message in (
        (other, r"has the columns .*float32.* at its owner; expected .*float64"),
        (unknown, r"'other' is not served; tables here: nixl-own, nixl-"),
    ):
        with pytest.raises(TransportError, match=message):
            spans.peer.fetch(spec, one, one, one, one, out=np.zeros(1024, np.uint8)).result(PATIENCE)
    with pytest.raises(SchemaError, match=r"counts is int32 \[1\]; expected int64 \[1\]"):
        spans.peer.fetch(other, one, one, one, one.astype(np.int32), out=np.zeros(1024, np.uint8))
    with pytest.raises(SchemaError, match=r"out has 8 bytes; expected 1,152 writable ones for 1 rows"):
        spans.peer.fetch(other, one, one, one, one + 25, out=np.zeros(8, np.uint8))
    assert all(spans.served(*spans.whole(slots)))


@needs_nixl
@pytest.mark.parametrize("value", [-1, 2**31 - 1])
def test_a_corrupt_block_table_is_an_error(spans: SpanWorld, value: int) -> None:
    slots = list(spans.held)[:4]
    assert all(spans.served(*spans.whole(slots)))
    extent, ids = (spans.table._engine.region.array(name) for name in ("extent", "block_ids"))
    place = int(extent[slots[2], 1])
    before, ids.reshape(-1)[place] = int(ids.reshape(-1)[place]), value
    with pytest.raises(TransportError, match=r"row 2, slot \d+, has no valid block table .*; 4 rows"):
        spans.served(*spans.whole(slots))
    ids.reshape(-1)[place] = before
    for wrong in (-(1 << 62), ids.size, 1 << 62):
        extent[slots[2], 1] = wrong
        with pytest.raises(TransportError, match=r"row 2, slot \d+, has no valid block table"):
            spans.served(*spans.whole(slots))
    extent[slots[2], 1] = place
    assert all(spans.served(*spans.whole(slots)))


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


# ---------------------------------------------------------------- the lists


@settings(max_examples=examples(100))
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
        rows = Rows(np.array([[1, 0], [40, 100], [0, 0], [300, 800]]))
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
