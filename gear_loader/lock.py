"""The lock around a table's index: dies with its holder, has a deadline, works between threads too.

Between processes it is a POSIX record lock (`fcntl.lockf`), which the kernel releases when its holder dies in
whatever way. Such locks belong to the process, so threads of one process are kept apart by a mutex, and
closing any descriptor of the file would drop them: `gear_loader.region` sees to it that a process opens a
region's file once and closes it with the last user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import weakref
from types import TracebackType

from gear_loader.errors import LockTimeoutError

__all__ = ["LOCK_TIMEOUT", "IndexLock", "process_start"]

LOCK_TIMEOUT = 60.0
"""Seconds after which waiting for the lock is given up: a mutation takes far less than a millisecond."""


def process_start(pid: int) -> int:
    """When process `pid` started, in clock ticks since boot; 0 if there is no such process (or a zombie).

    Together with the pid this names a process for good, also after the pid has been given to another.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


class IndexLock:
    """Context manager: the exclusive right to change a table's index. Not reentrant.

    Args:
        name: how an error calls the table.
        fd: descriptor of the region's file, or None for a private region (threads of this process only).
        timeout: seconds to wait before `LockTimeoutError`.
    """

    def __init__(self, name: str, fd: int | None = None, *, timeout: float = LOCK_TIMEOUT) -> None:
        self.timeout = timeout
        self._name = name
        self._fd = fd
        self._mutex = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> IndexLock:
        if not self._mutex.acquire(timeout=self.timeout):
            raise LockTimeoutError(
                f"Another thread of this process (pid {os.getpid()}) has held the lock of {self._name} "
                f"for over {self.timeout:g} s."
            )
        if self._fd is not None:
            try:
                self._lock_file(self._fd)
            except BaseException:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)  # interrupted just after it was taken
                self._mutex.release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _lock_file(self, fd: int) -> None:
        pause = 10e-6
        deadline = 0.0
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            now = time.monotonic()
            deadline = deadline or now + self.timeout
            if now > deadline:
                raise LockTimeoutError(
                    f"Another process has held the lock of {self._name} for over {self.timeout:g} s. "
                    "It may be stopped; `fuser` on the file names the processes that use it."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def _reset(self) -> None:
        self._mutex = threading.Lock()


_locks: weakref.WeakSet[IndexLock] = weakref.WeakSet()


def _after_fork() -> None:
    # In a forked child: record locks are not inherited, and no thread is left that could hold a mutex.
    for lock in list(_locks):
        lock._reset()


os.register_at_fork(after_in_child=_after_fork)
