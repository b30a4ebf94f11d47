"""Reads of pieces of files without the GIL, and where their bytes belong in a table."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_loader.native.copying import copy_rows
from gear_loader.native.file_reads import WIDTH, ranges_of, read_pieces


def reads_cached(fd: int) -> bool:
    """Whether the file system reads what is in the page cache without waiting."""
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except OSError:
        return False


@pytest.mark.parametrize("cached", [False, True])
def test_pieces_of_verified_chunks_are_read(tmp_path: Path, cached: bool) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    fd, flags = os.open(tmp_path / "file", os.O_RDONLY), np.ones(10, dtype=bool)
    flags[4] = False
    out = np.zeros((6, 300), dtype=np.uint8)
    wanted = [(0, 300), (350, 50), (390, 20), (500, 250), (950, 50), (950, 60)]
    reads = np.empty((len(wanted), WIDTH), dtype=np.int64)
    for i, (begin, size) in enumerate(wanted):
        reads[i] = fd, begin, size, out[i].ctypes.data, flags.ctypes.data, 100
    flags_of_last = np.ones(12, dtype=bool)  # the file is shorter than its record says
    reads[5, 4] = flags_of_last.ctypes.data
    done = np.zeros(len(wanted), dtype=bool)
    read_pieces(reads, done, cached)
    works = not cached or reads_cached(fd)
    os.close(fd)
    assert done.tolist() == [works, works, False, works, works, False]
    for i in np.flatnonzero(done).tolist():
        begin, size = wanted[i]
        assert (out[i, :size] == data[begin : begin + size]).all()
        assert not out[i, size:].any()
    assert not out[2].any()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    gaps=st.lists(st.booleans(), min_size=8, max_size=8),
    size=st.integers(1, 5),
    block_steps=st.integers(1, 4),
    most=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_ranges_hold_what_is_copied(
    lengths: list[int], gaps: list[bool], size: int, block_steps: int, most: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    steps = np.array(lengths)
    ends = np.cumsum(steps + np.array(gaps[: len(steps)]))
    first = ends - steps
    blocks = -(-steps // block_steps)
    places = np.cumsum(blocks) - blocks
    ids = generator.permutation(blocks.sum() + 3)[: blocks.sum()].astype(np.int32)
    stride = block_steps * size + int(generator.integers(0, 3))
    memory = generator.integers(0, 256, (len(ids) + 3) * stride, dtype=np.uint8)
    column = np.array([memory.ctypes.data, stride, size, size, block_steps])
    low, high = sorted(generator.integers(0, ends[-1] * size + 1, 2).tolist())
    out = np.empty((most, 2), dtype=np.int64)
    count = ranges_of(low, high, first, ends, places, ids, column, out)
    covered = np.zeros(ends[-1] * size, dtype=bool)
    for begin, end in zip(first.tolist(), ends.tolist(), strict=True):
        covered[begin * size : end * size] = True
    if count < 0:
        assert not covered[low:high].all() or most < (high - low) // size + 2
        return
    assert covered[low:high].all()
    expected = np.zeros(high - low, dtype=np.uint8)
    if high > low:
        copy_rows(expected.ctypes.data, low, high, first, ends, places, ids, column, False)
    found = [memory[begin : begin + length] for begin, length in out[:count].tolist()]
    assert (np.concatenate([expected[:0], *found]) == expected).all()
