"""Ragged values that a GPU reads out of a table's memory: the kernel and its torch twin against the CPU's copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import kernel_and_twin

import gear_loader as gear
from gear_loader.collection import ragged_cuda
from gear_loader.collection.ragged_cuda import RaggedCuda
from gear_loader.errors import CorruptTableError, TableFullError
from gear_loader.kernels import packed, packed_reference
from gear_loader.storage.operations.extents import NEXT, SIZE, SLOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the table is not pinned")
CPU = torch.device("cpu")
COLUMNS = {
    "bytes": gear.Column(torch.uint8, (None, 3)),
    "halves": gear.Column(torch.bfloat16, (None,)),
    "tokens": gear.Column(torch.int32, (None,)),
    "wide": gear.Column(torch.float64, (None, 4), per="trajectory"),
    "nothing": gear.Column(torch.uint8, (None,)),
    "reward": gear.Column(torch.float32),
}


def trajectory(random: np.random.Generator, length: int, most: int) -> dict[str, Any]:
    sizes = random.integers(0, most, (3, length))
    return {
        "bytes": [random.integers(0, 256, (n, 3), dtype=np.uint8) for n in sizes[0]],
        "halves": [torch.arange(n, dtype=torch.bfloat16) for n in sizes[1]],
        "tokens": [random.integers(0, 9999, n, dtype=np.int32) for n in sizes[2]],
        "wide": random.random((int(sizes[0, 0]), 4)),
        "nothing": [np.empty(0, np.uint8)] * length,
        "reward": np.zeros(length, np.float32),
    }


def filled(most: int = 60) -> gear.Table:
    """A table some of whose values are split over gaps."""
    random = np.random.default_rng(most)
    sizes = {"max_steps": 400, "max_trajectories": 60, "block_steps": 4}
    table = gear.Table.create(COLUMNS, memory=gear.Memory(payload="96KiB"), **sizes)
    slots = []
    with contextlib.suppress(TableFullError):
        for _ in range(60):
            slots.append(table.add(trajectory(random, 5, most)))
    assert len(slots) < 60
    table.remove(slots[::2])
    split = {**trajectory(random, 2, most), "bytes": [np.full((n, 3), 7, np.uint8) for n in (3000, 5001)]}
    table.add(split)
    assert (records_of(table, "bytes", [newest(table)])[:, 1] < 0).any()
    return table


def newest(table: gear.Table) -> int:
    return int(table.indices()[table._engine.index.arrays.generation[table.indices()].argmax()])


def records_of(table: gear.Table, name: str, slots: Any) -> np.ndarray[Any, Any]:
    index, region = table._engine.index.arrays, table._engine.region
    length = 1 if COLUMNS[name].trajectory else None
    found = [
        region.column(name)[index.row(slot)].reshape(-1, 16).view(np.int64)[: length or index.extent[slot, 0]]
        for slot in slots
    ]
    return np.ascontiguousarray(np.concatenate(found))


@kernel_and_twin(packed.gather_packed, packed_reference.gather_packed)
@pytest.mark.parametrize("part_shift", [30, 9])
def test_values_are_those_of_the_cpu(
    run: Callable[..., None], part_shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All units, values that are split, empty ones, and columns that are cut into parts."""
    monkeypatch.setattr(packed, "gather_packed", run)
    monkeypatch.setattr(ragged_cuda, "PART_SHIFT", part_shift)
    with filled() as table:
        reader, columns = RaggedCuda(CPU, 3), table.schema.ragged
        slots = np.array([*np.random.default_rng(1).permutation(table.indices()[:-1])[:4], newest(table)])
        parts: list[torch.Tensor] = []
        for some in (slots[:1], slots[:0], slots[::-1]):
            batch = {name: torch.from_numpy(records_of(table, name, some)) for name in columns if len(some)}
            found = reader.read(table, {name: columns[name] for name in batch}, batch, parts)
            for name, records in batch.items():
                owners = np.zeros(len(records), dtype=np.int64)  # which only encoded values need
                expected = table._engine.payload.read(
                    columns[name], records.numpy(), (len(records),), slots=owners
                )
                assert torch.equal(found[name].values, expected.values)
                assert torch.equal(found[name].offsets, expected.offsets)
                assert found[name].shape == expected.shape
            reader.staging.give(parts.pop())
        assert not parts


def test_units_are_as_wide_as_a_batch_allows() -> None:
    with filled() as table:
        reader = RaggedCuda(CPU, None)
        for name, unit in (("bytes", 1), ("halves", 2), ("tokens", 4), ("wide", 16)):
            records = records_of(table, name, table.indices())
            offsets = np.empty(len(records) + 1, dtype=np.int64)
            assert reader._list(table, table.schema.ragged[name], records, offsets, 0).unit == unit


@pytest.mark.parametrize("word", [SIZE, NEXT])
def test_a_corrupt_value_is_not_gathered(word: int) -> None:
    with filled() as table:
        heap, slots = table._engine.region.payload(), table.indices()
        records = torch.from_numpy(records_of(table, "bytes", slots))
        place = int(records[records[:, 1] < 0][0, 0]) // 8
        assert heap[place + SLOT] in slots
        heap[place + word] = 1 << 40
        reader, parts = RaggedCuda(CPU, None), []
        with pytest.raises(CorruptTableError, match="corrupt"):
            reader.read(table, {"bytes": table.schema.ragged["bytes"]}, {"bytes": records}, parts)
        records[0] = torch.tensor([1 << 40, 5])
        with pytest.raises(CorruptTableError, match="corrupt"):
            reader.read(table, {"bytes": table.schema.ragged["bytes"]}, {"bytes": records}, parts)
        assert not parts
        assert len(reader.staging._free) == 1


def test_an_interruption_gives_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_cuda, "PART_SHIFT", 9)  # more pieces than there is room for
    with filled() as table:
        reader, parts = RaggedCuda(CPU, None), []
        free, give = reader.staging._free, reader.staging.give

        def interrupted(memory: torch.Tensor) -> None:
            give(memory)
            raise KeyboardInterrupt

        monkeypatch.setattr(reader.staging, "give", interrupted)
        batch = {"bytes": torch.from_numpy(records_of(table, "bytes", [newest(table)]))}
        with pytest.raises(KeyboardInterrupt):
            reader.read(table, {"bytes": table.schema.ragged["bytes"]}, batch, parts)
        assert len({each.data_ptr() for each in free}) == len(free) == 2
