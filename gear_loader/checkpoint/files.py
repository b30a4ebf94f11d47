"""Writing column files in pieces of 8 MiB, with their checksums.

Files are written with O_DIRECT where the file system supports it, because they would push useful pages out of the page
cache.
"""

from __future__ import annotations

import _thread
import functools
import math
import mmap
import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from gear_loader.checkpoint.directory import Directory, named
from gear_loader.checkpoint.json_file import FileRecord
from gear_loader.checkpoint.open_files import SECTOR, NewFile
from gear_loader.utils.arrays import Array

PIECE_BYTES = 8 << 20
BUFFERS = 4
"""Pieces in flight. With two, thread and caller wait for each other to wake up on a busy machine."""

_LONGEST_HEADER = 1 << 16


# Files -----------------------------------------------------------------------------------------------


def write_small(directory: Directory, name: str, data: bytes | memoryview) -> FileRecord:
    """Write and sync a new file that fits into memory."""

    def write() -> None:
        with directory.new_file(name, len(data)) as file, named(directory.at(name)):
            file.write(memoryview(data))
            file.sync()

    directory.again(write, name)
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


class _Checksums:
    """XXH3-64 of each chunk of a file."""

    def __init__(self, chunk_bytes: int) -> None:
        self._size = self._left = chunk_bytes
        self._chunk, self._ended = xxhash.xxh3_64(), bytearray()

    def update(self, view: memoryview) -> None:
        while len(view):
            part = view[: self._left]
            self._chunk.update(part)
            self._left -= len(part)
            view = view[len(part) :]
            if self._left == 0:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._ended += self._chunk.digest()
        self._chunk, self._left = xxhash.xxh3_64(), self._size

    def digests(self) -> bytes:
        """Of all chunks, 8 bytes each."""
        if self._left < self._size:
            self._end_chunk()
        return bytes(self._ended)


class Arena:
    """Memory in whole pages that is used again by each write, so that its pages are allocated once."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}

    def take(self, use: str, sizes: Sequence[int]) -> list[Array]:
        """Arrays uint8 of these numbers of bytes, each from a multiple of 4096 on; those taken for this use end."""
        rounded = [-(-size // SECTOR) * SECTOR for size in sizes]
        if use not in self._memory or len(self._memory[use]) < sum(rounded):
            self._memory.pop(use, None)  # before more is allocated
            self._memory[use] = np.frombuffer(mmap.mmap(-1, max(SECTOR, sum(rounded))), dtype=np.uint8)
        memory, starts = self._memory[use], np.cumsum([0, *rounded]).tolist()
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class _Call:
    """A call that a `_Caller` makes."""

    def __init__(self, function: Callable[..., None], given: tuple[Any, ...]) -> None:
        self._function, self._given = function, given
        self._error: BaseException | None = None
        self._ended = False
        self._bell = _thread.allocate_lock()
        self._bell.acquire()

    def make(self) -> None:
        try:
            self._function(*self._given)
        except BaseException as error:
            self._error = error
        self._ended = True
        self._bell.release()

    def wait(self) -> None:
        """Wait for its end, also again."""
        while not self._ended:
            self._bell.acquire(timeout=0.1)

    def result(self) -> None:
        """Wait for its end; raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error


class _Caller:
    """A thread that makes calls one after another.

    Unlike an executor it takes no lock that other threads or executors of the process take: a save may run in a signal
    handler, in the middle of a call that holds such a lock.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        _thread.start_new_thread(self._work, (self._calls,))

    @staticmethod
    def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
        while (call := calls.get()) is not None:
            call.make()

    def submit(self, function: Callable[..., None], *given: Any) -> _Call:
        call = _Call(function, given)
        self._calls.put(call)
        return call

    def end(self) -> None:
        """End the thread after all calls; so does the end of the object."""
        self._calls.put(None)

    def __del__(self) -> None:
        if hasattr(self, "_calls"):
            self.end()


class ColumnWriter:
    """Writes columns' files in pieces, each from its beginning to its end.

    Args:
        step_bytes: bytes of a step of the largest column.
        advance: called with the number of bytes after each piece, for a progress bar.
        ahead: whether a thread writes a piece while the caller prepares the next ones. Without, one that adds to the
            table meanwhile has a core for itself.
    """

    def __init__(self, step_bytes: int, advance: Callable[[int], None], *, ahead: bool) -> None:
        self._advance = advance
        size = max(step_bytes, PIECE_BYTES, _LONGEST_HEADER)
        self._memory = [mmap.mmap(-1, size) for _ in range(BUFFERS)]  # whole pages, for O_DIRECT
        self._thread = _Caller() if ahead else None

    def __enter__(self) -> ColumnWriter:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._thread is not None:
            self._thread.end()

    def _submit(self, file: NewFile, path: str, view: memoryview) -> _Call:
        if self._thread is not None:
            return self._thread.submit(_write_piece, file, path, view)
        call = _Call(_write_piece, (file, path, view))
        call.make()
        return call

    def write(
        self,
        directory: Directory,
        name: str,
        header: bytes,
        rows: int,
        step_bytes: int,
        piece: Callable[[Array, int, int], Array],
        chunk_bytes: int,
    ) -> bytes:
        """Write a column's file and sync it.

        Args:
            directory, name: place of the file, which must not exist.
            header: bytes before the first row, a multiple of 4096.
            rows: number of rows. step_bytes: bytes of each.
            piece: called with a buffer, uint8 ``[(end - begin) * step_bytes]``, `begin` and `end`; returns the rows
                `begin` to `end` - 1, uint8, in the buffer or other memory that stays as it is.
            chunk_bytes: bytes of a chunk with a checksum of its own.

        Returns:
            Checksums of the chunks, 8 bytes each.
        """
        given = directory, name, header, rows, step_bytes, piece, chunk_bytes
        return directory.again(functools.partial(self._write, *given), name)

    def _write(
        self,
        directory: Directory,
        name: str,
        header: bytes,
        rows: int,
        step_bytes: int,
        piece: Callable[[Array, int, int], Array],
        chunk_bytes: int,
    ) -> bytes:
        checksums = _Checksums(chunk_bytes)
        calls: list[_Call | None] = [None] * BUFFERS
        # Whole sectors if they can be: rows that end amid one would go through the page cache.
        aligned = SECTOR // math.gcd(SECTOR, step_bytes)
        most = max(1, PIECE_BYTES // step_bytes)
        most -= most % aligned if most >= aligned else 0
        path = directory.at(name)
        file = directory.new_file(name, len(header) + rows * step_bytes, direct=True)
        try:
            for turn, begin in enumerate([-1, *range(0, rows, most)]):
                turn %= BUFFERS
                _wait(calls, turn)
                buffer, end = np.frombuffer(self._memory[turn], dtype=np.uint8), min(begin + most, rows)
                if begin < 0:
                    data = buffer[: len(header)]
                    data[:] = np.frombuffer(header, dtype=np.uint8)
                else:
                    data = piece(buffer[: (end - begin) * step_bytes], begin, end)
                    self._advance(len(data))
                calls[turn] = self._submit(file, path, data.data)
                checksums.update(data.data)
            for turn in range(BUFFERS):
                _wait(calls, turn)
            with named(path):
                file.sync()
        finally:
            if self._thread is not None:
                self._thread.submit(_nothing).wait()  # also for calls whose submission was interrupted
            file.close()
        return checksums.digests()


def _wait(calls: list[_Call | None], turn: int) -> None:
    call = calls[turn]
    if call is not None:
        call.result()


def _write_piece(file: NewFile, path: str, view: memoryview) -> None:
    with named(path):
        file.write(view)


def _nothing() -> None:
    """What a caller submits to wait for all calls before it."""
