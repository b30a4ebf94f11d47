"""Files of data sets: on this machine, or at addresses of fsspec such as ``s3://bucket/data/*.parquet``."""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
from collections.abc import Mapping
from typing import IO, Any

from gear_loader.errors import SourceError
from gear_loader.utils.addresses import file_system, open_address, repeated
from gear_loader.utils.paths import is_address, local_path

WHOLE_BYTES = 32 << 20
"""Files at addresses are fetched whole up to this size; larger ones are read by range."""
_GROUP_BYTES, _GROUP_FILES = 64 << 20, 16  # fetched side by side
_KEPT_BYTES = 256 << 20


class SourceFiles(list[str]):
    """Paths or addresses of files, which are opened in their order, several times over.

    Those at addresses are fetched many at a time while they are opened one after the other, because each request waits
    for its answer; and kept as long as there is room.
    """

    def __init__(self, sizes: Mapping[str, int | None]) -> None:
        super().__init__(sorted(sizes))
        self._sizes, self._kept = sizes, dict[str, bytes]()
        self._places = {path: place for place, path in enumerate(self)}
        self._last = -1
        self._small = 0 < sum(size or _KEPT_BYTES + 1 for size in sizes.values()) <= _KEPT_BYTES

    def open(self, path: str, *, whole: bool = True) -> IO[bytes]:
        """Open one for reading.

        Args:
            whole: whether most of it will be read; else it is read by range, unless there is room for all files.

        Raises:
            SourceError: the store refuses. OSError: a local file cannot be opened, or nothing is at the address.
        """
        place = self._places[path]
        follows, self._last = place - self._last in (0, 1), place
        if not (self._fetched_whole(path) and (whole or self._small)):
            return open_address(path, SourceError) if is_address(path) else open(path, "rb")
        kept = self._kept.get(path)
        return io.BytesIO(self._fetch(path, _GROUP_FILES if follows else 1) if kept is None else kept)

    def _fetched_whole(self, path: str) -> bool:
        return 0 < (self._sizes[path] or 0) <= WHOLE_BYTES

    def _fetch(self, first: str, most: int) -> bytes:
        """Fetch a file and those that follow it, so many at most."""
        group, sizes = list[str](), list[int]()
        for path in itertools.islice(self, self._places[first], None):
            size = self._sizes[path] or 0
            full = len(group) == most or sum(sizes) + size > _GROUP_BYTES
            if group and (full or path in self._kept or not self._fetched_whole(path)):
                break
            group.append(path)
            sizes.append(size)
        system = file_system(first, SourceError)[0]
        places = [file_system(path, SourceError)[1] for path in group]

        def attempt() -> list[bytes]:
            found: list[bytes] = system.cat_ranges(places, [0] * len(places), sizes, on_error="raise")
            if (given := list(map(len, found))) != sizes:
                raise OSError(f"{given} bytes arrived; expected {sizes}")
            return found

        found = repeated(attempt, first, "read", SourceError)
        while self._kept and sum(map(len, list(self._kept.values()))) + sum(sizes) > _KEPT_BYTES:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept.update(zip(group, found, strict=True))
        return found[0]


def files_of(pattern: Any, suffixes: tuple[str, ...]) -> SourceFiles:
    """The files of a path or an address, in the order of their names: of a pattern, or those in a directory and below.

    Raises:
        SourceError: there is none, or the store refuses.
    """
    if is_address(pattern):
        path, found = pattern, repeated(lambda: _listed(pattern, suffixes), pattern, "listed", SourceError)
    else:
        path = local_path(pattern, SourceError)
        if os.path.isfile(path):
            return SourceFiles({path: None})
        ends = [f"**/*{suffix}" for suffix in suffixes]
        patterns = [os.path.join(glob.escape(path), end) for end in ends] if os.path.isdir(path) else [path]
        names = [each for pattern in patterns for each in glob.glob(pattern, recursive=True)]
        found = {each: None for each in names if os.path.isfile(each)}
    if not found:
        raise SourceError(
            f"{path!r} names no file; expected a file, a pattern such as 'data/*{suffixes[0]}', or a directory with "
            f"files {' or '.join(suffixes)}."
        )
    return SourceFiles(found)


def _listed(address: str, suffixes: tuple[str, ...]) -> dict[str, int | None]:
    """Addresses of files -> their sizes, where the store tells them."""
    system, path = file_system(address, SourceError)
    if "*" in path or "?" in path or "[" in path:
        found = system.glob(path, detail=True)
    else:
        found = {}
        # Directories may have no entry; their files can be listed.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            found[path] = system.info(path)
        if not found or found[path]["type"] != "file":
            found = system.find(path, detail=True)
            found = {each: about for each, about in found.items() if each.endswith(suffixes)}
    begin = address[: address.rindex("://") + 3]
    return {
        begin + str(each).removeprefix(begin): about.get("size")
        for each, about in found.items()
        if about["type"] == "file"
    }
