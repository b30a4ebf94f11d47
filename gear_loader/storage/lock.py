"""The lock of a table's index: exclusive between threads and processes, released on death, with a deadline.

Between processes it is a POSIX record lock (`fcntl.lockf`), which the kernel releases when the lock holder dies. Record
locks belong to the process, so a mutex excludes its threads. Closing any descriptor of the file would release the lock:
`gear_loader.storage.region` opens the file of a region once per process and closes it with the last user.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from gear_loader.errors import LockTimeoutError
from gear_loader.utils.mutex import new_mutex

_T = TypeVar("_T")

_PAUSE = 1e-3  # longest sleep of a waiter between two attempts, in seconds
_PAUSE_SPEC = ctypes.byref((ctypes.c_long * 2)(0, int(_PAUSE * 1e9)))  # as a timespec
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # system call number
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
)
LOCK_TIMEOUT = 60.0
"""Seconds until a wait for the lock times out; a mutation takes far less than a millisecond."""


def process_start(pid: int) -> int:
    """Start time of process `pid` in clock ticks since boot; 0 if it does not exist or is a zombie.

    Together with the pid it identifies a process, even after the pid is reused.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _try(fd: int, place: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


class _Wakeup:
    """A futex that wakes one waiter when the lock is released.

    It only shortens sleeps: every waiter retries after `_PAUSE`. So the count of waiters need not be exact.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self.count = ctypes.c_uint32.from_address(address)
        self.waiting = ctypes.c_int32.from_address(address + 4)

    def wait(self, count: int) -> None:
        """Sleep until `count` changes, at most `_PAUSE`."""
        _syscall(_FUTEX, self._address, _FUTEX_WAIT, count, _PAUSE_SPEC, None, 0)

    def wake(self) -> None:
        self.count.value += 1
        _syscall(_FUTEX, self._address, _FUTEX_WAKE, 1, None, None, 0)


class IndexLock:
    """The exclusive lock of a table's index. Not reentrant.

    `run` calls a function under the lock and always releases it, even if an exception (Ctrl-C, a signal handler that
    raises) arrives at any bytecode: the mutex records its owner on acquisition, and the release depends on that record
    alone, in two nested `finally` blocks, which repeat an interrupted release.

    As a context manager it lacks this guarantee: an exception between two statements can leave the lock held.

    Args:
        name: name of the table in errors.
        fd: descriptor of the region's file, or None for a private region (threads of this process only).
        timeout: seconds until a wait for the lock times out.
        place: byte of the file that is locked; locks of different bytes are independent.
    """

    def __init__(
        self, name: str, fd: int | None = None, *, timeout: float = LOCK_TIMEOUT, place: int = 0
    ) -> None:
        self.timeout = timeout
        self._place = place
        self._name = name
        self._fd = fd
        self._mutex = new_mutex()
        self._wanted = False  # whether the owner of the mutex keeps the record lock, or waits for it
        self._wakeup: _Wakeup | None = None
        _locks.add(self)

    def run(self, section: Callable[..., _T], *given: Any) -> _T:
        """Call `section` while holding the lock.

        Args:
            section: a function that does not acquire the same lock. given: its arguments.

        Returns:
            The result of `section`.

        Raises:
            LockTimeoutError: timed out waiting for another process or thread, or this thread is the lock holder.
        """
        mutex, file = self._mutex, self._fd
        owned = mutex._is_owned
        if owned():
            raise self._reentered()
        try:
            try:
                if file is not None or not mutex.acquire(False):
                    self._take(mutex)
                return section(*given)
            finally:
                if owned():
                    mutex.release() if file is None else self._drop(mutex)
        finally:
            if owned():  # the release above was interrupted
                self._drop(mutex)

    @property
    def is_mine(self) -> bool:
        """Whether this thread is in a section under the lock, or waits for it: asked in a signal handler."""
        owned: bool = self._mutex._is_owned()
        return owned

    def read(self, section: Callable[[], _T]) -> _T:
        """`run` a section that only reads what each store leaves whole, also amid another section of this thread.

        That is paused by a signal handler, which calls this, and goes on when it has returned.
        """
        if not self.is_mine:
            return self.run(section)
        if self._fd is None:
            return section()
        self._lock_file(self._fd)  # at once, if the paused section has it
        try:
            return section()
        finally:
            if not self._wanted:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._place)

    def __enter__(self) -> IndexLock:
        mutex = self._mutex
        if mutex._is_owned():
            raise self._reentered()
        try:
            self._take(mutex)
        except BaseException:
            if mutex._is_owned():
                self._drop(mutex)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop(self._mutex)

    def hear(self, address: int | None) -> None:
        """Use the futex at `address`: 8 bytes of the region, initially zero. None stops using it before an unmap."""
        self._wakeup = None if address is None or _FUTEX is None else _Wakeup(address)

    def _take(self, mutex: Any) -> None:
        if not mutex.acquire(timeout=self.timeout):
            raise LockTimeoutError(
                f"Another thread of this process (pid {os.getpid()}) has held the lock of {self._name} "
                f"for over {self.timeout:g} s."
            )
        if self._fd is not None:
            self._wanted = True
            self._lock_file(self._fd)

    def _drop(self, mutex: Any) -> None:
        """Release the record lock and the mutex, which the caller owns. May be repeated after an interruption."""
        try:
            if self._fd is not None:
                self._wanted = False
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._place)
                if self._wakeup is not None and self._wakeup.waiting.value:
                    self._wakeup.wake()
        finally:
            mutex.release()

    def _reentered(self) -> LockTimeoutError:
        return LockTimeoutError(
            f"This thread holds the lock of {self._name} already: a signal handler, or a finalizer, uses the table in "
            "the middle of another call. Use it after that call has returned."
        )

    def _lock_file(self, fd: int) -> None:
        if _try(fd, self._place):
            return
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.waiting.value += 1
        try:
            deadline = time.monotonic() + self.timeout
            while True:
                count = 0 if wakeup is None else wakeup.count.value
                if _try(fd, self._place):
                    return
                if time.monotonic() > deadline:
                    raise LockTimeoutError(
                        f"Another process has held the lock of {self._name} for over {self.timeout:g} s. "
                        "It may be stopped; `fuser` on the file names the processes that use it."
                    )
                if wakeup is None:
                    time.sleep(_PAUSE)
                else:
                    wakeup.wait(count)
        finally:
            if wakeup is not None:
                wakeup.waiting.value = max(0, wakeup.waiting.value - 1)

    def _reset(self) -> None:
        self._mutex = new_mutex()


_locks: weakref.WeakSet[IndexLock] = weakref.WeakSet()


def _after_fork() -> None:
    # In a forked child: record locks are not inherited, and the threads that held mutexes do not exist.
    for lock in list(_locks):
        lock._reset()


os.register_at_fork(after_in_child=_after_fork)
