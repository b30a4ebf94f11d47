"""Trajectories written step by step: what they hold, what is refused, what a full table does, and chunks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from table_common import (
    COLUMNS,
    DTYPES,
    bits,
    forked,
    forks,
    named,
    numbers_of,
    random_values,
    rows,
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
from gear_loader.storage.operations import entry_points
from gear_loader.storage.states import FREE, WRITING

SCALAR = {"x": gear.Column(torch.int64)}


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
    assert not (table._engine.region.array("state") == WRITING).any()
    table.remove(table.indices())
    table.check_valid()
    assert table.stats().blocks_in_use == 0
    assert (table._engine.region.array("state") == FREE).all()


def _step(value: torch.Tensor, i: int, kind: str) -> Any:
    if kind == "tensor":
        return value[i].requires_grad_(value.is_floating_point())
    if kind == "numpy":
        array = np.asarray(value.numpy()[i, ...])
        return array.view(_Subclass) if array.ndim else array
    if kind == "generic":
        return value.numpy()[i]
    if kind == "python":
        return value[i].item()
    strided = torch.empty((*value.shape[1:], 2), dtype=value.dtype)  # "views"
    strided[..., 0] = value[i]
    return strided[..., 0] if value.dtype is torch.bfloat16 or not i % 2 else strided.numpy()[..., 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = ["tensor", "views", "several"]
    if dtype is not torch.bfloat16:
        kinds += ["numpy", "several arrays"]
    if shape == () and not dtype.is_floating_point:
        kinds += ["generic", "python"]
    sizes = {"max_steps": 300, "max_trajectories": 20, "block_steps": 7}
    with gear.Table.create({"x": gear.Column(dtype, shape)}, **sizes) as table:
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
            kept[writer.commit()] = bits(values)
            if kind != "tensor":
                values.zero_()  # what was appended is a copy
        for index, values in kept.items():
            found = table[index]["x"]
            assert (found.dtype, found.shape[1:]) == (dtype, shape)
            assert bits(found) == values
        nothing_left(table)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_numbers_for_a_column_of_floats(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    given: list[Any] = [1, 0.5, -3, float("inf"), -0.0, 1e-3]
    given += [np.float32(0.25), np.float64(2), np.float16(7), np.int64(5)]
    given += [largest, -largest]
    with gear.Table.create({"x": gear.Column(dtype)}, max_steps=30, max_trajectories=3) as table:
        with table.writer() as writer:
            for value in given:
                writer.append(x=value)
            writer.append({"x": float("nan")})
            for value in (10**400, -(10**400)) if dtype is torch.float64 else (10**400, 1e300, -1e39):
                with pytest.raises(SchemaError, match="'x' of the step is "):
                    writer.append(x=value)
        expected = torch.tensor([float(value) for value in given], dtype=torch.float64).to(dtype)
        found = table[0]["x"]
        assert bits(found[:-1]) == bits(expected)
        assert found[-1].isnan()


class _Subclass(np.ndarray[Any, Any]):
    """As a memory map is."""


# What is refused -------------------------------------------------------------------------------------


def _step_with(**changes: Any) -> dict[str, Any]:
    step = {name: values[4] for name, values in rows(9, 9).items()}
    return {name: value for name, value in {**step, **changes}.items() if value is not ...}


_MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (_step_with(value=np.zeros(3)), r"'value' of the step has dtype float64 and shape \[3\]; exp"),
    "torch dtype": (_step_with(number=torch.tensor(1.0)), r"'number' of the step has dtype torch.float32 "),
    "shape": (_step_with(value=np.zeros(4, np.float32)), r"has dtype float32 and shape \[4\]; expected .*"),
    "transposed": (_step_with(value=np.zeros((1, 1, 3), np.float32)), r"has dtype float32 and shape \[1, "),
    "missing": (_step_with(check=...), r"the step has the columns .*; missing: \['check'\], unknown: \[\]"),
    "unknown": (_step_with(more=1), r"missing: \[\], unknown: \['more'\]"),
    "another name": (_step_with(check=..., chek=1), r"missing: \['check'\], unknown: \['chek'\]"),
    "nothing": ({}, r"the step has the columns \[\]; missing: \['number', 'step', 'length', 'value', 'che"),
    "a list": (_step_with(value=[1.0, 2.0, 3.0]), r"is \[1.0, 2.0, 3.0\], of type list"),
    "none": (_step_with(step=None), r"'step' of the step is None, of type NoneType"),
    "a float": (_step_with(number=1.0), r"'number' of the step is 1.0, of type float"),
    "a numpy float": (_step_with(number=np.float32(1)), r"of type float32"),
    "a bool": (_step_with(number=True), r"'number' of the step is True, of type bool"),
    "a large number": (_step_with(step=2**31), r"'step' of the step is 2147483648, of type int"),
    "a complex number": (_step_with(step=1j), r"'step' of the step is 1j, of type complex"),
    "a number for a shape": (_step_with(value=1.0), r"'value' of the step is 1.0, of type float"),
    "text": (_step_with(step="1"), r"'step' of the step is '1', of type str"),
    "sparse": (_step_with(value=torch.zeros(3).to_sparse()), r"'value' of the step is a tensor of layout "),
    "meta": (_step_with(value=torch.zeros(3, device="meta")), r"'value' of the step is a meta tensor; exp"),
    "masked": (_step_with(value=np.ma.zeros(3, np.float32)), r"'value' of the step has dtype float32"),
    "byte order": (_step_with(value=np.zeros(3, ">f4")), r"'value' of the step has dtype >f4"),
    "one of several": ({**rows(9, 3), "step": np.int32(4)}, r"'number' of the step has dtype int64 and sh"),
    "several of one": (_step_with(step=np.zeros(3, np.int32)), r"'step' of the step has dtype int32 and s"),
    "lengths": ({**rows(9, 3), "step": np.zeros(4, np.int32)}, r"3|4"),
    "several, dtype": ({**rows(9, 3), "step": np.zeros(3, np.int64)}, r"'step' of the steps"),
    "no steps": (rows(9, 0), r"at least (1|one)|T >= 1"),
}


def test_what_does_not_fit_is_refused_and_the_writer_goes_on(table: gear.Table) -> None:
    writer = table.writer()
    for before, (step, message) in itertools.product((0, 1, 4), _MISFITS.values()):
        write(writer, 5, before)
        stats = table.stats()
        assert stats.blocks_in_use == -(-before // 4)
        for _ in range(2):
            with pytest.raises(SchemaError, match=message) as caught:
                writer.append(step)
            assert "{" not in re.sub(r"\{'.*?\}", "", str(caught.value))
            assert (writer.num_steps, table.stats()) == (before, stats)
        trajectory = rows(5, 10)
        for i in range(before, 10):
            writer.append({name: values[i] for name, values in trajectory.items()})
        writer.discard()
        write(writer, 6, 10)
        table.remove(writer.commit())
    with make(on_full="evict_oldest", max_steps=8) as full:
        full.extend([{"x": np.arange(4)}, {"x": np.arange(4)}])
        other = full.writer()
        with unchanged(full):  # nothing is evicted
            for bad in (1.5, np.zeros((2, 2), np.int64), np.zeros(2), None):
                with pytest.raises(SchemaError):
                    other.append(x=bad)
        other.append(x=1)
        assert len(full) == 1


def test_a_writer_grows_in_a_table_that_is_tight_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first such table of a process the light version of the operation gives up before the full one is tried."""
    fresh = entry_points._on_demand(entry_points._reserve_lanes_light, entry_points._reserve_lanes)
    monkeypatch.setattr(entry_points.COMPILED, "reserve_lanes", fresh)
    with make(max_steps=200) as table, table.writer() as writer:
        writer.append(x=np.arange(4))  # a block
        ticket = table._engine.reader().begin_read()
        table.remove(table.add({"x": np.arange(4)}))  # its block cannot be reclaimed yet
        for value in range(4, 10):
            writer.append(x=value)
        ticket.end()
        slot = writer.commit()
        assert table[slot]["x"].tolist() == list(range(10))
        table.check_valid()


def test_priorities_that_do_not_fit_leave_what_was_appended(table: gear.Table) -> None:
    writer = table.writer()
    write(writer, 3, 6)
    for bad in (-1, float("nan"), float("inf"), 1e39, "1", [1.0, 2.0], [[1], [1, 2]], object(), 1j):
        with pytest.raises(SchemaError, match=r"^priority is .*; expected a "):
            writer.commit(priority=bad)  # type: ignore[arg-type]
        assert (writer.num_steps, len(table)) == (6, 0)
    writer.commit(priority=2.5)
    write(writer, 4, 2)
    writer.commit()
    assert (numbers_of(table), table._engine.reader().arrays.priority[:2].tolist()) == ([3, 4], [2.5, -1])
    message = "^Nothing has been appended since the last commit; append at least one step.$"
    with pytest.raises(SchemaError, match=message):
        writer.commit()
    with make() as small:
        writer = small.writer(chunk_steps=4, overlap_steps=2)
        count(writer, 0, 3)
        writer.priority = -1.0
        for _ in range(2):
            with pytest.raises(SchemaError, match=r"^priority is -1.0; expected"):
                writer.append(x=3)
            assert (writer.num_steps, len(small)) == (3, 0)
        writer.priority = 2.0
        assert writer.append(x=3) == (0,)
        with pytest.raises(SchemaError, match=r"^priority is 'x'; expected"):
            writer.commit(priority="x")  # type: ignore[arg-type]
        assert (writer.num_steps, writer.commit()) == (2, 0)
        assert (contents(small), small._engine.reader().arrays.priority[0]) == ([[0, 1, 2, 3]], 2.0)


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
        ({"chunk_steps": 41}, "chunk_steps is 41 and overlap_steps 0; expected overlap_steps < chunk_step"),
        ({"chunk_steps": 4, "overlap_steps": 4}, "chunk_steps is 4 and overlap_steps 4; expected overlap_"),
        ({"chunk_steps": 4, "overlap_steps": -1}, "overlap_steps is -1; expected an integer of at least 0"),
        ({"overlap_steps": 2}, "overlap_steps is 2 without chunk_steps; give both"),
        ({"chunk_steps": 30, "overlap_steps": 11}, "expected that a chunk and the overlap fit into the ta"),
        ({"chunk_steps": 28, "overlap_steps": 20}, "which holds at most 8 trajectories, 40 steps and 16 b"),
    ],
)
def test_sizes_of_chunks_that_make_no_sense(options: Any, message: str) -> None:
    with make() as table, pytest.raises(SchemaError, match=re.escape(message)):
        table.writer(**options)
    with make(max_trajectories=1) as table, pytest.raises(SchemaError, match="at most 1 trajectories"):
        table.writer(chunk_steps=4, overlap_steps=1)


def test_the_context_manager_commits_at_a_clean_end(table: gear.Table) -> None:
    with table.writer() as writer:
        write(writer, 1, 3)
        writer.commit(1.5)
        writer.priority = 4.0
        write(writer, 2, 5)
    with table.writer():
        pass
    with table.writer() as writer:
        write(writer, 3, 3)
        writer.commit()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), table.writer() as writer:  # noqa: PT012 - the block is what is tested
            write(writer, 4, 9)
            raise error
    writer.close()
    writer.discard()
    with pytest.raises(SchemaError, match=r"^Nothing has been appended"):
        writer.commit()
    assert numbers_of(table) == [1, 2, 3]
    assert table._engine.reader().arrays.priority[:3].tolist() == [1.5, 4.0, -1]
    assert table.stats().num_writing == 0
    nothing_left(table)


# Full tables -----------------------------------------------------------------------------------------


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
    with make(max_steps=11, block_steps=4, on_full="evict_oldest", timeout=3600) as table:
        writers = [table.writer() for _ in range(3)]
        for i in range(3):
            for writer in writers:
                writer.append(x=i)
        for writer in writers:
            writer.commit()
        assert contents(table) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("on_full", "how"), [("evict_oldest", "append"), ("evict_lowest_priority", "add"), ("wait", "extend")]
)
def test_all_room_is_held_by_writers_of_this_thread(on_full: Any, how: str) -> None:
    """It is said at once: no other thread can end them."""
    with make(max_steps=32, max_trajectories=8, block_steps=4, on_full=on_full, timeout=3600) as table:
        writers = [table.writer() for _ in range(8)]
        for writer in writers:
            writer.append(x=np.arange(4))
        message = rf"open writers hold room: 8 of this process \({os.getpid()}\) with 32 steps\. commit\(\) or discard"
        store: dict[str, Any] = {
            "append": lambda: writers[3].append(x=1),
            "add": lambda: table.add({"x": np.arange(2)}),
            "extend": lambda: table.extend([{"x": np.arange(2)}]),
        }
        with pytest.raises(TableFullError, match=message):
            store[how]()
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
        table._engine.index.admission.timeout = 0.05
        with pytest.raises(LockTimeoutError, match=r"hold room: 2 of this process \(\d+\) with 8 steps\. "):
            mine.append(x=4)
        table._engine.index.admission.timeout = 30
        threading.Timer(0.05, give.set).start()
        mine.append(x=4)
        thread.join()
        mine.commit()
        assert contents(table) == [list(range(5))]


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
        ticket, _ = table._engine.reader().begin_snapshot(samples=1)
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
            ticket, _ = table._engine.reader().begin_snapshot(samples=1)
            ticket.end()
            assert len(chunked.append(x=7)) == 1
            chunked.close()
            assert contents(table)[-1] == list(range(8))
            table.remove(int(table.indices()[-1]))


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


# Writers that go away --------------------------------------------------------------------------------


def test_what_a_dropped_writer_had_is_there_when_it_is_needed() -> None:
    with make(max_steps=20, max_trajectories=2) as table:
        writer = table.writer(chunk_steps=4)
        count(writer, 0, 4)
        writer.commit()
        count(writer, 0, 3)
        del writer
        gc.collect()
        assert table.stats().num_writing == 1, "a finalizer does not wait for the lock"
        table.add({"x": np.arange(16)})
        assert contents(table) == [list(range(4)), list(range(16))]
        nothing_left(table)


@forks
def test_a_writer_after_a_fork() -> None:
    with named() as table:
        writer = table.writer()
        write(writer, 1, 5)
        message = rf"^A writer of process {os.getpid()} was used in process \d+; make one with table.writer\(\) in each"

        def work() -> None:
            for call in (lambda: writer.append(rows(2, 1)), writer.commit, writer.discard):
                with pytest.raises(GearError, match=message):
                    call()
            writer.close()
            writer._sink.give_up()  # as when it is collected
            with table.writer() as own:
                write(own, 3, 4)

        forked(work)
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


def test_a_stream_through_a_table_of_its_size() -> None:
    with make(max_steps=20, on_full="evict_oldest") as table:  # chunks as large as the table
        for options, begin in (({"chunk_steps": 20}, 40), ({"chunk_steps": 16, "overlap_steps": 4}, 36)):
            with table.writer(**options) as writer:
                writer.append(x=np.arange(50))
            assert contents(table) == [list(range(begin, 50))]
            nothing_left(table)
