"""Writing a table in the background: a thread brings a checkpoint up to date whenever the table has changed.

Nothing in the table knows of it. The thread looks at the counters of the index, so it sees the commits of all
processes, and it holds no ticket while it waits for the disk, so no writer waits for it (`Save.run_behind`). The
previous manifest and its files stay beside the current ones, for a disk that loses what it has reported as written.

The directory is locked as long as the table is open, and a forked child does not write.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its hook at the end of the interpreter must run after `_close_all`
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.housekeeping import (
    LockedError,
    check_owned,
    convert_errors,
    is_unfinished_save,
    refuse_links,
    sweep,
)
from gear_loader.checkpoint.housekeeping import lock as lock_directory
from gear_loader.checkpoint.identity import identity
from gear_loader.checkpoint.index import Entries
from gear_loader.checkpoint.manifest import Manifest, no_manifest, open_checkpoint, read_manifest
from gear_loader.checkpoint.names import MANIFEST_NAME, PREVIOUS_NAME, SHARDS_NAME
from gear_loader.checkpoint.saving import Save
from gear_loader.errors import CheckpointError, TableClosedError
from gear_loader.storage.counters import VERSION
from gear_loader.storage.disk import Disk, DiskStats, DiskWriter
from gear_loader.storage.operations import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["Place", "WriteBehind", "create", "open_place", "previous_of", "start"]

_LONGEST_PAUSE = 10.0
"""Most seconds between two attempts after an error, unless `sync_seconds` is longer."""
_logger = logging.getLogger("gear_loader")


class Place:
    """A locked directory that one table is written into.

    Attributes:
        disk: the user's options. directory: the open directory.
        manifest, previous: of the checkpoints that it holds; None where there is none, or none that can be read.
        entries: trajectories of `manifest`, if they are known.
        is_uncertain: whether another manifest may be in place, because an error came while it was put there.
    """

    def __init__(self, disk: Disk, directory: Directory, lock: int) -> None:
        self.disk, self.directory = disk, directory
        self.manifest: Manifest | None = None
        self.previous: Manifest | None = None
        self.entries: Entries | None = None
        self.is_uncertain = False
        self._lock = lock

    def look(self) -> None:
        """Read the manifests, and remove files that they do not name.

        Raises:
            CheckpointError: the current one is damaged.
        """
        directory = self.directory
        self.entries = None
        self.manifest = read_manifest(directory) if directory.has(MANIFEST_NAME) else None
        self.previous = previous_of(directory)
        directory.sync()  # its writer may have died before this; it must be durable before older files are removed
        sweep(directory, self.manifest, self.previous)
        self.is_uncertain = False

    def is_at(self, path: str) -> bool:
        """Whether this is the directory at a path."""
        with contextlib.suppress(OSError):
            info, here = os.stat(path), os.fstat(self.directory.fd)
            return (info.st_dev, info.st_ino) == (here.st_dev, here.st_ino)
        return False

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            os.close(self.directory.fd)
            self._lock = -1


def previous_of(directory: Directory) -> Manifest | None:
    """The manifest of the checkpoint before the current one, or None if there is none that can be read."""
    with contextlib.suppress(CheckpointError):
        if directory.has(PREVIOUS_NAME):
            return read_manifest(directory, PREVIOUS_NAME)
    return None


def open_place(disk: Disk, name: str | None, *, recover: bool = False) -> Place:
    """Lock the directory of a table.

    Args:
        name: of the table, for errors of others.
        recover: whether a table is to be brought back from it; else it is created if it does not exist.

    Raises:
        CheckpointError: it holds other files, cannot be written, or is in use (`LockedError`).
    """
    path = os.fspath(disk.path)
    holder = _holder(name)
    with convert_errors(path):
        directory = open_checkpoint(path) if recover else Directory.make(path)
        try:
            if not recover:
                check_owned(directory, MANIFEST_NAME, is_unfinished_save, what="checkpoint")
            elif not (directory.has(MANIFEST_NAME) or directory.has(PREVIOUS_NAME)):
                raise CheckpointError(no_manifest(path, several=directory.has(SHARDS_NAME)))
            refuse_links(directory)
            return Place(disk, directory, lock_directory(directory, f"{holder} of process {os.getpid()}"))
        except BaseException:
            os.close(directory.fd)
            raise


def _holder(name: str | None) -> str:
    """What a lock says of the table that holds it, without the process."""
    return "a private table" if name is None else f"the table {name!r}"


def create(
    make: Callable[[], tuple[Table, bool]], disk: Disk, name: str | None, *, exist_ok: bool
) -> tuple[Table, DiskWriter | None]:
    """Create a table that is written into a directory; see `Table.create`.

    Args:
        make: creates the table, or with `exist_ok` attaches to it; returns it, and whether it is new.
        name: of the table.

    Returns:
        The table and its writer; None if another process writes the existing table there already.

    Raises:
        CheckpointError: the directory holds other files or another table, is in use, or cannot be written. No table is
            left that did not exist before.
    """
    place: Place | None = None
    busy: LockedError | None = None
    try:
        place = _open_new(disk, name, exist_ok=exist_ok)
    except LockedError as error:
        if not exist_ok or not error.holder.startswith(f"{_holder(name)} of process "):
            raise
        busy = error
    table, new = None, False
    try:
        table, new = make()
        if place is not None:
            return table, start(table, place)
        if busy is not None and new:
            raise busy
        return table, None
    except BaseException:
        if place is not None:
            place.close()
        if table is not None:
            table.close()
            if new and name is not None:
                table.unlink()
        raise


def _open_new(disk: Disk, name: str | None, *, exist_ok: bool) -> Place:
    """Lock the directory of a table that is to be created, or with `exist_ok` may exist.

    Raises:
        CheckpointError: as `open_place`; or it holds a checkpoint, unless `exist_ok` allows that it is of this table.
    """
    place = open_place(disk, name)
    try:
        with convert_errors(place.directory.path):
            place.look()
        if place.manifest is not None and not exist_ok:
            raise _occupied(place)
        return place
    except BaseException:
        place.close()
        raise


def _occupied(place: Place) -> CheckpointError:
    count = 0 if place.manifest is None else place.manifest.num_trajectories
    path = place.directory.path
    return CheckpointError(
        f"{path} holds a table of {count:,} trajectories; expected an empty directory or a new one. "
        f"Table.recover({path!r}) brings that table back and goes on writing there; to begin anew, remove the "
        "directory or choose another. Nothing was changed."
    )


def start(table: Table, place: Place) -> WriteBehind:
    """Write a table into a directory now and, in the background, whenever it has changed.

    Raises:
        CheckpointError: the directory is of another table, or cannot be written.
    """
    name, parent = identity(table, table.index)
    manifest = place.manifest
    if manifest is not None and manifest.table != name and manifest.save != parent:
        raise _occupied(place)
    writer = WriteBehind(table, place)
    try:
        if manifest is None:
            writer.flush()
        writer.begin()
    except BaseException:
        writer.release()
        raise
    return writer


class WriteBehind:
    """Writes a table into a directory in a thread. See `gear_loader.storage.disk.DiskWriter`.

    Args:
        table: the table. Another handle of it is kept, so its memory stays until the rest is written.
        place: the locked directory; closed at the end.
    """

    def __init__(self, table: Table, place: Place) -> None:
        self._table: Table | None = Table(table.region)
        self._place, self._pid = place, os.getpid()
        self._known = "the private table" if table.name is None else f"table {table.name!r}"
        self._mutex = threading.Lock()  # of a write
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gear-loader-disk", daemon=True)
        self._version = -1
        # Under the mutex written, and read at any time:
        self._following = 0 if place.manifest is None else place.manifest.next_sequence
        self._writes = self._bytes = 0
        self._seconds = self._longest = 0.0
        self._error: str | None = None
        self._failed_at = 0.0
        self._abandoned = False
        self._finalizer = weakref.finalize(table, self._abandon)
        self._finalizer.atexit = False
        _writers.add(self)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    # ---------------------------------------------------------------- for the table

    def writes_to(self, path: str) -> bool:
        """Whether this process writes the table into the directory `path`."""
        return self._pid == os.getpid() and self._table is not None and self._place.is_at(path)

    def flush(self) -> None:
        """Write everything that is committed now.

        Raises:
            CheckpointError: it could not be written; the checkpoint before it is unchanged.
        """
        with self._mutex:
            self._write()

    def stats(self) -> DiskStats | None:
        """State of the copy on disk; None in a forked child, which does not write."""
        if self._pid != os.getpid():
            return None
        count, seconds = self._unwritten()
        return DiskStats(
            path=self._place.directory.path,
            unwritten_trajectories=count,
            unwritten_seconds=seconds,
            writes=self._writes,
            bytes_written=self._bytes,
            write_seconds=self._seconds,
            longest_write_seconds=self._longest,
            error=self._error,
        )

    def close(self) -> None:
        """Write the rest, end the thread and release the directory; idempotent. Does nothing in a forked child.

        Raises:
            CheckpointError: the rest could not be written; the message says how much is not on disk.
        """
        if self._pid != os.getpid() or self._table is None:
            return
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            with self._mutex:
                if self._table is not None:  # a thread whose table was abandoned has done it
                    self._write()
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._loss()}") from error
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the table and the directory."""
        self._finalizer.detach()
        self._stop.set()
        self._table = None
        self._place.close()
        _writers.discard(self)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        pause = interval = self._place.disk.sync_seconds
        while not self._stop.wait(pause):
            began = time.monotonic()
            with self._mutex:
                if self._has_changed() or self._error is not None:
                    self._attempt()
            if self._error is None:
                pause = max(0.0, interval - (time.monotonic() - began))
            else:
                pause = max(interval, min(2 * pause, _LONGEST_PAUSE))
        if self._abandoned:
            with self._mutex:
                self._attempt()
            self.release()

    def _has_changed(self) -> bool:
        table = self._table
        return table is not None and int(table.index.arrays.counters[VERSION]) != self._version

    def _attempt(self) -> None:
        """Write, and log the first error of a row and its end."""
        failing = self._error is not None
        try:
            self._write()
        except Exception as error:
            if not failing:
                self._failed_at = time.monotonic()
                _logger.warning("%s %s", error, self._loss())
        else:
            if failing:
                seconds = time.monotonic() - self._failed_at
                _logger.warning(
                    "Writing %s to %s works again, after %.1f s; everything committed is on disk.",
                    self._known,
                    self._place.directory.path,
                    seconds,
                )

    def _write(self) -> None:
        """Bring the directory up to date. The caller holds the mutex.

        Raises:
            CheckpointError: it could not be written.
        """
        table, place = self._table, self._place
        if table is None:
            raise TableClosedError(f"{self._known} is closed; it is no longer written to disk.")
        began = time.monotonic()
        version = int(table.index.arrays.counters[VERSION])
        try:
            with convert_errors(place.directory.path):
                if place.is_uncertain:
                    place.look()
                save = Save(table, place.directory, place.manifest, place.entries)
                try:
                    save.run_behind(place.previous)
                except BaseException:
                    place.is_uncertain = save.manifest is not None
                    raise
        except BaseException as error:
            self._error = str(error) or type(error).__name__
            raise
        assert save.manifest is not None
        place.previous, place.manifest, place.entries = place.manifest, save.manifest, save.entries
        self._version, self._following = version, save.manifest.next_sequence
        self._writes, self._bytes = self._writes + 1, self._bytes + save.bytes_written
        self._seconds = time.monotonic() - began
        self._longest = max(self._longest, self._seconds)
        self._error = None

    def _unwritten(self) -> tuple[int, float]:
        """Number of live trajectories committed since the last write, and seconds since the first of them."""
        table = self._table
        if table is None:
            return 0, 0.0
        arrays = table.index.arrays
        new: Array = np.flatnonzero((arrays.state == READY) & (arrays.sequence >= self._following))
        if not len(new):
            return 0, 0.0
        return len(new), max(0.0, (time.monotonic_ns() - int(arrays.created[new].min())) / 1e9)

    def _loss(self) -> str:
        """What is not on disk, for messages."""
        count, seconds = self._unwritten()
        return (
            f"Of {self._known}, {count:,} trajectories committed in the last {seconds:.1f} s are not in "
            f"{self._place.directory.path}."
        )

    def _abandon(self) -> None:
        """The table was garbage-collected without `close`: let the thread write the rest, for nothing may wait here."""
        if self._pid == os.getpid():
            self._abandoned = True
            self._stop.set()

    def after_fork(self) -> None:
        """Give up the parent's lock and memory in a forked child."""
        self._place.close()
        self._finalizer.detach()
        self._table = None


_writers: set[WriteBehind] = set()


def _after_fork() -> None:
    while _writers:
        _writers.pop().after_fork()


def _close_all() -> None:
    for writer in list(_writers):
        try:
            writer.close()
        except CheckpointError as error:
            _logger.error("%s", error)


os.register_at_fork(after_in_child=_after_fork)
# `atexit` would be too late: no thread can be started there. Executors use the same hook, and the last one registered
# runs first.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
