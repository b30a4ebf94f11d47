"""Every refused input says what was received, what was expected and what to do, and changes nothing."""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import os
import pickle
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table_common import (
    COLUMNS,
    fresh_name,
    in_three_steps,
    named,
    number_of,
    numbers_of,
    rows,
    state,
    unchanged,
)

import gear_loader as gear
from gear_loader import errors
from gear_loader.errors import (
    CheckpointError,
    GearError,
    LockTimeoutError,
    PrivateTableError,
    RegionError,
    SchemaError,
    StaleIndexError,
    TableClosedError,
    TableFullError,
)
from gear_loader.storage import shared_memory
from gear_loader.storage.layout import FORMAT_VERSION
from gear_loader.storage.operations import WRITING
from gear_loader.storage.readers import Ticket
from gear_loader.storage.region import _Mapping, region_path

SIZES: dict[str, Any] = {"max_steps": 40, "max_trajectories": 4, "block_steps": 4}


@pytest.fixture
def table() -> Iterator[gear.Table]:
    """Two trajectories, and an index that has been used and is free again."""
    with gear.Table.create(COLUMNS, **SIZES) as table:
        table.extend([rows(0, 5), rows(1, 9), rows(2, 1)], priority=[1.0, 0.0, 2.5])
        table.remove(1)
        yield table


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """Fails if the block leaves a descriptor or a mapping behind."""
    gc.collect()
    descriptors, mappings = len(os.listdir("/proc/self/fd")), set(_Mapping.registry)
    yield
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert set(_Mapping.registry) == mappings


def change(**columns: Any) -> dict[str, Any]:
    """A trajectory of 6 steps with other columns; None leaves one out."""
    given = {**rows(9, 6), **columns}
    return {name: value for name, value in given.items() if value is not None}


# Trajectories ----------------------------------------------------------------------------------------

BAD_TRAJECTORIES = {
    "missing column": (
        change(step=None),
        "{it} has the columns ['number', 'length', 'value', 'check']; missing: ['step'], unknown: []. "
        "Expected exactly ['number', 'step', 'length', 'value', 'check'].",
    ),
    "unknown column": (
        change(more=np.zeros(6)),
        "missing: [], unknown: ['more']. Expected exactly ['number',",
    ),
    "wrong dtype, numpy": (
        change(value=np.zeros((6, 3))),
        "Column 'value' of {it} has dtype float64; expected torch.float32. Convert it first (.astype(np.float32)).",
    ),
    "wrong dtype, torch": (
        change(number=torch.zeros(6, dtype=torch.int32)),
        "Column 'number' of {it} has dtype torch.int32; expected torch.int64. Convert it first "
        "(torch.as_tensor(values).to(torch.int64)).",
    ),
    "another byte order": (
        change(number=np.zeros(6, dtype=">i8")),
        "Column 'number' of {it} has dtype >i8; expected torch.int64. Convert it first (.astype(np.int64)).",
    ),
    "wrong shape": (
        change(value=torch.zeros(6, 4)),
        "Column 'value' of {it} has shape [6, 4]; expected [T, 3].",
    ),
    "too few dimensions": (
        change(value=torch.zeros(6)),
        "Column 'value' of {it} has shape [6]; expected [T, 3].",
    ),
    "too many dimensions": (
        change(number=np.zeros((6, 1), dtype=np.int64)),
        "Column 'number' of {it} has shape [6, 1]; expected [T].",
    ),
    "0-d": (change(number=torch.tensor(6)), "Column 'number' of {it} has shape []; expected [T]."),
    "uneven lengths": (
        change(check=np.zeros(7, dtype=np.int64)),
        "{it} has columns of uneven lengths: {{'number': 6, 'step': 6, 'length': 6, 'value': 6, 'check': 7}}. "
        "Expected as many steps in each.",
    ),
    "zero steps, numpy": (
        {name: value[:0] for name, value in rows(9, 6).items()},
        "{it} has zero steps; expected at least one.",
    ),
    "zero steps, torch": (
        {name: torch.from_numpy(value)[:0] for name, value in rows(9, 6).items()},
        "{it} has zero steps; expected at least one.",
    ),
    "too long": (
        rows(9, 41),
        "Trajectory {number} has 41 steps; this table holds at most 40. Create it with a larger max_steps (and "
        "max_blocks, if given) or split the trajectory.",
    ),
    "a list": (
        change(number=[1, 2, 3, 4, 5, 6]),
        "Column 'number' of {it} is a list; expected a numpy array or a torch tensor of torch.int64 and shape [T].",
    ),
    "sparse": (
        change(number=torch.zeros(6, dtype=torch.int64).to_sparse()),
        "Column 'number' of {it} is a tensor of layout torch.sparse_coo; expected a numpy array",
    ),
    "no mapping": (
        list(rows(9, 6).values()),
        "{it} is a list; expected a mapping of column names to arrays [T, ...] with the columns ['number', 'step',",
    ),
    "nothing": (None, "{it} is a NoneType; expected a mapping of column names to arrays [T, ...]"),
    "no columns": (
        {},
        "{it} has the columns []; missing: ['number', 'step', 'length', 'value', 'check'], unknown: [].",
    ),
}


@pytest.mark.parametrize("kind", list(BAD_TRAJECTORIES))
def test_add_refuses(table: gear.Table, kind: str) -> None:
    trajectory, message = BAD_TRAJECTORIES[kind]
    with unchanged(table), pytest.raises(SchemaError) as caught:
        table.add(trajectory)
    assert message.format(it="the trajectory", number=0) in str(caught.value)


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("kind", list(BAD_TRAJECTORIES))
@pytest.mark.parametrize("lazily", [False, True])
def test_extend_refuses_all_for_one(table: gear.Table, kind: str, position: int, lazily: bool) -> None:
    trajectory, message = BAD_TRAJECTORIES[kind]
    given: list[Any] = [rows(7, 2), rows(8, 3)]
    given.insert(position, trajectory)
    with unchanged(table), pytest.raises(SchemaError) as caught:
        table.extend(iter(given) if lazily else given)
    assert message.format(it=f"trajectory {position}", number=position) in str(caught.value)


@pytest.mark.parametrize("on_full", ["error", "evict_oldest"])
def test_a_refused_trajectory_evicts_nothing(on_full: Any) -> None:
    with gear.Table.create(COLUMNS, **SIZES, on_full=on_full) as table:
        table.extend([rows(number, 10) for number in range(4)])
        for trajectory, _ in BAD_TRAJECTORIES.values():
            with unchanged(table), pytest.raises(SchemaError):
                table.add(trajectory)  # type: ignore[arg-type]
        with unchanged(table), pytest.raises(SchemaError, match=r"priority -1.0 of trajectory 0"):
            table.add(rows(9, 3), priority=-1.0)


BAD_PRIORITIES = [
    (math.nan, "priority nan of trajectory 0; expected a finite number"),
    (-1.0, "priority -1.0 of trajectory 0; expected a finite number"),
    (-1e-30, "priority -1e-30 of trajectory 0; expected a finite number"),
    (math.inf, "priority inf of trajectory 0; expected a finite number"),
    (-math.inf, "priority -inf of trajectory 0; expected a finite number"),
    (1e39, "priority 1e+39 of trajectory 0; expected a finite number (as float32) that is not negative."),
    (10**400, "priority is 1000"),
    ([None], "priority is [None]; expected a number"),
    ("1.0", "priority is '1.0'; expected a number"),
    (1 + 0j, "priority is (1+0j); expected a number"),
    ([[1.0]], "priority has shape [1, 1]; expected one number or ["),
    ([1.0, [2.0]], "priority is [1.0, [2.0]]; expected a number"),
    ({"a": 1}, "priority is {'a': 1}; expected a number"),
    (np.array(math.nan), "priority nan of trajectory 0; expected a finite number"),
    (torch.tensor(-2.0), "priority -2.0 of trajectory 0; expected a finite number"),
    (torch.tensor(math.nan).bfloat16(), "priority nan of trajectory 0; expected a finite number"),
    (np.float64(-0.5), "priority -0.5 of trajectory 0; expected a finite number"),
    (np.complex64(1), "; expected a number"),
    (-1e-300, "priority -1e-300 of trajectory 0; expected a finite number"),
]


@pytest.mark.parametrize(
    ("priority", "message"), BAD_PRIORITIES, ids=[str(i) for i in range(len(BAD_PRIORITIES))]
)
@pytest.mark.parametrize("method", ["add", "extend", "stacked"])
def test_a_priority_is_refused(table: gear.Table, priority: Any, message: str, method: str) -> None:
    stacked = {name: value[None] for name, value in rows(9, 6).items()}
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: table.add(rows(9, 6), priority=priority),
        "extend": lambda: table.extend([rows(9, 6), rows(8, 2)], priority=priority),
        "stacked": lambda: table.extend(stacked, lengths=[6], priority=priority),
    }
    with unchanged(table), pytest.raises(SchemaError) as caught:
        calls[method]()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1.0, math.nan, 1.0], "priority nan of trajectory 1; expected"),
        (np.array([1.0, 2.0, -3.0]), "priority -3.0 of trajectory 2; expected"),
        (torch.tensor([1.0, math.inf, -3.0]), "priority inf of trajectory 1; expected"),
        ([1.0, 1.0], "priority has shape [2]; expected one number or [3]."),
        ([1.0] * 4, "priority has shape [4]; expected one number or [3]."),
        ([], "priority has shape [0]; expected one number or [3]."),
    ],
)
def test_extend_refuses_one_priority_of_many(table: gear.Table, priority: Any, message: str) -> None:
    with unchanged(table), pytest.raises(SchemaError) as caught:
        table.extend([rows(7, 2), rows(8, 3), rows(9, 1)], priority=priority)
    assert message in str(caught.value)


def test_a_negative_zero_is_a_zero(table: gear.Table) -> None:
    assert float(table.region.array("priority")[table.add(rows(9, 2), priority=-0.0)]) == 0


# extend ----------------------------------------------------------------------------------------------


def stack(*lengths: int, padded: int = 6) -> dict[str, np.ndarray]:
    return {name: np.stack([value] * len(lengths)) for name, value in rows(9, padded).items()}


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            rows(9, 6),
            {},
            "One mapping was received without lengths; expected an iterable of trajectories, or stacked",
        ),
        (5, {}, "A int was received; expected an iterable of trajectories."),
        (None, {}, "A NoneType was received; expected an iterable of trajectories."),
        ("ab", {}, "trajectory 0 is a str; expected a mapping of column names to arrays"),
        (
            [rows(9, 6)],
            {"lengths": [6]},
            "With lengths a list was received; expected one mapping of stacked arrays",
        ),
        (stack(6, 6), {"lengths": [6]}, "shape [2, 6]; expected [1, T, ...] as lengths has 1 entries."),
        (stack(6), {"lengths": [6, 6]}, "shape [1, 6]; expected [2, T, ...] as lengths has 2 entries."),
        (stack(6, 6), {"lengths": [6, 0]}, "lengths[1] is 0; expected 1 to 6, the stacked arrays' T."),
        (stack(6, 6), {"lengths": [-1, 6]}, "lengths[0] is -1; expected 1 to 6, the stacked arrays' T."),
        (stack(6, 6), {"lengths": [6, 7]}, "lengths[1] is 7; expected 1 to 6, the stacked arrays' T."),
        (
            stack(6),
            {"lengths": np.array([2**63], dtype=np.uint64)},
            "lengths[0] is 9223372036854775808; expected 1 to",
        ),
        (stack(6), {"lengths": [6.0]}, "lengths has dtype float64 and shape [1]; expected integers [n]."),
        (stack(6), {"lengths": [True]}, "lengths has dtype bool and shape [1]; expected integers [n]."),
        (stack(6), {"lengths": 6}, "lengths has dtype int64 and shape []; expected integers [n]."),
        (stack(6), {"lengths": [[6]]}, "lengths has dtype int64 and shape [1, 1]; expected integers [n]."),
        (stack(6), {"lengths": [[6], [6, 6]]}, "lengths is [[6], [6, 6]]; expected integers [n]."),
        (stack(6), {"lengths": "6"}, "; expected integers [n]."),
        (stack(6), {"lengths": [None]}, "lengths has dtype object and shape [1]; expected integers [n]."),
        (
            stack(6),
            {"lengths": torch.tensor([6.0])},
            "lengths has dtype float32 and shape [1]; expected integers [n].",
        ),
        (
            {**stack(6), "step": np.zeros((1, 5), np.int32)},
            {"lengths": [6]},
            "shape [1, 5]; expected [1, 6, ...]",
        ),
        ({**stack(6), "step": np.zeros(6, np.int32)}, {"lengths": [6]}, "shape [6]; expected [1, 6, ...]"),
        (
            {**stack(6), "step": [[0] * 6]},
            {"lengths": [6]},
            "Column 'step' of the stacked trajectories is a list; ",
        ),
        (
            {**stack(6), "step": torch.zeros(1, 6, dtype=torch.int32).to_sparse()},
            {"lengths": [6]},
            "Column 'step' of the stacked trajectories is a tensor of layout torch.sparse_coo; expected",
        ),
        (
            {**stack(6), "step": np.zeros((1, 6))},
            {"lengths": [6]},
            "Column 'step' of the stacked trajectories has dtype float64; expected torch.int32.",
        ),
        (
            {**stack(6), "value": np.zeros((1, 6, 2), np.float32)},
            {"lengths": [6]},
            "Column 'value' of the stacked trajectories has shape [6, 2]; expected [T, 3].",
        ),
        (
            {name: value for name, value in stack(6).items() if name != "step"},
            {"lengths": [6]},
            "the stacked trajectories has the columns ['number', 'length', 'value', 'check']; missing: ['step'],",
        ),
        (
            {name: value[:0] for name, value in stack(6).items() if name != "step"},
            {"lengths": []},
            "the stacked trajectories has the columns ['number', 'length', 'value', 'check']; missing: ['step'],",
        ),
        ({}, {"lengths": [6]}, "the stacked trajectories has the columns []; missing: ['number',"),
        (
            stack(6, padded=0),
            {"lengths": [1]},
            "the stacked trajectories has zero steps; expected at least one.",
        ),
        (
            {name: torch.from_numpy(value) for name, value in stack(6, padded=0).items()},
            {"lengths": [1]},
            "the stacked trajectories has zero steps; expected at least one.",
        ),
        (stack(41, padded=50), {"lengths": [41]}, "Trajectory 0 has 41 steps; this table holds at most 40. "),
    ],
)
def test_extend_refuses(table: gear.Table, given: Any, options: dict[str, Any], message: str) -> None:
    with unchanged(table), pytest.raises(SchemaError) as caught:
        table.extend(given, **options)
    assert message in str(caught.value)


# Tensors whose elements do not lie in memory ---------------------------------------------------------

Use = Callable[[torch.Tensor], None]


def emptied(view: torch.Tensor, left: int = 0) -> torch.Tensor:
    """A tensor whose storage has been made smaller than its elements need."""
    view.untyped_storage().resize_(left)
    return view


def inside(transform: Any) -> Callable[[Use, torch.Tensor], None]:
    """Calls a function with the tensor that a transform of torch.func makes of another one."""

    def call(use: Use, values: torch.Tensor) -> None:
        def inner(value: torch.Tensor) -> torch.Tensor:
            use(value)
            return value.sum()

        transform(inner)(values)

    return call


WITHOUT_DATA: dict[str, tuple[Callable[[Use, torch.Tensor], None], str]] = {
    "zero tensor": (lambda use, v: use(torch._efficientzerotensor(v.shape)), "tensor without storage"),
    "no storage": (lambda use, v: use(emptied(v.clone())), "tensor whose storage holds 0 bytes, while its"),
    "small storage": (lambda use, v: use(emptied(v.clone(), 3)), "tensor whose storage holds 3 bytes, while"),
    "view": (lambda use, v: use(emptied(torch.stack([v, v])[1], v.nbytes)), "tensor whose storage holds"),
    "strided": (
        lambda use, v: use(emptied(torch.stack([v, v], -1)[..., 0], v.nbytes - 1)),
        "tensor whose storage holds",
    ),
    "functionalize": (inside(torch.func.functionalize), "tensor without storage"),
    "grad": (inside(torch.func.grad), "tensor without storage"),
    "vmap": (lambda use, v: inside(torch.func.vmap)(use, v[None]), "tensor without storage"),
    "jagged": (lambda use, v: use(torch.nested.nested_tensor([*v], layout=torch.jagged)), "nested tensor"),
    "nested": (lambda use, v: use(torch.nested.nested_tensor([*v], layout=torch.strided)), "nested tensor"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", list(WITHOUT_DATA))
@pytest.mark.parametrize("method", ["add", "list", "generator", "stacked", "append", "append many"])
def test_a_tensor_without_its_data_is_refused(table: gear.Table, kind: str, method: str) -> None:
    make, message = WITHOUT_DATA[kind]
    writer = table.writer()
    store: dict[str, Callable[[dict[str, Any]], object]] = {
        "add": table.add,
        "list": lambda given: table.extend([rows(1, 2), given]),
        "generator": lambda given: table.extend(iter([rows(1, 2), given])),
        "stacked": lambda given: table.extend(given, lengths=[5]),
        "append": writer.append,
        "append many": writer.append,
    }
    caught: list[str] = []

    def give(value: torch.Tensor) -> None:
        given = {
            name: values[None] if method == "stacked" else values[0] if method == "append" else values
            for name, values in rows(9, 6).items()
        }
        with pytest.raises(SchemaError) as error:
            store[method]({**given, "value": value})
        caught.append(str(error.value))

    with unchanged(table):
        nested = kind in ("jagged", "nested")
        shapes = {"stacked": (1, 6, 3), "append": (1, 3) if nested else (3,)}
        make(give, torch.ones(shapes.get(method, (6, 3))))
    assert caught[0].startswith("Column 'value' of ")
    assert f" is a {message}" in caught[0]


@pytest.mark.parametrize("kind", [kind for kind in WITHOUT_DATA if kind not in ("jagged", "nested")])
@pytest.mark.parametrize("method", ["add", "extend", "commit", "update"])
def test_a_priority_without_its_data_is_refused(table: gear.Table, kind: str, method: str) -> None:
    make, message = WITHOUT_DATA[kind]
    dataset = gear.ReplayDataset(table, batch_size=2, windows=gear.Window(1), selector=gear.Prioritized())
    writer = table.writer()
    writer.append(rows(9, 6))
    index = table.indices()
    store: dict[str, Callable[[Any], object]] = {
        "add": lambda priority: table.add(rows(9, 6), priority=priority),
        "extend": lambda priority: table.extend([rows(9, 2), rows(8, 2)], priority=priority),
        "commit": writer.commit,
        "update": lambda priority: dataset.update_priority(index, priority),
    }
    caught: list[str] = []

    def give(value: torch.Tensor) -> None:
        with pytest.raises(SchemaError) as error:
            store[method](value)
        caught.append(str(error.value))

    with unchanged(table):
        make(give, torch.ones(() if method in ("add", "commit") else 2))
    assert f"priority is a {message}" in caught[0]
    writer.close()


@pytest.mark.parametrize("kind", ["zero tensor", "no storage"])
def test_a_list_of_priorities_without_their_data_is_refused(table: gear.Table, kind: str) -> None:
    make, _ = WITHOUT_DATA[kind]

    def give(value: torch.Tensor) -> None:
        with pytest.raises(SchemaError, match="priority is "):
            table.extend([rows(9, 2), rows(8, 2)], priority=[value, 1.0])  # type: ignore[list-item]

    with unchanged(table):
        make(give, torch.ones(()))


# Full ------------------------------------------------------------------------------------------------


def test_full_of_trajectories() -> None:
    with gear.Table.create(COLUMNS, **SIZES) as table:
        table.extend([rows(number, 1) for number in range(4)])
        with unchanged(table), pytest.raises(TableFullError) as caught:
            table.add(rows(4, 2))
        assert str(caught.value) == (
            "The table is full: 1 trajectories of 2 steps (1 blocks of 4) were to be added to 4 of at most 4 "
            "trajectories, 4 of 40 steps and 4 of 13 blocks. Create the table larger, remove trajectories, or create "
            "it with on_full='evict_oldest'."
        )


def test_full_of_steps() -> None:
    with gear.Table.create(COLUMNS, **SIZES) as table:
        table.add(rows(0, 39))
        with (
            unchanged(table),
            pytest.raises(TableFullError, match=r"of 2 steps .* 1 of at most 4 .* 39 of 40 steps and"),
        ):
            table.add(rows(1, 2))
        table.add(rows(1, 1))
        assert numbers_of(table) == [0, 1]


def test_full_of_blocks() -> None:
    with gear.Table.create(COLUMNS, **SIZES, max_blocks=3) as table:
        table.extend([rows(number, 1) for number in range(2)])
        with (
            unchanged(table),
            pytest.raises(TableFullError, match=r"\(2 blocks of 4\) .* 2 of 40 steps and 2 of 3 blocks"),
        ):
            table.add(rows(2, 5))
        table.add(rows(2, 4))


def test_extend_beyond_the_room_stores_nothing_of_it() -> None:
    with gear.Table.create(COLUMNS, **SIZES) as table:
        table.add(rows(0, 5))
        with (
            unchanged(table),
            pytest.raises(TableFullError, match=r"4 trajectories of 4 steps .* added to 1 of at most 4"),
        ):
            table.extend([rows(number, 1) for number in range(1, 5)])


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (
            [1] * 5,
            {},
            "5 trajectories of 5 steps (5 blocks of 4) were to be added to 4 of at most 4 trajectories,",
        ),
        ([21, 20], {}, "2 trajectories of 41 steps (11 blocks of 4)"),
        ([1, 5, 1], {"max_blocks": 3}, "3 trajectories of 7 steps (4 blocks of 4)"),
    ],
)
def test_more_than_the_table_can_ever_hold(lengths: list[int], options: dict[str, int], message: str) -> None:
    """Nothing is evicted in vain."""
    with gear.Table.create(COLUMNS, **SIZES, **options, on_full="evict_oldest") as table:
        table.extend([rows(number, 1) for number in range(3)])
        if not options:
            table.add(rows(3, 1))
        with unchanged(table), pytest.raises(TableFullError) as caught:
            table.extend([rows(number, length) for number, length in enumerate(lengths)])
        assert message in str(caught.value)
        assert str(caught.value).endswith("Add fewer at a time, or create the table larger.")


def test_too_long_for_the_blocks() -> None:
    with (
        gear.Table.create(COLUMNS, **SIZES, max_blocks=2) as table,
        unchanged(table),
        pytest.raises(
            SchemaError,
            match=r"Trajectory 0 has 9 steps; this table holds at most 8. Create it with a larger",
        ),
    ):
        table.add(rows(0, 9))


# Waiting ---------------------------------------------------------------------------------------------


def test_room_that_a_reader_holds_is_waited_for_until_the_deadline() -> None:
    with gear.Table.create(COLUMNS, **SIZES) as table:
        table.add(rows(0, 40))
        table.region.lock.timeout = 0.05
        ticket, _ = table.reader().begin_snapshot()
        table.remove(0)
        with unchanged(table), pytest.raises(LockTimeoutError) as caught:
            table.add(rows(1, 40))
        assert str(caught.value).startswith(
            "Room for 1 trajectories was waited for 0.05 s: what is to be reused is still being read by the processes "
            f"[{os.getpid()}] or written by []."
        )
        timer = threading.Timer(0.05, ticket.end)
        table.region.lock.timeout = 30
        timer.start()
        table.add(rows(2, 40))
        timer.join()
        assert numbers_of(table) == [2]


def test_room_that_another_write_holds_is_waited_for_when_it_can_be_evicted() -> None:
    """Several writers of a small table that evicts get in each other's way, but no error."""
    with gear.Table.create(COLUMNS, **SIZES, on_full="evict_oldest") as table:
        table.add(rows(0, 10))
        index = table.index
        slots, _ = index.begin(np.array([31]), evict=True)
        table.region.lock.timeout = 0.05
        with (
            unchanged(table),
            pytest.raises(
                LockTimeoutError, match=rf"read by the processes \[\] or written by \[{os.getpid()}\]"
            ),
        ):
            table.add(rows(1, 10))
        table.region.lock.timeout = 30
        timer = threading.Timer(0.05, index.abort, (slots,))
        timer.start()
        table.add(rows(2, 31))
        timer.join()
        assert numbers_of(table) == [2]


def test_without_eviction_an_unfinished_write_counts_as_full() -> None:
    with gear.Table.create(COLUMNS, **SIZES) as table:
        index = table.index
        slots, _ = index.begin(np.array([31]), evict=False)
        with pytest.raises(
            TableFullError,
            match=r"added to 0 of at most 4 trajectories \(1 more are being written\), 0 of 40",
        ):
            table.add(rows(1, 10))
        index.abort(slots)
        table.add(rows(1, 10))
        table.check_valid()


def test_another_thread_that_keeps_the_lock(table: gear.Table) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with table.region.lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    table.region.lock.timeout = 0.05
    calls: list[Callable[[], Any]] = [
        lambda: table.add(rows(9, 1)),
        lambda: table.extend([rows(9, 1)]),
        lambda: table.remove(0),
        lambda: table[0],
        table.indices,
        table.lengths,
        table.stats,
        table.check_valid,
        lambda: table.reader().begin_snapshot(),
    ]
    for call in calls:
        with pytest.raises(
            LockTimeoutError,
            match=rf"^Another thread of this process \(pid {os.getpid()}\) has held the lock of a private table",
        ):
            call()
    done.set()
    thread.join()
    assert numbers_of(table) == [0, 2]


def test_a_commit_that_cannot_get_the_lock_gives_its_room_back() -> None:
    """Nothing is visible, and nothing is lost for good: who needs the room next takes it back."""
    with gear.Table.create(COLUMNS, **SIZES) as table:
        table.add(rows(0, 20))
        before = state(table)
        index = table.index
        in_three_steps(table)
        genuine = index.commit
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with table.region.lock:
                held.set()
                done.wait(30)

        thread = threading.Thread(target=hold)

        def commit(*args: Any) -> None:
            thread.start()
            held.wait()
            table.region.lock.timeout = 0.05
            genuine(*args)

        index.commit = commit  # type: ignore[method-assign]
        with pytest.raises(LockTimeoutError, match=r"has held the lock of a private table for over 0.05 s"):
            table.add(rows(1, 20))
        done.set()
        thread.join()
        del index.commit  # type: ignore[method-assign]
        assert (table.region.array("state") == WRITING).sum() == 1
        table.add(rows(2, 20))
        assert numbers_of(table) == [0, 2]
        table.remove(int(table.indices()[1]))
        after = state(table)
        assert after == {**before, "stats": after["stats"]}
        assert after["stats"].blocks_in_use == before["stats"].blocks_in_use


def test_too_many_readers_at_once(table: gear.Table) -> None:
    tickets = [table.reader().begin_snapshot()[0] for _ in range(256)]
    assert sorted(ticket.row for ticket in tickets) == list(range(256))
    with pytest.raises(GearError, match="256 batches are being read at once, which is the limit"):
        table.reader().begin_snapshot()
    for ticket in tickets:
        ticket.end()
    assert number_of(table[0]) == 0


# Indices ---------------------------------------------------------------------------------------------

STALE = "names no live trajectory: it was never used, removed or evicted. The table holds 2 trajectories; table.ind"


@pytest.mark.parametrize(
    "index", [1, 3, 4, -1, 10**6, 2**70, -(2**70), np.int64(3), np.uint64(2**63), torch.tensor(3)]
)
def test_an_index_without_a_trajectory(table: gear.Table, index: Any) -> None:
    with unchanged(table), pytest.raises(StaleIndexError) as caught:
        table[index]
    assert str(caught.value).startswith(f"Index {int(index)} {STALE}")


@pytest.mark.parametrize(
    "index",
    [0.0, "0", None, True, slice(0, 1), (0,), [0], np.array([0, 2]), torch.tensor([0]), torch.tensor(0.0)],
)
def test_what_is_no_index(table: gear.Table, index: Any) -> None:
    with (
        unchanged(table),
        pytest.raises(TypeError, match=r"^Table index .* was received; expected one integer, as add()"),
    ):
        table[index]


@pytest.mark.parametrize(
    "index", [1, 3, 4, -1, 10**6, np.uint64(2**63), [0, 3], np.array([2, 0, 1]), torch.tensor([0, 7])]
)
def test_remove_of_an_index_without_a_trajectory(table: gear.Table, index: Any) -> None:
    """None of several is removed if one is stale."""
    with unchanged(table), pytest.raises(StaleIndexError, match=STALE.split(";")[0]):
        table.remove(index)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 2, 0], r"Indices \[0, 2, 0\] name a trajectory twice; expected distinct ones."),
        (0.0, "Indices of dtype float64 were received; expected integers."),
        ([0, 0.5], "Indices of dtype float64 were received; expected integers."),
        ("0", "Indices of dtype <U1 were received; expected integers."),
        (True, "Indices of dtype bool were received; expected integers."),
        (None, "Indices of dtype object were received; expected integers."),
        (2**70, "Indices of dtype object were received; expected integers."),
        (np.array([True, False]), "Indices of dtype bool were received; expected integers."),
    ],
)
def test_remove_refuses(table: gear.Table, index: Any, message: str) -> None:
    with unchanged(table), pytest.raises(StaleIndexError, match=message):
        table.remove(index)


def test_stale_index_errors_are_index_errors_too() -> None:
    assert issubclass(StaleIndexError, IndexError)
    assert issubclass(LockTimeoutError, TimeoutError)
    assert issubclass(RegionError, OSError)
    assert all(issubclass(getattr(errors, name), GearError) for name in errors.__all__)
    assert list(errors.__all__) == sorted(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_travel_between_processes(name: str) -> None:
    error = getattr(errors, name)("what was received, expected; what to do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "what was received, expected; what to do"


# Creating --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["max_steps", "max_trajectories", "block_steps", "max_blocks"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, 2**37, [1], math.inf])
def test_create_refuses_a_size(key: str, value: Any) -> None:
    name = fresh_name()
    with pytest.raises(SchemaError) as caught:
        gear.Table.create(COLUMNS, **{**SIZES, "name": name, key: value})
    assert str(caught.value) == f"{key} is {value!r}; expected an integer from 1 to 137,438,953,471."
    assert not os.path.exists(region_path(name))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"max_trajectories": 2**31},
            f"{2**31:,} trajectories were asked for; expected less than 2**31 of each.",
        ),
        (
            {"max_blocks": 2**31},
            f"{2**31:,} blocks and 4 trajectories were asked for; expected less than 2**31",
        ),
        ({"max_steps": 2**36, "block_steps": 1}, f"{2**36:,} blocks and 4 trajectories were asked for"),
    ],
)
def test_create_refuses_more_than_the_index_can_count(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        gear.Table.create(COLUMNS, **{**SIZES, **sizes})
    assert message in str(caught.value)


@pytest.mark.parametrize("on_full", ["evict", None, True, "Error", ["error"]])
def test_an_unknown_policy(on_full: Any) -> None:
    message = f"on_full is {on_full!r}; expected 'error', 'evict_oldest', 'evict_lowest_priority' or 'wait'."
    with pytest.raises(SchemaError) as caught:
        gear.Table.create(COLUMNS, **SIZES, on_full=on_full)
    assert str(caught.value) == message
    if on_full is not None:
        with named() as table, pytest.raises(SchemaError) as caught:
            gear.Table.attach(str(table.name), on_full=on_full)
        assert str(caught.value) == message


@pytest.mark.parametrize("schema", [{}, {"mask": gear.Column(torch.bool)}, {"x": torch.float32}, None])
def test_create_refuses_a_schema(schema: Any) -> None:
    name = fresh_name()
    with pytest.raises(SchemaError, match=r"expected|taken"):
        gear.Table.create(schema, **SIZES, name=name)
    assert not os.path.exists(region_path(name))


@pytest.mark.parametrize(
    "name", ["", "a/b", "../x", ".hidden", "-x", "a b", "é", "a\n", "a\0", "x" * 129, 5, b"a", True, ["a"]]
)
@pytest.mark.parametrize("how", ["create", "attach"])
def test_a_name_that_cannot_be_one(name: Any, how: str) -> None:
    with pytest.raises(RegionError) as caught:
        gear.Table.create(COLUMNS, **SIZES, name=name) if how == "create" else gear.Table.attach(name)
    assert str(caught.value).startswith(
        f"Table name {name!r} was received; expected 1 to 128 letters, digits,"
    )


@pytest.mark.parametrize("path", ["a\0b", "\0", "\ud800", b"bytes", 5, None])
def test_a_path_that_cannot_be_one(table: gear.Table, path: Any) -> None:
    with unchanged(table), pytest.raises(CheckpointError, match="expected the path of a directory"):
        table.save(path)
    with pytest.raises(CheckpointError, match="expected the path of a directory"):
        gear.Table.load(path)


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "9", "_", "x" * 128])
def test_names(name: str) -> None:
    if os.path.exists(region_path(name)):
        pytest.skip("somebody has a table of this name")
    with gear.Table.create(COLUMNS, **SIZES, name=name) as table:
        assert table.name == name
        table.unlink()


def test_a_name_that_exists() -> None:
    with named() as table:
        table.add(rows(1, 5))
        name = table.name
        before = Path(region_path(str(name))).stat()
        with unchanged(table), pytest.raises(RegionError) as caught:
            gear.Table.create(COLUMNS, **SIZES, name=name)
        assert str(caught.value) == (
            f"There is already a table named '{name}'. Use it with Table.attach('{name}'), remove it with "
            f"Table.attach('{name}').unlink(), or choose another name."
        )
        assert Path(region_path(str(name))).stat().st_ino == before.st_ino


@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_a_name_that_something_else_has(kind: str) -> None:
    name = fresh_name()
    path = Path(region_path(name))
    if kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.write_bytes(b"mine")
    else:
        path.symlink_to("/nowhere/at/all")
    try:
        with pytest.raises(RegionError, match=f"^There is already a table named '{name}'"):
            gear.Table.create(COLUMNS, **SIZES, name=name)
        assert path.is_symlink() or path.is_dir() or path.read_bytes() == b"mine"
    finally:
        path.rmdir() if kind == "directory" else path.unlink()


def test_threads_that_create_the_same_name_at_once() -> None:
    for _ in range(20):
        name = fresh_name()
        made: list[gear.Table] = []
        failed: list[str] = []
        gate = threading.Barrier(4)

        def create(name: str = name, made: Any = made, failed: Any = failed, gate: Any = gate) -> None:
            gate.wait()
            try:
                made.append(gear.Table.create(COLUMNS, **SIZES, name=name))
            except RegionError as error:
                failed.append(str(error))

        threads = [threading.Thread(target=create) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
        assert all(message.startswith(f"There is already a table named '{name}'") for message in failed)
        made[0].add(rows(1, 3))
        made[0].unlink()
        made[0].close()


@pytest.mark.parametrize("sizes", [{"max_steps": 2**36}, {"max_steps": 2**36, "max_blocks": 2**31 - 1}])
@pytest.mark.parametrize("shape", [(2**12,), (2**40,)])
def test_a_named_table_too_large_for_shared_memory(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    """Terabytes, and more than an offset can hold: an error, and nothing left behind."""
    name = fresh_name()
    with nothing_left_open(), pytest.raises(RegionError) as caught:
        gear.Table.create(
            {"x": gear.Column(torch.float32, shape)}, **{**SIZES, **sizes, "block_steps": 64}, name=name
        )
    message = str(caught.value)
    assert message.startswith("A named table of ")
    assert f" GiB) does not fit into {shared_memory.DIRECTORY}, which has " in message
    assert "remount,size=" in message
    assert not os.path.exists(region_path(name))


def test_a_named_table_for_which_the_memory_runs_out_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free when asked, gone when taken."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    name = fresh_name()
    message = rf"^A named table of [0-9,]+ bytes \(0.00 GiB\) does not fit into {re.escape(shared_memory.DIRECTORY)}"
    with nothing_left_open(), pytest.raises(RegionError, match=message):
        gear.Table.create(COLUMNS, **SIZES, name=name)
    assert not os.path.exists(region_path(name))


@pytest.mark.parametrize("broken", ["posix_fallocate", "pwrite", "link"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_creation_that_fails_leaves_nothing(
    broken: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(os, broken, fail)
    name = fresh_name()
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RegionError
    with nothing_left_open(), pytest.raises(expected) as caught:
        gear.Table.create(COLUMNS, **SIZES, name=name)
    if expected is RegionError:
        assert f"cannot be made in {shared_memory.DIRECTORY}: [Errno 5] Input/output error." in str(
            caught.value
        )
    assert not os.path.exists(region_path(name))


@pytest.mark.parametrize("shape", [(2**34,), (2**60,)])
def test_a_private_table_too_large_for_the_address_space(shape: tuple[int, ...]) -> None:
    with pytest.raises(RegionError) as caught:
        gear.Table.create({"x": gear.Column(torch.float64, shape)}, max_steps=2**20, max_trajectories=2)
    message = str(caught.value)
    assert message.startswith("A table of ")
    assert " cannot be mapped (" in message
    assert message.endswith("Lower max_steps, max_trajectories or max_blocks.")


@pytest.mark.parametrize("lengths", [[0], [3, -1], [2.5], np.array([1.0]), [[1, 2]], [True], ["3"]])
def test_required_blocks_refuses_lengths(lengths: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        gear.Table.required_blocks(lengths, 64)
    assert str(caught.value) == f"lengths is {lengths!r}; expected integers of at least 1."


@pytest.mark.parametrize("block_steps", [0, -1, 2.0, None, True])
def test_required_blocks_refuses_block_steps(block_steps: Any) -> None:
    with pytest.raises(SchemaError, match=f"block_steps is {block_steps!r}; expected a positive integer."):
        gear.Table.required_blocks([3], block_steps)


# Attaching -------------------------------------------------------------------------------------------


def test_attach_to_a_name_that_is_not_there() -> None:
    with named() as table:
        name = fresh_name()
        with pytest.raises(RegionError) as caught:
            gear.Table.attach(name)
        message = str(caught.value)
        assert message.startswith(f"There is no table named '{name}'; tables on this machine: [")
        assert repr(table.name) in message
        assert message.endswith(f"Create it with Table.create(..., name='{name}').")
        table.unlink()
        with pytest.raises(RegionError, match=f"There is no table named '{table.name}' to remove"):
            table.unlink()


@pytest.fixture
def file() -> Iterator[tuple[str, Path]]:
    """A table's file that nobody is attached to."""
    name = fresh_name()
    with gear.Table.create(COLUMNS, **SIZES, name=name) as table:
        table.add(rows(1, 5))
    path = Path(region_path(name))
    # Mapped here, so that a test run beside this one does not take it for a file that was left behind.
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        yield name, path
    path.unlink(missing_ok=True)


def _attach_fails(name: str) -> str:
    with nothing_left_open(), pytest.raises(RegionError) as caught:
        gear.Table.attach(name)
    return str(caught.value)


@pytest.mark.parametrize("data", [b"", b"short", b"x" * 64, bytes(5000), b"GEARLDR\0"])
def test_attach_to_a_file_that_is_no_table(file: tuple[str, Path], data: bytes) -> None:
    name, path = file
    path.write_bytes(data)
    message = _attach_fails(name)
    assert message.startswith(
        f"Table '{name}' ({path}) is not a Gear Loader table: it starts with {data[:8]!r}, "
    )
    assert path.read_bytes() == data


def test_attach_to_a_table_of_another_version(file: tuple[str, Path]) -> None:
    name, path = file
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", FORMAT_VERSION + 5)
    path.write_bytes(data)
    assert _attach_fails(name) == (
        f"Table '{name}' ({path}) has table format {FORMAT_VERSION + 5}; this version of Gear Loader reads "
        f"format {FORMAT_VERSION}. "
        "Use the version that wrote it, or create the table anew."
    )


@pytest.mark.parametrize("left", [1, 64, 4096, -1])
def test_attach_to_a_truncated_table(file: tuple[str, Path], left: int) -> None:
    name, path = file
    size = path.stat().st_size
    os.truncate(path, size - 1 if left < 0 else left)
    message = _attach_fails(name)
    assert message.startswith(f"Table '{name}' ({path}) ")
    if left in (4096, -1):
        kept = path.stat().st_size
        assert (
            f"is damaged: it has {kept} bytes, its header says {size}, its schema needs {size}. Remove"
            in message
        )


def test_attach_to_a_table_with_a_flipped_header(file: tuple[str, Path]) -> None:
    name, path = file
    data = path.read_bytes()
    json_bytes = struct.unpack("<I", data[12:16])[0]
    for place in [0, 5, 9, 13, 17, 23, 25, *range(64, 64 + json_bytes, 97)]:
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        message = _attach_fails(name)
        assert message.startswith(f"Table '{name}' ({path}) ")
        assert any(text in message for text in ("is not a Gear", "has table format", "has a damaged header"))
    path.write_bytes(data)
    with gear.Table.attach(name) as table:
        assert numbers_of(table) == [1]


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "socket"])
def test_attach_to_what_is_no_file(file: tuple[str, Path], kind: str, tmp_path: Path) -> None:
    name, path = file
    data = path.read_bytes()
    path.unlink()
    server = socket.socket(socket.AF_UNIX)
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "target").write_bytes(data)
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        server.bind(str(path))
    try:
        message = f"Table '{name}' ({path}) is not a regular file. Choose another name or remove it."
        with pytest.raises(RegionError) as caught:
            gear.Table.attach(name)
        assert str(caught.value) == message
    finally:
        server.close()
        path.rmdir() if kind == "directory" else path.unlink()


def test_attach_without_permission(file: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = file

    def refuse(*args: Any) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    assert (
        _attach_fails(name) == f"Table '{name}' cannot be attached: [Errno 13] Permission denied: '{path}'."
    )


def test_a_handle_whose_table_is_gone() -> None:
    with named() as table:
        data = pickle.dumps(table)
    with pytest.raises(RegionError, match=f"There is no table named '{table.name}'"):
        pickle.loads(data)


# Closed and private ----------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [True, False])
def test_a_closed_table(private: bool) -> None:
    if private:
        table = gear.Table.create(COLUMNS, **SIZES)
        table.close()
    else:
        with named() as table:
            pass
    calls: list[Callable[[], Any]] = [
        lambda: len(table),
        lambda: table.num_steps,
        lambda: table[0],
        lambda: table.add(rows(1, 3)),
        lambda: table.extend([rows(1, 3)]),
        lambda: table.extend([]),
        lambda: table.remove(0),
        table.indices,
        table.lengths,
        table.stats,
        table.check_valid,
        lambda: table.reader().begin_snapshot(),
        table.reader,
        lambda: table.region.column("number"),
        lambda: table.region.array("extent"),
    ]
    for call in calls:
        with pytest.raises(TableClosedError) as caught:
            call()
        name = "(private)" if private else table.name
        assert str(caught.value) == f"The table {name} is closed; attach or create it again."
    table.close()
    Ticket().end()
    assert "closed" in repr(table)
    assert table.schema == COLUMNS


def test_a_private_table_does_not_travel() -> None:
    with gear.Table.create(COLUMNS, **SIZES) as table, unchanged(table):
        with pytest.raises(
            PrivateTableError, match=r"cannot be sent to another process. Create it with a name, Table.cr"
        ):
            pickle.dumps(table)
        with pytest.raises(
            PrivateTableError, match=r"A private table has no name to remove; close\(\) frees its memory"
        ):
            table.unlink()
