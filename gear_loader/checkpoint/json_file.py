"""JSON files of a checkpoint: limits before reading, checksum, and fields that are checked one by one.

A file may be damaged or come from an untrusted source, so each field is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Callable
from typing import Any

import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.errors import CheckpointError, SchemaError
from gear_loader.storage.ids import LARGEST_ORIGIN
from gear_loader.storage.schema import Schema

# A manifest takes 1 MiB for the largest schema and about 150 bytes for each segment. Those of versions 3 and 4 have 16
# bytes for each chunk of a file too, and some values for each file.
LARGEST_BYTES = 1 << 28
LARGEST_VALUES = 4_000_000
"""Most JSON values of a manifest: each takes about 100 bytes of memory when it is parsed."""
_HEX = re.compile(r"[0-9a-f]+")
_shorten = reprlib.Repr()  # reads no more of a value than it shows
_shorten.maxlevel = 4
_shorten.maxlist = _shorten.maxdict = 50
_shorten.maxstring = _shorten.maxlong = _shorten.maxother = 250


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size of a file, and the XXH128 of its contents, as ``xxh128sum`` prints it."""

    bytes: int
    xxh128: str


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
    directory: Directory, name: str, kind: str, *versions: int, missing: Callable[[], str]
) -> Fields:
    """Read a manifest and check its size, format, version and checksum.

    Args:
        name: file name.
        kind: expected format string. versions: those that can be read.
        missing: returns the text of the error if the file does not exist.

    Returns:
        The fields, not checked yet.

    Raises:
        CheckpointError: the file is missing, damaged or of another version.
    """
    path = directory.at(name)

    def check(what: str, count: int, limit: int) -> None:
        if count > limit:
            raise CheckpointError(
                f"{path} is not a manifest: it has {count:,} {what}; expected at most {limit:,}. {REMEDY}"
            )

    try:
        data = read_limited(directory, name, lambda size: check("bytes", size, LARGEST_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(missing()) from error
    check("values", sum(data.count(mark) for mark in (b",", b"[", b"{")), LARGEST_VALUES)
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}). {REMEDY}") from error
    fields = Fields(parsed, path)
    if fields.value.get("format") != kind:
        raise fields.wrong("format", fields.value.get("format"), repr(kind))
    found_version = fields.integer("version", 0, 2**31)
    if found_version not in versions:
        read = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
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
        with directory.open_to_read(name) as file:
            check(file.size)
            return file.read(file.size if count is None else count)
    except (CheckpointError, FileNotFoundError):
        raise
    except OSError as error:
        raise CheckpointError(f"{directory.at(name)} cannot be read: {error}. {REMEDY}") from error


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
        shown = shortened(_shorten.repr(value))
        return CheckpointError(
            f"{self.path} is damaged{f' at {name!r}' if name else ''}: it has {shown}; expected {expected}. {REMEDY}"
        )

    def get(self, key: str) -> Any:
        if key not in self.value:
            raise self.wrong(key, sorted(map(str, self.value)), f"a field {key!r}")
        return self.value[key]

    def inner(self, key: str) -> Fields:
        """The fields of a mapping."""
        return Fields(self.get(key), self.path, f"{self.where}{'.' if self.where else ''}{key}")

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

    def exactly(self, key: str, expected: Any) -> None:
        """Check that a field has one value. So no path can lead out of the directory."""
        if self.get(key) != expected:
            raise self.wrong(key, self.get(key), shortened(repr(expected)))

    def items(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list")
        return value

    def record(self, key: str, path: str, least: int = 1) -> FileRecord:
        """A file record, which must be of the file at `path`."""
        fields = self.inner(key)
        fields.exactly("path", path)
        return FileRecord(fields.integer("bytes", least, 2**62), fields.hexadecimal("xxh128", 32))


def schema_of(fields: Fields) -> Schema:
    """The schema of a manifest."""
    rows = fields.items("schema")
    try:
        return Schema.from_json(rows)
    except SchemaError as error:
        raise fields.wrong("schema", rows, f"a schema ({shortened(str(error))})") from error


def shortened(text: str) -> str:
    """A text for an error message, cut after 200 characters."""
    return text if len(text) <= 200 else text[:200] + "..."
