"""Late columns of trajectories that lie on disk, and what happens between the steps of filling them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tier_common import spill, tiered

import gear_loader as gear
from gear_loader.checkpoint.spilling import Spiller
from gear_loader.errors import TableFullError
from gear_loader.storage import late

COLUMNS = {
    "token": gear.Column(torch.int32),
    "advantage": gear.Column(torch.float32, (2,), late=True),
    "number": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
}


def add(table: gear.Table, number: int, length: int) -> int:
    return table.add({"token": np.arange(length, dtype=np.int32), "number": np.int64(number)})


def advantage(number: int, length: int) -> np.ndarray:
    return (1000 * number + np.arange(length)[:, None] + np.array([0.0, 0.5])).astype(np.float32)


def draw(table: gear.Table, has: dict[int, tuple[int, int, set[str]]]) -> None:
    """A dataset draws what is filled, with its values, and nothing else."""
    table.check_valid()
    wanted = {number: length for number, length, filled in has.values() if len(filled) == 2}
    for index, (number, length, filled) in has.items():
        row = table[index]
        assert set(row) == {"token", "number", *filled}
        if "advantage" in filled:
            np.testing.assert_array_equal(row["advantage"].numpy(), advantage(number, length))
        if "reward" in filled:
            assert float(row["reward"]) == number
    if not wanted:
        return
    data = gear.ReplayDataset(
        table,
        windows=gear.Whole(),
        layout="packed",
        device="cpu",
        batch_size=gear.Steps(50),
        sampler=gear.Uniform(replacement=False),
        prefetch=0,
    )
    found = []
    for batch in data:
        starts = batch["cu_seqlens"].tolist()
        for b, number in enumerate(batch["number"].tolist()):
            assert float(batch["reward"][b]) == number
            part = batch["advantage"][starts[b] : starts[b + 1]].numpy()
            np.testing.assert_array_equal(part, advantage(number, wanted[number]))
            found.append(number)
    assert sorted(found) == sorted(wanted)


def test_a_write_that_began_before_a_fill_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values that come while the disk is written are not on it: the trajectory stays in memory."""
    with tiered(tmp_path, COLUMNS, blocks=40) as table:
        index = add(table, 1, 9)
        note = Spiller.note

        def late_note(self: Any, *args: Any) -> None:
            if not late.filled_bits(table._engine.index.arrays, np.array([index]))[0]:
                table.fill(index, reward=np.float32(2.5))
            note(self, *args)

        monkeypatch.setattr(Spiller, "note", late_note)
        table.save(tmp_path)
        assert spill(table, [index]) == 0
        table.save(tmp_path)
        assert spill(table, [index]) == 1
        assert float(table[index]["reward"]) == 2.5


@pytest.mark.parametrize("small", [0, late._SMALL])
def test_more_than_the_memory_holds_is_filled_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """Also if what is filled is moved to disk at once, and a trajectory is removed on the way."""
    monkeypatch.setattr(late, "_SMALL", small)
    with tiered(tmp_path, COLUMNS, blocks=20) as table:
        slots, has = [], {}
        for number in range(20):
            slots.append(add(table, number, 16))
            has[slots[-1]] = (number, 16, {"reward", "advantage"})
            table.save(tmp_path)
            spill(table, slots)
        load_from_disk = table._engine.load_from_disk
        del has[slots[17]]

        def beside(piece: Any) -> int:
            if len(table.unfilled()[0]) < 15 and slots[17] in table.indices():
                table.remove(slots[17])
            table.save(tmp_path)
            spill(table, table.indices())
            return load_from_disk(piece)

        monkeypatch.setattr(table._engine, "load_from_disk", beside)
        given = {
            "reward": np.arange(20, dtype=np.float32),
            "advantage": [advantage(n, 16) for n in range(20)],
        }
        assert table.fill(slots, **given) == 1
        assert len(table) == 19
        draw(table, has)


def test_no_room_to_fill(tmp_path: Path) -> None:
    with tiered(tmp_path, COLUMNS, blocks=10, timeout=0.05) as table:
        slots = [add(table, number, 16) for number in range(2)]
        table.save(tmp_path)
        assert spill(table, slots) == 2
        with table.writer() as writer:
            writer.append({"token": np.zeros(36, dtype=np.int32)})
            with pytest.raises(
                TableFullError, match=r"2 of 2 trajectories of a fill lie on disk only.*0 were filled"
            ):
                table.fill(slots, reward=np.arange(2, dtype=np.float32))
            writer.discard()
        assert table.fill(slots, reward=np.arange(2, dtype=np.float32)) == 0


def test_a_trajectory_that_is_moved_while_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the lookup of its blocks and the copy into them: the fill begins again."""
    with tiered(tmp_path, COLUMNS, blocks=40) as table:
        index = add(table, 1, 9)
        table.save(tmp_path)
        finish, moved = late._FillCall._finish, []

        def late_finish(self: Any, *args: Any, **options: Any) -> int:
            if not moved:
                given = table._engine.index.arrays.where, *names, np.empty(0, dtype=np.int32)
                moved.append(table._engine.index.arrays.ops.spill(*given))
            return finish(self, *args, **options)

        names = np.array([index]), table._engine.index.arrays.generation[[index]]
        monkeypatch.setattr(late._FillCall, "_finish", late_finish)
        assert table.fill(index, reward=np.float32(2.5)) == 0
        assert moved == [1]
        assert float(table[index]["reward"]) == 2.5
        table.check_valid()


def test_what_is_filled_between_the_choice_and_the_lock_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has chosen a trajectory whose rows are on disk, and then waits for the lock of who fills it."""
    with tiered(tmp_path, COLUMNS, blocks=40) as table:
        index = add(table, 1, 9)
        table.save(tmp_path)
        spiller = Spiller(table._engine.index, table._engine.region, "newest", 3)
        monkeypatch.setattr(spiller, "missing", lambda: 40)
        move = table._engine.index.spill

        def late_spill(*given: Any) -> Any:
            table.fill(index, reward=np.float32(2.5))
            return move(*given)

        monkeypatch.setattr(table._engine.index, "spill", late_spill)
        spiller.spill()
        assert float(table[index]["reward"]) == 2.5
        assert table._engine.num_spilled == 0


def test_rows_that_move_while_they_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To disk, and back, filled, and to disk again: what one look finds is read where that look found it."""
    with tiered(tmp_path, COLUMNS, blocks=40) as table:
        index, other = add(table, 1, 9), add(table, 2, 9)
        table.save(tmp_path)
        begin, acts = table._engine.index.reader.begin_read_of, [
            lambda: spill(table, [index]),
            lambda: table.fill(index, reward=np.float32(1)),
            lambda: (table.fill(index, advantage=advantage(1, 9)), table.save(tmp_path), spill(table, [index])),
        ]  # fmt: skip

        def late(slot: int, *given: Any) -> Any:
            found = begin(slot, *given)
            if acts:
                acts.pop(0)()
            return found

        monkeypatch.setattr(table._engine.index.reader, "begin_read_of", late)
        for late_columns in ([], [], ["reward"], ["reward", "advantage"]):
            row = table[index]
            assert set(row) == {"token", "number", *late_columns}
            assert row["token"].tolist() == list(range(9))
            assert float(row.get("reward", 1)) == 1
        assert not acts
        assert int(table[other]["number"]) == 2


def test_rows_that_change_while_they_are_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read on disk is old when it is to be copied: another process has filled the trajectory meanwhile."""
    with tiered(tmp_path, COLUMNS, blocks=40) as table:
        index = add(table, 1, 9)
        table.save(tmp_path)
        assert spill(table, [index]) == 1
        reader, read = table._engine.tier_reader(), table._engine.tier_reader().read

        def late(*given: Any, **options: Any) -> None:
            read(*given, **options)
            monkeypatch.setattr(reader, "read", read)
            table.fill(index, reward=np.float32(2.5))
            table.save(tmp_path)
            assert spill(table, [index]) == 1

        monkeypatch.setattr(reader, "read", late)
        assert table._engine.load_from_disk(np.array([index])) == 0
        assert table._engine.load_from_disk(np.array([index])) == 1
        assert float(table[index]["reward"]) == 2.5
