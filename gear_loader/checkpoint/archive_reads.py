"""Reading rows of segments whose columns lie in an object store: `gear_loader.checkpoint.archive` moves them there.

The chunks that hold the rows of a request, and are not in memory, are read by range: neighbours in one request, and up
to `THREADS` requests at a time. Each chunk is compared with its checksum, which the directory on the disk has, so
neither a listing nor an object is believed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextvars
import ctypes
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from gear_loader.checkpoint.bucket import Bucket
from gear_loader.checkpoint.names import column_file
from gear_loader.checkpoint.segments import Segment
from gear_loader.errors import CheckpointError
from gear_loader.native.file_reads import ADDRESS, BEGIN, BYTES, CHUNK
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import Array, data_address
from gear_loader.utils.mutex import uninterrupted

THREADS = 32
"""Requests under way at once."""
CACHE_BYTES = 256 << 20
"""Bytes of chunks that a process keeps of what it has read, those used last."""
RANGE_BYTES = 8 << 20
"""Most bytes of a request, or one chunk."""
GAP_BYTES = 512 << 10
"""Unwanted bytes between chunks that are read with them: they take less time than another request."""
_TRIES = 2  # of bytes that are not those of the checksum, which the network may have changed
_FILE_SHIFT = 40  # a key is the number of a file, and of a chunk in it


class DamagedObjectError(CheckpointError):
    """An object has other bytes than the table has written."""


class ArchivedFile:
    """One column of a segment in an archive.

    Args:
        bucket: prefix of the segment. checksums: of its chunks, 8 bytes each.

    Attributes:
        path: address. about: as of a local file, without a descriptor.
    """

    def __init__(self, bucket: Bucket, segment: Segment, name: str, column: Column, checksums: bytes) -> None:
        self._bucket, self._name, self._checksums = bucket, column_file(name), checksums
        self.path = bucket.at(self._name)
        self._chunk_bytes, self._size = segment.chunk_bytes, segment.bytes(name, column)
        self.about = -1, len(segment.header(name, column)), 0, segment.chunk_bytes

    def chunks(self, first: int, last: int) -> list[bytes]:
        """The chunks `first` to `last`, by one request.

        Raises:
            FileNotFoundError: there is no such object. DamagedObjectError: it has other bytes.
            CheckpointError: it cannot be read.
        """
        begin, end = first * self._chunk_bytes, min((last + 1) * self._chunk_bytes, self._size)
        for _ in range(_TRIES):
            data = self._bucket.read_range(self._name, begin, end)
            found = [data[at : at + self._chunk_bytes] for at in range(0, end - begin, self._chunk_bytes)]
            expected = self._checksums[8 * first : 8 * last + 8]
            if b"".join(xxhash.xxh3_64_digest(chunk) for chunk in found) == expected:
                return found
        raise DamagedObjectError(
            f"{self.path} is damaged: the bytes {begin:,} to {end - 1:,} are not those that were written. Restore it "
            "from a copy."
        )


class ArchiveReads:
    """Makes reads from archives, and keeps chunks. Several threads may use it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._kept: collections.OrderedDict[tuple[str, int], bytes] = collections.OrderedDict()
        self._bytes = 0
        self._buckets: dict[str, Bucket] = {}
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def file(self, segment: Segment, name: str, column: Column, checksums: bytes) -> ArchivedFile:
        """A column of a segment in an archive; no request is made.

        Raises:
            CheckpointError: fsspec or a package of the store is missing.
        """
        root, kind, folder = segment.archive.rsplit("/", 2)
        if root not in self._buckets:
            self._buckets[root] = Bucket.at_address(root, write=False)
        return ArchivedFile(self._buckets[root].child(f"{kind}/{folder}"), segment, name, column, checksums)

    def read(self, pieces: Array, of: Array, files: Sequence[object]) -> dict[int, Exception]:
        """Copy pieces of archived files to where they are wanted.

        Args:
            pieces: int64 [n, WIDTH or more], see `gear_loader.native.file_reads`.
            of: int64 [n], which of `files` each is of.

        Returns:
            Errors by position in `pieces`; after one that is not of damage, the others may not have been read.
        """
        first = pieces[:, BEGIN] // pieces[:, CHUNK]
        counts = (pieces[:, BEGIN] + pieces[:, BYTES] - 1) // pieces[:, CHUNK] - first + 1
        which = np.repeat(np.arange(len(pieces)), counts)
        chunk = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + first[which]
        keys, inverse = np.unique(of[which] << _FILE_SHIFT | chunk, return_inverse=True)
        held, errors = self._chunks(keys, files)
        failed = {int(which[at]): errors[i] for at, i in enumerate(inverse.tolist()) if i in errors}
        sources = np.array([data_address(np.frombuffer(each, np.uint8)) if each else 0 for each in held])
        start = chunk * pieces[which, CHUNK]
        low = np.maximum(pieces[which, BEGIN], start)
        high = np.minimum(pieces[which, BEGIN] + pieces[which, BYTES], start + pieces[which, CHUNK])
        targets = pieces[which, ADDRESS] + low - pieces[which, BEGIN]
        copies = np.stack((targets, sources[inverse] + low - start, high - low), axis=1)
        for target, source, size in copies[sources[inverse] != 0].tolist():
            ctypes.memmove(target, source, size)
        return failed

    def _chunks(
        self, keys: Array, files: Sequence[object]
    ) -> tuple[list[bytes | None], dict[int, Exception]]:
        """Chunks by ascending keys, None where there is an error; and errors by position."""
        names = [(files[key >> _FILE_SHIFT], key & ((1 << _FILE_SHIFT) - 1)) for key in keys.tolist()]
        held: list[bytes | None] = []
        with self._mutex:
            for file, chunk in names:
                assert isinstance(file, ArchivedFile)
                data = self._kept.get((file.path, chunk))
                if data is not None:
                    self._kept.move_to_end((file.path, chunk))
                held.append(data)
        missing = [i for i, data in enumerate(held) if data is None]
        if not missing:
            return held, {}
        runs = _runs([(files[int(keys[i]) >> _FILE_SHIFT], names[i][1], i) for i in missing])
        if self._pool is None:
            uninterrupted(self._start)
        pool = self._pool
        assert pool is not None
        futures = {
            # With the deadline of the caller.
            pool.submit(contextvars.copy_context().run, file.chunks, wanted[0][0], wanted[-1][0]): (
                file,
                wanted,
            )
            for file, wanted in runs
        }
        errors: dict[int, Exception] = {}
        for future in concurrent.futures.as_completed(futures):
            file, wanted = futures[future]
            try:
                found = future.result()
            except (CheckpointError, OSError) as error:
                errors.update((i, error) for _, i in wanted)
                if isinstance(error, DamagedObjectError):
                    continue
                for other in futures:  # those that are under way write nowhere
                    other.cancel()
                return held, errors
            for chunk, i in wanted:
                held[i] = found[chunk - wanted[0][0]]
            self._keep({(file.path, wanted[0][0] + at): data for at, data in enumerate(found)})
        return held, errors

    def _keep(self, chunks: Mapping[tuple[str, int], bytes]) -> None:
        with self._mutex:
            for key, data in chunks.items():
                if key not in self._kept:
                    self._kept[key] = data
                    self._bytes += len(data)
            while self._bytes > CACHE_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    def _start(self) -> None:
        """Start all threads: what interrupts a later start of one may leave it waiting for ever."""
        with self._mutex:
            if self._pool is None:
                self._pool = started_pool(THREADS, "gear-loader-archive")


def started_pool(threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    """A pool all of whose threads run."""
    pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=name)
    gate = threading.Event()
    for _ in range(threads):
        pool.submit(gate.wait)
    gate.set()
    return pool


def _runs(chunks: Sequence[tuple[object, int, int]]) -> list[tuple[ArchivedFile, list[tuple[int, int]]]]:
    """Requests for chunks: the file of each, and numbers and positions of its wanted chunks, ascending.

    Args:
        chunks: file, number and position of each, by file and number.
    """
    runs: list[tuple[ArchivedFile, list[tuple[int, int]]]] = []
    for file, chunk, i in chunks:
        assert isinstance(file, ArchivedFile)
        size = file.about[3]
        if runs and runs[-1][0] is file:
            wanted = runs[-1][1]
            gap, whole = chunk - wanted[-1][0] - 1, chunk - wanted[0][0] + 1
            if gap * size <= GAP_BYTES and whole * size <= RANGE_BYTES:
                wanted.append((chunk, i))
                continue
        runs.append((file, [(chunk, i)]))
    return runs
