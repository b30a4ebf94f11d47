"""An index into which something else was written: an error that names the table; no crash, no endless loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import mostly_long
from corruption_common import storm
from table_common import COLUMNS, fresh_name, named, numbers_of, rows

import gear_loader as gear
from gear_loader.errors import CorruptTableError, RegionError
from gear_loader.kernels.plan import BLOCKS, STEP_STRIDE, WIDTH
from gear_loader.native import gathering
from gear_loader.storage import counters as at
from gear_loader.storage import index_checks
from gear_loader.storage.operations.view import READING
from gear_loader.storage.shared_memory import region_path

SIZES: dict[str, Any] = {"max_steps": 100, "max_trajectories": 8, "block_steps": 4}
Write = Callable[[gear.Table], None]


@pytest.fixture
def table() -> Iterator[gear.Table]:
    """Five trajectories, and three slots that are free."""
    with named(**SIZES) as table:
        for number in range(5):
            table.add(rows(number, 4 + number), priority=1.0)
        yield table


def put(array: str, place: Any, value: Any) -> Write:
    """Writes a value into an array of the index."""

    def write(table: gear.Table) -> None:
        table._engine.region.array(array)[place] = value

    return write


# Attaching -------------------------------------------------------------------------------------------

# fmt: off
OUT_OF_BOUNDS = [
    *(put("state", 7, 4), put("extent", (1, 0), 101), put("extent", (1, 0), 0), put("extent", 1, (50, 40, 0))),
    *(put("extent", (1, 2), 2), put("extent", (1, 2), -1)),
    *(put("extent", (1, 1), -1), put("extent", (1, 1), 2**40), put("extent", (1, 1), 2**62)),
    *(put("block_ids", (0, 3), 10**6), put("block_ids", (1, 3), -1), put("links", (2, 1), 8)),
    *(put("free_slots", 0, 8), put("free_blocks", 0, -1), put("retired", 7, 8), put("touched", 7, -2)),
    *(put("uses", (0, 1), 9), put("priority", 1, np.nan), put("lowest", 0, np.nan)),
    *(put("counters", place, value) for place, value in (
        (at.NUM_READY, 9), (at.NUM_READY, -1), (at.NUM_FREE_SLOTS, 2**40), (at.NUM_FREE_BLOCKS, -1),
        (at.NUM_RETIRED, 9), (at.NUM_STEPS, 101), (at.OLDEST, 9), (at.NEWEST, -1), (at.RETIRED_FIRST, 8),
        (at.HALF, 2), (at.HEAD, -1), (at.HEAD + 1, 10**6), (at.MOVING, 3), (at.DRAWING, 9), (at.LEAVING, -1),
        (at.COMMITTING, 1), (at.ORIGIN, 2**17),
    )),
]
IN_RECOVERY = [
    *(put("extent", (1, 0), 2**50), put("extent", (1, 1), 2**62), put("extent", (1, 1), 8471207991015467062)),
    *(put("state", 1, 77), put("block_ids", (0, 1), 2**30), put("counters", at.DRAWING, 2**40)),
    *(put("counters", at.LEAVING, 2**40), put("counters", at.MOVING, 9)),
    lambda table: [put("counters", at.LEAVING, 1)(table), put("counters", at.LEAVING_COUNT, 10**6)(table)],
    lambda table: [put("counters", at.MOVING, 2)(table), put("moved", 0, 10**6)(table)],
]
# fmt: on


def test_attach_refuses_what_is_out_of_bounds(table: gear.Table) -> None:
    arrays = ("counters", "state", "extent", "block_ids", "links", "free_slots", "free_blocks", "retired")
    kept = {
        name: table._engine.region.array(name).copy()
        for name in (*arrays, "touched", "uses", "priority", "lowest")
    }
    for write in OUT_OF_BOUNDS:
        write(table)
        message = rf"Table '{table.name}' has a corrupt index: .*`gear-loader rm "
        with pytest.raises(CorruptTableError, match=message):
            gear.Table.attach(table.name or "").close()
        for name, values in kept.items():
            table._engine.region.array(name)[:] = values
    with gear.Table.attach(table.name or "") as other:
        assert numbers_of(other) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("write", IN_RECOVERY)
def test_recovery_refuses_what_is_out_of_bounds(table: gear.Table, write: Write) -> None:
    write(table)
    put("counters", at.DIRTY, 1)(table)
    for _ in range(2):
        with pytest.raises(CorruptTableError, match=f"Table '{table.name}' has a corrupt index"):
            table.add(rows(9, 3))


def test_recovery_makes_again_what_is_derived(table: gear.Table) -> None:
    table._engine.region.array("links")[:] = 10**6
    table._engine.region.array("free_blocks")[:] = -7
    table._engine.region.array("counters")[[at.OLDEST, at.NUM_FREE_SLOTS, at.RETIRED_FIRST]] = 10**9
    put("counters", at.DIRTY, 1)(table)
    with gear.Table.attach(table.name or "") as other:
        other.add(rows(5, 3))
        other.check_valid()
        assert numbers_of(other) == [0, 1, 2, 3, 4, 5]


def test_attach_to_a_table_in_the_middle_of_a_change_waits_for_its_end(table: gear.Table) -> None:
    index = table._engine.index
    with table._engine.region.lock:
        put("counters", at.COMMITTING, 1)(table)
        assert index_checks.damage(index.arrays) is not None
        put("counters", at.COMMITTING, 0)(table)
    index.recovery.check_bounds()


# Afterwards ------------------------------------------------------------------------------------------


def draw(table: gear.Table) -> None:
    dataset = gear.ReplayDataset(table, batch_size=32, windows=gear.Window(20, -10), seed=0)
    dataset.sample()


def fill(table: gear.Table) -> None:
    """Add until something has to go, after the reader that keeps a removed trajectory has gone."""
    table._engine.region.array("readers")[:, READING] = 0
    for number in range(40):
        table.add(rows(number, 11))


def ends(table: gear.Table) -> None:
    table._engine.reader().begin_ends(4, newest=True)


ALL = slice(None)
# fmt: off
LATER: list[tuple[Write, Write]] = [
    *((put("block_ids", ALL, value), draw) for value in (10**6, -1)),
    *((put("extent", (ALL, 1), value), draw) for value in (2**40, -(2**40))),
    (put("touched", ALL, 10**6), draw),
    *((write, lambda table: table[0]) for write in (put("block_ids", ALL, 10**6), put("extent", (0, 0), 2**50))),
    (put("links", ALL, 10**6), lambda table: table.remove(0)),
    *((write, fill) for write in (
        put("links", ALL, 1), put("free_slots", ALL, 10**6), put("free_slots", ALL, 0), put("free_blocks", ALL, -3),
        put("free_blocks", ALL, 0), put("retired", ALL, 10**6), put("block_ids", ALL, 2**30),
        put("extent", (ALL, 0), 2**50), put("counters", at.HALF, 5), put("counters", at.OLDEST, 2**40),
        put("counters", at.NEWEST, 2**40), put("counters", at.NUM_FREE_BLOCKS, 2**40),
        put("counters", at.NUM_FREE_SLOTS, -5),
    )),
    *((write, ends) for write in (put("links", ALL, 10**6), put("counters", at.NUM_READY, -3))),
]
# fmt: on


@pytest.mark.parametrize(("write", "use"), LATER)
def test_what_becomes_wrong_later_is_refused_where_it_would_be_followed(write: Write, use: Write) -> None:
    with named(**SIZES, on_full="evict_oldest", timeout=0.1) as table:
        for number in range(5):
            table.add(rows(number, 4 + number), priority=1.0)
        with gear.Table.attach(table.name or "", timeout=0.1) as other:
            table._engine.reader().snapshot()
            kept = table._engine.reader().begin_read()
            table.remove(4)
            write(other)
            with pytest.raises(CorruptTableError, match=f"Table '{table.name}' has a corrupt index: "):
                use(table)
            table._engine.region.array("readers")[:, READING] = 0
            del kept


def test_a_gather_of_wrong_blocks_fills_with_zeros_and_says_how_many() -> None:
    columns = np.zeros((1, WIDTH), dtype=np.int64)
    blocks, out = np.ones((3, 128), dtype=np.uint8), np.full((4, 6), 7, dtype=np.uint8)
    columns[0, :5] = blocks.ctypes.data, 128, 1, out.ctypes.data, 6
    columns[0, BLOCKS], columns[0, STEP_STRIDE] = 3, 1
    extent = np.array([[6, 0, 0], [6, 5, 0], [6, 2, 0], [6, 0, 0]], dtype=np.int64)
    ids = np.array([0, 2, 1, 3, -1, 0], dtype=np.int32)  # one of slot 1 is missing, one of slot 2 too large
    slots = np.array([0, 1, 2, 4], dtype=np.int64)
    assert gathering.gather(columns, slots, np.zeros(4, dtype=np.int64), extent, ids, 4, 0, 4, None) == 3
    assert out.tolist() == [[1] * 6, [1] * 4 + [0] * 2, [1] * 4 + [0] * 2, [0] * 6]


@pytest.mark.parametrize("value", [10**6, -1])
def test_no_step_is_added_to_a_wrong_block(value: int) -> None:
    with gear.Table.create(COLUMNS, **SIZES) as table:
        writer = table.writer(commit_every_step=True)
        writer.append(rows(0, 3))
        table._engine.region.array("block_ids")[:] = value
        with pytest.raises(CorruptTableError):
            writer.append(rows(0, 3))


def test_operations_refuse_alike_compiled_or_not() -> None:
    for compiled in (True, False):
        with gear.Table.create(COLUMNS, **SIZES, on_full="evict_oldest") as table:
            fill(table)
            if not compiled:
                table._engine.index.arrays.operate(compiled=False)
            table._engine.region.array("links")[:] = 10**6
            with pytest.raises(CorruptTableError, match="The private table has a corrupt index: "):
                fill(table)
            fill(table)  # what was derived has been derived again
            table.check_valid()
            assert table._engine.region.array("counters")[at.EPOCH] > 0


def test_attach_to_a_table_of_another_user(table: gear.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{fresh_name()}.foreign"
    path = Path(region_path(name))
    path.write_bytes(Path(region_path(table.name or "")).read_bytes())
    try:
        path.chmod(0o600)
        gear.Table.attach(name).close()
        user = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: user + 1)
            message = rf"Table '{name}' .*belongs to user {user}, .* as user {user + 1}; expected a table"
            with pytest.raises(RegionError, match=message):
                gear.Table.attach(name)
        for mode in (0o620, 0o602, 0o666):
            path.chmod(mode)
            with pytest.raises(
                RegionError, match=f"has mode 0o{mode:o}, so that other users may write to it"
            ):
                gear.Table.attach(name)
        path.chmod(0o644)
        with gear.Table.attach(name) as other:
            assert len(other) == 5
        if user == 0:  # only root can give a file away, and it attaches to none of another user
            os.chown(path, 54321, 54321)
            with pytest.raises(RegionError, match="belongs to user 54321, and this process runs as user 0"):
                gear.Table.attach(name)
    finally:
        path.unlink()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("count", "first"), mostly_long([(8, 0), (48, 8), (2444, 56)], (8, 0), sample=2))
def test_wrong_words_of_the_index_end_no_process(count: int, first: int) -> None:
    assert storm(count, first=first) == {}
