"""A thousand connected writers on one server: open files, memory of an idle connection, fairness, a bound on floods."""

from __future__ import annotations

import gc
import os
import resource
import threading
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from table_common import fresh_name
from transport_common import SECRET, Raw, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.ids import CLIENT_ORIGIN, joined
from gear_loader.transport import Limits, Peer, start_server
from gear_loader.transport.store_message import Rows, Store
from gear_loader.transport.wire import Header, Kind

pytestmark = pytest.mark.long

WRITERS = 1000
COLUMNS = {"number": gear.Column(torch.int64)}
IDLE_BYTES = 32 << 10
"""Most bytes that an idle connection may take in the server."""


@pytest.fixture(autouse=True)
def _open_files() -> Iterator[None]:
    """This process may open as many files as the system allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 3 * WRITERS:
        pytest.skip(f"this process may open {before[1]} files; {3 * WRITERS} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def table() -> Iterator[gear.Table]:
    sizes = {"max_steps": 1 << 16, "max_trajectories": 1 << 16, "block_steps": 1}
    with gear.Table.create(COLUMNS, name=fresh_name(), on_full="evict_oldest", **sizes) as table:
        yield table
        table.unlink()


class Writer:
    """Stores one trajectory after another over a connection of its own, without a thread of its own."""

    def __init__(self, address: str, table: gear.Table, number: int, stop: threading.Event) -> None:
        self.peer = Peer(address, secret=SECRET, timeout=120.0, name=f"the server of writer {number}")
        self.count = 0
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._table, self._stop = table, stop
        self._first = number << 20

    def store(self) -> None:
        """Store the next one, and then the others."""
        ids = joined(np.array([self._first + self.count]), CLIENT_ORIGIN)
        rows = [Rows.of(self._table.schema, {"number": np.full(1, self._first)}, "one")]
        priorities = np.full(1, UNSET, dtype=np.float32)
        future = self.peer.store(str(self._table.name), self._table.schema, rows, priorities, ids)
        future.add_done_callback(self._stored)

    def _stored(self, future: object) -> None:
        self.error = future.exception()  # type: ignore[attr-defined]
        self.count += self.error is None
        if self.error is not None or self._stop.is_set():
            self.ended.set()
        else:
            self.store()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_thousand_writers_are_served_alike(table: gear.Table) -> None:
    stop = threading.Event()
    with start_server([str(table.name)], secret=SECRET, allow="write") as server:
        before = open_files(server.pid)
        writers = [Writer(server.addresses["socket"], table, number, stop) for number in range(WRITERS)]
        for writer in writers:
            writer.store()
        wait_until(lambda: min(writer.count for writer in writers) > 0)  # all are connected
        assert before + WRITERS <= open_files(server.pid) <= before + WRITERS + 50
        first = np.array([writer.count for writer in writers])
        wait_until(lambda: sum(writer.count for writer in writers) > first.sum() + 10 * WRITERS)
        counts = np.array([writer.count for writer in writers]) - first
        stop.set()
        for writer in writers:
            assert writer.ended.wait(60)
        assert [writer.error for writer in writers if writer.error is not None] == []
        assert counts.min() >= counts.mean() / 2, (
            f"the slowest of {counts.mean():.1f} on average: {counts.min()}"
        )
        assert table.stats().num_inserted == sum(writer.count for writer in writers)
        for writer in writers:
            writer.peer.close()
        wait_until(lambda: open_files(server.pid) <= before + 5)


def test_an_idle_connection_takes_little_memory(table: gear.Table) -> None:
    with serving(str(table.name)) as server:
        raws = [server.proven() for _ in range(50)]  # what is loaded by the first ones
        wait_until(lambda: server.server.num_connections == len(raws))
        gc.collect()
        tracemalloc.start()
        try:
            raws += [server.proven() for _ in range(WRITERS)]
            wait_until(lambda: server.server.num_connections == len(raws))
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] / WRITERS  # those of the client side, too
        finally:
            tracemalloc.stop()
        for raw in raws:
            raw.close()
    assert taken <= IDLE_BYTES, f"{taken:,.0f} bytes"


def test_a_flood_of_large_requests_takes_no_more_than_the_budget(table: gear.Table) -> None:
    most, steps, count = 8 << 20, 1 << 16, 100  # 512 KiB each
    one = np.zeros(1, dtype=np.int64)
    store = Store(
        str(table.name), table.schema, one + steps, one - 1, np.full(1, UNSET, dtype=np.float32), one
    )
    small, bulk = store.pack(), bytes(store.bulk_bytes)
    with serving(str(table.name), limits=Limits(total_bytes=most)) as server:
        raws = [server.proven() for _ in range(count)]
        gc.collect()
        tracemalloc.start()
        try:
            message = Header(Kind.STORE, 1, len(small), len(bulk)).pack() + small
            threads = [threading.Thread(target=_store, args=(raw, message, bulk)) for raw in raws]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 * most, f"{peak:,} bytes at most, {count * len(bulk):,} were sent"
        assert table.stats().num_inserted == count
        for raw in raws:
            raw.close()


def _store(raw: Raw, message: bytes, bulk: bytes) -> None:
    raw.socket.sendall(message)
    raw.socket.sendall(bulk)
    assert raw.receive()[0].kind is Kind.STORED
