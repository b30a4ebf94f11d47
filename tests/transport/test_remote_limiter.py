"""A rate limiter and a full table push back across the wire, and say so before the deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_remote_table import NUMBERS, connected, named, numbers_in
from transport_common import PATIENCE, SECRET

import gear_loader as gear
from gear_loader.errors import PeerTimeoutError, RateLimitError, TableFullError

LIMITED = r"the server socket://127\.0\.0\.1:\d+.*Queue\(size=2\)"


def numbers(first: int, count: int = 3) -> dict[str, Any]:
    return {"number": np.arange(first, first + count)}


@contextlib.contextmanager
def queue() -> Iterator[gear.Table]:
    """A table whose rate limiter lets two trajectories in, and then one for each that is drawn."""
    limiter = gear.Queue(2)
    with named(
        NUMBERS, max_steps=100, max_trajectories=8, rate_limiter=limiter, max_times_sampled=1
    ) as table:
        yield table


def draw(table: gear.Table) -> int:
    """The first value of the oldest trajectory, which is removed."""
    options: dict[str, Any] = {"batch_size": 1, "windows": gear.Window(1, squeeze=True), "device": "cpu"}
    return int(gear.ReplayDataset(table, sampler=gear.Fifo(), **options).sample()["number"][0])


def waits_for(then: Callable[[], object], call: Callable[[], object]) -> None:
    """Make a call in a thread, which still waits after a while, and returns after `then`."""
    failures: list[BaseException] = []
    returned = threading.Event()

    def work() -> None:
        try:
            call()
            returned.set()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert not returned.wait(0.3)
    then()
    thread.join(PATIENCE)
    assert not failures
    assert returned.is_set()


def test_the_deadline_of_add_names_server_and_limiter() -> None:
    with queue() as table, connected(table, timeout=1.5) as remote:
        remote.add(numbers(0))
        remote.add(numbers(10))
        with pytest.raises(RateLimitError, match=rf"Timed out after 1\.5 s\. {LIMITED}"):
            remote.add(numbers(20))
        with pytest.raises(RateLimitError, match=LIMITED):
            remote.extend([numbers(20)])
        assert numbers_in(table) == [0, 10]
        assert draw(table) == 0
        remote.add(numbers(30))
        assert numbers_in(table) == [10, 30], "what was refused is not stored later"


@pytest.mark.parametrize("kind", ["add", "commit", "flush"])
def test_inserts_wait_for_draws(kind: str) -> None:
    with queue() as table, connected(table, timeout=PATIENCE) as remote:
        remote.extend([numbers(0)])
        remote.extend([numbers(10)])
        writer = remote.writer(wait=kind == "commit")

        def call() -> None:
            if kind == "add":
                remote.add(numbers(20))
                return
            writer.append(numbers(20))
            writer.commit()
            remote.flush()

        waits_for(lambda: draw(table), call)
        assert numbers_in(table) == [10, 20]
        assert table.stats().insert_wait > 0


@pytest.mark.parametrize("wait", [True, False])
def test_the_deadlines_of_writers_name_server_and_limiter(wait: bool) -> None:
    with queue() as table, connected(table, timeout=1.5, max_in_flight=1) as remote:
        remote.extend([numbers(0)])
        remote.extend([numbers(10)])
        writer = remote.writer(wait=wait)
        writer.append(numbers(20))
        if not wait:
            writer.commit()
        with pytest.raises(PeerTimeoutError, match=LIMITED):
            writer.commit() if wait else writer.append(numbers(30))
        with pytest.raises(PeerTimeoutError, match=LIMITED):
            remote.flush(0.1)
        assert draw(table) == 0
        remote.flush()
        assert numbers_in(table) == [10, 20]


def test_a_full_table_that_waits() -> None:
    sizes = {"max_steps": 8, "max_trajectories": 2, "on_full": "wait"}
    with named(NUMBERS, **sizes) as table, connected(table, timeout=1.5) as remote:
        slots = [remote.add(numbers(number)) for number in (0, 10)]
        with pytest.raises(
            TableFullError, match=r"Timed out after 1\.5 s\. the server socket://.*2 of at most 2"
        ):
            remote.add(numbers(20))
        with gear.connect(remote.url, secret=SECRET, timeout=PATIENCE) as patient:
            waits_for(lambda: table.remove(slots[:1]), lambda: patient.add(numbers(30)))
        assert numbers_in(table) == [10, 30]
