"""An exception at any opcode of a request that its own thread serves leaves no lock held and no answer mixed up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cases import points
from interrupts_loop import Interruption, traced
from table_common import named, rows
from transport_common import PATIENCE, Serving, generations_of, poisoned, serving, spec_of

import gear_loader as gear
from gear_loader.transport import Peer
from gear_loader.transport.delivery import Delivery
from gear_loader.transport.store_message import Rows

FILES = ("direct_link.py", "session.py", "request.py", "mutex.py")
ONCE = ("connected", "_connected")  # they connect; not in every call
Shelf = tuple[gear.Table, Serving]


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    with named(max_steps=4000, max_trajectories=1000, on_full="evict_oldest") as table:
        for i in range(4):
            table.add(rows(i, 3))
        with serving(str(table.name)) as server:
            yield table, server


def interruptions(call: Callable[[], object], every: int) -> Iterator[None]:
    """Raise at each so-manieth opcode of the links' modules in turn, until the call has fewer."""
    number, last = 0, 0
    while number == last:
        number, left = number + every, number + every

        def opcode(frame: Any) -> None:
            nonlocal left
            code = frame.f_code
            if code.co_filename.endswith(FILES) and code.co_name not in ONCE:
                left -= 1
                if left == 0:
                    raise Interruption

        try:
            traced(call, opcode)
        except Interruption:
            pass
        except BaseException as error:
            if not isinstance(error.__context__, Interruption):
                raise
        last = number if left <= 0 else last
        yield


def in_a_thread(work: Callable[[], object]) -> None:
    """Call it in another thread, which must end without an error."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "another thread waits for ever"
    if failures:
        raise failures[0]


@points(11)
def test_rows(shelf: Shelf, every: int) -> None:
    table, server = shelf
    peer, spec = server.peer(), spec_of(table)
    link = peer._direct
    generations = generations_of(table, np.arange(4))

    def asked(peer: Peer, slot: int) -> tuple[Any, Any]:
        one, out = np.array([slot]), poisoned(spec, 1)
        return peer.fetch(spec, one, one * 0, generations[one], out=out, here=True), out

    def values(slot: int) -> bytes:
        future, out = asked(peer, slot)
        assert future.result(PATIENCE).tolist() == [0]
        return bytes(out)

    wanted = [values(slot) for slot in range(4)]
    count = 0
    for limit in (None, PATIENCE):
        under_way: list[Any] = []

        def call(limit: float | None = limit, under_way: list[Any] = under_way) -> None:
            under_way[:] = [asked(peer, 1), asked(peer, 2)]
            for future, _ in reversed(under_way):
                future.result(limit)

        for _ in interruptions(call, every):
            count += 1

            def check(under_way: list[Any] = under_way) -> None:
                assert link._guard.acquire(timeout=PATIENCE), "the lock is held"
                link._guard.release()
                assert values(3) == wanted[3]
                for slot, (future, out) in enumerate(under_way, 1):
                    assert future.exception(PATIENCE) or bytes(out) == wanted[slot]

            in_a_thread(check)
    assert count > 300 // every
    peer.close()


@pytest.mark.parametrize("one", [True, False])
@points(5)
def test_stores(shelf: Shelf, one: bool, every: int) -> None:
    table, server = shelf
    peer = server.peer()
    delivery = Delivery(peer, str(table.name), table.schema, PATIENCE)
    unset, count = np.full(1, -1, dtype=np.float32), 0
    length, arrays = table.schema.validate(rows(9, 2))
    checked = Rows(length, [arrays], arrays)

    def call() -> None:
        if one:
            delivery.store_one(checked, -1.0)
        else:
            delivery.store([checked], unset)

    call()
    link = peer._direct
    for _ in interruptions(call, every):
        count += 1

        def check() -> None:
            assert link._guard.acquire(timeout=PATIENCE), "the lock is held"
            link._guard.release()
            call()

        in_a_thread(check)
    assert count > 50 // every
    peer.close()
