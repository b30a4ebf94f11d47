"""A checkpoint's directory, held open: files are reached from its descriptor, and no link leads out of it.

The path that a user gives is resolved once, when it is opened: it may be a symbolic link, or have some in it. Below it
directories are opened one by one with O_NOFOLLOW, so that a link in the place of one of a checkpoint's own directories
is an error, even if it is put there while a save is going on. Files are written, renamed and removed as entries of an
open directory, which never follows a link.

Files that are only read may be links: tools that keep versions of data put them in the place of files. Their contents
are checked by size and checksum. A save into such a directory is refused before anything has changed
(`refuse_links`): it would have to write beside files that belong to that tool.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from gear_loader.errors import CheckpointError

__all__ = ["REMEDY", "Directory", "named", "open_to_load"]

REMEDY = "Restore it from a copy, or load another checkpoint."
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Put a file's whole path into an OSError about it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        error.filename, error.filename2 = path, None
        raise


class Directory:
    """An open directory. Names are of its own entries; every OSError names the whole path.

    Args:
        fd: of the directory; closed with this.
        path: how errors call it.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self.path = fd, path

    @staticmethod
    def open(path: str) -> Directory:
        """Open a directory that a user has named, through whatever links its path has."""
        with named(path):
            return Directory(os.open(os.path.realpath(path), _FLAGS), path)

    @staticmethod
    def make(path: str) -> Directory:
        """Open a directory that a user has named; if there is none, make it and those above it.

        Raises:
            CheckpointError: the path is a file, or a link to a directory that does not exist.
        """
        real = os.path.realpath(path)
        if os.path.islink(path) and not os.path.lexists(real):
            raise CheckpointError(
                f"{path} is a symbolic link to {real}, which does not exist; expected a directory. Make that "
                "directory first, or choose another path."
            )
        try:
            with named(path):
                os.makedirs(real, exist_ok=True)
            return Directory.open(path)
        except (FileExistsError, NotADirectoryError) as error:
            what = "a file" if os.path.exists(real) else "below a file"
            raise CheckpointError(
                f"{path} is {what}; expected a directory or a path where one can be made. Choose another path."
            ) from error

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exception: Any) -> None:
        os.close(self.fd)

    def at(self, name: str) -> str:
        """The path of an entry, for errors."""
        return os.path.join(self.path, name)

    # ---------------------------------------------------------------- directories

    def child(self, path: str) -> Directory:
        """Open a directory below this one.

        Args:
            path: relative, such as ``segments/000001``.

        Raises:
            CheckpointError: one of its parts is a symbolic link.
            OSError: it is not there, or is no directory.
        """
        first, _, rest = path.partition("/")
        with named(self.at(first)):
            try:
                fd = os.open(first, _FLAGS, dir_fd=self.fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    self.refuse_link(first)
                raise
        folder = Directory(fd, self.at(first))
        if not rest:
            return folder
        with folder:
            return folder.child(rest)

    def child_to_load(self, path: str) -> Directory:
        """As `child`, for what has to be there.

        Raises:
            CheckpointError: it is not.
        """
        try:
            return self.child(path)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"{self.at(path)} is missing or cannot be read: {error}. {REMEDY}"
            ) from error

    def made(self, name: str) -> Directory:
        """Open a directory in this one; make it if it is not there."""
        with contextlib.suppress(FileExistsError):
            self.mkdir(name)
        return self.child(name)

    def made_all(self, path: str) -> Directory:
        """As `made`, for a path of several parts."""
        first, _, rest = path.partition("/")
        folder = self.made(first)
        if not rest:
            return folder
        with folder:
            return folder.made_all(rest)

    def mkdir(self, name: str) -> None:
        """Make a directory in this one."""
        with named(self.at(name)):
            os.mkdir(name, dir_fd=self.fd)

    def rmdir(self, name: str) -> None:
        """Remove an empty directory."""
        with named(self.at(name)):
            os.rmdir(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Make the names in this directory durable."""
        with named(self.path):
            os.fsync(self.fd)

    def sync_parent(self) -> None:
        """Make this directory's own name durable, where that is allowed."""
        with contextlib.suppress(OSError):
            parent = os.open("..", _FLAGS, dir_fd=self.fd)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)

    # ---------------------------------------------------------------- entries

    def names(self) -> list[str]:
        """Of all entries."""
        with named(self.path):
            return os.listdir(self.fd)

    def has(self, name: str) -> bool:
        """Whether there is an entry of this name, a dangling link included."""
        try:
            self.info(name)
        except FileNotFoundError:
            return False
        return True

    def info(self, name: str) -> os.stat_result:
        """What an entry is; of a link, not of what it points to."""
        with named(self.at(name)):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def rename(self, old: str, new: str) -> None:
        """Rename an entry, in the place of a file or link that has the new name."""
        with named(self.at(new)):
            os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def replace(self, old: str, new: str) -> None:
        """As `rename`; called so where it makes something the checkpoint."""
        with named(self.at(new)):
            os.replace(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove_file(self, name: str) -> None:
        """Remove a regular file; anything else stays."""
        if stat.S_ISREG(self.info(name).st_mode):
            with named(self.at(name)):
                os.unlink(name, dir_fd=self.fd)

    def remove_files(self, ours: Callable[[str], bool]) -> None:
        """Remove the regular files whose names are `ours`; what cannot be removed stays."""
        for name in self.names():
            if ours(name):
                with contextlib.suppress(OSError):
                    self.remove_file(name)

    # ---------------------------------------------------------------- files

    def create(self, name: str, flags: int = 0) -> int:
        """A descriptor to write a new file with.

        Raises:
            FileExistsError: there is an entry of this name.
        """
        with named(self.at(name)):
            new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, new | flags, 0o666, dir_fd=self.fd)

    def open_lock(self, name: str) -> int:
        """A descriptor of a lock file, which is made if there is none.

        Raises:
            CheckpointError: it is a symbolic link, or no regular file.
        """
        with named(self.at(name)):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                fd = os.open(name, flags, 0o666, dir_fd=self.fd)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    self.refuse_link(name)
                raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError(
                f"{self.at(name)} is no regular file; expected a lock file. Remove it, or save into another directory."
            )
        return fd

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """Open a regular file, or a link to one, to read from; its descriptor, and what it is.

        Raises:
            CheckpointError: it is something else.
            OSError: it is not there, or may not be read.
        """
        path = self.at(name)
        with named(path):
            # Without O_NONBLOCK a pipe would be waited for.
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise CheckpointError(f"{path} is no regular file. {REMEDY}")
            yield fd, info
        finally:
            os.close(fd)

    # ---------------------------------------------------------------- links

    def refuse_link(self, name: str) -> None:
        """Raise CheckpointError if an entry is a symbolic link."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(self.info(name).st_mode):
                raise self._link(name)

    def refuse_links(self, ours: Callable[[str], bool]) -> None:
        """Raise CheckpointError if an entry whose name is `ours` is a symbolic link."""
        with named(self.path), os.scandir(self.fd) as entries:
            for entry in entries:
                if entry.is_symlink() and ours(entry.name):
                    raise self._link(entry.name)

    def _link(self, name: str) -> CheckpointError:
        try:
            target = os.readlink(name, dir_fd=self.fd)
        except OSError:
            target = "?"
        return CheckpointError(
            f"{self.at(name)} is a symbolic link to {target}; a checkpoint's own directories are never links, and a "
            "save replaces no linked file. Nothing was changed. Put what it points to in its place (`cp -rL` copies a "
            "directory with everything its links point to), or use another directory. The path of the checkpoint "
            "itself may be a link."
        )


def open_to_load(path: str, missing: str) -> Directory:
    """Open the directory of a checkpoint that is to be loaded.

    Args:
        missing: the error if there is no directory.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        return Directory.open(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(missing) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {REMEDY}") from error
