"""What a checkpoint says of itself: the manifest, and the names of its files.

It is checked field by field before anything is done with what it says: it may have been damaged, or written by anybody.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import reprlib
import urllib.parse
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory, open_to_load
from gear_loader.errors import CheckpointError, SchemaError
from gear_loader.storage.ids import LARGEST_ORIGIN
from gear_loader.storage.rules import Rules
from gear_loader.storage.schema import Schema

__all__ = [
    "CHUNK_BYTES",
    "INDEX_NAME",
    "LARGEST_COUNT",
    "LEAST_CHUNK",
    "LOCK_NAME",
    "MANIFEST_NAME",
    "PART",
    "SEGMENTS_NAME",
    "SEGMENT_NAME",
    "SHARDS_NAME",
    "VERSION",
    "WITHOUT_IDS",
    "Fields",
    "FileRecord",
    "Manifest",
    "Segment",
    "check_cost",
    "column_file",
    "index_file",
    "is_column_file",
    "manifest_bytes",
    "no_manifest",
    "npy_header",
    "open_checkpoint",
    "read_fields",
    "read_limited",
    "read_manifest",
    "schema_of",
    "segment_folder",
]

VERSION = 3
WITHOUT_IDS = 2
"""The version before, which had no `ident` and no `origin`: it is read, and replaced by the next save."""
FORMAT = "gear-loader checkpoint"
MANIFEST_NAME = "manifest.json"
SHARDS_NAME = "shards.json"
SEGMENTS_NAME = "segments"
LOCK_NAME = ".gear-loader.lock"
INDEX_NAME = re.compile(r"index\.([0-9]{6,12})\.safetensors")
SEGMENT_NAME = re.compile(r"[0-9]{6,12}")
PART = ".part"
"""What the name of an unfinished file or segment ends with."""
CHUNK_BYTES = 4 << 20
"""Bytes of a column's file that have a checksum of their own."""
LEAST_CHUNK = 1 << 12

# What a manifest costs before it is known to be sound. Its size and the number of its JSON values are bounded by the
# files that are really there: it names each of them once, with a checksum for each chunk of at least LEAST_CHUNK bytes.
_MANIFEST_LIMIT = 1 << 28
_BASE_BYTES = 4 << 20
"""Bytes that it may have without any files; the schema has at most 1 MiB as a table's header has it."""
_FILE_BYTES = 1 << 10
"""Bytes that it may have more for each file."""
_BASE_VALUES = 300_000
"""As many JSON values: a schema of 1 MiB has less."""
_FILE_VALUES = 16
_LIMIT = 2**37  # of the sizes, as in `Table.create`
LARGEST_COUNT = 2**62  # of numbers that are counted up
_NAME_LIMIT = 100
_HEADER_MULTIPLE = 4096  # so that the data begin where a disk's sector does
_COLUMN_NAME = re.compile(r"[A-Za-z0-9_.~%-]+\.npy")
_HEX = re.compile(r"[0-9a-f]+")


# Names -----------------------------------------------------------------------------------------------


def segment_folder(number: int) -> str:
    """Where segment `number` lies, relative to the checkpoint."""
    return f"{SEGMENTS_NAME}/{number:06d}"


def index_file(number: int) -> str:
    """The name of the index of save `number`."""
    return f"index.{number:06d}.safetensors"


def column_file(column: str) -> str:
    """The file name of a column, whatever characters its name has: percent-encoded, and cut where it is long."""
    quoted = urllib.parse.quote(column, safe="", errors="surrogatepass")
    if len(quoted) > _NAME_LIMIT:
        digest = xxhash.xxh3_128_hexdigest(column.encode("utf-8", "surrogatepass"))
        quoted = f"{quoted[:_NAME_LIMIT]}-{digest}"
    return quoted + ".npy"


def is_column_file(name: str) -> bool:
    """Whether a file name is one that `column_file` returns."""
    return _COLUMN_NAME.fullmatch(name) is not None


def npy_header(dtype: str, steps: int, shape: tuple[int, ...]) -> bytes:
    """The bytes before the data of a column's file: version 1.0 of numpy's format, padded to whole sectors.

    Args:
        dtype: the name of the column's dtype.
    """
    descr = np.dtype("uint16" if dtype == "bfloat16" else dtype).str
    text = repr({"descr": descr, "fortran_order": False, "shape": (steps, *shape)}).encode()
    total = -(-(10 + len(text) + 1) // _HEADER_MULTIPLE) * _HEADER_MULTIPLE
    return b"\x93NUMPY\x01\x00" + (total - 10).to_bytes(2, "little") + text.ljust(total - 11) + b"\n"


# Manifest --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file's size, and the XXH128 of its bytes as ``xxh128sum`` prints it.

    Attributes:
        chunks: the XXH64 (of XXH3) of each chunk of the file, 16 digits each, one after another, for who reads a part.
    """

    bytes: int
    xxh128: str
    chunks: str = ""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Whole trajectories one after another: number of steps, a file for each column, bytes of a chunk of these."""

    number: int
    steps: int
    files: dict[str, FileRecord]
    chunk_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything that `manifest.json` says.

    Attributes:
        save: random name of this save. table: random name of the table in memory that was saved.
        version: of the checkpoint.
        saves: how many saves the directory has seen; the index is called after it.
        next_segment: no segment has had this number or a higher one.
        rules: what the table does when it is full, what it removes by itself, how fast it may be written and read.
        origin: the table's shard number, None if it has none.
        next_sequence: no trajectory has had this number or a higher one.
        num_inserted, num_sampled: trajectories added and rows drawn so far, as rate limiters count them.
        num_trajectories, num_steps: what was there, and is in the index.
    """

    schema: Schema
    save: str
    table: str
    saves: int
    next_segment: int
    block_steps: int
    max_steps: int
    max_trajectories: int
    num_blocks: int
    rules: Rules
    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int
    num_trajectories: int
    num_steps: int
    index: FileRecord
    segments: tuple[Segment, ...]
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """The file's contents."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["version"]
        fields["schema"] = self.schema.to_json()
        fields["rules"] = self.rules.to_json()
        index = {"bytes": self.index.bytes, "xxh128": self.index.xxh128}
        fields["index"] = {"path": index_file(self.saves), **index}
        fields["segments"] = [
            {
                "number": segment.number,
                "steps": segment.steps,
                "chunk_bytes": segment.chunk_bytes,
                "files": {
                    name: {
                        "path": f"{segment_folder(segment.number)}/{column_file(name)}",
                        **dataclasses.asdict(record),
                    }
                    for name, record in segment.files.items()
                },
            }
            for segment in self.segments
        ]
        return manifest_bytes(FORMAT, self.version, fields)


class Fields:
    """A JSON object whose fields are asked for one by one; a wrong one is an error that names file and field."""

    def __init__(self, value: Any, path: str, where: str = "") -> None:
        self.path, self.where = path, where
        if not isinstance(value, dict):
            raise self.wrong("", value, "a mapping")
        self.value: dict[str, Any] = value

    def wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
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

    def record(self, key: str, path: str, chunk_bytes: int = 0) -> FileRecord:
        """A file, which can only be the one at `path`: so no path leads out of the directory."""
        fields = Fields(self.get(key), self.path, f"{self.where}{'.' if self.where else ''}{key}")
        fields.choice("path", path)
        size, checksum = fields.integer("bytes", 1, 2**62), fields.hexadecimal("xxh128", 32)
        if not chunk_bytes:
            return FileRecord(size, checksum)
        return FileRecord(size, checksum, fields.hexadecimal("chunks", 16 * -(-size // chunk_bytes)))


def no_manifest(directory: str, *, several: bool = False) -> str:
    """The error of a directory that is no checkpoint.

    Args:
        several: whether it is one of several tables.
    """
    if several:
        return (
            f"{directory} is a checkpoint of several tables: it has {SHARDS_NAME} and no {MANIFEST_NAME}. Load it with "
            "gear_loader.distributed.load()."
        )
    return (
        f"{directory} is no checkpoint: it has no {MANIFEST_NAME}. Give the directory that Table.save() wrote; "
        "a first save that was killed leaves none."
    )


def open_checkpoint(path: str) -> Directory:
    """Open the directory of a checkpoint of one table, to load it.

    Raises:
        CheckpointError: there is none.
    """
    return open_to_load(path, no_manifest(path))


def read_manifest(directory: Directory) -> Manifest:
    """Read and check `manifest.json`.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version.
    """
    missing = no_manifest(directory.path, several=directory.has(SHARDS_NAME))
    known = (WITHOUT_IDS, VERSION)
    fields, version = read_fields(
        directory, MANIFEST_NAME, FORMAT, known, missing=missing, count=_count_columns
    )
    return _parse(fields, version)


def read_fields(
    directory: Directory,
    name: str,
    kind: str,
    versions: tuple[int, ...],
    *,
    missing: str,
    count: Callable[[Directory], tuple[int, int]],
) -> tuple[Fields, int]:
    """Read a manifest as far as all of them are alike, and check its checksum.

    Args:
        name: of the file.
        kind: what it has to have as its format. versions: those that can be read.
        missing: the error if there is no file.
        count: counts what it can name, and the bytes of that: see `_check_bytes`.

    Returns:
        Its fields, and its version.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version.
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
        raise CheckpointError(f"{path} is damaged: it is no JSON ({error}). {REMEDY}") from error
    fields = Fields(parsed, path)
    if fields.value.get("format") != kind:
        raise fields.wrong("format", fields.value.get("format"), repr(kind))
    version = fields.integer("version", 0, 2**31)
    if version not in versions:
        known = " and ".join(map(str, versions))
        raise CheckpointError(
            f"{path} has checkpoint version {version}; this version of Gear Loader reads version"
            f"{'s' if len(versions) > 1 else ''} {known}. Use the one that wrote it, or choose another directory."
        )
    expected = fields.hexadecimal("checksum", 32)
    found = xxhash.xxh3_128_hexdigest(data.replace(expected.encode(), b"0" * 32, 1))
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is {found}, expected {expected}. {REMEDY}")
    return fields, version


def read_limited(directory: Directory, name: str, check: Callable[[int], None]) -> bytes:
    """The contents of a file that fits into memory.

    Args:
        check: called with its size before it is read; raises CheckpointError if it is not what it should be.

    Raises:
        FileNotFoundError: it is not there.
        CheckpointError: it cannot be read, or what `check` raises.
    """
    try:
        with directory.opened(name) as (fd, info):
            check(info.st_size)
            with open(fd, "rb", closefd=False) as file:
                return file.read(info.st_size)
    except (CheckpointError, FileNotFoundError):
        raise
    except OSError as error:
        raise CheckpointError(f"{directory.at(name)} cannot be read: {error}. {REMEDY}") from error


def check_cost(directory: Directory, name: str, data: bytes) -> None:
    """Check before a manifest is written that it will not be refused for its size when it is read.

    Raises:
        CheckpointError: it would be.
    """
    _check_bytes(directory, directory.at(name), len(data), _count_columns)
    _check_values(directory, directory.at(name), data, _count_columns)


def _count_columns(directory: Directory) -> tuple[int, int]:
    """How many columns' files the segments have, and their bytes together."""
    files = size = 0
    try:
        with directory.child(SEGMENTS_NAME) as segments:
            for segment in filter(SEGMENT_NAME.fullmatch, segments.names()):
                with segments.child(segment) as folder, os.scandir(folder.fd) as entries:
                    for entry in entries:
                        if is_column_file(entry.name):
                            files, size = files + 1, size + entry.stat().st_size
    except OSError:  # then fewer count
        pass
    return files, size


def _check_bytes(
    directory: Directory, path: str, size: int, count: Callable[[Directory], tuple[int, int]]
) -> None:
    """Check the size of a manifest before it is read.

    Raises:
        CheckpointError: it is larger than the files that are there can make it.
    """
    if size <= _BASE_BYTES:
        return
    files, data = count(directory)
    limit = min(_BASE_BYTES + _FILE_BYTES * files + 16 * (data // LEAST_CHUNK), _MANIFEST_LIMIT)
    if size > limit:
        raise CheckpointError(
            f"{path} is no manifest: it has {size:,} bytes; expected at most {limit:,}, as much as the {files:,} files "
            f"beside it with {data:,} bytes can need. {REMEDY}"
        )


def _check_values(
    directory: Directory, path: str, data: bytes, count: Callable[[Directory], tuple[int, int]]
) -> None:
    """Check how many JSON values a manifest has before it is parsed: each of them takes a hundred bytes of memory.

    Raises:
        CheckpointError: it has more than the files that are there can make it have.
    """
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values <= _BASE_VALUES:
        return
    files, _ = count(directory)
    limit = _BASE_VALUES + _FILE_VALUES * files
    if values > limit:
        raise CheckpointError(
            f"{path} is no manifest: it has about {values:,} values; expected at most {limit:,}, as many as the "
            f"{files:,} files beside it can need. {REMEDY}"
        )


class _Shortened(reprlib.Repr):
    """Values of JSON, of which no more is looked at than is shown; mappings keep their order."""

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
    """A value in an error: at most about 200 characters, whatever it is, and at no cost."""
    return _cut(_Shortened().repr(value))


def _cut(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[:most] + "..."


def manifest_bytes(kind: str, version: int, fields: dict[str, Any]) -> bytes:
    """A manifest's contents. Its checksum is of the same bytes with 32 zeros in its own place."""
    everything = {"checksum": "0" * 32, "format": kind, "version": version, **fields}
    text = json.dumps(everything, indent=1).encode() + b"\n"
    return text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)


def _parse(fields: Fields, version: int) -> Manifest:
    schema = schema_of(fields)
    saves = fields.integer("saves", 1, 10**12 - 1)
    next_segment = fields.integer("next_segment", 1, 10**12 - 1)
    segments: list[Segment] = []
    numbers: set[int] = set()
    for i, value in enumerate(fields.items("segments")):
        inner = Fields(value, fields.path, f"segments[{i}]")
        number = inner.integer("number", 1, next_segment - 1)
        if number in numbers:
            raise inner.wrong("number", number, "a number that no other segment has")
        numbers.add(number)
        steps = inner.integer("steps", 1, 2**48)
        # Segments of a checkpoint of the version before, which later ones have taken over, have no chunks.
        chunk_bytes = 0 if version == WITHOUT_IDS else inner.integer("chunk_bytes", 0, 2**40)
        if 0 < chunk_bytes < LEAST_CHUNK:
            raise inner.wrong("chunk_bytes", chunk_bytes, f"0, or {LEAST_CHUNK} or more")
        files = Fields(inner.get("files"), fields.path, f"segments[{i}].files")
        if list(files.value) != list(schema):
            raise files.wrong("", list(files.value), f"the columns {list(schema)}")
        records = {}
        for name, column in schema.items():
            path = f"{segment_folder(number)}/{column_file(name)}"
            records[name] = files.record(name, path, chunk_bytes)
            size = len(npy_header(column.dtype_name, steps, column.shape)) + steps * column.step_bytes
            if records[name].bytes != size:
                raise files.wrong(name, records[name].bytes, f"{size} bytes for {steps:,} steps")
        segments.append(Segment(number, steps, records, chunk_bytes))
    max_steps = fields.integer("max_steps", 1, _LIMIT - 1)
    max_trajectories = fields.integer("max_trajectories", 1, 2**31 - 1)
    num_trajectories = fields.integer("num_trajectories", 0, max_trajectories)
    next_sequence = fields.integer("next_sequence", num_trajectories, LARGEST_COUNT)
    return Manifest(
        schema=schema,
        save=fields.hexadecimal("save", 16),
        table=fields.hexadecimal("table", 16),
        saves=saves,
        next_segment=next_segment,
        block_steps=fields.integer("block_steps", 1, _LIMIT - 1),
        max_steps=max_steps,
        max_trajectories=max_trajectories,
        num_blocks=fields.integer("num_blocks", 1, 2**31 - 1),
        rules=_rules(fields, max_trajectories),
        origin=None if version == WITHOUT_IDS else fields.origin("origin"),
        next_sequence=next_sequence,
        num_inserted=fields.integer("num_inserted", num_trajectories, next_sequence),
        num_sampled=fields.integer("num_sampled", 0, LARGEST_COUNT),
        num_trajectories=num_trajectories,
        num_steps=fields.integer("num_steps", num_trajectories, max_steps),
        index=fields.record("index", index_file(saves)),
        segments=tuple(segments),
        version=version,
    )


def _rules(fields: Fields, max_trajectories: int) -> Rules:
    inner = Fields(fields.get("rules"), fields.path, "rules")
    known = list(Rules().to_json())
    for key in known:
        value = inner.get(key)
        try:
            rules = Rules.from_json({key: value})
        except (SchemaError, ArithmeticError, LookupError, TypeError) as error:
            raise inner.wrong(key, value, f"a rule of a table ({_cut(str(error))})") from error
        if rules.rate_limiter is not None and rules.rate_limiter.min_size > max_trajectories:
            expected = f"a min_size of at most max_trajectories={max_trajectories:,}"
            raise inner.wrong(key, value, expected)
    if len(inner.value) != len(known):
        raise inner.wrong("", sorted(inner.value), f"the fields {known}")
    return Rules.from_json(inner.value)


def schema_of(fields: Fields) -> Schema:
    """The schema in a manifest."""
    rows = fields.items("schema")
    try:
        return Schema.from_json(rows)
    except SchemaError as error:
        raise fields.wrong("schema", rows, f"a schema ({_cut(str(error))})") from error
