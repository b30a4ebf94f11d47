"""Steps that callers write into reserved blocks themselves: `Writer.reserve` and `written`, `copying.put_steps`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.native import copying

BLOCK_STEPS, LONGEST = 4, 10


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_of_several_open_trajectories_at_once(ahead: bool) -> None:
    """Two trajectories of 10 steps and, with `ahead`, the value of an eleventh."""
    schema = {"state": gear.Column(torch.float32, (3,)), "flag": gear.Column(torch.bool)}
    capacity, rows = LONGEST + ahead, 7
    rng = np.random.default_rng(0)
    states = rng.standard_normal((LONGEST + 1, 2, 3)).astype(np.float32)
    flags = rng.random((LONGEST + 1, 2)) < 0.5
    with gear.Table.create(schema, max_steps=50, max_trajectories=4, block_steps=BLOCK_STEPS) as table:
        writers = [table.writer(), table.writer()]
        blocks = np.zeros((2, 3), dtype=np.int32)
        open_steps = np.zeros((2, 3), dtype=np.int64)
        for member, writer in enumerate(writers):
            ids, step, end = writer.reserve(capacity)
            slot = writer.open_slots[1][-1]
            assert step == 0
            assert end >= capacity
            blocks[member] = ids[:3]
            open_steps[member] = slot, 0, capacity
        places = np.full((rows, 2, 2), -1, dtype=np.int32)
        ended = np.zeros(2, dtype=bool)

        def put(state: np.ndarray, step: int) -> int:
            sources = np.array([state.ctypes.data, flags[step].ctypes.data], dtype=np.int64)
            following = np.array([states[step + 1].ctypes.data] if ahead else [], dtype=np.int64)
            found: int = copying.put_steps(
                table._engine.columns,
                BLOCK_STEPS,
                blocks,
                open_steps,
                sources,
                following,
                ended,
                places,
                step % rows,
            )
            return found

        for step in range(LONGEST):
            ended[1] = step == 5
            if ahead and step == 3:
                other = states[step].copy()
                other[1, 2] += 1
                before = open_steps.copy(), places.copy()
                assert put(other, step) == -2  # trajectory 1 does not begin with what was written ahead
                np.testing.assert_array_equal(before[0], open_steps)
                np.testing.assert_array_equal(before[1], places)
            assert put(states[step], step) == (2 if step == LONGEST - 1 else ended[1])
        slots, steps = np.empty(4, dtype=np.int64), np.empty(4, dtype=np.int64)
        copying.look_up(places, np.array([0, 1, 2, 3]), np.array([0, 1, 0, 1]), slots, steps)
        assert slots.tolist() == open_steps[[0, 1, 0, 1], 0].tolist()
        assert steps.tolist() == [7, 8, 9, 3]
        assert len(table) == 0
        for member, writer in enumerate(writers):
            writer.written(LONGEST)
            if ahead:
                view = {"state": states[LONGEST, member], "flag": flags[LONGEST, member]}
                writer.append(view)
            found = table[writer.commit()]
            np.testing.assert_array_equal(found["state"], states[:capacity, member])
            np.testing.assert_array_equal(found["flag"], flags[:capacity, member])
        table.check_valid()
        assert table.num_steps == 2 * capacity
