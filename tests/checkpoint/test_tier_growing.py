"""Trajectories that grow in a table with a disk tier: they equal those of a table that fits, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tier_common
from hypothesis import given, settings
from hypothesis import strategies as st
from table_common import fresh_name
from tier_common import COLUMNS, WINDOWS, batch_bits, everything, final, fitting, rows, spill, tiered

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


@settings(max_examples=20, deadline=None, database=None)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(
                ["append", "append", "append", "commit", "add", "write", "out", "promote", "remove"]
            ),
            st.integers(0, 99),
        ),
        min_size=5,
        max_size=40,
    ),
    selector=st.sampled_from([gear.Uniform(), gear.Uniform(unit="step"), gear.Prioritized(), gear.Lifo()]),
)
def test_random_histories(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, int]], selector: Any
) -> None:
    path = tmp_path_factory.mktemp("tier")
    with fitting() as whole, tiered(path, blocks=40) as table:
        writers = [[one.writer(commit_every_step=True) for _ in range(3)] for one in (table, whole)]
        pair = [
            gear.ReplayDataset(
                one, windows=WINDOWS, batch_size=6, seed=3, device="cpu", prefetch=0, selector=selector
            )
            for one in (table, whole)
        ]
        numbers, following = [0, 1, 2], 3
        for one in writers:
            append(one[0], 0, 0, 1)
        for kind, chosen in kinds:
            which = chosen % 3
            slots = table.indices()
            slot = slots[chosen % len(slots)][None] if len(slots) else slots
            count = 1 + chosen % 7
            if kind == "append":
                done = [append(one[which], numbers[which], one[which].num_steps, count) for one in writers]
                assert done[0] == done[1]
            elif kind == "commit" and writers[0][which].num_steps:
                length = writers[0][which].num_steps
                ends = final(numbers[which], length) if chosen % 2 else None
                for one in writers:
                    one[which].commit(final=ends)
                numbers[which], following = following, following + 1
            elif kind == "add":
                for one in (table, whole):
                    one.add(rows(following, count), priority=float(count))
                following += 1
            elif kind == "write":
                table.save(path)
            elif kind == "out":
                move_out(table, path if chosen % 2 else None)
            elif kind == "promote":
                spilling.promote(table._engine, slot)
            elif kind == "remove" and len(slots) > 1:
                for one in (table, whole):
                    one.remove(slot)
            assert everything(table) == everything(whole)
            assert batch_bits(pair[0].sample()) == batch_bits(pair[1].sample())


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


def test_writers_of_a_vector_environment(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=60) as table, fitting() as whole:
        pair = [one.writers(4, commit_every_step=True) for one in (table, whole)]
        for turn in range(20):
            for one in pair:
                values = [rows(number, turn + 1) for number in range(4)]
                if not turn:
                    one.trajectory = {"task": np.stack([each["task"] for each in values])}
                one.append({name: np.stack([each[name][-1] for each in values]) for name in STEPS})
            if turn % 3 == 1:
                move_out(table, tmp_path)
                assert table._engine.num_spilled == 4
            if turn % 6 == 4:
                spilling.promote(table._engine, table.indices()[:2])
            assert everything(table) == everything(whole)


def test_steps_come_back_after_a_crash(tmp_path: Path) -> None:
    with fitting() as whole:
        with tiered(tmp_path) as table:
            pair = [one.writer(commit_every_step=True) for one in (table, whole)]
            for turn in range(9):
                for one in pair:
                    append(one, 1, one.num_steps, 2)
                if turn % 3 == 2:
                    move_out(table, tmp_path)
        with gear.Table.recover(gear.Disk(tmp_path, size="1GiB")) as table:
            assert everything(table) == everything(whole)


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


def test_what_has_grown_since_it_was_written_stays_in_memory(tmp_path: Path) -> None:
    with tiered(tmp_path) as table:
        writer = table.writer(commit_every_step=True)
        append(writer, 1, 0, 5)
        table.save(tmp_path)
        append(writer, 1, 5, 2)
        before, slots = everything(table), table.indices()
        assert spill(table, slots) == 0
        assert everything(table) == before


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
