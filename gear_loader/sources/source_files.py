"""Files of data sets: on this machine, or at addresses of fsspec such as ``s3://bucket/data/*.parquet``."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import glob
import io
import itertools
import json
import os
from collections.abc import Collection, Mapping
from typing import IO, Any

from gear_loader.errors import SourceError
from gear_loader.utils.addresses import call, file_system, repeated
from gear_loader.utils.paths import is_address, local_path
from gear_loader.utils.remote_file import open_address, read_ranges

WHOLE_BYTES = 32 << 20
"""Files at addresses are fetched whole up to this size; larger ones are read by range."""
_MOST_METADATA = 1 << 26  # bytes of a file of it
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
        self._last, self._last_below = -1, dict[str, int]()  # opened last, also of each directory
        self._small = 0 < sum(size or _KEPT_BYTES + 1 for size in sizes.values()) <= _KEPT_BYTES

    def open(self, path: str, *, whole: bool = True, ahead: bool = True) -> IO[bytes]:
        """Open one for reading.

        Args:
            whole: whether most of it will be read; else it is read by range, unless there is room for all files.
            ahead: whether those that follow it may be fetched with it.

        Raises:
            SourceError: the store refuses. OSError: a local file cannot be opened, or nothing is at the address.
        """
        place = self._places[path]
        folder = path.rpartition("/")[0]
        follows = {place - self._last, place - self._last_below.get(folder, -2)} & {0, 1}
        self._last = self._last_below[folder] = place
        if not is_address(path):
            return open(path, "rb")
        if not (self._fetched_whole(path) and (whole or self._small)):
            return open_address(path, SourceError, size=self._sizes[path])
        kept = self._kept.get(path)
        return io.BytesIO(
            self._fetch(path, _GROUP_FILES if follows and ahead else 1) if kept is None else kept
        )

    def only(self, paths: Collection[str]) -> SourceFiles:
        """Some of them."""
        return SourceFiles({path: self._sizes[path] for path in paths})

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
        pieces = [
            (file_system(path, SourceError)[1], 0, size) for path, size in zip(group, sizes, strict=True)
        ]
        found = read_ranges(system, pieces, first, SourceError)
        while self._kept and sum(map(len, list(self._kept.values()))) + sum(sizes) > _KEPT_BYTES:
            with contextlib.suppress(StopIteration, RuntimeError):  # another thread reads too
                self._kept.pop(next(iter(self._kept)), None)
        self._kept.update(zip(group, found, strict=True))
        return found[0]


class SourceFolder:
    """A directory, on this machine or at an address; files have names in it, such as ``"meta/info.json"``.

    That at an address is listed once, when the first name is asked for.

    Args:
        path: the directory.

    Attributes:
        path: the directory, without a slash at its end.
        remote: whether it is at an address.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.remote = is_address(path)
        self.path = str(path).rstrip("/") if self.remote else local_path(path, SourceError)

    @functools.cached_property
    def _listed(self) -> tuple[dict[str, str], SourceFiles]:
        """The addresses of files by their names, and the files."""
        root = file_system(self.path, SourceError)[1].rstrip("/")
        sizes: dict[str, int | None] = {}
        with contextlib.suppress(FileNotFoundError):
            sizes = repeated(lambda: _listed(self.path, ("",)), self.path, "listed", SourceError)
        files = SourceFiles(sizes)
        names = {file_system(path, SourceError)[1].removeprefix(f"{root}/"): path for path in files}
        return names, files

    def at(self, name: str) -> str:
        """The path or address of a file."""
        return f"{self.path}/{name}" if self.remote else os.path.join(self.path, name)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return name in self._listed[0] if self.remote else os.path.isfile(self.at(name))

    def matching(self, pattern: str) -> list[str]:
        """Names that match a pattern, whose ``*`` stands for no slash, in order."""
        if not self.remote:
            found = glob.glob(os.path.join(glob.escape(self.path), pattern))
            return sorted(os.path.relpath(each, self.path).replace(os.sep, "/") for each in found)
        wanted = pattern.split("/")

        def fits(name: str) -> bool:
            parts = name.split("/")
            return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))

        return sorted(filter(fits, self._listed[0]))

    def listed(self) -> list[str]:
        """The names of all files at an address."""
        return list(self._listed[0])

    def open(self, name: str, *, whole: bool = True, ahead: bool = True) -> IO[bytes]:
        """Open a file for reading.

        Args:
            whole, ahead: as for `SourceFiles.open`.

        Raises:
            SourceError: the store refuses. OSError: there is no such file, or it cannot be opened.
        """
        if not self.remote:
            return open(self.at(name), "rb")
        names, files = self._listed
        if name not in names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.at(name))
        return files.open(names[name], whole=whole, ahead=ahead)

    def files(self, names: Collection[str]) -> SourceFiles:
        """Some of the files at an address."""
        listed, files = self._listed
        if missing := [name for name in names if name not in listed]:
            raise SourceError(f"{self.path!r} has no file {missing[0]!r}; fetch or write the data set again.")
        return files.only({listed[name] for name in names})

    def file_or_path(self, name: str) -> str | IO[bytes]:
        """What libraries that open paths as well take: the path of a local file; that at an address opened, read by
        range if it is large. Errors as of `open`."""
        return self.open(name, whole=False) if self.remote else self.at(name)

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a file; of a longer one `most`. Errors as of `open`."""
        with self.open(name) as file:
            return file.read(most)

    def json(self, name: str, source: str) -> Any:
        """What a file of metadata holds.

        Args:
            source: name of the data set, for the error.

        Raises:
            SourceError: it is damaged, or cannot be read.
        """
        try:
            return json.loads(self.read(name, _MOST_METADATA))
        except SourceError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise SourceError(
                f"{source}: {name} cannot be read: {error}. Fetch or write it again."
            ) from error


def one_file(path: str | os.PathLike[str], what: str) -> SourceFiles:
    """The file of a path or an address.

    Args:
        what: is expected there, for the error.

    Raises:
        SourceError: there is none, or the store refuses.
    """
    if is_address(path):
        name, size = str(path), -1
        system, place = file_system(name, SourceError)
        with contextlib.suppress(FileNotFoundError):
            about = repeated(lambda: call(system, "info", place), name, "opened", SourceError)
            size = about.get("size") if about["type"] == "file" else -1
        found: dict[str, int | None] = {} if size == -1 else {name: size}
    else:
        name = local_path(path, SourceError)
        found = {name: None} if os.path.isfile(name) else {}
    if not found:
        raise SourceError(f"The file {name!r} does not exist or is not a file; expected {what}.")
    return SourceFiles(found)


def files_of(pattern: Any, suffixes: tuple[str, ...]) -> SourceFiles:
    """The files of a path or an address, in the order of their names: of a pattern, or those in a directory and below.

    Those of `SourceFiles` are these.

    Raises:
        SourceError: there is none, or the store refuses.
    """
    if isinstance(pattern, SourceFiles):
        return pattern
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
