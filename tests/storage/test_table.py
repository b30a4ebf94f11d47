"""What a table stores and gives back, bit for bit; eviction, removal and reuse; the life of a handle."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import random
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested_table
from table_common import (
    COLUMNS,
    fresh_name,
    in_three_steps,
    named,
    number_of,
    numbers_of,
    rows,
)

import gear_loader as gear
from gear_loader.errors import SchemaError, StaleIndexError, TableFullError
from gear_loader.storage.engine import Engine
from gear_loader.storage.region import _Mapping
from gear_loader.storage.shared_memory import region_path

SCALAR = {"x": gear.Column(torch.int64)}


def steps(number: int, length: int) -> dict[str, np.ndarray]:
    """For tables of `SCALAR`: number * 1000, number * 1000 + 1, ..."""
    return {"x": np.arange(length, dtype=np.int64) + number * 1000}


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with gear.Table.create(COLUMNS, max_steps=200, max_trajectories=16, block_steps=4) as table:
        yield table
        table.check_valid()


def test_what_was_added_and_what_is_read_are_copies(table: gear.Table) -> None:
    trajectory = rows(1, 9)
    index = table.add(trajectory, priority=np.float32(1e-30))
    for value in (*trajectory.values(), *table[index].values(), table.indices(), table.lengths()):
        value[:] = 0
    assert table._engine.region.array("priority")[index] == np.float32(1e-30)
    for same in (index, np.int64(index), np.uint8(index), torch.tensor(index)):
        assert number_of(table[same]) == 1
    assert table.indices().dtype == table.lengths().dtype == np.int64
    assert table.lengths().tolist() == [9]


# extend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "tuple", "generator", "dict values"])
def test_extend_takes_any_iterable(table: gear.Table, kind: str) -> None:
    given = [rows(number, 1 + number % 9) for number in range(10)]

    def of(items: list[Any]) -> Any:
        kinds: dict[str, Any] = {"list": list, "tuple": tuple, "generator": iter}
        return kinds[kind](items) if kind in kinds else dict(enumerate(items)).values()

    indices = table.extend(of(given))
    assert indices.dtype == np.int64
    assert [number_of(table[int(index)]) for index in indices] == list(range(10))
    assert table.indices().tolist() == indices.tolist()
    for options in ({}, {"priority": []}):
        none = table.extend(of([]), **options)
        assert (none.dtype, none.shape) == (np.int64, (0,))
    for priority in ([0.5, 0.0, 4.0], np.array([0.5, 0.0, 4.0]), torch.tensor([0.5, 0.0, 4.0]).bfloat16(), 2):
        indices = table.extend(
            of(given[:3] if kind == "list" else []), priority=priority if kind == "list" else []
        )
        expected = [2.0] * 3 if isinstance(priority, int) else [0.5, 0.0, 4.0]
        assert table._engine.region.array("priority")[indices].tolist() == expected[: len(indices)]
        table.remove(indices)


class Refilling(Sequence[Any]):
    """Trajectories that are read into the same arrays of the same dict, by iteration and by index."""

    def __init__(self, numbers: range, length: int, *, arrays: bool) -> None:
        self.numbers, self.buffer, self.arrays = numbers, rows(0, length), arrays

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> dict[str, np.ndarray]:
        values = rows(self.numbers[place], len(self.buffer["step"]))
        if self.arrays:
            for name, column in values.items():
                self.buffer[name][:] = column
        else:
            self.buffer.update(values)
        return self.buffer


class Computed(Mapping[str, Any]):
    """A mapping that computes its columns into one buffer."""

    buffer = np.empty(1000, dtype=np.uint8)

    def __init__(self, number: int, length: int) -> None:
        self.columns = rows(number, length)

    def __getitem__(self, name: str) -> np.ndarray:
        values = self.columns[name]
        target = self.buffer[: values.nbytes].view(values.dtype).reshape(values.shape)
        target[...] = values
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __len__(self) -> int:
        return len(COLUMNS)


@pytest.mark.parametrize("arrays", [False, True])
def test_an_iterable_may_use_its_dict_or_its_arrays_again(table: gear.Table, arrays: bool) -> None:
    table.extend(Refilling(range(5), 6, arrays=arrays))
    table.extend_as(Refilling(range(5, 10), 6, arrays=arrays), ids=[-1] * 5)
    table.add(Computed(10, 7))
    table.extend([Computed(11, 5), Computed(12, 9)])
    with table.writer() as writer:
        writer.append(Computed(13, 3))
    assert numbers_of(table) == list(range(14))


def _stack(lengths: list[int], padded: int) -> dict[str, np.ndarray]:
    trajectories = [rows(number, length) for number, length in enumerate(lengths)]

    def filled(values: np.ndarray) -> np.ndarray:
        return np.concatenate((values, np.full((padded - len(values), *values.shape[1:]), 77, values.dtype)))

    return {name: np.stack([filled(one[name]) for one in trajectories]) for name in COLUMNS}


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("numpy", list),
        ("torch", np.array),
        ("torch views", np.uint8),
        ("numpy views", torch.tensor),
        ("mixed", lambda x: torch.tensor(x).int()),
    ],
)
def test_extend_with_stacked_arrays(table: gear.Table, kind: str, lengths: Any) -> None:
    for counts, padded in (([5, 1, 12, 8], 12), ([1, 1, 1], 1)):
        stacked: dict[str, Any] = _stack(counts, padded)
        if kind.startswith("torch"):
            stacked = {name: torch.from_numpy(value) for name, value in stacked.items()}
        if kind == "mixed":
            stacked["value"] = torch.from_numpy(stacked["value"]).requires_grad_()
        if kind.endswith("views"):
            twice = torch.repeat_interleave if kind.startswith("torch") else np.repeat
            stacked = {name: twice(value, 2, 1)[:, ::2] for name, value in stacked.items()}
        indices = table.extend(stacked, lengths=lengths(counts))
        assert table.lengths().tolist() == counts
        assert [number_of(table[int(index)]) for index in indices] == list(range(len(counts)))
        table.remove(indices)
        none = {name: value[:0] for name, value in stacked.items()}
        assert table.extend(none, lengths=lengths([])).shape == (0,)


def test_a_source_that_fails_gives_everything_back(table: gear.Table) -> None:
    table.extend([rows(0, 3), rows(1, 3)])

    def generate() -> Iterator[dict[str, np.ndarray]]:
        yield from (rows(2, 30), rows(3, 9))
        raise KeyError("interrupted")

    with pytest.raises(KeyError, match="interrupted"):
        table.extend(generate())
    table.check_valid()
    assert numbers_of(table) == [0, 1]
    assert table.stats().blocks_in_use == 2


@pytest.mark.parametrize("seed", range(12))
def test_max_steps_in_max_trajectories_always_fit(seed: int) -> None:
    """By default, whatever the lengths; and those that waste the most need every block."""
    generator = random.Random(seed)
    max_trajectories, block_steps = generator.randint(1, 12), generator.randint(1, 9)
    max_steps = generator.randint(max_trajectories, 60)
    cuts = sorted(generator.sample(range(1, max_steps), generator.randint(0, max_trajectories - 1)))
    lengths = np.diff([0, *cuts, max_steps]).tolist()
    spare = (max_steps - max_trajectories) // block_steps * block_steps
    worst = [1 + spare, *[1] * (max_trajectories - 1)]
    sizes = {"max_steps": max_steps, "max_trajectories": max_trajectories, "block_steps": block_steps}
    with gear.Table.create(SCALAR, **nested_table(sizes)) as table:
        for number, length in enumerate(lengths):
            table.add(steps(number, length))
        table.check_valid()
        assert (table.num_steps, len(table)) == (max_steps, len(lengths))
        table.remove(table.indices())
        table.extend([steps(i, length) for i, length in enumerate(worst)])
        assert table.stats().blocks_in_use == table.stats().num_blocks


@pytest.mark.parametrize(
    ("lengths", "kind"), [([1], list), ([64, 65, 1, 128], np.array), ([3] * 10, iter), ([64], torch.tensor)]
)
def test_required_blocks_are_exact(lengths: list[int], kind: Any) -> None:
    blocks = gear.Table.required_blocks(kind(lengths), 64)
    assert blocks == sum(math.ceil(length / 64) for length in lengths)
    assert gear.Table.required_blocks([], 64) == 0
    sizes = {"max_steps": sum(lengths), "max_trajectories": len(lengths), "block_steps": 64}
    given = [steps(i, length) for i, length in enumerate(lengths)]
    with gear.Table.create(SCALAR, **nested_table({**sizes, "max_blocks": blocks})) as table:
        table.extend(given)
        table.check_valid()
        assert table.stats().blocks_in_use == table.stats().num_blocks == blocks
    if blocks > 1:
        with (
            gear.Table.create(SCALAR, **nested_table({**sizes, "max_blocks": blocks - 1})) as table,
            pytest.raises(TableFullError, match=rf"\({blocks} blocks of 64\) .* 0 of {blocks - 1} blocks"),
        ):
            table.extend(given)


def test_remove_one_and_several(table: gear.Table) -> None:
    table.extend([rows(number, 5) for number in range(8)])
    with pytest.raises(TypeError, match="not iterable"):
        list(table)  # type: ignore[call-overload]
    table.remove(3)
    for several in ([0, 7], np.array([2]), torch.tensor([5, 1]), (4,), []):
        table.remove(several)
        table.check_valid()
    assert numbers_of(table) == [6]
    generation = table.gather([6], windows=gear.Window(1))["generation"]
    table.remove(np.int64(6))
    assert table.add(rows(9, 7)) == 6, "the last slot freed is the first given out"
    assert table.remove([6, 2], generation=[*generation.tolist(), 0], stale="ignore") == 2
    with pytest.raises(StaleIndexError):
        table.remove(6, generation=generation)
    with pytest.raises(SchemaError, match="generation has 2 entries; expected 1"):
        table.remove(6, generation=[1, 2])
    assert numbers_of(table) == [9]
    assert table.remove([6], generation=generation + 1) == 0


# The life of a handle --------------------------------------------------------------------------------


def test_a_named_table_outlives_its_handles() -> None:
    name = fresh_name()
    with gear.Table.create(COLUMNS, max_steps=20, max_trajectories=4, name=name) as table:
        table.add(rows(3, 5))
    with gear.Table.attach(name, on_full="evict_oldest") as table:
        assert (table.name, table.schema, table.on_full) == (name, COLUMNS, "evict_oldest")
        for handle in (pickle.loads(pickle.dumps(table)), copy.copy(table), copy.deepcopy(table)):
            assert handle is not table
            assert (handle.on_full, numbers_of(handle)) == ("evict_oldest", [3])
            handle.close()
        table.unlink()
        table.add(rows(4, 5))
        assert numbers_of(table) == [3, 4], "a handle that is attached goes on"
    assert not os.path.exists(region_path(name))


def test_two_handles_of_one_process_share_one_mapping() -> None:
    with named() as table:
        other = gear.Table.attach(str(table.name))
        assert other._engine.region.bytes is not None
        assert table._engine.region.bytes is not None
        assert other._engine.region.bytes.ctypes.data == table._engine.region.bytes.ctypes.data
        index = table.add(rows(1, 5))
        assert number_of(other[index]) == 1
        table.close()
        assert numbers_of(other) == [1]
        other.add(rows(2, 5))
        other.check_valid()
        other.unlink()
        other.close()


def test_a_table_that_is_dropped_gives_its_memory_back() -> None:
    name = fresh_name()
    table = gear.Table.create(COLUMNS, max_steps=20, max_trajectories=4, name=name)
    table.unlink()
    mapping = table._engine.region._mapping
    memory = weakref.ref(mapping.memory)
    table.loop = table  # type: ignore[attr-defined]
    del table
    gc.collect()
    assert memory() is None
    assert mapping.key not in _Mapping.registry


def test_a_table_collected_while_another_is_attached_does_not_lock_up() -> None:
    """The garbage collector may run, and drop a table, wherever Python code runs: also inside `attach`."""
    with named() as table:
        name = str(table.name)
        before = gc.get_threshold()
        gc.set_threshold(1)
        try:
            for _ in range(12):
                lost = gear.Table.attach(name)
                lost.loop = lost  # type: ignore[attr-defined]
                del lost
                gear.Table.attach(name).close()
        finally:
            gc.set_threshold(*before)
        gc.collect()
        table.add(rows(1, 3))
        assert table._engine.region._mapping.users == 1


def test_a_view_that_outlives_its_table_stays_readable_and_does_no_harm() -> None:
    name = fresh_name()
    table = gear.Table.create(COLUMNS, max_steps=20, max_trajectories=4, name=name)
    try:
        table.add(rows(1, 3))
        view = torch.from_numpy(table._engine.region.column("number"))
        table.close()
        assert int(view[0, 0].clone().view(torch.int64)) == 1
        table = gear.Table.attach(name)
        table.add(rows(2, 3))
        assert int(view[1, 0].clone().view(torch.int64)) == 2, "attached again it is the same memory"
        del view
        table.add(rows(3, 3))
        assert numbers_of(table) == [1, 2, 3]
    finally:
        table.unlink()
        table.close()
    assert table._engine.region._mapping.key not in _Mapping.registry


def test_unlink_spares_another_table_of_the_same_name() -> None:
    with named() as old:
        old.unlink()
        with named(name=old.name) as new:
            with pytest.raises(gear.errors.RegionError, match=f"Table '{old.name}' has been removed alrea"):
                old.unlink()
            assert os.path.exists(region_path(str(new.name)))
            old.add(rows(1, 3))
            new.add(rows(2, 3))
            assert numbers_of(old) == [1]
            assert numbers_of(new) == [2]


def test_closing_while_another_thread_writes() -> None:
    """The writer gets an error of ours; nothing is unmapped under it, nothing stays taken."""
    with named() as keeper:
        table = gear.Table.attach(str(keeper.name))
        genuine = Engine._write
        entered, closed = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def slow(self: Engine, *args: Any) -> None:
            entered.set()
            closed.wait(60)
            genuine(self, *args)

        def work() -> None:
            try:
                table.add(rows(1, 9))
            except BaseException as error:
                errors.append(error)

        in_three_steps(table)
        table._engine._write = slow.__get__(table._engine)  # type: ignore[method-assign]
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(60)
        table.close()
        closed.set()
        thread.join()
        assert [type(error) for error in errors] == [gear.errors.TableClosedError]
        keeper.check_valid()
        assert keeper.stats().blocks_in_use == 0
