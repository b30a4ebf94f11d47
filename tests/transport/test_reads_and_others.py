"""Rows that are read while something else happens on the same connection."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
from table_common import named, rows
from transport_common import (
    PATIENCE,
    fetch_message,
    generations_of,
    open_message,
    poisoned,
    serving,
    spec_of,
)

import gear_loader as gear
from gear_loader.transport import Peer, direct_link
from gear_loader.transport import socket as carrier
from gear_loader.transport.request import Answer
from gear_loader.transport.wire import Header, Kind

LONG = {"value": gear.Window(3000)}


def fetch(peer: Peer, table: gear.Table, spec: Any, n: int, *, here: bool = True) -> Answer[Any]:
    zeros = np.zeros(n, dtype=np.int64)
    generations = np.repeat(generations_of(table, [0]), n)
    return peer.fetch(spec, zeros, zeros, generations, out=poisoned(spec, n), here=here)


def test_closing_while_a_thread_connects_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with named() as table:
        table.add(rows(0, 5))
        with serving(str(table.name)) as server:
            peer, spec = server.peer(), spec_of(table)
            connect, inside, closed = direct_link.connected, threading.Event(), threading.Event()

            def slowly(*arguments: Any, **options: Any) -> Any:
                made = connect(*arguments, **options)
                inside.set()
                closed.wait(PATIENCE)
                return made

            monkeypatch.setattr(direct_link, "connected", slowly)
            errors: list[BaseException] = []

            def work() -> None:
                try:
                    fetch(peer, table, spec, 1).result(PATIENCE)
                except gear.errors.GearError as error:
                    errors.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            assert inside.wait(PATIENCE)
            peer.close()
            closed.set()
            thread.join(PATIENCE)
            assert errors
            assert peer._direct._socket is None


def test_a_large_request_waits_for_answers_that_fill_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side receives while it sends, so what is under way has to fit into the sockets' buffers."""
    options = carrier.set_options

    def small(connection: socket.socket) -> None:
        options(connection)
        for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connection.setsockopt(socket.SOL_SOCKET, name, 1 << 16)

    monkeypatch.setattr(carrier, "set_options", small)
    monkeypatch.setattr(direct_link, "set_options", small)
    with named() as table:
        table.add(rows(0, 5))
        with serving(str(table.name)) as server:
            peer = server.peer()
            wide, narrow = (
                spec_of(table, {"value": gear.Window(300)}),
                spec_of(table, {"step": gear.Window(1)}),
            )
            for spec in (wide, narrow):
                fetch(peer, table, spec, 1).result(PATIENCE)
            answers = fetch(peer, table, wide, 280), fetch(peer, table, narrow, 60_000)
            for answer in answers:
                answer.result(PATIENCE)


def test_answers_come_in_the_order_of_the_requests_also_to_one_that_fails() -> None:
    with named() as table, serving(str(table.name)) as server, server.proven() as raw:
        table.add(rows(0, 5))
        raw.send(Kind.OPEN, open_message(spec_of(table, LONG)))
        raw.receive()
        other = spec_of(table)
        other.table = "nowhere"
        generation = int(generations_of(table, [0])[0])
        message, opens = fetch_message([[0] * 100, [0] * 100, [generation] * 100]), open_message(other, 1)
        raw.socket.sendall(
            Header(Kind.FETCH, 7, len(message), 0).pack()
            + message
            + Header(Kind.OPEN, 8, len(opens), 0).pack()
            + opens
        )
        assert [raw.receive()[0].request for _ in range(2)] == [7, 8]
