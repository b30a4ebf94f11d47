"""One-sided reads: what arrives is what the table holds, whatever dies or changes meanwhile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nixl_common import COLUMNS, SCHEMA, WINDOWS, Owner, World, make, steps, windows_on
from ucx_common import LOOPBACK, listening
from waiting_common import go_on, stop_process, wait_until

from gear_loader.errors import PeerTimeoutError, TransportError
from gear_loader.storage.schema import Column, Schema, Window
from gear_loader.storage.table import Table
from gear_loader.transport import nixl_agent
from gear_loader.transport.nixl_agent import Description
from gear_loader.transport.nixl_reader import NixlPeer
from gear_loader.transport.nixl_server import NixlOwner
from gear_loader.transport.spec import WindowSpec

pytestmark = pytest.mark.skipif(nixl_agent.installed() is None, reason="NIXL is not installed")


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    made = Owner("nixl-shared", "nixl-own")
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


def test_rows_that_are_gone(world: World) -> None:
    slots = list(world.held)[:6]
    rows, index = world.rows(slots, [0] * 6)
    ticket = world.table._engine.index.reader.begin_read()  # what is retired now stays
    world.table.remove([slots[1]])
    out = np.full(world.spec.reply_bytes(6), 205, dtype=np.uint8)
    assert not world.peer.fetch(world.spec, *rows, out, **index).result(30).any()
    ticket.end()
    world.table.remove([slots[2], slots[3]])
    again = [world.table.add(steps(3, 99)) for _ in range(12)]  # takes what has been freed
    assert {slots[2], slots[3]} <= set(again)
    out[:] = 205
    status = world.peer.fetch(world.spec, *rows, out, **index).result(30)
    assert status.tolist() == [0, 1, 1, 1, 0, 0]
    world.compare(out, slots, [0] * 6, gone=(1, 2, 3))


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
        future = shared.peer.fetch(shared.spec, *rows, out, **index)
        with pytest.raises(
            TransportError, match=r"node b: Row 3 of 5 of table 'nixl-shared' has slot .*Nothing was read"
        ):
            future.result(30)
    shared.check(slots, [5] * 5)


def test_other_tables_and_schemas_are_refused(shared: World) -> None:
    rows, index = shared.rows(list(shared.held)[:2], [0, 0])
    other = Schema({"x": Column(torch.float64, (5,))})
    for spec, message in (
        (
            WindowSpec("nixl-shared", other, {"x": Window(2)}),
            r"has the columns .*float32.* at its owner; expected .*float64",
        ),
        (WindowSpec("other", SCHEMA, WINDOWS), r"'other' is not served; tables here: nixl-own, nixl-shared"),
    ):
        future = shared.peer.fetch(spec, *rows, np.zeros(spec.reply_bytes(2), np.uint8), **index)
        with pytest.raises(TransportError, match=message):
            future.result(30)


def test_arrays_that_do_not_fit_are_refused(shared: World) -> None:
    shared.spec = WindowSpec("nixl-shared", SCHEMA, WINDOWS)
    rows, index = shared.rows(list(shared.held)[:2], [0, 0])
    out = np.zeros(shared.spec.reply_bytes(2), np.uint8)
    with pytest.raises(ValueError, match=r"out is uint8 \[\d+\]; expected contiguous uint8 of at least"):
        shared.peer.fetch(shared.spec, *rows, out[:-1], **index)
    with pytest.raises(ValueError, match=r"slots is int32 \[2\]; expected int64 \[2\]"):
        shared.peer.fetch(shared.spec, rows[0].astype(np.int32), *rows[1:], out, **index)
    index["block_ids"] = index["block_ids"].astype(np.int64)
    with pytest.raises(ValueError, match=r"block_ids is int64 \[2, 4\]; expected int32 \[2, K\]"):
        shared.peer.fetch(shared.spec, *rows, out, **index)


def test_after_a_fork_and_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        def metadata(self, name: str, table: str) -> Future[bytes]:
            raise TransportError("it cannot be reached")

    spec = WindowSpec("t", SCHEMA, {"flag": Window(1)})
    one, out = np.zeros(1, np.int64), np.zeros(spec.reply_bytes(1), np.uint8)
    arrays = {"extent": np.array([[1, 0, 0]]), "block_ids": np.zeros((1, 1), np.int32)}
    peer = NixlPeer(Unreachable(), timeout=5.0, name="node c")
    with pytest.raises(TransportError, match=r"node c: it cannot be reached; 1 rows of table 't'"):
        peer.fetch(spec, one, one, one, out, **arrays).result(30)
    pid, peer._pid = peer._pid, -1
    with pytest.raises(
        TransportError, match=r"NIXL runs in process -1, .* is a fork; .* Start processes by spawning"
    ):
        peer.fetch(spec, one, one, one, out, **arrays)
    peer._pid = pid
    peer.close()
    peer.close()
    with pytest.raises(TransportError, match="The connection to node c has been closed"):
        peer.fetch(spec, one, one, one, out, **arrays)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TransportError, match=r"pip install '\.\[nixl\]'"):
        NixlOwner(["t"])


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
@settings(max_examples=50)
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
    with pytest.raises(TransportError, match="describes its memory in version 1; expected 3"):
        Description.from_bytes(GOOD[:8] + b"\1\0" + GOOD[10:])


def test_an_owner_that_is_killed_and_comes_again(world: World) -> None:
    slots = list(world.held)[:4]
    world.check(slots, [0] * 4)
    world.owner.signal(signal.SIGKILL)
    world.owner.process.join()
    for message in (r"node b: .*; 4 rows of table 'nixl-own' \([\d,]+ bytes\) were to", "node b: "):
        with pytest.raises(TransportError, match=message):
            world.fetch(slots, [0] * 4)
    world.owner.start()
    world.check(slots, [0] * 4)
