"""What a server lets its clients do, and how much memory their requests may take together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import torch
from table_common import fresh_name
from transport_common import SECRET, Serving, open_message, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import TransportError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.transport import Limits, WindowSpec, start_server
from gear_loader.transport.resources import ByteBudget
from gear_loader.transport.store_message import Store
from gear_loader.transport.wire import Header, Kind

COLUMNS = {"number": gear.Column(torch.int64)}
STEPS = 1 << 14  # 128 KiB, more than is received ahead


def table_of(steps: int = 20 * STEPS) -> gear.Table:
    return gear.Table.create(COLUMNS, max_steps=steps, max_trajectories=64, name=fresh_name())


def url_of(server: Serving, table: gear.Table) -> str:
    return f"{server.address.replace('socket', 'gear')}/{table.name}"


def numbers(count: int) -> dict[str, Any]:
    return {"number": np.arange(count)}


def store_of(table: gear.Table) -> Store:
    """A trajectory of `STEPS` steps."""
    one = np.zeros(1, dtype=np.int64)
    priorities = np.full(1, UNSET, dtype=np.float32)
    return Store(str(table.name), gear.Schema(COLUMNS), one + STEPS, one - 1, priorities, one)


# ---------------------------------------------------------------- what is allowed


@pytest.mark.parametrize("allow", ["read", "write"])
def test_other_requests_are_refused_before_their_parts_are_received(allow: str) -> None:
    with table_of() as table, serving(str(table.name), allow=allow) as server, server.proven() as raw:
        if allow == "read":
            raw.socket.sendall(Header(Kind.STORE, 1, 100, 1 << 28).pack())  # and nothing of its 256 MiB
        else:
            raw.socket.sendall(Header(Kind.OPEN, 1, len(open_message_of(table)), 0).pack())
        assert f"was started with allow='{allow}'" in raw.error()
        assert "allow='all'" in raw.text()  # and the connection is closed
        assert len(table) == 0
        table.unlink()


def open_message_of(table: gear.Table) -> bytes:
    return open_message(WindowSpec(str(table.name), table.schema, {"number": gear.Window(1)}))


def test_a_client_that_may_only_read_is_told_so_at_once() -> None:
    columns = {
        **COLUMNS,
        "policy": gear.Column(torch.int64, per="trajectory"),
        "reward": gear.Column(torch.float32, per="trajectory", late=True),
    }
    version = gear.Limits(version="policy")
    with gear.Table.create(
        columns, max_steps=99, max_trajectories=9, name=fresh_name(), limits=version
    ) as table:
        rows = {**numbers(3), "policy": 0}
        table.add(rows)
        with (
            serving(str(table.name), allow="read") as server,
            gear.connect(url_of(server, table), secret=SECRET) as remote,
        ):
            assert len(remote) == len(remote.unfilled()[0]) == 1
            for call in (
                lambda: remote.add(rows),
                lambda: remote.extend([rows]),
                lambda: remote.update_priority([0], [1.0]),
                lambda: remote.fill(0, reward=1.0),
                remote.advance_version,
                remote.writer,
                lambda: remote.writers(2),
            ):
                with pytest.raises(TransportError, match="and not written to"):
                    call()
        assert (len(table), len(table.unfilled()[0]), table.policy_version) == (1, 1, 0)
        with pytest.raises(TransportError, match="allow is 'reads'; expected 'all', 'read' or 'write'"):
            table.serve(allow="reads")  # type: ignore[arg-type]
        with pytest.raises(TransportError, match="allow is None"):
            start_server([str(table.name)], secret=SECRET, allow=None)  # type: ignore[arg-type]
        table.unlink()


# ---------------------------------------------------------------- memory


def test_requests_wait_for_their_turn_when_their_memory_is_taken() -> None:
    limits = Limits(total_bytes=2 * STEPS * 8)
    with table_of() as table, serving(str(table.name), limits=limits) as server:
        store, budget = store_of(table), server.server.resources.budget
        small, bulk = store.pack(), bytes(store.bulk_bytes)
        raws = [server.proven() for _ in range(6)]
        for raw in raws:
            raw.socket.sendall(Header(Kind.STORE, 1, len(small), len(bulk)).pack() + small)
        wait_until(lambda: budget.held == 2 * len(bulk))
        raws[0].close()  # one that holds its part, perhaps, and one that waits for it
        raws[5].close()
        for raw in raws[1:5]:
            raw.socket.sendall(bulk)
        for raw in raws[1:5]:
            assert raw.receive()[0].kind is Kind.STORED
            raw.close()
        wait_until(lambda: server.server.num_connections == 0)
        assert budget.held == 0
        assert len(table) == 4
        table.unlink()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_bytes_are_given_in_order_of_arrival() -> None:
    async def work() -> None:
        budget, order = ByteBudget(100), []

        async def take(name: str, count: int) -> None:
            await budget.take(count)
            order.append(name)

        await take("first", 60)
        tasks = [asyncio.ensure_future(take(name, count)) for name, count in (("large", 300), ("small", 30))]
        await asyncio.sleep(0)
        assert order == ["first"], "a small one does not overtake one that waits"
        budget.give(60)
        await asyncio.sleep(0)
        assert order == ["first", "large"], "more than the budget, alone"
        budget.give(300)
        await asyncio.gather(*tasks)
        assert (order[-1], budget.held) == ("small", 30)

    run(work())


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancelled_request_holds_nothing(granted: bool) -> None:
    async def work() -> None:
        budget = ByteBudget(100)
        await budget.take(100)
        first, second = (asyncio.ensure_future(budget.take(100)) for _ in range(2))
        await asyncio.sleep(0)
        if granted:
            budget.give(100)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        if not granted:
            budget.give(100)
        await second
        assert budget.held == 100

    run(work())
