"""Trajectories that grow in a table with a disk tier: they equal those of a table that fits, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tier_common
from table_common import fresh_name
from tier_common import COLUMNS, everything, final, fitting, rows, tiered

import gear_loader as gear
from gear_loader.checkpoint import spilling
from gear_loader.errors import TableFullError

STEPS = [name for name, column in COLUMNS.items() if not column.trajectory]


def append(writer: gear.Writer, number: int, first: int, count: int) -> tuple[int, ...]:
    """Append steps `first`, first + 1, ... of the trajectory `number`."""
    values = rows(number, first + count)
    if not writer.num_steps:
        writer.trajectory = {"task": values["task"]}
    return writer.append({name: values[name][first:] for name in STEPS})


def move_out(table: gear.Table, path: Path | None = None) -> None:
    """Move to disk what lies there; write it before, with a path."""
    if path is not None:
        table.save(path)
    slots = table.indices()
    table._engine.index.spill(slots, table._engine.index.arrays.generation[slots])


def outside(table: gear.Table, slot: int) -> bool:
    return bool(table._engine.region.array("extent")[slot, 1] < 0)


def test_a_step_brings_its_trajectory_back(tmp_path: Path) -> None:
    name = fresh_name()
    with tiered(tmp_path, name=name) as table, fitting() as whole:
        try:
            with gear.Table.attach(name) as other:  # reads from disk by itself
                pairs = [
                    (other.writer(commit_every_step=True), whole.writer(commit_every_step=True)) for _ in "ab"
                ]
                for turn in range(12):
                    for number, pair in enumerate(pairs):
                        (slot,) = {append(one, number, one.num_steps, 1 + turn % 3)[0] for one in pair}
                        assert not outside(table, slot)
                    table.save(tmp_path)
                    (slot,) = append(pairs[1][0], 1, pairs[1][0].num_steps, 1)
                    append(pairs[1][1], 1, pairs[1][1].num_steps, 1)
                    move_out(table)
                    assert outside(table, int(table.indices()[0]))
                    assert not outside(table, slot), "its last step is not on disk"
                    if turn % 2:
                        spilling.promote(table._engine, table.indices())
                    assert everything(table) == everything(whole)
                for number, pair in enumerate(pairs):
                    move_out(table, tmp_path)
                    for one in pair:
                        one.commit(final=final(number, one.num_steps))
                assert everything(table) == everything(whole)
        finally:
            table.unlink()


def test_no_room_to_come_back(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=10, timeout=0.05) as table:
        writer = table.writer(commit_every_step=True)
        append(writer, 1, 0, 9)
        move_out(table, tmp_path)
        assert table._engine.num_spilled == 1
        with table.writer() as other:
            values = rows(2, 36)
            other.append({name: values[name] for name in STEPS})
            before = everything(table)
            with pytest.raises(TableFullError, match="the growing trajectory, of 9 steps, lies on disk only"):
                append(writer, 1, 9, 1)
            assert everything(table) == before
            other.discard()
        append(writer, 1, 9, 1)
        assert table[int(table.indices()[0])]["number"].tolist() == [1] * 10


@pytest.mark.parametrize("options", [{}, {"max_age": 1e6}], ids=["together", "one by one"])
def test_rows_of_environments_of_which_one_lies_on_disk_go_to_their_own_trajectories(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    steps = [name for name, column in tier_common.COLUMNS.items() if not column.trajectory]
    with (
        tier_common.tiered(tmp_path, blocks=60, **options) as table,
        table.writers(4, commit_every_step=True) as writers,
    ):
        for turn in range(6):
            values = [tier_common.rows(number, turn + 1) for number in range(4)]
            if not turn:
                writers.trajectory = {"task": np.stack([each["task"] for each in values])}
            writers.append({name: np.stack([each[name][-1] for each in values]) for name in steps})
            if turn == 3:
                table.save(tmp_path)
                assert tier_common.spill(table, table.indices()[1:2]) == 1
        assert writers.num_steps.tolist() == [6] * 4
        for number, index in enumerate(table.indices()):
            assert table[int(index)]["value"].tolist() == tier_common.rows(number, 6)["value"].tolist()
