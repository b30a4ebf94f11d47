"""A thousand connections cut at random places: nothing is left of them, and a correct requester is served."""

from __future__ import annotations

import gc
import random
import socket
import struct
import threading
from pathlib import Path

import numpy as np
from table_common import named, rows
from transport_common import (
    SECRET,
    WINDOWS,
    Raw,
    Serving,
    check_fetch,
    fetch_message,
    open_files,
    open_message,
    serving,
    wait_until,
)

import gear_loader as gear
from gear_loader.index_ops import UNSET
from gear_loader.schema import Window
from gear_loader.transport import Limits, WindowSpec
from gear_loader.transport.connection import Connection
from gear_loader.transport.wire import NONCE, Header, Kind, Store, pack_text

CYCLES = 1000


def resident() -> int:
    """Bytes of memory that this process has."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def living() -> int:
    """Connections that something still refers to."""
    gc.collect()
    return sum(type(each) is Connection for each in gc.get_objects())


def message(kind: Kind, small: bytes = b"", bulk: bytes = b"") -> bytes:
    return Header(kind, 1, len(small), len(bulk)).pack() + small + bulk


def cut(connection: socket.socket, chance: random.Random) -> None:
    """Close in one of the ways in which sockets end."""
    if chance.random() < 0.5:  # as of a process that was killed with something unread
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def cycle(server: Serving, table: gear.Table, chance: random.Random) -> None:
    """Connect, say some of what a requester says, and break off."""
    raw: Raw
    kind = chance.randrange(6)
    if kind < 2:
        raw = server.raw()
        hello = message(Kind.HELLO, pack_text("socket") + pack_text("socket") + bytes(NONCE))
        raw.socket.sendall(hello[: chance.randrange(len(hello) + 1)])
        cut(raw.socket, chance)
        return
    raw = server.proven()
    large = WindowSpec(str(table.name), table.schema, {"value": Window(1000)})
    spec = chance.choice([large, WindowSpec(str(table.name), table.schema, WINDOWS)])
    said = message(Kind.OPEN, open_message(spec))
    if kind == 2:  # breaks off in the middle of a request
        said += message(Kind.FETCH, fetch_message(np.zeros((3, 5))))
        raw.socket.sendall(said[: chance.randrange(len(said) + 1)])
    elif kind == 3:  # while large replies are gathered and sent
        fetch = message(Kind.FETCH, fetch_message(np.zeros((3, chance.choice([1, 30, 300])))))
        raw.socket.sendall(said + fetch * chance.randrange(1, 4))
        if chance.random() < 0.5:
            raw.socket.recv(chance.randrange(1, 100_000))
    elif kind == 4:  # in the middle of a store
        lengths = np.full(3, 20)
        ids, priorities = np.full(3, -1), np.full(3, UNSET, dtype=np.float32)
        store = Store(str(table.name), table.schema, lengths, ids, priorities)
        said = message(Kind.STORE, store.pack(), bytes(store.bulk_bytes))
        raw.socket.sendall(said[: chance.randrange(len(said) + 1)])
    else:  # nonsense
        raw.socket.sendall(chance.randbytes(chance.randrange(300)))
    cut(raw.socket, chance)


def test_nothing_is_left_of_a_thousand_connections() -> None:
    chance = random.Random(7)
    with named(max_steps=400, on_full="evict_oldest") as table:
        for i in range(8):
            table.add(rows(i, 5 + i))
        with serving(str(table.name), limits=Limits(patience=30)) as server:
            peer = server.peer()
            spec = WindowSpec(str(table.name), table.schema, WINDOWS)

            def settle() -> tuple[int, int, int]:
                wait_until(lambda: server.server.num_connections == 1)
                wait_until(lambda: not table.region.array("readers")[:, 2].any())
                gc.collect()
                return open_files(), threading.active_count(), resident()

            def serve_one() -> None:
                slots = table.indices()[:3]
                check_fetch(peer, table, spec, slots, [1, 0, 2])

            serve_one()
            for _ in range(CYCLES // 10):  # threads start, buffers of libraries grow: all that comes once
                cycle(server, table, chance)
            files, threads, memory = settle()
            for _ in range(CYCLES):
                cycle(server, table, chance)
            serve_one()
            after = settle()
            assert after[0] == files
            assert after[1] <= threads + 6  # pools have a fixed size, and grow to it as there is work
            assert after[2] - memory < 32 << 20  # a staging buffer a cycle would be over 1 GB
            wait_until(lambda: living() == 1)
            table.check_valid()
    assert SECRET
