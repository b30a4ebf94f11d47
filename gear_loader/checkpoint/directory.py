"""An open directory of a checkpoint: file operations relative to its descriptor, which follow no symbolic links.

The path given by the user is resolved once, when the directory is opened; it may contain symbolic links. Directories
below it are opened one by one with O_NOFOLLOW: a link in place of one of the checkpoint's own directories is an error,
even if it is created during a save. Files are written, renamed and removed relative to an open directory.

Files that are only read may be links, as data versioning tools create them; size and checksum of their contents are
checked. A save into such a directory is refused before it changes anything (`refuse_links`), because it would write
beside files that belong to that tool.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from gear_loader.checkpoint.open_files import O_DIRECT, FileToRead, NewFile
from gear_loader.errors import CheckpointError
from gear_loader.utils.descriptors import Descriptor, open_descriptor

REMEDY = "Restore it from a copy, or load another checkpoint."
_Result = TypeVar("_Result")
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Give every OSError raised inside the full path of the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        error.filename, error.filename2 = path, None
        raise


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Convert every OSError raised inside into a CheckpointError that names a file that a checkpoint must have."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        text = error.strerror or error
        raise CheckpointError(f"{path} is missing or cannot be read: {text}. {REMEDY}") from error


class Directory:
    """An open directory. Methods take names of its entries; every OSError contains the full path.

    Args:
        file: of the directory, closed at the end of a `with` block.
        path: path of the directory in error messages.

    Attributes:
        token: part of the names of new files, where there is no lock that keeps two saves apart; else "".
        threads: how many read it together, or 0 for as many as there are cores.
    """

    token = ""
    threads = 0

    def __init__(self, file: Descriptor, path: str) -> None:
        self._file, self.path = file, path

    @property
    def fd(self) -> int:
        """The descriptor; -1 of a closed directory, so that a call with it is an OSError."""
        return -1 if self._file.closed else self._file.fileno()

    @staticmethod
    def open(path: str) -> Directory:
        """Open a directory at a path given by the user, which may contain symbolic links."""
        with named(path):
            return Directory(open_descriptor(os.path.realpath(path), _FLAGS), path)

    @staticmethod
    def make(path: str) -> Directory:
        """Open a directory at a path given by the user; create it and its parents if it does not exist.

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
        self.close()

    def close(self) -> None:
        """Close the descriptor; idempotent. The end of the object does so too, if a block's end was interrupted."""
        self._file.close()

    def at(self, name: str) -> str:
        """The path of an entry, for errors."""
        return f"{self.path.rstrip('/')}/{name}"

    # ---------------------------------------------------------------- directories

    def child(self, path: str) -> Directory:
        """Open a directory below this one.

        Args:
            path: relative path, such as ``segments/000001``.

        Raises:
            CheckpointError: a part of the path is a symbolic link.
            OSError: it does not exist, or is not a directory.
        """
        first, _, rest = path.partition("/")
        with named(self.at(first)):
            try:
                file = open_descriptor(first, _FLAGS, dir_fd=self.fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    self.refuse_link(first)
                raise
        folder = Directory(file, self.at(first))
        if not rest:
            return folder
        with folder:
            return folder.child(rest)

    def child_to_load(self, path: str) -> Directory:
        """As `child`, for a directory that a checkpoint must have.

        Raises:
            CheckpointError: it is missing or cannot be read.
        """
        with readable(self.at(path)):
            return self.child(path)

    def open_or_make(self, name: str) -> Directory:
        """Open a directory in this one; create it if it does not exist."""
        with contextlib.suppress(FileExistsError):
            self.mkdir(name)
        return self.child(name)

    def open_or_make_all(self, path: str) -> Directory:
        """As `open_or_make`, for a path of several parts."""
        first, _, rest = path.partition("/")
        folder = self.open_or_make(first)
        if not rest:
            return folder
        with folder:
            return folder.open_or_make_all(rest)

    def mkdir(self, name: str) -> None:
        """Create a directory in this one."""
        with named(self.at(name)):
            os.mkdir(name, dir_fd=self.fd)

    def rmdir(self, name: str) -> None:
        """Remove an empty directory."""
        with named(self.at(name)):
            os.rmdir(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Write the entries of this directory to disk (fsync)."""
        with named(self.path):
            os.fsync(self.fd)

    def sync_parent(self) -> None:
        """Write the entry of this directory in its parent to disk (fsync), if permissions allow it."""
        with contextlib.suppress(OSError), open_descriptor("..", _FLAGS, dir_fd=self.fd) as parent:
            os.fsync(parent.fileno())

    # ---------------------------------------------------------------- entries

    def names(self) -> list[str]:
        """Names of all entries."""
        with named(self.path):
            return os.listdir(self.fd)

    def has(self, name: str) -> bool:
        """Whether an entry of this name exists; a dangling link counts."""
        try:
            self.info(name)
        except FileNotFoundError:
            return False
        return True

    def info(self, name: str) -> os.stat_result:
        """The `stat` result of an entry, without following a link."""
        with named(self.at(name)):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def rename(self, old: str, new: str) -> None:
        """Rename an entry; an existing file or link of the new name is replaced."""
        with named(self.at(new)):
            os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def link(self, old: str, new: str, target: Directory | None = None) -> None:
        """Give a file a second name, in another directory if given; copy it where there are no hard links."""
        target = target or self
        with named(self.at(old)):
            try:
                os.link(old, new, src_dir_fd=self.fd, dst_dir_fd=target.fd, follow_symlinks=False)
                return
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
            with (
                self.opened(old) as (fd, _),
                open(fd, "rb", closefd=False) as file,
                target.create(new) as created,
                open(created.fileno(), "wb", closefd=False) as copy,
            ):
                shutil.copyfileobj(file, copy, 8 << 20)
                copy.flush()
                os.fsync(copy.fileno())

    def remove_file(self, name: str) -> None:
        """Remove an entry if it is a regular file."""
        if stat.S_ISREG(self.info(name).st_mode):
            with named(self.at(name)):
                os.unlink(name, dir_fd=self.fd)

    def remove_files(self, ours: Callable[[str], bool]) -> None:
        """Remove the regular files whose names satisfy `ours`; files that cannot be removed stay."""
        for name in self.names():
            if ours(name):
                with contextlib.suppress(OSError):
                    self.remove_file(name)

    def is_abandoned(self, name: str) -> bool:
        """Whether an entry that no manifest names can be removed: under the lock nobody else writes it."""
        return True

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Bytes of files that a checkpoint must have, or of links to some; -1 of anything else.

        Raises:
            CheckpointError: one is missing.
        """
        found = []
        for name in names:
            with readable(self.at(name)):
                info = os.stat(name, dir_fd=self.fd)
            found.append(info.st_size if stat.S_ISREG(info.st_mode) else -1)
        return found

    # ---------------------------------------------------------------- files

    def again(self, write: Callable[[], _Result], name: str) -> _Result:
        """Call what writes a new file; it is called again where that may help."""
        return write()

    def new_file(self, name: str, size: int, *, direct: bool = False) -> NewFile:
        """Create a file for writing from its beginning to its end.

        Args:
            size: most bytes that it will have. direct: past the page cache, if the file system can do so.

        Raises:
            FileExistsError: an entry of this name exists.
        """
        if not direct or not O_DIRECT:
            return NewFile(self.create(name))
        try:
            return NewFile(self.create(name, O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        with contextlib.suppress(FileNotFoundError):
            self.remove_file(name)  # some file systems create the file before they refuse O_DIRECT
        return NewFile(self.create(name))

    def open_to_read(self, name: str) -> FileToRead:
        """As `open_file`."""
        return FileToRead(self.open_file(name))

    def create(self, name: str, flags: int = 0) -> Descriptor:
        """Create a file for writing.

        Raises:
            FileExistsError: an entry of this name exists.
        """
        with named(self.at(name)):
            new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return open_descriptor(name, new | flags, 0o666, dir_fd=self.fd)

    def open_to_append(self, name: str) -> Descriptor:
        """Open a file of this checkpoint for writing at its end."""
        with named(self.at(name)):
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            return open_descriptor(name, flags, dir_fd=self.fd)

    def open_lock(self, name: str) -> Descriptor:
        """Open a lock file; create it if it does not exist.

        Raises:
            CheckpointError: the entry is a symbolic link, or not a regular file.
        """
        with named(self.at(name)):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                file = open_descriptor(name, flags, 0o666, dir_fd=self.fd)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    self.refuse_link(name)
                raise
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise CheckpointError(
                f"{self.at(name)} is not a regular file; expected a lock file. Remove it, or save into another "
                "directory."
            )
        return file

    def open_file(self, name: str) -> Descriptor:
        """Open a regular file, or a link to one, for reading.

        Raises:
            CheckpointError: the entry is not a regular file.
            OSError: the file does not exist or cannot be read.
        """
        path = self.at(name)
        with named(path):
            # Without O_NONBLOCK, opening a pipe would block.
            file = open_descriptor(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise CheckpointError(f"{path} is not a regular file. {REMEDY}")
        return file

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """As `open_file`, for a block; yields the descriptor and its `stat` result."""
        with self.open_file(name) as file:
            yield file.fileno(), os.fstat(file.fileno())

    # ---------------------------------------------------------------- links

    def refuse_link(self, name: str) -> None:
        """Raise CheckpointError if an entry is a symbolic link."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(self.info(name).st_mode):
                raise self._link(name)

    def refuse_links(self, ours: Callable[[str], bool]) -> None:
        """Raise CheckpointError if an entry whose name satisfies `ours` is a symbolic link."""
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
            "save replaces no linked file. Nothing was changed. Put its target in its place (`cp -rL` copies a "
            "directory with everything its links point to), or use another directory. The path of the checkpoint "
            "itself may be a link."
        )
