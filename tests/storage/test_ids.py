"""Global ids: numbered by their table, brought along, kept by checkpoints; right whatever process dies wherever."""

from __future__ import annotations

import contextlib
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_common import contents, make
from table_common import (
    COLUMNS,
    Died,
    bury,
    in_three_steps,
    mortal,
    named,
    numbers_of,
    rows,
    unchanged,
    write,
)

import gear_loader as gear
from gear_loader.errors import SchemaError, TableFullError
from gear_loader.storage.limiters import SampleToInsertRatio

LARGEST = 2**62 - 1


def ids_of(table: gear.Table) -> list[int]:
    """The ids of all trajectories, oldest first; fails if the index contradicts itself."""
    table.check_valid()
    found = table.ids(table.indices())
    assert found.dtype == np.int64
    return [int(i) for i in found]


@pytest.mark.parametrize("shard", [None, 0, 65535, np.int64(7)])
def test_ids_are_sequence_and_origin(shard: Any) -> None:
    with make() as table:
        assert table.origin is None
        if shard is not None:
            table.set_origin(shard)
        assert table.origin == shard
        table.add(rows(0, 3))
        table.extend([rows(1, 3), rows(2, 4)])
        table.remove(table.indices()[1])
        table.add(rows(3, 3))
        assert ids_of(table) == [n << 16 | (shard or 0) for n in (0, 2, 3)]
        assert table.ids(np.empty(0, dtype=np.int64)).shape == (0,)


def test_setting_an_origin() -> None:
    wrong: list[tuple[Any, str]] = [
        (-1, "shard is -1; expected an integer from 0 to 65535: an id has 16 bits for it."),
        (65536, "shard is 65536; expected an integer from 0 to 65535: an id has 16 bits for it."),
        (True, "shard is True; expected an integer from 0 to 65535:"),
        (1.0, "shard is 1.0; expected an integer from 0 to 65535:"),
        (3, "cannot become shard 3: one of"),
        (3, "would get the id 3, which"),
    ]
    with named() as table:
        table.add(rows(0, 3))
        table.extend_as([rows(1, 3), rows(2, 3)], ids=[0 << 16 | 3, 9 << 16 | 5])
        for shard, message in wrong:
            with unchanged(table), pytest.raises(SchemaError) as caught:
                table.set_origin(shard)
            assert message in str(caught.value)
            assert table.origin is None
        table.set_origin(5)
        table.set_origin(5)
        message = "The table is shard 5 and was to become shard 6; its number is set once, because ids hold it. Use 5"
        with unchanged(table), pytest.raises(SchemaError, match=re.escape(message)):
            table.set_origin(6)
        with gear.Table.attach(str(table.name)) as other:
            assert other.origin == 5
        table.add(rows(3, 3))  # the numbering goes on above the ids of the new origin
        assert ids_of(table) == [5, 3, 9 << 16 | 5, 10 << 16 | 5]
        assert table.stats().num_inserted == 4


@pytest.mark.parametrize(
    ("form", "stacked"),
    [("list", False), ("int64", True), ("uint64", False), ("int32", True), ("tensor", False)],
)
def test_trajectories_bring_their_ids(form: str, stacked: bool) -> None:
    given: Any = [77, -1, 5 << 16 | 2] if form != "uint64" else [77, 78, 5 << 16 | 2]
    values = given
    if form == "tensor":
        values = torch.tensor(given)
    elif form != "list":
        values = np.array(given, dtype=form)
    many: Any = [rows(i, 4) for i in range(3)]
    options: dict[str, Any] = {"priority": [0.5, 1.0, 2.0]}
    if stacked:
        many = {name: np.stack([one[name] for one in many]) for name in COLUMNS}
        options["lengths"] = [4, 4, 4]
    with make() as table:
        table.set_origin(1)
        slots = table.extend_as(many, ids=values, **options)
        assert table.ids(slots).tolist() == [1 << 16 | 1 if i == -1 else i for i in given]
        assert numbers_of(table) == [0, 1, 2]
        assert table._engine.reader().arrays.priority[slots].tolist() == [0.5, 1.0, 2.0]
        assert table.extend_as([], ids=[]).tolist() == []


def test_slots_and_streams_after_given_ids() -> None:
    """A slot that is used again forgets its id; what a writer adds is numbered by the table; an id may come back."""
    with make(on_full="evict_oldest") as table:
        table.set_origin(2)
        for number in range(100, 140):
            table.extend_as([rows(number, 1)], ids=[number])
        assert ids_of(table) == list(range(140 - len(table), 140))
        with table.writer(chunk_steps=8, overlap_steps=4) as writer:
            writer.append(rows(7, 60))
        sequences = table._engine.region.array("sequence")[table.indices()]
        assert ids_of(table)[-10:] == [int(n) << 16 | 2 for n in sequences[-10:]]
        last = ids_of(table)[-1]
        table.remove(table.indices())
        table.extend_as([rows(0, 3)], ids=[last])
        table.add(rows(1, 3))
        assert ids_of(table) == [last, last + (2 << 16)]


def test_the_numbering_goes_on_above_ids_of_the_own_origin() -> None:
    """And nothing counts as added that was not."""
    with make(rate_limiter=SampleToInsertRatio(1.0, min_size=1, error_buffer=100)) as table:
        table.set_origin(3)
        table.add(rows(0, 3))
        table.extend_as([rows(1, 3), rows(2, 3), rows(3, 3)], ids=[50 << 16 | 3, 99 << 16 | 4, -1])
        table.add(rows(4, 3))
        own = [i for i in ids_of(table) if i & 0xFFFF == 3]
        assert len(set(own)) == 4
        assert own[0] == 3
        assert min(own[2:]) > 50 << 16
        assert table.stats().num_inserted == 5
    with make() as table:
        table.set_origin(65535)
        table.extend_as([rows(0, 3)], ids=[LARGEST])
        table.add(rows(1, 3))
        assert ids_of(table) == [LARGEST, (2**46 + 1) << 16 | 65535]


@pytest.mark.parametrize("on_full", ["error", "evict_oldest"])
def test_what_is_no_id_changes_nothing(on_full: Any) -> None:
    wrong: list[tuple[Any, str]] = [
        ([-2, 4], f"ids[0] is -2; expected an id, from 0 to {LARGEST}, or -1 for one of the table's own n"),
        ([4, 2**62], f"ids[1] is {2**62}; expected an id, from 0 to {LARGEST}, or -1 for one of the table"),
        (np.array([4, 2**64 - 1], dtype=np.uint64), "ids[1] is 18446744073709551615; expected an id"),
        ([4, 4], "ids[0] and ids[1] are both 4; expected different ids. Store each trajectory once."),
        ([4], "ids has shape [1]; expected [2], one for each trajectory, -1 for a new id."),
        (4, "ids has shape []; expected [2]"),
        ([4.0, 5.0], "ids is [4.0, 5.0]; expected int64 [2], -1 for a new id."),
        (["a", "b"], "ids is ['a', 'b']; expected int64 [2]"),
        (None, "ids is None; expected int64 [2]"),
        ([77, 4], "The id 77 is that of a trajectory that is here already, at index 1; expected one of a "),
        ([2 << 16, 4], "The id 131072 is that of a trajectory that is here already, at index 2; expected"),
    ]
    with make(max_trajectories=4, on_full=on_full) as table:
        table.add(rows(0, 3))
        table.extend_as([rows(1, 3)], ids=[77])
        table.extend([rows(2, 3), rows(3, 3)])
        for ids, message in wrong:
            with unchanged(table), pytest.raises(SchemaError) as caught:
                table.extend_as([rows(8, 3), rows(9, 3)], ids=ids)
            assert message in str(caught.value)
        with unchanged(table), pytest.raises(SchemaError, match="has 401 steps"):
            table.extend_as([rows(1, 401)], ids=[78])
        if on_full == "error":
            with unchanged(table), pytest.raises(TableFullError):
                table.extend_as([rows(1, 3)], ids=[78])
        table.remove(0)
        table.extend_as([rows(1, 3)], ids=[78])
        assert ids_of(table)[-1] == 78


@pytest.mark.parametrize("dead", [False, True])
def test_an_id_that_is_being_written(dead: bool) -> None:
    with make() as table:
        with mortal(table, float("inf"), disguised=dead) as index:
            slots, _ = index.begin(np.array([4]), ids=np.array([77]))
        if not dead:
            message = r"The id 77 is .* being stored by process \d+;"
            with unchanged(table), pytest.raises(SchemaError, match=message):
                table.extend_as([rows(1, 4)], ids=[77])
            index.abort(slots)
        table.extend_as([rows(1, 4)], ids=[77])
        assert (ids_of(table), numbers_of(table)) == ([77], [1])


def test_many_ids_at_once() -> None:
    """As many as the sieve has places, so that each is looked at."""
    generator = np.random.default_rng(0)
    ids = generator.choice(2**40, size=6000, replace=False)
    with gear.Table.create({"x": gear.Column(torch.int64)}, max_steps=7000, max_trajectories=7000) as table:
        many = {"x": np.arange(6000)[:, None]}
        slots = table.extend_as(many, ids=ids, lengths=np.ones(6000, dtype=np.int64))
        assert (table.ids(slots) == ids).all()
        table.check_valid()
        for again in (ids[17], ids[-1]):
            with pytest.raises(SchemaError, match=f"The id {again} is that of a trajectory that is here"):
                table.extend_as([{"x": np.arange(1)}] * 2, ids=[2**41, again])


@pytest.mark.parametrize(("torn", "heir_dies"), [(False, False), (True, True)])
def test_death_at_every_store(torn: bool, heir_dies: bool) -> None:
    """What is visible has its id, and no id comes twice; with and without the death of the process that repairs."""
    seen = set()
    for stores in itertools.count():
        with make(max_trajectories=5, on_full="evict_oldest") as table:
            table.set_origin(3)
            table.extend_as([rows(1, 4), rows(2, 7)], ids=[77, -1])
            in_three_steps(table)
            died = False
            try:
                with mortal(table, stores, torn=torn) as other:
                    ids = np.array([40 << 16 | 3, 88])
                    slots, blocks = other.begin(np.array([4, 9]), ids=ids)
                    write(table, blocks[:1], 50, 4)
                    write(table, blocks[1:], 51, 9)
                    other.commit(slots, np.ones(2, dtype=np.float32))
            except Died:
                died = True
            if heir_dies and died:
                with contextlib.suppress(Died), mortal(table, stores % 11, torn=torn) as heir:
                    heir.reader.snapshot()
            bury(table)
            found = dict(zip(numbers_of(table), ids_of(table), strict=True))
            assert found in ({1: 77, 2: 1 << 16 | 3}, {1: 77, 2: 1 << 16 | 3, 50: 40 << 16 | 3, 51: 88})
            assert table.stats().num_inserted in (2, 4)
            seen.add(len(found))
            table.extend_as([rows(60, 4)], ids=[99])
            table.add(rows(61, 4))
            after = ids_of(table)
            assert len(set(after)) == len(after)
            assert after[-2] == 99
            assert after[-1] >> 16 >= (41 if 50 in found else 2)
            assert table.stats().num_inserted == len(found) + 2
            if not died:
                break
    assert seen == {2, 4}
    assert stores > 30


def test_death_while_an_origin_is_set() -> None:
    for stores in itertools.count():
        with make() as table:
            table.extend_as([rows(0, 3), rows(1, 3)], ids=[-1, 70 << 16 | 3])
            died = False
            try:
                with mortal(table, stores) as other:
                    other.set_origin(3)
            except Died:
                died = True
            table.check_valid()
            assert table.origin in (None, 3)
            assert table.stats().num_inserted == 2
            table.set_origin(3)
            table.add(rows(2, 3))
            assert ids_of(table) == [3, 70 << 16 | 3, 71 << 16 | 3]
            if not died:
                break
    assert stores > 5


def _everything(table: gear.Table) -> dict[str, Any]:
    return {**contents(table), "ids": ids_of(table), "origin": table.origin}


@pytest.mark.parametrize("shard", [None, 9])
def test_checkpoints_keep_ids(tmp_path: Path, shard: int | None) -> None:
    with make() as table:
        table.add(rows(0, 5))
        table.save(tmp_path)
        if shard is not None:
            table.set_origin(shard)
        table.extend_as([rows(1, 6), rows(2, 7), rows(3, 8)], ids=[77, -1, 30 << 16 | (shard or 0)])
        table.remove(0)
        table.save(tmp_path)
        saved = _everything(table)
    with gear.Table.load(tmp_path) as copy:
        assert _everything(copy) == saved
        copy.add(rows(9, 3))
        assert ids_of(copy)[-1] == saved["next_sequence"] << 16 | (shard or 0)
        with pytest.raises(SchemaError, match="The id 77 is that of a trajectory that is here already"):
            copy.extend_as([rows(10, 3)], ids=[77])
        copy.save(tmp_path)
        saved = _everything(copy)
    with gear.Table.load(tmp_path) as again:
        assert _everything(again) == saved
