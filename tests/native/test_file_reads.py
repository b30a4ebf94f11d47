"""Reads of pieces of files without the GIL."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gear_loader.native.file_reads import WIDTH, read_pieces


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
