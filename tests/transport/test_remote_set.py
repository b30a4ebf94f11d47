"""Mutable columns that are overwritten through `gear_loader.connect`, whatever happens to server and connection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_remote_table import connected, named, url_of
from transport_common import SECRET, Proxy, serving

import gear_loader as gear
from gear_loader.errors import FilledError, SchemaError, StaleIndexError, TransportError
from gear_loader.transport import handlers
from gear_loader.transport.delivery import Delivery

COLUMNS = {
    "token": gear.Column(torch.int32),
    "state": gear.Column(torch.bfloat16, (3,), mutable=True),
    "target": gear.Column(torch.float32, mutable=True),
    "later": gear.Column(torch.float32, late=True, mutable=True),
}
SIZES = {"max_steps": 4000, "max_trajectories": 400}
LENGTH = 6


def add(table: Any) -> int:
    zeros = {"state": torch.zeros(LENGTH, 3).bfloat16(), "target": np.zeros(LENGTH, np.float32)}
    return int(table.add({"token": np.arange(LENGTH, dtype=np.int32), **zeros}))


def test_rows_of_the_servers_table_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a table here: a twin gets the same calls."""
    chance = np.random.default_rng(5)
    with (
        named(COLUMNS, **SIZES) as table,
        named(COLUMNS, **SIZES) as twin,
        connected(table) as remote,
    ):
        slots = np.array([add(remote) for _ in range(12)])
        assert [add(twin) for _ in slots] == slots.tolist()
        generation = np.asarray(table.gather(slots, windows={"token": gear.Window(1)})["generation"])
        for turn in range(12):
            monkeypatch.setattr(Delivery, "request_bytes", [1, 100, 1 << 20][turn % 3])  # several requests
            rows = chance.permutation(12)[: turn + 1] if turn % 2 else chance.integers(0, 12, 20)
            length = int(chance.integers(1, LENGTH + 1))
            anchors = chance.integers(0, LENGTH, len(rows))
            mask = anchors[:, None] + np.arange(length) < LENGTH
            values: dict[str, Any] = {"state": torch.rand(len(rows), length, 3).bfloat16()}
            if turn % 3:
                values["target"] = chance.random((len(rows), length)).astype(np.float32)
            given = {"generation": generation[rows], "mask": mask, **values}
            assert remote.set(slots[rows], anchors, **given) == twin.set(slots[rows], anchors, **given) == 0
        one = {"target": np.full(3, 7, np.float32), "state": torch.ones(3).bfloat16()}
        assert remote.set(int(slots[0]), 2, **one) == twin.set(int(slots[0]), 2, **one) == 0
        for slot in slots.tolist():
            for name in ("token", "state", "target"):
                assert torch.equal(table[slot][name], twin[slot][name])
        table.remove(int(slots[4]))
        values = {"target": np.ones((3, 2), np.float32)}
        assert remote.set(slots[3:6], [0, 0, 0], generation=generation[3:6], **values) == 1
        assert remote.set([], [], target=np.ones(0, np.float32)) == 0
        with pytest.raises(StaleIndexError, match="Nothing was changed"):
            remote.set(slots[3:6], [0, 0, 0], stale="error", target=np.zeros((3, 2), np.float32))
        assert (table[int(slots[3])]["target"][:2] == 1).all()
        for columns, message in (
            ({"token": np.ones((1, 1), np.int32)}, "expected one or more of those with Column"),
            ({"target": np.ones((1, LENGTH + 1), np.float32)}, f"step {LENGTH} of row 0"),
            ({"target": np.ones((1, 2))}, "has dtype float64"),
        ):
            with pytest.raises(SchemaError, match=message):
                remote.set(slots[:1], [0], **columns)
        with pytest.raises(FilledError, match="no values yet"):
            remote.set(slots[:1], [0], later=np.ones((1, 2), np.float32))


def test_an_answer_that_is_lost_writes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process's newer values are not overwritten by a request that is sent again."""
    real, calls = handlers.set_columns, []

    def write(engine: Any, index: Any, *given: Any, **options: Any) -> int:
        calls.append(index.tolist())
        stale = real(engine, index, *given, **options)
        # Somebody else writes before the client hears of it.
        newer = {"target": np.full((len(index), 1), -1, np.float32)}
        real(engine, index, given[0] + 1, None, None, newer, strict=True)
        return stale

    with named(COLUMNS, **SIZES) as table, serving(table.name) as server, Proxy(server.address) as proxy:
        monkeypatch.setattr(handlers, "set_columns", write)
        slots = [add(table) for _ in range(20)]
        with gear.connect(url_of(proxy.address, table), secret=SECRET, timeout=30.0) as remote:
            for number, slot in enumerate(slots):
                if number % 3 == 0:
                    proxy.swallow.set()
                elif number % 3 == 1:
                    proxy.cut()
                assert remote.set([slot], [0], target=np.full((1, LENGTH), number, np.float32)) == 0
        for number, slot in enumerate(slots):
            assert table[slot]["target"].tolist() == [number, -1, *[number] * (LENGTH - 2)]
        assert calls == [[slot] for slot in slots]


def test_a_server_that_is_read_only_refuses() -> None:
    with named(COLUMNS, **SIZES) as table, serving(table.name, allow="read") as server:
        slot = add(table)
        remote = gear.connect(url_of(server.address, table), secret=SECRET)
        with remote, pytest.raises(TransportError, match="allow='read'"):
            remote.set([slot], [0], target=np.ones((1, 1), np.float32))
