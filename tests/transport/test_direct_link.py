"""Rows that are received by the thread that waits for them: every byte, errors between answers, lost connections."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError  # another one before Python 3.11
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_common import named, rows
from transport_common import (
    PATIENCE,
    Serving,
    check_fetch,
    expected,
    fetch_message,
    generations_of,
    open_message,
    pieces_of,
    poisoned,
    serving,
    spec_of,
)

import gear_loader as gear
from gear_loader.errors import PeerTimeoutError, SchemaError, TransportError
from gear_loader.storage.schema import Window
from gear_loader.transport import Limits, Peer
from gear_loader.transport.session import Session
from gear_loader.transport.wire import HEADER, Header, Kind, pack_error

LENGTHS = (1, 7, 4, 13, 2, 8, 30, 5)
Shelf = tuple[gear.Table, Serving]


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    with named() as table, serving(str(table.name)) as server:
        for i, length in enumerate(LENGTHS):
            table.add(rows(i, length))
        yield table, server


def asked(peer: Peer, table: gear.Table, spec: Any, slots: Any, anchors: Any) -> tuple[Any, ...]:
    """A request, and what is compared with its answer."""
    slots, anchors = np.asarray(slots, dtype=np.int64), np.asarray(anchors, dtype=np.int64)
    generations = generations_of(table, np.clip(slots, 0, len(LENGTHS) - 1))
    out = poisoned(spec, len(slots))
    future = peer.fetch(spec, slots, anchors, generations, out=out, here=True)
    return future, spec, out, slots, anchors, generations


def check(table: gear.Table, request: tuple[Any, ...]) -> None:
    future, spec, out, slots, anchors, generations = request
    if (anchors == 1 << 41).any():
        with pytest.raises(TransportError, match=r"asked for 50 rows .* anchors\[49\] is 2199023255552"):
            future.result(PATIENCE)
        return
    gone = np.flatnonzero(slots >= len(LENGTHS)).tolist()
    wanted, states = expected(table, spec.windows, slots, anchors, generations, gone)
    assert future.result(PATIENCE).tolist() == states
    assert pieces_of(spec, out, len(slots)) == wanted


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_of_any_sizes_are_asked_for_in_any_order(shelf: Shelf, seed: int) -> None:
    table, server = shelf
    random = np.random.default_rng(seed)
    peer = server.peer()
    specs = [spec_of(table), spec_of(table, {"value": Window(4)}), spec_of(table, {"step": Window(300)})]
    under_way: list[Any] = []
    for turn in range(20):
        if turn % 9 == 5:  # an error between answers, after which the connection goes on
            under_way.append(asked(peer, table, specs[0], [1] * 50, [0] * 49 + [1 << 41]))
        n = int(random.choice([0, 1, 3, 40, 600, 3000]))
        slots = random.integers(len(LENGTHS) + (turn % 3 == 0), size=n)
        under_way.append(asked(peer, table, specs[random.integers(3)], slots, random.integers(8, size=n)))
        if turn % 7 == 3:  # another way in between
            assert peer.metadata("capacity", str(table.name)).result(PATIENCE)
            check_fetch(peer, table, specs[0], [1], [2])
        while len(under_way) > random.integers(8):
            check(table, under_way.pop(int(random.integers(len(under_way)))))
    for request in under_way:
        check(table, request)
    assert peer._direct._session._number >= 22, "they did not come this way, or the connection was lost"
    peer.close()
    with pytest.raises(TransportError, match="has been closed"):
        asked(peer, table, specs[0], [4], [1])


def test_what_the_server_refuses_is_the_same_error(shelf: Shelf) -> None:
    table, server = shelf
    for here in (True, False):
        peer = server.peer()
        unknown = spec_of(table)
        unknown.table = "nowhere"
        out = poisoned(unknown, 1)
        one = np.zeros(1, dtype=np.int64)
        with pytest.raises(TransportError, match="Table 'nowhere' is not served here"):
            peer.fetch(unknown, one, one, one, out=out, here=here).result(PATIENCE)
        with pytest.raises(SchemaError, match="slots is"):
            peer.fetch(unknown, one.astype(np.int32), one, one, out=out, here=here)
        check(table, asked(peer, table, spec_of(table), [1], [0]))
    with serving(str(table.name), limits=Limits(rows=4)) as small:
        peer = small.peer()
        with pytest.raises(TransportError, match="sends at most 4 rows"):
            asked(peer, table, spec_of(table), [1] * 5, [0] * 5)[0].result(PATIENCE)
        check(table, asked(peer, table, spec_of(table), [1] * 4, [0] * 4))


def test_a_server_that_does_not_answer(shelf: Shelf) -> None:
    table, server = shelf
    spec, stopped, go = spec_of(table), threading.Event(), threading.Event()
    peer = server.peer(timeout=2.0)
    check(table, asked(peer, table, spec, [1], [0]))
    server.loop.soon(lambda: (stopped.set(), go.wait(PATIENCE)))
    assert stopped.wait(PATIENCE)
    with pytest.raises(PeerTimeoutError, match="did not answer within 2 s"):
        asked(peer, table, spec, [1], [0])[0].result()
    go.set()
    check(table, asked(server.peer(), table, spec, [2], [1]))


def test_requests_in_pieces_and_of_strangers(shelf: Shelf) -> None:
    """A request that comes byte by byte, several at once, and one that breaks the rules."""
    table, server = shelf
    spec = spec_of(table)
    message = fetch_message([[1, 2], [0, 0], generations_of(table, [1, 2])])
    one = Header(Kind.FETCH, 7, len(message), 0).pack() + message
    with server.proven() as raw:
        raw.send(Kind.OPEN, open_message(spec))
        assert raw.receive()[0].kind is Kind.OPENED
        for i in range(len(one)):
            raw.socket.sendall(one[i : i + 1])
        first = raw.receive()
        assert first[0][1:] == (7, 0, spec.reply_bytes(2))
        raw.socket.sendall(one * 60 + one[: HEADER + 5])  # more than is read ahead
        for _ in range(60):
            assert raw.receive() == first
        raw.socket.sendall(one[HEADER + 5 :])
        assert raw.receive() == first
        raw.send(Kind.FETCH, message[:-8])
        assert "A message FETCH of 48 bytes has n 2" in raw.text()


def test_a_limit_of_receiving(shelf: Shelf) -> None:
    """A limit ends the wait and nothing else: what came of an answer is kept, byte by byte, also of an error."""
    table, _ = shelf
    spec, one = spec_of(table), np.array([1])
    size = spec.reply_bytes(1)
    text = pack_error(SchemaError("no such row"))
    wanted = bytes(range(256)) * (size // 256 + 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = Peer("socket://127.0.0.1:1", secret=b"s" * 16, timeout=PATIENCE, name="the server")
        link = peer._direct
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(PATIENCE), 0))
        link._socket, link._session = near, Session("the server", Limits())
        link._session._specs[spec] = 0
        outs = [poisoned(spec, 1) for _ in range(4)]
        futures = [peer.fetch(spec, one, one, one, out=out, here=True) for out in outs]
        numbers = list(link._session.pending)
        messages = [Header(Kind.REPLY, number, 0, size).pack() + wanted[:size] for number in numbers]
        messages[1] = Header(Kind.ERROR, numbers[1], len(text), 0).pack() + text
        for data, future in zip(messages, futures, strict=True):
            with pytest.raises(FutureTimeoutError):
                future.result(0.0)
            for at in range(len(data) - 1):
                far.sendall(data[at : at + 1])
                with pytest.raises(FutureTimeoutError):
                    future.result(0.0 if at % 50 else 0.02)
            # The rest, and what follows, when it is asked for without a limit, or with a long one.
            far.sendall(data[-1:])
            error = future.exception(None if future is futures[0] else PATIENCE)
            assert (error is None) == (future is not futures[1]), error
            assert error is None or "no such row" in str(error)
        assert [bytes(out[:size]) == wanted[:size] for out in outs] == [True, False, True, True]
        last = peer.fetch(spec, one, one, one, out=outs[0], here=True)
        holding = threading.Thread(target=lambda: last.exception(PATIENCE), daemon=True)
        holding.start()
        while link._guard.acquire(blocking=False):  # until the thread has it
            link._guard.release()
            time.sleep(1e-3)
        with pytest.raises(FutureTimeoutError):
            last.result(0.05)
        assert link._socket is near, "the connection goes on"
        far.close()
        holding.join(PATIENCE)
        with pytest.raises(TransportError, match="the connection was lost"):
            last.result(PATIENCE)
        peer.close()
