"""Files of named regions: location, the processes that use them, and removal of left-over ones.

This module does not interpret their contents and imports neither torch nor numpy, so that the command line starts fast.

A process that has a named region mapped holds a shared `flock` on the open file, from before the name appears or the
file is read until the last descriptor and mapping of that opening are closed, in forked children too. Removal of a
left-over region holds an exclusive `flock`, so that no process can attach in between. The record locks of
`storage.lock` are independent of `flock`. But closing any descriptor of a file releases this process's record locks on
it, so a file that this process has mapped is never opened a second time.
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
from gear_loader.utils.descriptors import open_descriptor

_SHARED_MEMORY = "/dev/shm"
DIRECTORY = os.environ.get("GEAR_LOADER_DIR") or _SHARED_MEMORY
"""Directory of named tables: $GEAR_LOADER_DIR at the import of this module, else /dev/shm."""
PREFIX = "gear-loader."
MAGIC = b"GEARLDR\0"
"""First bytes of every region, in all format versions."""
Key = tuple[int, int]
"""A file's device and inode."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_LOCK_TIMEOUT = 0.02  # seconds; an inspection holds a lock for microseconds

guard = threading.Lock()
"""Held while this process opens, closes or inspects region files."""
descriptors: dict[Key, int] = {}
"""Descriptors of the regions that this process has mapped, maintained by `gear_loader.storage.region`."""
afterwards: list[Callable[[], None]] = []
"""Callbacks after each release of the guard."""


def _after_fork() -> None:
    global guard
    guard = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Hold the guard; then run the callbacks in `afterwards`."""
    try:
        with guard:
            yield
    finally:
        for work in afterwards:
            work()


def region_path(name: str) -> str:
    """Path of the file of the region called `name`.

    Raises:
        RegionError: an invalid name, or a directory that cannot hold tables.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        from gear_loader.utils.arrays import shown  # loads numpy, which the command line can do without

        raise RegionError(
            f"Table name {shown(name)} was received; expected 1 to 128 letters, digits, '_', '.', '-', "
            "not starting with '.' or '-'."
        )
    check_directory()
    return os.path.join(DIRECTORY, PREFIX + name)


def check_directory() -> None:
    """Check that $GEAR_LOADER_DIR is a directory in which no other user can replace this user's tables.

    Raises:
        RegionError: not an absolute path of a directory, owned by a user other than this one or root, or writable by
            others without the sticky bit.
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
    """The kernel's name of the file system type of named tables, or "unknown"."""
    return next(iter(_mount()), "unknown")


def mount_options() -> list[str]:
    """The options of the file system of named tables, such as ``["rw", "size=24G", "huge=advise"]``."""
    return _mount()[-1].split(",") if _mount() else []


def _mount() -> list[str]:
    """Type, source and options of the file system of named tables; empty if unknown."""
    device = os.stat(DIRECTORY).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file,
    ):
        for words in map(str.split, file):
            if words[2] == number:
                return words[words.index("-") + 1 :]
    return []


def region_names() -> list[str]:
    """Sorted names of the files with the prefix of regions, without the prefix; not all need be regions.

    Bytes that are not UTF-8 become surrogates, see `os.fsdecode`.

    Raises:
        OSError: the directory cannot be read.
    """
    return sorted(entry[len(PREFIX) :] for entry in os.listdir(DIRECTORY) if entry.startswith(PREFIX))


def check_own(info: os.stat_result, name: str) -> None:
    """Check that no other user can have written a region, because its contents are trusted.

    Args:
        info: `stat` result of the open file.
        name: name of the region in errors.

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
            "If no other user has written to it, `chmod 600` makes it usable."
        )


# ---------------------------------------------------------------- in use or not


def hold(fd: int, path: str) -> bool:
    """Mark the region of a new descriptor as used, until the descriptor and all its mappings are closed.

    Returns:
        False if another process is removing or inspecting it, or if `path` names another file now: the caller closes
        the descriptor and retries.

    Raises:
        FileNotFoundError: the region has been removed.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))


class OpenFile(NamedTuple):
    """An open file of a region. `ours`: whether this process has it mapped."""

    fd: int
    info: os.stat_result
    ours: bool

    @property
    def key(self) -> Key:
        """The file's device and inode."""
        return self.info.st_dev, self.info.st_ino

    def lock(self) -> bool:
        """Lock the file exclusively until it is closed; False if the region is in use."""
        if self.ours:
            return False
        deadline = time.monotonic() + _LOCK_TIMEOUT
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
    """Open a region's file for reading; holds the guard, so the block must be short.

    Raises:
        RegionError: not a regular file.
        OSError: the file does not exist or is not readable.
    """
    with guarded():
        info = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(info.st_mode):
            raise RegionError(f"{path} is not a regular file, and so no table. Remove it by hand.")
        ours = descriptors.get((info.st_dev, info.st_ino))
        if ours is not None:
            yield OpenFile(ours, info, True)
            return
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open_descriptor(path, flags) as file:
            # Another file may have replaced it, but not one of this process, which links its files under the guard.
            yield OpenFile(file.fileno(), os.fstat(file.fileno()), False)


def in_use(path: str) -> bool:
    """Whether any process, including this one, has the region at `path` mapped.

    Raises:
        As `opened`.
    """
    with opened(path) as file:
        return not file.lock()


def users(keys: Collection[Key]) -> dict[Key, list[int]]:
    """Pids of the processes that have these files mapped, among the processes that this one may inspect."""
    found: dict[Key, list[int]] = {key: [] for key in keys}
    if not found:
        return found
    # By device and inode: in the process that created a region, its mapping does not show the file's name.
    wanted = {
        (f"{os.major(device):02x}:{os.minor(device):02x}".encode(), str(inode).encode()): (device, inode)
        for device, inode in found
    }
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                mapped = {(words[3], words[4]) for words in (line.split(None, 5) for line in file)}
        except OSError:  # the process has ended, or may not be inspected
            continue
        for place in mapped & wanted.keys():
            found[wanted[place]].append(pid)
    return found


def processes(pids: Collection[int]) -> str:
    """Pids and commands of processes, for errors."""
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
    """Remove an unused region, even if it is damaged or of another version.

    Args:
        name: as given to `Table.create`.
        anything: whether to remove a file without the magic of a region too.

    Returns:
        Freed bytes.

    Raises:
        FileNotFoundError: no region has that name.
        RegionError: the region is in use (the message names the processes), not a region, or may not be removed.
            Nothing was removed.
    """
    path = region_path(name)
    while True:
        try:
            with opened(path) as file:
                free = file.lock()
                # Versions that did not lock regions are recognised by their mappings.
                pids = users([file.key])[file.key]
                if not free or pids:
                    raise RegionError(
                        f"Table {name!r} is in use by {processes(pids)}. End that first, or let "
                        "it remove the name itself: Table.unlink()."
                    )
                start = os.pread(file.fd, len(MAGIC), 0)
                if start != MAGIC and not anything:
                    raise RegionError(
                        f"{path} does not begin as a table does: {start!r} was found, expected {MAGIC!r}. If it is "
                        f"not needed, remove it by its name: gear-loader rm {name}"
                    )
                if os.path.samestat(file.info, os.stat(path, follow_symlinks=False)):
                    os.unlink(path)
                    return file.info.st_size
        except PermissionError as error:
            raise RegionError(
                f"Table {name!r} cannot be removed: {error}. Its owner or root can remove it."
            ) from error
