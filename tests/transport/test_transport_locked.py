"""A table whose lock another process holds delays nothing of the other tables that a server serves."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from table_common import COLUMNS, fresh_name, rows
from transport_common import (
    PATIENCE,
    SECRET,
    WINDOWS,
    Serving,
    check_fetch,
    generations_of,
    poisoned,
    serving,
)

import gear_loader as gear
from gear_loader.storage.operations import UNSET
from gear_loader.storage.schema import Window
from gear_loader.storage.shared_memory import region_path
from gear_loader.transport import Peer, ServerProcess, WindowSpec, start_server

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
MANY = 12  # requests for the locked table: more than there are threads for it
LARGE = {"value": Window(4096)}  # a reply of these is gathered by a thread


def _hold_index(name: str, pipe: Any) -> None:
    table = gear.Table.attach(name)
    with table.region.lock:
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


def filled() -> gear.Table:
    """A named table with six trajectories and room for more."""
    table = gear.Table.create(COLUMNS, max_steps=400, max_trajectories=64, block_steps=4, name=fresh_name())
    for i in range(6):
        table.add(rows(i, 5 + i))
    return table


def remove(name: str) -> None:
    with gear.Table.attach(name) as table:
        table.unlink()


def store_into(peer: Peer, spec: WindowSpec) -> Future[Any]:
    one = np.array([UNSET], dtype=np.float32), np.array([-1])
    return peer.store(spec.table, spec.schema, [rows(9, 5)], *one)


@pytest.mark.parametrize("which", ["file", "index"])
def test_a_locked_table_delays_no_other(which: str) -> None:
    with contextlib.ExitStack() as stack:
        tables = held, free = filled(), filled()
        specs = [WindowSpec(str(table.name), table.schema, WINDOWS) for table in tables]
        names = [spec.table for spec in specs]
        for name in names:
            stack.callback(remove, name)
        slots = np.array([3, 1])
        generations = generations_of(held, slots)
        held.close()  # the file's lock is had only of a table that nobody uses

        def peer(server: ServerProcess | Serving) -> Peer:
            address = server.address if isinstance(server, Serving) else server.addresses["socket"]
            made = Peer(address, secret=SECRET, timeout=PATIENCE, name="node b")
            stack.callback(made.close)
            return made

        def fetch(peer: Peer) -> Future[Any]:
            return peer.fetch(specs[0], slots, slots, generations, poisoned(specs[0], 2))

        if which == "file":  # it is not even attached when the server starts
            release = stack.enter_context(locked(names[0], which))
            server = stack.enter_context(start_server(names, secret=SECRET))
        else:
            server = stack.enter_context(serving(*names))
            assert not fetch(peer(server)).result(PATIENCE).any()
            release = stack.enter_context(locked(names[0], which))
        waiting: list[Future[Any]] = []
        for _ in range(MANY):
            each = peer(server)
            waiting += [fetch(each), store_into(each, specs[0])]
            if which == "file":
                waiting.append(each.metadata("capacity", names[0]))
        # All kinds of requests, on a connection of their own, before anything of the locked table is answered.
        one = peer(server)
        check_fetch(one, free, specs[1], [3, 1], [2, 2])
        check_fetch(one, free, WindowSpec(names[1], free.schema, LARGE), [3, 1] * 50, [2, 2] * 50)
        assert one.metadata("capacity", names[1]).result(PATIENCE)
        assert len(store_into(one, specs[1]).result(PATIENCE)) == 1
        assert not any(each.done() for each in waiting)
        release()
        for future in waiting:
            assert len(future.result(PATIENCE))
        assert not fetch(one).result(PATIENCE).any()
        free.close()
