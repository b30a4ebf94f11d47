"""Connections without the secret, connections that are cut, tables that are locked: others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import pytest
import transport_common as common
from table_common import COLUMNS, fresh_name, named, rows
from transport_common import PATIENCE, SECRET, Serving, check_fetch, open_files, serving, six, spec_of
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.schema import Window
from gear_loader.storage.shared_memory import region_path
from gear_loader.transport import Address, Limits, Peer, WindowSpec, start_server
from gear_loader.transport import carrier as carrier_of
from gear_loader.transport import server as server_module
from gear_loader.transport.connection import Connection
from gear_loader.transport.store_message import Rows, Store
from gear_loader.transport.wire import NONCE, Kind, pack_text

NO_UCX = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
CARRIERS = ["socket", pytest.param("ucx", marks=[pytest.mark.long, NO_UCX])]
NO_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")
NIXL = pytest.param("nixl", marks=NO_NIXL)
SECONDS = 12  # of the attack
CROWD = 400  # connections that it has at a time: more than a server takes of either kind


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    with six() as made:
        yield made


def partial_handshakes(carrier: str) -> list[bytes]:
    """Nothing; part of a header; a header without the rest; a whole first message, to which no proof will follow."""
    small = pack_text(carrier_of(carrier).library) + pack_text(carrier) + bytes(NONCE)
    hello = common.message(Kind.HELLO, small)
    return [b"", hello[:7], hello[:64], hello]


@contextlib.contextmanager
def listening(
    table: gear.Table, carrier: str, limits: Limits
) -> Iterator[tuple[Serving, tuple[str, int], str]]:
    """A server in this process, the place where it listens, and its address."""
    with serving(str(table.name), limits=limits) as server:
        address = server.address
        if carrier != "socket":
            address = server.loop.run(server.server.listen(carrier), PATIENCE)
        parts = Address.parse(address)
        yield server, (parts.host, parts.port), address


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
        server, place, address = stack.enter_context(listening(table, carrier, limits))
        first = server.peer(address=address)
        check_fetch(first, table, spec_of(table), [3, 1], [2, 2])
        files = open_files()
        crowd: list[socket.socket] = []
        said = partial_handshakes(carrier)
        for i in range(40):
            crowd.append(stack.enter_context(socket.create_connection(place, PATIENCE)))
            crowd[-1].sendall(said[i % len(said)])
            if i % 10 == 9:  # in between, those who know the secret are served, old and new
                check_fetch(first, table, spec_of(table), [3, 1], [2, 2])
                peer = server.peer(address=address)
                check_fetch(peer, table, spec_of(table), [3, 1], [2, 2])
                peer.close()
        wait_until(lambda: server.server.num_connections <= 9)
        wait_until(lambda: sum(map(is_open, crowd)) <= 8)
        # The oldest have gone: all but the last eight, or seven if the last requester took the place of one.
        found = [is_open(each) for each in crowd]
        assert found == sorted(found)
        assert sum(found) in (7, 8)
        assert open_files() <= files + 40 + 8 + 8  # both ends are here; a few of libraries


def test_clients_that_connect_at_once_displace_none_of_them(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handshakes are slow and places few: a client waits to be accepted until another one is authenticated."""
    finish = server_module.answer

    async def slow(*arguments: Any) -> None:
        await asyncio.sleep(0.03)
        await finish(*arguments)

    monkeypatch.setattr(server_module, "answer", slow)
    with listening(table, "socket", Limits(unproven=2, handshake=PATIENCE)) as (server, _, _):
        peers = [server.peer() for _ in range(30)]
        opened = [peer.metadata("capacity", str(table.name)) for peer in peers]
        assert len({bytes(each.result(PATIENCE)) for each in opened}) == 1
        assert server.server._unproven.displaced == 0


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_silent_connection_keeps_its_deadline_and_a_noisy_one_is_closed(
    table: gear.Table, carrier: str
) -> None:
    with (
        listening(table, carrier, Limits(handshake=0.3)) as (server, place, _),
        contextlib.ExitStack() as stack,
    ):
        crowd = []
        for said in partial_handshakes(carrier):
            crowd.append(stack.enter_context(socket.create_connection(place, PATIENCE)))
            crowd[-1].sendall(said)
        wait_until(lambda: not any(map(is_open, crowd)))
        wait_until(lambda: server.server.num_connections == 0)
    with listening(table, carrier, Limits(handshake=PATIENCE)) as (_, place, _), socket.socket() as flood:
        flood.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        flood.connect(place)
        flood.sendall(partial_handshakes(carrier)[-1])
        flood.settimeout(0.5)
        sent = 0
        with contextlib.suppress(OSError):  # closed for what it sent without being asked
            while sent < 64 << 20:
                sent += flood.send(bytes(1 << 16))
        assert sent < 16 << 20


def test_a_flood_of_connections_is_no_flood_of_log_lines(
    table: gear.Table, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(unproven=4, handshake=PATIENCE)
    with caplog.at_level(logging.WARNING), listening(table, "socket", limits) as (server, _, _):
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(server.raw())
            wait_until(lambda: "more than 4 at a time were not authenticated" in caplog.text)
        for _ in range(60):
            with server.raw() as raw:
                raw.send(Kind.HELLO, b"", request=0)
                raw.text()
        wait_until(lambda: "more connections" in caplog.text)
    assert sum("refused 127.0.0.1" in line for line in caplog.text.splitlines()) < 60


ATTACK = """
import contextlib, json, select, socket, sys, time
place, seconds, crowd = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3]), int(sys.argv[4])
parts = [bytes.fromhex(each) for each in sys.argv[5:]]
held, made, end = [], 0, time.monotonic() + seconds
while time.monotonic() < end:
    while len(held) >= crowd:
        held.pop(0).close()
    held.append(socket.socket())
    held[-1].setblocking(False)
    held[-1].connect_ex(place)
    select.select([], held[-1:], [], 0.05)
    with contextlib.suppress(OSError):
        held[-1].send(parts[made % len(parts)])
    made += 1
    if made == crowd:
        print("crowded", flush=True)
print(json.dumps(made))
"""


@pytest.mark.long
@pytest.mark.parametrize("carrier", [*CARRIERS, NIXL])
def test_an_attack_that_goes_on_refuses_no_requester(table: gear.Table, carrier: str) -> None:
    """The crowd is renewed all the time; requesters connect anew for each request meanwhile."""
    tcp = "socket" if carrier == "nixl" else carrier
    name = str(table.name)
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"secret": SECRET, "one_sided": carrier == "nixl"}
        server = stack.enter_context(start_server([name], carriers=(tcp,), **options))
        address = server.addresses[tcp]

        def peer() -> Peer:
            return Peer(address, secret=SECRET, timeout=PATIENCE, name="node b")

        old = peer()
        stack.callback(old.close)
        check_fetch(old, table, spec_of(table), [3, 1], [2, 2])
        parts = Address.parse(address)
        words = [parts.host, *map(str, (parts.port, SECONDS, CROWD))]
        words += [each.hex() for each in partial_handshakes(tcp)]
        command = [sys.executable, "-c", ATTACK, *words]
        attacker = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(attacker.kill)
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "crowded\n"
        served = 0
        while attacker.poll() is None:
            new = peer()
            if carrier == "nixl":  # what its readers ask over TCP, before they read
                assert new.metadata("nixl", name).result(PATIENCE)
            else:
                check_fetch(new, table, spec_of(table), [3, 1], [2, 2])
            new.close()
            check_fetch(old, table, spec_of(table), [3, 1], [2, 2])
            served += 1
        assert json.loads(attacker.stdout.read()) > 2 * CROWD
        assert served >= 1
        assert server.alive()


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc from 2.33 on
if _mallinfo2 is not None:
    _mallinfo2.restype = _Heap


class Held(NamedTuple):
    """What this process holds at a moment.

    Bytes that are in use, not resident memory: allocators keep freed pages, and resident memory went up and down by
    10 MiB in 4,000 connections, in which bytes in use grew by 50 KiB.
    """

    files: int
    threads: int
    heap: int  # bytes that malloc has given out: arrays, buffers, what libraries hold
    blocks: int  # small Python objects, which have an allocator of their own


def holding() -> Held:
    gc.collect()
    heap = 0 if _mallinfo2 is None else _mallinfo2()
    in_use = heap.uordblks + heap.hblkhd if isinstance(heap, _Heap) else 0
    return Held(open_files(), threading.active_count(), in_use, sys.getallocatedblocks())


def living() -> int:
    """Connections that something still refers to."""
    gc.collect()
    return sum(type(each) is Connection for each in gc.get_objects())


def cycle(server: Serving, table: gear.Table, chance: random.Random) -> None:
    """Connect, say some of what a requester says, and break off."""
    kind = chance.randrange(6)
    raw = server.raw() if kind < 2 else server.proven()
    spec = spec_of(table, chance.choice([None, {"value": Window(1000)}]))
    said = common.message(Kind.OPEN, common.open_message(spec))
    if kind < 2:  # in the middle of the handshake
        said = common.message(Kind.HELLO, common.HELLO)
    elif kind == 2:  # in the middle of a request
        said += common.message(Kind.FETCH, common.fetch_message(np.zeros((3, 5))))
    elif kind == 3:  # while large replies are gathered and sent
        fetch = common.message(Kind.FETCH, common.fetch_message(np.zeros((3, chance.choice([1, 30, 300])))))
        raw.socket.sendall(said + fetch * chance.randrange(1, 4))
        if chance.random() < 0.5:
            raw.socket.recv(chance.randrange(1, 100_000))
        said = b""
    elif kind == 4:  # in the middle of a store
        ids, priorities = np.full(3, -1), np.full(3, UNSET, dtype=np.float32)
        store = Store(
            str(table.name), table.schema, np.full(3, 20), ids, priorities, np.zeros(3, dtype=np.int64)
        )
        said = common.message(Kind.STORE, store.pack(), bytes(store.bulk_bytes))
    else:  # nonsense
        said = chance.randbytes(300)
    raw.socket.sendall(said[: chance.randrange(len(said) + 1)])
    if chance.random() < 0.5:  # as of a process that was killed with something unread
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.socket.close()


@pytest.mark.parametrize(
    "cycles", [200, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.exhaustive])]
)
def test_nothing_is_left_of_many_connections(caplog: pytest.LogCaptureFixture, cycles: int) -> None:
    caplog.set_level(logging.ERROR, "gear_loader.transport")  # or pytest keeps every line of the server's
    chance = random.Random(7)
    with named(max_steps=400, on_full="evict_oldest") as table:
        for i in range(8):
            table.add(rows(i, 5 + i))
        with serving(str(table.name), limits=Limits(patience=30)) as server:
            peer = server.peer()

            def settled() -> Held:
                check_fetch(peer, table, spec_of(table), table.indices()[:3], [1, 0, 2])
                wait_until(lambda: server.server.num_connections == 1)
                wait_until(lambda: not table._engine.region.array("readers")[:, 2].any())
                wait_until(lambda: living() == 1)
                return holding()

            for _ in range(100):  # threads start, buffers of libraries grow: all that comes once
                cycle(server, table, chance)
            before = settled()
            for _ in range(cycles):
                cycle(server, table, chance)
            after = settled()
            assert after.files == before.files
            assert after.threads <= before.threads + 10  # pools grow to a fixed size as there is work
            # 4 KiB a connection: less than the smallest of its buffers.
            assert after.heap - before.heap < cycles * 4096
            # Ten objects a connection: it has hundreds.
            assert after.blocks - before.blocks < cycles * 10
            table.check_valid()


MANY = 12  # requests for the locked table: more than there are threads for it
LARGE = {"value": Window(4096)}  # a reply of these is gathered by a thread


def _hold_index(name: str, pipe: Any) -> None:
    table = gear.Table.attach(name)
    with table._engine.region.lock:
        pipe.send("held")
        pipe.recv()


@contextlib.contextmanager
def locked(name: str, which: str) -> Iterator[Callable[[], None]]:
    """A lock of the table is held until the returned function is called.

    Args:
        which: "file", as by a process that removes the table; "index", as by a process that changes it.
    """
    if which == "file":
        fd = os.open(region_path(name), os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield lambda: os.close(fd)
        return
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_hold_index, args=(name, theirs), daemon=True)
    process.start()
    try:
        assert pipe.poll(PATIENCE)
        assert pipe.recv() == "held"

        def release() -> None:
            pipe.send("release")
            process.join(PATIENCE)

        yield release
    finally:
        process.kill()


def store_into(peer: Peer, spec: WindowSpec) -> Future[Any]:
    one = np.array([UNSET], dtype=np.float32), np.array([-1])
    return peer.store(spec.table, spec.schema, [Rows.of(spec.schema, rows(9, 5), "one")], *one)


@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
@pytest.mark.parametrize("which", ["file", "index"])
def test_a_locked_table_delays_no_other(which: str) -> None:
    sizes = {"max_steps": 400, "max_trajectories": 64, "block_steps": 4}
    held, free = tables = [gear.Table.create(COLUMNS, name=fresh_name(), **sizes) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for table in tables:
            table.extend([rows(i, 5 + i) for i in range(6)])
            stack.callback(lambda name=str(table.name): gear.Table.attach(name).unlink())
        specs = [spec_of(table) for table in tables]
        slots = np.array([3, 1])
        generations = common.generations_of(held, slots)
        held.close()  # the file's lock is had only of a table that no process uses

        def fetch(peer: Peer) -> Future[Any]:
            return peer.fetch(specs[0], slots, slots, generations, out=common.poisoned(specs[0], 2))

        if which == "file":  # it is not even attached when the server starts
            release = stack.enter_context(locked(specs[0].table, which))
        server = stack.enter_context(serving(*(spec.table for spec in specs)))
        if which == "index":
            assert not fetch(server.peer()).result(PATIENCE).any()
            release = stack.enter_context(locked(specs[0].table, which))
        waiting: list[Future[Any]] = []
        for _ in range(MANY):
            each = server.peer()
            waiting += [fetch(each), store_into(each, specs[0])]
            if which == "file":
                waiting.append(each.metadata("capacity", specs[0].table))
        # All kinds of requests, on a connection of their own, before anything of the locked table is answered.
        one = server.peer()
        check_fetch(one, free, specs[1], [3, 1], [2, 2])
        check_fetch(one, free, spec_of(free, LARGE), [3, 1] * 50, [2, 2] * 50)
        assert one.metadata("capacity", specs[1].table).result(PATIENCE)
        assert len(store_into(one, specs[1]).result(PATIENCE)) == 1
        assert not any(each.done() for each in waiting)
        release()
        for future in waiting:
            assert len(future.result(PATIENCE))
        assert not fetch(one).result(PATIENCE).any()
        free.close()
