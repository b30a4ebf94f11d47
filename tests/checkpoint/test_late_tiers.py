"""Late columns of trajectories that lie on disk, against a dict of what each trajectory has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.errors import FilledError, TableFullError
from gear_loader.storage import late

COLUMNS = {
    "token": gear.Column(torch.int32),
    "advantage": gear.Column(torch.float32, (2,), late=True),
    "number": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
}


def tiered(path: Path, *, blocks: int = 40, **options: Any) -> gear.Table:
    disk = gear.Disk(path, sync_seconds=NEVER, size="1GiB", keep="newest")
    sizes = {
        "max_steps": 3000,
        "max_trajectories": 60,
        "block_steps": 4,
        "max_blocks": blocks,
        "timeout": 30.0,
    }
    return gear.Table.create(COLUMNS, **{**sizes, **options}, disk=disk)


def add(table: gear.Table, number: int, length: int) -> int:
    return table.add({"token": np.arange(length, dtype=np.int32), "number": np.int64(number)})


def advantage(number: int, length: int) -> np.ndarray:
    return (1000 * number + np.arange(length)[:, None] + np.array([0.0, 0.5])).astype(np.float32)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20)),
        st.tuples(st.sampled_from(["spill", "reward", "advantage", "remove"]), st.integers(0, 40)),
        st.tuples(st.sampled_from(["save", "draw"]), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("small", [0, late._SMALL])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS)
def test_any_history_equals_a_dict(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, small: int, actions: Any
) -> None:
    monkeypatch.setattr(late, "_SMALL", small)
    path = tmp_path_factory.mktemp("late")
    has: dict[int, tuple[int, int, set[str]]] = {}  # index -> number, length, filled
    with tiered(path) as table:
        for number, (action, value) in enumerate([("add", 7), ("add", 3), *actions]):
            keys = list(has)
            which = keys[value % len(keys)] if keys else None
            if action == "add":
                has[add(table, number, value)] = (number, value, set())
            elif action == "save":
                table.save(path)
            elif action == "draw":
                draw(table, has)
            elif which is None:
                continue
            elif action == "spill":
                spill(table, [which])
            elif action == "remove":
                table.remove(which)
                del has[which]
            else:
                name, length, filled = has[which]
                given = np.float32(name) if action == "reward" else advantage(name, length)
                if action in filled:
                    with pytest.raises(FilledError):
                        table.fill(which, **{action: given})
                else:
                    table.fill(which, **{action: given})
                    filled.add(action)
        draw(table, has)
        table.save(path)
        spill(table, list(has))
        draw(table, has)
    with gear.Table.recover(path) as again:
        assert len(again) == len(has)
        draw(again, {index: has[old] for index, old in zip(again.indices().tolist(), has, strict=True)})


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
        table, windows=gear.Whole(), layout="packed", device="cpu", max_steps=50,
        selector=gear.Uniform(replacement=False), prefetch=0,
    )  # fmt: skip
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
    from gear_loader.checkpoint.spilling import Spiller

    with tiered(tmp_path) as table:
        index = add(table, 1, 9)
        note = Spiller.note

        def late_note(self: Any, *args: Any) -> None:
            if not late.filled_bits(table.index.arrays, np.array([index]))[0]:
                table.fill(index, reward=np.float32(2.5))
            note(self, *args)

        monkeypatch.setattr(Spiller, "note", late_note)
        table.save(tmp_path)
        assert spill(table, [index]) == 0
        table.save(tmp_path)
        assert spill(table, [index]) == 1
        assert float(table[index]["reward"]) == 2.5


def test_more_than_the_memory_holds_is_refused(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=20, timeout=0.5) as table:
        slots = []
        for number in range(12):
            slots.append(add(table, number, 16))
            table.save(tmp_path)
            spill(table, slots)
        with pytest.raises(TableFullError, match="lie on disk only, and there is no room"):
            table.fill(slots, reward=np.arange(12, dtype=np.float32))
        assert len(table.unfilled("reward")[0]) == 12
        for slot in slots:
            table.fill(slot, reward=np.float32(slot))
        assert not len(table.unfilled("reward")[0])


def test_a_trajectory_that_is_moved_while_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for its blocks and the copy into them: the fill begins again."""
    with tiered(tmp_path) as table:
        index = add(table, 1, 9)
        table.save(tmp_path)
        finish, moved = late._Request._finish, []

        def late_finish(self: Any, *args: Any, **options: Any) -> int:
            if not moved:
                moved.append(table.index.arrays.ops.spill(table.index.arrays.where, *names))
            return finish(self, *args, **options)

        names = np.array([index]), table.index.arrays.generation[[index]]
        monkeypatch.setattr(late._Request, "_finish", late_finish)
        assert table.fill(index, reward=np.float32(2.5)) == 0
        assert moved == [1]
        assert float(table[index]["reward"]) == 2.5
        table.check_valid()
