"""Late columns that are filled through `gear_loader.connect`: once, whatever happens to server and connection."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_remote_table import connected, named, url_of
from transport_common import PATIENCE, SECRET, Proxy, serving

import gear_loader as gear
from gear_loader.errors import FilledError, SchemaError, StaleIndexError
from gear_loader.transport.delivery import Delivery

COLUMNS = {
    "token": gear.Column(torch.int32),
    "advantage": gear.Column(torch.bfloat16, (2,), late=True),
    "number": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
    "logprob": gear.Column(torch.float64, late=True, cast=True),
}
SIZES = {"max_steps": 4000, "max_trajectories": 400}


def add(table: Any, number: int, length: int = 5) -> int:
    return int(table.add({"token": np.arange(length, dtype=np.int32), "number": np.int64(number)}))


def values(number: int, length: int = 5) -> dict[str, Any]:
    steps = torch.arange(length) / 4 + number
    return {
        "reward": np.float32(number),
        "logprob": steps.double(),
        "advantage": torch.stack((steps, -steps), 1).bfloat16(),
    }


def together(numbers: list[int], length: int = 5) -> dict[str, Any]:
    each = [values(number, length) for number in numbers]
    rewards = np.array([part["reward"] for part in each])
    return {"reward": rewards, **{name: [part[name] for part in each] for name in ("logprob", "advantage")}}


def check(table: gear.Table, slot: int, number: int, length: int = 5) -> None:
    row, expected = table[slot], values(number, length)
    assert float(row["reward"]) == number
    assert torch.equal(row["logprob"], expected["logprob"])
    assert torch.equal(row["advantage"], expected["advantage"])


def test_columns_of_the_servers_table_are_filled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delivery, "request_bytes", 300)  # several requests
    with named(COLUMNS, **SIZES) as table, connected(table) as remote:
        slots = [add(remote, number) for number in range(12)]
        index, generation = remote.unfilled()
        assert index.tolist() == slots
        assert generation.tolist() == table.unfilled()[1].tolist()
        assert remote.fill(index[:10], generation=generation[:10], **together(list(range(10)))) == 0
        remote.fill(slots[10], reward=10.0)
        assert remote.unfilled("reward")[0].tolist() == slots[11:]
        assert remote.unfilled("logprob", "reward")[0].tolist() == slots[10:]
        for number in range(10):
            check(table, slots[number], number)
        with pytest.raises(FilledError, match=r"\['reward'\] already; a write-once column is filled once"):
            remote.fill(slots[3], reward=1.0)
        table.remove(slots[11])
        assert remote.fill(index[11:], generation=generation[11:], reward=np.ones(1, np.float32)) == 1
        with pytest.raises(StaleIndexError, match="Nothing was changed"):
            remote.fill(index[11:], generation=generation[11:], stale="error", reward=np.ones(1, np.float32))
        for columns, message in (
            ({"number": np.ones(1)}, "expected one or more of those with Column"),
            ({"reward": np.ones(2, np.float32)}, "has 2 values for 1 trajectories"),
            ({"logprob": [np.ones(3)]}, "has 3 steps for row 0; expected 5"),
            ({"logprob": [np.ones(3)], "advantage": [torch.ones(5, 2).bfloat16()]}, "expected the same"),
        ):
            with pytest.raises(SchemaError, match=message):
                remote.fill(slots[10:11], **columns)
        with pytest.raises(SchemaError, match="expected one or more of those"):
            remote.unfilled("number")
        with pytest.raises(FilledError, match="given twice"):
            remote.fill([slots[10]] * 2, logprob=[np.ones(5)] * 2)
        assert remote.unfilled("logprob")[0].tolist() == [slots[10]]


def test_lost_answers_fill_once() -> None:
    with named(COLUMNS, **SIZES) as table, serving(table.name) as server, Proxy(server.address) as proxy:
        with gear.connect(url_of(proxy.address, table), secret=SECRET, timeout=30.0) as remote:
            slots = [add(table, number) for number in range(60)]
            for number in range(0, 60, 2):
                if number % 6 == 0:
                    proxy.swallow.set()
                elif number % 6 == 2:
                    proxy.cut()
                pair = [number, number + 1]
                assert remote.fill([slots[n] for n in pair], **together(pair)) == 0
        for number in range(60):
            check(table, slots[number], number)


@settings(max_examples=examples(20), deadline=None)
@given(done=st.lists(st.booleans(), min_size=1, max_size=8), other=st.booleans())
def test_a_request_that_was_executed_by_a_server_that_died_is_recognised(
    done: list[bool], other: bool
) -> None:
    """Sent again, a request finds its own values; those of somebody else are an error."""
    from gear_loader.storage.late import fill_columns

    with gear.Table.create(COLUMNS, **SIZES, block_steps=4) as table:
        slots = [add(table, number, 5 + number) for number in range(len(done))]
        for number, slot in enumerate(slots):
            if done[number]:
                table.fill(
                    slot, **{**values(number, 5 + number), **({"reward": np.float32(-1)} if other else {})}
                )
        each = [values(number, 5 + number) for number in range(len(done))]
        given = {name: [part[name] for part in each] for name in ("logprob", "advantage")}
        given["reward"] = np.array([part["reward"] for part in each])
        if other and any(done):
            with pytest.raises(FilledError):
                fill_columns(table._engine, slots, None, given, strict=True, again=True)
            assert len(table.unfilled()[0]) == done.count(False)
            return
        assert fill_columns(table._engine, slots, None, given, strict=True, again=True) == 0
        for number, slot in enumerate(slots):
            check(table, slot, number, 5 + number)


def test_a_fill_that_waits_leaves_the_server_to_others() -> None:
    """It waits for whoever fills in another process, even if its bulk part is the only one of the server."""
    held, done = threading.Event(), threading.Event()
    with (
        named(COLUMNS, **SIZES) as table,
        named(COLUMNS, **SIZES) as other,
        serving(table.name, other.name) as server,
    ):
        number = add(table, 1)
        with (
            gear.connect(url_of(server.address, table), secret=SECRET) as remote,
            gear.connect(url_of(server.address, other), secret=SECRET) as free,
        ):
            free.unfilled()
            remote.fill(add(table, 2), reward=np.float32(1))
            holder = threading.Thread(
                target=table._engine.region.fill_lock.run, args=(lambda: (held.set(), done.wait(10.0)),)
            )
            holder.start()
            assert held.wait(PATIENCE)
            filler = threading.Thread(target=lambda: remote.fill(number, reward=np.float32(1)))
            filler.start()
            try:
                filler.join(0.2)
                assert free.unfilled()[0].tolist() == []
                assert holder.is_alive(), "the lock was let go before the answer came"
            finally:
                done.set()
                holder.join()
                filler.join()
