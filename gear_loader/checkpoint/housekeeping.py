"""A checkpoint's directory before and after a save: whether it may be written, its lock, removal of old files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Iterator

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.manifest import Manifest
from gear_loader.checkpoint.names import (
    INDEX_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PART,
    SEGMENT_NAME,
    SEGMENTS_NAME,
    index_file,
    is_column_file,
)
from gear_loader.errors import CheckpointError, GearError

__all__ = [
    "check_owned",
    "convert_errors",
    "is_unfinished_save",
    "locked",
    "refuse_links",
    "remove_checkpoint",
    "sweep",
]


@contextlib.contextmanager
def convert_errors(directory: str) -> Iterator[None]:
    """Convert an OSError raised inside into a CheckpointError with a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, GearError):
            raise
        where = error.filename or directory
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "Free some space there, or save to another disk."
        else:
            remedy = "Make the directory writable, or save to another one."
        raise CheckpointError(
            f"{where} cannot be written: {error.strerror or error}. The checkpoint in {directory} is as it was before. "
            f"{remedy}"
        ) from error


def is_unfinished_save(name: str) -> bool:
    """Whether an unfinished first save can have left an entry of this name."""
    known = (LOCK_NAME, SEGMENTS_NAME, MANIFEST_NAME + PART)
    return name in known or INDEX_NAME.fullmatch(name.removesuffix(PART)) is not None


def _is_segment(name: str) -> bool:
    """Whether this is the name of a segment, finished or not."""
    return SEGMENT_NAME.fullmatch(name.removesuffix(PART)) is not None


def refuse_links(directory: Directory) -> None:
    """Check that no directory or file of a checkpoint is a symbolic link, before writing into it.

    Raises:
        CheckpointError: one is a link; the message names it.
    """
    directory.refuse_links(lambda name: name == MANIFEST_NAME or is_unfinished_save(name))
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        directory.child(SEGMENTS_NAME) as segments,
    ):
        segments.refuse_links(_is_segment)
        for name in filter(_is_segment, segments.names()):
            with contextlib.suppress(NotADirectoryError), segments.child(name) as segment:
                segment.refuse_links(is_column_file)


def check_owned(directory: Directory, manifest: str, ours: Callable[[str], bool], *, what: str) -> None:
    """Check that a directory holds a checkpoint, an unfinished first save, or nothing, before writing into it.

    Args:
        manifest: file name of the manifest of a complete checkpoint.
        ours: whether an unfinished first save can have left an entry of this name.
        what: kind of checkpoint, in the error.

    Raises:
        CheckpointError: it holds other files.
    """
    names = directory.names()
    if manifest in names or not names:
        return
    if LOCK_NAME not in names or not all(ours(name) for name in names):
        raise CheckpointError(
            f"{directory.path} holds {sorted(names)[0]!r} and no {manifest}: it is no {what}, and nothing was "
            "written. Choose an empty directory or a new one."
        )


@contextlib.contextmanager
def locked(directory: Directory) -> Iterator[None]:
    """Hold the lock of a checkpoint's directory.

    Raises:
        CheckpointError: another save holds it.
    """
    path = directory.at(LOCK_NAME)
    fd = directory.open_lock(LOCK_NAME)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{path} is locked: another save into this directory is going on. Wait for it, or save elsewhere."
            ) from error
        yield
    finally:
        os.close(fd)


def sweep(directory: Directory, manifest: Manifest | None) -> None:
    """Remove files of earlier and of unfinished saves. The next save removes files that cannot be removed now."""
    keep = {f"{segment.number:06d}" for segment in manifest.segments} if manifest else set()
    index = index_file(manifest.saves) if manifest else ""

    def old(name: str) -> bool:
        is_index = INDEX_NAME.fullmatch(name.removesuffix(PART)) is not None
        return name == MANIFEST_NAME + PART or (is_index and name != index)

    directory.remove_files(old)
    with contextlib.suppress(OSError), directory.child(SEGMENTS_NAME) as segments:
        _remove_segments(segments, keep)


def _remove_segments(segments: Directory, keep: Collection[str]) -> None:
    """Remove segments and the files that a save writes there; other files stay."""
    for name in segments.names():
        if _is_segment(name) and name not in keep:
            with contextlib.suppress(OSError):
                with segments.child(name) as segment:
                    segment.remove_files(is_column_file)
                segments.rmdir(name)


def remove_checkpoint(parent: Directory, name: str) -> None:
    """Remove a directory that holds a checkpoint or a part of one.

    Raises:
        OSError: a file could not be removed, or does not belong to a checkpoint.
    """
    with parent.child(name) as directory:
        with contextlib.suppress(FileNotFoundError):
            with directory.child(SEGMENTS_NAME) as segments:
                _remove_segments(segments, ())
            directory.rmdir(SEGMENTS_NAME)
        directory.remove_files(lambda name: name == MANIFEST_NAME or is_unfinished_save(name))
    parent.rmdir(name)
