"""JSON files of a checkpoint: size limits before reading, checksum, and fields that are checked one by one.

A file may be damaged or come from an untrusted source, so each field is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import reprlib
from collections.abc import Callable
from typing import Any

import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.checkpoint.names import SEGMENT_NAME, SEGMENTS_NAME, is_column_file
from gear_loader.errors import CheckpointError, SchemaError
from gear_loader.storage.ids import LARGEST_ORIGIN
from gear_loader.storage.schema import Schema

__all__ = [
    "LEAST_CHUNK",
    "Fields",
    "FileRecord",
    "check_cost",
    "count_column_files",
    "manifest_bytes",
    "read_fields",
    "read_limited",
    "schema_of",
    "shortened",
]

LEAST_CHUNK = 1 << 12
"""Fewest bytes of a chunk with a checksum of its own."""

# Limits on a manifest before it is parsed. The files that exist bound its size and its number of JSON values: it names
# each file once, with a checksum for each chunk of at least LEAST_CHUNK bytes.
_MANIFEST_LIMIT = 1 << 28
_BASE_BYTES = 4 << 20
"""Bytes allowed without any files; the schema takes at most 1 MiB, as in a table's header."""
_FILE_BYTES = 1 << 10
"""Bytes allowed for each file."""
_BASE_VALUES = 300_000
"""JSON values allowed without any files: more than a schema of 1 MiB has."""
_FILE_VALUES = 16
_HEX = re.compile(r"[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size and checksums of a file.

    Attributes:
        bytes: size. xxh128: XXH128 of the whole file, as ``xxh128sum`` prints it.
        chunks: XXH3-64 of each chunk of the file, 16 digits each, concatenated; for reading a part.
    """

    bytes: int
    xxh128: str
    chunks: str = ""


def manifest_bytes(kind: str, version: int, fields: dict[str, Any]) -> bytes:
    """Serialize a manifest, a line for each field. Its checksum is computed with 32 zeros in the place of the checksum.

    Without `indent` the standard library encodes in C: with it, a thread that writes a table in the background would
    hold the GIL for milliseconds.
    """
    everything = {"checksum": "0" * 32, "format": kind, "version": version, **fields}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in everything.items())
    text = f"{{{lines}}}\n".encode()
    return text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)


def read_fields(
    directory: Directory,
    name: str,
    kind: str,
    version: int,
    *,
    older: int | None = None,
    missing: str,
    count: Callable[[Directory], tuple[int, int]],
) -> Fields:
    """Read a manifest and check its size, format, version and checksum.

    Args:
        name: file name.
        kind: expected format string. version: expected version. older: another one that can be read.
        missing: text of the error if the file does not exist.
        count: returns the number of files that the manifest can name, and their bytes.

    Returns:
        The fields, not checked yet.

    Raises:
        CheckpointError: the file is missing, damaged or of another version.
    """
    path = directory.at(name)
    try:
        data = read_limited(directory, name, lambda size: _check_bytes(directory, path, size, count))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(missing) from error
    _check_values(directory, path, data, count)
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}). {REMEDY}") from error
    fields = Fields(parsed, path)
    if fields.value.get("format") != kind:
        raise fields.wrong("format", fields.value.get("format"), repr(kind))
    found_version = fields.integer("version", 0, 2**31)
    if found_version not in (version, older):
        read = f"version {version}" if older is None else f"versions {older} and {version}"
        raise CheckpointError(
            f"{path} has checkpoint version {found_version}; this version of Gear Loader reads {read}. "
            "Use the one that wrote it, or choose another directory."
        )
    expected = fields.hexadecimal("checksum", 32)
    found = xxhash.xxh3_128_hexdigest(data.replace(expected.encode(), b"0" * 32, 1))
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is {found}, expected {expected}. {REMEDY}")
    return fields


def read_limited(
    directory: Directory, name: str, check: Callable[[int], None], count: int | None = None
) -> bytes:
    """Read a file after a check of its size.

    Args:
        check: called with the file's size before it is read; raises CheckpointError if the size is wrong.
        count: bytes to read; None for the whole file.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file cannot be read, or `check` refused its size.
    """
    try:
        with directory.opened(name) as (fd, info):
            check(info.st_size)
            with open(fd, "rb", closefd=False) as file:
                return file.read(info.st_size if count is None else count)
    except (CheckpointError, FileNotFoundError):
        raise
    except OSError as error:
        raise CheckpointError(f"{directory.at(name)} cannot be read: {error}. {REMEDY}") from error


# Size limits ---------------------------------------------------------------------------------------------------


def check_cost(directory: Directory, name: str, data: bytes) -> None:
    """Check before a manifest is written that reading it will not exceed the size limits.

    Raises:
        CheckpointError: the manifest is too large.
    """
    _check_bytes(directory, directory.at(name), len(data), count_column_files)
    _check_values(directory, directory.at(name), data, count_column_files)


def count_column_files(directory: Directory) -> tuple[int, int]:
    """Number of column files in all segments, and their total bytes."""
    files = size = 0
    try:
        with directory.child(SEGMENTS_NAME) as segments:
            for segment in filter(SEGMENT_NAME.fullmatch, segments.names()):
                with segments.child(segment) as folder, os.scandir(folder.fd) as entries:
                    for entry in entries:
                        if is_column_file(entry.name):
                            files, size = files + 1, size + entry.stat().st_size
    except OSError:  # files that cannot be seen do not raise the limit
        pass
    return files, size


def _check_bytes(
    directory: Directory, path: str, size: int, count: Callable[[Directory], tuple[int, int]]
) -> None:
    """Check the size of a manifest before it is read.

    Raises:
        CheckpointError: it is larger than the existing files can require.
    """
    if size <= _BASE_BYTES:
        return
    files, data = count(directory)
    limit = min(_BASE_BYTES + _FILE_BYTES * files + 16 * (data // LEAST_CHUNK), _MANIFEST_LIMIT)
    if size > limit:
        raise CheckpointError(
            f"{path} is not a manifest: it has {size:,} bytes; expected at most {limit:,}, as much as the "
            f"{files:,} files beside it with {data:,} bytes can need. {REMEDY}"
        )


def _check_values(
    directory: Directory, path: str, data: bytes, count: Callable[[Directory], tuple[int, int]]
) -> None:
    """Check the number of JSON values of a manifest before it is parsed: each takes about 100 bytes of memory.

    Raises:
        CheckpointError: it has more values than the existing files can require.
    """
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values <= _BASE_VALUES:
        return
    files, _ = count(directory)
    limit = _BASE_VALUES + _FILE_VALUES * files
    if values > limit:
        raise CheckpointError(
            f"{path} is not a manifest: it has about {values:,} values; expected at most {limit:,}, as many as the "
            f"{files:,} files beside it can need. {REMEDY}"
        )


# Fields -------------------------------------------------------------------------------------------------


class Fields:
    """Validated access to the fields of a JSON object. Each getter raises CheckpointError for an invalid field.

    Args:
        value: the parsed JSON. path: file name in errors. where: position of the object in the file, in errors.
    """

    def __init__(self, value: Any, path: str, where: str = "") -> None:
        self.path, self.where = path, where
        if not isinstance(value, dict):
            raise self.wrong("", value, "a mapping")
        self.value: dict[str, Any] = value

    def wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        """The error of an invalid field."""
        name = f"{self.where}{'.' if self.where and key else ''}{key}"
        shown = _shown(value)
        return CheckpointError(
            f"{self.path} is damaged{f' at {name!r}' if name else ''}: it has {shown}; expected {expected}. {REMEDY}"
        )

    def get(self, key: str) -> Any:
        if key not in self.value:
            raise self.wrong(key, sorted(map(str, self.value)), f"a field {key!r}")
        return self.value[key]

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, value, f"an integer from {low:,} to {high:,}")
        return value

    def origin(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key, 0, LARGEST_ORIGIN)

    def hexadecimal(self, key: str, digits: int) -> str:
        value = self.get(key)
        if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
            raise self.wrong(key, value, f"{digits} hexadecimal digits")
        return value

    def choice(self, key: str, *allowed: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, value, " or ".join(map(repr, allowed)))
        return value

    def items(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list")
        return value

    def record(self, key: str, path: str, chunk_bytes: int = 0, least: int = 1) -> FileRecord:
        """A file record, which must be of the file at `path`: no path can lead out of the directory."""
        fields = Fields(self.get(key), self.path, f"{self.where}{'.' if self.where else ''}{key}")
        fields.choice("path", path)
        size, checksum = fields.integer("bytes", least, 2**62), fields.hexadecimal("xxh128", 32)
        if not chunk_bytes:
            return FileRecord(size, checksum)
        return FileRecord(size, checksum, fields.hexadecimal("chunks", 16 * -(-size // chunk_bytes)))


def schema_of(fields: Fields) -> Schema:
    """The schema of a manifest."""
    rows = fields.items("schema")
    try:
        return Schema.from_json(rows)
    except SchemaError as error:
        raise fields.wrong("schema", rows, f"a schema ({shortened(str(error))})") from error


class _Shortened(reprlib.Repr):
    """Shortened JSON values: reads no more of a value than it shows, and keeps the order of mappings."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxdict = 50
        self.maxstring = self.maxlong = self.maxother = 250

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        parts = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value[key], level - 1)}"
            for key in itertools.islice(value, self.maxdict)
        ]
        return "{" + ", ".join(parts + (["..."] if len(value) > self.maxdict else [])) + "}"


def _shown(value: Any) -> str:
    """A JSON value for an error message, at most about 200 characters."""
    return shortened(_Shortened().repr(value))


def shortened(text: str, most: int = 200) -> str:
    """A text for an error message, cut after `most` characters."""
    return text if len(text) <= most else text[:most] + "..."
