"""A checkpoint before and after a save: whether it may be written, its lock, its names, removal of old files.

Random names of tables and of the saves they were loaded from decide which files a save can reuse.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.manifest import Manifest, previous_of, read_manifest
from gear_loader.checkpoint.names import (
    INDEX_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PART,
    PREVIOUS_NAME,
    SEGMENT_NAME,
    SEGMENTS_NAME,
    is_segment_file,
)
from gear_loader.errors import CheckpointError, GearError
from gear_loader.storage.counters import IDENTITY
from gear_loader.storage.index import Index
from gear_loader.storage.lock import process_start
from gear_loader.storage.table import Table
from gear_loader.utils.descriptors import Descriptor
from gear_loader.utils.paths import is_address

_MANIFESTS = (MANIFEST_NAME, PREVIOUS_NAME)


@contextlib.contextmanager
def convert_errors(directory: str) -> Iterator[None]:
    """Convert an OSError raised inside into a CheckpointError with a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, GearError):
            raise
        where = error.filename or directory
        if is_full(error):
            remedy = "Free some space there, or save to another disk."
        elif is_address(directory):
            remedy = "Check the address and its permissions, or save to another one."
        else:
            remedy = "Make the directory writable, or save to another one."
        raise CheckpointError(
            f"{where} cannot be written: {error.strerror or error}. The checkpoint in {directory} is as it was before. "
            f"{remedy}"
        ) from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or the one that it was raised from, says that there is no space on the disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        error = error.__cause__
    return False


def is_unfinished_save(name: str) -> bool:
    """Whether an unfinished first save can have left an entry of this name."""
    known = (LOCK_NAME, SEGMENTS_NAME, MANIFEST_NAME + PART, PREVIOUS_NAME + PART)
    return name in known or INDEX_NAME.fullmatch(name.removesuffix(PART)) is not None


def _is_segment(name: str) -> bool:
    """Whether this is the name of a segment, finished or not."""
    return SEGMENT_NAME.fullmatch(name.removesuffix(PART)) is not None


def refuse_links(directory: Directory) -> None:
    """Check that no directory or file of a checkpoint is a symbolic link, before writing into it.

    Raises:
        CheckpointError: one is a link; the message names it.
    """
    directory.refuse_links(lambda name: name in _MANIFESTS or is_unfinished_save(name))
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        directory.child(SEGMENTS_NAME) as segments,
    ):
        segments.refuse_links(_is_segment)
        for name in filter(_is_segment, segments.names()):
            with contextlib.suppress(NotADirectoryError), segments.child(name) as segment:
                segment.refuse_links(is_segment_file)


def check_owned(directory: Directory, manifest: str, ours: Callable[[str], bool], *, what: str) -> None:
    """Check that a directory holds a checkpoint, an unfinished first save, or nothing, before writing into it.

    Args:
        manifest: file name of the manifest of a complete checkpoint.
        ours: whether an unfinished first save can have left an entry of this name.
        what: kind of checkpoint, in the error.

    Raises:
        CheckpointError: it holds other files.
    """
    if directory.has(manifest):
        return
    names = directory.names()
    locked = LOCK_NAME in names or directory.token
    if names and not (locked and all(ours(name) for name in names)):
        raise CheckpointError(
            f"{directory.path} holds {sorted(names)[0]!r} and no {manifest}: it is no {what}, and nothing was "
            "written. Choose an empty directory or a new one."
        )


class LockedError(CheckpointError):
    """Another save, or another table's background writer, holds the lock of a directory.

    Attributes:
        holder: what it says of itself; "" of a save.
    """

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


def lock(directory: Directory, holder: str = "", taken: list[Descriptor] | None = None) -> Descriptor:
    """Lock a checkpoint's directory and return the lock's file, for `unlock`.

    Args:
        holder: what the errors of others say of this one, if it holds the lock for long.
        taken: gets the file before it is locked, for a caller that unlocks it whatever interrupts this.

    Raises:
        LockedError: another one holds it.
    """
    path = directory.at(LOCK_NAME)
    file = directory.open_lock(LOCK_NAME)
    try:
        if taken is not None:
            taken.append(file)
        fd = file.fileno()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = os.pread(fd, 1000, 0).decode(errors="replace")
            what = "another save into this directory is going on. Wait for it, or save elsewhere"
            if other:
                what = f"{other} is written into this directory. Close that table, or use another directory"
            raise LockedError(f"{path} is locked: {what}.", other) from error
        with contextlib.suppress(OSError):  # it is for messages alone, and the disk may be full
            if holder or os.fstat(fd).st_size:
                os.ftruncate(fd, 0)
                os.pwrite(fd, holder.encode(), 0)
    except BaseException:
        if not taken:
            file.close()
        raise
    return file


def unlock(file: Descriptor, process: int) -> None:
    """Close the file of a lock, and release it in the process that took it; idempotent.

    Closing alone does not release it while a child that was forked meanwhile has not closed its copy yet.
    """
    if os.getpid() == process and not file.closed:
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    file.close()


def under_lock(directory: Directory, section: Callable[[], object]) -> None:
    """Call `section` while holding the lock of a checkpoint's directory, also if an exception arrives at any bytecode.

    A bucket has no lock: names are unique there, and `check_unchanged` is called before the manifest is written.

    Raises:
        CheckpointError: another save, or another table's background writer, holds it.
    """
    if directory.token:
        section()
        return
    taken: list[Descriptor] = []
    process = os.getpid()

    def release() -> None:
        for file in taken:
            unlock(file, process)

    try:
        try:
            lock(directory, taken=taken)
            section()
        finally:
            release()
    finally:
        release()  # again: the call above may be interrupted


def check_unchanged(directory: Directory, found: Callable[[], str], save: str) -> None:
    """Check, where there is no lock, that no other save has replaced a checkpoint since this one began.

    Args:
        found: the name of the save that is there, "" of none. save: that which was there.

    Raises:
        CheckpointError: another save has.
    """
    if directory.token and found() != save:
        raise CheckpointError(
            f"{directory.path} was written by another save while this one ran; that one counts. Save there from one "
            "process at a time, or elsewhere."
        )


def keep_previous(directory: Directory) -> None:
    """Keep the manifest, if there is one, as the previous one. The caller syncs the directory."""
    if not directory.has(MANIFEST_NAME):
        return
    with contextlib.suppress(FileNotFoundError):
        directory.remove_file(PREVIOUS_NAME + PART)
    directory.link(MANIFEST_NAME, PREVIOUS_NAME + PART)
    directory.rename(PREVIOUS_NAME + PART, PREVIOUS_NAME)
    with contextlib.suppress(FileNotFoundError):  # a rename between two links to the same file does nothing
        directory.remove_file(PREVIOUS_NAME + PART)


def restore_previous(directory: Directory) -> None:
    """Make the previous manifest the current one."""
    with contextlib.suppress(FileNotFoundError):
        directory.remove_file(MANIFEST_NAME + PART)
    directory.link(PREVIOUS_NAME, MANIFEST_NAME + PART)
    directory.rename(MANIFEST_NAME + PART, MANIFEST_NAME)
    directory.sync()


def manifests_of(directory: Directory, *, previous: bool) -> tuple[Manifest | None, Manifest | None]:
    """Read the current manifest and, if it is kept, the one before it; remove files that they do not name.

    Raises:
        CheckpointError: the current one is damaged.
    """
    manifest = read_manifest(directory) if directory.has(MANIFEST_NAME) else None
    before = previous_of(directory) if previous else None
    directory.sync()  # its writer may have died before this; it must be durable before older files are removed
    sweep(directory, manifest, before)
    return manifest, before


def sweep(directory: Directory, *manifests: Manifest | None, replaced: Manifest | None = None) -> None:
    """Remove files that no manifest names. The next save removes files that cannot be removed now.

    Args:
        manifests: the current one; and the one before it, which is removed too if it is not given.
        replaced: the one that the current one has replaced. In a bucket its files are removed, and others when another
            save cannot be writing them (`Directory.is_abandoned`).
    """
    kept = [manifest for manifest in manifests if manifest is not None]
    keep = {segment.name for manifest in kept for segment in manifest.segments}
    indices = {manifest.index_name for manifest in kept}
    before = {replaced.index_name, *(segment.name for segment in replaced.segments)} if replaced else set()
    unfinished = {MANIFEST_NAME + PART, PREVIOUS_NAME + PART}
    if len(kept) < 2:
        unfinished.add(PREVIOUS_NAME)

    def old(name: str) -> bool:
        is_index = INDEX_NAME.fullmatch(name.removesuffix(PART)) is not None
        if is_index and name not in indices:
            return name in before or directory.is_abandoned(name)
        return name in unfinished

    directory.remove_files(old)
    with contextlib.suppress(OSError), directory.child(SEGMENTS_NAME) as segments:
        _remove_segments(
            segments, lambda name: name not in keep and (name in before or segments.is_abandoned(name))
        )


def _remove_segments(segments: Directory, old: Callable[[str], bool]) -> None:
    """Remove segments whose names satisfy `old`, and the files that a save writes there; other files stay."""
    for name in segments.names():
        if _is_segment(name) and old(name):
            with contextlib.suppress(OSError):
                with segments.child(name) as segment:
                    segment.remove_files(is_segment_file)
                segments.rmdir(name)


def remove_checkpoint(parent: Directory, name: str) -> None:
    """Remove a directory that holds a checkpoint or a part of one.

    Raises:
        OSError: a file could not be removed, or does not belong to a checkpoint.
    """
    with parent.child(name) as directory:
        with contextlib.suppress(FileNotFoundError):
            with directory.child(SEGMENTS_NAME) as segments:
                _remove_segments(segments, lambda name: True)
            directory.rmdir(SEGMENTS_NAME)
        directory.remove_files(lambda name: name in _MANIFESTS or is_unfinished_save(name))
    parent.rmdir(name)


def identity(table: Table, index: Index) -> tuple[str, str]:
    """Name of the table, and of the save it was loaded from; 16 hexadecimal digits each."""
    here = _process(table)

    def look() -> tuple[str, str]:
        name, parent, pid, start = index.arrays.counters[IDENTITY].tolist()
        if name == 0 or (pid, start) not in ((0, 0), here):
            name, parent = 1 + secrets.randbelow(2**63 - 1), 0
            index.arrays.counters[IDENTITY] = name, parent, *here
        return f"{name:016x}", f"{parent:016x}"

    return table._engine.region.lock.read(look)


def _process(table: Table) -> tuple[int, int]:
    return (0, 0) if table.name is not None else (os.getpid(), process_start(os.getpid()))


def set_parent(table: Table, index: Index, save: str) -> None:
    """Record that a table was loaded from the save named `save`."""

    def note() -> None:
        index.arrays.counters[IDENTITY] = 1 + secrets.randbelow(2**63 - 1), int(save, 16), *_process(table)

    table._engine.region.lock.run(note)
