"""Pipelined reading and writing of column files, in pieces of 8 MiB: one is transferred while the next is prepared.

Each file is read or written once from its beginning to its end, and its checksum is computed in the same pass. Files
are written with O_DIRECT where the file system supports it, because they would push useful pages out of the page cache.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory, named
from gear_loader.checkpoint.json_file import FileRecord
from gear_loader.errors import CheckpointError
from gear_loader.utils.arrays import Array

__all__ = [
    "Pipeline",
    "Rows",
    "check_size",
    "read_piece",
    "read_through",
    "write_small",
]

PIECE_BYTES = 8 << 20
BUFFERS = 4
"""Pieces in flight. With two, thread and caller wait for each other to wake up on a busy machine."""

_SECTOR = 4096
_LONGEST_HEADER = 1 << 16
_O_DIRECT = getattr(os, "O_DIRECT", 0)


# Copying between blocks and rows ---------------------------------------------------------------------


class Rows:
    """Maps rows of a file, which holds trajectories one after another (gaps allowed), to blocks in memory.

    Args:
        first: int64 [n], ascending: first row of each trajectory.
        lengths: int64 [n], steps of each trajectory.
        block_steps: steps of a block.
    """

    def __init__(self, first: Array, lengths: Array, block_steps: int) -> None:
        self.first, self.ends = first, first + lengths
        self.block_steps = block_steps

    def pieces(self, begin: int, end: int) -> tuple[Array, Array, Array, Array, Array]:
        """Split the rows `begin` to `end` - 1 into pieces that each lie within one block.

        Returns:
            Five arrays, int64 [pieces]: position of the trajectory, position of the block in the trajectory, first step
            inside the block, number of steps, and first row relative to `begin`.
        """
        low = int(np.searchsorted(self.ends, begin, side="right"))
        high = int(np.searchsorted(self.first, end, side="left"))
        which = np.arange(low, high)
        start = np.maximum(begin, self.first[which]) - self.first[which]
        stop = np.minimum(end, self.ends[which]) - self.first[which]
        block = start // self.block_steps
        count = (stop - 1) // self.block_steps - block + 1
        before = np.cumsum(count) - count
        which, block = np.repeat(which, count), np.repeat(block - before, count) + np.arange(count.sum())
        start, stop = np.repeat(start, count), np.repeat(stop, count)
        inside = np.maximum(start - block * self.block_steps, 0)
        step = block * self.block_steps + inside
        steps = np.minimum(stop, (block + 1) * self.block_steps) - step
        return which, block, inside, steps, self.first[which] + step - begin


# Files -----------------------------------------------------------------------------------------------


def write_small(directory: Directory, name: str, data: bytes) -> FileRecord:
    """Write and sync a new file that fits into memory."""
    fd = directory.create(name)
    try:
        with named(directory.at(name)):
            _write_all(fd, memoryview(data))
            os.fsync(fd)
    finally:
        os.close(fd)
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


def check_size(directory: Directory, name: str, expected: int) -> None:
    """Check that a file, or a link to one, exists and has the expected size.

    Raises:
        CheckpointError: the file is missing or has another size.
    """
    path = directory.at(name)
    try:
        with named(path):
            info = os.stat(name, dir_fd=directory.fd)
    except OSError as error:
        raise CheckpointError(f"{path} is missing or cannot be read: {error}. {REMEDY}") from error
    if not stat.S_ISREG(info.st_mode) or info.st_size != expected:
        raise CheckpointError(
            f"{path} has {info.st_size:,} bytes; expected a file of {expected:,}: it was cut or changed. {REMEDY}"
        )


def _write_all(fd: int, view: memoryview) -> None:
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


def _open_new(directory: Directory, name: str) -> int:
    try:
        return directory.create(name, _O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL or not _O_DIRECT:
            raise
    with contextlib.suppress(FileNotFoundError):
        directory.remove_file(name)  # some file systems create the file before they refuse O_DIRECT
    return directory.create(name)


class _Checksum:
    """Checksums of a file and of each of its chunks."""

    def __init__(self, chunk_bytes: int) -> None:
        self._whole, self._chunk = xxhash.xxh3_128(), xxhash.xxh3_64()
        self._size, self._left = chunk_bytes, chunk_bytes
        self._chunks: list[str] = []

    def update(self, view: memoryview) -> None:
        self._whole.update(view)
        while len(view):
            part = view[: self._left]
            self._chunk.update(part)
            self._left -= len(part)
            view = view[len(part) :]
            if self._left == 0:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk, self._left = xxhash.xxh3_64(), self._size

    def digests(self) -> tuple[str, str]:
        """`xxh128` and `chunks` of a `FileRecord`."""
        if self._left < self._size:
            self._end_chunk()
        return self._whole.hexdigest(), "".join(self._chunks)


class Pipeline:
    """A ring of buffers and a thread that reads or writes one while the caller works on another.

    Args:
        step_bytes: bytes of a step of the largest column.
        advance: called with the number of bytes after each piece, for a progress bar.
    """

    def __init__(self, step_bytes: int, advance: Callable[[int], None]) -> None:
        self._advance = advance
        # A piece, preceded by the header or by the step that the previous piece had a part of.
        self._before = -(-max(step_bytes, _LONGEST_HEADER) // _SECTOR) * _SECTOR
        size = self._before + PIECE_BYTES
        self._memory = [mmap.mmap(-1, size) for _ in range(BUFFERS)]  # whole pages, for O_DIRECT
        self._views = [memoryview(memory) for memory in self._memory]
        self._arrays = [np.frombuffer(memory, dtype=np.uint8) for memory in self._memory]
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gear-loader-checkpoint")

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._thread.shutdown()

    def write(
        self,
        directory: Directory,
        name: str,
        header: bytes,
        steps: int,
        step_bytes: int,
        fill: Callable[[Array, int, int], None],
        *,
        chunk_bytes: int,
    ) -> FileRecord:
        """Write a column's file and sync it.

        Args:
            directory, name: place of the file, which must not exist.
            header: bytes before the first step, a multiple of 4096.
            steps: number of steps. step_bytes: bytes of each.
            fill: called with an array uint8 ``[(end - begin) * step_bytes]``, `begin` and `end`; writes the steps
                `begin` to `end` - 1 into the array.
            chunk_bytes: bytes of a chunk with a checksum of its own.

        Returns:
            Size and checksums.
        """
        checksum = _Checksum(chunk_bytes)
        work: list[concurrent.futures.Future[None] | None] = [None] * BUFFERS
        path = directory.at(name)
        fd = _open_new(directory, name)
        try:
            held, done, turn = header, 0, 0
            while done < steps:
                buffer = self._arrays[turn]
                _wait(work, turn)
                buffer[: len(held)] = np.frombuffer(held, dtype=np.uint8)
                count = min(steps - done, max(1, (len(buffer) - len(held)) // step_bytes))
                filled = len(held) + count * step_bytes
                fill(buffer[len(held) : filled], done, done + count)
                checksum.update(self._views[turn][0 if done == 0 else len(held) : filled])
                done += count
                whole = filled if done == steps else filled // _SECTOR * _SECTOR
                work[turn] = self._thread.submit(_write_piece, fd, path, self._views[turn][:whole])
                held = buffer[whole:filled].tobytes()
                self._advance(count * step_bytes)
                turn = (turn + 1) % BUFFERS
            for turn in range(BUFFERS):
                _wait(work, turn)
            with named(path):
                os.fsync(fd)
        finally:
            concurrent.futures.wait(
                [future for future in work if future]
            )  # the thread uses the descriptor until then
            os.close(fd)
        return FileRecord(len(header) + steps * step_bytes, *checksum.digests())

    def read(
        self,
        directory: Directory,
        name: str,
        record: FileRecord,
        header: bytes,
        step_bytes: int,
        take: Callable[[Array, int, int], None],
    ) -> None:
        """Read a column's file and check its size, header and checksum.

        Args:
            directory, name: place of the file. record: expected size and checksum.
            header: expected bytes before the first step. step_bytes: bytes of a step.
            take: called with an array uint8 ``[(end - begin) * step_bytes]``, `begin` and `end`: steps of the file, not
                verified yet, because the checksum of the file is known only at its end.

        Raises:
            CheckpointError: the file is missing, or its size, header or checksum is wrong.
        """
        path = directory.at(name)
        check_size(directory, name, record.bytes)
        checksum = xxhash.xxh3_128()
        starts = range(0, record.bytes, PIECE_BYTES)
        ahead: collections.deque[concurrent.futures.Future[int]] = collections.deque()
        with read_through(directory, name) as fd:

            def fetch(piece: int) -> None:
                if piece < len(starts):
                    count = min(PIECE_BYTES, record.bytes - starts[piece])
                    view = self._views[piece % BUFFERS][self._before : self._before + count]
                    ahead.append(self._thread.submit(read_piece, fd, path, view, starts[piece]))

            try:
                for piece in range(BUFFERS - 1):
                    fetch(piece)
                held, done = b"", 0
                for piece, begin in enumerate(starts):
                    count = ahead.popleft().result()
                    fetch(piece + BUFFERS - 1)
                    turn = piece % BUFFERS
                    low, high = self._before, self._before + count
                    checksum.update(self._views[turn][low:high])
                    if begin == 0:
                        found = self._views[turn][low : low + len(header)].tobytes()
                        if found != header:
                            raise CheckpointError(
                                f"{path} has the header {found.strip()!r}; expected {header.strip()!r}. {REMEDY}"
                            )
                        low += len(header)
                    self._arrays[turn][low - len(held) : low] = np.frombuffer(held, dtype=np.uint8)
                    low -= len(held)
                    steps = (high - low) // step_bytes
                    if steps:
                        take(self._arrays[turn][low : low + steps * step_bytes], done, done + steps)
                    held = self._views[turn][low + steps * step_bytes : high].tobytes()
                    done += steps
                    self._advance(steps * step_bytes)
            except OSError as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{path} cannot be read: {error}. {REMEDY}") from error
            finally:
                for future in ahead:
                    future.cancel()
                concurrent.futures.wait(ahead)  # the thread uses the descriptor until then
        if checksum.hexdigest() != record.xxh128:
            raise CheckpointError(
                f"{path} is damaged: its checksum is {checksum.hexdigest()}, expected {record.xxh128}. {REMEDY}"
            )


def _wait(work: list[concurrent.futures.Future[None] | None], turn: int) -> None:
    future = work[turn]
    if future is not None:
        future.result()


def _write_piece(fd: int, path: str, view: memoryview) -> None:
    with named(path):
        _write_all(fd, view)


def read_piece(fd: int, path: str, view: memoryview, begin: int) -> int:
    """Fill a buffer with the bytes of a file from `begin` on, and return its size.

    Raises:
        CheckpointError: the file ends before the buffer is full.
    """
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], begin + done)
        if count == 0:
            raise CheckpointError(f"{path} was cut to {begin + done:,} bytes while it was read. {REMEDY}")
        done += count
    return done


@contextlib.contextmanager
def read_through(directory: Directory, name: str) -> Iterator[int]:
    """Open a file for sequential reading and yield its descriptor.

    Raises:
        CheckpointError: the file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        try:
            fd, _ = stack.enter_context(directory.opened(name))
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{directory.at(name)} cannot be read: {error}. {REMEDY}") from error
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield fd
