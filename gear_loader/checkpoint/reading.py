"""Reading column files: one chunk after another with its checksum, and by several threads into a table's blocks.

For the latter a thread takes some chunks of a file and reads them in pieces that stay in its core's cache, from which
each is copied into the blocks. A chunk that holds none of the wanted rows is not read. The checksums of the chunks
cover every byte that is read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from gear_loader.checkpoint.bucket import folder_to_load
from gear_loader.checkpoint.directory import REMEDY, Directory, readable
from gear_loader.checkpoint.names import column_file
from gear_loader.checkpoint.segments import Segment
from gear_loader.errors import CheckpointError
from gear_loader.native.copying import copy_rows
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import Array, data_address
from gear_loader.utils.mutex import Event
from gear_loader.utils.progress import progress_bar

TASK_BYTES = 16 << 20
"""Bytes that a thread takes at a time."""
MAX_THREADS = 8
_PER_THREAD = 4 << 20
"""Fewest bytes for a thread."""


class ColumnFile:
    """The open file of one column of a segment.

    Args:
        folder: of the segment. name: of the column.
        checksums: of the file's chunks, see `gear_loader.checkpoint.segments`.
        advice: how it will be read, for `posix_fadvise`.

    Attributes:
        path: for errors. fd: descriptor, -1 of a file in a bucket. chunk_bytes: of the segment.
        piece_bytes: how many to read at a time.
        size: bytes of the file. header: bytes before the first row.

    Raises:
        CheckpointError: it has another size, or is no regular file. OSError: it cannot be opened.
    """

    def __init__(
        self, folder: Directory, segment: Segment, name: str, column: Column, checksums: bytes, advice: int
    ) -> None:
        self.path, self.chunk_bytes, self._checksums = (
            folder.at(column_file(name)),
            segment.chunk_bytes,
            checksums,
        )
        self.header, self.size = segment.header(name, column), segment.bytes(name, column)
        self._file = folder.open_to_read(column_file(name))
        self.fd, self.piece_bytes = self._file.fd, self._file.piece_bytes
        if self._file.size != self.size:
            self._file.close()
            raise CheckpointError(
                f"{self.path} has {self._file.size:,} bytes; expected {self.size:,}: it was cut or changed. {REMEDY}"
            )
        self._file.advise(advice)

    def __enter__(self) -> ColumnFile:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk in the file, and the byte after its last."""
        return chunk * self.chunk_bytes, min((chunk + 1) * self.chunk_bytes, self.size)

    def read(self, view: memoryview, begin: int) -> None:
        """Fill a buffer with the bytes from `begin` on.

        Raises:
            CheckpointError: they have another header, or the file ends before. OSError: they cannot be read.
        """
        done = 0
        while done < len(view):
            count = self._file.read_into(view[done:], begin + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} was cut to {begin + done:,} bytes while it was read. {REMEDY}"
                )
            done += count
        expected = self.header[begin : begin + len(view)]
        found = view[: len(expected)]
        if found != expected:
            raise CheckpointError(
                f"{self.path} has the header {found.tobytes().strip()!r}; expected {expected.strip()!r}. {REMEDY}"
            )

    def compare(self, chunk: int, checksum: xxhash.xxh3_64) -> None:
        """Raise CheckpointError if a chunk has another checksum."""
        start, stop = self.bounds(chunk)
        found, expected = checksum.digest(), self._checksums[8 * chunk : 8 * chunk + 8]
        if found != expected:
            raise CheckpointError(
                f"{self.path} is damaged: the checksum of the {stop - start:,} bytes from {start:,} on is "
                f"{found.hex()}, expected {expected.hex()}. {REMEDY}"
            )


@dataclasses.dataclass(frozen=True)
class ColumnRead:
    """Rows of a column's file, and where they go.

    Attributes:
        folder: path of the segment's columns below the loaded directory, or their address. segment: it.
        name: of the column. column: it. checksums: of the file's chunks.
        first, ends: int64 [n], ascending: first row of each wanted trajectory, and the row after its last.
        places: int64 [n], where the blocks of each begin in the list of blocks.
        place: int64 [5], of the column in the table, as for `copy_rows`.
        before: int64 [n], steps of each trajectory before its first row; none without it.
        begins: whether they are rows that trajectories begin with, and others have, too.
        more: checksums of the file of the values of a ragged column.
    """

    folder: str
    segment: Segment
    name: str
    column: Column
    checksums: bytes
    first: Array
    ends: Array
    places: Array
    place: Array
    more: bytes = b""
    before: Array | None = None
    begins: bool = False

    @property
    def steps_before(self) -> Array:
        """`before`, or zeros."""
        return np.zeros_like(self.first) if self.before is None else self.before

    def copy(self, address: int, low: int, high: int, ids: Array) -> None:
        """Copy bytes `low` to `high` - 1 of the file's rows, which are at an address, into the blocks."""
        before = self.first[:0] if self.before is None else self.before
        copy_rows(address, low, high, self.first, self.ends, before, self.places, ids, self.place, True)

    def chunks(self) -> Array:
        """Numbers of the chunks that hold wanted rows, int64 [n], ascending."""
        size, before = self.column.step_bytes, len(self.segment.header(self.name, self.column))
        low = (before + self.first * size) // self.segment.chunk_bytes
        high = (before + self.ends * size - 1) // self.segment.chunk_bytes
        needed = np.zeros(len(self.checksums) // 8 + 1, dtype=np.int64)
        np.add.at(needed, low, 1)
        np.add.at(needed, high + 1, -1)
        return np.flatnonzero(np.cumsum(needed)[:-1])

    def tasks(self) -> Iterator[tuple[ColumnRead, Array, int]]:
        """It, chunks for one thread, and their bytes; together they are all that hold wanted rows."""
        chunks, size = self.chunks(), self.segment.chunk_bytes
        count = max(1, TASK_BYTES // size)
        for i in range(0, len(chunks), count):
            part = chunks[i : i + count]
            end = min((int(part[-1]) + 1) * size, self.segment.bytes(self.name, self.column))
            yield self, part, end - int(part[-1]) * size + (len(part) - 1) * size


def read_columns(
    directory: Directory, reads: Sequence[ColumnRead], ids: Array, *, progress: bool = False
) -> None:
    """Read rows of column files into blocks, and check the chunks that hold them.

    Args:
        directory: the loaded directory.
        reads: what to read.
        ids: int32, blocks of all trajectories.
        progress: show a progress bar.

    Raises:
        CheckpointError: a file is missing or has another size or header, or a chunk is damaged. Blocks may have been
            written.
    """
    tasks = [task for read in reads for task in read.tasks()]
    total = sum(size for _, _, size in tasks)
    most = directory.threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    threads = max(1, min(most, len(tasks) if directory.threads else total // _PER_THREAD))
    stop = Event()
    pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="gear-loader-load")
    with progress_bar("Loading", total, enabled=progress) as (advance, _):
        try:
            futures = [pool.submit(_read, directory, ids, stop, read, chunks) for read, chunks, _ in tasks]
            for (_, _, size), future in zip(tasks, futures, strict=True):
                future.result()
                advance(size)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)  # threads write into the blocks until then


def _read(directory: Directory, ids: Array, stop: Event, read: ColumnRead, chunks: Array) -> None:
    """Read chunks of a file into the blocks `ids`, until `stop` is set.

    Raises:
        CheckpointError: see `read_columns`.
    """
    with (
        folder_to_load(directory, read.folder) as folder,
        readable(folder.at(column_file(read.name))),
        ColumnFile(
            folder, read.segment, read.name, read.column, read.checksums, os.POSIX_FADV_SEQUENTIAL
        ) as file,
    ):
        buffer: Array = np.empty(file.piece_bytes, dtype=np.uint8)
        address, before = data_address(buffer), len(file.header)
        for chunk in chunks.tolist():
            start, stop_at = file.bounds(chunk)
            checksum = xxhash.xxh3_64()
            for begin in range(start, stop_at, file.piece_bytes):
                if stop.is_set():
                    return
                end = min(begin + file.piece_bytes, stop_at)
                view = buffer[: end - begin].data
                file.read(view, begin)
                checksum.update(view)
                low = max(begin, before)
                if low < end:
                    read.copy(address + low - begin, low - before, end - before, ids)
            file.compare(chunk, checksum)
