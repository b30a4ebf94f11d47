"""Copies into blocks, with the caches and past them."""

from __future__ import annotations

import numpy as np
import pytest

from gear_loader.native import copying


@pytest.mark.parametrize("shift", [0, 64, 8])
@pytest.mark.parametrize("step_bytes", [1, 36, 64, 420])
@pytest.mark.parametrize("total", [1000, copying.STREAM_BYTES + 1000])
def test_trajectories_get_into_their_blocks_to_the_byte(total: int, step_bytes: int, shift: int) -> None:
    generator = np.random.default_rng(step_bytes)
    block_steps, longest = 7, 50
    lengths = generator.integers(1, longest + 1, -(-2 * total // (step_bytes * longest)) + 1)
    blocks = -(-lengths // block_steps)
    ids = generator.permutation(int(blocks.sum())).astype(np.int32)
    stride = -(-block_steps * step_bytes // 128) * 128
    memory = np.full(len(ids) * stride + 256, 7, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 128 + shift :][: len(ids) * stride]
    given = generator.integers(0, 7, (int(lengths.sum()), step_bytes), dtype=np.uint8)
    ends = np.cumsum(lengths)
    addresses = given.ctypes.data + (ends - lengths)[:, None] * step_bytes
    columns = np.array([[memory.ctypes.data, stride, step_bytes]], dtype=np.int64)

    copying.scatter(columns, block_steps, ids, addresses, lengths)

    expected, first = np.full_like(memory, 7).reshape(-1, stride), 0
    for i, length in enumerate(lengths.tolist()):
        for step in range(0, length, block_steps):
            part = given[ends[i] - length + step : ends[i] - length + min(step + block_steps, length)]
            expected[ids[first], : part.size] = part.reshape(-1)
            first += 1
    assert (memory.reshape(-1, stride) == expected).all()
