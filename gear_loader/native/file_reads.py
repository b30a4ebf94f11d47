"""Reads of many pieces of files, one after another without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, int64, types

from gear_loader.native.compile import compiled
from gear_loader.native.copying import pointer

__all__ = ["ADDRESS", "BEGIN", "BYTES", "CHUNK", "FD", "VERIFIED", "WIDTH", "read_pieces"]

FD, BEGIN, BYTES, ADDRESS, VERIFIED, CHUNK = range(6)
"""Columns of `reads`: descriptor, first byte in the file, bytes, address that they go to, address of the flags of the
file's chunks (bool; True where it was compared with its checksum), and bytes of a chunk."""
WIDTH = 6
_pread: Any = types.ExternalFunction(
    "pread64", types.int64(types.int32, types.int64, types.uint64, types.int64)
)


@compiled
def read_pieces(reads, done) -> None:  # type: ignore[no-untyped-def]
    """Read pieces of files whose chunks are all verified.

    Args:
        reads: int64 [n, WIDTH]. done: bool [n], output: which pieces were read; not those that touch other chunks, and
            those that could not be read whole.
    """
    for i in range(len(reads)):
        chunk, begin, left, address = reads[i, CHUNK], reads[i, BEGIN], reads[i, BYTES], reads[i, ADDRESS]
        first, last = begin // chunk, (begin + left - 1) // chunk
        flags = carray(pointer(reads[i, VERIFIED] + first), (last - first + 1,), np.uint8)
        whole = True
        for flag in flags:
            whole &= flag != 0
        while whole and left > 0:
            count = _pread(np.int32(reads[i, FD]), address, types.uint64(left), int64(begin))
            if count <= 0:
                break
            address, begin, left = address + count, begin + count, left - count
        done[i] = whole and left == 0
