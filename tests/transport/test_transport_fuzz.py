"""Whatever is sent: no crash, no hang, nothing read outside of the table; a correct requester is served after it."""

from __future__ import annotations

import contextlib
import random
import runpy
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_common import COLUMNS, named, numbers_of, rows
from transport_common import (
    HELLO,
    WINDOWS,
    Raw,
    Serving,
    check_fetch,
    fetch_message,
    message,
    open_message,
    serving,
    spec_of,
    wait_until,
)

import gear_loader as gear
from gear_loader.storage.operations import UNSET
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.schema import Schema
from gear_loader.transport import Limits, Peer, WindowSpec
from gear_loader.transport.part_message import Part
from gear_loader.transport.store_message import Store, step_places
from gear_loader.transport.update_message import Update
from gear_loader.transport.wire import Header, Kind, pack_text

FUZZ = Path(__file__).parents[1] / "fuzz" / "fuzz_wire.py"
fuzz = runpy.run_path(str(FUZZ))
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
    updates = PriorityUpdates(
        np.array([1, 9]), np.zeros(2, dtype=np.int64), None, np.ones(2, dtype=np.float32)
    )
    return [
        message(Kind.OPEN, open_message(spec)),
        message(Kind.FETCH, fetch_message([[1, 3, 70], [0, 2, 9], [1, 1, 1]])),
        message(Kind.STORE, store.pack(), bytes(store.bulk_bytes)),
        message(Kind.METADATA, pack_text("a") + pack_text(name)),
        message(Kind.UPDATE, Update(name, updates, False).pack()),
        message(Kind.PART, Part(5, 0, 2).pack(), bytes(step_places(schema, 2)[1])),
        message(Kind.BYE),
    ]


@settings(max_examples=100)
@given(st.data(), st.binary(max_size=300))
def test_parsers(data: st.DataObject, noise: bytes) -> None:
    """Noise, and messages that are nearly right."""
    one_input(noise)
    whole = data.draw(st.sampled_from(requests_of("replay")))[64:]
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    piece = data.draw(st.binary(max_size=9))
    target = bytes([data.draw(st.integers(0, len(TARGETS) - 1))])
    one_input(target + whole[:at] + piece + whole[at + data.draw(st.integers(0, 9)) :])


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=400), hello=st.booleans())
def test_before_the_handshake(shelf: tuple[gear.Table, Serving, Peer], data: bytes, hello: bool) -> None:
    table, server, peer = shelf
    with server.raw() as raw:
        heard = say(raw, (message(Kind.HELLO, HELLO) if hello else b"") + data)
    assert str(table.name).encode() not in heard
    still_serves(table, peer)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
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


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=30), seed=st.integers(0, 99))
def test_any_numbers_in_a_fetch(
    shelf: tuple[gear.Table, Serving, Peer], numbers: list[int], seed: int
) -> None:
    table, server, peer = shelf
    n = len(numbers) // 3
    wild = np.array(numbers[: 3 * n], dtype=np.int64).reshape(3, n)
    chance = random.Random(seed)
    for i in range(n):  # some of them nearly right
        wild[0, i] = chance.choice([wild[0, i], chance.randrange(70)])
        wild[2, i] = chance.choice([wild[2, i], 1, 2])
    spec = spec_of(table)
    with server.proven() as raw:
        raw.send(Kind.OPEN, open_message(spec))
        assert raw.receive()[0].kind is Kind.OPENED
        raw.send(Kind.FETCH, fetch_message(wild))
        header, small, bulk = raw.receive()
        assert header.kind in (Kind.REPLY, Kind.ERROR)
        if header.kind is Kind.REPLY:
            data = np.frombuffer(bulk, dtype=np.uint8)
            status = data[spec.data_bytes(n) :][:n]
            assert set(status.tolist()) <= {0, 1}
            for piece in spec.pieces(n):
                values = data[piece.offset :][: n * piece.row_bytes].reshape(n, -1)
                assert not values[status == 1].any()
        else:
            assert b"anchors[" in small
    still_serves(table, peer)


def test_the_table_is_whole(shelf: tuple[gear.Table, Serving, Peer]) -> None:
    """After all that: what could be stored is, zeros, and nothing else has changed."""
    table, server, peer = shelf
    wait_until(lambda: server.server.num_connections <= 1)
    table.check_valid()
    still_serves(table, peer)
    zeros = [int(i) for i in table.indices() if not table[int(i)]["check"].any()]
    table.remove(zeros)
    assert numbers_of(table)[:6] == list(range(6))
