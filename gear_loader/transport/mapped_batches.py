"""Batches in shared memory: the server gathers into memory that a learner of the same machine maps.

The server's files have no name (``memfd_create``) and a fixed size. The learner opens them in ``/proc``, which the
kernel allows to processes of the same user. That both are on one machine, and see the same processes, is not assumed:
the server describes a file with random bytes, and a learner that reads other bytes at that place gets batches as
messages instead, as over a network. What a server names is not trusted: only a sealed file without a name of the
learner's own user is opened for writing, or mapped.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import math
import mmap
import os
import resource
import secrets
import stat
import threading
import weakref
from typing import Any

import numpy as np
import torch

from gear_loader.utils.arrays import Array

LEAST_MAPPED = 1 << 18
"""Bytes of a tensor from which on it is mapped; a message with less takes less time than it is worth."""
_MOST_FILES = 1 << 13
"""Of a process, 8 a learner; at two descriptors each, as Python's mappings have their own."""
_UNUSED = 128  # answers after which a learner unmaps what none of them has used
_TOKEN = 32  # bytes
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Place = list[int]
"""File descriptor, device, inode and bytes of a file."""


def _file(size: int) -> tuple[Place, mmap.mmap]:
    """A file of `size` bytes, zeros, and its memory. Raises OSError."""
    fd = os.memfd_create("gear-loader-batches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        found = os.fstat(fd)
        return [fd, found.st_dev, found.st_ino, size], mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise


class MappedMemory:
    """Memory of a server's tensors that learners map; thread-safe."""

    most_held = 64
    """Buffers that learners may hold while others are filled; see `Prefetcher`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._places: dict[int, Place] = {}  # by address
        self._told: list[Any] | None = None
        limit, _ = resource.getrlimit(
            resource.RLIMIT_NOFILE
        )  # of which connections and files of others need half
        self._most = _MOST_FILES if limit < 0 else min(_MOST_FILES, limit // 4)

    def describe(self) -> list[Any] | None:
        """What a learner needs to find out whether it can map this process's files; None if there are none here."""
        with self._guard:
            if self._told is None:
                token = secrets.token_bytes(_TOKEN)
                try:
                    place, memory = _file(len(token))
                except (OSError, AttributeError):  # not Linux, or too many files
                    return None
                memory[:] = token
                weakref.finalize(self, os.close, place[0]).atexit = False
                self._told = [os.getpid(), place, token.hex()]
            return self._told

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, of ordinary memory if it is small, or there are too many files."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_MAPPED or len(self._places) >= self._most:
            return torch.empty(shape, dtype=dtype, device="cpu")
        try:
            place, memory = _file(size)
        except OSError:
            return torch.empty(shape, dtype=dtype, device="cpu")
        array: Array = np.frombuffer(memory, np.uint8)
        address = array.ctypes.data
        with self._guard:
            self._places[address] = place
        weakref.finalize(array, self._close, address).atexit = False  # when the tensor's storage is freed
        return torch.frombuffer(array, dtype=dtype).view(shape)

    def _close(self, address: int) -> None:
        place = self._places.pop(address, None)  # no lock: it may be called by whoever holds it
        if place is not None:
            os.close(place[0])

    def place(self, tensor: torch.Tensor) -> tuple[Place, int] | None:
        """File of a contiguous tensor, and its offset there; None if it lies elsewhere."""
        base = tensor.untyped_storage().data_ptr()
        place = self._places.get(base)
        return None if place is None else (place, tensor.data_ptr() - base)


class MappedAnswers:
    """A learner's view of a server's files.

    Args:
        told: what `MappedMemory.describe` says.

    Attributes:
        told: as given.

    Raises:
        OSError: they cannot be mapped: the server is on another machine, or belongs to another user.
    """

    def __init__(self, told: Any) -> None:
        self.told = told
        try:
            pid, place, token = told
            self._process = f"/proc/{int(pid)}/fd"
            expected = bytes.fromhex(token)
            if len(expected) != _TOKEN or self._open(place).tobytes() != expected:
                raise ValueError("other bytes")
        except (TypeError, ValueError) as error:
            raise OSError(f"The server's memory cannot be mapped ({error}).") from None
        self._known: collections.OrderedDict[tuple[int, int], tuple[Array, int]] = collections.OrderedDict()
        self._ended: collections.deque[int] = collections.deque()
        self._views: dict[int, int] = {}  # number of the answer -> views that are left
        self._guard = threading.Lock()  # of `_views`; answers may be read by another thread

    def _open(self, place: Any) -> Array:
        number, device, inode, size = map(int, place)
        # Looked at before it is opened: to open a device or a pipe may have effects.
        try:
            found = os.open(f"{self._process}/{number}", os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError, ProcessLookupError) as error:
            raise ConnectionResetError(
                f"The server has ended, or closed a file that its answer names ({error})."
            ) from None
        try:
            status = os.fstat(found)
            known = status.st_dev, status.st_ino, status.st_size
            if known != (device, inode, size) or size <= 0 or not stat.S_ISREG(status.st_mode):
                raise OSError("The server has closed a file that its answer names.")
            if status.st_uid != os.geteuid():
                raise OSError("The server belongs to another user.")
            fd = os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(found)
        try:
            # Which files with a name cannot have; and its size stays.
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _SEALS:
                raise OSError("The server names a file that is not for batches.")
            return np.frombuffer(mmap.mmap(fd, size), np.uint8)
        finally:
            os.close(fd)

    def view(self, number: int, place: Any) -> Array:
        """The bytes of a file that an answer names, uint8 [n]; the answer is `ended` once nothing refers to its views.

        Raises:
            ConnectionResetError: the server has ended since it answered.
            OSError, TypeError, ValueError: the file cannot be mapped, or no file is named.
        """
        _, device, inode, _ = place
        key = int(device), int(inode)
        known = self._known.pop(key, None)
        whole = self._open(place) if known is None else known[0]
        self._known[key] = whole, number
        while self._known and next(iter(self._known.values()))[1] < number - _UNUSED:
            self._known.popitem(last=False)
        view: Array = whole[:]
        with self._guard:
            self._views[number] = self._views.get(number, 0) + 1
        weakref.finalize(view, self._ended.append, number).atexit = False
        return view

    def ended(self, received: int) -> list[int]:
        """Numbers of the answers, up to `received`, whose memory was released since the last call.

        An answer that could not be read to its end comes again, and its memory is used then.
        """
        with self._guard:
            with contextlib.suppress(IndexError):
                while True:
                    self._views[self._ended.popleft()] -= 1
            found = [number for number, left in self._views.items() if not left and number <= received]
            for number in found:
                del self._views[number]
        return found
