"""Connections cut at random places: nothing is left of them, and a correct requester is served."""

from __future__ import annotations

import ctypes
import gc
import logging
import random
import socket
import struct
import sys
import threading
from typing import NamedTuple

import numpy as np
import pytest
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
from gear_loader.storage.operations import UNSET
from gear_loader.storage.schema import Window
from gear_loader.transport import Limits, WindowSpec
from gear_loader.transport.connection import Connection
from gear_loader.transport.store_message import Store
from gear_loader.transport.wire import NONCE, Header, Kind, pack_text


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc from 2.33 on
if _mallinfo2 is not None:
    _mallinfo2.restype = _Heap


class AttachedTable(NamedTuple):
    """What this process holds at a moment.

    Bytes that are in use, not resident memory: allocators keep freed pages, and resident memory went up and down by
    10 MiB in 4,000 connections, in which bytes in use grew by 50 KiB.
    """

    files: int
    threads: int
    heap: int  # bytes that malloc has given out: arrays, buffers, what libraries hold
    blocks: int  # small Python objects, which have an allocator of their own


def holding() -> AttachedTable:
    gc.collect()
    heap = 0 if _mallinfo2 is None else _mallinfo2()
    in_use = heap.uordblks + heap.hblkhd if isinstance(heap, _Heap) else 0
    return AttachedTable(open_files(), threading.active_count(), in_use, sys.getallocatedblocks())


def test_the_yardstick_sees_what_is_kept() -> None:
    if _mallinfo2 is None:
        pytest.skip("the C library does not tell what is in use")
    before = holding()
    buffers = [np.zeros(2048, dtype=np.uint8) for _ in range(1000)]
    large = np.zeros(8 << 20, dtype=np.uint8)
    kept = holding()
    assert kept.heap - before.heap > 10 << 20
    assert kept.blocks - before.blocks > 1000
    del buffers, large
    freed = holding()
    assert freed.heap - before.heap < 1 << 20
    assert freed.blocks - before.blocks < 1000


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


@pytest.mark.parametrize("cycles", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_nothing_is_left_of_many_connections(caplog: pytest.LogCaptureFixture, cycles: int) -> None:
    caplog.set_level(logging.ERROR, "gear_loader.transport")  # or pytest keeps every line of the server's
    chance = random.Random(7)
    with named(max_steps=400, on_full="evict_oldest") as table:
        for i in range(8):
            table.add(rows(i, 5 + i))
        with serving(str(table.name), limits=Limits(patience=30)) as server:
            peer = server.peer()
            spec = WindowSpec(str(table.name), table.schema, WINDOWS)

            def settled() -> AttachedTable:
                wait_until(lambda: server.server.num_connections == 1)
                wait_until(lambda: not table.region.array("readers")[:, 2].any())
                wait_until(lambda: living() == 1)
                return holding()

            def serve_one() -> None:
                slots = table.indices()[:3]
                check_fetch(peer, table, spec, slots, [1, 0, 2])

            serve_one()
            for _ in range(100):  # threads start, buffers of libraries grow: all that comes once
                cycle(server, table, chance)
            before = settled()
            for _ in range(cycles):
                cycle(server, table, chance)
            serve_one()
            after = settled()
            assert after.files == before.files
            assert (
                after.threads <= before.threads + 10
            )  # pools have a fixed size, and grow to it as there is work
            # 4 KiB a connection: less than the smallest of its buffers.
            assert after.heap - before.heap < cycles * 4096
            # Two objects a connection: it has hundreds.
            assert after.blocks - before.blocks < cycles * 2
            table.check_valid()
    assert SECRET
