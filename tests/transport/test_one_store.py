"""A STORE of one trajectory, which the event loop's own call answers: its bytes, and how they arrive."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from table_common import COLUMNS, named, number_of, numbers_of, rows
from transport_common import PATIENCE, SECRET, Serving, message, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import GearError, StaleIndexError, TransportError
from gear_loader.storage.ids import CLIENT_ORIGIN, joined
from gear_loader.storage.schema import Schema
from gear_loader.transport import Limits
from gear_loader.transport.connection import _IN_A_ROW, Connection
from gear_loader.transport.store_message import One, OneStore, Rows, Store
from gear_loader.transport.wire import Header, Kind

KINDS = {
    "plain": Schema(COLUMNS),
    "once": Schema(
        {"half": gear.Column(torch.bfloat16), "goal": gear.Column(torch.int8, (3,), per="trajectory")}
    ),
    "wide": Schema({"wide": gear.Column(torch.float32, (32,), final=True)}),  # no padding
}
LIMITS = Limits()
ids = (int(joined(np.int64(number), CLIENT_ORIGIN)) for number in range(1, 1 << 30))


def values(schema: Schema, count: int, seed: int = 0) -> Rows:
    """A trajectory of any bytes, in two pieces if it has two rows."""
    chance = np.random.default_rng(seed)
    cuts = [0, count // 2, count] if count > 1 else [0, count]
    steps = {n: chance.integers(0, 256, (count, c.step_bytes), np.uint8) for n, c in schema.steps.items()}
    pieces = [{n: each[a:b] for n, each in steps.items()} for a, b in itertools.pairwise(cuts)]
    once = {n: chance.integers(0, 256, (1, c.step_bytes), np.uint8) for n, c in schema.per_trajectory.items()}
    return Rows(count, pieces, once)


def stored(
    table: gear.Table, number: int, count: int, request: int = 1, identity: int | None = None
) -> bytes:
    """The message that stores a trajectory of `table_common.rows`."""
    _, arrays = table.schema.validate(rows(number, count))
    one = One(count, 0, -1.0, next(ids) if identity is None else identity, 5000)
    small, bulk, size = OneStore(str(table.name), table.schema).pack(one, [arrays], arrays)
    data = b"".join(bulk)
    assert len(data) == size
    return Header(Kind.STORE, request, len(small), size).pack() + small + data


# ---------------------------------------------------------------- its bytes


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("count", "final"), [(1, 0), (2, 1), (7, 0), (300, 1)])
def test_it_is_the_message_that_store_reads_and_writes(name: str, count: int, final: int) -> None:
    schema = KINDS[name]
    kind, given = OneStore("replay", schema), values(schema, count)
    one = One(count, final, 0.5, next(ids), 1234)
    small, bulk, size = kind.pack(one, given.pieces, given.once)
    data = b"".join(bulk)
    assert small == kind.store(one).pack()
    assert len(data) == size == kind.store(one).bulk_bytes
    request = Store.parse(small, size, LIMITS)
    assert [request.lengths[0], request.finals[0], request.ids[0], request.wait] == [
        count,
        final,
        one.id,
        1234,
    ]
    found = OneStore.parse(memoryview(small), size)
    assert found is not None
    again, read, offsets = found
    assert (again.table, again.schema, read) == ("replay", request.schema, one)
    assert offsets == [at for at, _ in request.columns]
    for column, at in zip(schema, offsets, strict=True):
        parts = (
            [given.once[column]] if schema[column].trajectory else [piece[column] for piece in given.pieces]
        )
        wanted = b"".join(part.tobytes() for part in parts)
        assert data[at : at + len(wanted)] == wanted
        assert not any(data[at + len(wanted) : at + len(wanted) + -len(wanted) % 128])


@settings(max_examples=examples(200))
@given(st.integers(0, 1 << 30), st.sampled_from(list(KINDS)), st.integers(0, 1))
def test_what_is_not_valid_is_left_to_store(seed: int, name: str, final: int) -> None:
    """Where both read a changed message, they read the same; where `Store` refuses it, so does the other."""
    chance, schema = random.Random(seed), KINDS[name]
    kind, one = OneStore("replay", schema), One(5, final, 1.0, 77 << 16 | CLIENT_ORIGIN, 10)
    small, _, size = kind.pack(one, (given := values(schema, 5)).pieces, given.once)
    changed = bytearray(small)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(60) if chance.random() < 0.8 else chance.randrange(len(changed))
        changed[at : at + chance.choice((0, 1, 8))] = chance.randbytes(chance.choice((0, 1, 1, 8)))
    size = chance.choice((size, size, size - 128, size + 128, 0))
    found = OneStore.parse(memoryview(bytes(changed)), size)
    try:
        request = Store.parse(bytes(changed), size, LIMITS)
    except (TransportError, GearError):
        assert found is None
        return
    if found is not None:
        other, read, offsets = found
        assert (other.table, other.schema, offsets) == (
            request.table,
            request.schema,
            [at for at, _ in request.columns],
        )
        same = other.store(read)
        for field in ("lengths", "ids", "finals", "priorities"):
            assert getattr(same, field).tobytes() == getattr(request, field).tobytes()
        assert not request.again
        assert not request.parts
        assert request.wait == read.wait


# ---------------------------------------------------------------- how it arrives


@pytest.fixture
def shelf() -> Iterator[tuple[gear.Table, Serving]]:
    with named(max_steps=40_000, max_trajectories=2000) as table, serving(str(table.name)) as server:
        server.peer().metadata("table", str(table.name)).result(PATIENCE)  # it is attached
        yield table, server


def slots_in(raw: Any, count: int) -> list[int]:
    """The answers to the requests 1 to `count`, in any order."""
    found = {}
    for _ in range(count):
        header, small, bulk = raw.receive()
        assert (header.kind, bulk) == (Kind.STORED, b""), small
        found[header.request] = int.from_bytes(small, "little", signed=True)
    assert sorted(found) == list(range(1, count + 1))
    return [found[request] for request in sorted(found)]


SIZES = [
    1,
    3,
    40,
    3000,
    2,
    6000,
    1,
]  # steps of 40 bytes; the server's read-ahead buffer has 4 KiB, its own limit 256


@pytest.mark.parametrize("cut", [None, 1, 63, 64, 65, 300, 4095, 4096, 4097, 50_000])
def test_messages_in_pieces_of_any_size(shelf: tuple[gear.Table, Serving], cut: int | None) -> None:
    table, server = shelf
    said = b"".join(stored(table, i, count, i + 1) for i, count in enumerate(SIZES))
    with server.proven() as raw:
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        step = len(said) if cut is None else max(cut, len(said) // 3000)
        for at in range(0, len(said), step):
            raw.socket.sendall(said[at : at + step])
        slots = slots_in(raw, len(SIZES))
    assert [number_of(table[slot]) for slot in slots] == list(range(len(SIZES)))
    wait_until(lambda: server.server.num_connections <= 1)
    wait_until(lambda: server.server.resources.budget.held == 0)  # after the answer
    table.check_valid()


def test_many_at_once_are_answered_though_nobody_reads(shelf: tuple[gear.Table, Serving]) -> None:
    """Answers fill the sockets' buffers, so that parts of them are left to be sent later."""
    table, server = shelf
    count = 1500
    with server.proven() as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 11)
        said = b"".join(stored(table, i, 1, i + 1) for i in range(count))
        sender = threading.Thread(target=raw.socket.sendall, args=(said,), daemon=True)
        sender.start()
        time.sleep(0.3)
        raw.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20
        )  # else each answer takes milliseconds
        slots = slots_in(raw, count)
        sender.join(PATIENCE)
    assert [number_of(table[slot]) for slot in slots] == list(range(count))


def test_one_connection_does_not_take_the_turns_of_others(
    shelf: tuple[gear.Table, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, server = shelf
    order: list[int] = []
    real = Connection._store_ahead

    def noted(self: Connection, *given: Any) -> Any:
        rest = real(self, *given)
        if rest is not None:
            order.append(id(self))
        return rest

    monkeypatch.setattr(Connection, "_store_ahead", noted)
    with server.proven() as busy, server.proven() as other:
        many = b"".join(stored(table, i, 1, i + 1) for i in range(300))
        stands, stop = threading.Event(), threading.Event()
        server.loop.soon(lambda: (stands.set(), stop.wait(PATIENCE)))
        assert stands.wait(PATIENCE)  # both have sent all when the server reads
        busy.socket.sendall(many)
        other.socket.sendall(stored(table, 999, 1))
        time.sleep(0.1)
        stop.set()
        slots_in(other, 1)
        slots_in(busy, 300)
    theirs = order.index(next(each for each in order if order.count(each) == 1))
    assert theirs <= 4 * _IN_A_ROW


def test_other_small_requests_are_answered_by_that_call_too(
    shelf: tuple[gear.Table, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, server = shelf
    received: list[Header] = []
    real = Connection._execute

    async def noted(self: Connection, header: Header, *given: Any) -> None:
        received.append(header)
        await real(self, header, *given)

    monkeypatch.setattr(Connection, "_execute", noted)
    address = f"gear://{server.address.partition('://')[2]}/{table.name}"
    with gear.connect(address, secret=SECRET, timeout=PATIENCE) as remote:
        remote.extend([rows(1, 2), rows(2, 3)])
        assert remote.update_priority([0, 1], [2.0, 3.0]) == 0
        assert not received
        with pytest.raises(StaleIndexError, match="index 9"):
            remote.update_priority([9], [1.0], stale="error")
    assert [each.kind for each in received] == [Kind.UPDATE]
    assert numbers_of(table) == [1, 2]
    assert table._engine.reader().arrays.priority[:2].tolist() == [2.0, 3.0]


RULES: dict[str, dict[str, Any]] = {
    "limiter": {"rate_limiter": gear.SampleToInsertRatio(1.0, min_size=1, error_buffer=1e6)},
    "age": {"max_age": 1e6},
    "others": {},
}


@pytest.mark.parametrize("steps", [3, 3000])
@pytest.mark.parametrize("rules", RULES)
def test_rules_and_unfinished_trajectories_of_others(
    rules: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take more than one lock, but no thread."""
    threads: list[object] = []
    with named(max_steps=12000, **RULES[rules]) as table, serving(str(table.name)) as server:
        server.peer().metadata("table", str(table.name)).result(PATIENCE)
        monkeypatch.setattr(Connection, "_start", lambda *given, **_: threads.append(given))
        with table.writer() as other, server.proven() as raw:
            if rules == "others":
                other.append(**{name: values[0] for name, values in rows(9, 1).items()})
            for number in range(3):
                raw.socket.sendall(stored(table, number, steps))
                assert number_of(table[slots_in(raw, 1)[0]]) == number
            other.discard()
        assert not threads
        wait_until(lambda: server.server.resources.budget.held == 0)  # after the answer
        table.check_valid()


@pytest.mark.parametrize("steps", [20, 3000])
def test_one_that_has_to_wait_is_stored_when_there_is_room(steps: int) -> None:
    with (
        named(max_steps=steps, max_trajectories=4, on_full="wait") as table,
        serving(str(table.name)) as server,
    ):
        first = table.add(rows(1, steps))
        server.peer().metadata("table", str(table.name)).result(PATIENCE)
        with server.proven() as raw:
            raw.socket.sendall(stored(table, 2, steps))
            wait_until(lambda: server.server.resources.budget.held > 0)
            raw.socket.settimeout(0.2)
            with pytest.raises(TimeoutError):
                raw.socket.recv(1)
            raw.socket.settimeout(PATIENCE)
            table.remove(first)
            slots_in(raw, 1)
        assert numbers_of(table) == [2]
        wait_until(lambda: server.server.resources.budget.held == 0)  # after the answer


def test_what_it_may_not_do_is_an_error_as_of_any_other(shelf: tuple[gear.Table, Serving]) -> None:
    table, server = shelf
    schema = dataclasses.replace(COLUMNS["check"], shape=(2,))
    other = Schema({**COLUMNS, "check": schema})
    cases = [
        (OneStore("elsewhere", table.schema), 3, -1.0, r"is not served here"),
        (OneStore(str(table.name), other), 3, -1.0, r"has the columns"),
        (OneStore(str(table.name), table.schema), 3, -2.0, r"priority -2\.0 was received"),
        (OneStore(str(table.name), table.schema), 3, float("nan"), r"priority nan was received"),
    ]
    with server.proven() as raw:
        for kind, count, priority, text in cases:
            given = values(kind.schema, count)
            small, bulk, _ = kind.pack(One(count, 0, priority, next(ids), 100), given.pieces, given.once)
            for _ in range(2):  # known by then
                raw.socket.sendall(message(Kind.STORE, small, b"".join(bulk)))
                assert re.search(text, raw.error())
        raw.socket.sendall(stored(table, 5, 3))
        slots_in(raw, 1)
    assert numbers_of(table) == [5]
    with serving(str(table.name), allow="read") as reading, reading.proven() as raw:
        raw.socket.sendall(stored(table, 6, 3))
        assert "not written to" in raw.error()
    assert numbers_of(table) == [5]


def test_threads_and_writers_through_one_connection(shelf: tuple[gear.Table, Serving]) -> None:
    """Only one at a time has the connection of its own; the others go through the event loop."""
    table, server = shelf
    url = f"{server.address.replace('socket', 'gear')}/{table.name}"
    with gear.connect(url, secret=server.secret) as remote:

        def work(first: int) -> None:
            writer = remote.writer(wait=True)
            for number in range(first, first + 50):
                if number % 2:
                    writer.append(rows(number, 1 + number % 7))
                    assert number_of(table[writer.commit()]) == number
                else:
                    assert number_of(table[remote.add(rows(number, 1 + number % 7))]) == number

        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(numbers_of(table)) == [1000 * i + k for i in range(4) for k in range(50)]
    table.check_valid()
