"""`RemoteTable.advance_version`: once for each call, whatever happens to server and connection."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from test_remote_table import connected, named, url_of
from transport_common import PATIENCE, SECRET, Proxy, serving

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.transport.change_messages import Advance, Advanced
from gear_loader.transport.handlers import HANDLERS
from gear_loader.transport.table_cache import TableCache
from gear_loader.transport.wire import Kind

COLUMNS = {"number": gear.Column(torch.int64), "policy": gear.Column(torch.int64, per="trajectory")}
SIZES = {"max_steps": 40, "max_trajectories": 8}


def test_the_trainer_is_elsewhere() -> None:
    with (
        named(COLUMNS, **SIZES, version="policy", max_lag=1) as table,
        connected(table) as remote,
    ):
        remote.add({"number": torch.arange(3), "policy": remote.policy_version})
        assert remote.advance_version() == 1
        table.advance_version()
        assert len(remote) == 0, "it is older than max_lag"
        assert remote.advance_version() == table.policy_version == remote.policy_version == 3


def test_errors() -> None:
    with (
        named(COLUMNS, **SIZES) as table,
        connected(table) as remote,
        pytest.raises(SchemaError, match="created with version="),
    ):
        remote.advance_version()


def test_lost_answers_of_several_trainers() -> None:
    """Each call makes one version, and no two the same."""
    made: list[int] = []
    failures: list[BaseException] = []

    def work(url: str) -> None:
        try:
            with gear.connect(url, secret=SECRET, timeout=PATIENCE) as remote:
                for _ in range(25):
                    made.append(remote.advance_version())
        except BaseException as error:
            failures.append(error)

    with (
        named(COLUMNS, **SIZES, version="policy") as table,
        serving(table.name) as server,
        Proxy(server.address) as proxy,
    ):
        threads = [threading.Thread(target=work, args=(url_of(proxy.address, table),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(10):
            proxy.swallow.set()
            threads[turn % 3].join(0.03)
            if turn % 3 == 0:
                proxy.cut()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failures
        assert sorted(made) == list(range(1, 76))
        assert table.policy_version == 75


def _answer(server: TableCache, request: Advance) -> Advanced:
    return Advanced.parse(HANDLERS[Kind.ADVANCE].answer(server, request, np.empty(0, np.uint8), False).small)


@pytest.mark.parametrize("executed", [True, False])
def test_a_server_that_is_started_again_recognises_a_request(executed: bool) -> None:
    with named(COLUMNS, **SIZES, version="policy") as table:
        for _ in range(4):
            table.advance_version()
        first, second = (TableCache([str(table.name)], PATIENCE) for _ in range(2))
        told = _answer(first, Advance(str(table.name), 0, 0, 76))
        assert (told.version, told.done) == (4, False)
        request = Advance(str(table.name), 4, told.memory, 77)
        again = dataclasses.replace(request, again=True)
        if executed:
            assert _answer(first, request) == Advanced(5, told.memory, True)
            assert _answer(first, again) == Advanced(5, told.memory, True), "from memory"
        found = _answer(second, again)
        assert (found.version, found.done) == (5, True)
        assert table.policy_version == 5


def test_a_request_that_never_arrived_is_not_taken_for_that_of_another_client() -> None:
    with named(COLUMNS, **SIZES, version="policy") as table:
        server = TableCache([str(table.name)], PATIENCE)
        memory = _answer(server, Advance(str(table.name), 0, 0, 1)).memory
        assert _answer(server, Advance(str(table.name), 0, memory, 2)).done
        # Of another client, which was told of version 0 too, and whose first message was lost.
        late = Advance(str(table.name), 0, memory, 3, again=True)
        assert _answer(server, late) == Advanced(1, memory, False)
        # What was not done is done by no repetition, even if the version is what it expected then.
        assert _answer(server, late) == Advanced(1, memory, False)
        assert table.policy_version == 1
