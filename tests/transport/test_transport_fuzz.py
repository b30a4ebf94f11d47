"""Whatever is sent: no crash, no hang, nothing read outside of the table; a correct requester is served after it."""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_common import COLUMNS, named, number_of, numbers_of, rows
from transport_common import (
    HELLO,
    SECRET,
    WINDOWS,
    Raw,
    Serving,
    check_fetch,
    fetch_message,
    message,
    open_message,
    serving,
    spec_of,
)
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import TableFullError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.schema import Schema
from gear_loader.transport import Limits, Peer, WindowSpec, start_server
from gear_loader.transport.change_messages import Advance, Advanced, Fill, Overwrite, Part, Unfilled, Update
from gear_loader.transport.spec import PackedSpec
from gear_loader.transport.store_message import Store, step_places
from gear_loader.transport.wire import Header, Kind, pack_error, pack_text

FUZZ = Path(__file__).parents[1] / "fuzz" / "fuzz_wire.py"
fuzz = runpy.run_path(str(FUZZ))
FIRST = 10**12 + 7  # number of the first trajectory beside the nonsense
one_input, TARGETS = fuzz["one_input"], fuzz["TARGETS"]


@pytest.fixture(scope="module")
def shelf() -> Iterator[tuple[gear.Table, Serving, Peer]]:
    """A table whose trajectories are never removed, its server, and a peer that must be served all the time."""
    with named(max_steps=1000, max_trajectories=64) as table:
        for i in range(6):
            table.add(rows(i, 5 + i))
        limits = Limits(handshake=0.5, patience=0.5, rows=100, store_bytes=1 << 14, reply_bytes=1 << 16)
        with serving(str(table.name), limits=limits) as server:
            yield table, server, server.peer()


def still_serves(table: gear.Table, peer: Peer) -> None:
    check_fetch(peer, table, spec_of(table), [3, 1, 5], [1, 2, 9])


def say(raw: Raw, data: bytes) -> bytes:
    """Say this and no more, and read until the server has closed: it does, whatever it was sent."""
    heard = b""
    with contextlib.suppress(ConnectionError):  # it may be refused before its end
        raw.socket.sendall(data)
    with contextlib.suppress(ConnectionError):  # cut, with something that it had not read
        raw.socket.shutdown(socket.SHUT_WR)
        while part := raw.socket.recv(1 << 16):
            heard += part
    return heard


def requests_of(name: str) -> list[bytes]:
    """Correct messages of every kind that a requester may send."""
    schema = Schema(COLUMNS)
    spec = WindowSpec(name, schema, WINDOWS)
    ids, priorities = np.full(2, -1), np.full(2, UNSET, dtype=np.float32)
    store = Store(name, schema, np.array([2, 3]), ids, priorities, np.array([0, 1]))
    packed = PackedSpec(name, schema, {"number": "number", "again": "number"})
    late = Schema({"number": schema["number"], "late": gear.Column(torch.float32, late=True)})
    numbers = np.array([1, 9]), np.array([1, -1]), np.array([2, 3])
    fill = Fill(name, late, ("late",), *numbers, 7, False)
    mutable = Schema({"number": schema["number"], "state": gear.Column(torch.float32, (2,), mutable=True)})
    change = Overwrite(name, mutable, ("state",), *numbers, np.array([3]), True, 7, False)
    return [
        message(Kind.SET, change.pack(), bytes(change.bulk_bytes)),
        message(Kind.OPEN, open_message(packed, 1)),
        message(Kind.FETCH, fetch_message([[1, 3], [0, 2], [1, 1], [2, 9]], 1)),
        message(Kind.FILL, fill.pack(), bytes(fill.bulk_bytes)),
        message(Kind.UNFILLED, Unfilled(name, ("late",)).pack()),
        message(Kind.ADVANCE, Advance(name, 3, 9, 7).pack()),
        message(Kind.OPEN, open_message(spec)),
        message(Kind.FETCH, fetch_message([[1, 3, 70], [0, 2, 9], [1, 1, 1]])),
        message(Kind.STORE, store.pack(), bytes(store.bulk_bytes)),
        message(Kind.METADATA, pack_text("a") + pack_text(name)),
        message(
            Kind.UPDATE, Update(name, np.array([1, 9]), None, np.ones(2, dtype=np.float32), False).pack()
        ),
        message(Kind.PART, Part(5, 0, 2).pack(), bytes(step_places(schema, 2)[1])),
        message(Kind.BYE),
    ]


@settings(max_examples=examples(100))
@given(st.data(), st.binary(max_size=300))
def test_parsers(data: st.DataObject, noise: bytes) -> None:
    """Noise, and messages that are nearly right."""
    one_input(noise)
    whole = data.draw(st.sampled_from(requests_of("replay")))[64:]
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    piece = data.draw(st.binary(max_size=9))
    target = bytes([data.draw(st.integers(0, len(TARGETS) - 1))])
    one_input(target + whole[:at] + piece + whole[at + data.draw(st.integers(0, 9)) :])


def mutated(chance: random.Random, data: bytes) -> bytes:
    """A few bytes changed, removed, repeated or inserted; numbers often become those at the ends of their range."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        how = chance.randrange(5)
        if how == 0:
            changed[at : at + 1] = chance.randbytes(1)
        elif how == 1:
            del changed[at : at + chance.randint(1, 9)]
        elif how == 2:
            changed[at:at] = changed[at : at + chance.randint(1, 32)]
        elif how == 3:
            changed[at:at] = chance.randbytes(chance.randint(1, 9))
        else:
            size = chance.choice((1, 2, 4, 8))
            number = chance.choice((0, 1, 2**7, 2**15, 2**31, 2**63 - 1, 2**64 - 1))
            changed[at : at + size] = (number % 256**size).to_bytes(size, "little")
    return bytes(changed)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "count", [50_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)], ids=["some", "a million"]
)
def test_messages_that_are_nearly_right(count: int) -> None:
    """Requests of writers and the texts of servers, for the parsers alone."""
    seed = int.from_bytes(os.urandom(4), "little")
    chance = random.Random(seed)
    schema = Schema({"number": gear.Column(torch.int64), "goal": gear.Column(torch.int8, per="trajectory")})
    one, two = np.full(1, 5), np.array([3, 1])
    some = np.zeros(2, dtype=np.float32)
    stores = [
        Store("replay", schema, two, two, some, np.array([1, 0]), again=True),
        Store("replay", schema, one + 4, one, some[:1], one * 0, parts=2, before=4),
    ]
    samples = {
        "parse_store": [store.bulk_bytes.to_bytes(3, "little") + store.pack() for store in stores],
        "parse_update": [Update("replay", two, two, some, True).pack()],
        "parse_advance": [Advance("replay", 3, 9, 7, again=True).pack()],
        "parse_advanced": [Advanced(4, 9, True).pack()],
        "parse_part": [(640).to_bytes(3, "little") + Part(5, 1, 40).pack()],
        "parse_error": [pack_error(TableFullError("The table is full.")), pack_error(OSError("lost"))],
    }
    targets = {target.__name__: i for i, target in enumerate(TARGETS)}
    whole = [(bytes([targets[name]]), each) for name, some_ in samples.items() for each in some_]
    for number in range(count):
        target, sample = chance.choice(whole)
        data = target + mutated(chance, sample)
        try:
            one_input(data)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, input {number}: {data!r}") from error


@pytest.mark.long
def test_a_server_that_is_killed_while_it_is_sent_nonsense() -> None:
    """What is stored by a correct client in between is there once, and the table is whole."""
    seed = int.from_bytes(os.urandom(4), "little")
    chance = random.Random(seed)
    with named(max_steps=20_000, max_trajectories=4000) as table, contextlib.ExitStack() as stack:
        name = str(table.name)
        server = stack.enter_context(start_server([name], secret=SECRET))
        address = server.addresses["socket"]
        port = int(address.rpartition(":")[2])
        url = f"gear{address.removeprefix('socket')}/{name}"
        remote = stack.enter_context(gear.connect(url, secret=SECRET, timeout=120.0))
        writer, whole, count = remote.writer(), requests_of(name), 0
        for turn in range(6):
            for _ in range(40):
                with contextlib.suppress(OSError), Raw(address) as raw:
                    raw.introduce(SECRET)
                    for _ in range(chance.randint(1, 4)):
                        sent = chance.choice(whole)
                        head, rest = (sent[:64], mutated(chance, sent[64:] or b"-"))
                        header = Header.parse(memoryview(head))
                        small = min(len(rest), header.small)
                        right = header._replace(small=small, bulk=len(rest) - small).pack()
                        raw.socket.sendall((head if chance.random() < 0.3 else right) + rest)
                for values in rows_of(FIRST + count):
                    writer.append(values)
                writer.commit()
                count += 1
            if turn < 5:
                os.kill(server.pid, signal.SIGKILL)
                server.stop()
                server = stack.enter_context(start_server([name], port=port, secret=SECRET))
        remote.flush()
        trajectories = [table[int(index)] for index in table.indices()]
        correct = [each for each in trajectories if FIRST <= int(each["number"][0]) < FIRST + count]
        assert [number_of(each) for each in correct] == list(range(FIRST, FIRST + count)), f"seed {seed}"
        table.check_valid()


def rows_of(number: int) -> Iterator[dict[str, np.ndarray]]:
    """The steps of a trajectory of three, one by one."""
    values = {name: np.asarray(each) for name, each in rows(number, 3).items()}
    return ({name: each[step] for name, each in values.items()} for step in range(3))


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=400), hello=st.booleans())
def test_before_the_handshake(shelf: tuple[gear.Table, Serving, Peer], data: bytes, hello: bool) -> None:
    table, server, peer = shelf
    with server.raw() as raw:
        heard = say(raw, (message(Kind.HELLO, HELLO) if hello else b"") + data)
    assert str(table.name).encode() not in heard
    still_serves(table, peer)


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_after_the_handshake(shelf: tuple[gear.Table, Serving, Peer], data: st.DataObject) -> None:
    table, server, peer = shelf
    whole = requests_of(str(table.name))
    said = b""
    for _ in range(data.draw(st.integers(1, 4))):
        part = bytearray(data.draw(st.sampled_from(whole)))
        how = data.draw(st.sampled_from(["right", "bits", "cut", "size", "kind", "noise"]))
        if how == "bits":
            for _ in range(data.draw(st.integers(1, 4))):
                bit = data.draw(st.integers(0, len(part) * 8 - 1))
                part[bit // 8] ^= 1 << bit % 8
        elif how == "cut":
            del part[data.draw(st.integers(0, len(part))) :]
        elif how in ("size", "kind"):  # with a checksum that is right
            header = Header.parse(memoryview(part)[:64])
            small, bulk = (data.draw(st.integers(0, 2**bits - 1)) for bits in (32, 64))
            wrong = header._replace(small=small, bulk=bulk)
            if how == "kind":
                wrong = header._replace(kind=data.draw(st.sampled_from(Kind)))
            part[:64] = wrong.pack()
        elif how == "noise":
            part[64:] = data.draw(st.binary(max_size=200))
        said += bytes(part)
    with server.proven() as raw:
        say(raw, said)
    still_serves(table, peer)


@pytest.mark.parametrize("packed", [False, True])
@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), seed=st.integers(0, 2**32))
def test_any_numbers_in_a_fetch(
    shelf: tuple[gear.Table, Serving, Peer], numbers: list[int], seed: int, packed: bool
) -> None:
    table, server, peer = shelf
    fields = 3 + packed
    n = len(numbers) // fields
    wild = np.array(numbers[: fields * n], dtype=np.int64).reshape(fields, n)
    chance = random.Random(seed)
    for i in range(n):  # some of them nearly right
        wild[0, i] = chance.choice([wild[0, i], chance.randrange(70)])
        wild[2, i] = chance.choice([wild[2, i], 1, 2])
        if packed:
            wild[1::2, i] = chance.choice([wild[1::2, i], [chance.randrange(4), chance.randrange(9)]])
    spec: Any = spec_of(table)
    if packed:
        spec = PackedSpec(str(table.name), table.schema, {"number": "number", "check": "check"})
    with server.proven() as raw:
        raw.send(Kind.OPEN, open_message(spec))
        assert raw.receive()[0].kind is Kind.OPENED
        raw.send(Kind.FETCH, fetch_message(wild))
        header, small, bulk = raw.receive()
    still_serves(table, peer)
    if header.kind is Kind.ERROR:
        assert any(
            text in small for text in (b"anchors[", b"expected a number from 0 to", b"Ask for fewer rows")
        )
        return
    assert header.kind is Kind.REPLY
    data = np.frombuffer(bulk, dtype=np.uint8)
    if not packed:
        status = data[spec.data_bytes(n) :][:n]
        assert set(status.tolist()) <= {0, 1}
        for piece in spec.pieces(n):
            values = data[piece.offset :][: n * piece.row_bytes].reshape(n, piece.row_bytes)
            assert not values[status == 1].any()
        return
    counts = wild[3]
    total = int(counts.sum())
    status = data[spec.data_bytes(n, total) :][:n]
    assert set(status.tolist()) <= {0, 1}
    (span,) = [span for span in spec.spans(n, total) if span.name == "number"]
    values = data[span.offset :][: total * span.step_bytes].view(np.int64)
    for i, begin in enumerate(np.cumsum(counts) - counts):
        part, first = values[begin : begin + counts[i]], int(wild[1, i])
        stored = [0] * len(part) if status[i] else table[int(wild[0, i])]["number"].tolist()[first:]
        assert part.tolist() == stored[: counts[i]]


def test_the_table_is_whole(shelf: tuple[gear.Table, Serving, Peer]) -> None:
    """After all that: what could be stored is, zeros, and nothing else has changed."""
    table, server, peer = shelf
    wait_until(lambda: server.server.num_connections <= 1)
    table.check_valid()
    still_serves(table, peer)
    zeros = [int(i) for i in table.indices() if not table[int(i)]["check"].any()]
    table.remove(zeros)
    assert numbers_of(table)[:6] == list(range(6))
