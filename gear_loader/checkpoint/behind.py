"""Writing a table in the background: a thread brings a checkpoint up to date whenever the table has changed.

Nothing in the index knows of it. The thread looks at the counters of the index, so it sees the commits of all
processes, and it holds no ticket while it waits for the disk, so no writer waits for it (`Save.run_behind`). The
previous manifest and its files stay beside the current ones, for a disk that loses what it has reported as written.

In a table with a disk tier (`Disk.size`) the thread also moves trajectories to disk (`gear_loader.checkpoint.spilling`)
whenever few blocks are free, and writes for that before its time has come.

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

from gear_loader.checkpoint.archive import Archive
from gear_loader.checkpoint.changes import OnDisk
from gear_loader.checkpoint.disk_place import Place, holder_of, occupied, open_new
from gear_loader.checkpoint.files import Arena
from gear_loader.checkpoint.housekeeping import LockedError, convert_errors, identity, is_full
from gear_loader.checkpoint.saving import DiskFullError, Save
from gear_loader.checkpoint.segments import Segment, stored_columns
from gear_loader.checkpoint.spilling import Spiller
from gear_loader.errors import CheckpointError, GearError, TableClosedError
from gear_loader.storage.counters import VERSION
from gear_loader.storage.disk import Disk, DiskStats, DiskWriter, LostRowsError
from gear_loader.storage.lock import LOCK_TIMEOUT
from gear_loader.storage.operations.view import REFUSE
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.addresses import shorter_deadline
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import Event, holds_any, new_mutex, run_alone
from gear_loader.utils.notices import notice

_LONGEST_PAUSE = 10.0
"""Most seconds between two attempts after an error, unless `sync_seconds` is longer."""
_RETRY = 0.5
"""Seconds until the second attempt to write a table with a disk tier, whose writers may wait for it."""
_AMID_TIMEOUT = (
    5.0  # seconds that a signal handler waits for a write that may be waiting for what it interrupted
)
_TICK = 0.005
"""Seconds between two looks at the free blocks of a table with a disk tier."""
_SLOW_TICK = 0.1
"""The same while nothing can be moved to disk."""
_ARCHIVED_FROM = 0.75
"""Share of `Disk.size` from which on segments go to the archive, if there is one."""
_REWRITE_PAUSE = 600.0
"""Seconds from a failed write on in which no segments of the archive are rewritten."""
_REWRITE_SECONDS = 5.0
"""Most that a request to the archive takes in such a write, repetitions included: others may wait for blocks."""
_logger = logging.getLogger("gear_loader")


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
    finish_dropped(disk)
    try:
        place = open_new(disk, name, exist_ok=exist_ok)
    except LockedError as error:
        if not exist_ok or not error.holder.startswith(f"{holder_of(name)} of process "):
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


def finish_dropped(disk: Disk) -> None:
    """Wait until this process no longer writes a table to this place that was dropped without `close`.

    After `LOCK_TIMEOUT` seconds it returns, and the place is still locked.
    """
    for writer in list(_writers):
        writer.finish_if_dropped(os.fspath(disk.path))


def start(table: Table, place: Place) -> WriteBehind:
    """Write a table into a directory now and, in the background, whenever it has changed.

    Raises:
        CheckpointError: the directory is of another table, or cannot be written.
    """
    name, parent = identity(table, table._engine.index)
    manifest = place.manifest
    if manifest is not None and manifest.table != name and manifest.save != parent:
        raise occupied(place)
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
        self._table: Table | None = Table(table._engine.region)
        self._place, self._pid = place, os.getpid()
        self._known = "the private table" if table.name is None else f"table {table.name!r}"
        self._mutex = new_mutex()  # of a write
        self._stop = Event()
        self._thread = threading.Thread(target=self._run, name="gear-loader-disk", daemon=True)
        self._arena = Arena()
        self._version: tuple[int, int] | None = None  # of what was written last
        # Under the mutex written, and read at any time:
        self._following = 0 if place.manifest is None else place.manifest.next_sequence
        self._writes = self._bytes = 0
        self._seconds = self._longest = 0.0
        self._error: str | None = None
        self._tier_error: str | None = None
        self._failed_at = 0.0
        self._abandoned = False
        late = table.schema.late_bits(table.schema.late)
        self._spiller = (
            Spiller(self._table._engine.index, self._table._engine.region, place.disk.keep, late)
            if table._engine.has_tier
            else None
        )
        if (memory := self._table._engine.region.device_memory) is not None:
            memory.keep = place.disk.keep
        self._archive = (
            None if place.disk.archive is None else Archive(place.disk.archive, place.directory, table.schema)
        )
        self._archived_bytes = 0
        self._rewrite_at = 0.0
        self._finalizer = weakref.finalize(table._engine, self._abandon)
        self._finalizer.atexit = False
        _writers.add(self)

    def begin(self) -> None:
        """Start the thread."""
        if self._spiller is not None:
            self._spiller.announce(True)
        self._follow()
        if self._archive is not None:
            self._archive.begin()
        self._thread.start()

    def finish_if_dropped(self, path: str) -> None:
        """Wait for the thread's end if the table was dropped without `close` and is written into this directory."""
        if self._abandoned and self._place.is_at(path):
            self._thread.join(LOCK_TIMEOUT)

    # ---------------------------------------------------------------- for the table

    def writes_to(self, path: str) -> bool:
        """Whether this process writes the table into the directory `path`."""
        return self._pid == os.getpid() and self._table is not None and self._place.is_at(path)

    def flush(self) -> None:
        """Write everything that is committed now.

        Raises:
            CheckpointError: it could not be written; the checkpoint before it is unchanged. Or this is a signal handler
                amid a write of this thread, or amid a call that a write of another thread waits for.
        """
        patience = _AMID_TIMEOUT if holds_any() else -1

        def write() -> bool:
            self._write()
            return True

        if run_alone(self._mutex, write, patience) is None:
            raise CheckpointError(
                f"A signal handler has asked for {self._known} to be written to {self._place.directory.path} in the "
                "middle of another call, which has to end first. Save after that call, or into another directory."
            )

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
            error=self._error or self._tier_error or (None if self._archive is None else self._archive.error),
            archived_bytes=self._archived_bytes,
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
        if self._archive is not None:
            self._archive.end()
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
        if self._archive is not None:
            self._archive.end()
        if self._spiller is not None:
            self._spiller.announce(False)
            self._spiller = None
        self._table = None
        self._place.close()
        _writers.discard(self)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        pause = interval = self._place.disk.sync_seconds
        again = base = interval if self._spiller is None else min(interval, _RETRY)
        while not self._wait(pause):
            began = time.monotonic()
            with self._mutex:
                if self._has_changed() or self._error is not None or self._has_moved():
                    self._attempt()
            if self._error is None:
                pause, again = max(0.0, interval - (time.monotonic() - began)), base
            else:
                pause, again = again, max(base, min(2 * again, _LONGEST_PAUSE))
        if self._abandoned:
            with self._mutex:
                self._attempt()
            self.release()

    def _wait(self, seconds: float) -> bool:
        """Wait, or keep blocks free meanwhile; return whether the thread is to end."""
        spiller, end, tick = self._spiller, time.monotonic() + seconds, _TICK
        if spiller is None:
            return self._stop.wait(seconds)
        while not self._stop.wait(min(tick, max(0.0, end - time.monotonic()))):
            tick = _TICK
            if spiller.is_due():
                try:
                    with self._mutex:
                        missing = spiller.move(self._table) if self._table is not None else 0
                    self._tier_error = None
                except (GearError, RuntimeError) as error:  # the latter of a GPU
                    self._tier_error = f"Trajectories of {self._known} stay where they are: {error}"
                    notice(f"tier {self._place.directory.path}", self._tier_error)
                    missing = 1
                if missing > 0:
                    if self._has_changed() and self._error is None:
                        return self._stop.is_set()  # what is missing has to be written first
                    tick = _SLOW_TICK  # open writers hold the memory, or the disk fails
            elif not spiller.missing():
                self._tier_error = None
            if time.monotonic() >= end or (self._error is None and self._has_moved(idle=True)):
                return self._stop.is_set()
        return True

    def _has_moved(self, *, idle: bool = False) -> bool:
        """Whether segments have gone to the archive since the last write, or the one before it; and no others will."""
        archive = self._archive
        return archive is not None and archive.wants_write and (archive.is_idle or not idle)

    def _has_changed(self) -> bool:
        table = self._table
        return table is not None and _version_of(table) != self._version

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
        version = _version_of(table)
        try:
            with convert_errors(place.directory.path):
                if place.is_uncertain:
                    place.look()
                save = self._save(table)
            assert save.manifest is not None
            self._following = save.manifest.next_sequence  # these are safe, whatever happens to older ones
            self._writes, self._bytes = self._writes + 1, self._bytes + save.bytes_written
            self._follow()
            if self._spiller is not None:
                self._spiller.set_full(False)
                lost = self._spiller.lost([segment.number for segment in save.manifest.segments])
                if len(lost[0]):
                    table._engine.remove_lost(
                        LostRowsError(f"{place.directory.path} has damaged files.", *lost)
                    )
                self._spiller.spill()
        except BaseException as error:
            self._error = str(error) or type(error).__name__
            if self._spiller is not None:
                self._spiller.set_full(is_full(error) or isinstance(error, DiskFullError))
            raise
        self._version = version
        self._seconds = time.monotonic() - began
        self._longest = max(self._longest, self._seconds)
        self._error = None

    def _save(self, table: Table) -> Save:
        """Write once; in a table with a disk tier evict by its policy, and repeat, while the files are too large."""
        place, archive = self._place, self._archive
        from_archive = archive is not None and not archive.error and time.monotonic() >= self._rewrite_at
        while True:
            known = place.on_disk
            save = Save(table, place.directory, place.manifest, known)
            if self._archive is not None:
                self._archive.apply(save.on_disk)
            # Until the new checkpoint is known: an exception may come between any two lines.
            place.is_uncertain, place.on_disk = True, None
            try:
                with shorter_deadline(_REWRITE_SECONDS) if from_archive else contextlib.nullcontext():
                    save.run_behind(place.previous, self._arena, self._note, from_archive=from_archive)
            except BaseException as error:
                place.on_disk = None if save.has_changed else known
                place.is_uncertain = save.has_changed  # its files may be there still
                if (
                    from_archive
                    and isinstance(error, CheckpointError)
                    and not isinstance(error, DiskFullError)
                ):
                    # Without it, as it may be the store that has failed.
                    from_archive, self._rewrite_at = False, time.monotonic() + _REWRITE_PAUSE
                    if place.is_uncertain:
                        place.look()
                    continue
                if not isinstance(error, DiskFullError):
                    raise
                if self._archive is not None and self._archive.make_room(self._local(save.on_disk)):
                    continue
                evict, _ = table._engine.policy
                if evict == REFUSE or not table._engine.index.evict(error.steps, evict):
                    raise
                continue
            assert save.manifest is not None
            assert save.index_file is not None
            place.previous, place.manifest = place.manifest, save.manifest
            place.on_disk = save.on_disk, save.index_file
            place.is_uncertain = False
            return save

    def _local(self, on_disk: OnDisk) -> list[Segment]:
        """Segments whose columns are in the directory and have live rows, the coldest first."""
        assert self._spiller is not None
        segments = [on_disk.segments[number] for number in self._spiller.coldest(on_disk)]
        return [segment for segment in segments if not segment.archive]

    def _follow(self) -> None:
        """Tell the archive what is on disk, and which segments to take: as long as `_ARCHIVED_FROM` is exceeded."""
        archive, spiller, place = self._archive, self._spiller, self._place
        if spiller is None or place.manifest is None:
            return
        columns = stored_columns(place.manifest.schema)

        def size(segment: Segment) -> int:
            return sum(segment.bytes(name, column) for name, column in columns.items())

        moved = [segment for segment in place.manifest.segments if segment.archive]
        self._archived_bytes = sum(map(size, moved))
        spiller.archived = np.array([segment.number for segment in moved], dtype=np.int64)
        if archive is None:
            return
        archive.follow(place.manifest, place.previous)
        assert place.disk.size is not None
        excess = sum(map(size, place.manifest.segments)) - self._archived_bytes
        excess -= int(_ARCHIVED_FROM * int(place.disk.size))
        wanted: list[Segment] = []
        if excess > 0 and place.on_disk is not None:
            for segment in self._local(place.on_disk[0]):
                # One that is mostly dead is rewritten.
                if excess > 0 and 2 * place.on_disk[0].live[segment.number] >= segment.steps:
                    wanted.append(segment)
                    excess -= size(segment)
        archive.ask(wanted)

    def _note(self, save: Save) -> None:
        # While the files of the write before are there: an owner that died may have noted only that one.
        if self._spiller is not None:
            self._spiller.note(save.written, save.on_disk.records[save.written])

    def _unwritten(self) -> tuple[int, float]:
        """Number of live trajectories committed since the last write, and seconds since the first of them."""
        table = self._table
        if table is None:
            return 0, 0.0
        arrays = table._engine.index.arrays
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
        self._spiller = self._archive = None
        self._table = None


def _version_of(table: Table) -> tuple[int, int]:
    """What is another one after a change: edits of values, which selections need not follow, are counted apart."""
    arrays, edits = table._engine.index.arrays, 0
    if arrays.edit_unit:  # slots keep the counts of those that were in them
        live = (arrays.state == READY) & (arrays.filled[:, 0] == arrays.generation)
        edits = int(arrays.filled[live, 1].sum())
    return int(arrays.counters[VERSION]), edits


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
