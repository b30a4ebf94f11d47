"""Every refused input says what was received, what was expected and what to do, and changes nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import mmap
import os
import pickle
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested_table
from table_common import COLUMNS, fresh_name, in_three_steps, named, numbers_of, rows, state, unchanged

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
from gear_loader.storage.readers import Ticket
from gear_loader.storage.region import _Mapping
from gear_loader.storage.shared_memory import region_path
from gear_loader.storage.states import WRITING

SIZES: dict[str, Any] = {"max_steps": 40, "max_trajectories": 4, "block_steps": 4}


@pytest.fixture
def table() -> Iterator[gear.Table]:
    """Two trajectories, and an index that has been used and is free again."""
    with gear.Table.create(COLUMNS, **nested_table(SIZES)) as table:
        table.extend([rows(0, 5), rows(1, 9), rows(2, 1)], priority=[1.0, 0.0, 2.5])
        table.remove(1)
        yield table


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """Fails if the block leaves a descriptor or a mapping behind."""
    gc.disable()  # it might close what is older
    try:
        descriptors, mappings = len(os.listdir("/proc/self/fd")), set(_Mapping.registry)
        yield
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert set(_Mapping.registry) == mappings
    finally:
        gc.enable()


def refused(
    table: gear.Table, error: type[Exception], message: str, call: Callable[..., Any], *given: Any, **o: Any
) -> None:
    """Fails unless the call raises the error with this in its message, and changes nothing."""
    with unchanged(table), pytest.raises(error) as caught:
        call(*given, **o)
    assert message in str(caught.value)


# Trajectories: what `Schema.validate` refuses is in test_schema.py ------------------------------------


def test_each_way_to_add_refuses_all_for_one(table: gear.Table) -> None:
    bad = {**rows(9, 6), "number": np.zeros(6)}
    message = "Column 'number' of {} has dtype float64; expected torch.int64"
    refused(table, SchemaError, message.format("the trajectory"), table.add, bad)
    for place in (0, 2):
        given = [rows(7, 2), rows(8, 3)]
        given.insert(place, bad)
        for way in (list, iter):
            refused(table, SchemaError, message.format(f"trajectory {place}"), table.extend, way(given))
    long = "Trajectory {} has 41 steps; this table holds at most 40. Create it with a larger max_steps"
    refused(table, SchemaError, long.format(0), table.add, rows(9, 41))
    refused(table, SchemaError, long.format(1), table.extend, [rows(8, 1), rows(9, 41)])


_TOO_MANY = "Add fewer at a time, or create the table larger."


@pytest.mark.parametrize("on_full", ["error", "evict_oldest"])
def test_a_refused_trajectory_evicts_nothing(on_full: Any) -> None:
    with gear.Table.create(COLUMNS, **nested_table({**SIZES, "on_full": on_full})) as table:
        table.extend([rows(number, 10) for number in range(4)])
        for bad in (rows(9, 0), rows(9, 41), {}, None):
            refused(table, SchemaError, "", table.add, bad)
        refused(table, SchemaError, "priority is -1.0", table.add, rows(9, 3), priority=-1.0)


def test_priorities_that_are_refused(table: gear.Table) -> None:
    single: list[tuple[Any, str]] = [
        (-1e-30, "priority is -1e-30; expected a finite number"),
        (-math.inf, "priority is -inf; expected a finite number"),
        (1e39, "priority is 1e+39; expected a finite number (as float32) that is not negative."),
        (10**400, "priority is 1000"),
        ([None], "priority is [None]; expected a number"),
        ("1.0", "priority is '1.0'; expected a number"),
        (1 + 0j, "priority is (1+0j); expected a number"),
        ([[1.0, 2.0]], "priority has shape [1, 2]; expected one number or ["),
        ([1.0, [2.0]], "priority is [1.0, [2.0]]; expected a number"),
        (np.array(math.nan), "priority is nan; expected a finite number"),
        (torch.tensor(-2.0), "priority is -2.0; expected a finite number"),
        (torch.tensor(math.nan).bfloat16(), "priority is nan; expected a finite number"),
        (np.complex64(1), "; expected a number"),
        (-1e-300, "priority is -1e-300; expected a finite number"),
    ]
    for priority, message in single:
        refused(table, SchemaError, message, table.add, rows(9, 6), priority=priority)
    many: list[tuple[Any, str]] = [
        ([1.0, math.nan, 1.0], "priority of trajectory 1 is nan; expected"),
        (torch.tensor([1.0, math.inf, -3.0]), "priority of trajectory 1 is inf; expected"),
        ([1.0, 1.0], "priority has shape [2]; expected one number or [3]."),
        ([], "priority has shape [0]; expected one number or [3]."),
    ]
    for priority, message in many:
        refused(table, SchemaError, message, table.extend, [rows(9, 2)] * 3, priority=priority)
    stack = {name: value[None] for name, value in rows(9, 6).items()}
    refused(table, SchemaError, "priority is nan", table.extend, stack, lengths=[6], priority=math.nan)
    assert float(table._engine.region.array("priority")[table.add(rows(9, 2), priority=-0.0)]) == 0


def stack(*lengths: int, padded: int = 6, **changes: Any) -> dict[str, Any]:
    columns = {name: np.stack([value] * len(lengths)) for name, value in rows(9, padded).items()}
    return {name: value for name, value in {**columns, **changes}.items() if value is not None}


_INTEGERS = "expected integers [n]."
_ARE = "the stacked trajectories"
BAD_STACKS: list[tuple[Any, Any, str]] = [
    (rows(9, 6), None, "One mapping was received without lengths; expected an iterable of trajectories, o"),
    (5, None, "A int was received; expected an iterable of trajectories."),
    ("ab", None, "trajectory 0 is a str; expected a mapping of column names to arrays"),
    ([rows(9, 6)], [6], "With lengths a list was received; expected one mapping of stacked arrays"),
    (stack(6, 6), [6], "shape [2, 6]; expected [1, T, ...] as lengths has 1 entries."),
    (stack(6, 6), [6, 0], "lengths[1] is 0; expected 1 to 6, the stacked arrays' T."),
    (stack(6, 6), [-1, 6], "lengths[0] is -1; expected 1 to 6, the stacked arrays' T."),
    (stack(6, 6), [1, 7], "lengths[1] is 7; expected 1 to 6, the stacked arrays' T."),
    (stack(6), np.array([2**63], dtype=np.uint64), "lengths[0] is 9223372036854775808; expected 1 to"),
    (stack(6), [6.0], f"lengths is [6.0]; {_INTEGERS}"),
    (stack(6), [True], f"lengths is [True]; {_INTEGERS}"),
    (stack(6), 6, f"lengths has dtype int64 and shape []; {_INTEGERS}"),
    (stack(6), [[6], [6, 6]], f"lengths is [[6], [6, 6]]; {_INTEGERS}"),
    (stack(6), torch.tensor([6.0]), f"lengths is float32 [1]: 6.0; {_INTEGERS}"),
    (stack(6, step=np.zeros((1, 5), np.int32)), [6], "shape [1, 5]; expected [1, 6, ...]"),
    (stack(6, step=np.zeros(6, np.int32)), [6], "shape [6]; expected [1, 6, ...]"),
    (stack(6, step=[[0] * 6]), [6], f"Column 'step' of {_ARE} is a list; "),
    (stack(6, step=torch.zeros(1, 6, dtype=torch.int32).to_sparse()), [6], "is a tensor of layout torch.s"),
    (stack(6, step=np.zeros((1, 6))), [6], f"Column 'step' of {_ARE} has dtype float64; expected torch.in"),
    (stack(6, value=np.zeros((1, 6, 2), np.float32)), [6], f"Column 'value' of {_ARE} has shape [6, 2]; e"),
    (stack(6, step=None), [6], f"{_ARE} has the columns ['number', 'length', 'value', 'check']; missing: "),
    ({"number": np.zeros((0, 6))}, [], "missing: ['step', 'length', 'value', 'check']"),
    (stack(6, padded=0), [1], f"{_ARE} has zero steps; expected at least one."),
    (stack(41, padded=50), [41], "Trajectory 0 has 41 steps; this table holds at most 40. "),
]


@pytest.mark.parametrize("case", range(len(BAD_STACKS)))
def test_extend_refuses(table: gear.Table, case: int) -> None:
    given, lengths, message = BAD_STACKS[case]
    refused(
        table, SchemaError, message, table.extend, given, **({} if lengths is None else {"lengths": lengths})
    )


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


_HOLDS = "tensor whose storage holds"
WITHOUT_DATA: dict[str, tuple[Callable[[Use, torch.Tensor], None], str]] = {
    "zero tensor": (lambda use, v: use(torch._efficientzerotensor(v.shape)), "tensor without storage"),
    "no storage": (lambda use, v: use(emptied(v.clone())), f"{_HOLDS} 0 bytes, while its"),
    "small storage": (lambda use, v: use(emptied(v.clone(), 3)), f"{_HOLDS} 3 bytes, while"),
    "view": (lambda use, v: use(emptied(torch.stack([v, v])[1], v.nbytes)), _HOLDS),
    "strided": (lambda use, v: use(emptied(torch.stack([v, v], -1)[..., 0], v.nbytes - 1)), _HOLDS),
    "functionalize": (inside(torch.func.functionalize), "tensor without storage"),
    "grad": (inside(torch.func.grad), "tensor without storage"),
    "vmap": (lambda use, v: inside(torch.func.vmap)(use, v[None]), "tensor without storage"),
    "jagged": (lambda use, v: use(torch.nested.nested_tensor([*v], layout=torch.jagged)), "nested tensor"),
    "nested": (lambda use, v: use(torch.nested.nested_tensor([*v], layout=torch.strided)), "nested tensor"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", WITHOUT_DATA)
def test_a_tensor_without_its_data_is_refused(table: gear.Table, kind: str) -> None:
    make, message = WITHOUT_DATA[kind]
    writer = table.writer()
    nested = kind in ("jagged", "nested")
    ways: dict[str, tuple[Callable[[Any], object], tuple[int, ...]]] = {
        "add": (table.add, (6, 3)),
        "generator": (lambda given: table.extend(iter([rows(1, 2), given])), (6, 3)),
        "stacked": (lambda given: table.extend(given, lengths=[5]), (1, 6, 3)),
        "append": (writer.append, (1, 3) if nested else (3,)),
    }
    for way, (store, shape) in ways.items():
        caught: list[str] = []

        def give(value: torch.Tensor, way: str = way, store: Any = store, caught: list[str] = caught) -> None:
            cut = {"stacked": (None,), "append": (0,)}.get(way, (...,))
            given = {name: values[cut] for name, values in rows(9, 6).items()}
            with pytest.raises(SchemaError) as error:
                store({**given, "value": value})
            caught.append(str(error.value))

        with unchanged(table):
            make(give, torch.ones(shape))
        assert caught[0].startswith("Column 'value' of ")
        assert f" is a {message}" in caught[0]


@pytest.mark.parametrize("kind", [kind for kind in WITHOUT_DATA if kind not in ("jagged", "nested")])
def test_a_priority_without_its_data_is_refused(table: gear.Table, kind: str) -> None:
    make, message = WITHOUT_DATA[kind]
    dataset = gear.ReplayDataset(table, batch_size=2, windows=gear.Window(1), sampler=gear.Prioritized())
    index = table.indices()
    with table.writer() as writer:
        writer.append(rows(9, 6))

        def give(value: torch.Tensor) -> None:
            error = pytest.raises(SchemaError, match=f"priority is (a {message}|\\[)")
            with error:
                table.extend([rows(9, 2)] * 2, priority=value)
            if kind in ("no storage", "view"):
                one: Any = emptied(torch.ones(()))
                for call in (
                    lambda: table.add(rows(9, 6), priority=one),
                    lambda: table.extend([rows(9, 2)] * 2, priority=[one, 1.0]),
                    lambda: writer.commit(one),
                    lambda: dataset.update_priority(index, value),
                ):
                    with pytest.raises(SchemaError, match="priority is "):
                        call()

        with unchanged(table):
            make(give, torch.ones(2))
        writer.discard()


# Full ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "options", "added", "message"),
    [
        ([1] * 4, {}, [2], "The table is full: 1 trajectory of 2 steps (1 block of 4) to be added"),
        ([1] * 4, {}, [2], "4 of 40 steps and 4 of 13 blocks. Create the table larger, remove trajectorie"),
        ([39], {}, [2], "1 of at most 4 trajectories, 39 of 40 steps and"),
        ([1, 1], {"max_blocks": 3}, [5], "1 trajectory of 5 steps (2 blocks of 4) to be added to 2"),
        ([5], {}, [1] * 4, "4 trajectories of 4 steps (4 blocks of 4) to be added to 1 of at most 4"),
        ([1] * 4, {"on_full": "evict_oldest"}, [1] * 5, "5 trajectories of 5 steps (5 blocks of 4) to be a"),
        ([1] * 3, {"on_full": "evict_oldest"}, [21, 20], "2 trajectories of 41 steps (11 blocks of 4)"),
        ([1] * 3, {"on_full": "evict_oldest", "max_blocks": 3}, [1, 5, 1], "3 trajectories of 7 steps (4 "),
        ([1] * 3, {"on_full": "evict_oldest", "max_blocks": 3}, [1, 5, 1], _TOO_MANY),
    ],
)
def test_full(lengths: Any, options: Any, added: list[int], message: str) -> None:
    """What can never fit evicts nothing."""
    with gear.Table.create(COLUMNS, **nested_table({**SIZES, **options})) as table:
        table.extend([rows(number, length) for number, length in enumerate(lengths)])
        refused(table, TableFullError, message, table.extend, [rows(9, length) for length in added])
        if lengths == [39]:
            table.add(rows(9, 1))
    with gear.Table.create(COLUMNS, **nested_table({**SIZES, "max_blocks": 2})) as table:
        message = "Trajectory 0 has 9 steps; this table holds at most 8. Create it with a larger"
        refused(table, SchemaError, message, table.add, rows(0, 9))


def test_errors() -> None:
    """Their kinds, and that they travel between processes."""
    kinds = {
        StaleIndexError: IndexError,
        LockTimeoutError: TimeoutError,
        RegionError: OSError,
        SchemaError: ValueError,
    }
    assert all(issubclass(error, kind) for error, kind in kinds.items())
    assert list(errors.__all__) == sorted(errors.__all__)
    for name in errors.__all__:
        error = getattr(errors, name)("what was received, expected; what to do")
        assert isinstance(error, GearError)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), "what was received, expected; what to do")


_SIZE = "expected an integer from 1 to 137,438,953,471."


_ASKED = "were asked for; expected less than 2**31 of each."


_DOUBLES = {"x": gear.Column(torch.float64, (2**34,))}


_LARGE: dict[str, Any] = {"max_steps": 2**36, "block_steps": 64}
_HUGE = {"x": gear.Column(torch.float64, (2**60,))}


BAD_TABLES: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"max_steps": n}, SchemaError, f"max_steps is {n!r}; {_SIZE}")
        for n in (0, -1, 1.0, "1", True, 2**37, [1])
    ),
    *(
        ({key: 0}, SchemaError, f"{key} is 0; {_SIZE}")
        for key in ("max_trajectories", "block_steps", "max_blocks")
    ),
    ({"max_trajectories": 2**31}, SchemaError, f"{2**31:,} trajectories {_ASKED}"),
    ({"max_blocks": 2**31}, SchemaError, f"{2**31:,} blocks and 4 trajectories {_ASKED}"),
    ({"max_steps": 2**36, "block_steps": 1}, SchemaError, f"{2**36:,} blocks and 4 trajectories {_ASKED}"),
    ({"schema": {}}, SchemaError, "with at least one column"),
    ({"schema": {"mask": gear.Column(torch.bool)}}, SchemaError, "taken"),
    ({"schema": {"x": torch.float32}}, SchemaError, "expected gear_loader.Column"),
    # Terabytes, and more than an offset can hold.
    (
        {**_LARGE, "schema": {"x": gear.Column(torch.float32, (2**12,))}},
        RegionError,
        " GiB) does not fit into ",
    ),
    ({**_LARGE, "schema": {"x": gear.Column(torch.float32, (2**40,))}}, RegionError, "remount,size="),
    ({"schema": _DOUBLES, "max_steps": 2**20, "name": None}, RegionError, " cannot be mapped ("),
    ({"schema": _HUGE, "max_steps": 2**20, "name": None}, RegionError, "Lower max_steps, max_trajectories"),
]


@pytest.mark.parametrize("case", range(len(BAD_TABLES)))
def test_create_refuses(case: int) -> None:
    options, error, message = BAD_TABLES[case]
    name = fresh_name()
    with nothing_left_open(), pytest.raises(error) as caught:
        gear.Table.create(**nested_table({"schema": COLUMNS, **SIZES, "name": name, **options}))
    assert message in str(caught.value)
    assert not os.path.exists(region_path(name))


def test_names_policies_and_paths() -> None:
    wrong: list[Any] = ["", "a/b", "../x", ".hidden", "-x", "a b", "é", "a\n", "a\0", "x" * 129]
    wrong += [5, b"a", True, ["a"]]
    for name in wrong:
        message = f"Table name {name!r} was received; expected 1 to 128 letters, digits,"
        for call in (functools.partial(gear.Table.create, COLUMNS, **SIZES), gear.Table.attach):
            with pytest.raises(RegionError) as caught:
                call(name=name)  # type: ignore[operator]
            assert str(caught.value).startswith(message)
    wrong = ["a\0b", "\ud800", b"bytes", 5, None]
    for name in ("A.b-c_9", "9", "_", "x" * 128):
        with gear.Table.create(COLUMNS, **nested_table({**SIZES, "name": name})) as table:
            assert table.name == name
            for policy in ("evict", True, ["error"]):
                with pytest.raises(SchemaError, match=r"on_full is .*; expected 'error', 'evict_oldest', '"):
                    gear.Table.attach(name, on_full=policy)  # type: ignore[arg-type]
            table.unlink()
            for path in wrong:
                for load in (table.save, gear.Table.load):
                    with pytest.raises(CheckpointError, match="expected the path of a local"):
                        load(path)


@contextlib.contextmanager
def locked_by_a_thread(table: gear.Table) -> Iterator[None]:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with table._engine.region.lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def calls_of(table: gear.Table) -> list[Callable[[], Any]]:
    """What takes the lock."""
    return [
        *(lambda: table.add(rows(9, 1)), lambda: table.extend([rows(9, 1)]), lambda: table.remove(0)),
        *(lambda: table[0], table.indices, table.lengths, table.stats),
        *(table.check_valid, lambda: table._engine.reader().begin_snapshot()),
    ]


def test_another_thread_that_keeps_the_lock(table: gear.Table) -> None:
    table._engine.region.lock.timeout = 0.05
    message = rf"^Another thread of this process \(pid {os.getpid()}\) has held the lock of a private table"
    with locked_by_a_thread(table):
        for call in calls_of(table):
            with pytest.raises(LockTimeoutError, match=message):
                call()
    assert numbers_of(table) == [0, 2]


def test_a_commit_that_cannot_get_the_lock_gives_its_room_back() -> None:
    """Nothing is visible, and nothing is lost for good: whatever needs the room next takes it back."""
    with gear.Table.create(COLUMNS, **nested_table(SIZES)) as table:
        table.add(rows(0, 20))
        before = state(table)
        index = table._engine.index
        in_three_steps(table)
        genuine, lock = index.commit, contextlib.ExitStack()

        def commit(*args: Any) -> None:
            lock.enter_context(locked_by_a_thread(table))
            table._engine.region.lock.timeout = 0.05
            genuine(*args)

        index.commit = commit  # type: ignore[method-assign]
        with pytest.raises(LockTimeoutError, match=r"has held the lock of a private table for over 0.05 s"):
            table.add(rows(1, 20))
        lock.close()
        del index.commit  # type: ignore[method-assign]
        assert (table._engine.region.array("state") == WRITING).sum() == 1
        table.add(rows(2, 20))
        assert numbers_of(table) == [0, 2]
        table.remove(int(table.indices()[1]))
        after = state(table)
        assert after == {**before, "stats": after["stats"]}
        assert after["stats"].blocks_in_use == before["stats"].blocks_in_use


STALE = "is stale: its trajectory was removed or evicted, or it was never used"


def test_indices_without_a_trajectory(table: gear.Table) -> None:
    one: list[Any] = [1, 3, 4, -1, 2**70, -(2**70), np.int64(3), np.uint64(2**63), torch.tensor(3)]
    for index in one:
        message = f"Index {int(index)} {STALE}. The table holds 2 trajectories; table.ind"
        refused(table, StaleIndexError, message, table.__getitem__, index)
    for indices in (1, 4, -1, np.uint64(2**63), [0, 3], np.array([2, 0, 1]), torch.tensor([0, 7])):
        refused(table, StaleIndexError, STALE, table.remove, indices)
    received = "was received; expected one integer, as add()"
    wrong: list[Any] = [
        0.0,
        "0",
        None,
        True,
        slice(0, 1),
        [0],
        np.array([0, 2]),
        torch.tensor([0]),
        torch.tensor(0.0),
    ]
    for index in wrong:
        refused(table, TypeError, received, table.__getitem__, index)
    message = "Indices [0, 2, 0] name a trajectory twice; expected distinct ones."
    refused(table, StaleIndexError, message, table.remove, [0, 2, 0])
    for index in ([0, 0.5], "0", True, None, 2**70):
        message = f"index is {index!r}; expected an integer, or integers [n], as add() returns them."
        refused(table, SchemaError, message, table.remove, index)


# Creating --------------------------------------------------------------------------------------------


def test_a_name_that_exists() -> None:
    with named() as table:
        table.add(rows(1, 5))
        name = table.name
        path = Path(region_path(str(name)))
        before = path.stat()
        message = (
            f"There is already a table named '{name}'. Use it with Table.attach('{name}'), remove it with "
            f"Table.attach('{name}').unlink(), or choose another name."
        )
        refused(table, RegionError, message, gear.Table.create, COLUMNS, **SIZES, name=name)
        assert path.stat().st_ino == before.st_ino
    for make in (lambda: path.write_bytes(b"mine"), lambda: path.symlink_to("/nowhere/at/all")):
        make()
        with pytest.raises(RegionError, match=f"^There is already a table named '{name}'"):
            gear.Table.create(COLUMNS, **nested_table({**SIZES, "name": name}))
        assert path.is_symlink() or path.read_bytes() == b"mine"
        path.unlink()


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("posix_fallocate", OSError(28, "No space left on device")),  # free when asked, gone when taken
        ("posix_fallocate", OSError(5, "Input/output error")),
        ("ftruncate", KeyboardInterrupt()),
        ("link", OSError(5, "Input/output error")),
        ("link", KeyboardInterrupt()),
    ],
)
def test_a_creation_that_fails_leaves_nothing(
    broken: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(os, broken, fail)
    name = fresh_name()
    expected = RegionError if isinstance(error, OSError) else KeyboardInterrupt
    with nothing_left_open(), pytest.raises(expected) as caught:
        gear.Table.create(COLUMNS, **nested_table({**SIZES, "name": name}))
    if isinstance(error, OSError):
        where = re.escape(shared_memory.DIRECTORY)
        message = rf"cannot be made in {where}: \[Errno 5\] Input/output error\."
        if error.errno == 28:
            message = rf"^A named table of [0-9,]+ bytes \(0.00 GiB\) does not fit into {where}"
        assert re.search(message, str(caught.value))
    assert not os.path.exists(region_path(name))


def test_required_blocks_refuses() -> None:
    lengths: Any
    for lengths in ([0], [3, -1], [2.5], [[1, 2]], [True], ["3"]):
        with pytest.raises(SchemaError) as caught:
            gear.Table.required_blocks(lengths, 64)
        assert str(caught.value) == f"lengths is {lengths!r}; expected integers of at least 1."
    steps: Any
    for steps in (0, -1, 2.0, None, True):
        with pytest.raises(
            SchemaError, match=f"block_steps is {steps!r}; expected an integer of at least 1."
        ):
            gear.Table.required_blocks([3], steps)


def test_attach_to_a_name_that_is_not_there() -> None:
    with named() as table:
        name = fresh_name()
        with pytest.raises(RegionError) as caught:
            gear.Table.attach(name)
        message = str(caught.value)
        assert message.startswith(f"There is no table named '{name}'; tables on this machine: [")
        assert repr(table.name) in message
        assert message.endswith(f"Create it with Table.create(..., name='{name}').")
        data = pickle.dumps(table)
        table.unlink()
        with pytest.raises(RegionError, match=f"There is no table named '{table.name}' to remove"):
            table.unlink()
        with pytest.raises(RegionError, match=f"There is no table named '{table.name}'"):
            pickle.loads(data)


@pytest.fixture
def file() -> Iterator[tuple[str, Path]]:
    """A table's file that no process is attached to."""
    name = fresh_name()
    with gear.Table.create(COLUMNS, **nested_table({**SIZES, "name": name})) as table:
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


def test_attach_to_a_damaged_file(file: tuple[str, Path]) -> None:
    name, path = file
    data = path.read_bytes()
    for damaged, message in (
        (b"short", "is not a Gear Loader table: it starts"),
        (data[:-1], "is damaged: it"),
    ):
        path.write_bytes(damaged)
        assert _attach_fails(name).startswith(f"Table '{name}' ({path}) {message}")
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "socket", "refused"])
def test_attach_to_what_is_no_file(
    file: tuple[str, Path], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = file
    if kind == "refused":
        error = PermissionError(13, "Permission denied", str(path))
        monkeypatch.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(error))
        message = f"Table '{name}' cannot be attached: [Errno 13] Permission denied: '{path}'."
        assert _attach_fails(name) == message
        return
    (tmp_path / "target").write_bytes(path.read_bytes())
    path.unlink()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        make: dict[str, Callable[[], Any]] = {
            "directory": path.mkdir,
            "link": lambda: path.symlink_to(tmp_path / "target"),
            "pipe": lambda: os.mkfifo(path),
            "socket": lambda: server.bind(str(path)),
        }
        make[kind]()
        try:
            message = f"Table '{name}' ({path}) is not a regular file. Choose another name or remove it."
            assert _attach_fails(name) == message
        finally:
            path.rmdir() if kind == "directory" else path.unlink()


# Closed and private ----------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [True, False])
def test_a_closed_table(private: bool) -> None:
    with gear.Table.create(COLUMNS, **nested_table(SIZES)) if private else named() as table:
        pass
    for call in [
        *calls_of(table),
        *(lambda: len(table), lambda: table.num_steps, lambda: table.extend([]), table._engine.reader),
        table.writer,
        *(lambda: table._engine.region.column("number"), lambda: table._engine.region.array("extent")),
    ]:
        with pytest.raises(TableClosedError) as caught:
            call()
        name = "(private)" if private else table.name
        assert str(caught.value) == f"The table {name} is closed; attach or create it again."
    table.close()
    Ticket().end()
    assert repr(table) == f"<Table {'private' if private else table.name}, closed>"
    assert table.schema == COLUMNS


def test_a_private_table_does_not_travel() -> None:
    with gear.Table.create(COLUMNS, **nested_table(SIZES)) as table:
        message = "cannot be sent to another process. Create it with a name, Table.cr"
        refused(table, PrivateTableError, message, pickle.dumps, table)
        message = "A private table has no name to remove; close() frees its memory"
        refused(table, PrivateTableError, message, table.unlink)


def test_without_eviction_an_unfinished_write_counts_as_full() -> None:
    with gear.Table.create(COLUMNS, **nested_table(SIZES)) as table:
        slots, _ = table._engine.index.begin(np.array([31]), evict=False)
        message = "added to 0 of at most 4 trajectories (1 more are being written), 31 of 40"
        refused(table, TableFullError, message, table.add, rows(1, 10))
        table._engine.index.abort(slots)
        table.add(rows(1, 10))
        table.check_valid()
