"""Files of a directory while they are written or read; `gear_loader.checkpoint.bucket` has those of a bucket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import Any

from gear_loader.utils.descriptors import Descriptor

SECTOR = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)


def write_all(fd: int, view: memoryview) -> None:
    """Write at the file's position. The part after the last whole sector goes through the page cache."""
    while len(view):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        direct = flags & O_DIRECT
        whole = len(view) // SECTOR * SECTOR if direct else len(view)
        if direct and whole == 0:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~O_DIRECT)
            continue
        try:
            done = os.write(fd, view[:whole])
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            done = 0  # a file system with larger sectors
        if direct and (done == 0 or done % SECTOR):
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~O_DIRECT)
        elif done == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[done:]


class NewFile:
    """A file that is written from its beginning to its end; closed at the end of a `with` block.

    Args:
        file: open for writing, which this closes.
    """

    def __init__(self, file: Descriptor) -> None:
        self._file = file

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def write(self, view: memoryview) -> None:
        """Write the next bytes."""
        write_all(self._file.fileno(), view)

    def sync(self) -> None:
        """Make all that was written durable; nothing is written after it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; idempotent. What was not synced is lost."""
        self._file.close()


class FileToRead:
    """A file that is read; closed at the end of a `with` block.

    Args:
        file: open for reading, which this closes.

    Attributes:
        fd: descriptor; -1 of a file in a bucket. size: bytes.
        piece_bytes: how many to read at a time.
    """

    piece_bytes = 1 << 20  # stays in a core's cache

    def __init__(self, file: Descriptor) -> None:
        self._file = file
        self.fd = file.fileno()
        self.size = os.fstat(self.fd).st_size

    def __enter__(self) -> FileToRead:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def advise(self, advice: int) -> None:
        """Say how the file will be read, for `posix_fadvise`."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.fd, 0, 0, advice)

    def read_into(self, view: memoryview, begin: int) -> int:
        """Read bytes from `begin` on into a buffer; return how many, 0 at the end of the file."""
        return os.preadv(self.fd, [view], begin)

    def read(self, count: int) -> bytes:
        """The first `count` bytes, or fewer at the end of the file."""
        with open(self.fd, "rb", closefd=False) as file:
            return file.read(count)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
