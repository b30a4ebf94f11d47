"""Files of data sets: on this machine, or at addresses of fsspec such as ``s3://bucket/data/*.parquet``."""

from __future__ import annotations

import glob
import os
from typing import IO, Any

from gear_loader.errors import SourceError
from gear_loader.utils.addresses import file_system, open_address, repeated
from gear_loader.utils.paths import is_address, local_path


def files_of(pattern: Any, suffixes: tuple[str, ...]) -> list[str]:
    """The files of a path or an address, in the order of their names: of a pattern, or those in a directory and below.

    Raises:
        SourceError: there is none, or the store refuses.
    """
    if is_address(pattern):
        path, found = pattern, repeated(lambda: _listed(pattern, suffixes), pattern, "listed", SourceError)
    else:
        path = local_path(pattern, SourceError)
        if os.path.isfile(path):
            return [path]
        ends = [f"**/*{suffix}" for suffix in suffixes]
        patterns = [os.path.join(glob.escape(path), end) for end in ends] if os.path.isdir(path) else [path]
        found = [each for pattern in patterns for each in glob.glob(pattern, recursive=True)]
        found = [each for each in found if os.path.isfile(each)]
    if not found:
        raise SourceError(
            f"{path!r} names no file; expected a file, a pattern such as 'data/*{suffixes[0]}', or a directory with "
            f"files {' or '.join(suffixes)}."
        )
    return sorted(set(found))


def _listed(address: str, suffixes: tuple[str, ...]) -> list[str]:
    system, path = file_system(address, SourceError)
    if system.isfile(path):
        return [address]
    if "*" in path or "?" in path or "[" in path:
        found = system.glob(path)
    else:
        found = [each for each in system.find(path) if each.endswith(suffixes)]
    begin = address[: address.rindex("://") + 3]
    return [begin + str(each).removeprefix(begin) for each in found if system.isfile(each)]


def open_source(path: str) -> IO[bytes]:
    """Open a file that `files_of` has found, for reading.

    Raises:
        SourceError: the store refuses. OSError: a local file cannot be opened, or nothing is at the address.
    """
    return open_address(path, SourceError) if is_address(path) else open(path, "rb")
