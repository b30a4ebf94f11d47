"""The compiled loop that writes trajectories into blocks, and that which finds the blocks of windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gather_common import (
    FOREIGN,
    GUARD,
    PADS,
    HugeStore,
    Spec,
    Store,
    host_memory,
    windows_of,
)

from gear_loader.kernels.plan import LINE, GatherColumn, GatherPlan
from gear_loader.native import copying, gathering

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")


class Scattered:
    """Trajectories that `copying.scatter` has written into blocks, and what the blocks must hold.

    Args:
        sizes: bytes of a step of each column. lengths: of the trajectories.
        packed: whether the columns share a record, with `spare` bytes at its end.
        spare_lines: of each block. source_shift, target_shift: bytes by which trajectories and blocks are not aligned.

    Attributes:
        given: of each column the trajectories, uint8 [T, size]. columns: address, stride, size and bytes of a record.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        lengths: Sequence[int],
        block_steps: int,
        *,
        packed: bool = False,
        spare: int = 0,
        spare_lines: int = 0,
        source_shift: int = 0,
        target_shift: int = 0,
        seed: int = 0,
    ) -> None:
        random, self.block_steps = np.random.default_rng(seed), block_steps
        self.lengths = np.array(lengths, dtype=np.int64)
        used = -(-self.lengths // block_steps)
        self.starts, blocks = np.cumsum(used) - used, int(used.sum()) + 2
        self.ids = random.permutation(blocks)[: used.sum()].astype(np.int32)
        self.insides = np.cumsum([0, *sizes[:-1]]).tolist() if packed else [0] * len(sizes)
        self.records = [sum(sizes) + spare] * len(sizes) if packed else list(sizes)
        self.strides = [-(-block_steps * size // LINE) * LINE + spare_lines * LINE for size in self.records]
        outputs = [
            self._output(blocks * stride, target_shift) for stride in self.strides[: 1 if packed else None]
        ]
        self.outputs = outputs * len(sizes) if packed else outputs
        self.given = [
            [
                random.integers(0, 256, source_shift + n * size, dtype=np.uint8)[source_shift:].reshape(
                    n, size
                )
                for n in self.lengths
            ]
            for size in sizes
        ]
        expected = [memory.copy() for memory in outputs] * (len(sizes) if packed else 1)
        parts = zip(self.outputs, self.insides, self.strides, sizes, self.records, strict=True)
        self.columns = [
            (memory[GUARD + target_shift :].ctypes.data + inside, stride, size, record)
            for memory, inside, stride, size, record in parts
        ]
        addresses = np.array([[rows[i].ctypes.data for rows in self.given] for i in range(len(lengths))])
        copying.scatter(
            np.array(self.columns, dtype=np.int64), block_steps, self.ids, addresses, self.lengths
        )
        for i, rows in enumerate(self.given):
            for start, row in zip(self.starts, rows, strict=True):
                steps = np.arange(len(row))
                first = self.ids[start + steps // block_steps].astype(np.int64) * self.strides[i]
                first += GUARD + target_shift + steps % block_steps * self.records[i] + self.insides[i]
                expected[i][first[:, None] + np.arange(row.shape[1])] = row
        for memory, right in zip(self.outputs, expected, strict=True):
            assert np.array_equal(memory, right)

    @staticmethod
    def _output(size: int, shift: int) -> np.ndarray:
        return host_memory(2 * GUARD + shift + size).fill_(FOREIGN).numpy()


def test_a_scatter_beyond_2_31_bytes() -> None:
    store = HugeStore((96,), 21)
    source, row = store.sources[0], store.rows[0][HugeStore.SLOTS[0]]
    start = int(store.extent[HugeStore.SLOTS[0], 1])
    ids = store.block_ids[start : start + 3].numpy()
    assert (ids.astype(np.int64) * source.stride(0) > 2**31).sum() >= 2
    new = np.ascontiguousarray(~row)
    columns = np.array([(source.data_ptr(), source.stride(0), 96, 96)], dtype=np.int64)
    copying.scatter(columns, 21, ids, np.array([[new.ctypes.data]]), np.array([len(row)], dtype=np.int64))
    for i, block in enumerate(ids.tolist()):
        piece = new[i * 21 : (i + 1) * 21].reshape(-1)
        assert np.array_equal(source[block, : len(piece)].numpy(), piece)
        assert not source[block, len(piece) :].any()


@pytest.mark.parametrize("total", [1000, copying.STREAM_BYTES + 1000])
@pytest.mark.parametrize(("size", "shift"), [(1, 0), (36, 64), (64, 8), (64, 0), (420, 8), (420, 64)])
def test_copies_with_the_caches_and_past_them(total: int, size: int, shift: int) -> None:
    lengths = np.random.default_rng(size).integers(1, 51, -(-2 * total // (size * 50)) + 1)
    Scattered([size], lengths.tolist(), 7, target_shift=shift, seed=size)


@pytest.mark.parametrize("sizes", [(44, 12, 4, 1), (1, 3)])
def test_records_of_large_trajectories(sizes: tuple[int, ...]) -> None:
    lengths = [1, 2 * copying.STREAM_BYTES // sum(sizes), 299]
    Scattered(sizes, lengths, 300, packed=True, spare=-sum(sizes) % 4)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    block_steps=st.integers(1, 70),
    packed=st.booleans(),
    spare=st.integers(0, 20),
    shift=st.integers(0, 8),
    window=st.tuples(st.sampled_from([1, 1, 3, 40]), st.integers(-9, 9), st.sampled_from(PADS)),
    seed=st.integers(0, 99),
)
def test_scatters(
    sizes: list[int],
    lengths: list[int],
    block_steps: int,
    packed: bool,
    spare: int,
    shift: int,
    window: tuple[int, int, int],
    seed: int,
) -> None:
    """What a scatter wrote, and nothing else; and what a gather finds there, in columns and in records."""
    options: dict[str, Any] = {"packed": packed, "spare": spare, "spare_lines": spare % 3, "seed": seed}
    made = Scattered(sizes, lengths, block_steps, source_shift=shift, **options)
    random, (length, offset, pad) = np.random.default_rng(seed), window
    slots, anchors = random.integers(0, len(lengths), 40), random.integers(-5, 70, 40)
    outs = [torch.full((40, length, size), 77, dtype=torch.uint8) for size in sizes]
    columns = []
    for i, (memory, out) in enumerate(zip(made.outputs, outs, strict=True)):
        source = torch.from_numpy(memory[GUARD:-GUARD]).view(-1, made.strides[i])
        where = {"inside": made.insides[i], "step_stride": made.records[i]}
        columns.append(GatherColumn(source, out, offset + i // 2, pad, **where))
    extent = np.stack((made.lengths, made.starts, np.zeros_like(made.starts)), axis=1)
    table = GatherPlan(columns, block_steps).table.numpy()
    assert gathering.gather(table, slots, anchors, extent, made.ids, block_steps, 0, 40, None) == 0
    for i, (out, rows) in enumerate(zip(outs, made.given, strict=True)):
        spec = Spec(sizes[i], length, offset + i // 2, pad)
        found, _ = windows_of(rows, spec, torch.from_numpy(slots), torch.from_numpy(anchors))
        assert np.array_equal(out.numpy(), found)


@hypothesis.given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    block_steps=st.integers(1, 40),
    first=st.integers(-130, 130),
    span=st.integers(0, 150),
    count=st.integers(0, 6),
    seed=st.integers(0, 999),
)
def test_resolve(lengths: list[int], block_steps: int, first: int, span: int, count: int, seed: int) -> None:
    """Every step that a window covers is found through the compact block tables; the rest of them is not written."""
    store = Store([1], lengths, block_steps, seed=seed)
    slots, anchors = store.draw(count, seed)
    width = span // block_steps + 2
    extent = np.full((count + 1, 3), -7, dtype=np.int64)
    ids = np.full((count + 1, width), -7, dtype=np.int32)
    gathering.resolve(
        slots.numpy(), anchors.numpy(), store.extent.numpy(), store.block_ids.numpy(), block_steps,
        first, first + span, extent[:count], ids, store.num_blocks, False,
    )  # fmt: skip
    assert (extent[count] == -7).all()
    assert (ids[count] == -7).all()
    for b, (slot, anchor) in enumerate(zip(slots.tolist(), anchors.tolist(), strict=True)):
        steps, row, final = store.extent[slot].tolist()
        assert extent[b, 0] == steps
        assert extent[b, 2] == final
        for step in range(max(anchor + first, 0), min(anchor + first + span + 1, steps + final)):
            place = extent[b, 1] + step // block_steps
            assert b * width <= place < (b + 1) * width
            assert ids.reshape(-1)[place] == store.block_ids[row + step // block_steps]
