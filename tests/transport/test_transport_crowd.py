"""Connections without the secret, in any number, do not keep those who know it from being served."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from table_common import named, rows
from transport_common import PATIENCE, SECRET, WINDOWS, Serving, check_fetch, open_files, serving, wait_until

import gear_loader as gear
from gear_loader.transport import Address, Limits, Peer, WindowSpec, start_server
from gear_loader.transport import carrier as carrier_of
from gear_loader.transport.wire import NONCE, Header, Kind, pack_text

CARRIERS = [
    "socket",
    pytest.param(
        "ucx",
        marks=[
            pytest.mark.long,
            pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed"),
        ],
    ),
]
NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed"),
)
SECONDS = 12  # of the long attack
CROWD = 400  # connections that it has at a time: more than a server takes of either kind
ATTACK = """
import json, select, socket, sys, time
host, port, seconds, crowd = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
parts = [bytes.fromhex(each) for each in sys.argv[5:]]
held, made, end = [], 0, time.monotonic() + seconds
while time.monotonic() < end:
    while len(held) >= crowd:
        held.pop(0).close()
    each = socket.socket()
    each.setblocking(False)
    each.connect_ex((host, port))
    held.append(each)
    select.select([], [each], [], 0.05)
    try:
        each.send(parts[made % len(parts)])
    except OSError:
        pass
    made += 1
    if made == crowd:
        print("crowded", flush=True)
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    with named() as made:
        for i in range(6):
            made.add(rows(i, 5 + i))
        yield made


def library_of(name: str) -> str:
    """What a requester of this carrier says that it uses."""
    return carrier_of(name).library


def partial_handshakes(carrier: str) -> list[bytes]:
    """Nothing; part of a header; a header without the rest; a whole first message, to which no proof will follow."""
    small = pack_text(library_of(carrier)) + pack_text(carrier) + bytes(NONCE)
    hello = Header(Kind.HELLO, 0, len(small), 0).pack() + small
    return [b"", hello[:7], hello[:64], hello]


def spec_of(table: gear.Table) -> WindowSpec:
    return WindowSpec(str(table.name), table.schema, WINDOWS)


@contextlib.contextmanager
def listening(table: gear.Table, carrier: str, limits: Limits) -> Iterator[tuple[Serving, str]]:
    """A server in this process, and its address."""
    with serving(str(table.name), limits=limits) as server:
        yield (
            server,
            server.address
            if carrier == "socket"
            else server.loop.run(server.server.listen(carrier), PATIENCE),
        )


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has left it open; what it has sent is thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("carrier", CARRIERS)
def test_silent_connections_give_way_to_newer_ones(table: gear.Table, carrier: str) -> None:
    limits = Limits(unproven=8, connections=3, handshake=PATIENCE)
    with contextlib.ExitStack() as stack:
        server, address = stack.enter_context(listening(table, carrier, limits))
        parts = Address.parse(address)
        first = server.peer(address=address)
        check_fetch(first, table, spec_of(table), [3, 1], [2, 2])
        files = open_files()
        crowd: list[socket.socket] = []
        said = partial_handshakes(carrier)
        for i in range(40):
            crowd.append(stack.enter_context(socket.create_connection((parts.host, parts.port), PATIENCE)))
            crowd[-1].sendall(said[i % len(said)])
            if i % 10 == 9:  # in between, those who know the secret are served, old and new
                check_fetch(first, table, spec_of(table), [3, 1], [2, 2])
                peer = server.peer(address=address)
                check_fetch(peer, table, spec_of(table), [3, 1], [2, 2])
                peer.close()
        wait_until(lambda: server.server.num_connections <= 9)
        wait_until(lambda: sum(map(is_open, crowd)) <= 8)
        # The oldest have gone: all but the last eight, and one for whom the last requester came.
        assert [is_open(each) for each in crowd] == [False] * 33 + [True] * 7
        assert open_files() <= files + 40 + 8 + 8  # both ends are here; a few of libraries


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_silent_connection_keeps_its_deadline(table: gear.Table, carrier: str) -> None:
    with listening(table, carrier, Limits(handshake=0.3)) as (server, address):
        parts = Address.parse(address)
        with contextlib.ExitStack() as stack:
            crowd = []
            for said in partial_handshakes(carrier):
                crowd.append(
                    stack.enter_context(socket.create_connection((parts.host, parts.port), PATIENCE))
                )
                crowd[-1].sendall(said)
            wait_until(lambda: not any(map(is_open, crowd)))
            wait_until(lambda: server.server.num_connections == 0)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_unproven_connection_is_not_listened_to_for_long(table: gear.Table, carrier: str) -> None:
    """Of what it sends without being asked little is taken before it is closed."""
    hello = partial_handshakes(carrier)[-1]
    with listening(table, carrier, Limits(handshake=PATIENCE)) as (_, address):
        parts = Address.parse(address)
        with socket.socket() as flood:
            flood.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            flood.connect((parts.host, parts.port))
            flood.sendall(hello)
            flood.settimeout(0.5)
            sent = 0
            with contextlib.suppress(OSError):  # closed for what it sent
                while sent < 64 << 20:
                    sent += flood.send(bytes(1 << 16))
            assert sent < 16 << 20


def test_a_flood_of_connections_is_no_flood_of_log_lines(
    table: gear.Table, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(unproven=4, handshake=PATIENCE)
    with caplog.at_level(logging.WARNING), listening(table, "socket", limits) as (server, _):
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(server.raw())
            wait_until(lambda: "more than 4 at a time had not proven themselves" in caplog.text)
        for _ in range(60):
            with server.raw() as raw:
                raw.send(Kind.HELLO, b"", request=0)
                raw.text()
        wait_until(lambda: "more connections" in caplog.text)
    assert sum("refused 127.0.0.1" in line for line in caplog.text.splitlines()) < 60


def attack(address: str, carrier: str, seconds: float) -> subprocess.Popen[str]:
    parts = Address.parse(address)
    words = [parts.host, str(parts.port), str(seconds), str(CROWD)]
    said = [each.hex() for each in partial_handshakes(carrier)]
    return subprocess.Popen([sys.executable, "-c", ATTACK, *words, *said], stdout=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.parametrize("carrier", [*CARRIERS, NIXL])
def test_an_attack_that_goes_on_refuses_nobody(table: gear.Table, carrier: str) -> None:
    """A crowd that is renewed all the time, and requesters that connect anew for each request, meanwhile."""
    tcp = "socket" if carrier == "nixl" else carrier
    name = str(table.name)
    slots = np.array([3, 1])
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            start_server([name], carriers=(tcp,), secret=SECRET, one_sided=carrier == "nixl")
        )
        address = server.addresses[tcp]

        def peer() -> Peer:
            return Peer(address, secret=SECRET, timeout=PATIENCE, name="node b")

        old = peer()
        stack.callback(old.close)
        check_fetch(old, table, spec_of(table), slots, [2, 2])
        attacker = stack.enter_context(attack(address, tcp, SECONDS))
        stack.callback(attacker.kill)
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "crowded\n"
        served, slowest = 0, 0.0
        while attacker.poll() is None:
            began = time.monotonic()
            new = peer()
            if carrier == "nixl":  # what its readers ask over TCP, before they read
                assert new.metadata("nixl", name).result(PATIENCE)
            else:
                check_fetch(new, table, spec_of(table), slots, [2, 2])
            new.close()
            check_fetch(old, table, spec_of(table), slots, [2, 2])
            served, slowest = served + 1, max(slowest, time.monotonic() - began)
        made = json.loads(attacker.stdout.read())
        print(
            f"{carrier}: {made:,} connections, {served:,} requesters served, the slowest in {slowest:.2f} s"
        )
        assert made > 2 * CROWD
        assert served >= 1
        assert server.alive()
