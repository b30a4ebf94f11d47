"""Moving cold segments of a table with a disk tier into an object store, when its directory becomes full.

A segment goes in four steps, so that one of its two copies is whole whatever is killed or cut at any moment:

1. the name of its objects, which no others ever have, is written to `ARCHIVE_NAME` in the directory;
2. its columns are uploaded, and read back: sizes and all checksums must be those of the segment on the disk;
3. the next manifest names the objects; the file of checksums stays in the directory;
4. when the manifest before it, which is kept, names them too, the files of the columns are removed.

Objects that neither manifest names, of uploads that were cut or of segments without live trajectories, are removed by
their names in `ARCHIVE_NAME`. Nothing is listed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence

import xxhash

from gear_loader.checkpoint.bucket import Bucket
from gear_loader.checkpoint.changes import OnDisk
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.files import write_small
from gear_loader.checkpoint.json_file import read_limited
from gear_loader.checkpoint.manifest import Manifest
from gear_loader.checkpoint.names import ARCHIVED, PART, column_file, segment_folder
from gear_loader.checkpoint.reading import ColumnFile
from gear_loader.checkpoint.segments import Segment, read_checksums, stored_columns
from gear_loader.errors import CheckpointError
from gear_loader.storage.schema import Schema
from gear_loader.utils.mutex import Event
from gear_loader.utils.notices import notice

ARCHIVE_NAME = "archive.json"
COLUMNS_AT_ONCE = 4
"""Columns of a segment that are uploaded at a time."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TICK = 0.01
_END_SECONDS = 5.0
"""Seconds that the end of a table waits for a request; the objects of that upload are removed by the next owner."""


class _StoppedError(CheckpointError):
    """The table is being closed."""


class Archive:
    """Uploads segments, and removes what is not needed any more, in a thread of the owner.

    Args:
        address: of the archive. directory: of the table. schema: of the table.

    Attributes:
        error: why the last attempt failed; None after one that succeeded.

    Raises:
        CheckpointError: the address cannot hold an archive.
    """

    def __init__(self, address: str, directory: Directory, schema: Schema) -> None:
        self._bucket = Bucket.at_address(address, write=True)
        self._directory, self._schema = directory, schema
        self.error: str | None = None
        self._queue: tuple[Segment, ...] = ()
        # Addresses of uploaded segments that no known manifest names yet.
        self._confirmed: dict[int, str] = {}
        self._damaged: set[int] = set()
        self._named: frozenset[str] = frozenset()
        self._follows = False  # whether `_named` is known
        self._moved: tuple[Segment, ...] = ()
        self._unsettled = False
        self._released: set[int] = set()
        self._known = _read_names(directory)
        self._stop, self._bell = Event(), Event()
        self._thread = threading.Thread(target=self._run, name="gear-loader-archive", daemon=True)

    # ---------------------------------------------------------------- for the thread that writes the table

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def apply(self, on_disk: OnDisk) -> None:
        """Note in what a write begins with which segments are in the archive by now."""
        for number, address in list(self._confirmed.items()):
            if number in on_disk.segments and not on_disk.segments[number].archive:
                on_disk.segments[number] = dataclasses.replace(on_disk.segments[number], archive=address)

    def follow(self, manifest: Manifest | None, previous: Manifest | None) -> None:
        """Learn which manifests are in place, after a write."""
        both = [each.segments for each in (manifest, previous) if each is not None]
        self._named = frozenset(
            segment.archive for segments in both for segment in segments if segment.archive
        )
        self._follows = True
        local = {segment.number for segments in both for segment in segments if not segment.archive}
        now = () if manifest is None else manifest.segments
        self._moved = tuple(each for each in now if each.archive and each.number not in local)
        given = {each.archive for each in now}
        self._unsettled = any(each.archive and each.number in local for each in now) or any(
            each.archive not in given for segments in both for each in segments if each.archive
        )
        here = {segment.number for segment in now if not segment.archive}
        self._queue = tuple(segment for segment in self._queue if segment.number in here)
        for number in list(self._confirmed):
            if number not in here:  # now is `_named` set, and what is not in the queue is not uploaded again
                self._confirmed.pop(number, None)
        self._bell.set()

    @property
    def wants_write(self) -> bool:
        """Whether the manifest does not say where segments are, or the one before it still needs files or objects."""
        return bool(self._confirmed) or self._unsettled

    @property
    def is_idle(self) -> bool:
        """Whether all that was asked for is done."""
        return self._next() is None

    def ask(self, segments: Sequence[Segment]) -> None:
        """Have segments uploaded, in their order, in place of those that were asked for before."""
        self._queue = tuple(segments)
        if segments:
            self._bell.set()

    def make_room(self, segments: Sequence[Segment]) -> bool:
        """Wait until one of some segments is uploaded; False if none can be, or the store fails."""
        self.ask(segments)
        while True:
            left = {segment.number for segment in segments} - self._damaged
            if not left.isdisjoint(self._confirmed):
                return True
            if not left or self.error or not self._thread.is_alive() or self._stop.is_set():
                return False
            time.sleep(_TICK)

    def end(self) -> None:
        """End the thread; idempotent."""
        self._stop.set()
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        pause, left = _FIRST_PAUSE, False
        while not self._stop.is_set():
            self._bell.wait(pause if left else None)
            self._bell = Event()
            try:
                self._release()
                while (segment := self._next()) is not None and not self._stop.is_set():
                    self._upload(segment)
                    self.error = None
                self.error = None
                left = not self._remove_objects()
            except _StoppedError:
                return
            except Exception as error:
                if self._stop.is_set():
                    return
                left, self.error = True, f"Segments stay in {self._directory.path}: {error}"
                notice(f"archive {self._bucket.path}", self.error)
                self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE) if left else _FIRST_PAUSE

    def _next(self) -> Segment | None:
        done = self._damaged | set(self._confirmed)
        return next((segment for segment in self._queue if segment.number not in done), None)

    def _release(self) -> None:
        """Remove the local files of columns whose objects both manifests name."""
        for segment in self._moved:
            if segment.number not in self._released:
                with (
                    contextlib.suppress(FileNotFoundError),
                    self._directory.child(segment.folder) as folder,
                ):
                    ours = {column_file(name) for name in stored_columns(self._schema)}
                    folder.remove_files(ours.__contains__)
                self._released.add(segment.number)

    def _remove_objects(self) -> bool:
        """Remove objects that are not needed; return whether all are."""
        if not self._follows:
            return True
        # An address is in `_confirmed` until `_named` has it, so that is read last.
        confirmed = set(self._confirmed.values())
        doomed = self._known - confirmed - self._named
        for address in sorted(doomed):
            bucket = self._bucket_of(address)
            for name in stored_columns(self._schema):
                self._check_stop()
                try:
                    bucket.remove_file(column_file(name))
                except FileNotFoundError:
                    continue
                except CheckpointError as error:
                    notice(f"objects {address}", f"{error} They stay in the archive, and are tried again.")
                    return False
        if doomed:
            self._note(self._known - doomed)
        return True

    def _bucket_of(self, address: str) -> Bucket:
        """The prefix of a segment, which may be in an archive of before."""
        root, kind, folder = address.rsplit("/", 2)
        bucket = self._bucket if root == self._bucket.path else Bucket.at_address(root, write=True)
        return bucket.child(f"{kind}/{folder}")

    def _note(self, known: Collection[str]) -> None:
        """Write the names of all objects, durably."""
        self._known = set(known)
        with contextlib.suppress(FileNotFoundError):
            self._directory.remove_file(ARCHIVE_NAME + PART)
        write_small(self._directory, ARCHIVE_NAME + PART, json.dumps(sorted(known)).encode())
        self._directory.rename(ARCHIVE_NAME + PART, ARCHIVE_NAME)
        self._directory.sync()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _StoppedError("the table is closed")

    # ---------------------------------------------------------------- one segment

    def _upload(self, segment: Segment) -> None:
        """Upload a segment, and read it back.

        Raises:
            CheckpointError, OSError: it cannot be uploaded, or is not what was read back.
        """
        path = segment_folder(segment.number, secrets.token_hex(8))
        self._note(self._known | self._named | {self._bucket.at(path)})
        target = self._bucket.child(path)
        try:
            with self._directory.child(segment.folder) as folder:
                checksums = read_checksums(folder, segment, self._schema)

                def copy(name: str) -> None:
                    self._copy(folder, target, segment, name, checksums[name])

                with concurrent.futures.ThreadPoolExecutor(COLUMNS_AT_ONCE) as pool:
                    list(pool.map(copy, stored_columns(self._schema)))
        except FileNotFoundError as error:
            if str(error.filename).startswith(self._directory.path):
                self._damaged.add(segment.number)  # it is gone: a write has copied what was live in it
                return
            raise
        self._confirmed[segment.number] = target.path

    def _copy(self, folder: Directory, target: Bucket, segment: Segment, name: str, checksums: bytes) -> None:
        """Upload the file of a column, and compare what the store has."""
        column, file_name = stored_columns(self._schema)[name], column_file(name)
        with ColumnFile(folder, segment, name, column, checksums, os.POSIX_FADV_SEQUENTIAL) as file:

            def write() -> None:
                with target.new_file(file_name, file.size) as new:
                    for view in self._chunks(file, segment):
                        new.write(view)
                    new.sync()

            target.again(write, file_name)
        with ColumnFile(target, segment, name, column, checksums, os.POSIX_FADV_SEQUENTIAL) as copy:
            for _ in self._chunks(copy, segment):
                pass

    def _chunks(self, file: ColumnFile, segment: Segment) -> Iterator[memoryview]:
        """The chunks of a file, each after it was compared with its checksum."""
        memory = memoryview(bytearray(min(file.chunk_bytes, file.size)))
        for chunk in range(-(-file.size // file.chunk_bytes)):
            self._check_stop()
            begin, end = file.bounds(chunk)
            view = memory[: end - begin]
            file.read(view, begin)
            try:
                file.compare(chunk, xxhash.xxh3_64(view))
            except CheckpointError:
                if file.fd >= 0:
                    # On the disk; readers of its trajectories will find out.
                    self._damaged.add(segment.number)
                raise
            yield view


def _read_names(directory: Directory) -> set[str]:
    """The addresses in `ARCHIVE_NAME`; others are not touched."""
    try:
        found = json.loads(read_limited(directory, ARCHIVE_NAME, lambda size: None))
    except (CheckpointError, FileNotFoundError, ValueError):
        return set()
    names = found if isinstance(found, list) else []
    return {name for name in names if isinstance(name, str) and ARCHIVED.fullmatch(name)}
