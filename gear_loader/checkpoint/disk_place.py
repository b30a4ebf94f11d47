"""The directory of a table that is written in the background: its lock, and the manifests that it holds."""

from __future__ import annotations

import contextlib
import os

from gear_loader.checkpoint.bucket import Bucket
from gear_loader.checkpoint.changes import OnDisk
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.housekeeping import (
    check_owned,
    convert_errors,
    is_unfinished_save,
    lock,
    manifests_of,
    refuse_links,
    unlock,
)
from gear_loader.checkpoint.index import IndexFile
from gear_loader.checkpoint.manifest import Manifest, no_manifest
from gear_loader.checkpoint.names import MANIFEST_NAME, PREVIOUS_NAME, SHARDS_NAME
from gear_loader.checkpoint.opening import open_to_load
from gear_loader.errors import CheckpointError
from gear_loader.storage.disk import Disk
from gear_loader.utils.descriptors import Descriptor


class Place:
    """A locked directory that one table is written into.

    Attributes:
        disk: the user's options. directory: the open directory.
        manifest, previous: of the checkpoints that it holds; None where there is none, or none that can be read.
        on_disk: what the files of `manifest` hold of the table, and its index, if this process has written them.
        is_uncertain: whether another manifest may be in place, because an error came while it was put there.
    """

    def __init__(self, disk: Disk, directory: Directory, lock: Descriptor) -> None:
        self.disk, self.directory = disk, directory
        self.manifest: Manifest | None = None
        self.previous: Manifest | None = None
        self.on_disk: tuple[OnDisk, IndexFile] | None = None
        self.is_uncertain = False
        self._lock = lock
        self._process = os.getpid()

    def look(self) -> None:
        """Read the manifests, and remove files that they do not name.

        Raises:
            CheckpointError: the current one is damaged.
        """
        self.on_disk = None
        self.manifest, self.previous = manifests_of(self.directory, previous=True)
        self.is_uncertain = False

    def is_at(self, path: str) -> bool:
        """Whether this is the directory at a path."""
        with contextlib.suppress(OSError):
            info, here = os.stat(path), os.fstat(self.directory.fd)
            return (info.st_dev, info.st_ino) == (here.st_dev, here.st_ino)
        return False

    def close(self) -> None:
        """Release the lock; idempotent."""
        unlock(self._lock, self._process)
        self.directory.close()


def open_place(disk: Disk, name: str | None, *, recover: bool = False) -> Place:
    """Lock the directory of a table.

    Args:
        name: of the table, for errors of others.
        recover: whether a table is to be brought back from it; else it is created if it does not exist.

    Raises:
        CheckpointError: it holds other files, cannot be written, or is in use (`LockedError`); or the archive's address
            cannot hold one.
    """
    path = os.fspath(disk.path)
    holder = holder_of(name)
    if disk.archive is not None:
        Bucket.at_address(disk.archive, write=True)
    with convert_errors(path):
        directory = open_to_load(path, no_manifest(path)) if recover else Directory.make(path)
        try:
            if not recover:
                check_owned(directory, MANIFEST_NAME, is_unfinished_save, what="checkpoint")
            elif not (directory.has(MANIFEST_NAME) or directory.has(PREVIOUS_NAME)):
                raise CheckpointError(no_manifest(path, several=directory.has(SHARDS_NAME)))
            refuse_links(directory)
            return Place(disk, directory, lock(directory, f"{holder} of process {os.getpid()}"))
        except BaseException:
            directory.close()
            raise


def holder_of(name: str | None) -> str:
    """What a lock says of the table that holds it, without the process."""
    return "a private table" if name is None else f"the table {name!r}"


def open_new(disk: Disk, name: str | None, *, exist_ok: bool) -> Place:
    """Lock the directory of a table that is to be created, or with `exist_ok` may exist.

    Raises:
        CheckpointError: as `open_place`; or it holds a checkpoint, unless `exist_ok` allows that it is of this table.
    """
    place = open_place(disk, name)
    try:
        with convert_errors(place.directory.path):
            place.look()
        if place.manifest is not None and not exist_ok:
            raise occupied(place)
        return place
    except BaseException:
        place.close()
        raise


def occupied(place: Place) -> CheckpointError:
    count = 0 if place.manifest is None else place.manifest.num_trajectories
    path = place.directory.path
    return CheckpointError(
        f"{path} holds a table of {count:,} trajectories; expected an empty directory or a new one. "
        f"Table.recover({path!r}) brings that table back and goes on writing there; to begin anew, remove the "
        "directory or choose another. Nothing was changed."
    )
