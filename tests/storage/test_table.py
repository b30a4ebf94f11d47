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
from table_common import (
    COLUMNS,
    DTYPES,
    bits,
    fresh_name,
    in_three_steps,
    named,
    number_of,
    numbers_of,
    random_values,
    rows,
)

import gear_loader as gear
from gear_loader.errors import StaleIndexError, TableFullError
from gear_loader.storage import table as table_module
from gear_loader.storage.operations import FREE, READY, RETIRED
from gear_loader.storage.region import _Mapping, region_path

SCALAR = {"x": gear.Column(torch.int64)}


def steps(number: int, length: int) -> dict[str, np.ndarray]:
    """For tables of `SCALAR`: number * 1000, number * 1000 + 1, ..."""
    return {"x": np.arange(length, dtype=np.int64) + number * 1000}


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with gear.Table.create(COLUMNS, max_steps=200, max_trajectories=16, block_steps=4) as table:
        yield table
        table.check_valid()


# Contents --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    with gear.Table.create(
        {"x": gear.Column(dtype, shape)}, max_steps=300, max_trajectories=40, block_steps=7
    ) as table:
        kept = {}
        for length in (1, 6, 7, 8, 14, 15, 63):
            values = random_values(dtype, (length, *shape), generator)
            kept[table.add({"x": values})] = values
            if dtype is not torch.bfloat16:
                kept[table.add({"x": values.numpy()})] = values
            table.check_valid()
            if len(kept) > 6:
                table.remove(first := next(iter(kept)))
                del kept[first]
        for index, values in kept.items():
            found = table[index]["x"]
            assert found.dtype == dtype
            assert found.shape == values.shape
            assert found.is_contiguous()
            assert bits(found) == bits(values)


@pytest.mark.parametrize("block_steps", [1, 2, 3, 64, 1000])
def test_block_sizes(block_steps: int) -> None:
    with gear.Table.create(COLUMNS, max_steps=300, max_trajectories=20, block_steps=block_steps) as table:
        expected = []
        for number, length in enumerate([1, 2, 3, 4, 63, 64, 65, 98]):
            table.add(rows(number, length))
            expected.append(number)
            table.check_valid()
        assert numbers_of(table) == expected
        assert len(table) == 8
        assert table.num_steps == 300
        assert table.lengths().tolist() == [1, 2, 3, 4, 63, 64, 65, 98]
        assert table.lengths().dtype == table.indices().dtype == np.int64


def test_awkward_inputs_come_back(table: gear.Table) -> None:
    base = rows(7, 40)
    wide = {name: np.repeat(values, 3, axis=0) for name, values in base.items()}
    inputs: dict[str, Mapping[str, Any]] = {
        "numpy views": {name: values[::3] for name, values in wide.items()},
        "torch views": {name: torch.from_numpy(values)[::3] for name, values in wide.items()},
        "reversed twice": {name: np.flip(np.flip(values).copy()) for name, values in base.items()},
        "fortran order": {name: np.asfortranarray(values) for name, values in base.items()},
        "mixed": {
            name: torch.from_numpy(values) if i % 2 else values
            for i, (name, values) in enumerate(base.items())
        },
        "another order of the columns": dict(reversed(base.items())),
        "requires grad": {**base, "value": torch.from_numpy(base["value"]).clone().requires_grad_()},
    }
    for kind, trajectory in inputs.items():
        index = table.add(trajectory)
        assert number_of(table[index]) == 7, kind
        table.remove(index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_one_step_cut_out_of_a_tensor_of_any_stride(dtype: torch.dtype) -> None:
    base = random_values(dtype, (70,), torch.Generator().manual_seed(1))
    with gear.Table.create({"x": gear.Column(dtype)}, max_steps=10, max_trajectories=10) as table:
        assert bits(table[table.add({"x": base[14::7][:1]})]["x"]) == bits(base[14:15])


def test_what_is_read_is_a_copy(table: gear.Table) -> None:
    index = table.add(rows(1, 9))
    for value in table[index].values():
        value.zero_()
    assert number_of(table[index]) == 1
    table.indices()[:] = 99
    table.lengths()[:] = 99
    assert table.indices().tolist() == [index]
    assert table.lengths().tolist() == [9]


def test_what_was_added_is_a_copy(table: gear.Table) -> None:
    trajectory = rows(1, 9)
    index = table.add(trajectory)
    for value in trajectory.values():
        value[:] = 0
    assert number_of(table[index]) == 1


def test_mappings_that_are_no_dicts(table: gear.Table) -> None:
    class Lazy(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return rows(3, 5)[name]

        def __iter__(self) -> Iterator[str]:
            return iter(COLUMNS)

        def __len__(self) -> int:
            return len(COLUMNS)

    assert number_of(table[table.add(Lazy())]) == 3


@pytest.mark.parametrize("index", [0, np.int64(0), np.uint8(0), torch.tensor(0), np.array([0])[0]])
def test_kinds_of_index(table: gear.Table, index: Any) -> None:
    table.add(rows(5, 3))
    assert number_of(table[index]) == 5


def test_priorities_are_kept(table: gear.Table) -> None:
    given = [1.0, 0.0, 2.5, np.float32(1e-30), 3, True, 3.4e38]
    indices = [table.add(rows(i, 2), priority=priority) for i, priority in enumerate(given)]
    stored = table.region.array("priority")[indices]
    assert stored.tolist() == [float(np.float32(priority)) for priority in given]


# extend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "tuple", "generator", "map", "dict values"])
def test_extend_takes_any_iterable(table: gear.Table, kind: str) -> None:
    given = [rows(number, 1 + number % 9) for number in range(10)]
    iterable: Any = {
        "list": lambda: given,
        "tuple": lambda: tuple(given),
        "generator": lambda: (trajectory for trajectory in given),
        "map": lambda: map(dict, given),
        "dict values": lambda: dict(enumerate(given)).values(),
    }[kind]()
    indices = table.extend(iterable)
    assert indices.dtype == np.int64
    assert [number_of(table[int(index)]) for index in indices] == list(range(10))
    assert table.indices().tolist() == indices.tolist()


def test_extend_from_a_generator_that_fills_the_same_arrays_anew(table: gear.Table) -> None:
    buffer = rows(0, 6)

    def generate() -> Iterator[dict[str, np.ndarray]]:
        for number in range(5):
            for name, values in rows(number, 6).items():
                buffer[name][:] = values
            yield buffer

    table.extend(generate())
    assert numbers_of(table) == [0, 1, 2, 3, 4]


class Fresh:
    """An iterable (no iterator) that yields one dict, with new arrays each time."""

    def __init__(self, numbers: range, length: int) -> None:
        self.numbers, self.length = numbers, length

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        trajectory: dict[str, np.ndarray] = {}
        for number in self.numbers:
            trajectory.update(rows(number, self.length))
            yield trajectory


class Refilling(Fresh):
    """As `Fresh`, but it fills the same arrays again."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        trajectory = rows(0, self.length)
        for number in self.numbers:
            for name, values in rows(number, self.length).items():
                trajectory[name][:] = values
            yield trajectory


class Lazy(Sequence[Any]):
    """A sequence of trajectories that reads each into the same arrays."""

    def __init__(self, numbers: range, length: int) -> None:
        self.numbers, self.buffer = numbers, rows(0, length)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> dict[str, np.ndarray]:
        for name, values in rows(self.numbers[place], len(self.buffer["step"])).items():
            self.buffer[name][:] = values
        return self.buffer


class Computed(Mapping[str, Any]):
    """A mapping that computes its columns into one buffer."""

    buffer = np.empty(1000, dtype=np.uint8)

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length = number, length

    def __getitem__(self, name: str) -> np.ndarray:
        values = rows(self.number, self.length)[name]
        target = self.buffer[: values.nbytes].view(values.dtype).reshape(values.shape)
        target[...] = values
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __len__(self) -> int:
        return len(COLUMNS)


@pytest.mark.parametrize("kind", [Fresh, Refilling, Lazy])
@pytest.mark.parametrize("method", ["extend", "extend_as"])
def test_an_iterable_may_use_its_dict_or_its_arrays_again(table: gear.Table, kind: Any, method: str) -> None:
    more = {"ids": [-1] * 10} if method == "extend_as" else {}
    getattr(table, method)(kind(range(10), 6), **more)
    assert numbers_of(table) == list(range(10))


def test_a_mapping_may_compute_its_columns_into_one_array(table: gear.Table) -> None:
    table.add(Computed(1, 7))
    table.extend([Computed(2, 5), Computed(3, 9)])
    with table.writer() as writer:
        writer.append(Computed(4, 3))
    assert numbers_of(table) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [Fresh, Refilling])
def test_many_trajectories_of_an_iterable_that_uses_its_dict_again(kind: Any) -> None:
    count, length = 1000, 3
    with gear.Table.create(COLUMNS, max_steps=count * length, max_trajectories=count, block_steps=8) as table:
        for begin in range(0, count, 200):
            table.extend(kind(range(begin, begin + 200), length))
            gc.collect()
        assert numbers_of(table) == list(range(count))


def test_extend_with_one_trajectory_several_times(table: gear.Table) -> None:
    table.extend([rows(4, 6)] * 3)
    assert numbers_of(table) == [4, 4, 4]


def _stack(lengths: list[int], padded: int) -> dict[str, np.ndarray]:
    trajectories = [rows(number, length) for number, length in enumerate(lengths)]
    return {
        name: np.stack(
            [
                np.concatenate(
                    (one[name], np.full((padded - len(one[name]), *column.shape), 77, one[name].dtype))
                )
                for one in trajectories
            ]
        )
        for name, column in COLUMNS.items()
    }


@pytest.mark.parametrize("kind", ["numpy", "torch", "torch views", "numpy views", "mixed"])
@pytest.mark.parametrize(
    "lengths", [list, np.array, np.uint8, torch.tensor, lambda x: torch.tensor(x).int(), tuple]
)
def test_extend_with_stacked_arrays(table: gear.Table, kind: str, lengths: Any) -> None:
    counts = [5, 1, 12, 8]
    stacked: dict[str, Any] = _stack(counts, 12)
    if kind.startswith("torch"):
        stacked = {name: torch.from_numpy(value) for name, value in stacked.items()}
    if kind == "mixed":
        stacked["value"] = torch.from_numpy(stacked["value"]).requires_grad_()
    if kind.endswith("views"):
        twice = torch.repeat_interleave if kind.startswith("torch") else np.repeat
        stacked = {name: twice(value, 2, 1)[:, ::2] for name, value in stacked.items()}
    indices = table.extend(stacked, lengths=lengths(counts))
    assert table.lengths().tolist() == counts
    assert [number_of(table[int(index)]) for index in indices] == [0, 1, 2, 3]


def test_extend_with_stacked_arrays_of_one_step(table: gear.Table) -> None:
    table.extend(_stack([1, 1, 1], 1), lengths=[1, 1, 1])
    assert numbers_of(table) == [0, 1, 2]


def test_extend_with_a_stacked_bfloat16_column() -> None:
    values = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    with gear.Table.create(
        {"x": gear.Column(torch.bfloat16, (2,))}, max_steps=15, max_trajectories=3
    ) as table:
        indices = table.extend({"x": values}, lengths=[5, 3, 1])
        for i, length in enumerate([5, 3, 1]):
            assert bits(table[int(indices[i])]["x"]) == bits(values[i, :length])


@pytest.mark.parametrize("empty", [[], (), iter(()), {}.values()])
def test_extend_with_nothing(table: gear.Table, empty: Any) -> None:
    indices = table.extend(empty)
    assert indices.dtype == np.int64
    assert indices.shape == (0,)
    assert table.extend(empty, priority=[]).shape == (0,)
    assert len(table) == 0


def test_extend_with_no_stacked_trajectory(table: gear.Table) -> None:
    stacked = {name: value[:0] for name, value in _stack([2, 2], 2).items()}
    for lengths in ([], np.zeros(0, dtype=np.int64), torch.zeros(0, dtype=torch.int64)):
        assert table.extend(stacked, lengths=lengths).shape == (0,)
    assert len(table) == 0


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: torch.tensor(x).bfloat16()])
def test_extend_with_a_priority_each(table: gear.Table, kind: Any) -> None:
    indices = table.extend([rows(i, 2) for i in range(3)], priority=kind([0.5, 0.0, 4.0]))
    assert table.region.array("priority")[indices].tolist() == [0.5, 0.0, 4.0]
    indices = table.extend([rows(i, 2) for i in range(3)], priority=2)
    assert table.region.array("priority")[indices].tolist() == [2.0, 2.0, 2.0]


def test_an_iterable_that_fails_changes_nothing(table: gear.Table) -> None:
    def generate() -> Iterator[dict[str, np.ndarray]]:
        yield rows(0, 3)
        raise KeyError("the source broke")

    with pytest.raises(KeyError, match="the source broke"):
        table.extend(generate())
    table.check_valid()
    assert len(table) == 0
    assert table.stats().blocks_in_use == 0


@pytest.mark.parametrize("failing", ["write", "commit"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_fails_gives_everything_back(
    table: gear.Table, failing: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    table.extend([rows(0, 3), rows(1, 3)])
    target = "_write" if failing == "write" else "commit"
    owner = table if failing == "write" else table.index
    genuine = getattr(owner, target)

    def fail(*args: Any) -> None:
        if failing == "write":
            genuine(*args)
        raise error("interrupted")

    monkeypatch.setattr(owner, target, fail)
    in_three_steps(table)
    with pytest.raises(error, match="interrupted"):
        table.extend([rows(2, 30), rows(3, 9), rows(4, 1)])
    monkeypatch.undo()
    table.check_valid()
    assert numbers_of(table) == [0, 1]
    assert table.stats().blocks_in_use == 2
    table.extend([rows(number, 13) for number in range(2, 16)])
    assert numbers_of(table) == list(range(16))


# Capacity --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_full", ["error", "evict_oldest"])
def test_one_step_and_max_steps(on_full: Any) -> None:
    with gear.Table.create(
        COLUMNS, max_steps=100, max_trajectories=5, block_steps=8, on_full=on_full
    ) as table:
        index = table.add(rows(1, 1))
        assert number_of(table[index]) == 1
        table.remove(index)
        index = table.add(rows(2, 100))
        assert number_of(table[index]) == 2
        table.check_valid()
        assert len(table) == 1
        assert table.num_steps == 100


def test_the_smallest_table() -> None:
    with gear.Table.create(
        SCALAR, max_steps=1, max_trajectories=1, block_steps=1, on_full="evict_oldest"
    ) as table:
        for number in range(20):
            table.add(steps(number, 1))
            table.check_valid()
            assert table[int(table.indices()[0])]["x"].tolist() == [number * 1000]
        assert table.stats().num_evicted == 19


@pytest.mark.parametrize("seed", range(40))
def test_max_steps_in_max_trajectories_always_fit(seed: int) -> None:
    """By default, whatever the lengths."""
    generator = random.Random(seed)
    max_trajectories, block_steps = generator.randint(1, 12), generator.randint(1, 9)
    max_steps = generator.randint(max_trajectories, 60)
    cuts = sorted(generator.sample(range(1, max_steps), generator.randint(0, max_trajectories - 1)))
    lengths = np.diff([0, *cuts, max_steps]).tolist()
    with gear.Table.create(
        SCALAR, max_steps=max_steps, max_trajectories=max_trajectories, block_steps=block_steps
    ) as table:
        for number, length in enumerate(lengths):
            table.add(steps(number, length))
        table.check_valid()
        assert table.num_steps == max_steps
        assert len(table) == len(lengths)


@pytest.mark.parametrize(
    ("max_steps", "max_trajectories", "block_steps"), [(40, 6, 7), (12, 12, 5), (9, 3, 64)]
)
def test_the_worst_lengths_need_every_block(max_steps: int, max_trajectories: int, block_steps: int) -> None:
    """The default number of blocks is not only enough: no smaller one would be."""
    for lengths in _worst(max_steps, max_trajectories, block_steps):
        with gear.Table.create(
            SCALAR, max_steps=max_steps, max_trajectories=max_trajectories, block_steps=block_steps
        ) as table:
            table.extend([steps(i, length) for i, length in enumerate(lengths)])
            assert table.stats().blocks_in_use == table.stats().num_blocks


def _worst(max_steps: int, max_trajectories: int, block_steps: int) -> Iterator[list[int]]:
    """Lengths that waste the most: one step into a last block each, the rest in the first."""
    count = min(max_steps, max_trajectories)
    spare = max_steps - count
    yield [1 + spare // block_steps * block_steps, *[1] * (count - 1)]


@pytest.mark.parametrize("lengths", [[1], [64, 65, 1, 128], [3] * 10])
@pytest.mark.parametrize("kind", [list, tuple, np.array, iter, torch.tensor])
def test_required_blocks_are_exact(lengths: list[int], kind: Any) -> None:
    blocks = gear.Table.required_blocks(kind(lengths), 64)
    assert blocks == sum(math.ceil(length / 64) for length in lengths)
    sizes = {"max_steps": sum(lengths), "max_trajectories": len(lengths), "block_steps": 64}
    with gear.Table.create(SCALAR, **sizes, max_blocks=blocks) as table:
        table.extend([steps(i, length) for i, length in enumerate(lengths)])
        table.check_valid()
        assert table.stats().blocks_in_use == table.stats().num_blocks == blocks
    if blocks > 1:
        with (
            gear.Table.create(SCALAR, **sizes, max_blocks=blocks - 1) as table,
            pytest.raises(
                TableFullError,
                match=rf"\({blocks} blocks of 64\) were to be added .* 0 of {blocks - 1} blocks",
            ),
        ):
            table.extend(
                [steps(i, length) for i, length in enumerate(lengths[:-1])] + [steps(9, lengths[-1])]
            )


def test_required_blocks_of_nothing() -> None:
    assert gear.Table.required_blocks([], 64) == 0


# Removal, eviction, reuse ----------------------------------------------------------------------------


def test_remove_one_and_several(table: gear.Table) -> None:
    table.extend([rows(number, 5) for number in range(8)])
    table.remove(3)
    assert numbers_of(table) == [0, 1, 2, 4, 5, 6, 7]
    for several in ([0, 7], np.array([2]), torch.tensor([5, 1]), (4,), []):
        table.remove(several)
        table.check_valid()
    assert numbers_of(table) == [6]
    table.remove(np.int64(6))
    assert numbers_of(table) == []
    assert table.num_steps == 0
    assert table.stats().blocks_in_use == 0


def test_an_index_is_given_out_again_and_its_generation_tells(table: gear.Table) -> None:
    first = table.add(rows(1, 5))
    generation = int(table.region.array("generation")[first])
    table.remove(first)
    with pytest.raises(StaleIndexError, match=f"Index {first} names no live trajectory"):
        table[first]
    second = table.add(rows(2, 7))
    assert second == first, "the last slot freed is the first given out"
    assert number_of(table[second]) == 2
    assert int(table.region.array("generation")[second]) == generation + 1


def test_freed_blocks_are_used_again(table: gear.Table) -> None:
    for number in range(200):
        index = table.add(rows(number, 1 + number * 7 % 190))
        assert number_of(table[index]) == number
        table.remove(index)
        table.check_valid()
    assert table.stats().blocks_in_use == 0


def test_the_oldest_go_first_whatever_their_index() -> None:
    with gear.Table.create(
        COLUMNS, max_steps=100, max_trajectories=4, block_steps=4, on_full="evict_oldest"
    ) as table:
        for number in range(4):
            table.add(rows(number, 3))
        table.remove(1)
        table.add(rows(4, 3))  # takes index 1, and is the newest
        assert numbers_of(table) == [0, 2, 3, 4]
        for number, expected in [(5, [2, 3, 4, 5]), (6, [3, 4, 5, 6]), (7, [4, 5, 6, 7]), (8, [5, 6, 7, 8])]:
            table.add(rows(number, 3))
            table.check_valid()
            assert numbers_of(table) == expected
        assert table.stats().num_evicted == 4


def test_eviction_makes_just_enough_room_for_steps() -> None:
    with gear.Table.create(
        COLUMNS, max_steps=20, max_trajectories=10, block_steps=4, on_full="evict_oldest"
    ) as table:
        table.extend([rows(number, 4) for number in range(5)])
        table.add(rows(5, 1))
        assert numbers_of(table) == [1, 2, 3, 4, 5]
        table.add(rows(6, 3))
        assert numbers_of(table) == [1, 2, 3, 4, 5, 6], "20 of 20 steps"
        table.add(rows(7, 9))
        assert numbers_of(table) == [4, 5, 6, 7]
        table.add(rows(8, 20))
        assert numbers_of(table) == [8]


def test_eviction_makes_just_enough_room_for_blocks() -> None:
    with gear.Table.create(
        COLUMNS, max_steps=100, max_trajectories=10, block_steps=10, max_blocks=5, on_full="evict_oldest"
    ) as table:
        table.extend([rows(number, 1) for number in range(5)])
        table.add(rows(5, 11))
        table.check_valid()
        assert numbers_of(table) == [2, 3, 4, 5]
        assert table.stats().blocks_in_use == 5


def test_extend_evicts_for_all_of_them_at_once() -> None:
    with gear.Table.create(
        COLUMNS, max_steps=100, max_trajectories=6, block_steps=10, on_full="evict_oldest"
    ) as table:
        table.extend([rows(number, 5) for number in range(6)])
        table.extend([rows(number, 5) for number in range(6, 10)])
        assert numbers_of(table) == [4, 5, 6, 7, 8, 9]
        table.extend([rows(number, 5) for number in range(10, 16)])
        assert numbers_of(table) == list(range(10, 16))


def test_what_a_reader_holds_is_not_evicted_under_it() -> None:
    """Retired blocks keep their bytes until the reader has gone, and new ones go elsewhere."""
    with gear.Table.create(
        COLUMNS, max_steps=100, max_trajectories=4, block_steps=4, on_full="evict_oldest"
    ) as table:
        index = table.add(rows(0, 8))
        ticket = table.index.reader.begin_read_of(index)
        ids = table.index.arrays.row(index)
        table.remove(index)
        for number in range(1, 8):
            table.add(rows(number, 8))
            table.check_valid()
            if len(table) < 4:
                assert table.region.array("state")[index] == RETIRED
            blocks = {block for one in table.indices() for block in table.index.arrays.row(int(one)).tolist()}
            assert not blocks & set(ids.tolist())
            if number == 3:
                break
        ticket.end()
        table.add(rows(9, 8))
        assert table.region.array("state")[index] in (FREE, READY)


# The life of a handle --------------------------------------------------------------------------------


def test_a_table_is_a_context_manager() -> None:
    with gear.Table.create(COLUMNS, max_steps=10, max_trajectories=2) as table:
        table.add(rows(0, 3))
    assert repr(table) == "<Table private, closed>"
    table.close()
    table.close()


def test_the_context_manager_closes_when_the_block_fails() -> None:
    with pytest.raises(RuntimeError, match="mine"), named() as table:
        raise RuntimeError("mine")
    assert "closed" in repr(table)


def test_repr() -> None:
    with named() as table:
        table.add(rows(0, 3))
        assert repr(table) == f"<Table {table.name}: 1 trajectories, 3 steps>"


def test_a_named_table_outlives_its_handles() -> None:
    name = fresh_name()
    with gear.Table.create(COLUMNS, max_steps=20, max_trajectories=4, name=name) as table:
        table.add(rows(3, 5))
    with gear.Table.attach(name, on_full="evict_oldest") as table:
        assert table.name == name
        assert table.schema == COLUMNS
        assert numbers_of(table) == [3]
        assert table.on_full == "evict_oldest"
        table.unlink()
        table.add(rows(4, 5))
        assert numbers_of(table) == [3, 4], "who is attached may go on"
    assert not os.path.exists(region_path(name))


def test_two_handles_of_one_process_share_one_mapping() -> None:
    with named() as table:
        other = gear.Table.attach(str(table.name))
        assert other.region.bytes is not None
        assert table.region.bytes is not None
        assert other.region.bytes.ctypes.data == table.region.bytes.ctypes.data
        index = table.add(rows(1, 5))
        assert number_of(other[index]) == 1
        table.close()
        assert numbers_of(other) == [1]
        other.add(rows(2, 5))
        other.check_valid()
        other.unlink()
        other.close()


def test_a_handle_travels_by_pickle() -> None:
    with named(on_full="evict_oldest") as table:
        table.add(rows(1, 5))
        for handle in (pickle.loads(pickle.dumps(table)), copy.copy(table), copy.deepcopy(table)):
            assert handle is not table
            assert handle.on_full == "evict_oldest"
            assert numbers_of(handle) == [1]
            handle.close()
        assert numbers_of(table) == [1]


def test_a_table_that_is_dropped_gives_its_memory_back() -> None:
    name = fresh_name()
    table = gear.Table.create(COLUMNS, max_steps=20, max_trajectories=4, name=name)
    table.unlink()
    mapping = table.region._mapping
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
            for _ in range(50):
                lost = gear.Table.attach(name)
                lost.loop = lost  # type: ignore[attr-defined]
                del lost
                gear.Table.attach(name).close()
        finally:
            gc.set_threshold(*before)
        gc.collect()
        table.add(rows(1, 3))
        assert table.region._mapping.users == 1


def test_a_view_that_outlives_its_table_stays_readable_and_does_no_harm() -> None:
    name = fresh_name()
    table = gear.Table.create(COLUMNS, max_steps=20, max_trajectories=4, name=name)
    try:
        table.add(rows(1, 3))
        view = torch.from_numpy(table.region.column("number"))
        table.close()
        assert int(view[0].view(torch.int64)[0]) == 1
        table = gear.Table.attach(name)
        table.add(rows(2, 3))
        assert int(view[1].view(torch.int64)[0]) == 2, "attached again it is the same memory"
        del view
        table.add(rows(3, 3))
        assert numbers_of(table) == [1, 2, 3]
    finally:
        table.unlink()
        table.close()
    assert table.region._mapping.key not in _Mapping.registry


def test_unlink_spares_another_table_of_the_same_name() -> None:
    with named() as old:
        old.unlink()
        with named(name=old.name) as new:
            with pytest.raises(
                gear.errors.RegionError, match=f"Table '{old.name}' has been removed already; the one"
            ):
                old.unlink()
            assert os.path.exists(region_path(str(new.name)))
            old.add(rows(1, 3))
            new.add(rows(2, 3))
            assert numbers_of(old) == [1]
            assert numbers_of(new) == [2]


def test_a_table_is_no_sequence(table: gear.Table) -> None:
    """Counting indices upwards would stop at the first that was removed."""
    table.extend([rows(0, 1), rows(1, 1)])
    table.remove(0)
    with pytest.raises(TypeError, match="not iterable"):
        list(table)  # type: ignore[call-overload]


# Threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [True, False])
def test_threads_add_remove_and_read_at_once(private: bool) -> None:
    options: dict[str, Any] = {
        "max_steps": 120,
        "max_trajectories": 8,
        "block_steps": 4,
        "on_full": "evict_oldest",
    }
    failures: list[BaseException] = []
    stop = threading.Event()

    def guarded(work: Any) -> Any:
        def run(seed: int) -> None:
            try:
                work(random.Random(seed), seed)
            except BaseException as failure:
                failures.append(failure)
                stop.set()

        return run

    with gear.Table.create(COLUMNS, **options) if private else named(**options) as table:

        @guarded
        def write(generator: random.Random, seed: int) -> None:
            for i in range(120):
                number = seed * 1_000_000 + i
                if i % 5 == 4:
                    table.extend([rows(number, generator.randint(1, 12)) for _ in range(2)])
                else:
                    table.add(rows(number, generator.randint(1, 30)))

        @guarded
        def read(generator: random.Random, seed: int) -> None:
            while not stop.is_set():
                indices = table.indices().tolist()
                if not indices:
                    continue
                index = generator.choice(indices)
                try:
                    number_of(table[index])
                    if generator.random() < 0.1:
                        table.remove(index)
                except StaleIndexError:
                    pass  # evicted or removed meanwhile

        writers = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
        for thread in writers + readers:
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        for thread in readers:
            thread.join()
        assert not failures, failures
        table.check_valid()
        numbers_of(table)
        assert not (table.region.array("readers")[:, 2] != 0).any()


def test_closing_while_another_thread_writes() -> None:
    """The writer gets an error of ours; nothing is unmapped under it, nothing stays taken."""
    with named() as keeper:
        table = gear.Table.attach(str(keeper.name))
        genuine = table_module.Table._write
        entered, closed = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def slow(self: gear.Table, *args: Any) -> None:
            entered.set()
            closed.wait(10)
            genuine(self, *args)

        def work() -> None:
            try:
                table.add(rows(1, 9))
            except BaseException as error:
                errors.append(error)

        in_three_steps(table)
        table._write = slow.__get__(table)  # type: ignore[method-assign]
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(10)
        table.close()
        closed.set()
        thread.join()
        assert [type(error) for error in errors] == [gear.errors.TableClosedError]
        keeper.check_valid()
        assert keeper.stats().blocks_in_use == 0
