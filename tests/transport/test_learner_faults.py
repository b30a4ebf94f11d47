"""Learners when links, disks, clocks and other learners fail: named errors, nothing lost, others go on."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_common import CASES, PLAIN, STEPWISE, add, assert_equal, call, dataset, filled, learn
from transport_common import SECRET, Proxy, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.checkpoint import open_files
from gear_loader.errors import PeerTimeoutError, PriorityError, SchemaError
from gear_loader.transport.trees import PackedTree
from gear_loader.transport.urls import url_of
from gear_loader.transport.wire import Kind, read_error


@pytest.mark.long
def test_a_link_that_is_down_is_an_error_after_the_timeout_and_loses_no_batch() -> None:
    options: dict[str, Any] = {"batches_per_epoch": 12, "prefetch": 3}
    with (
        filled() as local,
        filled() as served,
        serving(str(served.name)) as server,
        Proxy(server.address) as proxy,
        gear.connect(url_of(proxy.address, str(served.name)), secret=SECRET, timeout=3) as remote,
        gear.connect(url_of(server.address, str(served.name)), secret=SECRET, timeout=60) as other,
    ):
        next(iter(dataset(other, **options)))  # which may compile for longer than that
        mine, replay = dataset(local, **options), dataset(remote, **options)
        batches = iter(replay)
        found = [next(batches) for _ in range(5)]
        proxy.flows.clear()
        with pytest.raises(PeerTimeoutError, match=f"{served.name}.*goes on where this one ended"):
            found.extend(batches)
        assert 5 <= len(found) < 12
        state = replay.state_dict()
        assert len(dataset(other).sample()["index"]) == 8  # whose link is not down
        proxy.flows.set()
        replay.load_state_dict(state)
        found += replay
        for first, second in zip(mine, found, strict=True):
            assert_equal(first, second)
        replay.close()


class _Jumps:
    """A wall clock that is set back and forth by a year at each look."""

    def __init__(self) -> None:
        self._now, self._step = time.time(), 3.2e7

    def __call__(self) -> float:
        self._step = -self._step
        return self._now + self._step


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**CASES["by priority"], "batches_per_epoch": 8, "draws": gear.Draws(sample_info=True)}
    with (
        filled(rate_limiter=gear.MinSize(3)) as local,
        filled(rate_limiter=gear.MinSize(3)) as served,
        serving(str(served.name)) as server,
        Proxy(server.address) as proxy,
        gear.connect(url_of(proxy.address, str(served.name)), secret=SECRET, timeout=20) as remote,
    ):
        monkeypatch.setattr(time, "time", _Jumps())
        mine, theirs = dataset(local, **options), dataset(remote, **options)
        for number, (first, second) in enumerate(zip(mine, theirs, strict=True)):
            ages = [batch["sample_info"].pop("age_seconds") for batch in (first, second)]
            assert all(((each >= 0) & (each < 3600)).all() for each in ages)
            assert_equal(first, second)
            if number == 3:
                proxy.cut()
        add(remote, 30)
        assert len(served) == 25


def test_a_full_disk_of_the_owner_ends_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, genuine = threading.Event(), open_files.write_all

    def write_all(*args: Any) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        genuine(*args)

    monkeypatch.setattr(open_files, "write_all", write_all)
    disk = gear.Disk(tmp_path / "disk", sync_seconds=0.01)
    with filled(disk=disk) as served, filled() as local, serving(str(served.name)) as server:
        remote = gear.connect(url_of(server.address, str(served.name)), secret=SECRET, timeout=20)
        with remote:
            given = {"batches_per_epoch": 8, "prefetch": 0}  # so that both draw after the same changes
            for number, (first, second) in enumerate(
                zip(dataset(local, **given), dataset(remote, **given), strict=True)
            ):
                assert_equal(first, second)
                if number == 3:
                    full.set()
                    for each in (served, local):  # what cannot be written stays in memory
                        add(each, 30)
                    wait_until(lambda: "No space left on device" in caplog.text, patience=20)
            full.clear()


UPDATES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "NaN": ({"priority": [1.0, float("nan")]}, PriorityError, r"priority\[1\]"),
    "infinite": ({"priority": [float("inf"), 1.0]}, PriorityError, r"priority\[0\]"),
    "negative": ({"priority": [1.0, -1.0]}, PriorityError, r"priority\[1\]"),
    "too few": ({"priority": [1.0]}, SchemaError, "priority"),
    "no integers": ({"index": [0.5, 1.5]}, SchemaError, "index"),
    "shapes": ({"index": [[0, 1]]}, SchemaError, "index"),
    "text": ({"index": ["0", "1"]}, SchemaError, "index"),
    "generations of others": ({"generation": [7, 7, 7]}, SchemaError, "generation"),
}


def test_priorities_of_a_learner_that_lies_change_nothing() -> None:
    sampler = {"of": "Prioritized", "fields": {"alpha": 1.0}}
    with filled() as table, serving(str(table.name)) as server, server.proven() as raw:
        learn(raw, str(table.name), {"dataset": {**PLAIN, "sampler": sampler}, "at": None})
        assert raw.receive()[0].kind is Kind.LEARNING
        url = url_of(server.address, str(table.name))
        with gear.connect(url, secret=SECRET) as remote:
            honest = dataset(remote, sampler=gear.Prioritized(alpha=1.0))
            before = honest.mass()
            number = 0
            for values, kind, text in UPDATES.values():
                given = {"index": [0, 1], "priority": [1.0, 1.0], **values}
                update(raw, number := number + 1, given, "ignore")
                header, small, _ = raw.receive()
                assert header.kind is Kind.ERROR, values
                error = read_error(small)
                assert type(error) is kind, (values, error)
                assert text.replace("\\", "") in str(error)
            beyond = {"index": [-1, 1 << 40], "priority": [5.0, 5.0]}
            stale = {"index": [0, 1], "priority": [5.0, 5.0], "generation": [1 << 40, -7]}
            for values in (beyond, stale):
                update(raw, number := number + 1, values, "error")
                assert raw.receive()[0].kind is Kind.ERROR
                update(raw, number := number + 1, values, "ignore")
                assert raw.receive()[0].kind is Kind.ANSWER
            assert honest.mass() == before


def update(raw: Any, number: int, values: dict[str, Any], stale: str) -> None:
    tensors = {
        name: each if isinstance(each[0], str) else torch.as_tensor(each) for name, each in values.items()
    }
    tree = PackedTree(tensors)
    text = json.dumps(["update", {"stale": stale}, json.loads(tree.text)]).encode()
    call(raw, number, text, b"".join(bytes(part) for part in tree.parts), received=number - 1)


def test_rows_and_windows_that_no_memory_holds_are_refused() -> None:
    with filled() as table, serving(str(table.name)) as server:
        remote = gear.connect(url_of(server.address, str(table.name)), secret=SECRET)
        with remote:
            many = np.zeros(3_000_000, dtype=np.int64)
            for windows, index in (
                ({"obs": gear.Window((1 << 31) - 1)}, [0]),
                ({"obs": gear.Window(40)}, many),
                ({"obs": gear.Whole()}, np.full(20_000_000, int(np.argmax(table.lengths())))),
            ):
                with pytest.raises(SchemaError, match="this server sends at most"):
                    remote.gather(index, windows=windows)
            with pytest.raises(SchemaError, match="this server sends at most"):
                dataset(remote).sample(1 << 40)
            assert len(dataset(remote).sample(3)["index"]) == 3


@pytest.mark.long
def test_two_hundred_learners_draw_each_for_itself() -> None:
    with filled() as served, filled() as local, serving(str(served.name)) as server:
        remote = gear.connect(url_of(server.address, str(served.name)), secret=SECRET, timeout=60)
        with remote:
            given: dict[str, Any] = {"batches_per_epoch": 4, "sampler": STEPWISE}
            learners = [dataset(remote, seed=seed, **given) for seed in range(200)]
            running = [iter(each) for each in learners]
            batches = [[next(each) for each in running] for _ in range(4)]
            for seed in (0, 77, 199):
                for number, batch in enumerate(dataset(local, seed=seed, **given)):
                    assert_equal(batch, batches[number][seed])
            for each in learners:
                each.close()
