"""Memory of requests that have ended serves later ones, and never two at a time."""

from __future__ import annotations

import threading

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_remote_table import named, url_of
from transport_common import SECRET, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.transport.message_schema import ALIGNMENT
from gear_loader.transport.resources import SpareMemory
from gear_loader.utils.arrays import Array, data_address

MOST = 4096
COLUMN = {"x": gear.Column(torch.int64)}


def test_the_latest_buffer_that_fits_is_taken() -> None:
    memory = SpareMemory(MOST)
    small, large, larger = (memory.take(size) for size in (100, 500, 900))
    for buffer in (small, large, larger):
        memory.give(buffer)
    assert memory.take(300) is larger
    assert memory.take(300) is large
    assert memory.take(300) is not small
    assert memory.held == len(small)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * MOST)), max_size=40))
def test_it_keeps_at_most_so_much_and_lends_nothing_twice(calls: list[tuple[bool, int]]) -> None:
    memory, lent = SpareMemory(MOST), list[Array]()
    for takes, size in calls:
        if takes:
            buffer = memory.take(size)
            assert size <= len(buffer) <= max(4 * size, size + 1)
            assert not size or data_address(buffer) % ALIGNMENT == 0
            assert not any(np.shares_memory(buffer, other) for other in lent)
            lent.append(buffer)
        elif lent:
            memory.give(lent.pop(size % len(lent)))
        assert 0 <= memory.held <= MOST


def stored(table: gear.Table, slot: int) -> list[int]:
    found: list[int] = table[slot]["x"].tolist()
    return found


def test_stores_of_all_sizes_in_turn_and_at_once() -> None:
    with (
        named(COLUMN, max_steps=1 << 20, max_trajectories=4096, on_full="evict_oldest") as table,
        serving(str(table.name)) as server,
    ):
        errors: list[BaseException] = []

        def write(seed: int) -> None:
            try:
                chance = np.random.default_rng(seed)
                with gear.connect(url_of(server.address, table), secret=SECRET) as remote:
                    for number in range(20):
                        lengths = chance.integers(1, 60_000 if number % 3 == 0 else 60, 4).clip(1, 20_000)
                        rows = [torch.arange(n) * 8 + seed for n in lengths]
                        slots = remote.extend([{"x": row} for row in rows])
                        if number < 6:  # before any is evicted
                            found = [stored(table, slot) for slot in slots.tolist()]
                            assert found == [row.tolist() for row in rows]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors, errors
        assert server.server.resources.spare_memory.held > 0
        assert server.server.resources.budget.held == 0


def test_parts_of_an_open_trajectory_are_not_memory_of_later_requests() -> None:
    with (
        named(COLUMN, max_steps=1 << 20, max_trajectories=64) as table,
        serving(str(table.name)) as server,
        gear.connect(url_of(server.address, table), secret=SECRET) as remote,
        gear.connect(url_of(server.address, table), secret=SECRET) as other,
    ):
        rows, writer = torch.arange(40_000), remote.writer(wait=True)
        writer.append({"x": rows})
        wait_until(lambda: server.server.resources.open_parts.size > 0)
        for _ in range(3):
            other.extend([{"x": torch.full((32_768,), -1)}] * 2)
        assert stored(table, writer.commit()) == rows.tolist()
