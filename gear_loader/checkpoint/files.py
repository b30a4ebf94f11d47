"""Writing column files in pieces of 8 MiB, with their checksums.

Files are written with O_DIRECT where the file system supports it, because they would push useful pages out of the page
cache.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import math
import mmap
import os
import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from gear_loader.checkpoint.directory import Directory, named
from gear_loader.checkpoint.json_file import FileRecord
from gear_loader.utils.arrays import Array
from gear_loader.utils.descriptors import Descriptor

PIECE_BYTES = 8 << 20
BUFFERS = 4
"""Pieces in flight. With two, thread and caller wait for each other to wake up on a busy machine."""

_SECTOR = 4096
_LONGEST_HEADER = 1 << 16
_O_DIRECT = getattr(os, "O_DIRECT", 0)


# Files -----------------------------------------------------------------------------------------------


def write_small(directory: Directory, name: str, data: bytes | memoryview) -> FileRecord:
    """Write and sync a new file that fits into memory."""
    with directory.create(name) as file, named(directory.at(name)):
        write_all(file.fileno(), memoryview(data))
        os.fsync(file.fileno())
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


def write_all(fd: int, view: memoryview) -> None:
    """Write at the file's position. The part after the last whole sector goes through the page cache."""
    while len(view):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        direct = flags & _O_DIRECT
        whole = len(view) // _SECTOR * _SECTOR if direct else len(view)
        if direct and whole == 0:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
            continue
        try:
            done = os.write(fd, view[:whole])
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            done = 0  # a file system with larger sectors
        if direct and (done == 0 or done % _SECTOR):
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
        elif done == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[done:]


def _open_new(directory: Directory, name: str) -> Descriptor:
    try:
        return directory.create(name, _O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL or not _O_DIRECT:
            raise
    with contextlib.suppress(FileNotFoundError):
        directory.remove_file(name)  # some file systems create the file before they refuse O_DIRECT
    return directory.create(name)


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
        rounded = [-(-size // _SECTOR) * _SECTOR for size in sizes]
        if use not in self._memory or len(self._memory[use]) < sum(rounded):
            self._memory.pop(use, None)  # before more is allocated
            self._memory[use] = np.frombuffer(mmap.mmap(-1, max(_SECTOR, sum(rounded))), dtype=np.uint8)
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

    def _submit(self, file: Descriptor, path: str, view: memoryview) -> _Call:
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
        checksums = _Checksums(chunk_bytes)
        calls: list[_Call | None] = [None] * BUFFERS
        # Whole sectors if they can be: rows that end amid one would go through the page cache.
        aligned = _SECTOR // math.gcd(_SECTOR, step_bytes)
        most = max(1, PIECE_BYTES // step_bytes)
        most -= most % aligned if most >= aligned else 0
        path = directory.at(name)
        file = _open_new(directory, name)
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
                os.fsync(file.fileno())
        finally:
            if self._thread is not None:
                self._thread.submit(_nothing).wait()  # also for calls whose submission was interrupted
            file.close()
        return checksums.digests()


def _wait(calls: list[_Call | None], turn: int) -> None:
    call = calls[turn]
    if call is not None:
        call.result()


def _write_piece(file: Descriptor, path: str, view: memoryview) -> None:
    with named(path):
        write_all(file.fileno(), view)


def _nothing() -> None:
    """What a caller submits to wait for all calls before it."""
