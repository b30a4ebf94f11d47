"""`ReplayDataset(gear_loader.connect(url))`: the batches of the table, whatever happens to server and connection."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from learner_common import (
    CASES,
    COLUMNS,
    PLAIN,
    READ,
    STEPWISE,
    add,
    assert_equal,
    call,
    connected,
    dataset,
    filled,
    learn,
    pair,
    some,
)
from table_common import fresh_name
from transport_common import SECRET, Proxy, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import (
    GearError,
    PriorityError,
    RateLimitError,
    SchemaError,
    StaleIndexError,
    TableEmptyError,
    TransportError,
)
from gear_loader.transport import Limits, start_server
from gear_loader.transport.learner_link import BatchMemory
from gear_loader.transport.urls import url_of
from gear_loader.transport.wire import Kind


@pytest.mark.parametrize("case", some(CASES))
def test_batches_are_those_of_the_table_and_states_go_on_either_side(case: str) -> None:
    options = CASES[case]
    with pair() as (local, _, remote):
        mine, theirs = dataset(local, **options), dataset(remote, **options)
        states: list[tuple[Any, Any, int]] = []
        for epoch in range(2):
            count = 0
            for first, second in zip(mine, theirs, strict=True):
                assert_equal(first, second)
                count += 1
                if mine.sampler.by_priority:
                    new = torch.linspace(0.5, 5, len(first["index"]))
                    mine.update_priority(first, new)
                    theirs.update_priority(second, new)
                if epoch == 1 and count == 2:
                    states = [(mine.state_dict(), theirs.state_dict(), count)]
        assert count >= 2
        if mine.batches_per_epoch is None and "batch_size" not in options:
            assert len(theirs) == len(mine) == count
        for _ in range(2):
            assert_equal(mine.sample(), theirs.sample())
        ((here, there, done),) = states
        one, other, again = dataset(local, **options), dataset(remote, **options), dataset(remote, **options)
        one.load_state_dict(there)
        other.load_state_dict(here)
        again.load_state_dict(there)
        rest = 0
        for first, second, third in zip(one, other, again, strict=True):
            assert_equal(first, second)
            assert_equal(first, third)
            rest += 1
        assert rest == count - done
        if mine.sampler.by_priority:
            assert theirs.num_stale == mine.num_stale
            assert len(theirs.priority_quantiles([0, 0.5, 1])) == 3
        assert theirs.stats()["trajectories"] == mine.stats()["trajectories"]


def test_rows_that_the_caller_chooses() -> None:
    with pair() as (local, _, remote):
        assert_equal(dict(remote[5]), dict(local[5]))
        assert_equal(remote.final(5), local.final(5))
        assert remote.final(4) is None
        np.testing.assert_array_equal(remote.indices(), local.indices())
        np.testing.assert_array_equal(remote.lengths(), local.lengths())
        index = local.indices()[[5, 3, 5]]
        windows = {name: gear.Window(3, -1) for name in READ if name != "prompt"}
        assert_equal(
            remote.gather(index, [1, 0, 1], windows=windows), local.gather(index, [1, 0, 1], windows=windows)
        )
        whole = {name: gear.Whole() for name in ("obs", "reward")}
        assert_equal(remote.gather(index, windows=whole), local.gather(index, windows=whole))
        given = {"windows": {"obs": gear.Window(2)}, "seed": 3, "device": "cpu"}
        for _ in range(3):
            assert_equal(remote.sample(6, **given), local.sample(6, **given))
        with pytest.raises(StaleIndexError, match="Index 99 is stale"):
            remote[99]
        with pytest.raises(SchemaError, match="no function"):
            dataset(remote, draws=gear.Draws(subset=lambda n: n > 3))
        with pytest.raises(SchemaError, match="nothing"):
            dataset(remote, windows={"nothing": gear.Window(1)})
        assert remote[5]["reward"].shape == local[5]["reward"].shape  # the connection goes on


def test_learners_divide_a_pass_over_a_table_that_grows() -> None:
    options = {"sampler": gear.Uniform(replacement=False), "batch_size": 2}
    with filled() as table, connected(table) as remote:
        both = [dataset(remote, ranks=gear.Ranks(rank=rank, world_size=2), **options) for rank in range(2)]
        for epoch in range(2):
            present = table.indices().tolist()
            first, second = map(iter, both)
            found = next(first)["index"].tolist()
            for number in range(3):
                add(table, 50 + 3 * epoch + number)
            found += [index for batch in second for index in batch["index"].tolist()]
            found += [index for batch in first for index in batch["index"].tolist()]
            assert sorted(found) == sorted(present)


def test_values_of_any_length() -> None:
    columns = {
        "x": gear.Column(torch.float32),
        "words": gear.Column(torch.int16, (None, 2)),
        "name": gear.Column(str, per="trajectory"),
        "raw": gear.Column(bytes),
    }
    sizes = {"max_steps": 200, "max_trajectories": 20, "name": fresh_name()}
    with gear.Table.create(columns, memory=gear.Memory(payload=1 << 20), **sizes) as table:
        for i in range(6):
            words = [torch.full((j, 2), i, dtype=torch.int16) for j in range(4)]
            raw = [bytes([j] * j) for j in range(4)]
            table.add({"x": torch.arange(4.0) + i, "words": words, "name": f"\u00fc{i}" * i, "raw": raw})
        with connected(table) as remote:
            for windows, layout in ((gear.Window(2), "padded"), (gear.Whole(), "packed")):
                given = {"batch_size": 3, "windows": windows, "layout": layout, "device": "cpu"}
                for mine, theirs in zip(
                    *(gear.ReplayDataset(each, **given) for each in (table, remote)), strict=True
                ):
                    assert_equal(mine, theirs)
            assert_equal(remote[2], table[2])
        table.unlink()


def test_updates_are_checked_here_and_priorities_belong_to_the_table() -> None:
    with pair() as (_, served, remote):
        mine, other = (dataset(remote, sampler=gear.Prioritized(), seed=seed) for seed in (0, 1))
        batch = mine.sample()
        with pytest.raises(PriorityError, match=r"priority\[1\]"):
            mine.update_priority(batch["index"][:2], [1.0, float("nan")])
        served.remove(int(batch["index"][0]))
        with pytest.raises(StaleIndexError):
            mine.update_priority(batch, torch.ones(8), stale="error")
        mine.update_priority(batch, torch.ones(8))
        assert mine.num_stale > 0
        zeros = served.indices()[:-1]
        mine.update_priority(zeros, np.zeros(len(zeros)))
        mine.settle()
        assert set(other.sample()["index"].tolist()) == {int(served.indices()[-1])}
        assert set(dataset(served, sampler=gear.Prioritized()).sample()["index"].tolist()) == {
            int(served.indices()[-1])
        }


def test_what_a_server_permits() -> None:
    with filled() as table, connected(table, allow="write") as remote:
        for read in (lambda: dataset(remote), lambda: remote[0], lambda: remote.sample(2)):
            with pytest.raises(TransportError, match="allow='write'"):
                read()
    with filled() as table, connected(table, allow="read") as remote:
        reader = dataset(remote, sampler=gear.Prioritized())
        batch = next(iter(reader))
        with pytest.raises(TransportError, match="allow='read'"):
            reader.update_priority(batch, torch.ones(8), stale="error")
        stepwise = dataset(remote, sampler=STEPWISE)  # whose priorities are not the table's
        stepwise.update_priority(stepwise.sample(), torch.ones(8), stale="error")


@pytest.mark.long
def test_a_limiter_holds_across_the_wire() -> None:
    options = {"rate_limiter": gear.MinSize(6), "count": 4}
    with filled(**options) as table, serving(str(table.name), store_timeout=0.2) as server:
        url = url_of(server.address, str(table.name))
        with (
            gear.connect(url, secret=SECRET, timeout=1.0) as remote,
            pytest.raises(RateLimitError, match="MinSize"),
        ):
            dataset(remote).sample()
        with gear.connect(url, secret=SECRET, timeout=20) as remote:
            waiting, others = (
                dataset(remote, columns=["obs"]),
                dataset(remote, draws=gear.Draws(rate_limited=False)),
            )
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.append(next(iter(waiting))))
            thread.start()
            time.sleep(0.5)  # longer than the server's own timeout
            assert others.sample()["index"].shape == (8,)  # a draw that waits delays nobody
            assert not found
            for number in range(4, 6):
                add(remote, number)
            thread.join(20)
            assert found
            late = dataset(
                remote, windows={"obs": gear.Window(1), "score": None}, draws=gear.Draws(rate_limited=False)
            )
            assert (late.sample()["index"] < 2).all()
    with filled() as table, connected(table, timeout=0.5, store_timeout=0.1) as remote:
        table.clear()
        with pytest.raises(TableEmptyError):
            dataset(remote).sample()


@pytest.mark.parametrize("name", some(["steps by priority", "steps", "a pass", "late"]))
def test_a_cut_link_changes_no_batch(name: str) -> None:
    options = {**CASES[name], "batches_per_epoch": 30}
    if name == "a pass":
        options = {**CASES[name], "batch_size": 1}
    with (
        filled() as local,
        filled() as served,
        serving(str(served.name)) as server,
        Proxy(server.address) as proxy,
    ):
        url = url_of(proxy.address, str(served.name))
        with gear.connect(url, secret=SECRET, timeout=20) as remote:
            mine, theirs = dataset(local, **options), dataset(remote, **options)
            count = 0
            for first, second in zip(mine, theirs, strict=True):
                assert_equal(first, second)
                if mine.sampler.by_priority:
                    mine.update_priority(first, torch.full((8,), 2.0 + count))
                    theirs.update_priority(second, torch.full((8,), 2.0 + count))
                count += 1
                if count % 5 == 0:
                    proxy.cut()
                if count % 7 == 0:
                    proxy.swallow.set()
            assert count > 10
            theirs.close()


@pytest.mark.long
def test_a_killed_server_changes_no_batch() -> None:
    cases = [{**CASES[name], "batches_per_epoch": 20} for name in ("windows", "by priority", "steps")]
    cases.append({**CASES["a pass"], "batch_size": 1})
    with filled() as local, filled() as served:
        server = start_server([str(served.name)], secret=SECRET)
        address = server.addresses["socket"]
        port = int(address.rpartition(":")[2])
        try:
            with gear.connect(url_of(address, str(served.name)), secret=SECRET, timeout=60) as remote:
                mine, theirs = ([iter(dataset(table, **case)) for case in cases] for table in (local, remote))
                for count in range(20):
                    for first, second in zip(mine, theirs, strict=True):
                        assert_equal(next(first), next(second))
                    if count == 6:
                        os.kill(server.pid, signal.SIGKILL)
                        server.stop()
                        server = start_server([str(served.name)], port=port, secret=SECRET)
        finally:
            server.stop()


def test_a_slow_learner_costs_bounded_memory_and_delays_nobody() -> None:
    limits = Limits(learner_bytes=1 << 20)
    with filled() as table, serving(str(table.name), limits=limits) as server:
        remote = gear.connect(url_of(server.address, str(table.name)), secret=SECRET, timeout=20)
        with remote:
            big = {"windows": gear.Window(400), "batch_size": 40, "batches_per_epoch": 40}
            slow, quick = dataset(remote, prefetch=16, **big), dataset(remote, batches_per_epoch=40)
            batches = iter(slow)
            first = next(batches)
            size = sum(value.nbytes for value in first.values() if isinstance(value, torch.Tensor))
            assert 200_000 < size < 1 << 20
            for _ in quick:
                pass
            (learner,) = [
                each for each in server.server.resources.learners._known.values() if each.kept_bytes > size
            ]
            assert learner.kept_bytes <= limits.learner_bytes
            local = dataset(table, **big)
            for mine, theirs in zip(local, [first, *batches], strict=True):
                assert_equal(mine, theirs)
            with pytest.raises(SchemaError, match="at most 1,048,576"):
                dataset(remote, windows=gear.Window(400), batch_size=1000)


HOSTILE: dict[str, Any] = {
    "no options": 3,
    "a class of its own": {**PLAIN, "sampler": {"of": "Table", "fields": {}}},
    "a field of its own": {**PLAIN, "sampler": {"of": "Uniform", "fields": {"__class__": 1}}},
    "an unknown option": {**PLAIN, "transform": "os.system"},
    "a negative size": {**PLAIN, "batch_size": -1},
    "much memory": {**PLAIN, "batch_size": 1 << 40},
    "much kept": {**PLAIN, "keep": 1 << 40},
    "deep": {**PLAIN, "columns": json.loads("[" * 50 + "]" * 50)},
    "no windows": {"batch_size": 3},
}


@pytest.mark.parametrize("case", some(HOSTILE))
def test_options_of_a_learner_that_lies(case: str) -> None:
    with filled() as table, serving(str(table.name)) as server, server.proven() as raw:
        learn(raw, str(table.name), {"dataset": HOSTILE[case], "at": None})
        header, small, _ = raw.receive()
        assert header.kind is Kind.ERROR
        assert len(small) > 20
        learn(raw, str(table.name), {"dataset": PLAIN, "at": None})  # the connection goes on
        assert raw.receive()[0].kind is Kind.LEARNING


CALLS = {
    "an unknown call": (1, b'["os.system", {}, null]', b"", Kind.ERROR),
    "a missing option": (1, b'["sample", {}, null]', b"", Kind.ERROR),
    "no iteration": (1, b'["next", {}, null]', b"", Kind.ERROR),
    "values of no call": (1, b'["update", {"stale": "ignore"}, null]', b"", Kind.ERROR),
    "another type": (1, b'["item", {"index": "x"}, null]', b"", Kind.ERROR),
    "a jump": (3, b'["next", {}, null]', b"", Kind.REFUSE),
    "no JSON": (1, b"[", b"", Kind.REFUSE),
    "no list": (1, b"{}", b"", Kind.REFUSE),
    "a tensor beyond the memory": (1, b'["load", {}, {"t": ["float32", [9], 0]}]', b"", Kind.REFUSE),
    "a tensor of no dtype": (1, b'["load", {}, {"t": ["object", [1], 0]}]', bytes(8), Kind.REFUSE),
    "a negative shape": (1, b'["load", {}, {"t": ["uint8", [-1, -1], 0]}]', bytes(8), Kind.REFUSE),
    "a call without an end": (1, b"[" * 100_000, b"", Kind.REFUSE),
    "bytes without an end": (
        1,
        b'["load", {}, {"y": [{"t": ["uint8", [], 0]}, {"t": ["int64", [], 0]}]}]',
        bytes(16),
        Kind.REFUSE,
    ),
    "a deep tree": (1, b'["load", {}, ' + b"[" * 100 + b"]" * 100 + b"]", b"", Kind.REFUSE),
}


@pytest.mark.parametrize("case", some(CALLS))
def test_calls_of_a_learner_that_lies(case: str) -> None:
    number, text, bulk, kind = CALLS[case]
    with filled() as table, serving(str(table.name)) as server, server.proven() as raw:
        learn(raw, str(table.name), {"dataset": PLAIN, "at": None})
        assert raw.receive()[0].kind is Kind.LEARNING
        call(raw, number, text, bulk)
        assert raw.receive()[0].kind is kind
        if kind is Kind.ERROR:
            call(raw, 2, b'["iterate", {"epoch": 0, "step": 0, "past": 0}, null]', received=1)
            call(raw, 3, b'["next", {}, null]', received=1)
            assert [raw.receive()[0].kind for _ in range(2)] == [Kind.ANSWER] * 2
        with gear.connect(url_of(server.address, str(table.name)), secret=SECRET) as remote:
            assert len(dataset(remote).sample()["index"]) == 8  # others are served


class _Copied:
    """An event of a GPU's stream."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_memory_is_not_used_again_while_a_stream_copies_from_it() -> None:
    memory, first, second = BatchMemory(pinned=False), _Copied(), _Copied()
    address = memory.take(1 << 20).ctypes.data
    memory.copied(first)
    memory.copied(second)
    second.done = True
    assert memory.take(1 << 20).ctypes.data != address
    first.done = True
    assert address in {each.ctypes.data for each in [memory.take(1 << 20), memory.take(1 << 20)]}


@pytest.mark.long
def test_a_killed_learner_whose_draw_waits_leaves_its_place() -> None:
    with gear.Table.create(
        COLUMNS, max_steps=2000, max_trajectories=100, name=fresh_name(), block_steps=4
    ) as table:
        with serving(str(table.name)) as server, server.proven() as raw:
            learn(raw, str(table.name), {"dataset": PLAIN, "at": None}, wait=600_000)
            assert raw.receive()[0].kind is Kind.LEARNING
            call(raw, 1, b'["iterate", {"epoch": 0, "step": 0, "past": 0}, null]')
            assert raw.receive()[0].kind is Kind.ANSWER
            call(raw, 2, b'["next", {}, null]', received=1)  # waits: the table is empty
            call(raw, 3, b'["next", {}, null]', received=1)
            time.sleep(0.5)
            (learner,) = server.server.resources.learners._known.values()
            assert learner.owner is not None
            raw.close()
            wait_until(lambda: learner.owner is None, patience=10)
        table.unlink()


@pytest.mark.long
def test_an_error_of_a_batch_that_nobody_wants_is_not_told() -> None:
    with filled() as table, connected(table) as remote:
        replay = dataset(remote)
        link = replay._link
        wrong = link.submit("attribute", {"name": "nothing"})
        link.drop((wrong,))
        replay.settle()
        link.submit("attribute", {"name": "nothing"}, wanted=False)
        replay.settle()
        with pytest.raises(TransportError, match="does not tell"):
            replay.stats()


@pytest.mark.long
def test_too_many_learners_and_those_that_went_away() -> None:
    limits = Limits(learners=2, learner_seconds=0.5)
    with filled() as table, serving(str(table.name), limits=limits) as server:
        raws = []
        for number in range(3):
            raws.append(server.proven())
            learn(raws[-1], str(table.name), {"dataset": PLAIN, "at": None}, bytes([number]) * 16)
        assert [raw.receive()[0].kind for raw in raws] == [Kind.LEARNING] * 2 + [Kind.ERROR]
        raws[0].close()
        wait_until(lambda: len(server.server.resources.learners._known) <= 1, patience=20)
        learn(raws[2], str(table.name), {"dataset": PLAIN, "at": None}, bytes([9]) * 16)
        assert raws[2].receive()[0].kind is Kind.LEARNING
        for raw in raws:
            raw.close()


def test_a_worker_a_mixture_and_calls_after_the_end_are_refused() -> None:
    with pair() as (local, _, remote):
        mine = dataset(remote)
        with pytest.raises(SchemaError, match="num_workers=0"):
            next(iter(torch.utils.data.DataLoader(mine, batch_size=None, num_workers=1)))
        with pytest.raises(GearError):
            gear.Mixture([dataset(local), mine], batch_size=8).sample()
        mine.close()
        with pytest.raises(TransportError, match="after its end"):
            mine.sample()
