"""Reads of pieces of files, many of them without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, int64, types

from gear_loader.native.compile import compiled
from gear_loader.native.memory import pointer

FD, BEGIN, BYTES, ADDRESS, VERIFIED, CHUNK = range(6)
"""Columns of `reads`: descriptor, first byte in the file, bytes, address that they go to, address of the flags of the
file's chunks (bool; True where it was compared with its checksum), and bytes of a chunk."""
WIDTH = 6
_preadv2: Any = types.ExternalFunction(
    "preadv64v2", types.int64(types.int32, types.uint64, types.int32, types.int64, types.int32)
)
_NOWAIT = 8  # RWF_NOWAIT: only what is in the page cache


@compiled
def read_pieces(reads, done, cached) -> None:  # type: ignore[no-untyped-def]
    """Read pieces of files whose chunks are all verified.

    Args:
        reads: int64 [n, WIDTH]. done: bool [n], output: which pieces were read; not those that touch other chunks, and
            those that could not be read whole.
        cached: whether to read only what is in the page cache, and wait for no disk.
    """
    vector = np.empty(2, dtype=np.int64)  # struct iovec
    flags = np.int32(_NOWAIT if cached else 0)
    for i in range(len(reads)):
        chunk, begin, left, address = reads[i, CHUNK], reads[i, BEGIN], reads[i, BYTES], reads[i, ADDRESS]
        first, last = begin // chunk, (begin + left - 1) // chunk
        whole = True
        for verified in carray(pointer(reads[i, VERIFIED] + first), (last - first + 1,), np.uint8):
            whole &= verified != 0
        while whole and left > 0:
            vector[0], vector[1] = address, left
            count = _preadv2(
                np.int32(reads[i, FD]), types.uint64(vector.ctypes.data), np.int32(1), int64(begin), flags
            )
            if count <= 0:
                break
            address, begin, left = address + count, begin + count, left - count
        done[i] = whole and left == 0
