"""Those who follow the changes of the index, and its block tables that move while they are read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from index_common import Follower
from table_common import COLUMNS, Reading, numbers_of, rows

import gear_loader as gear
from gear_loader.errors import LockTimeoutError
from gear_loader.storage.counters import DIRTY, HALF, NUM_TOUCHED


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_ring_tells_what_was_touched_until_it_overflows(num_slots: int) -> None:
    with gear.Table.create(COLUMNS, max_steps=20, max_trajectories=num_slots, block_steps=4) as table:
        follower = Follower(table)
        assert follower.look().everything
        for touches in [*range(2 * num_slots + 4)] * 3:
            for _ in range(touches):
                if len(table):
                    slot = int(table.indices()[0])
                    table.remove(slot)
                else:
                    slot = table.add(rows(touches, 2))
                follower.touched.append(slot)
            assert follower.look().everything == (touches > num_slots)


def test_a_repair_makes_followers_look_at_every_slot() -> None:
    with gear.Table.create(COLUMNS, max_steps=60, max_trajectories=6) as table:
        table.extend([rows(1, 4), rows(2, 7)])
        follower = Follower(table)
        follower.look()
        assert not follower.look().everything
        table._engine.region.array("counters")[DIRTY] = 1
        touched = int(table._engine.region.array("counters")[NUM_TOUCHED])
        follower.repaired = True
        changes = follower.look()
        assert changes.everything
        assert changes.slots.tolist() == list(range(6))
        assert changes.position > touched + 6
        assert not follower.look().everything


@pytest.mark.parametrize(
    ("worn", "retiring"), [(0, False), (5, True), (11, False), (12, True), (17, False), (21, True)]
)
def test_block_tables_move_twice_only_when_no_reader_is_left_behind(worn: int, retiring: bool) -> None:
    """A reader that began before a move may still use the half that was left; so the next move waits for it."""
    with gear.Table.create(
        COLUMNS, max_steps=40, max_trajectories=8, block_steps=4, memory=gear.Memory(max_blocks=12)
    ) as table:
        table._engine.region.lock.timeout = 0
        index = table._engine.index
        table.extend([rows(1, 9), rows(2, 13), rows(3, 1)])

        def wear() -> None:
            slots, _ = index.begin(np.array([1]), evict=False)
            index.abort(slots)

        def wear_until_it_waits() -> None:
            for _ in range(200):
                wear()
                table.check_valid()
                halves.append(int(index.arrays.counters[HALF]))
                for reading in readings:
                    reading.check(table)

        for _ in range(worn):
            wear()
        ticket = index.reader.begin_read()
        readings = [Reading.of(table, slot) for slot in table.indices().tolist()]
        if retiring:
            table.remove(1)
        halves = [int(index.arrays.counters[HALF])]
        with pytest.raises(LockTimeoutError, match=r"is still being read by the processes \[\d+\] or writ"):
            wear_until_it_waits()
        assert len(list(itertools.groupby(halves))) == 2, "moved once, and not back"
        for reading in readings:
            reading.check(table)
        assert numbers_of(table) == ([1, 3] if retiring else [1, 2, 3])
        ticket.end()
        for _ in range(60):
            wear()
        assert numbers_of(table) == ([1, 3] if retiring else [1, 2, 3])
        table.check_valid()
