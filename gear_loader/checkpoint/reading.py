"""Reading column files by several threads, straight into a table's blocks.

A thread takes some chunks of a file and reads them in pieces that stay in its core's cache: straight into the blocks if
these hold the column's steps side by side, else into a buffer, from which each piece is copied. A chunk that holds none
of the wanted rows is not read. The checksums of the chunks cover every byte that is read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import mmap
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.checkpoint.files import check_size, read_piece, read_through
from gear_loader.checkpoint.json_file import FileRecord
from gear_loader.errors import CheckpointError
from gear_loader.native.copying import copy_rows
from gear_loader.native.file_reads import ranges_of
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import Event

__all__ = ["ColumnRead", "read_columns"]

PIECE_BYTES = 1 << 20
TASK_BYTES = 16 << 20
"""Bytes that a thread takes at a time."""
MAX_THREADS = 8
_RANGES = 64
"""Most places in the blocks that a piece is read to at once."""
_PER_THREAD = 4 << 20
"""Fewest bytes for a thread."""


@dataclasses.dataclass(frozen=True)
class ColumnRead:
    """Rows of a column's file, and where they go.

    Attributes:
        folder, name: place of the file below the loaded directory.
        record: its size and checksums. chunk_bytes: bytes of a chunk with a checksum of its own.
        header: expected bytes before the first row.
        first, ends: int64 [n], ascending: first row of each wanted trajectory, and the row after its last.
        places: int64 [n], where the blocks of each begin in the list of blocks.
        column: int64 [5], as for `copy_rows`.
        memory: uint8 [bytes] from the column's first byte on, if its steps lie side by side in a block; else None.
    """

    folder: str
    name: str
    record: FileRecord
    chunk_bytes: int
    header: bytes
    first: Array
    ends: Array
    places: Array
    column: Array
    memory: Array | None = None

    def chunks(self) -> Array:
        """Numbers of the chunks that hold wanted rows, int64 [n], ascending."""
        size, before = int(self.column[2]), len(self.header)
        low = (before + self.first * size) // self.chunk_bytes
        high = (before + self.ends * size - 1) // self.chunk_bytes
        needed = np.zeros(-(-self.record.bytes // self.chunk_bytes) + 1, dtype=np.int64)
        np.add.at(needed, low, 1)
        np.add.at(needed, high + 1, -1)
        return np.flatnonzero(np.cumsum(needed)[:-1])

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk in the file, and the byte after its last."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.record.bytes)


def read_columns(
    directory: Directory, reads: Sequence[ColumnRead], ids: Array, advance: Callable[[int], None]
) -> None:
    """Read rows of column files into blocks, and check the chunks that hold them.

    Args:
        directory: the loaded directory.
        reads: what to read.
        ids: int32, blocks of all trajectories.
        advance: called with numbers of bytes, of `bytes_of` in all, for a progress bar.

    Raises:
        CheckpointError: a file is missing or has another size or header, or a chunk is damaged. Blocks may have been
            written.
    """
    for read in reads:
        with directory.child_to_load(read.folder) as folder:
            check_size(folder, read.name, read.record.bytes)
    tasks = [_Task(read, chunks) for read in reads for chunks in _groups(read)]
    total = sum(task.bytes for task in tasks)
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)), total // _PER_THREAD))
    reader = _Reader(directory, ids)
    pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="gear-loader-load")
    try:
        for task, future in [(task, pool.submit(reader.run, task)) for task in tasks]:
            future.result()
            advance(task.bytes)
    finally:
        reader.stop.set()
        pool.shutdown(cancel_futures=True)  # threads write into the blocks until then


def bytes_of(reads: Sequence[ColumnRead]) -> int:
    """Bytes that `read_columns` reads."""
    return sum(_Task(read, chunks).bytes for read in reads for chunks in _groups(read))


@dataclasses.dataclass(frozen=True)
class _Task:
    """Chunks of a file, for one thread."""

    read: ColumnRead
    chunks: Array

    @property
    def bytes(self) -> int:
        last = self.read.bounds(int(self.chunks[-1]))
        return (len(self.chunks) - 1) * self.read.chunk_bytes + last[1] - last[0]


def _groups(read: ColumnRead) -> list[Array]:
    chunks = read.chunks()
    count = max(1, TASK_BYTES // read.chunk_bytes)
    return [chunks[i : i + count] for i in range(0, len(chunks), count)]


class _Reader:
    """Reads tasks; each thread has a buffer of its own.

    Attributes:
        stop: makes threads end after the piece that they read.
    """

    def __init__(self, directory: Directory, ids: Array) -> None:
        self.stop = Event()
        self._directory, self._ids = directory, ids
        self._local = threading.local()

    def run(self, task: _Task) -> None:
        """Read chunks into the blocks.

        Raises:
            CheckpointError: see `read_columns`.
        """
        read = task.read
        with (
            self._directory.child_to_load(read.folder) as folder,
            read_through(folder, read.name) as fd,
        ):
            path = folder.at(read.name)
            try:
                for chunk in task.chunks.tolist():
                    self._read_chunk(read, fd, path, chunk)
            except OSError as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{path} cannot be read: {error}. {REMEDY}") from error

    def _read_straight(
        self, read: ColumnRead, fd: int, path: str, begin: int, size: int, checksum: xxhash.xxh3_64
    ) -> bool:
        """Read bytes of a file into the blocks; return whether that was possible. `checksum` is updated."""
        if read.memory is None:
            return False
        low = begin - len(read.header)
        ranges: Array = np.empty((_RANGES, 2), dtype=np.int64)
        count = ranges_of(low, low + size, read.first, read.ends, read.places, self._ids, read.column, ranges)
        if count < 0:
            return False
        memory = read.memory.data
        for start, length in ranges[:count].tolist():
            view = memory[start : start + length]
            begin += read_piece(fd, path, view, begin)
            checksum.update(view)
        return True

    def _buffer(self) -> tuple[memoryview, int]:
        """The buffer of this thread, and its address."""
        if not hasattr(self._local, "buffer"):
            memory = mmap.mmap(-1, PIECE_BYTES)
            address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
            self._local.buffer = memoryview(memory), address
        found: tuple[memoryview, int] = self._local.buffer
        return found

    def _read_chunk(self, read: ColumnRead, fd: int, path: str, chunk: int) -> None:
        buffer, address = self._buffer()
        start, stop = read.bounds(chunk)
        before, checksum = len(read.header), xxhash.xxh3_64()
        for begin in range(start, stop, PIECE_BYTES):
            if self.stop.is_set():
                return
            size = min(PIECE_BYTES, stop - begin)
            if begin >= before and self._read_straight(read, fd, path, begin, size, checksum):
                continue
            view = buffer[:size]
            read_piece(fd, path, view, begin)
            checksum.update(view)
            if begin < before:
                found, expected = view[: before - begin].tobytes(), read.header[begin : begin + len(view)]
                if found != expected:
                    raise CheckpointError(
                        f"{path} has the header {found.strip()!r}; expected {expected.strip()!r}. {REMEDY}"
                    )
            skipped = max(0, before - begin)
            low, high = begin + skipped - before, begin + len(view) - before
            if low < high:
                copy_rows(
                    address + skipped,
                    low,
                    high,
                    read.first,
                    read.ends,
                    read.places,
                    self._ids,
                    read.column,
                    True,
                )
        expected_digest = read.record.chunks[16 * chunk : 16 * chunk + 16]
        if checksum.hexdigest() != expected_digest:
            raise CheckpointError(
                f"{path} is damaged: the checksum of the {stop - start:,} bytes from {start:,} on is "
                f"{checksum.hexdigest()}, expected {expected_digest}. {REMEDY}"
            )
