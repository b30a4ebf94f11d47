"""Trajectories written step by step: what they hold, what is refused, what a full table does, and chunks."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from table_common import (
    COLUMNS,
    DTYPES,
    bits,
    bury,
    named,
    number_of,
    numbers_of,
    random_values,
    rows,
    state,
    unchanged,
)

import gear_loader as gear
from gear_loader.errors import (
    GearError,
    LockTimeoutError,
    RateLimitError,
    SchemaError,
    TableClosedError,
    TableFullError,
)
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations import FREE, WRITING
from gear_loader.utils.waiting import Backoff

SCALAR = {"x": gear.Column(torch.int64)}


@pytest.fixture(autouse=True, params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled operations, and with the same in Python."""
    if request.param == "python":
        operate = IndexArrays.operate
    monkeypatch.setattr(IndexArrays, "operate", lambda index, **_: operate(index, compiled=False))
    return str(request.param)


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with gear.Table.create(COLUMNS, max_steps=200, max_trajectories=16, block_steps=4) as table:
        yield table
        table.check_valid()


def make(**options: Any) -> gear.Table:
    sizes: dict[str, Any] = {"max_steps": 40, "max_trajectories": 8, "block_steps": 4, "timeout": 0.05}
    return gear.Table.create(SCALAR, **{**sizes, **options})


def write(writer: gear.Writer, number: int, length: int) -> None:
    """The trajectory `number` of `rows`, a step at a time; it is not committed."""
    trajectory = rows(number, length)
    for i in range(length):
        writer.append({name: values[i] for name, values in trajectory.items()})


def count(writer: gear.Writer, first: int, last: int) -> None:
    """Append the numbers from `first` up to but not including `last`, to a table of `SCALAR`."""
    for number in range(first, last):
        writer.append(x=number)


def contents(table: gear.Table) -> list[list[int]]:
    """All trajectories of a table of `SCALAR`, oldest first."""
    table.check_valid()
    return [table[int(index)]["x"].tolist() for index in table.indices()]


def nothing_left(table: gear.Table) -> None:
    """Fails unless every slot and every block that no trajectory has is free."""
    table.check_valid()
    assert not (table.region.array("state") == WRITING).any()
    table.remove(table.indices())
    table.check_valid()
    assert table.stats().blocks_in_use == 0
    assert (table.region.array("state") == FREE).all()


# Contents --------------------------------------------------------------------------------------------


def _step(value: torch.Tensor, i: int, kind: str) -> Any:
    if kind == "tensor":
        return value[i]
    if kind == "numpy":
        return value.numpy()[i, ...] if value.ndim > 1 else np.array(value.numpy()[i])
    if kind == "generic":
        return value.numpy()[i]
    if kind == "python":
        return value[i].item()
    strided = torch.empty((*value.shape[1:], 2), dtype=value.dtype)  # "views"
    strided[..., 0] = value[i]
    return strided[..., 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = ["tensor", "views", "several"]
    if dtype is not torch.bfloat16:
        kinds += ["numpy", "several arrays"]
        kinds += ["generic"] if shape == () and not dtype.is_floating_point else []
    kinds += ["python"] if shape == () and not dtype.is_floating_point else []
    with gear.Table.create(
        {"x": gear.Column(dtype, shape)}, max_steps=300, max_trajectories=20, block_steps=7
    ) as table:
        kept = {}
        writer = table.writer()
        for i, kind in enumerate(kinds):
            values = random_values(dtype, (9 + i, *shape), generator)
            if kind.startswith("several"):
                given: Any = values.numpy() if kind == "several arrays" else values
                for begin, end in [(0, 1), (1, 4), (4, 9 + i)]:
                    assert writer.append(x=given[begin:end]) == ()
            else:
                for j in range(len(values)):
                    assert writer.append(x=_step(values, j, kind)) == ()
                    assert writer.num_steps == j + 1
            kept[writer.commit()] = values
        for index, values in kept.items():
            found = table[index]["x"]
            assert (found.dtype, found.shape) == (dtype, values.shape)
            assert bits(found) == bits(values)
        nothing_left(table)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_numbers_for_a_column_of_floats(dtype: torch.dtype) -> None:
    given = [
        1,
        0.5,
        -3,
        np.float32(0.25),
        np.float64(2),
        np.float16(7),
        np.int64(5),
        float("inf"),
        -0.0,
        1e-3,
    ]
    with gear.Table.create({"x": gear.Column(dtype)}, max_steps=30, max_trajectories=3) as table:
        with table.writer() as writer:
            for value in given:
                writer.append(x=value)
            writer.append({"x": float("nan")})
        expected = torch.tensor([float(value) for value in given], dtype=torch.float64).to(dtype)
        found = table[0]["x"]
        assert bits(found[:-1]) == bits(expected)
        assert found[-1].isnan()


def test_one_way_to_write_is_as_good_as_another() -> None:
    """One step at a time, several, both mixed, and `Table.add` leave tables that show the same."""
    lengths = [1, 3, 4, 5, 8, 17, 64]

    def add(table: gear.Table, number: int, length: int) -> None:
        table.add(rows(number, length), priority=number)

    def single(table: gear.Table, number: int, length: int) -> None:
        with table.writer() as writer:
            write(writer, number, length)
            writer.priority = number

    def several(table: gear.Table, number: int, length: int) -> None:
        writer = table.writer()
        writer.append(rows(number, length))
        writer.commit(priority=number)

    def mixed(table: gear.Table, number: int, length: int) -> None:
        writer, trajectory, place = table.writer(), rows(number, length), 0
        for size in [1, 2, 1, 5, 0, 1, 1, 3, 4, 40, 60]:
            size = min(size, length - place)
            if size == 1:
                writer.append({name: values[place] for name, values in trajectory.items()})
            elif size:
                writer.append(
                    {name: values[place : place + size] for name, values in reversed(trajectory.items())}
                )
            place += size
        writer.commit(priority=torch.tensor(float(number)))

    shown = []
    for how in (add, single, several, mixed):
        with gear.Table.create(COLUMNS, max_steps=200, max_trajectories=10, block_steps=4) as table:
            for number, length in enumerate(lengths):
                how(table, number, length)
                table.check_valid()
            assert numbers_of(table) == list(range(7))
            found = state(table)
            del found["stats"]
            shown.append((found, table.stats().blocks_in_use, table.stats().num_inserted))
    assert shown[1:] == shown[:1] * 3


def test_awkward_values(table: gear.Table) -> None:
    trajectory = rows(7, 6)
    writer = table.writer()
    wide = np.repeat(trajectory["value"], 2, axis=1)
    steps: list[Any] = [
        {name: values[0] for name, values in trajectory.items()},
        {
            name: torch.from_numpy(values)[1].requires_grad_(name == "value")
            for name, values in trajectory.items()
        },
        {
            **{name: int(values[2]) for name, values in trajectory.items() if name != "value"},
            "value": wide[2, ::2],
        },
        {name: np.array(values[3]).view(np.ndarray) for name, values in trajectory.items()},
        {name: np.asarray(values[4]).view(_Subclass) for name, values in trajectory.items()},
        {name: values[5:] for name, values in trajectory.items()},
    ]
    for i, step in enumerate(steps):
        writer.append(**step) if i % 2 else writer.append(dict(reversed(step.items())))
    writer.append(dict.fromkeys(trajectory, 3) | {"value": np.zeros(3, np.float32)})
    assert writer.num_steps == 7
    writer.discard()
    for step in steps:
        writer.append(step)
    assert number_of(table[writer.commit()]) == 7


class _Subclass(np.ndarray[Any, Any]):
    """As a memory map is."""


def test_what_was_appended_is_a_copy(table: gear.Table) -> None:
    trajectory = rows(1, 9)
    writer = table.writer()
    writer.append(trajectory)
    step = {name: values[0].copy() for name, values in trajectory.items()}
    for values in trajectory.values():
        values[:] = 0
    writer.commit()
    assert numbers_of(table) == [1]
    writer.append(step)
    step["value"][:] = 0
    writer.commit()
    assert table[1]["value"].any()


# What is refused -------------------------------------------------------------------------------------


def _step_with(**changes: Any) -> dict[str, Any]:
    step = {name: values[4] for name, values in rows(9, 9).items()}
    return {name: value for name, value in {**step, **changes}.items() if value is not ...}


_MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        _step_with(value=np.zeros(3)),
        r"'value' of the step has dtype float64 and shape \[3\]; expected an",
    ),
    "torch dtype": (
        _step_with(number=torch.tensor(1.0)),
        r"'number' of the step has dtype torch.float32 and sh",
    ),
    "shape": (
        _step_with(value=np.zeros(4, np.float32)),
        r"has dtype float32 and shape \[4\]; expected .* \[3\]",
    ),
    "transposed": (
        _step_with(value=np.zeros((1, 1, 3), np.float32)),
        r"has dtype float32 and shape \[1, 1, 3\]",
    ),
    "missing": (_step_with(check=...), r"the step has the columns .*; missing: \['check'\], unknown: \[\]"),
    "unknown": (_step_with(more=1), r"missing: \[\], unknown: \['more'\]"),
    "another name": (_step_with(check=..., chek=1), r"missing: \['check'\], unknown: \['chek'\]"),
    "nothing": (
        {},
        r"the step has the columns \[\]; missing: \['number', 'step', 'length', 'value', 'check'\]",
    ),
    "a list": (_step_with(value=[1.0, 2.0, 3.0]), r"is \[1.0, 2.0, 3.0\], of type list"),
    "none": (_step_with(step=None), r"'step' of the step is None, of type NoneType"),
    "a float": (_step_with(number=1.0), r"'number' of the step is 1.0, of type float"),
    "a numpy float": (_step_with(number=np.float32(1)), r"of type float32"),
    "a bool": (_step_with(number=True), r"'number' of the step is True, of type bool"),
    "a large number": (_step_with(step=2**31), r"'step' of the step is 2147483648, of type int"),
    "a complex number": (_step_with(step=1j), r"'step' of the step is 1j, of type complex"),
    "a number for a shape": (_step_with(value=1.0), r"'value' of the step is 1.0, of type float"),
    "text": (_step_with(step="1"), r"'step' of the step is '1', of type str"),
    "sparse": (
        _step_with(value=torch.zeros(3).to_sparse()),
        r"'value' of the step is a tensor of layout torch",
    ),
    "meta": (
        _step_with(value=torch.zeros(3, device="meta")),
        r"'value' of the step is a meta tensor; expected",
    ),
    "masked": (_step_with(value=np.ma.zeros(3, np.float32)), r"'value' of the step has dtype float32"),
    "byte order": (_step_with(value=np.zeros(3, ">f4")), r"'value' of the step has dtype >f4"),
    "one of several": (
        {**rows(9, 3), "step": np.int32(4)},
        r"'number' of the step has dtype int64 and shape \[3\]",
    ),
    "several of one": (
        _step_with(step=np.zeros(3, np.int32)),
        r"'step' of the step has dtype int32 and shape \[3\]",
    ),
    "lengths": ({**rows(9, 3), "step": np.zeros(4, np.int32)}, r"3|4"),
    "several, dtype": ({**rows(9, 3), "step": np.zeros(3, np.int64)}, r"'step' of the steps"),
    "no steps": (rows(9, 0), r"at least (1|one)|T >= 1"),
}


@pytest.mark.parametrize("misfit", _MISFITS)
def test_what_does_not_fit_is_refused_and_the_writer_goes_on(table: gear.Table, misfit: str) -> None:
    step, message = _MISFITS[misfit]
    before = (0, 1, 4, 7)[list(_MISFITS).index(misfit) % 4]  # steps appended before it
    writer = table.writer()
    write(writer, 5, before)
    stats, stored = table.stats(), table.stats().blocks_in_use
    for _ in range(2):
        with pytest.raises(SchemaError, match=message) as caught:
            writer.append(step)
        assert "{" not in re.sub(r"\{'.*?\}", "", str(caught.value))
        assert writer.num_steps == before
        assert table.stats() == stats
    trajectory = rows(5, 10)
    for i in range(before, 10):
        writer.append({name: values[i] for name, values in trajectory.items()})
    writer.discard()
    write(writer, 6, 10)
    writer.commit()
    assert numbers_of(table) == [6]
    assert stored == -(-before // 4)
    nothing_left(table)


def test_what_does_not_fit_evicts_nothing() -> None:
    """A refused step changes nothing, although the table is full and would give way to a good one."""
    with make(on_full="evict_oldest", max_steps=8) as table:
        table.extend([{"x": np.arange(4)}, {"x": np.arange(4)}])
        writer = table.writer()
        with unchanged(table):
            for bad in (1.5, np.zeros((2, 2), np.int64), np.zeros(2), None):
                with pytest.raises(SchemaError):
                    writer.append(x=bad)
        writer.append(x=1)
        assert len(table) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_numbers_too_large_for_a_float(dtype: torch.dtype) -> None:
    with gear.Table.create({"x": gear.Column(dtype)}, max_steps=5, max_trajectories=1) as table:
        writer = table.writer()
        for value in (10**400, -(10**400)) if dtype is torch.float64 else (10**400, 1e300, -1e39):
            with pytest.raises(SchemaError, match="'x' of the step is "):
                writer.append(x=value)
        writer.append(x=torch.finfo(dtype).max)
        writer.append(x=-torch.finfo(dtype).max)
        writer.commit()
        assert table[0]["x"].tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max]


def test_a_trajectory_that_becomes_too_long() -> None:
    with make(max_steps=10) as table:
        writer = table.writer()
        message = (
            r"^The trajectory would have 11 steps; this table holds at most 10\. Commit earlier, cut it "
        )
        with pytest.raises(SchemaError, match=message):
            writer.append(x=np.arange(11))
        assert (writer.num_steps, table.stats().blocks_in_use) == (0, 0)
        count(writer, 0, 10)
        with pytest.raises(SchemaError, match=message):
            writer.append(x=10)
        with pytest.raises(SchemaError, match="would have 12 steps"):
            writer.append(x=np.arange(2))
        writer.commit()
        assert contents(table) == [list(range(10))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_steps": 0}, "chunk_steps is 0; expected an integer of at least 1"),
        ({"chunk_steps": 2.0}, "chunk_steps is 2.0; expected an integer"),
        ({"chunk_steps": True}, "chunk_steps is True; expected an integer"),
        (
            {"chunk_steps": 41},
            "chunk_steps is 41 and overlap_steps 0; expected overlap_steps < chunk_steps <= 40, the",
        ),
        (
            {"chunk_steps": 4, "overlap_steps": 4},
            "chunk_steps is 4 and overlap_steps 4; expected overlap_steps <",
        ),
        ({"chunk_steps": 4, "overlap_steps": -1}, "overlap_steps is -1; expected an integer of at least 0"),
        ({"overlap_steps": 2}, "overlap_steps is 2 without chunk_steps; give both"),
        (
            {"chunk_steps": 30, "overlap_steps": 11},
            "expected that a chunk and the overlap fit into the table together",
        ),
        (
            {"chunk_steps": 28, "overlap_steps": 20},
            "which holds at most 8 trajectories, 40 steps and 16 blocks of 4",
        ),
    ],
)
def test_sizes_of_chunks_that_make_no_sense(options: Any, message: str) -> None:
    with make() as table, pytest.raises(SchemaError, match=re.escape(message)):
        table.writer(**options)
    with make(max_trajectories=1) as table, pytest.raises(SchemaError, match="at most 1 trajectories"):
        table.writer(chunk_steps=4, overlap_steps=1)


# Commit and discard ----------------------------------------------------------------------------------


def test_commit_without_steps(table: gear.Table) -> None:
    writer = table.writer()
    message = "^Nothing has been appended since the last commit; append at least one step.$"
    for _ in range(2):
        with pytest.raises(SchemaError, match=message):
            writer.commit()
        write(writer, 1, 3)
        writer.commit()
    writer.discard()
    with pytest.raises(SchemaError, match=message):
        writer.commit()
    assert numbers_of(table) == [1, 1]


@pytest.mark.parametrize(
    "bad", [-1, float("nan"), float("inf"), 1e39, "1", [1.0, 2.0], [[1], [1, 2]], object(), 1j]
)
def test_a_priority_that_does_not_fit_leaves_what_was_appended(table: gear.Table, bad: Any) -> None:
    writer = table.writer()
    write(writer, 3, 6)
    with pytest.raises(SchemaError, match=r"^priority is .*; expected a "):
        writer.commit(priority=bad)
    assert writer.num_steps == 6
    assert len(table) == 0
    writer.commit(priority=2.5)
    assert numbers_of(table) == [3]
    assert table.reader().arrays.priority[0] == 2.5
    write(writer, 4, 2)
    writer.commit()
    assert table.reader().arrays.priority[1] == -1


def test_a_chunk_whose_priority_does_not_fit() -> None:
    with make() as table:
        writer = table.writer(chunk_steps=4, overlap_steps=2)
        count(writer, 0, 3)
        writer.priority = -1.0
        for _ in range(2):
            with pytest.raises(SchemaError, match=r"^priority is -1.0; expected"):
                writer.append(x=3)
            assert (writer.num_steps, len(table)) == (3, 0)
        writer.priority = 2.0
        assert writer.append(x=3) == (0,)
        assert table.reader().arrays.priority[0] == 2.0
        with pytest.raises(SchemaError, match=r"^priority is 'x'; expected"):
            writer.commit(priority="x")  # type: ignore[arg-type]
        assert writer.num_steps == 2
        assert writer.commit() == 0
        assert contents(table) == [[0, 1, 2, 3]]
        nothing_left(table)


def test_discard(table: gear.Table) -> None:
    writer = table.writer()
    writer.discard()
    for length in (1, 4, 5, 60, 200):
        write(writer, 1, length)
        assert table.stats().num_writing == 1
        writer.discard()
        assert writer.num_steps == 0
        assert table.stats().blocks_in_use == 0
        table.check_valid()
    write(writer, 2, 200)
    writer.commit()
    assert numbers_of(table) == [2]
    writer.close()
    writer.close()
    assert numbers_of(table) == [2]


def test_the_context_manager_commits_at_a_clean_end(table: gear.Table) -> None:
    with table.writer() as writer:
        write(writer, 1, 3)
        writer.commit(1.5)
        writer.priority = 4.0
        write(writer, 2, 5)
    assert numbers_of(table) == [1, 2]
    assert table.reader().arrays.priority[:2].tolist() == [1.5, 4.0]
    with table.writer():
        pass
    with table.writer() as writer:
        write(writer, 3, 3)
        writer.commit()
    assert numbers_of(table) == [1, 2, 3]
    assert table.stats().num_writing == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_context_manager_discards_after_an_exception(
    table: gear.Table, error: type[BaseException]
) -> None:
    with pytest.raises(error), table.writer() as writer:  # noqa: PT012 - the block is what is tested
        write(writer, 1, 3)
        writer.commit()
        write(writer, 2, 9)
        raise error
    assert numbers_of(table) == [1]
    nothing_left(table)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("what", ["finish", "roll"])
def test_interrupted_while_it_commits(what: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed or dropped; in no case is what has been committed written to, or committed again."""
    with make() as table:
        writer = table.writer(chunk_steps=8, overlap_steps=4 if what == "roll" else 0)
        count(writer, 0, 7)
        genuine = getattr(table.index, what)

        def interrupted(*args: Any, **options: Any) -> None:
            if moment == "after":
                genuine(*args, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(table.index, what, interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.append(x=7)
        monkeypatch.undo()
        assert contents(table) == ([list(range(8))] if moment == "after" else [])
        assert writer.num_steps == 0
        count(writer, 10, 18)
        assert contents(table)[-1] == list(range(10, 18))


# Full tables -----------------------------------------------------------------------------------------


def test_full_and_nothing_gives_way() -> None:
    """What was appended is still there, and can be committed, or go on when there is room."""
    for going_on in (False, True):
        with make(max_steps=20) as table:
            table.add({"x": np.arange(13)})
            writer = table.writer()
            count(writer, 0, 7)
            for bad in (7, np.arange(7, 9)):
                with pytest.raises(TableFullError, match=r"^The table is full: 0 trajectories of [12] steps"):
                    writer.append(x=bad)
                assert writer.num_steps == 7
                table.check_valid()
            if going_on:
                table.remove(0)
                count(writer, 7, 20)
            writer.commit()
            assert contents(table)[-1] == list(range(20 if going_on else 7))
            nothing_left(table)


def test_no_slot_is_left() -> None:
    with make(max_trajectories=2) as table:
        writers = [table.writer() for _ in range(3)]
        writers[0].append(x=1)
        writers[1].append(x=2)
        with pytest.raises(TableFullError, match="1 trajectories of 4 steps"):
            writers[2].append(x=3)
        writers[0].discard()
        writers[2].append(x=3)
        writers[2].commit()
        writers[1].commit()
        assert contents(table) == [[3], [2]]


def test_the_last_steps_are_enough() -> None:
    """A table with less than a block left: a writer takes what there is."""
    with make(max_steps=9, block_steps=8) as table:
        table.add({"x": np.arange(6)})
        writer = table.writer()
        count(writer, 0, 3)
        with pytest.raises(TableFullError):
            writer.append(x=3)
        writer.commit()
        assert contents(table) == [list(range(6)), [0, 1, 2]]


@pytest.mark.parametrize("on_full", ["evict_oldest", "evict_lowest_priority"])
def test_evicting_for_a_trajectory_that_grows(on_full: Any) -> None:
    with make(max_steps=20, on_full=on_full) as table:
        for number, priority in enumerate([3.0, 1.0, 2.0, 0.5]):
            table.add({"x": np.full(5, number)}, priority=priority)
        order = {"evict_oldest": [0, 1, 2, 3], "evict_lowest_priority": [3, 1, 2, 0]}[on_full]
        writer, gone = table.writer(), []
        left = [0, 1, 2, 3]
        for i in range(20):
            writer.append(x=100 + i)
            now = [trajectory[0] for trajectory in contents(table)]
            gone += [number for number in left if number not in now]
            left = now
            # Never more than the blocks, or the whole blocks of steps, that are needed.
            assert len(gone) <= -(-(-(-(i + 1) // 4) * 4) // 5)
        assert gone == order
        with pytest.raises(SchemaError, match="would have 21 steps"):
            writer.append(x=0)
        writer.commit()
        assert contents(table) == [list(range(100, 120))]
        assert table.stats().num_evicted == 4


def test_evicting_does_not_wait_for_more_than_is_needed() -> None:
    """Others are writing; what is left is less than a block, but enough for a step."""
    with make(max_steps=11, block_steps=4, on_full="evict_oldest", timeout=120) as table:
        writers = [table.writer() for _ in range(3)]
        began = time.monotonic()
        for i in range(3):
            for writer in writers:
                writer.append(x=i)
        assert time.monotonic() - began < 60  # or the deadline passes
        for writer in writers:
            writer.commit()
        assert contents(table) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("on_full", ["evict_oldest", "evict_lowest_priority"])
def test_evicting_where_others_are_writing(on_full: Any) -> None:
    with make(max_steps=20, on_full=on_full) as table:
        first, second = table.writer(), table.writer()
        first.append(x=np.arange(14))
        second.append(x=np.arange(6))
        began = time.monotonic()
        with pytest.raises(
            TableFullError, match=rf"hold room: 2 of this process \({os.getpid()}\) with 20 steps"
        ):
            second.append(x=6)
        assert (
            time.monotonic() - began < 30
        )  # nobody but this thread could give room, so it was not waited for
        assert second.num_steps == 6
        first.commit()
        second.append(x=6)
        second.commit()
        assert contents(table) == [list(range(7))]


@pytest.mark.parametrize("on_full", ["evict_oldest", "evict_lowest_priority", "wait"])
@pytest.mark.parametrize("how", ["append", "add", "extend"])
def test_all_room_is_held_by_writers_of_this_thread(on_full: Any, how: str) -> None:
    """It is said at once: nobody else can end them."""
    with make(max_steps=32, max_trajectories=8, block_steps=4, on_full=on_full) as table:
        writers = [table.writer() for _ in range(8)]
        for writer in writers:
            writer.append(x=np.arange(4))
        began = time.monotonic()
        message = rf"open writers hold room: 8 of this process \({os.getpid()}\) with 32 steps\. commit\(\) or discard"
        store: dict[str, Any] = {
            "append": lambda: writers[3].append(x=1),
            "add": lambda: table.add({"x": np.arange(2)}),
            "extend": lambda: table.extend([{"x": np.arange(2)}]),
        }
        with pytest.raises(TableFullError, match=message):
            store[how]()
        assert time.monotonic() - began < 30  # the deadline is 60 s
        assert writers[3].num_steps == 4
        writers[0].discard()
        writers[3].append(x=4)
        for writer in writers[1:]:
            writer.commit()
        assert sorted(map(len, contents(table))) == [4] * 6 + [5]


def test_room_that_writers_of_several_threads_hold_is_waited_for() -> None:
    with make(max_steps=8, max_trajectories=8, block_steps=4, on_full="evict_oldest", timeout=30) as table:
        mine, other = table.writer(), table.writer()
        mine.append(x=np.arange(4))
        wrote, give = threading.Event(), threading.Event()

        def work() -> None:
            other.append(x=np.arange(4))
            wrote.set()
            give.wait(30)
            other.commit()

        thread = threading.Thread(target=work)
        thread.start()
        wrote.wait(30)
        table.index.admission.timeout = 0.05
        with pytest.raises(
            LockTimeoutError, match=r"hold room: 2 of this process \(\d+\) with 8 steps\. commit"
        ):
            mine.append(x=4)
        table.index.admission.timeout = 30
        threading.Timer(0.05, give.set).start()
        mine.append(x=4)
        thread.join()
        mine.commit()
        assert contents(table) == [list(range(5))]


def test_waiting_for_room_that_another_thread_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, waits = Backoff.sleep, threading.Event()

    def said(patience: Backoff) -> bool:
        waits.set()
        return sleep(patience)

    monkeypatch.setattr(Backoff, "sleep", said)
    with make(max_steps=20, on_full="wait", timeout=120) as table:
        table.add({"x": np.arange(18)})
        writer = table.writer()
        count(writer, 0, 2)
        other = threading.Thread(target=lambda: waits.wait(60) and table.remove(0))
        other.start()
        count(writer, 2, 20)
        other.join()
        writer.commit()
        assert contents(table) == [list(range(20))]
        assert table.stats().insert_wait > 0


def test_waiting_for_room_in_vain() -> None:
    with make(max_steps=20, on_full="wait", timeout=0.05) as table:
        table.add({"x": np.arange(18)})
        writer = table.writer()
        count(writer, 0, 2)
        began = time.monotonic()
        for value in (2, np.arange(2, 4)):
            with pytest.raises(TableFullError, match=r"^Waited 0.05 s in vain. The table is full"):
                writer.append(x=value)
        assert 0.1 <= time.monotonic() - began < 60
        writer.commit()
        with pytest.raises(TableFullError, match=r"^Waited 0.05 s in vain"):
            writer.append(x=1)
        assert writer.num_steps == 0
        table.remove(0)
        count(writer, 0, 18)
        writer.commit()
        assert contents(table) == [[0, 1], list(range(18))]


def test_the_policy_of_the_handle_counts() -> None:
    with named(max_steps=8, max_trajectories=4) as table:
        table.extend([rows(1, 4), rows(2, 4)])
        with pytest.raises(TableFullError):
            write(table.writer(), 3, 1)
        with gear.Table.attach(str(table.name), on_full="evict_oldest") as other, other.writer() as writer:
            write(writer, 3, 4)
        assert numbers_of(table) == [2, 3]


def test_the_rate_limiter_is_asked() -> None:
    limiter = gear.SampleToInsertRatio(1.0, min_size=1, error_buffer=1.0)
    with make(rate_limiter=limiter) as table:
        writer = table.writer()
        committed = 0
        with contextlib.suppress(RateLimitError):
            while committed < 6:
                writer.append(x=committed)
                writer.commit()
                committed += 1
        assert 0 < committed < 6
        assert writer.num_steps == 1
        ticket, _ = table.reader().begin_snapshot(samples=1)
        ticket.end()
        writer.commit()
        assert contents(table) == [[i] for i in range(committed + 1)]
        # A chunk that may not be committed yet is not lost either: its last step was not appended.
        for overlap in (0, 1, 4):
            chunked = table.writer(chunk_steps=8, overlap_steps=overlap)
            count(chunked, 0, 7)
            for value in (7, np.array([7])):
                with pytest.raises(RateLimitError):
                    chunked.append(x=value)
                assert chunked.num_steps == 7
                assert table.stats().num_writing == 1
            ticket, _ = table.reader().begin_snapshot(samples=1)
            ticket.end()
            assert len(chunked.append(x=7)) == 1
            chunked.close()
            assert contents(table)[-1] == list(range(8))
            table.remove(int(table.indices()[-1]))


# Growing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize(
    ("max_steps", "block_steps"), [(1, 1), (1, 5), (7, 3), (100, 7), (64, 64), (65, 64), (33, 1)]
)
def test_one_step_at_a_time_up_to_the_whole_table(max_steps: int, block_steps: int, tight: bool) -> None:
    blocks = -(-max_steps // block_steps) if tight else None
    with make(max_steps=max_steps, max_trajectories=3, block_steps=block_steps, max_blocks=blocks) as table:
        writer = table.writer()
        for repeat in range(4):
            for i in range(max_steps):
                writer.append(x=i)
                held = table.region.array("extent")[0, 0]
                assert i < held <= max_steps + block_steps
                if repeat == 0:
                    table.check_valid()
            with pytest.raises(SchemaError):
                writer.append(x=0)
            if repeat % 2:
                writer.discard()
            else:
                index = writer.commit()
                assert contents(table) == [list(range(max_steps))]
                assert table.stats().blocks_in_use == -(-max_steps // block_steps)
                table.remove(index)
            assert table.stats().blocks_in_use == 0
        nothing_left(table)


def test_room_ahead_is_given_back() -> None:
    """A trajectory is given more room than it needs while there is plenty; what it has not used is free afterwards."""
    with make(max_steps=4000, max_trajectories=40) as table:
        writer = table.writer()
        for length in (1, 2, 5, 33, 100, 333):
            count(writer, 0, length)
            assert -(-length // 4) <= table.stats().blocks_in_use <= -(-2 * length // 4) + 1
            writer.commit()
            assert table.stats().blocks_in_use == -(-length // 4)
            assert contents(table) == [list(range(length))]
            table.remove(table.indices())


def test_several_writers_take_turns() -> None:
    """Each with block tables that end where another one's begin, so that they have to move."""
    with gear.Table.create(COLUMNS, max_steps=700, max_trajectories=9, block_steps=2) as table:
        writers = [table.writer() for _ in range(7)]
        trajectories = [rows(number, 20 + number) for number in range(70)]
        for begin in range(0, 70, 7):
            for i in range(90):
                for j, writer in enumerate(writers):
                    trajectory = trajectories[begin + j]
                    if i < len(trajectory["step"]) and (i < 10 or j != begin // 7 % 7):
                        writer.append({name: values[i] for name, values in trajectory.items()})
            table.check_valid()
            for j, writer in enumerate(writers):
                writer.discard() if j == begin // 7 % 7 else writer.commit()
                table.check_valid()
            expected = [begin + j for j in range(7) if j != begin // 7 % 7]
            assert numbers_of(table) == expected
            table.remove(table.indices())
        nothing_left(table)


# Writers that go away --------------------------------------------------------------------------------


def test_what_a_dropped_writer_had_is_there_when_it_is_needed() -> None:
    with make(max_steps=20) as table:
        writer = table.writer()
        count(writer, 0, 13)
        writer = None  # type: ignore[assignment]
        gc.collect()
        assert table.stats().num_writing == 1, "nobody waits for the lock in a finalizer"
        table.add({"x": np.arange(20)})
        assert contents(table) == [list(range(20))]
        nothing_left(table)


def test_a_dropped_writer_after_it_has_committed() -> None:
    with make() as table:
        writer = table.writer(chunk_steps=4)
        count(writer, 0, 10)
        writer.commit()
        del writer
        gc.collect()
        bury(table)
        assert contents(table) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
def test_a_writer_after_a_fork() -> None:
    with named() as table:
        writer = table.writer()
        write(writer, 1, 5)
        reader, ours = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            found = []
            for call in (lambda: writer.append(rows(2, 1)), writer.commit, writer.discard):
                try:
                    call()
                    found.append("nothing was raised")
                except GearError as error:
                    found.append(str(error))
            writer.close()
            with table.writer() as own:
                write(own, 3, 4)
            del call, writer
            gc.collect()
            ours.send(found)
            os._exit(0)
        assert reader.poll(30)
        expected = (
            f"A writer of process {os.getpid()} was used in process {pid}; "
            "make one with table.writer() in each process."
        )
        assert reader.recv() == [expected] * 3
        os.waitpid(pid, 0)
        writer.append({name: values[5] for name, values in rows(1, 6).items()})
        writer.discard()
        write(writer, 1, 6)
        writer.commit()
        assert numbers_of(table) == [3, 1]
        nothing_left(table)


def test_a_closed_table() -> None:
    with named() as table:
        other = gear.Table.attach(str(table.name))
        writer = other.writer()
        write(writer, 1, 6)
        other.close()
        with pytest.raises(TableClosedError):
            other.writer()
        for call in (lambda: write(writer, 1, 1), lambda: writer.append(rows(1, 3)), writer.commit):
            with pytest.raises(TableClosedError, match="is closed; attach or create it again"):
                call()
        assert table.stats().num_writing == 1
        writer.discard()
        writer.close()
        assert table.stats().num_writing == 0
        nothing_left(table)


# Chunks ----------------------------------------------------------------------------------------------


def cut(steps: int, chunk: int, overlap: int, *, commit: bool) -> list[list[int]]:
    """The chunks of a stream of `steps` steps 0, 1, 2, ...: what the writer must make of it."""
    chunks, begin = [], 0
    while begin + chunk <= steps:
        chunks.append(list(range(begin, begin + chunk)))
        begin += chunk - overlap
    rest = list(range(begin, steps))
    fresh = len(rest) - (overlap if chunks else 0)
    return chunks + ([rest] if commit and fresh > 0 else [])


def blocks_of(chunks: list[list[int]], chunk: int, overlap: int, block_steps: int) -> int:
    """Blocks that they take when those that two of them have in common are counted once."""
    stride = chunk - overlap
    if not overlap or stride % block_steps:
        return sum(-(-len(one) // block_steps) for one in chunks)
    return len({step // block_steps for one in chunks for step in one})


@pytest.mark.parametrize(
    ("chunk", "overlap", "block_steps"),
    [
        (8, 4, 4),
        (8, 4, 2),
        (8, 6, 2),
        (8, 7, 1),
        (10, 6, 4),
        (9, 5, 4),
        (8, 3, 4),
        (8, 0, 4),
        (5, 4, 8),
        (1, 0, 4),
    ],
)
@pytest.mark.parametrize("several", mostly_long([False, True], True))
def test_chunks(chunk: int, overlap: int, block_steps: int, several: bool) -> None:
    with make(max_steps=600, max_trajectories=80, block_steps=block_steps) as table:
        for steps in (*range(1, 3 * chunk), 60):
            writer = table.writer(chunk_steps=chunk, overlap_steps=overlap)
            completed: list[int] = []
            if several:
                for begin in range(0, steps, 5):
                    completed += writer.append(x=np.arange(begin, min(begin + 5, steps)))
            else:
                for step in range(steps):
                    completed += writer.append(x=step)
            before = cut(steps, chunk, overlap, commit=False)
            assert contents(table) == before
            assert table.indices().tolist() == completed
            last = writer.commit()
            expected = cut(steps, chunk, overlap, commit=True)
            assert contents(table) == expected
            assert table.indices()[-1] == last
            assert table.stats().blocks_in_use == blocks_of(expected, chunk, overlap, block_steps)
            assert table.stats().num_writing == 0
            with pytest.raises(SchemaError, match=r"^Nothing has been appended"):
                writer.commit()
            nothing_left(table)


def test_a_stream_after_another() -> None:
    """The second one shares nothing with the first."""
    with make() as table:
        writer = table.writer(chunk_steps=8, overlap_steps=4)
        count(writer, 0, 10)
        writer.commit()
        count(writer, 100, 110)
        assert writer.num_steps == 6
        writer.discard()
        assert contents(table) == [list(range(8)), list(range(4, 10)), list(range(100, 108))]
        count(writer, 200, 203)
        writer.commit()
        assert contents(table)[-1] == [200, 201, 202]
        nothing_left(table)


def test_one_append_of_many_chunks() -> None:
    with gear.Table.create(COLUMNS, max_steps=400, max_trajectories=50, block_steps=4) as table:
        trajectory = rows(1, 100)
        with table.writer(chunk_steps=16, overlap_steps=8) as writer:
            writer.priority = 2.0
            indices = writer.append(trajectory)
        assert len(indices) == 11
        assert table.indices().tolist()[:11] == list(indices)
        assert (table.reader().arrays.priority[list(indices)] == 2.0).all()
        for i, index in enumerate(table.indices().tolist()):
            found = table[index]
            for name, values in trajectory.items():
                assert bits(found[name]) == bits(values[8 * i : 8 * i + len(found[name])])
        assert table.stats().blocks_in_use == 25


@pytest.mark.parametrize("overlap", [4, 3])
def test_discard_leaves_the_chunks_that_were_completed(overlap: int) -> None:
    with make(max_steps=200) as table:
        writer = table.writer(chunk_steps=8, overlap_steps=overlap)
        count(writer, 0, 20)
        expected = cut(20, 8, overlap, commit=False)
        blocks = blocks_of(expected, 8, overlap, 4)
        writer.discard()
        assert contents(table) == expected
        assert table.stats().blocks_in_use == blocks
        nothing_left(table)


@pytest.mark.parametrize("what", ["steps", "slots"])
@pytest.mark.parametrize("overlap", [4, 5])
def test_a_chunk_that_finds_no_room_for_the_next_one(overlap: int, what: str) -> None:
    """The step that would complete it is not appended; when there is room it goes on as if nothing had been."""
    sizes: dict[str, Any] = {
        "steps": {"max_steps": 32, "max_trajectories": 8},
        "slots": {"max_trajectories": 3},
    }
    with make(**sizes[what]) as table:
        table.extend([{"x": np.arange(12)}] * 2)
        writer = table.writer(chunk_steps=8, overlap_steps=overlap)
        count(writer, 0, 7)
        for value in (7, np.array([7])):
            with pytest.raises(TableFullError):
                writer.append(x=value)
            assert (writer.num_steps, len(table), table.stats().num_writing) == (7, 2, 1)
            table.check_valid()
        table.remove([0, 1])
        count(writer, 7, 12)
        writer.commit()
        assert contents(table) == cut(12, 8, overlap, commit=True)
        nothing_left(table)


@pytest.mark.parametrize("on_full", ["evict_oldest", "evict_lowest_priority"])
@pytest.mark.parametrize(
    ("chunk", "overlap", "block_steps"),
    mostly_long([(8, 4, 4), (8, 5, 4), (8, 7, 1), (6, 4, 2)], (8, 5, 4), (8, 7, 1)),
)
def test_a_stream_through_a_full_table(chunk: int, overlap: int, block_steps: int, on_full: Any) -> None:
    """Chunks are evicted beside those that share their blocks; what is left is whole."""
    with make(max_steps=25, max_trajectories=4, block_steps=block_steps, on_full=on_full) as table:
        writer = table.writer(chunk_steps=chunk, overlap_steps=overlap)
        expected = cut(300, chunk, overlap, commit=False)
        completed = 0
        for step in range(300):
            completed += len(writer.append(x=step))
            found = contents(table)
            assert found == expected[completed - len(found) : completed]
        assert 1 <= len(found) <= 4
        writer.discard()
        nothing_left(table)


def test_chunks_as_large_as_the_table() -> None:
    with make(max_steps=20, on_full="evict_oldest") as table:
        with table.writer(chunk_steps=20) as writer:
            writer.append(x=np.arange(50))
        assert contents(table) == [list(range(40, 50))]
        with table.writer(chunk_steps=16, overlap_steps=4) as writer:
            writer.append(x=np.arange(50))
        assert contents(table) == [list(range(36, 50))]
        nothing_left(table)


hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")


@pytest.mark.slow
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_chunks_of_all_sizes(data: Any) -> None:
    """Any sizes, appended in any pieces by several writers, then removed in any order."""
    chunk = data.draw(st.integers(1, 9), "chunk")
    overlap = data.draw(st.integers(0, chunk - 1), "overlap")
    block_steps = data.draw(st.integers(1, 5), "block_steps")
    streams = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=3), "streams")
    commit = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), "commit")
    with make(max_steps=1000, max_trajectories=100, block_steps=block_steps) as table:
        writers = [table.writer(chunk_steps=chunk, overlap_steps=overlap) for _ in streams]
        places = [0] * len(streams)
        order: list[list[int]] = []
        while any(place < steps for place, steps in zip(places, streams, strict=True)):
            which = data.draw(
                st.sampled_from([i for i, steps in enumerate(streams) if places[i] < steps]), "which"
            )
            size = data.draw(st.integers(1, min(6, streams[which] - places[which])), "size")
            begin = 1000 * which + places[which]
            one = size == 1 and data.draw(st.booleans(), "one")
            for index in writers[which].append(x=begin if one else np.arange(begin, begin + size)):
                order.append(table[index]["x"].tolist())
            places[which] += size
            table.check_valid()
        for i, writer in enumerate(writers):
            if commit[i]:
                writer.commit()
            else:
                writer.discard()
        expected = [
            [1000 * i + step for step in one]
            for i, steps in enumerate(streams)
            for one in cut(steps, chunk, overlap, commit=commit[i])
        ]
        assert contents(table)[: len(order)] == order
        assert sorted(contents(table)) == sorted(expected)
        blocks = sum(
            blocks_of(cut(steps, chunk, overlap, commit=commit[i]), chunk, overlap, block_steps)
            for i, steps in enumerate(streams)
        )
        assert table.stats().blocks_in_use == blocks
        left = {int(index): table[int(index)]["x"].tolist() for index in table.indices()}
        for index in data.draw(st.permutations(list(left)), "removed"):
            table.remove(index)
            del left[index]
            table.check_valid()
            assert {i: table[i]["x"].tolist() for i in left} == left
        assert table.stats().blocks_in_use == 0
