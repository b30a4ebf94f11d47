"""What a checkpoint says of itself: the manifest, the index, and the names of its files.

Both files are checked field by field before anything is done with what they say: they may have been damaged, or
written by anybody.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import urllib.parse
from typing import Any

import numpy as np
import xxhash

from gear_loader.errors import CheckpointError, SchemaError
from gear_loader.rules import Rules
from gear_loader.schema import DTYPES, Schema
from gear_loader.slots import UNSET, Array

__all__ = [
    "INDEX_NAME",
    "LOCK_NAME",
    "MANIFEST_NAME",
    "SEGMENTS_NAME",
    "VERSION",
    "Entries",
    "FileRecord",
    "Manifest",
    "Segment",
    "column_file",
    "index_file",
    "npy_header",
    "read_entries",
    "read_manifest",
    "segment_folder",
]

VERSION = 2
FORMAT = "gear-loader checkpoint"
MANIFEST_NAME = "manifest.json"
SEGMENTS_NAME = "segments"
LOCK_NAME = ".gear-loader.lock"
INDEX_NAME = re.compile(r"index\.([0-9]{6,12})\.safetensors")
REMEDY = "Restore it from a copy, or load another checkpoint."
_MANIFEST_LIMIT = 1 << 28
_LIMIT = 2**37  # of the sizes, as in `Table.create`
_LARGEST = 2**62  # of numbers that are counted up
_LARGEST_TIMES = 2**31 - 1
_NAME_LIMIT = 100
_HEADER_MULTIPLE = 4096  # so that the data begin where a disk's sector does
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
    """A file's size, and the XXH128 of its bytes as ``xxh128sum`` prints it."""

    bytes: int
    xxh128: str


@dataclasses.dataclass(frozen=True)
class Segment:
    """Whole trajectories one after another: number of steps, and a file for each column."""

    number: int
    steps: int
    files: dict[str, FileRecord]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything that `manifest.json` says.

    Attributes:
        save: random name of this save. table: random name of the table in memory that was saved.
        saves: how many saves the directory has seen; the index is called after it.
        next_segment: no segment has had this number or a higher one.
        rules: what the table does when it is full, what it removes by itself, how fast it may be written and read.
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
    next_sequence: int
    num_inserted: int
    num_sampled: int
    num_trajectories: int
    num_steps: int
    index: FileRecord
    segments: tuple[Segment, ...]

    def to_bytes(self) -> bytes:
        """The file's contents. Its checksum is of the same bytes with 32 zeros in its own place."""
        fields: dict[str, Any] = {"checksum": "0" * 32, "format": FORMAT, "version": VERSION}
        fields.update({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        fields["schema"] = self.schema.to_json()
        fields["rules"] = self.rules.to_json()
        fields["index"] = {"path": index_file(self.saves), **dataclasses.asdict(self.index)}
        fields["segments"] = [
            {
                "number": segment.number,
                "steps": segment.steps,
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
        text = json.dumps(fields, indent=1).encode() + b"\n"
        return text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)


class _Fields:
    """A JSON object whose fields are asked for one by one; a wrong one is an error that names file and field."""

    def __init__(self, value: Any, path: str, where: str = "") -> None:
        self.path, self.where = path, where
        if not isinstance(value, dict):
            raise self.wrong("", value, "a mapping")
        self.value: dict[str, Any] = value

    def wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        name = f"{self.where}{'.' if self.where and key else ''}{key}"
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
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

    def record(self, key: str, path: str) -> FileRecord:
        """A file, which can only be the one at `path`: so no path leads out of the directory."""
        fields = _Fields(self.get(key), self.path, f"{self.where}{'.' if self.where else ''}{key}")
        fields.choice("path", path)
        return FileRecord(fields.integer("bytes", 1, 2**62), fields.hexadecimal("xxh128", 32))


def read_manifest(directory: str) -> Manifest:
    """Read and check `manifest.json`.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version.
    """
    path = os.path.join(directory, MANIFEST_NAME)
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _MANIFEST_LIMIT:
            raise CheckpointError(
                f"{path} is no manifest: expected a file of at most {_MANIFEST_LIMIT:,} bytes. {REMEDY}"
            )
        with open(path, "rb") as file:
            data = file.read(_MANIFEST_LIMIT)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{directory} is no checkpoint: it has no {MANIFEST_NAME}. Give the directory that Table.save() wrote; "
            "a first save that was killed leaves none."
        ) from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {REMEDY}") from error
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON ({error}). {REMEDY}") from error
    fields = _Fields(parsed, path)
    if fields.value.get("format") != FORMAT:
        raise fields.wrong("format", fields.value.get("format"), repr(FORMAT))
    version = fields.integer("version", 0, 2**31)
    if version != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {version}; this version of Gear Loader reads and writes version "
            f"{VERSION}. Use the one that wrote it, or choose another directory."
        )
    expected = fields.hexadecimal("checksum", 32)
    found = xxhash.xxh3_128_hexdigest(data.replace(expected.encode(), b"0" * 32, 1))
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is {found}, expected {expected}. {REMEDY}")
    return _parse(fields)


def _parse(fields: _Fields) -> Manifest:
    schema = _schema(fields)
    saves = fields.integer("saves", 1, 10**12 - 1)
    next_segment = fields.integer("next_segment", 1, 10**12 - 1)
    segments: list[Segment] = []
    for i, value in enumerate(fields.items("segments")):
        inner = _Fields(value, fields.path, f"segments[{i}]")
        number = inner.integer("number", 1, next_segment - 1)
        if any(number == segment.number for segment in segments):
            raise inner.wrong("number", number, "a number that no other segment has")
        steps = inner.integer("steps", 1, 2**48)
        files = _Fields(inner.get("files"), fields.path, f"segments[{i}].files")
        if list(files.value) != list(schema):
            raise files.wrong("", list(files.value), f"the columns {list(schema)}")
        records = {}
        for name, column in schema.items():
            records[name] = files.record(name, f"{segment_folder(number)}/{column_file(name)}")
            size = len(npy_header(column.dtype_name, steps, column.shape)) + steps * column.step_bytes
            if records[name].bytes != size:
                raise files.wrong(name, records[name].bytes, f"{size} bytes for {steps:,} steps")
        segments.append(Segment(number, steps, records))
    max_steps = fields.integer("max_steps", 1, _LIMIT - 1)
    max_trajectories = fields.integer("max_trajectories", 1, 2**31 - 1)
    num_trajectories = fields.integer("num_trajectories", 0, max_trajectories)
    next_sequence = fields.integer("next_sequence", num_trajectories, _LARGEST)
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
        next_sequence=next_sequence,
        num_inserted=fields.integer("num_inserted", num_trajectories, next_sequence),
        num_sampled=fields.integer("num_sampled", 0, _LARGEST),
        num_trajectories=num_trajectories,
        num_steps=fields.integer("num_steps", num_trajectories, max_steps),
        index=fields.record("index", index_file(saves)),
        segments=tuple(segments),
    )


def _rules(fields: _Fields, max_trajectories: int) -> Rules:
    inner = _Fields(fields.get("rules"), fields.path, "rules")
    known = list(Rules().to_json())
    for key in known:
        value = inner.get(key)
        try:
            rules = Rules.from_json({key: value})
        except (SchemaError, ArithmeticError, LookupError, TypeError) as error:
            raise inner.wrong(key, value, f"a rule of a table ({error})") from error
        if rules.rate_limiter is not None and rules.rate_limiter.min_size > max_trajectories:
            expected = f"a min_size of at most max_trajectories={max_trajectories:,}"
            raise inner.wrong(key, value, expected)
    if len(inner.value) != len(known):
        raise inner.wrong("", sorted(inner.value), f"the fields {known}")
    return Rules.from_json(inner.value)


def _schema(fields: _Fields) -> Schema:
    rows = fields.items("schema")
    for row in rows:
        fits = isinstance(row, list) and len(row) == 3 and all(isinstance(part, str) for part in row[:2])
        if not (fits and row[1] in DTYPES and isinstance(row[2], list) and len(row[2]) <= 64):
            raise fields.wrong("schema", row, "[name, dtype, shape] for each column")
        if not all(isinstance(extent, int) and 1 <= extent < _LIMIT for extent in row[2]):
            raise fields.wrong("schema", row, "a shape of positive integers")
    try:
        schema = Schema.from_json(rows)
    except SchemaError as error:
        raise fields.wrong("schema", rows, f"a schema ({error})") from error
    if len(schema) != len(rows):
        raise fields.wrong("schema", list(schema), "columns of different names")
    return schema


# Index -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entries:
    """The trajectories of a checkpoint, oldest first: all [n].

    Attributes:
        sequence: int64, number in order of commitment. length: int64, steps. priority: float32, -1 if none was given.
        times_sampled: int64, how often it has been drawn, where that is counted.
        age: int64, nanoseconds from when it was added to when it was saved; never less than a newer one's.
        segment: int64, number of the segment. first: int64, the first row there.
    """

    sequence: Array
    length: Array
    priority: Array
    times_sampled: Array
    age: Array
    segment: Array
    first: Array

    def take(self, chosen: Array) -> Entries:
        """Those where the boolean array `chosen` is True, or that the integer array `chosen` names."""
        return Entries(*(array[chosen] for array in self.arrays().values()))

    def arrays(self) -> dict[str, Array]:
        """The arrays by name, as the index file has them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def read_entries(directory: str, manifest: Manifest) -> Entries:
    """Read and check the index.

    Raises:
        CheckpointError: it is missing, damaged, or contradicts the manifest.
    """
    import safetensors
    import safetensors.numpy

    path = os.path.join(directory, index_file(manifest.saves))
    limit = manifest.index.bytes
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode) or info.st_size != limit:
            raise CheckpointError(f"{path} has {info.st_size:,} bytes; expected {limit:,}. {REMEDY}")
        with open(path, "rb") as file:
            data = file.read(limit)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {MANIFEST_NAME} beside it names it. {REMEDY}") from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {REMEDY}") from error
    found = xxhash.xxh3_128_hexdigest(data)
    if found != manifest.index.xxh128:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {found}, expected {manifest.index.xxh128}. {REMEDY}"
        )
    try:
        arrays = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is no safetensors file ({error}). {REMEDY}") from error
    names = [field.name for field in dataclasses.fields(Entries)]
    if sorted(arrays) != sorted(names):
        raise CheckpointError(f"{path} has the tensors {sorted(arrays)}; expected {sorted(names)}. {REMEDY}")
    for name in names:
        dtype = np.dtype(np.float32 if name == "priority" else np.int64)
        if arrays[name].dtype != dtype or arrays[name].shape != (manifest.num_trajectories,):
            raise CheckpointError(
                f"{path}: {name!r} is {arrays[name].dtype} {list(arrays[name].shape)}; expected {dtype} "
                f"[{manifest.num_trajectories}]. {REMEDY}"
            )
    entries = Entries(**{name: arrays[name] for name in names})
    problem = _problem(entries, manifest)
    if problem:
        raise CheckpointError(f"{path} contradicts {MANIFEST_NAME}: {problem}. {REMEDY}")
    return entries


def _problem(entries: Entries, manifest: Manifest) -> str | None:
    """What is wrong with the entries, or None."""
    if not len(entries.sequence):
        return None if manifest.num_steps == 0 else "there are steps and no trajectory"
    sequence, length, first = entries.sequence, entries.length, entries.first
    if sequence[0] < 0 or sequence[-1] >= manifest.next_sequence or (np.diff(sequence) <= 0).any():
        return f"sequence numbers do not ascend from 0 to {manifest.next_sequence - 1}"
    if length.min() < 1 or length.max() > manifest.max_steps:
        return f"a length is not between 1 and {manifest.max_steps}"
    if length.sum() != manifest.num_steps:
        return f"lengths add up to {length.sum()}, expected {manifest.num_steps}"
    priority = entries.priority[entries.priority != UNSET]
    if not (np.isfinite(priority) & (priority >= 0)).all():
        return f"a priority is neither {UNSET:g} nor finite and at least 0"
    times, age = entries.times_sampled, entries.age
    most = (manifest.rules.max_times_sampled or _LARGEST_TIMES + 1) - 1
    if times.min() < 0 or times.max() > most:
        return f"a trajectory was drawn less than 0 or more than {most} times"
    if age[0] > _LARGEST or age[-1] < 0 or (age[1:] > age[:-1]).any():
        return f"ages do not descend from {_LARGEST} or less to 0 or more"
    steps = {segment.number: segment.steps for segment in manifest.segments}
    for number in np.unique(entries.segment).tolist():
        if number not in steps:
            return f"segment {number} does not exist"
        here = np.flatnonzero(entries.segment == number)
        here = here[np.argsort(first[here], kind="stable")]
        # By subtraction: the sum of two wild numbers may wrap around.
        if first[here[0]] < 0 or (first[here] > steps[number] - length[here]).any():
            return f"a trajectory lies outside segment {number}, which has {steps[number]} steps"
        if (np.diff(first[here]) < length[here[:-1]]).any():
            return f"two trajectories of segment {number} overlap"
    return None
