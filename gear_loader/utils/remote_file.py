"""Files at addresses of object stores, read by range; blocks used last are kept, and what follows is read ahead."""

from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from typing import IO, Any, cast

from gear_loader.errors import CheckpointError, GearError
from gear_loader.utils.addresses import call, file_system, repeated

BLOCK_BYTES = 1 << 20
"""What is read and kept of a file at a time."""
_KEPT_BLOCKS = 64
_AHEAD_BLOCKS = 8  # most that are read before they are asked for
_RANGE_BLOCKS = 8  # of one request


def read_ranges(
    system: Any, pieces: Sequence[tuple[str, int, int]], address: str, error: type[GearError]
) -> list[bytes]:
    """Read pieces of files side by side, and those again that fail or arrive cut off.

    Args:
        system: of `file_system`. pieces: path in it, first byte and the one after the last of each.
        address: of the first file, for errors.

    Raises:
        error: the store refuses, or fails until the deadline; or there is no such file.
    """
    found: dict[int, bytes] = {}

    def attempt() -> None:
        left = [number for number in range(len(pieces)) if number not in found]
        paths, begins, ends = (list(each) for each in zip(*(pieces[number] for number in left), strict=True))
        answers = call(system, "cat_ranges", paths, begins, ends, size=sum(ends) - sum(begins))
        failure: BaseException | None = None
        for number, answer, begin, end in zip(left, answers, begins, ends, strict=True):
            if isinstance(answer, BaseException):
                failure = failure or answer
            elif len(answer) > end - begin:
                raise error(
                    f"{address} has {len(answer):,} bytes in answer to a request of {end - begin:,}: the server does "
                    "not read by range, or the file has changed. Copy it to this machine, and read that."
                )
            elif len(answer) < end - begin:
                failure = failure or OSError(
                    errno.EIO, f"{len(answer):,} bytes arrived; expected {end - begin:,}"
                )
            else:
                found[number] = bytes(answer)
        if failure is not None:
            raise failure

    try:
        repeated(attempt, address, "read", error)
    except FileNotFoundError as missing:
        raise error(
            f"{address}, or a file that is read with it, is not there, although it was listed or asked for before. "
            "Expected data that stay as they are."
        ) from missing
    return [found[number] for number in range(len(pieces))]


def open_address(
    address: str, error: type[GearError] = CheckpointError, *, size: int | None = None
) -> IO[bytes]:
    """Open a file at an address for reading: seekable, read by range.

    Args:
        address: ``scheme://...``, also a chain such as ``"simplecache::s3://bucket/file"``.
        error: raised for what cannot be opened or read.
        size: bytes of the file, if they are known; else this asks for them.
    """
    system, path = file_system(address, error)
    if size is None:
        size = repeated(lambda: call(system, "info", path), address, "opened", error).get("size")
    if size is None:  # a server that does not tell: from its beginning to its end
        return cast("IO[bytes]", repeated(lambda: system.open(path, "rb"), address, "opened", error))
    return cast("IO[bytes]", RemoteFile(system, path, address, size, error))


class RemoteFile(io.RawIOBase):
    """A file at an address, of one thread at a time.

    Args:
        system, path: as of `file_system`. size: its bytes. error: raised for what cannot be read.

    Attributes:
        failure: what a read has raised last, for libraries that show another error in its place.
    """

    def __init__(self, system: Any, path: str, address: str, size: int, error: type[GearError]) -> None:
        self._system, self._path, self._address, self._size, self._error = system, path, address, size, error
        self._place = 0
        self._kept: dict[int, bytes] = {}  # by number, those used last at the end
        self._next, self._ahead = 0, 0
        self.failure: Exception | None = None

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The byte that is read next."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of `io.IOBase`."""
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        if place < 0:
            raise ValueError(f"seek to byte {place}; expected 0 or more")
        self._place = place
        return place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; fewer bytes only at the end of the file."""
        view = memoryview(buffer).cast("B")
        begin, end = self._place, min(self._place + len(view), self._size)
        if end <= begin:
            return 0
        first, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        blocks = self._blocks(first, last)
        for number in range(first, last + 1):
            start = number * BLOCK_BYTES
            low, high = max(begin, start), min(end, start + BLOCK_BYTES)
            view[low - begin : high - begin] = memoryview(blocks[number])[low - start : high - start]
        self._place = end
        return end - begin

    def _blocks(self, first: int, last: int) -> dict[int, bytes]:
        """Some blocks; others are kept as long as there is room."""
        missing = [number for number in range(first, last + 1) if number not in self._kept]
        if missing:
            self._ahead = min(2 * self._ahead + 1, _AHEAD_BLOCKS) if missing[0] == self._next else 0
            end = min(last + 1 + self._ahead, -(-self._size // BLOCK_BYTES))
            missing += [number for number in range(last + 1, end) if number not in self._kept]
            self._next = missing[-1] + 1
        found = {number: self._kept.pop(number) for number in range(first, last + 1) if number in self._kept}
        for number, block in self._fetched(missing):
            (found if number <= last else self._kept)[number] = block
        self._kept.update(found)
        while len(self._kept) > _KEPT_BLOCKS:
            del self._kept[next(iter(self._kept))]
        return found

    def _fetched(self, numbers: list[int]) -> list[tuple[int, bytes]]:
        """Read blocks: those that follow one another by one request."""
        runs: list[list[int]] = []
        for number in numbers:
            if not runs or number != runs[-1][-1] + 1 or len(runs[-1]) == _RANGE_BLOCKS:
                runs.append([])
            runs[-1].append(number)
        pieces = [
            (self._path, run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, self._size)) for run in runs
        ]
        try:
            found = read_ranges(self._system, pieces, self._address, self._error) if pieces else []
        except Exception as failure:
            self.failure = failure
            raise
        return [
            (number, data[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES])
            for run, data in zip(runs, found, strict=True)
            for place, number in enumerate(run)
        ]
