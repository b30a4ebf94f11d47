"""Reading parts of column files: whole chunks, each checked against its own checksum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.checkpoint.files import check_size, read_piece, read_through
from gear_loader.checkpoint.json_file import FileRecord
from gear_loader.errors import CheckpointError
from gear_loader.utils.arrays import Array

__all__ = ["read_ranges"]


def read_ranges(
    directory: Directory,
    name: str,
    record: FileRecord,
    chunk_bytes: int,
    header_bytes: int,
    step_bytes: int,
    ranges: Array,
    take: Callable[[Array, int, int], None],
) -> None:
    """Read ranges of steps of a column's file, and check the chunks that contain them.

    Args:
        directory, name: place of the file. record: expected size, and checksums of the chunks.
        chunk_bytes: bytes of a chunk. header_bytes: bytes before the first step. step_bytes: bytes of a step.
        ranges: int64 [n, 2], ascending: first step of each range, and the step after its last.
        take: as for `Pipeline.read`. The steps are verified; they include steps between two ranges of one chunk.

    Raises:
        CheckpointError: the file is missing or has another size, or a chunk is damaged.
    """
    path = directory.at(name)
    check_size(directory, name, record.bytes)
    memory = bytearray(step_bytes + min(chunk_bytes, record.bytes))
    buffer = np.frombuffer(memory, dtype=np.uint8)
    with read_through(directory, name) as fd:
        for begin, end in _merged(ranges, chunk_bytes, header_bytes, step_bytes):
            low, high = header_bytes + begin * step_bytes, header_bytes + end * step_bytes
            held, done = 0, begin
            for chunk in range(low // chunk_bytes, (high - 1) // chunk_bytes + 1):
                start = chunk * chunk_bytes
                view = memoryview(memory)[step_bytes : step_bytes + min(chunk_bytes, record.bytes - start)]
                _read_chunk(fd, path, record, chunk, start, view)
                first = step_bytes + (low - start if low > start else -held)
                last = step_bytes + min(len(view), high - start)
                steps = (last - first) // step_bytes
                if steps:
                    take(buffer[first : first + steps * step_bytes], done, done + steps)
                done += steps
                held = last - first - steps * step_bytes
                buffer[step_bytes - held : step_bytes] = buffer[last - held : last].copy()


def _merged(ranges: Array, chunk_bytes: int, header_bytes: int, step_bytes: int) -> list[tuple[int, int]]:
    """Merge ranges that share a chunk."""
    first = (header_bytes + ranges[:, 0] * step_bytes) // chunk_bytes
    last = (header_bytes + ranges[:, 1] * step_bytes - 1) // chunk_bytes
    heads = np.flatnonzero(np.append(True, first[1:] > last[:-1]))
    tails = np.append(heads[1:], len(ranges)) - 1
    return list(zip(ranges[heads, 0].tolist(), ranges[tails, 1].tolist(), strict=True))


def _read_chunk(fd: int, path: str, record: FileRecord, chunk: int, start: int, view: memoryview) -> None:
    try:
        read_piece(fd, path, view, start)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}. {REMEDY}") from error
    found, expected = xxhash.xxh3_64_hexdigest(view), record.chunks[16 * chunk : 16 * chunk + 16]
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: the checksum of the {len(view):,} bytes from {start:,} on is {found}, expected "
            f"{expected}. {REMEDY}"
        )
