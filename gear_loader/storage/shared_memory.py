"""Named regions as files: where they lie, which processes use them, how left-over ones are removed.

What is in them is no concern of this module, which needs neither torch nor numpy: the command line is quick.

Whoever has a named region mapped holds a shared `flock` on the open file, from before its name appears or before it
is read, to when the last descriptor and the last mapping of that opening are gone, those of forked children
included. Whoever removes a left-over region holds an exclusive one meanwhile, so that nobody can attach in between.
The record locks of `storage.lock` are another kind and do not meet these. But closing any descriptor of a file drops
this process's record locks on it; so a file that this process has mapped is never opened here a second time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from gear_loader.errors import RegionError

__all__ = [
    "DIRECTORY",
    "MAGIC",
    "PREFIX",
    "Key",
    "OpenFile",
    "afterwards",
    "check_directory",
    "check_own",
    "descriptors",
    "filesystem",
    "guarded",
    "hold",
    "in_use",
    "opened",
    "processes",
    "region_names",
    "region_path",
    "remove",
    "users",
]

_SHARED_MEMORY = "/dev/shm"
DIRECTORY = os.environ.get("GEAR_LOADER_DIR") or _SHARED_MEMORY
"""Where named tables lie: $GEAR_LOADER_DIR as it was when this module was imported, else /dev/shm."""
PREFIX = "gear-loader."
MAGIC = b"GEARLDR\0"
"""What every region begins with, of whatever format version."""
Key = tuple[int, int]
"""A file's device and inode."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_PATIENCE = 0.02  # seconds: somebody who only looks holds a lock for microseconds

guard = threading.Lock()
"""AttachedTable while this process opens, closes or looks at region files."""
descriptors: dict[Key, int] = {}
"""The regions that this process has mapped, and their descriptors. `gear_loader.storage.region` keeps it."""
afterwards: list[Callable[[], None]] = []
"""What is called whenever the guard has been let go."""


def _after_fork() -> None:
    global guard
    guard = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Hold the guard; afterwards do what others had to leave undone meanwhile."""
    try:
        with guard:
            yield
    finally:
        for work in afterwards:
            work()


def region_path(name: str) -> str:
    """The file of the region called `name`.

    Raises:
        RegionError: a name that cannot be one, or a directory that cannot hold tables.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RegionError(
            f"Table name {name!r} was received; expected 1 to 128 letters, digits, '_', '.', '-', "
            "not starting with '.' or '-'."
        )
    check_directory()
    return os.path.join(DIRECTORY, PREFIX + name)


def check_directory() -> None:
    """Check that $GEAR_LOADER_DIR is a directory in which no other user can replace this user's tables.

    Raises:
        RegionError: it is not an absolute path of a directory, it belongs to another user than this one or root, or
            others may write to it and it is not sticky.
    """
    if DIRECTORY == _SHARED_MEMORY:
        return
    what = f"GEAR_LOADER_DIR is {DIRECTORY!r}"
    if not os.path.isabs(DIRECTORY):
        raise RegionError(f"{what}; expected an absolute path.")
    try:
        info = os.stat(DIRECTORY)
    except (OSError, ValueError) as error:
        raise RegionError(f"{what}: {error}. Make it, or unset GEAR_LOADER_DIR.") from None
    if not stat.S_ISDIR(info.st_mode):
        raise RegionError(f"{what}, which is no directory.")
    if info.st_uid not in (0, os.geteuid()):
        raise RegionError(
            f"{what}, which belongs to user {info.st_uid}, and this process runs as user {os.geteuid()}; expected a "
            "directory of the same user or of root."
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX:
        raise RegionError(
            f"{what}, which has mode {stat.S_IMODE(info.st_mode):#o}, so that other users can replace tables in it; "
            "expected 0o700, or 0o1777 for tables of several users."
        )


def filesystem() -> str:
    """The type of file system on which named tables lie, as the kernel calls it; "unknown" if that cannot be told."""
    device = os.stat(DIRECTORY).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file,
    ):
        for words in map(str.split, file):
            if words[2] == number:
                return words[words.index("-") + 1]
    return "unknown"


def region_names() -> list[str]:
    """What follows the prefix of every file that has it, sorted; not all of them need be regions.

    Bytes that are not UTF-8 are surrogates, see `os.fsdecode`.

    Raises:
        OSError: the directory cannot be read.
    """
    return sorted(entry[len(PREFIX) :] for entry in os.listdir(DIRECTORY) if entry.startswith(PREFIX))


def check_own(info: os.stat_result, name: str) -> None:
    """Check that no other user can have written a region: what is in it is followed as it stands.

    Args:
        info: of the open file.
        name: how an error calls it.

    Raises:
        RegionError: it belongs to another user, or others may write to it.
    """
    user = os.geteuid()
    if info.st_uid != user:
        raise RegionError(
            f"{name} belongs to user {info.st_uid}, and this process runs as user {user}; expected a table of the same "
            "user. Run both as one user, or serve the table (`gear-loader serve`)."
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RegionError(
            f"{name} has mode {stat.S_IMODE(info.st_mode):#o}, so that other users may write to it; expected 0o600. "
            "If nobody else has written to it, `chmod 600` makes it usable."
        )


# ---------------------------------------------------------------- in use or not


def hold(fd: int, path: str) -> bool:
    """Mark the region behind a fresh descriptor as used, for as long as it or a mapping of it is open.

    Returns:
        False if somebody is removing it, or looking whether it is used, or if `path` names another file by now:
        close the descriptor and begin again.

    Raises:
        FileNotFoundError: it has been removed.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))


class OpenFile(NamedTuple):
    """A region's file to look at. `ours`: this process has it mapped."""

    fd: int
    info: os.stat_result
    ours: bool

    @property
    def key(self) -> Key:
        """The file's device and inode."""
        return self.info.st_dev, self.info.st_ino

    def lock(self) -> bool:
        """Lock everybody else out until the file is closed; False if somebody uses it."""
        if self.ours:
            return False
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
            time.sleep(1e-3)


@contextlib.contextmanager
def opened(path: str) -> Iterator[OpenFile]:
    """Open a region's file to read from; holds the guard, so be quick.

    Raises:
        RegionError: it is no regular file.
        OSError: it is not there, or may not be read.
    """
    with guarded():
        info = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(info.st_mode):
            raise RegionError(f"{path} is not a regular file, and so no table. Remove it by hand.")
        ours = descriptors.get((info.st_dev, info.st_ino))
        if ours is not None:
            yield OpenFile(ours, info, True)
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            # Another file may have taken the place by now, but none of ours: those appear under the guard.
            yield OpenFile(fd, os.fstat(fd), False)
        finally:
            os.close(fd)


def in_use(path: str) -> bool:
    """Whether any process has the region at `path` mapped, this one included.

    Raises:
        As `opened`.
    """
    with opened(path) as file:
        return not file.lock()


def users(keys: Collection[Key]) -> dict[Key, list[int]]:
    """The processes that have these files mapped, as far as this one may look into others (root: all of them)."""
    found: dict[Key, list[int]] = {key: [] for key in keys}
    if not found:
        return found
    # By number: in the process that made it, the mapping does not bear the file's name.
    wanted = {
        (f"{os.major(device):02x}:{os.minor(device):02x}".encode(), str(inode).encode()): (device, inode)
        for device, inode in found
    }
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                mapped = {(words[3], words[4]) for words in (line.split(None, 5) for line in file)}
        except OSError:  # gone in the meantime, or not ours to read
            continue
        for place in mapped & wanted.keys():
            found[wanted[place]].append(pid)
    return found


def processes(pids: Collection[int]) -> str:
    """Processes with what they run, for an error."""
    if not pids:
        return "a process that cannot be seen from here (another user's, or in another container)"
    listed = ", ".join(f"{pid} ({_command(pid)})" for pid in pids)
    return f"process{'es' if len(pids) > 1 else ''} {listed}"


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(400).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended meanwhile"
    words = "".join(letter if letter.isprintable() else "?" for letter in words)
    return words if len(words) <= 60 else words[:57] + "..."


# ---------------------------------------------------------------- removing


def remove(name: str, *, anything: bool) -> int:
    """Remove a region that nobody uses, damaged or of another version as it may be.

    Args:
        name: as given to `Table.create`.
        anything: also a file that does not even begin as a region does.

    Returns:
        The bytes that are free now.

    Raises:
        FileNotFoundError: there is no region of that name.
        RegionError: somebody uses it (the message names the processes), it is no region, or not ours to remove. It is
            still there.
    """
    path = region_path(name)
    while True:
        try:
            with opened(path) as file:
                free = file.lock()
                # Locked or not, regions of versions that did not lock are recognised by who has them mapped.
                pids = users([file.key])[file.key]
                if not free or pids:
                    raise RegionError(
                        f"Table {name!r} is in use by {processes(pids)}. End that first, or let "
                        "it remove the name itself: Table.unlink()."
                    )
                start = os.pread(file.fd, len(MAGIC), 0)
                if start != MAGIC and not anything:
                    raise RegionError(
                        f"{path} does not begin as a table does: {start!r} was found, expected {MAGIC!r}. If nobody "
                        f"needs it, remove it by its name: gear-loader rm {name}"
                    )
                if os.path.samestat(file.info, os.stat(path, follow_symlinks=False)):
                    os.unlink(path)
                    return file.info.st_size
        except PermissionError as error:
            raise RegionError(
                f"Table {name!r} cannot be removed: {error}. Its owner or root can remove it."
            ) from error
