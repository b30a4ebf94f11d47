"""A checkpoint in a bucket of an object store: `Directory` without descriptors, locks and renaming.

A reader believes what the manifest names, with sizes and checksums, and no listing. A save writes objects with names
that no other save has (`Directory.token`), each of which appears whole or not at all, and puts the manifest last: that
makes the checkpoint valid. So there is nothing to rename: what is called ``.part`` in a directory is written under its
own name, except for a file, which is held in memory until it is renamed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import errno
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gear_loader.checkpoint.directory import Directory, readable
from gear_loader.checkpoint.json_file import LARGEST_BYTES
from gear_loader.checkpoint.names import PART, WRITABLE
from gear_loader.checkpoint.open_files import FileToRead, NewFile
from gear_loader.errors import CheckpointError
from gear_loader.utils.addresses import call, file_system, repeated
from gear_loader.utils.paths import is_address

THREADS = 16
"""Requests at a time."""
ABANDONED_SECONDS = 86_400.0
"""Age from which files of a save that was killed are removed: another one may still write younger ones."""
_PIECE_BYTES = 1 << 20
_RANGE_BYTES = 8 << 20
_PART_BYTES = 16 << 20
_MOST_PARTS = 9_000  # S3 takes 10,000
_Result = TypeVar("_Result")


class Bucket(Directory):
    """A prefix of a bucket.

    Args:
        system: fsspec's file system. key: path in it. path: address for errors.
        token: random name of what is written.
        sizes: those of objects that this one and its children have asked for.
    """

    threads = THREADS

    def __init__(self, system: Any, key: str, path: str, token: str, sizes: dict[str, int]) -> None:
        self._system, self._key, self.path, self.token, self._sizes = system, key, path, token, sizes
        self._held: dict[str, bytes] = {}

    @staticmethod
    def at_address(address: str, *, write: bool) -> Bucket:
        """The prefix at an address; no request is made.

        Raises:
            CheckpointError: fsspec or a package of the store is missing; or it cannot hold a checkpoint.
        """
        scheme = address.partition("://")[0]
        if write and scheme not in WRITABLE:
            raise CheckpointError(
                f"{address} has the scheme {scheme!r}; expected one of {', '.join(WRITABLE)}, which replace an object "
                "at once. Save into a local directory, and copy it there."
            )
        system, key = file_system(address)
        return Bucket(system, key.rstrip("/"), address.rstrip("/"), secrets.token_hex(8), {})

    def close(self) -> None:
        """Nothing is open."""

    @property
    def fd(self) -> int:
        """None: a call with it is an OSError."""
        return -1

    def _request(self, what: str, name: str, method: str, *given: Any, **options: Any) -> Any:
        path = self.at(name) if name else self.path
        return repeated(lambda: call(self._system, method, *given, **options), path, what)

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key.strip("/") else f"{self._key}{name}"

    # ---------------------------------------------------------------- directories: prefixes, which always exist

    def child(self, path: str) -> Bucket:
        """The prefix below this one; that of ``x.part`` is ``x``."""
        path = path.removesuffix(PART)
        return Bucket(self._system, self._key_of(path), self.at(path), self.token, self._sizes)

    def open_or_make(self, name: str) -> Bucket:
        """As `child`."""
        return self.child(name)

    def mkdir(self, name: str) -> None:
        """Nothing to do."""

    def rmdir(self, name: str) -> None:
        """Nothing to do."""

    def sync(self) -> None:
        """Nothing to do: an object is durable when the store has answered."""

    def sync_parent(self) -> None:
        """Nothing to do."""

    # ---------------------------------------------------------------- entries

    def names(self) -> list[str]:
        """Names of entries, as the store lists them, which may be late."""
        try:
            found = self._request("listed", "", "ls", self._key, detail=False)
        except FileNotFoundError:
            return []
        return sorted({os.path.basename(each.rstrip("/")) for each in found} - {""})

    def has(self, name: str) -> bool:
        """Whether there is an object of this name."""
        try:
            self._ask(name)
        except FileNotFoundError:
            return False
        return True

    def _ask(self, name: str) -> int:
        info = self._request("read", name, "info", self._key_of(name))
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.at(name))
        size = info["size"]
        if not isinstance(size, int):
            raise CheckpointError(f"{self.at(name)} cannot be read: the store does not tell its size.")
        self._sizes[self._key_of(name)] = size
        return size

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Bytes of objects that a checkpoint must have."""

        def ask(name: str) -> int:
            with readable(self.at(name)):
                return self._ask(name)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(ask, names))

    def size_of(self, name: str) -> int:
        """Bytes of an object, which this asks for once."""
        known = self._sizes.get(self._key_of(name))
        return self._ask(name) if known is None else known

    def read_range(self, name: str, begin: int, end: int, *, exactly: bool = True) -> bytes:
        """Bytes of an object; as many as asked for, or not `exactly` so many."""

        def attempt() -> bytes:
            data: bytes = call(self._system, "cat_file", self._key_of(name), start=begin, end=end)
            if len(data) > end - begin:
                raise CheckpointError(
                    f"{self.at(name)} has {len(data):,} bytes in answer to a request of {end - begin:,}: the server "
                    "does not read by range. Copy the checkpoint into a directory, and load that."
                )
            if exactly and len(data) < end - begin:
                raise OSError(errno.EIO, f"{len(data):,} bytes, expected {end - begin:,}")
            return data

        return repeated(attempt, self.at(name), "read") if end > begin else b""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        self._request("written", name, "pipe_file", self._key_of(name), data)

    def rename(self, old: str, new: str) -> None:
        """Write the file that was held; a directory has its name already."""
        data = self._held.pop(old, None)
        if data is not None:
            self.put(new, data)

    def link(self, old: str, new: str, target: Directory | None = None) -> None:
        """Copy an object within the store."""
        to = target or self
        assert isinstance(to, Bucket)
        self._request("copied", old, "cp_file", self._key_of(old), to._key_of(new))

    def remove_file(self, name: str) -> None:
        """Remove an object."""
        self._request("removed", name, "rm_file", self._key_of(name))

    def remove_files(self, ours: Callable[[str], bool]) -> None:
        """Remove the objects whose names satisfy `ours`; those that cannot be removed stay."""

        def remove(name: str) -> None:
            with contextlib.suppress(OSError):
                self.remove_file(name)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(remove, filter(ours, self.names())))

    def is_abandoned(self, name: str) -> bool:
        """Whether an object, or all below a prefix, is this save's, or too old for another save to need it."""
        if self.token in name:
            return True
        found = self._request("listed", name, "find", self._key_of(name))
        return bool(found) and time.time() - max(map(self._modified, found)) > ABANDONED_SECONDS

    def _modified(self, key: str) -> float:
        try:
            when = self._system.modified(key)
        except Exception:  # not every store tells
            return time.time()
        return when.timestamp() if isinstance(when, datetime.datetime) else time.time()

    # ---------------------------------------------------------------- files

    def again(self, write: Callable[[], _Result], name: str) -> _Result:
        """Write a file, from its beginning where the store fails."""
        return repeated(write, self.at(name), "written", from_failure=True)

    def new_file(self, name: str, size: int, *, direct: bool = False) -> NewFile:
        """An object of at most `size` bytes, which appears when it is synced."""
        if name.endswith(PART):
            return _Held(self._held, name)
        return _Upload(self._system, self._key_of(name), size)

    def open_to_read(self, name: str) -> FileToRead:
        """An object, read by range; a manifest, which another save may replace at any time, at once."""
        if name.endswith(".json"):
            return _ReadObject(self.read_range(name, 0, LARGEST_BYTES + 1, exactly=False))
        return _Object(self, name)

    # ---------------------------------------------------------------- links

    def refuse_link(self, name: str) -> None:
        """There are none."""

    def refuse_links(self, ours: Callable[[str], bool]) -> None:
        """There are none."""


def folder_to_load(directory: Directory, path: str) -> Directory:
    """Open a directory below another one, or the prefix at an address; see `Directory.child_to_load`."""
    return Bucket.at_address(path, write=False) if is_address(path) else directory.child_to_load(path)


class _Held(NewFile):
    """A small file in memory, which `Bucket.rename` writes."""

    def __init__(self, held: dict[str, bytes], name: str) -> None:
        self._all, self._name, self._data = held, name, bytearray()

    def write(self, view: memoryview) -> None:
        self._data += view

    def sync(self) -> None:
        self._all[self._name] = bytes(self._data)

    def close(self) -> None:
        self._data.clear()


class _Upload(NewFile):
    """A multipart upload; of a small object one request. What was not synced does not appear."""

    def __init__(self, system: Any, key: str, size: int) -> None:
        block = max(_PART_BYTES, -(-size // _MOST_PARTS))
        self._upload: Any = system.open(key, "wb", block_size=block)

    def write(self, view: memoryview) -> None:
        self._upload.write(view)

    def sync(self) -> None:
        self._upload.close()
        self._upload = None

    def close(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            with contextlib.suppress(
                Exception
            ):  # the store may be out of reach; its own rules end the upload
                upload.discard()
            upload.closed = True  # else its end would write what there is


class _Object(FileToRead):
    """An object, read by range."""

    piece_bytes = _PIECE_BYTES
    fd = -1

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket, self._name = bucket, name
        self.size = bucket.size_of(name)
        self._window = 0, b""

    def advise(self, advice: int) -> None:
        pass

    def read_into(self, view: memoryview, begin: int) -> int:
        """As the base class; what follows is read with it, in one request of `_RANGE_BYTES`."""
        first, data = self._window
        if not first <= begin < first + len(data):
            end = min(begin + max(len(view), _RANGE_BYTES), self.size)
            first, data = self._window = begin, self._bucket.read_range(self._name, begin, end)
        part = memoryview(data)[begin - first : begin - first + len(view)]
        view[: len(part)] = part
        return len(part)

    def read(self, count: int) -> bytes:
        count = min(count, self.size)

        def part(begin: int) -> bytes:
            return self._bucket.read_range(self._name, begin, min(begin + _RANGE_BYTES, count))

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            return b"".join(pool.map(part, range(0, count, _RANGE_BYTES)))

    def close(self) -> None:
        pass


class _ReadObject(FileToRead):
    """What an object held when it was opened."""

    fd = -1

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, count: int) -> bytes:
        return self._data[:count]

    def close(self) -> None:
        pass
