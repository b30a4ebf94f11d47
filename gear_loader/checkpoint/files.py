"""Pipelined writing of column files, in pieces of 8 MiB: one is written while the next is prepared.

Each file is written once from its beginning to its end, and its checksum is computed in the same pass. Files are
written with O_DIRECT where the file system supports it, because they would push useful pages out of the page cache.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import mmap
import os
import queue
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory, named
from gear_loader.checkpoint.json_file import FileRecord
from gear_loader.errors import CheckpointError
from gear_loader.utils.arrays import Array
from gear_loader.utils.descriptors import Descriptor

__all__ = [
    "Arena",
    "Pipeline",
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


# Files -----------------------------------------------------------------------------------------------


def write_small(directory: Directory, name: str, data: bytes) -> FileRecord:
    """Write and sync a new file that fits into memory."""
    with directory.create(name) as file, named(directory.at(name)):
        _write_all(file.fileno(), memoryview(data))
        os.fsync(file.fileno())
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


def _open_new(directory: Directory, name: str) -> Descriptor:
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


class Arena:
    """Memory in whole pages that is used again by each write, so that its pages are allocated once."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, dtype=np.uint8)

    def take(self, sizes: Sequence[int]) -> list[Array]:
        """Arrays uint8 of these numbers of bytes, each from a multiple of 4096 on; the ones taken before end."""
        rounded = [-(-size // _SECTOR) * _SECTOR for size in sizes]
        if len(self._memory) < sum(rounded):
            self._memory = np.empty(0, dtype=np.uint8)  # before more is allocated
            self._memory = np.frombuffer(mmap.mmap(-1, sum(rounded)), dtype=np.uint8)
        starts = np.cumsum([0, *rounded]).tolist()
        return [self._memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


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


class Pipeline:
    """A ring of buffers and a thread that writes one while the caller fills another.

    Args:
        step_bytes: bytes of a step of the largest column.
        advance: called with the number of bytes after each piece, for a progress bar.
    """

    def __init__(self, step_bytes: int, advance: Callable[[int], None]) -> None:
        self._advance = advance
        # A piece, preceded by the header or by what the previous piece left of a sector.
        self._before = -(-max(step_bytes, _LONGEST_HEADER) // _SECTOR) * _SECTOR
        size = self._before + PIECE_BYTES
        self._memory = [mmap.mmap(-1, size) for _ in range(BUFFERS)]  # whole pages, for O_DIRECT
        self._views = [memoryview(memory) for memory in self._memory]
        self._arrays = [np.frombuffer(memory, dtype=np.uint8) for memory in self._memory]
        self._thread = _Caller()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._thread.end()

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
        ready: Array | None = None,
    ) -> FileRecord:
        """Write a column's file and sync it.

        Args:
            directory, name: place of the file, which must not exist.
            header: bytes before the first step, a multiple of 4096.
            steps: number of steps. step_bytes: bytes of each.
            fill: called with an array uint8 ``[(end - begin) * step_bytes]``, `begin` and `end`; writes the steps
                `begin` to `end` - 1 into the array.
            chunk_bytes: bytes of a chunk with a checksum of its own.
            ready: all steps, uint8, if they are in memory of an `Arena` already; `fill` is not called then.

        Returns:
            Size and checksums.
        """
        checksum = _Checksum(chunk_bytes)
        work: list[_Call | None] = [None] * BUFFERS
        path = directory.at(name)
        file = _open_new(directory, name)
        try:
            if ready is not None:
                self._write_ready(file, path, header, ready, checksum, work)
                steps = 0
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
                work[turn] = self._thread.submit(_write_piece, file, path, self._views[turn][:whole])
                held = buffer[whole:filled].tobytes()
                self._advance(count * step_bytes)
                turn = (turn + 1) % BUFFERS
            for turn in range(len(work)):
                _wait(work, turn)
            with named(path):
                os.fsync(file.fileno())
        finally:
            self._thread.submit(_nothing).wait()  # also for calls whose submission was interrupted
            file.close()
        written = steps * step_bytes if ready is None else len(ready)
        return FileRecord(len(header) + written, *checksum.digests())

    def _write_ready(
        self,
        file: Descriptor,
        path: str,
        header: bytes,
        ready: Array,
        checksum: _Checksum,
        work: list[_Call | None],
    ) -> None:
        """Write a header and bytes in memory, whose checksum is computed meanwhile. `work`: of the pieces."""
        self._arrays[0][: len(header)] = np.frombuffer(header, dtype=np.uint8)
        views = [self._views[0][: len(header)]]
        data = ready.data
        views += [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
        work[:] = [self._thread.submit(_write_piece, file, path, view) for view in views]
        for view in views:
            checksum.update(view)
            self._advance(len(view))


def _wait(work: list[_Call | None], turn: int) -> None:
    call = work[turn]
    if call is not None:
        call.result()


def _write_piece(file: Descriptor, path: str, view: memoryview) -> None:
    with named(path):
        _write_all(file.fileno(), view)


def _nothing() -> None:
    """What a caller submits to wait for all calls before it."""


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
