"""An index into which something else was written: an error that names the table; no crash, no endless loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from corruption_common import storm
from table_common import COLUMNS, fresh_name, named, numbers_of, rows

import gear_loader as gear
from gear_loader.errors import CorruptTableError, RegionError
from gear_loader.native import copying
from gear_loader.storage import bounds
from gear_loader.storage.counters import (
    COMMITTING,
    DIRTY,
    DRAWING,
    EPOCH,
    HALF,
    HEAD,
    LEAVING,
    LEAVING_COUNT,
    MOVING,
    NEWEST,
    NUM_FREE_BLOCKS,
    NUM_FREE_SLOTS,
    NUM_READY,
    NUM_RETIRED,
    NUM_STEPS,
    OLDEST,
    ORIGIN,
    RETIRED_FIRST,
)
from gear_loader.storage.operations import READING
from gear_loader.storage.region import region_path

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
        table.region.array(array)[place] = value

    return write


# Random words ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wrong_word_of_the_index_ends_no_process() -> None:
    assert storm(40) == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_wrong_words_of_the_index_end_no_process() -> None:
    assert storm(2460, first=40) == {}


# Attaching -------------------------------------------------------------------------------------------

OUT_OF_BOUNDS = {
    "state": put("state", 7, 4),
    "length": put("extent", (1, 0), 101),
    "no steps": put("extent", (1, 0), 0),
    "length beyond the half": put("extent", 1, (50, 40)),
    "place": put("extent", (1, 1), -1),
    "place beyond": put("extent", (1, 1), 2**40),
    "place far beyond": put("extent", (1, 1), 2**62),
    "block": put("block_ids", (0, 3), 10**6),
    "negative block": put("block_ids", (1, 3), -1),
    "link": put("links", (2, 1), 8),
    "free slot": put("free_slots", 0, 8),
    "free block": put("free_blocks", 0, -1),
    "retired": put("retired", 7, 8),
    "touched": put("touched", 7, -2),
    "uses": put("uses", (0, 1), 9),
    "priority": put("priority", 1, np.nan),
    "bound": put("lowest", 0, np.nan),
    **{
        f"counter {place}": put("counters", place, value)
        for place, value in (
            (NUM_READY, 9),
            (NUM_READY, -1),
            (NUM_FREE_SLOTS, 2**40),
            (NUM_FREE_BLOCKS, -1),
            (NUM_RETIRED, 9),
            (NUM_STEPS, 101),
            (OLDEST, 9),
            (NEWEST, -1),
            (RETIRED_FIRST, 8),
            (HALF, 2),
            (HEAD, -1),
            (HEAD + 1, 10**6),
            (MOVING, 3),
            (DRAWING, 9),
            (LEAVING, -1),
            (COMMITTING, 1),
            (ORIGIN, 2**17),
        )
    },
}


@pytest.mark.parametrize("kind", list(OUT_OF_BOUNDS))
def test_attach_refuses_what_is_out_of_bounds(table: gear.Table, kind: str) -> None:
    OUT_OF_BOUNDS[kind](table)
    with pytest.raises(
        CorruptTableError, match=rf"Table '{table.name}' has a corrupt index: .*`gear-loader rm "
    ):
        gear.Table.attach(table.name or "").close()


@pytest.mark.parametrize(
    "write",
    [
        put("extent", (1, 0), 2**50),
        put("extent", (1, 1), 2**62),
        put("extent", (1, 1), 8471207991015467062),
        put("state", 1, 77),
        put("block_ids", (0, 1), 2**30),
        put("counters", DRAWING, 2**40),
        put("counters", LEAVING, 2**40),
        put("counters", MOVING, 9),
        lambda table: [put("counters", LEAVING, 1)(table), put("counters", LEAVING_COUNT, 10**6)(table)],
        lambda table: [put("counters", MOVING, 2)(table), put("moved", 0, 10**6)(table)],
    ],
)
def test_recovery_refuses_what_is_out_of_bounds(table: gear.Table, write: Write) -> None:
    write(table)
    put("counters", DIRTY, 1)(table)
    for _ in range(2):
        with pytest.raises(CorruptTableError, match=f"Table '{table.name}' has a corrupt index"):
            table.add(rows(9, 3))


def test_recovery_makes_again_what_is_derived(table: gear.Table) -> None:
    table.region.array("links")[:] = 10**6
    table.region.array("free_blocks")[:] = -7
    table.region.array("counters")[[OLDEST, NUM_FREE_SLOTS, RETIRED_FIRST]] = 10**9
    put("counters", DIRTY, 1)(table)
    with gear.Table.attach(table.name or "") as other:
        other.add(rows(5, 3))
        other.check_valid()
        assert numbers_of(other) == [0, 1, 2, 3, 4, 5]


def test_attach_to_a_table_in_the_middle_of_a_change_waits_for_its_end(table: gear.Table) -> None:
    index = table.index
    with table.region.lock:
        put("counters", COMMITTING, 1)(table)
        assert bounds.damage(index.arrays) is not None
        put("counters", COMMITTING, 0)(table)
    index.recovery.check_bounds()


# Afterwards ------------------------------------------------------------------------------------------


def draw(table: gear.Table) -> None:
    dataset = gear.ReplayDataset(table, batch_size=32, windows=gear.Window(20, -10), seed=0)
    dataset.sample()


def fill(table: gear.Table) -> None:
    """Add until something has to go, after the reader that keeps a removed trajectory has gone."""
    table.region.array("readers")[:, READING] = 0
    for number in range(40):
        table.add(rows(number, 11))


@pytest.mark.parametrize(
    ("write", "use"),
    [
        (put("block_ids", slice(None), 10**6), draw),
        (put("block_ids", slice(None), -1), draw),
        (put("extent", (slice(None), 1), 2**40), draw),
        (put("extent", (slice(None), 1), -(2**40)), draw),
        (put("block_ids", slice(None), 10**6), lambda table: table[0]),
        (put("extent", (0, 0), 2**50), lambda table: table[0]),
        (put("links", slice(None), 10**6), lambda table: table.remove(0)),
        (put("links", slice(None), 1), fill),
        (put("free_slots", slice(None), 10**6), fill),
        (put("free_slots", slice(None), 0), fill),
        (put("free_blocks", slice(None), -3), fill),
        (put("free_blocks", slice(None), 0), fill),
        (put("retired", slice(None), 10**6), fill),
        (put("block_ids", slice(None), 2**30), fill),
        (put("extent", (slice(None), 0), 2**50), fill),
        (put("counters", HALF, 5), fill),
        (put("counters", OLDEST, 2**40), fill),
        (put("counters", NEWEST, 2**40), fill),
        (put("counters", NUM_FREE_BLOCKS, 2**40), fill),
        (put("counters", NUM_FREE_SLOTS, -5), fill),
        (put("touched", slice(None), 10**6), draw),
        (put("links", slice(None), 10**6), lambda table: table.reader().begin_ends(4, newest=True)),
        (put("counters", NUM_READY, -3), lambda table: table.reader().begin_ends(4, newest=True)),
    ],
)
def test_what_becomes_wrong_later_is_refused_where_it_would_be_followed(write: Write, use: Write) -> None:
    with named(**SIZES, on_full="evict_oldest", timeout=0.1) as table:
        for number in range(5):
            table.add(rows(number, 4 + number), priority=1.0)
        with gear.Table.attach(table.name or "", timeout=0.1) as other:
            table.reader().snapshot()
            table.reader().begin_read()
            table.remove(4)
            write(other)
            with pytest.raises(CorruptTableError, match=f"Table '{table.name}' has a corrupt index: "):
                use(table)
            table.region.array("readers")[:, READING] = 0


def test_a_gather_of_wrong_blocks_fills_with_zeros_and_says_how_many() -> None:
    columns = np.zeros((1, 10), dtype=np.int64)
    blocks, out = np.ones((3, 128), dtype=np.uint8), np.full((4, 6), 7, dtype=np.uint8)
    columns[0, :5] = blocks.ctypes.data, 128, 1, out.ctypes.data, 6
    columns[0, 9] = 3
    extent = np.array([[6, 0], [6, 5], [6, 2], [6, 0]], dtype=np.int64)
    ids = np.array(
        [0, 2, 1, 3, -1, 0], dtype=np.int32
    )  # of slot 1 one is missing, of slot 2 one is too large
    slots = np.array([0, 1, 2, 4], dtype=np.int64)
    bad = copying.gather(columns, slots, np.zeros(4, dtype=np.int64), extent, ids, 4, 0, 4)
    assert bad == 3
    assert out.tolist() == [[1] * 6, [0] * 6, [0] * 6, [0] * 6]


def test_a_private_table_is_named_too() -> None:
    with gear.Table.create(COLUMNS, **SIZES) as table:
        table.add(rows(0, 5))
        table.region.array("block_ids")[:] = 10**6
        with pytest.raises(
            CorruptTableError, match="The private table has a corrupt index: block tables hold"
        ):
            _ = table[0]


@pytest.mark.parametrize("compiled", [True, False])
def test_operations_refuse_alike_compiled_or_not(compiled: bool) -> None:
    with gear.Table.create(COLUMNS, **SIZES, on_full="evict_oldest") as table:
        fill(table)
        if not compiled:
            table.index.arrays.operate(compiled=False)
        table.region.array("links")[:] = 10**6
        with pytest.raises(CorruptTableError, match="corrupt index"):
            fill(table)
        fill(table)  # what was derived has been derived again
        table.check_valid()
        assert table.region.array("counters")[EPOCH] > 0


# Other users -----------------------------------------------------------------------------------------


def test_attach_to_a_table_of_another_user(table: gear.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{fresh_name()}.foreign"
    path = region_path(name)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    try:
        with open(region_path(table.name or ""), "rb") as source, open(path, "wb") as target:
            target.write(source.read())
        gear.Table.attach(name).close()
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(
            RegionError,
            match=rf"Table '{name}' .*belongs to user {user}, .* as user {user + 1}; expected a table",
        ):
            gear.Table.attach(name)
        monkeypatch.undo()
        for mode in (0o620, 0o602, 0o666):
            os.chmod(path, mode)
            with pytest.raises(
                RegionError, match=f"has mode 0o{mode:o}, so that other users may write to it"
            ):
                gear.Table.attach(name)
        os.chmod(path, 0o644)
        with gear.Table.attach(name) as other:
            assert len(other) == 5
    finally:
        os.unlink(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_root_attaches_to_no_table_of_another_user(table: gear.Table) -> None:
    name = f"{fresh_name()}.foreign"
    path = region_path(name)
    with open(region_path(table.name or ""), "rb") as source, open(path, "wb") as target:
        target.write(source.read())
    try:
        os.chmod(path, 0o600)
        os.chown(path, 54321, 54321)
        with pytest.raises(RegionError, match="belongs to user 54321, and this process runs as user 0"):
            gear.Table.attach(name)
    finally:
        os.unlink(path)


def test_tensors_are_what_they_were(table: gear.Table) -> None:
    """A table that is whole is attached and read as before."""
    with gear.Table.attach(table.name or "") as other:
        assert numbers_of(other) == [0, 1, 2, 3, 4]
        assert all(torch.equal(table[i]["check"], other[i]["check"]) for i in range(5))
