"""Uniform rows drawn by the kernel, and by its twin: those of the CPU's loops, bit by bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long

import gear_loader as gear
from gear_loader.kernels import uniform_reference
from gear_loader.native.gathering import resolve
from gear_loader.native.random import FIRST, LAST, UNIFORM, uniform_rows
from gear_loader.storage.inline import Places
from gear_loader.storage.queue_loops import list_drawn
from gear_loader.utils.arrays import Array

uniform = pytest.importorskip("gear_loader.kernels.uniform")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here, for CUDA tensors only"
)
KINDS = {"uniform": UNIFORM, "first": FIRST, "last": LAST, "item": UNIFORM}
BLOCK_STEPS = 8


@pytest.fixture
def table() -> Iterator[gear.Table]:
    schema = {"value": gear.Column(torch.int16, final=True)}
    sizes: Any = {"max_steps": 2000, "max_trajectories": 150, "block_steps": BLOCK_STEPS}
    with gear.Table.create(schema, **sizes, on_full="evict_oldest") as made:
        random = np.random.default_rng(0)
        for number in range(160):
            length = int(random.integers(1, 40))
            final = {"value": np.int16(number)} if number % 4 == 0 else None
            made.add({"value": np.full(length, number, np.int16)}, final=final)
        yield made


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def drawn_by_the_host(
    view: Any, counts: Array, anchor: str, words: tuple[int, int, int], reach: Any, shape: tuple[int, int], lead: int,
    stride: int, reader: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    names = np.empty((3, shape[0]), dtype=np.int64)
    sums = np.cumsum(counts) + 17  # plus a constant
    uniform_rows(view.slots, counts, view.generations, sums, anchor == "item", KINDS[anchor], *words, names)
    names[1] = lead + stride * names[1]
    extent, ids = np.empty((shape[0], 3), dtype=np.int64), np.empty(shape, dtype=np.int32)
    given = *reader.index_arrays(), BLOCK_STEPS, reach[0], reach[1]
    assert resolve(names[0], names[1], *given, extent, ids, reader.arrays.num_blocks, reach[2]) == 0
    return names, extent, ids


CASES = [
    ("uniform", 37, 0, 1),
    ("item", 40, 0, 1),
    ("item", 31, 2, 3),
    ("uniform", 32, 1, 2),
    ("first", 5, 0, 1),
    ("last", 1, 0, 1),
]


@pytest.mark.parametrize(("anchor", "count", "lead", "stride"), mostly_long(CASES, *CASES[:2], *CASES[4:]))
def test_rows_are_those_of_the_cpu(
    table: gear.Table, anchor: str, count: int, lead: int, stride: int
) -> None:
    reader = table._engine.reader()
    view = reader.snapshot()
    extent, block_ids = reader.index_arrays()
    counts = np.maximum(-(-(view.lengths - lead) // stride), 0)
    view = view.take(counts > 0)
    counts = counts[counts > 0]
    lengths = extent[view.slots]
    arrays = view.slots, view.generations, lengths[:, 0], lengths[:, 2], counts, np.cumsum(counts)
    memory = uniform_reference.drawn_from(extent.ctypes.data, block_ids.ctypes.data, arrays)
    listed = np.full_like(memory, -7)
    items = Places(view.slots.copy(), counts, view.generations.copy(), np.cumsum(counts) + 17)
    list_drawn(reader.places.table, items.table, listed)
    np.testing.assert_array_equal(listed, memory)
    items = int(counts.sum()) if anchor == "item" else len(counts)
    for words, reach in (
        ((3, 5, 1), (-9, 10, True)),
        ((-(2**62) - 7, 2**40, 2**16), (0, 0, False)),
        ((1, 0, 0), (0, 39, False)),
    ):
        shape = count, (reach[1] - reach[0]) // BLOCK_STEPS + 2 + reach[2]
        names, found_extent, found_ids = drawn_by_the_host(
            view, counts, anchor, words, reach, shape, lead, stride, reader
        )
        given = torch.tensor([*words, memory.ctypes.data, len(counts), items])
        options: Any = {"anchor": anchor, "block_steps": BLOCK_STEPS, "lead": lead, "stride": stride}
        options |= dict(zip(("first", "last", "once"), reach, strict=True))
        for draw in (uniform.draw, uniform_reference.draw):
            rows = torch.full((6, count), -7, dtype=torch.int64)
            ids = torch.full(shape, -7, dtype=torch.int32)
            more = {} if draw is uniform.draw else {"tensor_at": tensor_at}
            draw(given, rows, ids, **options, **more)
            np.testing.assert_array_equal(rows[:3], names)
            np.testing.assert_array_equal(rows[3:].reshape(count, 3), found_extent)
            for row, (anchor_step, (steps, _, final)) in enumerate(zip(names[1], found_extent, strict=True)):
                low = min(max(anchor_step + reach[0], 0), steps - 1) // BLOCK_STEPS
                touched = min(max(anchor_step + reach[1], 0), steps + final - 1) // BLOCK_STEPS - low + 1
                np.testing.assert_array_equal(ids[row, :touched], found_ids[row, :touched])
                assert not reach[2] or ids[row, -1] == found_ids[row, -1]
                assert not ids[row, touched : shape[1] - reach[2]].any()


def test_bad_arguments_are_refused() -> None:
    rows, ids = torch.zeros((6, 4), dtype=torch.int64), torch.zeros((4, 2), dtype=torch.int32)
    random = torch.zeros(6, dtype=torch.int64)
    options: Any = {"anchor": "first", "block_steps": 8, "first": 0, "last": 0}
    with pytest.raises(
        TypeError, match=r"random is torch.int64 \[5\]; expected contiguous torch.int64 \[6\]"
    ):
        uniform.draw(random[:5], rows, ids, **options)
    with pytest.raises(TypeError, match=r"rows is torch.int64 \[6, 3\]"):
        uniform.draw(random, rows[:, :3].contiguous(), ids, **options)
    with pytest.raises(ValueError, match="anchor is 'middle'; expected one of"):
        uniform.draw(random, rows, ids, **{**options, "anchor": "middle"})
