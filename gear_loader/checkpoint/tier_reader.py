"""Reading trajectories that lie on disk only, out of the segments of a table with a disk tier.

Where a trajectory lies is in the index (`stored`), so any process of the machine that can open the files reads it. The
reads of a batch are sorted by their place. Of a small one, the calling thread makes those that the page cache answers;
several threads share the others, which the first try has made the kernel begin to read. The first time that a chunk of
a file is touched it is read whole and compared with its checksum; after that only the wanted bytes are read.

The owner may rewrite a segment at any time and remove the old one two writes later. A reader that does not find a file
looks the trajectory up again.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import errno
import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from gear_loader.checkpoint.archive_reads import ArchivedFile, ArchiveReads, DamagedObjectError, started_pool
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.manifest import Manifest, previous_of, read_manifest
from gear_loader.checkpoint.names import MANIFEST_NAME, column_of, values_of
from gear_loader.checkpoint.reading import ColumnFile
from gear_loader.checkpoint.segments import Segment, read_checksums, stored_columns
from gear_loader.checkpoint.shared_places import group_columns
from gear_loader.checkpoint.trajectory_records import segments_of
from gear_loader.errors import CheckpointError, StaleIndexError
from gear_loader.native import file_reads
from gear_loader.native.file_reads import ADDRESS, BEGIN, BYTES, CHUNK, FD, VERIFIED, WIDTH
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.disk_copies import copies_of
from gear_loader.storage.disk_records import MovedRowsError, on_disk, tag_of
from gear_loader.storage.ids import ids_of
from gear_loader.storage.tier_counts import HITS, MISSES, READ_BYTES, READ_NANOSECONDS, SLOW_SHARE, note_wait
from gear_loader.utils.arrays import Array, data_address
from gear_loader.utils.mutex import uninterrupted
from gear_loader.utils.notices import notice

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine
    from gear_loader.storage.schema import Column, Schema

THREADS = 8
"""Reads under way at once."""
CACHED_BYTES = 4 << 20
"""Most bytes of a request of which the calling thread copies what is in the page cache: a request of 96 pieces of 40 B
to 4 KB took 0.38 ms, and 0.66 ms when eight threads did it (two shared cores)."""
_ATTEMPTS = 10
_LOOK_SECONDS = 1.0
"""Seconds after which the manifest is looked at again although all segments are known."""
_WINDOW_SECONDS = 10.0
"""Seconds over which the share of the time that batches read from disk is taken."""
_POSITION, _OF = WIDTH, WIDTH + 1
_OF_A_READ = [BEGIN, BYTES, ADDRESS, _POSITION, _OF]
_DAMAGE = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG)


class _File(ColumnFile):
    """One column of a segment.

    Attributes:
        verified: bool [chunks], the chunks whose checksums have been compared.
        about: descriptor, bytes of the header, address of `verified`, and bytes of a chunk.
    """

    def __init__(
        self, folder: Directory, segment: Segment, name: str, column: Column, checksums: bytes
    ) -> None:
        super().__init__(folder, segment, name, column, checksums, os.POSIX_FADV_RANDOM)
        self.verified = np.zeros(len(checksums) // 8, dtype=bool)
        self.about = self.fd, len(self.header), data_address(self.verified), self.chunk_bytes

    def read_verified(self, view: memoryview, begin: int) -> None:
        """Fill a buffer with the bytes from `begin` on, and verify the chunks that were not verified before.

        Raises:
            CheckpointError: a chunk is damaged. OSError: it cannot be read.
        """
        end = begin + len(view)
        for chunk in range(begin // self.chunk_bytes, (end - 1) // self.chunk_bytes + 1):
            start, stop = self.bounds(chunk)
            low, high = max(begin, start), min(end, stop)
            if self.verified[chunk]:
                self.read(view[low - begin : high - begin], low)
                continue
            data = memoryview(bytearray(stop - start))
            self.read(data, start)
            self.compare(chunk, xxhash.xxh3_64(data))
            self.verified[chunk] = True
            view[low - begin : high - begin] = data[low - start : high - start]


@dataclasses.dataclass(frozen=True)
class _Opened:
    """An open segment: its checksums by column and its columns' files, read and opened when they are first needed."""

    segment: Segment
    checksums: dict[str, bytes] = dataclasses.field(default_factory=dict)
    files: dict[str, _File | ArchivedFile] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Reads:
    """Pieces of files, in the order of their places.

    Attributes:
        pieces: int64 [n, WIDTH + 2], see `gear_loader.native.file_reads`; then the positions of their trajectories in
            the request and of their files in `files`.
        files: open files, None where there was an error.
    """

    pieces: Array
    files: list[_File | ArchivedFile | None]

    def read_cached(self) -> Array:
        """Make the reads that wait for no disk; return the positions of the others, int64 [m]."""
        done = np.zeros(len(self.pieces), dtype=bool)
        file_reads.read_pieces(self.pieces, done, True)
        return np.flatnonzero(~done)

    def read(self, which: Array) -> dict[int, Exception]:
        """Make the reads `which`, int64 [m]; return errors by position in the request."""
        done, pieces = np.zeros(len(which), dtype=bool), self.pieces[which]
        file_reads.read_pieces(pieces, done, False)
        failed: dict[int, Exception] = {}
        for begin, size, address, position, of in pieces[~done][:, _OF_A_READ].tolist():
            file = self.files[of]
            assert isinstance(file, _File)
            try:
                view = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
                file.read_verified(view, begin)
            except (CheckpointError, OSError) as error:
                _check_damage(error)
                failed[position] = error
        return failed


class _Counts:
    """Counts of this process that are not in the table yet, and a notice if batches wait for the disk.

    Args:
        path: of the directory. name: of the table, "" for a private one.
    """

    def __init__(self, path: str, name: str) -> None:
        self.hits = self.misses = self.bytes = self.busy = 0
        self._where = f"table {name!r}" if name else "a private table"
        self._path = path
        self._since = time.monotonic_ns()
        self._window = [0, 0, 0, 0]  # hits, misses, bytes and nanoseconds since then

    def add(self, rows: int, size: int, began: int, ended: int) -> None:
        """Count a read of a batch's rows."""
        self.misses, self.bytes, self.busy = self.misses + rows, self.bytes + size, self.busy + ended - began

    def take(self, tier: Array) -> None:
        """Add the counts to those of the table; under its lock."""
        counted = self.hits, self.misses, self.bytes, self.busy
        self.hits = self.misses = self.bytes = self.busy = 0
        for place, count in zip((HITS, MISSES, READ_BYTES, READ_NANOSECONDS), counted, strict=True):
            tier[place] += count
        self._window = [one + other for one, other in zip(self._window, counted, strict=True)]
        now = time.monotonic_ns()
        if now - self._since >= _WINDOW_SECONDS * 1e9:
            self._look(tier, now)

    def _look(self, tier: Array, now: int) -> None:
        hits, misses, size, busy = self._window
        seconds = (now - self._since) / 1e9
        self._since, self._window = now, [0, 0, 0, 0]
        share = busy / 1e9 / seconds
        note_wait(tier, share)
        if share < SLOW_SHARE:
            return
        notice(
            f"slow tier {self._path}",
            f"Batches of {self._where} wait for the disk: {share:.0%} of the last {seconds:.0f} s was spent reading "
            f"{self._path}, {size / max(busy, 1):.2f} GB/s, {misses / max(1, hits + misses):.0%} of the rows. Give "
            "the table more memory, draw by priority, or use a faster disk (docs/tiers.md).",
        )


class FileReader:
    """Reads rows of a table's trajectories from its segments; see `gear_loader.storage.disk.TierReader`.

    Several threads may use it. A forked child opens the files by itself.

    Args:
        engine: of a table with a disk tier.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.region.layout.tier is not None
        self._engine = weakref.ref(engine)
        self._schema: Schema = engine.schema
        self._columns = stored_columns(engine.schema)
        self._groups = group_columns(engine.schema)
        self._path = engine.region.layout.tier.path
        self._mutex = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._manifest: tuple[int, int] = (0, 0)  # inode and time of the one that was read
        self._segments: dict[int, _Opened] = {}
        self._next_look = 0.0
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._archives = ArchiveReads()
        engine = self._engine()
        self._counts = _Counts(self._path, "" if engine is None or engine.name is None else engine.name)

    def read(
        self,
        slots: Array,
        generations: Array,
        first: Array,
        counts: Array,
        outs: Mapping[str, tuple[Array, Array]],
        *,
        drawn: Array | None = None,
    ) -> None:
        """See `gear_loader.storage.source.Source.read`."""
        places = self._read(slots, generations, first, counts, outs, drawn=drawn)
        for name in self._schema.ragged:
            if name in outs:
                out, offsets = outs[name]
                taken = np.ones_like(counts) if self._schema[name].trajectory else counts
                ends = np.cumsum(taken)
                which = np.repeat(offsets // 16 - ends + taken, taken) + np.arange(int(ends[-1]))
                records = out[: len(out) // 16 * 16].view(np.int64).reshape(-1, 2)
                segments = np.repeat(places["group_segment" if name in self._groups else "segment"], taken)
                if not self._schema[name].trajectory:
                    steps = np.repeat(first - ends + taken, taken) + np.arange(int(ends[-1]))
                    begun = steps < np.repeat(places["begin_rows"], taken)
                    segments = np.where(begun, np.repeat(places["begin_segment"], taken), segments)
                names = np.repeat(slots, taken), segments
                records[which] = on_disk(records[which], *names)

    def read_values(
        self, name: str, slots: Array, tags: Array, first: Array, counts: Array, out: tuple[Array, Array]
    ) -> None:
        """See `gear_loader.storage.disk.TierReader.read_values`."""
        engine = self._engine()
        assert engine is not None
        key = values_of(name)
        size = self._columns[key].step_bytes
        # What lies one after another, in the file and in memory, is read at once.
        joined: Array = np.zeros(len(slots), dtype=bool)
        joined[1:] = (slots[1:] == slots[:-1]) & (first[1:] == first[:-1] + counts[:-1])
        joined[1:] &= tags[1:] == tags[:-1]
        joined[1:] &= out[1][1:] == out[1][:-1] + counts[:-1] * size
        begins = np.flatnonzero(~joined)
        counts = np.add.reduceat(counts, begins)
        slots, tags, first, offsets = slots[begins], tags[begins], first[begins], out[1][begins]
        generations = engine.index.arrays.generation[slots]
        self._read(slots, generations, first, counts, {key: (out[0], offsets)}, tags=tags)

    def _read(
        self,
        slots: Array,
        generations: Array,
        first: Array,
        counts: Array,
        outs: Mapping[str, tuple[Array, Array]],
        *,
        drawn: Array | None = None,
        tags: Array | None = None,
    ) -> Array:
        """Read spans of files; return where the trajectories are, as `_look_up` does.

        Args:
            first: int64 [n], of rows of the trajectories; with `tags`, of rows in the files of the segments that these
                are of.

        Raises:
            LostRowsError, StaleIndexError: see `Source.read`. MovedRowsError: a trajectory is in another segment.
        """
        began = time.monotonic_ns()
        if self._pid != os.getpid():
            self._mutex = threading.Lock()  # the parent's may be held
            self._reset()

        def look_up() -> Array:
            places = self._look_up(slots, generations)
            if tags is not None:
                (key,) = outs
                name = column_of(key)
                if name in self._groups:
                    places["segment"] = places["group_segment"]
                elif not self._schema[name].trajectory:
                    others = (places["begin_rows"] > 0) & (tag_of(places["segment"]) != tags)
                    places["segment"][others] = places["begin_segment"][others]
                if (tag_of(places["segment"]) != tags).any():
                    raise MovedRowsError
                places["first"] = places["begin_rows"] = 0
            return places

        places, same = look_up(), False
        for _ in range(_ATTEMPTS):
            try:
                reads, failed = self._plan(places, first, counts, outs, missing_ok=same)
                failed.update(self._run_archived(reads, slots, missing_ok=same))
                break
            except FileNotFoundError:
                self._next_look = 0.0  # another manifest may say that it is in an archive
                before, places = places, look_up()
                same = bool((segments_of(before) == segments_of(places)).all())
        else:
            raise CheckpointError(
                f"{self._path} was rewritten during each of {_ATTEMPTS} attempts to read from it."
            )
        failed.update(self._run(reads))
        if failed:
            cause = failed[min(failed)]
            raise self._lost(failed, slots, generations) from cause
        if drawn is not None:
            self._counts.add(int(drawn.sum()), int(reads.pieces[:, BYTES].sum()), began, time.monotonic_ns())
        return places

    def sizes(self, slots: Array) -> Array:
        """See `gear_loader.storage.source.Source.sizes`."""
        engine = self._engine()
        assert engine is not None
        index = engine.index
        copies = index.recovery.read(lambda: copies_of(index.arrays, slots))
        return np.stack((copies["length"], copies["final"]), axis=1)

    def count_hits(self, rows: int) -> None:
        """See `gear_loader.storage.disk.TierReader.count_hits`."""
        self._counts.hits += rows

    def flush(self) -> None:
        """See `gear_loader.storage.disk.TierReader.flush`."""
        engine = self._engine()
        if engine is not None and self._pid == os.getpid():
            index = engine.index
            index.recovery.locked(lambda: self._counts.take(index.arrays.tier_counts))

    # ---------------------------------------------------------------- where the rows are

    def _look_up(self, slots: Array, generations: Array) -> Array:
        """Where the trajectories are, `COPY` [n].

        Raises:
            StaleIndexError: a trajectory was evicted or removed, and its index reused.
        """
        engine = self._engine()
        assert engine is not None
        index, arrays = engine.index, engine.index.arrays

        def look() -> Array:
            copies = copies_of(arrays, slots)
            gone = (arrays.generation[slots] != generations) | (copies["sequence"] != arrays.sequence[slots])
            if gone.any():
                raise StaleIndexError(
                    f"{int(gone.sum())} of {len(slots)} trajectories were evicted or removed before they were read "
                    f"from {self._path}; the first is index {slots[gone][0]}."
                )
            self._counts.take(arrays.tier_counts)
            return copies

        return index.recovery.read(look)  # also under the lock, see `TableReader.read_whole`

    def _opened(self, numbers: Array) -> dict[int, _Opened]:
        """The segments by number, of those that the manifests name, those with some numbers among them if they are.

        The caller holds the mutex.

        Raises:
            CheckpointError: they cannot be read.
        """
        # A number is never used again. Files that are gone are to be closed, so it looks for them now and then.
        now = time.monotonic()
        if now < self._next_look and all(number in self._segments for number in numbers.tolist()):
            return self._segments
        self._next_look = now + _LOOK_SECONDS
        with self._directory() as directory:
            info = directory.info(MANIFEST_NAME)
            if self._manifest != (info.st_ino, info.st_mtime_ns):
                named: dict[int, Segment] = {}
                manifests: list[Manifest | None] = [previous_of(directory), read_manifest(directory)]
                for manifest in manifests:
                    if manifest is not None and manifest.schema.to_json() == self._schema.to_json():
                        named.update((segment.number, segment) for segment in manifest.segments)
                kept = self._segments
                self._segments = {
                    number: kept[number]
                    if number in kept and kept[number].segment == segment
                    else _Opened(segment)
                    for number, segment in named.items()
                }
                self._manifest = info.st_ino, info.st_mtime_ns
        return self._segments

    def _directory(self) -> Directory:
        """Open the directory. Raises CheckpointError."""
        try:
            return Directory.open(self._path)
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be opened: {error}. Trajectories of the table lie there only; this process must "
                "be able to read them."
            ) from error

    def _file(self, opened: _Opened, name: str) -> _File | ArchivedFile:
        """The open file of a column. The caller holds the mutex."""
        if name not in opened.files:
            segment = opened.segment
            with self._directory() as directory, directory.child(segment.folder) as folder:
                if not opened.checksums:
                    opened.checksums.update(read_checksums(folder, segment, self._schema))
                column, checksums = self._columns[name], opened.checksums[name]
                opened.files[name] = (
                    self._archives.file(segment, name, column, checksums)
                    if segment.archive
                    else _File(folder, segment, name, column, checksums)
                )
            if (
                name in self._schema.ragged
            ):  # what its records name can be read as long as the segment is open
                self._file(opened, values_of(name))
        return opened.files[name]

    def _plan(
        self,
        places: Array,
        first: Array,
        counts: Array,
        outs: Mapping[str, tuple[Array, Array]],
        *,
        missing_ok: bool,
    ) -> tuple[_Reads, dict[int, Exception]]:
        """The reads of a request in order of their places, and errors of files by position in the request.

        Args:
            missing_ok: whether files that do not exist are such errors, and not raised.

        Raises:
            FileNotFoundError: a file does not exist. CheckpointError: files cannot be opened.
        """
        wanted = [self._pieces(name, places, first, counts) for name in outs]
        numbers, inverse = np.unique(np.concatenate([each[0] for each in wanted]), return_inverse=True)
        files: list[_File | ArchivedFile | None] = []
        errors: list[Exception | None] = []
        with self._mutex:
            opened = self._opened(numbers)
            for number in numbers.tolist():
                for name in outs:
                    found: _File | ArchivedFile | None = None
                    problem: Exception | None = None
                    try:
                        if number not in opened:
                            raise FileNotFoundError(f"the manifest of {self._path} names no segment {number}")
                        found = self._file(opened[number], name)
                    except (CheckpointError, OSError) as error:
                        missing = isinstance(error, FileNotFoundError)
                        if missing and not missing_ok:
                            raise
                        if not missing:
                            _check_damage(error)
                        problem = error
                    files.append(found)
                    errors.append(problem)
        # Of each file, in the order of their names: descriptor, bytes of the header, flags, bytes of a chunk.
        about = np.array([(0, 0, 0, 0) if file is None else file.about for file in files], dtype=np.int64)
        names = ["" if file is None else file.path for file in files]
        order = sorted(range(len(files)), key=names.__getitem__)
        rank = np.empty(len(files), dtype=np.int64)
        rank[order] = np.arange(len(files))
        failed: dict[int, Exception] = {}
        parts: list[Array] = []
        done = 0
        for j, (name, (out, offsets)) in enumerate(outs.items()):
            size, (_, who, rows, taken, skipped) = self._columns[name].step_bytes, wanted[j]
            of = inverse.reshape(-1)[done : done + len(who)] * len(outs) + j
            done += len(who)
            there = about[of, 3] > 0
            for i, number in zip(who[~there].tolist(), of[~there].tolist(), strict=True):
                problem = errors[number]
                assert problem is not None
                failed[i] = problem
            which = np.flatnonzero(there & (taken > 0))
            of = of[which]
            pieces = np.empty((len(which), WIDTH + 2), dtype=np.int64)
            pieces[:, FD], pieces[:, VERIFIED], pieces[:, CHUNK] = about[of, 0], about[of, 2], about[of, 3]
            pieces[:, BEGIN] = about[of, 1] + rows[which] * size
            pieces[:, BYTES] = taken[which] * size
            pieces[:, ADDRESS] = data_address(out) + offsets[who[which]] + skipped[which] * size
            pieces[:, _POSITION], pieces[:, _OF] = who[which], of
            parts.append(pieces)
        pieces = np.concatenate(parts)
        return _Reads(pieces[np.lexsort((pieces[:, BEGIN], rank[pieces[:, _OF]]))], files), failed

    def _pieces(
        self, name: str, places: Array, first: Array, counts: Array
    ) -> tuple[Array, Array, Array, Array, Array]:
        """The spans of a column's files that a request takes, int64 [m] each: segment, position in the request, first
        row in the file, rows, and rows of the request's span before them."""
        who, zero = np.arange(len(places)), np.zeros(len(places), dtype=np.int64)
        if self._columns[name].trajectory:
            kind = "group_" if name in self._groups else ""
            return places[f"{kind}segment"], who, places[f"{kind}place"], zero + 1, zero
        before = np.clip(places["begin_rows"] - first, 0, counts)
        own = (
            places["segment"],
            who,
            places["first"] + first + before - places["begin_rows"],
            counts - before,
            before,
        )
        split = np.flatnonzero(before)
        if not len(split):
            return own
        begins = places["begin_segment"], who, places["begin_first"] + first, before, zero
        parts = [np.concatenate((mine, other[split])) for mine, other in zip(own, begins, strict=True)]
        return parts[0], parts[1], parts[2], parts[3], parts[4]

    # ---------------------------------------------------------------- reading

    def _run_archived(self, reads: _Reads, slots: Array, *, missing_ok: bool) -> dict[int, Exception]:
        """Make the reads from archives; return errors of damaged objects by position in the request.

        Raises:
            FileNotFoundError: there is no such object, unless `missing_ok`. CheckpointError: one cannot be read.
        """
        pieces = reads.pieces[reads.pieces[:, FD] < 0]
        if not len(pieces):
            return {}
        failed: dict[int, Exception] = {}
        for i, error in self._archives.read(pieces, pieces[:, _OF], reads.files).items():
            position = int(pieces[i, _POSITION])
            if isinstance(error, DamagedObjectError):
                failed[position] = error
            elif isinstance(error, FileNotFoundError) and not missing_ok:
                raise error
            else:
                what = "there is no such object" if isinstance(error, FileNotFoundError) else str(error)
                where = f"{error.filename}: " if isinstance(error, FileNotFoundError) else ""
                raise CheckpointError(
                    f"Trajectory {self._id_of(slots[position])} cannot be read: {where}{what}. It lies there only, and "
                    "stays in the table."
                ) from error
        return failed

    def _run(self, reads: _Reads) -> dict[int, Exception]:
        """Make the reads of local files; return errors by position in the request."""
        reads = dataclasses.replace(reads, pieces=reads.pieces[reads.pieces[:, FD] >= 0])
        few = reads.pieces[:, BYTES].sum() <= CACHED_BYTES
        which = reads.read_cached() if few else np.arange(len(reads.pieces))
        if len(which) < 2:
            return reads.read(which)
        if self._pool is None:
            uninterrupted(self._start)
        pool = self._pool
        assert pool is not None
        # Every eighth read in order: neighbours in a file are read at about the same time, and a large column by all.
        futures = [pool.submit(reads.read, which[i::THREADS]) for i in range(min(THREADS, len(which)))]
        # Also of those whose error is raised first: they write into the buffers.
        concurrent.futures.wait(futures)
        failed: dict[int, Exception] = {}
        for future in futures:
            failed.update(future.result())
        return failed

    def _start(self) -> None:
        """Start all threads: what interrupts a later start of one may leave it waiting for ever."""
        with self._mutex:
            if self._pool is None:
                self._pool = started_pool(THREADS, "gear-loader-tier")

    def _id_of(self, slot: int) -> int:
        engine = self._engine()
        assert engine is not None
        return int(ids_of(engine.index.arrays.view, np.array([slot]))[0])

    def _lost(self, failed: Mapping[int, Exception], slots: Array, generations: Array) -> LostRowsError:
        which = np.array(sorted(failed), dtype=np.int64)
        some = which[
            np.unique(slots[which], return_index=True)[1]
        ]  # of one trajectory several values may be lost
        return LostRowsError(
            f"Trajectory {self._id_of(slots[which[0]])} cannot be read: {failed[int(which[0])]}",
            slots[some],
            generations[some],
        )


def _check_damage(error: Exception) -> None:
    """Raise CheckpointError unless an error says that data are lost: others, such as missing rights, may pass."""
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    if not isinstance(cause, OSError) or cause.errno in _DAMAGE:
        return
    raise CheckpointError(f"{error}. Trajectories of the table lie there only, and stay in it.") from error
