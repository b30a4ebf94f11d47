"""A death at every store of what moves, fills and lengthens trajectories of a table with a disk tier."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import points
from options_common import nested_table
from table_common import Died, Fragile, bury, mortal
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.checkpoint import saving, spilling
from gear_loader.checkpoint.files import Arena
from gear_loader.checkpoint.saving import Save
from gear_loader.checkpoint.spilling import Spiller
from gear_loader.storage import late
from gear_loader.storage.disk_copies import copies_of
from gear_loader.storage.index import Index

COLUMNS = {
    "token": gear.Column(torch.int64),
    "number": gear.Column(torch.int64, per="trajectory"),
    "advantage": gear.Column(torch.float32, (2,), late=True),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
}
GROWING = {"token": gear.Column(torch.int64, final=True), "number": COLUMNS["number"]}
LENGTHS = (5, 9, 4, 8)
"""Of the trajectories 1, 2, ..., in blocks of 4 steps."""
LATE = ("reward", "advantage")


def value(name: str, number: int, length: int) -> Any:
    """The values of a column; no two are the same, and none is 0."""
    if name == "number":
        return np.int64(number)
    if name == "reward":
        return np.float32(number + 0.5)
    steps = 1000 * number + 1 + np.arange(length)
    return steps if name == "token" else (steps[:, None] + np.array([0, 0.25])).astype(np.float32)


def make(path: Path, columns: dict[str, gear.Column], blocks: int = 40) -> gear.Table:
    disk = gear.Disk(path, sync_seconds=NEVER, size="1GiB")
    sizes = {"max_steps": 400, "max_trajectories": 10, "block_steps": 4, "max_blocks": blocks}
    table = gear.Table.create(columns, **nested_table({**sizes, "disk": disk, "timeout": 30.0}))
    table._engine.region.column("token")[:] = 0xAB  # what is not written is seen
    return table


def fill(table: gear.Table, slots: Any, *names: str) -> None:
    """Fill columns of trajectories, of which `slots[i]` has the number i + 1."""
    which = [int(slot) for slot in slots]
    numbers = [int(table[slot]["number"]) for slot in which]
    table.fill(which, **{
        name: np.array([value(name, n, 1) for n in numbers]) if name == "reward"
        else [value(name, n, LENGTHS[n - 1]) for n in numbers]
        for name in names
    })  # fmt: skip


def look(table: gear.Table, *, lengths: Any = LENGTHS) -> dict[int, set[str]]:
    """The late columns of each trajectory; fails unless all that it shows is right."""
    table.check_valid()
    found = {}
    for slot in table.indices().tolist():
        row = table[slot]
        number, length = int(row["number"]), len(row["token"])
        assert length == lengths[number - 1] if lengths else 1
        for name, values in row.items():
            np.testing.assert_array_equal(values.numpy(), value(name, number, length), err_msg=name)
        found[slot] = set(row) & set(LATE)
    return found


Act = Callable[[gear.Table, list[int]], None]


def _fill(*names: str) -> Act:
    return lambda table, slots: fill(table, slots, *names)


def _note(table: gear.Table, slots: list[int]) -> None:
    save = _written[table._engine.region]
    records = save.on_disk.records[save.written]
    Spiller(table._engine.index, table._engine.region, "newest", 3).note(save.written, records)


def _spill(table: gear.Table, slots: list[int]) -> None:
    index = table._engine.index
    assert index.spill(np.array(slots), index.arrays.generation[slots].view(np.ndarray)) >= 0


def _promote(table: gear.Table, slots: list[int]) -> None:
    spilling.promote(table._engine, np.array(slots))


_written: dict[Any, Save] = {}
ACTS: dict[str, Act] = {
    "fill": _fill(*LATE),
    "fill large": _fill(*LATE),
    "note": _note,
    "spill": _spill,
    "promote": _promote,
}


@pytest.fixture(autouse=True)
def _copies_are_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of values and rows count as stores: one may be the last, and happens by half."""
    for module in (late, spilling):
        copy = module.copy_rows

        def mortal_copy(address: int, begin: int, end: int, *given: Any, copy: Any = copy) -> None:
            Fragile.stores_left -= 1
            if Fragile.stores_left < 0:
                copy(address, begin, begin + (end - begin) // 2, *given)
                Fragile.die()
            copy(address, begin, end, *given)

        monkeypatch.setattr(module, "copy_rows", mortal_copy)


def other(table: gear.Table, index: Index) -> gear.Table:
    """The table as the process has it that dies."""
    handle = gear.Table(table._engine.region)
    handle._engine._index = index
    return handle


def write(table: gear.Table) -> Save:
    """Bring the files up to date, as an owner does that dies before it has noted it; the next write is another's."""
    place = table._engine.disk._place  # type: ignore[union-attr]
    save = Save(table, place.directory, place.manifest, place.on_disk)
    save.run_behind(place.previous, Arena())
    place.is_uncertain = True
    return save


@pytest.mark.parametrize("torn", [False, True], ids=["between stores", "inside stores"])
@pytest.mark.parametrize("what", ACTS)
@points(29)
def test_late_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, torn: bool, every: int
) -> None:
    """Trajectories in memory and on disk, of which some have columns that the disk lacks: none is lost or wrong."""
    monkeypatch.setattr(late, "_SMALL", 0 if what == "fill large" else late._SMALL)
    monkeypatch.setattr(
        saving, "MAX_SEGMENTS_BEHIND", 1
    )  # so that what lies there is written again elsewhere
    for stores in itertools.count(0, every):
        with make(tmp_path / str(stores), COLUMNS) as table:
            slots = [
                table.add({name: value(name, number, length) for name in ("token", "number")})
                for number, length in enumerate(LENGTHS, start=1)
            ]
            path = tmp_path / str(stores)
            fill(table, slots[:1], "reward")
            table.save(path)
            assert spill(table, slots[:3]) == 3
            if what == "note":  # of two that lie on disk only, and move in the files
                table.remove(slots.pop(0))
                fill(table, slots[2:], "reward")
            elif not what.startswith("fill"):
                fill(table, slots[1:], "reward")  # brings two back
            if what == "spill":
                table.save(path)
            if what == "note":
                _written[table._engine.region], place = (
                    write(table),
                    copies_of(table._engine.index.arrays, np.array(slots[:1])),
                )
            elif what == "promote":
                table.save(path)
                assert spill(table, slots) == 4 - 1
            before = look(table)
            if what.startswith("fill"):
                slots = slots[1:]
            died = True
            try:
                with mortal(table, stores, torn=torn) as index:
                    ACTS[what](other(table, index), slots)
                    died = False
            except Died:
                pass
            _written.clear()
            bury(table)
            after = look(table)
            wanted = {slot: set(LATE) if slot in slots else had for slot, had in before.items()}
            if not what.startswith("fill"):
                wanted = before
            assert all(before[slot] <= after[slot] <= wanted[slot] for slot in before)
            assert died or after == wanted
            if what == "note" and not died:
                assert table._engine.num_spilled
                assert (place != copies_of(table._engine.index.arrays, np.array(slots[:1]))).all()
            spill(table, list(before))  # of those that are on disk with all that they have
            assert look(table) == after
            for slot, had in after.items():
                for name in set(LATE) - had:
                    fill(table, [slot], name)
            assert look(table) == {slot: set(LATE) for slot in before}
            table.save(path)
            spill(table, list(before))
            assert table._engine.num_spilled == len(before)
            assert look(table) == {slot: set(LATE) for slot in before}
        if not died:
            break
    assert stores > 1


@pytest.mark.parametrize("torn", [False, True], ids=["between stores", "inside stores"])
@points(29)
def test_growing_trajectories(tmp_path: Path, torn: bool, every: int) -> None:
    """A writer dies at each store; its trajectory is moved to disk and comes back in between."""
    for stores in itertools.count(0, every):
        path = tmp_path / str(stores)
        with make(path, GROWING) as table:
            died = True
            with mortal(table, float("inf"), torn=torn) as index:
                handle = other(table, index)
                writer = handle.writer(commit_every_step=True)
                writer.trajectory = {"number": np.int64(1)}
                try:
                    for count in (5, 1, 3, 2):
                        first = writer.num_steps
                        slot, *_ = writer.append(token=value("token", 1, first + count)[first:])
                        table.save(path)
                        assert spill(table, [slot]) == 1
                        Fragile.stores_left = min(Fragile.stores_left, stores)
                    writer.commit(final={"token": np.int64(1012)})
                    died = False
                except Died:
                    pass
                handle._engine._index = None
            bury(table)
            for turn in range(3):
                look(table, lengths=())
                assert turn or len(table) == 1
                length = table.num_steps
                assert length in (5, 6, 9, 11)
                end = table.final(slot)
                assert end is None or (length, int(end["token"])) == (11, 1012)
                assert died or end is not None
                if turn == 1:
                    table.save(path)
                spill(table, [slot])
            assert table._engine.num_spilled == 1
        if not died:
            break
    assert stores > 8
