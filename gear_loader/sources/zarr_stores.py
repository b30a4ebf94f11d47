"""Where zarr groups lie: directories and zip files, on this machine or at addresses, as stores of the package zarr."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import zipfile
from collections.abc import AsyncIterator
from typing import Any

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.source_files import SourceFiles, SourceFolder, one_file
from gear_loader.utils.paths import is_address

_PURPOSE = "Reading a zarr group"


@dataclasses.dataclass(frozen=True)
class ZarrPlace:
    """The place of a group.

    Attributes:
        path: its path or address. folder: the directory; None of a zip file. file: the zip file; None of a directory.
    """

    path: str
    folder: SourceFolder | None = None
    file: SourceFiles | None = None


def place_of(path: str | os.PathLike[str]) -> ZarrPlace:
    """The place of a group by its path or address: a zip file if it is a file, or an address that ends in ``.zip``."""
    folder = SourceFolder(path)
    is_zip = folder.path.lower().endswith(".zip") if folder.remote else os.path.isfile(folder.path)
    if is_zip:
        return ZarrPlace(folder.path, file=one_file(folder.path, "a zip file of a zarr group"))
    return ZarrPlace(folder.path, folder=folder)


def store_of(place: ZarrPlace) -> Any:
    """What `zarr.open_group` takes: a path, or a store to close afterwards."""
    zarr = require("zarr", _PURPOSE)
    remote = is_address(place.path)
    if not remote:
        return place.path if place.file is None else zarr.storage.ZipStore(place.path, mode="r")
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise SourceError(
            f"{place.path} was received, and zarr {zarr.__version__} is installed; expected zarr 3 for addresses."
        )
    if place.folder is not None:
        return _remote_store()(place.folder)
    assert place.file is not None
    store = zarr.storage.ZipStore(place.path, mode="r")
    # As its own opening, of what is opened here.
    store._lock = threading.RLock()
    store._zf = zipfile.ZipFile(place.file.open(place.file[0], whole=False))
    store._is_open = True
    return store


def _remote_store() -> Any:
    """The class of stores of directories at addresses; made here, because its base is zarr's."""
    base: Any = require("zarr.abc.store", _PURPOSE)

    class RemoteStore(base.Store):  # type: ignore[misc]
        """A directory at an address. A file that it lists and that is not there is an error, and no fill value."""

        supports_writes = supports_deletes = False
        supports_listing = True

        def __init__(self, folder: SourceFolder) -> None:
            super().__init__(read_only=True)
            self._folder = folder
            self._names = frozenset(folder.listed())

        def __repr__(self) -> str:
            return f"{self._folder.path!r}"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, RemoteStore) and other._folder is self._folder

        __hash__ = None  # type: ignore[assignment]

        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            if key not in self._names:
                return None
            return prototype.buffer.from_bytes(await asyncio.to_thread(self._read, key, byte_range))

        def _read(self, key: str, wanted: Any) -> bytes:
            with self._folder.open(key, ahead=False) as file:
                size = file.seek(0, os.SEEK_END)
                if isinstance(wanted, base.RangeByteRequest):
                    begin, end = wanted.start, min(wanted.end, size)
                elif isinstance(wanted, base.OffsetByteRequest):
                    begin, end = wanted.offset, size
                else:
                    begin, end = (0, size) if wanted is None else (max(0, size - wanted.suffix), size)
                file.seek(begin)
                data = file.read(max(0, end - begin))
            if len(data) < end - begin:
                raise SourceError(f"The file {self._folder.at(key)!r} ends early; expected {end:,} bytes.")
            return data

        async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Any]:
            return [await self.get(key, prototype, wanted) for key, wanted in key_ranges]

        async def exists(self, key: str) -> bool:
            return key in self._names

        async def list(self) -> AsyncIterator[str]:
            for name in self._names:
                yield name

        async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
            for name in self._names:
                if name.startswith(prefix):
                    yield name

        async def list_dir(self, prefix: str) -> AsyncIterator[str]:
            begin = f"{prefix.rstrip('/')}/" if prefix else ""
            names = {name[len(begin) :].partition("/")[0] for name in self._names if name.startswith(begin)}
            for name in names:
                yield name

        async def set(self, key: str, value: Any) -> None:
            raise NotImplementedError

        async def delete(self, key: str) -> None:
            raise NotImplementedError

    return RemoteStore
